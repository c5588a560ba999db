//! The order of puts and signals from one sender in one context, without I/O.
//!
//! The network keeps no order, so signals have numbers. A put with a signal is a write whose immediate data has the low bits of the
//! number, which tell the receiver that the bytes have landed, and a message with the whole signal; the two travel at once. To a word
//! that the receiver knows there is no message (see [`super::words`]). A put without a signal costs the receiver nothing: the sender holds
//! the message of a strong signal, and of a weak one without bytes of its own, back until all such puts that were issued before have
//! completed, which means that their bytes have landed. Where the provider keeps the order of writes and messages, such puts do not enter
//! the stream, and no signal is held back.
//!
//! The receiver applies a weak signal once it and its own put have arrived, and a strong one once all lower numbers are applied, too. It
//! acknowledges numbers, so that a sender never has more than [`WINDOW`] of them under way.

use std::collections::VecDeque;

/// Signals of a stream that the receiver has not acknowledged, at most.
pub const WINDOW: u32 = 256;
/// The fewest bits of immediate data that a number may have: half their range is the window.
pub const NUMBER_BITS_MIN: u32 = 4;

/// The window of a stream whose numbers have so many bits in immediate data.
pub fn window(bits: u32) -> u32 {
    WINDOW.min(1 << (bits - 1))
}

/// True if `a` is before `b`. Numbers wrap, and those of a stream under way are at most [`WINDOW`] apart.
pub fn before(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) > u32::MAX / 2
}

/// A stream: peer and context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId {
    /// The peer's rank.
    pub peer: usize,
    /// The context.
    pub context: usize,
}

impl StreamId {
    /// The stream's place among those of `nranks` peers.
    pub fn place(self, nranks: usize) -> usize {
        self.context * nranks + self.peer
    }
}

/// The sender's half. `S` is a signal that is held back.
#[derive(Debug)]
pub struct Outgoing<S> {
    /// The number of the next signal.
    next: u32,
    /// The receiver has applied all signals before this one.
    acknowledged: u32,
    window: u32,
    /// Puts without a number that are not complete, the oldest first: whether each has completed.
    puts: VecDeque<bool>,
    /// The index of the oldest of `puts`.
    oldest: u64,
    /// Signals that wait for the puts before an index, in ascending order.
    held: VecDeque<(u64, S)>,
    /// The last put was a part of one whose signal comes with its last part.
    is_in_parts: bool,
}

impl<S> Outgoing<S> {
    /// A stream whose first number is `first`.
    pub fn new(first: u32, window: u32) -> Self {
        Self {
            next: first,
            acknowledged: first,
            window,
            puts: VecDeque::new(),
            oldest: 0,
            held: VecDeque::new(),
            is_in_parts: false,
        }
    }

    /// Issues a put without a number, which may be a part of one whose signal comes with its last part, and returns its index for
    /// [`put_done`](Self::put_done).
    pub fn put(&mut self, is_in_parts: bool) -> u64 {
        self.is_in_parts = is_in_parts;
        self.puts.push_back(false);
        self.oldest + self.puts.len() as u64 - 1
    }

    /// A put has completed.
    pub fn put_done(&mut self, index: u64) {
        if let Some(done) = index.checked_sub(self.oldest).and_then(|at| self.puts.get_mut(at as usize)) {
            *done = true;
        }
        while self.puts.front() == Some(&true) {
            self.puts.pop_front();
            self.oldest += 1;
        }
    }

    /// True if puts without a number are not complete.
    pub fn has_puts(&self) -> bool {
        !self.puts.is_empty()
    }

    /// The receiver has applied all signals before this one.
    pub fn acknowledged(&self) -> u32 {
        self.acknowledged
    }

    /// The number for the next signal, if the window has room.
    pub fn number(&mut self) -> Option<u32> {
        if self.next.wrapping_sub(self.acknowledged) >= self.window {
            return None;
        }
        let number = self.next;
        self.next = number.wrapping_add(1);
        Some(number)
    }

    /// Whether a signal belongs behind the puts until now. It is weak or strong, and may have `one_write` of its own, whose immediate data
    /// tells of its landing. NCCL's proxy makes two operations of a put with a signal in memory, so even a weak signal without a write may
    /// belong to the put before it.
    pub fn follows_puts(&mut self, is_strong: bool, one_write: bool) -> bool {
        let is_in_parts = std::mem::take(&mut self.is_in_parts);
        is_strong || !one_write || is_in_parts
    }

    /// Takes a signal that has to wait for all puts until now; gives it back if there is nothing to wait for.
    pub fn hold(&mut self, signal: S) -> Option<S> {
        if self.puts.is_empty() {
            return Some(signal);
        }
        self.held.push_back((self.oldest + self.puts.len() as u64, signal));
        None
    }

    /// The next signal that waits no more.
    pub fn release(&mut self) -> Option<S> {
        let due = self.held.front().is_some_and(|(needs, _)| *needs <= self.oldest);
        due.then(|| self.held.pop_front()).flatten().map(|(_, signal)| signal)
    }

    /// The receiver has applied all signals before `number`. False for a number that it cannot have applied.
    pub fn acknowledge(&mut self, number: u32) -> bool {
        let valid = number.wrapping_sub(self.acknowledged) <= self.next.wrapping_sub(self.acknowledged);
        if valid {
            self.acknowledged = number;
        }
        valid
    }
}

/// A signal that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived<R> {
    /// It belongs to a write with immediate data.
    pub has_put: bool,
    /// All signals with lower numbers are applied before.
    pub strong: bool,
    /// What to apply.
    pub signal: R,
}

#[derive(Debug)]
struct Slot<R> {
    landed: bool,
    arrived: Option<Arrived<R>>,
    applied: bool,
}

/// The receiver's half. `R` is a signal.
#[derive(Debug)]
pub struct Incoming<R> {
    /// All signals before this number are applied.
    base: u32,
    /// Signals from `base` on, of which some may be there.
    slots: VecDeque<Slot<R>>,
    bits: u32,
    acknowledged: u32,
}

/// A number outside the window: a duplicate, or of a sender that breaks the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfWindow;

impl<R> Incoming<R> {
    /// A stream whose first number is `first`, of which immediate data has the low `bits`.
    pub fn new(first: u32, bits: u32) -> Self {
        Self { base: first, slots: VecDeque::new(), bits, acknowledged: first }
    }

    fn slot(&mut self, offset: u32) -> Result<&mut Slot<R>, OutOfWindow> {
        if offset >= window(self.bits) {
            return Err(OutOfWindow);
        }
        while self.slots.len() <= offset as usize {
            self.slots.push_back(Slot { landed: false, arrived: None, applied: false });
        }
        Ok(&mut self.slots[offset as usize])
    }

    /// Immediate data says that the bytes of a put have landed: `low` has the low bits of its number. Without a `signal`, that comes by
    /// a message. Calls `apply` with each signal that this completes, in order.
    ///
    /// # Errors
    /// No put with that number is under way.
    pub fn land(&mut self, low: u32, signal: Option<Arrived<R>>, apply: impl FnMut(R)) -> Result<(), OutOfWindow> {
        let offset = low.wrapping_sub(self.base) & (u32::MAX >> (32 - self.bits));
        let slot = self.slot(offset)?;
        if slot.landed || slot.applied || (signal.is_some() && slot.arrived.is_some()) {
            return Err(OutOfWindow);
        }
        slot.landed = true;
        slot.arrived = signal.or(slot.arrived.take());
        self.settle(offset, apply);
        Ok(())
    }

    /// A signal has arrived. Calls `apply` with each signal that this completes, in order.
    ///
    /// # Errors
    /// No signal with that number is under way.
    pub fn arrive(&mut self, number: u32, arrived: Arrived<R>, apply: impl FnMut(R)) -> Result<(), OutOfWindow> {
        if before(number, self.base) {
            return Err(OutOfWindow);
        }
        let offset = number.wrapping_sub(self.base);
        let slot = self.slot(offset)?;
        if slot.applied || slot.arrived.is_some() {
            return Err(OutOfWindow);
        }
        slot.arrived = Some(arrived);
        self.settle(offset, apply);
        Ok(())
    }

    fn settle(&mut self, offset: u32, mut apply: impl FnMut(R)) {
        let complete = |slot: &mut Slot<R>, first: bool| {
            let landed = slot.landed;
            let taken = slot.arrived.take_if(|arrived| (landed || !arrived.has_put) && (first || !arrived.strong))?;
            slot.applied = true;
            Some(taken.signal)
        };
        if offset > 0
            && let Some(signal) = self.slots.get_mut(offset as usize).and_then(|slot| complete(slot, false))
        {
            apply(signal);
        }
        while let Some(slot) = self.slots.front_mut() {
            if !slot.applied {
                let Some(signal) = complete(slot, true) else { return };
                apply(signal);
            }
            self.slots.pop_front();
            self.base = self.base.wrapping_add(1);
        }
    }

    /// The acknowledgement that is due: all signals before the number are applied.
    pub fn acknowledgement(&mut self) -> Option<u32> {
        let due = self.base.wrapping_sub(self.acknowledged) >= window(self.bits).div_ceil(4);
        due.then(|| {
            self.acknowledged = self.base;
            self.base
        })
    }
}

#[cfg(test)]
mod tests;
