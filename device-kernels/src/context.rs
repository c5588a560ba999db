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
#[cfg(target_arch = "nvptx64")]
pub(crate) mod warp;

pub use completion::FlushRequest;

use crate::action::{Action, Flags};
use crate::endpoint::Endpoint;
use crate::post::combining::{self, AfterMark};
use crate::post::{Cta, Gpu, Share, Sharing, Thread};
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, LoadExternal, Ordering};
use crate::wait::Limit;
use core::ffi::c_void;
use core::mem::size_of;
use core::ptr;
use efa_dp_direct::wqe::words::ValueSize;
pub(crate) use fast_path::Rest;
use fast_path::{Get, InlineValue, Path, PooledValue, Put, Value};
use ferrogin_ffi::ext::{ContextExt, HEADER_MAGIC, HEADER_VERSION, HandleHeader, VALUE_NONE, VALUE_POOL};
use tables::{Named, ON_GPU, Tables, Target};

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
        self.ext.routes.nranks
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        // SAFETY: a constant field of the handle, which lives as long as the context.
        unsafe { (*self.ext.routes.dev).rank as u32 }
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
        self,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        match self.post_put::<S, false>(peer, dst, src, bytes, action, flags) {
            Rest::Done => Ok(()),
            Rest::Finish(endpoint, after) => finish::<S>(endpoint, after),
            Rest::Wait(reserved) => self.put_waiting::<S, false>(peer, dst, src, bytes, action, flags, reserved),
            Rest::Slow => self.put_slow(peer, dst, src, bytes, action, flags),
        }
    }

    /// Posts a put or a get, up to the rare cases.
    #[inline(always)]
    pub(crate) fn post_put<S: Share, const GET: bool>(
        self,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Rest<'a> {
        match self.tables::<ON_GPU>().put(peer, action.into(), dst, src, bytes) {
            Ok(put) if GET => fast_path::post::<S>(Get(put), flags.is_aggregate()),
            Ok(put) => fast_path::post::<S>(put, flags.is_aggregate()),
            Err(_) => Rest::Slow,
        }
    }

    /// A put or a get that found no room at once.
    #[cold]
    #[inline(never)]
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn put_waiting<S: Share, const GET: bool>(
        self,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
        reserved: u64,
    ) -> Result<(), Status> {
        let put = self.tables::<ON_GPU>().put(peer, action.into(), dst, src, bytes);
        let Put { path, remote, local, bytes } = put.map_err(|_| Status::InvalidArgument)?;
        let (endpoints, local) = ((path.poster.endpoint(), path.target.index), local.sge(bytes));
        fast_path::put_waiting::<S>(endpoints, remote.memory(), local, GET, flags.is_aggregate(), Some(reserved))
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
        in_mode!(flags, self.put_value_as(peer, dst, (value, bytes), action, flags))
    }

    #[inline(always)]
    pub(crate) fn put_value_as<S: Share>(
        self,
        peer: u32,
        dst: Span,
        (value, bytes): (u64, u32),
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        match self.post_value::<S>(None, peer, dst, (value, bytes), action, flags) {
            Rest::Done => Ok(()),
            Rest::Finish(endpoint, after) => finish::<S>(endpoint, after),
            Rest::Wait(reserved) => self.put_value_waiting::<S>(peer, dst, value, bytes, action, flags, reserved),
            Rest::Slow => self.put_value_slow(peer, dst, value, bytes, action, flags),
        }
    }

    /// As [`Context::post_put`]. `value_path` is the endpoint's [`VALUE_POOL`] or [`VALUE_INLINE`], where the caller knows it.
    #[inline(always)]
    pub(crate) fn post_value<S: Share>(
        self,
        value_path: Option<u32>,
        peer: u32,
        dst: Span,
        (value, bytes): (u64, u32),
        action: Action,
        flags: Flags,
    ) -> Rest<'a> {
        let Ok(request) = self.tables::<ON_GPU>().value(peer, action.into(), dst, value, bytes) else {
            return Rest::Slow;
        };
        if cfg!(target_arch = "nvptx64") {
            return fast_path::post::<S>(request, flags.is_aggregate());
        }
        match value_path.unwrap_or(request.config.path) {
            VALUE_POOL => fast_path::post::<S>(PooledValue(request), flags.is_aggregate()),
            _ => fast_path::post::<S>(InlineValue(request), flags.is_aggregate()),
        }
    }

    /// A value that found no room at once.
    #[cold]
    #[inline(never)]
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn put_value_waiting<S: Share>(
        self,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
        reserved: u64,
    ) -> Result<(), Status> {
        let request = self.tables::<ON_GPU>().value(peer, action.into(), dst, value, bytes);
        let Value { path, remote, .. } = request.map_err(|_| Status::InvalidArgument)?;
        let endpoints = (path.poster.endpoint(), path.target.index);
        fast_path::value_waiting::<S>(endpoints, remote.memory(), (value, bytes), flags.is_aggregate(), Some(reserved))
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
        self,
        peer: u32,
        remote: Span,
        local: Span,
        bytes: u64,
        flags: Flags,
    ) -> Result<(), Status> {
        let action = Action::NONE;
        match self.post_put::<S, true>(peer, remote, local, bytes, action, flags) {
            Rest::Done => Ok(()),
            Rest::Finish(endpoint, after) => finish::<S>(endpoint, after),
            Rest::Wait(reserved) => self.put_waiting::<S, true>(peer, remote, local, bytes, action, flags, reserved),
            Rest::Slow => self.get_slow(peer, remote, local, bytes, flags),
        }
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
    pub(crate) fn signal_as<S: Share>(self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        match self.post_signal::<S>(peer, action, flags) {
            Rest::Done => Ok(()),
            Rest::Finish(endpoint, after) => finish::<S>(endpoint, after),
            Rest::Wait(reserved) => self.signal_waiting::<S>(peer, action, flags, reserved),
            Rest::Slow => self.signal_slow(peer, action, flags),
        }
    }

    /// As [`Context::post_put`].
    #[inline(always)]
    pub(crate) fn post_signal<S: Share>(self, peer: u32, action: Action, flags: Flags) -> Rest<'a> {
        match self.tables::<ON_GPU>().signal(peer, action.into()) {
            Ok(put) => fast_path::post::<S>(put, flags.is_aggregate()),
            Err(_) => Rest::Slow,
        }
    }

    /// A signal that found no room at once.
    #[cold]
    #[inline(never)]
    pub(crate) fn signal_waiting<S: Share>(
        self,
        peer: u32,
        action: Action,
        flags: Flags,
        reserved: u64,
    ) -> Result<(), Status> {
        let put = self.tables::<ON_GPU>().signal(peer, action.into());
        let Put { path, remote, local, bytes } = put.map_err(|_| Status::InvalidArgument)?;
        let (endpoints, local) = ((path.poster.endpoint(), path.target.index), local.sge(bytes));
        fast_path::put_waiting::<S>(endpoints, remote.memory(), local, false, flags.is_aggregate(), Some(reserved))
    }

    #[inline(always)]
    fn limits(&self) -> ExtLimits<'a> {
        ExtLimits(self.ext)
    }
}

/// Does what is left after the mark.
#[inline(always)]
fn finish<S: Share>(endpoint: Endpoint<'_>, after: AfterMark) -> Result<(), Status> {
    combining::finish::<S, _>(endpoint, after);
    Ok(())
}

/// A request that does not take the fast path.
struct Refused<R> {
    /// An argument is out of range. Otherwise the slow path carries the operation out.
    is_invalid: bool,
    /// The request, where it is loaded first.
    request: Option<R>,
}

type Checked<R> = Result<R, Refused<R>>;

/// Returns early where nothing is loaded yet.
macro_rules! check_first {
    ($is_refused:expr, $is_invalid:expr) => {
        if !LOAD_FIRST && $is_refused {
            return Err(Refused { is_invalid: $is_invalid, request: None });
        }
    };
}

/// The requests of the fast path. A request of the slow path, or with an argument out of range, is refused.
impl<'a, const LOAD_FIRST: bool> Tables<'a, LOAD_FIRST> {
    /// The request, unless it is refused or its target does not exist.
    #[inline(always)]
    fn checked<R>(request: R, target: Target<'_, LOAD_FIRST>, is_refused: bool, is_invalid: bool) -> Checked<R> {
        let exists = target.exists();
        if (LOAD_FIRST && is_refused) | !exists {
            let request = if LOAD_FIRST { Some(request) } else { None };
            return Err(Refused { is_invalid: is_invalid | !exists, request });
        }
        Ok(request)
    }

    /// A put, or a get.
    #[inline(always)]
    #[allow(clippy::result_large_err)]
    fn put(self, peer: u32, named: Named, dst: Span, src: Span, bytes: u64) -> Checked<Put<'a, LOAD_FIRST>> {
        let (route, known) = self.try_route(peer, named, DATA);
        let known_windows = known & !dst.is_null() & !src.is_null();
        let is_invalid = !known | (!known_windows & (bytes != 0));
        // No bytes, too many, or a policy without a fast path.
        let is_slow = (bytes.wrapping_sub(1) >= self.0.fast_put_limit) | (route.raised_by > 1);
        check_first!(!known_windows | is_slow, is_invalid);
        if !LOAD_FIRST {
            // SAFETY: the number was found not to be above the limit, which has 32 bits.
            unsafe { core::hint::assert_unchecked(bytes >> 32 == 0) };
        }
        let path = Path { poster: self.poster(route), target: self.target(route) };
        let (remote, local) = (self.remote_span(dst, peer, known_windows), self.local_span(src, known_windows));
        Self::checked(
            Put { path, remote, local, bytes: bytes as u32 },
            path.target,
            !known_windows | is_slow,
            is_invalid,
        )
    }

    /// A value.
    #[inline(always)]
    fn value(self, peer: u32, named: Named, dst: Span, value: u64, bytes: u32) -> Checked<Value<'a, LOAD_FIRST>> {
        let (route, known) = self.try_route(peer, named, VALUE);
        let known_window = known & !dst.is_null();
        let size = ValueSize::new(bytes);
        let is_invalid = !known_window | size.is_none() | (named.counter != 0);
        let is_slow = route.raised_by > 1;
        check_first!(is_invalid | is_slow, is_invalid);
        let path = Path { poster: self.poster(route), target: self.target(route) };
        let (remote, config) = (self.remote_span(dst, peer, known_window), path.poster.value_config());
        let size = size.unwrap_or_default();
        let is_slow = is_slow | (config.path == VALUE_NONE);
        check_first!(is_slow, false);
        Self::checked(Value { path, remote, value, size, config }, path.target, is_slow | is_invalid, is_invalid)
    }

    /// A write without bytes.
    #[inline(always)]
    #[allow(clippy::result_large_err)]
    fn signal(self, peer: u32, named: Named) -> Checked<Put<'a, LOAD_FIRST>> {
        let (route, known) = self.try_route(peer, named, DATA);
        let is_slow = (self.0.fast_put_limit == 0) | (route.raised_by > 1);
        check_first!(!known | is_slow, !known);
        let path = Path { poster: self.poster(route), target: self.target(route) };
        let scratch = self.scratch();
        let (remote, local) = (self.remote_span(scratch, peer, known), self.local_span(scratch, true));
        Self::checked(Put { path, remote, local, bytes: 0 }, path.target, is_slow | !known, !known)
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
