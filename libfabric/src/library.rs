//! The shared library, found and loaded at run time, and the six functions looked up in it.

use parking_lot::Mutex;
use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::bindings::{fi_fabric_attr, fi_info, fid_fabric};
use crate::{Error, Version};

type GetInfo = unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const fi_info, *mut *mut fi_info) -> c_int;
type FreeInfo = unsafe extern "C" fn(*mut fi_info);
type DupInfo = unsafe extern "C" fn(*const fi_info) -> *mut fi_info;
type OpenFabric = unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
// These two take any value.
type GetVersion = extern "C" fn() -> u32;
type StrError = extern "C" fn(c_int) -> *const c_char;

/// A loaded libfabric.
///
/// A process has one object per library: loading the same file again returns the same object. It's never unloaded,
/// because providers leave threads and exit handlers behind.
pub struct Libfabric {
    path: PathBuf,
    getinfo: GetInfo,
    freeinfo: FreeInfo,
    dupinfo: DupInfo,
    fabric: OpenFabric,
    version: GetVersion,
    strerror: StrError,
    /// Set once fi_getinfo was called: from then on, this library has read its environment.
    initialised: AtomicBool,
    provider_dirs: Mutex<Vec<PathBuf>>,
}

impl fmt::Debug for Libfabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Libfabric").field("path", &self.path).field("version", &self.version()).finish()
    }
}

static LOADED: Mutex<Vec<Arc<Libfabric>>> = Mutex::new(Vec::new());

/// The object stays mapped until the process exits (dlfcn.h).
const RTLD_NODELETE: c_int = libc::RTLD_NODELETE;

impl Libfabric {
    /// Loads `path`, or the library named by `FERROGIN_LIBFABRIC`, or `libfabric.so.1` from the dynamic linker's path.
    ///
    /// The process keeps its signal dispositions, both here and in the first fi_getinfo, which loads providers.
    ///
    /// # Errors
    /// [`Error::LibraryMissing`], [`Error::LibraryRefused`] or [`Error::SymbolMissing`].
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>, Error> {
        let path = match path {
            Some(path) => path.to_owned(),
            None => default_path(),
        };
        keep_signal_dispositions(|| Self::open(path, 0))
    }

    /// Returns the libfabric that is already in this process. A provider must use the core that loaded it.
    ///
    /// Looks for the library that [`Libfabric::load`] would load, then for any libfabric by its soname, and loads
    /// nothing.
    ///
    /// # Errors
    /// [`Error::LibraryMissing`] if there is none.
    pub fn already_loaded() -> Result<Arc<Self>, Error> {
        Self::open(default_path(), libc::RTLD_NOLOAD).or_else(|_| Self::open(PathBuf::from(SONAME), libc::RTLD_NOLOAD))
    }

    fn open(path: PathBuf, more_flags: c_int) -> Result<Arc<Self>, Error> {
        // RTLD_LOCAL: the process may have a second libfabric, such as that of NCCL's own network plugin, and neither
        // may resolve its symbols to the other's.
        let flags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | more_flags;
        // SAFETY: runs the initialisers of a library that the user named or the system installed as libfabric.
        let library = unsafe { Library::open(Some(&path), flags) };
        let library = library.map_err(|error| {
            // The source is the dynamic linker's text, which names the file.
            let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            if more_flags & libc::RTLD_NOLOAD != 0 || is_missing(&reason) {
                Error::LibraryMissing { path: path.clone(), reason }
            } else {
                Error::LibraryRefused { path: path.clone(), reason }
            }
        })?;
        macro_rules! symbol {
            ($name:literal, $type:ty) => {{
                // SAFETY: rdma/fabric.h declares the symbol with this type. Plain dlsym gives the default symbol
                // version, which takes the current structs of that library.
                let symbol = unsafe { library.get::<$type>(concat!($name, "\0").as_bytes()) };
                *symbol.map_err(|_| Error::SymbolMissing { path: path.clone(), symbol: $name })?
            }};
        }
        let loaded = Self {
            getinfo: symbol!("fi_getinfo", GetInfo),
            freeinfo: symbol!("fi_freeinfo", FreeInfo),
            dupinfo: symbol!("fi_dupinfo", DupInfo),
            fabric: symbol!("fi_fabric", OpenFabric),
            version: symbol!("fi_version", GetVersion),
            strerror: symbol!("fi_strerror", StrError),
            path,
            initialised: AtomicBool::new(false),
            provider_dirs: Mutex::new(Vec::new()),
        };
        let mut all = LOADED.lock();
        if let Some(same) = all.iter().find(|other| ptr::fn_addr_eq(other.getinfo, loaded.getinfo)) {
            return Ok(Arc::clone(same));
        }
        std::mem::forget(library);
        let loaded = Arc::new(loaded);
        all.push(Arc::clone(&loaded));
        log::debug!("libfabric {} from {}", loaded.version(), loaded.path.display());
        Ok(loaded)
    }

    /// Returns the path that the library was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the library's release.
    pub fn version(&self) -> Version {
        Version::from_raw((self.version)())
    }

    /// Returns the API version that calls use: the library's, but none newer than the bindings.
    pub fn api_version(&self) -> Version {
        self.version().min(Version::NEWEST_KNOWN)
    }

    /// Makes libfabric also search `dir` for providers (`lib*-fi.so`), by putting it first in `FI_PROVIDER_PATH`.
    ///
    /// libfabric reads the variable once, in the process's first fi_getinfo, so call this function before that. Setting
    /// the variable stops libfabric from searching for its own loadable providers (those built into it still work),
    /// unless the variable names their directory too.
    ///
    /// # Errors
    /// [`Error::TooLateForProviderDir`] after the first fi_getinfo of this library.
    ///
    /// # Safety
    /// No other thread reads or writes the process environment through the C library during the call.
    pub unsafe fn use_provider_dir(&self, dir: &Path) -> Result<(), Error> {
        let mut dirs = self.provider_dirs.lock();
        let old = std::env::var_os("FI_PROVIDER_PATH").unwrap_or_default();
        if !lists(&old, dir) {
            if self.initialised.load(Ordering::Relaxed) {
                return Err(Error::TooLateForProviderDir { dir: dir.to_owned() });
            }
            // SAFETY: this function's caller keeps other threads from the environment.
            unsafe { std::env::set_var("FI_PROVIDER_PATH", prepend(&old, dir)) };
        }
        if !dirs.iter().any(|known| known == dir) {
            dirs.push(dir.to_owned());
        }
        Ok(())
    }

    /// Returns the first directory that was passed to [`use_provider_dir`](Self::use_provider_dir).
    pub(crate) fn provider_dir(&self) -> Option<PathBuf> {
        self.provider_dirs.lock().first().cloned()
    }

    /// Calls `fi_getinfo`. The caller frees the list.
    ///
    /// # Safety
    /// `node` and `service` are null or NUL-terminated; `hints` is null or made by this library.
    pub(crate) unsafe fn list_infos(
        &self,
        node: *const c_char,
        service: *const c_char,
        flags: u64,
        hints: *const fi_info,
    ) -> Result<*mut fi_info, Error> {
        let api = self.api_version().raw();
        let mut list: *mut fi_info = ptr::null_mut();
        // SAFETY: this function's caller passes valid strings and hints; fi_getinfo only writes `list` on success.
        let mut getinfo = || unsafe { (self.getinfo)(api, node, service, flags, hints, &mut list) };
        let code =
            if self.initialised.swap(true, Ordering::Relaxed) { getinfo() } else { keep_signal_dispositions(getinfo) };
        self.check("fi_getinfo", code)?;
        Ok(list)
    }

    /// Returns libfabric's text for an error code of either sign.
    pub fn error_text(&self, code: i32) -> String {
        let text = (self.strerror)(code.saturating_abs());
        if text.is_null() {
            return String::new();
        }
        // SAFETY: the pointer is not null, as checked, and fi_strerror returns NUL-terminated strings.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Returns the error for a (negative or positive) code that `call` returned.
    pub fn failure(&self, call: &'static str, code: i32) -> Error {
        Error::Call { call, code: code.saturating_abs(), text: self.error_text(code) }
    }

    /// Returns an error if `code` is negative.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<c_int, Error> {
        if code < 0 { Err(self.failure(call, code)) } else { Ok(code) }
    }

    /// Returns an `fi_info` of this library's own size: empty, or a copy of `source`.
    ///
    /// # Safety
    /// `source` is null or an entry made by this library.
    pub(crate) unsafe fn duplicate_info(&self, source: *const fi_info) -> *mut fi_info {
        // SAFETY: this function's caller passes null or an entry that this library made.
        unsafe { (self.dupinfo)(source) }
    }

    /// # Safety
    /// `info` was made by this library and is not used afterwards.
    pub(crate) unsafe fn free_info(&self, info: *mut fi_info) {
        // SAFETY: this function's caller passes an info that this library made, for the last time.
        unsafe { (self.freeinfo)(info) }
    }

    /// # Safety
    /// `attr` is the fabric attribute of an info made by this library.
    pub(crate) unsafe fn open_fabric(&self, attr: *mut fi_fabric_attr, fabric: &mut *mut fid_fabric) -> c_int {
        // SAFETY: this function's caller passes the fabric attribute of an info that this library made.
        unsafe { (self.fabric)(attr, fabric, ptr::null_mut()) }
    }
}

/// Calls `load`, and undoes its changes to signal dispositions.
///
/// Some providers' libraries install handlers when they're loaded. Those of libinfinipath, which Debian's libfabric
/// links to, call exit() on SIGINT and SIGTERM, where the process may hang, and hide SIGINT from Python. If another
/// thread of the program installs a handler during the call, it is lost.
fn keep_signal_dispositions<T>(load: impl FnOnce() -> T) -> T {
    // With two threads at once, the second would find the handlers that the first one's library installed.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let before: Vec<_> = (1..=libc::SIGRTMAX()).filter_map(|signal| Some((signal, disposition(signal)?))).collect();
    let result = load();
    for (signal, old) in before {
        let is_same = |new: libc::sigaction| (new.sa_sigaction, new.sa_flags) == (old.sa_sigaction, old.sa_flags);
        if !disposition(signal).is_some_and(is_same) {
            // SAFETY: the signal had this disposition, so its handler is valid. SIGKILL and SIGSTOP never differ.
            unsafe { libc::sigaction(signal, &old, ptr::null_mut()) };
        }
    }
    result
}

/// Returns a signal's disposition; `None` for the C library's own signals.
fn disposition(signal: c_int) -> Option<libc::sigaction> {
    // SAFETY: zeros are a valid struct: the default action, no flags, an empty mask.
    let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action, the call only writes the current one to `found`.
    (unsafe { libc::sigaction(signal, ptr::null(), &mut found) } == 0).then_some(found)
}

/// Returns true if a file wasn't found. The dynamic linker reports no code, but its text ends with the system's.
fn is_missing(reason: &str) -> bool {
    let text = std::io::Error::from_raw_os_error(libc::ENOENT).to_string();
    text.split(" (os error").next().is_some_and(|text| reason.contains(text))
}

const SONAME: &str = "libfabric.so.1";

fn default_path() -> PathBuf {
    match std::env::var_os("FERROGIN_LIBFABRIC") {
        Some(path) if !path.is_empty() => PathBuf::from(path),
        _ => PathBuf::from(SONAME),
    }
}

pub(crate) fn c_string(what: &str, text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::Argument { what: format!("{what} {text:?} has a NUL byte in it: remove it") })
}

/// Returns true if the provider search path `path` names `dir`.
fn lists(path: &OsStr, dir: &Path) -> bool {
    let path = path.as_bytes();
    let path = path.strip_prefix(b"@").unwrap_or(path);
    path.split(|&byte| byte == b':').any(|entry| entry == dir.as_os_str().as_bytes())
}

/// Puts `dir` before `path`'s first entry. A leading `@`, which prefers the first provider found over the newest, stays
/// in front.
fn prepend(path: &OsStr, dir: &Path) -> OsString {
    let (mark, rest) = match path.as_bytes().strip_prefix(b"@") {
        Some(rest) => ("@", rest),
        None => ("", path.as_bytes()),
    };
    let mut new = OsString::from(mark);
    new.push(dir);
    if !rest.is_empty() {
        new.push(":");
        new.push(OsStr::from_bytes(rest));
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn provider_directory_is_put_before_other_directories() {
        let dir = Path::new("/a/b");
        assert_eq!(prepend(OsStr::new(""), dir), "/a/b");
        assert_eq!(prepend(OsStr::new("/x:/y"), dir), "/a/b:/x:/y");
        assert_eq!(prepend(OsStr::new("@/x"), dir), "@/a/b:/x");
        assert_eq!(prepend(OsStr::new("@"), dir), "@/a/b");
        assert!(lists(OsStr::new("@/a/b:/c"), dir));
        assert!(lists(OsStr::new("/c:/a/b"), dir));
        assert!(!lists(OsStr::new("/a/bc"), dir));
        assert!(!lists(OsStr::new(""), dir));
    }

    #[test]
    fn missing_library_error_names_path_and_setting() {
        let error = Libfabric::load(Some(Path::new("/nonexistent/libfabric.so.1"))).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("/nonexistent/libfabric.so.1"), "{text}");
        assert!(text.contains("FERROGIN_LIBFABRIC") && text.contains("install it"), "{text}");
        // A file that exists needn't be installed.
        let error = Libfabric::load(Some(Path::new("/dev/null"))).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::LibraryRefused { .. }) && !text.contains("install"), "{text}");
        assert!(text.contains("/dev/null") && text.contains("FERROGIN_LIBFABRIC"), "{text}");
    }

    #[test]
    fn foreign_library_is_refused() {
        let error = Libfabric::load(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(matches!(error, Error::SymbolMissing { symbol: "fi_getinfo", .. }), "{error}");
    }
}
