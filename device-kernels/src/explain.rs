//! The text of a failed call on a CPU: what failed, why, and what to do.

use crate::context::Context;
use crate::context::failure::{self, About};
use crate::status::Status;
use ferrogin_ffi::ext::{HEADER_MAGIC, HEADER_VERSION, HandleHeader};
use ferrogin_ffi::failure::STATUS_NAMES;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

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
    set(&format!("rank {}: {}", context.rank(), failure::failure(context, function, about, status)));
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
