//! A connection's thread: serves requests, posts work requests, polls completions, runs callbacks.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ferrogin_channel::Payload;
use mlx5::cq::CompletionQueue;
use mlx5::device::{Access, CqAttr, Device, DeviceError, Endpoint, Pd, QpAttr};
use mlx5::mw::{Range, Window, WindowError};
use mlx5::qp::QueuePair;
use mlx5::sq::{Flags, PostError};
use mlx5::wire::{CqeOpcode, MkeyAccess};
use mlx5::wqe::{Data, Limits, Op, Remote, Transport, Umr, WindowType, With, WorkRequest};
use parking_lot::Mutex;

use super::frame::{Frame, HEADER};
use super::incoming::{Incoming, Read};
use super::memory::{ExposedPayload, ReadBuffer, Slots};
use super::outgoing::{Exposed, Outgoing};
use crate::{ReceiveDone, SendDone, TransportError};

/// Work requests for READs, FIN and close frames, in addition to those for messages.
const CONTROL_REQUESTS: u32 = 64;
/// Blocks of the send queue that a bind takes up. A message takes up one.
const BIND_BLOCKS: u32 = Umr::BIND_SEGMENTS.div_ceil(4) as u32;
/// How long an invalidation waits for a message that can carry it.
const INVALIDATE_DELAY: Duration = Duration::from_micros(200);
/// How long the engine waits without a completion before it probes the peer.
const PROBE_AFTER: Duration = Duration::from_secs(1);
/// How much longer than the limit of a close the close frame may take.
const CLOSE_FRAME_TIME: Duration = Duration::from_millis(100);
/// Rounds without work before the thread parks.
const SPIN_ROUNDS: u32 = 200;
/// The first parks and the later ones.
const SHORT_PARK: Duration = Duration::from_micros(50);
const LONG_PARK: Duration = Duration::from_millis(1);
/// Short parks before the long ones.
const SHORT_PARKS: u32 = 1000;

/// A connection's sizes. The two ends need not agree.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Length of the longest message that is copied into a slot, in bytes.
    pub eager: u32,
    /// Number of slots for sends.
    pub sends: u16,
    /// Number of slots for receives.
    pub receives: u16,
    /// Whether to ask for compressed completions if the device supports them.
    pub compression: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { eager: 16 << 10, sends: 64, receives: 128, compression: true }
    }
}

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A size in [`Config`] is out of range.
    #[error("{0}")]
    Config(&'static str),
    /// The peer is not a connection of this kind, or has another version.
    #[error("the peer's hello is not one of this version of ferrogin; use the same release at both ends")]
    Hello,
    /// The exchange of hellos failed.
    #[error("exchanging hellos with the peer failed: {0}")]
    Exchange(#[from] io::Error),
    /// The connection's thread did not start.
    #[error("the thread of the connection did not start: {0}")]
    Thread(#[source] io::Error),
}

/// A request to the engine.
pub(super) enum Request {
    Send(Payload, SendDone),
    Receive(ReceiveDone),
    Close(Instant),
}

#[derive(Default)]
pub(super) struct Inbox {
    pub queue: VecDeque<Request>,
    /// The engine has ended and reads no further requests.
    pub ended: bool,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inbox")
    }
}

/// What a work request was posted for, kept until its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// An eager or RTS frame in this slot. `finishes` is the number of the send that this completion finishes.
    Slot { slot: u16, finishes: Option<u64> },
    /// A bind.
    Bind,
    /// The last READ of the incoming message with this number.
    LastRead(u64),
    /// An earlier READ, a FIN frame or a probe.
    Ignored,
    /// The close frame.
    Close,
}

/// Why a message cannot be sent by rendezvous.
#[derive(Debug, thiserror::Error)]
enum ExposeError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Window(#[from] WindowError),
    #[error(transparent)]
    Post(#[from] PostError),
}

/// A key of the peer to invalidate: with the next message, or with a FIN frame after `deadline`.
struct Invalidation {
    rkey: u32,
    deadline: Instant,
}

/// One completion.
enum Event {
    Sent(u16),
    Received { index: u16, bytes: u32, invalidated: Option<u32> },
    Failed(String),
}

pub(super) struct Engine {
    device: Arc<dyn Device>,
    pd: Pd,
    qp: QueuePair<Token, u16>,
    eager: usize,
    peer: Arc<str>,
    cq: CompletionQueue,
    receive_slots: Slots,
    send_slots: Slots,
    free_send_slots: Vec<u16>,
    // Declared before `outgoing`, so that the windows go before the bytes that they expose.
    windows: Vec<Window>,
    /// Messages that haven't been posted.
    unposted: VecDeque<(Payload, SendDone)>,
    outgoing: Outgoing,
    incoming: Incoming,
    invalidations: VecDeque<Invalidation>,
    /// How many work requests the send queue holds.
    max_posts: u32,
    /// The time of the last completion or probe.
    last_activity: Instant,
    closing: Option<Instant>,
    close_sent: bool,
    ended: Option<TransportError>,
    finished: bool,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("qpn", &self.qp.qpn()).finish_non_exhaustive()
    }
}

/// Fails a request that came after the engine ended.
pub(super) fn refuse(request: Request) {
    match request {
        Request::Send(_, done) => done(Err(TransportError::Closed)),
        Request::Receive(done) => done(Err(TransportError::Closed)),
        Request::Close(_) => {}
    }
}

impl Engine {
    pub(super) fn new(device: Arc<dyn Device>, config: &Config) -> Result<(Self, Endpoint), ConnectError> {
        let slot = HEADER + config.eager as usize;
        let pd = device.alloc_pd()?;
        let max_send = u32::from(config.sends) * 2 + CONTROL_REQUESTS;
        let compression = config.compression && device.caps().compression;
        let raw = device.create_cq(&CqAttr { entries: max_send + u32::from(config.receives), compression })?;
        let attr = QpAttr {
            transport: Transport::Rc,
            send_cq: raw.handle.clone(),
            recv_cq: raw.handle.clone(),
            srq: None,
            max_send,
            max_recv: config.receives.into(),
            limits: Limits { max_inline: HEADER as u32, max_sge: 1 },
            max_recv_sge: 1,
            signal_all: true,
        };
        let mut qp = QueuePair::create(&device, &pd, &attr)?;
        let receive_slots = Slots::new(&*device, &pd, config.receives.into(), slot, Access::LOCAL_WRITE)?;
        let send_slots = Slots::new(&*device, &pd, config.sends.into(), slot, Access::default())?;
        let endpoint = qp.endpoint()?;
        let max_posts = qp.send().free_posts();
        let mut engine = Self {
            device,
            pd,
            qp,
            eager: config.eager as usize,
            peer: Arc::from(""),
            cq: CompletionQueue::new(raw.parts),
            receive_slots,
            send_slots,
            free_send_slots: (0..config.sends).collect(),
            windows: Vec::new(),
            unposted: VecDeque::new(),
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            invalidations: VecDeque::new(),
            max_posts,
            last_activity: Instant::now(),
            closing: None,
            close_sent: false,
            ended: None,
            finished: false,
        };
        for slot in 0..config.receives {
            engine.post_receive(slot);
        }
        Ok((engine, endpoint))
    }

    pub(super) fn connect(&mut self, to: &Endpoint, eager: u32, peer: &str) -> Result<(), ConnectError> {
        self.qp.connect(to)?;
        self.eager = eager as usize;
        self.peer = peer.into();
        Ok(())
    }

    /// The thread: runs until the connection is closed or broken and every callback has run.
    pub(super) fn run(mut self, inbox: &Mutex<Inbox>) {
        let mut idle = 0_u32;
        loop {
            let mut locked = inbox.lock();
            let requests = std::mem::take(&mut locked.queue);
            // The last read of the inbox and this mark happen under one lock, so that no request is lost between the
            // two.
            locked.ended = self.finished;
            drop(locked);
            let was_finished = self.finished;
            let mut progress = !requests.is_empty();
            requests.into_iter().for_each(|request| self.accept(request));
            if was_finished {
                self.finish_callbacks();
                return;
            }
            if self.ended.is_none() {
                progress |= self.poll();
                progress |= self.post();
                progress |= self.incoming.deliver();
                self.close_if_due();
            }
            if self.ended.is_some() {
                self.finish_callbacks();
                // What the peer sent before the end waits for its receives, until this end is closed too.
                self.finished = self.closing.is_some() || !self.incoming.has_complete();
                if !self.finished {
                    thread::park();
                }
                continue;
            }
            idle = if progress { 0 } else { idle.saturating_add(1) };
            if idle > SPIN_ROUNDS {
                self.probe_peer();
                thread::park_timeout(if idle < SPIN_ROUNDS + SHORT_PARKS { SHORT_PARK } else { LONG_PARK });
            } else if idle != 0 {
                thread::yield_now();
            }
        }
    }

    fn accept(&mut self, request: Request) {
        match request {
            Request::Send(message, done) => self.unposted.push_back((message, done)),
            Request::Receive(done) => self.incoming.add_receiver(done),
            Request::Close(_) if self.close_sent => {}
            Request::Close(by) => self.closing = Some(self.closing.map_or(by, |before| before.min(by))),
        }
    }

    fn fail(&mut self, why: &str) {
        if self.ended.is_none() {
            self.ended = Some(TransportError::Failed(format!("{}: {why}", self.peer).into()));
        }
    }

    /// Runs every callback that is still waiting, after the end.
    fn finish_callbacks(&mut self) {
        let end = self.ended.clone().unwrap_or(TransportError::Closed);
        self.windows.clear();
        // Complete messages are still delivered.
        self.incoming.deliver();
        self.outgoing.fail(&end);
        self.unposted.drain(..).for_each(|(_, done)| done(Err(end.clone())));
        self.incoming.fail(&end);
    }

    fn post_receive(&mut self, slot: u16) {
        let sge = self.receive_slots.sge(slot, HEADER + self.eager);
        let Some(recv) = self.qp.recv() else { return };
        // The queue holds as many receives as there are slots, so a slot that completed always fits.
        let posted = recv.post(slot, &[sge]);
        recv.ring();
        if let Err(rejected) = posted {
            self.fail(&rejected.to_string());
        }
    }

    fn poll(&mut self) -> bool {
        let mut events = Vec::new();
        let polled = self.cq.drain(256, |completion| {
            events.push(match completion {
                Ok(entry) => match entry.opcode() {
                    CqeOpcode::Req => Event::Sent(entry.wqe_counter()),
                    opcode => Event::Received {
                        index: entry.wqe_counter(),
                        bytes: entry.byte_cnt(),
                        invalidated: (opcode == CqeOpcode::RespSendInv).then(|| entry.imm_or_key()),
                    },
                },
                Err(failure) => Event::Failed(failure.to_string()),
            });
        });
        if let Err(corrupt) = polled {
            self.fail(&corrupt.to_string());
        }
        if events.is_empty() {
            return false;
        }
        self.last_activity = Instant::now();
        for event in events {
            match event {
                Event::Sent(index) => self.on_sent(index),
                Event::Received { index, bytes, invalidated } => self.on_received(index, bytes, invalidated),
                Event::Failed(why) => self.fail(&why),
            }
        }
        true
    }

    fn on_sent(&mut self, index: u16) {
        let completed = self.qp.send().complete(index);
        let tokens = match completed.map(|requests| requests.map(|done| done.token).collect::<Vec<_>>()) {
            Ok(tokens) => tokens,
            Err(unknown) => return self.fail(&unknown.to_string()),
        };
        for token in tokens {
            match token {
                Token::Slot { slot, finishes } => {
                    self.free_send_slots.push(slot);
                    if let Some(number) = finishes {
                        self.outgoing.finish(number);
                    }
                }
                Token::LastRead(number) => self.on_last_read(number),
                Token::Close => self.ended = Some(TransportError::Closed),
                Token::Bind | Token::Ignored => {}
            }
        }
    }

    fn on_received(&mut self, index: u16, bytes: u32, invalidated: Option<u32>) {
        let Some(recv) = self.qp.recv() else { return };
        let slot = match recv.complete(index) {
            Ok(slot) => slot,
            Err(unknown) => return self.fail(&unknown.to_string()),
        };
        let mut message = self.receive_slots.read(slot, bytes as usize);
        self.post_receive(slot);
        if let Some(rkey) = invalidated {
            self.on_invalidated(rkey);
        }
        match Frame::parse(&message) {
            Some(Frame::Eager { .. }) => {
                message.drain(..HEADER);
                self.incoming.push_eager(message);
            }
            Some(Frame::Rts { length, rkey }) => self.on_rts(length, rkey),
            Some(Frame::Fin) if invalidated.is_some() => {}
            Some(Frame::Fin) => self.fail("the peer sent a FIN frame that invalidates no window"),
            Some(Frame::Close) => self.ended = Some(TransportError::Closed),
            None => self.fail("the peer sent a message that is not a frame of this protocol"),
        }
    }

    fn on_rts(&mut self, length: u64, rkey: u32) {
        if length == 0 || length > mlx5::wqe::MAX_BIND {
            return self.fail(&format!("the peer announced a message of {length} bytes, which no window can cover"));
        }
        self.incoming.push_rendezvous(length, rkey);
    }

    /// Handles the peer's invalidation of a window: the peer has read the bytes, the window is free, and the send is
    /// finished.
    fn on_invalidated(&mut self, rkey: u32) {
        let Some(window) = self.windows.iter().position(|window| window.rkey() == Some(rkey)) else {
            return self.fail(&format!("the peer invalidated key {rkey:#010x}, which no bound window has"));
        };
        if let Err(error) = self.windows[window].invalidated(rkey) {
            return self.fail(&error.to_string());
        }
        self.outgoing.finish_exposed(window);
    }

    fn on_last_read(&mut self, number: u64) {
        if let Some(rkey) = self.incoming.complete(number) {
            self.invalidations.push_back(Invalidation { rkey, deadline: Instant::now() + INVALIDATE_DELAY });
        }
    }

    /// Returns whether the send queue has room for `posts` more work requests, each as large as a bind.
    fn has_room(&mut self, posts: u32) -> bool {
        let send = self.qp.send();
        send.free_posts() >= posts && send.free_blocks() >= posts * BIND_BLOCKS
    }

    fn submit(&mut self, token: Token, request: &WorkRequest<'_>) {
        if let Err(rejected) = self.qp.send().post(token, Flags::default(), request) {
            self.fail(&rejected.error.to_string());
        }
    }

    /// Returns the next invalidation that no longer waits for a message to carry it.
    fn due_invalidation(&mut self) -> Option<u32> {
        let is_due = |next: &Invalidation| self.closing.is_some() || next.deadline <= Instant::now();
        if !self.invalidations.front().is_some_and(is_due) {
            return None;
        }
        self.invalidations.pop_front().map(|invalidation| invalidation.rkey)
    }

    /// Posts as much as the send queue has room for. FIN frames and READs go first, because the peer waits for them.
    fn post(&mut self) -> bool {
        let mut progress = false;
        while self.has_room(1)
            && let Some(rkey) = self.due_invalidation()
        {
            let bytes = Frame::Fin.emit();
            let data = Data::Inline(&[&bytes[..]][..]);
            self.submit(Token::Ignored, &Op::Send { data, with: With::Invalidate(rkey) });
            progress = true;
        }
        while self.has_room(1) {
            match self.incoming.next_read(|length| ReadBuffer::new(&*self.device, &self.pd, length as usize)) {
                Ok(Some(Read { remote, into, completes })) => {
                    let token = completes.map_or(Token::Ignored, Token::LastRead);
                    self.submit(token, &Op::Read { remote, into: &[into] });
                    progress = true;
                }
                Ok(None) => break,
                Err(error) => {
                    self.fail(&error.to_string());
                    break;
                }
            }
        }
        while !(self.closing.is_some() && self.close_sent)
            && self.has_room(2)
            && let Some(slot) = self.free_send_slots.pop()
        {
            let Some((message, done)) = self.unposted.pop_front() else {
                self.free_send_slots.push(slot);
                break;
            };
            progress = true;
            self.post_message(slot, message, done);
        }
        progress
    }

    fn post_message(&mut self, slot: u16, message: Payload, done: SendDone) {
        let length = message.len();
        let (finishes, total) = if length <= self.eager {
            let frame = Frame::Eager { length: length as u64 };
            self.send_slots.write(slot, [&frame.emit(), message.as_slice()]);
            (Some(self.outgoing.push(done, None)), HEADER + length)
        } else {
            match self.expose(message) {
                Ok((rkey, exposed)) => {
                    let frame = Frame::Rts { length: length as u64, rkey };
                    self.send_slots.write(slot, [&frame.emit(), &[]]);
                    self.outgoing.push(done, Some(exposed));
                    (None, HEADER)
                }
                Err(error) => {
                    self.free_send_slots.push(slot);
                    self.outgoing.push(done, None);
                    return self.fail(&error.to_string());
                }
            }
        };
        let sge = [self.send_slots.sge(slot, total)];
        let with = self.invalidations.pop_front().map_or(With::Nothing, |next| With::Invalidate(next.rkey));
        // After a bind, the send queue itself adds the fence that the RTS frame needs.
        let request = Op::Send { data: Data::Sges(&sge[..]), with };
        self.submit(Token::Slot { slot, finishes }, &request);
    }

    /// Binds a window to the bytes. Returns its key, and what must live until the peer invalidates the window.
    fn expose(&mut self, message: Payload) -> Result<(u32, Exposed), ExposeError> {
        let at = match self.windows.iter().position(|window| window.rkey().is_none()) {
            Some(at) => at,
            None => {
                self.windows.push(Window::alloc(&*self.device, &self.pd, WindowType::Type2)?);
                self.windows.len() - 1
            }
        };
        let exposed = ExposedPayload::new(&*self.device, &self.pd, message)?;
        let range = Range { addr: exposed.mr.addr, length: exposed.mr.length, zero_based: true };
        // Each bind changes the key's tag, so that an earlier message's key gives no access.
        let bind = self.windows[at].bind(&self.qp, &exposed.mr, range, MkeyAccess::REMOTE_READ)?;
        self.qp.send().post(Token::Bind, Flags::default(), &bind.post()).map_err(|rejected| rejected.error)?;
        Ok((bind.commit(), (exposed, at)))
    }

    /// Sends the close frame once everything is sent or the time limit has passed. Ends the connection if the frame
    /// can't be sent.
    fn close_if_due(&mut self) {
        let Some(by) = self.closing else { return };
        if self.ended.is_some() {
            return;
        }
        let now = Instant::now();
        let all_sent = self.unposted.is_empty() && self.outgoing.is_empty() && self.invalidations.is_empty();
        if !self.close_sent && (all_sent || now >= by) && self.has_room(1) {
            if now >= by {
                self.finish_callbacks();
            }
            self.send_close();
            self.closing = Some(by.max(now + CLOSE_FRAME_TIME));
        } else if now >= by {
            self.ended = Some(TransportError::Closed);
        }
    }

    fn send_close(&mut self) {
        self.close_sent = true;
        let bytes = Frame::Close.emit();
        self.submit(Token::Close, &Op::Send { data: Data::Inline(&[&bytes[..]][..]), with: With::Nothing });
    }

    /// Detects a dead peer while no work request is outstanding: a zero-byte write fails if the peer is gone.
    fn probe_peer(&mut self) {
        if self.last_activity.elapsed() < PROBE_AFTER || self.qp.send().free_posts() != self.max_posts {
            return;
        }
        self.last_activity = Instant::now();
        let probe = Op::Write { remote: Remote::default(), data: Data::Sges(&[][..]), imm: None };
        self.submit(Token::Ignored, &probe);
    }
}
