//! How many receives the signal proxy posts.
//!
//! Every write with immediate data and every send consumes a posted receive. If none is posted, the receiver's card refuses the
//! request and the sender's card retries it. So the posted receives are credits that all senders share, and no sender counts
//! them. A completion queue with as many entries as there are receives never overflows.

/// A queue pair's receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Receives {
    depth: u32,
    batch: u32,
    posted: u32,
}

impl Receives {
    /// Creates a queue of `depth` receives, none of them posted. They are reposted `batch` at a time, and at least half of the queue
    /// stays posted while the signal proxy keeps up.
    pub const fn new(depth: u32, batch: u32) -> Self {
        let most = if depth / 2 > 1 { depth / 2 } else { 1 };
        let batch = if batch == 0 {
            1
        } else if batch > most {
            most
        } else {
            batch
        };
        Self { depth, batch, posted: 0 }
    }

    /// Returns how many posted receives no completion has consumed yet.
    pub const fn posted(&self) -> u32 {
        self.posted
    }

    /// Consumes the receive of one completion. Returns false if none was posted: the completion is invalid.
    #[must_use]
    pub const fn take(&mut self) -> bool {
        match self.posted.checked_sub(1) {
            Some(left) => {
                self.posted = left;
                true
            }
            None => false,
        }
    }

    /// Returns how many receives the caller posts now. With `idle`, the batch needn't be full: the signal proxy is about to sleep.
    #[must_use]
    pub const fn refill(&mut self, idle: bool) -> u32 {
        let missing = self.depth - self.posted;
        if missing < self.batch && !idle {
            return 0;
        }
        self.posted = self.depth;
        missing
    }
}
