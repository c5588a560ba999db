//! Registered buffers for packets.

use super::super::bindings::Bindings;
use super::super::guard::Code;
use soft_nic::card::Card;
use soft_nic::card::MAX_SEND_SIZE;
use soft_nic::card::region::{Access, Keys, Memory};
use soft_nic::location::Location;
use soft_nic::memory::Mapping;

/// Size of a buffer in bytes: a packet, on cache lines of its own.
pub(super) const BUFFER_LEN: usize = (MAX_SEND_SIZE as usize).next_multiple_of(64);

/// Buffers for one packet each.
#[derive(Debug)]
pub(super) struct Pool {
    map: Mapping,
    keys: Keys,
    free: Vec<u16>,
}

/// Registers memory of the application or the provider, without checking its pages.
pub(super) fn register(card: &Card, pd: u32, at: *mut u8, len: usize, access: Access) -> Result<Keys, Code> {
    let mut core = card.lock();
    let soft_nic::card::Core { regions, random, .. } = &mut *core;
    let memory = Memory { base: at as u64, len: len as u64, at: Location::Host(at), _map: None };
    regions.insert(pd, access, memory, random).ok_or(Code::NOMEM)
}

/// Deregisters memory.
pub(super) fn deregister(bindings: &Bindings, keys: &[Keys]) {
    if keys.is_empty() {
        return;
    }
    let mut core = bindings.card.lock();
    for keys in keys {
        drop(core.regions.remove(*keys));
    }
}

impl Pool {
    pub(super) fn new(card: &Card, pd: u32, count: u16) -> Result<Self, Code> {
        let map = Mapping::anonymous(usize::from(count) * BUFFER_LEN)?;
        let access = Access { local_write: true, ..Access::default() };
        let keys = register(card, pd, map.as_ptr(), map.len(), access)?;
        Ok(Self { map, keys, free: (0..count).rev().collect() })
    }

    pub(super) fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    pub(super) fn give(&mut self, buffer: u16) {
        self.free.push(buffer);
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn lkey(&self) -> u32 {
        self.keys.lkey
    }

    pub(super) fn keys(&self) -> Keys {
        self.keys
    }

    /// Returns the address of a buffer's first byte.
    pub(super) fn at(&self, buffer: u16) -> *mut u8 {
        debug_assert!((usize::from(buffer) + 1) * BUFFER_LEN <= self.map.len());
        self.map.as_ptr().wrapping_add(usize::from(buffer) * BUFFER_LEN)
    }

    /// Returns the first `len` bytes of a buffer, for this side to fill.
    ///
    /// # Safety
    /// The buffer was taken and is not with the card.
    pub(super) unsafe fn fill(&mut self, buffer: u16, len: usize) -> &mut [u8] {
        let len = len.min(BUFFER_LEN);
        // SAFETY: `len` bytes of the mapping; this function's caller took the buffer, so the card does not use it.
        unsafe { std::slice::from_raw_parts_mut(self.at(buffer), len) }
    }

    /// Returns the first `len` bytes of a buffer that the card has filled.
    ///
    /// # Safety
    /// The card has completed the receive, and the buffer is not posted again while the result is used.
    pub(super) unsafe fn filled<'a>(&self, buffer: u16, len: usize) -> &'a [u8] {
        let len = len.min(BUFFER_LEN);
        // SAFETY: `len` bytes of a mapping that lives as long as the endpoint. This function's caller does not post the
        // buffer while it uses the result, so the card does not write it.
        unsafe { std::slice::from_raw_parts(self.at(buffer), len) }
    }
}
