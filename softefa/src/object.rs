//! Objects that libfabric sees as `struct fid_*` and that are more behind it.

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
/// `fid` is null or a live fid of this provider; the object is not closed while the reference is used. Both are the
/// application's duty by the interface.
pub(super) unsafe fn object<'a, T: Object, F>(fid: *const F) -> Result<&'a T, Code> {
    let head: *const fi::fid = fid.cast();
    if head.is_null() {
        return Err(Code::INVAL);
    }
    // SAFETY: a live fid by this function's contract.
    let class = unsafe { (*head).fclass };
    if class != T::CLASS as usize {
        return Err(Code::INVAL);
    }
    // SAFETY: the class says that this is a `T`, whose first field the fid is.
    Ok(unsafe { &*fid.cast() })
}

/// Gives a new object to the application.
///
/// # Safety
/// `out` is null or where the application wants the pointer.
pub(super) unsafe fn give<T: Object, F>(object: T, out: *mut *mut F) -> Result<(), Code> {
    if out.is_null() {
        return Err(Code::INVAL);
    }
    let raw: *mut T = Box::into_raw(Box::new(object));
    // SAFETY: not null, and the application's by contract.
    unsafe { out.write(raw.cast()) };
    Ok(())
}

/// Takes an object back for good.
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

/// A table, as the structs of libfabric want it. Nobody writes to it.
pub(super) fn table<T>(ops: &'static T) -> *mut T {
    (&raw const *ops).cast_mut()
}

/// How many objects were made from this one and still live.
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
    /// `EBUSY` while there are any.
    pub(super) fn none(&self) -> Result<(), Code> {
        if self.0.load(Ordering::Acquire) == 0 { Ok(()) } else { Err(Code::BUSY) }
    }
}
