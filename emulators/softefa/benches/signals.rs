//! Signals by the ways that docs/signals.md compares, on the software card: `cargo bench -p softefa --bench signals`.
//!
//! One thread is the sender's kernel, the receiver's agent and the waiter in turns, so a figure depends less on the scheduler, and a round trip
//! is one through the card alone. A weak signal covers its own put of 8 bytes. A strong one covers 8 puts. Every strong signal, and every
//! weak one whose latency is measured, is checked: the bytes that it covers have arrived when it shows. A signal alone has no
//! put and covers nothing, and many are under way.
//!
//! `-- --rounds N` signals of each kind (default 2000).
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block)]

#[allow(dead_code)]
#[path = "../tests/all/common/mod.rs"]
mod common;

use common::*;
use efa_dp_direct::cq::{Cqe, RawCqe, RecvCqe};
use efa_dp_direct::wire::RxDesc;
use efa_dp_direct::wqe::{Destination, Inline, Operation, RequestIds, SendData, WriteData};
use ferrogin_libfabric::progress::Progress;
use ferrogin_signals::{Generation, Receiver, Receives, Route, Sender, Signal, Strength, Target, Vehicle, message};
use ferrogin_test_support::wait::HANG_LIMIT;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

const FAULTS: &[&str] = &["", "seed=1,reorder=512,reread=0.5,delay_us=0..50"];
/// Puts that a strong signal covers.
const COVERED: u64 = 8;
/// Words of the target, and the puts that may be under way.
const WORDS: u64 = 1024;
const UNDER_WAY: u64 = 64;
/// Slots of the ring of records, or receives.
const RING: u64 = 64;
const SENDER: Sender = Sender { generation: Generation::new(1), n_signals: 4, rank: 0 };
const RECEIVER: Receiver = Receiver { generation: Generation::new(1), n_signals: 4, nranks: 2 };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The remote counter of the card.
    Card,
    /// A record in a ring of the receiver, after the completion of what the signal covers.
    Record,
    /// Immediate data with a sequence in every put, and a receiver that puts them in order.
    Sequence,
    /// The crate's protocol, a signal that fits an immediate.
    Immediate,
    /// The crate's protocol, a signal of a window, as a send.
    Message,
    /// The same with 4 receives, posted again one by one.
    MessageFewReceives,
}

const WAYS: [Way; 6] = [Way::Card, Way::Record, Way::Sequence, Way::Immediate, Way::Message, Way::MessageFewReceives];

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let option = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).cloned();
    if !have_libfabric("signals") {
        return;
    }
    let rounds = option("--rounds").and_then(|n| n.parse().ok()).unwrap_or(2000);
    if let Some(faults) = std::env::var("SOFTEFA_FAULTS").ok().filter(|_| option("--here").is_some()) {
        return measure(&faults, rounds);
    }
    for faults in FAULTS {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--here", "1", "--rounds", &rounds.to_string()]).env("SOFTEFA_FAULTS", faults);
        assert!(command.status().unwrap().success(), "with SOFTEFA_FAULTS={faults}");
    }
}

fn measure(faults: &str, rounds: u64) {
    println!("SOFTEFA_FAULTS={faults}");
    println!(
        "{:<20}{:>10}{:>12}{:>12}{:>13}{:>17}",
        "", "weak, µs", "weak, 1/ms", "strong, µs", "alone, 1/ms", "requests/strong"
    );
    for way in WAYS {
        let mut pair = Pair::open(way);
        let weak = pair.latency(rounds, Strength::Weak);
        let rate = pair.rate(rounds, |pair| pair.signal(Strength::Weak));
        let before = pair.a.pc;
        let strong = pair.latency(rounds, Strength::Strong);
        let requests = f64::from(pair.a.pc.wrapping_sub(before)) / rounds as f64 - COVERED as f64;
        let alone = pair.rate(rounds, Pair::signal_alone);
        println!("{:<20}{weak:>10.1}{rate:>12.1}{strong:>12.1}{alone:>13.1}{requests:>17.1}", format!("{way:?}"));
        pair.close();
    }
}

/// A sender and a receiver of one card.
struct Pair {
    way: Way,
    rig: Rig,
    progress: Progress,
    a: End,
    b: End,
    to_b: Destination,
    to_a: Destination,
    source: Buffer,
    target: Buffer,
    /// Records: the sender's copies, then its word of credits; the receiver's ring, then its source of credits.
    ring: [Buffer; 2],
    puts: u64,
    records: u64,
    agent: Agent,
}

/// The receiver's side.
#[derive(Default)]
struct Agent {
    word: u64,
    /// Records: the next one. Sequences: the next of the stream.
    next: u64,
    /// Immediates of the stream that arrived early.
    early: BTreeMap<u64, u32>,
    receives: Option<Receives>,
}

impl Pair {
    fn open(way: Way) -> Self {
        let rig = Rig::open();
        let (a, b) = (End::open(&rig), End::open(&rig));
        let bytes = WORDS as usize * 8;
        let (to_b, to_a) = (a.connect(&b.name()), b.connect(&a.name()));
        let ring = [(); 2].map(|()| rig.buffer((RING as usize + 1) * message::BYTES));
        let receives = match way {
            Way::Message => Some(Receives::new(RING as u32, 16)),
            Way::MessageFewReceives => Some(Receives::new(4, 1)),
            _ => None,
        };
        let agent = Agent { receives, ..Agent::default() };
        let (source, target) = (rig.buffer(bytes), rig.buffer(bytes));
        let progress = rig.progress();
        Self { way, progress, a, b, to_b, to_a, source, target, ring, puts: 0, records: 0, agent, rig }
    }

    /// The value of the signal's word, after a turn of the card and of the agent.
    fn poll(&mut self) -> u64 {
        unsafe { (self.progress.function)(self.progress.arg) };
        match self.way {
            Way::Card => self.agent.word = self.b.remote(),
            Way::Record => self.take_records(),
            _ => self.take_completions(),
        }
        self.agent.word
    }

    fn wait(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            self.poll();
            assert!(start.elapsed() < HANG_LIMIT, "{:?}: no progress within the limit", self.way);
        }
    }

    fn wait_completions(&mut self, at_most_open: u64) {
        self.wait(|pair| u64::from(pair.a.pc) - pair.a.local() <= at_most_open);
        assert_eq!(self.a.errors(), 0);
    }

    fn put(&mut self, imm: Option<u32>) {
        self.wait_completions(UNDER_WAY - 1);
        let at = self.puts % WORDS;
        self.source.word(at as usize).store(self.puts + 1, Relaxed);
        let (remote, data) = (self.target.remote(8 * at), WriteData::One(self.source.sge(8 * at, 8)));
        self.a.post(self.to_b, Operation::Write { remote, data, imm });
        self.puts += 1;
    }

    /// Immediate of the next put or signal of the stream: its sequence, and whether it raises the signal.
    fn sequenced(&mut self, raises: bool, is_strong: bool) -> u32 {
        self.records += 1;
        (self.records as u32 - 1) << 2 | u32::from(raises) << 1 | u32::from(is_strong)
    }

    fn signal(&mut self, strength: Strength) {
        let is_strong = strength == Strength::Strong;
        let covered = if is_strong { COVERED } else { 1 };
        match self.way {
            Way::Card => {
                // The remote counter counts every write, so the last put is the signal, after the completion of the others.
                (1..covered).for_each(|_| self.put(None));
                if is_strong {
                    self.wait_completions(0);
                }
                self.put(None);
            }
            Way::Record => {
                (0..covered).for_each(|_| self.put(None));
                self.wait_completions(0);
                self.post_record();
            }
            Way::Sequence => {
                for n in 1..=covered {
                    let word = self.sequenced(n == covered, is_strong);
                    self.put(Some(word));
                }
            }
            Way::Immediate | Way::Message | Way::MessageFewReceives => {
                let target = match self.way {
                    Way::Immediate => Target::Indexed(2),
                    _ => Target::Va { rkey: 0, address: 16 },
                };
                match SENDER.route(Signal { target, add: 1 }, strength, true) {
                    Ok(Some(Route::WithPut(word))) => {
                        (1..covered).for_each(|_| self.put(None));
                        self.put(Some(word.bits()));
                    }
                    Ok(Some(Route::AfterCompletion(vehicle))) => {
                        (0..covered).for_each(|_| self.put(None));
                        self.wait_completions(0);
                        self.post_alone(vehicle);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    /// A signal without a put, which covers nothing.
    fn signal_alone(&mut self) {
        self.wait_completions(UNDER_WAY - 1);
        let imm = match self.way {
            Way::Record => return self.post_record(),
            Way::Message | Way::MessageFewReceives => {
                let signal = Signal { target: Target::Va { rkey: 0, address: 16 }, add: 1 };
                let Ok(Some(Route::Alone(vehicle))) = SENDER.route(signal, Strength::Weak, false) else {
                    panic!("no route for {signal:?}");
                };
                return self.post_alone(vehicle);
            }
            Way::Card => None,
            Way::Sequence => Some(self.sequenced(true, false)),
            Way::Immediate => {
                match SENDER.route(Signal { target: Target::Indexed(2), add: 1 }, Strength::Weak, false) {
                    Ok(Some(Route::WithPut(word))) => Some(word.bits()),
                    other => panic!("{other:?}"),
                }
            }
        };
        let remote = self.target.remote(0);
        self.a.post(self.to_b, Operation::Write { remote, data: WriteData::Empty, imm });
    }

    fn post_alone(&mut self, vehicle: Vehicle) {
        let operation = match vehicle {
            Vehicle::Write(word) => {
                let remote = self.target.remote(0);
                Operation::Write { remote, data: WriteData::Empty, imm: Some(word.bits()) }
            }
            Vehicle::Send(message) => {
                let data = SendData::Inline(Inline::new(&message.to_bytes()).unwrap());
                Operation::Send { data, imm: None }
            }
        };
        self.a.post(self.to_b, operation);
    }

    fn post_record(&mut self) {
        let (at, n) = (self.records % RING, self.records);
        self.wait(|pair| n - pair.ring[0].word(RING as usize * 4).load(Acquire) < RING);
        for (i, word) in [1, 16, 0, n + 1].into_iter().enumerate() {
            self.ring[0].word(at as usize * 4 + i).store(word, Relaxed);
        }
        let (remote, data) = (self.ring[1].remote(at * 32), WriteData::One(self.ring[0].sge(at * 32, 32)));
        self.a.post(self.to_b, Operation::Write { remote, data, imm: None });
        self.records += 1;
    }

    fn take_records(&mut self) {
        loop {
            let n = self.agent.next;
            let word = |i: usize| self.ring[1].word((n % RING) as usize * 4 + i);
            if word(3).load(Acquire) != n + 1 {
                return;
            }
            self.agent.word += word(0).load(Relaxed);
            self.agent.next += 1;
            if self.agent.next.is_multiple_of(RING / 4) {
                // The source of an earlier return of credits is free: at most one is under way.
                let b = &self.b;
                if u64::from(b.pc) == b.local() {
                    let at = RING as usize * 4;
                    self.ring[1].word(at).store(self.agent.next, Release);
                    let (remote, sge) = (self.ring[0].remote(RING * 32), self.ring[1].sge(RING * 32, 8));
                    self.b.post(self.to_a, write(remote, sge));
                }
            }
        }
    }

    fn take_completions(&mut self) {
        if self.agent.receives.is_some() {
            self.post_receives(false);
        }
        while let Some(bytes) = self.b.poll_entry() {
            let Ok(Cqe::Recv(RecvCqe { req_id, imm, .. })) = Cqe::parse(&RawCqe(bytes), RequestIds::Bits64) else {
                continue;
            };
            let signal = match (self.way, imm) {
                (Way::Sequence, Some(word)) => {
                    self.take_sequenced(word);
                    continue;
                }
                (_, Some(bits)) => RECEIVER.immediate(bits),
                (_, None) => {
                    let at = usize::from(req_id) * 4;
                    let words: [u64; 4] = std::array::from_fn(|i| self.ring[1].word(at + i).load(Relaxed));
                    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                    assert!(self.agent.receives.as_mut().unwrap().take());
                    RECEIVER.message(&bytes, |_| Some(ferrogin_signals::Region { start: 0, bytes: 64 }))
                }
            };
            self.agent.word += signal.expect("a valid signal").add;
            if self.agent.receives.is_some() {
                self.post_receives(false);
            }
        }
        if self.agent.receives.is_some() {
            self.post_receives(true);
        }
    }

    fn post_receives(&mut self, idle: bool) {
        let ring = &self.ring[1];
        let depth = RING as u32;
        let first = self.b.rq_pc;
        let n = self.agent.receives.as_mut().unwrap().refill(idle);
        let descs: Vec<RxDesc> = (first..first + n)
            .map(|i| {
                let sge = ring.sge(u64::from(i % depth) * 32, 32);
                RxDesc::single((i % depth) as u16, sge.addr, 32, sge.lkey)
            })
            .collect();
        if n > 0 {
            self.b.post_receives(&descs);
        }
    }

    fn take_sequenced(&mut self, word: u32) {
        let agent = &mut self.agent;
        let (raises, is_strong) = (word & 2 != 0, word & 1 != 0);
        // A weak signal shows at once; a strong one when everything before it has arrived.
        agent.word += u64::from(raises && !is_strong);
        agent.early.insert(u64::from(word >> 2), word);
        while let Some(word) = agent.early.remove(&agent.next) {
            agent.word += u64::from(word & 3 == 3);
            agent.next += 1;
        }
    }

    /// The median time from the first put to the shown signal, in microseconds.
    fn latency(&mut self, rounds: u64, strength: Strength) -> f64 {
        let mut times = Vec::new();
        for _ in 0..rounds {
            self.wait_completions(0);
            let covered = if strength == Strength::Strong { COVERED } else { 1 };
            // The card's counter counts every put.
            let shown = self.poll() + if self.way == Way::Card { covered } else { 1 };
            let start = Instant::now();
            self.signal(strength);
            self.wait(|pair| pair.agent.word >= shown);
            times.push(start.elapsed());
            for n in self.puts - covered..self.puts {
                assert_eq!(
                    self.target.word((n % WORDS) as usize).load(Relaxed),
                    n + 1,
                    "{:?} {strength:?} is early",
                    self.way
                );
            }
        }
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e6
    }

    /// Signals in a millisecond, of many that are under way.
    fn rate(&mut self, rounds: u64, signal: impl Fn(&mut Self)) -> f64 {
        let shown = self.poll() + rounds;
        let start = Instant::now();
        (0..rounds).for_each(|_| signal(self));
        self.wait(|pair| pair.agent.word >= shown);
        let elapsed = start.elapsed();
        self.wait_completions(0);
        assert_eq!(self.poll(), shown, "{:?}: a signal came twice", self.way);
        rounds as f64 / elapsed.as_secs_f64() / 1e3
    }

    fn close(mut self) {
        self.wait_completions(0);
        self.a.close();
        self.b.close();
        let [first, second] = self.ring;
        for buffer in [self.source, self.target, first, second] {
            buffer.close();
        }
        self.rig.close();
    }
}
