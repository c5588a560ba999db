//! Threads' turns.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use soft_nic::log;

/// One thread's turn over several calls: from `ibv_start_poll` to `ibv_end_poll`, or from `ibv_wr_start` to
/// `ibv_wr_complete`.
///
/// It keeps two threads' call sequences apart. It guards no memory; the locks inside each call do that.
#[derive(Debug, Default)]
pub(crate) struct Turn(AtomicBool);

/// How long to wait for another thread's turn. A program that forgets the last call mustn't hang.
const LIMIT: Duration = Duration::from_secs(10);

impl Turn {
    /// Begins this thread's turn once another thread's has ended. After ten seconds, takes it over and logs that.
    pub(crate) fn begin(&self, first: &str, last: &str) {
        let mut since = None;
        while self.0.swap(true, Ordering::Acquire) {
            let since = *since.get_or_insert_with(Instant::now);
            if since.elapsed() > LIMIT {
                log::line(format_args!(
                    "softefa: {first}: no {last} followed an earlier {first} for 10 s; call {last} after each \
                     {first} that succeeds"
                ));
                return;
            }
            std::thread::yield_now();
        }
    }

    pub(crate) fn end(&self) {
        self.0.store(false, Ordering::Release);
    }
}
