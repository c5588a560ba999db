//! The context's tables: endpoints, targets, windows, scratch. Callers have checked the peer and the ids.

use super::{Context, Route, Window};
use crate::endpoint::{Endpoint, Remote, Sge};
use core::mem::size_of;
use efa_dp_direct::wqe::words::Stamp;
use ferrogin_ffi::device::{MrHandle, MrPeer};
use ferrogin_ffi::ext::EndpointExt;

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

    /// The peer has the endpoint on that route.
    #[inline(always)]
    pub(super) fn has_target(&self, peer: u32, route: Route) -> bool {
        self.stamp(route, peer).head != 0
    }

    /// What requests on that route have in common.
    #[inline(always)]
    pub(super) fn stamp(&self, route: Route, peer: u32) -> Stamp {
        let target = route.row.wrapping_add(peer as usize);
        macro_rules! field {
            ($name:ident) => {
                // SAFETY: `route` has bounded peer and slot, and the table has n_slots * nranks entries. Each field on its
                // own, or the compiler reads words only to take them apart.
                unsafe { (*target).$name }
            };
        }
        Stamp { head: field!(head), second: field!(second), third: field!(third) }
    }

    /// The window, which is not null, on the context's rail.
    #[inline(always)]
    fn rail(&self, window: Window) -> *const MrHandle {
        let rails = window.0.cast::<*const MrHandle>();
        // SAFETY: a window is an array of one pointer for each rail of the communicator, constant while registered.
        unsafe { *rails.wrapping_add(self.ext.rail_id as usize) }
    }

    /// `length` bytes of a window, which is not null, on this rank.
    #[inline(always)]
    pub(super) fn local(&self, window: Window, offset: u64, length: u32) -> Sge {
        let mr = self.rail(window);
        // SAFETY: constant while the window is registered.
        let lkey = unsafe { (*mr).lkey };
        // SAFETY: as above.
        let addr = unsafe { (*mr).local_addr };
        Sge { addr: addr.wrapping_add(offset), lkey, length }
    }

    /// A place in a window, which is not null, on a peer.
    #[inline(always)]
    pub(super) fn remote(&self, window: Window, offset: u64, peer: u32) -> Remote {
        let peers = self.rail(window).wrapping_byte_add(size_of::<MrHandle>()).cast::<MrPeer>();
        let peer = peers.wrapping_add(peer as usize);
        // SAFETY: one entry for each rank follows the handle, and `route` has bounded the peer.
        let rkey = unsafe { (*peer).rkey };
        // SAFETY: as above.
        let addr = unsafe { (*peer).remote_addr };
        Remote { addr: addr.wrapping_add(offset), rkey }
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
