//! The engine's operations on its transport, and the tokens that identify them.

use zerocopy::{Immutable, KnownLayout, TryFromBytes};

/// What an operation is for.
#[derive(Clone, Copy, Debug, Immutable, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub(crate) enum Operation {
    SendLength = 1,
    SendPayload = 2,
    ReceiveLength = 3,
    ReceivePayload = 4,
    SendControl = 5,
    ReceiveControl = 6,
    ReceiveUnknown = 7,
    PeekUnknown = 8,
    PeekPayload = 9,
    Discard = 10,
}

/// Bits of a channel number. Numbers are never reused.
const CHANNEL_BITS: u32 = 28;
/// The channel number in operations that belong to no channel.
pub(crate) const NO_CHANNEL: u32 = (1 << CHANNEL_BITS) - 1;

/// Builds an operation's token: 4 bits of operation, 28 bits of channel, 32 bits of message id or index.
pub(crate) fn token(operation: Operation, channel: u32, id: u32) -> u64 {
    (operation as u64) << 60 | u64::from(channel) << 32 | u64::from(id)
}

/// Splits a token into operation, channel, and id or index.
pub(crate) fn parse_token(token: u64) -> Option<(Operation, u32, u32)> {
    let operation = Operation::try_read_from_bytes(&[(token >> 60) as u8]).ok()?;
    Some((operation, (token >> 32) as u32 & NO_CHANNEL, token as u32))
}
