//! A context made by hand: which endpoint an operation is posted on, where it goes, and the bytes that the card finds.
#![allow(unsafe_code)]

use efa_dp_direct::queue::{QpV0, SqV0, WqV0};
use efa_dp_direct::wqe::words::{Stamp, phase_scale};
use efa_dp_direct::wqe::{Destination, Geometry, Hints, Operation, SendWqe, parse};
use ferrogin_device::{Action, Context, Flags, Status, Window};
use ferrogin_ffi::device::{CounterHandle, DevHandle, EndpointHandle, MrHandle, MrPeer};
use ferrogin_ffi::ext::{
    ContextExt, EndpointCold, EndpointExt, EndpointHot, HEADER_MAGIC, HEADER_VERSION, HandleHeader, POLICY_COMBINING,
    POLICY_LOCKED, QueueMemory, TargetWords, VALUE_GENERAL, VALUE_INLINE, VALUE_POOL,
};
use std::mem::zeroed;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

const ENTRIES: usize = 16;
const NRANKS: usize = 2;
const SIGNALS: usize = 2;
const COUNTERS: usize = 1;
const ENDPOINTS: usize = 2 + COUNTERS + SIGNALS;
const VALUE: usize = 1;
/// Largest transfer of one request here.
const MAX_RDMA: u32 = 1 << 30;
const COUNTER: usize = 2;
const SIGNAL: usize = 3;

/// One endpoint's memory, leaked: tests are short.
struct Ring {
    slots: &'static mut [[u64; 16]; ENTRIES],
    doorbell: *mut u32,
    completed: *mut u64,
    wide: bool,
}

struct Bench {
    context: Context<'static>,
    rings: Vec<Ring>,
    signal_counts: [*mut u64; SIGNALS],
    window: Window,
    pool: *const u64,
}

fn leak<T>(value: T) -> *mut T {
    Box::leak(Box::new(value))
}

#[repr(C)]
struct Block {
    header: HandleHeader,
    dev: DevHandle,
}

fn value_way(combining: bool, wide: bool, has_slots: bool) -> u32 {
    match (combining, wide, has_slots) {
        (true, true, _) => VALUE_INLINE,
        (true, _, true) => VALUE_POOL,
        _ => VALUE_GENERAL,
    }
}

fn bench(policy: u32, wide_values: bool) -> Bench {
    // SAFETY: every one of these structs is plain data for which zero is a value.
    let dev: DevHandle = unsafe { zeroed() };
    // SAFETY: as above.
    let header: HandleHeader = unsafe { zeroed() };
    let block = leak(Block { header, dev });
    let pool = leak([0u64; ENTRIES * ENDPOINTS]).cast::<u64>();
    // SAFETY: numbers and pointers, for which zero is a value.
    let context: *mut ContextExt = leak(unsafe { zeroed() });
    let mut rings = Vec::new();
    let mut exts = Vec::new();
    let mut handles = Vec::new();
    for i in 0..ENDPOINTS {
        let wide = i == VALUE && wide_values;
        let slots: &'static mut [[u64; 16]; ENTRIES] = Box::leak(Box::new([[0xa5a5_a5a5_a5a5_a5a5; 16]; ENTRIES]));
        let (doorbell, completed) = (leak(0u32), leak(0u64));
        // SAFETY: plain data.
        let mut qp: QpV0 = unsafe { zeroed() };
        qp.sq = SqV0 {
            wq: WqV0 {
                queue_mask: ENTRIES as u32 - 1,
                queue_size_shift: 4,
                max_batch: 4,
                buf: slots.as_mut_ptr().cast(),
                db: doorbell,
                ..qp.sq.wq
            },
            ..qp.sq
        };
        // SAFETY: plain data.
        let handle: EndpointHandle = unsafe { zeroed() };
        let handle = leak(CounterHandle { base: handle, cntr_value: leak(0u64), cntr_offset: 0 });
        let has_slots = i == VALUE && !wide || i >= SIGNAL;
        let (wqe_size, combining) = (if wide { 128 } else { 64 }, policy == POLICY_COMBINING);
        let cold = EndpointCold {
            handle: handle.cast(),
            sq_buf: slots.as_mut_ptr().cast(),
            sq_db: doorbell,
            ring_mask: ENTRIES as u32 * wqe_size - 1,
            wqe_size,
            phase_bit: ENTRIES as u32,
            phase_scale: phase_scale(ENTRIES as u32),
            value_base: pool as u64 + (i * ENTRIES * 8) as u64,
            value_mask: ENTRIES as u32 - 1,
            value_lkey: 0x77,
            value_way: value_way(combining, wide, has_slots),
            value_slots: if has_slots { ENTRIES as u32 } else { 0 },
            sq_size: ENTRIES as u32,
            max_batch: 4,
            completed,
            errors: ptr::null(),
            errors_base: 0,
            write_inline: if wide { 80 } else { 0 },
            reserved: 0,
            context,
            reserved2: 0,
        };
        // SAFETY: plain data and atomics.
        let hot: EndpointHot = unsafe { zeroed() };
        hot.bound.store(u64::MAX, Ordering::Relaxed);
        let queue = QueueMemory(std::array::from_fn(|_| AtomicU64::new(0)));
        exts.push(EndpointExt { cold, hot, queue });
        let queue = ptr::from_ref(&exts[i].queue).cast_mut();
        // SAFETY: fresh memory with room for it.
        unsafe { queue.cast::<QpV0>().write(qp) };
        handles.push(handle);
        rings.push(Ring { slots, doorbell, completed, wide });
    }
    let targets: Vec<TargetWords> = (0..(1 + SIGNALS) * NRANKS)
        .map(|i| {
            let dest = Destination { ah: 10 + i as u16, qpn: 20 + i as u16, qkey: 0x3000_0000 + i as u32 };
            let Stamp { head, second, third } = Stamp::new((i % NRANKS) as u16, dest, Hints::BURST_PPS_SENSITIVE);
            TargetWords { head, second, third }
        })
        .collect();
    let window = leak([leak(MrTable {
        head: MrHandle { lkey: 0x55, nranks: NRANKS as i32, local_addr: 0x1000_0000, peers: [] },
        peers: [MrPeer { remote_addr: 0x2000_0000, rkey: 0x66, pad: 0 }; NRANKS],
    })]);
    let signals = [handles[SIGNAL], handles[SIGNAL + 1]];
    // SAFETY: the leaked block.
    let dev = unsafe { &mut (*block).dev };
    dev.n_counters = COUNTERS as i32;
    dev.n_signals = SIGNALS as i32;
    dev.nranks = NRANKS as i32;
    dev.counter_handles = leak([handles[COUNTER]]).cast();
    dev.signal_handles = leak(signals).cast();
    dev.scratch_lkey = 0x88;
    dev.scratch_local_addr = 0x4000_0000;
    dev.scratch_remote_addrs = leak([0x5000_0000u64; NRANKS]).cast();
    dev.scratch_remote_rkeys = leak([0x99u32; NRANKS]).cast();
    let endpoints = exts.leak().as_mut_ptr();
    // SAFETY: leaked memory for it.
    unsafe {
        context.write(ContextExt {
            endpoints,
            values: endpoints.wrapping_add(VALUE),
            targets: targets.leak().as_ptr(),
            nranks: NRANKS as u32,
            n_slots: 1 + SIGNALS as u32,
            n_counters: COUNTERS as u32,
            n_signals: SIGNALS as u32,
            short_put: if policy == POLICY_COMBINING { MAX_RDMA.into() } else { 0 },
            rail_id: 0,
            scratch_lkey: 0x88,
            policy,
            value_way: value_way(policy == POLICY_COMBINING, wide_values, !wide_values),
            scratch_local_addr: 0x4000_0000,
            dev,
            n_endpoints: ENDPOINTS as u32,
            max_rdma_size: MAX_RDMA,
            abort_flag: ptr::null_mut(),
            timeout_ns: leak(5_000_000_000),
            reserved: [0; 3],
        })
    };
    // SAFETY: the leaked block.
    let header = unsafe { &mut (*block).header };
    header.magic = HEADER_MAGIC;
    header.version = HEADER_VERSION;
    header.n_contexts = 1;
    header.contexts = context;
    let handle = dev as *mut DevHandle;
    // SAFETY: a handle of the form that the plugin makes, alive for good.
    let context = unsafe { Context::from_handle(handle.cast(), 0) }.unwrap();
    // SAFETY: the leaked handles.
    let signal_counts = signals.map(|handle| unsafe { (*handle).cntr_value });
    Bench { context, rings, signal_counts, window: Window(window.cast()), pool }
}

#[repr(C)]
struct MrTable {
    head: MrHandle,
    peers: [MrPeer; NRANKS],
}

impl Bench {
    /// Requests that were rung on each endpoint, parsed as the card does, with nothing left of the poison.
    fn rung(&self) -> Vec<Vec<SendWqe>> {
        self.rings.iter().map(Ring::rung).collect()
    }
}

impl Ring {
    fn rung(&self) -> Vec<SendWqe> {
        // SAFETY: the leaked doorbell.
        let count = unsafe { self.doorbell.read_volatile() };
        let size = if self.wide { 128 } else { 64 };
        let bytes: Vec<u8> = self.slots.as_flattened().iter().flat_map(|w| w.to_le_bytes()).collect();
        let geometry = if self.wide { Geometry::WIDE } else { Geometry::NARROW };
        (0..count as usize)
            .map(|i| {
                let at = i % ENTRIES * size;
                parse(&bytes[at..at + size], &geometry).unwrap_or_else(|e| panic!("request {i}: {e}"))
            })
            .collect()
    }
}

fn counts(rung: &[Vec<SendWqe>]) -> [usize; ENDPOINTS] {
    std::array::from_fn(|i| rung[i].len())
}

#[test]
fn an_operation_rides_the_endpoint_of_what_it_announces() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let b = bench(policy, false);
        let put = |action| b.context.put(1, b.window, 0x10, b.window, 0x20, 96, action, Flags::NONE).unwrap();
        put(Action::NONE);
        assert_eq!(counts(&b.rung()), [1, 0, 0, 0, 0]);
        put(Action::signal_inc(1));
        assert_eq!(counts(&b.rung()), [1, 0, 0, 0, 1]);
        put(Action::counter(0));
        put(Action::counter(0).with_signal(1, 1));
        let rung = b.rung();
        assert_eq!(counts(&rung), [1, 0, 2, 0, 1], "a counter ticks for the puts that name it and for nothing else");
        // Slot 0 is the peer's data endpoint, slot 2 its signal 1; two ranks.
        let targets: Vec<u16> = [&rung[0][0], &rung[4][0], &rung[2][0], &rung[2][1]].map(|w| w.dest.qpn).into();
        assert_eq!(targets, [21, 25, 21, 25]);
        let Operation::Write { remote, .. } = rung[0][0].op else { panic!("{:?}", rung[0][0].op) };
        assert_eq!((remote.addr, remote.rkey), (0x2000_0010, 0x66));
    }
}

#[test]
fn adding_n_ticks_the_counter_once_and_shares_doorbells() {
    let b = bench(POLICY_COMBINING, false);
    b.context.put(1, b.window, 0, b.window, 0, 8, Action::counter(0).with_signal(0, 3), Flags::NONE).unwrap();
    assert_eq!(counts(&b.rung()), [0, 0, 1, 2, 0]);
    b.context.signal(1, Action::signal_add(0, 0), Flags::NONE).unwrap();
    assert_eq!(counts(&b.rung()), [1, 0, 1, 2, 0], "adding nothing raises nothing");
    assert_eq!(b.rung()[0][0].dest.qpn, 21);
}

#[test]
fn values_go_through_slots_or_inline() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let narrow = bench(policy, false);
        let wide = bench(policy, true);
        for b in [&narrow, &wide] {
            for (i, bytes) in [1, 2, 4, 8].into_iter().enumerate() {
                let value = 0x1122_3344_5566_7788 + i as u64;
                b.context.put_value(1, b.window, 8, value, bytes, Action::NONE, Flags::NONE).unwrap();
            }
            assert_eq!(counts(&b.rung()), [0, 4, 0, 0, 0]);
        }
        // SAFETY: the leaked pool.
        let slot = unsafe { narrow.pool.wrapping_add(VALUE * ENTRIES + 3).read_volatile() };
        assert_eq!(slot, 0x1122_3344_5566_778b);
        let text = format!("{:?}", narrow.rung()[VALUE][3].op);
        assert!(text.contains(&format!("{}", narrow.pool as u64 + (VALUE * ENTRIES + 3) as u64 * 8)), "{text}");
    }
}

#[test]
fn aggregated_operations_wait_for_the_next_or_for_the_batch() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let b = bench(policy, false);
        let value = |flags| b.context.put_value(1, b.window, 0, 1, 4, Action::NONE, flags);
        for _ in 0..3 {
            value(Flags::AGGREGATE).unwrap();
        }
        assert_eq!(counts(&b.rung())[VALUE], 0);
        value(Flags::NONE).unwrap();
        assert_eq!(counts(&b.rung())[VALUE], 4);
        // The fifth deferred one would exceed the batch of four.
        for _ in 0..5 {
            value(Flags::AGGREGATE).unwrap();
        }
        assert_eq!(counts(&b.rung())[VALUE], 8);
        // A flush rings the rest, and waits for the card.
        let completed = b.rings[VALUE].completed as usize;
        let card = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            // SAFETY: the leaked counter; read atomically by the waiter.
            unsafe { std::sync::atomic::AtomicU64::from_ptr(completed as *mut u64) }
                .store(9, std::sync::atomic::Ordering::Release);
        });
        b.context.flush().unwrap();
        assert_eq!(counts(&b.rung())[VALUE], 9);
        card.join().unwrap();
    }
}

#[test]
fn what_is_out_of_range_is_refused_and_nothing_is_posted() {
    let b = bench(POLICY_COMBINING, false);
    let none = Window(ptr::null_mut());
    let put = |peer, dst, action| b.context.put(peer, dst, 0, b.window, 0, 8, action, Flags::NONE);
    let bad = Err(Status::InvalidArgument);
    assert_eq!(put(2, b.window, Action::NONE), bad);
    assert_eq!(put(u32::MAX, b.window, Action::NONE), bad);
    assert_eq!(put(1, none, Action::NONE), bad);
    assert_eq!(put(1, b.window, Action::signal_inc(2)), bad);
    assert_eq!(put(1, b.window, Action::signal_inc(u16::MAX - 1)), bad);
    assert_eq!(put(1, b.window, Action::counter(1)), bad);
    for bytes in [0, 3, 5, 9, 16] {
        assert_eq!(b.context.put_value(1, b.window, 0, 1, bytes, Action::NONE, Flags::NONE), bad);
    }
    assert_eq!(b.context.put_value(1, b.window, 0, 1, 8, Action::counter(0), Flags::NONE), bad);
    assert_eq!(b.context.wait_signal(2, 1), bad);
    assert_eq!(b.context.read_counter(1), Err(Status::InvalidArgument));
    assert_eq!(counts(&b.rung()), [0; ENDPOINTS]);
    // SAFETY: null is refused before anything is read.
    let null = unsafe { Context::from_handle(ptr::null_mut(), 0) };
    assert_eq!(null.err(), Some(Status::InvalidArgument));
}

#[test]
fn signals_count_from_their_reset_and_past_the_wrap() {
    let b = bench(POLICY_COMBINING, false);
    let set = |value: u64| {
        // SAFETY: the leaked counter.
        unsafe { b.signal_counts[0].write_volatile(value) }
    };
    set(0x7fff_fffe);
    b.context.reset_signal(0).unwrap();
    assert_eq!(b.context.read_signal(0), Ok(0));
    set(3);
    assert_eq!(b.context.read_signal(0), Ok(5));
    b.context.wait_signal(0, 5).unwrap();
    assert_eq!(b.context.read_signal(1), Ok(0));
}
