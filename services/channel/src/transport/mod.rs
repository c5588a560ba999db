//! Transports: tags that the provider matches, and software matching over datagrams.

mod closed;
#[allow(unsafe_code)]
mod provider_tags;
mod purpose;
#[allow(unsafe_code)]
mod software_tags;

use std::sync::Arc;

use ferrogin_libfabric::{Error, Libfabric};

use crate::proto::transport::Transport;
use crate::{Config, Matching};
use provider_tags::ProviderTags;
use software_tags::SoftwareTags;

pub(crate) use closed::Closed;
pub(crate) use purpose::Purpose;

/// Opens the transport that `config` asks for.
///
/// # Errors
/// [`Error::NoMatch`] when the provider has no reliable datagrams that can carry a channel; what the provider answers.
pub(crate) fn open(lib: &Arc<Libfabric>, config: &Config, purpose: Purpose) -> Result<Box<dyn Transport>, Error> {
    let provider = || -> Result<Box<dyn Transport>, Error> {
        let source = config.source.as_deref();
        Ok(Box::new(ProviderTags::open(lib, &config.provider, source, config.max_peers, purpose)?))
    };
    let software = || -> Result<Box<dyn Transport>, Error> { Ok(Box::new(SoftwareTags::open(lib, config, purpose)?)) };
    match config.matching {
        Some(Matching::Provider) => provider(),
        Some(Matching::Software) => software(),
        // Over a stream, each tagged message of the provider is a system call at either end, while software matching sends many messages
        // together. Before libfabric 2.0, tagged messages over tcp also crash: in rxm when a peer dies, in net when many come unexpected.
        None if config.provider == "tcp" => software(),
        None => match provider() {
            Err(Error::NoMatch { .. }) => software(),
            other => other,
        },
    }
}
