//! What goes over the ring's sockets: a hello that lets a rank in, its answer, and frames. Little endian.

use super::Step;

/// Bytes of the secret in a listen handle.
pub(super) const NONCE: usize = 16;
/// First bytes of everything.
const MAGIC: [u8; 4] = *b"fGIN";

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Opens a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// The secret of the rank that is called.
    pub nonce: [u8; NONCE],
    /// The caller.
    pub from: u32,
    /// The called.
    pub to: u32,
    /// Ranks of the communicator.
    pub nranks: u32,
}

impl Hello {
    /// Bytes on the wire.
    pub const LEN: usize = 4 + NONCE + 12;

    /// As bytes.
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4..4 + NONCE].copy_from_slice(&self.nonce);
        for (i, value) in [self.from, self.to, self.nranks].into_iter().enumerate() {
            out[4 + NONCE + 4 * i..][..4].copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    /// From bytes; `None` if they are no hello.
    pub fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        if bytes[..4] != MAGIC {
            return None;
        }
        let mut nonce = [0; NONCE];
        nonce.copy_from_slice(&bytes[4..4 + NONCE]);
        let word = |i: usize| u32_at(bytes, 4 + NONCE + 4 * i);
        Some(Self { nonce, from: word(0), to: word(1), nranks: word(2) })
    }
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

    /// From bytes; `None` if they are no frame.
    pub fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        if bytes[..4] != MAGIC {
            return None;
        }
        let code = u16::from_le_bytes([bytes[4], bytes[5]]);
        let status = [Status::Block, Status::Failed, Status::Abort, Status::Welcome]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_and_hellos_survive_the_wire() {
        let hello = Hello { nonce: std::array::from_fn(|i| i as u8), from: 3, to: 4, nranks: 9 };
        assert_eq!(Hello::parse(&hello.emit()), Some(hello));
        for status in [Status::Block, Status::Failed, Status::Abort, Status::Welcome] {
            let frame = Frame { status, step: 2, sequence: u32::MAX, origin: 7, len: 1 << 30 };
            assert_eq!(Frame::parse(&frame.emit()), Some(frame));
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        assert_eq!(Hello::parse(&[0xa5; Hello::LEN]), None);
        assert_eq!(Frame::parse(&[0xa5; Frame::LEN]), None);
        let mut bytes = Frame { status: Status::Block, step: 2, sequence: 0, origin: 0, len: 0 }.emit();
        bytes[4] = 9;
        assert_eq!(Frame::parse(&bytes), None);
    }
}
