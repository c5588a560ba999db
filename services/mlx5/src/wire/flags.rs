//! Bytes and words whose bits have names.

use zerocopy::big_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A transparent type of named bits over `$int` (its wire form `$wire`).
macro_rules! bits {
    (
        $(#[$attr:meta])*
        $name:ident($int:ty as $wire:ty);
        $($(#[$bit_attr:meta])* $bit:ident = $value:expr;)*
    ) => {
        $(#[$attr])*
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        pub struct $name($wire);

        impl $name {
            /// No bit set.
            pub const NONE: Self = Self::new(0);
            $($(#[$bit_attr])* pub const $bit: Self = Self::new($value);)*

            /// From the integer; unknown bits are kept.
            #[inline(always)]
            pub const fn new(bits: $int) -> Self {
                Self(<$wire>::from_int(bits))
            }

            /// Returns the flags as an integer.
            #[inline(always)]
            pub const fn bits(self) -> $int {
                self.0.to_int()
            }

            /// Returns the union of both.
            #[inline(always)]
            #[must_use]
            pub const fn with(self, other: Self) -> Self {
                Self::new(self.bits() | other.bits())
            }

            /// Returns the union of both if `on`.
            #[inline(always)]
            #[must_use]
            pub const fn with_if(self, other: Self, on: bool) -> Self {
                Self::new(self.bits() | (other.bits() * on as $int))
            }

            /// Returns whether all bits of `other` are set.
            #[inline(always)]
            pub const fn has(self, other: Self) -> bool {
                self.bits() & other.bits() == other.bits()
            }
        }
    };
}

/// One byte, with the conversions that the macro uses for words too.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
struct Byte(u8);

impl Byte {
    #[inline(always)]
    const fn from_int(value: u8) -> Self {
        Self(value)
    }

    #[inline(always)]
    const fn to_int(self) -> u8 {
        self.0
    }
}

/// A big-endian 64-bit word.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
struct Word(U64);

impl Word {
    #[inline(always)]
    const fn from_int(value: u64) -> Self {
        Self(U64::new(value))
    }

    #[inline(always)]
    const fn to_int(self) -> u64 {
        self.0.get()
    }
}

bits! {
    /// `fm_ce_se` of the control segment: fence mode, completion, solicited event.
    FmCeSe(u8 as Byte);
    /// The peer's completion raises an event (`MLX5_WQE_CTRL_SOLICITED`).
    SOLICITED = 0x02;
    /// The work request gets a completion (`MLX5_WQE_CTRL_CQ_UPDATE`).
    CQ_UPDATE = 0x08;
    /// Wait for earlier changes of memory keys (`MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE`).
    SMALL_FENCE = 0x20;
    /// Wait for earlier reads and atomics too (`MLX5_WQE_CTRL_FENCE`).
    FENCE = 0x80;
}

/// The three bits of fence mode in [`FmCeSe`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fence {
    /// May start before earlier UMRs have taken effect.
    #[default]
    None,
    /// Starts after earlier UMRs have taken effect.
    Small,
    /// Starts after all earlier work requests, reads and atomics included.
    Full,
    /// Any other mode: the three bits.
    Unknown(u8),
}

impl FmCeSe {
    const FENCE_MASK: u8 = 0xe0;

    /// Returns the fence mode.
    #[inline]
    pub const fn fence(self) -> Fence {
        match self.bits() & Self::FENCE_MASK {
            0 => Fence::None,
            0x20 => Fence::Small,
            0x80 => Fence::Full,
            other => Fence::Unknown(other >> 5),
        }
    }
}

bits! {
    /// Flags of the UMR control segment: `MLX5_WQE_UMR_CTRL_FLAG_*`.
    UmrFlags(u8 as Byte);
    /// Only the queue pair that bound the window may free it.
    CHECK_QPN = 0x08;
    /// The translation offset is valid.
    TRANSLATION_OFFSET = 0x10;
    /// The key must be free (`MLX5_UMR_CHECK_NOT_FREE` of the kernel, which names the case that fails).
    CHECK_FREE = 0x20;
    /// The key must not be free (`MLX5_UMR_CHECK_FREE` of the kernel). rdma-core has no name for it.
    CHECK_BOUND = 0x40;
    /// The translation entries are inside the work request.
    INLINE = 0x80;
}

bits! {
    /// Which fields of the memory key context a UMR changes: `MLX5_WQE_UMR_CTRL_MKEY_MASK_*`.
    MkeyMask(u64 as Word);
    /// Length.
    LEN = 1 << 0;
    /// Start address.
    START_ADDR = 1 << 6;
    /// The tag, the low byte of the key.
    MKEY = 1 << 13;
    /// The queue pair that may use the key.
    QPN = 1 << 14;
    /// Local write right.
    ACCESS_LOCAL_WRITE = 1 << 18;
    /// Remote read right.
    ACCESS_REMOTE_READ = 1 << 19;
    /// Remote write right.
    ACCESS_REMOTE_WRITE = 1 << 20;
    /// Atomics right.
    ACCESS_ATOMIC = 1 << 21;
    /// The free state.
    FREE = 1 << 29;
}

bits! {
    /// Rights in a memory key context: `MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_*`. Local read is always allowed.
    MkeyAccess(u8 as Byte);
    /// The owner may write.
    LOCAL_WRITE = 0x08;
    /// The peer may read.
    REMOTE_READ = 0x10;
    /// The peer may write.
    REMOTE_WRITE = 0x20;
    /// The peer may do atomics.
    ATOMIC = 0x40;
}
