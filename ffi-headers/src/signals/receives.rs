//! How many receives the signal proxy posts.
//!
//! Every write with immediate data and every send takes one posted receive. Where none is posted, the card of the receiver refuses the
//! request and the card of the sender retries it. So the posted receives are the credits of all senders together, and no sender
//! counts them. The completion queue needs as many entries as there are receives, so it never overflows.

/// The receives of one queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Receives {
    depth: u32,
    batch: u32,
    posted: u32,
}

impl Receives {
    /// A queue of `depth` receives, none of which is posted; they are posted again `batch` at a time, and at least half of the queue stays
    /// posted while the signal proxy keeps up.
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

    /// Posted receives that no completion has taken.
    pub const fn posted(&self) -> u32 {
        self.posted
    }

    /// Takes the receive of one completion. False where none was posted: the completion is invalid.
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

    /// The number of receives to post now; the caller posts them. With `idle` the batch need not be full: the signal proxy is about to sleep.
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
