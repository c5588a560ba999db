use std::net::Ipv4Addr;

use super::*;

fn gid(secret: u8) -> Gid {
    Gid { ip: Ipv4Addr::LOCALHOST, port: 9, secret: [secret; 8] }
}

const INITIATOR: Nonce = [0xa1; 16];
const RESPONDER: Nonce = [0xb2; 16];

fn initiator() -> Initiator {
    Initiator::new(gid(1), gid(2), INITIATOR)
}

/// The sessions of both sides.
fn sessions() -> (Session, Session) {
    let initiator = initiator();
    let response = respond(initiator.hello().as_bytes(), &gid(2), RESPONDER).unwrap();
    (initiator.welcomed(response.welcome.as_bytes()).unwrap(), response.session)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn messages_are_emitted_as_golden_bytes() {
    let hello = initiator().hello();
    assert_eq!(&hello.as_bytes()[..24], [b"softefa\x03".as_slice(), &INITIATOR].concat());
    let response = respond(hello.as_bytes(), &gid(2), RESPONDER).unwrap();
    assert_eq!(&response.welcome.as_bytes()[..24], [b"softef\x03\x00".as_slice(), &RESPONDER].concat());
    // Computed in Python, by the reference implementation of BLAKE3 and one of SipHash that gives the published vectors.
    assert_eq!(hex(&hello.from), "2fd94d9174586fe7bec3483ad49c49d6");
    assert_eq!(hex(&hello.tag), "475a4fe7178ee3cafee603bac5cd0434b3f251bd9a742bf18aff814bda852470");
    assert_eq!(hex(&response.welcome.tag), "4e3b9894956e51387a1fc1cee53461d0");
    assert_eq!(abstract_name(&gid(2)), "softefa/3/af56a34d41fbf0c957bbf8925237017b31b186b967b49d3e0a47037fcc003e3a");
}

#[test]
fn secret_travels_in_no_message() {
    let hello = initiator().hello();
    let welcome = respond(hello.as_bytes(), &gid(2), RESPONDER).unwrap().welcome;
    let all = [hello.as_bytes(), welcome.as_bytes(), abstract_name(&gid(2)).as_bytes()].concat();
    for secret in [1u8, 2] {
        assert!(!all.windows(4).any(|bytes| bytes == [secret; 4]));
    }
}

#[test]
fn both_sides_agree_on_a_session() {
    let initiator = initiator();
    let response = respond(initiator.hello().as_bytes(), &gid(2), RESPONDER).unwrap();
    assert_eq!(response.peer, gid(1));
    let (mut a, mut b) = sessions();
    for text in [b"".as_slice(), b"one", &[7; 600]] {
        let seal = a.seal(&[text]);
        assert_eq!(b.open(&seal, &[text]), Ok(()));
        let seal = b.seal(&[text]);
        assert_eq!(a.open(&seal, &[text]), Ok(()));
    }
}

#[test]
fn hello_without_the_gid_of_its_target_is_refused() {
    for unproven in [Initiator::new(gid(1), gid(3), INITIATOR), Initiator::new(gid(1), gid(1), INITIATOR)] {
        let hello = unproven.hello();
        assert_eq!(respond(hello.as_bytes(), &gid(2), RESPONDER).err(), Some(Disagreement::Unproven));
    }
    let own = Initiator::new(gid(2), gid(2), INITIATOR).hello();
    assert_eq!(
        respond(own.as_bytes(), &gid(2), RESPONDER).err(),
        Some(Disagreement::Refused),
        "a card does not call itself"
    );
}

#[test]
fn changed_hello_is_refused() {
    let hello = initiator().hello();
    for at in 0..HELLO_LEN {
        let mut bytes = hello.as_bytes().to_vec();
        bytes[at] ^= 1;
        assert!(respond(&bytes, &gid(2), RESPONDER).is_err(), "byte {at}");
        assert!(respond(&hello.as_bytes()[..at], &gid(2), RESPONDER).is_err(), "{at} bytes");
    }
    let longer = [hello.as_bytes(), &[0]].concat();
    assert!(respond(&longer, &gid(2), RESPONDER).is_err());
}

#[test]
fn changed_welcome_is_refused() {
    let initiator = initiator();
    let welcome = respond(initiator.hello().as_bytes(), &gid(2), RESPONDER).unwrap().welcome;
    for at in 0..WELCOME_LEN {
        let mut bytes = welcome.as_bytes().to_vec();
        bytes[at] ^= 1;
        assert!(initiator.welcomed(&bytes).is_err(), "byte {at}");
        assert!(initiator.welcomed(&welcome.as_bytes()[..at]).is_err(), "{at} bytes");
    }
}

#[test]
fn messages_of_another_version_name_both() {
    let mut hello = initiator().hello();
    hello.version = 2;
    let refused = respond(hello.as_bytes(), &gid(2), RESPONDER).err();
    assert_eq!(refused, Some(Disagreement::Version(2)));
    let text = Disagreement::Version(2).to_string();
    assert!(text.contains("version 2") && text.contains("this one 3"), "{text}");
    let older = [b"softefa\x02".as_slice(), &[0; 32]].concat();
    assert_eq!(respond(&older, &gid(2), RESPONDER).err(), Some(Disagreement::Version(2)), "a hello of version 2");
    let newer = [b"softef\x04\x00".as_slice(), &INITIATOR].concat();
    assert_eq!(initiator().welcomed(&newer).err(), Some(Disagreement::Version(4)));
}

#[test]
fn refusal_is_believed_only_of_the_card_that_was_called() {
    let initiator = initiator();
    let refused = refusal(initiator.hello().as_bytes());
    assert_eq!(initiator.welcomed(refused.as_bytes()).err(), Some(Disagreement::Refused));
    let forged = refusal(b"");
    assert_eq!(initiator.welcomed(forged.as_bytes()).err(), Some(Disagreement::Protocol));
}

#[test]
fn nothing_is_reflected() {
    let (initiator, mut response) = (initiator(), respond(initiator().hello().as_bytes(), &gid(2), RESPONDER).unwrap());
    // The initiator gets its own hello, as if the responder called with the same nonce.
    assert_eq!(respond(initiator.hello().as_bytes(), &gid(1), INITIATOR).err(), Some(Disagreement::Unproven));
    let (mut a, mut b) = sessions();
    let seal = a.seal(&[b"x"]);
    assert_eq!(a.open(&seal, &[b"x"]), Err(BadSeal::Forged), "its own packet");
    let seal = b.seal(&[b"x"]);
    assert_eq!(b.open(&seal, &[b"x"]), Err(BadSeal::Forged), "its own packet");
    // The responder's proof is not one of the initiator.
    let proof = Seal { counter: 0.into(), tag: response.welcome.tag };
    assert_eq!(response.session.open(&proof, &[]), Err(BadSeal::Forged));
}

#[test]
fn packet_of_another_session_is_forged() {
    let (mut a, _) = sessions();
    let again = initiator();
    // The hello is repeated: the responder's nonce is another.
    let mut later = respond(again.hello().as_bytes(), &gid(2), [0xb3; 16]).unwrap().session;
    let seal = a.seal(&[b"write"]);
    assert_eq!(later.open(&seal, &[b"write"]), Err(BadSeal::Forged));
}

#[test]
fn changed_and_repeated_packets_are_refused() {
    let (mut a, mut b) = sessions();
    let seal = a.seal(&[b"write", b"8 bytes."]);
    assert_eq!(b.open(&seal, &[b"write", b"9 bytes."]), Err(BadSeal::Forged));
    let mut changed = seal;
    changed.counter = 1.into();
    assert_eq!(b.open(&changed, &[b"write", b"8 bytes."]), Err(BadSeal::Forged));
    assert_eq!(b.open(&seal, &[b"write", b"8 bytes."]), Ok(()));
    assert_eq!(b.open(&seal, &[b"write", b"8 bytes."]), Err(BadSeal::NotInOrder(NotInOrder::Repeated)));
}
