//! The RMA plugin versus bare libfabric on the same provider: `FERROGIN_PROVIDER=tcp cargo bench -p
//! ferrogin-host-plugin --bench rma`.
//!
//! The two ranks are threads of this process. Each round measures both back to back, under the same load, and a figure
//! is the median of the rounds' ratios. docs/measurements.md has the results. With `-- --instructions`, valgrind counts
//! the plugin's instructions instead.
#![allow(unsafe_code)]

use ferrogin_libfabric::bindings::{self, fi_msg_rma, fi_rma_iov, fid_ep, iovec};
use ferrogin_libfabric::{
    AddressVector, Completion, CompletionQueue, Context, CqAttr, Domain, Endpoint, Fabric, FiAddr, Hints, Info,
    Libfabric, MemoryRegion, Read, Region, entry, find_datagrams,
};
use ferrogin_test_support::callgrind;
use mini_nccl::rma::{Request, RmaComm, RmaContext, RmaMemory, RmaPlugin, Signal, Transfer};
use mini_nccl::{Bootstrap, DeviceMemory};
use std::cell::Cell;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);
const ROUNDS: usize = 15;
/// Operations in flight.
const WINDOW: usize = 128;
const MIB: usize = 1 << 20;
/// Size of each half of a rank's memory: the first half is sent, the peer writes to the second.
const HALF: usize = 8 * MIB;

/// How a rank puts and signals.
trait Way {
    /// Starts a put of `size` bytes at `offset`.
    fn put(&mut self, offset: usize, size: usize);
    /// Number of outstanding operations.
    fn pending(&self) -> usize;
    /// Reaps completions, and lets the peer's operations make progress.
    fn poll(&mut self);
    /// Puts 8 bytes that the peer notices.
    fn signal(&mut self);
    /// Signals received from the peer so far.
    fn signals(&mut self) -> u64;
}

/// The plugin, called as NCCL's thread calls it.
struct Plugin {
    context: RmaContext,
    memory: RmaMemory,
    peer: usize,
    requests: VecDeque<Request>,
}

impl Plugin {
    fn open(comm: &RmaComm) -> Plugin {
        let memory = Arc::new(DeviceMemory::alloc(2 * HALF + 8).expect("memory"));
        let memory = comm.register(&memory, 0).expect("a registration");
        let context = comm.create_context(1).expect("a context");
        Plugin { context, memory, peer: 1 - comm.rank(), requests: VecDeque::new() }
    }

    fn start(&mut self, offset: usize, size: usize, is_signal: bool) {
        let signal = Signal { word: self.memory.at(2 * HALF), value: 1, strong: true };
        let (here, there) = (self.memory.at(offset), self.memory.at(HALF + offset));
        let transfer = Transfer { context: 0, peer: self.peer, here, there, size, aggregate: false };
        self.requests.push_back(self.context.put(transfer, is_signal.then_some(signal)).expect("a put"));
    }

    fn get(&mut self, offset: usize, size: usize) {
        let (here, there) = (self.memory.at(offset), self.memory.at(HALF + offset));
        let transfer = Transfer { context: 0, peer: self.peer, here, there, size, aggregate: false };
        self.requests.push_back(self.context.get(transfer).expect("a get"));
    }
}

impl Way for Plugin {
    fn put(&mut self, offset: usize, size: usize) {
        self.start(offset, size, false);
    }

    fn pending(&self) -> usize {
        self.requests.len()
    }

    fn poll(&mut self) {
        self.context.progress().expect("progress");
        while self.requests.front().is_some_and(|request| self.context.test(request).expect("a test")) {
            self.requests.pop_front();
        }
    }

    fn signal(&mut self) {
        self.start(0, 8, true);
    }

    fn signals(&mut self) -> u64 {
        self.poll();
        self.memory.memory().load(2 * HALF)
    }
}

type Rma = unsafe extern "C" fn(*mut fid_ep, *const fi_msg_rma, u64) -> isize;
type Recv = unsafe extern "C" fn(
    *mut fid_ep,
    *mut std::ffi::c_void,
    usize,
    *mut std::ffi::c_void,
    u64,
    *mut std::ffi::c_void,
) -> isize;

/// Bare libfabric: an endpoint of the kind that the plugin opens.
struct Bare {
    // Closed before its memory is freed.
    endpoint: Endpoint,
    cq: Arc<CompletionQueue>,
    write: Rma,
    recv: Recv,
    peer: FiAddr,
    /// Address and key of the peer's memory.
    remote: (u64, u64),
    region: MemoryRegion,
    memory: Arc<DeviceMemory>,
    contexts: Box<[Context<u32>]>,
    free: Vec<u32>,
    receives: Box<[Context<u32>]>,
    takes_receives: bool,
    pending: usize,
    signals: u64,
    _av: Arc<AddressVector>,
}

fn info(lib: &Arc<Libfabric>, provider: &str) -> Info {
    let caps = bindings::FI_MSG | bindings::FI_RMA;
    if provider == "tcp" {
        return find_datagrams(lib, "tcp", Some("127.0.0.1"), caps).expect("libfabric's tcp");
    }
    let hints =
        Hints::new(provider).caps(caps).mode(bindings::FI_CONTEXT | bindings::FI_CONTEXT2 | bindings::FI_RX_CQ_DATA);
    let mut all = lib.getinfo(&hints.mr_mode(ferrogin_libfabric::MR_MODE_ALL)).expect("the provider");
    // Like the plugin, prefer the fabric without a protocol above the card, if there is one.
    all.sort_by_key(|info| info.fabric_name() != "efa-direct");
    all.into_iter().next().expect("a card")
}

impl Bare {
    fn open(lib: &Arc<Libfabric>, provider: &str, bootstrap: &Bootstrap) -> Bare {
        let info = info(lib, provider);
        let domain = Domain::open(&Fabric::open(&info).expect("a fabric"), &info).expect("a domain");
        let av = AddressVector::open(&domain, 2).expect("an address vector");
        let cq = CompletionQueue::open(&domain, &CqAttr { size: 8 * WINDOW }).expect("a completion queue");
        let mut endpoint = Endpoint::open(&domain, &info).expect("an endpoint");
        endpoint.bind_av(&av).expect("the address vector");
        endpoint.bind_cq(&cq, bindings::FI_TRANSMIT | bindings::FI_RECV).expect("the completion queue");
        endpoint.enable().expect("an enabled endpoint");
        let write = entry!(endpoint.object(), rma: fi_ops_rma, writemsg, "fi_writemsg").expect("fi_writemsg");
        let recv = entry!(endpoint.object(), msg: fi_ops_msg, recv, "fi_recv").expect("fi_recv");
        let memory = Arc::new(DeviceMemory::alloc(2 * HALF).expect("memory"));
        let access = bindings::FI_WRITE | bindings::FI_REMOTE_WRITE | bindings::FI_READ | bindings::FI_REMOTE_READ;
        let region = Region::Va { addr: memory.as_ptr().cast(), len: memory.len() };
        // SAFETY: `Bare` closes the endpoint and the region before it frees the memory.
        let region = unsafe { MemoryRegion::register(&domain, region, access, 7) }.expect("a registration");
        let base = if info.mr_mode() & bindings::FI_MR_VIRT_ADDR != 0 { memory.as_ptr() as u64 } else { 0 };
        let names = bootstrap.allgather(&endpoint.name().expect("a name")).expect("all ranks");
        let place = [base.to_le_bytes(), region.key().to_le_bytes()].concat();
        let places = bootstrap.allgather(&place).expect("all ranks");
        let other = names.len() - 1 - bootstrap.rank();
        let word = |at: usize| places[other][at..at + 8].try_into().map(u64::from_le_bytes).expect("8 bytes");
        let contexts = || (0..WINDOW as u32).map(Context::new).collect::<Box<[_]>>();
        let mut this = Bare {
            peer: av.insert(&names[other]).expect("the peer"),
            takes_receives: (info.mode() | info.rx_mode()) & bindings::FI_RX_CQ_DATA != 0,
            remote: (word(0), word(8)),
            endpoint,
            cq,
            write,
            recv,
            region,
            memory,
            contexts: contexts(),
            free: (0..WINDOW as u32).collect(),
            receives: contexts(),
            pending: 0,
            signals: 0,
            _av: av,
        };
        if this.takes_receives {
            (0..WINDOW).for_each(|at| this.receive(at));
        }
        bootstrap.barrier().expect("all ranks");
        this
    }

    fn receive(&mut self, at: usize) {
        let context = self.receives[at].as_ptr();
        let (endpoint, any) = (self.endpoint.as_ptr(), bindings::FI_ADDR_UNSPEC);
        // SAFETY: the endpoint is open, and the context belongs to this zero-byte receive.
        let code = unsafe { (self.recv)(endpoint, null_mut(), 0, null_mut(), any, context) };
        assert_eq!(code, 0, "fi_recv");
    }

    fn write(&mut self, offset: usize, size: usize, flags: u64) {
        let at = loop {
            match self.free.pop() {
                Some(at) => break at,
                None => self.poll(),
            }
        };
        let local = self.memory.as_ptr().cast::<u8>().wrapping_add(offset);
        let iov = iovec { iov_base: local.cast(), iov_len: size };
        let (base, key) = self.remote;
        let remote = fi_rma_iov { addr: base + (HALF + offset) as u64, len: size, key };
        let mut descriptor = self.region.descriptor();
        let message = fi_msg_rma {
            msg_iov: &iov,
            desc: &mut descriptor,
            iov_count: 1,
            addr: self.peer.0,
            rma_iov: &remote,
            rma_iov_count: 1,
            context: self.contexts[at as usize].as_ptr(),
            data: 1,
        };
        loop {
            // SAFETY: the endpoint is open, the message and vectors outlive the call, and the context and its bytes
            // belong to this write.
            match unsafe { (self.write)(self.endpoint.as_ptr(), &message, flags | bindings::FI_COMPLETION) } {
                0 => break,
                code if -code == bindings::FI_EAGAIN as isize => self.poll(),
                code => panic!("fi_writemsg: {code}"),
            }
        }
        self.pending += 1;
    }
}

impl Way for Bare {
    fn put(&mut self, offset: usize, size: usize) {
        self.write(offset, size, 0);
    }

    fn pending(&self) -> usize {
        self.pending
    }

    fn poll(&mut self) {
        let mut batch = [Completion::EMPTY; 32];
        let Read::Entries(count) = self.cq.read(&mut batch).expect("fi_cq_read") else {
            panic!("an operation failed: {:?}", self.cq.read_error());
        };
        for completion in &batch[..count] {
            if completion.flags & bindings::FI_REMOTE_CQ_DATA != 0 {
                self.signals += 1;
                if self.takes_receives {
                    // SAFETY: the context belongs to a receive on this endpoint.
                    let at = unsafe { Context::<u32>::note(completion.context) };
                    self.receive(at as usize);
                }
            } else {
                // SAFETY: the context belongs to a write on this endpoint.
                self.free.push(unsafe { Context::<u32>::note(completion.context) });
                self.pending -= 1;
            }
        }
    }

    fn signal(&mut self) {
        self.write(0, 8, bindings::FI_REMOTE_CQ_DATA);
    }

    fn signals(&mut self) -> u64 {
        self.poll();
        self.signals
    }
}

/// Number of put measurements that rank 0 has finished.
static ENDED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Number that this rank has begun.
    static BEGUN: Cell<u64> = const { Cell::new(0) };
}

/// Time in seconds for `count` puts of `size` bytes from rank 0, with `window` in flight, while rank 1 polls.
fn puts(path: &mut dyn Way, rank: usize, size: usize, count: usize, window: usize) -> f64 {
    let number = BEGUN.get() + 1;
    BEGUN.set(number);
    let began = Instant::now();
    if rank == 0 {
        let places = (HALF / size.max(64)).min(WINDOW);
        for n in 0..count {
            path.put(n % places * size.max(64), size);
            while path.pending() >= window {
                path.poll();
            }
        }
        while path.pending() > 0 {
            path.poll();
        }
        let time = began.elapsed().as_secs_f64();
        ENDED.store(number, Ordering::Release);
        return time;
    }
    while ENDED.load(Ordering::Acquire) < number {
        path.poll();
        std::thread::yield_now();
    }
    0.0
}

/// Time in seconds for `count` signal round trips, after `before` earlier ones.
fn ping_pong(path: &mut dyn Way, rank: usize, count: usize, before: usize) -> f64 {
    let began = Instant::now();
    for n in before + 1..=before + count {
        if rank == 0 {
            path.signal();
        }
        while path.signals() < n as u64 {
            std::thread::yield_now();
        }
        if rank == 1 {
            path.signal();
        }
    }
    let time = began.elapsed().as_secs_f64();
    while path.pending() > 0 {
        path.poll();
    }
    time
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures both in turn; rank 0 prints the median of each and of the ratio plugin / bare.
fn compare(
    comm: &RmaComm,
    what: &str,
    paths: [&mut dyn Way; 2],
    measure: impl Fn(&mut dyn Way, usize) -> f64,
    unit: (f64, &str, bool),
) {
    let [plugin, bare] = paths;
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        comm.barrier().expect("all ranks");
        let one = measure(plugin, round);
        comm.barrier().expect("all ranks");
        let other = measure(bare, round);
        // The first round opens connections.
        if round > 0 {
            ours.push(one);
            theirs.push(other);
            ratios.push(if unit.2 { one / other } else { other / one });
        }
    }
    if comm.rank() == 0 {
        let (scale, name, is_time) = unit;
        let shown = |seconds: f64| if is_time { seconds * scale } else { scale / seconds };
        let (ours, theirs, ratio) = (shown(median(ours)), shown(median(theirs)), median(ratios));
        println!("{what:<34} plugin {ours:>10.2} {name:<9} bare {theirs:>10.2} {name:<9} ratio {ratio:.2}");
    }
}

fn rank(plugin: &Arc<RmaPlugin>, lib: &Arc<Libfabric>, provider: &str, [control, bare]: [Bootstrap; 2]) {
    let comm = RmaComm::init(plugin, Arc::new(control), 0).expect("a communicator");
    let rank = comm.rank();
    let mut ours = Plugin::open(&comm);
    let mut bare = Bare::open(lib, provider, &bare);
    const PUTS: usize = 4000;
    let rate = |path: &mut dyn Way, _| puts(path, rank, 8, PUTS, WINDOW);
    compare(&comm, "puts of 8 bytes", [&mut ours, &mut bare], rate, (PUTS as f64 / 1e3, "k/s", false));
    const TURNS: usize = 300;
    let turns = |path: &mut dyn Way, round| ping_pong(path, rank, TURNS, round * TURNS);
    compare(
        &comm,
        "put of 8 bytes and signal, one way",
        [&mut ours, &mut bare],
        turns,
        (1e6 / (2 * TURNS) as f64, "us", true),
    );
    const BLOCKS: usize = 200;
    let blocks = |path: &mut dyn Way, _| puts(path, rank, MIB, BLOCKS, 8);
    compare(&comm, "puts of 1 MiB", [&mut ours, &mut bare], blocks, (BLOCKS as f64 * MIB as f64 / 1e9, "GB/s", false));
    comm.barrier().expect("all ranks");
}

/// Counts the plugin's instructions for operations to itself, without those of libfabric and the card.
fn instructions(plugin: &Arc<RmaPlugin>, lib: &Arc<Libfabric>, provider: &str) {
    let own = || Bootstrap::threads(1, LIMIT).remove(0);
    let comm = RmaComm::init(plugin, Arc::new(own()), 0).expect("a communicator");
    let mut ours = Plugin { peer: 0, ..Plugin::open(&comm) };
    let mut bare = Bare::open(lib, provider, &own());
    repeat("put", &mut ours, |path| path.put(0, 64));
    repeat("get", &mut ours, |path| path.get(0, 64));
    repeat("put and signal", &mut ours, |path| path.signal());
    repeat("bare write", &mut bare, |path| path.put(0, 64));
}

fn repeat<P: Way>(name: &str, path: &mut P, start: impl Fn(&mut P)) {
    callgrind::count(name, 4096, |count| {
        for _ in 0..count {
            start(path);
            while path.pending() >= WINDOW {
                path.poll();
            }
        }
        while path.pending() > 0 {
            path.poll();
        }
    });
}

fn main() {
    let dist =
        std::env::var_os("FERROGIN_DIST").map_or(Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist"), PathBuf::from);
    let provider = std::env::var("FERROGIN_PROVIDER").unwrap_or_else(|_| "softefa".into());
    for (name, value) in [
        ("FERROGIN_PROVIDER", provider.as_ref()),
        ("FERROGIN_DEVICE", "cpu".as_ref()),
        ("FI_PROVIDER_PATH", dist.as_os_str()),
    ] {
        // SAFETY: this is the process's only thread.
        unsafe { std::env::set_var(name, value) };
    }
    let plugin = RmaPlugin::load(dist.join("libnccl-gin-ferrogin.so")).expect("the built plugin: make build");
    let lib = Libfabric::load(None).expect("libfabric");
    if callgrind::running() {
        return instructions(&plugin, &lib, &provider);
    }
    if std::env::args().any(|argument| argument == "--instructions") {
        let counts = callgrind::run_again(&["--instructions"], &std::env::temp_dir().join("ferrogin-bench-rma"));
        for count in counts.unwrap_or_else(|error| panic!("{error}")) {
            println!("{:<20} {:>8.0} instructions", count.name, count.each);
            count.by_object.iter().for_each(|(object, each)| println!("    {object:<32} {each:>8.0}"));
        }
        return;
    }
    println!("provider {provider}, libfabric {}, {ROUNDS} rounds of each in turn", lib.version());
    let pairs = Bootstrap::threads(2, LIMIT).into_iter().zip(Bootstrap::threads(2, LIMIT));
    let threads: Vec<_> = pairs
        .map(|(control, bare)| {
            let (plugin, lib, provider) = (plugin.clone(), lib.clone(), provider.clone());
            std::thread::spawn(move || rank(&plugin, &lib, &provider, [control, bare]))
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("a rank without a panic"));
}
