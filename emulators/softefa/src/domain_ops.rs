//! `fi_domain`, and the calls of a domain.

use std::ffi::{c_int, c_void};
use std::ptr;

use ferrogin_libfabric::bindings as fi;

use super::domain::Domain;
use super::fabric::Fabric;
use super::guard::{Code, entry};
use super::info::Given;
use super::library::refuse_setting;
use super::object::{Uses, give, head, object, table, take_back};
use super::{av, cntr, cq, ep_ops, gda, info, mr, unsupported};
use soft_nic::card::Card;
use soft_nic::config::Config;

static OPS: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: Some(close),
    bind: Some(unsupported::bind),
    control: Some(unsupported::control),
    ops_open: Some(gda::ops_open::<Domain>),
    tostr: Some(unsupported::tostr),
    ops_set: Some(unsupported::ops_set),
};

static DOMAIN_OPS: fi::fi_ops_domain = fi::fi_ops_domain {
    size: size_of::<fi::fi_ops_domain>(),
    av_open: Some(av::open),
    cq_open: Some(cq::open),
    endpoint: Some(ep_ops::open),
    scalable_ep: Some(unsupported::scalable_ep),
    cntr_open: Some(cntr::open),
    poll_open: Some(unsupported::poll_open),
    stx_ctx: Some(unsupported::stx_ctx),
    srx_ctx: Some(unsupported::srx_ctx),
    query_atomic: Some(unsupported::query_atomic),
    query_collective: Some(unsupported::query_collective),
    endpoint2: Some(ep_ops::open2),
    xpu_ctx: Some(unsupported::xpu_ctx),
};

static MR_OPS: fi::fi_ops_mr = fi::fi_ops_mr {
    size: size_of::<fi::fi_ops_mr>(),
    reg: Some(mr::reg),
    regv: Some(mr::regv),
    regattr: Some(mr::regattr),
};

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
    // SAFETY: the application's arguments are passed on unchanged, and it keeps them valid during the call.
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
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let fabric: &Fabric = unsafe { object(fabric) }?;
        // SAFETY: `fi_domain(3)` has an info of `fi_getinfo`, which is alive during the call.
        let given = unsafe { Given::borrow(info, 0) }.ok_or(Code::INVAL)?;
        let name = given.domain_name().ok_or(Code::INVAL)?;
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
            caps: given.info.caps,
            uses: Uses::default(),
        };
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        unsafe { give(domain, out) }?;
        fabric.uses.begin();
        Ok(0)
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(domain)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let domain: &Domain = unsafe { object(fid) }?;
        domain.uses.none()?;
        // SAFETY: a fabric counts its domains in `uses` and cannot be closed before them.
        unsafe { &*domain.fabric }.uses.end();
        // SAFETY: no other object uses this one, and the application does not use a fid after it closed it.
        drop(unsafe { take_back::<Domain, _>(fid) });
        Ok(0)
    })
}
