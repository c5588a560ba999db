//! The channels to the two neighbours in the ring, and the events on them.

use super::error::ControlError;
use super::frame::{Frame, FrameKind};
use super::step::Step;
use ferrogin_channel::{Address, Channel, ChannelError, Reactor};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
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

    /// The error for a channel to `rank` that closed.
    pub fn closed(&self, rank: usize, step: Step) -> ControlError {
        ControlError::PeerClosed { rank, at: self.get(rank), step }
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

/// An event that the reactor's thread reports.
pub(super) enum Event {
    /// The channel to the next rank opened, or did not.
    Connected(Result<Channel, ChannelError>),
    /// The previous rank opened its channel, or the listener failed.
    Accepted(Result<Channel, ChannelError>),
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
    receiver: Receiver<Event>,
    sender: Sender<Event>,
    /// Blocks of later rounds, which a faster neighbour has sent already.
    pub early: VecDeque<Vec<u8>>,
    /// The abort frame of a later allgather, which a faster neighbour has sent already, and the neighbour's rank.
    pub later_abort: Option<(Frame, usize)>,
    /// The next rank refuses messages.
    pub next_refuses: bool,
    /// The channel from the next rank ended.
    pub next_closed: bool,
    /// The channel from the previous rank ended.
    pub prev_closed: bool,
    /// The last field, so that it runs while the channels close.
    reactor: RunningReactor,
}

/// A reactor that closes its channels before it ends.
struct RunningReactor {
    reactor: Option<Reactor>,
    /// The time of the abort frames, if the ring failed: they travel while the caller handles the error.
    aborted_at: Cell<Option<Instant>>,
}

impl std::fmt::Debug for RunningReactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RunningReactor")
    }
}

impl Drop for RunningReactor {
    fn drop(&mut self) {
        if let Some(reactor) = self.reactor.take() {
            let passed = self.aborted_at.get().map_or(Duration::ZERO, |at| at.elapsed());
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
            next_closed: false,
            prev_closed: false,
            reactor: RunningReactor { reactor: Some(reactor), aborted_at: Cell::new(None) },
        }
    }

    /// Starts to open the channel to the next rank.
    pub fn connect(&self, next: &Address) {
        let sender = self.sender.clone();
        if let Some(reactor) = &self.reactor.reactor {
            reactor.connect_with(next, move |result| drop(sender.send(Event::Connected(result))));
        }
    }

    /// Starts to accept the channel of the previous rank.
    pub fn accept(&self, listener: &ferrogin_channel::Listener) {
        let sender = self.sender.clone();
        listener.accept_with(move |result| drop(sender.send(Event::Accepted(result))));
    }

    /// The next event; `None` at the deadline.
    pub fn wait(&self, deadline: &Deadline) -> Option<Event> {
        self.receiver.recv_timeout(deadline.left()).ok()
    }

    /// Reports each message that comes on a channel, and the channel's end.
    pub fn receive_from(&self, channel: &Channel, side: Side) {
        read(channel.clone(), side, self.sender.clone());
    }

    /// Sends a message to the next rank.
    pub fn write_next(&self, bytes: Vec<u8>) {
        let sender = self.sender.clone();
        if let Some(next) = &self.next {
            next.write(bytes, move |result| drop(sender.send(Event::Written(result.map(drop)))));
        }
    }

    /// The reason why the next rank refuses messages: its abort frame, which may come after its refusal, or its end.
    pub fn refusal(&mut self, (prev, next): (usize, usize), addresses: &RankAddresses, step: Step) -> ControlError {
        let deadline = Deadline::after(SHUTDOWN_LIMIT);
        while !self.next_closed
            && let Some(event) = self.wait(&deadline)
        {
            let Event::Received(side, result) = event else { continue };
            let rank = if side.is_next() { next } else { prev };
            match result.as_deref().map(Frame::parse) {
                Ok(Some((head @ Frame { kind: FrameKind::Abort, .. }, _))) => {
                    return unexpected(Some(head), rank, step);
                }
                Ok(_) => {}
                Err(_) => self.next_closed |= side.is_next(),
            }
        }
        addresses.closed(next, step)
    }

    /// Tells both neighbours that the ring ends because rank `failed` failed.
    pub fn send_abort(&self, step: Step, sequence: u32, failed: usize) {
        let frame = Frame { kind: FrameKind::Abort, step: step as u16, sequence, origin: failed as u32, len: 0 };
        for channel in [&self.prev, &self.next].into_iter().flatten() {
            channel.write(frame.emit(&[]), |_| ());
        }
        self.reactor.aborted_at.set(Some(Instant::now()));
    }
}

fn read(channel: Channel, side: Side, sender: Sender<Event>) {
    let same = channel.clone();
    channel.read(move |result| {
        let open = result.is_ok();
        if sender.send(Event::Received(side, result)).is_ok() && open {
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
