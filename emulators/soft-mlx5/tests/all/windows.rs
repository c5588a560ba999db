//! The mlx5 crate's windows on the software card, or the one that FERROGIN_MLX5 names: bound, used by the peer,
//! invalidated, bound again.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use ferrogin_test_support::wait::wait_for;
use mlx5::cq::{CompletionError, CompletionQueue, Polled};
use mlx5::device::{Access, CqAttr, Device, Mr, Pd, QpAttr};
use mlx5::mw::{Range, Window};
use mlx5::qp::QueuePair;
use mlx5::sq::{Flags, RequestKind};
use mlx5::wire::{Cqe, CqeOpcode, MkeyAccess, Syndrome};
use mlx5::wqe::{Data, Limits, Op, Remote, Sge, Transport, WindowType, With, WorkRequest};
use soft_mlx5::Settings;

const BYTES: usize = 8192;
const RIGHTS: MkeyAccess = MkeyAccess::REMOTE_READ.with(MkeyAccess::REMOTE_WRITE);

struct End {
    device: Arc<dyn Device>,
    pd: Pd,
    qp: QueuePair<u64>,
    cq: CompletionQueue,
    mr: Mr,
    memory: *mut u8,
}

impl End {
    fn new(seed: u64) -> Self {
        let device = soft_mlx5::open(Settings { seed: Some(seed), ..Settings::default() }).expect("a card");
        let compression = seed.is_multiple_of(2) && device.caps().compression;
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(&CqAttr { entries: 64, compression }).expect("a queue");
        let attr = QpAttr {
            transport: Transport::Rc,
            send_cq: cq.handle.clone(),
            recv_cq: cq.handle.clone(),
            srq: None,
            max_send: 64,
            max_recv: 16,
            limits: Limits { max_inline: 64, max_sge: 2 },
            max_recv_sge: 1,
            signal_all: false,
        };
        let qp = QueuePair::create(&device, &pd, &attr).expect("a queue pair");
        let memory = Box::leak(vec![0_u8; BYTES].into_boxed_slice()).as_mut_ptr();
        let base = NonNull::new(memory).expect("memory");
        let access = Access::LOCAL_WRITE.with(Access::MW_BIND);
        // SAFETY: the memory is leaked, and only accessed through pointers.
        let mr = unsafe { device.register(&pd, base, BYTES, access) }.expect("a region");
        Self { device, pd, qp, cq: CompletionQueue::new(cq.parts), mr, memory }
    }

    fn byte(&self, at: usize) -> u8 {
        assert!(at < BYTES);
        // SAFETY: the byte lies in the memory.
        unsafe { self.memory.wrapping_add(at).read_volatile() }
    }

    fn set(&self, at: usize, byte: u8) {
        assert!(at < BYTES);
        // SAFETY: the byte lies in the memory.
        unsafe { self.memory.wrapping_add(at).write_volatile(byte) };
    }

    fn receive(&mut self) {
        let sge = Sge { addr: self.mr.addr + 4096, length: 64, lkey: self.mr.lkey };
        let recv = self.qp.recv().expect("its own queue");
        recv.post(0, &[sge]).expect("room");
        recv.ring();
    }

    /// Waits for the next completion, and returns it with the kinds of the requests that it completes.
    fn next(&mut self) -> Result<(Cqe, Vec<RequestKind>), CompletionError> {
        let seen = wait_for("completion", || match self.cq.poll().expect("a valid completion") {
            Polled::Empty => None,
            Polled::Done(entry) => Some(Ok(entry.to_cqe())),
            Polled::Failed(failure) => Some(Err(failure)),
        });
        self.cq.release();
        let cqe = seen?;
        let counter = cqe.wqe_counter.get();
        let kinds = match cqe.op_own.opcode() {
            CqeOpcode::Req => self.qp.send().complete(counter).expect("ours").map(|done| done.kind).collect(),
            _ => {
                self.qp.recv().expect("its own queue").complete(counter).expect("an outstanding receive");
                Vec::new()
            }
        };
        Ok((cqe, kinds))
    }

    /// Writes a byte to the peer's window.
    fn write(&mut self, rkey: u32, at: u64, byte: u8) -> Result<(), Syndrome> {
        let post: WorkRequest<'_> =
            Op::Write { remote: Remote { addr: at, rkey }, data: Data::Inline(&[&[byte]]), imm: None };
        self.qp.send().post(0, Flags::SIGNALED, &post).expect("room");
        self.next().map(drop).map_err(|failure| failure.syndrome)
    }

    /// Reads a byte from the peer's window.
    fn read(&mut self, rkey: u32, at: u64) -> u8 {
        let into = [Sge { addr: self.mr.addr + 100, length: 1, lkey: self.mr.lkey }];
        let post: WorkRequest<'_> = Op::Read { remote: Remote { addr: at, rkey }, into: &into };
        self.qp.send().post(0, Flags::SIGNALED, &post).expect("room");
        self.next().expect("done");
        self.byte(100)
    }

    /// Binds a window of `length` bytes and sends the key to the peer in one batch. Returns the key.
    fn lend(&mut self, window: &mut Window, addr: u64, length: u64, zero_based: bool) -> u32 {
        let range = Range { addr, length, zero_based };
        let bind = window.bind(&self.qp, &self.mr, range, RIGHTS).expect("legal");
        let mut batch = self.qp.send().batch();
        batch.post(1, Flags::NONE, &bind.post()).expect("room");
        let key = bind.rkey().to_be_bytes();
        let tell: WorkRequest<'_> = Op::Send { data: Data::Inline(&[&key]), with: With::Nothing };
        batch.post(2, Flags::SIGNALED, &tell).expect("room");
        batch.ring();
        bind.commit()
    }
}

fn connected() -> (End, End) {
    let (a, b) = (End::new(11), End::new(12));
    let (end_a, end_b) = (a.qp.endpoint().expect("an endpoint"), b.qp.endpoint().expect("an endpoint"));
    a.qp.connect(&end_b).expect("connected");
    b.qp.connect(&end_a).expect("connected");
    (a, b)
}

#[test]
fn window_is_bound_used_and_invalidated_many_times() {
    let (mut peer, mut owner) = connected();
    let mut window = Window::alloc(&*owner.device, &owner.pd, WindowType::Type2).expect("a window");
    let base = owner.mr.addr;
    let mut keys = std::collections::HashSet::new();
    for round in 0..60_u64 {
        let zero_based = round % 2 == 0;
        peer.receive();
        let rkey = owner.lend(&mut window, base + 1000, 500, zero_based);
        // The fence ensures that the message with the key comes after the bind.
        let (told, _) = peer.next().expect("the key");
        assert_eq!(told.byte_cnt.get(), 4);
        assert_eq!(owner.next().expect("done").1, [RequestKind::Bind, RequestKind::Plain]);
        keys.insert(rkey);
        let at = |offset: u64| if zero_based { offset } else { base + 1000 + offset };
        let byte = round as u8;
        peer.write(rkey, at(499), byte).expect("within the window");
        assert_eq!(owner.byte(1499), byte);
        owner.set(1000, byte ^ 0xff);
        assert_eq!(peer.read(rkey, at(0)), byte ^ 0xff);
        match round % 3 {
            // The owner frees the window through its key, or by binding no bytes.
            0 | 1 => {
                let change = if round % 3 == 0 { window.invalidate(&owner.qp) } else { window.unbind(&owner.qp) };
                let change = change.expect("bound");
                owner.qp.send().post(3, Flags::SIGNALED, &change.post()).expect("room");
                change.commit();
                let kind = if round % 3 == 0 { RequestKind::LocalInv } else { RequestKind::Bind };
                assert_eq!(owner.next().expect("done").1, [kind]);
                window.mark_completed();
            }
            // The peer's message invalidates the window.
            _ => {
                owner.receive();
                let bye: WorkRequest<'_> = Op::Send { data: Data::Inline(&[b"bye"]), with: With::Invalidate(rkey) };
                peer.qp.send().post(4, Flags::SIGNALED, &bye).expect("room");
                peer.next().expect("done");
                let (cqe, _) = owner.next().expect("a message");
                assert_eq!(cqe.op_own.opcode(), CqeOpcode::RespSendInv);
                window.invalidated(cqe.imm_inval_pkey.get()).expect("the window's key");
            }
        }
        assert_eq!(window.rkey(), None);
    }
    assert_eq!(keys.len(), 60, "a tag is used again after 256 binds, not before");
    let stale = *keys.iter().next().expect("keys");
    assert_eq!(peer.write(stale, 0, 1), Err(Syndrome::RemoteAccess));
}

#[test]
fn key_of_dropped_window_is_stale() {
    let (mut peer, mut owner) = connected();
    let mut window = Window::alloc(&*owner.device, &owner.pd, WindowType::Type2).expect("a window");
    peer.receive();
    let base = owner.mr.addr;
    let rkey = owner.lend(&mut window, base, 64, true);
    peer.next().expect("the key");
    owner.next().expect("done");
    peer.write(rkey, 0, 7).expect("bound");
    drop(window);
    assert_eq!(peer.write(rkey, 0, 8), Err(Syndrome::RemoteAccess));
    assert_eq!(owner.byte(0), 7);
}

#[test]
fn type_1_window_serves_every_queue_pair_and_can_be_rebound() {
    let (mut peer, mut owner) = connected();
    let mut window = Window::alloc(&*owner.device, &owner.pd, WindowType::Type1).expect("a window");
    let base = owner.mr.addr;
    let mut last = None;
    for round in 0..5_u8 {
        peer.receive();
        let rkey = owner.lend(&mut window, base + 64 * u64::from(round), 64, false);
        peer.next().expect("the key");
        owner.next().expect("done");
        peer.write(rkey, base + 64 * u64::from(round), 0x40 + round).expect("bound");
        assert_eq!(owner.byte(64 * usize::from(round)), 0x40 + round);
        last = Some(rkey);
    }
    let change = window.unbind(&owner.qp).expect("bound");
    owner.qp.send().post(3, Flags::SIGNALED, &change.post()).expect("room");
    change.commit();
    owner.next().expect("done");
    assert_eq!(peer.write(last.expect("a key"), base, 1), Err(Syndrome::RemoteAccess));
}

#[test]
fn queue_pair_of_size_0_has_room_for_one_request() {
    let end = End::new(13);
    let cq = end.device.create_cq(&CqAttr { entries: 0, compression: false }).expect("a queue");
    let attr = QpAttr {
        transport: Transport::Rc,
        send_cq: cq.handle.clone(),
        recv_cq: cq.handle.clone(),
        srq: None,
        max_send: 0,
        max_recv: 0,
        limits: Limits { max_inline: 0, max_sge: 0 },
        max_recv_sge: 0,
        signal_all: true,
    };
    let mut qp = QueuePair::<u8>::create(&end.device, &end.pd, &attr).expect("a queue pair");
    qp.connect(&qp.endpoint().expect("an endpoint")).expect("connected to itself");
    let mut cq = CompletionQueue::new(cq.parts);
    for token in 0..10 {
        let post: WorkRequest<'_> = Op::Write { remote: Remote { addr: 0, rkey: 0 }, data: Data::Sges(&[]), imm: None };
        qp.send().post(token, Flags::NONE, &post).expect("room for one");
        assert_eq!(qp.send().post(99, Flags::NONE, &post).expect_err("room for one").token, 99);
        let counter = wait_for("completion", || match cq.poll().expect("a valid completion") {
            Polled::Empty => None,
            Polled::Done(entry) => Some(entry.wqe_counter()),
            Polled::Failed(failure) => panic!("{failure}"),
        });
        cq.release();
        let done: Vec<_> = qp.send().complete(counter).expect("ours").map(|done| done.token).collect();
        assert_eq!(done, [token]);
    }
}
