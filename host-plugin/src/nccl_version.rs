//! The version of the NCCL that loaded the plugin.
//!
//! `backendVersion` alone doesn't say which structs kernels read: two NCCL releases may use the same number for
//! different structs. So the plugin also asks for NCCL's own version, and serves the pairs that it knows.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::log;
use ferrogin_ffi::nccl;
use libloading::os::unix::{Library, RTLD_LAZY};
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;

/// An NCCL version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NcclVersion {
    major: c_int,
    minor: c_int,
    patch: c_int,
}

impl NcclVersion {
    /// Returns the version of the library that contains the logger passed to `init`, or `None` if that isn't NCCL.
    pub fn of_caller() -> Option<Self> {
        Self::of_code_at(log::logger()?)
    }

    fn of_code_at(address: usize) -> Option<Self> {
        let library = library_of(address)?;
        // SAFETY: nccl.h declares the function with this type.
        let get_version =
            unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> nccl::Result>(b"ncclGetVersion\0") };
        let mut code = 0;
        // SAFETY: the function writes one int, before `library` is released.
        let result = unsafe { get_version.ok()?(&raw mut code) };
        (result == nccl::SUCCESS).then_some(Self::from_code(code))
    }

    /// Converts an `NCCL_VERSION_CODE` of NCCL 2.9 or newer.
    fn from_code(code: c_int) -> Self {
        Self { major: code / 10_000, minor: code / 100 % 100, patch: code % 100 }
    }

    /// Returns whether this release's kernels with `backend_version` read the structs that the plugin writes for it.
    fn knows(self, backend_version: c_int) -> bool {
        matches!((self.major, self.minor, backend_version), (2, 31..=32, 0 | 1) | (2, 32, 2))
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Checks in `init` that the GIN plugin can serve this NCCL's kernels, so that NCCL uses its proxy otherwise: NCCL 2.30
/// accepts a plugin of type EFA_GDA, and then creates no device communicator with it. Without a version, trusts the
/// caller.
///
/// # Errors
/// The plugin knows no `backendVersion` of this release.
pub fn check_release(version: Option<NcclVersion>) -> Result<(), Error> {
    match version.filter(|version| !(0..=2).any(|backend_version| version.knows(backend_version))) {
        None => Ok(()),
        Some(version) => Err(Error::Usage(format!(
            "{version} is not known: this ferrogin's GIN plugin serves NCCL 2.31 and 2.32. With {version}, kernels reach the card through NCCL's \
             proxy: set NCCL_RMA_PLUGIN to this library and NCCL_GIN_TYPE=2"
        ))),
    }
}

/// Checks that this NCCL's kernels read the structs that the plugin writes for `backend_version`. Without a version,
/// trusts the number.
///
/// # Errors
/// The plugin doesn't know this pair.
pub fn check(version: Option<NcclVersion>, backend_version: c_int) -> Result<(), Error> {
    match version {
        None => crate::info!(
            "the caller exports no ncclGetVersion, so backendVersion {backend_version} is assumed to mean the \
             structs of NCCL 2.31 and 2.32"
        ),
        Some(version) if version.knows(backend_version) => crate::info!("{version}, backendVersion {backend_version}"),
        Some(version) => {
            return Err(Error::Usage(format!(
                "{version} with backendVersion {backend_version} is not known: this ferrogin supports 0 and 1 with NCCL 2.31 and 2.32, and \
                 2 with NCCL 2.32; install a newer ferrogin, or use one of these NCCL releases"
            )));
        }
    }
    Ok(())
}

/// Returns the loaded library that contains the code at `address`.
fn library_of(address: usize) -> Option<Library> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr accepts any address, and writes a `Dl_info`.
    let found = unsafe { libc::dladdr(address as *const c_void, info.as_mut_ptr()) };
    // SAFETY: all zeros is a valid `Dl_info`, and dladdr writes only valid ones.
    let info = unsafe { info.assume_init() };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr's file name is a C string, which lives as long as the library.
    let path = unsafe { CStr::from_ptr(info.dli_fname) };
    // SAFETY: with RTLD_NOLOAD, none of the library's code runs: it's already loaded.
    unsafe { Library::open(Some(OsStr::from_bytes(path.to_bytes())), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn known_pairs_are_accepted_and_others_are_named() {
        let check = |code, backend_version| check(Some(NcclVersion::from_code(code)), backend_version);
        for (code, backend_version) in [(23_102, 0), (23_102, 1), (23_203, 0), (23_203, 1), (23_203, 2), (23_204, 2)] {
            assert!(check(code, backend_version).is_ok(), "{code} {backend_version}");
        }
        for (code, backend_version) in [(23_102, 2), (23_300, 2), (23_300, 1), (23_203, 3), (30_000, 0), (23_007, 0)] {
            let error = check(code, backend_version).unwrap_err().to_string();
            let pair = format!("{} with backendVersion {backend_version}", NcclVersion::from_code(code));
            assert!(error.starts_with(&pair), "{error}");
        }
        assert_eq!(NcclVersion::from_code(23_203).to_string(), "NCCL 2.32.3");
    }

    #[test]
    fn releases_without_a_known_backend_version_are_refused() {
        for code in [22_907, 23_007, 23_300, 30_000] {
            let error = check_release(Some(NcclVersion::from_code(code))).unwrap_err().to_string();
            assert!(error.starts_with(&NcclVersion::from_code(code).to_string()), "{error}");
            assert!(error.contains("NCCL_RMA_PLUGIN") && error.contains("NCCL_GIN_TYPE=2"), "{error}");
        }
        for code in [23_100, 23_102, 23_203] {
            assert!(check_release(Some(NcclVersion::from_code(code))).is_ok(), "{code}");
        }
        assert!(check_release(None).is_ok());
    }

    #[test]
    fn library_of_a_function_is_found_by_its_address() {
        let libc = library_of(libc::getpid as *const () as usize).expect("the C library");
        // SAFETY: only the address is looked at.
        let getppid = unsafe { libc.get::<unsafe extern "C" fn() -> c_int>(b"getppid\0") }.expect("getppid");
        assert_eq!(*getppid as *const (), libc::getppid as *const ());
        assert!(library_of(0).is_none());
    }

    #[test]
    fn version_is_that_of_the_library_that_has_the_logger() {
        let path = std::env::temp_dir().join(format!("ferrogin-nccl-version-{}.c", std::process::id()));
        let library = path.with_extension("so");
        let source = "void logger(void) {} int ncclGetVersion(int* version) { *version = 23203; return 0; }";
        std::fs::write(&path, source).expect("a file");
        let cc = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&path).output();
        std::fs::remove_file(&path).expect("the file");
        if !cc.is_ok_and(|output| output.status.success()) {
            return ferrogin_test_support::skip("version_is_that_of_the_library_that_has_the_logger", "cc is missing");
        }
        // SAFETY: loading the library runs no code of its own.
        let nccl = unsafe { Library::open(Some(&library), RTLD_LAZY) }.expect("the library");
        std::fs::remove_file(&library).expect("the library's file");
        // SAFETY: only the address is looked at.
        let logger = unsafe { nccl.get::<unsafe extern "C" fn()>(b"logger\0") }.expect("the logger");
        let version = NcclVersion::of_code_at(*logger as *const () as usize).expect("a version");
        assert_eq!(version.to_string(), "NCCL 2.32.3");
        let error = super::check(Some(version), 3).unwrap_err().to_string();
        assert!(error.starts_with("NCCL 2.32.3 with backendVersion 3 is not known"), "{error}");
        assert_eq!(NcclVersion::of_code_at(libc::getpid as *const () as usize), None);
    }

    #[test]
    fn callers_other_than_nccl_have_no_version() {
        assert_eq!(NcclVersion::of_caller(), None);
        assert!(check(None, 2).is_ok());
    }
}
