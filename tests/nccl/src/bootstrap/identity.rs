//! The rank of this process in its job, from the variables of a launcher.

use crate::error::BootstrapError;

/// The rank of this process in its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub nranks: usize,
    /// The address of rank 0: `host:port`, or the name of an abstract Unix socket.
    pub address: String,
}

impl Identity {
    /// Reads a launcher's variables from the environment; `None` without a launcher.
    ///
    /// # Errors
    /// The variables are incomplete or contradictory.
    pub fn from_env() -> Result<Option<Identity>, BootstrapError> {
        Identity::from_variables(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// Reads a launcher's variables with `get`, which returns `None` for an unset variable.
    ///
    /// # Errors
    /// Those of [`from_env`](Identity::from_env).
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
        let address = match get("FERROGIN_BOOTSTRAP") {
            Some(address) => address,
            None => Identity::same_host_address(get, nranks)?,
        };
        Ok(Some(Identity { rank, nranks, address }))
    }

    /// The abstract name that all ranks of one mpirun on one host derive.
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
