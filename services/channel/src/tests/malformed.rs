//! Peers that violate the protocol: their channel ends with an error that names the violation; other channels stay
//! open.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fake_network::Fake;
use super::model::World;
use crate::carrier::tags::endpoint::{Addr, CONTROL, Completion, ID_MASK, LENGTH, PAYLOAD, Pattern, Received};
use crate::proto::Opened;
use crate::proto::wire::{Control, Kind, Transport, VERSION};
use crate::{ChannelError, Config, Payload, Reason, Violation};

type Got = Arc<Mutex<Vec<Result<Vec<u8>, ChannelError>>>>;

/// An engine (0) with a channel to a good peer (engine 1), and a malformed peer, whose messages the test crafts.
struct Peers {
    world: World,
    malformed: Fake,
    to: Addr,
    /// Results of the reads on the malformed peer's channel.
    got: Got,
    honest_channel: u32,
    channel: u32,
}

/// Returns a hello to the listener at `address`.
pub fn hello(address: &crate::Address) -> Control {
    Control {
        from: 7,
        sender_secret: 1234,
        value: 1 << 20,
        ..Control::new(Kind::Hello, address.listener, address.secret.unwrap_or(0))
    }
}

impl Peers {
    fn new() -> Self {
        let mut world = World::new(1, false, 2, &Config { max_message: 1000, ..Config::default() });
        let (honest_channel, _) = world.connect(1);
        let mut malformed = world.net.endpoint();
        let to = malformed.peer(b"fake-0");
        let (_, address) = world.engines[0].listen().unwrap();
        let opened: Arc<Mutex<Option<u32>>> = Arc::default();
        let of_call = Arc::clone(&opened);
        let accepted = move |result: Result<Opened, _>| *of_call.lock().unwrap() = Some(result.unwrap().channel);
        world.engines[0].accept(address.listener, 0, Box::new(accepted));
        let mut peers = Self { world, malformed, to, got: Arc::default(), honest_channel, channel: 0 };
        let name = peers.malformed.abilities.name.clone();
        peers.send(CONTROL | 1, hello(&address).emit(&name));
        peers.run(10);
        peers.channel = opened.lock().unwrap().take().expect("the channel opens");
        for _ in 0..3 {
            let got = Arc::clone(&peers.got);
            let done =
                move |result: Result<(u64, Vec<u8>), _>| got.lock().unwrap().push(result.map(|(_, bytes)| bytes));
            peers.world.engines[0].read(peers.channel, 0, Vec::new(), Box::new(done));
        }
        peers
    }

    /// Returns the secret of the malformed peer's channel.
    fn secret(&mut self) -> u64 {
        self.world.engines[0].state_of(self.channel).map_or(0, |state| state.secret)
    }

    fn send(&mut self, tag: u64, bytes: Vec<u8>) {
        self.malformed.post(self.to, tag, bytes);
    }

    /// Advances the time; the malformed peer answers pings if `answers`.
    fn run_as(&mut self, steps: u32, answers: bool) {
        for _ in 0..steps {
            self.world.step(Duration::from_millis(100));
            if answers {
                let everything = Pattern { tag: CONTROL, ignore: ID_MASK };
                self.malformed.receive_bytes(Some(self.to), everything, 200);
                for completion in self.malformed.completions() {
                    if let Completion::Received(Received { bytes, .. }) = completion
                        && let Some((ping, _)) =
                            Control::parse(&bytes).filter(|(control, _)| control.kind == Kind::Ping)
                    {
                        let secret = self.secret();
                        let pong = Control { kind: Kind::Pong, to: ping.from, from: 7, secret, ..ping }.emit(&[]);
                        self.send(CONTROL | Kind::Pong as u64, pong);
                    }
                }
            }
        }
    }

    fn run(&mut self, steps: u32) {
        self.run_as(steps, false);
    }

    /// Asserts that the malformed peer's channel and its reads ended with an error that satisfies `is`, and that the
    /// good one works.
    fn ended(mut self, is: impl Fn(&ChannelError) -> bool) {
        self.run(20);
        let got = std::mem::take(&mut *self.got.lock().unwrap());
        assert_eq!(got.len(), 3, "every read ends once");
        for result in &got {
            let error = result.as_ref().expect_err("with an error");
            assert!(is(error) && error.to_string().contains("fake-2"), "{error}");
        }
        let echoed: Arc<Mutex<Option<Vec<u8>>>> = Arc::default();
        let of_call = Arc::clone(&echoed);
        let read =
            Box::new(move |result: Result<(u64, Vec<u8>), _>| *of_call.lock().unwrap() = Some(result.unwrap().1));
        self.world.engines[0].read(self.honest_channel, 0, Vec::new(), read);
        self.world.engines[1].write(0, 0, Payload::from(b"fine"), Box::new(|result| drop(result.unwrap())));
        self.run(10);
        assert_eq!(echoed.lock().unwrap().as_deref(), Some(&b"fine"[..]));
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

const THREE: &[u8] = &3u64.to_le_bytes();

#[test]
fn violation_ends_channel() {
    use Violation::{LengthSize, OutOfTurn, PayloadLength, PayloadTooLong, TooLong, UnknownTag};
    let assert_violation = |messages: &[(u64, &[u8])], expected: Violation| {
        let mut peers = Peers::new();
        messages.iter().for_each(|(tag, bytes)| peers.send(*tag, bytes.to_vec()));
        peers.ended(|error| matches!(error, ChannelError::Protocol { violation, .. } if *violation == expected));
    };
    assert_violation(&[(LENGTH, THREE), (PAYLOAD, b"abcd")], PayloadTooLong { id: 0, stated: 3 });
    assert_violation(&[(LENGTH, THREE), (PAYLOAD, b"ab")], PayloadLength { id: 0, stated: 3, got: 2 });
    for len in [1001, 1 << 32, 1 << 63, u64::MAX] {
        assert_violation(&[(LENGTH, &len.to_le_bytes())], TooLong { id: 0, len, max: 1000 });
    }
    for bytes in [0, 1, 7, 9, 16, 17, 100] {
        assert_violation(&[(LENGTH | 5, &vec![0; bytes])], LengthSize { id: 5, bytes: bytes.min(17) });
    }
    for (first, id) in [(1, 1), (1, u32::MAX), (0, 1 << 31), (0, 1 << 17)] {
        let messages = [first, id].map(|id| (LENGTH | u64::from(id), THREE));
        assert_violation(&messages, OutOfTurn { id, expected: 0 });
    }
    for tag in [0, 1, 3 << 32, 5 << 32, 1 << 35 | 3, 1 << 63, u64::MAX] {
        assert_violation(&[(tag, &[1; 100])], UnknownTag { tag });
    }
    for bytes in [&[][..], &[0; 48], &[0xff; 148], b"FGC1"] {
        assert_violation(&[(CONTROL | 9, bytes)], Violation::Control);
    }
}

#[test]
fn missing_part_of_message_ends_channel() {
    let assert_missing = |messages: &[(u64, &[u8])], part: &'static str, expected: u32| {
        let mut peers = Peers::new();
        messages.iter().for_each(|(tag, bytes)| peers.send(*tag, bytes.to_vec()));
        peers.run_as(150, true);
        peers.ended(|error| match error {
            ChannelError::Protocol { violation: Violation::Missing { id, missing, .. }, .. } => {
                (*id, *missing) == (expected, part)
            }
            _ => false,
        });
    };
    assert_missing(&[(LENGTH, THREE)], "payload", 0);
    assert_missing(&[(PAYLOAD | 4, b"abc")], "length", 4);
    assert_missing(&[(LENGTH | 1, &[0; 8]), (PAYLOAD | 1, b"")], "length", 0);
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
        peers.run(1);
    }
    assert!(!peers.world.engines[0].carrier().is_idle());
    let before = peers.world.net.unmatched(2);
    peers.world.net.set_full(0, false);
    peers.run(2);
    assert!(peers.world.engines[0].carrier().is_idle());
    let unsent = peers.world.net.unmatched(2) - before;
    assert!((1..10).contains(&unsent), "{unsent}");
}

#[test]
fn control_message_with_wrong_secret_is_ignored() {
    let mut peers = Peers::new();
    for kind in [Kind::Welcome, Kind::Refuse, Kind::Ping, Kind::Close, Kind::CloseAck, Kind::Abort] {
        let forged = Control::new(kind, peers.honest_channel, 99);
        peers.send(CONTROL | kind as u64, forged.emit(&[]));
    }
    peers.run(5);
    peers.send(LENGTH, u64::MAX.to_le_bytes().to_vec());
    let too_long = Violation::TooLong { id: 0, len: u64::MAX, max: 1000 };
    peers.ended(|error| matches!(error, ChannelError::Protocol { violation, .. } if *violation == too_long));
}

/// Returns the reason with which a listener refuses a hello of `version`, if it answers.
fn answer_to(version: u8, spoil: impl Fn(&mut crate::Address)) -> Option<Reason> {
    let mut world = World::new(1, false, 1, &Config::default());
    let mut malformed = world.net.endpoint();
    let to = malformed.peer(b"fake-0");
    let (_, mut address) = world.engines[0].listen().unwrap();
    spoil(&mut address);
    let bytes = Control { version, ..hello(&address) }.emit(b"fake-1");
    malformed.post(to, CONTROL | 1, bytes);
    malformed.receive_bytes(Some(to), Pattern { tag: CONTROL, ignore: ID_MASK }, 200);
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
fn connect_error(address: &crate::Address, answer: Option<Control>) -> ChannelError {
    let mut world = World::new(1, false, 1, &Config::default());
    let mut other = world.net.endpoint();
    let to = other.peer(b"fake-0");
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

fn listener_address(transport: Transport) -> crate::Address {
    crate::Address { transport, listener: 0, secret: Some(5), name: b"fake-1".as_slice().into() }
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
