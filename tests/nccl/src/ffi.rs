//! The C half: the logger's entry, and the one place that dereferences what a plugin returns.

use ferrogin_ffi::nccl;
use std::ffi::{CStr, c_char, c_int, c_ulong};

#[allow(clashing_extern_declarations)]
unsafe extern "C" {
    /// Defined in logger.c.
    pub fn mini_nccl_logger(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, format: *const c_char, ...);
}

/// The logger to hand to `init`.
pub const LOGGER: nccl::DebugLogger = Some(mini_nccl_logger);

/// Called by logger.c with the formatted line.
#[unsafe(no_mangle)]
extern "C" fn mini_nccl_log_line(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, text: *const c_char) {
    crate::log::push(crate::log::Line {
        level,
        subsystems: flags,
        file: text_of(file).unwrap_or_default(),
        line,
        text: text_of(text).unwrap_or_default(),
    });
}

/// Copies a C string that a plugin, or our logger, owns; `None` if the pointer is null.
pub fn text_of(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the contract says that these pointers are NUL-terminated strings that live as long as the plugin (names)
    // or the call (log lines).
    Some(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// Copies a struct that a plugin returned by pointer; `None` if the pointer is null or misaligned.
pub fn read<T: Copy>(pointer: *const T) -> Option<T> {
    if pointer.is_null() || !pointer.is_aligned() {
        return None;
    }
    // SAFETY: not null, aligned, and by the contract a `T` that lives until the object it came with is destroyed.
    Some(unsafe { *pointer })
}
