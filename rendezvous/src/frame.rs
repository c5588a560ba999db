//! Frames on a stream: a head and a body. Integers are little-endian.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

/// The first bytes of every frame.
const MAGIC: [u8; 4] = *b"fGIN";

/// A frame's head on the wire, unchecked.
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

/// The largest body, far above any set-up block.
pub const BODY_MAX: usize = 256 << 20;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u16)]
pub enum FrameKind {
    /// A block of an allgather follows.
    Block = 0,
    /// Instead of a block: its rank couldn't do its part. No body.
    Failed = 1,
    /// The sender leaves because rank `origin` failed. The body may say why.
    Abort = 2,
    /// The sender leaves because rank `origin`, perhaps itself, closed its communicator. No body.
    Left = 3,
    /// The sender's process runs, whether it's in a call or not. No body.
    Alive = 4,
    /// Rank `origin` has ended, and the sender goes on without it. No body.
    Lost = 5,
}

impl FrameKind {
    fn from_code(code: u16) -> Option<Self> {
        Self::try_read_from_bytes(&code.to_ne_bytes()).ok()
    }
}

/// The head of a valid frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// Its kind.
    pub kind: FrameKind,
    /// The code of the sender's step, which may be unknown if the sender is newer.
    pub step: u16,
    /// How many allgathers came before this one.
    pub sequence: u32,
    /// The rank that the frame is about.
    pub origin: u32,
    /// The body's size in bytes.
    pub len: u32,
}

impl Frame {
    /// Size of a head in bytes.
    pub const HEAD: usize = size_of::<RawHead>();

    /// Creates a head with no body.
    pub fn new(kind: FrameKind, step: u16, sequence: u32, origin: usize) -> Self {
        Self { kind, step, sequence, origin: origin as u32, len: 0 }
    }

    /// Returns this head's bytes.
    pub fn emit(&self) -> [u8; Self::HEAD] {
        zerocopy::transmute!(RawHead {
            magic: MAGIC,
            kind: (self.kind as u16).into(),
            step: self.step.into(),
            sequence: self.sequence.into(),
            origin: self.origin.into(),
            len: self.len.into(),
        })
    }

    /// Parses [`Frame::HEAD`] bytes; `None` if they're invalid.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let head = RawHead::read_from_bytes(bytes).ok()?;
        if head.magic != MAGIC || head.len.get() as usize > BODY_MAX {
            return None;
        }
        Some(Self {
            kind: FrameKind::from_code(head.kind.get())?,
            step: head.step.get(),
            sequence: head.sequence.get(),
            origin: head.origin.get(),
            len: head.len.get(),
        })
    }

    /// Returns true if the sender leaves.
    pub fn is_abort(&self) -> bool {
        matches!(self.kind, FrameKind::Abort | FrameKind::Left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_bytes_are_as_documented() {
        let frame = Frame { kind: FrameKind::Left, step: 0x0201, sequence: 0x0403_0201, origin: 7, len: 4 };
        let expected = b"fGIN\x03\x00\x01\x02\x01\x02\x03\x04\x07\x00\x00\x00\x04\x00\x00\x00";
        assert_eq!(&frame.emit(), expected);
        assert_eq!(Frame::parse(expected), Some(frame));
    }

    #[test]
    fn frames_of_each_kind_round_trip_and_truncated_ones_are_refused() {
        for code in 0..6 {
            let kind = FrameKind::from_code(code).unwrap();
            let frame = Frame { kind, step: 2, sequence: u32::MAX, origin: 7, len: 3 };
            assert_eq!(Frame::parse(&frame.emit()), Some(frame));
            for len in 0..Frame::HEAD {
                assert_eq!(Frame::parse(&frame.emit()[..len]), None);
            }
        }
    }

    #[test]
    fn frames_with_other_magic_or_kind_or_huge_body_are_refused() {
        assert_eq!(Frame::parse(&[0xa5; Frame::HEAD]), None);
        for (at, value) in [(0, b'F'), (4, 9), (19, 0x40)] {
            let mut bytes = Frame::new(FrameKind::Block, 2, 0, 0).emit();
            bytes[at] = value;
            assert_eq!(Frame::parse(&bytes), None, "byte {at}");
        }
    }
}
