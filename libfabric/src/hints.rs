//! Hints for `fi_getinfo`.

use std::fmt;
use std::sync::Arc;

use crate::bindings::{self, fi_ep_type, fi_threading};
use crate::info::write_part;
use crate::library::c_string;
use crate::{Error, Info, Libfabric};

/// The current interface's `mr_mode` bits that callers usually support: local memory is registered, by virtual address,
/// backed by pages, with keys that the provider chooses, and before it is bound.
pub const MR_MODE_ALL: i32 = bindings::FI_MR_LOCAL
    | bindings::FI_MR_RAW
    | bindings::FI_MR_VIRT_ADDR
    | bindings::FI_MR_ALLOCATED
    | bindings::FI_MR_PROV_KEY
    | bindings::FI_MR_MMU_NOTIFY
    | bindings::FI_MR_RMA_EVENT
    | bindings::FI_MR_ENDPOINT
    | bindings::FI_MR_HMEM;

/// A builder of hints for [`Libfabric::getinfo`]. A field that isn't set leaves the choice to the provider.
///
/// ```
/// use ferrogin_libfabric::{Hints, bindings};
/// let hints = Hints::new("tcp").caps(bindings::FI_MSG).source("127.0.0.1").addr_format(bindings::FI_SOCKADDR_IN);
/// assert!(hints.to_string().contains("tcp"));
/// ```
#[derive(Clone, Debug)]
pub struct Hints {
    pub(crate) provider: Option<String>,
    pub(crate) fabric: Option<String>,
    pub(crate) domain: Option<String>,
    pub(crate) node: Option<String>,
    pub(crate) service: Option<String>,
    pub(crate) flags: u64,
    caps: u64,
    mode: u64,
    addr_format: u32,
    mr_mode: i32,
    inject_size: usize,
    tx_size: usize,
    rx_size: usize,
    tclass: u32,
    threading: u32,
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty),* $(,)?) => {
        $($(#[$doc])* #[must_use] pub fn $name(mut self, $name: $type) -> Self { self.$name = $name; self })*
    };
}

impl Hints {
    /// Creates hints for one provider (`efa`, `softefa`, `tcp`, `tcp;ofi_rxm`): reliable datagram endpoints,
    /// thread-safe objects.
    pub fn new(provider: &str) -> Self {
        Self { provider: Some(provider.to_owned()), ..Self::any() }
    }

    /// Creates hints for any provider.
    pub fn any() -> Self {
        Self {
            provider: None,
            fabric: None,
            domain: None,
            node: None,
            service: None,
            flags: 0,
            caps: 0,
            mode: 0,
            addr_format: bindings::FI_FORMAT_UNSPEC,
            mr_mode: 0,
            inject_size: 0,
            tx_size: 0,
            rx_size: 0,
            tclass: bindings::FI_TC_UNSPEC,
            threading: fi_threading::FI_THREAD_SAFE,
        }
    }

    setters! {
        /// Sets the capabilities: `FI_MSG`, `FI_RMA`, …
        caps: u64,
        /// Sets the mode bits that the caller supports: `FI_CONTEXT2`, …
        mode: u64,
        /// Sets the address format: `FI_ADDR_EFA`, `FI_SOCKADDR_IN`, …
        addr_format: u32,
        /// Sets the memory registration modes that the caller supports: `FI_MR_*`.
        mr_mode: i32,
        /// Sets how many bytes an operation must be able to carry inline; the provider may offer more.
        inject_size: usize,
        /// Sets the number of entries in the send queue.
        tx_size: usize,
        /// Sets the number of entries in the receive queue.
        rx_size: usize,
        /// Sets the traffic class: `FI_TC_*`.
        tclass: u32,
        /// Sets the threading level: `fi_threading::FI_THREAD_*`. The owned handles require the default,
        /// `FI_THREAD_SAFE`.
        threading: u32,
        /// Sets the flags of fi_getinfo itself: `FI_SOURCE`, …
        flags: u64,
    }

    /// Sets the fabric, by the provider's name for it (`efa-direct`).
    #[must_use]
    pub fn fabric(mut self, name: &str) -> Self {
        self.fabric = Some(name.to_owned());
        self
    }

    /// Sets the domain, by the provider's name for it.
    #[must_use]
    pub fn domain(mut self, name: &str) -> Self {
        self.domain = Some(name.to_owned());
        self
    }

    /// Sets the node (host name or address) that fi_getinfo resolves: a peer or, with `FI_SOURCE`, the local host.
    #[must_use]
    pub fn node(mut self, node: &str) -> Self {
        self.node = Some(node.to_owned());
        self
    }

    /// Sets the service (port) that goes with the node.
    #[must_use]
    pub fn service(mut self, service: &str) -> Self {
        self.service = Some(service.to_owned());
        self
    }

    /// Sets the local address to use: the node, with `FI_SOURCE`.
    #[must_use]
    pub fn source(self, node: &str) -> Self {
        let flags = self.flags | bindings::FI_SOURCE;
        self.node(node).flags(flags)
    }

    /// Returns the hints as an `fi_info` that the library itself allocated, so that its parts have the library's sizes.
    /// Only writes fields that every supported release has.
    pub(crate) fn to_info(&self, lib: &Arc<Libfabric>) -> Result<Info, Error> {
        let mut info = Info::empty(lib)?;
        let raw = info.raw_mut();
        raw.caps = self.caps;
        raw.mode = self.mode;
        raw.addr_format = self.addr_format;
        write_part!(&mut info, tx_attr.inject_size, self.inject_size);
        write_part!(&mut info, tx_attr.size, self.tx_size);
        write_part!(&mut info, tx_attr.tclass, self.tclass);
        write_part!(&mut info, rx_attr.size, self.rx_size);
        write_part!(&mut info, ep_attr.type_, fi_ep_type::FI_EP_RDM);
        write_part!(&mut info, domain_attr.threading, self.threading);
        write_part!(&mut info, domain_attr.mr_mode, self.mr_mode);
        info.set_names(
            self.provider.as_deref().map(|name| c_string("provider", name)).transpose()?,
            self.fabric.as_deref().map(|name| c_string("fabric", name)).transpose()?,
            self.domain.as_deref().map(|name| c_string("domain", name)).transpose()?,
        )?;
        Ok(info)
    }
}

impl fmt::Display for Hints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "provider {}", self.provider.as_deref().unwrap_or("any"))?;
        for (key, name) in [("fabric", &self.fabric), ("domain", &self.domain), ("node", &self.node)] {
            if let Some(name) = name {
                write!(f, ", {key} {name}")?;
            }
        }
        write!(f, ", endpoint type {}, caps {:#x}, mode {:#x}", fi_ep_type::FI_EP_RDM, self.caps, self.mode)?;
        write!(f, ", address format {}, mr_mode {:#x}", self.addr_format, self.mr_mode)?;
        if self.inject_size != 0 {
            write!(f, ", inject size {}", self.inject_size)?;
        }
        if self.tx_size != 0 {
            write!(f, ", send queue {}", self.tx_size)?;
        }
        Ok(())
    }
}
