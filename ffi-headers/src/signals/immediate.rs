//! The 32-bit form of a signal: a write's immediate data.
//!
//! | bits | field |
//! |---|---|
//! | 0 to 15 | the signal |
//! | 16 to 27 | the amount minus one |
//! | 28 to 31 | the generation's low bits |

use super::signal::{Generation, Signal, Target};

const SIGNAL_BITS: u32 = 16;
const ADD_BITS: u32 = 12;
const GENERATION_BITS: u32 = 4;
const _: () = assert!(SIGNAL_BITS + ADD_BITS + GENERATION_BITS == u32::BITS);

/// How many signals an immediate can name.
pub const MAX_SIGNALS: u32 = 1 << SIGNAL_BITS;
/// The largest amount that fits in an immediate.
pub const MAX_ADD: u64 = 1 << ADD_BITS;

/// An indexed signal below [`MAX_SIGNALS`] with an amount from 1 to [`MAX_ADD`]. Every bit pattern is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Immediate(u32);

impl Immediate {
    /// Returns the immediate for a signal; `None` if the signal doesn't fit.
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

    /// Wraps the immediate data of a completion.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Returns the immediate data.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns the signal.
    pub const fn signal(self) -> Signal {
        let add = (self.0 >> SIGNAL_BITS & (MAX_ADD as u32 - 1)) as u64 + 1;
        Signal { target: Target::Indexed(self.0 & (MAX_SIGNALS - 1)), add }
    }

    /// Returns whether the immediate is for a context of this generation, as far as its few bits can tell.
    pub const fn is_of(self, generation: Generation) -> bool {
        self.0 >> (SIGNAL_BITS + ADD_BITS) == generation.bits() as u32 & ((1 << GENERATION_BITS) - 1)
    }
}
