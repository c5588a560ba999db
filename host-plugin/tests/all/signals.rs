//! Emulated signals, through the built plugin's C ABI on the software card. The requests are written by hand, so that
//! the tests need no device code for them and can break every rule.
#![allow(unsafe_code)]

use crate::harness::software_gpu_driver::{self, ATOMIC_REDUCTION_SUPPORTED};
use crate::harness::{
    Gdrcopy, alone, alone_each, config, device, gpu_memory, ranks, software_gpu, software_gpu_with_gdrcopy, window,
};
use crate::metrics::MetricsFile;
use efa_dp_direct::wqe::{Destination, Geometry, Inline, Operation, RemoteMem, SendData, SendWqe, Sge, WriteData};
use ferrogin_device::Context;
use ferrogin_ffi::device::{DevHandle, MrHandle, MrPeer};
use ferrogin_ffi::ext::{ContextExt, EmulatedSignals, EndpointConfig};
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_ffi::signals::{Generation, Immediate, Message, Signal, Target};
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use mini_nccl::{Bootstrap, Comm, GinContext, Window};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const EMULATED: (&str, &str) = ("FERROGIN_SIGNALS", "emulated");

/// GPU attributes: the order of cards' writes to its memory, and who can flush them.
const WRITES_ORDERING: i32 = 118;
const FLUSH_OPTIONS: i32 = 117;

/// Returns entry `i` of one of the plugin's tables.
fn entry<T: Copy>(table: *const T, i: usize) -> T {
    // SAFETY: the callers name entries in tables of an open context or window, which are in this process's memory on
    // the CPU.
    unsafe { *table.wrapping_add(i) }
}

/// A context's data endpoint, driven by hand.
struct Poster<'a> {
    device: Context<'a>,
    dev: DevHandle,
    posted: u32,
}

impl<'a> Poster<'a> {
    fn new(context: &'a GinContext, id: u32) -> Self {
        // SAFETY: on the CPU the handles are an array in this process, which the borrowed context keeps valid.
        let dev = unsafe { context.handle().cast::<DevHandle>().wrapping_add(id as usize).read() };
        Self { device: device(context, id), dev, posted: 0 }
    }

    fn ext(&self) -> &ContextExt {
        // SAFETY: the borrowed context keeps the struct.
        unsafe { &*self.device.as_ptr() }
    }

    /// Returns the data endpoint.
    fn endpoint(&self) -> EndpointConfig {
        // SAFETY: the data endpoint is the first one, and the borrowed context keeps it.
        let endpoint = unsafe { &*self.ext().routes.endpoints };
        endpoint.config
    }

    fn errors(&self) -> u64 {
        // SAFETY: the counter is in host memory here, and the borrowed context keeps it.
        unsafe { AtomicU64::from_ptr(self.endpoint().errors.cast_mut()) }.load(Ordering::Acquire)
    }

    fn is_aborted(&self) -> bool {
        // SAFETY: the flag is in host memory here, and the borrowed context keeps it.
        unsafe { AtomicU32::from_ptr(self.ext().abort_flag) }.load(Ordering::Acquire) == 1
    }

    fn emulated(&self) -> EmulatedSignals {
        entry(self.ext().emulated, 0)
    }

    /// Returns signal `id`'s word.
    fn word(&self, id: usize) -> &AtomicU64 {
        // SAFETY: the caller names a signal that exists.
        unsafe { AtomicU64::from_ptr(self.emulated().words.wrapping_add(id)) }
    }

    fn generation(&self, peer: usize) -> Generation {
        Generation::new(entry(self.emulated().peers, peer).generation.into())
    }

    fn to(&self, peer: usize) -> Destination {
        let tables = &self.dev.data;
        Destination {
            ah: entry(tables.target_address_handles, peer),
            qpn: entry(tables.target_remote_qpns, peer),
            qkey: entry(tables.target_qkey, peer),
        }
    }

    fn post(&mut self, peer: usize, operation: Operation) {
        let endpoint = self.endpoint();
        let ring = &endpoint.ring;
        // SAFETY: the counter is in host memory here.
        let completed = || unsafe { AtomicU64::from_ptr(endpoint.completed.cast_mut()) }.load(Ordering::Acquire);
        wait_until("room in the ring", || u64::from(self.posted) - completed() < u64::from(endpoint.sq_size));
        let mut wqe = SendWqe::new(peer as u64, self.to(peer), operation);
        wqe.phase = self.posted & ring.phase_bit != 0;
        let mut bytes = [0; 64];
        wqe.emit(&Geometry::NARROW, &mut bytes).expect("a request");
        let slot = ring.sq_buf.wrapping_add((self.posted.wrapping_mul(64) & ring.ring_mask) as usize);
        for (i, word) in bytes.chunks_exact(8).enumerate() {
            // SAFETY: the mask keeps the slot in the ring, which this test alone writes.
            let at = unsafe { AtomicU64::from_ptr(slot.wrapping_add(8 * i).cast()) };
            at.store(u64::from_ne_bytes(word.try_into().unwrap()), Ordering::Relaxed);
        }
        self.posted += 1;
        // SAFETY: the ring's doorbell, which this test alone rings.
        unsafe { AtomicU32::from_ptr(ring.sq_db) }.store(self.posted, Ordering::Release);
        self.device.relax(0);
    }

    /// Waits until all requests have completed.
    fn flush(&self) {
        let completed = self.endpoint().completed.cast_mut();
        // SAFETY: the counter is in host memory here.
        let completed = unsafe { AtomicU64::from_ptr(completed) };
        wait_until("completions", || completed.load(Ordering::Acquire) == u64::from(self.posted));
    }

    /// Posts an empty write with this immediate data.
    fn immediate(&mut self, peer: usize, bits: u32) {
        // The peers' entries follow the handle.
        let MrPeer { remote_addr: addr, rkey, .. } = entry(self.ext().routes.scratch.wrapping_add(1).cast(), peer);
        let remote = RemoteMem { addr, rkey };
        self.post(peer, Operation::Write { remote, data: WriteData::Empty, imm: Some(bits) });
    }

    fn send(&mut self, peer: usize, bytes: &[u8]) {
        let data = SendData::Inline(Inline::new(bytes).expect("inline bytes"));
        self.post(peer, Operation::Send { data, imm: None });
    }

    fn indexed(&self, peer: usize, id: u32, add: u64) -> u32 {
        let signal = Signal { target: Target::Indexed(id), add };
        Immediate::new(signal, self.generation(peer)).expect("an immediate").bits()
    }

    fn message(&self, peer: usize, target: Target, add: u64) -> [u8; Message::BYTES] {
        let (signal, generation) = (Signal { target, add }, self.generation(peer));
        Message { signal, generation, rank: self.emulated().rank }.to_bytes()
    }
}

/// Returns the address and key of a peer's window on the first rail.
fn remote(window: &Window, peer: usize) -> MrPeer {
    // The handle begins with a pointer for each rail, to a struct that is followed by an entry for each rank.
    let handle: *const MrHandle = entry(window.gin_handle().cast(), 0);
    entry(handle.wrapping_add(1).cast(), peer)
}

/// Like [`alone`], on the software GPU.
fn alone_on_gpu(test: &str, body: impl FnOnce(Arc<mini_nccl::Plugin>)) {
    alone_with_libraries(test, software_gpu(test), body);
}

fn alone_with_libraries(test: &str, path: Option<String>, body: impl FnOnce(Arc<mini_nccl::Plugin>)) {
    let Some(path) = path else { return };
    let settings =
        [EMULATED, ("FERROGIN_PROVIDER", "softefa"), ("FERROGIN_DEVICE", "cuda"), ("LD_LIBRARY_PATH", &path)];
    alone(test, &settings, body);
}

/// Returns the WARN lines with these words since the last call.
fn warnings(words: &str) -> Vec<String> {
    mini_nccl::log::take()
        .into_iter()
        .filter(|line| line.is_warn() && line.text.contains(words))
        .map(|l| l.text)
        .collect()
}

fn pair(body: impl Fn(usize, &Comm) + Send + Sync + 'static) -> impl FnOnce(std::sync::Arc<mini_nccl::Plugin>) {
    move |plugin| {
        ranks(&plugin, 2, move |rank, comm| {
            body(rank, &comm);
            comm.barrier().expect("all ranks");
        });
    }
}

#[test]
fn proxy_adds_signals_in_each_form() {
    alone(
        "proxy_adds_signals_in_each_form",
        &[EMULATED],
        pair(|rank, comm| {
            let properties = comm.gin_properties();
            assert_eq!((properties.supports_strong_signals, properties.supports_va_signals), (1, 1));
            let (memory, window) = window(comm, 4096);
            let context = comm.create_context(&GinConfigV14 { n_contexts: 2, ..config(70_000, 1) }).expect("contexts");
            let (mut poster, other) = (Poster::new(&context, 1), 1 - rank);
            assert!(
                poster.dev.data.qp.is_null() && poster.dev.pvdata.qp.is_null(),
                "NCCL's own device code has no queue"
            );
            comm.barrier().expect("all ranks");
            let (own, peer) = (remote(&window, rank), remote(&window, other));
            for round in 1..=300u64 {
                poster.immediate(other, poster.indexed(other, 3, 4));
                let large = poster.message(other, Target::Indexed(69_999), 1 << 40);
                poster.send(other, &large);
                let va = Target::Va { rkey: peer.rkey, address: peer.remote_addr + 4088 };
                let va = poster.message(other, va, u64::MAX);
                poster.send(other, &va);
                wait_until("signals", || {
                    poster.word(3).load(Ordering::Acquire) == 4 * round
                        && poster.word(69_999).load(Ordering::Acquire) == round << 40
                        && memory.load(4088) == 0u64.wrapping_sub(round)
                });
                comm.barrier().expect("all ranks");
            }
            assert_eq!((poster.word(2).load(Ordering::Acquire), memory.load(4080)), (0, 0));
            assert_ne!(own.rkey, 0);
        }),
    );
}

#[test]
fn invalid_signals_change_nothing_and_are_reported() {
    let test = "invalid_signals_change_nothing_and_are_reported";
    let file = MetricsFile::new(test);
    let settings = [EMULATED, file.setting(), ("FERROGIN_METRICS_INTERVAL", "1")];
    alone(test, &settings, |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(8, 0)).expect("a context");
            let (gone, of_peer) = {
                let (_memory, gone) = crate::harness::window(&comm, 4096);
                (remote(&gone, 0), remote(&window, 0))
            };
            comm.barrier().expect("all ranks");
            let mut poster = Poster::new(&context, 0);
            let pattern = |at: usize| 0x5a5a_0000 + at as u64;
            if rank == 0 {
                (8..4096).step_by(8).for_each(|at| memory.store(at, pattern(at)));
            }
            comm.barrier().expect("all ranks");
            let (rkey, start) = (of_peer.rkey, of_peer.remote_addr);
            // A window's memory is rounded up to the page size, 64 KiB at most.
            let end = start + (1 << 16);
            let generation = poster.generation(0);
            let stale = Generation::new(u64::from(generation.bits()) + 1);
            let va = |rkey, address| Target::Va { rkey, address };
            if rank == 1 {
                let good = poster.message(0, va(rkey, start), 1);
                let with = |at: usize, byte: u8| {
                    let mut bytes = good;
                    bytes[at] = byte;
                    bytes
                };
                let message = |target, add| poster.message(0, target, add);
                let bad = [
                    message(va(rkey, end), 1),
                    message(va(rkey, end - 4), 1),
                    message(va(rkey, start - 8), 1),
                    message(va(rkey, start + 12), 1),
                    message(va(rkey, 0), 1),
                    message(va(rkey, u64::MAX - 7), 1),
                    message(va(gone.rkey, gone.remote_addr), 1),
                    message(va(0xdead_beef, start), 1),
                    message(Target::Indexed(8), 1),
                    message(Target::Indexed(u32::MAX), 1),
                    Message { signal: Signal { target: va(rkey, start), add: 1 }, generation: stale, rank: 1 }
                        .to_bytes(),
                    Message { signal: Signal { target: va(rkey, start), add: 1 }, generation, rank: 2 }.to_bytes(),
                    with(0, 3),
                    with(1, 9),
                    with(31, 1),
                ];
                let signal = |id| Signal { target: Target::Indexed(id), add: 1 };
                let [id, old] = [(8, generation), (1, stale)].map(|(id, of)| Immediate::new(signal(id), of).unwrap());
                bad.iter().for_each(|bytes| poster.send(0, bytes));
                poster.send(0, &good[..31]);
                poster.send(0, &[]);
                poster.immediate(0, id.bits());
                poster.immediate(0, old.bits());
                poster.send(0, &good);
                poster.immediate(0, poster.indexed(0, 0, 1));
                // A message longer than a receive, which the card refuses at both ends.
                let handle: *const MrHandle = entry(window.gin_handle().cast(), 0);
                let MrHandle { lkey, local_addr, .. } = entry(handle, 0);
                let data = SendData::One(Sge { addr: local_addr, length: 48, lkey });
                poster.post(0, Operation::Send { data, imm: None });
                wait_until("error of the long message", || poster.errors() == 1);
                comm.barrier().expect("all ranks");
            } else {
                wait_until("valid signals", || poster.word(0).load(Ordering::Acquire) == 1 && memory.load(0) == 1);
                let count = || MetricsFile::read().sum("ferrogin_signals_refused_total", &[("rank", "0")]);
                wait_until("count of the metrics", || count() == Some(15 + 4 + 1));
                assert_eq!(MetricsFile::read().sum("ferrogin_signals_total", &[("rank", "0")]), Some(2));
                assert!(
                    (1..8).all(|id| poster.word(id).load(Ordering::Acquire) == 0),
                    "a word that no valid signal names"
                );
                assert!(
                    (8..4096).step_by(8).all(|at| memory.load(at) == pattern(at)),
                    "memory that no valid signal names"
                );
                assert!(!context.query_last_error().expect("a state"), "a peer's faults do not fail this context");
                let lines = warnings("rank 0: context 0 refused");
                // At most one every ten seconds, so there are fewer lines than signals unless the machine is very slow.
                assert!((1..=20).contains(&lines.len()), "{lines:#?}");
                assert!(lines[0].contains("a signal at") && lines[0].contains("no memory was changed"), "{lines:?}");
                comm.barrier().expect("all ranks");
            }
        });
    });
}

#[test]
fn proxy_that_ends_aborts_waits() {
    let test = "proxy_that_ends_aborts_waits";
    alone_on_gpu(test, |plugin| {
        // The host must flush the cards' writes.
        software_gpu_driver::set_attribute(WRITES_ORDERING, 0);
        software_gpu_driver::set_attribute(FLUSH_OPTIONS, 1);
        ranks(&plugin, 2, |rank, comm| {
            let context = comm.create_context(&config(2, 0)).expect("a context");
            let mut poster = Poster::new(&context, 0);
            let other = 1 - rank;
            for _ in 0..5 {
                poster.immediate(other, poster.indexed(other, 1, 1));
            }
            wait_until("signals before the fault", || poster.word(1).load(Ordering::Acquire) == 5);
            comm.barrier().expect("all ranks");
            // The signal proxy exits when the driver refuses a flush.
            if rank == 0 {
                software_gpu_driver::set_attribute(FLUSH_OPTIONS, 0);
                poster.immediate(other, poster.indexed(other, 1, 1));
            }
            wait_until("abort flag", || poster.is_aborted());
            assert!(context.query_last_error().expect("a state"));
            // Both inboxes are closed once both ranks are aborted: a peer's request fails, and isn't retried forever.
            comm.barrier().expect("all ranks");
            poster.immediate(other, poster.indexed(other, 1, 1));
            wait_until("failed request", || poster.errors() > 0);
            comm.barrier().expect("all ranks");
            if rank == 0 {
                let words = "the signal proxy (the thread that adds peers' emulated signals)";
                // The watcher raises the flag before it writes the line.
                wait_until("lines of both ranks", || {
                    mini_nccl::log::all().iter().filter(|line| line.text.contains(words)).count() >= 2
                });
                let lines = mini_nccl::log::take();
                let with =
                    |words: &str| lines.iter().filter(|line| line.is_warn() && line.text.contains(words)).count();
                assert_eq!((with(words), with("has ended")), (2, 2), "a line of each rank of this process: {lines:?}");
                assert_eq!(with("the signal proxy stops: cuFlushGPUDirectRDMAWrites failed"), 1, "{lines:?}");
            }
            comm.barrier().expect("all ranks");
            context.destroy().expect("destroyed");
        });
    });
}

#[test]
fn card_without_what_signals_need_is_refused() {
    let test = "card_without_what_signals_need_is_refused";
    alone(test, &[EMULATED, ("FERROGIN_PROVIDER", "softefa"), ("SOFTEFA_FAULTS", "no_rx_cq_data")], |plugin| {
        let error =
            Bootstrap::threads(1, HANG_LIMIT).into_iter().map(|bootstrap| Comm::init(&plugin, Arc::new(bootstrap), 0));
        assert!(error.into_iter().all(|comm| comm.is_err()), "init refuses");
        let lines = warnings("FERROGIN_SIGNALS=emulated");
        assert!(lines[0].contains("FI_RX_CQ_DATA") && lines[0].contains("set FERROGIN_SIGNALS=card"), "{lines:?}");
    });
}

#[test]
fn thousands_of_signals_fit_a_card_with_512_counters() {
    let test = "thousands_of_signals_fit_a_card_with_512_counters";
    alone(test, &[EMULATED, ("SOFTEFA_FAULTS", "cntr_budget=512")], |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let config = GinConfigV14 { n_contexts: 16, queue_depth: 0, ..config(4096, 0) };
            let context = comm.create_context(&config).expect("contexts");
            for id in 0..16 {
                let (mut poster, other) = (Poster::new(&context, id), 1 - rank);
                poster.immediate(other, poster.indexed(other, 4095, 7));
                wait_until("signal", || poster.word(4095).load(Ordering::Acquire) == 7);
            }
            comm.barrier().expect("all ranks");
        });
    });
}

/// Sends signals to words in GPU and host memory, on a software GPU with these attributes. `way` is how the proxy adds
/// to GPU memory.
fn proxy_adds_to_gpu_memory(test: &str, attributes: &'static [(i32, i32)], way: &'static str, warns: bool) {
    let path = if way == GDRCOPY { software_gpu_with_gdrcopy(test) } else { software_gpu(test) };
    alone_with_libraries(test, path, move |plugin| {
        let gdrcopy = (way == GDRCOPY).then(|| Arc::new(Gdrcopy::load()));
        let counts = gdrcopy.clone();
        attributes.iter().for_each(|(number, value)| software_gpu_driver::set_attribute(*number, *value));
        ranks(&plugin, 2, move |rank, comm| {
            let memory = gpu_memory(4096, 4096);
            let by_dma_buf = comm.register_dma_buf(&memory, 0).expect("a window");
            let by_address = comm.register(&memory, 0).expect("a window");
            let (host, in_host) = window(&comm, 4096);
            let context = comm.create_context(&config(4, 0)).expect("a context");
            let (mut poster, other) = (Poster::new(&context, 0), 1 - rank);
            comm.barrier().expect("all ranks");
            let targets = [(&by_dma_buf, 0), (&by_address, 2048), (&in_host, 64)].map(|(window, at)| {
                let peer = remote(window, other);
                Target::Va { rkey: peer.rkey, address: peer.remote_addr + at }
            });
            for add in 1..=200u64 {
                for target in targets {
                    let message = poster.message(other, target, add << 30);
                    poster.send(other, &message);
                }
                poster.immediate(other, poster.indexed(other, 1, 1));
            }
            let sum = (1..=200u64).sum::<u64>() << 30;
            let in_gpu = |at| {
                let mut bytes = [0; 8];
                memory.read(at, &mut bytes);
                u64::from_le_bytes(bytes)
            };
            wait_until("signals", || {
                [in_gpu(0), in_gpu(2048), host.load(64), poster.word(1).load(Ordering::Acquire)] == [sum, sum, sum, 200]
            });
            comm.barrier().expect("all ranks");
            if rank == 0 {
                let lines: Vec<_> = mini_nccl::log::all().into_iter().map(|line| line.text).collect();
                let of_windows: Vec<_> =
                    lines.iter().filter(|line| line.contains("the signal proxy adds emulated signals by")).collect();
                let by_cpu =
                    of_windows.iter().filter(|line| line.contains("signals by atomic adds by the CPU")).count();
                let by_way = of_windows.iter().filter(|line| line.contains(way)).count();
                assert_eq!((of_windows.len(), by_way), if way == CPU { (6, 6) } else { (6, 4) }, "{lines:#?}");
                assert_eq!(by_cpu, if way == CPU { 6 } else { 2 }, "{lines:#?}");
                let warned = lines.iter().filter(|line| line.contains("signals in GPU memory are added by a read"));
                assert_eq!(warned.count(), usize::from(warns), "{lines:#?}");
                assert_eq!(software_gpu_driver::flushes().1 == 0, way != STREAM, "reductions on a stream");
                if let Some(gdrcopy) = &gdrcopy {
                    assert_eq!(
                        gdrcopy.counts(),
                        [8; 3],
                        "two windows, the indexed words and the abort flag of each rank"
                    );
                }
            }
            comm.barrier().expect("all ranks");
        });
        if let Some(gdrcopy) = counts {
            assert_eq!(gdrcopy.counts(), [0, 0, 8], "after the windows are deregistered");
        }
    });
}

const CPU: &str = "signals by atomic adds by the CPU";
const STREAM: &str = "signals by atomic reductions on a stream";
const GDRCOPY: &str = "signals by loads and stores through GDRCopy";

#[test]
fn proxy_adds_to_gpu_memory_by_stream_and_to_host_memory_by_cpu() {
    proxy_adds_to_gpu_memory("proxy_adds_to_gpu_memory_by_stream_and_to_host_memory_by_cpu", &[], STREAM, false);
}

#[test]
fn proxy_adds_to_gpu_memory_by_copies_and_warns_without_reductions() {
    let test = "proxy_adds_to_gpu_memory_by_copies_and_warns_without_reductions";
    proxy_adds_to_gpu_memory(test, &[(ATOMIC_REDUCTION_SUPPORTED, 0)], "signals by copies", true);
}

#[test]
fn proxy_adds_to_gpu_memory_through_gdrcopy_without_reductions() {
    let test = "proxy_adds_to_gpu_memory_through_gdrcopy_without_reductions";
    proxy_adds_to_gpu_memory(test, &[(ATOMIC_REDUCTION_SUPPORTED, 0)], GDRCOPY, true);
}

#[test]
fn proxy_adds_to_coherent_gpu_memory_by_cpu() {
    // Native atomics, and host page tables: Grace.
    proxy_adds_to_gpu_memory("proxy_adds_to_coherent_gpu_memory_by_cpu", &[(86, 1), (100, 1)], CPU, false);
}

#[test]
fn proxy_flushes_the_writes_of_cards_before_it_adds() {
    let test = "proxy_flushes_the_writes_of_cards_before_it_adds";
    alone_on_gpu(test, |plugin| {
        // Cards' writes are unordered, and the host can flush them.
        software_gpu_driver::set_attribute(WRITES_ORDERING, 0);
        software_gpu_driver::set_attribute(FLUSH_OPTIONS, 1);
        ranks(&plugin, 2, |rank, comm| {
            let memory = gpu_memory(0, 4096);
            let window = comm.register(&memory, 0).expect("a window");
            let context = comm.create_context(&config(1, 0)).expect("a context");
            let mut poster = Poster::new(&context, 0);
            let peer = remote(&window, 1);
            let va = poster.message(1, Target::Va { rkey: peer.rkey, address: peer.remote_addr }, 1);
            for signal in 1..=50u64 {
                comm.barrier().expect("all ranks");
                if rank == 0 {
                    poster.send(1, &va);
                } else {
                    let word = || {
                        let mut bytes = [0; 8];
                        memory.read(0, &mut bytes);
                        u64::from_le_bytes(bytes)
                    };
                    wait_until("signal", || word() == signal);
                    // A flush resets the number of reductions to 0, so this one came after its flush.
                    assert_eq!(software_gpu_driver::flushes(), (signal, 1), "flushes, reductions since the last one");
                }
            }
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn window_is_left_alone_once_it_is_deregistered() {
    let test = "window_is_left_alone_once_it_is_deregistered";
    alone_on_gpu(test, |plugin| {
        // The last round whose window has been deregistered.
        let deregistered = AtomicU64::new(0);
        ranks(&plugin, 2, move |rank, comm| {
            let context = comm.create_context(&config(1, 0)).expect("a context");
            let mut poster = Poster::new(&context, 0);
            let memory = gpu_memory(0, 4096);
            let word = || {
                let mut bytes = [0; 8];
                memory.read(0, &mut bytes);
                u64::from_le_bytes(bytes)
            };
            for round in 1..=40 {
                let window = comm.register_dma_buf(&memory, 0).expect("a window");
                let peer = remote(&window, 0);
                let before = word();
                comm.barrier().expect("all ranks");
                if rank == 1 {
                    let va = poster.message(0, Target::Va { rkey: peer.rkey, address: peer.remote_addr }, 1);
                    // The signal proxy is busy with signals when the window goes, and more come afterwards.
                    while deregistered.load(Ordering::Acquire) < round {
                        poster.send(0, &va);
                    }
                    (0..8).for_each(|_| poster.send(0, &va));
                    poster.immediate(0, poster.indexed(0, 0, 1));
                } else {
                    wait_until("first signals", || word() > before);
                    drop(window);
                    let after = word();
                    deregistered.store(round, Ordering::Release);
                    wait_until("signal after the others", || poster.word(0).load(Ordering::Acquire) == round);
                    assert_eq!(word(), after, "a signal to a window that is deregistered");
                }
                comm.barrier().expect("all ranks");
            }
            assert!(!context.query_last_error().expect("a state"));
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn signals_that_have_arrived_are_added_before_their_context_or_window_goes() {
    alone(
        "signals_that_have_arrived_are_added_before_their_context_or_window_goes",
        &[EMULATED],
        pair(|rank, comm| {
            for round in 0..40 {
                let (memory, window) = window(comm, 4096);
                let context = comm.create_context(&config(1, 0)).expect("a context");
                let mut poster = Poster::new(&context, 0);
                let peer = remote(&window, 1);
                let va = poster.message(1, Target::Va { rkey: peer.rkey, address: peer.remote_addr }, 1);
                comm.barrier().expect("all ranks");
                if rank == 0 {
                    (0..200).for_each(|_| poster.send(1, &va));
                    poster.flush();
                }
                comm.barrier().expect("all ranks");
                if rank == 0 || round % 2 == 0 {
                    context.destroy().expect("destroyed");
                } else {
                    drop(window);
                }
                assert!(rank == 0 || memory.load(0) == 200, "round {round}: {} of 200", memory.load(0));
                comm.barrier().expect("all ranks");
            }
        }),
    );
}

#[test]
fn signals_of_peers_that_left_reach_no_later_context() {
    let test = "signals_of_peers_that_left_reach_no_later_context";
    // The card delivers what a closed queue pair has rung, or drops it.
    let faults = ["reorder=64,delay_us=0..200", "reorder=64,delay_us=0..200,close_drops"];
    alone_each(test, &faults.map(|faults| vec![EMULATED, ("SOFTEFA_FAULTS", faults)]), |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let (memory, window) = window(&comm, 4096);
            for round in 1..=20 {
                let context = comm.create_context(&config(4, 0)).expect("a context");
                let (mut poster, other) = (Poster::new(&context, 0), 1 - rank);
                let peer = remote(&window, other);
                let va = Target::Va { rkey: peer.rkey, address: peer.remote_addr + 8 };
                let va = poster.message(other, va, 1);
                comm.barrier().expect("all ranks");
                // One rank leaves with signals in flight, and the other reads its words before all of them can have
                // arrived.
                if rank == round % 2 {
                    // All fit in the send queue: the other rank may already be gone.
                    for _ in 0..30 {
                        poster.immediate(other, poster.indexed(other, 3, 1));
                        poster.send(other, &va);
                    }
                } else {
                    assert!(poster.word(3).load(Ordering::Acquire) <= 30 && memory.load(8) <= 30);
                }
                context.destroy().expect("destroyed");
                comm.barrier().expect("all ranks");
                memory.store(8, 0);
                comm.barrier().expect("all ranks");
                let context = comm.create_context(&config(4, 0)).expect("a context");
                let mut poster = Poster::new(&context, 0);
                // The last of these signals comes long after the card has delivered the earlier context's.
                for signal in 1..=10 {
                    poster.immediate(other, poster.indexed(other, 2, 5));
                    wait_until("signal of the new context", || poster.word(2).load(Ordering::Acquire) >= 5 * signal);
                }
                let words = [0, 1, 3].map(|id| poster.word(id).load(Ordering::Acquire));
                assert_eq!((words, memory.load(8)), ([0, 0, 0], 0), "a signal for the earlier context");
                assert!(!context.query_last_error().expect("a state"));
                comm.barrier().expect("all ranks");
                context.destroy().expect("destroyed");
            }
            comm.barrier().expect("all ranks");
        });
    });
}

/// Returns how often the signal proxy's thread has gone to sleep so far.
fn sleeps_of_proxy() -> u64 {
    let threads = std::fs::read_dir("/proc/self/task").expect("a directory").flatten();
    let named =
        |path: &std::path::Path| std::fs::read_to_string(path.join("comm")).is_ok_and(|n| n.trim() == "ferrogin-proxy");
    let proxy = threads.map(|thread| thread.path()).find(|path| named(path)).expect("the signal proxy's thread");
    let status = std::fs::read_to_string(proxy.join("status")).expect("the thread's status");
    let sleeps =
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).expect("a number of sleeps");
    sleeps.trim().parse().expect("a number")
}

#[test]
fn signals_wait_for_receives_and_the_proxy_sleeps_without_any() {
    let test = "signals_wait_for_receives_and_the_proxy_sleeps_without_any";
    alone(test, &[EMULATED, ("SOFTEFA_FAULTS", "rq_size=4")], |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let context = comm.create_context(&config(2, 0)).expect("a context");
            let mut poster = Poster::new(&context, 0);
            comm.barrier().expect("all ranks");
            for _ in 0..2000 {
                (0..2).for_each(|peer| poster.immediate(peer, poster.indexed(peer, 1, 1)));
            }
            wait_until("signals", || poster.word(1).load(Ordering::Acquire) == 4000);
            comm.barrier().expect("all ranks");
            assert!(!context.query_last_error().expect("a state"));
            if rank == 0 && std::env::var("FERROGIN_PROVIDER").is_ok_and(|provider| provider == "softefa") {
                // Without an event, a sleep takes 100 ms, or more on a busy machine. A lock may add a short one.
                let (before, began) = (sleeps_of_proxy(), Instant::now());
                wait_until("sleeps of the idle signal proxy", || sleeps_of_proxy() >= before + 10);
                assert!(began.elapsed() >= Duration::from_millis(500), "10 sleeps in {:?}", began.elapsed());
            }
            comm.barrier().expect("all ranks");
        });
    });
}
