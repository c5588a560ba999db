//! Finds the cards: the query to libfabric, the checks before it, and the errors on a machine without a usable card.

use crate::config::Provider;
use crate::device::DeviceKind;
use crate::error::Error;
use crate::platform::Platform;
use ferrogin_libfabric::{Hints, Info, Libfabric, Version, bindings};
use std::collections::BTreeSet;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;

/// libfabric's name for EFA without a software protocol above the card.
pub(crate) const FABRIC: &str = "efa-direct";
/// The first libfabric whose `efa` provider puts counters in the caller's memory.
const EFA_NEEDS: Version = Version::new(2, 6);

/// A query to libfabric for the cards of one provider.
#[derive(Debug, Clone)]
pub struct CardQuery {
    /// libfabric.
    pub lib: Arc<Libfabric>,
    /// The cards' provider.
    pub provider: Provider,
    /// The device that kernels run on: GPU memory needs FI_HMEM.
    pub kind: DeviceKind,
}

impl CardQuery {
    /// Returns hints for the card `domain`, or for all cards.
    pub fn hints(&self, domain: Option<&str>) -> Hints {
        let mut caps = bindings::FI_RMA;
        if self.kind == DeviceKind::Cuda {
            caps |= bindings::FI_HMEM;
        }
        let hints = Hints::new(self.provider.name())
            .fabric(FABRIC)
            .caps(caps)
            .mode(bindings::FI_CONTEXT | bindings::FI_CONTEXT2)
            .mr_mode(ferrogin_libfabric::MR_MODE_ALL);
        match domain {
            Some(domain) => hints.domain(domain),
            None => hints,
        }
    }

    /// Returns all cards of this machine, sorted by PCI address and name.
    ///
    /// # Errors
    /// There is no usable card; the message names the cause and the fix.
    pub fn find(&self) -> Result<Vec<Info>, Error> {
        let found = match self.provider {
            Provider::SoftEfa => self.find_software_cards(),
            Provider::Efa => self.find_efa_cards(),
            Provider::Tcp | Provider::Verbs => Err(Error::Usage(format!(
                "provider {} has no queues for kernels, which GIN needs: set FERROGIN_PROVIDER to efa or softefa. \
                 NCCL's RMA layer and its GIN proxy (NCCL_GIN_TYPE=2) can use this library over {0}",
                self.provider.name()
            ))),
        }?;
        let mut seen = BTreeSet::new();
        let mut cards: Vec<Info> = found
            .into_iter()
            .filter(|info| info.provider() == self.provider.name() && info.fabric_name() == FABRIC)
            .filter(|info| seen.insert(info.domain_name()))
            .collect();
        if cards.is_empty() {
            return Err(Error::Usage(format!(
                "provider {} of libfabric {} ({}) offers no card with the fabric {FABRIC}: name a newer libfabric in \
                 FERROGIN_LIBFABRIC",
                self.provider.name(),
                self.lib.version(),
                self.lib.path().display()
            )));
        }
        // Shorter names first, so that softefa2 comes before softefa10.
        cards.sort_by_key(|card| (card.pci_address(), card.domain_name().len(), card.domain_name()));
        Ok(cards)
    }

    fn find_software_cards(&self) -> Result<Vec<Info>, Error> {
        let dir = load_software_card(&self.lib)?;
        self.ask(|| {
            format!(
                "no software card: libfabric did not load libsoftefa-fi.so from the plugin's directory {}{}",
                dir.display(),
                software_card_settings()
            )
        })
    }

    fn find_efa_cards(&self) -> Result<Vec<Info>, Error> {
        if !has_rdma_device() {
            return Err(Error::Usage(
                "no EFA card on this machine (/sys/class/infiniband is empty): install the EFA driver on an EFA instance; \
                 on any other machine set FERROGIN_PROVIDER=softefa for the software card"
                    .to_owned(),
            ));
        }
        if self.lib.version() < EFA_NEEDS {
            return Err(Error::Usage(format!(
                "EFA needs libfabric {EFA_NEEDS} or newer for completion counters in GPU memory, but {} is loaded{}: \
                 install the newer one (AWS EFA installer) and name it in FERROGIN_LIBFABRIC, or set \
                 FERROGIN_PROVIDER=softefa for the software card",
                self.lib.version(),
                Platform::this().lacks_counters().map_or(String::new(), |reason| format!(", and {reason}")),
            )));
        }
        enable_fork_safety();
        self.ask(|| {
            "libfabric finds no usable EFA card on this machine: check the EFA driver on an EFA instance (fi_info -p efa); \
             on any other machine set FERROGIN_PROVIDER=softefa for the software card"
                .to_owned()
        })
    }

    /// Queries libfabric for the cards. A libfabric that offers the cards but refuses GPU memory gets its own error.
    fn ask(&self, no_card: impl FnOnce() -> String) -> Result<Vec<Info>, Error> {
        let found = self.lib.getinfo(&self.hints(None));
        let without_gpu_memory = Self { kind: DeviceKind::Cpu, ..self.clone() };
        if self.kind == DeviceKind::Cuda && found.is_err() && self.lib.getinfo(&without_gpu_memory.hints(None)).is_ok()
        {
            return Err(refuses_gpu_memory(&self.lib, self.provider));
        }
        found.map_err(|source| Error::Fabric { what: no_card(), source })
    }
}

/// Returns the error for a libfabric that offers `provider`, but not with GPU memory.
pub fn refuses_gpu_memory(lib: &Libfabric, provider: Provider) -> Error {
    Error::Usage(format!(
        "provider {} of libfabric {} ({}) refuses GPU memory (FI_HMEM): this libfabric was built without CUDA, or \
         cannot load the CUDA driver, or FI_HMEM_P2P_DISABLED or FI_HMEM is set. Name a libfabric that was built \
         with CUDA in FERROGIN_LIBFABRIC (the AWS EFA installer has one), and unset these variables",
        provider.name(),
        lib.version(),
        lib.path().display()
    ))
}

/// Sets FI_EFA_FORK_SAFE, so that a process with EFA endpoints can fork, as Python's data loaders do. Without it, the
/// provider aborts a forking process on kernels before 5.13. A value set by the user stays. libfabric reads the
/// variable in the process's first fi_getinfo.
#[allow(unsafe_code)]
pub(crate) fn enable_fork_safety() {
    const NAME: &str = "FI_EFA_FORK_SAFE";
    // The provider refuses fork safety together with huge pages, so respect a user's choice of huge pages.
    if std::env::var_os(NAME).is_none() && std::env::var_os("FI_EFA_USE_HUGE_PAGE").is_none() {
        // SAFETY: no other thread accesses the environment now. NCCL calls `init` under a process-wide mutex and the
        // plugin has no threads yet; the program keeps its own threads from changing the environment during NCCL's
        // set-up, as for every library that calls setenv.
        unsafe { std::env::set_var(NAME, "1") };
    }
}

/// Returns true if the kernel lists an RDMA device.
pub(crate) fn has_rdma_device() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

/// Returns a hint that lists the SOFTEFA_ variables that are set. The software card offers no cards if it doesn't
/// understand one of them, and only reports it on standard error.
pub(crate) fn software_card_settings() -> String {
    let mut settings: Vec<String> = std::env::vars_os()
        .filter(|(name, value)| name.to_string_lossy().starts_with("SOFTEFA_") && !value.is_empty())
        .map(|(name, value)| format!("{}={}", name.to_string_lossy(), value.to_string_lossy()))
        .collect();
    settings.sort();
    if settings.is_empty() {
        String::new()
    } else {
        format!(
            "; or the software card refused a setting and named it on standard error: check or unset {}",
            settings.join(", ")
        )
    }
}

/// Makes libfabric load the software card, and returns its directory.
pub(crate) fn load_software_card(lib: &Arc<Libfabric>) -> Result<PathBuf, Error> {
    let dir = library_dir()?;
    add_provider_dir(lib, &dir)?;
    Ok(dir)
}

/// Makes libfabric load providers from `dir`.
#[allow(unsafe_code)]
fn add_provider_dir(lib: &Arc<Libfabric>, dir: &Path) -> Result<(), Error> {
    // SAFETY: no other thread accesses the environment now, for the reason given in `enable_fork_safety`.
    unsafe { lib.use_provider_dir(dir) }.map_err(Error::fabric("the software card cannot be loaded"))
}

/// Returns the directory that contains this library's file.
#[allow(unsafe_code)]
fn library_dir() -> Result<PathBuf, Error> {
    use std::os::unix::ffi::OsStrExt;
    let missing = || {
        Error::Usage(
            "dladdr does not return the path of the plugin's own file, and the software card has to be next to it: \
             load the plugin from a file"
                .to_owned(),
        )
    };
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: null_mut(),
    };
    let own: fn() -> Result<PathBuf, Error> = library_dir;
    // SAFETY: dladdr writes `info`, a local variable, and accepts any address.
    let found = unsafe { libc::dladdr(own as *const libc::c_void, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return Err(missing());
    }
    // SAFETY: the linker's NUL-terminated name of the object that contains this code, which stays loaded while it runs.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    path.parent().map(Path::to_owned).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_dir_exists() {
        assert!(library_dir().unwrap().is_dir());
    }
}
