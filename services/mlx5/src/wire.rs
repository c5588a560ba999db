//! The formats that the card reads and writes, byte for byte.
//!
//! Raw views: any bytes are a valid value of every type here, including unknown codes; [`crate::wqe`] and [`crate::cq`]
//! have types whose values always make sense. All integers are big endian. The layouts are those of `mlx5dv.h`
//! (rdma-core 64) and of the ConnectX programmer's reference manual (PRM), chapters "Work queue" and "Completion
//! queue"; each definition names its struct.

mod codes;
mod completion;
mod flags;
mod segment;

pub use codes::{CqeFormat, CqeOpcode, Opcode, Syndrome};
pub use completion::{Cqe, ErrCqe, INITIAL_OP_OWN, INITIAL_SIGNATURE, MAX_MINIS, MINI_ARRAY, MiniCqe, OpOwn};
pub use flags::{Fence, FmCeSe, MkeyAccess, MkeyMask, UmrFlags};
pub use segment::{
    AddressVector, AtomicSeg, CtrlHead, CtrlSeg, CtrlTail, DataSeg, INLINE_FLAG, InlineHeader, KlmSeg, MkeyContext,
    RaddrSeg, SrqNextSeg, UmrCtrlSeg,
};

/// Size in bytes of a segment, the unit of a work request's `ds` field.
pub const SEGMENT: usize = 16;
/// Size in bytes of a work queue basic block (WQEBB), the unit of the send queue's index.
pub const BLOCK: usize = 64;
/// Segments per block.
pub const BLOCK_SEGMENTS: usize = BLOCK / SEGMENT;
/// The largest value of the 6-bit `ds` field.
pub const MAX_DS: usize = 63;
/// Local key of a receive descriptor that ends the list early (`MLX5_INVALID_LKEY`).
pub const INVALID_LKEY: u32 = 0x100;
/// Queue pair numbers and memory key indices have 24 bits.
pub const MAX_24_BITS: u32 = 0x00ff_ffff;
