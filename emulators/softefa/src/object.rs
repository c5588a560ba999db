//! Objects that libfabric uses as `struct fid_*` and that hold this provider's state.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use ferrogin_libfabric::bindings as fi;

use super::guard::Code;

/// A type whose first field is the `fid` of its class, so that a pointer to one is a pointer to the other.
///
/// # Safety
/// The type is `repr(C)` and begins with a `fi::fid` (within its `fid_*`), whose `fclass` is `CLASS` and which no
/// other type of this provider has.
pub(super) unsafe trait Object: Sized {
    const CLASS: u32;
}

/// The object behind a `fid` of the application, checked by its class.
///
/// # Errors
/// `EINVAL` for null and for a fid of another class.
///
/// # Safety
/// `fid` is null or a live fid of this provider, and the object is not closed while the reference is used. libfabric's interface
/// makes the application keep both.
pub(super) unsafe fn object<'a, T: Object, F>(fid: *const F) -> Result<&'a T, Code> {
    let head: *const fi::fid = fid.cast();
    if head.is_null() {
        return Err(Code::INVAL);
    }
    // SAFETY: not null, and this function's caller passes a live fid.
    let class = unsafe { (*head).fclass };
    if class != T::CLASS as usize {
        return Err(Code::INVAL);
    }
    // SAFETY: the class shows that the fid is the first field of a `T`, which this function's caller keeps open.
    Ok(unsafe { &*fid.cast() })
}

/// Passes a new object to the application.
///
/// # Safety
/// `out` is null, or a pointer of the application that is writable during the call.
pub(super) unsafe fn give<T: Object, F>(object: T, out: *mut *mut F) -> Result<(), Code> {
    if out.is_null() {
        return Err(Code::INVAL);
    }
    let raw: *mut T = Box::into_raw(Box::new(object));
    // SAFETY: not null, and this function's caller keeps the variable writable.
    unsafe { out.write(raw.cast()) };
    Ok(())
}

/// Takes an object back from the application, to drop it.
///
/// # Safety
/// `fid` was made by [`give`] with this type and is not used any more.
pub(super) unsafe fn take_back<T: Object, F>(fid: *mut F) -> Box<T> {
    // SAFETY: this function's caller passes the pointer that `give` made from a box, for the last time.
    unsafe { Box::from_raw(fid.cast()) }
}

/// A fid of `class` with its operations.
pub(super) fn head(class: u32, context: *mut c_void, ops: &'static fi::fi_ops) -> fi::fid {
    fi::fid { fclass: class as usize, context, ops: table(ops) }
}

/// A table as the structs of libfabric hold it. No code writes to the table.
pub(super) fn table<T>(ops: &'static T) -> *mut T {
    (&raw const *ops).cast_mut()
}

/// The number of objects that were made from this one and are open.
#[derive(Debug, Default)]
pub(super) struct Uses(AtomicU32);

impl Uses {
    pub(super) fn begin(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn end(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// # Errors
    /// `EBUSY` while some are open.
    pub(super) fn none(&self) -> Result<(), Code> {
        if self.0.load(Ordering::Acquire) == 0 { Ok(()) } else { Err(Code::BUSY) }
    }
}
