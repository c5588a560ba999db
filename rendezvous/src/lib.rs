#![doc = include_str!("../README.md")]
//!
//! Rank 0 is the hub: it gathers a block from each rank and sends all blocks to each rank. [`Identity`] reads the variables of
//! launchers.

mod connection;
mod error;
mod hub;
mod identity;
mod message;
mod rendezvous;
mod threads;

pub use error::BootstrapError;
pub use identity::Identity;

use std::time::Duration;

/// The largest number of ranks.
const RANKS_MAX: usize = 1 << 20;

/// A rank's part of the exchange. Its calls are collective: all ranks make the same calls in the same order.
#[derive(Debug)]
pub struct Bootstrap {
    rank: usize,
    nranks: usize,
    timeout: Duration,
    transport: Transport,
}

#[derive(Debug)]
enum Transport {
    Single,
    Sockets(hub::Sockets),
    Threads(threads::Member),
}

impl Bootstrap {
    /// A job of one rank.
    pub fn single() -> Bootstrap {
        Bootstrap { rank: 0, nranks: 1, timeout: Duration::from_secs(60), transport: Transport::Single }
    }

    /// A job whose `nranks` ranks are threads of this process: one element for each rank.
    pub fn threads(nranks: usize, timeout: Duration) -> Vec<Bootstrap> {
        let members = threads::Member::all(nranks);
        let make = |(rank, member)| Bootstrap { rank, nranks, timeout, transport: Transport::Threads(member) };
        members.into_iter().enumerate().map(make).collect()
    }

    /// Joins the job of a launcher's variables; without a launcher it is a job of one rank.
    ///
    /// # Errors
    /// The variables are wrong, or a rank does not connect before `timeout`.
    pub fn from_env(timeout: Duration) -> Result<Bootstrap, BootstrapError> {
        match Identity::from_env()? {
            Some(identity) => Bootstrap::join(&identity, timeout),
            None => Ok(Bootstrap { timeout, ..Bootstrap::single() }),
        }
    }

    /// Connects to the other ranks at the identity's address.
    ///
    /// # Errors
    /// There is no such rank, the address is unusable, or a rank does not connect before `timeout`.
    pub fn join(identity: &Identity, timeout: Duration) -> Result<Bootstrap, BootstrapError> {
        let &Identity { rank, nranks, .. } = identity;
        if rank >= nranks || nranks > RANKS_MAX {
            return Err(BootstrapError::Environment(format!(
                "rank {rank} is not one of {nranks} ranks (at least 1, at most {RANKS_MAX})"
            )));
        }
        let transport = match nranks {
            1 => Transport::Single,
            _ => Transport::Sockets(hub::Sockets::connect(identity, timeout)?),
        };
        Ok(Bootstrap { rank, nranks, timeout, transport })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn nranks(&self) -> usize {
        self.nranks
    }

    /// Changes the timeout of calls.
    pub fn with_timeout(self, timeout: Duration) -> Bootstrap {
        Bootstrap { timeout, ..self }
    }

    /// The timeout of calls.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the `block` of each rank, by rank. Blocks may differ in size.
    ///
    /// # Errors
    /// A rank ended, or did not call before the timeout. Later calls fail too.
    pub fn allgather(&self, block: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        match &self.transport {
            Transport::Single => Ok(vec![block.to_vec()]),
            Transport::Sockets(sockets) => sockets.allgather(block, self.timeout),
            Transport::Threads(member) => member.allgather(self.rank, block, self.timeout),
        }
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// Those of [`allgather`](Bootstrap::allgather).
    pub fn barrier(&self) -> Result<(), BootstrapError> {
        self.allgather(&[]).map(drop)
    }

    /// True on each rank if `own` is true on all ranks.
    ///
    /// # Errors
    /// Those of [`allgather`](Bootstrap::allgather).
    pub fn all(&self, own: bool) -> Result<bool, BootstrapError> {
        Ok(self.allgather(&[u8::from(own)])?.iter().all(|block| block == &[1]))
    }
}

#[cfg(test)]
mod tests;
