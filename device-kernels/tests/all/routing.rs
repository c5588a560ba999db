//! Routing in a hand-made context: each operation's endpoint and target, and the bytes that the card reads.
#![allow(unsafe_code)]

use efa_dp_direct::wqe::{Destination, Geometry, Operation, SendWqe, parse};
use ferrogin_device::{Action, Context, Flags, Status, Window};
use ferrogin_ffi::ext::{POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_test_support::wait::wait_until;
use plain_context::{EndpointSpec, Ring, Spec, TestContext, VALUE, WindowSpec, leak, make_context, window};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

const ENTRIES: usize = 16;
const NRANKS: usize = 2;
const SIGNALS: usize = 2;
const COUNTERS: usize = 1;
const ENDPOINTS: usize = 2 + COUNTERS + SIGNALS;
const SIGNAL: usize = 3;

/// A context of two ranks with one counter and two signals, and a window.
struct Fixture {
    context: Context<'static>,
    rings: Vec<Ring>,
    signal_counts: Vec<&'static AtomicU64>,
    window: Window,
    pool: *const u64,
}

fn fixture(policy: u32, wide_values: bool) -> Fixture {
    let pool: *const u64 = leak([0u64; ENTRIES * ENDPOINTS]).cast();
    let endpoints = (0..ENDPOINTS).map(|i| {
        let wide = i == VALUE && wide_values;
        let has_slots = i == VALUE && !wide || i >= SIGNAL;
        let value_base = if has_slots { pool as u64 + (i * ENTRIES * 8) as u64 } else { 0 };
        EndpointSpec { entries: ENTRIES as u32, wide, max_batch: 4, value_base, start: 0 }
    });
    let targets = 0..((1 + SIGNALS) * NRANKS) as u16;
    let TestContext { context, rings, signals, .. } = make_context(&Spec {
        policy,
        nranks: NRANKS as u32,
        rail: 0,
        endpoints: endpoints.collect(),
        n_counters: COUNTERS as u32,
        n_signals: SIGNALS as u32,
        targets: targets.map(|i| Destination { ah: 10 + i, qpn: 20 + i, qkey: 0x3000_0000 + u32::from(i) }).collect(),
        value_lkey: 0x77,
        scratch: WindowSpec { lkey: 0x88, addr: 0x4000_0000, peers: vec![(0x5000_0000, 0x99); NRANKS] },
    });
    let of_window = WindowSpec { lkey: 0x55, addr: 0x1000_0000, peers: vec![(0x2000_0000, 0x66); NRANKS] };
    Fixture { context, rings, signal_counts: signals, window: window(&of_window, 0), pool }
}

impl Fixture {
    /// Returns each endpoint's rung requests, parsed as the card does, without a byte of the poison.
    fn rung(&self) -> Vec<Vec<SendWqe>> {
        self.rings.iter().map(rung).collect()
    }
}

fn rung(ring: &Ring) -> Vec<SendWqe> {
    let geometry = if ring.wide { Geometry::WIDE } else { Geometry::NARROW };
    let count = ring.doorbell.load(Ordering::Acquire) as usize;
    (0..count).map(|i| parse(&ring.slot(i), &geometry).unwrap_or_else(|e| panic!("request {i}: {e}"))).collect()
}

fn counts(rung: &[Vec<SendWqe>]) -> [usize; ENDPOINTS] {
    std::array::from_fn(|i| rung[i].len())
}

#[test]
fn operation_is_posted_on_endpoint_of_its_counter_or_signal() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let b = fixture(policy, false);
        let put = |action| b.context.put(1, b.window.at(0x10), b.window.at(0x20), 96, action, Flags::NONE).unwrap();
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
fn signal_add_ticks_counter_once_and_shares_doorbells() {
    let b = fixture(POLICY_COMBINING, false);
    b.context.put(1, b.window.at(0), b.window.at(0), 8, Action::counter(0).with_signal(0, 3), Flags::NONE).unwrap();
    assert_eq!(counts(&b.rung()), [0, 0, 1, 2, 0]);
    b.context.signal(1, Action::signal_add(0, 0), Flags::NONE).unwrap();
    assert_eq!(counts(&b.rung()), [1, 0, 1, 2, 0], "adding nothing raises nothing");
    assert_eq!(b.rung()[0][0].dest.qpn, 21);
}

#[test]
fn values_travel_through_slots_or_inline() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let narrow = fixture(policy, false);
        let wide = fixture(policy, true);
        for b in [&narrow, &wide] {
            for (i, bytes) in [1, 2, 4, 8].into_iter().enumerate() {
                let value = 0x1122_3344_5566_7788 + i as u64;
                b.context.put_value(1, b.window.at(8), value, bytes, Action::NONE, Flags::NONE).unwrap();
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
fn aggregated_operations_are_rung_by_next_operation_or_full_batch() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let b = fixture(policy, false);
        let value = |flags| b.context.put_value(1, b.window.at(0), 1, 4, Action::NONE, flags);
        for _ in 0..3 {
            value(Flags::AGGREGATE).unwrap();
        }
        assert_eq!(counts(&b.rung())[VALUE], 0);
        value(Flags::NONE).unwrap();
        assert_eq!(counts(&b.rung())[VALUE], 4);
        // A fifth deferred request would exceed the batch of four.
        for _ in 0..5 {
            value(Flags::AGGREGATE).unwrap();
        }
        assert_eq!(counts(&b.rung())[VALUE], 8);
        // A flush rings the remaining request, and waits for the card.
        let (doorbell, completed) = (b.rings[VALUE].doorbell, b.rings[VALUE].completed);
        let card = std::thread::spawn(move || {
            wait_until("doorbell", || doorbell.load(Ordering::Acquire) == 9);
            completed.store(9, Ordering::Release);
        });
        b.context.flush().unwrap();
        assert_eq!((counts(&b.rung())[VALUE], completed.load(Ordering::Acquire)), (9, 9));
        card.join().unwrap();
    }
}

#[test]
fn arguments_out_of_range_are_refused_without_post() {
    let b = fixture(POLICY_COMBINING, false);
    let none = Window(ptr::null_mut());
    let put = |peer, dst: Window, action| b.context.put(peer, dst.at(0), b.window.at(0), 8, action, Flags::NONE);
    let bad = Err(Status::InvalidArgument);
    assert_eq!(put(2, b.window, Action::NONE), bad);
    assert_eq!(put(u32::MAX, b.window, Action::NONE), bad);
    assert_eq!(put(1, none, Action::NONE), bad);
    assert_eq!(put(1, b.window, Action::signal_inc(2)), bad);
    assert_eq!(put(1, b.window, Action::signal_inc(u16::MAX - 1)), bad);
    assert_eq!(put(1, b.window, Action::counter(1)), bad);
    for bytes in [0, 3, 5, 9, 16] {
        assert_eq!(b.context.put_value(1, b.window.at(0), 1, bytes, Action::NONE, Flags::NONE), bad);
    }
    assert_eq!(b.context.put_value(1, b.window.at(0), 1, 8, Action::counter(0), Flags::NONE), bad);
    assert_eq!(b.context.wait_signal(2, 1), bad);
    assert_eq!(b.context.read_counter(1), Err(Status::InvalidArgument));
    assert_eq!(counts(&b.rung()), [0; ENDPOINTS]);
    // SAFETY: null is refused before anything is read.
    let null = unsafe { Context::from_handle(ptr::null_mut(), 0) };
    assert_eq!(null.err(), Some(Status::InvalidArgument));
}

#[test]
fn signals_count_from_reset_and_past_wrap() {
    let b = fixture(POLICY_COMBINING, false);
    let set = |value: u64| b.signal_counts[0].store(value, Ordering::Release);
    set(0x7fff_fffe);
    b.context.reset_signal(0).unwrap();
    assert_eq!(b.context.read_signal(0), Ok(0));
    set(3);
    assert_eq!(b.context.read_signal(0), Ok(5));
    b.context.wait_signal(0, 5).unwrap();
    assert_eq!(b.context.read_signal(1), Ok(0));
}
