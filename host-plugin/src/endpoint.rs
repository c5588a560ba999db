//! One endpoint of a context: a queue pair that kernels post on, with its completion queue and counters.
#![allow(unsafe_code)]

use crate::address::EndpointAddress;
use crate::config::{Provider, Signals};
use crate::device::{Device, DeviceBuffer, DeviceKind, DeviceMapping, Mapping};
use crate::error::Error;
use crate::fault::COUNTER_STRIDE;
use crate::log::first_time;
use crate::metrics::source::{Queue, Words};
use crate::rail::Rail;
use efa_dp_direct::arch;
use ferrogin_ffi::block::EndpointSpec;
use ferrogin_libfabric::{
    CompletionQueue, Counter, CqAttr, CqMemory, Endpoint as QueuePair, Info, Location, WqMemory, bindings,
};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The role of an endpoint in its context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Puts and gets without a signal or counter.
    Data,
    /// Values without a signal.
    Value,
    /// Posts that count in this counter.
    Counter(usize),
    /// Target of this signal, and posts of values that carry it.
    Signal(usize),
}

impl Role {
    /// Returns the roles of all endpoints in a context, in the order that kernels index them.
    pub fn all(n_counters: usize, n_signals: usize) -> impl Iterator<Item = Self> {
        let first = [Self::Data, Self::Value].into_iter();
        first.chain((0..n_counters).map(Self::Counter)).chain((0..n_signals).map(Self::Signal))
    }

    /// Returns the operations whose completions the endpoint's counter counts.
    fn counted_operations(self, signals: Signals) -> u64 {
        match (self, signals) {
            // Kernels post gets on the data endpoint, and emulated signals as sends; one with a counter but no put on
            // the counter's.
            (Self::Data, Signals::Card) => bindings::FI_WRITE | bindings::FI_READ,
            (Self::Data, Signals::Emulated) => bindings::FI_WRITE | bindings::FI_READ | bindings::FI_SEND,
            (Self::Counter(_), Signals::Emulated) => bindings::FI_WRITE | bindings::FI_SEND,
            _ => bindings::FI_WRITE,
        }
    }
}

impl From<Role> for Queue {
    fn from(role: Role) -> Self {
        match role {
            Role::Data => Queue::Data,
            Role::Value => Queue::Value,
            Role::Counter(_) => Queue::Counter,
            Role::Signal(_) => Queue::Signal,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Data => f.write_str("data"),
            Self::Value => f.write_str("value"),
            Self::Counter(i) => write!(f, "counter {i}"),
            Self::Signal(i) => write!(f, "signal {i}"),
        }
    }
}

/// The value of FI_OPT_EFA_RNR_RETRY for unlimited retries: a peer's receives may run out.
const RETRY_FOREVER: usize = 7;
/// The value for as many retries as end: a peer that is stopped posts no receives, and requests to it must end if other
/// peers' are to go on.
const RETRY_LONG: usize = 6;
/// Key for one line per card, if libfabric doesn't accept that value.
const FEW_RETRIES: &str = "few retries";

/// Offsets of an endpoint's counters in [`ContextMemory::card`](crate::memory::ContextMemory::card).
#[derive(Debug, Clone, Copy)]
pub struct CounterOffsets {
    /// The completion counter; the signal counter follows one stride later.
    pub completed: usize,
    /// The error counter.
    pub errors: usize,
}

/// An endpoint's counter values before the first request.
#[derive(Debug, Clone, Copy)]
pub struct Start {
    completed: u64,
    errors: u64,
    signal: u64,
}

impl Start {
    /// Takes the values from the endpoint's description.
    pub fn of(spec: &EndpointSpec) -> Self {
        Self { completed: spec.completed.1, errors: spec.errors.1, signal: spec.signal.map_or(0, |(_, value)| value) }
    }
}

/// An open endpoint. Fields drop in this order: the mappings before the queue pair, which owns its queues and counters.
pub struct Endpoint {
    sq_map: Box<dyn DeviceMapping>,
    db_map: Box<dyn DeviceMapping>,
    /// The queue pair, which owns the completion queue and counters bound to it.
    pub qp: QueuePair,
    /// The role.
    pub role: Role,
    /// The send ring, in the host's address space.
    pub sq: WqMemory,
    /// The completion ring, in the host's address space.
    pub cq: CqMemory,
    /// True if the send ring and the doorbell are host memory.
    pub host_ring: bool,
    rq_entries: u32,
    max_inline: usize,
    depth: u32,
    cq_visible: bool,
    offsets: CounterOffsets,
    /// Failed completions that the watcher has read.
    pub failures: Arc<AtomicU64>,
}

/// Returns a location in an allocation, in libfabric's terms.
fn location<'a>(buffer: &'a dyn DeviceBuffer, offset: usize) -> Location<'a> {
    let host = buffer.host_address().map_or(std::ptr::null_mut(), |base| base.wrapping_add(offset).cast::<u64>());
    match buffer.dma_buf() {
        Some(dma_buf) => Location::DmaBuf { fd: dma_buf.fd, offset: dma_buf.offset + offset as u64, ptr: host },
        None => Location::Va(host),
    }
}

/// How to open an endpoint.
#[derive(Clone, Copy)]
pub struct EndpointOptions<'a> {
    /// The provider, which says how queues are mapped for kernels.
    pub provider: Provider,
    /// Who adds signals to their words.
    pub signals: Signals,
    /// The role.
    pub role: Role,
    /// The card, with the options of this queue pair.
    pub info: &'a Info,
    /// Requests in flight.
    pub depth: usize,
    /// Whether a lost rank ends only the requests to it.
    pub isolates: bool,
}

impl Endpoint {
    /// Opens, binds and enables an endpoint.
    ///
    /// # Errors
    /// A libfabric call fails, or the device can't map the queues for kernels.
    ///
    /// # Safety
    /// `memory` must outlive the endpoint, and only the card may write the counters at `offsets`.
    pub unsafe fn open(
        rail: &Rail,
        device: &dyn Device,
        options: EndpointOptions<'_>,
        memory: &dyn DeviceBuffer,
        offsets: CounterOffsets,
    ) -> Result<Self, Error> {
        let EndpointOptions { provider, signals, role, info, depth, isolates } = options;
        let failed = |what: &str| Error::fabric(format!("{what} of endpoint {role} on card {}", rail.name()));
        let errors = location(memory, offsets.errors);
        let completed = location(memory, offsets.completed);
        // SAFETY: the caller keeps the memory alive, and gives `offsets` only to this endpoint.
        let local = unsafe { Counter::open_ext(&rail.gda, completed, Some(errors)) };
        let local = local.map_err(failed("opening the completion counter"))?;
        let signal = match role {
            Role::Signal(_) => {
                let place = location(memory, offsets.completed + COUNTER_STRIDE);
                // SAFETY: the caller keeps the memory alive, and gives `offsets` and the stride after it only to this
                // endpoint.
                let signal = unsafe { Counter::open_ext(&rail.gda, place, None) };
                Some(signal.map_err(failed("opening the signal counter"))?)
            }
            _ => None,
        };
        // Twice the send queue's size: the card fills one half while the host drains the other.
        let cq = CompletionQueue::open(&rail.domain, &CqAttr { size: 2 * info.tx_size().max(depth) })
            .map_err(failed("opening the completion queue"))?;
        let mut qp = QueuePair::open(&rail.domain, info).map_err(failed("opening the queue pair"))?;
        qp.bind_av(&rail.av).map_err(failed("binding the address vector"))?;
        let both = bindings::FI_TRANSMIT | bindings::FI_RECV;
        qp.bind_cq(&cq, both).map_err(failed("binding the completion queue"))?;
        qp.bind_counter(&local, role.counted_operations(signals)).map_err(failed("binding the completion counter"))?;
        if let Some(signal) = &signal {
            qp.bind_counter(signal, bindings::FI_REMOTE_WRITE).map_err(failed("binding the signal counter"))?;
        }
        if signals == Signals::Emulated
            && let Err(error) =
                qp.set_number(bindings::FI_OPT_EFA_RNR_RETRY, if isolates { RETRY_LONG } else { RETRY_FOREVER })
            && first_time(FEW_RETRIES, &rail.name())
        {
            crate::info!(
                "card {} does not retry indefinitely when a peer has no receive posted ({error}): many signals at once may fail",
                rail.name()
            );
        }
        qp.enable().map_err(failed("enabling the queue pair"))?;
        let (sq, rq) = rail.gda.query_qp(&qp).map_err(failed("querying the queues"))?;
        let cq_memory = rail.gda.query_cq(&cq).map_err(failed("querying the completion queue"))?;

        let mapping = match provider {
            Provider::SoftEfa => Mapping::Host,
            Provider::Efa | Provider::Tcp | Provider::Verbs => Mapping::Mmio,
        };
        let bytes = sq.num_entries as usize * sq.entry_size as usize;
        // SAFETY: the queue pair keeps the ring mapped, and `Self` drops the mapping before the queue pair (field
        // order).
        let sq_map = unsafe { device.map(sq.buffer.cast::<c_void>(), bytes, mapping) }?;
        // SAFETY: the queue pair keeps the doorbell mapped, and `Self` drops the mapping before the queue pair (field
        // order).
        let db_map = unsafe { device.map(sq.doorbell.cast::<c_void>(), size_of::<u32>(), mapping) }?;
        Ok(Self {
            sq_map,
            db_map,
            qp,
            role,
            sq,
            cq: cq_memory,
            host_ring: mapping == Mapping::Host,
            rq_entries: rq.num_entries,
            max_inline: info.inject_size(),
            depth: depth as u32,
            cq_visible: device.kind() == DeviceKind::Cpu,
            offsets,
            failures: Arc::default(),
        })
    }

    /// Returns the address that peers insert into their address vectors.
    ///
    /// # Errors
    /// The libfabric call fails, or the address is not an EFA address.
    pub fn address(&self) -> Result<EndpointAddress, Error> {
        EndpointAddress::of(&self.qp, &self.role)
    }

    /// Returns the number of requests that may be in flight: a power of two, at most the ring's slots.
    pub fn sq_size(&self) -> u32 {
        floor_power_of_two(self.sq.num_entries).min(floor_power_of_two(self.depth))
    }

    /// Returns true for 128-byte requests, which can carry a write's bytes inline.
    pub fn wide(&self) -> bool {
        self.sq.entry_size == 128
    }

    /// Returns true if request ids may have more than 16 bits.
    pub fn request_ids_64(&self) -> bool {
        self.sq.caps & bindings::fi_efa_wq_caps::FI_EFA_WQ_CAPS_64_BIT_REQ_ID as u16 != 0
    }

    /// Returns the error counter's host address, if it has one.
    pub fn errors(&self, memory: &dyn DeviceBuffer) -> Option<*const u64> {
        memory.host_address().map(|base| base.wrapping_add(self.offsets.errors).cast_const().cast())
    }

    /// Returns the counters that have a host address, for metrics; without one, the watcher's count of errors. The
    /// caller adds the cursor.
    pub fn words(&self, memory: &dyn DeviceBuffer, start: Start) -> Words {
        let card = |offset: usize| memory.host_address().map(|base| base.wrapping_add(offset).cast_const().cast());
        let signal =
            matches!(self.role, Role::Signal(_)).then(|| card(self.offsets.completed + COUNTER_STRIDE)).flatten();
        let seen = (self.failures.as_ptr().cast_const(), 0);
        Words {
            cursor: None,
            completed: (card(self.offsets.completed), start.completed),
            errors: self.errors(memory).map_or(seen, |word| (word, start.errors)),
            signal: signal.map(|word| (word, start.signal)),
        }
    }

    /// Returns true if the card has completed a request in error.
    pub fn has_failed(&self, memory: &dyn DeviceBuffer, start: Start) -> bool {
        let mut bytes = [0; 8];
        memory.read(self.offsets.errors, &mut bytes).is_err() || u64::from_le_bytes(bytes) != start.errors
    }

    /// Rings the doorbell for all requests below `count`, once no kernel uses the endpoint.
    pub fn ring(&self, count: u32) {
        // SAFETY: the queue pair keeps the doorbell mapped, and no other thread writes it.
        unsafe { arch::mmio_store_u32(self.sq.doorbell, count) };
    }

    /// Returns how many requests have ended, modulo 2^31: the completed ones and, with isolation, the failed ones.
    ///
    /// # Errors
    /// The device can't read a counter.
    pub fn ended(&self, memory: &dyn DeviceBuffer, start: Start, isolates: bool) -> Result<u32, Error> {
        let read = |offset: usize| {
            let mut bytes = [0; 8];
            memory.read(offset, &mut bytes)?;
            Ok::<_, Error>(u64::from_le_bytes(bytes))
        };
        let failed = if isolates { read(self.offsets.errors)?.wrapping_sub(start.errors) } else { 0 };
        Ok(read(self.offsets.completed)?.wrapping_add(failed) as u32)
    }

    /// Returns this endpoint's description for kernels. `values` is the address of its value slots, or 0.
    ///
    /// # Errors
    /// The device can't read the counters.
    pub fn spec(&self, memory: &dyn DeviceBuffer, values: u64) -> Result<EndpointSpec, Error> {
        let now = |offset: usize| {
            let mut bytes = [0; 8];
            memory.read(offset, &mut bytes)?;
            Ok::<_, Error>((memory.device_address() + offset as u64, u64::from_le_bytes(bytes)))
        };
        let sq_size = self.sq_size();
        let signal = match self.role {
            Role::Signal(_) => Some(now(self.offsets.completed + COUNTER_STRIDE)?),
            _ => None,
        };
        Ok(EndpointSpec {
            sq_buf: self.sq_map.device_address(),
            sq_db: self.db_map.device_address(),
            sq_entries: self.sq.num_entries,
            sq_size,
            // 0 means that the card has no limit.
            max_batch: if self.sq.max_batch == 0 { sq_size } else { self.sq.max_batch.min(sq_size) },
            wqe_size: self.sq.entry_size,
            max_inline: (self.max_inline as u32).min(if self.wide() { 80 } else { 32 }),
            rq_entries: self.rq_entries,
            cq_buf: if self.cq_visible { self.cq.buffer as u64 } else { 0 },
            cq_entries: self.cq.num_entries,
            cq_entry_size: self.cq.entry_size,
            completed: now(self.offsets.completed)?,
            errors: now(self.offsets.errors)?,
            signal,
            values: if values == 0 { (0, 0) } else { (values, sq_size) },
        })
    }
}

/// Returns the largest power of two that is at most `n`; 1 for 0.
pub fn floor_power_of_two(n: u32) -> u32 {
    1 << n.max(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_order_matches_kernel_indices() {
        let names: Vec<_> = Role::all(2, 1).map(|role| role.to_string()).collect();
        assert_eq!(names, ["data", "value", "counter 0", "counter 1", "signal 0"]);
        assert_eq!(Role::Data.counted_operations(Signals::Card), bindings::FI_WRITE | bindings::FI_READ);
        assert_eq!(Role::Signal(3).counted_operations(Signals::Card), bindings::FI_WRITE);
    }

    #[test]
    fn sizes_are_rounded_down_to_powers_of_two() {
        assert_eq!([0, 1, 2, 3, 64, 100, u32::MAX].map(floor_power_of_two), [1, 1, 2, 2, 64, 64, 1 << 31]);
    }
}
