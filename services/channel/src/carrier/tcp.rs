//! Channels over TCP: one connection per channel, which carries nothing until both ends have proved that they know the listener's secret
//! ([`ferrogin_rendezvous`]).
//!
//! A connection carries [frames](frame). It's read all the time, so that control messages and the end of the connection are noticed even
//! while nobody reads messages: a short message without a receive waits here, and a long one is offered, and sent once its receive is
//! posted.

mod frame;
#[allow(unsafe_code)]
mod input;
mod output;

use std::collections::HashMap;
use std::io;
use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};

use ferrogin_libfabric::{Error, bindings};
use ferrogin_rendezvous::proof::Domain;
use ferrogin_rendezvous::{Address, Claim, Dial, Listener, Secret, interface, stream};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::Payload;
use crate::proto::name;
use crate::proto::tags::Pattern;
use crate::proto::transport::{Addr, Event, Properties, Receive, ReceiveResult, SendResult, Transport};
use crate::proto::wire::{NAME_MAX, VERSION};
use input::{Ended, Input, Shared};
use output::Output;

/// The domain that the proofs of a connection's secret are bound to.
const DOMAIN: Domain = *b"channel\x06";
const _: () = assert!(DOMAIN[7] == VERSION);
/// Length of the longest message in bytes.
const MAX_MESSAGE: usize = 1 << 40;
/// Bytes of one read whose destination isn't known yet.
const SCRATCH: usize = 64 << 10;
/// How many socket events are taken at once.
const BATCH: usize = 64;
/// How long a peer may take to close a connection that this end has left.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);
/// How long the last messages may take when the endpoint is closed.
const CLOSE_GRACE: Duration = Duration::from_millis(100);
/// Time between two checks for connections that aren't proved or closed in time.
const LOOK_EVERY: Duration = Duration::from_secs(1);
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

/// A connection to a peer.
struct Connection {
    stage: Stage,
    input: Input,
    output: Output,
    /// The output is waiting for room in the socket.
    is_blocked: bool,
    /// The channel has ended: what arrives is dropped, and at this time so is the connection.
    leaves: Option<Instant>,
}

/// An endpoint over TCP.
pub(crate) struct Tcp {
    ready: Epoll,
    /// Addresses to listen on; port 0 stands for any.
    sources: Vec<SocketAddr>,
    listeners: HashMap<u32, Listener>,
    connections: HashMap<Addr, Connection>,
    next: u64,
    dials: Vec<(Addr, Dial)>,
    shared: Shared,
    /// Connections with new output.
    unsent: Vec<Addr>,
    scratch: Box<[u8]>,
    /// This process has no descriptor for another connection, so the listener's stays readable.
    no_descriptor: bool,
    now: Instant,
    looked: Instant,
    properties: Properties,
}

fn failed(call: &'static str) -> impl Fn(io::Error) -> Error {
    move |error| Error::system(call, &error)
}

fn argument(what: String) -> Error {
    Error::Argument { what }
}

/// Watches a connection's socket for `flags`.
fn watch(ready: &Epoll, socket: impl AsFd, flags: EpollFlags, addr: Addr) -> Result<(), Error> {
    let mut event = EpollEvent::new(flags, addr.0);
    let watched = match ready.add(&socket, event) {
        Err(Errno::EEXIST) => ready.modify(&socket, &mut event),
        added => added,
    };
    watched.map_err(|errno| failed("epoll_ctl")(errno.into()))
}

/// A listener's secret in the form that both ends prove.
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
    pub fn open(source: Option<&str>) -> Result<Self, Error> {
        let now = Instant::now();
        Ok(Self {
            ready: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)
                .map_err(|errno| failed("epoll_create1")(errno.into()))?,
            sources: sources(source)?,
            listeners: HashMap::new(),
            connections: HashMap::new(),
            next: 0,
            dials: Vec::new(),
            shared: Shared::default(),
            unsent: Vec::new(),
            scratch: vec![0; SCRATCH].into(),
            no_descriptor: false,
            now,
            looked: now,
            properties: Properties::of_tcp(MAX_MESSAGE),
        })
    }

    fn add(&mut self, stage: Stage) -> Addr {
        let addr = Addr(self.next);
        self.next += 1;
        let (input, output) = (Input::new(addr), Output::default());
        self.connections.insert(addr, Connection { stage, input, output, is_blocked: false, leaves: None });
        addr
    }

    /// Starts to use the socket of a connection that has been made and proved.
    fn begin(&mut self, addr: Addr, stream: ferrogin_rendezvous::Stream) {
        let Some(connection) = self.connections.get_mut(&addr) else { return };
        let Some(socket) = stream.into_tcp() else { return };
        let added = watch(&self.ready, &socket, EpollFlags::EPOLLIN, addr);
        connection.stage = Stage::Open(socket);
        match added {
            Ok(()) => self.write(addr),
            Err(error) => self.lose(addr, error),
        }
    }

    /// Handles the end of a connection.
    fn lose(&mut self, addr: Addr, error: Error) {
        let Some(connection) = self.connections.get_mut(&addr) else { return };
        if let Stage::Open(socket) = std::mem::replace(&mut connection.stage, Stage::Over) {
            // A copy of the descriptor in a child process would keep it registered.
            let _ = self.ready.delete(&socket);
        }
        connection.output = Output::default();
        if connection.leaves.is_some() {
            self.connections.remove(&addr);
        } else {
            self.shared.events.push(Event::Lost { peer: addr, error });
        }
    }

    /// Writes what the socket takes.
    fn write(&mut self, addr: Addr) {
        let Some(Connection { stage: Stage::Open(socket), output, is_blocked, leaves, .. }) =
            self.connections.get_mut(&addr)
        else {
            return;
        };
        let sent = match output.write(socket, &mut self.shared.events) {
            Ok(sent) => sent,
            // A read finds the end of the connection, after what arrived before it.
            Err(error) if matches!(error.kind(), BrokenPipe | ConnectionReset) => return *output = Output::default(),
            Err(error) => return self.lose(addr, failed("send")(error)),
        };
        if sent && leaves.is_some() {
            let _ = socket.shutdown(Shutdown::Write);
        }
        if *is_blocked == sent {
            *is_blocked = !sent;
            let flags = if sent { EpollFlags::EPOLLIN } else { EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT };
            if let Err(error) = watch(&self.ready, socket, flags, addr) {
                self.lose(addr, error);
            }
        }
    }

    /// Reads what has arrived.
    fn read(&mut self, addr: Addr) {
        let Self { connections, scratch, shared, unsent, .. } = self;
        let Some(Connection { stage: Stage::Open(socket), input, output, leaves, .. }) = connections.get_mut(&addr)
        else {
            return;
        };
        let result = match leaves {
            Some(_) => input::skip(socket, scratch),
            None => input.read(socket, scratch, output, shared),
        };
        if !output.is_empty() {
            unsent.push(addr);
        }
        match result {
            Ok(()) if output.is_too_long() => {
                self.lose(addr, argument("it keeps asking for answers and reads none".to_owned()));
            }
            Ok(()) => {}
            Err(Ended::Closed) => {
                self.lose(addr, failed("recv")(io::Error::from_raw_os_error(bindings::FI_ECONNRESET)))
            }
            Err(Ended::Failed(error)) => self.lose(addr, failed("recv")(error)),
            Err(Ended::Malformed(what)) => self.lose(addr, argument(what.to_owned())),
        }
    }

    /// Accepts connections.
    fn accept(&mut self, number: u32) {
        loop {
            let Some(listener) = self.listeners.get_mut(&number) else { return };
            match listener.poll(self.now) {
                Ok(Some((stream, _))) => {
                    self.no_descriptor = false;
                    let addr = self.add(Stage::Over);
                    self.begin(addr, stream);
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
        self.dials.retain_mut(|(addr, dial)| {
            let result = match dial.poll(*now) {
                // The channel may have ended in the meantime.
                _ if !connections.contains_key(addr) => return false,
                Ok(None) if dial.is_refused() => Err(failed("connect")(dial.last_error())),
                Ok(None) => match dial.interest().map_or(Ok(()), |socket| watch(ready, &socket, flags(&socket), *addr))
                {
                    Ok(()) => return true,
                    Err(error) => Err(error),
                },
                Ok(Some(stream)) => Ok(stream),
                Err(error) => Err(failed("connect")(error)),
            };
            ended.push((*addr, result));
            false
        });
        for (addr, result) in ended {
            match result {
                Ok(stream) => self.begin(addr, stream),
                Err(error) => self.lose(addr, error),
            }
        }
    }

    /// Once in a while, gives up connections that aren't proved or closed in time.
    fn look(&mut self) {
        if self.now.duration_since(self.looked) < LOOK_EVERY {
            return;
        }
        self.looked = self.now;
        let numbers: Vec<u32> = self.listeners.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.accept(number));
        let now = self.now;
        let overdue = |connection: &Connection| connection.leaves.is_some_and(|leaves| now >= leaves);
        for (_, connection) in self.connections.extract_if(|_, connection| overdue(connection)) {
            if let Stage::Open(socket) = &connection.stage {
                let _ = self.ready.delete(socket);
            }
        }
    }
}

impl Transport for Tcp {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn listen(&mut self, number: u32, secret: u64) -> Result<Box<[u8]>, Error> {
        let (listener, bound) = Listener::bind(&self.sources, DOMAIN, proof_secret(secret))
            .map_err(|(address, error)| argument(format!("cannot listen on {address}: {error}")))?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER | u64::from(number));
        self.ready.add(&listener, event).map_err(|errno| failed("epoll_ctl")(errno.into()))?;
        self.listeners.insert(number, listener);
        Ok(name::emit(&bound, NAME_MAX).into())
    }

    fn unlisten(&mut self, number: u32) {
        if let Some(listener) = self.listeners.remove(&number) {
            let _ = self.ready.delete(&listener);
        }
    }

    fn connect(&mut self, name: &[u8], secret: u64) -> Result<Addr, Error> {
        let addresses: Vec<_> = name::parse(name).into_iter().map(Address::Tcp).collect();
        if addresses.is_empty() {
            return Err(argument("the address has no IP address and port".to_owned()));
        }
        let claim = Claim { rank: 0, nranks: 0, called: 0 };
        let addr = self.add(Stage::Dialing);
        self.dials.push((addr, Dial::new(addresses, DOMAIN, proof_secret(secret), claim)));
        Ok(addr)
    }

    fn identify(&mut self, from: Option<Addr>, _: &[u8]) -> Result<(Addr, Box<[u8]>), Error> {
        let connection = from.and_then(|from| Some((from, self.connections.get(&from)?)));
        let Some((from, Connection { stage: Stage::Open(socket), .. })) = connection else {
            return Err(argument("its connection has ended".to_owned()));
        };
        let peer = socket.peer_addr().map_err(failed("getpeername"))?;
        Ok((from, name::emit(&[peer], NAME_MAX).into()))
    }

    fn disconnect(&mut self, peer: Addr) {
        let Some(connection) = self.connections.get_mut(&peer) else { return };
        if !matches!(connection.stage, Stage::Open(_)) {
            self.connections.remove(&peer);
            return;
        }
        connection.leaves = Some(self.now + LEAVE_LIMIT);
        connection.input = Input::new(peer);
        connection.output.drop_long();
        self.unsent.push(peer);
    }

    fn send(&mut self, to: Addr, tag: u64, body: Payload, token: u64, _: bool) -> SendResult {
        match self.connections.get_mut(&to).filter(|connection| !matches!(connection.stage, Stage::Over)) {
            None => SendResult::Failed(body, argument("its connection has ended".to_owned())),
            Some(connection) => {
                self.unsent.push(to);
                connection.output.send(tag, body, token)
            }
        }
    }

    fn flush(&mut self) {
        for addr in std::mem::take(&mut self.unsent) {
            if self.connections.get(&addr).is_some_and(|connection| !connection.is_blocked) {
                self.write(addr);
            }
        }
    }

    fn receive(&mut self, receive: Receive) -> ReceiveResult {
        let Self { connections, shared, unsent, .. } = self;
        match receive.from {
            Some(from) => match connections.get_mut(&from) {
                None => return ReceiveResult::Failed(receive.buffer, argument("its connection has ended".to_owned())),
                Some(connection) => {
                    connection.input.receive(receive, &mut connection.output, shared);
                    if !connection.output.is_empty() {
                        unsent.push(from);
                    }
                }
            },
            None => {
                let mut left = Some(receive);
                for (addr, connection) in connections {
                    let Some(receive) = left.take() else { break };
                    left = connection.input.receive_waiting(receive, &mut connection.output, shared);
                    if left.is_none() && !connection.output.is_empty() {
                        unsent.push(*addr);
                    }
                }
                shared.any_source.extend(left);
            }
        }
        ReceiveResult::Posted
    }

    fn peek(&mut self, from: Option<Addr>, pattern: Pattern, token: u64) -> bool {
        let found = match from {
            Some(from) => {
                self.connections.get(&from).and_then(|connection| Some((from, connection.input.peek(pattern)?)))
            }
            None => {
                self.connections.iter().find_map(|(addr, connection)| Some((*addr, connection.input.peek(pattern)?)))
            }
        };
        let found = found.map(|(addr, tag)| (tag, Some(addr)));
        self.shared.events.push(Event::Peeked { token, found });
        true
    }

    fn cancel(&mut self, which: &dyn Fn(u64) -> bool) {
        for connection in self.connections.values_mut() {
            connection.input.cancel(which, &mut self.shared);
        }
        self.shared.cancel(which);
    }

    fn poll(&mut self, now: Instant, events: &mut Vec<Event>) -> Result<(), Error> {
        self.now = now;
        let mut batch = [EpollEvent::empty(); BATCH];
        let ready = match self.ready.wait(&mut batch, EpollTimeout::ZERO) {
            Ok(count) => count,
            Err(Errno::EINTR) => 0,
            Err(errno) => return Err(failed("epoll_wait")(errno.into())),
        };
        for event in &batch[..ready] {
            let addr = Addr(event.data());
            if addr.0 & LISTENER != 0 {
                self.accept(addr.0 as u32);
                continue;
            }
            if event.events().contains(EpollFlags::EPOLLOUT) {
                self.write(addr);
            }
            self.read(addr);
        }
        self.dial();
        self.look();
        self.flush();
        events.append(&mut self.shared.events);
        Ok(())
    }

    fn wait_fd(&self) -> Option<RawFd> {
        // A listener that can't accept stays readable; without a descriptor, the caller polls.
        (!self.no_descriptor).then(|| self.ready.0.as_raw_fd())
    }

    fn wakes(&self) -> Option<Instant> {
        self.dials.iter().filter_map(|(_, dial)| dial.wakes()).min()
    }

    fn may_wait(&self) -> bool {
        self.shared.events.is_empty() && self.unsent.is_empty()
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.listeners.clear();
        let addresses: Vec<_> = self.connections.keys().copied().collect();
        addresses.into_iter().for_each(|addr| self.disconnect(addr));
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

#[cfg(test)]
mod tests {
    use super::*;
    use ferrogin_test_support::wait::wait_until;
    use std::io::Write;
    use std::net::{Ipv4Addr, TcpListener};

    const SECRET: u64 = 7;

    fn open() -> Tcp {
        Tcp::open(Some("127.0.0.1")).unwrap()
    }

    fn poll(tcp: &mut Tcp) -> Vec<Event> {
        let mut events = Vec::new();
        tcp.poll(Instant::now(), &mut events).unwrap();
        events
    }

    /// True if something has happened on a socket.
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
        assert!(tcp.wait_fd().is_some() && tcp.wakes().is_none() && !is_ready(&tcp), "the peer has not answered");
        listener.accept().unwrap().0.write_all(&[0]).unwrap();
        wait_until("answer", || is_ready(&tcp));
    }

    #[test]
    fn receive_without_a_message_leaves_nothing_to_send() {
        let (mut here, mut there) = (open(), open());
        let name = here.listen(1, SECRET).unwrap();
        let to = there.connect(&name, SECRET).unwrap();
        wait_until("connection", || {
            poll(&mut here);
            poll(&mut there);
            matches!(there.connections[&to].stage, Stage::Open(_))
        });
        let receive = |token| Receive {
            from: Some(to),
            pattern: Pattern { tag: 1, ignore: 0 },
            token,
            buffer: Vec::new(),
            len: 1 << 20,
        };
        assert!(matches!(there.receive(receive(1)), ReceiveResult::Posted));
        assert!(there.may_wait(), "there is nothing to send");
        // The request for a long message is sent.
        let from = *here.connections.keys().next().unwrap();
        here.send(from, 2, vec![1u8; 1 << 20].into(), 1, false);
        here.flush();
        wait_until("offer", || {
            poll(&mut there);
            there.connections[&to].input.peek(Pattern { tag: 2, ignore: 0 }).is_some()
        });
        there.receive(Receive { pattern: Pattern { tag: 2, ignore: 0 }, ..receive(2) });
        assert!(!there.may_wait());
    }
}
