//! GIN contexts: endpoints on the rails, the peers' addresses, and the device block that describes it all to kernels.

use crate::block::{BlockSpec, ContextSpec, Layout, Plan};
use crate::comm::CollComm;
use crate::config::Policy;
use crate::control::Step;
use crate::device::{self, Device, DeviceBuffer, DeviceKind, Use};
use crate::endpoint::{COUNTER_STRIDE, Cells, CounterMemory, Endpoint, Role, floor_power_of_two};
use crate::error::Error;
use crate::fault::ErrorCounter;
use crate::rail::{CounterBudget, Peer, QueueWish, Rail};
use crate::watcher::{self, CqReader, Guard, Report, RingView, Watch, WatchedEndpoint};
use crate::{registry, trace, window};
use ferrogin_ffi::device::DevHandle;
use ferrogin_ffi::ext::{POLICY_COMBINING, POLICY_LOCKED, Target, VALUE_STRIDE};
use ferrogin_ffi::nccl::{GinConfigV14, NET_DEVICE_GIN_EFA_GDA, NetDeviceHandleV11};
use ferrogin_libfabric::{Info, MemoryRegion, Region, bindings};
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError, Weak};

mod proof;
mod wire;

pub use proof::prove;

/// Requests in flight when NCCL leaves it to the plugin.
const DEPTH_DEFAULT: usize = 1024;
/// More than any card has queue pairs for.
const COUNT_MAX: i32 = 1 << 16;
/// One op's limit on EFA, whatever the card says above it.
const RDMA_MAX: usize = 1 << 30;

/// What `createContext` asks for, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Of each context.
    pub n_signals: usize,
    /// Of each context.
    pub n_counters: usize,
    /// At least one.
    pub n_contexts: usize,
    /// 0 is the default.
    pub depth: usize,
    /// libfabric's traffic class, or 0.
    pub tclass: u32,
    /// Of the queue structs.
    pub layout: Layout,
    /// As NCCL gave it.
    pub backend_version: i32,
    /// Only peers that are a multiple of this away are posted to. At least 1; 1 where it does not divide the ranks.
    pub rank_stride: usize,
}

impl Shape {
    /// Checks NCCL's numbers.
    ///
    /// # Errors
    /// Negative or absurd counts; a backend version that this plugin does not know.
    pub fn new(config: &GinConfigV14) -> Result<Self, Error> {
        let count = |name: &str, value: i32| {
            let valid = (0..=COUNT_MAX).contains(&value);
            valid.then_some(value as usize).ok_or_else(|| Error::Argument(format!("{name} = {value} cannot be")))
        };
        let layout = Layout::of(config.backend_version).ok_or_else(|| {
            Error::Usage(format!(
                "backendVersion {} is not known: this ferrogin builds versions 0 to 2 (kernels built with NCCL 2.31 and \
                 2.32); install a newer ferrogin, or build the kernels with an older NCCL",
                config.backend_version
            ))
        })?;
        if config.queue_depth < 0 {
            return Err(Error::Argument(format!("queueDepth = {} cannot be", config.queue_depth)));
        }
        // An InfiniBand traffic class carries the DSCP in its upper six bits.
        let tclass = match config.traffic_class {
            class @ 0..=255 => bindings::FI_TC_DSCP | (class as u32 >> 2),
            _ => 0,
        };
        let rank_stride = count("rankStride", config.rank_stride)?.max(1);
        Ok(Self {
            n_signals: count("nSignals", config.n_signals)?,
            n_counters: count("nCounters", config.n_counters)?,
            n_contexts: count("nContexts", config.n_contexts)?.max(1),
            depth: config.queue_depth as usize,
            tclass,
            layout,
            backend_version: config.backend_version,
            rank_stride,
        })
    }

    /// Whether this rank may post to `peer`, as far as it was told.
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

/// One `createContext`. Fields are in the order in which they must end.
pub struct Context {
    watch: Mutex<Option<Guard>>,
    handle: Box<NetDeviceHandleV11>,
    block: Option<Box<dyn DeviceBuffer>>,
    contexts: Vec<OneContext>,
    regions: Vec<RailRegions>,
    memory: Memory,
    budgets: Vec<CounterBudget>,
    sections: Sections,
    coll: Weak<CollComm>,
    rank: usize,
    nranks: usize,
}

// SAFETY: the device handle's pointer is a number for kernels; everything else is safe to share by itself.
#[allow(unsafe_code)]
unsafe impl Send for Context {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Context {}

/// One of the contexts.
struct OneContext {
    endpoints: Vec<Endpoint>,
    /// Closed after the endpoints that post to them.
    peers: Vec<Peer>,
    targets: Vec<Target>,
}

/// Memory that cards and kernels share.
struct Memory {
    /// Scratch, then value slots, then completion counters.
    card: Box<dyn DeviceBuffer>,
    /// The abort flag, then error counters.
    shared: Box<dyn DeviceBuffer>,
}

impl Memory {
    fn allocate(device: &dyn Device, sections: Sections) -> Result<Self, Error> {
        Ok(Self {
            card: device.allocate(sections.card_len(), Use::Card)?,
            shared: device.allocate(sections.shared_len(), Use::Shared)?,
        })
    }

    fn counters(&self) -> CounterMemory<'_> {
        CounterMemory { card: &*self.card, shared: &*self.shared }
    }
}

/// Where the parts of [`Memory`] are.
#[derive(Debug, Clone, Copy)]
struct Sections {
    /// Bytes of a page: regions begin on one. The scratch target has the first; writes to it carry nothing.
    page: usize,
    endpoints: usize,
    counters: usize,
    /// Value slots of each endpoint: as many as the deepest queue has requests.
    slots: usize,
}

impl Sections {
    fn values(&self) -> usize {
        self.page
    }

    fn values_len(&self) -> usize {
        self.endpoints * self.slots * VALUE_STRIDE as usize
    }

    fn completed(&self) -> usize {
        (self.values() + self.values_len()).next_multiple_of(self.page)
    }

    fn card_len(&self) -> usize {
        self.completed() + self.counters * COUNTER_STRIDE
    }

    /// The abort flag has the first line.
    fn shared_len(&self) -> usize {
        (1 + self.endpoints) * COUNTER_STRIDE
    }

    fn value_slice(&self, endpoint: usize) -> usize {
        self.values() + endpoint * self.slots * VALUE_STRIDE as usize
    }
}

/// What a rail knows of [`Memory`]: regions and their keys.
struct RailRegions {
    _scratch: MemoryRegion,
    _values: MemoryRegion,
    /// Local and remote.
    scratch_keys: (u32, u32),
    values_lkey: u32,
}

impl RailRegions {
    #[allow(unsafe_code)]
    fn register(rail: &Rail, memory: &Memory, sections: Sections) -> Result<Self, Error> {
        let register = |offset: usize, len: usize, access: u64| {
            let base = memory.card.device_address() as *mut u8;
            let region = match memory.card.dma_buf() {
                Some(dma_buf) => {
                    // The card is given addresses from the first byte of the dma-buf on.
                    let base = base.wrapping_sub(dma_buf.offset as usize);
                    Region::DmaBuf { fd: dma_buf.fd, offset: dma_buf.offset + offset as u64, len, base }
                }
                None => Region::Va { addr: base.wrapping_add(offset), len },
            };
            let what = format!("registering value slots with card {}", rail.name());
            // SAFETY: the buffer outlives the region (order of `Context`'s fields), and is reached by address only.
            unsafe { MemoryRegion::register(&rail.domain, region, access, 0) }.map_err(Error::fabric(what))
        };
        let local = bindings::FI_READ | bindings::FI_WRITE;
        let scratch = register(0, sections.page, local | bindings::FI_REMOTE_WRITE)?;
        let values = register(sections.values(), sections.values_len(), local)?;
        let (values_lkey, _) = window::keys(rail, &values)?;
        Ok(Self { scratch_keys: window::keys(rail, &scratch)?, values_lkey, _scratch: scratch, _values: values })
    }
}

/// How a rail's endpoints are opened.
struct RailInfo {
    narrow: (Info, usize),
    /// For the value endpoint, where it is another.
    wide: Option<(Info, usize)>,
}

impl RailInfo {
    fn find(coll: &CollComm, rail: &Rail, shape: &Shape) -> Result<Self, Error> {
        let failed = |what: &str| Error::fabric(format!("asking card {} for {what}", rail.name()));
        let wanted = if shape.depth == 0 { DEPTH_DEFAULT } else { shape.depth.next_power_of_two() };
        let find =
            |wide: bool, depth: usize, tclass: u32| rail.endpoint_info(&coll.plugin, QueueWish { depth, wide, tclass });
        let limit = |info: &Info| floor_power_of_two(info.tx_size().clamp(1, 1 << 30) as u32) as usize;
        let depth = wanted.min(limit(&rail.info));
        if shape.depth != 0 && depth != shape.depth {
            crate::info!("queueDepth {} becomes {depth} on card {}", shape.depth, rail.name());
        }
        let mut classes = tclass_choices(shape.tclass).into_iter();
        let (narrow, tclass) = loop {
            let tclass = classes.next().unwrap_or(0);
            // Some libfabrics refuse a class that they do not know, others leave it out and succeed.
            match find(false, depth, tclass) {
                Ok(info) if tclass == 0 || info.tclass() == tclass => break (info, tclass),
                Ok(_) => crate::trace!("traffic class {tclass:#x} is ignored"),
                Err(error) if tclass == 0 => return Err(failed("queue pairs")(error)),
                Err(error) => crate::trace!("no queue pairs with traffic class {tclass:#x}: {error}"),
            }
        };
        if tclass != shape.tclass {
            let instead = if tclass == 0 { "it is left out" } else { "low latency takes its place" };
            crate::info!("card {} does not know the traffic class asked for: {instead}", rail.name());
        }
        let wide = match shape.layout {
            Layout::V0 => None,
            // Wide requests leave room for fewer: the card says for how many when asked for no number.
            Layout::V1 => match find(true, 0, tclass) {
                Ok(info) => {
                    let depth = depth.min(limit(&info));
                    Some((find(true, depth, tclass).map_err(failed("wide queue pairs"))?, depth))
                }
                Err(error) => {
                    crate::trace!("no wide requests: {error}");
                    if first_time(NARROW, &rail.name()) {
                        crate::warn!(
                            "card {} has no 128-byte requests (libfabric 2.6.0 offers none): putValue of kernels built with \
                             NCCL 2.32 headers needs them and will not work; ferrogin's own device code, and put, signals \
                             and gets of any, do",
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

/// libfabric's traffic classes to try for one that was asked for, best first. EFA knows low latency and nothing else: it
/// stands in for expedited forwarding (DSCP 46) and what is above it.
fn tclass_choices(tclass: u32) -> Vec<u32> {
    let mut choices = vec![tclass];
    if tclass != 0 {
        let urgent = tclass & !bindings::FI_TC_DSCP >= 46;
        choices.extend(urgent.then_some(bindings::FI_TC_LOW_LATENCY));
        choices.push(0);
    }
    choices
}

const NARROW: &str = "no wide requests";
const SHORT_IDS: &str = "no 64-bit request ids";

/// True once for each message and card of the process.
fn first_time(message: &'static str, card: &str) -> bool {
    static SAID: Mutex<BTreeSet<(&'static str, String)>> = Mutex::new(BTreeSet::new());
    SAID.lock().unwrap_or_else(PoisonError::into_inner).insert((message, card.to_owned()))
}

impl Context {
    /// Collective: builds the contexts.
    ///
    /// # Errors
    /// Too little of a card; a rank that failed; a queue that the layout asked for cannot express.
    pub fn create(coll: &Arc<CollComm>, shape: &Shape) -> Result<Self, Error> {
        let mut span = trace::span("createContext", coll.rank);
        // A hint, which all peers obey too.
        let stride = if coll.nranks.is_multiple_of(shape.rank_stride) { shape.rank_stride } else { 1 };
        if stride != shape.rank_stride {
            let (given, nranks) = (shape.rank_stride, coll.nranks);
            crate::info!("rankStride {given} does not divide the {nranks} ranks: all of them can be reached");
        }
        let shape = &Shape { rank_stride: stride, ..*shape };
        let (mut context, all) = coll.agree(Step::CreateContext, Self::build(coll, shape), |(_, own)| own.emit())?;
        let ready = Self::finish(coll, shape, &mut context.0, &all);
        let (block, _) = coll.agree(Step::ContextReady, ready, |_| Vec::new())?;
        let mut context = context.0;
        context.handle.handle = block.0;
        context.block = Some(block.1);
        let first = &context.contexts[0].endpoints;
        let addresses = context.contexts.iter().map(|one| one.peers.len()).sum::<usize>();
        span.note("contexts", shape.n_contexts as u64);
        span.note("endpoints", (shape.n_contexts * shape.endpoints()) as u64);
        span.note("addresses", addresses as u64);
        crate::info!(
            "rank {} of {}: {} context(s) of {} signal(s) and {} counter(s): kernels on {}, provider {}, {} rail(s) on \
             card(s) {}, backendVersion {}, {} requests in flight, requests of {} bytes and for values of {}, completion \
             counters used {}, {addresses} peer addresses",
            coll.rank,
            coll.nranks,
            shape.n_contexts,
            shape.n_signals,
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
        Ok(context)
    }

    /// Everything of this rank alone: memory, endpoints; and what the other ranks must know of it.
    #[allow(unsafe_code)]
    fn build(coll: &Arc<CollComm>, shape: &Shape) -> Result<(Self, wire::Part), Error> {
        let _span = trace::span("createContext: endpoints", coll.rank);
        let rails = &coll.rails;
        // Contexts take the rails in turn.
        let on_rail = |rail: usize| (shape.n_contexts + rails.len() - 1 - rail) / rails.len();
        let used: Vec<_> = rails.iter().enumerate().filter(|(i, _)| on_rail(*i) != 0).map(|(_, rail)| rail).collect();
        let budgets = used.iter().enumerate().map(|(i, rail)| rail.reserve_counters(on_rail(i) * shape.counters()));
        let budgets = budgets.collect::<Result<Vec<_>, _>>()?;
        let infos = used.iter().map(|rail| RailInfo::find(coll, rail, shape)).collect::<Result<Vec<_>, _>>()?;
        let sections = Sections {
            page: device::page_size(),
            endpoints: shape.n_contexts * shape.endpoints(),
            counters: shape.n_contexts * shape.counters(),
            slots: infos.iter().map(|info| info.narrow.1).max().unwrap_or(1),
        };
        let memory = Memory::allocate(&*coll.device, sections)?;
        let regions = used.iter().map(|rail| RailRegions::register(rail, &memory, sections));
        let regions = regions.collect::<Result<Vec<_>, _>>()?;

        let (mut contexts, mut parts) = (Vec::new(), Vec::new());
        let (mut completed, mut errors) = (sections.completed(), COUNTER_STRIDE);
        for id in 0..shape.n_contexts {
            let at = id % rails.len();
            let (rail, info) = (&rails[at], &infos[at]);
            let mut endpoints = Vec::with_capacity(shape.endpoints());
            for role in Role::all(shape.n_counters, shape.n_signals) {
                let (info, depth) = info.of(role);
                let cells = Cells { completed, errors };
                completed += COUNTER_STRIDE * if matches!(role, Role::Signal(_)) { 2 } else { 1 };
                errors += COUNTER_STRIDE;
                let provider = coll.plugin.config.provider;
                // SAFETY: the memory outlives the endpoints (order of `Context`'s fields); `completed` and `errors` give
                // every counter a place of its own.
                let endpoint = unsafe {
                    Endpoint::open(rail, &*coll.device, provider, (role, info, *depth), memory.counters(), cells)
                };
                let endpoint = endpoint?;
                if shape.layout == Layout::V1 && !endpoint.request_ids_64() && first_time(SHORT_IDS, &rail.name()) {
                    crate::info!(
                        "card {} reports no 64-bit request ids (libfabric 2.6 never does): requests of NCCL's and of \
                         ferrogin's device code need 16 bits, and leave the others 0",
                        rail.name()
                    );
                }
                endpoints.push(endpoint);
            }
            let targets = endpoints.iter().filter(|e| matches!(e.role, Role::Data | Role::Signal(_)));
            parts.push(wire::ContextPart {
                scratch: (memory.card.device_address(), regions[at].scratch_keys.1),
                addresses: targets.map(Endpoint::address).collect::<Result<_, _>>()?,
            });
            contexts.push(OneContext { endpoints, peers: Vec::new(), targets: Vec::new() });
        }
        let handle = NetDeviceHandleV11 {
            net_device_type: NET_DEVICE_GIN_EFA_GDA,
            net_device_version: shape.backend_version,
            handle: std::ptr::null_mut(),
            size: size_of::<DevHandle>(),
            needs_proxy_progress: 0,
        };
        let context = Self {
            watch: Mutex::new(None),
            handle: Box::new(handle),
            block: None,
            contexts,
            regions,
            memory,
            budgets,
            sections,
            coll: Arc::downgrade(coll),
            rank: coll.rank,
            nranks: coll.nranks,
        };
        Ok((context, wire::Part { contexts: parts }))
    }

    /// Everything that needs the other ranks' addresses. Gives the address of the device handles, and their block.
    fn finish(
        coll: &CollComm,
        shape: &Shape,
        context: &mut Self,
        all: &[Vec<u8>],
    ) -> Result<(*mut c_void, Box<dyn DeviceBuffer>), Error> {
        let mut span = trace::span("createContext: peers", coll.rank);
        let inserted = || coll.rails.iter().map(|rail| rail.av.insertions()).sum::<u64>();
        let inserted_before = inserted();
        let parts = all.iter().enumerate().map(|(rank, bytes)| {
            let part = wire::Part::parse(bytes).filter(|part| part.contexts.len() == shape.n_contexts);
            part.ok_or_else(|| {
                Error::Usage(format!(
                    "rank {rank} creates another number of contexts than the {} here",
                    shape.n_contexts
                ))
            })
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let sections = context.sections;
        let mut specs = Vec::with_capacity(shape.n_contexts);
        for (id, one) in context.contexts.iter_mut().enumerate() {
            let at = id % coll.rails.len();
            let rail = &coll.rails[at];
            let peers = parts.iter().map(|part| &part.contexts[id]).enumerate();
            resolve(rail, one, coll.nranks, peers.filter(|(peer, _)| shape.reaches(coll.rank, *peer)))?;
            let memory = CounterMemory { card: &*context.memory.card, shared: &*context.memory.shared };
            let base = context.memory.card.device_address();
            let mut endpoints = Vec::with_capacity(one.endpoints.len());
            for (e, endpoint) in one.endpoints.iter().enumerate() {
                // Values go over the value endpoint, inline where they can, and over the signals' endpoints.
                let pooled = match endpoint.role {
                    Role::Value => !endpoint.wide(),
                    Role::Signal(_) => true,
                    Role::Data | Role::Counter(_) => false,
                };
                let slice = base + sections.value_slice(id * shape.endpoints() + e) as u64;
                endpoints.push(endpoint.spec(memory, if pooled { slice } else { 0 })?);
            }
            let regions = &context.regions[at];
            specs.push(ContextSpec {
                endpoints,
                n_counters: shape.n_counters,
                n_signals: shape.n_signals,
                nranks: coll.nranks,
                rank: coll.rank,
                rail: rail.index,
                targets: one.targets.clone(),
                scratch: (regions.scratch_keys.0, base),
                scratch_peers: parts.iter().map(|part| part.contexts[id].scratch).collect(),
                value_lkey: regions.values_lkey,
                max_rdma_size: rail.info.max_msg_size().clamp(1, RDMA_MAX) as u32,
                progress: match coll.device.kind() {
                    DeviceKind::Cpu => rail.domain.progress(),
                    DeviceKind::Cuda => None,
                },
            });
        }
        span.note("av_insertions", inserted() - inserted_before);
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
        let image = image.map_err(|source| Error::Queue { endpoint: "of this card".to_owned(), source })?;
        block.write(0, image.bytes())?;
        Ok(((block.device_address() + plan.handles_offset() as u64) as *mut c_void, block))
    }

    /// NCCL's view; lives until the context is destroyed.
    pub fn device_handle(&self) -> *mut NetDeviceHandleV11 {
        std::ptr::from_ref(&*self.handle).cast_mut()
    }

    /// Watches the context's queues from now on; `handle` is what queries will name it by.
    ///
    /// # Errors
    /// No thread for it.
    #[allow(unsafe_code)]
    pub fn watch(&self, handle: *mut c_void) -> Result<(), Error> {
        let Some(abort) = self.memory.shared.host_address() else {
            return Err(Error::Usage("this device's shared memory has no host address".to_owned()));
        };
        let (mut endpoints, mut counters) = (Vec::new(), Vec::new());
        for (id, one) in self.contexts.iter().enumerate() {
            for endpoint in &one.endpoints {
                // SAFETY: the counter's place in shared memory, 8-byte aligned, which outlives the guard in `self.watch`
                // and the handle: NCCL's handle is removed before the context is dropped.
                let errors = unsafe { ErrorCounter::new(endpoint.errors(self.memory.counters())) };
                counters.push(errors);
                let (cq, sq) = (endpoint.cq, endpoint.sq);
                endpoints.push(WatchedEndpoint {
                    name: (id, endpoint.role),
                    // SAFETY: the ring lives until the endpoint is dropped, which the guard in `self.watch` precedes;
                    // nothing was posted before the context was given to NCCL.
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
        };
        let guard = watcher::watch(watch).map_err(|source| Error::System { call: "starting a thread", source })?;
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(guard);
        registry::look_at(handle, counters)?;
        Ok(())
    }

    /// Ends the watch and forgets the context; the rest ends when the last reference is dropped.
    pub fn close(&self, handle: *mut c_void) {
        let _span = trace::span("destroyContext", self.rank);
        drop(self.watch.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(coll) = self.coll.upgrade() {
            coll.contexts.take(handle);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Counted by field order, but for the watch, which sits behind a lock.
        drop(self.watch.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Puts the endpoints of those peers that are posted to into the rail's address vector, each once, and looks up what
/// requests name them by.
fn resolve<'a>(
    rail: &Arc<Rail>,
    one: &mut OneContext,
    nranks: usize,
    peers: impl Iterator<Item = (usize, &'a wire::ContextPart)> + Clone,
) -> Result<(), Error> {
    let slots = peers.clone().map(|(_, part)| part.addresses.len()).max().unwrap_or(0);
    one.targets = vec![Target::default(); slots * nranks];
    for (rank, part) in peers {
        for (slot, address) in part.addresses.iter().enumerate() {
            let what = || format!("looking up rank {rank} on card {}", rail.name());
            let peer = rail.peer(address).map_err(Error::fabric(what()))?;
            let found = rail.gda.query_addr(&one.endpoints[0].qp, peer.number).map_err(Error::fabric(what()))?;
            one.targets[slot * nranks + rank] = Target { ah: found.ah, qpn: found.qpn, qkey: found.qkey };
            one.peers.push(peer);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
