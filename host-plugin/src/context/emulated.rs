//! The emulated signals of a `createContext`: indexed words, receives, and an inbox for each context.
//!
//! The words are in the kernels' memory if the signal proxy can add to them there, through GDRCopy, and otherwise in
//! the host's, where each read takes a GPU a round trip over PCIe.

use crate::comm::CollComm;
use crate::device::{self, Adds, Device, DeviceBuffer, Use, WordMapping};
use crate::error::Error;
use crate::memory::region_of;
use crate::rail::Rail;
use crate::signal_proxy::inbox::{DEPTH, Inbox, InboxMemory, SignalCard, Words};
use crate::signal_proxy::{self, Served};
use ferrogin_ffi::signals::{Generation, Message, Receiver};
use ferrogin_libfabric::{Info, MemoryRegion, bindings};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The process's next context number.
static GENERATION: AtomicU64 = AtomicU64::new(1);

/// The memory of all inboxes.
pub struct SignalMemory {
    /// By rail in use: the registration of the receive buffers and its key. Dropped before the allocation.
    regions: Vec<(Arc<MemoryRegion>, u32)>,
    /// Each context's receive buffers.
    buffer: Arc<dyn DeviceBuffer>,
    /// Each context's words.
    words: Arc<WordMemory>,
    /// By rail in use: the info to open an inbox with.
    infos: Vec<Info>,
    n_signals: usize,
}

/// Memory for words that kernels read and the signal proxy adds to.
struct WordMemory {
    /// Dropped before the memory.
    mapping: Option<WordMapping>,
    buffer: Box<dyn DeviceBuffer>,
}

impl WordMemory {
    fn allocate(device: &dyn Device, len: usize) -> Result<Self, Error> {
        let buffer = device.allocate(len, Use::Card)?;
        if buffer.host_address().is_some() {
            return Ok(Self { mapping: None, buffer });
        }
        match device.map_words(buffer.device_address() as *mut _, len) {
            Some(mapping) => Ok(Self { mapping: Some(mapping), buffer }),
            None => Ok(Self { mapping: None, buffer: device.allocate(len, Use::Shared)? }),
        }
    }

    /// Returns where the signal proxy finds the words from `offset` on.
    fn words(self: &Arc<Self>, offset: usize) -> Words {
        let (base, adds) = match (self.buffer.host_address(), &self.mapping) {
            (None, Some(mapping)) => (self.buffer.device_address(), Adds::Mapped { distance: mapping.distance }),
            (base, _) => (base.map_or(0, |base| base as u64), Adds::Cpu),
        };
        Words { first: base + offset as u64, adds, _memory: self.clone() }
    }
}

impl SignalMemory {
    /// Allocates memory for `n_contexts` with `n_signals` each, and registers it with the cards of `rails`.
    ///
    /// # Errors
    /// A card lacks what emulated signals need, or refuses the memory; the device is out of memory.
    #[allow(unsafe_code)]
    pub fn allocate(coll: &CollComm, rails: &[&Arc<Rail>], n_contexts: usize, n_signals: usize) -> Result<Self, Error> {
        let infos = rails.iter().map(|rail| Inbox::info(&coll.plugin.query, rail)).collect::<Result<_, _>>()?;
        let len = (n_contexts * DEPTH * Message::BYTES).next_multiple_of(device::page_size());
        let buffer: Arc<dyn DeviceBuffer> = coll.device.allocate(len, Use::Shared)?.into();
        let words = Arc::new(WordMemory::allocate(&*coll.device, n_contexts * stride(n_signals))?);
        let register = |rail: &&Arc<Rail>| {
            let (region, kind) = region_of(&*buffer, 0, len);
            let what = format!("registering {len} bytes for receives of signals with card {}", rail.name());
            // SAFETY: each inbox keeps the region and the buffer, and drops its queue pair first. No Rust reference
            // covers the memory.
            let region = unsafe { MemoryRegion::register_kind(&rail.domain, region, bindings::FI_RECV, 0, kind) };
            let region = Arc::new(region.map_err(Error::fabric(what))?);
            let (lkey, _) = rail.keys(&region)?;
            Ok::<_, Error>((region, lkey))
        };
        let regions = rails.iter().map(register).collect::<Result<_, _>>()?;
        Ok(Self { regions, buffer, words, infos, n_signals })
    }

    /// Returns the device address of context `id`'s words.
    pub fn words(&self, id: usize) -> u64 {
        self.words.buffer.device_address() + (id * stride(self.n_signals)) as u64
    }

    /// Opens context `id`'s inbox on rail number `at`.
    ///
    /// # Errors
    /// Those of [`Inbox::open`].
    pub fn open(&self, coll: &CollComm, at: usize, id: usize) -> Result<Inbox, Error> {
        let receiver = Receiver {
            generation: Generation::new(GENERATION.fetch_add(1, Ordering::Relaxed)),
            n_signals: self.n_signals as u32,
            nranks: coll.nranks as u32,
        };
        let memory = InboxMemory {
            buffer: self.buffer.clone(),
            receives: id * DEPTH * Message::BYTES,
            region: self.regions[at].clone(),
            words: self.words.words(id * stride(self.n_signals)),
        };
        let provider = coll.plugin.config.provider.name();
        let card = SignalCard { rail: &coll.rails[at], provider, info: &self.infos[at] };
        Inbox::open(card, &coll.device, &coll.signal_windows, coll.rank, id, receiver, memory)
    }
}

/// Returns the size of a context's words. Contexts share no cache lines.
fn stride(n_signals: usize) -> usize {
    (n_signals.max(1) * 8).next_multiple_of(128)
}

/// The inboxes of a `createContext`, which the signal proxy serves until this is dropped.
pub struct Inboxes(Vec<signal_proxy::Guard>);

impl Inboxes {
    /// Hands inboxes to the signal proxy.
    ///
    /// # Errors
    /// The signal proxy's thread doesn't start.
    pub fn serve(inboxes: Vec<Inbox>) -> Result<Self, Error> {
        let served = inboxes.into_iter().map(signal_proxy::serve).collect::<Result<_, _>>();
        served.map(Self).map_err(|source| Error::System { call: "starting the signal proxy's thread", source })
    }

    /// Returns the inboxes, for the watcher.
    pub fn served(&self) -> Vec<Arc<Served>> {
        self.0.iter().map(signal_proxy::Guard::served).collect()
    }
}
