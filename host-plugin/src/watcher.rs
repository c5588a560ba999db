//! The host's eye on queues that kernels drive.
//!
//! Kernels poll no completion queue, so one thread of the process drains them all: entries would pile up otherwise, and
//! the entry of a failed request says what went wrong. Error counters tell of failures even if an entry is lost. The
//! first failure of a context is reported in one WARN line, raises its fault flag for good, and ends every wait of its
//! kernels through the abort flag. The thread runs while there is a context.
#![allow(unsafe_code)]

use crate::endpoint::Role;
use crate::fault::ErrorCounter;
use crate::registry;
use efa_dp_direct::wire::{CdescCommon, CompStatus, SendOp, TxMetaDesc};
use ferrogin_ffi::ext::Target;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Pause between two rounds when there was something to drain.
const PAUSE: Duration = Duration::from_millis(1);
/// Longest pause, when nothing happens.
const PAUSE_IDLE: Duration = Duration::from_millis(8);
/// Rounds that wait for the entry of a failure that a counter has told of.
const PATIENCE: u32 = 20;

/// A completion queue in memory that the card writes.
#[derive(Debug)]
pub struct CqReader {
    buffer: *const u8,
    entry_size: usize,
    mask: u32,
    shift: u32,
    consumed: u32,
}

impl CqReader {
    /// A reader of a fresh ring of `entries` (a power of two) of `entry_size` bytes.
    ///
    /// # Safety
    /// The ring stays mapped as long as the reader reads, and holds no completion yet.
    pub unsafe fn new(buffer: *const u8, entry_size: u32, entries: u32) -> Self {
        let mask = entries - 1;
        Self { buffer, entry_size: entry_size as usize, mask, shift: entries.trailing_zeros(), consumed: 0 }
    }

    /// Phase of entries in the lap of the `n`th entry; the first lap has phase 1.
    fn phase_of(&self, n: u32) -> bool {
        (n >> self.shift) & 1 == 0
    }

    fn slot(&self, n: u32) -> *const u8 {
        self.buffer.wrapping_add((n & self.mask) as usize * self.entry_size)
    }

    /// The phase that is in the slot of the `n`th entry now.
    fn phase_at(&self, n: u32) -> bool {
        let flags_at = self.slot(n).wrapping_add(core::mem::offset_of!(CdescCommon, flags));
        // SAFETY: within the ring, by the mask. The card writes it meanwhile, last of an entry: an atomic read of one byte.
        unsafe { AtomicU8::from_ptr(flags_at.cast_mut()) }.load(Ordering::Acquire) & 1 == 1
    }

    /// What is in the slot of the `n`th entry now. The caller has seen its phase.
    fn entry(&self, n: u32) -> CdescCommon {
        let mut bytes = [0; CdescCommon::SIZE];
        for (i, byte) in bytes.iter_mut().enumerate() {
            let at = self.slot(n).wrapping_add(i).cast_mut();
            // SAFETY: the first bytes of an entry within the ring. A card that goes round meanwhile makes them a mixture of
            // two entries, both of them its own.
            *byte = unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed);
        }
        CdescCommon::from_bytes(&bytes)
    }

    /// The head of the next completion, if the card has written one.
    pub fn poll(&mut self) -> Option<CdescCommon> {
        if self.phase_at(self.consumed) != self.phase_of(self.consumed) {
            // Empty, if the slot before is as it was read.
            let before = self.consumed.wrapping_sub(1);
            if self.phase_at(before) == self.phase_of(before) {
                return None;
            }
            self.catch_up();
        }
        let entry = self.entry(self.consumed);
        self.consumed = self.consumed.wrapping_add(1);
        Some(entry)
    }

    /// The card has gone round the ring since the last look: goes on with the oldest entry that is left. The card wrote
    /// the slots before it in the lap that it is in, and those from it on in the lap before.
    fn catch_up(&mut self) {
        let newest = self.phase_at(0);
        let oldest = (1..=self.mask).find(|slot| self.phase_at(*slot) != newest).unwrap_or(0);
        let lap = if self.phase_at(oldest) { 2 } else { 1 };
        self.consumed = (lap << self.shift) + oldest;
    }

    /// A failed request among all entries that the ring still holds.
    fn failure(&self) -> Option<CdescCommon> {
        let failed = (0..=self.mask).map(|slot| self.entry(slot)).filter(|entry| entry.status != CompStatus::Ok.raw());
        // Flushed requests are what follows a failure, or a queue pair's end.
        failed.min_by_key(|entry| entry.status == CompStatus::Flushed.raw())
    }
}

/// A send ring that the host can read back: which peers have requests with a given id in it.
#[derive(Debug, Clone, Copy)]
pub struct RingView {
    /// First slot.
    pub buffer: *const u8,
    /// Bytes of a slot.
    pub entry_size: usize,
    /// Slots.
    pub entries: usize,
}

impl RingView {
    fn requests(self) -> impl Iterator<Item = TxMetaDesc> {
        (0..self.entries).map(move |i| {
            let slot = self.buffer.wrapping_add(i * self.entry_size);
            let mut bytes = [0; TxMetaDesc::SIZE];
            for (i, byte) in bytes.iter_mut().enumerate() {
                let at = slot.wrapping_add(i).cast_mut();
                // SAFETY: within the ring, which is mapped while its endpoint is watched. Kernels may write it
                // meanwhile; whatever is read only makes a guess better.
                *byte = unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed);
            }
            TxMetaDesc::from_bytes(&bytes)
        })
    }
}

/// An endpoint under watch.
#[derive(Debug)]
pub struct WatchedEndpoint {
    /// Context id and role, for messages.
    pub name: (usize, Role),
    /// Its completion queue.
    pub cq: CqReader,
    /// The card's count of errors.
    pub errors: ErrorCounter,
    /// Its send ring, if the host can read it.
    pub ring: Option<RingView>,
    /// Index into the watch's target tables.
    pub context: usize,
}

/// A context's endpoints under watch.
#[derive(Debug)]
pub struct Watch {
    /// The GIN context's handle.
    pub handle: usize,
    /// This rank.
    pub rank: usize,
    /// Ranks.
    pub nranks: usize,
    /// All endpoints of all its contexts.
    pub endpoints: Vec<WatchedEndpoint>,
    /// By context: `[slot * nranks + peer]`.
    pub targets: Vec<Vec<Target>>,
    /// Word that ends the waits of kernels.
    pub abort: *mut u32,
    /// Progress of the report.
    pub report: Report,
}

/// How far the report of a context's first failure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Report {
    /// No failure.
    #[default]
    Clean,
    /// A counter told of one, this many rounds ago, on that endpoint.
    Counted(u32, usize),
    /// The line was written.
    Done,
}

// SAFETY: the pointers lead to rings, counters and a flag that outlive the watch (`Guard` ends it before they go), and
// are read with atomic or volatile accesses under the table's lock.
unsafe impl Send for Watch {}

impl Watch {
    /// One round: drains every queue, looks at every counter. True if anything was there.
    fn round(&mut self) -> bool {
        let mut busy = false;
        let mut failure = None;
        for (i, endpoint) in self.endpoints.iter_mut().enumerate() {
            while let Some(entry) = endpoint.cq.poll() {
                busy = true;
                // Flushed requests are what follows a failure, or a queue pair's end.
                if entry.status != CompStatus::Ok.raw() {
                    let better = failure.is_none_or(|(_, first): (usize, CdescCommon)| {
                        first.status == CompStatus::Flushed.raw() && entry.status != first.status
                    });
                    if better {
                        failure = Some((i, entry));
                    }
                }
            }
        }
        if let Some((i, entry)) = failure {
            self.fail();
            if self.report != Report::Done {
                self.report = Report::Done;
                let text = self.describe(i, entry);
                crate::warn!("{text}");
            }
        }
        match self.report {
            Report::Clean => {
                if let Some(i) = self.endpoints.iter().position(|endpoint| endpoint.errors.has_ticked()) {
                    self.fail();
                    self.report = Report::Counted(0, i);
                }
            }
            Report::Counted(rounds, i) if rounds >= PATIENCE => {
                self.report = Report::Done;
                let (context, role) = self.endpoints[i].name;
                // The card may have gone round the ring by whole laps, which the phase does not show.
                let text = match self.endpoints[i].cq.failure() {
                    Some(entry) => self.describe(i, entry),
                    None => format!(
                        "rank {}: a request on endpoint {role} of context {context} failed; its completion was lost, so \
                         neither the peer nor the reason is known. The communicator cannot be used any more",
                        self.rank
                    ),
                };
                crate::warn!("{text}");
            }
            Report::Counted(rounds, i) => self.report = Report::Counted(rounds + 1, i),
            Report::Done => {}
        }
        busy
    }

    fn fail(&self) {
        registry::raise_fault(self.handle as *const c_void);
        // SAFETY: the context's flag, 4-byte aligned, alive while it is watched; all accesses to it are atomic.
        unsafe { AtomicU32::from_ptr(self.abort) }.store(1, Ordering::Release);
    }

    /// The WARN line of a failed request.
    fn describe(&self, i: usize, entry: CdescCommon) -> String {
        let (context, role) = self.endpoints[i].name;
        let status = CompStatus::from_raw(entry.status);
        let reason = status.map_or("a status that this version does not know", CompStatus::text);
        let what = match SendOp::from_raw(entry.flags.op_type()) {
            Some(SendOp::RdmaWrite) => "a write to",
            Some(SendOp::RdmaRead) => "a read from",
            _ => "a request to",
        };
        format!(
            "rank {}: {what} {} on endpoint {role} of context {context} failed: {reason} (status {}); {}. The \
             communicator cannot be used any more",
            self.rank,
            self.peers(i, entry.req_id),
            entry.status,
            advice(status),
        )
    }

    /// The peer of request `id`: ferrogin's device code makes the rank its id. Other device code does not, so a ring
    /// that can be read is asked first.
    fn peers(&self, i: usize, id: u16) -> String {
        let endpoint = &self.endpoints[i];
        let targets = &self.targets[endpoint.context];
        let mut found = BTreeSet::new();
        for request in endpoint.ring.into_iter().flat_map(RingView::requests) {
            let place =
                |target: &Target| target.ah == request.ah && target.qpn == request.dest_qp_num && target.qkey != 0;
            if request.req_id == id
                && request.qkey != 0
                && let Some(index) = targets.iter().position(place)
            {
                found.insert(index % self.nranks);
            }
        }
        let ranks: Vec<_> = found.iter().map(ToString::to_string).collect();
        match ranks.len() {
            0 if usize::from(id) < self.nranks => format!("rank {id}"),
            0 => "a rank that is not known".to_owned(),
            1..4 => format!("rank {}", ranks.join(" or ")),
            n => format!("one of {n} ranks"),
        }
    }
}

/// What to check first.
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
            "check that the peer still has its context (it may have ended: see its log)"
        }
        Some(LocalUnresponsiveRemote | LocalUnreachableRemote) => {
            "check that the peer runs, and that the network and its security group let the hosts talk"
        }
        Some(LocalInvalidAh) => "check that the peer number is below the number of ranks",
        _ => "check the card (its driver's log) and the peer's log",
    }
}

#[derive(Default)]
struct Table {
    watches: BTreeMap<u64, Watch>,
    next: u64,
    thread: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

static TABLE: Mutex<Table> = Mutex::new(Table { watches: BTreeMap::new(), next: 0, thread: None });
static WAKE: Condvar = Condvar::new();

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends a watch when dropped: after that, nothing of its endpoints is touched.
#[derive(Debug)]
pub struct Guard(u64);

/// Watches a context from now on.
///
/// # Errors
/// No thread can be started.
pub fn watch(watch: Watch) -> std::io::Result<Guard> {
    let mut table = table();
    if table.thread.is_none() {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let thread = std::thread::Builder::new().name("ferrogin-watch".to_owned()).spawn(move || run(&seen))?;
        table.thread = Some((stop, thread));
    }
    let id = table.next;
    table.next += 1;
    table.watches.insert(id, watch);
    Ok(Guard(id))
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut table = table();
        table.watches.remove(&self.0);
        if !table.watches.is_empty() {
            return;
        }
        let Some((stop, thread)) = table.thread.take() else { return };
        drop(table);
        stop.store(true, Ordering::Release);
        WAKE.notify_all();
        // The last user may unload this library next: the thread must be gone.
        let _ = thread.join();
    }
}

fn run(stop: &AtomicBool) {
    let mut pause = PAUSE;
    let mut table = table();
    while !stop.load(Ordering::Acquire) {
        let mut busy = false;
        for watch in table.watches.values_mut() {
            busy |= watch.round();
        }
        pause = if busy { PAUSE } else { (pause + PAUSE).min(PAUSE_IDLE) };
        table = WAKE.wait_timeout(table, pause).unwrap_or_else(PoisonError::into_inner).0;
    }
}

#[cfg(test)]
mod tests;
