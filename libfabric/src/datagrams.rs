//! Choosing among a provider's endpoints for messages: its own reliable datagrams, or those layered over it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::bindings;
use crate::{Error, Hints, Info, Libfabric};

/// Finds reliable datagrams of `provider` with capabilities `caps`, at the local address `source`: `192.0.2.1` or
/// `192.0.2.1:7000`.
///
/// Prefers the provider's own over those of rxm on top of it: when a peer dies, rxm never completes some of the sends
/// to that peer. The hints don't offer `FI_MR_LOCAL`, since buffers aren't registered.
///
/// # Errors
/// [`Error::NoMatch`] if the provider has no such endpoints; otherwise, [`Error::Call`] with libfabric's error.
pub fn find_datagrams(lib: &Arc<Libfabric>, provider: &str, source: Option<&str>, caps: u64) -> Result<Info, Error> {
    let ask = |provider: &str| {
        let hints = Hints::new(provider)
            .caps(caps)
            .mode(bindings::FI_CONTEXT | bindings::FI_CONTEXT2)
            .mr_mode(crate::MR_MODE_ALL & !bindings::FI_MR_LOCAL);
        let by_socket = ["tcp", "net", "sockets"].contains(&provider.split(';').next().unwrap_or_default());
        let Some(source) = source else { return lib.getinfo(&hints) };
        let with_port = source.parse::<SocketAddr>().ok();
        let hints = match with_port {
            Some(address) => hints.source(&address.ip().to_string()).service(&address.port().to_string()),
            None => hints.source(source),
        };
        let address = with_port.map(|address| address.ip()).or_else(|| source.parse::<IpAddr>().ok());
        let v6 = address.is_some_and(|address| address.is_ipv6());
        lib.getinfo(&if by_socket {
            hints.addr_format(if v6 { bindings::FI_SOCKADDR_IN6 } else { bindings::FI_SOCKADDR_IN })
        } else {
            hints
        })
    };
    let mut first = ask(provider);
    let layered = |info: &Info| info.provider().contains(';');
    if !provider.contains(';') && matches!(first, Err(Error::NoMatch { .. })) {
        first = ask(&format!("{provider};ofi_rxm")).or(first);
    }
    let mut list = first?;
    let best = list.iter().position(|info| provider.contains(';') || !layered(info)).unwrap_or(0);
    Ok(list.swap_remove(best))
}
