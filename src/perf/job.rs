//! One rank of a job: the exchange with the other ranks, the settings they agree on, and the processor that posts.

use super::error::Error;
use super::machine::{self, Machine};
use super::operation::Operation;
use super::report::{About, Gpu};
use super::settings::{Device, Settings};
use super::statistics::bytes_text;
use ferrogin_libfabric::Libfabric;
use mini_nccl::Bootstrap;
use mini_nccl::bootstrap::Identity;
use scenario_runner::gpu::{self, Launch};
use scenario_runner::plan::Api;
use scenario_runner::runner::Runner;
use serde::{Deserialize, Serialize};
use std::panic::resume_unwind;
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Time limit of a phase: a rank that does not finish it in time is lost.
const PHASE_LIMIT: Duration = Duration::from_secs(600);
/// Time limit of one wait for a peer, unless FERROGIN_TIMEOUT is less.
const WAIT_LIMIT: Duration = Duration::from_secs(30);
/// The release that the ranks must agree on.
const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// A rank.
pub struct Job {
    bootstrap: Arc<Bootstrap>,
    pub settings: Settings,
    pub runner: Box<dyn Runner>,
    hosts: usize,
    on_this_host: usize,
    wait_limit: Duration,
}

/// What the ranks exchange first.
#[derive(Serialize, Deserialize)]
struct Introduction {
    release: String,
    host: String,
    settings: Settings,
}

impl Job {
    /// Collective: meets the other ranks and compares the settings.
    ///
    /// # Errors
    /// A rank is missing or differs; the GPU does not open.
    pub fn open(settings: &Settings, identity: &Identity) -> Result<Self, Error> {
        let (rank, ranks) = (identity.rank, identity.nranks);
        if ranks < 2 {
            return Err(Error::Usage(
                "this job has 1 rank, and perf needs 2: start it with mpirun -np 2, or outside of a launcher"
                    .to_owned(),
            ));
        }
        let timeout = mini_nccl::timeout_from_env();
        let bootstrap = Bootstrap::join(identity, timeout).map_err(Error::Meet)?;
        let own = Introduction { release: RELEASE.to_owned(), host: machine::boot_id(), settings: settings.clone() };
        let all = compare(rank, &own, &bootstrap)?;
        let mut hosts: Vec<&str> = all.iter().map(|other| &*other.host).collect();
        let on_this_host = hosts.iter().filter(|host| **host == own.host).count();
        hosts.sort_unstable();
        hosts.dedup();
        Ok(Self {
            bootstrap: Arc::new(bootstrap.with_timeout(PHASE_LIMIT)),
            settings: settings.clone(),
            runner: open_runner(settings.device)?,
            hosts: hosts.len(),
            on_this_host,
            wait_limit: timeout.min(WAIT_LIMIT),
        })
    }

    /// Collective: checks that the windows of all ranks, of `bytes` each, fit into memory.
    ///
    /// # Errors
    /// They do not fit, on this host or another one; a rank was lost.
    pub fn check_memory(&self, bytes: u64) -> Result<(), Error> {
        let on_this_host = self.on_this_host;
        let needed = bytes.saturating_mul(on_this_host as u64);
        let fits = machine::available_memory().is_none_or(|available| needed < available);
        // All ranks make the same decision, so that none waits for the others.
        if self.bootstrap.all(fits).map_err(Error::Meet)? {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "the windows of {on_this_host} ranks on this host, for sizes up to {}, need more memory than it has: \
             pass a smaller -e, or fewer --threads or ranks",
            bytes_text(self.settings.end)
        )))
    }

    /// Returns what a report says about the run.
    pub fn about(&self) -> About {
        let provider = std::env::var("FERROGIN_PROVIDER").ok().filter(|name| !name.is_empty());
        let provider = provider.unwrap_or_else(|| "efa".to_owned());
        About {
            wire: machine::wire(&provider, self.hosts),
            provider,
            libfabric: Libfabric::load(None).map_or_else(|_| "unknown".to_owned(), |lib| lib.version().to_string()),
            machine: Machine::this(),
            gpu: self.runner.gpu().map(|gpu| Gpu { name: gpu.name.clone(), software: gpu.software.clone() }),
            ranks: self.ranks(),
            hosts: self.hosts,
        }
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.bootstrap.rank()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.bootstrap.nranks()
    }

    /// Returns the exchange between the ranks.
    pub fn bootstrap(&self) -> Arc<Bootstrap> {
        self.bootstrap.clone()
    }

    /// Returns the time limit of one wait.
    pub fn wait_limit(&self) -> Duration {
        self.wait_limit
    }

    /// Collective: gathers a block from each rank.
    ///
    /// # Errors
    /// A rank was lost.
    pub fn allgather(&self, block: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.bootstrap.allgather(block).map_err(Error::Lost)
    }

    /// Collective: waits for all ranks.
    ///
    /// # Errors
    /// A rank was lost.
    pub fn barrier(&self) -> Result<(), Error> {
        self.bootstrap.barrier().map_err(Error::Lost)
    }

    /// Runs `body` in all threads at once; a single thread is this one.
    ///
    /// # Errors
    /// A thread's error; the first one if several fail.
    pub fn threads<T: Send, E: Send>(&self, body: impl Fn(u32) -> Result<T, E> + Sync) -> Result<Vec<T>, E> {
        let threads = self.settings.threads;
        if threads == 1 {
            return Ok(vec![body(0)?]);
        }
        let start = Barrier::new(threads as usize);
        let run = |thread| {
            start.wait();
            body(thread)
        };
        let run = &run;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
            let all = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            all.collect::<Vec<_>>().into_iter().collect()
        })
    }

    /// Returns the error for wrong data.
    pub fn wrong(&self, operation: Operation, bytes: u64, what: String) -> Error {
        Error::WrongData { rank: self.rank(), operation: operation.name(), bytes, what }
    }
}

/// Opens what runs the programs: threads of this process, or the GPU that FERROGIN_DEVICE selects.
fn open_runner(device: Device) -> Result<Box<dyn Runner>, Error> {
    let launch = Launch { api: Api::Cuda, ..Launch::default() };
    let runner = gpu::runner_from_env(launch).map_err(|error| Error::Usage(error.to_string()))?;
    let (found, other) = if runner.gpu().is_some() { (Device::Cuda, "a GPU") } else { (Device::Cpu, "CPU threads") };
    if found != device {
        let set = std::env::var("FERROGIN_DEVICE").unwrap_or_default();
        return Err(Error::Usage(format!(
            "--device is {}, but FERROGIN_DEVICE={set} selects {other}: unset FERROGIN_DEVICE, or pass the same to both",
            device.name()
        )));
    }
    Ok(runner)
}

/// Exchanges the introductions of all ranks and checks that they agree with `own`.
fn compare(rank: usize, own: &Introduction, bootstrap: &Bootstrap) -> Result<Vec<Introduction>, Error> {
    let block = serde_json::to_vec(own).map_err(|error| Error::Usage(error.to_string()))?;
    let blocks = bootstrap.allgather(&block).map_err(Error::Meet)?;
    let differs = |other, (name, theirs, ours)| Error::Disagreement { rank: other, own: rank, name, theirs, ours };
    let mut all = Vec::new();
    for (other, block) in blocks.iter().enumerate() {
        // Another release may have other settings.
        let release = serde_json::from_slice::<serde_json::Value>(block).ok();
        let release = release.as_ref().and_then(|block| block["release"].as_str()).unwrap_or("another program");
        if release != own.release {
            return Err(differs(other, ("ferrogin".to_owned(), release.to_owned(), own.release.clone())));
        }
        let introduction: Introduction = serde_json::from_slice(block)
            .map_err(|error| differs(other, ("settings".to_owned(), error.to_string(), "others".to_owned())))?;
        if let Some(difference) = own.settings.difference(&introduction.settings) {
            return Err(differs(other, difference));
        }
        all.push(introduction);
    }
    Ok(all)
}
