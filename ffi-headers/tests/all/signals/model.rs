//! All interleavings of two senders, their cards, the signal proxy and the words' owner, explored breadth-first with
//! the crate's code.
//!
//! Requests land in any order and complete later, in any order. One that finds no receive writes its bytes and lands
//! again later. The owner resets words, and recreates its context while signals are under way. The words start near
//! 2^64. An add is wrong if the signal is early, changed, applied twice or applied to a later context; an end state is
//! wrong if a signal is lost or a sum is inexact. The protocol's guards are also removed, and then the exploration
//! finds a wrong state.

use ferrogin_ffi::signals::*;
use std::collections::{HashSet, VecDeque};

/// A sender's operations in the first context. One more follows in the second.
const FIRST: usize = 2;
const OPERATIONS: usize = FIRST + 1;
/// Each operation has at most a put and a signal.
const REQUESTS: usize = 2 * 2 * OPERATIONS;
/// Two indexed words, and one in a window.
const WORDS: usize = 3;
const WINDOW: Region = Region { start: 0x1000, bytes: 8 };
const VA: Target = Target::Va { rkey: 7, address: WINDOW.start };
const START: u64 = u64::MAX - 1;

#[derive(Clone, Copy)]
struct Operation {
    has_put: bool,
    /// The word, the amount and the strength; `None` for a put alone.
    signal: Option<(Target, u64, Strength)>,
}

type Programs = [[Operation; OPERATIONS]; 2];

/// A guard that is removed from the protocol.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Without {
    /// Strong signals are posted at once.
    StrongWait,
    /// Signals that don't fit in an immediate are posted along with their put.
    WeakWait,
    /// The completion queue outlives its context.
    OwnQueue,
    /// A request reaches the queue pair of the next context.
    QKey,
    /// Receivers accept signals of any generation.
    Generation,
    /// The signal proxy reposts the receive before it reads the message.
    ReadBeforePost,
    /// The signal proxy reads the word and writes it later.
    WholeAdd,
    /// The context ends in the middle of the signal proxy's round.
    EndOfRound,
    /// The signal proxy never reposts a receive.
    Refill,
}

#[derive(Clone, Copy)]
struct Settings {
    programs: Programs,
    without: &'static [Without],
    /// Receives.
    depth: u32,
    /// How many contexts the receiver creates until it recreates this one; `None` if it keeps this one.
    generations: Option<u64>,
    resets: u8,
}

impl Settings {
    fn lacks(&self, guard: Without) -> bool {
        self.without.contains(&guard)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Status {
    None,
    UnderWay,
    Landed,
    Completed,
}

/// A completion at the receiver: the receive, the request, and whether it's from the second context's queue pair.
type Completion = (u8, u8, bool);

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    next: [u8; 2],
    /// Requests that the signal of the operation before `next` waits for.
    waits: [Option<u16>; 2],
    requests: [Status; REQUESTS],
    /// Requests whose bytes have landed.
    bytes: u16,
    is_second: bool,
    receives: Receives,
    /// The receives that the card has, by number; then those that the signal proxy has.
    posted: VecDeque<u8>,
    free: Vec<u8>,
    /// By receive: the request whose message is in the buffer.
    buffers: Vec<u8>,
    queue: VecDeque<Completion>,
    /// Completions in the signal proxy's round whose signals it hasn't added yet.
    round: VecDeque<(Completion, Option<Signal>)>,
    /// The value that the signal proxy writes next, if it doesn't add in one step.
    copied: Option<u64>,
    words: [u64; WORDS],
    /// What resets took out of each word, and what was added since the context was created.
    sums: [[u64; 2]; WORDS],
    applied: u16,
    resets: u8,
}

impl State {
    fn new(settings: &Settings) -> Self {
        let mut state = Self {
            next: [0; 2],
            waits: [None; 2],
            requests: [Status::None; REQUESTS],
            bytes: 0,
            is_second: false,
            receives: Receives::new(settings.depth, 1),
            posted: VecDeque::new(),
            free: Vec::new(),
            buffers: vec![u8::MAX; settings.depth as usize],
            queue: VecDeque::new(),
            round: VecDeque::new(),
            copied: None,
            words: [START; WORDS],
            sums: [[0; 2]; WORDS],
            applied: 0,
            resets: settings.resets,
        };
        state.open(settings);
        state
    }

    fn open(&mut self, settings: &Settings) {
        self.receives = Receives::new(settings.depth, 1);
        self.free = (0..settings.depth as u8).collect();
        self.posted.clear();
        self.refill();
    }

    fn refill(&mut self) -> bool {
        let due = self.receives.refill(true) as usize;
        self.posted.extend(self.free.drain(..due));
        due > 0
    }
}

/// Returns the request number of an operation's put or signal.
fn request(sender: usize, operation: usize, is_signal: bool) -> usize {
    2 * (sender * OPERATIONS + operation) + usize::from(is_signal)
}

fn operation_of(settings: &Settings, request: u8) -> (usize, usize, Operation) {
    let (sender, operation) = (usize::from(request) / 2 / OPERATIONS, usize::from(request) / 2 % OPERATIONS);
    (sender, operation, settings.programs[sender][operation])
}

fn generation(settings: &Settings, is_second: bool) -> Generation {
    Generation::new(9 + if is_second { settings.generations.unwrap_or(0) } else { 0 })
}

/// Returns the route of an operation's signal, without the removed guard.
fn route(settings: &Settings, sender: usize, at: usize) -> Option<Route> {
    let Operation { has_put, signal } = settings.programs[sender][at];
    let (target, add, strength) = signal?;
    let constants = Sender { generation: generation(settings, at >= FIRST), n_signals: 2, rank: sender as u32 };
    let route = constants.route(Signal { target, add }, strength, has_put).expect("a valid signal")?;
    let wait = if strength == Strength::Strong { Without::StrongWait } else { Without::WeakWait };
    Some(match route {
        Route::AfterCompletion(vehicle) if settings.lacks(wait) => Route::Alone(vehicle),
        route => route,
    })
}

/// Returns what a request carries, if anything.
fn carried(settings: &Settings, id: u8) -> Option<Vehicle> {
    let (sender, at, _) = operation_of(settings, id);
    let is_signal = id % 2 == 1;
    match route(settings, sender, at)? {
        Route::WithPut(word) => (is_signal != settings.programs[sender][at].has_put).then_some(Vehicle::Write(word)),
        Route::Alone(vehicle) | Route::AfterCompletion(vehicle) => is_signal.then_some(vehicle),
    }
}

/// Returns all states that are one step away.
fn steps(settings: &Settings, state: &State) -> Result<Vec<State>, String> {
    let mut all = Vec::new();
    let after = |change: &dyn Fn(&mut State)| {
        let mut next = state.clone();
        change(&mut next);
        next
    };
    for sender in 0..2 {
        all.extend(step_of_sender(settings, state, sender));
    }
    for id in 0..REQUESTS as u8 {
        match state.requests[usize::from(id)] {
            Status::UnderWay => all.extend(land(settings, state, id)),
            Status::Landed => all.push(after(&|next| next.requests[usize::from(id)] = Status::Completed)),
            Status::None | Status::Completed => {}
        }
    }
    all.extend(step_of_proxy(settings, state)?);
    if state.resets > 0 {
        for word in 0..WORDS {
            all.push(after(&|next| {
                next.sums[word][0] = next.sums[word][0].wrapping_add(next.words[word]);
                (next.words[word], next.resets) = (0, next.resets - 1);
            }));
        }
    }
    // The owner waits for the signal proxy before the context ends.
    let between_rounds = state.round.is_empty() || settings.lacks(Without::EndOfRound);
    if settings.generations.is_some() && !state.is_second && between_rounds {
        all.push(after(&|next| {
            (next.is_second, next.next, next.waits) = (true, [FIRST as u8; 2], [None; 2]);
            for status in &mut next.requests {
                // The card refuses the first context's requests that are under way; no wait depends on their
                // completions.
                if *status == Status::Landed || *status == Status::UnderWay && !settings.lacks(Without::QKey) {
                    *status = Status::Completed;
                }
            }
            if !settings.lacks(Without::OwnQueue) {
                next.queue.clear();
            }
            (next.words[0], next.words[1], next.sums[0], next.sums[1]) = (START, START, [0; 2], [0; 2]);
            next.open(settings);
        }));
    }
    Ok(all)
}

fn step_of_sender(settings: &Settings, state: &State, sender: usize) -> Option<State> {
    let mut next = state.clone();
    let at = usize::from(state.next[sender]);
    if let Some(waits) = state.waits[sender] {
        let has_completed = |id| waits >> id & 1 == 0 || matches!(state.requests[id], Status::Completed | Status::None);
        (0..REQUESTS).all(has_completed).then_some(())?;
        next.waits[sender] = None;
        next.requests[request(sender, at - 1, true)] = Status::UnderWay;
        return Some(next);
    }
    let end = if state.is_second { OPERATIONS } else { FIRST };
    if at == end {
        return None;
    }
    next.next[sender] += 1;
    let Operation { has_put, signal } = settings.programs[sender][at];
    if has_put {
        next.requests[request(sender, at, false)] = Status::UnderWay;
    }
    match route(settings, sender, at) {
        Some(Route::Alone(_)) => next.requests[request(sender, at, true)] = Status::UnderWay,
        Some(Route::WithPut(_)) if !has_put => next.requests[request(sender, at, true)] = Status::UnderWay,
        Some(Route::AfterCompletion(_)) => next.waits[sender] = Some(covered(sender, at, signal)),
        _ => {}
    }
    Some(next)
}

/// Returns the requests that an operation's signal covers.
fn covered(sender: usize, at: usize, signal: Option<(Target, u64, Strength)>) -> u16 {
    let is_strong = signal.is_some_and(|(.., strength)| strength == Strength::Strong);
    let begin = if at >= FIRST { FIRST } else { 0 };
    let earlier = (begin..at).flat_map(|at| [request(sender, at, false), request(sender, at, true)]);
    let ids = earlier.filter(|_| is_strong).chain([request(sender, at, false)]);
    ids.fold(0, |mask, id| mask | 1 << id)
}

/// Lands a request, unless it finds no receive.
fn land(settings: &Settings, state: &State, id: u8) -> Option<State> {
    let mut next = state.clone();
    let (sender, at, Operation { has_put, .. }) = operation_of(settings, id);
    if has_put && id.is_multiple_of(2) {
        next.bytes |= 1 << id;
    }
    if let Some(vehicle) = carried(settings, id) {
        let Some(receive) = next.posted.pop_front() else { return (next != *state).then_some(next) };
        if matches!(vehicle, Vehicle::Send(_)) {
            next.buffers[usize::from(receive)] = id;
        }
        next.queue.push_back((receive, id, state.is_second));
    }
    // When a request completes only matters to a later wait in its context.
    let end = if at < FIRST { FIRST } else { OPERATIONS };
    let may_wait = |at| matches!(route(settings, sender, at), Some(Route::AfterCompletion(_)));
    let is_awaited = (at >= FIRST) == state.is_second && (at..end).any(may_wait);
    next.requests[usize::from(id)] = if is_awaited { Status::Landed } else { Status::Completed };
    Some(next)
}

fn step_of_proxy(settings: &Settings, state: &State) -> Result<Vec<State>, String> {
    let mut all = Vec::new();
    if state.queue.front().is_some() && state.round.len() < 2 {
        let mut next = state.clone();
        let completion = next.queue.pop_front().expect("a completion");
        let (receive, _, of_second) = completion;
        if of_second == state.is_second {
            next.receives.take().then_some(()).ok_or("a completion without a receive")?;
            next.free.push(receive);
        }
        let reads_later = settings.lacks(Without::ReadBeforePost);
        let signal = if reads_later { None } else { read(settings, state, completion)? };
        if signal.is_some() || reads_later {
            next.round.push_back((completion, signal));
        }
        all.push(next);
    }
    let mut refilled = state.clone();
    if !settings.lacks(Without::Refill) && refilled.refill() {
        all.push(refilled);
    }
    if let Some(&(completion, signal)) = state.round.front() {
        let mut next = state.clone();
        let signal = if signal.is_none() { read(settings, state, completion)? } else { signal };
        let Some(signal) = signal else {
            next.round.pop_front();
            all.push(next);
            return Ok(all);
        };
        let word = match signal.target {
            Target::Indexed(word) => word as usize,
            Target::Va { .. } => 2,
        };
        let sum = state.words[word].wrapping_add(signal.add);
        if settings.lacks(Without::WholeAdd) && state.copied.is_none() {
            next.copied = Some(sum);
            all.push(next);
            return Ok(all);
        }
        check(settings, &mut next, completion, signal)?;
        next.words[word] = state.copied.unwrap_or(sum);
        next.sums[word][1] = next.sums[word][1].wrapping_add(signal.add);
        (next.copied, _) = (None, next.round.pop_front());
        all.push(next);
    }
    Ok(all)
}

/// Decodes a completion's signal with the crate's code; `None` if it's for an earlier context.
fn read(settings: &Settings, state: &State, (receive, id, of_second): Completion) -> Result<Option<Signal>, String> {
    let vehicle = carried(settings, id).expect("a signal took the receive");
    let of_sender = operation_of(settings, id).1 >= FIRST;
    let known = if settings.lacks(Without::Generation) { of_sender } else { state.is_second };
    let generation = generation(settings, known);
    let receiver = Receiver { generation, n_signals: 2, nranks: 2 };
    let signal = match vehicle {
        Vehicle::Write(word) => receiver.immediate(word.bits()),
        Vehicle::Send(message) => {
            // An earlier context had other buffers.
            let here = if of_second == state.is_second { state.buffers[usize::from(receive)] } else { id };
            let message = match carried(settings, here) {
                Some(Vehicle::Send(message)) => message,
                _ => message,
            };
            receiver.message(&message.to_bytes(), |rkey| (rkey == 7).then_some(WINDOW))
        }
    };
    match signal {
        Ok(signal) => Ok(Some(signal)),
        Err(Refusal::Stale) => Ok(None),
        Err(refusal) => Err(format!("refused: {refusal}")),
    }
}

/// The oracle: checks that the signal is the one that was sent, not early, only once, and for this context.
fn check(settings: &Settings, next: &mut State, (_, id, _): Completion, signal: Signal) -> Result<(), String> {
    let (sender, at, operation) = operation_of(settings, id);
    let Some((target, add, _)) = operation.signal else { return Err("a put without a signal added".into()) };
    if signal != (Signal { target, add }) {
        return Err(format!("changed: {add} arrived as {}", signal.add));
    }
    if next.applied >> id & 1 == 1 {
        return Err("applied twice".into());
    }
    if (at >= FIRST) != next.is_second {
        return Err("applied to a later context".into());
    }
    let covered = covered(sender, at, operation.signal);
    let is_missing = |id: u8| {
        let is_put = id.is_multiple_of(2) && operation_of(settings, id).2.has_put;
        is_put && covered >> id & 1 == 1 && next.bytes >> id & 1 == 0
    };
    if (0..REQUESTS as u8).any(is_missing) {
        return Err("early".into());
    }
    next.applied |= 1 << id;
    Ok(())
}

/// Checks a final state: all signals of the last context were added, and the sums are exact.
fn check_end(settings: &Settings, state: &State) -> Result<(), String> {
    let begin = if state.is_second { FIRST } else { 0 };
    let end = if state.is_second { OPERATIONS } else { FIRST };
    for sender in 0..2 {
        for at in begin..end {
            let ids = [false, true].map(|is_signal| request(sender, at, is_signal));
            let has_signal = route(settings, sender, at).is_some();
            if has_signal && ids.iter().all(|id| state.applied >> id & 1 == 0) {
                return Err("lost".into());
            }
        }
    }
    for (word, [taken, added]) in state.words.iter().zip(state.sums) {
        if word.wrapping_add(taken) != START.wrapping_add(added) {
            return Err(format!("a sum is not exact: {word} and {taken} taken, of {added}"));
        }
    }
    Ok(())
}

/// Returns the number of states, or what's wrong with the first bad one.
fn explore(settings: &Settings) -> Result<usize, String> {
    let first = State::new(settings);
    let mut seen = HashSet::from([first.clone()]);
    let mut open = VecDeque::from([first]);
    while let Some(state) = open.pop_front() {
        let next = steps(settings, &state)?;
        if next.is_empty() {
            check_end(settings, &state)?;
        }
        for state in next {
            if seen.insert(state.clone()) {
                open.push_back(state);
            }
        }
    }
    Ok(seen.len())
}

const PUT: Operation = Operation { has_put: true, signal: None };

const fn signal(has_put: bool, target: Target, add: u64, strength: Strength) -> Operation {
    Operation { has_put, signal: Some((target, add, strength)) }
}

const WORD: Target = Target::Indexed(0);
const LAST: [Operation; 2] = [signal(false, WORD, 3, Strength::Weak), signal(true, VA, 9, Strength::Strong)];
/// Every route, and signals from both senders for one word.
const PROGRAMS: [Programs; 3] = [
    [
        [PUT, signal(false, WORD, 1, Strength::Strong), LAST[0]],
        [signal(true, WORD, 2, Strength::Weak), signal(true, VA, 4, Strength::Weak), LAST[1]],
    ],
    [
        [signal(true, WORD, 1, Strength::Weak), signal(true, VA, u64::MAX, Strength::Strong), LAST[1]],
        [signal(false, VA, 4, Strength::Weak), signal(false, Target::Indexed(1), 1 << 40, Strength::Weak), LAST[0]],
    ],
    [[PUT, signal(true, VA, 1, Strength::Strong), LAST[0]], [PUT, signal(true, WORD, 5000, Strength::Strong), LAST[1]]],
];

const USUAL: Settings = Settings { programs: PROGRAMS[0], without: &[], depth: 1, generations: None, resets: 0 };

#[test]
fn every_interleaving_is_right() {
    let mut states = 0;
    for programs in PROGRAMS {
        for (depth, generations, resets) in [(1, None, 1), (2, None, 1), (1, Some(1), 0), (2, Some(16), 0)] {
            let settings = Settings { programs, depth, generations, resets, ..USUAL };
            states += explore(&settings).unwrap_or_else(|error| panic!("{error}"));
        }
    }
    println!("{states} states");
    assert!(states > 50_000, "{states} states");
}

/// Returns what exploring all programs finds wrong without these guards.
fn wrong(without: &'static [Without], depth: u32, generations: Option<u64>, resets: u8) -> Option<String> {
    let explored = |programs| explore(&Settings { programs, without, depth, generations, resets });
    PROGRAMS.into_iter().find_map(|programs| explored(programs).err())
}

#[test]
fn each_guard_is_needed() {
    let cases: [(&[Without], _, _, _); 7] = [
        (&[Without::StrongWait], 2, 0, "early"),
        (&[Without::WeakWait], 2, 0, "early"),
        (&[Without::ReadBeforePost], 1, 0, "changed"),
        (&[Without::WholeAdd], 1, 1, "a sum is not exact"),
        (&[Without::Refill], 1, 0, "lost"),
        (&[Without::EndOfRound], 1, 0, "applied to a later context"),
        (&[Without::OwnQueue, Without::Generation], 1, 0, "applied to a later context"),
    ];
    for (i, (without, depth, resets, expected)) in cases.into_iter().enumerate() {
        let generations = expected.contains("context").then_some(1);
        let error = wrong(without, depth, generations, resets).unwrap_or_else(|| panic!("case {i}: nothing is wrong"));
        assert!(error.starts_with(expected), "case {i}: {error}");
    }
}

#[test]
fn generation_guards_against_the_last_contexts_and_queue_and_key_against_all() {
    for guard in [&[Without::OwnQueue][..], &[Without::QKey]] {
        assert_eq!(wrong(guard, 1, Some(1), 0), None, "the generation alone");
        let error = wrong(guard, 1, Some(16), 0).expect("an immediate has 4 bits of the generation");
        assert_eq!(error, "applied to a later context");
    }
    assert_eq!(wrong(&[Without::Generation], 1, Some(16), 0), None, "queue and key alone");
}
