//! What a poll callback may do with the endpoint that polls.

use super::sending::Sending;
use super::{Peer, SendError};
use ferrogin_libfabric::Error;

/// The sending half of a [`super::MessageEndpoint`], for the callback of its poll, so that it can answer at once. Methods are
/// those of the endpoint.
pub struct Outbox<'a>(pub(super) &'a mut Sending);

/// The methods that endpoint and outbox share, on the `Sending` that `$inner` gives.
macro_rules! sending_methods {
    ($this:ident => $shared:expr, $exclusive:expr) => {
        /// Our own address, which peers give to `add_peer`.
        pub fn address(&$this) -> &[u8] {
            $shared.address()
        }

        /// Makes a peer known by its endpoint's address; a peer that is known already keeps its number.
        ///
        /// # Errors
        /// [`Error::Argument`] when there are too many peers or the address has the wrong length; what the provider answers.
        pub fn add_peer(&mut $this, address: &[u8]) -> Result<Peer, Error> {
            $exclusive.add_peer(address)
        }

        /// The address of a peer.
        pub fn peer_address(&$this, peer: Peer) -> &[u8] {
            $shared.peer_address(peer)
        }

        /// False once the peer is lost or forgotten.
        pub fn is_alive(&$this, peer: Peer) -> bool {
            $shared.is_alive(peer)
        }

        /// Messages that may be sent before [`SendError::Full`].
        pub fn free_slots(&$this) -> usize {
            $shared.free_slots()
        }

        /// Lets go of a peer: its number is never used again, and the same address, if heard of again, is a new peer.
        /// Messages to it that have not gone out are dropped.
        pub fn forget(&mut $this, peer: Peer) {
            $exclusive.forget(peer)
        }

        /// Sends a copy of header and payload.
        ///
        /// # Errors
        /// See [`SendError`]; the message is then not sent.
        pub fn send(&mut $this, peer: Peer, header: &[u8], payload: &[u8]) -> Result<(), SendError> {
            $exclusive.send(peer, header, payload)
        }

        /// Sends a copy of the header, and a payload of `len` bytes that `write` puts into the message itself: one copy
        /// less where the bytes lie in memory that cannot be a slice.
        ///
        /// # Errors
        /// See [`SendError`]; the message is then not sent, and `write` may not have been called.
        pub fn send_with(
            &mut $this,
            peer: Peer,
            header: &[u8],
            len: usize,
            write: impl FnOnce(&mut [u8]),
        ) -> Result<(), SendError> {
            $exclusive.send_with(peer, header, len, write)
        }

        /// Sends a copy of the header, and the payload from where it lies. [`super::Event::Sent`] or
        /// [`super::Event::SendFailed`] with the token, in a later poll, ends the loan.
        ///
        /// # Errors
        /// See [`SendError`]; the message is then not sent and nothing borrowed.
        ///
        /// # Safety
        /// `payload` is valid for reads of `len` bytes until one of those two events, or until the endpoint is dropped.
        /// Bytes that change meanwhile arrive as the one or the other.
        pub unsafe fn send_borrowed(
            &mut $this,
            peer: Peer,
            header: &[u8],
            payload: *const u8,
            len: usize,
            token: u64,
        ) -> Result<(), SendError> {
            // SAFETY: by the caller's promise.
            unsafe { $exclusive.send_borrowed(peer, header, payload, len, token) }
        }
    };
}
pub(super) use sending_methods;

impl Outbox<'_> {
    sending_methods!(self => self.0, self.0);

    /// Long messages can be sent and received.
    pub fn has_long(&self) -> bool {
        self.0.has_long()
    }

    /// As `send_borrowed`, of a long message, to a receiver that has posted a receive for `tag`.
    ///
    /// # Errors
    /// See [`SendError`]; the message is then not sent and nothing borrowed.
    ///
    /// # Safety
    /// As `send_borrowed`.
    pub unsafe fn send_long(
        &mut self,
        peer: Peer,
        tag: u64,
        payload: *const u8,
        len: usize,
        token: u64,
    ) -> Result<(), SendError> {
        // SAFETY: by the caller's promise.
        unsafe { self.0.send_long(peer, tag, payload, len, token) }
    }

    /// Posts a receive for the long message with exactly this tag. False when that is not possible now.
    ///
    /// # Safety
    /// `room` is valid for writes of `len` bytes, and nobody else's, until the receive is over
    /// ([`super::MessageEndpoint::take_long`]) or the endpoint is dropped.
    pub unsafe fn receive_long(&mut self, tag: u64, room: *mut u8, len: usize, token: u64) -> bool {
        // SAFETY: by the caller's promise.
        unsafe { self.0.receive_long(tag, room, len, token) }
    }

    /// Asks for a receive for a long message to end early, unless its bytes are coming in already.
    pub fn cancel_long(&self, token: u64) {
        self.0.cancel_long(token);
    }
}
