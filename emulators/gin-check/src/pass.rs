//! What is known when: a pass over the records of all processes.
//!
//! A launch's records have the clocks of its threads. Between launches, a wait orders: it acquires a request if it
//! couldn't have ended without that request's raise, and then knows what the request's poster knew. Which raises could
//! have ended a wait depends on what is ordered after it, so the orders are found in passes over all records, in order
//! of time, until no pass finds another. Hosts are ordered by time, because their barriers aren't recorded: what a
//! launch did is before all that a host does later, in any process.

use crate::clock::{Clock, Key};
use crate::event::{ACQUIRES, Call, Look, STRONG, WRITES};
use crate::facts::Facts;
use crate::run::{HOST, Moment, Range, Run, What};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

/// What was known at a post.
#[derive(Clone)]
pub(crate) struct Known {
    pub base: Rc<Facts>,
    launch: u32,
    key: Key,
    stamp: u32,
    clock: Rc<Clock>,
}

impl Known {
    /// Whether a moment was before the post.
    pub fn covers(&self, moment: &Moment) -> bool {
        let Moment { launch, key, stamp, .. } = *moment;
        launch == self.launch && (key == self.key && stamp <= self.stamp || self.clock.covers(key, stamp))
            || self.base.covers(launch, key, stamp)
    }
}

/// Where requests that kernels posted read and write, by process and page.
pub(crate) struct Bytes {
    targets: HashMap<(usize, u64), Vec<usize>>,
    sources: HashMap<(usize, u64), Vec<usize>>,
}

fn pages(range: &Range) -> impl Iterator<Item = (usize, u64)> + use<> {
    const PAGE: u64 = 4096;
    let Range { process, address, bytes } = *range;
    let end = if bytes == 0 { 0 } else { (address + bytes).div_ceil(PAGE) };
    (address / PAGE..end).map(move |page| (process, page))
}

impl Bytes {
    pub fn new(run: &Run) -> Self {
        let mut bytes = Self { targets: HashMap::new(), sources: HashMap::new() };
        for (at, request) in run.requests.iter().enumerate().filter(|(_, request)| request.post.is_some()) {
            pages(&request.target()).for_each(|page| bytes.targets.entry(page).or_default().push(at));
            pages(&request.source()).for_each(|page| bytes.sources.entry(page).or_default().push(at));
        }
        bytes
    }

    fn find(map: &HashMap<(usize, u64), Vec<usize>>, range: &Range) -> BTreeSet<usize> {
        pages(range).flat_map(|page| map.get(&page).into_iter().flatten().copied()).collect()
    }
}

/// The waits that each thread of a launch has passed, in order, and what the thread has gained by then.
type Waits = BTreeMap<Key, Vec<(usize, Rc<Facts>)>>;

/// A pass over all moments in order of time.
pub(crate) struct Pass<'a> {
    pub run: &'a Run,
    bytes: &'a Bytes,
    /// What was known at posts, by request, as the pass before found it.
    before: &'a [Option<Known>],
    /// As this pass finds it.
    pub known: Vec<Option<Known>>,
    /// The requests of each moment that is a post.
    posts: HashMap<usize, Vec<usize>>,
    /// What all hosts know.
    hosts: Facts,
    starts: BTreeMap<u32, Facts>,
    waits: HashMap<u32, Waits>,
    /// What is known once a request has arrived.
    arrivals: Vec<Option<Rc<Facts>>>,
    pub acquired: usize,
}

impl<'a> Pass<'a> {
    pub fn new(run: &'a Run, bytes: &'a Bytes, before: &'a [Option<Known>]) -> Self {
        let mut posts: HashMap<usize, Vec<usize>> = HashMap::new();
        for (request, post) in run.requests.iter().enumerate().filter_map(|(at, request)| Some((at, request.post?))) {
            posts.entry(post).or_default().push(request);
        }
        let known = vec![None; run.requests.len()];
        let arrivals = vec![None; run.requests.len()];
        let (hosts, starts, waits) = Default::default();
        Self { run, bytes, before, known, posts, hosts, starts, waits, arrivals, acquired: 0 }
    }

    /// Goes through the moments, and calls `then` after each.
    pub fn run(&mut self, mut then: impl FnMut(&Self, usize)) {
        for (at, moment) in self.run.moments.iter().enumerate() {
            match moment.what {
                What::Began => drop(self.starts.insert(moment.launch, self.hosts.clone())),
                What::Ended => {
                    self.hosts.end(moment.launch);
                    let threads = self.waits.get(&moment.launch).into_iter().flatten();
                    threads.filter_map(|(_, waits)| waits.last()).for_each(|(_, gained)| self.hosts.join(gained));
                }
                What::Closed(queue) => {
                    let requests = self.run.requests.iter().enumerate();
                    let closed = requests.filter(|(_, request)| request.queue == queue && request.retired < u64::MAX);
                    closed.for_each(|(request, _)| self.hosts.complete(request));
                }
                What::Post { .. } => self.post(at),
                What::Counted(..) | What::Access { .. } => {
                    let mut gained = self.gained(at);
                    if !gained.is_empty() {
                        self.acquired += gained.size();
                        let waits = self.waits.entry(moment.launch).or_default().entry(moment.key).or_default();
                        if let Some((_, earlier)) = waits.last() {
                            gained.join(earlier);
                        }
                        waits.push((at, Rc::new(gained)));
                    }
                }
                What::Doorbell { .. } => {}
            }
            then(self, at);
        }
    }

    /// Returns what is known at a moment.
    pub fn facts(&self, at: usize) -> Facts {
        let moment = &self.run.moments[at];
        let mut facts = self.starts.get(&moment.launch).unwrap_or(&self.hosts).clone();
        let Some(waits) = self.waits.get(&moment.launch) else { return facts };
        // A thread knows of waits in its own block, and in those that its clock names.
        let mut blocks: Vec<Key> = moment.clock.entries().iter().map(|entry| entry.0 >> 16).collect();
        blocks.push(moment.key >> 16);
        blocks.sort_unstable();
        blocks.dedup();
        for (key, waits) in blocks.into_iter().flat_map(|block| waits.range(block << 16..(block + 1) << 16)) {
            let known = |wait: usize| {
                *key == moment.key && wait < at || moment.clock.covers(*key, self.run.moments[wait].stamp)
            };
            if let Some(last) = waits.partition_point(|(wait, _)| known(*wait)).checked_sub(1) {
                facts.join(&waits[last].1);
            }
        }
        facts
    }

    /// Returns the requests of a moment that is a post.
    pub fn posted(&self, at: usize) -> &[usize] {
        self.posts.get(&at).map_or(&[], Vec::as_slice)
    }

    fn known(&self, request: usize) -> Option<&Known> {
        // What is posted later, here, could have come first.
        self.known[request].as_ref().or(self.before[request].as_ref())
    }

    /// Returns the requests that write some of the bytes.
    pub fn writing(&self, range: &Range) -> BTreeSet<usize> {
        let mut found = Bytes::find(&self.bytes.targets, range);
        found.retain(|request| self.run.requests[*request].target().common(range) > 0);
        found
    }

    /// Returns the requests that read some of the bytes.
    pub fn reading(&self, range: &Range) -> BTreeSet<usize> {
        let mut found = Bytes::find(&self.bytes.sources, range);
        found.retain(|request| self.run.requests[*request].source().common(range) > 0);
        found
    }

    /// Whether what a moment did is before a request's post.
    pub fn before_post(&self, at: usize, request: usize) -> bool {
        let moment = &self.run.moments[at];
        if moment.launch == HOST {
            // The host comes before launches that begin later.
            return self.run.post(request).is_some_and(|post| post.time > moment.time);
        }
        self.known(request).is_some_and(|known| known.covers(moment))
    }

    fn post(&mut self, at: usize) {
        let moment = &self.run.moments[at];
        let base = Rc::new(self.facts(at));
        for &request in self.posts.get(&at).into_iter().flatten() {
            let Moment { launch, key, stamp, .. } = *moment;
            let (base, clock) = (base.clone(), moment.clock.clone());
            let known = Known { base, launch, key, stamp, clock };
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
        self.run.covered.get(&request).into_iter().flatten().for_each(|covered| facts.complete(*covered));
        if let Some(known) = self.known(request) {
            facts.join(&known.base);
            let mut clock = known.clock.clone();
            Rc::make_mut(&mut clock).raise(known.key, known.stamp);
            facts.see(known.launch, &clock);
        }
        let facts = Rc::new(facts);
        self.arrivals[request] = Some(facts.clone());
        facts
    }

    /// Returns what a thread gains at a moment, by a look at a count or by a poll.
    fn gained(&mut self, at: usize) -> Facts {
        let moment = &self.run.moments[at];
        let (flags, range) = match &moment.what {
            What::Access { flags, range, .. } => (*flags, *range),
            _ => (ACQUIRES, Range::default()),
        };
        let mut gained = Facts::default();
        match self.run.look(moment) {
            Some(look) if flags & ACQUIRES != 0 => match look.call {
                Call::Flush => gained = self.flushed(at, &look),
                // A value may be a queue's own count: NCCL's headers wait for counters so, and its own backend flushes.
                Call::Wait | Call::Value => gained = self.counted(at, &look),
                Call::Reset | Call::Other => {}
            },
            // Who polls a value that a single request of at most 8 bytes writes has that value, and what its poster
            // knew if the poll acquires.
            None if flags & (STRONG | WRITES) == STRONG && range.bytes <= 8 => {
                for request in self.writing(&range) {
                    let of = &self.run.requests[request];
                    match flags & ACQUIRES {
                        _ if of.bytes > 8 || of.taken >= moment.time => {}
                        0 => gained.complete(request),
                        _ => gained.join(&self.arrival(request)),
                    }
                }
            }
            _ => {}
        }
        gained
    }

    /// Returns what a flush gains: what was posted before it, on a queue that has completed as many requests.
    fn flushed(&self, at: usize, look: &Look) -> Facts {
        let (moment, mut gained) = (&self.run.moments[at], Facts::default());
        let queues: Vec<usize> = self.run.completions(moment.process, look.address, moment.time).collect();
        if queues.is_empty() {
            return gained;
        }
        let facts = self.facts(at);
        for (request, of) in self.run.requests.iter().enumerate() {
            if of.process != moment.process || !queues.contains(&of.queue) || of.index >= look.raw {
                continue;
            }
            let Some(post) = self.run.post(request) else { continue };
            let earlier = post.launch == moment.launch
                && (post.key == moment.key && post.stamp < moment.stamp || moment.clock.covers(post.key, post.stamp))
                || facts.covers(post.launch, post.key, post.stamp);
            if earlier {
                gained.complete(request);
            }
        }
        gained
    }

    /// Returns what a wait gains, or a look at a value.
    fn counted(&mut self, at: usize, look: &Look) -> Facts {
        let moment = &self.run.moments[at];
        let (raises, awaited) = self.run.raises(moment, look);
        // A wait that failed has seen less.
        let seen = self.run.raises(moment, &Look { call: Call::Value, value: look.raw, ..*look }).1;
        let count = awaited.min(seen);
        // A raise that is posted after this moment can't have ended the wait.
        let later = |request: usize| self.before[request].as_ref().is_some_and(|known| known.covers(moment));
        let possible: Vec<_> = raises.iter().filter(|raise| !later(raise.request)).collect();
        // That a raise is ruled out is progress, even if the wait gains nothing yet.
        self.acquired += raises.len() - possible.len();
        let total: u64 = possible.iter().map(|raise| raise.amount).sum();
        if total == 0 {
            return Facts::default();
        }
        let arrivals: Vec<_> = possible.iter().map(|raise| (raise.amount, self.arrival(raise.request))).collect();
        Facts::of_any(&arrivals, count.min(total))
    }
}
