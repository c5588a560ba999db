#![doc = include_str!("../README.md")]
//!
//! A [ring](ring::Ring) connects ranks that have all ranks' handles. For the plugin, NCCL passes the handles around;
//! the ranks of other programs exchange them through rank 0 ([`Exchange`]), and [`Bootstrap`] does both steps. The two
//! ends of a stream first prove to each other that they know a secret ([`proof`]). [`interface`] chooses a listener's
//! address the way NCCL does. [`Identity`] reads launchers' variables.

mod claim;
mod dial;
mod error;
mod frame;
mod identity;
pub mod interface;
mod listener;
mod meet;
mod own_file;
mod owner;
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
pub use secret::{Secret, random};
pub use stream::Stream;

use parking_lot::{Mutex, MutexGuard};
use ring::{Ring, Step};
use std::time::Duration;

/// A rank's place in a job whose ranks exchange blocks. The calls are collective: all ranks make the same calls in the
/// same order.
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

    /// Creates a job of one rank.
    pub fn single() -> Bootstrap {
        Bootstrap::new(Ring::new(0, vec!["itself".into()], Duration::from_secs(60)))
    }

    /// Creates a job whose `nranks` ranks are threads of this process. Returns one element per rank.
    ///
    /// # Panics
    /// This process can't open any more sockets.
    pub fn threads(nranks: usize, timeout: Duration) -> Vec<Bootstrap> {
        Ring::threads(nranks, timeout).expect("two sockets for each rank").into_iter().map(Bootstrap::new).collect()
    }

    /// Joins the job that a launcher's variables describe; without a launcher, a job of one rank.
    ///
    /// # Errors
    /// The variables are wrong, or a rank doesn't connect within `timeout`.
    pub fn from_env(timeout: Duration) -> Result<Bootstrap, BootstrapError> {
        match Identity::from_env()? {
            Some(identity) => Bootstrap::join(&identity, timeout),
            None => Ok(Bootstrap::single().with_timeout(timeout)),
        }
    }

    /// Meets the other ranks at the identity's address, then connects to the neighbours.
    ///
    /// # Errors
    /// The rank doesn't exist, an address is unusable, or a rank doesn't connect within `timeout`.
    pub fn join(identity: &Identity, timeout: Duration) -> Result<Bootstrap, BootstrapError> {
        let exchange = Exchange::open(identity, timeout)?;
        let listener = ring::Listener::open()?;
        let blocks = exchange.finish(&listener.handle())?;
        // A block of another size isn't any rank's handle.
        let handles: Vec<_> = blocks.iter().map(|block| block.as_slice().try_into().unwrap_or([0; _])).collect();
        Ok(Bootstrap::new(Ring::connect(&listener, &handles, identity.rank, timeout)?))
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock()
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn nranks(&self) -> usize {
        self.nranks
    }

    /// Changes the calls' timeout.
    pub fn with_timeout(self, timeout: Duration) -> Bootstrap {
        self.ring().timeout = timeout;
        self
    }

    /// Returns the calls' timeout.
    pub fn timeout(&self) -> Duration {
        self.ring().timeout
    }

    /// Returns every rank's `block`, in rank order. Blocks may differ in size.
    ///
    /// # Errors
    /// A rank exited, or didn't call before the timeout. Later calls fail too.
    pub fn allgather(&self, block: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        Ok(self.ring().allgather(Step::Bootstrap, Some(block))?)
    }

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// Those of [`allgather`](Bootstrap::allgather).
    pub fn barrier(&self) -> Result<(), BootstrapError> {
        self.allgather(&[]).map(drop)
    }

    /// Returns true, on every rank, if `own` is true on all ranks.
    ///
    /// # Errors
    /// Those of [`allgather`](Bootstrap::allgather).
    pub fn all(&self, own: bool) -> Result<bool, BootstrapError> {
        Ok(self.allgather(&[u8::from(own)])?.iter().all(|block| block == &[1]))
    }
}

#[cfg(test)]
mod tests;
