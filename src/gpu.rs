//! Whether there is a GPU: asked of the CUDA driver, which is loaded at run time.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_uint};

const LIBRARY: &str = "libcuda.so.1";
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;

type Init = unsafe extern "C" fn(c_uint) -> c_int;
type GetCount = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;

/// Names and compute capabilities of the GPUs, or why there are none.
pub fn list() -> Result<Vec<String>, String> {
    // SAFETY: runs the initialisers of the CUDA driver.
    let driver = unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) };
    let driver = driver.map_err(|_| format!("no CUDA driver ({LIBRARY})"))?;
    macro_rules! symbol {
        ($name:literal, $type:ty) => {{
            // SAFETY: the type is the one that cuda.h declares for this name.
            let symbol = unsafe { driver.get::<$type>(concat!($name, "\0").as_bytes()) };
            symbol.map_err(|_| format!("{LIBRARY} has no {}", $name))?
        }};
    }
    let init = symbol!("cuInit", Init);
    let get_count = symbol!("cuDeviceGetCount", GetCount);
    let get_name = symbol!("cuDeviceGetName", GetName);
    let get_attribute = symbol!("cuDeviceGetAttribute", GetAttribute);
    // SAFETY: 0 is the only value that it takes.
    check("cuInit", unsafe { init(0) })?;
    let mut count = 0;
    // SAFETY: a valid place for an int.
    check("cuDeviceGetCount", unsafe { get_count(&mut count) })?;
    let mut names = Vec::new();
    for device in 0..count {
        let mut name = [0 as c_char; 128];
        // SAFETY: 128 bytes of room; the driver ends the string within them.
        check("cuDeviceGetName", unsafe { get_name(name.as_mut_ptr(), 128, device) })?;
        // SAFETY: ended within the array, as above.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: a valid place for an int.
            check("cuDeviceGetAttribute", unsafe { get_attribute(&mut value, which, device) }).map(|()| value)
        };
        let (major, minor) = (attribute(COMPUTE_CAPABILITY_MAJOR)?, attribute(COMPUTE_CAPABILITY_MINOR)?);
        names.push(format!("{name}, compute capability {major}.{minor}"));
    }
    if names.is_empty() { Err("the CUDA driver sees no GPU".into()) } else { Ok(names) }
}

fn check(call: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{call} failed with error {code}")) }
}
