//! Calls to the CUDA driver.
#![allow(unsafe_code)]

use cudarc::driver::sys as cu;
use std::ffi::CStr;

pub(crate) fn check(call: &str, result: cu::CUresult) -> Result<(), String> {
    if result == cu::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the driver writes the address of a constant string, or null, into a local variable.
    let _ = unsafe { cu::cuGetErrorName(result, &mut name) };
    // SAFETY: not null, so it is the driver's NUL-terminated constant string.
    let text = if name.is_null() { c"unknown" } else { unsafe { CStr::from_ptr(name) } };
    Err(format!("{call} failed: {} ({})", text.to_string_lossy(), result as u32))
}

/// Calls a driver function and checks the result.
macro_rules! cuda {
    ($function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the driver is loaded, every pointer is to a live variable of the type the call takes, and every
        // handle came from the driver.
        check(stringify!($function), unsafe { cu::$function($($arg),*) })
    }};
}
pub(crate) use cuda;
