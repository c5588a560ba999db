//! Rules for doorbells and set-up. `rules.rs` has those for requests.

#![allow(unsafe_code, clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block)]

use std::sync::atomic::Ordering;

use efa_dp_direct::wire::CompStatus;
use efa_dp_direct::wqe::Destination;
use ferrogin_libfabric::bindings as fi;
use softefa_rig::child::run;
use softefa_rig::*;

/// Runs `body` on a card that talks to itself, in a process of its own, and checks that `line` is on its standard
/// error.
fn rule(name: &str, line: &str, body: impl FnOnce(&mut End, Destination, &Buffer)) {
    let errors = run(name, &[], || {
        let rig = Rig::open();
        let (mut a, b) = (End::open(&rig), End::open(&rig));
        let buffer = rig.buffer(64);
        let to = a.connect(&b.name());
        body(&mut a, to, &buffer);
        assert_eq!(b.remote(), 0, "nothing was delivered");
    });
    if let Some(errors) = errors {
        let found = errors.lines().filter(|l| l.contains(line)).count();
        assert_eq!(found, 1, "{line:?} once in:\n{errors}");
    }
}

/// Checks that the card executes nothing after a fatal error.
fn is_flushed(end: &mut End, to: Destination, buffer: &Buffer) {
    end.post(to, write(buffer.remote(8), buffer.sge(0, 8)));
    assert_eq!(end.next_status().1, CompStatus::Flushed);
    wait_until("error counter", || end.errors() == 2);
    assert_eq!(end.local(), 0);
}

#[test]
fn doorbell_that_goes_back_is_refused() {
    rule("doorbell_that_goes_back_is_refused", "the doorbell went backwards from 0 to 4294967295", |a, to, buffer| {
        a.doorbell().store(u32::MAX, Ordering::Release);
        assert_eq!(a.next_status().1, CompStatus::LocalQpInternalError);
        wait_until("error counter", || a.errors() == 1);
        a.pc = u32::MAX;
        is_flushed(a, to, buffer);
    });
}

#[test]
fn doorbell_beyond_ring_is_refused() {
    rule(
        "doorbell_beyond_ring_is_refused",
        "the doorbell went from 0 to 4097 while 0 requests were outstanding",
        |a, _, _| {
            a.doorbell().store(4097, Ordering::Release);
            wait_until("others to be flushed", || a.errors() == 4097);
        },
    );
}

#[test]
fn malformed_request_flushes_those_rung_with_it() {
    rule("malformed_request_flushes_those_rung_with_it", "slot 0: a reserved bit is set", |a, to, buffer| {
        for n in 0..3 {
            let mut bytes = a.bytes(to, write(buffer.remote(8), buffer.sge(0, 8)));
            if n == 0 {
                bytes[15] = 0x80;
            }
            a.place(&bytes);
        }
        a.ring();
        assert_eq!(a.next_status().1, CompStatus::LocalQpInternalError);
        for _ in 0..2 {
            assert_eq!(a.next_status().1, CompStatus::Flushed);
        }
        wait_until("error counter", || a.errors() == 3);
        assert_eq!(a.local(), 0);
    });
}

/// A request of many packets is refused once, and none of its bytes are written.
#[test]
fn refused_long_write_is_logged_once() {
    const LEN: u32 = 300_000;
    let errors = run("refused_long_write_is_logged_once", &[], || {
        let rig = Rig::open();
        let long = rig.buffer(LEN as usize);
        let mut end = End::open(&rig);
        let itself = end.connect(&end.name());
        long.word(0).store(5, Ordering::Relaxed);
        end.post(itself, write(long.remote(8), long.sge(0, LEN)));
        assert_eq!(end.next_status().1, CompStatus::RemoteBadAddress);
        wait_until("error counter", || end.errors() == 1);
        assert_eq!((long.word(1).load(Ordering::Relaxed), end.remote()), (0, 0), "nothing was written");
    });
    if let Some(errors) = errors {
        let refused = errors.lines().filter(|l| l.contains("was refused: the range is not within the region")).count();
        assert_eq!(refused, 1, "{errors}");
    }
}

#[test]
fn unmapped_memory_cannot_be_registered() {
    let Some(rig) = Rig::for_test("unmapped_memory_cannot_be_registered") else { return };
    assert_eq!(rig.register(std::ptr::null_mut(), 8, ALL).err(), Some(-14));
    assert_eq!(rig.register(0x1000 as *mut u8, 8, ALL).err(), Some(-14));
    let constant = b"constant";
    assert_eq!(rig.register(constant.as_ptr().cast_mut(), 8, ALL).err(), Some(-14), "not writable");
    rig.register(constant.as_ptr().cast_mut(), 8, fi::FI_WRITE).unwrap();
}

/// MPICH accepts no other threading model than the one in its hints.
#[test]
fn getinfo_repeats_threading_and_progress_of_hints() {
    if !have_libfabric("getinfo_repeats_threading_and_progress_of_hints") {
        return;
    }
    let models = |threading, progress| {
        let info = getinfo(|hints| {
            let domain = unsafe { &mut *hints.domain_attr };
            (domain.threading, domain.__bindgen_anon_1.data_progress) = (threading, progress);
        })?;
        let domain = unsafe { &*info.domain_attr };
        Ok::<_, i32>((domain.threading, unsafe { domain.__bindgen_anon_1.data_progress }, domain.control_progress))
    };
    use fi::{fi_progress::*, fi_threading::*};
    assert_eq!(models(FI_THREAD_UNSPEC, FI_PROGRESS_UNSPEC), Ok((FI_THREAD_SAFE, FI_PROGRESS_AUTO, FI_PROGRESS_AUTO)));
    for threading in [FI_THREAD_SAFE, FI_THREAD_FID, FI_THREAD_DOMAIN, FI_THREAD_COMPLETION, FI_THREAD_ENDPOINT] {
        for progress in [FI_PROGRESS_AUTO, FI_PROGRESS_MANUAL, FI_PROGRESS_CONTROL_UNIFIED] {
            assert_eq!(models(threading, progress), Ok((threading, progress, progress)));
        }
    }
    assert_eq!(models(FI_THREAD_ENDPOINT + 1, FI_PROGRESS_AUTO), Err(-fi::FI_ENODATA));
    assert_eq!(models(FI_THREAD_SAFE, FI_PROGRESS_CONTROL_UNIFIED + 1), Err(-fi::FI_ENODATA));
}

#[test]
fn cards_have_pci_addresses_of_setting() {
    run("cards_have_pci_addresses_of_setting", &[("SOFTEFA_NICS", "0000:00:1e.0,0001:a0:1f.7")], || {
        let first = getinfo(|_| {}).unwrap();
        for (info, address) in [(first, (0, 0, 0x1e, 0)), (first.next(), (1, 0xa0, 0x1f, 7))] {
            let nic = info.nic;
            let mut copy: *mut fi::fid_nic = std::ptr::null_mut();
            let control = unsafe { (*(*nic).fid.ops).control }.unwrap();
            assert_eq!(unsafe { control(nic.cast(), fi::FI_DUP as i32, (&raw mut copy).cast()) }, 0);
            for nic in [nic, copy] {
                let bus = unsafe { &*(*nic).bus_attr };
                let pci = unsafe { bus.attr.pci };
                assert_eq!(bus.bus_type, fi::fi_bus_type::FI_BUS_PCI);
                assert_eq!((pci.domain_id, pci.bus_id, pci.device_id, pci.function_id), address);
            }
            assert_eq!(close(copy), 0);
        }
    });
}

#[test]
fn objects_in_use_cannot_be_closed() {
    let Some(rig) = Rig::for_test("objects_in_use_cannot_be_closed") else { return };
    let a = End::open(&rig);
    assert_eq!(close(a.cq), -16);
    assert_eq!(close(a.av), -16);
    assert_eq!(close(a.counters[0]), -16);
    assert_eq!(close(rig.domain), -16);
    assert_eq!(close(rig.fabric), -16);
}

/// The CUDA driver copies GPU memory. Without a driver the registration fails and names the driver; with one, it
/// refuses addresses that are not GPU memory.
#[test]
fn gpu_memory_without_driver_cannot_be_registered() {
    let errors = run("gpu_memory_without_driver_cannot_be_registered", &[], || {
        let info = getinfo(|hints| hints.caps = fi::FI_RMA | fi::FI_HMEM).unwrap();
        let rig = Rig::of(info);
        let mut bytes = [0u64; 8];
        let iov = fi::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 64 };
        let rc = rig.register_attr(&fi::fi_mr_attr {
            __bindgen_anon_1: fi::fi_mr_attr__bindgen_ty_1 { mr_iov: &raw const iov },
            iov_count: 1,
            access: ALL,
            iface: fi::fi_hmem_iface::FI_HMEM_CUDA,
            ..fi::fi_mr_attr::default()
        });
        assert!(matches!(rc, -22 | -95), "{rc}");
    });
    if let Some(errors) = errors {
        let said = ["the CUDA driver cannot be loaded", "are not allocated memory of one GPU", "CUDA error"];
        assert!(errors.contains("FI_HMEM_CUDA") && said.iter().any(|text| errors.contains(text)), "{errors}");
    }
}
