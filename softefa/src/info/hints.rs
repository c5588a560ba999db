//! What an application asks `fi_getinfo` for, as far as it is looked at.

use std::ffi::{CStr, CString, c_char};

use ferrogin_libfabric::bindings as fi;

use super::super::guard::Code;
use super::super::library::{text, version};
use super::super::{PROVIDER, ops_msg};
use super::{DomainAttr, EpAttr, HMEM, Offer};
use soft_nic::address::{ADDRESS_LEN, Address, Gid};
use soft_nic::card;
use soft_nic::config::Config;
use soft_nic::host;

/// Old names of mode bits of memory registration.
const MR_BASIC: i32 = 1;
const MR_SCALABLE: i32 = 2;
/// Bits that matter to those only whose memory others reach.
const MR_TARGET: i32 = fi::FI_MR_VIRT_ADDR | fi::FI_MR_ALLOCATED | fi::FI_MR_PROV_KEY;
/// Capabilities that are given to those only who ask for them.
pub(super) const PRIMARY: u64 = fi::FI_MSG
    | fi::FI_RMA
    | fi::FI_TAGGED
    | fi::FI_ATOMIC
    | fi::FI_MULTICAST
    | fi::FI_DIRECTED_RECV
    | fi::FI_HMEM
    // Counting what peers do costs programs their count of messages, so it waits to be asked for, too.
    | fi::FI_RMA_EVENT
    | DIRECTIONS;
const MESSAGE_DIRECTIONS: u64 = fi::FI_SEND | fi::FI_RECV;
const TARGET_DIRECTIONS: u64 = fi::FI_REMOTE_READ | fi::FI_REMOTE_WRITE;
const RMA_DIRECTIONS: u64 = fi::FI_READ | fi::FI_WRITE | TARGET_DIRECTIONS;
const DIRECTIONS: u64 = MESSAGE_DIRECTIONS | RMA_DIRECTIONS;

/// Hints, or what stands for them when there are none.
#[derive(Debug, Default)]
pub(super) struct Hints {
    /// There are hints at all.
    given: bool,
    pub caps: u64,
    mode: u64,
    pub fabric: Option<CString>,
    pub domain: Option<CString>,
    pub dest: Option<[u8; ADDRESS_LEN]>,
    mr_mode: Option<i32>,
    auto_progress: bool,
    /// Control and data progress, as asked for.
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
    /// Orders that are asked for; `None` without hints.
    pub tx_order: Option<u64>,
    pub rx_order: Option<u64>,
}

/// An order of completions is asked for, which the card does not keep and version 2 ignores.
fn completion_order(asked: u64, api: u32) -> bool {
    asked != 0 && api < version(2, 0)
}

fn unless(wrong: bool) -> Result<(), Code> {
    if wrong { Err(Code::NODATA) } else { Ok(()) }
}

impl Hints {
    /// Reads the hints; an error is a reason why this provider does not suit.
    ///
    /// # Safety
    /// `hints` is null or a `fi_info` of the application.
    pub(super) unsafe fn read(hints: *const fi::fi_info, api: u32, config: &Config) -> Result<Self, Code> {
        let mut wanted = Self::default();
        // SAFETY: by contract.
        let Some(hints) = (unsafe { hints.as_ref() }) else { return Ok(wanted) };
        (wanted.given, wanted.caps, wanted.mode) = (true, hints.caps, hints.mode);
        let format = hints.addr_format;
        unless(format != fi::FI_FORMAT_UNSPEC && format != fi::FI_ADDR_EFA)?;
        if !hints.dest_addr.is_null() {
            unless(hints.dest_addrlen != ADDRESS_LEN)?;
            // SAFETY: `dest_addrlen` bytes, by the interface.
            wanted.dest = Some(unsafe { hints.dest_addr.cast::<[u8; ADDRESS_LEN]>().read_unaligned() });
        }
        if !hints.src_addr.is_null() {
            unless(hints.src_addrlen != ADDRESS_LEN)?;
            // SAFETY: `src_addrlen` bytes, by the interface.
            let source = unsafe { hints.src_addr.cast::<[u8; ADDRESS_LEN]>().read_unaligned() };
            // The name of a card is complete only when it is opened; its host is known before.
            let own = card::advertised_gid(config).to_bytes();
            unless(source[..HOST_PART] != own[..HOST_PART])?;
        }
        // SAFETY: null or a part of the application's info, which never grew.
        if let Some(fabric) = unsafe { hints.fabric_attr.as_ref() } {
            // SAFETY: null or terminated.
            unless(unsafe { text(fabric.prov_name) }.is_some_and(|name| name != PROVIDER))?;
            // SAFETY: null or terminated.
            wanted.fabric = unsafe { text(fabric.name) }.map(Into::into);
        }
        // SAFETY: null or a part of the application's info, as far as every version has it.
        if let Some(domain) = unsafe { hints.domain_attr.cast::<DomainAttr>().as_ref() } {
            // SAFETY: its name is null or terminated.
            unsafe { wanted.read_domain(domain, api) }?;
        }
        // SAFETY: as above.
        if let Some(ep) = unsafe { hints.ep_attr.cast::<EpAttr>().as_ref() } {
            wanted.read_ep(ep)?;
        }
        // SAFETY: null or a part of the application's info, which never grew.
        if let Some(tx) = unsafe { hints.tx_attr.as_ref() } {
            unless(tx.op_flags & !ops_msg::SEND_FLAGS != 0 || completion_order(tx.comp_order, api))?;
            (wanted.tx_caps, wanted.msg_order) = (tx.caps, tx.msg_order);
            (wanted.tx_flags, wanted.tx_order) = (Some(tx.op_flags), Some(tx.msg_order));
            (wanted.tx_iov, wanted.rma_iov) = (tx.iov_limit, tx.rma_iov_limit);
            (wanted.inject_size, wanted.tx_size, wanted.tclass) = (tx.inject_size, tx.size, tx.tclass);
            wanted.mode |= tx.mode;
        }
        // SAFETY: as above.
        if let Some(rx) = unsafe { hints.rx_attr.as_ref() } {
            unless(rx.op_flags & !(fi::FI_COMPLETION | fi::FI_MULTI_RECV) != 0)?;
            unless(completion_order(rx.comp_order, api))?;
            (wanted.rx_caps, wanted.rx_iov, wanted.rx_size) = (rx.caps, rx.iov_limit, rx.size);
            (wanted.rx_flags, wanted.rx_order) = (Some(rx.op_flags), Some(rx.msg_order));
            wanted.msg_order |= rx.msg_order;
        }
        Ok(wanted)
    }

    /// # Safety
    /// The name is null or terminated.
    unsafe fn read_domain(&mut self, domain: &DomainAttr, api: u32) -> Result<(), Code> {
        // SAFETY: by contract.
        self.domain = unsafe { text(domain.name) }.map(Into::into);
        let mut mode = domain.mr_mode;
        unless(mode & MR_SCALABLE != 0 && mode & MR_BASIC == 0)?;
        self.basic = mode & MR_BASIC != 0 || mode == 0 && api < version(1, 5);
        if self.basic {
            mode |= MR_TARGET | fi::FI_MR_LOCAL;
        }
        self.mr_mode = Some(mode);
        let auto = fi::fi_progress::FI_PROGRESS_AUTO;
        self.progress = [domain.control_progress, domain.data_progress];
        self.auto_progress = self.progress.contains(&auto);
        unless(domain.av_type > fi::fi_av_type::FI_AV_TABLE)?;
        unless(domain.caps & !super::DOMAIN_CAPS != 0)?;
        (self.key_size, self.data_size, self.counters) = (domain.mr_key_size, domain.cq_data_size, domain.cntr_cnt);
        Ok(())
    }

    fn read_ep(&mut self, ep: &EpAttr) -> Result<(), Code> {
        let kind = ep.kind;
        unless(kind != fi::fi_ep_type::FI_EP_UNSPEC && kind != fi::fi_ep_type::FI_EP_RDM)?;
        unless(ep.protocol != 0 && ep.protocol != fi::FI_PROTO_EFA)?;
        unless(ep.tx_ctx_cnt > 1 || ep.rx_ctx_cnt > 1)?;
        self.max_msg_size = ep.max_msg_size;
        Ok(())
    }

    /// Whether an offer meets the hints.
    pub(super) fn meet(&self, offer: &Offer, config: &Config) -> Result<(), Code> {
        let all = offer.tx_caps | offer.rx_caps | super::DOMAIN_CAPS | HMEM;
        unless(self.caps & !all != 0 || self.caps & HMEM & !offer.optional_caps != 0)?;
        unless(self.caps & HMEM != 0 && config.faults.no_hmem)?;
        unless(self.tx_caps & !(offer.tx_caps | HMEM | super::DOMAIN_CAPS) != 0)?;
        unless(self.rx_caps & !(offer.rx_caps | HMEM | super::DOMAIN_CAPS) != 0)?;
        unless(self.fabric.as_deref().is_some_and(|name: &CStr| name != offer.kind.name()))?;
        unless(self.given && offer.mode & !self.mode != 0)?;
        if let Some(mode) = self.mr_mode {
            unless(self.mr_mode_of(offer, self.caps) & !mode != 0)?;
        }
        unless(self.auto_progress && !offer.auto_progress)?;
        unless(self.key_size > super::KEY_SIZE || self.data_size > super::DATA_SIZE)?;
        unless(self.counters > config.faults.cntr_budget as usize)?;
        unless(self.max_msg_size > self.max_msg_size_of(offer))?;
        unless(self.msg_order & !offer.msg_order != 0)?;
        unless(self.tx_iov > offer.iov_limit || self.rx_iov > offer.iov_limit || self.rma_iov > super::RMA_IOV)
    }

    /// Bytes of a message at most, for one who wants this.
    pub(super) fn max_msg_size_of(&self, offer: &Offer) -> usize {
        if self.given && self.caps & fi::FI_RMA == 0 { offer.max_msg_size } else { offer.max_size }
    }

    /// Capabilities of the info.
    pub(super) fn caps_of(&self, offer: &Offer) -> u64 {
        let all = offer.tx_caps | offer.rx_caps | super::DOMAIN_CAPS;
        if self.caps == 0 {
            // Whoever cannot live with what remote memory needs gets none.
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

    /// The same in the words of the application, of which some are old.
    pub(super) fn mr_mode_told(&self, offer: &Offer, caps: u64) -> i32 {
        if self.basic { MR_BASIC } else { self.mr_mode_of(offer, caps) }
    }

    /// What an application with these capabilities must do for memory registration.
    pub(super) fn mr_mode_of(&self, offer: &Offer, caps: u64) -> i32 {
        let target = caps & fi::FI_RMA != 0 && (caps & RMA_DIRECTIONS == 0 || caps & TARGET_DIRECTIONS != 0);
        offer.mr_mode
            | if target { MR_TARGET } else { 0 }
            | if caps & HMEM != 0 { fi::FI_MR_HMEM } else { 0 }
            // Not needed, but used when the application does it.
            | self.mr_mode.map_or(0, |mode| mode & fi::FI_MR_LOCAL)
    }

    /// Node and service: ourselves with `FI_SOURCE`, else a peer.
    ///
    /// # Errors
    /// `ENODATA` for names that are not a card's.
    ///
    /// # Safety
    /// `node` and `service` are null or terminated.
    pub(super) unsafe fn name(
        &mut self,
        node: *const c_char,
        service: *const c_char,
        flags: u64,
        config: &Config,
    ) -> Result<(), Code> {
        // SAFETY: by contract.
        let node = unsafe { text(node) };
        if flags & fi::FI_SOURCE != 0 {
            let own = card::advertised_gid(config);
            let is_own = |node: &CStr| {
                let node = node.to_string_lossy();
                let ip = node.parse::<std::net::Ipv4Addr>().ok();
                node == own.text() || ip.is_some_and(|ip| ip == own.ip || ip == host::default_address())
            };
            return unless(node.is_some_and(|node| !is_own(node)));
        }
        match node {
            None => unless(!service.is_null()),
            Some(node) => {
                let peer = Address::from_text(&node.to_string_lossy()).ok_or(Code::NODATA)?;
                self.dest = Some(peer.to_bytes());
                Ok(())
            }
        }
    }
}

/// Bytes of a GID that say which host it is.
const HOST_PART: usize = 6;
const _: () = assert!(HOST_PART < size_of::<Gid>());

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
    fn primary_capabilities_are_given_to_those_who_ask() {
        let rdm = offer(Kind::Rdm);
        let caps = hints(fi::FI_MSG).caps_of(&rdm);
        assert_eq!(caps & (fi::FI_TAGGED | fi::FI_RMA | fi::FI_DIRECTED_RECV), 0);
        assert_eq!(caps & MESSAGE_DIRECTIONS, MESSAGE_DIRECTIONS);
        assert_ne!(caps & fi::FI_SOURCE, 0, "secondary ones cost nothing");
        assert_eq!(caps & fi::FI_RMA_EVENT, 0);
        let caps = hints(fi::FI_RMA | fi::FI_WRITE).caps_of(&rdm);
        assert_eq!(caps & RMA_DIRECTIONS, fi::FI_WRITE);
        assert_ne!(hints(0).caps_of(&rdm) & fi::FI_TAGGED, 0, "no wish, everything");
        let local = Hints { mr_mode: Some(fi::FI_MR_LOCAL), ..hints(0) };
        assert_eq!(local.caps_of(&rdm) & fi::FI_RMA, 0, "no keys, no remote memory");
        assert_eq!(local.mr_mode_told(&rdm, local.caps_of(&rdm)), fi::FI_MR_LOCAL);
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
