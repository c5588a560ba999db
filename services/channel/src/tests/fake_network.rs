//! A hostile network: it delivers, matches and completes in any order, asks for retries at random, and loses endpoints
//! on request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use ferrogin_test_support::Random;
use ferrogin_test_support::wait::poll_until;

use crate::Payload;
use crate::carrier::tags::endpoint::{
    Abilities, Addr, CONTROL, Completion, Endpoint, Found, ID_MASK, Operation, Pattern, Receive, ReceiveError,
    ReceiveResult, Received, Send, SendResult, Token,
};
use ferrogin_libfabric::{Error, bindings};

/// Of the operations that a test posts itself.
const TOKEN: Token = Token { operation: Operation::SendControl, session: None, id: 0 };

struct Message {
    from: usize,
    to: usize,
    tag: u64,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Port {
    posted: Vec<Receive>,
    unexpected: Vec<Message>,
    /// Completions that haven't been reported yet.
    completions: Vec<Completion>,
    dead: bool,
    /// Polling it panics.
    broken: bool,
    /// The endpoint accepts no sends.
    full: bool,
}

struct State {
    random: Random,
    ports: Vec<Port>,
    by_name: HashMap<Vec<u8>, usize>,
    in_flight: Vec<Message>,
    /// Sends whose bytes are still being read: the message leaves when they end, with the bytes as they are then.
    sending: Vec<(Message, Payload, Token)>,
    hostile: bool,
}

/// The network.
#[derive(Clone)]
pub struct Net(Arc<Mutex<State>>);

/// One endpoint on it.
pub struct Fake {
    net: Net,
    port: usize,
    pub abilities: Abilities,
    /// Bodies of up to this many bytes are copied, so their sends are done at once.
    pub copied: usize,
    /// Tags of the sends that were accepted.
    pub sent: Vec<u64>,
}

fn refused() -> Error {
    Error::Call { call: "fi_tsend", code: bindings::FI_ECONNREFUSED, text: "no such endpoint".to_owned() }
}

impl Net {
    /// `hostile` reorders, delays and asks for retries; otherwise everything is prompt.
    pub fn new(seed: u64, hostile: bool) -> Self {
        let state = State {
            random: Random::new(seed),
            ports: Vec::new(),
            by_name: HashMap::new(),
            in_flight: Vec::new(),
            sending: Vec::new(),
            hostile,
        };
        Self(Arc::new(Mutex::new(state)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub fn endpoint(&self) -> Fake {
        let mut state = self.state();
        let port = state.ports.len();
        state.ports.push(Port::default());
        let fake = self.fake(port);
        state.by_name.insert(fake.abilities.name.to_vec(), port);
        fake
    }

    fn fake(&self, port: usize) -> Fake {
        let name = format!("fake-{port}").into_bytes().into();
        let abilities = Abilities {
            name,
            provider: "fake".to_owned(),
            max_message: 1 << 20,
            payload_window: usize::MAX,
            can_discard_stale: true,
        };
        Fake { net: self.clone(), port, abilities, copied: 0, sent: Vec::new() }
    }

    /// Kills an endpoint: it sends and receives nothing more, and sends to it fail.
    pub fn kill(&self, port: usize) {
        let mut state = self.state();
        state.ports[port].dead = true;
        state.in_flight.retain(|message| message.to != port && message.from != port);
    }

    /// While `full`, the endpoint accepts no sends.
    pub fn set_full(&self, port: usize, full: bool) {
        self.state().ports[port].full = full;
    }

    /// Returns how many messages to the endpoint no receive has matched.
    pub fn unmatched(&self, port: usize) -> usize {
        self.state().ports[port].unexpected.len()
    }

    /// Makes the endpoint panic when it's next polled.
    pub fn break_down(&self, port: usize) {
        self.state().ports[port].broken = true;
    }

    /// Replaces an endpoint with a new one of the same name. Messages from and to the old one may still arrive.
    pub fn replace(&self, port: usize) -> Fake {
        let mut state = self.state();
        let State { sending, in_flight, .. } = &mut *state;
        let gone = sending.extract_if(.., |(message, ..)| message.from == port);
        in_flight.extend(gone.map(|(message, body, _)| Message { bytes: body.as_slice().to_vec(), ..message }));
        state.ports[port] = Port::default();
        self.fake(port)
    }
}

/// What a test does with an endpoint itself.
pub trait Crafting: Endpoint {
    /// Sends a message.
    fn post(&mut self, to: Addr, tag: u64, body: impl Into<Payload>) {
        let mut body = Some(body.into());
        poll_until("send", || {
            let Some(unsent) = body.take() else { return true };
            if let SendResult::Retry(unsent) = self.send(Send { to, tag, body: unsent, token: TOKEN, more: false }) {
                body = Some(unsent);
            }
            body.is_none()
        });
    }

    /// Returns the completions since the last call.
    fn completions(&mut self) -> Vec<Completion> {
        let mut completions = Vec::new();
        self.poll(&mut completions).unwrap();
        completions
    }

    /// Receives a control message.
    fn receive_control(&mut self, from: Addr) {
        let (pattern, len) = (Pattern { tag: CONTROL, ignore: ID_MASK }, 200);
        let receive = Receive { from: Some(from), pattern, buffer: Vec::new(), len, token: TOKEN };
        assert!(matches!(self.receive(receive), ReceiveResult::Posted));
    }
}

impl<E: Endpoint + ?Sized> Crafting for E {}

impl State {
    fn must_retry(&mut self) -> bool {
        self.hostile && self.random.index(5) == 0
    }

    /// Ends one send, chosen at random.
    fn end_a_send(&mut self) {
        if self.sending.is_empty() {
            return;
        }
        let at = self.random.index(self.sending.len());
        let (mut message, body, token) = self.sending.swap_remove(at);
        // Read the bytes as late as possible, as a retransmission does.
        message.bytes = body.as_slice().to_vec();
        let (from, to) = (message.from, message.to);
        let result = if self.ports[to].dead { Err(refused()) } else { Ok(()) };
        if result.is_ok() {
            self.in_flight.push(message);
        }
        self.ports[from].completions.push(Completion::Sent { token, body, result });
    }

    /// Delivers one message, chosen at random.
    fn deliver(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        let at = if self.hostile { self.random.index(self.in_flight.len()) } else { 0 };
        let message = self.in_flight.remove(at);
        let port = &mut self.ports[message.to];
        match port.posted.iter().position(|posted| fits(posted.from, posted.pattern, &message)) {
            Some(at) => {
                let posted = port.posted.remove(at);
                port.completions.push(received(posted, message));
            }
            None => port.unexpected.push(message),
        }
    }
}

fn received(posted: Receive, message: Message) -> Completion {
    let Receive { mut buffer, len, token, .. } = posted;
    buffer.clear();
    buffer.extend_from_slice(&message.bytes[..message.bytes.len().min(len)]);
    let fits = message.bytes.len() <= len;
    let result = if fits { Ok(()) } else { Err(ReceiveError::Truncated) };
    // Most providers do not report the sender of a truncated message.
    let from = fits.then_some(Addr(message.from as u64));
    Completion::Received(Received { token, bytes: buffer, tag: message.tag, from, result })
}

fn fits(from: Option<Addr>, pattern: Pattern, message: &Message) -> bool {
    pattern.matches(message.tag) && from.is_none_or(|from| from.0 as usize == message.from)
}

impl Endpoint for Fake {
    fn abilities(&self) -> &Abilities {
        &self.abilities
    }

    fn insert(&mut self, name: &[u8]) -> Result<Addr, Error> {
        self.net.state().by_name.get(name).map(|port| Addr(*port as u64)).ok_or_else(refused)
    }

    fn send(&mut self, Send { to, tag, body, token, .. }: Send) -> SendResult {
        let mut state = self.net.state();
        if state.ports[self.port].full || state.must_retry() {
            return SendResult::Retry(body);
        }
        let message = Message { from: self.port, to: to.0 as usize, tag, bytes: Vec::new() };
        self.sent.push(tag);
        if body.len() <= self.copied || state.hostile && body.is_word() && state.random.index(2) == 0 {
            let bytes = body.as_slice().to_vec();
            state.in_flight.push(Message { bytes, ..message });
            return SendResult::Done(body);
        }
        state.sending.push((message, body, token));
        SendResult::Posted
    }

    fn receive(&mut self, posted: Receive) -> ReceiveResult {
        let mut state = self.net.state();
        if state.must_retry() {
            return ReceiveResult::Retry(posted.buffer);
        }
        let port = &mut state.ports[self.port];
        match port.unexpected.iter().position(|message| fits(posted.from, posted.pattern, message)) {
            Some(at) => {
                let message = port.unexpected.remove(at);
                port.completions.push(received(posted, message));
            }
            None => port.posted.push(posted),
        }
        ReceiveResult::Posted
    }

    fn peek(&mut self, from: Option<Addr>, pattern: Pattern, token: Token) -> bool {
        let mut state = self.net.state();
        if state.must_retry() {
            return false;
        }
        let port = &mut state.ports[self.port];
        let found = port.unexpected.iter().find(|message| fits(from, pattern, message));
        let found = found.map(|message| Found { tag: message.tag, from: Some(Addr(message.from as u64)) });
        port.completions.push(Completion::Peeked { token, found });
        true
    }

    fn cancel(&mut self, which: &dyn Fn(Token) -> bool) {
        let mut state = self.net.state();
        let port = &mut state.ports[self.port];
        port.completions.extend(port.posted.extract_if(.., |posted| which(posted.token)).map(|posted| {
            Completion::Received(Received {
                token: posted.token,
                bytes: posted.buffer,
                tag: 0,
                from: None,
                result: Err(ReceiveError::Cancelled),
            })
        }));
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<(), Error> {
        // Not under the lock, which other endpoints need.
        let broken = self.net.state().ports[self.port].broken;
        assert!(!broken, "the test asked for a panic");
        let mut state = self.net.state();
        let rounds = if state.hostile { state.random.index(6) } else { 1000 };
        for _ in 0..rounds {
            state.end_a_send();
            state.deliver();
        }
        let State { random, ports, hostile, .. } = &mut *state;
        let waiting = &mut ports[self.port].completions;
        let reported = if *hostile { random.index(waiting.len() + 1) } else { waiting.len() };
        for _ in 0..reported {
            let at = if *hostile { random.index(waiting.len()) } else { 0 };
            completions.push(waiting.remove(at));
        }
        Ok(())
    }
}
