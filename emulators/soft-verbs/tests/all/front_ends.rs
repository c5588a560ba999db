//! A verbs queue pair and a softefa endpoint talk to each other: both front ends share one card's wire formats and
//! rules.

use std::process::Command;
use std::sync::atomic::Ordering;

use efa_dp_direct::cq::{Cqe, RawCqe};
use efa_dp_direct::wire::{CompStatus, RxDesc};
use efa_dp_direct::wqe::{Operation, RequestIds, SendData, Sge};
use ferrogin_test_support::wait::wait_for;

use crate::verbs_program::compiled;
use crate::{LIBRARIES, libraries, on_card};
use softefa_rig::peer::{PEER_BUFFER, Peer};
use softefa_rig::{End, Rig, have_libfabric, read, write};

/// Runs `body` in a process with the settings, where softefa is one card and the command starts a verbs queue pair on
/// another. Returns what the process logged.
pub fn with_front_ends(test: &str, settings: &[(&str, &str)], body: impl FnOnce(&Rig, Command)) -> Option<String> {
    if !have_libfabric(test) {
        return None;
    }
    let program = compiled(test, "peer")?;
    let made = libraries().to_str().unwrap();
    softefa_rig::child::run(test, &[settings, &[(LIBRARIES, made)]].concat(), || {
        let rig = Rig::open();
        body(&rig, on_card(program));
    })
}

fn exchange(test: &str, settings: &[(&str, &str)]) {
    with_front_ends(test, settings, |rig, mut command| {
        let mut peer = Peer::spawn(&mut command);
        let mut a = End::open(rig);
        let buffer = rig.buffer(PEER_BUFFER);
        peer.connect(&a.name());
        let to = a.connect(&peer.name);
        let own_qpn = u16::from_ne_bytes([a.name()[16], a.name()[17]]);
        let own = buffer.remote(0);

        // softefa writes and reads.
        buffer.fill(5);
        a.post(to, write(peer.memory, buffer.sge(0, PEER_BUFFER as u32)));
        a.wait_done(1);
        assert_eq!(a.next_status().1, CompStatus::Ok);
        assert_eq!(peer.ask(&format!("matches 5 {PEER_BUFFER}")), "true");
        assert_eq!(peer.ask("fill 6"), "ok");
        a.post(to, read(peer.memory, buffer.sge(0, PEER_BUFFER as u32)));
        a.wait_done(2);
        assert_eq!(a.next_status().1, CompStatus::Ok);
        assert!(buffer.matches(6));

        // verbs writes and reads.
        let (addr, rkey) = (own.addr, own.rkey);
        assert_eq!(peer.ask(&format!("write {addr} {rkey} {PEER_BUFFER} 7")), "0");
        assert!(buffer.matches(7));
        assert_eq!(a.remote(), 1);
        buffer.fill(8);
        assert_eq!(peer.ask(&format!("read {addr} {rkey} {PEER_BUFFER}")), "0");
        assert_eq!(peer.ask(&format!("fetched 8 {PEER_BUFFER}")), "true");

        // Sends in both directions.
        buffer.fill(9);
        assert_eq!(peer.ask("receive 8192"), "ok");
        let data = SendData::One(Sge { length: 8000, ..buffer.sge(0, 8000) });
        a.post(to, Operation::Send { data, imm: Some(0x0102_0304) });
        assert_eq!(peer.ask("received"), format!("0 8000 {} {own_qpn}", 0x0102_0304));
        assert_eq!(a.next_status().1, CompStatus::Ok);
        assert_eq!(peer.ask("matches 9 8000"), "true");
        buffer.fill(0);
        a.post_receives(&[RxDesc::single(33, buffer.at as u64, 8192, buffer.region.lkey)]);
        assert_eq!(peer.ask("send 4000 10 77"), "0");
        let entry = wait_for("message", || a.poll_entry());
        let Ok(Cqe::Recv(cqe)) = Cqe::parse(&RawCqe(entry), RequestIds::Bits64) else { panic!("{entry:02x?}") };
        assert_eq!((cqe.req_id, cqe.length, cqe.imm, cqe.src_qp_num), (33, 4000, Some(77), to.qpn));
        assert_eq!(buffer.word(499).load(Ordering::Relaxed), 10 * 0x9e37_79b9 + 499);

        // Refusals cross too, here of a key that the other side doesn't have.
        let wrong = rkey ^ 1 << 20;
        assert_ne!(peer.ask(&format!("write {addr} {wrong} 8 1")), "0");
        assert_eq!((a.local(), a.errors()), (3, 0));
        peer.finish();
    });
}

#[test]
fn front_ends_talk_over_shared_memory() {
    exchange("front_ends_talk_over_shared_memory", &[("SOFTEFA_FAULTS", "seed=3")]);
}

#[test]
fn front_ends_talk_over_tcp_with_reordering() {
    exchange(
        "front_ends_talk_over_tcp_with_reordering",
        &[("SOFTEFA_WIRE", "tcp"), ("SOFTEFA_FAULTS", "seed=3,reorder=32")],
    );
}
