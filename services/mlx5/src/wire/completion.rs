//! Completions.

use super::{CqeFormat, CqeOpcode, Syndrome};
use crate::assert_layout;
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `op_own` of a slot that was never written.
pub const INITIAL_OP_OWN: u8 = 0xf1;
/// `signature` of a slot that was never written.
pub const INITIAL_SIGNATURE: u8 = 0xff;
/// Number of mini completions in the largest block of the enhanced layout.
pub const MAX_MINIS: usize = 7;
/// Number of mini completions in an array of the basic layout.
pub const MINI_ARRAY: usize = 8;

/// The last byte of a completion: operation code or number of minis, format, event and owner bits.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct OpOwn(pub u8);

impl OpOwn {
    /// Returns a regular completion's byte.
    pub const fn regular(opcode: CqeOpcode, owner: bool) -> Self {
        Self(opcode.code() << 4 | owner as u8)
    }

    /// Returns the byte of a block's title in the basic layout.
    pub const fn title(opcode: CqeOpcode, owner: bool) -> Self {
        Self(Self::regular(opcode, owner).0 | 0x0c)
    }

    /// Returns the byte of a block in the enhanced layout; `minis` from 1 to 16.
    pub const fn compressed(minis: u8) -> Self {
        Self((minis - 1) << 4 | 0x0c)
    }

    /// Returns the kind of the completion; meaningless in a block of the enhanced layout.
    #[inline(always)]
    pub const fn opcode(self) -> CqeOpcode {
        CqeOpcode::from_code(self.0 >> 4)
    }

    /// Returns the format.
    #[inline(always)]
    pub const fn format(self) -> CqeFormat {
        match self.0 >> 2 & 3 {
            0 => CqeFormat::Plain,
            1 => CqeFormat::Inline32,
            2 => CqeFormat::Inline64,
            _ => CqeFormat::Compressed,
        }
    }

    /// Returns the number of mini completions of a block: 1 to 16; at most [`MAX_MINIS`] are legal.
    #[inline(always)]
    pub const fn minis(self) -> usize {
        (self.0 >> 4) as usize + 1
    }

    /// Without compression: the owner bit, which equals the parity of the lap in a new completion.
    #[inline(always)]
    pub const fn owner(self) -> bool {
        self.0 & 1 != 0
    }
}

/// A completion (`mlx5_cqe64`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct Cqe {
    /// Zero, or the first bytes of inline data.
    pub rsvd0: [u8; 2],
    /// Index of a receive descriptor in striding queues.
    pub wqe_id: U16,
    /// Hash and checksum fields of Ethernet.
    pub rsvd4: [u8; 13],
    /// Path bits of a datagram.
    pub ml_path: u8,
    /// Hash fields of Ethernet.
    pub rsvd20: [u8; 4],
    /// Source LID of a datagram.
    pub slid: U16,
    /// Flags and the source queue pair of a datagram.
    pub flags_rqpn: U32,
    /// Header fields of Ethernet.
    pub hds_ip_ext: u8,
    /// Header fields of Ethernet.
    pub l4_hdr_type_etc: u8,
    /// Header fields of Ethernet.
    pub vlan_info: U16,
    /// Shared receive queue number, or a user's index.
    pub srqn_uidx: U32,
    /// Immediate data, or the key that was invalidated, or the partition key.
    pub imm_inval_pkey: U32,
    /// Application fields.
    pub app: u8,
    /// Application fields.
    pub app_op: u8,
    /// Application fields.
    pub app_info: U16,
    /// Number of received bytes.
    pub byte_cnt: U32,
    /// The card's clock.
    pub timestamp: U64,
    /// Operation code of the work request (high byte) and queue pair number.
    pub sop_drop_qpn: U32,
    /// Index of the completed work request.
    pub wqe_counter: U16,
    /// With compression, the low byte of the lap: the slot is valid if it matches.
    pub signature: u8,
    /// Operation code, format, owner.
    pub op_own: OpOwn,
}
assert_layout!(Cqe, size 64, align 1, {
    wqe_id @ 2, ml_path @ 17, slid @ 22, flags_rqpn @ 24, hds_ip_ext @ 28, vlan_info @ 30, srqn_uidx @ 32,
    imm_inval_pkey @ 36, app @ 40, app_info @ 42, byte_cnt @ 44, timestamp @ 48, sop_drop_qpn @ 56, wqe_counter @ 60,
    signature @ 62, op_own @ 63,
});

impl Cqe {
    /// The initial content of a slot, before the card may write to it.
    pub const INITIAL: Self = Self {
        rsvd0: [0; 2],
        wqe_id: U16::ZERO,
        rsvd4: [0; 13],
        ml_path: 0,
        rsvd20: [0; 4],
        slid: U16::ZERO,
        flags_rqpn: U32::ZERO,
        hds_ip_ext: 0,
        l4_hdr_type_etc: 0,
        vlan_info: U16::ZERO,
        srqn_uidx: U32::ZERO,
        imm_inval_pkey: U32::ZERO,
        app: 0,
        app_op: 0,
        app_info: U16::ZERO,
        byte_cnt: U32::ZERO,
        timestamp: U64::ZERO,
        sop_drop_qpn: U32::ZERO,
        wqe_counter: U16::ZERO,
        signature: INITIAL_SIGNATURE,
        op_own: OpOwn(INITIAL_OP_OWN),
    };
}

/// A completion in error (`mlx5_err_cqe`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct ErrCqe {
    /// Not defined.
    pub rsvd0: [u8; 32],
    /// Shared receive queue number.
    pub srqn: U32,
    /// Not defined.
    pub rsvd1: [u8; 18],
    /// The vendor's error code.
    pub vendor_err_synd: u8,
    /// The [`Syndrome`].
    pub syndrome: u8,
    /// Operation code of the work request (high byte) and queue pair number.
    pub s_wqe_opcode_qpn: U32,
    /// Index of the failed work request.
    pub wqe_counter: U16,
    /// As in [`Cqe`].
    pub signature: u8,
    /// As in [`Cqe`].
    pub op_own: OpOwn,
}
assert_layout!(ErrCqe, size 64, align 1, {
    srqn @ 32, vendor_err_synd @ 54, syndrome @ 55, s_wqe_opcode_qpn @ 56, wqe_counter @ 60, signature @ 62, op_own @ 63,
});

impl ErrCqe {
    /// Returns the syndrome.
    pub const fn syndrome(&self) -> Syndrome {
        Syndrome::from_code(self.syndrome)
    }
}

/// A mini completion of a block (`mlx5_mini_cqe8` of a requester).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct MiniCqe {
    /// Index of the completed work request; meaningless after a responder's title.
    pub wqe_counter: U16,
    /// Operation code of the work request; meaningless after a responder's title.
    pub s_wqe_opcode: u8,
    /// Not defined.
    pub reserved: u8,
    /// Number of received bytes.
    pub byte_cnt: U32,
}
assert_layout!(MiniCqe, size 8, align 1, { wqe_counter @ 0, s_wqe_opcode @ 2, reserved @ 3, byte_cnt @ 4 });
