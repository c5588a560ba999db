//! The context's tables: endpoints, targets, windows, scratch.

use super::{Context, ExtLimits, FIRST_COUNTER, Span, Window};
use crate::action::Action;
use crate::constant::{self, Constant};
use crate::endpoint::{Endpoint, Remote, Sge};
use crate::platform::in_one_register;
use crate::status::Status;
use core::mem::size_of;
use efa_dp_direct::wqe::words::WqeTemplate;
use ferrogin_ffi::device::{MrHandle, MrPeer};
use ferrogin_ffi::ext::{Routes, TargetWords};

/// What an operation names: a signal and a counter, and the amount that the signal is raised by.
#[derive(Clone, Copy)]
pub(super) struct Named {
    pub(super) signal: Name,
    pub(super) counter: Name,
    pub(super) amount: u32,
    /// It names neither.
    pub(super) is_plain: bool,
}

/// A signal or counter, if the operation names one.
#[derive(Clone, Copy)]
pub(super) struct Name {
    pub(super) exists: bool,
    pub(super) id: u32,
}

impl Name {
    pub(super) const NONE: Name = Name { exists: false, id: 0 };

    /// From the id + 1, or 0 without a name.
    #[inline(always)]
    fn in_slot(slot: u32) -> Self {
        Name { exists: slot != 0, id: slot.wrapping_sub(1) }
    }

    /// Returns whether the id is below `n`, or there is no name.
    #[inline(always)]
    fn is_known(self, n: u32) -> bool {
        !self.exists | (self.id < n)
    }
}

impl From<Action> for Named {
    #[inline(always)]
    fn from(action: Action) -> Self {
        let (signal, counter) = (Name::in_slot(action.signal_slot()), Name::in_slot(action.counter_slot()));
        Named { signal, counter, amount: action.amount(), is_plain: action.is_none() }
    }
}

/// The local endpoint, and the peer's endpoint.
#[derive(Clone, Copy)]
pub(super) struct Route {
    /// Index into the targets.
    pub(super) target: u32,
    /// Index of the local endpoint.
    pub(super) poster: u32,
    /// The amount that the signal is raised by; 0 without a signal.
    pub(super) raised_by: u32,
    /// Peer and counter exist.
    pub(super) has_place: bool,
}

/// The tables of a context.
///
/// With `LOAD_FIRST` a post loads all that it needs and then checks its arguments: a branch before a load would cost a GPU a round
/// trip to memory. A place that an argument out of range leads to is replaced by a place that exists. Without it a post checks the
/// arguments and loads nothing before.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a, const LOAD_FIRST: bool = ON_GPU>(pub(super) Constant<'a, Routes>);

pub(super) const ON_GPU: bool = cfg!(target_arch = "nvptx64");

impl<'a> Context<'a> {
    #[inline(always)]
    pub(super) fn tables<const LOAD_FIRST: bool>(&self) -> Tables<'a, LOAD_FIRST> {
        // SAFETY: the plugin filled the struct and keeps it constant as long as the context; its layout has the alignment.
        Tables(unsafe { constant::load(&raw const self.ext.routes) })
    }

    /// The `i`th endpoint.
    #[inline(always)]
    pub(super) fn endpoint(&self, i: u32) -> Endpoint<'a> {
        debug_assert!(i < self.ext.n_endpoints);
        // SAFETY: the plugin made `n_endpoints` of them for the context's life, and callers have checked the ids that
        // indices come from.
        unsafe { Endpoint::from_ptr(self.ext.routes.endpoints.wrapping_add(i as usize)) }
    }

    /// What the requests to the target of an index have in common.
    #[inline(always)]
    pub(super) fn template_at(&self, index: u32) -> WqeTemplate {
        self.tables::<ON_GPU>().target_at(index).template()
    }
}

impl<'a, const LOAD_FIRST: bool> Tables<'a, LOAD_FIRST> {
    /// Checks peer and names, and chooses the route; `plain` is the endpoint of an operation that names neither.
    #[inline(always)]
    pub(super) fn route(self, peer: u32, named: Named, plain: u32) -> Result<Route, Status> {
        let (route, known) = self.try_route(peer, named, plain);
        if known { Ok(route) } else { Err(Status::InvalidArgument) }
    }

    /// The route, and whether peer and names are in range. A signal that is raised by 0 must exist all the same.
    #[inline(always)]
    pub(super) fn try_route(self, peer: u32, named: Named, plain: u32) -> (Route, bool) {
        let Tables(routes) = self;
        let Named { signal, counter, amount, .. } = named;
        let has_place = (peer < routes.nranks) & counter.is_known(routes.n_counters);
        let known = has_place & signal.is_known(routes.last_slot);
        let raised_by = if signal.exists { amount } else { 0 };
        let slot = if raised_by != 0 { signal.id.wrapping_add(1) } else { 0 };
        let poster = if counter.exists {
            counter.id.wrapping_add(FIRST_COUNTER)
        } else if (raised_by != 0) & (signal.id < routes.n_signals) {
            signal.id + FIRST_COUNTER + routes.n_counters
        } else {
            // This rank has no endpoint for a signal that only peers have.
            plain
        };
        let or_first = |index, known: bool| if LOAD_FIRST && !known { 0 } else { index };
        let target = or_first(slot.wrapping_mul(routes.nranks).wrapping_add(peer), known);
        (Route { target, poster: or_first(poster, has_place), raised_by, has_place }, known)
    }

    /// The same for the fast path, and the local endpoint. On a CPU the fast path takes no counter, and no signal that is not raised
    /// by one.
    #[inline(always)]
    pub(super) fn fast_route(self, peer: u32, named: Named, plain: u32) -> (Endpoint<'a>, Route, bool) {
        if LOAD_FIRST {
            let (route, known) = self.try_route(peer, named, plain);
            return (self.endpoint(route), route, known);
        }
        let (Tables(routes), Named { signal, counter, amount, .. }) = (self, named);
        let route = Route { target: peer, poster: plain, raised_by: 0, has_place: true };
        if peer >= routes.nranks {
            return (self.endpoint(route), route, false);
        }
        if named.is_plain {
            return (self.endpoint(route), route, true);
        }
        if counter.exists || amount != 1 || signal.id >= routes.last_slot {
            return (self.endpoint(route), route, false);
        }
        // This rank has no endpoint for a signal that only peers have.
        let own = FIRST_COUNTER + routes.n_counters + signal.id;
        let poster = if signal.id < routes.n_signals { own } else { plain };
        let target = (signal.id + 1).wrapping_mul(routes.nranks).wrapping_add(peer);
        let route = Route { target, poster, raised_by: 1, has_place: true };
        (self.endpoint(route), route, true)
    }

    /// The endpoint that posts on that route.
    #[inline(always)]
    pub(super) fn endpoint(self, route: Route) -> Endpoint<'a> {
        debug_assert!(route.poster < FIRST_COUNTER + self.0.n_counters + self.0.n_signals);
        // SAFETY: `route` has checked the ids that the index comes from, and the plugin made that many endpoints.
        unsafe { Endpoint::from_ptr(element(self.0.endpoints, route.poster)) }
    }

    /// The peer's endpoint on that route.
    #[inline(always)]
    pub(super) fn target(self, route: Route) -> Target<'a> {
        self.target_at(route.target)
    }

    /// The target of an index that a route has.
    #[inline(always)]
    pub(super) fn target_at(self, index: u32) -> Target<'a> {
        let words = if ON_GPU { element(self.0.targets, index) } else { self.0.targets.wrapping_add(index as usize) };
        // SAFETY: `try_route` has bounded peer and slot, and the table has an aligned entry for each of both, constant as long as
        // the context.
        Target { words: unsafe { constant::load(in_one_register(words.cast_mut())) }, index }
    }

    /// The address of the peers' entries of a window, on the context's rail.
    #[inline(always)]
    fn peers(self, span: Span) -> *const MrPeer {
        span.window.0.cast::<MrPeer>().wrapping_byte_add(self.0.window_peers as usize)
    }

    /// `length` bytes at a place on this rank, if its window is `known` not to be null.
    #[inline(always)]
    pub(super) fn local(self, span: Span, known: bool, length: u32) -> Sge {
        let handle = self.peers(span).cast::<MrHandle>().wrapping_sub(1);
        let handle = if LOAD_FIRST && !known { self.0.scratch } else { handle };
        // SAFETY: the plugin places the handle before the peers' entries, aligned, and keeps it constant while the window is
        // registered, as the caller of the operation vouches; as it does that of the scratch memory.
        let handle = unsafe { constant::load(handle) };
        Sge { addr: handle.local_addr.wrapping_add(span.offset), lkey: handle.lkey, length }
    }

    /// A place on the peer, if the peer is `known` and its window not null.
    #[inline(always)]
    pub(super) fn remote(self, span: Span, peer: u32, known: bool) -> Remote {
        let entry = element(self.peers(span), peer);
        let entry = if LOAD_FIRST && !known { self.0.scratch.cast() } else { entry };
        // SAFETY: the plugin places an aligned entry for each rank behind the handle, and keeps it constant while the window is
        // registered, as the caller of the operation vouches; the scratch memory's handle is as long as an entry.
        let entry = unsafe { constant::load(entry) };
        Remote { addr: entry.remote_addr.wrapping_add(span.offset), rkey: entry.rkey }
    }

    /// The source and the target of writes without bytes, as a window.
    #[inline(always)]
    pub(super) fn scratch(self) -> Span {
        let before =
            self.0.scratch.wrapping_byte_add(size_of::<MrHandle>()).wrapping_byte_sub(self.0.window_peers as usize);
        Window(before.cast_mut().cast()).at(0)
    }
}

/// An element of a table, by one instruction.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
fn element<T>(table: *const T, index: u32) -> *const T {
    let element: *const T;
    // SAFETY: computes a number, and touches no memory.
    unsafe {
        core::arch::asm!(
            "mad.wide.u32 {element}, {index}, {size}, {table};",
            element = out(reg64) element, index = in(reg32) index, size = const size_of::<T>(), table = in(reg64) table,
            options(pure, nomem, nostack)
        )
    };
    element
}

/// An element of a table. One of 16 bytes is two words of 8 bytes, which takes an instruction less.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
fn element<T>(table: *const T, index: u32) -> *const T {
    if size_of::<T>() == 16 {
        table.cast::<u64>().wrapping_add(index.wrapping_mul(2) as usize).cast()
    } else {
        table.wrapping_add(index as usize)
    }
}

/// The peer's endpoint of a route.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) words: Constant<'a, TargetWords>,
    index: u32,
}

impl Target<'_> {
    /// Its index in the context of the local endpoint. A CPU computes it from the address, which takes no register until then.
    #[inline(always)]
    pub(super) fn index(self, poster: Endpoint<'_>) -> u32 {
        if ON_GPU {
            return self.index;
        }
        let first = context_of(poster).ext.routes.targets;
        ((&raw const *self.words).addr().wrapping_sub(first.addr()) / size_of::<TargetWords>()) as u32
    }

    /// Returns whether the peer has this endpoint.
    #[inline(always)]
    pub(super) fn exists(self) -> bool {
        self.words.head as i64 > 0
    }

    /// What the requests to the target have in common.
    #[inline(always)]
    pub(super) fn template(self) -> WqeTemplate {
        WqeTemplate { head: self.words.head, second: self.words.second, third: self.words.third }
    }

    /// The same; an error where the peer has no such endpoint.
    #[inline(always)]
    pub(super) fn existing(self) -> Result<WqeTemplate, Status> {
        if self.exists() { Ok(self.template()) } else { Err(Status::InvalidArgument) }
    }
}

/// The context of an endpoint.
#[inline(always)]
pub(super) fn context_of(endpoint: Endpoint<'_>) -> Context<'_> {
    // SAFETY: the plugin keeps a context as long as its endpoints.
    Context { ext: unsafe { &*endpoint.context() } }
}

/// What ends the waits of the context that an endpoint belongs to.
#[inline(always)]
pub(super) fn limits_of(endpoint: Endpoint<'_>) -> ExtLimits<'_> {
    context_of(endpoint).limits()
}
