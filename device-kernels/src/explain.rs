//! The text of a failed call on a CPU: what failed, why, and what to do.

use crate::action::Action;
use crate::context::Context;
use crate::failure::About;
use crate::status::Status;
use crate::sync::Ordering;
use ferrogin_ffi::ext::{HEADER_MAGIC, HEADER_VERSION, HandleHeader};
use ferrogin_ffi::failure::{FUNCTIONS, STATUS_NAMES};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::time::Duration;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Sets the text of this thread's last error.
pub fn set(text: &str) {
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    let _ = LAST.try_with(|last| last.replace(text));
}

/// Returns the text of this thread's last error, valid until its next error; empty without one.
pub fn last() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Returns the name of a status.
pub fn status_name(status: i32) -> &'static CStr {
    usize::try_from(status).ok().and_then(|status| STATUS_NAMES.get(status).copied()).unwrap_or(c"unknown status")
}

/// Keeps the text of a failed call.
#[cold]
#[inline(never)]
pub(crate) fn keep(context: Context<'_>, function: u8, about: About, status: Status) {
    let function = FUNCTIONS.get(usize::from(function)).unwrap_or(&FUNCTIONS[0]);
    let name = status_name(status as i32).to_string_lossy();
    set(&format!("rank {}: {function} returned {name}: {}", context.rank(), reason(context, about, status)));
}

const NEW_CONTEXT: &str = "destroy the context on all ranks and create it again";

fn reason(context: Context<'_>, about: About, status: Status) -> String {
    match (status, about) {
        (Status::InvalidArgument, About::Post { peer, action }) => wrong_post(context, peer, Action::from_bits(action)),
        (Status::InvalidArgument, About::Signal { id, .. }) => missing("signal", id, context.signals()),
        (Status::InvalidArgument, About::Counter { id, .. }) => missing("counter", id, context.ext.routes.n_counters),
        (Status::InvalidArgument, About::Context) => {
            "an argument is invalid: compare it with ferrogin/gin.h".to_owned()
        }
        (Status::Unsupported, _) => {
            "the card has no strong signals and no signals in windows: set FERROGIN_SIGNALS=emulated".to_owned()
        }
        (Status::Timeout, about) => timeout(context, about),
        (Status::Aborted, _) => format!("a request failed or a rank ended, as standard error says: {NEW_CONTEXT}"),
        (Status::CardError, _) => format!("the card failed a request, as standard error says: {NEW_CONTEXT}"),
        (Status::Poisoned, _) => format!("an earlier operation failed: {NEW_CONTEXT}"),
    }
}

fn timeout(context: Context<'_>, about: About) -> String {
    let limit = Duration::from_nanos(context.timeout_word().load(Ordering::Relaxed));
    match about {
        About::Signal { id, least } => {
            let count = context.read_signal(id).unwrap_or(0);
            format!("signal {id} is {count}, and not {least}, after {limit:?}: check that the peer runs and raises it")
        }
        About::Counter { id, least } => {
            let count = context.read_counter(id).unwrap_or(0);
            format!("counter {id} is {count}, and not {least}, after {limit:?}: check that the operations name it")
        }
        About::Post { peer, .. } => format!("no room in the queue after {limit:?}: check that rank {peer} runs"),
        About::Context => format!("not all operations completed within {limit:?}: check that the peers run"),
    }
}

/// Says why the arguments of a post are invalid.
fn wrong_post(context: Context<'_>, peer: u32, action: Action) -> String {
    let (ranks, counters) = (context.nranks(), context.ext.routes.n_counters);
    let (signal, counter) = (action.signal_slot(), action.counter_slot());
    if peer >= ranks {
        match ranks {
            1 => "there is only one rank, so the peer must be 0".to_owned(),
            _ => format!("peer {peer} does not exist: the ranks are 0 to {}", ranks - 1),
        }
    } else if counter != 0 && counter > counters {
        missing("counter", counter - 1, counters)
    } else if signal != 0 && !context.peer_has_signal(peer, signal - 1) {
        let id = signal - 1;
        format!("rank {peer} has no signal {id}: create its context with at least {} signals", id + 1)
    } else {
        "the window is NULL, a value doesn't have 1, 2, 4 or 8 bytes or names a counter, or a signal's word isn't aligned".to_owned()
    }
}

fn missing(kind: &str, id: u32, n: u32) -> String {
    match n {
        0 => format!("the context has no {kind}s: create it with at least {}", u64::from(id) + 1),
        _ => format!("the context has no {kind} {id}: it has {n}, from 0 to {}", n - 1),
    }
}

/// Keeps the text of a failed `fgin_open`.
pub(crate) fn keep_open(header: Option<HandleHeader>, id: u32, status: Status) {
    let reason = match header {
        None => "the handle or out is NULL".to_owned(),
        Some(header) if header.magic != HEADER_MAGIC => {
            "this is not a handle of ferrogin: pass ferrogin_context_handle, or what createContext returned".to_owned()
        }
        Some(header) if header.version != HEADER_VERSION => format!(
            "the handle has version {}, and this program was built for version {HEADER_VERSION} (FGIN_HEADER_VERSION): build it with the \
             headers and libraries of the ferrogin that runs",
            header.version
        ),
        Some(header) => format!("context {id} does not exist: there are {}, from 0", header.n_contexts),
    };
    set(&format!("fgin_open returned {}: {reason}", status_name(status as i32).to_string_lossy()));
}
