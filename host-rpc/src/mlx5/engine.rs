//! The thread of a connection: posts, polls, calls back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use mlx5::cq::CompletionQueue;
use mlx5::device::{Access, CqAttr, Device, DeviceError, Endpoint, Pd, QpAttr};
use mlx5::mw::{Range, Window, WindowError};
use mlx5::qp::QueuePair;
use mlx5::sq::{Flags, PostError};
use mlx5::wire::{CqeOpcode, MkeyAccess};
use mlx5::wqe::{Data, Limits, Op, Post, Remote, Sge, Transport, Umr, WindowType, With};

use super::frame::{Frame, HEADER};
use super::memory::{Landing, Offered, Slots};
use super::{Command, Config, OpenError, Shared};
use crate::{Bytes, ReceiveDone, SendDone, TransportError};

/// Requests that are not for a message: fetches, answers, the goodbye.
const CONTROL: u32 = 64;
/// Blocks of a send queue that a bind takes; a message takes one.
const BIND_BLOCKS: u32 = Umr::BIND_SEGMENTS.div_ceil(4) as u32;
/// Bytes that one READ fetches at most.
const READ: u64 = 1 << 30;
/// How long an answer waits for a message that it can go with.
const HOLD: Duration = Duration::from_micros(200);
/// After so long without a word the peer is looked for.
const SILENCE: Duration = Duration::from_secs(1);
/// How long a goodbye may take beyond the limit of a close.
const GOODBYE: Duration = Duration::from_millis(100);
/// Rounds without work before the thread rests.
const RESTLESS: u32 = 200;
/// Its first rests and its longest.
const SHORT_REST: Duration = Duration::from_micros(50);
const LONG_REST: Duration = Duration::from_millis(1);
/// Rests before they become long.
const SHORT_RESTS: u32 = 1000;

/// What a completed request was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    /// A message, or an offer, from this slot; with the number of the send if it is over now.
    Slot { slot: u16, finishes: Option<u64> },
    /// A bind.
    Bind,
    /// The last piece of what arrives under this number.
    Fetched(u64),
    /// A piece, or an answer.
    Nothing,
    /// Our goodbye is out.
    Bye,
}

/// A message that was handed over and is not over.
struct Sending {
    done: Option<SendDone>,
    over: bool,
    /// Of a long message: what the peer fetches, and through which window.
    offered: Option<(Offered, usize)>,
}

/// A message that comes, in order.
enum Arriving {
    Whole(Vec<u8>),
    Fetching { landing: Landing, rkey: u32, asked: u64, whole: bool },
}

/// Why a message cannot be offered.
#[derive(Debug, thiserror::Error)]
enum OfferError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Window(#[from] WindowError),
    #[error(transparent)]
    Post(#[from] PostError),
}

/// A key of the peer that the next message, or one of its own, makes invalid.
struct Answer {
    rkey: u32,
    by: Instant,
}

/// What a poll found.
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
    incoming: Slots,
    outgoing: Slots,
    free: Vec<u16>,
    // Before the bytes under them.
    windows: Vec<Window>,
    waiting: VecDeque<(Bytes, SendDone)>,
    /// In the order of sends; the first has number `first_sending`.
    sending: VecDeque<Sending>,
    first_sending: u64,
    /// In the order of arrival; the first has number `first_arriving`.
    arriving: VecDeque<Arriving>,
    first_arriving: u64,
    /// Fetches that are not posted whole, and answers that are owed.
    fetching: VecDeque<u64>,
    answers: VecDeque<Answer>,
    receivers: VecDeque<ReceiveDone>,
    /// Requests that the send queue takes.
    posts: u32,
    /// When something was last heard of the peer, or asked.
    heard: Instant,
    closing: Option<Instant>,
    said_bye: bool,
    ended: Option<TransportError>,
    finished: bool,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("qpn", &self.qp.qpn()).finish_non_exhaustive()
    }
}

/// Answers a command that came after the end.
pub(super) fn refuse(command: Command) {
    match command {
        Command::Send(_, done) => done(Err(TransportError::Closed)),
        Command::Receive(done) => done(Err(TransportError::Closed)),
        Command::Close(_) => {}
    }
}

impl Engine {
    pub(super) fn new(device: Arc<dyn Device>, config: &Config) -> Result<(Self, Endpoint), OpenError> {
        let slot = HEADER + config.eager as usize;
        let pd = device.alloc_pd()?;
        let posts = u32::from(config.sends) * 2 + CONTROL;
        let compression = config.compression && device.caps().compression;
        let raw = device.create_cq(&CqAttr { entries: posts + u32::from(config.receives), compression })?;
        let attr = QpAttr {
            transport: Transport::Rc,
            send_cq: raw.handle.clone(),
            recv_cq: raw.handle.clone(),
            srq: None,
            max_send: posts,
            max_recv: config.receives.into(),
            limits: Limits { max_inline: HEADER as u32, max_sge: 1 },
            max_recv_sge: 1,
            signal_all: true,
        };
        let qp = QueuePair::create(&device, &pd, &attr)?;
        let incoming = Slots::new(&*device, &pd, config.receives.into(), slot, Access::LOCAL_WRITE)?;
        let outgoing = Slots::new(&*device, &pd, config.sends.into(), slot, Access::default())?;
        let endpoint = qp.endpoint()?;
        let mut engine = Self {
            device,
            pd,
            qp,
            eager: config.eager as usize,
            peer: Arc::from(""),
            cq: CompletionQueue::new(raw.parts),
            incoming,
            outgoing,
            free: (0..config.sends).collect(),
            windows: Vec::new(),
            waiting: VecDeque::new(),
            sending: VecDeque::new(),
            first_sending: 0,
            arriving: VecDeque::new(),
            first_arriving: 0,
            fetching: VecDeque::new(),
            answers: VecDeque::new(),
            receivers: VecDeque::new(),
            posts: 0,
            heard: Instant::now(),
            closing: None,
            said_bye: false,
            ended: None,
            finished: false,
        };
        engine.posts = engine.qp.send().free_posts();
        for slot in 0..config.receives {
            engine.post_receive(slot);
        }
        Ok((engine, endpoint))
    }

    pub(super) fn connect(&mut self, to: &Endpoint, eager: u32, peer: &str) -> Result<(), OpenError> {
        self.qp.connect(to)?;
        self.eager = eager as usize;
        self.peer = peer.into();
        Ok(())
    }

    /// The thread: until the connection is closed or broken, and everybody knows.
    pub(super) fn run(mut self, shared: &Shared) {
        let mut idle = 0_u32;
        loop {
            let mut commands = shared.lock();
            let asked = std::mem::take(&mut commands.queue);
            // Nothing is asked after this: the last look and the mark are under one lock.
            commands.ended = self.finished;
            drop(commands);
            let was_finished = self.finished;
            let mut moved = !asked.is_empty();
            asked.into_iter().for_each(|command| self.take(command));
            if was_finished {
                self.tell_the_end();
                return;
            }
            moved |= self.poll();
            moved |= self.post();
            moved |= self.deliver();
            self.close_if_due();
            if self.ended.is_some() {
                self.tell_the_end();
                self.finished = true;
                continue;
            }
            idle = if moved { 0 } else { idle.saturating_add(1) };
            if idle > RESTLESS {
                self.look_for_peer();
                thread::park_timeout(if idle < RESTLESS + SHORT_RESTS { SHORT_REST } else { LONG_REST });
            } else if idle != 0 {
                thread::yield_now();
            }
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Send(bytes, done) => self.waiting.push_back((bytes, done)),
            Command::Receive(done) => self.receivers.push_back(done),
            Command::Close(_) if self.said_bye => {}
            Command::Close(by) => self.closing = Some(self.closing.map_or(by, |before| before.min(by))),
        }
    }

    fn fail(&mut self, why: &str) {
        if self.ended.is_none() {
            self.ended = Some(TransportError::Failed(format!("{}: {why}", self.peer).into()));
        }
    }

    /// Everybody who still waits learns how it ended.
    fn tell_the_end(&mut self) {
        let end = self.ended.clone().unwrap_or(TransportError::Closed);
        self.windows.clear();
        // What has come whole is still handed over.
        self.deliver();
        for sending in self.sending.drain(..) {
            if let Some(done) = sending.done {
                done(if sending.over { Ok(()) } else { Err(end.clone()) });
            }
        }
        self.waiting.drain(..).for_each(|(_, done)| done(Err(end.clone())));
        self.receivers.drain(..).for_each(|done| done(Err(end.clone())));
    }

    fn post_receive(&mut self, slot: u16) {
        let sge = self.incoming.sge(slot, HEADER + self.eager);
        let Some(recv) = self.qp.recv() else { return };
        // As many receives as slots: there is always room for one that came back.
        let posted = recv.post(slot, &[sge]);
        recv.ring();
        if let Err(rejected) = posted {
            self.fail(&rejected.to_string());
        }
    }

    fn poll(&mut self) -> bool {
        let mut events = Vec::new();
        let polled = self.cq.drain(256, |one| {
            events.push(match one {
                Ok(entry) => match entry.opcode() {
                    CqeOpcode::Req => Event::Sent(entry.wqe_counter()),
                    how => Event::Received {
                        index: entry.wqe_counter(),
                        bytes: entry.byte_cnt(),
                        invalidated: (how == CqeOpcode::RespSendInv).then(|| entry.imm_or_key()),
                    },
                },
                Err(failure) => Event::Failed(failure.to_string()),
            });
        });
        if let Err(corrupt) = polled {
            self.fail(&corrupt.to_string());
        }
        let moved = !events.is_empty();
        if moved {
            self.heard = Instant::now();
        }
        for event in events {
            match event {
                Event::Sent(index) => self.sent(index),
                Event::Received { index, bytes, invalidated } => self.received(index, bytes, invalidated),
                Event::Failed(why) => self.fail(&why),
            }
        }
        moved
    }

    fn sent(&mut self, index: u16) {
        let finished =
            self.qp.send().complete(index).map(|finished| finished.map(|done| done.token).collect::<Vec<_>>());
        let tokens = match finished {
            Ok(tokens) => tokens,
            Err(unknown) => return self.fail(&unknown.to_string()),
        };
        for token in tokens {
            match token {
                Token::Slot { slot, finishes } => {
                    self.free.push(slot);
                    if let Some(number) = finishes {
                        self.over(number);
                    }
                }
                Token::Fetched(number) => self.fetched(number),
                Token::Bye => self.ended = Some(TransportError::Closed),
                Token::Bind | Token::Nothing => {}
            }
        }
    }

    /// A send is over; those before it are told first.
    fn over(&mut self, number: u64) {
        if let Some(sending) = self.sending.get_mut((number - self.first_sending) as usize) {
            sending.over = true;
        }
        while self.sending.front().is_some_and(|sending| sending.over) {
            self.first_sending += 1;
            if let Some(done) = self.sending.pop_front().and_then(|sending| sending.done) {
                done(Ok(()));
            }
        }
    }

    fn received(&mut self, index: u16, bytes: u32, invalidated: Option<u32>) {
        let Some(recv) = self.qp.recv() else { return };
        let slot = match recv.complete(index) {
            Ok(slot) => slot,
            Err(unknown) => return self.fail(&unknown.to_string()),
        };
        let mut message = self.incoming.read(slot, bytes as usize);
        self.post_receive(slot);
        if let Some(rkey) = invalidated {
            self.taken(rkey);
        }
        match Frame::parse(&message) {
            Some(Frame::Message { .. }) => {
                message.drain(..HEADER);
                self.arriving.push_back(Arriving::Whole(message));
            }
            Some(Frame::Offer { length, rkey }) => self.offered(length, rkey),
            Some(Frame::Taken) if invalidated.is_some() => {}
            Some(Frame::Taken) => self.fail("answered for no window"),
            Some(Frame::Bye) => self.ended = Some(TransportError::Closed),
            None => self.fail("sent what is no message of this protocol"),
        }
    }

    fn offered(&mut self, length: u64, rkey: u32) {
        if length == 0 || length > mlx5::wqe::MAX_BIND {
            return self.fail("offered a message of an impossible length");
        }
        match Landing::new(&*self.device, &self.pd, length as usize) {
            Ok(landing) => {
                self.fetching.push_back(self.first_arriving + self.arriving.len() as u64);
                self.arriving.push_back(Arriving::Fetching { landing, rkey, asked: 0, whole: false });
            }
            Err(error) => self.fail(&error.to_string()),
        }
    }

    /// The peer has fetched: the window that its message made invalid is free, and that send is over.
    fn taken(&mut self, rkey: u32) {
        let Some(window) = self.windows.iter().position(|window| window.rkey() == Some(rkey)) else {
            return self.fail("answered for a window that it does not have");
        };
        if let Err(error) = self.windows[window].invalidated(rkey) {
            return self.fail(&error.to_string());
        }
        let of = |sending: &Sending| sending.offered.as_ref().is_some_and(|(_, of)| *of == window);
        if let Some(at) = self.sending.iter().position(of) {
            self.sending[at].offered = None;
            self.over(self.first_sending + at as u64);
        }
    }

    fn fetched(&mut self, number: u64) {
        let Some(at) = number.checked_sub(self.first_arriving) else { return };
        if let Some(Arriving::Fetching { rkey, whole, .. }) = self.arriving.get_mut(at as usize) {
            *whole = true;
            self.answers.push_back(Answer { rkey: *rkey, by: Instant::now() + HOLD });
        }
    }

    /// Hands over what has come, in order.
    fn deliver(&mut self) -> bool {
        let mut moved = false;
        while !self.receivers.is_empty()
            && matches!(self.arriving.front(), Some(Arriving::Whole(_) | Arriving::Fetching { whole: true, .. }))
        {
            let bytes = match self.arriving.pop_front() {
                Some(Arriving::Whole(bytes)) => bytes,
                Some(Arriving::Fetching { landing, .. }) => landing.finish(),
                None => return moved,
            };
            self.first_arriving += 1;
            moved = true;
            if let Some(done) = self.receivers.pop_front() {
                done(Ok(bytes));
            }
        }
        moved
    }

    /// Room for `posts` requests of at most a bind's size.
    fn has_room(&mut self, posts: u32) -> bool {
        let send = self.qp.send();
        send.free_posts() >= posts && send.free_blocks() >= posts * BIND_BLOCKS
    }

    fn submit(&mut self, token: Token, post: &Post<'_>) {
        if let Err(rejected) = self.qp.send().post(token, Flags::default(), post) {
            self.fail(&rejected.error.to_string());
        }
    }

    /// The next answer that waits no longer for a message to go with.
    fn due_answer(&mut self) -> Option<u32> {
        let due = |answer: &Answer| self.closing.is_some() || answer.by <= Instant::now();
        if self.answers.front().is_some_and(due) { self.answers.pop_front().map(|answer| answer.rkey) } else { None }
    }

    /// Posts what there is room for: answers that are due and fetches first, for peers wait for them.
    fn post(&mut self) -> bool {
        let mut moved = false;
        while self.has_room(1)
            && let Some(rkey) = self.due_answer()
        {
            let bytes = Frame::Taken.to_bytes();
            let data = Data::Inline(&[&bytes[..]][..]);
            self.submit(Token::Nothing, &Op::Send { data, with: With::Invalidate(rkey) });
            moved = true;
        }
        while self.has_room(1)
            && let Some(number) = self.fetching.front().copied()
        {
            moved = true;
            if self.fetch(number) {
                self.fetching.pop_front();
            }
        }
        while self.closing.is_none_or(|_| !self.said_bye)
            && self.has_room(2)
            && let Some(slot) = self.free.pop()
        {
            let Some((bytes, done)) = self.waiting.pop_front() else {
                self.free.push(slot);
                break;
            };
            moved = true;
            self.send_one(slot, bytes, done);
        }
        moved
    }

    /// Posts the next piece of a fetch; true if it was the last.
    fn fetch(&mut self, number: u64) -> bool {
        let at = (number - self.first_arriving) as usize;
        let Some(Arriving::Fetching { landing, rkey, asked, .. }) = self.arriving.get_mut(at) else { return true };
        let (from, piece) = (*asked, (landing.mr.length - *asked).min(READ));
        *asked += piece;
        let last = *asked == landing.mr.length;
        let into = [Sge { addr: landing.mr.addr + from, length: piece as u32, lkey: landing.mr.lkey }];
        let remote = Remote { addr: from, rkey: *rkey };
        let token = if last { Token::Fetched(number) } else { Token::Nothing };
        self.submit(token, &Op::Read { remote, into: &into });
        last
    }

    fn send_one(&mut self, slot: u16, bytes: Bytes, done: SendDone) {
        let number = self.first_sending + self.sending.len() as u64;
        let length = bytes.as_slice().len();
        let mut sending = Sending { done: Some(done), over: false, offered: None };
        let (frame, finishes, total) = if length <= self.eager {
            let frame = Frame::Message { length: length as u64 }.to_bytes();
            self.outgoing.write(slot, [&frame, bytes.as_slice()]);
            (None, Some(number), HEADER + length)
        } else {
            match self.offer(bytes) {
                Ok((rkey, offered)) => {
                    sending.offered = Some(offered);
                    (Some(Frame::Offer { length: length as u64, rkey }), None, HEADER)
                }
                Err(error) => {
                    self.free.push(slot);
                    self.sending.push_back(sending);
                    return self.fail(&error.to_string());
                }
            }
        };
        if let Some(frame) = frame {
            self.outgoing.write(slot, [&frame.to_bytes(), &[]]);
        }
        self.sending.push_back(sending);
        let sge = [self.outgoing.sge(slot, total)];
        let with = self.answers.pop_front().map_or(With::Nothing, |answer| With::Invalidate(answer.rkey));
        // After a bind the queue itself adds the fence that the offer needs.
        let post = Op::Send { data: Data::Sges(&sge[..]), with };
        self.submit(Token::Slot { slot, finishes }, &post);
    }

    /// Binds a window on the bytes: its key, and what to keep until the peer has answered.
    fn offer(&mut self, bytes: Bytes) -> Result<(u32, (Offered, usize)), OfferError> {
        let at = match self.windows.iter().position(|window| window.rkey().is_none()) {
            Some(at) => at,
            None => {
                self.windows.push(Window::alloc(&*self.device, &self.pd, WindowType::Type2)?);
                self.windows.len() - 1
            }
        };
        let offered = Offered::new(&*self.device, &self.pd, bytes)?;
        let range = Range { addr: offered.mr.addr, length: offered.mr.length, zero_based: true };
        // Each bind steps the key's tag, so that the key of an earlier message opens nothing.
        let bind = self.windows[at].bind(&self.qp, &offered.mr, range, MkeyAccess::REMOTE_READ)?;
        self.qp.send().post(Token::Bind, Flags::default(), &bind.post()).map_err(|rejected| rejected.error)?;
        Ok((bind.commit(), (offered, at)))
    }

    /// Says goodbye when all is out, or when time is up: the peer waits for us otherwise.
    fn close_if_due(&mut self) {
        let Some(by) = self.closing else { return };
        if self.ended.is_some() {
            return;
        }
        let now = Instant::now();
        let idle = self.waiting.is_empty() && self.sending.is_empty() && self.answers.is_empty();
        if !self.said_bye && (idle || now >= by) && self.has_room(1) {
            if now >= by {
                self.tell_the_end();
            }
            self.say_bye();
            self.closing = Some(by.max(now + GOODBYE));
        } else if now >= by {
            self.ended = Some(TransportError::Closed);
        }
    }

    fn say_bye(&mut self) {
        self.said_bye = true;
        let bytes = Frame::Bye.to_bytes();
        self.submit(Token::Bye, &Op::Send { data: Data::Inline(&[&bytes[..]][..]), with: With::Nothing });
    }

    /// With nothing under way nothing tells that the peer is gone. A write of no bytes does: it fails.
    fn look_for_peer(&mut self) {
        if self.heard.elapsed() < SILENCE || self.qp.send().free_posts() != self.posts {
            return;
        }
        self.heard = Instant::now();
        let nothing = Op::Write { remote: Remote::default(), data: Data::Sges(&[][..]), imm: None };
        self.submit(Token::Nothing, &nothing);
    }
}
