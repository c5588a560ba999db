//! Peers that violate the protocol: their channel ends with an error that names the violation; other channels stay
//! open.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::wait::{poll_until, wait_for};
use ferrogin_test_support::{child, dist, libraries};

use super::fake_network::{Crafting, Net};
use super::model::{World, engine};
use crate::carrier::tags::endpoint::{Addr, Completion, Endpoint, Received};
use crate::carrier::tags::provider::Provider;
use crate::proto::Opened;
use crate::proto::wire::{self, Control, Kind, Transport, VERSION};
use crate::{Address, ChannelError, Config, Payload, Reason, Violation};

/// Tags, as they are documented.
const LENGTH: u64 = 1 << 32;
const PAYLOAD: u64 = 1 << 33;
const CONTROL: u64 = 1 << 34;

type Got = Arc<Mutex<Vec<Result<Vec<u8>, ChannelError>>>>;

/// The network between the peers: the fake one, whose time the test advances, or a software card.
enum Network {
    Fake(Net),
    Card(Arc<Libfabric>),
}

/// An engine (0) with a channel to a good peer (engine 1), and a malformed peer, whose messages the test crafts.
struct Peers {
    network: Network,
    world: World,
    address: Address,
    good_channel: u32,
    malformed: Box<dyn Endpoint>,
    to: Addr,
    channel: u32,
    /// Results of the operations on the malformed peer's channel.
    got: Got,
    /// The reason in the last abort that the malformed peer received.
    aborted: Option<Reason>,
}

fn provider(lib: &Arc<Libfabric>) -> Provider {
    Provider::open(lib, "softefa", None, 64).unwrap()
}

/// Returns a hello to the listener at `address`.
pub fn hello(address: &Address) -> Control {
    Control {
        from: 7,
        sender_secret: 1234,
        value: 1 << 20,
        ..Control::new(Kind::Hello, address.listener, address.secret.unwrap_or(0))
    }
}

impl Peers {
    fn new() -> Self {
        Self::over(Network::Fake(Net::new(1, false)))
    }

    fn over(network: Network) -> Self {
        let (config, now) =
            (Config { max_message: 1000, lost_after: Duration::from_secs(5), ..Config::default() }, Instant::now());
        let (mut engines, net) = match &network {
            Network::Fake(net) => ([(); 2].map(|()| engine(net.endpoint(), &config, now)), net.clone()),
            Network::Card(lib) => ([(); 2].map(|()| engine(provider(lib), &config, now)), Net::new(1, false)),
        };
        let (_, address) = engines[0].listen().unwrap();
        let mut world = World::of(net, engines.into(), now);
        let (good_channel, _) = world.connect(1);
        let malformed: Box<dyn Endpoint> = Box::new(Net::new(1, false).endpoint());
        let (to, got) = (Addr(0), Got::default());
        let mut peers = Self { network, world, address, good_channel, malformed, to, channel: 0, got, aborted: None };
        peers.meet();
        peers
    }

    /// Opens a channel to a new malformed peer, whose first message is the last before the ids wrap, and reads from it.
    fn meet(&mut self) {
        self.malformed = match &self.network {
            Network::Fake(net) => Box::new(net.endpoint()),
            Network::Card(lib) => Box::new(provider(lib)),
        };
        (self.to, self.got, self.aborted) = (self.malformed.insert(&self.address.name).unwrap(), Got::default(), None);
        let opened: Arc<Mutex<Option<u32>>> = Arc::default();
        let of_call = Arc::clone(&opened);
        let accepted = move |result: Result<Opened, _>| *of_call.lock().unwrap() = Some(result.unwrap().channel);
        self.world.engines[0].accept(self.address.listener, 0, Box::new(accepted));
        let hello = Control { id: u32::MAX, ..hello(&self.address) };
        self.send(CONTROL | 1, hello.emit(&self.malformed.abilities().name));
        self.malformed.receive_control(self.to);
        self.run_until("a channel", |_| opened.lock().unwrap().is_some());
        self.channel = opened.lock().unwrap().unwrap();
        for _ in 0..4 {
            let got = Arc::clone(&self.got);
            let done =
                move |result: Result<(u64, Vec<u8>), _>| got.lock().unwrap().push(result.map(|(_, bytes)| bytes));
            self.world.engines[0].read(self.channel, 0, Vec::new(), Box::new(done));
        }
        self.send(PAYLOAD | u64::from(u32::MAX), b"good".to_vec());
        self.send(LENGTH | u64::from(u32::MAX), 4u64.to_le_bytes().to_vec());
        self.run_until("a message", |peers| !peers.got.lock().unwrap().is_empty());
        assert_eq!(self.got.lock().unwrap().pop(), Some(Ok(b"good".to_vec())));
    }

    /// Returns the secret of the malformed peer's channel.
    fn secret(&mut self) -> u64 {
        self.world.engines[0].state_of(self.channel).map_or(0, |state| state.secret)
    }

    fn send(&mut self, tag: u64, bytes: Vec<u8>) {
        self.malformed.post(self.to, tag, bytes);
    }

    /// Advances the time; the malformed peer answers pings and keeps the reason of an abort.
    fn step(&mut self) {
        let by = match self.network {
            Network::Fake(_) => Duration::from_millis(100),
            Network::Card(_) => self.world.now.elapsed(),
        };
        self.world.step(by);
        for completion in self.malformed.completions() {
            let Completion::Received(Received { bytes, .. }) = completion else { continue };
            self.malformed.receive_control(self.to);
            let (control, _) = Control::parse(&bytes).unwrap();
            match control.kind {
                Kind::Ping => {
                    let secret = self.secret();
                    let pong = Control { kind: Kind::Pong, to: control.from, from: 7, secret, ..control }.emit(&[]);
                    self.send(CONTROL | Kind::Pong as u64, pong);
                }
                Kind::Abort => {
                    assert_eq!((control.to, control.secret), (7, 1234));
                    self.aborted = Some(Reason::of(control.value));
                }
                _ => {}
            }
        }
    }

    fn run(&mut self, steps: u32) {
        (0..steps).for_each(|_| self.step());
    }

    fn run_until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        poll_until(what, || {
            self.step();
            done(self)
        });
    }

    /// Asserts that the malformed peer's channel, its reads and a later write end with one error, which satisfies `is`,
    /// and that the good one works.
    fn assert_ended(&mut self, is: impl Fn(&ChannelError) -> bool) {
        self.run_until("the end of the reads", |peers| peers.got.lock().unwrap().len() == 3);
        let got = Arc::clone(&self.got);
        let done = move |result: Result<Payload, _>| got.lock().unwrap().push(result.map(Payload::into_vec));
        self.world.engines[0].write(self.channel, 0, Payload::from(b"after the end"), Box::new(done));
        self.run_until("the end of the write", |peers| peers.got.lock().unwrap().len() == 4);
        let ends = std::mem::take(&mut *self.got.lock().unwrap());
        let error = ends[0].as_ref().expect_err("with an error");
        let peer = wire::label(&self.malformed.abilities().name);
        assert!(is(error) && error.to_string().contains(&*peer), "{error}");
        assert!(ends.iter().all(|end| end.as_ref() == Err(error)), "{ends:?}");
        self.assert_good_channel_works();
    }

    fn assert_good_channel_works(&mut self) {
        let got: Arc<Mutex<Option<Vec<u8>>>> = Arc::default();
        let of_call = Arc::clone(&got);
        let read =
            Box::new(move |result: Result<(u64, Vec<u8>), _>| *of_call.lock().unwrap() = Some(result.unwrap().1));
        self.world.engines[0].read(self.good_channel, 0, Vec::new(), read);
        self.world.engines[1].write(0, 0, Payload::from(b"fine"), Box::new(|result| drop(result.unwrap())));
        self.run_until("a message", |_| got.lock().unwrap().is_some());
        assert_eq!(got.lock().unwrap().as_deref(), Some(&b"fine"[..]));
    }

    /// Sends the messages, and asserts that they end the channel with the violation and that the peer is told.
    fn assert_violation(&mut self, messages: &[(u64, &[u8])], expected: Violation) {
        messages.iter().for_each(|(tag, bytes)| self.send(*tag, bytes.to_vec()));
        self.assert_ended(|error| match error {
            ChannelError::Protocol { violation: Violation::Missing { id, missing, .. }, .. } => {
                matches!(expected, Violation::Missing { id: of, missing: part, .. } if (of, part) == (*id, *missing))
            }
            ChannelError::Protocol { violation, .. } => *violation == expected,
            _ => false,
        });
        self.run_until("an abort", |peers| peers.aborted.is_some());
        assert_eq!(self.aborted, Some(Reason::Violation));
        self.meet();
    }
}

#[test]
fn well_formed_message_is_delivered() {
    let mut peers = Peers::new();
    peers.send(PAYLOAD, b"abc".to_vec());
    peers.send(LENGTH, 3u64.to_le_bytes().to_vec());
    peers.run(3);
    assert_eq!(*peers.got.lock().unwrap(), vec![Ok(b"abc".to_vec())]);
}

#[test]
fn close_with_message_in_flight_ends_reads_in_order() {
    let mut peers = Peers::new();
    peers.send(LENGTH, 3u64.to_le_bytes().to_vec());
    let secret = peers.secret();
    let close = Control { from: 7, id: 1, ..Control::new(Kind::Close, peers.channel, secret) };
    peers.send(CONTROL | Kind::Close as u64, close.emit(&[]));
    peers.run(3);
    assert_eq!(*peers.got.lock().unwrap(), vec![]);
    peers.send(PAYLOAD, b"abc".to_vec());
    peers.run(3);
    let got = peers.got.lock().unwrap();
    assert_eq!((got.len(), &got[0]), (3, &Ok(b"abc".to_vec())));
    assert!(got[1..].iter().all(|end| matches!(end, Err(ChannelError::Closed { .. }))));
}

/// A hello that arrives before the close of the peer's last channel doesn't abort that channel.
#[test]
fn hello_is_handled_after_a_close_of_its_poll() {
    // The network chooses which of the two comes first.
    for seed in 0..8 {
        let mut peers = Peers::over(Network::Fake(Net::new(seed, false)));
        let second = Control { from: 8, ..hello(&peers.address) };
        peers.send(CONTROL | 1, second.emit(&peers.malformed.abilities().name));
        let nonce = wait_for("a challenge", || {
            peers.world.step(Duration::ZERO);
            peers.malformed.completions().into_iter().find_map(|completion| {
                let Completion::Received(Received { bytes, .. }) = completion else { return None };
                peers.malformed.receive_control(peers.to);
                let (control, _) = Control::parse(&bytes)?;
                (control.kind == Kind::PathChallenge).then_some(control.sender_secret)
            })
        });
        let response = Control::new(Kind::PathResponse, 0, nonce);
        let close = Control { from: 7, ..Control::new(Kind::Close, peers.channel, peers.secret()) };
        for control in [response, close] {
            peers.send(CONTROL | control.kind as u64, control.emit(&[]));
        }
        peers.assert_ended(|error| matches!(error, ChannelError::Closed { .. }));
    }
}

const THREE: &[u8] = &3u64.to_le_bytes();

fn assert_violations(mut peers: Peers) {
    use Violation::{LengthSize, OutOfTurn, PayloadLength, PayloadTooLong, TooLong, UnknownTag};
    peers.assert_violation(&[(LENGTH, THREE), (PAYLOAD, b"abcd")], PayloadTooLong { id: 0, stated: 3 });
    peers.assert_violation(&[(LENGTH, THREE), (PAYLOAD, &[5; 300_000])], PayloadTooLong { id: 0, stated: 3 });
    peers.assert_violation(&[(PAYLOAD, b"a"), (LENGTH, &[0; 8])], PayloadTooLong { id: 0, stated: 0 });
    peers.assert_violation(&[(LENGTH, THREE), (PAYLOAD, b"ab")], PayloadLength { id: 0, stated: 3, got: 2 });
    peers.assert_violation(
        &[(PAYLOAD, b"abc"), (LENGTH, &[4, 0, 0, 0, 0, 0, 0, 0])],
        PayloadLength { id: 0, stated: 4, got: 3 },
    );
    for len in [1001, 1 << 32, 1 << 63, u64::MAX] {
        peers.assert_violation(&[(LENGTH, &len.to_le_bytes())], TooLong { id: 0, len, max: 1000 });
    }
    for bytes in [0, 1, 7, 9, 16, 17, 100] {
        peers.assert_violation(&[(LENGTH | 5, &vec![0; bytes])], LengthSize { id: 5, bytes: bytes.min(17) });
    }
    for (first, id) in [(1, 1), (1, u32::MAX), (0, 1 << 31), (0, 1 << 17)] {
        let messages = [first, id].map(|id| (LENGTH | u64::from(id), THREE));
        peers.assert_violation(&messages, OutOfTurn { id, expected: 0 });
    }
    for (tag, len) in [(0, 0), (1, 9), (3 << 32 | 5, 3), (5 << 32, 9), (1 << 40, 300_000), (1 << 63, 9), (u64::MAX, 9)]
    {
        peers.assert_violation(&[(tag, &vec![1; len])], UnknownTag { tag });
    }
    for bytes in [&[][..], &[0; 48], &[0xff; 148], &[0xff; 3000], b"FGC1"] {
        peers.assert_violation(&[(CONTROL | 9, bytes)], Violation::Control);
    }
    // Of an endpoint without a channel, nothing is answered.
    for bytes in [&[][..], b"FGC1", &[0; 48], &[0xff; 148], &[7; 5000]] {
        peers.malformed.post(peers.to, CONTROL | 1, bytes.to_vec());
    }
    peers.assert_good_channel_works();
}

#[test]
fn violation_ends_channel() {
    assert_violations(Peers::new());
}

fn assert_missing_parts(mut peers: Peers) {
    let missing = |id, missing| Violation::Missing { id, missing, waited: Duration::ZERO };
    peers.assert_violation(&[(LENGTH, THREE)], missing(0, "payload"));
    peers.assert_violation(&[(PAYLOAD | 4, b"abc")], missing(4, "length"));
    peers.assert_violation(&[(LENGTH | 1, &[0; 8]), (PAYLOAD | 1, b"")], missing(0, "length"));
}

#[test]
fn missing_part_of_message_ends_channel() {
    assert_missing_parts(Peers::new());
}

/// Runs `check` with each libfabric, in a process that has the software card.
fn over_the_software_card(test: &str, check: fn(Peers)) {
    if let Some(dist) = dist(test, &["libsoftefa-fi.so"]) {
        child::run(test, &[("FI_PROVIDER_PATH", dist.to_str().unwrap())], || {
            libraries(test).into_iter().for_each(|lib| check(Peers::over(Network::Card(lib))));
        });
    }
}

#[test]
fn violation_over_the_software_card_ends_channel() {
    over_the_software_card("violation_over_the_software_card_ends_channel", assert_violations);
}

#[test]
#[ignore = "make check"]
fn missing_part_over_the_software_card_ends_channel() {
    over_the_software_card("missing_part_over_the_software_card_ends_channel", assert_missing_parts);
}

/// At most one unsent answer of each kind is kept per peer.
#[test]
fn unsendable_pongs_do_not_accumulate() {
    let mut peers = Peers::new();
    let secret = peers.secret();
    peers.world.net.set_full(0, true);
    for _ in 0..100 {
        let ping = Control::new(Kind::Ping, peers.channel, secret).emit(&[]);
        peers.send(CONTROL | Kind::Ping as u64, ping);
        peers.world.step(Duration::ZERO);
    }
    assert!(!peers.world.engines[0].carrier().is_idle());
    let before = peers.world.net.unmatched(2);
    peers.world.net.set_full(0, false);
    (0..2).for_each(|_| peers.world.step(Duration::ZERO));
    assert!(peers.world.engines[0].carrier().is_idle());
    let received = peers.malformed.completions().iter().filter(|end| matches!(end, Completion::Received(_))).count();
    let answers = received + peers.world.net.unmatched(2) - before;
    assert!((1..10).contains(&answers), "{answers}");
}

#[test]
fn control_message_with_wrong_secret_is_ignored() {
    let mut peers = Peers::new();
    for kind in [Kind::Welcome, Kind::Refuse, Kind::Ping, Kind::Close, Kind::CloseAck, Kind::Abort] {
        let forged = Control::new(kind, peers.good_channel, 99);
        peers.send(CONTROL | kind as u64, forged.emit(&[]));
    }
    peers.run(5);
    let len = u64::MAX;
    peers.assert_violation(&[(LENGTH, &len.to_le_bytes())], Violation::TooLong { id: 0, len, max: 1000 });
}

/// Returns the reason with which a listener refuses a hello of `version`, if it answers.
fn answer_to(version: u8, spoil: impl Fn(&mut Address)) -> Option<Reason> {
    let mut world = World::new(1, false, 1, &Config::default());
    let mut malformed = world.net.endpoint();
    let to = malformed.insert(b"fake-0").unwrap();
    let (_, mut address) = world.engines[0].listen().unwrap();
    spoil(&mut address);
    let bytes = Control { version, ..hello(&address) }.emit(b"fake-1");
    malformed.post(to, CONTROL | 1, bytes);
    malformed.receive_control(to);
    for _ in 0..5 {
        world.step(Duration::ZERO);
        for completion in malformed.completions() {
            if let Completion::Received(Received { bytes, .. }) = completion {
                let (answer, _) = Control::parse(&bytes).unwrap();
                assert_eq!((answer.kind, answer.to, answer.secret), (Kind::Refuse, 7, 1234));
                return Some(Reason::of(answer.value));
            }
        }
    }
    None
}

#[test]
fn hello_is_refused_with_its_reason() {
    assert_eq!(answer_to(VERSION + 1, |_| ()), Some(Reason::Version));
    assert_eq!(answer_to(VERSION - 1, |_| ()), Some(Reason::Version));
}

#[test]
fn hello_without_secret_gets_no_answer() {
    for version in [VERSION, VERSION + 1] {
        assert_eq!(answer_to(version, |address| address.secret = address.secret.map(|secret| secret ^ 1)), None);
        assert_eq!(answer_to(version, |address| address.listener = 9), None);
    }
}

/// Connects to `address` while its endpoint sends `answer`; returns the error.
fn connect_error(address: &Address, answer: Option<Control>) -> ChannelError {
    let mut world = World::new(1, false, 1, &Config::default());
    let mut other = world.net.endpoint();
    let to = other.insert(b"fake-0").unwrap();
    let got: Arc<Mutex<Option<ChannelError>>> = Arc::default();
    let of_call = Arc::clone(&got);
    let done = Box::new(move |opened: Result<_, ChannelError>| *of_call.lock().unwrap() = opened.err());
    world.engines[0].connect(address, Duration::from_secs(10), done);
    if let Some(answer) = answer {
        let secret = world.engines[0].state_of(0).map(|state| state.secret).unwrap();
        let tag = CONTROL | answer.kind as u64;
        other.post(to, tag, Control { secret, ..answer }.emit(&[]));
    }
    for _ in 0..5 {
        world.step(Duration::ZERO);
        other.completions();
    }
    got.lock().unwrap().take().expect("the connect ends")
}

fn listener_address(transport: Transport) -> Address {
    Address { transport, listener: 0, secret: Some(5), name: b"fake-1".as_slice().into() }
}

#[test]
fn connect_to_listener_of_another_transport_fails_at_once() {
    let error = connect_error(&listener_address(Transport::Tcp), None);
    assert!(matches!(error, ChannelError::BadAddress { .. }), "{error}");
}

#[test]
fn connect_to_other_version_is_refused() {
    let welcome = Control { version: VERSION + 1, sender_secret: 1, value: 10, ..Control::new(Kind::Welcome, 0, 0) };
    let error = connect_error(&listener_address(Transport::Tags), Some(welcome));
    assert!(matches!(error, ChannelError::Refused { reason: Reason::Version, .. }), "{error}");
}
