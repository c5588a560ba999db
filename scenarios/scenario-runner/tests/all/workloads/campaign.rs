//! Mixed signals from mixed senders: strong and weak, indexed and VA, with a put, with a value and alone. Words are
//! reset while signals for them are in flight.
//!
//! The oracle knows the plans of all ranks. A value that it sees is torn if its halves differ, and early or doubled if
//! it counts more signals than have had their bytes land. A signal is lost if the final sums are too low. Words are
//! reset in three ways:
//!
//! * by an exchange, at any time: what was taken out is part of the sum, which must be exact;
//! * by a plain store, at any time: adds between the owner's read and its store are lost, so the sum is at most the
//!   exact one. If a signal proxy undoes a reset, it's greater;
//! * by a plain store while the word's only sender waits, and signals for its neighbours arrive: the word's sum must be
//!   exact.

use super::{FAULTS, Needs, Rank, ranks};
use crate::common::{child, dist, must_pass, not_over_efa, role};
use ferrogin_device::{Action, Context, Flags, Status};
use ferrogin_ffi::ext::{ContextExt, STATE_RUNG_SHIFT};
use ferrogin_test_support::prometheus::Metrics;
use ferrogin_test_support::{Random, repetitions};
use std::sync::atomic::{AtomicU64, Ordering};

const RANKS: usize = 4;
const CONTEXTS: u32 = 2;
/// Threads per rank. Two post on each context.
const LANES: u32 = 4;
/// Operations per round from a thread to each rank; each has a place of 8 bytes.
const OPERATIONS: usize = 64;
/// Words for weak signals with bytes, shared by all senders.
const SHARED: usize = 3;
/// The shared word that its owner resets with a plain store.
const STORED: usize = 0;
/// A VA add, whose halves stay equal as long as it is whole, and an add to an indexed signal that doesn't fit in an
/// immediate.
const BOTH_HALVES: u64 = 1 << 32 | 1;
const BOTH_QUARTERS: u32 = 1 << 16 | 1;

/// Words per thread, of either kind: shared ones, one for signals without bytes, and one per sender for strong signals.
const WORDS: usize = SHARED + 1 + RANKS;
/// There is a second set of shared indexed words, for amounts that travel as messages, and one indexed word per peer
/// that grants rounds.
const GRANTS: usize = WORDS + SHARED;
const INDEXED: usize = GRANTS + RANKS;
const PLACES: usize = RANKS * OPERATIONS * 8;
const LANE_BYTES: usize = 2 * PLACES + WORDS * 8;
const NEEDS: Needs = Needs {
    ranks: RANKS,
    contexts: CONTEXTS as i32,
    signals: (LANES / CONTEXTS) as i32 * INDEXED as i32,
    bytes: LANES as usize * LANE_BYTES,
    depth: 0,
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Bytes {
    None,
    Put,
    Value,
}

#[derive(Clone, Copy)]
struct Operation {
    bytes: Bytes,
    signal: Option<Sign>,
    aggregate: bool,
}

/// One of a thread's words: its number within its kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Word {
    number: usize,
    is_va: bool,
}

impl Word {
    const ALL: [Self; WORDS + GRANTS] = {
        let mut all = [Self { number: 0, is_va: false }; WORDS + GRANTS];
        let mut i = 0;
        while i < all.len() {
            all[i] = if i < GRANTS { Self { number: i, ..all[0] } } else { Self { number: i - GRANTS, is_va: true } };
            i += 1;
        }
        all
    };

    fn at(self) -> usize {
        if self.is_va { GRANTS + self.number } else { self.number }
    }

    fn is_shared(self) -> bool {
        self.number < SHARED || self.number >= WORDS
    }

    /// Returns the sender, if the word is for strong signals.
    fn sender(self) -> Option<usize> {
        (SHARED + 1..WORDS).contains(&self.number).then(|| self.number - SHARED - 1)
    }

    fn is_stored(self) -> bool {
        self.is_shared() && self.number % WORDS == STORED
    }

    /// Returns the number of signals in a value; for the word without bytes, the value itself.
    fn count(self, seen: u64) -> Result<u64, u64> {
        let halves = match self {
            Self { number: SHARED, .. } => return Ok(seen),
            Self { is_va: true, .. } => (seen & 0xffff_ffff, seen >> 32),
            _ if self.number >= WORDS => (seen & 0xffff, seen >> 16),
            _ => return Ok(seen),
        };
        if halves.0 == halves.1 { Ok(halves.0) } else { Err(seen) }
    }
}

#[derive(Clone, Copy)]
struct Sign {
    word: Word,
    is_strong: bool,
    amount: u64,
}

/// Returns a rank's operations to another, which both know.
fn plan(round: u64, lane: u32, from: usize, to: usize) -> Vec<Operation> {
    let mut random = Random::new(round << 16 | u64::from(lane) << 8 | (from * RANKS + to) as u64);
    let operation = |_| {
        let aggregate = random.one_in(4);
        let bytes = random.of(&[Bytes::None, Bytes::Put, Bytes::Put, Bytes::Value]);
        if bytes != Bytes::None && random.one_in(6) {
            return Operation { bytes, signal: None, aggregate };
        }
        let (is_strong, is_va) = (random.one_in(12), random.one_in(4));
        let (number, amount) = match (is_strong, bytes) {
            (true, _) => (SHARED + 1 + from, if is_va { BOTH_HALVES } else { 1 }),
            (_, Bytes::None) => (SHARED, if is_va { random.next_u64() } else { u64::from(random.below(5000)) }),
            _ if is_va => (random.index(SHARED), BOTH_HALVES),
            _ if random.one_in(6) => (WORDS + random.index(SHARED), BOTH_QUARTERS.into()),
            _ => (random.index(SHARED), 1),
        };
        Operation { bytes, signal: Some(Sign { word: Word { number, is_va }, is_strong, amount }), aggregate }
    };
    (0..OPERATIONS).map(operation).collect()
}

fn value_of(round: u64, from: usize, index: usize) -> u64 {
    1 << 63 | round << 16 | (from * OPERATIONS + index) as u64
}

/// A sender's round, as its receiver sees it.
#[derive(Default)]
struct Incoming {
    round: u64,
    plan: Vec<Operation>,
    /// Operations whose bytes have not landed yet, in order.
    missing: Vec<usize>,
}

impl Incoming {
    fn new(round: u64, plan: Vec<Operation>) -> Self {
        let missing = (0..plan.len()).filter(|&i| plan[i].bytes != Bytes::None).collect();
        Self { round, plan, missing }
    }

    /// Returns the number of strong signals of this kind, and how many of them have had all earlier bytes land.
    fn strong(&self, is_va: bool) -> (u64, u64) {
        let landed = self.missing.first().copied().unwrap_or(OPERATIONS);
        let signs = self.plan.iter().enumerate().filter_map(|(i, operation)| Some((i, operation.signal?)));
        let of_kind = signs.filter(|(_, signal)| signal.is_strong && signal.word.is_va == is_va);
        of_kind.fold((0, 0), |(all, due), (i, _)| (all + 1, due + u64::from(i < landed)))
    }
}

/// A word's signals.
#[derive(Default, Clone, Copy)]
struct Account {
    /// What resets took out.
    taken: u64,
    /// Signals whose bytes have landed; for the word without bytes, the sum of the amounts.
    due: u64,
}

/// A rank's thread, and its part of the context and the window.
struct Lane<'a> {
    rank: &'a Rank,
    me: usize,
    id: u32,
    context: Context<'a>,
    base: usize,
    rounds: u64,
    incoming: Vec<Incoming>,
    accounts: [Account; WORDS + GRANTS],
    random: Random,
    signals: u64,
    /// Posts, and how many of them found the send queue full.
    posts: [u64; 2],
    resets: u64,
}

impl<'a> Lane<'a> {
    fn new(rank: &'a Rank, id: u32, rounds: u64) -> Self {
        let mut lane = Self {
            rank,
            me: rank.rank as usize,
            id,
            context: rank.context(id % CONTEXTS),
            base: id as usize * LANE_BYTES,
            rounds,
            incoming: (0..RANKS).map(|_| Incoming::default()).collect(),
            accounts: [Account::default(); WORDS + GRANTS],
            random: Random::new(u64::from(rank.rank) << 8 | u64::from(id)),
            signals: 0,
            posts: [0; 2],
            resets: 0,
        };
        (0..RANKS).for_each(|from| lane.expect(from, 1));
        lane
    }

    /// Starts a sender's next round.
    fn expect(&mut self, from: usize, round: u64) {
        self.incoming[from] = Incoming::new(round, plan(round, self.id, from, self.me));
        for signal in self.incoming[from].plan.iter().filter_map(|operation| operation.signal) {
            if signal.word.number == SHARED {
                let due = &mut self.accounts[signal.word.at()].due;
                *due = due.wrapping_add(signal.amount);
            }
        }
    }

    fn va_word(&self, number: usize) -> usize {
        self.base + 2 * PLACES + 8 * number
    }

    fn signal(&self, number: usize) -> u32 {
        self.id / CONTEXTS * INDEXED as u32 + number as u32
    }

    fn place(&self, peer: usize, index: usize) -> usize {
        self.base + (peer * OPERATIONS + index) * 8
    }

    fn post(&mut self, round: u64, peer: usize, index: usize, operation: Operation) -> Result<(), Status> {
        let Operation { bytes, signal, aggregate } = operation;
        let (to, value) = (peer as u32, value_of(round, self.me, index));
        let dst = self.rank.at(self.place(self.me, index));
        let from = self.place(peer, index) + PLACES;
        self.rank.memory.store(from, value);
        let src = self.rank.at(from);
        self.signals += u64::from(signal.is_some_and(|signal| signal.amount != 0));
        self.posts[0] += 1;
        self.posts[1] += u64::from(self.is_full());
        let is_strong = signal.is_some_and(|signal| signal.is_strong);
        let flag = |on: bool, flag: Flags| if on { flag.bits() } else { 0 };
        let flags = Flags::from_bits(flag(aggregate, Flags::AGGREGATE) | flag(is_strong, Flags::STRONG));
        match signal {
            Some(Sign { word: Word { number, is_va: true }, amount, .. }) => {
                let word = self.rank.at(self.va_word(number));
                match bytes {
                    Bytes::Put => self.context.put_signal_at(to, dst, src, 8, word, amount, Action::NONE, flags),
                    Bytes::Value => self.context.put_value_signal_at(to, dst, value, 8, word, amount, flags),
                    Bytes::None => self.context.signal_at(to, word, amount, flags),
                }
            }
            indexed => {
                let add = |sign: Sign| Action::signal_add(self.signal(sign.word.number) as u16, sign.amount as u32);
                let action = indexed.map_or(Action::NONE, add);
                match bytes {
                    Bytes::Put => self.context.put(to, dst, src, 8, action, flags),
                    Bytes::Value => self.context.put_value(to, dst, value, 8, action, flags),
                    Bytes::None => self.context.signal(to, action, flags),
                }
            }
        }
    }

    fn ext(&self) -> &ContextExt {
        // SAFETY: the context keeps the struct alive.
        unsafe { &*self.context.as_ptr() }
    }

    /// Returns whether the send queue for puts and signals is full.
    fn is_full(&self) -> bool {
        // SAFETY: the context keeps its structs alive. The data endpoint is the first one.
        let endpoint = unsafe { &*self.ext().routes.endpoints };
        let rung = (endpoint.posting.state.load(Ordering::Relaxed) >> STATE_RUNG_SHIFT) as u32;
        // SAFETY: the counter is in host memory here, and the context keeps it alive.
        let completed = unsafe { AtomicU64::from_ptr(endpoint.config.completed.cast_mut()) }.load(Ordering::Relaxed);
        // The counter has 31 bits.
        rung.wrapping_sub(completed as u32) & 0x7fff_ffff >= endpoint.config.sq_size
    }

    fn read(&self, word: Word) -> Result<u64, Status> {
        if word.is_va {
            Ok(self.rank.memory.load(self.va_word(word.number)))
        } else {
            self.context.read_signal(self.signal(word.number))
        }
    }

    fn store_zero(&self, word: Word) -> Result<(), Status> {
        if word.is_va {
            self.rank.memory.store(self.va_word(word.number), 0);
            Ok(())
        } else {
            self.context.reset_signal(self.signal(word.number))
        }
    }

    /// Atomically takes the value out of a word.
    fn exchange(&self, word: Word) -> u64 {
        if word.is_va {
            return self.rank.memory.swap(self.va_word(word.number), 0);
        }
        // SAFETY: the context keeps its structs.
        let words = unsafe { &*self.ext().emulated }.words;
        // SAFETY: the context has this signal, and all accesses are atomic.
        let word = unsafe { AtomicU64::from_ptr(words.wrapping_add(self.signal(word.number) as usize)) };
        word.swap(0, Ordering::AcqRel)
    }

    /// Reads a word that all senders share, and sometimes resets it. Returns the signals so far.
    fn observe(&mut self, word: Word) -> Result<u64, Status> {
        let resets = self.random.one_in(4);
        let seen = if resets && !word.is_stored() { self.exchange(word) } else { self.read(word)? };
        let place = (self.me, self.id, word);
        let seen = word.count(seen).unwrap_or_else(|seen| panic!("{place:?}: {seen:#x} is a part of an add"));
        let account = &mut self.accounts[word.at()];
        let sum = account.taken.wrapping_add(seen);
        if resets && seen != 0 {
            account.taken = sum;
            self.resets += 1;
            if word.is_stored() {
                self.store_zero(word)?;
            }
        }
        Ok(sum)
    }

    /// Compares what has arrived with the bytes that have landed, and grants senders their next round once theirs is
    /// over.
    fn check(&mut self) -> Result<(), Status> {
        let mut seen = [0; WORDS + GRANTS];
        for word in Word::ALL {
            seen[word.at()] = match word.sender() {
                Some(_) => word.count(self.read(word)?).expect("whole adds"),
                None => self.observe(word)?,
            };
        }
        self.look();
        for word in Word::ALL {
            let (count, due) = (seen[word.at()], self.accounts[word.at()].due);
            let most = match word.sender() {
                Some(from) => self.incoming[from].strong(word.is_va).1,
                None if word.number == SHARED => continue,
                None => due,
            };
            let place = (self.me, self.id, word);
            assert!(count <= most, "{place:?}: {count} signals, and bytes for {most}");
        }
        for from in 0..RANKS {
            let words = [false, true].map(|is_va| Word { number: SHARED + 1 + from, is_va });
            let incoming = &self.incoming[from];
            let has_all = |word: Word| seen[word.at()] == incoming.strong(word.is_va).0;
            if incoming.plan.is_empty() || !incoming.missing.is_empty() || !words.into_iter().all(has_all) {
                continue;
            }
            let next = incoming.round + 1;
            words.into_iter().try_for_each(|word| self.store_zero(word))?;
            self.incoming[from] = Incoming::default();
            if next <= self.rounds {
                self.expect(from, next);
                let grant = Action::signal_inc(self.signal(GRANTS + self.me) as u16);
                self.context.signal(from as u32, grant, Flags::NONE)?;
            }
        }
        Ok(())
    }

    /// Finds the bytes that have landed.
    fn look(&mut self) {
        for (from, incoming) in self.incoming.iter_mut().enumerate() {
            let Incoming { round, plan, missing } = incoming;
            missing.retain(|&index| {
                let seen = self.rank.memory.load(self.base + (from * OPERATIONS + index) * 8);
                let has_landed = seen == value_of(*round, from, index);
                // From an earlier round, if anything.
                let is_old = seen == 0 || seen == value_of(seen << 1 >> 17, from, index) && seen << 1 >> 17 < *round;
                assert!(has_landed || is_old, "rank {}: {seen:#x} in a place", self.me);
                if let Some(signal) = plan[index].signal.filter(|signal| has_landed && !signal.is_strong) {
                    self.accounts[signal.word.at()].due += 1;
                }
                !has_landed
            });
        }
    }

    /// Returns whether all senders' rounds are over and all sums are exact.
    fn is_settled(&self) -> bool {
        let exact = |word: Word| {
            let Account { taken, due } = self.accounts[word.at()];
            let seen = self.read(word).map(|seen| word.count(seen));
            word.sender().is_some() || word.is_stored() || seen.is_ok_and(|seen| seen == Ok(due.wrapping_sub(taken)))
        };
        self.incoming.iter().all(|incoming| incoming.plan.is_empty()) && Word::ALL.into_iter().all(exact)
    }

    fn run(&mut self) -> Result<(), Status> {
        let (rank, me, context) = (self.rank, self.me, self.context);
        for round in 1..=self.rounds {
            rank.poll(&context, "grant of a round", || {
                self.check().expect("a signal");
                (0..RANKS).all(|peer| context.read_signal(self.signal(GRANTS + peer)).expect("a signal") + 1 >= round)
            });
            let plans: Vec<_> = (0..RANKS).map(|to| plan(round, self.id, self.me, to)).collect();
            let planned = |peer: usize, index: usize| plans[peer][index];
            for index in 0..OPERATIONS {
                for peer in (1..=RANKS).map(|step| (me + step) % RANKS) {
                    self.post(round, peer, index, planned(peer, index))?;
                }
                if index % 4 == 3 {
                    self.check()?;
                }
            }
            // If a card finds no receive for a signal, it writes its put's bytes again later. They are final once the
            // put has completed.
            context.flush()?;
        }
        rank.poll(&context, "sum of all signals", || {
            self.check().expect("a signal");
            self.is_settled()
        });
        Ok(())
    }
}

/// Runs a rank with all its threads. Rank 0 asserts that posts found the send queue full, if they should.
fn campaign(rank: &Rank, wanted: u64, fills_queues: bool) {
    let per_round = (LANES as usize * RANKS * RANKS * OPERATIONS * 6 / 7) as u64;
    let rounds = wanted.div_ceil(per_round);
    let mut lanes: Vec<_> = (0..LANES).map(|id| Lane::new(rank, id, rounds)).collect();
    std::thread::scope(|scope| {
        for lane in &mut lanes {
            scope.spawn(|| lane.run().expect("every operation"));
        }
    });
    rank.comm.barrier().expect("all ranks");
    assert!(lanes.iter().all(Lane::is_settled), "rank {}: a signal came twice", rank.rank);
    let sums = lanes.iter().fold([0; 4], |[signals, resets, posts, full], lane| {
        [signals + lane.signals, resets + lane.resets, posts + lane.posts[0], full + lane.posts[1]]
    });
    let mut all = [0; 4];
    for bytes in rank.comm.bootstrap().allgather(&sums.map(u64::to_le_bytes).concat()).expect("all ranks") {
        let of_rank = bytes.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number));
        all.iter_mut().zip(of_rank).for_each(|(sum, number)| *sum += number);
    }
    if rank.rank == 0 {
        let [signals, resets, posts, full] = all;
        println!("REPORT {signals} signals, {resets} resets among them; {full} of {posts} posts found the queue full");
        assert!(full > 0 || !fills_queues, "no post of {posts} found the send queue full");
    }
}

/// What a campaign runs short of.
#[derive(Clone, Copy, PartialEq)]
enum Short {
    Receives,
    SendQueues,
}

/// Runs the campaign with `wanted` signals.
fn mixed_signals(test: &str, short: Short, wanted: u64) {
    let (depth, receives) = if short == Short::Receives { (16, ",rq_size=2") } else { (2, "") };
    if let Some(role) = role() {
        let wanted = role.parse().expect("a number of signals");
        ranks(Needs { depth, ..NEEDS }, |rank| campaign(rank, wanted, short == Short::SendQueues));
        // Written by the last communicator.
        let path = std::env::var("FERROGIN_METRICS").expect("set").replace("{rank}", "0");
        let metrics = Metrics::parse(&std::fs::read_to_string(path).expect("the metrics")).expect("the metrics");
        let number = |name| metrics.sum(name, &[]).expect("a number");
        let signals = number("ferrogin_signals_total");
        let taken = number("ferrogin_signals_exhausted_total");
        println!("REPORT all receives were taken {taken} times, for {signals} signals");
        assert!(taken > 0 || short != Short::Receives, "no signal of {signals} found all receives taken");
        return;
    }
    if not_over_efa(test, "verbs have no faults") {
        return;
    }
    let Some(dist) = dist(test) else { return };
    let metrics = std::env::temp_dir().join(format!("ferrogin-{test}-{}-{{rank}}.prom", std::process::id()));
    let job = child(&dist, test, &wanted.to_string(), 1)
        .env("FERROGIN_SIGNALS", "emulated")
        .env("FERROGIN_METRICS", &metrics)
        .env("SOFTEFA_FAULTS", format!("{FAULTS}{receives}"));
    let outcome = job.run().expect("the job starts");
    let _ = std::fs::remove_file(metrics.to_string_lossy().replace("{rank}", "0"));
    must_pass(&outcome);
    let said = outcome.lines.iter().filter_map(|line| line.text.strip_prefix("REPORT "));
    said.for_each(|text| println!("{test}: {text}"));
}

/// Signals in a long campaign.
fn many() -> u64 {
    repetitions("FERROGIN_SIGNALS_WANTED", 500_000, 5_000_000)
}

#[test]
fn mixed_signals_with_few_receives() {
    mixed_signals("mixed_signals_with_few_receives", Short::Receives, 30_000);
}

#[test]
#[ignore = "make check"]
fn many_mixed_signals_with_few_receives() {
    mixed_signals("many_mixed_signals_with_few_receives", Short::Receives, many());
}

#[test]
#[ignore = "make check"]
fn many_mixed_signals_through_short_send_queues() {
    mixed_signals("many_mixed_signals_through_short_send_queues", Short::SendQueues, many());
}
