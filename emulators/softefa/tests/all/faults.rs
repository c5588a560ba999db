//! Each fault of `SOFTEFA_FAULTS`, on its own.

use std::sync::atomic::Ordering;

use efa_dp_direct::cq::{Cqe, RawCqe, RecvCqe};
use efa_dp_direct::wire::CompStatus;
use efa_dp_direct::wqe::{Destination, Operation, RequestIds, WriteData};
use softefa_rig::child::run;
use softefa_rig::peer::Peer;
use softefa_rig::*;

/// A card that talks to itself.
struct Pair {
    a: End,
    b: End,
    to: Destination,
    source: Buffer,
    target: Buffer,
    _rig: Rig,
}

impl Pair {
    fn open() -> Self {
        let rig = Rig::open();
        let (a, b) = (End::open(&rig), End::open(&rig));
        let (source, target) = (rig.buffer(8 << 10), rig.buffer(8 << 10));
        let to = a.connect(&b.name());
        Self { a, b, to, source, target, _rig: rig }
    }
}

/// Posts `n` writes of distinct words, at most `window` outstanding, and returns the order of their completions.
fn post_many(pair: &mut Pair, n: u64, window: u64) -> Vec<u16> {
    let mut order = Vec::new();
    for i in 0..n {
        wait_until("room", || {
            while let Some(entry) = pair.a.poll_cq() {
                order.push(entry.common.req_id);
            }
            i - (order.len() as u64) < window
        });
        pair.source.word(i as usize % 1024).store(i + 1, Ordering::Relaxed);
        let at = 8 * (i % 1024);
        pair.a.post(pair.to, write(pair.target.remote(at), pair.source.sge(at, 8)));
    }
    wait_until("last completion", || {
        while let Some(entry) = pair.a.poll_cq() {
            order.push(entry.common.req_id);
        }
        order.len() as u64 == n
    });
    order
}

#[test]
fn writes_are_delivered_and_completed_in_random_order() {
    run("writes_are_delivered_and_completed_in_random_order", &[("SOFTEFA_FAULTS", "seed=3,reorder=16")], || {
        let mut pair = Pair::open();
        let order = post_many(&mut pair, 1000, 64);
        assert!(!order.is_sorted(), "nothing passed anything");
        let mut sorted = order;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>(), "each completes once");
        for i in 0..1000 {
            assert_eq!(pair.target.word(i).load(Ordering::Relaxed), i as u64 + 1);
        }
        assert_eq!((pair.a.local(), pair.a.errors(), pair.b.remote()), (1000, 0, 1000));
    });
}

/// Rings `burst` writes with immediate data at once, three times. Returns the orders of arrival and completion.
fn orders(burst: u32) -> String {
    let mut pair = Pair::open();
    let (mut delivered, mut completed) = (Vec::new(), Vec::new());
    for first in (0..3).map(|n| n * burst) {
        for n in first..first + burst {
            let (remote, data) = (pair.target.remote(8), WriteData::One(pair.source.sge(0, 8)));
            let bytes = pair.a.bytes(pair.to, Operation::Write { remote, data, imm: Some(n) });
            pair.a.place(&bytes);
        }
        pair.a.ring();
        wait_until("all to complete and arrive", || {
            while let Some(entry) = pair.a.poll_cq() {
                completed.push(u32::from(entry.common.req_id));
            }
            while let Some(bytes) = pair.b.poll_entry() {
                match Cqe::parse(&RawCqe(bytes), RequestIds::Bits64) {
                    Ok(Cqe::Recv(RecvCqe { imm: Some(imm), .. })) => delivered.push(imm),
                    other => panic!("{other:?}"),
                }
            }
            delivered.len() as u32 == first + burst && completed.len() == delivered.len()
        });
    }
    drop(pair);
    for order in [&delivered, &completed] {
        assert!(!order.is_sorted());
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..3 * burst).collect::<Vec<_>>());
    }
    format!("ORDER {delivered:?} {completed:?}")
}

#[test]
fn equal_seeds_give_equal_orders() {
    let name = "equal_seeds_give_equal_orders";
    let once = |faults: &str| {
        let faults = format!("{faults},max_batch=512");
        let errors = run(name, &[("SOFTEFA_FAULTS", &faults)], || eprintln!("{}", orders(200)))?;
        Some(errors.lines().find(|line| line.starts_with("ORDER")).unwrap().to_owned())
    };
    for faults in ["reorder=16", "reread=0.2", "reorder=64,reread=0.5,delay_us=0..40"] {
        let Some(first) = once(&format!("seed=1,{faults}")) else { return };
        assert!(once(&format!("seed=1,{faults}")).as_ref() == Some(&first), "{faults}: another order");
        assert!(once(&format!("seed=2,{faults}")).as_ref() != Some(&first), "{faults}: the seed does not matter");
    }
}

#[test]
fn source_is_read_again_after_delay() {
    run("source_is_read_again_after_delay", &[("SOFTEFA_FAULTS", "reread=1,seed=9")], || {
        let mut pair = Pair::open();
        let (mut late, mut n) = (0, 0u64);
        // How many it takes depends on when each of the two runs.
        wait_until("20 that saw what the source held later", || {
            n += 1;
            pair.source.word(0).store(2 * n, Ordering::Relaxed);
            pair.a.post(pair.to, write(pair.target.remote(0), pair.source.sge(0, 8)));
            // A slot that is reused too early: the card may still have to read it.
            std::thread::sleep(std::time::Duration::from_micros(2));
            pair.source.word(0).store(2 * n + 1, Ordering::Release);
            pair.a.wait_done(n);
            late += u64::from(pair.target.word(0).load(Ordering::Relaxed) == 2 * n + 1);
            assert_eq!(pair.b.remote(), n, "one event, however often it is sent");
            n >= 200 && late > 20
        });
    });
}

#[test]
fn every_nth_request_fails_with_given_status() {
    run("every_nth_request_fails_with_given_status", &[("SOFTEFA_FAULTS", "error_every=3,error_status=12")], || {
        let mut pair = Pair::open();
        for n in 1..=9u64 {
            pair.a.post(pair.to, write(pair.target.remote(0), pair.source.sge(0, 8)));
            let expected = if n % 3 == 0 { CompStatus::RemoteBadStatus } else { CompStatus::Ok };
            assert_eq!(pair.a.next_status().1, expected);
        }
        pair.a.wait_done(9);
        assert_eq!((pair.a.local(), pair.a.errors(), pair.b.remote()), (6, 3, 6));
    });
}

#[test]
fn request_with_given_id_fails() {
    run("request_with_given_id_fails", &[("SOFTEFA_FAULTS", "error_every=2,error_id=3")], || {
        let mut pair = Pair::open();
        for id in 0..6 {
            pair.a.post(pair.to, write(pair.target.remote(0), pair.source.sge(0, 8)));
            let expected = if id == 3 { CompStatus::RemoteAbort } else { CompStatus::Ok };
            let (common, status) = pair.a.next_status();
            assert_eq!((common.req_id, status), (id, expected));
        }
    });
}

#[test]
fn counters_and_producer_index_begin_at_cntr_start() {
    run("counters_and_producer_index_begin_at_cntr_start", &[("SOFTEFA_FAULTS", "cntr_start=2147483640")], || {
        let mut pair = Pair::open();
        assert_eq!((pair.a.local(), pair.a.pc, pair.a.errors()), (2_147_483_640, 2_147_483_640, 0));
        for n in 1..=20u64 {
            pair.a.post(pair.to, write(pair.target.remote(0), pair.source.sge(0, 8)));
            let expected = (2_147_483_640 + n) & 0x7fff_ffff;
            wait_until("count", || pair.a.local() == expected && pair.b.remote() == expected);
        }
        assert_eq!(pair.a.pc, 2_147_483_660, "the doorbell has 32 bits");
    });
}

#[test]
fn more_unrung_requests_than_max_batch_are_refused() {
    let errors = run("more_unrung_requests_than_max_batch_are_refused", &[("SOFTEFA_FAULTS", "max_batch=4")], || {
        let mut pair = Pair::open();
        assert_eq!(pair.a.sq.max_batch, 4);
        let op = write(pair.target.remote(0), pair.source.sge(0, 8));
        for _ in 0..4 {
            let bytes = pair.a.bytes(pair.to, op);
            pair.a.place(&bytes);
        }
        pair.a.ring();
        pair.a.wait_done(4);
        assert_eq!(pair.a.errors(), 0);
        for _ in 0..5 {
            let bytes = pair.a.bytes(pair.to, op);
            pair.a.place(&bytes);
        }
        // Nothing is rung: a card that lost written requests would not say so any earlier either.
        wait_until("error", || pair.a.errors() == 1);
    });
    if let Some(errors) = errors {
        assert!(
            errors.contains("slot 8: more than max_batch (4) requests were written without ringing the doorbell"),
            "{errors}"
        );
    }
}

#[test]
fn more_outstanding_requests_than_sq_size_are_refused() {
    let errors = run(
        "more_outstanding_requests_than_sq_size_are_refused",
        &[("SOFTEFA_FAULTS", "sq_size=16,delay_us=10000000..10000000")],
        || {
            let mut pair = Pair::open();
            assert_eq!(pair.a.sq.num_entries, 16);
            let op = write(pair.target.remote(0), pair.source.sge(0, 8));
            for _ in 0..16 {
                pair.a.post(pair.to, op);
            }
            pair.a.post(pair.to, op);
            wait_until("error", || pair.a.errors() >= 1);
        },
    );
    if let Some(errors) = errors {
        assert!(errors.contains("the ring has 16 entries"), "{errors}");
    }
}

#[test]
fn narrow_card_refuses_wide_inline_data() {
    run("narrow_card_refuses_wide_inline_data", &[("SOFTEFA_FAULTS", "wqe_size=64")], || {
        let wide = getinfo(|hints| unsafe_inject(hints, 33));
        assert_eq!(wide.unwrap_err(), -61);
        assert!(getinfo(|hints| unsafe_inject(hints, 32)).is_ok());
    });
}

/// Requests to the peer fail after 5 s of silence.
#[test]
#[ignore = "make check"]
fn card_stops_answering_after_die_after_requests() {
    run("card_stops_answering_after_die_after_requests", &[], || {
        let rig = Rig::open();
        let mut a = End::open(&rig);
        let buffer = rig.buffer(64);
        let mut peer = Peer::start(&[("SOFTEFA_FAULTS", "die_after=1")]);
        peer.connect(&a.name());
        let to = a.connect(&peer.name);
        a.post(to, write(peer.memory, buffer.sge(0, 8)));
        assert_eq!(a.next_status().1, CompStatus::Ok);
        let command = format!("write {} {} 8 1", buffer.at as u64, buffer.region.rkey);
        assert_eq!(peer.ask(&command), "1 0");
        // Its second request is one too many.
        peer.tell(&command);
        // Until then it answers.
        let mut status = CompStatus::Ok;
        wait_until("its death", || {
            a.post(to, write(peer.memory, buffer.sge(0, 8)));
            status = a.next_status().1;
            status != CompStatus::Ok
        });
        assert_eq!(status, CompStatus::LocalUnresponsiveRemote);
        peer.kill();
    });
}

#[test]
fn more_counters_than_cntr_budget_are_refused() {
    let errors = run("more_counters_than_cntr_budget_are_refused", &[("SOFTEFA_FAULTS", "cntr_budget=3")], || {
        let rig = Rig::open();
        let _a = End::open(&rig);
        let third = open_counter(&rig).unwrap();
        assert_eq!(open_counter(&rig).unwrap_err(), -28);
        assert_eq!(close(third), 0);
        assert_eq!(close(open_counter(&rig).unwrap()), 0);
    });
    if let Some(errors) = errors {
        assert!(errors.contains("the card has 3 completion counters, all in use"), "{errors}");
    }
}

#[test]
fn unknown_fault_key_fails_getinfo() {
    let errors = run("unknown_fault_key_fails_getinfo", &[("SOFTEFA_FAULTS", "reorder=16,sede=1")], || {
        assert_eq!(getinfo(|_| {}).unwrap_err(), -22);
    });
    if let Some(errors) = errors {
        assert!(errors.contains("unknown key \"sede\"; keys are seed, reorder"), "{errors}");
    }
}

#[test]
fn cards_of_one_process_exchange_writes() {
    run("cards_of_one_process_exchange_writes", &[("SOFTEFA_NICS", "2")], || {
        let first = getinfo(|_| {}).unwrap();
        let rigs = [Rig::of(first), Rig::of(first.next())];
        assert_eq!(rigs[0].domain_name(), c"softefa0-rdm");
        assert_eq!(rigs[1].domain_name(), c"softefa1-rdm");
        let [mut a, b] = [End::open(&rigs[0]), End::open(&rigs[1])];
        let (source, target) = (rigs[0].buffer(64), rigs[1].buffer(64));
        b.connect(&a.name());
        let to = a.connect(&b.name());
        source.word(0).store(5, Ordering::Relaxed);
        a.post(to, write(target.remote(8), source.sge(0, 8)));
        wait_until("write", || b.remote() == 1);
        assert_eq!(target.word(1).load(Ordering::Relaxed), 5);
        a.wait_done(1);
    });
}
