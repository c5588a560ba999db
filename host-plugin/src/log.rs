//! Logs to NCCL's logger, or to standard error if NCCL passed none.
//!
//! Each failed call writes one WARN line, when it returns to NCCL (see [`crate::abi`]).
#![allow(unsafe_code)]

use ferrogin_ffi::nccl::{self, DebugLogger};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::CString;
use std::fmt::Arguments;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Address of the logger that NCCL passed to the latest `init`, or 0. NCCL passes the same function each time, and
/// passes no context to calls such as `devices`.
static LOGGER: AtomicUsize = AtomicUsize::new(0);

/// The level of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// A failure.
    Warn,
    /// A fact about set-up.
    Info,
    /// A detail, for debugging.
    Trace,
}

/// Sends later lines to `logger`; `None` keeps the current logger.
pub fn set(logger: DebugLogger) {
    if let Some(function) = logger {
        LOGGER.store(function as usize, Ordering::Release);
    }
}

/// Returns the logger's address, if NCCL passed one.
pub fn logger() -> Option<usize> {
    Some(LOGGER.load(Ordering::Acquire)).filter(|address| *address != 0)
}

/// Writes one line. `file` and `line` say where it comes from in the plugin's source.
pub fn write(level: Level, file: &'static str, line: u32, message: Arguments<'_>) {
    let Some(address) = logger() else {
        if level == Level::Warn {
            // One write, so that lines of several processes don't mix.
            let line = format!("ferrogin WARN {message}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
        return;
    };
    let (level, subsystem) = match level {
        Level::Warn => (nccl::LOG_WARN, nccl::SUBSYS_INIT | nccl::SUBSYS_NET),
        Level::Info => (nccl::LOG_INFO, nccl::SUBSYS_INIT | nccl::SUBSYS_NET),
        Level::Trace => (nccl::LOG_TRACE, nccl::SUBSYS_NET),
    };
    let text = CString::new(format!("GIN/ferrogin: {message}").replace('\0', "?")).unwrap_or_default();
    let file = CString::new(file).unwrap_or_default();
    // SAFETY: `address` is not 0, and `set` stores only the addresses of `DebugLogger` functions.
    let logger: DebugLogger = unsafe { std::mem::transmute::<usize, DebugLogger>(address) };
    let Some(logger) = logger else { return };
    // SAFETY: NCCL's logger takes a printf format and its arguments. The format "%s" takes one NUL-terminated string,
    // and `text` lives until the call returns.
    unsafe { logger(level, subsystem, file.as_ptr(), line as i32, c"%s".as_ptr(), text.as_ptr()) };
}

/// Formats a number and what it counts: "1 rail", "2 rails".
pub fn counted(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Returns true for the process's first call with this message and card. A message that isn't about a card passes "".
pub fn first_time(message: &'static str, card: &str) -> bool {
    static REPORTED: Mutex<BTreeSet<(&'static str, String)>> = Mutex::new(BTreeSet::new());
    REPORTED.lock().insert((message, card.to_owned()))
}

/// Writes a line that NCCL always shows: the failure, its cause and the fix.
#[macro_export]
macro_rules! warn {
    ($($arg:tt)*) => { $crate::log::write($crate::log::Level::Warn, file!(), line!(), format_args!($($arg)*)) };
}

/// Writes a line that NCCL shows with NCCL_DEBUG=INFO.
#[macro_export]
macro_rules! info {
    ($($arg:tt)*) => { $crate::log::write($crate::log::Level::Info, file!(), line!(), format_args!($($arg)*)) };
}

/// Writes a line that NCCL shows with NCCL_DEBUG=TRACE.
#[macro_export]
macro_rules! trace {
    ($($arg:tt)*) => { $crate::log::write($crate::log::Level::Trace, file!(), line!(), format_args!($($arg)*)) };
}
