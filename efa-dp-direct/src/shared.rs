//! Queue structs that other threads and devices share: access to single words, without creating a reference.

use crate::arch;

/// A live `repr(C)` struct in shared memory. `offset_of!` names its fields.
pub(crate) struct Shared<T>(*mut T);

impl<T> Clone for Shared<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// `at` is aligned and valid for reads, and for writes if [`Self::set`] is called, as long as this handle is used;
    /// words that change are only accessed atomically.
    #[inline(always)]
    pub(crate) const unsafe fn new(at: *mut T) -> Self {
        Self(at)
    }

    /// Returns the 32-bit word at `offset`, which must be that of a `u32` or `i32` field.
    #[inline(always)]
    pub(crate) fn get(self, offset: usize) -> u32 {
        // SAFETY: a field of a struct that the caller of `new` vouches is live, and only accessed atomically if it
        // changes.
        unsafe { arch::load_u32(self.0.wrapping_byte_add(offset).cast()) }
    }

    /// Replaces the 32-bit word at `offset`, which must be that of a `u32` or `i32` field.
    #[inline(always)]
    pub(crate) fn set(self, offset: usize, value: u32) {
        // SAFETY: a field of a struct that the caller of `new` vouches is live, and only accessed atomically if it
        // changes.
        unsafe { arch::store_u32(self.0.wrapping_byte_add(offset).cast(), value) }
    }

    /// Returns the pointer at `offset`, which must be that of a `*mut U` field that never changes.
    #[inline(always)]
    pub(crate) fn pointer<U>(self, offset: usize) -> *mut U {
        let field = self.0.wrapping_byte_add(offset).cast::<*mut U>();
        // SAFETY: a field of a struct that the caller of `new` vouches is live; the field hasn't changed since the
        // struct was made.
        unsafe { field.read() }
    }
}
