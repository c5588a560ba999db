//! The reading half of a channel: receives for lengths, which take whichever message comes, and for payloads, which take
//! exactly theirs; messages are put back in order by id, and the front is handed to the reads.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::engine::{Call, Operation, token};
use super::transport::{Addr, Pattern, Receiving, Transport};
use super::wire::{ID_MASK, LENGTH, PAYLOAD};
use super::{ChannelError, ReadDone, Violation, spare};
use ferrogin_libfabric::Error;

/// Room for a length message; longer than one, so that a longer one is seen.
pub(super) const LENGTH_ROOM: usize = 16;
/// How far ahead of the oldest incomplete message another may come.
const AHEAD: usize = 1 << 16;
/// Messages read between two reports to the peer.
const REPORT: u32 = super::outgoing::AHEAD / 4;

enum Arriving {
    /// Its length is known.
    Announced(usize),
    /// The receive for its payload is posted.
    Posted(usize),
    Whole(Vec<u8>),
}

struct Queued {
    ticket: u64,
    room: Vec<u8>,
    done: ReadDone,
}

/// The reading half.
pub(super) struct Incoming {
    channel: u32,
    /// Id of the message that the front read gets, and of the front of `window`.
    next: u32,
    window: VecDeque<Option<Arriving>>,
    /// What the peer was told last of `next`.
    told: u32,
    reads: VecDeque<Queued>,
    /// Messages that were handed to reads, and of them those that were not wanted there, by number. They wait only while no reads do.
    handed: u64,
    returned: VecDeque<(u64, Vec<u8>)>,
    /// Receives for lengths that are posted.
    asking: usize,
    /// Buffers for them.
    rooms: Vec<Vec<u8>>,
    depth: usize,
    max_message: usize,
    /// Number of the last receive for a length.
    asked: u32,
    /// Since when the front message is begun (itself or a later one) and not whole.
    stuck_since: Option<Instant>,
    /// While nothing is begun: the id of a payload that waits without a length, and when it was first seen.
    stray: Option<(u32, Instant)>,
    /// There was a channel with the same endpoint before.
    succeeds: bool,
}

impl Incoming {
    pub fn new(channel: u32, start: u32, depth: usize, max_message: usize) -> Self {
        Self {
            channel,
            next: start,
            told: start,
            window: VecDeque::new(),
            reads: VecDeque::new(),
            handed: 0,
            returned: VecDeque::new(),
            asking: 0,
            rooms: Vec::new(),
            depth,
            max_message,
            asked: 0,
            stuck_since: None,
            stray: None,
            succeeds: false,
        }
    }

    /// Where the peer begins to count.
    pub fn start_at(&mut self, id: u32) {
        (self.next, self.told) = (id, id);
    }

    /// There was a channel with the same endpoint before: what it left behind may come.
    pub fn succeed(&mut self) {
        self.succeeds = true;
    }

    pub fn succeeds(&self) -> bool {
        self.succeeds
    }

    /// Message `id` is one of the channel before.
    pub fn is_leftover(&self, id: u32) -> bool {
        let far = id.wrapping_sub(self.next).min(self.next.wrapping_sub(id));
        self.succeeds && far as usize >= AHEAD
    }

    /// Id of the first message that was not read, if it is time that the peer hears of it.
    pub fn report(&mut self) -> Option<u32> {
        if self.next.wrapping_sub(self.told) < REPORT {
            return None;
        }
        self.told = self.next;
        Some(self.next)
    }

    /// Id of the message that the next read gets.
    pub fn next_id(&self) -> u32 {
        self.next
    }

    pub fn push(&mut self, ticket: u64, room: Vec<u8>, done: ReadDone) {
        self.reads.push_back(Queued { ticket, room, done });
    }

    /// Takes a read back. A message that was on its way to it goes to the read behind it.
    pub fn cancel(&mut self, ticket: u64) -> Option<ReadDone> {
        let at = self.reads.iter().position(|queued| queued.ticket == ticket)?;
        self.reads.remove(at).map(|queued| queued.done)
    }

    /// Bytes whose receives are posted.
    pub fn bytes_under_way(&self) -> usize {
        self.window.iter().map(|entry| if let Some(Arriving::Posted(len)) = entry { *len } else { 0 }).sum()
    }

    /// Posts what can be posted. True when the transport said "again".
    pub fn pump<T: Transport>(&mut self, transport: &mut T, peer: Addr, calls: &mut Vec<Call>) -> Result<bool, Error> {
        self.settle(calls);
        let wanted = self.reads.len().min(self.depth);
        let mut begun = 0;
        for ahead in 0..wanted.min(self.window.len()) {
            let id = self.next.wrapping_add(ahead as u32);
            let Some(entry) = &mut self.window[ahead] else { continue };
            begun += 1;
            let Arriving::Announced(len) = *entry else { continue };
            let mut room = std::mem::take(&mut self.reads[ahead].room);
            if room.capacity() < len {
                room = spare::take(len).unwrap_or(room);
            }
            let pattern = Pattern { tag: PAYLOAD | u64::from(id), ignore: 0 };
            let token = token(Operation::ReceivePayload, self.channel, id);
            match transport.receive(Some(peer), pattern, room, len, token) {
                Receiving::Posted => *entry = Arriving::Posted(len),
                Receiving::Again(room) => {
                    self.reads[ahead].room = room;
                    return Ok(true);
                }
                Receiving::Failed(_, error) => return Err(error),
            }
        }
        // Lengths come in any order: whichever is learned that is not wanted yet, another one is asked for.
        while self.asking + begun < wanted {
            let room = self.rooms.pop().unwrap_or_default();
            let pattern = Pattern { tag: LENGTH, ignore: ID_MASK };
            let token = token(Operation::ReceiveLength, self.channel, self.asked);
            match transport.receive(Some(peer), pattern, room, LENGTH_ROOM, token) {
                Receiving::Posted => {
                    self.asking += 1;
                    self.asked = self.asked.wrapping_add(1);
                }
                Receiving::Again(room) => {
                    self.rooms.push(room);
                    return Ok(true);
                }
                Receiving::Failed(_, error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// A receive for a length is over without a message.
    pub fn length_cancelled(&mut self) {
        self.asking = self.asking.saturating_sub(1);
    }

    /// A length came.
    pub fn length(&mut self, tag: u64, bytes: Vec<u8>) -> Result<(), Violation> {
        self.asking = self.asking.saturating_sub(1);
        let id = (tag & ID_MASK) as u32;
        if self.is_leftover(id) {
            self.rooms.push(bytes);
            return Ok(());
        }
        let word = bytes.as_slice().try_into().map_err(|_| Violation::LengthSize { id, bytes: bytes.len() })?;
        let said = u64::from_le_bytes(word);
        self.rooms.push(bytes);
        let too_long = Violation::TooLong { id, len: said, max: self.max_message };
        let len = usize::try_from(said).ok().filter(|len| *len <= self.max_message).ok_or(too_long)?;
        let ahead = id.wrapping_sub(self.next) as usize;
        if ahead >= AHEAD {
            return Err(Violation::OutOfTurn { id, expected: self.next });
        }
        if ahead >= self.window.len() {
            self.window.resize_with(ahead + 1, || None);
        }
        let entry = &mut self.window[ahead];
        if entry.is_some() {
            return Err(Violation::OutOfTurn { id, expected: self.next });
        }
        *entry = Some(Arriving::Announced(len));
        self.stray = None;
        Ok(())
    }

    /// A payload came. Whole messages are handed over in [`Incoming::settle`].
    pub fn payload(&mut self, id: u32, bytes: Vec<u8>, calls: &mut Vec<Call>) -> Result<(), Violation> {
        let entry = self.window.get_mut(id.wrapping_sub(self.next) as usize).and_then(Option::as_mut);
        let Some(entry) = entry else { return Ok(()) };
        let Arriving::Posted(said) = *entry else { return Ok(()) };
        if bytes.len() != said {
            return Err(Violation::PayloadLength { id, said, got: bytes.len() });
        }
        *entry = Arriving::Whole(bytes);
        self.settle(calls);
        Ok(())
    }

    /// What the length of a message said whose payload was longer.
    pub fn too_long(&self, id: u32) -> Violation {
        let said = match self.window.get(id.wrapping_sub(self.next) as usize) {
            Some(Some(Arriving::Posted(said))) => *said,
            _ => 0,
        };
        Violation::PayloadTooLong { id, said }
    }

    /// A message that was handed to a read was not wanted there.
    pub fn give_back(&mut self, number: u64, bytes: Vec<u8>, calls: &mut Vec<Call>) {
        let at = self.returned.partition_point(|(before, _)| *before < number);
        self.returned.insert(at, (number, bytes));
        self.settle(calls);
    }

    /// The first of those.
    pub fn take_returned(&mut self) -> Option<(u64, Vec<u8>)> {
        self.returned.pop_front()
    }

    pub fn forget_returned(&mut self) {
        self.returned.clear();
    }

    fn settle(&mut self, calls: &mut Vec<Call>) {
        while !self.reads.is_empty()
            && let Some(message) = self.returned.pop_front()
        {
            calls.extend(self.reads.pop_front().map(|read| Call::Read(read.done, Ok(message), read.ticket)));
        }
        while !self.reads.is_empty() && matches!(self.window.front(), Some(Some(Arriving::Whole(_)))) {
            self.stuck_since = None;
            self.next = self.next.wrapping_add(1);
            if let (Some(Some(Arriving::Whole(bytes))), Some(read)) = (self.window.pop_front(), self.reads.pop_front())
            {
                calls.push(Call::Read(read.done, Ok((self.handed, bytes)), read.ticket));
                self.handed += 1;
            }
        }
    }

    /// Finds a message that was begun and does not go on: `allowed` gives the time for a number of bytes.
    pub fn overdue(&mut self, now: Instant, allowed: impl Fn(usize) -> Duration) -> Option<Violation> {
        if self.is_waiting() {
            self.stuck_since = None;
            let (id, since) = self.stray?;
            let waited = now.duration_since(since);
            return (waited >= allowed(0)).then_some(Violation::Missing { id, missing: "length", waited });
        }
        if self.reads.is_empty() {
            self.stuck_since = None;
            return None;
        }
        let since = *self.stuck_since.get_or_insert(now);
        let (missing, bytes) = match self.window.front() {
            Some(Some(Arriving::Announced(bytes) | Arriving::Posted(bytes))) => ("payload", *bytes),
            Some(Some(Arriving::Whole(_))) => return None,
            Some(None) | None => ("length", 0),
        };
        let waited = now.duration_since(since);
        let under_way = self.bytes_under_way().max(bytes);
        (waited >= allowed(under_way)).then_some(Violation::Missing { id: self.next, missing, waited })
    }

    /// The own loop was away: deadlines start again.
    pub fn excuse(&mut self) {
        (self.stuck_since, self.stray) = (None, None);
    }

    /// Reads wait, and nothing is begun.
    pub fn is_waiting(&self) -> bool {
        !self.reads.is_empty() && self.window.is_empty()
    }

    /// Looking for payloads has found that of message `id`, or none.
    pub fn seen(&mut self, id: Option<u32>, now: Instant) {
        let id = id.filter(|_| self.is_waiting());
        let before = self.stray.filter(|(before, _)| Some(*before) == id);
        self.stray = before.or(id.map(|id| (id, now)));
    }

    /// Reads that wait.
    pub fn has_reads(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Ends all reads with an error, in their order.
    pub fn fail(&mut self, error: &ChannelError, calls: &mut Vec<Call>) {
        calls.extend(self.reads.drain(..).map(|read| Call::Read(read.done, Err(error.clone()), read.ticket)));
    }

    /// The peer has written its last message before `end`: when all before that are read, reads end.
    pub fn end_at(&mut self, end: u32, error: &ChannelError, calls: &mut Vec<Call>) {
        if end == self.next {
            self.fail(error, calls);
        }
    }
}
