//! The handshake between two cards: the [proof](ferrogin_rendezvous::proof) with the responder's GID as the secret and
//! the initiator's own GID as its identity. A GID holds a 64-bit secret and never travels in the clear.

use std::io;

use ferrogin_rendezvous::proof::{self, Domain, HELLO_LEN, Initiator, ProofError, Responder, WELCOME_LEN};

use crate::address::{Gid, WIRE_VERSION};
use crate::random;

pub const DOMAIN: Domain = *b"softefa\x04";
const _: () = assert!(DOMAIN[7] == WIRE_VERSION);

/// Returns the name under which a card on this host is found. It does not reveal the GID.
pub fn abstract_name(gid: &Gid) -> String {
    let hash = blake3::derive_key("softefa wire 4: name of a card's socket", &gid.to_bytes());
    format!("softefa/{WIRE_VERSION}/{}", blake3::Hash::from_bytes(hash).to_hex())
}

/// Starts the handshake for card `own`, which connects to card `peer`.
///
/// # Errors
/// The system has no random source.
pub fn initiate(own: &Gid, peer: &Gid) -> io::Result<Initiator> {
    Ok(Initiator::new(DOMAIN, &peer.to_bytes(), own.to_bytes(), random::secret()?))
}

/// The response to a valid hello.
pub struct Response {
    /// The card that called. Its confirm proves that it is calling now.
    pub peer: Gid,
    pub responder: Responder,
    pub welcome: [u8; WELCOME_LEN],
}

/// Checks a hello to card `own`, and responds to it.
///
/// # Errors
/// The hello is not from a card of this version that knows this card's GID. The answer is then [`refusal`].
pub fn respond(own: &Gid, hello: &[u8; HELLO_LEN]) -> Result<Response, ProofError> {
    // Without a random source nobody is accepted.
    let nonce = random::secret().map_err(|_| ProofError::Refused)?;
    let (responder, welcome) = Responder::respond(DOMAIN, &own.to_bytes(), hello, nonce)?;
    let peer = Gid::from_bytes(responder.identity()).map_err(|_| ProofError::Protocol)?;
    // A card does not call itself.
    if peer == *own { Err(ProofError::Refused) } else { Ok(Response { peer, responder, welcome }) }
}

/// Returns the answer to a hello that was not accepted.
pub fn refusal() -> [u8; WELCOME_LEN] {
    proof::refusal(DOMAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(secret: u8) -> Gid {
        Gid { address: Some("127.0.0.1:9".parse().unwrap()), secret: [secret; 8] }
    }

    #[test]
    fn cards_prove_themselves_to_each_other() {
        let initiator = initiate(&gid(1), &gid(2)).unwrap();
        let Response { peer, responder, welcome } = respond(&gid(2), &initiator.hello()).unwrap();
        assert_eq!(peer, gid(1));
        let confirm = initiator.welcomed(&welcome).unwrap();
        assert_eq!(responder.confirmed(&confirm), Ok(()));
    }

    #[test]
    fn hello_without_the_gid_of_its_target_is_refused() {
        for other in [gid(1), gid(3)] {
            let hello = initiate(&gid(1), &other).unwrap().hello();
            assert_eq!(respond(&gid(2), &hello).err(), Some(ProofError::Unproven));
        }
        let own = initiate(&gid(2), &gid(2)).unwrap().hello();
        assert_eq!(respond(&gid(2), &own).err(), Some(ProofError::Refused), "a card does not call itself");
    }

    #[test]
    fn identity_that_is_not_a_gid_is_refused() {
        let hello = Initiator::new(DOMAIN, &gid(2).to_bytes(), [7; 16], [1; 16]).hello();
        assert_eq!(respond(&gid(2), &hello).err(), Some(ProofError::Protocol));
    }

    #[test]
    fn name_of_a_socket_shows_no_gid() {
        // Computed in Python, with a BLAKE3 implementation that gives the published vectors.
        let name = "softefa/4/739e40d030c734414ff7245f8e01dea6790182696bd92aab609daa313267160f";
        assert_eq!(abstract_name(&gid(2)), name);
    }
}
