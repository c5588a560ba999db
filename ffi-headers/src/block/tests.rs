use super::*;
use crate::ext::POLICY_LOCKED;
use std::sync::atomic::Ordering;

#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Chunk {
    _bytes: [u8; 128],
}

/// A block on the device. Reads structs by device address, as a kernel does.
struct Device {
    base: u64,
    words: Vec<Chunk>,
}

impl Device {
    fn of(image: &Image) -> Self {
        let mut words = vec![Chunk { _bytes: [0; 128] }; image.bytes.len().div_ceil(size_of::<Chunk>())];
        // SAFETY: `words` has at least as many bytes as the image, and the two do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(image.bytes.as_ptr(), words.as_mut_ptr().cast(), image.bytes.len());
        }
        Self { base: image.base, words }
    }

    fn get<T>(&self, address: *const T) -> &T {
        let offset = (address as u64).checked_sub(self.base).expect("an address within the block") as usize;
        assert!(offset + size_of::<T>() <= self.words.len() * size_of::<Chunk>(), "an address within the block");
        assert_eq!(address as usize % align_of::<T>(), 0, "aligned on the device");
        // SAFETY: the asserts check that the address is within `words` and aligned; the chunks have the block's
        // alignment. The structs' fields are valid for any bits.
        unsafe { &*self.words.as_ptr().wrapping_byte_add(offset).cast::<T>() }
    }

    fn list<T: Copy>(&self, address: *const T, i: usize) -> T {
        *self.get(address.wrapping_add(i))
    }
}

const BASE: u64 = 0x7f00_0000_0000;

fn endpoint(i: u64, wide: bool, signal: bool) -> EndpointSpec {
    EndpointSpec {
        sq_buf: 0x1000_0000 + i * 0x10000,
        sq_db: 0x2000_0000 + i * 64,
        sq_entries: if wide { 64 } else { 128 },
        sq_size: 64,
        max_batch: 16,
        wqe_size: if wide { 128 } else { 64 },
        max_inline: if wide { 80 } else { 32 },
        rq_entries: 16,
        cq_buf: 0,
        cq_entries: 256,
        cq_entry_size: 32,
        completed: (0x3000_0000 + i * 64, 5),
        errors: (0x4000_0000 + i * 8, 1),
        signal: signal.then_some((0x5000_0000 + i * 64, 9)),
        values: if wide { (0, 0) } else { (0x6000_0000 + i * 512, 64) },
    }
}

unsafe extern "C" fn no_progress(_: *mut core::ffi::c_void) -> bool {
    false
}

fn spec(layout: Layout) -> BlockSpec {
    let context = |rail| {
        let endpoints = (0..7).map(|i| endpoint(i, i == 1 && layout == Layout::V1, i >= 5)).collect();
        ContextSpec {
            endpoints,
            n_counters: 3,
            n_signals: 2,
            nranks: 3,
            rank: 1,
            rail,
            rails: 2,
            targets: (0..12).map(|i| Target { ah: i, qpn: 100 + i, qkey: 1000 + u32::from(i) }).collect(),
            scratch: (77, 0x7000_0000),
            scratch_peers: vec![(1, 2), (3, 4), (5, 6)],
            value_lkey: 88,
            max_rdma_size: 1 << 30,
            emulated: None,
            progress: (rail == 1).then_some(Progress { function: no_progress, arg: 0x9000_0000 as *mut _ }),
        }
    };
    BlockSpec {
        contexts: vec![context(0), context(1)],
        layout,
        policy: POLICY_LOCKED,
        abort_flag: 0x8000_0000,
        failure_offset: 8,
        wait_ns: 7,
        isolates: false,
    }
}

#[test]
fn window_has_a_handle_with_peers_for_each_rail() {
    let peers = |rail: u64| (0..3).map(move |rank| MrPeer { remote_addr: rail * 10 + rank, rkey: rank as u32, pad: 0 });
    let rails = (0..2).map(|rail| RailSpec { lkey: 7 + rail as u32, peers: peers(rail).collect() }).collect();
    let spec = WindowSpec { local_addr: 0x1234, rails };
    let image = spec.fill(BASE);
    assert_eq!(image.bytes.len(), spec.size());
    let device = Device::of(&image);
    for rail in 0..2 {
        let at = device.list(BASE as *const *const MrHandle, rail);
        assert_eq!(at as u64 - BASE, window_handle_offset(2, rail, 3) as u64);
        let handle = device.get(at);
        assert_eq!((handle.lkey, handle.nranks, handle.local_addr), (7 + rail as u32, 3, 0x1234));
        for (rank, peer) in peers(rail as u64).enumerate() {
            assert_eq!(device.list(at.wrapping_add(1).cast::<MrPeer>(), rank), peer);
        }
    }
}

fn build(layout: Layout) -> (Device, *const DevHandle) {
    let spec = spec(layout);
    let plan = Plan::new(&spec);
    let image = plan.fill(&spec, BASE).unwrap();
    assert_eq!(image.bytes.len(), plan.size());
    (Device::of(&image), (BASE + plan.handles_offset() as u64) as *const DevHandle)
}

#[test]
fn header_precedes_device_handles() {
    for layout in [Layout::V0, Layout::V1] {
        let (device, devs) = build(layout);
        let header = device.get(devs.wrapping_byte_sub(size_of::<HandleHeader>()).cast::<HandleHeader>());
        assert_eq!((header.magic, header.version, header.n_contexts), (HEADER_MAGIC, HEADER_VERSION, 2));
        assert_eq!((header.policy, header.backend_version), (POLICY_LOCKED, layout.backend_version()));
        assert_eq!(header.abort_flag as u64, 0x8000_0000);
        for i in 0..2 {
            let ext = device.get(header.contexts.wrapping_add(i));
            assert_eq!(ext.routes.dev as u64, devs.wrapping_add(i) as u64);
            assert_eq!((ext.n_endpoints, ext.routes.last_slot, ext.policy), (7, 3, POLICY_LOCKED));
            assert_eq!((ext.abort_flag as u64, ext.failure_offset), (0x8000_0000, 8));
            // The spec's policy has no fast path.
            assert_eq!((ext.max_rdma_size, ext.routes.fast_put_limit, *device.get(ext.timeout_ns)), (1 << 30, 0, 7));
            let routes = ext.routes;
            assert_eq!((routes.nranks, routes.n_counters, routes.n_signals), (3, 3, 2));
            // After two pointers: a handle with its three peers, and the next handle.
            assert_eq!(routes.window_peers as usize, [16 + 16, 16 + 64 + 16][i]);
            let scratch = device.get(routes.scratch);
            assert_eq!((scratch.lkey, scratch.local_addr), (77, 0x7000_0000));
            let peers = routes.scratch.wrapping_add(1).cast::<MrPeer>();
            assert_eq!(device.list(peers, 2), MrPeer { remote_addr: 5, rkey: 6, pad: 0 });
            assert_eq!(
                (ext.progress.is_some(), ext.progress_arg as u64),
                (i == 1, if i == 1 { 0x9000_0000 } else { 0 })
            );
        }
    }
}

#[test]
fn nccl_structs_match_its_device_code() {
    for layout in [Layout::V0, Layout::V1] {
        let (device, devs) = build(layout);
        for context in 0..2 {
            let dev = device.get(devs.wrapping_add(context));
            assert_eq!((dev.n_counters, dev.n_signals, dev.nranks, dev.rank), (3, 2, 3, 1));
            assert_eq!(dev.rail_id as usize, context);
            assert_eq!((dev.scratch_lkey, dev.scratch_local_addr), (77, 0x7000_0000));
            assert_eq!((dev.putvalue_lkey, dev.putvalue_slot_size), (88, 8));
            assert_eq!(device.list(dev.scratch_remote_addrs, 2), 5);
            assert_eq!(device.list(dev.scratch_remote_rkeys, 1), 4);
            let counters =
                (0..3).map(|c| *device.get(device.list(dev.counter_handles.cast::<*const CounterHandle>(), c)));
            let signals =
                (0..2).map(|s| *device.get(device.list(dev.signal_handles.cast::<*const CounterHandle>(), s)));
            let sets: Vec<CounterHandle> = counters.chain(signals).collect();
            for (i, set) in sets.iter().enumerate() {
                let e = i as u64 + 2;
                // A counter handle points to the local counter, a signal handle to the counter of received writes.
                let (value, offset) = if i < 3 { (0x3000_0000 + e * 64, 5) } else { (0x5000_0000 + e * 64, 9) };
                assert_eq!((set.cntr_value as u64, set.cntr_offset), (value, offset));
            }
            let handles = [dev.data, dev.pvdata].into_iter().chain(sets.iter().map(|set| set.base));
            for (e, handle) in handles.enumerate() {
                let wide = e == 1 && layout == Layout::V1;
                assert_eq!(handle.local_cntr_value as u64, 0x3000_0000 + e as u64 * 64);
                assert_eq!((handle.sq_lock, handle.submitted_count, handle.sq_size), (0, 5, 64));
                assert_eq!(handle.putvalue_slice_base, if wide { 0 } else { 0x6000_0000 + e as u64 * 512 });
                assert_eq!(device.list(handle.target_address_handles, 11), 11);
                assert_eq!(device.list(handle.target_remote_qpns, 11), 111);
                assert_eq!(device.list(handle.target_qkey, 11), 1011);
                let wq = match layout {
                    Layout::V0 => {
                        let qp = device.get(handle.qp.cast::<QpV0>());
                        assert_eq!((qp.sq.max_inline_data, qp.sq.max_rdma_sges), (32, 2));
                        qp.sq.wq
                    }
                    Layout::V1 => {
                        let ctx = device.get(handle.qp.cast::<QpV1>()).sq.wr_ctx;
                        assert_eq!(ctx.wqe_size, if wide { 128 } else { 64 });
                        assert_eq!(ctx.write_inline_data_offset != 0, wide);
                        assert!(ctx.max_inline_data >= 8);
                        device.get(handle.qp.cast::<QpV1>()).sq.wq
                    }
                };
                assert_eq!((wq.pc, wq.wqes_posted, wq.wqes_completed, wq.wqes_pending, wq.phase), (5, 5, 5, 0, 5));
                assert!(1 <= wq.max_batch && wq.max_batch <= handle.sq_size && handle.sq_size <= wq.queue_mask + 1);
                assert_eq!(1 << wq.queue_size_shift, wq.queue_mask + 1);
                assert_eq!(wq.buf as u64, 0x1000_0000 + e as u64 * 0x10000);
                assert_eq!(wq.db as u64, 0x2000_0000 + e as u64 * 64);
            }
        }
    }
}

#[test]
fn ext_structs_agree_with_nccl_structs() {
    let (device, devs) = build(Layout::V1);
    let header = device.get(devs.wrapping_byte_sub(size_of::<HandleHeader>()).cast::<HandleHeader>());
    let ext = device.get(header.contexts.wrapping_add(1));
    for e in 0..7 {
        let EndpointExt { config, posting, .. } = device.get(ext.routes.endpoints.wrapping_add(e));
        let handle = device.get(config.handle);
        let queue = ext.routes.endpoints.wrapping_add(e).wrapping_byte_add(offset_of!(EndpointExt, queue));
        assert_eq!(handle.qp, queue.cast(), "endpoint {e} names its own handle");
        assert_eq!(config.context.cast_mut(), header.contexts.wrapping_add(1));
        assert_eq!(handle.local_cntr_value.cast_const(), config.completed);
        assert_eq!(config.errors_base, 1);
        assert_eq!((handle.sq_size, handle.putvalue_slice_base), (config.sq_size, config.ring.value_base));
        assert_eq!(
            config.ring.submitted as u64,
            &raw const handle.submitted_count as u64 - &raw const *handle as u64 + config.handle as u64
        );
        let wide = e == 1;
        let entries = if wide { 64 } else { 128 };
        assert_eq!((config.ring.phase_bit, config.ring.phase_bit * config.ring.phase_scale), (entries, 1 << 24));
        assert_eq!(config.ring.ring_mask, entries * config.ring.wqe_size - 1);
        assert_eq!((config.ring.wqe_size, config.write_inline), if wide { (128, 80) } else { (64, 0) });
        assert_eq!(
            (config.values.slots, config.values.mask, config.values.lkey),
            if wide { (0, 0, 0) } else { (64, 63 * 8, 88) }
        );
        assert_eq!(config.values.path, VALUE_NONE, "the spec's policy has no fast path");
        let PostingState { state, bound, barrier, poison, used, zero, acknowledged, identified, reserved } = posting;
        assert_eq!(bound.load(Ordering::Relaxed), 4 << 32 | 5, "nothing is admitted without a look");
        assert_eq!(config.index, e as u32);
        assert_eq!((state.load(Ordering::Relaxed), barrier.load(Ordering::Relaxed)), (5 << STATE_RUNG_SHIFT, 5));
        assert_eq!((poison.load(Ordering::Relaxed), used.load(Ordering::Relaxed)), (0, 0));
        assert_eq!((acknowledged.load(Ordering::Relaxed), identified.load(Ordering::Relaxed)), (0, 0));
        assert_eq!((*zero, reserved), (0, &[0; 6]));
    }
    // Slot 2, peer 1.
    let TargetWords { head, second, third } = device.list(ext.routes.targets, 7);
    let dest = Destination { ah: 7, qpn: 107, qkey: 1007 };
    assert_eq!(WqeTemplate { head, second, third }, WqeTemplate::new(1, dest, Hints::BURST_PPS_SENSITIVE));
}

#[test]
fn only_combining_policy_has_fast_path() {
    let mut spec = spec(Layout::V1);
    spec.policy = POLICY_COMBINING;
    Arc::make_mut(&mut spec.contexts[0].targets)[3] = Target::default();
    let plan = Plan::new(&spec);
    let device = Device::of(&plan.fill(&spec, BASE).unwrap());
    let devs = (BASE + plan.handles_offset() as u64) as *const DevHandle;
    let header = device.get(devs.wrapping_byte_sub(size_of::<HandleHeader>()).cast::<HandleHeader>());
    let ext = device.get(header.contexts);
    assert_eq!(ext.routes.fast_put_limit, 1 << 30);
    let paths: Vec<u32> = (0..7).map(|e| device.get(ext.routes.endpoints.wrapping_add(e)).config.values.path).collect();
    assert_eq!(paths[..3], [VALUE_POOL, VALUE_INLINE, VALUE_POOL]);
    assert_eq!(device.list(ext.routes.targets, 3), TargetWords::default(), "a target that a peer lacks");
    assert_ne!(device.list(ext.routes.targets, 4), TargetWords::default());
}

#[test]
fn block_parts_do_not_overlap() {
    let spec = spec(Layout::V0);
    let plan = Plan::new(&spec);
    let mut ranges: Vec<(usize, usize)> = vec![
        (plan.header.offset, size_of::<HandleHeader>()),
        (plan.devs.offset, 2 * size_of::<DevHandle>()),
        (plan.exts.offset, 2 * size_of::<ContextExt>()),
    ];
    for places in &plan.contexts {
        ranges.push((places.endpoints.offset, places.endpoints.count * size_of::<EndpointExt>()));
        for (e, queue) in places.queues.iter().enumerate() {
            let ext = places.endpoints.offset + e * size_of::<EndpointExt>();
            assert_eq!(queue.qp.offset, ext + offset_of!(EndpointExt, queue), "the queue pair is within its endpoint");
        }
        ranges.push((places.counters.offset, places.counters.count * 8));
        ranges.push((places.signals.offset, places.signals.count * 8));
        ranges.push((places.ahs.offset, places.ahs.count * 2));
        ranges.push((places.qpns.offset, places.qpns.count * 2));
        ranges.push((places.qkeys.offset, places.qkeys.count * 4));
        ranges.push((places.targets.offset, places.targets.count * 16));
        ranges.push((places.timeout.offset, 8));
        ranges.push((places.used.offset, places.used.count * 8));
        ranges.push((places.scratch_addrs.offset, places.scratch_addrs.count * 8));
        ranges.push((places.scratch_rkeys.offset, places.scratch_rkeys.count * 4));
        ranges.push((places.scratch.offset, size_of::<MrHandle>()));
        ranges.push((places.scratch_peers.offset, places.scratch_peers.count * size_of::<MrPeer>()));
        for queue in &places.queues {
            ranges.push((queue.cq.offset, size_of::<CqV0>()));
            ranges.extend(queue.handle.map(|place| (place.offset, size_of::<CounterHandle>())));
        }
    }
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    assert!(ranges.last().is_some_and(|(offset, len)| offset + len <= plan.size()));
    assert_eq!(plan.devs.offset, plan.header.offset + size_of::<HandleHeader>());
}

#[test]
fn context_without_counters_and_signals_has_null_lists() {
    let mut spec = spec(Layout::V0);
    for context in &mut spec.contexts {
        context.endpoints.truncate(2);
        (context.n_counters, context.n_signals) = (0, 0);
        context.targets = context.targets[..3].into();
    }
    let plan = Plan::new(&spec);
    let device = Device::of(&plan.fill(&spec, BASE).unwrap());
    let dev = device.get((BASE + plan.handles_offset() as u64) as *const DevHandle);
    assert!(dev.counter_handles.is_null() && dev.signal_handles.is_null());
}

#[test]
fn context_with_emulated_signals_names_them_and_gives_nccl_no_queue() {
    let mut spec = spec(Layout::V1);
    let peers: Vec<_> = (0..3).map(|n| EmulatedPeer { n_signals: 10 + n, generation: 20 + n }).collect();
    spec.contexts[1].emulated = Some(EmulatedSpec { words: 0xa000_0000, n_signals: 11, peers: peers.clone() });
    let plan = Plan::new(&spec);
    let device = Device::of(&plan.fill(&spec, BASE).unwrap());
    let devs = (BASE + plan.handles_offset() as u64) as *const DevHandle;
    let header = device.get(devs.wrapping_byte_sub(size_of::<HandleHeader>()).cast::<HandleHeader>());
    assert!(device.get(header.contexts).emulated.is_null());
    let emulated = device.get(device.get(header.contexts.wrapping_add(1)).emulated);
    assert_eq!((emulated.words as u64, emulated.n_signals, emulated.rank), (0xa000_0000, 11, 1));
    for (i, peer) in peers.iter().enumerate() {
        assert_eq!(device.list(emulated.peers, i), *peer);
    }
    let dev = |i| device.get(devs.wrapping_add(i));
    assert!(!dev(0).data.qp.is_null() && dev(1).data.qp.is_null() && dev(1).pvdata.qp.is_null());
    assert_eq!(dev(1).scratch_remote_addrs as u64, 0xa000_0000);
    assert!(device.get(device.list(dev(1).counter_handles.cast::<*const CounterHandle>(), 2)).base.qp.is_null());
}

#[test]
fn written_requests_include_deferred_ones_of_each_policy_and_of_nccl() {
    let posts = Posts { next: 21, pending: 0, released: 18, rung: 18, state: [0, 18] };
    assert_eq!((posts.reserved(), posts.written()), (21, 18), "reserved only");
    let bits = |numbers: std::ops::Range<u32>| numbers.map(|number| 1 << (number % 16)).sum::<u32>();
    assert_eq!(Posts { state: [bits(18..21), 18], ..posts }.written(), 21);
    assert_eq!(Posts { state: [bits(30..33), 30], ..posts }.written(), 33, "across the bitmap's end");
    assert_eq!(Posts { state: [bits(19..21), 18], ..posts }.written(), 18, "the first one isn't ready");
    assert_eq!(Posts { state: [bits(0..16), u32::MAX], ..posts }.written(), 15, "a full batch");
    assert_eq!(Posts { released: 21, ..posts }.written(), 21, "NCCL's");
    let locked = Posts { next: 18, pending: 3, ..posts };
    assert_eq!((locked.reserved(), locked.written()), (21, 21));
}

#[test]
fn inexpressible_queues_are_refused() {
    let mut wide = spec(Layout::V0);
    wide.contexts[0].endpoints[1].wqe_size = 128;
    assert_eq!(Plan::new(&wide).fill(&wide, BASE).unwrap_err(), InitError::WqeSize(128));
    let mut uneven = spec(Layout::V1);
    uneven.contexts[0].endpoints[0].sq_entries = 100;
    assert_eq!(Plan::new(&uneven).fill(&uneven, BASE).unwrap_err(), InitError::Entries(100));
}

#[test]
fn unknown_backend_versions_have_no_layout() {
    assert_eq!([0, 1, 2].map(Layout::of), [Some(Layout::V0), Some(Layout::V0), Some(Layout::V1)]);
    assert_eq!([-1, 3, 99].map(Layout::of), [None; 3]);
}
