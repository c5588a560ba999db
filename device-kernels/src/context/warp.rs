//! Operations of several lanes of a warp, each with its own arguments. The lanes whose operations go to one endpoint are a group:
//! they post with one reservation, one fence and one doorbell.
//!
//! An operation that the fast path does not take, or that has an invalid argument, is its lane's alone, as is every operation by
//! the `locked` policy.

use super::fast_path::FastPathRequest;
use super::tables::{ON_GPU, limits_of};
use super::{Checked, Context, Span};
use crate::action::{Action, Flags};
use crate::endpoint::Endpoint;
use crate::lanes::Lanes;
use crate::post::combining::run::{Run, admit_run, reserve_run, ring_run};
use crate::post::{EncodeWqe, Gpu, Sharing};
use crate::status::Status;

/// The operations of lanes of a warp. In the sharing mode THREAD, no thread but the lanes of the call uses the context meanwhile.
impl<'a> Context<'a> {
    /// [`Context::put`] by all `lanes`, which make the call together, each with its own arguments and its own result.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]. An invalid argument fails its lane alone; what ends a wait for room fails all lanes that waited.
    #[inline(always)]
    pub fn put_by_lanes(
        &self,
        lanes: Lanes,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        put(Some(*self), lanes, peer, dst, src, bytes, action, flags)
    }

    /// [`Context::put_value`] by all `lanes`, which make the call together, each with its own arguments and its own result.
    ///
    /// # Errors
    ///
    /// As for [`Context::put_value`], and as for [`Context::put_by_lanes`].
    #[inline(always)]
    pub fn put_value_by_lanes(
        &self,
        lanes: Lanes,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        put_value(Some(*self), lanes, peer, dst, value, bytes, action, flags)
    }

    /// [`Context::signal`] by all `lanes`, which make the call together, each with its own arguments and its own result.
    ///
    /// # Errors
    ///
    /// As for [`Context::signal`], and as for [`Context::put_by_lanes`].
    #[inline(always)]
    pub fn signal_by_lanes(&self, lanes: Lanes, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        signal(Some(*self), lanes, peer, action, flags)
    }
}

/// [`Context::put_by_lanes`]; a lane without a context fails alone.
#[inline(never)]
pub(crate) fn put<'a>(
    context: Option<Context<'a>>,
    lanes: Lanes,
    peer: u32,
    dst: Span,
    src: Span,
    bytes: u64,
    action: Action,
    flags: Flags,
) -> Result<(), Status> {
    let request = |context: Context<'a>| context.tables::<ON_GPU>().put(peer, action.into(), dst, src, bytes);
    let alone = |context: Context<'a>, flags| context.put_slow(peer, dst, src, bytes, action, flags);
    post_in_groups(context, lanes, flags, request, alone)
}

/// [`Context::put_value_by_lanes`]; a lane without a context fails alone.
#[inline(never)]
pub(crate) fn put_value<'a>(
    context: Option<Context<'a>>,
    lanes: Lanes,
    peer: u32,
    dst: Span,
    value: u64,
    bytes: u32,
    action: Action,
    flags: Flags,
) -> Result<(), Status> {
    let request = |context: Context<'a>| context.tables::<ON_GPU>().value(peer, action.into(), dst, value, bytes);
    let alone = |context: Context<'a>, flags| context.put_value_slow(peer, dst, value, bytes, action, flags);
    post_in_groups(context, lanes, flags, request, alone)
}

/// [`Context::signal_by_lanes`]; a lane without a context fails alone.
#[inline(never)]
pub(crate) fn signal<'a>(
    context: Option<Context<'a>>,
    lanes: Lanes,
    peer: u32,
    action: Action,
    flags: Flags,
) -> Result<(), Status> {
    let request = |context: Context<'a>| context.tables::<ON_GPU>().signal(peer, action.into());
    let alone = |context: Context<'a>, flags| context.signal_slow(peer, action, flags);
    post_in_groups(context, lanes, flags, request, alone)
}

/// Posts the request of each lane with those of the other lanes that have the same endpoint. A lane without a request calls `alone`,
/// the slow path, which also finds what is wrong with its arguments.
#[inline(always)]
fn post_in_groups<'a, R: FastPathRequest<'a>>(
    context: Option<Context<'a>>,
    lanes: Lanes,
    flags: Flags,
    request: impl FnOnce(Context<'a>) -> Option<Checked<R>>,
    alone: impl FnOnce(Context<'a>, Flags) -> Result<(), Status>,
) -> Result<(), Status> {
    // The widest mode: several lanes may post at the same time on one endpoint.
    let flags = flags.shared(Sharing::Gpu);
    // A strong signal is its lane's alone.
    let request = context
        .filter(|_| !flags.is_strong())
        .and_then(request)
        .filter(|checked| checked.takes_fast_path)
        .map(|checked| checked.request);
    let poster = request.map(|request| request.path().poster.endpoint());
    // Every lane gets here, whatever its arguments are.
    let group = lanes.with_key(poster.map_or(0, |poster| key_of(poster, flags.is_aggregate())));
    match (request.zip(poster), context) {
        (Some((request, poster)), _) => post(group, poster, flags.is_aggregate(), request),
        (None, Some(context)) => alone(context, flags),
        (None, None) => Err(Status::InvalidArgument),
    }
}

/// Posts the requests of the lanes that make this call at the same time.
pub(super) fn join(poster: Endpoint<'_>, aggregate: bool, request: impl EncodeWqe) -> Result<(), Status> {
    let group = Lanes::active().with_key(key_of(poster, aggregate));
    post(group, poster, aggregate, request)
}

/// Lanes with the same key are a group.
fn key_of(poster: Endpoint<'_>, aggregate: bool) -> u64 {
    poster.as_ptr() as u64 | u64::from(aggregate)
}

/// Posts the requests of a group. Its first lane is the leader.
#[inline(always)]
fn post(group: Lanes, poster: Endpoint<'_>, aggregate: bool, request: impl EncodeWqe) -> Result<(), Status> {
    let (rank, posts) = (group.rank(), group.count());
    let leads = rank == 0;
    let own = if leads { reserve_run::<Gpu, _>(poster, posts).reserved } else { 0 };
    let first = group.of_first(own as u32);
    let mut run = Run { reserved: own, posts };
    let mut done = 0;
    loop {
        let mut message = 0;
        if leads {
            message = match admit(poster, run) {
                Ok(part) => part,
                Err(status) => FAILED | status as u32,
            };
        }
        let part = group.of_first(message);
        // What the leader has acquired comes before the requests of all lanes.
        group.sync();
        if part & FAILED != 0 {
            return Err(failure(part & !FAILED));
        }
        if rank.wrapping_sub(done) < part {
            request.encode(first.wrapping_add(rank));
        }
        // The leader's fence comes after the requests of all lanes.
        group.sync();
        if leads {
            ring(poster, run.part(part), aggregate);
        }
        done += part;
        if done == posts {
            return Ok(());
        }
        run = run.rest(part);
    }
}

/// The bit of the leader's message that says why a wait for room ended: a status. Otherwise the message is the length of a part.
const FAILED: u32 = 1 << 31;

fn failure(status: u32) -> Status {
    let ends_wait = [Status::Aborted, Status::Timeout, Status::CardError];
    ends_wait.into_iter().find(|known| *known as u32 == status).unwrap_or(Status::Poisoned)
}

/// Calls of all operations, so that the module has one copy.
#[inline(never)]
fn admit(poster: Endpoint<'_>, run: Run) -> Result<u32, Status> {
    admit_run::<Gpu, _>(poster, limits_of(poster), run)
}

#[inline(never)]
fn ring(poster: Endpoint<'_>, part: Run, aggregate: bool) {
    ring_run::<Gpu, _>(poster, part, aggregate);
}
