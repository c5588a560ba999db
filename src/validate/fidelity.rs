//! Checks the card below the plugin's context and kernels: what it reports about itself, and what it does with raw work
//! requests.
//!
//! Queues, counters and memory are the plugin's, opened by the plugin's own code on the first card; the CPU writes the
//! requests. If the device is a GPU, data and counters are in GPU memory.
#![allow(unsafe_code)]

use efa_dp_direct::cq::{self, Cqe};
use efa_dp_direct::queue::{CqAttrs, CqV0, QpAttrs, QpV1, WQ_CAPS_64_BIT_REQ_ID};
use efa_dp_direct::sq;
use efa_dp_direct::wqe::words::{NARROW, WIDE};
use efa_dp_direct::wqe::{Destination, Geometry, Inline, Operation, RemoteMem, RequestIds, SendWqe, Sge, WriteData};
use ferrogin_libfabric::progress::Progress;
use ferrogin_libfabric::{FiAddr, Info, Libfabric, MemoryKind, MemoryRegion, Region, bindings};
use mini_nccl::Bootstrap;
use nccl_gin_ferrogin::address::EndpointAddress;
use nccl_gin_ferrogin::cards::CardQuery;
use nccl_gin_ferrogin::config::{Config, Signals};
use nccl_gin_ferrogin::device::{self, DeviceBuffer, DeviceKind, Use};
use nccl_gin_ferrogin::endpoint::{CounterOffsets, Endpoint, EndpointOptions, Role};
use nccl_gin_ferrogin::fault::COUNTER_STRIDE;
use nccl_gin_ferrogin::memory::{ContextMemory, MemoryLayout, RegisteredMemory};
use nccl_gin_ferrogin::rail::{Peers, QueueOptions, Rail};
use serde_json::{Value, json};
use std::fmt::Display;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests per round, and the size of the long ones among them.
const REQUESTS: usize = 32;
const LONG: usize = 64 << 10;
const SHORT: usize = 64;
const AREA: usize = REQUESTS * LONG;
/// A round's request ids begin here if the card keeps 64 bits, and at 0 if it keeps 16.
const HIGH_IDS: u64 = 0x1234_5678_0000;
const SENTINEL: u64 = 0x0f1e_2d3c_4b5a_6978;
/// Time limit of a wait for the card.
const WAIT: Duration = Duration::from_secs(30);

/// The hidden subcommand: prints what this rank observed, as a JSON object on the last line.
pub fn run() -> ExitCode {
    let mut seen = Observed::default();
    let result = observe(&mut seen);
    let mut error = result.err();
    let printed = crate::stdout::print(format_args!("\n{}\n", json!({ "observed": seen.0, "error": error })));
    error = error.or(printed.err().map(|error| error.to_string()));
    match error {
        None => ExitCode::SUCCESS,
        Some(error) => {
            eprintln!("fidelity: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Observations: a key from [`expected`](super::expected), and the value as text.
#[derive(Default)]
struct Observed(Vec<(&'static str, String)>);

impl Observed {
    fn add(&mut self, key: &'static str, value: impl Display) {
        self.0.push((key, value.to_string()));
    }

    fn yes_no(&mut self, key: &'static str, value: bool) {
        self.add(key, if value { "yes" } else { "no" });
    }
}

fn text(error: impl Display) -> String {
    error.to_string()
}

/// Inserts the peers' addresses; fails unless all are accepted.
fn insert(rail: &Arc<Rail>, addresses: &[EndpointAddress]) -> Result<Peers, String> {
    match rail.insert(addresses).map_err(text)? {
        (peers, None) => Ok(peers),
        (_, Some((at, error))) => Err(format!("address {at} of the ranks is refused: {error}")),
    }
}

fn observe(seen: &mut Observed) -> Result<(), String> {
    let bootstrap = Bootstrap::from_env(mini_nccl::timeout_from_env()).map_err(text)?;
    let config = Config::from_env().map_err(text)?;
    let lib = Libfabric::load(None).map_err(text)?;
    let device = scenario_runner::gpu::open_local(&config);
    let kind = device.as_ref().map_or(DeviceKind::Cpu, |device| device.kind());
    let query = CardQuery { lib, provider: config.provider, kind };
    let cards = query.find().map_err(text)?;
    let device = device.map_err(text)?;
    let card = cards.first().ok_or("no card")?;
    observe_card(seen, &query, card, cards.len());

    seen.yes_no("writes with immediate data: without a posted receive", card.rx_mode() & bindings::FI_RX_CQ_DATA == 0);
    let rail = Rail::open(0, card, bootstrap.nranks()).map_err(text)?;
    let options = |wide| QueueOptions { depth: REQUESTS, wide, tclass: 0, receives: 0 };
    let narrow = rail.endpoint_info(&query, options(false)).map_err(text)?;
    let wide = rail.endpoint_info(&query, options(true));
    let layout = MemoryLayout { page: device::page_size(), endpoints: 3, counters: 4, pooled: 1, slots: REQUESTS };
    let memory = ContextMemory::allocate(&*device, layout).map_err(text)?;
    let registered = RegisteredMemory::register(&rail, &memory, layout).map_err(text)?;
    seen.add("counters: place", if memory.card.dma_buf().is_some() { "dma-buf" } else { "address" });

    let base = layout.completed();
    let open = |role, info, place: usize, number: usize| {
        let offsets = CounterOffsets {
            completed: base + place * COUNTER_STRIDE,
            errors: layout.errors() + number * COUNTER_STRIDE,
        };
        // SAFETY: `memory` lives until the end of this function, longer than the endpoints, and no two of them share
        // offsets.
        unsafe {
            Endpoint::open(
                &rail,
                &*device,
                EndpointOptions {
                    provider: config.provider,
                    signals: Signals::Card,
                    role,
                    info,
                    depth: REQUESTS,
                    isolates: false,
                },
                &*memory.card,
                offsets,
            )
        }
        .map_err(|error| format!("endpoint {role}: {error}"))
    };
    let data = open(Role::Data, &narrow, 0, 0)?;
    let signal = open(Role::Signal(0), &narrow, 1, 1)?;
    observe_queue(seen, &data);

    let buffer = device.allocate(3 * AREA, Use::Window).map_err(text)?;
    let region = registrations(seen, &rail, &*buffer)?;
    let (lkey, rkey) = rail.keys(&region).map_err(text)?;
    let bytes: Vec<MaybeUninit<u8>> = (0..AREA).map(|at| MaybeUninit::new(pattern(bootstrap.rank(), at))).collect();
    buffer.write(0, &bytes).map_err(text)?;

    // Each rank inserts all addresses: a card refuses requests from queue pairs that it does not know.
    let own = json!({
        "data": data.address().map_err(text)?.to_bytes(),
        "signal": signal.address().map_err(text)?.to_bytes(),
        "base": buffer.device_address(),
        "rkey": rkey,
    });
    let all = bootstrap.allgather(own.to_string().as_bytes()).map_err(text)?;
    let all: Vec<Value> = all.iter().map(|block| serde_json::from_slice(block).unwrap_or(Value::Null)).collect();
    let next = (bootstrap.rank() + 1) % bootstrap.nranks();
    let peers = insert(&rail, &addresses(&all)?)?;
    let to_next = ToNext {
        bootstrap: &bootstrap,
        rail: &rail,
        memory: &memory,
        base,
        errors: layout.errors(),
        buffer: &*buffer,
        lkey,
        target: peers.numbers()[2 * next + 1],
        remote: (all[next]["base"].as_u64().unwrap_or(0), all[next]["rkey"].as_u64().unwrap_or(0) as u32),
    };
    to_next.writes_and_reads(seen, &data)?;

    // A wide request, which carries its bytes inline.
    let value = match &wide {
        Ok(info) => open(Role::Value, info, 3, 2),
        Err(error) => Err(error.to_string()),
    };
    let inline = wide.as_ref().map_or(0, Info::inject_size);
    seen.add("wide requests: bytes inline", inline);
    match &value {
        Ok(value) if value.wide() => {
            seen.add("wide requests", format!("{} bytes, {} slots", value.sq.entry_size, value.sq.num_entries));
        }
        Ok(value) => seen.add("wide requests", format!("no: requests have {} bytes", value.sq.entry_size)),
        Err(error) => seen.add("wide requests", format!("no: {error}")),
    }
    let value = value.ok().filter(Endpoint::wide);
    if let (true, Some(value)) = (bootstrap.all(value.is_some()).map_err(text)?, value) {
        to_next.inline_value(seen, &value)?;
    }
    // Each is dropped before what it uses.
    drop(data);
    drop(signal);
    drop(peers);
    drop(region);
    drop(registered);
    Ok(())
}

/// Returns all ranks' addresses: for each rank, the one for data and the one for signals.
fn addresses(all: &[Value]) -> Result<Vec<EndpointAddress>, String> {
    let mut addresses = Vec::new();
    for (rank, block) in all.iter().enumerate() {
        for role in ["data", "signal"] {
            let address: Vec<u8> = serde_json::from_value(block[role].clone()).unwrap_or_default();
            let address = EndpointAddress::parse(&address);
            addresses.push(
                address.ok_or_else(|| format!("rank {rank} sent no address: run the same ferrogin on all ranks"))?,
            );
        }
    }
    Ok(addresses)
}

/// Records what the card reports about itself.
fn observe_card(seen: &mut Observed, query: &CardQuery, card: &Info, cards: usize) {
    seen.add("libfabric", query.lib.version());
    seen.add("provider's version", card.provider_version());
    seen.add("kernels", query.kind.name());
    seen.add("cards", cards);
    seen.add("page size", device::page_size());
    let counted = |value: usize| if value == 0 { "not reported".to_owned() } else { value.to_string() };
    seen.add("counters: highest value", counted(usize::try_from(card.max_counter_value()).unwrap_or(usize::MAX)));
    seen.add("counters: number", counted(card.counter_count()));
    seen.add("queue pairs: number", counted(card.endpoint_count()));
    seen.add("longest transfer", card.max_msg_size());
    seen.add(
        "link speed",
        card.link_speed().map_or("not reported".into(), |speed| format!("{} Gbit/s", speed / 1_000_000_000)),
    );
}

/// Records what the card reports about a queue.
fn observe_queue(seen: &mut Observed, data: &Endpoint) {
    seen.add("queue: capabilities", format!("{:#x}", data.sq.caps));
    seen.yes_no("queue: 64-bit request ids", data.request_ids_64());
    seen.add("queue: bytes of a request", data.sq.entry_size);
    seen.add("queue: slots", data.sq.num_entries);
    seen.add("queue: requests in a batch", data.sq.max_batch);
    seen.add("queue: bytes of a completion", data.cq.entry_size);
}

/// Sends requests from this rank's card to the next rank's.
struct ToNext<'a> {
    bootstrap: &'a Bootstrap,
    rail: &'a Arc<Rail>,
    memory: &'a ContextMemory,
    /// Offset of the first completion counter.
    base: usize,
    /// Offset of the first error counter.
    errors: usize,
    buffer: &'a dyn DeviceBuffer,
    lkey: u32,
    /// libfabric's address for the next rank's signal endpoint.
    target: FiAddr,
    /// The next rank's buffer: address and key.
    remote: (u64, u32),
}

impl ToNext<'_> {
    fn destination(&self, endpoint: &Endpoint) -> Result<Destination, String> {
        let target = self.rail.gda.query_addr(&endpoint.qp, self.target).map_err(text)?;
        Ok(Destination { ah: target.ah, qpn: target.qpn, qkey: target.qkey })
    }

    fn local(&self, offset: usize, length: usize) -> Sge {
        Sge { addr: self.buffer.device_address() + offset as u64, length: length as u32, lkey: self.lkey }
    }

    fn remote(&self, offset: usize) -> RemoteMem {
        RemoteMem { addr: self.remote.0 + offset as u64, rkey: self.remote.1 }
    }

    fn barrier(&self) -> Result<(), String> {
        self.bootstrap.barrier().map_err(text)
    }

    fn writes_and_reads(&self, seen: &mut Observed, data: &Endpoint) -> Result<(), String> {
        let destination = self.destination(data)?;
        let mut queue = Queue::new(data, self.rail.domain.progress())?;
        let length = |number: usize| if number.is_multiple_of(2) { LONG } else { SHORT };
        let (rank, nranks) = (self.bootstrap.rank(), self.bootstrap.nranks());
        self.barrier()?;

        // Alternates long and short writes, so that a card that works out of order shows it.
        let first = if data.request_ids_64() { HIGH_IDS } else { 0 };
        for number in 0..REQUESTS {
            let data = WriteData::One(self.local(number * LONG, length(number)));
            let write = Operation::Write { remote: self.remote(AREA + number * LONG), data, imm: None };
            queue.post::<NARROW>(SendWqe::new(first + number as u64, destination, write), Geometry::NARROW)?;
        }
        let order = queue.completions(REQUESTS)?;
        seen.add("writes: completions", order.len());
        let ids: Vec<u64> = order.iter().map(|id| id.wrapping_sub(first)).collect();
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        let whole = sorted == (0..REQUESTS as u64).collect::<Vec<_>>();
        seen.yes_no("writes: each request id came back once, whole", whole);
        seen.add("writes: order of completions", order_of(&ids));
        // The card counts a request after its completion entry.
        let counters = &*self.memory.card;
        seen.add("writes: completion counter", wait_for(counters, self.base, REQUESTS as u64, &queue)?);
        self.barrier()?;
        let arrivals = wait_for(counters, self.base + 2 * COUNTER_STRIDE, REQUESTS as u64, &queue)?;
        seen.add("writes: signal counter of the target", arrivals);
        seen.yes_no("writes: data arrived", arrived(self.buffer, AREA, (rank + nranks - 1) % nranks, length)?);

        // Reads the same bytes from the next rank.
        self.barrier()?;
        for number in 0..REQUESTS {
            let into = Some(self.local(2 * AREA + number * LONG, length(number)));
            let read = Operation::Read { remote: self.remote(number * LONG), into };
            queue.post::<NARROW>(SendWqe::new(first + number as u64, destination, read), Geometry::NARROW)?;
        }
        let order = queue.completions(REQUESTS)?;
        let ids: Vec<u64> = order.iter().map(|id| id.wrapping_sub(first)).collect();
        seen.add("reads: completions", order.len());
        seen.add("reads: order of completions", order_of(&ids));
        seen.add("reads: completion counter", wait_for(counters, self.base, 2 * REQUESTS as u64, &queue)?);
        seen.yes_no("reads: data arrived", arrived(self.buffer, 2 * AREA, (rank + 1) % nranks, length)?);
        seen.add("error counter", counter(counters, self.errors)?);
        self.barrier()
    }

    fn inline_value(&self, seen: &mut Observed, value: &Endpoint) -> Result<(), String> {
        let all = self.bootstrap.allgather(&value.address().map_err(text)?.to_bytes()).map_err(text)?;
        let addresses: Option<Vec<_>> = all.iter().map(|bytes| EndpointAddress::parse(bytes)).collect();
        let _values = insert(self.rail, &addresses.ok_or("a rank sent no address")?)?;
        let destination = self.destination(value)?;
        let mut queue = Queue::new(value, self.rail.domain.progress())?;
        self.barrier()?;
        let sentinel = Inline::new(&SENTINEL.to_le_bytes()).ok_or("a value is not inline")?;
        let write = Operation::Write { remote: self.remote(AREA), data: WriteData::Inline(sentinel), imm: None };
        queue.post::<WIDE>(SendWqe::new(7, destination, write), Geometry::WIDE)?;
        let order = queue.completions(1)?;
        self.barrier()?;
        let mut bytes = [0; 8];
        self.buffer.read(AREA, &mut bytes).map_err(text)?;
        seen.yes_no("wide requests: inline value arrived", order.len() == 1 && u64::from_le_bytes(bytes) == SENTINEL);
        self.barrier()
    }
}

fn pattern(rank: usize, at: usize) -> u8 {
    (at % 253) as u8 ^ (rank as u8).wrapping_mul(29)
}

/// Tries the ways of registering the buffer with the card. Returns the region for the way that the plugin uses.
fn registrations(seen: &mut Observed, rail: &Rail, buffer: &dyn DeviceBuffer) -> Result<MemoryRegion, String> {
    let access = bindings::FI_READ | bindings::FI_WRITE | bindings::FI_REMOTE_READ | bindings::FI_REMOTE_WRITE;
    let is_gpu = buffer.host_address().is_none();
    let by_address = Region::Va { addr: buffer.device_address() as *mut u8, len: buffer.len() };
    let kind = if is_gpu { MemoryKind::Cuda(0) } else { MemoryKind::System };
    // SAFETY: the caller drops the region before the buffer, and there are no Rust references to the buffer.
    let address = unsafe { MemoryRegion::register_kind(&rail.domain, by_address, access, 1, kind) };
    let shown = |result: &Result<MemoryRegion, ferrogin_libfabric::Error>| match result {
        Ok(_) => "yes".to_owned(),
        Err(error) => format!("no: {error}"),
    };
    seen.add("memory: by address", shown(&address));
    for (key, pcie) in
        [("memory: as dma-buf mapped over PCIe", true), ("memory: as dma-buf without that mapping", false)]
    {
        let way = match buffer.export(pcie) {
            None => "not tried: host memory".into(),
            Some(Err(error)) => format!("no: {error}"),
            Some(Ok(fd)) => {
                let base = buffer.device_address() as *mut u8;
                let region = Region::DmaBuf { fd: fd.as_fd(), offset: 0, len: buffer.len(), base };
                // SAFETY: the region is dropped here, before the buffer, and there are no Rust references to the
                // buffer.
                shown(&unsafe { MemoryRegion::register_kind(&rail.domain, region, access, 3, kind) })
            }
        };
        seen.add(key, way);
    }
    let Some(dma_buf) = buffer.dma_buf() else {
        seen.add("memory: as dma-buf", "not tried: host memory is not a dma-buf");
        return address.map_err(text);
    };
    let base = (buffer.device_address() as *mut u8).wrapping_sub(dma_buf.offset as usize);
    let region = Region::DmaBuf { fd: dma_buf.fd, offset: dma_buf.offset, len: buffer.len(), base };
    // SAFETY: the caller drops the region before the buffer, and there are no Rust references to the buffer.
    let region = unsafe { MemoryRegion::register_kind(&rail.domain, region, access, 2, dma_buf.kind) };
    seen.add("memory: as dma-buf", shown(&region));
    region.or(address).map_err(text)
}

fn counter(buffer: &dyn DeviceBuffer, offset: usize) -> Result<u64, String> {
    let mut bytes = [0; 8];
    buffer.read(offset, &mut bytes).map_err(text)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Returns the counter once it has reached `expected`, or at the time limit.
fn wait_for(buffer: &dyn DeviceBuffer, offset: usize, expected: u64, queue: &Queue<'_>) -> Result<u64, String> {
    let deadline = Instant::now() + WAIT;
    loop {
        let value = counter(buffer, offset)?;
        if value >= expected || Instant::now() > deadline {
            return Ok(value);
        }
        queue.relax();
    }
}

/// Returns whether the area has the bytes of `rank`'s source, and zeros after short transfers.
fn arrived(
    buffer: &dyn DeviceBuffer,
    area: usize,
    rank: usize,
    length: impl Fn(usize) -> usize,
) -> Result<bool, String> {
    let mut bytes = vec![0; AREA];
    buffer.read(area, &mut bytes).map_err(text)?;
    Ok((0..AREA).all(|at| bytes[at] == if at % LONG < length(at / LONG) { pattern(rank, at) } else { 0 }))
}

/// Describes the completion order of requests that were posted as 0, 1, 2, …
fn order_of(ids: &[u64]) -> String {
    let displaced = ids.iter().enumerate().map(|(at, id)| (*id).abs_diff(at as u64)).max().unwrap_or(0);
    match displaced {
        0 => "as posted".into(),
        1 => "not as posted, by at most 1 place".into(),
        places => format!("not as posted, by at most {places} places"),
    }
}

/// The producer side of an endpoint's queues.
struct Queue<'a> {
    qp: QpV1,
    cq: CqV0,
    progress: Option<Progress>,
    endpoint: &'a Endpoint,
}

impl<'a> Queue<'a> {
    fn new(endpoint: &'a Endpoint, progress: Option<Progress>) -> Result<Queue<'a>, String> {
        let sq = &endpoint.sq;
        let qp = QpV1::new(&QpAttrs {
            sq_buffer: sq.buffer,
            sq_doorbell: sq.doorbell,
            sq_num_entries: sq.num_entries,
            sq_entry_size: sq.entry_size,
            sq_max_batch: if sq.max_batch == 0 { sq.num_entries } else { sq.max_batch },
            rq_num_entries: 1,
            rq_entry_size: 16,
            sq_max_inline_data: if endpoint.wide() { 80 } else { 32 },
            sq_max_rdma_sges: 1,
            sq_caps: WQ_CAPS_64_BIT_REQ_ID,
            ..QpAttrs::ZERO
        });
        let cq = CqV0::new(&CqAttrs {
            comp_mask: 0,
            flags: 0,
            buffer: endpoint.cq.buffer,
            num_entries: endpoint.cq.num_entries,
            entry_size: endpoint.cq.entry_size,
        });
        let bad = |what: &str| format!("the device code refuses the {what} queue's layout");
        Ok(Queue { qp: qp.map_err(|_| bad("send"))?, cq: cq.map_err(|_| bad("completion"))?, progress, endpoint })
    }

    /// Posts one request and rings the doorbell for it.
    fn post<const N: usize>(&mut self, request: SendWqe, geometry: Geometry) -> Result<(), String> {
        let mut bytes = [[0; 8]; N];
        request.emit(&geometry, bytes.as_flattened_mut()).map_err(text)?;
        let request = bytes.map(u64::from_le_bytes);
        let queue = &raw mut self.qp.sq.wq;
        // SAFETY: the endpoint keeps its ring and doorbell mapped, and only this value uses them.
        unsafe { sq::start_batch(queue, 1) };
        // SAFETY: as above; callers choose `N` to match the endpoint's request size, and slot 0 of the batch was
        // reserved.
        unsafe { sq::place(queue, 0, request) };
        // SAFETY: as above.
        unsafe { sq::flush(queue) };
        Ok(())
    }

    /// Returns the request ids of the next `count` completions, in order; fewer if the time limit is reached.
    fn completions(&mut self, count: usize) -> Result<Vec<u64>, String> {
        let deadline = Instant::now() + WAIT;
        let mut ids = Vec::new();
        let bits = if self.endpoint.request_ids_64() { RequestIds::Bits64 } else { RequestIds::Bits16 };
        while ids.len() < count && Instant::now() < deadline {
            // SAFETY: the endpoint keeps its completion ring mapped, and only this value reads it.
            let Some(slot) = (unsafe { cq::poll(&self.cq, 0) }) else {
                self.relax();
                continue;
            };
            // SAFETY: as above; `poll` returned the slot.
            let entry = unsafe { cq::read(&self.cq, slot) };
            // SAFETY: as above; one entry was read.
            unsafe { cq::pop(&mut self.cq, 1) };
            match Cqe::parse(&entry, bits) {
                Ok(Cqe::Send(completion)) if completion.status.is_ok() => ids.push(completion.wr_id),
                Ok(other) => return Err(format!("a request failed: {other:?}")),
                Err(error) => return Err(format!("a completion has no meaning: {error:?}")),
            }
        }
        Ok(ids)
    }

    /// Lets a software card work in this thread.
    fn relax(&self) {
        if let Some(progress) = self.progress {
            // SAFETY: the endpoint keeps the domain open.
            let _ = unsafe { (progress.function)(progress.arg) };
        }
        std::thread::yield_now();
    }
}
