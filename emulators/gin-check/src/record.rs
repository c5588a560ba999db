//! What a launch did that concerns other ranks: accesses to memory that a card knows, posts, doorbells, waits and
//! flushes.

use crate::clock::{self, Clock, Key};
use crate::event::{ACQUIRES, At, Call, Event, FENCED, Look, STRONG, WRITES, encode, now};
use crate::race::Detector;
use crate::shadow::Map;
use soft_gpu_ptx::{Access, BulkStart, Does, MbarrierUse, Observer, Ordering, Reach, Who};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Returns what a function of the library does.
pub fn call_of(function: &str) -> Call {
    match function {
        "fgin_wait_signal" | "fgin_wait_counter" => Call::Wait,
        "fgin_reset_signal" | "fgin_reset_counter" => Call::Reset,
        "fgin_read_signal" | "fgin_read_counter" => Call::Value,
        "fgin_flush" | "fgin_settle" | "fgin_flush_part" | "fgin_fast_flush" | "fgin_wait_request"
        | "fgin_test_request" | "fgin_wait_flush" | "fgin_test_flush" => Call::Flush,
        _ => Call::Other,
    }
}

/// What is known about a program's code.
#[derive(Debug, Default)]
pub struct Code {
    /// Which instructions are library code.
    pub library: Arc<[bool]>,
    /// Which instructions belong to a call that is inlined, and what it does. A post is [`Call::Other`].
    pub inlined: Vec<Option<Call>>,
    /// The functions' names.
    pub functions: Vec<String>,
    /// Whether an instruction has lines.
    pub has_lines: Vec<bool>,
}

/// The headers of ferrogin that kernels include.
const HEADERS: [&str; 7] =
    ["gin.cuh", "gin.h", "post.cuh", "fast_path.cuh", "nccl_gin.cuh", "nccl_gin_backend.cuh", "layout.h"];

/// Whether a source file belongs to ferrogin's device code or NCCL's.
pub fn is_library_file(file: &str) -> bool {
    let (directory, name) = file.rsplit_once('/').unwrap_or(("", file));
    let crates = ["device-kernels/src/", "efa-dp-direct/src/", "ffi-headers/src/"];
    directory.ends_with("ferrogin") && HEADERS.contains(&name)
        || file.contains("/nccl_device/")
        || crates.iter().any(|part| file.contains(part))
}

/// Whether a function belongs to ferrogin's device code.
pub fn is_library_function(name: &str) -> bool {
    let crates = ["ferrogin_device", "efa_dp_direct", "ferrogin_ffi"];
    name.starts_with("fgin_") || crates.iter().any(|part| name.contains(part))
}

/// Whether a load or fence acquires what a card writes.
fn acquires(ordering: Ordering) -> bool {
    ordering.acquires && ordering.reach == Reach::System
}

/// The flag of a strong signal (`FGIN_STRONG`).
const FGIN_STRONG: u64 = 0x400;
/// A request's bytes in its slot are at most this many.
const SLOT: u64 = 128;

#[derive(Default)]
struct Thread {
    /// The last access to shared memory of the program, which may grow.
    last: Option<Pending>,
    /// What it has read with relaxed loads since its last fence, by address.
    polled: BTreeMap<u64, Pending>,
    /// The library call that the thread is in: its function, and the arguments.
    call: Option<(u32, Call, Vec<u64>)>,
    /// Where the program calls.
    place: u32,
    /// What the thread has loaded in the call, by address, and the number of its clock then.
    loaded: BTreeMap<u64, (u64, u32)>,
    /// The last word of a request that the thread wrote.
    posted: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Pending {
    site: u32,
    flags: u32,
    address: u64,
    bytes: u64,
    value: u64,
}

/// What flushes of a process had loaded of counters before they changed a word of the library, by the word: a flush that
/// finds no used queue in a context loads only the word from which others have taken the queues.
pub type Flushed = BTreeMap<u64, BTreeMap<u64, u64>>;

/// Finds a launch's races, and records what concerns other ranks.
pub struct Recorder<'a> {
    /// Finds the races.
    pub races: Detector,
    launch: u64,
    code: &'a Code,
    /// Whether a card knows the memory at an address.
    shares: &'a dyn Fn(u64) -> bool,
    /// Reads 8 bytes of memory.
    read: &'a dyn Fn(u64) -> Option<u64>,
    records: Vec<u8>,
    /// The places of the records.
    sites: BTreeSet<u32>,
    /// The first number of a place.
    first: u32,
    clocks: HashMap<*const Clock, (Rc<Clock>, u32)>,
    threads: Map<Key, Thread>,
    /// Descriptions of contexts' emulated signals, by address.
    signals: BTreeSet<u64>,
    flushed: &'a Mutex<Flushed>,
    /// Other addresses of memory that a card knows: from and to, and by which address it knows the first byte.
    pub aliases: Vec<(u64, u64, u64)>,
}

impl<'a> Recorder<'a> {
    /// Makes the recorder of a launch. Instruction `n` is place `first + n` in the records.
    pub fn new(
        races: Detector,
        (launch, first): (u64, u32),
        code: &'a Code,
        shares: &'a dyn Fn(u64) -> bool,
        read: &'a dyn Fn(u64) -> Option<u64>,
        flushed: &'a Mutex<Flushed>,
    ) -> Self {
        let (records, sites, clocks, threads, signals, aliases) = Default::default();
        Self { races, launch, code, shares, read, records, sites, first, clocks, threads, signals, flushed, aliases }
    }

    /// Returns the records, and the instructions that they name.
    pub fn finish(mut self) -> (Detector, Vec<u8>, BTreeSet<u32>) {
        let keys: Vec<Key> = self.threads.keys().copied().collect();
        for key in keys {
            self.flush_access(key);
        }
        (self.races, self.records, self.sites)
    }

    /// Returns the address by which a card knows the memory at `address`.
    fn known(&self, address: u64) -> u64 {
        let alias = self.aliases.iter().find(|alias| (alias.0..alias.1).contains(&address));
        alias.map_or(address, |(from, _, known)| address - from + known)
    }

    fn is_library(&self, site: u32) -> bool {
        self.code.library.get(site as usize).copied().unwrap_or(false)
    }

    fn flushed(&self) -> MutexGuard<'_, Flushed> {
        self.flushed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&mut self, event: &Event) {
        encode(&mut self.records, now(), event);
    }

    fn place(&mut self, site: u32) -> u32 {
        self.sites.insert(site);
        self.first + site
    }

    /// Returns a thread's moment at an instruction.
    fn at(&mut self, thread: Key, site: u32) -> Option<At> {
        let (block, Some(number)) = clock::place(thread) else { return None };
        let (stamp, clock) = self.races.moment(Who { block, thread: number })?;
        Some(At { launch: self.launch, thread, stamp, clock: self.clock(clock), place: self.place(site) })
    }

    /// Records a clock, once, and returns its number.
    fn clock(&mut self, clock: Rc<Clock>) -> u32 {
        let next = self.clocks.len() as u32;
        let address = Rc::as_ptr(&clock);
        if let Some((_, number)) = self.clocks.get(&address) {
            return *number;
        }
        let entries = clock.entries().iter().flat_map(|&(key, stamp)| [key, u64::from(stamp)]).collect();
        let launch = self.launch;
        self.add(&Event::Clock { launch, clock: next, entries });
        self.clocks.insert(address, (clock, next));
        next
    }

    /// Records the access that a thread may still be making.
    fn flush_access(&mut self, thread: Key) {
        let Some(own) = self.threads.get_mut(&thread) else { return };
        let Some(last) = own.last.take() else { return };
        if last.flags == STRONG {
            own.polled.insert(last.address, last);
        }
        self.record_access(thread, last);
    }

    fn record_access(&mut self, thread: Key, access: Pending) {
        let Pending { site, flags, address, bytes, value } = access;
        if let Some(at) = self.at(thread, site) {
            self.add(&Event::Access { at, flags, address, bytes, value });
        }
    }

    /// Ends a moment of a thread: what it does next comes after it for others, too.
    fn step(&mut self, who: Who, site: u32) -> Option<At> {
        let key = clock::thread(who.block, who.thread);
        self.flush_access(key);
        let at = self.at(key, site)?;
        self.races.step(who);
        Some(at)
    }

    fn program_access(&mut self, who: Who, access: &Access) {
        if access.shared || !(self.shares)(access.address) {
            return;
        }
        let key = clock::thread(who.block, who.thread);
        let mut flags = if access.does == Does::Load { 0 } else { WRITES };
        if let Some(ordering) = access.ordering {
            flags |= STRONG | if acquires(ordering) { ACQUIRES } else { 0 };
        }
        let new = Pending {
            site: access.site,
            flags,
            address: access.address,
            bytes: access.bytes.into(),
            value: access.value,
        };
        let own = self.threads.entry(key).or_default();
        if let Some(last) = &mut own.last
            && (last.site, last.flags) == (new.site, flags)
        {
            if flags & (STRONG | WRITES) == STRONG && last.address == new.address {
                last.value = new.value;
                return;
            }
            if flags & STRONG == 0 && (last.address..=last.address + last.bytes).contains(&new.address) {
                last.bytes = last.bytes.max(new.address + new.bytes - last.address);
                return;
            }
        }
        self.flush_access(key);
        self.threads.entry(key).or_default().last = Some(new);
    }

    fn library_access(&mut self, who: Who, access: &Access) {
        let key = clock::thread(who.block, who.thread);
        if access.mmio && access.does == Does::Store {
            let own = self.threads.entry(key).or_default();
            let place = own.place;
            if access.bytes == 4 {
                own.posted = 0;
                if let Some(at) = self.step(who, place) {
                    self.add(&Event::Doorbell { at, address: access.address, value: access.value });
                }
                return;
            }
            let begins =
                !(own.posted..own.posted + SLOT).contains(&access.address) || access.address.is_multiple_of(64);
            own.posted = access.address;
            if begins && let Some(at) = self.step(who, place) {
                self.add(&Event::Post { at, slot: access.address });
            }
            return;
        }
        if access.does == Does::Store
            && access.value == 0
            && !access.shared
            && (self.shares)(access.address)
            && let Some(own) = self.threads.get_mut(&key).filter(|own| matches!(own.call, Some((_, Call::Reset, _))))
        {
            // A reset of an emulated signal loads nothing; one of a card's count stores what it has loaded, elsewhere.
            if own.loaded.is_empty() {
                own.loaded.insert(access.address, (0, 0));
            }
        }
        let loads = access.does == Does::Load && !access.shared;
        let Some(ordering) = access.ordering.filter(|_| !access.shared) else { return };
        let inlined = self.code.inlined.get(access.site as usize).copied().flatten();
        let own = self.threads.entry(key).or_default();
        let call = match &own.call {
            Some((_, call, _)) => *call,
            // A post looks at its queue's counter for room only.
            None => match inlined {
                // Not the poll that ends the wait.
                Some(Call::Wait) if access.value == 0 => Call::Other,
                Some(call) => call,
                // NCCL's headers read signals and counters inline, and what they don't acquire a fence of the program may.
                None if loads && !ordering.acquires => return self.program_access(who, access),
                None if access.value != 0 && ordering.reach == Reach::System => Call::Value,
                None => Call::Other,
            },
        };
        if call == Call::Flush && access.does != Does::Load {
            let loaded = own.loaded.clone();
            let mut flushed = self.flushed();
            let known = flushed.entry(access.address).or_default();
            for (address, (value, _)) in loaded {
                // What another flush has seen may be newer.
                known.entry(address).and_modify(|known| *known = value.max(*known)).or_insert(value);
            }
        }
        if call == Call::Flush && ordering.acquires {
            let counts = self.flushed().get(&access.address).cloned();
            counts.into_iter().flatten().for_each(|(address, value)| self.load(who, call, address, value));
        }
        // A card or a signal proxy counts in memory that is shared with it.
        if loads && call != Call::Other && (self.shares)(access.address) {
            self.load(who, call, access.address, access.value);
        }
    }

    /// Notes a count that a call loads.
    fn load(&mut self, who: Who, call: Call, address: u64, value: u64) {
        let key = clock::thread(who.block, who.thread);
        let clock = self.races.moment(who).map_or(0, |(_, clock)| self.clock(clock));
        let own = self.threads.entry(key).or_default();
        let changed = own.loaded.insert(address, (value, clock)) != Some((value, clock));
        // A flush waits for several counters, and what is inlined has no end that shows.
        if (call == Call::Flush || own.call.is_none()) && changed {
            let place = own.place;
            self.counted(who, place, Look { address, value, raw: value, call });
        }
    }

    fn counted(&mut self, who: Who, place: u32, look: Look) {
        if let Some(at) = self.step(who, place) {
            self.add(&Event::Counted { at, look });
        }
    }

    /// Notes a context's emulated signals when a kernel loads their address, or that of their description, as for a
    /// post. It is an `EmulatedSignals`, if its number of signals is also the one that this rank's peers know.
    fn find_signals(&mut self, access: &Access) {
        let loads = access.does == Does::Load && !access.shared && access.ordering.is_none() && access.bytes >= 8;
        for at in [access.address, access.value].into_iter().filter(|at| loads && at.is_multiple_of(64)) {
            self.find_signals_at(at);
        }
    }

    fn find_signals_at(&mut self, at: u64) {
        if at == 0 || self.signals.contains(&at) {
            return;
        }
        let described = || {
            let (address, peers) = ((self.read)(at)?, (self.read)(at.checked_add(8)?)?);
            let numbers = (self.read)(at.checked_add(16)?)?;
            let own = (self.read)(peers.checked_add(8 * (numbers >> 32))?)?;
            let is_own = numbers as u32 == own as u32 && (self.shares)(address);
            is_own.then_some((address, numbers as u32, (own >> 32) as u32))
        };
        if let Some((address, count, generation)) = described() {
            self.signals.insert(at);
            self.add(&Event::Signals { address, count, generation });
        }
    }
}

impl Observer for Recorder<'_> {
    fn begin(&mut self, block: u32, threads: u32, shared: u32) {
        self.races.begin(block, threads, shared);
    }

    fn end(&mut self, block: u32) {
        let keys: Vec<Key> = self.threads.keys().copied().filter(|key| clock::place(*key).0 == block).collect();
        for key in keys {
            self.flush_access(key);
            self.threads.remove(&key);
        }
        self.races.end(block);
    }

    fn access(&mut self, who: Who, access: &Access) {
        let address = if access.shared { access.address } else { self.known(access.address) };
        let access = &Access { address, ..*access };
        self.find_signals(access);
        if access.mmio || self.is_library(access.site) {
            let key = clock::thread(who.block, who.thread);
            let own = self.threads.entry(key).or_default();
            if own.call.is_none() {
                own.place = access.site;
            }
            self.library_access(who, access);
        } else {
            self.program_access(who, access);
        }
        self.races.access(who, access);
    }

    fn fence(&mut self, who: Who, site: u32, ordering: Ordering) {
        let key = clock::thread(who.block, who.thread);
        self.flush_access(key);
        if acquires(ordering) && !self.is_library(site) {
            let polled = self.threads.get_mut(&key).map(|own| std::mem::take(&mut own.polled)).unwrap_or_default();
            for read in polled.into_values() {
                self.record_access(key, Pending { flags: read.flags | ACQUIRES | FENCED, ..read });
            }
        }
        self.races.fence(who, site, ordering);
    }

    fn arrive(&mut self, who: Who, number: u32, waits: bool) {
        self.flush_access(clock::thread(who.block, who.thread));
        self.races.arrive(who, number, waits);
    }

    fn barrier(&mut self, block: u32, number: u32) {
        self.races.barrier(block, number);
    }

    fn warp(&mut self, block: u32, warp: u32, lanes: u32, barrier: bool, site: u32) {
        for lane in (0..32).filter(|lane| lanes >> lane & 1 == 1) {
            self.flush_access(clock::thread(block, warp * 32 + lane));
        }
        self.races.warp(block, warp, lanes, barrier, site);
    }

    fn mbarrier(&mut self, who: Who, site: u32, at: u32, phase: u32, usage: MbarrierUse) {
        self.flush_access(clock::thread(who.block, who.thread));
        self.races.mbarrier(who, site, at, phase, usage);
    }

    fn bulk(&mut self, who: Who, start: &BulkStart, phases: (u32, u32)) {
        let start = &BulkStart { global: self.known(start.global), ..*start };
        if (self.shares)(start.global)
            && let Some(begun) = self.step(who, start.site)
            && let Some((_, mut clock)) = self.races.moment(who)
        {
            // The copy comes after its start, and before what a wait for it orders.
            Rc::make_mut(&mut clock).raise(begun.thread, begun.stamp);
            let (flags, thread, stamp) = if start.to_shared {
                (0, clock::arrivals(who.block, start.mbarrier), phases.0 + 1)
            } else {
                (WRITES, clock::copies(who.block, who.thread, true), start.group + 1)
            };
            let at = At { thread, stamp, clock: self.clock(clock), ..begun };
            self.add(&Event::Access { at, flags, address: start.global, bytes: start.bytes.into(), value: 0 });
        }
        self.races.bulk(who, start, phases);
    }

    fn bulk_wait(&mut self, who: Who, group: u32, read: bool) {
        self.flush_access(clock::thread(who.block, who.thread));
        self.races.bulk_wait(who, group, read);
    }

    fn proxy_fence(&mut self, who: Who) {
        self.flush_access(clock::thread(who.block, who.thread));
        self.races.proxy_fence(who);
    }

    fn call(&mut self, who: Who, site: u32, function: u32, arguments: &[u64]) {
        let Some(name) = self.code.functions.get(function as usize).filter(|name| is_library_function(name)) else {
            return;
        };
        // In Rust, the parts of a call that aren't inlined are functions, with arguments of their own. Without line
        // information, what they are part of isn't known.
        let part = || self.code.inlined.get(site as usize).copied().flatten().unwrap_or(Call::Other);
        let inlined = || self.code.has_lines.get(site as usize).is_some_and(|has| *has).then(|| (part(), &[][..]));
        let whole = || name.starts_with("fgin_").then(|| (call_of(name), arguments));
        let Some((call, arguments)) = whole().or_else(inlined) else { return };
        let call = match call {
            // A strong signal first waits as a flush does.
            Call::Other if arguments.last().is_some_and(|flags| flags & FGIN_STRONG != 0) => Call::Flush,
            call => call,
        };
        let own = self.threads.entry(clock::thread(who.block, who.thread)).or_default();
        if own.call.is_none() {
            own.call = Some((function, call, arguments.to_vec()));
            own.loaded.clear();
            own.place = site;
        }
    }

    fn leave(&mut self, who: Who, function: u32) {
        let key = clock::thread(who.block, who.thread);
        let Some(own) = self.threads.get_mut(&key) else { return };
        let Some((_, call, arguments)) = own.call.take_if(|call| call.0 == function) else { return };
        let (place, loaded) = (own.place, std::mem::take(&mut own.loaded));
        if call == Call::Other || call == Call::Flush {
            return;
        }
        for (address, (raw, _)) in loaded {
            let value = if call == Call::Wait { arguments.get(2).copied().unwrap_or(raw) } else { raw };
            self.counted(who, place, Look { address, value, raw, call });
        }
    }
}
