//! The open objects of the program. A destructor looks here before it touches an object: what was destroyed before is memory of someone else.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::guard::{Errno, refuse, status};

/// The kinds of the open objects, by the addresses that the program has.
static OPEN: Mutex<BTreeMap<usize, &'static str>> = Mutex::new(BTreeMap::new());

fn open() -> MutexGuard<'static, BTreeMap<usize, &'static str>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes an object that the program gets.
pub(crate) fn add<T>(kind: &'static str, at: *const T) {
    open().insert(at.addr(), kind);
}

/// Takes an object that the program destroys. Of two threads that destroy the same object, one gets it.
///
/// # Errors
/// `EINVAL` if no object of this kind is open there; a line in the log names the mistake.
pub(crate) fn take<T>(call: &str, kind: &'static str, at: *const T) -> Result<(), Errno> {
    let mut open = open();
    let why = match open.get(&at.addr()) {
        Some(found) if *found == kind => {
            open.remove(&at.addr());
            return Ok(());
        }
        Some(found) => format!("{at:p} is of another kind: expected {kind}, found {found}"),
        None if at.is_null() => format!("the {kind} is null"),
        None => {
            format!("{at:p} is not an open {kind}: it was destroyed before, or never created; destroy each {kind} once")
        }
    };
    drop(open);
    Err(refuse(call, Errno::INVAL, format_args!("{why}")))
}

/// An object of which the program has the address.
///
/// # Safety
/// No other type has this kind, and the program's struct `Raw` lies in the object at `AT`.
pub(crate) unsafe trait Object: Sized {
    /// Its name in messages.
    const KIND: &'static str;
    /// The struct of verbs that the program sees.
    type Raw;
    const AT: usize = 0;
}

/// A parameter of an entry point: null, or the address of an open object.
///
/// Programs of verbs pass nothing else; that is the contract of each `unsafe extern "C"` entry point. Safe code makes no such value: it comes
/// from C, or from [`Open::at`]. The object lives as long as the call, since programs destroy nothing that they use, and destructors refuse
/// what is not among the open objects.
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
    /// `raw` is null or an object of this type that stays open as long as `'a`.
    pub(crate) unsafe fn at(raw: *mut T::Raw) -> Self {
        Self(raw, PhantomData)
    }

    pub(crate) fn pointer(self) -> *mut T::Raw {
        self.0
    }

    /// # Errors
    /// `EINVAL` for null.
    pub(crate) fn get(self) -> Result<&'a T, Errno> {
        if self.0.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: not null, so it is the program's struct in an object that is open as long as `'a`.
        Ok(unsafe { &*self.0.wrapping_byte_sub(T::AT).cast::<T>() })
    }
}

/// A parameter as entry points of this library have it, in place of the pointer `Raw` of a table of verbs.
///
/// # Safety
/// Both have one ABI.
pub(crate) unsafe trait Param<Raw> {}

// SAFETY: the same type.
unsafe impl<T> Param<T> for T {}
// SAFETY: `Open` is transparent.
unsafe impl<T: Object> Param<*mut T::Raw> for Open<'_, T> {}
// SAFETY: a reference is a pointer, and `None` is null.
unsafe impl<T> Param<*mut T> for Option<&T> {}
// SAFETY: a reference is a pointer, and `None` is null.
unsafe impl<T> Param<*mut T> for Option<&mut T> {}
// SAFETY: a reference is a pointer, and `None` is null.
unsafe impl<T> Param<*const T> for Option<&T> {}

/// Makes a function of a table of verbs of an entry point, whose callers keep the same contract by either type.
macro_rules! in_table {
    ($($name:ident: $($param:ident $raw:ident),*;)*) => {$(
        pub(crate) fn $name<$($param: Param<$raw>, $raw,)* R>(
            entry: unsafe extern "C" fn($($param),*) -> R,
        ) -> unsafe extern "C" fn($($raw),*) -> R {
            // SAFETY: functions whose parameters have one ABI.
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

/// Gives an object to the program, which has it until [`destroy`].
pub(crate) fn give<T: Object, Raw>(object: Box<T>) -> *mut Raw {
    let at = Box::into_raw(object);
    add(T::KIND, at);
    at.cast()
}

/// A destructor of the program's: frees the object after `close`, and leaves it open if that fails.
pub(crate) fn destroy<T: Object, Raw>(call: &str, raw: *mut Raw, close: impl FnOnce(&T) -> Result<(), Errno>) -> c_int {
    let at: *mut T = raw.cast();
    status(call, || {
        take(call, T::KIND, at)?;
        // SAFETY: `OPEN` had the address with this kind, so `give` made it from a box of this type that nobody has freed.
        if let Err(errno) = close(unsafe { &*at }) {
            add(T::KIND, at);
            return Err(errno);
        }
        // SAFETY: as above. This call took the address out of `OPEN`, so no other call frees the box.
        drop(unsafe { Box::from_raw(at) });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Thing(u8);

    // SAFETY: only this test has things.
    unsafe impl Object for Thing {
        const KIND: &'static str = "thing";
        type Raw = u8;
    }

    #[test]
    fn object_is_destroyed_once_and_stays_while_it_is_used() {
        let thing: *mut u8 = give(Box::new(Thing(7)));
        assert_eq!(destroy("test", thing, |_: &Thing| Err(Errno::BUSY)), libc::EBUSY);
        assert_eq!(take("test", "other thing", thing), Err(Errno::INVAL));
        let within = |thing: &Thing| {
            // As a second thread would.
            assert_eq!(take("test", Thing::KIND, thing), Err(Errno::INVAL));
            assert_eq!(thing.0, 7);
            Ok(())
        };
        assert_eq!(destroy("test", thing, within), 0);
        assert_eq!(destroy("test", thing, |_: &Thing| panic!("freed")), libc::EINVAL);
        assert_eq!(destroy("test", std::ptr::null_mut::<u8>(), |_: &Thing| panic!("null")), libc::EINVAL);
    }
}
