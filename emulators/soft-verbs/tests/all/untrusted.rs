//! A verbs card next to processes that mustn't reach it: another user's, and those that don't know its GID.

use std::os::fd::AsRawFd;
use std::process::Command;

use efa_dp_direct::wire::CompStatus;
use ferrogin_test_support::peer::{hex, unhex};
use ferrogin_test_support::untrusted;
use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr};

use crate::front_ends::with_front_ends;
use softefa_rig::peer::Peer;
use softefa_rig::wire::{self, OURS};
use softefa_rig::{End, write};

/// Not a test: a process that runs as another user and knows everything, even the secret.
#[test]
fn second_user() {
    let Some(card) = untrusted::task() else { return };
    let card = unhex(&card);
    let socket = socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let name = UnixAddr::new_abstract(wire::abstract_name(&card).as_bytes()).unwrap();
    socket::connect(socket.as_raw_fd(), &name).expect("the card listens");
    let hello = wire::hello(OURS, &wire::address(1, 77), &card, &[1; 16]);
    let sent = socket::send(socket.as_raw_fd(), &hello, MsgFlags::MSG_NOSIGNAL);
    let received = socket::recv(socket.as_raw_fd(), &mut [0; 64], MsgFlags::empty());
    // The card closes the connection at once, so even sending the hello may fail.
    assert!(matches!(received, Ok(0) | Err(Errno::ECONNRESET)), "{sent:?} {received:?}");
    println!("@refused");
}

/// Makes a command that runs the same program as the user `nobody`.
fn as_nobody(command: &Command) -> Command {
    let mut switched = Command::new("setpriv");
    switched.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(command.get_program());
    switched.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    switched
}

#[test]
fn another_user_does_not_reach_a_card_of_verbs() {
    let test = "another_user_does_not_reach_a_card_of_verbs";
    if !untrusted::have_second_user(test) {
        return;
    }
    with_front_ends(test, &[], |rig, mut command| {
        let mut a = End::open(rig);
        let buffer = rig.buffer(64);
        let mut peer = Peer::spawn(&mut command);
        let mut attacker = untrusted::start("second_user", &hex(&peer.name), true);
        assert_eq!(attacker.wait_for("@"), "refused");
        assert!(attacker.succeeds());

        // That user's verbs card, which was told the whole address.
        let mut foreign = Peer::spawn(&mut as_nobody(&command));
        foreign.connect(&peer.name);
        let (memory, rkey) = (peer.memory.addr, peer.memory.rkey);
        assert_ne!(foreign.ask(&format!("write {memory} {rkey} 64 9")), "0");
        let own = buffer.remote(0);
        buffer.fill(1);
        foreign.connect(&a.name());
        assert_ne!(foreign.ask(&format!("write {} {} 64 9", own.addr, own.rkey)), "0");
        foreign.finish();
        assert!(buffer.matches(1) && a.remote() == 0);

        // Neither side is disturbed.
        peer.connect(&a.name());
        let to = a.connect(&peer.name);
        assert_eq!(peer.ask("matches 1 64"), "false");
        a.post(to, write(peer.memory, buffer.sge(0, 64)));
        assert_eq!(a.next_status().1, CompStatus::Ok);
        assert_eq!(peer.ask("matches 1 64"), "true");
        peer.finish();
    });
}

/// Tests cards of the same user whose addresses carry the wrong secret.
fn without_the_gid(test: &str, settings: &[(&str, &str)]) {
    with_front_ends(test, settings, |rig, mut command| {
        let mut a = End::open(rig);
        let buffer = rig.buffer(64);
        let mut peer = Peer::spawn(&mut command);
        let names = std::fs::read_to_string("/proc/net/unix").unwrap();
        for name in [a.name(), peer.name] {
            assert!(
                !names.contains(&hex(&name[8..16])) && !names.contains(&hex(&name[8..12])),
                "a secret is in a name"
            );
        }
        let guessed = |mut name: [u8; 32]| {
            name[15] ^= 1;
            name
        };
        buffer.fill(1);
        let to = a.connect(&guessed(peer.name));
        a.post(to, write(peer.memory, buffer.sge(0, 64)));
        assert_eq!(a.next_status().1, CompStatus::LocalUnreachableRemote);
        assert_eq!(peer.ask("matches 1 64"), "false");
        peer.connect(&guessed(a.name()));
        let own = buffer.remote(0);
        assert_ne!(peer.ask(&format!("write {} {} 64 9", own.addr, own.rkey)), "0");
        assert!(buffer.matches(1) && a.remote() == 0);
        peer.finish();
    });
}

#[test]
fn card_without_the_gid_is_not_reached_over_shared_memory() {
    without_the_gid("card_without_the_gid_is_not_reached_over_shared_memory", &[]);
}

#[test]
fn card_without_the_gid_is_not_reached_over_tcp() {
    without_the_gid("card_without_the_gid_is_not_reached_over_tcp", &[("SOFTEFA_WIRE", "tcp")]);
}
