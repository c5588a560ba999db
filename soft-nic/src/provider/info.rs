//! `fi_getinfo`: what there is, for those whom it suits.

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use ferrogin_fabric::bindings as fi;

use super::guard::{Code, entry};
use super::library::{Library, refuse, strdup, text, version};
use super::object::head;
use super::{FABRIC, PROVIDER, unsupported};
use crate::address::{ADDRESS_LEN, Gid};
use crate::card;
use crate::config::Config;
use crate::fault::{COUNTER_MASK, Faults};

/// Inline bytes of 64-byte work requests (sends only).
const NARROW_INLINE: usize = 32;
/// Inline bytes of 128-byte work requests.
pub(super) const WIDE_INLINE: usize = 80;
/// Entries of a receive queue at most.
pub(super) const MAX_RQ: u32 = 8192;
/// Bytes of a packet.
const MTU: usize = 8928;

const TX_CAPS: u64 = fi::FI_RMA | fi::FI_READ | fi::FI_WRITE;
const RX_CAPS: u64 = fi::FI_RMA | fi::FI_REMOTE_READ | fi::FI_REMOTE_WRITE;
const DOMAIN_CAPS: u64 = fi::FI_LOCAL_COMM | fi::FI_REMOTE_COMM;
/// Given when asked for.
const OPTIONAL_CAPS: u64 = fi::FI_HMEM;
/// What applications must be able to live with.
const MR_MODE: i32 = fi::FI_MR_LOCAL | fi::FI_MR_VIRT_ADDR | fi::FI_MR_ALLOCATED | fi::FI_MR_PROV_KEY;
/// Old name of three of them.
const MR_BASIC: i32 = 1;

/// Bytes of a work request on a queue that carries `inject` bytes inline; `None` when the card cannot.
pub(super) fn wqe_size(inject: usize, faults: &Faults) -> Option<u32> {
    match inject {
        0..=NARROW_INLINE => Some(64),
        ..=WIDE_INLINE if faults.wqe_size == 128 => Some(128),
        _ => None,
    }
}

/// Entries of a send queue at most: wide requests need twice the memory.
pub(super) fn max_sq(wqe_size: u32, faults: &Faults) -> u32 {
    if wqe_size == 128 { (faults.sq_size / 2).max(1) } else { faults.sq_size }
}

/// Entries of a queue for which `asked` were asked; `None` when there are not so many.
pub(super) fn queue_size(asked: usize, max: u32) -> Option<u32> {
    if asked == 0 {
        return Some(max);
    }
    u32::try_from(asked).ok().filter(|n| *n <= max).map(|n| n.next_power_of_two())
}

/// Name of a card's domain.
fn domain_name(card: u32) -> String {
    format!("softefa{card}-rdm")
}

/// The card of a domain's name.
pub(super) fn card_of(domain: &str) -> Option<u32> {
    let number = domain.strip_prefix("softefa")?.strip_suffix("-rdm")?.parse().ok()?;
    (domain_name(number) == domain).then_some(number)
}

/// What an application asks for, as far as it is looked at.
#[derive(Debug, Default)]
struct Hints {
    caps: u64,
    fabric: Option<CString>,
    domain: Option<CString>,
    dest: Option<[u8; ADDRESS_LEN]>,
    inject_size: usize,
    tx_size: usize,
    rx_size: usize,
    tclass: u32,
}

/// Reads the hints; an error is a reason why this provider does not suit.
///
/// # Safety
/// `hints` is null or a `fi_info` of the application.
unsafe fn read_hints(hints: *const fi::fi_info, api: u32) -> Result<Hints, Code> {
    let mut wanted = Hints::default();
    // SAFETY: by contract.
    let Some(hints) = (unsafe { hints.as_ref() }) else { return Ok(wanted) };
    // SAFETY: null or a part of the application's info, which never grew.
    let tx = unsafe { hints.tx_attr.as_ref() };
    // SAFETY: as above.
    let rx = unsafe { hints.rx_attr.as_ref() };
    // SAFETY: as above.
    let fabric = unsafe { hints.fabric_attr.as_ref() };
    // SAFETY: null or a part of the application's info, as far as every version has it.
    let ep = unsafe { hints.ep_attr.cast::<EpAttr>().as_ref() };
    // SAFETY: as above.
    let domain = unsafe { hints.domain_attr.cast::<DomainAttr>().as_ref() };
    wanted.caps = hints.caps;
    if hints.caps & !(TX_CAPS | RX_CAPS | DOMAIN_CAPS | OPTIONAL_CAPS) != 0 {
        return Err(Code::NODATA);
    }
    if hints.addr_format != fi::FI_FORMAT_UNSPEC && hints.addr_format != fi::FI_ADDR_EFA {
        return Err(Code::NODATA);
    }
    if !hints.dest_addr.is_null() {
        if hints.dest_addrlen != ADDRESS_LEN {
            return Err(Code::NODATA);
        }
        // SAFETY: `dest_addrlen` bytes, by the interface.
        wanted.dest = Some(unsafe { hints.dest_addr.cast::<[u8; ADDRESS_LEN]>().read_unaligned() });
    }
    if let Some(fabric) = fabric {
        // SAFETY: null or terminated.
        if unsafe { text(fabric.prov_name) }.is_some_and(|name| name != PROVIDER) {
            return Err(Code::NODATA);
        }
        // SAFETY: null or terminated.
        wanted.fabric = unsafe { text(fabric.name) }.map(Into::into);
    }
    if let Some(domain) = domain {
        // SAFETY: null or terminated.
        wanted.domain = unsafe { text(domain.name) }.map(Into::into);
        let mut mode = domain.mr_mode;
        if mode & MR_BASIC != 0 || mode == 0 && api < version(1, 5) {
            mode |= fi::FI_MR_VIRT_ADDR | fi::FI_MR_ALLOCATED | fi::FI_MR_PROV_KEY | fi::FI_MR_LOCAL;
        }
        let needed = MR_MODE | if hints.caps & fi::FI_HMEM != 0 { fi::FI_MR_HMEM } else { 0 };
        if needed & !mode != 0 {
            return Err(Code::NODATA);
        }
        if domain.av_type > fi::fi_av_type::FI_AV_TABLE {
            return Err(Code::NODATA);
        }
    }
    if let Some(ep) = ep {
        let kind = ep.kind;
        if kind != fi::fi_ep_type::FI_EP_UNSPEC && kind != fi::fi_ep_type::FI_EP_RDM {
            return Err(Code::NODATA);
        }
        if ep.protocol != 0 && ep.protocol != fi::FI_PROTO_EFA {
            return Err(Code::NODATA);
        }
        if ep.max_msg_size > card::request::MAX_RDMA_SIZE as usize || ep.tx_ctx_cnt > 1 || ep.rx_ctx_cnt > 1 {
            return Err(Code::NODATA);
        }
    }
    if let Some(tx) = tx {
        if tx.caps & !(TX_CAPS | OPTIONAL_CAPS) != 0 || tx.msg_order != 0 || tx.iov_limit > 1 || tx.rma_iov_limit > 1 {
            return Err(Code::NODATA);
        }
        (wanted.inject_size, wanted.tx_size, wanted.tclass) = (tx.inject_size, tx.size, tx.tclass);
    }
    if let Some(rx) = rx {
        if rx.caps & !(RX_CAPS | OPTIONAL_CAPS) != 0 || rx.msg_order != 0 {
            return Err(Code::NODATA);
        }
        wanted.rx_size = rx.size;
    }
    Ok(wanted)
}

/// `fi_getinfo`.
pub(super) unsafe extern "C" fn getinfo(
    api: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const fi::fi_info,
    out: *mut *mut fi::fi_info,
) -> c_int {
    entry("fi_getinfo", || {
        if out.is_null() {
            return Err(Code::INVAL);
        }
        // A peer's name cannot be looked up, and no other interface than the card's can be asked for.
        if !node.is_null() || (!service.is_null() && flags & fi::FI_SOURCE == 0) {
            return Err(Code::NODATA);
        }
        // SAFETY: the application's hints.
        let wanted = unsafe { read_hints(hints, api) }?;
        let config = Config::from_env().map_err(|error| refuse("fi_getinfo", format_args!("{error}")))?;
        let library = Library::get()?;
        let mut first: *mut fi::fi_info = ptr::null_mut();
        let mut last = &raw mut first;
        for number in 0..config.nics {
            match build(&library, api, number, &config, &wanted) {
                Ok(info) => {
                    // SAFETY: `last` points to `first` or to the `next` of the last info, which is ours.
                    unsafe { last.write(info) };
                    // SAFETY: a new info.
                    last = unsafe { &raw mut (*info).next };
                }
                Err(Code::NODATA) => {}
                Err(code) => {
                    // SAFETY: the list is ours alone.
                    unsafe { library.free_info(first) };
                    return Err(code);
                }
            }
        }
        if first.is_null() {
            return Err(Code::NODATA);
        }
        // SAFETY: `out` is the application's.
        unsafe { out.write(first) };
        Ok(0)
    })
}

/// The info of one card.
fn build(library: &Library, api: u32, number: u32, config: &Config, wanted: &Hints) -> Result<*mut fi::fi_info, Code> {
    let domain = CString::new(domain_name(number)).map_err(|_| Code::OTHER)?;
    let other_domain = wanted.domain.as_ref().is_some_and(|name| *name != domain);
    if other_domain || wanted.fabric.as_ref().is_some_and(|name| name.as_c_str() != FABRIC) {
        return Err(Code::NODATA);
    }
    let faults = &config.faults;
    let wqe = wqe_size(wanted.inject_size, faults).ok_or(Code::NODATA)?;
    let max = max_sq(wqe, faults);
    if wanted.tx_size > max as usize || wanted.rx_size > MAX_RQ as usize {
        return Err(Code::NODATA);
    }
    let raw = library.new_info()?;
    match fill(raw, library, api, number, &domain, config, wanted, max) {
        Ok(()) => Ok(raw),
        Err(code) => {
            // SAFETY: made above and given to nobody.
            unsafe { library.free_info(raw) };
            Err(code)
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "one call site; the parts of an info have many sources")]
fn fill(
    raw: *mut fi::fi_info,
    library: &Library,
    api: u32,
    number: u32,
    domain_name: &CString,
    config: &Config,
    wanted: &Hints,
    max_sq: u32,
) -> Result<(), Code> {
    // SAFETY: the core made this info with all its parts, and nobody else has it.
    let info = unsafe { &mut *raw };
    // SAFETY: as above.
    let tx = unsafe { info.tx_attr.as_mut() }.ok_or(Code::OTHER)?;
    // SAFETY: as above.
    let rx = unsafe { info.rx_attr.as_mut() }.ok_or(Code::OTHER)?;
    // SAFETY: as above.
    let fabric = unsafe { info.fabric_attr.as_mut() }.ok_or(Code::OTHER)?;
    let hmem = wanted.caps & fi::FI_HMEM;
    info.caps = TX_CAPS | RX_CAPS | DOMAIN_CAPS | hmem;
    info.addr_format = fi::FI_ADDR_EFA;
    info.src_addr = address(card::advertised_gid(config))?;
    info.src_addrlen = ADDRESS_LEN;
    if let Some(dest) = wanted.dest {
        info.dest_addr = bytes(&dest)?;
        info.dest_addrlen = ADDRESS_LEN;
    }
    tx.caps = TX_CAPS | hmem;
    tx.op_flags = fi::FI_TRANSMIT_COMPLETE | fi::FI_COMPLETION | fi::FI_DELIVERY_COMPLETE;
    tx.inject_size = if wanted.inject_size == 0 { NARROW_INLINE } else { wanted.inject_size };
    tx.size = if wanted.tx_size == 0 { max_sq as usize } else { wanted.tx_size };
    (tx.iov_limit, tx.rma_iov_limit) = (1, 1);
    tx.tclass = wanted.tclass;
    rx.caps = RX_CAPS | hmem;
    rx.op_flags = fi::FI_COMPLETION;
    rx.size = if wanted.rx_size == 0 { MAX_RQ as usize } else { wanted.rx_size };
    rx.iov_limit = 1;
    fabric.name = strdup(FABRIC)?;
    fabric.prov_version = version(1, 0);
    fabric.api_version = api;
    // SAFETY: the core made it with the info, at least as long.
    let ep = unsafe { info.ep_attr.cast::<EpAttr>().as_mut() }.ok_or(Code::OTHER)?;
    (ep.kind, ep.protocol, ep.protocol_version) = (fi::fi_ep_type::FI_EP_RDM, fi::FI_PROTO_EFA, 1);
    ep.max_msg_size = card::request::MAX_RDMA_SIZE as usize;
    (ep.tx_ctx_cnt, ep.rx_ctx_cnt) = (1, 1);
    if library.version >= version(2, 5) && api >= version(2, 5) {
        for at in [offset_of!(fi::fi_domain_attr, max_cntr_value), offset_of!(fi::fi_domain_attr, max_err_cntr_value)] {
            let field: *mut u64 = info.domain_attr.wrapping_byte_add(at).cast();
            // SAFETY: cores from 2.5 on have these fields.
            unsafe { field.write(COUNTER_MASK) };
        }
    }
    // SAFETY: the core made it with the info, at least as long.
    let domain = unsafe { info.domain_attr.cast::<DomainAttr>().as_mut() }.ok_or(Code::OTHER)?;
    domain.name = strdup(domain_name)?;
    domain.threading = fi::fi_threading::FI_THREAD_SAFE;
    (domain.control_progress, domain.data_progress) =
        (fi::fi_progress::FI_PROGRESS_AUTO, fi::fi_progress::FI_PROGRESS_AUTO);
    domain.resource_mgmt = fi::fi_resource_mgmt::FI_RM_ENABLED;
    domain.av_type = fi::fi_av_type::FI_AV_TABLE;
    domain.mr_mode = MR_MODE | if hmem != 0 { fi::FI_MR_HMEM } else { 0 };
    (domain.mr_key_size, domain.cq_data_size) = (4, 4);
    (domain.cq_cnt, domain.ep_cnt) = (65536, 65534);
    (domain.tx_ctx_cnt, domain.rx_ctx_cnt) = (1024, 1024);
    (domain.max_ep_tx_ctx, domain.max_ep_rx_ctx) = (1, 1);
    domain.cntr_cnt = config.faults.cntr_budget as usize;
    (domain.mr_iov_limit, domain.mr_cnt) = (1, 65535);
    domain.caps = DOMAIN_CAPS;
    info.nic = nic(number, config)?;
    Ok(())
}

/// `fi_ep_attr` as far as every version has it and this provider looks at it.
#[repr(C)]
pub(super) struct EpAttr {
    pub kind: fi::fi_ep_type::Type,
    protocol: u32,
    protocol_version: u32,
    max_msg_size: usize,
    msg_prefix_size: usize,
    max_order: [usize; 3],
    mem_tag_format: u64,
    tx_ctx_cnt: usize,
    rx_ctx_cnt: usize,
}

/// `fi_domain_attr` as 1.17 has it: the oldest that this provider meets.
#[repr(C)]
struct DomainAttr {
    domain: *mut fi::fid_domain,
    name: *mut c_char,
    threading: fi::fi_threading::Type,
    control_progress: fi::fi_progress::Type,
    data_progress: fi::fi_progress::Type,
    resource_mgmt: fi::fi_resource_mgmt::Type,
    av_type: fi::fi_av_type::Type,
    mr_mode: c_int,
    mr_key_size: usize,
    cq_data_size: usize,
    cq_cnt: usize,
    ep_cnt: usize,
    tx_ctx_cnt: usize,
    rx_ctx_cnt: usize,
    max_ep_tx_ctx: usize,
    max_ep_rx_ctx: usize,
    max_ep_stx_ctx: usize,
    max_ep_srx_ctx: usize,
    cntr_cnt: usize,
    mr_iov_limit: usize,
    caps: u64,
    mode: u64,
    auth_key: *mut u8,
    auth_key_size: usize,
    max_err_data: usize,
    mr_cnt: usize,
    tclass: u32,
}

/// The fields of an older struct lie where the newest has them.
macro_rules! same_offsets {
    ($old:ty, $new:ty: $($field:ident),*) => {
        $(const _: () = assert!(offset_of!($old, $field) == offset_of!($new, $field));)*
    };
}
same_offsets!(EpAttr, fi::fi_ep_attr: protocol, max_msg_size, mem_tag_format, tx_ctx_cnt, rx_ctx_cnt);
same_offsets!(DomainAttr, fi::fi_domain_attr: name, threading, resource_mgmt, av_type, mr_mode, mr_key_size, cntr_cnt,
    mr_iov_limit, caps, mode, mr_cnt, tclass);
const _: () = assert!(size_of::<DomainAttr>() == 192, "fi_domain_attr of 1.17");

/// A copy on the C heap, where the core frees it.
fn bytes(from: &[u8]) -> Result<*mut c_void, Code> {
    // SAFETY: no preconditions.
    let copy = unsafe { libc::malloc(from.len()) };
    if copy.is_null() {
        return Err(Code::NOMEM);
    }
    // SAFETY: `copy` holds as many bytes and is new.
    unsafe { ptr::copy_nonoverlapping(from.as_ptr(), copy.cast(), from.len()) };
    Ok(copy)
}

fn address(gid: Gid) -> Result<*mut c_void, Code> {
    let mut address = [0; ADDRESS_LEN];
    address[..16].copy_from_slice(&gid.to_bytes());
    bytes(&address)
}

static NIC_OPS: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: Some(close_nic),
    bind: Some(unsupported::bind),
    control: Some(control_nic),
    ops_open: Some(unsupported::ops_open),
    tostr: Some(unsupported::tostr),
    ops_set: Some(unsupported::ops_set),
};

/// A description of the card, and what its pointers point to.
#[repr(C)]
struct Nic {
    fid: fi::fid_nic,
    device: fi::fi_device_attr,
    bus: fi::fi_bus_attr,
    link: fi::fi_link_attr,
    texts: [CString; 8],
}

fn nic(number: u32, config: &Config) -> Result<*mut fi::fid_nic, Code> {
    let gid = card::advertised_gid(config);
    let texts = [
        format!("softefa{number}"),
        "0xefa5".into(),
        env!("CARGO_PKG_VERSION").into(),
        "0x0".into(),
        "softefa".into(),
        env!("CARGO_PKG_VERSION").into(),
        format!("EFA-{gid}"),
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
    Ok(assemble(texts))
}

/// The description with these texts, its pointers into itself.
fn assemble(texts: [CString; 8]) -> *mut fi::fid_nic {
    let mut nic = Box::new(Nic {
        fid: fi::fid_nic { fid: head(fi::FI_CLASS_NIC, ptr::null_mut(), &NIC_OPS), ..fi::fid_nic::default() },
        device: fi::fi_device_attr::default(),
        bus: fi::fi_bus_attr { bus_type: fi::fi_bus_type::FI_BUS_UNSPEC, ..fi::fi_bus_attr::default() },
        link: fi::fi_link_attr {
            mtu: MTU,
            speed: 100_000_000_000,
            state: fi::fi_link_state::FI_LINK_UP,
            ..fi::fi_link_attr::default()
        },
        texts,
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

/// fi_dupinfo asks for a copy of the description, and shares the original where it gets none.
unsafe extern "C" fn control_nic(fid: *mut fi::fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(nic)", || {
        if fid.is_null() || arg.is_null() {
            return Err(Code::INVAL);
        }
        if command != fi::FI_DUP as c_int {
            return Err(Code::NOSYS);
        }
        // SAFETY: the core calls this with what `assemble` made and has not closed.
        let texts = unsafe { (*fid.cast::<Nic>()).texts.clone() };
        // SAFETY: FI_DUP's argument is where the copy's address goes.
        unsafe { arg.cast::<*mut fi::fid_nic>().write(assemble(texts)) };
        Ok(0)
    })
}

unsafe extern "C" fn close_nic(fid: *mut fi::fid) -> c_int {
    entry("fi_close(nic)", || {
        if fid.is_null() {
            return Err(Code::INVAL);
        }
        // SAFETY: the core calls this once for each that `assemble` made.
        drop(unsafe { Box::from_raw(fid.cast::<Nic>()) });
        Ok(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domain_names() {
        assert_eq!(card_of("softefa0-rdm"), Some(0));
        assert_eq!(card_of("softefa12-rdm"), Some(12));
        for name in ["softefa-rdm", "softefa00-rdm", "softefa1", "rdmap0-rdm", "softefa+1-rdm"] {
            assert_eq!(card_of(name), None, "{name}");
        }
    }

    #[test]
    fn wide_queues_are_half_as_long() {
        let faults = Faults::default();
        assert_eq!(wqe_size(0, &faults), Some(64));
        assert_eq!(wqe_size(32, &faults), Some(64));
        assert_eq!(wqe_size(33, &faults), Some(128));
        assert_eq!(wqe_size(80, &faults), Some(128));
        assert_eq!(wqe_size(81, &faults), None);
        assert_eq!(wqe_size(33, &Faults { wqe_size: 64, ..faults.clone() }), None);
        assert_eq!((max_sq(64, &faults), max_sq(128, &faults)), (4096, 2048));
        assert_eq!(queue_size(0, 64), Some(64));
        assert_eq!(queue_size(33, 64), Some(64));
        assert_eq!(queue_size(65, 64), None);
    }
}
