//! One GIN context: which endpoint an operation is posted on, and which of the peer's it is sent to.
//!
//! The poster is a local choice, the target a remote one. A counter is the poster's completion count, so an operation
//! that names counter `c` is posted on `c`'s endpoint, and nothing else is. Without a counter, one that raises signal
//! `s` rides `s`'s endpoint, and one that does neither the data endpoint (the value endpoint, for a value). The target is
//! the peer's endpoint of the signal, or its data endpoint, where nothing is observed.

use crate::action::{Action, Flags};
use crate::endpoint::{Direction, Endpoint, Local, Remote, Request};
use crate::post::COUNT_MASK;
use crate::status::Status;
use crate::wait::{Limits, Spin};
use core::ffi::c_void;
use core::mem::size_of;
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use ferrogin_ffi::device::{CounterHandle, MrHandle, MrPeer};
use ferrogin_ffi::ext::{ContextExt, HEADER_MAGIC, HEADER_VERSION, HandleHeader, Target};

const DATA: usize = 0;
const VALUE: usize = 1;
const FIRST_COUNTER: usize = 2;

/// A registered window: what `regMrSym` gave as `ginHandle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Window(pub *mut c_void);

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
        self.dev().nranks as u32
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.dev().rank as u32
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
    #[inline]
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
        self.check(peer, action)?;
        if bytes == 0 {
            return self.announce(peer, action, flags);
        }
        let (remote, local) = (self.remote(dst, peer, dst_off)?, self.local(src, src_off)?);
        let whole = Local::Memory { addr: local.addr, lkey: local.lkey, bytes: bytes as u32 };
        if bytes > u64::from(self.ext.max_rdma_size) {
            return self.put_in_parts(peer, remote, local, bytes, action, flags);
        }
        self.write(DATA, peer, whole, remote, action, flags)
    }

    /// Writes the low `bytes` (1, 2, 4 or 8) of `value` to `dst` at `dst_off` on `peer`.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`]; also [`Status::InvalidArgument`] for another size or an action with a counter, which
    /// values cannot name.
    #[allow(clippy::too_many_arguments)]
    #[inline]
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
        self.check(peer, action)?;
        if !matches!(bytes, 1 | 2 | 4 | 8) || action.local_counter().is_some() {
            return Err(Status::InvalidArgument);
        }
        let remote = self.remote(dst, peer, dst_off)?;
        self.write(VALUE, peer, Local::Value { value, bytes }, remote, action, flags)
    }

    /// Reads `bytes` from `remote` at `remote_off` on `peer` to `local` at `local_off` on this rank. They are there
    /// after the next [`Context::flush`].
    ///
    /// # Errors
    ///
    /// As for [`Context::put`].
    #[allow(clippy::too_many_arguments)]
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
        self.check(peer, Action::NONE)?;
        let (mut far, mut near) = (self.remote(remote, peer, remote_off)?, self.local(local, local_off)?);
        let target = self.target(peer, 0)?;
        let mut left = bytes;
        loop {
            let part = left.min(u64::from(self.ext.max_rdma_size));
            let local = Local::Memory { addr: near.addr, lkey: near.lkey, bytes: part as u32 };
            let request = Request { direction: Direction::Read, peer, target, local, remote: far };
            self.post(DATA, request, flags.is_aggregate() || part < left)?;
            left -= part;
            if left == 0 {
                return Ok(());
            }
            far.addr += part;
            near.addr += part;
        }
    }

    /// Carries out `action` on `peer` with no bytes. An empty action still rings what was aggregated on the data
    /// endpoint.
    ///
    /// # Errors
    ///
    /// As for [`Context::put`].
    #[inline]
    pub fn signal(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        self.check(peer, action)?;
        self.announce(peer, action, flags)
    }

    /// Waits until everything that was posted on this context before has completed: sources may be reused, gets are
    /// there, and signals raised from now on come after it. It ends while other threads go on posting.
    ///
    /// # Errors
    ///
    /// [`Status::CardError`]: something completed in error. Otherwise what ended the wait.
    pub fn flush(&self) -> Result<(), Status> {
        for i in 0..self.ext.n_endpoints as usize {
            self.endpoint(i).flush(self.ext.policy, self.limits())?;
        }
        Ok(())
    }

    /// Times that signal `id` was raised since its last reset, modulo 2^31.
    pub fn read_signal(&self, id: u32) -> Result<u64, Status> {
        Ok(self.signal_handle(id)?.read())
    }

    /// Waits until signal `id` has been raised at least `least` times since its last reset. Compares modulo 2^31, so
    /// `least` may go on counting past a wrap.
    pub fn wait_signal(&self, id: u32, least: u64) -> Result<(), Status> {
        self.signal_handle(id)?.wait(least, self.limits())
    }

    /// Counts signal `id` from here. To be called when no signal is under way.
    pub fn reset_signal(&self, id: u32) -> Result<(), Status> {
        self.signal_handle(id)?.reset();
        Ok(())
    }

    /// Operations naming counter `id` that have completed since its last reset, modulo 2^31.
    pub fn read_counter(&self, id: u32) -> Result<u64, Status> {
        Ok(self.counter_handle(id)?.read())
    }

    /// Waits until counter `id` has counted at least `least` operations since its last reset, compared modulo 2^31.
    pub fn wait_counter(&self, id: u32, least: u64) -> Result<(), Status> {
        self.counter_handle(id)?.wait(least, self.limits())
    }

    /// Counts counter `id` from here. To be called when no operation that names it is under way.
    pub fn reset_counter(&self, id: u32) -> Result<(), Status> {
        self.counter_handle(id)?.reset();
        Ok(())
    }

    #[inline(always)]
    fn check(&self, peer: u32, action: Action) -> Result<(), Status> {
        let dev = self.dev();
        let bad = peer >= dev.nranks as u32
            || action.named_signal().is_some_and(|id| id + 1 >= self.ext.n_slots)
            || action.local_counter().is_some_and(|id| id >= dev.n_counters as u32);
        if bad { Err(Status::InvalidArgument) } else { Ok(()) }
    }

    /// The endpoint that `action` is posted on; `plain` is the one for an empty action. A signal that only peers have
    /// has no endpoint here.
    #[inline(always)]
    fn poster(&self, action: Action, plain: usize) -> usize {
        let dev = self.dev();
        match (action.local_counter(), action.signal()) {
            (Some(counter), _) => FIRST_COUNTER + counter as usize,
            (None, Some((signal, _))) if signal < dev.n_signals as u32 => {
                FIRST_COUNTER + dev.n_counters as usize + signal as usize
            }
            _ => plain,
        }
    }

    #[inline(always)]
    fn write(
        &self,
        plain: usize,
        peer: u32,
        local: Local,
        remote: Remote,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let (slot, raised_by) = match action.signal() {
            Some((id, n)) => (1 + id, n),
            None => (0, 0),
        };
        let request = Request { direction: Direction::Write, peer, target: self.target(peer, slot)?, local, remote };
        let poster = self.poster(action, plain);
        if raised_by <= 1 {
            return self.post(poster, request, flags.is_aggregate());
        }
        self.write_and_raise(poster, request, action, raised_by, flags)
    }

    /// The card's counter ticks once for each write, so raising by `n` takes `n - 1` empty writes more. They never go
    /// through a counter's endpoint, and share a doorbell.
    #[inline(never)]
    fn write_and_raise(
        &self,
        poster: usize,
        request: Request,
        action: Action,
        raised_by: u32,
        flags: Flags,
    ) -> Result<(), Status> {
        let extra = self.poster(Action::from_bits(action.bits() & !0xffff_0000), DATA);
        self.post(poster, request, flags.is_aggregate() || extra == poster)?;
        let empty = Request { local: self.scratch_local(), remote: self.scratch_remote(request.peer), ..request };
        for left in (0..raised_by - 1).rev() {
            self.post(extra, empty, flags.is_aggregate() || left != 0)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn announce(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        self.write(DATA, peer, self.scratch_local(), self.scratch_remote(peer), action, flags)
    }

    /// Leading parts go unannounced through the data endpoint; the last carries the action, once they have completed.
    #[cold]
    fn put_in_parts(
        &self,
        peer: u32,
        mut remote: Remote,
        mut local: LocalBase,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let largest = u64::from(self.ext.max_rdma_size);
        let mut left = bytes;
        while left > largest {
            let part = Local::Memory { addr: local.addr, lkey: local.lkey, bytes: largest as u32 };
            self.write(DATA, peer, part, remote, Action::NONE, flags)?;
            local.addr += largest;
            remote.addr += largest;
            left -= largest;
        }
        if action != Action::NONE {
            self.endpoint(DATA).flush(self.ext.policy, self.limits())?;
        }
        let last = Local::Memory { addr: local.addr, lkey: local.lkey, bytes: left as u32 };
        self.write(DATA, peer, last, remote, action, flags)
    }

    #[inline(always)]
    fn post(&self, endpoint: usize, request: Request, aggregate: bool) -> Result<(), Status> {
        let endpoint = self.endpoint(endpoint);
        if matches!(request.local, Local::Value { .. }) && !endpoint.takes_values() {
            return Err(Status::Unsupported);
        }
        endpoint.post(self.ext.policy, self.limits(), aggregate, request)
    }

    #[inline(always)]
    fn endpoint(&self, i: usize) -> Endpoint<'a> {
        debug_assert!(i < self.ext.n_endpoints as usize);
        let ext = self.ext.endpoints.wrapping_add(i);
        // SAFETY: the host made `n_endpoints` of them, and callers have checked the ids that indices come from.
        let ext = unsafe { &*ext };
        // SAFETY: made by the host plugin; lives as long as the context.
        unsafe { Endpoint::new(ext) }
    }

    #[inline(always)]
    fn limits(&self) -> Limits<'a> {
        let abort = if self.ext.abort_flag.is_null() {
            None
        } else {
            // SAFETY: an aligned word of the context, which lives for 'a; host and kernels access it atomically.
            Some(unsafe { AtomicU32::from_ptr(self.ext.abort_flag) })
        };
        Limits { abort, timeout_ns: self.ext.wait_timeout_ns }
    }

    /// The fields of the NCCL-visible handle that nobody writes once it is made.
    #[inline(always)]
    fn dev(&self) -> Constants {
        let dev = self.ext.dev;
        macro_rules! field {
            ($name:ident) => {
                // SAFETY: the handle lives as long as the context, and this field is constant. Only the field is read,
                // for the endpoints in the same struct have words that other threads write.
                unsafe { (*dev).$name }
            };
        }
        Constants {
            nranks: field!(nranks),
            rank: field!(rank),
            n_counters: field!(n_counters),
            n_signals: field!(n_signals),
        }
    }

    #[inline(always)]
    fn target(&self, peer: u32, slot: u32) -> Result<Target, Status> {
        let index = slot as usize * self.dev().nranks as usize + peer as usize;
        // SAFETY: `check` has bounded peer and slot, and the table has n_slots * nranks entries.
        let target = unsafe { *self.ext.targets.wrapping_add(index) };
        if target == Target::default() { Err(Status::InvalidArgument) } else { Ok(target) }
    }

    #[inline(always)]
    fn rail(&self, window: Window) -> Result<*const MrHandle, Status> {
        if window.0.is_null() {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: a constant field of the handle.
        let rail = unsafe { (*self.ext.dev).rail_id };
        let rails = window.0.cast::<*const MrHandle>();
        // SAFETY: a window is an array of one pointer for each rail of the communicator, constant while registered.
        Ok(unsafe { *rails.wrapping_add(rail as usize) })
    }

    #[inline(always)]
    fn local(&self, window: Window, offset: u64) -> Result<LocalBase, Status> {
        let mr = self.rail(window)?;
        // SAFETY: constant while the window is registered.
        let MrHandle { lkey, local_addr, .. } = unsafe { *mr };
        Ok(LocalBase { addr: local_addr.wrapping_add(offset), lkey })
    }

    #[inline(always)]
    fn remote(&self, window: Window, peer: u32, offset: u64) -> Result<Remote, Status> {
        let mr = self.rail(window)?;
        let peers = mr.wrapping_byte_add(size_of::<MrHandle>()).cast::<MrPeer>();
        // SAFETY: one entry for each rank follows the handle, and `check` has bounded the peer.
        let MrPeer { remote_addr, rkey, .. } = unsafe { *peers.wrapping_add(peer as usize) };
        Ok(Remote { addr: remote_addr.wrapping_add(offset), rkey })
    }

    #[inline(always)]
    fn scratch_local(&self) -> Local {
        let dev = self.ext.dev;
        // SAFETY: a constant field of the handle.
        let addr = unsafe { (*dev).scratch_local_addr };
        // SAFETY: a constant field of the handle.
        let lkey = unsafe { (*dev).scratch_lkey };
        Local::Memory { addr, lkey, bytes: 0 }
    }

    #[inline(always)]
    fn scratch_remote(&self, peer: u32) -> Remote {
        let dev = self.ext.dev;
        // SAFETY: a constant field of the handle.
        let addrs = unsafe { (*dev).scratch_remote_addrs };
        // SAFETY: as above.
        let rkeys = unsafe { (*dev).scratch_remote_rkeys };
        // SAFETY: one entry for each rank, and `check` has bounded the peer.
        let addr = unsafe { *addrs.wrapping_add(peer as usize) };
        // SAFETY: as above.
        let rkey = unsafe { *rkeys.wrapping_add(peer as usize) };
        Remote { addr, rkey }
    }

    fn signal_handle(&self, id: u32) -> Result<Counting<'a>, Status> {
        if id >= self.dev().n_signals as u32 {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: a constant field of the handle.
        let handles = unsafe { (*self.ext.dev).signal_handles };
        // SAFETY: `n_signals` entries.
        let handle = unsafe { *handles.wrapping_add(id as usize) };
        // SAFETY: lives as long as the context.
        Ok(unsafe { Counting::new(handle) })
    }

    fn counter_handle(&self, id: u32) -> Result<Counting<'a>, Status> {
        if id >= self.dev().n_counters as u32 {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: a constant field of the handle.
        let handles = unsafe { (*self.ext.dev).counter_handles };
        // SAFETY: `n_counters` entries.
        let handle = unsafe { *handles.wrapping_add(id as usize) };
        // SAFETY: lives as long as the context.
        Ok(unsafe { Counting::new(handle) })
    }
}

struct Constants {
    nranks: i32,
    rank: i32,
    n_counters: i32,
    n_signals: i32,
}

#[derive(Clone, Copy)]
struct LocalBase {
    addr: u64,
    lkey: u32,
}

/// A signal or counter: the card's count, and what it is counted from.
struct Counting<'a> {
    count: &'a AtomicU64,
    from: &'a AtomicU64,
}

impl Counting<'_> {
    /// # Safety
    ///
    /// `handle` is a handle of a context that lives for the result's lifetime.
    unsafe fn new(handle: *mut CounterHandle) -> Self {
        // SAFETY: the pointer is constant while the context lives.
        let count = unsafe { (*handle).cntr_value };
        // SAFETY: the field's address, in a live handle.
        let from = unsafe { &raw mut (*handle).cntr_offset };
        // SAFETY: aligned, alive, and accessed atomically by all.
        let count = unsafe { AtomicU64::from_ptr(count) };
        // SAFETY: as above.
        let from = unsafe { AtomicU64::from_ptr(from) };
        Counting { count, from }
    }

    /// Acquire: what the counted writes brought is visible after it.
    fn read(&self) -> u64 {
        let count = self.count.load(Ordering::Acquire) as u32;
        u64::from(count.wrapping_sub(self.from.load(Ordering::Relaxed) as u32) & COUNT_MASK)
    }

    fn wait(&self, least: u64, limits: Limits<'_>) -> Result<(), Status> {
        let least = least as u32;
        let mut spin = Spin::new(limits);
        // Reached when the count, modulo 2^31, is at or past `least` rather than before it.
        while (self.read() as u32).wrapping_sub(least) & COUNT_MASK > COUNT_MASK / 2 {
            spin.pause()?;
        }
        Ok(())
    }

    /// The card alone writes the count, so a reset moves what is subtracted.
    fn reset(&self) {
        self.from.store(self.count.load(Ordering::Acquire), Ordering::Relaxed);
    }
}
