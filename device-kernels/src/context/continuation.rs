//! The fast path in two functions, for CUDA C++. `fgin_fast_*` post one request in GPU mode by the `combining` policy, and call
//! no other function; `fgin_continue_*` do what the first left [`Unfinished`]. Kernels have `fgin_fast_*` as inline
//! assembly (`ferrogin/fast_path.cuh`), and call `fgin_continue_*` only where something is left to do. Their arguments fit in the
//! registers of a call, so that a kernel needs no stack for them.

use super::fast_path::{
    self, FastPathRequest, POST, Path, Put, Rest, SLOW_PATH, Sides, Value, finish_put, finish_value, post_and_finish,
};
pub use super::fast_path::{AGGREGATE, INVALID, KIND_SHIFT, TOGETHER};
use super::payload::Payload;
use super::slow_path::Operation;
use super::tables::{Name, Named, ON_GPU, Tables, context_of};
use super::{Checked, Context, FIRST_COUNTER, Window};
use crate::action::{Action, Flags};
use crate::endpoint::{Endpoint, Remote, Sge};
use crate::platform::number_of_thread;
use crate::post::Gpu;
use crate::status::{Code, Status, code};
use core::ffi::{c_int, c_void};
use core::ptr;
use efa_dp_direct::wqe::words::{ValueSize, remote_words};
use ferrogin_ffi::ext::{ContextExt, EndpointExt, VALUE_NONE};

/// What the fast path left undone: the arguments of `fgin_continue_*`.
#[repr(C)]
pub struct Unfinished {
    /// The remaining step, in the low half, or 0, which needs no call of `fgin_continue_*`.
    pub rest: u64,
    /// The word that belongs to the rest. Where nothing was posted: the high half of a put's bytes, and below it the signal, or all ones
    /// without a signal.
    pub word: u64,
    /// The local endpoint.
    pub poster: *const EndpointExt,
    /// Address on the peer.
    pub remote: u64,
    /// Address on this rank.
    pub local: u64,
    /// The remote key, and above it the local key.
    pub keys: u64,
}

/// The low half of [`Unfinished::word`] without a signal.
const NO_SIGNAL: u32 = u32::MAX;

/// Carries out an operation of which nothing was posted: an error where it is invalid. One with an emulated signal is posted as `request`,
/// if that exists.
#[inline(always)]
fn carry_out<'a, R: FastPathRequest<'a>>(
    poster: *const EndpointExt,
    word: u64,
    rest: Rest,
    payload: Payload,
    request: impl FnOnce(Tables<'a>, Path<'a>, u32) -> Option<R>,
) -> c_int {
    if rest.kind() == INVALID {
        return Status::InvalidArgument as c_int;
    }
    // SAFETY: the caller vouches that the fast path gave the endpoint, and that the context lives.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    let (context, peer) = (context_of(endpoint), rest.target());
    let tables = context.tables::<ON_GPU>();
    let signal = (word as u32 != NO_SIGNAL).then_some(word as u32);
    let imm = signal.and_then(|id| context.immediate(peer, id, 1));
    let path = Path { poster: endpoint.poster(), target: tables.target_at(peer) };
    let request = imm.filter(|_| path.target.exists()).and_then(|imm| request(tables, path, imm));
    match request {
        Some(request) => post_again(request, rest).0,
        None => code(carry_out_slowly(context, endpoint, signal, rest, payload)),
    }
}

/// Posts a request that the fast path did not know.
#[inline(always)]
fn post_again<'a>(request: impl FastPathRequest<'a>, rest: Rest) -> Code {
    #[cfg(target_arch = "nvptx64")]
    if rest.is_together() {
        return super::group::join(request.path().poster.endpoint(), rest.is_aggregate(), request).into();
    }
    post_and_finish::<Gpu>(request, rest.is_aggregate())
}

#[inline(never)]
fn carry_out_slowly(
    context: Context<'_>,
    endpoint: Endpoint<'_>,
    signal: Option<u32>,
    rest: Rest,
    payload: Payload,
) -> Result<(), Status> {
    let counter = endpoint.index().wrapping_sub(FIRST_COUNTER);
    let has_counter = counter < context.tables::<ON_GPU>().0.n_counters;
    let action = if has_counter { Action::counter(counter as u16) } else { Action::NONE };
    // No context of the card has the largest slot, which stands for every larger id.
    let action = signal.map_or(action, |id| action.with_signal(id.min(u16::MAX.into()) as u16, 1));
    let flags = if rest.is_aggregate() { Flags::AGGREGATE } else { Flags::NONE };
    context.carry_out(Operation { peer: rest.target(), action, flags }, signal, payload)
}

/// The id of a signal or counter, and whether there is one.
#[inline(always)]
fn name(exists: u32, id: u32) -> Name {
    Name { exists: exists != 0, id }
}

/// Posts a request. `high` is the upper half of a put's bytes. The continuation gets the addresses and keys.
#[inline(always)]
fn post<'a, R: FastPathRequest<'a>>(
    checked: &Checked<R>,
    peer: u32,
    (high, signal): (u32, Name),
    how: u32,
    [remote, local, keys]: [u64; 3],
) -> Unfinished {
    let Checked { request, takes_fast_path, is_invalid } = *checked;
    let Path { poster, target } = request.path();
    let (Rest(rest), word) = if !takes_fast_path {
        let kind = if is_invalid { INVALID } else { SLOW_PATH };
        // No context has the largest ids.
        let signal = if signal.exists { signal.id.min(NO_SIGNAL - 1) } else { NO_SIGNAL };
        (Rest::new(kind, peer, how), u64::from(high) << 32 | u64::from(signal))
    } else if ON_GPU && how & TOGETHER != 0 {
        (Rest::new(POST, target.index(poster.endpoint()), how), 0)
    } else {
        fast_path::post::<Gpu>(request, how & AGGREGATE != 0)
    };
    Unfinished { rest: rest.into(), word, poster: poster.endpoint().as_ptr(), remote, local, keys }
}

/// The fast path loads all that it needs before it checks anything, so this does not occur.
const NOT_LOADED: Unfinished = Unfinished {
    rest: (INVALID << KIND_SHIFT) as u64,
    word: NO_SIGNAL as u64,
    poster: ptr::null(),
    remote: 0,
    local: 0,
    keys: 0,
};

/// Posts a value; `has_signal` is 1 to raise `signal` by one, and 0 for no signal.
///
/// # Safety
///
/// `ctx` came from `fgin_open` and lives; the window is registered.
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
    how: u32,
) -> Unfinished {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and lives.
    let context = unsafe { Context::from_ptr(ctx) };
    let named = Named { signal: name(has_signal, signal), counter: Name::NONE, amount: 1, is_plain: false };
    let peer = number_of_thread(peer);
    match context.tables::<true>().value(peer, named, Window(dst).at(dst_off), value, bytes) {
        Some(checked) => {
            let [key, addr] = checked.request.remote;
            post(&checked, peer, (0, named.signal), how, [addr, 0, key >> 32])
        }
        None => NOT_LOADED,
    }
}

/// Does what [`fgin_fast_put_value`] left undone.
///
/// # Safety
///
/// The arguments are those of [`fgin_fast_put_value`] and its result, which is not finished. The context lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_continue_put_value(
    poster: *const EndpointExt,
    word: u64,
    remote: u64,
    value: u64,
    bytes: u32,
    rkey: u32,
    rest: u32,
) -> c_int {
    let rest = Rest(rest);
    if rest.is_undone() {
        let remote = Remote { addr: remote, rkey };
        return carry_out(poster, word, rest, Payload::Value { remote, value, bytes }, |_, path, imm| {
            let (bytes, config) = (ValueSize::new(bytes)?.bytes(), path.poster.value_config());
            let request = Value { path, imm, remote: remote_words(remote, bytes), value, config };
            (config.path != VALUE_NONE).then_some(request)
        });
    }
    finish_value::<Gpu, ()>(poster, word, remote, value, rkey, rest.with_length(bytes), ()).0
}

/// Posts a put that raises `signal` by one and ticks `counter`, each if `has_*` is 1.
///
/// # Safety
///
/// As for [`fgin_fast_put_value`].
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
    how: u32,
) -> Unfinished {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and lives.
    let context = unsafe { Context::from_ptr(ctx) };
    let named =
        Named { signal: name(has_signal, signal), counter: name(has_counter, counter), amount: 1, is_plain: false };
    let peer = number_of_thread(peer);
    match context.tables::<true>().put(peer, named, Window(dst).at(dst_off), Window(src).at(src_off), bytes) {
        Some(checked) => {
            let sides = checked.request.sides;
            post(
                &checked,
                peer,
                ((bytes >> 32) as u32, named.signal),
                how,
                [sides.remote_addr(), sides.local_addr(), sides.keys()],
            )
        }
        None => NOT_LOADED,
    }
}

/// Does what [`fgin_fast_put`] left undone.
///
/// # Safety
///
/// The arguments are those of [`fgin_fast_put`] and its result, which is not finished. The context lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_continue_put(
    poster: *const EndpointExt,
    word: u64,
    remote: u64,
    local: u64,
    keys: u64,
    bytes: u32,
    rest: u32,
) -> c_int {
    let rest = Rest(rest);
    if rest.is_undone() {
        let (remote, local) =
            (Remote { addr: remote, rkey: keys as u32 }, Sge { addr: local, lkey: (keys >> 32) as u32, length: 0 });
        let bytes = word >> 32 << 32 | u64::from(bytes);
        return carry_out(poster, word, rest, Payload::put_at(remote, local, bytes), |tables, path, imm| {
            let sides = Sides::new(remote, Sge { length: bytes as u32, ..local });
            (bytes.wrapping_sub(1) < tables.0.fast_put_limit).then_some(Put { path, imm, sides })
        });
    }
    finish_put::<Gpu, (), false>(poster, word, remote, local, keys, rest.with_length(bytes), ()).0
}

/// Raises a signal; arguments as for [`fgin_fast_put_value`], without bytes.
///
/// # Safety
///
/// `ctx` came from `fgin_open` and lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_fast_signal(
    ctx: *const ContextExt,
    peer: u32,
    has_signal: u32,
    signal: u32,
    how: u32,
) -> Unfinished {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and lives.
    let context = unsafe { Context::from_ptr(ctx) };
    let named = Named { signal: name(has_signal, signal), counter: Name::NONE, amount: 1, is_plain: false };
    let peer = number_of_thread(peer);
    match context.tables::<true>().signal(peer, named) {
        Some(checked) => post(&checked, peer, (0, named.signal), how, [0; 3]),
        None => NOT_LOADED,
    }
}

/// Does what [`fgin_fast_signal`] left undone.
///
/// # Safety
///
/// The arguments are the result of [`fgin_fast_signal`], which is not finished. The context lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_continue_signal(poster: *const EndpointExt, word: u64, rest: u32) -> c_int {
    let rest = Rest(rest);
    if rest.is_undone() {
        return carry_out(poster, word, rest, Payload::None, |tables, path, imm| {
            (tables.0.fast_put_limit != 0).then(|| Put { path, imm, sides: tables.no_bytes(rest.target(), true) })
        });
    }
    // SAFETY: the caller vouches that the fast path gave the endpoint, and that the context lives.
    let tables = context_of(unsafe { Endpoint::from_ptr(poster) }).tables::<ON_GPU>();
    let sides = tables.no_bytes(rest.target() % tables.0.nranks.max(1), true);
    let rest = rest.with_length(0);
    finish_put::<Gpu, (), false>(poster, word, sides.remote_addr(), sides.local_addr(), sides.keys(), rest, ()).0
}
