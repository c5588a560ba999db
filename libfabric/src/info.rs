//! An owned `fi_info`: one way to reach the network.

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::bindings::{self, fi_bus_type, fi_info, fi_threading};
use crate::{Error, Libfabric, Version};

/// An `fi_info` and its parts, allocated and freed by the library that it came from.
///
/// The parts (`tx_attr`, …) have the sizes of that library's release. Fields that newer headers added at the end may be
/// missing, so this crate never creates a reference to a whole part.
pub struct Info {
    raw: NonNull<fi_info>,
    lib: Arc<Libfabric>,
}

// SAFETY: an fi_info is plain heap data, owned by this object; shared access only reads.
unsafe impl Send for Info {}
// SAFETY: shared access only reads.
unsafe impl Sync for Info {}

/// A PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI domain (segment).
    pub domain: u16,
    /// Bus.
    pub bus: u8,
    /// Device.
    pub device: u8,
    /// Function.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// `part!(info, path.to.field)`: a pointer to a field of one of the info's parts; `None` without the part.
macro_rules! part {
    ($info:expr, $part:ident.$field:ident) => {{
        let info: &$crate::Info = $info;
        $crate::info::part!(@field info.raw().$part, $field)
    }};
    ($info:expr, $part:ident.$inner:ident.$field:ident) => {{
        let info: &$crate::Info = $info;
        $crate::info::part!(@field $crate::info::read!(info, $part.$inner).unwrap_or(std::ptr::null_mut()), $field)
    }};
    (@field $part:expr, $field:ident) => {{
        let part = $part;
        // SAFETY: a part of a live fi_info is live or null, and all supported releases have the field.
        ::core::ptr::NonNull::new(part).map(|part| unsafe { &raw mut (*part.as_ptr()).$field })
    }};
}

/// `read!(info, path.to.field)`: the value of a field of one of the info's parts; `None` without the part.
macro_rules! read {
    ($info:expr, $($path:ident).+) => {
        // SAFETY: a field of a live part, which only changes through `&mut Info`.
        part!($info, $($path).+).map(|field| unsafe { field.read() })
    };
}

/// `write_part!(info, part.field, value)`: sets a field of one of the info's parts, if the part exists.
macro_rules! write_part {
    ($info:expr, $($path:ident).+, $value:expr) => {{
        let value = $value;
        let info: &mut $crate::Info = $info;
        if let Some(field) = $crate::info::part!(info, $($path).+) {
            // SAFETY: a field of a live part, to which `&mut Info` gives exclusive access.
            unsafe { field.write(value) };
        }
    }};
}
pub(crate) use {part, read, write_part};

impl Info {
    pub(crate) fn empty(lib: &Arc<Libfabric>) -> Result<Self, Error> {
        // SAFETY: with null, fi_dupinfo returns an empty info with all its parts.
        let info = unsafe { Self::duplicate(lib, std::ptr::null()) }?;
        let raw = info.raw();
        let parts = [
            raw.tx_attr.is_null(),
            raw.rx_attr.is_null(),
            raw.ep_attr.is_null(),
            raw.domain_attr.is_null(),
            raw.fabric_attr.is_null(),
        ];
        if parts.contains(&true) {
            return Err(lib.failure("fi_allocinfo", -bindings::FI_ENOMEM));
        }
        Ok(info)
    }

    /// # Safety
    /// `source` is null or an entry made by `lib`.
    pub(crate) unsafe fn duplicate(lib: &Arc<Libfabric>, source: *const fi_info) -> Result<Self, Error> {
        // SAFETY: this function's caller passes null or an entry that `lib` made.
        let raw = unsafe { lib.duplicate_info(source) };
        let raw = NonNull::new(raw).ok_or_else(|| lib.failure("fi_dupinfo", -bindings::FI_ENOMEM))?;
        Ok(Self { raw, lib: Arc::clone(lib) })
    }

    /// Returns the library that the info belongs to.
    pub fn library(&self) -> &Arc<Libfabric> {
        &self.lib
    }

    /// Returns the pointer, for calls that neither change nor keep the `fi_info`.
    pub fn as_ptr(&self) -> *mut fi_info {
        self.raw.as_ptr()
    }

    /// Returns the top-level struct, whose size hasn't changed since 1.5.
    pub fn raw(&self) -> &fi_info {
        // SAFETY: this object owns the info, which is live, and changes it only through `&mut self`.
        unsafe { self.raw.as_ref() }
    }

    pub(crate) fn raw_mut(&mut self) -> &mut fi_info {
        // SAFETY: this object owns the info, which is live; `&mut self` is exclusive.
        unsafe { self.raw.as_mut() }
    }

    /// Sets the given names. They're copied with strdup, because fi_freeinfo frees them with free().
    pub(crate) fn set_names(
        &mut self,
        provider: Option<CString>,
        fabric: Option<CString>,
        domain: Option<CString>,
    ) -> Result<(), Error> {
        if let Some(name) = provider {
            write_part!(self, fabric_attr.prov_name, self.duplicate_string(&name)?);
        }
        if let Some(name) = fabric {
            write_part!(self, fabric_attr.name, self.duplicate_string(&name)?);
        }
        if let Some(name) = domain {
            write_part!(self, domain_attr.name, self.duplicate_string(&name)?);
        }
        Ok(())
    }

    fn duplicate_string(&self, text: &CStr) -> Result<*mut c_char, Error> {
        // SAFETY: `text` is NUL-terminated.
        let copy = unsafe { libc::strdup(text.as_ptr()) };
        if copy.is_null() { Err(self.lib.failure("strdup", -bindings::FI_ENOMEM)) } else { Ok(copy) }
    }

    /// Returns the provider's name (`efa`, `tcp;ofi_rxm`).
    pub fn provider(&self) -> String {
        text(read!(self, fabric_attr.prov_name))
    }

    /// Returns the provider's own version.
    pub fn provider_version(&self) -> Version {
        Version::from_raw(read!(self, fabric_attr.prov_version).unwrap_or_default())
    }

    /// Returns the fabric's name (`efa-direct`).
    pub fn fabric_name(&self) -> String {
        text(read!(self, fabric_attr.name))
    }

    /// Returns the domain's name (`rdmap0s6-rdm`).
    pub fn domain_name(&self) -> String {
        text(read!(self, domain_attr.name))
    }

    /// Returns the local address, in the format of [`Info::addr_format`]; empty if the provider gives none.
    pub fn src_addr(&self) -> Vec<u8> {
        let raw = self.raw();
        if raw.src_addr.is_null() {
            return Vec::new();
        }
        // SAFETY: the provider's address has `src_addrlen` bytes.
        unsafe { std::slice::from_raw_parts(raw.src_addr.cast::<u8>(), raw.src_addrlen) }.to_vec()
    }

    /// Returns the address format: `FI_ADDR_EFA`, `FI_SOCKADDR_IN`, …
    pub fn addr_format(&self) -> u32 {
        self.raw().addr_format
    }

    /// Returns the capabilities: `FI_MSG`, `FI_RMA`, …
    pub fn caps(&self) -> u64 {
        self.raw().caps
    }

    /// Returns the mode bits that the application must support.
    pub fn mode(&self) -> u64 {
        self.raw().mode
    }

    /// Returns the mode bits for receives that the application must support.
    pub fn rx_mode(&self) -> u64 {
        read!(self, rx_attr.mode).unwrap_or_default()
    }

    /// Returns the memory registration modes that the application must support.
    pub fn mr_mode(&self) -> i32 {
        read!(self, domain_attr.mr_mode).unwrap_or_default()
    }

    /// Returns the size of a remote key in bytes.
    pub fn mr_key_size(&self) -> usize {
        read!(self, domain_attr.mr_key_size).unwrap_or_default()
    }

    /// Returns the highest count of a completion counter: `u64::MAX` if the provider only counts in software. 0 before
    /// libfabric 2.5.
    pub fn max_counter_value(&self) -> u64 {
        if self.lib.version() < Version::new(2, 5) {
            return 0;
        }
        read!(self, domain_attr.max_cntr_value).unwrap_or_default()
    }

    /// Returns how many completion counters the domain can have, according to the provider.
    pub fn counter_count(&self) -> usize {
        read!(self, domain_attr.cntr_cnt).unwrap_or_default()
    }

    /// Returns how many endpoints the domain can have, according to the provider.
    pub fn endpoint_count(&self) -> usize {
        read!(self, domain_attr.ep_cnt).unwrap_or_default()
    }

    /// Returns the objects' threading level: `fi_threading::FI_THREAD_*`.
    pub fn threading(&self) -> fi_threading::Type {
        read!(self, domain_attr.threading).unwrap_or_default()
    }

    /// Returns the number of entries in the send queue.
    pub fn tx_size(&self) -> usize {
        read!(self, tx_attr.size).unwrap_or_default()
    }

    /// Returns which of an endpoint's operations stay in order at a target: `FI_ORDER_*`.
    pub fn msg_order(&self) -> u64 {
        read!(self, tx_attr.msg_order).unwrap_or_default()
    }

    /// Returns the send queue's traffic class: `FI_TC_*`. The provider may pick another one than the hints.
    pub fn tclass(&self) -> u32 {
        read!(self, tx_attr.tclass).unwrap_or_default()
    }

    /// Sets the traffic class of endpoints opened with this info, whatever class the provider picked.
    pub fn set_tclass(&mut self, tclass: u32) {
        write_part!(self, tx_attr.tclass, tclass);
    }

    /// Returns the number of entries in the receive queue.
    pub fn rx_size(&self) -> usize {
        read!(self, rx_attr.size).unwrap_or_default()
    }

    /// Limits the send and receive queues of endpoints opened with this info to `entries` each.
    pub fn limit_queues(&mut self, entries: usize) {
        write_part!(self, tx_attr.size, self.tx_size().min(entries));
        write_part!(self, rx_attr.size, self.rx_size().min(entries));
    }

    /// Returns how many scatter-gather elements a send can have.
    pub fn tx_iov_limit(&self) -> usize {
        read!(self, tx_attr.iov_limit).unwrap_or_default()
    }

    /// Returns how many bytes an operation can carry inline.
    pub fn inject_size(&self) -> usize {
        read!(self, tx_attr.inject_size).unwrap_or_default()
    }

    /// Returns the size of the largest single transfer in bytes.
    pub fn max_msg_size(&self) -> usize {
        read!(self, ep_attr.max_msg_size).unwrap_or_default()
    }

    /// Returns the card's PCI address, if the provider reports it.
    pub fn pci_address(&self) -> Option<PciAddress> {
        if read!(self, nic.bus_attr.bus_type)? != fi_bus_type::FI_BUS_PCI {
            return None;
        }
        let attr = read!(self, nic.bus_attr.attr)?;
        // SAFETY: the bus is a PCI bus, so the union holds a PCI address.
        let pci = unsafe { attr.pci };
        Some(PciAddress { domain: pci.domain_id, bus: pci.bus_id, device: pci.device_id, function: pci.function_id })
    }

    /// Returns the link speed in bits per second, if the provider reports it.
    pub fn link_speed(&self) -> Option<u64> {
        match read!(self, nic.link_attr.speed)? {
            0 => None,
            speed => Some(speed as u64),
        }
    }

    /// Returns the card's device name (`rdmap0s6`), if the provider reports it.
    pub fn device_name(&self) -> Option<String> {
        let name = read!(self, nic.device_attr.name)?;
        (!name.is_null()).then(|| text(Some(name)))
    }
}

fn text(string: Option<*mut c_char>) -> String {
    match string {
        // SAFETY: strings of a live fi_info are NUL-terminated.
        Some(string) if !string.is_null() => unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned(),
        _ => String::new(),
    }
}

impl Clone for Info {
    fn clone(&self) -> Self {
        // SAFETY: this library made the entry.
        unsafe { Self::duplicate(&self.lib, self.as_ptr()) }.expect("fi_dupinfo copies an info it made")
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: this library made the info, and this is its last use.
        unsafe { self.lib.free_info(self.as_ptr()) }
    }
}

impl fmt::Debug for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Info")
            .field("provider", &self.provider())
            .field("fabric", &self.fabric_name())
            .field("domain", &self.domain_name())
            .field("caps", &format_args!("{:#x}", self.caps()))
            .field("addr_format", &self.addr_format())
            .field("tx_size", &self.tx_size())
            .field("inject_size", &self.inject_size())
            .finish_non_exhaustive()
    }
}
