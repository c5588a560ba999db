//! The completion queue: polling with and without compression, errors, arming.
//!
//! Without compression a slot is ours when its owner bit is the parity of the lap. With compression (the layout that
//! `mlx5dv` calls enhanced) it is ours when byte 62 is the low byte of the lap, whatever the completion is; the owner
//! bit is not looked at. A compressed completion stands for up to seven; the card writes only the first of their slots.
//! What they share is in the *title*, the regular completion before them.
//!
//! The card may write over a slot once it is released ([`CompletionQueue::release`]). The title is therefore copied when its
//! slot is released or when a block opens, whichever is first, and the minis when their block opens. The slots that a
//! block covers get the mark of *their own* lap: one left alone would look new when the 8-bit mark comes round, and one
//! with the title's mark would stall a block across the end of the queue.
//!
//! Byte truth is `tests/vectors/mlx5_cqe_zip.json`.

#[allow(unsafe_code)]
mod slots;

pub use slots::{Entry, Slots};

use crate::handle::Handle;
use crate::mmio::{ArmRegister, Record};
use crate::wire::{Cqe, CqeFormat, CqeOpcode, ErrCqe, MAX_24_BITS, MAX_MINIS, MiniCqe, OpOwn, Syndrome};
use slots::{Shown, Slot};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Whose request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// One of the send queue.
    Requester,
    /// One of the receive queue.
    Responder,
}

/// A completion in error. The queue pair is in error from here on: all that follows on it is flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("request {wqe_counter:#06x} of queue pair {qpn:#08x} failed: {syndrome} (vendor code {vendor:#04x})")]
pub struct Failure {
    /// Whose request.
    pub side: Side,
    /// Why.
    pub syndrome: Syndrome,
    /// The vendor's own code.
    pub vendor: u8,
    /// Queue pair number.
    pub qpn: u32,
    /// Index of the request.
    pub wqe_counter: u16,
    /// Operation code of the request.
    pub request_opcode: u8,
    /// Shared receive queue number.
    pub srqn: u32,
    /// All bytes.
    pub cqe: Cqe,
}

/// The card wrote what it never writes. Nothing more can be read from the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Corrupt {
    /// A block of more completions than fit.
    #[error("a compressed completion at index {index} claims {minis} completions; close the queue")]
    Block {
        /// Index of the block.
        index: u32,
        /// Completions that it claims.
        minis: u32,
    },
    /// A block with no title before it.
    #[error("a compressed completion at index {index} has no title before it; close the queue")]
    NoTitle {
        /// Index of the block.
        index: u32,
    },
}

/// What a poll found.
#[derive(Debug)]
pub enum Polled<'q> {
    /// Nothing new.
    Empty,
    /// A request is done.
    Done(Entry<'q>),
    /// A request failed.
    Failed(Failure),
}

/// What a completion queue is made of; the device fills it in.
#[derive(Debug)]
pub struct CqParts {
    /// The slots, initialised.
    pub slots: Slots,
    /// First word of the doorbell record: the consumer index.
    pub record: Record,
    /// Second word of the doorbell record: armed state.
    pub arm_record: Record,
    /// The register that arms.
    pub arm: ArmRegister,
    /// Number of the queue.
    pub cqn: u32,
    /// The queue was created with compression, because the device says that it can.
    pub compression: bool,
    /// Index of the first completion: 0 on a new queue.
    pub start_index: u32,
    /// Keeps the memory of the queue alive.
    pub keep: Handle,
}

/// A completion queue.
#[derive(Debug)]
pub struct CompletionQueue {
    slots: Slots,
    consumer: u32,
    /// Completions of the open block that were not yet handed out. Not 0 either once the queue is corrupt: no short cut is
    /// taken then.
    left: u32,
    title: Title,
    compression: bool,
    corrupt: Option<Corrupt>,
    shown: Shown,
    minis: [MiniCqe; MAX_MINIS],
    block: u32,
    record: Record,
    arm_record: Record,
    arm: ArmRegister,
    cqn: u32,
    arm_number: u32,
    _keep: Handle,
}

/// Where the title is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Title {
    None,
    /// Still in the slot of this index, which is not released.
    Slot(u32),
    /// In `shown`.
    Shown,
}

/// For which events an armed queue waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arm {
    /// The next completion.
    Any,
    /// The next solicited or failed one.
    Solicited,
}

const ARM_SOLICITED: u32 = 1 << 24;
const ARM_NUMBER_SHIFT: u32 = 28;

/// One completion on its way to the caller.
enum Seen {
    Good(Slot),
    Bad(Slot),
}

impl CompletionQueue {
    /// A queue of those parts.
    pub fn new(parts: CqParts) -> Self {
        Self {
            slots: parts.slots,
            consumer: parts.start_index,
            left: 0,
            title: Title::None,
            compression: parts.compression,
            corrupt: None,
            shown: Shown::new(),
            minis: [MiniCqe::new_zeroed(); MAX_MINIS],
            block: 0,
            record: parts.record,
            arm_record: parts.arm_record,
            arm: parts.arm,
            cqn: parts.cqn,
            arm_number: 0,
            _keep: parts.keep,
        }
    }

    /// Number of the queue.
    pub fn cqn(&self) -> u32 {
        self.cqn
    }

    /// Slots.
    pub fn capacity(&self) -> u32 {
        self.slots.len()
    }

    /// Index of the next completion, modulo 2^32.
    pub fn consumer(&self) -> u32 {
        self.consumer
    }

    /// Takes one completion. Its slot stays ours until [`Self::release`]; the queue overflows if that is never called.
    #[inline(always)]
    pub fn poll(&mut self) -> Result<Polled<'_>, Corrupt> {
        let at = self.slots.slot(self.consumer);
        let lap = self.slots.lap(self.consumer) as u8;
        if self.compression {
            if self.left == 0 && matches!(look_compressed(at, lap), Look::Regular) {
                self.title = Title::Slot(self.consumer);
                self.consumer = self.consumer.wrapping_add(1);
                return Ok(Polled::Done(Entry::new(at)));
            }
        } else if matches!(look_plain(at, lap & 1), Look::Regular) {
            self.consumer = self.consumer.wrapping_add(1);
            return Ok(Polled::Done(Entry::new(at)));
        }
        self.poll_other()
    }

    /// The same for everything but a regular completion.
    #[inline(never)]
    fn poll_other(&mut self) -> Result<Polled<'_>, Corrupt> {
        let mut seen = None;
        self.run(1, |one| seen = Some(one));
        match seen {
            Some(Seen::Good(at)) => Ok(Polled::Done(Entry::new(at))),
            Some(Seen::Bad(at)) => Ok(Polled::Failed(failure(at))),
            None => self.corrupt.map_or(Ok(Polled::Empty), Err),
        }
    }

    /// Hands up to `max` completions to `each`, releases their slots, and gives their number.
    #[inline(always)]
    pub fn drain(&mut self, max: u32, mut each: impl FnMut(Result<Entry<'_>, Failure>)) -> Result<u32, Corrupt> {
        let taken = self.run(max, |one| match one {
            Seen::Good(at) => each(Ok(Entry::new(at))),
            Seen::Bad(at) => each(Err(failure(at))),
        });
        if taken != 0 {
            self.release();
            return Ok(taken);
        }
        self.corrupt.map_or(Ok(0), Err)
    }

    /// Gives all slots that were polled back to the card.
    #[inline(always)]
    pub fn release(&mut self) {
        if let Title::Slot(index) = self.title {
            self.shown.set(self.slots.slot(index));
            self.title = Title::Shown;
        }
        self.record.set(self.consumer & MAX_24_BITS);
    }

    /// Asks for an event. Poll once more after it: what came before it raises none.
    pub fn arm(&mut self, arm: Arm) {
        let what = match arm {
            Arm::Any => 0,
            Arm::Solicited => ARM_SOLICITED,
        };
        let command = (self.arm_number & 3) << ARM_NUMBER_SHIFT | what | self.consumer & MAX_24_BITS;
        self.arm_record.set(command);
        self.arm.set((command as u64) << 32 | self.cqn as u64);
    }

    /// An event of this queue was taken: the next arming has a new number.
    pub fn event_seen(&mut self) {
        self.arm_number = self.arm_number.wrapping_add(1);
    }

    #[inline(always)]
    fn run(&mut self, max: u32, each: impl FnMut(Seen)) -> u32 {
        if !self.compression {
            self.run_plain(max, each)
        } else if self.corrupt.is_none() {
            self.run_compressed(max, each)
        } else {
            0
        }
    }

    /// Slots from the consumer index on that are in its lap, at most `most`.
    #[inline(always)]
    fn in_this_lap(&self, most: u32) -> u32 {
        self.slots.rest_of_lap(self.consumer).min(most)
    }

    /// Walks lap by lap: inside one the expected owner bit does not change.
    #[inline(always)]
    fn run_plain(&mut self, max: u32, mut each: impl FnMut(Seen)) -> u32 {
        let mut left = max;
        while left != 0 {
            let owner = self.slots.lap(self.consumer) as u8 & 1;
            let stretch = self.in_this_lap(left);
            let first = self.slots.slot(self.consumer);
            let end = first.after(stretch);
            let mut at = first;
            while at != end {
                match look_plain(at, owner) {
                    Look::Regular => each(Seen::Good(at)),
                    Look::Bad => each(Seen::Bad(at)),
                    Look::Empty | Look::Block => break,
                }
                at = at.after(1);
            }
            let taken = at.since(first);
            self.consumer = self.consumer.wrapping_add(taken);
            left -= taken;
            if taken != stretch {
                break;
            }
        }
        max - left
    }

    #[inline(always)]
    fn run_compressed(&mut self, max: u32, mut each: impl FnMut(Seen)) -> u32 {
        let mut left = max;
        while left != 0 {
            if self.left != 0 {
                left -= self.run_block(left, &mut each);
                continue;
            }
            let lap = self.slots.lap(self.consumer) as u8;
            let first = self.slots.slot(self.consumer);
            let end = first.after(self.in_this_lap(left));
            let mut at = first;
            let mut look = Look::Regular;
            while at != end {
                look = look_compressed(at, lap);
                if !matches!(look, Look::Regular) {
                    break;
                }
                each(Seen::Good(at));
                at = at.after(1);
            }
            let taken = at.since(first);
            if taken != 0 {
                self.consumer = self.consumer.wrapping_add(taken);
                self.title = Title::Slot(self.consumer.wrapping_sub(1));
                left -= taken;
            }
            match look {
                Look::Regular => {}
                Look::Empty => break,
                Look::Block => {
                    if !self.open_block(at) {
                        break;
                    }
                }
                Look::Bad => {
                    self.title = Title::None;
                    each(Seen::Bad(at));
                    self.consumer = self.consumer.wrapping_add(1);
                    left -= 1;
                }
            }
        }
        max - left
    }

    /// Copies the title and the minis, and marks the slots that the block covers.
    #[inline(always)]
    fn open_block(&mut self, at: Slot) -> bool {
        let minis = OpOwn(at.op_own()).minis() as u32;
        if minis > MAX_MINIS as u32 || minis > self.slots.len() || self.title == Title::None {
            self.refuse_block(minis);
            return false;
        }
        if let Title::Slot(index) = self.title {
            self.shown.set(self.slots.slot(index));
            self.title = Title::Shown;
        }
        self.minis = at.minis();
        self.left = minis;
        self.block = minis;
        self.slots.stamp(self.consumer.wrapping_add(1), minis - 1);
        true
    }

    #[cold]
    fn refuse_block(&mut self, minis: u32) {
        let index = self.consumer;
        let corrupt =
            if self.title == Title::None { Corrupt::NoTitle { index } } else { Corrupt::Block { index, minis } };
        self.corrupt = Some(corrupt);
        self.left = 1;
    }

    /// Hands out completions of the open block, at most `most`, and gives their number.
    #[inline(always)]
    fn run_block(&mut self, most: u32, each: &mut impl FnMut(Seen)) -> u32 {
        let mut shown = self.shown.fields();
        let requester = OpOwn(shown.slot().op_own()).opcode() == CqeOpcode::Req;
        let mut counter = Entry::new(shown.slot()).wqe_counter();
        let first = (self.block - self.left) as usize;
        let count = self.left.min(most);
        // The block holds at most `MAX_MINIS`, checked when it was opened.
        let minis = self.minis.get(first..first + count as usize).unwrap_or_default();
        if requester {
            for mini in minis {
                shown.set_byte_cnt(mini.byte_cnt);
                shown.set_wqe_counter(mini.wqe_counter);
                shown.set_request_opcode(mini.s_wqe_opcode);
                each(Seen::Good(shown.slot()));
            }
        } else {
            for mini in minis {
                counter = counter.wrapping_add(1);
                shown.set_byte_cnt(mini.byte_cnt);
                shown.set_wqe_counter(counter.into());
                each(Seen::Good(shown.slot()));
            }
        }
        self.left -= count;
        self.consumer = self.consumer.wrapping_add(count);
        count
    }
}

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Look {
    Regular,
    Empty,
    Block,
    Bad,
}

/// By `op_own`, what a valid slot holds. One look-up takes the place of three comparisons.
const fn looks(compressed: bool) -> [Look; 256] {
    let mut looks = [Look::Regular; 256];
    let mut op_own = 0;
    while op_own < looks.len() {
        looks[op_own] = match OpOwn(op_own as u8).opcode() {
            // Without compression the table is asked with the owner bit turned: set means not ours.
            _ if !compressed && op_own & 1 != 0 => Look::Empty,
            _ if compressed && matches!(OpOwn(op_own as u8).format(), CqeFormat::Compressed) => Look::Block,
            CqeOpcode::Invalid => Look::Empty,
            CqeOpcode::ReqErr | CqeOpcode::RespErr => Look::Bad,
            _ => Look::Regular,
        };
        op_own += 1;
    }
    looks
}

static PLAIN: [Look; 256] = looks(false);
static COMPRESSED: [Look; 256] = looks(true);

/// `owner` is the owner bit that a slot of ours has.
#[inline(always)]
fn look_plain(at: Slot, owner: u8) -> Look {
    PLAIN[(at.op_own() ^ owner) as usize]
}

#[inline(always)]
fn look_compressed(at: Slot, lap: u8) -> Look {
    let tail = at.tail();
    if tail as u8 == lap { COMPRESSED[(tail >> 8) as usize] } else { Look::Empty }
}

#[cold]
fn failure(at: Slot) -> Failure {
    let cqe = at.copy();
    let error = ErrCqe::read_from_bytes(cqe.as_bytes()).unwrap_or_else(|_| unreachable!("both have 64 bytes"));
    let side = match cqe.op_own.opcode() {
        CqeOpcode::ReqErr => Side::Requester,
        _ => Side::Responder,
    };
    Failure {
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
