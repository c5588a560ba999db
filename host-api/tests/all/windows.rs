//! Windows of every kind of memory, used by all operations.
#![allow(unsafe_code)]

use crate::common::{alone, ranks};
use ferrogin::device::{Action, Flags};
use ferrogin::{Comm, ContextOptions, Memory, Window};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;

const LEN: usize = 64 << 10;

/// Each rank puts a page to the next rank, gets it back, and compares. `at` is the window's host address.
fn put_and_get(comm: &Comm, window: &Window, at: *mut u8) {
    let context = comm.context(&ContextOptions { contexts: 2, signals: 2, counters: 1, ..Default::default() }).unwrap();
    let gin = context.device(1).unwrap();
    assert!(context.device(2).is_err());
    let next = ((comm.rank() + 1) % comm.ranks()) as u32;
    let (own, from) = (comm.rank() as u8 + 1, ((comm.rank() + comm.ranks() - 1) % comm.ranks()) as u8 + 1);
    let byte = |offset: usize| {
        // SAFETY: the caller passes the address of a window of `LEN` bytes, and `offset` is below that.
        let at = unsafe { at.add(offset) };
        // SAFETY: `at` is mapped, and the peer wrote it before its signal.
        unsafe { at.read_volatile() }
    };
    // SAFETY: the window has `LEN` bytes, and peers only write past the first page.
    unsafe { at.write_bytes(own, 4096) };
    let memory = window.handle();
    let action = Action::signal_inc(1).with_counter(0);
    gin.put(next, memory.at(4096), memory.at(0), 4096, action, Flags::NONE).unwrap();
    gin.wait_signal(1, 1).unwrap();
    gin.wait_counter(0, 1).unwrap();
    gin.get(next, memory.at(4096), memory.at(8192), 4096, Flags::NONE).unwrap();
    gin.flush().unwrap();
    assert_eq!((byte(4096), byte(8191), byte(8192), byte(12287), byte(12288)), (from, from, own, own, 0));
    window.check_unused().unwrap();
    context.check().unwrap();
    comm.barrier().unwrap();
}

#[test]
fn windows_of_every_memory_pass() {
    alone("windows_of_every_memory_pass", &[("SOFTEFA_FAULTS", "seed=3,reorder=16")], || {
        ranks(3, |comm| {
            for kind in [Memory::Host, Memory::Device] {
                let window = comm.allocate(LEN, kind).unwrap();
                assert_eq!(window.address(), window.host_address().unwrap());
                put_and_get(&comm, &window, window.host_address().unwrap().cast());
                assert!(window.read(LEN - 3, &mut [0; 4]).is_err());
            }
            let mut own = vec![0u8; LEN];
            let at = own.as_mut_ptr();
            // SAFETY: `own` lives until the window is dropped, and is only accessed through `at`.
            let window = unsafe { comm.register(at.cast(), LEN, Memory::Host) }.unwrap();
            put_and_get(&comm, &window, at);
            assert!(window.write(0, &[1]).unwrap_err().to_string().contains("your own"));

            // A memfd stands in for the dma-buf; the window starts on its second page.
            let file = memfd_create(c"ferrogin-host-test", MFdFlags::MFD_CLOEXEC).unwrap();
            nix::unistd::ftruncate(&file, (LEN + 4096) as i64).unwrap();
            let (protection, size) =
                (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, NonZeroUsize::new(LEN + 4096).unwrap());
            // SAFETY: the kernel chooses the address, so the mapping replaces no other. It's never unmapped.
            let base = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, &file, 0) }.unwrap();
            let at = base.as_ptr().wrapping_byte_add(4096);
            // SAFETY: the memory stays mapped.
            let window = unsafe { comm.register_dma_buf(at, LEN, file.as_fd(), 4096) }.unwrap();
            drop(file);
            put_and_get(&comm, &window, at.cast());
        });
    });
}

#[test]
fn communicator_lives_as_long_as_its_windows() {
    alone("communicator_lives_as_long_as_its_windows", &[], || {
        let values = ranks(2, |comm| {
            let windows = [(); 2].map(|()| comm.allocate(4096, Memory::Host).unwrap());
            // The communicator closes only once its windows are dropped too.
            let kept = comm.clone();
            drop(comm);
            put_and_get_words(&kept, &windows[1])
        });
        assert_eq!(values, [2, 1]);
    });
}

#[test]
fn each_rank_knows_the_sizes_of_all_windows() {
    alone("each_rank_knows_the_sizes_of_all_windows", &[], || {
        ranks(3, |comm| {
            let size = |rank: usize| 4096 * (rank + 1) - 8;
            let allocated = comm.allocate(size(comm.rank()), Memory::Host).unwrap();
            let mut own = vec![0u8; size(comm.rank()) + 1];
            // SAFETY: `own` lives until the window is dropped, and no rank accesses it.
            let registered = unsafe { comm.register(own.as_mut_ptr().cast(), own.len(), Memory::Host) }.unwrap();
            for rank in 0..3 {
                assert_eq!(allocated.len_on(rank).unwrap(), size(rank));
                assert_eq!(registered.len_on(rank).unwrap(), size(rank) + 1);
            }
            let error = allocated.len_on(3).unwrap_err();
            assert_eq!(error.status(), ferrogin::Status::InvalidArgument);
            assert_eq!(error.to_string(), "rank 3 does not exist: pass a rank from 0 to 2");
            comm.barrier().unwrap();
        });
    });
}

fn put_and_get_words(comm: &Comm, window: &Window) -> u64 {
    let context = comm.context(&ContextOptions { signals: 1, ..Default::default() }).unwrap();
    let gin = context.device(0).unwrap();
    let peer = 1 - comm.rank() as u32;
    gin.put_value(peer, window.handle().at(8), comm.rank() as u64 + 1, 8, Action::signal_inc(0), Flags::NONE).unwrap();
    gin.wait_signal(0, 1).unwrap();
    gin.flush().unwrap();
    let mut bytes = [0; 8];
    window.read(8, &mut bytes).unwrap();
    comm.barrier().unwrap();
    u64::from_le_bytes(bytes)
}
