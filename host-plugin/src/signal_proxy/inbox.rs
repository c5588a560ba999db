//! A context's inbox: a receive-only queue pair that peers send all requests with a signal to.
//!
//! Each signal takes one posted receive and produces one completion. The signal proxy reads the completion queue's
//! entries itself, because some libfabric releases return only 16 of the 32 bits of immediate data.
#![allow(unsafe_code)]

use super::windows::{Windows, Word, add_all};
use crate::address::EndpointAddress;
use crate::cards::CardQuery;
use crate::device::{Adds, Device, DeviceBuffer};
use crate::error::Error;
use crate::metrics::source::Counts;
use crate::rail::{QueueOptions, Rail};
use efa_dp_direct::cq::{self, Cqe, RecvCqe, Status};
use efa_dp_direct::queue::{CqAttrs, CqV0, WqV0};
use efa_dp_direct::rq;
use efa_dp_direct::wire::{CompStatus, RxDesc};
use efa_dp_direct::wqe::RequestIds;
use ferrogin_ffi::signals::{Generation, Message, Receiver, Receives, Refusal, Region, Signal, Target};
use ferrogin_libfabric::bindings::fi_cq_format;
use ferrogin_libfabric::{CompletionQueue, Endpoint as QueuePair, Info, MemoryRegion, WqMemory, bindings};
use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// Receives of an inbox: the number of signals that all peers together can have in flight without a retry.
pub const DEPTH: usize = 4096;
/// Entries in an inbox's send queue, which nothing is posted on.
const SENDS: usize = 16;
/// Receives posted at a time while signals keep coming.
const REFILL: u32 = 64;
/// Signals per round, which limits how long other contexts wait for their turn.
pub const BATCH: usize = 512;
/// Shortest time between two WARN lines for an inbox.
const WARN_PAUSE: Duration = Duration::from_secs(10);

/// An inbox's memory.
pub struct InboxMemory {
    /// The receive buffers' registration with the card, and its key. Dropped before the allocation.
    pub region: (Arc<MemoryRegion>, u32),
    /// The allocation, with the receive buffers of several inboxes.
    pub buffer: Arc<dyn DeviceBuffer>,
    /// Offset of this inbox's receive buffers in it.
    pub receives: usize,
    /// The indexed words.
    pub words: Words,
}

/// The words of a context's indexed signals.
pub struct Words {
    /// Address of the first one, as for a [`Word`].
    pub first: u64,
    /// How to add to them.
    pub adds: Adds,
    /// Keeps the memory.
    pub _memory: Arc<dyn Any + Send + Sync>,
}

/// An open inbox.
pub struct Inbox {
    /// Rank and context, for messages.
    name: (usize, usize),
    receiver: Receiver,
    rail: u32,
    windows: Arc<Windows>,
    device: Arc<dyn Device>,
    /// The receive ring, in the device code's terms.
    rq: WqV0,
    /// The completion ring, likewise.
    ring: CqV0,
    receives: Receives,
    /// Numbers of the receives that aren't posted.
    free: Vec<u16>,
    posted: Vec<bool>,
    adds: Vec<(Word, u64)>,
    counts: Arc<Counts>,
    refusals: Refusals,
    // The queue pair drops before its completion queue, and both before the receives' memory.
    qp: QueuePair,
    cq: Arc<CompletionQueue>,
    memory: InboxMemory,
}

// SAFETY: the raw pointers point to the rings, which the queue pair and the completion queue keep mapped, and no other
// object has them.
unsafe impl Send for Inbox {}

/// The status of a receive that was too short for a peer's message.
const TOO_LONG: Status = Status::Known(CompStatus::LocalBadLength);

/// Why an entry adds nothing.
enum Reason {
    Refusal(Refusal),
    Status(Status),
    Entry,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refusal(refusal) => refusal.fmt(f),
            Self::Status(TOO_LONG) => write!(f, "a message of more than {} bytes", Message::BYTES),
            Self::Status(Status::Known(status)) => write!(f, "a receive that failed: {}", status.text()),
            Self::Status(Status::Unknown(status)) => write!(f, "a receive that failed with status {status}"),
            Self::Entry => f.write_str("a completion of a receive that was not posted"),
        }
    }
}

/// Refused signals without a WARN line of their own.
#[derive(Debug, Default)]
struct Refusals {
    /// Since the last line.
    unreported: u64,
    last_line: Option<Instant>,
}

impl Refusals {
    /// Adds one. If a WARN line is due now, returns the number of other refusals since the last line.
    fn add(&mut self, now: Instant) -> Option<u64> {
        if self.last_line.is_some_and(|last| now.duration_since(last) < WARN_PAUSE) {
            self.unreported += 1;
            return None;
        }
        self.last_line = Some(now);
        Some(std::mem::take(&mut self.unreported))
    }
}

/// The card that an inbox's signals come through.
#[derive(Clone, Copy)]
pub struct SignalCard<'a> {
    /// The rail.
    pub rail: &'a Rail,
    /// libfabric's name of the provider.
    pub provider: &'a str,
    /// What [`Inbox::info`] returned for the rail.
    pub info: &'a Info,
}

impl Inbox {
    /// Returns the info to open an inbox on a rail with.
    ///
    /// # Errors
    /// The card or libfabric lacks what emulated signals need.
    pub fn info(query: &CardQuery, rail: &Rail) -> Result<Info, Error> {
        let card = rail.name();
        check_inline(&card, rail.info.inject_size())?;
        let options = QueueOptions { depth: SENDS, wide: false, tclass: 0, receives: DEPTH };
        let info = rail.endpoint_info(query, options);
        let info = info.map_err(Error::fabric(format!("asking card {card} for a signal queue pair")))?;
        if (info.mode() | info.rx_mode()) & bindings::FI_RX_CQ_DATA == 0 {
            return Err(Error::Usage(format!(
                "FERROGIN_SIGNALS=emulated: libfabric {} does not let writes with immediate data take receives on card {card} \
                 (FI_RX_CQ_DATA): name a newer libfabric in FERROGIN_LIBFABRIC, or set FERROGIN_SIGNALS=card",
                query.lib.version()
            )));
        }
        Ok(info)
    }

    /// Opens the card's queue pair for signals to context `context` of rank `rank`, which lets writes with immediate
    /// data take receives, and posts all receives.
    ///
    /// # Errors
    /// A libfabric call fails, or the card's rings have an invalid size.
    pub fn open(
        card: SignalCard<'_>,
        device: &Arc<dyn Device>,
        windows: &Arc<Windows>,
        rank: usize,
        context: usize,
        receiver: Receiver,
        memory: InboxMemory,
    ) -> Result<Self, Error> {
        let SignalCard { rail, provider, info } = card;
        let failed = |what: &str| Error::fabric(format!("{what} for signals on card {}", rail.name()));
        let size = DEPTH.max(info.tx_size());
        let cq = CompletionQueue::open_to_wait(&rail.domain, provider, size, fi_cq_format::FI_CQ_FORMAT_DATA);
        let cq = cq.map_err(failed("opening the completion queue"))?;
        let mut qp = QueuePair::open(&rail.domain, info).map_err(failed("opening the queue pair"))?;
        qp.bind_av(&rail.av).map_err(failed("binding the address vector"))?;
        let both = bindings::FI_TRANSMIT | bindings::FI_RECV;
        qp.bind_cq(&cq, both).map_err(failed("binding the completion queue"))?;
        qp.enable().map_err(failed("enabling the queue pair"))?;
        let (_, rq) = rail.gda.query_qp(&qp).map_err(failed("querying the queue pair"))?;
        let entries = rail.gda.query_cq(&cq).map_err(failed("querying the completion queue"))?;
        let ring = CqV0::new(&CqAttrs {
            comp_mask: 0,
            flags: 0,
            buffer: entries.buffer,
            num_entries: entries.num_entries,
            entry_size: entries.entry_size,
        });
        let depth = DEPTH.min(rq.num_entries as usize).min(entries.num_entries as usize);
        let ring = ring.ok().filter(|_| rq.num_entries.is_power_of_two()).ok_or_else(|| {
            Error::Usage(format!("card {} has rings whose sizes are not powers of two: please report it", rail.name()))
        })?;
        let mut inbox = Self {
            name: (rank, context),
            receiver,
            rail: rail.index,
            windows: windows.clone(),
            device: device.clone(),
            rq: work_queue(&rq),
            ring,
            receives: Receives::new(depth as u32, REFILL),
            free: (0..depth as u16).rev().collect(),
            posted: vec![false; depth],
            adds: Vec::with_capacity(BATCH),
            counts: Arc::default(),
            refusals: Refusals::default(),
            memory,
            qp,
            cq,
        };
        inbox.refill(true);
        Ok(inbox)
    }

    /// Returns the address for the peers' requests.
    ///
    /// # Errors
    /// The libfabric call fails, or the address is not an EFA address.
    pub fn address(&self) -> Result<EndpointAddress, Error> {
        EndpointAddress::of(&self.qp, &"of signals")
    }

    /// Returns this context's number, for the peers.
    pub fn generation(&self) -> Generation {
        self.receiver.generation
    }

    /// Returns the inbox's counts.
    pub fn counts(&self) -> Arc<Counts> {
        self.counts.clone()
    }

    /// Returns the descriptor that becomes readable at the next completion after [`arm`](Self::arm), if the card's
    /// provider has one.
    pub fn wait_fd(&self) -> Option<RawFd> {
        self.cq.wait_fd()
    }

    /// Asks for an event at the next completion. The caller must run a round before it sleeps.
    pub fn arm(&self) {
        if self.cq.wait_fd().is_some() {
            // libfabric's own view of the queue doesn't matter, as it reads no entries for this library.
            let _ = self.cq.may_wait();
        }
    }

    /// Reads the completions, adds their signals, and reposts receives. Returns the number of completions.
    ///
    /// # Errors
    /// The GPU's driver or the queue pair fails; signals are lost.
    pub fn round(&mut self) -> Result<usize, Error> {
        // SAFETY: the completion queue keeps the ring mapped, and this object alone reads it.
        if unsafe { cq::poll(&self.ring, self.receives.posted().saturating_sub(1)) }.is_some() {
            self.counts.exhausted.fetch_add(1, Ordering::Relaxed);
        }
        let mut taken = 0;
        while taken < BATCH
            && let Some(entry) = self.next()
        {
            taken += 1;
            // The window may be removed meanwhile, so look it up only once. Its memory stays until the end of the
            // round.
            let adds = Cell::new(Adds::Cpu);
            let region = |rkey| {
                let window = self.windows.find(self.rail, rkey)?;
                adds.set(window.adds);
                Some(window.region)
            };
            match entry.and_then(|entry| self.signal(&entry, region)) {
                Ok(Signal { target, add }) => {
                    let word = match target {
                        Target::Indexed(at) => {
                            let Words { first, adds, .. } = self.memory.words;
                            Word { address: first + 8 * u64::from(at), adds }
                        }
                        Target::Va { address, .. } => Word { address, adds: adds.get() },
                    };
                    self.adds.push((word, add));
                }
                Err(Reason::Status(status)) if status != TOO_LONG => {
                    let (rank, context) = self.name;
                    return Err(Error::Usage(format!(
                        "the queue pair for signals of context {context} of rank {rank} failed: {}",
                        Reason::Status(status)
                    )));
                }
                Err(reason) => self.refuse(&reason),
            }
            self.refill(false);
        }
        self.refill(taken < BATCH);
        if !self.adds.is_empty() {
            // SAFETY: the receiver checked each word's alignment and bounds. The context keeps the indexed words, and
            // the windows keep the others until the end of the round.
            unsafe { add_all(&*self.device, &self.adds) }?;
            self.counts.added.fetch_add(self.adds.len() as u64, Ordering::Relaxed);
            self.adds.clear();
        }
        Ok(taken)
    }

    /// Returns the next completion, if there is one.
    fn next(&mut self) -> Option<Result<RecvCqe, Reason>> {
        // SAFETY: the completion queue keeps the ring mapped, and this object alone reads it.
        let slot = unsafe { cq::poll(&self.ring, 0) }?;
        // SAFETY: the completion queue keeps the ring mapped, and `poll` returned the slot.
        let entry = unsafe { cq::read(&self.ring, slot) };
        // SAFETY: this object alone reads the ring, and it has the entry that `poll` found.
        unsafe { cq::pop(&mut self.ring, 1) };
        let Ok(Cqe::Recv(entry)) = Cqe::parse(&entry, RequestIds::Bits16) else { return Some(Err(Reason::Entry)) };
        match self.posted.get_mut(usize::from(entry.req_id)) {
            Some(posted) if *posted && !entry.unsolicited && self.receives.take() => *posted = false,
            _ => return Some(Err(Reason::Entry)),
        }
        self.free.push(entry.req_id);
        Some(if entry.status.is_ok() { Ok(entry) } else { Err(Reason::Status(entry.status)) })
    }
    /// Returns a completion's signal.
    fn signal(&self, entry: &RecvCqe, window: impl Fn(u32) -> Option<Region>) -> Result<Signal, Reason> {
        let signal = match entry.imm {
            Some(bits) => self.receiver.immediate(bits),
            None => {
                let mut bytes = [0; Message::BYTES];
                let len = (entry.length as usize).min(bytes.len());
                let at = self.host(self.offset(entry.req_id));
                for (i, byte) in bytes[..len].iter_mut().enumerate() {
                    let at = at.wrapping_add(i);
                    // SAFETY: the buffer of receive `req_id` is in `self.memory`, which this object keeps. A card that
                    // breaks the rules may be writing it now, and the access is atomic.
                    *byte = unsafe { AtomicU8::from_ptr(at) }.load(Ordering::Relaxed);
                }
                self.receiver.message(&bytes[..len], window)
            }
        };
        signal.map_err(Reason::Refusal)
    }

    /// Returns the offset of a receive's buffer.
    fn offset(&self, receive: u16) -> usize {
        self.memory.receives + usize::from(receive) * Message::BYTES
    }

    /// Returns the host address of an offset in the memory.
    fn host(&self, offset: usize) -> *mut u8 {
        self.memory.buffer.host_address().map_or(std::ptr::null_mut(), |base| base.wrapping_add(offset))
    }

    /// Counts a refused signal. A WARN line names the first one, and after that at most one every ten seconds.
    fn refuse(&mut self, reason: &Reason) {
        self.counts.refused.fetch_add(1, Ordering::Relaxed);
        let Some(more) = self.refusals.add(Instant::now()) else { return };
        let (rank, context) = self.name;
        crate::warn!(
            "rank {rank}: context {context} refused {reason}, and {more} more since the last such line; no memory \
             was changed. Check the ids, offsets and windows of the kernels' signals, and that the window is still \
             registered here"
        );
    }

    /// Posts the receives that are due.
    fn refill(&mut self, idle: bool) {
        let due = self.receives.refill(idle);
        for _ in 0..due {
            let Some(number) = self.free.pop() else { break };
            self.posted[usize::from(number)] = true;
            let at = self.memory.buffer.device_address() + self.offset(number) as u64;
            let desc = RxDesc::single(number, at, Message::BYTES as u16, self.memory.region.1);
            // SAFETY: the queue pair keeps the ring mapped, and this object alone posts on it. It never posts more
            // receives than the ring has slots.
            unsafe { rq::post(&mut self.rq, &desc) };
        }
        if due > 0 {
            // SAFETY: the queue pair keeps the doorbell mapped, and this object alone rings it.
            unsafe { rq::flush(&mut self.rq) };
        }
    }
}

/// Checks that the card's sends can carry the 32 bytes of a signal inline.
fn check_inline(card: &str, inline: usize) -> Result<(), Error> {
    if inline >= Message::BYTES {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "FERROGIN_SIGNALS=emulated: card {card} can send only {inline} bytes inline, but signals need {}: set \
         FERROGIN_SIGNALS=card",
        Message::BYTES
    )))
}

/// Converts a receive queue to the form that the device code posts on.
fn work_queue(rq: &WqMemory) -> WqV0 {
    let entries = rq.num_entries;
    WqV0 {
        max_sge: 1,
        max_wqes: entries,
        queue_mask: entries - 1,
        queue_size_shift: entries.trailing_zeros(),
        // 0 means that the card has no limit.
        max_batch: if rq.max_batch == 0 { entries } else { rq.max_batch.min(entries) },
        wqes_pending: 0,
        wqes_posted: 0,
        wqes_completed: 0,
        pc: 0,
        phase: 0,
        buf: rq.buffer,
        db: rq.doorbell,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn card_with_less_inline_than_a_signal_is_refused() {
        assert!(check_inline("efa0", Message::BYTES).is_ok());
        let error = check_inline("efa0", Message::BYTES - 1).unwrap_err().to_string();
        for part in ["card efa0 can send only 31 bytes inline", "need 32", "set FERROGIN_SIGNALS=card"] {
            assert!(error.contains(part), "{part:?} in {error}");
        }
    }

    #[test]
    fn refusals_make_one_line_in_ten_seconds() {
        let (mut refusals, began) = (Refusals::default(), Instant::now());
        let mut at = |ms| refusals.add(began + Duration::from_millis(ms));
        assert_eq!([0, 1, 9_999].map(&mut at), [Some(0), None, None]);
        assert_eq!([10_000, 10_001, 20_000].map(&mut at), [Some(2), None, Some(1)]);
    }
}
