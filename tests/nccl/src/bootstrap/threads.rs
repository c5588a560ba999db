//! Ranks that are threads of one process.

use crate::error::BootstrapError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One rank's place in the exchange; leaving it ends the exchange for all.
#[derive(Debug)]
pub struct Seat {
    rank: usize,
    table: Arc<Table>,
}

#[derive(Debug)]
struct Table {
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug)]
struct Round {
    number: u64,
    blocks: Vec<Option<Vec<u8>>>,
    /// Blocks of the round before, which ranks may still be taking.
    finished: Arc<Vec<Vec<u8>>>,
    gone: Option<usize>,
}

impl Seat {
    /// One seat for each of `n` ranks.
    pub fn row(n: usize) -> Vec<Seat> {
        let round = Round { number: 0, blocks: vec![None; n], finished: Arc::default(), gone: None };
        let table = Arc::new(Table { round: Mutex::new(round), changed: Condvar::new() });
        (0..n).map(|rank| Seat { rank, table: Arc::clone(&table) }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Round> {
        self.table.round.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`Bootstrap::allgather`](super::Bootstrap::allgather).
    pub fn allgather(&self, rank: usize, block: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let deadline = Instant::now() + timeout;
        let mut round = self.lock();
        let mine = round.number;
        round.blocks[rank] = Some(block.to_vec());
        if round.blocks.iter().all(Option::is_some) {
            let blocks = round.blocks.iter_mut().filter_map(Option::take).collect();
            round.finished = Arc::new(blocks);
            round.number += 1;
            self.table.changed.notify_all();
        }
        loop {
            if round.number != mine {
                return Ok(round.finished.to_vec());
            }
            if let Some(gone) = round.gone {
                let gone = format!("rank {gone} left the job");
                return Err(BootstrapError::PeerGone { rank, gone, step: "allgather" });
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                let missing: Vec<String> = (0..round.blocks.len())
                    .filter(|&r| round.blocks[r].is_none())
                    .map(|r| format!("rank {r}"))
                    .collect();
                let missing = missing.join(", ");
                return Err(BootstrapError::Timeout { rank, step: "allgather", missing, waited: timeout });
            };
            round = self.table.changed.wait_timeout(round, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.lock().gone.get_or_insert(self.rank);
        self.table.changed.notify_all();
    }
}
