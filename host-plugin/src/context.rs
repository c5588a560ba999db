//! GIN contexts: endpoints on the rails, the peers' addresses, and the device block that describes both to kernels.

use crate::agent::Pulse;
use crate::agent::inbox::Inbox;
use crate::block::{BlockSpec, ContextSpec, EmulatedSpec, Layout, Plan};
use crate::comm::CollComm;
use crate::config::{Policy, Signals};
use crate::control::Step;
use crate::device::{self, DeviceBuffer, DeviceKind, Use};
use crate::endpoint::{COUNTER_STRIDE, CounterOffsets, Endpoint, Role, Start, floor_power_of_two};
use crate::error::Error;
use crate::fault::ErrorCounter;
use crate::log::first_time;
use crate::memory::{ContextMemory, MemoryLayout, RegisteredMemory};
use crate::metrics;
use crate::rail::{CounterBudget, Peers, QueueOptions, Rail};
use crate::watcher::{self, CqReader, Guard, Report, RingView, Watch, WatchedEndpoint};
use crate::{registry, trace};
use emulated::{Inboxes, SignalMemory};
use ferrogin_ffi::device::DevHandle;
use ferrogin_ffi::ext::{EmulatedPeer, MAX_TARGETS, POLICY_COMBINING, POLICY_LOCKED, Target};
use ferrogin_ffi::nccl::{GinConfigV14, NET_DEVICE_GIN_EFA_GDA, NetDeviceHandleV11};
use ferrogin_libfabric::progress::Progress;
use ferrogin_libfabric::{Info, bindings};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

pub mod emulated;
mod peers;
mod wire;

/// Requests in flight when NCCL passes queueDepth 0.
const DEPTH_DEFAULT: usize = 1024;
/// The limit of each number of signals, counters and contexts. No card has so many queue pairs.
const COUNT_MAX: i32 = 1 << 16;
/// The limit of the number of emulated signals.
const SIGNALS_MAX: i32 = 1 << 20;
/// Largest transfer of one request on EFA, even if the card reports more.
const RDMA_MAX: usize = 1 << 30;

/// The checked configuration of a `createContext`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Signals of each context that the card counts.
    pub n_signals: usize,
    /// Emulated signals of each context, in place of those.
    pub n_words: Option<usize>,
    /// Counters of each context.
    pub n_counters: usize,
    /// Contexts, at least one.
    pub n_contexts: usize,
    /// NCCL's queueDepth; 0 means the default.
    pub depth: usize,
    /// libfabric's traffic class, or 0.
    pub tclass: u32,
    /// Layout of the queue structs.
    pub layout: Layout,
    /// NCCL's backendVersion.
    pub backend_version: i32,
    /// Kernels post only to peers whose distance is a multiple of this. At least 1; 1 if it does not divide the ranks.
    pub rank_stride: usize,
}

/// A count of NCCL's configuration.
fn count_up_to(name: &str, value: i32, most: i32) -> Result<usize, Error> {
    let valid = (0..=most).contains(&value);
    valid.then_some(value as usize).ok_or_else(|| Error::Argument(format!("{name} = {value} is not in 0..={most}")))
}

impl Shape {
    /// Checks NCCL's configuration.
    ///
    /// # Errors
    /// A count is negative or above any card's limit; this plugin does not know the backend version.
    pub fn new(config: &GinConfigV14) -> Result<Self, Error> {
        let count = |name: &str, value: i32| count_up_to(name, value, COUNT_MAX);
        let layout = Layout::of(config.backend_version).ok_or_else(|| {
            Error::Usage(format!(
                "backendVersion {} is not known: this ferrogin supports 0 to 2 (kernels built with NCCL 2.31 and 2.32); \
                 install a newer ferrogin, or build the kernels with an older NCCL",
                config.backend_version
            ))
        })?;
        if config.queue_depth < 0 {
            return Err(Error::Argument(format!("queueDepth = {} is negative", config.queue_depth)));
        }
        // An InfiniBand traffic class carries the DSCP in its upper six bits.
        let tclass = match config.traffic_class {
            class @ 0..=255 => bindings::FI_TC_DSCP | (class as u32 >> 2),
            _ => 0,
        };
        let rank_stride = count("rankStride", config.rank_stride)?.max(1);
        Ok(Self {
            n_signals: count_up_to("nSignals", config.n_signals, SIGNALS_MAX)?,
            n_words: None,
            n_counters: count("nCounters", config.n_counters)?,
            n_contexts: count("nContexts", config.n_contexts)?.max(1),
            depth: config.queue_depth as usize,
            tclass,
            layout,
            backend_version: config.backend_version,
            rank_stride,
        })
    }

    /// True if kernels of `rank` may post to `peer`.
    fn reaches(&self, rank: usize, peer: usize) -> bool {
        rank.abs_diff(peer).is_multiple_of(self.rank_stride)
    }

    /// Endpoints of each context.
    fn endpoints(&self) -> usize {
        2 + self.n_counters + self.n_signals
    }

    /// Completion counters of each context.
    fn counters(&self) -> usize {
        2 + self.n_counters + 2 * self.n_signals
    }
}

/// The result of one `createContext`. Fields are dropped in this order, users before what they use.
pub struct Context {
    metrics: Mutex<Option<metrics::Guard>>,
    watch: Mutex<Option<Guard>>,
    handle: Box<NetDeviceHandleV11>,
    block: Option<Box<dyn DeviceBuffer>>,
    /// Of [`Plan::cursors`].
    cursors: Vec<Vec<[usize; 2]>>,
    contexts: Vec<OneContext>,
    /// Dropped before the memory of their words.
    inboxes: Option<Inboxes>,
    signal_memory: Option<SignalMemory>,
    /// By context, with emulated signals.
    signal_counts: Vec<Arc<metrics::source::Counts>>,
    /// One for each rail in use. Removed after the endpoints that post to them are closed.
    peers: Vec<Peers>,
    registered: Vec<RegisteredMemory>,
    memory: ContextMemory,
    budgets: Vec<CounterBudget>,
    layout: MemoryLayout,
    coll: Weak<CollComm>,
    rank: usize,
    nranks: usize,
}

// SAFETY: the raw pointer in the device handle is the only field that is not `Send`. The host never dereferences it: it is a
// device address that NCCL passes to kernels.
#[allow(unsafe_code)]
unsafe impl Send for Context {}
// SAFETY: the raw pointer in the device handle is the only field that is not `Sync`. The host never dereferences it, and
// nothing changes it while the context is shared.
#[allow(unsafe_code)]
unsafe impl Sync for Context {}

/// The parts of a context that [`Context::finish`] makes.
struct Ready {
    /// The address of the device handles in `block`.
    handles: *mut c_void,
    block: Box<dyn DeviceBuffer>,
    /// The counters' values before the first request, by context and endpoint.
    starts: Vec<Vec<Start>>,
}

/// One context of a `createContext`.
struct OneContext {
    endpoints: Vec<Endpoint>,
    /// At `[slot * nranks + peer]`.
    targets: Arc<[Target]>,
}

/// Infos that open a rail's endpoints, each with the queue depth.
struct RailInfo {
    /// For endpoints with 64-byte requests.
    narrow: (Info, usize),
    /// For the value endpoint, if it has 128-byte requests.
    wide: Option<(Info, usize)>,
}

impl RailInfo {
    fn find(coll: &CollComm, rail: &Rail, shape: &Shape) -> Result<Self, Error> {
        let failed = |what: &str| Error::fabric(format!("asking card {} for {what}", rail.name()));
        let wanted = if shape.depth == 0 { DEPTH_DEFAULT } else { shape.depth.next_power_of_two() };
        let query = &coll.plugin.query;
        let find = |wide: bool, depth: usize, tclass: u32| {
            rail.endpoint_info(query, QueueOptions { depth, wide, tclass, receives: 0 })
        };
        let limit = |info: &Info| floor_power_of_two(info.tx_size().clamp(1, 1 << 30) as u32) as usize;
        let depth = wanted.min(limit(&rail.info));
        if shape.depth != 0 && depth != shape.depth {
            crate::info!(
                "card {} has no queues of exactly queueDepth {}: they get {depth} requests",
                rail.name(),
                shape.depth
            );
        }
        let mut classes = tclass_choices(shape.tclass).into_iter();
        let (narrow, tclass) = loop {
            let tclass = classes.next().unwrap_or(0);
            // Some libfabrics refuse an unknown class, others ignore it and succeed.
            match find(false, depth, tclass) {
                Ok(info) if tclass == 0 || info.tclass() == tclass => break (info, tclass),
                Ok(_) => crate::trace!("libfabric ignores traffic class {tclass:#x}"),
                Err(error) if tclass == 0 => return Err(failed("queue pairs")(error)),
                Err(error) => crate::trace!("libfabric offers no queue pairs with traffic class {tclass:#x}: {error}"),
            }
        };
        if tclass != shape.tclass {
            let instead = if tclass == 0 { "the default class" } else { "the low-latency class" };
            crate::info!(
                "card {} does not know the requested traffic class {:#x}: its queues use {instead}",
                rail.name(),
                shape.tclass
            );
        }
        let wide = match shape.layout {
            Layout::V0 => None,
            // A queue of 128-byte requests has fewer slots. The card reports how many when the hints name no number.
            Layout::V1 => match find(true, 0, tclass) {
                Ok(info) => {
                    let depth = depth.min(limit(&info));
                    Some((find(true, depth, tclass).map_err(failed("wide queue pairs"))?, depth))
                }
                Err(error) => {
                    crate::trace!("libfabric offers no 128-byte requests: {error}");
                    if first_time(NARROW, &rail.name()) {
                        crate::warn!(
                            "card {} has no 128-byte requests: putValue of kernels built with NCCL 2.32 headers will fail; put, \
                             signal and get work, and so does all of ferrogin's own device code. Install a libfabric newer \
                             than 2.6.0 to use 128-byte requests",
                            rail.name()
                        );
                    }
                    None
                }
            },
        };
        Ok(Self { narrow: (narrow, depth), wide })
    }

    fn of(&self, role: Role) -> &(Info, usize) {
        match (role, &self.wide) {
            (Role::Value, Some(wide)) => wide,
            _ => &self.narrow,
        }
    }
}

/// The traffic classes to try for a requested class, best first. EFA knows only the low-latency class, which replaces expedited
/// forwarding (DSCP 46) and every higher DSCP.
fn tclass_choices(tclass: u32) -> Vec<u32> {
    let mut choices = vec![tclass];
    if tclass != 0 {
        let urgent = tclass & !bindings::FI_TC_DSCP >= 46;
        choices.extend(urgent.then_some(bindings::FI_TC_LOW_LATENCY));
        choices.push(0);
    }
    choices
}

const REUSED_SLOTS: &str = "NCCL 2.31 reuses value slots";
const NARROW: &str = "no wide requests";
const SHORT_IDS: &str = "no 64-bit request ids";

impl Context {
    /// Collective: builds the contexts.
    ///
    /// # Errors
    /// A card has too few counters or queues; another rank failed; the requested layout cannot express a queue.
    pub fn create(coll: &Arc<CollComm>, shape: &Shape) -> Result<Self, Error> {
        let mut span = trace::span("createContext", coll.rank);
        // The stride is a hint that all ranks follow alike.
        let stride = if coll.nranks.is_multiple_of(shape.rank_stride) { shape.rank_stride } else { 1 };
        if stride != shape.rank_stride {
            let (given, nranks) = (shape.rank_stride, coll.nranks);
            crate::info!(
                "rankStride {given} does not divide the {nranks} ranks: the plugin ignores it and reaches all ranks"
            );
        }
        let shape = &match coll.plugin.config.signals {
            Signals::Card => {
                count_up_to("nSignals", shape.n_signals as i32, COUNT_MAX)?;
                Shape { rank_stride: stride, ..*shape }
            }
            Signals::Emulated => Shape { rank_stride: stride, n_signals: 0, n_words: Some(shape.n_signals), ..*shape },
        };
        let (mut context, all) = coll.agree(Step::CreateContext, Self::build(coll, shape), |(_, own)| own.emit())?;
        let ready = Self::finish(coll, shape, &mut context.0, &all);
        let (ready, _) = coll.agree(Step::ContextReady, ready, |_| Vec::new())?;
        let mut context = context.0;
        context.handle.handle = ready.handles;
        context.block = Some(ready.block);
        context.add_to_metrics(coll, &ready.starts);
        let first = &context.contexts[0].endpoints;
        let addresses = context.peers.iter().map(|peers| peers.numbers().len()).sum::<usize>();
        span.note("contexts", shape.n_contexts as u64);
        span.note("endpoints", (shape.n_contexts * shape.endpoints()) as u64);
        span.note("addresses", addresses as u64);
        crate::info!(
            "rank {} of {}: {} context(s) of {} {} and {} counter(s): kernels on {}, provider {}, {} rail(s) on \
             card(s) {}, backendVersion {}, {} requests in flight, requests of {} bytes and for values of {}, completion \
             counters used {}, {addresses} peer addresses",
            coll.rank,
            coll.nranks,
            shape.n_contexts,
            shape.n_words.unwrap_or(shape.n_signals),
            if shape.n_words.is_some() { "emulated signal(s)" } else { "signal(s)" },
            shape.n_counters,
            coll.device.kind().name(),
            coll.plugin.config.provider.name(),
            coll.rails.len(),
            coll.rails.iter().map(|rail| rail.name()).collect::<Vec<_>>().join("+"),
            shape.backend_version,
            first[0].sq_size(),
            first[0].sq.entry_size,
            first[1].sq.entry_size,
            context.budgets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        );
        if shape.layout == Layout::V0 && first_time(REUSED_SLOTS, "") {
            crate::info!(
                "backendVersion {}: putValue of NCCL 2.31's own device code may deliver 0 in place of a value, because that code reuses a \
                 value slot when a later request has completed first. NCCL 2.32 and ferrogin's own headers have no such loss",
                shape.backend_version
            );
        }
        Ok(context)
    }

    /// Builds this rank's memory and endpoints, and the description of them for the other ranks.
    #[allow(unsafe_code)]
    fn build(coll: &Arc<CollComm>, shape: &Shape) -> Result<(Self, wire::RankContexts), Error> {
        let _span = trace::span("createContext: endpoints", coll.rank);
        let rails = &coll.rails;
        // Contexts take the rails in turn.
        let on_rail = |rail: usize| (shape.n_contexts + rails.len() - 1 - rail) / rails.len();
        let used: Vec<_> = rails.iter().enumerate().filter(|(i, _)| on_rail(*i) != 0).map(|(_, rail)| rail).collect();
        let budgets = used.iter().enumerate().map(|(i, rail)| rail.reserve_counters(on_rail(i) * shape.counters()));
        let budgets = budgets.collect::<Result<Vec<_>, _>>()?;
        let infos = used.iter().map(|rail| RailInfo::find(coll, rail, shape)).collect::<Result<Vec<_>, _>>()?;
        let layout = MemoryLayout {
            page: device::page_size(),
            endpoints: shape.n_contexts * shape.endpoints(),
            counters: shape.n_contexts * shape.counters(),
            slots: infos.iter().map(|info| info.narrow.1).max().unwrap_or(1),
        };
        let memory = ContextMemory::allocate(&*coll.device, layout)?;
        let registered = used.iter().map(|rail| RegisteredMemory::register(rail, &memory, layout));
        let registered = registered.collect::<Result<Vec<_>, _>>()?;

        let signal_memory =
            shape.n_words.map(|words| SignalMemory::allocate(coll, &used, (shape.n_contexts, words))).transpose()?;

        let (mut contexts, mut parts, mut inboxes) = (Vec::new(), Vec::new(), Vec::new());
        let (mut completed, mut errors) = (layout.completed(), COUNTER_STRIDE);
        for id in 0..shape.n_contexts {
            let at = id % rails.len();
            let (rail, info) = (&rails[at], &infos[at]);
            let mut endpoints = Vec::with_capacity(shape.endpoints());
            for role in Role::all(shape.n_counters, shape.n_signals) {
                let (info, depth) = info.of(role);
                let offsets = CounterOffsets { completed, errors };
                completed += COUNTER_STRIDE * if matches!(role, Role::Signal(_)) { 2 } else { 1 };
                errors += COUNTER_STRIDE;
                let kind = (coll.plugin.config.provider, coll.plugin.config.signals);
                // SAFETY: `Context` drops its endpoints before its memory (field order). `completed` and `errors` advance
                // with each endpoint, so no two counters share memory.
                let endpoint = unsafe {
                    Endpoint::open(rail, &*coll.device, kind, (role, info, *depth), memory.counters(), offsets)
                };
                let endpoint = endpoint?;
                if shape.layout == Layout::V1 && !endpoint.request_ids_64() && first_time(SHORT_IDS, &rail.name()) {
                    crate::info!(
                        "card {} has no 64-bit request ids (libfabric 2.6 never reports them); the device code of NCCL and of \
                         ferrogin works without, since it uses 16 bits and leaves the others 0",
                        rail.name()
                    );
                }
                endpoints.push(endpoint);
            }
            let targets = endpoints.iter().filter(|e| matches!(e.role, Role::Data | Role::Signal(_)));
            let mut addresses = targets.map(Endpoint::address).collect::<Result<Vec<_>, _>>()?;
            let mut signals = EmulatedPeer::default();
            if let (Some(memory), Some(words)) = (&signal_memory, shape.n_words) {
                let inbox = memory.open(coll, at, id)?;
                addresses = vec![inbox.address()?];
                signals = EmulatedPeer { n_signals: words as u32, generation: inbox.generation().bits().into() };
                inboxes.push(inbox);
            }
            let scratch = (memory.card.device_address(), registered[at].scratch_keys.1);
            let part = wire::PeerContext::new(scratch, signals, &addresses).ok_or_else(|| {
                Error::Usage(format!("card {} gave endpoints of one card several GIDs: please report it", rail.name()))
            })?;
            parts.push(part);
            contexts.push(OneContext { endpoints, targets: Arc::default() });
        }
        let signal_counts = inboxes.iter().map(Inbox::counts).collect();
        let inboxes = shape.n_words.map(|_| Inboxes::serve(inboxes)).transpose()?;
        let handle = NetDeviceHandleV11 {
            net_device_type: NET_DEVICE_GIN_EFA_GDA,
            net_device_version: shape.backend_version,
            handle: std::ptr::null_mut(),
            size: size_of::<DevHandle>(),
            needs_proxy_progress: 0,
        };
        let context = Self {
            metrics: Mutex::new(None),
            watch: Mutex::new(None),
            handle: Box::new(handle),
            block: None,
            cursors: Vec::new(),
            contexts,
            inboxes,
            signal_memory,
            signal_counts,
            peers: Vec::new(),
            registered,
            memory,
            budgets,
            layout,
            coll: Arc::downgrade(coll),
            rank: coll.rank,
            nranks: coll.nranks,
        };
        Ok((context, wire::RankContexts { contexts: parts }))
    }

    /// Adds the contexts to FERROGIN_METRICS. `starts` are the first values of the counters, by context and endpoint.
    #[allow(unsafe_code)]
    fn add_to_metrics(&mut self, coll: &CollComm, starts: &[Vec<Start>]) {
        let Some(of_comm) = &coll.metrics else { return };
        let mut sources = Vec::with_capacity(self.contexts.len());
        for (id, one) in self.contexts.iter().enumerate() {
            let block = self.block.as_ref().and_then(|block| block.host_address());
            let mut endpoints = Vec::with_capacity(one.endpoints.len());
            for ((endpoint, cursor), start) in one.endpoints.iter().zip(&self.cursors[id]).zip(&starts[id]) {
                let words = metrics::source::Words {
                    cursor: block.map(|base| cursor.map(|offset| base.wrapping_add(offset).cast_const().cast())),
                    ..endpoint.words(self.memory.counters(), *start)
                };
                // SAFETY: the layouts of block and memory align the words. `self` drops the guard of the metrics before both.
                endpoints.push(unsafe { metrics::source::Endpoint::new(endpoint.role.into(), words) });
            }
            let rail = &coll.rails[id % coll.rails.len()];
            let emulated = self.signal_counts.get(id).cloned();
            sources.push((rail.index, rail.name(), endpoints, emulated));
        }
        // SAFETY: `self` drops the guard before the block and the memory: it is the first field, and `close` drops it earlier.
        let guard = unsafe { of_comm.contexts(sources) };
        *self.metrics.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(guard);
    }

    /// Resolves the other ranks' addresses and fills the device block.
    fn finish(coll: &CollComm, shape: &Shape, context: &mut Self, all: &[Vec<u8>]) -> Result<Ready, Error> {
        let mut span = trace::span("createContext: peers", coll.rank);
        let inserted = || coll.rails.iter().map(|rail| rail.av.insertions()).sum::<u64>();
        let inserted_before = inserted();
        let parts = all.iter().enumerate().map(|(rank, bytes)| {
            let part = wire::RankContexts::parse(bytes).filter(|part| part.contexts.len() == shape.n_contexts);
            part.ok_or_else(|| {
                Error::Usage(format!(
                    "rank {rank} creates another number of contexts than the {} of rank {}: pass the same nContexts on all \
                     ranks",
                    shape.n_contexts, coll.rank
                ))
            })
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        context.peers = peers::resolve(coll, shape, &mut context.contexts, &parts)?;
        let layout = context.layout;
        let mut specs = Vec::with_capacity(shape.n_contexts);
        for (id, one) in context.contexts.iter().enumerate() {
            let at = id % coll.rails.len();
            let rail = &coll.rails[at];
            if one.targets.len() >= MAX_TARGETS {
                return Err(Error::Usage(format!(
                    "{} targets, one for each rank and signal: a context has fewer than {MAX_TARGETS}; create it with fewer \
                     signals",
                    one.targets.len()
                )));
            }
            let memory = context.memory.counters();
            let base = context.memory.card.device_address();
            let mut endpoints = Vec::with_capacity(one.endpoints.len());
            for (e, endpoint) in one.endpoints.iter().enumerate() {
                // The value endpoint and the signal endpoints post values: inline in 128-byte requests, else from the pool.
                let pooled = match endpoint.role {
                    Role::Value => !endpoint.wide(),
                    Role::Signal(_) => true,
                    Role::Data | Role::Counter(_) => false,
                };
                let slice = base + layout.value_slice(id * shape.endpoints() + e) as u64;
                endpoints.push(endpoint.spec(memory, if pooled { slice } else { 0 })?);
            }
            let registered = &context.registered[at];
            specs.push(ContextSpec {
                endpoints,
                n_counters: shape.n_counters,
                n_signals: shape.n_signals,
                nranks: coll.nranks,
                rank: coll.rank,
                rail: rail.index,
                rails: coll.rails.len(),
                targets: one.targets.clone(),
                scratch: (registered.scratch_keys.0, base),
                scratch_peers: parts.iter().map(|part| part.contexts[id].scratch).collect(),
                value_lkey: registered.values_lkey,
                max_rdma_size: rail.info.max_msg_size().clamp(1, RDMA_MAX) as u32,
                emulated: context.signal_memory.as_ref().map(|memory| EmulatedSpec {
                    words: memory.words(id),
                    n_signals: parts[coll.rank].contexts[id].signals.n_signals,
                    peers: parts.iter().map(|part| part.contexts[id].signals).collect(),
                }),
                progress: progress_for(coll.device.kind(), || rail.domain.progress()),
            });
        }
        span.note("av_insertions", inserted() - inserted_before);
        let starts = specs.iter().map(|context| context.endpoints.iter().map(Start::of).collect()).collect();
        let spec = BlockSpec {
            contexts: specs,
            layout: shape.layout,
            policy: match coll.plugin.config.policy {
                Policy::Combining => POLICY_COMBINING,
                Policy::Locked => POLICY_LOCKED,
            },
            abort_flag: context.memory.shared.device_address(),
        };
        let plan = Plan::new(&spec);
        let block = coll.device.allocate(plan.size(), Use::Tables)?;
        let image = plan.fill(&spec, block.device_address());
        let image = image.map_err(|source| Error::Queue { backend_version: shape.backend_version, source })?;
        block.write(0, image.bytes())?;
        context.cursors = plan.cursors();
        let handles = (block.device_address() + plan.handles_offset() as u64) as *mut c_void;
        Ok(Ready { handles, block, starts })
    }

    /// The device handle for NCCL, valid until the context is dropped.
    pub fn device_handle(&self) -> *mut NetDeviceHandleV11 {
        std::ptr::from_ref(&*self.handle).cast_mut()
    }

    /// The requests that kernels have posted and the card has not completed, on all endpoints.
    ///
    /// # Errors
    /// The device cannot read its memory.
    pub fn outstanding(&self) -> Result<u64, Error> {
        let Some(block) = &self.block else { return Ok(0) };
        let read = |offset: usize| {
            let mut bytes = [0; 4];
            block.read(offset, &mut bytes).map(|()| u32::from_le_bytes(bytes))
        };
        let mut outstanding = 0;
        for (one, cursors) in self.contexts.iter().zip(&self.cursors) {
            for (endpoint, [next, pending]) in one.endpoints.iter().zip(cursors) {
                // The count is read first, so that it is not ahead of the cursor. Both wrap at 2^31.
                let completed = endpoint.completed(self.memory.counters())? as u32;
                let posted = read(*next)?.wrapping_add(read(*pending)?);
                outstanding += u64::from(posted.wrapping_sub(completed) & (u32::MAX >> 1));
            }
        }
        Ok(outstanding)
    }

    /// Starts watching the context's queues. `handle` is NCCL's handle of the context.
    ///
    /// # Errors
    /// The watcher's thread does not start.
    #[allow(unsafe_code)]
    pub fn watch(&self, handle: *mut c_void) -> Result<(), Error> {
        let Some(abort) = self.memory.shared.host_address() else {
            return Err(Error::Usage(
                "the device's memory for error counters has no host address: please report it".to_owned(),
            ));
        };
        let (mut endpoints, mut counters) = (Vec::new(), Vec::new());
        for (id, one) in self.contexts.iter().enumerate() {
            for endpoint in &one.endpoints {
                // SAFETY: the counter lies 8-byte aligned in `self.memory`, and only the card writes it. Its readers end
                // earlier: the guard in `self.watch` is dropped before the memory, and the registry forgets the counters
                // when it removes NCCL's handle, before it drops its reference to the context.
                let errors = unsafe { ErrorCounter::new(endpoint.errors(self.memory.counters())) };
                counters.push(errors);
                let (cq, sq) = (endpoint.cq, endpoint.sq);
                endpoints.push(WatchedEndpoint {
                    name: (id, endpoint.role),
                    // SAFETY: the ring stays mapped until the endpoint is dropped, after the guard in `self.watch`. The ring
                    // holds no completion: kernels get the context only after this function.
                    cq: unsafe { CqReader::new(cq.buffer, cq.entry_size, cq.num_entries) },
                    errors,
                    ring: endpoint.host_ring.then_some(RingView {
                        buffer: sq.buffer,
                        entry_size: sq.entry_size as usize,
                        entries: sq.num_entries as usize,
                    }),
                    context: id,
                });
            }
        }
        let watch = Watch {
            handle: handle as usize,
            rank: self.rank,
            nranks: self.nranks,
            endpoints,
            targets: self.contexts.iter().map(|one| one.targets.clone()).collect(),
            abort: abort.cast(),
            report: Report::Clean,
            agent: self.inboxes.as_ref().map(|inboxes| (Pulse::new(Instant::now()), inboxes.served())),
        };
        let guard =
            watcher::watch(watch).map_err(|source| Error::System { call: "starting the watcher's thread", source })?;
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(guard);
        registry::set_error_counters(handle, counters)?;
        Ok(())
    }

    /// Stops the watch and removes the context from its communicator. Dropping the last reference closes the endpoints.
    pub fn close(&self, handle: *mut c_void) {
        let _span = trace::span("destroyContext", self.rank);
        drop(self.metrics.lock().unwrap_or_else(PoisonError::into_inner).take());
        drop(self.watch.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(coll) = self.coll.upgrade() {
            coll.contexts.take(handle);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Metrics and watch end first, even if another thread left a lock poisoned.
        drop(self.metrics.lock().unwrap_or_else(PoisonError::into_inner).take());
        drop(self.watch.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// The function of the handle by which a waiting thread makes the card progress: the provider's, if it offers one. A GPU cannot call
/// a function of the host.
fn progress_for(device: DeviceKind, offered: impl FnOnce() -> Option<Progress>) -> Option<Progress> {
    if device == DeviceKind::Cpu { offered() } else { None }
}

#[cfg(test)]
mod tests;
