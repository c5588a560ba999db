//! One process: the card talks to itself.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]

use std::sync::atomic::Ordering;

use efa_dp_direct::wire::{CompStatus, SendOp};
use efa_dp_direct::wqe::{Destination, RemoteMem, Sge};
use softefa_rig::*;

#[test]
fn write_arrives_and_is_counted() {
    let Some(rig) = Rig::for_test("write_arrives_and_is_counted") else { return };
    let (mut a, b) = (End::open(&rig), End::open(&rig));
    let (source, target) = (rig.buffer(64), rig.buffer(64));
    let to = a.connect(&b.name());
    source.word(0).store(0x0123_4567_89ab_cdef, Ordering::Relaxed);
    a.post(to, write(target.remote(16), source.sge(0, 8)));
    wait_until("write", || b.remote() == 1);
    assert_eq!(target.word(2).load(Ordering::Relaxed), 0x0123_4567_89ab_cdef);
    let (common, status) = a.next_status();
    assert_eq!(status, CompStatus::Ok);
    assert_eq!((common.req_id, common.flags.op_type()), (0, SendOp::RdmaWrite.raw()));
    wait_until("count", || a.local() == 1);
    assert_eq!((a.errors(), b.local(), b.errors(), a.remote()), (0, 0, 0, 0));
    // Even an empty write arrives.
    a.post(to, write_nothing(target.remote(64)));
    wait_until("empty write", || b.remote() == 2);
    a.wait_done(2);
}

#[test]
fn progress_operation_drives_card_where_cores_are_few() {
    let Some(rig) = Rig::for_test("progress_operation_drives_card_where_cores_are_few") else { return };
    let progress = rig.progress();
    let has_few_cores = std::thread::available_parallelism().unwrap().get() < 8;
    assert_eq!(unsafe { (progress.function)(progress.arg) }, has_few_cores);
    assert!(!unsafe { (progress.function)(std::ptr::null_mut()) }, "null is not a domain");
    assert!(!unsafe { (progress.function)(rig.fabric.cast()) }, "a fabric is not a domain");
}

#[test]
fn ring_wraps_many_times() {
    if !have_libfabric("ring_wraps_many_times") {
        return;
    }
    for inject in [0, 80] {
        let rig = Rig::with_inject(inject);
        let (mut a, b) = (End::open(&rig), End::open(&rig));
        assert_eq!(a.sq.entry_size, if inject == 0 { 64 } else { 128 });
        assert_eq!(a.sq.num_entries, if inject == 0 { 4096 } else { 2048 });
        let (source, target) = (rig.buffer(1 << 16), rig.buffer(1 << 16));
        let to = a.connect(&b.name());
        let total = u64::from(a.sq.num_entries) * 5 + 7;
        for n in 0..total {
            wait_until("room", || n - a.local() < u64::from(a.sq.num_entries));
            assert_eq!(a.errors(), 0);
            let at = n % 8192;
            if inject > 0 && n % 2 == 0 {
                a.post(to, write_inline(target.remote(8 * at), &n.to_ne_bytes()));
            } else {
                source.word(at as usize).store(n, Ordering::Relaxed);
                a.post(to, write(target.remote(8 * at), source.sge(8 * at, 8)));
            }
        }
        a.wait_done(total);
        assert_eq!((a.local(), a.errors(), b.remote()), (total, 0, total));
        for n in total - 8192..total {
            assert_eq!(target.word((n % 8192) as usize).load(Ordering::Relaxed), n);
        }
    }
}

#[test]
fn closed_endpoint_sends_what_it_rang() {
    let Some(rig) = Rig::for_test("closed_endpoint_sends_what_it_rang") else { return };
    let b = End::open(&rig);
    let (source, target) = (rig.buffer(64), rig.buffer(64));
    for n in 1..=20 {
        let mut a = End::open(&rig);
        let to = a.connect(&b.name());
        source.word(0).store(n, Ordering::Relaxed);
        a.post(to, write(target.remote(0), source.sge(0, 8)));
        drop(a);
        wait_until("write of a closed endpoint", || b.remote() == n);
        assert_eq!(target.word(0).load(Ordering::Relaxed), n);
    }
}

#[test]
fn large_writes_and_reads_keep_their_bytes() {
    let Some(rig) = Rig::for_test("large_writes_and_reads_keep_their_bytes") else { return };
    let (mut a, b) = (End::open(&rig), End::open(&rig));
    let len = 3 << 20;
    let (source, target, back) = (rig.buffer(len), rig.buffer(len), rig.buffer(len));
    let to = a.connect(&b.name());
    source.fill(11);
    a.post(to, write(target.remote(0), source.sge(0, len as u32)));
    a.wait_done(1);
    assert!(target.matches(11));
    assert_eq!(b.remote(), 1, "many pieces, one event");
    a.post(to, read(target.remote(0), back.sge(0, len as u32)));
    a.wait_done(2);
    assert!(back.matches(11));
    assert_eq!((a.local(), a.errors(), b.remote()), (2, 0, 1));
    drop(a);
    drop(b);
}

#[test]
fn refused_requests_complete_in_error_and_harm_nothing() {
    let Some(rig) = Rig::for_test("refused_requests_complete_in_error_and_harm_nothing") else { return };
    let (mut a, b) = (End::open(&rig), End::open(&rig));
    let (source, target) = (rig.buffer(64), rig.buffer(64));
    let to = a.connect(&b.name());
    let (remote, sge) = (target.remote(0), source.sge(0, 8));
    source.word(0).store(77, Ordering::Relaxed);
    let cases = [
        (CompStatus::LocalInvalidAh, Destination { ah: 0, ..to }, write(remote, sge)),
        (CompStatus::LocalInvalidAh, Destination { ah: 999, ..to }, write(remote, sge)),
        (CompStatus::LocalInvalidLkey, to, write(remote, Sge { lkey: sge.lkey ^ 1, ..sge })),
        (CompStatus::LocalInvalidLkey, to, write(remote, Sge { addr: sge.addr + 60, ..sge })),
        (CompStatus::RemoteBadDestQpn, Destination { qpn: 4000, ..to }, write(remote, sge)),
        (CompStatus::RemoteBadDestQpn, Destination { qpn: 0, ..to }, write(remote, sge)),
        (CompStatus::RemoteBadDestQpn, Destination { qkey: to.qkey ^ 4, ..to }, write(remote, sge)),
        (CompStatus::RemoteBadAddress, to, write(RemoteMem { rkey: remote.rkey ^ 1 << 20, ..remote }, sge)),
        (CompStatus::RemoteBadAddress, to, write(target.remote(60), sge)),
        (CompStatus::RemoteBadAddress, to, write(RemoteMem { addr: u64::MAX - 3, ..remote }, sge)),
        (CompStatus::RemoteBadAddress, to, write_nothing(RemoteMem { rkey: 1, ..remote })),
        (CompStatus::RemoteBadAddress, to, read(target.remote(64), sge)),
    ];
    for (n, (status, dest, op)) in cases.iter().enumerate() {
        a.post(*dest, *op);
        let (common, seen) = a.next_status();
        assert_eq!((seen, common.req_id), (*status, n as u16), "{op:?}");
        a.wait_done(n as u64 + 1);
    }
    assert_eq!((a.local(), a.errors(), b.remote()), (0, cases.len() as u64, 0));
    assert_eq!(target.word(0).load(Ordering::Relaxed), 0);
    a.post(to, write(remote, sge));
    wait_until("good one afterwards", || b.remote() == 1);
}
