//! Contexts over plain memory, built by hand and laid out as `createContext` does.
// The loom models have no contexts.
#![cfg(not(loom))]
#![allow(unsafe_code, missing_docs)]

use efa_dp_direct::queue::{QpV0, SqV0, WqV0};
use efa_dp_direct::wqe::words::{WqeTemplate, phase_scale};
use efa_dp_direct::wqe::{Destination, Hints};
use ferrogin_device::{Context, Window};
use ferrogin_ffi::device::{CounterHandle, DevHandle, EndpointHandle, MrHandle, MrPeer};
use ferrogin_ffi::ext::{
    ContextExt, EmulatedSignals, EndpointConfig, EndpointExt, HEADER_MAGIC, HEADER_VERSION, HandleHeader,
    POLICY_COMBINING, PostingState, QueueMemory, RingConfig, Routes, STATE_RUNG_SHIFT, TargetWords, VALUE_INLINE,
    VALUE_NONE, VALUE_POOL, VALUE_STRIDE, ValueConfig, used_words, window_handle_offset,
};
use std::ffi::c_void;
use std::mem::{MaybeUninit, offset_of, zeroed};
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

    /// The bytes of one slot.
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

    /// The cursors that NCCL's device code sees: reserved, released, rung.
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

#[repr(C)]
struct Block {
    header: HandleHeader,
    dev: DevHandle,
}

fn value_path(policy: u32, endpoint: &EndpointSpec) -> u32 {
    match (policy == POLICY_COMBINING, endpoint.wide, endpoint.value_base != 0) {
        (true, true, _) => VALUE_INLINE,
        (true, _, true) => VALUE_POOL,
        _ => VALUE_NONE,
    }
}

/// Offset of a window's handle for `rail`, the last one.
fn handle_offset(rail: u32, nranks: usize) -> usize {
    window_handle_offset(rail as usize + 1, rail as usize, nranks)
}

/// Writes a handle and its peers.
fn write_handle(spec: &WindowSpec, handle: *mut MrHandle) {
    let head = MrHandle { lkey: spec.lkey, nranks: spec.peers.len() as i32, local_addr: spec.addr, peers: [] };
    // SAFETY: callers leak memory with room for the handle and its peers.
    unsafe { handle.write(head) };
    let peers = handle.wrapping_add(1).cast::<MrPeer>();
    for (i, &(remote_addr, rkey)) in spec.peers.iter().enumerate() {
        // SAFETY: callers leak memory with room for `spec.peers.len()` entries after the handle.
        unsafe { peers.wrapping_add(i).write(MrPeer { remote_addr, rkey, pad: 0 }) };
    }
}

/// Makes a window as `regMrSym` does: one pointer per rail, all null except that for `rail`, then the handles.
pub fn window(spec: &WindowSpec, rail: u32) -> Window {
    let bytes = handle_offset(rail + 1, spec.peers.len());
    let window = leak_all(0u128, bytes.div_ceil(16));
    let handle = window.wrapping_byte_add(handle_offset(rail, spec.peers.len())).cast();
    write_handle(spec, handle);
    let rails = window.cast::<*mut MrHandle>();
    // SAFETY: the window was allocated above, and begins with `rail + 1` pointers.
    unsafe { rails.wrapping_add(rail as usize).write(handle) };
    Window(rails.cast())
}

/// Makes an endpoint, and the handle that NCCL's device code would use.
fn endpoint(
    spec: &Spec,
    (of, index): (&EndpointSpec, u32),
    context: *const ContextExt,
) -> (EndpointExt, Ring, *mut CounterHandle) {
    let wqe_size = if of.wide { 128 } else { 64 };
    // Poison: a request must overwrite all bytes of its slot.
    let words = leak_all(0xa5a5_a5a5_a5a5_a5a5u64, (of.entries * wqe_size / 8) as usize);
    let start = u64::from(of.start);
    let doorbell: &AtomicU32 = Box::leak(Box::new(AtomicU32::new(of.start)));
    let completed: &AtomicU64 = Box::leak(Box::new(AtomicU64::new(start & 0x7fff_ffff)));
    // SAFETY: the struct consists of numbers and pointers, for which zero is valid.
    let mut qp: QpV0 = unsafe { zeroed() };
    qp.sq = SqV0 {
        wq: WqV0 {
            max_wqes: of.entries,
            queue_mask: of.entries - 1,
            queue_size_shift: of.entries.ilog2(),
            max_batch: of.max_batch,
            wqes_posted: of.start,
            wqes_completed: of.start,
            pc: of.start,
            // The flush barrier, until the first flush.
            phase: of.start as i32,
            buf: words.cast(),
            db: doorbell.as_ptr().cast(),
            ..qp.sq.wq
        },
        ..qp.sq
    };
    // SAFETY: the struct consists of numbers and pointers, for which zero is valid.
    let base = EndpointHandle { submitted_count: start, sq_size: of.entries, ..unsafe { zeroed() } };
    let handle = leak(CounterHandle { base, cntr_value: completed.as_ptr().cast(), cntr_offset: 0 });
    let submitted = handle.cast::<EndpointHandle>().wrapping_byte_add(offset_of!(EndpointHandle, submitted_count));
    let config = EndpointConfig {
        ring: RingConfig {
            sq_buf: words.cast(),
            sq_db: doorbell.as_ptr().cast(),
            ring_mask: of.entries * wqe_size - 1,
            wqe_size,
            phase_bit: of.entries,
            phase_scale: phase_scale(of.entries),
            submitted: submitted.cast(),
            value_base: of.value_base,
        },
        values: ValueConfig {
            mask: (of.entries - 1) * VALUE_STRIDE,
            lkey: spec.value_lkey,
            path: value_path(spec.policy, of),
            slots: if of.value_base == 0 { 0 } else { of.entries },
        },
        handle: handle.cast(),
        sq_size: of.entries,
        max_batch: of.max_batch,
        completed: completed.as_ptr().cast(),
        errors: leak(0u64).cast_const(),
        errors_base: 0,
        write_inline: if of.wide { 80 } else { 0 },
        index,
        context,
        reserved: 0,
    };
    // SAFETY: the struct consists of atomic integers, for which zero is valid.
    let mut posting: PostingState = unsafe { zeroed() };
    posting.state = AtomicU64::new(start << STATE_RUNG_SHIFT);
    // For a barrier other than the first, as the plugin does.
    posting.bound = AtomicU64::new((start << 32 | start).wrapping_sub(1 << 32));
    posting.barrier = AtomicU32::new(of.start);
    let queue = QueueMemory(std::array::from_fn(|_| AtomicU64::new(0)));
    let ext = EndpointExt { config, posting, queue };
    // SAFETY: `QueueMemory` is larger than a `QpV0` and has its alignment, and no other thread has `ext` yet.
    unsafe { ptr::from_ref(&ext.queue).cast_mut().cast::<QpV0>().write(qp) };
    let ring =
        Ring { words, spec_entries: of.entries as usize, wide: of.wide, doorbell, completed, queue: ptr::null() };
    (ext, ring, handle)
}

/// Optional parts of a context; a null pointer means none, or a word of zeros.
pub struct Extras {
    pub emulated: *const EmulatedSignals,
    pub abort: *mut u32,
    /// The error counter of all endpoints.
    pub errors: *const u64,
}

pub const NO_EXTRAS: Extras = Extras { emulated: ptr::null(), abort: ptr::null_mut(), errors: ptr::null() };

pub fn make_context(spec: &Spec) -> TestContext {
    make_with(spec, &NO_EXTRAS)
}

pub fn make_with(spec: &Spec, extras: &Extras) -> TestContext {
    let context: *mut ContextExt = leak(MaybeUninit::<ContextExt>::uninit()).cast();
    let (mut exts, mut rings, mut handles) = (Vec::new(), Vec::new(), Vec::new());
    for (of, index) in spec.endpoints.iter().zip(0..) {
        let (mut ext, ring, handle) = endpoint(spec, (of, index), context);
        if !extras.errors.is_null() {
            ext.config.errors = extras.errors;
        }
        exts.push(ext);
        rings.push(ring);
        handles.push(handle);
    }
    let counted = |handle: *mut CounterHandle| {
        let count: &'static AtomicU64 = Box::leak(Box::new(AtomicU64::new(0)));
        // SAFETY: the handle is leaked, and no other thread has it yet.
        unsafe { (*handle).cntr_value = count.as_ptr() };
        count
    };
    let first_signal = 2 + spec.n_counters as usize;
    let counters = handles[2..first_signal].iter().map(|&handle| counted(handle)).collect();
    let signals = handles[first_signal..].iter().map(|&handle| counted(handle)).collect();
    let endpoints = exts.leak().as_mut_ptr();
    for (i, ring) in rings.iter_mut().enumerate() {
        let queue = endpoints.wrapping_add(i).wrapping_byte_add(offset_of!(EndpointExt, queue));
        ring.queue = queue.wrapping_byte_add(efa_dp_direct::queue::SQ_WQ_OFFSET).cast();
    }
    let targets: Vec<TargetWords> = spec
        .targets
        .iter()
        .enumerate()
        .map(|(i, &dest)| {
            let peer = (i % spec.nranks as usize) as u16;
            let WqeTemplate { head, second, third } = WqeTemplate::new(peer, dest, Hints::BURST_PPS_SENSITIVE);
            TargetWords { head, second, third }
        })
        .collect();
    let nranks = spec.nranks as usize;
    // SAFETY: the struct consists of numbers and pointers, for which zero is valid.
    let mut block: Block = unsafe { zeroed() };
    let dev = &mut block.dev;
    dev.n_counters = spec.n_counters as i32;
    dev.n_signals = spec.n_signals as i32;
    dev.nranks = spec.nranks as i32;
    dev.counter_handles = handles[2..first_signal].to_vec().leak().as_mut_ptr().cast();
    dev.signal_handles = handles[first_signal..].to_vec().leak().as_mut_ptr().cast();
    dev.scratch_lkey = spec.scratch.lkey;
    dev.scratch_local_addr = spec.scratch.addr;
    let (addrs, rkeys): (Vec<u64>, Vec<u32>) = spec.scratch.peers.iter().copied().unzip();
    dev.scratch_remote_addrs = addrs.leak().as_mut_ptr();
    dev.scratch_remote_rkeys = rkeys.leak().as_mut_ptr();
    block.header.magic = HEADER_MAGIC;
    block.header.version = HEADER_VERSION;
    block.header.n_contexts = 1;
    block.header.contexts = context;
    let dev: *mut DevHandle = leak(block).wrapping_byte_add(offset_of!(Block, dev)).cast();
    let scratch = leak_all(0u128, 1 + nranks).cast::<MrHandle>();
    write_handle(&spec.scratch, scratch);
    let (summaries, leaves) = used_words(spec.endpoints.len() as u32);
    let progress_calls: &'static AtomicU64 = Box::leak(Box::default());
    // SAFETY: the context was leaked above, and no other thread has it yet.
    unsafe {
        context.write(ContextExt {
            routes: Routes {
                endpoints,
                last_slot: (targets.len() / nranks) as u32 - 1,
                targets: targets.leak().as_ptr(),
                nranks: spec.nranks,
                n_counters: spec.n_counters,
                n_signals: spec.n_signals,
                fast_put_limit: if spec.policy == POLICY_COMBINING { MAX_RDMA.into() } else { 0 },
                window_peers: (handle_offset(spec.rail, nranks) + size_of::<MrHandle>()) as u64,
                scratch,
                dev,
            },
            policy: spec.policy,
            n_endpoints: spec.endpoints.len() as u32,
            max_rdma_size: MAX_RDMA,
            failure_offset: 0,
            abort_flag: if extras.abort.is_null() { leak(0) } else { extras.abort },
            timeout_ns: leak(NO_TIMEOUT_NS),
            progress: Some(count_call),
            progress_arg: ptr::from_ref(progress_calls).cast_mut().cast(),
            used: leak_all(0, summaries + leaves),
            emulated: extras.emulated,
        })
    };
    // SAFETY: the handle has the header and the tables that the plugin makes; all of them are leaked.
    let context = unsafe { Context::from_handle(dev.cast(), 0) }.unwrap();
    TestContext { context, rings, signals, counters, progress_calls }
}
