//! What goes over the ring's channels: one frame in each message. Little endian.

use super::Step;

/// First bytes of everything.
const MAGIC: [u8; 4] = *b"fGIN";

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// What a frame says besides its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Status {
    /// A block of an allgather.
    Block = 0,
    /// The block's rank could not do its part; no bytes.
    Failed = 1,
    /// The sender gives up; `origin` is the rank that is to blame. No bytes.
    Abort = 2,
    /// Answer to a hello.
    Welcome = 3,
    /// Opens a channel: `origin` is the caller, `sequence` the number of ranks, the bytes the rank that is called.
    Hello = 4,
}

/// Head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    /// See [`Status`].
    pub status: Status,
    /// What the sender is doing.
    pub step: u16,
    /// Allgathers before this one.
    pub sequence: u32,
    /// Whose block it is.
    pub origin: u32,
    /// Bytes that follow.
    pub len: u32,
}

impl Frame {
    /// Bytes on the wire.
    pub const LEN: usize = 20;

    /// As bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&(self.status as u16).to_le_bytes());
        out[6..8].copy_from_slice(&self.step.to_le_bytes());
        for (i, value) in [self.sequence, self.origin, self.len].into_iter().enumerate() {
            out[8 + 4 * i..][..4].copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    /// A message as a frame and the bytes behind it; `None` if it is not one.
    pub fn split(message: &[u8]) -> Option<(Self, &[u8])> {
        let (head, body) = message.split_first_chunk()?;
        let frame = Self::parse(head)?;
        (frame.len as usize == body.len()).then_some((frame, body))
    }

    fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        if bytes[..4] != MAGIC {
            return None;
        }
        let code = u16::from_le_bytes([bytes[4], bytes[5]]);
        let status = [Status::Block, Status::Failed, Status::Abort, Status::Welcome, Status::Hello]
            .into_iter()
            .find(|status| *status as u16 == code)?;
        let step = u16::from_le_bytes([bytes[6], bytes[7]]);
        Some(Self { status, step, sequence: u32_at(bytes, 8), origin: u32_at(bytes, 12), len: u32_at(bytes, 16) })
    }

    /// Name of the sender's step.
    pub fn step_name(&self) -> String {
        match Step::of(self.step) {
            Some(step) => format!("{} (collective call {})", step.name(), self.sequence),
            None => format!("an unknown call ({})", self.step),
        }
    }
}

/// The rank that a hello calls; `None` if it does not say.
pub(super) fn hello_to(body: &[u8]) -> Option<u32> {
    body.try_into().ok().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        for status in [Status::Block, Status::Failed, Status::Abort, Status::Welcome, Status::Hello] {
            let frame = Frame { status, step: 2, sequence: u32::MAX, origin: 7, len: 3 };
            let message = [&frame.emit()[..], b"abc"].concat();
            assert_eq!(Frame::split(&message), Some((frame, &b"abc"[..])));
            for len in 0..message.len() {
                assert_eq!(Frame::split(&message[..len]), None);
            }
        }
        assert_eq!(hello_to(&9u32.to_le_bytes()), Some(9));
        assert_eq!(hello_to(b"abc"), None);
    }

    #[test]
    fn other_bytes_are_refused() {
        assert_eq!(Frame::split(&[0xa5; Frame::LEN]), None);
        let mut bytes = Frame { status: Status::Block, step: 2, sequence: 0, origin: 0, len: 0 }.emit();
        bytes[4] = 9;
        assert_eq!(Frame::split(&bytes), None);
    }
}
