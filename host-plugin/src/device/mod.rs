//! Device memory: the trait [`Device`] with a CPU back end ([`cpu`]) and a CUDA back end ([`cuda`]).

pub mod cpu;
pub mod cuda;
mod interface;

pub use ferrogin_ffi::block::bytes_of;
pub use interface::{
    Adds, Device, DeviceBuffer, DeviceError, DeviceKind, DeviceMapping, DmaBuf, Imported, Mapping, Use, WindowMemory,
    WordMapping, page_size,
};

use crate::config::{DeviceChoice, Provider};
use std::sync::Arc;

/// Opens the device that FERROGIN_DEVICE selects.
///
/// `auto` is a GPU if the machine has a driver and a GPU. Otherwise it's the CPU for the software card and for TCP,
/// which the user chose explicitly, and an error for hardware, because CPU threads are no replacement for a GPU in a
/// job.
///
/// # Errors
/// [`DeviceError::NoGpu`], or the driver's error.
pub fn open(choice: DeviceChoice, provider: Provider) -> Result<Arc<dyn Device>, DeviceError> {
    let software = provider == Provider::SoftEfa;
    let without_gpu = software || provider == Provider::Tcp;
    match choice {
        DeviceChoice::Cpu => Ok(Arc::new(cpu::CpuDevice::new(software))),
        DeviceChoice::Cuda => Ok(Arc::new(cuda::CudaDevice::open(software)?)),
        DeviceChoice::Auto => match cuda::CudaDevice::open(software) {
            Ok(device) => Ok(Arc::new(device)),
            Err(DeviceError::NoGpu { .. }) if without_gpu => Ok(Arc::new(cpu::CpuDevice::new(software))),
            Err(error) => Err(error),
        },
    }
}
