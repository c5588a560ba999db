//! Registered memory: the addresses that a key covers, and the rights to them.

use crate::location::Location;
use crate::memory::Mapping;
use crate::random::Random;

/// The rights to a region. Reading it as the source of a request is always allowed, as on hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// RDMA reads and receives may place data in it.
    pub local_write: bool,
    /// Peers may read it.
    pub remote_read: bool,
    /// Peers may write it.
    pub remote_write: bool,
}

/// The memory of a region, and its addresses in requests.
#[derive(Debug)]
pub struct Memory {
    /// Address of the first byte, as requests name it.
    pub base: u64,
    /// Length in bytes.
    pub len: u64,
    /// Location of the first byte.
    pub at: Location,
    /// The card's own mapping of a dma-buf.
    pub _map: Option<Mapping>,
}

/// One registration.
#[derive(Debug)]
pub struct Region {
    /// Protection domain. Queue pairs of other domains cannot use the region.
    pub pd: u32,
    /// Access rights.
    pub access: Access,
    /// The memory.
    pub memory: Memory,
    lkey: u32,
    rkey: u32,
}

/// Why a key does not give access to an address range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// No region has this key.
    #[error("no region has this key")]
    Key,
    /// The region belongs to another protection domain.
    #[error("the region belongs to another protection domain")]
    Domain,
    /// The region lacks the right.
    #[error("the region was not registered for this")]
    Rights,
    /// The range leaves the region.
    #[error("the range is not within the region")]
    Bounds,
}

/// A key pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys {
    /// 24 bits.
    pub lkey: u32,
    /// 32 bits.
    pub rkey: u32,
}

const INDEX_BITS: u32 = 16;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;

/// All of a card's regions. A key holds its entry's index, and bits that differ from those of the entry's previous key.
#[derive(Debug)]
pub struct Regions {
    entries: Vec<Option<Region>>,
    free: Vec<u32>,
    generation: u8,
}

impl Default for Regions {
    fn default() -> Self {
        // Index 0 stays empty, so that no key is 0.
        Self { entries: vec![None], free: Vec::new(), generation: 0 }
    }
}

impl Regions {
    /// Registers memory; `None` if the card has no keys left.
    pub fn insert(&mut self, pd: u32, access: Access, memory: Memory, random: &mut Random) -> Option<Keys> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.entries.len() <= INDEX_MASK as usize => {
                self.entries.push(None);
                self.entries.len() as u32 - 1
            }
            None => return None,
        };
        self.generation = self.generation.wrapping_add(1);
        let lkey = u32::from(self.generation) << INDEX_BITS | index;
        let rkey = random.next_u32() << INDEX_BITS | index;
        self.entries[index as usize] = Some(Region { pd, access, memory, lkey, rkey });
        Some(Keys { lkey, rkey })
    }

    /// Removes a region and returns its memory, which the caller unmaps.
    pub fn remove(&mut self, keys: Keys) -> Option<Memory> {
        let index = keys.lkey & INDEX_MASK;
        let entry = self.entries.get_mut(index as usize)?;
        let region = entry.take_if(|region| region.lkey == keys.lkey)?;
        self.free.push(index);
        Some(region.memory)
    }

    fn find(&self, key: u32) -> Option<&Region> {
        self.entries.get((key & INDEX_MASK) as usize)?.as_ref()
    }

    /// Returns the location of the `len` bytes at `addr` that a request in `pd` names with `lkey`.
    ///
    /// # Errors
    /// The key does not grant the access.
    pub fn local(&self, pd: u32, lkey: u32, addr: u64, len: u32, write: bool) -> Result<Location, AccessError> {
        let region = self.find(lkey).filter(|r| r.lkey == lkey).ok_or(AccessError::Key)?;
        region.check(pd, addr, len, !write || region.access.local_write)
    }

    /// Returns the location of the `len` bytes at `addr` that a peer names with `rkey`, for a queue pair in `pd`.
    ///
    /// # Errors
    /// The key does not grant the access.
    pub fn remote(&self, pd: u32, rkey: u32, addr: u64, len: u32, write: bool) -> Result<Location, AccessError> {
        let region = self.find(rkey).filter(|r| r.rkey == rkey).ok_or(AccessError::Key)?;
        region.check(pd, addr, len, if write { region.access.remote_write } else { region.access.remote_read })
    }
}

impl Region {
    fn check(&self, pd: u32, addr: u64, len: u32, allowed: bool) -> Result<Location, AccessError> {
        if self.pd != pd {
            return Err(AccessError::Domain);
        }
        if !allowed {
            return Err(AccessError::Rights);
        }
        let offset = addr.checked_sub(self.memory.base).ok_or(AccessError::Bounds)?;
        match offset.checked_add(u64::from(len)) {
            Some(end) if end <= self.memory.len => Ok(self.memory.at.after(offset)),
            _ => Err(AccessError::Bounds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Access = Access { local_write: true, remote_read: true, remote_write: true };

    fn memory(base: u64, len: u64) -> Memory {
        Memory { base, len, at: Location::Host(base as *mut u8), _map: None }
    }

    #[test]
    fn key_only_gives_access_to_its_region() {
        let (mut regions, mut random) = (Regions::default(), Random::seeded(1));
        let keys = regions.insert(1, ALL, memory(0x1000, 100), &mut random).unwrap();
        assert!(keys.lkey < 1 << 24 && keys.lkey != 0 && keys.rkey != 0);
        let found = |at: usize| Ok(Location::Host(at as *mut u8));
        assert_eq!(regions.local(1, keys.lkey, 0x1010, 84, true), found(0x1010));
        assert_eq!(regions.remote(1, keys.rkey, 0x1064, 0, true), found(0x1064), "empty, at the end");
        assert_eq!(regions.local(1, keys.lkey, 0x1010, 85, false), Err(AccessError::Bounds));
        assert_eq!(regions.local(1, keys.lkey, 0xfff, 1, false), Err(AccessError::Bounds));
        assert_eq!(regions.remote(1, keys.rkey, 0x1065, 0, true), Err(AccessError::Bounds));
        assert_eq!(regions.remote(1, keys.rkey, u64::MAX, u32::MAX, true), Err(AccessError::Bounds));
        let wraps = u64::MAX - 0xf;
        assert_eq!(
            regions.remote(1, keys.rkey, wraps, 0x1020, true),
            Err(AccessError::Bounds),
            "around into the region"
        );
        assert_eq!(regions.local(2, keys.lkey, 0x1000, 1, false), Err(AccessError::Domain));
        assert_eq!(regions.local(1, keys.lkey ^ 1 << 16, 0x1000, 1, false), Err(AccessError::Key));
        assert_eq!(regions.remote(1, keys.rkey ^ 1 << 31, 0x1000, 1, false), Err(AccessError::Key));
        assert_eq!(regions.remote(1, 0, 0x1000, 1, false), Err(AccessError::Key));
        assert!(regions.remove(keys).is_some());
        assert!(regions.remove(keys).is_none());
        assert_eq!(regions.local(1, keys.lkey, 0x1000, 1, false), Err(AccessError::Key));
        let next = regions.insert(1, ALL, memory(0x1000, 100), &mut random).unwrap();
        assert_ne!(next.lkey, keys.lkey, "a stale key gives no access to the next region");
    }

    #[test]
    fn each_right_is_checked() {
        let (mut regions, mut random) = (Regions::default(), Random::seeded(2));
        for (access, lw, rr, rw) in [
            (Access::default(), false, false, false),
            (Access { local_write: true, ..Access::default() }, true, false, false),
            (Access { remote_read: true, ..Access::default() }, false, true, false),
            (Access { remote_write: true, ..Access::default() }, false, false, true),
        ] {
            let keys = regions.insert(1, access, memory(0x1000, 8), &mut random).unwrap();
            assert!(regions.local(1, keys.lkey, 0x1000, 8, false).is_ok());
            assert_eq!(regions.local(1, keys.lkey, 0x1000, 8, true).is_ok(), lw);
            assert_eq!(regions.remote(1, keys.rkey, 0x1000, 8, false).is_ok(), rr);
            assert_eq!(regions.remote(1, keys.rkey, 0x1000, 8, true).is_ok(), rw);
        }
    }
}
