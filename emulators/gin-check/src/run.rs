//! What the records of all processes say: their launches, queues and requests, and the moments of threads and hosts.

use crate::clock::{Clock, Key};
use crate::event::{At, Call, Event, Look, NO_RANK, Operation, Record, STRONG, WRITES};
use crate::race::{Example, Fault, Pair};
use crate::record::is_library_file;
use crate::report::{Access, Kind, Report, merge};
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

/// A process's records, of all its libraries.
#[derive(Default)]
struct Process {
    rank: Option<u32>,
    /// The lines of each place.
    places: HashMap<u32, Vec<String>>,
    /// Exported device memory: its file's inode, the offset there, and the bytes.
    memory: Vec<(u64, u64, Range)>,
    /// Registered memory.
    regions: Vec<Range>,
}

/// Bytes of a process's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    pub process: usize,
    pub address: u64,
    pub bytes: u64,
}

impl Range {
    /// Returns how many bytes both have.
    pub fn common(&self, other: &Self) -> u64 {
        let end = (self.address + self.bytes).min(other.address + other.bytes);
        if self.process == other.process { end.saturating_sub(self.address.max(other.address)) } else { 0 }
    }
}

pub struct Launch {
    kernel: String,
    pub ended: u64,
}

pub struct Queue {
    ring: u64,
    slot_bytes: u64,
    slots: u64,
    pub doorbell: u64,
    pub opened: u64,
    pub closed: u64,
}

impl Queue {
    pub fn lives(&self, time: u64) -> bool {
        (self.opened..=self.closed).contains(&time)
    }
}

pub struct Request {
    pub process: usize,
    /// The process that a write goes to, or that a read comes from.
    pub peer: usize,
    pub queue: usize,
    /// The queue that it names at the peer.
    pub peer_queue: Option<usize>,
    /// How many requests its queue had before.
    pub index: u64,
    pub operation: Operation,
    local: u64,
    remote: u64,
    pub bytes: u64,
    inline: bool,
    pub taken: u64,
    /// When it completed.
    pub retired: u64,
    /// Its post among the moments; none if it wasn't posted by a kernel.
    pub post: Option<usize>,
}

impl Request {
    /// Returns the bytes that it writes.
    pub fn target(&self) -> Range {
        let (process, address) =
            if self.operation == Operation::Read { (self.process, self.local) } else { (self.peer, self.remote) };
        let bytes = if self.operation == Operation::Send { 0 } else { self.bytes };
        Range { process, address, bytes }
    }

    /// Returns the bytes that it reads.
    pub fn source(&self) -> Range {
        let (process, address) =
            if self.operation == Operation::Read { (self.peer, self.remote) } else { (self.process, self.local) };
        let bytes = if self.operation == Operation::Send || self.inline { 0 } else { self.bytes };
        Range { process, address, bytes }
    }
}

/// A raise of a word in which a card counts, or a signal proxy.
#[derive(Clone, Copy)]
pub struct Raise {
    pub request: usize,
    pub amount: u64,
    time: u64,
    /// The queue that it came in on: the word is a new one after its end.
    queue: usize,
}

/// A word that is raised.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Word {
    /// A card counts at this address.
    Counter(u64),
    /// A signal proxy adds to the program's memory at this address.
    Memory(u64),
    /// An emulated signal of this id, of the context whose generation ends with these 4 bits.
    Signal(u32, u32),
}

/// What a thread, or a host, did.
pub enum What {
    /// It accessed memory: the flags and the value of [`Event::Access`], the bytes, and what a report calls it.
    Access {
        flags: u32,
        range: Range,
        value: u64,
        name: &'static str,
    },
    Post {
        slot: u64,
    },
    Doorbell {
        address: u64,
        value: u64,
    },
    Counted(Look),
    /// The launch began, or ended.
    Began,
    Ended,
    /// A queue was closed.
    Closed(usize),
}

/// A moment of a launch, or of a host (then `launch` is [`HOST`]).
pub struct Moment {
    pub process: usize,
    pub launch: u32,
    pub key: Key,
    pub stamp: u32,
    pub clock: Rc<Clock>,
    place: u32,
    pub time: u64,
    pub what: What,
}

pub const HOST: u32 = u32::MAX;

/// The records of a run.
#[derive(Default)]
pub struct Run {
    processes: Vec<Process>,
    pub launches: Vec<Launch>,
    pub queues: Vec<Queue>,
    pub requests: Vec<Request>,
    /// In order of time.
    pub moments: Vec<Moment>,
    /// The raises of each word of a process.
    raises: HashMap<(usize, Word), Vec<Raise>>,
    /// The queues that count in a process's word, and whether it counts their own completions.
    counters: HashMap<(usize, u64), Vec<(usize, bool)>>,
    /// The emulated signals of contexts: when a kernel found them, their words, and the generation.
    signals: Vec<(u64, Range, u32)>,
    /// The requests that raise a signal.
    pub raising: BTreeSet<usize>,
    /// The requests that a signal's own request comes with, because one call posted them before it.
    pub covered: HashMap<usize, Vec<usize>>,
    /// Resets of words: when, and the count.
    resets: HashMap<(usize, u64), Vec<(u64, u64)>>,
    /// The races inside launches.
    pub races: Vec<Report>,
}

/// What the records so far have named, by the names that they use.
#[derive(Default)]
struct Names {
    /// The process of each card.
    cards: HashMap<u64, usize>,
    launches: HashMap<(usize, u64), u32>,
    clocks: HashMap<(u32, u32), Rc<Clock>>,
    /// The number of a queue is given again after its end.
    queues: HashMap<(u64, u32), usize>,
    requests: HashMap<(u64, u64), usize>,
    /// The word of a counter, and its queue.
    counters: HashMap<(u64, u64), (u64, usize)>,
    regions: HashMap<(u64, u32), Range>,
    raised: Vec<Raised>,
}

/// A raise of a process's word by a request of this name, which may have been read later.
struct Raised {
    word: (usize, Word),
    request: (u64, u64),
    raise: Raise,
    is_signal: bool,
}

impl Run {
    /// Reads the records of all processes, one list per file.
    pub fn new(files: &[Vec<Record>]) -> Self {
        let (mut run, mut names) = (Self::default(), Names::default());
        let (mut pids, mut records) = (Vec::new(), Vec::new());
        for file in files {
            let Some(&Event::Process { pid, rank, .. }) = file.first().map(|record| &record.event) else { continue };
            let process = pids.iter().position(|known| *known == pid).unwrap_or(pids.len());
            if process == pids.len() {
                pids.push(pid);
                run.processes.push(Process { rank: Some(rank).filter(|rank| *rank != NO_RANK), ..Process::default() });
            }
            for Record { event, .. } in file {
                run.read_names(&mut names, process, event);
            }
            records.extend(file.iter().map(|record| (process, record)));
        }
        // The times of different threads' records may be out of order by a little, or by more if the clock is set back.
        records.sort_by_key(|(_, record)| record.time);
        for (process, record) in records {
            run.read_gpu(&names, process, record.time, &record.event);
            run.read_card(&mut names, process, record.time, &record.event);
        }
        // By the clock of another process, a request may arrive before it is taken.
        for Raised { word, request, raise, is_signal } in names.raised {
            let Some(&request) = names.requests.get(&request) else { continue };
            if is_signal {
                run.raising.insert(request);
            }
            run.raises.entry(word).or_default().push(Raise { request, ..raise });
        }
        run.match_posts();
        run.find_covered();
        run.find_resets();
        run
    }

    /// Reads what gives a name that other records use, in the order of the process's file.
    fn read_names(&mut self, names: &mut Names, process: usize, event: &Event) {
        match event {
            Event::Card { card } => drop(names.cards.insert(*card, process)),
            Event::Place { place, lines } => {
                self.processes[process].places.insert(*place, program_lines(lines));
            }
            Event::Launch { launch, kernel } => {
                names.launches.insert((process, *launch), self.launches.len() as u32);
                self.launches.push(Launch { kernel: kernel.clone(), ended: u64::MAX });
            }
            Event::Clock { launch, clock, entries } => {
                let Some(launch) = names.launches.get(&(process, *launch)) else { return };
                let entries = entries.chunks_exact(2).map(|pair| (pair[0], pair[1] as u32)).collect();
                names.clocks.insert((*launch, *clock), Rc::new(Clock::new(entries)));
            }
            _ => {}
        }
    }

    /// Reads what a GPU did, or its host.
    fn read_gpu(&mut self, names: &Names, process: usize, time: u64, event: &Event) {
        let Names { launches, clocks, .. } = names;
        let number = |launch: &u64| launches.get(&(process, *launch)).copied().unwrap_or(HOST);
        let moment = |launch: u32, what: What| Moment {
            process,
            launch,
            key: 0,
            stamp: 0,
            clock: Rc::default(),
            place: u32::MAX,
            time,
            what,
        };
        let of_thread = |at: &At, what: What| {
            let (launch, At { thread: key, stamp, place, .. }) = (number(&at.launch), *at);
            let clock = clocks.get(&(launch, at.clock)).cloned().unwrap_or_default();
            Moment { key, stamp, clock, place, ..moment(launch, what) }
        };
        let new = match event {
            &Event::Memory { address, bytes, inode, offset } => {
                self.processes[process].memory.push((inode, offset, Range { process, address, bytes }));
                return;
            }
            &Event::HostCopy { write, address, bytes } => {
                let name = if write { "copy to this memory" } else { "copy from this memory" };
                let flags = if write { WRITES } else { 0 };
                moment(HOST, What::Access { flags, range: Range { process, address, bytes }, value: 0, name })
            }
            &Event::Freed { address, bytes } => {
                let range = Range { process, address, bytes };
                moment(HOST, What::Access { flags: WRITES, range, value: 0, name: "free of this memory" })
            }
            Event::Launch { launch, .. } => moment(number(launch), What::Began),
            Event::Ended { launch } => {
                let number = number(launch);
                if let Some(ended) = self.launches.get_mut(number as usize) {
                    ended.ended = time;
                }
                moment(number, What::Ended)
            }
            &Event::Access { ref at, flags, address, bytes, value } => {
                let name = if flags & WRITES == 0 { "load" } else { "store" };
                of_thread(at, What::Access { flags, range: Range { process, address, bytes }, value, name })
            }
            &Event::Post { ref at, slot } => of_thread(at, What::Post { slot }),
            &Event::Doorbell { ref at, address, value } => of_thread(at, What::Doorbell { address, value }),
            &Event::Counted { ref at, look } => of_thread(at, What::Counted(look)),
            &Event::Signals { address, count, generation } => {
                self.signals.push((time, Range { process, address, bytes: 8 * u64::from(count) }, generation));
                return;
            }
            &Event::Raced { ref launch, pair, example } => {
                let Pair { first, second, writes, shared, fault } = pair;
                let Example { address, bytes, count, .. } = example;
                let what = |writes: bool| if writes { "store" } else { "load" };
                let (launch, space) = (number(launch), if shared { "shared" } else { "global" });
                let then = match fault {
                    Fault::Race => Some(what(writes[1])),
                    Fault::NoProxyFence => Some("bulk copy without fence.proxy.async before it"),
                    Fault::Unwritten => None,
                };
                let report = Report {
                    kind: if then.is_some() { Kind::Race } else { Kind::Unwritten },
                    first: self.side(process, launch, first, what(writes[0])),
                    second: then.map(|then| self.side(process, launch, second, then)),
                    memory: format!("{space} memory at {address:#x}"),
                    bytes: bytes.into(),
                    count,
                };
                return merge(&mut self.races, vec![report]);
            }
            _ => return,
        };
        self.moments.push(new);
    }

    /// Reads what a card did.
    fn read_card(&mut self, names: &mut Names, process: usize, time: u64, event: &Event) {
        let mut host = |what: What| {
            let (launch, clock, place) = (HOST, Rc::default(), u32::MAX);
            self.moments.push(Moment { process, launch, key: 0, stamp: 0, clock, place, time, what });
        };
        match *event {
            Event::Queue { card, queue, ring, slot_bytes, slots, doorbell } => {
                names.queues.insert((card, queue), self.queues.len());
                let (slot_bytes, slots) = (slot_bytes.into(), slots.into());
                self.queues.push(Queue { ring, slot_bytes, slots, doorbell, opened: time, closed: u64::MAX });
            }
            Event::QueueClosed { card, queue } => {
                // A peer's request that comes later names it, too.
                if let Some(at) = names.queues.get(&(card, queue)).copied() {
                    host(What::Closed(at));
                    self.queues[at].closed = time;
                }
            }
            Event::Region { card, key, address, bytes } => {
                let range = Range { process, address, bytes };
                names.regions.insert((card, key), range);
                self.processes[process].regions.push(range);
            }
            Event::RegionGone { card, key } => {
                let gone = names.regions.remove(&(card, key));
                // Bytes that are registered twice stay registered.
                let stays = |range: &Range| names.regions.values().any(|other| other.common(range) == range.bytes);
                if let Some(range) = gone.filter(|range| !stays(range)) {
                    host(What::Access { flags: WRITES, range, value: 0, name: "deregistration of this memory" });
                }
            }
            Event::Counter { card, counter, queue, completions, inode, address } => {
                let Some(&queue) = names.queues.get(&(card, queue)) else { return };
                // Files of freed memory may give their numbers to others.
                let files = self.processes[process].memory.iter().rev().filter(|(file, ..)| *file == inode);
                let in_file = files.map(|(_, offset, range)| (range, address.wrapping_sub(*offset)));
                let found =
                    in_file.filter(|(range, at)| *at < range.bytes).map(|(range, at)| range.address + at).next();
                let Some(address) = (if inode == 0 { Some(address) } else { found }) else { return };
                names.counters.insert((card, counter), (address, queue));
                self.counters.entry((process, address)).or_default().push((queue, completions));
            }
            Event::Taken { card, request, queue, index, operation, peer, peer_queue, local, remote, bytes, inline } => {
                let Some(&queue) = names.queues.get(&(card, queue)) else { return };
                names.requests.insert((card, request), self.requests.len());
                self.requests.push(Request {
                    process,
                    peer: names.cards.get(&peer).copied().unwrap_or(usize::MAX),
                    queue,
                    peer_queue: names.queues.get(&(peer, peer_queue)).copied(),
                    index,
                    operation,
                    local,
                    remote,
                    bytes,
                    inline,
                    taken: time,
                    retired: u64::MAX,
                    post: None,
                });
            }
            Event::Retired { card, request } => {
                if let Some(&at) = names.requests.get(&(card, request)) {
                    self.requests[at].retired = time;
                }
            }
            Event::Raised { card, counter, from, request } => {
                let Some(&(address, queue)) = names.counters.get(&(card, counter)) else { return };
                let raise = Raise { request: 0, amount: 1, time, queue };
                let is_signal = self.completions(process, address, time).next().is_none();
                let (word, request) = ((process, Word::Counter(address)), (from, request));
                names.raised.push(Raised { word, request, raise, is_signal });
            }
            Event::Arrived { card, queue, from, request, ref words } => {
                let Some(&queue) = names.queues.get(&(card, queue)) else { return };
                // As in ferrogin_ffi::signals: immediate data, or a message.
                let (word, amount) = match words[..] {
                    [word] => (Word::Signal(word as u32 & 0xffff, word as u32 >> 28), (word >> 16 & 0xfff) + 1),
                    [head, amount, address, _] if head & 0xff == 2 => (Word::Memory(address), amount),
                    [head, amount, ..] => (Word::Signal((head >> 32) as u32, head as u32 >> 16 & 15), amount),
                    [] => return,
                };
                let raise = Raise { request: 0, amount, time, queue };
                let (word, request) = ((process, word), (from, request));
                names.raised.push(Raised { word, request, raise, is_signal: true });
            }
            _ => {}
        }
    }

    /// Finds the post of each request: the last one to its slot before the card took it.
    fn match_posts(&mut self) {
        let mut slots: HashMap<(usize, u64), Vec<usize>> = HashMap::new();
        // A process that is killed leaves no records of the kernels that it runs then.
        let mut killed: HashMap<u32, (usize, u64)> = HashMap::new();
        for (at, Moment { process, launch, time, what, .. }) in self.moments.iter().enumerate() {
            if let What::Began = what {
                killed.insert(*launch, (*process, *time));
                continue;
            }
            killed.remove(launch);
            if let What::Post { slot } = what {
                slots.entry((*process, slot / 64)).or_default().push(at);
            }
        }
        let is_lost =
            |of: &Request| killed.values().any(|&(process, began)| process == of.process && began <= of.taken);
        for request in self.requests.iter_mut().filter(|request| !is_lost(request)) {
            let queue = &self.queues[request.queue];
            let slot = queue.ring + request.index % queue.slots.max(1) * queue.slot_bytes;
            let found = slots.get(&(request.process, slot / 64)).into_iter().flatten().rev();
            request.post = found.copied().find(|&at| self.moments[at].time <= request.taken);
        }
    }

    /// Finds the requests that the signal of the same call covers: one whose signal is a request of its own posts that
    /// last.
    fn find_covered(&mut self) {
        let mut posted: Vec<_> =
            self.requests.iter().enumerate().filter_map(|(at, request)| Some((request.post?, at))).collect();
        posted.sort_unstable();
        let mut calls: HashMap<_, Vec<usize>> = HashMap::new();
        for (post, at) in posted {
            let (Moment { launch, key, place, .. }, request) = (&self.moments[post], &self.requests[at]);
            let earlier = calls.entry((*launch, *key, *place)).or_default();
            if !self.raising.contains(&at) {
                earlier.push(at);
            } else if request.bytes == 0 || request.operation == Operation::Send {
                self.covered.insert(at, std::mem::take(earlier));
            }
        }
    }

    /// Finds the resets of words: by a call, or by a program's store of 0.
    fn find_resets(&mut self) {
        for Moment { process, time, what, .. } in &self.moments {
            let (address, count) = match *what {
                What::Counted(Look { address, raw, call: Call::Reset, .. }) => (address, raw),
                What::Access { flags, range, value: 0, .. }
                    if flags & WRITES != 0 && self.word(*process, range.address, *time).is_some() =>
                {
                    (range.address, 0)
                }
                _ => continue,
            };
            self.resets.entry((*process, address)).or_default().push((*time, count));
        }
    }

    /// Returns the moment of a request's post, if a kernel posted it.
    pub fn post(&self, request: usize) -> Option<&Moment> {
        Some(&self.moments[self.requests[request].post?])
    }

    fn counters(&self, process: usize, address: u64, time: u64) -> impl Iterator<Item = &(usize, bool)> {
        let all = self.counters.get(&(process, address)).into_iter().flatten();
        all.filter(move |(queue, _)| self.queues[*queue].lives(time))
    }

    /// Returns the queues whose completions the word counts.
    pub fn completions(&self, process: usize, address: u64, time: u64) -> impl Iterator<Item = usize> {
        self.counters(process, address, time).filter(|(_, own)| *own).map(|(queue, _)| *queue)
    }

    fn is_counter(&self, process: usize, address: u64, time: u64) -> bool {
        self.counters(process, address, time).next().is_some()
    }

    /// Returns the word at an address, if a card counts in it or a signal proxy adds to it.
    fn word(&self, process: usize, address: u64, time: u64) -> Option<Word> {
        if self.is_counter(process, address, time) {
            return Some(Word::Counter(address));
        }
        let mut known = self.signals.iter().rev().filter(|(found, ..)| *found <= time);
        let byte = Range { process, address, bytes: 1 };
        if let Some((_, words, generation)) = known.find(|(_, words, _)| words.common(&byte) > 0) {
            return Some(Word::Signal(((address - words.address) / 8) as u32, generation & 15));
        }
        let mut in_memory = self.raises.get(&(process, Word::Memory(address))).into_iter().flatten();
        in_memory.any(|raise| self.queues[raise.queue].lives(time)).then_some(Word::Memory(address))
    }

    /// Returns the look that a moment is: by a call, or by a strong load of the word itself.
    pub fn look(&self, moment: &Moment) -> Option<Look> {
        match moment.what {
            What::Counted(look) => Some(look),
            What::Access { flags, range, value, .. } if flags & (STRONG | WRITES) == STRONG && range.bytes <= 8 => {
                let (process, address) = (range.process, range.address);
                let counts = self.completions(process, address, moment.time).next().is_some();
                let call = if counts { Call::Flush } else { Call::Value };
                let look = Look { address, value, raw: value, call };
                self.word(process, address, moment.time).map(|_| look)
            }
            _ => None,
        }
    }

    /// Returns the raises that a look may have counted, and the count that it knows: of the raises since the word's
    /// beginning.
    pub fn raises(&self, moment: &Moment, look: &Look) -> (Vec<Raise>, u64) {
        let (process, time, address) = (moment.process, moment.time, look.address);
        let Some(word) = self.word(process, address, time) else { return (Vec::new(), 0) };
        let raises = self.raises.get(&(process, word)).into_iter().flatten();
        let raises: Vec<Raise> = raises.filter(|raise| self.queues[raise.queue].lives(time)).copied().collect();
        let reset = self.resets.get(&(process, address)).into_iter().flatten().rev().find(|reset| reset.0 < time);
        if let Word::Counter(_) = word {
            let begun = raises.first().map_or(u64::MAX, |raise| self.queues[raise.queue].opened);
            let before = reset.filter(|reset| reset.0 > begun).map_or(0, |reset| reset.1);
            let count = if look.call == Call::Wait { look.value.wrapping_add(before) } else { look.raw };
            return (raises, count);
        }
        let before = reset
            .map_or(0, |reset| raises.iter().filter(|raise| raise.time <= reset.0).map(|raise| raise.amount).sum());
        (raises, look.value.wrapping_add(before))
    }

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

    /// Describes a moment in a report.
    pub fn side_of(&self, at: usize, what: &str) -> Access {
        let Moment { process, launch, place, .. } = self.moments[at];
        self.side(process, launch, place, what)
    }

    /// Describes a request in a report, if a kernel posted it.
    pub fn request_side(&self, request: usize) -> Option<Access> {
        let Request { operation, bytes, post, .. } = self.requests[request];
        let what = match operation {
            Operation::Read => format!("get of {bytes} bytes"),
            Operation::Write if bytes > 0 => format!("put of {bytes} bytes"),
            Operation::Write | Operation::Send => "signal".to_owned(),
        };
        Some(self.side_of(post?, &what))
    }

    /// Describes memory in a report.
    pub fn memory(&self, process: usize, address: u64) -> String {
        let of = self.processes[process].rank.map_or_else(|| "a process".to_owned(), |rank| format!("rank {rank}"));
        let regions = self.processes[process].regions.iter();
        let around = regions.filter(|region| address.wrapping_sub(region.address) < region.bytes);
        match around.min_by_key(|region| region.bytes) {
            Some(region) => format!("the window of {of} at +{}", address - region.address),
            None => format!("the memory of {of} at {address:#x}"),
        }
    }
}

/// Returns the lines of a place, the program's first: without those of libraries, of stand-ins for the toolkit's
/// headers and of Rust's `core`.
fn program_lines(all: &[String]) -> Vec<String> {
    let is_library = |line: &String| {
        let file = line.rsplit_once(':').map_or(line.as_str(), |(file, _)| file);
        let others = ["ferrogin/clang/", "/lib/clang/", "/rustlib/src/"];
        is_library_file(file) || others.iter().any(|part| file.contains(part))
    };
    let first = all.iter().position(|line| !is_library(line)).unwrap_or(0);
    all[first..].to_vec()
}
