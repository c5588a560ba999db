//! The part of an endpoint that callbacks of its poll may use.

use super::sending::Sending;
use super::{Peer, SendError};
use ferrogin_libfabric::Error;

/// The sending half of a [`super::MessageEndpoint`], with which a callback of its poll can answer at once. It has the methods of the endpoint.
pub struct Outbox<'a>(pub(super) &'a mut Sending);

/// The methods that endpoint and outbox share.
macro_rules! sending_methods {
    ($this:ident => $shared:expr, $exclusive:expr) => {
        /// The address of this endpoint, which peers give to `add_peer`.
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

        /// Forgets a peer: its number is not reused, and an endpoint with the same address is a new peer. Messages to it that are not
        /// sent are dropped.
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

        /// Sends a copy of the header, and a payload of `len` bytes that `write` puts into the message: one copy less for bytes in memory
        /// that cannot be a slice.
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

        /// Sends a copy of the header, and borrows the payload until a later poll reports [`super::Event::Sent`] or
        /// [`super::Event::SendFailed`] with the token.
        ///
        /// # Errors
        /// See [`SendError`]; the message is then not sent and nothing borrowed.
        ///
        /// # Safety
        /// `payload` is valid for reads of `len` bytes until one of those two events, or until the endpoint is dropped.
        /// Bytes that change meanwhile arrive with their old or new value.
        pub unsafe fn send_borrowed(
            &mut $this,
            peer: Peer,
            header: &[u8],
            payload: *const u8,
            len: usize,
            token: u64,
        ) -> Result<(), SendError> {
            // SAFETY: the caller keeps the payload valid, as this function's contract asks.
            unsafe { $exclusive.send_borrowed(peer, header, payload, len, token) }
        }
    };
}
pub(super) use sending_methods;

impl Outbox<'_> {
    sending_methods!(self => self.0, self.0);

    /// True when the provider carries long messages.
    pub fn has_long(&self) -> bool {
        self.0.has_long()
    }

    /// Sends a long message, as `send_borrowed` does, to a receiver that has posted a receive for `tag`.
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
        // SAFETY: the caller keeps the payload valid, as this function's contract asks.
        unsafe { self.0.send_long(peer, tag, payload, len, token) }
    }

    /// Posts a receive for the long message with exactly this tag. False when that is not possible now.
    ///
    /// # Safety
    /// `buffer` is valid for writes of `len` bytes, and unused by others, until the receive has ended
    /// ([`super::MessageEndpoint::take_long`]) or the endpoint is dropped.
    pub unsafe fn receive_long(&mut self, tag: u64, buffer: *mut u8, len: usize, token: u64) -> bool {
        // SAFETY: the caller keeps the buffer valid and unused, as this function's contract asks.
        unsafe { self.0.receive_long(tag, buffer, len, token) }
    }

    /// Cancels a receive for a long message, unless its bytes have begun to arrive.
    pub fn cancel_long(&self, token: u64) {
        self.0.cancel_long(token);
    }
}
