//! Queue pairs: their rings, their requests in flight, and the requests of peers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use mlx5::wire::{BLOCK, CtrlSeg, MAX_DS, SEGMENT, Syndrome};
use mlx5::wqe::{ParseError, Sge, Transport, Umr, Wqe, parse};
use zerocopy::FromBytes;

use super::frame::Frame;
use super::receive::Receive;
use super::shared::Shared;

/// Doorbell record: producer of the receive queue, then of the send queue.
pub(super) const RECEIVE_RECORD: usize = 0;
pub(super) const SEND_RECORD: usize = 4;
/// Doorbell register: two halves.
pub(super) const REGISTER: usize = 1024;
/// Bytes of a half.
pub(super) const REGISTER_HALF: usize = 256;
/// The send ring, and behind it the receive ring.
pub(super) const SEND_RING: usize = 4096;

/// Where a connected queue pair sends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer {
    /// The connection that requests go out on.
    pub connection: u32,
    pub qpn: u32,
}

/// What becomes of a request that was taken from the ring.
#[derive(Debug)]
pub(super) enum Progress {
    /// The peer has not answered.
    Waiting,
    /// A change of a key that has not had its effect.
    Pending {
        umr: Box<Umr>,
        due: Instant,
    },
    Done {
        bytes: u32,
    },
    Failed(Syndrome),
}

/// A request that was taken and has not completed. They complete in order.
#[derive(Debug)]
pub(super) struct Issued {
    pub index: u16,
    pub opcode: u8,
    pub signaled: bool,
    pub token: u64,
    /// A read or an atomic: a full fence waits for it.
    pub fetches: bool,
    pub progress: Progress,
    /// Where the answer's bytes go.
    pub into: Vec<Sge>,
}

/// A message or write that has come in part.
#[derive(Debug)]
pub(super) struct Incoming {
    /// Of a message: the receive that takes it.
    pub receive: Option<Receive>,
    /// Of a write.
    pub place: Option<super::keys::Place>,
}

/// A send ring as the card reads it.
#[derive(Debug)]
pub(super) struct SendRing {
    pub log_blocks: u32,
    /// The next block to be read.
    pub next: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Not connected yet: takes receives, and keeps what is posted.
    New,
    Working,
    /// Everything that is posted is flushed.
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
    /// The receive queue: its own has its number, a shared one another.
    pub receives: u32,
    pub state: State,
    pub peer: Option<Peer>,
    /// Queue key, of a datagram queue pair.
    pub qkey: u32,
    /// How long this side's messages may wait for a receive.
    pub patience_ms: u64,
    /// The driver rang.
    pub rung: bool,
    pub issued: VecDeque<Issued>,
    pub token: u64,
    /// What has come and was not dealt with, with the connection that the answer goes to.
    pub inbox: VecDeque<(u32, Frame)>,
    pub incoming: Option<Incoming>,
    /// Bytes of the read at the head of the inbox that were answered.
    pub answered: u32,
    /// Since when the head of the inbox waits for a receive.
    pub unready: Option<Instant>,
    /// The request at the head of the ring waits for a fence or for room.
    pub blocked: bool,
}

/// The next request of a send ring.
#[derive(Debug)]
pub(super) enum Fetched {
    Nothing,
    Request(Box<Wqe>),
    /// Bytes that are no request of this queue; where and why.
    Bad {
        index: u16,
        opcode: u8,
        why: String,
    },
}

impl QueuePair {
    /// What completions of receives say: the shared queue, or 0. `own` is this queue pair's number.
    pub(super) fn srqn(&self, own: u32) -> u32 {
        if self.receives == own { 0 } else { self.receives }
    }

    /// Bytes of a queue pair's memory, and where its receive ring begins.
    pub(super) fn layout(log_blocks: u32, log_entries: u32, log_stride: u32) -> (usize, usize) {
        let receive = SEND_RING + (BLOCK << log_blocks);
        (receive + (1 << (log_entries + log_stride)), receive)
    }

    /// Whether the driver rang since the last poll. The value must name this queue pair.
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

    /// The driver's producer index of the send ring.
    fn produced(&self) -> u16 {
        self.memory.record(SEND_RECORD) as u16
    }

    fn block(&self, index: u16) -> usize {
        SEND_RING + (index as usize & ((1 << self.send.log_blocks) - 1)) * BLOCK
    }

    /// Blocks of the request at the head, at least 1, for going past it.
    fn blocks_of(ds: u8) -> u16 {
        u16::from(ds).div_ceil(4).max(1)
    }

    fn control(&self, index: u16) -> CtrlSeg {
        let mut bytes = [0; SEGMENT];
        self.memory.read(self.block(index), &mut bytes);
        CtrlSeg::read_from_bytes(&bytes).unwrap_or_default()
    }

    /// Reads the request at the head of the ring and leaves it there.
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
            return bad(format!("{written} blocks are said to be written, the ring has {}", 1 << self.send.log_blocks));
        }
        if blocks > written {
            return bad(format!("a request of {blocks} blocks, of which {written} are written"));
        }
        let mut bytes = vec![0; usize::from(blocks) * BLOCK];
        for (i, block) in bytes.chunks_exact_mut(BLOCK).enumerate() {
            self.memory.read(self.block(index.wrapping_add(i as u16)), block);
        }
        match parse(&bytes, self.transport) {
            Err(ParseError::Data) => bad("malformed data segments".into()),
            Err(error) => bad(error.to_string()),
            Ok(wqe) if wqe.index != index => bad(format!("the request says that its index is {}", wqe.index)),
            Ok(wqe) if wqe.qpn != qpn => bad(format!("the request says that it is of queue pair {:#x}", wqe.qpn)),
            Ok(wqe) => Fetched::Request(Box::new(wqe)),
        }
    }

    /// Goes past the request at the head.
    pub(super) fn pass(&mut self) {
        let blocks = Self::blocks_of(self.control(self.send.next).ds() & MAX_DS as u8);
        self.send.next = self.send.next.wrapping_add(blocks);
    }

    /// In error: index and operation of the next request that is flushed.
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
