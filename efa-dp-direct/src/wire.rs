//! Queue entries as the card reads and writes them: raw views that tolerate any bytes, with named bits.
//!
//! Source: `efa_io_defs.h` of efa-dp-direct 0.0.1 and 1.1.0 (the same but for the request id's upper 48 bits and the
//! 128-byte work request). Everything is little-endian, as the machines are that the card lives in.

use crate::assert_layout;

/// `efa_io_queue_type`: completions of a send queue.
pub const SEND_QUEUE: u8 = 1;
/// `efa_io_queue_type`: completions of a receive queue.
pub const RECV_QUEUE: u8 = 2;

/// `efa_io_send_op_type`. An operation that this code does not know has no value here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SendOp {
    /// Message.
    Send = 0,
    /// RDMA read.
    RdmaRead = 1,
    /// RDMA write.
    RdmaWrite = 2,
    /// Fast registration.
    FastReg = 3,
    /// Fast invalidation.
    FastInv = 4,
}

impl SendOp {
    /// The operation with this code.
    pub const fn from_raw(raw: u8) -> Option<SendOp> {
        Some(match raw {
            0 => SendOp::Send,
            1 => SendOp::RdmaRead,
            2 => SendOp::RdmaWrite,
            3 => SendOp::FastReg,
            4 => SendOp::FastInv,
            _ => return None,
        })
    }

    /// Its code.
    pub const fn raw(self) -> u8 {
        self as u8
    }
}

macro_rules! comp_status {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        /// `efa_io_comp_status`: how a request ended. A code that this code does not know has no value here.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum CompStatus {
            $(#[doc = $text] $name = $value,)*
        }

        impl CompStatus {
            /// All of them.
            pub const ALL: &[CompStatus] = &[$(CompStatus::$name,)*];

            /// The status with this code.
            pub const fn from_raw(raw: u8) -> Option<CompStatus> {
                match raw {
                    $($value => Some(CompStatus::$name),)*
                    _ => None,
                }
            }

            /// Its code.
            pub const fn raw(self) -> u8 {
                self as u8
            }

            /// One line for people.
            pub const fn text(self) -> &'static str {
                match self {
                    $(CompStatus::$name => $text,)*
                }
            }
        }
    };
}
comp_status! {
    Ok = 0, "success";
    Flushed = 1, "flushed: the queue pair was closed or failed";
    QpInternalError = 2, "local error: queue pair internal error";
    UnsupportedOp = 3, "local error: unsupported operation";
    InvalidAh = 4, "local error: invalid address handle";
    InvalidLkey = 5, "local error: invalid local key";
    BadLength = 6, "local error: bad length";
    RemoteBadAddress = 7, "remote error: bad address or key";
    RemoteAbort = 8, "remote error: aborted";
    RemoteBadDestQpn = 9, "remote error: bad destination queue pair";
    RemoteRnr = 10, "remote error: receiver not ready";
    RemoteBadLength = 11, "remote error: bad length";
    RemoteBadStatus = 12, "remote error: bad status";
    UnrespRemote = 13, "local error: the remote does not respond";
    RemoteUnknownPeer = 14, "remote error: unknown peer";
    UnreachRemote = 15, "local error: the remote cannot be reached";
    RemoteFeatureMismatch = 18, "remote error: feature mismatch";
}

/// `efa_io_tx_meta_desc`: the first half of a work request.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TxMetaDesc {
    /// Low 16 bits of the request id.
    pub req_id: u16,
    /// Operation, immediate, inline, descriptor kind.
    pub ctrl1: Ctrl1,
    /// Phase, first, last, completion.
    pub ctrl2: Ctrl2,
    /// Remote queue pair.
    pub dest_qp_num: u16,
    /// Buffers, or bytes of inline data.
    pub length: u16,
    /// Immediate data.
    pub immediate_data: u32,
    /// Address handle.
    pub ah: u16,
    /// Processing hints, bits 0–1.
    pub ctrl3: u8,
    /// Zero.
    pub reserved: u8,
    /// Remote queue key.
    pub qkey: u32,
    /// Zero.
    pub reserved2: [u8; 6],
    /// Upper 48 bits of the request id, where the queue has them; else zero.
    pub req_id_ex: [u16; 3],
}
assert_layout!(TxMetaDesc, size 32, align 4, {
    req_id @ 0, ctrl1 @ 2, ctrl2 @ 3, dest_qp_num @ 4, length @ 6, immediate_data @ 8, ah @ 12, ctrl3 @ 14,
    reserved @ 15, qkey @ 16, reserved2 @ 20, req_id_ex @ 26,
});

macro_rules! bits {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident, $set:ident: $shift:literal, $width:literal;)* }) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name(pub u8);

        impl $name {
            $(
                $(#[$fdoc])*
                #[inline(always)]
                pub const fn $field(self) -> u8 {
                    (self.0 >> $shift) & ((1 << $width) - 1)
                }

                /// The same with the field replaced.
                #[inline(always)]
                pub const fn $set(self, value: u8) -> Self {
                    let mask = ((1 << $width) - 1) << $shift;
                    $name((self.0 & !mask) | ((value << $shift) & mask))
                }
            )*
        }
    };
}
bits! {
    /// First control byte of a work request.
    Ctrl1 {
        /// `efa_io_send_op_type`.
        op_type, with_op_type: 0, 4;
        /// Immediate data is present.
        has_imm, with_has_imm: 4, 1;
        /// The data is in the request itself.
        inline_msg, with_inline_msg: 5, 1;
        /// Extended descriptor.
        meta_extension, with_meta_extension: 6, 1;
        /// This is a descriptor: always 1.
        meta_desc, with_meta_desc: 7, 1;
    }
}
bits! {
    /// Second control byte of a work request.
    Ctrl2 {
        /// Flips each lap of the ring.
        phase, with_phase: 0, 1;
        /// First descriptor of a request.
        first, with_first: 2, 1;
        /// Last descriptor of a request.
        last, with_last: 3, 1;
        /// A completion entry is wanted.
        comp_req, with_comp_req: 4, 1;
    }
}
bits! {
    /// Flags of a completion entry.
    CdescFlags {
        /// Flips each lap of the ring.
        phase, with_phase: 0, 1;
        /// `efa_io_queue_type`.
        q_type, with_q_type: 1, 2;
        /// Immediate data is present.
        has_imm, with_has_imm: 3, 1;
        /// `efa_io_send_op_type`.
        op_type, with_op_type: 4, 3;
        /// No receive was consumed.
        unsolicited, with_unsolicited: 7, 1;
    }
}

/// Processing hint in `ctrl3`: packets per second rather than bandwidth.
pub const HINT_BURST_PPS_SENSITIVE: u8 = 1;
/// Bits of a local key that a buffer descriptor carries.
pub const LKEY_MASK: u32 = 0x00ff_ffff;

/// `efa_io_tx_buf_desc`: a buffer on this side.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TxBufDesc {
    /// Bytes.
    pub length: u32,
    /// Local key in the low 24 bits.
    pub lkey: u32,
    /// Address, low half.
    pub buf_addr_lo: u32,
    /// Address, high half.
    pub buf_addr_hi: u32,
}
assert_layout!(TxBufDesc, size 16, align 4, { length @ 0, lkey @ 4, buf_addr_lo @ 8, buf_addr_hi @ 12 });

/// `efa_io_remote_mem_addr`: a buffer on the other side.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoteMemAddr {
    /// Bytes.
    pub length: u32,
    /// Remote key.
    pub rkey: u32,
    /// Address, low half.
    pub buf_addr_lo: u32,
    /// Address, high half.
    pub buf_addr_hi: u32,
}
assert_layout!(RemoteMemAddr, size 16, align 4, { length @ 0, rkey @ 4, buf_addr_lo @ 8, buf_addr_hi @ 12 });

/// `efa_io_rx_desc`: a posted receive.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RxDesc {
    /// Address, low half.
    pub buf_addr_lo: u32,
    /// Address, high half.
    pub buf_addr_hi: u32,
    /// Request id.
    pub req_id: u16,
    /// Bytes.
    pub length: u16,
    /// Local key in the low 24 bits, first (bit 30), last (bit 31).
    pub lkey_ctrl: u32,
}
assert_layout!(RxDesc, size 16, align 4, {
    buf_addr_lo @ 0, buf_addr_hi @ 4, req_id @ 8, length @ 10, lkey_ctrl @ 12,
});

/// `efa_io_cdesc_common`: what every completion entry begins with.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CdescCommon {
    /// Low 16 bits of the request id.
    pub req_id: u16,
    /// [`CompStatus`], if known.
    pub status: u8,
    /// Phase, queue, operation.
    pub flags: CdescFlags,
    /// Queue pair that the request was posted on.
    pub qp_num: u16,
}
assert_layout!(CdescCommon, size 6, align 2, { req_id @ 0, status @ 2, flags @ 3, qp_num @ 4 });

/// `efa_io_tx_cdesc` (1.1.0): completion of a send queue's request.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TxCdesc {
    /// Common part.
    pub common: CdescCommon,
    /// Upper 48 bits of the request id.
    pub req_id_ex: [u16; 3],
    /// Zero.
    pub reserved: [u8; 4],
}
assert_layout!(TxCdesc, size 16, align 2, { common @ 0, req_id_ex @ 6, reserved @ 12 });

/// `efa_io_rx_cdesc`: completion of a receive.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RxCdesc {
    /// Common part.
    pub common: CdescCommon,
    /// Bytes, low 16 bits.
    pub length: u16,
    /// Address handle of the sender, or 0xffff.
    pub ah: u16,
    /// Queue pair of the sender.
    pub src_qp_num: u16,
    /// Immediate data.
    pub imm: u32,
}
assert_layout!(RxCdesc, size 16, align 4, { common @ 0, length @ 6, ah @ 8, src_qp_num @ 10, imm @ 12 });
