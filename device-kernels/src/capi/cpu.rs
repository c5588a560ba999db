//! The forms of the operations on a CPU: a function for each usual action and mode. A form passes rare cases on by a tail call, to a
//! function of the same signature, so that a rare case costs the usual one no instruction and no register. A GPU has no tail calls.

use super::{code, put_any, put_value_any};
use crate::action::{Action, Flags};
use crate::context::{Context, Rest, Window};
use crate::endpoint::Endpoint;
use crate::post::combining::{AfterMark, Next, finish as finish_post};
use crate::post::{Gpu, Share, Sharing, Thread};
use core::ffi::{c_int, c_void};
use ferrogin_ffi::ext::{ContextExt, EndpointExt, VALUE_INLINE, VALUE_POOL};

macro_rules! context {
    ($ctx:ident) => {
        // SAFETY: `fgin_*` have checked that it is not null; their callers vouch for the rest.
        unsafe { Context::from_ptr($ctx) }
    };
}

/// What is left after a mark in GPU mode, as a call in tail position.
#[inline(never)]
extern "C" fn finish(poster: *const EndpointExt, state: u64, next: u32) -> c_int {
    // SAFETY: the post gave its endpoint, which lives as long as the context.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    finish_post::<Gpu, _>(endpoint, AfterMark { next: Next::from_number(next), state });
    0
}

/// A put in one form: with an action of [`Action::of_form`] if there is one.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn put_form<S: Share, const SIGNAL: bool, const AGGREGATE: bool>(
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
    let named = if SIGNAL { Action::one_signal(action) } else { Action::NONE };
    let known = if AGGREGATE { Flags::AGGREGATE } else { Flags::NONE };
    let (to, from) = (Window(dst).at(dst_off), Window(src).at(src_off));
    match context!(ctx).post_put::<S, false>(peer, to, from, bytes, named, known) {
        Rest::Done => 0,
        Rest::Finish(endpoint, after) => finish(endpoint.as_ptr(), after.state, after.next as u32),
        Rest::Wait(reserved) if !S::EXCLUSIVE => {
            let flags = with_signal(known, named);
            put_waiting(ctx, peer, dst, dst_off, src, src_off, bytes, reserved, flags)
        }
        Rest::Wait(_) | Rest::Slow => put_any(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags),
    }
}

/// Flags with a signal in their upper half, which is of no use in GPU mode.
#[inline(always)]
fn with_signal(flags: Flags, action: Action) -> u32 {
    flags.bits() | action.signal_slot() << 16
}

#[inline(never)]
extern "C" fn put_waiting(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    reserved: u64,
    flags: u32,
) -> c_int {
    let (dst, src) = (Window(dst).at(dst_off), Window(src).at(src_off));
    let action = Action::one_signal(u64::from(flags >> 16));
    code(context!(ctx).put_waiting::<Gpu, false>(peer, dst, src, bytes, action, Flags::from_bits(flags), reserved))
}

macro_rules! put_forms {
    ($($name:ident: $mode:ty, $signal:expr, $aggregate:expr;)*) => {
        $(#[inline(never)]
        extern "C" fn $name(
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
            put_form::<$mode, $signal, $aggregate>(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags)
        })*
    };
}

put_forms! {
    put_plain: Gpu, false, false;
    put_aggregated: Gpu, false, true;
    put_signal: Gpu, true, false;
    put_thread: Thread, false, false;
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
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
    if Form::is_plain(action, flags) {
        return put_plain(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags);
    }
    put_other(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags)
}

#[inline(never)]
extern "C" fn put_other(
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
    match Form::of(action, flags) {
        Form::Thread => put_thread(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags),
        Form::Signal => put_signal(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags),
        Form::Aggregated => put_aggregated(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags),
        Form::Other => put_any(ctx, peer, dst, dst_off, src, src_off, bytes, action, flags),
    }
}

/// A value in one form.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn value_form<S: Share, const PATH: u32, const SIGNAL: bool>(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    action: u64,
    flags: u32,
) -> c_int {
    let named = if SIGNAL { Action::one_signal(action) } else { Action::NONE };
    let path = if SIGNAL { None } else { Some(PATH) };
    let to = Window(dst).at(dst_off);
    match context!(ctx).post_value::<S>(path, peer, to, (value, bytes), named, Flags::NONE) {
        Rest::Done => 0,
        Rest::Finish(endpoint, after) => finish(endpoint.as_ptr(), after.state, after.next as u32),
        Rest::Wait(reserved) if !S::EXCLUSIVE => {
            value_waiting(ctx, peer, dst, dst_off, value, bytes, reserved, with_signal(Flags::NONE, named))
        }
        Rest::Wait(_) | Rest::Slow => put_value_any(ctx, peer, dst, dst_off, value, bytes, action, flags),
    }
}

#[inline(never)]
extern "C" fn value_waiting(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    reserved: u64,
    flags: u32,
) -> c_int {
    let action = Action::one_signal(u64::from(flags >> 16));
    let flags = Flags::from_bits(flags);
    code(context!(ctx).put_value_waiting::<Gpu>(peer, Window(dst).at(dst_off), value, bytes, action, flags, reserved))
}

macro_rules! value_forms {
    ($($name:ident: $mode:ty, $path:expr, $signal:expr;)*) => {
        $(#[inline(never)]
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
            value_form::<$mode, { $path }, $signal>(ctx, peer, dst, dst_off, value, bytes, action, flags)
        })*
    };
}

value_forms! {
    value_plain_inline: Gpu, VALUE_INLINE, false;
    value_plain_pooled: Gpu, VALUE_POOL, false;
    value_signal: Gpu, VALUE_POOL, true;
    value_thread_inline: Thread, VALUE_INLINE, false;
    value_thread_pooled: Thread, VALUE_POOL, false;
}

type PutValue = extern "C" fn(*const ContextExt, u32, *mut c_void, u64, u64, u32, u64, u32) -> c_int;

/// A function for each `VALUE_*`; their number is a power of two.
const fn by_path(inline: PutValue, pooled: PutValue) -> [PutValue; 4] {
    let mut by_path: [PutValue; 4] = [put_value_any; 4];
    by_path[VALUE_POOL as usize] = pooled;
    by_path[VALUE_INLINE as usize] = inline;
    by_path
}
static PLAIN: [PutValue; 4] = by_path(value_plain_inline, value_plain_pooled);
static THREAD: [PutValue; 4] = by_path(value_thread_inline, value_thread_pooled);

#[inline(always)]
#[allow(clippy::too_many_arguments)]
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
    if Form::is_plain(action, flags) {
        let form = PLAIN[context!(ctx).plain_value_path() as usize % PLAIN.len()];
        return form(ctx, peer, dst, dst_off, value, bytes, action, flags);
    }
    value_other(ctx, peer, dst, dst_off, value, bytes, action, flags)
}

#[inline(never)]
extern "C" fn value_other(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    action: u64,
    flags: u32,
) -> c_int {
    match Form::of(action, flags) {
        Form::Thread => {
            let form = THREAD[context!(ctx).plain_value_path() as usize % THREAD.len()];
            form(ctx, peer, dst, dst_off, value, bytes, action, flags)
        }
        Form::Signal => value_signal(ctx, peer, dst, dst_off, value, bytes, action, flags),
        Form::Aggregated | Form::Other => put_value_any(ctx, peer, dst, dst_off, value, bytes, action, flags),
    }
}

/// The flags and the action of an operation that is not plain.
enum Form {
    /// The exclusive mode, no action.
    Thread,
    /// GPU mode, a signal that is raised by one.
    Signal,
    /// GPU mode, no action, without the doorbell.
    Aggregated,
    /// Any other.
    Other,
}

impl Form {
    /// GPU mode, no action, with the doorbell.
    #[inline(always)]
    fn is_plain(action: u64, flags: u32) -> bool {
        u64::from(flags & Flags::ALL) | action == 0
    }

    #[inline(always)]
    fn of(action: u64, flags: u32) -> Form {
        const THREAD: u32 = Flags::sharing(Sharing::Thread).bits();
        const AGGREGATE: u32 = Flags::AGGREGATE.bits();
        match (flags & Flags::ALL, action) {
            (THREAD, 0) => Form::Thread,
            (0, action) if Action::from_bits(action).is_one_signal() => Form::Signal,
            (AGGREGATE, 0) => Form::Aggregated,
            _ => Form::Other,
        }
    }
}
