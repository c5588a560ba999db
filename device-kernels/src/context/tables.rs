//! The context's tables: endpoints, targets, windows, scratch. Callers have checked the peer and the ids.

use super::{Context, ExtLimits, Route, Window};
use crate::endpoint::{Endpoint, Remote, Sge};
use crate::status::Status;
use core::mem::size_of;
use efa_dp_direct::wqe::words::Stamp;
use ferrogin_ffi::device::{MrHandle, MrPeer};
use ferrogin_ffi::ext::{EndpointExt, TargetWords};

impl<'a> Context<'a> {
    /// The `i`th endpoint.
    #[inline(always)]
    pub(super) fn endpoint(&self, i: u32) -> Endpoint<'a> {
        self.endpoint_at(self.endpoint_ext(i))
    }

    #[inline(always)]
    pub(super) fn endpoint_ext(&self, i: u32) -> *const EndpointExt {
        debug_assert!(i < self.ext.n_endpoints);
        self.ext.endpoints.wrapping_add(i as usize)
    }

    /// How values without an action are posted: `VALUE_*`.
    #[inline(always)]
    pub(crate) fn plain_value_way(&self) -> u32 {
        self.ext.value_way
    }

    /// The endpoint that posts on that route.
    #[inline(always)]
    pub(super) fn poster(&self, route: Route) -> Endpoint<'a> {
        self.endpoint_at(route.poster)
    }

    #[inline(always)]
    fn endpoint_at(&self, ext: *const EndpointExt) -> Endpoint<'a> {
        // SAFETY: the host made `n_endpoints` of them, and callers have checked the ids that indices come from.
        let ext = unsafe { &*ext };
        // SAFETY: made by the host plugin; lives as long as the context.
        unsafe { Endpoint::new(ext) }
    }

    /// The peer's endpoint on that route, which it must have.
    #[inline(always)]
    pub(super) fn target(&self, peer: u32, route: Route) -> Result<*const TargetWords, Status> {
        // `route` has bounded peer and slot, and the table has n_slots * nranks entries.
        let target = route.row.wrapping_add(peer as usize);
        if stamp(target).head == 0 { Err(Status::InvalidArgument) } else { Ok(target) }
    }

    /// The window, which is not null, on the context's rail.
    #[inline(always)]
    pub(super) fn near(&self, window: Window) -> *const MrHandle {
        let rails = window.0.cast::<*const MrHandle>();
        // SAFETY: a window is an array of one pointer for each rail of the communicator, constant while registered.
        unsafe { *rails.wrapping_add(self.ext.rail_id as usize) }
    }

    /// The peer's part of the window, which is not null, on the context's rail.
    #[inline(always)]
    pub(super) fn far(&self, window: Window, peer: u32) -> Far {
        Far(self.near(window).cast::<MrPeer>().wrapping_add(peer as usize))
    }

    #[inline(always)]
    pub(super) fn scratch_local(&self) -> Sge {
        Sge { addr: self.ext.scratch_local_addr, lkey: self.ext.scratch_lkey, length: 0 }
    }

    #[inline(always)]
    pub(super) fn scratch_remote(&self, peer: u32) -> Remote {
        let dev = self.ext.dev;
        // SAFETY: a constant field of the handle.
        let addrs = unsafe { (*dev).scratch_remote_addrs };
        // SAFETY: as above.
        let rkeys = unsafe { (*dev).scratch_remote_rkeys };
        // SAFETY: one entry for each rank, and `route` has bounded the peer.
        let addr = unsafe { *addrs.wrapping_add(peer as usize) };
        // SAFETY: as above.
        let rkey = unsafe { *rkeys.wrapping_add(peer as usize) };
        Remote { addr, rkey }
    }
}

/// What requests to a target, which [`Context::target`] gave, have in common.
#[inline(always)]
pub(super) fn stamp(target: *const TargetWords) -> Stamp {
    macro_rules! field {
        ($name:ident) => {
            // SAFETY: an entry of the context's table. Each field on its own, or the compiler reads words only to take
            // them apart.
            unsafe { (*target).$name }
        };
    }
    Stamp { head: field!(head), second: field!(second), third: field!(third) }
}

/// `length` bytes of a window on this rank, which [`Context::near`] gave.
#[inline(always)]
pub(super) fn local(near: *const MrHandle, offset: u64, length: u32) -> Sge {
    // SAFETY: constant while the window is registered.
    let lkey = unsafe { (*near).lkey };
    // SAFETY: as above.
    let addr = unsafe { (*near).local_addr };
    Sge { addr: addr.wrapping_add(offset), lkey, length }
}

/// A peer's part of a window: where its entry would be if the entries began where the handle does, before them.
#[derive(Clone, Copy)]
pub(super) struct Far(*const MrPeer);

/// A place in a peer's part of a window, which [`Context::far`] gave.
#[inline(always)]
pub(super) fn remote(far: Far, offset: u64) -> Remote {
    let peer = far.0.wrapping_byte_add(size_of::<MrHandle>());
    // SAFETY: one entry for each rank follows the handle, `route` has bounded the peer, and the entry is constant while
    // the window is registered.
    let rkey = unsafe { (*peer).rkey };
    // SAFETY: as above.
    let addr = unsafe { (*peer).remote_addr };
    Remote { addr: addr.wrapping_add(offset), rkey }
}

/// What ends the waits of the context that an endpoint belongs to.
#[inline(always)]
pub(super) fn limits_of(endpoint: Endpoint<'_>) -> ExtLimits<'_> {
    // SAFETY: the endpoint's context lives as long as it does.
    ExtLimits(unsafe { &*endpoint.context() })
}
