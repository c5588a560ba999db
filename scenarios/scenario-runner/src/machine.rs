//! A GPU and its driver: whether kernels run there, and if not, why.
#![allow(unsafe_code)]

use crate::driver::{check, cuda};
use cudarc::driver::sys as cu;
use nccl_gin_ferrogin::device::Device;
use nccl_gin_ferrogin::device::cuda::CudaDevice;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ptr::null_mut;

/// The device code's module; every driver must support its PTX version.
const DEVICE_CODE: &str = include_str!("../../../device-kernels/ptx/ferrogin_device.ptx");
/// The oldest GPU that CUDA 13's nvcc makes machine code for.
const OLDEST: (c_int, c_int) = (7, 5);

/// A GPU and its driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// The name of the GPU.
    pub name: String,
    /// Its compute capability.
    pub capability: (c_int, c_int),
    /// The CUDA release of the driver.
    pub cuda: (c_int, c_int),
    /// The software GPU's release, whose times mean nothing; `None` for hardware.
    pub software: Option<String>,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { name, capability: (major, minor), cuda, .. } = self;
        write!(f, "{name} (compute capability {major}.{minor}, driver of CUDA {}.{})", cuda.0, cuda.1)
    }
}

impl Machine {
    /// Returns the GPU that the plugin would use.
    ///
    /// # Errors
    /// There is no GPU or no driver, or the GPU or its driver is too old for the GPU tests.
    pub fn first() -> Result<Machine, String> {
        let device = CudaDevice::open(true).map_err(|error| error.to_string())?;
        let machine = Machine::of(device.gpu().map_or(0, |(ordinal, _)| ordinal as cu::CUdevice))?;
        machine.has_machine_code()?;
        machine.takes(DEVICE_CODE)?;
        Ok(machine)
    }

    /// Returns the GPU with this number; the driver must be loaded.
    pub(crate) fn of(ordinal: cu::CUdevice) -> Result<Machine, String> {
        use cu::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        let (mut name, mut major, mut minor, mut version) = ([0 as c_char; 64], 0, 0, 0);
        cuda!(cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, ordinal))?;
        cuda!(cuDeviceGetAttribute(&mut major, MAJOR, ordinal))?;
        cuda!(cuDeviceGetAttribute(&mut minor, MINOR, ordinal))?;
        cuda!(cuDriverGetVersion(&mut version))?;
        // SAFETY: the array ends with a NUL byte, because the driver was given all bytes but the last.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        Ok(Machine {
            name,
            capability: (major, minor),
            cuda: (version / 1000, version % 1000 / 10),
            software: software_gpu(),
        })
    }

    fn has_machine_code(&self) -> Result<(), String> {
        let (major, minor) = OLDEST;
        if self.capability >= OLDEST {
            return Ok(());
        }
        Err(format!(
            "{self} is older than compute capability {major}.{minor}, the first one for which nvcc of CUDA 13 makes code: take a newer GPU"
        ))
    }

    /// Checks that the driver and the GPU support this PTX.
    ///
    /// # Errors
    /// The driver or the GPU is older than the PTX requires.
    pub fn takes(&self, ptx: &str) -> Result<(), String> {
        let after = |word: &str| ptx.lines().find_map(|line| line.trim().strip_prefix(word)).map(str::trim);
        if let Some(version) = after(".version ").and_then(pair)
            && self.cuda < release_of(version)
        {
            let ((major, minor), (release, point)) = (version, release_of(version));
            return Err(format!(
                "the driver is too old for the kernels, which are PTX of version {major}.{minor}: {self}; install a driver of CUDA \
                 {release}.{point} or newer"
            ));
        }
        let digits =
            |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<c_int>().ok();
        if let Some(number) = after(".target sm_").and_then(digits)
            && self.capability < (number / 10, number % 10)
        {
            return Err(format!(
                "the GPU is too old for the kernels, which are PTX for compute capability {}.{} and later: {self}; take a newer GPU",
                number / 10,
                number % 10
            ));
        }
        Ok(())
    }
}

/// Returns the software GPU's release, if it is the driver. NVIDIA's driver doesn't know this function.
fn software_gpu() -> Option<String> {
    let (mut function, mut found) = (null_mut(), cu::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS);
    cuda!(cuGetProcAddress_v2(c"cuSoftGpuRelease".as_ptr(), &mut function, 12080, 0, &mut found)).ok()?;
    if function.is_null() {
        return None;
    }
    // SAFETY: the software GPU's function with this name has this type, and no other driver has one.
    let version: extern "C" fn() -> *const c_char = unsafe { std::mem::transmute(function) };
    // SAFETY: it returns a constant string that ends with a NUL byte.
    Some(unsafe { CStr::from_ptr(version()) }.to_string_lossy().into_owned())
}

/// Returns two numbers with a point between them.
fn pair(text: &str) -> Option<(c_int, c_int)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Returns the first CUDA release whose driver supports a PTX version, according to the release notes in NVIDIA's PTX
/// manual.
fn release_of(version: (c_int, c_int)) -> (c_int, c_int) {
    match version {
        (8, minor @ 0..=5) => (12, minor),
        (8, minor) => (12, minor + 1),
        (major @ 9.., minor) => (major + 4, minor),
        _ => (11, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(capability: (c_int, c_int), cuda: (c_int, c_int)) -> Machine {
        Machine { name: "a GPU".into(), capability, cuda, software: None }
    }

    #[test]
    fn driver_older_than_ptx_is_refused_with_versions_and_fix() {
        assert_eq!(machine((7, 0), (12, 2)).takes(DEVICE_CODE), Ok(()));
        let why = machine((9, 0), (12, 1)).takes(DEVICE_CODE).unwrap_err();
        for part in ["PTX of version 8.2", "a GPU", "driver of CUDA 12.1", "install a driver of CUDA 12.2 or newer"] {
            assert!(why.contains(part), "{part:?} in {why:?}");
        }
        let why = machine((9, 0), (12, 9)).takes("//\n.version 9.0\n.target sm_75\n").unwrap_err();
        assert!(why.contains("CUDA 13.0 or newer"), "{why}");
    }

    #[test]
    fn gpu_older_than_kernels_is_refused_with_capability() {
        let why = machine((7, 0), (13, 0)).takes(".version 9.0\n.target sm_75\n").unwrap_err();
        assert!(why.contains("7.5") && why.contains("compute capability 7.0"), "{why}");
        assert_eq!(machine((7, 5), (13, 0)).takes(".version 9.0\n.target sm_75, debug\n"), Ok(()));
        let why = machine((7, 0), (13, 0)).has_machine_code().unwrap_err();
        assert!(why.contains("7.5") && why.contains("7.0") && why.contains("take a newer GPU"), "{why}");
        assert_eq!(machine((7, 5), (13, 0)).has_machine_code(), Ok(()));
    }

    #[test]
    fn releases_are_those_of_ptx_versions() {
        let of = [(7, 8), (8, 2), (8, 5), (8, 7), (9, 0), (9, 1)].map(release_of);
        assert_eq!(of, [(11, 0), (12, 2), (12, 5), (12, 8), (13, 0), (13, 1)]);
    }
}
