//! Rules that software breaks: the completion that hardware gives, and one line that names the rule.

mod common;

use std::sync::atomic::Ordering;

use common::child::run;
use common::*;
use efa_dp_direct::wire::CompStatus;
use efa_dp_direct::wqe::Destination;

/// Runs `body` on a card that talks to itself, in a process of its own, and looks for `line` on its standard error.
fn rule(name: &str, line: &str, body: impl FnOnce(&mut End, Destination, &Buffer)) {
    let errors = run(name, &[], || {
        let rig = Rig::open();
        let (mut a, b) = (End::open(&rig), End::open(&rig));
        let buffer = rig.buffer(64);
        let to = a.connect(&b.name());
        body(&mut a, to, &buffer);
        assert_eq!(b.remote(), 0, "nothing was delivered");
        a.close();
        b.close();
        buffer.close();
        rig.close();
    });
    if let Some(errors) = errors {
        let found = errors.lines().filter(|l| l.contains(line)).count();
        assert_eq!(found, 1, "{line:?} once in:\n{errors}");
    }
}

/// Posts a request whose bytes `change` has spoiled, and gives its status.
fn spoiled(end: &mut End, to: Destination, buffer: &Buffer, change: impl FnOnce(&mut Vec<u8>)) -> CompStatus {
    let mut bytes = end.bytes(to, write(buffer.remote(8), buffer.sge(0, 8)));
    change(&mut bytes);
    end.place(&bytes);
    end.ring();
    let status = end.next_status().1;
    wait_for("the error counter", || end.errors() == 1);
    status
}

/// After a fatal error nothing is executed.
fn is_flushed(end: &mut End, to: Destination, buffer: &Buffer) {
    end.post(to, write(buffer.remote(8), buffer.sge(0, 8)));
    assert_eq!(end.next_status().1, CompStatus::Flushed);
    wait_for("the error counter", || end.errors() == 2);
    assert_eq!(end.local(), 0);
}

#[test]
fn wrong_phase() {
    rule("wrong_phase", "slot 0: the phase bit is not that of this lap", |a, to, buffer| {
        assert_eq!(spoiled(a, to, buffer, |bytes| bytes[3] ^= 1), CompStatus::LocalQpInternalError);
        is_flushed(a, to, buffer);
    });
}

#[test]
fn unwritten_slot() {
    rule("unwritten_slot", "slot 0: the meta descriptor bit is clear", |a, to, buffer| {
        assert_eq!(spoiled(a, to, buffer, |bytes| bytes.fill(0)), CompStatus::LocalQpInternalError);
        is_flushed(a, to, buffer);
    });
}

#[test]
fn reserved_bits() {
    rule("reserved_bits", "slot 0: a reserved bit is set", |a, to, buffer| {
        assert_eq!(spoiled(a, to, buffer, |bytes| bytes[15] = 0x80), CompStatus::LocalQpInternalError);
        is_flushed(a, to, buffer);
    });
}

#[test]
fn unknown_operation() {
    rule("unknown_operation", "slot 0: operation code 9 does not exist", |a, to, buffer| {
        let status = spoiled(a, to, buffer, |bytes| bytes[2] = bytes[2] & 0xf0 | 9);
        assert_eq!(status, CompStatus::LocalUnsupportedOp);
    });
}

#[test]
fn inline_in_a_narrow_write() {
    rule("inline_in_a_narrow_write", "slot 0: RdmaWrite has no inline data", |a, to, buffer| {
        assert_eq!(spoiled(a, to, buffer, |bytes| bytes[2] |= 0x20), CompStatus::LocalUnsupportedOp);
    });
}

#[test]
fn lengths_differ() {
    rule("lengths_differ", "8 bytes at the local side but 9 at the remote side", |a, to, buffer| {
        assert_eq!(spoiled(a, to, buffer, |bytes| bytes[32] = 9), CompStatus::LocalBadLength);
    });
}

#[test]
fn doorbell_back() {
    rule("doorbell_back", "the doorbell went back from 0 to 4294967295", |a, to, buffer| {
        a.doorbell().store(u32::MAX, Ordering::Release);
        assert_eq!(a.next_status().1, CompStatus::LocalQpInternalError);
        wait_for("the error counter", || a.errors() == 1);
        a.pc = u32::MAX;
        is_flushed(a, to, buffer);
    });
}

#[test]
fn doorbell_too_far() {
    rule("doorbell_too_far", "the doorbell went from 0 to 4097 while 0 requests were outstanding", |a, _, _| {
        a.doorbell().store(4097, Ordering::Release);
        wait_for("the others to be flushed", || a.errors() == 4097);
    });
}

#[test]
fn a_region_of_another_domain() {
    rule("a_region_of_another_domain", "the region belongs to another protection domain", |a, to, buffer| {
        let other = Rig::open();
        let foreign = other.buffer(64);
        a.post(to, write(buffer.remote(8), foreign.sge(0, 8)));
        assert_eq!(a.next_status().1, CompStatus::LocalInvalidLkey);
        foreign.close();
        other.close();
    });
}

#[test]
fn memory_that_is_not_there() {
    if !have_libfabric("memory_that_is_not_there") {
        return;
    }
    let rig = Rig::open();
    assert_eq!(rig.register(std::ptr::null_mut(), 8, ALL).err(), Some(-14));
    assert_eq!(rig.register(0x1000 as *mut u8, 8, ALL).err(), Some(-14));
    let constant = b"constant";
    assert_eq!(rig.register(constant.as_ptr().cast_mut(), 8, ALL).err(), Some(-14), "not writable");
    let region = rig.register(constant.as_ptr().cast_mut(), 8, ferrogin_fabric::bindings::FI_WRITE).unwrap();
    assert_eq!(close(region.mr), 0);
    rig.close();
}

#[test]
fn what_is_used_cannot_be_closed() {
    if !have_libfabric("what_is_used_cannot_be_closed") {
        return;
    }
    let rig = Rig::open();
    let a = End::open(&rig);
    assert_eq!(close(a.cq), -16);
    assert_eq!(close(a.av), -16);
    assert_eq!(close(a.counters[0]), -16);
    assert_eq!(close(rig.domain), -16);
    assert_eq!(close(rig.fabric), -16);
    a.close();
    rig.close();
}
