#![doc = include_str!("../README.md")]
//!
//! A [`Stream`] carries frames between two ranks that have proved to each other that they know a secret ([`proof`]): a [`Listener`]
//! accepts it, a [`Dial`] makes it. [`interface`] chooses the address of a listener as NCCL does. The plugin's control plane and
//! [`Bootstrap`] are made of these. In a `Bootstrap`, rank 0 is the hub: it gathers a block from each rank and sends all blocks to each
//! rank. [`Identity`] reads the variables of launchers.

mod dial;
mod error;
mod frame;
mod hub;
mod identity;
pub mod interface;
mod listener;
mod meet;
mod own_file;
mod place;
pub mod proof;
pub mod ring;
mod secret;
pub mod stream;

pub use dial::{Address, Dial};
pub use error::BootstrapError;
pub use frame::{BODY_MAX, Frame, FrameKind};
pub use identity::Identity;
pub use listener::Listener;
pub use own_file::open_own_file;
pub use place::Place;
pub use secret::Secret;
pub use stream::{End, InvalidFrame, Stream};

use hub::Hub;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The largest number of ranks.
const RANKS_MAX: usize = 1 << 20;

/// A rank's part of the exchange. Its calls are collective: all ranks make the same calls in the same order.
#[derive(Debug)]
pub struct Bootstrap {
    rank: usize,
    nranks: usize,
    timeout: Duration,
    hub: Mutex<Hub>,
}

impl Bootstrap {
    fn new(rank: usize, nranks: usize, timeout: Duration, peers: Vec<Stream>) -> Bootstrap {
        Bootstrap { rank, nranks, timeout, hub: Mutex::new(Hub::new(rank, nranks, peers)) }
    }

    /// A job of one rank.
    pub fn single() -> Bootstrap {
        Bootstrap::new(0, 1, Duration::from_secs(60), Vec::new())
    }

    /// A job whose `nranks` ranks are threads of this process: one element for each rank.
    ///
    /// # Panics
    /// The system has no sockets left for this process.
    pub fn threads(nranks: usize, timeout: Duration) -> Vec<Bootstrap> {
        let hubs = Hub::threads(nranks).expect("two sockets for each rank");
        let make = |(rank, hub)| Bootstrap { rank, nranks, timeout, hub: Mutex::new(hub) };
        hubs.into_iter().enumerate().map(make).collect()
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
        if nranks > 1 && rank == 0 && identity.secret.is_none() && meet::is_tcp(&identity.address) {
            eprintln!(
                "ferrogin: any process that can connect to {} can take the place of a rank: set FERROGIN_SECRET on all ranks to the output of \
                 `openssl rand -hex 16`",
                identity.address
            );
        }
        let peers = match (nranks, rank) {
            (1, _) => Vec::new(),
            (_, 0) => meet::Meeting::open(identity, Instant::now(), timeout)?.finish()?,
            _ => vec![meet::connect(identity, timeout)?],
        };
        Ok(Bootstrap::new(rank, nranks, timeout, peers))
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
        self.hub.lock().unwrap_or_else(PoisonError::into_inner).allgather(block, self.timeout)
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
