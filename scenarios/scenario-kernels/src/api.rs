//! The device API that the programs call.

#[cfg(not(target_arch = "nvptx64"))]
pub use cpu::{Context, put_by_lanes, put_value_by_lanes, sibling, signal_by_lanes};
#[cfg(target_arch = "nvptx64")]
pub use gpu::{Context, Group, Order, put_by_lanes, put_value_by_lanes, sibling, signal_by_lanes};

/// Operations on a CPU thread's context.
#[cfg(not(target_arch = "nvptx64"))]
mod cpu {
    use crate::plan::Plan;
    pub use ferrogin_device::Context;
    use ferrogin_device::{Action, Flags, Span, Status};

    /// Opens another context of the handle.
    ///
    /// # Safety
    /// As for [`Context::from_handle`].
    pub unsafe fn sibling<'a>(_context: &Context<'a>, plan: &Plan, id: u32) -> Result<Context<'a>, Status> {
        // SAFETY: the caller vouches for the handle.
        unsafe { Context::from_handle(plan.handle, id) }
    }

    // The operations for a warp's lanes; here the warp has one thread.

    /// As [`Context::put`].
    pub fn put_by_lanes(
        context: &Context<'_>,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        context.put(peer, dst, src, bytes, action, flags)
    }

    /// As [`Context::put_value`].
    pub fn put_value_by_lanes(
        context: &Context<'_>,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        context.put_value(peer, dst, value, bytes, action, flags)
    }

    /// As [`Context::signal`].
    pub fn signal_by_lanes(context: &Context<'_>, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        context.signal(peer, action, flags)
    }
}

/// Operations on a GPU's context, called by a group of threads. The programs run in the thread of rank 0, which orders the group's other
/// threads to call the same operations.
#[cfg(target_arch = "nvptx64")]
mod gpu {
    use crate::plan::{Api, Plan, Threads};
    use core::ffi::{c_int, c_void};
    use core::sync::atomic::{AtomicU32, Ordering};
    use ferrogin_device::context::Arguments;
    use ferrogin_device::coop::{Coop, Cta, Thread, Warp};
    use ferrogin_device::lanes::Lanes;
    use ferrogin_device::{Action, Flags, FlushRequest, Span, Status, Window, platform};
    use ferrogin_ffi::ext::ContextExt;

    type Ptr = *mut c_void;

    /// An open context, as in C.
    #[derive(Clone, Copy)]
    #[repr(transparent)]
    struct Ctx(*const ContextExt);

    // The functions of ferrogin/gin.h, in the module that ships. Like the Rust crate's methods, all but the one that opens the context are
    // safe to call with an open context: they check their arguments.
    #[rustfmt::skip]
    unsafe extern "C" {
        fn fgin_open(handle: Ptr, id: u32, out: *mut *const ContextExt) -> c_int;
        safe fn fgin_put(ctx: Ctx, peer: u32, dst: Window, dst_off: u64, src: Window, src_off: u64, bytes: u64, action: Action, flags: Flags) -> c_int;
        safe fn fgin_put_value(ctx: Ctx, peer: u32, dst: Window, dst_off: u64, value: u64, bytes: u32, action: Action, flags: Flags) -> c_int;
        safe fn fgin_get(ctx: Ctx, peer: u32, remote: Window, remote_off: u64, local: Window, local_off: u64, bytes: u64, flags: Flags) -> c_int;
        safe fn fgin_signal(ctx: Ctx, peer: u32, action: Action, flags: Flags) -> c_int;
        safe fn fgin_put_signal_at(ctx: Ctx, peer: u32, dst: Window, dst_off: u64, src: Window, src_off: u64, bytes: u64, word: Window, word_off: u64, amount: u64, counter: Action, flags: Flags) -> c_int;
        safe fn fgin_put_value_signal_at(ctx: Ctx, peer: u32, dst: Window, dst_off: u64, value: u64, bytes: u32, word: Window, word_off: u64, amount: u64, flags: Flags) -> c_int;
        safe fn fgin_signal_at(ctx: Ctx, peer: u32, word: Window, word_off: u64, amount: u64, flags: Flags) -> c_int;
        safe fn fgin_warp_put(ctx: Ctx, lanes: u32, peer: u32, dst: Window, dst_off: u64, src: Window, src_off: u64, bytes: u64, action: Action, flags: Flags) -> c_int;
        safe fn fgin_warp_put_value(ctx: Ctx, lanes: u32, peer: u32, dst: Window, dst_off: u64, value: u64, bytes: u32, action: Action, flags: Flags) -> c_int;
        safe fn fgin_warp_signal(ctx: Ctx, lanes: u32, peer: u32, action: Action, flags: Flags) -> c_int;
        safe fn fgin_flush_part(ctx: Ctx, rank: u32, size: u32) -> c_int;
        safe fn fgin_flush_async(ctx: Ctx, out: &mut FlushRequest) -> c_int;
        safe fn fgin_wait_request(ctx: Ctx, request: &FlushRequest) -> c_int;
        safe fn fgin_test_request(ctx: Ctx, request: &FlushRequest, done: &mut c_int) -> c_int;
        safe fn fgin_set_timeout(ctx: Ctx, ns: u64) -> c_int;
        safe fn fgin_read_signal(ctx: Ctx, id: u32, out: &mut u64) -> c_int;
        safe fn fgin_wait_signal(ctx: Ctx, id: u32, least: u64) -> c_int;
        safe fn fgin_reset_signal(ctx: Ctx, id: u32) -> c_int;
        safe fn fgin_read_counter(ctx: Ctx, id: u32, out: &mut u64) -> c_int;
        safe fn fgin_wait_counter(ctx: Ctx, id: u32, least: u64) -> c_int;
        safe fn fgin_reset_counter(ctx: Ctx, id: u32) -> c_int;
    }

    // The functions of gin.cu, through ferrogin/gin.cuh. `by` is the calling group.
    #[rustfmt::skip]
    unsafe extern "C" {
        fn gin_open(handle: Ptr, id: u32, out: *mut *const ContextExt) -> c_int;
        safe fn gin_put(ctx: Ctx, peer: u32, dst: Window, dst_off: u64, src: Window, src_off: u64, bytes: u64, action: Action, flags: Flags, by: Threads) -> c_int;
        safe fn gin_put_value(ctx: Ctx, peer: u32, dst: Window, dst_off: u64, value: u64, bytes: u32, action: Action, flags: Flags, by: Threads) -> c_int;
        safe fn gin_get(ctx: Ctx, peer: u32, remote: Window, remote_off: u64, local: Window, local_off: u64, bytes: u64, flags: Flags, by: Threads) -> c_int;
        safe fn gin_signal(ctx: Ctx, peer: u32, action: Action, flags: Flags, by: Threads) -> c_int;
        safe fn gin_put_signal_at(ctx: Ctx, peer: u32, dst: Window, dst_off: u64, src: Window, src_off: u64, bytes: u64, word: Window, word_off: u64, amount: u64, counter: Action, flags: Flags, by: Threads) -> c_int;
        safe fn gin_put_value_signal_at(ctx: Ctx, peer: u32, dst: Window, dst_off: u64, value: u64, word: Window, word_off: u64, amount: u64, flags: Flags, by: Threads) -> c_int;
        safe fn gin_signal_at(ctx: Ctx, peer: u32, word: Window, word_off: u64, amount: u64, flags: Flags, by: Threads) -> c_int;
        safe fn gin_warp_put(ctx: Ctx, lanes: u32, peer: u32, dst: Window, dst_off: u64, src: Window, src_off: u64, bytes: u64, action: Action, flags: Flags) -> c_int;
        safe fn gin_warp_put_value(ctx: Ctx, lanes: u32, peer: u32, dst: Window, dst_off: u64, value: u64, bytes: u32, action: Action, flags: Flags) -> c_int;
        safe fn gin_warp_signal(ctx: Ctx, lanes: u32, peer: u32, action: Action, flags: Flags) -> c_int;
        safe fn gin_flush(ctx: Ctx, by: Threads) -> c_int;
        safe fn gin_flush_async(ctx: Ctx, out: &mut FlushRequest, by: Threads) -> c_int;
        safe fn gin_wait_request(ctx: Ctx, request: &FlushRequest, by: Threads) -> c_int;
        safe fn gin_wait_signal(ctx: Ctx, id: u32, least: u64, by: Threads) -> c_int;
        safe fn gin_wait_counter(ctx: Ctx, id: u32, least: u64, by: Threads) -> c_int;
    }

    fn checked(code: c_int) -> Result<(), Status> {
        Err(match code {
            0 => return Ok(()),
            1 => Status::InvalidArgument,
            2 => Status::Unsupported,
            3 => Status::Aborted,
            4 => Status::Timeout,
            5 => Status::CardError,
            _ => Status::Poisoned,
        })
    }

    /// What the thread of rank 0 wants from the others, and the status of one of them that failed.
    #[repr(C)]
    pub struct Order {
        call: AtomicU32,
        failed: AtomicU32,
    }

    /// No more calls.
    const END: u32 = 0;
    /// An operation that the thread of rank 0 runs.
    const LEAD: u32 = 1;
    /// A flush, which all threads share.
    const FLUSH: u32 = 2;
    /// Bits of an order's call. The context's id is above them.
    const CALL_BITS: u32 = 8;

    /// A group of threads.
    #[derive(Clone, Copy)]
    pub struct Group<'a> {
        /// The kind of group.
        pub threads: Threads,
        /// Global memory used by this group only.
        pub order: &'a Order,
    }

    impl Coop for Group<'_> {
        fn rank(&self) -> u32 {
            match self.threads {
                Threads::One => Thread.rank(),
                Threads::Tile => Warp.rank() % 8,
                Threads::Warp => Warp.rank(),
                Threads::Block => Cta.rank(),
            }
        }

        fn size(&self) -> u32 {
            match self.threads {
                Threads::One => Thread.size(),
                Threads::Tile => 8,
                Threads::Warp => Warp.size(),
                Threads::Block => Cta.size(),
            }
        }

        // Not inlined, which makes the kernel a third as long.
        #[inline(never)]
        fn sync(&self) {
            match self.threads {
                Threads::One => Thread.sync(),
                Threads::Tile => {
                    let mask = 0xffu32 << (Warp.rank() & 24);
                    // SAFETY: the mask's 8 lanes, including this one, make the call.
                    unsafe { core::arch::asm!("bar.warp.sync {};", in(reg32) mask, options(nostack)) };
                }
                Threads::Warp => Warp.sync(),
                Threads::Block => Cta.sync(),
            }
        }
    }

    /// A context, and the group that calls its operations.
    #[derive(Clone, Copy)]
    pub struct Context<'a> {
        api: Api,
        handle: Ptr,
        id: u32,
        group: Group<'a>,
        raw: ferrogin_device::Context<'a>,
    }

    /// Opens another context of the handle, for the same group.
    ///
    /// # Safety
    /// As for [`ferrogin_device::Context::from_handle`].
    pub unsafe fn sibling<'a>(context: &Context<'a>, _plan: &Plan, id: u32) -> Result<Context<'a>, Status> {
        // SAFETY: the caller vouches for the handle.
        unsafe { Context::open(context.api, context.handle, id, context.group) }
    }

    impl<'a> Context<'a> {
        /// Opens context `id` of a handle.
        ///
        /// # Safety
        /// As for [`ferrogin_device::Context::from_handle`].
        #[inline(never)]
        pub unsafe fn open(api: Api, handle: Ptr, id: u32, group: Group<'a>) -> Result<Self, Status> {
            let (mut at, out) = (core::ptr::null(), &mut core::ptr::null());
            match api {
                // SAFETY: the caller vouches for the handle.
                Api::Rust => at = unsafe { ferrogin_device::Context::from_handle(handle, id) }?.as_ptr(),
                // SAFETY: the caller vouches for the handle; the result is a local variable.
                Api::C => checked(unsafe { fgin_open(handle, id, out) })?,
                // SAFETY: the caller vouches for the handle; the result is a local variable.
                Api::Cuda => checked(unsafe { gin_open(handle, id, out) })?,
            }
            if at.is_null() {
                at = *out;
            }
            // SAFETY: one of the calls above opened the context.
            let raw = unsafe { ferrogin_device::Context::from_ptr(at) };
            Ok(Context { api, handle, id, group, raw })
        }

        /// Follows the orders of the thread of rank 0, in the other threads, until it ends.
        pub fn obey(&self) {
            let (group, mut words) = (&self.group, FlushRequest::default());
            loop {
                group.sync();
                let order = group.order.call.load(Ordering::Relaxed);
                let (call, id) = (order & ((1 << CALL_BITS) - 1), order >> CALL_BITS);
                if call == END {
                    return;
                }
                // SAFETY: the thread of rank 0 has opened the context.
                let ordered =
                    if id == self.id { Ok(*self) } else { unsafe { Context::open(self.api, self.handle, id, *group) } };
                let result = ordered.and_then(|context| match (call, self.api) {
                    // Threads other than that of rank 0 only synchronise.
                    (LEAD, Api::Cuda) => checked(gin_flush_async(context.ctx(), &mut words, group.threads)),
                    (LEAD, _) => context.raw.lead(group, |_| Ok(())),
                    _ => context.flush_part(),
                });
                if let Err(status) = result {
                    group.order.failed.store(status as u32, Ordering::Relaxed);
                }
                group.sync();
            }
        }

        /// Ends the other threads' loop.
        pub fn end(&self) {
            self.group.order.call.store(END, Ordering::Relaxed);
            self.group.sync();
        }

        fn order<T>(&self, call: u32, operation: impl FnOnce() -> T) -> T {
            self.group.order.call.store(self.id << CALL_BITS | call, Ordering::Relaxed);
            self.group.sync();
            let result = operation();
            self.group.sync();
            result
        }

        /// Runs an operation in this thread only, between two barriers of the group.
        #[inline(always)]
        fn lead(
            &self,
            rust: impl FnOnce(&ferrogin_device::Context<'a>) -> Result<(), Status>,
            c: impl FnOnce(Ctx) -> c_int,
            cuda: impl FnOnce(Ctx, Threads) -> c_int,
        ) -> Result<(), Status> {
            self.order(LEAD, || match self.api {
                Api::Rust => self.raw.lead(&self.group, rust),
                Api::C => self.raw.lead(&self.group, |_| checked(c(self.ctx()))),
                Api::Cuda => checked(cuda(self.ctx(), self.group.threads)),
            })
        }

        /// Runs a one-thread operation, which gin.cuh passes on to gin.h.
        fn alone<T: Default>(
            &self,
            rust: impl FnOnce(&ferrogin_device::Context<'a>) -> Result<T, Status>,
            c: impl FnOnce(Ctx, &mut T) -> c_int,
        ) -> Result<T, Status> {
            let mut result = T::default();
            match self.api {
                Api::Rust => rust(&self.raw),
                _ => checked(c(self.ctx(), &mut result)).map(|()| result),
            }
        }

        fn ctx(&self) -> Ctx {
            Ctx(self.raw.as_ptr())
        }

        fn flush_part(&self) -> Result<(), Status> {
            let (group, ctx) = (&self.group, self.ctx());
            match self.api {
                Api::Rust => self.raw.flush_with(group),
                Api::C => {
                    group.sync();
                    let code = fgin_flush_part(ctx, group.rank(), group.size());
                    group.sync();
                    checked(code)
                }
                Api::Cuda => checked(gin_flush(ctx, group.threads)),
            }
        }

        /// As [`ferrogin_device::Context::put`].
        #[inline(never)]
        pub fn put(
            &self,
            peer: u32,
            dst: Span,
            src: Span,
            bytes: u64,
            action: Action,
            flags: Flags,
        ) -> Result<(), Status> {
            let (to, at, from, src_at) = (dst.window, dst.offset, src.window, src.offset);
            self.lead(
                |context| context.put(peer, dst, src, bytes, action, flags),
                |ctx| fgin_put(ctx, peer, to, at, from, src_at, bytes, action, flags),
                |ctx, by| gin_put(ctx, peer, to, at, from, src_at, bytes, action, flags, by),
            )
        }

        /// As [`ferrogin_device::Context::put_value`].
        #[inline(never)]
        pub fn put_value(
            &self,
            peer: u32,
            dst: Span,
            value: u64,
            bytes: u32,
            action: Action,
            flags: Flags,
        ) -> Result<(), Status> {
            self.lead(
                |context| context.put_value(peer, dst, value, bytes, action, flags),
                |ctx| fgin_put_value(ctx, peer, dst.window, dst.offset, value, bytes, action, flags),
                |ctx, by| gin_put_value(ctx, peer, dst.window, dst.offset, value, bytes, action, flags, by),
            )
        }

        /// As [`ferrogin_device::Context::get`].
        #[inline(never)]
        pub fn get(&self, peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags) -> Result<(), Status> {
            let (from, at, to, local_at) = (remote.window, remote.offset, local.window, local.offset);
            self.lead(
                |context| context.get(peer, remote, local, bytes, flags),
                |ctx| fgin_get(ctx, peer, from, at, to, local_at, bytes, flags),
                |ctx, by| gin_get(ctx, peer, from, at, to, local_at, bytes, flags, by),
            )
        }

        /// As [`ferrogin_device::Context::signal`].
        #[inline(never)]
        pub fn signal(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
            self.lead(
                |context| context.signal(peer, action, flags),
                |ctx| fgin_signal(ctx, peer, action, flags),
                |ctx, by| gin_signal(ctx, peer, action, flags, by),
            )
        }

        /// As [`ferrogin_device::Context::put_signal_at`].
        #[inline(never)]
        #[allow(clippy::too_many_arguments)]
        pub fn put_signal_at(
            &self,
            peer: u32,
            dst: Span,
            src: Span,
            bytes: u64,
            word: Span,
            amount: u64,
            counter: Action,
            flags: Flags,
        ) -> Result<(), Status> {
            let [(to, to_at), (from, from_at), (w, w_at)] = [dst, src, word].map(|span| (span.window, span.offset));
            self.lead(
                |context| context.put_signal_at(peer, dst, src, bytes, word, amount, counter, flags),
                |ctx| fgin_put_signal_at(ctx, peer, to, to_at, from, from_at, bytes, w, w_at, amount, counter, flags),
                |ctx, by| {
                    gin_put_signal_at(ctx, peer, to, to_at, from, from_at, bytes, w, w_at, amount, counter, flags, by)
                },
            )
        }

        /// As [`ferrogin_device::Context::put_value_signal_at`], with 8 bytes.
        #[inline(never)]
        #[allow(clippy::too_many_arguments)]
        pub fn put_value_signal_at(
            &self,
            peer: u32,
            dst: Span,
            value: u64,
            bytes: u32,
            word: Span,
            amount: u64,
            flags: Flags,
        ) -> Result<(), Status> {
            let [(to, to_at), (w, w_at)] = [dst, word].map(|span| (span.window, span.offset));
            self.lead(
                |context| context.put_value_signal_at(peer, dst, value, bytes, word, amount, flags),
                |ctx| fgin_put_value_signal_at(ctx, peer, to, to_at, value, bytes, w, w_at, amount, flags),
                |ctx, by| gin_put_value_signal_at(ctx, peer, to, to_at, value, w, w_at, amount, flags, by),
            )
        }

        /// As [`ferrogin_device::Context::signal_at`].
        #[inline(never)]
        pub fn signal_at(&self, peer: u32, word: Span, amount: u64, flags: Flags) -> Result<(), Status> {
            self.lead(
                |context| context.signal_at(peer, word, amount, flags),
                |ctx| fgin_signal_at(ctx, peer, word.window, word.offset, amount, flags),
                |ctx, by| gin_signal_at(ctx, peer, word.window, word.offset, amount, flags, by),
            )
        }

        /// As [`ferrogin_device::Context::emulates_signals`].
        pub fn emulates_signals(&self) -> bool {
            self.raw.emulates_signals()
        }

        /// The lanes of this warp that run programs and call the `*_by_lanes` functions together; only this lane if its program is a
        /// group's.
        fn lanes(&self) -> Lanes {
            match self.group.threads {
                Threads::One => {
                    let first = Cta.rank() / 32 * 32;
                    Lanes(u32::MAX >> (32 - (Cta.size() - first).min(32)))
                }
                _ => Lanes(1 << Warp.rank()),
            }
        }

        /// Flushes with all threads of the group. Returns this thread's status, or that of another thread that failed.
        #[inline(never)]
        pub fn flush(&self) -> Result<(), Status> {
            self.group.order.failed.store(0, Ordering::Relaxed);
            self.order(FLUSH, || self.flush_part())?;
            checked(self.group.order.failed.load(Ordering::Relaxed) as c_int)
        }

        /// As [`ferrogin_device::Context::flush_async`].
        #[inline(never)]
        pub fn flush_async(&self) -> Result<FlushRequest, Status> {
            self.order(LEAD, || {
                let mut request = FlushRequest::default();
                let begun = match self.api {
                    Api::Rust => {
                        self.raw.lead(&self.group, |context| context.flush_async().map(|begun| request = begun))
                    }
                    Api::C => self.raw.lead(&self.group, |_| checked(fgin_flush_async(self.ctx(), &mut request))),
                    Api::Cuda => checked(gin_flush_async(self.ctx(), &mut request, self.group.threads)),
                };
                begun.map(|()| request)
            })
        }

        /// As [`ferrogin_device::Context::wait_flush`].
        #[inline(never)]
        pub fn wait_flush(&self, request: &FlushRequest) -> Result<(), Status> {
            self.lead(
                |context| context.wait_flush(request),
                |ctx| fgin_wait_request(ctx, request),
                |ctx, by| gin_wait_request(ctx, request, by),
            )
        }

        /// As [`ferrogin_device::Context::wait_signal`].
        #[inline(never)]
        pub fn wait_signal(&self, id: u32, least: u64) -> Result<(), Status> {
            self.lead(
                |context| context.wait_signal(id, least),
                |ctx| fgin_wait_signal(ctx, id, least),
                |ctx, by| gin_wait_signal(ctx, id, least, by),
            )
        }

        /// As [`ferrogin_device::Context::wait_counter`].
        #[inline(never)]
        pub fn wait_counter(&self, id: u32, least: u64) -> Result<(), Status> {
            self.lead(
                |context| context.wait_counter(id, least),
                |ctx| fgin_wait_counter(ctx, id, least),
                |ctx, by| gin_wait_counter(ctx, id, least, by),
            )
        }

        /// As [`ferrogin_device::Context::test_flush`].
        pub fn test_flush(&self, request: &FlushRequest) -> Result<bool, Status> {
            let rust = |context: &ferrogin_device::Context<'a>| context.test_flush(request).map(c_int::from);
            self.alone(rust, |ctx, done| fgin_test_request(ctx, request, done)).map(|done| done != 0)
        }

        /// As [`ferrogin_device::Context::set_timeout_ns`].
        pub fn set_timeout_ns(&self, ns: u64) {
            match self.api {
                Api::Rust => self.raw.set_timeout_ns(ns),
                // The call never fails for an open context.
                _ => drop(fgin_set_timeout(self.ctx(), ns)),
            }
        }

        /// As [`ferrogin_device::Context::read_signal`].
        pub fn read_signal(&self, id: u32) -> Result<u64, Status> {
            self.alone(|context| context.read_signal(id), |ctx, count| fgin_read_signal(ctx, id, count))
        }

        /// As [`ferrogin_device::Context::reset_signal`].
        pub fn reset_signal(&self, id: u32) -> Result<(), Status> {
            self.alone(|context| context.reset_signal(id), |ctx, ()| fgin_reset_signal(ctx, id))
        }

        /// As [`ferrogin_device::Context::read_counter`].
        pub fn read_counter(&self, id: u32) -> Result<u64, Status> {
            self.alone(|context| context.read_counter(id), |ctx, count| fgin_read_counter(ctx, id, count))
        }

        /// As [`ferrogin_device::Context::reset_counter`].
        pub fn reset_counter(&self, id: u32) -> Result<(), Status> {
            self.alone(|context| context.reset_counter(id), |ctx, ()| fgin_reset_counter(ctx, id))
        }

        /// Waits a moment in a polling loop.
        pub fn relax(&self, _round: u32) {
            platform::relax(0, || false);
        }
    }

    /// [`ferrogin_device::Context::post_by_lanes`] for a put.
    #[inline(never)]
    pub fn put_by_lanes(
        context: &Context<'_>,
        peer: u32,
        dst: Span,
        src: Span,
        bytes: u64,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let (lanes, ctx) = (context.lanes(), context.ctx());
        let (to, at, from, src_at) = (dst.window, dst.offset, src.window, src.offset);
        checked(match context.api {
            Api::Rust => return context.raw.post_by_lanes(lanes, Arguments::put(peer, dst, src, bytes, action, flags)),
            Api::C => fgin_warp_put(ctx, lanes.0, peer, to, at, from, src_at, bytes, action, flags),
            Api::Cuda => gin_warp_put(ctx, lanes.0, peer, to, at, from, src_at, bytes, action, flags),
        })
    }

    /// [`ferrogin_device::Context::post_by_lanes`] for a value.
    #[inline(never)]
    pub fn put_value_by_lanes(
        context: &Context<'_>,
        peer: u32,
        dst: Span,
        value: u64,
        bytes: u32,
        action: Action,
        flags: Flags,
    ) -> Result<(), Status> {
        let (lanes, ctx) = (context.lanes(), context.ctx());
        checked(match context.api {
            Api::Rust => {
                return context.raw.post_by_lanes(lanes, Arguments::value(peer, dst, value, bytes, action, flags));
            }
            Api::C => fgin_warp_put_value(ctx, lanes.0, peer, dst.window, dst.offset, value, bytes, action, flags),
            Api::Cuda => gin_warp_put_value(ctx, lanes.0, peer, dst.window, dst.offset, value, bytes, action, flags),
        })
    }

    /// [`ferrogin_device::Context::post_by_lanes`] for a signal.
    #[inline(never)]
    pub fn signal_by_lanes(context: &Context<'_>, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
        let (lanes, ctx) = (context.lanes(), context.ctx());
        checked(match context.api {
            Api::Rust => return context.raw.post_by_lanes(lanes, Arguments::signal(peer, action, flags)),
            Api::C => fgin_warp_signal(ctx, lanes.0, peer, action, flags),
            Api::Cuda => gin_warp_signal(ctx, lanes.0, peer, action, flags),
        })
    }
}
