//! The C ABI, declared in `ferrogin/host.h`.
//!
//! Every function checks its pointers. Handles are numbers in the plugin's [`registry`], so a wrong or closed handle is
//! an error. An error or a panic becomes a return code, and a text for the calling thread.
#![allow(unsafe_code)]

use crate::comm::{Comm, Options};
use crate::context::{Context, ContextOptions, PeerFailure};
use crate::error::{Error, Status};
use crate::window::{Memory, Window};
use ferrogin_device::explain;
use ferrogin_ffi::ext::ContextExt;
use ferrogin_ffi::nccl;
use ferrogin_rendezvous::ring::Step;
use nccl_gin_ferrogin::comm::Handles;
use nccl_gin_ferrogin::error::Error as PluginError;
use nccl_gin_ferrogin::registry::{self, Kind};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

/// `ferrogin_options`: see [`Options`].
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct COptions {
    /// Size of the caller's struct in bytes.
    pub size: u64,
    /// [`Options::card`].
    pub card: u32,
    /// Zero.
    pub reserved: u32,
}
ferrogin_ffi::assert_layout!(COptions, size 16, align 8, { size @ 0, card @ 8, reserved @ 12 });

/// `ferrogin_context_options`: see [`ContextOptions`].
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct CContextOptions {
    /// Size of the caller's struct in bytes.
    pub size: u64,
    /// [`ContextOptions::contexts`].
    pub contexts: u32,
    /// [`ContextOptions::signals`].
    pub signals: u32,
    /// [`ContextOptions::counters`].
    pub counters: u32,
    /// [`ContextOptions::depth`].
    pub depth: u32,
    /// [`ContextOptions::traffic_class`].
    pub traffic_class: u32,
    /// [`ContextOptions::timeout`] in milliseconds; 0 means the default, and [`NO_TIMEOUT`] no limit.
    pub timeout_ms: u32,
    /// [`ContextOptions::on_peer_failure`]: 0 means the default, 1 abort, 2 isolate.
    pub on_peer_failure: u32,
    /// Zero.
    pub reserved: u32,
}
ferrogin_ffi::assert_layout!(CContextOptions, size 40, align 8, {
    size @ 0, contexts @ 8, signals @ 12, counters @ 16, depth @ 20, traffic_class @ 24, timeout_ms @ 28, on_peer_failure @ 32,
    reserved @ 36,
});

/// `FERROGIN_NO_TIMEOUT`.
pub const NO_TIMEOUT: u32 = u32::MAX;

/// `ferrogin_allgather`: gathers the `bytes` at every rank's `own` into `all`, in rank order. Returns 0, or another
/// value on failure.
pub type AllgatherFn =
    unsafe extern "C" fn(arg: *mut c_void, own: *const c_void, all: *mut c_void, bytes: usize) -> c_int;

/// A communicator, and its windows and contexts that the caller hasn't closed.
struct OpenComm {
    comm: Comm,
    windows: Handles,
    contexts: Handles,
}

struct OpenWindow {
    window: Window,
    comm: Arc<OpenComm>,
}

struct OpenContext {
    context: Context,
    comm: Arc<OpenComm>,
}

/// Records `result`'s error for `ferrogin_error`, and returns its code.
fn report(result: std::thread::Result<Result<(), Error>>) -> c_int {
    let (status, text) = match result {
        Ok(Ok(())) => return nccl::SUCCESS,
        Ok(Err(error)) => (error.status(), error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            (Status::Internal, format!("internal error, please report it: {text}"))
        }
    };
    explain::set(&text);
    status as c_int
}

/// Runs a call's body, except in a forked child of the process that opened the handles: the threads behind the handles
/// run only in the parent.
fn guard(body: impl FnOnce() -> Result<(), Error>) -> c_int {
    let checked = || match registry::forked_from() {
        Some(parent) => Err(PluginError::Forked { parent, child: std::process::id() }.into()),
        None => body(),
    };
    report(catch_unwind(AssertUnwindSafe(checked)))
}

/// Like [`guard`], for a call that returns a pointer; null on failure.
fn guard_pointer(body: impl FnOnce() -> Result<*mut c_void, Error>) -> *mut c_void {
    let mut pointer = null_mut();
    guard(|| {
        pointer = body()?;
        Ok(())
    });
    pointer
}

fn null(what: &'static str) -> Error {
    PluginError::Null(what).into()
}

fn is_valid<T>(pointer: *const T) -> bool {
    !pointer.is_null() && pointer.addr().is_multiple_of(align_of::<T>())
}

/// Writes an output parameter, called `what`.
fn set<T>(pointer: *mut T, value: T, what: &'static str) -> Result<(), Error> {
    if !is_valid(pointer) {
        return Err(null(what));
    }
    // SAFETY: aligned and not null, as just checked. The caller passes the address of a `T` that is valid for writes
    // during the call.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Reads an options struct, which begins with its size. A caller built for another version may pass fewer fields, or
/// more if they're zero.
fn options<T: Copy + Default>(pointer: *const T, what: &'static str) -> Result<T, Error> {
    const SIZES: std::ops::RangeInclusive<u64> = 16..=4096;
    let mut value = T::default();
    if pointer.is_null() {
        return Ok(value);
    }
    if !is_valid(pointer) {
        return Err(null(what));
    }
    // SAFETY: aligned and not null, as just checked. The caller passes the address of a struct that begins with its
    // size.
    let size = unsafe { pointer.cast::<u64>().read() };
    if !SIZES.contains(&size) {
        return Err(Error::Argument(format!(
            "{what}->size is {size}: set it to the size of the struct, as the initialiser in ferrogin/host.h does"
        )));
    }
    let (size, known) = (size as usize, size_of::<T>());
    // SAFETY: the struct has `size` bytes, as it says.
    let bytes = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), size) };
    if bytes.iter().skip(known).any(|byte| *byte != 0) {
        return Err(Error::Usage(format!(
            "{what} has options that this library, {}, does not know: install the library that belongs to your ferrogin/host.h",
            env!("CARGO_PKG_VERSION")
        )));
    }
    // SAFETY: `value` and `bytes` have at least `min(size, known)` bytes and don't overlap. A `T` consists of integers.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (&raw mut value).cast(), size.min(known)) };
    Ok(value)
}

fn options_of_open(pointer: *const COptions) -> Result<Options, Error> {
    Ok(Options { card: options(pointer, "options")?.card })
}

fn memory(comm: &Comm, kind: u32) -> Result<Memory, Error> {
    [Memory::Host, Memory::Device].into_iter().find(|memory| *memory as u32 == kind).ok_or_else(|| {
        let text =
            format!("memory kind {kind} is unknown: pass FERROGIN_MEMORY_HOST (1) or FERROGIN_MEMORY_DEVICE (2)");
        comm.fail(Step::RegisterWindow, Error::Argument(text))
    })
}

fn keep<T: Send + Sync + 'static>(kind: Kind, object: Arc<T>) -> Result<*mut c_void, Error> {
    registry::insert(kind, object)
        .ok_or_else(|| Error::Usage(format!("too many {}s are open in this process: close some of them", kind.name())))
}

fn comm(handle: *const c_void) -> Result<Arc<OpenComm>, Error> {
    Ok(registry::get(handle, Kind::HostComm)?)
}

/// Returns the error of a call during which another thread closed the communicator.
fn closed() -> Error {
    Error::Usage("another thread closed the communicator during the call: close it after the last call".to_owned())
}

fn open(out: *mut *mut c_void, open: impl FnOnce() -> Result<Comm, Error>) -> c_int {
    guard(|| {
        set(out, null_mut(), "out")?;
        let comm = OpenComm { comm: open()?, windows: Handles::default(), contexts: Handles::default() };
        set(out, keep(Kind::HostComm, Arc::new(comm))?, "out")
    })
}

/// Returns the text of the calling thread's last `ferrogin_*` or `fgin_*` error, valid until its next one; empty if
/// there was none.
#[unsafe(no_mangle)]
pub extern "C" fn ferrogin_error() -> *const c_char {
    explain::last()
}

/// Returns this library's release.
#[unsafe(no_mangle)]
pub extern "C" fn ferrogin_version() -> *const c_char {
    const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    };
    VERSION.as_ptr()
}

/// See [`Comm::open`].
///
/// # Safety
/// Pointers are null or valid, as `ferrogin/host.h` says; `allgather` doesn't unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_open(
    rank: u32,
    ranks: u32,
    allgather: Option<AllgatherFn>,
    arg: *mut c_void,
    options: *const COptions,
    out: *mut *mut c_void,
) -> c_int {
    self::open(out, || {
        let options = options_of_open(options)?;
        let allgather = allgather.ok_or_else(|| null("allgather"))?;
        Comm::open(rank as usize, ranks as usize, &options, |own| {
            let mut all = vec![0u8; own.len() * ranks as usize];
            // SAFETY: the caller's function reads `own.len()` bytes and writes `ranks` times as many, which `all` has
            // room for.
            let code = unsafe { allgather(arg, own.as_ptr().cast(), all.as_mut_ptr().cast(), own.len()) };
            match code {
                0 => Ok(all.chunks_exact(own.len()).map(<[u8]>::to_vec).collect()),
                code => Err(Error::Allgather(format!("the function returned {code}"))),
            }
        })
    })
}

/// See [`Comm::join`].
///
/// # Safety
/// Pointers are null or valid, as `ferrogin/host.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_open_at(
    address: *const c_char,
    rank: u32,
    ranks: u32,
    options: *const COptions,
    out: *mut *mut c_void,
) -> c_int {
    self::open(out, || {
        let options = options_of_open(options)?;
        if address.is_null() {
            return Err(null("address"));
        }
        // SAFETY: not null; the caller passes a NUL-terminated string.
        let address = unsafe { CStr::from_ptr(address) }.to_str();
        let address =
            address.map_err(|_| Error::Argument("address is not UTF-8: pass host:port of rank 0".to_owned()))?;
        Comm::join(address, rank as usize, ranks as usize, &options)
    })
}

/// See [`Comm::from_env`].
///
/// # Safety
/// Pointers are null or valid, as `ferrogin/host.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_open_env(options: *const COptions, out: *mut *mut c_void) -> c_int {
    self::open(out, || Comm::from_env(&options_of_open(options)?))
}

/// Outputs the rank and the number of ranks.
///
/// # Safety
/// Pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_rank(comm: *const c_void, rank: *mut u32, ranks: *mut u32) -> c_int {
    guard(|| {
        let open = self::comm(comm)?;
        set(rank, open.comm.rank() as u32, "rank")?;
        set(ranks, open.comm.ranks() as u32, "ranks")
    })
}

/// This rank's position in [`Comm::lsa_ranks`], and how many they are.
///
/// # Safety
/// Pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_lsa_rank(comm: *const c_void, lsa_rank: *mut u32, lsa_ranks: *mut u32) -> c_int {
    guard(|| {
        let open = self::comm(comm)?;
        let (ranks, own) = (open.comm.lsa_ranks(), open.comm.rank());
        set(lsa_rank, ranks.iter().take_while(|rank| **rank < own).count() as u32, "lsa_rank")?;
        set(lsa_ranks, ranks.len() as u32, "lsa_ranks")
    })
}

/// An element of [`Comm::lsa_ranks`].
///
/// # Safety
/// The pointer is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_lsa_world_rank(comm: *const c_void, lsa_rank: u32, rank: *mut u32) -> c_int {
    guard(|| {
        let open = self::comm(comm)?;
        set(rank, open.comm.inner.check_lsa_rank(lsa_rank as usize)? as u32, "rank")
    })
}

/// See [`Comm::barrier`].
#[unsafe(no_mangle)]
pub extern "C" fn ferrogin_barrier(comm: *mut c_void) -> c_int {
    guard(|| self::comm(comm)?.comm.barrier())
}

/// Closes a communicator, after closing those of its contexts and windows that are still open.
///
/// # Safety
/// No kernel uses a context or window of the communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_close(comm: *mut c_void) -> c_int {
    guard(|| {
        let open = registry::remove::<OpenComm>(comm, Kind::HostComm)?;
        open.comm.drain();
        for handle in open.contexts.close() {
            drop(registry::remove::<OpenContext>(handle, Kind::HostContext));
        }
        for handle in open.windows.close() {
            drop(registry::remove::<OpenWindow>(handle, Kind::HostWindow));
        }
        Ok(())
    })
}

fn open_window(comm: *mut c_void, out: *mut *mut c_void, open: impl FnOnce(&Comm) -> Result<Window, Error>) -> c_int {
    guard(|| {
        set(out, null_mut(), "out")?;
        let comm = self::comm(comm)?;
        let window = OpenWindow { window: open(&comm.comm)?, comm: comm.clone() };
        let handle = keep(Kind::HostWindow, Arc::new(window))?;
        if !comm.windows.add(handle) {
            drop(registry::remove::<OpenWindow>(handle, Kind::HostWindow));
            return Err(closed());
        }
        set(out, handle, "out")
    })
}

/// See [`Comm::allocate`].
///
/// # Safety
/// Pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_window_allocate(
    comm: *mut c_void,
    bytes: usize,
    kind: u32,
    out: *mut *mut c_void,
) -> c_int {
    open_window(comm, out, |comm| comm.allocate(bytes, memory(comm, kind)?))
}

/// See [`Comm::register`].
///
/// # Safety
/// Pointers are null or valid; the memory stays allocated until the window is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_window_register(
    comm: *mut c_void,
    address: *mut c_void,
    bytes: usize,
    kind: u32,
    out: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller keeps the memory allocated.
    open_window(comm, out, |comm| unsafe { comm.register(address, bytes, memory(comm, kind)?) })
}

/// See [`Comm::register_dma_buf`].
///
/// # Safety
/// Pointers are null or valid; the memory stays allocated until the window is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_window_register_dma_buf(
    comm: *mut c_void,
    address: *mut c_void,
    bytes: usize,
    fd: c_int,
    offset: u64,
    out: *mut *mut c_void,
) -> c_int {
    open_window(comm, out, |comm| comm.registered(address, bytes, Memory::Device, Some((fd, offset))))
}

fn window(handle: *const c_void) -> Result<Arc<OpenWindow>, Error> {
    Ok(registry::get(handle, Kind::HostWindow)?)
}

/// See [`Window::handle`].
#[unsafe(no_mangle)]
pub extern "C" fn ferrogin_window_handle(window: *const c_void) -> *mut c_void {
    guard_pointer(|| Ok(self::window(window)?.window.handle().0))
}

/// See [`Window::address`].
#[unsafe(no_mangle)]
pub extern "C" fn ferrogin_window_address(window: *const c_void) -> *mut c_void {
    guard_pointer(|| Ok(self::window(window)?.window.address()))
}

/// See [`Window::host_address`].
#[unsafe(no_mangle)]
pub extern "C" fn ferrogin_window_host_address(window: *const c_void) -> *mut c_void {
    guard_pointer(|| {
        self::window(window)?.window.host_address().ok_or_else(|| {
            Error::Usage("the window is in GPU memory, which has no host address: copy it with CUDA".to_owned())
        })
    })
}

/// See [`Window::lsa_address`].
#[unsafe(no_mangle)]
pub extern "C" fn ferrogin_window_lsa_address(window: *const c_void, lsa_rank: u32) -> *mut c_void {
    guard_pointer(|| self::window(window)?.window.lsa_address(lsa_rank as usize))
}

/// See [`Window::len_on`].
///
/// # Safety
/// `bytes` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_window_size(window: *const c_void, rank: u32, bytes: *mut usize) -> c_int {
    guard(|| set(bytes, self::window(window)?.window.len_on(rank as usize)?, "bytes"))
}

/// Deregisters a window, and frees its memory if `ferrogin_window_allocate` allocated it. On an error, the window stays
/// open.
///
/// # Safety
/// No kernel uses the window.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_window_free(window: *mut c_void) -> c_int {
    guard(|| {
        let open = self::window(window)?;
        open.window.check_unused()?;
        open.comm.windows.take(window);
        drop(registry::remove::<OpenWindow>(window, Kind::HostWindow)?);
        Ok(())
    })
}

/// See [`Comm::context`].
///
/// # Safety
/// Pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_context_create(
    comm: *mut c_void,
    options: *const CContextOptions,
    out: *mut *mut c_void,
) -> c_int {
    guard(|| {
        set(out, null_mut(), "out")?;
        let comm = self::comm(comm)?;
        let options = self::options(options, "options").map_err(|error| comm.comm.fail(Step::CreateContext, error))?;
        let CContextOptions { contexts, signals, counters, depth, traffic_class, timeout_ms, on_peer_failure, .. } =
            options;
        let timeout = match timeout_ms {
            0 => None,
            NO_TIMEOUT => Some(Duration::ZERO),
            ms => Some(Duration::from_millis(ms.into())),
        };
        let on_peer_failure = match on_peer_failure {
            0 => None,
            1 => Some(PeerFailure::Abort),
            2 => Some(PeerFailure::Isolate),
            _ => {
                let text = format!(
                    "on_peer_failure = {on_peer_failure} is unknown: pass FERROGIN_ABORT (1), FERROGIN_ISOLATE (2), or 0"
                );
                return Err(comm.comm.fail(Step::CreateContext, Error::Argument(text)));
            }
        };
        let options = ContextOptions { contexts, signals, counters, depth, traffic_class, timeout, on_peer_failure };
        let context = comm.comm.context(&options)?;
        let handle = keep(Kind::HostContext, Arc::new(OpenContext { context, comm: comm.clone() }))?;
        if !comm.contexts.add(handle) {
            drop(registry::remove::<OpenContext>(handle, Kind::HostContext));
            return Err(closed());
        }
        set(out, handle, "out")
    })
}

fn context(handle: *const c_void) -> Result<Arc<OpenContext>, Error> {
    Ok(registry::get(handle, Kind::HostContext)?)
}

/// See [`Context::handle`].
#[unsafe(no_mangle)]
pub extern "C" fn ferrogin_context_handle(context: *const c_void) -> *mut c_void {
    guard_pointer(|| Ok(self::context(context)?.context.handle()))
}

/// See [`Context::device`].
///
/// # Safety
/// `out` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_context_device(
    context: *const c_void,
    id: u32,
    out: *mut *const ContextExt,
) -> c_int {
    guard(|| {
        set(out, std::ptr::null(), "out")?;
        set(out, self::context(context)?.context.device(id)?.as_ptr(), "out")
    })
}

/// See [`Context::check`].
#[unsafe(no_mangle)]
pub extern "C" fn ferrogin_context_check(context: *const c_void) -> c_int {
    guard(|| self::context(context)?.context.check())
}

/// See [`Context::lost_ranks`]. Outputs the number of lost ranks, and up to `max` of them.
///
/// # Safety
/// `n` is null or valid, and `ranks` has room for `max` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_lost_ranks(context: *const c_void, ranks: *mut u32, max: u32, n: *mut u32) -> c_int {
    guard(|| {
        let lost = self::context(context)?.context.lost_ranks();
        for (i, rank) in lost.iter().enumerate().take(max as usize) {
            set(ranks.wrapping_add(i), *rank as u32, "ranks")?;
        }
        set(n, lost.len() as u32, "n")
    })
}

/// See [`Context::acknowledge_lost`].
///
/// # Safety
/// `ranks` has `n` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_acknowledge_lost(context: *mut c_void, ranks: *const u32, n: u32) -> c_int {
    guard(|| {
        if n != 0 && !is_valid(ranks) {
            return Err(null("ranks"));
        }
        // SAFETY: aligned and not null unless there are none, as just checked; the caller vouches for the numbers.
        let ranks = (0..n as usize).map(|i| unsafe { ranks.wrapping_add(i).read() } as usize).collect::<Vec<_>>();
        self::context(context)?.context.acknowledge_lost(&ranks)
    })
}

/// Destroys contexts, once what kernels have posted on them is delivered.
///
/// # Safety
/// No kernel uses them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferrogin_context_destroy(context: *mut c_void) -> c_int {
    guard(|| {
        let open = registry::remove::<OpenContext>(context, Kind::HostContext)?;
        open.comm.contexts.take(context);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: the string lives until the next error of this thread.
        unsafe { CStr::from_ptr(ferrogin_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn panic_becomes_an_internal_error_of_this_thread() {
        assert_eq!(last(), "");
        assert_eq!(guard(|| panic!("the {} queue", "send")), Status::Internal as c_int);
        assert_eq!(last(), "internal error, please report it: the send queue");
        assert!(guard_pointer(|| Err(Error::Usage("a\0b".to_owned()))).is_null());
        assert_eq!(last(), "a?b");
        assert_eq!(std::thread::spawn(last).join().unwrap(), "");
        assert_eq!((guard(|| Ok(())), last().as_str()), (0, "a?b"));
    }
}
