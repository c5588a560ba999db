//! Operations by several lanes of a warp, each with its own arguments. Lanes whose requests go to the same endpoint
//! form a group, which posts them with one reservation, one fence and one doorbell.
//!
//! An invalid argument fails only its lane. Under the `locked` policy every lane posts alone.

use super::Context;
use super::operation::{Arguments, Resolved};
use super::tables::context_of;
use crate::action::Sharing;
use crate::endpoint::{Endpoint, Wqe};
use crate::lanes::Lanes;
use crate::post::EncodeWqe;
use crate::post::combining::run::{Run, admit_run, reserve_run, ring_run};
use crate::status::Status;

impl Context<'_> {
    /// Posts one operation for each of `lanes`, which make the call together, each with its own arguments and its own
    /// result. In sharing mode THREAD, no thread but these lanes may use the context meanwhile.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]. An invalid argument fails only its own lane; a failed wait for room fails every lane
    /// that waited.
    #[inline(always)]
    pub fn post_by_lanes(&self, lanes: Lanes, arguments: Arguments) -> Result<(), Status> {
        post_in_groups(Some(*self), lanes, arguments)
    }
}

/// Posts each lane's operation together with those of its group. A lane without a context fails alone.
#[inline(always)]
pub(crate) fn post_in_groups(context: Option<Context<'_>>, lanes: Lanes, arguments: Arguments) -> Result<(), Status> {
    // The widest mode, because several lanes may post on one endpoint at the same time.
    let flags = arguments.flags.shared(Sharing::Gpu);
    let resolved = context.map(|context| context.tables().resolve(Arguments { flags, ..arguments }));
    let fast = resolved.filter(|resolved| resolved.is_fast);
    // Every lane gets here, whatever its arguments.
    let group = lanes.with_key(fast.map_or(0, |fast| key_of(fast.poster.endpoint(), flags.is_aggregate())));
    match (fast, resolved) {
        (Some(fast), _) => post(group, fast.poster.endpoint(), flags.is_aggregate(), fast),
        (None, Some(Resolved { is_invalid: false, operation, poster, .. })) => {
            context_of(poster.endpoint()).carry_out(operation)
        }
        (None, _) => Err(Status::InvalidArgument),
    }
}

/// Posts the requests of the lanes that make this call at the same time.
#[inline(never)]
pub(super) fn join(poster: Endpoint<'_>, aggregate: bool, wqe: Wqe) -> Result<(), Status> {
    let group = Lanes::active().with_key(key_of(poster, aggregate));
    post(group, poster, aggregate, |idx| poster.place(wqe, idx))
}

/// Returns the key of this lane's group: lanes with the same key are a group.
fn key_of(poster: Endpoint<'_>, aggregate: bool) -> u64 {
    poster.as_ptr() as u64 | u64::from(aggregate)
}

/// Posts the requests of a group. Its first lane is the leader.
#[inline(always)]
fn post(group: Lanes, poster: Endpoint<'_>, aggregate: bool, request: impl EncodeWqe) -> Result<(), Status> {
    let (rank, posts) = (group.rank(), group.count());
    let leads = rank == 0;
    let own = if leads { reserve_run(poster, posts).reserved } else { 0 };
    let first = group.broadcast_from_first(own as u32);
    let mut run = Run { reserved: own, posts };
    let mut done = 0;
    loop {
        let message = if leads { admit(poster, run).unwrap_or_else(|status| FAILED | status as u32) } else { 0 };
        let part = group.broadcast_from_first(message);
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

/// The bit in the leader's message that says a wait for room failed, with its status. Otherwise the message is a part's
/// length.
const FAILED: u32 = 1 << 31;

/// Out of line, so that the module has one copy for all operations.
#[inline(never)]
fn admit(poster: Endpoint<'_>, run: Run) -> Result<u32, Status> {
    admit_run(poster, context_of(poster), run)
}
