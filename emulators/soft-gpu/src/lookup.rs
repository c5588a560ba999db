//! cuGetProcAddress: finds functions by their unversioned names.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::code::{Code, Outcome};
use crate::guard::{Out, Text, log_once};

/// Versions of functions that came in a later release than the function itself: older programs get the older version.
const SINCE: [(&str, c_int); 8] = [
    ("cuCtxCreate_v3", 11040),
    ("cuCtxCreate_v4", 12050),
    ("cuCtxGetDevice_v2", 13000),
    ("cuCtxSynchronize_v2", 13000),
    ("cuDeviceGetUuid_v2", 11040),
    ("cuEventElapsedTime_v2", 12080),
    ("cuGetProcAddress_v2", 12000),
    ("cuStreamGetCaptureInfo_v3", 12030),
];

/// The result of a lookup: found, not found, or found only in a newer release.
const FOUND: c_int = 0;
const MISSING: c_int = 1;
const TOO_NEW: c_int = 2;

/// Returns this library's handle for dlsym; 0 if it is linked into a program.
fn library() -> usize {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        // SAFETY: the C struct consists of pointers, for which zero is valid.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: the address is a function in this library; the loader writes into a local variable.
        let known = unsafe { libc::dladdr(cuGetProcAddress_v2 as *const c_void, &mut info) };
        if known == 0 || info.dli_fname.is_null() {
            return 0;
        }
        // SAFETY: the name is a string from the loader that lives as long as the library; with these flags nothing gets loaded.
        unsafe { libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) as usize }
    })
}

fn symbol(name: &str) -> *mut c_void {
    let (handle, Ok(name)) = (library(), CString::new(name)) else { return std::ptr::null_mut() };
    if handle == 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: the handle is this library's, which is never unloaded; the name is NUL-terminated.
    unsafe { libc::dlsym(handle as *mut c_void, name.as_ptr().cast::<c_char>()) }
}

/// Returns the newest version of a function in the given release, and the result of the lookup.
fn search(name: &str, version: c_int) -> (*mut c_void, c_int) {
    let mut status = MISSING;
    for form in ["_v4", "_v3", "_v2", ""] {
        let name = format!("{name}{form}");
        let found = symbol(&name);
        if found.is_null() {
            continue;
        }
        if SINCE.iter().any(|(newer, since)| *newer == name && version < *since) {
            status = TOO_NEW;
            continue;
        }
        return (found, FOUND);
    }
    (std::ptr::null_mut(), status)
}

fn find(name: Text, out: Out<*mut c_void>, version: c_int, flags: u64) -> Outcome<c_int> {
    let name = name.string()?;
    out.present()?;
    if flags > 2 || version < 0 {
        return Err(Code::INVALID_VALUE);
    }
    if flags == 2 {
        log_once("per-thread", format_args!("cuGetProcAddress: per-thread default streams are not supported"));
        return Err(Code::NOT_SUPPORTED);
    }
    let valid = name.starts_with("cu") && !name.contains("_v");
    let (found, status) = if valid { search(&name, version) } else { (std::ptr::null_mut(), MISSING) };
    out.set(found)?;
    Ok(status)
}

api! {
    cuGetProcAddress(name: Text, out: Out<*mut c_void>, version: c_int, flags: u64) {
        if find(name, out, version, flags)? == FOUND { Ok(()) } else { Err(Code::NOT_FOUND) }
    }

    /// A caller that asks for the status gets it instead of an error.
    cuGetProcAddress_v2(name: Text, out: Out<*mut c_void>, version: c_int, flags: u64, status: Out<c_int>) {
        let found = find(name, out, version, flags)?;
        if status.present().is_ok() {
            return status.set(found);
        }
        if found == FOUND { Ok(()) } else { Err(Code::NOT_FOUND) }
    }
}
