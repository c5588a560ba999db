//! The fast path in two functions, for CUDA C++. `fgin_fast_*` post one request in GPU mode by the `combining` policy, and call
//! no other function; `fgin_continue_*` carry out the [`Continuation`] that the first returned. Kernels have `fgin_fast_*` as inline
//! assembly (`ferrogin/fast_path.cuh`), and call `fgin_continue_*` only for a continuation that is not 0.

use super::fast_path::{Empty, LOCAL, Path, Put, REMOTE};
use super::tables::{RemoteSpan, limits_of};
use super::{Context, DATA, FIRST_COUNTER, Route, VALUE, Window};
use crate::action::{Action, Flags};
use crate::post::combining::{AfterMark, Next, NoRoom, finish};
use crate::post::{EncodeWqe, Gpu};
use crate::status::Status;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use efa_dp_direct::wqe::words::{ValueSize, local_words, remote_words};
use ferrogin_ffi::ext::{ContextExt, VALUE_INLINE, VALUE_NONE};

/// What the fast path left undone.
#[repr(C)]
pub struct Continuation {
    /// The word that belongs to `kind`; not set for 0, [`SLOW_PATH`] and [`INVALID`].
    pub word: MaybeUninit<u64>,
    /// 0, which needs no call of `fgin_continue_*`, or one of the constants below.
    pub kind: u32,
}

/// [`Continuation::kind`]: take turns at the doorbell.
const TAKE_TURN: u32 = Next::TakeTurn as u32;
/// [`Continuation::kind`]: continue a turn at the doorbell from the state `word`.
const CONTINUE_TURN: u32 = Next::ContinueTurn as u32;
/// [`Continuation::kind`]: wait for room for the reservation `word`, then post.
const WAIT_FOR_ROOM: u32 = 3;
/// [`Continuation::kind`]: the whole operation, by the slow path. Nothing was posted.
pub const SLOW_PATH: u32 = 4;
/// [`Continuation::kind`]: return an error. An argument is out of range, and nothing was posted.
pub const INVALID: u32 = 5;

impl Continuation {
    const SLOW_PATH: Continuation = Continuation { word: MaybeUninit::uninit(), kind: SLOW_PATH };
    const INVALID: Continuation = Continuation { word: MaybeUninit::uninit(), kind: INVALID };
}

/// The operation that `fgin_continue_*` continue, in one word: the peer (24 bits), the continuation's kind (7 bits), the
/// aggregate flag, and the ids of signal and counter (32 bits). A peer number of more bits, which no context has, makes the
/// kind [`INVALID`] or an unknown one, and both are refused.
#[derive(Clone, Copy)]
struct PackedOperation(u64);

impl PackedOperation {
    fn peer(self) -> u32 {
        self.0 as u32 & 0xff_ffff
    }

    fn kind(self) -> u32 {
        (self.0 >> 24) as u32 & 0x7f
    }

    /// The fast path refused the arguments, so they may have any value.
    fn is_refused(self) -> bool {
        self.kind() >= INVALID
    }

    fn is_aggregate(self) -> bool {
        self.0 >> 31 & 1 != 0
    }

    fn flags(self) -> Flags {
        if self.is_aggregate() { Flags::AGGREGATE } else { Flags::NONE }
    }

    fn ids(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The action that raises a signal by one (low half of `ids`: its id + 1) and ticks a counter (high half: its id + 1).
#[inline(always)]
fn action(ids: u32) -> Action {
    Action::from_bits(1 << 32 | u64::from(ids))
}

/// A value, inline in its request or through the pool. One type for both keeps one copy of the code.
#[derive(Clone, Copy)]
struct Value<'a> {
    path: Path<'a>,
    remote: RemoteSpan,
    value: u64,
    size: ValueSize,
    is_inline: bool,
}

impl EncodeWqe for Value<'_> {
    #[inline(always)]
    fn encode(self, idx: u32) {
        let Self { path, remote, value, size, is_inline } = self;
        let (slot, phase) = path.poster.slot(idx);
        let template = path.template();
        let [head, rest @ ..] = if is_inline { template.value_meta(size) } else { template.write_meta() };
        slot.put(0, [head | phase]);
        slot.put(1, rest);
        slot.put(REMOTE, remote_words(remote.memory(), size.bytes()));
        let local = if is_inline { [value, 0] } else { local_words(path.poster.pool(idx, value, size.bytes())) };
        slot.put(LOCAL, local);
        if is_inline {
            slot.pad();
        }
    }
}

impl<'a> Context<'a> {
    /// The route of an operation without a counter that raises `signal` by one, if there is one.
    #[inline(always)]
    fn route_to_signal(self, peer: u32, signal: Option<u32>, plain: u32) -> Result<Route, Status> {
        let ext = self.ext;
        let (has_signal, id) = (signal.is_some(), signal.unwrap_or(0));
        // Slot 0 always exists. There is no short circuit, so that all loads begin at once.
        if (peer >= ext.nranks) | (has_signal & (id >= ext.n_slots.wrapping_sub(1))) {
            return Err(Status::InvalidArgument);
        }
        let has_endpoint = has_signal & (id < ext.n_signals);
        let poster = if has_endpoint { FIRST_COUNTER + ext.n_counters + id } else { plain };
        let slot = if has_signal { id + 1 } else { 0 };
        let row = ext.targets.wrapping_add((slot * ext.nranks) as usize);
        Ok(Route { row, poster: self.endpoint_ext(poster), raised_by: 0 })
    }

    /// The path of that route; `slot` is the signal's id + 1, or 0.
    fn path_to_signal(self, peer: u32, slot: u32, plain: u32) -> Result<Path<'a>, Status> {
        let route = self.route_to_signal(peer, slot.checked_sub(1), plain)?;
        Ok(Path { target: self.target(peer, route)?, poster: self.poster(route) })
    }

    #[inline(always)]
    fn post_fast(path: Path<'_>, aggregate: u32, request: impl EncodeWqe) -> Continuation {
        match path.poster.try_post_unfinished::<Gpu>(aggregate != 0, request) {
            Ok(AfterMark { next, state }) => Continuation { word: MaybeUninit::new(state), kind: next as u32 },
            Err(NoRoom { reserved }) => Continuation { word: MaybeUninit::new(reserved), kind: WAIT_FOR_ROOM },
        }
    }

    /// Carries out a continuation of any kind but [`SLOW_PATH`].
    fn continue_fast(
        path: Path<'_>,
        operation: PackedOperation,
        word: u64,
        request: impl EncodeWqe,
    ) -> Result<(), Status> {
        let poster = path.poster;
        match operation.kind() {
            WAIT_FOR_ROOM => {
                return poster.post_reserved::<Gpu>(limits_of(poster), operation.is_aggregate(), request, word);
            }
            CONTINUE_TURN => finish::<Gpu, _>(poster, AfterMark { next: Next::ContinueTurn, state: word }),
            TAKE_TURN => finish::<Gpu, _>(poster, AfterMark { next: Next::TakeTurn, state: word }),
            _ => return Err(Status::InvalidArgument),
        }
        Ok(())
    }
}

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
    aggregate: u32,
) -> Continuation {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and lives.
    let context = unsafe { Context::from_ptr(ctx) };
    let Some(size) = ValueSize::new(bytes) else { return Continuation::INVALID };
    if dst.is_null() {
        return Continuation::INVALID;
    }
    let Ok(route) = context.route_to_signal(peer, (has_signal != 0).then_some(signal), VALUE) else {
        return Continuation::INVALID;
    };
    let Ok(target) = context.target(peer, route) else { return Continuation::INVALID };
    let path = Path { target, poster: context.poster(route) };
    let value_path = path.poster.value_path();
    if value_path == VALUE_NONE {
        return Continuation::SLOW_PATH;
    }
    let is_inline = value_path == VALUE_INLINE;
    let remote = context.remote_span(Window(dst).at(dst_off), peer);
    Context::post_fast(path, aggregate, Value { path, remote, value, size, is_inline })
}

/// Carries out the continuation of [`fgin_fast_put_value`]; `operation` has the slot (16 bits) and the number of bytes.
///
/// # Safety
///
/// As for [`fgin_fast_put_value`], with the same arguments and its result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_continue_put_value(
    ctx: *const ContextExt,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    word: u64,
    operation: u64,
) -> c_int {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and lives.
    let context = unsafe { Context::from_ptr(ctx) };
    let (operation, dst) = (PackedOperation(operation), Window(dst).at(dst_off));
    let (slot, bytes) = (operation.ids() & 0xffff, operation.ids() >> 16);
    if operation.is_refused() {
        return Status::InvalidArgument as c_int;
    }
    if operation.kind() == SLOW_PATH {
        let action = if slot == 0 { Action::NONE } else { action(slot) };
        return code(context.put_value(operation.peer(), dst, value, bytes, action, operation.flags()));
    }
    code(context.path_to_signal(operation.peer(), slot, VALUE).and_then(|path| {
        let size = ValueSize::new(bytes).ok_or(Status::InvalidArgument)?;
        let (remote, is_inline) =
            (context.remote_span(dst, operation.peer()), path.poster.value_path() == VALUE_INLINE);
        Context::continue_fast(path, operation, word, Value { path, remote, value, size, is_inline })
    }))
}

/// Posts a put; `ids` is the signal's id + 1 or 0, and in its upper half the same for the counter.
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
    ids: u32,
    aggregate: u32,
) -> Continuation {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and lives.
    let context = unsafe { Context::from_ptr(ctx) };
    let Ok(route) = context.route(peer, action(ids), DATA) else { return Continuation::INVALID };
    if bytes.wrapping_sub(1) >= context.ext.fast_put_limit {
        return Continuation::SLOW_PATH;
    }
    if dst.is_null() || src.is_null() {
        return Continuation::INVALID;
    }
    let Ok(target) = context.target(peer, route) else { return Continuation::INVALID };
    let path = Path { poster: context.poster(route), target };
    let (remote, local) =
        (context.remote_span(Window(dst).at(dst_off), peer), context.local_span(Window(src).at(src_off)));
    Context::post_fast(path, aggregate, Put { path, remote, local, bytes: bytes as u32 })
}

/// Carries out the continuation of [`fgin_fast_put`]; `operation` has the same `ids`.
///
/// # Safety
///
/// As for [`fgin_fast_put`], with the same arguments and its result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_continue_put(
    ctx: *const ContextExt,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    word: u64,
    operation: u64,
) -> c_int {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and lives.
    let context = unsafe { Context::from_ptr(ctx) };
    let operation = PackedOperation(operation);
    let (dst, src) = (Window(dst).at(dst_off), Window(src).at(src_off));
    let (peer, action) = (operation.peer(), action(operation.ids()));
    if operation.is_refused() {
        return Status::InvalidArgument as c_int;
    }
    if operation.kind() == SLOW_PATH {
        return code(context.put(peer, dst, src, bytes, action, operation.flags()));
    }
    code(context.route(peer, action, DATA).and_then(|route| {
        let path = Path { target: context.target(peer, route)?, poster: context.poster(route) };
        let (remote, local) = (context.remote_span(dst, peer), context.local_span(src));
        Context::continue_fast(path, operation, word, Put { path, remote, local, bytes: bytes as u32 })
    }))
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
    aggregate: u32,
) -> Continuation {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and lives.
    let context = unsafe { Context::from_ptr(ctx) };
    let Ok(route) = context.route_to_signal(peer, (has_signal != 0).then_some(signal), DATA) else {
        return Continuation::INVALID;
    };
    let Ok(target) = context.target(peer, route) else { return Continuation::INVALID };
    if context.ext.fast_put_limit == 0 {
        return Continuation::SLOW_PATH;
    }
    let path = Path { target, poster: context.poster(route) };
    Context::post_fast(path, aggregate, Empty { path, context, peer })
}

/// Carries out the continuation of [`fgin_fast_signal`]; `operation` has the slot.
///
/// # Safety
///
/// As for [`fgin_fast_signal`], with the same arguments and its result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_continue_signal(ctx: *const ContextExt, word: u64, operation: u64) -> c_int {
    // SAFETY: the caller vouches that `ctx` came from `fgin_open` and lives.
    let context = unsafe { Context::from_ptr(ctx) };
    let operation = PackedOperation(operation);
    if operation.is_refused() {
        return Status::InvalidArgument as c_int;
    }
    if operation.kind() == SLOW_PATH {
        let action = if operation.ids() == 0 { Action::NONE } else { action(operation.ids()) };
        return code(context.signal(operation.peer(), action, operation.flags()));
    }
    let peer = operation.peer();
    code(
        context
            .path_to_signal(peer, operation.ids(), DATA)
            .and_then(|path| Context::continue_fast(path, operation, word, Empty { path, context, peer })),
    )
}

fn code(result: Result<(), Status>) -> c_int {
    result.map_or_else(|status| status as c_int, |()| 0)
}
