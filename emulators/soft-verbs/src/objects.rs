//! The open objects of the program. A destructor looks here before it touches an object: what was destroyed before is memory of someone else.

use std::collections::BTreeMap;
use std::ffi::c_int;
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
/// No other type has this kind.
pub(crate) unsafe trait Object: Sized {
    /// Its name in messages.
    const KIND: &'static str;
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
