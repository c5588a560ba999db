//! The host providers' convention (rdma-core, libfabric), where it differs from the device API.
//!
//! * [`HostSq`]: lists of requests, with one 16-bit doorbell at the end of each list;
//! * [`cq_doorbell`]: the completion queue's doorbell word;
//! * [`max_sq_depth`] and [`SqReport`]: a queue's maximum depth, and the limits that a created queue reports
//!   (`efadv_get_max_sq_depth`, `efadv_query_qp_wqs`).

#![allow(unsafe_code)]

use crate::arch;
use crate::queue::WQ_CAPS_64_BIT_REQ_ID;
use crate::wire::CqDoorbell;
use crate::wqe::{WqeSize, words};

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

// SAFETY: the struct owns its cursors, and the caller of `new` vouches that no other code writes ring or doorbell, so
// any single thread may use them.
unsafe impl<const N: usize> Send for HostSq<N> {}

impl<const N: usize> HostSq<N> {
    /// Creates a queue whose counter and phase stand at `pc` and `phase`; `None` if `entries` isn't a power of two up
    /// to 32768 or `max_batch` is 0.
    ///
    /// # Safety
    /// `ring` (`entries` slots of `N` words, 8-byte aligned) and `doorbell` (4-byte aligned) are valid for writes while
    /// the queue lives, and nothing else writes to them.
    pub unsafe fn new(
        ring: *mut u8,
        doorbell: *mut u32,
        entries: u32,
        max_batch: u32,
        flavour: Flavour,
        pc: u16,
        phase: u32,
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
            // SAFETY: the slot is inside the ring, which the caller of `new` vouches is valid and written only by this
            // queue.
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

/// Returns the completion queue doorbell's word (`efa_io_regs_defs.h`, `EFA_REGS_CQ_DB`), which tells the card the
/// host's consumer count and whether it wants an event for the next entry.
///
/// `cmd_sn` counts the events that the host has seen; only two bits of it are sent.
pub const fn cq_doorbell(consumer_counter: u16, cmd_sn: u32, arm: bool) -> u32 {
    CqDoorbell(0).with_consumer_index(consumer_counter as u32).with_cmd_sn(cmd_sn).with_arm(arm).0
}

/// More inline data than a request can carry: this many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InlineTooLong(pub u32);

impl InlineTooLong {
    /// Returns the negative errno that the host provider returns.
    pub const fn errno(self) -> i32 {
        -22
    }
}

impl core::fmt::Display for InlineTooLong {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} inline bytes: a request carries at most {}", self.0, WqeSize::Wide.max_inline())
    }
}

impl core::error::Error for InlineTooLong {}

/// Returns the size of a queue's requests: wide if they carry more inline data than narrow ones can, or any in a write.
///
/// # Errors
/// More inline data than wide requests can carry.
pub const fn wqe_size(max_inline_data: u32, inline_write: bool) -> Result<WqeSize, InlineTooLong> {
    if max_inline_data as usize > WqeSize::Wide.max_inline() {
        Err(InlineTooLong(max_inline_data))
    } else if inline_write || max_inline_data as usize > WqeSize::Narrow.max_inline() {
        Ok(WqeSize::Wide)
    } else {
        Ok(WqeSize::Narrow)
    }
}

/// Returns a send queue's maximum depth if the card has `max_llq_size` bytes for it: a power of two, or 0.
///
/// # Errors
/// As [`wqe_size`].
pub const fn max_sq_depth(max_llq_size: u32, max_inline_data: u32, inline_write: bool) -> Result<u32, InlineTooLong> {
    match wqe_size(max_inline_data, inline_write) {
        Ok(size) => match (max_llq_size / size.bytes() as u32).checked_ilog2() {
            Some(log) => Ok(1 << log),
            None => Ok(0),
        },
        Err(error) => Err(error),
    }
}

/// A card's limits for its send queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CardLimits {
    /// Units of 64 bytes that may be written but not yet rung; 0 means any number.
    pub max_tx_batch: u16,
    /// Minimum depth of a send queue; if not 0, it also means that a batch must not fill the queue.
    pub min_sq_wr: u16,
}

/// The limits that a created send queue reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SqReport {
    /// Size of the requests.
    pub wqe_size: WqeSize,
    /// Depth.
    pub num_entries: u32,
    /// Requests that may be written but not yet rung.
    pub max_batch: u32,
    /// Capabilities; request ids are always 64-bit.
    pub caps: u32,
}

impl SqReport {
    /// Returns the queue created for `max_send_wr` requests with that much inline data.
    ///
    /// A batch limit below one wide request becomes 0, as in the host provider: such a queue can't post.
    ///
    /// # Errors
    /// As [`wqe_size`].
    pub fn new(
        card: CardLimits,
        max_send_wr: u16,
        max_inline_data: u32,
        inline_write: bool,
    ) -> Result<Self, InlineTooLong> {
        const UNIT: u32 = WqeSize::Narrow.bytes() as u32;
        let wqe_size = wqe_size(max_inline_data, inline_write)?;
        let num_entries = u32::from(max_send_wr.max(card.min_sq_wr)).next_power_of_two();
        let by_card = match card.max_tx_batch {
            0 => u32::from(u16::MAX),
            units => u32::from(units) * UNIT / wqe_size.bytes() as u32,
        };
        let max_batch = if card.min_sq_wr == 0 { by_card } else { by_card.min(num_entries - 1) };
        Ok(Self { wqe_size, num_entries, max_batch, caps: WQ_CAPS_64_BIT_REQ_ID })
    }
}
