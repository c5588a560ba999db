//! The boundary between C and this library: the caller's pointers are checked for null, panics don't unwind into the
//! caller, and errors become codes.

use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::code::{self, Code, Outcome};

/// Prints a line on standard error, without a lock that a forked process may have inherited.
pub(crate) fn log(text: std::fmt::Arguments<'_>) {
    let line = format!("softgpu: {text}\n");
    // Standard error may be closed; that's no reason to fail.
    let _ = nix::unistd::write(std::io::stderr(), line.as_bytes());
}

/// Prints a line the first time it is called with this `key`.
pub(crate) fn log_once(key: &'static str, text: std::fmt::Arguments<'_>) {
    static SAID: LazyLock<Mutex<HashSet<&'static str>>> = LazyLock::new(Mutex::default);
    if lock(&SAID).insert(key) {
        log(text);
    }
}

/// Locks a mutex. A poisoned one still holds valid data, because no call panics while changing it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process that called cuInit; 0 if none has.
static STARTED_BY: AtomicU32 = AtomicU32::new(0);

/// Notes that this process calls cuInit.
pub(crate) fn start_driver() {
    STARTED_BY.store(std::process::id(), Ordering::Relaxed);
}

/// Whether this process inherited an initialized driver through `fork`. It has none of the threads behind it, and
/// perhaps a lock that another thread held.
pub(crate) fn is_forked() -> bool {
    let process = STARTED_BY.load(Ordering::Relaxed);
    process != 0 && process != std::process::id()
}

/// The functions that need no initialized driver.
const ANYTIME: [&str; 5] =
    ["cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuGetProcAddress", "cuGetProcAddress_v2"];

/// Runs an entry point's body. In a forked child of a process that called cuInit, the driver isn't initialized, and
/// can't be.
pub(crate) fn entry(name: &'static str, body: impl FnOnce() -> Outcome) -> Code {
    if is_forked() && !ANYTIME.contains(&name) {
        static SAID: AtomicBool = AtomicBool::new(false);
        if !SAID.swap(true, Ordering::Relaxed) {
            log(format_args!(
                "{name}: this process was forked after cuInit, and can't use the driver of its parent; start it with \
                 exec (Python: multiprocessing's method spawn), or call cuInit only after fork"
            ));
        }
        return Code::NOT_INITIALIZED;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Code::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => {
            log(format_args!("{name} failed inside the software GPU: this is a bug in soft-gpu"));
            Code::UNKNOWN
        }
    }
}

/// Defines functions of the driver API.
macro_rules! api {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        #[allow(non_snake_case)]
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($argument: $type),*) -> $crate::code::Code {
            $crate::guard::entry(stringify!($name), move || $body)
        }
    )*};
}

/// A caller's pointer that a call writes to. Only C callers create one, and by the driver API's contract it is null or
/// writable.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null.
    pub(crate) fn present(self) -> Outcome<Self> {
        if self.0.is_null() { Err(Code::INVALID_VALUE) } else { Ok(self) }
    }

    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null.
    pub(crate) fn set(self, value: T) -> Outcome {
        self.present()?.set_at(0, value);
        Ok(())
    }

    /// Writes element `index`, unless the pointer is null.
    pub(crate) fn set_at(self, index: usize, value: T) {
        if !self.0.is_null() {
            let element = self.0.wrapping_add(index);
            // SAFETY: the pointer isn't null, so by the API's contract it is writable for the elements the call is
            // documented to write.
            unsafe { element.write_unaligned(value) };
        }
    }

    /// Reads what the caller stored there, for a value that is both input and output; the pointer must be
    /// [`present`](Self::present).
    pub(crate) fn current(self) -> T
    where
        T: Copy + Default,
    {
        In(self.0.cast_const()).get().unwrap_or_default()
    }

    pub(crate) const fn null() -> Self {
        Self(std::ptr::null_mut())
    }

    /// Makes a pointer from an address that the caller passed as a number.
    pub(crate) fn at_address(address: usize) -> Self {
        Self(address as *mut T)
    }

    /// Returns a pointer to element `index`.
    pub(crate) fn element(self, index: usize) -> Self {
        Self(self.0.wrapping_add(index))
    }

    /// Casts to a pointer to another type.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// A caller's pointer that a call reads from. Only C callers create one, and by the driver API's contract it is null or
/// readable.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Makes a pointer from an address that the caller passed as a number.
    pub(crate) fn at_address(address: usize) -> Self {
        Self(address as *const T)
    }

    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null.
    pub(crate) fn get(self) -> Outcome<T> {
        self.at(0)
    }

    /// Reads element `index`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null.
    pub(crate) fn at(self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let element = self.0.wrapping_add(index);
        // SAFETY: the pointer isn't null, so by the API's contract it is readable for the elements the call is
        // documented to read.
        Ok(unsafe { element.read_unaligned() })
    }

    /// Reads `count` elements.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null.
    pub(crate) fn list(self, count: usize) -> Outcome<Vec<T>> {
        (0..count).map(|index| self.at(index)).collect()
    }
}

impl In<u8> {
    /// Casts to a pointer to another type.
    pub(crate) fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }

    /// Casts to a pointer to a C string.
    pub(crate) fn text(self) -> Text {
        Text(self.0.cast())
    }
}

/// A caller's NUL-terminated string, or null.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null.
    pub(crate) fn bytes<'a>(self) -> Outcome<&'a [u8]> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the pointer isn't null, so by the API's contract it is a NUL-terminated string that stays valid
        // during the call.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// Returns the string, with replacement characters for invalid UTF-8.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for null.
    pub(crate) fn string(self) -> Outcome<String> {
        Ok(String::from_utf8_lossy(self.bytes()?).into_owned())
    }
}

/// Writes `text` and a NUL into `room` bytes, truncating it if it doesn't fit.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for null or a `room` of 0.
pub(crate) fn write_text(to: Out<c_char>, room: usize, text: &str) -> Outcome {
    to.present()?;
    let last = room.checked_sub(1).ok_or(Code::INVALID_VALUE)?;
    let bytes = &text.as_bytes()[..text.len().min(last)];
    bytes.iter().enumerate().for_each(|(index, byte)| to.set_at(index, *byte as c_char));
    to.set_at(bytes.len(), 0);
    Ok(())
}

fn give(out: Out<*const c_char>, text: Option<&'static CStr>) -> Outcome {
    out.set(text.map_or(std::ptr::null(), CStr::as_ptr))?;
    text.map(drop).ok_or(Code::INVALID_VALUE)
}

api! {
    cuGetErrorName(code: c_int, out: Out<*const c_char>) {
        give(out, code::find(code).map(|entry| entry.1))
    }
    cuGetErrorString(code: c_int, out: Out<*const c_char>) {
        give(out, code::find(code).map(|entry| entry.2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_does_not_cross_abi() {
        assert_eq!(entry("test", || panic!("inside")), Code::UNKNOWN);
        assert_eq!(entry("test", || Err(Code::NOT_READY)), Code::NOT_READY);
    }

    #[test]
    fn text_is_cut_to_its_room() {
        let mut room = [1 as c_char; 8];
        write_text(Out(room.as_mut_ptr()), 4, "abcdef").unwrap();
        assert_eq!(room, [b'a' as c_char, b'b' as c_char, b'c' as c_char, 0, 1, 1, 1, 1]);
        assert_eq!(write_text(Out(room.as_mut_ptr()), 0, "a"), Err(Code::INVALID_VALUE));
        assert_eq!(write_text(Out(std::ptr::null_mut()), 4, "a"), Err(Code::INVALID_VALUE));
    }
}
