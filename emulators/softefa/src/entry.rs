//! The entry points: C functions of libfabric's tables, whose pointers become types of this crate here, once for all of them.
//!
//! The argument for every entry point: only an application, or libfabric's core for it, calls one, and libfabric's man page of the call
//! says what each argument is. Pointers are null, or valid for the type and the number of elements that the page names, as long as
//! the call lasts; an object stays open during the call. [`entry_points!`] converts the arguments by the types that an entry point
//! declares, refuses null where a type has none, and runs the body, which is safe code, without a panic leaving it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;

use ferrogin_libfabric::bindings as fi;

use super::guard::Code;

/// A call of the application. What its arguments point to lives as long.
pub(super) struct Call;

/// An argument of an entry point, made from one or more arguments of C.
pub(super) trait Arg<'a, Raw>: Sized {
    /// # Errors
    /// `EINVAL` for null where there must be something, and for an object of another class.
    ///
    /// # Safety
    /// `raw` is what the man page of the call says of these arguments, and stays so during the call.
    unsafe fn of(raw: Raw, call: &'a Call) -> Result<Self, Code>;
}

/// Defines entry points: the arguments of C, the name for the log and, for results that are no codes, the result of a call that fails;
/// then the arguments of the body and what each is made from.
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
                    // SAFETY: this function is unsafe, and its caller keeps to the man page: the argument is at the top of this file.
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
        // SAFETY: null, or a `T` or a struct that begins with one, which the application does not change during the call.
        Ok(unsafe { raw.cast::<T>().as_ref() })
    }
}

impl<'a, T, R> Arg<'a, *mut R> for Option<&'a mut T> {
    unsafe fn of(raw: *mut R, _: &'a Call) -> Result<Self, Code> {
        // SAFETY: null, or a `T` or a struct that begins with one, which is this call's alone.
        Ok(unsafe { raw.cast::<T>().as_mut() })
    }
}

impl<'a> Arg<'a, *const c_char> for Option<&'a CStr> {
    unsafe fn of(raw: *const c_char, _: &'a Call) -> Result<Self, Code> {
        // SAFETY: null or a terminated string.
        Ok(unsafe { super::library::text(raw) })
    }
}

/// A variable of the application that the call sets.
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

/// An array of the application; null only if it is empty.
#[derive(Clone, Copy)]
pub(super) struct Array<'a, T> {
    at: *const T,
    len: usize,
    call: PhantomData<&'a T>,
}

impl<'a, T: Copy> Array<'a, T> {
    /// The element of an array of one.
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

/// An array of the application that the call fills. Null has no room.
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
        // SAFETY: both have `len` elements, and what the application passes is no memory of this crate.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.at, len) };
    }
}

impl<'a, T, R> Arg<'a, (*mut R, usize)> for Room<'a, T> {
    unsafe fn of((at, len): (*mut R, usize), _: &'a Call) -> Result<Self, Code> {
        Ok(Self { at: at.cast(), len: if at.is_null() { 0 } else { len }, call: PhantomData })
    }
}

/// Room whose length the application passes in a variable, which the call sets to the length of the answer.
pub(super) struct Answer<'a> {
    room: Room<'a, u8>,
    len: Option<Out<'a, usize>>,
}

impl Answer<'_> {
    /// Bytes that fit.
    pub(super) fn room(&self) -> usize {
        self.len.as_ref().map_or(0, Out::read)
    }

    /// Copies as many bytes as fit, and sets the length to that of the whole.
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
        // By the man page, `at` has as many bytes as the variable says.
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
        // By the command, `fi_control(3)` has null or a variable of this type.
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
