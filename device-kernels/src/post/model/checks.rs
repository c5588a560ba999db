//! The configurations, and for each property a configuration that breaks it.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

const ALL: [Order; 3] = [Order::Oldest, Order::Newest, Order::Alternating];
/// For configurations with one post in flight at a time, or in which no guard depends on the order.
const ONE: [Order; 1] = [Order::Newest];

/// Checks both policies.
fn check(orders: &[Order], config: Config) {
    for by_lock in [false, true] {
        check_one(by_lock, orders, config);
    }
}

/// Checks both kinds of doorbell, except in the largest configurations.
fn check_one(by_lock: bool, orders: &[Order], config: Config) {
    for &order in orders {
        let both = [Doorbell::Early, Doorbell::Late];
        for &doorbell in if config.preemptions > 1 && orders.len() == 1 { &both[..1] } else { &both[..] } {
            let began = Instant::now();
            let count = explore(Config { by_lock, order, doorbell, ..config });
            let Config { threads, start, slots, .. } = config;
            let policy = if by_lock { "locked" } else { "combining" };
            let took = began.elapsed();
            println!(
                "{policy} {threads:?} from {start:#x}, {slots} slots, {order:?}, {doorbell:?}: {count} interleavings, {took:.1?}"
            );
        }
    }
}

/// The model must find that the property does not hold.
fn must_fail(config: Config, why: &str) {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let found = catch_unwind(AssertUnwindSafe(|| explore(config)));
    std::panic::set_hook(hook);
    let Err(found) = found else { panic!("the model does not find {:?}", config.fault) };
    let text = found.downcast_ref::<String>().map(String::as_str).or(found.downcast_ref::<&str>().copied());
    let text = text.unwrap_or_default();
    assert!(text.contains(why), "{:?} was found by another rule: {text}", config.fault);
}

#[test]
fn plain_posts_of_two_threads_are_delivered_once() {
    check(&ALL, Config { threads: &[&[Put], &[Put]], ..BASE });
}

#[test]
fn flush_is_exact_while_another_thread_posts() {
    check(&ONE, Config { threads: &[&[Put, Flush], &[Put]], ..BASE });
}

#[test]
fn plain_and_aggregated_posts_are_delivered_once() {
    check(&ONE, Config { threads: &[&[Put], &[Agg, Flush]], ..BASE });
}

#[test]
fn flush_rings_aggregated_posts() {
    check(&ONE, Config { preemptions: 1, threads: &[&[Agg, Flush], &[Agg, Flush]], ..BASE });
}

#[test]
fn batch_of_one_is_respected() {
    check(&ONE, Config { max_batch: 1, preemptions: 1, threads: &[&[Put], &[Agg, Put]], ..BASE });
}

#[test]
fn value_slots_are_not_reused_early() {
    check_one(false, &ALL, Config { max_batch: 4, slots: 2, threads: &[&[Put, Put, Put]], ..BASE });
    check(&[Order::Newest], Config { slots: 2, preemptions: 1, threads: &[&[Put, Put], &[Put]], ..BASE });
}

#[test]
fn ring_of_two_does_not_overflow() {
    check(&ONE, Config { sq_size: 2, preemptions: 1, threads: &[&[Put, Put], &[Put]], ..BASE });
}

#[test]
fn posts_are_delivered_across_counter_wrap() {
    for start in [0x03ff_ffff, 0x7fff_ffff, 0xffff_ffff] {
        check(&ONE, Config { start, slots: 1, preemptions: 1, threads: &[&[Put], &[Agg, Put]], ..BASE });
        check(&ONE, Config { start, preemptions: 1, threads: &[&[Put, Flush], &[Put]], ..BASE });
    }
}

const FAULTY: Config = Config { threads: &[&[Put, Put], &[Put]], ..BASE };

#[test]
fn model_finds_early_reuse_of_value_slot() {
    for by_lock in [false, true] {
        let fault = Some(Fault::NoSlotGuard);
        must_fail(Config { by_lock, fault, slots: 2, ..FAULTY }, "overwritten");
    }
}

#[test]
fn model_finds_ring_overflow() {
    for by_lock in [false, true] {
        let fault = Some(Fault::NoRingGuard);
        must_fail(Config { by_lock, fault, sq_size: 2, ..FAULTY }, "before it was written");
    }
}

#[test]
fn model_finds_too_large_batch() {
    for by_lock in [false, true] {
        let fault = Some(Fault::NoBatchBound);
        must_fail(Config { by_lock, fault, threads: &[&[Agg, Agg, Agg, Put]], ..BASE }, "may be unrung");
    }
}

#[test]
fn model_finds_missing_fences() {
    for by_lock in [false, true] {
        let config = Config { by_lock, threads: &[&[Put], &[Put]], ..BASE };
        must_fail(Config { fault: Some(Fault::NoWriteFence), ..config }, "before it was written");
        let late = Config { doorbell: Doorbell::Late, fault: Some(Fault::NoDoorbellFence), ..config };
        must_fail(late, "the doorbell went");
    }
}

#[test]
fn model_finds_lost_doorbell() {
    let fault = Some(Fault::ShortDoorbell);
    must_fail(Config { fault, threads: &[&[Put], &[Put]], ..BASE }, "");
}

#[test]
fn model_finds_early_flush() {
    let threads: &[&[Op]] = &[&[Put, Flush], &[Put]];
    for by_lock in [false, true] {
        must_fail(Config { by_lock, fault: Some(Fault::EarlyCount), threads, ..BASE }, "a flush returned before");
    }
    must_fail(Config { fault: Some(Fault::NoBarrier), threads, ..BASE }, "a flush returned before");
}
