//! The steps and the policies of a poster, in the model, the random schedules and the other tests.

use crate::post::combining::CombiningQueue;
use crate::post::combining::run::{admit_run, reserve_run, ring_run};
use crate::post::flush::FlushQueue;
use crate::post::{EncodeWqe, combining, exclusive, locked};
use crate::status::Status;
use crate::wait::Limit;

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::post) enum Op {
    /// A plain post.
    Put,
    /// A post with the aggregate flag.
    Aggregated,
    /// The posts of a group with one leader.
    Group(u32),
    /// The same with the aggregate flag.
    AggregatedGroup(u32),
    /// A flush. Every earlier post of this poster must have completed, and every post of others that it had seen.
    Flush,
}

impl Op {
    /// The number of its posts.
    pub(in crate::post) fn posts(self) -> u32 {
        match self {
            Op::Put | Op::Aggregated => 1,
            Op::Group(posts) | Op::AggregatedGroup(posts) => posts,
            Op::Flush => 0,
        }
    }
}

/// A policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::post) enum Policy {
    Combining,
    /// `combining` in its exclusive form, for one poster.
    Exclusive,
    Locked,
}

impl Policy {
    /// The policies for so many posters.
    pub(in crate::post) fn of(posters: usize) -> &'static [Policy] {
        use Policy::{Combining, Exclusive, Locked};
        if posters == 1 { &[Combining, Exclusive, Locked] } else { &[Combining, Locked] }
    }

    pub(in crate::post) fn is_locked(self) -> bool {
        self == Policy::Locked
    }

    pub(in crate::post) fn post(
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

/// Posts a run by one thread: `encode` writes request `i` of the run under its number.
///
/// # Errors
/// What ended a wait for room, and the number of posts before it, which are posted.
pub(in crate::post) fn post_run<Q: CombiningQueue>(
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
