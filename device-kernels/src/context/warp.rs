//! Operations of several lanes of a warp, each with its own arguments. The lanes whose operations go to one endpoint are a group:
//! they post with one reservation, one fence and one doorbell.
//!
//! An operation that the fast path does not take, or that has an invalid argument, is its lane's alone, as is every operation by
//! the `locked` policy.

use super::fast_path::FastPathRequest;
use super::group::{key_of, post};
use super::tables::ON_GPU;
use super::{Checked, Context, Span};
use crate::action::{Action, Flags};
use crate::lanes::Lanes;
use crate::post::Sharing;
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
