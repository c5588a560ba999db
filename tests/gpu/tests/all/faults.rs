//! SIGKILL and SIGSTOP of one rank at a seeded moment of set-up, traffic or teardown. The other ranks end by themselves, in the time of
//! docs/plugin.md, to which the test adds the pauses of a busy machine. No message blames another rank than the killed or stopped one.

use crate::common::{ONE_CONTEXT, child, dist, over_efa, report, role};
use ferrogin_device::{Action, Context, Flags, Window as DeviceWindow};
use ferrogin_test_support::{Random, repetitions, soak};
use mini_nccl::bootstrap::Identity;
use mini_nccl::launch::{Running, Signal};
use mini_nccl::{Bootstrap, Comm, DeviceMemory, Error, Plugin, log};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime};

const NAME: &str = "rank_killed_or_stopped_is_named_in_time";
/// Jobs at the same time, because a job mostly waits; the second number is for a soak.
const JOBS: [usize; 2] = [12, 20];
/// FERROGIN_TIMEOUT of the ranks, in seconds.
const TIMEOUT: u64 = 12;
/// Limit of a wait of the test itself: no job may come near it.
const LIMIT: Duration = Duration::from_secs(150);
/// Time for all ranks to notice the fault before one of them takes its endpoints away from the others.
const LINGER: Duration = Duration::from_secs(5);
/// Spinning processes for each core, while there is load.
const SPINNERS: usize = 4;

/// The moments that a fault is tied to: a call of the victim begins.
const MOMENTS: [&str; 8] =
    ["init", "init", "regMrSym", "createContext", "traffic", "traffic", "destroyContext", "closeColl"];

/// Twice the time in which docs/plugin.md promises the end of a call, from the fault or from the begin of the call.
fn limit(call: &str) -> Duration {
    let seconds = match call {
        // listen, connect and closeListen, which sends the report.
        "init" => TIMEOUT + 5,
        "regMrSym" | "createContext" => TIMEOUT / 4 + 1,
        // The limit that the test gives the device code, and a second for the report.
        "traffic" => 3,
        _ => 5,
    };
    Duration::from_secs(2 * seconds)
}

#[test]
fn rank_killed_or_stopped_is_named_in_time() {
    if role().is_some() {
        return rank();
    }
    let Some(dist) = dist(NAME) else { return };
    let number = repetitions("FERROGIN_KILLS", 50, 500);
    let first = repetitions("FERROGIN_KILLS_FIRST", 0, 0);
    // In a soak the second half runs on a loaded machine.
    let halves = if soak() { vec![number / 2, number - number / 2] } else { vec![number] };
    let pauses = Pauses::watch();
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
                        let result = Trial::of(number).run(&dist, &pauses);
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
            "{NAME}: {trials} trials from seed {seed}, load {}: {seen:?}, {} failed, pauses so far {:.1?}",
            load.is_some(),
            problems.len(),
            pauses.total()
        );
        failures.extend(problems);
        tally.add(&seen);
        seed += trials;
    }
    assert!(failures.is_empty(), "{} of {number} trials failed:\n{}", failures.len(), failures.join("\n"));
    // A campaign in which no message blames the victim checks nothing.
    assert!(number < 20 || tally.named > 0, "{tally:?}");
}

/// What the survivors of trials saw.
#[derive(Debug, Default)]
struct Tally {
    survivors: u64,
    /// Messages that blame the victim.
    named: u64,
    /// Messages of the plugin that blame no rank.
    unknown: u64,
    /// The longest time of each call after the fault.
    longest: BTreeMap<String, Duration>,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.survivors += other.survivors;
        self.named += other.named;
        self.unknown += other.unknown;
        other.longest.iter().for_each(|(call, took)| self.took(call, *took));
    }

    fn took(&mut self, call: &str, took: Duration) {
        let longest = self.longest.entry(call.to_owned()).or_default();
        *longest = took.max(*longest);
    }
}

/// The milliseconds that sleeps of 10 ms took too long, added up by a thread: the machine stood still, or had no core for the thread.
struct Pauses(Arc<AtomicU64>);

impl Pauses {
    fn watch() -> Self {
        let total = Arc::default();
        let shared: Weak<AtomicU64> = Arc::downgrade(&total);
        std::thread::spawn(move || {
            let step = Duration::from_millis(10);
            loop {
                // The trials use this clock.
                let began = SystemTime::now();
                std::thread::sleep(step);
                let Some(total) = shared.upgrade() else { return };
                let overrun = began.elapsed().unwrap_or_default().saturating_sub(step);
                total.fetch_add(overrun.as_millis() as u64, Ordering::Relaxed);
            }
        });
        Self(total)
    }

    fn total(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

/// Processes that spin, killed on drop.
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

    fn run(&self, dist: &Path, pauses: &Pauses) -> Result<Tally, String> {
        let before = pauses.total();
        let job = child(dist, NAME, "rank", self.ranks).env("FERROGIN_TIMEOUT", TIMEOUT.to_string());
        let mut running = job.env("SOFTEFA_WIRE", self.wire).start().map_err(|error| error.to_string())?;
        let begun = |running: &Running| has_line(running, self.victim, &format!("begin {} ", self.moment));
        let began = Instant::now();
        while !begun(&running) && !has_line(&running, self.victim, "end") && began.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        let reached = begun(&running);
        std::thread::sleep(self.delay);
        let fault = now();
        running.signal(self.victim, self.signal);
        let survivors: Vec<usize> = (0..self.ranks).filter(|rank| *rank != self.victim).collect();
        let began = Instant::now();
        while !survivors.iter().all(|rank| has_line(&running, *rank, "end")) && began.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(20));
        }
        let ended = survivors.iter().all(|rank| has_line(&running, *rank, "end"));
        (0..self.ranks).for_each(|rank| running.signal(rank, Signal::SIGKILL));
        let outcome = running.wait();
        let paused = pauses.total() - before;
        let problem =
            |text: String| format!("seed {}, {self:?}, fault at {fault}: {text}\n{}", self.seed, report(&outcome));
        if !ended || !reached {
            return Err(problem(if ended { "the moment did not come" } else { "a survivor did not end" }.to_owned()));
        }
        let mut tally = Tally { survivors: survivors.len() as u64, ..Tally::default() };
        for line in outcome.lines.iter().filter(|line| line.rank != Some(self.victim)) {
            if line.text.contains("panicked") {
                return Err(problem("a panic".to_owned()));
            }
            let Some(call) = Call::parse(&line.text) else { continue };
            let took = Duration::from_millis(call.end.saturating_sub(call.begin.max(fault)));
            if took > limit(call.name) + paused {
                let text =
                    format!("{} ended {took:.1?} after the fault or its begin, with {paused:.1?} of pauses", call.name);
                return Err(problem(text));
            }
            tally.took(call.name, took);
            if !call.result.contains("GIN/ferrogin:") {
                continue;
            }
            let blamed = blamed(call.result);
            if blamed.iter().any(|rank| *rank != self.victim) {
                return Err(problem(format!("{} blames {blamed:?}: {}", call.name, call.result)));
            }
            *(if blamed.is_empty() { &mut tally.unknown } else { &mut tally.named }) += 1;
        }
        Ok(tally)
    }
}

fn has_line(running: &Running, rank: usize, start: &str) -> bool {
    running.captured().iter().any(|line| line.rank == Some(rank) && line.text.starts_with(start))
}

/// A line `call NAME BEGIN END RESULT` of a rank, with times in milliseconds.
struct Call<'a> {
    name: &'a str,
    begin: u64,
    end: u64,
    result: &'a str,
}

impl<'a> Call<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.strip_prefix("call ")?.splitn(4, ' ');
        let (name, begin, end) = (words.next()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(Self { name, begin, end, result: words.next()? })
    }
}

/// The ranks that a message of the plugin blames. A rank that closed its communicator, or that passes a report on, is not blamed.
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
        ("rank 0 aborted connect because rank 1 closed its communicator, for a reason", vec![]),
    ] {
        assert_eq!(blamed(message), ranks, "{message}");
    }
}

/// Milliseconds of the clock that all processes share.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

/// Makes a call, and prints its begin, its end and its result.
fn call<T>(name: &str, body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let begin = now();
    println!("begin {name} {begin}");
    let result = body();
    let text = result.as_ref().err().map_or_else(|| "done".to_owned(), |error| error.replace('\n', " "));
    println!("call {name} {begin} {} {text}", now());
    result
}

/// One rank: set-up, traffic to all other ranks, teardown.
fn rank() {
    // Errors of the calls are printed.
    let _ = calls();
    println!("end");
}

fn calls() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let identity = Identity::from_env().map_err(|error| error.to_string())?.ok_or("no launcher")?;
    let bootstrap = Bootstrap::join(&identity, Duration::from_secs(40)).map_err(|error| error.to_string())?;
    let bootstrap = Arc::new(bootstrap.with_timeout(Duration::from_secs(TIMEOUT)));
    let plugin = Plugin::find(&std::env::var("NCCL_GIN_PLUGIN").unwrap_or_default()).map_err(text)?;
    let comm = call("init", || Comm::init(&plugin, bootstrap, 0).map_err(text))?;
    let memory = Arc::new(DeviceMemory::alloc(4096).map_err(text)?);
    let window = call("regMrSym", || comm.register(&memory, 0).map_err(text))?;
    let context = call("createContext", || comm.create_context(&ONE_CONTEXT).map_err(text))?;
    comm.barrier().map_err(text)?;
    let sent = call("traffic", || traffic(&comm, &context, DeviceWindow(window.gin_handle())));
    if sent.is_err() || comm.barrier().is_err() {
        std::thread::sleep(LINGER);
    }
    let destroyed = call("destroyContext", || context.destroy().map_err(text));
    let deregistered = call("deregMrSym", || window.deregister().map_err(text));
    let closed = call("closeColl", || comm.close().map_err(text));
    destroyed.and(deregistered).and(closed)
}

/// Sends values to all other ranks for a while, or until the device code reports an error. The last ones are not flushed.
#[allow(unsafe_code)]
fn traffic(comm: &Comm, context: &mini_nccl::GinContext, window: DeviceWindow) -> Result<(), String> {
    // SAFETY: `createContext` returned the handle, and the caller keeps the context open.
    let kernel = unsafe { Context::from_handle(context.handle(), 0) }.map_err(|status| status.text().to_owned())?;
    kernel.set_timeout_ns(2_000_000_000);
    let peers = || (0..comm.nranks()).filter(|peer| *peer != comm.rank());
    let began = Instant::now();
    let result = (0u64..).find_map(|round| {
        let sent = peers().try_for_each(|peer| {
            let to = window.at(comm.rank() as u64 * 8);
            kernel.put_value(peer as u32, to, round, 8, Action::NONE, Flags::NONE).map(drop)
        });
        let sent = if round % 16 == 15 { sent.and_then(|()| kernel.flush()) } else { sent };
        std::thread::sleep(Duration::from_micros(100));
        (sent.is_err() || began.elapsed() > Duration::from_millis(300)).then_some(sent)
    });
    let Some(Err(status)) = result else { return Ok(()) };
    // The report comes within a second after the error.
    let began = Instant::now();
    while log::last_warn().is_none() && began.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(format!("{status:?} {}", log::last_warn().unwrap_or_default()))
}
