//! The C ABI, declared in `ferrogin/gin.h`: `fgin_*`. Every function returns 0 or a [`Status`] as a number.

use crate::action::{Action, Flags};
use crate::context::{Context, FlushRequest, Window};
use crate::post::Gpu;
use crate::status::Status;
use core::ffi::{c_int, c_void};
use ferrogin_ffi::ext::ContextExt;
#[cfg(not(target_arch = "nvptx64"))]
use ferrogin_ffi::ext::{VALUE_INLINE, VALUE_POOL};

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

/// On a CPU the posting functions pass rare cases on by a tail call, to a function of the same signature, so that the rare case
/// costs the usual one nothing. A GPU has no tail calls, and gets one function.
const HAS_TAIL_CALLS: bool = !cfg!(target_arch = "nvptx64");

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
    let context = context!(ctx);
    let raw = Flags::raw(flags);
    if !raw.is_default_without_action(Action::from_bits(action)) {
        return put_any(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags);
    }
    let action = if HAS_TAIL_CALLS { Action::NONE } else { Action::from_bits(action) };
    code(context.put_as::<Gpu>(peer, Window(dst).at(dst_off), Window(src).at(src_off), bytes, action, raw))
}

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
    let context = context!(ctx);
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let put = PUT_VALUE_BY_PATH[context.plain_value_path() as usize % PUT_VALUE_BY_PATH.len()];
        put(ctx, peer, dst, dst_off, value, bytes, action, flags)
    }
    #[cfg(target_arch = "nvptx64")]
    {
        let (raw, action) = (Flags::raw(flags), Action::from_bits(action));
        if raw.has_sharing_mode() {
            return put_value_any(ctx, peer, dst, dst_off, value, bytes, action.bits(), flags);
        }
        code(context.put_value_as::<Gpu>(None, peer, Window(dst).at(dst_off), (value, bytes), action, raw))
    }
}

/// The functions by `VALUE_*`; their number is a power of two.
#[cfg(not(target_arch = "nvptx64"))]
static PUT_VALUE_BY_PATH: [PutValue; 4] = {
    let mut by_path: [PutValue; 4] = [put_value_any; 4];
    by_path[VALUE_POOL as usize] = put_value_pooled;
    by_path[VALUE_INLINE as usize] = put_value_inline;
    by_path
};
#[cfg(not(target_arch = "nvptx64"))]
type PutValue = extern "C" fn(*const ContextExt, u32, *mut c_void, u64, u64, u32, u64, u32) -> c_int;

macro_rules! put_value_by {
    ($name:ident, $path:expr) => {
        /// A value without an action, in GPU mode, on this path.
        #[cfg(not(target_arch = "nvptx64"))]
        extern "C" fn $name(
            ctx: *const ContextExt,
            peer: u32,
            dst: *mut c_void,
            dst_off: u64,
            value: u64,
            bytes: u32,
            action: u64,
            flags: u32,
        ) -> c_int {
            // SAFETY: `fgin_put_value`, the only caller, has checked that it is not null; its caller vouches for the rest.
            let context = unsafe { Context::from_ptr(ctx) };
            let raw = Flags::raw(flags);
            if !raw.is_default_without_action(Action::from_bits(action)) {
                return put_value_any(ctx, peer, dst, dst_off, value, bytes, action, flags);
            }
            code(context.put_value_as::<Gpu>(
                Some($path),
                peer,
                Window(dst).at(dst_off),
                (value, bytes),
                Action::NONE,
                raw,
            ))
        }
    };
}

put_value_by!(put_value_inline, VALUE_INLINE);
put_value_by!(put_value_pooled, VALUE_POOL);

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
