//! Devices: one for each software card of the settings.

use std::ffi::{c_char, c_int};
use std::ptr;
use std::sync::OnceLock;

use soft_nic::config::{Config, WireChoice};
use soft_nic::host;

use crate::bindings as ib;
use crate::context::Context;
use crate::guard::{Errno, entry, object, refuse, status};
use crate::objects;

/// A device, which lives as long as the process: programs keep pointers to it.
#[repr(C)]
pub(crate) struct Device {
    pub(crate) raw: ib::ibv_device,
    pub(crate) number: u32,
}

/// The devices of this process.
struct Devices(Vec<Device>);

// SAFETY: the structs are written once, before they are shared; programs only read them.
unsafe impl Send for Devices {}
// SAFETY: the structs are written once, before they are shared; programs only read them.
unsafe impl Sync for Devices {}

/// The directory that stands for /sys.
pub(crate) fn sysfs() -> String {
    std::env::var("SYSFS_PATH").ok().filter(|path| !path.is_empty()).unwrap_or_else(|| "/sys".into())
}

/// Copies text into a field of a C struct, with its end.
fn put<const N: usize>(field: &mut [c_char; N], text: &str) {
    for (to, from) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// The settings of the environment.
pub(crate) fn settings(call: &str) -> Result<Config, Errno> {
    let config = Config::from_env().map_err(|error| refuse(call, Errno::INVAL, format_args!("{error}")))?;
    if let WireChoice::Provider(name) = &config.wire
        && name.starts_with("verbs")
    {
        let why = "SOFTEFA_WIRE=verbs would be a wire over this card itself: set tcp, or unset it";
        return Err(refuse(call, Errno::INVAL, format_args!("{why}")));
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
            put(&mut raw.ibdev_path, &format!("{sysfs}/class/infiniband/rdmap{number}s0"));
            Device { raw, number }
        };
        Ok(Devices((0..config.nics).map(device).collect()))
    });
    made.as_ref().map(|devices| devices.0.as_slice()).map_err(|errno| *errno)
}

const LIST: &str = "device list";

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ib::ibv_device {
    object("ibv_get_device_list", || {
        let devices = devices()?;
        // SAFETY: the call has no precondition. The list has one entry more, which stays null.
        let list: *mut *mut ib::ibv_device =
            unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ib::ibv_device>()) }.cast();
        if list.is_null() {
            return Err(Errno::NOMEM);
        }
        for (i, device) in devices.iter().enumerate() {
            // SAFETY: the list has an entry for each device.
            unsafe { list.wrapping_add(i).write((&raw const device.raw).cast_mut()) };
        }
        // SAFETY: null, or a variable of the program that is writable during the call.
        if let Some(count) = unsafe { count.as_mut() } {
            *count = devices.len() as c_int;
        }
        objects::add(LIST, list);
        Ok(list)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ib::ibv_device) {
    if list.is_null() {
        return;
    }
    status("ibv_free_device_list", || {
        objects::take("ibv_free_device_list", LIST, list)?;
        // SAFETY: the list was among the open ones, so `ibv_get_device_list` allocated it and nobody has freed it.
        unsafe { libc::free(list.cast()) };
        Ok(())
    });
}

/// The device behind a pointer of the program.
///
/// # Safety
/// `device` is null or an entry of a device list.
unsafe fn device_at<'a>(device: *const ib::ibv_device) -> Option<&'a Device> {
    // SAFETY: this function's caller passes null or an entry of a list, which is the first field of a `Device`.
    unsafe { device.cast::<Device>().as_ref() }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: *mut ib::ibv_device) -> *const c_char {
    // SAFETY: the program passes an entry of a device list.
    unsafe { device_at(device) }.map_or(ptr::null(), |device| device.raw.name.as_ptr())
}

/// The GUID names the host and the card, and nothing of the card's GID.
pub(crate) fn guid(number: u32) -> u64 {
    (u64::from(host::host_id()) << 32 | u64::from(number)).to_be()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_guid(device: *mut ib::ibv_device) -> u64 {
    // SAFETY: the program passes an entry of a device list.
    entry("ibv_get_device_guid", 0, || unsafe { device_at(device) }.map_or(0, |device| guid(device.number)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_index(device: *mut ib::ibv_device) -> c_int {
    // SAFETY: the program passes an entry of a device list.
    unsafe { device_at(device) }.map_or(-1, |device| device.number as c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: *mut ib::ibv_device) -> *mut ib::ibv_context {
    object("ibv_open_device", || {
        // SAFETY: the program passes an entry of a device list.
        let device = unsafe { device_at(device) }.ok_or(Errno::INVAL)?;
        Context::open(device)
    })
}
