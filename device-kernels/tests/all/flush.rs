//! Flushes in one call, in two steps, and by a group: which posts each waits for.

#![allow(unsafe_code)]

use efa_dp_direct::wqe::Destination;
use ferrogin_device::{Action, Context, Coop, Flags, FlushRequest, Status, Window};
use ferrogin_ffi::ext::{Losses, POLICY_COMBINING, POLICY_LOCKED, STOP_LOST};
use ferrogin_test_support::wait::wait_until;
use plain_context::{
    EndpointSpec, Extras, MAX_RDMA, NO_EXTRAS, NO_TIMEOUT_NS, Spec, TestContext, WindowSpec, leak, let_threads_run,
    make_with, window,
};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;

/// More signals than a request has endpoint entries.
const SIGNALS: u32 = 20;

fn context(policy: u32) -> (TestContext, Window) {
    context_with(policy, &NO_EXTRAS)
}

fn context_with(policy: u32, extras: &Extras) -> (TestContext, Window) {
    let endpoint = EndpointSpec { entries: 16, wide: true, max_batch: 8, value_base: 0, start: 0 };
    let spec = Spec {
        policy,
        nranks: 1,
        rail: 0,
        endpoints: vec![endpoint; 2 + SIGNALS as usize],
        n_counters: 0,
        n_signals: SIGNALS,
        targets: vec![Destination { ah: 1, qpn: 2, qkey: 3 }; 1 + SIGNALS as usize],
        value_lkey: 0,
        scratch: WindowSpec { lkey: 4, addr: 0x1000, peers: vec![(0x2000, 5)] },
    };
    (make_with(&spec, extras), window(&WindowSpec { lkey: 6, addr: 0x3000, peers: vec![(0x4000, 7)] }, 0))
}

/// Raises each of the first `n` signals once.
fn raise(test: &TestContext, n: u32, flags: Flags) {
    for id in 0..n {
        test.context.signal(0, Action::signal_inc(id as u16), flags).unwrap();
    }
}

/// Completes every rung request of the endpoint.
fn complete(test: &TestContext, endpoint: usize) {
    let ring = &test.rings[endpoint];
    ring.completed.store(ring.doorbell.load(Ordering::Acquire).into(), Ordering::Release);
}

fn complete_all(test: &TestContext) {
    (0..test.rings.len()).for_each(|i| complete(test, i));
}

#[test]
fn flush_request_covers_earlier_posts_only() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let (test, win) = context(policy);
        let context = test.context;
        let put = |flags| context.put(0, win.at(0), win.at(0), 8, Action::NONE, flags).unwrap();
        put(Flags::AGGREGATE);
        put(Flags::AGGREGATE);
        let request = context.flush_async().unwrap();
        assert_eq!(test.rings[0].doorbell.load(Ordering::Relaxed), 2, "it rings what was aggregated");
        assert_eq!(context.test_flush(&request), Ok(false));
        complete(&test, 0);
        put(Flags::NONE);
        // One more post is incomplete, but the request doesn't cover it.
        assert_eq!(context.test_flush(&request), Ok(true), "policy {policy}");
        context.wait_flush(&request).unwrap();
        context.wait_flush(&request).unwrap();
        let next = context.flush_async().unwrap();
        assert_eq!(context.test_flush(&next), Ok(false));
        complete(&test, 0);
        assert_eq!((context.test_flush(&next), context.test_flush(&request)), (Ok(true), Ok(true)));
    }
}

#[test]
fn flush_of_idle_context_returns_at_once() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let (test, _) = context(policy);
        test.context.flush().unwrap();
        let request = test.context.flush_async().unwrap();
        assert_eq!(test.context.test_flush(&request), Ok(true));
        test.context.wait_flush(&request).unwrap();
        test.context.wait_flush(&FlushRequest::default()).unwrap();
    }
}

/// More endpoints have incomplete posts than a request has entries, so the wait flushes the others.
#[test]
fn wait_covers_endpoints_without_entry() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        for late in 2..2 + SIGNALS as usize {
            let (test, _) = context(policy);
            raise(&test, SIGNALS, Flags::AGGREGATE);
            let request = test.context.flush_async().unwrap();
            (0..test.rings.len()).filter(|&i| i != late).for_each(|i| complete(&test, i));
            assert_eq!(test.context.test_flush(&request), Ok(false), "endpoint {late} has not completed");
            test.context.set_timeout_ns(1_000_000);
            assert_eq!(test.context.wait_flush(&request), Err(Status::Timeout), "endpoint {late}");
            complete(&test, late);
            test.context.set_timeout_ns(NO_TIMEOUT_NS);
            assert_eq!(test.context.test_flush(&request), Ok(true), "endpoint {late}, policy {policy}");
            test.context.wait_flush(&request).unwrap();
        }
    }
}

/// After two flushes of an idle endpoint, the next flush doesn't look at it; the next post is still flushed.
#[test]
fn posts_after_idle_flushes_are_flushed() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let (test, _) = context(policy);
        let timed_out = |request: &FlushRequest| {
            test.context.set_timeout_ns(1_000_000);
            assert_eq!(test.context.flush(), Err(Status::Timeout), "policy {policy}");
            assert_eq!(test.context.test_flush(request), Ok(false), "policy {policy}");
            test.context.set_timeout_ns(NO_TIMEOUT_NS);
        };
        for id in (0..SIGNALS as u16).chain([3, 3, 0]) {
            test.context.signal(0, Action::signal_inc(id), Flags::AGGREGATE).unwrap();
            let request = test.context.flush_async().unwrap();
            timed_out(&request);
            complete_all(&test);
            assert_eq!(test.context.test_flush(&request), Ok(true));
            (0..3).for_each(|_| test.context.flush().unwrap());
        }
    }
}

/// A flush covers this crate's posts, and skips queues that only NCCL's device code has used. On a queue that both have
/// used, it waits for the posts of both.
#[test]
fn flush_covers_own_posts_beside_posts_of_nccl() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        for own_first in [false, true] {
            let (test, _) = context(policy);
            test.rings[0].nccl_posts(3);
            test.context.set_timeout_ns(1_000_000);
            test.context.flush().unwrap();
            let own = || test.context.signal(0, Action::signal_inc(7), Flags::NONE).unwrap();
            if own_first {
                own();
            }
            test.rings[2 + 7].nccl_posts(2);
            if !own_first {
                own();
            }
            for completed in 0..3 {
                test.rings[2 + 7].completed.store(completed, Ordering::Release);
                assert_eq!(test.context.flush(), Err(Status::Timeout), "policy {policy}, {completed} of 3 complete");
            }
            complete(&test, 2 + 7);
            test.context.flush().unwrap();
            // Once more, on a queue that the flushes removed from the set.
            (0..2).for_each(|_| test.context.flush().unwrap());
            test.rings[2 + 7].nccl_posts(1);
            test.context.flush().unwrap();
            own();
            assert_eq!(test.context.flush(), Err(Status::Timeout), "policy {policy}");
            complete(&test, 2 + 7);
            test.context.flush().unwrap();
        }
    }
}

/// A request is in the caller's memory, which may hold any bytes.
#[test]
fn request_of_no_context_is_refused() {
    let (test, _) = context(POLICY_COMBINING);
    raise(&test, 2, Flags::NONE);
    let (few, _) = context(POLICY_COMBINING);
    let request = test.context.flush_async().unwrap();
    let words = |word: u32, value: u32| {
        // SAFETY: a plain struct of 32 numbers.
        let mut words: [u32; 32] = unsafe { std::mem::transmute(request) };
        words[word as usize] = value;
        // SAFETY: any numbers are a valid request.
        unsafe { std::mem::transmute::<[u32; 32], FlushRequest>(words) }
    };
    for wrong in [words(0, 16), words(0, u32::MAX), words(1, 2 + SIGNALS), words(2, 2 + SIGNALS), words(2, u32::MAX)] {
        assert_eq!(few.context.wait_flush(&wrong), Err(Status::InvalidArgument), "{wrong:?}");
        assert_eq!(few.context.test_flush(&wrong), Err(Status::InvalidArgument), "{wrong:?}");
    }
}

/// CPU threads as a group.
struct Threads<'a> {
    rank: u32,
    size: u32,
    barrier: &'a Barrier,
}

impl Coop for Threads<'_> {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn sync(&self) {
        self.barrier.wait();
    }
}

#[test]
fn group_posts_once_and_divides_flush() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        for size in [1, 3, 40] {
            let (test, _) = context(policy);
            let barrier = Barrier::new(size as usize);
            let flushed = thread::scope(|scope| {
                let group: Vec<_> = (0..size)
                    .map(|rank| {
                        let (barrier, context) = (&barrier, test.context);
                        scope.spawn(move || {
                            let coop = Threads { rank, size, barrier };
                            for id in 0..SIGNALS {
                                let action = Action::signal_inc(id as u16);
                                context.lead(&coop, |context| context.signal(0, action, Flags::AGGREGATE)).unwrap();
                            }
                            context.flush_with(&coop).unwrap();
                        })
                    })
                    .collect();
                // No thread returns before the last endpoint has completed, and the flush has to ring that first.
                wait_until("doorbells", || {
                    (0..test.rings.len() - 1).for_each(|i| complete(&test, i));
                    test.rings[2..].iter().all(|ring| ring.doorbell.load(Ordering::Acquire) != 0)
                });
                let_threads_run();
                let early = group.iter().filter(|thread| thread.is_finished()).count();
                complete_all(&test);
                early
            });
            assert_eq!(flushed, 0, "threads of {size} that were back early, policy {policy}");
            let rung: Vec<u32> = test.rings.iter().map(|ring| ring.doorbell.load(Ordering::Relaxed)).collect();
            assert_eq!((&rung[..2], rung[2..].iter().sum::<u32>()), (&[0, 0][..], SIGNALS), "{rung:?}");
        }
    }
}

#[test]
fn flush_part_beyond_group_is_refused() {
    let (test, _) = context(POLICY_COMBINING);
    for (rank, size) in [(0, 0), (1, 1), (u32::MAX, 3)] {
        assert_eq!(test.context.flush_part(rank, size), Err(Status::InvalidArgument));
    }
    test.context.flush_part(u32::MAX - 1, u32::MAX).unwrap();
}

/// Flushes report the failure of a lost peer's request until the program acknowledges it; a settling call doesn't.
/// Meanwhile, a flush rings deferred posts on other endpoints, which may be to other peers.
#[test]
fn flush_reports_loss_and_rings_other_endpoints() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let (abort, errors) = (leak(0_u32), leak(0_u64));
        let (test, _) = context_with(policy, &Extras { abort, errors, ..NO_EXTRAS });
        // SAFETY: a leaked word, which the context only accesses atomically.
        let abort = unsafe { AtomicU32::from_ptr(abort) };
        // SAFETY: a leaked word, which the context only accesses atomically.
        let errors = unsafe { AtomicU64::from_ptr(errors) };
        let tell = |endpoint: usize, losses: Losses| {
            // SAFETY: the context is leaked.
            let endpoints = unsafe { (*test.context.as_ptr()).routes.endpoints };
            // SAFETY: the context has an endpoint for each ring, and their posting state is atomic.
            let posting = unsafe { &(*endpoints.wrapping_add(endpoint)).posting };
            posting.identified.store(losses.identified, Ordering::Relaxed);
            posting.acknowledged.store(losses.acknowledged, Ordering::Relaxed);
        };
        (0..test.rings.len()).for_each(|endpoint| tell(endpoint, Losses::new(0, 0)));
        raise(&test, 1, Flags::NONE);
        let request = test.context.flush_async().unwrap();
        (0..2).for_each(|_| test.context.signal(0, Action::signal_inc(1), Flags::AGGREGATE).unwrap());
        // All endpoints have the same error counter, so one request of each has failed.
        errors.store(1, Ordering::Release);
        tell(2, Losses::new(1, 0));
        tell(3, Losses::new(1, 1));
        abort.store(STOP_LOST, Ordering::Relaxed);
        assert_eq!(test.context.test_flush(&request), Err(Status::PeerLost), "policy {policy}");
        assert_eq!(test.context.flush(), Err(Status::PeerLost), "policy {policy}");
        assert_eq!(test.rings[3].doorbell.load(Ordering::Relaxed), 2, "policy {policy}");
        test.rings[3].completed.store(1, Ordering::Release);
        assert_eq!(test.context.settle(), Ok(()), "policy {policy}");
        tell(2, Losses::new(1, 1));
        abort.store(0, Ordering::Relaxed);
        assert_eq!(test.context.test_flush(&request), Ok(true), "policy {policy}");
        assert_eq!(test.context.flush(), Ok(()), "policy {policy}");
    }
}

/// A put of two requests posts the second, which raises the signal, once the first has completed.
#[test]
fn signal_of_long_put_waits_for_its_first_part() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let (test, win) = context(policy);
        test.context.set_timeout_ns(1_000_000);
        let bytes = u64::from(MAX_RDMA) + 1;
        let put = test.context.put(0, win.at(0), win.at(0), bytes, Action::signal_inc(0), Flags::NONE);
        assert_eq!(put, Err(Status::Timeout), "policy {policy}");
        let rung = |endpoint: usize| test.rings[endpoint].doorbell.load(Ordering::Relaxed);
        assert_eq!((rung(0), rung(2)), (1, 0), "policy {policy}");
    }
}

/// A count that depends on a failed request never comes.
#[test]
fn card_error_ends_wait_for_signal() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let (test, _) = context_with(policy, &Extras { errors: leak(1_u64), ..NO_EXTRAS });
        test.context.set_timeout_ns(1_000_000);
        assert_eq!(test.context.wait_signal(0, 1), Err(Status::CardError), "policy {policy}");
    }
}

/// The count may depend on deferred posts of the same endpoint.
#[test]
fn wait_for_signal_rings_deferred_posts() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let (test, _) = context(policy);
        raise(&test, 1, Flags::AGGREGATE);
        assert_eq!(test.rings[2].doorbell.load(Ordering::Relaxed), 0);
        test.context.set_timeout_ns(1_000_000);
        assert_eq!(test.context.wait_signal(0, 1), Err(Status::Timeout));
        assert_eq!(test.rings[2].doorbell.load(Ordering::Relaxed), 1, "policy {policy}");
    }
}

#[test]
fn waits_of_context_call_its_progress_function() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let (test, _) = context(policy);
        raise(&test, 1, Flags::NONE);
        assert_eq!(test.progress_calls.load(Ordering::Relaxed), 0, "a post that has room waits for nothing");
        test.context.set_timeout_ns(1_000_000);
        let mut calls = 0;
        for wait in [|context: &Context<'_>| context.flush(), |context: &Context<'_>| context.wait_signal(0, 1)] {
            assert_eq!(wait(&test.context), Err(Status::Timeout));
            let now = test.progress_calls.load(Ordering::Relaxed);
            assert!(now > calls);
            calls = now;
        }
    }
}
