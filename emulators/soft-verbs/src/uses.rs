//! Counting the objects that use another one, and the turns of threads.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use soft_nic::log;

use crate::guard::Errno;

/// The number of open objects that use this one.
#[derive(Debug, Default)]
pub(crate) struct Uses(AtomicU32);

impl Uses {
    pub(crate) fn begin(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// # Errors
    /// `EBUSY` while some are open.
    pub(crate) fn none(&self) -> Result<(), Errno> {
        if self.0.load(Ordering::Acquire) == 0 { Ok(()) } else { Err(Errno::BUSY) }
    }
}

/// The turn of one thread over several calls: from `ibv_start_poll` to `ibv_end_poll`, from `ibv_wr_start` to `ibv_wr_complete`.
///
/// It keeps the calls of two threads apart. It guards no memory: locks that last for one call do.
#[derive(Debug, Default)]
pub(crate) struct Turn(AtomicBool);

/// Longest wait for another thread's turn. A program that forgets the last call must not hang.
const LIMIT: Duration = Duration::from_secs(10);

impl Turn {
    /// Waits for the turn of another thread to end. After ten seconds the turn is taken over, with a line in the log.
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
