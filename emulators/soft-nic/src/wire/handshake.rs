//! The handshake of two cards, without I/O. Each card proves that it knows the GIDs of both before a request crosses.
//!
//! ```text
//! initiator                                   responder
//!   Hello: nonce, encrypted GID, tag    -->   the tag's key is made of the responder's GID
//!   Welcome: nonce, tag                 <--   the tag is the first seal of the responder's direction
//!   first seal of the own direction     -->   both cards are proven to each other
//! ```
//!
//! A GID has a secret of 64 bits and does not travel in clear: the initiator encrypts its own under a key that only cards with
//! the responder's GID can make. Both keys of a [`Session`] are made of both GIDs and both nonces, in the order of the roles, so nothing
//! of one session, role or direction fits another.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::window::{NotInOrder, Window};
use crate::address::{Gid, WIRE_VERSION};

const MAGIC: [u8; 7] = *b"softefa";
const WELCOME_MAGIC: [u8; 6] = *b"softef";
/// Bytes of a hello.
pub const HELLO_LEN: usize = size_of::<Hello>();
/// Bytes of the answer.
pub const WELCOME_LEN: usize = size_of::<Welcome>();
/// Bytes of a seal.
pub const SEAL_LEN: usize = size_of::<Seal>();

/// Random bytes that a card uses once.
pub type Nonce = [u8; 16];
type Key = [u8; 16];
type HelloTag = [u8; 32];
/// SipHash-2-4 with 128 bits.
type Tag = [u8; 16];

/// The first message of the card that connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Hello {
    magic: [u8; 7],
    /// [`WIRE_VERSION`].
    pub version: u8,
    nonce: Nonce,
    /// GID of the card that connects, encrypted.
    from: [u8; 16],
    tag: HelloTag,
}
assert_layout!(Hello, 72, { magic @ 0, version @ 7, nonce @ 8, from @ 24, tag @ 40 });

/// The answer to a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Welcome {
    magic: [u8; 6],
    /// [`WIRE_VERSION`].
    version: u8,
    /// 0 when the card accepts the connection.
    refused: u8,
    /// The responder's nonce; in a refusal the initiator's, which shows that the refusal answers this hello.
    nonce: Nonce,
    tag: Tag,
}
assert_layout!(Welcome, 40, { magic @ 0, version @ 6, refused @ 7, nonce @ 8, tag @ 24 });

/// What proves that a packet belongs to a session, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Seal {
    /// Seals of this direction before this one.
    counter: U64,
    tag: Tag,
}
assert_layout!(Seal, 24, { counter @ 0, tag @ 8 });

/// Why two cards do not work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    #[error("the other card speaks wire version {0}, this one {WIRE_VERSION}: use the same release on both sides")]
    Version(u8),
    #[error("the other side does not speak this protocol")]
    Protocol,
    #[error("the other side did not prove that it knows the GIDs of both cards")]
    Unproven,
    #[error("the other card has another GID, or refused this card")]
    Refused,
}

/// Why a sealed packet was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadSeal {
    #[error("it is not from the card whose name it has, or was changed on its way")]
    Forged,
    #[error(transparent)]
    NotInOrder(#[from] NotInOrder),
}

fn derive(context: &str, parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// Whether two tags are equal, in constant time.
fn same(one: HelloTag, other: HelloTag) -> bool {
    blake3::Hash::from_bytes(one) == blake3::Hash::from_bytes(other)
}

/// The name under which a card of this host is found, which does not show the GID.
pub fn abstract_name(gid: &Gid) -> String {
    let hash = derive("softefa wire 3: name of a card's socket", &[&gid.to_bytes()]);
    format!("softefa/{WIRE_VERSION}/{}", blake3::Hash::from_bytes(hash).to_hex())
}

/// Encrypts or decrypts an initiator's GID, and gives the tag of the encrypted GID.
struct HelloKey([u8; 32]);

impl HelloKey {
    fn new(responder: &Gid) -> Self {
        Self(derive("softefa wire 3: hello to a card", &[&responder.to_bytes()]))
    }

    /// A nonce is used for one GID only, so each mask hides one GID.
    fn mask(&self, nonce: &Nonce, gid: [u8; 16]) -> [u8; 16] {
        let mask = blake3::keyed_hash(&self.0, &[b"mask", nonce.as_slice()].concat());
        std::array::from_fn(|at| gid[at] ^ mask.as_bytes()[at])
    }

    fn tag(&self, nonce: &Nonce, sealed: &[u8; 16]) -> HelloTag {
        blake3::keyed_hash(&self.0, &[b"tag.", nonce.as_slice(), sealed].concat()).into()
    }
}

/// The side that connects, until it is welcome.
#[derive(Clone)]
pub struct Initiator {
    own: Gid,
    peer: Gid,
    nonce: Nonce,
}

impl Initiator {
    pub fn new(own: Gid, peer: Gid, nonce: Nonce) -> Self {
        Self { own, peer, nonce }
    }

    pub fn hello(&self) -> Hello {
        let key = HelloKey::new(&self.peer);
        let from = key.mask(&self.nonce, self.own.to_bytes());
        let tag = key.tag(&self.nonce, &from);
        Hello { magic: MAGIC, version: WIRE_VERSION, nonce: self.nonce, from, tag }
    }

    /// The session, if `bytes` are the answer of the card that was called. Its first seal proves the initiator to that card.
    ///
    /// # Errors
    /// [`Disagreement::Version`] and [`Disagreement::Refused`] come from a process that got the hello. The other errors may come from any process.
    pub fn welcomed(&self, bytes: &[u8]) -> Result<Session, Disagreement> {
        let head: &[u8; 24] = bytes.first_chunk().ok_or(Disagreement::Protocol)?;
        if head[..6] != WELCOME_MAGIC {
            return Err(Disagreement::Protocol);
        }
        let answers_this = head[8..] == self.nonce;
        match (head[6], head[7]) {
            (WIRE_VERSION, 0) => {}
            (_, _) if !answers_this => return Err(Disagreement::Protocol),
            (WIRE_VERSION, _) => return Err(Disagreement::Refused),
            (version, _) => return Err(Disagreement::Version(version)),
        }
        let welcome = Welcome::read_from_bytes(bytes).map_err(|_| Disagreement::Protocol)?;
        let keys = session_keys(&self.own, &self.peer, &self.nonce, &welcome.nonce);
        let mut session = Session::new(keys.from_initiator, keys.from_responder);
        let seal = Seal { counter: 0.into(), tag: welcome.tag };
        session.open(&seal, &[]).map_err(|_| Disagreement::Unproven)?;
        Ok(session)
    }
}

/// What a good hello leads to.
pub struct Response {
    /// The card that called.
    pub peer: Gid,
    /// The answer.
    pub welcome: Welcome,
    /// The first packet that this session opens proves the initiator.
    pub session: Session,
}

/// Reads a hello to the card `own`.
///
/// # Errors
/// The hello is not for this card, or its sender does not know this card's GID.
pub fn respond(bytes: &[u8], own: &Gid, nonce: Nonce) -> Result<Response, Disagreement> {
    if bytes.len() < 8 || bytes[..7] != MAGIC {
        return Err(Disagreement::Protocol);
    }
    if bytes[7] != WIRE_VERSION {
        return Err(Disagreement::Version(bytes[7]));
    }
    let hello = Hello::read_from_bytes(bytes).map_err(|_| Disagreement::Protocol)?;
    let key = HelloKey::new(own);
    if !same(key.tag(&hello.nonce, &hello.from), hello.tag) {
        return Err(Disagreement::Unproven);
    }
    let peer = Gid::from_bytes(key.mask(&hello.nonce, hello.from)).map_err(|_| Disagreement::Protocol)?;
    if peer == *own {
        return Err(Disagreement::Refused);
    }
    let keys = session_keys(&peer, own, &hello.nonce, &nonce);
    let mut session = Session::new(keys.from_responder, keys.from_initiator);
    let tag = session.seal(&[]).tag;
    let welcome = Welcome { magic: WELCOME_MAGIC, version: WIRE_VERSION, refused: 0, nonce, tag };
    Ok(Response { peer, welcome, session })
}

/// The answer to a hello that was not accepted.
pub fn refusal(hello: &[u8]) -> Welcome {
    let nonce = hello.get(8..24).and_then(|nonce| nonce.try_into().ok()).unwrap_or_default();
    Welcome { magic: WELCOME_MAGIC, version: WIRE_VERSION, refused: 1, nonce, tag: Tag::default() }
}

struct SessionKeys {
    from_initiator: Key,
    from_responder: Key,
}

fn session_keys(initiator: &Gid, responder: &Gid, initiator_nonce: &Nonce, responder_nonce: &Nonce) -> SessionKeys {
    let parts = [&initiator.to_bytes()[..], &responder.to_bytes(), initiator_nonce, responder_nonce];
    let key = |context| {
        let [key, _]: [Key; 2] = zerocopy::transmute!(derive(context, &parts));
        key
    };
    SessionKeys {
        from_initiator: key("softefa wire 3: packets of the initiator"),
        from_responder: key("softefa wire 3: packets of the responder"),
    }
}

/// Seals the packets that one card sends to another, and opens those that it gets.
pub struct Session {
    send: Key,
    receive: Key,
    sent: u64,
    received: Window,
}

impl Session {
    fn new(send: Key, receive: Key) -> Self {
        Self { send, receive, sent: 0, received: Window::default() }
    }

    /// The seal of the next packet.
    pub fn seal(&mut self, parts: &[&[u8]]) -> Seal {
        let counter = self.sent;
        self.sent += 1;
        Seal { counter: counter.into(), tag: tag(&self.send, counter, parts) }
    }

    /// Accepts a packet of this session that did not arrive before.
    ///
    /// # Errors
    /// [`BadSeal`].
    pub fn open(&mut self, seal: &Seal, parts: &[&[u8]]) -> Result<(), BadSeal> {
        let counter = seal.counter.get();
        let difference = u128::from_le_bytes(tag(&self.receive, counter, parts)) ^ u128::from_le_bytes(seal.tag);
        if difference != 0 {
            return Err(BadSeal::Forged);
        }
        Ok(self.received.accept(counter)?)
    }
}

/// GIDs and keys are not printed.
impl std::fmt::Debug for Initiator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Initiator({} to {})", self.own, self.peer)
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({} sent)", self.sent)
    }
}

/// The tag of a packet. SipHash is made for such short messages; BLAKE3 takes three times as long for them.
fn tag(key: &Key, counter: u64, parts: &[&[u8]]) -> Tag {
    let mut hasher = SipHasher24::new_with_key(key);
    hasher.write(&counter.to_le_bytes());
    for part in parts {
        hasher.write(part);
    }
    hasher.finish128().as_bytes()
}

#[cfg(test)]
mod tests;
