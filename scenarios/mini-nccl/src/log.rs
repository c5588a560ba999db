//! The debug logger: collects a plugin's lines, and prints them as NCCL does.
//!
//! NCCL's logger has no user pointer, so all ranks of a process share one log. NCCL_DEBUG (NONE, WARN, INFO, TRACE;
//! default WARN) selects the lines that go to standard error. The log keeps all lines, up to [`CAPACITY`].

use ferrogin_ffi::nccl;
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::ffi::{c_int, c_ulong};
use std::io::Write;
use std::sync::OnceLock;
use std::thread::{self, ThreadId};

/// How many lines the log keeps; older ones are dropped.
pub const CAPACITY: usize = 4096;

/// One line of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// `ncclDebugLogLevel`.
    pub level: c_int,
    /// NCCL_DEBUG_SUBSYS bits.
    pub subsystems: c_ulong,
    /// The plugin's source file.
    pub file: String,
    /// The line in the source file.
    pub line: c_int,
    /// The formatted message.
    pub text: String,
    /// The thread that wrote it.
    pub thread: ThreadId,
}

impl Line {
    /// Returns true for a WARN line.
    pub fn is_warn(&self) -> bool {
        self.level == nccl::LOG_WARN
    }
}

static LINES: Mutex<VecDeque<Line>> = Mutex::new(VecDeque::new());

fn lines() -> MutexGuard<'static, VecDeque<Line>> {
    LINES.lock()
}

fn printed_level() -> c_int {
    static LEVEL: OnceLock<c_int> = OnceLock::new();
    *LEVEL.get_or_init(|| match std::env::var("NCCL_DEBUG").unwrap_or_default().to_ascii_uppercase().as_str() {
        "NONE" => 0,
        "INFO" => nccl::LOG_INFO,
        "TRACE" | "ABORT" => nccl::LOG_TRACE,
        _ => nccl::LOG_WARN,
    })
}

pub(crate) fn push(line: Line) {
    if line.level <= printed_level() {
        let name = match line.level {
            nccl::LOG_WARN => "WARN",
            nccl::LOG_INFO => "INFO",
            _ => "TRACE",
        };
        // One write per line, so that lines from several ranks don't mix.
        let whole = format!("{} NCCL {name} {}\n", std::process::id(), line.text);
        let _ = std::io::stderr().write_all(whole.as_bytes());
    }
    let mut lines = lines();
    if lines.len() == CAPACITY {
        lines.pop_front();
    }
    lines.push_back(line);
}

/// Returns all lines in the log.
pub fn all() -> Vec<Line> {
    lines().iter().cloned().collect()
}

/// Removes and returns all lines in the log.
pub fn take() -> Vec<Line> {
    lines().drain(..).collect()
}

/// Returns the newest WARN line in the log. Skips a kernel's failure line, which says less than the card's report and
/// may come before or after it.
pub fn last_warn() -> Option<String> {
    let is_report = |line: &&Line| line.is_warn() && !line.text.contains("the first failure of a kernel");
    lines().iter().rev().find(is_report).map(|line| line.text.clone())
}

/// Returns the newest WARN line from the calling thread: it's about the call that failed here, not about another rank
/// in this process.
pub(crate) fn last_warn_of_this_thread() -> Option<String> {
    let is_own = |line: &&Line| line.is_warn() && line.thread == thread::current().id();
    lines().iter().rev().find(is_own).map(|line| line.text.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(unsafe_code)]
    fn c_logger_formats_and_collects_lines() {
        let logger = crate::ffi::LOGGER.expect("the logger");
        // SAFETY: the arguments match the conversions of the format.
        unsafe {
            logger(
                nccl::LOG_WARN,
                nccl::SUBSYS_NET,
                c"file.rs".as_ptr(),
                7,
                c"peer %d of %s".as_ptr(),
                3,
                c"x".as_ptr(),
            )
        };
        let got = take();
        let line = got.iter().find(|line| line.text == "peer 3 of x").expect("the line was collected");
        assert!(line.is_warn());
        assert_eq!((line.file.as_str(), line.line, line.subsystems), ("file.rs", 7, nccl::SUBSYS_NET));
    }
}
