//! The channels to the two neighbours in the ring, and the events on them.

use super::error::ControlError;
use super::frame::{Frame, FrameKind};
use super::step::Step;
use ferrogin_channel::{Address, Channel, ChannelError, Reactor};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that a ring which ends has for its last frames to reach the neighbours, even if this process stood still meanwhile.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// The listener's address in a handle; `None` if this version made no such handle.
pub(super) fn handle_address(handle: &[u8; HANDLE_MAXSIZE]) -> Option<Address> {
    Address::parse(handle).ok()
}

/// The addresses of all ranks, for messages.
#[derive(Debug)]
pub(super) struct RankAddresses(Vec<Arc<str>>);

impl RankAddresses {
    pub fn new(handles: &[[u8; HANDLE_MAXSIZE]]) -> Self {
        let text =
            |handle| handle_address(handle).map_or_else(|| "an unknown address".into(), |address| address.endpoint());
        Self(handles.iter().map(text).collect())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn get(&self, rank: usize) -> Arc<str> {
        Arc::clone(&self.0[rank])
    }

    /// The error for a channel to `rank` that ended with `end`. Only a running process closes or refuses a channel.
    pub fn closed(&self, rank: usize, step: Step, end: &ChannelError) -> ControlError {
        match end {
            ChannelError::Closed { .. } | ChannelError::Aborted { .. } | ChannelError::Refused { .. } => {
                ControlError::PeerLeft { rank, step }
            }
            _ => ControlError::PeerClosed { rank, at: self.get(rank), step },
        }
    }

    /// The error for a deadline that passed while this rank waited for `rank`.
    pub fn timed_out(&self, rank: usize, step: Step, timeout: Duration) -> ControlError {
        ControlError::Timeout { rank, at: self.get(rank), step, seconds: timeout.as_secs() }
    }
}

/// A neighbour. In a ring of two ranks one channel leads to both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Next,
    Prev,
    Both,
}

impl Side {
    pub fn is_next(self) -> bool {
        self != Self::Prev
    }

    pub fn is_prev(self) -> bool {
        self != Self::Next
    }
}

type OpenResult = Result<Channel, ChannelError>;

/// An event that the reactor's thread reports.
pub(super) enum Event {
    /// The channel to the next rank opened, or did not.
    Connected(OpenResult),
    /// The previous rank opened its channel, or the listener failed.
    Accepted(OpenResult),
    /// A message came from a neighbour, or its channel ended.
    Received(Side, Result<Vec<u8>, ChannelError>),
    /// The next rank has a written message, or its channel ended.
    Written(Result<(), ChannelError>),
}

/// The channels to the neighbours.
#[derive(Debug)]
pub(super) struct Neighbors {
    pub next: Option<Channel>,
    pub prev: Option<Channel>,
    /// `None` passes the deadline of a wait: a test's clock.
    receiver: Receiver<Option<Event>>,
    sender: Sender<Option<Event>>,
    /// Blocks of later rounds, which a faster neighbour has sent already.
    pub early: VecDeque<Vec<u8>>,
    /// The abort frame of a later allgather, which a faster neighbour has sent or passed on already, and the neighbour's rank.
    pub later_abort: Option<(Frame, usize)>,
    /// The next rank refuses messages.
    pub next_refuses: bool,
    /// Why the channel from the next rank ended.
    pub next_end: Option<ChannelError>,
    /// Why the channel from the previous rank ended.
    pub prev_end: Option<ChannelError>,
    /// The abort frame of a ring that failed, for channels that open later.
    abort: Arc<Mutex<Option<Frame>>>,
    /// The last field, so that it runs while the channels close.
    reactor: RunningReactor,
}

/// A reactor that closes its channels before it ends.
struct RunningReactor {
    /// The listener of a ring that failed before the previous rank connected.
    accepting: Option<ferrogin_channel::Listener>,
    reactor: Option<Reactor>,
    /// The time of the abort frames, if the ring failed: they travel while the caller handles the error.
    aborted_at: Option<Instant>,
}

impl std::fmt::Debug for RunningReactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RunningReactor")
    }
}

impl Drop for RunningReactor {
    fn drop(&mut self) {
        if let Some(reactor) = self.reactor.take() {
            let passed = self.aborted_at.map_or(Duration::ZERO, |at| at.elapsed());
            reactor.shutdown(SHUTDOWN_LIMIT.saturating_sub(passed));
        }
    }
}

impl Neighbors {
    /// No channels yet, on `reactor`.
    pub fn new(reactor: Reactor) -> Self {
        let (sender, receiver) = channel();
        Self {
            next: None,
            prev: None,
            receiver,
            sender,
            early: VecDeque::new(),
            later_abort: None,
            next_refuses: false,
            next_end: None,
            prev_end: None,
            abort: Arc::default(),
            reactor: RunningReactor { accepting: None, reactor: Some(reactor), aborted_at: None },
        }
    }

    /// Starts to open the channel to the next rank.
    pub fn connect(&self, next: &Address) {
        let opened = self.opened(Event::Connected);
        if let Some(reactor) = &self.reactor.reactor {
            reactor.connect_with(next, opened);
        }
    }

    /// Starts to accept the channel of the previous rank.
    pub fn accept(&self, listener: &ferrogin_channel::Listener) {
        listener.accept_with(self.opened(Event::Accepted));
    }

    /// Reports a channel that opened, and sends the abort frame on it if the ring has failed meanwhile.
    fn opened(&self, event: fn(OpenResult) -> Event) -> impl FnOnce(OpenResult) + Send + 'static {
        let (sender, abort) = (self.sender.clone(), Arc::clone(&self.abort));
        move |result| {
            // The lock orders the report before `send_abort` looks for reports, or this look at the frame after it.
            let abort = abort.lock().unwrap_or_else(PoisonError::into_inner);
            if let (Ok(channel), Some(frame)) = (&result, &*abort) {
                channel.write(frame.emit(&[]), |_| ());
            }
            drop(sender.send(Some(event(result))));
        }
    }

    /// The next event; `None` at the deadline.
    pub fn wait(&self, deadline: &Deadline) -> Option<Event> {
        self.receiver.recv_timeout(deadline.left()).ok().flatten()
    }

    /// Passes the deadline of the ring's wait when it is called.
    #[cfg(test)]
    pub fn clock(&self) -> impl FnOnce() + Send + 'static {
        let sender = self.sender.clone();
        move || drop(sender.send(None))
    }

    /// Reports each message that comes on a channel, and the channel's end.
    pub fn receive_from(&self, channel: &Channel, side: Side) {
        read(channel.clone(), side, self.sender.clone());
    }

    /// Sends a message to the next rank.
    pub fn write_next(&self, bytes: Vec<u8>) {
        let sender = self.sender.clone();
        if let Some(next) = &self.next {
            next.write(bytes, move |result| drop(sender.send(Some(Event::Written(result.map(drop))))));
        }
    }

    /// The reason why the next rank refuses messages: its abort frame, which may come after its refusal, or its end.
    pub fn refusal(&mut self, (prev, next): (usize, usize), addresses: &RankAddresses, step: Step) -> ControlError {
        let deadline = Deadline::after(SHUTDOWN_LIMIT);
        while self.next_end.is_none()
            && let Some(event) = self.wait(&deadline)
        {
            let Event::Received(side, result) = event else { continue };
            let rank = if side.is_next() { next } else { prev };
            match result.as_deref().map(Frame::parse) {
                Ok(Some((head, _))) if head.is_abort() => return unexpected(Some(head), rank, step),
                Ok(_) => {}
                Err(end) => self.ended(side, end),
            }
        }
        addresses.closed(next, step, self.next_end.as_ref().unwrap_or(&ChannelError::Stopped))
    }

    /// Notes that a channel ended.
    pub fn ended(&mut self, side: Side, end: &ChannelError) {
        if side.is_next() {
            self.next_end.get_or_insert_with(|| end.clone());
        }
        if side.is_prev() {
            self.prev_end.get_or_insert_with(|| end.clone());
        }
    }

    /// Tells both neighbours that the ring ends with `error` because of rank `failed`, also a neighbour whose channel opens later.
    pub fn send_abort(&mut self, step: Step, sequence: u32, failed: usize, error: &ControlError) {
        let kind = if error.is_after_close() { FrameKind::Left } else { FrameKind::Abort };
        let frame = Frame { kind, step: step as u16, sequence, origin: failed as u32, len: 0 };
        *self.abort.lock().unwrap_or_else(PoisonError::into_inner) = Some(frame);
        while let Ok(Some(event)) = self.receiver.try_recv() {
            match event {
                Event::Connected(Ok(channel)) => self.next = Some(channel),
                Event::Accepted(Ok(channel)) => self.prev = Some(channel),
                _ => {}
            }
        }
        for channel in [&self.prev, &self.next].into_iter().flatten() {
            channel.write(frame.emit(&[]), |_| ());
        }
        self.reactor.aborted_at = Some(Instant::now());
    }

    /// Keeps the first abort frame of a later allgather, from `rank`, and passes it on. It does not end this allgather, but a rank that misses
    /// a block at the deadline then knows which rank failed.
    pub fn keep_later_abort(&mut self, head: Frame, side: Side, rank: usize) {
        if self.later_abort.is_some() {
            return;
        }
        self.later_abort = Some((head, rank));
        let other = match side {
            Side::Next => self.prev.as_ref(),
            Side::Prev => self.next.as_ref(),
            Side::Both => None,
        };
        if let Some(channel) = other {
            channel.write(head.emit(&[]), |_| ());
        }
    }

    /// Ignores programs that connect from now on: both neighbours are connected.
    pub fn close_port(&self) {
        if let Some(reactor) = &self.reactor.reactor {
            reactor.close_port();
        }
    }

    /// Keeps the listener of a ring that failed, until the previous rank has connected and got the abort frame.
    pub fn keep_accepting(&mut self, listener: ferrogin_channel::Listener) {
        self.reactor.accepting = Some(listener);
    }

    /// Waits until the previous rank has connected and got the abort frame, but only until the shutdown's limit.
    fn wait_for_prev(&self) {
        let Some(aborted_at) = self.reactor.aborted_at.filter(|_| self.reactor.accepting.is_some()) else { return };
        let deadline = Deadline(aborted_at + SHUTDOWN_LIMIT);
        while let Some(event) = self.wait(&deadline) {
            if matches!(event, Event::Accepted(_)) {
                // Dropping the channel closes it after its messages.
                return;
            }
        }
    }
}

impl Drop for Neighbors {
    fn drop(&mut self) {
        self.wait_for_prev();
    }
}

fn read(channel: Channel, side: Side, sender: Sender<Option<Event>>) {
    let same = channel.clone();
    channel.read(move |result| {
        let open = result.is_ok();
        if sender.send(Some(Event::Received(side, result))).is_ok() && open {
            read(same, side, sender);
        }
    });
}

/// The error for a frame that `rank` must not send now, or for a message that is no frame.
pub(super) fn unexpected(frame: Option<Frame>, rank: usize, step: Step) -> ControlError {
    match frame {
        Some(Frame { kind: FrameKind::Abort, origin, .. }) => {
            ControlError::Aborted { reporter: rank, failed: origin as usize, step }
        }
        Some(Frame { kind: FrameKind::Left, origin, .. }) => {
            ControlError::AbortedAfterClose { reporter: rank, left: origin as usize, step }
        }
        _ => ControlError::InvalidFrame { rank, step },
    }
}

/// A point in time that a wait ends at.
#[derive(Debug)]
pub(super) struct Deadline(Instant);

impl Deadline {
    pub fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout)
    }

    fn left(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}
