//! Messages over TCP: one connection per channel, which carries nothing until both ends have proved that they know the
//! listener's secret ([`ferrogin_rendezvous`]).
//!
//! A connection carries [frames](frame): control messages, and messages in order. It's read all the time, so that
//! control messages and the end of the connection are noticed even while nobody reads messages; those wait here, up to
//! the channel's limit of unread ones. A message that a read waits for goes from the writer's buffer to the socket, and
//! from the socket into the reader's buffer. Control messages overtake messages that haven't started.
//!
//! Each listener has a port of its own, which closes when the listener is dropped; a reactor that only connects doesn't
//! listen. A frame that no channel sends ends the connection, and so does a peer that keeps asking for answers and
//! never reads them.

mod frame;
#[allow(unsafe_code)]
mod input;
mod output;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use ferrogin_libfabric::{Error, bindings};
use ferrogin_rendezvous::proof::Domain;
use ferrogin_rendezvous::{Address, Claim, Dial, Listener, Secret, interface, stream};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::proto::carrier::{Carrier, Event, FirstIds, Hello, Loss, Peer, Progress, Properties, Wait};
use crate::proto::name;
use crate::proto::wire::{Control, Kind, NAME_MAX, SHARED_LISTENER, TCP_VERSION, Transport};
use crate::{Config, Payload};
use input::{Arrived, Ended, Input, UNREAD_BYTES};
use output::Output;

/// The domain that the proofs of a connection's secret are bound to.
const DOMAIN: Domain = *b"channel\x07";
const _: () = assert!(DOMAIN[7] == TCP_VERSION);
/// Length of the longest message in bytes.
const MAX_MESSAGE: usize = 1 << 40;
/// Bytes of one read whose destination isn't known yet.
const SCRATCH: usize = 64 << 10;
/// How many socket events are taken at once.
const BATCH: usize = 64;
/// How long a peer may take to close a connection that this end has left.
const LINGER: Duration = Duration::from_secs(10);
/// How long the last messages may take when the endpoint is closed.
const CLOSE_GRACE: Duration = Duration::from_millis(100);
/// Time between two checks for connections that aren't proved or closed in time.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Marks a listener's number among those of connections.
const LISTENER: u64 = 1 << 63;

/// How far a connection has got.
enum Stage {
    /// Being made.
    Dialing,
    Open(TcpStream),
    /// Over. Messages that arrived before may still be waiting.
    Over,
}

/// The listener that accepted a connection.
#[derive(Clone, Copy)]
struct Entrance {
    listener: u32,
    secret: u64,
}

/// A connection to a peer.
struct Connection {
    stage: Stage,
    /// The listener whose secret the peer has proved, until its hello arrives.
    entrance: Option<Entrance>,
    input: Input,
    output: Output,
    last_heard: Instant,
    /// The output is waiting for room in the socket.
    is_blocked: bool,
    /// The channel has ended: what arrives is dropped, and at this time so is the connection.
    linger_until: Option<Instant>,
}

struct Listening {
    socket: Listener,
    secret: u64,
}

/// An endpoint over TCP.
pub(crate) struct Tcp {
    ready: Epoll,
    /// Addresses to listen on; port 0 stands for any.
    sources: Vec<SocketAddr>,
    listeners: HashMap<u32, Listening>,
    connections: BTreeMap<Peer, Connection>,
    next: u32,
    dials: Vec<(Peer, Dial)>,
    events: Vec<Event>,
    /// Connections with new output.
    unsent: Vec<Peer>,
    scratch: Box<[u8]>,
    /// Working list of reads.
    arrived: Vec<Arrived>,
    /// This process has no descriptor for another connection, so the listener's stays readable.
    no_descriptor: bool,
    now: Instant,
    last_check: Instant,
    /// Id of the first message to each peer, and length of the longest message from one, in bytes.
    start_id: u32,
    max_read: usize,
    properties: Properties,
}

fn failed(call: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::system(call, &error)
}

fn argument(what: String) -> Error {
    Error::Argument { what }
}

/// Watches a connection's socket for `flags`.
fn watch(ready: &Epoll, socket: impl AsFd, flags: EpollFlags, peer: Peer) -> Result<(), Error> {
    let mut event = EpollEvent::new(flags, peer.0.into());
    let watched = match ready.add(&socket, event) {
        Err(Errno::EEXIST) => ready.modify(&socket, &mut event),
        added => added,
    };
    watched.map_err(|errno| failed("epoll_ctl")(errno.into()))
}

/// Returns a listener's secret in the form that both ends prove.
fn proof_secret(secret: u64) -> Secret {
    Secret::new(u128::from(secret).to_le_bytes())
}

/// Parses `source`, `ip` or `ip:port`; without one, returns the addresses selected by NCCL's variables.
fn sources(source: Option<&str>) -> Result<Vec<SocketAddr>, Error> {
    let any_port = |ip: IpAddr| SocketAddr::new(ip, 0);
    let Some(text) = source else {
        let chosen = interface::addresses().map_err(|error| argument(error.to_string()))?;
        return Ok(chosen.into_iter().map(any_port).collect());
    };
    let parsed = text.parse().or_else(|_| text.parse().map(any_port));
    parsed
        .map(|address| vec![address])
        .map_err(|_| argument(format!("source {text:?} is neither an IP address nor ip:port")))
}

impl Tcp {
    /// Opens an endpoint at `source` that doesn't listen yet.
    pub fn open(source: Option<&str>, config: &Config) -> Result<Self, Error> {
        let now = Instant::now();
        Ok(Self {
            ready: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)
                .map_err(|errno| failed("epoll_create1")(errno.into()))?,
            sources: sources(source)?,
            listeners: HashMap::new(),
            connections: BTreeMap::new(),
            next: 0,
            dials: Vec::new(),
            events: Vec::new(),
            unsent: Vec::new(),
            scratch: vec![0; SCRATCH].into(),
            arrived: Vec::new(),
            no_descriptor: false,
            now,
            last_check: now,
            start_id: config.start_id,
            max_read: config.max_message.min(MAX_MESSAGE),
            properties: Properties {
                name: Box::default(),
                provider: "tcp".to_owned(),
                transport: Transport::Tcp,
                max_message: MAX_MESSAGE,
                unread_bytes: UNREAD_BYTES,
            },
        })
    }

    fn add(&mut self, stage: Stage, entrance: Option<Entrance>) -> Peer {
        let peer = Peer(self.next);
        self.next += 1;
        let connection = Connection {
            stage,
            entrance,
            input: Input::new(self.max_read),
            output: Output::default(),
            last_heard: self.now,
            is_blocked: false,
            linger_until: None,
        };
        self.connections.insert(peer, connection);
        peer
    }

    /// Starts to use the socket of a connection that has been made and proved.
    fn begin(&mut self, peer: Peer, stream: ferrogin_rendezvous::Stream) {
        let Some(connection) = self.connections.get_mut(&peer) else { return };
        let Some(socket) = stream.into_tcp() else { return };
        let added = watch(&self.ready, &socket, EpollFlags::EPOLLIN, peer);
        connection.stage = Stage::Open(socket);
        match added {
            Ok(()) => self.write_socket(peer),
            Err(error) => self.lose(peer, error),
        }
    }

    /// Handles the end of a connection.
    fn lose(&mut self, peer: Peer, error: Error) {
        let Some(connection) = self.connections.get_mut(&peer) else { return };
        if let Stage::Open(socket) = std::mem::replace(&mut connection.stage, Stage::Over) {
            // A copy of the descriptor in a child process would keep it registered.
            let _ = self.ready.delete(&socket);
        }
        connection.output = Output::default();
        if connection.linger_until.is_some() {
            self.connections.remove(&peer);
        } else {
            self.events.push(Event::Lost { peer, loss: Loss::Connection(error) });
        }
    }

    /// Writes what the socket takes.
    fn write_socket(&mut self, peer: Peer) {
        let Self { connections, events, .. } = self;
        let Some(Connection { stage: Stage::Open(socket), output, is_blocked, linger_until, .. }) =
            connections.get_mut(&peer)
        else {
            return;
        };
        let is_done = match output.write(socket, |id, body| events.push(Event::Sent { to: peer, id, body })) {
            Ok(is_done) => is_done,
            // A read finds the end of the connection, after what arrived before it.
            Err(error) if matches!(error.kind(), BrokenPipe | ConnectionReset) => return *output = Output::default(),
            Err(error) => return self.lose(peer, failed("send")(error)),
        };
        if is_done && linger_until.is_some() {
            let _ = socket.shutdown(Shutdown::Write);
        }
        if *is_blocked == is_done {
            *is_blocked = !is_done;
            let flags = if is_done { EpollFlags::EPOLLIN } else { EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT };
            if let Err(error) = watch(&self.ready, socket, flags, peer) {
                self.lose(peer, error);
            }
        }
    }

    /// Reads what has arrived.
    fn read_socket(&mut self, peer: Peer) {
        let Self { connections, scratch, arrived, now, .. } = self;
        let Some(connection) = connections.get_mut(&peer) else { return };
        let Connection { stage: Stage::Open(socket), input, output, linger_until, .. } = connection else { return };
        let result = match linger_until {
            Some(_) => input::skip(socket, scratch),
            None => input.read(socket, scratch, arrived),
        };
        if !arrived.is_empty() {
            connection.last_heard = *now;
        }
        let is_too_long = output.is_too_long();
        let mut arrived = std::mem::take(&mut self.arrived);
        for frame in arrived.drain(..) {
            match frame {
                Arrived::Message(bytes) => self.events.push(Event::Message { from: peer, bytes }),
                Arrived::Control(message) if message.kind == Kind::Hello => self.hello(peer, message),
                Arrived::Control(message) => self.events.push(Event::Control(message)),
            }
        }
        self.arrived = arrived;
        match result {
            Ok(()) if is_too_long => {
                self.lose(peer, argument("it keeps asking for answers and reads none".to_owned()));
            }
            Ok(()) => {}
            Err(Ended::Closed) => {
                self.lose(peer, failed("recv")(io::Error::from_raw_os_error(bindings::FI_ECONNRESET)))
            }
            Err(Ended::Failed(error)) => self.lose(peer, failed("recv")(error)),
            Err(Ended::Malformed(what)) => self.lose(peer, argument(what.to_owned())),
            Err(Ended::Violated(violation)) => {
                self.events.push(Event::Lost { peer, loss: Loss::Violation(violation) });
            }
        }
    }

    /// Delivers the hello of a connection, if it's the first one and for the listener whose secret the peer has proved.
    fn hello(&mut self, peer: Peer, message: Control) {
        let Some(connection) = self.connections.get_mut(&peer) else { return };
        let Stage::Open(socket) = &connection.stage else { return };
        let is_for = |entrance: &Entrance| {
            [entrance.listener, SHARED_LISTENER].contains(&message.to) && entrance.secret == message.secret
        };
        let Some(Entrance { listener, .. }) = connection.entrance.filter(is_for) else {
            log::debug!("a hello without the secret of its listener, or a second one, was dropped");
            return;
        };
        match socket.peer_addr() {
            Ok(address) => {
                connection.entrance = None;
                let name = name::emit(&[address], NAME_MAX).into();
                self.events.push(Event::Hello(Hello { peer, name, listener, message }));
            }
            Err(error) => log::warn!("a hello cannot be answered: getpeername: {error}"),
        }
    }

    /// Accepts connections.
    fn accept(&mut self, listener: u32) {
        loop {
            let Some(Listening { socket, secret }) = self.listeners.get_mut(&listener) else { return };
            match socket.poll(self.now) {
                Ok(Some((stream, _))) => {
                    self.no_descriptor = false;
                    let entrance = Entrance { listener, secret: *secret };
                    let peer = self.add(Stage::Over, Some(entrance));
                    self.begin(peer, stream);
                }
                Ok(None) => {
                    self.no_descriptor = false;
                    return;
                }
                Err(error) => {
                    if !self.no_descriptor {
                        log::warn!("no connection can be accepted: {error}; raise `ulimit -n`");
                    }
                    self.no_descriptor = true;
                    return;
                }
            }
        }
    }

    /// Advances the connections that are being made.
    fn dial(&mut self) {
        let Self { connections, ready, now, .. } = self;
        let mut ended = Vec::new();
        let flags = |socket: &PollFd<'_>| EpollFlags::from_bits_truncate(socket.events().bits().into());
        self.dials.retain_mut(|(peer, dial)| {
            let result = match dial.poll(*now) {
                // The channel may have ended in the meantime.
                _ if !connections.contains_key(peer) => return false,
                Ok(None) if dial.is_refused() => Err(failed("connect")(dial.last_error())),
                Ok(None) => match dial.interest().map_or(Ok(()), |socket| watch(ready, &socket, flags(&socket), *peer))
                {
                    Ok(()) => return true,
                    Err(error) => Err(error),
                },
                Ok(Some(stream)) => Ok(stream),
                Err(error) => Err(failed("connect")(error)),
            };
            ended.push((*peer, result));
            false
        });
        for (peer, result) in ended {
            match result {
                Ok(stream) => self.begin(peer, stream),
                Err(error) => self.lose(peer, error),
            }
        }
    }

    /// Once in a while, gives up connections that aren't proved or closed in time.
    fn check_timeouts(&mut self) {
        if self.now.duration_since(self.last_check) < CHECK_INTERVAL {
            return;
        }
        self.last_check = self.now;
        let numbers: Vec<u32> = self.listeners.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.accept(number));
        let (now, ready) = (self.now, &self.ready);
        self.connections.retain(|_, connection| {
            let is_overdue = connection.linger_until.is_some_and(|until| now >= until);
            if is_overdue && let Stage::Open(socket) = &connection.stage {
                let _ = ready.delete(socket);
            }
            !is_overdue
        });
    }
}

impl Carrier for Tcp {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn listen(&mut self, number: u32, secret: u64) -> Result<Box<[u8]>, Error> {
        let (socket, bound) = Listener::bind(&self.sources, DOMAIN, proof_secret(secret))
            .map_err(|(address, error)| argument(format!("cannot listen on {address}: {error}")))?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER | u64::from(number));
        self.ready.add(&socket, event).map_err(|errno| failed("epoll_ctl")(errno.into()))?;
        self.listeners.insert(number, Listening { socket, secret });
        Ok(name::emit(&bound, NAME_MAX).into())
    }

    fn unlisten(&mut self, number: u32) {
        if let Some(listening) = self.listeners.remove(&number) {
            let _ = self.ready.delete(&listening.socket);
        }
    }

    fn connect(&mut self, name: &[u8], secret: u64) -> Result<Peer, Error> {
        let addresses: Vec<_> = name::parse(name).into_iter().map(Address::Tcp).collect();
        if addresses.is_empty() {
            return Err(argument("the address has no IP address and port".to_owned()));
        }
        let claim = Claim { rank: 0, nranks: 0, called: 0 };
        let peer = self.add(Stage::Dialing, None);
        self.dials.push((peer, Dial::new(addresses, DOMAIN, proof_secret(secret), claim)));
        Ok(peer)
    }

    fn send_hello(&mut self, to: Peer, hello: Control) {
        self.send_control(to, Control { id: self.start_id, ..hello });
    }

    fn open(&mut self, peer: Peer, greeting: &Control) -> FirstIds {
        if let Some(connection) = self.connections.get_mut(&peer) {
            connection.input.start_at(greeting.id);
        }
        FirstIds { write: self.start_id, read: greeting.id }
    }

    fn close(&mut self, peer: Peer) {
        let Some(connection) = self.connections.get_mut(&peer) else { return };
        if !matches!(connection.stage, Stage::Open(_)) {
            self.connections.remove(&peer);
            return;
        }
        connection.linger_until = Some(self.now + LINGER);
        connection.input = Input::new(0);
        connection.output.drop_queued();
        self.unsent.push(peer);
    }

    fn send_control(&mut self, to: Peer, message: Control) {
        match self.connections.get_mut(&to).filter(|connection| !matches!(connection.stage, Stage::Over)) {
            None => {
                let error = argument("its connection has ended".to_owned());
                self.events.push(Event::Lost { peer: to, loss: Loss::Unreachable(error) });
            }
            Some(connection) => {
                connection.output.control(&message.emit(&[]));
                self.unsent.push(to);
            }
        }
    }

    fn send(&mut self, to: Peer, id: u32, body: Payload) -> Option<Payload> {
        // The end of a connection is an event of its own.
        let connection = self.connections.get_mut(&to).filter(|connection| !matches!(connection.stage, Stage::Over))?;
        self.unsent.push(to);
        connection.output.message(id, body)
    }

    fn stop_sending(&mut self, to: Peer) {
        if let Some(connection) = self.connections.get_mut(&to) {
            connection.output.drop_queued();
        }
    }

    fn read(&mut self, from: Peer, buffer: Vec<u8>) {
        let message = self.connections.get_mut(&from).and_then(|connection| connection.input.read_message(buffer));
        self.events.extend(message.map(|bytes| Event::Message { from, bytes }));
    }

    fn flush(&mut self) {
        self.unsent.dedup();
        for peer in std::mem::take(&mut self.unsent) {
            if self.connections.get(&peer).is_some_and(|connection| !connection.is_blocked) {
                self.write_socket(peer);
            }
        }
    }

    fn poll(&mut self, now: Instant, events: &mut Vec<Event>) -> Result<bool, Error> {
        self.now = now;
        let mut batch = [EpollEvent::empty(); BATCH];
        let ready = match self.ready.wait(&mut batch, EpollTimeout::ZERO) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(errno) => return Err(failed("epoll_wait")(errno.into())),
        };
        let mut has_progressed = false;
        for event in &batch[..ready] {
            let number = event.data();
            if number & LISTENER != 0 {
                self.accept(number as u32);
                // Otherwise, it stays readable, and the caller would never rest.
                has_progressed |= !self.no_descriptor;
                continue;
            }
            has_progressed = true;
            let peer = Peer(number as u32);
            if event.events().contains(EpollFlags::EPOLLOUT) {
                self.write_socket(peer);
            }
            self.read_socket(peer);
        }
        self.dial();
        self.check_timeouts();
        self.flush();
        events.append(&mut self.events);
        Ok(has_progressed)
    }

    fn progress(&self, peer: Peer) -> Progress {
        match self.connections.get(&peer) {
            None => Progress { last_heard: self.now, reading: 0, writing: 0 },
            Some(Connection { input, output, last_heard, .. }) => {
                Progress { last_heard: *last_heard, reading: input.message_bytes(), writing: output.message_bytes() }
            }
        }
    }

    fn wait(&self) -> Option<Wait> {
        // A listener that can't accept stays readable; without a descriptor, the caller polls.
        let fd = (!self.no_descriptor).then(|| self.ready.0.as_raw_fd());
        let until = self.dials.iter().filter_map(|(_, dial)| dial.wakes()).min();
        (self.events.is_empty() && self.unsent.is_empty()).then_some(Wait { fd, until })
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.listeners.clear();
        let addresses: Vec<_> = self.connections.keys().copied().collect();
        addresses.into_iter().for_each(|peer| self.close(peer));
        let end = Instant::now() + CLOSE_GRACE;
        while !self.connections.is_empty() && Instant::now() < end {
            let mut events = Vec::new();
            if self.poll(Instant::now(), &mut events).is_err() {
                return;
            }
            let _ = stream::wait(&mut [PollFd::new(self.ready.0.as_fd(), PollFlags::POLLIN)], end);
        }
    }
}
