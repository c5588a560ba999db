use std::collections::VecDeque;

use ferrogin_rendezvous::proof::{self, ProofError};
use ferrogin_test_support::wait::wait_for;

use super::super::packet::Kind;
use super::*;
use crate::random::{self, Random};

/// Returns a listening card's port and its GID.
fn card() -> (Listener, Gid) {
    let listener = Listener::bind(Ipv4Addr::LOCALHOST).unwrap();
    listener.listen().unwrap();
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, listener.port().unwrap());
    (listener, Gid { address: Some(address), secret: random::secret().unwrap() })
}

/// Returns what comes of the next bytes.
fn next(stream: &mut Stream, own: &Gid) -> Result<Progress, WireError> {
    wait_for("an event", || match stream.proceed(own) {
        Ok(Progress::Nothing) => None,
        other => Some(other),
    })
}

fn accepted(listener: &Listener) -> Stream {
    wait_for("a connection", || listener.accept().unwrap())
}

/// Returns both ends of an open stream.
fn pair() -> (Stream, Stream) {
    let ((_, a), (listener, b)) = (card(), card());
    let mut calling = Stream::connect(&a, &b).unwrap();
    let mut called = accepted(&listener);
    assert!(called.is_silent() && calling.is_calling());
    let hello = next_after(&mut calling, &mut called, &b);
    let Ok(Progress::Hello { peer, from, welcome }) = hello else { panic!("a hello") };
    assert!(peer == a && from == IpAddr::V4(Ipv4Addr::LOCALHOST) && called.unproven() == Some(a));
    called.send(&welcome).unwrap();
    assert!(matches!(next(&mut calling, &a), Ok(Progress::Proven(None))) && calling.is_open() && !called.is_open());
    assert!(matches!(next(&mut called, &b), Ok(Progress::Proven(Some(peer))) if peer == a) && called.is_open());
    (calling, called)
}

/// Does the same while the caller's hello may still wait for the connection.
fn next_after(calling: &mut Stream, called: &mut Stream, own: &Gid) -> Result<Progress, WireError> {
    wait_for("a hello", || {
        calling.flush().unwrap();
        match called.proceed(own) {
            Ok(Progress::Nothing) => None,
            other => Some(other),
        }
    })
}

/// Connects to a card as a process that sends `bytes` and keeps its end open.
fn attacked(bytes: &[u8]) -> (Result<Progress, WireError>, TcpStream) {
    let (listener, gid) = card();
    let mut attacker = TcpStream::connect(gid.address.unwrap()).unwrap();
    attacker.write_all(bytes).unwrap();
    (next(&mut accepted(&listener), &gid), attacker)
}

#[test]
fn ended_stream_delivers_what_was_sent() {
    let (mut a, mut b) = pair();
    let (_, gid) = card();
    let payload = vec![7; MAX_PAYLOAD];
    let header = Header { total: payload.len() as u32, len: payload.len() as u32, ..Header::new(Kind::Write, 0) };
    // Bytes that the ending side never reads: closing the socket with them resets the stream.
    // SAFETY: `payload` holds that many bytes.
    assert!(unsafe { a.push(&header, payload.as_ptr()) }.unwrap());
    a.flush().unwrap();
    let mut sent = 0;
    // SAFETY: `payload` holds that many bytes.
    while unsafe { b.push(&header, payload.as_ptr()) }.unwrap() {
        sent += 1;
    }
    let mut received = 0;
    let mut b = Some(b);
    wait_for("the end", || {
        if b.as_mut().is_some_and(|b| b.flush().is_ok() && !b.has_output() && b.end()) {
            b = None;
        }
        let over = a.proceed(&gid).is_err();
        while a.packets_arrived() {
            let (header, _) = a.peek().unwrap().unwrap();
            a.pop(header.len);
            received += 1;
        }
        over.then(|| a.socket.shutdown(Shutdown::Both))
    })
    .unwrap();
    assert!(received == sent && sent > 1, "{received} of {sent} packets");
}

#[test]
fn packets_cross_in_order_whatever_their_length() {
    let (mut a, mut b) = pair();
    let (_, gid) = card();
    let source: Vec<u8> = (0..2 * MAX_PAYLOAD).map(|i| (i / 7 * 3) as u8).collect();
    let mut random = Random::seeded(4);
    let mut lens = VecDeque::new();
    let (mut sent, mut received, mut was_full) = (0u64, 0u64, false);
    while received < 4000 {
        // The sender gets ahead at times, so that the sockets fill up.
        for _ in 0..random.below(300) {
            let len = match random.below(3) {
                0 => 0,
                1 => random.below(3 * LONG as u64),
                _ => random.below(MAX_PAYLOAD as u64 + 1),
            } as u32;
            let header = Header { total: len, len, ..Header::new(Kind::Write, sent) };
            // SAFETY: `source` holds that many bytes after every start.
            if !unsafe { a.push(&header, source[sent as usize % 251..].as_ptr()) }.unwrap() {
                was_full = true;
                break;
            }
            lens.push_back(len);
            sent += 1;
        }
        a.flush().unwrap();
        for _ in 0..random.below(8) {
            assert!(matches!(b.proceed(&gid), Ok(Progress::Nothing)));
            while let Some((header, payload)) = b.peek().unwrap() {
                assert_eq!((header.token, Some(header.len)), (received, lens.pop_front()));
                // SAFETY: the payload stays until `pop`.
                let bytes = unsafe { std::slice::from_raw_parts(payload, header.len as usize) };
                let start = received as usize % 251;
                assert!(bytes == &source[start..start + bytes.len()], "packet {received}");
                b.pop(header.len);
                received += 1;
            }
            a.flush().unwrap();
        }
    }
    assert!(was_full, "the sockets never filled up");
}

#[test]
fn packet_of_single_bytes_is_put_together() {
    let header = Header { total: 3, len: 3, ..Header::new(Kind::Write, 7) };
    let bytes = [&header.to_bytes()[..], b"abc"].concat();
    for cut in 0..bytes.len() {
        assert_eq!(Input::with(&bytes[..cut]).peek(), Ok(None), "{cut} bytes");
    }
    let mut input = Input::with(&bytes);
    assert_eq!(input.peek().unwrap().unwrap().0, header);
    input.pop(bytes.len());
    assert_eq!(input.peek(), Ok(None));
}

#[test]
fn impossible_packets_are_corrupt() {
    let long = MAX_PAYLOAD as u32 + 1;
    for header in [
        Header::default(),
        Header { kind: 99, ..Header::default() },
        Header { total: long, len: long, ..Header::new(Kind::Write, 1) },
        Header { total: 1, len: 2, ..Header::new(Kind::Write, 1) },
    ] {
        assert_eq!(Input::with(&header.to_bytes()).peek(), Err(Corrupt), "{header:?}");
    }
}

#[test]
fn what_a_peer_sent_before_it_closed_is_read() {
    let (mut a, mut b) = pair();
    let (_, gid) = card();
    // SAFETY: no payload.
    assert!(unsafe { a.push(&Header::new(Kind::Ack, 7), std::ptr::null()) }.unwrap());
    a.flush().unwrap();
    // SAFETY: no payload.
    assert!(unsafe { b.push(&Header::new(Kind::Ack, 8), std::ptr::null()) }.unwrap());
    b.flush().unwrap();
    drop(a);
    // `a` never read `b`'s packet, so its close is a reset. A write learns of it first.
    let error = wait_for("end of the stream", || {
        // SAFETY: no payload.
        assert!(unsafe { b.push(&Header::new(Kind::Ack, 9), std::ptr::null()) }.is_ok());
        b.flush().unwrap();
        b.proceed(&gid).err()
    });
    assert!(matches!(error, WireError::Gone), "{error}");
    assert_eq!(b.peek().unwrap().unwrap().0, Header::new(Kind::Ack, 7));
}

#[test]
fn card_that_is_not_there_is_absent() {
    let ((_, own), (listener, gid)) = (card(), card());
    drop(listener);
    let absent = match Stream::connect(&own, &gid) {
        Ok(mut stream) => wait_for("refusal", || stream.flush().err().or_else(|| stream.proceed(&own).err())),
        Err(error) => error,
    };
    assert!(matches!(absent, WireError::Absent), "{absent}");
}

#[test]
fn port_takes_no_connection_before_the_card_listens() {
    let listener = Listener::bind(Ipv4Addr::LOCALHOST).unwrap();
    let address = (Ipv4Addr::LOCALHOST, listener.port().unwrap());
    assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert!(TcpListener::bind(address).is_err(), "and is taken");
    listener.listen().unwrap();
    TcpStream::connect(address).unwrap();
}

#[test]
fn hello_of_another_version_is_refused_by_name() {
    let (listener, gid) = card();
    let (_, own) = card();
    let mut hello = handshake::initiate(&own, &gid).unwrap().hello();
    hello[7] = 9;
    let mut attacker = TcpStream::connect(gid.address.unwrap()).unwrap();
    attacker.write_all(&hello).unwrap();
    let error = next(&mut accepted(&listener), &gid).err().expect("a refusal");
    assert!(error.to_string().contains("version 9"), "{error}");
    let mut answer = [0; WELCOME_LEN];
    attacker.read_exact(&mut answer).unwrap();
    assert_eq!(answer, proof::refusal(handshake::DOMAIN));
}

#[test]
fn forged_hellos_are_refused() {
    let mut random = Random::seeded(8);
    let noise: Vec<u8> = (0..HELLO_LEN).map(|_| random.next_u32() as u8).collect();
    let (_, other) = card();
    let unproven = handshake::initiate(&other, &Gid { secret: [7; 8], ..other }).unwrap().hello();
    for (hello, reason) in
        [(noise, ProofError::Protocol), (unproven.to_vec(), ProofError::Unproven), (vec![7; 200], ProofError::Protocol)]
    {
        let (result, _attacker) = attacked(&hello);
        let error = result.err().expect("a refusal");
        assert!(matches!(error, WireError::Proof(seen) if seen == reason), "{error}");
    }
}

#[test]
fn truncated_hello_proves_nothing() {
    let (listener, gid) = card();
    let (_, own) = card();
    let hello = handshake::initiate(&own, &gid).unwrap().hello();
    let mut attacker = TcpStream::connect(gid.address.unwrap()).unwrap();
    attacker.write_all(&hello[..HELLO_LEN - 1]).unwrap();
    drop(attacker);
    let mut called = accepted(&listener);
    assert!(matches!(next(&mut called, &gid), Err(WireError::Gone)) && called.is_silent());
}

#[test]
fn repeated_hello_and_confirm_prove_nothing() {
    let (listener, gid) = card();
    let (_, own) = card();
    let initiator = handshake::initiate(&own, &gid).unwrap();
    let mut confirm = None;
    // The second connection replays everything that the first sent.
    for repeated in [false, true] {
        let mut caller = TcpStream::connect(gid.address.unwrap()).unwrap();
        caller.write_all(&initiator.hello()).unwrap();
        let mut called = accepted(&listener);
        let Ok(Progress::Hello { welcome, .. }) = next(&mut called, &gid) else { panic!("a good hello") };
        caller.write_all(confirm.get_or_insert_with(|| initiator.welcomed(&welcome).unwrap())).unwrap();
        match next(&mut called, &gid) {
            Ok(Progress::Proven(Some(peer))) => assert!(!repeated && peer == own),
            Err(WireError::Proof(ProofError::Unproven)) => assert!(repeated),
            _ => panic!("neither proven nor unproven"),
        }
    }
}
