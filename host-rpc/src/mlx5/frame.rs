//! What one end of a connection says to the other, in messages of the card.

/// Bytes of a header.
pub(super) const HEADER: usize = 24;

/// What a message of the card is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// A whole message of `length` bytes follows.
    Message { length: u64 },
    /// A message of `length` bytes that can be fetched through the window `rkey`, from offset 0.
    Offer { length: u64, rkey: u32 },
    /// Nothing else: the message makes a window invalid, as one of another kind may too, for what was offered is fetched.
    Taken,
    /// Nothing more will be sent.
    Bye,
}

impl Frame {
    pub(super) fn to_bytes(self) -> [u8; HEADER] {
        let (kind, rkey, length) = match self {
            Frame::Message { length } => (1_u32, 0, length),
            Frame::Offer { length, rkey } => (2, rkey, length),
            Frame::Taken => (3, 0, 0),
            Frame::Bye => (4, 0, 0),
        };
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&rkey.to_le_bytes());
        bytes[8..16].copy_from_slice(&length.to_le_bytes());
        bytes
    }

    /// The frame at the beginning of `bytes`, if they are one; what follows a message must be as long as it says.
    pub(super) fn parse(bytes: &[u8]) -> Option<Frame> {
        let (header, rest) = bytes.split_at_checked(HEADER)?;
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let length = u64::from(word(8)) | u64::from(word(12)) << 32;
        let frame = match word(0) {
            1 => Frame::Message { length },
            2 => Frame::Offer { length, rkey: word(4) },
            3 => Frame::Taken,
            4 => Frame::Bye,
            _ => return None,
        };
        let follows = if let Frame::Message { length } = frame { length } else { 0 };
        (rest.len() as u64 == follows).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_survive(length in any::<u64>(), rkey in any::<u32>(), body in prop::collection::vec(any::<u8>(), 0..50)) {
            for frame in [Frame::Offer { length, rkey }, Frame::Taken, Frame::Bye] {
                prop_assert_eq!(Frame::parse(&frame.to_bytes()), Some(frame));
            }
            let message = Frame::Message { length: body.len() as u64 };
            let bytes = [&message.to_bytes()[..], &body].concat();
            prop_assert_eq!(Frame::parse(&bytes), Some(message));
            prop_assert_eq!(Frame::parse(&[&bytes[..], &[0]].concat()), None);
        }

        #[test]
        fn any_bytes_are_a_frame_or_none(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Frame::parse(&bytes);
        }
    }
}
