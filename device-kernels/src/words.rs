//! A work request in registers: eight words, of which a wide one only adds zeros.
//!
//! The bytes are those of `efa_dp_direct::wqe`; the tests hold the two against each other.

use ferrogin_ffi::ext::Target;

// efa_io_tx_meta_desc: ctrl1 (operation, bits 0–3; inline, bit 5; descriptor kind, bit 7) is byte 2, ctrl2 (phase, first,
// last, completion) byte 3.
const READ: u64 = 1 << 16;
const WRITE: u64 = 2 << 16;
const INLINE: u64 = 0x20 << 16;
const META: u64 = 0x80 << 16;
const FIRST_LAST_COMPLETE: u64 = 0x1c << 24;
const PHASE_SHIFT: u32 = 24;
const LENGTH_SHIFT: u32 = 48;
/// ctrl3: process for packets per second rather than for bandwidth.
const BURST: u64 = 1 << 48;
/// Only 24 bits of a local key are sent.
const LKEY_MASK: u32 = 0x00ff_ffff;

/// One RDMA write or read.
#[derive(Clone, Copy)]
pub(crate) struct Words([u64; 8]);

impl Words {
    /// A request with request id `id` to `target`, with one buffer and phase 0.
    #[inline(always)]
    pub fn rdma(read: bool, id: u16, target: Target) -> Self {
        let op = if read { READ } else { WRITE };
        let one_buffer = 1 << LENGTH_SHIFT;
        Words([
            u64::from(id) | op | META | FIRST_LAST_COMPLETE | u64::from(target.qpn) << 32 | one_buffer,
            u64::from(target.ah) << 32 | BURST,
            u64::from(target.qkey),
            0,
            0,
            0,
            0,
            0,
        ])
    }

    /// The peer's memory.
    #[inline(always)]
    pub fn set_remote(&mut self, addr: u64, rkey: u32, bytes: u32) {
        self.0[4] = u64::from(bytes) | u64::from(rkey) << 32;
        self.0[5] = addr;
    }

    /// This side's memory.
    #[inline(always)]
    pub fn set_local(&mut self, addr: u64, lkey: u32, bytes: u32) {
        self.0[6] = u64::from(bytes) | u64::from(lkey & LKEY_MASK) << 32;
        self.0[7] = addr;
    }

    /// Another address of this side's memory.
    #[inline(always)]
    pub fn set_local_addr(&mut self, addr: u64) {
        self.0[7] = addr;
    }

    /// The data itself in place of this side's memory: `bytes` ≤ 8 of `value`. For wide requests only.
    #[inline(always)]
    pub fn set_inline(&mut self, value: u64, bytes: u32) {
        self.0[0] = (self.0[0] & !(0xffff << LENGTH_SHIFT)) | INLINE | u64::from(bytes) << LENGTH_SHIFT;
        self.0[6] = value & (u64::MAX >> (64 - 8 * bytes));
        self.0[7] = 0;
    }

    /// Bit 0 of `lap` becomes the phase.
    #[inline(always)]
    pub fn set_phase(&mut self, lap: u32) {
        self.0[0] |= u64::from(lap & 1) << PHASE_SHIFT;
    }

    /// The first 64 bytes, in memory order on a little-endian machine.
    #[inline(always)]
    pub fn image(self) -> [u64; 8] {
        self.0
    }
}
