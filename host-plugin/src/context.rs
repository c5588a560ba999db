//! GIN contexts: endpoints on the rails, the peers' addresses, and the device block that describes them to kernels.

use crate::comm::CollComm;
use crate::config::Policy;
use crate::device::{self, DeviceBuffer, DeviceKind, Use};
use crate::endpoint::{CounterOffsets, Role, Start};
use crate::error::Error;
use crate::fault::{DeviceCounters, ErrorCounter, ErrorCounters};
use crate::isolation::{Isolation, RANKS_MAX, Tables};
use crate::kernel_words::{KernelWords, StopWord};
use crate::log::{counted, first_time};
use crate::memory::{ContextMemory, FAILURE_OFFSET, MemoryLayout, RegisteredMemory};
use crate::metrics;
use crate::rail::{CounterBudget, Peers};
use crate::signal_proxy::Pulse;
use crate::signal_proxy::inbox::Inbox;
use crate::watcher::{self, CqReader, Guard, Output, Report, RingView, Watch, WatchedEndpoint};
use crate::{registry, trace};
use emulated::{Inboxes, SignalMemory};
use ferrogin_ffi::block::{BlockSpec, ContextSpec, Cursors, EmulatedSpec, Layout, Plan, Posts, Progress};
use ferrogin_ffi::device::DevHandle;
use ferrogin_ffi::ext::{EmulatedPeer, POLICY_COMBINING, POLICY_LOCKED, TargetWords};
use ferrogin_ffi::nccl::{NET_DEVICE_GIN_EFA_GDA, NetDeviceHandleV11};
use ferrogin_libfabric::progress;
use ferrogin_rendezvous::ring::Step;
use parking_lot::Mutex;
use queues::{OneContext, RailInfo};
use std::ffi::c_void;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Instant;

mod drain;
mod emulated;
mod peers;
mod queues;
mod shape;
mod wire;

pub use drain::drain;
pub use shape::Shape;

/// Largest transfer of one request on EFA, even if the card reports more.
const RDMA_MAX: usize = 1 << 30;

/// The result of one `createContext`. Fields drop in this order: users before what they use.
pub struct Context {
    metrics: Mutex<Option<metrics::Guard>>,
    watch: Mutex<Option<Guard>>,
    handle: Box<NetDeviceHandleV11>,
    block: Option<Arc<dyn DeviceBuffer>>,
    /// From [`Plan::cursors`].
    cursors: Vec<Vec<Cursors>>,
    /// The counters' values before the first request, by context and endpoint.
    starts: Vec<Vec<Start>>,
    /// Set by the first [`drain`].
    drained: AtomicBool,
    contexts: Vec<OneContext>,
    /// If a lost rank ends only the requests to it. Its users end before the block and the memory.
    isolation: Option<Arc<Isolation>>,
    /// Where each context's targets are in the block.
    targets: Vec<usize>,
    /// Dropped before the memory of the words they add to.
    inboxes: Option<Inboxes>,
    signal_memory: Option<SignalMemory>,
    /// By context; only with emulated signals.
    signal_counts: Vec<Arc<metrics::source::Counts>>,
    /// One for each rail in use. Removed after the endpoints that post to them are closed.
    peers: Vec<Peers>,
    registered: Vec<RegisteredMemory>,
    stop: Arc<StopWord>,
    memory: ContextMemory,
    budgets: Vec<CounterBudget>,
    layout: MemoryLayout,
    coll: Weak<CollComm>,
    rank: usize,
    nranks: usize,
}

// SAFETY: the raw pointer in the device handle is the only field that is not `Send`. The host never dereferences it: it
// is a device address that NCCL passes to kernels.
#[allow(unsafe_code)]
unsafe impl Send for Context {}
// SAFETY: the raw pointer in the device handle is the only field that is not `Sync`. The host never dereferences it,
// and nothing changes it while the context is shared.
#[allow(unsafe_code)]
unsafe impl Sync for Context {}

/// The parts of a context that [`Context::finish`] creates.
struct Ready {
    /// The address of the device handles in `block`.
    handles: *mut c_void,
    block: Arc<dyn DeviceBuffer>,
    /// The counters' values before the first request, by context and endpoint.
    starts: Vec<Vec<Start>>,
}

const REUSED_SLOTS: &str = "NCCL 2.31 reuses value slots";
impl Context {
    /// Builds the contexts. Collective.
    ///
    /// # Errors
    /// A card has too few counters or queues; another rank failed; the requested layout can't express a queue.
    pub fn create(coll: &Arc<CollComm>, shape: &Shape) -> Result<Self, Error> {
        let mut span = trace::span("createContext", coll.rank);
        let shape = &Shape {
            isolates: shape.isolates && can_isolate(coll.rank, coll.nranks),
            ..shape.in_job(coll.nranks, coll.plugin.config.signals)?
        };
        let (mut context, all) = coll.agree(Step::CreateContext, Self::build(coll, shape), |(_, own)| own.emit())?;
        let ready = Self::finish(coll, shape, &mut context.0, &all);
        let (ready, _) = coll.agree(Step::ContextReady, ready, |_| Vec::new())?;
        let mut context = context.0;
        context.handle.handle = ready.handles;
        context.isolation = shape.isolates.then(|| context.isolate(coll, &ready.block)).transpose()?;
        context.block = Some(ready.block);
        context.starts = ready.starts;

        context.add_to_metrics(coll);
        let first = &context.contexts[0].endpoints;
        let addresses = context.peers.iter().map(|peers| peers.numbers().len()).sum::<usize>();
        span.note("contexts", shape.n_contexts as u64);
        span.note("endpoints", (shape.n_contexts * shape.endpoints()) as u64);
        span.note("addresses", addresses as u64);
        crate::info!(
            "rank {} of {}: {} of {} and {}: kernels on {}, provider {}, {} on {}, backendVersion {}, {} requests in flight, \
             requests of {} bytes and for values of {}, completion counters used {}, {addresses} peer addresses",
            coll.rank,
            coll.nranks,
            counted(shape.n_contexts, "context"),
            match shape.n_words {
                Some(words) => counted(words, "emulated signal"),
                None => counted(shape.n_signals, "signal"),
            },
            counted(shape.n_counters, "counter"),
            coll.device.kind().name(),
            coll.plugin.config.provider.name(),
            counted(coll.rails.len(), "rail"),
            coll.rails.iter().map(|rail| rail.name()).collect::<Vec<_>>().join("+"),
            shape.backend_version,
            first[0].sq_size(),
            first[0].sq.entry_size,
            first[1].sq.entry_size,
            context.budgets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        );
        if shape.layout == Layout::V0 && first_time(REUSED_SLOTS, "") {
            crate::info!(
                "backendVersion {}: putValue of NCCL 2.31's own device code may deliver 0 instead of a value, \
                 because that code reuses a value slot if a later request completes first. NCCL 2.32 and ferrogin's \
                 own headers do not",
                shape.backend_version
            );
        }
        Ok(context)
    }

    /// Builds this rank's memory and endpoints, and their description for the other ranks.
    #[allow(unsafe_code)]
    fn build(coll: &Arc<CollComm>, shape: &Shape) -> Result<(Self, wire::RankContexts), Error> {
        let _span = trace::span("createContext: endpoints", coll.rank);
        let rails = &coll.rails;
        // Contexts are assigned to rails round-robin.
        let on_rail = |rail: usize| (shape.n_contexts + rails.len() - 1 - rail) / rails.len();
        let used: Vec<_> = rails.iter().enumerate().filter(|(i, _)| on_rail(*i) != 0).map(|(_, rail)| rail).collect();
        let budgets = used.iter().enumerate().map(|(i, rail)| rail.reserve_counters(on_rail(i) * shape.counters()));
        let budgets = budgets.collect::<Result<Vec<_>, _>>()?;
        let infos = used.iter().map(|rail| RailInfo::find(coll, rail, shape)).collect::<Result<Vec<_>, _>>()?;
        let layout = MemoryLayout {
            page: device::page_size(),
            endpoints: shape.n_contexts * shape.endpoints(),
            counters: shape.n_contexts * shape.counters(),
            pooled: (0..shape.n_contexts)
                .map(|id| shape.n_signals + usize::from(infos[id % rails.len()].wide.is_none()))
                .sum(),
            slots: infos.iter().map(|info| info.narrow.1).max().unwrap_or(1),
        };
        let memory = ContextMemory::allocate(&*coll.device, layout)?;
        let registered = used.iter().map(|rail| RegisteredMemory::register(rail, &memory, layout));
        let registered = registered.collect::<Result<Vec<_>, _>>()?;

        let signal_memory =
            shape.n_words.map(|words| SignalMemory::allocate(coll, &used, shape.n_contexts, words)).transpose()?;

        let (mut contexts, mut parts, mut inboxes) = (Vec::new(), Vec::new(), Vec::new());
        let mut next = CounterOffsets { completed: layout.completed(), errors: layout.errors() };
        for id in 0..shape.n_contexts {
            let at = id % rails.len();
            let rail = &rails[at];
            // SAFETY: `Context` drops its endpoints before its memory (field order), and the memory has room for all
            // contexts' counters.
            let context = unsafe { OneContext::open(coll, rail, &infos[at], shape, &memory, &mut next) }?;
            let mut addresses = context.addresses()?;
            let mut signals = EmulatedPeer::default();
            if let (Some(memory), Some(words)) = (&signal_memory, shape.n_words) {
                let inbox = memory.open(coll, at, id)?;
                addresses = vec![inbox.address()?];
                signals = EmulatedPeer { n_signals: words as u32, generation: inbox.generation().bits().into() };
                inboxes.push(inbox);
            }
            let scratch = (memory.card.device_address(), registered[at].scratch_keys.1);
            let part = wire::PeerContext::new(scratch, signals, &addresses).ok_or_else(|| {
                Error::Usage(format!("the endpoints of card {} have different GIDs: please report it", rail.name()))
            })?;
            parts.push(part);
            contexts.push(context);
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
        let words = KernelWords::new(&*coll.device, memory.card.clone(), layout.abort(), size_of::<u32>());
        let context = Self {
            metrics: Mutex::new(None),
            watch: Mutex::new(None),
            handle: Box::new(handle),
            block: None,
            cursors: Vec::new(),
            starts: Vec::new(),
            drained: AtomicBool::new(false),
            contexts,
            isolation: None,
            targets: Vec::new(),
            inboxes,
            signal_memory,
            signal_counts,
            peers: Vec::new(),
            registered,
            stop: Arc::new(StopWord::new(Arc::new(words), layout.abort())),
            memory,
            budgets,
            layout,
            coll: Arc::downgrade(coll),
            rank: coll.rank,
            nranks: coll.nranks,
        };
        let listener = shape.isolates.then(|| coll.ring_handle()).transpose()?;
        Ok((context, wire::RankContexts { contexts: parts, listener }))
    }

    /// Adds the contexts to FERROGIN_METRICS.
    #[allow(unsafe_code)]
    fn add_to_metrics(&mut self, coll: &CollComm) {
        let Some(of_comm) = &coll.metrics else { return };
        let mut sources = Vec::with_capacity(self.contexts.len());
        for (id, one) in self.contexts.iter().enumerate() {
            let block = self.block.as_ref().and_then(|block| block.host_address());
            let mut endpoints = Vec::with_capacity(one.endpoints.len());
            for ((endpoint, cursor), start) in one.endpoints.iter().zip(&self.cursors[id]).zip(&self.starts[id]) {
                let words = metrics::source::Words {
                    cursor: block.map(|base| base.wrapping_add(cursor.next()).cast_const().cast()),
                    ..endpoint.words(&*self.memory.card, *start)
                };
                // SAFETY: the layouts of the block and the memory align the words. `self` drops the metrics guard
                // before both.
                endpoints.push(unsafe { metrics::source::Endpoint::new(endpoint.role.into(), words) });
            }
            let rail = &coll.rails[id % coll.rails.len()];
            let emulated = self.signal_counts.get(id).cloned();
            sources.push((rail.index, rail.name(), endpoints, emulated));
        }
        // SAFETY: `self` drops the guard before the block and the memory: it is the first field, and `close` drops it
        // earlier.
        let guard = unsafe { of_comm.contexts(sources) };
        *self.metrics.get_mut() = Some(guard);
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
                    "rank {rank} does not create {} contexts as rank {} does: pass the same nContexts on all ranks",
                    shape.n_contexts, coll.rank
                ))
            })
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        if let Some(other) = parts.iter().position(|part| part.listener.is_some() != shape.isolates) {
            let with = |isolates| if isolates { "isolates" } else { "does not isolate" };
            return Err(Error::Usage(format!(
                "rank {other} {} lost ranks in this context, and rank {} {} them: pass the same option, or set the same \
                 FERROGIN_ON_PEER_FAILURE, on all ranks, on the same kind of machine",
                with(!shape.isolates),
                coll.rank,
                with(shape.isolates)
            )));
        }
        let listeners: Vec<_> = parts.iter().filter_map(|part| part.listener).collect();
        if shape.isolates {
            coll.go_on(&listeners)?;
        }
        context.peers = peers::resolve(coll, shape, &mut context.contexts, &parts)?;
        let mut slices = context.layout.value_slices();
        let mut specs = Vec::with_capacity(shape.n_contexts);
        for (id, one) in context.contexts.iter().enumerate() {
            let at = id % coll.rails.len();
            let rail = &coll.rails[at];
            let memory = &*context.memory.card;
            let base = context.memory.card.device_address();
            let mut endpoints = Vec::with_capacity(one.endpoints.len());
            for endpoint in &one.endpoints {
                // The value endpoint and the signal endpoints post values: inline in 128-byte requests, otherwise from
                // the pool.
                let pooled = match endpoint.role {
                    Role::Value => !endpoint.wide(),
                    Role::Signal(_) => true,
                    Role::Data | Role::Counter(_) => false,
                };
                let values = match pooled.then(|| slices.next()) {
                    None => 0,
                    Some(Some(slice)) => base + slice as u64,
                    Some(None) => {
                        return Err(Error::Usage(format!(
                            "card {} returned a queue with 64-byte requests instead of 128-byte ones: please report it",
                            rail.name()
                        )));
                    }
                };
                endpoints.push(endpoint.spec(memory, values)?);
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
            abort_flag: context.memory.card.device_address() + context.layout.abort() as u64,
            failure_offset: FAILURE_OFFSET,
            wait_ns: shape.wait_ns,
            isolates: shape.isolates,
        };
        let plan = Plan::new(&spec);
        // With isolation, the host writes to the tables while kernels run.
        let usage = if shape.isolates { Use::Card } else { Use::Tables };
        let block: Arc<dyn DeviceBuffer> = coll.device.allocate(plan.size(), usage)?.into();
        let image = plan.fill(&spec, block.device_address());
        let image = image.map_err(|source| Error::Queue { backend_version: shape.backend_version, source })?;
        block.write(0, image.bytes())?;
        context.cursors = plan.cursors();
        context.targets = plan.targets();
        let handles = (block.device_address() + plan.handles_offset() as u64) as *mut c_void;
        Ok(Ready { handles, block, starts })
    }

    /// The device handle for NCCL, valid until the context is dropped.
    pub fn device_handle(&self) -> *mut NetDeviceHandleV11 {
        std::ptr::from_ref(&*self.handle).cast_mut()
    }

    /// Returns the number of requests, over all endpoints, that kernels have posted and the card has not completed.
    ///
    /// # Errors
    /// The device can't read its memory.
    pub fn outstanding(&self) -> Result<u64, Error> {
        let Some(block) = &self.block else { return Ok(0) };
        let mut outstanding = 0;
        for ((one, cursors), starts) in self.contexts.iter().zip(&self.cursors).zip(&self.starts) {
            for ((endpoint, cursors), start) in one.endpoints.iter().zip(cursors).zip(starts) {
                // Read the count first, so that it isn't ahead of the cursor. Both wrap at 2^31.
                let ended = endpoint.ended(&*self.memory.card, *start, self.isolation.is_some())?;
                let posted = posts(&**block, *cursors)?.reserved();
                outstanding += u64::from(posted.wrapping_sub(ended) & (u32::MAX >> 1));
            }
        }
        Ok(outstanding)
    }

    /// Describes the context's tables for the isolation of peers.
    fn isolate(&self, coll: &CollComm, block: &Arc<dyn DeviceBuffer>) -> Result<Arc<Isolation>, Error> {
        let mut targets = Vec::with_capacity(self.contexts.len());
        for (first, one) in self.targets.iter().zip(&self.contexts) {
            let mut bytes = vec![0; one.targets.len() * size_of::<TargetWords>()];
            block.read(*first, &mut bytes)?;
            let upper = |target: &[u8]| u32::from_le_bytes(std::array::from_fn(|i| target[4 + i]));
            targets.push((*first, bytes.chunks_exact(size_of::<TargetWords>()).map(upper).collect()));
        }
        let tables = Tables {
            words: self.stop.words_before(&*coll.device, block.clone()),
            targets,
            losses: self.cursors.iter().flatten().map(|cursors| cursors.losses()).collect(),
            stop: self.stop.clone(),
        };
        Ok(Arc::new(Isolation::new(coll.lost_ranks.clone(), coll.nranks, tables)))
    }

    /// Returns the isolation of peers, if a lost rank ends only the requests to it.
    pub fn isolation(&self) -> Option<&Isolation> {
        self.isolation.as_deref()
    }

    /// Starts watching the context's queues and, with `peers`, as for the host API, the other ranks: waits end when a
    /// rank exits. `handle` is NCCL's handle for the context.
    ///
    /// # Errors
    /// The watcher's thread doesn't start.
    #[allow(unsafe_code)]
    pub fn watch(&self, handle: *mut c_void, peers: bool) -> Result<(), Error> {
        let memory = &self.memory.card;
        let (mut endpoints, mut counters) = (Vec::new(), Vec::new());
        for (id, one) in self.contexts.iter().enumerate() {
            for endpoint in &one.endpoints {
                // SAFETY: the counter is 8-byte aligned in `self.memory`, and only the card writes it. Its readers stop
                // earlier: the guard in `self.watch` is dropped before the memory, and the registry forgets the
                // counters when it removes NCCL's handle, before it drops its reference to the context.
                let errors = endpoint.errors(&**memory).map(|word| unsafe { ErrorCounter::new(word) });
                counters.extend(errors);
                let (cq, sq) = (endpoint.cq, endpoint.sq);
                endpoints.push(WatchedEndpoint {
                    name: (id, endpoint.role),
                    // SAFETY: the ring stays mapped until the endpoint is dropped, after the guard in `self.watch`. The
                    // ring holds no completions: kernels get the context only after this function.
                    cq: unsafe { CqReader::new(cq.buffer, cq.entry_size, cq.num_entries) },
                    errors,
                    failures: endpoint.failures.clone(),
                    ring: endpoint.host_ring.then_some(RingView {
                        buffer: sq.buffer,
                        entry_size: sq.entry_size as usize,
                        entries: sq.num_entries as usize,
                    }),
                    context: id,
                });
            }
        }
        let counters = match memory.host_address() {
            Some(_) => ErrorCounters::Host(counters),
            None => {
                let (at, count) = (self.layout.errors(), endpoints.len());
                ErrorCounters::Device(DeviceCounters::new(memory.clone(), at, count)?)
            }
        };
        let watch = Watch {
            handle: handle as usize,
            rank: self.rank,
            nranks: self.nranks,
            endpoints,
            targets: self.contexts.iter().map(|one| one.targets.clone()).collect(),
            stop: self.stop.clone(),
            report: Report::Clean,
            failure: self.memory.record.host_address().map(<*mut u8>::cast),
            lost: self.coll.upgrade().filter(|_| peers && self.isolation.is_none()).map(|coll| coll.lost.clone()),
            isolation: self.isolation.clone(),
            acknowledges: peers,
            suspects: Vec::new(),
            proxy: self.inboxes.as_ref().map(|inboxes| (Pulse::new(Instant::now()), inboxes.served())),
            output: Output::Log,
        };
        let guard = watcher::watch(watch)?;
        *self.watch.lock() = Some(guard);
        // With isolation, only the watch tells a lost rank from a failure.
        if self.isolation.is_none() {
            registry::set_error_counters(handle, counters)?;
        }
        Ok(())
    }

    /// Stops watching, and removes the context from its communicator. Dropping the last reference closes the endpoints,
    /// so [`drain`] the context first.
    pub fn close(&self, handle: *mut c_void) {
        let _span = trace::span("destroyContext", self.rank);
        drop(self.metrics.lock().take());
        drop(self.watch.lock().take());
        if let Some(coll) = self.coll.upgrade() {
            coll.contexts.take(handle);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Metrics and the watch end first, even if another thread left a lock poisoned.
        drop(self.metrics.lock().take());
        drop(self.watch.lock().take());
    }
}

/// Returns whether peers can be isolated; otherwise logs why not, and a lost rank ends the contexts.
fn can_isolate(rank: usize, nranks: usize) -> bool {
    let can = nranks <= RANKS_MAX;
    if !can {
        crate::warn!(
            "rank {rank}: a lost rank will end this context, as with FERROGIN_ON_PEER_FAILURE=abort: requests cannot tell more than \
             {RANKS_MAX} ranks apart"
        );
    }
    can
}

/// Returns the function that waiting threads call to make the card progress: the provider's, if it offers one. A GPU
/// can't call a host function.
fn progress_for(device: DeviceKind, offered: impl FnOnce() -> Option<progress::Progress>) -> Option<Progress> {
    let offered = if device == DeviceKind::Cpu { offered() } else { None };
    offered.map(|progress::Progress { function, arg }| Progress { function, arg })
}

/// Reads how far an endpoint's posts have got. In one call: it copies from a GPU.
fn posts(block: &dyn DeviceBuffer, cursors: Cursors) -> Result<Posts, device::DeviceError> {
    let mut bytes = [0; Cursors::BYTES];
    block.read(cursors.offset(), &mut bytes)?;
    Ok(Posts::of(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn no_work(_: *mut c_void) -> bool {
        false
    }

    #[test]
    fn peers_of_more_ranks_than_request_ids_tell_apart_are_not_isolated() {
        assert_eq!([1, 1 << 15, (1 << 15) + 1].map(|nranks| can_isolate(0, nranks)), [true, true, false]);
    }

    #[test]
    fn progress_function_is_for_cpu_threads_of_cards_that_offer_it() {
        let offered = || Some(progress::Progress { function: no_work, arg: 0x1000 as *mut c_void });
        assert_eq!(progress_for(DeviceKind::Cpu, offered).map(|progress| progress.arg as usize), Some(0x1000));
        assert!(progress_for(DeviceKind::Cpu, || None).is_none());
        assert!(progress_for(DeviceKind::Cuda, offered).is_none());
    }
}
