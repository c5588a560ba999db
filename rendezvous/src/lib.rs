#![doc = include_str!("../README.md")]
//!
//! A [ring](ring::Ring) connects ranks that have the handles of all ranks. NCCL passes handles between the ranks of the plugin; the ranks
//! of other programs meet at rank 0 for them ([`Exchange`]), and [`Bootstrap`] does both steps. Both ends of each stream have proved to
//! each other that they know a secret ([`proof`]). [`interface`] chooses the address of a listener as NCCL does. [`Identity`] reads the
//! variables of launchers.

mod claim;
mod dial;
mod error;
mod frame;
mod identity;
pub mod interface;
mod listener;
mod meet;
mod own_file;
pub mod proof;
pub mod ring;
mod secret;
pub mod stream;

pub use claim::Claim;
pub use dial::{Address, Dial};
pub use error::BootstrapError;
pub use identity::Identity;
pub use listener::Listener;
pub use meet::Exchange;
pub use own_file::open_own_file;
pub use secret::Secret;
pub use stream::Stream;

use ring::{Ring, Step};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A rank's part of a job whose ranks exchange blocks. Its calls are collective: all ranks make the same calls in the same order.
#[derive(Debug)]
pub struct Bootstrap {
    rank: usize,
    nranks: usize,
    ring: Mutex<Ring>,
}

impl Bootstrap {
    fn new(ring: Ring) -> Bootstrap {
        Bootstrap { rank: ring.rank(), nranks: ring.nranks(), ring: Mutex::new(ring) }
    }

    /// A job of one rank.
    pub fn single() -> Bootstrap {
        Bootstrap::new(Ring::new(0, vec!["itself".into()], Duration::from_secs(60)))
    }

    /// A job whose `nranks` ranks are threads of this process: one element for each rank.
    ///
    /// # Panics
    /// The system has no sockets left for this process.
    pub fn threads(nranks: usize, timeout: Duration) -> Vec<Bootstrap> {
        Ring::threads(nranks, timeout).expect("two sockets for each rank").into_iter().map(Bootstrap::new).collect()
    }

    /// Joins the job of a launcher's variables; without a launcher it is a job of one rank.
    ///
    /// # Errors
    /// The variables are wrong, or a rank does not connect before `timeout`.
    pub fn from_env(timeout: Duration) -> Result<Bootstrap, BootstrapError> {
        match Identity::from_env()? {
            Some(identity) => Bootstrap::join(&identity, timeout),
            None => Ok(Bootstrap::single().with_timeout(timeout)),
        }
    }

    /// Meets the other ranks at the identity's address, and connects to the neighbours.
    ///
    /// # Errors
    /// There is no such rank, an address is unusable, or a rank does not connect before `timeout`.
    pub fn join(identity: &Identity, timeout: Duration) -> Result<Bootstrap, BootstrapError> {
        let exchange = Exchange::open(identity, timeout)?;
        let listener = ring::Listener::open()?;
        let blocks = exchange.finish(&listener.handle())?;
        // A block of another size is no handle of any rank.
        let handles: Vec<_> = blocks.iter().map(|block| block.as_slice().try_into().unwrap_or([0; _])).collect();
        Ok(Bootstrap::new(Ring::connect(&listener, &handles, identity.rank, timeout)?))
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.ring().timeout = timeout;
        self
    }

    /// The timeout of calls.
    pub fn timeout(&self) -> Duration {
        self.ring().timeout
    }

    /// Returns the `block` of each rank, by rank. Blocks may differ in size.
    ///
    /// # Errors
    /// A rank ended, or did not call before the timeout. Later calls fail too.
    pub fn allgather(&self, block: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        Ok(self.ring().allgather(Step::Bootstrap, Some(block))?)
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
