//! The context's tables: endpoints, targets, windows, scratch. Callers have checked the peer and the ids.

use super::{Context, ExtLimits, Route, Span};
use crate::endpoint::{Endpoint, Remote, Sge};
use crate::status::Status;
use core::mem::size_of;
use efa_dp_direct::wqe::words::WqeTemplate;
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
    pub(crate) fn plain_value_path(&self) -> u32 {
        self.ext.value_path
    }

    /// The endpoint that posts on that route.
    #[inline(always)]
    pub(super) fn poster(&self, route: Route) -> Endpoint<'a> {
        self.endpoint_at(route.poster)
    }

    #[inline(always)]
    fn endpoint_at(&self, ext: *const EndpointExt) -> Endpoint<'a> {
        // SAFETY: the plugin made `n_endpoints` of them for the context's life, and callers have checked the ids that
        // indices come from.
        let ext = unsafe { &*ext };
        // SAFETY: the plugin filled it, and keeps it as long as the context.
        unsafe { Endpoint::new(ext) }
    }

    /// The peer's endpoint on that route; an error where the peer has none.
    #[inline(always)]
    pub(super) fn target(&self, peer: u32, route: Route) -> Result<*const TargetWords, Status> {
        // `route` has bounded peer and slot, and the table has n_slots * nranks entries.
        let target = route.row.wrapping_add(peer as usize);
        if template(target).head == 0 { Err(Status::InvalidArgument) } else { Ok(target) }
    }

    /// The memory handle of a window that is not null, on the context's rail.
    #[inline(always)]
    fn memory_handle(&self, span: Span) -> *const MrHandle {
        let rails = span.window.0.cast::<*const MrHandle>();
        // SAFETY: a window is an array of one pointer for each rail of the communicator, constant while registered.
        unsafe { *rails.wrapping_add(self.ext.rail_id as usize) }
    }

    /// The place on this rank; its window is not null.
    #[inline(always)]
    pub(super) fn local_span(&self, span: Span) -> LocalSpan {
        LocalSpan { handle: self.memory_handle(span), offset: span.offset }
    }

    /// The place on the peer; its window is not null.
    #[inline(always)]
    pub(super) fn remote_span(&self, span: Span, peer: u32) -> RemoteSpan {
        let before_entry = self.memory_handle(span).cast::<MrPeer>().wrapping_add(peer as usize);
        RemoteSpan { before_entry, offset: span.offset }
    }

    #[inline(always)]
    pub(super) fn scratch_local(&self) -> Sge {
        Sge { addr: self.ext.scratch_local_addr, lkey: self.ext.scratch_lkey, length: 0 }
    }

    #[inline(always)]
    pub(super) fn scratch_remote(&self, peer: u32) -> Remote {
        let dev = self.ext.dev;
        // SAFETY: the plugin made the device handle and keeps it, constant in this field, as long as the context.
        let addrs = unsafe { (*dev).scratch_remote_addrs };
        // SAFETY: the plugin made the device handle and keeps it, constant in this field, as long as the context.
        let rkeys = unsafe { (*dev).scratch_remote_rkeys };
        // SAFETY: the list has one entry for each rank, and `route` has bounded the peer.
        let addr = unsafe { *addrs.wrapping_add(peer as usize) };
        // SAFETY: the list has one entry for each rank, and `route` has bounded the peer.
        let rkey = unsafe { *rkeys.wrapping_add(peer as usize) };
        Remote { addr, rkey }
    }
}

/// What work requests to a target, which [`Context::target`] gave, have in common.
#[inline(always)]
pub(super) fn template(target: *const TargetWords) -> WqeTemplate {
    macro_rules! field {
        ($name:ident) => {
            // SAFETY: an entry of the context's table, constant while the context lives. Each field is read on its own,
            // because the compiler would otherwise read words and take them apart.
            unsafe { (*target).$name }
        };
    }
    WqeTemplate { head: field!(head), second: field!(second), third: field!(third) }
}

/// A place in a window on this rank.
#[derive(Clone, Copy)]
pub(super) struct LocalSpan {
    handle: *const MrHandle,
    offset: u64,
}

impl LocalSpan {
    /// `length` bytes at this place.
    #[inline(always)]
    pub(super) fn sge(self, length: u32) -> Sge {
        // SAFETY: the plugin keeps the handle constant while the window is registered, as the caller of the operation vouches.
        let lkey = unsafe { (*self.handle).lkey };
        // SAFETY: the plugin keeps the handle constant while the window is registered, as the caller of the operation vouches.
        let addr = unsafe { (*self.handle).local_addr };
        Sge { addr: addr.wrapping_add(self.offset), lkey, length }
    }
}

/// A place in a peer's part of a window.
#[derive(Clone, Copy)]
pub(super) struct RemoteSpan {
    /// The peer's entry less the size of the handle that the entries follow: one addition less for a post.
    before_entry: *const MrPeer,
    offset: u64,
}

impl RemoteSpan {
    /// Address and key of this place.
    #[inline(always)]
    pub(super) fn memory(self) -> Remote {
        let entry = self.before_entry.wrapping_byte_add(size_of::<MrHandle>());
        // SAFETY: one entry for each rank follows the handle, `route` has bounded the peer, and the plugin keeps the entry
        // constant while the window is registered.
        let rkey = unsafe { (*entry).rkey };
        // SAFETY: one entry for each rank follows the handle, `route` has bounded the peer, and the plugin keeps the entry
        // constant while the window is registered.
        let addr = unsafe { (*entry).remote_addr };
        Remote { addr: addr.wrapping_add(self.offset), rkey }
    }
}

/// What ends the waits of the context that an endpoint belongs to.
#[inline(always)]
pub(super) fn limits_of(endpoint: Endpoint<'_>) -> ExtLimits<'_> {
    // SAFETY: the plugin keeps a context as long as its endpoints.
    ExtLimits(unsafe { &*endpoint.context() })
}
