//! Completion: flushes, signals and counters.

use super::{Context, FIRST_COUNTER};
use crate::endpoint::{Endpoint, used_set};
use crate::platform;
use crate::post::COUNT_MASK;
use crate::post::outcome::Outcome;
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, LoadExternal, Ordering};
use crate::wait::{Limit, Spin};
use core::mem::offset_of;
use ferrogin_ffi::assert_layout;
use ferrogin_ffi::device::{CounterHandle, DevHandle};
use ferrogin_ffi::ext::STOP_LOST;

/// Number of endpoints that a [`FlushRequest`] has entries for.
const ENTRIES: usize = 15;

/// A flush begun by [`Context::flush_async`]; `fgin_request` in C.
///
/// It has an entry for each endpoint with incomplete posts: the number that the endpoint must reach. If there are more
/// such endpoints than entries, the wait flushes the others, and so also waits for what was posted there in the
/// meantime.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct FlushRequest {
    /// Entries in use.
    n_entries: u32,
    /// The first endpoint without an entry, which the wait flushes; 0 if there is none.
    first_without: u32,
    entries: [Entry; ENTRIES],
}
assert_layout!(FlushRequest, size 128, align 4, { n_entries @ 0, first_without @ 4, entries @ 8 });

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Entry {
    endpoint: u32,
    at: u32,
}

impl<'a> Context<'a> {
    /// Waits until every earlier post on this context has completed. After that, sources may be reused, gets have
    /// arrived, and signals raised from now on come after those posts. The wait ends even if other threads keep
    /// posting.
    ///
    /// # Errors
    ///
    /// [`Status::CardError`]: something completed in error. Otherwise, the reason the wait ended.
    pub fn flush(&self) -> Result<(), Status> {
        self.flush_part(0, 1)
    }

    /// Does thread `rank`'s part of a flush by `size` threads: every `size`th endpoint, among those that may have
    /// incomplete posts. The flush has ended once all threads have done their parts.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: `rank` is not below `size`. Otherwise as for [`Context::flush`].
    #[inline]
    pub fn flush_part(&self, rank: u32, size: u32) -> Result<(), Status> {
        if rank >= size {
            return Err(Status::InvalidArgument);
        }
        let first = used_set(self.ext).first();
        if first.is_none() { Ok(()) } else { self.flush_used(first, rank, size, *self) }
    }

    /// Out of line, so that flushing an idle context saves no registers.
    #[inline(never)]
    fn flush_used(self, first: Option<(u32, u64)>, rank: u32, size: u32, limits: impl Limit) -> Result<(), Status> {
        self.flush_within(first, rank, size, true, limits).into()
    }

    /// [`Context::flush_part`], inlined and with other limits. `rank` is below `size`. Without `rings_all`, a loss
    /// leaves deferred posts to the next flush.
    #[inline(always)]
    pub(super) fn flush_within(
        &self,
        first: Option<(u32, u64)>,
        rank: u32,
        size: u32,
        rings_all: bool,
        limits: impl Limit,
    ) -> Outcome {
        used_set(self.ext).visit(first, rings_all, |i| {
            if size > 1 && i % size != rank {
                return Outcome::COMPLETED;
            }
            self.endpoint(i).flush(self.ext.policy, None, limits)
        })
    }

    /// Calls `look` for each used endpoint. The first error ends the visit and is returned.
    #[inline(always)]
    fn visit_used(&self, mut look: impl FnMut(u32, Endpoint<'a>) -> Result<(), Status>) -> Result<(), Status> {
        let outcome = |i| look(i, self.endpoint(i)).map_or_else(Outcome::failed, |()| Outcome::COMPLETED);
        used_set(self.ext).visit(None, true, outcome).into()
    }

    /// Waits like [`Context::flush`], but doesn't report losses: every earlier post has completed, or failed because
    /// its peer is lost. Differs only in a context that isolates peers.
    ///
    /// # Errors
    ///
    /// As for [`Context::flush`], except [`Status::PeerLost`].
    pub fn settle(&self) -> Result<(), Status> {
        let first = used_set(self.ext).first();
        if first.is_none() { Ok(()) } else { self.flush_used(first, 0, 1, Settling(*self)) }
    }

    /// Rings aggregated posts on all endpoints, without waiting for them to complete.
    ///
    /// # Errors
    ///
    /// What would make a flush fail at once.
    pub fn ring(&self) -> Result<(), Status> {
        self.visit_used(|_, endpoint| endpoint.ring_deferred(self.ext.policy, *self))
    }

    /// Returns whether NCCL's device API has left doorbells to a later request, and clears the mark.
    pub(crate) fn take_waiting(&self) -> bool {
        let word = self.ext.routes.dev.wrapping_byte_add(offset_of!(DevHandle, scratch_pad)).cast();
        // SAFETY: a 4-aligned word of the handle, which the plugin keeps as long as the context. NCCL's code doesn't
        // use it, and ferrogin's accesses are atomic.
        let word = unsafe { AtomicU32::from_ptr(word) };
        // Acquire: the requests that the word stands for are marked.
        word.compare_exchange(1, 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Flushes the `i`th endpoint, or waits until an earlier flush of it reaches `at`.
    #[inline(never)]
    fn flush_endpoint(self, i: u32, at: Option<u32>, limits: impl Limit) -> Result<(), Status> {
        self.endpoint(i).flush(self.ext.policy, at, limits).into()
    }

    /// Flushes the `i`th endpoint without reporting losses: see [`Context::settle`].
    pub(super) fn settle_endpoint(self, i: u32) -> Result<(), Status> {
        self.flush_endpoint(i, None, Settling(self))
    }

    /// Waits until every earlier post on this context has ended, but not for later posts. Deferred posts are rung
    /// first.
    #[cold]
    #[inline(never)]
    pub(super) fn settle_earlier(self) -> Result<(), Status> {
        self.wait_within(&self.begin_flush(Settling(self))?, Settling(self))
    }

    /// Begins a flush of every earlier post on this context, and rings aggregated ones. The flush has ended once
    /// [`Context::wait_flush`] returns.
    ///
    /// # Errors
    ///
    /// As for [`Context::flush`].
    pub fn flush_async(&self) -> Result<FlushRequest, Status> {
        self.begin_flush(*self)
    }

    fn begin_flush(&self, limits: impl Limit) -> Result<FlushRequest, Status> {
        let mut request = FlushRequest::default();
        self.visit_used(|i, endpoint| {
            let (mut at, mut spin) = (None, Spin::new(limits));
            let at = loop {
                match (endpoint.flush_round(self.ext.policy, limits.reports_losses(), &mut at), at) {
                    (Outcome::WAITS, Some(at)) => break at,
                    (Outcome::WAITS, None) => spin.pause()?,
                    (ended, _) => return ended.into(),
                }
            };
            match request.entries.get_mut(request.n_entries as usize) {
                Some(entry) => {
                    *entry = Entry { endpoint: i, at };
                    request.n_entries += 1;
                }
                None if request.first_without == 0 => request.first_without = i,
                None => {}
            }
            Ok(())
        })?;
        Ok(request)
    }

    /// Waits until the posts of `request` have completed, but not for later posts. The wait ends even if other threads
    /// keep posting. Any thread may call it, any number of times.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: `request` isn't a request of this context. Otherwise as for [`Context::flush`].
    pub fn wait_flush(&self, request: &FlushRequest) -> Result<(), Status> {
        self.wait_within(request, *self)
    }

    fn wait_within(&self, request: &FlushRequest, limits: impl Limit) -> Result<(), Status> {
        for entry in self.entries(request)? {
            self.flush_endpoint(entry.endpoint, Some(entry.at), limits)?;
        }
        match request.first_without {
            0 => Ok(()),
            first => self.visit_used(|i, _| if i < first { Ok(()) } else { self.flush_endpoint(i, None, limits) }),
        }
    }

    /// Returns whether [`Context::wait_flush`] would return at once.
    ///
    /// # Errors
    ///
    /// As for [`Context::wait_flush`].
    pub fn test_flush(&self, request: &FlushRequest) -> Result<bool, Status> {
        let has_ended =
            |endpoint: Endpoint<'_>, mut at: Option<u32>| match endpoint.flush_round(self.ext.policy, true, &mut at) {
                Outcome::WAITS if self.stop_word() == STOP_LOST => Err(Status::PeerLost),
                Outcome::WAITS => Ok(false),
                ended => Result::from(ended).map(|()| true),
            };
        for entry in self.entries(request)? {
            if !has_ended(self.endpoint(entry.endpoint), Some(entry.at))? {
                return Ok(false);
            }
        }
        let mut is_done = true;
        if request.first_without != 0 {
            self.visit_used(|i, endpoint| {
                if i >= request.first_without && is_done {
                    is_done = has_ended(endpoint, None)?;
                }
                Ok(())
            })?;
        }
        Ok(is_done)
    }

    /// Returns a request's entries. The request is in the caller's memory, so its numbers are checked.
    fn entries<'r>(&self, request: &'r FlushRequest) -> Result<&'r [Entry], Status> {
        let n = self.ext.n_endpoints;
        let entries = request.entries.get(..request.n_entries as usize);
        entries
            .filter(|entries| request.first_without < n && entries.iter().all(|entry| entry.endpoint < n))
            .ok_or(Status::InvalidArgument)
    }

    /// Returns how often signal `id` was raised since its last reset, modulo 2^31; if signals are emulated, the sum of
    /// the amounts, modulo 2^64.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: this rank has no such signal.
    pub fn read_signal(&self, id: u32) -> Result<u64, Status> {
        match self.signal_count(id) {
            Ok(count) => Ok(count.read()),
            Err(_) => Ok(self.signal_word(id)?.load_external(Ordering::Acquire)),
        }
    }

    /// Waits until signal `id` has been raised at least `least` times since its last reset. The comparison is modulo
    /// 2^31, so `least` may keep counting past a wrap. Emulated signals are compared as 64-bit numbers.
    ///
    /// # Errors
    ///
    /// As for [`Context::read_signal`]; otherwise, the reason the wait ended.
    pub fn wait_signal(&self, id: u32, least: u64) -> Result<(), Status> {
        match self.signal_count(id) {
            Ok(count) => self.wait_count(count, least),
            Err(_) => self.wait_signal_word(id, least),
        }
    }

    /// Resets signal `id` to 0. The caller makes sure that no signal is in flight: one that arrives meanwhile lands
    /// either before the reset, and is lost, or after it.
    ///
    /// # Errors
    ///
    /// As for [`Context::read_signal`].
    pub fn reset_signal(&self, id: u32) -> Result<(), Status> {
        match self.signal_count(id) {
            Ok(count) => count.reset(),
            // The whole word in one store, so that an add comes before it or after it.
            Err(_) => self.signal_word(id)?.store_external(0, Ordering::Relaxed),
        }
        Ok(())
    }

    /// Returns how many operations naming counter `id` have completed since its last reset, modulo 2^31.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: this context has no such counter.
    pub fn read_counter(&self, id: u32) -> Result<u64, Status> {
        Ok(self.counter_count(id)?.read())
    }

    /// Waits until counter `id` has counted at least `least` operations since its last reset, compared modulo 2^31.
    ///
    /// # Errors
    ///
    /// As for [`Context::read_counter`]; otherwise, the reason the wait ended.
    pub fn wait_counter(&self, id: u32, least: u64) -> Result<(), Status> {
        self.wait_count(self.counter_count(id)?, least)
    }

    /// Resets counter `id` to 0. The caller makes sure that no operation naming it is in flight.
    ///
    /// # Errors
    ///
    /// As for [`Context::read_counter`].
    pub fn reset_counter(&self, id: u32) -> Result<(), Status> {
        self.counter_count(id)?.reset();
        Ok(())
    }

    /// Waits for a count. The count may depend on deferred posts of the same endpoint, so each round rings them.
    fn wait_count(&self, count: EventCount<'a>, least: u64) -> Result<(), Status> {
        let (endpoint, mut spin) = (self.endpoint(count.endpoint), Spin::new(*self));
        while !count.has_reached(least) {
            endpoint.ring_deferred(self.ext.policy, *self)?;
            spin.pause()?;
        }
        Ok(())
    }

    #[inline(always)]
    fn signal_count(&self, id: u32) -> Result<EventCount<'a>, Status> {
        if id >= self.ext.routes.n_signals {
            return Err(Status::InvalidArgument);
        }
        Ok(self.count(offset_of!(DevHandle, signal_handles), id, FIRST_COUNTER + self.ext.routes.n_counters))
    }

    #[inline(always)]
    fn counter_count(&self, id: u32) -> Result<EventCount<'a>, Status> {
        if id >= self.ext.routes.n_counters {
            return Err(Status::InvalidArgument);
        }
        Ok(self.count(offset_of!(DevHandle, counter_handles), id, FIRST_COUNTER))
    }

    /// Returns count `id`, which exists, from the device handle's list at that offset. The counts' endpoints start at
    /// `first`.
    #[inline(always)]
    fn count(&self, list: usize, id: u32, first: u32) -> EventCount<'a> {
        let list = self.ext.routes.dev.wrapping_byte_add(list).cast::<*mut *mut CounterHandle>();
        // SAFETY: the plugin made the device handle and keeps it, constant in this field, as long as the context.
        let handles = unsafe { *list };
        // SAFETY: the list has an entry for each count.
        let handle = unsafe { *handles.wrapping_add(id as usize) };
        // SAFETY: the plugin keeps the handle, constant in this field, as long as the context.
        let count = unsafe { (*handle).cntr_value };
        // SAFETY: the plugin made the count 8-aligned and keeps it with the context; host and kernels only access it
        // atomically.
        let count = unsafe { AtomicU64::from_ptr(count) };
        let reset_at = handle.wrapping_byte_add(offset_of!(CounterHandle, cntr_offset)).cast();
        // SAFETY: an 8-aligned field (the layout is asserted) of the handle; kernels only access it atomically.
        let reset_at = unsafe { AtomicU64::from_ptr(reset_at) };
        EventCount { count, reset_at, endpoint: first + id }
    }
}

/// The limits of a flush that is inlined in a kernel.
#[derive(Clone, Copy)]
pub(super) struct FlushLimits<'a> {
    context: Context<'a>,
    /// Another abort flag, or null.
    abort: *mut u32,
    /// When the flush began.
    began: u64,
    /// 0: no time limit; 1: the context's; other values: `limit` cycles.
    clock: u32,
    limit: u64,
}

impl<'a> FlushLimits<'a> {
    /// Takes the arguments of `fgin_fast_flush`.
    #[inline(always)]
    pub(super) fn new(context: Context<'a>, abort: *mut u32, clock: u32, limit: u64) -> Self {
        let began = if clock > 1 { platform::clock_cycles() } else { platform::clock_ns() };
        FlushLimits { context, abort, began, clock, limit }
    }
}

impl Limit for FlushLimits<'_> {
    #[inline(always)]
    fn stop_word(&self) -> u32 {
        // SAFETY: the caller of `fgin_fast_flush` vouches for the word; host and kernels access it atomically.
        let read = || unsafe { AtomicU32::from_ptr(self.abort) }.load_external(Ordering::Relaxed);
        let other = if self.abort.is_null() { 0 } else { read() };
        self.context.stop_word() | other
    }

    #[inline(always)]
    fn has_passed(&self, _began_ns: &mut u64) -> bool {
        match self.clock {
            0 => false,
            1 => self.context.is_too_long(platform::clock_ns().wrapping_sub(self.began)),
            _ => platform::clock_cycles().wrapping_sub(self.began) >= self.limit,
        }
    }

    #[inline(always)]
    fn progress(&self) -> bool {
        self.context.progress()
    }
}

/// The limits of a wait within an operation, which doesn't report losses.
#[derive(Clone, Copy)]
struct Settling<'a>(Context<'a>);

impl Limit for Settling<'_> {
    #[inline(always)]
    fn stop_word(&self) -> u32 {
        self.0.stop_word()
    }

    #[inline(always)]
    fn reports_losses(&self) -> bool {
        false
    }

    #[inline(always)]
    fn has_passed(&self, began_ns: &mut u64) -> bool {
        self.0.has_passed(began_ns)
    }

    #[inline(always)]
    fn progress(&self) -> bool {
        self.0.progress()
    }
}

/// A signal or counter: the card's count, and the count at its last reset.
struct EventCount<'a> {
    count: &'a AtomicU64,
    reset_at: &'a AtomicU64,
    /// The number of its endpoint.
    endpoint: u32,
}

impl EventCount<'_> {
    /// Returns the count since the last reset. Acquire: the data of the counted writes is visible after it.
    #[inline(always)]
    fn read(&self) -> u64 {
        let count = self.count.load_external(Ordering::Acquire) as u32;
        u64::from(count.wrapping_sub(self.reset_at.load(Ordering::Relaxed) as u32) & COUNT_MASK)
    }

    /// Returns whether the count is at or past `least`, modulo 2^31.
    #[inline(always)]
    fn has_reached(&self, least: u64) -> bool {
        (self.read() as u32).wrapping_sub(least as u32) & COUNT_MASK <= COUNT_MASK / 2
    }

    /// Resets the count. Only the card writes it, so this changes the number that is subtracted from it.
    fn reset(&self) {
        self.reset_at.store(self.count.load_external(Ordering::Acquire), Ordering::Relaxed);
    }
}
