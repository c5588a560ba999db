//! The software ConnectX card, or the one that FERROGIN_MLX5 names, with requests built by hand: silent failures,
//! errors and request order.
#![allow(unsafe_code)]

mod umr;

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use ferrogin_test_support::wait::{HANG_LIMIT, wait_for, wait_until};
use mlx5::cq::{CompletionQueue, Polled};
use mlx5::device::{Access, CqAttr, Device, Endpoint, Handle, Mr, Pd, QpAttr};
use mlx5::rq::RecvQueue;
use mlx5::sq::SendParts;
use mlx5::srq::SharedRecvQueue;
use mlx5::wire::{CqeOpcode, CtrlSeg, FmCeSe, MkeyAccess, Syndrome};
use mlx5::wqe::{
    AhAttr, AtomicResult, Bind, Data, Destination, Limits, LinkLayer, Op, Remote, Sge, Transport, Umr, UmrKind,
    WindowType, With, WorkRequest,
};
use soft_mlx5::{Card, Settings};

const LIMITS: Limits = Limits { max_inline: 128, max_sge: 4 };
const RIGHTS: Access = Access(0x1f);

/// A send queue that writes any request with any flags, including fences.
struct Raw {
    parts: SendParts,
    next: u32,
}

impl Raw {
    fn place(&mut self, post: &WorkRequest<'_>, flags: FmCeSe) {
        let size = post.size(&LIMITS).unwrap();
        let (opcode, imm) = post.code();
        let mut place = self.parts.ring.at(self.next);
        use mlx5::wqe::SegmentWriter;
        place.put(0, CtrlSeg::new(opcode.code(), self.next as u16, self.parts.qpn, size.ds, flags, imm));
        post.put(&mut place);
        self.next += size.blocks();
    }

    fn ring(&mut self) {
        self.parts.record.set(self.next & 0xffff);
        let last = u64::from_ne_bytes({
            let mut bytes = [0; 8];
            bytes[4..7].copy_from_slice(&self.parts.qpn.to_be_bytes()[1..]);
            bytes
        });
        self.parts.register.ring(last);
    }

    fn post(&mut self, post: &WorkRequest<'_>, flags: FmCeSe) {
        self.place(post, flags);
        self.ring();
    }
}

/// One end of a connection.
struct End {
    qp: Handle,
    pd: Pd,
    send: Raw,
    recv: Option<RecvQueue<u32>>,
    cq: CompletionQueue,
    // Declared before `memory`, so that the region is dropped first.
    mr: Mr,
    memory: Box<[u8]>,
}

fn attr(cq: &Handle, transport: Transport) -> QpAttr {
    QpAttr {
        transport,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        max_send: 64,
        max_recv: 64,
        limits: LIMITS,
        max_recv_sge: 2,
        signal_all: false,
    }
}

impl End {
    fn new(card: &dyn Device, transport: Transport, bytes: usize, compression: bool) -> End {
        Self::of_domain(card, card.alloc_pd().unwrap(), transport, bytes, compression)
    }

    fn of_domain(card: &dyn Device, pd: Pd, transport: Transport, bytes: usize, compression: bool) -> End {
        let compression = compression && card.caps().compression;
        let cq = card.create_cq(&CqAttr { entries: 256, compression }).unwrap();
        let qp = card.create_qp(&pd, &attr(&cq.handle, transport)).unwrap();
        let mut memory = vec![0; bytes].into_boxed_slice();
        let base = NonNull::new(memory.as_mut_ptr()).unwrap();
        // SAFETY: the memory is boxed, and `End` drops the region before the box.
        let mr = unsafe { card.register(&pd, base, bytes, RIGHTS) }.unwrap();
        End {
            qp: qp.handle,
            pd,
            send: Raw { parts: qp.send, next: 0 },
            recv: qp.recv.and_then(RecvQueue::new),
            cq: CompletionQueue::new(cq.parts),
            mr,
            memory,
        }
    }

    fn addr(&self) -> u64 {
        self.mr.addr
    }

    fn sge(&self, at: u64, length: u32) -> Sge {
        Sge { addr: self.addr() + at, length, lkey: self.mr.lkey }
    }

    fn receive(&mut self, at: u64, length: u32) {
        let sge = self.sge(at, length);
        let recv = self.recv.as_mut().unwrap();
        recv.post(0, &[sge]).unwrap();
        recv.ring();
    }

    /// Waits for the next completion and returns its operation, bytes and immediate data, or the syndrome.
    fn next(&mut self) -> Result<(CqeOpcode, u32, u32), Syndrome> {
        let seen = wait_for("completion", || match self.cq.poll().unwrap() {
            Polled::Empty => None,
            Polled::Done(entry) => {
                let cqe = entry.to_cqe();
                Some(Ok((cqe.op_own.opcode(), cqe.byte_cnt.get(), cqe.imm_inval_pkey.get())))
            }
            Polled::Failed(failure) => Some(Err(failure.syndrome)),
        });
        self.cq.release();
        seen
    }

    /// Returns the key and UMR that bind a type-2 window to bytes `from..from + length`, with the next tag.
    fn bind(&mut self, rkey: u32, from: u64, length: u64) -> (u32, Umr) {
        let tag = rkey.wrapping_add(1) as u8;
        let bind = Bind {
            window: WindowType::Type2,
            rkey,
            tag,
            lkey: self.mr.lkey,
            addr: self.addr() + from,
            length,
            access: MkeyAccess::REMOTE_READ.with(MkeyAccess::REMOTE_WRITE),
            zero_based: true,
        };
        (rkey & !0xff | u32::from(tag), Umr::bind(&bind, self.send.parts.qpn).unwrap())
    }
}

const SIGNAL: FmCeSe = FmCeSe::CQ_UPDATE;

fn card(seed: u64) -> Arc<dyn Device> {
    soft_mlx5::open(Settings { seed: Some(seed), ..Settings::default() }).unwrap()
}

fn connect(card_a: &dyn Device, a: &End, card_b: &dyn Device, b: &End) {
    let (end_a, end_b) = (card_a.endpoint(&a.qp).unwrap(), card_b.endpoint(&b.qp).unwrap());
    card_a.connect(&a.qp, &Endpoint::from_bytes(&end_b.to_bytes()).unwrap()).unwrap();
    card_b.connect(&b.qp, &end_a).unwrap();
}

/// Opens a software card with these settings.
fn software(settings: Settings) -> Arc<Card> {
    Arc::new(Card::open(settings).unwrap())
}

/// Returns true if FERROGIN_MLX5 is set, and reports `test` as skipped, because it needs the software card.
fn on_hardware(test: &str) -> bool {
    let is_set = std::env::var_os("FERROGIN_MLX5").is_some();
    if is_set {
        ferrogin_test_support::skip(test, "only the software card has the settings and calls that it is about");
    }
    is_set
}

/// Connects two ends, on two cards or on one.
fn pair(two: bool, bytes: usize) -> (Vec<Arc<dyn Device>>, End, End) {
    let mut cards = vec![card(7)];
    if two {
        cards.push(card(8));
    }
    let (first, last) = (&*cards[0], &*cards[cards.len() - 1]);
    let (a, b) = (End::new(first, Transport::Rc, bytes, false), End::new(last, Transport::Rc, bytes, true));
    connect(first, &a, last, &b);
    (cards, a, b)
}

/// Exchanges requests between another pair of ends, after which the last card has seen everything posted on the first
/// one before.
fn exchange(cards: &[Arc<dyn Device>]) {
    let [first, last] = [&*cards[0], &*cards[cards.len() - 1]];
    let (mut a, b) = (End::new(first, Transport::Rc, 64, false), End::new(last, Transport::Rc, 64, false));
    connect(first, &a, last, &b);
    let sge = [a.sge(0, 8)];
    for _ in 0..2 {
        a.send.post(&write(&sge, b.addr(), b.mr.rkey), SIGNAL);
        a.next().unwrap();
    }
}

fn write<'a>(sge: &'a [Sge], to: u64, rkey: u32) -> WorkRequest<'a> {
    Op::Write { remote: Remote { addr: to, rkey }, data: Data::Sges(sge), imm: None }
}

#[test]
fn all_operations_move_bytes() {
    for two in [false, true] {
        let (cards, mut a, mut b) = pair(two, 1 << 20);
        a.memory[..300_000].iter_mut().enumerate().for_each(|(i, byte)| *byte = (i % 251) as u8);
        let (sge, to) = ([a.sge(0, 300_000)], b.addr() + 5);
        a.send.post(&write(&sge, to, b.mr.rkey), SIGNAL);
        assert_eq!(a.next().unwrap().0, CqeOpcode::Req);
        assert!(b.memory[5..300_005] == a.memory[..300_000]);

        let into = [a.sge(400_000, 70_000), a.sge(600_000, 100_000)];
        let read = Op::Read { remote: Remote { addr: to, rkey: b.mr.rkey }, into: &into[..] };
        a.send.post(&read, SIGNAL);
        assert_eq!(a.next().unwrap().1, 170_000);
        assert!(a.memory[400_000..470_000] == a.memory[..70_000]);
        assert!(a.memory[600_000..700_000] == a.memory[70_000..170_000]);

        // The message waits for a receive.
        let message: WorkRequest<'_> = Op::Send { data: Data::Inline(&[&b"hello"[..]]), with: With::Imm(77) };
        a.send.post(&message, SIGNAL);
        exchange(&cards);
        b.receive(0x8_0000, 64);
        assert_eq!(b.next(), Ok((CqeOpcode::RespSendImm, 5, 77)));
        assert_eq!(&b.memory[0x8_0000..0x8_0005], b"hello");
        a.next().unwrap();

        let word = b.addr() + 0x9_0000;
        let into = AtomicResult { addr: a.addr() + 0x9_0000, lkey: a.mr.lkey };
        let remote = Remote { addr: word, rkey: b.mr.rkey };
        a.send.post(&Op::FetchAdd { remote, add: 40, into }, SIGNAL);
        a.send.post(&Op::CompareSwap { remote, compare: 40, swap: 99, into }, SIGNAL);
        assert_eq!((a.next().unwrap().1, a.next().unwrap().1), (8, 8));
        assert_eq!(a.memory[0x9_0000..0x9_0008], 40_u64.to_ne_bytes());
        assert_eq!(b.memory[0x9_0000..0x9_0008], 99_u64.to_ne_bytes());

        b.receive(0, 0);
        let sge = [a.sge(0, 8)];
        a.send.post(&Op::Write { remote, data: Data::Sges(&sge), imm: Some(5) }, SIGNAL);
        assert_eq!(b.next(), Ok((CqeOpcode::RespWrImm, 8, 5)));
    }
}

#[test]
fn window_works_until_invalidated() {
    let (cards, mut a, mut b) = pair(true, 4096);
    let window = cards[1].alloc_window(&b.pd, WindowType::Type2).unwrap();
    let (rkey, umr) = b.bind(window.rkey, 1024, 512);
    b.send.post(&Op::Umr { umr, kind: UmrKind::Bind }, SIGNAL);
    assert_eq!(b.next().unwrap().0, CqeOpcode::Req);
    a.memory[..8].copy_from_slice(b"contents");
    let sge = [a.sge(0, 8)];
    a.send.post(&write(&sge, 504, rkey), SIGNAL);
    a.next().unwrap();
    assert_eq!(&b.memory[1528..1536], b"contents");
    let into = [a.sge(100, 8)];
    a.send.post(&Op::Read { remote: Remote { addr: 504, rkey }, into: &into }, SIGNAL);
    a.next().unwrap();
    assert_eq!(&a.memory[100..108], b"contents");

    // The peer's message invalidates the key, so the peer's next access with it fails.
    b.receive(0, 16);
    a.send.post(&Op::Send { data: Data::Inline(&[&b"done"[..]]), with: With::Invalidate(rkey) }, SIGNAL);
    assert_eq!(b.next(), Ok((CqeOpcode::RespSendInv, 4, rkey)));
    a.next().unwrap();
    a.send.post(&write(&sge, 0, rkey), SIGNAL);
    a.send.post(&Op::Nop, FmCeSe::NONE);
    assert_eq!(a.next(), Err(Syndrome::RemoteAccess));
    assert_eq!(a.next(), Err(Syndrome::WrFlush));
}

/// The responder binds and sends the key, and the peer writes at once. With a fence, the write succeeds; without one,
/// it overtakes a bind that takes an hour.
#[test]
fn request_without_fence_overtakes_bind() {
    if on_hardware("request_without_fence_overtakes_bind") {
        return;
    }
    let race = |fence: FmCeSe, seed: u64, max_bind_delay: Duration| {
        let late = |seed| software(Settings { seed: Some(seed), max_bind_delay, ..Settings::default() });
        let cards = [late(seed), late(seed + 1000)];
        let (mut a, mut b) =
            (End::new(&*cards[0], Transport::Rc, 4096, false), End::new(&*cards[1], Transport::Rc, 4096, false));
        connect(&*cards[0], &a, &*cards[1], &b);
        let window = cards[1].alloc_window(&b.pd, WindowType::Type2).unwrap();
        let (rkey, umr) = b.bind(window.rkey, 0, 64);
        a.receive(0, 64);
        b.send.place(&Op::Umr { umr, kind: UmrKind::Bind }, FmCeSe::NONE);
        b.send.post(&Op::Send { data: Data::Inline(&[&b"go"[..]]), with: With::Nothing }, fence);
        a.next().unwrap();
        let sge = [a.sge(0, 2)];
        a.send.post(&write(&sge, 0, rkey), SIGNAL);
        a.next().is_ok()
    };
    assert!((0..20).all(|seed| race(FmCeSe::SMALL_FENCE, seed, Duration::from_millis(50))));
    assert!(!race(FmCeSe::NONE, 1, Duration::from_secs(3600)), "the bind came first");
}

#[test]
fn rights_bounds_tags_and_owners_are_checked() {
    type Twist = fn(&mut End, &mut Umr, &mut u64, &mut u32, &mut u32);
    let cases: [(&str, Twist, Syndrome); 6] = [
        ("beyond the end", |_, _, at, _, _| *at = 509, Syndrome::RemoteAccess),
        ("a stale tag", |_, _, _, rkey, _| *rkey ^= 1, Syndrome::RemoteAccess),
        ("no such key", |_, _, _, rkey, _| *rkey ^= 0x4000_0000, Syndrome::RemoteAccess),
        (
            "another queue pair",
            |_, umr, _, _, _| umr.mkey.qpn_mkey = (umr.mkey.qpn_mkey.get() ^ 0x100).into(),
            Syndrome::RemoteAccess,
        ),
        ("no right", |_, umr, _, _, _| umr.mkey.access_flags = MkeyAccess::REMOTE_READ, Syndrome::RemoteAccess),
        ("a stale local key", |_, _, _, _, lkey| *lkey ^= 1, Syndrome::LocalProt),
    ];
    for (name, twist, syndrome) in cases {
        let (cards, mut a, mut b) = pair(false, 4096);
        let window = cards[0].alloc_window(&b.pd, WindowType::Type2).unwrap();
        let (mut rkey, mut umr) = b.bind(window.rkey, 1024, 512);
        let (mut at, mut lkey) = (0, a.mr.lkey);
        twist(&mut b, &mut umr, &mut at, &mut rkey, &mut lkey);
        b.send.post(&Op::Umr { umr, kind: UmrKind::Bind }, SIGNAL);
        b.next().unwrap();
        let sge = [Sge { lkey, ..a.sge(0, 4) }];
        a.send.post(&write(&sge, at, rkey), SIGNAL);
        assert_eq!(a.next(), Err(syndrome), "{name}");
        assert!(b.memory.iter().all(|byte| *byte == 0), "{name}");
    }
}

#[test]
fn invalid_bind_fails() {
    type Twist = fn(&mut Umr);
    let cases: [(&str, Twist); 4] = [
        ("beyond the region", |umr| {
            if let Some(klm) = &mut umr.klm {
                klm.byte_count = 8192.into();
            }
        }),
        ("no such region", |umr| {
            if let Some(klm) = &mut umr.klm {
                klm.mkey = (klm.mkey.get() ^ 0x4000_0000).into();
            }
        }),
        ("no such window", |umr| umr.key ^= 0x4000_0000),
        ("invalidated before", |umr| *umr = Umr::local_inv(umr.key)),
    ];
    for (name, twist) in cases {
        let (cards, _a, mut b) = pair(false, 4096);
        let window = cards[0].alloc_window(&b.pd, WindowType::Type2).unwrap();
        let (_, mut umr) = b.bind(window.rkey, 0, 64);
        twist(&mut umr);
        b.send.post(&Op::Umr { umr, kind: UmrKind::Bind }, SIGNAL);
        assert_eq!(b.next(), Err(Syndrome::MwBind), "{name}");
    }
}

#[test]
fn window_of_another_domain_is_neither_bound_nor_invalidated() {
    let (cards, mut a, mut b) = pair(true, 4096);
    let other = cards[1].alloc_pd().unwrap();
    let outsider = cards[1].alloc_window(&other, WindowType::Type2).unwrap();
    let rkey = outsider.rkey;
    // The peer's message names the outsider.
    b.receive(0, 16);
    a.send.post(&Op::Send { data: Data::Inline(&[&b"done"[..]]), with: With::Invalidate(rkey) }, SIGNAL);
    assert_eq!(b.next(), Err(Syndrome::RemoteInvalReq));
    assert_eq!(a.next(), Err(Syndrome::RemoteOp));

    let (cards, _a, mut b) = pair(false, 4096);
    let other = cards[0].alloc_pd().unwrap();
    let outsider = cards[0].alloc_window(&other, WindowType::Type2).unwrap();
    let (_, umr) = b.bind(outsider.rkey, 0, 64);
    b.send.post(&Op::Umr { umr, kind: UmrKind::Bind }, SIGNAL);
    assert_eq!(b.next(), Err(Syndrome::MwBind));
}

#[test]
fn bound_window_cannot_be_bound_again() {
    let (cards, _a, mut b) = pair(false, 4096);
    let window = cards[0].alloc_window(&b.pd, WindowType::Type2).unwrap();
    let (rkey, umr) = b.bind(window.rkey, 0, 64);
    b.send.post(&Op::Umr { umr, kind: UmrKind::Bind }, SIGNAL);
    b.next().unwrap();
    b.send.post(&Op::Umr { umr: Umr::local_inv(rkey), kind: UmrKind::LocalInv }, SIGNAL);
    b.next().unwrap();
    let (_, again) = b.bind(rkey, 0, 64);
    b.send.post(&Op::Umr { umr: again, kind: UmrKind::Bind }, SIGNAL);
    b.next().unwrap();
    b.send.post(&Op::Umr { umr: again, kind: UmrKind::Bind }, SIGNAL);
    assert_eq!(b.next(), Err(Syndrome::MwBind));
}

#[test]
fn malformed_requests_fail() {
    let (_cards, mut a, _b) = pair(false, 4096);
    a.send.next = 5;
    a.send.post(&Op::Nop, SIGNAL);
    assert_eq!(a.next(), Err(Syndrome::LocalQpOp));
}

#[test]
fn message_longer_than_its_receive_fails_on_both_sides() {
    let (_cards, mut a, mut b) = pair(true, 4096);
    b.receive(0, 3);
    let message: WorkRequest<'_> = Op::Send { data: Data::Inline(&[&b"hello"[..]]), with: With::Nothing };
    a.send.post(&message, SIGNAL);
    assert_eq!(b.next(), Err(Syndrome::LocalLength));
    assert_eq!(a.next(), Err(Syndrome::RemoteInvalReq));
}

#[test]
fn send_without_receive_fails_after_its_time() {
    if on_hardware("send_without_receive_fails_after_its_time") {
        return;
    }
    let cards = [0, 1].map(|seed| {
        let settings =
            Settings { seed: Some(seed), rnr_timeout: Some(Duration::from_millis(20)), ..Settings::default() };
        software(settings)
    });
    let (mut a, b) = (End::new(&*cards[0], Transport::Rc, 64, false), End::new(&*cards[1], Transport::Rc, 64, false));
    connect(&*cards[0], &a, &*cards[1], &b);
    a.send.post(&Op::Send { data: Data::Inline(&[&b"hello"[..]]), with: With::Nothing }, SIGNAL);
    assert_eq!(a.next(), Err(Syndrome::RnrRetryExceeded));
}

#[test]
fn dropped_peer_fails_requests() {
    let (mut cards, mut a, b) = pair(true, 64);
    drop(b);
    cards.pop();
    let sge = [a.sge(0, 8)];
    for _ in 0..2 {
        a.send.post(&write(&sge, 0, 0x1000), SIGNAL);
    }
    assert_eq!(a.next(), Err(Syndrome::TransportRetryExceeded));
    assert_eq!(a.next(), Err(Syndrome::WrFlush));
}

#[test]
fn datagrams_carry_header_and_may_be_lost() {
    if on_hardware("datagrams_carry_header_and_may_be_lost") {
        return;
    }
    let cards = [1, 2].map(|seed| software(Settings { seed: Some(seed), ..Settings::default() }));
    let (mut a, mut b) =
        (End::new(&*cards[0], Transport::Ud, 4096, false), End::new(&*cards[1], Transport::Ud, 4096, false));
    cards[0].open_datagrams(&a.qp, 11).unwrap();
    cards[1].open_datagrams(&b.qp, 22).unwrap();
    cards[0].create_ah(cards[1].address()).unwrap();
    let mut av = AhAttr { link: LinkLayer::Infiniband { dlid: 0, src_path_bits: 0 }, sl: 0, static_rate: 0, grh: None }
        .address_vector()
        .unwrap();
    av.rgid = cards[1].address().to_bytes();
    b.receive(0, 100);
    let mut send = |qkey| {
        let to = Destination { av, qpn: b.send.parts.qpn, qkey };
        a.send.post(&Op::Datagram { to, data: Data::Inline(&[&b"hello"[..]]), imm: None }, SIGNAL);
        assert_eq!(a.next().unwrap().0, CqeOpcode::Req);
    };
    send(23);
    send(22);
    assert_eq!(b.next().unwrap(), (CqeOpcode::RespSend, 45, 0));
    assert_eq!(&b.memory[40..45], b"hello");
}

#[test]
fn shared_receive_queue_serves_two_queue_pairs() {
    let card = card(3);
    let (mut a, mut c) = (End::new(&*card, Transport::Rc, 4096, false), End::new(&*card, Transport::Rc, 4096, false));
    let pd = card.alloc_pd().unwrap();
    let attr_srq = mlx5::device::SrqAttr { entries: 8, max_sge: 1 };
    let mut srq = SharedRecvQueue::<u32>::new(card.create_srq(&pd, &attr_srq).unwrap()).unwrap();
    let cq = card.create_cq(&CqAttr { entries: 64, compression: card.caps().compression }).unwrap();
    let with_srq = QpAttr { srq: Some(srq.handle().clone()), ..attr(&cq.handle, Transport::Rc) };
    let qps = [card.create_qp(&pd, &with_srq).unwrap(), card.create_qp(&pd, &with_srq).unwrap()];
    let mut memory = vec![0_u8; 4096];
    let base = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the vector outlives the region.
    let mr = unsafe { card.register(&pd, base, 4096, RIGHTS) }.unwrap();
    for (end, qp) in [&a, &c].into_iter().zip(&qps) {
        card.connect(&end.qp, &card.endpoint(&qp.handle).unwrap()).unwrap();
        card.connect(&qp.handle, &card.endpoint(&end.qp).unwrap()).unwrap();
    }
    let mut completions = CompletionQueue::new(cq.parts);
    for round in 0..50_u32 {
        for slot in 0..2 {
            let sge = Sge { addr: mr.addr + u64::from(slot) * 64, length: 64, lkey: mr.lkey };
            srq.post(round * 2 + slot, &[sge]).unwrap();
        }
        srq.ring();
        for end in [&mut a, &mut c] {
            end.send.post(&Op::Send { data: Data::Inline(&[&b"ping"[..]]), with: With::Nothing }, SIGNAL);
            end.next().unwrap();
        }
        let mut taken = 0;
        wait_until("two completions", || {
            let mut seen = Vec::new();
            completions.drain(8, |one| seen.push(one.unwrap().to_cqe())).unwrap();
            for cqe in seen {
                assert_eq!((cqe.byte_cnt.get(), cqe.srqn_uidx.get()), (4, srq.srqn()));
                assert_eq!(srq.complete(cqe.wqe_counter.get()).unwrap() / 2, round);
                taken += 1;
            }
            taken == 2
        });
    }
}

#[test]
fn armed_queue_raises_event() {
    if on_hardware("armed_queue_raises_event") {
        return;
    }
    let card = software(Settings { seed: Some(5), ..Settings::default() });
    let pd = card.alloc_pd().unwrap();
    let raw = card.create_cq(&CqAttr { entries: 16, compression: false }).unwrap();
    let events = card.events(&raw.handle).unwrap();
    let own = card.create_qp(&pd, &attr(&raw.handle, Transport::Rc)).unwrap();
    let mut peer = End::new(&*card, Transport::Rc, 64, false);
    card.connect(&own.handle, &card.endpoint(&peer.qp).unwrap()).unwrap();
    card.connect(&peer.qp, &card.endpoint(&own.handle).unwrap()).unwrap();
    let mut send = Raw { parts: own.send, next: 0 };
    let mut cq = CompletionQueue::new(raw.parts);
    let readable = |wait: Duration| {
        let wait = nix::poll::PollTimeout::try_from(wait).unwrap();
        let mut fds = [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(&events), nix::poll::PollFlags::POLLIN)];
        nix::poll::poll(&mut fds, wait).unwrap() == 1
    };
    send.post(&Op::Nop, SIGNAL);
    // The card polls its queue pairs in turn: once it has completed two requests of another, it has completed this
    // one's.
    for _ in 0..2 {
        peer.send.post(&Op::Nop, SIGNAL);
        peer.next().unwrap();
    }
    assert!(!readable(Duration::ZERO), "the queue is not armed");
    // A completion from before the arming raises an event at once.
    cq.arm(mlx5::cq::Arm::Any);
    assert!(readable(HANG_LIMIT));
}
