//! Forked children: each has cards of its own, and leaves its parent's alone.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use efa_dp_direct::wire::CompStatus;
use ferrogin_libfabric::bindings as fi;
use ferrogin_test_support::child;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use softefa_rig::peer::Peer;
use softefa_rig::*;

/// Runs `body` in a forked child, which ends without destructors.
fn forked(body: impl FnOnce()) -> Pid {
    // SAFETY: the process has no other threads but the card's, which holds no lock that the child needs: the child's
    // card is its own.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => child,
        ForkResult::Child => {
            let failed = catch_unwind(AssertUnwindSafe(body)).is_err();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(failed)) }
        }
    }
}

fn write_one(end: &mut End, to: efa_dp_direct::wqe::Destination, from: &Buffer, into: efa_dp_direct::wqe::RemoteMem) {
    end.post(to, write(into, from.sge(0, 8)));
    assert_eq!(end.next_status().1, CompStatus::Ok);
}

fn child_and_parent_go_on(test: &str, wire: &[(&str, &str)]) {
    if !have_libfabric(test) {
        return;
    }
    let errors = child::run(test, wire, || {
        let rig = Rig::open();
        let (mut a, buffer) = (End::open(&rig), rig.buffer(64));
        let mut peer = Peer::start(&[]);
        peer.connect(&a.name());
        let to = a.connect(&peer.name);
        write_one(&mut a, to, &buffer, peer.memory);
        let name = a.name();
        let child = forked(|| {
            let own = Rig::open();
            let (mut end, buffer) = (End::open(&own), own.buffer(64));
            assert_ne!(end.name()[..16], name[..16], "a GID of its own");
            let to = end.connect(&end.name());
            for _ in 0..100 {
                write_one(&mut end, to, &buffer, buffer.remote(8));
            }
            // What the parent opened is refused, and stays as it is.
            assert_eq!(close(a.ep), -fi::FI_EOPBADSTATE);
            assert_eq!(close(rig.domain), -fi::FI_EOPBADSTATE);
            assert!(rig.register(buffer.at, 64, ALL).is_err());
        });
        for _ in 0..100 {
            write_one(&mut a, to, &buffer, peer.memory);
        }
        assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
        write_one(&mut a, to, &buffer, peer.memory);
        assert_eq!(a.errors(), 0);
        peer.finish();
    });
    assert!(errors.is_none_or(|errors| errors.contains("the ep was opened before fork()")));
}

#[test]
fn child_has_a_card_of_its_own() {
    child_and_parent_go_on("child_has_a_card_of_its_own", &[("SOFTEFA_WIRE", "shm")]);
}

#[test]
fn child_has_a_card_of_its_own_over_tcp() {
    let wire = [("SOFTEFA_WIRE", "tcp"), ("SOFTEFA_IFADDR", "127.0.0.1")];
    child_and_parent_go_on("child_has_a_card_of_its_own_over_tcp", &wire);
}
