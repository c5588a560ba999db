use super::*;
use crate::Secret;
use crate::proof::{HELLO_LEN, Initiator};
use crate::tests::{own_port, unique};
use ferrogin_test_support::peer::Peer as Process;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use ferrogin_test_support::{Random, child, skip, untrusted};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, listen, socket};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::process::Command;

fn rank_0(nranks: usize, address: String) -> Identity {
    Identity { rank: 0, nranks, address, secret: None }
}

/// Connects as a rank while `meeting` accepts.
fn connect(meeting: &mut Meeting<'_>, identity: &Identity) -> Result<Stream, BootstrapError> {
    std::thread::scope(|scope| {
        let rank = scope.spawn(|| super::connect(identity, HANG_LIMIT));
        wait_until("the rank's stream", || {
            let _ = meeting.poll(Instant::now());
            rank.is_finished()
        });
        rank.join().unwrap()
    })
}

/// Connects as a rank and sends its block.
fn hello(meeting: &mut Meeting<'_>, rank: usize, nranks: usize) -> Stream {
    let identity = Identity { rank, nranks, ..meeting.identity.clone() };
    let mut stream = connect(meeting, &identity).unwrap();
    stream.send(head(rank), &[rank as u8]);
    stream
}

/// Returns the report that rank 0 sends to a process that it refuses.
fn report(stream: &mut Stream) -> String {
    let mut text = None;
    wait_until("report", || {
        stream.fill(Instant::now());
        text = stream.frame().unwrap();
        text.is_some()
    });
    let (head, text) = text.unwrap();
    assert_eq!(head.kind, FrameKind::Abort);
    String::from_utf8(text).unwrap()
}

/// Attacks on a listener: silence, and messages that are truncated, forged, random or from another protocol.
#[test]
fn others_do_not_delay_ranks() {
    let secret = Secret::random().unwrap();
    let (identity, now) = (Identity { secret: Some(secret), ..rank_0(2, own_port()) }, Instant::now());
    let mut meeting = Meeting::open(&identity, now, HANG_LIMIT).unwrap();
    let claim = Claim { rank: 1, nranks: 2, called: 0 };
    let good = Initiator::new(DOMAIN, secret.bytes(), claim.emit(), [7; 16]).hello();
    let forged = Initiator::new(DOMAIN, Secret::random().unwrap().bytes(), claim.emit(), [7; 16]).hello();
    let mut random = Random::new(35);
    let mut others = vec![
        vec![],
        good[..HELLO_LEN - 1].to_vec(),
        // An overheard hello, and a confirm that doesn't answer the welcome.
        [&good[..], &[0; 32]].concat(),
        forged.to_vec(),
        b"GET / HTTP/1.1\r\nHost: example\r\nAccept: */*\r\nAccept-Language: *\r\nAccept-Charset: *\r\n\r\n".to_vec(),
    ];
    others.extend((0..100).map(|len| (0..len).map(|_| random.next_u32() as u8).collect()));
    let others = others.iter().map(|bytes| {
        let mut stream = TcpStream::connect(&identity.address).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    });
    let _others = others.collect::<Vec<_>>();
    drop(TcpStream::connect(&identity.address).unwrap());
    let _rank_1 = hello(&mut meeting, 1, 2);
    wait_until("rank 1", || meeting.poll(now).unwrap());
    assert_eq!(meeting.refused, None);
    // The others have had their time for a proof.
    assert!(meeting.listener.poll(now + HANG_LIMIT).unwrap().is_none());
    assert_eq!(meeting.listener.unproven(), 0);
}

#[test]
fn rank_with_another_secret_is_refused_at_once() {
    let secret = |secret| Identity { secret, ..rank_0(2, own_port()) };
    let identity = secret(Some(Secret::random().unwrap()));
    let mut meeting = Meeting::open(&identity, Instant::now(), HANG_LIMIT).unwrap();
    for wrong in [None, Some(Secret::random().unwrap())] {
        let rank = Identity { rank: 1, address: identity.address.clone(), ..secret(wrong) };
        let error = connect(&mut meeting, &rank).unwrap_err().to_string();
        assert!(error.contains("refused the connection") && error.contains("FERROGIN_SECRET"), "{error}");
    }
    let _rank_1 = hello(&mut meeting, 1, 2);
}

/// Without a secret, rank 0 stops at its deadline, names the missing rank, to the other ranks too, and says which
/// process it refused.
#[test]
fn wrong_ranks_over_tcp_are_refused_and_reported_at_deadline() {
    let (identity, now) = (rank_0(3, own_port()), Instant::now());
    let mut meeting = Meeting::open(&identity, now, HANG_LIMIT).unwrap();
    let mut rank_1 = hello(&mut meeting, 1, 3);
    for (rank, nranks, problem) in [
        (3, 3, "as rank 3 of 3"),
        (0, 3, "as rank 0 of 3"),
        (1, 3, "two processes connected as rank 1"),
        (2, 4, "rank 2 was started as one of 4 ranks, but rank 0 as one of 3"),
    ] {
        let mut other = hello(&mut meeting, rank, nranks);
        wait_until("refusal", || {
            assert!(!meeting.poll(now).unwrap());
            meeting.refused.as_ref().is_some_and(|text| text.contains(problem))
        });
        assert!(report(&mut other).contains(problem));
    }
    let error = meeting.poll(now + HANG_LIMIT).unwrap_err();
    let BootstrapError::Timeout { missing, .. } = &error else { panic!("{error}") };
    assert!(missing.starts_with("rank 2 (") && missing.contains("rank 2 was started as one of 4 ranks"), "{error}");
    assert_eq!(report(&mut rank_1), error.to_string());
    // None of this keeps the right process out.
    let _rank_2 = hello(&mut meeting, 2, 3);
    wait_until("rank 2", || meeting.poll(now).unwrap());
}

/// It's the user's own mistake, as no one else's process can use the Unix socket or knows the secret: all ranks end at
/// once.
#[test]
fn wrong_rank_with_proof_ends_job() {
    let with_secret = Identity { secret: Some(Secret::random().unwrap()), ..rank_0(3, own_port()) };
    for identity in [rank_0(3, unique("wrong-hello")), with_secret] {
        let now = Instant::now();
        let mut meeting = Meeting::open(&identity, now, HANG_LIMIT).unwrap();
        let mut rank_1 = hello(&mut meeting, 1, 3);
        wait_until("rank 1", || meeting.poll(now).is_ok() && meeting.ranks[0].is_some());
        let wrong = Identity { rank: 2, nranks: 4, ..identity.clone() };
        std::thread::scope(|scope| {
            let rank_2 = scope.spawn(|| super::connect(&wrong, HANG_LIMIT).unwrap());
            let mut error = String::new();
            wait_until("error", || meeting.poll(now).inspect_err(|found| error = found.to_string()).is_err());
            for text in [error, report(&mut rank_1), report(&mut rank_2.join().unwrap())] {
                assert!(text.contains("rank 2 was started as one of 4 ranks, but rank 0 as one of 3"), "{text}");
            }
        });
    }
}

/// A rank has met the others once its block is there.
#[test]
fn rank_that_ends_before_its_block_is_named_to_all_ranks() {
    let (identity, now) = (rank_0(3, unique("no-block")), Instant::now());
    let mut meeting = Meeting::open(&identity, now, HANG_LIMIT).unwrap();
    let mut rank_1 = hello(&mut meeting, 1, 3);
    let rank_2 = connect(&mut meeting, &Identity { rank: 2, ..identity.clone() }).unwrap();
    let error = meeting.poll(now + HANG_LIMIT).unwrap_err();
    assert!(matches!(&error, BootstrapError::Timeout { missing, .. } if missing == "rank 2"), "{error}");
    assert!(report(&mut rank_1).contains("for rank 2"));
    drop(rank_2);
    let error = meeting.poll(now).unwrap_err().to_string();
    assert!(error.contains("rank 2 ended"), "{error}");
    assert_eq!(report(&mut rank_1), error);
}

#[test]
fn newest_silent_connections_are_kept() {
    let (identity, now) = (rank_0(2, own_port()), Instant::now());
    let mut meeting = Meeting::open(&identity, now, HANG_LIMIT).unwrap();
    let mut others = Vec::new();
    for _ in 0..300 {
        others.push(TcpStream::connect(&identity.address).unwrap());
        assert!(!meeting.poll(now).unwrap());
    }
    assert_eq!(meeting.listener.unproven(), 256);
    let _rank_1 = hello(&mut meeting, 1, 2);
    wait_until("rank 1", || meeting.poll(now).unwrap());
}

/// Opens a connection that hasn't started its proof.
fn dial(listener: &mut Listener, address: SocketAddr) -> Dial {
    let claim = Claim { rank: 1, nranks: 2, called: 0 };
    let mut dial = Dial::new(vec![Address::Tcp(address)], DOMAIN, Secret::default(), claim);
    wait_until("hello", || {
        assert!(dial.poll(Instant::now()).unwrap().is_none() && listener.poll(Instant::now()).unwrap().is_none());
        listener.welcomed() > 0
    });
    dial
}

/// 300 silent connections arrive after a rank got its welcome.
#[test]
fn connection_with_good_hello_outlasts_silent_ones() {
    let (mut listener, bound) = Listener::bind(&["127.0.0.1:0".parse().unwrap()], DOMAIN, Secret::default()).unwrap();
    let mut dial = dial(&mut listener, bound[0]);
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(TcpStream::connect(bound[0]).unwrap());
        assert!(listener.poll(Instant::now()).unwrap().is_none());
    }
    assert_eq!((listener.unproven(), listener.welcomed()), (257, 1));
    let (mut stream, mut accepted) = (None, None);
    wait_until("stream", || {
        stream = stream.take().or_else(|| dial.poll(Instant::now()).unwrap());
        accepted = accepted.take().or_else(|| listener.poll(Instant::now()).unwrap());
        stream.is_some() && accepted.is_some()
    });
}

/// The confirm may reach a listener that drops the connection or exits.
#[test]
fn stream_is_open_only_when_the_listener_has_accepted_it() {
    let (mut listener, bound) = Listener::bind(&["127.0.0.1:0".parse().unwrap()], DOMAIN, Secret::default()).unwrap();
    let mut dial = dial(&mut listener, bound[0]);
    wait_until("confirm", || {
        assert!(dial.poll(Instant::now()).unwrap().is_none());
        dial.is_confirmed()
    });
    drop(listener);
    wait_until("refusal", || {
        assert!(dial.poll(Instant::now()).unwrap().is_none());
        dial.is_refused()
    });
}

#[test]
fn silent_connections_do_not_take_the_last_descriptors() {
    child::run("silent_connections_do_not_take_the_last_descriptors", &[], || {
        let identity = rank_0(2, unique("descriptors"));
        let mut meeting = Meeting::open(&identity, Instant::now(), HANG_LIMIT).unwrap();
        let _silent = start_holder(&identity.address, 50, false);
        assert!(untrusted::limit_descriptors(30));
        let _rank_1 = hello(&mut meeting, 1, 2);
    });
}

/// Starts a process that holds connections.
fn start_holder(address: &str, count: usize, as_nobody: bool) -> Process {
    let mut process = untrusted::start("hold_connections", &format!("{count} {address}"), as_nobody);
    process.wait_for("connections");
    process
}

/// Runs in the process that [`start_holder`] starts.
#[test]
fn hold_connections() {
    let Some(task) = untrusted::task() else { return };
    let (count, address) = task.split_once(' ').unwrap();
    let name = UnixAddr::from_abstract_name(address).unwrap();
    let held: Vec<_> = (0..count.parse().unwrap()).map(|_| UnixStream::connect_addr(&name).unwrap()).collect();
    println!("connections {}", held.len());
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn deadline_passes_while_another_user_connects() {
    let as_nobody = untrusted::have_second_user("deadline_passes_while_another_user_connects");
    let (identity, now) = (rank_0(2, unique("other-user")), Instant::now());
    let mut meeting = Meeting::open(&identity, now, HANG_LIMIT).unwrap();
    let _other = start_holder(&identity.address, 10, as_nobody);
    assert!(!meeting.poll(now).unwrap());
    assert_eq!(meeting.listener.unproven(), if as_nobody { 0 } else { 10 });
    let error = meeting.poll(now + HANG_LIMIT).unwrap_err();
    assert!(matches!(&error, BootstrapError::Timeout { missing, .. } if missing == "rank 1"), "{error}");
}

/// Runs in the process that [`full_queue_is_a_failed_attempt_that_names_the_user`] starts: listens, fills the queue and
/// accepts nothing.
#[test]
fn squat() {
    let Some(name) = untrusted::task() else { return };
    let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(&name).unwrap()).unwrap();
    listen(&listener, Backlog::new(0).unwrap()).unwrap();
    let address = nix::sys::socket::UnixAddr::new_abstract(name.as_bytes()).unwrap();
    let new = || socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_NONBLOCK, None).unwrap();
    let held: Vec<_> = std::iter::repeat_with(new)
        .take_while(|socket| nix::sys::socket::connect(socket.as_raw_fd(), &address).is_ok())
        .collect();
    println!("squatted {}", held.len());
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn full_queue_is_a_failed_attempt_that_names_the_user() {
    let as_nobody = untrusted::have_second_user("full_queue_is_a_failed_attempt_that_names_the_user");
    let identity = Identity { rank: 1, ..rank_0(2, unique("full-queue")) };
    let mut process = untrusted::start("squat", &identity.address, as_nobody);
    process.wait_for("squatted");
    // In a thread, because a connect that blocks doesn't end.
    let rank = std::thread::spawn(move || super::connect(&identity, Duration::ZERO).map(drop));
    wait_until("end of the attempt", || rank.is_finished());
    let error = rank.join().unwrap().unwrap_err().to_string();
    let who = if as_nobody { "a process of user 65534" } else { "does not accept connections" };
    assert!(error.contains(who) && error.contains("its queue of connections is full"), "{error}");
}

#[test]
fn exhausted_ports_are_an_error_with_address_and_fix() {
    const NAME: &str = "exhausted_ports_are_an_error_with_address_and_fix";
    const INSIDE: &str = "FERROGIN_TEST_ONE_PORT";
    if std::env::var_os(INSIDE).is_none() {
        let script =
            "ip link set lo up && echo 40000 40000 > /proc/sys/net/ipv4/ip_local_port_range || exit 77; exec \"$@\"";
        let test = child::command(NAME);
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c", script, "sh"]).arg(test.get_program());
        let output = command.args(test.get_args()).env(INSIDE, "1").output();
        let Some(output) = output.ok().filter(|output| !matches!(output.status.code(), Some(1 | 77))) else {
            skip(NAME, "this machine allows no network namespace, or has no `ip` (apt-get install iproute2)");
            return;
        };
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let identity = rank_0(2, "127.0.0.1:7000".to_owned());
    let _meeting = Meeting::open(&identity, Instant::now(), HANG_LIMIT).unwrap();
    let any_port = "127.0.0.1:0".parse().unwrap();
    let listen = || Listener::bind(&[any_port], DOMAIN, Secret::default());
    let _last = listen().unwrap();
    let (address, error) = listen().unwrap_err();
    assert_eq!((address, error.kind()), (any_port, io::ErrorKind::AddrInUse));
    let error = super::connect(&Identity { rank: 1, ..identity }, Duration::ZERO).unwrap_err().to_string();
    for part in ["connect to 127.0.0.1:7000", "no free port", "net.ipv4.ip_local_port_range"] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

/// Otherwise, the system could pick the port that the ranks connect to for some other socket of rank 0.
#[test]
fn rank_0_has_its_port_before_its_block() {
    let identity = rank_0(2, own_port());
    let exchange = Exchange::open(&identity, HANG_LIMIT).unwrap();
    let Err(error) = Exchange::open(&identity, HANG_LIMIT) else { panic!("two listeners at {}", identity.address) };
    assert!(error.to_string().contains("rank 0 cannot listen on"), "{error}");
    drop(exchange);
    Exchange::open(&identity, HANG_LIMIT).map(drop).unwrap();
}

#[test]
fn own_host_name_stands_for_all_addresses() {
    let all = |address: &str| own_addresses(address).unwrap();
    assert_eq!(all("127.0.0.1:7000"), [["127.0.0.1:7000".parse().unwrap()]]);
    assert!(all("localhost:7000").iter().flatten().all(|address| address.ip().is_loopback()));
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    if let Ok(any) = own_addresses(&format!("{}:7000", name.trim())) {
        assert!(any.iter().flatten().all(|address| address.ip().is_unspecified() && address.port() == 7000), "{any:?}");
    }
}
