//! `fid_fabric`: one of the two fabrics.

use std::ffi::CStr;

use ferrogin_libfabric::bindings as fi;

use super::object::{Uses, object};

/// A fabric's kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `efa-direct`: only the card's own operations.
    Direct,
    /// `efa`: messages of any length, in order, with tags.
    Rdm,
}

impl Kind {
    /// In the order in which `fi_getinfo` offers them.
    pub(super) const ALL: [Self; 2] = [Self::Rdm, Self::Direct];

    pub(super) fn name(self) -> &'static CStr {
        match self {
            Self::Direct => c"efa-direct",
            Self::Rdm => c"efa",
        }
    }
}

#[repr(C)]
pub(super) struct Fabric {
    pub fid: fi::fid_fabric,
    pub kind: Kind,
    pub uses: Uses,
}

object!(Fabric, FI_CLASS_FABRIC, "fabric", {
    const SHARED_WITH_CHILDREN: bool = true;
});

impl Fabric {
    /// Returns the API version that the application requested; libfabric's core writes it after `fi_fabric` returns.
    pub(super) fn api_version(&self) -> u32 {
        // SAFETY: a field of this object; volatile because libfabric writes it after `fi_fabric` returned it.
        unsafe { (&raw const self.fid.api_version).read_volatile() }
    }
}
