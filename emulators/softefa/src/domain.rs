//! `fid_domain`: a protection domain on one card.

use std::sync::Arc;

use ferrogin_libfabric::bindings as fi;

use super::fabric::{Fabric, Kind};
use super::object::{Held, Uses, object};
use soft_nic::card::Card;

#[repr(C)]
pub(super) struct Domain {
    pub fid: fi::fid_domain,
    pub fabric: Held<Fabric>,
    pub card: Arc<Card>,
    /// The protection domain's number on the card.
    pub pd: u32,
    /// Capabilities that the application asked for (`FI_HMEM`...).
    pub caps: u64,
    pub uses: Uses,
}

object!(Domain, FI_CLASS_DOMAIN, "domain");

impl Domain {
    /// Returns the kind of the fabric that the domain belongs to.
    pub(super) fn fabric_kind(&self) -> Kind {
        self.fabric.kind
    }

    /// Returns the API version that the application asked for.
    pub(super) fn api_version(&self) -> u32 {
        self.fabric.api_version()
    }
}
