//! The context's tables: endpoints, targets, windows, scratch.

use super::{Context, ExtLimits, FIRST_COUNTER, Span, Window};
use crate::action::Action;
use crate::constant::{self, Constant};
use crate::endpoint::{Endpoint, Poster, Remote, Sge};
use crate::status::Status;
use core::mem::{MaybeUninit, size_of};
use efa_dp_direct::wqe::words::WqeTemplate;
use ferrogin_ffi::device::{MrHandle, MrPeer};
use ferrogin_ffi::ext::{Routes, TargetWords};

/// What an operation names: a signal and a counter by their ids + 1, or 0 for none, and the amount that the signal is raised by.
#[derive(Clone, Copy)]
pub(super) struct Named {
    pub(super) signal: u32,
    pub(super) counter: u32,
    pub(super) amount: u32,
}

impl From<Action> for Named {
    #[inline(always)]
    fn from(action: Action) -> Self {
        Named { signal: action.signal_slot(), counter: action.counter_slot(), amount: action.amount() }
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

    /// How values without an action are posted: `VALUE_*`.
    #[inline(always)]
    #[cfg(not(target_arch = "nvptx64"))]
    pub(crate) fn plain_value_path(&self) -> u32 {
        self.ext.routes.value_path
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
        let known = (peer < routes.nranks) & (named.signal <= routes.last_slot) & (named.counter <= routes.n_counters);
        let raised_by = if named.signal == 0 { 0 } else { named.amount };
        let slot = if named.amount == 0 { 0 } else { named.signal };
        let poster = if named.counter != 0 {
            FIRST_COUNTER - 1 + named.counter
        } else if slot.wrapping_sub(1) < routes.n_signals {
            FIRST_COUNTER - 1 + routes.n_counters + slot
        } else {
            // This rank has no endpoint for a signal that only peers have.
            plain
        };
        let or_first = |index| if LOAD_FIRST && !known { 0 } else { index };
        let target = or_first(slot.wrapping_mul(routes.nranks).wrapping_add(peer));
        (Route { target, poster: or_first(poster), raised_by }, known)
    }

    /// The endpoint that posts on that route.
    #[inline(always)]
    pub(super) fn endpoint(self, route: Route) -> Endpoint<'a> {
        debug_assert!(route.poster < FIRST_COUNTER + self.0.n_counters + self.0.n_signals);
        // SAFETY: `route` has checked the ids that the index comes from, and the plugin made that many endpoints.
        unsafe { Endpoint::from_ptr(self.0.endpoints.wrapping_add(route.poster as usize)) }
    }

    /// The same for one post.
    #[inline(always)]
    pub(super) fn poster(self, route: Route) -> Poster<'a> {
        self.endpoint(route).poster()
    }

    /// The peer's endpoint on that route.
    #[inline(always)]
    pub(super) fn target(self, route: Route) -> Target<'a, LOAD_FIRST> {
        self.target_at(route.target)
    }

    /// The target of an index that a route has.
    #[inline(always)]
    pub(super) fn target_at(self, index: u32) -> Target<'a, LOAD_FIRST> {
        Target { tables: self, words: Early::new(|| self.target_words(index)), index }
    }

    #[inline(always)]
    fn target_words(self, index: u32) -> Constant<'a, TargetWords> {
        // SAFETY: `try_route` has bounded peer and slot, and the table has an aligned entry for each of both, constant as long as
        // the context.
        unsafe { constant::load(element(self.0.targets, index)) }
    }

    /// The address of the peers' entries of a window, on the context's rail.
    #[inline(always)]
    fn peers(self, span: Span) -> *const MrPeer {
        span.window.0.cast::<MrPeer>().wrapping_byte_add(self.0.window_peers as usize)
    }

    #[inline(always)]
    fn handle(self, span: Span, known: bool) -> Constant<'a, MrHandle> {
        let handle = self.peers(span).cast::<MrHandle>().wrapping_sub(1);
        let handle = if LOAD_FIRST && !known { self.0.scratch } else { handle };
        // SAFETY: the plugin places the handle before the peers' entries, aligned, and keeps it constant while the window is
        // registered, as the caller of the operation vouches; as it does that of the scratch memory.
        unsafe { constant::load(handle) }
    }

    #[inline(always)]
    fn entry(self, span: Span, peer: u32, known: bool) -> Constant<'a, MrPeer> {
        let entry = element(self.peers(span), peer);
        let entry = if LOAD_FIRST && !known { self.0.scratch.cast() } else { entry };
        // SAFETY: the plugin places an aligned entry for each rank behind the handle, and keeps it constant while the window is
        // registered, as the caller of the operation vouches; the scratch memory's handle is as long as an entry.
        unsafe { constant::load(entry) }
    }

    /// The place on this rank, if the window is `known` not to be null.
    #[inline(always)]
    pub(super) fn local_span(self, span: Span, known: bool) -> LocalSpan<'a, LOAD_FIRST> {
        LocalSpan { tables: self, span, handle: Early::new(|| self.handle(span, known)) }
    }

    /// The place on the peer, if the peer is `known` and the window not null.
    #[inline(always)]
    pub(super) fn remote_span(self, span: Span, peer: u32, known: bool) -> RemoteSpan<'a, LOAD_FIRST> {
        RemoteSpan { tables: self, span, peer, entry: Early::new(|| self.entry(span, peer, known)) }
    }

    /// The source and the target of writes without bytes, as a window.
    #[inline(always)]
    pub(super) fn scratch(self) -> Span {
        let before =
            self.0.scratch.wrapping_byte_add(size_of::<MrHandle>()).wrapping_byte_sub(self.0.window_peers as usize);
        Window(before.cast_mut().cast()).at(0)
    }
}

/// An element of 16 bytes. A CPU doubles the index and then adds words of 8 bytes, which takes an instruction less.
#[inline(always)]
fn element<T>(table: *const T, index: u32) -> *const T {
    const { assert!(size_of::<T>() == 16) };
    if ON_GPU {
        table.wrapping_add(index as usize)
    } else {
        table.cast::<u64>().wrapping_add(index.wrapping_mul(2) as usize).cast()
    }
}

/// A constant that is loaded first, with `LOAD_FIRST`.
#[derive(Clone, Copy)]
struct Early<'a, T: Copy, const LOAD_FIRST: bool>(MaybeUninit<Constant<'a, T>>);

impl<'a, T: Copy, const LOAD_FIRST: bool> Early<'a, T, LOAD_FIRST> {
    #[inline(always)]
    fn new(load: impl FnOnce() -> Constant<'a, T>) -> Self {
        Early(if LOAD_FIRST { MaybeUninit::new(load()) } else { MaybeUninit::uninit() })
    }

    /// The constant; `load` loads it where it was not loaded first.
    #[inline(always)]
    fn get_or(self, load: impl FnOnce() -> Constant<'a, T>) -> Constant<'a, T> {
        if LOAD_FIRST {
            // SAFETY: `new` has loaded it.
            unsafe { self.0.assume_init() }
        } else {
            load()
        }
    }
}

/// The peer's endpoint of a route.
#[derive(Clone, Copy)]
pub(super) struct Target<'a, const LOAD_FIRST: bool> {
    tables: Tables<'a, LOAD_FIRST>,
    words: Early<'a, TargetWords, LOAD_FIRST>,
    pub(super) index: u32,
}

impl<'a, const LOAD_FIRST: bool> Target<'a, LOAD_FIRST> {
    #[inline(always)]
    pub(super) fn words(self) -> Constant<'a, TargetWords> {
        self.words.get_or(|| self.tables.target_words(self.index))
    }

    /// Returns whether the peer has this endpoint.
    #[inline(always)]
    pub(super) fn exists(self) -> bool {
        self.words().head != 0
    }

    /// What the requests to the target have in common.
    #[inline(always)]
    pub(super) fn template(self) -> WqeTemplate {
        let words = self.words();
        WqeTemplate { head: words.head, second: words.second, third: words.third }
    }

    /// The same; an error where the peer has no such endpoint.
    #[inline(always)]
    pub(super) fn existing(self) -> Result<WqeTemplate, Status> {
        if self.exists() { Ok(self.template()) } else { Err(Status::InvalidArgument) }
    }
}

/// A place in a window on this rank.
#[derive(Clone, Copy)]
pub(super) struct LocalSpan<'a, const LOAD_FIRST: bool> {
    tables: Tables<'a, LOAD_FIRST>,
    span: Span,
    handle: Early<'a, MrHandle, LOAD_FIRST>,
}

impl<const LOAD_FIRST: bool> LocalSpan<'_, LOAD_FIRST> {
    /// `length` bytes at this place.
    #[inline(always)]
    pub(super) fn sge(self, length: u32) -> Sge {
        let handle = self.handle.get_or(|| self.tables.handle(self.span, true));
        Sge { addr: handle.local_addr.wrapping_add(self.span.offset), lkey: handle.lkey, length }
    }
}

/// A place in a peer's part of a window.
#[derive(Clone, Copy)]
pub(super) struct RemoteSpan<'a, const LOAD_FIRST: bool> {
    tables: Tables<'a, LOAD_FIRST>,
    span: Span,
    peer: u32,
    entry: Early<'a, MrPeer, LOAD_FIRST>,
}

impl<const LOAD_FIRST: bool> RemoteSpan<'_, LOAD_FIRST> {
    /// Address and key of this place.
    #[inline(always)]
    pub(super) fn memory(self) -> Remote {
        let entry = self.entry.get_or(|| self.tables.entry(self.span, self.peer, true));
        Remote { addr: entry.remote_addr.wrapping_add(self.span.offset), rkey: entry.rkey }
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
