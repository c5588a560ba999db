//! The C ABI, declared in `ferrogin/gin.h`: `fgin_*`. Every function returns 0 or a [`Status`] as a number.

use crate::action::{Action, Flags};
#[cfg(target_arch = "nvptx64")]
use crate::context::warp;
use crate::context::{Context, FlushRequest, Window};
#[cfg(target_arch = "nvptx64")]
use crate::lanes::Lanes;
#[cfg(not(target_arch = "nvptx64"))]
use crate::platform::in_one_register;
#[cfg(not(target_arch = "nvptx64"))]
use crate::post::Sharing;
use crate::status::{Status, code};
use core::ffi::{c_int, c_void};
use ferrogin_ffi::ext::ContextExt;

macro_rules! context {
    ($ctx:ident) => {{
        if $ctx.is_null() {
            return Status::InvalidArgument as c_int;
        }
        // SAFETY: not null; the caller passes a context that `fgin_open` gave, and keeps it alive.
        unsafe { Context::from_ptr($ctx) }
    }};
}

macro_rules! read_into {
    ($out:ident, $result:expr) => {
        match $result {
            Ok(_) if $out.is_null() => Status::InvalidArgument as c_int,
            Ok(value) => {
                // SAFETY: not null; the caller of the C function vouches for room for 8 bytes.
                unsafe { $out.write(value) };
                0
            }
            Err(status) => status as c_int,
        }
    };
}

/// See `fgin_open` in `ferrogin/gin.h`.
///
/// # Safety
///
/// `handle` is null or a live handle of the ferrogin plugin; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_open(handle: *mut c_void, context_id: u32, out: *mut *const ContextExt) -> c_int {
    if out.is_null() {
        return Status::InvalidArgument as c_int;
    }
    // SAFETY: the caller vouches that the handle is null or a live one of the ferrogin plugin.
    match unsafe { Context::from_handle(handle, context_id) } {
        Ok(context) => {
            // SAFETY: not null; the caller vouches for room for the value.
            unsafe { out.write(context.as_ptr()) };
            0
        }
        Err(status) => status as c_int,
    }
}

/// Action and flags of an operation, known when it is compiled or not.
trait Form {
    fn of(action: u64, flags: u32) -> (Action, Flags);
}

macro_rules! forms {
    ($($(#[$doc:meta])* $form:ident = |$action:ident, $flags:ident| $of:expr;)*) => {
        $($(#[$doc])*
        struct $form;
        impl Form for $form {
            #[inline(always)]
            fn of($action: u64, $flags: u32) -> (Action, Flags) {
                $of
            }
        })*
    };
}

forms! {
    Any = |action, flags| (Action::from_bits(action), Flags::from_bits(flags));
    /// In GPU mode, without a strong signal.
    GpuMode = |action, flags| (Action::from_bits(action), Flags::from_bits(flags & Flags::AGGREGATE.bits()));
}
#[cfg(not(target_arch = "nvptx64"))]
forms! {
    /// In the exclusive mode, without a strong signal.
    ThreadMode = |action, flags| (Action::from_bits(action), Flags::from_bits(flags & Flags::AGGREGATE.bits() | ALONE.bits()));
    /// With the doorbell, GPU mode, no action.
    Plain = |_action, _flags| (Action::NONE, Flags::NONE);
    /// With a signal that is raised by one.
    Signal = |action, _flags| (Action::one_signal(action), Flags::NONE);
    /// In the exclusive mode, no action.
    Alone = |_action, _flags| (Action::NONE, ALONE);
    /// In the exclusive mode, with a signal that is raised by one.
    AloneSignal = |action, _flags| (Action::one_signal(action), ALONE);
}
#[cfg(not(target_arch = "nvptx64"))]
const ALONE: Flags = Flags::sharing(Sharing::Thread);

/// An operation's body: inlined, and as a function to call.
macro_rules! operation {
    ($function:ident as $ty:ident, $inlined:ident<$form:ident>($($arg:ident: $of:ty),* $(,)?) $body:block) => {
        #[cfg(not(target_arch = "nvptx64"))]
        type $ty = extern "C" fn($($of),*) -> c_int;

        #[inline(never)]
        extern "C" fn $function<$form: Form>($($arg: $of),*) -> c_int {
            $inlined::<$form>($($arg),*)
        }

        #[inline(always)]
        #[allow(clippy::too_many_arguments)]
        fn $inlined<$form: Form>($($arg: $of),*) -> c_int $body
    };
}

/// A call in tail position. A CPU makes it by the function's address: the compiler would change the parameters of a function that it
/// knows, and then need instructions to pass them on.
macro_rules! call {
    ($function:expr, $ty:ident, $($arg:expr),*) => {{
        #[cfg(target_arch = "nvptx64")]
        let function = $function;
        #[cfg(not(target_arch = "nvptx64"))]
        let function = {
            let address = in_one_register(($function as *const ()).cast_mut());
            // SAFETY: the address of a function of that type.
            unsafe { core::mem::transmute::<*mut (), $ty>(address) }
        };
        function($($arg),*)
    }};
}

/// A call of the function for an operation's form. A GPU has one for GPU mode, in which the flags cost less than a call, and one for all modes.
#[cfg(target_arch = "nvptx64")]
macro_rules! in_form {
    ($function:ident as $ty:ident, $inlined:ident, $action:ident, $flags:ident; $($arg:expr),*) => {
        if $flags & Flags::SPECIAL != 0 { $function::<Any>($($arg),*) } else { $inlined::<GpuMode>($($arg),*) }
    };
}

/// A call of the function for an operation's form. Plain posts are compared first.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! in_form {
    ($function:ident as $ty:ident, $inlined:ident, $action:ident, $flags:ident; $($arg:expr),*) => {{
        const ALONE_DEFERRED: u32 = ALONE.aggregated().bits();
        let function: $ty = if $flags & Flags::ALL & !Flags::CTA == 0 {
            // A CPU has no narrower scope than GPU mode.
            in_form!(@by_action $function, $action, Plain, Signal, GpuMode)
        } else if $flags == ALONE.bits() {
            in_form!(@by_action $function, $action, Alone, AloneSignal, ThreadMode)
        } else if $flags & Flags::SPECIAL == 0 {
            $function::<GpuMode>
        } else if $flags == ALONE_DEFERRED {
            $function::<ThreadMode>
        } else {
            $function::<Any>
        };
        call!(function, $ty, $($arg),*)
    }};
    (@by_action $function:ident, $action:ident, $none:ident, $signal:ident, $other:ident) => {
        if $action == 0 {
            $function::<$none>
        } else if Action::from_bits($action).is_one_signal() {
            $function::<$signal>
        } else {
            $function::<$other>
        }
    };
}

/// See `fgin_put` in `ferrogin/gin.h`.
///
/// # Safety
///
/// `ctx` came from `fgin_open` and lives; windows are registered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_put(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    action: u64,
    flags: u32,
) -> c_int {
    in_form!(put as PutFunction, put_inlined, action, flags; ctx, peer, dst, dst_off, src, src_off, bytes, action, flags)
}

operation! {
    put as PutFunction, put_inlined<F>(
        ctx: *const ContextExt,
        peer: u32,
        dst: *mut c_void,
        dst_off: u64,
        src: *mut c_void,
        src_off: u64,
        bytes: u64,
        action: u64,
        flags: u32,
    ) {
        let (known_action, known_flags) = F::of(action, flags);
        match context!(ctx).put_fast(
            peer,
            Window(dst).at(dst_off),
            Window(src).at(src_off),
            bytes,
            known_action,
            known_flags,
        ) {
            Some(code) => code.0,
            None => {
                #[cfg(not(target_arch = "nvptx64"))]
                let put_slow = put_with_imm::<F>;
                call!(put_slow, PutFunction, ctx, peer, dst, dst_off, src, src_off, bytes, action, flags)
            }
        }
    }
}

/// With an emulated signal in its immediate, or by the slow path.
#[cfg(not(target_arch = "nvptx64"))]
#[cold]
#[inline(never)]
extern "C" fn put_with_imm<F: Form>(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    action: u64,
    flags: u32,
) -> c_int {
    let (to, from, (known_action, known_flags)) =
        (Window(dst).at(dst_off), Window(src).at(src_off), F::of(action, flags));
    match context!(ctx).put_with_imm(peer, to, from, bytes, known_action, known_flags) {
        Some(code) => code.0,
        None => call!(put_slow, PutFunction, ctx, peer, dst, dst_off, src, src_off, bytes, action, flags),
    }
}

/// By the slow path.
#[cold]
#[inline(never)]
extern "C" fn put_slow(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    action: u64,
    flags: u32,
) -> c_int {
    let (dst, src) = (Window(dst).at(dst_off), Window(src).at(src_off));
    let (action, flags) = (Action::from_bits(action), Flags::from_bits(flags));
    // On a CPU `put_with_imm` comes before.
    #[cfg(not(target_arch = "nvptx64"))]
    let result = context!(ctx).put_slower(peer, dst, src, bytes, action, flags);
    #[cfg(target_arch = "nvptx64")]
    let result = context!(ctx).put_slow(peer, dst, src, bytes, action, flags);
    code(result)
}

/// See `fgin_put_value` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_put_value(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    action: u64,
    flags: u32,
) -> c_int {
    in_form!(put_value as PutValueFunction, put_value_inlined, action, flags; ctx, peer, dst, dst_off, value, bytes, action, flags)
}

operation! {
    put_value as PutValueFunction, put_value_inlined<F>(
        ctx: *const ContextExt,
        peer: u32,
        dst: *mut c_void,
        dst_off: u64,
        value: u64,
        bytes: u32,
        action: u64,
        flags: u32,
    ) {
        let (known_action, known_flags) = F::of(action, flags);
        match context!(ctx).put_value_fast(peer, Window(dst).at(dst_off), value, bytes, known_action, known_flags) {
            Some(code) => code.0,
            None => {
                #[cfg(not(target_arch = "nvptx64"))]
                let put_value_slow = put_value_with_imm::<F>;
                call!(put_value_slow, PutValueFunction, ctx, peer, dst, dst_off, value, bytes, action, flags)
            }
        }
    }
}

/// With an emulated signal in its immediate, or by the slow path.
#[cfg(not(target_arch = "nvptx64"))]
#[cold]
#[inline(never)]
extern "C" fn put_value_with_imm<F: Form>(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    action: u64,
    flags: u32,
) -> c_int {
    let (known_action, known_flags) = F::of(action, flags);
    let to = Window(dst).at(dst_off);
    match context!(ctx).put_value_with_imm(peer, to, value, bytes, known_action, known_flags) {
        Some(code) => code.0,
        None => call!(put_value_slow, PutValueFunction, ctx, peer, dst, dst_off, value, bytes, action, flags),
    }
}

/// By the slow path.
#[cold]
#[inline(never)]
extern "C" fn put_value_slow(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    action: u64,
    flags: u32,
) -> c_int {
    let (to, action, flags) = (Window(dst).at(dst_off), Action::from_bits(action), Flags::from_bits(flags));
    // On a CPU `put_value_with_imm` comes before.
    #[cfg(not(target_arch = "nvptx64"))]
    let result = context!(ctx).put_value_slower(peer, to, value, bytes, action, flags);
    #[cfg(target_arch = "nvptx64")]
    let result = context!(ctx).put_value_slow(peer, to, value, bytes, action, flags);
    code(result)
}

/// See `fgin_get` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_get(
    ctx: *const ContextExt,
    peer: u32,
    remote: *mut c_void,
    remote_off: u64,
    local: *mut c_void,
    local_off: u64,
    bytes: u64,
    flags: u32,
) -> c_int {
    const ACTION: u64 = 0;
    in_form!(get as GetFunction, get_inlined, ACTION, flags; ctx, peer, remote, remote_off, local, local_off, bytes, flags)
}

operation! {
    get as GetFunction, get_inlined<F>(
        ctx: *const ContextExt,
        peer: u32,
        remote: *mut c_void,
        remote_off: u64,
        local: *mut c_void,
        local_off: u64,
        bytes: u64,
        flags: u32,
    ) {
        let (_, flags) = F::of(0, flags);
        let (context, remote, local) = (context!(ctx), Window(remote).at(remote_off), Window(local).at(local_off));
        match context.get_fast(peer, remote, local, bytes, flags) {
            Some(code) => code.0,
            None => code(context.get_slow(peer, remote, local, bytes, flags)),
        }
    }
}

/// See `fgin_signal` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_signal(ctx: *const ContextExt, peer: u32, action: u64, flags: u32) -> c_int {
    in_form!(signal as SignalFunction, signal_inlined, action, flags; ctx, peer, action, flags)
}

operation! {
    signal as SignalFunction, signal_inlined<F>(ctx: *const ContextExt, peer: u32, action: u64, flags: u32) {
        let (action, flags) = F::of(action, flags);
        let context = context!(ctx);
        match context.signal_fast(peer, action, flags) {
            Some(code) => code.0,
            None => code(context.signal_slow(peer, action, flags)),
        }
    }
}

/// See `fgin_put_signal_at` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_put_signal_at(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    word: *mut c_void,
    word_off: u64,
    amount: u64,
    counter: u64,
    flags: u32,
) -> c_int {
    let (dst, src, word) = (Window(dst).at(dst_off), Window(src).at(src_off), Window(word).at(word_off));
    let (counter, flags) = (Action::from_bits(counter), Flags::from_bits(flags));
    code(context!(ctx).put_signal_at(peer, dst, src, bytes, word, amount, counter, flags))
}

/// See `fgin_put_value_signal_at` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_put_value_signal_at(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    word: *mut c_void,
    word_off: u64,
    amount: u64,
    flags: u32,
) -> c_int {
    let (dst, word) = (Window(dst).at(dst_off), Window(word).at(word_off));
    code(context!(ctx).put_value_signal_at(peer, dst, value, bytes, word, amount, Flags::from_bits(flags)))
}

/// See `fgin_signal_at` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_signal_at(
    ctx: *const ContextExt,
    peer: u32,
    word: *mut c_void,
    word_off: u64,
    amount: u64,
    flags: u32,
) -> c_int {
    code(context!(ctx).signal_at(peer, Window(word).at(word_off), amount, Flags::from_bits(flags)))
}

/// `fgin_warp_*`: on a CPU a warp has one thread, which makes the call alone.
macro_rules! by_lanes {
    ($ctx:ident, $lanes:ident, $operation:ident($($arg:expr),*)) => {{
        #[cfg(target_arch = "nvptx64")]
        {
            // SAFETY: the caller passes null, or a context that `fgin_open` gave and that it keeps alive.
            let context = (!$ctx.is_null()).then(|| unsafe { Context::from_ptr($ctx) });
            code(warp::$operation(context, Lanes($lanes), $($arg),*))
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            let _ = $lanes;
            code(context!($ctx).$operation($($arg),*))
        }
    }};
}

/// See `fgin_warp_put` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_warp_put(
    ctx: *const ContextExt,
    lanes: u32,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    action: u64,
    flags: u32,
) -> c_int {
    let (dst, src) = (Window(dst).at(dst_off), Window(src).at(src_off));
    let (action, flags) = (Action::from_bits(action), Flags::from_bits(flags));
    by_lanes!(ctx, lanes, put(peer, dst, src, bytes, action, flags))
}

/// See `fgin_warp_put_value` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_warp_put_value(
    ctx: *const ContextExt,
    lanes: u32,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    action: u64,
    flags: u32,
) -> c_int {
    let dst = Window(dst).at(dst_off);
    let (action, flags) = (Action::from_bits(action), Flags::from_bits(flags));
    by_lanes!(ctx, lanes, put_value(peer, dst, value, bytes, action, flags))
}

/// See `fgin_warp_signal` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_warp_signal(
    ctx: *const ContextExt,
    lanes: u32,
    peer: u32,
    action: u64,
    flags: u32,
) -> c_int {
    let (action, flags) = (Action::from_bits(action), Flags::from_bits(flags));
    by_lanes!(ctx, lanes, signal(peer, action, flags))
}

/// See `fgin_ring` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_ring(ctx: *const ContextExt) -> c_int {
    code(context!(ctx).ring())
}

/// See `fgin_ring_waiting` in `ferrogin/nccl_gin_backend.cuh`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_ring_waiting(ctx: *const ContextExt) -> c_int {
    let context = context!(ctx);
    if context.take_waiting() { code(context.ring()) } else { 0 }
}

/// See `fgin_flush` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_flush(ctx: *const ContextExt) -> c_int {
    code(context!(ctx).flush())
}

/// See `fgin_flush_part` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_flush_part(ctx: *const ContextExt, rank: u32, size: u32) -> c_int {
    code(context!(ctx).flush_part(rank, size))
}

/// See `fgin_flush_async` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`]; `out` is null or has room for a request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_flush_async(ctx: *const ContextExt, out: *mut FlushRequest) -> c_int {
    if out.is_null() {
        return Status::InvalidArgument as c_int;
    }
    match context!(ctx).flush_async() {
        Ok(request) => {
            // SAFETY: not null; the caller vouches for room for the value.
            unsafe { out.write(request) };
            0
        }
        Err(status) => status as c_int,
    }
}

/// See `fgin_wait_request` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`]; `request` is null or points to a request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_wait_request(ctx: *const ContextExt, request: *const FlushRequest) -> c_int {
    if request.is_null() {
        return Status::InvalidArgument as c_int;
    }
    // SAFETY: not null; any bits are a request, and its numbers are checked.
    code(context!(ctx).wait_flush(unsafe { &*request }))
}

/// See `fgin_test_request` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_wait_request`]; `done` is null or has room for an `int`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_test_request(
    ctx: *const ContextExt,
    request: *const FlushRequest,
    done: *mut c_int,
) -> c_int {
    if request.is_null() || done.is_null() {
        return Status::InvalidArgument as c_int;
    }
    // SAFETY: not null; any bits are a request, and its numbers are checked.
    match context!(ctx).test_flush(unsafe { &*request }) {
        Ok(is_done) => {
            // SAFETY: not null; the caller vouches for room for the value.
            unsafe { done.write(is_done.into()) };
            0
        }
        Err(status) => status as c_int,
    }
}

/// See `fgin_set_timeout` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_set_timeout(ctx: *const ContextExt, ns: u64) -> c_int {
    context!(ctx).set_timeout_ns(ns);
    0
}

/// See `fgin_read_signal` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`]; `out` is null or has room for 8 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_read_signal(ctx: *const ContextExt, id: u32, out: *mut u64) -> c_int {
    read_into!(out, context!(ctx).read_signal(id))
}

/// See `fgin_wait_signal` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_wait_signal(ctx: *const ContextExt, id: u32, least: u64) -> c_int {
    code(context!(ctx).wait_signal(id, least))
}

/// See `fgin_reset_signal` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_reset_signal(ctx: *const ContextExt, id: u32) -> c_int {
    code(context!(ctx).reset_signal(id))
}

/// See `fgin_read_counter` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_read_signal`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_read_counter(ctx: *const ContextExt, id: u32, out: *mut u64) -> c_int {
    read_into!(out, context!(ctx).read_counter(id))
}

/// See `fgin_wait_counter` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_wait_counter(ctx: *const ContextExt, id: u32, least: u64) -> c_int {
    code(context!(ctx).wait_counter(id, least))
}

/// See `fgin_reset_counter` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_reset_counter(ctx: *const ContextExt, id: u32) -> c_int {
    code(context!(ctx).reset_counter(id))
}
