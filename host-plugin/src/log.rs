//! NCCL's logger, or standard error where NCCL gave none.
//!
//! One failure makes one WARN line, written where the call leaves the plugin (see [`crate::abi`]); everything else is
//! INFO or TRACE.
#![allow(unsafe_code)]

use ferrogin_ffi::nccl::{self, DebugLogger};
use std::ffi::CString;
use std::fmt::Arguments;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Address of the function that NCCL passed to the latest `init`, or 0. NCCL passes the same one every time; calls such
/// as `devices` bring no context to find another by.
static LOGGER: AtomicUsize = AtomicUsize::new(0);

/// How loud a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Something failed.
    Warn,
    /// Set-up facts that a user may want to see.
    Info,
    /// Every call.
    Trace,
}

/// Sends later lines to `logger`; `None` keeps the one there is.
pub fn set(logger: DebugLogger) {
    if let Some(function) = logger {
        LOGGER.store(function as usize, Ordering::Release);
    }
}

/// Writes one line. `file` and `line` say where in the plugin it comes from.
pub fn write(level: Level, file: &'static str, line: u32, message: Arguments<'_>) {
    let address = LOGGER.load(Ordering::Acquire);
    if address == 0 {
        if level == Level::Warn {
            eprintln!("ferrogin WARN {message}");
        }
        return;
    }
    let (level, subsystem) = match level {
        Level::Warn => (nccl::LOG_WARN, nccl::SUBSYS_INIT | nccl::SUBSYS_NET),
        Level::Info => (nccl::LOG_INFO, nccl::SUBSYS_INIT | nccl::SUBSYS_NET),
        Level::Trace => (nccl::LOG_TRACE, nccl::SUBSYS_NET),
    };
    let text = CString::new(format!("GIN/ferrogin: {message}").replace('\0', "?")).unwrap_or_default();
    let file = CString::new(file).unwrap_or_default();
    // SAFETY: the only value other than 0 ever stored is a `DebugLogger` function pointer, by `set`.
    let logger: DebugLogger = unsafe { std::mem::transmute::<usize, DebugLogger>(address) };
    let Some(logger) = logger else { return };
    // SAFETY: NCCL's logger takes a printf format and its arguments; "%s" takes one string, alive during the call.
    unsafe { logger(level, subsystem, file.as_ptr(), line as i32, c"%s".as_ptr(), text.as_ptr()) };
}

/// A line that is always shown: what failed, and what to do.
#[macro_export]
macro_rules! warn {
    ($($arg:tt)*) => { $crate::log::write($crate::log::Level::Warn, file!(), line!(), format_args!($($arg)*)) };
}

/// A line shown with NCCL_DEBUG=INFO.
#[macro_export]
macro_rules! info {
    ($($arg:tt)*) => { $crate::log::write($crate::log::Level::Info, file!(), line!(), format_args!($($arg)*)) };
}

/// A line shown with NCCL_DEBUG=TRACE.
#[macro_export]
macro_rules! trace {
    ($($arg:tt)*) => { $crate::log::write($crate::log::Level::Trace, file!(), line!(), format_args!($($arg)*)) };
}
