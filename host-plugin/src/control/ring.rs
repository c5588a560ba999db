//! The ring of channels, and the allgather that runs round it.

use super::frame::{Frame, Status, hello_to};
use super::handle::{BLOCK_MAX, Endpoint, Listener, VERSION, address};
use super::{ControlError, Step};
use ferrogin_channel::{Channel, ChannelError, Reactor};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that last words get when the ring ends; a process that stood still meanwhile must not swallow them.
const FAREWELL: Duration = Duration::from_secs(5);

/// One rank's place in the ring.
#[derive(Debug)]
pub struct Ring {
    rank: usize,
    /// Of every rank.
    places: Places,
    timeout: Duration,
    /// None when this rank is alone.
    links: Option<Links>,
    /// Allgathers so far.
    sequence: u32,
    /// Set by the first failure that leaves the ranks apart: its cause.
    dead: Option<usize>,
}

/// Where the ranks are, for messages.
#[derive(Debug)]
struct Places(Vec<Arc<str>>);

impl Places {
    fn of(handles: &[[u8; HANDLE_MAXSIZE]]) -> Self {
        let place = |handle| address(handle).map_or_else(|| "an unknown place".into(), |address| address.endpoint());
        Self(handles.iter().map(place).collect())
    }

    fn gone(&self, rank: usize, step: Step) -> ControlError {
        ControlError::PeerGone { rank, at: Arc::clone(&self.0[rank]), step }
    }

    fn silent(&self, rank: usize, step: Step, timeout: Duration) -> ControlError {
        ControlError::Timeout { rank, at: Arc::clone(&self.0[rank]), step, seconds: timeout.as_secs() }
    }
}

/// Which neighbour. Two ranks have one channel, on which each is both to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Next,
    Prev,
    Both,
}

impl Side {
    fn is_next(self) -> bool {
        self != Self::Prev
    }

    fn is_prev(self) -> bool {
        self != Self::Next
    }
}

/// What the reactor's thread tells.
enum News {
    /// The next rank's listener answered.
    Called(Result<Channel, ChannelError>),
    /// The rank before called.
    Answered(Result<Channel, ChannelError>),
    Came(Side, Result<Vec<u8>, ChannelError>),
    Written(Result<(), ChannelError>),
}

/// The channels to the neighbours.
#[derive(Debug)]
struct Links {
    next: Option<Channel>,
    prev: Option<Channel>,
    news: Receiver<News>,
    tell: Sender<News>,
    /// Blocks that came before they were asked for: the neighbour was faster.
    early: VecDeque<Vec<u8>>,
    /// What a neighbour said of a later allgather than ours, and which neighbour: it was faster, and has failed there.
    verdict: Option<(Frame, usize)>,
    /// The next rank takes nothing more.
    next_closed: bool,
    /// The neighbour sends nothing more.
    next_gone: bool,
    prev_gone: bool,
    /// Last, so that it is there while the channels say goodbye.
    reactor: Farewell,
}

/// Lets a reactor's channels close before it ends.
struct Farewell {
    reactor: Option<Reactor>,
    /// When the last words were said, where the ring has failed: they go out while the caller learns of it.
    said: Cell<Option<Instant>>,
}

impl std::fmt::Debug for Farewell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reactor")
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        if let Some(reactor) = self.reactor.take() {
            let passed = self.said.get().map_or(Duration::ZERO, |said| said.elapsed());
            reactor.shutdown(FAREWELL.saturating_sub(passed));
        }
    }
}

impl Ring {
    /// Joins the ring as `rank`. `handles` has one entry for each rank, `listener` is this rank's own.
    ///
    /// # Errors
    /// A peer that cannot be reached or does not come within `timeout`; handles that are not ours. The listener takes
    /// nobody in then, so that whoever waits for it learns of the failure.
    pub fn connect(
        listener: &Listener,
        handles: &[[u8; HANDLE_MAXSIZE]],
        rank: usize,
        timeout: Duration,
    ) -> Result<Self, ControlError> {
        let mut endpoint = listener.endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        let checked = Self::check(&endpoint, handles, rank);
        let Endpoint { listener: door, reactor } = match (checked, endpoint.take()) {
            (Ok(()), Some(endpoint)) => endpoint,
            (Err(error), _) => return Err(error),
            (Ok(()), None) => return Err(ControlError::WrongOrder { rank }),
        };
        drop(endpoint);
        let nranks = handles.len();
        let places = Places::of(handles);
        let mut ring = Self { rank, places, timeout, links: None, sequence: 0, dead: None };
        if nranks == 1 {
            return Ok(ring);
        }
        let next =
            address(&handles[ring.next()]).ok_or(ControlError::BadHandle { rank: ring.next(), version: VERSION })?;
        let (tell, news) = channel();
        let mut links = Links {
            next: None,
            prev: None,
            news,
            tell,
            early: VecDeque::new(),
            verdict: None,
            next_closed: false,
            next_gone: false,
            prev_gone: false,
            reactor: Farewell { reactor: Some(reactor), said: Cell::new(None) },
        };
        // Of two ranks, one calls and the other answers: two endpoints have one channel.
        let alone = nranks == 2;
        let calls = !alone || rank == 0;
        let answers = !alone || rank == 1;
        if calls && let Some(reactor) = &links.reactor.reactor {
            let tell = links.tell.clone();
            reactor.connect_with(&next, move |result| drop(tell.send(News::Called(result))));
        }
        if answers {
            let tell = links.tell.clone();
            door.accept_with(move |result| drop(tell.send(News::Answered(result))));
        }
        let deadline = Deadline::after(timeout);
        match ring.join(&mut links, (calls, answers), &deadline) {
            Ok(()) => {
                ring.links = Some(links);
                Ok(ring)
            }
            Err(error) => {
                let culprit = error.culprit().unwrap_or(rank);
                links.say(Step::Connect, 0, culprit);
                listener.park(Self { links: Some(links), dead: Some(culprit), ..ring });
                Err(error)
            }
        }
    }

    /// The handles are ours, and this rank's is where it should be.
    fn check(endpoint: &Option<Endpoint>, handles: &[[u8; HANDLE_MAXSIZE]], rank: usize) -> Result<(), ControlError> {
        let own = address(&handles[rank]).ok_or(ControlError::BadHandle { rank, version: VERSION })?;
        match endpoint {
            Some(endpoint) if own == *endpoint.listener.address() => Ok(()),
            _ => Err(ControlError::WrongOrder { rank }),
        }
    }

    /// Greets the next rank and waits for its welcome; waits for the rank before and welcomes it.
    fn join(&self, links: &mut Links, (calls, answers): (bool, bool), deadline: &Deadline) -> Result<(), ControlError> {
        let step = Step::Connect;
        let (next, prev) = (self.next(), self.prev());
        let (mut welcomed, mut greeted) = (!calls, !answers);
        let frame =
            |status, sequence, len| Frame { status, step: step as u16, sequence, origin: self.rank as u32, len };
        while !welcomed || !greeted {
            let Some(news) = links.wait(deadline) else {
                let rank = if greeted { next } else { prev };
                return Err(self.places.silent(rank, step, self.timeout));
            };
            match news {
                News::Called(Ok(channel)) => {
                    let mut hello = frame(Status::Hello, self.nranks() as u32, 4).emit().to_vec();
                    hello.extend_from_slice(&(next as u32).to_le_bytes());
                    channel.write(hello, |_| ());
                    links.listen(&channel, if self.nranks() == 2 { Side::Both } else { Side::Next });
                    links.next = Some(channel);
                }
                News::Answered(Ok(channel)) => {
                    links.listen(&channel, if self.nranks() == 2 { Side::Both } else { Side::Prev });
                    links.prev = Some(channel);
                }
                News::Called(Err(error)) => {
                    let at = Arc::clone(&self.places.0[next]);
                    return Err(ControlError::Unreachable { rank: next, at, source: io::Error::other(error) });
                }
                News::Answered(Err(_)) => return Err(self.places.gone(prev, step)),
                News::Came(side, Ok(bytes)) => match Frame::split(&bytes) {
                    Some((Frame { status: Status::Welcome, .. }, _)) if side.is_next() && !welcomed => welcomed = true,
                    Some((head @ Frame { status: Status::Hello, .. }, body)) if side.is_prev() && !greeted => {
                        let fits = head.origin as usize == prev && head.sequence as usize == self.nranks();
                        if !fits || hello_to(body) != Some(self.rank as u32) {
                            return Err(ControlError::Garbled { rank: prev, step });
                        }
                        greeted = true;
                        if let Some(channel) = &links.prev {
                            channel.write(frame(Status::Welcome, 0, 0).emit().to_vec(), |_| ());
                        }
                    }
                    // The rank before has joined its own neighbours and is already at the first block.
                    Some((Frame { status: Status::Block | Status::Failed, .. }, _)) if side.is_prev() && greeted => {
                        links.early.push_back(bytes);
                    }
                    other => {
                        let rank = if side.is_next() { next } else { prev };
                        return Err(blame(other.map(|(head, _)| head), rank, step));
                    }
                },
                News::Came(side, Err(_)) => {
                    let rank = if side.is_next() { next } else { prev };
                    return Err(self.places.gone(rank, step));
                }
                News::Written(_) => {}
            }
        }
        if self.nranks() == 2 {
            let both = links.next.take().or(links.prev.take());
            links.next.clone_from(&both);
            links.prev = both;
        }
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks in the ring.
    pub fn nranks(&self) -> usize {
        self.places.0.len()
    }

    fn next(&self) -> usize {
        (self.rank + 1) % self.nranks()
    }

    fn prev(&self) -> usize {
        (self.rank + self.nranks() - 1) % self.nranks()
    }

    /// Every rank brings a block of any size and gets those of all, by rank. `None` says that this rank could not do
    /// its part: then every rank gets [`ControlError::PeerFailed`] and the ring stays usable.
    ///
    /// # Errors
    /// A rank that failed, vanished or made another call. After all but the first, the ring is dead.
    pub fn allgather(&mut self, step: Step, block: Option<&[u8]>) -> Result<Vec<Vec<u8>>, ControlError> {
        if let Some(culprit) = self.dead {
            return Err(ControlError::Dead { culprit });
        }
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        match self.circulate(step, sequence, block) {
            Ok(blocks) => {
                let mut failed = blocks.iter().enumerate().filter(|(_, block)| block.is_none()).map(|(rank, _)| rank);
                match failed.next() {
                    None => Ok(blocks.into_iter().flatten().collect()),
                    Some(rank) => Err(ControlError::PeerFailed { rank, step }),
                }
            }
            Err(error) => {
                let culprit = error.culprit().unwrap_or(self.rank);
                self.dead = Some(culprit);
                if let Some(links) = &self.links {
                    links.say(step, sequence, culprit);
                }
                Err(error)
            }
        }
    }

    fn circulate(
        &mut self,
        step: Step,
        sequence: u32,
        own: Option<&[u8]>,
    ) -> Result<Vec<Option<Vec<u8>>>, ControlError> {
        let n = self.nranks();
        let mut blocks: Vec<Option<Vec<u8>>> = vec![None; n];
        blocks[self.rank] = own.map(<[u8]>::to_vec);
        let deadline = Deadline::after(self.timeout);
        for round in 0..n - 1 {
            let out = (self.rank + n - round) % n;
            let incoming = (self.rank + n - round - 1) % n;
            let last = round == n - 2;
            blocks[incoming] =
                self.shift(step, sequence, (out, blocks[out].as_deref()), (incoming, last), &deadline)?;
        }
        Ok(blocks)
    }

    /// Another deadline for the allgathers to come than for `connect`.
    #[cfg(test)]
    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Sends this rank's block and stops as a process does that is stopped: nothing answers until `others` is hung up.
    #[cfg(test)]
    pub(super) fn stop_behind_own_block(&self, step: Step, others: Receiver<()>) {
        let (sequence, origin) = (self.sequence, self.rank as u32);
        let head = Frame { status: Status::Block, step: step as u16, sequence, origin, len: 0 };
        if let Some(next) = self.links.as_ref().and_then(|links| links.next.as_ref()) {
            next.write(head.emit().to_vec(), move |_| {
                let _ = others.recv();
            });
        }
    }

    /// Sends the block of rank `out` to the next rank while receiving the one of rank `incoming`.
    fn shift(
        &mut self,
        step: Step,
        sequence: u32,
        (out, block): (usize, Option<&[u8]>),
        (incoming, last): (usize, bool),
        deadline: &Deadline,
    ) -> Result<Option<Vec<u8>>, ControlError> {
        let (next, prev) = (self.next(), self.prev());
        let Some(links) = self.links.as_mut() else { return Err(ControlError::Dead { culprit: self.rank }) };
        let status = if block.is_some() { Status::Block } else { Status::Failed };
        let body = block.unwrap_or_default();
        let len = u32::try_from(body.len()).ok().filter(|len| *len as usize <= BLOCK_MAX);
        let len = len.ok_or(ControlError::Garbled { rank: out, step })?;
        let head = Frame { status, step: step as u16, sequence, origin: out as u32, len };
        // Who has failed in a later allgather has done its part of this one.
        if let Some((head, rank)) = links.verdict.take_if(|(head, _)| !is_later(head.sequence, sequence)) {
            return Err(blame(Some(head), rank, step));
        }
        if links.next_closed || links.next_gone {
            return Err(links.last_words((prev, next), &self.places, step));
        }
        links.write([&head.emit(), body].concat());
        let mut written = false;
        let mut arrived = links.early.pop_front();
        while !written || arrived.is_none() {
            if arrived.is_none() && links.prev_gone {
                return Err(self.places.gone(prev, step));
            }
            let Some(news) = links.wait(deadline) else {
                // Blocks go round by way of all: the one that is missing names the rank that is.
                let rank = if arrived.is_some() { next } else { incoming };
                return Err(self.places.silent(rank, step, self.timeout));
            };
            match news {
                News::Written(Ok(())) => written = true,
                // Who has taken the last block may leave before its receipt is here. Who died instead is missed next time.
                News::Written(Err(_)) if last => {
                    links.next_closed = true;
                    written = true;
                }
                News::Written(Err(_)) => return Err(links.last_words((prev, next), &self.places, step)),
                News::Came(side, Ok(bytes)) => match Frame::split(&bytes) {
                    Some((Frame { status: Status::Block | Status::Failed, .. }, _)) if side.is_prev() => {
                        if arrived.is_none() {
                            arrived = Some(bytes);
                        } else {
                            links.early.push_back(bytes);
                        }
                    }
                    Some((head @ Frame { status: Status::Abort, .. }, _)) if is_later(head.sequence, sequence) => {
                        links.verdict = Some((head, if side.is_prev() { prev } else { next }));
                    }
                    other => {
                        let rank = if side.is_prev() { prev } else { next };
                        return Err(blame(other.map(|(head, _)| head), rank, step));
                    }
                },
                News::Came(side, Err(_)) => {
                    // A neighbour that is through may leave: it is missed only when something is still wanted of it.
                    links.next_gone |= side.is_next();
                    links.prev_gone |= side.is_prev();
                }
                News::Called(_) | News::Answered(_) => {}
            }
        }
        let bytes = arrived.unwrap_or_default();
        let (head, body) = Frame::split(&bytes).ok_or(ControlError::Garbled { rank: prev, step })?;
        if head.step != step as u16 || head.sequence != sequence {
            return Err(ControlError::OutOfStep { rank: prev, step, theirs: head.step_name() });
        }
        if head.origin as usize != incoming || head.len as usize != body.len() {
            return Err(ControlError::Garbled { rank: prev, step });
        }
        Ok((head.status == Status::Block).then(|| body.to_vec()))
    }
}

impl Links {
    /// The next thing that happens; None at the deadline.
    fn wait(&self, deadline: &Deadline) -> Option<News> {
        self.news.recv_timeout(deadline.left()).ok()
    }

    /// Tells every message that comes on a channel, and its end.
    fn listen(&self, channel: &Channel, side: Side) {
        read(channel.clone(), side, self.tell.clone());
    }

    fn write(&self, bytes: Vec<u8>) {
        let tell = self.tell.clone();
        if let Some(next) = &self.next {
            next.write(bytes, move |result| drop(tell.send(News::Written(result.map(drop)))));
        }
    }

    /// Why the next rank takes no block: what it says before it goes, or nothing. Its refusal may be here before its words.
    fn last_words(&mut self, (prev, next): (usize, usize), places: &Places, step: Step) -> ControlError {
        let deadline = Deadline::after(FAREWELL);
        while !self.next_gone
            && let Some(news) = self.wait(&deadline)
        {
            let News::Came(side, result) = news else { continue };
            let rank = if side.is_next() { next } else { prev };
            match result.as_deref().map(Frame::split) {
                Ok(Some((head @ Frame { status: Status::Abort, .. }, _))) => return blame(Some(head), rank, step),
                Ok(_) => {}
                Err(_) => self.next_gone |= side.is_next(),
            }
        }
        places.gone(next, step)
    }

    /// Tells both neighbours, as far as they listen, because of whom the ring ends.
    fn say(&self, step: Step, sequence: u32, culprit: usize) {
        let frame = Frame { status: Status::Abort, step: step as u16, sequence, origin: culprit as u32, len: 0 };
        for channel in [&self.prev, &self.next].into_iter().flatten() {
            channel.write(frame.emit().to_vec(), |_| ());
        }
        self.reactor.said.set(Some(Instant::now()));
    }
}

fn read(channel: Channel, side: Side, tell: Sender<News>) {
    let again = channel.clone();
    channel.read(move |result| {
        let more = result.is_ok();
        if tell.send(News::Came(side, result)).is_ok() && more {
            read(again, side, tell);
        }
    });
}

/// Whether one allgather comes after another.
fn is_later(sequence: u32, than: u32) -> bool {
    sequence.wrapping_sub(than).cast_signed() > 0
}

/// What a neighbour's unexpected frame means.
fn blame(frame: Option<Frame>, rank: usize, step: Step) -> ControlError {
    match frame {
        Some(Frame { status: Status::Abort, origin, .. }) => {
            ControlError::Aborted { reporter: rank, culprit: origin as usize, step }
        }
        _ => ControlError::Garbled { rank, step },
    }
}

#[derive(Debug)]
struct Deadline(Instant);

impl Deadline {
    fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout)
    }

    fn left(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}
