//! What a connecting rank claims to be.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The connecting rank, the number of ranks it was started with, and the rank it calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The connecting rank.
    pub rank: usize,
    /// The number of ranks.
    pub nranks: usize,
    /// The listener's rank.
    pub called: usize,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawClaim {
    rank: U32,
    nranks: U32,
    called: U32,
    zero: U32,
}

ferrogin_ffi::assert_layout!(RawClaim, size 16, align 1, { rank @ 0, nranks @ 4, called @ 8, zero @ 12 });

impl Claim {
    pub(crate) fn emit(self) -> [u8; 16] {
        let number = |value: usize| U32::new(value as u32);
        zerocopy::transmute!(RawClaim {
            rank: number(self.rank),
            nranks: number(self.nranks),
            called: number(self.called),
            zero: U32::ZERO,
        })
    }

    pub(crate) fn parse(bytes: [u8; 16]) -> Self {
        let raw: RawClaim = zerocopy::transmute!(bytes);
        let number = |value: U32| value.get() as usize;
        Self { rank: number(raw.rank), nranks: number(raw.nranks), called: number(raw.called) }
    }
}
