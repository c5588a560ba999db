//! The protocol of `ferrogin_ffi::signals` on the card, with faults: three senders and one receiver.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]

use efa_dp_direct::cq::{Cqe, RawCqe, RecvCqe};
use efa_dp_direct::wire::RxDesc;
use efa_dp_direct::wqe::{Destination, Inline, Operation, RequestIds, SendData, WriteData};
use ferrogin_ffi::signals::*;
use ferrogin_libfabric::bindings as fi;
use ferrogin_test_support::{Random, repetitions};
use softefa_rig::*;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const SENDERS: usize = 3;
/// Indexed words, then the words of a window; the last ones count each sender's strong signals.
const INDEXED: usize = 4;
const WORDS: usize = INDEXED + 4 + SENDERS;
/// How many puts a sender makes in a round, each to a word of its own.
const PUTS: usize = 256;
const UNDER_WAY: u64 = 32;
const RECEIVES: u32 = 4;
const GENERATION: Generation = Generation::new(7);

/// A sender, and its puts and signals of this round.
struct Source {
    end: End,
    to: Destination,
    source: Buffer,
    target: Buffer,
    puts: usize,
    /// A signal that waits for all requests.
    waiting: Option<Vehicle>,
    /// How many puts came before each strong signal.
    covered: Vec<usize>,
}

impl Source {
    fn open_requests(&self) -> u64 {
        assert_eq!(self.end.errors(), 0);
        u64::from(self.end.pc) - self.end.local()
    }

    fn put(&mut self, round: u64, imm: Option<Immediate>) {
        let at = self.puts;
        self.source.word(at).store(round * PUTS as u64 + at as u64, Relaxed);
        let (remote, data) = (self.target.remote(8 * at as u64), WriteData::One(self.source.sge(8 * at as u64, 8)));
        self.end.post(self.to, Operation::Write { remote, data, imm: imm.map(Immediate::bits) });
        self.puts += 1;
    }

    fn post(&mut self, vehicle: Vehicle) {
        let operation = match vehicle {
            Vehicle::Write(word) => {
                Operation::Write { remote: self.target.remote(0), data: WriteData::Empty, imm: Some(word.bits()) }
            }
            Vehicle::Send(message) => {
                let data = SendData::Inline(Inline::new(&message.to_bytes()).unwrap());
                Operation::Send { data, imm: None }
            }
        };
        self.end.post(self.to, operation);
    }

    /// Makes a put, a signal or both, and returns what the signal adds.
    fn operate(&mut self, round: u64, rank: usize, sink: &Sink, random: &mut Random) -> Option<(usize, u64)> {
        if random.one_in(3) {
            self.put(round, None);
            return None;
        }
        let strength = if random.one_in(4) { Strength::Strong } else { Strength::Weak };
        let (target, word) = match (strength, random.index(INDEXED)) {
            (Strength::Strong, _) => (INDEXED + 4 + rank, 1),
            (_, word) if random.one_in(4) => (INDEXED + word, random.next_u64()),
            (_, word) => (word, u64::from(random.below(6000))),
        };
        let signal = Signal { target: sink.target_of(target), add: word };
        let sender = Sender { generation: GENERATION, n_signals: INDEXED as u32, rank: rank as u32 };
        let has_put = random.below(4) != 0;
        match sender.route(signal, strength, has_put).unwrap() {
            None => return None,
            Some(Route::WithPut(word)) if has_put => self.put(round, Some(word)),
            Some(Route::WithPut(word)) => self.post(Vehicle::Write(word)),
            Some(Route::Alone(vehicle)) => self.post(vehicle),
            Some(Route::AfterCompletion(vehicle)) => {
                if has_put {
                    self.put(round, None);
                }
                self.waiting = Some(vehicle);
            }
        }
        if strength == Strength::Strong {
            self.covered.push(self.puts);
        }
        Some((target, word))
    }
}

/// The receiver with its signal proxy. The words after the indexed ones are its window.
struct Sink {
    end: End,
    words: Buffer,
    messages: Buffer,
    receives: Receives,
    applied: u64,
}

impl Sink {
    /// Returns a word's target: the indexed ones come first, then those in the window.
    fn target_of(&self, word: usize) -> Target {
        if word < INDEXED {
            return Target::Indexed(word as u32);
        }
        let remote = self.words.remote(8 * word as u64);
        Target::Va { rkey: remote.rkey, address: remote.addr }
    }

    fn refill(&mut self, idle: bool) {
        let first = self.end.rq_pc;
        let posted = self.receives.refill(idle);
        let descs: Vec<RxDesc> = (first..first + posted)
            .map(|n| n % RECEIVES)
            .map(|at| {
                RxDesc::single(at as u16, self.messages.at as u64 + u64::from(at) * 32, 32, self.messages.region.lkey)
            })
            .collect();
        if posted > 0 {
            self.end.post_receives(&descs);
        }
    }

    fn work(&mut self) {
        let window = self.words.remote(8 * INDEXED as u64);
        let region = ferrogin_ffi::signals::Region { start: window.addr, bytes: 8 * (WORDS - INDEXED) as u64 };
        let receiver = Receiver { generation: GENERATION, n_signals: INDEXED as u32, nranks: SENDERS as u32 };
        while let Some(bytes) = self.end.poll_entry() {
            let Ok(Cqe::Recv(RecvCqe { req_id, imm, .. })) = Cqe::parse(&RawCqe(bytes), RequestIds::Bits64) else {
                panic!("the receiver posts no request");
            };
            assert!(self.receives.take());
            let signal = match imm {
                Some(bits) => receiver.immediate(bits),
                None => {
                    let word = |i| self.messages.word(usize::from(req_id) * 4 + i).load(Relaxed).to_le_bytes();
                    let bytes = [word(0), word(1), word(2), word(3)].concat();
                    receiver.message(&bytes, |rkey| (rkey == window.rkey).then_some(region))
                }
            };
            let signal = signal.unwrap();
            let word = match signal.target {
                Target::Indexed(word) => word as usize,
                Target::Va { address, .. } => INDEXED + (address - region.start) as usize / 8,
            };
            self.words.word(word).fetch_add(signal.add, Release);
            self.applied += 1;
            self.refill(false);
        }
        self.refill(true);
    }
}

#[test]
fn emulated_signals_are_exact_and_in_time() {
    let name = "emulated_signals_are_exact_and_in_time";
    let faults = "seed=3,reorder=512,reread=0.5,delay_us=0..50";
    let body = || rounds(repetitions("FERROGIN_SIGNAL_ROUNDS", 20, 2000));
    print!("{}", child::run(name, &[("SOFTEFA_FAULTS", faults)], body).unwrap_or_default());
}

fn rounds(rounds: u64) {
    let rig = Rig::of(getinfo(|hints| hints.mode |= fi::FI_RX_CQ_DATA).unwrap());
    let (progress, mut random) = (rig.progress(), Random::new(5));
    let (end, words, messages) = (End::open(&rig), rig.buffer(8 * WORDS), rig.buffer(32 * RECEIVES as usize));
    let mut sink = Sink { end, words, messages, receives: Receives::new(RECEIVES, 2), applied: 0 };
    sink.refill(true);
    let mut sources: Vec<Source> = (0..SENDERS)
        .map(|_| {
            let end = End::open(&rig);
            // A receiver's card takes writes only from peers that it has an address handle for.
            sink.end.connect(&end.name());
            let to = end.connect(&sink.end.name());
            let (source, target) = (rig.buffer(8 * PUTS), rig.buffer(8 * PUTS));
            Source { end, to, source, target, puts: 0, waiting: None, covered: Vec::new() }
        })
        .collect();
    for round in 1..=rounds {
        let mut sums = [0u64; WORDS];
        // Takes many steps between two pauses of the wait.
        wait_until("end of a round", || {
            (0..100).any(|_| {
                unsafe { (progress.function)(progress.arg) };
                for (rank, source) in sources.iter_mut().enumerate() {
                    let open = source.open_requests();
                    match source.waiting {
                        Some(vehicle) if open == 0 => {
                            source.waiting = None;
                            source.post(vehicle);
                        }
                        None if open < UNDER_WAY && source.puts < PUTS => {
                            if let Some((word, add)) = source.operate(round, rank, &sink, &mut random) {
                                sums[word] = sums[word].wrapping_add(add);
                            }
                        }
                        _ => {}
                    }
                    let shown = sink.words.word(INDEXED + 4 + rank).load(Acquire) as usize;
                    let covered = shown.checked_sub(1).map_or(0, |last| source.covered[last]);
                    for put in 0..covered {
                        assert_eq!(source.target.word(put).load(Relaxed), round * PUTS as u64 + put as u64, "early");
                    }
                }
                if random.one_in(3) {
                    sink.work();
                }
                let is_idle =
                    |source: &Source| source.puts == PUTS && source.waiting.is_none() && source.open_requests() == 0;
                sources.iter().all(is_idle) && (0..WORDS).all(|word| sink.words.word(word).load(Acquire) == sums[word])
            })
        });
        // The owner resets with plain stores; a signal that came twice would show in the next round.
        (0..WORDS).for_each(|word| sink.words.word(word).store(0, Relaxed));
        sources.iter_mut().for_each(|source| {
            source.puts = 0;
            source.covered.clear();
        });
    }
    sink.work();
    assert!((0..WORDS).all(|word| sink.words.word(word).load(Acquire) == 0), "a signal came twice");
    eprintln!("{} signals", sink.applied);
    assert!(sink.applied > rounds * 300);
}

/// Returns the receive mode that `fi_getinfo` offers for these mode bits in the hints.
fn rx_mode(asked: u64) -> u64 {
    let info = getinfo(|hints| hints.mode |= asked).unwrap();
    unsafe { (*info.rx_attr).mode & fi::FI_RX_CQ_DATA }
}

#[test]
fn write_with_immediate_takes_receive_in_that_mode() {
    child::run("write_with_immediate_takes_receive_in_that_mode", &[], || {
        let rig = Rig::of(getinfo(|hints| hints.mode |= fi::FI_RX_CQ_DATA).unwrap());
        let (mut from, mut to, words) = (End::open(&rig), End::open(&rig), rig.buffer(64));
        to.connect(&from.name());
        let dest = from.connect(&to.name());
        let operation = |imm| Operation::Write { remote: words.remote(0), data: WriteData::Empty, imm };
        from.post(dest, operation(Some(0xdead_beef)));
        from.post(dest, operation(None));
        // The card takes requests in the order they were posted, so it has tried the first one too.
        from.wait_done(1);
        assert_eq!((from.local(), to.poll_entry()), (1, None), "the write without immediate data alone completes");
        let desc = RxDesc::single(7, words.at as u64, 32, words.region.lkey);
        to.post_receives(&[desc]);
        from.wait_done(2);
        assert_eq!((from.local(), from.errors(), to.remote()), (2, 0, 2));
        let entry = Cqe::parse(&RawCqe(to.poll_entry().unwrap()), RequestIds::Bits64);
        let Ok(Cqe::Recv(RecvCqe { req_id, imm, unsolicited, .. })) = entry else { panic!("{entry:?}") };
        assert_eq!((req_id, imm, unsolicited), (7, Some(0xdead_beef), false));
        assert_eq!((rx_mode(0), rx_mode(fi::FI_RX_CQ_DATA)), (0, fi::FI_RX_CQ_DATA));
    });
}

#[test]
fn provider_without_mode_of_receives_ignores_it() {
    child::run("provider_without_mode_of_receives_ignores_it", &[("SOFTEFA_FAULTS", "no_rx_cq_data")], || {
        assert_eq!(rx_mode(fi::FI_RX_CQ_DATA), 0, "a provider without the mode");
    });
}
