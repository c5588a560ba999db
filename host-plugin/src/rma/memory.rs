//! Registered memory, numbered the same on all ranks.
#![allow(unsafe_code)]

use super::ranks::Ranks;
use crate::device::{Adds, WordMapping};
use crate::error::{DataResult, Error};
use crate::registry::{self, Kind};
use crate::trace;
use crate::window::{self, ACCESS, Source};
use ferrogin_ffi::nccl::MR_FLAG_FORCE_SO;
use ferrogin_ffi::rma::MR_FLAG_SIGNAL_NEVER_RESET;
use ferrogin_libfabric::MemoryRegion;
use ferrogin_rendezvous::ring::Step;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, OnceLock};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// This rank's registration on the wire, followed by one [`WireKey`] per rail.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireMemory {
    number: U32,
    base: U64,
    size: U64,
}

/// How peers name a registration on one rail.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireKey {
    address: U64,
    key: U64,
}
ferrogin_ffi::assert_layout!(WireMemory, size 20, align 1, { number @ 0, base @ 4, size @ 12 });
ferrogin_ffi::assert_layout!(WireKey, size 16, align 1, { address @ 0, key @ 8 });

/// One rank's memory in a registration.
#[derive(Debug, Clone)]
pub struct Peer {
    base: u64,
    size: u64,
    /// The first byte's address and the key, by rail.
    keys: Vec<(u64, u64)>,
}

impl Peer {
    fn emit(&self, number: u32) -> Vec<u8> {
        let head = WireMemory { number: number.into(), base: self.base.into(), size: self.size.into() };
        let keys = self.keys.iter().map(|(address, key)| WireKey { address: (*address).into(), key: (*key).into() });
        [head.as_bytes(), keys.collect::<Vec<_>>().as_bytes()].concat()
    }

    /// Returns its size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns whether `size` bytes at `offset` are inside.
    #[inline(always)]
    pub fn has(&self, offset: u64, size: u64) -> bool {
        size <= self.size && offset <= self.size - size
    }

    /// Returns the address of the 8-byte word at `offset`, if it is inside and aligned.
    pub fn word(&self, offset: u64) -> Option<u64> {
        self.has(offset, 8).then(|| self.base + offset).filter(|address| address.is_multiple_of(8))
    }

    /// Returns the address and key of the byte at `offset` on rail `rail`.
    pub fn remote(&self, rail: usize, offset: u64) -> (u64, u64) {
        let (address, key) = self.keys[rail];
        (address + offset, key)
    }
}

/// Memory that NCCL registered. Its regions are closed with the last reference.
pub struct Memory {
    /// The number that signals name it by.
    pub number: u32,
    /// The communicator's number in this process.
    pub comm: u64,
    /// How the CPU adds to its words.
    pub adds: Adds,
    own: Peer,
    /// All ranks' memory, from the end of the exchange on. Peers' signals may come earlier, and only use `own`.
    peers: OnceLock<Vec<Peer>>,
    /// The sums of words that this rank's card writes, by offset: the CPU can't reach these words, and NCCL promises
    /// that only this plugin writes them. A sum is `None` while a [`WordWrite`] has it.
    sums: Option<Mutex<BTreeMap<u64, Option<u64>>>>,
    _mapping: Option<WordMapping>,
    /// By rail.
    regions: Vec<MemoryRegion>,
}

impl Memory {
    /// Collective: registers `size` bytes at `data` on all rails, adds them to `registered`, and exchanges addresses
    /// and keys.
    ///
    /// # Errors
    /// The memory is not mapped; a card refuses it; another rank failed.
    pub fn register(
        ranks: &Ranks,
        registered: &Registered,
        data: *mut c_void,
        size: usize,
        source: Source,
    ) -> Result<Arc<Self>, Error> {
        // Invalid arguments fail here, before the exchange, so that they don't fail the other ranks.
        window::check(data, size, source)?;
        let memory = window::memory(&*ranks.device, data, size, source)?;
        let _span = trace::span("regMrSym", ranks.rank);
        let what = || format!("registering {size} bytes at {data:p}, which must be readable and writable");
        let register = |rail: &super::rail::Rail| {
            let (region, kind) = window::region_of(&memory, data, size);
            // SAFETY: NCCL keeps the memory allocated until deregMrSym or closeColl, and registers it for peers to read
            // and write; this library holds no reference into it.
            unsafe { rail.register(region, kind, ACCESS, what()) }
        };
        let mut added = None;
        let add = |number: u32| {
            let regions = ranks.rails.iter().map(register).collect::<Result<Vec<_>, _>>()?;
            let keys =
                |(rail, region): (&super::rail::Rail, &MemoryRegion)| (rail.remote_base(data as u64), region.key());
            let keys = ranks.rails.iter().zip(&regions).map(keys).collect();
            let own = Peer { base: data as u64, size: size as u64, keys };
            let adds = ranks.device.adds(data, size, source.ptr_type);
            let by_card = adds != Adds::Cpu && source.flags & MR_FLAG_SIGNAL_NEVER_RESET != 0;
            // Any registration may hold signal words, but NCCL marks its own, which kernels may reset.
            let is_marked = source.flags & MR_FLAG_FORCE_SO != 0 && !by_card;
            let map = || window::map_words(&*ranks.device, adds, data, size);
            let (adds, _mapping) = if is_marked { map() } else { (adds, None) };
            let (peers, sums) = (OnceLock::new(), by_card.then(Mutex::default));
            let memory = Arc::new(Self { number, comm: ranks.number, adds, own, peers, sums, _mapping, regions });
            // A peer that has the keys may signal before this rank returns.
            registered.add(memory.clone());
            added = Some(number);
            Ok(memory)
        };
        let exchanged = ranks.agree_in_order(Step::RegisterWindow, add, |number, memory| memory.own.emit(number));
        let peers = exchanged.and_then(|(memory, blocks, number)| {
            let peers = blocks.iter().enumerate().map(|(rank, block)| peer(rank, block, number, ranks.rails.len()));
            let peers = peers.collect::<Result<Vec<_>, _>>()?;
            memory.peers.get_or_init(|| peers);
            Ok(memory)
        });
        peers.inspect_err(|_| added.iter().for_each(|number| registered.remove(*number)))
    }

    /// Returns memory of rank 0 without a card, which only signals reach.
    #[cfg(test)]
    pub fn of_rank_0(number: u32, base: u64, size: u64, by_card: bool) -> Arc<Self> {
        let own = Peer { base, size, keys: Vec::new() };
        let (peers, sums) = (OnceLock::new(), by_card.then(Mutex::default));
        Arc::new(Self { number, comm: 0, adds: Adds::Cpu, own, peers, sums, _mapping: None, regions: Vec::new() })
    }

    /// Returns whether this rank's card writes the signal words, from sums in this process.
    pub fn has_sums(&self) -> bool {
        self.sums.is_some()
    }

    /// Returns this rank's memory.
    pub fn own(&self) -> &Peer {
        &self.own
    }

    /// Returns rank `rank`'s memory. The registration's handle is from after the exchange, so all ranks' memory is
    /// known.
    pub fn peer(&self, rank: usize) -> &Peer {
        self.peers.get().map_or(&self.own, |peers| &peers[rank])
    }

    /// Returns the descriptor for operations on rail `rail`, and the local address at `offset`.
    pub fn local(&self, rail: usize, offset: u64) -> (*mut c_void, *mut c_void) {
        (self.regions[rail].descriptor(), (self.own.base + offset) as *mut c_void)
    }
}

/// A write of a word by this rank's card, until dropped. Each word has only one at a time, because the card keeps no
/// order.
pub struct WordWrite {
    /// The word's memory.
    pub memory: Arc<Memory>,
    /// Its offset.
    pub offset: u64,
    /// What the word becomes.
    pub sum: u64,
}

impl WordWrite {
    /// Takes a word's sum; `None` while another write has it.
    pub fn begin(memory: &Arc<Memory>, offset: u64) -> Option<Self> {
        let mut sums = memory.sums.as_ref()?.lock();
        let sum = sums.entry(offset).or_insert(Some(0)).take()?;
        Some(Self { memory: memory.clone(), offset, sum })
    }
}

impl Drop for WordWrite {
    fn drop(&mut self) {
        if let Some(sums) = &self.memory.sums {
            sums.lock().insert(self.offset, Some(self.sum));
        }
    }
}

/// A communicator's registrations by number, for peers' signals.
#[derive(Default)]
pub struct Registered(RwLock<BTreeMap<u32, Arc<Memory>>>);

impl Registered {
    /// Adds a registration.
    pub fn add(&self, memory: Arc<Memory>) {
        self.0.write().insert(memory.number, memory);
    }

    /// Removes a registration, after waiting for any addition in progress.
    pub fn remove(&self, number: u32) {
        self.0.write().remove(&number);
    }

    /// Returns whether there is a registration with this number.
    pub fn has(&self, number: u32) -> bool {
        self.0.read().contains_key(&number)
    }

    /// Returns the registrations, which stay until the guard is dropped.
    pub fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u32, Arc<Memory>>> {
        self.0.read()
    }
}

fn peer(rank: usize, block: &[u8], number: u32, rails: usize) -> Result<Peer, Error> {
    let parsed = WireMemory::ref_from_prefix(block).ok();
    let parsed = parsed.and_then(|(head, keys)| Some((head, <[WireKey]>::ref_from_bytes(keys).ok()?)));
    let Some((head, keys)) = parsed.filter(|(head, keys)| head.number.get() == number && keys.len() == rails) else {
        return Err(Error::Usage(format!(
            "rank {rank} and this rank register different memory in the same call: all ranks must register in the \
             same order, with the same ferrogin on the same kind of machine"
        )));
    };
    let keys = keys.iter().map(|key| (key.address.get(), key.key.get())).collect();
    Ok(Peer { base: head.base.get(), size: head.size.get(), keys })
}

/// Memory that calls have named, with its handle and by the handle's place, because threads share the registry's locks.
#[derive(Default)]
pub struct Memories(Vec<Option<(usize, Arc<Memory>)>>);

impl Memories {
    /// Returns the memory with this handle, if calls have named it.
    #[inline(always)]
    pub fn get(&self, handle: usize) -> Option<&Arc<Memory>> {
        let (known, memory) = self.0.get(registry::place(handle as *const c_void))?.as_ref()?;
        (*known == handle).then_some(memory)
    }

    /// Looks up a handle of communicator `comm` that isn't known.
    ///
    /// # Errors
    /// The handle is invalid, or another communicator's.
    #[cold]
    pub fn learn(&mut self, handle: usize, comm: u64) -> DataResult<()> {
        let memory = registry::get::<Memory>(handle as *const c_void, Kind::RmaMemory).map_err(Error::from)?;
        if memory.comm != comm {
            return Err(Error::Argument("the memory handle belongs to another communicator".to_owned()).into());
        }
        let place = registry::place(handle as *const c_void);
        self.0.resize(self.0.len().max(place + 1), None);
        self.0[place] = Some((handle, memory));
        Ok(())
    }

    /// Forgets memory whose handle has been closed.
    pub fn forget(&mut self, handle: usize) {
        if self.get(handle).is_some() {
            self.0[registry::place(handle as *const c_void)] = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u32, keys: usize) -> Vec<u8> {
        let head = WireMemory { number: number.into(), base: 0x1000.into(), size: 64.into() };
        let keys: Vec<_> = (0..keys as u64).map(|n| WireKey { address: (10 * n).into(), key: n.into() }).collect();
        [head.as_bytes(), keys.as_bytes()].concat()
    }

    #[test]
    fn block_of_another_call_or_machine_is_refused() {
        let found = peer(1, &block(7, 2), 7, 2).unwrap();
        assert_eq!((found.remote(1, 4), found.base), ((14, 1), 0x1000));
        assert!(peer(1, &block(8, 2), 7, 2).is_err());
        assert!(peer(1, &block(7, 1), 7, 2).is_err());
        assert!(peer(1, &block(7, 2)[..50], 7, 2).is_err());
        assert!(peer(1, &[], 7, 0).is_err());
    }

    #[test]
    fn ranges_and_words_outside_are_refused() {
        let peer = peer(0, &block(0, 1), 0, 1).unwrap();
        assert!(peer.has(0, 64) && peer.has(64, 0));
        assert!(!peer.has(1, 64) && !peer.has(u64::MAX, 2));
        assert_eq!(peer.word(56), Some(0x1038));
        assert_eq!([peer.word(57), peer.word(64), peer.word(4), peer.word(u64::MAX)], [None; 4]);
    }
}
