//! One rank of a measurement: its communicator, window and context, and the phases that all ranks begin together.

use super::error::Error;
use super::machine::{self, Machine};
use super::operation::Operation;
use super::report::{About, Gpu};
use super::settings::{Device, Settings};
use super::units::bytes_text;
use ferrogin::{Comm, Context, ContextOptions, Memory, Options, Window};
use ferrogin_libfabric::Libfabric;
use mini_nccl::Bootstrap;
use mini_nccl::bootstrap::Identity;
use scenario_runner::gpu::{self, Launch};
use scenario_runner::plan::{self, Api, Measured, Pattern, Plan, Program, Report, Spoil, Threads, Turn};
use scenario_runner::runner::Runner;
use scenario_runner::timed::VALUE_SLOTS;
use serde::{Deserialize, Serialize};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Limit of a phase: a rank that does not end it in time is lost.
const PHASE_LIMIT: Duration = Duration::from_secs(600);
/// Limit of one wait of the device API; FERROGIN_TIMEOUT if that is less.
const WAIT_LIMIT: Duration = Duration::from_secs(30);
/// Bytes after each place of the window, which must stay 0.
const GUARD: u64 = 8;
/// Bytes that are written or compared at a time.
const CHUNK: u64 = 1 << 20;
/// The release in the agreement of the ranks.
const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// A rank.
pub struct Session {
    // Dropped in this order.
    context: Context,
    window: Window,
    runner: Box<dyn Runner>,
    comm: Comm,
    bootstrap: Arc<Bootstrap>,
    pub settings: Settings,
    layout: Layout,
    hosts: usize,
    wait_limit: Duration,
    /// Number of the fill of the window: each has other bytes.
    fill: AtomicU64,
}

/// What the ranks exchange first.
#[derive(Serialize, Deserialize)]
struct Introduction {
    release: String,
    host: String,
    settings: Settings,
}

/// The places of a window: an inbox for each thread, or for each rank in alltoall, then as many outboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    places: u64,
    stride: u64,
}

impl Layout {
    /// `None` if no address space holds the window.
    fn new(settings: &Settings, ranks: usize) -> Option<Self> {
        let has = |operation| settings.operations.contains(&operation);
        let of_ranks = if has(Operation::Alltoall) { ranks as u64 } else { 0 };
        let places = of_ranks.max(settings.threads.into());
        let sizes = settings.operations.iter().flat_map(|operation| settings.sizes(*operation));
        // An inbox also holds the values of a thread, and two of each rank to verify a barrier.
        let largest = sizes.max().unwrap_or(0).max(u64::from(VALUE_SLOTS) * 8).max(16 * ranks as u64);
        let layout = Self { places, stride: largest.checked_add(GUARD)?.checked_next_multiple_of(4096)? };
        layout.stride.checked_mul(2 * places).map(|_| layout)
    }

    fn bytes(self) -> u64 {
        2 * self.places * self.stride
    }

    fn inbox(self, place: u32) -> u64 {
        u64::from(place) * self.stride
    }

    fn outbox(self, place: u32) -> u64 {
        (self.places + u64::from(place)) * self.stride
    }
}

impl Session {
    /// Collective: meets the other ranks, compares the settings, and opens what a measurement needs.
    ///
    /// # Errors
    /// A rank is missing or differs; there is too little memory; the host API fails.
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

        let layout = Layout::new(settings, ranks).filter(|layout| fits(*layout, on_this_host));
        // All ranks take the same decision, so that none waits for the others.
        let all_fit = bootstrap.all(layout.is_some()).map_err(Error::Meet)?;
        let Some(layout) = layout.filter(|_| all_fit) else {
            return Err(Error::Usage(format!(
                "the windows of {on_this_host} ranks on a host, for sizes up to {}, need more memory than there is: pass a smaller -e, or \
                 fewer --threads or ranks",
                bytes_text(settings.end)
            )));
        };
        let allgather = |block: &[u8]| Ok(bootstrap.allgather(block)?);
        let comm = Comm::open(rank, ranks, &Options::default(), allgather)?;
        let runner = open_runner(settings.device)?;
        let window = comm.allocate(layout.bytes() as usize, Memory::Device)?;
        let context = comm.context(&ContextOptions {
            signals: settings.signals(ranks),
            depth: settings.depth,
            ..Default::default()
        })?;
        let session = Self {
            context,
            window,
            runner,
            comm,
            bootstrap: Arc::new(bootstrap.with_timeout(PHASE_LIMIT)),
            settings: settings.clone(),
            layout,
            hosts: hosts.len(),
            wait_limit: timeout.min(WAIT_LIMIT),
            fill: AtomicU64::new(0),
        };
        // Pages that no program wrote share one page of zeros, which would be read faster than data.
        session.fill_outboxes()?;
        session.clear_inboxes()?;
        Ok(session)
    }

    /// What a report says of the run.
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

    /// This rank.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.comm.ranks()
    }

    /// The exchange between the ranks.
    pub fn bootstrap(&self) -> Arc<Bootstrap> {
        self.bootstrap.clone()
    }

    /// Limit of one wait.
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

    /// Offset, in every window, of the inbox of a thread, or of a rank in alltoall.
    pub fn inbox(&self, place: u32) -> u64 {
        self.layout.inbox(place)
    }

    /// Offset, in every window, of the outbox of a thread, or of a rank in alltoall.
    pub fn outbox(&self, place: u32) -> u64 {
        self.layout.outbox(place)
    }

    /// Collective: one phase of a measurement. Before it signals are 0 and, with `--verify` or if the phase `polls` memory, inboxes
    /// are 0 and outboxes have new bytes. `body` runs on all ranks at once. When all are done, `check` verifies on each rank.
    ///
    /// # Errors
    /// `body` or `check` failed; a rank was lost. A rank that failed leaves the job, which ends the other ranks.
    pub fn phase<T>(
        &self,
        polls: bool,
        body: impl FnOnce() -> Result<T, Error>,
        check: impl FnOnce() -> Result<(), Error>,
    ) -> Result<T, Error> {
        if polls || self.settings.verify {
            self.clear_inboxes()?;
        }
        if self.settings.verify {
            self.fill_outboxes()?;
        }
        let signals = Measured { signals: self.settings.signals(self.ranks()), ..Measured::default() };
        self.run("reset of the signals", &[Plan { measured: signals, ..self.plan(Program::ResetSignals, 0, (0, 0)) }])?;
        self.bootstrap.barrier().map_err(Error::Lost)?;
        let result = body()?;
        self.context.check()?;
        self.bootstrap.barrier().map_err(Error::Lost)?;
        if self.settings.verify {
            check()?;
            self.bootstrap.barrier().map_err(Error::Lost)?;
        }
        Ok(result)
    }

    /// The plan of a program with operations of `bytes`, and `repetitions` of its warm-up and after it.
    pub fn plan(&self, program: Program, bytes: u64, repetitions: (u32, u32)) -> Plan {
        Plan {
            program,
            turn: Turn::First,
            pattern: Pattern::Ring,
            context_id: 0,
            handle: self.context.handle(),
            window: self.window.handle(),
            memory: self.window.address().cast(),
            rank: self.rank() as u32,
            nranks: self.ranks() as u32,
            reps: repetitions.0 + repetitions.1,
            burst: self.settings.aggregate,
            aggregate: 0,
            sharing: 0,
            lane: 0,
            lanes: 1,
            bytes: bytes as u32,
            warmup: repetitions.0,
            threads: Threads::One,
            api: Api::Rust,
            deadline_ns: self.wait_limit.as_nanos() as u64,
            samples: std::ptr::null_mut(),
            measured: Measured {
                stride: self.layout.stride,
                from: self.outbox(0),
                inbox: self.inbox(0),
                ..Measured::default()
            },
            spoil: Spoil::default(),
        }
    }

    /// The same for a thread of ranks 0 and 1, which uses its own place and signal.
    pub fn plan_of_pair(
        &self,
        program: Program,
        operation: plan::Operation,
        bytes: u64,
        repetitions: (u32, u32),
        thread: u32,
    ) -> Plan {
        let plan = self.plan(program, bytes, repetitions);
        let (from, to) = (self.outbox(thread), self.inbox(thread));
        let measured = Measured { operation, raised: thread, awaited: thread, from, to, inbox: to, ..plan.measured };
        Plan { lane: thread, lanes: self.settings.threads, measured, ..plan }
    }

    /// Runs plans at once, on threads of this process or on the GPU.
    ///
    /// # Errors
    /// A program failed.
    pub fn run(&self, operation: &'static str, plans: &[Plan]) -> Result<Vec<Report>, Error> {
        let rank = self.rank();
        let reports = self.runner.run(plans).map_err(|text| Error::Gpu { rank, operation, text })?;
        let Some(failed) = reports.iter().find(|report| !report.passed()) else { return Ok(reports) };
        let bytes = plans.first().map_or(0, |plan| plan.bytes.into());
        Err(match failed.status() {
            Some(status) => Error::Operation { rank, operation, bytes, status },
            None => Error::WrongData { rank, operation, bytes, what: failed.describe(rank) },
        })
    }

    /// Runs `body` in each thread, at once; one thread is this one.
    ///
    /// # Errors
    /// The first error of a thread.
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

    /// The error of data that are wrong.
    pub fn wrong(&self, operation: Operation, bytes: u64, what: String) -> Error {
        Error::WrongData { rank: self.rank(), operation: operation.name(), bytes, what }
    }

    fn fill_outboxes(&self) -> Result<(), Error> {
        let fill = self.fill.fetch_add(1, Ordering::Relaxed) + 1;
        for place in 0..self.layout.places as u32 {
            let mut bytes = pattern(fill, self.rank(), place);
            self.chunks(self.layout.stride, |offset, len| {
                let chunk: Vec<u8> = bytes.by_ref().take(len as usize).collect();
                Ok(self.window.write((self.outbox(place) + offset) as usize, &chunk)?)
            })?;
        }
        Ok(())
    }

    fn clear_inboxes(&self) -> Result<(), Error> {
        let zeros = vec![0; CHUNK as usize];
        self.chunks(self.layout.places * self.layout.stride, |offset, len| {
            Ok(self.window.write(offset as usize, &zeros[..len as usize])?)
        })
    }

    /// Compares the inbox `place` with the outbox `of_place` of rank `from`, and checks that the bytes after it are 0.
    ///
    /// # Errors
    /// A byte differs.
    pub fn check_inbox(
        &self,
        operation: Operation,
        bytes: u64,
        place: u32,
        from: usize,
        of_place: u32,
    ) -> Result<(), Error> {
        let mut expected =
            pattern(self.fill.load(Ordering::Relaxed), from, of_place).take(bytes as usize).chain([0; GUARD as usize]);
        self.chunks(bytes + GUARD, |offset, len| {
            let found = self.read(self.inbox(place) + offset, len as usize)?;
            let wrong =
                found.iter().zip(expected.by_ref().take(len as usize)).position(|(found, expected)| *found != expected);
            wrong.map_or(Ok(()), |at| {
                Err(self.wrong(operation, bytes, format!("byte {} from rank {from}", offset + at as u64)))
            })
        })
    }

    /// Bytes of this rank's window.
    ///
    /// # Errors
    /// The host API fails.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len];
        self.window.read(offset as usize, &mut bytes)?;
        Ok(bytes)
    }

    fn chunks(&self, len: u64, mut each: impl FnMut(u64, u64) -> Result<(), Error>) -> Result<(), Error> {
        (0..len).step_by(CHUNK as usize).try_for_each(|offset| each(offset, CHUNK.min(len - offset)))
    }

    /// Collective: ends the job.
    ///
    /// # Errors
    /// A rank was lost.
    pub fn close(self) -> Result<(), Error> {
        self.bootstrap.barrier().map_err(Error::Lost)
    }
}

/// What runs the programs: threads of this process, or the GPU of FERROGIN_DEVICE.
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

/// The introductions of all ranks, which agree with `own`.
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

/// Whether the windows of a host's ranks fit into its memory.
fn fits(layout: Layout, ranks: usize) -> bool {
    let Some(needed) = layout.bytes().checked_mul(ranks as u64) else { return false };
    machine::available_memory().is_none_or(|available| needed < available)
}

/// The bytes of an outbox: those of two fills, ranks or places differ.
fn pattern(fill: u64, rank: usize, place: u32) -> impl Iterator<Item = u8> {
    let start = fill << 40 ^ (rank as u64) << 20 ^ u64::from(place);
    (0u64..).flat_map(move |word| {
        // The finaliser of splitmix64: all bits of the result depend on all bits of the input.
        let mut z = start.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)).to_le_bytes()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_fills_ranks_and_places_differ() {
        let bytes = |fill, rank, place| pattern(fill, rank, place).take(64).collect::<Vec<_>>();
        let all = [bytes(1, 0, 0), bytes(2, 0, 0), bytes(1, 1, 0), bytes(1, 0, 1)];
        for (i, a) in all.iter().enumerate() {
            for b in &all[..i] {
                assert!(a.iter().zip(b).filter(|(a, b)| a == b).count() < 8);
            }
        }
        assert!(bytes(1, 0, 0).iter().any(|byte| *byte != 0));
    }
}
