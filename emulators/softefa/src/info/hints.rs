//! The hints of `fi_getinfo`, as far as this provider reads them.

use std::ffi::{CStr, CString};

use ferrogin_libfabric::bindings as fi;

use super::super::call::SEND_FLAGS;
use super::super::fabric::Kind;
use super::super::guard::Code;
use super::super::library::{PROVIDER, version};
use super::layout::{DomainAttr, EpAttr};
use super::offer::{DATA_SIZE, DOMAIN_CAPS, HMEM, KEY_SIZE, Offer, RMA_IOV};
use super::raw_hints::RawHints;
use soft_nic::address::{ADDRESS_LEN, Address, Gid};
use soft_nic::card;
use soft_nic::config::Config;
use soft_nic::fault::Faults;
use soft_nic::host;

/// Old names of memory registration mode bits.
const MR_BASIC: i32 = 1;
const MR_SCALABLE: i32 = 2;
/// Bits that matter only to applications whose memory peers access.
const MR_TARGET: i32 = fi::FI_MR_VIRT_ADDR | fi::FI_MR_ALLOCATED | fi::FI_MR_PROV_KEY;
/// Capabilities that an application gets only on request.
pub(super) const PRIMARY: u64 = fi::FI_MSG
    | fi::FI_RMA
    | fi::FI_TAGGED
    | fi::FI_ATOMIC
    | fi::FI_MULTICAST
    | fi::FI_DIRECTED_RECV
    | fi::FI_HMEM
    // A counter of remote accesses replaces a counter of messages, so an application gets it only on request.
    | fi::FI_RMA_EVENT
    | DIRECTIONS;
const MESSAGE_DIRECTIONS: u64 = fi::FI_SEND | fi::FI_RECV;
const TARGET_DIRECTIONS: u64 = fi::FI_REMOTE_READ | fi::FI_REMOTE_WRITE;
const RMA_DIRECTIONS: u64 = fi::FI_READ | fi::FI_WRITE | TARGET_DIRECTIONS;
const DIRECTIONS: u64 = MESSAGE_DIRECTIONS | RMA_DIRECTIONS;

/// The hints, or defaults without hints.
#[derive(Debug, Default)]
pub(super) struct Hints {
    /// False if the application passed no hints.
    given: bool,
    pub caps: u64,
    mode: u64,
    pub fabric: Option<CString>,
    pub domain: Option<CString>,
    pub dest: Option<[u8; ADDRESS_LEN]>,
    mr_mode: Option<i32>,
    auto_progress: bool,
    /// Threading, and control and data progress, in the hints.
    pub threading: fi::fi_threading::Type,
    pub progress: [fi::fi_progress::Type; 2],
    /// The old single bit for all of memory registration.
    basic: bool,
    key_size: usize,
    data_size: usize,
    counters: usize,
    max_msg_size: usize,
    tx_caps: u64,
    rx_caps: u64,
    msg_order: u64,
    tx_iov: usize,
    rma_iov: usize,
    rx_iov: usize,
    pub inject_size: usize,
    pub tx_size: usize,
    pub rx_size: usize,
    pub tclass: u32,
    pub tx_flags: Option<u64>,
    pub rx_flags: Option<u64>,
    /// Message orders in the hints; `None` without hints.
    pub tx_order: Option<u64>,
    pub rx_order: Option<u64>,
}

/// Whether the hints ask for a completion order, which the card does not keep and API 2.0 ignores.
fn completion_order(asked: u64, api: u32) -> bool {
    asked != 0 && api < version(2, 0)
}

fn refuse_if(wrong: bool) -> Result<(), Code> {
    if wrong { Err(Code::NODATA) } else { Ok(()) }
}

impl Hints {
    /// Reads the hints.
    ///
    /// # Errors
    /// `ENODATA` for hints that this provider cannot meet.
    pub(super) fn read(given: Option<RawHints<'_>>, api: u32, config: &Config) -> Result<Self, Code> {
        let mut wanted = Self::default();
        let Some(given) = given else { return Ok(wanted) };
        let info = given.info;
        (wanted.given, wanted.caps, wanted.mode) = (true, info.caps, info.mode);
        refuse_if(info.addr_format != fi::FI_FORMAT_UNSPEC && info.addr_format != fi::FI_ADDR_EFA)?;
        if let Some(destination) = given.destination() {
            wanted.dest = Some(destination.ok_or(Code::NODATA)?);
        }
        if let Some(source) = given.source() {
            // A card's GID is drawn when the card is opened, but its IP address is known before.
            let source = source.and_then(|bytes| Gid::from_bytes(*bytes.first_chunk()?).ok());
            refuse_if(source.is_none_or(|gid| gid.ip().is_some_and(|ip| !is_own_ip(ip, config))))?;
        }
        refuse_if(given.provider_name().is_some_and(|name| name != PROVIDER))?;
        wanted.fabric = given.fabric_name().map(Into::into);
        if let Some(domain) = given.domain() {
            wanted.domain = given.domain_name().map(Into::into);
            wanted.read_domain(domain, api)?;
        }
        if let Some(ep) = given.ep() {
            wanted.read_ep(ep)?;
        }
        if let Some(tx) = given.tx() {
            refuse_if(tx.op_flags & !SEND_FLAGS != 0 || completion_order(tx.comp_order, api))?;
            (wanted.tx_caps, wanted.msg_order) = (tx.caps, tx.msg_order);
            (wanted.tx_flags, wanted.tx_order) = (Some(tx.op_flags), Some(tx.msg_order));
            (wanted.tx_iov, wanted.rma_iov) = (tx.iov_limit, tx.rma_iov_limit);
            (wanted.inject_size, wanted.tx_size, wanted.tclass) = (tx.inject_size, tx.size, given.tclass());
            wanted.mode |= tx.mode;
        }
        if let Some(rx) = given.rx() {
            refuse_if(rx.op_flags & !(fi::FI_COMPLETION | fi::FI_MULTI_RECV) != 0)?;
            refuse_if(completion_order(rx.comp_order, api))?;
            (wanted.rx_caps, wanted.rx_iov, wanted.rx_size) = (rx.caps, rx.iov_limit, rx.size);
            wanted.mode |= rx.mode;
            (wanted.rx_flags, wanted.rx_order) = (Some(rx.op_flags), Some(rx.msg_order));
            wanted.msg_order |= rx.msg_order;
        }
        Ok(wanted)
    }

    fn read_domain(&mut self, domain: &DomainAttr, api: u32) -> Result<(), Code> {
        let mut mode = domain.mr_mode;
        refuse_if(mode & MR_SCALABLE != 0 && mode & MR_BASIC == 0)?;
        self.basic = mode & MR_BASIC != 0 || mode == 0 && api < version(1, 5);
        if self.basic {
            mode |= MR_TARGET | fi::FI_MR_LOCAL;
        }
        self.mr_mode = Some(mode);
        let auto = fi::fi_progress::FI_PROGRESS_AUTO;
        refuse_if(domain.threading > fi::fi_threading::FI_THREAD_ENDPOINT)?;
        self.threading = domain.threading;
        self.progress = [domain.control_progress, domain.data_progress];
        refuse_if(self.progress.iter().any(|asked| *asked > fi::fi_progress::FI_PROGRESS_CONTROL_UNIFIED))?;
        self.auto_progress = self.progress.contains(&auto);
        refuse_if(domain.av_type > fi::fi_av_type::FI_AV_TABLE)?;
        refuse_if(domain.caps & !DOMAIN_CAPS != 0)?;
        (self.key_size, self.data_size, self.counters) = (domain.mr_key_size, domain.cq_data_size, domain.cntr_cnt);
        Ok(())
    }

    fn read_ep(&mut self, ep: &EpAttr) -> Result<(), Code> {
        let kind = ep.kind;
        refuse_if(kind != fi::fi_ep_type::FI_EP_UNSPEC && kind != fi::fi_ep_type::FI_EP_RDM)?;
        refuse_if(ep.protocol != 0 && ep.protocol != fi::FI_PROTO_EFA)?;
        refuse_if(ep.tx_ctx_cnt > 1 || ep.rx_ctx_cnt > 1)?;
        self.max_msg_size = ep.max_msg_size;
        Ok(())
    }

    /// Checks that an offer meets the hints.
    pub(super) fn meet(&self, offer: &Offer, config: &Config) -> Result<(), Code> {
        let all = offer.tx_caps | offer.rx_caps | DOMAIN_CAPS | HMEM;
        refuse_if(self.caps & !all != 0 || self.caps & HMEM & !offer.optional_caps != 0)?;
        refuse_if(self.caps & HMEM != 0 && config.faults.no_hmem)?;
        refuse_if(self.tx_caps & !(offer.tx_caps | HMEM | DOMAIN_CAPS) != 0)?;
        refuse_if(self.rx_caps & !(offer.rx_caps | HMEM | DOMAIN_CAPS) != 0)?;
        refuse_if(self.fabric.as_deref().is_some_and(|name: &CStr| name != offer.kind.name()))?;
        refuse_if(self.given && offer.mode & !self.mode != 0)?;
        if let Some(mode) = self.mr_mode {
            refuse_if(self.mr_mode_of(offer, self.caps) & !mode != 0)?;
        }
        refuse_if(self.auto_progress && !offer.auto_progress)?;
        refuse_if(self.key_size > KEY_SIZE || self.data_size > DATA_SIZE)?;
        refuse_if(self.counters > config.faults.cntr_budget as usize)?;
        refuse_if(self.max_msg_size > self.max_msg_size_of(offer))?;
        refuse_if(self.msg_order & !offer.msg_order != 0)?;
        refuse_if(self.tx_iov > offer.iov_limit || self.rx_iov > offer.iov_limit || self.rma_iov > RMA_IOV)
    }

    /// Returns the receive mode that the application chose: with `FI_RX_CQ_DATA`, writes with immediate data take
    /// receives.
    pub(super) fn rx_mode_of(&self, offer: &Offer, faults: &Faults) -> u64 {
        if offer.kind == Kind::Direct && !faults.no_rx_cq_data { self.mode & fi::FI_RX_CQ_DATA } else { 0 }
    }

    /// Returns the maximum size of a message in bytes, for these hints.
    pub(super) fn max_msg_size_of(&self, offer: &Offer) -> usize {
        if self.given && self.caps & fi::FI_RMA == 0 { offer.max_msg_size } else { offer.max_size }
    }

    /// Returns the info's capabilities.
    pub(super) fn caps_of(&self, offer: &Offer) -> u64 {
        let all = offer.tx_caps | offer.rx_caps | DOMAIN_CAPS;
        if self.caps == 0 {
            // Without the registration modes for remote memory, an application gets no remote memory.
            let no_target = self.mr_mode.is_some_and(|mode| MR_TARGET & !mode != 0);
            return if no_target { all & !(fi::FI_RMA | fi::FI_RMA_EVENT | RMA_DIRECTIONS) } else { all };
        }
        let mut caps = self.caps & PRIMARY | all & !PRIMARY;
        if caps & (fi::FI_MSG | fi::FI_TAGGED) != 0 && caps & MESSAGE_DIRECTIONS == 0 {
            caps |= MESSAGE_DIRECTIONS;
        }
        if caps & fi::FI_RMA != 0 && caps & RMA_DIRECTIONS == 0 {
            caps |= RMA_DIRECTIONS;
        }
        caps
    }

    /// Returns [`mr_mode_of`](Self::mr_mode_of) in the application's terms, which may be the old single bit.
    pub(super) fn mr_mode_reported(&self, offer: &Offer, caps: u64) -> i32 {
        if self.basic { MR_BASIC } else { self.mr_mode_of(offer, caps) }
    }

    /// Returns the memory registration modes that an application with these capabilities must support.
    pub(super) fn mr_mode_of(&self, offer: &Offer, caps: u64) -> i32 {
        let target = caps & fi::FI_RMA != 0 && (caps & RMA_DIRECTIONS == 0 || caps & TARGET_DIRECTIONS != 0);
        offer.mr_mode
            | if target { MR_TARGET } else { 0 }
            | if caps & HMEM != 0 { fi::FI_MR_HMEM } else { 0 }
            // Optional: used if the application supports it.
            | self.mr_mode.map_or(0, |mode| mode & fi::FI_MR_LOCAL)
    }

    /// Takes the node and service, which name this host with `FI_SOURCE`, or else a peer.
    ///
    /// # Errors
    /// `ENODATA` for names that are no card's.
    pub(super) fn take_node(
        &mut self,
        node: Option<&CStr>,
        has_service: bool,
        flags: u64,
        config: &Config,
    ) -> Result<(), Code> {
        if flags & fi::FI_SOURCE != 0 {
            let own = card::advertised_gid(config);
            let is_own = |node: &CStr| {
                let node = node.to_string_lossy();
                let ip = node.parse::<std::net::Ipv4Addr>().ok();
                node == own.text() || ip.is_some_and(|ip| is_own_ip(ip, config))
            };
            return refuse_if(node.is_some_and(|node| !is_own(node)));
        }
        match node {
            None => refuse_if(has_service),
            Some(node) => {
                let peer = Address::from_text(&node.to_string_lossy()).ok_or(Code::NODATA)?;
                self.dest = Some(peer.to_bytes());
                Ok(())
            }
        }
    }
}

/// Whether this process's cards have this address, or would have it if they were open.
fn is_own_ip(ip: std::net::Ipv4Addr, config: &Config) -> bool {
    Some(ip) == card::advertised_gid(config).ip() || ip == host::default_address()
}

#[cfg(test)]
mod tests {
    use super::super::super::fabric::Kind;
    use super::*;

    fn offer(kind: Kind) -> Offer {
        Offer::of(kind)
    }

    fn hints(caps: u64) -> Hints {
        Hints { given: true, caps, mode: fi::FI_CONTEXT2, ..Hints::default() }
    }

    #[test]
    fn primary_capabilities_are_given_on_request() {
        let rdm = offer(Kind::Rdm);
        let caps = hints(fi::FI_MSG).caps_of(&rdm);
        assert_eq!(caps & (fi::FI_TAGGED | fi::FI_RMA | fi::FI_DIRECTED_RECV), 0);
        assert_eq!(caps & MESSAGE_DIRECTIONS, MESSAGE_DIRECTIONS);
        assert_ne!(caps & fi::FI_SOURCE, 0, "secondary ones cost nothing");
        assert_eq!(caps & fi::FI_RMA_EVENT, 0);
        let caps = hints(fi::FI_RMA | fi::FI_WRITE).caps_of(&rdm);
        assert_eq!(caps & RMA_DIRECTIONS, fi::FI_WRITE);
        assert_ne!(hints(0).caps_of(&rdm) & fi::FI_TAGGED, 0, "no hints, all capabilities");
        let local = Hints { mr_mode: Some(fi::FI_MR_LOCAL), ..hints(0) };
        assert_eq!(local.caps_of(&rdm) & fi::FI_RMA, 0, "no remote keys, no remote memory");
        assert_eq!(local.mr_mode_reported(&rdm, local.caps_of(&rdm)), fi::FI_MR_LOCAL);
    }

    #[test]
    fn contradictory_hints_have_no_offer() {
        let config = Config::default();
        let config = Config { faults: soft_nic::fault::Faults { cntr_budget: 8, ..config.faults.clone() }, ..config };
        let (rdm, direct) = (offer(Kind::Rdm), offer(Kind::Direct));
        let meets = |hints: &Hints, offer: &Offer| hints.meet(offer, &config).is_ok();
        assert!(meets(&hints(fi::FI_MSG), &rdm) && meets(&hints(fi::FI_MSG), &direct));
        assert!(meets(&hints(fi::FI_TAGGED), &rdm) && !meets(&hints(fi::FI_TAGGED), &direct));
        assert!(!meets(&hints(fi::FI_ATOMIC), &rdm));
        let none = Hints { mode: 0, ..hints(fi::FI_MSG) };
        assert!(meets(&none, &rdm) && !meets(&none, &direct), "efa-direct needs FI_CONTEXT2");
        let long = Hints { max_msg_size: 1 << 20, ..hints(fi::FI_MSG) };
        assert!(meets(&long, &rdm) && !meets(&long, &direct));
        let scalable = Hints { mr_mode: Some(0), ..hints(fi::FI_RMA) };
        assert!(!meets(&scalable, &rdm) && !meets(&scalable, &direct));
        let only_local = Hints { mr_mode: Some(0), ..hints(fi::FI_MSG) };
        assert!(meets(&only_local, &rdm) && !meets(&only_local, &direct), "local memory must be registered");
        let ordered = Hints { msg_order: fi::FI_ORDER_SAS, ..hints(fi::FI_MSG) };
        assert!(meets(&ordered, &rdm) && !meets(&ordered, &direct));
        let auto = Hints { auto_progress: true, ..hints(fi::FI_MSG) };
        assert!(!meets(&auto, &rdm) && meets(&auto, &direct));
        for wrong in [
            Hints { key_size: 8, ..hints(0) },
            Hints { data_size: 8, ..hints(0) },
            Hints { counters: 9, ..hints(0) },
            Hints { tx_iov: 9, ..hints(0) },
            Hints { rma_iov: 2, ..hints(0) },
        ] {
            assert!(!meets(&wrong, &rdm) && !meets(&wrong, &direct), "{wrong:?}");
        }
    }
}
