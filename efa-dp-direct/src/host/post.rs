//! Posting with the host providers' convention.

use crate::arch;
use crate::wqe::words;

/// When a full batch is rung.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// libfabric: before the request that would exceed it.
    Libfabric,
    /// rdma-core: after the request that fills it.
    RdmaCore,
}

/// A host provider's send queue with requests of `N` words: its ring, its doorbell and its cursors.
#[derive(Debug)]
pub struct HostSq<const N: usize> {
    ring: *mut u8,
    doorbell: *mut u32,
    mask: u16,
    max_batch: u32,
    flavour: Flavour,
    pc: u16,
    phase: u32,
    unrung: u32,
}

// SAFETY: the struct owns its cursors, and the caller of `new` vouches that no other code writes ring or doorbell, so any single thread may
// use them.
unsafe impl<const N: usize> Send for HostSq<N> {}

impl<const N: usize> HostSq<N> {
    /// Creates a queue whose counter and phase stand at `pc` and `phase`; `None` if `entries` isn't a power of two up to 32768 or
    /// `max_batch` is 0.
    ///
    /// # Safety
    /// `ring` (`entries` slots of `N` words, 8-byte aligned) and `doorbell` (4-byte aligned) are valid for writes while the queue lives,
    /// and nothing else writes to them.
    pub unsafe fn new(
        ring: *mut u8,
        doorbell: *mut u32,
        entries: u32,
        max_batch: u32,
        flavour: Flavour,
        (pc, phase): (u16, u32),
    ) -> Option<Self> {
        let mask = u16::try_from(entries.checked_sub(1)?).ok()?;
        let fits = entries.is_power_of_two() && entries <= 1 << 15 && max_batch > 0;
        fits.then_some(Self { ring, doorbell, mask, max_batch, flavour, pc, phase, unrung: 0 })
    }

    /// Returns the producer count, modulo 2^16.
    pub const fn pc(&self) -> u16 {
        self.pc
    }

    /// Returns the phase of the slot at the producer count. It counts laps, and its lowest bit is written.
    pub const fn phase(&self) -> u32 {
        self.phase
    }

    /// Writes a list of requests with their laps' phases, and rings at its end, and earlier whenever a batch is full.
    pub fn post(&mut self, list: impl IntoIterator<Item = [u64; N]>) {
        for mut wqe in list {
            if self.flavour == Flavour::Libfabric && self.unrung == self.max_batch {
                self.ring_doorbell();
            }
            wqe[0] = words::with_phase(wqe[0], self.phase & 1 != 0);
            // SAFETY: the slot is inside the ring, which the caller of `new` vouches is valid and written only by this queue.
            unsafe { crate::sq::store(self.ring, u32::from(self.pc & self.mask), &wqe) };
            self.pc = self.pc.wrapping_add(1);
            if self.pc & self.mask == 0 {
                self.phase = self.phase.wrapping_add(1);
            }
            self.unrung += 1;
            if self.flavour == Flavour::RdmaCore && self.unrung == self.max_batch {
                self.ring_doorbell();
            }
        }
        if self.unrung > 0 {
            self.ring_doorbell();
        }
    }

    fn ring_doorbell(&mut self) {
        arch::fence_system();
        // SAFETY: the caller of `new` vouches that the doorbell is valid and written only by this queue.
        unsafe { arch::mmio_store_u32(self.doorbell, self.pc.into()) };
        arch::fence_system();
        self.unrung = 0;
    }
}
