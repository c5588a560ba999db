use super::*;

const DOMAIN: Domain = *b"example\x04";
const SECRET: &[u8] = b"sixteen or more bytes";
const IDENTITY: Identity = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
const INITIATOR: Nonce = [0xa1; 16];
const RESPONDER: Nonce = [0xb2; 16];

fn initiator() -> Initiator {
    Initiator::new(DOMAIN, SECRET, IDENTITY, INITIATOR)
}

fn respond(hello: &[u8; HELLO_LEN]) -> Result<(Responder, [u8; WELCOME_LEN]), ProofError> {
    Responder::respond(DOMAIN, SECRET, hello, RESPONDER)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn messages_are_emitted_as_golden_bytes() {
    let hello = initiator().hello();
    let (_, welcome) = respond(&hello).unwrap();
    let confirm = initiator().welcomed(&welcome).unwrap();
    // Computed in Python, with a BLAKE3 implementation that reproduces the published vectors.
    assert_eq!(hello[..24], [DOMAIN.as_slice(), &INITIATOR].concat());
    assert_eq!(hex(&hello[24..40]), "5b7568c70c1c7fadea4df2c0f3c20b0f");
    assert_eq!(hex(&hello[40..]), "02bfb1e9cefe2af2a5ab2b2a57c2eac5280aa4c40ef7137ba26987bb0a5ab28a");
    assert_eq!(welcome[..24], [DOMAIN.as_slice(), &RESPONDER].concat());
    assert_eq!(hex(&welcome[24..]), "c1d77896143ae1b8e5f0b52038dce31d7d961dcc9e06edcc36f5940473c9dee1");
    assert_eq!(hex(&confirm), "a522675f3b6b6012122c8757e66adcc673fb4fad524986746fb23f7e89c3e726");
}

#[test]
fn both_ends_are_proven() {
    let (responder, welcome) = respond(&initiator().hello()).unwrap();
    assert_eq!(responder.identity(), IDENTITY);
    let confirm = initiator().welcomed(&welcome).unwrap();
    assert_eq!(responder.confirmed(&confirm), Ok(()));
}

#[test]
fn secret_and_identity_travel_in_no_message() {
    let hello = initiator().hello();
    let (_, welcome) = respond(&hello).unwrap();
    let confirm = initiator().welcomed(&welcome).unwrap();
    let all = [hello.as_slice(), &welcome, &confirm].concat();
    for hidden in [SECRET, &IDENTITY] {
        assert!(!all.windows(4).any(|bytes| bytes == &hidden[..4]));
    }
}

#[test]
fn end_without_the_secret_is_unproven() {
    let guess = Initiator::new(DOMAIN, b"another", IDENTITY, INITIATOR);
    assert_eq!(respond(&guess.hello()).err(), Some(ProofError::Unproven));
    let (_, forged) = Responder::respond(DOMAIN, b"another", &guess.hello(), RESPONDER).unwrap();
    assert_eq!(initiator().welcomed(&forged).err(), Some(ProofError::Unproven));
}

#[test]
fn changed_messages_are_refused() {
    let hello = initiator().hello();
    let (responder, welcome) = respond(&hello).unwrap();
    let confirm = initiator().welcomed(&welcome).unwrap();
    let changed = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 1;
        bytes
    };
    for at in 0..HELLO_LEN {
        assert!(respond(changed(&hello, at).as_slice().try_into().unwrap()).is_err(), "byte {at}");
    }
    for at in 0..WELCOME_LEN {
        assert!(initiator().welcomed(changed(&welcome, at).as_slice().try_into().unwrap()).is_err(), "byte {at}");
    }
    for at in 0..CONFIRM_LEN {
        assert!(responder.confirmed(changed(&confirm, at).as_slice().try_into().unwrap()).is_err(), "byte {at}");
    }
}

#[test]
fn messages_of_another_version_name_both() {
    let newer = *b"example\x05";
    let hello = Initiator::new(newer, SECRET, IDENTITY, INITIATOR).hello();
    let refused = respond(&hello).err().unwrap();
    assert_eq!(refused, ProofError::Version { theirs: 5, own: 4 });
    assert!(refused.to_string().contains("version 5") && refused.to_string().contains("version 4"), "{refused}");
    assert_eq!(initiator().welcomed(&refusal(newer)).err(), Some(refused));
}

#[test]
fn messages_of_another_domain_are_rejected() {
    let hello = Initiator::new(*b"another\x04", SECRET, IDENTITY, INITIATOR).hello();
    assert_eq!(respond(&hello).err(), Some(ProofError::Protocol));
    assert_eq!(initiator().welcomed(&[0; WELCOME_LEN]).err(), Some(ProofError::Protocol));
}

#[test]
fn refusal_is_reported() {
    assert_eq!(initiator().welcomed(&refusal(DOMAIN)).err(), Some(ProofError::Refused));
}

#[test]
fn nothing_is_repeated_or_reflected() {
    let hello = initiator().hello();
    let (responder, welcome) = respond(&hello).unwrap();
    let confirm = initiator().welcomed(&welcome).unwrap();
    // The hello is replayed on a second stream, for which the responder has another nonce.
    let (later, _) = Responder::respond(DOMAIN, SECRET, &hello, [0xb3; 16]).unwrap();
    assert_eq!(later.confirmed(&confirm), Err(ProofError::Unproven));
    // The answer to the first hello doesn't fit a second one.
    let again = Initiator::new(DOMAIN, SECRET, IDENTITY, [0xa3; 16]);
    assert_eq!(again.welcomed(&welcome).err(), Some(ProofError::Unproven));
    // The welcome's tag isn't a confirm.
    assert_eq!(responder.confirmed(welcome.last_chunk().unwrap()), Err(ProofError::Unproven));
}
