//! The out-of-band exchange between the ranks of a job: an allgather and a barrier, with deadlines.
//!
//! NCCL has such an exchange of its own and uses it for the 128-byte listen handles. Here ranks are processes that
//! our launcher or an mpirun started, or threads. Rank 0 is the hub: it gathers a block from each rank and sends all
//! of them to everyone. Nothing is put on the file system: within one host the ranks meet at an abstract Unix socket.
//!
//! | variable | meaning |
//! |---|---|
//! | FERROGIN_RANK, FERROGIN_NRANKS | set by the built-in launcher |
//! | OMPI_COMM_WORLD_RANK, …_SIZE; PMI_RANK, PMI_SIZE | set by an mpirun |
//! | FERROGIN_BOOTSTRAP | `host:port` of rank 0, or the name of an abstract Unix socket |

mod hub;
mod threads;

use crate::error::BootstrapError;
use std::time::Duration;

/// This rank's end of the exchange. Its calls are collective: every rank makes the same ones in the same order.
#[derive(Debug)]
pub struct Bootstrap {
    rank: usize,
    nranks: usize,
    timeout: Duration,
    link: Link,
}

#[derive(Debug)]
enum Link {
    Single,
    Sockets(hub::Sockets),
    Threads(threads::Seat),
}

/// Who this process is in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// This rank.
    pub rank: usize,
    /// Ranks of the job.
    pub nranks: usize,
    /// Where rank 0 listens: `host:port`, or the name of an abstract Unix socket.
    pub address: String,
}

impl Identity {
    /// Reads the environment that a launcher left, or `None` if none did.
    ///
    /// # Errors
    /// When it is incomplete or contradicts itself.
    pub fn from_env() -> Result<Option<Identity>, BootstrapError> {
        Identity::from_variables(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// The same from any source of variables; `get` answers `None` for one that is not set.
    ///
    /// # Errors
    /// As for [`from_env`](Identity::from_env).
    pub fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Identity>, BootstrapError> {
        const SOURCES: [(&str, &str); 3] = [
            ("FERROGIN_RANK", "FERROGIN_NRANKS"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("PMI_RANK", "PMI_SIZE"),
        ];
        let Some((rank_name, size_name)) = SOURCES.into_iter().find(|(rank, _)| get(rank).is_some()) else {
            return Ok(None);
        };
        let number = |name: &str| -> Result<usize, BootstrapError> {
            let value = get(name).ok_or_else(|| {
                BootstrapError::Environment(format!("{rank_name} is set but {name} is not: set both, or neither"))
            })?;
            value.parse().map_err(|_| BootstrapError::Environment(format!("{name}={value}: want a number")))
        };
        let (rank, nranks) = (number(rank_name)?, number(size_name)?);
        if rank >= nranks {
            return Err(BootstrapError::Environment(format!(
                "{rank_name}={rank} and {size_name}={nranks}: a rank is less than the number of ranks"
            )));
        }
        let address = match get("FERROGIN_BOOTSTRAP") {
            Some(address) => address,
            None => Identity::same_host_address(get, nranks)?,
        };
        Ok(Some(Identity { rank, nranks, address }))
    }

    /// The abstract name that the ranks of one mpirun on one host agree on by themselves.
    fn same_host_address(get: &dyn Fn(&str) -> Option<String>, nranks: usize) -> Result<String, BootstrapError> {
        if let Some(local) = get("OMPI_COMM_WORLD_LOCAL_SIZE").or_else(|| get("MPI_LOCALNRANKS"))
            && local != nranks.to_string()
        {
            return Err(BootstrapError::Environment(format!(
                "{local} of {nranks} ranks are on this host: set FERROGIN_BOOTSTRAP=host:port (a free port of rank 0's \
                 host), for example with mpirun -x FERROGIN_BOOTSTRAP=host:port"
            )));
        }
        let job = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"].into_iter().find_map(get);
        let job = job.unwrap_or_else(|| format!("parent-{}", std::os::unix::process::parent_id()));
        Ok(format!("ferrogin-bootstrap-{job}"))
    }
}

impl Bootstrap {
    /// A job of one rank.
    pub fn single() -> Bootstrap {
        Bootstrap { rank: 0, nranks: 1, timeout: Duration::from_secs(60), link: Link::Single }
    }

    /// A job whose `nranks` ranks are threads of this process: one element for each.
    pub fn threads(nranks: usize, timeout: Duration) -> Vec<Bootstrap> {
        let seats = threads::Seat::row(nranks);
        let make = |(rank, seat)| Bootstrap { rank, nranks, timeout, link: Link::Threads(seat) };
        seats.into_iter().enumerate().map(make).collect()
    }

    /// Joins the job that the environment describes; alone if it describes none.
    ///
    /// # Errors
    /// When the environment is wrong, or not all ranks have come before `timeout`.
    pub fn from_env(timeout: Duration) -> Result<Bootstrap, BootstrapError> {
        match Identity::from_env()? {
            Some(identity) => Bootstrap::join(&identity, timeout),
            None => Ok(Bootstrap { timeout, ..Bootstrap::single() }),
        }
    }

    /// Meets the other ranks at the identity's address.
    ///
    /// # Errors
    /// When the address cannot be used, or not all ranks have come before `timeout`.
    pub fn join(identity: &Identity, timeout: Duration) -> Result<Bootstrap, BootstrapError> {
        let &Identity { rank, nranks, .. } = identity;
        let link = match nranks {
            1 => Link::Single,
            _ => Link::Sockets(hub::Sockets::meet(identity, timeout)?),
        };
        Ok(Bootstrap { rank, nranks, timeout, link })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks of the job.
    pub fn nranks(&self) -> usize {
        self.nranks
    }

    /// The same with another time that calls wait for the other ranks.
    pub fn with_timeout(self, timeout: Duration) -> Bootstrap {
        Bootstrap { timeout, ..self }
    }

    /// Time that a call waits for the other ranks.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Gives every rank's `block`, in rank order. Blocks may differ in size.
    ///
    /// # Errors
    /// When a rank does not come in time, or has ended. The job is then over: later calls fail too.
    pub fn allgather(&self, block: &[u8]) -> Result<Vec<Vec<u8>>, BootstrapError> {
        match &self.link {
            Link::Single => Ok(vec![block.to_vec()]),
            Link::Sockets(sockets) => sockets.allgather(block, self.timeout),
            Link::Threads(seat) => seat.allgather(self.rank, block, self.timeout),
        }
    }

    /// Returns when every rank has come here.
    ///
    /// # Errors
    /// As for [`allgather`](Bootstrap::allgather).
    pub fn barrier(&self) -> Result<(), BootstrapError> {
        self.allgather(&[]).map(drop)
    }

    /// True on every rank if it is true on each of them.
    ///
    /// # Errors
    /// As for [`allgather`](Bootstrap::allgather).
    pub fn all(&self, mine: bool) -> Result<bool, BootstrapError> {
        Ok(self.allgather(&[u8::from(mine)])?.iter().all(|block| block == &[1]))
    }
}

#[cfg(test)]
mod tests;
