//! One GIN context: which endpoint an operation is posted on, and which of the peer's it is sent to.
//!
//! The poster is a local choice, the target a remote one. A counter is the poster's completion count, so an operation
//! that names counter `c` is posted on `c`'s endpoint, and nothing else is. Without a counter, one that raises signal
//! `s` rides `s`'s endpoint, and one that does neither the data endpoint (the value endpoint, for a value). The target is
//! the peer's endpoint of the signal, or its data endpoint, where nothing is observed.
//!
//! A put, get or value of the usual kind takes a short way that is inlined: one work request by the `combining` policy.
//! Everything else ([`general`]) is a call.

mod counting;
mod general;
#[cfg(any(feature = "host", feature = "ptx"))]
pub mod hot;
mod short;
mod tables;

pub use counting::FlushRequest;

use crate::action::{Action, Flags};
use crate::post::{Cta, Gpu, Share, Sharing, Thread};
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering, Outside};
use crate::wait::Limit;
use core::ffi::c_void;
use core::mem::size_of;
use core::ptr;
use efa_dp_direct::wqe::words::ValueSize;
use ferrogin_ffi::ext::{
    ContextExt, EndpointExt, HEADER_MAGIC, HEADER_VERSION, HandleHeader, TargetWords, VALUE_INLINE, VALUE_POOL,
};
use short::{Empty, Get, InlineValue, PooledValue, Put, To};

const DATA: u32 = 0;
const VALUE: u32 = 1;
const FIRST_COUNTER: u32 = 2;

/// A registered window: what `regMrSym` gave as `ginHandle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Window(pub *mut c_void);

impl Window {
    #[inline(always)]
    fn is_null(self) -> bool {
        self.0.is_null()
    }
}

// SAFETY: a window is the address of tables that nobody writes while it is registered.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

/// One GIN context of a rank; copies are views of the same context, and all of it may be used by any thread.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    ext: &'a ContextExt,
}

// SAFETY: everything behind the context is constant, or accessed atomically by all threads.
unsafe impl Send for Context<'_> {}
// SAFETY: as above.
unsafe impl Sync for Context<'_> {}

/// A call in the sharing mode of its flags: constant flags leave one of the three.
macro_rules! in_mode {
    ($flags:ident, $context:ident.$method:ident($($arg:expr),*)) => {
        match $flags.mode() {
            Sharing::Gpu => $context.$method::<Gpu>($($arg),*),
            Sharing::Cta => $context.$method::<Cta>($($arg),*),
            Sharing::Thread => $context.$method::<Thread>($($arg),*),
        }
    };
}

impl<'a> Context<'a> {
    /// The context `id` of the array that `createContext` returned in `ncclNetDeviceHandle->handle`.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: `handle` is null, or has no context `id`. [`Status::Unsupported`]: the handle was
    /// not made by this plugin, or by another version of it.
    ///
    /// # Safety
    ///
    /// `handle` is null or was returned by a GIN plugin's `createContext`, and is not destroyed during `'a`. The word
    /// range before it must be readable, as it is for every handle of the ferrogin plugin.
    pub unsafe fn from_handle(handle: *mut c_void, id: u32) -> Result<Self, Status> {
        if handle.is_null() {
            return Err(Status::InvalidArgument);
        }
        let header = handle.wrapping_byte_sub(size_of::<HandleHeader>()).cast::<HandleHeader>();
        // SAFETY: the caller vouches that the header's bytes are readable.
        let header = unsafe { ptr::read_unaligned(header) };
        if header.magic != HEADER_MAGIC || header.version != HEADER_VERSION {
            return Err(Status::Unsupported);
        }
        if id >= header.n_contexts {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: the header is ours: it points to `n_contexts` of these, constant while the context lives.
        let ext = unsafe { &*header.contexts.wrapping_add(id as usize) };
        Ok(Context { ext })
    }

    /// The same context from the address that [`Context::as_ptr`] gave.
    ///
    /// # Safety
    ///
    /// `ext` came from `as_ptr` of a context that lives for `'a`.
    #[inline(always)]
    pub unsafe fn from_ptr(ext: *const ContextExt) -> Self {
        // SAFETY: the caller vouches for it.
        Context { ext: unsafe { &*ext } }
    }

    /// The address that stands for this context in the C ABI.
    pub fn as_ptr(&self) -> *const ContextExt {
        self.ext
    }

    /// Ranks of the communicator.
    pub fn nranks(&self) -> u32 {
        self.ext.nranks
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        // SAFETY: a constant field of the handle, which lives as long as the context.
        unsafe { (*self.ext.dev).rank as u32 }
    }

    /// Nanoseconds after which a wait of this context gives up with [`Status::Timeout`]; 0 is never. Holds for the calls
    /// that begin after it, of all threads.
    pub fn set_timeout_ns(&self, ns: u64) {
        if let Some(word) = self.limits().timeout_word() {
            word.store(ns, Ordering::Relaxed);
        }
    }

    /// Waits a moment, in a loop in which the caller polls for something that this context's card writes. `round` counts the
    /// calls of one wait, from 0.
    #[cfg(feature = "host")]
    pub fn relax(&self, round: u32) {
        crate::platform::relax(round, || self.limits().progress());
    }

    /// Writes `bytes` from `src` at `src_off` on this rank to `dst` at `dst_off` on `peer`.
    ///
    /// Returns when it is posted; [`Context::flush`] says when the source may be reused. With no bytes only the action
    /// takes place. More than one card operation can carry (1 GiB) is split: then a signal or counter still means that
    /// all of it has landed, and this call waits for the first parts.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: peer, signal, counter or window out of range, or the peer has no such signal.
    /// Otherwise what ended a wait for room.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub fn put(
        &self,
        peer: u32,
        dst: Window,
        dst_off: u64,
        src: Window,
        src_off: u64,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        in_mode!(flags, self.put_as(peer, dst, dst_off, src, src_off, bytes, action, flags))
    }

    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub(crate) fn put_as<S: Share>(
        &self,
        peer: u32,
        dst: Window,
        dst_off: u64,
        src: Window,
        src_off: u64,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        // None, too many, or a policy without a short way.
        if bytes.wrapping_sub(1) >= self.ext.short_put {
            return self.put_general(peer, dst, dst_off, src, src_off, bytes, action, flags);
        }
        let Some(route) = self.short_route(peer, action, DATA)? else {
            return self.put_general(peer, dst, dst_off, src, src_off, bytes, action, flags);
        };
        if dst.is_null() || src.is_null() {
            return Err(Status::InvalidArgument);
        }
        let to = To { target: self.target(peer, route)?, poster: self.poster(route) };
        let (far, near) = (self.far(dst, peer), self.near(src));
        short::post::<S>(Put { to, far, dst_off, near, src_off, bytes: bytes as u32 }, flags)
    }

    /// Writes the low `bytes` (1, 2, 4 or 8) of `value` to `dst` at `dst_off` on `peer`.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]; also [`Status::InvalidArgument`] for another size or an action with a counter, which
    /// values cannot name, and [`Status::Unsupported`] where the card takes no values.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub fn put_value(
        &self,
        peer: u32,
        dst: Window,
        dst_off: u64,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        in_mode!(flags, self.put_value_as(None, peer, dst, dst_off, value, bytes, action, flags))
    }

    /// The short way of the endpoint may be known.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub(crate) fn put_value_as<S: Share>(
        &self,
        way: Option<u32>,
        peer: u32,
        dst: Window,
        dst_off: u64,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let size = ValueSize::new(bytes).ok_or(Status::InvalidArgument)?;
        let Some(route) = self.short_route(peer, action, VALUE)? else {
            return self.put_value_general(peer, dst, dst_off, value, bytes, action, flags);
        };
        if dst.is_null() {
            return Err(Status::InvalidArgument);
        }
        let to = To { target: self.target(peer, route)?, poster: self.poster(route) };
        let far = self.far(dst, peer);
        match way.unwrap_or_else(|| to.poster.value_way()) {
            VALUE_POOL => short::post::<S>(PooledValue { to, far, dst_off, value, bytes: size.bytes() }, flags),
            VALUE_INLINE => short::post::<S>(InlineValue { to, far, dst_off, value, size }, flags),
            _ => self.put_value_general(peer, dst, dst_off, value, bytes, action, flags),
        }
    }

    /// Reads `bytes` from `remote` at `remote_off` on `peer` to `local` at `local_off` on this rank. They are there
    /// after the next [`Context::flush`].
    ///
    /// # Errors
    ///
    /// As for [`Context::put`].
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub fn get(
        &self,
        peer: u32,
        remote: Window,
        remote_off: u64,
        local: Window,
        local_off: u64,
        bytes: u64,
        flags: Flags,
    ) -> Result<(), Status> {
        in_mode!(flags, self.get_as(peer, remote, remote_off, local, local_off, bytes, flags))
    }

    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub(crate) fn get_as<S: Share>(
        &self,
        peer: u32,
        remote: Window,
        remote_off: u64,
        local: Window,
        local_off: u64,
        bytes: u64,
        flags: Flags,
    ) -> Result<(), Status> {
        if bytes.wrapping_sub(1) >= self.ext.short_put {
            return self.get_general(peer, remote, remote_off, local, local_off, bytes, flags);
        }
        let route = self.route(peer, Action::NONE, DATA)?;
        if remote.is_null() || local.is_null() {
            return Err(Status::InvalidArgument);
        }
        let to = To { target: self.target(peer, route)?, poster: self.poster(route) };
        let (far, near) = (self.far(remote, peer), self.near(local));
        let get = Get { to, far, far_off: remote_off, near, near_off: local_off, bytes: bytes as u32 };
        short::post::<S>(get, flags)
    }

    /// Carries out `action` on `peer` with no bytes. An empty action still rings what was aggregated on the data
    /// endpoint.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`].
    #[inline(always)]
    pub fn signal(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        in_mode!(flags, self.signal_as(peer, action, flags))
    }

    #[inline(always)]
    pub(crate) fn signal_as<S: Share>(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        if self.ext.short_put == 0 {
            return self.signal_general(peer, action, flags);
        }
        let Some(route) = self.short_route(peer, action, DATA)? else {
            return self.signal_general(peer, action, flags);
        };
        let to = To { target: self.target(peer, route)?, poster: self.poster(route) };
        short::post::<S>(Empty { to, context: *self, peer }, flags)
    }
}

/// Where an operation goes.
#[derive(Clone, Copy)]
struct Route {
    /// The row of the peers' endpoints in the table of targets: that of their data endpoints, or that of a signal.
    row: *const TargetWords,
    /// Our endpoint.
    poster: *const EndpointExt,
    /// What the signal is raised by; 0 if none is.
    raised_by: u32,
}

impl<'a> Context<'a> {
    /// Checks peer and action, and says where the operation goes; `plain` is the endpoint for an empty action.
    #[inline(always)]
    fn route(&self, peer: u32, action: Action, plain: u32) -> Result<Route, Status> {
        if peer >= self.ext.nranks {
            return Err(Status::InvalidArgument);
        }
        if action.is_none() { Ok(self.plain_route(plain)) } else { self.route_of(action, plain) }
    }

    /// The same; nothing if it takes more than one post, or a value with a counter.
    #[inline(always)]
    fn short_route(&self, peer: u32, action: Action, plain: u32) -> Result<Option<Route>, Status> {
        if peer >= self.ext.nranks {
            return Err(Status::InvalidArgument);
        }
        if action.is_none() {
            return Ok(Some(self.plain_route(plain)));
        }
        let route = self.route_of(action, plain)?;
        let long = route.raised_by > 1 || plain == VALUE && action.local_counter().is_some();
        Ok(if long { None } else { Some(route) })
    }

    /// A signal that is raised by nothing must exist all the same.
    #[inline(always)]
    fn route_of(&self, action: Action, plain: u32) -> Result<Route, Status> {
        let counter_exists = action.local_counter().is_none_or(|counter| counter < self.ext.n_counters);
        if action.named_slot() >= self.ext.n_slots || !counter_exists {
            return Err(Status::InvalidArgument);
        }
        let (named, ext) = (action.named_slot(), self.ext);
        let raised_by = if named == 0 { 0 } else { action.amount() };
        let slot = if raised_by == 0 { 0 } else { named };
        // A signal that only peers have has no endpoint here.
        let poster = match action.local_counter() {
            Some(counter) => FIRST_COUNTER + counter,
            None if slot.wrapping_sub(1) < ext.n_signals => FIRST_COUNTER - 1 + ext.n_counters + slot,
            None => plain,
        };
        let row = ext.targets.wrapping_add(slot as usize * ext.nranks as usize);
        Ok(Route { row, poster: self.endpoint_ext(poster), raised_by })
    }

    #[inline(always)]
    fn plain_route(&self, plain: u32) -> Route {
        let poster = if plain == VALUE { self.ext.values } else { self.endpoint_ext(plain) };
        Route { row: self.ext.targets, poster, raised_by: 0 }
    }

    #[inline(always)]
    fn limits(&self) -> ExtLimits<'a> {
        ExtLimits(self.ext)
    }
}

/// What ends a context's waits; read only when something is waited for.
#[derive(Clone, Copy)]
struct ExtLimits<'a>(&'a ContextExt);

impl<'a> ExtLimits<'a> {
    fn timeout_word(self) -> Option<&'a AtomicU64> {
        if self.0.timeout_ns.is_null() {
            return None;
        }
        // SAFETY: an aligned word of the context, which lives for 'a and is accessed atomically by all.
        Some(unsafe { AtomicU64::from_ptr(self.0.timeout_ns) })
    }
}

impl Limit for ExtLimits<'_> {
    #[inline]
    fn aborted(&self) -> bool {
        if self.0.abort_flag.is_null() {
            return false;
        }
        // SAFETY: an aligned word of the context, which outlives this; host and kernels access it atomically.
        unsafe { AtomicU32::from_ptr(self.0.abort_flag) }.load_outside(Ordering::Relaxed) != 0
    }

    #[inline]
    fn timeout_ns(&self) -> u64 {
        self.timeout_word().map_or(0, |word| word.load_outside(Ordering::Relaxed))
    }

    #[cfg(not(target_arch = "nvptx64"))]
    #[inline]
    fn progress(&self) -> bool {
        // SAFETY: the plugin filled both fields from one table of the provider, and keeps the domain that the argument names
        // open until the context is destroyed.
        self.0.progress.is_some_and(|progress| unsafe { progress(self.0.progress_arg) })
    }
}
