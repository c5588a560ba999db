//! Copies and sets, on streams or at once.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::code::{Code, Outcome};
use crate::context::Fault;
use crate::guard::log;
use crate::space::{self, Entry, Running};
use crate::stream::{self, Stream};

/// What an argument of a copy must be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Device,
    Host,
    Any,
}

/// Copies up to this size run on the thread of the caller if the stream has nothing else to do.
const SHORT: usize = 64 << 10;

/// Copies bytes that kernels and the card may change meanwhile. Words that are aligned stay whole.
///
/// # Safety
/// `to` is mapped and writable, and `from` mapped and readable, for `len` bytes each.
unsafe fn copy_bytes(to: u64, from: u64, len: usize) {
    fence(Ordering::SeqCst);
    if len <= 64 && (to | from | len as u64).is_multiple_of(8) {
        for at in (0..len as u64).step_by(8) {
            // SAFETY: the caller keeps both words mapped, and both addresses are multiples of 8.
            let from = unsafe { AtomicU64::from_ptr((from + at) as *mut u64) };
            // SAFETY: the caller keeps both words mapped, and both addresses are multiples of 8.
            let to = unsafe { AtomicU64::from_ptr((to + at) as *mut u64) };
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    } else {
        // SAFETY: the caller keeps both ranges mapped; the function allows them to overlap.
        unsafe { libc::memmove(to as *mut c_void, from as *const c_void, len) };
    }
    fence(Ordering::SeqCst);
}

/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`.
fn check(side: Side, device: usize, address: u64, len: usize, write: bool) -> Outcome {
    let len = len as u64;
    let known = space::touched(address, len);
    let valid = match side {
        Side::Device => space::allowed(device, address, len, write),
        Side::Host if space::find(address).is_some_and(|entry| entry.on_device()) => false,
        Side::Any if known => space::allowed(device, address, len, write),
        _ => address != 0 && address.checked_add(len).is_some(),
    };
    if valid { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

/// Memory of the program that is neither registered nor of this library.
fn pageable(address: u64, len: usize) -> bool {
    !space::covered(address, len as u64, |_| true)
}

/// What a copy finds when it runs: memory may be gone since it was given.
fn still(fault: &Fault, device: usize, address: u64, len: usize, write: bool) -> bool {
    let good = !space::touched(address, len as u64) || space::allowed(device, address, len as u64, write);
    if !good {
        log(format_args!(
            "a copy or set of {len} bytes at {address:#x} finds memory that was freed or unmapped meanwhile"
        ));
        fault.set(Code::ILLEGAL_ADDRESS);
    }
    good
}

fn copy(to: u64, from: u64, len: usize, sides: (Side, Side), handle: usize, asynchronous: bool) -> Outcome {
    let (context, stream) = stream::for_work(handle)?;
    if len == 0 {
        return Ok(());
    }
    let device = context.device;
    check(sides.0, device, to, len, true)?;
    check(sides.1, device, from, len, false)?;
    let (to_program, from_program) = (pageable(to, len), pageable(from, len));
    let idle = stream.last().is_none();
    if asynchronous && from_program && !to_program && !idle {
        // The call returns before the copy, and the program may change its memory then.
        let mut staged = vec![0u8; len];
        // SAFETY: the driver API's contract is that the program's memory is readable; the vector has as many bytes.
        unsafe { copy_bytes(staged.as_mut_ptr() as u64, from, len) };
        stream.give(move |fault| {
            let _running = Running::begin();
            if still(fault, device, to, len, true) {
                // SAFETY: `still` found the range, which stays mapped while this counts as running; the vector has as many bytes.
                unsafe { copy_bytes(to, staged.as_ptr() as u64, len) };
            }
        });
        return Ok(());
    }
    let work = move |fault: &Fault| {
        let _running = Running::begin();
        if still(fault, device, to, len, true) && still(fault, device, from, len, false) {
            // SAFETY: `still` found the ranges, which stay mapped while this counts as running. Memory of the program is mapped by the driver
            // API's contract until the copy is done.
            unsafe { copy_bytes(to, from, len) };
        }
    };
    give(&stream, len, !asynchronous || from_program || to_program, work)
}

/// Gives a stream work on `len` bytes. Work that is short, or that the caller waits for, runs on this thread if the stream is idle.
fn give(stream: &Arc<Stream>, len: usize, waits: bool, work: impl FnOnce(&Fault) + Send + 'static) -> Outcome {
    let point = if waits || len <= SHORT { stream.run_or_give(work) } else { stream.give(work) };
    if !waits {
        return Ok(());
    }
    point.wait();
    stream.fault.check()
}

fn set<const N: usize>(to: u64, value: [u8; N], count: usize, handle: usize, asynchronous: bool) -> Outcome {
    let (context, stream) = stream::for_work(handle)?;
    let len = count.checked_mul(N).ok_or(Code::INVALID_VALUE)?;
    if len == 0 {
        return Ok(());
    }
    if !to.is_multiple_of(N as u64) {
        return Err(Code::INVALID_VALUE);
    }
    let device = context.device;
    check(Side::Device, device, to, len, true)?;
    let work = move |fault: &Fault| {
        let _running = Running::begin();
        if !still(fault, device, to, len, true) {
            return;
        }
        if value.iter().all(|byte| *byte == value[0]) {
            // SAFETY: `still` found the range, which stays mapped while this counts as running.
            unsafe { libc::memset(to as *mut c_void, i32::from(value[0]), len) };
        } else {
            let pattern = value.repeat(4096 / N);
            for at in (0..len).step_by(4096) {
                let part = pattern.as_ptr() as u64;
                // SAFETY: `still` found the range, which stays mapped while this counts as running; the pattern has 4096 bytes.
                unsafe { copy_bytes(to + at as u64, part, (len - at).min(4096)) };
            }
        }
    };
    give(&stream, len, !asynchronous, work)
}

/// Writes first contents into memory of a module that no kernel has seen yet.
pub(crate) fn fill(to: u64, bytes: &[u8]) {
    if space::covered(to, bytes.len() as u64, Entry::on_device) {
        // SAFETY: the range is memory of a device, of which the heap's mapping stays for the life of the process.
        unsafe { copy_bytes(to, bytes.as_ptr() as u64, bytes.len()) };
    }
}

const HOST_TO_DEVICE: (Side, Side) = (Side::Device, Side::Host);
const DEVICE_TO_HOST: (Side, Side) = (Side::Host, Side::Device);
const BETWEEN_DEVICES: (Side, Side) = (Side::Device, Side::Device);
const ANY: (Side, Side) = (Side::Any, Side::Any);

api! {
    cuMemcpy(to: u64, from: u64, len: usize) {
        copy(to, from, len, ANY, 0, false)
    }

    cuMemcpyAsync(to: u64, from: u64, len: usize, stream: usize) {
        copy(to, from, len, ANY, stream, true)
    }

    cuMemcpyHtoD_v2(to: u64, from: u64, len: usize) {
        copy(to, from, len, HOST_TO_DEVICE, 0, false)
    }

    cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) {
        copy(to, from, len, HOST_TO_DEVICE, stream, true)
    }

    cuMemcpyDtoH_v2(to: u64, from: u64, len: usize) {
        copy(to, from, len, DEVICE_TO_HOST, 0, false)
    }

    cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: usize) {
        copy(to, from, len, DEVICE_TO_HOST, stream, true)
    }

    cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) {
        copy(to, from, len, BETWEEN_DEVICES, 0, false)
    }

    cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) {
        copy(to, from, len, BETWEEN_DEVICES, stream, true)
    }

    cuMemcpyPeer(to: u64, to_context: usize, from: u64, from_context: usize, len: usize) {
        peers(to_context, from_context)?;
        copy(to, from, len, BETWEEN_DEVICES, 0, false)
    }

    cuMemcpyPeerAsync(to: u64, to_context: usize, from: u64, from_context: usize, len: usize, stream: usize) {
        peers(to_context, from_context)?;
        copy(to, from, len, BETWEEN_DEVICES, stream, true)
    }

    cuMemsetD8_v2(to: u64, value: u8, count: usize) {
        set(to, [value], count, 0, false)
    }

    cuMemsetD8Async(to: u64, value: u8, count: usize, stream: usize) {
        set(to, [value], count, stream, true)
    }

    cuMemsetD16_v2(to: u64, value: u16, count: usize) {
        set(to, value.to_le_bytes(), count, 0, false)
    }

    cuMemsetD16Async(to: u64, value: u16, count: usize, stream: usize) {
        set(to, value.to_le_bytes(), count, stream, true)
    }

    cuMemsetD32_v2(to: u64, value: u32, count: usize) {
        set(to, value.to_le_bytes(), count, 0, false)
    }

    cuMemsetD32Async(to: u64, value: u32, count: usize, stream: usize) {
        set(to, value.to_le_bytes(), count, stream, true)
    }
}

fn peers(to: usize, from: usize) -> Outcome {
    crate::context::current()?;
    let known = |handle| crate::context::CONTEXTS.get(handle).map(drop).ok_or(Code::INVALID_CONTEXT);
    known(to)?;
    known(from)
}
