//! The carrier on its own, and peers that send what no channel sends: their channel ends with an error that names them,
//! and other channels stay open.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::mpsc;

use ferrogin_test_support::wait::{HANG_LIMIT, poll_until, wait_for, wait_until};

use super::frame::{HEADER, Header};
use super::*;
use crate::proto::wire;
use crate::tests::malformed::hello;
use crate::{Channel, ChannelError, Listener as Listening, Reactor, Reason, Violation};

/// The domain of proofs, as it is documented.
const DOMAIN: Domain = *b"channel\x07";
const SECRET: u64 = 7;
/// The longest message that the good side accepts, in bytes.
const MAX: usize = 32 << 20;

fn open() -> Tcp {
    Tcp::open(Some("127.0.0.1"), &Config::default()).unwrap()
}

fn poll(tcp: &mut Tcp) -> Vec<Event> {
    let mut events = Vec::new();
    tcp.poll(Instant::now(), &mut events).unwrap();
    events
}

/// Returns whether something has happened on a socket.
fn is_ready(tcp: &Tcp) -> bool {
    tcp.ready.wait(&mut [EpollEvent::empty()], EpollTimeout::ZERO).unwrap() == 1
}

#[test]
fn connect_waits_for_an_event_of_its_socket() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut tcp = open();
    tcp.connect(&name::emit(&[listener.local_addr().unwrap()], NAME_MAX), SECRET).unwrap();
    wait_until("hello", || {
        poll(&mut tcp);
        tcp.dials[0].1.is_accepted()
    });
    assert!(
        matches!(tcp.wait(), Some(Wait { fd: Some(_), until: None })) && !is_ready(&tcp),
        "the peer has not answered"
    );
    listener.accept().unwrap().0.write_all(&[0]).unwrap();
    wait_until("answer", || is_ready(&tcp));
}

#[test]
fn read_has_work_only_if_a_message_waits() {
    let (mut here, mut there) = (open(), open());
    let name = here.listen(1, SECRET).unwrap();
    let to = there.connect(&name, SECRET).unwrap();
    wait_until("connection", || {
        poll(&mut here);
        poll(&mut there);
        matches!(there.connections[&to].stage, Stage::Open(_))
    });
    there.read(to, Vec::new());
    assert!(there.wait().is_some(), "there is nothing to deliver or to send");
    let from = *here.connections.keys().next().unwrap();
    for body in [&b"first"[..], b"second"] {
        assert!(here.send(from, 0, body.into()).is_some(), "a short message is copied");
    }
    here.flush();
    let first = wait_for("a message", || poll(&mut there).pop());
    assert!(matches!(first, Event::Message { bytes, .. } if bytes == b"first"));
    wait_until("the second message", || {
        assert!(poll(&mut there).is_empty(), "no read asks for it");
        there.connections[&to].input.has_unread()
    });
    there.read(to, Vec::new());
    assert!(there.wait().is_none());
}

/// The raw end of a connection.
struct Raw {
    socket: TcpStream,
    input: Vec<u8>,
}

impl Raw {
    fn new(stream: ferrogin_rendezvous::Stream) -> Self {
        Self { socket: stream.into_tcp().unwrap(), input: Vec::new() }
    }

    /// Connects to a listener and proves that it knows the secret.
    fn connect(address: &wire::Address) -> Self {
        let addresses = name::parse(&address.name).into_iter().map(Address::Tcp).collect();
        let claim = Claim { rank: 0, nranks: 0, called: 0 };
        let mut dial = Dial::new(addresses, DOMAIN, proof_secret(address.secret.unwrap()), claim);
        Self::new(wait_for("a proof", || dial.poll(Instant::now()).unwrap()))
    }

    /// Opens a channel to a listener; returns both ends, and the welcome.
    fn open(listener: &Listening) -> (Self, Channel, Control) {
        let (accepted, mut raw) = (listener.accept(), Self::connect(listener.address()));
        raw.send(hello(listener.address()));
        let welcome = raw.answer();
        assert_eq!((welcome.kind, welcome.value), (Kind::Welcome, MAX as u64));
        (raw, accepted.wait_for(HANG_LIMIT).unwrap(), welcome)
    }

    fn send_bytes(&mut self, mut bytes: &[u8]) {
        poll_until("send", || {
            match self.socket.write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // The other end has closed the connection of a malformed peer.
                Err(_) => bytes = &[],
            }
            bytes.is_empty()
        });
    }

    fn send(&mut self, control: Control) {
        self.send_bytes(&frame(frame::Kind::Control, &control.emit(&[])));
    }

    /// Returns the control messages that have arrived, except for pings.
    fn receive(&mut self) -> Vec<Control> {
        self.is_over();
        let mut received = Vec::new();
        while let Some((header, rest)) = self.input.split_first_chunk::<HEADER>() {
            let len = Header::parse(header).unwrap().len as usize;
            let Some(body) = rest.get(..len) else { break };
            received.extend(Control::parse(body).map(|(control, _)| control));
            self.input.drain(..HEADER + len);
        }
        received.retain(|control| control.kind != Kind::Ping);
        received
    }

    /// Waits for the next control message.
    fn answer(&mut self) -> Control {
        wait_for("an answer", || self.receive().pop())
    }

    /// Returns whether the other end has closed the connection.
    fn is_over(&mut self) -> bool {
        let mut bytes = [0; 4096];
        loop {
            match self.socket.read(&mut bytes) {
                Ok(0) => return true,
                Ok(len) => self.input.extend_from_slice(&bytes[..len]),
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }
}

fn frame(kind: frame::Kind, body: &[u8]) -> Vec<u8> {
    [&Header::new(kind, body.len()).emit()[..], body].concat()
}

fn header(kind: u64, len: u64) -> Vec<u8> {
    [kind, len].map(u64::to_le_bytes).concat()
}

fn reactor() -> Reactor {
    let (lost_after, connect_within) = (HANG_LIMIT, HANG_LIMIT);
    Reactor::open(&Config { max_message: MAX, lost_after, connect_within, ..Config::default() }).unwrap()
}

/// A reactor, its listener, and a channel from another reactor.
struct Good {
    _reactors: [Reactor; 2],
    listener: Listening,
    channel: [Channel; 2],
}

impl Good {
    fn new() -> Self {
        let reactors = [reactor(), reactor()];
        let listener = reactors[0].listen().unwrap();
        let ends = [listener.accept(), reactors[1].connect(listener.address())];
        let channel = ends.map(|end| end.wait_for(HANG_LIMIT).unwrap());
        Self { _reactors: reactors, listener, channel }
    }

    /// Asserts that the channel still works.
    fn exchange(&self) {
        let [a, b] = &self.channel;
        for (from, to) in [(a, b), (b, a)] {
            let sent = from.send(vec![1; 200_000]);
            assert!(to.receive().wait_for(HANG_LIMIT).unwrap() == [1; 200_000]);
            sent.wait_for(HANG_LIMIT).unwrap();
        }
    }
}

/// Sends `bytes` on a channel of its own after a good message, and returns the peer and the error of the channel.
fn error_after(good: &Good, bytes: &[u8]) -> (Raw, ChannelError) {
    let (mut raw, channel, _) = Raw::open(&good.listener);
    raw.send_bytes(&frame(frame::Kind::Message, b"good"));
    assert_eq!(channel.receive().wait_for(HANG_LIMIT).unwrap(), b"good");
    raw.send_bytes(bytes);
    wait_until("the end of a channel", || channel.is_closed());
    let error = channel.receive().wait_for(HANG_LIMIT).unwrap_err();
    assert!(error.to_string().contains(channel.peer()), "{error}");
    assert_eq!(channel.send(b"after the end").wait_for(HANG_LIMIT).unwrap_err(), error);
    good.exchange();
    (raw, error)
}

/// Anything that isn't a frame, or a frame that no channel sends, ends the connection it came on.
#[test]
fn malformed_frame_ends_its_connection() {
    const MESSAGE: u64 = frame::Kind::Message as u64;
    let good = Good::new();
    for bytes in [
        header(0, 8),
        header(3, 8),
        vec![0xff; 1000],
        // More messages than any channel leaves unread, and more bytes; and a long message that no read waits for.
        header(MESSAGE, 0).repeat(257),
        frame(frame::Kind::Message, &[0; 1 << 20]).repeat(17),
        header(MESSAGE, (16 << 20) + 1),
    ] {
        let (mut raw, error) = error_after(&good, &bytes);
        assert!(matches!(error, ChannelError::Failed { .. }), "{error}");
        wait_until("end of the connection", || raw.is_over());
    }
}

/// The length of a message that can't be one is noticed before any byte of it.
#[test]
fn violation_ends_channel() {
    let good = Good::new();
    let too_long = [MAX as u64 + 1, 1 << 63, u64::MAX].map(|len| {
        let violation = Violation::TooLong { id: 1, len, max: MAX };
        (header(frame::Kind::Message as u64, len), violation)
    });
    let control = [60, 3000].map(|len| (frame(frame::Kind::Control, &vec![0xff; len]), Violation::Control));
    for (bytes, expected) in too_long.into_iter().chain(control) {
        let (mut raw, error) = error_after(&good, &bytes);
        assert!(matches!(error, ChannelError::Protocol { violation, .. } if violation == expected), "{error}");
        let abort = raw.answer();
        assert_eq!((abort.kind, Reason::of(abort.value)), (Kind::Abort, Reason::Violation));
    }
}

/// Without the listener's secret, a hello gets no answer.
#[test]
fn hello_is_refused_with_its_reason() {
    let good = Good::new();
    let send = |change: fn(&mut Control)| {
        let (mut raw, mut hello) = (Raw::connect(good.listener.address()), hello(good.listener.address()));
        change(&mut hello);
        raw.send(hello);
        raw
    };
    let silenced: [fn(&mut Control); 3] =
        [|hello| hello.secret ^= 1, |hello| hello.to += 1, |hello| (hello.secret, hello.version) = (0, 0)];
    let mut silenced = silenced.map(send);
    for change in [|hello: &mut Control| hello.version += 1, |hello: &mut Control| hello.version = 0] {
        let refused = send(change).answer();
        assert_eq!((refused.kind, Reason::of(refused.value)), (Kind::Refuse, Reason::Version));
    }
    // Not even after the refusals.
    assert!(silenced.iter_mut().all(|raw| raw.receive().is_empty()), "a hello without the secret is answered");
    good.exchange();
}

#[test]
fn replayed_hello_changes_nothing() {
    let good = Good::new();
    let (mut raw, channel, welcome) = Raw::open(&good.listener);
    let second = good.listener.accept();
    (0..1000).for_each(|_| raw.send(hello(good.listener.address())));
    raw.send_bytes(&frame(frame::Kind::Message, b"abc"));
    // The answer to this ping comes after those to the hellos.
    raw.send(Control::new(Kind::Ping, welcome.from, welcome.sender_secret));
    let mut answers = Vec::new();
    wait_until("a pong", || {
        answers.extend(raw.receive().iter().map(|answer| answer.kind));
        answers.contains(&Kind::Pong)
    });
    assert_eq!(answers, [Kind::Pong], "a replayed hello is answered");
    assert_eq!(channel.receive().wait_for(HANG_LIMIT).unwrap(), b"abc");
    assert!(second.wait_for(Duration::from_millis(1)).is_err(), "a replayed hello opened a channel");
}

/// A peer that makes the listener answer but reads nothing loses its channel before the answers fill memory.
#[test]
fn peer_that_pings_and_reads_nothing_loses_its_channel() {
    let good = Good::new();
    let (mut raw, channel, welcome) = Raw::open(&good.listener);
    let ping = frame(frame::Kind::Control, &Control::new(Kind::Ping, welcome.from, welcome.sender_secret).emit(&[]));
    wait_until("the end of the channel", || {
        raw.send_bytes(&ping.repeat(1000));
        channel.is_closed()
    });
}

/// Connects to a raw listener that answers the hello with `answer`; returns the error.
fn connect_error(limit: Duration, answer: impl Fn(&Control) -> Option<Control>) -> ChannelError {
    let (mut listener, bound) =
        Listener::bind(&["127.0.0.1:0".parse().unwrap()], DOMAIN, proof_secret(SECRET)).unwrap();
    let name = name::emit(&bound, NAME_MAX).into();
    let address = wire::Address { transport: Transport::Tcp, listener: 0, secret: Some(SECRET), name };
    let reactor = Reactor::open(&Config { connect_within: limit, ..Config::default() }).unwrap();
    let (sender, receiver) = mpsc::channel();
    reactor.connect_with(&address, move |result| sender.send(result).unwrap());
    let mut raw: Option<Raw> = None;
    wait_for("an end of the connect", || {
        if raw.is_none() {
            raw = listener.poll(Instant::now()).unwrap().map(|(stream, _)| Raw::new(stream));
        }
        if let Some(raw) = &mut raw {
            let answers: Vec<_> = raw.receive().iter().filter_map(&answer).collect();
            answers.into_iter().for_each(|answer| raw.send(answer));
        }
        let error = receiver.try_recv().ok()?.expect_err("no channel");
        assert!(error.to_string().contains(&*address.endpoint()), "{error}");
        Some(error)
    })
}

#[test]
fn malformed_answer_ends_connect() {
    let short = Duration::from_millis(500);
    let answer = |kind, hello: &Control| Control {
        sender_secret: 1,
        value: 77,
        ..Control::new(kind, hello.from, hello.sender_secret)
    };
    let error =
        connect_error(HANG_LIMIT, |hello| Some(Control { version: hello.version + 1, ..answer(Kind::Welcome, hello) }));
    assert!(matches!(error, ChannelError::Refused { reason: Reason::Version, .. }), "{error}");
    let error = connect_error(HANG_LIMIT, |hello| Some(answer(Kind::Refuse, hello)));
    assert!(matches!(error, ChannelError::Refused { reason: Reason::Unknown, .. }), "{error}");
    let error = connect_error(short, |_| None);
    assert!(matches!(error, ChannelError::Timeout { .. }), "{error}");
    let error =
        connect_error(short, |hello| Some(Control { secret: hello.sender_secret ^ 1, ..answer(Kind::Welcome, hello) }));
    assert!(matches!(error, ChannelError::Timeout { .. }), "{error}");
}

/// Behind a message that doesn't end, no answer to a ping can come.
#[test]
#[ignore = "make check"]
fn message_that_does_not_end_ends_channel() {
    let config = Config { lost_after: Duration::from_secs(2), max_message: MAX, ..Config::default() };
    let reactor = Reactor::open(&config).unwrap();
    let (mut raw, channel, _) = Raw::open(&reactor.listen().unwrap());
    raw.send_bytes(&frame(frame::Kind::Message, &[0; 100])[..HEADER + 99]);
    let error = channel.receive().wait_for(HANG_LIMIT).unwrap_err();
    assert!(matches!(error, ChannelError::Silent { .. }), "{error}");
}
