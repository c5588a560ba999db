//! Work requests of a send queue.

use super::macros::{Wire, bit_field, wire_struct};
use super::{TX_DESC_INLINE_MAX_SIZE_128, TX_DESC_NUM_BUFS, TX_DESC_NUM_RDMA_BUFS};

bit_field! {
    /// First control byte of [`TxMetaDesc`].
    Ctrl1(u8);
    /// Operation code, see [`crate::wire::SendOp`].
    field OP_TYPE, op_type, with_op_type = 0x0f;
    /// Whether `immediate_data` is valid.
    flag HAS_IMM, has_imm, with_has_imm = 0x10;
    /// Whether inline data follows in place of buffer descriptors; `length` then counts bytes.
    flag INLINE_MSG, inline_msg, with_inline_msg = 0x20;
    /// Whether an extended descriptor follows; must be zero.
    flag META_EXTENSION, meta_extension, with_meta_extension = 0x40;
    /// Whether this is a meta descriptor; must be set.
    flag META_DESC, meta_desc, with_meta_desc = 0x80;
}

bit_field! {
    /// Second control byte of [`TxMetaDesc`].
    Ctrl2(u8);
    /// Phase bit, which flips with every lap of the ring.
    flag PHASE, phase, with_phase = 0x01;
    /// Whether this is the request's first descriptor.
    flag FIRST, first, with_first = 0x04;
    /// Whether this is the request's last descriptor.
    flag LAST, last, with_last = 0x08;
    /// Whether a completion is wanted.
    flag COMP_REQ, comp_req, with_comp_req = 0x10;
}

bit_field! {
    /// Third control byte of [`TxMetaDesc`].
    Ctrl3(u8);
    /// Bits of [`crate::wire::ProcessingHint`].
    field PROCESSING_HINTS, processing_hints, with_processing_hints = 0x03;
}

bit_field! {
    /// A local key: 24 bits of a word.
    Lkey(u32);
    /// The key.
    field LKEY, lkey, with_lkey = 0x00ff_ffff;
}

wire_struct! {
    /// `efa_io_req_id_ex`: bits 16..64 of a 64-bit request id, in 16-bit words, low word first (since 1.1.0).
    ReqIdEx, size 6, align 2;
    /// The words.
    w: [u16; 3] = 0,
}

impl ReqIdEx {
    /// Returns bits 16..64 of `wr_id`.
    #[inline(always)]
    pub const fn from_wr_id(wr_id: u64) -> Self {
        Self { w: [(wr_id >> 16) as u16, (wr_id >> 32) as u16, (wr_id >> 48) as u16] }
    }

    /// Returns the whole id, given its low 16 bits.
    #[inline(always)]
    pub const fn wr_id(self, low: u16) -> u64 {
        (self.w[2] as u64) << 48 | (self.w[1] as u64) << 32 | (self.w[0] as u64) << 16 | low as u64
    }
}

wire_struct! {
    /// `efa_io_tx_meta_desc`: the first half of a work request. In 0.0.1 the last 12 bytes are reserved.
    TxMetaDesc, size 32, align 4;
    /// Bits 0..16 of the request id, which the completion carries back.
    req_id: u16 = 0,
    /// The operation and its flags.
    ctrl1: Ctrl1 = 2,
    /// Phase and place in the request.
    ctrl2: Ctrl2 = 3,
    /// The peer's queue pair number.
    dest_qp_num: u16 = 4,
    /// Number of buffers, or of bytes for inline data.
    length: u16 = 6,
    /// Immediate data, handed to the peer with the completion.
    immediate_data: u32 = 8,
    /// The peer's address handle number.
    ah: u16 = 12,
    /// Hints.
    ctrl3: Ctrl3 = 14,
    /// Must be zero.
    reserved: u8 = 15,
    /// The peer's queue key.
    qkey: u32 = 16,
    /// Must be zero.
    reserved2: [u8; 6] = 20,
    /// Bits 16..64 of the request id; zero on queues with 16-bit ids.
    req_id_ex: ReqIdEx = 26,
}

impl TxMetaDesc {
    /// Returns the descriptor as 64-bit words in memory order, built in registers. `reserved` and `reserved2` are taken
    /// as zero.
    #[inline(always)]
    pub const fn to_words(&self) -> [u64; 4] {
        [
            self.req_id as u64
                | (self.ctrl1.0 as u64) << 16
                | (self.ctrl2.0 as u64) << 24
                | (self.dest_qp_num as u64) << 32
                | (self.length as u64) << 48,
            self.immediate_data as u64 | (self.ah as u64) << 32 | (self.ctrl3.0 as u64) << 48,
            self.qkey as u64,
            self.req_id_ex.wr_id(0),
        ]
    }
}

wire_struct! {
    /// `efa_io_tx_buf_desc`: a local buffer.
    TxBufDesc, size 16, align 4;
    /// Length in bytes.
    length: u32 = 0,
    /// Local key.
    lkey: Lkey = 4,
    /// Bits 0..32 of the address.
    buf_addr_lo: u32 = 8,
    /// Bits 32..64 of the address.
    buf_addr_hi: u32 = 12,
}

impl TxBufDesc {
    /// Describes a buffer. Bits of `lkey` above 24 are dropped, as the field has no room for them.
    #[inline(always)]
    pub const fn new(addr: u64, length: u32, lkey: u32) -> Self {
        Self { length, lkey: Lkey(0).with_lkey(lkey), buf_addr_lo: addr as u32, buf_addr_hi: (addr >> 32) as u32 }
    }

    /// Returns the address of the first byte.
    #[inline(always)]
    pub const fn addr(&self) -> u64 {
        (self.buf_addr_hi as u64) << 32 | self.buf_addr_lo as u64
    }

    /// Returns the descriptor as 64-bit words in memory order.
    #[inline(always)]
    pub const fn to_words(&self) -> [u64; 2] {
        [self.length as u64 | (self.lkey.0 as u64) << 32, self.addr()]
    }
}

wire_struct! {
    /// `efa_io_remote_mem_addr`: the remote side of an RDMA operation.
    RemoteMemAddr, size 16, align 4;
    /// Length in bytes.
    length: u32 = 0,
    /// Remote key.
    rkey: u32 = 4,
    /// Bits 0..32 of the address.
    buf_addr_lo: u32 = 8,
    /// Bits 32..64 of the address.
    buf_addr_hi: u32 = 12,
}

impl RemoteMemAddr {
    /// Describes a range of remote memory.
    #[inline(always)]
    pub const fn new(addr: u64, length: u32, rkey: u32) -> Self {
        Self { length, rkey, buf_addr_lo: addr as u32, buf_addr_hi: (addr >> 32) as u32 }
    }

    /// Returns the address of the first byte.
    #[inline(always)]
    pub const fn addr(&self) -> u64 {
        (self.buf_addr_hi as u64) << 32 | self.buf_addr_lo as u64
    }

    /// Returns the descriptor as 64-bit words in memory order.
    #[inline(always)]
    pub const fn to_words(&self) -> [u64; 2] {
        [self.length as u64 | (self.rkey as u64) << 32, self.addr()]
    }
}

wire_struct! {
    /// `efa_io_rdma_req`: the body of a 64-byte RDMA request.
    RdmaReq, size 32, align 4;
    /// Remote side.
    remote_mem: RemoteMemAddr = 0,
    /// Local side.
    local_mem: [TxBufDesc; TX_DESC_NUM_RDMA_BUFS] = 16,
}

wire_struct! {
    /// `efa_io_rdma_req_128`: the body of a 128-byte RDMA request (since 1.1.0).
    RdmaReq128, size 96, align 4;
    /// Remote side.
    remote_mem: RemoteMemAddr = 0,
    /// A union: one local buffer ([`Self::local_mem`]) or inline data ([`Self::inline_data`]).
    local: [TxBufDesc; 5] = 16,
}

impl RdmaReq128 {
    /// Reads the union as a local buffer.
    #[inline(always)]
    pub const fn local_mem(&self) -> [TxBufDesc; TX_DESC_NUM_RDMA_BUFS] {
        [self.local[0]]
    }

    /// Reads the union as inline data.
    #[inline(always)]
    pub fn inline_data(&self) -> [u8; TX_DESC_INLINE_MAX_SIZE_128] {
        let mut data = [0; TX_DESC_INLINE_MAX_SIZE_128];
        self.local.emit(&mut data);
        data
    }
}

/// Returns the `N` bytes of `all` from `offset` on.
#[inline(always)]
fn part<const N: usize>(all: &[u8], offset: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&all[offset..offset + N]);
    bytes
}

wire_struct! {
    /// The union in a 64-byte request. Read it with the method that matches the operation.
    TxData, size 32, align 1;
    /// The bytes.
    bytes: [u8; 32] = 0,
}

impl TxData {
    /// Reads the union as a send's buffers.
    #[inline(always)]
    pub fn sgl(&self) -> [TxBufDesc; TX_DESC_NUM_BUFS] {
        Wire::parse(&self.bytes)
    }

    /// Reads the union as inline data.
    #[inline(always)]
    pub const fn inline_data(&self) -> &[u8; 32] {
        &self.bytes
    }

    /// Reads the union as an RDMA operation.
    #[inline(always)]
    pub fn rdma_req(&self) -> RdmaReq {
        RdmaReq::from_bytes(&self.bytes)
    }
}

wire_struct! {
    /// The union in a 128-byte request (since 1.1.0).
    TxData128, size 96, align 1;
    /// The bytes.
    bytes: [u8; 96] = 0,
}

impl TxData128 {
    /// Reads the union as a send's buffers.
    #[inline(always)]
    pub fn sgl(&self) -> [TxBufDesc; TX_DESC_NUM_BUFS] {
        Wire::parse(&self.bytes[..32])
    }

    /// Reads the union as a send's inline data.
    #[inline(always)]
    pub fn inline_data(&self) -> [u8; TX_DESC_INLINE_MAX_SIZE_128] {
        part(&self.bytes, 0)
    }

    /// Reads the union as an RDMA operation.
    #[inline(always)]
    pub fn rdma_req(&self) -> RdmaReq128 {
        RdmaReq128::from_bytes(&self.bytes)
    }
}

wire_struct! {
    /// `efa_io_tx_wqe`: a 64-byte work request. Aligned so that a GPU copies it word by word.
    TxWqe, size 64, align 8 aligned 8;
    /// The operation and the peer.
    meta: TxMetaDesc = 0,
    /// The buffers, or inline data.
    data: TxData = 32,
}

wire_struct! {
    /// `efa_io_tx_wqe_128`: a 128-byte work request (since 1.1.0).
    TxWqe128, size 128, align 8 aligned 8;
    /// The operation and the peer.
    meta: TxMetaDesc = 0,
    /// The buffers, or inline data.
    data: TxData128 = 32,
}
