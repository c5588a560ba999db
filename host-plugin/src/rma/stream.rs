//! Orders the puts and signals from one sender in one context, without I/O.
//!
//! The network doesn't keep packets in order, so signals are numbered. A put with a signal becomes a write and a
//! message, sent together: the write's immediate data has the low bits of the number and tells the receiver that the
//! bytes have landed, and the message has the whole signal. If the receiver knows the word, there is no message (see
//! [`super::words`]). A put without a signal costs the receiver nothing: the sender holds back the message of a strong
//! signal, or of a weak one without bytes of its own, until all earlier puts of this kind have completed, which means
//! that their bytes have landed. If the provider keeps writes and messages in order, such puts don't enter the stream,
//! and no signal is held back.
//!
//! The receiver applies a weak signal once it and its own put have arrived, and a strong one once all lower numbers
//! have been applied too. It acknowledges numbers, so a sender never has more than [`WINDOW`] of them outstanding.

use std::collections::VecDeque;

/// Maximum number of a stream's signals that the receiver hasn't acknowledged.
pub const WINDOW: u32 = 256;
/// Minimum number of bits for a number in immediate data; the window is half their range.
pub const NUMBER_BITS_MIN: u32 = 4;

/// Returns the window of a stream whose numbers have this many bits in immediate data.
pub fn window(bits: u32) -> u32 {
    WINDOW.min(1 << (bits - 1))
}

/// Returns whether `a` comes before `b`. Numbers wrap; a stream's outstanding ones are no more than [`WINDOW`] apart.
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
    /// Returns the stream's place among those of `nranks` peers.
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
    /// Signals that are held back, each with the number of incomplete puts between it and the one before it: its group.
    held: VecDeque<(u32, S)>,
    /// The number of the first of `held`'s group, and the number of incomplete puts in the last group, which no held
    /// signal follows.
    group: u32,
    puts: u32,
    /// The last put was part of a larger one, whose signal comes with its last part.
    is_in_parts: bool,
}

impl<S> Outgoing<S> {
    /// Creates a stream whose first number is `first`.
    pub fn new(first: u32, window: u32) -> Self {
        Self { next: first, acknowledged: first, window, held: VecDeque::new(), group: 0, puts: 0, is_in_parts: false }
    }

    /// Issues a put without a number, which may be part of a larger one whose signal comes with its last part. Returns
    /// its group for [`put_done`](Self::put_done).
    pub fn put(&mut self, is_in_parts: bool) -> u32 {
        self.is_in_parts = is_in_parts;
        self.puts += 1;
        self.group.wrapping_add(self.held.len() as u32)
    }

    /// Notes that a put of a group has completed. If this returns true, [`release`](Self::release) has signals.
    pub fn put_done(&mut self, group: u32) -> bool {
        match self.held.get_mut(group.wrapping_sub(self.group) as usize) {
            None => self.puts = self.puts.saturating_sub(1),
            Some((puts, _)) => *puts = puts.saturating_sub(1),
        }
        self.is_due()
    }

    /// Returns whether the first held signal no longer has to wait.
    fn is_due(&self) -> bool {
        self.held.front().is_some_and(|(puts, _)| *puts == 0)
    }

    /// Returns whether any put without a number is incomplete.
    pub fn has_puts(&self) -> bool {
        self.puts > 0 || !self.held.is_empty()
    }

    /// Returns the number before which the receiver has applied all signals.
    pub fn acknowledged(&self) -> u32 {
        self.acknowledged
    }

    /// Takes the next signal's number, if the window has room.
    pub fn number(&mut self) -> Option<u32> {
        if self.next.wrapping_sub(self.acknowledged) >= self.window {
            return None;
        }
        let number = self.next;
        self.next = number.wrapping_add(1);
        Some(number)
    }

    /// Returns whether a signal must wait for all puts so far. With `one_write`, it has a single write of its own,
    /// whose immediate data announces its landing. NCCL's proxy turns a put with a signal in memory into two
    /// operations, so even a weak signal without a write may belong to the put before it.
    pub fn follows_puts(&mut self, is_strong: bool, one_write: bool) -> bool {
        let is_in_parts = std::mem::take(&mut self.is_in_parts);
        is_strong || !one_write || is_in_parts
    }

    /// Holds a signal until all puts so far have completed; hands it back if there is nothing to wait for.
    pub fn hold(&mut self, signal: S) -> Option<S> {
        if !self.has_puts() {
            return Some(signal);
        }
        self.held.push_back((std::mem::take(&mut self.puts), signal));
        None
    }

    /// Returns the next signal that no longer has to wait.
    pub fn release(&mut self) -> Option<S> {
        self.is_due().then_some(())?;
        self.group = self.group.wrapping_add(1);
        self.held.pop_front().map(|(_, signal)| signal)
    }

    /// Returns the signals that are held back, of a stream that ends.
    pub fn into_held(self) -> impl Iterator<Item = S> {
        self.held.into_iter().map(|(_, signal)| signal)
    }

    /// Notes that the receiver has applied all signals before `number`. Returns false if it can't have.
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
    /// Whether it belongs to a write with immediate data.
    pub has_put: bool,
    /// Whether all signals with lower numbers must be applied first.
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
    /// Signals from `base` on, some of which may have arrived.
    slots: VecDeque<Slot<R>>,
    /// The bits of a number that immediate data has.
    mask: u32,
    window: u32,
    acknowledged: u32,
}

/// No signal with this number or word is due: it's a duplicate, or the sender breaks the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfWindow;

impl<R: Copy> Incoming<R> {
    /// Creates a stream whose first number is `first`; immediate data has the low `bits` of each number.
    pub fn new(first: u32, bits: u32) -> Self {
        Self {
            base: first,
            slots: VecDeque::new(),
            mask: u32::MAX >> (32 - bits),
            window: window(bits),
            acknowledged: first,
        }
    }

    /// Returns whether a signal is the next one, and all that have arrived are applied.
    fn is_next(&self, offset: u32) -> bool {
        offset == 0 && self.slots.is_empty()
    }

    fn slot(&mut self, offset: u32) -> Result<&mut Slot<R>, OutOfWindow> {
        if offset >= self.window {
            return Err(OutOfWindow);
        }
        while self.slots.len() <= offset as usize {
            self.slots.push_back(Slot { landed: false, arrived: None, applied: false });
        }
        Ok(&mut self.slots[offset as usize])
    }

    /// Handles immediate data, which says that a put's bytes have landed: `low` has the low bits of its number. Without
    /// a `signal`, a message brings it. Calls `apply` with each signal that this completes, in order.
    ///
    /// # Errors
    /// No put with that number is under way.
    pub fn land(&mut self, low: u32, signal: Option<Arrived<R>>, mut apply: impl FnMut(R)) -> Result<(), OutOfWindow> {
        let offset = low.wrapping_sub(self.base) & self.mask;
        if let Some(arrived) = signal
            && self.is_next(offset)
        {
            self.base = self.base.wrapping_add(1);
            apply(arrived.signal);
            return Ok(());
        }
        let slot = self.slot(offset)?;
        if slot.landed || slot.applied || (signal.is_some() && slot.arrived.is_some()) {
            return Err(OutOfWindow);
        }
        slot.landed = true;
        slot.arrived = signal.or(slot.arrived.take());
        self.settle(offset, apply);
        Ok(())
    }

    /// Handles a signal that has arrived. Calls `apply` with each signal that this completes, in order.
    ///
    /// # Errors
    /// No signal with that number is under way.
    pub fn arrive(&mut self, number: u32, arrived: Arrived<R>, mut apply: impl FnMut(R)) -> Result<(), OutOfWindow> {
        if before(number, self.base) {
            return Err(OutOfWindow);
        }
        let offset = number.wrapping_sub(self.base);
        if self.is_next(offset) && !arrived.has_put {
            self.base = self.base.wrapping_add(1);
            apply(arrived.signal);
            return Ok(());
        }
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
        if let Some(signal) = self.slots.get_mut(offset as usize).and_then(|slot| complete(slot, false)) {
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

    /// Returns the acknowledgement that is due, if any: all signals before this number have been applied.
    pub fn acknowledgement(&mut self) -> Option<u32> {
        let due = self.base.wrapping_sub(self.acknowledged) >= self.window.div_ceil(4);
        due.then(|| {
            self.acknowledged = self.base;
            self.base
        })
    }
}

#[cfg(test)]
mod tests;
