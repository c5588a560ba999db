//! Open libfabric objects, and reading their operations tables.
//!
//! Every `fi_ops_*` begins with its size in bytes. A provider built with older headers has a shorter table, and reading
//! past its end would read unrelated memory. Entries may also be NULL.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use crate::bindings::{self, fid};
use crate::{Error, Libfabric, entry};

/// A struct that begins with a [`fid`].
///
/// # Safety
/// It does, and libfabric allows calls on the object from several threads, given [`crate::Domain`]'s `FI_THREAD_SAFE`.
pub unsafe trait Fid {
    /// What messages call the object.
    const WHAT: &str;
}

macro_rules! fids {
    ($($name:ident: $what:literal;)*) => {$(
        // SAFETY: libfabric's struct begins with a fid, and providers serialise the calls on it.
        unsafe impl Fid for bindings::$name {
            const WHAT: &str = $what;
        }
    )*};
}
fids! {
    fid_fabric: "a fabric";
    fid_domain: "a domain";
    fid_av: "an address vector";
    fid_cq: "a completion queue";
    fid_eq: "an event queue";
    fid_cntr: "a counter";
    fid_ep: "an endpoint";
    fid_mr: "a memory region";
    fid_wait: "a wait set";
}

/// An open object, closed on drop. Its owner drops it before what it was opened on, and after what it's bound to.
pub struct Object<T: Fid> {
    raw: *mut T,
    lib: Arc<Libfabric>,
}

// SAFETY: the provider serialises access, by `Fid`'s contract; only the last owner closes the object.
unsafe impl<T: Fid> Send for Object<T> {}
// SAFETY: the provider serialises access from several threads.
unsafe impl<T: Fid> Sync for Object<T> {}

impl<T: Fid> Object<T> {
    /// Opens an object through `open`, which calls libfabric's function `call`.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub(crate) fn open(
        lib: &Arc<Libfabric>,
        call: &'static str,
        open: impl FnOnce(&mut *mut T) -> c_int,
    ) -> Result<Self, Error> {
        let mut raw = ptr::null_mut();
        lib.check(call, open(&mut raw))?;
        Ok(Self { raw, lib: Arc::clone(lib) })
    }

    /// Returns the libfabric struct, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut T {
        self.raw
    }

    pub(crate) fn fid(&self) -> *mut fid {
        self.raw.cast()
    }

    /// Returns the object's library.
    pub fn library(&self) -> &Arc<Libfabric> {
        &self.lib
    }

    /// Opens a table of provider-specific operations with `fi_open_ops`. It lives as long as the provider; `None` if
    /// the object has no table of that name.
    pub(crate) fn open_ops(&self, name: &CStr) -> Option<*mut c_void> {
        let open = entry!(self, fi_ops, ops_open, "fi_open_ops").ok()?;
        let mut table = ptr::null_mut();
        // SAFETY: the object is open and the name NUL-terminated; the provider only writes `table` on success.
        let code = unsafe { open(self.fid(), name.as_ptr(), 0, &mut table, ptr::null_mut()) };
        if code == 0 && !table.is_null() { Some(table) } else { None }
    }
}

impl<T: Fid> Drop for Object<T> {
    /// Logs a failure, because a drop can't return it.
    fn drop(&mut self) {
        let result = entry!(self, fi_ops, close, "fi_close").and_then(|close| {
            // SAFETY: the object is open, and this is its last use. Objects that depend on it hold it open.
            self.lib.check("fi_close", unsafe { close(self.fid()) })
        });
        if let Err(error) = result {
            log::warn!("closing {}: {error}", T::WHAT);
        }
    }
}

/// Returns true if the table whose first word is at `size` has a whole entry at `offset`.
///
/// # Safety
/// `size` is null or points to the `size` field of a live operations table.
pub unsafe fn covers(size: *const usize, offset: usize) -> bool {
    // SAFETY: this function's caller passes null or a live table, and the pointer is not null here.
    !size.is_null() && unsafe { size.read() } >= offset + size_of::<usize>()
}

/// `field!(object, name)`: a field of an [`Object`](crate::table::Object)'s struct that every supported release has.
#[macro_export]
macro_rules! field {
    ($object:expr, $name:ident) => {{
        let object: &$crate::table::Object<_> = $object;
        // SAFETY: the object is open. Its struct may be an older release's, so this makes no reference to the whole.
        unsafe { (*object.as_ptr()).$name }
    }};
}

/// `entry!(object, field: fi_ops_x, name, "fi_call")`: the function in entry `name` of the table in an
/// [`Object`](crate::table::Object)'s field, or the error that `fi_call` isn't implemented. Without a field: of every
/// object's `fi_ops`.
#[macro_export]
macro_rules! entry {
    ($object:expr, fi_ops, $name:ident, $call:literal) => {{
        let object: &$crate::table::Object<_> = $object;
        // SAFETY: the object is open, and its struct begins with a fid.
        $crate::entry!(@table object, unsafe { (*object.as_ptr().cast::<$crate::bindings::fid>()).ops }, fi_ops, $name, $call)
    }};
    ($object:expr, $field:ident: $type:ident, $name:ident, $call:literal) => {{
        let object: &$crate::table::Object<_> = $object;
        $crate::entry!(@table object, $crate::field!(object, $field), $type, $name, $call)
    }};
    (@table $object:ident, $table:expr, $type:ident, $name:ident, $call:literal) => {{
        let table: *mut $crate::bindings::$type = $table;
        let offset = ::core::mem::offset_of!($crate::bindings::$type, $name);
        // SAFETY: an operations table is null or static data of a loaded provider.
        let present = unsafe { $crate::table::covers(table.cast(), offset) };
        // SAFETY: `covers` checked that the table has this entry.
        let function = if present { unsafe { (*table).$name } } else { None };
        function.ok_or_else(|| $object.library().failure($call, -$crate::bindings::FI_ENOSYS))
    }};
}
