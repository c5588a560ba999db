//! Firmware commands (DEVX) through libmlx5's own calls: what a card says about compressed completion queues.

use super::ffi::{self, Ptr};
use super::library::{Api, check_pointer, check_status};
use crate::assert_layout;
use crate::device::DeviceError;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// QUERY_HCA_CAP, for the current values of the general capabilities.
const QUERY_HCA_CAP: u16 = 0x100;
const GENERAL_CURRENT: u16 = 1;

/// `query_hca_cap_in`.
#[repr(C)]
#[derive(IntoBytes, Immutable, Unaligned)]
struct QueryIn {
    opcode: U16,
    uid: U16,
    reserved: U16,
    op_mod: U16,
    reserved8: [u8; 8],
}
assert_layout!(QueryIn, size 16, align 1, { opcode @ 0, uid @ 2, op_mod @ 6, reserved8 @ 8 });

/// `query_hca_cap_out` with `cmd_hca_cap`; the fields that this crate reads.
#[repr(C)]
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
struct QueryOut {
    status: u8,
    reserved1: [u8; 3],
    syndrome: U32,
    reserved8: [u8; 8],
    before: [u8; 0xb4],
    /// The word at bit 0x5a0: the last 16 bits are about compression.
    compression: CompressionWord,
    /// `cqe_compression_timeout` and `cqe_compression_max_num`.
    timeout: U16,
    max_num: U16,
    after: [u8; 4096 - 0xbc],
}
assert_layout!(QueryOut, size 4112, align 1, { syndrome @ 4, before @ 16, compression @ 196, timeout @ 200, max_num @ 202, after @ 204 });

/// Bits 0x5a0 to 0x5bf of `cmd_hca_cap`.
#[repr(transparent)]
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
struct CompressionWord(U32);

impl CompressionWord {
    const fn has(self, bit: u32) -> bool {
        self.0.get() >> (0x5bf - bit) & 1 != 0
    }
}

/// What a card's firmware says about compressed completion queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirmwareCompression {
    /// Completions of 64 bytes can be compressed.
    pub bytes_64: bool,
    /// Completions of 128 bytes can be compressed.
    pub bytes_128: bool,
    /// Number of completions in the largest block.
    pub max_num: u16,
    /// Bit 0x5b0, which the kernel driver calls `enhanced_cqe_compression`.
    pub enhanced_by_kernel: bool,
    /// Bit 0x5bb, which UCX and DPDK call `enhanced_cqe_compression`.
    pub enhanced_by_ucx: bool,
}

impl From<&QueryOut> for FirmwareCompression {
    fn from(answer: &QueryOut) -> Self {
        let word = answer.compression;
        Self {
            bytes_64: word.has(0x5bf),
            bytes_128: word.has(0x5be),
            max_num: answer.max_num.get(),
            enhanced_by_kernel: word.has(0x5b0),
            enhanced_by_ucx: word.has(0x5bb),
        }
    }
}

/// Asks the firmware of the named device. This needs the right to issue commands (CAP_NET_RAW, or as the system's
/// driver allows).
pub(super) fn compression(api: &Api, name: &str) -> Result<FirmwareCompression, DeviceError> {
    let mut attr = ffi::DvContextAttr::DEVX;
    let opened = api.find_device(|device, found, mlx5| {
        (mlx5 && found == name).then(|| (api.dv.mlx5dv_open_device)(device, &mut attr))
    })?;
    let opened = opened.ok_or_else(|| DeviceError::NoDevice { name: name.to_owned(), others: Vec::new() })?;
    let context = check_pointer(opened, "mlx5dv_open_device")?;
    let answer = query(api, context);
    // SAFETY: the library opened the device above, and nothing uses it any more.
    let _ = unsafe { (api.verbs.ibv_close_device)(context) };
    answer
}

fn query(api: &Api, context: Ptr<ffi::Context>) -> Result<FirmwareCompression, DeviceError> {
    let command = QueryIn {
        opcode: QUERY_HCA_CAP.into(),
        uid: U16::ZERO,
        reserved: U16::ZERO,
        op_mod: GENERAL_CURRENT.into(),
        reserved8: [0; 8],
    };
    let mut answer = Box::new(QueryOut::new_zeroed());
    let (from, to) = (command.as_bytes(), answer.as_mut_bytes());
    let (to, room) = (to.as_mut_ptr().cast(), to.len());
    // SAFETY: the library reads the command and writes the answer, both within the given lengths.
    let status = unsafe { (api.dv.mlx5dv_devx_general_cmd)(context, from.as_ptr().cast(), from.len(), to, room) };
    check_status(status, "mlx5dv_devx_general_cmd")?;
    Ok(FirmwareCompression::from(&*answer))
}
