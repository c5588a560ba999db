//! Reading the operations tables of libfabric objects.
//!
//! Every `fi_ops_*` begins with its size in bytes. A provider built with older headers has a shorter table, and a read past its end
//! would read foreign memory. Entries may also be NULL.

use std::ffi::{CStr, c_void};
use std::ptr;

use crate::bindings::fid;
use crate::{Error, Libfabric};

/// True when the table whose first word is at `size` has a whole entry at `offset`.
///
/// # Safety
/// `size` is null or points to the `size` field of a live operations table.
pub unsafe fn covers(size: *const usize, offset: usize) -> bool {
    // SAFETY: this function's caller passes null or a live table, and the pointer is not null here.
    !size.is_null() && unsafe { size.read() } >= offset + size_of::<usize>()
}

/// `entry!(lib, table, fi_ops_x, name, "fi_call")`: the function in entry `name`, or the error that `fi_call` is not implemented.
/// `table` must be null or point to a live table, which the use of the macro argues.
#[macro_export]
macro_rules! entry {
    ($lib:expr, $table:expr, $type:ident, $name:ident, $call:literal) => {{
        let table: *mut $crate::bindings::$type = $table;
        let offset = ::core::mem::offset_of!($crate::bindings::$type, $name);
        // SAFETY: an operations table is null or static data of a loaded provider.
        let present = unsafe { $crate::table::covers(table.cast(), offset) };
        // SAFETY: `covers` checked that the table has this entry.
        let function = if present { unsafe { (*table).$name } } else { None };
        function.ok_or_else(|| $lib.failure($call, -$crate::bindings::FI_ENOSYS))
    }};
}

/// Closes an object. A refusal is logged, because a drop cannot return it.
///
/// # Safety
/// `fid` is a live object that is not used afterwards.
pub(crate) unsafe fn close(lib: &Libfabric, fid: *mut fid, what: &str) {
    // SAFETY: this function's caller passes a live object.
    let ops = unsafe { (*fid).ops };
    let result = entry!(lib, ops, fi_ops, close, "fi_close").and_then(|close| {
        // SAFETY: the object is live, and this function's caller does not use it afterwards.
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
    // SAFETY: this function's caller passes a live object.
    let ops = unsafe { (*fid).ops };
    let bind = entry!(lib, ops, fi_ops, bind, "fi_bind")?;
    // SAFETY: this function's caller passes two live objects, and keeps `other` open until `fid` is closed.
    lib.check(call, unsafe { bind(fid, other, flags) })?;
    Ok(())
}

/// `fi_open_ops`: a table of provider-specific operations, which lives as long as the provider; None when the object has no table of
/// that name.
///
/// # Safety
/// `fid` is live.
pub(crate) unsafe fn open_ops(lib: &Libfabric, fid: *mut fid, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: this function's caller passes a live object.
    let ops = unsafe { (*fid).ops };
    let open = entry!(lib, ops, fi_ops, ops_open, "fi_open_ops").ok()?;
    let mut table = ptr::null_mut();
    // SAFETY: the object is live and the name NUL-terminated; the provider writes `table` on success only.
    let code = unsafe { open(fid, name.as_ptr(), 0, &mut table, ptr::null_mut()) };
    if code == 0 && !table.is_null() { Some(table) } else { None }
}
