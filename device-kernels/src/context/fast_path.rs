//! The fast path, and the two calls behind it.
//!
//! The usual operation is one work request that finds room in its queue and no other poster at the doorbell. The fast
//! path posts it with straight-line code, which kernels inline. If the request needs a rare step, [`fgin_continue`]
//! makes it; if the operation doesn't take the fast path, [`fgin_fallback`] carries it out. Both take what the fast
//! path has looked up, in the registers of a call: with the operation's own arguments, a kernel would need a stack.

use super::Context;
use super::failure::{self, About};
use super::operation::{Kind, Operation, Resolved};
use super::tables::{Named, context_of};
use crate::action::{Action, Flags};
use crate::endpoint::{Endpoint, Remote, Sge};
use crate::post::{Step, Unfinished, combining};
use crate::status::{Status, code};
use core::ffi::c_int;
use ferrogin_ffi::ext::{EndpointExt, MAX_TARGETS};
use ferrogin_ffi::failure::function_number;

/// What the fast path has looked up, and what is to be done with it. [`fgin_continue`] and [`fgin_fallback`] take the
/// fields as arguments.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Continuation {
    /// What is to be done.
    pub next: NextStep,
    /// For [`fgin_continue`], the [`Unfinished::word`]. For [`fgin_fallback`], the slots of the [`Action`], and above
    /// them the high half of the bytes.
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

/// What is to be done: a step (3 bits), the operation's kind (2 bits), the aggregate flag, and the index of its target
/// or, for [`fgin_fallback`], its peer (26 bits).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct NextStep(u64);

const KIND_SHIFT: u32 = 3;
const AGGREGATE: u64 = 1 << 5;
const TARGET_SHIFT: u32 = 6;
const _: () = assert!(MAX_TARGETS == 1 << (32 - TARGET_SHIFT));

impl NextStep {
    const NOTHING: NextStep = NextStep(0);
    // Numbers below these are the steps of a post: [`Step`].
    /// Post together with the other lanes of the warp that are here at the same time.
    const JOIN: u32 = 4;
    /// Carry out the operation, of which nothing is posted. This and larger numbers are for [`fgin_fallback`].
    const FALLBACK: u32 = 5;
    /// Return an error: an argument is out of range.
    const REFUSE: u32 = 6;

    #[inline(always)]
    fn new(step: u32, operation: &Operation, target: u32) -> Self {
        let aggregate = if operation.flags.is_aggregate() { AGGREGATE } else { 0 };
        NextStep(
            u64::from(step) | (operation.kind as u64) << KIND_SHIFT | aggregate | u64::from(target << TARGET_SHIFT),
        )
    }

    fn step(self) -> u32 {
        self.0 as u32 & 7
    }

    fn kind(self) -> Kind {
        [Kind::Put, Kind::Get, Kind::Value, Kind::Signal][(self.0 >> KIND_SHIFT & 3) as usize]
    }

    fn flags(self) -> Flags {
        if self.0 & AGGREGATE != 0 { Flags::AGGREGATE } else { Flags::NONE }
    }

    fn target(self) -> u32 {
        self.0 as u32 >> TARGET_SHIFT
    }

    /// Returns whether nothing is to be done.
    #[inline(always)]
    pub fn is_nothing(self) -> bool {
        self.0 as u32 == 0
    }

    /// Returns whether nothing was posted, so that [`fgin_fallback`] is to be called and not [`fgin_continue`].
    pub fn is_fallback(self) -> bool {
        self.step() >= Self::FALLBACK
    }

    /// Returns the last argument of the calls.
    #[inline(always)]
    pub fn bits(self) -> u32 {
        self.0 as u32
    }
}

impl Continuation {
    /// Posts an operation in GPU or CTA mode that takes the fast path.
    #[inline(always)]
    pub(super) fn post(resolved: Resolved<'_>) -> Self {
        let Resolved { operation, poster, target_index, .. } = resolved;
        match combining::try_post(poster, operation.flags.is_aggregate(), resolved) {
            None => Self::new(resolved, NextStep::NOTHING, 0),
            Some(Unfinished { step, word }) => {
                Self::new(resolved, NextStep::new(step as u32, &operation, target_index), word)
            }
        }
    }

    /// Posts an operation if it takes the fast path and this lane makes the call `alone`.
    #[inline(always)]
    pub(super) fn try_post(resolved: Resolved<'_>, alone: bool) -> Self {
        let operation = resolved.operation;
        if !resolved.is_fast {
            let step = if resolved.is_invalid { NextStep::REFUSE } else { NextStep::FALLBACK };
            let word = u64::from(operation.named.slots()) | operation.bytes >> 32 << 32;
            return Self::new(resolved, NextStep::new(step, &operation, operation.peer), word);
        }
        if !alone {
            return Self::new(resolved, NextStep::new(NextStep::JOIN, &operation, resolved.target_index), 0);
        }
        Self::post(resolved)
    }

    #[inline(always)]
    fn new(resolved: Resolved<'_>, next: NextStep, word: u64) -> Self {
        let Operation { remote, local, .. } = resolved.operation;
        let keys = u64::from(remote.rkey) | u64::from(local.lkey) << 32;
        Continuation { next, word, poster: resolved.poster.as_ptr(), remote: remote.addr, local: local.addr, keys }
    }

    /// Finishes a post of `bytes` bytes, if anything remains to be done.
    #[inline(always)]
    pub(super) fn finish(self, bytes: u32) -> Result<(), Status> {
        let Continuation { next, word, poster, remote, local, keys } = self;
        if next.is_nothing() {
            return Ok(());
        }
        // SAFETY: the endpoint comes from the fast path.
        let status = unsafe { fgin_continue(poster, word, remote, local, keys, bytes, next.bits()) };
        Status::from_number(status as u32).map_or(Ok(()), Err)
    }
}

/// Returns the endpoint and the operation in the arguments of a call behind the fast path.
///
/// # Safety
///
/// `poster` comes from the fast path, and its context is alive.
unsafe fn looked_up<'a>(
    poster: *const EndpointExt,
    (remote, local, keys): (u64, u64, u64),
    bytes: u64,
    next: NextStep,
) -> (Endpoint<'a>, Operation) {
    // SAFETY: the caller vouches for the endpoint.
    let endpoint = unsafe { Endpoint::from_ptr(poster) };
    let (remote, lkey) = (Remote { addr: remote, rkey: keys as u32 }, (keys >> 32) as u32);
    let local = Sge { addr: local, lkey, length: 0 };
    let (kind, flags, peer) = (next.kind(), next.flags(), next.target());
    (endpoint, Operation { kind, peer, named: Named::NONE, flags, remote, local, bytes })
}

/// Finishes a request that takes the fast path. The arguments are the fields of its [`Continuation`], and its size.
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
    next: u32,
) -> c_int {
    let next = NextStep(next.into());
    // SAFETY: the caller vouches for the endpoint.
    let (endpoint, operation) = unsafe { looked_up(poster, (remote, local, keys), bytes.into(), next) };
    let result = finish(endpoint, operation, next, word);
    if let Err(status) = result {
        let context = context_of(endpoint);
        note(context, operation, next.target() % context.nranks(), Action::NONE, status);
    }
    code(result)
}

#[inline(always)]
fn finish(endpoint: Endpoint<'_>, operation: Operation, next: NextStep, word: u64) -> Result<(), Status> {
    let (context, aggregate) = (context_of(endpoint), operation.flags.is_aggregate());
    let wqe = operation.wqe_for(endpoint, context.tables().target(next.target()).reserved())?;
    if next.step() == NextStep::JOIN {
        return super::warp::join(endpoint, aggregate, wqe);
    }
    // Another number comes from a kernel that was built with another release.
    let unfinished = Unfinished { step: Step::from_number(next.step()).ok_or(Status::Unsupported)?, word };
    combining::finish(endpoint, context, unfinished, aggregate, |idx| endpoint.place(wqe, idx))
}

/// Carries out an operation that doesn't take the fast path. The arguments are the fields of its [`Continuation`], and
/// the low half of its size.
///
/// # Safety
///
/// As for [`fgin_continue`].
#[cold]
#[inline(never)]
#[cfg_attr(any(feature = "host", feature = "ptx"), unsafe(no_mangle))]
pub unsafe extern "C" fn fgin_fallback(
    poster: *const EndpointExt,
    word: u64,
    remote: u64,
    local: u64,
    keys: u64,
    bytes: u32,
    next: u32,
) -> c_int {
    let (next, bytes) = (NextStep(next.into()), word >> 32 << 32 | u64::from(bytes));
    // SAFETY: the caller vouches for the endpoint.
    let (endpoint, operation) = unsafe { looked_up(poster, (remote, local, keys), bytes, next) };
    let (context, action) = (context_of(endpoint), Action::of_slots(word as u32));
    let result = match next.step() {
        NextStep::FALLBACK => context.carry_out(Operation { named: action.into(), ..operation }),
        _ => Err(Status::InvalidArgument),
    };
    if let Err(status) = result {
        note(context, operation, operation.peer, action, status);
    }
    code(result)
}

/// Keeps a failure for the host.
#[cold]
#[inline(never)]
fn note(context: Context<'_>, operation: Operation, peer: u32, action: Action, status: Status) {
    let function = match operation.kind {
        Kind::Put => const { function_number("fgin_put") },
        Kind::Get => const { function_number("fgin_get") },
        Kind::Value => const { function_number("fgin_put_value") },
        Kind::Signal => const { function_number("fgin_signal") },
    };
    let action = action.bits();
    let about = match operation.kind {
        Kind::Value => About::Value { peer, action, bytes: operation.bytes as u32 },
        _ => About::Post { peer, action },
    };
    failure::note(context, function, about, status);
}
