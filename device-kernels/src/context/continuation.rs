//! The fast path in two functions, for CUDA C++. `fgin_fast_*` post one request in GPU mode by the `combining` policy, and call
//! no other function; `fgin_continue_*` do what the first left [`Unfinished`]. Kernels have `fgin_fast_*` as inline
//! assembly (`ferrogin/fast_path.cuh`), and call `fgin_continue_*` only where something is left to do. Their arguments fit in the
//! registers of a call, so that a kernel needs no stack for them.

use super::fast_path::{self, Path, Put, Value};
use super::slow_path::Operation;
use super::tables::{Named, ON_GPU, context_of};
use super::{Context, FIRST_COUNTER, Refused, Window};
use crate::action::{Action, Flags};
use crate::endpoint::{Endpoint, Remote, Sge};
use crate::post::combining::{AfterMark, Next, NoRoom, finish, try_post};
use crate::post::{EncodeWqe, Gpu};
use crate::status::Status;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use ferrogin_ffi::ext::{ContextExt, EndpointExt, MAX_TARGETS};

/// What the fast path left undone: the arguments of `fgin_continue_*`, each set only where the rest depends on it.
#[repr(C)]
pub struct Unfinished {
    /// What is left, in the low half, or 0, which needs no call of `fgin_continue_*`.
    pub rest: u64,
    /// The word that belongs to the rest.
    pub word: MaybeUninit<u64>,
    /// The local endpoint.
    pub poster: MaybeUninit<*const EndpointExt>,
    /// Address on the peer.
    pub remote: MaybeUninit<u64>,
    /// Address on this rank.
    pub local: MaybeUninit<u64>,
    /// The remote key, and above it the local key.
    pub keys: MaybeUninit<u64>,
}

/// What is left to do, in one word: the index of the target (28 bits), the aggregate flag, and the kind.
#[derive(Clone, Copy)]
struct Rest(u32);

const _: () = assert!(MAX_TARGETS == 1 << AGGREGATE_SHIFT);
const AGGREGATE_SHIFT: u32 = 28;
const KIND_SHIFT: u32 = 29;

/// Kinds up to this one are those of [`Next`]: the step after the mark, with its state as `word`.
const LAST_STEP: u32 = Next::EndTurn as u32;
/// Kind: wait for room for the reservation `word`, then post.
const WAIT_FOR_ROOM: u32 = LAST_STEP + 1;
/// Kind: post together with the other lanes that are here at the same time. Nothing is reserved.
const JOIN: u32 = LAST_STEP + 2;
/// Kind: the whole operation, by the slow path. Nothing was posted. For a put, `word` is the number of bytes.
pub const SLOW_PATH: u32 = LAST_STEP + 3;
/// Kind: return an error. An argument is out of range, and nothing was posted.
pub const INVALID: u32 = LAST_STEP + 4;
const _: () = assert!(INVALID < 1 << (32 - KIND_SHIFT) && JOIN == WAIT_FOR_ROOM + TOGETHER);

/// `how` of `fgin_fast_*`: the aggregate flag.
pub const AGGREGATE: u32 = Flags::AGGREGATE.bits();
/// `how` of `fgin_fast_*`: several lanes of a warp are in the call, and post together. On a CPU it has no meaning.
pub const TOGETHER: u32 = 1;

impl Rest {
    #[inline(always)]
    fn word(kind: u32, target: u32, how: u32) -> u64 {
        u64::from(target | u32::from(how & AGGREGATE != 0) << AGGREGATE_SHIFT | kind << KIND_SHIFT)
    }

    fn kind(self) -> u32 {
        self.0 >> KIND_SHIFT
    }

    fn target(self) -> u32 {
        self.0 & (MAX_TARGETS as u32 - 1)
    }

    fn is_aggregate(self) -> bool {
        self.0 >> AGGREGATE_SHIFT & 1 != 0
    }

    /// The operation of the target and the endpoint, which were checked.
    fn operation(self, endpoint: Endpoint<'_>) -> Operation {
        let routes = context_of(endpoint).tables::<ON_GPU>().0;
        let nranks = routes.nranks.max(1);
        let (slot, peer) = (self.target() / nranks, self.target() % nranks);
        let counter = endpoint.index().wrapping_sub(FIRST_COUNTER);
        let action = if slot == 0 { Action::NONE } else { Action::signal_inc(slot as u16 - 1) };
        let action = if counter < routes.n_counters { action.with_counter(counter as u16) } else { action };
        Operation { peer, action, flags: if self.is_aggregate() { Flags::AGGREGATE } else { Flags::NONE } }
    }

    /// The reservation under which the request is posted; none where lanes post together.
    fn reserved(self, word: u64) -> Option<u64> {
        (self.kind() == WAIT_FOR_ROOM).then_some(word)
    }

    /// Takes the step after the mark that is left.
    fn finish(self, endpoint: Endpoint<'_>, word: u64) -> Result<(), Status> {
        finish::<Gpu, _>(endpoint, AfterMark { next: Next::from_number(self.kind()), state: word });
        Ok(())
    }
}

impl Unfinished {
    const INVALID: Self = Self::only((INVALID << KIND_SHIFT) as u64);

    #[inline(always)]
    const fn only(rest: u64) -> Self {
        Unfinished {
            rest,
            word: MaybeUninit::uninit(),
            poster: MaybeUninit::uninit(),
            remote: MaybeUninit::uninit(),
            local: MaybeUninit::uninit(),
            keys: MaybeUninit::uninit(),
        }
    }

    #[inline(always)]
    fn on(endpoint: Endpoint<'_>, rest: u64, word: u64) -> Self {
        let poster = MaybeUninit::new(endpoint.as_ptr());
        Unfinished { word: MaybeUninit::new(word), poster, ..Self::only(rest) }
    }

    /// The whole operation.
    #[inline(always)]
    fn slow(path: Path<'_, true>, how: u32, word: u64) -> Self {
        Self::on(path.poster.endpoint(), Rest::word(SLOW_PATH, path.target.index, how), word)
    }

    #[inline(always)]
    fn with_sides(self, remote: Remote, local: Sge) -> Self {
        Unfinished {
            remote: MaybeUninit::new(remote.addr),
            local: MaybeUninit::new(local.addr),
            keys: MaybeUninit::new(u64::from(remote.rkey) | u64::from(local.lkey) << 32),
            ..self
        }
    }
}

/// The id + 1 of a signal or counter, or 0 without one; the largest number stands for ids that no context has.
#[inline(always)]
fn slot(exists: u32, id: u32) -> u32 {
    if exists != 0 { id.saturating_add(1) } else { 0 }
}

#[inline(always)]
fn named(has_signal: u32, signal: u32, has_counter: u32, counter: u32) -> Named {
    Named { signal: slot(has_signal, signal), counter: slot(has_counter, counter), amount: 1 }
}

#[inline(always)]
fn post(path: Path<'_, true>, how: u32, request: impl EncodeWqe, remote: Remote, local: Sge) -> Unfinished {
    let endpoint = path.poster.endpoint();
    let joins = if ON_GPU { how & TOGETHER } else { 0 };
    let posted = match joins {
        0 => try_post::<Gpu, _>(path.poster, how & AGGREGATE != 0, request),
        _ => Err(NoRoom { reserved: 0 }),
    };
    match posted {
        Ok(AfterMark { next: Next::Nothing, .. }) => Unfinished::only(0),
        Ok(AfterMark { next, state }) => Unfinished::on(endpoint, Rest::word(next as u32, 0, 0), state),
        Err(NoRoom { reserved }) => {
            let rest = Rest::word(WAIT_FOR_ROOM + joins, path.target.index, how);
            Unfinished::on(endpoint, rest, reserved).with_sides(remote, local)
        }
    }
}

/// The sides of a request whose continuation does not need them.
const NO_PLACE: Remote = Remote { addr: 0, rkey: 0 };
const NO_BUFFER: Sge = Sge { addr: 0, lkey: 0, length: 0 };

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
    let named = named(has_signal, signal, 0, 0);
    match context.tables::<true>().value(peer, named, Window(dst).at(dst_off), value, bytes) {
        Ok(request) => post(request.path, how, request, request.remote.memory(), NO_BUFFER),
        Err(Refused { request: Some(Value { path, remote, .. }), is_invalid: false }) => {
            Unfinished::slow(path, how, 0).with_sides(remote.memory(), NO_BUFFER)
        }
        Err(_) => Unfinished::INVALID,
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
    if rest.kind() >= INVALID {
        return Status::InvalidArgument as c_int;
    }
    // SAFETY: the caller vouches that the fast path gave the endpoint, and that the context lives.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    let remote = Remote { addr: remote, rkey };
    code(match rest.kind() {
        SLOW_PATH => context_of(endpoint).put_value_at(rest.operation(endpoint), remote, value, bytes),
        WAIT_FOR_ROOM | JOIN => fast_path::value_waiting::<Gpu>(
            (endpoint, rest.target()),
            remote,
            (value, bytes),
            rest.is_aggregate(),
            rest.reserved(word),
        ),
        _ => rest.finish(endpoint, word),
    })
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
    let named = named(has_signal, signal, has_counter, counter);
    match context.tables::<true>().put(peer, named, Window(dst).at(dst_off), Window(src).at(src_off), bytes) {
        Ok(put) => post(put.path, how, put, put.remote.memory(), put.local.sge(0)),
        Err(Refused { request: Some(Put { path, remote, local, .. }), is_invalid: false }) => {
            Unfinished::slow(path, how, bytes).with_sides(remote.memory(), local.sge(0))
        }
        Err(_) => Unfinished::INVALID,
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
    if rest.kind() >= INVALID {
        return Status::InvalidArgument as c_int;
    }
    // SAFETY: the caller vouches that the fast path gave the endpoint, and that the context lives.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    let (remote, lkey) = (Remote { addr: remote, rkey: keys as u32 }, (keys >> 32) as u32);
    code(match rest.kind() {
        SLOW_PATH => {
            let (context, Operation { peer, action, flags }) = (context_of(endpoint), rest.operation(endpoint));
            match word {
                0 => context.signal_slow(peer, action, flags),
                bytes => {
                    let local = Sge { addr: local, lkey, length: 0 };
                    context.put_long(Operation { peer, action, flags }, remote, local, bytes)
                }
            }
        }
        WAIT_FOR_ROOM | JOIN => fast_path::put_waiting::<Gpu>(
            (endpoint, rest.target()),
            remote,
            Sge { addr: local, lkey, length: bytes },
            false,
            rest.is_aggregate(),
            rest.reserved(word),
        ),
        _ => rest.finish(endpoint, word),
    })
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
    match context.tables::<true>().signal(peer, named(has_signal, signal, 0, 0)) {
        Ok(put) => post(put.path, how, put, NO_PLACE, NO_BUFFER),
        Err(Refused { request: Some(Put { path, .. }), is_invalid: false }) => Unfinished::slow(path, how, 0),
        Err(_) => Unfinished::INVALID,
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
    if rest.kind() >= INVALID {
        return Status::InvalidArgument as c_int;
    }
    // SAFETY: the caller vouches that the fast path gave the endpoint, and that the context lives.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    let Operation { peer, action, flags } = rest.operation(endpoint);
    code(match rest.kind() {
        SLOW_PATH => context_of(endpoint).signal_slow(peer, action, flags),
        WAIT_FOR_ROOM | JOIN => {
            let tables = context_of(endpoint).tables::<ON_GPU>();
            let scratch = tables.scratch();
            fast_path::put_waiting::<Gpu>(
                (endpoint, rest.target()),
                tables.remote_span(scratch, peer, true).memory(),
                tables.local_span(scratch, true).sge(0),
                false,
                rest.is_aggregate(),
                rest.reserved(word),
            )
        }
        _ => rest.finish(endpoint, word),
    })
}

fn code(result: Result<(), Status>) -> c_int {
    result.map_or_else(|status| status as c_int, |()| 0)
}
