//! Descriptors of a receive queue.

use super::macros::{bit_field, wire_struct};

bit_field! {
    /// Local key and control bits of [`RxDesc`].
    LkeyCtrl(u32);
    /// Local key.
    field LKEY, lkey, with_lkey = 0x00ff_ffff;
    /// Whether this is the receive's first descriptor.
    flag FIRST, first, with_first = 0x4000_0000;
    /// Whether this is the receive's last descriptor.
    flag LAST, last, with_last = 0x8000_0000;
}

wire_struct! {
    /// `efa_io_rx_desc`: one receive buffer.
    RxDesc, size 16, align 4;
    /// Bits 0..32 of the address.
    buf_addr_lo: u32 = 0,
    /// Bits 32..64 of the address.
    buf_addr_hi: u32 = 4,
    /// Request id, which the completion carries back.
    req_id: u16 = 8,
    /// Length in bytes.
    length: u16 = 10,
    /// Local key and control bits.
    lkey_ctrl: LkeyCtrl = 12,
}

impl RxDesc {
    /// Creates a receive of one buffer.
    #[inline(always)]
    pub const fn single(req_id: u16, addr: u64, length: u16, lkey: u32) -> Self {
        Self {
            buf_addr_lo: addr as u32,
            buf_addr_hi: (addr >> 32) as u32,
            req_id,
            length,
            lkey_ctrl: LkeyCtrl(0).with_lkey(lkey).with_first(true).with_last(true),
        }
    }

    /// Returns the address of the first byte.
    #[inline(always)]
    pub const fn addr(&self) -> u64 {
        (self.buf_addr_hi as u64) << 32 | self.buf_addr_lo as u64
    }

    /// Returns the descriptor as 64-bit words in memory order.
    #[inline(always)]
    pub const fn to_words(&self) -> [u64; 2] {
        [self.addr(), self.req_id as u64 | (self.length as u64) << 16 | (self.lkey_ctrl.0 as u64) << 32]
    }
}
