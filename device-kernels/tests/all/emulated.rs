//! Emulated signals in a hand-made context: the requests the card reads, when they are posted, and the words in memory.
#![allow(unsafe_code)]

use efa_dp_direct::wqe::{Destination, Geometry, Operation, SendData, SendWqe, WriteData, parse};
use ferrogin_device::context::fast_path::{Continuation, fgin_fallback};
use ferrogin_device::context::inline::{fgin_fast_put, fgin_fast_put_value, fgin_fast_signal};
use ferrogin_device::{Action, Context, Flags, Sharing, Status, Window, capi};
use ferrogin_ffi::block::EmulatedSpec;
use ferrogin_ffi::ext::{EmulatedPeer, POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_ffi::signals::{Generation, Receiver, Region, Signal, Target};
use ferrogin_test_support::Random;
use ferrogin_test_support::wait::wait_until;
use plain_context::{
    EndpointSpec, Extras, MAX_RDMA, Ring, Spec, TestContext, VALUE, WindowSpec, leak, let_threads_run, make_with,
    window,
};
use std::collections::HashSet;
use std::ops::Range;
use std::ptr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;

const ENTRIES: u32 = 16;
const NRANKS: u32 = 3;
const PEER: u32 = 1;
/// More than a flush request has entries for.
const COUNTERS: u32 = 17;
const FIRST_COUNTER: usize = 2;
const DATA: usize = 0;
const SIGNALS: u32 = 8;
const WORDS: u32 = 4;
const RKEY: u32 = 0x66;
const REMOTE: u64 = 0x2000_0000;

struct Fixture {
    test: TestContext,
    window: Window,
    words: &'static [AtomicU64],
    abort: &'static AtomicU32,
    errors: &'static AtomicU64,
}

/// Creates a context of three ranks with counters. The peer has [`SIGNALS`] signals, this rank [`WORDS`].
fn fixture(policy: u32, wide: bool) -> Fixture {
    fixture_of(policy, wide, SIGNALS)
}

/// Creates the same with another number of signals on the peer.
fn fixture_of(policy: u32, wide: bool, signals: u32) -> Fixture {
    let pool: *const u64 = leak([0u64; ENTRIES as usize]).cast();
    let endpoints = (0..FIRST_COUNTER + COUNTERS as usize).map(|i| {
        let value_base = if i == VALUE && !wide { pool as u64 } else { 0 };
        EndpointSpec { entries: ENTRIES, wide, max_batch: 4, value_base, start: 0 }
    });
    let words: &'static [AtomicU64] = (0..WORDS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().leak();
    let peer = |rank| EmulatedPeer { n_signals: if rank == PEER { signals } else { 0 }, generation: 7 + rank };
    let peers = (0..NRANKS).map(peer).collect();
    let emulated = Some(EmulatedSpec { words: words.as_ptr() as u64, n_signals: WORDS, peers });
    let (abort, errors): (&AtomicU32, &AtomicU64) = (Box::leak(Box::default()), Box::leak(Box::default()));
    let spec = Spec {
        policy,
        nranks: NRANKS,
        rail: 0,
        endpoints: endpoints.collect(),
        n_counters: COUNTERS,
        n_signals: 0,
        targets: (0..NRANKS as u16).map(|i| Destination { ah: 10 + i, qpn: 20 + i, qkey: 0x3000_0000 }).collect(),
        value_lkey: 0x77,
        scratch: WindowSpec { lkey: 0x88, addr: 0x4000_0000, peers: vec![(0x5000_0000, 0x99); NRANKS as usize] },
    };
    let test = make_with(&spec, &Extras { emulated, rank: 2, abort: abort.as_ptr(), errors: errors.as_ptr() });
    let of_window = WindowSpec { lkey: 0x55, addr: 0x1000_0000, peers: vec![(REMOTE, RKEY); NRANKS as usize] };
    Fixture { test, window: window(&of_window, 0), words, abort, errors }
}

/// Returns both policies, with 64-byte and 128-byte requests.
fn fixtures() -> impl Iterator<Item = Fixture> {
    [POLICY_COMBINING, POLICY_LOCKED].into_iter().flat_map(|policy| [false, true].map(|wide| fixture(policy, wide)))
}

const MODES: [Sharing; 3] = [Sharing::Gpu, Sharing::Cta, Sharing::Thread];

fn rung(ring: &Ring) -> Vec<SendWqe> {
    let geometry = if ring.wide { Geometry::WIDE } else { Geometry::NARROW };
    let count = ring.doorbell.load(Ordering::Acquire) as usize;
    (0..count).map(|i| parse(&ring.slot(i), &geometry).unwrap_or_else(|e| panic!("request {i}: {e}"))).collect()
}

/// Returns a request's signal, as the peer's signal proxy reads it; `None` for a request without one.
fn signal_of(request: &SendWqe) -> Option<Signal> {
    assert_eq!(request.dest.qpn, 20 + PEER as u16, "all requests go to the peer's inbox");
    let receiver = Receiver { generation: Generation::new(u64::from(7 + PEER)), n_signals: SIGNALS, nranks: NRANKS };
    match request.op {
        Operation::Write { imm, .. } => imm.map(|bits| receiver.immediate(bits).unwrap()),
        Operation::Send { data: SendData::Inline(data), imm: None } => {
            let region = Region { start: REMOTE, bytes: 4096 };
            Some(receiver.message(data.data(), |rkey| (rkey == RKEY).then_some(region)).unwrap())
        }
        other => panic!("{other:?}"),
    }
}

fn indexed(id: u32, add: u64) -> Option<Signal> {
    Some(Signal { target: Target::Indexed(id), add })
}

fn va(offset: u64, add: u64) -> Option<Signal> {
    Some(Signal { target: Target::Va { rkey: RKEY, address: REMOTE + offset }, add })
}

impl Fixture {
    fn context(&self) -> Context<'static> {
        self.test.context
    }

    /// Returns the endpoint's rung requests.
    fn requests(&self, endpoint: usize) -> Vec<SendWqe> {
        rung(&self.test.rings[endpoint])
    }

    fn signals(&self, endpoint: usize) -> Vec<Option<Signal>> {
        self.requests(endpoint).iter().map(signal_of).collect()
    }

    fn counts(&self) -> Vec<u32> {
        self.test.rings.iter().map(|ring| ring.doorbell.load(Ordering::Acquire)).collect()
    }

    /// Returns whether a call on this context has waited.
    fn has_waited(&self) -> bool {
        self.test.progress_calls.load(Ordering::Relaxed) != 0
    }

    fn complete(&self, endpoint: usize) {
        let ring = &self.test.rings[endpoint];
        ring.completed.store(ring.doorbell.load(Ordering::Acquire).into(), Ordering::Release);
    }

    fn put(&self, bytes: u64, action: Action, flags: Flags) -> Result<(), Status> {
        self.context().put(PEER, self.window.at(0x10), self.window.at(0x20), bytes, action, flags)
    }

    /// Calls `operation` in a thread until the endpoints in `rung` have that many requests. Then completes one endpoint
    /// after another: the call must post nothing more, and not return before the last one has completed.
    fn waits_for(&self, rung: &[(usize, u32)], operation: impl FnOnce() -> Result<(), Status> + Send) {
        thread::scope(|scope| {
            let call = scope.spawn(operation);
            let expected = |counts: &[u32]| rung.iter().all(|&(endpoint, count)| counts[endpoint] == count);
            wait_until("requests", || expected(&self.counts()));
            let counts = self.counts();
            for &(endpoint, _) in rung.iter().rev() {
                let_threads_run();
                assert!(!call.is_finished(), "the call returned before endpoint {endpoint} had completed");
                assert_eq!(self.counts(), counts, "a request was posted before endpoint {endpoint} had completed");
                self.complete(endpoint);
            }
            call.join().unwrap().unwrap();
        });
    }
}

#[test]
fn weak_signal_is_immediate_of_its_put() {
    for b in fixtures() {
        let mut expected = Vec::new();
        for (mode, id) in MODES.into_iter().zip(0..) {
            let flags = Flags::NONE.shared(mode);
            b.put(96, Action::signal_add(id, 4096), flags).unwrap();
            b.context().put_value(PEER, b.window.at(8), 5, 4, Action::signal_inc(id), flags).unwrap();
            b.context().signal(PEER, Action::signal_add(id, 9), flags).unwrap();
            expected.extend([indexed(id.into(), 4096), indexed(id.into(), 9)]);
        }
        assert_eq!(b.signals(DATA), expected);
        assert_eq!(b.signals(VALUE), [indexed(0, 1), indexed(1, 1), indexed(2, 1)]);
        let Operation::Write { remote, data: WriteData::One(from), .. } = b.requests(DATA)[0].op else { panic!() };
        assert_eq!((remote.addr, from.length, from.addr), (REMOTE + 0x10, 96, 0x1000_0020));
        let Operation::Write { remote, data: WriteData::One(from), .. } = b.requests(DATA)[1].op else { panic!() };
        assert_eq!((remote.addr, from.length), (0x5000_0000, 0), "an empty write goes to the scratch memory");
    }
}

#[test]
fn counter_posts_put_with_its_signal() {
    for b in fixtures() {
        b.put(96, Action::counter(3).with_signal(2, 5), Flags::NONE).unwrap();
        b.context().signal(PEER, Action::counter(3).with_signal(1, 1), Flags::NONE).unwrap();
        assert_eq!(b.signals(FIRST_COUNTER + 3), [indexed(2, 5), indexed(1, 1)]);
        assert_eq!(b.counts().iter().sum::<u32>(), 2);
        // The counter counts the put, and the signal comes from the data endpoint.
        b.waits_for(&[(FIRST_COUNTER + 4, 1)], || b.put(96, Action::counter(4).with_signal(2, 5000), Flags::NONE));
        assert_eq!(b.signals(FIRST_COUNTER + 4), [None]);
        assert_eq!(b.signals(DATA), [indexed(2, 5000)]);
        // Without a put, the counter counts the signal.
        let signal = || b.context().signal(PEER, Action::counter(5).with_signal(2, 5000), Flags::NONE);
        signal().unwrap();
        assert_eq!(b.signals(FIRST_COUNTER + 5), [indexed(2, 5000)]);
    }
}

#[test]
fn signal_that_no_immediate_holds_follows_its_put() {
    for b in fixtures() {
        let (at, context) = (b.window.at(24), b.context());
        let from = b.window.at(0x20);
        b.waits_for(&[(DATA, 1)], || b.put(96, Action::signal_add(7, 4097), Flags::NONE));
        let put = |counter| context.put_signal_at(PEER, b.window.at(0), from, 8, at, u64::MAX, counter, Flags::NONE);
        b.waits_for(&[(DATA, 3)], || put(Action::NONE));
        let value = || context.put_value_signal_at(PEER, b.window.at(0), 1, 8, at, 1 << 40, Flags::NONE);
        b.waits_for(&[(VALUE, 1)], value);
        b.waits_for(&[(FIRST_COUNTER, 1)], || put(Action::counter(0)));
        let rest = [va(24, 1 << 40), va(24, u64::MAX)];
        assert_eq!(b.signals(DATA), [&[None, indexed(7, 4097), None, va(24, u64::MAX)][..], &rest].concat());
        assert_eq!((b.signals(VALUE), b.signals(FIRST_COUNTER)), (vec![None], vec![None]));
    }
}

#[test]
fn weak_signal_alone_waits_for_nothing() {
    for b in fixtures() {
        b.put(96, Action::NONE, Flags::NONE).unwrap();
        b.context().signal_at(PEER, b.window.at(8), 3, Flags::NONE).unwrap();
        b.context().signal(PEER, Action::signal_add(0, 70_000), Flags::NONE).unwrap();
        b.context()
            .put_signal_at(PEER, b.window.at(0), b.window.at(0), 0, b.window.at(0), 1, Action::NONE, Flags::NONE)
            .unwrap();
        assert_eq!(b.signals(DATA), [None, va(8, 3), indexed(0, 70_000), va(0, 1)]);
    }
}

/// A strong signal covers the posts on all endpoints (more than a flush request has entries for), including those of
/// other threads and deferred ones.
#[test]
fn strong_signal_follows_all_earlier_posts() {
    for b in fixtures() {
        let context = b.context();
        let earlier = || {
            for id in 0..COUNTERS as u16 {
                b.put(8, Action::counter(id), Flags::AGGREGATE).unwrap();
            }
            b.put(8, Action::NONE, Flags::AGGREGATE).unwrap();
            context.put_value(PEER, b.window.at(0), 1, 4, Action::NONE, Flags::AGGREGATE).unwrap();
        };
        let strong: [&(dyn Fn() -> Result<(), Status> + Sync); 4] = [
            &|| context.signal(PEER, Action::signal_inc(1), Flags::STRONG),
            &|| context.signal_at(PEER, b.window.at(16), 2, Flags::STRONG),
            &|| b.put(8, Action::signal_add(2, 6), Flags::STRONG),
            &|| context.put_value(PEER, b.window.at(0), 1, 8, Action::signal_add(2, 7), Flags::STRONG),
        ];
        let sent = [indexed(1, 1), va(16, 2), indexed(2, 6), indexed(2, 7)];
        for (i, (operation, sent)) in strong.into_iter().zip(sent).enumerate() {
            let before = b.counts();
            thread::scope(|scope| scope.spawn(earlier).join().unwrap());
            let own = |endpoint: usize| u32::from(i == 2 && endpoint == DATA || i == 3 && endpoint == VALUE);
            let rung: Vec<_> = before.iter().enumerate().map(|(i, count)| (i, count + 1 + own(i))).collect();
            b.waits_for(&rung, operation);
            assert_eq!(b.signals(DATA).last(), Some(&sent));
            // Gives the next round room, and leaves nothing to complete.
            (0..rung.len()).for_each(|endpoint| b.complete(endpoint));
        }
    }
}

#[test]
fn later_posts_do_not_prolong_strong_signal() {
    for b in fixtures() {
        b.put(8, Action::NONE, Flags::NONE).unwrap();
        thread::scope(|scope| {
            let call = scope.spawn(|| b.context().signal(PEER, Action::signal_inc(1), Flags::STRONG));
            wait_until("wait of the signal for the put", || b.has_waited());
            b.complete(DATA);
            // Each post finds the wait either over or waiting only for the first put; none of them completes.
            for _ in 0..5 {
                b.put(8, Action::NONE, Flags::NONE).unwrap();
            }
            call.join().unwrap().unwrap();
        });
        assert_eq!(b.signals(DATA).iter().flatten().count(), 1);
    }
}

#[test]
fn signal_of_long_put_follows_all_its_parts() {
    for b in fixtures() {
        let bytes = u64::from(MAX_RDMA) + 100;
        b.waits_for(&[(DATA, 2)], || b.put(bytes, Action::signal_inc(3), Flags::NONE));
        assert_eq!(b.signals(DATA), [None, None, indexed(3, 1)]);
        b.complete(DATA);
        thread::scope(|scope| {
            let call = scope.spawn(|| b.put(bytes, Action::counter(0).with_signal(3, 2), Flags::AGGREGATE));
            let finished = || {
                [DATA, FIRST_COUNTER].iter().for_each(|&endpoint| b.complete(endpoint));
                call.is_finished()
            };
            wait_until("end of the put", finished);
            call.join().unwrap().unwrap();
        });
        b.context().ring().unwrap();
        assert_eq!(b.signals(DATA)[3..], [None, indexed(3, 2)], "the counter's endpoint posts the last part");
        assert_eq!(b.signals(FIRST_COUNTER), [None]);
    }
}

#[test]
fn aggregated_signals_are_rung_later() {
    for b in fixtures() {
        b.put(8, Action::signal_inc(1), Flags::AGGREGATE).unwrap();
        b.context().signal_at(PEER, b.window.at(0), 2, Flags::AGGREGATE).unwrap();
        assert_eq!(b.counts()[DATA], 0);
        b.context().ring().unwrap();
        assert_eq!(b.signals(DATA), [indexed(1, 1), va(0, 2)]);
        // A signal that has waited for its value is rung at once: no later value would ring its queue.
        let (context, at) = (b.context(), b.window.at(0));
        b.waits_for(&[(VALUE, 1)], || context.put_value_signal_at(PEER, at, 1, 8, at, 3, Flags::AGGREGATE));
        assert_eq!(b.signals(DATA).last(), Some(&va(0, 3)));
    }
}

#[test]
fn amount_of_zero_is_no_signal() {
    for b in fixtures() {
        for flags in [Flags::NONE, Flags::STRONG] {
            b.put(8, Action::signal_add(1, 0), flags).unwrap();
            b.context()
                .put_signal_at(PEER, b.window.at(0), b.window.at(0), 8, b.window.at(0), 0, Action::NONE, flags)
                .unwrap();
        }
        assert_eq!(b.signals(DATA), [None; 4]);
        b.put(8, Action::NONE, Flags::STRONG).unwrap();
        assert_eq!(b.signals(DATA), [None; 5], "without a signal the flag has no meaning");
    }
}

#[test]
fn invalid_arguments_post_nothing() {
    for b in fixtures() {
        let (context, here) = (b.context(), b.window.at(0));
        let nowhere = Window(ptr::null_mut()).at(0);
        let bad = Err(Status::InvalidArgument);
        for flags in [Flags::NONE, Flags::STRONG] {
            assert_eq!(b.put(8, Action::signal_inc(SIGNALS as u16), flags), bad);
            assert_eq!(b.put(8, Action::signal_inc(u16::MAX - 2), flags), bad);
            assert_eq!(b.put(8, Action::signal_inc(0).with_counter(COUNTERS as u16), flags), bad);
            assert_eq!(context.put(PEER, nowhere, here, 8, Action::signal_inc(0), flags), bad);
            assert_eq!(context.put(PEER, here, nowhere, 8, Action::signal_inc(0), flags), bad);
            assert_eq!(context.put_value(PEER, nowhere, 1, 4, Action::signal_inc(0), flags), bad);
            assert_eq!(context.put_value(PEER, here, 1, 3, Action::signal_inc(0), flags), bad);
            assert_eq!(context.put_value(PEER, here, 1, 4, Action::signal_inc(0).with_counter(0), flags), bad);
            for peer in [NRANKS, u32::MAX] {
                assert_eq!(context.signal(peer, Action::signal_inc(0), flags), bad);
                assert_eq!(context.signal_at(peer, here, 1, flags), bad);
            }
            assert_eq!(context.signal(0, Action::signal_inc(0), flags), bad, "the peer has no signals");
            for word in [b.window.at(4), b.window.at(7), b.window.at(u64::MAX - 7), nowhere] {
                for amount in [0, 1] {
                    assert_eq!(context.signal_at(PEER, word, amount, flags), bad, "{word:?}");
                    let put = context.put_signal_at(PEER, here, here, 8, word, amount, Action::NONE, flags);
                    assert_eq!(put, bad, "{word:?}");
                    assert_eq!(context.put_value_signal_at(PEER, here, 1, 8, word, amount, flags), bad, "{word:?}");
                }
            }
            let action = Action::signal_inc(0);
            assert_eq!(context.put_signal_at(PEER, here, here, 8, here, 1, action, flags), bad, "two signals");
            assert_eq!(context.put_signal_at(PEER, here, nowhere, 8, here, 1, Action::NONE, flags), bad);
        }
        for id in [WORDS, u32::MAX] {
            assert_eq!(context.read_signal(id), Err(Status::InvalidArgument));
            assert_eq!(context.wait_signal(id, 0), bad);
            assert_eq!(context.reset_signal(id), bad);
        }
        context.ring().unwrap();
        assert_eq!(b.counts().iter().sum::<u32>(), 0);
    }
}

#[test]
fn failed_wait_raises_no_signal() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        for status in [Status::Aborted, Status::CardError, Status::Timeout] {
            let b = fixture(policy, false);
            let strong = || b.put(8, Action::signal_inc(1), Flags::STRONG);
            let result = thread::scope(|scope| {
                let call = scope.spawn(strong);
                wait_until("doorbell of the put", || b.counts()[DATA] == 1);
                match status {
                    Status::Aborted => b.abort.store(1, Ordering::Release),
                    Status::CardError => b.errors.store(1, Ordering::Release),
                    _ => b.context().set_timeout_ns(1_000_000),
                }
                call.join().unwrap()
            });
            assert_eq!(result, Err(status));
            assert_eq!(b.signals(DATA), [None]);
        }
    }
}

#[test]
fn words_are_read_waited_for_and_reset_whole() {
    for b in fixtures() {
        let context = b.context();
        assert_eq!(context.read_signal(3), Ok(0));
        b.words[3].store(1 << 31, Ordering::Release);
        assert_eq!(context.read_signal(3), Ok(1 << 31));
        context.wait_signal(3, 1 << 31).unwrap();
        context.set_timeout_ns(1_000_000);
        assert_eq!(context.wait_signal(3, (1 << 31) + 1), Err(Status::Timeout), "no wrap at 2^31");
        b.words[3].fetch_add(u64::MAX << 32, Ordering::AcqRel);
        context.wait_signal(3, (u64::MAX << 32) + (1 << 31)).unwrap();
        context.reset_signal(3).unwrap();
        assert_eq!((context.read_signal(3), b.words[3].load(Ordering::Relaxed)), (Ok(0), 0));
        assert_eq!(context.wait_signal(3, 1), Err(Status::Timeout));
        b.abort.store(1, Ordering::Release);
        assert_eq!(context.wait_signal(3, 1), Err(Status::Aborted));
        context.wait_signal(3, 0).unwrap();
    }
}

#[test]
fn wait_for_word_rings_deferred_posts_and_lets_card_work() {
    for b in fixtures() {
        b.put(8, Action::signal_inc(1), Flags::AGGREGATE).unwrap();
        let word = &b.words[0];
        thread::scope(|scope| {
            let call = scope.spawn(|| b.context().wait_signal(0, 5));
            wait_until("doorbell and progress of the card", || b.counts()[DATA] != 0 && b.has_waited());
            word.store(5, Ordering::Release);
            call.join().unwrap().unwrap();
        });
    }
}

#[test]
fn contexts_with_signals_of_card_have_no_others() {
    let b = fixture(POLICY_COMBINING, false);
    let spec = |n_signals: u32| Spec {
        policy: POLICY_COMBINING,
        nranks: NRANKS,
        rail: 0,
        endpoints: vec![
            EndpointSpec { entries: 16, wide: true, max_batch: 8, value_base: 0, start: 0 };
            2 + n_signals as usize
        ],
        n_counters: 0,
        n_signals,
        targets: vec![Destination { ah: 1, qpn: 2, qkey: 3 }; ((1 + n_signals) * NRANKS) as usize],
        value_lkey: 0,
        scratch: WindowSpec { lkey: 4, addr: 0x1000, peers: vec![(0x2000, 5); NRANKS as usize] },
    };
    let card = plain_context::make_context(&spec(2));
    let (context, here) = (card.context, b.window.at(0));
    let refused = Err(Status::Unsupported);
    assert_eq!(context.put(PEER, here, here, 8, Action::signal_inc(0), Flags::STRONG), refused);
    assert_eq!(context.put_value(PEER, here, 1, 8, Action::signal_inc(0), Flags::STRONG), refused);
    assert_eq!(context.signal(PEER, Action::signal_inc(0), Flags::STRONG.shared(Sharing::Thread)), refused);
    assert_eq!(context.signal_at(PEER, here, 1, Flags::NONE), refused);
    assert_eq!(context.put_value_signal_at(PEER, here, 1, 8, here, 1, Flags::NONE), refused);
    assert_eq!(context.put_signal_at(PEER, here, here, 8, here, 1, Action::NONE, Flags::NONE), refused);
    assert!(card.rings.iter().all(|ring| ring.doorbell.load(Ordering::Relaxed) == 0));
    context.put(PEER, here, here, 8, Action::signal_inc(0), Flags::NONE).unwrap();
    assert_eq!(card.rings[2].doorbell.load(Ordering::Relaxed), 1);
    // Without a signal, the flag has no meaning.
    context.put(PEER, here, here, 8, Action::NONE, Flags::STRONG).unwrap();
    assert_eq!(card.rings[0].doorbell.load(Ordering::Relaxed), 1);
}

/// A card that completes requests in any order. When it reads a strong signal, it checks that everything posted earlier
/// by the signal's thread, or by all of `threads` if there are any, has completed.
struct Card<'a> {
    b: &'a Fixture,
    under_way: Vec<(usize, u64)>,
    completed: HashSet<u64>,
    strong: u64,
    threads: Range<u64>,
    /// What the first strong signal that came too early should have waited for.
    early: Option<String>,
}

/// Returns the tag of a thread's put `n`: its offset in the window.
fn tag(thread: u64, n: u64) -> u64 {
    8 * (thread << 20 | n)
}

impl Card<'_> {
    fn work(&mut self, random: &mut Random) {
        for endpoint in 0..self.b.test.rings.len() {
            let ring = &self.b.test.rings[endpoint];
            let under_way = self.under_way.iter().filter(|request| request.0 == endpoint).count() as u64;
            let read = ring.completed.load(Ordering::Relaxed) + under_way;
            for at in read..u64::from(ring.doorbell.load(Ordering::Acquire)) {
                let geometry = if ring.wide { Geometry::WIDE } else { Geometry::NARROW };
                let request = parse(&ring.slot(at as usize), &geometry).unwrap();
                if let (Operation::Send { .. }, Some(signal)) = (request.op, signal_of(&request)) {
                    let Target::Va { address, .. } = signal.target else { panic!("{signal:?}") };
                    self.check((address - REMOTE) / 8, signal.add - 1);
                    self.under_way.push((endpoint, u64::MAX));
                } else {
                    let Operation::Write { remote, .. } = request.op else { panic!("{request:?}") };
                    self.under_way.push((endpoint, remote.addr - REMOTE));
                }
            }
        }
        while !self.under_way.is_empty() && !random.one_in(3) {
            let (endpoint, tag) = self.under_way.swap_remove(random.index(self.under_way.len()));
            self.completed.insert(tag);
            self.b.test.rings[endpoint].completed.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Works until the posting threads are `done`.
    fn serve_until(&mut self, random: &mut Random, done: impl Fn() -> bool) {
        // Many steps between two pauses of the wait.
        wait_until("end of the threads", || {
            (0..100).any(|_| {
                self.work(random);
                thread::yield_now();
                done()
            })
        });
        self.work(random);
    }

    /// Checks a strong signal from a thread that had posted `puts` puts before it.
    fn check(&mut self, thread: u64, puts: u64) {
        self.strong += 1;
        let threads = if self.threads.is_empty() { thread..thread + 1 } else { self.threads.clone() };
        for (thread, n) in threads.flat_map(|thread| (0..puts).map(move |n| (thread, n))) {
            if !self.completed.contains(&tag(thread, n)) {
                self.early.get_or_insert(format!("put {n} of thread {thread} has not completed"));
            }
        }
    }
}

#[test]
fn strong_signals_of_threads_find_their_puts_complete() {
    const THREADS: u64 = 3;
    const ROUNDS: u64 = 40;
    for b in fixtures() {
        let done = AtomicU32::new(0);
        let mut card =
            Card { b: &b, under_way: Vec::new(), completed: HashSet::new(), strong: 0, threads: 0..0, early: None };
        thread::scope(|scope| {
            for at in 0..THREADS {
                let (b, done) = (&b, &done);
                scope.spawn(move || {
                    let (mut random, mut n) = (Random::new(at + 1), 0);
                    for _ in 0..ROUNDS {
                        for _ in 0..random.below(6) {
                            let flags = if random.one_in(2) { Flags::AGGREGATE } else { Flags::NONE };
                            let (to, from) = (b.window.at(tag(at, n)), b.window.at(0));
                            let put = |action| b.context().put(PEER, to, from, 8, action, flags).unwrap();
                            match random.below(3) {
                                0 => put(Action::counter(random.below(3) as u16)),
                                1 => put(Action::signal_inc(0)),
                                _ => b.context().put_value(PEER, to, 1, 4, Action::NONE, flags).unwrap(),
                            }
                            n += 1;
                        }
                        b.context().signal_at(PEER, b.window.at(8 * at), n + 1, Flags::STRONG).unwrap();
                    }
                    done.fetch_add(1, Ordering::AcqRel);
                });
            }
            card.serve_until(&mut Random::new(9), || done.load(Ordering::Acquire) == THREADS as u32);
        });
        assert_eq!((card.strong, card.early), (THREADS * ROUNDS, None));
    }
}

#[test]
fn id_that_stands_for_larger_ones_is_no_signal() {
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        let b = fixture_of(policy, false, 1 << 17);
        let (context, here, invalid) = (b.context(), b.window.at(0), Err(Status::InvalidArgument));
        for (id, flags) in [(65534, Flags::NONE), (u16::MAX, Flags::NONE), (65534, Flags::STRONG)] {
            let action = Action::signal_inc(id);
            assert_eq!(context.put(PEER, here, here, 8, action, flags), invalid);
            assert_eq!(context.put_value(PEER, here, 1, 8, action, flags), invalid);
            assert_eq!(context.signal(PEER, action, flags), invalid);
        }
        assert_eq!(b.counts().iter().sum::<u32>(), 0);
        assert_eq!(context.signal(PEER, Action::signal_inc(65533), Flags::NONE), Ok(()));
        assert_eq!(b.counts()[DATA], 1);
    }
}

/// Threads put and meet like the lanes of a warp; then one or all of them raise a strong signal, which must come after
/// everyone's puts.
#[test]
fn strong_signal_after_meeting_covers_puts_of_all_threads() {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 20;
    for (b, signallers) in [1, THREADS].into_iter().flat_map(|n| fixtures().map(move |b| (b, n))) {
        let (done, meeting) = (AtomicU32::new(0), Barrier::new(THREADS as usize));
        let mut card = Card {
            b: &b,
            under_way: Vec::new(),
            completed: HashSet::new(),
            strong: 0,
            threads: 0..THREADS,
            early: None,
        };
        thread::scope(|scope| {
            for at in 0..THREADS {
                let (b, done, meeting) = (&b, &done, &meeting);
                scope.spawn(move || {
                    for n in 0..ROUNDS {
                        let (to, from) = (b.window.at(tag(at, n)), b.window.at(0));
                        let flags = if at % 2 == 0 { Flags::AGGREGATE } else { Flags::NONE };
                        match at % 3 {
                            0 => b.context().put_value(PEER, to, 1, 4, Action::NONE, flags).unwrap(),
                            _ => b.context().put(PEER, to, from, 8, Action::NONE, flags).unwrap(),
                        }
                        meeting.wait();
                        if at < signallers {
                            b.context().signal_at(PEER, b.window.at(8 * at), n + 2, Flags::STRONG).unwrap();
                        }
                        meeting.wait();
                    }
                    done.fetch_add(1, Ordering::AcqRel);
                });
            }
            card.serve_until(&mut Random::new(5), || done.load(Ordering::Acquire) == THREADS as u32);
        });
        assert_eq!((card.strong, card.early), (signallers * ROUNDS, None));
    }
}

/// The call behind the fast path raises a kernel's signals.
#[test]
fn fallback_of_fast_path_raises_signals() {
    for b in fixtures() {
        let (ctx, win) = (b.context().as_ptr(), b.window.0);
        let finish = |left: Continuation, bytes: u64| {
            let Continuation { next, word, poster, remote, local, keys } = left;
            assert!(next.is_fallback());
            // SAFETY: the fields that the fast path returned.
            unsafe { fgin_fallback(poster, word, remote, local, keys, bytes as u32, next.bits()) }
        };
        let put = |peer, bytes, signal, counter: Option<u32>, flags| {
            let (has, id) = (counter.is_some().into(), counter.unwrap_or(0));
            let (ctx, win) = (b.context().as_ptr(), b.window.0);
            // SAFETY: context and window are leaked.
            finish(unsafe { fgin_fast_put(ctx, peer, win, 8, win, 16, bytes, 1, signal, has, id, flags) }, bytes)
        };
        let value = |peer, signal| {
            // SAFETY: context and window are leaked.
            finish(unsafe { fgin_fast_put_value(ctx, peer, win, 8, 5, 4, 1, signal, 0) }, 4)
        };
        // SAFETY: the context is leaked.
        let signal = |peer, signal| finish(unsafe { fgin_fast_signal(ctx, peer, 1, signal, 0) }, 0);
        let none = Window(ptr::null_mut()).0;
        // SAFETY: the context is leaked, and null is refused.
        let refused = finish(unsafe { fgin_fast_put(ctx, PEER, none, 8, win, 16, 8, 1, 0, 0, 0, 0) }, 8);
        let bad = Status::InvalidArgument as i32;
        assert_eq!(refused, bad);
        for (peer, id) in [(PEER, SIGNALS), (PEER, 1 << 16), (PEER, u32::MAX), (0, 0), (NRANKS, 0), (u32::MAX, 0)] {
            assert_eq!((put(peer, 8, id, None, 0), value(peer, id), signal(peer, id)), (bad, bad, bad), "{peer} {id}");
        }
        assert_eq!(put(PEER, 8, 0, Some(COUNTERS), 0), bad);
        assert_eq!(b.counts().iter().sum::<u32>(), 0);
        assert_eq!((put(PEER, 96, 1, None, Flags::AGGREGATE.bits()), b.counts()[DATA]), (0, 0));
        assert_eq!((put(PEER, 96, 2, None, 0), put(PEER, 0, 3, None, 0), signal(PEER, 4)), (0, 0, 0));
        assert_eq!((put(PEER, 96, 5, Some(2), 0), value(PEER, 6)), (0, 0));
        assert_eq!(b.signals(DATA), [1, 2, 3, 4].map(|id| indexed(id, 1)));
        assert_eq!((b.signals(FIRST_COUNTER + 2), b.signals(VALUE)), (vec![indexed(5, 1)], vec![indexed(6, 1)]));
        let Operation::Write { remote, data: WriteData::One(from), .. } = b.requests(DATA)[1].op else { panic!() };
        assert_eq!((remote.addr, remote.rkey, from.length, from.addr), (REMOTE + 8, RKEY, 96, 0x1000_0010));
        let long = u64::from(MAX_RDMA) * 4 + 100;
        b.waits_for(&[(DATA, 9)], || match put(PEER, long, 7, None, 0) {
            0 => Ok(()),
            code => panic!("{code}"),
        });
        assert_eq!(b.signals(DATA)[9..], [indexed(7, 1)]);
    }
}

/// The C functions choose a form by flags and action; every form posts the same requests as the Rust API.
#[test]
fn c_functions_post_what_rust_api_posts() {
    const STRONG: u32 = Flags::STRONG.bits();
    let modes = [0, 0x100, 0x200, 0x300].into_iter().flat_map(|mode| [mode, mode | Flags::AGGREGATE.bits()]);
    let none = Action::NONE;
    let actions = [Action::signal_inc(1), Action::signal_add(2, 5), Action::counter(3), none.with_signal(4, 0), none];
    for flags in modes.flat_map(|flags| [flags, flags | STRONG]) {
        for action in actions {
            // A put waits for its completion before a strong signal.
            let puts = flags & STRONG == 0 || action == none;
            for policy in [POLICY_COMBINING, POLICY_LOCKED] {
                let (c, rust) = (fixture(policy, true), fixture(policy, true));
                let (ctx, win, bits) = (c.context().as_ptr(), c.window.0, action.bits());
                let (context, of_rust) = (rust.context(), Flags::from_bits(flags));
                // SAFETY: context and window are leaked.
                let put = || unsafe { capi::fgin_put(ctx, PEER, win, 16, win, 32, 96, bits, flags) };
                // SAFETY: as above.
                let value = || unsafe { capi::fgin_put_value(ctx, PEER, win, 8, 5, 4, bits, flags) };
                // SAFETY: as above.
                let signal = || unsafe { capi::fgin_signal(ctx, PEER, bits, flags) };
                // SAFETY: as above.
                let get = || unsafe { capi::fgin_get(ctx, PEER, win, 24, win, 40, 8, flags) };
                let codes = [if puts { put() } else { 0 }, if puts { value() } else { 0 }, signal(), get()];
                let to = rust.window.at(8);
                let results = [
                    if puts { rust.put(96, action, of_rust) } else { Ok(()) },
                    if puts { context.put_value(PEER, to, 5, 4, action, of_rust) } else { Ok(()) },
                    context.signal(PEER, action, of_rust),
                    context.get(PEER, rust.window.at(24), rust.window.at(40), 8, of_rust),
                ];
                assert_eq!(codes, results.map(|result| result.map_or_else(|status| status as i32, |()| 0)));
                assert_eq!(c.counts(), rust.counts(), "{flags:#x} {action:?}");
                [&c, &rust].iter().for_each(|b| b.context().ring().unwrap());
                for endpoint in 0..c.test.rings.len() {
                    let [of_c, of_rust] = [&c, &rust].map(|b| format!("{:?}", b.requests(endpoint)));
                    assert_eq!(of_c, of_rust, "{flags:#x} {action:?}");
                }
            }
        }
    }
}
