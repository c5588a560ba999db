//! The words of windows: which memory they're in, and how the signal proxy adds to those in GPU memory.
#![allow(unsafe_code)]

use super::driver::{Core, Current, check};
use crate::device::interface::DeviceError;
use cudarc::driver::sys as cu;

/// `CU_STREAM_MEM_OP_ATOMIC_REDUCTION`, `CU_STREAM_ATOMIC_REDUCTION_OP_ADD` and
/// `CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64`, from CUDA 13.1.
const ATOMIC_REDUCTION: u32 = 8;
const REDUCTION_ADD: u32 = 0;
const REDUCTION_U64: u32 = 22;
/// Operations per `cuStreamBatchMemOp`.
const MEM_OPS: usize = 128;

/// Splits `len` bytes at `address` by allocation, since a window may span several adjacent ones, and returns where each
/// part starts. Returns `None` if a byte is not in any of the driver's allocations.
pub fn parts(_: &Current, address: u64, len: usize) -> Option<Vec<u64>> {
    let (mut at, end) = (address, address.checked_add(len as u64)?);
    let mut parts = Vec::new();
    while at < end {
        let (mut base, mut size) = (0, 0);
        // SAFETY: the driver looks up `at` without accessing it, and writes an address and a size into local variables.
        let result = unsafe { cu::cuMemGetAddressRange_v2(&mut base, &mut size, at) };
        let next = base.saturating_add(size as u64);
        if result != cu::CUresult::CUDA_SUCCESS || !(base..next).contains(&at) {
            return None;
        }
        parts.push(at);
        at = next;
    }
    Some(parts)
}

/// Returns true if the CPU's atomic operations on a word at `address` are atomic for the GPU: the word is in host
/// memory, or in coherent GPU memory that the CPU accesses at the same address, as on Grace.
pub fn is_coherent(native_atomics: bool, _: &Current, address: u64) -> bool {
    use cu::CUpointer_attribute::{
        CU_POINTER_ATTRIBUTE_HOST_POINTER as HOST_POINTER, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as MEMORY_TYPE,
    };
    let (mut host, mut kind) = (0u64, 0u32);
    // SAFETY: the driver looks up the address without accessing it, and writes one pointer into a local variable.
    let found = unsafe { cu::cuPointerGetAttribute((&raw mut host).cast(), HOST_POINTER, address) };
    // SAFETY: as above, with one 32-bit number.
    let typed = unsafe { cu::cuPointerGetAttribute((&raw mut kind).cast(), MEMORY_TYPE, address) };
    let success = cu::CUresult::CUDA_SUCCESS;
    let on_host = typed == success && kind == cu::CUmemorytype::CU_MEMORYTYPE_HOST as u32;
    found == success && host == address && (on_host || native_atomics)
}

/// Makes a driver call, and waits for the stream.
fn on_stream(
    core: &Core,
    name: &'static str,
    call: impl FnOnce(cu::CUstream) -> cu::CUresult,
) -> Result<(), DeviceError> {
    let _current = core.enter()?;
    check(name, call(core.stream))?;
    core.synchronize()
}

/// Adds with atomic reductions on the stream.
///
/// # Safety
/// Each address must be 8-byte aligned, and mapped on the device until the end of the round.
pub unsafe fn add_by_stream(core: &Core, words: &[(u64, u64)]) -> Result<(), DeviceError> {
    for words in words.chunks(MEM_OPS) {
        // The layout in CUDA 13.1: operation and flags, kind and type, address, value.
        let head = [u64::from(ATOMIC_REDUCTION), u64::from(REDUCTION_ADD) | u64::from(REDUCTION_U64) << 32];
        let operation = |(address, amount): &(u64, u64)| cu::CUstreamBatchMemOpParams {
            pad: [head[0], head[1], *address, *amount, 0, 0],
        };
        let mut operations: Vec<_> = words.iter().map(operation).collect();
        let (count, list) = (operations.len() as u32, operations.as_mut_ptr());
        on_stream(core, "cuStreamBatchMemOp", |stream| {
            // SAFETY: the driver reads `count` operations. This function's caller keeps the words mapped until the
            // stream has executed them.
            unsafe { cu::cuStreamBatchMemOp_v2(stream, count, list, 0) }
        })?;
    }
    Ok(())
}

/// Adds by copying each word from the device and back.
///
/// # Safety
/// Each address must be 8-byte aligned, and mapped on the device until the end of the round.
pub unsafe fn add_by_copies(core: &Core, words: &[(u64, u64)]) -> Result<(), DeviceError> {
    for (address, amount) in words {
        let mut word = 0u64;
        on_stream(core, "cuMemcpyDtoHAsync", |stream| {
            // SAFETY: this function's caller keeps the word mapped; the driver writes a local variable before
            // `on_stream` returns.
            unsafe { cu::cuMemcpyDtoHAsync_v2((&raw mut word).cast(), *address, 8, stream) }
        })?;
        let sum = word.wrapping_add(*amount);
        on_stream(core, "cuMemcpyHtoDAsync", |stream| {
            // SAFETY: this function's caller keeps the word mapped; the driver reads a local variable before
            // `on_stream` returns.
            unsafe { cu::cuMemcpyHtoDAsync_v2(*address, (&raw const sum).cast(), 8, stream) }
        })?;
    }
    Ok(())
}
