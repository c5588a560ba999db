//! Devices: one for each configured software card.

use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::OnceLock;

use soft_nic::config::{Config, MAX_NICS, WireChoice};
use soft_nic::host;
use soft_nic::process::Uses;

use crate::bindings as ib;
use crate::guard::{Errno, entry, object, refuse};
use crate::objects::{self, verbs_object};

/// A device. It lives as long as the process, since programs keep pointers to `raw` and pass them back.
#[repr(C)]
pub(crate) struct Device {
    pub(crate) raw: ib::ibv_device,
    pub(crate) number: u32,
}

/// This process's devices.
struct Devices(Vec<Device>);

// SAFETY: the structs are written once, before they are shared; programs only read them.
unsafe impl Send for Devices {}
// SAFETY: the structs are written once, before they are shared; programs only read them.
unsafe impl Sync for Devices {}

/// Returns the directory that stands in for /sys.
pub(crate) fn sysfs() -> String {
    std::env::var("SYSFS_PATH").ok().filter(|path| !path.is_empty()).unwrap_or_else(|| "/sys".into())
}

/// Returns a card's sysfs directory.
pub(crate) fn card_directory(number: u32) -> String {
    format!("{}/class/infiniband/rdmap{number}s0", sysfs())
}

/// Copies text into a C struct's field, NUL-terminated.
fn put<const N: usize>(field: &mut [c_char; N], text: &str) {
    for (to, from) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// Reads the settings from the environment. Without `SOFTEFA_IFADDR` only this host's cards can reach the card, so its
/// GID begins with fe80::/64, like an EFA card's. UCX takes equal prefixes as a sign that a card is reachable.
pub(crate) fn settings(call: &str) -> Result<Config, Errno> {
    let mut config = Config::from_env().map_err(|error| refuse(call, Errno::INVAL, format_args!("{error}")))?;
    if config.wire == WireChoice::Auto && config.ifaddr.is_none() {
        config.wire = WireChoice::Shm;
    }
    Ok(config)
}

fn devices() -> Result<&'static [Device], Errno> {
    static DEVICES: OnceLock<Result<Devices, Errno>> = OnceLock::new();
    let made = DEVICES.get_or_init(|| {
        let config = settings("ibv_get_device_list")?;
        let sysfs = sysfs();
        let device = |number| {
            let mut raw = ib::ibv_device {
                node_type: ib::IBV_NODE_UNSPECIFIED,
                transport_type: ib::IBV_TRANSPORT_UNSPECIFIED,
                ..ib::ibv_device::default()
            };
            put(&mut raw.name, &format!("rdmap{number}s0"));
            put(&mut raw.dev_name, &format!("uverbs{number}"));
            put(&mut raw.dev_path, &format!("{sysfs}/class/infiniband_verbs/uverbs{number}"));
            put(&mut raw.ibdev_path, &card_directory(number));
            Device { raw, number }
        };
        Ok(Devices((0..config.nics).map(device).collect()))
    });
    made.as_ref().map(|devices| devices.0.as_slice()).map_err(|errno| *errno)
}

/// A list of devices as the program gets it: null-terminated.
#[repr(C)]
struct DeviceList {
    entries: [*mut ib::ibv_device; MAX_NICS as usize + 1],
    uses: Uses,
}

verbs_object!(DeviceList { entries: *mut ib::ibv_device }, "device list");

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(count: Option<&mut c_int>) -> *mut *mut ib::ibv_device {
    object("ibv_get_device_list", || {
        let devices = devices()?;
        let mut list = DeviceList { entries: [ptr::null_mut(); _], uses: Uses::default() };
        for (entry, device) in list.entries.iter_mut().zip(devices) {
            *entry = (&raw const device.raw).cast_mut();
        }
        if let Some(count) = count {
            *count = devices.len() as c_int;
        }
        Ok(objects::give(Box::new(list)))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ib::ibv_device) {
    if !list.is_null() {
        objects::destroy("ibv_free_device_list", list, |_: &DeviceList| Ok(()));
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: Option<&Device>) -> *const c_char {
    device.map_or(ptr::null(), |device| device.raw.name.as_ptr())
}

/// Returns the GUID in network byte order.
pub(crate) fn guid(number: u32) -> u64 {
    host::card_guid(number).to_be()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_guid(device: Option<&Device>) -> u64 {
    entry("ibv_get_device_guid", 0, || device.map_or(0, |device| guid(device.number)))
}

/// Returns the kernel's index for the device, which UCX uses to ask the kernel about it. The kernel knows no software
/// cards.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_index(_device: Option<&Device>) -> c_int {
    -1
}
