//! Send queues of all sizes against a model: posts, refusals, dropped batches and completions over many laps. The
//! operations come from a seed; `FERROGIN_POSTS=N` sets the minimum number of batches for each size.

use ferrogin_test_support::Random;
use ferrogin_test_support::mlx5_memory::{Memory, POISON};
use mlx5::device::Handle;
use mlx5::mmio::BlueFlame;
use mlx5::sq::{Flags, PostError, RequestKind, SendParts, SendQueue};
use mlx5::wire::{BLOCK, Fence, MkeyAccess};
use mlx5::wqe::{
    AtomicResult, Bind, BuildError, Data, Destination, Limits, Op, Remote, Sge, Transport, Umr, UmrKind, WindowType,
    With, WorkRequest, parse,
};
use std::collections::VecDeque;

const QPN: u32 = 0x12_3456;
const LIMITS: Limits = Limits { max_inline: 60, max_sge: 3 };
const BYTES: [u8; 61] = [7; 61];

fn posts() -> u32 {
    std::env::var("FERROGIN_POSTS").map_or(1000, |n| n.parse().expect("FERROGIN_POSTS is a number"))
}

/// A work request that the queue accepted.
#[derive(Debug, Clone, Copy)]
struct Taken {
    token: u64,
    index: u32,
    blocks: u32,
    kind: RequestKind,
}

/// The expected state of the queue.
#[derive(Debug)]
struct Model {
    producer: u32,
    fence: bool,
    /// Blocks of the outstanding work requests.
    blocks: u32,
    outstanding: VecDeque<Taken>,
}

impl Model {
    fn pending(&self) -> Fence {
        if self.fence { Fence::Small } else { Fence::None }
    }
}

struct Bench {
    transport: Transport,
    blocks: u32,
    max_posts: u32,
    ring: Memory,
    record: Memory,
    _register: Memory,
    queue: SendQueue<u64>,
    model: Model,
    random: Random,
    token: u64,
}

fn bench(log: u32, transport: Transport, seed: u64) -> Bench {
    let mut random = Random::new(seed);
    // Indices start near the wrap at 16 bits or at 32 bits.
    let start_index = [0, 0xffff_0000 | 0xff00, 0xfff0, random.next_u32()][random.below(4) as usize];
    let (ring, record, register) = (Memory::new(BLOCK << log), Memory::new(8), Memory::new(512));
    let max_posts = [1 << log, (1 << log) / 2 + 1][random.below(2) as usize];
    let parts = SendParts {
        ring: ring.ring(6),
        record: record.record(1),
        register: register.register(256, [BlueFlame::Never, BlueFlame::Inline, BlueFlame::Single][(seed % 3) as usize]),
        qpn: QPN,
        transport,
        limits: LIMITS,
        max_posts,
        signal_all: false,
        start_index,
        keep_alive: Handle::new(()),
    };
    let queue = SendQueue::new(parts).expect("legal sizes");
    let model = Model { producer: start_index, fence: false, blocks: 0, outstanding: VecDeque::new() };
    Bench { transport, blocks: 1 << log, max_posts, ring, record, _register: register, queue, model, random, token: 0 }
}

/// Returns a random work request, valid or not.
fn request<'a>(random: &mut Random, sges: &'a [Sge], pieces: &'a [&'a [u8]], transport: Transport) -> WorkRequest<'a> {
    let remote = Remote { addr: 0x1000, rkey: 0x77 };
    let into = AtomicResult { addr: 0x2000, lkey: 0x88 };
    let data = if random.below(2) == 0 { Data::Sges(sges) } else { Data::Inline(pieces) };
    let window = Bind {
        window: WindowType::Type2,
        rkey: 0x500,
        tag: 1,
        lkey: 0x600,
        addr: 0x4000,
        length: 64,
        access: MkeyAccess::REMOTE_READ,
        zero_based: true,
    };
    let connected = transport == Transport::Rc;
    match random.below(12) {
        // Sometimes a work request for the other transport.
        11 => Op::Datagram { to: Destination::default(), data, imm: None },
        _ if !connected && random.below(8) != 0 => Op::Datagram { to: Destination::default(), data, imm: Some(5) },
        0 => Op::Nop,
        1 => Op::Send { data, with: With::Imm(3) },
        2 => Op::Write { remote, data, imm: None },
        3 => Op::Read { remote, into: sges },
        4 => Op::FetchAdd { remote, add: 1, into },
        5 => Op::CompareSwap { remote, compare: 1, swap: 2, into },
        6 | 7 => Op::Umr { umr: Umr::bind(&window, QPN).expect("legal"), kind: UmrKind::Bind },
        8 => Op::Umr { umr: Umr::local_inv(0x501), kind: UmrKind::LocalInv },
        // A work request for the fast path.
        _ => Op::Write { remote, data: Data::Sges(&sges[..1]), imm: None },
    }
}

/// Returns the error for a work request that no queue accepts.
fn expected_error(post: &WorkRequest<'_>, transport: Transport) -> Option<BuildError> {
    let own = match post {
        Op::Nop => true,
        Op::Datagram { .. } => transport == Transport::Ud,
        _ => transport == Transport::Rc,
    };
    if !own {
        return Some(BuildError::Transport);
    }
    let data = match *post {
        Op::Send { data, .. } | Op::Write { data, .. } | Op::Datagram { data, .. } => data,
        Op::Read { into, .. } => Data::Sges(into),
        _ => return None,
    };
    match data {
        Data::Inline(pieces) => {
            let length: usize = pieces.iter().map(|piece| piece.len()).sum();
            let max = LIMITS.max_inline;
            (length > max as usize).then_some(BuildError::InlineTooLong { length, max })
        }
        Data::Sges(sges) if sges.len() > LIMITS.max_sge as usize => {
            Some(BuildError::TooManySges { count: sges.len(), max: LIMITS.max_sge })
        }
        Data::Sges(sges) => {
            let long = sges.iter().find(|sge| sge.length >= 1 << 31)?;
            Some(BuildError::SgeTooLong { length: long.length })
        }
    }
}

/// Returns the blocks around the next work request; in a small ring, all blocks.
fn near(ring: &Memory, producer: u32) -> Vec<u8> {
    let from = (producer.wrapping_sub(4) as usize * BLOCK) % ring.size();
    ring.read_wrapped(from, ring.size().min(20 * BLOCK))
}

impl Bench {
    fn check(&mut self) {
        let Model { producer, ref outstanding, .. } = self.model;
        let free = (self.blocks - self.model.blocks, self.max_posts - outstanding.len() as u32);
        assert_eq!((self.queue.free_blocks(), self.queue.free_posts()), free);
        assert_eq!((self.queue.producer(), self.queue.pending_fence()), (producer, self.model.pending()));
    }

    /// Makes a batch of posts, some of them refused, and rings or drops it.
    fn batch(&mut self) {
        let before = (self.model.producer, self.model.fence, self.model.blocks, self.model.outstanding.len());
        let record = self.record.read(0, 8);
        let mut placed = Vec::new();
        let mut batch = self.queue.batch();
        for _ in 0..1 + self.random.below(5) {
            let length = [0, 1, 4096, 1 << 31][[0, 1, 2, 2, 2, 2, 3][self.random.below(7) as usize]];
            let sges = vec![Sge { addr: 0x3000, lkey: 0x99, length }; 1 + self.random.below(4) as usize];
            let pieces = [&BYTES[..self.random.below(62) as usize]];
            let post = request(&mut self.random, &sges, &pieces, self.transport);
            let fenced = self.random.below(6) == 0;
            let flags = if fenced { Flags::SIGNALED.with(Flags::FENCE) } else { Flags::SIGNALED };
            self.token += 1;
            let room = (self.blocks - self.model.blocks, self.max_posts - self.model.outstanding.len() as u32);
            let ring = near(&self.ring, self.model.producer);
            let refused = match (expected_error(&post, self.transport), post.size(&LIMITS)) {
                (Some(error), _) => Some(PostError::Build(error)),
                (None, Ok(size)) if size.blocks() > room.0 || room.1 == 0 => {
                    Some(PostError::Full { free_blocks: room.0, free_posts: room.1 })
                }
                (None, Ok(_)) => None,
                (None, Err(error)) => panic!("{error} is unexpected"),
            };
            match (batch.post(self.token, flags, &post), refused) {
                (Err(rejected), Some(error)) => {
                    assert_eq!((rejected.token, rejected.error), (self.token, error), "the token is returned");
                    assert_eq!(near(&self.ring, self.model.producer), ring, "nothing is written");
                }
                (Ok(()), None) => {
                    let kind = match post {
                        Op::Umr { kind: UmrKind::Bind, .. } => RequestKind::Bind,
                        Op::Umr { kind: UmrKind::LocalInv, .. } => RequestKind::LocalInv,
                        _ => RequestKind::Plain,
                    };
                    let blocks = post.size(&LIMITS).expect("legal").blocks();
                    let index = self.model.producer;
                    let fence = if fenced { Fence::Full } else { self.model.pending() };
                    let bytes = self
                        .ring
                        .read_wrapped((index as usize % self.blocks as usize) * BLOCK, blocks as usize * BLOCK);
                    let read = parse(&bytes, self.transport).expect("a request");
                    assert_eq!((read.index, read.qpn, read.fence), (index as u16, QPN, fence), "{post:?}");
                    assert_eq!(read.op, post.to_parsed());
                    self.model.outstanding.push_back(Taken { token: self.token, index, blocks, kind });
                    self.model.producer = index.wrapping_add(blocks);
                    self.model.blocks += blocks;
                    self.model.fence = kind != RequestKind::Plain;
                    placed.push(bytes);
                }
                (outcome, refused) => panic!("{outcome:?}, but {refused:?} is expected for {post:?}"),
            }
        }
        assert_eq!(self.record.read(0, 8), record, "no doorbell before the batch is rung");
        if self.random.below(4) == 0 {
            drop(batch);
            let (producer, fence, blocks, outstanding) = before;
            self.model.outstanding.truncate(outstanding);
            (self.model.producer, self.model.fence, self.model.blocks) = (producer, fence, blocks);
        } else {
            let empty = batch.is_empty();
            assert_eq!(empty, placed.is_empty());
            batch.ring();
            let rung = (self.model.producer & 0xffff).to_be_bytes();
            let shown = if empty { &record[4..] } else { &rung };
            assert_eq!(self.record.read(4, 4), shown);
            assert_eq!(self.record.read(0, 4), [POISON; 4], "the receive queue's doorbell record is unchanged");
        }
    }

    /// Completes an outstanding work request, which covers all earlier ones.
    fn complete(&mut self) {
        let outstanding = self.model.outstanding.len();
        let beyond = self.model.producer as u16;
        assert!(self.queue.complete(beyond).is_err(), "not outstanding");
        if outstanding == 0 {
            return;
        }
        let last = self.random.below(outstanding as u32) as usize;
        let of = self.model.outstanding[last];
        let done: Vec<_> = self.queue.complete(of.index as u16).expect("outstanding").collect();
        let want: Vec<_> = self.model.outstanding.drain(..=last).collect();
        self.model.blocks -= want.iter().map(|taken| taken.blocks).sum::<u32>();
        assert_eq!(done.len(), want.len());
        for (done, want) in done.iter().zip(want) {
            assert_eq!((done.token, done.kind), (want.token, want.kind));
        }
    }
}

#[test]
fn send_queues_of_all_sizes_match_model() {
    let mut laps = Vec::new();
    for log in 2..=12 {
        for (transport, seed) in [(Transport::Rc, 1), (Transport::Rc, 2), (Transport::Ud, 3)] {
            let mut bench = bench(log, transport, seed * 100 + u64::from(log));
            let start = bench.model.producer;
            for _ in 0..posts().max(1 << log) {
                bench.batch();
                bench.check();
                if bench.random.below(3) == 0 {
                    bench.complete();
                    bench.check();
                }
            }
            laps.push(bench.model.producer.wrapping_sub(start) >> log);
            assert!(laps.last() > Some(&1), "a ring of 2^{log} blocks was not passed twice: {laps:?}");
        }
    }
    println!("laps by size: {laps:?}");
}
