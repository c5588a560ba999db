//! The configurations, and for each property one that breaks it.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

const ALL_ORDERS: [Order; 3] = [Order::Oldest, Order::Newest, Order::Alternating];
/// For configurations with one post in flight at a time, or where no guard depends on the order.
const ONE_ORDER: [Order; 1] = [Order::Newest];

/// Checks every policy.
fn check(orders: &[Order], config: Config) {
    for &policy in Policy::of(config.posters.len()) {
        check_one(policy, orders, config);
    }
}

/// Checks with both kinds of doorbell, except for the largest configurations.
fn check_one(policy: Policy, orders: &[Order], config: Config) {
    for &order in orders {
        let both = [Doorbell::Early, Doorbell::Late];
        for &doorbell in if config.preemptions > 1 && orders.len() == 1 { &both[..1] } else { &both[..] } {
            let began = Instant::now();
            let count = explore(Config { policy, order, doorbell, ..config });
            let Config { posters, start, slots, .. } = config;
            let took = began.elapsed();
            println!(
                "{policy:?} {posters:?} from {start:#x}, {slots} slots, {order:?}, {doorbell:?}: {count} interleavings, {took:.1?}"
            );
        }
    }
}

/// Checks that the model finds the broken property by the rule `why`, or by one of several separated by `|`.
fn must_fail(config: Config, why: &str) {
    let found = catch_unwind(AssertUnwindSafe(|| explore(config)));
    let Err(found) = found else { panic!("the model does not find {:?}", config.mutation) };
    let text = found.downcast_ref::<String>().map(String::as_str).or(found.downcast_ref::<&str>().copied());
    let text = text.unwrap_or_default();
    let is_wanted = why.split('|').any(|why| text.contains(why));
    assert!(is_wanted, "{:?} was found by another rule: {text}", config.mutation);
}

/// A flush raises the barrier, the second one empties the leaf word, and the third, on the other thread, empties the
/// summary word.
const SUMMARY: &[&[Op]] = &[&[Put, Flush, Flush, Put, Flush], &[Flush]];
/// The third flush empties the leaf word.
const LEAF: &[&[Op]] = &[&[Put, Flush, Put, Flush], &[Flush]];

#[test]
fn plain_posts_of_two_threads_are_delivered_once() {
    check(&ALL_ORDERS, Config { posters: &[&[Put], &[Put]], ..BASE });
}

#[test]
fn flush_waits_for_own_posts_while_another_thread_posts() {
    check(&ONE_ORDER, Config { posters: &[&[Put, Flush], &[Put]], ..BASE });
}

#[test]
fn plain_and_aggregated_posts_are_delivered_once() {
    check(&ONE_ORDER, Config { posters: &[&[Put], &[Aggregated, Flush]], ..BASE });
}

/// The second flush of an idle endpoint removes it from the set of used endpoints.
#[test]
fn posts_are_flushed_beside_removals() {
    for posters in [LEAF, SUMMARY] {
        check(&ONE_ORDER, Config { in_context: true, preemptions: 1, posters, ..BASE });
    }
}

#[test]
fn flush_rings_aggregated_posts() {
    check(&ONE_ORDER, Config { preemptions: 1, posters: &[&[Aggregated, Flush], &[Aggregated, Flush]], ..BASE });
}

#[test]
fn posts_and_flushes_of_one_thread_are_delivered_once() {
    const POSTERS: &[&[Op]] = &[&[Put, Aggregated, Put, Flush, Aggregated, Aggregated, Put]];
    check(&ALL_ORDERS, Config { slots: 2, posters: POSTERS, ..BASE });
}

#[test]
fn batch_of_one_is_respected() {
    check(&ONE_ORDER, Config { max_batch: 1, preemptions: 1, posters: &[&[Put], &[Aggregated, Put]], ..BASE });
}

#[test]
fn value_slots_are_not_reused_early() {
    check_one(Policy::Combining, &ALL_ORDERS, Config { max_batch: 4, slots: 2, posters: &[&[Put, Put, Put]], ..BASE });
    check(&[Order::Newest], Config { slots: 2, preemptions: 1, posters: &[&[Put, Put], &[Put]], ..BASE });
}

#[test]
fn ring_of_two_does_not_overflow() {
    check(&ONE_ORDER, Config { sq_size: 2, preemptions: 1, posters: &[&[Put, Put], &[Put]], ..BASE });
}

#[test]
fn posts_are_delivered_across_counter_wrap() {
    for start in [0x03ff_ffff, 0x7fff_ffff, 0xffff_ffff] {
        check(&ONE_ORDER, Config { start, slots: 1, preemptions: 1, posters: &[&[Put], &[Aggregated, Put]], ..BASE });
        check(&ONE_ORDER, Config { start, preemptions: 1, posters: &[&[Put, Flush], &[Put]], ..BASE });
    }
}

/// In the model, groups of up to two posts have ready bits, and longer ones don't.
#[test]
fn groups_are_delivered_once() {
    check_one(
        Policy::Combining,
        &ONE_ORDER,
        Config { max_batch: 4, preemptions: 1, posters: &[&[Group(3)], &[Put]], ..BASE },
    );
    check_one(
        Policy::Combining,
        &ONE_ORDER,
        Config { max_batch: 4, preemptions: 1, posters: &[&[Group(2)], &[Put]], ..BASE },
    );
    check_one(
        Policy::Combining,
        &ONE_ORDER,
        Config { max_batch: 4, preemptions: 1, posters: &[&[Group(3)], &[Group(2)]], ..BASE },
    );
    check_one(
        Policy::Combining,
        &ONE_ORDER,
        Config { max_batch: 4, preemptions: 1, posters: &[&[Group(3)], &[Group(3)]], ..BASE },
    );
}

#[test]
fn groups_are_flushed_and_ring_aggregated_posts() {
    let posters: &[&[Op]] = &[&[AggregatedGroup(2), Flush], &[Put]];
    check_one(Policy::Combining, &ONE_ORDER, Config { max_batch: 4, preemptions: 1, posters, ..BASE });
    let posters: &[&[Op]] = &[&[Aggregated, Group(3), Flush, AggregatedGroup(3), Flush]];
    check_one(Policy::Combining, &ONE_ORDER, Config { max_batch: 4, sq_size: 8, preemptions: 1, posters, ..BASE });
}

/// Divided by the card's batch, the value slots, the ring and the cursor's wrap. One poster and the card suffice,
/// because each part is admitted on its own.
#[test]
fn groups_are_divided() {
    let config = Config { max_batch: 4, preemptions: 1, posters: &[&[Group(3), Flush]], ..BASE };
    check_one(Policy::Combining, &ONE_ORDER, Config { max_batch: 1, ..config });
    check_one(Policy::Combining, &ONE_ORDER, Config { slots: 2, ..config });
    check_one(Policy::Combining, &ONE_ORDER, Config { sq_size: 2, ..config });
    for start in [0x7fff_fffe, 0xffff_fffe] {
        check_one(Policy::Combining, &ONE_ORDER, Config { start, ..config });
    }
}

const MUTATED: Config = Config { posters: &[&[Put, Put], &[Put]], ..BASE };

#[test]
fn model_finds_early_reuse_of_value_slot() {
    for policy in [Policy::Combining, Policy::Locked] {
        let mutation = Some(Mutation::NoSlotGuard);
        must_fail(Config { policy, mutation, slots: 2, ..MUTATED }, "overwritten");
    }
}

#[test]
fn model_finds_ring_overflow() {
    for policy in [Policy::Combining, Policy::Locked] {
        let mutation = Some(Mutation::NoRingGuard);
        must_fail(Config { policy, mutation, sq_size: 2, ..MUTATED }, "before it was written");
    }
}

#[test]
fn model_finds_too_large_batch() {
    for policy in [Policy::Combining, Policy::Locked] {
        let mutation = Some(Mutation::NoBatchBound);
        must_fail(
            Config { policy, mutation, posters: &[&[Aggregated, Aggregated, Aggregated, Put]], ..BASE },
            "may be unrung",
        );
    }
}

#[test]
fn model_finds_missing_fences() {
    for policy in [Policy::Combining, Policy::Locked] {
        let config = Config { policy, posters: &[&[Put], &[Put]], ..BASE };
        must_fail(Config { mutation: Some(Mutation::NoWriteFence), ..config }, "before it was written");
        let late = Config { doorbell: Doorbell::Late, mutation: Some(Mutation::NoDoorbellFence), ..config };
        must_fail(late, "the doorbell went");
    }
}

#[test]
fn model_finds_late_request_of_group() {
    let mutation = Some(Mutation::LateLane);
    const SHORT: &[&[Op]] = &[&[Group(2)], &[Put]];
    const LONG: &[&[Op]] = &[&[Group(3)], &[Put]];
    for posters in [SHORT, LONG] {
        must_fail(Config { mutation, max_batch: 4, posters, ..BASE }, "before it was written");
    }
}

#[test]
fn model_finds_group_that_ignores_limits() {
    let config = Config { posters: &[&[Group(4)], &[Put, Put]], ..BASE };
    must_fail(Config { mutation: Some(Mutation::NoBatchBound), ..config }, "may be unrung");
    let config = Config { max_batch: 4, ..config };
    must_fail(Config { mutation: Some(Mutation::NoSlotGuard), slots: 2, ..config }, "overwritten");
    must_fail(
        Config { mutation: Some(Mutation::NoRingGuard), sq_size: 2, ..config },
        "before it was written|ring overflow",
    );
    let config = Config { doorbell: Doorbell::Late, posters: &[&[Group(3)], &[Put]], ..config };
    must_fail(Config { mutation: Some(Mutation::NoDoorbellFence), ..config }, "the doorbell went");
}

#[test]
fn model_finds_lost_doorbell() {
    let mutation = Some(Mutation::LostDoorbell);
    must_fail(Config { mutation, posters: &[&[Put], &[Put]], ..BASE }, "every post is delivered once");
}

#[test]
fn model_finds_lost_insertion() {
    let config = Config { in_context: true, ..BASE };
    for policy in [Policy::Combining, Policy::Locked] {
        let mutations = [Mutation::NoInsertion, Mutation::Uncounted(1), Mutation::Uncounted(0)];
        for (mutation, posters) in mutations.into_iter().zip([LEAF, LEAF, SUMMARY]) {
            must_fail(Config { policy, mutation: Some(mutation), posters, ..config }, "a flush returned before");
        }
    }
    let posters: &[&[Op]] = &[&[Put, Put, Flush], &[Flush]];
    must_fail(Config { mutation: Some(Mutation::EarlyRemoval), posters, ..config }, "a flush returned before");
}

#[test]
fn model_finds_early_flush() {
    let posters: &[&[Op]] = &[&[Put, Flush], &[Put]];
    for policy in [Policy::Combining, Policy::Locked] {
        must_fail(Config { policy, mutation: Some(Mutation::EarlyCount), posters, ..BASE }, "a flush returned before");
    }
    must_fail(Config { mutation: Some(Mutation::NoBarrier), posters, ..BASE }, "a flush returned before");
}
