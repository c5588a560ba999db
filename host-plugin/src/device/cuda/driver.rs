//! The driver: its errors, and a device's context and stream.
#![allow(unsafe_code)]

use crate::device::interface::DeviceError;
use crate::log::first_time;
use cudarc::driver::sys as cu;
use std::ffi::CStr;

/// Checks the result of a driver call.
pub fn check(call: &'static str, result: cu::CUresult) -> Result<(), DeviceError> {
    if result == cu::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the driver writes the address of a constant string into `name`, a local variable.
    let found = unsafe { cu::cuGetErrorName(result, &mut name) };
    let text = if found == cu::CUresult::CUDA_SUCCESS && !name.is_null() {
        // SAFETY: the driver succeeded, so `name`, which is not null, is its NUL-terminated constant string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        "unknown".to_owned()
    };
    Err(DeviceError::Cuda { call, code: result as u32, text })
}

/// [`check`] for a call that frees device memory: an error becomes a WARN line.
pub fn check_free(call: &'static str, result: cu::CUresult) {
    let Err(error) = check(call, result) else { return };
    if !is_fault(result) {
        crate::warn!("freeing device memory: {error}");
    } else if first_time("a kernel's fault", "") {
        crate::warn!("a kernel failed, so its CUDA context frees no memory: {error}. Look for the first CUDA error");
    }
}

/// Returns whether the error is that of an earlier kernel: every later call in its CUDA context returns it.
fn is_fault(result: cu::CUresult) -> bool {
    use cu::CUresult::*;
    matches!(
        result,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
    )
}

/// The CUDA context and a non-blocking stream, shared by all of the device's objects.
pub struct Core {
    pub context: cu::CUcontext,
    pub device: cu::CUdevice,
    /// True if `open` retained the device's primary context.
    pub retained: bool,
    pub stream: cu::CUstream,
}

// SAFETY: the driver allows any thread to use a context and a stream, and every use makes the context current first.
unsafe impl Send for Core {}
// SAFETY: the driver's calls on a context and a stream are thread-safe, and no field changes after `open`.
unsafe impl Sync for Core {}

/// Keeps a context current on this thread; dropping it restores the previous context. Until then, if the program is
/// capturing a CUDA graph, this thread's calls don't fail and don't invalidate the capture
/// (`CU_STREAM_CAPTURE_MODE_RELAXED`).
pub struct Current {
    capture_mode: cu::CUstreamCaptureMode,
}

impl Core {
    pub fn enter(&self) -> Result<Current, DeviceError> {
        // SAFETY: the context is valid: `open` retained it, or it was current in `open` and the program keeps it.
        check("cuCtxPushCurrent", unsafe { cu::cuCtxPushCurrent_v2(self.context) })?;
        let mut current = Current { capture_mode: cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED };
        current.exchange_capture_mode();
        Ok(current)
    }

    /// Waits for the stream's work to finish.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: `self` owns the stream and destroys it on drop.
        check("cuStreamSynchronize", unsafe { cu::cuStreamSynchronize(self.stream) })
    }
}

impl Current {
    /// An error leaves this thread's mode unchanged, which only matters during a capture.
    fn exchange_capture_mode(&mut self) {
        // SAFETY: the driver reads a mode from a local variable and writes another one to it.
        let _ = unsafe { cu::cuThreadExchangeStreamCaptureMode(&mut self.capture_mode) };
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        self.exchange_capture_mode();
        let mut context = std::ptr::null_mut();
        // SAFETY: `enter` pushed a context on this thread; the driver writes its address into a local variable.
        let _ = unsafe { cu::cuCtxPopCurrent_v2(&mut context) };
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Ok(_current) = self.enter() {
            // SAFETY: `open` created the stream, and only this drop destroys it. If the program destroyed the context,
            // the driver returns an error.
            let _ = unsafe { cu::cuStreamDestroy_v2(self.stream) };
        }
        if self.retained {
            // SAFETY: `open` retained the primary context once, and only this drop releases it.
            let _ = unsafe { cu::cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}
