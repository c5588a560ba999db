//! A communicator's ranks as one of them sees them: its own rank, the cards, the collective calls, and ranks that are
//! gone.

use super::plugin::RmaPlugin;
use super::rail::Rail;
use crate::comm::{self, ListenComm};
use crate::config::{Config, PeerFailure, Provider};
use crate::device::Device;
use crate::error::Error;
use crate::isolation::{self, LostRanks, Verdict};
use crate::log;
use crate::metrics;
use crate::trace;
use crate::watcher::{self, LostRank};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use ferrogin_libfabric::{CompletionError, bindings};
use ferrogin_rendezvous::ring::{Listener, Ring, Step};
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The ring, and the number of the next collective call that registers memory or creates a context.
struct Calls {
    ring: Arc<Mutex<Ring>>,
    next: u32,
}

impl Calls {
    /// Locks the ring, which the watcher only uses for moments.
    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock()
    }
}

/// Why operations with a rank won't complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// It ended without closing the communicator.
    Lost(usize),
    /// It closed the communicator.
    Closed(usize),
}

/// The ranks; see the [module](self).
pub struct Ranks {
    /// Unique within this process.
    pub number: u64,
    /// For FERROGIN_METRICS.
    pub metrics: Option<metrics::Communicator>,
    /// One per card of the NCCL device.
    pub rails: Vec<Rail>,
    /// The device whose memory NCCL registers.
    pub device: Arc<dyn Device>,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub nranks: usize,
    /// How long a peer may take to complete a part of a request.
    pub timeout: Duration,
    /// The provider of all cards.
    pub provider: Provider,
    /// With FERROGIN_ON_PEER_FAILURE=isolate: the ranks that contexts go on without.
    pub isolation: Option<Arc<LostRanks>>,
    /// The rank that the first failure of a context names.
    blamed: OnceLock<usize>,
    /// A context has failed, or one was destroyed that peers kept waiting for too long. Later ones are destroyed
    /// without waiting.
    pub has_failed: AtomicBool,
    /// Ends before the ring.
    _ring_watch: watcher::Guard,
    calls: Mutex<Calls>,
    /// Set by the watcher.
    lost: LostRank,
    _plugin: Arc<RmaPlugin>,
}

/// The block in `connect`'s allgather.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct RmaGreeting {
    /// Tells this plugin's ring from the GIN plugin's.
    plugin: [u8; 4],
    version: U16,
    rails: U16,
    provider: [u8; 8],
    /// 1 if the rank isolates its peers.
    isolates: U16,
}
ferrogin_ffi::assert_layout!(RmaGreeting, size 18, align 1, {
    plugin @ 0, version @ 4, rails @ 6, provider @ 8, isolates @ 16,
});

impl comm::Greeting for RmaGreeting {
    fn facts(&self) -> Vec<String> {
        let provider = String::from_utf8_lossy(&self.provider);
        let provider = format!("FERROGIN_PROVIDER={}", provider.trim_end_matches('\0'));
        let policy = if self.isolates == 0 { "abort" } else { "isolate" };
        let policy = format!("FERROGIN_ON_PEER_FAILURE={policy}");
        vec![comm::version_text(self.version), comm::rails_text(self.rails), provider, policy]
    }
}

/// How operations over TCP fail once the connection to the peer has ended. Most are cancelled.
const DISCONNECTED: [i32; 8] = [
    bindings::FI_ECANCELED,
    bindings::FI_EIO,
    bindings::FI_ECONNABORTED,
    bindings::FI_ECONNRESET,
    bindings::FI_ENOTCONN,
    bindings::FI_ETIMEDOUT,
    bindings::FI_ECONNREFUSED,
    bindings::FI_EHOSTUNREACH,
];

/// Returns whether a rank isolates its peers, and logs why not if it should but can't.
fn isolates(config: &Config, rank: usize) -> bool {
    let asked = config.on_peer_failure == PeerFailure::Isolate;
    if asked && config.provider == Provider::Verbs {
        crate::warn!(
            "rank {rank}: a lost rank will end all RMA contexts, as with FERROGIN_ON_PEER_FAILURE=abort: the failures of {} do not tell a \
             lost rank from a fault of this rank's card; use efa or tcp",
            config.provider.name()
        );
    }
    asked && config.provider != Provider::Verbs
}

/// Version of the blocks and records that ranks exchange.
const VERSION: u16 = 5;

impl Ranks {
    /// Opens the rails and joins the other ranks.
    ///
    /// # Errors
    /// A card doesn't open; a rank doesn't connect, or has a different version, provider or number of rails.
    pub fn connect(
        listen: &ListenComm<RmaPlugin>,
        handles: &[[u8; HANDLE_MAXSIZE]],
        rank: usize,
    ) -> Result<Self, Error> {
        let _span = trace::span("RMA connect", rank);
        let (plugin, nranks) = (&listen.plugin, handles.len());
        let cards = &plugin.devices.get(listen.device)?.cards;
        let rails = cards.iter().map(Rail::open).collect::<Result<Vec<_>, _>>();
        // This refuses the ranks waiting for this one right away.
        let rails = rails.inspect_err(|_| listen.listener.close())?;
        let (name, mut provider) = (plugin.config.provider.name().as_bytes(), [0; 8]);
        provider[..name.len()].copy_from_slice(name);
        let count = (rails.len() as u16).into();
        let isolates = isolates(&plugin.config, rank);
        let greeting = RmaGreeting {
            plugin: *b"RMA\0",
            version: VERSION.into(),
            rails: count,
            provider,
            isolates: u16::from(isolates).into(),
        };
        let mut ring = comm::join(&listen.listener, handles, rank, plugin.config.timeout, &greeting)?;
        if isolates {
            let (listener, handles) =
                comm::agree(&mut ring, Step::Connect, Listener::open().map_err(Error::from), |listener| {
                    listener.handle().to_vec()
                })?;
            let handles = handles.iter().map(|bytes| bytes.as_slice().try_into().unwrap_or([0; HANDLE_MAXSIZE]));
            ring.go_on_without(&listener, &handles.collect::<Vec<_>>())?;
        }
        let names: Vec<_> = rails.iter().map(Rail::name).collect();
        crate::info!(
            "rank {rank} of {nranks}: RMA connected on {} {}",
            log::counted(rails.len(), "rail"),
            names.join("+")
        );
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let ring = Arc::new(Mutex::new(ring));
        let (lost, lost_ranks) = (LostRank::default(), Arc::<LostRanks>::default());
        let _ring_watch = watcher::watch_ring(ring.clone(), lost.clone(), lost_ranks.clone())?;
        let cards = || rails.iter().map(|rail| (rail.domain.clone(), rail.info.clone())).collect();
        Ok(Self {
            metrics: plugin.metrics.as_ref().map(|metrics| metrics.communicator(rank, cards())),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            rails,
            device: plugin.device.clone(),
            rank,
            nranks,
            timeout: plugin.config.timeout,
            provider: plugin.config.provider,
            isolation: isolates.then_some(lost_ranks),
            blamed: OnceLock::new(),
            has_failed: AtomicBool::new(false),
            _ring_watch,
            calls: Mutex::new(Calls { ring, next: 0 }),
            lost,
            _plugin: plugin.clone(),
        })
    }

    /// Returns what a failed operation says about the peer.
    pub fn judge(&self, error: &CompletionError, peer: usize) -> Verdict {
        match (self.provider, u8::try_from(error.provider_code)) {
            (Provider::Tcp, _) if DISCONNECTED.contains(&error.code) => Verdict::Lost(peer),
            (Provider::Efa | Provider::SoftEfa, Ok(status)) => isolation::judge_peer(status, peer),
            _ => Verdict::Failure,
        }
    }

    /// Returns whether a context's operations to a peer take effect there in the order they were posted.
    pub fn keep_order(&self) -> bool {
        matches!(&*self.rails, [rail] if rail.keeps_order())
    }

    /// Runs [`comm::agree`] in a call whose number is the same on all ranks, and which `part` gets; returns the number
    /// too.
    ///
    /// # Errors
    /// The error in `part`, or one from [`Ring::allgather`].
    pub fn agree_in_order<T>(
        &self,
        step: Step,
        part: impl FnOnce(u32) -> Result<T, Error>,
        encode: impl FnOnce(u32, &T) -> Vec<u8>,
    ) -> Result<(T, Vec<Vec<u8>>, u32), Error> {
        let mut calls = self.calls.lock();
        let number = calls.next;
        calls.next = number.wrapping_add(1);
        let part = part(number);
        let (part, blocks) = comm::agree(&mut calls.ring(), step, part, |part| encode(number, part))?;
        Ok((part, blocks, number))
    }

    /// Notes that requests to `peer` failed, and returns the rank to blame: a rank that another one has reported, or
    /// else the peer. Ranks that close because of a failure say so before their endpoints are closed, which fails
    /// requests to them.
    pub fn blame(&self, peer: usize) -> usize {
        // The watcher may not have checked since. A collective call in progress notices such a rank itself.
        if let Some(lost) = self.calls.try_lock().and_then(|calls| calls.ring().lost(Instant::now())) {
            let _ = self.lost.set(lost);
        }
        let blamed = self.lost.get().copied().unwrap_or(peer);
        let _ = self.blamed.set(blamed);
        blamed
    }

    /// Returns whether a rank has ended without closing the communicator, and all requests with it.
    pub fn has_lost_rank(&self) -> bool {
        self.isolation.is_none() && self.lost.get().is_some()
    }

    /// Tells the other ranks why this one closes its communicator, if it's because of one of them.
    pub fn leave(&self) {
        if let Some(rank) = self.blamed.get() {
            self.calls.lock().ring().blame(*rank);
        }
    }

    /// Returns a rank that is gone, if operations to the peers `under_way` are outstanding.
    pub fn gone<I: Iterator<Item = usize>>(&self, under_way: impl FnOnce() -> I) -> Option<Gone> {
        // A collective call in progress notices such a rank itself.
        let calls = self.calls.try_lock()?;
        let mut under_way = under_way().peekable();
        under_way.peek()?;
        let (ring, now) = (calls.ring(), Instant::now());
        let closed = |rank: &usize| ring.has_closed(*rank, now);
        self.lost.get().copied().map(Gone::Lost).or_else(|| under_way.find(closed).map(Gone::Closed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_isolate_peers_if_the_provider_tells_a_lost_one() {
        let isolates = |provider: &str, policy: &str| {
            let settings = [("FERROGIN_PROVIDER", provider), ("FERROGIN_ON_PEER_FAILURE", policy)];
            let value = |name: &str| settings.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into());
            isolates(&Config::from_lookup(value).expect("settings"), 0)
        };
        for (provider, can) in [("efa", true), ("softefa", true), ("tcp", true), ("verbs", false)] {
            assert_eq!([isolates(provider, "isolate"), isolates(provider, "abort")], [can, false], "{provider}");
        }
    }
}
