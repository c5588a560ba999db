//! What a GPU and its driver offer.
#![allow(unsafe_code)]

use super::driver::check;
use crate::device::interface::DeviceError;
use cudarc::driver::sys as cu;
use std::ffi::CStr;

/// Required GPU attributes: the attribute, its minimum, whether it's needed even with cards that can't access GPU
/// memory, and the message.
const NEEDS: [(cu::CUdevice_attribute, i32, bool, &str); 4] = {
    use cu::CUdevice_attribute::*;
    [
        (
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            7,
            true,
            "the GPU is older than compute capability 7.0, which kernels with device-side networking need",
        ),
        (
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
            1,
            true,
            "the driver has no virtual memory management (cuMemCreate) for this GPU",
        ),
        (
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            1,
            false,
            "cards cannot access memory from cuMemCreate on this GPU (GPUDirect RDMA with VMM): check the driver, \
             and that nvidia-peermem or dma-buf is not disabled",
        ),
        (
            CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
            1,
            false,
            "the driver cannot export dma-bufs, which cards need to register GPU memory: install the open kernel \
             modules and Linux 5.12 or newer",
        ),
    ]
};

/// Checks that the GPU has what the plugin needs. `reachable` tells whether cards can access its memory.
pub fn check_needs(device: cu::CUdevice, reachable: bool) -> Result<(), DeviceError> {
    for (attribute, least, always, reason) in NEEDS {
        let value = known(attribute, device)?;
        if value < least && (always || reachable) {
            return Err(DeviceError::NoGpu { reason: format!("{reason} ({})", versions(device)) });
        }
    }
    Ok(())
}

fn known(attribute: cu::CUdevice_attribute, device: cu::CUdevice) -> Result<i32, DeviceError> {
    let mut value = 0;
    // SAFETY: the driver checks the device, and writes one int into a local variable.
    check("cuDeviceGetAttribute", unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value)
}

/// Describes the GPU and its driver, for messages.
pub fn versions(device: cu::CUdevice) -> String {
    use cu::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let (mut name, mut driver) = ([0u8; 64], 0);
    let [major, minor] = [MAJOR, MINOR].map(|attribute| known(attribute, device).unwrap_or(0));
    // SAFETY: the driver writes at most the given number of bytes into a local array.
    let _ = unsafe { cu::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32 - 1, device) };
    // SAFETY: the driver writes one int into a local variable.
    let _ = unsafe { cu::cuDriverGetVersion(&mut driver) };
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy();
    format!("{name}, compute capability {major}.{minor}, driver of CUDA {}.{}", driver / 1000, driver % 1000 / 10)
}

/// `CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED`, from CUDA 13.1.
pub const ATOMIC_REDUCTION_SUPPORTED: i32 = 148;

/// Returns whether the driver has the function that gives software cards access to GPU memory's dma-bufs. The software
/// GPU's does.
pub fn lets_software_cards_in() -> bool {
    // SAFETY: the driver is loaded already, so no initialiser runs.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") };
    // SAFETY: the symbol is only looked up, not used.
    driver.is_ok_and(|driver| unsafe { driver.get::<*const ()>(b"cuSoftGpuAttachDmaBuf\0") }.is_ok())
}

/// Returns a device attribute, even one that this release of the driver's bindings has no name for; 0 if the driver
/// doesn't know it.
pub fn attribute(number: i32, device: cu::CUdevice) -> i32 {
    type Get = extern "C" fn(&mut i32, i32, cu::CUdevice) -> i32;
    // SAFETY: the driver is loaded already, so no initialiser runs.
    let Ok(driver) = (unsafe { libloading::Library::new("libcuda.so.1") }) else { return 0 };
    // SAFETY: cuda.h declares the function with this type; the driver checks the numbers and sets the variable.
    let Ok(get) = (unsafe { driver.get::<Get>(b"cuDeviceGetAttribute\0") }) else { return 0 };
    let mut value = 0;
    if get(&mut value, number, device) == 0 { value } else { 0 }
}

/// How a host thread makes bytes that a card wrote to GPU memory before a completion in host memory visible to kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flush {
    /// They already are: the driver says so, or it has no flush and the software card wrote them through the driver or
    /// its own mapping.
    NotNeeded,
    /// `cuFlushGPUDirectRDMAWrites`.
    Driver,
    /// The driver has no flush.
    Missing,
}

impl Flush {
    pub fn of(device: cu::CUdevice, software: bool) -> Self {
        use cu::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS as OPTIONS,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING as ORDERING,
        };
        let [options, ordering] = [OPTIONS, ORDERING].map(|number| attribute(number as i32, device));
        let owner = cu::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as i32;
        let by_host = cu::CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as i32;
        match (ordering >= owner, options & by_host != 0) {
            (true, _) => Self::NotNeeded,
            (false, true) => Self::Driver,
            (false, false) if software => Self::NotNeeded,
            (false, false) => Self::Missing,
        }
    }
}
