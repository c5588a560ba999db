//! SIGKILL or SIGSTOP to one rank at a seeded moment of set-up, traffic or teardown. The other ranks end on their own,
//! and no message blames a rank other than the killed or stopped one.

use crate::common::{ONE_CONTEXT, child, dist, over_efa, report, role};
use ferrogin_device::{Action, Context, Flags, Window as DeviceWindow};
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use ferrogin_test_support::{Random, repetitions, soak};
use mini_nccl::bootstrap::Identity;
use mini_nccl::launch::{Running, Signal};
use mini_nccl::{Bootstrap, Comm, DeviceMemory, Error, Plugin, log};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const NAME: &str = "rank_killed_or_stopped_is_named";
/// Concurrent jobs: a job mostly waits. The second number is for a soak.
const JOBS: [usize; 2] = [12, 20];
/// The ranks' FERROGIN_TIMEOUT, in seconds: a rank that is silent for a quarter of it is reported.
const TIMEOUT: u64 = 20;
/// The file that a rank waits for after it has noticed the fault: closing takes its endpoints away from ranks that have
/// not noticed yet.
const RELEASE: &str = "FERROGIN_TEST_RELEASE";
/// Spinning processes per core, under load.
const SPINNERS: usize = 4;

/// The moments a fault is tied to: the start of one of the victim's calls.
const MOMENTS: [&str; 8] =
    ["init", "init", "regMrSym", "createContext", "traffic", "traffic", "destroyContext", "closeColl"];

#[test]
#[ignore = "make check"]
fn rank_killed_or_stopped_is_named() {
    if role().is_some() {
        return rank();
    }
    let Some(dist) = dist(NAME) else { return };
    let number = repetitions("FERROGIN_KILLS", 50, 500);
    let first = repetitions("FERROGIN_KILLS_FIRST", 0, 0);
    // In a soak, the second half runs on a loaded machine.
    let halves = if soak() { vec![number / 2, number - number / 2] } else { vec![number] };
    let (mut seed, mut failures, mut tally) = (first, Vec::new(), Tally::default());
    for (half, trials) in halves.into_iter().enumerate() {
        let load = (half == 1).then(Load::start);
        let (next, problems) = (AtomicU64::new(seed), Mutex::new((Vec::new(), Tally::default())));
        std::thread::scope(|scope| {
            for _ in 0..JOBS[usize::from(soak())] {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= seed + trials {
                            return;
                        }
                        let result = Trial::of(number).run(&dist);
                        let mut problems = problems.lock().unwrap();
                        match result {
                            Ok(seen) => problems.1.add(&seen),
                            Err(problem) => problems.0.push(problem),
                        }
                    }
                });
            }
        });
        let (problems, seen) = problems.into_inner().unwrap();
        println!(
            "{NAME}: {trials} trials from seed {seed}, load {}: {seen:?}, {} failed",
            load.is_some(),
            problems.len()
        );
        failures.extend(problems);
        tally.add(&seen);
        seed += trials;
    }
    assert!(failures.is_empty(), "{} of {number} trials failed:\n{}", failures.len(), failures.join("\n"));
    // A campaign where no message blames the victim checks nothing.
    assert!(number < 20 || tally.named > 0, "{tally:?}");
}

/// What the trials' survivors saw.
#[derive(Debug, Default)]
struct Tally {
    survivors: u64,
    /// Messages that blame the victim.
    named: u64,
    /// The plugin's messages that blame no rank.
    unknown: u64,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.survivors += other.survivors;
        self.named += other.named;
        self.unknown += other.unknown;
    }
}

/// Spinning processes, killed on drop.
struct Load(Vec<Child>);

impl Load {
    fn start() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let spin = || Command::new("/bin/sh").args(["-c", "while :; do :; done"]).spawn().expect("a spinning process");
        Self((0..SPINNERS * cores).map(|_| spin()).collect())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[derive(Debug)]
struct Trial {
    seed: u64,
    ranks: usize,
    victim: usize,
    signal: Signal,
    moment: &'static str,
    delay: Duration,
    wire: &'static str,
}

impl Trial {
    fn of(seed: u64) -> Self {
        let mut random = Random::new(seed + 1);
        random.next_u64();
        let ranks = 2 + random.index(3);
        let moment = random.of(&MOMENTS);
        let longest = if moment == "init" || moment == "traffic" { 250_000 } else { 10_000 };
        Self {
            seed,
            ranks,
            victim: random.index(ranks),
            signal: random.of(&[Signal::SIGKILL, Signal::SIGSTOP]),
            moment,
            delay: Duration::from_micros(random.below(longest).into()),
            wire: if over_efa() { "shm" } else { random.of(&["shm", "shm", "tcp"]) },
        }
    }

    fn run(&self, dist: &Path) -> Result<Tally, String> {
        let release = std::env::temp_dir().join(format!("ferrogin-faults-{}-{}", std::process::id(), self.seed));
        let job = child(dist, NAME, "rank", self.ranks).env("FERROGIN_TIMEOUT", TIMEOUT.to_string());
        let job = job.env("SOFTEFA_WIRE", self.wire).env(RELEASE, &release);
        let mut running = job.start().map_err(|error| error.to_string())?;
        let begun = |running: &Running| has_line(running, self.victim, &format!("begin {}", self.moment));
        await_lines(&running, |running| begun(running) || has_line(running, self.victim, "end"));
        let reached = begun(&running);
        std::thread::sleep(self.delay);
        running.signal(self.victim, self.signal);
        let survivors: Vec<usize> = (0..self.ranks).filter(|rank| *rank != self.victim).collect();
        let all = |running: &Running, starts: &[&str]| {
            survivors.iter().all(|rank| starts.iter().any(|start| has_line(running, *rank, start)))
        };
        await_lines(&running, |running| all(running, &["noticed", "end"]));
        std::fs::write(&release, "").map_err(|error| error.to_string())?;
        await_lines(&running, |running| all(running, &["end"]));
        let ended = all(&running, &["end"]);
        (0..self.ranks).for_each(|rank| running.signal(rank, Signal::SIGKILL));
        let outcome = running.wait();
        let _ = std::fs::remove_file(release);
        let problem = |text: String| format!("{self:?}: {text}\n{}", report(&outcome));
        if !ended || !reached {
            return Err(problem(if ended { "the moment did not come" } else { "a survivor did not end" }.to_owned()));
        }
        let mut tally = Tally { survivors: survivors.len() as u64, ..Tally::default() };
        for line in outcome.lines.iter().filter(|line| line.rank != Some(self.victim)) {
            if line.text.contains("panicked") {
                return Err(problem("a panic".to_owned()));
            }
            let Some((call, result)) = line.text.strip_prefix("call ").and_then(|line| line.split_once(' ')) else {
                continue;
            };
            if !result.contains("GIN/ferrogin:") {
                continue;
            }
            let blamed = blamed(result);
            if blamed.iter().any(|rank| *rank != self.victim) {
                return Err(problem(format!("{call} blames {blamed:?}: {result}")));
            }
            *(if blamed.is_empty() { &mut tally.unknown } else { &mut tally.named }) += 1;
        }
        Ok(tally)
    }
}

/// Waits for output from the ranks, up to [`HANG_LIMIT`]: the caller then reports what is missing, with all lines.
fn await_lines(running: &Running, ready: impl Fn(&Running) -> bool) {
    let began = Instant::now();
    while !ready(running) && began.elapsed() < HANG_LIMIT {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn has_line(running: &Running, rank: usize, start: &str) -> bool {
    running.captured().iter().any(|line| line.rank == Some(rank) && line.text.starts_with(start))
}

/// Returns the ranks that a message from the plugin blames. A rank that closed its communicator, or that passes on a
/// report, is not blamed.
fn blamed(message: &str) -> Vec<usize> {
    let mut ranks = Vec::new();
    for (at, word) in message.match_indices("rank ") {
        let (before, after) = (&message[..at], &message[at + word.len()..]);
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (number, after) = after.split_at(digits);
        let Ok(number) = number.parse() else { continue };
        let failed = after.starts_with(" failed") && !after.starts_with(" failed or left");
        if failed || after.starts_with(" at ") || before.ends_with("write to ") || before.ends_with("read from ") {
            ranks.push(number);
        }
    }
    ranks
}

#[test]
fn blamed_ranks_are_found_in_messages() {
    for (message, ranks) in [
        (
            "rank 2 at 10.0.0.1:7 closed its connection in connect; look for the first error in the log of rank 2",
            vec![2],
        ),
        ("rank 0 aborted connect because rank 13 failed; look for the first error in the log of rank 13", vec![13]),
        ("rank 0: a write to rank 1 on endpoint data of context 0 failed: rank 2 failed", vec![1, 2]),
        (
            "rank 1 closed its communicator before connect was done; look for the first error in the log of rank 1",
            vec![],
        ),
        ("rank 0 aborted connect because rank 1 closed its communicator, without saying why", vec![]),
    ] {
        assert_eq!(blamed(message), ranks, "{message}");
    }
}

/// Makes a call, and prints its start and its result.
fn call<T>(name: &str, body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    println!("begin {name}");
    let result = body();
    let text = result.as_ref().err().map_or_else(|| "done".to_owned(), |error| error.replace('\n', " "));
    println!("call {name} {text}");
    result
}

/// Runs one rank: set-up, traffic to all other ranks, teardown.
fn rank() {
    // The calls' errors are printed.
    let _ = calls();
    println!("end");
}

fn calls() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let identity = Identity::from_env().map_err(|error| error.to_string())?.ok_or("no launcher")?;
    let bootstrap = Bootstrap::join(&identity, HANG_LIMIT).map_err(|error| error.to_string())?;
    let bootstrap = Arc::new(bootstrap.with_timeout(Duration::from_secs(TIMEOUT)));
    let plugin = Plugin::find(&std::env::var("NCCL_GIN_PLUGIN").unwrap_or_default()).map_err(text)?;
    let comm = call("init", || Comm::init(&plugin, bootstrap, 0).map_err(text))?;
    let memory = Arc::new(DeviceMemory::alloc(4096).map_err(text)?);
    let window = call("regMrSym", || comm.register(&memory, 0).map_err(text))?;
    let context = call("createContext", || comm.create_context(&ONE_CONTEXT).map_err(text))?;
    comm.barrier().map_err(text)?;
    let sent = call("traffic", || traffic(&comm, &context, DeviceWindow(window.gin_handle())));
    if sent.is_err() || comm.barrier().is_err() {
        println!("noticed");
        let release = std::env::var_os(RELEASE).ok_or("no file to wait for")?;
        wait_until("release", || Path::new(&release).exists());
    }
    let destroyed = call("destroyContext", || context.destroy().map_err(text));
    let deregistered = call("deregMrSym", || window.deregister().map_err(text));
    let closed = call("closeColl", || comm.close().map_err(text));
    destroyed.and(deregistered).and(closed)
}

/// Sends values to all other ranks until the device code reports an error. The last ones are not flushed.
#[allow(unsafe_code)]
fn traffic(comm: &Comm, context: &mini_nccl::GinContext, window: DeviceWindow) -> Result<(), String> {
    // SAFETY: `createContext` returned the handle, and the caller keeps the context open.
    let kernel = unsafe { Context::from_handle(context.handle(), 0) }.map_err(|status| status.to_string())?;
    // The card reports a dead peer earlier.
    kernel.set_timeout_ns(HANG_LIMIT.as_nanos() as u64);
    let peers = || (0..comm.nranks()).filter(|peer| *peer != comm.rank());
    let result = (0u64..2000).try_for_each(|round| {
        let sent = peers().try_for_each(|peer| {
            let to = window.at(comm.rank() as u64 * 8);
            kernel.put_value(peer as u32, to, round, 8, Action::NONE, Flags::NONE).map(drop)
        });
        let sent = if round % 16 == 15 { sent.and_then(|()| kernel.flush()) } else { sent };
        std::thread::sleep(Duration::from_micros(100));
        sent
    });
    let Err(status) = result else { return Ok(()) };
    // The report comes after the error.
    wait_until("report of a failed request", || log::last_warn().is_some());
    Err(format!("{status:?} {}", log::last_warn().unwrap_or_default()))
}
