//! Posts the requests of a group of lanes, which share an endpoint, with one reservation, one fence and one doorbell.

use super::tables::context_of;
use crate::endpoint::{Endpoint, Wqe};
use crate::lanes::Lanes;
use crate::post::EncodeWqe;
use crate::post::combining::run::{Run, admit_run, reserve_run, ring_run};
use crate::status::Status;

/// Posts the requests of the lanes that make this call at the same time.
#[inline(never)]
pub(super) fn join(poster: Endpoint<'_>, aggregate: bool, wqe: Wqe) -> Result<(), Status> {
    let group = Lanes::active().with_key(key_of(poster, aggregate));
    post(group, poster, aggregate, |idx| poster.place(wqe, idx))
}

/// Returns the key of this lane's group: lanes with the same key are a group.
pub(super) fn key_of(poster: Endpoint<'_>, aggregate: bool) -> u64 {
    poster.as_ptr() as u64 | u64::from(aggregate)
}

/// Posts the requests of a group. Its first lane is the leader.
#[inline(always)]
pub(super) fn post(group: Lanes, poster: Endpoint<'_>, aggregate: bool, request: impl EncodeWqe) -> Result<(), Status> {
    let (rank, posts) = (group.rank(), group.count());
    let leads = rank == 0;
    let own = if leads { reserve_run(poster, posts).reserved } else { 0 };
    let first = group.of_first(own as u32);
    let mut run = Run { reserved: own, posts };
    let mut done = 0;
    loop {
        let message = if leads { admit(poster, run).unwrap_or_else(|status| FAILED | status as u32) } else { 0 };
        let part = group.of_first(message);
        // What the leader has acquired comes before all lanes' requests.
        group.sync();
        if part & FAILED != 0 {
            return Err(Status::from_number(part & !FAILED).unwrap_or(Status::Poisoned));
        }
        if rank.wrapping_sub(done) < part {
            request.encode(first.wrapping_add(rank));
        }
        // The leader's fence comes after all lanes' requests.
        group.sync();
        if leads {
            ring_run(poster, run.part(part), aggregate);
        }
        done += part;
        if done == posts {
            return Ok(());
        }
        run = run.rest(part);
    }
}

/// The bit in the leader's message that says a wait for room failed, with its status. Otherwise the message is a part's length.
const FAILED: u32 = 1 << 31;

/// Out of line, so that the module has one copy for all operations.
#[inline(never)]
fn admit(poster: Endpoint<'_>, run: Run) -> Result<u32, Status> {
    admit_run(poster, context_of(poster), run)
}
