//! The result of `init`: settings, libfabric, and the cards, grouped into NCCL devices.

use crate::cards::CardQuery;
use crate::config::{Config, Signals};
use crate::device::{self, Device, DeviceKind};
use crate::error::Error;
use crate::log::counted;
use crate::metrics::Metrics;
use crate::nccl_version::{self, NcclVersion};
use crate::platform::Platform;
use crate::{card_check, trace};
use ferrogin_ffi::nccl::{NET_DEVICE_GIN_EFA_GDA, NetPropertiesV12, NetVDevicePropsV12};
use ferrogin_ffi::settings;
use ferrogin_libfabric::{Info, Libfabric};
use ferrogin_rendezvous::ring::Listener;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Weak};

/// Rails of one NCCL device: a GPU has at most this many cards of its own.
pub const RAILS_MAX: usize = 2;

/// One `init`.
#[derive(Debug)]
pub struct Plugin {
    /// Settings at `init`.
    pub config: Config,
    /// libfabric, the provider and the kind of device.
    pub query: CardQuery,
    /// The NCCL devices.
    pub devices: Devices,
    /// The number of the device whose cards are nearest to the GPU; 0 if there is no GPU.
    pub nearest: usize,
    /// The writer of FERROGIN_METRICS.
    pub metrics: Option<Arc<Metrics>>,
}

/// NCCL's devices.
#[derive(Debug)]
pub struct Devices {
    /// By number.
    pub all: Vec<NetDevice>,
    /// The kinds of memory that NCCL may register: `NCCL_PTR_*`.
    pub ptr_support: c_int,
    /// How NCCL uses them: `NCCL_NET_DEVICE_*`.
    pub net_device_type: c_int,
}

/// An NCCL device: one to [`RAILS_MAX`] cards.
#[derive(Debug)]
pub struct NetDevice {
    /// One for each rail.
    pub cards: Vec<Info>,
    name: &'static CStr,
    pci_path: Option<&'static CStr>,
}

/// The plugins of one kind that haven't been finalized, latest last: NCCL passes no context to `devices` and
/// `getProperties`.
pub(crate) struct Live<T>(Mutex<Vec<Weak<T>>>);

impl<T> Live<T> {
    pub const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    pub fn add(&self, plugin: T) -> Arc<T> {
        let plugin = Arc::new(plugin);
        let mut live = self.0.lock();
        live.retain(|plugin| plugin.strong_count() > 0);
        live.push(Arc::downgrade(&plugin));
        plugin
    }

    /// Returns the latest one. There is none if NCCL didn't call `init`, or `init` failed.
    pub fn latest(&self) -> Result<Arc<T>, Error> {
        let live = self.0.lock();
        let found = live.iter().rev().find_map(Weak::upgrade);
        found.ok_or_else(|| Error::Usage("NCCL called this before init, or after the last finalize".to_owned()))
    }
}

static LIVE: Live<Plugin> = Live::new();

impl Plugin {
    /// Reads the settings, finds the cards and checks them. Keeps no cards open.
    ///
    /// # Errors
    /// An invalid setting; no libfabric, card or GPU; a card that can't open what `createContext` needs. Each message
    /// names its fix.
    pub fn open() -> Result<Arc<Self>, Error> {
        let config = Config::from_env()?;
        trace::start(config.trace.as_deref());
        if !config.unknown.is_empty() {
            crate::info!(
                "init ignores {}, which the plugin does not know; its settings are {}",
                config.unknown.join(", "),
                [&settings::PLUGIN[..], &settings::HOST_API].concat().join(", ")
            );
        }
        let _span = trace::span("init", 0);
        nccl_version::check_release(NcclVersion::of_caller())?;
        let lib = Libfabric::load(None).map_err(Error::fabric("ferrogin needs libfabric"))?;
        let device = device::open(config.device, config.provider);
        // A machine without a card often has no GPU either, so the missing card is the error to report.
        let kind = device.as_ref().map_or(DeviceKind::Cpu, |device| device.kind());
        let query = CardQuery { lib, provider: config.provider, kind };
        let cards = query.find()?;
        let device = device?;
        let all = group(cards);
        let nearest = device.gpu().and_then(|(ordinal, address)| {
            let cards: Vec<_> = all.iter().map(|device| sysfs_path(&device.cards[0])).collect();
            nearest(&cards, &sysfs_of(address)?, ordinal)
        });
        let devices = Devices { all, ptr_support: device.ptr_support(), net_device_type: NET_DEVICE_GIN_EFA_GDA };
        let mut plugin = Self { query, devices, nearest: nearest.unwrap_or(0), metrics: None, config };
        plugin.check_cards(&*device)?;
        Listener::open()?;
        plugin.metrics = Metrics::open(&plugin.config, kind)?;
        crate::info!(
            "ferrogin {}: provider {}, kernels on {}, libfabric {}, {} with {}, posting policy {}",
            env!("CARGO_PKG_VERSION"),
            plugin.config.provider.name(),
            kind.name(),
            plugin.query.lib.version(),
            counted(plugin.devices.all.len(), "device"),
            counted(plugin.devices.all.iter().map(|device| device.cards.len()).sum(), "card"),
            plugin.config.policy.name(),
        );
        Ok(LIVE.add(plugin))
    }

    /// Checks, once per card and process, that endpoints and counters open the way `createContext` opens them.
    fn check_cards(&self, device: &dyn Device) -> Result<(), Error> {
        static CHECKED: Mutex<BTreeSet<(&'static str, DeviceKind, Signals, String)>> = Mutex::new(BTreeSet::new());
        let mut checked = CHECKED.lock();
        for card in self.devices.all.iter().flat_map(|device| &device.cards) {
            let key = (self.config.provider.name(), self.query.kind, self.config.signals, card.domain_name());
            if !checked.contains(&key) {
                let _span = trace::span("init: card", 0);
                card_check::check(&self.query, self.config.signals, device, card)?;
                checked.insert(key);
            }
        }
        Ok(())
    }

    /// Returns the latest plugin that hasn't been finalized.
    ///
    /// # Errors
    /// There is none: NCCL didn't call `init`, or `init` failed.
    pub fn latest() -> Result<Arc<Self>, Error> {
        LIVE.latest()
    }
}

impl Devices {
    /// Returns device number `index`.
    ///
    /// # Errors
    /// There is no such device.
    pub fn get(&self, index: c_int) -> Result<&NetDevice, Error> {
        let found = usize::try_from(index).ok().and_then(|index| self.all.get(index));
        found.ok_or_else(|| {
            let count = counted(self.all.len(), "device");
            Error::Argument(format!("device {index} does not exist: this plugin has {count}"))
        })
    }

    /// Returns a device's properties for `getProperties`.
    ///
    /// # Errors
    /// There is no such device.
    pub fn properties(&self, index: c_int) -> Result<NetPropertiesV12, Error> {
        let device = self.get(index)?;
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
            net_device_type: self.net_device_type,
            net_device_version: 0,
            v_props,
            max_p2p_bytes: largest,
            max_coll_bytes: largest,
            max_multi_request_size: 1,
            rail_id: -1,
            plane_id: -1,
        })
    }
}

/// Groups cards into NCCL devices: up to [`RAILS_MAX`] neighbours below the same PCI switch; software cards in order.
pub(crate) fn group(cards: Vec<Info>) -> Vec<NetDevice> {
    let mut devices: Vec<(Option<PathBuf>, Vec<Info>)> = Vec::new();
    for card in cards {
        let switch = switch_of(&card);
        match devices.last_mut() {
            Some((other, group)) if *other == switch && group.len() < RAILS_MAX => group.push(card),
            _ => devices.push((switch, vec![card])),
        }
    }
    let named = devices.into_iter().map(|(_, cards)| {
        let names: Vec<_> = cards.iter().map(Info::domain_name).collect();
        let pci_path = sysfs_path(&cards[0]).map(|path| intern(&path.to_string_lossy()));
        NetDevice { name: intern(&names.join("+")), pci_path, cards }
    });
    named.collect()
}

/// Returns a card's sysfs directory.
fn sysfs_path(card: &Info) -> Option<PathBuf> {
    sysfs_of(card.pci_address()?)
}

/// Returns the sysfs directory for a PCI address. Its parents are the bridges above the device.
fn sysfs_of(address: impl Display) -> Option<PathBuf> {
    std::fs::canonicalize(format!("/sys/bus/pci/devices/{address}")).ok()
}

/// Returns the index in `cards` of the card that shares the most bridges with the GPU. GPUs with several equally near
/// cards take turns, by `ordinal`.
fn nearest(cards: &[Option<PathBuf>], gpu: &Path, ordinal: usize) -> Option<usize> {
    let shared = |card: &Option<PathBuf>| {
        card.as_ref().map(|card| card.iter().zip(gpu).take_while(|(card, gpu)| card == gpu).count())
    };
    let most = cards.iter().filter_map(shared).max()?;
    let equal: Vec<usize> = (0..cards.len()).filter(|i| shared(&cards[*i]) == Some(most)).collect();
    Some(equal[ordinal % equal.len()])
}

/// Returns the sysfs directory of the PCI switch above the card's own port. The GPU next to the card is below the same
/// switch.
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

/// Returns a copy of `text` that lives as long as the process, since NCCL keeps the pointer. Equal texts share one
/// copy.
fn intern(text: &str) -> &'static CStr {
    static ALL: Mutex<BTreeSet<&'static CStr>> = Mutex::new(BTreeSet::new());
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    let mut all = ALL.lock();
    if let Some(interned) = all.get(text.as_c_str()) {
        return interned;
    }
    let text: &'static CStr = Box::leak(text.into_boxed_c_str());
    all.insert(text);
    text
}

/// The plugin's name in NCCL's messages.
pub const NAME: *const c_char = c"ferrogin".as_ptr();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn card_below_switch_of_gpu_is_nearest() {
        let card = |path: &str| Some(PathBuf::from(path));
        let cards = [
            card("/sys/pci0/a/s0/c0"),
            None,
            card("/sys/pci0/a/s1/c1"),
            card("/sys/pci0/a/s1/c2"),
            card("/sys/pci1/c3"),
        ];
        let of = |gpu: &str, ordinal| nearest(&cards, Path::new(gpu), ordinal);
        assert_eq!(of("/sys/pci0/a/s0/gpu", 5), Some(0));
        // Two cards are below this switch: GPUs take turns.
        assert_eq!([of("/sys/pci0/a/s1/gpu", 6), of("/sys/pci0/a/s1/gpu", 7)], [Some(2), Some(3)]);
        assert_eq!(of("/sys/pci1/gpu", 0), Some(4));
        assert_eq!(nearest(&cards[1..2], Path::new("/sys/pci1/gpu"), 0), None);
    }

    #[test]
    fn equal_strings_are_interned_once() {
        assert!(std::ptr::eq(intern("softefa0+softefa1"), intern("softefa0+softefa1")));
        assert_ne!(intern("a"), intern("b"));
    }
}
