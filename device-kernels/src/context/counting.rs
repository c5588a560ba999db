//! What has completed: flushes, signals and counters.

use super::{Context, FIRST_COUNTER};
use crate::endpoint::Endpoint;
use crate::post::COUNT_MASK;
use crate::status::Status;
use crate::sync::{AtomicU64, Ordering, Outside};
use crate::wait::Spin;
use ferrogin_ffi::assert_layout;
use ferrogin_ffi::device::CounterHandle;

/// Endpoints that a [`FlushRequest`] keeps apart.
const KEPT: usize = 15;

/// A flush under way: what [`Context::flush_async`] began, `fgin_request` in C.
///
/// It holds for each endpoint that had work the number of posts that must complete. A context with more such endpoints
/// than fit has the rest flushed by the wait, which then also waits for what was posted there meanwhile.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct FlushRequest {
    /// Entries in use.
    kept: u32,
    /// First endpoint that is left to the wait; 0 if none is.
    rest: u32,
    entries: [Entry; KEPT],
}
assert_layout!(FlushRequest, size 128, align 4, { kept @ 0, rest @ 4, entries @ 8 });

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Entry {
    endpoint: u32,
    at: u32,
}

impl<'a> Context<'a> {
    /// Waits until everything that was posted on this context before has completed: sources may be reused, gets are
    /// there, and signals raised from now on come after it. It ends while other threads go on posting.
    ///
    /// # Errors
    ///
    /// [`Status::CardError`]: something completed in error. Otherwise what ended the wait.
    pub fn flush(&self) -> Result<(), Status> {
        self.flush_part(0, 1)
    }

    /// The part of a flush that the thread `rank` of `size` does: every `size`th endpoint. The flush has ended when all of
    /// them have.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: `rank` is not below `size`. Otherwise as for [`Context::flush`].
    pub fn flush_part(&self, rank: u32, size: u32) -> Result<(), Status> {
        if rank >= size {
            return Err(Status::InvalidArgument);
        }
        let mut i = rank;
        while i < self.ext.n_endpoints {
            self.flush_endpoint(i)?;
            i = i.saturating_add(size);
        }
        Ok(())
    }

    /// Begins a flush of everything that was posted on this context before, and rings what was aggregated. It has ended
    /// when [`Context::wait_flush`] returns.
    ///
    /// # Errors
    ///
    /// As for [`Context::flush`].
    pub fn flush_async(&self) -> Result<FlushRequest, Status> {
        let mut request = FlushRequest::default();
        for i in 0..self.ext.n_endpoints {
            let endpoint = self.endpoint(i);
            if let Some(at) = endpoint.begin_flush(self.ext.policy, self.limits())? {
                match request.entries.get_mut(request.kept as usize) {
                    Some(entry) => {
                        *entry = Entry { endpoint: i, at };
                        request.kept += 1;
                    }
                    None if request.rest == 0 => request.rest = i,
                    None => {}
                }
            }
        }
        Ok(request)
    }

    /// Waits until what `request` stands for has completed; not for what was posted after it, and not longer because
    /// others go on posting. It may be called any number of times, by any thread.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: no request of this context. Otherwise as for [`Context::flush`].
    pub fn wait_flush(&self, request: &FlushRequest) -> Result<(), Status> {
        for entry in self.entries(request)? {
            self.endpoint(entry.endpoint).wait_flushed(self.ext.policy, self.limits(), entry.at)?;
        }
        match request.rest {
            0 => Ok(()),
            rest => (rest..self.ext.n_endpoints).try_for_each(|i| self.flush_endpoint(i)),
        }
    }

    /// Whether [`Context::wait_flush`] would return at once.
    ///
    /// # Errors
    ///
    /// As for [`Context::wait_flush`].
    pub fn test_flush(&self, request: &FlushRequest) -> Result<bool, Status> {
        let policy = self.ext.policy;
        for entry in self.entries(request)? {
            let endpoint = self.endpoint(entry.endpoint);
            if !endpoint.is_flushed(policy, entry.at)? {
                endpoint.nudge(policy, self.limits())?;
                return Ok(false);
            }
        }
        if request.rest != 0 {
            for i in request.rest..self.ext.n_endpoints {
                if self.endpoint(i).begin_flush(policy, self.limits())?.is_some() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// A request comes back from the caller's memory, so its numbers are checked.
    fn entries<'r>(&self, request: &'r FlushRequest) -> Result<&'r [Entry], Status> {
        let n = self.ext.n_endpoints;
        let kept = request.entries.get(..request.kept as usize);
        kept.filter(|kept| request.rest < n && kept.iter().all(|entry| entry.endpoint < n))
            .ok_or(Status::InvalidArgument)
    }

    /// Times that signal `id` was raised since its last reset, modulo 2^31.
    ///
    /// # Errors
    ///
    /// [`Status::InvalidArgument`]: this rank has no such signal.
    pub fn read_signal(&self, id: u32) -> Result<u64, Status> {
        Ok(self.signal_count(id)?.read())
    }

    /// Waits until signal `id` has been raised at least `least` times since its last reset. Compares modulo 2^31, so
    /// `least` may go on counting past a wrap.
    ///
    /// # Errors
    ///
    /// As for [`Context::read_signal`]; otherwise what ended the wait.
    pub fn wait_signal(&self, id: u32, least: u64) -> Result<(), Status> {
        self.wait_count(self.signal_count(id)?, least)
    }

    /// Counts signal `id` from here. To be called when no signal is under way.
    ///
    /// # Errors
    ///
    /// As for [`Context::read_signal`].
    pub fn reset_signal(&self, id: u32) -> Result<(), Status> {
        self.signal_count(id)?.reset();
        Ok(())
    }

    /// Operations naming counter `id` that have completed since its last reset, modulo 2^31.
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
    /// As for [`Context::read_counter`]; otherwise what ended the wait.
    pub fn wait_counter(&self, id: u32, least: u64) -> Result<(), Status> {
        self.wait_count(self.counter_count(id)?, least)
    }

    /// Counts counter `id` from here. To be called when no operation that names it is under way.
    ///
    /// # Errors
    ///
    /// As for [`Context::read_counter`].
    pub fn reset_counter(&self, id: u32) -> Result<(), Status> {
        self.counter_count(id)?.reset();
        Ok(())
    }

    /// What is waited for may depend on what is deferred on the same endpoint, and ends with it.
    fn wait_count(&self, counting: Counting<'_>, least: u64) -> Result<(), Status> {
        let mut spin = Spin::new(self.limits());
        while !counting.has(least) {
            counting.endpoint.nudge(self.ext.policy, self.limits())?;
            spin.pause()?;
        }
        Ok(())
    }

    fn signal_count(&self, id: u32) -> Result<Counting<'a>, Status> {
        if id >= self.ext.n_signals {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: a constant field of the handle.
        let handles = unsafe { (*self.ext.dev).signal_handles };
        // SAFETY: `n_signals` entries.
        let handle = unsafe { *handles.wrapping_add(id as usize) };
        let endpoint = self.endpoint(FIRST_COUNTER + self.ext.n_counters + id);
        // SAFETY: lives as long as the context.
        Ok(unsafe { Counting::new(handle, endpoint) })
    }

    fn counter_count(&self, id: u32) -> Result<Counting<'a>, Status> {
        if id >= self.ext.n_counters {
            return Err(Status::InvalidArgument);
        }
        // SAFETY: a constant field of the handle.
        let handles = unsafe { (*self.ext.dev).counter_handles };
        // SAFETY: `n_counters` entries.
        let handle = unsafe { *handles.wrapping_add(id as usize) };
        // SAFETY: lives as long as the context.
        Ok(unsafe { Counting::new(handle, self.endpoint(FIRST_COUNTER + id)) })
    }
}

/// A signal or counter: the card's count, and what it is counted from.
struct Counting<'a> {
    count: &'a AtomicU64,
    from: &'a AtomicU64,
    endpoint: Endpoint<'a>,
}

impl<'a> Counting<'a> {
    /// # Safety
    ///
    /// `handle` is a handle of a context that lives for `'a`.
    unsafe fn new(handle: *mut CounterHandle, endpoint: Endpoint<'a>) -> Self {
        // SAFETY: the pointer is constant while the context lives.
        let count = unsafe { (*handle).cntr_value };
        // SAFETY: the field's address, in a live handle.
        let from = unsafe { &raw mut (*handle).cntr_offset };
        // SAFETY: aligned, alive, and accessed atomically by all.
        let count = unsafe { AtomicU64::from_ptr(count) };
        // SAFETY: as above.
        let from = unsafe { AtomicU64::from_ptr(from) };
        Counting { count, from, endpoint }
    }

    /// Acquire: what the counted writes brought is visible after it.
    fn read(&self) -> u64 {
        let count = self.count.load_outside(Ordering::Acquire) as u32;
        u64::from(count.wrapping_sub(self.from.load(Ordering::Relaxed) as u32) & COUNT_MASK)
    }

    /// The count, modulo 2^31, is at or past `least` rather than before it.
    fn has(&self, least: u64) -> bool {
        (self.read() as u32).wrapping_sub(least as u32) & COUNT_MASK <= COUNT_MASK / 2
    }

    /// The card alone writes the count, so a reset moves what is subtracted.
    fn reset(&self) {
        self.from.store(self.count.load_outside(Ordering::Acquire), Ordering::Relaxed);
    }
}
