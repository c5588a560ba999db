//! Memory windows: keys and tags, and an error for every misuse before a work request is posted.
#![allow(unsafe_code)]

use crate::common::fake::{Fake, attr};
use ferrogin_test_support::mlx5_memory::{Memory, POISON};
use mlx5::device::{Access, Device, Mr, Pd};
use mlx5::mw::{Range, Window, WindowError};
use mlx5::qp::QueuePair;
use mlx5::sq::{Flags, PostError, RequestKind};
use mlx5::wire::{Fence, MkeyAccess};
use mlx5::wqe::{BindError, Data, Op, Parsed, Transport, Umr, WindowType, With, WorkRequest, parse};
use std::sync::Arc;

const BYTES: usize = 4096;
const RIGHTS: MkeyAccess = MkeyAccess::REMOTE_READ.with(MkeyAccess::REMOTE_WRITE);

struct Bench {
    fake: Arc<Fake>,
    device: Arc<dyn Device>,
    pd: Pd,
    qp: QueuePair<u64>,
    mr: Mr,
    _memory: Memory,
}

fn region(device: &dyn Device, pd: &Pd, memory: &Memory, access: Access) -> Mr {
    // SAFETY: the tests keep the memory alive, and nothing writes to it.
    unsafe { device.register(pd, memory.base(), BYTES, access) }.expect("a region")
}

fn bench() -> Bench {
    let fake = Arc::new(Fake::new());
    let device: Arc<dyn Device> = fake.clone();
    let pd = device.alloc_pd().expect("a domain");
    let qp = QueuePair::create(&device, &pd, &attr(&*device)).expect("a queue pair");
    let memory = Memory::new(BYTES);
    let mr = region(&*device, &pd, &memory, Access::LOCAL_WRITE.with(Access::MW_BIND));
    Bench { fake, device, pd, qp, mr, _memory: memory }
}

impl Bench {
    fn window(&self, kind: WindowType) -> Window {
        Window::alloc(&*self.device, &self.pd, kind).expect("a window")
    }

    fn range(&self) -> Range {
        Range { addr: self.mr.addr + 64, length: 128, zero_based: false }
    }

    fn bind(&mut self, window: &mut Window) -> u32 {
        let range = self.range();
        let bind = window.bind(&self.qp, &self.mr, range, RIGHTS).expect("legal");
        self.qp.send().post(1, Flags::SIGNALED, &bind.post()).expect("room");
        bind.commit()
    }

    /// Returns the work request at a block of the ring, parsed as a card would.
    fn request(&self, block: usize) -> Parsed {
        let ring = self.fake.rings.lock().expect("not poisoned")[0];
        parse(&ring.read_wrapped(block * 64, 192), Transport::Rc).expect("a request").op
    }

    fn umr(&self, block: usize) -> Umr {
        match self.request(block) {
            Op::Umr { umr, .. } => umr,
            other => panic!("not a UMR: {other:?}"),
        }
    }
}

#[test]
fn each_bind_changes_tag_and_keeps_index() {
    let mut bench = bench();
    let mut window = bench.window(WindowType::Type2);
    assert_eq!(window.rkey(), None);
    let first = bench.bind(&mut window);
    assert_eq!((first as u8, window.rkey()), (0xff, Some(first)));
    assert_eq!(bench.umr(0).key, first - 1, "the request names the key before");

    let free = window.invalidate(&bench.qp).expect("bound");
    bench.qp.send().post(2, Flags::SIGNALED, &free.post()).expect("room");
    free.commit();
    assert_eq!(window.rkey(), None);
    assert_eq!(window.invalidate(&bench.qp).unwrap_err(), WindowError::NotBound, "it is freed once");
    assert_eq!(window.unbind(&bench.qp).unwrap_err(), WindowError::NotBound);
    assert_eq!(bench.umr(3).key, first);
    let kinds: Vec<_> = bench.qp.send().complete(3).expect("outstanding").map(|done| done.kind).collect();
    assert_eq!(kinds, [RequestKind::Bind, RequestKind::LocalInv]);

    let second = bench.bind(&mut window);
    assert_eq!((second as u8, second >> 8), (0, first >> 8), "the tag wraps and leaves the index alone");

    let free = window.unbind(&bench.qp).expect("bound");
    bench.qp.send().post(2, Flags::SIGNALED, &free.post()).expect("room");
    assert_eq!(free.commit() as u8, 1);
    assert_eq!(bench.bind(&mut window) as u8, 2);
}

#[test]
fn bound_type_1_window_can_be_rebound_and_unbound() {
    let mut bench = bench();
    let mut window = bench.window(WindowType::Type1);
    let first = bench.bind(&mut window);
    let second = bench.bind(&mut window);
    assert_eq!(second, first & !0xff);
    assert_eq!(window.invalidate(&bench.qp).unwrap_err(), WindowError::Type1);
    assert_eq!(window.invalidated(second), Err(WindowError::Type1));
    let free = window.unbind(&bench.qp).expect("bound");
    bench.qp.send().post(2, Flags::NONE, &free.post()).expect("room");
    free.commit();
    assert_eq!(window.unbind(&bench.qp).unwrap_err(), WindowError::NotBound);
}

#[test]
fn misuse_is_refused_without_effect() {
    let mut bench = bench();
    let mut window = bench.window(WindowType::Type2);
    let range = bench.range();
    let refused = |window: &mut Window, qp: &QueuePair<u64>, mr: &Mr, range, access| {
        let error = window.bind(qp, mr, range, access).unwrap_err();
        assert_eq!(window.rkey(), None);
        error
    };
    assert_eq!(window.invalidate(&bench.qp).unwrap_err(), WindowError::NotBound);
    assert_eq!(window.invalidated(1), Err(WindowError::NotBound));
    let empty = Range { length: 0, ..range };
    assert_eq!(refused(&mut window, &bench.qp, &bench.mr, empty, RIGHTS), WindowError::Bind(BindError::ZeroLength));
    let long = Range { length: (1 << 31) + 1, ..range };
    let too_long = BindError::TooLong { length: long.length };
    assert_eq!(refused(&mut window, &bench.qp, &bench.mr, long, RIGHTS), WindowError::Bind(too_long));
    for (addr, length) in
        [(bench.mr.addr - 1, 1), (bench.mr.addr, BYTES as u64 + 1), (u64::MAX, 1), (bench.mr.addr + 4090, 7)]
    {
        let outside = Range { addr, length, zero_based: false };
        let error = refused(&mut window, &bench.qp, &bench.mr, outside, RIGHTS);
        assert_eq!(error, WindowError::OutOfRegion { addr, length });
    }

    let memory = Memory::new(BYTES);
    let no_bind = region(&*bench.device, &bench.pd, &memory, Access::LOCAL_WRITE);
    let at = |mr: &Mr| Range { addr: mr.addr, length: 8, zero_based: true };
    let error = refused(&mut window, &bench.qp, &no_bind, at(&no_bind), RIGHTS);
    assert_eq!(error, WindowError::RegionForbidsWindows);
    let read_only = region(&*bench.device, &bench.pd, &memory, Access::MW_BIND);
    let error = refused(&mut window, &bench.qp, &read_only, at(&read_only), RIGHTS);
    assert_eq!(error, WindowError::RegionForbidsWrites);
    assert!(window.bind(&bench.qp, &read_only, at(&read_only), MkeyAccess::REMOTE_READ).is_ok());

    let other_pd = bench.device.alloc_pd().expect("a domain");
    let foreign = region(&*bench.device, &other_pd, &memory, Access::LOCAL_WRITE.with(Access::MW_BIND));
    let error = refused(&mut window, &bench.qp, &foreign, at(&foreign), RIGHTS);
    assert_eq!(error, WindowError::OtherDomain { what: "region" });
    let outsider: QueuePair<u64> =
        QueuePair::create(&bench.device, &other_pd, &attr(&*bench.device)).expect("a queue pair");
    let error = refused(&mut window, &outsider, &bench.mr, range, RIGHTS);
    assert_eq!(error, WindowError::OtherDomain { what: "queue pair" });
    let mut type_1 = bench.window(WindowType::Type1);
    let error = type_1.bind(&bench.qp, &bench.mr, Range { zero_based: true, ..range }, RIGHTS).unwrap_err();
    assert_eq!(error, WindowError::Bind(BindError::ZeroBasedType1));

    let untouched = |bench: &Bench| {
        let rings = bench.fake.rings.lock().expect("not poisoned");
        rings.iter().all(|ring| ring.read(0, ring.size()).iter().all(|byte| *byte == POISON))
    };
    assert!(untouched(&bench) && bench.qp.send().producer() == 0, "nothing was written");
    let rkey = bench.bind(&mut window);
    assert!(!untouched(&bench));
    assert_eq!(window.bind(&bench.qp, &bench.mr, range, RIGHTS).unwrap_err(), WindowError::StillBound);
    let sibling: QueuePair<u64> =
        QueuePair::create(&bench.device, &bench.pd, &attr(&*bench.device)).expect("a queue pair");
    let error = WindowError::OtherQueuePair { qpn: sibling.qpn(), owner: bench.qp.qpn() };
    assert_eq!(window.invalidate(&sibling).unwrap_err(), error);
    assert_eq!(window.unbind(&sibling).unwrap_err(), error);
    let other = rkey ^ 1;
    assert_eq!(window.invalidated(other), Err(WindowError::OtherKey { rkey: other, current: rkey }));
    assert_eq!(window.rkey(), Some(rkey));
    assert_eq!(bench.qp.send().producer(), 3, "no refusal wrote a request");
    assert_eq!(window.invalidated(rkey), Ok(()));
    assert_eq!(window.invalidated(rkey), Err(WindowError::NotBound));
}

#[test]
fn window_under_invalidation_can_be_bound_on_its_queue_pair_only() {
    let mut bench = bench();
    let mut window = bench.window(WindowType::Type2);
    bench.bind(&mut window);
    let free = window.invalidate(&bench.qp).expect("bound");
    bench.qp.send().post(2, Flags::SIGNALED, &free.post()).expect("room");
    free.commit();
    let sibling: QueuePair<u64> =
        QueuePair::create(&bench.device, &bench.pd, &attr(&*bench.device)).expect("a queue pair");
    let range = bench.range();
    assert!(matches!(window.bind(&sibling, &bench.mr, range, RIGHTS), Err(WindowError::OtherQueuePair { .. })));
    assert!(window.bind(&bench.qp, &bench.mr, range, RIGHTS).is_ok());
    window.mark_completed();
    assert!(window.bind(&sibling, &bench.mr, range, RIGHTS).is_ok());
}

#[test]
fn unposted_bind_changes_neither_window_nor_fence() {
    let mut bench = bench();
    let mut window = bench.window(WindowType::Type2);
    // 14 of 16 blocks are in use: a bind of three blocks does not fit.
    for _ in 0..14 {
        bench.qp.send().post(0, Flags::NONE, &Op::Nop).expect("room");
    }
    let range = bench.range();
    let bind = window.bind(&bench.qp, &bench.mr, range, RIGHTS).expect("legal");
    let rejected = bench.qp.send().post(77, Flags::SIGNALED, &bind.post()).unwrap_err();
    assert_eq!((rejected.token, rejected.error), (77, PostError::Full { free_blocks: 2, free_posts: 2 }));
    drop(bind);
    assert_eq!((window.rkey(), bench.qp.send().pending_fence()), (None, Fence::None));

    bench.qp.send().complete(13).expect("outstanding").for_each(drop);
    let rkey = bench.bind(&mut window);
    assert_eq!(rkey as u8, 0xff, "the tag was not stepped by the bind that failed");
    let send = bench.qp.send();
    assert_eq!(send.pending_fence(), Fence::Small);
    // Neither a refused work request nor a dropped batch consumes the pending fence.
    let long = [0_u8; 125];
    let message: WorkRequest<'_> = Op::Send { data: Data::Inline(&[&long[..]]), with: With::Nothing };
    assert!(send.post(0, Flags::NONE, &message).is_err());
    let mut batch = send.batch();
    batch.post(0, Flags::NONE, &Op::Nop).expect("room");
    drop(batch);
    assert_eq!(send.pending_fence(), Fence::Small);
    send.post(0, Flags::NONE, &Op::Nop).expect("room");
    assert_eq!(send.pending_fence(), Fence::None);
}
