//! The part of the process's memory that a kernel may touch.
#![allow(unsafe_code)]

use crate::error::TrapKind;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A range of addresses in the process that a kernel may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// Whether kernels may also write to the range.
    pub writable: bool,
}

/// The memory that a kernel may touch. Addresses are the process's own.
///
/// The interpreter caches ranges and uses them until the generation changes.
///
/// # Safety
///
/// From the call that returns a range until the generation has changed and all kernels started before that have ended,
/// the backing of the range's addresses (themselves by default) is mapped, readable, writable if the range says so, and
/// not covered by Rust references.
pub unsafe trait Memory: Sync {
    /// Returns a counter that changes after every change to a range. It is the same one for the life of the memory.
    fn generation(&self) -> &AtomicU64;

    /// Returns the widest known range that contains `address`.
    fn range(&self, address: u64) -> Option<Range>;

    /// Returns a map from addresses to where this process has their bytes, if that differs: for device memory that the
    /// CPU can't touch.
    fn backing(&self) -> Option<fn(u64) -> u64> {
        None
    }

    /// Called when a kernel's `st.mmio` has reached memory. A device behind the memory may act on it before any thread
    /// continues.
    fn stored_mmio(&self, address: u64) {
        let _ = address;
    }

    /// Prints a kernel's output.
    fn print(&self, text: &str) {
        use std::io::Write;
        // The kernel continues even if nobody reads its output.
        let _ = std::io::stdout().write_all(text.as_bytes());
    }

    /// Called when all threads wait for memory to change.
    fn idle(&self) {
        std::thread::yield_now();
    }

    /// Says in an error message why a kernel may not touch `address`: "freed memory", "unregistered host memory".
    fn explain(&self, address: u64) -> String {
        let _ = address;
        "neither device memory nor memory registered with the device".into()
    }
}

/// All writable memory of this process, according to `/proc/self/maps`: for kernels whose memory the caller leaks.
pub struct Process(AtomicU64);

impl Process {
    /// Makes a view of this process's memory.
    ///
    /// # Safety
    ///
    /// While a kernel runs, memory that it touches isn't unmapped, and no Rust references cover it except references to
    /// atomics.
    pub unsafe fn new() -> Self {
        Self(AtomicU64::new(0))
    }
}

// SAFETY: the ranges are mapped and writable; the caller of `new` vouches for the rest.
unsafe impl Memory for Process {
    fn generation(&self) -> &AtomicU64 {
        &self.0
    }

    fn range(&self, address: u64) -> Option<Range> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        maps.lines().find_map(|line| {
            let (bounds, rest) = line.split_once(' ')?;
            let (start, end) = bounds.split_once('-')?;
            let start = u64::from_str_radix(start, 16).ok()?;
            let end = u64::from_str_radix(end, 16).ok()?;
            (rest.starts_with("rw") && (start..end).contains(&address)).then_some(Range { start, end, writable: true })
        })
    }
}

/// Why an access is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No range contains all of the bytes.
    Outside,
    /// The range is read-only.
    ReadOnly,
    /// The address isn't a multiple of the access's size.
    Misaligned,
}

/// Returns the 8 bytes at an address.
pub fn read(memory: &dyn Memory, address: u64) -> Option<u64> {
    View::new(memory).load(address, 64).ok()
}

/// One launch's view of the memory: the ranges it used last.
pub struct View<'m> {
    memory: &'m dyn Memory,
    changes: &'m AtomicU64,
    generation: u64,
    backing: Option<fn(u64) -> u64>,
    ranges: [Range; 8],
    last: usize,
    next: usize,
}

const NOWHERE: Range = Range { start: u64::MAX, end: 0, writable: false };

/// The atomic word at an address that `View::check` has just approved.
macro_rules! word {
    ($atomic:ty, $int:ty, $at:expr) => {
        // SAFETY: `check` found the aligned address in a range, a writable one if the access writes; by the contract of
        // `Memory` the range is mapped and no reference covers it; all of the interpreter's accesses are atomic.
        unsafe { <$atomic>::from_ptr($at as *mut $int) }
    };
}

impl<'m> View<'m> {
    pub fn new(memory: &'m dyn Memory) -> Self {
        let changes = memory.generation();
        let backing = memory.backing();
        Self {
            memory,
            changes,
            generation: changes.load(Ordering::Acquire),
            backing,
            ranges: [NOWHERE; 8],
            last: 0,
            next: 0,
        }
    }

    pub fn explain(&self, address: u64) -> String {
        self.memory.explain(address)
    }

    pub fn stored_mmio(&self, address: u64) {
        self.memory.stored_mmio(address);
    }

    pub fn idle(&self) {
        self.memory.idle();
    }

    /// Returns where this process has the bytes.
    #[inline(always)]
    fn at(&self, address: u64) -> usize {
        self.backing.map_or(address, |backing| backing(address)) as usize
    }

    /// Checks that the address is a multiple of `bytes`, a power of two, and that the bytes are in a range. Holds until
    /// the next call.
    #[inline(always)]
    fn check(&mut self, address: u64, bytes: u64, write: bool) -> Result<(), Refusal> {
        if address & (bytes - 1) != 0 {
            return Err(Refusal::Misaligned);
        }
        let range = self.ranges[self.last];
        // Aligned accesses don't wrap around.
        if self.changes.load(Ordering::Acquire) == self.generation
            && range.start <= address
            && address < range.end
            && bytes <= range.end - address
            && (range.writable || !write)
        {
            return Ok(());
        }
        self.find(address, bytes, write)
    }

    #[cold]
    fn find(&mut self, address: u64, bytes: u64, write: bool) -> Result<(), Refusal> {
        let generation = self.changes.load(Ordering::Acquire);
        if generation != self.generation {
            self.generation = generation;
            self.ranges = [NOWHERE; 8];
        }
        let around = |range: &Range| range.start <= address && address < range.end && bytes <= range.end - address;
        self.last = match self.ranges.iter().position(around) {
            Some(found) => found,
            None => {
                let range = self.memory.range(address).filter(around).ok_or(Refusal::Outside)?;
                self.next = (self.next + 1) % self.ranges.len();
                self.ranges[self.next] = range;
                self.next
            }
        };
        if write && !self.ranges[self.last].writable {
            return Err(Refusal::ReadOnly);
        }
        Ok(())
    }

    /// Prints a kernel's output.
    pub fn print(&self, text: &str) {
        self.memory.print(text);
    }

    /// Loads `width` bits: 8, 16, 32 or 64.
    #[inline(always)]
    pub fn load(&mut self, address: u64, width: u8) -> Result<u64, Refusal> {
        self.check(address, u64::from(width / 8), false)?;
        let at = self.at(address);
        let order = Ordering::Acquire;
        Ok(match width {
            8 => u64::from(word!(AtomicU8, u8, at).load(order)),
            16 => u64::from(word!(AtomicU16, u16, at).load(order)),
            32 => u64::from(word!(AtomicU32, u32, at).load(order)),
            _ => word!(AtomicU64, u64, at).load(order),
        })
    }

    /// Stores `width` bits: 8, 16, 32 or 64. A device, too, sees each call as a single store of that width.
    #[inline(always)]
    pub fn store(&mut self, address: u64, width: u8, value: u64) -> Result<(), Refusal> {
        self.check(address, u64::from(width / 8), true)?;
        let at = self.at(address);
        let order = Ordering::Release;
        match width {
            8 => word!(AtomicU8, u8, at).store(value as u8, order),
            16 => word!(AtomicU16, u16, at).store(value as u16, order),
            32 => word!(AtomicU32, u32, at).store(value as u32, order),
            _ => word!(AtomicU64, u64, at).store(value, order),
        }
        Ok(())
    }

    /// Atomically replaces 32 or 64 bits with the result of `change`. Returns the old bits.
    pub fn update(&mut self, address: u64, width: u8, change: impl Fn(u64) -> u64) -> Result<u64, Refusal> {
        self.check(address, u64::from(width / 8), true)?;
        let at = self.at(address);
        let both = (Ordering::SeqCst, Ordering::SeqCst);
        Ok(if width == 32 {
            let old = word!(AtomicU32, u32, at).fetch_update(both.0, both.1, |old| Some(change(u64::from(old)) as u32));
            u64::from(old.unwrap_or_else(|old| old))
        } else {
            let old = word!(AtomicU64, u64, at).fetch_update(both.0, both.1, |old| Some(change(old)));
            old.unwrap_or_else(|old| old)
        })
    }

    /// Checks that `[address, address + bytes)` may be read or written.
    pub fn allows(&mut self, address: u64, bytes: u64, write: bool) -> Result<(), Refusal> {
        self.check(address, bytes, write)
    }
}

impl Refusal {
    pub fn kind(self) -> TrapKind {
        if self == Self::Misaligned { TrapKind::Misaligned } else { TrapKind::Address }
    }
}
