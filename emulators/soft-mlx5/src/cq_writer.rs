//! The card's side of a completion queue: writes the completions that [`mlx5::cq`] polls.
//!
//! The software card and tests use it to produce completions. It shares the format with the poller, but no state: the
//! completions' bytes decide whether they can be compressed, and seeded chance decides whether they are.

#[allow(unsafe_code)]
mod memory;

pub use memory::CqMemory;

use mlx5::cq::Layout;
use mlx5::wire::{Cqe, CqeFormat, CqeOpcode, MAX_24_BITS, MAX_MINIS, MINI_ARRAY, MiniCqe, OpOwn};
use soft_nic::random::Random;
use std::collections::VecDeque;
use zerocopy::IntoBytes;
use zerocopy::big_endian::U32;

/// How a card uses compression.
#[derive(Debug, Clone)]
pub struct Compression {
    /// The blocks' layout.
    pub layout: CompressedLayout,
    /// The blocks' size.
    pub blocks: Blocks,
    /// Blocks may cross the end of the queue, and may use a title from the previous lap.
    pub across_laps: bool,
}

/// A compressed queue's layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompressedLayout {
    /// [`Layout::Basic`].
    Basic,
    /// [`Layout::Enhanced`].
    Enhanced,
}

impl From<CompressedLayout> for Layout {
    fn from(layout: CompressedLayout) -> Self {
        match layout {
            CompressedLayout::Basic => Self::Basic,
            CompressedLayout::Enhanced => Self::Enhanced,
        }
    }
}

/// The most completions in a block of the basic layout, as reported by ConnectX-7.
const MAX_BASIC: usize = 64;

/// The size of the blocks that a card writes.
#[derive(Debug, Clone)]
pub enum Blocks {
    /// No blocks: the queue has the compressed layout, but all completions are regular.
    Never,
    /// As many similar completions as possible.
    Full,
    /// Random sizes, and sometimes no block.
    Random(Random),
}

impl Blocks {
    /// Returns how many of `run` similar completions go into the next block.
    fn take(&mut self, run: usize) -> usize {
        match self {
            Self::Never => 0,
            Self::Full => run,
            // One in eight stays regular, so that titles also change in the middle of runs that could be compressed.
            Self::Random(random) => match random.below(8) {
                0 => 0,
                7 => run,
                most => run.min(most as usize),
            },
        }
    }
}

/// The consumer didn't release slots in time: the next completion would overwrite one that hasn't been polled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("completion queue overrun: {pending} completions wait, but {free} slots are free; make the queue larger")]
pub struct Overrun {
    /// Completions without a slot.
    pub pending: usize,
    /// Free slots.
    pub free: u32,
}

/// Writes completions into a queue.
#[derive(Debug)]
pub struct CqWriter {
    memory: CqMemory,
    log: u32,
    producer: u32,
    pending: VecDeque<Cqe>,
    compression: Option<Compression>,
    /// The last regular completion, how many mini completions followed it, and its lap; `None` after an error.
    title: Option<(Cqe, u32, u16)>,
    minis: u64,
}

impl CqWriter {
    /// Makes a writer that starts at index `producer` of a queue, with or without compression.
    pub fn new(memory: CqMemory, producer: u32, compression: Option<Compression>) -> Self {
        let log = memory.log();
        Self { memory, log, producer, pending: VecDeque::new(), compression, title: None, minis: 0 }
    }

    /// Returns the index of the next slot to write.
    pub fn producer(&self) -> u32 {
        self.producer
    }

    /// Returns how many completions have been compressed.
    pub fn minis(&self) -> u64 {
        self.minis
    }

    /// Returns how many completions aren't in the queue yet.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Adds a completion, which [`Self::flush`] writes. It then also sets the signature and the owner bits of `op_own`.
    pub fn push(&mut self, cqe: Cqe) {
        self.pending.push_back(cqe);
    }

    /// Writes pending completions as long as there are free slots.
    ///
    /// # Errors
    /// There aren't enough free slots for all completions.
    pub fn flush(&mut self) -> Result<(), Overrun> {
        while !self.pending.is_empty() {
            let free = self.free();
            if free == 0 {
                return Err(Overrun { pending: self.pending.len(), free });
            }
            let minis = self.block_size(free);
            match &self.compression {
                Some(Compression { layout: CompressedLayout::Basic, .. }) if minis >= 2 => self.write_basic(minis),
                Some(Compression { layout: CompressedLayout::Enhanced, .. }) if minis >= 1 => self.write_block(minis),
                _ => self.write_regular(),
            }
        }
        Ok(())
    }

    /// Returns the number of slots that may be written, according to the consumer index in the doorbell record.
    fn free(&self) -> u32 {
        let outstanding = self.producer.wrapping_sub(self.memory.consumer()) & MAX_24_BITS;
        (1_u32 << self.log).saturating_sub(outstanding)
    }

    /// Returns how many completions the next block takes; 0 if the next completion is a regular one.
    fn block_size(&mut self, free: u32) -> usize {
        let size = 1_u32 << self.log;
        let lap = self.producer >> self.log;
        let Some(compression) = &mut self.compression else { return 0 };
        // A block in the basic layout has its own title, which is the first of its completions.
        let (title, first, largest) = match (compression.layout, &self.title, self.pending.front()) {
            (CompressedLayout::Basic, _, Some(title)) => (title, 0, MAX_BASIC),
            (CompressedLayout::Enhanced, Some((title, under, title_lap)), _)
                if compression.across_laps || *title_lap == lap as u16 =>
            {
                (title, *under + 1, MAX_MINIS)
            }
            _ => return 0,
        };
        let mut most = (free as usize).min(largest);
        if !compression.across_laps {
            most = most.min((size - (self.producer & (size - 1))) as usize);
        }
        let alike = self.pending.iter().take(most).enumerate();
        let run = alike.take_while(|(at, cqe)| compresses(title, first + *at as u32, cqe)).count();
        compression.blocks.take(run)
    }

    fn write_regular(&mut self) {
        let Some(mut cqe) = self.pending.pop_front() else { return };
        let lap = self.producer >> self.log;
        let error = matches!(cqe.op_own.opcode(), CqeOpcode::ReqErr | CqeOpcode::RespErr);
        self.title = (!error).then_some((cqe, 0, lap as u16));
        cqe.op_own = OpOwn(cqe.op_own.0 & !1 | (lap & 1) as u8);
        // In the basic layout, byte 62 is a checksum.
        if matches!(&self.compression, Some(Compression { layout: CompressedLayout::Enhanced, .. })) {
            cqe.signature = lap as u8;
        }
        self.memory.write(self.producer, &cqe);
        self.producer = self.producer.wrapping_add(1);
    }

    /// Writes only a block's first slot; the other slots keep their bytes.
    fn write_block(&mut self, minis: usize) {
        let lap = self.producer >> self.log;
        let mut block = self.take_minis(minis);
        (block.signature, block.op_own) = (lap as u8, OpOwn::compressed(minis as u8));
        if let Some((_, under, _)) = &mut self.title {
            *under += minis as u32;
        }
        self.memory.write(self.producer, &block);
        self.producer = self.producer.wrapping_add(minis as u32);
        self.minis += minis as u64;
    }
}

impl CqWriter {
    /// Writes a block's arrays of mini completions and then its title, which makes them valid. The other slots keep
    /// their bytes.
    fn write_basic(&mut self, minis: usize) {
        let Some(mut title) = self.pending.front().copied() else { return };
        let owner = self.producer >> self.log & 1 != 0;
        title.op_own = OpOwn::title(title.op_own.opcode(), owner);
        title.byte_cnt = (minis as u32).into();
        for first in (0..minis).step_by(MINI_ARRAY) {
            let array = self.take_minis((minis - first).min(MINI_ARRAY));
            self.memory.write(self.producer.wrapping_add((first as u32).max(1)), &array);
        }
        self.memory.write(self.producer, &title);
        self.producer = self.producer.wrapping_add(minis as u32);
        self.minis += minis as u64;
    }

    /// Takes pending completions and returns a slot with their mini completions.
    fn take_minis(&mut self, count: usize) -> Cqe {
        let mut slot = Cqe::INITIAL;
        let places = slot.as_mut_bytes().chunks_exact_mut(size_of::<MiniCqe>());
        for (cqe, place) in self.pending.drain(..count).zip(places) {
            let mini = MiniCqe {
                wqe_counter: cqe.wqe_counter,
                s_wqe_opcode: (cqe.sop_drop_qpn.get() >> 24) as u8,
                reserved: 0,
                byte_cnt: cqe.byte_cnt,
            };
            place.copy_from_slice(mini.as_bytes());
        }
        slot
    }
}

/// Whether `cqe` can be the `number`th mini completion after a title, which means that it only differs in a mini
/// completion's fields.
fn compresses(title: &Cqe, number: u32, cqe: &Cqe) -> bool {
    let bad = [CqeOpcode::ReqErr, CqeOpcode::RespErr, CqeOpcode::Invalid];
    if bad.contains(&cqe.op_own.opcode()) || cqe.op_own.format() != CqeFormat::Plain {
        return false;
    }
    let mut like = *title;
    like.byte_cnt = cqe.byte_cnt;
    if title.op_own.opcode() == CqeOpcode::Req {
        like.wqe_counter = cqe.wqe_counter;
        let request = cqe.sop_drop_qpn.get() & !MAX_24_BITS;
        like.sop_drop_qpn = U32::new(title.sop_drop_qpn.get() & MAX_24_BITS | request);
    } else {
        like.wqe_counter = title.wqe_counter.get().wrapping_add(number as u16).into();
    }
    like.signature = cqe.signature;
    like == *cqe
}
