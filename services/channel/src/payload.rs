//! The bytes of a message to write: owned, shared or static. They reach libfabric without a copy.

use std::ops::Range;
use std::sync::Arc;

/// Bytes to write. The channel keeps them unchanged until the write's callback returns them.
#[derive(Clone, Debug)]
pub struct Payload(Bytes);

#[derive(Clone, Debug)]
enum Bytes {
    Owned(Vec<u8>),
    Shared(Arc<Vec<u8>>, Range<usize>),
    Static(&'static [u8]),
    Word([u8; 8]),
}

impl Payload {
    /// Returns a part of a shared buffer, to send several messages from one buffer without a copy.
    ///
    /// # Panics
    /// If the range is outside the buffer.
    pub fn shared(bytes: &Arc<Vec<u8>>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= bytes.len(), "{range:?} of {} bytes", bytes.len());
        Self(Bytes::Shared(Arc::clone(bytes), range))
    }

    /// Eight bytes, stored in the payload itself.
    pub(crate) fn word(value: u64) -> Self {
        Self(Bytes::Word(value.to_le_bytes()))
    }

    /// Returns whether the payload stores its bytes itself.
    pub(crate) fn is_word(&self) -> bool {
        matches!(self.0, Bytes::Word(_))
    }

    /// Returns the bytes.
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Bytes::Owned(bytes) => bytes,
            Bytes::Shared(bytes, range) => &bytes[range.clone()],
            Bytes::Static(bytes) => bytes,
            Bytes::Word(bytes) => bytes,
        }
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts an owned buffer into the pool for messages that channels read: see [`crate::recycle`].
    pub fn recycle(self) {
        if let Bytes::Owned(bytes) = self.0 {
            crate::recycle(bytes);
        }
    }

    /// Returns the vector that the payload was made from, or a copy of its bytes.
    pub fn into_vec(self) -> Vec<u8> {
        match self.0 {
            Bytes::Owned(bytes) => bytes,
            _ => self.as_slice().to_vec(),
        }
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Bytes::Owned(bytes))
    }
}

impl From<&'static [u8]> for Payload {
    fn from(bytes: &'static [u8]) -> Self {
        Self(Bytes::Static(bytes))
    }
}

impl<const N: usize> From<&'static [u8; N]> for Payload {
    fn from(bytes: &'static [u8; N]) -> Self {
        Self(Bytes::Static(bytes))
    }
}

impl From<Arc<Vec<u8>>> for Payload {
    fn from(bytes: Arc<Vec<u8>>) -> Self {
        let len = bytes.len();
        Self(Bytes::Shared(bytes, 0..len))
    }
}
