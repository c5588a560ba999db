//! Joins the records of all processes: what the card did with requests, against what kernels and hosts did with the
//! same memory.
//!
//! A launch's records have the clocks of its threads. Between launches, a wait orders: it acquires a request if it
//! couldn't have ended without that request's raise, and then knows what the request's poster knew. Which raises could
//! have ended a wait depends on what is ordered after it, so the orders are found in passes over all records, in order
//! of time, until no pass finds another. Hosts are ordered by time, because their barriers aren't recorded: what a
//! launch did is before all that a host does later, in any process.

use crate::clock::{Clock, Key};
use crate::event::{Event, NO_RANK, Record};
use crate::facts::Facts;
use crate::record::{Call, is_library_file};
use crate::report::{Access, Kind, Report, merge};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

/// The most requests that the join takes; beyond them, it reports races inside launches only.
const MAX_REQUESTS: usize = 1 << 17;

/// A process's records, of all its libraries.
#[derive(Default)]
struct Process {
    rank: Option<u32>,
    /// The lines of each place.
    places: HashMap<u32, Vec<String>>,
    /// Exported device memory.
    memory: Vec<Memory>,
    /// Registered memory, addresses from and to.
    regions: Vec<(u64, u64)>,
}

struct Memory {
    since: u64,
    inode: u64,
    offset: u64,
    address: u64,
    bytes: u64,
}

struct Launch {
    kernel: String,
    ended: u64,
}

struct Queue {
    ring: u64,
    slot_bytes: u64,
    slots: u64,
    doorbell: u64,
    opened: u64,
    closed: u64,
}

struct Request {
    process: usize,
    /// The process that a write goes to, or that a read comes from.
    peer: usize,
    queue: usize,
    index: u64,
    /// 1: write; 2: read.
    operation: u32,
    local: u64,
    remote: u64,
    bytes: u64,
    inline: bool,
    taken: u64,
    retired: bool,
    /// Its post among the moments; none if it wasn't posted by a kernel.
    post: Option<usize>,
}

/// A raise of a word in which a card counts, or a signal proxy.
#[derive(Clone, Copy)]
struct Raise {
    request: usize,
    amount: u64,
    time: u64,
    /// The queue's life: the word is a new one afterwards.
    life: (u64, u64),
}

/// What a thread, or a host, did.
enum What {
    Access { flags: u32, address: u64, bytes: u64, value: u64 },
    Post { slot: u64, strong: bool },
    Doorbell { address: u64, value: u64 },
    Counted { address: u64, value: u64, raw: u64, signal: u32, call: u32 },
    Began,
    Ended,
    Closed(usize),
}

/// A moment of a launch, or of a host (then `launch` is `HOST`).
struct Moment {
    process: usize,
    launch: u32,
    key: Key,
    stamp: u32,
    clock: Rc<Clock>,
    place: u32,
    time: u64,
    what: What,
}

const HOST: u32 = u32::MAX;

/// What was known at a post.
#[derive(Clone)]
struct Known {
    base: Rc<Facts>,
    launch: u32,
    key: Key,
    stamp: u32,
    clock: Rc<Clock>,
    /// The earlier requests that its signal covers.
    covers: Rc<Vec<usize>>,
}

impl Known {
    /// Whether what `key` did at `stamp` of a launch was before the post.
    fn covers(&self, launch: u32, key: Key, stamp: u32) -> bool {
        launch == self.launch && (key == self.key && stamp <= self.stamp || self.clock.covers(key, stamp))
            || self.base.covers(launch, key, stamp)
    }
}

/// A wait that a launch's thread has passed, and what it gained.
struct Wait {
    at: usize,
    gained: Rc<Facts>,
}

/// The records of a run.
#[derive(Default)]
struct Run {
    processes: Vec<Process>,
    launches: Vec<Launch>,
    queues: Vec<Queue>,
    requests: Vec<Request>,
    moments: Vec<Moment>,
    /// The raises of each word of a process: those that a card counts.
    words: HashMap<(usize, u64), Vec<Raise>>,
    /// Whether the word counts this process's own completions.
    local: HashMap<(usize, u64), Vec<usize>>,
    /// Emulated signals of a process by id, with the inbox queue, and those in memory by address.
    emulated: HashMap<(usize, u32), Vec<(Raise, usize)>>,
    in_memory: HashMap<(usize, u64), Vec<Raise>>,
    /// The addresses at which each emulated signal was looked at.
    bases: HashMap<usize, BTreeSet<u64>>,
    /// The requests that raise a signal.
    raising: BTreeSet<usize>,
    /// Resets of words: when, and the count.
    resets: HashMap<(usize, u64), Vec<(u64, u64)>>,
}

/// Returns the mistakes in the records of all processes, one list per file.
pub fn join(files: &[Vec<Record>]) -> Vec<Report> {
    let run = Run::new(files);
    let mut reports = Vec::new();
    merge(&mut reports, run.races(files));
    if run.requests.len() <= MAX_REQUESTS {
        merge(&mut reports, run.check());
    }
    reports
}

fn pid(records: &[Record]) -> Option<(u32, Option<u32>)> {
    match records.first()?.event {
        Event::Process { pid, rank, .. } => Some((pid, Some(rank).filter(|rank| *rank != NO_RANK))),
        _ => None,
    }
}

impl Run {
    fn new(files: &[Vec<Record>]) -> Self {
        let mut run = Self::default();
        let mut pids: HashMap<u32, usize> = HashMap::new();
        let mut of_file = Vec::new();
        let mut cards: HashMap<u64, usize> = HashMap::new();
        for records in files {
            let (pid, rank) = pid(records).unwrap_or_default();
            let process = *pids.entry(pid).or_insert_with(|| {
                run.processes.push(Process { rank, ..Process::default() });
                run.processes.len() - 1
            });
            of_file.push(process);
            for record in records {
                if let Event::Card { card } = record.event {
                    cards.insert(card, process);
                }
            }
        }
        for (records, &process) in files.iter().zip(&of_file) {
            run.gpu(process, records);
        }
        let mut requests: HashMap<(u64, u64), usize> = HashMap::new();
        let mut queues: HashMap<(u64, u32), Vec<usize>> = HashMap::new();
        for (records, &process) in files.iter().zip(&of_file) {
            run.card(process, records, &cards, &mut requests, &mut queues);
        }
        // The times of different threads' records may be out of order by a little.
        run.moments.sort_by_key(|moment| moment.time);
        run.match_posts();
        for (records, &process) in files.iter().zip(&of_file) {
            run.raises(process, records, &requests, &queues);
        }
        for at in 0..run.moments.len() {
            let Moment { process, time, ref what, .. } = run.moments[at];
            if let What::Counted { address, raw, signal, call, .. } = *what {
                if signal != u32::MAX && !run.words.contains_key(&(process, address)) {
                    run.bases.entry(process).or_default().insert(address.wrapping_sub(8 * u64::from(signal)));
                }
                if call == Call::Reset as u32 {
                    run.resets.entry((process, address)).or_default().push((time, raw));
                }
            }
        }
        run
    }

    /// Reads what a GPU did.
    fn gpu(&mut self, process: usize, records: &[Record]) {
        let mut launches: HashMap<u64, u32> = HashMap::new();
        let mut clocks: HashMap<(u32, u32), Rc<Clock>> = HashMap::new();
        for Record { time, event } in records {
            let time = *time;
            let mut add = |launch: u64, thread: u64, stamp: u32, clock: u32, place: u32, what: What| {
                let launch = launches.get(&launch).copied().unwrap_or(HOST);
                let clock = clocks.get(&(launch, clock)).cloned().unwrap_or_default();
                self.moments.push(Moment { process, launch, key: thread, stamp, clock, place, time, what });
            };
            match event {
                Event::Memory { address, bytes, inode, offset } => {
                    let memory =
                        Memory { since: time, inode: *inode, offset: *offset, address: *address, bytes: *bytes };
                    self.processes[process].memory.push(memory);
                }
                Event::Place { place, lines, .. } => {
                    self.processes[process].places.insert(*place, program_lines(lines));
                }
                Event::Launch { launch, kernel } => {
                    launches.insert(*launch, self.launches.len() as u32);
                    self.launches.push(Launch { kernel: kernel.clone(), ended: u64::MAX });
                    let number = self.launches.len() as u32 - 1;
                    self.moments.push(host(process, number, time, What::Began));
                }
                Event::Ended { launch } => {
                    let number = launches.get(launch).copied().unwrap_or(HOST);
                    if let Some(ended) = self.launches.get_mut(number as usize) {
                        ended.ended = time;
                    }
                    self.moments.push(host(process, number, time, What::Ended));
                }
                Event::HostCopy { write, address, bytes } => {
                    let (flags, address, bytes) = (u32::from(*write), *address, *bytes);
                    self.moments.push(host(process, HOST, time, What::Access { flags, address, bytes, value: 0 }));
                }
                Event::Clock { launch, clock, entries } => {
                    let launch = launches.get(launch).copied().unwrap_or(HOST);
                    let entries = entries.chunks_exact(2).map(|pair| (pair[0], pair[1] as u32)).collect();
                    clocks.insert((launch, *clock), Rc::new(Clock::new(entries)));
                }
                &Event::Access { launch, thread, stamp, clock, place, flags, address, bytes, value } => {
                    add(launch, thread, stamp, clock, place, What::Access { flags, address, bytes, value });
                }
                &Event::Post { launch, thread, stamp, clock, place, slot, strong } => {
                    add(launch, thread, stamp, clock, place, What::Post { slot, strong });
                }
                &Event::Doorbell { launch, thread, stamp, place, address, value } => {
                    add(launch, thread, stamp, 0, place, What::Doorbell { address, value });
                }
                &Event::Counted { launch, thread, stamp, clock, place, address, value, raw, signal, call } => {
                    add(launch, thread, stamp, clock, place, What::Counted { address, value, raw, signal, call });
                }
                _ => {}
            }
        }
    }

    /// Reads what a card did with queues and requests.
    fn card(
        &mut self,
        process: usize,
        records: &[Record],
        cards: &HashMap<u64, usize>,
        requests: &mut HashMap<(u64, u64), usize>,
        queues: &mut HashMap<(u64, u32), Vec<usize>>,
    ) {
        for Record { time, event } in records {
            match *event {
                Event::Queue { card, queue, ring, slot_bytes, slots, doorbell } => {
                    let (slot_bytes, slots) = (slot_bytes.into(), slots.into());
                    queues.entry((card, queue)).or_default().push(self.queues.len());
                    let (opened, closed) = (*time, u64::MAX);
                    self.queues.push(Queue { ring, slot_bytes, slots, doorbell, opened, closed });
                }
                Event::QueueClosed { card, queue, .. } => {
                    if let Some(&at) = queues.get(&(card, queue)).and_then(|all| all.last()) {
                        self.queues[at].closed = *time;
                        self.moments.push(host(process, HOST, *time, What::Closed(at)));
                    }
                }
                Event::Region { address, bytes, .. } => {
                    self.processes[process].regions.push((address, address + bytes));
                }
                Event::Taken { card, request, queue, index, operation, peer, local, remote, bytes, inline, .. } => {
                    let Some(&queue) = queues.get(&(card, queue)).and_then(|all| all.last()) else { continue };
                    requests.insert((card, request), self.requests.len());
                    self.requests.push(Request {
                        process,
                        peer: cards.get(&peer).copied().unwrap_or(usize::MAX),
                        queue,
                        index,
                        operation,
                        local,
                        remote,
                        bytes,
                        inline,
                        taken: *time,
                        retired: false,
                        post: None,
                    });
                }
                Event::Retired { card, request, .. } => {
                    if let Some(&at) = requests.get(&(card, request)) {
                        self.requests[at].retired = true;
                    }
                }
                _ => {}
            }
        }
    }

    /// Finds the post of each request: the last one to its slot before the card took it.
    fn match_posts(&mut self) {
        let mut slots: HashMap<(usize, u64), Vec<usize>> = HashMap::new();
        for (at, moment) in self.moments.iter().enumerate() {
            if let What::Post { slot, .. } = moment.what {
                slots.entry((moment.process, slot / 64)).or_default().push(at);
            }
        }
        for request in &mut self.requests {
            let queue = &self.queues[request.queue];
            let slot = queue.ring + request.index % queue.slots.max(1) * queue.slot_bytes;
            let found = slots.get(&(request.process, slot / 64)).into_iter().flatten().rev();
            request.post = found.copied().find(|&at| self.moments[at].time <= request.taken);
        }
    }

    /// Reads what raised signals and counters.
    fn raises(
        &mut self,
        process: usize,
        records: &[Record],
        requests: &HashMap<(u64, u64), usize>,
        queues: &HashMap<(u64, u32), Vec<usize>>,
    ) {
        let mut counters: HashMap<(u64, u64), (u64, usize, bool)> = HashMap::new();
        // The number of a queue is given again after its end.
        let queue_at = |run: &Self, card: u64, queue: u32, time: u64| {
            let all = queues.get(&(card, queue)).into_iter().flatten().rev();
            all.copied().find(|&at| run.queues[at].opened <= time)
        };
        for Record { time, event } in records {
            match event {
                &Event::Counter { card, counter, queue, counts, inode, address } => {
                    let Some(queue) = queue_at(self, card, queue, *time) else { continue };
                    // Files of freed memory may give their numbers to others.
                    let files = self.processes[process].memory.iter().rev().filter(|memory| memory.since <= *time);
                    let mut files = files.filter(|memory| memory.inode == inode);
                    let found = files.find_map(|memory| {
                        let at = address.checked_sub(memory.offset).filter(|at| *at < memory.bytes)?;
                        Some(memory.address + at)
                    });
                    let address = if inode == 0 { Some(address) } else { found };
                    if let Some(address) = address.filter(|_| counts < 3) {
                        counters.insert((card, counter), (address, queue, counts == 1));
                        if counts == 1 {
                            self.local.entry((process, address)).or_default().push(queue);
                        }
                    }
                }
                &Event::Raised { card, counter, from, request, .. } => {
                    let Some(&(address, queue, is_local)) = counters.get(&(card, counter)) else { continue };
                    let Some(&request) = requests.get(&(from, request)) else { continue };
                    let life = (self.queues[queue].opened, self.queues[queue].closed);
                    let raise = Raise { request, amount: 1, time: *time, life };
                    if !is_local {
                        self.raising.insert(request);
                    }
                    self.words.entry((process, address)).or_default().push(raise);
                }
                Event::Arrived { card, queue, from, request, words } => {
                    let Some(queue) = queue_at(self, *card, *queue, *time) else { continue };
                    let Some(&request) = requests.get(&(*from, *request)) else { continue };
                    let life = (self.queues[queue].opened, self.queues[queue].closed);
                    self.raising.insert(request);
                    let raise = |amount| Raise { request, amount, time: *time, life };
                    // As in ferrogin_ffi::signals: immediate data, or a message.
                    match words[..] {
                        [word] => {
                            let (id, amount) = (word as u32 & 0xffff, (word >> 16 & 0xfff) + 1);
                            self.emulated.entry((process, id)).or_default().push((raise(amount), queue));
                        }
                        [head, amount, address, _] if head & 0xff == 2 => {
                            self.in_memory.entry((process, address)).or_default().push(raise(amount));
                        }
                        [head, amount, ..] => {
                            let id = (head >> 32) as u32;
                            self.emulated.entry((process, id)).or_default().push((raise(amount), queue));
                        }
                        [] => {}
                    }
                }
                _ => {}
            }
        }
    }

    /// Whether a card counts in the word, or a peer's signal is added to it in memory.
    fn is_word(&self, process: usize, address: u64) -> bool {
        self.words.contains_key(&(process, address)) || self.in_memory.contains_key(&(process, address))
    }

    /// Returns the raises of a word that a moment looks at, and the count of raises at the last reset.
    fn raises_of(&self, moment: &Moment, address: u64, signal: u32) -> (Vec<Raise>, u64) {
        let (process, time) = (moment.process, moment.time);
        let alive = |raise: &&Raise| raise.life.0 <= time && time <= raise.life.1;
        let reset = self.resets.get(&(process, address)).into_iter().flatten().rev().find(|reset| reset.0 < time);
        if let Some(raises) = self.words.get(&(process, address)) {
            let raises: Vec<Raise> = raises.iter().filter(alive).copied().collect();
            let begun = raises.first().map_or(u64::MAX, |raise| raise.life.0);
            return (raises, reset.filter(|reset| reset.0 > begun).map_or(0, |reset| reset.1));
        }
        if signal == u32::MAX && !self.is_word(process, address) {
            let all = self.emulated.iter().filter(|((owner, _), _)| *owner == process).flat_map(|(_, raises)| raises);
            return (all.map(|(raise, _)| *raise).filter(|raise| alive(&raise) && raise.time <= time).collect(), 0);
        }
        let found: Vec<Raise> = if let Some(raises) = self.in_memory.get(&(process, address)) {
            raises.iter().filter(alive).copied().collect()
        } else {
            let all = self.emulated.get(&(process, signal)).into_iter().flatten();
            let all: Vec<_> = all.filter(|(raise, _)| alive(&raise)).collect();
            // Contexts' words and the queues that their signals come in on are made in the same order.
            let queues: BTreeSet<usize> = all.iter().map(|(_, queue)| *queue).collect();
            let base = address.wrapping_sub(8 * u64::from(signal));
            let bases = self.bases.get(&process).filter(|bases| bases.len() == queues.len());
            let own = bases.and_then(|bases| queues.iter().nth(bases.iter().position(|one| *one == base)?));
            all.into_iter().filter(|(_, queue)| own.is_none_or(|own| own == queue)).map(|(raise, _)| *raise).collect()
        };
        let before =
            reset.map_or(0, |reset| found.iter().filter(|raise| raise.time <= reset.0).map(|raise| raise.amount).sum());
        (found, before)
    }

    /// Finds all orders, and then the accesses that nothing orders.
    fn check(&self) -> Vec<Report> {
        let mut known = vec![None; self.requests.len()];
        let mut found = 0;
        loop {
            let mut pass = Pass::new(self, &known, None);
            pass.run();
            let (now, next) = (pass.acquired, pass.known);
            known = next;
            if now == found {
                break;
            }
            found = now;
        }
        let mut pass = Pass::new(self, &known, Some(Checks::new(self)));
        pass.run();
        let mut reports = pass.reports;
        merge(&mut reports, self.unrung());
        reports
    }

    /// Returns an access for a report.
    fn side(&self, process: usize, launch: u32, place: u32, what: &str) -> Access {
        let kernel = self.launches.get(launch as usize).map_or("", |launch| &launch.kernel);
        let known = self.processes[process].places.get(&place).filter(|_| launch != HOST);
        Access {
            rank: self.processes[process].rank,
            kernel: kernel.into(),
            what: what.into(),
            lines: known.cloned().unwrap_or_default(),
        }
    }

    fn side_of(&self, at: usize, what: &str) -> Access {
        let Moment { process, launch, place, .. } = self.moments[at];
        self.side(process, launch, place, what)
    }

    fn request_side(&self, request: &Request) -> Option<Access> {
        let bytes = request.bytes;
        let what = match request.operation {
            2 => format!("get of {bytes} bytes"),
            _ if bytes == 0 => "signal".to_owned(),
            _ => format!("put of {bytes} bytes"),
        };
        Some(self.side_of(request.post?, &what))
    }

    /// Describes the memory at an address of a process.
    fn memory(&self, process: usize, address: u64) -> String {
        let of = self.processes[process].rank.map_or_else(|| "a process".to_owned(), |rank| format!("rank {rank}"));
        let regions = self.processes[process].regions.iter().filter(|region| (region.0..region.1).contains(&address));
        match regions.min_by_key(|region| region.1 - region.0) {
            Some(region) => format!("the window of {of} at +{}", address - region.0),
            None => format!("the memory of {of} at {address:#x}"),
        }
    }

    /// Requests whose doorbell nobody had rung when their kernel ended.
    fn unrung(&self) -> Vec<Report> {
        let mut rings: HashMap<(usize, u64), Vec<(u64, u32)>> = HashMap::new();
        for moment in &self.moments {
            if let What::Doorbell { address, value } = moment.what {
                rings.entry((moment.process, address)).or_default().push((moment.time, value as u32));
            }
        }
        let mut reports = Vec::new();
        for request in &self.requests {
            let Some(post) = request.post.map(|at| &self.moments[at]) else { continue };
            let Some(launch) = self.launches.get(post.launch as usize) else { continue };
            let queue = &self.queues[request.queue];
            let rung = rings.get(&(request.process, queue.doorbell)).into_iter().flatten().any(|&(time, value)| {
                (queue.opened..=launch.ended).contains(&time)
                    && (value.wrapping_sub(request.index as u32 + 1) as i32) >= 0
            });
            if launch.ended < request.taken && !rung {
                merge(
                    &mut reports,
                    self.request_side(request)
                        .map(|first| self.report(Kind::Unrung, first, None, String::new(), request.bytes))
                        .into_iter()
                        .collect(),
                );
            }
        }
        reports
    }

    fn report(&self, kind: Kind, first: Access, second: Option<Access>, memory: String, bytes: u64) -> Report {
        Report { kind, first, second, memory, bytes, count: 1 }
    }

    /// The races that were found inside launches.
    fn races(&self, files: &[Vec<Record>]) -> Vec<Report> {
        let pids: Vec<_> = files.iter().map(|records| pid(records)).collect();
        let mut order: Vec<u32> = Vec::new();
        for (pid, _) in pids.iter().flatten() {
            if !order.contains(pid) {
                order.push(*pid);
            }
        }
        let mut reports = Vec::new();
        for (records, id) in files.iter().zip(&pids) {
            let Some(process) = id.and_then(|(pid, _)| order.iter().position(|known| *known == pid)) else { continue };
            let mut kernels: HashMap<u64, &str> = HashMap::new();
            for record in records {
                match record.event {
                    Event::Launch { launch, ref kernel } => {
                        kernels.insert(launch, kernel);
                    }
                    Event::Raced { launch, first, second, flags, address, bytes, count, .. } => {
                        let what = |writes: bool| if writes { "store" } else { "load" };
                        let side = |place: u32, what: &str| {
                            let kernel = kernels.get(&launch).copied().unwrap_or_default().to_owned();
                            Access { kernel, ..self.side(process, 0, place, what) }
                        };
                        let unwritten = flags & 8 != 0;
                        let proxy = if flags & 16 != 0 {
                            "bulk copy without fence.proxy.async before it"
                        } else {
                            what(flags & 2 != 0)
                        };
                        let space = if flags & 4 != 0 { "shared memory" } else { "global memory" };
                        let report = Report {
                            kind: if unwritten { Kind::Unwritten } else { Kind::Race },
                            first: side(first, what(flags & 1 != 0)),
                            second: (!unwritten).then(|| side(second, proxy)),
                            memory: format!("{space} at {address:#x}"),
                            bytes: bytes.into(),
                            count,
                        };
                        merge(&mut reports, vec![report]);
                    }
                    _ => {}
                }
            }
        }
        reports
    }
}

fn host(process: usize, launch: u32, time: u64, what: What) -> Moment {
    Moment { process, launch, key: 0, stamp: 0, clock: Rc::default(), place: u32::MAX, time, what }
}

/// Returns the lines of a place, the program's first: without those of libraries and of stand-ins for the toolkit's
/// headers.
fn program_lines(lines: &str) -> Vec<String> {
    let all: Vec<&str> = lines.lines().collect();
    let skipped = all.iter().take_while(|line| {
        let file = line.rsplit_once(':').map_or(**line, |(file, _)| file);
        is_library_file(file) || file.contains("ferrogin/clang/") || file.contains("/lib/clang/")
    });
    let skipped = skipped.count();
    all[if skipped < all.len() { skipped } else { 0 }..].iter().map(|line| (*line).to_owned()).collect()
}

/// Where requests read and write, by page of a process.
struct Checks {
    /// Requests by the process and page that they write.
    targets: HashMap<(usize, u64), Vec<usize>>,
    /// Requests by the process and page of their source.
    sources: HashMap<(usize, u64), Vec<usize>>,
}

const PAGE: u64 = 4096;

fn pages(address: u64, bytes: u64) -> std::ops::RangeInclusive<u64> {
    address / PAGE..=(address + bytes.max(1) - 1) / PAGE
}

fn overlap(one: (u64, u64), other: (u64, u64)) -> u64 {
    (one.0 + one.1).min(other.0 + other.1).saturating_sub(one.0.max(other.0))
}

impl Request {
    /// Returns the process and the bytes that the request writes.
    fn target(&self) -> (usize, u64, u64) {
        if self.operation == 2 { (self.process, self.local, self.bytes) } else { (self.peer, self.remote, self.bytes) }
    }

    /// Returns the process and the bytes that the request reads, if it reads memory of this process.
    fn source(&self) -> Option<(usize, u64, u64)> {
        (self.operation == 1 && !self.inline && self.bytes > 0).then_some((self.process, self.local, self.bytes))
    }
}

impl Checks {
    fn new(run: &Run) -> Self {
        let mut checks = Self { targets: HashMap::new(), sources: HashMap::new() };
        for (at, request) in run.requests.iter().enumerate().filter(|(_, request)| request.post.is_some()) {
            let (process, address, bytes) = request.target();
            if bytes > 0 && request.operation < 3 {
                pages(address, bytes).for_each(|page| checks.targets.entry((process, page)).or_default().push(at));
            }
            if let Some((process, address, bytes)) = request.source() {
                pages(address, bytes).for_each(|page| checks.sources.entry((process, page)).or_default().push(at));
            }
        }
        checks
    }

    fn at(map: &HashMap<(usize, u64), Vec<usize>>, process: usize, address: u64, bytes: u64) -> BTreeSet<usize> {
        pages(address, bytes).flat_map(|page| map.get(&(process, page)).into_iter().flatten().copied()).collect()
    }
}

/// A pass over all moments in order of time.
struct Pass<'a> {
    run: &'a Run,
    /// What was known at posts, by request, as the pass before found it.
    before: &'a [Option<Known>],
    known: Vec<Option<Known>>,
    /// The requests of each moment that is a post.
    posts: HashMap<usize, Vec<usize>>,
    /// What all hosts know.
    hosts: Facts,
    starts: BTreeMap<u32, Facts>,
    waits: HashMap<u32, Vec<Wait>>,
    /// What is known once a request has arrived.
    arrivals: Vec<Option<Rc<Facts>>>,
    acquired: usize,
    targets: Checks,
    checks: bool,
    reports: Vec<Report>,
}

impl<'a> Pass<'a> {
    fn new(run: &'a Run, before: &'a [Option<Known>], checks: Option<Checks>) -> Self {
        let mut posts: HashMap<usize, Vec<usize>> = HashMap::new();
        for (request, post) in run.requests.iter().enumerate().filter_map(|(at, request)| Some((at, request.post?))) {
            posts.entry(post).or_default().push(request);
        }
        Self {
            run,
            before,
            known: vec![None; run.requests.len()],
            arrivals: vec![None; run.requests.len()],
            posts,
            hosts: Facts::default(),
            starts: BTreeMap::new(),
            waits: HashMap::new(),
            acquired: 0,
            checks: checks.is_some(),
            targets: checks.unwrap_or_else(|| Checks::new(run)),
            reports: Vec::new(),
        }
    }

    fn run(&mut self) {
        for at in 0..self.run.moments.len() {
            let moment = &self.run.moments[at];
            match moment.what {
                What::Began => {
                    self.starts.insert(moment.launch, self.hosts.clone());
                }
                What::Ended => {
                    self.hosts.end(moment.launch);
                    for wait in self.waits.get(&moment.launch).into_iter().flatten() {
                        self.hosts.join(&wait.gained);
                    }
                }
                What::Closed(queue) => {
                    let requests = self.run.requests.iter().enumerate();
                    let closed = requests.filter(|(_, request)| request.queue == queue && request.retired);
                    closed.for_each(|(request, _)| self.hosts.complete(request));
                }
                What::Post { strong, .. } => self.post(at, strong),
                What::Counted { address, value, raw, signal, call } => {
                    self.counted(at, address, value, raw, signal, call)
                }
                What::Access { flags, address, bytes, value } => self.access(at, flags, address, bytes, value),
                What::Doorbell { .. } => {}
            }
        }
    }

    /// Returns what is known at a moment.
    fn facts(&self, at: usize) -> Facts {
        let moment = &self.run.moments[at];
        let Some(start) = self.starts.get(&moment.launch) else { return self.hosts.clone() };
        let mut facts = start.clone();
        for wait in self.waits.get(&moment.launch).into_iter().flatten() {
            let waited = &self.run.moments[wait.at];
            if waited.key == moment.key && wait.at < at || moment.clock.covers(waited.key, waited.stamp) {
                facts.join(&wait.gained);
            }
        }
        facts
    }

    fn post(&mut self, at: usize, strong: bool) {
        let Some(requests) = self.posts.get(&at).cloned() else { return };
        let moment = &self.run.moments[at];
        let base = Rc::new(self.facts(at));
        for request in requests {
            let mut known = Known {
                base: base.clone(),
                launch: moment.launch,
                key: moment.key,
                stamp: moment.stamp,
                clock: moment.clock.clone(),
                covers: Rc::default(),
            };
            if strong {
                let of = &self.run.requests[request];
                let earlier = self.run.requests.iter().enumerate().filter(|(_, other)| {
                    let post = other.post.map(|post| &self.run.moments[post]);
                    (other.process, other.peer) == (of.process, of.peer)
                        && post.is_some_and(|post| known.covers(post.launch, post.key, post.stamp))
                });
                known.covers = Rc::new(earlier.map(|(other, _)| other).collect());
            }
            if self.checks {
                self.check_post(request, &known);
            }
            (self.known[request], self.arrivals[request]) = (Some(known), None);
        }
    }

    /// Returns what a thread knows that knows that a request has arrived.
    fn arrival(&mut self, request: usize) -> Rc<Facts> {
        if let Some(facts) = &self.arrivals[request] {
            return facts.clone();
        }
        let mut facts = Facts::default();
        facts.complete(request);
        // What is posted later, here, could have come first.
        if let Some(known) = self.known[request].as_ref().or(self.before[request].as_ref()) {
            known.covers.iter().for_each(|other| facts.complete(*other));
            facts.join(&known.base);
            let mut clock = known.clock.clone();
            Rc::make_mut(&mut clock).raise(known.key, known.stamp);
            facts.see(known.launch, &clock);
        }
        let facts = Rc::new(facts);
        self.arrivals[request] = Some(facts.clone());
        facts
    }

    fn counted(&mut self, at: usize, address: u64, value: u64, raw: u64, signal: u32, call: u32) {
        let moment = &self.run.moments[at];
        let mut gained = Facts::default();
        let queues = self.run.local.get(&(moment.process, address));
        if call == Call::Flush as u32 {
            let Some(queues) = queues else { return };
            // A flush covers what was posted before it, on a queue that has completed as many requests.
            let facts = self.facts(at);
            for (request, of) in self.run.requests.iter().enumerate() {
                let Some(post) = of.post.map(|post| &self.run.moments[post]) else { continue };
                let life = self.run.queues[of.queue].opened..=self.run.queues[of.queue].closed;
                let earlier = (post.launch, post.key) == (moment.launch, moment.key) && post.stamp < moment.stamp
                    || post.launch == moment.launch && moment.clock.covers(post.key, post.stamp)
                    || facts.covers(post.launch, post.key, post.stamp);
                if of.process == moment.process
                    && queues.contains(&of.queue)
                    && life.contains(&moment.time)
                    && of.index < raw
                    && earlier
                {
                    gained.complete(request);
                }
            }
        } else if call == Call::Value as u32 && signal == u32::MAX && queues.is_some() {
            // A post that looks at the queue's own counter.
            return;
        } else if call != Call::Reset as u32 {
            let (raises, reset) = self.run.raises_of(moment, address, signal);
            if signal == u32::MAX && !self.run.is_word(moment.process, address) {
                // An emulated signal whose id isn't known: those of that amount.
                let alike = raises.iter().filter(|raise| raise.amount == raw).map(|raise| raise.request);
                for request in alike.collect::<Vec<_>>() {
                    gained.join(&self.arrival(request));
                }
                return self.passed(at, gained);
            }
            let waits = call == Call::Wait as u32 || !self.run.words.contains_key(&(moment.process, address));
            let count = if waits { value.wrapping_add(reset) } else { raw };
            // A raise that is posted after this moment can't have ended the wait.
            let later = |request: usize| {
                let known = self.before[request].as_ref();
                known.is_some_and(|known| known.covers(moment.launch, moment.key, moment.stamp))
            };
            let possible: Vec<&Raise> = raises.iter().filter(|raise| !later(raise.request)).collect();
            // That a raise is ruled out is progress, even if the wait gains nothing yet.
            self.acquired += raises.len() - possible.len();
            let total: u64 = possible.iter().map(|raise| raise.amount).sum();
            if total > 0 {
                let arrivals = possible.iter().map(|raise| (raise.amount, raise.request));
                let arrivals: Vec<_> = arrivals.collect();
                let arrivals: Vec<_> =
                    arrivals.into_iter().map(|(amount, request)| (amount, self.arrival(request))).collect();
                gained = Facts::of_any(&arrivals, count.min(total));
            }
        }
        if self.checks {
            self.check_baseline(at, address, signal, call);
        }
        self.passed(at, gained);
    }

    /// Adds what a thread has gained.
    fn passed(&mut self, at: usize, gained: Facts) {
        if !gained.is_empty() {
            self.acquired += gained.size();
            let launch = self.run.moments[at].launch;
            self.waits.entry(launch).or_default().push(Wait { at, gained: Rc::new(gained) });
        }
    }

    fn access(&mut self, at: usize, flags: u32, address: u64, bytes: u64, value: u64) {
        let moment = &self.run.moments[at];
        if flags == 2 && bytes <= 8 {
            let key = (moment.process, address);
            if self.run.local.contains_key(&key) {
                return self.counted(at, address, value, value, u32::MAX, Call::Flush as u32);
            }
            if self.run.is_word(key.0, key.1) {
                return self.counted(at, address, value, value, u32::MAX, Call::Value as u32);
            }
            // Who polls a value that a single request of at most 8 bytes writes has that value, and what its poster
            // knew.
            let mut gained = Facts::default();
            let polled =
                Checks::at(&self.targets.targets, moment.process, address, bytes).into_iter().filter(|&request| {
                    let of = &self.run.requests[request];
                    let target = of.target();
                    of.bytes <= 8 && of.taken < moment.time && overlap((target.1, target.2), (address, bytes)) > 0
                });
            let polled: Vec<usize> = polled.collect();
            polled.iter().for_each(|request| gained.join(&self.arrival(*request)));
            self.passed(at, gained);
        }
        if self.checks {
            self.check_access(at, flags, address, bytes);
        }
    }

    /// Whether what a moment did is before a request's post.
    fn before_post(&self, at: usize, request: usize) -> bool {
        let moment = &self.run.moments[at];
        let post = self.run.requests[request].post.map(|post| &self.run.moments[post]);
        let known = self.known[request].as_ref().or(self.before[request].as_ref());
        if moment.launch == HOST {
            // The host comes before launches that begin later.
            return post.is_some_and(|post| post.time > moment.time);
        }
        known.is_some_and(|known| known.covers(moment.launch, moment.key, moment.stamp))
    }

    fn check_access(&mut self, at: usize, flags: u32, address: u64, bytes: u64) {
        let run = self.run;
        let process = run.moments[at].process;
        let writes = flags & 1 != 0;
        let (targets, sources) = (
            Checks::at(&self.targets.targets, process, address, bytes),
            if writes { Checks::at(&self.targets.sources, process, address, bytes) } else { BTreeSet::new() },
        );
        if targets.is_empty() && sources.is_empty() {
            return;
        }
        let facts = self.facts(at);
        let host = run.moments[at].launch == HOST;
        let what = match (host, writes) {
            (true, true) => "copy to this memory",
            (true, false) => "copy from this memory",
            (false, true) => "store",
            (false, false) => "load",
        };
        let all = targets
            .into_iter()
            .map(|request| (request, true))
            .chain(sources.into_iter().map(|request| (request, false)));
        for (request, is_target) in all {
            let of = &run.requests[request];
            let range = if is_target { of.target() } else { of.source().unwrap_or_default() };
            let common = overlap((range.1, range.2), (address, bytes));
            if common == 0 || facts.has(request) || self.before_post(at, request) {
                continue;
            }
            // A value that is polled may come at any time.
            if is_target && flags == 2 && of.bytes <= 8 {
                continue;
            }
            let kind = match (is_target, writes) {
                (false, _) => Kind::Source,
                (true, true) => Kind::Write,
                (true, false) if self.is_weak(request, &facts) => Kind::Weak,
                (true, false) => Kind::Read,
            };
            let Some(first) = run.request_side(of) else { continue };
            let memory = run.memory(process, address.max(range.1));
            let report = run.report(kind, first, Some(run.side_of(at, what)), memory, common);
            merge(&mut self.reports, vec![report]);
        }
    }

    /// Whether a signal that was posted after the request, to the same peer, is known to have arrived.
    fn is_weak(&self, request: usize, facts: &Facts) -> bool {
        let of = &self.run.requests[request];
        let Some(post) = of.post.map(|post| &self.run.moments[post]) else { return false };
        // Who waits for the wrong signal has another mistake.
        !self.run.raising.contains(&request)
            && self.run.requests.iter().enumerate().any(|(other, later)| {
                (later.process, later.peer) == (of.process, of.peer)
                    && (later.bytes == 0 || later.operation == 3)
                    && facts.has(other)
                    && self.known[other].as_ref().is_some_and(|known| known.covers(post.launch, post.key, post.stamp))
            })
    }

    /// Checks a request against earlier ones that write the same bytes.
    fn check_post(&mut self, request: usize, known: &Known) {
        let run = self.run;
        let of = &run.requests[request];
        let (process, address, bytes) = of.target();
        if bytes == 0 || of.operation > 2 {
            return;
        }
        for other in Checks::at(&self.targets.targets, process, address, bytes) {
            let earlier = &run.requests[other];
            let target = earlier.target();
            let common = overlap((target.1, target.2), (address, bytes));
            // Both directions are checked at the later of the two.
            let Some(other_known) = self.known[other].as_ref().filter(|_| other != request && common > 0) else {
                continue;
            };
            if known.base.has(other) || other_known.base.has(request) {
                continue;
            }
            let (Some(first), Some(second)) = (run.request_side(earlier), run.request_side(of)) else { continue };
            let report = run.report(Kind::Write, first, Some(second), run.memory(process, address), common);
            merge(&mut self.reports, vec![report]);
        }
    }

    /// Checks a signal's value that is read or reset while a peer may raise it, and that a wait of the same thread
    /// follows.
    fn check_baseline(&mut self, at: usize, address: u64, signal: u32, call: u32) {
        let run = self.run;
        if call != Call::Reset as u32 && call != Call::Value as u32 || signal == u32::MAX {
            return;
        }
        let moment = &run.moments[at];
        let next = run.moments[at + 1..].iter().find(|next| {
            let same = matches!(next.what, What::Counted { address: other, .. } if other == address);
            same && (next.launch, next.key) == (moment.launch, moment.key)
        });
        if !next.is_some_and(|next| matches!(next.what, What::Counted { call, .. } if call == Call::Wait as u32)) {
            return;
        }
        let facts = self.facts(at);
        for raise in run.raises_of(moment, address, signal).0 {
            if facts.has(raise.request) || self.before_post(at, raise.request) {
                continue;
            }
            let of = &run.requests[raise.request];
            let what = if call == Call::Reset as u32 { "reset of the signal" } else { "read of the signal's value" };
            let Some(first) = run.request_side(of) else { continue };
            let report = run.report(Kind::Baseline, first, Some(run.side_of(at, what)), String::new(), 8);
            merge(&mut self.reports, vec![report]);
        }
    }
}
