//! The completion queue: polling with and without compression, errors, arming.
//!
//! Without compression, a slot holds a new completion when its owner bit equals the parity of the lap. There are two
//! layouts with compression ([`Layout`]). In the enhanced one, a slot is new when byte 62 equals the low byte of the
//! lap; the owner bit has no meaning. A block of mini completions stands for up to seven completions; the card writes
//! only the first of their slots. The *title*, the regular completion before the block, holds the fields they share.
//!
//! In the basic layout, a block begins with its own title, which is new by its owner bit and has the number of
//! completions in `byte_cnt`. Arrays of eight mini completions follow: the first in the slot after the title, the
//! others in the 9th, 17th, ... slot of the block. The card writes no other slot of the block, and an array's last
//! bytes are those of a mini completion, so the queue marks an array's slots when it copies the array.
//!
//! The card may overwrite a slot once it is released ([`CompletionQueue::release`]). So the queue copies the title when
//! its slot is released or a block starts, whichever comes first, and the mini completions when their block starts. The
//! slots that a block covers get the lap mark of *their own* lap. Without a mark they would seem new when the 8-bit
//! count wraps; with the title's mark they would stall a block that crosses the end of the queue.
//!
//! The bytes of the enhanced layout are checked by `tests/vectors/mlx5_cqe_zip.json`. Those of the basic one follow the
//! decoders in the kernel's Ethernet driver and in DPDK, and what a ConnectX-7 wrote in public reports
//! (emulators/soft-mlx5/README.md).

#[allow(unsafe_code)]
mod slots;

pub use slots::{Completion, Slots};

use crate::handle::Handle;
use crate::mmio::{ArmRegister, DoorbellRecord};
use crate::wire::{Cqe, CqeFormat, CqeOpcode, ErrCqe, MAX_24_BITS, MAX_MINIS, MINI_ARRAY, MiniCqe, OpOwn, Syndrome};
use slots::{Slot, TitleCopy};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// The queue of a work request that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The send queue.
    Requester,
    /// The receive queue.
    Responder,
}

/// A completion in error. After it, the queue pair is in the error state: the card flushes all its later work requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("work request {wqe_counter:#06x} of queue pair {qpn:#08x} failed: {syndrome} (vendor code {vendor:#04x})")]
pub struct CompletionError {
    /// The queue of the work request.
    pub side: Side,
    /// The reason.
    pub syndrome: Syndrome,
    /// The vendor's error code.
    pub vendor: u8,
    /// Queue pair number.
    pub qpn: u32,
    /// Index of the work request.
    pub wqe_counter: u16,
    /// Operation code of the work request.
    pub request_opcode: u8,
    /// Shared receive queue number.
    pub srqn: u32,
    /// The bytes of the completion.
    pub cqe: Cqe,
}

/// The layout of a queue's slots (`cqe_compression_layout` of its context).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Without compression.
    Plain,
    /// Compressed, with a title in each block: what rdma-core creates (`mlx5dv_create_cq`).
    Basic,
    /// Compressed, with a lap mark in each slot: what firmware commands (DEVX) create.
    Enhanced,
}

/// The card wrote an impossible completion. The queue can't be read any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CorruptQueue {
    /// A block claims more mini completions than fit, or, in the basic layout, fewer than two.
    #[error("the block at index {index} claims {minis} mini completions; close the queue")]
    Block {
        /// Index of the block.
        index: u32,
        /// The number of mini completions that the block claims.
        minis: u32,
    },
    /// No title precedes the block.
    #[error("the block at index {index} has no title before it; close the queue")]
    NoTitle {
        /// Index of the block.
        index: u32,
    },
    /// The title of a block in the basic layout is not a successful completion.
    #[error("the block at index {index} has a title that isn't a successful completion; close the queue")]
    BadTitle {
        /// Index of the block.
        index: u32,
    },
    /// The card wrote a block into a queue without compression.
    #[error(
        "the completion at index {index} is a compressed block, but the queue was created without compression; close the \
         queue, and create the device's queue and this one with the same setting"
    )]
    NotCompressed {
        /// Index of the block.
        index: u32,
    },
}

/// The result of a poll.
#[derive(Debug)]
pub enum Polled<'q> {
    /// No new completion.
    Empty,
    /// A work request completed.
    Done(Completion<'q>),
    /// A work request failed.
    Failed(CompletionError),
}

/// The parts of a completion queue, provided by the device.
#[derive(Debug)]
pub struct CqParts {
    /// The slots, initialised.
    pub slots: Slots,
    /// First word of the doorbell record: the consumer index.
    pub record: DoorbellRecord,
    /// Second word of the doorbell record: armed state.
    pub arm_record: DoorbellRecord,
    /// The register that arms the queue.
    pub arm: ArmRegister,
    /// Number of the queue.
    pub cqn: u32,
    /// The layout with which the device created the queue.
    pub layout: Layout,
    /// Index of the first completion: 0 on a new queue.
    pub start_index: u32,
    /// Keeps the queue's memory alive.
    pub keep_alive: Handle,
}

/// A completion queue.
#[derive(Debug)]
pub struct CompletionQueue {
    slots: Slots,
    consumer: u32,
    /// Completions in `minis` that the caller hasn't received yet.
    left: u32,
    title: Title,
    layout: Layout,
    /// Whether slots are new by their lap mark. Also set, together with `left`, while a block of the basic layout is
    /// open and in a corrupt queue: both disable the fast path of [`Self::poll`].
    by_lap: bool,
    corrupt: Option<CorruptQueue>,
    title_copy: TitleCopy,
    /// The open block's mini completions; in the basic layout, those of its current array.
    minis: [MiniCqe; MINI_ARRAY],
    /// The number of completions in `minis`.
    block: u32,
    /// Completions of the open block of the basic layout that come after those in `minis`.
    rest: u32,
    record: DoorbellRecord,
    arm_record: DoorbellRecord,
    arm: ArmRegister,
    cqn: u32,
    arm_number: u32,
    _keep_alive: Handle,
}

/// Where the title is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Title {
    None,
    /// In the slot of this index, which hasn't been released.
    Slot(u32),
    /// In `title_copy`.
    Copied,
}

/// The completions that raise an event on an armed queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arm {
    /// The next completion.
    Any,
    /// The next completion that is solicited or in error.
    Solicited,
}

const ARM_SOLICITED: u32 = 1 << 24;
const ARM_NUMBER_SHIFT: u32 = 28;

/// A completion found while walking the slots.
enum Next {
    Completed(Slot),
    Error(Slot),
}

impl CompletionQueue {
    /// Creates a queue from `parts`.
    pub fn new(parts: CqParts) -> Self {
        Self {
            slots: parts.slots,
            consumer: parts.start_index,
            left: 0,
            title: Title::None,
            layout: parts.layout,
            by_lap: parts.layout == Layout::Enhanced,
            corrupt: None,
            title_copy: TitleCopy::new(),
            minis: [MiniCqe::new_zeroed(); MINI_ARRAY],
            block: 0,
            rest: 0,
            record: parts.record,
            arm_record: parts.arm_record,
            arm: parts.arm,
            cqn: parts.cqn,
            arm_number: 0,
            _keep_alive: parts.keep_alive,
        }
    }

    /// Returns the number of the queue.
    pub fn cqn(&self) -> u32 {
        self.cqn
    }

    /// Returns the number of slots.
    pub fn capacity(&self) -> u32 {
        self.slots.len()
    }

    /// Returns the index of the next completion, modulo 2^32.
    pub fn consumer(&self) -> u32 {
        self.consumer
    }

    /// Returns a copy of an index's slot, whatever it holds: for tools that show what a card writes.
    pub fn peek(&self, index: u32) -> Cqe {
        self.slots.slot(index).copy()
    }

    /// Takes one completion. The card cannot reuse its slot before [`Self::release`]; the queue overruns if that is
    /// never called.
    #[inline(always)]
    pub fn poll(&mut self) -> Result<Polled<'_>, CorruptQueue> {
        let at = self.slots.slot(self.consumer);
        let lap = self.slots.lap(self.consumer) as u8;
        if self.by_lap {
            if self.left == 0 && matches!(compressed_state(at, lap), SlotState::Regular) {
                self.title = Title::Slot(self.consumer);
                self.consumer = self.consumer.wrapping_add(1);
                return Ok(Polled::Done(Completion::new(at)));
            }
        } else if matches!(plain_state(at, lap & 1), SlotState::Regular) {
            self.consumer = self.consumer.wrapping_add(1);
            return Ok(Polled::Done(Completion::new(at)));
        }
        self.poll_other()
    }

    /// The rest of [`Self::poll`]: everything but a regular completion.
    #[inline(never)]
    fn poll_other(&mut self) -> Result<Polled<'_>, CorruptQueue> {
        let mut next = None;
        self.take(1, |found| next = Some(found));
        match next {
            Some(Next::Completed(at)) => Ok(Polled::Done(Completion::new(at))),
            Some(Next::Error(at)) => Ok(Polled::Failed(completion_error(at))),
            None => self.corrupt.map_or(Ok(Polled::Empty), Err),
        }
    }

    /// Passes up to `max` completions to `each`, releases their slots, and returns how many there were.
    #[inline(always)]
    pub fn drain(
        &mut self,
        max: u32,
        mut each: impl FnMut(Result<Completion<'_>, CompletionError>),
    ) -> Result<u32, CorruptQueue> {
        let taken = self.take(max, |next| match next {
            Next::Completed(at) => each(Ok(Completion::new(at))),
            Next::Error(at) => each(Err(completion_error(at))),
        });
        if taken != 0 {
            self.release();
            return Ok(taken);
        }
        self.corrupt.map_or(Ok(0), Err)
    }

    /// Returns all polled slots to the card.
    #[inline(always)]
    pub fn release(&mut self) {
        if let Title::Slot(index) = self.title {
            self.title_copy.set(self.slots.slot(index));
            self.title = Title::Copied;
        }
        self.record.set(self.consumer & MAX_24_BITS);
    }

    /// Requests an event. Poll once more afterwards: a completion that came earlier raises no event.
    pub fn arm(&mut self, arm: Arm) {
        let condition = match arm {
            Arm::Any => 0,
            Arm::Solicited => ARM_SOLICITED,
        };
        let command = (self.arm_number & 3) << ARM_NUMBER_SHIFT | condition | self.consumer & MAX_24_BITS;
        self.arm_record.set(command);
        self.arm.set((command as u64) << 32 | self.cqn as u64);
    }

    /// Call this when an event of this queue was received: the next [`Self::arm`] uses a new sequence number.
    pub fn event_seen(&mut self) {
        self.arm_number = self.arm_number.wrapping_add(1);
    }

    #[inline(always)]
    fn take(&mut self, max: u32, each: impl FnMut(Next)) -> u32 {
        if self.corrupt.is_some() {
            0
        } else if self.layout == Layout::Enhanced {
            self.take_enhanced(max, each)
        } else {
            self.take_by_owner(max, each)
        }
    }

    /// Returns the number of slots from the consumer index to the end of its lap, at most `most`.
    #[inline(always)]
    fn in_this_lap(&self, most: u32) -> u32 {
        self.slots.rest_of_lap(self.consumer).min(most)
    }

    /// Walks lap by lap, because the expected owner bit is constant within one lap.
    #[inline(always)]
    fn take_by_owner(&mut self, max: u32, mut each: impl FnMut(Next)) -> u32 {
        let mut left = max;
        while left != 0 {
            if self.left != 0 {
                left -= self.take_block(left, &mut each);
                continue;
            }
            let owner = self.slots.lap(self.consumer) as u8 & 1;
            let available = self.in_this_lap(left);
            let first = self.slots.slot(self.consumer);
            let end = first.after(available);
            let mut at = first;
            while at != end {
                match plain_state(at, owner) {
                    SlotState::Regular => each(Next::Completed(at)),
                    SlotState::Error => each(Next::Error(at)),
                    SlotState::Empty | SlotState::Block => break,
                }
                at = at.after(1);
            }
            let taken = at.since(first);
            self.consumer = self.consumer.wrapping_add(taken);
            left -= taken;
            if taken != available && !(matches!(plain_state(at, owner), SlotState::Block) && self.open_basic(at)) {
                break;
            }
        }
        max - left
    }

    /// Opens a block of the basic layout, whose title is in this slot.
    #[inline(never)]
    fn open_basic(&mut self, at: Slot) -> bool {
        let index = self.consumer;
        if self.layout == Layout::Plain {
            self.end(CorruptQueue::NotCompressed { index });
            return false;
        }
        let title = at.copy();
        let (minis, opcode) = (title.byte_cnt.get(), title.op_own.opcode());
        if minis < 2 || minis > self.slots.len() {
            self.end(CorruptQueue::Block { index, minis });
            return false;
        }
        if matches!(opcode, CqeOpcode::ReqErr | CqeOpcode::RespErr | CqeOpcode::Invalid) {
            self.end(CorruptQueue::BadTitle { index });
            return false;
        }
        self.title_copy.set(at);
        let mut fields = self.title_copy.fields();
        fields.set_op_own(OpOwn::regular(opcode, title.op_own.owner()));
        // The first mini completion is the title's own, and `take_block` counts before each.
        fields.set_wqe_counter(title.wqe_counter.get().wrapping_sub(1).into());
        (self.by_lap, self.rest) = (true, minis);
        self.open_array(index.wrapping_add(1));
        true
    }

    /// Copies the array of mini completions in an index's slot, and marks the slots of its completions. The array is in
    /// one of those, so the card doesn't overwrite it first.
    fn open_array(&mut self, array: u32) {
        let minis = self.rest.min(MINI_ARRAY as u32);
        self.minis = self.slots.slot(array).minis();
        (self.left, self.block) = (minis, minis);
        self.rest -= minis;
        self.slots.mark_empty(self.consumer, minis);
    }

    /// Called after an array's last completion: opens the block's next array, or ends the block.
    #[inline(never)]
    fn end_array(&mut self) {
        if self.rest == 0 {
            self.by_lap = false;
        } else {
            self.open_array(self.consumer);
        }
    }

    #[inline(always)]
    fn take_enhanced(&mut self, max: u32, mut each: impl FnMut(Next)) -> u32 {
        let mut left = max;
        while left != 0 {
            if self.left != 0 {
                left -= self.take_block(left, &mut each);
                continue;
            }
            let lap = self.slots.lap(self.consumer) as u8;
            let first = self.slots.slot(self.consumer);
            let end = first.after(self.in_this_lap(left));
            let mut at = first;
            let mut state = SlotState::Regular;
            while at != end {
                state = compressed_state(at, lap);
                if !matches!(state, SlotState::Regular) {
                    break;
                }
                each(Next::Completed(at));
                at = at.after(1);
            }
            let taken = at.since(first);
            if taken != 0 {
                self.consumer = self.consumer.wrapping_add(taken);
                self.title = Title::Slot(self.consumer.wrapping_sub(1));
                left -= taken;
            }
            match state {
                SlotState::Regular => {}
                SlotState::Empty => break,
                SlotState::Block => {
                    if !self.open_block(at) {
                        break;
                    }
                }
                SlotState::Error => {
                    self.title = Title::None;
                    each(Next::Error(at));
                    self.consumer = self.consumer.wrapping_add(1);
                    left -= 1;
                }
            }
        }
        max - left
    }

    /// Copies the title and the mini completions, and marks the slots that the block covers.
    #[inline(always)]
    fn open_block(&mut self, at: Slot) -> bool {
        let minis = OpOwn(at.op_own()).minis() as u32;
        if minis > MAX_MINIS as u32 || minis > self.slots.len() || self.title == Title::None {
            self.refuse_block(minis);
            return false;
        }
        if let Title::Slot(index) = self.title {
            self.title_copy.set(self.slots.slot(index));
            self.title = Title::Copied;
        }
        self.minis = at.minis();
        self.left = minis;
        self.block = minis;
        self.slots.mark_covered(self.consumer.wrapping_add(1), minis - 1);
        true
    }

    #[cold]
    fn refuse_block(&mut self, minis: u32) {
        let index = self.consumer;
        let corrupt = if self.title == Title::None {
            CorruptQueue::NoTitle { index }
        } else {
            CorruptQueue::Block { index, minis }
        };
        self.end(corrupt);
    }

    /// Ends the queue: no poll reads the slots from now on.
    #[cold]
    fn end(&mut self, corrupt: CorruptQueue) {
        self.corrupt = Some(corrupt);
        (self.by_lap, self.left) = (true, 1);
    }

    /// Passes completions of the open block to `each`, at most `most`, and returns their number.
    #[inline(always)]
    fn take_block(&mut self, most: u32, each: &mut impl FnMut(Next)) -> u32 {
        let mut title_copy = self.title_copy.fields();
        let requester = OpOwn(title_copy.slot().op_own()).opcode() == CqeOpcode::Req;
        let mut counter = Completion::new(title_copy.slot()).wqe_counter();
        let first = (self.block - self.left) as usize;
        let count = self.left.min(most);
        // `open_block` and `open_array` checked that there are no more.
        let minis = self.minis.get(first..first + count as usize).unwrap_or_default();
        if requester {
            for mini in minis {
                title_copy.set_byte_cnt(mini.byte_cnt);
                title_copy.set_wqe_counter(mini.wqe_counter);
                title_copy.set_request_opcode(mini.s_wqe_opcode);
                each(Next::Completed(title_copy.slot()));
            }
        } else {
            for mini in minis {
                counter = counter.wrapping_add(1);
                title_copy.set_byte_cnt(mini.byte_cnt);
                title_copy.set_wqe_counter(counter.into());
                each(Next::Completed(title_copy.slot()));
            }
        }
        self.left -= count;
        self.consumer = self.consumer.wrapping_add(count);
        if self.left == 0 && self.layout == Layout::Basic {
            self.end_array();
        }
        count
    }
}

/// The content of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum SlotState {
    Regular,
    Empty,
    Block,
    Error,
}

/// Returns what a valid slot holds, by its `op_own` byte. One lookup replaces three comparisons.
const fn state_table(compressed: bool) -> [SlotState; 256] {
    let mut state_table = [SlotState::Regular; 256];
    let mut op_own = 0;
    while op_own < state_table.len() {
        state_table[op_own] = match OpOwn(op_own as u8).opcode() {
            // Without compression the index is `op_own` xor the expected owner bit: a set bit means that the slot is
            // not new.
            _ if !compressed && op_own & 1 != 0 => SlotState::Empty,
            _ if matches!(OpOwn(op_own as u8).format(), CqeFormat::Compressed) => SlotState::Block,
            CqeOpcode::Invalid => SlotState::Empty,
            CqeOpcode::ReqErr | CqeOpcode::RespErr => SlotState::Error,
            _ => SlotState::Regular,
        };
        op_own += 1;
    }
    state_table
}

static PLAIN: [SlotState; 256] = state_table(false);
static COMPRESSED: [SlotState; 256] = state_table(true);

/// `owner` is the owner bit of a new slot.
#[inline(always)]
fn plain_state(at: Slot, owner: u8) -> SlotState {
    PLAIN[(at.op_own() ^ owner) as usize]
}

#[inline(always)]
fn compressed_state(at: Slot, lap: u8) -> SlotState {
    let tail = at.tail();
    if tail as u8 == lap { COMPRESSED[(tail >> 8) as usize] } else { SlotState::Empty }
}

#[cold]
fn completion_error(at: Slot) -> CompletionError {
    let cqe = at.copy();
    let error = ErrCqe::read_from_bytes(cqe.as_bytes()).unwrap_or_else(|_| unreachable!("both have 64 bytes"));
    let side = match cqe.op_own.opcode() {
        CqeOpcode::ReqErr => Side::Requester,
        _ => Side::Responder,
    };
    CompletionError {
        side,
        syndrome: error.syndrome(),
        vendor: error.vendor_err_synd,
        qpn: error.s_wqe_opcode_qpn.get() & MAX_24_BITS,
        wqe_counter: error.wqe_counter.get(),
        request_opcode: (error.s_wqe_opcode_qpn.get() >> 24) as u8,
        srqn: error.srqn.get(),
        cqe,
    }
}
