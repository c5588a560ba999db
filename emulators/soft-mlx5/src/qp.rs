//! Queue pairs: their rings, their outstanding requests, and requests from peers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use mlx5::wire::{BLOCK, CtrlSeg, MAX_DS, SEGMENT, Syndrome};
use mlx5::wqe::{ParseError, Sge, Transport, Umr, Wqe, parse};
use zerocopy::FromBytes;

use super::frame::Frame;
use super::receive::Receive;
use super::shared::Shared;

/// Offsets in the doorbell record: the receive queue's producer index, then the send queue's.
pub(super) const RECEIVE_RECORD: usize = 0;
pub(super) const SEND_RECORD: usize = 4;
/// Offset of the doorbell register, which has two halves.
pub(super) const REGISTER: usize = 1024;
/// The size of each half in bytes.
pub(super) const REGISTER_HALF: usize = 256;
/// Offset of the send ring. The receive ring follows it.
pub(super) const SEND_RING: usize = 4096;

/// A connected queue pair's peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer {
    /// The connection for requests.
    pub connection: u32,
    pub qpn: u32,
}

/// The state of a request that has been taken from the ring.
#[derive(Debug)]
pub(super) enum Progress {
    /// The peer hasn't answered yet.
    Waiting,
    /// A key change that hasn't taken effect yet.
    Pending {
        umr: Box<Umr>,
        due: Instant,
    },
    Done {
        bytes: u32,
    },
    Failed(Syndrome),
}

/// An outstanding request. Requests complete in order.
#[derive(Debug)]
pub(super) struct Issued {
    pub index: u16,
    pub opcode: u8,
    pub signaled: bool,
    pub token: u64,
    /// The request is a read or atomic, which a full fence waits for.
    pub fetches: bool,
    pub progress: Progress,
    /// The buffers for the answer's bytes.
    pub into: Vec<Sge>,
}

/// A message or write that has partly arrived.
#[derive(Debug)]
pub(super) struct Incoming {
    /// A message's receive.
    pub receive: Option<Receive>,
    /// A write's memory.
    pub target: Option<super::mkey::Target>,
}

/// The card's view of a send ring.
#[derive(Debug)]
pub(super) struct SendRing {
    pub log_blocks: u32,
    /// Index of the next block.
    pub next: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Not connected: receives are accepted, and requests wait.
    New,
    Working,
    /// All requests are flushed.
    Error,
}

#[derive(Debug)]
pub(super) struct QueuePair {
    pub pd: u32,
    pub transport: Transport,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub memory: Arc<Shared>,
    pub send: SendRing,
    /// The number of the receive queue: the queue pair's own or a shared one.
    pub receives: u32,
    pub state: State,
    pub peer: Option<Peer>,
    /// A datagram queue pair's queue key.
    pub qkey: u32,
    /// The RNR timeout for this side's messages, in milliseconds.
    pub rnr_timeout_ms: u64,
    /// The driver has rung the doorbell.
    pub rung: bool,
    pub issued: VecDeque<Issued>,
    pub token: u64,
    /// Frames that have arrived but haven't been handled, with the connection for the answer.
    pub inbox: VecDeque<(u32, Frame)>,
    pub incoming: Option<Incoming>,
    /// How many bytes of the read at the head of the inbox have been answered.
    pub answered: u32,
    /// When the head of the inbox started to wait for a receive.
    pub unready: Option<Instant>,
    /// The request at the head of the ring waits for a fence or for room on the connection.
    pub blocked: bool,
}

/// The next request in a send ring.
#[derive(Debug)]
pub(super) enum Fetched {
    Nothing,
    Request(Box<Wqe>),
    /// A malformed request, and the violated rule.
    Bad {
        index: u16,
        opcode: u8,
        why: String,
    },
}

impl QueuePair {
    /// Returns the receive queue's number for completions: a shared queue's number, or 0. `own` is this queue pair's
    /// number.
    pub(super) fn srqn(&self, own: u32) -> u32 {
        if self.receives == own { 0 } else { self.receives }
    }

    /// Returns the size of a queue pair's memory, and the offset of its receive ring.
    pub(super) fn layout(log_blocks: u32, log_entries: u32, log_stride: u32) -> (usize, usize) {
        let receive = SEND_RING + (BLOCK << log_blocks);
        (receive + (1 << (log_entries + log_stride)), receive)
    }

    /// Returns whether the driver has rung since the last poll. An `Err` has a doorbell value that doesn't name this
    /// queue pair.
    pub(super) fn take_doorbell(&mut self, qpn: u32) -> Result<bool, u64> {
        let mut rung = false;
        for half in 0..2 {
            let value = self.memory.take_register(REGISTER + half * REGISTER_HALF);
            if value == 0 {
                continue;
            }
            let bytes = value.to_ne_bytes();
            let named = u32::from_be_bytes([0, bytes[4], bytes[5], bytes[6]]);
            if named != qpn {
                return Err(value);
            }
            rung = true;
        }
        Ok(rung)
    }

    /// Returns the driver's producer index for the send ring.
    fn produced(&self) -> u16 {
        self.memory.record(SEND_RECORD) as u16
    }

    fn block(&self, index: u16) -> usize {
        SEND_RING + (index as usize & ((1 << self.send.log_blocks) - 1)) * BLOCK
    }

    /// Returns the number of blocks of a request with `ds` segments, at least 1.
    fn blocks_of(ds: u8) -> u16 {
        u16::from(ds).div_ceil(4).max(1)
    }

    fn control(&self, index: u16) -> CtrlSeg {
        let mut bytes = [0; SEGMENT];
        self.memory.read(self.block(index), &mut bytes);
        CtrlSeg::read_from_bytes(&bytes).unwrap_or_default()
    }

    /// Reads the request at the head of the ring without removing it.
    pub(super) fn fetch(&self, qpn: u32) -> Fetched {
        let index = self.send.next;
        let written = self.produced().wrapping_sub(index);
        if written == 0 {
            return Fetched::Nothing;
        }
        let control = self.control(index);
        let (ds, opcode) = (control.ds() & MAX_DS as u8, control.opcode());
        let bad = |why: String| Fetched::Bad { index, opcode, why };
        let blocks = Self::blocks_of(ds);
        if usize::from(written) > 1 << self.send.log_blocks {
            return bad(format!("the doorbell counts {written} blocks, the ring has {}", 1 << self.send.log_blocks));
        }
        if blocks > written {
            return bad(format!("a request of {blocks} blocks, of which only {written} are written"));
        }
        let mut bytes = vec![0; usize::from(blocks) * BLOCK];
        for (i, block) in bytes.chunks_exact_mut(BLOCK).enumerate() {
            self.memory.read(self.block(index.wrapping_add(i as u16)), block);
        }
        match parse(&bytes, self.transport) {
            Err(ParseError::Data) => bad("malformed data segments".into()),
            Err(error) => bad(error.to_string()),
            Ok(wqe) if wqe.index != index => bad(format!("the request has the index {}", wqe.index)),
            Ok(wqe) if wqe.qpn != qpn => bad(format!("the request names queue pair {:#x}", wqe.qpn)),
            Ok(wqe) => Fetched::Request(Box::new(wqe)),
        }
    }

    /// Removes the request at the head.
    pub(super) fn pass(&mut self) {
        let blocks = Self::blocks_of(self.control(self.send.next).ds() & MAX_DS as u8);
        self.send.next = self.send.next.wrapping_add(blocks);
    }

    /// Removes a failed queue pair's next request to flush it, and returns its index and operation.
    pub(super) fn next_flushed(&mut self) -> Option<(u16, u8)> {
        let index = self.send.next;
        let written = self.produced().wrapping_sub(index);
        if written == 0 || usize::from(written) > 1 << self.send.log_blocks {
            return None;
        }
        let opcode = self.control(index).opcode();
        self.pass();
        Some((index, opcode))
    }
}
