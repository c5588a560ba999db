//! The card's state, behind one lock: the engine works on it, and set-up changes it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use mlx5::device::DeviceError;
use mlx5::wire::Syndrome;
use soft_nic::random::Random;

use super::connection::{Address, Connection};
use super::cq::{Completion, CompletionQueue};
use super::frame::{Frame, Kind, VERSION};
use super::mkey::MkeyTable;
use super::qp::{Issued, Progress, QueuePair, State};
use super::receive::{Receive, ReceiveQueue};
use super::settings::Settings;

/// The card's connection to itself: requests are sent on the first end and arrive on the second.
pub(super) const LOOP_OUT: u32 = 0;
pub(super) const LOOP_IN: u32 = 1;
/// The most log lines per card. A broken program can violate one rule a million times.
const MAX_LINES: u32 = 200;
/// Polls per call to `accept`.
const ACCEPT_EVERY: u32 = 32;
/// Queue pair numbers have 24 bits; the lowest are reserved.
const FIRST_QPN: u32 = 0x40;
const MAX_QPN: u32 = 0x00ff_fffe;

pub(super) struct Core {
    pub address: Address,
    pub settings: Settings,
    pub random: Random,
    pub mkeys: MkeyTable,
    pub cqs: BTreeMap<u32, CompletionQueue>,
    pub qps: BTreeMap<u32, QueuePair>,
    /// Receive queues by number. A queue pair's own queue has the queue pair's number.
    pub receives: BTreeMap<u32, ReceiveQueue>,
    pub connections: BTreeMap<u32, Connection>,
    pub connection_of: HashMap<Address, u32>,
    listener: TcpListener,
    next: u32,
    lines: u32,
    polls: u32,
}

impl Core {
    pub(super) fn new(address: Address, listener: TcpListener, settings: Settings) -> Self {
        let mut random = settings.seed.map_or_else(Random::from_system, Random::seeded);
        let mkeys = MkeyTable::new(random.next_u32());
        let next = FIRST_QPN + random.next_u32() % (MAX_QPN / 2);
        let connections = BTreeMap::from([(LOOP_OUT, Connection::memory()), (LOOP_IN, Connection::memory())]);
        Self {
            address,
            settings,
            random,
            mkeys,
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            receives: BTreeMap::new(),
            connections,
            connection_of: HashMap::new(),
            listener,
            next,
            lines: 0,
            polls: 0,
        }
    }

    pub(super) fn log(&mut self, what: fmt::Arguments<'_>) {
        self.lines += 1;
        match self.lines {
            0..MAX_LINES => soft_nic::log::line(format_args!("softefa mlx5: {what}")),
            MAX_LINES => soft_nic::log::line(format_args!("softefa mlx5: {what}; no more lines from this card")),
            _ => {}
        }
    }

    /// Returns a number that none of the card's objects uses.
    pub(super) fn number(&mut self) -> u32 {
        loop {
            self.next = if self.next >= MAX_QPN { FIRST_QPN } else { self.next + 1 };
            let number = self.next;
            let used = self.qps.contains_key(&number) || self.receives.contains_key(&number);
            if !used && !self.cqs.contains_key(&number) {
                return number;
            }
        }
    }

    pub(super) fn add_connection(&mut self, connection: Connection) -> u32 {
        let id = self.connections.keys().next_back().map_or(0, |last| last + 1);
        self.connections.insert(id, connection);
        id
    }

    /// Returns the random delay of the next key change.
    pub(super) fn lateness(&mut self) -> Duration {
        let most = self.settings.max_bind_delay.as_micros().min(u128::from(u32::MAX - 1)) as u32;
        Duration::from_micros(self.random.below(u64::from(most) + 1))
    }

    pub(super) fn push_completion(&mut self, cq: u32, completion: Completion) {
        if let Some(queue) = self.cqs.get_mut(&cq) {
            queue.push_completion(completion);
        }
    }

    /// Whether a queue pair has a receive posted.
    pub(super) fn has_receive(&self, qpn: u32) -> bool {
        let queue = self.qps.get(&qpn).and_then(|qp| self.receives.get(&qp.receives));
        queue.is_some_and(ReceiveQueue::is_ready)
    }

    /// Takes a queue pair's next receive.
    pub(super) fn take_receive(&mut self, qpn: u32) -> Option<Receive> {
        let receives = self.qps.get(&qpn)?.receives;
        self.receives.get_mut(&receives)?.take()
    }

    /// Puts a queue pair into the error state: the card flushes its current and future requests.
    pub(super) fn break_qp(&mut self, qpn: u32) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        if qp.state == State::Error {
            return;
        }
        qp.state = State::Error;
        qp.incoming = None;
        qp.inbox.clear();
        qp.rung = true;
        self.retire(qpn);
        self.flush_receives(qpn);
    }

    /// Flushes a failed queue pair's receives, but not those of a shared queue.
    fn flush_receives(&mut self, qpn: u32) -> bool {
        let Some(qp) = self.qps.get(&qpn) else { return false };
        let (cq, own) = (qp.recv_cq, qp.receives == qpn);
        let mut moved = false;
        while own && let Some(receive) = self.take_receive(qpn) {
            let (index, syndrome) = (receive.index, Syndrome::WrFlush);
            self.push_completion(cq, Completion::Failed { qpn, srqn: 0, index, opcode: 0, syndrome, receive: true });
            moved = true;
        }
        moved
    }

    /// Polls everything once. Returns true if there was work.
    pub(super) fn poll(&mut self) -> bool {
        self.polls = self.polls.wrapping_add(1);
        let mut moved = self.polls.is_multiple_of(ACCEPT_EVERY) && self.accept();
        let ids: Vec<u32> = self.connections.keys().copied().collect();
        for id in &ids {
            moved |= self.receive(*id);
        }
        let now = Instant::now();
        let qpns: Vec<u32> = self.qps.keys().copied().collect();
        for qpn in qpns {
            moved |= self.poll_queue_pair(qpn, now);
        }
        moved |= self.exchange_loop();
        for id in ids {
            moved |= self.send(id);
        }
        moved | self.complete()
    }

    /// Writes completions. If a queue is overrun, the queue pairs that complete into it go to the error state.
    fn complete(&mut self) -> bool {
        let (mut moved, mut lost) = (false, Vec::new());
        for (cqn, queue) in &mut self.cqs {
            let before = queue.overrun;
            moved |= queue.flush();
            if queue.overrun && !before {
                lost.push(*cqn);
            }
        }
        for cqn in lost {
            self.log(format_args!(
                "CQ {cqn:#x}: overrun: every slot holds a completion that was not polled; poll more often or make \
                 the queue larger"
            ));
            let uses = |qp: &QueuePair| qp.send_cq == cqn || qp.recv_cq == cqn;
            let users: Vec<u32> = self.qps.iter().filter(|(_, qp)| uses(qp)).map(|(qpn, _)| *qpn).collect();
            users.into_iter().for_each(|qpn| self.break_qp(qpn));
        }
        moved
    }

    fn poll_queue_pair(&mut self, qpn: u32, now: Instant) -> bool {
        let Some(qp) = self.qps.get_mut(&qpn) else { return false };
        let mut moved = false;
        match qp.take_doorbell(qpn) {
            Ok(rung) => qp.rung |= rung,
            Err(value) => {
                self.log(format_args!(
                    "QP {qpn:#x}: {value:#018x} in its doorbell register does not match any of its requests"
                ));
                self.break_qp(qpn);
            }
        }
        moved |= self.settle(qpn, Some(now));
        moved |= self.respond(qpn);
        let Some(qp) = self.qps.get_mut(&qpn) else { return moved };
        if qp.rung {
            moved |= self.issue(qpn);
        }
        let Some(qp) = self.qps.get_mut(&qpn) else { return moved };
        let full = qp.blocked || !qp.issued.is_empty();
        // Once all requests covered by the doorbell have been taken, wait for the next doorbell.
        qp.rung &= full || qp.state == State::Error;
        if qp.state == State::Error {
            moved |= self.flush_receives(qpn);
        }
        moved
    }

    /// Accepts connections. Returns true if there were any.
    pub(super) fn accept(&mut self) -> bool {
        let mut moved = false;
        while let Ok((stream, _)) = self.listener.accept() {
            if let Ok(connection) = Connection::accepted(stream) {
                self.add_connection(connection);
                moved = true;
            }
        }
        moved
    }

    fn receive(&mut self, id: u32) -> bool {
        let Some(connection) = self.connections.get_mut(&id) else { return false };
        let came = connection.fill();
        let mut moved = matches!(came, Ok(true));
        loop {
            let Some(connection) = self.connections.get_mut(&id) else { return true };
            match connection.next() {
                Ok(Some(frame)) => {
                    moved = true;
                    self.dispatch(id, frame);
                }
                Ok(None) => break,
                Err(header) => {
                    self.log(format_args!("closed a connection after a malformed frame: {header:?}"));
                    self.lose(id);
                    return true;
                }
            }
        }
        if came.is_err() {
            self.lose(id);
            return true;
        }
        moved
    }

    fn dispatch(&mut self, id: u32, frame: Frame) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if !connection.authenticated {
            let header = &frame.header;
            let (version, nonce) = (header.rkey.get(), header.operand.get());
            if frame.kind == Kind::Hello && version == VERSION && nonce == self.address.nonce {
                connection.authenticated = true;
                return;
            }
            if frame.kind == Kind::Hello && version != VERSION {
                self.log(format_args!(
                    "a card of version {version} connected, but this is version {VERSION}: use the same release on both sides"
                ));
            } else {
                self.log(format_args!("refused a connection that did not send the nonce of this card's address"));
            }
            self.lose(id);
            return;
        }
        match frame.kind {
            Kind::Hello => {}
            Kind::Ack => self.acknowledged(&frame.header),
            Kind::Data => self.arrived(&frame),
            _ => {
                let qpn = frame.header.dst_qpn.get();
                match self.qps.get_mut(&qpn) {
                    Some(qp) if qp.state != State::Error => qp.inbox.push_back((id, frame)),
                    // A closed or failed queue pair doesn't answer, so the peer's retries run out.
                    _ if frame.kind != Kind::Datagram => self.no_answer(id, &frame),
                    _ => {}
                }
            }
        }
    }

    fn no_answer(&mut self, id: u32, frame: &Frame) {
        if let Some(connection) = self.connections.get_mut(&id) {
            let (src, dst) = (frame.header.dst_qpn.get(), frame.header.src_qpn.get());
            let status = Syndrome::TransportRetryExceeded.code();
            let header = super::frame::Header::new(Kind::Ack, src, dst, frame.header.token.get());
            connection.push(&super::frame::Header { status, ..header });
        }
    }

    fn send(&mut self, id: u32) -> bool {
        match self.connections.get_mut(&id).map(Connection::flush) {
            Some(Ok(moved)) => moved,
            Some(Err(_)) => {
                self.lose(id);
                true
            }
            None => false,
        }
    }

    /// Moves the queued bytes between the two ends of the card's connection to itself.
    fn exchange_loop(&mut self) -> bool {
        let mut moved = false;
        for (from, to) in [(LOOP_OUT, LOOP_IN), (LOOP_IN, LOOP_OUT)] {
            let bytes = self.connections.get_mut(&from).map(Connection::take_out).unwrap_or_default();
            if let Some(connection) = self.connections.get_mut(&to)
                && !bytes.is_empty()
            {
                connection.give(&bytes);
                moved = true;
            }
        }
        moved
    }

    /// Closes a connection. Requests that wait for answers on it fail.
    fn lose(&mut self, id: u32) {
        self.connections.remove(&id);
        self.connection_of.retain(|_, connection| *connection != id);
        let concerned = |qp: &QueuePair| qp.peer.is_some_and(|peer| peer.connection == id) && !qp.issued.is_empty();
        let qpns: Vec<u32> = self.qps.iter().filter(|(_, qp)| concerned(qp)).map(|(qpn, _)| *qpn).collect();
        for qpn in qpns {
            if let Some(qp) = self.qps.get_mut(&qpn) {
                for issued in &mut qp.issued {
                    let Issued { progress, .. } = issued;
                    if matches!(progress, Progress::Waiting) {
                        *progress = Progress::Failed(Syndrome::TransportRetryExceeded);
                    }
                }
            }
            self.retire(qpn);
        }
    }

    /// Returns the connection to a card: the existing one, or else `made` or a new one.
    pub(super) fn adopt(&mut self, to: Address, made: Option<Connection>) -> Result<u32, DeviceError> {
        if to == self.address {
            return Ok(LOOP_OUT);
        }
        if let Some(connection) = self.connection_of.get(&to) {
            return Ok(*connection);
        }
        let connection = made.map_or_else(|| Connection::connect(&to), Ok)?;
        let id = self.add_connection(connection);
        self.connection_of.insert(to, id);
        Ok(id)
    }
}
