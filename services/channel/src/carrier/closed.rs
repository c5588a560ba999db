//! The transport of a stopped reactor.

use std::time::Instant;

use ferrogin_libfabric::Error;

use crate::Payload;
use crate::proto::transport::{Addr, Event, Properties, Receive, ReceiveResult, SendResult, Transport};

/// Replaces an endpoint that was closed.
pub(crate) struct Closed(Properties);

impl Closed {
    pub fn new() -> Self {
        Self(Properties::new(Box::default(), "none".to_owned(), 0))
    }
}

impl Transport for Closed {
    fn properties(&self) -> &Properties {
        &self.0
    }

    fn connect(&mut self, _: &[u8], _: u64) -> Result<Addr, Error> {
        Err(Error::Argument { what: "the reactor has stopped".to_owned() })
    }

    fn identify(&mut self, _: Option<Addr>, _: &[u8]) -> Result<(Addr, Box<[u8]>), Error> {
        Err(Error::Argument { what: "the reactor has stopped".to_owned() })
    }

    fn send(&mut self, _: Addr, _: u64, body: Payload, _: u64, _: bool) -> SendResult {
        SendResult::Retry(body)
    }

    fn receive(&mut self, receive: Receive) -> ReceiveResult {
        ReceiveResult::Retry(receive.buffer)
    }

    fn cancel(&mut self, _: &dyn Fn(u64) -> bool) {}

    fn poll(&mut self, _: Instant, _: &mut Vec<Event>) -> Result<(), Error> {
        Ok(())
    }
}
