//! cuGetProcAddress: finds functions by their unversioned names.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::code::{Code, Outcome};
use crate::device::VERSION;
use crate::guard::{Out, Text, log_once};

/// A release after those of which the reference lists the functions' versions.
const LATER: c_int = 13010;

/// Versions of functions that came in a later release than the function itself: older programs get the older version.
const SINCE: [(&str, c_int); 36] = [
    ("cuCtxCreate_v3", 11040),
    ("cuCtxCreate_v4", 12050),
    ("cuCtxGetDevice_v2", 13000),
    ("cuCtxSynchronize_v2", 13000),
    ("cuDeviceGetUuid_v2", 11040),
    ("cuEventElapsedTime_v2", 12080),
    ("cuGetProcAddress_v2", 12000),
    ("cuGraphAddDependencies_v2", 12030),
    ("cuGraphAddKernelNode_v2", 12000),
    ("cuGraphAddNode_v2", 12030),
    ("cuGraphAddNode_v3", LATER),
    ("cuGraphExecKernelNodeSetParams_v2", 12000),
    ("cuGraphExecUpdate_v2", 12000),
    ("cuGraphGetEdges_v2", 12030),
    ("cuGraphKernelNodeGetParams_v2", 12000),
    ("cuGraphKernelNodeSetParams_v2", 12000),
    ("cuGraphNodeGetDependencies_v2", 12030),
    ("cuGraphNodeGetDependentNodes_v2", 12030),
    ("cuGraphNodeSetParams_v2", LATER),
    ("cuGraphRemoveDependencies_v2", 12030),
    ("cuLaunchHostFunc_v2", LATER),
    ("cuMemAdvise_v2", 12020),
    ("cuMemPrefetchAsync_v2", 12020),
    ("cuMemcpy3DBatchAsync_v2", 13000),
    ("cuMemcpyBatchAsync_v2", 13000),
    ("cuMulticastBindAddr_v2", LATER),
    ("cuMulticastBindMem_v2", LATER),
    ("cuStreamBatchMemOp_v2", 11070),
    ("cuStreamGetCaptureInfo_v2", 11030),
    ("cuStreamGetCaptureInfo_v3", 12030),
    ("cuStreamGetCtx_v2", 12050),
    ("cuStreamUpdateCaptureDependencies_v2", 12030),
    ("cuStreamWaitValue32_v2", 11070),
    ("cuStreamWaitValue64_v2", 11070),
    ("cuStreamWriteValue32_v2", 11070),
    ("cuStreamWriteValue64_v2", 11070),
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
        // SAFETY: the name is a string from the loader that lives as long as the library; with these flags nothing gets
        // loaded.
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

/// Returns the newest version of a function in the given release, and the result of the lookup. A program from a newer
/// release than this driver's gets the newest version that the driver has.
fn search(name: &str, version: c_int) -> (*mut c_void, c_int) {
    let mut status = MISSING;
    let version = version.min(VERSION);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `_vN` beside an older version has a release, or programs of all releases get it.
    #[test]
    fn newer_versions_of_functions_have_a_release() {
        let text = [include_str!("unsupported.rs"), include_str!("stream.rs"), include_str!("memop.rs")].concat()
            + include_str!("context.rs")
            + include_str!("device.rs")
            + include_str!("event.rs")
            + include_str!("lookup.rs");
        let names: std::collections::BTreeSet<_> = text
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .filter(|word| word.starts_with("cu"))
            .collect();
        let older = |base: &str, number: u32| {
            (1..number).any(|older| match older {
                1 => names.contains(base),
                _ => names.contains(format!("{base}_v{older}").as_str()),
            })
        };
        let mut found = 0;
        for name in &names {
            let Some((base, number)) = name.rsplit_once("_v") else { continue };
            if number.parse().is_ok_and(|number| older(base, number)) {
                found += 1;
                assert!(SINCE.iter().any(|(newer, _)| newer == name), "{name} has an older version, and no release");
            }
        }
        assert!(found > 30, "{found} functions");
    }
}
