//! What set-up costs for any number of ranks: counts from the plugin's rules, and times from measured unit costs.

use ferrogin_ffi::ext::{EmulatedPeer, EmulatedSignals, EndpointExt, TargetWords};
use ferrogin_test_support::Random;

/// Bytes of a frame's header, and of the number of contexts, a context and an endpoint in a rank's block.
const FRAME: u64 = 20;
const COUNT: u64 = 4;
const CONTEXT: u64 = 40;
const ENDPOINT: u64 = 6;
/// Bytes of receive buffers for a context with emulated signals.
const RECEIVES: usize = nccl_gin_ferrogin::signal_proxy::inbox::DEPTH * ferrogin_ffi::signals::Message::BYTES;

/// A `createContext` on all ranks, without counters, each rank on one card.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub ranks: usize,
    pub signals: usize,
    pub contexts: usize,
    /// NCCL's rankStride, which divides the ranks.
    pub stride: usize,
    /// Ranks that share a card.
    pub ranks_per_card: usize,
    /// True if signals are words in memory. Then all signals of a context arrive at one endpoint, and take no counters.
    pub emulated: bool,
}

impl Setup {
    /// Returns a rank's number of endpoints: queue pairs on its card.
    pub fn endpoints(&self) -> usize {
        self.contexts * (2 + if self.emulated { 1 } else { self.signals })
    }

    /// Returns the number of targets per peer in a rank's context.
    fn targets(&self) -> usize {
        1 + if self.emulated { 0 } else { self.signals }
    }

    /// Returns a rank's number of completion counters.
    pub fn counters(&self) -> usize {
        self.contexts * (2 + if self.emulated { 0 } else { 2 * self.signals })
    }

    /// Returns the number of addresses that a rank inserts: one for each card that it reaches.
    pub fn insertions(&self) -> usize {
        (self.ranks / self.stride).div_ceil(self.ranks_per_card)
    }

    /// Returns the number of messages that a rank sends in an allgather, and receives.
    pub fn messages(&self) -> u64 {
        self.ranks as u64 - 1
    }

    /// Returns the size of the message with one rank's contexts.
    pub fn block(&self) -> u64 {
        FRAME + COUNT + self.contexts as u64 * (CONTEXT + ENDPOINT * self.targets() as u64)
    }

    /// Returns the number of rows in a rank's target tables, one for each rank and target, reached or not.
    pub fn rows(&self) -> usize {
        self.contexts * self.targets() * self.ranks
    }

    /// Returns the device memory for a rank's tables and endpoints in bytes. A target has a row in NCCL's tables
    /// (handle, queue pair and key) and one in ours.
    pub fn device_bytes(&self) -> usize {
        let row = size_of::<TargetWords>() + size_of::<(u16, u16, u32)>();
        let scratch = size_of::<u64>() + size_of::<u32>();
        let peers = self.ranks * size_of::<EmulatedPeer>() + size_of::<EmulatedSignals>();
        // Kernels post on all endpoints except those where emulated signals arrive.
        let (posting, peers) = if self.emulated { (2, peers) } else { (2 + self.signals, 0) };
        let context = self.ranks * scratch + posting * size_of::<EndpointExt>() + peers;
        self.rows() * row + self.contexts * context
    }

    /// Returns the host memory for emulated signals' words and receives in bytes.
    pub fn host_bytes(&self) -> usize {
        if self.emulated { self.contexts * (8 * self.signals + RECEIVES) } else { 0 }
    }
}

/// Returns the microseconds until the last of `ranks` has everyone's blocks. A rank sends a round's block once it has
/// the previous round's; `hop` is the time between two neighbours. Each rank starts up to `late` microseconds late, and
/// stalls once for up to as long.
pub fn allgather(ranks: usize, hop: f32, late: f32, seed: u64) -> f32 {
    let mut random = Random::new(seed);
    let mut any = |below: f32| random.below(1 << 20) as f32 / (1 << 20) as f32 * below;
    let mut now: Vec<f32> = (0..ranks).map(|_| any(late)).collect();
    let rounds = ranks - 1;
    let mut stops: Vec<(usize, usize, f32)> = if late > 0.0 && rounds > 0 {
        (0..ranks).map(|rank| (any(rounds as f32) as usize, rank, any(late))).collect()
    } else {
        Vec::new()
    };
    stops.sort_by_key(|(round, ..)| *round);
    let (mut next, mut stops) = (now.clone(), stops.into_iter().peekable());
    for round in 0..rounds {
        while let Some((_, rank, time)) = stops.next_if(|(at, ..)| *at <= round) {
            now[rank] += time;
        }
        next[0] = now[0].max(now[ranks - 1]) + hop;
        for (next, pair) in next[1..].iter_mut().zip(now.windows(2)) {
            *next = pair[0].max(pair[1]) + hop;
        }
        std::mem::swap(&mut now, &mut next);
    }
    now.into_iter().fold(0.0, f32::max)
}

#[test]
fn simulated_ring_takes_one_hop_a_round_and_waits_for_the_latest() {
    assert_eq!(allgather(1, 5.0, 0.0, 1), 0.0);
    assert_eq!([2, 3, 8, 64].map(|ranks| allgather(ranks, 4.0, 0.0, 1)), [4.0, 8.0, 28.0, 252.0]);
    for seed in 1..20 {
        let late = allgather(64, 4.0, 1000.0, seed);
        // The latest of 64 almost certainly starts after 0.5 ms. A block meets at most one stall per rank.
        assert!((252.0 + 500.0..252.0 + 65.0 * 1000.0).contains(&late), "{late} with seed {seed}");
    }
}

#[test]
fn counts_follow_the_rules() {
    let setup = Setup { ranks: 16, signals: 64, contexts: 2, stride: 4, ranks_per_card: 1, emulated: false };
    assert_eq!((setup.endpoints(), setup.counters(), setup.insertions(), setup.messages()), (132, 260, 4, 15));
    assert_eq!((setup.block(), setup.rows()), (20 + 4 + 2 * (40 + 6 * 65), 2 * 65 * 16));
    let setup = Setup { emulated: true, ..setup };
    assert_eq!((setup.endpoints(), setup.counters(), setup.block(), setup.rows()), (6, 4, 20 + 4 + 2 * 46, 2 * 16));
    assert_eq!(setup.host_bytes(), 2 * (64 * 8 + 4096 * 32));
}
