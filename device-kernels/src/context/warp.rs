//! Operations of several lanes of a warp, each with its own arguments. The lanes whose operations go to one endpoint are a group:
//! they post with one reservation, one fence and one doorbell.
//!
//! An operation that the fast path does not take, or that has an invalid argument, is its lane's alone, as is every operation by
//! the `locked` policy.

use super::Context;
use super::group::{key_of, post};
use super::operation::{Arguments, Resolved};
use super::tables::context_of;
use crate::action::Sharing;
use crate::lanes::Lanes;
use crate::status::Status;

impl Context<'_> {
    /// Posts an operation of each of `lanes`, which make the call together, each with its own arguments and its own result. In the
    /// sharing mode THREAD, no thread but these lanes uses the context meanwhile.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]. An invalid argument fails its lane alone; what ends a wait for room fails all lanes that waited.
    #[inline(always)]
    pub fn post_by_lanes(&self, lanes: Lanes, arguments: Arguments) -> Result<(), Status> {
        post_in_groups(Some(*self), lanes, arguments)
    }
}

/// Posts the operation of each lane with those of its group. A lane without a context fails alone.
#[inline(always)]
pub(crate) fn post_in_groups(context: Option<Context<'_>>, lanes: Lanes, arguments: Arguments) -> Result<(), Status> {
    // The widest mode: several lanes may post at the same time on one endpoint.
    let flags = arguments.flags.shared(Sharing::Gpu);
    let resolved = context.map(|context| context.tables().resolve(Arguments { flags, ..arguments }));
    let fast = resolved.filter(|resolved| resolved.is_fast);
    // Every lane gets here, whatever its arguments are.
    let group = lanes.with_key(fast.map_or(0, |fast| key_of(fast.poster.endpoint(), flags.is_aggregate())));
    match (fast, resolved) {
        (Some(fast), _) => post(group, fast.poster.endpoint(), flags.is_aggregate(), fast),
        (None, Some(Resolved { is_invalid: false, operation, poster, .. })) => {
            context_of(poster.endpoint()).carry_out(operation)
        }
        (None, _) => Err(Status::InvalidArgument),
    }
}
