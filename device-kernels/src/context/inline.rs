//! The functions that kernels inline (`ferrogin/fast_path.cuh`). `fgin_fast_*` post one request in GPU or CTA mode,
//! raise its signal by one, and call no other function. [`NextStep`](super::fast_path::NextStep) says which call the
//! kernel has to make then, if any.

use super::completion::FlushLimits;
use super::fast_path::Continuation;
use super::operation::{Arguments, Kind, NOWHERE};
use super::tables::{Name, Named};
use super::{Context, Span, Window};
use crate::action::Flags;
use crate::platform::thread_value;
use core::ffi::c_void;
use ferrogin_ffi::ext::ContextExt;

/// Set in the flags if other lanes of the warp make the call at the same time: they post together.
const TOGETHER: u32 = 1;

/// Returns the id of a signal or counter, and whether there is one.
#[inline(always)]
fn name(exists: u32, id: u32) -> Name {
    Name { exists: exists != 0, id }
}

#[inline(always)]
fn start(
    ctx: *const ContextExt,
    kind: Kind,
    peer: u32,
    (signal, counter): (Name, Name),
    (remote, local, bytes): (Span, Span, u64),
    flags: u32,
) -> Continuation {
    // SAFETY: the callers' callers vouch that `ctx` came from `fgin_open` and is alive.
    let context = unsafe { Context::from_ptr(ctx) };
    let (alone, flags) = (flags & TOGETHER == 0, Flags::from_bits(flags & Flags::AGGREGATE.bits()));
    let named = Named { signal, amount: 1, counter };
    let arguments = Arguments { kind, peer: thread_value(peer), named, remote, local, bytes, flags };
    Continuation::try_post(context.tables().resolve(arguments), alone)
}

/// Posts a put that raises `signal` by one and ticks `counter`, each if `has_*` is 1.
///
/// # Safety
///
/// `ctx` came from `fgin_open` and is alive; the windows are registered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_fast_put(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    has_signal: u32,
    signal: u32,
    has_counter: u32,
    counter: u32,
    flags: u32,
) -> Continuation {
    let names = (name(has_signal, signal), name(has_counter, counter));
    start(ctx, Kind::Put, peer, names, (Window(dst).at(dst_off), Window(src).at(src_off), bytes), flags)
}

/// Posts the low `bytes` of a value.
///
/// # Safety
///
/// As for [`fgin_fast_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_fast_put_value(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    has_signal: u32,
    signal: u32,
    flags: u32,
) -> Continuation {
    let place = (Window(dst).at(dst_off), NOWHERE.window.at(value), bytes.into());
    start(ctx, Kind::Value, peer, (name(has_signal, signal), Name::NONE), place, flags)
}

/// Raises a signal.
///
/// # Safety
///
/// As for [`fgin_fast_put`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_fast_signal(
    ctx: *const ContextExt,
    peer: u32,
    has_signal: u32,
    signal: u32,
    flags: u32,
) -> Continuation {
    start(ctx, Kind::Signal, peer, (name(has_signal, signal), Name::NONE), (NOWHERE, NOWHERE, 0), flags)
}

/// Does thread `rank`'s part of a flush by `size` threads. Besides the context's abort flag, a non-zero word at
/// `abort`, if that isn't null, ends it. So does time: `clock` 0 means no limit, 1 the context's time limit, and 2
/// `limit` cycles of the processor's clock. Returns a [`Status`](crate::Status) as a number.
///
/// # Safety
///
/// `ctx` came from `fgin_open` and is alive. `abort` is null, or 4-aligned and alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_fast_flush(
    ctx: *const ContextExt,
    rank: u32,
    size: u32,
    abort: *mut u32,
    clock: u32,
    limit: u64,
) -> u64 {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and is alive.
    let context = unsafe { Context::from_ptr(ctx) };
    context.flush_within(None, rank, size, false, FlushLimits::new(context, abort, clock, limit)).failure().into()
}
