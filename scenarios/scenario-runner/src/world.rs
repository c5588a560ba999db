//! A rank: its communicator, window and contexts. Runs steps on all ranks at once.

use crate::RunError;
use crate::plan::{
    Api, GUARD, GUARD_BYTE, INBOX, LANE, Measured, OUTBOX, Plan, Program, Report, Spoil, Threads, Verdict,
};
use crate::program::{self, workloads};
use crate::runner::Runner;
use crate::step::Step;
use ferrogin_device::Window as DeviceWindow;
use ferrogin_ffi::nccl::GinConfigV14;
use mini_nccl::{Bootstrap, Comm, DeviceMemory, GinContext, Plugin, Window};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The configuration of a run.
#[derive(Debug, Clone)]
pub struct Config {
    /// NCCL_GIN_PLUGIN: a path, a name, or a list.
    pub plugin: String,
    /// Layout of the device structs: 0, 1 or 2.
    pub backend_version: i32,
    /// Work requests in flight: small, so that rings wrap often. 0 means the plugin's default.
    pub queue_depth: i32,
    /// Time limit of one wait in a program.
    pub deadline: Duration,
    /// Threads per rank, at most [`MAX_LANES`], in steps that have several threads on a context; by default, the step's
    /// own number. All threads together send as many values as those of the step.
    pub lanes: Option<u32>,
    /// Whether to create the contexts and signals for workloads too.
    pub workloads: bool,
    /// A deliberate fault in the workloads.
    pub spoil: Spoil,
}

impl Config {
    /// Returns the plugin from [`plugin_from_env`]; layout 2, 64 slots, and a deadline of 30 s, or FERROGIN_TIMEOUT if
    /// that is less. No workloads.
    pub fn from_env() -> Config {
        let deadline = mini_nccl::timeout_from_env().min(Duration::from_secs(30));
        let plugin = plugin_from_env();
        let (lanes, workloads, spoil) = (None, false, Spoil::Nothing);
        Config { plugin, backend_version: 2, queue_depth: 64, deadline, lanes, workloads, spoil }
    }
}

/// Returns the value of NCCL_GIN_PLUGIN, or the plugin's path in FERROGIN_DIST, in the executable's directory, or in a
/// library directory next to that, in this order. `make install` puts the executable in `bin` and the plugin in `lib`,
/// or in LIBDIR.
pub fn plugin_from_env() -> String {
    const PLUGIN: &str = "libnccl-gin-ferrogin.so";
    if let Some(list) = std::env::var("NCCL_GIN_PLUGIN").ok().filter(|list| !list.is_empty()) {
        return list;
    }
    let beside = || {
        let own = std::env::current_exe().ok()?.parent()?.to_path_buf();
        let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
        let beside = ["lib", "lib64", &multiarch].map(|lib| own.with_file_name(lib));
        let found = std::iter::once(&own).chain(&beside).find(|directory| directory.join(PLUGIN).is_file()).cloned();
        Some(found.unwrap_or(own))
    };
    let directory = std::env::var_os("FERROGIN_DIST").map(PathBuf::from).or_else(beside).unwrap_or_default();
    directory.join(PLUGIN).to_string_lossy().into_owned()
}

/// Most threads per rank that an inbox has room for.
pub const MAX_LANES: u32 = ((INBOX - GUARD) / LANE) as u32;

/// Contexts for the scenarios.
const CONTEXTS: u32 = 2;

/// One rank of a job. Fields are dropped in the order of NCCL's teardown.
pub struct World {
    context: GinContext,
    window: Window,
    memory: Arc<DeviceMemory>,
    comm: Comm,
    runner: Box<dyn Runner>,
    deadline: Duration,
    lanes: Option<u32>,
    contexts: u32,
    signals: u32,
    spoil: Spoil,
    ring_slots: u32,
}

impl World {
    /// Collective: loads the plugin, connects, registers a window and creates contexts. From then on, a rank waits for
    /// the others as long as `bootstrap`'s timeout plus four of the configuration's deadlines.
    ///
    /// # Errors
    /// A call to the plugin fails, or a rank is missing.
    pub fn open(config: &Config, bootstrap: Bootstrap, runner: Box<dyn Runner>) -> Result<World, RunError> {
        let nranks = bootstrap.nranks();
        if !(2..=64).contains(&nranks) {
            return Err(RunError::Usage(format!("scenarios need 2 to 64 ranks, but this job has {nranks}")));
        }
        let (contexts, signals) = if config.workloads {
            (workloads::CONTEXTS, workloads::signals(nranks as u32))
        } else {
            (CONTEXTS, program::signals(nranks as u32))
        };
        if config.workloads && nranks > workloads::MAX_RANKS as usize {
            let most = workloads::MAX_RANKS;
            return Err(RunError::Usage(format!("workloads take at most {most} ranks, but this job has {nranks}")));
        }
        let plugin = Plugin::find(&config.plugin)?;
        // A step takes as long as its slowest rank, which may wait several times. If a rank dies, the bootstrap notices
        // at once.
        let timeout = bootstrap.timeout() + config.deadline * 4;
        let bootstrap = bootstrap.with_timeout(timeout);
        let comm = Comm::init(&plugin, Arc::new(bootstrap), 0)?;
        let memory = Arc::new(runner.allocate(nranks * INBOX as usize + OUTBOX as usize)?);
        let window = comm.register(&memory, 0)?;
        let context = comm.create_context(&GinConfigV14 {
            n_signals: signals as i32,
            n_counters: program::COUNTERS as i32,
            n_contexts: contexts as i32,
            queue_depth: config.queue_depth,
            traffic_class: -1,
            backend_version: config.backend_version,
            rank_stride: 1,
        })?;
        comm.barrier()?;
        let mut world = World {
            context,
            window,
            memory,
            comm,
            runner,
            deadline: config.deadline,
            lanes: config.lanes,
            contexts,
            signals,
            spoil: config.spoil,
            ring_slots: 0,
        };
        world.ring_slots = world.reset()?;
        Ok(world)
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Returns the number of ranks.
    pub fn nranks(&self) -> usize {
        self.comm.nranks()
    }

    /// Returns the communicator.
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Returns the value endpoint's send queue slots.
    pub fn ring_slots(&self) -> u32 {
        self.ring_slots
    }

    /// Returns what runs the programs.
    pub fn runner(&self) -> &dyn Runner {
        &*self.runner
    }

    /// Collective: zeroes the window except its guards, and resets signals and counters. Returns when all ranks have
    /// done so.
    fn prepare(&self) -> Result<(), RunError> {
        self.comm.barrier()?;
        self.memory.fill(0);
        for guard in self.guards() {
            self.memory.write(guard, &[GUARD_BYTE; GUARD as usize]);
        }
        self.reset()?;
        Ok(self.comm.barrier()?)
    }

    /// Resets signals and counters. Returns the value endpoint's number of slots.
    fn reset(&self) -> Result<u32, RunError> {
        let step = Step { spread: true, ..Step::new(Program::Reset) };
        let plans: Vec<_> = (0..self.contexts).map(|id| self.plan(&step, 1, id)).collect();
        let failed = |why| RunError::Failed { name: "the reset of signals".into(), failures: vec![why] };
        let reports = self.runner.run(&plans).map_err(failed)?;
        match reports.iter().find(|report| !report.passed()) {
            Some(report) => Err(failed(report.describe(self.rank()))),
            None => Ok(reports.first().map_or(0, |report| report.measured as u32)),
        }
    }

    fn guards(&self) -> impl Iterator<Item = usize> {
        (1..=self.nranks() as u64).map(|end| (end * INBOX - GUARD) as usize)
    }

    /// Threads per rank in a step.
    pub fn lanes(&self, step: &Step) -> u32 {
        if step.lanes > 1 && !step.spread { self.lanes.unwrap_or(step.lanes) } else { step.lanes }
    }

    /// Returns the plan of a step for thread `lane` of this rank.
    pub fn plan(&self, step: &Step, reps: u32, lane: u32) -> Plan {
        Plan {
            program: step.program,
            turn: step.order.turn(self.rank(), self.nranks()),
            pattern: step.pattern,
            context_id: if step.spread { lane % self.contexts } else { 0 },
            handle: self.context.handle(),
            window: DeviceWindow(self.window.gin_handle()),
            memory: self.memory.as_ptr().cast(),
            rank: self.rank() as u32,
            nranks: self.nranks() as u32,
            reps,
            burst: (step.burst * step.lanes / self.lanes(step)).max(1),
            aggregate: u32::from(step.aggregate),
            sharing: step.sharing,
            lane,
            lanes: self.lanes(step),
            bytes: 8,
            warmup: 0,
            threads: Threads::default(),
            api: Api::default(),
            deadline_ns: u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX),
            samples: std::ptr::null_mut(),
            measured: Measured { signals: self.signals, ..Measured::default() },
            spoil: self.spoil,
        }
    }

    /// Collective: runs this rank's `plans` and exchanges the results of all ranks.
    ///
    /// # Errors
    /// A program failed on a rank, a guard was written, or the plugin reports an error.
    pub fn run(&self, name: &str, plans: &[Plan]) -> Result<Vec<Report>, RunError> {
        self.prepare()?;
        let outcome = self.runner.run(plans);
        // Other ranks may still be sending to this one, so the guards are checked after a barrier.
        self.comm.barrier()?;
        let mut failures: Vec<String> = match &outcome {
            Ok(reports) => {
                let failed = reports.iter().filter(|report| !report.passed());
                failed.map(|report| report.describe(self.rank())).chain(self.broken_guard()).collect()
            }
            Err(why) => vec![format!("rank {}: {why}", self.rank())],
        };
        match self.context.query_last_error() {
            Ok(false) => {}
            Ok(true) => failures.push(format!("rank {}: queryLastError reports an error", self.rank())),
            Err(error) => failures.push(format!("rank {}: {error}", self.rank())),
        }
        let all = self.comm.bootstrap().allgather(failures.join("; ").as_bytes())?;
        let failures: Vec<String> =
            all.iter().filter(|text| !text.is_empty()).map(|text| String::from_utf8_lossy(text).into_owned()).collect();
        if failures.is_empty() {
            Ok(outcome.unwrap_or_default())
        } else {
            Err(RunError::Failed { name: name.into(), failures })
        }
    }

    fn broken_guard(&self) -> Option<String> {
        let mut bytes = vec![0; GUARD as usize];
        self.guards().find_map(|guard| {
            self.memory.read(guard, &mut bytes);
            let at = bytes.iter().position(|&byte| byte != GUARD_BYTE)?;
            let report = Report { verdict: Verdict::Wrong, at: (guard + at) as u64, ..Report::PASSED };
            let report = Report { expected: GUARD_BYTE.into(), got: bytes[at].into(), ..report };
            Some(format!("{} (a guard byte, which no rank may write)", report.describe(self.rank())))
        })
    }

    /// Collective: deregMrSym, destroyContext, closeColl and finalize, checking each result.
    ///
    /// # Errors
    /// A call fails.
    pub fn close(self) -> Result<(), RunError> {
        let World { context, window, comm, .. } = self;
        comm.barrier()?;
        window.deregister()?;
        context.destroy()?;
        Ok(comm.close()?)
    }
}
