//! The cards' wire as a test speaks it: the handshake, seals and packets, written apart from the card's own code.

use siphasher::sip128::SipHasher24;

/// The version that the cards of this build speak, and another.
pub const OURS: u8 = 3;
pub const OTHER: u8 = 4;

/// The address of a card that only a test plays: a GID with this port and secret, queue pair 1.
pub fn address(port: u16, secret: u64) -> [u8; 32] {
    let mut bytes = [0; 32];
    (bytes[0], bytes[1]) = (0x5e, OURS);
    bytes[2..6].copy_from_slice(&[127, 0, 0, 1]);
    bytes[6..8].copy_from_slice(&port.to_be_bytes());
    bytes[8..16].copy_from_slice(&secret.to_be_bytes());
    bytes[16..18].copy_from_slice(&1u16.to_ne_bytes());
    bytes
}

/// IP address and port of a card's datagram wire.
pub fn socket_of(card: &[u8]) -> std::net::SocketAddrV4 {
    let ip: [u8; 4] = card[2..6].try_into().unwrap();
    std::net::SocketAddrV4::new(ip.into(), u16::from_be_bytes([card[6], card[7]]))
}

/// The same as `sockaddr_in`.
pub fn endpoint_of(card: &[u8]) -> Vec<u8> {
    [&[2, 0], &card[6..8], &card[2..6], &[0; 8]].concat()
}

fn derive(what: &str, parts: &[&[u8]]) -> [u8; 32] {
    blake3::derive_key(&format!("softefa wire 3: {what}"), &parts.concat())
}

fn keyed(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    blake3::keyed_hash(key, &parts.concat()).into()
}

/// The abstract name of a card's socket.
pub fn abstract_name(card: &[u8]) -> String {
    let hash = derive("name of a card's socket", &[&card[..16]]);
    format!("softefa/3/{}", hash.map(|byte| format!("{byte:02x}")).concat())
}

fn masked(key: &[u8; 32], nonce: &[u8], gid: &[u8]) -> Vec<u8> {
    gid[..16].iter().zip(keyed(key, &[b"mask", nonce])).map(|(byte, mask)| byte ^ mask).collect()
}

/// The hello of card `own` to a card.
pub fn hello(version: u8, own: &[u8], card: &[u8], nonce: &[u8; 16]) -> Vec<u8> {
    let key = derive("hello to a card", &[&card[..16]]);
    let from = masked(&key, nonce, own);
    let tag = keyed(&key, &[b"tag.", nonce, &from]);
    [b"softefa".as_slice(), &[version], nonce, &from, &tag].concat()
}

/// The answer of card `own` to a hello, and the session.
pub fn welcome(own: &[u8], hello: &[u8], nonce: &[u8; 16]) -> (Vec<u8>, Session) {
    let key = derive("hello to a card", &[&own[..16]]);
    let initiator = masked(&key, &hello[8..24], &hello[24..40]);
    let keys = keys(&initiator, own, &hello[8..24], nonce);
    let mut session = Session { send: keys[1], sent: 0 };
    let proof = session.seal(&[])[8..].to_vec();
    ([b"softef".as_slice(), &[OURS, 0], nonce, &proof].concat(), session)
}

/// An answer of a card of another version.
pub fn welcome_of_another_version(hello: &[u8]) -> Vec<u8> {
    [b"softef".as_slice(), &[OTHER, 0], &hello[8..24]].concat()
}

/// The session of a initiator, from its hello's nonce and the answer.
pub fn session(own: &[u8], card: &[u8], nonce: &[u8; 16], welcome: &[u8]) -> Session {
    Session { send: keys(own, card, nonce, &welcome[8..24])[0], sent: 0 }
}

fn keys(initiator: &[u8], responder: &[u8], initiator_nonce: &[u8], responder_nonce: &[u8]) -> [[u8; 16]; 2] {
    let parts = [&initiator[..16], &responder[..16], initiator_nonce, responder_nonce];
    ["packets of the initiator", "packets of the responder"].map(|what| derive(what, &parts)[..16].try_into().unwrap())
}

/// One direction of a session.
pub struct Session {
    send: [u8; 16],
    sent: u64,
}

impl Session {
    /// The seal of the next packet: a counter and a tag.
    pub fn seal(&mut self, parts: &[&[u8]]) -> Vec<u8> {
        let counter = self.sent.to_le_bytes();
        self.sent += 1;
        let tag = SipHasher24::new_with_key(&self.send).hash(&[&counter[..], &parts.concat()].concat());
        [&counter[..], &tag.as_bytes()].concat()
    }

    /// What follows a packet's header: a payload of 64 bytes at most, and the seal.
    pub fn sealed(&mut self, header: &[u8], payload: &[u8]) -> Vec<u8> {
        let seal = self.seal(&[header, payload]);
        [payload, &seal].concat()
    }
}

/// Kinds of packets.
pub const WRITE: u8 = 1;
pub const ACK: u8 = 2;
pub const READ: u8 = 3;
pub const DATA: u8 = 4;
pub const HELLO: u8 = 6;
pub const WELCOME: u8 = 7;

/// A packet's header.
pub fn header(kind: u8, len: usize) -> [u8; 48] {
    let mut bytes = [0; 48];
    bytes[0] = kind;
    for at in [24, 32] {
        bytes[at..at + 4].copy_from_slice(&(len as u32).to_le_bytes());
    }
    bytes
}
