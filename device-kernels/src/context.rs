//! One GIN context: the local endpoint on which an operation is posted, and the endpoint of the peer to which it goes.
//!
//! The poster is a local choice, the target a remote one. A counter is the poster's completion count, so an operation
//! that names counter `c` is posted on `c`'s endpoint, and no other operation is. Without a counter, an operation that raises
//! signal `s` is posted on `s`'s endpoint. An operation with neither is posted on the data endpoint, or a value on the value
//! endpoint. The target is the peer's endpoint of the signal, or its data endpoint, where no signal is raised.
//!
//! An operation of one work request by the `combining` policy takes the fast path (`fast_path`), which is inlined. Every other operation
//! is a call (`slow_path`). Emulated signals are words of memory and have no endpoints (`emulated`).

mod completion;
mod emulated;
pub mod fast_path;
mod group;
#[cfg(any(feature = "host", feature = "ptx"))]
pub mod inline;
mod operation;
mod slow_path;
mod tables;
pub(crate) mod warp;

pub use completion::FlushRequest;

use crate::action::{Action, Flags, Sharing};
use crate::platform;
use crate::post::exclusive;
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, LoadExternal, Ordering};
use crate::wait::Limit;
use core::ffi::c_void;
use core::mem::size_of;
use core::ptr;
use fast_path::Continuation;
use ferrogin_ffi::ext::{ContextExt, HEADER_MAGIC, HEADER_VERSION, HandleHeader};
pub use operation::Arguments;
use operation::{Operation, Resolved};

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
    pub(crate) ext: &'a ContextExt,
}

// SAFETY: everything behind the context is constant, or all threads access it atomically.
unsafe impl Send for Context<'_> {}
// SAFETY: everything behind the context is constant, or all threads access it atomically.
unsafe impl Sync for Context<'_> {}

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

    /// Whether this context's signals are emulated, so that they may be strong or in a window's memory.
    pub fn emulates_signals(&self) -> bool {
        !self.ext.emulated.is_null()
    }

    /// Signals of this rank.
    #[cfg(feature = "host")]
    pub(crate) fn signals(&self) -> u32 {
        self.emulated().map_or(self.ext.routes.n_signals, |emulated| emulated.n_signals)
    }

    /// Returns whether the context of `peer`, a rank, has signal `id`.
    #[cfg(feature = "host")]
    pub(crate) fn peer_has_signal(&self, peer: u32, id: u32) -> bool {
        match self.emulated() {
            // SAFETY: the list has an entry for each rank.
            Ok(emulated) => id < unsafe { (*emulated.peers.wrapping_add(peer as usize)).n_signals },
            Err(_) => {
                let tables = self.tables();
                id < self.ext.routes.last_slot && tables.target((id + 1) * self.nranks() + peer).exists()
            }
        }
    }

    /// Sets the time after which a wait of this context fails with [`Status::Timeout`], in nanoseconds; 0 is no limit. It
    /// applies to later calls of all threads.
    pub fn set_timeout_ns(&self, ns: u64) {
        self.timeout_word().store(ns, Ordering::Relaxed);
    }

    /// Waits a moment, in a loop in which the caller polls for something that this context's card writes. `round` counts the
    /// calls of one wait, from 0.
    #[cfg(feature = "host")]
    pub fn relax(&self, round: u32) {
        Limit::relax(self, round);
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
        self.post_operation(Arguments::put(peer, dst, src, bytes, action, flags))
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
        self.post_operation(Arguments::value(peer, dst, value, bytes, action, flags))
    }

    /// Reads `bytes` from `remote` on `peer` to `local` on this rank. They have arrived after the next [`Context::flush`].
    ///
    /// # Errors
    ///
    /// As for [`Context::put`].
    #[inline(always)]
    pub fn get(&self, peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags) -> Result<(), Status> {
        self.post_operation(Arguments::get(peer, remote, local, bytes, flags))
    }

    /// Carries out `action` on `peer`, without bytes. An empty action still rings what was aggregated on the data endpoint.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`].
    #[inline(always)]
    pub fn signal(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        self.post_operation(Arguments::signal(peer, action, flags))
    }

    /// Posts an operation. With constant flags the compiler keeps one mode.
    #[inline(always)]
    pub(crate) fn post_operation(self, arguments: Arguments) -> Result<(), Status> {
        let resolved = self.tables().resolve(arguments);
        let Resolved { operation, poster, .. } = resolved;
        if !resolved.is_fast {
            let Operation { kind, peer, named, flags, remote, local, bytes } = operation;
            // A new struct, whose address the call takes, so that the fast path keeps the other one in registers.
            let operation = Operation { kind, peer, named, flags, remote, local, bytes };
            return if resolved.is_invalid { Err(Status::InvalidArgument) } else { self.carry_out(operation) };
        }
        if operation.flags.mode() == Sharing::Thread {
            return exclusive::post(poster, self, operation.flags.is_aggregate(), resolved);
        }
        Continuation::start(resolved).finish(operation.bytes as u32)
    }

    /// Returns whether a wait has taken longer than its time limit.
    #[inline(always)]
    fn is_too_long(&self, waited_ns: u64) -> bool {
        // No limit, 0, becomes the longest time.
        waited_ns > self.timeout_word().load_external(Ordering::Relaxed).wrapping_sub(1)
    }

    #[inline(always)]
    pub(crate) fn timeout_word(&self) -> &'a AtomicU64 {
        // SAFETY: an aligned word of the context, which lives for 'a; host and kernels access it atomically.
        unsafe { AtomicU64::from_ptr(self.ext.timeout_ns) }
    }
}

/// What ends the waits of a context. Only a wait reads the words.
impl Limit for Context<'_> {
    #[inline(always)]
    fn aborted(&self) -> bool {
        // SAFETY: an aligned word of the context, which outlives this; host and kernels access it atomically.
        unsafe { AtomicU32::from_ptr(self.ext.abort_flag) }.load_external(Ordering::Relaxed) != 0
    }

    #[inline(always)]
    fn has_passed(&self, began_ns: &mut u64) -> bool {
        let now_ns = platform::clock_ns();
        // The clock only goes forward: the first round's time stays.
        *began_ns = now_ns.min(*began_ns);
        self.is_too_long(now_ns - *began_ns)
    }

    #[cfg(not(target_arch = "nvptx64"))]
    #[inline]
    fn progress(&self) -> bool {
        // SAFETY: the plugin filled both fields from one table of the provider, and keeps the domain that the argument names
        // open until the context is destroyed.
        self.ext.progress.is_some_and(|progress| unsafe { progress(self.ext.progress_arg) })
    }
}
