//! Bodies: as they are given to be sent, and as they were received.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use ferrogin_channel::recycle;

/// A body to send.
#[derive(Clone, Debug)]
pub enum Data {
    /// Bytes of its own.
    Owned(Vec<u8>),
    /// Bytes that others use too.
    Shared(Arc<Vec<u8>>),
}

impl Data {
    /// The bytes.
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

/// A body that was received, in the memory in which it was: one piece unless it was longer than the sender's pieces. Long memory is kept
/// for bodies to come when it is dropped.
#[derive(Clone, Default)]
pub struct Body {
    pieces: Vec<Vec<u8>>,
    /// Bytes of the first piece that are not the body's.
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
    /// Behind the first `skip` bytes of a message.
    pub(crate) fn behind(message: Vec<u8>, skip: usize) -> Self {
        Self { pieces: vec![message], skip }
    }

    pub(crate) fn of(pieces: Vec<Vec<u8>>) -> Self {
        Self { pieces, skip: 0 }
    }

    /// The pieces, in order.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().enumerate().map(|(at, piece)| if at == 0 { &piece[self.skip..] } else { &piece[..] })
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.pieces().map(<[u8]>::len).sum()
    }

    /// None at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All bytes: in place if they are in one piece, otherwise copied.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match self.pieces.len() {
            0 => Cow::Borrowed(&[]),
            1 => Cow::Borrowed(&self.pieces[0][self.skip..]),
            _ => Cow::Owned(self.pieces().flatten().copied().collect()),
        }
    }

    /// All bytes, moved if they are in one message of their own.
    pub fn into_vec(mut self) -> Vec<u8> {
        if self.pieces.len() == 1 && self.skip == 0 {
            return self.pieces.pop().unwrap_or_default();
        }
        self.pieces().collect::<Vec<_>>().concat()
    }
}
