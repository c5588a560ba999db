//! One GIN context: which local endpoint an operation is posted on, and which of the peer's endpoints it goes to.
//!
//! The poster is a local endpoint, the target a remote one. A counter is its endpoint's completion count, so operations
//! that name counter `c`, and no others, are posted on `c`'s endpoint. Without a counter, an operation that raises
//! signal `s` is posted on `s`'s endpoint. With neither, it's posted on the data endpoint or, if it's a value, on the
//! value endpoint. The target is the peer's endpoint for the signal, or its data endpoint if no signal is raised.
//!
//! Under the `combining` policy, an operation of one work request takes the fast path (`fast_path`), which is inlined.
//! Any other operation is a call (`operation`), as are those of several lanes of a warp (`warp`). Emulated signals are
//! words in memory and have no endpoints (`emulated`).

mod completion;
mod emulated;
pub(crate) mod failure;
pub mod fast_path;
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

/// A registered window: the `ginHandle` that `regMrSym` returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Window(pub *mut c_void);

impl Window {
    /// Returns the span that begins `offset` bytes into the window.
    #[inline(always)]
    pub const fn at(self, offset: u64) -> Span {
        Span { window: self, offset }
    }
}

// SAFETY: a window is the address of tables that the plugin keeps constant while the window is registered.
unsafe impl Send for Window {}
// SAFETY: a window is the address of tables that the plugin keeps constant while the window is registered.
unsafe impl Sync for Window {}

/// Where an operation's bytes begin, on this rank or on the peer, depending on the parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The window.
    pub window: Window,
    /// Offset from its start, in bytes.
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
    /// Opens context `id` in the array that `createContext` returned in `ncclNetDeviceHandle->handle`.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: `handle` is null or has no context `id`. [`Status::Unsupported`]: the handle was
    /// made by another plugin or by another version of this one.
    ///
    /// # Safety
    ///
    /// `handle` is null, or a GIN plugin's `createContext` returned it and it isn't destroyed during `'a`. The bytes
    /// before it must be readable, as they are for every handle of the ferrogin plugin.
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
        // SAFETY: magic and version show that the ferrogin plugin made the header, so it points to `n_contexts` of
        // these, and `id` is below that; they stay while the context lives.
        let ext = unsafe { &*header.contexts.wrapping_add(id as usize) };
        #[cfg(feature = "host")]
        crate::process::opens_context();
        Ok(Context { ext })
    }

    /// Returns the context at an address that [`Context::as_ptr`] returned.
    ///
    /// # Safety
    ///
    /// `ext` came from `as_ptr` of a context that lives for `'a`.
    #[inline(always)]
    pub unsafe fn from_ptr(ext: *const ContextExt) -> Self {
        // SAFETY: the caller vouches that `ext` came from a live context.
        Context { ext: unsafe { &*ext } }
    }

    /// Returns the address that identifies this context in the C ABI.
    pub fn as_ptr(&self) -> *const ContextExt {
        self.ext
    }

    /// Returns the number of ranks in the communicator.
    pub fn nranks(&self) -> u32 {
        self.ext.routes.nranks
    }

    /// Returns this rank's number.
    pub fn rank(&self) -> u32 {
        // SAFETY: a constant field of the handle, which lives as long as the context.
        unsafe { (*self.ext.routes.dev).rank as u32 }
    }

    /// Returns whether this context's signals are emulated, and so may be strong or in a window's memory.
    pub fn emulates_signals(&self) -> bool {
        !self.ext.emulated.is_null()
    }

    /// Returns the number of this rank's signals.
    pub(crate) fn signals(&self) -> u32 {
        self.emulated().map_or(self.ext.routes.n_signals, |emulated| emulated.n_signals)
    }

    /// Returns whether the context of `peer`, which must exist, has signal `id`.
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

    /// Sets the time, in nanoseconds, after which a wait on this context fails with [`Status::Timeout`]; 0 means no
    /// limit. It applies to later calls in all threads.
    pub fn set_timeout_ns(&self, ns: u64) {
        self.timeout_word().store(ns, Ordering::Relaxed);
    }

    /// Pauses briefly, for loops that poll for something this context's card writes. `round` counts the calls in one
    /// wait, from 0.
    #[cfg(feature = "host")]
    pub fn relax(&self, round: u32) {
        Limit::relax(self, round);
    }

    /// Writes `bytes` from `src` on this rank to `dst` on `peer`.
    ///
    /// Returns once the operation is posted. The source may be reused after a [`Context::flush`]. With 0 bytes only the
    /// action takes place. An operation too long for one work request (1 GiB) is split: a signal or counter still means
    /// that all bytes have landed, so the call then waits for the first parts.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: peer, signal, counter or window out of range, or the peer has no such signal.
    /// Otherwise, the reason a wait for room ended.
    #[inline(always)]
    pub fn put(&self, peer: u32, dst: Span, src: Span, bytes: u64, action: Action, flags: Flags) -> Result<(), Status> {
        self.post_operation(Arguments::put(peer, dst, src, bytes, action, flags))
    }

    /// Writes the low `bytes` (1, 2, 4 or 8) of `value` to `dst` on `peer`.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]; also [`Status::InvalidArgument`] for any other size or for an action with a counter,
    /// which values can't have; and [`Status::Unsupported`] if the card doesn't take values.
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

    /// Reads `bytes` from `remote` on `peer` to `local` on this rank. They have arrived once the next
    /// [`Context::flush`] returns.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`].
    #[inline(always)]
    pub fn get(&self, peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags) -> Result<(), Status> {
        self.post_operation(Arguments::get(peer, remote, local, bytes, flags))
    }

    /// Carries out `action` on `peer` without transferring bytes. An empty action still rings posts aggregated on the
    /// data endpoint.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`].
    #[inline(always)]
    pub fn signal(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        self.post_operation(Arguments::signal(peer, action, flags))
    }

    /// Posts an operation. If the flags are constant, the compiler keeps only one mode.
    #[inline(always)]
    pub(crate) fn post_operation(self, arguments: Arguments) -> Result<(), Status> {
        let resolved = self.tables().resolve(arguments);
        let Resolved { operation, poster, .. } = resolved;
        if !resolved.is_fast {
            let Operation { kind, peer, named, flags, remote, local, bytes } = operation;
            // A new struct: the call takes its address, so on the fast path the other one can stay in registers.
            let operation = Operation { kind, peer, named, flags, remote, local, bytes };
            return if resolved.is_invalid { Err(Status::InvalidArgument) } else { self.carry_out(operation) };
        }
        if operation.flags.mode() == Sharing::Thread {
            return exclusive::post(poster, self, operation.flags.is_aggregate(), resolved);
        }
        Continuation::post(resolved).finish(operation.bytes as u32)
    }

    /// Returns whether a wait has taken longer than its time limit.
    #[inline(always)]
    fn is_too_long(&self, waited_ns: u64) -> bool {
        // A limit of 0, which means none, becomes the longest time.
        waited_ns > self.timeout_word().load_external(Ordering::Relaxed).wrapping_sub(1)
    }

    #[inline(always)]
    pub(crate) fn timeout_word(&self) -> &'a AtomicU64 {
        // SAFETY: an aligned word of the context, which lives for 'a; host and kernels access it atomically.
        unsafe { AtomicU64::from_ptr(self.ext.timeout_ns) }
    }
}

/// What ends a context's waits. Only waits read these words.
impl Limit for Context<'_> {
    #[inline(always)]
    fn stop_word(&self) -> u32 {
        // SAFETY: an aligned word of the context, which outlives this; host and kernels access it atomically.
        unsafe { AtomicU32::from_ptr(self.ext.abort_flag) }.load_external(Ordering::Relaxed)
    }

    #[inline(always)]
    fn has_passed(&self, began_ns: &mut u64) -> bool {
        let now_ns = platform::clock_ns();
        // The clock never goes back, so the first round's time stays.
        *began_ns = now_ns.min(*began_ns);
        self.is_too_long(now_ns - *began_ns)
    }

    #[cfg(not(target_arch = "nvptx64"))]
    #[inline]
    fn progress(&self) -> bool {
        // SAFETY: the plugin filled both fields from one provider table, and keeps the domain that the argument names
        // open until the context is destroyed.
        self.ext.progress.is_some_and(|progress| unsafe { progress(self.ext.progress_arg) })
    }
}
