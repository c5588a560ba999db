//! The 32-bit form of a signal: immediate data of a write.
//!
//! | bits | field |
//! |---|---|
//! | 0 to 15 | the signal |
//! | 16 to 27 | the amount less one |
//! | 28 to 31 | the low bits of the generation |

use super::signal::{Generation, Signal, Target};

const SIGNAL_BITS: u32 = 16;
const ADD_BITS: u32 = 12;
const GENERATION_BITS: u32 = 4;
const _: () = assert!(SIGNAL_BITS + ADD_BITS + GENERATION_BITS == u32::BITS);

/// Signals that an immediate can name.
pub const MAX_SIGNALS: u32 = 1 << SIGNAL_BITS;
/// The greatest amount of an immediate.
pub const MAX_ADD: u64 = 1 << ADD_BITS;

/// An indexed signal below [`MAX_SIGNALS`] with an amount from 1 to [`MAX_ADD`]. Every pattern of bits is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Immediate(u32);

impl Immediate {
    /// The immediate of a signal; `None` where it has no room.
    #[inline]
    pub const fn new(signal: Signal, generation: Generation) -> Option<Self> {
        match signal {
            Signal { target: Target::Indexed(index), add: 1..=MAX_ADD } if index < MAX_SIGNALS => {
                let amount = (signal.add as u32 - 1) << SIGNAL_BITS;
                Some(Self(index | amount | (generation.bits() as u32) << (SIGNAL_BITS + ADD_BITS)))
            }
            _ => None,
        }
    }

    /// The immediate that a completion has.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The immediate data.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The signal.
    pub const fn signal(self) -> Signal {
        let add = (self.0 >> SIGNAL_BITS & (MAX_ADD as u32 - 1)) as u64 + 1;
        Signal { target: Target::Indexed(self.0 & (MAX_SIGNALS - 1)), add }
    }

    /// Whether the immediate is for a context of this generation, as far as its bits tell.
    pub const fn is_of(self, generation: Generation) -> bool {
        self.0 >> (SIGNAL_BITS + ADD_BITS) == generation.bits() as u32 & ((1 << GENERATION_BITS) - 1)
    }
}
