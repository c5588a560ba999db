//! Ranks of one node load from and store to each other's windows.
#![allow(unsafe_code)]

use crate::common::{alone, dist, is_child, job, ranks, text, this_test};
use ferrogin::{Comm, Memory, Options, Window};
use nix::libc;
use std::ffi::c_void;

/// What rank `rank` writes everywhere in its window.
fn pattern(rank: usize) -> u8 {
    rank as u8 + 0x41
}

/// Windows of different sizes; rank 0's is the largest.
fn len(rank: usize) -> usize {
    70_000 - rank * 4096
}

fn addresses(comm: &Comm, window: &Window) -> Vec<u64> {
    (0..comm.lsa_ranks().len()).map(|i| window.lsa_address(i).expect("an address") as u64).collect()
}

#[test]
fn threads_of_one_process_share_windows_of_both_kinds() {
    alone("threads_of_one_process_share_windows_of_both_kinds", &[], || {
        ranks(3, |comm| {
            assert_eq!(comm.lsa_ranks(), [0, 1, 2]);
            for kind in [Memory::Host, Memory::Device] {
                let window = comm.allocate(len(comm.rank()), kind).unwrap();
                window.write(0, &vec![pattern(comm.rank()); len(comm.rank())]).unwrap();
                comm.barrier().unwrap();
                let places = addresses(&comm, &window);
                assert_eq!(places[2] - places[1], places[1] - places[0]);
                for (rank, place) in places.iter().enumerate() {
                    // SAFETY: the window of `rank` is mapped here with its `len(rank)` bytes, and no rank writes before
                    // the barrier.
                    let bytes = unsafe { std::slice::from_raw_parts(*place as *const u8, len(rank)) };
                    assert!(bytes.iter().all(|byte| *byte == pattern(rank)), "the window of rank {rank}");
                }
                comm.barrier().unwrap();
                let next = (comm.rank() + 1) % 3;
                let last = (places[next] + len(next) as u64 - 1) as *mut u8;
                // SAFETY: the last byte of the next rank's window; only this rank writes it.
                unsafe { last.write_volatile(7) };
                comm.barrier().unwrap();
                let mut byte = [0];
                window.read(len(comm.rank()) - 1, &mut byte).unwrap();
                assert_eq!(byte, [7]);
                assert!(window.lsa_address(3).unwrap_err().to_string().contains("this rank's node has 3 ranks"));
            }
        });
    });
}

#[test]
fn memory_of_a_freed_window_stays_for_its_peers() {
    alone("memory_of_a_freed_window_stays_for_its_peers", &[], || {
        ranks(2, |comm| {
            let window = comm.allocate(4096, Memory::Device).unwrap();
            window.write(0, &[pattern(comm.rank())]).unwrap();
            comm.barrier().unwrap();
            let place = window.lsa_address(0).unwrap().cast::<u8>();
            let kept = (comm.rank() == 1).then_some(window);
            comm.barrier().unwrap();
            if kept.is_some() {
                // SAFETY: the mapping exists as long as `kept`.
                assert_eq!(unsafe { place.read_volatile() }, pattern(0));
            }
        });
    });
}

#[test]
fn windows_of_registered_memory_have_no_addresses_for_peers() {
    alone("windows_of_registered_memory_have_no_addresses_for_peers", &[], || {
        ranks(2, |comm| {
            let mut own = vec![0u8; 4096];
            // Rank 1 registers, rank 0 allocates.
            let window = match comm.rank() {
                0 => comm.allocate(4096, Memory::Host).unwrap(),
                // SAFETY: `own` outlives the window, and nothing else accesses it.
                _ => unsafe { comm.register(own.as_mut_ptr().cast(), 4096, Memory::Host) }.unwrap(),
            };
            let error = window.lsa_address(0).unwrap_err().to_string();
            assert!(error.contains("the window of rank 1 can't be mapped"), "{error}");
            comm.barrier().unwrap();
        });
    });
}

/// The parts of the CUDA driver that copy memory at any address.
struct Driver(*mut c_void);

impl Driver {
    fn open() -> Self {
        // SAFETY: the library is the software GPU's, which any process may load.
        let driver = Self(unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) });
        assert!(!driver.0.is_null(), "libcuda.so.1");
        let mut context: *mut c_void = std::ptr::null_mut();
        let retain = driver.function::<extern "C" fn(*mut *mut c_void, i32) -> i32>(c"cuDevicePrimaryCtxRetain");
        let make_current = driver.function::<extern "C" fn(*mut c_void) -> i32>(c"cuCtxSetCurrent");
        assert_eq!((retain(&mut context, 0), make_current(context)), (0, 0));
        driver
    }

    fn function<T: Copy>(&self, name: &std::ffi::CStr) -> T {
        // SAFETY: the library stays open, and the name ends with a NUL byte.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?}");
        // SAFETY: every caller passes the type of the function that it names, a pointer.
        unsafe { std::mem::transmute_copy(&address) }
    }

    fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let copy = self.function::<extern "C" fn(*mut u8, u64, usize) -> i32>(c"cuMemcpyDtoH_v2");
        let mut bytes = vec![0; len];
        assert_eq!(copy(bytes.as_mut_ptr(), address, len), 0, "a copy from {address:#x}");
        bytes
    }

    fn write(&self, address: u64, byte: u8) {
        let copy = self.function::<extern "C" fn(u64, *const u8, usize) -> i32>(c"cuMemcpyHtoD_v2");
        assert_eq!(copy(address, &byte, 1), 0, "a copy to {address:#x}");
    }
}

/// Four processes in two nodes, on CPU threads or on the software GPU.
#[test]
fn processes_share_windows_within_their_node() {
    let test = "processes_share_windows_within_their_node";
    let Some(dist) = dist(test) else { return };
    if is_child(test) {
        return within_a_node();
    }
    for device in ["cpu", "cuda"] {
        let Some(gpu) = ferrogin_test_support::software_gpu(test) else { return };
        let outputs = job(test, 4, |rank| {
            let mut command = this_test(test, &dist);
            // Not in blocks: ranks 0 and 2, ranks 1 and 3.
            command.env("FERROGIN_NODE", format!("part-{}", rank % 2)).env("FERROGIN_DEVICE", device);
            command.env("LD_LIBRARY_PATH", &gpu);
            command
        });
        for (rank, output) in outputs.iter().enumerate() {
            let text = text(output);
            assert!(output.status.success() && text.contains("1 passed"), "rank {rank} on {device}:\n{text}");
        }
    }
}

fn within_a_node() {
    let comm = Comm::from_env(&Options::default()).expect("a communicator");
    let own = comm.rank();
    assert_eq!(comm.lsa_ranks(), [own % 2, own % 2 + 2]);
    let window = comm.allocate(len(own), Memory::Device).expect("a window");
    window.write(0, &vec![pattern(own); len(own)]).expect("bytes");
    comm.barrier().expect("all ranks");
    let places = addresses(&comm, &window);
    let (me, peer) = (own / 2, 1 - own / 2);
    let rank = comm.lsa_ranks()[peer];
    let on_gpu = window.host_address().is_none();
    let driver = on_gpu.then(Driver::open);
    let read = |at: u64, len: usize| match &driver {
        Some(driver) => driver.read(at, len),
        // SAFETY: `len` bytes of a window are mapped there, and no rank writes before the next barrier.
        None => unsafe { std::slice::from_raw_parts(at as *const u8, len) }.to_vec(),
    };
    assert_eq!(read(places[peer], len(rank)), vec![pattern(rank); len(rank)], "the other rank's window");
    assert_eq!(read(places[me], len(own)), vec![pattern(own); len(own)], "the own window");
    if on_gpu {
        assert_eq!((places[1] - places[0]) % (1 << 32), 0);
    }
    comm.barrier().expect("all ranks");
    match &driver {
        Some(driver) => driver.write(places[peer] + 5, 9),
        // SAFETY: the byte is in the other rank's window, and only this rank writes it.
        None => unsafe { ((places[peer] + 5) as *mut u8).write_volatile(9) },
    }
    comm.barrier().expect("all ranks");
    let mut byte = [0];
    window.read(5, &mut byte).expect("a byte");
    assert_eq!(byte, [9]);
    comm.barrier().expect("all ranks");
}
