//! A device context in plain memory, made by the plugin's own code, with a card that takes no time.
//!
//! The doorbell of each queue *is* the low half of its completion counter, so a doorbell for `n` requests completes them. No code
//! has to run beside the measured code, and the card adds no instruction to it.

use efa_dp_direct::queue::InitError;
use ferrogin_device::{Context, Status, Window};
use ferrogin_ffi::device::{MrHandle, MrPeer};
use ferrogin_ffi::ext::Target;
use nccl_gin_ferrogin::block::{BlockSpec, ContextSpec, EndpointSpec, Layout, Plan};
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

/// A context and all that its addresses point to.
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

/// A window's table for one rail.
#[repr(C)]
struct Table {
    head: MrHandle,
    peers: [MrPeer; RANKS],
}

fn memory(bytes: usize) -> Box<[Line]> {
    vec![Line([0; 16]); bytes.div_ceil(size_of::<Line>())].into_boxed_slice()
}

impl Card {
    /// A context with that `policy` (`POLICY_*`) and [`SIGNALS`].
    ///
    /// # Errors
    /// A layout that the plugin's code refuses.
    pub fn new(policy: u32, values: Values) -> Result<Card, InitError> {
        Self::with_signals(policy, values, SIGNALS)
    }

    /// A context with that number of signals.
    ///
    /// # Errors
    /// A layout that the plugin's code refuses.
    pub fn with_signals(policy: u32, values: Values, signals: usize) -> Result<Card, InitError> {
        let mut rest = Vec::new();
        let mut place = |bytes: usize| {
            let mut lines = memory(bytes);
            let at = lines.as_mut_ptr() as u64;
            rest.push(lines);
            at
        };
        let pool = place(ENTRIES as usize * 8 * (2 + COUNTERS + signals));
        let endpoints = (0..2 + COUNTERS + signals).map(|i| {
            let wide = i == VALUE && values == Values::Inline;
            let slotted = values == Values::Slots && (i == VALUE || i >= 2 + COUNTERS);
            let counter = place(8);
            EndpointSpec {
                sq_buf: place(ENTRIES as usize * 128),
                sq_db: counter,
                sq_entries: ENTRIES,
                sq_size: ENTRIES,
                max_batch: MAX_BATCH,
                wqe_size: if wide { 128 } else { 64 },
                max_inline: if wide { 80 } else { 32 },
                rq_entries: 1,
                cq_buf: place(64),
                cq_entries: 1,
                cq_entry_size: 64,
                completed: (counter, 0),
                errors: (place(8), 0),
                signal: (i >= 2 + COUNTERS).then(|| (place(8), 0)),
                values: if slotted { (pool + u64::from(ENTRIES) * 8 * i as u64, ENTRIES) } else { (0, 0) },
            }
        });
        let endpoints = endpoints.collect();
        let target = |i| Target { ah: 10 + i as u16, qpn: 20 + i as u16, qkey: 30 + i as u32 };
        let context = ContextSpec {
            endpoints,
            n_counters: COUNTERS,
            n_signals: signals,
            nranks: RANKS,
            rank: 0,
            rail: 0,
            targets: (0..(1 + signals) * RANKS).map(target).collect(),
            scratch: (0x88, 0x4000_0000),
            scratch_peers: vec![(0x5000_0000, 0x99); RANKS],
            value_lkey: 0x77,
            max_rdma_size: 1 << 30,
            progress: None,
        };
        let spec = BlockSpec { contexts: vec![context], layout: Layout::V1, policy, abort_flag: place(8) };
        let table = place(size_of::<Table>()) as *mut Table;
        let peers = [MrPeer { remote_addr: 0x2000_0000, rkey: 0x66, pad: 0 }; RANKS];
        let head = MrHandle { lkey: 0x55, nranks: RANKS as i32, local_addr: 0x1000_0000, peers: [] };
        // SAFETY: fresh memory of that size, aligned to a line.
        unsafe { table.write(Table { head, peers }) };
        let rails = place(8) as *mut *mut Table;
        // SAFETY: fresh memory of that size, aligned to a line.
        unsafe { rails.write(table) };

        let plan = Plan::new(&spec);
        let mut block = memory(plan.size());
        let base = block.as_mut_ptr();
        let image = plan.fill(&spec, base as u64)?;
        // SAFETY: the block has `size` bytes, and so has the image; both are ours.
        unsafe { base.cast::<u8>().copy_from_nonoverlapping(image.bytes().as_ptr().cast(), plan.size()) };
        Ok(Card { handles_offset: plan.handles_offset(), block, window: rails.cast(), _rest: rest })
    }

    /// The array of device handles, as `createContext` would give it.
    pub fn handle(&self) -> *mut c_void {
        self.block.as_ptr().wrapping_byte_add(self.handles_offset).cast_mut().cast()
    }

    /// The context, as the device API opens it.
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
