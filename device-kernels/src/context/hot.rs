//! The hot paths of the PTX module: `fgin_hot_*` post one request in GPU mode by the `combining` policy and call nothing;
//! `fgin_rest_*` do what they leave to do. CUDA C++ has the former as inline assembly in its kernels (`ferrogin/hot.cuh`), and
//! calls the latter only when a post did not go straight.

use super::short::{Empty, LOCAL, Put, REMOTE, To};
use super::tables::{Far, limits_of, remote};
use super::{Context, DATA, FIRST_COUNTER, Route, VALUE, Window};
use crate::action::{Action, Flags};
use crate::post::combining::{After, Next, NoRoom, finish};
use crate::post::{Gpu, Write};
use crate::status::Status;
use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use efa_dp_direct::wqe::words::{ValueSize, local_words, remote_words};
use ferrogin_ffi::ext::{ContextExt, VALUE_GENERAL, VALUE_INLINE};

/// What a hot path leaves to do: 0, which is nothing and needs no call of `fgin_rest_*`, or one of the constants below, and the
/// word that goes with it.
#[repr(C)]
pub struct Rest {
    /// Set where `what` has a word.
    pub word: MaybeUninit<u64>,
    /// 0 or one of the constants.
    pub what: u32,
}

/// Help at the doorbell.
const HELP: u32 = Next::Help as u32;
/// Turns at the doorbell, from the state `word`.
const WORK: u32 = Next::Work as u32;
/// Room, for the reservation `word`; then the post.
const ROOM: u32 = 3;
/// The whole operation, by the general way: nothing was done.
pub const GENERAL: u32 = 4;
/// Nothing: an argument is out of range.
pub const INVALID: u32 = 5;

impl Rest {
    const GENERAL: Rest = Rest { word: MaybeUninit::uninit(), what: GENERAL };
    const INVALID: Rest = Rest { word: MaybeUninit::uninit(), what: INVALID };
}

/// What `fgin_rest_*` are told about the operation, in one word: the peer (24 bits), what is left to do (7 bits), whether it
/// is aggregated, and what it names (32 bits). A peer of more bits, which is none, leaves [`INVALID`] or what is refused too.
#[derive(Clone, Copy)]
struct Meta(u64);

impl Meta {
    fn peer(self) -> u32 {
        self.0 as u32 & 0xff_ffff
    }

    fn what(self) -> u32 {
        (self.0 >> 24) as u32 & 0x7f
    }

    /// Nothing is left to do, and the arguments may be anything.
    fn is_refused(self) -> bool {
        self.what() >= INVALID
    }

    fn is_aggregate(self) -> bool {
        self.0 >> 31 & 1 != 0
    }

    fn flags(self) -> Flags {
        if self.is_aggregate() { Flags::AGGREGATE } else { Flags::NONE }
    }

    fn named(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The action that names a signal (low half: its id + 1), raised by one, and a counter (high half, the same).
#[inline(always)]
fn action(named: u32) -> Action {
    Action::from_bits(1 << 32 | u64::from(named))
}

/// A value, in its request or through the pool: one path for both, so that the code is there once.
#[derive(Clone, Copy)]
struct Value<'a> {
    to: To<'a>,
    far: Far,
    dst_off: u64,
    value: u64,
    size: ValueSize,
    is_inline: bool,
}

impl Write for Value<'_> {
    #[inline(always)]
    fn write(self, idx: u32) {
        let Self { to, far, dst_off, value, size, is_inline } = self;
        let (slot, phase) = to.poster.slot(idx);
        let stamp = to.stamp();
        let [head, rest @ ..] = if is_inline { stamp.value_meta(size) } else { stamp.write_meta() };
        slot.put(0, [head | phase]);
        slot.put(1, rest);
        slot.put(REMOTE, remote_words(remote(far, dst_off), size.bytes()));
        let here = if is_inline { [value, 0] } else { local_words(to.poster.pool(idx, value, size.bytes())) };
        slot.put(LOCAL, here);
        if is_inline {
            slot.pad();
        }
    }
}

impl<'a> Context<'a> {
    /// The route of an operation that raises that signal by one, or none, and names no counter.
    #[inline(always)]
    fn route_to_signal(self, peer: u32, signal: Option<u32>, plain: u32) -> Result<Route, Status> {
        let ext = self.ext;
        let (raises, id) = (signal.is_some(), signal.unwrap_or(0));
        // Slot 0 is there always. Without short circuits: what is read is read at once.
        if (peer >= ext.nranks) | (raises & (id >= ext.n_slots.wrapping_sub(1))) {
            return Err(Status::InvalidArgument);
        }
        let rides = raises & (id < ext.n_signals);
        let poster = if rides { FIRST_COUNTER + ext.n_counters + id } else { plain };
        let slot = if raises { id + 1 } else { 0 };
        let row = ext.targets.wrapping_add((slot * ext.nranks) as usize);
        Ok(Route { row, poster: self.endpoint_ext(poster), raised_by: 0 })
    }

    /// Where that goes; `slot` is the signal's id + 1, or 0.
    fn to_signal(self, peer: u32, slot: u32, plain: u32) -> Result<To<'a>, Status> {
        let route = self.route_to_signal(peer, slot.checked_sub(1), plain)?;
        Ok(To { target: self.target(peer, route)?, poster: self.poster(route) })
    }

    #[inline(always)]
    fn hot(to: To<'_>, aggregate: u32, request: impl Write) -> Rest {
        match to.poster.combine_without_calls::<Gpu>(aggregate != 0, request) {
            Ok(After { next, state }) => Rest { word: MaybeUninit::new(state), what: next as u32 },
            Err(NoRoom { reserved }) => Rest { word: MaybeUninit::new(reserved), what: ROOM },
        }
    }

    /// Everything that a hot path may leave, but the general way.
    fn rest(to: To<'_>, meta: Meta, word: u64, request: impl Write) -> Result<(), Status> {
        let poster = to.poster;
        match meta.what() {
            ROOM => return poster.combine_late::<Gpu>(limits_of(poster), meta.is_aggregate(), request, word),
            WORK => finish::<Gpu, _>(poster, After { next: Next::Work, state: word }),
            HELP => finish::<Gpu, _>(poster, After { next: Next::Help, state: word }),
            _ => return Err(Status::InvalidArgument),
        }
        Ok(())
    }
}

/// `raises` is 1 if `signal` is raised, and 0 if none is.
///
/// # Safety
///
/// `ctx` came from `fgin_open` and lives; the window is registered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_hot_put_value(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    bytes: u32,
    raises: u32,
    signal: u32,
    aggregate: u32,
) -> Rest {
    // SAFETY: the caller vouches for it.
    let context = unsafe { Context::from_ptr(ctx) };
    let Some(size) = ValueSize::new(bytes) else { return Rest::INVALID };
    if dst.is_null() {
        return Rest::INVALID;
    }
    let Ok(route) = context.route_to_signal(peer, (raises != 0).then_some(signal), VALUE) else { return Rest::INVALID };
    let Ok(target) = context.target(peer, route) else { return Rest::INVALID };
    let to = To { target, poster: context.poster(route) };
    let way = to.poster.value_way();
    if way == VALUE_GENERAL {
        return Rest::GENERAL;
    }
    let is_inline = way == VALUE_INLINE;
    let far = context.far(Window(dst), peer);
    Context::hot(to, aggregate, Value { to, far, dst_off, value, size, is_inline })
}

/// What [`fgin_hot_put_value`] left to do; `meta` names slot (16 bits) and bytes.
///
/// # Safety
///
/// As there, with the same arguments and its result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_rest_put_value(
    ctx: *const ContextExt,
    dst: *mut c_void,
    dst_off: u64,
    value: u64,
    word: u64,
    meta: u64,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let context = unsafe { Context::from_ptr(ctx) };
    let (meta, dst) = (Meta(meta), Window(dst));
    let (slot, bytes) = (meta.named() & 0xffff, meta.named() >> 16);
    if meta.is_refused() {
        return Status::InvalidArgument as c_int;
    }
    if meta.what() == GENERAL {
        let action = if slot == 0 { Action::NONE } else { action(slot) };
        return code(context.put_value(meta.peer(), dst, dst_off, value, bytes, action, meta.flags()));
    }
    code(context.to_signal(meta.peer(), slot, VALUE).and_then(|to| {
        let size = ValueSize::new(bytes).ok_or(Status::InvalidArgument)?;
        let (far, is_inline) = (context.far(dst, meta.peer()), to.poster.value_way() == VALUE_INLINE);
        Context::rest(to, meta, word, Value { to, far, dst_off, value, size, is_inline })
    }))
}

/// `named` is the signal's id + 1 or 0, and in its upper half the same for the counter.
///
/// # Safety
///
/// As for [`fgin_hot_put_value`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_hot_put(
    ctx: *const ContextExt,
    peer: u32,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    named: u32,
    aggregate: u32,
) -> Rest {
    // SAFETY: the caller vouches for it.
    let context = unsafe { Context::from_ptr(ctx) };
    let Ok(route) = context.route(peer, action(named), DATA) else { return Rest::INVALID };
    if bytes.wrapping_sub(1) >= context.ext.short_put {
        return Rest::GENERAL;
    }
    if dst.is_null() || src.is_null() {
        return Rest::INVALID;
    }
    let Ok(target) = context.target(peer, route) else { return Rest::INVALID };
    let to = To { poster: context.poster(route), target };
    let (far, near) = (context.far(Window(dst), peer), context.near(Window(src)));
    Context::hot(to, aggregate, Put { to, far, dst_off, near, src_off, bytes: bytes as u32 })
}

/// What [`fgin_hot_put`] left to do; `meta` names what it named.
///
/// # Safety
///
/// As there, with the same arguments and its result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_rest_put(
    ctx: *const ContextExt,
    dst: *mut c_void,
    dst_off: u64,
    src: *mut c_void,
    src_off: u64,
    bytes: u64,
    word: u64,
    meta: u64,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let context = unsafe { Context::from_ptr(ctx) };
    let meta = Meta(meta);
    let (dst, src, peer, action) = (Window(dst), Window(src), meta.peer(), action(meta.named()));
    if meta.is_refused() {
        return Status::InvalidArgument as c_int;
    }
    if meta.what() == GENERAL {
        return code(context.put(peer, dst, dst_off, src, src_off, bytes, action, meta.flags()));
    }
    code(context.route(peer, action, DATA).and_then(|route| {
        let to = To { target: context.target(peer, route)?, poster: context.poster(route) };
        let (far, near) = (context.far(dst, peer), context.near(src));
        Context::rest(to, meta, word, Put { to, far, dst_off, near, src_off, bytes: bytes as u32 })
    }))
}

/// As [`fgin_hot_put_value`], with no bytes.
///
/// # Safety
///
/// `ctx` came from `fgin_open` and lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_hot_signal(
    ctx: *const ContextExt,
    peer: u32,
    raises: u32,
    signal: u32,
    aggregate: u32,
) -> Rest {
    // SAFETY: the caller vouches for it.
    let context = unsafe { Context::from_ptr(ctx) };
    let Ok(route) = context.route_to_signal(peer, (raises != 0).then_some(signal), DATA) else { return Rest::INVALID };
    let Ok(target) = context.target(peer, route) else { return Rest::INVALID };
    if context.ext.short_put == 0 {
        return Rest::GENERAL;
    }
    let to = To { target, poster: context.poster(route) };
    Context::hot(to, aggregate, Empty { to, context, peer })
}

/// What [`fgin_hot_signal`] left to do; `meta` names the slot.
///
/// # Safety
///
/// As there, with the same arguments and its result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fgin_rest_signal(ctx: *const ContextExt, word: u64, meta: u64) -> c_int {
    // SAFETY: the caller vouches for it.
    let context = unsafe { Context::from_ptr(ctx) };
    let meta = Meta(meta);
    if meta.is_refused() {
        return Status::InvalidArgument as c_int;
    }
    if meta.what() == GENERAL {
        let action = if meta.named() == 0 { Action::NONE } else { action(meta.named()) };
        return code(context.signal(meta.peer(), action, meta.flags()));
    }
    let to = context.to_signal(meta.peer(), meta.named(), DATA);
    code(to.and_then(|to| Context::rest(to, meta, word, Empty { to, context, peer: meta.peer() })))
}

fn code(result: Result<(), Status>) -> c_int {
    result.map_or_else(|status| status as c_int, |()| 0)
}
