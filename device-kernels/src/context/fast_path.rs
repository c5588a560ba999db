//! The fast path, and what it leaves undone.
//!
//! The usual operation is one work request that finds room in its queue and no other poster at the doorbell. The fast path posts it with
//! straight-line code, which kernels inline. A rare step of the post, or a whole operation that doesn't take the fast path, is returned as
//! a [`Continuation`] and carried out in a call.

use super::Context;
use super::failure::{self, About};
use super::operation::{Kind, Operation, Resolved};
use super::tables::{Named, context_of};
use crate::action::{Action, Flags};
use crate::endpoint::{Endpoint, Remote, Sge};
use crate::post::{Left, Step, combining};
use crate::status::{Status, code};
use core::ffi::c_int;
use ferrogin_ffi::ext::{EndpointExt, MAX_TARGETS};
use ferrogin_ffi::failure::function_number;

/// What remains to be done for an operation in GPU mode whose weak signal is raised by one. [`fgin_continue`] takes the fields as
/// arguments, which fit in a call's registers, so a kernel needs no stack for them.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Continuation {
    /// What to do.
    pub rest: Rest,
    /// The [`Left::word`] of a step. If nothing was posted, the slots of the [`Action`], and above them the high half of the bytes.
    pub word: u64,
    /// The local endpoint.
    pub poster: *const EndpointExt,
    /// Address on the peer.
    pub remote: u64,
    /// Address on this rank, or the value.
    pub local: u64,
    /// The remote key, and above it the local key.
    pub keys: u64,
}

/// What to do, and for what: the step (3 bits), the operation's kind (2 bits), the aggregate flag, and the index of its target or, if
/// nothing was posted, its peer (26 bits). 0: nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Rest(u64);

const KIND_SHIFT: u32 = 3;
const AGGREGATE: u64 = 1 << 5;
const TARGET_SHIFT: u32 = 6;
const _: () = assert!(MAX_TARGETS == 1 << (32 - TARGET_SHIFT));

impl Rest {
    const NOTHING: Rest = Rest(0);
    // Numbers below these are the steps of a post: [`Step`].
    /// Post together with the other lanes of the warp that are here at the same time.
    const JOIN: u64 = 4;
    /// Carry out the operation on the slow path.
    const SLOW_PATH: u64 = 5;
    /// The same, for several lanes of a warp.
    const SLOW_PATH_TOGETHER: u64 = 6;
    /// Return an error: an argument is out of range.
    const INVALID: u64 = 7;

    #[inline(always)]
    fn new(step: u64, operation: &Operation, target: u32) -> Self {
        let aggregate = if operation.flags.is_aggregate() { AGGREGATE } else { 0 };
        Rest(step | (operation.kind as u64) << KIND_SHIFT | aggregate | u64::from(target << TARGET_SHIFT))
    }

    fn step(self) -> u64 {
        self.0 & 7
    }

    fn kind(self) -> Kind {
        [Kind::Put, Kind::Get, Kind::Value, Kind::Signal][(self.0 >> KIND_SHIFT & 3) as usize]
    }

    fn flags(self) -> Flags {
        let flags = if self.0 & AGGREGATE != 0 { Flags::AGGREGATE } else { Flags::NONE };
        if self.step() == Self::SLOW_PATH_TOGETHER { flags.with(Flags::TOGETHER) } else { flags }
    }

    fn target(self) -> u32 {
        self.0 as u32 >> TARGET_SHIFT
    }

    /// Returns whether nothing is left.
    #[inline(always)]
    pub fn is_nothing(self) -> bool {
        self.0 as u32 == 0
    }

    /// Returns the last argument of [`fgin_continue`].
    #[inline(always)]
    pub fn bits(self) -> u32 {
        self.0 as u32
    }
}

impl Continuation {
    /// Posts an operation in GPU mode, if it takes the fast path.
    #[inline(always)]
    pub(super) fn start(resolved: Resolved<'_>) -> Self {
        let Resolved { operation, poster, target, .. } = resolved;
        let flags = operation.flags;
        let (rest, word) = if !resolved.is_fast {
            let step = match (resolved.is_invalid, flags.has(Flags::TOGETHER)) {
                (true, _) => Rest::INVALID,
                (false, true) => Rest::SLOW_PATH_TOGETHER,
                (false, false) => Rest::SLOW_PATH,
            };
            let slots = u64::from(operation.named.slots());
            (Rest::new(step, &operation, operation.peer), slots | operation.bytes >> 32 << 32)
        } else if flags.has(Flags::TOGETHER) {
            (Rest::new(Rest::JOIN, &operation, target), 0)
        } else {
            match combining::try_post(poster, flags.is_aggregate(), resolved) {
                None => (Rest::NOTHING, 0),
                Some(Left { step, word }) => (Rest::new(step as u64, &operation, target), word),
            }
        };
        let Operation { remote, local, .. } = operation;
        let keys = u64::from(remote.rkey) | u64::from(local.lkey) << 32;
        Continuation { rest, word, poster: poster.as_ptr(), remote: remote.addr, local: local.addr, keys }
    }

    /// Finishes an operation, if anything remains to be done. `bytes` is the low half of its size.
    #[inline(always)]
    pub(super) fn finish(self, bytes: u32) -> Result<(), Status> {
        let Continuation { rest, word, poster, remote, local, keys } = self;
        if rest.is_nothing() {
            return Ok(());
        }
        // SAFETY: the endpoint comes from the fast path.
        let status = unsafe { fgin_continue(poster, word, remote, local, keys, bytes, rest.bits()) };
        Status::from_number(status as u32).map_or(Ok(()), Err)
    }
}

/// Finishes an operation that the fast path began. The arguments are the fields of its [`Continuation`], and the low half of its size.
///
/// # Safety
///
/// `poster` comes from the fast path, and its context is alive.
#[cold]
#[inline(never)]
#[cfg_attr(any(feature = "host", feature = "ptx"), unsafe(no_mangle))]
pub unsafe extern "C" fn fgin_continue(
    poster: *const EndpointExt,
    word: u64,
    remote: u64,
    local: u64,
    keys: u64,
    bytes: u32,
    rest: u32,
) -> c_int {
    let rest = Rest(rest.into());
    // SAFETY: the caller vouches for the endpoint.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    let (remote, lkey) = (Remote { addr: remote, rkey: keys as u32 }, (keys >> 32) as u32);
    let operation = Operation {
        kind: rest.kind(),
        peer: rest.target(),
        named: Named::NONE,
        flags: rest.flags(),
        remote,
        local: Sge { addr: local, lkey, length: 0 },
        bytes: bytes.into(),
    };
    let result = finish(endpoint, operation, rest, word);
    if let Err(status) = result {
        note(context_of(endpoint), rest, word, status);
    }
    code(result)
}

/// Keeps a failure for the host.
#[cold]
#[inline(never)]
fn note(context: Context<'_>, rest: Rest, word: u64, status: Status) {
    let function = match rest.kind() {
        Kind::Put => const { function_number("fgin_put") },
        Kind::Get => const { function_number("fgin_get") },
        Kind::Value => const { function_number("fgin_put_value") },
        Kind::Signal => const { function_number("fgin_signal") },
    };
    // If nothing was posted, this is the peer, which may not exist. Otherwise it's the index of a target, which gives the peer too.
    let is_peer = matches!(rest.step(), Rest::SLOW_PATH | Rest::SLOW_PATH_TOGETHER | Rest::INVALID);
    let about = if is_peer {
        About::Post { peer: rest.target(), action: Action::of_slots(word as u32).bits() }
    } else {
        About::Post { peer: rest.target() % context.nranks(), action: 0 }
    };
    failure::note(context, function, about, status);
}

#[inline(always)]
fn finish(endpoint: Endpoint<'_>, operation: Operation, rest: Rest, word: u64) -> Result<(), Status> {
    let context = context_of(endpoint);
    match rest.step() {
        Rest::INVALID => return Err(Status::InvalidArgument),
        Rest::SLOW_PATH | Rest::SLOW_PATH_TOGETHER => {
            let (named, high) = (Action::of_slots(word as u32).into(), word >> 32 << 32);
            return context.carry_out(Operation { named, bytes: operation.bytes | high, ..operation });
        }
        _ => {}
    }
    let wqe = operation.wqe(endpoint, context.tables().target(rest.target()).template())?;
    let aggregate = operation.flags.is_aggregate();
    if rest.step() == Rest::JOIN {
        return super::group::join(endpoint, aggregate, wqe);
    }
    let left = Left { step: Step::from_number(rest.step() as u32), word };
    combining::finish(endpoint, context, left, aggregate, |idx| endpoint.place(wqe, idx))
}
