//! The C ABI, declared in `ferrogin/gin.h`: `fgin_*`. Every function returns 0 or a [`Status`] as a number.

use crate::action::{Action, Flags};
use crate::context::failure::{self, About};
use crate::context::warp::post_in_groups;
use crate::context::{Arguments, Context, FlushRequest, Window};
use crate::lanes::Lanes;
use crate::status::{Status, code};
#[cfg(feature = "host")]
use crate::{explain, process};
use core::ffi::{c_int, c_void};
use ferrogin_ffi::ext::ContextExt;
#[cfg(feature = "host")]
use ferrogin_ffi::ext::HandleHeader;
use ferrogin_ffi::failure::function_number;

/// See `fgin_open` in `ferrogin/gin.h`.
///
/// # Safety
///
/// `handle` is null or a live handle of the ferrogin plugin; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_open(handle: *mut c_void, context_id: u32, out: *mut *const ContextExt) -> c_int {
    // SAFETY: the caller vouches that the handle is null or a live one of the ferrogin plugin.
    let context = unsafe { Context::from_handle(handle, context_id) };
    #[cfg(feature = "host")]
    if let Err(status) = context {
        let header = handle.wrapping_byte_sub(size_of::<HandleHeader>()).cast::<HandleHeader>();
        // SAFETY: the caller vouches that the header of a non-null handle is readable.
        let header = (!handle.is_null()).then(|| unsafe { header.read_unaligned() });
        explain::keep_open(header, context_id, status);
    }
    // SAFETY: the caller vouches for `out`.
    code(unsafe { give(context.map(|context| context.as_ptr()), out) })
}

/// See `fgin_status_name` in `ferrogin/gin.h`.
#[cfg(feature = "host")]
#[unsafe(no_mangle)]
pub extern "C" fn fgin_status_name(status: c_int) -> *const core::ffi::c_char {
    explain::status_name(status).as_ptr()
}

/// Writes a successful result to `out`, or returns the error.
///
/// # Safety
///
/// `out` is null or has room for a `T`.
unsafe fn give<T>(result: Result<T, Status>, out: *mut T) -> Result<(), Status> {
    if out.is_null() {
        return Err(Status::InvalidArgument);
    }
    // SAFETY: not null; the caller vouches that there is room for the value.
    result.map(|value| unsafe { out.write(value) })
}

/// Reports a call without a context, and returns its status.
fn null_context() -> c_int {
    #[cfg(feature = "host")]
    explain::set("FGIN_INVALID_ARGUMENT: the context is NULL: check what fgin_open returned");
    Status::InvalidArgument as c_int
}

/// Returns the status of a call by a forked child on a context that its parent opened.
#[cfg(feature = "host")]
#[inline]
fn refusal() -> Option<c_int> {
    process::only_parent_opened().then(refuse_child)
}

#[cfg(feature = "host")]
#[cold]
fn refuse_child() -> c_int {
    explain::set(
        "FGIN_ABORTED: this process was made by fork(), and its parent opened the context: only the parent can use it; create the child \
         before the communicator, or start it with exec()",
    );
    Status::Aborted as c_int
}

/// Returns the number that a C function returns. A failure is kept for the host and, on a CPU, for `ferrogin_error`.
#[inline(always)]
fn code_of(context: Context<'_>, function: u8, about: About, result: Result<(), Status>) -> c_int {
    let Err(status) = result else { return 0 };
    failure::note(context, function, about, status);
    #[cfg(feature = "host")]
    explain::keep(context, function, about, status);
    status as c_int
}

/// Defines functions on a context: their arguments after it, what they're about, and what they do with it.
macro_rules! functions {
    ($($name:ident($($arg:ident: $ty:ty),* $(,)?) [$about:expr] |$context:ident| $result:expr;)*) => {
        $(
            #[doc = concat!("See `", stringify!($name), "` in `ferrogin/gin.h`.")]
            ///
            /// # Safety
            ///
            /// `ctx` is null, or came from `fgin_open` and is alive; windows are registered; `out` and `request` are
            /// null, or have room for what the header says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(ctx: *const ContextExt, $($arg: $ty),*) -> c_int {
                if ctx.is_null() {
                    return null_context();
                }
                #[cfg(feature = "host")]
                if let Some(status) = refusal() {
                    return status;
                }
                // SAFETY: not null; the caller passes a context that `fgin_open` returned, and keeps it alive.
                let $context = unsafe { Context::from_ptr(ctx) };
                code_of($context, const { function_number(stringify!($name)) }, $about, $result)
            }
        )*
    };
}

functions! {
    fgin_get(
        peer: u32, remote: *mut c_void, remote_off: u64, local: *mut c_void, local_off: u64, bytes: u64, flags: u32,
    ) [About::Post { peer, action: 0 }] |context| {
        let (remote, local) = (Window(remote).at(remote_off), Window(local).at(local_off));
        context.get(peer, remote, local, bytes, Flags::from_bits(flags))
    };

    fgin_put_signal_at(
        peer: u32, dst: *mut c_void, dst_off: u64, src: *mut c_void, src_off: u64, bytes: u64, word: *mut c_void,
        word_off: u64, amount: u64, counter: u64, flags: u32,
    ) [About::Post { peer, action: counter }] |context| {
        let (dst, src, word) = (Window(dst).at(dst_off), Window(src).at(src_off), Window(word).at(word_off));
        let (counter, flags) = (Action::from_bits(counter), Flags::from_bits(flags));
        context.put_signal_at(peer, dst, src, bytes, word, amount, counter, flags)
    };

    fgin_put_value_signal_at(
        peer: u32, dst: *mut c_void, dst_off: u64, value: u64, bytes: u32, word: *mut c_void, word_off: u64,
        amount: u64, flags: u32,
    ) [About::Value { peer, action: 0, bytes }] |context| {
        let (dst, word) = (Window(dst).at(dst_off), Window(word).at(word_off));
        context.put_value_signal_at(peer, dst, value, bytes, word, amount, Flags::from_bits(flags))
    };

    fgin_signal_at(
        peer: u32, word: *mut c_void, word_off: u64, amount: u64, flags: u32,
    ) [About::Post { peer, action: 0 }] |context|
        context.signal_at(peer, Window(word).at(word_off), amount, Flags::from_bits(flags));

    fgin_ring() [About::Context] |context| context.ring();

    fgin_ring_waiting() [About::Context] |context| if context.take_waiting() { context.ring() } else { Ok(()) };

    fgin_flush() [About::Context] |context| context.flush();

    fgin_settle() [About::Context] |context| context.settle();

    fgin_flush_part(rank: u32, size: u32) [About::Context] |context| context.flush_part(rank, size);

    fgin_flush_async(out: *mut FlushRequest) [About::Context] |context| {
        let request = if out.is_null() { Err(Status::InvalidArgument) } else { context.flush_async() };
        // SAFETY: the caller vouches for `out`.
        unsafe { give(request, out) }
    };

    fgin_wait_request(request: *const FlushRequest) [About::Context] |context| {
        // SAFETY: the caller vouches for the request; any bits are a valid one, and its numbers are checked where
        // they're used.
        unsafe { request.as_ref() }.ok_or(Status::InvalidArgument).and_then(|request| context.wait_flush(request))
    };

    fgin_test_request(request: *const FlushRequest, out: *mut c_int) [About::Context] |context| {
        // SAFETY: as above.
        let request = unsafe { request.as_ref() }.filter(|_| !out.is_null()).ok_or(Status::InvalidArgument);
        let is_done = request.and_then(|request| context.test_flush(request));
        // SAFETY: the caller vouches for `out`.
        unsafe { give(is_done.map(c_int::from), out) }
    };

    fgin_set_timeout(ns: u64) [About::Context] |context| {
        context.set_timeout_ns(ns);
        Ok(())
    };

    fgin_read_signal(id: u32, out: *mut u64) [About::Signal { id, least: 0 }] |context| {
        // SAFETY: the caller vouches for `out`.
        unsafe { give(context.read_signal(id), out) }
    };

    fgin_wait_signal(id: u32, least: u64) [About::Signal { id, least }] |context| context.wait_signal(id, least);

    fgin_reset_signal(id: u32) [About::Signal { id, least: 0 }] |context| context.reset_signal(id);

    fgin_read_counter(id: u32, out: *mut u64) [About::Counter { id, least: 0 }] |context| {
        // SAFETY: the caller vouches for `out`.
        unsafe { give(context.read_counter(id), out) }
    };

    fgin_wait_counter(id: u32, least: u64) [About::Counter { id, least }] |context| context.wait_counter(id, least);

    fgin_reset_counter(id: u32) [About::Counter { id, least: 0 }] |context| context.reset_counter(id);
}

/// Defines operations, each for one thread and for lanes of a warp.
macro_rules! operations {
    ($($name:ident, $by_lanes:ident($($arg:ident: $ty:ty),* $(,)?) [$about:expr] $arguments:expr;)*) => {
        functions! {$($name($($arg: $ty),*) [$about] |context| context.post_operation($arguments);)*}
        $(
            #[doc = concat!("See `", stringify!($by_lanes), "` in `ferrogin/gin.h`.")]
            ///
            /// # Safety
            ///
            /// As for [`fgin_put`].
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $by_lanes(ctx: *const ContextExt, lanes: u32, $($arg: $ty),*) -> c_int {
                // SAFETY: the caller passes null, or a context that `fgin_open` returned, and keeps it alive.
                let context = (!ctx.is_null()).then(|| unsafe { Context::from_ptr(ctx) });
                #[cfg(feature = "host")]
                if let Some(status) = context.and_then(|_| refusal()) {
                    return status;
                }
                let result = post_in_groups(context, Lanes(lanes), $arguments);
                let Some(context) = context else { return null_context() };
                code_of(context, const { function_number(stringify!($name)) }, $about, result)
            }
        )*
    };
}

operations! {
    fgin_put, fgin_warp_put(
        peer: u32, dst: *mut c_void, dst_off: u64, src: *mut c_void, src_off: u64, bytes: u64, action: u64, flags: u32,
    ) [About::Post { peer, action }] {
        let (dst, src) = (Window(dst).at(dst_off), Window(src).at(src_off));
        Arguments::put(peer, dst, src, bytes, Action::from_bits(action), Flags::from_bits(flags))
    };

    fgin_put_value, fgin_warp_put_value(
        peer: u32, dst: *mut c_void, dst_off: u64, value: u64, bytes: u32, action: u64, flags: u32,
    ) [About::Value { peer, action, bytes }] {
        let (action, flags) = (Action::from_bits(action), Flags::from_bits(flags));
        Arguments::value(peer, Window(dst).at(dst_off), value, bytes, action, flags)
    };

    fgin_signal, fgin_warp_signal(peer: u32, action: u64, flags: u32) [About::Post { peer, action }]
        Arguments::signal(peer, Action::from_bits(action), Flags::from_bits(flags));
}
