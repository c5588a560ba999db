//! C interfaces: the logger, and reads of memory that a plugin returns.

use ferrogin_ffi::nccl;
use std::ffi::{CStr, c_char, c_int, c_ulong};

#[allow(clashing_extern_declarations)]
unsafe extern "C" {
    /// Defined in logger.c.
    pub fn mini_nccl_logger(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, format: *const c_char, ...);
}

/// The logger for `init`.
pub const LOGGER: nccl::DebugLogger = Some(mini_nccl_logger);

/// Called by logger.c with a formatted line.
#[unsafe(no_mangle)]
extern "C" fn mini_nccl_log_line(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, text: *const c_char) {
    crate::log::push(crate::log::Line {
        level,
        subsystems: flags,
        file: text_of(file).unwrap_or_default(),
        line,
        text: text_of(text).unwrap_or_default(),
        thread: std::thread::current().id(),
    });
}

/// Copies a C string from a plugin or logger.c; `None` if the pointer is null.
pub fn text_of(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the pointer is not null. The plugin's names are NUL-terminated constants, and logger.c passes
    // NUL-terminated strings that live until the call returns.
    Some(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// Copies a struct that a plugin returned by pointer; `None` if the pointer is null or misaligned.
pub fn read<T: Copy>(pointer: *const T) -> Option<T> {
    if pointer.is_null() || !pointer.is_aligned() {
        return None;
    }
    // SAFETY: the pointer is aligned and not null. By NCCL's contract it is a `T` that the plugin keeps until the
    // call's object is closed, which is after this copy.
    Some(unsafe { *pointer })
}
