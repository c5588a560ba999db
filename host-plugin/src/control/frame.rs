//! Frames of the control plane: one frame in each message of a channel. Integers are little endian.

use super::step::Step;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first bytes of each frame.
const MAGIC: [u8; 4] = *b"fGIN";

/// The head of a frame on the wire, with any values.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHead {
    magic: [u8; 4],
    kind: U16,
    step: U16,
    sequence: U32,
    origin: U32,
    len: U32,
}

ferrogin_ffi::assert_layout!(RawHead, size 20, align 1, {
    magic @ 0, kind @ 4, step @ 6, sequence @ 8, origin @ 12, len @ 16,
});

/// The body of a hello on the wire.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHello {
    called: U32,
}

ferrogin_ffi::assert_layout!(RawHello, size 4, align 1, { called @ 0 });

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum FrameKind {
    /// A block of an allgather follows.
    Block = 0,
    /// Instead of a block: its rank could not do its part. No body.
    Failed = 1,
    /// The sender leaves the ring because rank `origin` failed. No body.
    Abort = 2,
    /// The sender leaves the ring because rank `origin` closed its communicator. No body.
    Left = 5,
    /// The answer to a hello. No body.
    Welcome = 3,
    /// The first frame of a channel: `origin` is the calling rank, `sequence` the number of ranks, the body the called rank.
    Hello = 4,
}

impl FrameKind {
    fn from_code(code: u16) -> Option<Self> {
        [Self::Block, Self::Failed, Self::Abort, Self::Welcome, Self::Hello, Self::Left]
            .into_iter()
            .find(|kind| *kind as u16 == code)
    }
}

/// The head of a valid frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    /// Its kind.
    pub kind: FrameKind,
    /// The code of the sender's step; a newer sender may have unknown ones.
    pub step: u16,
    /// The number of allgathers before this one.
    pub sequence: u32,
    /// The rank that the frame is about.
    pub origin: u32,
    /// Bytes of the body.
    pub len: u32,
}

impl Frame {
    /// Bytes of a head.
    pub const HEAD: usize = size_of::<RawHead>();

    /// The message of this head and `body`, whose length `len` says.
    pub fn emit(&self, body: &[u8]) -> Vec<u8> {
        let head = RawHead {
            magic: MAGIC,
            kind: (self.kind as u16).into(),
            step: self.step.into(),
            sequence: self.sequence.into(),
            origin: self.origin.into(),
            len: self.len.into(),
        };
        [head.as_bytes(), body].concat()
    }

    /// Splits a message into head and body; `None` if it is no valid frame.
    pub fn parse(message: &[u8]) -> Option<(Self, &[u8])> {
        let (head, body) = RawHead::read_from_prefix(message).ok()?;
        if head.magic != MAGIC || head.len.get() as usize != body.len() {
            return None;
        }
        let frame = Self {
            kind: FrameKind::from_code(head.kind.get())?,
            step: head.step.get(),
            sequence: head.sequence.get(),
            origin: head.origin.get(),
            len: head.len.get(),
        };
        Some((frame, body))
    }

    /// The sender leaves the ring.
    pub fn is_abort(&self) -> bool {
        matches!(self.kind, FrameKind::Abort | FrameKind::Left)
    }

    /// The name of the sender's step, for messages.
    pub fn step_name(&self) -> String {
        match Step::from_code(self.step) {
            Some(step) => format!("{} (collective call {})", step.name(), self.sequence),
            None => format!("an unknown call ({})", self.step),
        }
    }
}

/// The body of a hello to rank `called`.
pub(super) fn emit_hello(called: u32) -> Vec<u8> {
    RawHello { called: called.into() }.as_bytes().to_vec()
}

/// The rank that a hello calls; `None` if the body is not valid.
pub(super) fn parse_hello(body: &[u8]) -> Option<u32> {
    RawHello::read_from_bytes(body).ok().map(|hello| hello.called.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_bytes_are_as_documented() {
        let frame = Frame { kind: FrameKind::Hello, step: 0x0201, sequence: 0x0403_0201, origin: 7, len: 4 };
        let expected = b"fGIN\x04\x00\x01\x02\x01\x02\x03\x04\x07\x00\x00\x00\x04\x00\x00\x00\x09\x00\x00\x00";
        assert_eq!(frame.emit(&emit_hello(9)), expected);
        assert_eq!(Frame::parse(expected), Some((frame, &expected[20..])));
        assert_eq!(parse_hello(&expected[20..]), Some(9));
        assert_eq!(parse_hello(b"abc"), None);
    }

    #[test]
    fn frames_of_each_kind_round_trip_and_truncated_ones_are_refused() {
        for code in 0..6 {
            let kind = FrameKind::from_code(code).unwrap();
            let frame = Frame { kind, step: 2, sequence: u32::MAX, origin: 7, len: 3 };
            let message = frame.emit(b"abc");
            assert_eq!(Frame::parse(&message), Some((frame, &b"abc"[..])));
            for len in 0..message.len() {
                assert_eq!(Frame::parse(&message[..len]), None);
            }
        }
    }

    #[test]
    fn frames_with_other_magic_or_kind_are_refused() {
        assert_eq!(Frame::parse(&[0xa5; size_of::<RawHead>()]), None);
        let mut bytes = Frame { kind: FrameKind::Block, step: 2, sequence: 0, origin: 0, len: 0 }.emit(&[]);
        bytes[4] = 9;
        assert_eq!(Frame::parse(&bytes), None);
        bytes[4] = 0;
        bytes[0] = b'F';
        assert_eq!(Frame::parse(&bytes), None);
    }
}
