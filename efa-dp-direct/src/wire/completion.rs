//! Completion queue entries.

use super::macros::{Wire, bit_field, wire_struct};
use super::send::ReqIdEx;

bit_field! {
    /// Flags of [`CdescCommon`].
    CdescFlags(u8);
    /// Phase bit, which flips with every lap of the completion queue.
    flag PHASE, phase, with_phase = 0x01;
    /// Kind of queue, see [`crate::wire::QueueType`].
    field Q_TYPE, q_type, with_q_type = 0x06;
    /// Whether there is immediate data (receive queue).
    flag HAS_IMM, has_imm, with_has_imm = 0x08;
    /// Operation code, see [`crate::wire::SendOp`].
    field OP_TYPE, op_type, with_op_type = 0x70;
    /// Whether no receive descriptor was consumed (receive queue).
    flag UNSOLICITED, unsolicited, with_unsolicited = 0x80;
}

bit_field! {
    /// The completion queue's doorbell word (`efa_regs_cq_db`).
    CqDoorbell(u32);
    /// Entries consumed, modulo 2^16.
    field CONSUMER_INDEX, consumer_index, with_consumer_index = 0x0000_ffff;
    /// Events seen, modulo 4.
    field CMD_SN, cmd_sn, with_cmd_sn = 0x6000_0000;
    /// Whether an event is wanted.
    flag ARM, arm, with_arm = 0x8000_0000;
}

wire_struct! {
    /// `efa_io_cdesc_common`: the head of every completion.
    CdescCommon, size 6, align 2;
    /// Bits 0..16 of the request id.
    req_id: u16 = 0,
    /// The status, see [`crate::wire::CompStatus`].
    status: u8 = 2,
    /// Phase, queue and operation.
    flags: CdescFlags = 3,
    /// Local queue pair number.
    qp_num: u16 = 4,
}

wire_struct! {
    /// `efa_io_tx_cdesc` of 0.0.1: completion of a send queue with 16-bit request ids.
    TxCdescV0, size 8, align 2;
    /// The head.
    common: CdescCommon = 0,
    /// Must be zero.
    reserved16: u16 = 6,
}

wire_struct! {
    /// `efa_io_tx_cdesc` of 1.1.0: completion of a send queue with 64-bit request ids.
    TxCdesc, size 16, align 2;
    /// The head.
    common: CdescCommon = 0,
    /// Bits 16..64 of the request id.
    req_id_ex: ReqIdEx = 6,
    /// Must be zero.
    reserved: [u8; 4] = 12,
}

wire_struct! {
    /// `efa_io_rx_cdesc`: completion of a receive queue.
    RxCdesc, size 16, align 4;
    /// The head.
    common: CdescCommon = 0,
    /// Bits 0..16 of the length.
    length: u16 = 6,
    /// The sender's address handle, or [`crate::wire::UNKNOWN_AH`].
    ah: u16 = 8,
    /// The sender's queue pair number.
    src_qp_num: u16 = 10,
    /// Immediate data.
    imm: u32 = 12,
}

wire_struct! {
    /// `efa_io_rx_cdesc_rdma_write`: the extra field of a write with immediate.
    RxCdescRdmaWrite, size 2, align 2;
    /// Bits 16..32 of the length.
    length_hi: u16 = 0,
}

wire_struct! {
    /// The union at the end of [`RxCdescEx`]. Read it with the method that matches the completion.
    RxExtra, size 16, align 2 aligned 2;
    /// The bytes.
    bytes: [u8; 16] = 0,
}

impl RxExtra {
    /// Reads the union as the extra field of a write with immediate.
    #[inline(always)]
    pub fn rdma_write(&self) -> RxCdescRdmaWrite {
        RxCdescRdmaWrite { length_hi: u16::from_le_bytes([self.bytes[0], self.bytes[1]]) }
    }

    /// Reads the union as the sender's GID, which is present if the address handle is unknown.
    #[inline(always)]
    pub const fn src_addr(&self) -> &[u8; 16] {
        &self.bytes
    }
}

impl From<RxCdescRdmaWrite> for RxExtra {
    fn from(value: RxCdescRdmaWrite) -> Self {
        let mut bytes = [0; 16];
        value.emit(&mut bytes[..RxCdescRdmaWrite::SIZE]);
        Self { bytes }
    }
}

wire_struct! {
    /// `efa_io_rx_cdesc_ex`: a 32-byte completion of a receive queue.
    RxCdescEx, size 32, align 4;
    /// The first half.
    base: RxCdesc = 0,
    /// A union: [`RxExtra::rdma_write`] or [`RxExtra::src_addr`].
    extra: RxExtra = 16,
}
