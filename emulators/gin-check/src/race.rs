//! Races inside a launch, found while it runs.
//!
//! Each thread has a clock of what it has seen of the others, and each cell of memory its last writes and the reads
//! since. An access races with an earlier one that its thread hasn't seen, if one of them writes and they aren't both
//! strong with scopes that include each other. What a fence, an atomic, a barrier, an mbarrier or a wait for bulk
//! copies orders is PTX's memory model; as the interpreter runs one instruction after the other, a read sees the last
//! write.

use crate::clock::{self, Clock, Key, joined};
use crate::shadow::{Cell, Map, Mark, Read, Shadow};
use serde::{Deserialize, Serialize};
use soft_gpu_ptx::{Access, BulkStart, Does, MbarrierUse, Observer, Ordering, Reach, Who};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// What a thread has seen, and what of that bulk copies see, which a proxy fence makes visible to them.
#[derive(Clone, Debug, Default)]
struct View {
    all: Rc<Clock>,
    proxy: Rc<Clock>,
}

impl View {
    fn join(&mut self, other: &Self) {
        self.all = joined(&self.all, &other.all);
        self.proxy = joined(&self.proxy, &other.proxy);
    }
}

/// What a word that strong accesses write has for those that acquire it.
#[derive(Clone, Debug)]
struct Word {
    view: View,
    block: u32,
    reach: Reach,
}

#[derive(Default)]
struct Thread {
    view: View,
    stamp: u32,
    /// What the last releasing fence ordered, for strong stores after it.
    fenced: Option<(Reach, View)>,
    /// What strong loads have seen, for an acquiring fence after them: of this block, and of others.
    seen: [Option<View>; 2],
}

struct Mbarrier {
    phase: u32,
    arrived: View,
    done: View,
}

#[derive(Default)]
struct Block {
    /// The last stamp of any thread.
    counter: u32,
    threads: Vec<Thread>,
    shared: Shadow,
    words: Map<u64, Word>,
    /// Who has arrived at each barrier: the threads that wait, and what those that went on have seen.
    barriers: BTreeMap<u32, (Vec<u32>, View)>,
    mbarriers: Map<u32, Mbarrier>,
}

impl Block {
    /// Ends what a thread does at its stamp, and returns what others see that synchronize with it.
    fn release(&mut self, number: u32, thread: u32) -> View {
        let own = &mut self.threads[thread as usize];
        let mut view = own.view.clone();
        Rc::make_mut(&mut view.all).raise(clock::thread(number, thread), own.stamp);
        self.counter += 1;
        own.stamp = self.counter;
        view
    }

    /// Orders threads: all of them see what any of them has done. `whole` are the keys that stand for all of them.
    fn meet(&mut self, threads: &[u32], whole: &[Key], more: Option<&View>) {
        let mut view = more.cloned().unwrap_or_default();
        let mut last: Option<View> = None;
        for &thread in threads {
            let own = &self.threads[thread as usize].view;
            let same = |last: &View| Rc::ptr_eq(&last.all, &own.all) && Rc::ptr_eq(&last.proxy, &own.proxy);
            if !last.as_ref().is_some_and(same) {
                view.join(own);
                last = Some(own.clone());
            }
        }
        let all = Rc::make_mut(&mut view.all);
        whole.iter().for_each(|&key| all.raise(key, self.counter));
        self.counter += 1;
        for &thread in threads {
            let own = &mut self.threads[thread as usize];
            own.view = view.clone();
            own.stamp = self.counter;
        }
    }
}

/// Two accesses that nothing orders, or a read of shared memory that nobody wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pair {
    /// The instruction of the access that came first, or of the read.
    pub first: u32,
    /// The other one's.
    pub second: u32,
    /// Whether each of them writes.
    pub writes: [bool; 2],
    /// The memory is a block's shared memory.
    pub shared: bool,
    /// What is wrong.
    pub fault: Fault,
}

/// What is wrong with a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Fault {
    /// Nothing orders the two.
    Race,
    /// A bulk copy reads what threads have written, or uses their mbarrier, without a proxy fence.
    NoProxyFence,
    /// Nobody wrote what is read.
    Unwritten,
}

/// The first occurrence of a pair, and how often it occurred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Example {
    /// Who accessed first.
    pub first: Key,
    /// Who accessed then.
    pub second: Key,
    /// The first byte of the cell.
    pub address: u64,
    /// The bytes of the second access.
    pub bytes: u32,
    /// How many accesses.
    pub count: u64,
}

/// An access as the shadow memory sees it: a thread's, or that of a bulk copy which it started.
struct Touch {
    who: Who,
    /// The thread's key, or the copies'.
    key: Key,
    stamp: u32,
    site: u32,
    does: Does,
    strong: u8,
    changes: bool,
    shared: bool,
    copies: bool,
}

/// Finds the races of a launch.
pub struct Detector {
    blocks: Map<u32, Block>,
    global: Shadow,
    words: Map<u64, Word>,
    /// Which instructions are library code.
    library: Arc<[bool]>,
    /// Lanes that exchange values are ordered by that.
    lenient: bool,
    found: BTreeMap<Pair, Example>,
}

fn strength(ordering: Option<Ordering>) -> u8 {
    ordering.map_or(0, |ordering| match ordering.reach {
        Reach::Block => 1,
        Reach::Gpu => 2,
        Reach::System => 3,
    })
}

impl Detector {
    /// Makes a detector. `library` says which instructions belong to libraries, whose accesses, fences and atomics
    /// don't count.
    pub fn new(library: Arc<[bool]>, lenient: bool) -> Self {
        Self {
            blocks: Map::default(),
            global: Shadow::default(),
            words: Map::default(),
            library,
            lenient,
            found: BTreeMap::new(),
        }
    }

    /// Returns what was found.
    pub fn found(&self) -> &BTreeMap<Pair, Example> {
        &self.found
    }

    /// Returns a thread's stamp and clock.
    pub fn moment(&self, who: Who) -> Option<(u32, Rc<Clock>)> {
        let thread = self.blocks.get(&who.block)?.threads.get(who.thread as usize)?;
        Some((thread.stamp, thread.view.all.clone()))
    }

    /// Ends a thread's stamp: what it does from now on isn't part of what its moments so far stand for.
    pub fn step(&mut self, who: Who) {
        if let Some((block, thread)) = self.thread(who) {
            block.counter += 1;
            block.threads[thread as usize].stamp = block.counter;
        }
    }

    fn is_library(&self, site: u32) -> bool {
        self.library.get(site as usize).copied().unwrap_or(false)
    }

    fn thread(&mut self, who: Who) -> Option<(&mut Block, u32)> {
        Some((self.blocks.get_mut(&who.block)?, who.thread))
    }

    /// Checks an access, and records it.
    fn touch(&mut self, touch: &Touch, address: u64, bytes: u32) {
        let Some(block) = self.blocks.get_mut(&touch.who.block) else { return };
        let view = block.threads[touch.who.thread as usize].view.clone();
        let shadow = if touch.shared { &mut block.shared } else { &mut self.global };
        let own = clock::thread(touch.who.block, touch.who.thread);
        let own_warp = clock::warp(touch.who.block, touch.who.thread / 32);
        let lane = touch.who.thread % 32;
        let writes = touch.does != Does::Load;
        let (mut fault, mut written) = (None, !touch.shared || writes || touch.copies);
        let sees = |key: Key, stamp: u32| key == own || view.all.covers(key, stamp);
        // Strong accesses don't race, if each has the other in its scope.
        let fine = |strong: u8, key: Key| strong.min(touch.strong) > (key >> 16 != u64::from(touch.who.block)).into();
        let change = |cell: &mut Cell, at: u64| {
            written |= cell.writes().next().is_some();
            // A read like one before it, or wider.
            let alike = touch.strong.min(1)..=touch.strong;
            if touch.does == Does::Load && !touch.copies && cell.has_read(own_warp, lane, alike, touch.stamp) {
                return;
            }
            for write in cell.writes() {
                if fault.is_some() {
                    break;
                }
                let same = writes && !touch.changes && write.site == touch.site;
                if !sees(write.key, write.stamp) {
                    let seen = !touch.copies && cell.has_read(own_warp, lane, 1..=3, 0);
                    if !fine(write.strong, write.key) && !same && !seen {
                        fault = Some((Fault::Race, write.site, write.key, true, at));
                    }
                } else if touch.copies
                    && touch.shared
                    && !writes
                    && clock::warp_of(write.key).is_some()
                    && !view.proxy.covers(write.key, write.stamp)
                {
                    fault = Some((Fault::NoProxyFence, write.site, write.key, true, at));
                }
            }
            if !writes {
                let (key, lanes) = if touch.copies { (touch.key, 1) } else { (own_warp, 1 << lane) };
                if cell.len() > 8 {
                    cell.prune(|read| {
                        read.strong > 0 || read.key == own_warp || !view.all.covers_warp(read.key, read.stamp)
                    });
                }
                cell.read(Read { key, lanes, stamp: touch.stamp, site: touch.site, strong: touch.strong });
                return;
            }
            let racing = |read: &Read| {
                if view.all.covers_warp(read.key, read.stamp) || fine(read.strong, read.key) {
                    return None;
                }
                let Some(warp) = clock::warp_number(read.key) else {
                    return (!view.all.covers(read.key, read.stamp)).then_some((read.site, read.key));
                };
                let lanes = (0..32).filter(|lane| read.lanes >> lane & 1 == 1);
                let mut keys = lanes.map(|lane| clock::thread((read.key >> 16) as u32, warp * 32 + lane));
                keys.find(|&key| !sees(key, read.stamp)).map(|key| (read.site, key))
            };
            if fault.is_none() {
                fault = cell.reads().find_map(racing).map(|(site, key)| (Fault::Race, site, key, false, at));
            }
            cell.wrote(Mark { key: touch.key, stamp: touch.stamp, site: touch.site, strong: touch.strong });
        };
        shadow.touch(address, u64::from(bytes), touch.does == Does::Store && touch.strong == 0, change);
        if !written {
            fault = Some((Fault::Unwritten, touch.site, touch.key, false, address));
        }
        if let Some((fault, site, key, wrote, at)) = fault {
            let pair = Pair { first: site, second: touch.site, writes: [wrote, writes], shared: touch.shared, fault };
            let example = Example { first: key, second: touch.key, address: at, bytes, count: 0 };
            self.found.entry(pair).or_insert(example).count += 1;
        }
    }

    /// Orders threads by a strong access to a word.
    fn synchronize(&mut self, who: Who, access: &Access, ordering: Ordering) {
        let Some(block) = self.blocks.get_mut(&who.block) else { return };
        // Words of shared memory belong to the block.
        let words = if access.shared { &mut block.words } else { &mut self.words };
        let found = words
            .get(&access.address)
            .filter(|word| word.block == who.block || word.reach.min(ordering.reach) > Reach::Block);
        if access.does != Does::Store
            && let Some(word) = found
        {
            let own = &mut block.threads[who.thread as usize];
            if ordering.acquires {
                own.view.join(&word.view);
            } else {
                let seen = &mut own.seen[usize::from(word.block != who.block)];
                seen.get_or_insert_default().join(&word.view);
            }
        }
        if access.does == Does::Load {
            return;
        }
        let released = if ordering.releases {
            Some((ordering.reach, block.release(who.block, who.thread)))
        } else {
            let fenced = block.threads[who.thread as usize].fenced.clone();
            fenced.map(|(reach, view)| (reach.min(ordering.reach), view))
        };
        let words = if access.shared { &mut block.words } else { &mut self.words };
        match (released, access.does) {
            (None, Does::Store) => drop(words.remove(&access.address)),
            (None, _) => {}
            (Some((reach, mut view)), does) => {
                // An atomic continues what others have released at the word.
                if does == Does::Update
                    && let Some(word) = words.get(&access.address)
                {
                    view.join(&word.view);
                }
                words.insert(access.address, Word { view, block: who.block, reach });
            }
        }
    }
}

impl Observer for Detector {
    fn begin(&mut self, block: u32, threads: u32, _shared: u32) {
        let thread = || Thread { stamp: 1, ..Thread::default() };
        let threads = (0..threads).map(|_| thread()).collect();
        self.blocks.insert(block, Block { counter: 1, threads, ..Block::default() });
    }

    fn end(&mut self, block: u32) {
        self.blocks.remove(&block);
    }

    fn access(&mut self, who: Who, access: &Access) {
        if access.mmio || self.is_library(access.site) {
            return;
        }
        let Some((block, thread)) = self.thread(who) else { return };
        let touch = Touch {
            who,
            key: clock::thread(who.block, who.thread),
            stamp: block.threads[thread as usize].stamp,
            site: access.site,
            does: access.does,
            strong: strength(access.ordering),
            changes: access.changes,
            shared: access.shared,
            copies: false,
        };
        self.touch(&touch, access.address, access.bytes);
        match access.ordering {
            Some(ordering) => self.synchronize(who, access, ordering),
            // What others released at the word before isn't there any more.
            None if access.does == Does::Store => {
                let Some(block) = self.blocks.get_mut(&who.block) else { return };
                let words = if access.shared { &mut block.words } else { &mut self.words };
                if !words.is_empty() {
                    words.remove(&access.address);
                }
            }
            None => {}
        }
    }

    fn fence(&mut self, who: Who, site: u32, ordering: Ordering) {
        if self.is_library(site) {
            return;
        }
        let Some((block, thread)) = self.thread(who) else { return };
        let own = &mut block.threads[thread as usize];
        let farthest = if ordering.reach == Reach::Block { 1 } else { 2 };
        for seen in &mut own.seen[..farthest] {
            if let Some(view) = seen.take() {
                own.view.join(&view);
            }
        }
        let view = block.release(who.block, thread);
        block.threads[thread as usize].fenced = Some((ordering.reach, view));
    }

    fn arrive(&mut self, who: Who, number: u32, waits: bool) {
        let Some((block, thread)) = self.thread(who) else { return };
        if waits {
            block.barriers.entry(number).or_default().0.push(thread);
        } else {
            let view = block.release(who.block, thread);
            block.barriers.entry(number).or_default().1.join(&view);
        }
    }

    fn barrier(&mut self, number: u32, barrier: u32) {
        let Some(block) = self.blocks.get_mut(&number) else { return };
        let Some((threads, others)) = block.barriers.remove(&barrier) else { return };
        let mut whole = Vec::new();
        if threads.len() == block.threads.len() {
            whole.push(clock::block(number));
        } else {
            let mut warps = [0u32; 32];
            threads.iter().for_each(|thread| warps[(thread / 32) as usize] |= 1 << (thread % 32));
            for (warp, lanes) in warps.into_iter().enumerate() {
                whole.extend(lanes_keys(number, warp as u32, lanes, block.threads.len() as u32));
            }
        }
        block.meet(&threads, &whole, Some(&others));
    }

    fn warp(&mut self, number: u32, warp: u32, lanes: u32, barrier: bool, site: u32) {
        if !barrier && (!self.lenient || self.is_library(site)) {
            return;
        }
        let Some(block) = self.blocks.get_mut(&number) else { return };
        let threads: Vec<u32> = (0..32).filter(|lane| lanes >> lane & 1 == 1).map(|lane| warp * 32 + lane).collect();
        let whole = lanes_keys(number, warp, lanes, block.threads.len() as u32);
        block.meet(&threads, &whole, None);
    }

    fn mbarrier(&mut self, who: Who, site: u32, at: u32, phase: u32, usage: MbarrierUse) {
        let Some((block, thread)) = self.thread(who) else { return };
        let stamp = block.threads[thread as usize].stamp;
        let reset = usage == MbarrierUse::Reset;
        let touch = Touch {
            who,
            key: clock::thread(who.block, thread),
            stamp,
            site,
            does: if reset { Does::Store } else { Does::Update },
            strong: u8::from(!reset),
            changes: true,
            shared: true,
            copies: false,
        };
        self.touch(&touch, u64::from(at), 8);
        let Some((block, thread)) = self.thread(who) else { return };
        match usage {
            MbarrierUse::Reset => drop(block.mbarriers.remove(&at)),
            MbarrierUse::Arrived { releases } => {
                let view = if releases { block.release(who.block, thread) } else { View::default() };
                block.mbarriers.entry(at).or_insert_with(Mbarrier::new).arrive(&view, phase);
            }
            MbarrierUse::Passed { acquires } => {
                if acquires && let Some(mbarrier) = block.mbarriers.get(&at) {
                    block.threads[thread as usize].view.join(&mbarrier.done);
                }
            }
        }
    }

    fn bulk(&mut self, who: Who, start: &BulkStart, (before, after): (u32, u32)) {
        let BulkStart { site, bytes, .. } = *start;
        let (inside, outside) = (u64::from(start.shared), start.global);
        let touch = |shared: bool, does: Does, (key, stamp): (Key, u32)| {
            let (strong, changes, copies) = (0, true, true);
            Touch { who, key, stamp, site, does, strong, changes, shared, copies }
        };
        if !start.to_shared {
            let mark = |writes: bool| (clock::copies(who.block, who.thread, writes), start.group + 1);
            self.touch(&touch(true, Does::Load, mark(false)), inside, bytes);
            self.touch(&touch(false, Does::Store, mark(true)), outside, bytes);
            return;
        }
        let mark = (clock::arrivals(who.block, start.mbarrier), before + 1);
        self.touch(&touch(false, Does::Load, mark), outside, bytes);
        self.touch(&touch(true, Does::Store, mark), inside, bytes);
        if !start.sees_mbarrier {
            self.touch(&Touch { strong: 1, ..touch(true, Does::Load, mark) }, start.mbarrier.into(), 8);
        }
        let Some((block, _)) = self.thread(who) else { return };
        let mut view = View::default();
        Rc::make_mut(&mut view.all).raise(mark.0, mark.1);
        block.mbarriers.entry(start.mbarrier).or_insert_with(Mbarrier::new).arrive(&view, after);
    }

    fn bulk_wait(&mut self, who: Who, group: u32, read: bool) {
        let Some((block, thread)) = self.thread(who) else { return };
        let all = Rc::make_mut(&mut block.threads[thread as usize].view.all);
        all.raise(clock::copies(who.block, thread, false), group);
        if !read {
            all.raise(clock::copies(who.block, thread, true), group);
        }
    }

    fn proxy_fence(&mut self, who: Who) {
        let Some((block, thread)) = self.thread(who) else { return };
        let view = block.release(who.block, thread);
        block.threads[thread as usize].view.proxy = view.all;
    }

    fn call(&mut self, _who: Who, _site: u32, _function: u32, _arguments: &[u64]) {}

    fn leave(&mut self, _who: Who, _function: u32) {}
}

impl Mbarrier {
    fn new() -> Self {
        Self { phase: 0, arrived: View::default(), done: View::default() }
    }

    /// Counts an arrival, after which the mbarrier is in this phase.
    fn arrive(&mut self, view: &View, phase: u32) {
        self.arrived.join(view);
        if self.phase != phase {
            self.phase = phase;
            self.done = self.arrived.clone();
        }
    }
}

/// Returns the keys that stand for lanes of a warp: the warp's, if they are all of its lanes.
fn lanes_keys(block: u32, warp: u32, lanes: u32, threads: u32) -> Vec<Key> {
    let count = (threads - (warp * 32).min(threads)).min(32);
    if lanes == 0 {
        Vec::new()
    } else if lanes.count_ones() == count {
        vec![clock::warp(block, warp)]
    } else {
        (0..32).filter(|lane| lanes >> lane & 1 == 1).map(|lane| clock::thread(block, warp * 32 + lane)).collect()
    }
}
