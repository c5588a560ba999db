//! Transports: connections over TCP, and tags that a libfabric provider matches.

mod closed;
mod tags;
mod tcp;

use ferrogin_libfabric::{Error, Libfabric};

use crate::Config;
use crate::proto::transport::Transport;
use tags::provider::ProviderTags;
use tcp::Tcp;

pub(crate) use closed::Closed;

/// Opens the transport of the provider that `config` names.
///
/// # Errors
/// [`Error::NoMatch`] if the provider has no tagged messages that can carry a channel; an error if there is no libfabric, or from the
/// provider or the system.
pub(crate) fn open(config: &Config) -> Result<Box<dyn Transport>, Error> {
    let source = config.source.as_deref();
    if config.provider == "tcp" {
        return Ok(Box::new(Tcp::open(source)?));
    }
    if config.secret.is_some() {
        let what = format!("Config::secret needs the provider tcp, not {}: leave it out", config.provider);
        return Err(Error::Argument { what });
    }
    let lib = config.libfabric.clone().map_or_else(|| Libfabric::load(None), Ok)?;
    Ok(Box::new(ProviderTags::open(&lib, &config.provider, source, config.max_peers)?))
}
