//! Reading the operations tables of libfabric objects.
//!
//! Every `fi_ops_*` starts with its size in bytes: a provider built with older headers has a shorter table, and reading
//! past it would be reading foreign memory. Entries may also be NULL.

use std::ffi::{CStr, c_void};
use std::ptr;

use crate::bindings::fid;
use crate::{Error, Libfabric};

/// True when the table whose first word is at `size` has a whole entry at `offset`.
///
/// # Safety
/// `size` is null or points to the `size` field of a live operations table.
pub unsafe fn covers(size: *const usize, offset: usize) -> bool {
    // SAFETY: not null, and then live by the caller's promise.
    !size.is_null() && unsafe { size.read() } >= offset + size_of::<usize>()
}

/// `entry!(lib, table, fi_ops_x, name, "fi_call")`: the function in entry `name`, or the error that `fi_call` is not
/// implemented. `table` must be null or point to a live table (the caller says why).
#[macro_export]
macro_rules! entry {
    ($lib:expr, $table:expr, $type:ident, $name:ident, $call:literal) => {{
        let table: *mut $crate::bindings::$type = $table;
        let offset = ::core::mem::offset_of!($crate::bindings::$type, $name);
        // SAFETY: operations tables are static data of a loaded provider, or null.
        let present = unsafe { $crate::table::covers(table.cast(), offset) };
        // SAFETY: `covers` said that the table reaches over this entry.
        let function = if present { unsafe { (*table).$name } } else { None };
        function.ok_or_else(|| $lib.failure($call, -$crate::bindings::FI_ENOSYS))
    }};
}

/// Closes an object; a refusal is logged, because there is nothing else to do about it in a drop.
///
/// # Safety
/// `fid` is a live object that is not used afterwards.
pub(crate) unsafe fn close(lib: &Libfabric, fid: *mut fid, what: &str) {
    // SAFETY: live, by the caller's promise.
    let ops = unsafe { (*fid).ops };
    let result = entry!(lib, ops, fi_ops, close, "fi_close").and_then(|close| {
        // SAFETY: closed once, by the caller's promise.
        lib.check("fi_close", unsafe { close(fid) })
    });
    if let Err(error) = result {
        log::warn!("closing {what}: {error}");
    }
}

/// `fi_*_bind`: ties `other` to the object `fid`.
///
/// # Safety
/// Both are live, and `other` stays so until `fid` is closed.
pub(crate) unsafe fn bind(
    lib: &Libfabric,
    fid: *mut fid,
    other: *mut fid,
    flags: u64,
    call: &'static str,
) -> Result<(), Error> {
    // SAFETY: live, by the caller's promise.
    let ops = unsafe { (*fid).ops };
    let bind = entry!(lib, ops, fi_ops, bind, "fi_bind")?;
    // SAFETY: by the caller's promise.
    lib.check(call, unsafe { bind(fid, other, flags) })?;
    Ok(())
}

/// `fi_open_ops`: a table of provider-specific operations, which lives as long as the provider; None when the object does
/// not know the name.
///
/// # Safety
/// `fid` is live.
pub(crate) unsafe fn open_ops(lib: &Libfabric, fid: *mut fid, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: live, by the caller's promise.
    let ops = unsafe { (*fid).ops };
    let open = entry!(lib, ops, fi_ops, ops_open, "fi_open_ops").ok()?;
    let mut table = ptr::null_mut();
    // SAFETY: a live object and a NUL-terminated name; `table` is written on success only.
    let code = unsafe { open(fid, name.as_ptr(), 0, &mut table, ptr::null_mut()) };
    if code == 0 && !table.is_null() { Some(table) } else { None }
}
