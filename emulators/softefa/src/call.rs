//! The arguments of an application's calls, read and checked.

use std::ffi::c_void;

use ferrogin_libfabric::bindings as fi;

use super::entry::{Arg, Array, Call};
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

/// Maximum number of buffers that one call may name.
pub(super) const MAX_IOV: usize = 4;

/// One of the application's buffers.
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

// SAFETY: the application's addresses, followed only while its operation lasts.
unsafe impl Send for Buffers {}

impl Buffers {
    const NONE: Segment = Segment { addr: std::ptr::null_mut(), len: 0, lkey: None };

    /// Returns no buffers.
    pub(super) fn none() -> Self {
        Self { segments: [Self::NONE; MAX_IOV], count: 0 }
    }

    pub(super) fn segments(&self) -> &[Segment] {
        &self.segments[..self.count]
    }

    /// Returns the total length in bytes.
    pub(super) fn len(&self) -> usize {
        self.segments().iter().fold(0, |sum, s| sum.saturating_add(s.len))
    }

    /// Returns the address of the first byte, as receive completions name it.
    pub(super) fn start(&self) -> *mut c_void {
        self.segments[0].addr.cast()
    }

    /// Returns `len` bytes from `skip` on, or fewer if there are fewer.
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

    /// Copies as much of `from` into the buffers as they hold, and returns how many bytes that is.
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

impl Arg<'_, (*mut c_void, usize, *mut c_void)> for Buffers {
    unsafe fn of((buf, len, desc): (*mut c_void, usize, *mut c_void), _: &Call) -> Result<Self, Code> {
        if buf.is_null() && len > 0 {
            return Err(Code::INVAL);
        }
        let mut segments = [Self::NONE; MAX_IOV];
        segments[0] = Segment { addr: buf.cast(), len, lkey: key_of(desc) };
        Ok(Self { segments, count: 1 })
    }
}

impl Arg<'_, (*const fi::iovec, *mut *mut c_void, usize)> for Buffers {
    unsafe fn of((iov, descs, count): (*const fi::iovec, *mut *mut c_void, usize), call: &Call) -> Result<Self, Code> {
        if count > MAX_IOV {
            return Err(Code::INVAL);
        }
        // SAFETY: as many buffers as stated.
        let iov: Array<'_, fi::iovec> = unsafe { Arg::of((iov, count), call) }?;
        // SAFETY: null or as many descriptors.
        let descs: Array<'_, *mut c_void> =
            unsafe { Arg::of((descs.cast_const(), if descs.is_null() { 0 } else { count }), call) }?;
        let mut descs = descs.iter();
        let mut buffers = Self { count, ..Self::none() };
        for (segment, iov) in buffers.segments.iter_mut().zip(iov.iter()) {
            if iov.iov_base.is_null() && iov.iov_len > 0 {
                return Err(Code::INVAL);
            }
            *segment = Segment { addr: iov.iov_base.cast(), len: iov.iov_len, lkey: descs.next().and_then(key_of) };
        }
        Ok(buffers)
    }
}

/// `fi_msg`, `fi_msg_tagged` or `fi_msg_rma`.
pub(super) struct Message {
    pub buffers: Buffers,
    pub peer: u64,
    pub context: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub ignore: u64,
    /// The range of `fi_msg_rma`, if there is one.
    pub remote: Option<fi::fi_rma_iov>,
}

impl Message {
    /// Returns the data for the peer's completion, if the flags say that there is any.
    pub(super) fn data(&self, flags: u64) -> Option<u64> {
        (flags & fi::FI_REMOTE_CQ_DATA != 0).then_some(self.data)
    }
}

/// Reads the structs, whose first fields have the same names.
macro_rules! messages {
    ($($raw:ty: |$msg:ident, $call:ident| { $($field:ident: $value:expr),* };)*) => {$(
        impl Arg<'_, *const $raw> for Message {
            unsafe fn of(raw: *const $raw, $call: &Call) -> Result<Self, Code> {
                // SAFETY: null or a message.
                let $msg: &$raw = unsafe { Option::of(raw, $call) }?.ok_or(Code::INVAL)?;
                // SAFETY: as many buffers and, unless null, descriptors as the message states.
                let buffers = unsafe { Arg::of(($msg.msg_iov, $msg.desc, $msg.iov_count), $call) }?;
                Ok(Self { buffers, peer: $msg.addr, context: $msg.context, data: $msg.data, $($field: $value),* })
            }
        }
    )*};
}

messages! {
    fi::fi_msg: |msg, call| { tag: 0, ignore: 0, remote: None };
    fi::fi_msg_tagged: |msg, call| { tag: msg.tag, ignore: msg.ignore, remote: None };
    fi::fi_msg_rma: |msg, call| {
        tag: 0,
        ignore: 0,
        // SAFETY: as many ranges as the message states.
        remote: unsafe { Array::of((msg.rma_iov, msg.rma_iov_count), call) }?.only()
    };
}

/// Returns the key that `fi_mr_desc` carries, which is never 0.
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
        unsafe { Buffers::of((iov.as_ptr(), std::ptr::null_mut(), iov.len()), &Call) }.unwrap()
    }

    #[test]
    fn bytes_pass_through_buffers_in_order() {
        let (mut a, mut b, mut c) = ([1, 2, 3], [4], [5, 6]);
        let whole = buffers(&mut [&mut a, &mut b, &mut c]);
        assert_eq!(whole.len(), 6);
        let gather = |buffers: &Buffers| {
            let mut out = vec![0; buffers.len()];
            // SAFETY: the segments are the local buffers above, which outlive the call.
            unsafe { buffers.gather(&mut out) };
            out
        };
        assert_eq!(gather(&whole), [1, 2, 3, 4, 5, 6]);
        let part = whole.part(2, 3);
        assert_eq!((part.segments().len(), part.len()), (3, 3));
        assert_eq!(gather(&part), [3, 4, 5]);
        // SAFETY: the segments are the local buffers above, which outlive the call.
        assert_eq!(unsafe { whole.part(1, 4).scatter(&[9, 8, 7, 6, 5]) }, 4);
        assert_eq!((a, b, c), ([1, 9, 8], [7], [6, 6]));
        assert_eq!(whole.part(6, 1).len(), 0);
    }

    #[test]
    fn invalid_buffers_are_refused() {
        let null = std::ptr::null_mut();
        // SAFETY: null, which is refused or has no bytes.
        let one = |len| unsafe { Buffers::of((null, len, null), &Call) };
        assert!(one(1).is_err() && one(0).is_ok());
        let iov = [fi::iovec { iov_base: null, iov_len: 0 }; 5];
        // SAFETY: null is refused, and the array has five elements.
        let read = |iov, len| unsafe { Buffers::of((iov, std::ptr::null_mut(), len), &Call) };
        assert!(read(iov.as_ptr(), 5).is_err() && read(std::ptr::null(), 1).is_err());
    }
}
