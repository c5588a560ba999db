//! `fid_domain`: a protection domain on one card.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use ferrogin_libfabric::bindings as fi;

use super::fabric::{Fabric, Kind};
use super::guard::{Code, entry};
use super::library::{refuse_setting, text};
use super::object::{Object, Uses, give, head, object, table, take_back};
use super::{av, cntr, cq, ep, gda, info, mr, unsupported};
use soft_nic::card::Card;
use soft_nic::config::Config;

#[repr(C)]
pub(super) struct Domain {
    fid: fi::fid_domain,
    fabric: *const Fabric,
    pub card: Arc<Card>,
    /// Number of the protection domain on the card.
    pub pd: u32,
    /// What the application asked for (`FI_HMEM`...).
    pub caps: u64,
    pub uses: Uses,
}

// SAFETY: repr(C), begins with fid_domain; this provider makes fids of this class here only.
unsafe impl Object for Domain {
    const CLASS: u32 = fi::FI_CLASS_DOMAIN;
}

static OPS: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: Some(close),
    bind: Some(unsupported::bind),
    control: Some(unsupported::control),
    ops_open: Some(ops_open),
    tostr: Some(unsupported::tostr),
    ops_set: Some(unsupported::ops_set),
};

static DOMAIN_OPS: fi::fi_ops_domain = fi::fi_ops_domain {
    size: size_of::<fi::fi_ops_domain>(),
    av_open: Some(av::open),
    cq_open: Some(cq::open),
    endpoint: Some(ep::open),
    scalable_ep: Some(unsupported::scalable_ep),
    cntr_open: Some(cntr::open),
    poll_open: Some(unsupported::poll_open),
    stx_ctx: Some(unsupported::stx_ctx),
    srx_ctx: Some(unsupported::srx_ctx),
    query_atomic: Some(unsupported::query_atomic),
    query_collective: Some(unsupported::query_collective),
    endpoint2: Some(ep::open2),
    xpu_ctx: Some(unsupported::xpu_ctx),
};

static MR_OPS: fi::fi_ops_mr = fi::fi_ops_mr {
    size: size_of::<fi::fi_ops_mr>(),
    reg: Some(mr::reg),
    regv: Some(mr::regv),
    regattr: Some(mr::regattr),
};

impl Domain {
    /// The fabric that it belongs to.
    pub(super) fn fabric_kind(&self) -> Kind {
        // SAFETY: a fabric cannot be closed while it has domains.
        unsafe { &*self.fabric }.kind
    }

    pub(super) fn fabric(&self) -> *const Fabric {
        self.fabric
    }

    /// The API version that the application asked for.
    pub(super) fn api_version(&self) -> u32 {
        // SAFETY: a fabric cannot be closed while it has domains.
        unsafe { &*self.fabric }.api_version()
    }
}

pub(super) unsafe extern "C" fn open2(
    fabric: *mut fi::fid_fabric,
    info: *mut fi::fi_info,
    out: *mut *mut fi::fid_domain,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    if flags != 0 {
        return Code(fi::FI_EBADFLAGS).negative();
    }
    // SAFETY: the same arguments under the same contract.
    unsafe { open(fabric, info, out, context) }
}

/// `fi_domain`.
pub(super) unsafe extern "C" fn open(
    fabric: *mut fi::fid_fabric,
    info: *mut fi::fi_info,
    out: *mut *mut fi::fid_domain,
    context: *mut c_void,
) -> c_int {
    entry("fi_domain", || {
        // SAFETY: the application's fid.
        let fabric: &Fabric = unsafe { object(fabric) }?;
        if info.is_null() {
            return Err(Code::INVAL);
        }
        // SAFETY: the application's info, alive for the call.
        let info = unsafe { &*info };
        // SAFETY: null or the info's domain attributes.
        let attr = unsafe { info.domain_attr.as_ref() }.ok_or(Code::INVAL)?;
        // SAFETY: null or terminated.
        let name = unsafe { text(attr.name) }.ok_or(Code::INVAL)?;
        let config = Config::from_env().map_err(|error| refuse_setting("fi_domain", &error))?;
        let number = info::card_of(&name.to_string_lossy()).filter(|n| *n < config.nics).ok_or(Code::NODATA)?;
        let card = Card::open(number, &config)?;
        let domain = Domain {
            fid: fi::fid_domain {
                fid: head(fi::FI_CLASS_DOMAIN, context, &OPS),
                ops: table(&DOMAIN_OPS),
                mr: table(&MR_OPS),
            },
            fabric: ptr::from_ref(fabric),
            pd: card.new_domain(),
            card,
            caps: info.caps,
            uses: Uses::default(),
        };
        // SAFETY: `out` is the application's.
        unsafe { give(domain, out) }?;
        fabric.uses.begin();
        Ok(0)
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(domain)", || {
        // SAFETY: the application's fid.
        let domain: &Domain = unsafe { object(fid) }?;
        domain.uses.none()?;
        // SAFETY: the fabric outlives its domains.
        unsafe { &*domain.fabric }.uses.end();
        // SAFETY: nothing uses it and the application closes it.
        drop(unsafe { take_back::<Domain, _>(fid) });
        Ok(0)
    })
}

unsafe extern "C" fn ops_open(
    fid: *mut fi::fid,
    name: *const c_char,
    _flags: u64,
    ops: *mut *mut c_void,
    _context: *mut c_void,
) -> c_int {
    entry("fi_open_ops(domain)", || {
        // SAFETY: the application's fid.
        unsafe { object::<Domain, _>(fid) }?;
        // SAFETY: a terminated name or null, and where the application wants the table.
        unsafe { gda::open_domain_ops(name, ops) }?;
        Ok(0)
    })
}
