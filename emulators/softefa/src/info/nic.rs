//! A card's description: `fid_nic`.

use std::ffi::{CString, c_int, c_void};
use std::ptr;

use ferrogin_libfabric::bindings as fi;

use super::super::entry::{Command, entry_points};
use super::super::guard::Code;
use super::super::object::{Uses, close, head, object};
use super::super::unsupported;
use soft_nic::card::{self, MAX_SEND_SIZE};
use soft_nic::config::{Config, PciAddress};

static NIC_OPS: fi::fi_ops = fi::fi_ops { close: Some(close::<Nic>), control: Some(control_nic), ..unsupported::FID };

/// A description of the card, and the objects that its pointers point to.
#[repr(C)]
struct Nic {
    fid: fi::fid_nic,
    device: fi::fi_device_attr,
    bus: fi::fi_bus_attr,
    link: fi::fi_link_attr,
    texts: [CString; 8],
    uses: Uses,
}

object!(Nic, FI_CLASS_NIC, "nic", {
    const SHARED_WITH_CHILDREN: bool = true;
});

pub(super) fn nic(number: u32, config: &Config) -> Result<*mut fi::fid_nic, Code> {
    let gid = card::advertised_gid(config);
    let texts = [
        // The name that the card has in the /sys of `ferrogin verbs`.
        format!("rdmap{number}s0"),
        format!("{:#x}", config.faults.device),
        env!("CARGO_PKG_VERSION").into(),
        "0x0".into(),
        "softefa".into(),
        env!("CARGO_PKG_VERSION").into(),
        format!("EFA-{}", gid.text()),
        "Ethernet".into(),
    ];
    let mut failed = false;
    let texts = texts.map(|text| {
        CString::new(text).unwrap_or_else(|_| {
            failed = true;
            CString::default()
        })
    });
    if failed {
        return Err(Code::OTHER);
    }
    Ok(assemble(texts, bus_of(config.pci.get(number as usize))))
}

fn bus_of(pci: Option<&PciAddress>) -> fi::fi_bus_attr {
    let Some(&PciAddress { domain, bus, device, function }) = pci else { return fi::fi_bus_attr::default() };
    let pci = fi::fi_pci_attr { domain_id: domain, bus_id: bus, device_id: device, function_id: function };
    fi::fi_bus_attr { bus_type: fi::fi_bus_type::FI_BUS_PCI, attr: fi::fi_bus_attr__bindgen_ty_1 { pci } }
}

/// Returns a description with these texts and this bus. Its pointers point into itself.
fn assemble(texts: [CString; 8], bus: fi::fi_bus_attr) -> *mut fi::fid_nic {
    let mut nic = Box::new(Nic {
        fid: fi::fid_nic { fid: head(fi::FI_CLASS_NIC, ptr::null_mut(), &NIC_OPS), ..fi::fid_nic::default() },
        device: fi::fi_device_attr::default(),
        bus,
        link: fi::fi_link_attr {
            mtu: MAX_SEND_SIZE as usize,
            speed: 100_000_000_000,
            state: fi::fi_link_state::FI_LINK_UP,
            ..fi::fi_link_attr::default()
        },
        texts,
        uses: Uses::default(),
    });
    let text = |nic: &Nic, i: usize| nic.texts[i].as_ptr().cast_mut();
    nic.device = fi::fi_device_attr {
        name: text(&nic, 0),
        device_id: text(&nic, 1),
        device_version: text(&nic, 2),
        vendor_id: text(&nic, 3),
        driver: text(&nic, 4),
        firmware: text(&nic, 5),
    };
    (nic.link.address, nic.link.network_type) = (text(&nic, 6), text(&nic, 7));
    nic.fid.device_attr = &raw mut nic.device;
    nic.fid.bus_attr = &raw mut nic.bus;
    nic.fid.link_attr = &raw mut nic.link;
    Box::into_raw(nic).cast()
}

entry_points! {
    /// `FI_DUP`, which `fi_dupinfo` sends for a copy of the description. Without it, infos would share the original.
    fn control_nic(fid: *mut fi::fid, command: c_int, arg: *mut c_void) -> c_int
    as ("fi_control(nic)") (nic: &Nic = fid, command: Command<'_> = (command, arg)) {
        let Command::Duplicate(copy) = command else { return Err(Code::NOSYS) };
        copy.ok_or(Code::INVAL)?.write(assemble(nic.texts.clone(), nic.bus));
        Ok(0)
    }
}
