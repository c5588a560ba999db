//! Actions: the signal and the counter of an operation. Flags: how an operation is posted.

/// A remote signal and a local counter, packed in one word so that it travels in a register.
///
/// Bits 0–15 hold the signal's id + 1, bits 16–31 the counter's id + 1, bits 32–63 what the signal is raised by.
/// `FGIN_SIGNAL_INC` and its siblings in `ferrogin/gin.h` build the same word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Action(u64);

impl Action {
    /// No signal and no counter.
    pub const NONE: Action = Action(0);

    /// Returns the action in a word that the C header built.
    pub const fn from_bits(bits: u64) -> Action {
        Action(bits)
    }

    /// Returns the word.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Raises the peer's signal `id` (at most 65533) by one once the bytes have landed.
    pub const fn signal_inc(id: u16) -> Action {
        Action::NONE.with_signal(id, 1)
    }

    /// Raises the peer's signal `id` (at most 65533) by `n`; an `n` of 0 raises no signal.
    pub const fn signal_add(id: u16, n: u32) -> Action {
        Action::NONE.with_signal(id, n)
    }

    /// Ticks this rank's counter `id` (at most 65533) once the operation has completed here.
    pub const fn counter(id: u16) -> Action {
        Action::NONE.with_counter(id)
    }

    /// Returns this action with a signal raised by `n`.
    pub const fn with_signal(self, id: u16, n: u32) -> Action {
        Action((self.0 & 0xffff_0000) | (id.saturating_add(1) as u64) | ((n as u64) << 32))
    }

    /// Returns this action with a counter.
    pub const fn with_counter(self, id: u16) -> Action {
        Action((self.0 & !0xffff_0000) | ((id.saturating_add(1) as u64) << 16))
    }

    /// Returns the action with these slots, whose signal, if any, is raised by one.
    pub(crate) const fn of_slots(slots: u32) -> Action {
        let raised_by_one = if slots as u16 != 0 { 1 << 32 } else { 0 };
        Action(raised_by_one | slots as u64)
    }

    /// Returns the amount that the signal is raised by, if there is one.
    #[inline(always)]
    pub(crate) const fn amount(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Returns the target slot of the named signal, even if it's raised by 0; 0 without a signal.
    #[inline(always)]
    pub(crate) const fn signal_slot(self) -> u32 {
        self.0 as u16 as u32
    }

    /// Returns the named counter's id + 1; 0 without a counter.
    #[inline(always)]
    pub(crate) const fn counter_slot(self) -> u32 {
        (self.0 >> 16) as u32 & 0xffff
    }
}

/// The threads that a call shares its endpoint with.
///
/// Every mode leaves the words that posters share in the same state, so calls in different modes may follow one
/// another. Only concurrent calls must use the same mode. The caller orders calls in different modes like any two
/// threads' accesses to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// All threads of the device, or of the process on a CPU.
    #[default]
    Gpu,
    /// The threads of one CTA.
    Cta,
    /// No other thread.
    Thread,
}

/// How an operation is posted: NCCL's `ncclGinOptFlags` and, above them, the call's sharing mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Flags(u32);

impl Flags {
    /// Ring the doorbell with this operation.
    pub const NONE: Flags = Flags(0);
    /// Leave the doorbell to the next operation without this flag, or to a flush.
    pub const AGGREGATE: Flags = Flags(2);

    /// The signal of a put, value or signal is raised only after all earlier operations of the context to that peer
    /// have arrived, including other threads'. Has no meaning without a signal. Only emulated signals can be strong.
    pub const STRONG: Flags = Flags(0x400);

    const CTA: Flags = Flags(0x100);
    const THREAD: Flags = Flags(0x200);
    const SHARING: Flags = Flags::CTA.with(Flags::THREAD);
    /// All bits a caller may set.
    const ALL: Flags = Flags::AGGREGATE.with(Flags::SHARING).with(Flags::STRONG);

    /// Returns the flags in a word of NCCL's flags and the sharing mode. Unknown flags are ignored.
    #[inline(always)]
    pub const fn from_bits(bits: u32) -> Flags {
        Flags(bits & Flags::ALL.0)
    }

    /// Returns whether one of `flags` is set.
    #[inline(always)]
    pub(crate) const fn has(self, flags: Flags) -> bool {
        self.0 & flags.0 != 0
    }

    /// Returns these flags plus the others.
    #[inline(always)]
    pub(crate) const fn with(self, flags: Flags) -> Flags {
        Flags(self.0 | flags.0)
    }

    /// Returns these flags without the others.
    #[inline(always)]
    pub(crate) const fn without(self, flags: Flags) -> Flags {
        Flags(self.0 & !flags.0)
    }

    /// Returns the word of NCCL's flags and the sharing mode.
    #[inline(always)]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns these flags with that sharing mode.
    #[inline(always)]
    pub const fn shared(self, mode: Sharing) -> Flags {
        self.without(Flags::SHARING).with(match mode {
            Sharing::Gpu => Flags::NONE,
            Sharing::Cta => Flags::CTA,
            Sharing::Thread => Flags::THREAD,
        })
    }

    /// Returns the sharing mode; two modes at once mean the widest.
    #[inline(always)]
    pub const fn mode(self) -> Sharing {
        match (self.has(Flags::CTA), self.has(Flags::THREAD)) {
            (true, false) => Sharing::Cta,
            (false, true) => Sharing::Thread,
            _ => Sharing::Gpu,
        }
    }

    /// Returns whether the doorbell is left to a later operation.
    #[inline(always)]
    pub const fn is_aggregate(self) -> bool {
        self.has(Flags::AGGREGATE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_and_counter_of_action_are_independent() {
        let a = Action::counter(7).with_signal(3, 5);
        assert_eq!((a.signal_slot(), a.amount(), a.counter_slot()), (4, 5, 8));
        let b = Action::signal_inc(0).with_counter(0);
        assert_eq!((b.signal_slot(), b.amount(), b.counter_slot()), (1, 1, 1));
        assert_eq!(b.bits(), 1 << 32 | 1 << 16 | 1);
    }

    #[test]
    fn mode_is_independent_of_other_flags() {
        for mode in [Sharing::Gpu, Sharing::Cta, Sharing::Thread] {
            let flags = Flags::AGGREGATE.shared(mode);
            assert_eq!((flags.mode(), flags.is_aggregate()), (mode, true));
            assert_eq!((Flags::NONE.shared(mode).mode(), Flags::NONE.shared(mode).is_aggregate()), (mode, false));
        }
        assert_eq!(Flags::from_bits(0xffff_fcff).mode(), Sharing::Gpu);
        assert_eq!(Flags::from_bits(0x300).mode(), Sharing::Gpu, "two modes at once are the widest");
        assert_eq!((Flags::from_bits(0x100).mode(), Flags::from_bits(0x200).mode()), (Sharing::Cta, Sharing::Thread));
    }
}
