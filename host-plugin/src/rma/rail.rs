//! A rail: one card as used by a communicator, which registers memory with it.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::rail;
use ferrogin_libfabric::{Domain, Info, MemoryKind, MemoryRegion, Region, bindings};
use ferrogin_rendezvous::Secret;
use std::sync::Arc;

/// The largest write or read, even if the provider takes more. A peer must finish one within FERROGIN_TIMEOUT (see
/// [`super::waits`]), also over a slow network.
const PART_MAX: usize = 64 << 20;

/// An open card.
pub struct Rail {
    /// The card, and how to open endpoints on it.
    pub info: Info,
    /// The domain of all endpoints, regions and addresses.
    pub domain: Arc<Domain>,
}

impl Rail {
    /// Opens a card for a communicator.
    ///
    /// # Errors
    /// A libfabric call fails; the message names the call and the card.
    pub fn open(info: &Info) -> Result<Self, Error> {
        Ok(Self { info: info.clone(), domain: rail::open(info)? })
    }

    /// Returns the card's name.
    pub fn name(&self) -> String {
        self.info.domain_name()
    }

    /// Returns how many bytes one write or read can carry.
    pub fn part_max(&self) -> usize {
        self.info.max_msg_size().clamp(1, PART_MAX)
    }

    /// Returns whether an endpoint's messages and writes to a peer take effect after the writes before them.
    pub fn keeps_order(&self) -> bool {
        let both = bindings::FI_ORDER_SAW | bindings::FI_ORDER_WAW;
        self.info.msg_order() & both == both
    }

    /// Returns the address that peers use for the first byte of a region at `address`.
    pub fn remote_base(&self, address: u64) -> u64 {
        if self.info.mr_mode() & bindings::FI_MR_VIRT_ADDR != 0 { address } else { 0 }
    }

    /// Registers memory. If the provider leaves the choice of keys to its user, the key is random: with TCP any process
    /// may try to write.
    ///
    /// # Safety
    /// The conditions of [`MemoryRegion::register`].
    ///
    /// # Errors
    /// The card refuses the memory.
    pub unsafe fn register(
        &self,
        region: Region<'_>,
        kind: MemoryKind,
        access: u64,
        what: impl Into<String>,
    ) -> Result<MemoryRegion, Error> {
        let key = match self.info.mr_mode() & bindings::FI_MR_PROV_KEY {
            0 => random()? >> (64 - 8 * self.info.mr_key_size().clamp(1, 8)),
            _ => 0,
        };
        // SAFETY: the caller upholds the same conditions.
        unsafe { MemoryRegion::register_kind(&self.domain, region, access, key, kind) }.map_err(Error::fabric(format!(
            "{}, card {}",
            what.into(),
            self.name()
        )))
    }
}

/// Returns a random number that other processes can't guess.
pub fn random() -> Result<u64, Error> {
    let secret = Secret::random().map_err(|source| Error::System { call: "getrandom", source })?;
    Ok(secret.bytes().first_chunk().copied().map_or(0, u64::from_le_bytes))
}
