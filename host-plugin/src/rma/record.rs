//! The message that carries a signal or an acknowledgement.

use super::stream;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A message on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Record {
    /// The receiver's secret for this context handle, because other processes may reach the endpoint.
    pub token: U64,
    /// The sender's rank.
    pub sender: U32,
    /// The signal's number or, in an acknowledgement, the number of the first signal not applied yet.
    pub number: U32,
    /// The stream's context.
    pub context: U16,
    /// One of the constants below.
    pub kind: u8,
    /// 1 for a strong signal.
    pub strong: u8,
    /// The number of the word's registration.
    pub memory: U32,
    /// The word's offset in the registration, in bytes.
    pub offset: U64,
    /// The amount to add.
    pub value: U64,
    /// The entry that this word becomes in the stream's word table; 0 means none.
    pub entry: U32,
}
ferrogin_ffi::assert_layout!(Record, size 44, align 1, {
    token @ 0, sender @ 8, number @ 12, context @ 16, kind @ 18, strong @ 19, memory @ 20, offset @ 24, value @ 32, entry @ 40,
});

/// [`Record::kind`]: a signal.
pub const SIGNAL: u8 = 1;
/// [`Record::kind`]: the signal of a write with immediate data.
pub const SIGNAL_OF_PUT: u8 = 2;
/// [`Record::kind`]: an acknowledgement.
pub const ACKNOWLEDGEMENT: u8 = 3;
/// [`Record::kind`]: [`Message::Leaving`](super::departure::Message::Leaving).
pub const LEAVING: u8 = 4;
/// [`Record::kind`]: [`Message::Finished`](super::departure::Message::Finished).
pub const FINISHED: u8 = 5;
/// [`Record::kind`]: [`Message::Goodbye`](super::departure::Message::Goodbye).
pub const GOODBYE: u8 = 6;

/// The layout of 32 bits of immediate data: sender, context, word table entry, low bits of the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Immediate {
    rank_bits: u32,
    context_bits: u32,
    entry_bits: u32,
    /// Bits of the number.
    pub number_bits: u32,
}

/// Bits of a word table entry, if the numbers leave that many.
const ENTRY_BITS: u32 = 4;
/// Bits of a number that the largest window needs.
const NUMBER_BITS: u32 = stream::WINDOW.ilog2() + 1;

/// Returns how many bits it takes to tell `count` things apart.
fn bits(count: usize) -> u32 {
    usize::BITS - count.saturating_sub(1).leading_zeros()
}

impl Immediate {
    /// Returns the layout for this many ranks and contexts; `None` if they leave too few bits for numbers.
    pub fn new(ranks: usize, contexts: usize) -> Option<Self> {
        let (rank_bits, context_bits) = (bits(ranks), bits(contexts));
        let bits = 32u32.checked_sub(rank_bits + context_bits).filter(|bits| *bits >= stream::NUMBER_BITS_MIN)?;
        let entry_bits = bits.saturating_sub(NUMBER_BITS).min(ENTRY_BITS);
        Some(Self { rank_bits, context_bits, entry_bits, number_bits: bits - entry_bits })
    }

    /// Returns the number of entries in a stream's word table; they are numbered from 1.
    pub fn entries(self) -> usize {
        (1 << self.entry_bits) - 1
    }

    /// Packs immediate data. The rank and context must exist in the job; an entry of 0 means none.
    pub fn pack(self, rank: usize, context: usize, entry: u32, number: u32) -> u32 {
        let above_rank = context as u32 | (entry | number << self.entry_bits) << self.context_bits;
        rank as u32 | above_rank << self.rank_bits
    }

    /// Returns the rank, context, entry and low bits of the number. The rank and the context may not exist in the job.
    pub fn unpack(self, data: u32) -> (usize, usize, u32, u32) {
        let mut left = data;
        let mut take = |bits: u32| {
            let low = left & !(u32::MAX << bits);
            left >>= bits;
            low
        };
        let (rank, context) = (take(self.rank_bits) as usize, take(self.context_bits) as usize);
        (rank, context, take(self.entry_bits), left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediate_data_round_trips_for_all_sizes_of_jobs() {
        for (ranks, contexts) in [(1, 1), (2, 1), (1, 2), (3, 33), (4096, 64), (1 << 20, 256)] {
            let layout = Immediate::new(ranks, contexts).unwrap();
            let (most, entries) = (u32::MAX >> (32 - layout.number_bits), layout.entries() as u32);
            for (rank, context, entry, number) in
                [(0, 0, 0, 0), (ranks - 1, contexts - 1, entries, most), (ranks / 2, 0, entries / 2, most / 2)]
            {
                let data = layout.pack(rank, context, entry, number);
                assert_eq!(layout.unpack(data), (rank, context, entry, number), "{layout:?}");
            }
            // Only the low bits of a number travel.
            assert_eq!(layout.unpack(layout.pack(0, 0, 0, u32::MAX)).3, most);
        }
        assert_eq!(Immediate::new(1 << 20, 257), None);
        let sizes =
            |ranks, contexts| Immediate::new(ranks, contexts).map(|layout| (layout.entries(), layout.number_bits));
        assert_eq!([sizes(2, 33), sizes(1 << 21, 1), sizes(1 << 23, 1)], [Some((15, 21)), Some((3, 9)), Some((0, 9))]);
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
            entry: 0x2c2b_2a29.into(),
        };
        let mut expected: Vec<u8> = (1..=44).collect();
        (expected[18], expected[19]) = (2, 1);
        assert_eq!(record.as_bytes(), expected);
        assert_eq!(Record::read_from_bytes(&expected).unwrap(), record);
        assert!(Record::read_from_bytes(&expected[..43]).is_err());
    }
}
