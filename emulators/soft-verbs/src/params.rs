//! Parameters that point to the program's memory: structs with their sizes, lists with their lengths, and requests.
//!
//! As with [`Open`](crate::objects::Open), safe code can't make such a value: it comes from C, and by the call's
//! contract it is null or the program's memory, which stays valid during the call.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ops::Deref;
use std::{ptr, slice};

use crate::bindings as ib;
use crate::guard::Errno;
use crate::objects::Param;

/// A parameter: null, or the address of a struct whose size is another parameter of the call ([`Size`]).
#[repr(transparent)]
pub(crate) struct Struct<'a, T>(*mut T, PhantomData<&'a mut T>);

/// A parameter: the size of each [`Struct`] of the call.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Size<N>(N);

// SAFETY: `Struct` is transparent.
unsafe impl<T> Param<*mut T> for Struct<'_, T> {}
// SAFETY: `Size` is transparent.
unsafe impl<N> Param<N> for Size<N> {}

impl<N: TryInto<usize>> Size<N> {
    pub(crate) fn bytes(self) -> usize {
        self.0.try_into().unwrap_or(usize::MAX)
    }
}

impl<T: Copy + Default> Struct<'_, T> {
    /// Writes as much of `whole` as fits into the program's struct, and zeros the rest of the struct.
    ///
    /// # Errors
    /// `EINVAL` for null.
    pub(crate) fn fill(self, whole: &T, size: Size<impl TryInto<usize>>) -> Result<(), Errno> {
        // SAFETY: the program's struct has the size that the other parameter says.
        unsafe { self.fill_bytes(whole, size.bytes()) }
    }

    /// Does the same for a call whose struct has a fixed size.
    ///
    /// # Safety
    /// The program's struct has `size` bytes.
    pub(crate) unsafe fn fill_bytes(self, whole: &T, size: usize) -> Result<(), Errno> {
        if self.0.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: not null, so the program gives `size` writable bytes.
        unsafe { ptr::write_bytes(self.0.cast::<u8>(), 0, size) };
        // SAFETY: the same bytes, and no more are copied than `whole` has.
        unsafe { ptr::copy_nonoverlapping(ptr::from_ref(whole).cast::<u8>(), self.0.cast(), size.min(size_of::<T>())) };
        Ok(())
    }

    /// Reads the program's attributes, which may be shorter or longer than this library's. Missing bytes read as zero.
    ///
    /// # Errors
    /// `EINVAL` if there are fewer than `least` bytes, or if bytes beyond this library's attributes aren't zero.
    pub(crate) fn read(self, size: Size<impl TryInto<usize>>, least: usize) -> Result<T, Errno> {
        let size = size.bytes();
        if self.0.is_null() || size < least {
            return Err(Errno::INVAL);
        }
        let from: *const u8 = self.0.cast();
        let mut whole = T::default();
        // SAFETY: `from` has `size` bytes, `whole` has its type's, and the smaller number is copied.
        unsafe { ptr::copy_nonoverlapping(from, (&raw mut whole).cast(), size.min(size_of::<T>())) };
        for at in size_of::<T>()..size {
            // SAFETY: `from` has `size` bytes, and this is one of them.
            if unsafe { from.wrapping_add(at).read() } != 0 {
                return Err(Errno::INVAL);
            }
        }
        Ok(whole)
    }
}

/// A parameter: the address of a list whose length is another parameter of the call ([`Length`]).
#[repr(transparent)]
pub(crate) struct List<'a, T>(*const T, PhantomData<&'a T>);

/// A parameter: the length of each [`List`] of the call.
#[repr(transparent)]
pub(crate) struct Length(usize);

// SAFETY: `List` is transparent, and all pointers have the same ABI.
unsafe impl<T> Param<*const T> for List<'_, T> {}
// SAFETY: `List` is transparent, and all pointers have the same ABI.
unsafe impl<T> Param<*mut c_void> for List<'_, T> {}
// SAFETY: `Length` is transparent.
unsafe impl Param<usize> for Length {}

impl<'a, T> List<'a, T> {
    /// # Errors
    /// `EINVAL` for null, unless the list is empty.
    pub(crate) fn entries(self, len: Length) -> Result<&'a [T], Errno> {
        if len.0 == 0 {
            return Ok(&[]);
        }
        if self.0.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: not null, so the program's list has this many entries.
        Ok(unsafe { slice::from_raw_parts(self.0, len.0) })
    }
}

/// A parameter: null, or the first request in the program's linked list.
#[repr(transparent)]
pub(crate) struct Requests<'a, W>(*mut W, PhantomData<&'a W>);

// SAFETY: `Requests` is transparent.
unsafe impl<W> Param<*mut W> for Requests<'_, W> {}

/// A verbs request.
pub(crate) trait Request {
    fn next(&self) -> *mut Self;
    fn buffers(&self) -> (*const ib::ibv_sge, c_int);
}

/// One of the program's requests. Its pointers are valid as the call's manual page says.
#[derive(Clone, Copy)]
pub(crate) struct Posted<'a, W>(&'a W);

impl<'a, W: Request> Requests<'a, W> {
    /// Calls `post` with each request. Stops at the first one that fails, stores its address in `bad`, and returns its
    /// error.
    pub(crate) fn post_each(
        self,
        bad: Option<&mut *mut W>,
        mut post: impl FnMut(Posted<'a, W>) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut at = self.0;
        // SAFETY: null, or a request in the program's list, which stays readable during the call.
        while let Some(request) = unsafe { at.as_ref() } {
            if let Err(error) = post(Posted(request)) {
                if let Some(bad) = bad {
                    *bad = at;
                }
                return Err(error);
            }
            at = request.next();
        }
        Ok(())
    }
}

impl<'a, W: Request> Posted<'a, W> {
    /// Returns the request's buffers.
    ///
    /// # Errors
    /// `EINVAL` for a negative count, and for null with a nonzero one.
    pub(crate) fn buffers(self) -> Result<&'a [ib::ibv_sge], Errno> {
        let (at, len) = self.0.buffers();
        List(at, PhantomData).entries(Length(len.try_into().map_err(|_| Errno::INVAL)?))
    }
}

impl<W> Deref for Posted<'_, W> {
    type Target = W;

    fn deref(&self) -> &W {
        self.0
    }
}
