//! This process's rank in its job, from a launcher's variables.

use crate::error::BootstrapError;
use crate::secret::Secret;
use nix::unistd::{Pid, getsid};
use std::net::IpAddr;

/// This process's rank in its job.
///
/// | launcher | rank and number of ranks |
/// |---|---|
/// | a script, `ferrogin`'s own launcher | FERROGIN_RANK, FERROGIN_NRANKS |
/// | Open MPI | OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE |
/// | MPICH, Intel MPI, Slurm with PMI | PMI_RANK, PMI_SIZE |
/// | Slurm with PMIx | PMIX_RANK, SLURM_NTASKS |
/// | torchrun | RANK, WORLD_SIZE |
///
/// Rank 0's address is FERROGIN_BOOTSTRAP. Without it, torchrun's ranks use the port after MASTER_PORT at MASTER_ADDR,
/// because torch's own store uses MASTER_PORT. Any other launcher's ranks then use an abstract Unix socket, if they're
/// all on one host, named after the job or, without a job, after the terminal session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub nranks: usize,
    /// Rank 0's address: `host:port`, or the name of an abstract Unix socket.
    pub address: String,
    /// FERROGIN_SECRET, which the ranks prove to rank 0. Without one, any process that can connect to `host:port` can
    /// take a rank's place; a Unix socket only accepts processes of the same user.
    pub secret: Option<Secret>,
}

/// The variables with the rank and the number of ranks, by launcher.
const SOURCES: [(&str, &str); 5] = [
    ("FERROGIN_RANK", "FERROGIN_NRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
    TORCH,
];
/// The variables with the rank on this host, by launcher: Open MPI, MPICH and Intel MPI, Slurm, torchrun.
const LOCAL_RANKS: [&str; 5] =
    ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK"];
/// Prefix of the name at which a session's ranks meet.
const SESSION: &str = "ferrogin-bootstrap-session-";
const TORCH: (&str, &str) = ("RANK", "WORLD_SIZE");

/// The names of a launcher's two variables, the rank, and the number of ranks.
type Place = ((&'static str, &'static str), usize, usize);

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Identity {
    /// Reads a launcher's variables from the environment; `None` without a launcher.
    ///
    /// # Errors
    /// The variables are incomplete or contradictory.
    pub fn from_env() -> Result<Option<Identity>, BootstrapError> {
        Identity::from_variables(&variable)
    }

    /// Reads the rank from a launcher's variables; `None` without a launcher.
    ///
    /// # Errors
    /// The variables with the rank and the number of ranks are incomplete or contradictory.
    pub fn rank_from_env() -> Result<Option<usize>, BootstrapError> {
        Ok(Identity::place(&variable)?.map(|(_, rank, _)| rank))
    }

    /// Returns this rank's index among its host's ranks: the launcher's number or, failing that, the rank, which is
    /// right on a single host. `None` without a launcher.
    pub fn local_rank_from_env() -> Option<usize> {
        Identity::local_rank(&variable)
    }

    /// Like [`local_rank_from_env`](Identity::local_rank_from_env), with `get`, which returns `None` for an unset
    /// variable.
    pub(crate) fn local_rank(get: &dyn Fn(&str) -> Option<String>) -> Option<usize> {
        let local = LOCAL_RANKS.into_iter().find_map(|name| get(name)?.parse().ok());
        local.or_else(|| Some(Identity::place(get).ok()??.1))
    }

    /// Reads a launcher's variables with `get`, which returns `None` for an unset variable.
    ///
    /// # Errors
    /// Those of [`from_env`](Identity::from_env).
    pub fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Identity>, BootstrapError> {
        let Some((source, rank, nranks)) = Identity::place(get)? else { return Ok(None) };
        let address = match (get("FERROGIN_BOOTSTRAP"), get("MASTER_ADDR")) {
            (Some(address), _) => match Identity::check_address(&address) {
                Ok(()) => address,
                Err(problem) => return Err(BootstrapError::Environment(format!("FERROGIN_BOOTSTRAP={problem}"))),
            },
            (None, Some(host)) if source == TORCH => Identity::beside_torch(get, &host)?,
            _ => Identity::same_host_address(get, nranks)?,
        };
        Ok(Some(Identity { rank, nranks, address, secret: Identity::secret(get)? }))
    }

    /// Checks an address of rank 0. A host without a port would be taken for a socket name, and the ranks would wait
    /// there in vain.
    ///
    /// # Errors
    /// The port is missing or invalid.
    pub fn check_address(address: &str) -> Result<(), String> {
        let is_host = |text: &str| text == "localhost" || text.contains('.') || text.parse::<IpAddr>().is_ok();
        match address.rsplit_once(':') {
            _ if address.parse::<IpAddr>().is_ok() => {}
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0) => return Ok(()),
            Some(_) => {}
            None if is_host(address) => {}
            None => return Ok(()),
        }
        Err(format!(
            "{address} is not host:port with a port from 1 to 65535: pass the address of rank 0's host and a free port there, or within a \
             host a name without a colon or a dot"
        ))
    }

    /// Returns whether the ranks meet at a name that nobody chose: the session's.
    pub fn meets_by_session(&self) -> bool {
        self.address.starts_with(SESSION)
    }

    /// Reads FERROGIN_SECRET.
    ///
    /// # Errors
    /// It isn't a secret.
    pub fn secret_from_env() -> Result<Option<Secret>, BootstrapError> {
        Identity::secret(&variable)
    }

    fn secret(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Secret>, BootstrapError> {
        let Some(text) = get("FERROGIN_SECRET") else { return Ok(None) };
        let invalid =
            "FERROGIN_SECRET is not 32 hexadecimal digits: set it to the output of `openssl rand -hex 16` on all ranks";
        Secret::parse(&text).map(Some).ok_or_else(|| BootstrapError::Environment(invalid.to_owned()))
    }

    /// Finds a launcher's variables, and reads the rank and the number of ranks.
    fn place(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Place>, BootstrapError> {
        // RANK alone is too common a name to indicate torchrun.
        let is_set = |source: &(&str, &str)| get(source.0).is_some() && (*source != TORCH || get(source.1).is_some());
        let Some(source @ (rank_name, size_name)) = SOURCES.into_iter().find(is_set) else {
            return Ok(None);
        };
        let number = |name: &str| -> Result<usize, BootstrapError> {
            let value = get(name).ok_or_else(|| {
                BootstrapError::Environment(format!(
                    "{rank_name} is set but {name} is not: set both, or FERROGIN_RANK and FERROGIN_NRANKS"
                ))
            })?;
            value.parse().map_err(|_| {
                BootstrapError::Environment(format!(
                    "{name}={value} is not a number: set it to a rank or a number of ranks"
                ))
            })
        };
        let (rank, nranks) = (number(rank_name)?, number(size_name)?);
        if rank >= nranks {
            return Err(BootstrapError::Environment(format!(
                "{rank_name}={rank} and {size_name}={nranks} do not fit: a rank must be less than the number of ranks"
            )));
        }
        Ok(Some((source, rank, nranks)))
    }

    /// Returns the address with the port after torch's own.
    fn beside_torch(get: &dyn Fn(&str) -> Option<String>, host: &str) -> Result<String, BootstrapError> {
        let port = get("MASTER_PORT").and_then(|port| port.parse::<u16>().ok()?.checked_add(1));
        let port = port.ok_or_else(|| {
            BootstrapError::Environment(format!(
                "MASTER_ADDR={host} is set without a MASTER_PORT from 0 to 65534: set that too, or FERROGIN_BOOTSTRAP=host:port"
            ))
        })?;
        Ok(format!("{host}:{port}"))
    }

    /// Returns the abstract name that all of a launcher's ranks on one host derive.
    fn same_host_address(get: &dyn Fn(&str) -> Option<String>, nranks: usize) -> Result<String, BootstrapError> {
        let local = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"].into_iter().find_map(get);
        if let Some(local) = local
            && local != nranks.to_string()
        {
            return Err(BootstrapError::Environment(format!(
                "{local} of {nranks} ranks are on this host: set FERROGIN_BOOTSTRAP=host:port (a free port of rank 0's \
                 host), for example with mpirun -x FERROGIN_BOOTSTRAP=host:port"
            )));
        }
        let job = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"].into_iter().find_map(get);
        // Not the parent: `timeout 60 ./program` gives each rank its own.
        let session = || Ok::<_, BootstrapError>(format!("{SESSION}{}", getsid(None).map_or(0, Pid::as_raw)));
        job.map_or_else(session, |job| Ok(format!("ferrogin-bootstrap-{job}")))
    }
}
