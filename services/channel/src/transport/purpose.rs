//! What a transport is opened for.

/// Why a transport is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To carry messages.
    Messages,
    /// To try whether it opens: without the memory that providers allocate for messages.
    Check,
}
