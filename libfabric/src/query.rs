//! `fi_getinfo`: finding ways to reach the network.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use crate::bindings;
use crate::library::c_string;
use crate::{Error, Hints, Info, Libfabric, Version};

impl Libfabric {
    /// Returns every info that matches the hints, libfabric's preferred one first. Never empty.
    ///
    /// # Errors
    /// [`Error::NoMatch`] if there is none, [`Error::ProviderNotLoaded`] if libfabric lacks the hints' provider
    /// although the caller named its directory, [`Error::Call`] for anything else.
    pub fn getinfo(self: &Arc<Self>, hints: &Hints) -> Result<Vec<Info>, Error> {
        let node = hints.node.as_deref().map(|node| c_string("node", node)).transpose()?;
        let service = hints.service.as_deref().map(|service| c_string("service", service)).transpose()?;
        let raw_hints = hints.to_info(self)?;
        match self.query(node.as_deref(), service.as_deref(), hints.flags, Some(&raw_hints)) {
            Err(Error::Call { code: bindings::FI_ENODATA, .. }) => Err(self.no_match(hints)),
            other => other,
        }
    }

    /// Returns the names and versions of all registered providers, usable here or not.
    pub fn providers(self: &Arc<Self>) -> Vec<(String, Version)> {
        match self.query(None, None, bindings::FI_PROV_ATTR_ONLY, None) {
            Ok(list) => list.iter().map(|info| (info.provider(), info.provider_version())).collect(),
            Err(error) => {
                log::debug!("{error}");
                Vec::new()
            }
        }
    }

    fn query(
        self: &Arc<Self>,
        node: Option<&CStr>,
        service: Option<&CStr>,
        flags: u64,
        hints: Option<&Info>,
    ) -> Result<Vec<Info>, Error> {
        let node = node.map_or(ptr::null(), CStr::as_ptr);
        let service = service.map_or(ptr::null(), CStr::as_ptr);
        let hints = hints.map_or(ptr::null_mut(), Info::as_ptr);
        // SAFETY: strings and hints outlive the call, and this library allocated the hints.
        let list = unsafe { self.list_infos(node, service, flags, hints) }?;
        let mut infos = Vec::new();
        let mut next = list;
        while !next.is_null() {
            // SAFETY: `next` is an entry of the list that fi_getinfo returned, which is freed below.
            infos.push(unsafe { Info::duplicate(self, next) });
            // SAFETY: `next` is an entry of the list that fi_getinfo returned, which is freed below.
            next = unsafe { (*next).next };
        }
        // SAFETY: this library's fi_getinfo returned the list, and this is its last use.
        unsafe { self.free_info(list) };
        infos.into_iter().collect()
    }

    fn no_match(self: &Arc<Self>, hints: &Hints) -> Error {
        let known = self.providers();
        if let (Some(provider), Some(dir)) = (&hints.provider, self.provider_dir())
            && !known.iter().any(|(name, _)| name == provider)
        {
            return Error::ProviderNotLoaded { provider: provider.clone(), dir };
        }
        let known: Vec<_> = known.iter().map(|(name, _)| name.as_str()).collect();
        Error::NoMatch { version: self.version(), hints: hints.to_string(), known: known.join(", ") }
    }
}
