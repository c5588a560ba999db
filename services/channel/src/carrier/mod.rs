//! Carriers: connections over TCP, and tagged messages of a libfabric provider.

pub(crate) mod tags;
mod tcp;

use std::time::Instant;

use ferrogin_libfabric::{Error, Libfabric};

use crate::proto::carrier::{Carrier, Event, FirstIds, Peer, Progress, Properties};
use crate::proto::wire::{Control, Transport};
use crate::{Config, Payload};
use tags::Tags;
use tags::provider::Provider;
use tcp::Tcp;

/// Opens the carrier of the provider that `config` names.
///
/// # Errors
/// [`Error::NoMatch`] if the provider has no tagged messages that can carry a channel; an error if there is no
/// libfabric, or from the provider or the system.
pub(crate) fn open(config: &Config) -> Result<Box<dyn Carrier>, Error> {
    let source = config.source.as_deref();
    if config.provider == "tcp" {
        return Ok(Box::new(Tcp::open(source, config)?));
    }
    if config.secret.is_some() {
        let what = format!("Config::secret needs the provider tcp, not {}: leave it out", config.provider);
        return Err(Error::Argument { what });
    }
    let lib = config.libfabric.clone().map_or_else(|| Libfabric::load(None), Ok)?;
    Ok(Box::new(Tags::new(Provider::open(&lib, &config.provider, source, config.max_peers)?, config)))
}

/// The carrier of a stopped reactor, in the place of the one that was closed.
pub(crate) struct Closed(Properties);

impl Closed {
    pub fn new() -> Self {
        Self(Properties {
            name: Box::default(),
            provider: "none".to_owned(),
            transport: Transport::Tags,
            max_message: 0,
            unread_bytes: 0,
        })
    }
}

fn stopped() -> Error {
    Error::Argument { what: "the reactor has stopped".to_owned() }
}

impl Carrier for Closed {
    fn properties(&self) -> &Properties {
        &self.0
    }

    fn listen(&mut self, _: u32, _: u64) -> Result<Box<[u8]>, Error> {
        Err(stopped())
    }

    fn connect(&mut self, _: &[u8], _: u64) -> Result<Peer, Error> {
        Err(stopped())
    }

    fn send_hello(&mut self, _: Peer, _: Control) {}

    fn open(&mut self, _: Peer, _: &Control) -> FirstIds {
        FirstIds::default()
    }

    fn close(&mut self, _: Peer) {}

    fn send_control(&mut self, _: Peer, _: Control) {}

    fn send(&mut self, _: Peer, _: u32, _: Payload) -> Option<Payload> {
        None
    }

    fn stop_sending(&mut self, _: Peer) {}

    fn read(&mut self, _: Peer, _: Vec<u8>) {}

    fn flush(&mut self) {}

    fn poll(&mut self, _: Instant, _: &mut Vec<Event>) -> Result<bool, Error> {
        Ok(false)
    }

    fn progress(&self, _: Peer) -> Progress {
        Progress { last_heard: Instant::now(), reading: 0, writing: 0 }
    }
}
