//! Segments of work requests.

use super::{FmCeSe, MkeyAccess, MkeyMask, UmrFlags};
use crate::assert_layout;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Set in the length of an inline header, never in that of a data segment (`MLX5_INLINE_SEG`).
pub const INLINE_FLAG: u32 = 0x8000_0000;

/// The first segment of every work request (`mlx5_wqe_ctrl_seg`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct CtrlSeg {
    /// Operation modifier (high byte), index of the first block (16 bits), operation code (low byte).
    pub opmod_idx_opcode: U32,
    /// Queue pair number (high 24 bits) and size of the request in 16-byte units (low byte; only 6 bits count).
    pub qpn_ds: U32,
    /// Signature of the request; zero on queues without signatures.
    pub signature: u8,
    /// Stream channel of a DC initiator; zero on others.
    pub dci_stream_channel_id: U16,
    /// Fence, completion, event.
    pub fm_ce_se: FmCeSe,
    /// Immediate data, or the key to invalidate, or the old key of a window.
    pub imm: U32,
}
assert_layout!(CtrlSeg, size 16, align 1, {
    opmod_idx_opcode @ 0, qpn_ds @ 4, signature @ 8, dci_stream_channel_id @ 9, fm_ce_se @ 11, imm @ 12,
});

impl CtrlSeg {
    /// Returns a control segment of a queue pair, whose number has 24 bits.
    pub fn new(opcode: u8, index: u16, qpn: u32, ds: u8, fm_ce_se: FmCeSe, imm: u32) -> Self {
        zerocopy::transmute!(Self::words(CtrlHead::new(qpn), CtrlTail::new(fm_ce_se), opcode, index, ds, imm))
    }

    /// Returns a control segment as words in memory order, built in registers from the fixed parts of a queue pair and
    /// the variable fields.
    #[inline(always)]
    pub const fn words(head: CtrlHead, tail: CtrlTail, opcode: u8, index: u16, ds: u8, imm: u32) -> [u64; 2] {
        let first = head.0 | (index as u64) << 40 | (opcode as u64) << 32 | ds as u64;
        [first.to_be(), (tail.0 as u64 | (imm.swap_bytes() as u64) << 32).to_le()]
    }

    /// Returns `ds` of the segment that starts with this word.
    #[inline(always)]
    pub const fn ds_of(first: u64) -> u8 {
        u64::from_be(first) as u8
    }

    /// Returns the operation code.
    pub const fn opcode(&self) -> u8 {
        self.opmod_idx_opcode.get() as u8
    }

    /// Returns the operation modifier.
    pub const fn opmod(&self) -> u8 {
        (self.opmod_idx_opcode.get() >> 24) as u8
    }

    /// Returns the index of the request's first block.
    pub const fn index(&self) -> u16 {
        (self.opmod_idx_opcode.get() >> 8) as u16
    }

    /// Returns the queue pair number.
    pub const fn qpn(&self) -> u32 {
        self.qpn_ds.get() >> 8
    }

    /// Returns the size of the request in 16-byte units.
    pub const fn ds(&self) -> u8 {
        self.qpn_ds.get() as u8
    }
}

/// The queue pair's part of a control segment's first word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CtrlHead(u64);

impl CtrlHead {
    /// Returns the part for a queue pair, whose number has 24 bits.
    pub const fn new(qpn: u32) -> Self {
        Self(((qpn & super::MAX_24_BITS) as u64) << 8)
    }

    /// Returns the queue pair number.
    pub const fn qpn(self) -> u32 {
        (self.0 >> 8) as u32
    }
}

/// `fm_ce_se` at its position in a control segment's second word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CtrlTail(u32);

impl CtrlTail {
    const SHIFT: u32 = 24;

    /// Returns the word of `flags`.
    #[inline(always)]
    pub const fn new(flags: FmCeSe) -> Self {
        Self((flags.bits() as u32) << Self::SHIFT)
    }

    /// Returns the same word with additional flags.
    #[inline(always)]
    #[must_use]
    pub const fn with(self, flags: FmCeSe) -> Self {
        Self(self.0 | Self::new(flags).0)
    }
}

/// The remote side of an RDMA operation or atomic (`mlx5_wqe_raddr_seg`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RaddrSeg {
    /// Address of the first byte.
    pub raddr: U64,
    /// Remote key.
    pub rkey: U32,
    /// Zero.
    pub reserved: U32,
}
assert_layout!(RaddrSeg, size 16, align 1, { raddr @ 0, rkey @ 8, reserved @ 12 });

impl RaddrSeg {
    /// Returns a segment as words in memory order, built in registers.
    #[inline(always)]
    pub const fn words(addr: u64, rkey: u32) -> [u64; 2] {
        [addr.to_be(), ((rkey as u64) << 32).to_be()]
    }
}

/// Operands of an atomic (`mlx5_wqe_atomic_seg`). Swap precedes compare.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct AtomicSeg {
    /// The value to store if the comparison succeeds, or the value to add.
    pub swap_add: U64,
    /// The value to compare with; unused by fetch and add.
    pub compare: U64,
}
assert_layout!(AtomicSeg, size 16, align 1, { swap_add @ 0, compare @ 8 });

/// A local buffer (`mlx5_wqe_data_seg`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct DataSeg {
    /// Length in bytes; bit 31 is [`INLINE_FLAG`].
    pub byte_count: U32,
    /// Local key.
    pub lkey: U32,
    /// Address of the first byte.
    pub addr: U64,
}
assert_layout!(DataSeg, size 16, align 1, { byte_count @ 0, lkey @ 4, addr @ 8 });

impl DataSeg {
    /// Returns a segment as words in memory order, built in registers.
    #[inline(always)]
    pub const fn words(byte_count: u32, lkey: u32, addr: u64) -> [u64; 2] {
        [((byte_count as u64) << 32 | lkey as u64).to_be(), addr.to_be()]
    }
}

/// The header of inline data (`mlx5_wqe_inl_data_seg`); the bytes follow directly.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct InlineHeader {
    /// Length in bytes, with [`INLINE_FLAG`].
    pub byte_count: U32,
}
assert_layout!(InlineHeader, size 4, align 1, { byte_count @ 0 });

/// The destination of a datagram (`mlx5_wqe_av`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct AddressVector {
    /// Queue key of the peer.
    pub qkey: U32,
    /// Zero (the key is 64 bits wide for DC).
    pub reserved: U32,
    /// Queue pair number of the peer; bit 31 ([`AddressVector::EXTENDED`]) marks the 48-byte form.
    pub dqp_dct: U32,
    /// Static rate (high four bits) and service level; on Ethernet the level is shifted left by one.
    pub stat_rate_sl: u8,
    /// Source path bits.
    pub fl_mlid: u8,
    /// Destination LID, or the UDP source port of RoCE v2.
    pub rlid: U16,
    /// Zero.
    pub reserved0: [u8; 4],
    /// Destination MAC address on Ethernet.
    pub rmac: [u8; 6],
    /// Traffic class.
    pub tclass: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// GRH present (bit 30, InfiniBand only), source GID index (bits 20..28), flow label (bits 0..20).
    pub grh_gid_fl: U32,
    /// Destination GID.
    pub rgid: [u8; 16],
}
assert_layout!(AddressVector, size 48, align 1, {
    qkey @ 0, reserved @ 4, dqp_dct @ 8, stat_rate_sl @ 12, fl_mlid @ 13, rlid @ 14, reserved0 @ 16, rmac @ 20,
    tclass @ 26, hop_limit @ 27, grh_gid_fl @ 28, rgid @ 32,
});

impl AddressVector {
    /// `MLX5_EXTENDED_UD_AV`: set in [`AddressVector::dqp_dct`] of every datagram.
    pub const EXTENDED: u32 = 0x8000_0000;
    /// In [`AddressVector::grh_gid_fl`]: a global route header follows.
    pub const GRH: u32 = 1 << 30;
}

/// The control segment of a UMR (`mlx5_wqe_umr_ctrl_seg`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct UmrCtrlSeg {
    /// Flags.
    pub flags: UmrFlags,
    /// Zero.
    pub rsvd0: [u8; 3],
    /// Size of the translation entries in 16-byte units, padded to a block: 4 for one KLM, 0 for none. A UMR with a
    /// wrong value completes without an error and has no effect.
    pub klm_octowords: U16,
    /// Offset of the entries in the key's translation table.
    pub translation_offset: U16,
    /// The fields of the context that the UMR changes.
    pub mkey_mask: MkeyMask,
    /// Zero.
    pub rsvd1: [u8; 32],
}
assert_layout!(UmrCtrlSeg, size 48, align 1, {
    flags @ 0, rsvd0 @ 1, klm_octowords @ 4, translation_offset @ 6, mkey_mask @ 8, rsvd1 @ 16,
});

/// New values of a memory key (`mlx5_wqe_mkey_context_seg`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct MkeyContext {
    /// [`MkeyContext::FREE`] if the key becomes free.
    pub free: u8,
    /// Zero.
    pub reserved1: u8,
    /// Rights.
    pub access_flags: MkeyAccess,
    /// Zero.
    pub sf: u8,
    /// Queue pair that may use the key (high 24 bits; all ones: any) and the key's new tag (low byte).
    pub qpn_mkey: U32,
    /// Zero.
    pub reserved2: U32,
    /// Zero.
    pub flags_pd: U32,
    /// First address that the key covers.
    pub start_addr: U64,
    /// Length in bytes of the range that the key covers.
    pub len: U64,
    /// Zero.
    pub bsf_octword_size: U32,
    /// Zero.
    pub reserved3: [U32; 4],
    /// Zero, as rdma-core writes it, or the UMR's `klm_octowords`.
    pub translations_octword_size: U32,
    /// Zero.
    pub reserved4: [u8; 3],
    /// Zero: the entries are KLMs.
    pub log_page_size: u8,
    /// Zero.
    pub reserved: U32,
}
assert_layout!(MkeyContext, size 64, align 1, {
    free @ 0, reserved1 @ 1, access_flags @ 2, sf @ 3, qpn_mkey @ 4, reserved2 @ 8, flags_pd @ 12, start_addr @ 16,
    len @ 24, bsf_octword_size @ 32, reserved3 @ 36, translations_octword_size @ 52, reserved4 @ 56,
    log_page_size @ 59, reserved @ 60,
});

impl MkeyContext {
    /// Value of [`MkeyContext::free`] for a key that becomes free (`MLX5_WQE_MKEY_CONTEXT_FREE`).
    pub const FREE: u8 = 0x40;
    /// High 24 bits of [`MkeyContext::qpn_mkey`]: any queue pair.
    pub const ANY_QPN: u32 = 0x00ff_ffff;

    /// Returns the queue pair that may use the key.
    pub const fn qpn(&self) -> u32 {
        self.qpn_mkey.get() >> 8
    }

    /// Returns the key's new tag.
    pub const fn tag(&self) -> u8 {
        self.qpn_mkey.get() as u8
    }
}

/// One translation entry (`mlx5_wqe_umr_klm_seg`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct KlmSeg {
    /// Length in bytes, at most 2^31.
    pub byte_count: U32,
    /// Key of the region under the window.
    pub mkey: U32,
    /// Address of the first byte.
    pub address: U64,
}
assert_layout!(KlmSeg, size 16, align 1, { byte_count @ 0, mkey @ 4, address @ 8 });

/// First segment of a shared receive queue's descriptor (`mlx5_wqe_srq_next_seg`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct SrqNextSeg {
    /// Zero.
    pub rsvd0: [u8; 2],
    /// The next descriptor of the list.
    pub next_wqe_index: U16,
    /// Zero.
    pub signature: u8,
    /// Zero.
    pub rsvd1: [u8; 11],
}
assert_layout!(SrqNextSeg, size 16, align 1, { rsvd0 @ 0, next_wqe_index @ 2, signature @ 4, rsvd1 @ 5 });
