//! The device block of a `createContext`, and the tables of a window: all structs that kernels read, as bytes for an
//! address.
//!
//! This module only computes bytes and addresses: the plugin fills in a card's queues and copies the bytes to the
//! device, tests and benches describe plain memory. The block begins with the header and the array of device handles,
//! which NCCL's code indexes. Each context's tables follow, and the structs that posting threads write, each on its own
//! cache lines.
#![allow(unsafe_code)]

use crate::device::{CounterHandle, DevHandle, EndpointHandle, MrHandle, MrPeer};
use crate::ext::{
    ContextExt, EmulatedPeer, EmulatedSignals, EndpointConfig, EndpointExt, HEADER_MAGIC, HEADER_VERSION, HandleHeader,
    Losses, POLICY_COMBINING, PostingState, ProgressFn, RANK_ID, RingConfig, Routes, STATE_RUNG_SHIFT, Target,
    TargetWords, VALUE_INLINE, VALUE_NONE, VALUE_POOL, VALUE_STRIDE, ValueConfig, used_words, window_handle_offset,
};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ffi::c_void;
use core::marker::PhantomData;
use core::mem::{MaybeUninit, offset_of};
use core::ptr::null_mut;
use efa_dp_direct::queue::{CqAttrs, CqV0, InitError, QpAttrs, QpV0, QpV1, SQ_WQ_OFFSET, WQ_CAPS_64_BIT_REQ_ID, WqV0};
use efa_dp_direct::wqe::words::{WqeTemplate, phase_scale};
use efa_dp_direct::wqe::{Destination, Hints};

/// Size of an aligned unit that threads posting on different endpoints must not share.
const LINE: usize = 128;

/// Layout of the queue structs, selected by NCCL's `backendVersion`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `efa_cuda_qp_v0`, for kernels built with NCCL 2.31: backendVersion 0 or 1.
    V0,
    /// `efa_cuda_qp_v1`, for kernels built with NCCL 2.32: backendVersion 2.
    V1,
}

impl Layout {
    /// Returns the layout for a `backendVersion`; `None` for an unknown one.
    pub fn of(backend_version: i32) -> Option<Self> {
        match backend_version {
            0 | 1 => Some(Self::V0),
            2 => Some(Self::V1),
            _ => None,
        }
    }

    /// Returns this layout's `backendVersion`.
    pub fn backend_version(self) -> u32 {
        match self {
            Self::V0 => 1,
            Self::V1 => 2,
        }
    }
}

/// Where an endpoint's cursors are: the offset of its struct in the block.
#[derive(Debug, Clone, Copy)]
pub struct Cursors(usize);

impl Cursors {
    /// Bytes from [`offset`](Self::offset) that have all cursors.
    pub const BYTES: usize = size_of::<EndpointExt>();

    /// Returns the offset of the endpoint's struct.
    pub fn offset(self) -> usize {
        self.0
    }

    /// Returns the offset of the send queue, a [`WqV0`] in either layout.
    pub fn queue(self) -> usize {
        self.0 + QUEUE
    }

    /// Returns the offset of the endpoint's [`Losses`].
    pub fn losses(self) -> usize {
        self.0 + offset_of!(EndpointExt, posting) + offset_of!(PostingState, acknowledged)
    }

    /// Returns the offset of the next request's number.
    pub fn next(self) -> usize {
        self.queue() + offset_of!(WqV0, pc)
    }
}

/// Offset of the send queue in an endpoint's struct.
const QUEUE: usize = offset_of!(EndpointExt, queue) + SQ_WQ_OFFSET;

/// How far the posts of an endpoint have got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posts {
    /// The next request's number, without those that are `pending`.
    next: u32,
    /// Requests that the `locked` policy has not rung.
    pending: u32,
    /// Requests that are written, as NCCL's device code counts them.
    released: u32,
    /// Requests that are rung.
    pub rung: u32,
    /// The `combining` policy's ready bits (low half) and rung count.
    state: [u32; 2],
}

impl Posts {
    /// Reads the cursors of an endpoint's struct.
    pub fn of(bytes: &[u8; Cursors::BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
        let state = offset_of!(EndpointExt, posting) + offset_of!(PostingState, state);
        Self {
            next: word(QUEUE + offset_of!(WqV0, pc)),
            pending: word(QUEUE + offset_of!(WqV0, wqes_pending)),
            released: word(QUEUE + offset_of!(WqV0, wqes_completed)),
            rung: word(QUEUE + offset_of!(WqV0, wqes_posted)),
            state: [word(state), word(state + 4)],
        }
    }

    /// Returns the number of requests that have been reserved.
    pub fn reserved(self) -> u32 {
        self.next.wrapping_add(self.pending)
    }

    /// Returns the number of requests that are written and may be rung, once no thread is posting.
    pub fn written(self) -> u32 {
        let [ready, rung] = self.state;
        // One bit for each of 16 requests from the rung count on.
        match (ready as u16).rotate_right(rung % 16).trailing_ones() {
            0 if self.pending == 0 => self.released,
            0 => self.reserved(),
            ready => rung.wrapping_add(ready),
        }
    }
}

/// One endpoint's queues and counters, as device addresses.
#[derive(Debug, Clone, Copy, Default)]
pub struct EndpointSpec {
    /// Send ring.
    pub sq_buf: u64,
    /// Send doorbell.
    pub sq_db: u64,
    /// Slots of the send ring, a power of two.
    pub sq_entries: u32,
    /// Requests that may be outstanding; a power of two, at most `sq_entries`.
    pub sq_size: u32,
    /// Requests that may be written before the doorbell is rung.
    pub max_batch: u32,
    /// Size of a send request in bytes.
    pub wqe_size: u32,
    /// Bytes that a request can carry inline.
    pub max_inline: u32,
    /// Slots of the receive ring, a power of two.
    pub rq_entries: u32,
    /// Completion ring, or 0 if kernels cannot access it.
    pub cq_buf: u64,
    /// Slots of the completion ring, a power of two.
    pub cq_entries: u32,
    /// Size of a completion in bytes.
    pub cq_entry_size: u32,
    /// Completion counter and its current value.
    pub completed: (u64, u64),
    /// Error counter and its current value.
    pub errors: (u64, u64),
    /// The counter that users read instead of `completed`, and its current value. For a signal endpoint: of received
    /// writes.
    pub signal: Option<(u64, u64)>,
    /// First value slot and number of slots; both 0 if the endpoint doesn't post values from the pool.
    pub values: (u64, u32),
}

/// One context.
#[derive(Debug, Clone, Default)]
pub struct ContextSpec {
    /// The data endpoint, the value endpoint, the counter endpoints, then the signal endpoints.
    pub endpoints: Vec<EndpointSpec>,
    /// Number of counters.
    pub n_counters: usize,
    /// Number of signals.
    pub n_signals: usize,
    /// Number of ranks.
    pub nranks: usize,
    /// This rank.
    pub rank: usize,
    /// The context's rail.
    pub rail: u32,
    /// The communicator's number of rails. A window has a handle for each.
    pub rails: usize,
    /// Targets at `[slot * nranks + peer]`.
    pub targets: Arc<[Target]>,
    /// Local key and address of the scratch page.
    pub scratch: (u32, u64),
    /// Address and remote key of each rank's scratch page.
    pub scratch_peers: Vec<(u64, u32)>,
    /// Local key of the value pool.
    pub value_lkey: u32,
    /// Largest transfer of one request, in bytes.
    pub max_rdma_size: u32,
    /// Emulated signals, if the card doesn't count them.
    pub emulated: Option<EmulatedSpec>,
    /// The function that waiting CPU threads call to make the card progress; none for kernels on a GPU.
    pub progress: Option<Progress>,
}

/// The function that waiting CPU threads call, and its argument.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// The function.
    pub function: ProgressFn,
    /// Its argument.
    pub arg: *mut c_void,
}

/// One context's emulated signals.
#[derive(Debug, Clone, Default)]
pub struct EmulatedSpec {
    /// Address of this rank's words.
    pub words: u64,
    /// This rank's number of signals.
    pub n_signals: u32,
    /// What senders know of each rank's context.
    pub peers: Vec<EmulatedPeer>,
}

/// All contexts of one `createContext`.
#[derive(Debug, Clone)]
pub struct BlockSpec {
    /// By context id.
    pub contexts: Vec<ContextSpec>,
    /// Layout of the queue structs.
    pub layout: Layout,
    /// `POLICY_*`.
    pub policy: u32,
    /// Device address of the abort flag.
    pub abort_flag: u64,
    /// Bytes from the abort flag to the failure record's address: see [`ContextExt::failure_offset`].
    pub failure_offset: u32,
    /// Initial limit of a wait in nanoseconds; 0 is no limit.
    pub wait_ns: u64,
    /// Whether a lost rank ends only the requests to it.
    pub isolates: bool,
}

/// Where `count` values of `T` are in a block.
#[derive(Debug)]
struct Place<T> {
    offset: usize,
    count: usize,
    of: PhantomData<T>,
}

impl<T> Clone for Place<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Place<T> {}

impl<T> Place<T> {
    /// Returns the place of a field of element `i`, at `offset` within the element.
    fn part<P>(self, i: usize, offset: usize) -> Place<P> {
        Place { offset: self.offset + i * size_of::<T>() + offset, count: 1, of: PhantomData }
    }
}

/// Assigns places one after the other.
#[derive(Debug, Default)]
struct Cursor(usize);

impl Cursor {
    /// Returns the next place, aligned to at least `align`.
    fn place<T>(&mut self, count: usize, align: usize) -> Place<T> {
        let offset = self.0.next_multiple_of(align.max(align_of::<T>()));
        self.0 = offset + count * size_of::<T>();
        Place { offset, count, of: PhantomData }
    }
}

/// The places of one context.
#[derive(Debug)]
struct ContextPlaces {
    ext: Place<ContextExt>,
    endpoints: Place<EndpointExt>,
    queues: Vec<QueuePlaces>,
    counters: Place<u64>,
    signals: Place<u64>,
    ahs: Place<u16>,
    qpns: Place<u16>,
    qkeys: Place<u32>,
    targets: Place<TargetWords>,
    scratch_addrs: Place<u64>,
    scratch_rkeys: Place<u32>,
    scratch: Place<MrHandle>,
    scratch_peers: Place<MrPeer>,
    timeout: Place<u64>,
    used: Place<u64>,
    emulated: Place<EmulatedSignals>,
    emulated_peers: Place<EmulatedPeer>,
}

#[derive(Debug)]
struct QueuePlaces {
    /// Within the endpoint's struct, with room for either layout.
    qp: Place<QpV1>,
    cq: Place<CqV0>,
    /// Counter and signal endpoints only; the device handle contains the data and value endpoints' handles.
    handle: Option<Place<CounterHandle>>,
}

/// A block's layout, which doesn't depend on the block's address.
#[derive(Debug)]
pub struct Plan {
    header: Place<HandleHeader>,
    devs: Place<DevHandle>,
    exts: Place<ContextExt>,
    contexts: Vec<ContextPlaces>,
    len: usize,
}

impl Plan {
    /// Lays out the block for `spec`.
    pub fn new(spec: &BlockSpec) -> Self {
        let mut cursor = Cursor::default();
        let n = spec.contexts.len();
        let header = cursor.place(1, LINE);
        // The array follows the header without a gap, because kernels find the header before the array.
        let devs = cursor.place(n, 1);
        let exts: Place<ContextExt> = cursor.place(n, LINE);
        let contexts = spec.contexts.iter().enumerate().map(|(i, context)| {
            let table = context.targets.len();
            let endpoints: Place<EndpointExt> = cursor.place(context.endpoints.len(), LINE);
            ContextPlaces {
                ext: Place { offset: exts.offset + i * size_of::<ContextExt>(), count: 1, of: PhantomData },
                endpoints,
                counters: cursor.place(context.n_counters, LINE),
                signals: cursor.place(context.n_signals, 8),
                targets: cursor.place(table, LINE),
                qkeys: cursor.place(table, 8),
                ahs: cursor.place(table, 8),
                qpns: cursor.place(table, 8),
                scratch_addrs: cursor.place(context.nranks, 8),
                scratch_rkeys: cursor.place(context.nranks, 8),
                // The entries follow the handle.
                scratch: cursor.place(1, 16),
                scratch_peers: cursor.place(context.nranks, 16),
                timeout: cursor.place(1, LINE),
                used: cursor.place(words_of_used_set(context.endpoints.len()), LINE),
                emulated: cursor.place(usize::from(context.emulated.is_some()), LINE),
                emulated_peers: cursor.place(context.emulated.as_ref().map_or(0, |signals| signals.peers.len()), 8),
                queues: (0..context.endpoints.len())
                    .map(|e| QueuePlaces {
                        qp: endpoints.part(e, offset_of!(EndpointExt, queue)),
                        cq: cursor.place(1, 8),
                        handle: (e >= 2).then(|| cursor.place(1, LINE)),
                    })
                    .collect(),
            }
        });
        let contexts = contexts.collect();
        Self { header, devs, exts, contexts, len: cursor.0.next_multiple_of(LINE) }
    }

    /// Returns the block's size in bytes.
    pub fn size(&self) -> usize {
        self.len
    }

    /// Returns the offset of the array of device handles.
    pub fn handles_offset(&self) -> usize {
        self.devs.offset
    }

    /// Returns where the cursors of each context's endpoints are.
    pub fn cursors(&self) -> Vec<Vec<Cursors>> {
        let of = |endpoints: &Place<EndpointExt>| {
            (0..endpoints.count).map(|e| Cursors(endpoints.offset + e * size_of::<EndpointExt>())).collect()
        };
        self.contexts.iter().map(|context| of(&context.endpoints)).collect()
    }

    /// Returns where each context's targets are, as the offset of the first word of the first one.
    pub fn targets(&self) -> Vec<usize> {
        self.contexts.iter().map(|context| context.targets.offset + offset_of!(TargetWords, head)).collect()
    }

    /// Fills the block for the device address `base`.
    ///
    /// # Errors
    /// The layout of the queue structs can't express a queue.
    pub fn fill(&self, spec: &BlockSpec, base: u64) -> Result<Image, InitError> {
        let mut image = Image::new(base, self.len);
        image.put(
            self.header,
            0,
            HandleHeader {
                magic: HEADER_MAGIC,
                version: HEADER_VERSION,
                n_contexts: spec.contexts.len() as u32,
                contexts: image.at(self.exts, 0),
                abort_flag: spec.abort_flag as *mut u32,
                policy: spec.policy,
                backend_version: spec.layout.backend_version(),
                reserved: [0; 3],
            },
        );
        for (i, (context, places)) in spec.contexts.iter().zip(&self.contexts).enumerate() {
            let dev = image.at(self.devs, i);
            let handle = Filler { image: &mut image, spec, context, places, dev }.fill()?;
            image.put(self.devs, i, handle);
        }
        Ok(image)
    }
}

/// A window on one rail.
#[derive(Debug, Clone)]
pub struct RailSpec {
    /// Local key.
    pub lkey: u32,
    /// Every rank's part.
    pub peers: Vec<MrPeer>,
}

/// The tables of a window: the array of pointers that a kernel's `ncclGinWindow_t` is the address of, and a handle for
/// each rail.
#[derive(Debug, Clone)]
pub struct WindowSpec {
    /// Address of the window's first byte on this rank.
    pub local_addr: u64,
    /// By rail; each with as many peers as there are ranks.
    pub rails: Vec<RailSpec>,
}

impl WindowSpec {
    fn nranks(&self) -> usize {
        self.rails.first().map_or(0, |rail| rail.peers.len())
    }

    /// Returns the tables' size in bytes.
    pub fn size(&self) -> usize {
        window_handle_offset(self.rails.len(), self.rails.len(), self.nranks())
    }

    /// Fills the tables for the device address `base`.
    pub fn fill(&self, base: u64) -> Image {
        let mut image = Image::new(base, self.size());
        let array: Place<u64> = Place { offset: 0, count: self.rails.len(), of: PhantomData };
        for (rail, RailSpec { lkey, peers }) in self.rails.iter().enumerate() {
            let offset = window_handle_offset(self.rails.len(), rail, self.nranks());
            let handle: Place<MrHandle> = Place { offset, count: 1, of: PhantomData };
            image.put(array, rail, image.at(handle, 0) as u64);
            let nranks = peers.len() as i32;
            image.put(handle, 0, MrHandle { lkey: *lkey, nranks, local_addr: self.local_addr, peers: [] });
            // The entries follow the handle.
            let entries = Place { offset: offset + size_of::<MrHandle>(), count: peers.len(), of: PhantomData };
            image.put_all(entries, peers.iter().copied());
        }
        image
    }
}

/// The bytes of a block or of a window's tables, before they are copied to the device.
#[derive(Debug)]
pub struct Image {
    base: u64,
    bytes: Vec<MaybeUninit<u8>>,
}

impl Image {
    fn new(base: u64, len: usize) -> Self {
        Self { base, bytes: vec![MaybeUninit::new(0); len] }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[MaybeUninit<u8>] {
        &self.bytes
    }

    /// Returns the device address of element `i`; null for an empty place.
    fn at<T>(&self, place: Place<T>, i: usize) -> *mut T {
        if place.count == 0 { null_mut() } else { (self.base + (place.offset + i * size_of::<T>()) as u64) as *mut T }
    }

    /// Writes element `i`. The place may be for a larger type than `T`.
    fn put<T: Copy, P>(&mut self, place: Place<P>, i: usize, value: T) {
        let offset = place.offset + i * size_of::<P>();
        self.bytes[offset..offset + size_of::<T>()].copy_from_slice(bytes_of(&[value]));
    }

    /// Writes a field at `offset` within the place.
    fn put_field<T: Copy, P>(&mut self, place: Place<P>, offset: usize, value: T) {
        let at = place.offset + offset;
        self.bytes[at..at + size_of::<T>()].copy_from_slice(bytes_of(&[value]));
    }

    fn put_all<T: Copy>(&mut self, place: Place<T>, values: impl IntoIterator<Item = T>) {
        for (i, value) in values.into_iter().take(place.count).enumerate() {
            self.put(place, i, value);
        }
    }
}

/// Fills one context's part of a block.
struct Filler<'a> {
    image: &'a mut Image,
    spec: &'a BlockSpec,
    context: &'a ContextSpec,
    places: &'a ContextPlaces,
    /// The address of the context's device handle.
    dev: *mut DevHandle,
}

/// The handles inside the device handle.
struct OwnHandles {
    data: EndpointHandle,
    pvdata: EndpointHandle,
}

impl Filler<'_> {
    /// Fills everything, and returns the context's device handle.
    fn fill(&mut self) -> Result<DevHandle, InitError> {
        self.fill_tables();
        let handles = (0..self.context.endpoints.len()).map(|e| self.fill_endpoint(e));
        let handles = handles.collect::<Result<Vec<_>, _>>()?;
        self.image.put(self.places.timeout, 0, self.spec.wait_ns);
        let ext = self.context_ext();
        self.image.put(self.places.ext, 0, ext);
        Ok(self.dev_handle(OwnHandles { data: handles[0], pvdata: handles[1] }))
    }

    /// Fills the peer tables and the emulated signals.
    fn fill_tables(&mut self) {
        let Self { image, spec, context, places, .. } = self;
        let targets = context.targets.iter();
        let tag = if spec.isolates { RANK_ID } else { 0 };
        image.put_all(
            places.targets,
            targets.clone().enumerate().map(|(i, target)| target_words(target, (i % context.nranks) as u16 | tag)),
        );
        image.put_all(places.ahs, targets.clone().map(|target| target.ah));
        image.put_all(places.qpns, targets.clone().map(|target| target.qpn));
        image.put_all(places.qkeys, targets.map(|target| target.qkey));
        image.put_all(places.scratch_addrs, context.scratch_peers.iter().map(|peer| peer.0));
        image.put_all(places.scratch_rkeys, context.scratch_peers.iter().map(|peer| peer.1));
        let (lkey, local_addr) = context.scratch;
        image.put(places.scratch, 0, MrHandle { lkey, nranks: context.nranks as i32, local_addr, peers: [] });
        let peers = context.scratch_peers.iter().map(|&(remote_addr, rkey)| MrPeer { remote_addr, rkey, pad: 0 });
        image.put_all(places.scratch_peers, peers);

        if let Some(signals) = &context.emulated {
            let emulated = EmulatedSignals {
                words: signals.words as *mut u64,
                peers: image.at(places.emulated_peers, 0),
                n_signals: signals.n_signals,
                rank: context.rank as u32,
                reserved: [0; 5],
            };
            image.put(places.emulated, 0, emulated);
            image.put_all(places.emulated_peers, signals.peers.iter().copied());
        }
    }

    /// Fills in everything that belongs to endpoint `e`, and returns its handle.
    fn fill_endpoint(&mut self, e: usize) -> Result<EndpointHandle, InitError> {
        let Self { image, spec, context, places, dev } = self;
        let (endpoint, queue) = (&context.endpoints[e], &places.queues[e]);
        match spec.layout {
            Layout::V0 => image.put(queue.qp, 0, QpV0::new(&qp_v0(endpoint))?),
            Layout::V1 => image.put(queue.qp, 0, QpV1::new(&qp_v1(endpoint))?),
        }
        image.put(queue.cq, 0, cq(endpoint)?);
        let handle = EndpointHandle {
            // NCCL's own device code must find no queue: it would post to peers, which wouldn't count its signals.
            qp: if context.emulated.is_some() { null_mut() } else { image.at(queue.qp, 0).cast() },
            cq: image.at(queue.cq, 0).cast(),
            target_address_handles: image.at(places.ahs, 0),
            target_remote_qpns: image.at(places.qpns, 0),
            target_qkey: image.at(places.qkeys, 0),
            sq_lock: 0,
            local_cntr_value: endpoint.completed.0 as *mut u64,
            submitted_count: endpoint.completed.1,
            sq_size: endpoint.sq_size,
            putvalue_pad: 0,
            putvalue_slice_base: endpoint.values.0,
        };
        // The device handle begins with the data endpoint and the value endpoint.
        let mut at = dev.cast::<EndpointHandle>().wrapping_add(e);
        if let Some(place) = queue.handle {
            let (value, offset) = endpoint.signal.unwrap_or(endpoint.completed);
            let counter = CounterHandle { base: handle, cntr_value: value as *mut u64, cntr_offset: offset };
            image.put(place, 0, counter);
            at = image.at(place, 0).cast();
            let (list, i) = match e - 2 {
                c if c < context.n_counters => (places.counters, c),
                s => (places.signals, s - context.n_counters),
            };
            image.put(list, i, image.at(place, 0) as u64);
        }
        let config = self.endpoint_config(e, at);
        self.image.put(self.places.endpoints, e, config);
        self.start_at(e, endpoint.completed.1 as u32);
        Ok(handle)
    }

    /// Builds the constant half of the device state of endpoint `e`, whose handle NCCL sees at `handle`.
    fn endpoint_config(&self, e: usize, handle: *mut EndpointHandle) -> EndpointConfig {
        let endpoint = &self.context.endpoints[e];
        let (value_base, value_slots) = endpoint.values;
        EndpointConfig {
            ring: RingConfig {
                sq_buf: endpoint.sq_buf as *mut u8,
                sq_db: endpoint.sq_db as *mut u32,
                ring_mask: endpoint.sq_entries * endpoint.wqe_size - 1,
                wqe_size: endpoint.wqe_size,
                phase_bit: endpoint.sq_entries,
                phase_scale: phase_scale(endpoint.sq_entries),
                submitted: handle.wrapping_byte_add(offset_of!(EndpointHandle, submitted_count)).cast(),
                value_base,
            },
            values: ValueConfig {
                mask: value_slots.saturating_sub(1) * VALUE_STRIDE,
                lkey: if value_slots != 0 { self.context.value_lkey } else { 0 },
                path: value_path(endpoint, self.spec.policy),
                slots: value_slots,
            },
            handle,
            sq_size: endpoint.sq_size,
            max_batch: endpoint.max_batch,
            completed: endpoint.completed.0 as *const u64,
            errors: endpoint.errors.0 as *const u64,
            errors_base: endpoint.errors.1,
            write_inline: write_inline(endpoint),
            index: e as u32,
            context: self.image.at(self.places.ext, 0),
            reserved: 0,
        }
    }

    /// Sets the cursors of endpoint `e` to the card's completion counter, which is 0 on hardware.
    fn start_at(&mut self, e: usize, start: u32) {
        let (qp, exts) = (self.places.queues[e].qp, self.places.endpoints);
        // The device code derives the lap's phase from `pc`; the word `phase` holds the flush barrier.
        for field in [
            offset_of!(WqV0, wqes_posted),
            offset_of!(WqV0, wqes_completed),
            offset_of!(WqV0, pc),
            offset_of!(WqV0, phase),
        ] {
            self.image.put_field(qp, SQ_WQ_OFFSET + field, start);
        }
        let posting = e * size_of::<EndpointExt>() + offset_of!(EndpointExt, posting);
        let bound = u64::from(start.wrapping_sub(1)) << 32 | u64::from(start);
        let state = u64::from(start) << STATE_RUNG_SHIFT;
        self.image.put_field(exts, posting + offset_of!(PostingState, state), state);
        self.image.put_field(exts, posting + offset_of!(PostingState, bound), bound);
        self.image.put_field(exts, posting + offset_of!(PostingState, barrier), start);
        let losses = if self.spec.isolates { Losses::new(0, 0) } else { Losses::default() };
        self.image.put_field(exts, posting + offset_of!(PostingState, acknowledged), losses);
    }

    /// Builds the device handle.
    fn dev_handle(&self, OwnHandles { data, pvdata }: OwnHandles) -> DevHandle {
        let Self { image, context, places, .. } = self;
        // With emulated signals this holds the address of their words, which `ferrogin_signals_of_context` in
        // nccl_gin_backend.cuh reads.
        let scratch_remote_addrs = match &context.emulated {
            Some(signals) => signals.words as *mut u64,
            None => image.at(places.scratch_addrs, 0),
        };
        DevHandle {
            data,
            pvdata,
            counter_handles: image.at(places.counters, 0).cast(),
            signal_handles: image.at(places.signals, 0).cast(),
            n_counters: context.n_counters as i32,
            n_signals: context.n_signals as i32,
            nranks: context.nranks as i32,
            rank: context.rank as i32,
            rail_id: context.rail,
            scratch_lkey: context.scratch.0,
            scratch_pad: 0,
            scratch_local_addr: context.scratch.1,
            scratch_remote_addrs,
            scratch_remote_rkeys: image.at(places.scratch_rkeys, 0),
            putvalue_lkey: context.value_lkey,
            putvalue_slot_size: VALUE_STRIDE,
        }
    }

    /// Builds ferrogin's own part of the handle.
    fn context_ext(&self) -> ContextExt {
        let Self { image, spec, context, places, dev } = self;
        let has_fast_path = spec.policy == POLICY_COMBINING;
        ContextExt {
            routes: Routes {
                endpoints: image.at(places.endpoints, 0),
                targets: image.at(places.targets, 0),
                nranks: context.nranks as u32,
                last_slot: (context.targets.len() / context.nranks.max(1)) as u32 - 1,
                n_counters: context.n_counters as u32,
                n_signals: context.n_signals as u32,
                fast_put_limit: if has_fast_path { context.max_rdma_size.into() } else { 0 },
                window_peers: window_peers(context),
                scratch: image.at(places.scratch, 0),
                dev: *dev,
            },
            policy: spec.policy,
            n_endpoints: context.endpoints.len() as u32,
            max_rdma_size: context.max_rdma_size,
            failure_offset: spec.failure_offset,
            abort_flag: spec.abort_flag as *mut u32,
            timeout_ns: image.at(places.timeout, 0),
            progress: context.progress.map(|progress| progress.function),
            progress_arg: context.progress.map_or(null_mut(), |progress| progress.arg),
            used: image.at(places.used, 0),
            emulated: image.at(places.emulated, 0),
        }
    }
}

/// Returns the offset from a window to its peers' entries on the context's rail.
fn window_peers(context: &ContextSpec) -> u64 {
    let handle = window_handle_offset(context.rails, context.rail as usize, context.nranks);
    (handle + size_of::<MrHandle>()) as u64
}

/// Returns the number of words in the set of endpoints that a flush looks at.
fn words_of_used_set(n_endpoints: usize) -> usize {
    let (summaries, leaves) = used_words(n_endpoints as u32);
    summaries + leaves
}

/// Converts a target to the form that posts copy. The request id is the peer's rank, for the error message of a failed
/// request.
fn target_words(target: &Target, id: u16) -> TargetWords {
    if *target == Target::default() {
        return TargetWords::default();
    }
    let dest = Destination { ah: target.ah, qpn: target.qpn, qkey: target.qkey };
    let WqeTemplate { head, second, third } = WqeTemplate::new(id, dest, Hints::BURST_PPS_SENSITIVE);
    TargetWords { head, second, third }
}

/// Returns a write's inline bytes: only 128-byte requests have room for them.
fn write_inline(endpoint: &EndpointSpec) -> u32 {
    if endpoint.wqe_size == 128 { endpoint.max_inline } else { 0 }
}

/// Returns how values take the fast path, which the `locked` policy doesn't have.
fn value_path(endpoint: &EndpointSpec, policy: u32) -> u32 {
    match policy {
        POLICY_COMBINING if write_inline(endpoint) >= 8 => VALUE_INLINE,
        POLICY_COMBINING if endpoint.values.1 != 0 && endpoint.wqe_size == 64 => VALUE_POOL,
        _ => VALUE_NONE,
    }
}

/// Returns the attributes that a queue pair has in both layouts.
fn qp_v0(endpoint: &EndpointSpec) -> QpAttrs {
    QpAttrs {
        sq_buffer: endpoint.sq_buf as *mut u8,
        sq_doorbell: endpoint.sq_db as *mut u32,
        sq_num_entries: endpoint.sq_entries,
        sq_entry_size: endpoint.wqe_size,
        sq_max_batch: endpoint.max_batch,
        rq_num_entries: endpoint.rq_entries,
        rq_entry_size: 16,
        ..QpAttrs::ZERO
    }
}

/// The reference initialiser requires queues with 64-bit request ids, but no byte of the struct depends on them. NCCL's
/// and ferrogin's device code write 16 bits of an id and leave the others 0, which is valid on every queue.
fn qp_v1(endpoint: &EndpointSpec) -> QpAttrs {
    QpAttrs {
        sq_max_inline_data: endpoint.max_inline,
        sq_max_rdma_sges: 1,
        sq_caps: WQ_CAPS_64_BIT_REQ_ID,
        ..qp_v0(endpoint)
    }
}

fn cq(endpoint: &EndpointSpec) -> Result<CqV0, InitError> {
    CqV0::new(&CqAttrs {
        comp_mask: 0,
        flags: 0,
        buffer: endpoint.cq_buf as *mut u8,
        num_entries: endpoint.cq_entries,
        entry_size: endpoint.cq_entry_size,
    })
}

/// Returns the bytes of `value`, as `MaybeUninit` because padding may be uninitialised.
pub fn bytes_of<T: Copy>(value: &[T]) -> &[MaybeUninit<u8>] {
    // SAFETY: the pointer and size are those of a slice that the result borrows, and `MaybeUninit<u8>` has no invalid
    // values.
    unsafe { core::slice::from_raw_parts(value.as_ptr().cast(), size_of_val(value)) }
}

#[cfg(test)]
mod tests;
