//! Operation codes, completion codes and syndromes.

/// A code of one byte with named values; an unknown code keeps its value.
macro_rules! code {
    ($(#[$attr:meta])* $name:ident; $($(#[$value_attr:meta])* $value:ident = $code:literal,)*) => {
        $(#[$attr])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$value_attr])* $value,)*
            /// Any other code.
            Unknown(u8),
        }

        impl $name {
            /// Returns the value of a code.
            #[inline]
            pub const fn from_code(code: u8) -> Self {
                match code {
                    $($code => Self::$value,)*
                    other => Self::Unknown(other),
                }
            }

            /// Returns the code of a value.
            #[inline]
            pub const fn code(self) -> u8 {
                match self {
                    $(Self::$value => $code,)*
                    Self::Unknown(code) => code,
                }
            }
        }
    };
}

code! {
    /// Operation of a send queue's work request: `MLX5_OPCODE_*`.
    Opcode;
    /// No operation.
    Nop = 0x00,
    /// A message that invalidates a key of the peer.
    SendInval = 0x01,
    /// Write to the peer's memory.
    RdmaWrite = 0x08,
    /// Write to the peer's memory that gives the peer a completion with immediate data.
    RdmaWriteImm = 0x09,
    /// A message.
    Send = 0x0a,
    /// A message with immediate data.
    SendImm = 0x0b,
    /// Read from the peer's memory.
    RdmaRead = 0x10,
    /// Compare and swap of 8 bytes.
    AtomicCs = 0x11,
    /// Fetch and add on 8 bytes.
    AtomicFa = 0x12,
    /// Change a memory key: bind or invalidate a window.
    Umr = 0x25,
}

code! {
    /// Kind of a completion: `MLX5_CQE_*`, the high four bits of `op_own`.
    CqeOpcode;
    /// A work request of the send queue completed.
    Req = 0,
    /// The peer wrote with immediate data.
    RespWrImm = 1,
    /// A message arrived.
    RespSend = 2,
    /// A message with immediate data arrived.
    RespSendImm = 3,
    /// A message arrived and invalidated a key.
    RespSendInv = 4,
    /// The queue was resized.
    ResizeCq = 5,
    /// A completion without a packet (tag matching).
    NoPacket = 6,
    /// A signature check failed.
    SigErr = 12,
    /// A work request of the send queue failed.
    ReqErr = 13,
    /// A receive failed.
    RespErr = 14,
    /// The slot was never written.
    Invalid = 15,
}

code! {
    /// Reason of a failure: `MLX5_CQE_SYNDROME_*`.
    Syndrome;
    /// The message is longer than the buffers posted for it.
    LocalLength = 0x01,
    /// The work request is malformed.
    LocalQpOp = 0x02,
    /// A local key does not allow the access.
    LocalProt = 0x04,
    /// The queue pair was in error; the work request was not executed.
    WrFlush = 0x05,
    /// A window could not be bound.
    MwBind = 0x06,
    /// The peer answered with an unexpected packet.
    BadResp = 0x10,
    /// An incoming write failed on local memory.
    LocalAccess = 0x11,
    /// The peer rejected the request as invalid.
    RemoteInvalReq = 0x12,
    /// A remote key does not allow the access.
    RemoteAccess = 0x13,
    /// The peer failed to execute the operation.
    RemoteOp = 0x14,
    /// The peer did not answer after all retries.
    TransportRetryExceeded = 0x15,
    /// The peer had no receive posted, after all retries.
    RnrRetryExceeded = 0x16,
    /// The peer aborted the operation.
    RemoteAborted = 0x22,
}

impl std::fmt::Display for Syndrome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::LocalLength => "local length error: the message is longer than the buffers posted for it",
            Self::LocalQpOp => "local operation error: the work request is malformed or not allowed on this queue pair",
            Self::LocalProt => "local protection error: an lkey is invalid, of another domain, or does not cover the range",
            Self::WrFlush => "flushed: the queue pair was in error before this work request; the first failure tells the reason",
            Self::MwBind => "window bind error: the region, the key or the queue pair does not allow this bind",
            Self::BadResp => "bad response: the peer answered with an unexpected packet",
            Self::LocalAccess => "local access error: an incoming RDMA write failed on local memory",
            Self::RemoteInvalReq => "remote invalid request: the peer refused the operation or its length",
            Self::RemoteAccess => {
                "remote access error: the rkey is stale, of another queue pair, lacks the right, or does not cover the range"
            }
            Self::RemoteOp => "remote operation error: the peer could not complete the operation",
            Self::TransportRetryExceeded => "transport retries exceeded: the peer does not answer",
            Self::RnrRetryExceeded => "receiver-not-ready retries exceeded: the peer has no receive posted",
            Self::RemoteAborted => "remote aborted: the peer gave up the operation",
            Self::Unknown(code) => return write!(f, "unknown syndrome {code:#04x}"),
        })
    }
}

/// Bits 2..4 of a completion's `op_own` (`MLX5_INLINE_SCATTER_*`, and compression).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CqeFormat {
    /// A completion without data.
    Plain,
    /// The data are in the first 32 bytes.
    Inline32,
    /// The data are in the first 64 bytes of a 128-byte completion.
    Inline64,
    /// A block of mini completions.
    Compressed,
}
