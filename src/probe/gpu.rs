//! The GPUs of this machine, from the CUDA driver, which is loaded at run time.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde_json::{Value, json};
use std::ffi::{CStr, c_char, c_int, c_uint};

const LIBRARY: &str = "libcuda.so.1";
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
/// cuMemCreate.
const VIRTUAL_MEMORY: c_int = 102;
/// Cards reach memory of cuMemCreate.
const GPU_DIRECT_RDMA_WITH_VMM: c_int = 110;
const DMA_BUF: c_int = 124;

type Version = unsafe extern "C" fn(*mut c_int) -> c_int;
type SoftwareVersion = unsafe extern "C" fn() -> *const c_char;
type Init = unsafe extern "C" fn(c_uint) -> c_int;
type GetCount = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;

/// The driver: the release of its API, and of the software GPU if that is it. Then each GPU: its name, compute capability and what the
/// plugin needs of it; or the reason why there is none.
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
    // SAFETY: the driver writes one int into a local variable. The call needs no cuInit.
    check("cuDriverGetVersion", unsafe { get_version(&mut api) })?;
    // SAFETY: only the software GPU has a function of this name, of this type.
    let software = unsafe { driver.get::<SoftwareVersion>(b"cuSoftGpuRelease\0") }.ok().map(|version| {
        // SAFETY: the function takes no arguments.
        let text = unsafe { version() };
        // SAFETY: it returns a constant string with a NUL.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    });
    emit("driver", json!({ "api": format!("{}.{}", api / 1000, api % 1000 / 10), "software": software }));
    let init = symbol!("cuInit", Init);
    let get_count = symbol!("cuDeviceGetCount", GetCount);
    let get_name = symbol!("cuDeviceGetName", GetName);
    let get_attribute = symbol!("cuDeviceGetAttribute", GetAttribute);
    // SAFETY: cuInit takes no pointers; 0 is its only valid argument.
    check("cuInit", unsafe { init(0) })?;
    let mut count = 0;
    // SAFETY: the driver writes one int into a local variable.
    check("cuDeviceGetCount", unsafe { get_count(&mut count) })?;
    for device in 0..count {
        let mut name = [0 as c_char; 128];
        // SAFETY: the driver writes at most 128 bytes into the array, with a NUL.
        check("cuDeviceGetName", unsafe { get_name(name.as_mut_ptr(), 128, device) })?;
        // SAFETY: the driver wrote a NUL-terminated string into the array.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let attribute = |number| {
            let mut value = 0;
            // SAFETY: the driver writes one int into a local variable.
            check("cuDeviceGetAttribute", unsafe { get_attribute(&mut value, number, device) }).map(|()| value)
        };
        let (major, minor) = (attribute(COMPUTE_CAPABILITY_MAJOR)?, attribute(COMPUTE_CAPABILITY_MINOR)?);
        // Drivers that do not know an attribute do not have the ability.
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
