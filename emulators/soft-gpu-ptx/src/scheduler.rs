//! The scheduler of a launch's threads: it chooses each turn from the seed.

use crate::block::Block;
use crate::code::Op;
use crate::core::{Core, Fault};
use crate::cost::{Cost, Places};
use crate::error::{Trap, TrapKind};
use crate::launch::{Launch, PROCESSORS, Statistics, Time};
use crate::memory::{Memory, View};
use crate::observer::Observer;
use crate::posts::{Poster, Posts};
use crate::program::{Kernel, Loaded};
use crate::random::Random;
use crate::stores::Weak;
use crate::thread::{Event, Place, State, Thread};
use crate::warp;
use crate::weak::Buffer;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The most threads at once; a grid's other blocks wait for some to end.
const MAX_THREADS: usize = 1 << 16;
/// How many turns pass between checks of the clock and the caller's `stop`.
const CHECK: u32 = 256;
/// How many instructions may run without changing memory before the scheduler yields the CPU.
const QUIET: u64 = 1 << 16;

/// What a run records besides its statistics.
pub enum Watch<'a> {
    Nothing,
    /// The cost for each thread.
    Cost(Places<'a>),
    /// The executed lines.
    Lines,
    /// What the threads do.
    Observer(&'a mut dyn Observer),
}

/// The outcome of a kernel that has ended.
pub struct Ended {
    pub statistics: Statistics,
    /// The cost for each thread, if recorded.
    pub costs: Vec<Cost>,
    /// Which instructions of each function have been executed, if recorded.
    pub executed: Vec<Vec<bool>>,
}

/// A thread: its block's slot, and its index.
type Id = (u32, u32);

pub struct Scheduler<'a> {
    core: Core<'a>,
    kernel: &'a Kernel,
    launch: &'a Launch,
    stop: &'a AtomicBool,
    random: Random,
    blocks: Vec<Option<Box<Block>>>,
    free: Vec<usize>,
    /// The next block's number, and the number of blocks.
    next: u64,
    total: u64,
    /// The blocks of a cluster, which run at the same time.
    cluster: [u32; 3],
    /// Threads that make progress, and those that wait for memory to change.
    active: Vec<Id>,
    spinning: Vec<Id>,
    idle: u32,
    /// Threads that a warp instruction or barrier has let continue: empty between uses.
    woken: Vec<u32>,
    begun: Instant,
    /// The costs for exited threads, by block and thread.
    costs: BTreeMap<([u32; 3], u32), Cost>,
}

/// Returns the coordinates of item `index` in a box of this size.
fn coordinates(index: u64, [x, y, _]: [u32; 3]) -> [u32; 3] {
    let (x, y) = (u64::from(x), u64::from(y));
    [(index % x) as u32, (index / x % y) as u32, (index / x / y) as u32]
}

impl<'a> Scheduler<'a> {
    pub fn new(
        loaded: &'a Loaded,
        kernel: &'a Kernel,
        launch: &'a Launch,
        memory: &'a dyn Memory,
        stop: &'a AtomicBool,
        watch: Watch<'a>,
    ) -> Self {
        let (mut places, mut notes, mut observer) = (None, false, None);
        match watch {
            Watch::Nothing => {}
            Watch::Cost(given) => places = Some(given),
            Watch::Lines => notes = true,
            Watch::Observer(given) => observer = Some(given),
        }
        let functions = &loaded.program().functions;
        let core = Core {
            program: loaded.program(),
            templates: loaded.templates(kernel),
            view: View::new(memory),
            statistics: Statistics::default(),
            time: launch.time,
            quiet: 0,
            weak: launch.weak.then(|| Weak::new(launch.seed)),
            copies: Vec::new(),
            posts: launch.checks_posts.then(Posts::default),
            places,
            sites: if observer.is_some() { loaded.program().first_sites() } else { Vec::new() },
            observer,
            executed: notes.then(|| functions.iter().map(|function| vec![false; function.body.code.len()]).collect()),
        };
        Self {
            core,
            kernel,
            launch,
            stop,
            random: Random::new(launch.seed),
            blocks: Vec::new(),
            free: Vec::new(),
            next: 0,
            total: launch.grid.iter().map(|&blocks| u64::from(blocks)).product(),
            cluster: launch.cluster.or(kernel.required_cluster).unwrap_or([1; 3]),
            active: Vec::new(),
            spinning: Vec::new(),
            idle: 0,
            woken: Vec::new(),
            begun: Instant::now(),
            costs: BTreeMap::new(),
        }
    }

    pub fn run(mut self) -> Result<Ended, Box<Trap>> {
        let mut turns = 0u32;
        loop {
            self.begin_blocks();
            if self.active.is_empty() && self.spinning.is_empty() {
                // If there were only waiting threads left, that would already have been an error.
                self.core.settle_all().map_err(|fault| self.trap(None, fault))?;
                let Core { statistics, executed, .. } = self.core;
                let costs = self.costs.into_values().collect();
                return Ok(Ended { statistics, costs, executed: executed.unwrap_or_default() });
            }
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(CHECK) || self.idle > 0 {
                self.check()?;
            }
            self.turn()?;
        }
    }

    fn begin_blocks(&mut self) {
        let [x, y, z] = self.launch.block;
        let threads = x * y * z;
        let size = self.cluster.iter().product::<u32>();
        let clusters = std::array::from_fn(|axis| self.launch.grid[axis] / self.cluster[axis]);
        while self.next < self.total {
            let running = self.blocks.len() - self.free.len();
            let rank = self.next % u64::from(size);
            let more = (running + size as usize) * threads as usize;
            if rank == 0 && running > 0 && running >= PROCESSORS as usize && more > MAX_THREADS {
                return;
            }
            let slot = self.free.pop().unwrap_or_else(|| {
                self.blocks.push(None);
                self.blocks.len() - 1
            });
            let (first, within) = (coordinates(self.next / u64::from(size), clusters), coordinates(rank, self.cluster));
            let place = Place {
                grid: self.launch.grid,
                block: self.launch.block,
                ctaid: std::array::from_fn(|axis| first[axis] * self.cluster[axis] + within[axis]),
                cluster: self.cluster,
                explicit_cluster: self.launch.cluster.or(self.kernel.required_cluster).is_some(),
                workspace: self.launch.workspace,
                sm: slot as u32 % PROCESSORS,
                dynamic: self.launch.shared,
                shared: self.kernel.shared + self.launch.shared,
            };
            let threads: Vec<Thread> = (0..threads)
                .map(|index| {
                    let tid = coordinates(u64::from(index), self.launch.block);
                    let buffer = self.launch.weak.then(|| Buffer::new(slot as u32, threads == 1));
                    Thread::new(&self.core, self.kernel.function, index, tid, &self.launch.parameters, buffer)
                })
                .collect();
            let live = threads.len() as u32;
            self.core.statistics.threads += u64::from(live);
            self.active.extend((0..live).map(|index| (slot as u32, index)));
            let tracks = self.launch.weak && self.kernel.bulk;
            if let Some(observer) = &mut self.core.observer {
                observer.begin(place.number(), live, place.shared);
            }
            self.blocks[slot] = Some(Box::new(Block::new(place, threads, tracks)));
            self.next += 1;
        }
    }

    /// Checks the caller's `stop` and the watchdog, and lets other threads of the process run.
    fn check(&mut self) -> Result<(), Box<Trap>> {
        let any = self.active.first().or(self.spinning.first()).copied();
        if self.stop.load(Ordering::Relaxed) {
            return Err(self.trap(any, Fault::new(TrapKind::Stopped, "the kernel was stopped")));
        }
        if let Some(limit) = self.launch.watchdog.filter(|limit| self.elapsed() > *limit) {
            let cause = format!(
                "the kernel has run for {limit:?}, the watchdog's limit; this thread is one of {} still running",
                self.active.len() + self.spinning.len()
            );
            return Err(self.trap(any, Fault::new(TrapKind::Watchdog, cause)));
        }
        if self.core.quiet > QUIET {
            self.core.quiet = 0;
            self.core.view.idle();
        }
        Ok(())
    }

    fn elapsed(&self) -> Duration {
        match self.launch.time {
            Time::System => self.begun.elapsed(),
            Time::Instructions => Duration::from_nanos(self.core.statistics.instructions),
        }
    }

    /// Lets one thread execute until its turn is over or it has to wait.
    fn turn(&mut self) -> Result<(), Box<Trap>> {
        let chance = self.random.next();
        let spins = self.active.is_empty() || !self.spinning.is_empty() && chance.is_multiple_of(8);
        let list = if spins { &self.spinning } else { &self.active };
        let at = self.random.below(list.len());
        let id = list[at];
        let (slot, index) = (id.0 as usize, id.1 as usize);
        let budget = 1 + (chance >> 8) as u32 % (1 << (1 + (chance >> 3) % 8));
        // With many threads, each is rarely in the cache: let it run longer.
        let budget = if self.active.len() > 1024 { budget * 4 } else { budget };
        let Some(block) = &mut self.blocks[slot] else { return Ok(()) };
        let thread = &mut block.threads[index];
        if let State::Gather(turns) = thread.state {
            thread.state = State::Gather(turns.saturating_sub(1));
            if turns == 0 || block.all_gathered(index) {
                block.gather(index, &self.core);
            }
            return Ok(());
        }
        if let Some(posts) = &mut self.core.posts {
            posts.current = Poster { block: block.place.ctaid, thread: thread.tid };
        }
        let mut outcome = thread.execute(&mut self.core, &mut block.shared, &block.place, budget);
        if self.core.weak.is_some() && outcome.is_ok() {
            let mut drifted = thread.buffer().drift(&mut self.core).and_then(|()| self.core.drift());
            if drifted.is_ok() && !block.shared.copies.is_empty() {
                drifted = block.shared.drift(&mut self.core, self.active.is_empty());
            }
            if let Err(fault) = drifted {
                outcome = Err(fault);
            }
        }
        let thread_progressed = thread.progressed();
        // Stores of waiting threads leave, too.
        if self.core.weak.is_some() && outcome.is_ok() && chance >> 60 == 0 {
            let other = self.random.below(block.threads.len());
            if let Err(fault) = block.threads[other].buffer().drift(&mut self.core) {
                outcome = Err(fault);
            }
        }
        match outcome.map_err(|fault| self.trap(Some(id), fault))? {
            Event::Turn => {
                if !spins {
                    self.idle = 0;
                } else if thread_progressed {
                    self.idle = 0;
                    self.spinning.swap_remove(at);
                    self.active.push(id);
                }
            }
            Event::Spin => {
                if !spins {
                    self.active.swap_remove(at);
                    self.spinning.push(id);
                } else if self.active.is_empty() {
                    self.idle += 1;
                    self.wait();
                }
            }
            Event::Ended => {
                self.remove(spins, at);
                self.end(id).map_err(|fault| self.trap(Some(id), fault))?;
            }
            Event::Meets => {
                self.remove(spins, at);
                self.meet(id).map_err(|fault| self.trap(Some(id), fault))?;
            }
        }
        Ok(())
    }

    fn remove(&mut self, spins: bool, at: usize) {
        self.idle = 0;
        if spins {
            self.spinning.swap_remove(at)
        } else {
            self.active.swap_remove(at)
        };
    }

    /// Lets other threads of the process run while all threads wait for memory to change.
    fn wait(&mut self) {
        let threads = self.spinning.len() as u32;
        if !self.idle.is_multiple_of(2 * threads) {
            return;
        }
        self.core.statistics.idle += 1;
        if self.idle / threads > 256 && self.launch.time == Time::System {
            std::thread::sleep(Duration::from_micros(20));
        } else {
            self.core.view.idle();
        }
        // Don't overflow, however long the kernel waits.
        self.idle = self.idle.min(1024 * threads);
    }

    fn end(&mut self, (slot, index): Id) -> Result<(), Fault> {
        let Some(block) = &mut self.blocks[slot as usize] else { return Ok(()) };
        let thread = &mut block.threads[index as usize];
        thread.state = State::Ended;
        if let Some(depths) = &thread.depths {
            let [x, y, z] = block.place.ctaid;
            self.costs.insert(([z, y, x], index), depths.cost);
        }
        if self.core.weak.is_some() {
            thread.buffer().leave(&mut self.core)?;
        }
        let (warp, lane) = (index / 32, index % 32);
        block.ended[warp as usize] |= 1 << lane;
        block.live -= 1;
        block.ready -= 1;
        for waiting in block.warp(warp) {
            if let State::Warp(mask) = waiting.state
                && mask >> lane & 1 == 1
            {
                let other = waiting.lane();
                let line = self.core.program.line(waiting.position());
                return Err(Fault::new(
                    TrapKind::Convergence,
                    format!(
                        "lane {lane} exits, but lane {other} waits for it in line {line} with the mask {mask:#010x}; \
                         the mask may name only lanes that arrive"
                    ),
                ));
            }
        }
        if block.live == 0 {
            block.shared.end(&mut self.core)?;
            if let Some(observer) = &mut self.core.observer {
                observer.end(block.place.number());
            }
            self.blocks[slot as usize] = None;
            self.free.push(slot as usize);
            return Ok(());
        }
        block.stuck(&self.core)
    }

    /// Handles a thread at a warp instruction, barrier or `activemask`.
    fn meet(&mut self, id: Id) -> Result<(), Fault> {
        let (slot, index) = (id.0 as usize, id.1 as usize);
        let Some(block) = &mut self.blocks[slot] else { return Ok(()) };
        let instruction = block.threads[index].instruction(self.core.program);
        let mut woken = std::mem::take(&mut self.woken);
        match instruction.op {
            Op::ActiveMask => {
                // Decide whether the warp's lanes wait for each other here, and for how long.
                let (function, pc) = block.threads[index].position();
                let warp = u64::from(id.0) << 8 | u64::from(id.1 / 32);
                let here = self.launch.seed ^ (u64::from(function) << 40 | u64::from(pc) << 8) ^ warp << 20;
                let turns = [256, 256, 32, 0][Random::new(here).below(4)];
                block.threads[index].state = State::Gather(turns);
                self.active.push(id);
                self.woken = woken;
                return Ok(());
            }
            Op::Barrier { .. } => {
                block.ready -= 1;
                block.arrive(index, &mut self.core, &mut woken)?;
            }
            _ => {
                block.ready -= 1;
                warp::meet(block, index, &mut self.core, &mut woken)?;
            }
        }
        block.ready += woken.len() as u32;
        self.active.extend(woken.drain(..).map(|index| (id.0, index)));
        self.woken = woken;
        block.stuck(&self.core)
    }

    fn trap(&self, id: Option<Id>, fault: Fault) -> Box<Trap> {
        let mut trap = Box::new(Trap {
            kind: fault.kind,
            kernel: self.kernel.name.clone(),
            block: [0; 3],
            thread: [0; 3],
            module: String::new(),
            function: String::new(),
            line: 0,
            origin: None,
            cause: fault.cause,
        });
        if let Some((slot, index)) = id
            && let Some(block) = &self.blocks[slot as usize]
        {
            let thread = &block.threads[index as usize];
            let function = &self.core.program.functions[thread.position().0 as usize];
            trap.block = block.place.ctaid;
            trap.thread = thread.tid;
            trap.module = function.module.to_string();
            trap.function = function.name.clone();
            trap.line = self.core.program.line(thread.position());
            trap.origin = self.core.program.source(thread.position());
        }
        trap
    }
}
