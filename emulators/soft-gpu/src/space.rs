//! The table of ranges: which memory kernels and copies may touch, by address.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use soft_gpu_ptx::{Memory, Range};

use crate::guard::lock;
use crate::physical::Physical;
use crate::settings::MAX_DEVICES;

/// The kind of a range.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// An allocation from cuMemAlloc.
    Heap,
    /// An allocation from the memory pool with this handle.
    Pooled(usize),
    /// Another process's memory, opened by its IPC handle.
    Opened,
    /// A module's global variable. The flag is true if it is read-only.
    Variable(bool),
    /// A cuMemMap mapping.
    Mapped(Arc<Physical>),
    /// An allocation from cuMemHostAlloc, with its flags.
    HostAlloc(u32),
    /// Memory registered with cuMemHostRegister. The flag is true if it is read-only.
    Registered(bool),
}

/// A range.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) kind: Kind,
    /// The ordinal of the device that has the memory, or whose context allocated or registered it.
    pub(crate) device: usize,
    /// The handle of the context that the memory belongs to; 0 for cuMemMap mappings, which belong to none.
    pub(crate) context: usize,
    /// For cuMemMap mappings, pool memory and other processes' memory: the devices that may read and write it, a bit
    /// each.
    pub(crate) readers: u64,
    pub(crate) writers: u64,
    /// Unique within this process.
    pub(crate) id: u64,
    /// The range was passed to cuMemFreeAsync, and is released when the stream gets there.
    pub(crate) freed: bool,
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, as the program has set it.
    pub(crate) synchronous: bool,
}

impl Entry {
    pub(crate) fn new(start: u64, len: u64, kind: Kind, device: usize, context: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { start, len, kind, device, context, readers: 0, writers: 0, id, freed: false, synchronous: false }
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.len
    }

    /// True for device memory.
    pub(crate) fn on_device(&self) -> bool {
        !self.on_host()
    }

    pub(crate) fn on_host(&self) -> bool {
        match &self.kind {
            Kind::HostAlloc(_) | Kind::Registered(_) => true,
            Kind::Mapped(physical) => physical.place.is_host(),
            _ => false,
        }
    }

    /// Returns whether kernels on `device` may read the range, and whether they may write it.
    fn rights(&self, device: usize) -> (bool, bool) {
        let owned = self.device == device || peers(device) & (1 << self.device) != 0;
        match &self.kind {
            Kind::Heap => (owned, owned),
            Kind::Variable(constant) => (owned, owned && !constant),
            Kind::Mapped(_) | Kind::Opened | Kind::Pooled(_) => {
                (self.readers & (1 << device) != 0, self.writers & (1 << device) != 0)
            }
            Kind::HostAlloc(_) => (true, true),
            Kind::Registered(constant) => (true, !constant),
        }
    }
}

static RANGES: RwLock<BTreeMap<u64, Entry>> = RwLock::new(BTreeMap::new());
static GENERATION: AtomicU64 = AtomicU64::new(0);
/// The devices whose memory each device may touch besides its own, a bit each.
static PEERS: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];
/// Recently removed ranges, for error messages.
static GONE: Mutex<VecDeque<(u64, u64, &'static str)>> = Mutex::new(VecDeque::new());

fn peers(device: usize) -> u64 {
    PEERS[device].load(Ordering::Relaxed)
}

/// Allows or forbids kernels on `device` to touch `peer`'s memory. Returns whether that is a change.
pub(crate) fn set_peer(device: usize, peer: usize, allowed: bool) -> bool {
    let bit = 1 << peer;
    let before = if allowed {
        PEERS[device].fetch_or(bit, Ordering::SeqCst)
    } else {
        PEERS[device].fetch_and(!bit, Ordering::SeqCst)
    };
    changed();
    (before & bit != 0) != allowed
}

/// Makes running kernels look up their rights again.
fn changed() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
}

/// Changes the table. Running kernels see the change at their next access.
fn change<T>(act: impl FnOnce(&mut BTreeMap<u64, Entry>) -> T) -> T {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let result = act(&mut ranges);
    changed();
    result
}

fn look<T>(act: impl FnOnce(&BTreeMap<u64, Entry>) -> T) -> T {
    act(&RANGES.read().unwrap_or_else(PoisonError::into_inner))
}

fn overlaps(ranges: &BTreeMap<u64, Entry>, start: u64, len: u64) -> bool {
    let last = ranges.range(..start.saturating_add(len)).next_back();
    last.is_some_and(|(_, entry)| entry.end() > start)
}

/// Adds a range. Returns false if it overlaps an existing one.
pub(crate) fn add(entry: Entry) -> bool {
    change(|ranges| !overlaps(ranges, entry.start, entry.len) && ranges.insert(entry.start, entry).is_none())
}

/// Removes the range that starts at `start` if `wanted` is true for it.
pub(crate) fn remove(start: u64, why: &'static str, wanted: impl Fn(&Entry) -> bool) -> Option<Entry> {
    let entry = change(|ranges| if ranges.get(&start).is_some_and(wanted) { ranges.remove(&start) } else { None })?;
    let mut gone = lock(&GONE);
    if gone.len() == 256 {
        gone.pop_front();
    }
    gone.push_back((entry.start, entry.len, why));
    Some(entry)
}

/// Changes the ranges that make up exactly the `len` bytes at `start`. Returns false and changes nothing if none do or
/// one isn't `wanted`.
pub(crate) fn update(start: u64, len: u64, wanted: impl Fn(&Entry) -> bool, act: impl Fn(&mut Entry)) -> bool {
    change(|ranges| {
        let Some(whole) = whole(ranges, start, len) else { return false };
        if !whole.iter().all(|start| wanted(&ranges[start])) {
            return false;
        }
        whole.iter().filter_map(|start| ranges.get_mut(start).map(&act)).count() > 0
    })
}

/// Changes all ranges for which `wanted` is true.
pub(crate) fn update_all(wanted: impl Fn(&Entry) -> bool, act: impl Fn(&mut Entry)) {
    change(|ranges| ranges.values_mut().filter(|entry| wanted(entry)).for_each(act));
}

/// Returns the starts of the ranges that make up exactly the `len` bytes at `start`.
fn whole(ranges: &BTreeMap<u64, Entry>, start: u64, len: u64) -> Option<Vec<u64>> {
    let end = start.checked_add(len)?;
    let (mut at, mut starts) = (start, Vec::new());
    while at < end {
        let entry = ranges.get(&at)?;
        starts.push(at);
        at = entry.end();
    }
    (at == end && !starts.is_empty()).then_some(starts)
}

/// Returns the ranges that make up exactly the `len` bytes at `start`.
pub(crate) fn exactly(start: u64, len: u64) -> Option<Vec<Entry>> {
    look(|ranges| Some(whole(ranges, start, len)?.iter().map(|start| ranges[start].clone()).collect()))
}

/// Returns the range that contains `address`.
pub(crate) fn find(address: u64) -> Option<Entry> {
    look(|ranges| {
        let (_, entry) = ranges.range((Bound::Unbounded, Bound::Included(address))).next_back()?;
        (address < entry.end()).then(|| entry.clone())
    })
}

/// Returns the adjacent ranges that contain all of the bytes.
pub(crate) fn covering(address: u64, len: u64) -> Option<Vec<Entry>> {
    let end = address.checked_add(len)?;
    let (mut at, mut entries) = (address, Vec::new());
    while at < end {
        let entry = find(at)?;
        at = entry.end();
        entries.push(entry);
    }
    Some(entries)
}

/// Whether every byte is in a range for which `wanted` is true; adjacent ranges count as one.
pub(crate) fn covered(address: u64, len: u64, wanted: impl Fn(&Entry) -> bool) -> bool {
    covering(address, len).is_some_and(|entries| entries.iter().all(wanted))
}

/// Returns the allocation whose pages contain all of the bytes, with its pages as the range. Like the driver's, small
/// allocations are parts of larger blocks, and the driver knows their whole pages.
pub(crate) fn heap_around(address: u64, len: u64) -> Option<Entry> {
    let page = crate::memfd::page_size();
    let first = address / page * page;
    let (end, page_end) = (address.checked_add(len)?, first.checked_add(page)?);
    look(|ranges| {
        let in_page = ranges.range(..page_end).rev().map(|(_, entry)| entry).take_while(|entry| entry.end() > first);
        let mut blocks = in_page.filter(|entry| matches!(entry.kind, Kind::Heap)).map(|entry| {
            let start = entry.start / page * page;
            Entry { start, len: entry.end().next_multiple_of(page) - start, ..entry.clone() }
        });
        blocks.find(|block| block.start <= address && end <= block.end())
    })
}

/// Whether a copy or set on `device` may touch the bytes.
pub(crate) fn allowed(device: usize, address: u64, len: u64, write: bool) -> bool {
    covered(address, len, |entry| {
        let (readable, writable) = entry.rights(device);
        // A copy between devices that aren't peers goes through the host.
        let staged = matches!(entry.kind, Kind::Heap | Kind::Pooled(_) | Kind::Opened | Kind::Variable(false));
        staged || if write { writable } else { readable }
    })
}

/// Whether any of the bytes is in a range.
pub(crate) fn touched(address: u64, len: u64) -> bool {
    look(|ranges| overlaps(ranges, address, len))
}

/// Returns the starts of the ranges for which `wanted` is true.
pub(crate) fn starts(wanted: impl Fn(&Entry) -> bool) -> Vec<u64> {
    look(|ranges| ranges.values().filter(|entry| wanted(entry)).map(|entry| entry.start).collect())
}

/// The memory as a device's kernels see it.
pub(crate) struct View {
    pub(crate) device: usize,
}

// SAFETY: ranges are memory files and host memory that this process has mapped, and hold no Rust objects. A range that
// has left the table stays mapped until no kernel is running (`unmap_later`). Host memory is the program's: a program
// keeps it mapped while kernels use it.
unsafe impl Memory for View {
    fn backing(&self) -> Option<fn(u64) -> u64> {
        crate::memfd::hidden().then_some(crate::memfd::backing as fn(u64) -> u64)
    }

    fn generation(&self) -> &AtomicU64 {
        &GENERATION
    }

    fn range(&self, address: u64) -> Option<Range> {
        let entry = find(address)?;
        let (readable, writable) = entry.rights(self.device);
        readable.then(|| Range { start: entry.start, end: entry.end(), writable })
    }

    fn explain(&self, address: u64) -> String {
        if address < 4096 {
            return "a null pointer".to_owned();
        }
        if let Some(entry) = find(address) {
            return match entry.kind {
                Kind::Mapped(_) => "mapped memory that cuMemSetAccess has not opened to this device".to_owned(),
                Kind::Pooled(_) => {
                    format!(
                        "memory of a pool of device {} that cuMemPoolSetAccess has not opened to this device",
                        entry.device
                    )
                }
                _ => format!("memory of device {}, to which this device has no peer access", entry.device),
            };
        }
        let before = look(|ranges| ranges.range(..address).next_back().map(|(_, entry)| (entry.start, entry.end())));
        if let Some((start, end)) = before.filter(|(_, end)| address - end < crate::heap::UNIT) {
            let past = if address == end { "just".to_owned() } else { format!("{} bytes", address - end) };
            return format!("{past} past the end of {} bytes at {start:#x}", end - start);
        }
        let gone = lock(&GONE).iter().rev().find(|(start, len, _)| (*start..start + len).contains(&address)).copied();
        match gone {
            Some((start, len, why)) => format!("{why}: {len} bytes at {start:#x}"),
            None if crate::memfd::mapped(address, 1, false).unwrap_or(false) => {
                "unregistered host memory: see cuMemHostRegister".to_owned()
            }
            None => "neither device memory nor host memory".to_owned(),
        }
    }
}

/// The number of running kernels and copies, and the mappings to unmap once there are none.
static RUNNING: AtomicUsize = AtomicUsize::new(0);
static DEFERRED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Until it is dropped, delays unmapping.
pub(crate) struct Running(());

impl Running {
    pub(crate) fn begin() -> Self {
        let _ordered = lock(&DEFERRED);
        RUNNING.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut deferred = lock(&DEFERRED);
        if RUNNING.fetch_sub(1, Ordering::SeqCst) == 1 {
            deferred.drain(..).for_each(|(address, len)| crate::memfd::unmap(address, len));
        }
    }
}

/// Unmaps memory once no kernel that may have seen it is running.
pub(crate) fn unmap_later(address: usize, len: usize) {
    let mut deferred = lock(&DEFERRED);
    if RUNNING.load(Ordering::SeqCst) == 0 {
        crate::memfd::unmap(address, len);
    } else {
        deferred.push((address, len));
    }
}

/// Runs `act` if no kernel is running, and keeps kernels from starting meanwhile.
pub(crate) fn unless_running(act: impl FnOnce()) {
    let _ordered = lock(&DEFERRED);
    if RUNNING.load(Ordering::SeqCst) == 0 {
        act();
    }
}
