//! The GPUs of this machine, from the CUDA driver, which is loaded at run time.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde_json::{Value, json};
use std::ffi::{CStr, c_char, c_int, c_uint};

const LIBRARY: &str = "libcuda.so.1";
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
/// cuMemCreate.
const VIRTUAL_MEMORY: c_int = 102;
/// Cards can reach memory from cuMemCreate.
const GPU_DIRECT_RDMA_WITH_VMM: c_int = 110;
const DMA_BUF: c_int = 124;

// Functions that are not unsafe accept any values of their types: the driver checks numbers, and sets the variable
// behind a reference.
type Version = extern "C" fn(&mut c_int) -> c_int;
type SoftwareVersion = extern "C" fn() -> *const c_char;
type Init = extern "C" fn(c_uint) -> c_int;
type GetCount = extern "C" fn(&mut c_int) -> c_int;
type GetName = unsafe extern "C" fn(*mut u8, c_int, c_int) -> c_int;
type GetAttribute = extern "C" fn(&mut c_int, c_int, c_int) -> c_int;

/// Emits the driver: its API's release, and the software GPU's if that is the driver. Then emits each GPU: its name,
/// its compute capability and what the plugin needs from it. Fails with the reason if there is none.
pub fn list(emit: impl Fn(&str, Value)) -> Result<(), String> {
    // SAFETY: loading runs the initialisers of NVIDIA's driver library, which any process may run.
    let driver = unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) };
    let driver = driver.map_err(|_| format!("no CUDA driver ({LIBRARY})"))?;
    macro_rules! symbol {
        ($name:literal, $type:ty) => {{
            // SAFETY: `$type` is the type that cuda.h declares for this name.
            let symbol = unsafe { driver.get::<$type>(concat!($name, "\0").as_bytes()) };
            symbol.map_err(|_| format!("{LIBRARY} has no {}", $name))?
        }};
    }
    let get_version = symbol!("cuDriverGetVersion", Version);
    let mut api = 0;
    // The call needs no cuInit.
    check("cuDriverGetVersion", get_version(&mut api))?;
    // SAFETY: only the software GPU has a function with this name, and it has this type.
    let software = unsafe { driver.get::<SoftwareVersion>(b"cuSoftGpuRelease\0") }.ok().map(|version| {
        // SAFETY: the function returns a NUL-terminated constant string.
        unsafe { CStr::from_ptr(version()) }.to_string_lossy().into_owned()
    });
    emit("driver", json!({ "api": format!("{}.{}", api / 1000, api % 1000 / 10), "software": software }));
    let init = symbol!("cuInit", Init);
    let get_count = symbol!("cuDeviceGetCount", GetCount);
    let get_name = symbol!("cuDeviceGetName", GetName);
    let get_attribute = symbol!("cuDeviceGetAttribute", GetAttribute);
    check("cuInit", init(0))?;
    let mut count = 0;
    check("cuDeviceGetCount", get_count(&mut count))?;
    for device in 0..count {
        let mut name = [0; 128];
        // SAFETY: the driver writes at most 128 bytes to the array, including a NUL.
        check("cuDeviceGetName", unsafe { get_name(name.as_mut_ptr(), 128, device) })?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let attribute = |number| {
            let mut value = 0;
            check("cuDeviceGetAttribute", get_attribute(&mut value, number, device)).map(|()| value)
        };
        let (major, minor) = (attribute(COMPUTE_CAPABILITY_MAJOR)?, attribute(COMPUTE_CAPABILITY_MINOR)?);
        // A driver that does not know an attribute does not have the ability.
        let able = |number| attribute(number).is_ok_and(|value| value != 0);
        let gpu = json!({
            "name": name,
            "major": major,
            "minor": minor,
            "vmm": able(VIRTUAL_MEMORY),
            "rdma_with_vmm": able(GPU_DIRECT_RDMA_WITH_VMM),
            "dma_buf": able(DMA_BUF),
        });
        emit("gpu", gpu);
    }
    if count == 0 { Err("the CUDA driver finds no GPU".into()) } else { Ok(()) }
}

fn check(call: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{call} failed with error {code}")) }
}
