//! `fi_fabric`, and the calls of a fabric.

use std::ffi::{CStr, c_int, c_void};

use ferrogin_libfabric::bindings as fi;

use super::entry::{Arg, Array, Call, Out, entry_points};
use super::fabric::{Fabric, Kind};
use super::guard::Code;
use super::object::{Fid, Uses, close, give, head, table};
use super::{cntr, cq, domain_ops, eq, gda, unsupported};

static OPS: fi::fi_ops =
    fi::fi_ops { close: Some(close::<Fabric>), ops_open: Some(gda::ops_open::<Fabric>), ..unsupported::FID };

static FABRIC_OPS: fi::fi_ops_fabric = fi::fi_ops_fabric {
    size: size_of::<fi::fi_ops_fabric>(),
    domain: Some(domain_ops::open),
    passive_ep: Some(unsupported::passive_ep),
    eq_open: Some(eq::open),
    wait_open: Some(unsupported::wait_open),
    trywait: Some(trywait),
    domain2: Some(domain_ops::open2),
};

/// The attributes that `fi_fabric` reads.
struct Attributes<'a> {
    name: Option<&'a CStr>,
    api_version: u32,
}

impl<'a> Arg<'a, *mut fi::fi_fabric_attr> for Attributes<'a> {
    unsafe fn of(raw: *mut fi::fi_fabric_attr, call: &'a Call) -> Result<Self, Code> {
        // SAFETY: the conditions are the same.
        let attr: &fi::fi_fabric_attr = unsafe { Option::of(raw.cast_const(), call) }?.ok_or(Code::INVAL)?;
        // SAFETY: null or a terminated string.
        Ok(Self { name: unsafe { Arg::of(attr.name.cast_const(), call) }?, api_version: attr.api_version })
    }
}

entry_points! {
    /// `fi_fabric`.
    pub(super) fn open(attr: *mut fi::fi_fabric_attr, out: *mut *mut fi::fid_fabric, context: *mut c_void) -> c_int
    as ("fi_fabric") (attr: Attributes<'_> = attr, out: Out<'_, *mut fi::fid_fabric> = out) {
        let kind = Kind::ALL.into_iter().find(|kind| attr.name == Some(kind.name())).ok_or(Code::NODATA)?;
        let fid = fi::fid_fabric {
            fid: head(fi::FI_CLASS_FABRIC, context, &OPS),
            ops: table(&FABRIC_OPS),
            api_version: attr.api_version,
        };
        give(Fabric { fid, kind, uses: Uses::default() }, &out);
        Ok(0)
    }

    /// `fi_trywait`: whether a thread may sleep on the descriptors of these objects.
    fn trywait(fabric: *mut fi::fid_fabric, fids: *mut *mut fi::fid, count: c_int) -> c_int
    as ("fi_trywait") (_fabric: &Fabric = fabric, fids: Array<'_, Fid<'_>> = (fids.cast_const(), count)) {
        for fid in fids.iter() {
            let may_sleep = if let Ok(cq) = fid.object::<cq::Cq>() {
                cq.may_sleep(1)
            } else if let Ok(eq) = fid.object::<eq::Eq>() {
                eq.may_sleep()
            } else if fid.object::<cntr::Cntr>().is_ok() {
                return Err(Code::NOSYS);
            } else {
                return Err(Code::INVAL);
            };
            if !may_sleep {
                return Err(Code::AGAIN);
            }
        }
        Ok(0)
    }
}
