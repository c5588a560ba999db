//! Operation contexts.

use std::cell::UnsafeCell;
use std::ffi::c_void;

use crate::bindings::fi_context2;

/// An operation's context: first the provider's part (`FI_CONTEXT2`), then the caller's note about the operation.
#[repr(C)]
pub struct Context<N> {
    provider: UnsafeCell<fi_context2>,
    note: N,
}

// SAFETY: only the provider uses its part; the note never changes.
unsafe impl<N: Send> Send for Context<N> {}

impl<N: Copy> Context<N> {
    /// Creates a context, for one operation at a time.
    pub fn new(note: N) -> Self {
        Self { provider: UnsafeCell::new(fi_context2::default()), note }
    }

    /// Returns the pointer for libfabric. The context must stay where it is until the operation has finished.
    pub fn as_ptr(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// Returns the note of the operation that was posted with `context`.
    ///
    /// # Safety
    /// `context` came from [`Context::as_ptr`] of a context with a note of this type, which still exists.
    pub unsafe fn note(context: *const c_void) -> N {
        let context: *const Self = context.cast();
        // SAFETY: the caller passes a live context, whose note is never written after creation.
        unsafe { (*context).note }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_gives_its_note() {
        let context = Box::new(Context::new((7u8, 9u32)));
        // SAFETY: the context exists and has a note of this type.
        assert_eq!(unsafe { Context::<(u8, u32)>::note(context.as_ptr()) }, (7, 9));
    }
}
