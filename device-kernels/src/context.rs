//! One GIN context: the local endpoint on which an operation is posted, and the endpoint of the peer to which it goes.
//!
//! The poster is a local choice, the target a remote one. A counter is the poster's completion count, so an operation
//! that names counter `c` is posted on `c`'s endpoint, and no other operation is. Without a counter, an operation that raises
//! signal `s` is posted on `s`'s endpoint. An operation with neither is posted on the data endpoint, or a value on the value
//! endpoint. The target is the peer's endpoint of the signal, or its data endpoint, where no signal is raised.
//!
//! An operation of one work request by the `combining` policy takes the fast path (`fast_path`), which is inlined. Every
//! other operation is a call (`slow_path`).

mod completion;
#[cfg(any(feature = "host", feature = "ptx"))]
pub mod continuation;
mod fast_path;
mod slow_path;
mod tables;

pub use completion::FlushRequest;

use crate::action::{Action, Flags};
use crate::post::{Cta, Gpu, Share, Sharing, Thread};
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, LoadExternal, Ordering};
use crate::wait::Limit;
use core::ffi::c_void;
use core::mem::size_of;
use core::ptr;
use efa_dp_direct::wqe::words::ValueSize;
use fast_path::{Empty, Get, InlineValue, Path, PooledValue, Put};
use ferrogin_ffi::ext::{
    ContextExt, EndpointExt, HEADER_MAGIC, HEADER_VERSION, HandleHeader, TargetWords, VALUE_INLINE, VALUE_POOL,
};

const DATA: u32 = 0;
const VALUE: u32 = 1;
const FIRST_COUNTER: u32 = 2;

/// A registered window: what `regMrSym` gave as `ginHandle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Window(pub *mut c_void);

impl Window {
    /// The place `offset` bytes into the window.
    #[inline(always)]
    pub const fn at(self, offset: u64) -> Span {
        Span { window: self, offset }
    }
}

// SAFETY: a window is the address of tables that the plugin keeps constant while the window is registered.
unsafe impl Send for Window {}
// SAFETY: a window is the address of tables that the plugin keeps constant while the window is registered.
unsafe impl Sync for Window {}

/// Where the bytes of an operation begin: on this rank or on the peer, as the parameter says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The window.
    pub window: Window,
    /// Bytes from its start.
    pub offset: u64,
}

impl Span {
    #[inline(always)]
    fn is_null(self) -> bool {
        self.window.0.is_null()
    }

    /// The place `bytes` further.
    #[inline(always)]
    fn skip(self, bytes: u64) -> Span {
        Span { offset: self.offset.wrapping_add(bytes), ..self }
    }
}

/// One GIN context of a rank. Copies are views of the same context, and any thread may use it.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    ext: &'a ContextExt,
}

// SAFETY: everything behind the context is constant, or all threads access it atomically.
unsafe impl Send for Context<'_> {}
// SAFETY: everything behind the context is constant, or all threads access it atomically.
unsafe impl Sync for Context<'_> {}

/// A call in the sharing mode of its flags. With constant flags the compiler keeps one of the three.
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
    /// `handle` is null or a GIN plugin's `createContext` returned it, and is not destroyed during `'a`. The bytes before it
    /// must be readable, as they are for every handle of the ferrogin plugin.
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
        // SAFETY: magic and version say that the ferrogin plugin made the header: it points to `n_contexts` of these, and `id`
        // is below that; they stay while the context lives.
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
        // SAFETY: the caller vouches that `ext` came from a live context.
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

    /// Sets the time after which a wait of this context fails with [`Status::Timeout`], in nanoseconds; 0 is no limit. It
    /// applies to later calls of all threads.
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

    /// Writes `bytes` from `src` on this rank to `dst` on `peer`.
    ///
    /// Returns when the operation is posted. After a [`Context::flush`] the source may be reused. With 0 bytes only the action
    /// takes place. An operation of more than one work request's bytes (1 GiB) is split: a signal or counter still means that
    /// all bytes have landed, and this call waits for the first parts.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: peer, signal, counter or window out of range, or the peer has no such signal.
    /// Otherwise what ended a wait for room.
    #[inline(always)]
    pub fn put(&self, peer: u32, dst: Span, src: Span, bytes: u64, action: Action, flags: Flags) -> Result<(), Status> {
        in_mode!(flags, self.put_as(peer, dst, src, bytes, action, flags))
    }

    #[inline(always)]
    pub(crate) fn put_as<S: Share>(
        &self,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        // No bytes, too many, or a policy without a fast path.
        if bytes.wrapping_sub(1) >= self.ext.fast_put_limit {
            return self.put_slow(peer, dst, src, bytes, action, flags);
        }
        let Some(route) = self.fast_route(peer, action, DATA)? else {
            return self.put_slow(peer, dst, src, bytes, action, flags);
        };
        if dst.is_null() || src.is_null() {
            return Err(Status::InvalidArgument);
        }
        let path = Path { target: self.target(peer, route)?, poster: self.poster(route) };
        let (remote, local) = (self.remote_span(dst, peer), self.local_span(src));
        fast_path::post::<S>(Put { path, remote, local, bytes: bytes as u32 }, flags)
    }

    /// Writes the low `bytes` (1, 2, 4 or 8) of `value` to `dst` on `peer`.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]; also [`Status::InvalidArgument`] for another size, or for an action with a counter, which
    /// values cannot name; and [`Status::Unsupported`] where the card takes no values.
    #[inline(always)]
    pub fn put_value(
        &self,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        in_mode!(flags, self.put_value_as(None, peer, dst, (value, bytes), action, flags))
    }

    /// `value_path` is the endpoint's [`VALUE_POOL`] or [`VALUE_INLINE`], where the caller knows it.
    #[inline(always)]
    pub(crate) fn put_value_as<S: Share>(
        &self,
        value_path: Option<u32>,
        peer: u32,
        dst: Span,
        (value, bytes): (u64, u32),
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let size = ValueSize::new(bytes).ok_or(Status::InvalidArgument)?;
        let Some(route) = self.fast_route(peer, action, VALUE)? else {
            return self.put_value_slow(peer, dst, value, bytes, action, flags);
        };
        if dst.is_null() {
            return Err(Status::InvalidArgument);
        }
        let path = Path { target: self.target(peer, route)?, poster: self.poster(route) };
        let remote = self.remote_span(dst, peer);
        match value_path.unwrap_or_else(|| path.poster.value_path()) {
            VALUE_POOL => fast_path::post::<S>(PooledValue { path, remote, value, bytes: size.bytes() }, flags),
            VALUE_INLINE => fast_path::post::<S>(InlineValue { path, remote, value, size }, flags),
            _ => self.put_value_slow(peer, dst, value, bytes, action, flags),
        }
    }

    /// Reads `bytes` from `remote` on `peer` to `local` on this rank. They have arrived after the next [`Context::flush`].
    ///
    /// # Errors
    ///
    /// As for [`Context::put`].
    #[inline(always)]
    pub fn get(&self, peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags) -> Result<(), Status> {
        in_mode!(flags, self.get_as(peer, remote, local, bytes, flags))
    }

    #[inline(always)]
    pub(crate) fn get_as<S: Share>(
        &self,
        peer: u32,
        remote: Span,
        local: Span,
        bytes: u64,
        flags: Flags,
    ) -> Result<(), Status> {
        if bytes.wrapping_sub(1) >= self.ext.fast_put_limit {
            return self.get_slow(peer, remote, local, bytes, flags);
        }
        let route = self.route(peer, Action::NONE, DATA)?;
        if remote.is_null() || local.is_null() {
            return Err(Status::InvalidArgument);
        }
        let path = Path { target: self.target(peer, route)?, poster: self.poster(route) };
        let (remote, local) = (self.remote_span(remote, peer), self.local_span(local));
        fast_path::post::<S>(Get { path, remote, local, bytes: bytes as u32 }, flags)
    }

    /// Carries out `action` on `peer`, without bytes. An empty action still rings what was aggregated on the data endpoint.
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
        if self.ext.fast_put_limit == 0 {
            return self.signal_slow(peer, action, flags);
        }
        let Some(route) = self.fast_route(peer, action, DATA)? else {
            return self.signal_slow(peer, action, flags);
        };
        let path = Path { target: self.target(peer, route)?, poster: self.poster(route) };
        fast_path::post::<S>(Empty { path, context: *self, peer }, flags)
    }
}

/// The local endpoint, and the kind of the peer's endpoint.
#[derive(Clone, Copy)]
struct Route {
    /// The row of the table of targets: the peers' data endpoints, or their endpoints of one signal.
    row: *const TargetWords,
    /// The local endpoint.
    poster: *const EndpointExt,
    /// The amount that the signal is raised by; 0 without a signal.
    raised_by: u32,
}

impl<'a> Context<'a> {
    /// Checks peer and action, and chooses the route; `plain` is the endpoint for an empty action.
    #[inline(always)]
    fn route(&self, peer: u32, action: Action, plain: u32) -> Result<Route, Status> {
        if peer >= self.ext.nranks {
            return Err(Status::InvalidArgument);
        }
        if action.is_none() { Ok(self.plain_route(plain)) } else { self.route_of(action, plain) }
    }

    /// The same; `None` for an operation of more than one post, and for a value with a counter.
    #[inline(always)]
    fn fast_route(&self, peer: u32, action: Action, plain: u32) -> Result<Option<Route>, Status> {
        if peer >= self.ext.nranks {
            return Err(Status::InvalidArgument);
        }
        if action.is_none() {
            return Ok(Some(self.plain_route(plain)));
        }
        let route = self.route_of(action, plain)?;
        let is_slow = route.raised_by > 1 || plain == VALUE && action.local_counter().is_some();
        Ok(if is_slow { None } else { Some(route) })
    }

    /// A signal that is raised by 0 must exist all the same.
    #[inline(always)]
    fn route_of(&self, action: Action, plain: u32) -> Result<Route, Status> {
        let counter_exists = action.local_counter().is_none_or(|counter| counter < self.ext.n_counters);
        if action.signal_slot() >= self.ext.n_slots || !counter_exists {
            return Err(Status::InvalidArgument);
        }
        let (named, ext) = (action.signal_slot(), self.ext);
        let raised_by = if named == 0 { 0 } else { action.amount() };
        let slot = if raised_by == 0 { 0 } else { named };
        // This rank has no endpoint for a signal that only peers have.
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

/// What ends a context's waits. The words are read only by a wait.
#[derive(Clone, Copy)]
struct ExtLimits<'a>(&'a ContextExt);

impl<'a> ExtLimits<'a> {
    fn timeout_word(self) -> Option<&'a AtomicU64> {
        if self.0.timeout_ns.is_null() {
            return None;
        }
        // SAFETY: an aligned word of the context, which lives for 'a; host and kernels access it atomically.
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
        unsafe { AtomicU32::from_ptr(self.0.abort_flag) }.load_external(Ordering::Relaxed) != 0
    }

    #[inline]
    fn timeout_ns(&self) -> u64 {
        self.timeout_word().map_or(0, |word| word.load_external(Ordering::Relaxed))
    }

    #[cfg(not(target_arch = "nvptx64"))]
    #[inline]
    fn progress(&self) -> bool {
        // SAFETY: the plugin filled both fields from one table of the provider, and keeps the domain that the argument names
        // open until the context is destroyed.
        self.0.progress.is_some_and(|progress| unsafe { progress(self.0.progress_arg) })
    }
}
