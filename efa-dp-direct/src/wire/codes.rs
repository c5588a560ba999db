//! Numbered codes of the device interface. `from_raw` returns `None` for a code that no release names.

/// Defines a fieldless enum over a raw code.
macro_rules! codes {
    (
        $(#[$attr:meta])*
        $name:ident($int:ty) { $($(#[$code_attr:meta])* $code:ident = $raw:literal,)* }
    ) => {
        $(#[$attr])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr($int)]
        pub enum $name {
            $($(#[$code_attr])* $code = $raw,)*
        }

        impl $name {
            /// Every code, in order.
            pub const ALL: &[Self] = &[$(Self::$code),*];

            /// Returns the code with the number `raw`, if a release names it.
            #[inline(always)]
            pub const fn from_raw(raw: $int) -> Option<Self> {
                match raw {
                    $($raw => Some(Self::$code),)*
                    _ => None,
                }
            }

            /// Returns the number on the wire.
            #[inline(always)]
            pub const fn raw(self) -> $int {
                self as $int
            }
        }
    };
}

codes! {
    /// `efa_io_queue_type`: the kind of queue that a completion is for.
    QueueType(u8) {
        /// A send queue.
        Send = 1,
        /// A receive queue.
        Recv = 2,
    }
}

codes! {
    /// `efa_io_send_op_type`: the operation of a work request.
    SendOp(u8) {
        /// Two-sided send.
        Send = 0,
        /// One-sided read of remote memory.
        RdmaRead = 1,
        /// One-sided write to remote memory.
        RdmaWrite = 2,
        /// Fast memory registration (kernel only).
        FastReg = 3,
        /// Fast memory invalidation (kernel only).
        FastInv = 4,
    }
}

codes! {
    /// `efa_io_comp_status`: the status of a completed work request. Code 18 exists since efa-dp-direct 1.1.0.
    CompStatus(u8) {
        /// Success.
        Ok = 0,
        /// Discarded because the queue pair was destroyed.
        Flushed = 1,
        /// The queue pair failed inside the card.
        LocalQpInternalError = 2,
        /// Operation code that the queue pair doesn't support.
        LocalUnsupportedOp = 3,
        /// Address handle that doesn't exist here.
        LocalInvalidAh = 4,
        /// Local key unknown, without the access needed, or not covering the addresses.
        LocalInvalidLkey = 5,
        /// Longer than the operation allows.
        LocalBadLength = 6,
        /// Remote key unknown, without the access needed, or not covering the addresses.
        RemoteBadAddress = 7,
        /// The peer reset the connection.
        RemoteAbort = 8,
        /// The peer has no such queue pair, or it is in error.
        RemoteBadDestQpn = 9,
        /// The peer has no receive posted.
        RemoteRnr = 10,
        /// The peer's receive is too short.
        RemoteBadLength = 11,
        /// The peer answered with a status that makes no sense.
        RemoteBadStatus = 12,
        /// The peer stopped answering.
        LocalUnresponsiveRemote = 13,
        /// The peer has no address handle for this card, which RDMA needs.
        RemoteUnknownPeer = 14,
        /// The peer never answered.
        LocalUnreachableRemote = 15,
        /// The peer lacks a feature that the request needs.
        RemoteFeatureMismatch = 18,
    }
}

codes! {
    /// `efa_io_processing_hint`: bits of [`crate::wire::Ctrl3`]; `efa_cuda_processing_hint` has the same number.
    ProcessingHint(u8) {
        /// The burst's packet rate matters more than its latency.
        BurstPpsSensitive = 1,
    }
}

codes! {
    /// `efa_cuda_wc_opcode`: the kind of a completion, as the device-side readers report it.
    WcOpcode(u8) {
        /// A send, or anything else on a send queue that is neither write nor read.
        Send = 0,
        /// RDMA write.
        RdmaWrite = 1,
        /// RDMA read.
        RdmaRead = 2,
        /// A receive.
        Recv = 128,
        /// A peer's RDMA write with immediate data.
        RecvRdmaWithImm = 129,
    }
}

impl CompStatus {
    /// Returns a one-line description.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Ok => "completed",
            Self::Flushed => "flushed because the queue pair was destroyed",
            Self::LocalQpInternalError => "the queue pair failed inside the local card",
            Self::LocalUnsupportedOp => "the local queue pair does not do this operation",
            Self::LocalInvalidAh => "the address handle does not exist on the local card",
            Self::LocalInvalidLkey => "the local key is unknown, lacks the access needed, or does not cover the buffer",
            Self::LocalBadLength => "the request is longer than the card can carry",
            Self::RemoteBadAddress => {
                "the remote key is unknown, lacks the access needed, or does not cover the target"
            }
            Self::RemoteAbort => "the peer reset the connection",
            Self::RemoteBadDestQpn => "the peer has no such queue pair, or it is in error",
            Self::RemoteRnr => "the peer has no receive posted",
            Self::RemoteBadLength => "the peer's receive buffer is too short",
            Self::RemoteBadStatus => "the peer answered with an unexpected status",
            Self::LocalUnresponsiveRemote => "the peer stopped answering",
            Self::RemoteUnknownPeer => "the peer has no address handle for this card",
            Self::LocalUnreachableRemote => "the peer never answered",
            Self::RemoteFeatureMismatch => "the peer lacks a feature that the request needs",
        }
    }
}

impl core::fmt::Display for CompStatus {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.text())
    }
}
