//! The formats that the card reads and writes, byte for byte.
//!
//! These are raw views: any bytes are a value of every type here, including unknown codes. [`crate::wqe`] and
//! [`crate::cq`] have types that can't be illegal. All integers are little-endian. The layouts are those of
//! `efa_io_defs.h` (EFA device interface) as released in NCCL 2.31.2 (efa-dp-direct 0.0.1) and NCCL 2.32.3
//! (efa-dp-direct 1.1.0); types found only in the older release end in `V0`.

mod codes;
mod completion;
mod macros;
mod receive;
mod send;

pub use codes::{CompStatus, ProcessingHint, QueueType, SendOp, WcOpcode};
pub use completion::{
    CdescCommon, CdescFlags, CqDoorbell, RxCdesc, RxCdescEx, RxCdescRdmaWrite, RxExtra, TxCdesc, TxCdescV0,
};
pub use receive::{LkeyCtrl, RxDesc};
pub use send::{
    Ctrl1, Ctrl2, Ctrl3, Lkey, RdmaReq, RdmaReq128, RemoteMemAddr, ReqIdEx, TxBufDesc, TxData, TxData128, TxMetaDesc,
    TxWqe, TxWqe128,
};

/// Buffers that one send may gather.
pub const TX_DESC_NUM_BUFS: usize = 2;
/// Local buffers that one RDMA operation may name.
pub const TX_DESC_NUM_RDMA_BUFS: usize = 1;
/// Inline bytes that fit in a 64-byte request.
pub const TX_DESC_INLINE_MAX_SIZE: usize = 32;
/// Inline bytes that fit in a 128-byte request.
pub const TX_DESC_INLINE_MAX_SIZE_128: usize = 80;
/// Bytes of immediate data.
pub const TX_DESC_IMM_DATA_SIZE: usize = 4;
/// Address handle number in a completion if the card has no handle for the sender.
pub const UNKNOWN_AH: u16 = 0xffff;
