//! Host memory that kernels may touch: allocated here, or registered.

use std::ffi::c_void;

use crate::code::{Code, Outcome};
use crate::context;
use crate::guard::{Out, log};
use crate::memfd;
use crate::space::{self, Entry, Kind};

/// `CU_MEMHOSTREGISTER_READ_ONLY`.
const READ_ONLY: u32 = 8;

fn allocate(out: Out<*mut c_void>, bytes: usize, flags: u32) -> Outcome {
    let context = context::current()?;
    out.present()?;
    // The flags are portable, device map and write-combined.
    if bytes == 0 || flags & !7 != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let start = memfd::anonymous(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
    space::add(Entry::new(start as u64, bytes as u64, Kind::HostAlloc(flags), context.device, context.handle));
    out.set(start as *mut c_void)
}

/// Frees a host allocation.
pub(crate) fn release(start: u64) -> Outcome {
    let own = |entry: &Entry| matches!(entry.kind, Kind::HostAlloc(_));
    let entry = space::remove(start, "freed host memory", own).ok_or(Code::INVALID_VALUE)?;
    space::unmap_later(start as usize, entry.len as usize);
    Ok(())
}

/// Unregisters host memory.
pub(crate) fn unregister(start: u64) -> Outcome {
    let own = |entry: &Entry| matches!(entry.kind, Kind::Registered(_));
    let why = "unregistered host memory";
    space::remove(start, why, own).map(drop).ok_or(Code::HOST_MEMORY_NOT_REGISTERED)
}

fn on_host(address: *mut c_void) -> Outcome<Entry> {
    space::find(address as u64).filter(Entry::on_host).ok_or(Code::INVALID_VALUE)
}

api! {
    cuMemHostAlloc(out: Out<*mut c_void>, bytes: usize, flags: u32) {
        allocate(out, bytes, flags)
    }

    cuMemAllocHost_v2(out: Out<*mut c_void>, bytes: usize) {
        allocate(out, bytes, 0)
    }

    cuMemFreeHost(address: *mut c_void) {
        context::current()?.wait();
        release(address as u64)
    }

    /// The flags are portable, device map, I/O memory and read-only. The memory must be mapped, or a GPU couldn't reach
    /// it.
    cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: u32) {
        let context = context::current()?;
        let (start, len) = (address as u64, bytes as u64);
        if start == 0 || len == 0 || start.checked_add(len).is_none() || flags & !15 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if space::touched(start, len) {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let mapped = memfd::mapped(start, len, flags & READ_ONLY == 0).map_err(|error| {
            log(format_args!("cuMemHostRegister: cannot read the process's mappings (/proc/self/maps): {error}"));
            Code::OPERATING_SYSTEM
        })?;
        if !mapped {
            return Err(Code::INVALID_VALUE);
        }
        let entry = Entry::new(start, len, Kind::Registered(flags & READ_ONLY != 0), context.device, context.handle);
        if space::add(entry) { Ok(()) } else { Err(Code::HOST_MEMORY_ALREADY_REGISTERED) }
    }

    cuMemHostUnregister(address: *mut c_void) {
        context::current()?;
        if address.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        unregister(address as u64)
    }

    /// Host and device address are the same.
    cuMemHostGetDevicePointer_v2(out: Out<u64>, address: *mut c_void, flags: u32) {
        context::current()?;
        out.present()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        on_host(address)?;
        out.set(address as u64)
    }

    cuMemHostGetFlags(out: Out<u32>, address: *mut c_void) {
        context::current()?;
        out.present()?;
        match on_host(address)?.kind {
            // The driver maps every allocation.
            Kind::HostAlloc(flags) => out.set(flags | 2),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}
