//! Peers that violate the protocol, over real providers. A raw endpoint sends a listener the documented bytes, and then
//! a sequence that no channel sends: its channel must end with an error that names the peer and the violation.
//! Meanwhile a good client and other malformed peers use the same listener.
#![allow(unsafe_code)]

pub mod frames;
mod raw;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::common::{LIMIT, Way, libraries, with_card};
use ferrogin_channel::{Address, Channel, ChannelError, Config, Listener, Reactor, Reason, Violation};
use ferrogin_test_support::wait::{wait_for, wait_until};
use frames::{Frames, MESSAGE, header};
use raw::{CONTROL, Raw, Tagged};

/// Tag of the length of message 0.
const LENGTH: u64 = 1 << 32;
/// Tag of the payload of message 0.
const PAYLOAD: u64 = 1 << 33;
/// The longest message that the good side accepts, in bytes.
const MAX: usize = 1 << 20;
/// Reads on the good side that wait for a malformed peer.
const READS: usize = 3;

/// Versions of the control messages, and of what a TCP connection carries.
const VERSION: u8 = 6;
const TCP_VERSION: u8 = 7;
const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const REFUSE: u8 = 3;
const PING: u8 = 4;
const PONG: u8 = 5;
const ABORT: u8 = 8;

/// A control message in the documented format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Control {
    pub version: u8,
    pub kind: u8,
    pub to: u32,
    pub from: u32,
    pub secret: u64,
    pub sender_secret: u64,
    pub value: u64,
    pub id: u32,
    pub name: Vec<u8>,
}

impl Control {
    fn emit(&self) -> Vec<u8> {
        let parts: [&[u8]; 11] = [
            b"FGC1",
            &[self.version, 0],
            &[self.kind, self.name.len() as u8],
            &self.to.to_le_bytes(),
            &self.from.to_le_bytes(),
            &self.secret.to_le_bytes(),
            &self.sender_secret.to_le_bytes(),
            &self.value.to_le_bytes(),
            &self.id.to_le_bytes(),
            &[0; 4],
            &self.name,
        ];
        parts.concat()
    }

    fn parse(bytes: &[u8]) -> Self {
        assert!(bytes.len() >= 48 && bytes[..4] == *b"FGC1", "{bytes:?}");
        let (word, long) = (|at| word(bytes, at), |at| long(bytes, at));
        assert_eq!(bytes.len(), 48 + usize::from(bytes[7]));
        Self {
            version: bytes[4],
            kind: bytes[6],
            to: word(8),
            from: word(12),
            secret: long(16),
            sender_secret: long(24),
            value: long(32),
            id: word(40),
            name: bytes[48..].to_vec(),
        }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// A raw peer and its channel.
struct MalformedPeer<R> {
    raw: R,
    /// The other end's number for the channel, and its secret.
    remote: (u32, u64),
    /// The reason in the other end's abort.
    aborted: Option<u64>,
}

const OWN_NUMBER: u32 = 7;
const OWN_SECRET: u64 = 0x1234_5678_9abc_def0;

impl<R: Raw> MalformedPeer<R> {
    /// Sends a hello, modified by `change`, to the listener with that address.
    fn hello(raw: R, address: &Address, change: impl FnOnce(&mut Control)) -> Self {
        let bytes = address.to_bytes();
        let mut hello = Control {
            version: VERSION,
            kind: HELLO,
            to: word(&bytes, 8),
            from: OWN_NUMBER,
            secret: long(&bytes, 16),
            sender_secret: OWN_SECRET,
            value: 1 << 20,
            id: 0,
            name: raw.name(),
        };
        change(&mut hello);
        let mut this = Self { raw, remote: (0, 0), aborted: None };
        this.raw.set_peer(&bytes[24..24 + usize::from(bytes[6])], long(&bytes, 16));
        this.raw.send(CONTROL | u64::from(HELLO), &hello.emit());
        this
    }

    /// Returns the next control message other than a ping or an abort; answers pings.
    fn receive(&mut self) -> Option<Control> {
        let mut other = None;
        for bytes in self.raw.receive() {
            let received = Control::parse(&bytes);
            assert_eq!((received.version, received.to, received.secret), (VERSION, OWN_NUMBER, OWN_SECRET));
            match received.kind {
                PING => self.send_control(PONG),
                ABORT => self.aborted = Some(received.value),
                _ => other = Some(received),
            }
        }
        other
    }

    fn send_control(&mut self, kind: u8) {
        let (to, secret) = self.remote;
        let control = Control { version: VERSION, kind, to, from: OWN_NUMBER, secret, ..Control::default() };
        self.raw.send(CONTROL | u64::from(kind), &control.emit());
    }

    /// Waits for the next control message.
    fn answer(&mut self) -> Control {
        wait_for("an answer", || self.receive())
    }

    fn send(&mut self, (tag, bytes): Message) {
        self.raw.send(tag, &bytes);
    }
}

fn config(way: &Way) -> Config {
    Config { max_message: MAX, ping_after: Duration::from_millis(200), ..way.config() }
}

/// A client that exchanges messages with an echo, about a thousand per second.
struct Good {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Good {
    fn start(config: &Config, listener: &Listener) -> Self {
        let reactor = Reactor::open(config).unwrap();
        let accepted = listener.accept();
        let channel = reactor.connect(listener.address()).wait_for(LIMIT).unwrap();
        echo(accepted.wait_for(LIMIT).unwrap());
        let (rounds, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (thread_rounds, until) = (Arc::clone(&rounds), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let _reactor = reactor;
            while !until.load(Ordering::Relaxed) {
                let round = thread_rounds.fetch_add(1, Ordering::Relaxed) as usize;
                let bytes: Vec<u8> = (0..[0, 8, 3000, 200_000][round % 4]).map(|at| (at * 7 + round) as u8).collect();
                let sent = channel.send(bytes.clone());
                assert!(channel.receive().wait_for(LIMIT).unwrap() == bytes, "round {round}");
                sent.wait_for(LIMIT).unwrap();
                // The malformed peers need the CPU too.
                thread::sleep(Duration::from_millis(1));
            }
        });
        Self { rounds, stop, thread }
    }

    /// Asserts that it still gets answers.
    fn lives(&self) {
        let before = self.rounds.load(Ordering::Relaxed);
        wait_until("answer for the good client", || {
            self.rounds.load(Ordering::Relaxed) > before + 4 || self.thread.is_finished()
        });
        assert!(!self.thread.is_finished(), "the good client lives");
    }

    fn end(self) {
        self.lives();
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

pub fn echo(channel: Channel) {
    channel.clone().read(move |result| {
        if let Ok(bytes) = result {
            channel.write(bytes, |_| ());
            echo(channel);
        }
    });
}

/// A tag and bytes.
type Message = (u64, Vec<u8>);

fn length(id: u32, stated: u64) -> Message {
    (LENGTH | u64::from(id), stated.to_le_bytes().to_vec())
}

fn payload(id: u32, bytes: &[u8]) -> Message {
    (PAYLOAD | u64::from(id), bytes.to_vec())
}

/// What a peer sends on its open channel, and the violation that must be detected.
struct Case {
    name: &'static str,
    messages: Vec<Message>,
    expected: fn(&Violation) -> bool,
}

macro_rules! case {
    ($name:literal, [$($message:expr),*], $expected:pat) => {
        Case { name: $name, messages: vec![$($message),*], expected: |violation| matches!(violation, $expected) }
    };
}

/// Violations that are detected only after the time limit for an answer.
#[rustfmt::skip]
fn missing_parts() -> Vec<Case> {
    use Violation::Missing;
    vec![
        case!("a length and no payload", [length(0, 100)], Missing { id: 0, missing: "payload", .. }),
        case!("a payload and no length", [payload(0, b"abc")], Missing { id: 0, missing: "length", .. }),
        case!("a message left out", [length(1, 3), payload(1, b"abc")], Missing { id: 0, missing: "length", .. }),
    ]
}

/// Violations that are detected at once.
#[rustfmt::skip]
fn violations() -> Vec<Case> {
    use Violation::{LengthSize, OutOfTurn, PayloadLength, PayloadTooLong, TooLong, UnknownTag};
    let three = || length(0, 3);
    vec![
        case!("a payload longer than its length", [three(), payload(0, b"abcd")], PayloadTooLong { id: 0, stated: 3 }),
        case!("a much longer payload", [three(), payload(0, &[5; 300_000])], PayloadTooLong { id: 0, stated: 3 }),
        case!("a payload where there is none", [length(0, 0), payload(0, b"a")], PayloadTooLong { id: 0, stated: 0 }),
        case!("a short payload", [payload(0, b"abc"), length(0, 4)], PayloadLength { id: 0, stated: 4, got: 3 }),
        case!("a length of 2^63", [length(0, 1 << 63)], TooLong { id: 0, len: 0x8000_0000_0000_0000, max: MAX }),
        case!("a length of one too many", [length(0, MAX as u64 + 1)], TooLong { id: 0, len: 0x10_0001, max: MAX }),
        case!("a length of 7 bytes", [(LENGTH | 2, vec![0; 7])], LengthSize { id: 2, bytes: 7 }),
        case!("a length of 9 bytes", [(LENGTH, vec![0; 9])], LengthSize { id: 0, bytes: 9 }),
        case!("a length of 100 bytes", [(LENGTH | 1, vec![0; 100])], LengthSize { id: 1, bytes: 17 }),
        case!("an id twice", [length(1, 3), length(1, 3)], OutOfTurn { id: 1, expected: 0 }),
        case!("an id from nowhere", [length(1 << 31, 3)], OutOfTurn { id: 0x8000_0000, expected: 0 }),
        case!("tag 0", [(0, Vec::new())], UnknownTag { tag: 0 }),
        case!("a tag with two bits", [(3 << 32 | 5, b"abc".to_vec())], UnknownTag { tag: 0x3_0000_0005 }),
        case!("the highest tag", [(1 << 63, vec![1; 100])], UnknownTag { tag: 0x8000_0000_0000_0000 }),
        case!("a long unknown tag", [(1 << 40, vec![1; 300_000])], UnknownTag { tag: 0x100_0000_0000 }),
        case!("nonsense for control", [(CONTROL | 9, vec![0xff; 60])], Violation::Control),
        case!("too much for control", [(CONTROL | 9, vec![0xff; 3000])], Violation::Control),
    ]
}

/// Those that frames have: a message is one frame, and its place is its id.
#[rustfmt::skip]
fn violations_of_frames() -> Vec<Case> {
    use Violation::TooLong;
    vec![
        case!("a byte too many", [payload(0, &[5; MAX + 1])], TooLong { id: 0, len: 0x10_0001, max: MAX }),
        case!("nonsense for control", [(CONTROL | 9, vec![0xff; 60])], Violation::Control),
        case!("too much for control", [(CONTROL | 9, vec![0xff; 3000])], Violation::Control),
    ]
}

/// A peer's channel on the good side.
struct Session<R> {
    case: Case,
    peer: MalformedPeer<R>,
    channel: Channel,
    ends: mpsc::Receiver<Result<Vec<u8>, ChannelError>>,
    errors: Vec<ChannelError>,
}

impl<R: Raw> Session<R> {
    /// Opens a channel, sends one correct message, and then violates the protocol. Meanwhile, the `others` answer
    /// pings.
    fn begin(case: Case, raw: R, listener: &Listener, others: &mut [Self]) -> Self {
        let mut answer_pings = || {
            for other in &mut *others {
                other.has_ended();
            }
        };
        let accepted = listener.accept();
        // The next id is 0.
        let mut peer = MalformedPeer::hello(raw, listener.address(), |hello| hello.id = u32::MAX);
        let welcome = wait_for("a welcome", || {
            answer_pings();
            peer.receive()
        });
        assert_eq!((welcome.kind, welcome.value), (WELCOME, MAX as u64));
        peer.remote = (welcome.from, welcome.sender_secret);
        let channel = accepted.wait_for(LIMIT).unwrap();
        peer.send(payload(u32::MAX, b"good"));
        peer.send(length(u32::MAX, 4));
        let (sender, ends) = mpsc::channel();
        for _ in 0..READS + 1 {
            let sender = sender.clone();
            // After a failed test, there is no receiver.
            channel.read(move |result| drop(sender.send(result)));
        }
        let mut this = Self { case, peer, channel, ends, errors: Vec::new() };
        let good = wait_for("a good message", || {
            answer_pings();
            this.peer.receive();
            this.ends.try_recv().ok()
        });
        assert_eq!(good.unwrap(), b"good");
        std::mem::take(&mut this.case.messages).into_iter().for_each(|message| this.peer.send(message));
        this
    }

    /// Returns whether all reads have ended and the peer got an abort.
    fn has_ended(&mut self) -> bool {
        let name = self.case.name;
        assert_eq!(self.peer.receive(), None, "{name}");
        self.errors.extend(self.ends.try_iter().map(|end| end.expect_err(name)));
        self.errors.len() == READS && self.peer.aborted.is_some()
    }

    fn check(self) {
        let name = self.case.name;
        let later = self.channel.send(b"after the end").wait_for(LIMIT).expect_err(name);
        println!("{name}: {later}");
        for error in self.errors.iter().chain([&later]) {
            let ChannelError::Protocol { violation, .. } = error else { panic!("{name}: {error}") };
            assert!((self.case.expected)(violation), "{name}: {error}");
            assert!(error.to_string().contains(self.channel.peer()), "{name}: {error}");
        }
        assert_eq!(self.peer.aborted, Some(Reason::Violation as u64), "{name}");
    }
}

/// A modification of a hello.
type Change = fn(&mut Control);

/// A refused peer gets the reason, and malformed bytes instead of a hello affect no other peer.
fn hellos_are_refused<R: Raw>(listener: &Listener, open: &dyn Fn() -> R) {
    let silenced: [Change; 3] =
        [|hello| hello.secret ^= 1, |hello| hello.to += 1, |hello| (hello.secret, hello.version) = (0, 0)];
    let mut silenced = silenced.map(|change| MalformedPeer::hello(open(), listener.address(), change));
    let others: [Change; 2] = [|hello| hello.version += 1, |hello| hello.version = 0];
    for change in others {
        let refused = MalformedPeer::hello(open(), listener.address(), change).answer();
        assert_eq!((refused.kind, refused.value), (REFUSE, Reason::Version as u64));
    }
    // Without the secret there is no answer, not even one that comes after the refusals.
    assert!(silenced.iter_mut().all(|peer| peer.receive().is_none()), "a hello without the secret is answered");
    let mut malformed =
        MalformedPeer::hello(open(), listener.address(), |hello| (hello.secret, hello.name) = (0, Vec::new()));
    for bytes in [&b""[..], b"FGC1", &[0; 48], &[0xff; 148], &[7; 5000]] {
        malformed.raw.send(CONTROL | u64::from(HELLO), bytes);
    }
    for message in [length(0, 3), payload(0, b"abc"), (1 << 50, b"abc".to_vec())] {
        malformed.send(message);
    }
    assert_eq!(malformed.receive(), None);
}

/// A raw listener that responds to a connect with `answer`; returns the error.
fn connected_to<R: Raw>(reactor: &Reactor, carrier: u8, mut raw: R, answer: impl Fn(&mut R, &Control)) -> ChannelError {
    let name = raw.name();
    let version = if carrier == 2 { TCP_VERSION } else { VERSION };
    let mut address = [&b"FGCA"[..], &[version, 0], &[name.len() as u8, carrier]].concat();
    address.extend([0; 8]);
    address.extend(OWN_SECRET.to_le_bytes());
    address.extend(&name);
    let address = Address::parse(&address).unwrap();
    let (sender, receiver) = mpsc::channel();
    reactor.connect_with(&address, move |result| sender.send(result).unwrap());
    let hello = wait_for("a hello", || raw.receive().pop().map(Ok).or_else(|| receiver.try_recv().ok().map(Err)));
    let hello = match hello {
        Ok(hello) => Control::parse(&hello),
        // The limit was over before the hello was sent.
        Err(result) => return result.expect_err("no channel"),
    };
    assert_eq!((hello.kind, hello.to, hello.secret, hello.version), (HELLO, 0, OWN_SECRET, VERSION));
    raw.set_peer(&hello.name, 0);
    answer(&mut raw, &hello);
    let error = wait_for("an end of the connect", || {
        raw.receive();
        receiver.try_recv().ok()
    });
    let error = error.expect_err("no channel");
    println!("connecting: {error}");
    assert!(error.to_string().contains(&*address.endpoint()), "{error}");
    error
}

fn malformed_answers_end_connects<R: Raw>(config: &Config, open: &dyn Fn() -> R) {
    let short_limit = Config { connect_within: Duration::from_millis(500), ..config.clone() };
    let (reactor, short_limit) = (Reactor::open(config).unwrap(), Reactor::open(&short_limit).unwrap());
    let carrier = if config.provider == "tcp" { 2 } else { 1 };
    let send_control = |version: u8, kind: u8, value: u64, wrong: u64| {
        move |raw: &mut R, hello: &Control| {
            let (to, secret) = (hello.from, hello.sender_secret ^ wrong);
            let answer = Control { version, kind, to, secret, value, sender_secret: OWN_SECRET, ..Control::default() };
            raw.send(CONTROL | u64::from(kind), &answer.emit());
        }
    };
    let error = connected_to(&reactor, carrier, open(), send_control(VERSION + 1, WELCOME, 1000, 0));
    assert!(matches!(error, ChannelError::Refused { reason: Reason::Version, .. }), "{error}");
    let error = connected_to(&reactor, carrier, open(), send_control(VERSION, REFUSE, 77, 0));
    assert!(matches!(error, ChannelError::Refused { reason: Reason::Unknown, .. }), "{error}");
    let error = connected_to(&short_limit, carrier, open(), |_, _| ());
    assert!(matches!(error, ChannelError::Timeout { .. }), "{error}");
    let error = connected_to(&short_limit, carrier, open(), send_control(VERSION, WELCOME, 0, 1));
    assert!(matches!(error, ChannelError::Timeout { .. }), "{error}");
}

/// Runs all cases at once: each channel ends with its violation.
fn run_all<R: Raw>(listener: &Listener, violations: Vec<Case>, open: &dyn Fn() -> R) {
    let mut sessions: Vec<Session<R>> = Vec::new();
    for case in violations {
        let session = Session::begin(case, open(), listener, &mut sessions);
        sessions.push(session);
    }
    // No short circuit: each call answers its session's pings.
    wait_until("end of all channels", || sessions.iter_mut().fold(true, |all, session| session.has_ended() & all));
    sessions.into_iter().for_each(Session::check);
}

fn malformed_peers<R: Raw>(config: &Config, violations: Vec<Case>, open: &dyn Fn() -> R) {
    let reactor = Reactor::open(config).unwrap();
    let listener = reactor.listen().unwrap();
    let good = Good::start(config, &listener);
    hellos_are_refused(&listener, open);
    good.lives();
    run_all(&listener, violations, open);
    malformed_answers_end_connects(config, open);
    good.end();
}

/// The limit for a missing part is the same as for the answer to a ping, and these peers answer.
fn peers_that_leave_parts_out<R: Raw>(config: &Config, open: &dyn Fn() -> R) {
    let reactor = Reactor::open(&Config { lost_after: Duration::from_secs(5), ..config.clone() }).unwrap();
    run_all(&reactor.listen().unwrap(), missing_parts(), open);
}

/// Anything that is not a frame, or a frame that no channel sends, ends the connection it came on.
#[test]
fn malformed_frames_end_their_connection() {
    let config = Config { max_message: 32 << 20, ..config(&Way::tcp()) };
    let reactor = Reactor::open(&config).unwrap();
    let listener = reactor.listen().unwrap();
    let good = Good::start(&config, &listener);
    for bytes in [
        header(0, 8).to_vec(),
        header(3, 8).to_vec(),
        vec![0xff; 1000],
        // More messages than any channel leaves unread, and more bytes; and a long message that no read waits for.
        header(MESSAGE, 0).repeat(257),
        [&header(MESSAGE, 1 << 20)[..], &[0; 1 << 20]].concat().repeat(17),
        header(MESSAGE, (16 << 20) + 1).to_vec(),
    ] {
        let accepted = listener.accept();
        let mut peer = MalformedPeer::hello(Frames::open(), listener.address(), |_| ());
        assert_eq!(peer.answer().kind, WELCOME);
        let channel = accepted.wait_for(LIMIT).unwrap();
        peer.raw.send_bytes(&bytes);
        let error = wait_for("the end of a channel", || channel.is_closed().then(|| channel.receive().wait_for(LIMIT)));
        println!("{:?}", error.as_ref().unwrap_err().to_string());
        assert!(matches!(error, Err(ChannelError::Failed { .. })), "{error:?}");
        wait_until("end of the connection", || peer.raw.is_over());
    }
    good.end();
}

/// A peer that makes the listener answer but reads nothing loses its channel before the answers fill memory.
#[test]
fn peer_that_pings_and_reads_nothing_loses_its_channel() {
    let reactor = Reactor::open(&config(&Way::tcp())).unwrap();
    let listener = reactor.listen().unwrap();
    let accepted = listener.accept();
    let mut peer = MalformedPeer::hello(Frames::open(), listener.address(), |_| ());
    let welcome = peer.answer();
    peer.remote = (welcome.from, welcome.sender_secret);
    let channel = accepted.wait_for(LIMIT).unwrap();
    wait_until("the end of the channel", || {
        (0..1000).for_each(|_| peer.send_control(PING));
        channel.is_closed()
    });
}

#[test]
fn replayed_hello_changes_nothing() {
    let reactor = Reactor::open(&config(&Way::tcp())).unwrap();
    let listener = reactor.listen().unwrap();
    let (accepted, mut hello) = (listener.accept(), Vec::new());
    let mut peer = MalformedPeer::hello(Frames::open(), listener.address(), |sent| hello = sent.emit());
    let welcome = peer.answer();
    assert_eq!(welcome.kind, WELCOME);
    peer.remote = (welcome.from, welcome.sender_secret);
    let channel = accepted.wait_for(LIMIT).unwrap();
    let second = listener.accept();
    let mut kinds = Vec::new();
    let mut receive = |peer: &mut MalformedPeer<Frames>| {
        kinds.extend(peer.raw.receive().iter().map(|bytes| Control::parse(bytes).kind));
        kinds.contains(&PONG)
    };
    for _ in 0..1000 {
        peer.raw.send(CONTROL | u64::from(HELLO), &hello);
        receive(&mut peer);
    }
    peer.send(payload(0, b"abc"));
    peer.send(length(0, 3));
    // The answer to this ping comes after those to the hellos.
    peer.send_control(PING);
    wait_until("answer to the ping", || receive(&mut peer));
    assert_eq!(channel.receive().wait_for(LIMIT).unwrap(), b"abc");
    assert!(second.wait_for(Duration::from_millis(1)).is_err(), "a replayed hello opened a channel");
    assert!(kinds.iter().all(|kind| [PING, PONG].contains(kind)), "a replayed hello is answered");
}

/// The length of a message that can't be one is noticed before any byte of it.
#[test]
fn impossible_length_over_tcp_ends_channel() {
    let reactor = Reactor::open(&config(&Way::tcp())).unwrap();
    let listener = reactor.listen().unwrap();
    for len in [MAX as u64 + 1, 1 << 63, u64::MAX] {
        let accepted = listener.accept();
        let mut peer = MalformedPeer::hello(Frames::open(), listener.address(), |_| ());
        assert_eq!(peer.answer().kind, WELCOME);
        let channel = accepted.wait_for(LIMIT).unwrap();
        peer.raw.send_bytes(&header(MESSAGE, len));
        let error = channel.receive().wait_for(LIMIT).unwrap_err();
        let expected = Violation::TooLong { id: 0, len, max: MAX };
        assert!(matches!(error, ChannelError::Protocol { violation, .. } if violation == expected), "{error}");
        wait_until("an abort", || {
            peer.receive();
            peer.aborted == Some(Reason::Violation as u64)
        });
    }
}

/// Behind a message that doesn't end, no answer to a ping can come.
#[test]
#[ignore = "make check"]
fn message_that_does_not_end_over_tcp_ends_channel() {
    let config = Config { lost_after: Duration::from_secs(2), ..config(&Way::tcp()) };
    let reactor = Reactor::open(&config).unwrap();
    let listener = reactor.listen().unwrap();
    let accepted = listener.accept();
    let mut peer = MalformedPeer::hello(Frames::open(), listener.address(), |_| ());
    assert_eq!(peer.answer().kind, WELCOME);
    let channel = accepted.wait_for(LIMIT).unwrap();
    peer.raw.send_bytes(&[&header(MESSAGE, 100)[..], &[0; 99]].concat());
    let error = channel.receive().wait_for(LIMIT).unwrap_err();
    assert!(matches!(error, ChannelError::Silent { .. }), "{error}");
}

fn over_the_software_card(test: &str, peers: fn(&Config, &dyn Fn() -> Tagged)) {
    with_card(test, || {
        for lib in libraries(test) {
            peers(&config(&Way::over(&lib, "softefa")), &|| Tagged::open(&lib, "softefa"));
        }
    });
}

#[test]
fn malformed_peers_over_tcp() {
    malformed_peers(&config(&Way::tcp()), violations_of_frames(), &Frames::open);
}

#[test]
fn malformed_peers_over_the_software_card() {
    over_the_software_card("malformed_peers_over_the_software_card", |config, open| {
        malformed_peers(config, violations(), open);
    });
}

#[test]
#[ignore = "make check"]
fn peers_that_leave_parts_out_over_the_software_card() {
    over_the_software_card("peers_that_leave_parts_out_over_the_software_card", peers_that_leave_parts_out);
}
