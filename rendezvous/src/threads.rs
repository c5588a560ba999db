//! Ranks that are threads of one process.

use crate::error::BootstrapError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One rank's part of the exchange. Dropping it ends the exchange for all ranks.
#[derive(Debug)]
pub struct Member {
    rank: usize,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug)]
struct Round {
    number: u64,
    blocks: Vec<Option<Vec<u8>>>,
    /// Blocks of the previous round, which slower ranks still read.
    finished: Arc<Vec<Vec<u8>>>,
    left: Option<usize>,
}

impl Member {
    /// One member for each of `n` ranks.
    pub fn all(n: usize) -> Vec<Member> {
        let round = Round { number: 0, blocks: vec![None; n], finished: Arc::default(), left: None };
        let shared = Arc::new(Shared { round: Mutex::new(round), changed: Condvar::new() });
        (0..n).map(|rank| Member { rank, shared: Arc::clone(&shared) }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Round> {
        self.shared.round.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`Bootstrap::allgather`](super::Bootstrap::allgather).
    pub fn allgather(&self, rank: usize, block: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let deadline = Instant::now() + timeout;
        let mut round = self.lock();
        let own = round.number;
        round.blocks[rank] = Some(block.to_vec());
        if round.blocks.iter().all(Option::is_some) {
            let blocks = round.blocks.iter_mut().filter_map(Option::take).collect();
            round.finished = Arc::new(blocks);
            round.number += 1;
            self.shared.changed.notify_all();
        }
        loop {
            if round.number != own {
                return Ok(round.finished.to_vec());
            }
            if let Some(left) = round.left {
                let event = format!("rank {left} left the job");
                return Err(BootstrapError::PeerClosed { rank, event, step: "allgather" });
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                let missing: Vec<String> = (0..round.blocks.len())
                    .filter(|&r| round.blocks[r].is_none())
                    .map(|r| format!("rank {r}"))
                    .collect();
                let missing = missing.join(", ");
                return Err(BootstrapError::Timeout { rank, step: "allgather", missing, waited: timeout });
            };
            round = self.shared.changed.wait_timeout(round, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.lock().left.get_or_insert(self.rank);
        self.shared.changed.notify_all();
    }
}
