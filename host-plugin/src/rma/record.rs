//! The message of a signal or an acknowledgement.

use super::stream::NUMBER_BITS_MIN;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A message, on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Record {
    /// The receiver's secret for this context handle: another process may reach the endpoint.
    pub token: U64,
    /// The sender's rank.
    pub sender: U32,
    /// The signal's number, or that of the first signal that is not applied yet.
    pub number: U32,
    /// The context of the stream.
    pub context: U16,
    /// One of the constants below.
    pub kind: u8,
    /// 1 for a strong signal.
    pub strong: u8,
    /// The registration of the word.
    pub memory: U32,
    /// The word, in bytes from the first one of the registration.
    pub offset: U64,
    /// The amount to add.
    pub value: U64,
}
ferrogin_ffi::assert_layout!(Record, size 40, align 1, {
    token @ 0, sender @ 8, number @ 12, context @ 16, kind @ 18, strong @ 19, memory @ 20, offset @ 24, value @ 32,
});

/// [`Record::kind`]: a signal.
pub const SIGNAL: u8 = 1;
/// [`Record::kind`]: a signal of a write with immediate data.
pub const SIGNAL_OF_PUT: u8 = 2;
/// [`Record::kind`]: an acknowledgement.
pub const ACKNOWLEDGEMENT: u8 = 3;

/// The parts of 32 bits of immediate data: sender, context, low bits of the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Immediate {
    rank_bits: u32,
    context_bits: u32,
    /// Bits of the number.
    pub number_bits: u32,
}

/// Bits that tell `count` things apart.
fn bits(count: usize) -> u32 {
    usize::BITS - count.saturating_sub(1).leading_zeros()
}

impl Immediate {
    /// The parts for so many ranks and contexts; `None` if they leave too few bits for numbers.
    pub fn new(ranks: usize, contexts: usize) -> Option<Self> {
        let (rank_bits, context_bits) = (bits(ranks), bits(contexts));
        let number_bits = 32u32.checked_sub(rank_bits + context_bits).filter(|bits| *bits >= NUMBER_BITS_MIN)?;
        Some(Self { rank_bits, context_bits, number_bits })
    }

    /// Immediate data. Rank and context are those of the job.
    pub fn pack(self, rank: usize, context: usize, number: u32) -> u32 {
        let below = self.rank_bits + self.context_bits;
        // One rank and one context leave all 32 bits to the number.
        rank as u32 | (context as u32) << self.rank_bits | number.unbounded_shl(below)
    }

    /// Rank, context and the low bits of the number. The first two may be no rank and no context of the job.
    pub fn unpack(self, data: u32) -> (usize, usize, u32) {
        let low = |value: u32, bits: u32| value & !u32::MAX.unbounded_shl(bits);
        let rank = low(data, self.rank_bits);
        let context = low(data >> self.rank_bits, self.context_bits);
        (rank as usize, context as usize, data.unbounded_shr(self.rank_bits + self.context_bits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediate_data_round_trips_for_all_sizes_of_jobs() {
        for (ranks, contexts) in [(1, 1), (2, 1), (1, 2), (3, 33), (4096, 64), (1 << 20, 256)] {
            let layout = Immediate::new(ranks, contexts).unwrap();
            let most = u32::MAX >> (32 - layout.number_bits);
            for (rank, context, number) in [(0, 0, 0), (ranks - 1, contexts - 1, most), (ranks / 2, 0, most / 2)] {
                let data = layout.pack(rank, context, number);
                assert_eq!(layout.unpack(data), (rank, context, number), "{layout:?}");
            }
            // Only the low bits of a number travel.
            assert_eq!(layout.unpack(layout.pack(0, 0, u32::MAX)).2, most);
        }
        assert_eq!(Immediate::new(1 << 20, 257), None);
        assert_eq!(Immediate::new(2, 33).unwrap().number_bits, 25);
    }

    #[test]
    fn record_has_its_golden_bytes() {
        let record = Record {
            token: 0x0807_0605_0403_0201.into(),
            sender: 0x0c0b_0a09.into(),
            number: 0x100f_0e0d.into(),
            context: 0x1211.into(),
            kind: SIGNAL_OF_PUT,
            strong: 1,
            memory: 0x1817_1615.into(),
            offset: 0x201f_1e1d_1c1b_1a19.into(),
            value: 0x2827_2625_2423_2221.into(),
        };
        let mut expected: Vec<u8> = (1..=40).collect();
        (expected[18], expected[19]) = (2, 1);
        assert_eq!(record.as_bytes(), expected);
        assert_eq!(Record::read_from_bytes(&expected).unwrap(), record);
        assert!(Record::read_from_bytes(&expected[..39]).is_err());
    }
}
