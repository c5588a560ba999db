//! A rank between `listen` and `connect`.

use super::allgather::{DOMAIN, Ring};
use super::error::RingError;
use super::handle::{ADDRESSES_MAX, Handle};
use crate::{Secret, interface, listener};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use parking_lot::Mutex;
use std::net::SocketAddr;

/// A listening rank. A ring no longer needs it after `connect`.
pub struct Listener {
    /// `None` once `connect` took it, or failed: peers that still wait for this rank are refused.
    pub(super) listening: Mutex<Option<listener::Listener>>,
    /// A ring that failed in `connect`, for neighbours that connect later.
    failed_ring: Mutex<Option<Ring>>,
    handle: [u8; HANDLE_MAXSIZE],
}

impl Listener {
    /// Listens at the addresses that NCCL's variables choose.
    ///
    /// # Errors
    /// There is no such address, or it has no free port left.
    pub fn open() -> Result<Self, RingError> {
        let addresses = interface::addresses()?;
        let any_port: Vec<_> = addresses.iter().take(ADDRESSES_MAX).map(|ip| SocketAddr::new(*ip, 0)).collect();
        let secret = Secret::random().map_err(|source| RingError::Socket { call: "getrandom", source })?;
        let (listener, addresses) = listener::Listener::bind(&any_port, DOMAIN, secret)
            .map_err(|(address, source)| RingError::Listen { address: address.ip(), source })?;
        let handle = Handle { secret, addresses }.emit();
        Ok(Self { listening: Mutex::new(Some(listener)), failed_ring: Mutex::new(None), handle })
    }

    /// Returns the handle for the other ranks.
    pub fn handle(&self) -> [u8; HANDLE_MAXSIZE] {
        self.handle
    }

    /// Keeps a failed ring until this listener is dropped, so that `connect` needn't wait for the neighbours.
    pub fn keep_failed(&self, ring: Ring) {
        *self.failed_ring.lock() = Some(ring);
    }

    /// Stops listening: peers that wait for this rank are refused.
    pub fn close(&self) {
        *self.listening.lock() = None;
    }
}
