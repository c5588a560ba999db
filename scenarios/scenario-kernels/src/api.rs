//! The device API that the programs call.

#[cfg(not(target_arch = "nvptx64"))]
pub use cpu::{Context, OfOneLane, sibling};
#[cfg(target_arch = "nvptx64")]
pub use gpu::{Context, Group, Order, sibling};

/// The operations of a CPU thread's context.
#[cfg(not(target_arch = "nvptx64"))]
mod cpu {
    use crate::plan::Plan;
    pub use ferrogin_device::Context;
    use ferrogin_device::{Action, Flags, Span, Status};

    /// Another context of the handle.
    ///
    /// # Safety
    /// As for [`Context::from_handle`].
    pub unsafe fn sibling<'a>(_context: &Context<'a>, plan: &Plan, id: u32) -> Result<Context<'a>, Status> {
        // SAFETY: the caller vouches for the handle.
        unsafe { Context::from_handle(plan.handle, id) }
    }

    /// The operations of lanes of a warp, which has one thread here.
    #[allow(clippy::missing_errors_doc)]
    pub trait OfOneLane {
        /// As [`Context::put`].
        fn put_by_lanes(
            &self,
            peer: u32,
            dst: Span,
            src: Span,
            bytes: u64,
            action: Action,
            flags: Flags,
        ) -> Result<(), Status>;
        /// As [`Context::put_value`].
        fn put_value_by_lanes(
            &self,
            peer: u32,
            dst: Span,
            value: u64,
            bytes: u32,
            action: Action,
            flags: Flags,
        ) -> Result<(), Status>;
        /// As [`Context::signal`].
        fn signal_by_lanes(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status>;
    }

    impl OfOneLane for Context<'_> {
        fn put_by_lanes(
            &self,
            peer: u32,
            dst: Span,
            src: Span,
            bytes: u64,
            action: Action,
            flags: Flags,
        ) -> Result<(), Status> {
            self.put(peer, dst, src, bytes, action, flags)
        }
        fn put_value_by_lanes(
            &self,
            peer: u32,
            dst: Span,
            value: u64,
            bytes: u32,
            action: Action,
            flags: Flags,
        ) -> Result<(), Status> {
            self.put_value(peer, dst, value, bytes, action, flags)
        }
        fn signal_by_lanes(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
            self.signal(peer, action, flags)
        }
    }
}

/// The operations of a GPU's context, which a group of threads calls. The programs run in the thread of rank 0. Its operations are
/// orders to the other threads of the group, which call the same operation.
#[cfg(target_arch = "nvptx64")]
mod gpu {
    use crate::plan::{Api, Plan, Threads};
    use core::ffi::{c_int, c_void};
    use core::sync::atomic::{AtomicU32, Ordering};
    use ferrogin_device::coop::{Coop, Cta, Thread, Warp};
    use ferrogin_device::lanes::Lanes;
    use ferrogin_device::{Action, Flags, FlushRequest, Span, Status, platform};
    use ferrogin_ffi::ext::ContextExt;

    type Ctx = *const ContextExt;
    type Ptr = *mut c_void;

    // The functions of ferrogin/gin.h, in the module that ships.
    #[rustfmt::skip]
    unsafe extern "C" {
        fn fgin_open(handle: Ptr, id: u32, out: *mut Ctx) -> c_int;
        fn fgin_put(ctx: Ctx, peer: u32, dst: Ptr, dst_off: u64, src: Ptr, src_off: u64, bytes: u64, action: u64, flags: u32) -> c_int;
        fn fgin_put_value(ctx: Ctx, peer: u32, dst: Ptr, dst_off: u64, value: u64, bytes: u32, action: u64, flags: u32) -> c_int;
        fn fgin_get(ctx: Ctx, peer: u32, remote: Ptr, remote_off: u64, local: Ptr, local_off: u64, bytes: u64, flags: u32) -> c_int;
        fn fgin_signal(ctx: Ctx, peer: u32, action: u64, flags: u32) -> c_int;
        fn fgin_put_signal_at(ctx: Ctx, peer: u32, dst: Ptr, dst_off: u64, src: Ptr, src_off: u64, bytes: u64, word: Ptr, word_off: u64, amount: u64, counter: u64, flags: u32) -> c_int;
        fn fgin_put_value_signal_at(ctx: Ctx, peer: u32, dst: Ptr, dst_off: u64, value: u64, bytes: u32, word: Ptr, word_off: u64, amount: u64, flags: u32) -> c_int;
        fn fgin_signal_at(ctx: Ctx, peer: u32, word: Ptr, word_off: u64, amount: u64, flags: u32) -> c_int;
        fn fgin_warp_put(ctx: Ctx, lanes: u32, peer: u32, dst: Ptr, dst_off: u64, src: Ptr, src_off: u64, bytes: u64, action: u64, flags: u32) -> c_int;
        fn fgin_warp_put_value(ctx: Ctx, lanes: u32, peer: u32, dst: Ptr, dst_off: u64, value: u64, bytes: u32, action: u64, flags: u32) -> c_int;
        fn fgin_warp_signal(ctx: Ctx, lanes: u32, peer: u32, action: u64, flags: u32) -> c_int;
        fn fgin_flush_part(ctx: Ctx, rank: u32, size: u32) -> c_int;
        fn fgin_flush_async(ctx: Ctx, out: *mut FlushRequest) -> c_int;
        fn fgin_wait_request(ctx: Ctx, request: *const FlushRequest) -> c_int;
        fn fgin_test_request(ctx: Ctx, request: *const FlushRequest, done: *mut c_int) -> c_int;
        fn fgin_set_timeout(ctx: Ctx, ns: u64) -> c_int;
        fn fgin_read_signal(ctx: Ctx, id: u32, out: *mut u64) -> c_int;
        fn fgin_wait_signal(ctx: Ctx, id: u32, least: u64) -> c_int;
        fn fgin_reset_signal(ctx: Ctx, id: u32) -> c_int;
        fn fgin_read_counter(ctx: Ctx, id: u32, out: *mut u64) -> c_int;
        fn fgin_wait_counter(ctx: Ctx, id: u32, least: u64) -> c_int;
        fn fgin_reset_counter(ctx: Ctx, id: u32) -> c_int;
    }

    // The functions of gin.cu, by ferrogin/gin.cuh. `by` is the group that calls.
    #[rustfmt::skip]
    unsafe extern "C" {
        fn gin_open(handle: Ptr, id: u32, out: *mut Ctx) -> c_int;
        fn gin_put(ctx: Ctx, peer: u32, dst: Ptr, dst_off: u64, src: Ptr, src_off: u64, bytes: u64, action: u64, flags: u32, by: Threads) -> c_int;
        fn gin_put_value(ctx: Ctx, peer: u32, dst: Ptr, dst_off: u64, value: u64, bytes: u32, action: u64, flags: u32, by: Threads) -> c_int;
        fn gin_get(ctx: Ctx, peer: u32, remote: Ptr, remote_off: u64, local: Ptr, local_off: u64, bytes: u64, flags: u32, by: Threads) -> c_int;
        fn gin_signal(ctx: Ctx, peer: u32, action: u64, flags: u32, by: Threads) -> c_int;
        fn gin_put_signal_at(ctx: Ctx, peer: u32, dst: Ptr, dst_off: u64, src: Ptr, src_off: u64, bytes: u64, word: Ptr, word_off: u64, amount: u64, counter: u64, flags: u32, by: Threads) -> c_int;
        fn gin_put_value_signal_at(ctx: Ctx, peer: u32, dst: Ptr, dst_off: u64, value: u64, word: Ptr, word_off: u64, amount: u64, flags: u32, by: Threads) -> c_int;
        fn gin_signal_at(ctx: Ctx, peer: u32, word: Ptr, word_off: u64, amount: u64, flags: u32, by: Threads) -> c_int;
        fn gin_warp_put(ctx: Ctx, lanes: u32, peer: u32, dst: Ptr, dst_off: u64, src: Ptr, src_off: u64, bytes: u64, action: u64, flags: u32) -> c_int;
        fn gin_warp_put_value(ctx: Ctx, lanes: u32, peer: u32, dst: Ptr, dst_off: u64, value: u64, bytes: u32, action: u64, flags: u32) -> c_int;
        fn gin_warp_signal(ctx: Ctx, lanes: u32, peer: u32, action: u64, flags: u32) -> c_int;
        fn gin_flush(ctx: Ctx, by: Threads) -> c_int;
        fn gin_flush_async(ctx: Ctx, out: *mut FlushRequest, by: Threads) -> c_int;
        fn gin_wait_request(ctx: Ctx, request: *const FlushRequest, by: Threads) -> c_int;
        fn gin_wait_signal(ctx: Ctx, id: u32, least: u64, by: Threads) -> c_int;
        fn gin_wait_counter(ctx: Ctx, id: u32, least: u64, by: Threads) -> c_int;
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

    /// What the thread of rank 0 wants of the others, and the status of theirs that failed.
    #[repr(C)]
    pub struct Order {
        call: AtomicU32,
        failed: AtomicU32,
    }

    /// No more calls.
    const END: u32 = 0;
    /// An operation that the thread of rank 0 carries out.
    const LEAD: u32 = 1;
    /// A flush, of which each thread does a part.
    const FLUSH: u32 = 2;
    /// Bits of a call in an order. The context's id is above them.
    const CALL_BITS: u32 = 8;

    /// A group of threads.
    #[derive(Clone, Copy)]
    pub struct Group<'a> {
        /// The kind of group.
        pub threads: Threads,
        /// A word of global memory of this group alone.
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

        // Only called, so that the kernel is a third as long.
        #[inline(never)]
        fn sync(&self) {
            match self.threads {
                Threads::One => Thread.sync(),
                Threads::Tile => {
                    let mask = 0xffu32 << (Warp.rank() & 24);
                    // SAFETY: the 8 lanes of the mask, this one among them, make the call.
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

    /// Another context of the handle, for the same group.
    ///
    /// # Safety
    /// As for [`ferrogin_device::Context::from_handle`].
    pub unsafe fn sibling<'a>(context: &Context<'a>, _plan: &Plan, id: u32) -> Result<Context<'a>, Status> {
        // SAFETY: the caller vouches for the handle.
        unsafe { Context::open(context.api, context.handle, id, context.group) }
    }

    impl<'a> Context<'a> {
        /// Context `id` of a handle.
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

        /// Orders of the thread of rank 0, in the other threads, until the end.
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
                    // SAFETY: threads of another rank than 0 only synchronise.
                    (LEAD, Api::Cuda) => {
                        checked(unsafe { gin_flush_async(context.raw.as_ptr(), &mut words, group.threads) })
                    }
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

        /// An operation that this thread alone carries out, between two barriers of the group.
        #[inline(always)]
        fn lead(
            &self,
            rust: impl FnOnce(&ferrogin_device::Context<'a>) -> Result<(), Status>,
            c: impl FnOnce(Ctx) -> c_int,
            cuda: impl FnOnce(Ctx, Threads) -> c_int,
        ) -> Result<(), Status> {
            self.order(LEAD, || match self.api {
                Api::Rust => self.raw.lead(&self.group, rust),
                Api::C => self.raw.lead(&self.group, |context| checked(c(context.as_ptr()))),
                Api::Cuda => checked(cuda(self.raw.as_ptr(), self.group.threads)),
            })
        }

        fn flush_part(&self) -> Result<(), Status> {
            let (group, at) = (&self.group, self.raw.as_ptr());
            match self.api {
                Api::Rust => self.raw.flush_with(group),
                Api::C => {
                    group.sync();
                    // SAFETY: the context is open.
                    let code = unsafe { fgin_flush_part(at, group.rank(), group.size()) };
                    group.sync();
                    checked(code)
                }
                // SAFETY: the context is open.
                Api::Cuda => checked(unsafe { gin_flush(at, group.threads) }),
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
            let (to, from) = ((dst.window.0, dst.offset), (src.window.0, src.offset));
            let (bits, flag_bits) = (action.bits(), flags.bits());
            self.lead(
                |context| context.put(peer, dst, src, bytes, action, flags),
                // SAFETY: the context is open, and the windows are registered.
                |at| unsafe { fgin_put(at, peer, to.0, to.1, from.0, from.1, bytes, bits, flag_bits) },
                // SAFETY: the context is open, and the windows are registered.
                |at, threads| unsafe { gin_put(at, peer, to.0, to.1, from.0, from.1, bytes, bits, flag_bits, threads) },
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
            let (to, bits, flag_bits) = ((dst.window.0, dst.offset), action.bits(), flags.bits());
            self.lead(
                |context| context.put_value(peer, dst, value, bytes, action, flags),
                // SAFETY: the context is open, and the window is registered.
                |at| unsafe { fgin_put_value(at, peer, to.0, to.1, value, bytes, bits, flag_bits) },
                // SAFETY: the context is open, and the window is registered.
                |at, threads| unsafe { gin_put_value(at, peer, to.0, to.1, value, bytes, bits, flag_bits, threads) },
            )
        }

        /// As [`ferrogin_device::Context::get`].
        #[inline(never)]
        pub fn get(&self, peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags) -> Result<(), Status> {
            let (from, to, bits) = ((remote.window.0, remote.offset), (local.window.0, local.offset), flags.bits());
            self.lead(
                |context| context.get(peer, remote, local, bytes, flags),
                // SAFETY: the context is open, and the windows are registered.
                |at| unsafe { fgin_get(at, peer, from.0, from.1, to.0, to.1, bytes, bits) },
                // SAFETY: the context is open, and the windows are registered.
                |at, threads| unsafe { gin_get(at, peer, from.0, from.1, to.0, to.1, bytes, bits, threads) },
            )
        }

        /// As [`ferrogin_device::Context::signal`].
        #[inline(never)]
        pub fn signal(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
            let (bits, flag_bits) = (action.bits(), flags.bits());
            self.lead(
                |context| context.signal(peer, action, flags),
                // SAFETY: the context is open.
                |at| unsafe { fgin_signal(at, peer, bits, flag_bits) },
                // SAFETY: the context is open.
                |at, threads| unsafe { gin_signal(at, peer, bits, flag_bits, threads) },
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
            let [to, from, at] = [dst, src, word].map(|span| (span.window.0, span.offset));
            let (bits, flag_bits) = (counter.bits(), flags.bits());
            self.lead(
                |context| context.put_signal_at(peer, dst, src, bytes, word, amount, counter, flags),
                // SAFETY: the context is open, and the windows are registered.
                |ctx| unsafe {
                    fgin_put_signal_at(
                        ctx, peer, to.0, to.1, from.0, from.1, bytes, at.0, at.1, amount, bits, flag_bits,
                    )
                },
                // SAFETY: the context is open, and the windows are registered.
                |ctx, by| unsafe {
                    gin_put_signal_at(
                        ctx, peer, to.0, to.1, from.0, from.1, bytes, at.0, at.1, amount, bits, flag_bits, by,
                    )
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
            let ([to, at], bits) = ([dst, word].map(|span| (span.window.0, span.offset)), flags.bits());
            self.lead(
                |context| context.put_value_signal_at(peer, dst, value, bytes, word, amount, flags),
                // SAFETY: the context is open, and the windows are registered.
                |ctx| unsafe {
                    fgin_put_value_signal_at(ctx, peer, to.0, to.1, value, bytes, at.0, at.1, amount, bits)
                },
                // SAFETY: the context is open, and the windows are registered.
                |ctx, by| unsafe {
                    gin_put_value_signal_at(ctx, peer, to.0, to.1, value, at.0, at.1, amount, bits, by)
                },
            )
        }

        /// As [`ferrogin_device::Context::signal_at`].
        #[inline(never)]
        pub fn signal_at(&self, peer: u32, word: Span, amount: u64, flags: Flags) -> Result<(), Status> {
            let (at, bits) = ((word.window.0, word.offset), flags.bits());
            self.lead(
                |context| context.signal_at(peer, word, amount, flags),
                // SAFETY: the context is open, and the window is registered.
                |ctx| unsafe { fgin_signal_at(ctx, peer, at.0, at.1, amount, bits) },
                // SAFETY: the context is open, and the window is registered.
                |ctx, by| unsafe { gin_signal_at(ctx, peer, at.0, at.1, amount, bits, by) },
            )
        }

        /// As [`ferrogin_device::Context::emulates_signals`].
        pub fn emulates_signals(&self) -> bool {
            self.raw.emulates_signals()
        }

        /// The lanes of this warp that run programs, which call the `*_by_lanes` together; this lane alone if its program is a group's.
        fn lanes(&self) -> Lanes {
            match self.group.threads {
                Threads::One => {
                    let first = Cta.rank() / 32 * 32;
                    Lanes(u32::MAX >> (32 - (Cta.size() - first).min(32)))
                }
                _ => Lanes(1 << Warp.rank()),
            }
        }

        /// As [`ferrogin_device::Context::put`], by all lanes of the warp.
        #[inline(never)]
        pub fn put_by_lanes(
            &self,
            peer: u32,
            dst: Span,
            src: Span,
            bytes: u64,
            action: Action,
            flags: Flags,
        ) -> Result<(), Status> {
            let (lanes, at, action_bits, flag_bits) = (self.lanes(), self.raw.as_ptr(), action.bits(), flags.bits());
            let (to, from) = ((dst.window.0, dst.offset), (src.window.0, src.offset));
            checked(match self.api {
                Api::Rust => return self.raw.put_by_lanes(lanes, peer, dst, src, bytes, action, flags),
                // SAFETY: the context is open, and the windows are registered.
                Api::C => unsafe {
                    fgin_warp_put(at, lanes.0, peer, to.0, to.1, from.0, from.1, bytes, action_bits, flag_bits)
                },
                // SAFETY: the context is open, and the windows are registered.
                Api::Cuda => unsafe {
                    gin_warp_put(at, lanes.0, peer, to.0, to.1, from.0, from.1, bytes, action_bits, flag_bits)
                },
            })
        }

        /// As [`ferrogin_device::Context::put_value`], by all lanes of the warp.
        #[inline(never)]
        pub fn put_value_by_lanes(
            &self,
            peer: u32,
            dst: Span,
            value: u64,
            bytes: u32,
            action: Action,
            flags: Flags,
        ) -> Result<(), Status> {
            let (lanes, at, action_bits, flag_bits) = (self.lanes(), self.raw.as_ptr(), action.bits(), flags.bits());
            let to = (dst.window.0, dst.offset);
            checked(match self.api {
                Api::Rust => return self.raw.put_value_by_lanes(lanes, peer, dst, value, bytes, action, flags),
                // SAFETY: the context is open, and the window is registered.
                Api::C => unsafe {
                    fgin_warp_put_value(at, lanes.0, peer, to.0, to.1, value, bytes, action_bits, flag_bits)
                },
                // SAFETY: the context is open, and the window is registered.
                Api::Cuda => unsafe {
                    gin_warp_put_value(at, lanes.0, peer, to.0, to.1, value, bytes, action_bits, flag_bits)
                },
            })
        }

        /// As [`ferrogin_device::Context::signal`], by all lanes of the warp.
        #[inline(never)]
        pub fn signal_by_lanes(&self, peer: u32, action: Action, flags: Flags) -> Result<(), Status> {
            let (lanes, at) = (self.lanes(), self.raw.as_ptr());
            checked(match self.api {
                Api::Rust => return self.raw.signal_by_lanes(lanes, peer, action, flags),
                // SAFETY: the context is open.
                Api::C => unsafe { fgin_warp_signal(at, lanes.0, peer, action.bits(), flags.bits()) },
                // SAFETY: the context is open.
                Api::Cuda => unsafe { gin_warp_signal(at, lanes.0, peer, action.bits(), flags.bits()) },
            })
        }

        /// A flush by all threads of the group; the status is this thread's, or that of another thread that failed.
        #[inline(never)]
        pub fn flush(&self) -> Result<(), Status> {
            self.group.order.failed.store(0, Ordering::Relaxed);
            self.order(FLUSH, || self.flush_part())?;
            checked(self.group.order.failed.load(Ordering::Relaxed) as c_int)
        }

        /// As [`ferrogin_device::Context::flush_async`].
        #[inline(never)]
        pub fn flush_async(&self) -> Result<FlushRequest, Status> {
            let (mut request, mut words) = (FlushRequest::default(), FlushRequest::default());
            let out = &raw mut words;
            let rust = |context: &ferrogin_device::Context<'a>| context.flush_async().map(|begun| request = begun);
            // SAFETY: the context is open, and the result is a local variable.
            let c = |at| unsafe { fgin_flush_async(at, out) };
            // SAFETY: the context is open, and the result is a local variable.
            let cuda = |at, threads| unsafe { gin_flush_async(at, out, threads) };
            self.lead(rust, c, cuda)?;
            Ok(if matches!(self.api, Api::Rust) { request } else { words })
        }

        /// As [`ferrogin_device::Context::wait_flush`].
        #[inline(never)]
        pub fn wait_flush(&self, request: &FlushRequest) -> Result<(), Status> {
            self.lead(
                |context| context.wait_flush(request),
                // SAFETY: the context is open, and the request is a reference.
                |at| unsafe { fgin_wait_request(at, request) },
                // SAFETY: the context is open, and the request is a reference.
                |at, threads| unsafe { gin_wait_request(at, request, threads) },
            )
        }

        /// As [`ferrogin_device::Context::wait_signal`].
        #[inline(never)]
        pub fn wait_signal(&self, id: u32, least: u64) -> Result<(), Status> {
            self.lead(
                |context| context.wait_signal(id, least),
                // SAFETY: the context is open.
                |at| unsafe { fgin_wait_signal(at, id, least) },
                // SAFETY: the context is open.
                |at, threads| unsafe { gin_wait_signal(at, id, least, threads) },
            )
        }

        /// As [`ferrogin_device::Context::wait_counter`].
        #[inline(never)]
        pub fn wait_counter(&self, id: u32, least: u64) -> Result<(), Status> {
            self.lead(
                |context| context.wait_counter(id, least),
                // SAFETY: the context is open.
                |at| unsafe { fgin_wait_counter(at, id, least) },
                // SAFETY: the context is open.
                |at, threads| unsafe { gin_wait_counter(at, id, least, threads) },
            )
        }

        // gin.cuh passes what follows on to the functions of gin.h, for one thread.

        /// As [`ferrogin_device::Context::test_flush`].
        pub fn test_flush(&self, request: &FlushRequest) -> Result<bool, Status> {
            let mut done = 0;
            match self.api {
                Api::Rust => self.raw.test_flush(request),
                // SAFETY: the context is open, the request is a reference, and the result is a local variable.
                _ => checked(unsafe { fgin_test_request(self.raw.as_ptr(), request, &mut done) }).map(|()| done != 0),
            }
        }

        /// As [`ferrogin_device::Context::set_timeout_ns`].
        pub fn set_timeout_ns(&self, ns: u64) {
            match self.api {
                Api::Rust => self.raw.set_timeout_ns(ns),
                // SAFETY: the context is open. The call fails for no other.
                _ => drop(unsafe { fgin_set_timeout(self.raw.as_ptr(), ns) }),
            }
        }

        /// As [`ferrogin_device::Context::read_signal`].
        pub fn read_signal(&self, id: u32) -> Result<u64, Status> {
            let mut count = 0;
            match self.api {
                Api::Rust => self.raw.read_signal(id),
                // SAFETY: the context is open, and the result is a local variable.
                _ => checked(unsafe { fgin_read_signal(self.raw.as_ptr(), id, &mut count) }).map(|()| count),
            }
        }

        /// As [`ferrogin_device::Context::reset_signal`].
        pub fn reset_signal(&self, id: u32) -> Result<(), Status> {
            match self.api {
                Api::Rust => self.raw.reset_signal(id),
                // SAFETY: the context is open.
                _ => checked(unsafe { fgin_reset_signal(self.raw.as_ptr(), id) }),
            }
        }

        /// As [`ferrogin_device::Context::read_counter`].
        pub fn read_counter(&self, id: u32) -> Result<u64, Status> {
            let mut count = 0;
            match self.api {
                Api::Rust => self.raw.read_counter(id),
                // SAFETY: the context is open, and the result is a local variable.
                _ => checked(unsafe { fgin_read_counter(self.raw.as_ptr(), id, &mut count) }).map(|()| count),
            }
        }

        /// As [`ferrogin_device::Context::reset_counter`].
        pub fn reset_counter(&self, id: u32) -> Result<(), Status> {
            match self.api {
                Api::Rust => self.raw.reset_counter(id),
                // SAFETY: the context is open.
                _ => checked(unsafe { fgin_reset_counter(self.raw.as_ptr(), id) }),
            }
        }

        /// Waits a moment, in a loop that polls.
        pub fn relax(&self, _round: u32) {
            platform::relax();
        }
    }
}
