//! The C ABI, declared in `ferrogin/gin.h`: `fgin_*`. Every function returns 0 or a [`Status`] as a number.

use crate::action::{Action, Flags};
#[cfg(target_arch = "nvptx64")]
use crate::context::warp;
use crate::context::{Context, FlushRequest, Window};
#[cfg(target_arch = "nvptx64")]
use crate::lanes::Lanes;
use crate::post::Gpu;
use crate::status::Status;
use core::ffi::{c_int, c_void};
use ferrogin_ffi::ext::ContextExt;

fn code(result: Result<(), Status>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(status) => status as c_int,
    }
}

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

#[cfg(not(target_arch = "nvptx64"))]
use cpu as forms;
#[cfg(target_arch = "nvptx64")]
use gpu as forms;

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
    if ctx.is_null() {
        return Status::InvalidArgument as c_int;
    }
    forms::put(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags)
}

/// In any mode, with any action.
#[inline(never)]
extern "C" fn put_any(
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
    let (action, flags) = (Action::from_bits(action), Flags::from_bits(flags));
    code(context!(ctx).put(peer, Window(dst).at(dst_off), Window(src).at(src_off), bytes, action, flags))
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
    if ctx.is_null() {
        return Status::InvalidArgument as c_int;
    }
    forms::put_value(ctx, peer, dst, dst_off, value, bytes, action, flags)
}

#[inline(never)]
extern "C" fn put_value_any(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    action: u64,
    flags: u32,
) -> c_int {
    let (action, flags) = (Action::from_bits(action), Flags::from_bits(flags));
    code(context!(ctx).put_value(peer, Window(dst).at(dst_off), value, bytes, action, flags))
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
    let context = context!(ctx);
    let raw = Flags::raw(flags);
    if raw.has_sharing_mode() {
        return get_any(ctx, peer, remote, remote_off, local, local_off, bytes, flags);
    }
    code(context.get_as::<Gpu>(peer, Window(remote).at(remote_off), Window(local).at(local_off), bytes, raw))
}

#[inline(never)]
extern "C" fn get_any(
    ctx: *const ContextExt,
    peer: u32,
    remote: *mut c_void,
    remote_off: u64,
    local: *mut c_void,
    local_off: u64,
    bytes: u64,
    flags: u32,
) -> c_int {
    let flags = Flags::from_bits(flags);
    code(context!(ctx).get(peer, Window(remote).at(remote_off), Window(local).at(local_off), bytes, flags))
}

/// See `fgin_signal` in `ferrogin/gin.h`.
///
/// # Safety
///
/// As for [`fgin_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_signal(ctx: *const ContextExt, peer: u32, action: u64, flags: u32) -> c_int {
    let context = context!(ctx);
    let (action, raw) = (Action::from_bits(action), Flags::raw(flags));
    if raw.has_sharing_mode() {
        return signal_any(ctx, peer, action.bits(), flags);
    }
    code(context.signal_as::<Gpu>(peer, action, raw))
}

#[inline(never)]
extern "C" fn signal_any(ctx: *const ContextExt, peer: u32, action: u64, flags: u32) -> c_int {
    code(context!(ctx).signal(peer, Action::from_bits(action), Flags::from_bits(flags)))
}

/// The forms of an operation on a GPU: one for GPU mode, and one for all modes.
#[cfg(target_arch = "nvptx64")]
mod gpu {
    use super::*;

    #[inline(always)]
    pub(super) fn put(
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
        let (context, raw, action) = (context!(ctx), Flags::raw(flags), Action::from_bits(action));
        if raw.has_sharing_mode() {
            return put_any(ctx, peer, dst, dst_off, src, src_off, bytes, action.bits(), flags);
        }
        code(context.put_as::<Gpu>(peer, Window(dst).at(dst_off), Window(src).at(src_off), bytes, action, raw))
    }

    #[inline(always)]
    pub(super) fn put_value(
        ctx: *const ContextExt,
        peer: u32,
        dst: *mut c_void,
        dst_off: u64,
        value: u64,
        bytes: u32,
        action: u64,
        flags: u32,
    ) -> c_int {
        let (context, raw, action) = (context!(ctx), Flags::raw(flags), Action::from_bits(action));
        if raw.has_sharing_mode() {
            return put_value_any(ctx, peer, dst, dst_off, value, bytes, action.bits(), flags);
        }
        code(context.put_value_as::<Gpu>(peer, Window(dst).at(dst_off), (value, bytes), action, raw))
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod cpu;

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
