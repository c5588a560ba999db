//! Isolation of peers: a lost rank ends only the requests to it.
//!
//! Whoever learns of a loss adds it to the communicator's [`LostRanks`]: the [ring](ferrogin_rendezvous::ring), whose
//! other ranks say so, or a context's watch, whose card says so. Each context then marks the rank in its tables, so
//! that posts to it are refused, and ends its kernels' waits until the program acknowledges the loss. The name comes
//! first, then the marks, then the end of the waits, so a program that gets `FGIN_PEER_LOST` finds the name.
//!
//! A failed request counts as ended in the kernels' waits. The watch says of each endpoint how many failures it has
//! identified, after which kernels post on, and how many the program has acknowledged, after which flushes succeed.

use crate::error::Error;
use crate::kernel_words::{KernelWords, StopWord};
use crate::log::counted;
use efa_dp_direct::wire::CompStatus;
use ferrogin_ffi::ext::{LOST_TARGET, Losses, RANK_ID, TargetWords};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;
use std::sync::Arc;

/// The most ranks that a request's id tells apart.
pub const RANKS_MAX: usize = RANK_ID as usize;

/// The lost ranks of a communicator, with what told this one.
#[derive(Debug, Default)]
pub struct LostRanks {
    ranks: Mutex<BTreeMap<usize, String>>,
    /// Why the other ranks go on without this one.
    given_up: Mutex<Option<String>>,
}

impl LostRanks {
    /// Adds a rank, and how this one knows.
    pub fn add(&self, rank: usize, reason: impl FnOnce() -> String) {
        self.ranks.lock().entry(rank).or_insert_with(reason);
    }

    /// Returns the ranks.
    pub fn all(&self) -> Vec<usize> {
        self.ranks.lock().keys().copied().collect()
    }

    /// Returns how this rank knows that one is lost, if it is.
    pub fn reason(&self, rank: usize) -> Option<String> {
        self.ranks.lock().get(&rank).cloned()
    }

    /// Returns the ranks that aren't among `known`.
    pub fn news(&self, known: &BTreeSet<usize>) -> Vec<(usize, String)> {
        let ranks = self.ranks.lock();
        ranks.iter().filter(|(rank, _)| !known.contains(rank)).map(|(rank, reason)| (*rank, reason.clone())).collect()
    }

    /// Records that the other ranks go on without this one.
    pub fn give_up(&self, reason: String) {
        self.given_up.lock().get_or_insert(reason);
    }

    /// Returns why the other ranks go on without this one, if they do.
    pub fn given_up(&self) -> Option<String> {
        self.given_up.lock().clone()
    }
}

/// What a failed request says about its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The peer is lost.
    Lost(usize),
    /// The peer is lost if the other ranks say so, too. Otherwise the request named memory that isn't registered.
    Suspect(usize),
    /// Something else failed, or it's unknown which peer the request was for.
    Failure,
}

/// Judges a failed request by its status and id, in a job of `nranks`. docs/semantics.md has the rule.
pub fn judge(status: u8, id: u16, nranks: usize) -> Verdict {
    let rank = usize::from(id & !RANK_ID);
    if id & RANK_ID == 0 || rank >= nranks { Verdict::Failure } else { judge_peer(status, rank) }
}

/// Judges a request to `rank` that failed with this status.
pub fn judge_peer(status: u8, rank: usize) -> Verdict {
    use CompStatus::*;
    match CompStatus::from_raw(status) {
        Some(RemoteAbort | RemoteBadDestQpn | RemoteUnknownPeer) => Verdict::Lost(rank),
        Some(LocalUnresponsiveRemote | LocalUnreachableRemote | RemoteRnr) => Verdict::Lost(rank),
        Some(RemoteBadAddress) => Verdict::Suspect(rank),
        _ => Verdict::Failure,
    }
}

/// Where a context's tables are.
pub struct Tables {
    /// The block with the tables.
    pub words: KernelWords,
    /// By context: the offset of the first target, and the upper half of each target's first word.
    pub targets: Vec<(usize, Vec<u32>)>,
    /// The offset of each endpoint's [`Losses`], for all contexts.
    pub losses: Vec<usize>,
    /// The word that ends waits.
    pub stop: Arc<StopWord>,
}

/// Bytes of a target.
const TARGET: usize = size_of::<TargetWords>();
/// Offset of the half of a little-endian word that has [`LOST_TARGET`].
const UPPER: usize = 4;

/// The isolation of the peers of one `createContext`.
pub struct Isolation {
    /// The lost ranks of the communicator.
    pub lost: Arc<LostRanks>,
    nranks: usize,
    tables: Tables,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Lost ranks that the tables say are lost.
    known: BTreeSet<usize>,
    /// Of those, the ones that the program has acknowledged.
    acknowledged: BTreeSet<usize>,
    /// By endpoint, the number of failed requests to each rank.
    failures: Vec<BTreeMap<usize, u32>>,
    /// By endpoint, what kernels have been told.
    published: Vec<Losses>,
}

impl Isolation {
    /// Isolates the peers of a context with these tables.
    pub fn new(lost: Arc<LostRanks>, nranks: usize, tables: Tables) -> Self {
        let failures = vec![BTreeMap::new(); tables.losses.len()];
        let published = vec![Losses::new(0, 0); tables.losses.len()];
        Self { lost, nranks, tables, state: Mutex::new(State { failures, published, ..State::default() }) }
    }

    /// Counts a failed request to a lost rank.
    pub fn count(&self, endpoint: usize, rank: usize) {
        *self.state.lock().failures[endpoint].entry(rank).or_default() += 1;
    }

    /// Returns the number of failed requests of an endpoint that were counted.
    pub fn counted(&self, endpoint: usize) -> u32 {
        self.state.lock().failures[endpoint].values().sum()
    }

    /// Marks ranks that have been lost since the last call, ends the waits, and publishes the counts. Returns the ranks
    /// and reasons.
    pub fn publish(&self) -> Vec<(usize, String)> {
        let mut state = self.state.lock();
        let news = self.lost.news(&state.known);
        for (rank, _) in &news {
            self.mark(*rank);
            state.known.insert(*rank);
        }
        self.publish_counts(&mut state);
        if !news.is_empty() {
            self.tables.stop.set_lost(true);
        }
        news
    }

    /// Refuses posts to a rank from now on.
    fn mark(&self, rank: usize) {
        for (first, heads) in &self.tables.targets {
            for (i, head) in heads.iter().enumerate().skip(rank).step_by(self.nranks).filter(|(_, head)| **head != 0) {
                self.tables.words.store(first + i * TARGET + UPPER, head | (LOST_TARGET >> 32) as u32);
            }
        }
    }

    fn publish_counts(&self, state: &mut State) {
        for ((at, failures), published) in self.tables.losses.iter().zip(&state.failures).zip(&mut state.published) {
            let of_acknowledged = failures.iter().filter(|(rank, _)| state.acknowledged.contains(rank));
            let losses = Losses::new(failures.values().sum(), of_acknowledged.map(|(_, n)| n).sum());
            if losses != *published {
                *published = losses;
                // Kernels may see one half before the other, as either only says that more is known.
                self.tables.words.store(*at, losses.acknowledged);
                self.tables.words.store(at + offset_of!(Losses, identified), losses.identified);
            }
        }
    }

    /// Returns the lost ranks, in order.
    pub fn lost_ranks(&self) -> Vec<usize> {
        self.state.lock().known.iter().copied().collect()
    }

    /// Acknowledges the loss of these ranks. Once all losses are acknowledged, waits go on.
    ///
    /// # Errors
    /// A rank isn't lost; then nothing changes.
    pub fn acknowledge(&self, ranks: &[usize]) -> Result<(), Error> {
        let mut state = self.state.lock();
        if let Some(rank) = ranks.iter().find(|rank| !state.known.contains(rank)) {
            let all = state.known.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(Error::Argument(match state.known.len() {
                0 => format!("rank {rank} is not lost, nor is any other: acknowledge what ferrogin_lost_ranks returns"),
                n => format!(
                    "rank {rank} is not lost: acknowledge what ferrogin_lost_ranks returns ({}: {all})",
                    counted(n, "rank")
                ),
            }));
        }
        state.acknowledged.extend(ranks);
        self.publish_counts(&mut state);
        if state.acknowledged.len() == state.known.len() {
            self.tables.stop.set_lost(false);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::CpuDevice;
    use crate::device::{Device, DeviceBuffer, Use};
    use crate::kernel_words::tests::Gpu;
    use ferrogin_ffi::ext::{STOP_ABORT, STOP_LOST};
    use ferrogin_test_support::wait::wait_until;

    /// Memory with the targets of a context of three ranks, two for each, of which rank 0 lacks the second; then two
    /// endpoints' losses.
    struct Memory(Arc<dyn DeviceBuffer>, Arc<StopWord>);

    const LOSSES: usize = 6 * TARGET;

    impl Memory {
        fn new() -> Self {
            Self(CpuDevice::new(false).allocate(LOSSES + 16, Use::Tables).unwrap().into(), StopWord::on_cpu())
        }

        fn isolation(&self, lost: &Arc<LostRanks>) -> Isolation {
            let tables = Tables {
                words: self.1.words_before(&CpuDevice::new(false), self.0.clone()),
                targets: vec![(0, vec![7, 7, 7, 0, 7, 7])],
                losses: vec![LOSSES, LOSSES + 8],
                stop: self.1.clone(),
            };
            Isolation::new(lost.clone(), 3, tables)
        }

        fn word(&self, offset: usize) -> u64 {
            let mut bytes = [0; 8];
            self.0.read(offset, &mut bytes).unwrap();
            u64::from_le_bytes(bytes)
        }

        fn losses(&self) -> [Losses; 2] {
            let halves = |word: u64| Losses { acknowledged: word as u32, identified: (word >> 32) as u32 };
            [0, 8].map(|at| halves(self.word(LOSSES + at)))
        }

        /// Which targets are marked.
        fn marks(&self) -> [u64; 6] {
            std::array::from_fn(|i| self.word(i * TARGET) >> 63)
        }
    }

    #[test]
    fn loss_is_published_and_acknowledged() {
        let (memory, lost) = (Memory::new(), Arc::<LostRanks>::default());
        let isolation = memory.isolation(&lost);
        assert_eq!((isolation.publish(), isolation.lost_ranks(), memory.1.is_lost()), (vec![], vec![], false));
        lost.add(0, || "first".to_owned());
        lost.add(0, || "second".to_owned());
        isolation.count(1, 0);
        assert_eq!(isolation.publish(), [(0, "first".to_owned())]);
        assert_eq!((memory.marks(), memory.word(0) >> 32), ([1, 0, 0, 0, 0, 0], 7 | 1 << 31));
        assert_eq!((memory.losses()[1], memory.1.is_lost()), (Losses::new(1, 0), true));
        assert!(isolation.acknowledge(&[0, 1]).unwrap_err().to_string().contains("rank 1 is not lost"));
        assert_eq!((memory.losses()[1], memory.1.is_lost()), (Losses::new(1, 0), true));
        isolation.acknowledge(&[0]).unwrap();
        assert_eq!((memory.losses()[1], memory.1.is_lost()), (Losses::new(1, 1), false));
        // A later failure of an acknowledged rank needs no other word.
        isolation.count(1, 0);
        lost.add(2, || "third".to_owned());
        isolation.count(0, 2);
        assert_eq!(isolation.publish().len(), 1);
        assert_eq!(memory.losses(), [Losses::new(1, 0), Losses::new(2, 2)]);
        assert_eq!((memory.1.is_lost(), memory.marks()), (true, [1, 0, 1, 0, 0, 1]));
        isolation.acknowledge(&[0]).unwrap();
        assert!(memory.1.is_lost(), "the other loss is not acknowledged");
        memory.1.raise();
        isolation.acknowledge(&[2]).unwrap();
        assert!(memory.1.is_raised(), "an abort is for good");
        assert_eq!(isolation.counted(1), 2);
    }

    #[test]
    fn tables_are_written_once_and_before_the_end_of_the_waits() {
        const STOP: usize = 2048;
        let (device, lost) = (CpuDevice::new(false), Arc::<LostRanks>::default());
        let gpu = Gpu::new(&device, Arc::default());
        let stop = Arc::new(StopWord::new(Arc::new(KernelWords::new(&device, gpu.clone(), STOP, 4)), STOP));
        let (words, targets) = (stop.words_before(&device, gpu.clone()), vec![(0, vec![7, 7, 7])]);
        let isolation =
            Isolation::new(lost.clone(), 3, Tables { words, targets, losses: vec![LOSSES], stop: stop.clone() });
        lost.add(1, || "it has ended".to_owned());
        isolation.count(0, 1);
        assert_eq!([(); 2].map(|()| isolation.publish().len()), [1, 0]);
        isolation.acknowledge(&[1]).unwrap();
        stop.raise();
        wait_until("the last word", || gpu.written.lock().last() == Some(&(STOP, STOP_ABORT)));
        let losses = |losses: Losses| [(LOSSES, losses.acknowledged), (LOSSES + 4, losses.identified)];
        let mut expected = vec![(TARGET + UPPER, 7 | 1 << 31)];
        expected.extend(losses(Losses::new(1, 0)));
        expected.push((STOP, STOP_LOST));
        expected.extend(losses(Losses::new(1, 1)));
        expected.extend([(STOP, 0), (STOP, STOP_ABORT)]);
        assert_eq!(*gpu.written.lock(), expected);
    }

    #[test]
    fn failures_are_judged_by_status_and_id() {
        let judged = |status: CompStatus, id| judge(status.raw(), id, 3);
        use CompStatus::*;
        for status in CompStatus::ALL {
            let verdict = judged(*status, RANK_ID | 2);
            match status.raw() {
                8 | 9 | 10 | 13 | 14 | 15 => assert_eq!(verdict, Verdict::Lost(2)),
                7 => assert_eq!(verdict, Verdict::Suspect(2)),
                _ => assert_eq!(verdict, Verdict::Failure, "{status:?}"),
            }
        }
        for id in [2, 3 | RANK_ID, u16::MAX] {
            assert_eq!(
                (judged(RemoteBadDestQpn, id), judged(RemoteBadAddress, id)),
                (Verdict::Failure, Verdict::Failure)
            );
        }
        assert_eq!(judge(99, RANK_ID, 3), Verdict::Failure);
    }
}
