//! The collective steps of set-up.

use zerocopy::TryFromBytes;

/// A collective step. Two ranks in different steps have made different calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u16)]
pub enum Step {
    /// `connect`.
    Connect = 1,
    /// `regMrSym`.
    RegisterWindow = 2,
    /// `createContext`: shapes, addresses and keys.
    CreateContext = 3,
    /// `createContext`: every rank is ready for traffic.
    ContextReady = 4,
    /// A barrier of the host API.
    Barrier = 5,
    /// A [`Bootstrap`](crate::Bootstrap) exchange.
    Bootstrap = 6,
}

impl Step {
    /// Returns the name for messages: NCCL's name for the call, if it has one.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::RegisterWindow => "regMrSym",
            Self::CreateContext | Self::ContextReady => "createContext",
            Self::Barrier => "barrier",
            Self::Bootstrap => "the exchange of the job",
        }
    }

    /// Returns the name of its allgather in a trace.
    pub fn trace_name(self) -> &'static str {
        match self {
            Self::Connect => "connect: exchange",
            Self::RegisterWindow => "regMrSym: exchange",
            Self::CreateContext => "createContext: exchange",
            Self::ContextReady => "createContext: ready",
            Self::Barrier => "barrier",
            Self::Bootstrap => "bootstrap: exchange",
        }
    }

    /// Returns the step with this code; `None` for an unknown code.
    pub(super) fn from_code(code: u16) -> Option<Self> {
        Self::try_read_from_bytes(&code.to_ne_bytes()).ok()
    }
}
