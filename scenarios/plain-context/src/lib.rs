//! Contexts over plain memory: a description for [`ferrogin_ffi::block`], which `createContext` uses too, with defaults
//! for tests.
// The loom models have no contexts.
#![cfg(not(loom))]
#![allow(unsafe_code, missing_docs)]

use efa_dp_direct::queue::WqV0;
use efa_dp_direct::wqe::Destination;
use ferrogin_device::{Context, Window};
use ferrogin_ffi::block::{self, BlockSpec, ContextSpec, EmulatedSpec, Image, Layout, Plan, Progress, RailSpec};
use ferrogin_ffi::device::MrPeer;
use ferrogin_ffi::ext::Target;
use std::ffi::c_void;
use std::mem::offset_of;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Largest transfer per request in these contexts.
pub const MAX_RDMA: u32 = 1 << 30;
/// The time limit, in nanoseconds, for waits that shouldn't time out: four minutes, the same as the tests' hang limit.
pub const NO_TIMEOUT_NS: u64 = 240_000_000_000;
/// Index of the value endpoint.
pub const VALUE: usize = 1;

/// Gives a thread that fails to wait a chance to show it. Doesn't wait for any event.
pub fn let_threads_run() {
    std::thread::sleep(std::time::Duration::from_millis(1));
}

/// One endpoint.
#[derive(Debug, Clone)]
pub struct EndpointSpec {
    pub entries: u32,
    pub wide: bool,
    pub max_batch: u32,
    /// Address of the first value slot, or 0 if there are none.
    pub value_base: u64,
    /// The first post's number.
    pub start: u32,
}

/// This rank's part of a window, and its peers' parts.
#[derive(Debug, Clone)]
pub struct WindowSpec {
    pub lkey: u32,
    pub addr: u64,
    /// Address and key for each rank.
    pub peers: Vec<(u64, u32)>,
}

/// Endpoints are ordered as in a context: data, values, counters, signals.
#[derive(Debug)]
pub struct Spec {
    pub policy: u32,
    pub nranks: u32,
    pub rail: u32,
    pub endpoints: Vec<EndpointSpec>,
    pub n_counters: u32,
    pub n_signals: u32,
    /// `[slot * nranks + peer]`.
    pub targets: Vec<Destination>,
    pub value_lkey: u32,
    pub scratch: WindowSpec,
}

/// The memory of an endpoint that a card would read and write.
#[derive(Debug, Clone, Copy)]
pub struct Ring {
    words: *mut u64,
    pub spec_entries: usize,
    pub wide: bool,
    pub doorbell: &'static AtomicU32,
    pub completed: &'static AtomicU64,
    queue: *const WqV0,
}

// SAFETY: the memory is leaked, and no thread writes a slot while a test reads it.
unsafe impl Send for Ring {}
// SAFETY: the memory is leaked, and no thread writes a slot while a test reads it.
unsafe impl Sync for Ring {}

impl Ring {
    fn bytes(&self) -> usize {
        if self.wide { 128 } else { 64 }
    }

    /// Returns the bytes of one slot.
    pub fn slot(&self, i: usize) -> Vec<u8> {
        let words = self.bytes() / 8;
        // SAFETY: leaked memory of `spec_entries` slots; no thread posts while a test reads.
        let slot = unsafe { std::slice::from_raw_parts(self.words.wrapping_add(i % self.spec_entries * words), words) };
        slot.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Reserves, writes, rings and releases `n` posts, as NCCL's device code does.
    pub fn nccl_posts(&self, n: u32) {
        let field = |offset: usize| {
            // SAFETY: an aligned word of the leaked queue struct, which is accessed only atomically while a test posts.
            unsafe { AtomicU32::from_ptr(self.queue.cast_mut().cast::<u8>().wrapping_add(offset).cast()) }
        };
        let end = field(offset_of!(WqV0, pc)).fetch_add(n, Ordering::Relaxed).wrapping_add(n);
        self.doorbell.store(end, Ordering::Relaxed);
        field(offset_of!(WqV0, wqes_posted)).store(end, Ordering::Relaxed);
        field(offset_of!(WqV0, wqes_completed)).store(end, Ordering::Relaxed);
    }

    /// Returns the cursors that NCCL's device code sees: reserved, released, rung.
    pub fn cursors(&self) -> [u32; 3] {
        // SAFETY: the queue is in the leaked endpoint, and no thread posts while a test reads.
        let wq = unsafe { self.queue.read_volatile() };
        // The `locked` policy counts its pending requests separately from `pc`.
        [wq.pc.wrapping_add(wq.wqes_pending), wq.wqes_completed, wq.wqes_posted]
    }
}

/// A context, its rings, and its signals' and counters' counts. All of it is leaked, because tests are short.
pub struct TestContext {
    pub context: Context<'static>,
    pub rings: Vec<Ring>,
    pub signals: Vec<&'static AtomicU64>,
    pub counters: Vec<&'static AtomicU64>,
    /// Calls of the context's progress function.
    pub progress_calls: &'static AtomicU64,
    /// What `createContext` puts into the kernels' memory: the block, counters and the abort flag.
    pub of_kernels: Vec<Range<u64>>,
}

unsafe extern "C" fn count_call(calls: *mut c_void) -> bool {
    // SAFETY: `calls` is the counter that `make_context` leaked for this context.
    unsafe { &*calls.cast::<AtomicU64>() }.fetch_add(1, Ordering::Relaxed);
    false
}

pub fn leak<T>(value: T) -> *mut T {
    Box::leak(Box::new(value))
}

/// Leaks `n` copies of `value`.
fn leak_all<T: Clone>(value: T, n: usize) -> *mut T {
    vec![value; n].leak().as_mut_ptr()
}

/// A cache line: the alignment of a block.
#[repr(align(128))]
#[derive(Clone, Copy)]
struct Line {
    _bytes: [u8; 128],
}

/// Leaks an image of `bytes` bytes, which `fill` makes for its address.
fn leak_image(bytes: usize, fill: impl FnOnce(u64) -> Image) -> *mut c_void {
    let memory = leak_all(Line { _bytes: [0; 128] }, bytes.div_ceil(size_of::<Line>()));
    let image = fill(memory as u64);
    assert_eq!(image.bytes().len(), bytes);
    // SAFETY: the memory has room for the image, and nobody else has its address yet.
    unsafe { memory.cast::<u8>().copy_from_nonoverlapping(image.bytes().as_ptr().cast(), bytes) };
    memory.cast()
}

/// Makes a window as `regMrSym` does. The rails before `rail` lead nowhere.
pub fn window(spec: &WindowSpec, rail: u32) -> Window {
    let nowhere = RailSpec { lkey: 0, peers: vec![MrPeer::default(); spec.peers.len()] };
    let mut rails = vec![nowhere; rail as usize];
    let peers = spec.peers.iter().map(|&(remote_addr, rkey)| MrPeer { remote_addr, rkey, pad: 0 });
    rails.push(RailSpec { lkey: spec.lkey, peers: peers.collect() });
    let tables = block::WindowSpec { local_addr: spec.addr, rails };
    Window(leak_image(tables.size(), |base| tables.fill(base)))
}

/// Makes an endpoint's memory. `count` is where its counter or signal counts.
fn endpoint(of: &EndpointSpec, errors: *const u64, count: Option<&'static AtomicU64>) -> (block::EndpointSpec, Ring) {
    let wqe_size = if of.wide { 128 } else { 64 };
    // Poison: a request must overwrite all bytes of its slot.
    let words = leak_all(0xa5a5_a5a5_a5a5_a5a5u64, (of.entries * wqe_size / 8) as usize);
    let doorbell: &AtomicU32 = Box::leak(Box::new(AtomicU32::new(of.start)));
    let completed: &AtomicU64 = Box::leak(Box::new(AtomicU64::new((of.start & 0x7fff_ffff).into())));
    let spec = block::EndpointSpec {
        sq_buf: words as u64,
        sq_db: doorbell.as_ptr() as u64,
        sq_entries: of.entries,
        sq_size: of.entries,
        max_batch: of.max_batch,
        wqe_size,
        max_inline: if of.wide { 80 } else { 32 },
        rq_entries: 1,
        cq_buf: 0,
        cq_entries: 1,
        cq_entry_size: 32,
        // The cursors start at all 32 bits.
        completed: (completed.as_ptr() as u64, of.start.into()),
        errors: (if errors.is_null() { leak(0u64) } else { errors.cast_mut() } as u64, 0),
        signal: count.map(|count| (count.as_ptr() as u64, 0)),
        values: (of.value_base, if of.value_base == 0 { 0 } else { of.entries }),
    };
    let ring =
        Ring { words, spec_entries: of.entries as usize, wide: of.wide, doorbell, completed, queue: ptr::null() };
    (spec, ring)
}

/// Optional parts of a context; a null pointer means none, or a word of zeros.
pub struct Extras {
    pub emulated: Option<EmulatedSpec>,
    /// This rank.
    pub rank: usize,
    pub abort: *mut u32,
    /// The error counter of all endpoints.
    pub errors: *const u64,
}

pub const NO_EXTRAS: Extras = Extras { emulated: None, rank: 0, abort: ptr::null_mut(), errors: ptr::null() };

pub fn make_context(spec: &Spec) -> TestContext {
    make_with(spec, &NO_EXTRAS)
}

pub fn make_with(spec: &Spec, extras: &Extras) -> TestContext {
    // Counters and signals have counts of their own, so that a test can raise them.
    let count = || -> &'static AtomicU64 { Box::leak(Box::default()) };
    let counters: Vec<_> = (0..spec.n_counters).map(|_| count()).collect();
    let signals: Vec<_> = (0..spec.n_signals).map(|_| count()).collect();
    let counts = [None, None].into_iter().chain(counters.iter().chain(&signals).copied().map(Some));
    let (endpoints, mut rings): (Vec<_>, Vec<_>) =
        spec.endpoints.iter().zip(counts).map(|(of, count)| endpoint(of, extras.errors, count)).unzip();
    let progress_calls: &'static AtomicU64 = Box::leak(Box::default());
    let context = ContextSpec {
        endpoints,
        n_counters: spec.n_counters as usize,
        n_signals: spec.n_signals as usize,
        nranks: spec.nranks as usize,
        rank: extras.rank,
        rail: spec.rail,
        rails: spec.rail as usize + 1,
        targets: spec.targets.iter().map(|&Destination { ah, qpn, qkey }| Target { ah, qpn, qkey }).collect(),
        scratch: (spec.scratch.lkey, spec.scratch.addr),
        scratch_peers: spec.scratch.peers.clone(),
        value_lkey: spec.value_lkey,
        max_rdma_size: MAX_RDMA,
        emulated: extras.emulated.clone(),
        progress: Some(Progress { function: count_call, arg: ptr::from_ref(progress_calls).cast_mut().cast() }),
    };
    let block = BlockSpec {
        contexts: vec![context],
        layout: Layout::V1,
        policy: spec.policy,
        abort_flag: if extras.abort.is_null() { leak(0u32) } else { extras.abort } as u64,
        failure_offset: 0,
        wait_ns: NO_TIMEOUT_NS,
        isolates: false,
    };
    let plan = Plan::new(&block);
    let word = |at: u64| at..at + 8;
    let mut of_kernels = Vec::new();
    of_kernels.push(block.abort_flag..block.abort_flag + 4);
    for endpoint in &block.contexts[0].endpoints {
        let counters = [Some(endpoint.completed), Some(endpoint.errors), endpoint.signal].into_iter().flatten();
        of_kernels.extend(counters.map(|(at, _)| word(at)));
    }
    let base = leak_image(plan.size(), |base| plan.fill(&block, base).expect("a layout for these queues"));
    for (ring, cursors) in rings.iter_mut().zip(&plan.cursors()[0]) {
        ring.queue = base.wrapping_byte_add(cursors.queue()).cast();
    }
    // SAFETY: the handle has the header and the tables that the plugin makes; all of them are leaked.
    let context = unsafe { Context::from_handle(base.wrapping_byte_add(plan.handles_offset()), 0) }.unwrap();
    of_kernels.push(base as u64..base as u64 + plan.size() as u64);
    TestContext { context, rings, signals, counters, progress_calls, of_kernels }
}
