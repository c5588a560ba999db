//! What an operation announces when it has landed, and how it is posted.

/// A remote signal and a local counter, packed in one word so that it travels in a register.
///
/// Bits 0–15 hold the signal's id + 1, bits 16–31 the counter's id + 1, bits 32–63 what the signal is raised by.
/// `FGIN_SIGNAL_INC` and its siblings in `ferrogin/gin.h` build the same word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Action(u64);

impl Action {
    /// Announce nothing.
    pub const NONE: Action = Action(0);

    /// Reads a word made by the C header.
    pub const fn from_bits(bits: u64) -> Action {
        Action(bits)
    }

    /// The word.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Raises the peer's signal `id` (at most 65534) by one once the bytes have landed.
    pub const fn signal_inc(id: u16) -> Action {
        Action::NONE.with_signal(id, 1)
    }

    /// Raises the peer's signal `id` (at most 65534) by `n`; with `n` = 0 it raises nothing.
    pub const fn signal_add(id: u16, n: u32) -> Action {
        Action::NONE.with_signal(id, n)
    }

    /// Ticks this rank's counter `id` (at most 65534) once when the operation has completed here.
    pub const fn counter(id: u16) -> Action {
        Action::NONE.with_counter(id)
    }

    /// The same, and a signal raised by `n`.
    pub const fn with_signal(self, id: u16, n: u32) -> Action {
        Action((self.0 & 0xffff_0000) | (id.wrapping_add(1) as u64) | ((n as u64) << 32))
    }

    /// The same, and a counter.
    pub const fn with_counter(self, id: u16) -> Action {
        Action((self.0 & !0xffff_0000) | ((id.wrapping_add(1) as u64) << 16))
    }

    /// Signal id and amount, if a signal is named and raised by more than nothing.
    #[inline(always)]
    pub(crate) const fn signal(self) -> Option<(u32, u32)> {
        let n = (self.0 >> 32) as u32;
        match (self.0 & 0xffff) as u32 {
            0 => None,
            _ if n == 0 => None,
            id => Some((id - 1, n)),
        }
    }

    /// The signal's id, even where it is raised by nothing: it must exist all the same.
    #[inline(always)]
    pub(crate) const fn named_signal(self) -> Option<u32> {
        match (self.0 & 0xffff) as u32 {
            0 => None,
            id => Some(id - 1),
        }
    }

    /// Counter id, if one is named.
    #[inline(always)]
    pub(crate) const fn local_counter(self) -> Option<u32> {
        match (self.0 >> 16) as u32 & 0xffff {
            0 => None,
            id => Some(id - 1),
        }
    }
}

/// How an operation is posted. The values are NCCL's `ncclGinOptFlags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Flags(u32);

impl Flags {
    /// Ring the doorbell with this operation.
    pub const NONE: Flags = Flags(0);
    /// Leave the doorbell to the next operation without this flag, or to a flush.
    pub const AGGREGATE: Flags = Flags(2);

    /// Reads NCCL's flags; those that mean nothing here are ignored.
    pub const fn from_bits(bits: u32) -> Flags {
        Flags(bits & Flags::AGGREGATE.0)
    }

    /// The doorbell is left to a later operation.
    #[inline(always)]
    pub const fn is_aggregate(self) -> bool {
        self.0 & Flags::AGGREGATE.0 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_independent() {
        let a = Action::counter(7).with_signal(3, 5);
        assert_eq!((a.signal(), a.local_counter()), (Some((3, 5)), Some(7)));
        let b = Action::signal_inc(0).with_counter(0);
        assert_eq!((b.signal(), b.local_counter()), (Some((0, 1)), Some(0)));
        assert_eq!(b.bits(), 1 << 32 | 1 << 16 | 1);
    }

    #[test]
    fn adding_nothing_names_the_signal_without_raising_it() {
        let a = Action::signal_add(4, 0);
        assert_eq!((a.signal(), a.named_signal()), (None, Some(4)));
        assert_eq!(Action::NONE.named_signal(), None);
    }
}
