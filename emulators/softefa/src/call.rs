//! The arguments of an application's calls, read and checked.

use std::ffi::c_void;

use ferrogin_libfabric::bindings as fi;

use super::guard::Code;

/// Flags that a send may have.
pub(super) const SEND_FLAGS: u64 = fi::FI_COMPLETION
    | fi::FI_INJECT
    | fi::FI_INJECT_COMPLETE
    | fi::FI_TRANSMIT_COMPLETE
    | fi::FI_DELIVERY_COMPLETE
    | fi::FI_MATCH_COMPLETE
    | fi::FI_REMOTE_CQ_DATA
    | fi::FI_MORE;

/// Buffers that one call may name.
pub(super) const MAX_IOV: usize = 4;

/// A buffer of the application.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    pub addr: *mut u8,
    pub len: usize,
    /// Local key, if the application gave a descriptor.
    pub lkey: Option<u32>,
}

/// Up to [`MAX_IOV`] buffers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buffers {
    segments: [Segment; MAX_IOV],
    count: usize,
}

// SAFETY: addresses of the application, followed only while its operation lasts.
unsafe impl Send for Buffers {}

impl Buffers {
    const NONE: Segment = Segment { addr: std::ptr::null_mut(), len: 0, lkey: None };

    /// # Errors
    /// `EINVAL` for a null buffer that has bytes.
    pub(super) fn one(buf: *const c_void, len: usize, desc: *mut c_void) -> Result<Self, Code> {
        if buf.is_null() && len > 0 {
            return Err(Code::INVAL);
        }
        let mut segments = [Self::NONE; MAX_IOV];
        segments[0] = Segment { addr: buf.cast_mut().cast(), len, lkey: key_of(desc) };
        Ok(Self { segments, count: 1 })
    }

    /// # Errors
    /// `EINVAL` for too many buffers or null ones that have bytes.
    ///
    /// # Safety
    /// `iov` holds `count` buffers and `descs` is null or holds as many descriptors.
    pub(super) unsafe fn read(iov: *const fi::iovec, descs: *mut *mut c_void, count: usize) -> Result<Self, Code> {
        if count > MAX_IOV || iov.is_null() && count > 0 {
            return Err(Code::INVAL);
        }
        let mut segments = [Self::NONE; MAX_IOV];
        for (i, segment) in segments.iter_mut().enumerate().take(count) {
            // SAFETY: this function's caller gives `count` buffers and, unless null, as many descriptors; `i` is below `count`.
            let iov = unsafe { iov.wrapping_add(i).read() };
            if iov.iov_base.is_null() && iov.iov_len > 0 {
                return Err(Code::INVAL);
            }
            let desc = if descs.is_null() {
                std::ptr::null_mut()
            } else {
                // SAFETY: this function's caller gives `count` buffers and, unless null, as many descriptors; `i` is below `count`.
                unsafe { descs.wrapping_add(i).read() }
            };
            *segment = Segment { addr: iov.iov_base.cast(), len: iov.iov_len, lkey: key_of(desc) };
        }
        Ok(Self { segments, count })
    }

    /// No buffer.
    pub(super) fn none() -> Self {
        Self { segments: [Self::NONE; MAX_IOV], count: 0 }
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments[..self.count]
    }

    /// Bytes of all.
    pub(super) fn len(&self) -> usize {
        self.segments().iter().fold(0, |sum, s| sum.saturating_add(s.len))
    }

    /// The first byte, as completions of receives name it.
    pub(super) fn start(&self) -> *mut c_void {
        self.segments[0].addr.cast()
    }

    /// `len` bytes from `skip` on; fewer if there are not so many.
    pub(super) fn part(&self, mut skip: usize, mut len: usize) -> Self {
        let mut part = Self::none();
        for segment in self.segments() {
            let passed = skip.min(segment.len);
            skip -= passed;
            let taken = (segment.len - passed).min(len);
            if taken > 0 {
                len -= taken;
                part.segments[part.count] =
                    Segment { addr: segment.addr.wrapping_add(passed), len: taken, lkey: segment.lkey };
                part.count += 1;
            }
        }
        part
    }

    /// Copies the buffers' bytes to `to`, as many as it holds.
    ///
    /// # Safety
    /// The buffers are readable.
    pub(super) unsafe fn gather(&self, mut to: &mut [u8]) {
        for segment in self.segments() {
            let (room, rest) = to.split_at_mut(segment.len.min(to.len()));
            // SAFETY: this function's caller keeps the buffers readable, and `room` is a local buffer.
            unsafe { std::ptr::copy_nonoverlapping(segment.addr, room.as_mut_ptr(), room.len()) };
            to = rest;
        }
    }

    /// Copies as much of `from` into the buffers as they hold, and returns the number of bytes.
    ///
    /// # Safety
    /// The buffers are writable.
    pub(super) unsafe fn scatter(&self, from: &[u8]) -> usize {
        let mut done = 0;
        for segment in self.segments() {
            let piece = &from[done..from.len().min(done + segment.len)];
            // SAFETY: this function's caller keeps the buffers writable, and `piece` is no longer than the segment.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), segment.addr, piece.len()) };
            done += piece.len();
        }
        done
    }
}

/// The key that `fi_mr_desc` carries: never 0.
fn key_of(desc: *mut c_void) -> Option<u32> {
    u32::try_from(desc as usize).ok().filter(|key| *key != 0)
}

/// `fi_send` and its variants.
#[derive(Debug, Clone, Copy)]
pub(super) struct SendCall {
    pub buffers: Buffers,
    pub to: u64,
    pub context: *mut c_void,
    pub tag: Option<u64>,
    /// Data for the peer's completion.
    pub data: Option<u64>,
    pub flags: u64,
    /// No completion, not even with `FI_COMPLETION`.
    pub silent: bool,
}

/// `fi_recv` and its variants.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecvCall {
    pub buffers: Buffers,
    pub from: u64,
    pub context: *mut c_void,
    /// The tag, and the bits of the tag that are ignored.
    pub tag: Option<(u64, u64)>,
    pub flags: u64,
}

/// `fi_read`, `fi_write` and their variants.
#[derive(Clone, Copy)]
pub(super) struct RmaCall {
    pub read: bool,
    pub buffers: Buffers,
    pub peer: u64,
    pub remote: fi::fi_rma_iov,
    pub context: *mut c_void,
    pub data: Option<u64>,
    pub flags: u64,
    pub silent: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffers(parts: &mut [&mut [u8]]) -> Buffers {
        let iov: Vec<fi::iovec> =
            parts.iter_mut().map(|p| fi::iovec { iov_base: p.as_mut_ptr().cast(), iov_len: p.len() }).collect();
        // SAFETY: the array is that of the vector, whose length is stated.
        unsafe { Buffers::read(iov.as_ptr(), std::ptr::null_mut(), iov.len()) }.unwrap()
    }

    #[test]
    fn bytes_pass_through_buffers_in_order() {
        let (mut a, mut b, mut c) = ([1, 2, 3], [4], [5, 6]);
        let whole = buffers(&mut [&mut a, &mut b, &mut c]);
        assert_eq!(whole.len(), 6);
        let mut out = [0; 6];
        // SAFETY: the arrays are alive.
        unsafe { whole.gather(&mut out) };
        assert_eq!(out, [1, 2, 3, 4, 5, 6]);
        let part = whole.part(2, 3);
        assert_eq!((part.segments().len(), part.len()), (3, 3));
        let mut some = [0; 3];
        // SAFETY: the segments are the local buffers above, which outlive the call.
        unsafe { part.gather(&mut some) };
        assert_eq!(some, [3, 4, 5]);
        // SAFETY: the segments are the local buffers above, which outlive the call.
        assert_eq!(unsafe { whole.part(1, 4).scatter(&[9, 8, 7, 6, 5]) }, 4);
        assert_eq!((a, b, c), ([1, 9, 8], [7], [6, 6]));
        assert_eq!(whole.part(6, 1).len(), 0);
    }

    #[test]
    fn invalid_buffers_are_refused() {
        let null = std::ptr::null_mut();
        assert!(Buffers::one(null, 1, null).is_err());
        assert!(Buffers::one(null, 0, null).is_ok());
        let iov = [fi::iovec { iov_base: null, iov_len: 0 }; 5];
        // SAFETY: the array holds as many buffers as stated.
        assert!(unsafe { Buffers::read(iov.as_ptr(), std::ptr::null_mut(), 5) }.is_err());
        // SAFETY: the function refuses null.
        assert!(unsafe { Buffers::read(std::ptr::null(), std::ptr::null_mut(), 1) }.is_err());
    }
}
