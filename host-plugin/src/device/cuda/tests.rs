use super::*;
use crate::device::bytes_of;
use crate::memory::region_of;
use ferrogin_libfabric::Region;
use ferrogin_test_support::child;

/// Runs `body` in a child process, on this machine's GPU or, without one, on the software GPU.
fn on_gpu(test: &str, body: impl FnOnce()) {
    if CudaDevice::open(true).is_ok() {
        child::run(test, &[], body);
    } else if let Some(path) = ferrogin_test_support::software_gpu(test) {
        child::run(test, &[("LD_LIBRARY_PATH", &path)], body);
    }
}

#[test]
fn gpu_memory_is_zeroed_and_exported() {
    let test = "gpu_memory_is_zeroed_and_exported";
    on_gpu(test, || {
        // A GPU may lack what hardware cards need.
        let device = CudaDevice::open(false).or_else(|_| CudaDevice::open(true)).expect("a GPU");
        let buffer = device.allocate(5000, Use::Tables).unwrap();
        let mut bytes = vec![0xa5u8; 5000];
        buffer.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|b| *b == 0));
        buffer.write(8, bytes_of(&[0x0102_0304_0506_0708u64])).unwrap();
        buffer.read(8, &mut bytes[..8]).unwrap();
        assert_eq!(bytes[..8], 0x0102_0304_0506_0708u64.to_le_bytes());
        match device.allocate(5000, Use::Card) {
            Ok(card) if device.reachable => {
                assert!(card.dma_buf().is_some());
                // An older driver refuses the mapping over PCIe.
                assert!(card.export(true).is_some() && matches!(card.export(false), Some(Ok(_))));
            }
            Ok(card) => assert!(card.dma_buf().is_none()),
            Err(error) => ferrogin_test_support::skip(&format!("{test} (dma-buf)"), error),
        }
    });
}

#[test]
fn dma_buf_export_tries_pcie_first() {
    let refused = |flags| DeviceError::Cuda { call: "export", code: 1, text: format!("flags {flags}") };
    let tried = std::cell::RefCell::new(Vec::new());
    let driver = |least: u64| {
        tried.borrow_mut().clear();
        let export = |flags| {
            tried.borrow_mut().push(flags);
            if flags <= least { Ok(flags) } else { Err(refused(flags)) }
        };
        memory::export_for_pcie_or_plain(export).map_err(|error| error.to_string())
    };
    assert_eq!((driver(1), tried.borrow().clone()), (Ok(1), vec![1]), "a driver with the mapping type");
    assert_eq!((driver(0), tried.borrow().clone()), (Ok(0), vec![1, 0]), "an older driver");
    let none = memory::export_for_pcie_or_plain(|flags| Err::<(), _>(refused(flags))).unwrap_err().to_string();
    assert!(none.contains("flags 0"), "the message has the plain export's error: {none}");
}

#[test]
fn adds_reach_words_of_gpu_memory_in_each_way() {
    on_gpu("adds_reach_words_of_gpu_memory_in_each_way", || {
        let device = CudaDevice::open(true).expect("a GPU");
        let buffer = device.allocate(4096, Use::Window).unwrap();
        let address = buffer.device_address();
        let mut ways = vec![Adds::Copy];
        match device.adds(address as *mut c_void, 4096, nccl::PTR_CUDA) {
            Adds::Stream => ways.push(Adds::Stream),
            _ => ferrogin_test_support::skip("adds by a stream", "this driver has no atomic reductions"),
        }
        for (at, adds) in ways.into_iter().enumerate() {
            let at = address + 512 * at as u64;
            let words: Vec<_> = (0..300).map(|n| (at + n % 3 * 8, (1 << 40) + n)).collect();
            // SAFETY: the words are in `buffer`.
            unsafe { device.add(adds, &words) }.unwrap();
            for word in 0..4 {
                let mut bytes = [0; 8];
                buffer.read((at - address) as usize + 8 * word, &mut bytes).unwrap();
                let mine = words.iter().filter(|(place, _)| *place == at + 8 * word as u64);
                assert_eq!(
                    u64::from_le_bytes(bytes),
                    mine.map(|(_, amount)| amount).sum::<u64>(),
                    "{adds:?}, word {word}"
                );
            }
        }
        // SAFETY: the words are in `buffer`; the driver refuses the last one.
        let refused = unsafe { device.add(Adds::Stream, &[(address, 1), (address + 4, 1)]) };
        assert!(refused.is_err());
    });
}

/// Sets an attribute of the software GPU; returns false if the driver is a different one.
fn set_attribute(number: i32, value: i32) -> bool {
    type Set = unsafe extern "C" fn(i32, i32) -> i32;
    // SAFETY: the driver is loaded already, so no initialiser runs.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("the driver");
    // SAFETY: the software GPU defines the function with this type, and no other driver has it.
    let Ok(set) = (unsafe { driver.get::<Set>(b"cuSoftGpuSetAttribute\0") }) else { return false };
    // SAFETY: the function takes two numbers.
    unsafe { set(number, value) == 0 }
}

#[test]
fn ways_of_adding_and_flushing_follow_the_attributes_of_the_driver() {
    let test = "ways_of_adding_and_flushing_follow_the_attributes_of_the_driver";
    on_gpu(test, || {
        let first = CudaDevice::open(true).expect("a GPU");
        // Native atomics, host page tables, atomic reductions; how the signal proxy then adds to GPU memory.
        let adds = [
            ([0, 0, 0], Adds::Copy),
            ([0, 0, 1], Adds::Stream),
            ([1, 0, 0], Adds::Copy),
            ([1, 0, 1], Adds::Stream),
            ([0, 1, 0], Adds::Copy),
            ([0, 1, 1], Adds::Stream),
            ([1, 1, 0], Adds::Cpu),
            ([1, 1, 1], Adds::Cpu),
        ];
        let buffer = first.allocate(1 << 22, Use::Window).expect("memory of the GPU");
        let host = first.allocate(4096, Use::Shared).expect("memory of the host");
        for (values, expected) in adds {
            for (number, value) in [86, 100, ATOMIC_REDUCTION_SUPPORTED].into_iter().zip(values) {
                if !set_attribute(number, value) {
                    return ferrogin_test_support::skip(test, "the driver is not the software GPU");
                }
            }
            let device = CudaDevice::open(true).expect("a GPU");
            let at = buffer.device_address() as *mut c_void;
            let ways = [4096, 1 << 22].map(|len| device.adds(at, len, nccl::PTR_CUDA));
            assert_eq!(ways, [expected; 2], "atomics, page tables, reductions: {values:?}");
            let past_the_end = device.adds(at, 1 << 40, nccl::PTR_CUDA);
            assert_ne!(past_the_end, Adds::Cpu, "bytes that the driver does not know: {values:?}");
            let on_host = host.host_address().expect("an address").cast();
            assert_eq!(device.adds(on_host, 4096, nccl::PTR_HOST), Adds::Cpu);
        }
        // Order of writes (0 none, 100 for the owner, 200 for all), ways to flush (1 by the host, 2 by a stream);
        // expected with a hardware card and with the software card.
        let flushes = [
            ([0, 0], Flush::Missing, Flush::NotNeeded),
            ([0, 2], Flush::Missing, Flush::NotNeeded),
            ([0, 1], Flush::Driver, Flush::Driver),
            ([0, 3], Flush::Driver, Flush::Driver),
            ([100, 0], Flush::NotNeeded, Flush::NotNeeded),
            ([100, 1], Flush::NotNeeded, Flush::NotNeeded),
            ([200, 3], Flush::NotNeeded, Flush::NotNeeded),
        ];
        for (values, hardware, software) in flushes {
            assert!(set_attribute(118, values[0]) && set_attribute(117, values[1]));
            for (is_software, expected) in [(false, hardware), (true, software)] {
                let device = CudaDevice::open(is_software).expect("a GPU");
                assert_eq!(device.flush, expected, "order, ways: {values:?}, software card: {is_software}");
                assert_eq!(device.cannot_flush_writes().is_some(), expected == Flush::Missing);
                assert_eq!(device.flush_writes().is_err(), expected == Flush::Missing);
            }
        }
    });
}

/// Where cards can access GPU memory, cards and windows use it, registered as a dma-buf: with hardware, and with a
/// software card on the software GPU.
#[test]
fn cards_get_gpu_memory_where_they_reach_it() {
    let test = "cards_get_gpu_memory_where_they_reach_it";
    on_gpu(test, || {
        let check = |device: &CudaDevice| {
            let kind = MemoryKind::Cuda(device.core.device);
            let [card, window] = [Use::Card, Use::Window].map(|usage| device.allocate(8, usage).unwrap());
            let (region, registered) = region_of(&*card, 4096, 4096);
            let form = device.window(window.device_address() as *mut c_void, 8, nccl::PTR_CUDA).unwrap();
            if device.reachable {
                assert!(card.host_address().is_none());
                let base = card.device_address() as *mut u8;
                assert!(matches!(region, Region::DmaBuf { offset: 4096, len: 4096, base: at, .. } if at == base));
                assert_eq!(registered, kind);
                assert!(matches!(form, WindowMemory::DmaBuf { offset: 0, kind: of_window, .. } if of_window == kind));
            } else {
                assert!(card.host_address().is_some() && matches!(region, Region::Va { .. }));
                assert_eq!(registered, MemoryKind::System);
                assert!(matches!(form, WindowMemory::Address(of_window) if of_window == kind));
            }
            assert!(device.window(16 as *mut c_void, 8, nccl::PTR_CUDA).is_err());
        };
        let device = CudaDevice::open(true).expect("a GPU");
        // Setting an attribute to its current value succeeds only on the software GPU.
        assert_eq!(device.reachable, set_attribute(ATOMIC_REDUCTION_SUPPORTED, i32::from(device.reduces)));
        check(&device);
        check(&CudaDevice { reachable: false, ..device });
    });
}

/// A window may span allocations side by side, as PyTorch's expandable segments are, and must not reach beyond them.
#[test]
fn windows_span_adjacent_allocations_and_no_gap() {
    let test = "windows_span_adjacent_allocations_and_no_gap";
    on_gpu(test, || {
        let device = CudaDevice::open(true).expect("a GPU");
        let current = device.core.enter().expect("the context");
        let unit = 2 << 20;
        let location =
            cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device.core.device };
        // SAFETY: the C struct consists of integers and a pointer, for which zero is valid.
        let mut prop: cu::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location = location;
        prop.allocFlags.gpuDirectRDMACapable = u8::from(device.reachable);
        let (mut base, mut handle) = (0, 0);
        // SAFETY: the driver writes one address into a local variable.
        check("cuMemAddressReserve", unsafe { cu::cuMemAddressReserve(&mut base, 4 * unit, 0, 0, 0) }).unwrap();
        for part in 0..2 {
            // SAFETY: the driver reads `prop` and writes one handle into a local variable.
            check("cuMemCreate", unsafe { cu::cuMemCreate(&mut handle, unit, &prop, 0) }).unwrap();
            let at = base + (part * unit) as u64;
            // SAFETY: the addresses are reserved above, and nothing is mapped there.
            check("cuMemMap", unsafe { cu::cuMemMap(at, unit, 0, handle, 0) }).unwrap();
        }
        let flags = cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = cu::CUmemAccessDesc { location, flags };
        // SAFETY: the range is mapped above; the driver reads one descriptor.
        check("cuMemSetAccess", unsafe { cu::cuMemSetAccess(base, 2 * unit, &access, 1) }).unwrap();
        let start = base + (unit - 100) as u64;
        assert_eq!(words::parts(&current, start, 200), Some(vec![start, base + unit as u64]));
        assert_eq!(words::parts(&current, start, unit + 101), None, "bytes past the last allocation");
        let window = |len| device.window(start as *mut c_void, len, nccl::PTR_CUDA);
        match window(unit + 100).expect("a window over the border") {
            WindowMemory::DmaBuf { offset, .. } => assert_eq!(offset, page_size() as u64 - 100),
            WindowMemory::Address(_) => assert!(!device.reachable),
        }
        let beyond = window(unit + 101).unwrap_err().to_string();
        assert!(beyond.contains("not GPU memory of the given size"), "{beyond}");
    });
}

/// Returns the driver's free GPU memory in bytes.
fn free_memory(device: &CudaDevice) -> usize {
    let _current = device.core.enter().expect("the context");
    let (mut free, mut total) = (0, 0);
    // SAFETY: the driver writes two sizes into local variables.
    check("cuMemGetInfo", unsafe { cu::cuMemGetInfo_v2(&mut free, &mut total) }).unwrap();
    free
}

#[test]
fn tables_of_many_windows_share_a_few_allocations_and_come_back() {
    on_gpu("tables_of_many_windows_share_a_few_allocations_and_come_back", || {
        let connections = [(); 4].map(|()| CudaDevice::open(true).expect("a GPU"));
        let before = free_memory(&connections[0]);
        let mut parts = Vec::new();
        for connection in &connections {
            // A context's tables and counters, then as many tables as 500 windows of eight ranks need.
            let uses = [(9000, Use::Tables), (3 * page_size(), Use::Card)].into_iter().chain([(200, Use::Tables); 500]);
            for (len, usage) in uses {
                let part = connection.allocate(len, usage).unwrap();
                let mut bytes = vec![1; len];
                part.read(0, &mut bytes).unwrap();
                assert_eq!(bytes, vec![0; len], "new memory is zero");
                part.write(0, bytes_of(&vec![0x55u8; len])).unwrap();
                parts.push(part);
            }
        }
        let used = before - free_memory(&connections[0]);
        assert!(used < 16 << 20, "2,000 tables and four contexts take {used} bytes");
        let mut ranges: Vec<_> = parts.iter().map(|part| (part.device_address(), part.len() as u64)).collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "no two parts overlap");

        // Every second part is freed: its place has all bits set, and is used again.
        let mut number = 0;
        let (kept, freed): (Vec<_>, Vec<_>) = parts.into_iter().partition(|_| {
            number += 1;
            number % 2 == 0
        });
        let places: Vec<_> = freed.iter().map(|part| (part.device_address(), part.len())).collect();
        drop(freed);
        for (address, len) in &places {
            let mut bytes = vec![0; *len];
            // SAFETY: the neighbours keep the memory mapped.
            unsafe { memory::copy_out(&connections[0].core, *address, &mut bytes) }.unwrap();
            assert_eq!(bytes, vec![0xff; *len], "a stale handle has no valid pointer");
        }
        for part in &kept {
            let mut bytes = vec![0; part.len()];
            part.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, vec![0x55; part.len()]);
        }
        let again = connections[3].allocate(200, Use::Tables).unwrap();
        assert!(places.iter().any(|(address, _)| *address == again.device_address()), "a freed place is used again");
        drop((kept, again));
        assert_eq!(free_memory(&connections[0]), before, "all memory comes back");
    });
}
