//! Completion queues on the card's side.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use crate::cq_writer::{Compression, CqWriter};
use mlx5::wire::{Cqe, CqeOpcode, ErrCqe, MAX_24_BITS, OpOwn, Syndrome};
use nix::sys::eventfd::{EfdFlags, EventFd};
use zerocopy::{FromBytes, IntoBytes};

use super::shared::Shared;

/// Offset of the ring, after a page with the doorbell record.
pub const RING: usize = 4096;
/// Offset of the consumer's 24-bit index.
pub const CONSUMER: usize = 0;
/// Offset of the consumer's arm word.
pub const ARM: usize = 4;
/// Offset of the register that arms the queue.
pub const ARM_REGISTER: usize = 64;
/// The arm word's bit that says that only solicited completions and errors raise an event.
const SOLICITED_ONLY: u32 = 1 << 24;

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completion {
    /// A request in the send queue completed.
    Sent { qpn: u32, index: u16, opcode: u8, bytes: u32 },
    /// A receive completed; `srqn` is 0 for a receive from the queue pair's own queue.
    Received { qpn: u32, srqn: u32, index: u16, how: CqeOpcode, imm: u32, bytes: u32, solicited: bool },
    /// A request failed.
    Failed { qpn: u32, srqn: u32, index: u16, opcode: u8, syndrome: Syndrome, receive: bool },
}

impl Completion {
    fn wakes_solicited(&self) -> bool {
        !matches!(self, Completion::Sent { .. } | Completion::Received { solicited: false, .. })
    }

    fn to_cqe(self) -> Cqe {
        let mut cqe = Cqe { signature: 0, op_own: OpOwn(0), ..Cqe::INITIAL };
        match self {
            Completion::Sent { qpn, index, opcode, bytes } => {
                cqe.sop_drop_qpn = (u32::from(opcode) << 24 | qpn).into();
                cqe.wqe_counter = index.into();
                cqe.byte_cnt = bytes.into();
                cqe.op_own = OpOwn::regular(CqeOpcode::Req, false);
            }
            Completion::Received { qpn, srqn, index, how, imm, bytes, .. } => {
                cqe.sop_drop_qpn = qpn.into();
                cqe.srqn_uidx = srqn.into();
                cqe.wqe_counter = index.into();
                cqe.imm_inval_pkey = imm.into();
                cqe.byte_cnt = bytes.into();
                cqe.op_own = OpOwn::regular(how, false);
            }
            Completion::Failed { qpn, srqn, index, opcode, syndrome, receive } => {
                let how = if receive { CqeOpcode::RespErr } else { CqeOpcode::ReqErr };
                // Both have the same size, so the conversion succeeds.
                if let Ok(error) = ErrCqe::mut_from_bytes(cqe.as_mut_bytes()) {
                    error.srqn = srqn.into();
                    error.syndrome = syndrome.code();
                    error.s_wqe_opcode_qpn = (u32::from(opcode) << 24 | qpn).into();
                    error.wqe_counter = index.into();
                    error.op_own = OpOwn::regular(how, false);
                }
            }
        }
        cqe
    }
}

#[derive(Debug)]
pub(super) struct CompletionQueue {
    pub memory: Arc<Shared>,
    writer: CqWriter,
    event: EventFd,
    /// The consumer has armed the queue, and no event has been raised since.
    armed: bool,
    pub overrun: bool,
}

impl CompletionQueue {
    pub(super) fn new(log_size: u32, compression: Option<Compression>) -> io::Result<Self> {
        let memory = Arc::new(Shared::new(RING + (size_of::<Cqe>() << log_size))?);
        let writer = CqWriter::new(memory.completions(RING, log_size, CONSUMER), 0, compression);
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { memory, writer, event, armed: false, overrun: false })
    }

    /// Returns the descriptor that becomes readable after an event.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Queues a completion. [`CompletionQueue::flush`] writes it into the ring.
    pub(super) fn push_completion(&mut self, completion: Completion) {
        self.writer.push(completion.to_cqe());
        if self.armed && (completion.wakes_solicited() || self.memory.record(ARM) & SOLICITED_ONLY == 0) {
            self.wake();
        }
    }

    /// Writes pending completions and checks whether the consumer has armed. Returns true if any were written. Overruns
    /// are permanent.
    pub(super) fn flush(&mut self) -> bool {
        let before = self.writer.producer();
        self.overrun |= self.writer.flush().is_err();
        if self.memory.take_register(ARM_REGISTER) != 0 {
            self.armed = true;
            let command = self.memory.record(ARM);
            // A completion that came between the consumer's last poll and the arming must raise an event.
            if command & MAX_24_BITS != self.writer.producer() & MAX_24_BITS && command & SOLICITED_ONLY == 0 {
                self.wake();
            }
        }
        self.writer.producer() != before
    }

    fn wake(&mut self) {
        self.armed = false;
        // This only fails if the counter is full, and then the descriptor is already readable.
        let _ = self.event.write(1);
    }
}
