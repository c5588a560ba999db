//! `fi_domain`, and the calls of a domain.

use std::ffi::{c_int, c_void};

use ferrogin_libfabric::bindings as fi;

use super::domain::Domain;
use super::entry::{Out, entry_points};
use super::fabric::Fabric;
use super::guard::Code;
use super::info::RawHints;
use super::library::refuse_setting;
use super::object::{Held, Uses, close, give, head, table};
use super::{av, cntr, cq, ep_ops, gda, info, mr, unsupported};
use soft_nic::card::Card;
use soft_nic::config::Config;

static OPS: fi::fi_ops =
    fi::fi_ops { close: Some(close::<Domain>), ops_open: Some(gda::ops_open::<Domain>), ..unsupported::FID };

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

entry_points! {
    /// `fi_domain`.
    pub(super) fn open(
        fabric: *mut fi::fid_fabric,
        info: *mut fi::fi_info,
        out: *mut *mut fi::fid_domain,
        context: *mut c_void,
    ) -> c_int
    as ("fi_domain") (
        fabric: &Fabric = fabric,
        given: Option<RawHints<'_>> = info.cast_const(),
        out: Out<'_, *mut fi::fid_domain> = out,
    ) {
        open_domain(fabric, given, &out, context)
    }

    /// `fi_domain2`.
    pub(super) fn open2(
        fabric: *mut fi::fid_fabric,
        info: *mut fi::fi_info,
        out: *mut *mut fi::fid_domain,
        flags: u64,
        context: *mut c_void,
    ) -> c_int
    as ("fi_domain") (
        fabric: &Fabric = fabric,
        given: Option<RawHints<'_>> = info.cast_const(),
        out: Out<'_, *mut fi::fid_domain> = out,
    ) {
        if flags != 0 {
            return Err(Code::BADFLAGS);
        }
        open_domain(fabric, given, &out, context)
    }
}

fn open_domain(
    fabric: &Fabric,
    given: Option<RawHints<'_>>,
    out: &Out<'_, *mut fi::fid_domain>,
    context: *mut c_void,
) -> Result<i32, Code> {
    let given = given.ok_or(Code::INVAL)?;
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
        fabric: Held::new(fabric),
        pd: card.new_domain(),
        card,
        caps: given.info.caps,
        uses: Uses::default(),
    };
    give(domain, out);
    Ok(0)
}
