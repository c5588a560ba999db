//! Random puts, gets and signals among all ranks, each checked against memory.
//!
//! A stream is a sender, a receiver and a context. Both ends derive the same plan from the seed, so the receiver knows
//! which puts were issued before each signal. Each put in an epoch has its own bytes in the receiver's memory, which
//! start as 0.

use crate::harness::gpu_memory;
use ferrogin_ffi::nccl::{MR_FLAG_FORCE_SO, PTR_HOST};
use ferrogin_ffi::rma::MR_FLAG_SIGNAL_NEVER_RESET;
use ferrogin_test_support::Random;
use mini_nccl::DeviceMemory;
use mini_nccl::rma::{Place, Request, RmaComm, RmaContext, RmaMemory, Signal, Transfer};
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum size of a put in bytes.
const SLOT: usize = 256;

/// What the ranks do.
#[derive(Debug, Clone)]
pub struct Workload {
    pub seed: u64,
    /// Contexts behind the handle.
    pub contexts: usize,
    /// Operations per stream and epoch.
    pub operations: usize,
    pub epochs: u64,
    /// Maximum number of open requests per stream.
    pub depth: usize,
    /// True to use GPU memory throughout.
    pub gpu: bool,
}

impl Default for Workload {
    fn default() -> Self {
        Self { seed: 1, contexts: 2, operations: 400, epochs: 2, depth: 32, gpu: false }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Put,
    Strong { has_put: bool },
    Weak { has_put: bool },
    Get,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    kind: Kind,
    size: usize,
    aggregate: bool,
}

/// Loads the word at `offset`; everything it covers is visible after that.
fn word(memory: &RmaMemory, offset: usize) -> u64 {
    let memory = memory.memory();
    if memory.kind() == PTR_HOST {
        return memory.load(offset);
    }
    let mut bytes = [0; 8];
    memory.read(offset, &mut bytes);
    u64::from_ne_bytes(bytes)
}

/// Returns a stream's operations in an epoch.
fn plan(workload: &Workload, epoch: u64, (sender, receiver, context): (usize, usize, usize)) -> Vec<Step> {
    let stream = ((sender * 64 + receiver) * 64 + context) as u64;
    let mut random = Random::new(workload.seed ^ epoch << 40 ^ stream << 8);
    let mut step = || {
        let kind = match random.below(10) {
            0..4 => Kind::Put,
            4 => Kind::Strong { has_put: false },
            5..7 => Kind::Strong { has_put: true },
            7 => Kind::Weak { has_put: false },
            8 => Kind::Weak { has_put: true },
            _ => Kind::Get,
        };
        Step { kind, size: random.of(&[0, 1, 8, 40, SLOT]), aggregate: random.one_in(3) }
    };
    let mut steps: Vec<_> = (0..workload.operations).map(|_| step()).collect();
    // NCCL's last operation never has the aggregate hint.
    steps.last_mut().expect("an operation").aggregate = false;
    steps
}

/// Returns byte `i` of operation `n`'s put.
fn byte(n: usize, i: usize) -> u8 {
    (n * 7 + i) as u8 | 1
}

/// A rank's memory: its sources, targets for peers, words for strong and weak signals, and bytes for gets.
pub struct Areas {
    /// The strong signals' words before the epoch: NCCL never resets them.
    before: Vec<u64>,
    sources: RmaMemory,
    targets: RmaMemory,
    strong: RmaMemory,
    weak: RmaMemory,
    gets: RmaMemory,
}

struct Sender {
    stream: (usize, usize, usize),
    plan: Vec<Step>,
    next: usize,
    open: VecDeque<(Request, usize)>,
}

struct Receiver {
    plan: Vec<Step>,
    stream: (usize, usize, usize),
    strong: u64,
    /// Operations before this one have been checked.
    checked: usize,
    weak: Vec<usize>,
}

impl Workload {
    /// Returns a stream's index among its rank's streams.
    fn stream(&self, nranks: usize, peer: usize, context: usize) -> usize {
        context * nranks + peer
    }

    /// Creates a context handle and memory for it. Collective.
    pub fn prepare(&self, comm: &RmaComm) -> (RmaContext, Areas) {
        let streams = self.contexts * comm.nranks();
        let slots = streams * self.operations;
        let register = |bytes: usize, flags| {
            let memory =
                if self.gpu { gpu_memory(0, bytes) } else { Arc::new(DeviceMemory::alloc(bytes).expect("memory")) };
            comm.register(&memory, flags).expect("a registration")
        };
        let context = comm.create_context(self.contexts as i32).expect("a context");
        let areas = Areas {
            before: vec![0; streams],
            sources: register(slots * SLOT, 0),
            targets: register(slots * SLOT, 0),
            strong: register(streams * 8, MR_FLAG_FORCE_SO | MR_FLAG_SIGNAL_NEVER_RESET),
            weak: register(slots * 8, MR_FLAG_FORCE_SO),
            gets: register(slots * SLOT, 0),
        };
        for slot in 0..slots {
            let bytes: Vec<_> = (0..SLOT).map(|i| byte(slot % self.operations, i)).collect();
            areas.sources.memory().write(slot * SLOT, &bytes);
        }
        (context, areas)
    }

    /// Runs on one rank, with its own context handle.
    pub fn run(&self, comm: &RmaComm) {
        let (context, mut areas) = self.prepare(comm);
        for epoch in 0..self.epochs {
            for area in [&areas.targets, &areas.weak, &areas.gets] {
                area.memory().fill(0);
            }
            areas.before = (0..areas.before.len()).map(|stream| word(&areas.strong, 8 * stream)).collect();
            comm.barrier().expect("all ranks");
            std::thread::scope(|scope| {
                let mut barrier = None;
                self.epoch((comm.rank(), comm.nranks()), &context, &areas, epoch, || {
                    barrier.get_or_insert_with(|| scope.spawn(|| comm.barrier().expect("all ranks"))).is_finished()
                });
            });
        }
        // Like NCCL, destroy the context before its memory.
        drop(context);
    }

    /// Runs all operations of an epoch, whose target memory must be 0 on all ranks. `all_done` says whether all ranks
    /// are done with theirs.
    pub fn epoch(
        &self,
        (rank, nranks): (usize, usize),
        context: &RmaContext,
        areas: &Areas,
        epoch: u64,
        mut all_done: impl FnMut() -> bool,
    ) {
        let pairs = (0..nranks).flat_map(|peer| (0..self.contexts).map(move |context| (peer, context)));
        let mut senders: Vec<_> = pairs
            .clone()
            .map(|(peer, context)| {
                let stream = (rank, peer, context);
                Sender { stream, plan: plan(self, epoch, stream), next: 0, open: VecDeque::new() }
            })
            .collect();
        let mut receivers: Vec<_> = pairs
            .map(|(peer, context)| {
                let stream = (peer, rank, context);
                let plan = plan(self, epoch, stream);
                let weak = plan.iter().enumerate().filter(|(_, step)| matches!(step.kind, Kind::Weak { .. }));
                Receiver { weak: weak.map(|(n, _)| n).collect(), plan, stream, strong: 0, checked: 0 }
            })
            .collect();
        let mut random = Random::new(self.seed + epoch * 1000 + rank as u64);
        while senders.iter().any(|sender| sender.next < sender.plan.len() || !sender.open.is_empty())
            || receivers.iter().any(|receiver| !self.is_complete(receiver))
        {
            context.progress().expect("progress");
            for sender in &mut senders {
                self.advance(context, areas, sender, nranks, &mut random);
            }
            for receiver in &mut receivers {
                self.verify(areas, receiver, nranks);
            }
            std::thread::yield_now();
        }
        // NCCL's thread keeps polling, which peers need if the provider has no thread.
        while !all_done() {
            context.progress().expect("progress");
            std::thread::yield_now();
        }
        assert!(!context.has_error().expect("an answer"));
        for receiver in &receivers {
            self.verify_end(areas, receiver, nranks);
        }
    }

    fn is_complete(&self, receiver: &Receiver) -> bool {
        let strong = receiver.plan.iter().filter(|step| matches!(step.kind, Kind::Strong { .. })).count() as u64;
        receiver.strong == strong && receiver.weak.is_empty()
    }

    /// Tests requests in random order, and issues operations.
    fn advance(&self, context: &RmaContext, areas: &Areas, sender: &mut Sender, nranks: usize, random: &mut Random) {
        if !sender.open.is_empty() {
            let at = random.index(sender.open.len());
            if context.test(&sender.open[at].0).expect("test") {
                let (_, n) = sender.open.remove(at).expect("the request");
                let step = sender.plan[n];
                if step.kind == Kind::Get && step.size > 0 {
                    let flush = context.flush(0, &areas.strong, sender.stream.1).expect("a flush");
                    assert!(context.test(&flush).expect("a test"));
                    let slot = self.stream(nranks, sender.stream.1, sender.stream.2) * self.operations + n;
                    let mut bytes = vec![0; step.size];
                    areas.gets.memory().read(slot * SLOT, &mut bytes);
                    let expected: Vec<_> = (0..step.size).map(|i| byte(n, i)).collect();
                    assert_eq!(bytes, expected, "get {n} of stream {:?}", sender.stream);
                }
            }
        }
        if sender.next < sender.plan.len() && sender.open.len() < self.depth {
            let n = sender.next;
            let request = self.issue(context, areas, sender.stream, (n, sender.plan[n]), nranks);
            sender.open.push_back((request, n));
            sender.next += 1;
        }
    }

    fn issue(
        &self,
        ctx: &RmaContext,
        areas: &Areas,
        (rank, peer, context): (usize, usize, usize),
        (n, step): (usize, Step),
        nranks: usize,
    ) -> Request {
        // The index of this rank's stream in the peer's memory, and the peer's in this rank's.
        let there = self.stream(nranks, rank, context);
        let here = self.stream(nranks, peer, context);
        let slot = |stream: usize| (stream * self.operations + n) * SLOT;
        let transfer = |here, there, size| Transfer {
            context: context as i32,
            peer,
            here,
            there,
            size,
            aggregate: step.aggregate,
        };
        let put = transfer(areas.sources.at(slot(here)), areas.targets.at(slot(there)), step.size);
        let nothing = transfer(Place::NONE, Place::NONE, 0);
        let choose = |has_put| if has_put { put } else { nothing };
        let result = match step.kind {
            Kind::Put => ctx.put(put, None),
            Kind::Get => ctx.get(transfer(areas.gets.at(slot(here)), areas.sources.at(slot(there)), step.size)),
            Kind::Strong { has_put } => {
                let signal = Signal { word: areas.strong.at(8 * there), value: 1, strong: true };
                ctx.put(choose(has_put), Some(signal))
            }
            Kind::Weak { has_put } => {
                let word = areas.weak.at((there * self.operations + n) * 8);
                ctx.put(choose(has_put), Some(Signal { word, value: 5 + n as u64, strong: false }))
            }
        };
        result.expect("an operation")
    }

    /// Checks everything that the currently visible signals cover.
    fn verify(&self, areas: &Areas, receiver: &mut Receiver, nranks: usize) {
        let (peer, _, context) = receiver.stream;
        let stream = self.stream(nranks, peer, context);
        let strong = word(&areas.strong, 8 * stream) - areas.before[stream];
        while receiver.strong < strong {
            // All operations up to and including the next strong signal.
            while let Some(step) = receiver.plan.get(receiver.checked) {
                self.check_operation(areas, receiver, receiver.checked, nranks);
                receiver.checked += 1;
                if matches!(step.kind, Kind::Strong { .. }) {
                    break;
                }
            }
            receiver.strong += 1;
        }
        let mut weak = std::mem::take(&mut receiver.weak);
        weak.retain(|n| {
            let value = word(&areas.weak, (stream * self.operations + n) * 8);
            if value != 0 {
                assert_eq!(value, 5 + *n as u64, "the word of a weak signal");
                self.check_bytes(areas, receiver, *n, nranks);
            }
            value == 0
        });
        receiver.weak = weak;
    }

    /// Checks that an operation before a visible strong signal is visible.
    fn check_operation(&self, areas: &Areas, receiver: &Receiver, n: usize, nranks: usize) {
        self.check_bytes(areas, receiver, n, nranks);
        if let Kind::Weak { .. } = receiver.plan[n].kind {
            let (peer, _, context) = receiver.stream;
            let at = self.stream(nranks, peer, context) * self.operations + n;
            assert_eq!(word(&areas.weak, at * 8), 5 + n as u64, "weak signal {n} of {:?}", receiver.stream);
        }
    }

    fn check_bytes(&self, areas: &Areas, receiver: &Receiver, n: usize, nranks: usize) {
        let step = receiver.plan[n];
        let has_bytes = match step.kind {
            Kind::Put => true,
            Kind::Strong { has_put } | Kind::Weak { has_put } => has_put,
            Kind::Get => false,
        };
        let (peer, _, context) = receiver.stream;
        let slot = self.stream(nranks, peer, context) * self.operations + n;
        let mut bytes = vec![0; if has_bytes { step.size } else { 0 }];
        areas.targets.memory().read(slot * SLOT, &mut bytes);
        let expected: Vec<_> = (0..bytes.len()).map(|i| byte(n, i)).collect();
        assert_eq!(bytes, expected, "operation {n}, {step:?}, of stream {:?}", receiver.stream);
    }

    /// Checks all bytes of the epoch, and that nothing else was written.
    fn verify_end(&self, areas: &Areas, receiver: &Receiver, nranks: usize) {
        let (peer, _, context) = receiver.stream;
        let stream = self.stream(nranks, peer, context);
        assert_eq!(word(&areas.strong, 8 * stream) - areas.before[stream], receiver.strong, "a signal too many");
        for n in 0..receiver.plan.len() {
            self.check_operation(areas, receiver, n, nranks);
        }
    }
}
