//! `fgin_fast_*` and the calls behind them on the CPU: they post what the ordinary operations post, and refuse what
//! those refuse.

#![allow(unsafe_code)]

use efa_dp_direct::wqe::Destination;
use ferrogin_device::context::fast_path::{Continuation, fgin_continue, fgin_fallback};
use ferrogin_device::context::inline::{fgin_fast_put, fgin_fast_put_value, fgin_fast_signal};
use ferrogin_device::{Action, Context, Flags, Status, Window};
use ferrogin_ffi::ext::{POLICY_COMBINING, POLICY_LOCKED, TargetWords};
use plain_context::{EndpointSpec, Ring, Spec, TestContext, WindowSpec, make_context, window};
use std::ptr;
use std::sync::atomic::Ordering;

const RANKS: u32 = 3;
const SIGNALS: u32 = 2;

/// Creates two contexts of one kind that share a value pool, so that equal posts have equal bytes.
fn twin_contexts(policy: u32, wide: bool) -> ([TestContext; 2], Window) {
    let pool = if wide { 0 } else { Box::leak(Box::new([0u64; 64])).as_ptr() as u64 };
    let endpoint = EndpointSpec { entries: 16, wide, max_batch: 8, value_base: pool, start: 0 };
    let peers = |addr: u64| (0..RANKS).map(|rank| (addr + u64::from(rank), 7 + rank)).collect();
    let twin = || {
        make_context(&Spec {
            policy,
            nranks: RANKS,
            rail: 0,
            endpoints: vec![endpoint.clone(); 2 + SIGNALS as usize],
            n_counters: 0,
            n_signals: SIGNALS,
            // Peers have one more signal than this rank.
            targets: (1..=RANKS as u16 * 4).map(|ah| Destination { ah, qpn: 2, qkey: 3 }).collect(),
            value_lkey: 9,
            scratch: WindowSpec { lkey: 4, addr: 0x1000, peers: peers(0x2000) },
        })
    };
    ([twin(), twin()], window(&WindowSpec { lkey: 6, addr: 0x3000, peers: peers(0x4000) }, 0))
}

/// An operation, its peer, and the signal that it raises by one, if any.
#[derive(Debug, Clone, Copy)]
struct Op {
    kind: Kind,
    peer: u32,
    signal: Option<u32>,
    window: Window,
    aggregate: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Value { bytes: u32 },
    Put { bytes: u64 },
    Signal,
}

const VALUE: u64 = 0x1234;

impl Op {
    /// Calls the fast path.
    fn call_fast(self, context: Context<'_>) -> Continuation {
        let (ctx, win, peer) = (context.as_ptr(), self.window.0, self.peer);
        let (raises, id) = (self.signal.is_some().into(), self.signal.unwrap_or(0));
        let aggregate = if self.aggregate { Flags::AGGREGATE.bits() } else { 0 };
        match self.kind {
            // SAFETY: context and window are leaked; null and arguments out of range are refused before they are used.
            Kind::Value { bytes } => unsafe {
                fgin_fast_put_value(ctx, peer, win, 8, VALUE, bytes, raises, id, aggregate)
            },
            // SAFETY: context and window are leaked; null and arguments out of range are refused before they are used.
            Kind::Put { bytes } => unsafe {
                fgin_fast_put(ctx, peer, win, 8, win, 16, bytes, raises, id, 0, 0, aggregate)
            },
            // SAFETY: context and window are leaked; null and arguments out of range are refused before they are used.
            Kind::Signal => unsafe { fgin_fast_signal(ctx, peer, raises, id, aggregate) },
        }
    }

    /// Calls the operation as a kernel does: the fast path, then the call behind it.
    fn call(self, context: Context<'_>) -> i32 {
        let Continuation { next, word, poster, remote, local, keys } = self.call_fast(context);
        if next.is_nothing() {
            return 0;
        }
        let bytes = match self.kind {
            Kind::Value { bytes } => bytes.into(),
            Kind::Put { bytes } => bytes,
            Kind::Signal => 0,
        };
        let call = if next.is_fallback() { fgin_fallback } else { fgin_continue };
        // SAFETY: the fields that the fast path returned.
        unsafe { call(poster, word, remote, local, keys, bytes as u32, next.bits()) }
    }

    /// Calls the ordinary operation.
    fn call_ordinary(self, context: Context<'_>) -> Result<(), Status> {
        let action = self.signal.map_or(Action::NONE, |id| Action::signal_inc(id as u16));
        let flags = if self.aggregate { Flags::AGGREGATE } else { Flags::NONE };
        match self.kind {
            Kind::Value { bytes } => context.put_value(self.peer, self.window.at(8), VALUE, bytes, action, flags),
            Kind::Put { bytes } => context.put(self.peer, self.window.at(8), self.window.at(16), bytes, action, flags),
            Kind::Signal => context.signal(self.peer, action, flags),
        }
    }
}

fn ops(window: Window) -> Vec<Op> {
    let kinds = [Kind::Value { bytes: 1 }, Kind::Value { bytes: 8 }, Kind::Put { bytes: 100 }, Kind::Signal];
    let signals = [None, Some(0), Some(1), Some(SIGNALS)];
    let all = (0..RANKS).flat_map(|peer| signals.map(|signal| (peer, signal)));
    let all = all.flat_map(|(peer, signal)| kinds.map(|kind| (peer, signal, kind)));
    all.flat_map(|(peer, signal, kind)| [true, false].map(|aggregate| Op { kind, peer, signal, window, aggregate }))
        .collect()
}

#[test]
fn fast_path_and_continuation_post_bytes_of_ordinary_operations() {
    for (policy, wide) in [(POLICY_COMBINING, true), (POLICY_COMBINING, false), (POLICY_LOCKED, true)] {
        let ([fast, ordinary], window) = twin_contexts(policy, wide);
        for op in ops(window) {
            assert_eq!((op.call(fast.context), op.call_ordinary(ordinary.context)), (0, Ok(())), "{op:?}");
            for (fast, ordinary) in fast.rings.iter().zip(&ordinary.rings) {
                assert_eq!(fast.cursors(), ordinary.cursors(), "{op:?}");
                let bytes = |ring: &Ring| (0..ring.spec_entries).map(|i| ring.slot(i)).collect::<Vec<_>>();
                assert_eq!(bytes(fast), bytes(ordinary), "{op:?}");
                let rung = fast.doorbell.load(Ordering::Relaxed);
                assert_eq!(rung, ordinary.doorbell.load(Ordering::Relaxed), "{op:?}");
                for ring in [fast, ordinary] {
                    ring.completed.store(rung.into(), Ordering::Release);
                }
            }
        }
    }
}

#[test]
fn post_with_room_needs_no_continuation() {
    let ([test, _], window) = twin_contexts(POLICY_COMBINING, true);
    let op = Op { kind: Kind::Value { bytes: 4 }, peer: 1, signal: Some(0), window, aggregate: false };
    assert_eq!(op.call(test.context), 0);
    assert!(op.call_fast(test.context).next.is_nothing(), "the first post checked the room");
}

#[test]
fn signal_that_peer_lacks_is_refused_without_post() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let ([test, _], window) = twin_contexts(policy, true);
        let peer = 2;
        // SAFETY: the context is leaked.
        let targets = unsafe { (*test.context.as_ptr()).routes.targets };
        // SAFETY: the table is leaked, and has an entry for signal 0 of each peer after those for no signal.
        unsafe { targets.wrapping_add((RANKS + peer) as usize).cast_mut().write(TargetWords::default()) };
        for kind in [Kind::Value { bytes: 4 }, Kind::Put { bytes: 100 }, Kind::Signal] {
            let op = Op { kind, peer, signal: Some(0), window, aggregate: false };
            assert!(op.call_fast(test.context).next.is_fallback(), "{op:?}");
            assert_eq!(op.call(test.context), Status::InvalidArgument as i32, "{op:?}");
            assert_eq!(op.call_ordinary(test.context), Err(Status::InvalidArgument), "{op:?}");
        }
        for ring in &test.rings {
            assert_eq!((ring.cursors(), ring.doorbell.load(Ordering::Relaxed)), ([0; 3], 0));
        }
    }
}

/// In 0.1.0, the steps of `fgin_fallback` were `fgin_continue`'s.
#[test]
fn step_of_another_release_is_refused_without_post() {
    let ([test, _], window) = twin_contexts(POLICY_COMBINING, true);
    let op = Op { kind: Kind::Put { bytes: 100 }, peer: 1, signal: Some(SIGNALS + 1), window, aggregate: false };
    let Continuation { next, word, poster, remote, local, keys } = op.call_fast(test.context);
    for step in [0, 5, 6, 7] {
        // SAFETY: the fields that the fast path returned.
        let status = unsafe { fgin_continue(poster, word, remote, local, keys, 100, next.bits() & !7 | step) };
        assert_eq!(status, Status::Unsupported as i32, "step {step}");
    }
    for ring in &test.rings {
        assert_eq!((ring.cursors(), ring.doorbell.load(Ordering::Relaxed)), ([0; 3], 0));
    }
}

/// What `nccl_gin.cuh` turns NCCL's AggregateRequests flag into.
#[test]
fn burst_of_eight_aggregated_posts_rings_once() {
    for kind in [Kind::Value { bytes: 4 }, Kind::Put { bytes: 100 }, Kind::Signal] {
        let ([test, _], window) = twin_contexts(POLICY_COMBINING, true);
        let op = |aggregate| Op { kind, peer: 0, signal: Some(0), window, aggregate };
        let rung = || test.rings.iter().map(|ring| ring.doorbell.load(Ordering::Relaxed)).sum::<u32>();
        for _ in 0..7 {
            assert_eq!((op(true).call(test.context), rung()), (0, 0), "{kind:?} leaves the doorbell");
        }
        assert_eq!((op(false).call(test.context), rung()), (0, 8), "{kind:?}: one doorbell for all");
        for _ in 0..8 {
            assert_eq!((op(true).call(test.context), rung()), (0, 8), "{kind:?} leaves the doorbell");
        }
        test.context.ring().expect("a doorbell");
        assert_eq!(rung(), 16, "{kind:?}: the rest");
    }
}

#[test]
fn arguments_out_of_range_are_refused_without_post() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let ([test, _], window) = twin_contexts(policy, true);
        for kind in [Kind::Value { bytes: 4 }, Kind::Put { bytes: 100 }, Kind::Signal] {
            let good = Op { kind, peer: 0, signal: Some(0), window, aggregate: false };
            // Peers with the bits that the headers put next to the peer, and ids whose slot wraps.
            let peers = [RANKS, 1 << 24, 1 << 25, 1 << 31, u32::MAX].map(|peer| Op { peer, ..good });
            let signals = [SIGNALS + 1, 65534, u32::MAX].map(|id| Op { signal: Some(id), ..good });
            for op in peers.into_iter().chain(signals) {
                assert!(op.call_fast(test.context).next.is_fallback(), "{op:?}");
                assert_eq!(op.call(test.context), Status::InvalidArgument as i32, "{op:?}");
            }
            if kind != Kind::Signal {
                let op = Op { window: Window(ptr::null_mut()), ..good };
                assert_eq!(op.call(test.context), Status::InvalidArgument as i32, "{op:?}");
            }
        }
        for bytes in [0, 3, 9, 16] {
            let op = Op { kind: Kind::Value { bytes }, peer: 0, signal: None, window, aggregate: false };
            assert_eq!(op.call(test.context), Status::InvalidArgument as i32, "{op:?}");
        }
        for ring in &test.rings {
            assert_eq!((ring.cursors(), ring.doorbell.load(Ordering::Relaxed)), ([0; 3], 0));
        }
    }
}
