//! What `init` finds out: libfabric, the cards, and which of them make a NCCL device.

use crate::config::{Config, Provider, SETTINGS};
use crate::context;
use crate::control::Listener;
use crate::device::{self, Device, DeviceKind};
use crate::error::Error;
use crate::platform::Platform;
use crate::trace;
use ferrogin_ffi::nccl::{NET_DEVICE_GIN_EFA_GDA, NetPropertiesV12, NetVDevicePropsV12};
use ferrogin_libfabric::{Hints, Info, Libfabric, Version, bindings};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Rails of one NCCL device: a GPU has at most this many cards of its own.
pub const RAILS_MAX: usize = 2;
/// Name of libfabric's fabric without software above the card.
const FABRIC: &str = "efa-direct";
/// First libfabric whose efa provider has counters in caller memory.
const EFA_NEEDS: Version = Version::new(2, 6);

/// One `init`.
#[derive(Debug)]
pub struct Plugin {
    /// Settings at `init`.
    pub config: Config,
    /// libfabric.
    pub lib: Arc<Libfabric>,
    /// NCCL devices: groups of cards.
    pub devices: Vec<NetDevice>,
    /// Where kernels run.
    pub kind: DeviceKind,
    ptr_support: i32,
}

/// What NCCL counts as one device: one to [`RAILS_MAX`] cards.
#[derive(Debug)]
pub struct NetDevice {
    /// One for each rail.
    pub cards: Vec<Info>,
    name: &'static CStr,
    pci_path: Option<&'static CStr>,
}

/// Plugins that are initialised, latest last: `devices` and `getProperties` bring no context.
static LIVE: Mutex<Vec<Weak<Plugin>>> = Mutex::new(Vec::new());

impl Plugin {
    /// Reads the settings and looks for cards. Opens nothing that others could miss.
    ///
    /// # Errors
    /// Settings that are not understood; no libfabric, no card, no GPU: each names its cure.
    pub fn open() -> Result<Arc<Self>, Error> {
        let config = Config::from_env()?;
        trace::start(config.trace.as_deref());
        if !config.unknown.is_empty() {
            crate::info!(
                "not a setting of the plugin: {} (settings: {})",
                config.unknown.join(", "),
                SETTINGS.join(", ")
            );
        }
        let _span = trace::span("init", 0);
        let lib = Libfabric::load(None).map_err(Error::fabric("ferrogin needs libfabric"))?;
        let device = device::open(config.device, config.provider);
        // A machine without a card often has no GPU either: the card is what the user must hear of.
        let kind = device.as_ref().map_or(DeviceKind::Cpu, |device| device.kind());
        let cards = find_cards(&lib, config.provider, kind)?;
        let device = device?;
        let devices = group(cards);
        let plugin = Self { lib, devices, kind: device.kind(), ptr_support: device.ptr_support(), config };
        plugin.prove_cards(&*device)?;
        check_control(&plugin.lib, &plugin.config)?;
        crate::info!(
            "ferrogin {}: provider {}, kernels on {}, libfabric {}, {} device(s) with {} card(s), posting {}",
            env!("CARGO_PKG_VERSION"),
            plugin.config.provider.name(),
            plugin.kind.name(),
            plugin.lib.version(),
            plugin.devices.len(),
            plugin.devices.iter().map(|device| device.cards.len()).sum::<usize>(),
            match plugin.config.policy {
                crate::config::Policy::Combining => "combining",
                crate::config::Policy::Locked => "locked",
            },
        );
        let plugin = Arc::new(plugin);
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|plugin| plugin.strong_count() > 0);
        live.push(Arc::downgrade(&plugin));
        Ok(plugin)
    }

    /// Proves, once for each card of the process, that endpoints and counters open on it as `createContext` will open them.
    fn prove_cards(&self, device: &dyn Device) -> Result<(), Error> {
        static PROVEN: Mutex<BTreeSet<(&'static str, DeviceKind, String)>> = Mutex::new(BTreeSet::new());
        let mut proven = PROVEN.lock().unwrap_or_else(PoisonError::into_inner);
        for card in self.devices.iter().flat_map(|device| &device.cards) {
            let key = (self.config.provider.name(), self.kind, card.domain_name());
            if !proven.contains(&key) {
                let _span = trace::span("init: card", 0);
                context::prove(self, device, card)?;
                proven.insert(key);
            }
        }
        Ok(())
    }

    /// The latest that lives.
    ///
    /// # Errors
    /// None: `init` did not come, or failed.
    pub fn latest() -> Result<Arc<Self>, Error> {
        let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let found = live.iter().rev().find_map(Weak::upgrade);
        found.ok_or_else(|| Error::Usage("called before init, or after the last finalize".to_owned()))
    }

    /// The NCCL device of that number.
    ///
    /// # Errors
    /// There is none.
    pub fn device(&self, index: c_int) -> Result<&NetDevice, Error> {
        let found = usize::try_from(index).ok().and_then(|index| self.devices.get(index));
        found.ok_or_else(|| Error::Argument(format!("device {index}: there are {}", self.devices.len())))
    }

    /// `getProperties`.
    ///
    /// # Errors
    /// No such device.
    pub fn properties(&self, index: c_int) -> Result<NetPropertiesV12, Error> {
        let device = self.device(index)?;
        let first = &device.cards[0];
        let platform = Platform::this();
        let speed: u64 = device.cards.iter().filter_map(|card| platform.link_speed(card.link_speed())).sum();
        let mut v_props = NetVDevicePropsV12 { ndevs: 1, ..Default::default() };
        v_props.devs[0] = index;
        let largest = first.max_msg_size().clamp(1, isize::MAX as usize);
        Ok(NetPropertiesV12 {
            name: device.name.as_ptr(),
            pci_path: device.pci_path.map_or(null_mut(), |path| path.as_ptr().cast_mut()),
            guid: guid(first),
            ptr_support: self.ptr_support,
            reg_is_global: 0,
            force_flush: 0,
            speed: if speed == 0 { 100_000 } else { (speed / 1_000_000).min(i32::MAX as u64) as c_int },
            port: 1,
            latency: 0.0,
            max_comms: 1 << 16,
            max_recvs: 1,
            net_device_type: NET_DEVICE_GIN_EFA_GDA,
            net_device_version: 0,
            v_props,
            max_p2p_bytes: largest,
            max_coll_bytes: largest,
            max_multi_request_size: 1,
            rail_id: -1,
            plane_id: -1,
        })
    }

    /// Hints for one card, or for all.
    pub fn hints(&self, domain: Option<&str>) -> Hints {
        hints(self.config.provider, self.kind, domain)
    }
}

fn hints(provider: Provider, kind: DeviceKind, domain: Option<&str>) -> Hints {
    let mut caps = bindings::FI_RMA;
    if kind == DeviceKind::Cuda {
        caps |= bindings::FI_HMEM;
    }
    let hints = Hints::new(provider.name())
        .fabric(FABRIC)
        .caps(caps)
        .mode(bindings::FI_CONTEXT | bindings::FI_CONTEXT2)
        .mr_mode(ferrogin_libfabric::MR_MODE_ALL);
    match domain {
        Some(domain) => hints.domain(domain),
        None => hints,
    }
}

fn find_cards(lib: &Arc<Libfabric>, provider: Provider, kind: DeviceKind) -> Result<Vec<Info>, Error> {
    let found = match provider {
        Provider::SoftEfa => {
            let dir = library_dir()?;
            add_provider_dir(lib, &dir)?;
            ask_for_cards(lib, provider, kind, || {
                format!(
                    "no software card, which libsoftefa-fi.so beside the plugin in {} provides{}",
                    dir.display(),
                    card_settings()
                )
            })
        }
        Provider::Efa => {
            if !has_rdma_device() {
                return Err(Error::Usage(
                    "no EFA card on this machine (/sys/class/infiniband is empty): on an EFA instance install the EFA \
                     driver, anywhere else set FERROGIN_PROVIDER=softefa for the software card"
                        .to_owned(),
                ));
            }
            if lib.version() < EFA_NEEDS {
                return Err(Error::Usage(format!(
                    "EFA needs libfabric {EFA_NEEDS} or newer for completion counters in GPU memory, but {} is loaded{}: \
                     install the newer one (AWS EFA installer) and name it in FERROGIN_LIBFABRIC, or set \
                     FERROGIN_PROVIDER=softefa for the software card",
                    lib.version(),
                    Platform::this().lacks_counters().map_or(String::new(), |why| format!(", and {why}")),
                )));
            }
            survive_fork();
            ask_for_cards(lib, provider, kind, || {
                "no EFA card to use on this machine; on an EFA instance check the EFA driver (fi_info -p efa), anywhere \
                 else set FERROGIN_PROVIDER=softefa for the software card"
                    .to_owned()
            })
        }
    }?;
    let mut seen = BTreeSet::new();
    let mut cards: Vec<Info> = found
        .into_iter()
        .filter(|info| info.provider() == provider.name() && info.fabric_name() == FABRIC)
        .filter(|info| seen.insert(info.domain_name()))
        .collect();
    if cards.is_empty() {
        let what = format!("provider {} offers no card with fabric {FABRIC}", provider.name());
        return Err(Error::Usage(format!("{what}; a newer libfabric may (FERROGIN_LIBFABRIC)")));
    }
    // softefa2 comes before softefa10.
    cards.sort_by_key(|card| (card.pci_address(), card.domain_name().len(), card.domain_name()));
    Ok(cards)
}

/// Asks libfabric for the provider's cards. A libfabric that has them, but not for GPU memory, is told apart from one that has none.
fn ask_for_cards(
    lib: &Arc<Libfabric>,
    provider: Provider,
    kind: DeviceKind,
    none: impl FnOnce() -> String,
) -> Result<Vec<Info>, Error> {
    let found = lib.getinfo(&hints(provider, kind, None));
    if kind == DeviceKind::Cuda && found.is_err() && lib.getinfo(&hints(provider, DeviceKind::Cpu, None)).is_ok() {
        return Err(Error::Usage(format!(
            "provider {} of libfabric {} ({}) refuses GPU memory (FI_HMEM): that libfabric was built without CUDA, or cannot load \
             the CUDA driver, or FI_HMEM_P2P_DISABLED or FI_HMEM is set. Name one that was built with CUDA in \
             FERROGIN_LIBFABRIC (the AWS EFA installer's is), and unset these variables",
            provider.name(),
            lib.version(),
            lib.path().display()
        )));
    }
    found.map_err(|source| Error::Fabric { what: none(), source })
}

/// Lets processes that use EFA fork, as Python's data loaders do: without this, and on a kernel before 5.13, the provider aborts a
/// process that forks. What the user has set stays. libfabric reads it at the first fi_getinfo of the process.
#[allow(unsafe_code)]
fn survive_fork() {
    const NAME: &str = "FI_EFA_FORK_SAFE";
    // Fork safety and huge pages exclude each other there: who asks for the latter has chosen.
    if std::env::var_os(NAME).is_none() && std::env::var_os("FI_EFA_USE_HUGE_PAGE").is_none() {
        // SAFETY: as in `add_provider_dir`: NCCL calls `init` under a process-wide mutex, before the plugin has threads.
        unsafe { std::env::set_var(NAME, "1") };
    }
}

/// Finds out once for each setting whether set-up's messages can be carried, for which an endpoint is opened and closed.
fn check_control(lib: &Arc<Libfabric>, config: &Config) -> Result<(), Error> {
    static GOOD: Mutex<BTreeSet<(String, Option<OsString>)>> = Mutex::new(BTreeSet::new());
    let setting = (config.control().to_owned(), std::env::var_os("NCCL_SOCKET_IFNAME"));
    let mut good = GOOD.lock().unwrap_or_else(PoisonError::into_inner);
    if !good.contains(&setting) {
        drop(Listener::open(lib, config.control(), config.timeout)?);
        good.insert(setting);
    }
    Ok(())
}

/// Whether the kernel knows any RDMA device.
fn has_rdma_device() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

/// The software card's settings that are in force, to be named where there is no card: it offers none when it does not
/// understand one of them, and says so on standard error only.
fn card_settings() -> String {
    let mut settings: Vec<String> = std::env::vars_os()
        .filter(|(name, value)| name.to_string_lossy().starts_with("SOFTEFA_") && !value.is_empty())
        .map(|(name, value)| format!("{}={}", name.to_string_lossy(), value.to_string_lossy()))
        .collect();
    settings.sort();
    match settings.is_empty() {
        true => String::new(),
        false => format!(
            " (it refuses settings that it does not understand, and says which on standard error: check or unset {})",
            settings.join(", ")
        ),
    }
}

/// Makes libfabric look for providers beside the plugin.
#[allow(unsafe_code)]
fn add_provider_dir(lib: &Arc<Libfabric>, dir: &Path) -> Result<(), Error> {
    // SAFETY: NCCL calls `init` under a process-wide mutex, before the plugin has threads. That nobody else changes the
    // environment meanwhile is what every library that uses setenv relies on.
    unsafe { lib.use_provider_dir(dir) }.map_err(Error::fabric("the software card cannot be loaded"))
}

/// The directory that this library was loaded from.
#[allow(unsafe_code)]
fn library_dir() -> Result<PathBuf, Error> {
    use std::os::unix::ffi::OsStrExt;
    let missing = || Error::Usage("the plugin's own path cannot be found out (dladdr)".to_owned());
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: null_mut(),
    };
    let own: fn() -> Result<PathBuf, Error> = library_dir;
    // SAFETY: writes `info`; any address may be asked for.
    let found = unsafe { libc::dladdr(own as *const libc::c_void, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return Err(missing());
    }
    // SAFETY: the linker's NUL-terminated name of a loaded object, which this code is part of.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    path.parent().map(Path::to_owned).ok_or_else(missing)
}

/// Groups cards into NCCL devices: neighbours below one PCI switch, at most [`RAILS_MAX`]; software cards in order.
fn group(cards: Vec<Info>) -> Vec<NetDevice> {
    let mut devices: Vec<(Option<PathBuf>, Vec<Info>)> = Vec::new();
    for card in cards {
        let place = switch_of(&card);
        match devices.last_mut() {
            Some((other, group)) if *other == place && group.len() < RAILS_MAX => group.push(card),
            _ => devices.push((place, vec![card])),
        }
    }
    let named = devices.into_iter().map(|(_, cards)| {
        let names: Vec<_> = cards.iter().map(Info::domain_name).collect();
        let pci_path = sysfs_path(&cards[0]).map(|path| intern(&path.to_string_lossy()));
        NetDevice { name: intern(&names.join("+")), pci_path, cards }
    });
    named.collect()
}

/// Sysfs directory of a card.
fn sysfs_path(card: &Info) -> Option<PathBuf> {
    std::fs::canonicalize(format!("/sys/bus/pci/devices/{}", card.pci_address()?)).ok()
}

/// Sysfs directory of the PCI switch above a card's own port: what the GPU beside it shares.
fn switch_of(card: &Info) -> Option<PathBuf> {
    sysfs_path(card)?.parent()?.parent().map(Path::to_owned)
}

fn guid(card: &Info) -> u64 {
    use std::hash::{DefaultHasher, Hasher};
    // A card's raw address begins with its GID.
    let mut hasher = DefaultHasher::new();
    hasher.write(&card.src_addr());
    hasher.write(card.domain_name().as_bytes());
    hasher.finish()
}

/// A string that lives as long as the process: NCCL keeps the pointers. Each distinct one is kept once.
fn intern(text: &str) -> &'static CStr {
    static ALL: Mutex<BTreeSet<&'static CStr>> = Mutex::new(BTreeSet::new());
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = all.get(text.as_c_str()) {
        return known;
    }
    let text: &'static CStr = Box::leak(text.into_boxed_c_str());
    all.insert(text);
    text
}

/// The plugin's name, as NCCL shows it.
pub const NAME: *const c_char = c"ferrogin".as_ptr();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_kept_once() {
        assert!(std::ptr::eq(intern("softefa0+softefa1"), intern("softefa0+softefa1")));
        assert_ne!(intern("a"), intern("b"));
    }

    #[test]
    fn the_own_directory_is_found() {
        assert!(library_dir().unwrap().is_dir());
    }
}
