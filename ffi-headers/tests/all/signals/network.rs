//! Four ranks on an unordered network, with few receives and slow signal proxies, checked by an oracle.
//!
//! A request lands at any time, consumes a receive if it carries a signal, and completes at any time after that. The
//! oracle knows which signal each completion belongs to, and which requests that signal covers. It fails if a signal is
//! early, lost, applied twice, changed, or applied to a later context.

use ferrogin_ffi::signals::*;
use ferrogin_test_support::Random;
use proptest::prelude::*;
use std::collections::{BTreeSet, HashMap, VecDeque};

const RANKS: usize = 4;
const CONTEXTS: usize = 2;
const N_SIGNALS: u32 = 8;
const WINDOW_WORDS: u32 = 6;

/// The network, and which guard of the protocol is removed, if any.
#[derive(Debug, Clone, Copy)]
struct Settings {
    seed: u64,
    signals: u64,
    /// Most requests under way at once.
    reorder: usize,
    depth: u32,
    batch: u32,
    /// Steps between two aborts of a context; 0 means never.
    abort_every: u64,
    /// Senders don't wait for completions.
    without_wait: bool,
    /// Receivers accept signals of any generation.
    without_generations: bool,
}

const USUAL: Settings = Settings {
    seed: 1,
    signals: 10_000,
    reorder: 512,
    depth: 8,
    batch: 4,
    abort_every: 20_000,
    without_wait: false,
    without_generations: false,
};

/// A rank, its context, and the peer that the operations go to.
type Pair = (usize, usize, usize);
/// A rank's word: in a context, or (`usize::MAX`) in the window.
type Word = (usize, usize, u64);

/// The oracle's record of a signal.
struct Sent {
    signal: Signal,
    pair: Pair,
    /// The pair's requests below this number are covered, and so is `own`.
    before: u64,
    own: Option<u64>,
    /// Neither applied nor voided by an abort.
    pending: bool,
}

#[derive(Clone, Copy)]
enum Carried {
    Nothing,
    Immediate(u32),
    Message([u8; Message::BYTES]),
}

#[derive(Clone, Copy)]
struct Request {
    id: u64,
    pair: Pair,
    carried: Carried,
    sent: usize,
}

/// A completion at the receiver: the request, and the generation of the queue pair that reports it.
struct Completion {
    request: Request,
    generation: u64,
}

/// A signal that waits for its pair's requests below a number to complete.
struct Waiting {
    pair: Pair,
    before: u64,
    carried: Carried,
    sent: usize,
}

#[derive(Debug, Default, PartialEq)]
struct Seen {
    applied: u64,
    waited: u64,
    refused_for_room: u64,
    stale: u64,
    resets: u64,
}

#[derive(Default)]
struct Network {
    next_id: u64,
    under_way: Vec<Request>,
    landed: Vec<Request>,
    not_landed: HashMap<Pair, BTreeSet<u64>>,
    not_completed: HashMap<Pair, BTreeSet<u64>>,
    waiting: Vec<Waiting>,
    sent: Vec<Sent>,
    generations: [u64; CONTEXTS],
    receives: Vec<Receives>,
    posted: Vec<u32>,
    queues: [VecDeque<Completion>; RANKS],
    words: HashMap<Word, u64>,
    expected: HashMap<Word, u64>,
    seen: Seen,
}

impl Network {
    fn new(settings: &Settings) -> Self {
        let queues = RANKS * CONTEXTS;
        let mut network = Self {
            receives: vec![Receives::new(settings.depth, settings.batch); queues],
            posted: vec![0; queues],
            ..Self::default()
        };
        (0..queues).for_each(|queue| network.refill(queue, true));
        network
    }

    fn refill(&mut self, queue: usize, idle: bool) {
        self.posted[queue] += self.receives[queue].refill(idle);
    }

    fn post(&mut self, pair: Pair, carried: Carried, sent: usize) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.under_way.push(Request { id, pair, carried, sent });
        self.not_landed.entry(pair).or_default().insert(id);
        self.not_completed.entry(pair).or_default().insert(id);
        id
    }

    /// Runs one kernel operation: a put, a put with a signal, or a signal.
    fn operate(&mut self, random: &mut Random, settings: &Settings) {
        let pair = (random.index(RANKS), random.index(CONTEXTS), random.index(RANKS));
        let has_put = random.below(4) != 0;
        if has_put && random.one_in(3) {
            self.post(pair, Carried::Nothing, usize::MAX);
            return;
        }
        let add = match random.below(8) {
            0 => random.next_u64(),
            1 => u64::from(random.below(10_000)),
            2..4 => u64::from(random.below(4096)) + 1,
            _ => 1,
        };
        let target = if random.one_in(4) {
            Target::Va { rkey: 0, address: 8 * u64::from(random.below(WINDOW_WORDS)) }
        } else {
            Target::Indexed(random.below(N_SIGNALS))
        };
        let strength = if random.one_in(4) { Strength::Strong } else { Strength::Weak };
        let signal = Signal { target, add };
        let generation = Generation::new(self.generations[pair.1]);
        let sender = Sender { generation, n_signals: N_SIGNALS, rank: pair.0 as u32 };
        let route = sender.route(signal, strength, has_put).expect("a valid signal");
        let (before, sent) = (if strength == Strength::Strong { self.next_id } else { 0 }, self.sent.len());
        let vehicle = |vehicle| match vehicle {
            Vehicle::Write(word) => Carried::Immediate(word.bits()),
            Vehicle::Send(message) => Carried::Message(message.to_bytes()),
        };
        let own = match route {
            None => {
                if has_put {
                    self.post(pair, Carried::Nothing, usize::MAX);
                }
                return;
            }
            Some(Route::WithPut(word)) => Some(self.post(pair, Carried::Immediate(word.bits()), sent)),
            Some(Route::Alone(alone)) => {
                self.post(pair, vehicle(alone), sent);
                None
            }
            Some(Route::AfterCompletion(after)) => {
                let own = has_put.then(|| self.post(pair, Carried::Nothing, usize::MAX));
                self.seen.waited += 1;
                // The wait covers everything that the context's threads have posted to the peer so far.
                let before = if settings.without_wait { 0 } else { self.next_id };
                self.waiting.push(Waiting { pair, before, carried: vehicle(after), sent });
                own
            }
        };
        self.sent.push(Sent { signal, pair, before, own, pending: true });
    }

    /// Posts a waiting signal if what it covers has completed.
    fn end_wait(&mut self, random: &mut Random) {
        if self.waiting.is_empty() {
            return;
        }
        let at = random.index(self.waiting.len());
        let Waiting { pair, before, .. } = self.waiting[at];
        let first = self.not_completed.get(&pair).and_then(|ids| ids.first().copied());
        if first.is_none_or(|first| first >= before) {
            let waiting = self.waiting.swap_remove(at);
            self.post(pair, waiting.carried, waiting.sent);
        }
    }

    /// Lands a request, unless it finds no receive.
    fn land(&mut self, random: &mut Random) {
        if self.under_way.is_empty() {
            return;
        }
        let at = random.index(self.under_way.len());
        let request = self.under_way[at];
        let (_, context, to) = request.pair;
        if !matches!(request.carried, Carried::Nothing) {
            let Some(left) = self.posted[to * CONTEXTS + context].checked_sub(1) else {
                self.seen.refused_for_room += 1;
                return;
            };
            self.posted[to * CONTEXTS + context] = left;
            self.queues[to].push_back(Completion { request, generation: self.generations[context] });
        }
        self.under_way.swap_remove(at);
        self.landed.push(request);
        self.not_landed.entry(request.pair).or_default().remove(&request.id);
    }

    fn complete(&mut self, random: &mut Random) {
        if !self.landed.is_empty() {
            let request = self.landed.swap_remove(random.index(self.landed.len()));
            self.not_completed.entry(request.pair).or_default().remove(&request.id);
        }
    }

    /// Runs a rank's signal proxy for up to `most` completions.
    fn work(&mut self, rank: usize, most: u32, settings: &Settings) -> Result<(), String> {
        for _ in 0..most {
            let Some(Completion { request, generation }) = self.queues[rank].pop_front() else {
                (0..CONTEXTS).for_each(|context| self.refill(rank * CONTEXTS + context, true));
                return Ok(());
            };
            let (_, context, to) = request.pair;
            let known = if settings.without_generations { generation } else { self.generations[context] };
            let generation = Generation::new(known);
            let receiver = Receiver { generation, n_signals: N_SIGNALS, nranks: RANKS as u32 };
            let signal = match request.carried {
                Carried::Immediate(bits) => receiver.immediate(bits),
                Carried::Message(bytes) => {
                    receiver.message(&bytes, |_| Some(Region { start: 0, bytes: 8 * u64::from(WINDOW_WORDS) }))
                }
                Carried::Nothing => unreachable!("no receive is taken"),
            };
            let signal = match signal {
                Err(Refusal::Stale) => {
                    self.seen.stale += 1;
                    continue;
                }
                other => other.map_err(|refusal| refusal.to_string())?,
            };
            if !self.receives[rank * CONTEXTS + context].take() {
                return Err("a completion without a receive".into());
            }
            self.refill(rank * CONTEXTS + context, false);
            self.check(request.sent, signal)?;
            let word = match signal.target {
                Target::Indexed(signal) => (to, context, signal.into()),
                Target::Va { address, .. } => (to, usize::MAX, address),
            };
            let value = self.words.entry(word).or_default();
            *value = value.wrapping_add(signal.add);
        }
        Ok(())
    }

    /// The oracle: checks that the signal is the one that was sent, not early, and only once.
    fn check(&mut self, sent: usize, signal: Signal) -> Result<(), String> {
        let Sent { signal: original, pair, before, own, pending } = self.sent[sent];
        if !pending {
            return Err(format!("{original:?} was applied twice, or after its context"));
        }
        if signal != original {
            return Err(format!("{original:?} arrived as {signal:?}"));
        }
        let not_landed = self.not_landed.get(&pair);
        let is_early = |id: &u64| *id < before || Some(*id) == own;
        if not_landed.is_some_and(|ids| ids.first().is_some_and(is_early) || own.is_some_and(|own| ids.contains(&own)))
        {
            return Err(format!("{original:?} is early"));
        }
        self.sent[sent].pending = false;
        self.seen.applied += 1;
        let word = match original.target {
            Target::Indexed(signal) => (pair.2, pair.1, signal.into()),
            Target::Va { address, .. } => (pair.2, usize::MAX, address),
        };
        let expected = self.expected.entry(word).or_default();
        *expected = expected.wrapping_add(original.add);
        Ok(())
    }

    /// Reads a word as its owner and stores 0.
    fn reset(&mut self, word: Word) -> Result<(), String> {
        let (value, expected) = (self.words.insert(word, 0), self.expected.insert(word, 0));
        self.seen.resets += 1;
        if value.unwrap_or(0) == expected.unwrap_or(0) {
            Ok(())
        } else {
            Err(format!("{word:?}: {value:?}, {expected:?}"))
        }
    }

    /// Destroys a context on all ranks and recreates it with the same queue pair numbers. Completions stay in the
    /// queues.
    fn abort(&mut self, context: usize, settings: &Settings) {
        self.generations[context] += 1;
        self.under_way.retain(|request| request.pair.1 != context);
        self.landed.retain(|request| request.pair.1 != context);
        self.waiting.retain(|waiting| waiting.pair.1 != context);
        self.not_landed.retain(|pair, _| pair.1 != context);
        self.not_completed.retain(|pair, _| pair.1 != context);
        self.sent.iter_mut().filter(|sent| sent.pair.1 == context).for_each(|sent| sent.pending = false);
        self.words.retain(|word, _| word.1 != context);
        self.expected.retain(|word, _| word.1 != context);
        for rank in 0..RANKS {
            let queue = rank * CONTEXTS + context;
            (self.receives[queue], self.posted[queue]) = (Receives::new(settings.depth, settings.batch), 0);
            self.refill(queue, true);
        }
    }
}

fn run(settings: Settings) -> Result<Seen, String> {
    let mut random = Random::new(settings.seed);
    let mut network = Network::new(&settings);
    let mut steps = 0u64;
    while network.seen.applied < settings.signals {
        steps += 1;
        match random.below(16) {
            0..4 if network.under_way.len() + network.landed.len() < settings.reorder => {
                network.operate(&mut random, &settings);
            }
            4..9 => network.land(&mut random),
            9..13 => network.complete(&mut random),
            13 => network.end_wait(&mut random),
            14 if random.one_in(8) => {
                let rank = random.index(RANKS);
                let word = (rank, random.index(CONTEXTS), random.below(N_SIGNALS).into());
                network.reset(word)?;
                network.reset((rank, usize::MAX, 8 * u64::from(random.below(WINDOW_WORDS))))?;
            }
            15 => network.work(random.index(RANKS), random.below(12), &settings)?,
            _ => {}
        }
        if settings.abort_every > 0 && steps.is_multiple_of(settings.abort_every) {
            network.abort(random.index(CONTEXTS), &settings);
        }
        if steps > 200 * settings.signals + 1_000_000 {
            return Err("signals no longer arrive".into());
        }
    }
    // Everything still under way finishes.
    let mut rounds = 0;
    while !(network.under_way.is_empty() && network.landed.is_empty() && network.waiting.is_empty()) {
        network.land(&mut random);
        network.complete(&mut random);
        network.end_wait(&mut random);
        network.work(random.index(RANKS), 12, &settings)?;
        rounds += 1;
        if rounds > 1_000_000 {
            return Err("requests remain".into());
        }
    }
    for rank in 0..RANKS {
        network.work(rank, u32::MAX, &settings)?;
    }
    if let Some(lost) = network.sent.iter().find(|sent| sent.pending) {
        return Err(format!("{:?} is lost", lost.signal));
    }
    let words: Vec<Word> = network.expected.keys().chain(network.words.keys()).copied().collect();
    words.into_iter().try_for_each(|word| network.reset(word))?;
    Ok(network.seen)
}

#[test]
fn million_signals_arrive_once_and_in_time() {
    let seen = run(Settings { signals: 1_000_000, abort_every: 500_000, ..USUAL }).unwrap();
    println!("{seen:?}");
    assert!(seen.applied >= 1_000_000 && seen.waited > 100_000, "{seen:?}");
    assert!(seen.refused_for_room > 100_000 && seen.stale > 0 && seen.resets > 10_000, "{seen:?}");
}

#[test]
fn strong_signal_without_its_wait_is_early() {
    let error = run(Settings { without_wait: true, ..USUAL }).unwrap_err();
    assert!(error.ends_with("is early"), "{error}");
}

#[test]
fn signals_without_generations_reach_a_later_context() {
    let error = run(Settings { without_generations: true, ..USUAL }).unwrap_err();
    assert!(error.contains("after its context") || error.contains("without a receive"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_network_delivers_exactly(seed: u64, reorder in 1..600usize, depth in 1..40u32, batch in 0..40u32, aborts: bool) {
        let abort_every = if aborts { 3000 } else { 0 };
        let seen = run(Settings { seed, signals: 500, reorder, depth, batch, abort_every, ..USUAL });
        prop_assert!(seen.is_ok(), "{:?}", seen);
    }
}
