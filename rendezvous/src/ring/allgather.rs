//! The ring of ranks, and its allgather.

use super::error::RingError;
use super::gone::Survivors;
use super::handle::Handle;
use super::step::Step;
use super::time_limits::{ALIVE_EVERY, WARN_EVERY, Wait, answer_limit};
use crate::dial::Dial;
use crate::frame::{BODY_MAX, Frame, FrameKind};
use crate::listener::Listener;
use crate::stream::{self, End, Stream};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The protocol of the ring.
pub(super) const DOMAIN: [u8; 8] = *b"ferroCP\x06";
/// How long a ring that ends has to get its last frames to the neighbours, even if this process was stopped in between.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// A neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Next,
    Prev,
}

/// A rank's traffic in one allgather, in which it receives as many messages as it sends.
#[derive(Debug, Clone, Copy, Default)]
pub struct Traffic {
    /// Messages in each direction.
    pub messages: u64,
    /// Bytes sent to the next rank.
    pub sent: u64,
    /// Bytes received from the previous rank.
    pub received: u64,
}

/// One rank's place in the ring.
#[derive(Debug)]
pub struct Ring {
    pub(super) rank: usize,
    addresses: Vec<Arc<str>>,
    pub(crate) timeout: Duration,
    /// Until the previous rank has connected.
    pub(super) listener: Option<Listener>,
    /// Until the next rank has accepted.
    pub(super) dial: Option<Dial>,
    pub(super) next: Option<Stream>,
    pub(super) prev: Option<Stream>,
    /// Blocks from the previous rank, which may already be in a later allgather.
    pub(super) blocks: VecDeque<(Frame, Vec<u8>)>,
    /// A later allgather's abort frame, which a faster neighbour has already sent or passed on, and that neighbour's
    /// rank.
    pub(super) later_abort: Option<(Frame, usize)>,
    /// Allgathers so far.
    pub(super) sequence: u32,
    /// The rank whose failure ended the ring, once one did.
    pub(super) failed: Option<usize>,
    /// This rank's abort frame, and its time.
    pub(super) abort: Option<(Frame, Instant)>,
    /// Ranks that have closed their communicator, and when this rank found out. Their neighbours tell the others.
    pub(super) closed: BTreeMap<usize, Instant>,
    /// Set in a ring that goes on without ranks that go.
    pub(super) survivors: Option<Survivors>,
    /// When this rank last told the next one that its process runs.
    pub(super) told: Instant,
    /// The longest time since the last allgather in which it didn't say so.
    silent: Duration,
    /// When another rank's block for this rank's next allgather arrived.
    awaited: Option<Instant>,
    /// Logs a line about a wait.
    warn: fn(&str),
    /// The last allgather's traffic.
    traffic: Traffic,
    /// Makes the current or next wait's deadline pass.
    #[cfg(test)]
    pub(super) clock: Arc<std::sync::atomic::AtomicBool>,
    /// Seconds by which the clock of allgathers is ahead.
    #[cfg(test)]
    pub(super) ahead: Arc<std::sync::atomic::AtomicU64>,
}

impl Ring {
    pub(crate) fn new(rank: usize, addresses: Vec<Arc<str>>, timeout: Duration) -> Self {
        Self {
            rank,
            addresses,
            timeout,
            listener: None,
            dial: None,
            next: None,
            prev: None,
            blocks: VecDeque::new(),
            later_abort: None,
            sequence: 0,
            failed: None,
            abort: None,
            survivors: None,
            told: Instant::now(),
            silent: Duration::ZERO,
            awaited: None,
            warn: |_| {},
            traffic: Traffic::default(),
            closed: BTreeMap::new(),
            #[cfg(test)]
            clock: Arc::default(),
            #[cfg(test)]
            ahead: Arc::default(),
        }
    }

    /// Creates the rings of `nranks` ranks within this process.
    pub(crate) fn threads(nranks: usize, timeout: Duration) -> io::Result<Vec<Self>> {
        let addresses = vec!["this process".into(); nranks];
        let mut rings: Vec<_> = (0..nranks).map(|rank| Self::new(rank, addresses.clone(), timeout)).collect();
        for rank in (0..nranks).filter(|_| nranks > 1) {
            let (to_next, to_prev) = Stream::pair()?;
            rings[rank].next = Some(to_next);
            rings[(rank + 1) % nranks].prev = Some(to_prev);
        }
        Ok(rings)
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns what the last allgather sent and received.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Sends lines about long waits to `warn`: each minute for which rank this one waits, or that this one was late.
    pub fn set_warn(&mut self, warn: fn(&str)) {
        self.warn = warn;
    }

    /// Returns how many ranks are in the ring.
    pub fn nranks(&self) -> usize {
        self.addresses.len()
    }

    pub(super) fn next_rank(&self) -> usize {
        self.neighbour(1)
    }

    pub(super) fn prev_rank(&self) -> usize {
        self.neighbour(self.nranks() - 1)
    }

    pub(super) fn rank_of(&self, side: Side) -> usize {
        self.connected_rank(side)
    }

    pub(super) fn stream(&mut self, side: Side) -> Option<&mut Stream> {
        if side == Side::Next { self.next.as_mut() } else { self.prev.as_mut() }
    }

    /// Returns a rank's address, for messages.
    pub(super) fn address(&self, rank: usize) -> Arc<str> {
        Arc::clone(&self.addresses[rank])
    }

    /// Returns the error for a deadline that passed while this rank waited for `rank`.
    pub(super) fn timed_out(&self, rank: usize, step: Step, waited: Duration) -> RingError {
        RingError::Timeout { rank, at: self.address(rank), step, seconds: waited.as_secs() }
    }

    /// Returns the error for a stream to `rank` that ended with `end`.
    fn closed(&self, rank: usize, step: Step, end: &End) -> RingError {
        match end {
            End::Left => RingError::PeerLeft { rank, step },
            End::Closed(_) => RingError::PeerClosed { rank, at: self.address(rank), step },
        }
    }

    /// Returns the error for a frame that `rank` mustn't send now. A neighbour that aborted this allgather in another
    /// step made another call.
    fn aborted(&self, frame: Frame, rank: usize, step: Step, sequence: u32) -> RingError {
        let origin = frame.origin as usize;
        match frame.kind {
            FrameKind::Abort if frame.sequence == sequence && frame.step != step as u16 => {
                RingError::DifferentCall { rank, step, remote: step_name(&frame) }
            }
            FrameKind::Abort if origin == self.rank => {
                RingError::Late { rank: origin, reporter: rank, step, seconds: self.silent.as_secs() }
            }
            FrameKind::Abort => RingError::Aborted { reporter: rank, failed: origin, step },
            FrameKind::Left => RingError::AbortedAfterClose { reporter: rank, left: origin, step },
            _ => RingError::InvalidFrame { rank, step },
        }
    }

    /// Contributes a block of any size, and returns all ranks' blocks in rank order. `None` means that this rank
    /// couldn't do its part: every rank gets [`RingError::PeerFailed`], and the ring stays usable. Waits for as long as
    /// the other ranks' processes say that they run: in an allgather, or because they call [`lost`](Ring::lost).
    ///
    /// # Errors
    /// A rank failed, exited or made another call. After any error but `PeerFailed`, the ring is unusable.
    pub fn allgather(&mut self, step: Step, block: Option<&[u8]>) -> Result<Vec<Vec<u8>>, RingError> {
        self.check_complete(step)?;
        if let Some(failed) = self.failed {
            return Err(RingError::AlreadyFailed { failed });
        }
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        self.traffic = Traffic::default();
        let result = self.exchange(step, sequence, block);
        self.silent = Duration::ZERO;
        match result {
            Ok(blocks) => match blocks.iter().position(Option::is_none) {
                None => Ok(blocks.into_iter().flatten().collect()),
                Some(rank) => Err(RingError::PeerFailed { rank, step }),
            },
            Err(error) => {
                match error.departure().filter(|_| self.goes_on()) {
                    Some((rank, departure)) => self.learn(rank, departure, Instant::now()),
                    None => self.fail(step, sequence, &error),
                }
                Err(error)
            }
        }
    }

    /// Sends this rank's block to the next rank, and passes on the blocks that the previous rank sends.
    fn exchange(&mut self, step: Step, sequence: u32, own: Option<&[u8]>) -> Result<Vec<Option<Vec<u8>>>, RingError> {
        let (n, next, prev) = (self.nranks(), self.next_rank(), self.prev_rank());
        let mut blocks: Vec<Option<Vec<u8>>> = vec![None; n];
        blocks[self.rank] = own.map(<[u8]>::to_vec);
        if n == 1 {
            return Ok(blocks);
        }
        if let Some(bytes) = own.map(<[u8]>::len).filter(|bytes| *bytes > BODY_MAX) {
            return Err(RingError::BlockTooLarge { bytes, limit: BODY_MAX, step });
        }
        let began = self.now();
        self.say_alive(began);
        if let Some(late) = self.awaited.take().map(|at| began - at).filter(|late| *late >= WARN_EVERY) {
            let (rank, name, seconds) = (self.rank, step.name(), late.as_secs());
            (self.warn)(&format!("rank {rank} is late to {name}: other ranks have waited {seconds} s for it"));
        }
        // A neighbour that failed in a later allgather has done its part of the earlier ones.
        if let Some((head, rank)) = self.later_abort.take_if(|(head, _)| !is_later(head.sequence, sequence)) {
            return Err(self.aborted(head, rank, step, sequence));
        }
        let mut waited = Wait::new(began);
        let mut received = 0;
        self.send_block(step, sequence, self.rank, own);
        loop {
            // Taken before reading, so that what arrived while this process was stopped still counts.
            let now = self.now();
            self.say_alive(now);
            let arrived = self.receive(step, sequence, now);
            while received < n - 1
                && let Some((head, body)) = self.blocks.pop_front()
            {
                if head.step != step as u16 || head.sequence != sequence {
                    return Err(RingError::DifferentCall { rank: prev, step, remote: step_name(&head) });
                }
                let incoming = (self.rank + n - received - 1) % n;
                if head.origin as usize != incoming {
                    return Err(RingError::InvalidFrame { rank: prev, step });
                }
                received += 1;
                self.traffic.received += (Frame::HEAD + body.len()) as u64;
                let block = (head.kind == FrameKind::Block).then_some(body);
                if incoming != next {
                    self.send_block(step, sequence, incoming, block.as_deref());
                }
                blocks[incoming] = block;
            }
            // A neighbour that made another call sent its block before it gave up, and the block says more.
            arrived?;
            let written = self.next.as_mut().is_none_or(Stream::flush);
            if received == n - 1 && written {
                return Ok(blocks);
            }
            self.check_complete(step)?;
            if let Some(end) = self.prev.as_ref().and_then(Stream::ended).filter(|_| received < n - 1) {
                return Err(self.closed(prev, step, end));
            }
            // The next rank may close after the last block. Before that, the other ranks need to hear of its end from
            // this side too, as its own next rank may be late.
            let sent_all = written && received + 2 >= n;
            if let Some(end) = self.next.as_ref().and_then(Stream::ended).filter(|_| !sent_all) {
                return Err(self.closed(next, step, end));
            }
            // The previous rank says that it runs, and gives up on its own previous rank if that one doesn't. The next
            // rank only has to take the last blocks.
            let is_done = received == n - 1;
            let heard = self.prev.as_ref().filter(|_| !is_done).map(Stream::heard);
            // A rank that has sent a block is in the call.
            let limit = if received == 0 || is_done { self.timeout } else { answer_limit(self.timeout) };
            if waited.silence(now, heard) >= limit || self.is_clock_passed() {
                if let Some((head, rank)) = self.later_abort.take() {
                    return Err(self.aborted(head, rank, step, sequence));
                }
                return Err(self.timed_out(if is_done { next } else { prev }, step, limit));
            }
            if let Some(time) = waited.warning(now) {
                // Blocks pass through all ranks in turn, so the missing block tells which rank hasn't made the call.
                let late = if is_done { next } else { (self.rank + n - received - 1) % n };
                let (rank, name, seconds) = (self.rank, step.name(), time.as_secs());
                (self.warn)(&format!(
                    "rank {rank} has waited {seconds} s in {name} for rank {late}, whose process runs but has not made the call; the wait goes on. \
                     See what rank {late} is doing"
                ));
            }
            self.wait(waited.ends(limit).min(self.told + ALIVE_EVERY))?;
        }
    }

    /// Tells the next rank, twice a second, that this process runs. If the next rank doesn't read, nothing piles up.
    pub(super) fn say_alive(&mut self, now: Instant) {
        self.silent = self.silent.max(now.saturating_duration_since(self.told));
        if now < self.told + ALIVE_EVERY {
            return;
        }
        self.told = now;
        let alive = Frame::new(FrameKind::Alive, 0, self.sequence, self.rank);
        if let Some(next) = &mut self.next
            && next.flush()
        {
            next.send(alive, &[]);
        }
    }

    /// Sends rank `origin`'s block to the next rank.
    fn send_block(&mut self, step: Step, sequence: u32, origin: usize, block: Option<&[u8]>) {
        let kind = if block.is_some() { FrameKind::Block } else { FrameKind::Failed };
        let body = block.unwrap_or_default();
        if let Some(next) = &mut self.next {
            next.queue(Frame::new(kind, step as u16, sequence, origin), body);
            self.traffic.messages += 1;
            self.traffic.sent += (Frame::HEAD + body.len()) as u64;
        }
    }

    /// Reads what the neighbours have sent.
    pub(super) fn receive(&mut self, step: Step, sequence: u32, now: Instant) -> Result<(), RingError> {
        for side in [Side::Prev, Side::Next] {
            let rank = self.rank_of(side);
            let Some(stream) = self.stream(side) else { continue };
            stream.fill(now);
            while let Some(stream) = self.stream(side) {
                let frame = stream.frame().map_err(|_| RingError::InvalidFrame { rank, step })?;
                let Some((head, body)) = frame else { break };
                match head.kind {
                    FrameKind::Block | FrameKind::Failed if side == Side::Prev => {
                        if head.sequence == self.sequence {
                            self.awaited.get_or_insert(now);
                        }
                        self.blocks.push_back((head, body));
                    }
                    FrameKind::Alive if side == Side::Prev => {}
                    _ if self.learn_from(head, now) => {}
                    // The neighbour closes, which is an error only if a frame from it is still needed.
                    FrameKind::Left if head.origin as usize == rank => self.set_left(side),
                    _ if head.is_abort() && is_later(head.sequence, sequence) => {
                        self.keep_later_abort(head, side, rank, now);
                    }
                    _ => return Err(self.aborted(head, rank, step, sequence)),
                }
            }
        }
        Ok(())
    }

    /// Keeps a later allgather's first abort frame, from `rank`, and passes it on. It doesn't end this allgather, but a
    /// rank that still lacks a block at the deadline then knows which rank failed. A failure replaces a close, and
    /// every close is passed on.
    fn keep_later_abort(&mut self, head: Frame, side: Side, rank: usize, now: Instant) {
        let kept = self.later_abort.map(|(kept, _)| kept.kind);
        let is_news = kept.is_none() || (kept == Some(FrameKind::Left) && head.kind == FrameKind::Abort);
        if is_news {
            self.later_abort = Some((head, rank));
        }
        if self.note_close(head, now) || is_news {
            self.pass_on(head, side);
        }
    }

    /// Records the rank that closed its communicator, if that's what the frame says; false if it's no news.
    pub(super) fn note_close(&mut self, head: Frame, now: Instant) -> bool {
        let is_news = head.kind == FrameKind::Left && !self.closed.contains_key(&(head.origin as usize));
        if is_news {
            self.closed.insert(head.origin as usize, now);
        }
        is_news
    }

    /// Sends a frame from the neighbour on one side to the other one.
    pub(super) fn pass_on(&mut self, head: Frame, side: Side) {
        if let Some(other) = self.stream(if side == Side::Next { Side::Prev } else { Side::Next }) {
            other.send(head, &[]);
        }
    }

    /// Ends the ring, and tells both neighbours why.
    pub(super) fn fail(&mut self, step: Step, sequence: u32, error: &RingError) {
        let failed = error.failed_rank().unwrap_or(self.rank);
        self.failed = Some(failed);
        let kind = if error.is_after_close() { FrameKind::Left } else { FrameKind::Abort };
        self.abort = Some((Frame::new(kind, step as u16, sequence, failed), Instant::now()));
        self.tell_failure(Side::Prev);
        self.tell_failure(Side::Next);
    }

    pub(super) fn tell_failure(&mut self, side: Side) {
        let abort = self.abort;
        if let (Some((frame, _)), Some(stream)) = (abort, self.stream(side)) {
            stream.send(frame, &[]);
        }
    }

    fn set_left(&mut self, side: Side) {
        if let Some(stream) = self.stream(side) {
            stream.set_left();
        }
    }

    /// Waits until there is something to do, or until `deadline`.
    pub(super) fn wait(&self, deadline: Instant) -> Result<(), RingError> {
        let deadline = self.dial.as_ref().and_then(Dial::wakes).map_or(deadline, |wakes| wakes.min(deadline));
        let streams = [&self.prev, &self.next].into_iter().flatten().filter(|stream| stream.is_open());
        let mut fds: Vec<_> = streams.map(Stream::interest).collect();
        fds.extend(self.dial.iter().filter_map(Dial::interest));
        fds.extend(self.listener.iter().map(Listener::interest));
        stream::wait(&mut fds, deadline).map_err(|source| RingError::Socket { call: "poll", source })
    }

    fn now(&self) -> Instant {
        #[cfg(test)]
        return Instant::now() + Duration::from_secs(self.ahead.load(std::sync::atomic::Ordering::SeqCst));
        #[cfg(not(test))]
        Instant::now()
    }

    fn is_clock_passed(&self) -> bool {
        #[cfg(test)]
        return self.clock.load(std::sync::atomic::Ordering::SeqCst);
        #[cfg(not(test))]
        false
    }
}

/// Tells the neighbours that the ring ends, even if they know of a failure: otherwise, they'd take this rank's end for
/// another one. Neighbours that connect late hear of the failure, if there was one.
impl Drop for Ring {
    fn drop(&mut self) {
        let left = Frame::new(FrameKind::Left, 0, self.sequence, self.rank);
        for stream in [&mut self.prev, &mut self.next].into_iter().flatten() {
            stream.send(left, &[]);
        }
        if self.goes_on() {
            self.dial = None;
        }
        let (_, began) = *self.abort.get_or_insert_with(|| (left, Instant::now()));
        loop {
            let now = Instant::now();
            if self.poll_opening(now).is_err() {
                (self.dial, self.listener) = (None, None);
            }
            let mut is_sent = true;
            for stream in [&mut self.prev, &mut self.next].into_iter().flatten() {
                is_sent &= stream.flush();
                // If received bytes were left unread, the kernel could drop the last frames.
                stream.fill(now);
            }
            let is_done = is_sent && self.dial.is_none() && self.listener.is_none();
            if is_done || now >= began + SHUTDOWN_LIMIT || self.wait(began + SHUTDOWN_LIMIT).is_err() {
                return;
            }
        }
    }
}

/// Returns the first address in a handle, for messages.
pub(super) fn address_of(handle: &[u8; HANDLE_MAXSIZE]) -> Arc<str> {
    Handle::parse(handle).map_or_else(|| "an unknown address".into(), |handle| handle.addresses[0].to_string().into())
}

/// Returns the name of the sender's step, for messages.
fn step_name(frame: &Frame) -> String {
    match Step::from_code(frame.step) {
        Some(step) => format!("{} (collective call {})", step.name(), frame.sequence),
        None => format!("an unknown call ({})", frame.step),
    }
}

/// Returns true if allgather `sequence` comes after allgather `than`.
fn is_later(sequence: u32, than: u32) -> bool {
    sequence.wrapping_sub(than).cast_signed() > 0
}
