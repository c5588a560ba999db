//! Operations by several lanes of a warp, each with its own arguments. Lanes whose operations go to the same endpoint form a group, which
//! posts with one reservation, one fence and one doorbell.
//!
//! An operation that doesn't take the fast path or has an invalid argument is handled by its lane alone, as is every operation under the
//! `locked` policy.

use super::Context;
use super::group::{key_of, post};
use super::operation::{Arguments, Resolved};
use super::tables::context_of;
use crate::action::Sharing;
use crate::lanes::Lanes;
use crate::status::Status;

impl Context<'_> {
    /// Posts one operation for each of `lanes`, which make the call together, each with its own arguments and its own result. In sharing
    /// mode THREAD, no thread but these lanes may use the context meanwhile.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]. An invalid argument fails only its own lane; a failed wait for room fails every lane that waited.
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
