//! The message channel as a transport.

use std::time::Duration;

use ferrogin_channel::{Channel, ChannelError, Payload};

use crate::{Bytes, ReceiveDone, SendDone, Transport, TransportError};

fn error(error: &ChannelError) -> TransportError {
    match error {
        ChannelError::Closed { .. } | ChannelError::ClosedHere { .. } | ChannelError::Stopped => TransportError::Closed,
        other => TransportError::Failed(other.to_string().into()),
    }
}

impl Transport for Channel {
    fn peer(&self) -> &str {
        Self::peer(self)
    }

    fn max_message(&self) -> usize {
        Self::max_message(self)
    }

    fn send(&self, bytes: Bytes, done: SendDone) {
        let payload = match bytes {
            Bytes::Owned(bytes) => Payload::from(bytes),
            Bytes::Shared(bytes, range) => Payload::shared(&bytes, range),
        };
        self.write(payload, move |result| done(result.map(Payload::recycle).map_err(|e| error(&e))));
    }

    fn receive(&self, done: ReceiveDone) {
        self.read(move |result| done(result.map_err(|e| error(&e))));
    }

    fn close(&self, limit: Duration) {
        drop(Self::close(self, limit));
    }

    fn is_own_thread(&self) -> bool {
        Self::is_own_thread(self)
    }

    fn is_closed(&self) -> bool {
        Self::is_closed(self)
    }
}
