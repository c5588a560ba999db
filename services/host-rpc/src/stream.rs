//! The two ends of a streaming call.

use std::sync::Arc;

use crate::parts::Parts;
use crate::{Body, Client, Data, RpcError};

/// A streaming call at the client: [`Client::stream`]. Sends and receives may run at the same time. In each direction,
/// at most eight parts are sent but unread; further sends wait. Dropping it cancels the call.
#[must_use = "dropping it cancels the call"]
pub struct CallStream {
    parts: Arc<Parts>,
    client: Client,
    call: u64,
}

impl CallStream {
    pub(crate) fn new(parts: Arc<Parts>, client: Client, call: u64) -> Self {
        Self { parts, client, call }
    }

    /// Sends a part, once the server has room for it.
    ///
    /// # Errors
    /// The error that ended the call; [`RpcError::Answered`]; [`RpcError::Finished`]; [`RpcError::TooLarge`].
    pub async fn send(&self, part: impl Into<Data>) -> Result<(), RpcError> {
        self.parts.send(part.into()).await
    }

    /// Tells the server that no more parts follow.
    pub fn finish(&self) {
        self.parts.finish();
    }

    /// Returns the server's next part; `None` after the last one.
    ///
    /// # Errors
    /// The error that ended the call.
    pub async fn next(&self) -> Result<Option<Body>, RpcError> {
        self.parts.next().await
    }

    /// Finishes, then waits for the answer. Unread parts are dropped.
    ///
    /// # Errors
    /// The error that ended the call.
    pub async fn answer(self) -> Result<Body, RpcError> {
        self.parts.finish();
        while self.parts.next().await?.is_some() {}
        self.parts.answer().await
    }
}

impl Drop for CallStream {
    fn drop(&mut self) {
        self.client.cancel(self.call);
    }
}

/// A streaming call at the server, for a method that was added with
/// [`Server::method_stream`](crate::Server::method_stream). The answer's parts end when the method returns.
pub struct ServerStream(Arc<Parts>);

impl ServerStream {
    pub(crate) fn new(parts: Arc<Parts>) -> Self {
        Self(parts)
    }

    /// Sends a part, once the client has room for it.
    ///
    /// # Errors
    /// The client cancelled the call or is gone; [`RpcError::TooLarge`].
    pub async fn send(&self, part: impl Into<Data>) -> Result<(), RpcError> {
        self.0.send(part.into()).await
    }

    /// Returns the client's next part; `None` after the last one.
    ///
    /// # Errors
    /// The client cancelled the call or is gone before its last part.
    pub async fn next(&self) -> Result<Option<Body>, RpcError> {
        self.0.next().await
    }
}
