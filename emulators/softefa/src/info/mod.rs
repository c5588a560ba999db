//! `fi_getinfo`: an info for each card and fabric that meets the hints.

mod hints;
mod layout;
mod nic;
mod offer;
mod raw_hints;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use ferrogin_libfabric::bindings as fi;

use super::entry::{Out, entry_points};
use super::fabric::Kind;
use super::guard::Code;
use super::library::{Info, Library, refuse_setting, strdup, version};
use layout::{DomainAttr, EpAttr};
use offer::{DATA_SIZE, DOMAIN_CAPS, HMEM, KEY_SIZE, Offer, RDM_SIZE, RMA_IOV};

use hints::Hints;
pub(super) use offer::{NARROW_INLINE, RDM_INJECT, WIDE_INLINE};
pub(super) use raw_hints::RawHints;
use soft_nic::address::{ADDRESS_LEN, Gid};
use soft_nic::card;
use soft_nic::config::Config;
use soft_nic::fault::{COUNTER_MASK, Faults};

/// Returns the size of a work request that carries `inject` bytes inline; `None` if the card has no such size.
pub(super) fn wqe_size(inject: usize, faults: &Faults) -> Option<u32> {
    match inject {
        0..=NARROW_INLINE => Some(64),
        ..=WIDE_INLINE if faults.wqe_size == 128 => Some(128),
        _ => None,
    }
}

/// Returns the maximum number of entries in a send queue: wide requests need twice the memory.
pub(super) fn max_sq(wqe_size: u32, faults: &Faults) -> u32 {
    if wqe_size == 128 { (faults.sq_size / 2).max(1) } else { faults.sq_size }
}

/// Returns the number of entries in a queue if the application requests `asked`; `None` if that is more than `max`.
pub(super) fn queue_size(asked: usize, max: u32) -> Option<u32> {
    if asked == 0 {
        return Some(max);
    }
    u32::try_from(asked).ok().filter(|n| *n <= max).map(|n| n.next_power_of_two())
}

/// Returns the name of a card's domain.
fn domain_name(card: u32) -> String {
    format!("softefa{card}-rdm")
}

/// Returns the card with this domain name.
pub(super) fn card_of(domain: &str) -> Option<u32> {
    let number = domain.strip_prefix("softefa")?.strip_suffix("-rdm")?.parse().ok()?;
    (domain_name(number) == domain).then_some(number)
}

entry_points! {
    /// `fi_getinfo`.
    pub(super) fn getinfo(
        api: u32,
        node: *const c_char,
        service: *const c_char,
        flags: u64,
        hints: *const fi::fi_info,
        out: *mut *mut fi::fi_info,
    ) -> c_int
    as ("fi_getinfo") (
        node: Option<&CStr> = node,
        given: Option<RawHints<'_>> = hints,
        out: Out<'_, *mut fi::fi_info> = out,
    ) {
        let config = Config::from_env().map_err(|error| refuse_setting("fi_getinfo", &error))?;
        let library = Library::get()?;
        let mut wanted = Hints::read(given, api, &config)?;
        wanted.take_node(node, !service.is_null(), flags, &config)?;
        let mut infos = Vec::new();
        for kind in Kind::ALL {
            for number in 0..config.nics {
                match build(&library, api, number, &Offer::of(kind), &config, &wanted) {
                    Ok(info) => infos.push(info),
                    Err(Code::NODATA) => {}
                    Err(code) => return Err(code),
                }
            }
        }
        if infos.is_empty() {
            return Err(Code::NODATA);
        }
        out.write(Info::list(infos));
        Ok(0)
    }
}

/// The sizes of queues, and how many bytes a work request carries inline.
struct Depths {
    inject: usize,
    tx: usize,
    rx: usize,
}

fn depths(offer: &Offer, wanted: &Hints, faults: &Faults) -> Option<Depths> {
    let (inject, tx, rx) = match offer.kind {
        Kind::Direct => {
            let wqe = wqe_size(wanted.inject_size, faults)?;
            (NARROW_INLINE.max(wanted.inject_size), max_sq(wqe, faults) as usize, faults.rq_size as usize)
        }
        Kind::Rdm => (RDM_INJECT, RDM_SIZE, RDM_SIZE),
    };
    let chosen = |wanted: usize, max: usize| if wanted == 0 { Some(max) } else { (wanted <= max).then_some(wanted) };
    let inject = chosen(wanted.inject_size, inject)?;
    Some(Depths { inject, tx: chosen(wanted.tx_size, tx)?, rx: chosen(wanted.rx_size, rx)? })
}

/// Returns the queues' traffic class if the hints name `asked`. Like libfabric's `efa` provider since August 2026, this
/// provider has best effort and low latency, and ignores other classes.
fn known_class(asked: u32, faults: &Faults) -> Result<u32, Code> {
    match asked {
        _ if faults.ignore_tclass => Ok(fi::FI_TC_UNSPEC),
        fi::FI_TC_UNSPEC | fi::FI_TC_BEST_EFFORT | fi::FI_TC_LOW_LATENCY => Ok(asked),
        _ if faults.refuse_tclass => Err(Code::NODATA),
        _ => Ok(fi::FI_TC_UNSPEC),
    }
}

/// Builds the info for one card on one fabric.
fn build(
    library: &Library,
    api: u32,
    number: u32,
    offer: &Offer,
    config: &Config,
    wanted: &Hints,
) -> Result<Info, Code> {
    let domain = CString::new(domain_name(number)).map_err(|_| Code::OTHER)?;
    if wanted.domain.as_ref().is_some_and(|name| *name != domain) {
        return Err(Code::NODATA);
    }
    wanted.meet(offer, config)?;
    let depths = depths(offer, wanted, &config.faults).ok_or(Code::NODATA)?;
    let mut made = library.new_info()?;
    let mut parts = Parts::of(&mut made)?;
    fill(&mut parts, offer, config, wanted, &depths)?;
    parts.fabric.name = strdup(offer.kind.name())?;
    parts.fabric.prov_version = version(1, 0);
    parts.fabric.api_version = api;
    fill_domain(&mut parts, &domain, offer, config, wanted)?;
    parts.info.nic = nic::nic(number, config)?;
    if library.version >= version(2, 5) && api >= version(2, 5) {
        fill_counter_limits(parts.info);
    }
    Ok(made)
}

/// An info and the parts that libfabric made with it.
struct Parts<'a> {
    info: &'a mut fi::fi_info,
    tx: &'a mut fi::fi_tx_attr,
    rx: &'a mut fi::fi_rx_attr,
    ep: &'a mut EpAttr,
    fabric: &'a mut fi::fi_fabric_attr,
    domain: &'a mut DomainAttr,
}

impl<'a> Parts<'a> {
    fn of(made: &'a mut Info) -> Result<Self, Code> {
        let info = made.get();
        macro_rules! part {
            ($at:ident: $kind:ty) => {
                // SAFETY: libfabric made this part with the info, at least as long as the type here, and nothing else
                // points to it.
                unsafe { info.$at.cast::<$kind>().as_mut() }.ok_or(Code::OTHER)?
            };
        }
        Ok(Self {
            tx: part!(tx_attr: fi::fi_tx_attr),
            rx: part!(rx_attr: fi::fi_rx_attr),
            ep: part!(ep_attr: EpAttr),
            fabric: part!(fabric_attr: fi::fi_fabric_attr),
            domain: part!(domain_attr: DomainAttr),
            info,
        })
    }
}

fn fill(parts: &mut Parts<'_>, offer: &Offer, config: &Config, wanted: &Hints, depths: &Depths) -> Result<(), Code> {
    let Parts { info, tx, rx, ep, .. } = parts;
    let caps = wanted.caps_of(offer);
    let rx_mode = offer.mode | wanted.rx_mode_of(offer, &config.faults);
    (info.caps, info.mode) = (caps, rx_mode);
    info.addr_format = fi::FI_ADDR_EFA;
    info.src_addr = address(card::advertised_gid(config))?;
    info.src_addrlen = ADDRESS_LEN;
    if let Some(dest) = wanted.dest {
        info.dest_addr = bytes(&dest)?;
        info.dest_addrlen = ADDRESS_LEN;
    }
    (tx.caps, tx.mode) = (caps & (offer.tx_caps | HMEM), offer.mode);
    tx.op_flags = wanted.tx_flags.unwrap_or(fi::FI_TRANSMIT_COMPLETE | fi::FI_COMPLETION);
    tx.msg_order = offer.msg_order & wanted.tx_order.unwrap_or(u64::MAX);
    (tx.inject_size, tx.size) = (depths.inject, depths.tx);
    (tx.iov_limit, tx.rma_iov_limit) = (offer.iov_limit, RMA_IOV);
    tx.tclass = known_class(wanted.tclass, &config.faults)?;
    (rx.caps, rx.mode) = (caps & (offer.rx_caps | HMEM), rx_mode);
    rx.op_flags = wanted.rx_flags.unwrap_or(fi::FI_COMPLETION);
    rx.msg_order = offer.msg_order & wanted.rx_order.unwrap_or(u64::MAX);
    (rx.size, rx.iov_limit) = (depths.rx, offer.iov_limit);
    (ep.kind, ep.protocol, ep.protocol_version) = (fi::fi_ep_type::FI_EP_RDM, fi::FI_PROTO_EFA, 1);
    ep.max_msg_size = wanted.max_msg_size_of(offer);
    ep.mem_tag_format = offer.tag_format;
    (ep.tx_ctx_cnt, ep.rx_ctx_cnt) = (1, 1);
    Ok(())
}

fn fill_domain(
    parts: &mut Parts<'_>,
    name: &CString,
    offer: &Offer,
    config: &Config,
    wanted: &Hints,
) -> Result<(), Code> {
    let Parts { info, domain, .. } = parts;
    let auto =
        if offer.auto_progress { fi::fi_progress::FI_PROGRESS_AUTO } else { fi::fi_progress::FI_PROGRESS_MANUAL };
    domain.name = strdup(name)?;
    // Like libfabric's own providers, this one repeats the models in the hints: some programs accept no other.
    let asked_or = |asked, own| if asked == 0 { own } else { asked };
    domain.threading = asked_or(wanted.threading, fi::fi_threading::FI_THREAD_SAFE);
    let [control, data] = wanted.progress;
    (domain.control_progress, domain.data_progress) = (asked_or(control, asked_or(data, auto)), asked_or(data, auto));
    domain.resource_mgmt = fi::fi_resource_mgmt::FI_RM_ENABLED;
    domain.av_type = fi::fi_av_type::FI_AV_TABLE;
    domain.mr_mode = wanted.mr_mode_reported(offer, info.caps);
    (domain.mr_key_size, domain.cq_data_size) = (KEY_SIZE, DATA_SIZE);
    (domain.cq_cnt, domain.ep_cnt) = (65536, 65534);
    (domain.tx_ctx_cnt, domain.rx_ctx_cnt) = (1024, 1024);
    (domain.max_ep_tx_ctx, domain.max_ep_rx_ctx) = (1, 1);
    domain.cntr_cnt = config.faults.cntr_budget as usize;
    (domain.mr_iov_limit, domain.mr_cnt) = (1, 65535);
    domain.caps = DOMAIN_CAPS;
    Ok(())
}

/// Sets the counters' limits, which libfabric has had since 2.5.
fn fill_counter_limits(info: &mut fi::fi_info) {
    for at in [offset_of!(fi::fi_domain_attr, max_cntr_value), offset_of!(fi::fi_domain_attr, max_err_cntr_value)] {
        let field: *mut u64 = info.domain_attr.wrapping_byte_add(at).cast();
        // SAFETY: libfabric made this part with the info, and since 2.5 it has these fields.
        unsafe { field.write(COUNTER_MASK) };
    }
}

/// Returns a copy on the C heap, where the core frees it.
fn bytes(from: &[u8]) -> Result<*mut c_void, Code> {
    // SAFETY: `malloc` may be called with any size.
    let copy = unsafe { libc::malloc(from.len()) };
    if copy.is_null() {
        return Err(Code::NOMEM);
    }
    // SAFETY: `malloc` just allocated that many bytes at `copy`.
    unsafe { ptr::copy_nonoverlapping(from.as_ptr(), copy.cast(), from.len()) };
    Ok(copy)
}

fn address(gid: Gid) -> Result<*mut c_void, Code> {
    let mut address = [0; ADDRESS_LEN];
    address[..16].copy_from_slice(&gid.to_bytes());
    bytes(&address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domain_names_round_trip() {
        assert_eq!(card_of("softefa0-rdm"), Some(0));
        assert_eq!(card_of("softefa12-rdm"), Some(12));
        for name in ["softefa-rdm", "softefa00-rdm", "softefa1", "rdmap0-rdm", "softefa+1-rdm"] {
            assert_eq!(card_of(name), None, "{name}");
        }
    }

    #[test]
    fn wide_queues_have_half_entries() {
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
