//! A device context in plain memory, made by the plugin's own code, with a card that takes no time.
//!
//! The doorbell of each queue *is* the low half of its completion counter, so ringing it for `n` requests completes
//! them. Nothing runs alongside the measured code, and the card adds no instruction to it.

use efa_dp_direct::queue::InitError;
use ferrogin_device::{Context, Status, Window};
use ferrogin_ffi::block::{
    BlockSpec, ContextSpec, EmulatedSpec, EndpointSpec, Image, Layout, Plan, RailSpec, WindowSpec,
};
use ferrogin_ffi::device::MrPeer;
use ferrogin_ffi::ext::{EmulatedPeer, Target};
use std::ffi::c_void;

/// Ranks of the context.
pub const RANKS: usize = 2;
/// The peer of every post.
pub const PEER: u32 = 1;
/// Slots of a ring.
const ENTRIES: u32 = 256;
const MAX_BATCH: u32 = 16;
/// Signals of a context for posts.
pub const SIGNALS: usize = 2;
const COUNTERS: usize = 1;
const VALUE: usize = 1;

/// How values travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// In 128-byte requests.
    Inline,
    /// Through slots of a pool, in 64-byte requests.
    Slots,
}

/// A context and everything its addresses point to.
pub struct Card {
    block: Box<[Line]>,
    handles_offset: usize,
    window: *mut c_void,
    /// The other memory that the block points to.
    _rest: Vec<Box<[Line]>>,
}

#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Line([u64; 16]);

/// The tables of a window on every rank.
pub fn window_spec() -> WindowSpec {
    let peer = MrPeer { remote_addr: 0x2000_0000, rkey: 0x66, pad: 0 };
    let rails = vec![RailSpec { lkey: 0x55, peers: vec![peer; RANKS] }];
    WindowSpec { local_addr: 0x1000_0000, rails }
}

/// A part of a card that [`block_spec`] requests memory for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A ring of work requests.
    Ring,
    /// A completion counter.
    Counter,
    /// The doorbell of the queue whose counter is at this address.
    Doorbell(u64),
    /// Anything else.
    Rest,
}

/// Describes a block of `contexts` contexts with `signals` signals each. `place` returns the address of fresh zeroed
/// memory.
pub fn block_spec(
    policy: u32,
    values: Values,
    (contexts, signals): (usize, usize),
    mut place: impl FnMut(Part, usize) -> u64,
) -> BlockSpec {
    let contexts = (0..contexts).map(|_| context_spec(values, signals, &mut place)).collect();
    BlockSpec {
        contexts,
        layout: Layout::V1,
        policy,
        abort_flag: place(Part::Rest, 8),
        failure_offset: 0,
        wait_ns: 0,
        isolates: false,
    }
}

fn context_spec(values: Values, signals: usize, place: &mut impl FnMut(Part, usize) -> u64) -> ContextSpec {
    let pool = place(Part::Rest, ENTRIES as usize * 8 * (2 + COUNTERS + signals));
    let endpoints = (0..2 + COUNTERS + signals).map(|i| {
        let wide = i == VALUE && values == Values::Inline;
        let slotted = values == Values::Slots && (i == VALUE || i >= 2 + COUNTERS);
        let counter = place(Part::Counter, 8);
        EndpointSpec {
            sq_buf: place(Part::Ring, ENTRIES as usize * 128),
            sq_db: place(Part::Doorbell(counter), 8),
            sq_entries: ENTRIES,
            sq_size: ENTRIES,
            max_batch: MAX_BATCH,
            wqe_size: if wide { 128 } else { 64 },
            max_inline: if wide { 80 } else { 32 },
            rq_entries: 1,
            cq_buf: place(Part::Rest, 64),
            cq_entries: 1,
            cq_entry_size: 64,
            completed: (counter, 0),
            errors: (place(Part::Rest, 8), 0),
            signal: (i >= 2 + COUNTERS).then(|| (place(Part::Rest, 8), 0)),
            values: if slotted { (pool + u64::from(ENTRIES) * 8 * i as u64, ENTRIES) } else { (0, 0) },
        }
    });
    let target = |i| Target { ah: 10 + i as u16, qpn: 20 + i as u16, qkey: 30 + i as u32 };
    ContextSpec {
        endpoints: endpoints.collect(),
        n_counters: COUNTERS,
        n_signals: signals,
        nranks: RANKS,
        rank: 0,
        rail: 0,
        rails: 1,
        targets: (0..(1 + signals) * RANKS).map(target).collect(),
        scratch: (0x88, 0x4000_0000),
        scratch_peers: vec![(0x5000_0000, 0x99); RANKS],
        value_lkey: 0x77,
        max_rdma_size: 1 << 30,
        emulated: None,
        progress: None,
    }
}

fn memory(bytes: usize) -> Box<[Line]> {
    vec![Line([0; 16]); bytes.div_ceil(size_of::<Line>())].into_boxed_slice()
}

/// Copies an image to `to`.
///
/// # Safety
/// The address has room for the image, and nothing else accesses it during the call.
unsafe fn copy(image: &Image, to: u64) {
    let bytes = image.bytes();
    // SAFETY: the caller vouches for the room.
    unsafe { (to as *mut u8).copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
}

impl Card {
    /// Makes a context with this `policy` (`POLICY_*`) and [`SIGNALS`] signals.
    ///
    /// # Errors
    /// The plugin's code refuses the layout.
    pub fn new(policy: u32, values: Values) -> Result<Card, InitError> {
        Self::with_signals(policy, values, SIGNALS)
    }

    /// Makes a context with [`SIGNALS`] emulated signals.
    ///
    /// # Errors
    /// The plugin's code refuses the layout.
    pub fn emulated(policy: u32, values: Values) -> Result<Card, InitError> {
        Self::make(policy, values, 0, true)
    }

    /// Makes a context with `signals` signals.
    ///
    /// # Errors
    /// The plugin's code refuses the layout.
    pub fn with_signals(policy: u32, values: Values, signals: usize) -> Result<Card, InitError> {
        Self::make(policy, values, signals, false)
    }

    fn make(policy: u32, values: Values, signals: usize, emulated: bool) -> Result<Card, InitError> {
        let mut rest = Vec::new();
        let mut place = |bytes: usize| {
            let mut lines = memory(bytes);
            let at = lines.as_mut_ptr() as u64;
            rest.push(lines);
            at
        };
        let mut spec = block_spec(policy, values, (1, signals), |part, bytes| match part {
            Part::Doorbell(counter) => counter,
            _ => place(bytes),
        });
        if emulated {
            let (words, n_signals) = (place(SIGNALS * 8), SIGNALS as u32);
            let peers = vec![EmulatedPeer { n_signals, generation: 1 }; RANKS];
            spec.contexts.iter_mut().for_each(|context| {
                context.emulated = Some(EmulatedSpec { words, n_signals, peers: peers.clone() });
            });
        }
        let tables = window_spec();
        let window = place(tables.size());
        // SAFETY: fresh memory of that size.
        unsafe { copy(&tables.fill(window), window) };

        let plan = Plan::new(&spec);
        let mut block = memory(plan.size());
        let base = block.as_mut_ptr() as u64;
        // SAFETY: fresh memory of that size.
        unsafe { copy(&plan.fill(&spec, base)?, base) };
        Ok(Card { handles_offset: plan.handles_offset(), block, window: window as *mut c_void, _rest: rest })
    }

    /// The array of device handles, as `createContext` would return it.
    pub fn handle(&self) -> *mut c_void {
        self.block.as_ptr().wrapping_byte_add(self.handles_offset).cast_mut().cast()
    }

    /// Opens the context through the device API.
    ///
    /// # Errors
    /// The device API refuses the handle.
    pub fn context(&self) -> Result<Context<'_>, Status> {
        // SAFETY: the plugin's code made the block, with its header; it lives as long as `self`.
        unsafe { Context::from_handle(self.handle(), 0) }
    }

    /// A window on every rank.
    pub fn window(&self) -> Window {
        Window(self.window)
    }
}
