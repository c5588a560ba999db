//! The cards' wire protocol as a test speaks it: the handshake and packets, written independently of the card's own
//! code.

/// The version that this build's cards speak, and a different one.
pub const OURS: u8 = 4;
pub const OTHER: u8 = 5;

/// The address of a card that a test impersonates: a GID with this port and secret, and queue pair 1.
pub fn address(port: u16, secret: u64) -> [u8; 32] {
    let mut bytes = [0; 32];
    (bytes[0], bytes[1]) = (0x5e, OURS);
    bytes[2..6].copy_from_slice(&[127, 0, 0, 1]);
    bytes[6..8].copy_from_slice(&port.to_be_bytes());
    bytes[8..16].copy_from_slice(&secret.to_be_bytes());
    bytes[16..18].copy_from_slice(&1u16.to_ne_bytes());
    bytes
}

/// A card's IP address and port.
pub fn socket_of(card: &[u8]) -> std::net::SocketAddrV4 {
    let ip: [u8; 4] = card[2..6].try_into().unwrap();
    std::net::SocketAddrV4::new(ip.into(), u16::from_be_bytes([card[6], card[7]]))
}

fn domain(version: u8) -> [u8; 8] {
    [b"softefa".as_slice(), &[version]].concat().try_into().unwrap()
}

fn derive(what: &str, version: u8, parts: &[&[u8]]) -> [u8; 32] {
    blake3::derive_key(&format!("ferrogin proof: {what}"), &[&domain(version), &parts.concat()[..]].concat())
}

fn keyed(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    blake3::keyed_hash(key, &parts.concat()).into()
}

/// The abstract name of a card's Unix socket.
pub fn abstract_name(card: &[u8]) -> String {
    let hash = blake3::derive_key("softefa wire 4: name of a card's socket", &card[..16]);
    format!("softefa/4/{}", hash.map(|byte| format!("{byte:02x}")).concat())
}

fn masked(key: &[u8; 32], nonce: &[u8], gid: &[u8]) -> Vec<u8> {
    gid[..16].iter().zip(keyed(key, &[b"mask", nonce])).map(|(byte, mask)| byte ^ mask).collect()
}

/// Sizes of the handshake's messages, in bytes.
pub const HELLO_LEN: usize = 72;
pub const WELCOME_LEN: usize = 56;
pub const CONFIRM_LEN: usize = 32;

/// The hello from card `own` to `card`.
pub fn hello(version: u8, own: &[u8], card: &[u8], nonce: &[u8; 16]) -> Vec<u8> {
    let key = derive("hello", version, &[&card[..16]]);
    let from = masked(&key, nonce, own);
    let tag = keyed(&key, &[b"tag.", nonce, &from]);
    [&domain(version)[..], nonce, &from, &tag].concat()
}

/// Card `own`'s answer to a hello.
pub fn welcome(own: &[u8], hello: &[u8], nonce: &[u8; 16]) -> Vec<u8> {
    let initiator = masked(&derive("hello", OURS, &[&own[..16]]), &hello[8..24], &hello[24..40]);
    let tag = derive("welcome", OURS, &[&own[..16], &initiator, &hello[8..24], nonce]);
    [&domain(OURS)[..], nonce, &tag].concat()
}

/// The refusal from a card that speaks this version.
pub fn refusal(version: u8) -> Vec<u8> {
    [&domain(version)[..], &[0; 48]].concat()
}

/// The connecting card's second message, from its hello's nonce and the answer.
pub fn confirm(own: &[u8], card: &[u8], nonce: &[u8; 16], welcome: &[u8]) -> [u8; CONFIRM_LEN] {
    derive("confirm", OURS, &[&card[..16], &own[..16], nonce, &welcome[8..24]])
}

/// Packet kinds.
pub const WRITE: u8 = 1;
pub const ACK: u8 = 2;
pub const READ: u8 = 3;
pub const DATA: u8 = 4;

/// A packet's header.
pub fn header(kind: u8, len: usize) -> [u8; 48] {
    let mut bytes = [0; 48];
    bytes[0] = kind;
    for at in [24, 32] {
        bytes[at..at + 4].copy_from_slice(&(len as u32).to_le_bytes());
    }
    bytes
}
