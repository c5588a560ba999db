//! A poster's steps, the policies, and the guards that tests remove.

use crate::post::combining::CombiningQueue;
use crate::post::combining::run::{admit_run, reserve_run, ring_run};
use crate::post::flush::FlushQueue;
use crate::post::used::UsedSet;
use crate::post::{EncodeWqe, combining, exclusive, locked};
use crate::status::Status;
use crate::sync::{AtomicU64, Ordering};
use crate::wait::Limit;

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// A plain post.
    Put,
    /// A post with the aggregate flag.
    Aggregated,
    /// Posts by a group with one leader.
    Group(u32),
    /// The same, with the aggregate flag.
    AggregatedGroup(u32),
    /// A flush. Every earlier post of this poster must have completed, and every post of others that it had seen.
    Flush,
}

impl Op {
    /// Returns the number of its posts.
    pub fn posts(self) -> u32 {
        match self {
            Op::Put | Op::Aggregated => 1,
            Op::Group(posts) | Op::AggregatedGroup(posts) => posts,
            Op::Flush => 0,
        }
    }
}

/// A policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Combining,
    /// The exclusive form of `combining`, for one poster.
    Exclusive,
    Locked,
}

impl Policy {
    /// Returns the policies for that many posters.
    pub fn of(posters: usize) -> &'static [Policy] {
        use Policy::{Combining, Exclusive, Locked};
        if posters == 1 { &[Combining, Exclusive, Locked] } else { &[Combining, Locked] }
    }

    pub fn is_locked(self) -> bool {
        self == Policy::Locked
    }

    pub fn post(
        self,
        queue: impl FlushQueue,
        limits: impl Limit,
        aggregate: bool,
        wqe: impl EncodeWqe,
    ) -> Result<(), Status> {
        match self {
            Policy::Combining => combining::post(queue, limits, aggregate, wqe),
            Policy::Exclusive => exclusive::post(queue, limits, aggregate, wqe),
            Policy::Locked => locked::post(queue, limits, aggregate, wqe),
        }
    }
}

/// A guard that a test removes, so that a property breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// The policy sees an endpoint without value slots.
    NoSlotGuard,
    /// The policy sees a ring larger than the real one.
    NoRingGuard,
    /// The policy sees a batch limit larger than the card's.
    NoBatchBound,
    /// A fence before the doorbell does nothing.
    NoWriteFence,
    /// A fence after the doorbell does nothing.
    NoDoorbellFence,
    /// The doorbell for the last request doesn't reach the card.
    LostDoorbell,
    /// The flush barrier is removed before each post.
    NoBarrier,
    /// The completion count reads one too high while something is in flight.
    EarlyCount,
    /// No post inserts the endpoint into the set of used endpoints.
    NoInsertion,
    /// An insertion into the set of used endpoints sets the bit in the summary word (0) or leaf word (1) but isn't
    /// counted there.
    Uncounted(usize),
    /// A flush removes an endpoint once its posts have completed, wherever the barrier stands.
    EarlyRemoval,
    /// The last thread of a group writes its request after the leader's fence.
    LateLane,
    /// Failed requests don't count as ended.
    UncountedFailures,
    /// Posts are admitted before the host has read the entries of failed requests.
    EarlyIdentification,
    /// Failed requests count as acknowledged at once.
    EarlyAcknowledgement,
}

/// Inserts the only endpoint of a set, whose summary word and leaf word are `words`.
pub fn insert_used(set: UsedSet<'_>, words: &[AtomicU64; 2], mutation: Option<Mutation>) {
    let uncounted = match mutation {
        Some(Mutation::NoInsertion) => return,
        Some(Mutation::Uncounted(at)) => at,
        _ => return set.insert(0),
    };
    for (at, word) in words.iter().enumerate().rev() {
        if at == uncounted || word.fetch_add(1 << 32, Ordering::AcqRel) & 1 == 0 {
            word.fetch_or(1, Ordering::AcqRel);
        }
    }
}

/// Posts a run from one thread: `encode` writes request `i` of the run under its number.
///
/// # Errors
/// The reason a wait for room ended, and how many posts were posted before it.
pub fn post_run<Q: CombiningQueue>(
    queue: Q,
    limits: impl Limit,
    posts: u32,
    aggregate: bool,
    encode: impl Fn(u32, u32),
) -> Result<(), (Status, u32)> {
    let (whole, mut done) = (reserve_run(queue, posts), 0);
    while done < posts {
        let rest = whole.rest(done);
        let part = rest.part(admit_run(queue, limits, rest).map_err(|status| (status, done))?);
        for i in 0..part.posts {
            encode(done + i, rest.first().wrapping_add(i));
        }
        ring_run(queue, part, aggregate);
        done += part.posts;
    }
    Ok(())
}
