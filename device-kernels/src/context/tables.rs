//! The context's tables: endpoints, targets, windows, scratch.

use super::{Context, FIRST_COUNTER, Span, Window};
use crate::action::Action;
use crate::constant;
use crate::endpoint::{Endpoint, Remote, Sge};
use crate::status::Status;
use core::marker::PhantomData;
use core::mem::size_of;
use efa_dp_direct::wqe::words::WqeTemplate;
use ferrogin_ffi::device::{MrHandle, MrPeer};
use ferrogin_ffi::ext::{LOST_TARGET, Routes, TargetWords};

/// The signal or counter that an operation names, if any.
#[derive(Clone, Copy)]
pub(super) struct Name {
    pub(super) exists: bool,
    pub(super) id: u32,
}

impl Name {
    pub(super) const NONE: Name = Name { exists: false, id: 0 };

    /// Converts an id + 1, or 0 for no name.
    #[inline(always)]
    fn in_slot(slot: u32) -> Self {
        Name { exists: slot != 0, id: slot.wrapping_sub(1) }
    }

    /// Returns whether the id is below `n` or there is no name.
    #[inline(always)]
    fn is_valid(self, n: u32) -> bool {
        !self.exists | (self.id < n)
    }
}

/// What an operation names: a signal, the amount it's raised by, and a counter.
#[derive(Clone, Copy)]
pub(super) struct Named {
    pub(super) signal: Name,
    pub(super) amount: u32,
    pub(super) counter: Name,
}

impl Named {
    /// Neither a signal nor a counter.
    pub(super) const NONE: Named = Named { signal: Name::NONE, amount: 0, counter: Name::NONE };

    /// Returns the slots of an [`Action`] with these names.
    #[inline(always)]
    pub(super) fn slots(self) -> u32 {
        let slot = |name: Name| if name.exists { name.id.min(LARGEST) + 1 } else { 0 };
        slot(self.signal) | slot(self.counter) << 16
    }

    /// Returns whether it names neither.
    pub(super) fn is_none(self) -> bool {
        !self.signal.exists & !self.counter.exists
    }

    /// Returns the same names without the signal.
    pub(super) fn without_signal(self) -> Self {
        Named { signal: Name::NONE, amount: 0, ..self }
    }

    /// Returns the signal's id, if one is named. The largest id stands for every id without a slot, and becomes one
    /// that no context has.
    pub(super) fn signal_id(self) -> Option<u32> {
        let id = if self.signal.id == LARGEST { u32::MAX } else { self.signal.id };
        self.signal.exists.then_some(id)
    }
}

/// The id that goes into the largest slot.
const LARGEST: u32 = 0xfffe;

impl From<Action> for Named {
    #[inline(always)]
    fn from(action: Action) -> Self {
        let (signal, counter) = (Name::in_slot(action.signal_slot()), Name::in_slot(action.counter_slot()));
        Named { signal, amount: action.amount(), counter }
    }
}

/// The local endpoint, and the peer's endpoint.
#[derive(Clone, Copy)]
pub(super) struct Route {
    /// Index into the targets.
    pub(super) target: u32,
    /// Index of the local endpoint.
    pub(super) poster: u32,
    /// Amount that the signal is raised by; 0 without a signal.
    pub(super) raised_by: u32,
    /// Whether peer and counter exist.
    pub(super) peer_and_counter_valid: bool,
    /// Whether they exist, and the peer can have the signal.
    pub(super) signal_valid: bool,
}

/// The tables of a context.
///
/// A post loads everything it needs before it checks its arguments: a branch before a load would cost a GPU a round
/// trip to memory. If an argument is out of range, the place it leads to is replaced with one that exists.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a>(pub(super) Routes, PhantomData<Context<'a>>);

impl<'a> Context<'a> {
    #[inline(always)]
    pub(super) fn tables(&self) -> Tables<'a> {
        // SAFETY: the plugin filled the struct and keeps it constant as long as the context; its layout guarantees the
        // alignment.
        Tables(unsafe { constant::load(&raw const self.ext.routes) }, PhantomData)
    }

    /// Returns the `i`th endpoint.
    #[inline(always)]
    pub(super) fn endpoint(&self, i: u32) -> Endpoint<'a> {
        debug_assert!(i < self.ext.n_endpoints);
        // SAFETY: the plugin made `n_endpoints` of them for the context's lifetime, and callers have checked the ids
        // that indices come from.
        unsafe { Endpoint::from_ptr(self.ext.routes.endpoints.wrapping_add(i as usize)) }
    }
}

impl<'a> Tables<'a> {
    /// Checks peer and names, and chooses the route. `plain` is the endpoint for operations that name neither signal
    /// nor counter.
    #[inline(always)]
    pub(super) fn route(self, peer: u32, named: Named, plain: u32) -> Result<Route, Status> {
        let route = self.try_route(peer, named, plain);
        if route.signal_valid { Ok(route) } else { Err(Status::InvalidArgument) }
    }

    /// Chooses the route, whose fields say what is in range. A signal must exist even if it's raised by 0.
    #[inline(always)]
    pub(super) fn try_route(self, peer: u32, named: Named, plain: u32) -> Route {
        let Tables(routes, _) = self;
        let Named { signal, amount, counter } = named;
        let peer_and_counter_valid = (peer < routes.nranks) & counter.is_valid(routes.n_counters);
        let signal_valid = peer_and_counter_valid & signal.is_valid(routes.last_slot);
        let raised_by = if signal.exists { amount } else { 0 };
        let slot = if raised_by != 0 { signal.id.wrapping_add(1) } else { 0 };
        let poster = if counter.exists {
            counter.id.wrapping_add(FIRST_COUNTER)
        } else if (raised_by != 0) & (signal.id < routes.n_signals) {
            signal.id + FIRST_COUNTER + routes.n_counters
        } else {
            // This rank has no endpoint for a signal that only its peers have.
            plain
        };
        let or_first = |index, is_valid: bool| if is_valid { index } else { 0 };
        let target = or_first(slot.wrapping_mul(routes.nranks).wrapping_add(peer), signal_valid);
        let poster = or_first(poster, peer_and_counter_valid);
        Route { target, poster, raised_by, peer_and_counter_valid, signal_valid }
    }

    /// Returns the endpoint that posts on `route`.
    #[inline(always)]
    pub(super) fn endpoint(self, route: Route) -> Endpoint<'a> {
        debug_assert!(route.poster < FIRST_COUNTER + self.0.n_counters + self.0.n_signals);
        // SAFETY: `try_route` has checked the ids that the index comes from, and the plugin made that many endpoints.
        unsafe { Endpoint::from_ptr(element(self.0.endpoints, route.poster)) }
    }

    /// Returns the target at a route's index.
    #[inline(always)]
    pub(super) fn target(self, index: u32) -> Target {
        // SAFETY: `try_route` has bounded peer and slot, and the table has an aligned entry for each pair of them, as
        // long as the context. The host changes nothing in it but the mark of a lost rank, whose byte no other load
        // takes part of.
        Target(unsafe { constant::load(element(self.0.targets, index)) })
    }

    /// Returns the address of a window's peer entries on the context's rail.
    #[inline(always)]
    fn peers(self, span: Span) -> *const MrPeer {
        span.window.0.cast::<MrPeer>().wrapping_byte_add(self.0.window_peers as usize)
    }

    /// Returns a place on this rank, whose window isn't null if it's `valid`. The length is 0.
    #[inline(always)]
    pub(super) fn local(self, span: Span, valid: bool) -> Sge {
        let handle = self.peers(span).cast::<MrHandle>().wrapping_sub(1);
        let handle = if valid { handle } else { self.0.scratch };
        // SAFETY: the plugin places an aligned handle before the peers' entries and keeps it constant while the window
        // is registered, for which the operation's caller vouches. It keeps the scratch memory's handle constant too.
        let handle = unsafe { constant::load(handle) };
        Sge { addr: handle.local_addr.wrapping_add(span.offset), lkey: handle.lkey, length: 0 }
    }

    /// Returns a place on the peer. If it's `valid`, the peer exists and the window isn't null.
    #[inline(always)]
    pub(super) fn remote(self, span: Span, peer: u32, valid: bool) -> Remote {
        let entry = element(self.peers(span), peer);
        let entry = if valid { entry } else { self.0.scratch.cast() };
        // SAFETY: the plugin places an aligned entry for each rank after the handle and keeps it constant while the
        // window is registered, for which the operation's caller vouches; the scratch memory's handle is as long as an
        // entry.
        let entry = unsafe { constant::load(entry) };
        Remote { addr: entry.remote_addr.wrapping_add(span.offset), rkey: entry.rkey }
    }

    /// Returns the places for a write without bytes, if the peer is `valid`.
    #[inline(always)]
    pub(super) fn nothing(self, peer: u32, valid: bool) -> (Remote, Sge) {
        let peers = self.0.scratch.wrapping_byte_add(size_of::<MrHandle>());
        let window = Window(peers.wrapping_byte_sub(self.0.window_peers as usize).cast_mut().cast());
        (self.remote(window.at(0), peer, valid), self.local(window.at(0), true))
    }
}

/// Returns the address of a table's element, computed in one instruction on a GPU.
#[inline(always)]
fn element<T>(table: *const T, index: u32) -> *const T {
    #[cfg(not(target_arch = "nvptx64"))]
    return table.wrapping_add(index as usize);
    #[cfg(target_arch = "nvptx64")]
    {
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
}

/// The peer's endpoint on a route.
#[derive(Clone, Copy)]
pub(super) struct Target(TargetWords);

impl Target {
    /// Returns whether the peer has this endpoint, and isn't lost.
    #[inline(always)]
    pub(super) fn exists(self) -> bool {
        self.0.head as i64 > 0
    }

    /// Returns what all requests to the target have in common.
    #[inline(always)]
    pub(super) fn template(self) -> WqeTemplate {
        WqeTemplate { head: self.0.head, second: self.0.second, third: self.0.third }
    }

    /// Returns the same for a request that is reserved already, and which the loss of the peer can't take back.
    pub(super) fn reserved(self) -> WqeTemplate {
        WqeTemplate { head: self.0.head & !LOST_TARGET, ..self.template() }
    }

    /// Returns the same, or an error if the peer has no such endpoint or is lost.
    #[inline(always)]
    pub(super) fn existing(self) -> Result<WqeTemplate, Status> {
        match self.0.head as i64 {
            1.. => Ok(self.template()),
            0 => Err(Status::InvalidArgument),
            _ => Err(Status::PeerLost),
        }
    }
}

/// Returns an endpoint's context.
#[inline(always)]
pub(super) fn context_of(endpoint: Endpoint<'_>) -> Context<'_> {
    // SAFETY: the plugin keeps a context as long as its endpoints.
    Context { ext: unsafe { &*endpoint.context() } }
}
