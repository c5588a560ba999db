//! How the two ends of a stream prove that they know a secret, without I/O. Until then, a stream carries nothing else.
//!
//! ```text
//! initiator                                        responder
//!   hello: nonce, encrypted identity, tag     -->
//!                                             <--   welcome: nonce, tag
//!   confirm: tag                              -->
//! ```
//!
//! The initiator knows after the welcome, and the responder after the confirm, that the other end knows the secret now.
//! Each tag covers everything before it, so nothing from one stream, role or direction works in another. If many ends
//! share a secret, the caller adds the responder's name to it; otherwise, a third process could relay one end's proof
//! to another.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What a proof is for: a seven-byte name, and the version of everything that the ends must agree on. Starts every
/// message.
pub type Domain = [u8; 8];
/// Random bytes that an end uses once.
pub type Nonce = [u8; 16];
/// What the initiator calls itself.
pub type Identity = [u8; 16];
type Tag = [u8; 32];

/// Size of the initiator's first message.
pub const HELLO_LEN: usize = size_of::<Hello>();
/// Size of the responder's answer, even if it's a refusal.
pub const WELCOME_LEN: usize = size_of::<Welcome>();
/// Size of the initiator's second message.
pub const CONFIRM_LEN: usize = size_of::<Tag>();

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Hello {
    domain: Domain,
    nonce: Nonce,
    /// Encrypted with a key derived from the secret.
    identity: Identity,
    tag: Tag,
}
ferrogin_ffi::assert_layout!(Hello, size 72, align 1, { domain @ 0, nonce @ 8, identity @ 24, tag @ 40 });

/// In a refusal, nonce and tag are zero.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Welcome {
    domain: Domain,
    nonce: Nonce,
    tag: Tag,
}
ferrogin_ffi::assert_layout!(Welcome, size 56, align 1, { domain @ 0, nonce @ 8, tag @ 24 });

/// Why one end doesn't accept the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    /// The other end has a different version of the domain.
    #[error(
        "the other side speaks version {theirs} of this protocol, this one version {own}: use the same release on both sides"
    )]
    Version {
        /// The other end's version.
        theirs: u8,
        /// This end's version.
        own: u8,
    },
    /// The bytes aren't a message of this domain.
    #[error("the other side does not speak this protocol")]
    Protocol,
    /// The message wasn't made with the secret, or was made for another stream.
    #[error("the other side did not prove that it knows the secret")]
    Unproven,
    /// The responder didn't accept the hello.
    #[error("the other side refused the connection")]
    Refused,
}

fn check(domain: &Domain, seen: &Domain) -> Result<(), ProofError> {
    let ([name @ .., own], [seen_name @ .., theirs]) = (domain, seen);
    match (name == seen_name, own == theirs) {
        (true, true) => Ok(()),
        (true, false) => Err(ProofError::Version { theirs: *theirs, own: *own }),
        (false, _) => Err(ProofError::Protocol),
    }
}

/// Compares in constant time.
fn check_tag(expected: Tag, seen: &Tag) -> Result<(), ProofError> {
    let equal = blake3::Hash::from_bytes(expected) == blake3::Hash::from_bytes(*seen);
    if equal { Ok(()) } else { Err(ProofError::Unproven) }
}

/// The key for a hello.
struct HelloKey(Tag);

impl HelloKey {
    fn new(domain: &Domain, secret: &[u8]) -> Self {
        Self(blake3::derive_key("ferrogin proof: hello", &[domain, secret].concat()))
    }

    /// Encrypts or decrypts. A nonce is used for a single identity, so each mask hides only one.
    fn mask(&self, nonce: &Nonce, identity: &Identity) -> Identity {
        let mask = blake3::keyed_hash(&self.0, &[b"mask", nonce.as_slice()].concat());
        std::array::from_fn(|at| identity[at] ^ mask.as_bytes()[at])
    }

    fn tag(&self, nonce: &Nonce, encrypted: &Identity) -> Tag {
        blake3::keyed_hash(&self.0, &[b"tag.", nonce.as_slice(), encrypted].concat()).into()
    }
}

/// Returns the tags of the welcome and the confirm. Only `secret` varies in length.
fn tags(domain: &Domain, secret: &[u8], identity: &Identity, nonces: [&Nonce; 2]) -> (Tag, Tag) {
    let all = [domain, secret, identity, nonces[0], nonces[1]].concat();
    (blake3::derive_key("ferrogin proof: welcome", &all), blake3::derive_key("ferrogin proof: confirm", &all))
}

/// The end that connects.
#[derive(Clone)]
pub struct Initiator {
    domain: Domain,
    secret: Vec<u8>,
    identity: Identity,
    nonce: Nonce,
}

impl Initiator {
    /// Creates an end that knows `secret`, and reveals `identity` only to ends that know it too.
    pub fn new(domain: Domain, secret: &[u8], identity: Identity, nonce: Nonce) -> Self {
        Self { domain, secret: secret.to_vec(), identity, nonce }
    }

    /// Returns the first message.
    pub fn hello(&self) -> [u8; HELLO_LEN] {
        let key = HelloKey::new(&self.domain, &self.secret);
        let identity = key.mask(&self.nonce, &self.identity);
        let tag = key.tag(&self.nonce, &identity);
        zerocopy::transmute!(Hello { domain: self.domain, nonce: self.nonce, identity, tag })
    }

    /// Reads the answer, and returns the confirm.
    ///
    /// # Errors
    /// [`ProofError`]. Any process can cause one with a bad answer.
    pub fn welcomed(&self, welcome: &[u8; WELCOME_LEN]) -> Result<[u8; CONFIRM_LEN], ProofError> {
        let Welcome { domain, nonce, tag } = zerocopy::transmute!(*welcome);
        check(&self.domain, &domain)?;
        if *welcome == refusal(domain) {
            return Err(ProofError::Refused);
        }
        let (expected, confirm) = tags(&self.domain, &self.secret, &self.identity, [&self.nonce, &nonce]);
        check_tag(expected, &tag)?;
        Ok(confirm)
    }
}

/// The end that accepts the connection, after a good hello.
#[derive(Clone)]
pub struct Responder {
    identity: Identity,
    confirm: Tag,
}

impl Responder {
    /// Reads a hello, and returns the responder and the welcome.
    ///
    /// # Errors
    /// [`ProofError`]; answer with a [`refusal`].
    pub fn respond(
        domain: Domain,
        secret: &[u8],
        hello: &[u8; HELLO_LEN],
        nonce: Nonce,
    ) -> Result<(Self, [u8; WELCOME_LEN]), ProofError> {
        let hello: Hello = zerocopy::transmute!(*hello);
        check(&domain, &hello.domain)?;
        let key = HelloKey::new(&domain, secret);
        check_tag(key.tag(&hello.nonce, &hello.identity), &hello.tag)?;
        let identity = key.mask(&hello.nonce, &hello.identity);
        let (tag, confirm) = tags(&domain, secret, &identity, [&hello.nonce, &nonce]);
        Ok((Self { identity, confirm }, zerocopy::transmute!(Welcome { domain, nonce, tag })))
    }

    /// Returns what the initiator calls itself. Until it's confirmed, the hello may be a replay.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Reads the confirm.
    ///
    /// # Errors
    /// [`ProofError::Unproven`]
    pub fn confirmed(&self, confirm: &[u8; CONFIRM_LEN]) -> Result<(), ProofError> {
        check_tag(self.confirm, confirm)
    }
}

/// Returns the answer to a hello that wasn't accepted. It has the responder's version.
pub fn refusal(domain: Domain) -> [u8; WELCOME_LEN] {
    zerocopy::transmute!(Welcome { domain, nonce: Nonce::default(), tag: Tag::default() })
}

/// Doesn't print secrets or identities.
impl std::fmt::Debug for Initiator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Initiator")
    }
}

impl std::fmt::Debug for Responder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Responder")
    }
}

#[cfg(test)]
mod tests;
