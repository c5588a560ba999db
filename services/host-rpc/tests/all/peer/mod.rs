//! A peer of an mlx5 connection that builds its messages by hand, so that it can break the protocol.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use ferrogin_test_support::wait::poll_until;
use host_rpc::mlx5::HELLO;
use mlx5::cq::{CompletionQueue, Polled};
use mlx5::device::{Access, CqAttr, Device, Endpoint, Mr, QpAttr};
use mlx5::qp::QueuePair;
use mlx5::sq::Flags;
use mlx5::wire::{CqeOpcode, Syndrome};
use mlx5::wqe::{Data, Limits, Op, Remote, Sge, Transport, With, WorkRequest};

/// Size in bytes of the header in front of every message: kind, key, length, 8 reserved bytes, little endian.
const HEADER: usize = 24;
const EAGER_FRAME: u32 = 1;
const RTS_FRAME: u32 = 2;
/// Length of the longest eager message in bytes.
const EAGER: u32 = 4096;
/// Offset of the bytes that READs fill; receives use the bytes before it.
const READS_AT: u64 = 1 << 16;
const BYTES: usize = 1 << 20;

pub struct Peer {
    qp: QueuePair<(), ()>,
    cq: CompletionQueue,
    mr: Mr,
    memory: *const u8,
}

impl Peer {
    /// Creates a peer of the end with this hello.
    pub fn new(device: Arc<dyn Device>, hello: &[u8; HELLO]) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(&CqAttr { entries: 64, compression: true }).unwrap();
        let attr = QpAttr {
            transport: Transport::Rc,
            send_cq: cq.handle.clone(),
            recv_cq: cq.handle.clone(),
            srq: None,
            max_send: 16,
            max_recv: 4,
            limits: Limits { max_inline: 64, max_sge: 1 },
            max_recv_sge: 1,
            signal_all: true,
        };
        let mut qp = QueuePair::create(&device, &pd, &attr).unwrap();
        let memory = Box::leak(vec![0_u8; BYTES].into_boxed_slice()).as_mut_ptr();
        // SAFETY: the memory is leaked, so it stays mapped; this type accesses it only by pointer.
        let mr = unsafe { device.register(&pd, NonNull::new(memory).unwrap(), BYTES, Access::LOCAL_WRITE) }.unwrap();
        let recv = qp.recv().unwrap();
        let length = EAGER + HEADER as u32;
        recv.post((), &[Sge { addr: mr.addr, length, lkey: mr.lkey }]).unwrap();
        recv.ring();
        qp.connect(&Endpoint::from_bytes(hello[6..].try_into().unwrap()).unwrap()).unwrap();
        Self { qp, cq: CompletionQueue::new(cq.parts), mr, memory }
    }

    /// Returns this peer's hello: magic, longest eager message, endpoint.
    pub fn hello(&self) -> [u8; HELLO] {
        let endpoint = self.qp.endpoint().unwrap().to_bytes();
        [&b"m1"[..], &EAGER.to_be_bytes(), &endpoint].concat().try_into().unwrap()
    }

    fn bytes(&self, at: u64, length: u64) -> Vec<u8> {
        assert!(at + length <= BYTES as u64);
        let byte = |at: u64| self.memory.wrapping_add(at as usize);
        // SAFETY: the assertion keeps the read inside the memory, which is leaked; a volatile read tolerates a card
        // that writes to it.
        (at..at + length).map(|at| unsafe { byte(at).read_volatile() }).collect()
    }

    /// Waits for the next completion; true if it belongs to a receive.
    fn next(&mut self) -> Result<bool, Syndrome> {
        let mut seen = None;
        poll_until("completion", || {
            seen = match self.cq.poll().unwrap() {
                Polled::Empty => None,
                Polled::Done(entry) => Some(Ok((entry.opcode(), entry.wqe_counter()))),
                Polled::Failed(failure) => Some(Err(failure.syndrome)),
            };
            seen.is_some()
        });
        self.cq.release();
        let (opcode, counter) = seen.unwrap()?;
        if opcode == CqeOpcode::Req {
            self.qp.send().complete(counter).unwrap().for_each(drop);
            return Ok(false);
        }
        self.qp.recv().unwrap().complete(counter).unwrap();
        Ok(true)
    }

    /// Receives the RTS frame of a long message: its length and the window's key.
    pub fn receive_rts(&mut self) -> (u64, u32) {
        assert_eq!(self.next(), Ok(true));
        let header = self.bytes(0, HEADER as u64);
        assert_eq!(header[..4], RTS_FRAME.to_le_bytes());
        let rkey = u32::from_le_bytes(header[4..8].try_into().unwrap());
        (u64::from_le_bytes(header[8..16].try_into().unwrap()), rkey)
    }

    fn post(&mut self, post: &WorkRequest<'_>) -> Result<(), Syndrome> {
        self.qp.send().post((), Flags::NONE, post).unwrap();
        self.next().map(drop)
    }

    /// Reads the first bytes of a window.
    pub fn read(&mut self, rkey: u32, length: u64) -> Result<Vec<u8>, Syndrome> {
        let into = [Sge { addr: self.mr.addr + READS_AT, length: length as u32, lkey: self.mr.lkey }];
        self.post(&Op::Read { remote: Remote { addr: 0, rkey }, into: &into })?;
        Ok(self.bytes(READS_AT, length))
    }

    /// Writes the first byte of a window.
    pub fn write(&mut self, rkey: u32) -> Result<(), Syndrome> {
        self.post(&Op::Write { remote: Remote { addr: 0, rkey }, data: Data::Inline(&[b"x"]), imm: None })
    }

    /// Sends an eager message. The request may fail.
    pub fn reply(&mut self, body: &[u8], with: With) {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&EAGER_FRAME.to_le_bytes());
        header[8..16].copy_from_slice(&(body.len() as u64).to_le_bytes());
        // The test checks the failure at the other end.
        let _ = self.post(&Op::Send { data: Data::Inline(&[&header, body]), with });
    }
}
