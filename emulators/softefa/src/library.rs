//! The libfabric that loaded this provider. `fi_info` must come from its allocator, in its layout.

use std::ffi::CStr;
use std::sync::{Mutex, OnceLock, PoisonError};

use ferrogin_libfabric::bindings as fi;

use super::guard::Code;
use soft_nic::config::ConfigError;
use soft_nic::log;
use soft_nic::process::PerProcess;

/// The provider's name.
pub(super) const PROVIDER: &CStr = c"softefa";

type DupInfo = unsafe extern "C" fn(*const fi::fi_info) -> *mut fi::fi_info;
type FreeInfo = unsafe extern "C" fn(*mut fi::fi_info);
type Version = unsafe extern "C" fn() -> u32;

/// Functions of the loaded core.
#[derive(Debug, Clone, Copy)]
pub(super) struct Library {
    dupinfo: DupInfo,
    freeinfo: FreeInfo,
    /// `fi_version()`: major in the upper half, minor in the lower.
    pub version: u32,
}

/// `FI_VERSION(major, minor)`.
pub(super) const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

impl Library {
    /// Returns this process's core.
    ///
    /// # Errors
    /// `ENOSYS` if libfabric is not loaded.
    pub(super) fn get() -> Result<Self, Code> {
        static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
        (*LIBRARY.get_or_init(Self::find)).ok_or(Code::NOSYS)
    }

    fn find() -> Option<Self> {
        let name = c"libfabric.so.1";
        // SAFETY: with RTLD_NOLOAD nothing is loaded and no initialiser runs. The handle is never closed, and this
        // library's mapping keeps the core loaded.
        let mut handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            // The core is linked in, or loaded under another name with global symbols.
            handle = libc::RTLD_DEFAULT;
        }
        macro_rules! symbol {
            ($name:literal, $kind:ty) => {{
                // SAFETY: the handle is live and the name terminated.
                let at = unsafe { libc::dlsym(handle, $name.as_ptr()) };
                if at.is_null() {
                    return None;
                }
                // SAFETY: the type is that of `rdma/fabric.h`, which has not changed since the first release.
                unsafe { std::mem::transmute::<*mut libc::c_void, $kind>(at) }
            }};
        }
        let (dupinfo, freeinfo) = (symbol!(c"fi_dupinfo", DupInfo), symbol!(c"fi_freeinfo", FreeInfo));
        let version = symbol!(c"fi_version", Version);
        // SAFETY: `fi_version` takes no arguments and may be called at any time.
        let version = unsafe { version() };
        Some(Self { dupinfo, freeinfo, version })
    }

    /// Creates an empty `fi_info` with all its parts.
    pub(super) fn new_info(&self) -> Result<Info, Code> {
        // SAFETY: with null, fi_dupinfo returns an empty info.
        let info = unsafe { (self.dupinfo)(std::ptr::null()) };
        if info.is_null() { Err(Code::NOMEM) } else { Ok(Info { raw: info, free: self.freeinfo }) }
    }
}

/// An info that the core allocated.
pub(super) struct Info {
    raw: *mut fi::fi_info,
    free: FreeInfo,
}

impl Info {
    pub(super) fn get(&mut self) -> &mut fi::fi_info {
        // SAFETY: `new_info` made it, and this value has the only pointer to it.
        unsafe { &mut *self.raw }
    }

    /// Links the infos into a list, which then belongs to the application.
    pub(super) fn list(infos: Vec<Self>) -> *mut fi::fi_info {
        infos.into_iter().rev().fold(std::ptr::null_mut(), |next, mut info| {
            info.get().next = next;
            std::mem::ManuallyDrop::new(info).raw
        })
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: `new_info` made it, and this is its last use.
        unsafe { (self.free)(self.raw) };
    }
}

/// Returns a copy of `text` that the core may `free`.
pub(super) fn strdup(text: &CStr) -> Result<*mut std::ffi::c_char, Code> {
    // SAFETY: `text` is terminated.
    let copy = unsafe { libc::strdup(text.as_ptr()) };
    if copy.is_null() { Err(Code::NOMEM) } else { Ok(copy) }
}

/// Returns the text at an application's pointer; `None` for null.
///
/// # Safety
/// `text` is null or a terminated string that lives as long as the result.
pub(super) unsafe fn text<'a>(text: *const std::ffi::c_char) -> Option<&'a CStr> {
    if text.is_null() {
        return None;
    }
    // SAFETY: this function's caller passes null or a terminated string that lives as long as the result.
    Some(unsafe { CStr::from_ptr(text) })
}

/// Logs why an application's call fails, and returns `EINVAL`.
pub(super) fn refuse(call: &str, why: std::fmt::Arguments<'_>) -> Code {
    log::line(format_args!("softefa: {call}: {why}"));
    Code::INVAL
}

/// Does the same as [`refuse`] for an invalid setting.
pub(super) fn refuse_setting(call: &str, error: &ConfigError) -> Code {
    refuse_attribute(call, Code::INVAL, format_args!("{error}"))
}

/// Logs why a call fails, and returns `code`. Programs try attributes and settings many times, so a repeated line is
/// logged once.
pub(super) fn refuse_attribute(call: &str, code: Code, why: std::fmt::Arguments<'_>) -> Code {
    static SAID: PerProcess<Mutex<String>> = PerProcess::new();
    let line = format!("{call}: {why}");
    let mut said = SAID.get().lock().unwrap_or_else(PoisonError::into_inner);
    if *said != line {
        log::line(format_args!("softefa: {line}"));
        *said = line;
    }
    code
}
