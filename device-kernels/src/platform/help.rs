//! What a waiting CPU thread does for the software card: it has the processor, which on a small machine the card's own
//! thread would have to be given first, and then it again.
//!
//! The card's library exports a function for it. It is found by name, because the card is loaded by libfabric, a process
//! may hold several copies of this crate, and handles have no room for it.

use core::ffi::{CStr, c_void};
use std::sync::OnceLock;

/// Lets what is waited for make a step in the calling thread; false where that is needless. It returns soon, takes any
/// number of threads at once, and does not unwind.
pub type Help = extern "C" fn() -> bool;

/// The soname of the software card.
pub const LIBRARY: &CStr = c"libsoftefa-fi.so";
/// A [`Help`] that it exports.
pub const FUNCTION: &CStr = c"softefa_help";

static HELP: OnceLock<Option<Help>> = OnceLock::new();

/// Says who is helped, for programs that have the card linked in. False when that was settled before, by an earlier call
/// or by the first wait.
pub fn set(help: Help) -> bool {
    HELP.set(Some(help)).is_ok()
}

/// Helps, if there is somebody to be helped. Looked for once: whoever waits has queues, so the card of these queues is
/// loaded.
pub(super) fn help() -> bool {
    HELP.get_or_init(find).is_some_and(|help| help())
}

fn find() -> Option<Help> {
    // SAFETY: with RTLD_NOLOAD nothing is loaded and no initialiser runs. The card's library is never unloaded.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: a live handle and a terminated name.
    let function = unsafe { libc::dlsym(library, FUNCTION.as_ptr()) };
    // SAFETY: null or what the card exports under this name, which has this type.
    unsafe { core::mem::transmute::<*mut c_void, Option<Help>>(function) }
}
