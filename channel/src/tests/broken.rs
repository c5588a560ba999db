//! Peers that break the protocol: their channel ends with an error that says how; others live on.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::super::engine::{Call, Engine};
use super::super::transport::{Addr, Event, Pattern, Transport};
use super::super::wire::{CONTROL, Control, ID_MASK, Kind, LENGTH, PAYLOAD, VERSION};
use super::super::{ChannelError, Config, Payload, Reason, Violation};
use super::fake::{Fake, Net};

type Got = Arc<Mutex<Vec<Result<Vec<u8>, ChannelError>>>>;

/// An engine, an honest peer's channel on it, and a peer that we play ourselves, byte by byte.
struct Stage {
    engine: Engine<Fake>,
    honest: Engine<Fake>,
    evil: Fake,
    to: Addr,
    now: Instant,
    calls: Vec<Call>,
    /// What the reads of the evil peer's channel got.
    got: Got,
    honest_channel: u32,
    channel: u32,
}

fn hello(address: &super::super::Address, name: &[u8], version: u16) -> Vec<u8> {
    Control {
        version,
        from: 7,
        own: 1234,
        value: 1 << 20,
        name,
        ..Control::new(Kind::Hello, address.listener, address.secret)
    }
    .emit()
}

impl Stage {
    fn new() -> Self {
        let (net, now) = (Net::new(1, false), Instant::now());
        let config = Config { max_message: 1000, ..Config::default() };
        let mut engine = Engine::new(net.endpoint(), config.clone(), now);
        let honest = Engine::new(net.endpoint(), config, now);
        let mut evil = net.endpoint();
        let to = evil.insert(b"fake-0").unwrap();
        let (_, address) = engine.listen().unwrap();
        let channels: Arc<Mutex<Vec<u32>>> = Arc::default();
        for _ in 0..2 {
            let channels = Arc::clone(&channels);
            engine.accept(
                address.listener,
                0,
                Box::new(move |opened| channels.lock().unwrap().push(opened.unwrap().channel)),
            );
        }
        let mut stage = Self {
            engine,
            honest,
            evil,
            to,
            now,
            calls: Vec::new(),
            got: Arc::default(),
            honest_channel: 0,
            channel: 0,
        };
        stage.honest.connect(&address, 0, Duration::from_secs(10), Box::new(|opened| drop(opened.unwrap())));
        stage.run(10);
        let name = stage.evil.name().to_vec();
        stage.say(CONTROL | 1, hello(&address, &name, VERSION));
        stage.run(10);
        let found = channels.lock().unwrap().clone();
        (stage.honest_channel, stage.channel) = (found[0], found[1]);
        for _ in 0..3 {
            let got = Arc::clone(&stage.got);
            let channel = stage.channel;
            stage.engine.read(
                channel,
                0,
                Vec::new(),
                Box::new(move |result| got.lock().unwrap().push(result.map(|(_, bytes)| bytes))),
            );
        }
        stage
    }

    fn say(&mut self, tag: u64, bytes: Vec<u8>) {
        self.evil.send(self.to, tag, Payload::from(bytes), 0, false);
    }

    /// Moves time on; the evil peer answers pings unless `silent`.
    fn run_as(&mut self, steps: u32, answers: bool) {
        for _ in 0..steps {
            self.now += Duration::from_millis(100);
            for engine in [&mut self.engine, &mut self.honest] {
                engine.poll(Some(self.now));
                engine.take_calls(&mut self.calls);
                self.calls.drain(..).for_each(Call::run);
            }
            if answers {
                let everything = Pattern { tag: CONTROL, ignore: ID_MASK };
                self.evil.receive(Some(self.to), everything, Vec::new(), 200, 0);
                let mut events = Vec::new();
                self.evil.poll(&mut events).unwrap();
                for event in events {
                    if let Event::Received { bytes, .. } = event
                        && let Some(ping) = Control::parse(&bytes).filter(|control| control.kind == Kind::Ping)
                    {
                        let secret = self.engine.link(self.channel).map_or(0, |link| link.secret);
                        let pong = Control { kind: Kind::Pong, to: ping.from, from: 7, secret, ..ping }.emit();
                        self.say(CONTROL | Kind::Pong as u64, pong);
                    }
                }
            }
        }
    }

    fn run(&mut self, steps: u32) {
        self.run_as(steps, false);
    }

    /// The evil channel has ended as `is` says, all of its reads with it, and the honest one works.
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
        self.engine.read(self.honest_channel, 0, Vec::new(), read);
        self.honest.write(0, 0, Payload::from(b"fine"), Box::new(|result| drop(result.unwrap())));
        self.run(10);
        assert_eq!(echoed.lock().unwrap().as_deref(), Some(&b"fine"[..]));
    }
}

fn broken(error: &ChannelError, is: impl Fn(&Violation) -> bool) -> bool {
    matches!(error, ChannelError::Protocol { violation, .. } if is(violation))
}

#[test]
fn the_honest_form_works() {
    let mut stage = Stage::new();
    stage.say(PAYLOAD, b"abc".to_vec());
    stage.say(LENGTH, 3u64.to_le_bytes().to_vec());
    stage.run(3);
    assert_eq!(*stage.got.lock().unwrap(), vec![Ok(b"abc".to_vec())]);
}

#[test]
fn reads_end_in_order_when_the_peer_closes_with_a_message_under_way() {
    let mut stage = Stage::new();
    stage.say(LENGTH, 3u64.to_le_bytes().to_vec());
    let secret = stage.engine.link(stage.channel).map_or(0, |link| link.secret);
    let close = Control { from: 7, id: 1, ..Control::new(Kind::Close, stage.channel, secret) };
    stage.say(CONTROL | Kind::Close as u64, close.emit());
    stage.run(3);
    assert_eq!(*stage.got.lock().unwrap(), vec![]);
    stage.say(PAYLOAD, b"abc".to_vec());
    stage.run(3);
    let got = stage.got.lock().unwrap();
    assert_eq!((got.len(), &got[0]), (3, &Ok(b"abc".to_vec())));
    assert!(got[1..].iter().all(|end| matches!(end, Err(ChannelError::Closed { .. }))));
}

#[test]
fn a_length_without_a_payload() {
    let mut stage = Stage::new();
    stage.say(LENGTH, 3u64.to_le_bytes().to_vec());
    stage.run_as(150, true);
    stage.ended(|error| broken(error, |v| matches!(v, Violation::Missing { id: 0, missing: "payload", .. })));
}

#[test]
fn a_payload_without_a_length() {
    let mut stage = Stage::new();
    stage.say(PAYLOAD | 4, b"abc".to_vec());
    stage.run_as(150, true);
    stage.ended(|error| broken(error, |v| matches!(v, Violation::Missing { id: 4, missing: "length", .. })));
}

#[test]
fn a_message_that_is_left_out() {
    let mut stage = Stage::new();
    stage.say(LENGTH | 1, 0u64.to_le_bytes().to_vec());
    stage.say(PAYLOAD | 1, Vec::new());
    stage.run_as(150, true);
    stage.ended(|error| broken(error, |v| matches!(v, Violation::Missing { id: 0, missing: "length", .. })));
}

#[test]
fn a_payload_longer_than_its_length() {
    let mut stage = Stage::new();
    stage.say(LENGTH, 3u64.to_le_bytes().to_vec());
    stage.say(PAYLOAD, b"abcd".to_vec());
    stage.ended(|error| broken(error, |v| *v == Violation::PayloadTooLong { id: 0, said: 3 }));
}

#[test]
fn a_payload_shorter_than_its_length() {
    let mut stage = Stage::new();
    stage.say(LENGTH, 3u64.to_le_bytes().to_vec());
    stage.say(PAYLOAD, b"ab".to_vec());
    stage.ended(|error| broken(error, |v| *v == Violation::PayloadLength { id: 0, said: 3, got: 2 }));
}

#[test]
fn lengths_beyond_all_measure() {
    for len in [1001, 1 << 32, 1 << 63, u64::MAX] {
        let mut stage = Stage::new();
        stage.say(LENGTH, len.to_le_bytes().to_vec());
        stage.ended(|error| broken(error, |v| *v == Violation::TooLong { id: 0, len, max: 1000 }));
    }
}

#[test]
fn lengths_of_another_size() {
    for bytes in [0, 1, 7, 9, 16, 17, 100] {
        let mut stage = Stage::new();
        stage.say(LENGTH | 5, vec![0; bytes]);
        stage.ended(|error| broken(error, |v| matches!(v, Violation::LengthSize { id: 5, .. })));
    }
}

#[test]
fn ids_that_come_twice_or_out_of_turn() {
    for (first, second) in [(1, 1), (1, u32::MAX), (0, 1 << 31), (0, 1 << 17)] {
        let mut stage = Stage::new();
        for id in [first, second] {
            stage.say(LENGTH | u64::from(id), 1u64.to_le_bytes().to_vec());
        }
        stage.ended(|error| broken(error, |v| matches!(v, Violation::OutOfTurn { expected: 0, .. })));
    }
}

#[test]
fn unknown_tags() {
    for tag in [0, 1, 3 << 32, 5 << 32, 1 << 35 | 3, 1 << 63, u64::MAX] {
        let mut stage = Stage::new();
        stage.say(tag, vec![1; 100]);
        stage.ended(|error| broken(error, |v| *v == Violation::UnknownTag { tag }));
    }
}

#[test]
fn control_messages_that_make_no_sense() {
    for bytes in [Vec::new(), vec![0; 48], vec![0xff; 148], b"FGC1".to_vec()] {
        let mut stage = Stage::new();
        stage.say(CONTROL | 9, bytes);
        stage.ended(|error| broken(error, |v| matches!(v, Violation::UnknownTag { .. })));
    }
}

/// Who asks and takes no answers is owed one answer of a kind.
#[test]
fn pings_that_cannot_be_answered_fill_no_memory() {
    let mut stage = Stage::new();
    let secret = stage.engine.link(stage.channel).unwrap().secret;
    stage.engine.transport.full = true;
    for _ in 0..100 {
        let ping = Control::new(Kind::Ping, stage.channel, secret).emit();
        stage.say(CONTROL | Kind::Ping as u64, ping);
        stage.run(1);
    }
    assert!((1..10).contains(&stage.engine.unsent.len()), "{}", stage.engine.unsent.len());
    stage.engine.transport.full = false;
    stage.run(1);
    assert!(stage.engine.unsent.is_empty());
}

#[test]
fn control_messages_of_others_are_ignored() {
    let mut stage = Stage::new();
    for kind in [Kind::Welcome, Kind::Refuse, Kind::Ping, Kind::Close, Kind::Goodbye, Kind::Abort] {
        let forged = Control::new(kind, stage.honest_channel, 99);
        stage.say(CONTROL | kind as u64, forged.emit());
    }
    stage.run(5);
    stage.say(LENGTH, u64::MAX.to_le_bytes().to_vec());
    stage.ended(|error| broken(error, |v| matches!(v, Violation::TooLong { .. })));
}

/// What a listener answers to a hello of `version`.
fn answer_to(version: u16, spoil: impl Fn(&mut super::super::Address)) -> Reason {
    let (net, now) = (Net::new(1, false), Instant::now());
    let mut engine = Engine::new(net.endpoint(), Config::default(), now);
    let mut evil = net.endpoint();
    let to = evil.insert(b"fake-0").unwrap();
    let (_, mut address) = engine.listen().unwrap();
    spoil(&mut address);
    let bytes = hello(&address, b"fake-1", version);
    evil.send(to, CONTROL | 1, Payload::from(bytes), 0, false);
    evil.receive(Some(to), Pattern { tag: CONTROL, ignore: ID_MASK }, Vec::new(), 200, 0);
    for _ in 0..5 {
        engine.poll(Some(now));
        let mut events = Vec::new();
        evil.poll(&mut events).unwrap();
        for event in events {
            if let Event::Received { bytes, .. } = event {
                let answer = Control::parse(&bytes).unwrap();
                assert_eq!((answer.kind, answer.to, answer.secret), (Kind::Refuse, 7, 1234));
                return Reason::of(answer.value);
            }
        }
    }
    panic!("no answer");
}

#[test]
fn hellos_that_are_refused() {
    assert_eq!(answer_to(VERSION + 1, |_| ()), Reason::Version);
    assert_eq!(answer_to(VERSION, |address| address.secret ^= 1), Reason::NotListening);
    assert_eq!(answer_to(VERSION, |address| address.listener = 9), Reason::NotListening);
}

#[test]
fn a_listener_of_another_version() {
    let (net, now) = (Net::new(1, false), Instant::now());
    let mut engine = Engine::new(net.endpoint(), Config::default(), now);
    let mut other = net.endpoint();
    let to = other.insert(b"fake-0").unwrap();
    let address = super::super::Address { listener: 0, secret: 5, name: b"fake-1".as_slice().into() };
    let got: Arc<Mutex<Option<ChannelError>>> = Arc::default();
    let of_call = Arc::clone(&got);
    let done = Box::new(move |opened: Result<_, ChannelError>| *of_call.lock().unwrap() = opened.err());
    engine.connect(&address, 0, Duration::from_secs(10), done);
    let link = engine.link(0).map(|link| link.secret).unwrap();
    let welcome = Control { version: VERSION + 1, own: 1, value: 10, ..Control::new(Kind::Welcome, 0, link) };
    other.send(to, CONTROL | 2, Payload::from(welcome.emit()), 0, false);
    let mut calls = Vec::new();
    for _ in 0..5 {
        engine.poll(Some(now));
        other.poll(&mut Vec::new()).unwrap();
        engine.take_calls(&mut calls);
        calls.drain(..).for_each(Call::run);
    }
    let error = got.lock().unwrap().take().expect("the connect ends");
    assert!(matches!(error, ChannelError::Refused { reason: Reason::Version, .. }), "{error}");
}
