//! Failed operations: the record where the host finds a context's first one.

use super::Context;
use crate::action::Action;
use crate::status::Status;
use crate::sync::{AtomicU64, LoadExternal, Ordering};
use core::mem::offset_of;
use ferrogin_ffi::failure::{Failure, Record, Subject};

/// What a call to the C ABI is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum About {
    /// All earlier operations.
    Context,
    /// An operation with a peer, and its action.
    Post { peer: u32, action: u64 },
    /// The same with a value of that size.
    Value { peer: u32, action: u64, bytes: u32 },
    /// A signal of this rank, and the count that a wait needs.
    Signal { id: u32, least: u64 },
    /// A counter, and the count that a wait needs.
    Counter { id: u32, least: u64 },
}

/// Keeps the first failure of a context for the host.
#[inline(always)]
pub(crate) fn note(context: Context<'_>, function: u8, about: About, status: Status) {
    // Numbers instead of a struct: they fit in a call's registers, so a kernel needs no stack for them.
    let (kind, id, argument) = match about {
        About::Context => (0, 0, 0),
        About::Post { peer, action } => (1, peer, action),
        // The amount that the signal is raised by has no part in failures.
        About::Value { peer, action, bytes } => (4, peer, action & 0xffff_ffff | u64::from(bytes) << 32),
        About::Signal { id, least } => (2, id, least),
        About::Counter { id, least } => (3, id, least),
    };
    note_numbers(context, function, status, kind, id, argument);
}

#[cold]
#[inline(never)]
fn note_numbers(context: Context<'_>, function: u8, status: Status, kind: u32, id: u32, argument: u64) {
    let about = match kind {
        1 => About::Post { peer: id, action: argument },
        2 => About::Signal { id, least: argument },
        3 => About::Counter { id, least: argument },
        4 => About::Value { peer: id, action: argument, bytes: (argument >> 32) as u32 },
        _ => About::Context,
    };
    let ext = context.ext;
    // A program that isolates peers expects losses.
    if ext.failure_offset == 0 || status == Status::PeerLost {
        return;
    }
    let place = ext.abort_flag.wrapping_byte_add(ext.failure_offset as usize).cast::<*mut u8>();
    // SAFETY: the host has placed an aligned address there, constant as long as the context.
    let record = unsafe { *place };
    // SAFETY: the host keeps the aligned record there as long as the context; all accesses are atomic.
    let word = |offset: usize| unsafe { AtomicU64::from_ptr(record.wrapping_add(offset).cast()) };
    let head = word(offset_of!(Record, head));
    // Only kernels write the record, so the exchange, which is atomic among them, gives it to one.
    if head.compare_exchange(0, Record::CLAIMED, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        return;
    }
    let found = Record::from(failure(context, function, about, status));
    word(offset_of!(Record, found)).store_external(found.found, Ordering::Relaxed);
    word(offset_of!(Record, least)).store_external(found.least, Ordering::Relaxed);
    word(offset_of!(Record, limit_ns)).store_external(found.limit_ns, Ordering::Relaxed);
    // Release: a host that sees this word sees the others.
    head.store_external(found.head, Ordering::Release);
}

/// Finds out what was wrong with a call.
pub(crate) fn failure(context: Context<'_>, function: u8, about: About, status: Status) -> Failure {
    let is_invalid = status == Status::InvalidArgument;
    let subject = match about {
        About::Context => Subject::Context,
        About::Post { peer, action } if is_invalid => wrong_post(context, peer, Action::from_bits(action), None),
        About::Value { peer, action, bytes } if is_invalid => {
            wrong_post(context, peer, Action::from_bits(action), Some(bytes))
        }
        About::Post { peer, .. } | About::Value { peer, .. } => Subject::Peer(peer),
        About::Signal { id, least } => match context.read_signal(id) {
            Ok(count) if !is_invalid => Subject::Signal { id, count, least },
            _ if id < context.signals() => Subject::Context,
            _ => Subject::NoSignal { id, signals: context.signals() },
        },
        About::Counter { id, least } => match context.read_counter(id) {
            Ok(count) if !is_invalid => Subject::Counter { id, count, least },
            _ if id < context.ext.routes.n_counters => Subject::Context,
            _ => Subject::NoCounter { id, counters: context.ext.routes.n_counters },
        },
    };
    let limit_ns = context.timeout_word().load_external(Ordering::Relaxed);
    Failure { function, status: status as u8, subject, limit_ns }
}

/// Says which argument of a post, of a value of that size or of other bytes, is invalid.
fn wrong_post(context: Context<'_>, peer: u32, action: Action, value: Option<u32>) -> Subject {
    let (ranks, counters) = (context.nranks(), context.ext.routes.n_counters);
    let (signal, counter) = (action.signal_slot(), action.counter_slot());
    if peer >= ranks {
        Subject::NoPeer { peer, ranks }
    } else if counter > counters {
        Subject::NoCounter { id: counter - 1, counters }
    } else if signal != 0 && !context.peer_has_signal(peer, signal - 1) {
        Subject::NoPeerSignal { peer, id: signal - 1 }
    } else if let Some(bytes) = value.filter(|bytes| !matches!(bytes, 1 | 2 | 4 | 8)) {
        Subject::ValueSize { peer, bytes }
    } else if value.is_some() && counter != 0 {
        Subject::ValueCounter { peer }
    } else {
        Subject::Peer(peer)
    }
}
