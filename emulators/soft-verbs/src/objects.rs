//! The program's open objects. Destructors look here before they touch an object: once destroyed, its memory may be
//! someone else's.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use soft_nic::process;
use soft_nic::process::Uses;

use crate::guard::{Errno, refuse, status};

/// The open objects' kinds, by the addresses that the program has.
static OPEN: Mutex<BTreeMap<usize, &'static str>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// The list while this thread forks: a child can use the list, because no other thread had it.
    static HELD: Cell<Option<MutexGuard<'static, BTreeMap<usize, &'static str>>>> = const { Cell::new(None) };
}

extern "C" fn hold() {
    HELD.set(Some(open()));
}

extern "C" fn release() {
    HELD.set(None);
}

fn open() -> MutexGuard<'static, BTreeMap<usize, &'static str>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An object whose address the program has.
///
/// # Safety
/// No other type has this kind, and the program's struct `Raw` lies at `AT` in the object. `uses` always returns the
/// same count.
pub(crate) unsafe trait Object: Sized {
    /// Its name in messages.
    const KIND: &'static str;
    /// The verbs struct that the program sees.
    type Raw;
    const AT: usize = 0;
    /// Whether a forked child may use its parent's.
    const SHARED_WITH_CHILDREN: bool = false;

    /// Returns the count of open objects that use this one.
    fn uses(&self) -> &Uses;
}

/// Makes a type with a field `uses` an object, by the struct that the program sees and a name that no other type has.
macro_rules! verbs_object {
    ($type:ident { $($field:ident).+: $raw:ty }, $kind:literal $(, { $($items:tt)* })?) => {
        // SAFETY: the caller names the field that is that struct, or begins with it, and a kind that only this type
        // has. `uses` is a field.
        unsafe impl $crate::objects::Object for $type {
            const KIND: &'static str = $kind;
            type Raw = $raw;
            const AT: usize = std::mem::offset_of!($type, $($field).+);

            fn uses(&self) -> &soft_nic::process::Uses {
                &self.uses
            }

            $($($items)*)?
        }
    };
}
pub(crate) use verbs_object;

/// A parameter of an entry point: null, or the address of an open object.
///
/// Verbs programs pass nothing else: that is the contract of every `unsafe extern "C"` entry point. Safe code can't
/// make such a value; it comes from C or from [`Open::at`]. The object outlives the call, since programs don't destroy
/// what they are using, and destructors refuse anything that isn't among the open objects.
#[repr(transparent)]
pub(crate) struct Open<'a, T: Object>(*mut T::Raw, PhantomData<&'a T>);

impl<T: Object> Clone for Open<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Object> Copy for Open<'_, T> {}

impl<'a, T: Object> Open<'a, T> {
    /// # Safety
    /// `raw` is null or an object of this type that stays open for `'a`.
    pub(crate) unsafe fn at(raw: *mut T::Raw) -> Self {
        Self(raw, PhantomData)
    }

    pub(crate) fn pointer(self) -> *mut T::Raw {
        self.0
    }

    /// Returns another object, named by an attribute of the same call.
    ///
    /// # Errors
    /// `EINVAL` if no object of this kind is open at that address.
    pub(crate) fn named<U: Object>(self, raw: *mut U::Raw) -> Result<Open<'a, U>, Errno> {
        let found = open().get(&raw.addr()) == Some(&U::KIND);
        if found { Ok(Open(raw, PhantomData)) } else { Err(Errno::INVAL) }
    }

    /// # Errors
    /// `EINVAL` for null, and `EPERM` for an object of the parent process.
    pub(crate) fn get(self) -> Result<&'a T, Errno> {
        if self.0.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: not null, so it is the program's struct in an object that stays open for `'a`.
        let object = unsafe { &*self.0.wrapping_byte_sub(T::AT).cast::<T>() };
        if object.uses().are_inherited() && !T::SHARED_WITH_CHILDREN {
            process::log_inherited(T::KIND);
            return Err(Errno::PERM);
        }
        Ok(object)
    }
}

/// A parameter that is the address of an object's part for the EFA calls.
#[repr(transparent)]
pub(crate) struct Efa<'a, T: EfaPart>(*mut T::Part, PhantomData<&'a T>);

/// An object with a part for the EFA calls.
///
/// # Safety
/// The part lies at `PART_AT` in the object.
pub(crate) unsafe trait EfaPart: Object {
    type Part;
    const PART_AT: usize;
}

impl<'a, T: EfaPart> Efa<'a, T> {
    pub(crate) fn object(self) -> Open<'a, T> {
        if self.0.is_null() {
            return Open(std::ptr::null_mut(), PhantomData);
        }
        Open(self.0.wrapping_byte_sub(T::PART_AT).wrapping_byte_add(T::AT).cast(), PhantomData)
    }
}

/// A parameter type of this library's entry points that stands for the pointer `Raw` in a verbs table.
///
/// # Safety
/// Both have the same ABI.
pub(crate) unsafe trait Param<Raw> {}

// SAFETY: the same type.
unsafe impl<T> Param<T> for T {}
// SAFETY: `Open` is transparent.
unsafe impl<T: Object> Param<*mut T::Raw> for Open<'_, T> {}
// SAFETY: `Efa` is transparent.
unsafe impl<T: EfaPart> Param<*mut T::Part> for Efa<'_, T> {}
// SAFETY: a reference is a pointer, and `None` is null.
unsafe impl<T> Param<*mut T> for Option<&T> {}
// SAFETY: a reference is a pointer, and `None` is null.
unsafe impl<T> Param<*mut T> for Option<&mut T> {}
// SAFETY: a reference is a pointer, and `None` is null.
unsafe impl<T> Param<*const T> for Option<&T> {}

/// Turns an entry point into a verbs table's function; callers keep the same contract through either type.
macro_rules! in_table {
    ($($name:ident: $($param:ident $raw:ident),*;)*) => {$(
        pub(crate) fn $name<$($param: Param<$raw>, $raw,)* R>(
            entry: unsafe extern "C" fn($($param),*) -> R,
        ) -> unsafe extern "C" fn($($raw),*) -> R {
            // SAFETY: the functions' parameters have the same ABI.
            unsafe { std::mem::transmute(entry) }
        }
    )*};
}
in_table! {
    call1: A X;
    call2: A X, B Y;
    call3: A X, B Y, C Z;
    call4: A X, B Y, C Z, D W;
}

/// Hands an object to the program, which keeps it until [`destroy`].
pub(crate) fn give<T: Object>(object: Box<T>) -> *mut T::Raw {
    static HOLDS: Once = Once::new();
    // SAFETY: the handlers take and release a lock. If the library is unloaded, the C library forgets them.
    HOLDS.call_once(|| _ = unsafe { libc::pthread_atfork(Some(hold), Some(release), Some(release)) });
    let at = Box::into_raw(object).wrapping_byte_add(T::AT);
    open().insert(at.addr(), T::KIND);
    at.cast()
}

/// An object that a destructor removed from the open ones, so no other call can get it.
pub(crate) struct Taken<T: Object>(*mut T);

/// Whether a destructor is called for an object of the parent process, which the child has no part of.
pub(crate) fn is_inherited<T: Object>(raw: *mut T::Raw) -> bool {
    if open().get(&raw.addr()) != Some(&T::KIND) {
        return false;
    }
    // SAFETY: the list says that an object of this type is at that address, and a child frees none of its parent's.
    let object = unsafe { &*raw.wrapping_byte_sub(T::AT).cast::<T>() };
    object.uses().are_inherited()
}

/// Takes an object that the program is destroying. If two threads destroy the same object, only one gets it.
///
/// # Errors
/// `EINVAL` if no object of this kind is open at that address; the log names the mistake.
pub(crate) fn take<T: Object>(call: &str, raw: *mut T::Raw) -> Result<Taken<T>, Errno> {
    let kind = T::KIND;
    let mut open = open();
    let why = match open.get(&raw.addr()) {
        Some(found) if *found == kind => {
            open.remove(&raw.addr());
            return Ok(Taken(raw.wrapping_byte_sub(T::AT).cast()));
        }
        Some(found) => format!("{raw:p} is a {found}, not a {kind}"),
        None if raw.is_null() => format!("the {kind} is null"),
        None => {
            format!(
                "{raw:p} is not an open {kind}: it was destroyed before, or never created; destroy each {kind} once"
            )
        }
    };
    drop(open);
    Err(refuse(call, Errno::INVAL, format_args!("{why}")))
}

impl<T: Object> Taken<T> {
    fn put_back(self) {
        open().insert(self.0.addr() + T::AT, T::KIND);
    }

    /// Frees the object. If others still use it, its memory stays.
    pub(crate) fn free(self) {
        if !self.uses().any() {
            // SAFETY: `give` made the address from a box of this type. Nothing uses the object, and no other call gets
            // it.
            drop(unsafe { Box::from_raw(self.0) });
        }
    }
}

impl<T: Object> Deref for Taken<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `give` made the address from a box of this type, and only `free`, which takes this value, frees it.
        unsafe { &*self.0 }
    }
}

/// Serves the program's destructor calls: frees the object after `close`, or leaves it open if that fails or others
/// still use it.
pub(crate) fn destroy<T: Object>(call: &str, raw: *mut T::Raw, close: impl FnOnce(&T) -> Result<(), Errno>) -> c_int {
    status(call, || {
        if is_inherited::<T>(raw) {
            // The child's copy of these holds nothing.
            if T::SHARED_WITH_CHILDREN {
                return Ok(());
            }
            process::log_inherited(T::KIND);
            return Err(Errno::PERM);
        }
        let object = take::<T>(call, raw)?;
        let closed = if object.uses().any() { Err(Errno::BUSY) } else { close(&object) };
        if closed.is_ok() {
            object.free()
        } else {
            object.put_back()
        }
        closed
    })
}

/// An object that another one uses, which keeps it open.
pub(crate) struct Held<T: Object>(*const T);

impl<T: Object> Held<T> {
    pub(crate) fn new(object: &T) -> Self {
        object.uses().begin();
        Self(object)
    }

    pub(crate) fn is(&self, object: &T) -> bool {
        std::ptr::eq(self.0, object)
    }
}

impl<T: Object> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the object is in a box that only `Taken::free` frees, and not while its use count includes this one.
        unsafe { &*self.0 }
    }
}

impl<T: Object> Drop for Held<T> {
    fn drop(&mut self) {
        self.uses().end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    struct Thing(u8, Uses);

    // SAFETY: only this test uses the type, and the byte is the first field.
    unsafe impl Object for Thing {
        const KIND: &'static str = "thing";
        type Raw = u8;

        fn uses(&self) -> &Uses {
            &self.1
        }
    }

    #[repr(C)]
    struct OtherThing(u8, Uses);

    // SAFETY: only this test uses the type, and the byte is the first field.
    unsafe impl Object for OtherThing {
        const KIND: &'static str = "other thing";
        type Raw = u8;

        fn uses(&self) -> &Uses {
            &self.1
        }
    }

    #[test]
    fn object_is_destroyed_once_and_stays_while_it_is_used() {
        let thing = give(Box::new(Thing(7, Uses::default())));
        let param: Open<Thing> = Open(thing, PhantomData);
        assert_eq!(destroy("test", thing, |_: &Thing| Err(Errno::BUSY)), libc::EBUSY);
        assert_eq!(take::<OtherThing>("test", thing).err(), Some(Errno::INVAL));
        assert_eq!(param.named::<OtherThing>(thing).err(), Some(Errno::INVAL));

        let held = Held::new(param.named::<Thing>(thing).unwrap().get().unwrap());
        assert_eq!(destroy("test", thing, |_: &Thing| panic!("closed")), libc::EBUSY);
        assert_eq!((*held).0, 7);
        drop(held);

        let within = |_: &Thing| {
            // As a second thread would.
            assert_eq!(take::<Thing>("test", thing).err(), Some(Errno::INVAL));
            Ok(())
        };
        assert_eq!(destroy("test", thing, within), 0);
        assert_eq!(destroy("test", thing, |_: &Thing| panic!("freed")), libc::EINVAL);
        assert_eq!(param.named::<Thing>(thing).err(), Some(Errno::INVAL));
        assert_eq!(destroy("test", std::ptr::null_mut(), |_: &Thing| panic!("null")), libc::EINVAL);
    }
}
