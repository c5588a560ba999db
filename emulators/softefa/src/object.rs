//! Objects that libfabric uses as `struct fid_*` and that hold this provider's state.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ops::Deref;

use ferrogin_libfabric::bindings as fi;

use soft_nic::process;
pub(super) use soft_nic::process::Uses;

use super::entry::{Arg, Call, Out, entry_points};
use super::guard::Code;

/// A type whose first field is the `fid` of its class, so that a pointer to one is a pointer to the other.
///
/// # Safety
/// The type is `repr(C)` and begins with a `fi::fid` (within its `fid_*`), whose `fclass` is `CLASS` and which no
/// other type of this provider has. `uses` returns the same count each time, and every object of the type is in a box.
pub(super) unsafe trait Object: Sized {
    const CLASS: u32;
    /// Its name in the log.
    const NAME: &str;
    /// Whether a forked child may use its parent's.
    const SHARED_WITH_CHILDREN: bool = false;

    /// Returns the count of objects that use this one.
    fn uses(&self) -> &Uses;

    /// Does what else is needed before the object is dropped.
    ///
    /// # Errors
    /// The object cannot be closed, and stays open.
    fn close(&self) -> Result<(), Code> {
        Ok(())
    }
}

/// Makes a type with the fields `fid` and `uses` the object of a class, which no other type of this provider has.
/// `give` puts each in a box.
macro_rules! object {
    ($type:ident, $class:ident, $name:literal $(, { $($items:tt)* })?) => {
        const _: () = assert!(std::mem::offset_of!($type, fid) == 0);

        // SAFETY: the type begins with a fid, as just asserted, and `uses` is a field. The caller names the class that
        // only this type has.
        unsafe impl $crate::object::Object for $type {
            const CLASS: u32 = fi::$class;
            const NAME: &str = $name;

            fn uses(&self) -> &$crate::object::Uses {
                &self.uses
            }

            $($($items)*)?
        }
    };
}
pub(super) use object;

/// A fid from the application: null, or open during the call.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Fid<'a> {
    at: *const fi::fid,
    call: PhantomData<&'a fi::fid>,
}

impl<'a> Fid<'a> {
    /// Returns the object behind the fid, checked by its class.
    ///
    /// # Errors
    /// `EINVAL` for null and for a fid of another class; `EOPBADSTATE` if the parent process opened it.
    pub(super) fn object<T: Object>(self) -> Result<&'a T, Code> {
        // SAFETY: null, or open during the call: only `Arg::of` makes this type.
        let head = unsafe { self.at.as_ref() }.ok_or(Code::INVAL)?;
        if head.fclass != T::CLASS as usize {
            return Err(Code::INVAL);
        }
        // SAFETY: the class shows that the fid is the first field of a `T`, which is open during the call.
        let object: &T = unsafe { &*self.at.cast() };
        if !T::SHARED_WITH_CHILDREN && object.uses().are_inherited() {
            process::log_inherited(T::NAME);
            return Err(Code::STATE);
        }
        Ok(object)
    }
}

impl<'a> Arg<'a, *mut fi::fid> for Fid<'a> {
    unsafe fn of(raw: *mut fi::fid, _: &'a Call) -> Result<Self, Code> {
        Ok(Self { at: raw, call: PhantomData })
    }
}

impl<'a, T: Object, F> Arg<'a, *mut F> for &'a T {
    unsafe fn of(raw: *mut F, call: &'a Call) -> Result<Self, Code> {
        // SAFETY: `fid_*` begin with a fid, and the conditions are the same.
        unsafe { Fid::of(raw.cast(), call) }?.object()
    }
}

/// Passes a new object to the application.
pub(super) fn give<T: Object, F>(object: T, out: &Out<'_, *mut F>) {
    let raw: *mut T = Box::into_raw(Box::new(object));
    out.write(raw.cast());
}

entry_points! {
    /// `fi_close`.
    pub(super) fn close[T: Object](fid: *mut fi::fid) -> c_int as (&format!("fi_close({})", T::NAME)) (object: &T = fid) {
        if object.uses().any() {
            return Err(Code::BUSY);
        }
        object.close()?;
        // SAFETY: every object is in a box. No other object uses this one, and the application does not use a fid after
        // it closed it.
        drop(unsafe { Box::from_raw(fid.cast::<T>()) });
        Ok(0)
    }
}

/// An object that another one uses, and so keeps open.
pub(super) struct Held<T: Object>(*const T);

impl<T: Object> Held<T> {
    pub(super) fn new(object: &T) -> Self {
        object.uses().begin();
        Self(object)
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T: Object> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: only `close` drops objects, and it refuses while the count of uses includes this one.
        unsafe { &*self.0 }
    }
}

impl<T: Object> Drop for Held<T> {
    fn drop(&mut self) {
        self.uses().end();
    }
}

/// Makes a fid of `class` with its operations.
pub(super) fn head(class: u32, context: *mut c_void, ops: &'static fi::fi_ops) -> fi::fid {
    fi::fid { fclass: class as usize, context, ops: table(ops) }
}

/// Returns a table as libfabric's structs hold it. No code writes to the table.
pub(super) fn table<T>(ops: &'static T) -> *mut T {
    (&raw const *ops).cast_mut()
}
