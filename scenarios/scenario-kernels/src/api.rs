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

/// Operations on a GPU's context, called by a group of threads. The programs run in the thread of rank 0, which orders
/// the group's other threads to call the same operations.
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

    // The functions that don't fit in the table of operations.
    unsafe extern "C" {
        fn fgin_open(handle: Ptr, id: u32, out: *mut *const ContextExt) -> c_int;
        fn gin_open(handle: Ptr, id: u32, out: *mut *const ContextExt) -> c_int;
        safe fn fgin_flush_part(ctx: Ctx, rank: u32, size: u32) -> c_int;
        safe fn gin_flush(ctx: Ctx, by: Threads) -> c_int;
        safe fn fgin_flush_async(ctx: Ctx, out: &mut FlushRequest) -> c_int;
        safe fn gin_flush_async(ctx: Ctx, out: &mut FlushRequest, by: Threads) -> c_int;
        safe fn fgin_test_request(ctx: Ctx, request: &FlushRequest, done: &mut c_int) -> c_int;
        safe fn fgin_set_timeout(ctx: Ctx, ns: u64) -> c_int;
    }

    /// Defines an operation with the Rust crate's name and arguments, and declares the functions that it calls: of
    /// ferrogin/gin.h in the module that ships (`fgin_...`), and of gin.cu, through ferrogin/gin.cuh (`gin_...`, where
    /// the last argument is the calling group). Like the crate's methods, they are safe to call with an open context,
    /// because they check their arguments.
    macro_rules! operation {
        ($kind:ident $names:tt($($arguments:tt)*)) => {
            operation!(@split $kind $names ($($arguments)*) [] [] [] $($arguments)*);
        };
        // A span is two arguments in C, a window and an offset.
        (
            @split $kind:ident $names:tt $all:tt
            [$($rust:tt)*] [$($types:tt)*] [$($c:tt)*] $arg:ident: Span $(, $($rest:tt)*)?
        ) => {
            operation!(
                @split $kind $names $all
                [$($rust)* $arg,] [$($types)* _: Window, _: u64,] [$($c)* $arg.window, $arg.offset,] $($($rest)*)?
            );
        };
        (
            @split $kind:ident $names:tt $all:tt
            [$($rust:tt)*] [$($types:tt)*] [$($c:tt)*] $arg:ident: $ty:ty $(, $($rest:tt)*)?
        ) => {
            operation!(@split $kind $names $all [$($rust)* $arg,] [$($types)* _: $ty,] [$($c)* $arg,] $($($rest)*)?);
        };
        // Called in the thread of rank 0, between two barriers of the group.
        (
            @split lead ($method:ident, $fgin:ident, $gin:ident) ($($all:tt)*)
            [$($rust:tt)*] [$($types:tt)*] [$($c:tt)*]
        ) => {
            #[doc = concat!("As [`ferrogin_device::Context::", stringify!($method), "`].")]
            #[inline(never)]
            #[allow(clippy::too_many_arguments)]
            pub fn $method(&self, $($all)*) -> Result<(), Status> {
                unsafe extern "C" {
                    safe fn $fgin(ctx: Ctx, $($types)*) -> c_int;
                    safe fn $gin(ctx: Ctx, $($types)* by: Threads) -> c_int;
                }
                self.lead(
                    |context| context.$method($($rust)*),
                    |ctx| $fgin(ctx, $($c)*),
                    |ctx, by| $gin(ctx, $($c)* by),
                )
            }
        };
        // Called in one thread; gin.cuh passes it on to gin.h.
        (@split reset ($method:ident, $fgin:ident) ($($all:tt)*) [$($rust:tt)*] [$($types:tt)*] [$($c:tt)*]) => {
            #[doc = concat!("As [`ferrogin_device::Context::", stringify!($method), "`].")]
            pub fn $method(&self, $($all)*) -> Result<(), Status> {
                unsafe extern "C" {
                    safe fn $fgin(ctx: Ctx, $($types)*) -> c_int;
                }
                self.alone(|context| context.$method($($rust)*), |ctx, ()| $fgin(ctx, $($c)*))
            }
        };
        (@split read ($method:ident, $fgin:ident) ($($all:tt)*) [$($rust:tt)*] [$($types:tt)*] [$($c:tt)*]) => {
            #[doc = concat!("As [`ferrogin_device::Context::", stringify!($method), "`].")]
            pub fn $method(&self, $($all)*) -> Result<u64, Status> {
                unsafe extern "C" {
                    safe fn $fgin(ctx: Ctx, $($types)* out: &mut u64) -> c_int;
                }
                self.alone(|context| context.$method($($rust)*), |ctx, count| $fgin(ctx, $($c)* count))
            }
        };
        // Called by the lanes of a warp, each with its own arguments.
        (
            @split lanes ($function:ident, $rust_arguments:ident, $fgin:ident, $gin:ident) ($($all:tt)*)
            [$($rust:tt)*] [$($types:tt)*] [$($c:tt)*]
        ) => {
            #[doc = concat!("As `post_by_lanes` of [`Arguments::", stringify!($rust_arguments), "`].")]
            #[inline(never)]
            pub fn $function(context: &Context<'_>, $($all)*) -> Result<(), Status> {
                unsafe extern "C" {
                    safe fn $fgin(ctx: Ctx, lanes: u32, $($types)*) -> c_int;
                    safe fn $gin(ctx: Ctx, lanes: u32, $($types)*) -> c_int;
                }
                let (lanes, ctx) = (context.lanes(), context.ctx());
                checked(match context.api {
                    Api::Rust => return context.raw.post_by_lanes(lanes, Arguments::$rust_arguments($($rust)*)),
                    Api::C => $fgin(ctx, lanes.0, $($c)*),
                    Api::Cuda => $gin(ctx, lanes.0, $($c)*),
                })
            }
        };
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

        operation!(
            lead (put, fgin_put, gin_put)(
                peer: u32, dst: Span, src: Span, bytes: u64, action: Action, flags: Flags
            )
        );
        operation!(
            lead (put_value, fgin_put_value, gin_put_value)(
                peer: u32, dst: Span, value: u64, bytes: u32, action: Action, flags: Flags
            )
        );
        operation!(lead (get, fgin_get, gin_get)(peer: u32, remote: Span, local: Span, bytes: u64, flags: Flags));
        operation!(lead (signal, fgin_signal, gin_signal)(peer: u32, action: Action, flags: Flags));
        operation!(
            lead (put_signal_at, fgin_put_signal_at, gin_put_signal_at)(
                peer: u32, dst: Span, src: Span, bytes: u64, word: Span, amount: u64, counter: Action, flags: Flags
            )
        );
        // Through gin.cuh the value has 8 bytes.
        operation!(
            lead (put_value_signal_at, fgin_put_value_signal_at, gin_put_value_signal_at)(
                peer: u32, dst: Span, value: u64, bytes: u32, word: Span, amount: u64, flags: Flags
            )
        );
        operation!(lead (signal_at, fgin_signal_at, gin_signal_at)(peer: u32, word: Span, amount: u64, flags: Flags));
        operation!(lead (wait_flush, fgin_wait_request, gin_wait_request)(request: &FlushRequest));
        operation!(lead (wait_signal, fgin_wait_signal, gin_wait_signal)(id: u32, least: u64));
        operation!(lead (wait_counter, fgin_wait_counter, gin_wait_counter)(id: u32, least: u64));
        operation!(read (read_signal, fgin_read_signal)(id: u32));
        operation!(read (read_counter, fgin_read_counter)(id: u32));
        operation!(reset (reset_signal, fgin_reset_signal)(id: u32));
        operation!(reset (reset_counter, fgin_reset_counter)(id: u32));

        /// As [`ferrogin_device::Context::emulates_signals`].
        pub fn emulates_signals(&self) -> bool {
            self.raw.emulates_signals()
        }

        /// The lanes of this warp that run programs and call the `*_by_lanes` functions together; only this lane if its
        /// program is a group's.
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

        /// Waits a moment in a polling loop.
        pub fn relax(&self, _round: u32) {
            platform::relax(0, || false);
        }
    }

    operation!(
        lanes (put_by_lanes, put, fgin_warp_put, gin_warp_put)(
            peer: u32, dst: Span, src: Span, bytes: u64, action: Action, flags: Flags
        )
    );
    operation!(
        lanes (put_value_by_lanes, value, fgin_warp_put_value, gin_warp_put_value)(
            peer: u32, dst: Span, value: u64, bytes: u32, action: Action, flags: Flags
        )
    );
    operation!(
        lanes (signal_by_lanes, signal, fgin_warp_signal, gin_warp_signal)(
            peer: u32, action: Action, flags: Flags
        )
    );
}
