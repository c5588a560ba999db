//! Bodies: [`Data`] to send and [`Body`] received.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use ferrogin_channel::recycle;

/// A body to send.
#[derive(Clone, Debug)]
pub enum Data {
    /// Bytes that this value owns.
    Owned(Vec<u8>),
    /// Bytes that the caller shares.
    Shared(Arc<Vec<u8>>),
}

impl Data {
    /// Returns the bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Data {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Owned(bytes)
    }
}

impl From<&[u8]> for Data {
    fn from(bytes: &[u8]) -> Self {
        Self::Owned(bytes.to_vec())
    }
}

impl<const N: usize> From<&[u8; N]> for Data {
    fn from(bytes: &[u8; N]) -> Self {
        Self::Owned(bytes.to_vec())
    }
}

impl From<&str> for Data {
    fn from(text: &str) -> Self {
        Self::Owned(text.as_bytes().to_vec())
    }
}

impl From<String> for Data {
    fn from(text: String) -> Self {
        Self::Owned(text.into_bytes())
    }
}

impl From<Arc<Vec<u8>>> for Data {
    fn from(bytes: Arc<Vec<u8>>) -> Self {
        Self::Shared(bytes)
    }
}

/// A received body, in the memory that the transport received it in. It has one piece unless the sender split it.
/// Dropping a body returns long buffers to the channels' buffer pool.
#[derive(Clone, Default)]
pub struct Body {
    pieces: Vec<Vec<u8>>,
    /// Bytes at the start of the first piece that precede the body: the header.
    skip: usize,
}

impl PartialEq for Body {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.pieces().flatten().eq(other.pieces().flatten())
    }
}

impl Eq for Body {}

impl Drop for Body {
    fn drop(&mut self) {
        self.pieces.drain(..).for_each(recycle);
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Body({} bytes in {} pieces)", self.len(), self.pieces.len())
    }
}

impl Body {
    /// Returns the body that follows the first `skip` bytes of a message.
    pub(crate) fn after_header(message: Vec<u8>, skip: usize) -> Self {
        Self { pieces: vec![message], skip }
    }

    pub(crate) fn of(pieces: Vec<Vec<u8>>) -> Self {
        Self { pieces, skip: 0 }
    }

    /// Returns the pieces, in order.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().enumerate().map(|(at, piece)| if at == 0 { &piece[self.skip..] } else { &piece[..] })
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.pieces().map(<[u8]>::len).sum()
    }

    /// Returns whether the body has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns all bytes: borrowed if the body has one piece, otherwise copied.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match self.pieces.len() {
            0 => Cow::Borrowed(&[]),
            1 => Cow::Borrowed(&self.pieces[0][self.skip..]),
            _ => Cow::Owned(self.pieces().flatten().copied().collect()),
        }
    }

    /// Returns all bytes: moved if the body came in one message of its own, otherwise copied.
    pub fn into_vec(mut self) -> Vec<u8> {
        if self.pieces.len() == 1 && self.skip == 0 {
            return self.pieces.pop().unwrap_or_default();
        }
        self.pieces().collect::<Vec<_>>().concat()
    }
}
