//! The watcher: a host thread that drains all contexts' completion queues and reports failed requests. Between
//! collective calls it also tells the next rank of each communicator that this process runs, so that ranks in a call
//! wait for a late one.
//!
//! Kernels don't poll completion queues. The watcher reads the entries, because a failed request's entry has the
//! reason. Error counters show a failure even if its entry is lost: the watcher reads those with a host address, and
//! kernels and queries the others. A context's first failure logs one WARN line, raises the context's fault flag for
//! good, and ends every wait of the context's kernels through the abort flag. The thread runs as long as the process
//! has a communicator.
#![allow(unsafe_code)]

use crate::endpoint::Role;
use crate::error::Error;
use crate::fault::ErrorCounter;
use crate::isolation::{Isolation, LostRanks, Verdict, judge};
use crate::kernel_words::StopWord;
use crate::log::counted;
use crate::signal_proxy::{Pulse, Served};
use crate::{registry, shortage};
use efa_dp_direct::wire::{CdescCommon, CompStatus, SendOp, TxMetaDesc};
use ferrogin_ffi::ext::{RANK_ID, Target};
use ferrogin_ffi::failure::{CARD_ERROR, Failure, Record};
use ferrogin_rendezvous::ring::{Departure, Ring};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pause after a round that found something.
const PAUSE: Duration = Duration::from_millis(1);
/// Longest pause while nothing is found. A failure ends the waits on its own endpoint at once, and all others within
/// this time.
const PAUSE_IDLE: Duration = Duration::from_millis(50);
/// Time between checks of the other ranks.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The same in a ring that goes on without ranks that go, where each rank passes the news on.
const NEWS_INTERVAL: Duration = Duration::from_millis(10);
/// How long the other ranks have to say that a rank is gone which a failed request may be due to: longer than news take
/// to all ranks.
pub(crate) const SUSPECT_LIMIT: Duration = Duration::from_secs(2);
/// What to do after a context's first failure. NCCL's programs have no handle of the context.
const UNUSABLE: &str = "This context is now unusable: destroy it on all ranks, or with NCCL the communicator";
/// Rounds to wait for a failure's entry after an error counter has changed.
const ENTRY_ROUNDS: u32 = 20;

/// A reader of a completion queue in memory that the card writes.
#[derive(Debug)]
pub struct CqReader {
    buffer: *const u8,
    entry_size: usize,
    mask: u32,
    shift: u32,
    consumed: u32,
}

impl CqReader {
    /// Creates a reader of a fresh ring of `entries` (a power of two) entries of `entry_size` bytes.
    ///
    /// # Safety
    /// The ring stays mapped while the reader exists, and has no completion yet.
    pub unsafe fn new(buffer: *const u8, entry_size: u32, entries: u32) -> Self {
        let mask = entries - 1;
        Self { buffer, entry_size: entry_size as usize, mask, shift: entries.trailing_zeros(), consumed: 0 }
    }

    /// Returns the phase of entry number `n`'s lap; the first lap has phase 1.
    fn expected_phase(&self, n: u32) -> bool {
        (n >> self.shift) & 1 == 0
    }

    fn slot(&self, n: u32) -> *const u8 {
        self.buffer.wrapping_add((n & self.mask) as usize * self.entry_size)
    }

    /// Returns the phase that entry number `n`'s slot has now.
    fn phase_at(&self, n: u32) -> bool {
        let flags_at = self.slot(n).wrapping_add(core::mem::offset_of!(CdescCommon, flags));
        // SAFETY: the mask keeps the address within the ring, which the caller of `new` keeps mapped. The card may be
        // writing the byte, and the access is atomic. The card writes this byte last, so the acquire orders the reads
        // of the entry.
        unsafe { AtomicU8::from_ptr(flags_at.cast_mut()) }.load(Ordering::Acquire) & 1 == 1
    }

    /// Returns what entry number `n`'s slot holds, whatever its phase.
    fn entry(&self, n: u32) -> CdescCommon {
        let mut bytes = [0; CdescCommon::SIZE];
        for (i, byte) in bytes.iter_mut().enumerate() {
            let at = self.slot(n).wrapping_add(i).cast_mut();
            // SAFETY: the mask keeps the address within the ring, which the caller of `new` keeps mapped. The access is
            // atomic, because the card may be writing the next lap's entry; the bytes may then come from two entries.
            *byte = unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed);
        }
        CdescCommon::from_bytes(&bytes)
    }

    /// Returns the head of the next completion, if the card has written it.
    pub fn poll(&mut self) -> Option<CdescCommon> {
        if self.phase_at(self.consumed) != self.expected_phase(self.consumed) {
            // The queue is empty if the previous slot still has the phase that was read there.
            let before = self.consumed.wrapping_sub(1);
            if self.phase_at(before) == self.expected_phase(before) {
                return None;
            }
            self.skip_overwritten();
        }
        let entry = self.entry(self.consumed);
        self.consumed = self.consumed.wrapping_add(1);
        Some(entry)
    }

    /// Skips to the oldest entry in the ring after the card has overwritten unread entries. The card wrote the slots
    /// before that entry in its current lap, and the others in the lap before.
    fn skip_overwritten(&mut self) {
        let newest = self.phase_at(0);
        let oldest = (1..=self.mask).find(|slot| self.phase_at(*slot) != newest).unwrap_or(0);
        let lap = if self.phase_at(oldest) { 2 } else { 1 };
        self.consumed = (lap << self.shift) + oldest;
    }

    /// Finds a failed request among all entries in the ring.
    fn failure(&self) -> Option<CdescCommon> {
        let failed = (0..=self.mask).map(|slot| self.entry(slot)).filter(|entry| entry.status != CompStatus::Ok.raw());
        // After a failure the card flushes requests, so any other status is the cause.
        failed.min_by_key(is_flushed)
    }
}

fn is_flushed(entry: &CdescCommon) -> bool {
    entry.status == CompStatus::Flushed.raw()
}

/// A send ring in host memory, whose requests name their peers.
#[derive(Debug, Clone, Copy)]
pub struct RingView {
    /// First slot.
    pub buffer: *const u8,
    /// Bytes per slot.
    pub entry_size: usize,
    /// Number of slots.
    pub entries: usize,
}

impl RingView {
    fn requests(self) -> impl Iterator<Item = TxMetaDesc> {
        (0..self.entries).map(move |i| self.request(i))
    }

    fn request(self, i: usize) -> TxMetaDesc {
        let slot = self.buffer.wrapping_add(i % self.entries * self.entry_size);
        let mut bytes = [0; TxMetaDesc::SIZE];
        for (i, byte) in bytes.iter_mut().enumerate() {
            let at = slot.wrapping_add(i).cast_mut();
            // SAFETY: the address is within the ring, which the endpoint keeps mapped until its watch ends. The access
            // is atomic, because kernels may be writing the ring. The result is only a hint for a message.
            *byte = unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed);
        }
        TxMetaDesc::from_bytes(&bytes)
    }
}

/// A watched endpoint.
#[derive(Debug)]
pub struct WatchedEndpoint {
    /// Context id and role, for messages.
    pub name: (usize, Role),
    /// The completion queue.
    pub cq: CqReader,
    /// The error counter, if it has a host address.
    pub errors: Option<ErrorCounter>,
    /// Failed completions that the watcher has read.
    pub failures: Arc<AtomicU64>,
    /// The send ring, if it is host memory.
    pub ring: Option<RingView>,
    /// Index into the watch's target tables.
    pub context: usize,
}

/// A failed request: its endpoint, its entry, and when that was read.
type Failed = (usize, CdescCommon, Instant);

/// What the watcher checks for one `createContext`.
pub struct Watch {
    /// The GIN context's handle.
    pub handle: usize,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub nranks: usize,
    /// The endpoints of all contexts.
    pub endpoints: Vec<WatchedEndpoint>,
    /// By context id: targets at `[slot * nranks + peer]`.
    pub targets: Vec<Arc<[Target]>>,
    /// The abort flag, which ends kernels' waits.
    pub stop: Arc<StopWord>,
    /// The state of the report.
    pub report: Report,
    /// The record of a kernel's first failure, until that has been reported.
    pub failure: Option<*mut Record>,
    /// The first lost rank, for the host API's contexts. NCCL watches its ranks itself.
    pub lost: Option<LostRank>,
    /// If a lost rank ends only the requests to it.
    pub isolation: Option<Arc<Isolation>>,
    /// Whether the program can acknowledge lost ranks; NCCL's programs can't.
    pub acknowledges: bool,
    /// Failed requests to ranks that may be lost.
    pub suspects: Vec<Failed>,
    /// With emulated signals: the signal proxy's progress, and the inboxes.
    pub proxy: Option<(Pulse, Vec<Arc<Served>>)>,
    /// What becomes of the report.
    pub output: Output,
}

/// Where a watch's report goes.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// To a WARN line, at once.
    #[default]
    Log,
    /// To the thread that is closing the context: see [`Guard::hold`].
    Closer(Option<String>),
}

/// A rank that has ended without closing its communicator, once there is one.
pub type LostRank = Arc<OnceLock<usize>>;

/// A periodic check of a communicator's ring.
struct RingWatch {
    ring: Arc<Mutex<Ring>>,
    lost: LostRank,
    lost_ranks: Arc<LostRanks>,
    next: Option<Instant>,
}

impl RingWatch {
    /// Looks for ranks that have ended, and tells the next rank that this process runs. A collective call in progress
    /// does both itself.
    fn check_timeouts(&mut self, now: Instant) {
        if self.next.is_some_and(|next| now < next) {
            return;
        }
        self.next = Some(now + CHECK_INTERVAL);
        let Some(mut ring) = self.ring.try_lock() else { return };
        if !ring.goes_on() {
            if let Some(lost) = ring.lost(now) {
                let _ = self.lost.set(lost);
            }
            return;
        }
        self.next = Some(now + NEWS_INTERVAL);
        match ring.departures(self.lost_ranks.all().into_iter(), now) {
            Ok(gone) => {
                for (rank, departure) in gone {
                    if departure == Departure::Lost {
                        let _ = self.lost.set(rank);
                    }
                    self.lost_ranks.add(rank, || gone_text(departure));
                }
            }
            Err(error) => self.lost_ranks.give_up(error.to_string()),
        }
    }
}

fn gone_text(departure: Departure) -> String {
    match departure {
        Departure::Lost => "its process has ended, or does not answer".to_owned(),
        Departure::Closed => "it has closed its communicator".to_owned(),
    }
}

/// How far the report of a context's first failure has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Report {
    /// No failure.
    #[default]
    Clean,
    /// This many rounds ago, an error counter had changed: that of the endpoint with this index, if it's known.
    Counted(u32, Option<usize>),
    /// The WARN line has been written.
    Done,
}

// SAFETY: any thread may use the pointers to rings, counters and the record. The context drops its `Guard`, which ends
// the watch, before it frees them, and every access is atomic.
unsafe impl Send for Watch {}

impl Watch {
    /// Watches no queue yet.
    #[cfg(test)]
    pub(crate) fn of(handle: usize, nranks: usize) -> Self {
        Self {
            handle,
            rank: 0,
            nranks,
            endpoints: Vec::new(),
            targets: Vec::new(),
            stop: StopWord::on_cpu(),
            report: Report::Clean,
            failure: None,
            lost: None,
            isolation: None,
            acknowledges: false,
            suspects: Vec::new(),
            proxy: None,
            output: Output::Log,
        }
    }

    /// Drains every queue, reads every error counter once, and checks the signal proxy and the other ranks. Returns
    /// true if a queue had completions, or if a failure's entry may follow.
    pub(crate) fn round(&mut self, now: Instant) -> bool {
        let mut busy = false;
        let mut failed = std::mem::take(&mut self.suspects);
        for (i, endpoint) in self.endpoints.iter_mut().enumerate() {
            while let Some(entry) = endpoint.cq.poll() {
                busy = true;
                if entry.status != CompStatus::Ok.raw() {
                    endpoint.failures.fetch_add(1, Ordering::Relaxed);
                    failed.push((i, entry, now));
                }
            }
        }
        if let Some(isolation) = self.isolation.clone() {
            failed = self.isolate(&isolation, failed, now);
        }
        // After a failure the card flushes requests, so any other status is the cause.
        if let Some((i, entry, _)) = failed.into_iter().min_by_key(|(_, entry, _)| is_flushed(entry)) {
            self.fail();
            if self.report != Report::Done {
                let text = self.describe(i, entry);
                self.report(format!("{text}. {UNUSABLE}"));
            }
        }
        if let Some(problem) = self.proxy.as_mut().and_then(|(pulse, _)| pulse.problem(now)) {
            self.proxy.take().into_iter().flat_map(|(_, inboxes)| inboxes).for_each(|inbox| inbox.close());
            self.fail();
            if self.report != Report::Done {
                self.report(format!(
                    "the signal proxy (the thread that adds peers' emulated signals) {problem}. Signals are lost, and peers' requests \
                     to this rank fail. Check the CPU load and the lines above. {UNUSABLE}"
                ));
            }
        }
        if let Some(lost) = self.lost.as_ref().and_then(|lost| lost.get().copied()) {
            self.lost = None;
            self.fail();
            if self.report != Report::Done {
                self.report(format!(
                    "rank {lost} ended without closing its communicator, so all waits of this context end. Look for the first error in \
                     the output of rank {lost}"
                ));
            }
        }
        // A query found a changed error counter, or a kernel did.
        let mut is_known = registry::fault_is_known(self.handle as *const c_void, registry::Kind::Context);
        if let Some(failure) = self.failure.and_then(read_failure) {
            self.failure = None;
            is_known |= failure.status == CARD_ERROR;
            crate::warn!("rank {}: the first failure of a kernel in this context: {failure}", self.rank);
        }
        match self.report {
            Report::Clean => {
                let counted = (0..self.endpoints.len()).find(|i| self.has_unread_failure(*i));
                if is_known || counted.is_some() {
                    if self.isolation.is_none() {
                        self.fail();
                    }
                    self.report = Report::Counted(0, counted);
                }
            }
            // The entry has come.
            Report::Counted(_, Some(i)) if !self.has_unread_failure(i) => self.report = Report::Clean,
            Report::Counted(rounds, i) if rounds >= ENTRY_ROUNDS => {
                self.fail();
                // The card may have overwritten whole laps, which the phase does not show, so the search covers whole
                // rings.
                let failure = |i: usize| self.endpoints[i].cq.failure().map(|entry| (i, entry));
                let found = i.map_or_else(|| (0..self.endpoints.len()).find_map(failure), failure);
                let text = found.map(|(i, entry)| format!("{}. {UNUSABLE}", self.describe(i, entry))).unwrap_or_else(|| {
                    let place = i.map(|i| self.endpoints[i].name);
                    let place = place.map(|(context, role)| format!(" on endpoint {role} of context {context}"));
                    format!(
                        "a request{} failed; its completion was overwritten, so the peer and the reason are unknown. Check the peers' \
                         logs and the card (its driver's log). {UNUSABLE}",
                        place.unwrap_or_default()
                    )
                });
                self.report(text);
            }
            Report::Counted(rounds, i) => self.report = Report::Counted(rounds + 1, i),
            Report::Done => {}
        }
        busy || matches!(self.report, Report::Counted(..))
    }

    /// Returns whether the card has counted a failure whose entry hasn't been read.
    fn has_unread_failure(&self, i: usize) -> bool {
        let errors = self.endpoints[i].errors;
        match &self.isolation {
            None => errors.is_some_and(|errors| errors.has_changed()),
            Some(isolation) => {
                let suspects = self.suspects.iter().filter(|(endpoint, ..)| *endpoint == i).count() as u32;
                errors.is_some_and(|errors| errors.count() != isolation.counted(i) + suspects)
            }
        }
    }

    /// Sorts failed requests by their peers, and tells the kernels of lost ranks. Returns the failures that aren't due
    /// to one.
    fn isolate(&mut self, isolation: &Isolation, failed: Vec<Failed>, now: Instant) -> Vec<Failed> {
        let mut failures = Vec::new();
        for (i, entry, at) in failed {
            match judge(entry.status, entry.req_id, self.nranks) {
                Verdict::Lost(rank) => {
                    isolation.lost.add(rank, || self.describe(i, entry));
                    isolation.count(i, rank);
                }
                Verdict::Suspect(rank) if isolation.lost.reason(rank).is_some() => isolation.count(i, rank),
                Verdict::Suspect(_) if now < at + SUSPECT_LIMIT => self.suspects.push((i, entry, at)),
                Verdict::Suspect(_) | Verdict::Failure => failures.push((i, entry, at)),
            }
        }
        for (rank, reason) in isolation.publish() {
            if self.output == Output::Log {
                let then = if self.acknowledges {
                    "waits return FGIN_PEER_LOST until the program calls ferrogin_acknowledge_lost"
                } else {
                    "waits that have to wait return FGIN_PEER_LOST. To go on in a communicator without it, call ncclCommShrink with \
                     NCCL_SHRINK_ABORT"
                };
                crate::warn!("rank {}: rank {rank} is lost: {reason}. Posts to it are refused, and {then}", self.rank);
            }
        }
        if let Some(reason) = isolation.lost.given_up().filter(|_| self.report != Report::Done) {
            self.fail();
            self.report(reason);
        }
        failures
    }

    /// Reports the context's first failure.
    fn report(&mut self, text: String) {
        self.report = Report::Done;
        match &mut self.output {
            Output::Log => crate::warn!("rank {}: {text}", self.rank),
            Output::Closer(kept) => *kept = Some(text),
        }
    }

    /// Runs the last round, so that a failure is reported even if its context is closed right after it.
    fn finish(&mut self) {
        self.round(Instant::now());
        if let Report::Counted(_, i) = self.report {
            self.report = Report::Counted(ENTRY_ROUNDS, i);
            self.round(Instant::now());
        }
    }

    fn report_undelivered(&mut self, undelivered: &[Undelivered]) {
        self.finish();
        let Output::Closer(reason) = std::mem::take(&mut self.output) else { return };
        let requests: u32 = undelivered.iter().map(|of_endpoint| of_endpoint.requests).sum();
        if requests == 0 {
            reason.into_iter().for_each(|reason| crate::warn!("rank {}: {reason}", self.rank));
            return;
        }
        // The latest requests, which may not be the incomplete ones if the card reordered them.
        let latest = undelivered.iter().flat_map(|of_endpoint| {
            let Undelivered { endpoint, posted, requests } = *of_endpoint;
            let ring = self.endpoints[endpoint].ring;
            let numbers = (1..=requests).map(move |back| posted.wrapping_sub(back) as usize);
            ring.into_iter().flat_map(move |ring| numbers.clone().map(move |number| (endpoint, ring.request(number))))
        });
        let ranks: BTreeSet<_> = latest.filter_map(|(endpoint, request)| self.peer(endpoint, &request)).collect();
        let ranks: Vec<_> = ranks.iter().map(ToString::to_string).collect();
        let to = match ranks.len() {
            0 => String::new(),
            1 => format!(" to rank {}", ranks[0]),
            2..=8 => format!(" to ranks {}", ranks.join(", ")),
            n => format!(" to {n} ranks"),
        };
        let reason = reason.unwrap_or_else(|| {
            "no request has completed for 10 s; check that the peers run, their logs, and that the network and its \
             security group let the hosts talk"
                .to_owned()
        });
        crate::warn!(
            "rank {}: the context was closed before {}{to} had been delivered: {reason}",
            self.rank,
            counted(requests as usize, "request")
        );
    }

    fn fail(&self) {
        registry::raise_fault(self.handle as *const c_void, registry::Kind::Context);
        self.stop.raise();
    }

    /// Returns the report of a failed request.
    fn describe(&self, i: usize, entry: CdescCommon) -> String {
        let (context, role) = self.endpoints[i].name;
        let status = CompStatus::from_raw(entry.status);
        let reason = status.map_or("a status that this version does not know", CompStatus::text);
        let operation = match SendOp::from_raw(entry.flags.op_type()) {
            Some(SendOp::RdmaWrite) => "a write to",
            Some(SendOp::RdmaRead) => "a read from",
            _ => "a request to",
        };
        // A software card that lacks the resources for a connection completes the request as if the peer were dead.
        let is_software = self.endpoints[i].ring.is_some();
        let shortage = (is_software && is_unreachable(status)).then(shortage::of_software_card).flatten();
        format!(
            "{operation} {} on endpoint {role} of context {context} failed: {reason} (status {}); {}",
            self.peers(i, entry.req_id),
            entry.status,
            shortage.map_or(advice(status).to_owned(), |shortage| shortage.to_string()),
        )
    }

    /// Returns the rank that a request in endpoint `i`'s ring is for.
    fn peer(&self, i: usize, request: &TxMetaDesc) -> Option<usize> {
        let matches =
            |target: &Target| target.ah == request.ah && target.qpn == request.dest_qp_num && target.qkey != 0;
        let index = self.targets[self.endpoints[i].context].iter().position(matches);
        index.filter(|_| request.qkey != 0).map(|index| index % self.nranks)
    }

    /// Names the peer of request `id`, for messages. ferrogin's device code uses the peer's rank as the ID. NCCL's uses
    /// the thread's number, so the requests in a readable ring take precedence, and without one the message says that
    /// the rank is a guess.
    fn peers(&self, i: usize, id: u16) -> String {
        let endpoint = &self.endpoints[i];
        let requests = endpoint.ring.into_iter().flat_map(RingView::requests).filter(|request| request.req_id == id);
        let found: BTreeSet<_> = requests.filter_map(|request| self.peer(i, &request)).collect();
        // In a context that isolates peers, ferrogin's ids have a mark.
        let id = if self.isolation.is_some() { id & !RANK_ID } else { id };
        let ranks: Vec<_> = found.iter().map(ToString::to_string).collect();
        match ranks.len() {
            0 if usize::from(id) < self.nranks && endpoint.ring.is_some() => format!("rank {id}"),
            0 if usize::from(id) < self.nranks => {
                format!("rank {id} (an unknown rank if NCCL's own device code posted it)")
            }
            0 => "an unknown rank".to_owned(),
            1..4 => format!("rank {}", ranks.join(" or ")),
            n => format!("one of {n} ranks"),
        }
    }
}

/// Reads the record that a kernel writes when an operation fails.
fn read_failure(at: *mut Record) -> Option<Failure> {
    let read = |offset: usize, order| {
        let word = at.wrapping_byte_add(offset).cast();
        // SAFETY: the record is 8-byte aligned, and the context frees it after the watch. Kernels access it atomically
        // too.
        unsafe { AtomicU64::from_ptr(word) }.load(order)
    };
    // Acquire: the kernel writes this word last.
    let head = read(offset_of!(Record, head), Ordering::Acquire);
    Failure::from_record(Record {
        head,
        found: read(offset_of!(Record, found), Ordering::Relaxed),
        least: read(offset_of!(Record, least), Ordering::Relaxed),
        limit_ns: read(offset_of!(Record, limit_ns), Ordering::Relaxed),
    })
}

/// Requests of a closing context that the card hasn't completed.
#[derive(Debug, Clone, Copy)]
pub struct Undelivered {
    /// Index of their endpoint.
    pub endpoint: usize,
    /// The number of requests that have been posted there.
    pub posted: u32,
    /// How many of them are incomplete.
    pub requests: u32,
}

/// Returns whether the peer didn't answer.
fn is_unreachable(status: Option<CompStatus>) -> bool {
    matches!(status, Some(CompStatus::LocalUnresponsiveRemote | CompStatus::LocalUnreachableRemote))
}

/// Returns the first thing to check.
fn advice(status: Option<CompStatus>) -> &'static str {
    use CompStatus::*;
    match status {
        Some(LocalInvalidLkey | LocalBadLength) => {
            "check that the source window is still registered and covers the bytes"
        }
        Some(RemoteBadAddress | RemoteBadLength) => {
            "check that the window is still registered on the peer and covers the target bytes"
        }
        Some(RemoteBadDestQpn | RemoteAbort | RemoteUnknownPeer | RemoteBadStatus) => {
            "check in the peer's log that it still runs and has its context"
        }
        Some(LocalUnresponsiveRemote | LocalUnreachableRemote) => {
            "check that the peer runs, its log, and that the network and its security group let the hosts talk"
        }
        Some(LocalInvalidAh) => "check that the peer number is below the number of ranks",
        _ => "check the card (its driver's log) and the peer's log",
    }
}

#[derive(Default)]
struct Table {
    watches: BTreeMap<u64, Watch>,
    rings: BTreeMap<u64, RingWatch>,
    next: u64,
    thread: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

static TABLE: Mutex<Table> =
    Mutex::new(Table { watches: BTreeMap::new(), rings: BTreeMap::new(), next: 0, thread: None });
static WAKE: Condvar = Condvar::new();

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock()
}

/// Ends a watch when dropped: after that, the watcher no longer accesses its endpoints or ring.
#[derive(Debug)]
pub struct Guard(u64);

/// Starts a watch.
///
/// # Errors
/// The thread doesn't start.
pub fn watch(watch: Watch) -> Result<Guard, Error> {
    add(|table, id| drop(table.watches.insert(id, watch)))
}

/// Starts checking a communicator's ring, between its collective calls, and reports a lost rank in `lost` and, if the
/// ring goes on, all that have gone in `lost_ranks`. The caller drops the guard before the ring.
///
/// # Errors
/// The thread doesn't start.
pub fn watch_ring(ring: Arc<Mutex<Ring>>, lost: LostRank, lost_ranks: Arc<LostRanks>) -> Result<Guard, Error> {
    add(|table, id| drop(table.rings.insert(id, RingWatch { ring, lost, lost_ranks, next: None })))
}

fn add(insert: impl FnOnce(&mut Table, u64)) -> Result<Guard, Error> {
    let mut table = table();
    if table.thread.is_none() {
        let stop = Arc::new(AtomicBool::new(false));
        let stop_flag = stop.clone();
        let thread = std::thread::Builder::new().name("ferrogin-watch".to_owned()).spawn(move || run(&stop_flag));
        let thread = thread.map_err(|source| Error::System { call: "starting the watcher's thread", source })?;
        table.thread = Some((stop, thread));
    }
    let id = table.next;
    table.next += 1;
    insert(&mut table, id);
    // Here and not earlier: the functions run in reverse order, and the driver, whose own function frees the memory, is
    // in use by now. SAFETY: the function takes no arguments, and the library stays loaded (build.rs), so the function
    // does too.
    static AT_EXIT: LazyLock<c_int> = LazyLock::new(|| unsafe { libc::atexit(finish_at_exit) });
    let _ = *AT_EXIT;
    Ok(Guard(id))
}

/// Reports the failures of contexts that are still open when the process exits.
extern "C" fn finish_at_exit() {
    // A forked child inherits the table, and perhaps its lock.
    if registry::forked_from().is_none() {
        table().watches.values_mut().for_each(Watch::finish);
    }
}

impl Guard {
    /// Keeps the report of a later failure for [`report_undelivered`](Self::report_undelivered), because the
    /// context is closing.
    pub fn hold(&self) {
        if let Some(watch) = table().watches.get_mut(&self.0) {
            watch.output = Output::Closer(None);
        }
    }

    /// Ends [`hold`](Self::hold): reports a failure since then and what the context leaves undelivered, in one line.
    pub fn report_undelivered(&self, undelivered: &[Undelivered]) {
        if let Some(watch) = table().watches.get_mut(&self.0) {
            watch.report_undelivered(undelivered);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut table = table();
        if let Some(mut watch) = table.watches.remove(&self.0) {
            watch.finish();
        }
        table.rings.remove(&self.0);
        if !table.watches.is_empty() || !table.rings.is_empty() {
            return;
        }
        let Some((stop, thread)) = table.thread.take() else { return };
        drop(table);
        stop.store(true, Ordering::Release);
        WAKE.notify_all();
        // NCCL may unload this library next, so the thread must have ended.
        let _ = thread.join();
    }
}

fn run(stop: &AtomicBool) {
    let mut pause = PAUSE;
    let mut table = table();
    while !stop.load(Ordering::Acquire) {
        let mut busy = false;
        for ring in table.rings.values_mut() {
            ring.check_timeouts(Instant::now());
        }
        for watch in table.watches.values_mut() {
            busy |= watch.round(Instant::now());
        }
        let longest =
            if table.watches.values().any(|watch| watch.isolation.is_some()) { NEWS_INTERVAL } else { PAUSE_IDLE };
        pause = if busy { PAUSE } else { (pause + PAUSE).min(longest) };
        WAKE.wait_for(&mut table, pause);
    }
}

#[cfg(test)]
mod tests;
