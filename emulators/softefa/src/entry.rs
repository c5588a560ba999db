//! The entry points: C functions in libfabric's tables. Their pointers become this crate's types here, once for all of
//! them.
//!
//! The safety argument for every entry point: only an application, or libfabric's core on its behalf, calls one, and
//! the call's man page in libfabric says what each argument is. Pointers are null, or valid for the type and the number
//! of elements that the page names, as long as the call lasts; an object stays open during the call. [`entry_points!`]
//! converts the arguments to the types that an entry point declares, refuses null where a type does not allow it, and
//! runs the body, which is safe code, without letting a panic out.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;

use ferrogin_libfabric::bindings as fi;

use super::guard::Code;

/// A call from the application. What its arguments point to lives as long as the call.
pub(super) struct Call;

/// An entry point's argument, made from one or more C arguments.
pub(super) trait Arg<'a, Raw>: Sized {
    /// # Errors
    /// `EINVAL` for null where it is not allowed, and for an object of another class.
    ///
    /// # Safety
    /// `raw` is what the call's man page says about these arguments, and stays so during the call.
    unsafe fn of(raw: Raw, call: &'a Call) -> Result<Self, Code>;
}

/// Defines entry points: the C arguments, the name for the log and, for results that are not codes, the result of a
/// failed call; then the body's arguments and what each is made from.
macro_rules! entry_points {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $([$($generics:tt)*])? ($($arg:ident: $raw:ty),* $(,)?) -> $ret:ty
        as $call:tt ($($typed:ident: $ty:ty = $from:expr),* $(,)?) $body:block
    )*) => {$(
        $(#[$meta])*
        $vis unsafe extern "C" fn $name $(<$($generics)*>)? ($($arg: $raw),*) -> $ret {
            let _call = $crate::entry::Call;
            $crate::entry::entry_points!(@run $call -> $ret, || {
                $(
                    let raw = $from;
                    // SAFETY: this function is unsafe, and its caller follows the man page: the argument is at the top
                    // of this file.
                    let $typed: $ty = unsafe { $crate::entry::Arg::of(raw, &_call) }?;
                )*
                $body
            })
        }
    )*};
    (@run ($name:expr) -> $ret:ty, $body:expr) => { $crate::guard::entry($name, $body) as $ret };
    (@run ($name:expr, $otherwise:expr) -> $ret:ty, $body:expr) => {
        $crate::guard::entry_or($name, $otherwise, $body)
    };
}
pub(super) use entry_points;

impl<'a, T, R> Arg<'a, *const R> for Option<&'a T> {
    unsafe fn of(raw: *const R, _: &'a Call) -> Result<Self, Code> {
        // SAFETY: null, or a `T` or a struct that begins with one, which the application does not change during the
        // call.
        Ok(unsafe { raw.cast::<T>().as_ref() })
    }
}

impl<'a, T, R> Arg<'a, *mut R> for Option<&'a mut T> {
    unsafe fn of(raw: *mut R, _: &'a Call) -> Result<Self, Code> {
        // SAFETY: null, or a `T` or a struct that begins with one, which only this call uses.
        Ok(unsafe { raw.cast::<T>().as_mut() })
    }
}

impl<'a> Arg<'a, *const c_char> for Option<&'a CStr> {
    unsafe fn of(raw: *const c_char, _: &'a Call) -> Result<Self, Code> {
        // SAFETY: null or a terminated string.
        Ok(unsafe { super::library::text(raw) })
    }
}

/// An application's variable that the call sets.
pub(super) struct Out<'a, T> {
    at: *mut T,
    call: PhantomData<&'a mut T>,
}

impl<T: Copy> Out<'_, T> {
    pub(super) fn write(&self, value: T) {
        // SAFETY: not null, and writable during the call: only `Arg::of` makes this type.
        unsafe { self.at.write(value) };
    }

    pub(super) fn read(&self) -> T {
        // SAFETY: not null, and the application passes a variable: only `Arg::of` makes this type.
        unsafe { self.at.read() }
    }
}

impl<'a, T, R> Arg<'a, *mut R> for Option<Out<'a, T>> {
    unsafe fn of(raw: *mut R, _: &'a Call) -> Result<Self, Code> {
        Ok((!raw.is_null()).then_some(Out { at: raw.cast(), call: PhantomData }))
    }
}

impl<'a, T, R> Arg<'a, *mut R> for Out<'a, T> {
    unsafe fn of(raw: *mut R, _: &'a Call) -> Result<Self, Code> {
        if raw.is_null() { Err(Code::INVAL) } else { Ok(Self { at: raw.cast(), call: PhantomData }) }
    }
}

/// An application's array; null only if it is empty.
#[derive(Clone, Copy)]
pub(super) struct Array<'a, T> {
    at: *const T,
    len: usize,
    call: PhantomData<&'a T>,
}

impl<'a, T: Copy> Array<'a, T> {
    /// Returns the element of a one-element array.
    pub(super) fn only(self) -> Option<T> {
        self.iter().next().filter(|_| self.len == 1)
    }

    pub(super) fn iter(self) -> impl Iterator<Item = T> + use<'a, T> {
        // SAFETY: the array has `len` elements during the call: only `Arg::of` makes this type.
        (0..self.len).map(move |i| unsafe { self.at.wrapping_add(i).read_unaligned() })
    }
}

impl<'a, T, R, N: TryInto<usize>> Arg<'a, (*const R, N)> for Array<'a, T> {
    unsafe fn of((at, len): (*const R, N), _: &'a Call) -> Result<Self, Code> {
        let len = len.try_into().map_err(|_| Code::INVAL)?;
        if at.is_null() && len > 0 {
            return Err(Code::INVAL);
        }
        Ok(Self { at: at.cast(), len, call: PhantomData })
    }
}

/// An application's array that the call fills. Null has no room.
pub(super) struct Room<'a, T> {
    at: *mut T,
    len: usize,
    call: PhantomData<&'a mut T>,
}

impl<T: Copy> Room<'_, T> {
    pub(super) const NONE: Self = Self { at: std::ptr::null_mut(), len: 0, call: PhantomData };

    pub(super) fn is_null(&self) -> bool {
        self.at.is_null()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Sets an element, if the array has it.
    pub(super) fn set(&self, at: usize, value: T) {
        if at < self.len {
            // SAFETY: the array has `len` elements during the call: only `Arg::of` makes this type with any.
            unsafe { self.at.wrapping_add(at).write_unaligned(value) };
        }
    }

    /// Sets the first elements, as many as the array has.
    pub(super) fn copy(&self, from: &[T]) {
        let len = from.len().min(self.len);
        // SAFETY: both have `len` elements, and what the application passes is not this crate's memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.at, len) };
    }
}

impl<'a, T, R> Arg<'a, (*mut R, usize)> for Room<'a, T> {
    unsafe fn of((at, len): (*mut R, usize), _: &'a Call) -> Result<Self, Code> {
        Ok(Self { at: at.cast(), len: if at.is_null() { 0 } else { len }, call: PhantomData })
    }
}

/// Room whose length the application passes in a variable, which the call sets to the answer's length.
pub(super) struct Answer<'a> {
    room: Room<'a, u8>,
    len: Option<Out<'a, usize>>,
}

impl Answer<'_> {
    /// Returns how many bytes fit.
    pub(super) fn room(&self) -> usize {
        self.len.as_ref().map_or(0, Out::read)
    }

    /// Copies as many bytes as fit, and sets the length to that of the whole answer.
    ///
    /// # Errors
    /// `EINVAL` without the variable.
    pub(super) fn fill(&self, bytes: &[u8]) -> Result<(), Code> {
        self.len.as_ref().ok_or(Code::INVAL)?.write(bytes.len());
        self.room.copy(bytes);
        Ok(())
    }
}

impl<'a, R> Arg<'a, (*mut R, *mut usize)> for Answer<'a> {
    unsafe fn of((at, len): (*mut R, *mut usize), call: &'a Call) -> Result<Self, Code> {
        // SAFETY: null or a variable.
        let len: Option<Out<'a, usize>> = unsafe { Arg::of(len, call) }?;
        let count = len.as_ref().filter(|_| !at.is_null()).map_or(0, Out::read);
        // The man page says that `at` has as many bytes as the variable says.
        Ok(Self { room: Room { at: at.cast(), len: count, call: PhantomData }, len })
    }
}

/// The argument of `fi_control`, by its command.
pub(super) enum Command<'a> {
    Enable,
    GetFlags(Option<Out<'a, u64>>),
    SetFlags(Option<Out<'a, u64>>),
    /// A descriptor.
    GetWait(Option<Out<'a, c_int>>),
    GetWaitObj(Option<Out<'a, fi::fi_wait_obj::Type>>),
    Duplicate(Option<Out<'a, *mut fi::fid_nic>>),
    Other,
}

impl<'a> Arg<'a, (c_int, *mut c_void)> for Command<'a> {
    unsafe fn of((command, arg): (c_int, *mut c_void), _: &'a Call) -> Result<Self, Code> {
        // For this command, `fi_control(3)` takes null or a variable of this type.
        macro_rules! variable {
            () => {
                (!arg.is_null()).then_some(Out { at: arg.cast(), call: PhantomData })
            };
        }
        Ok(match u32::try_from(command) {
            Ok(fi::FI_GETWAIT) => Self::GetWait(variable!()),
            Ok(fi::FI_GETWAITOBJ) => Self::GetWaitObj(variable!()),
            Ok(fi::FI_GETOPSFLAG) => Self::GetFlags(variable!()),
            Ok(fi::FI_SETOPSFLAG) => Self::SetFlags(variable!()),
            Ok(fi::FI_DUP) => Self::Duplicate(variable!()),
            _ if command == fi::FI_ENABLE => Self::Enable,
            _ => Self::Other,
        })
    }
}
