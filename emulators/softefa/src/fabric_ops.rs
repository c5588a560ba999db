//! `fi_fabric`, and the calls of a fabric.

use std::ffi::{c_int, c_void};

use ferrogin_libfabric::bindings as fi;

use super::fabric::{Fabric, Kind};
use super::guard::{Code, entry};
use super::library::text;
use super::object::{Uses, give, head, object, table, take_back};
use super::{cntr, cq, domain_ops, eq, gda, unsupported};

static OPS: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: Some(close),
    bind: Some(unsupported::bind),
    control: Some(unsupported::control),
    ops_open: Some(gda::ops_open::<Fabric>),
    tostr: Some(unsupported::tostr),
    ops_set: Some(unsupported::ops_set),
};

static FABRIC_OPS: fi::fi_ops_fabric = fi::fi_ops_fabric {
    size: size_of::<fi::fi_ops_fabric>(),
    domain: Some(domain_ops::open),
    passive_ep: Some(unsupported::passive_ep),
    eq_open: Some(eq::open),
    wait_open: Some(unsupported::wait_open),
    trywait: Some(trywait),
    domain2: Some(domain_ops::open2),
};

/// `fi_fabric`.
pub(super) unsafe extern "C" fn open(
    attr: *mut fi::fi_fabric_attr,
    out: *mut *mut fi::fid_fabric,
    context: *mut c_void,
) -> c_int {
    entry("fi_fabric", || {
        if attr.is_null() {
            return Err(Code::INVAL);
        }
        // SAFETY: not null, and the application keeps its attributes alive during the call.
        let attr = unsafe { &*attr };
        // SAFETY: the application passes null or a terminated string, which lives during the call.
        let name = unsafe { text(attr.name) };
        let kind = Kind::ALL.into_iter().find(|kind| name == Some(kind.name())).ok_or(Code::NODATA)?;
        let fid = fi::fid_fabric {
            fid: head(fi::FI_CLASS_FABRIC, context, &OPS),
            ops: table(&FABRIC_OPS),
            api_version: attr.api_version,
        };
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        unsafe { give(Fabric { fid, kind, uses: Uses::default() }, out) }?;
        Ok(0)
    })
}

/// `fi_trywait`: whether a thread may sleep on the descriptors of these objects.
unsafe extern "C" fn trywait(fabric: *mut fi::fid_fabric, fids: *mut *mut fi::fid, count: c_int) -> c_int {
    entry("fi_trywait", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        unsafe { object::<Fabric, _>(fabric) }?;
        let count = usize::try_from(count).map_err(|_| Code::INVAL)?;
        if fids.is_null() && count > 0 {
            return Err(Code::INVAL);
        }
        for i in 0..count {
            // SAFETY: not null, and the application states that the array has `count` fids.
            let fid = unsafe { fids.wrapping_add(i).read() };
            // SAFETY: the application keeps the fid open during the call; `object` checks its class.
            let may_sleep = if let Ok(cq) = unsafe { object::<cq::Cq, _>(fid) } {
                cq.may_sleep()
            // SAFETY: the application keeps the fid open during the call; `object` checks its class.
            } else if let Ok(eq) = unsafe { object::<eq::Eq, _>(fid) } {
                eq.may_sleep()
            // SAFETY: the application keeps the fid open during the call; `object` checks its class.
            } else if unsafe { object::<cntr::Cntr, _>(fid) }.is_ok() {
                return Err(Code::NOSYS);
            } else {
                return Err(Code::INVAL);
            };
            if !may_sleep {
                return Err(Code::AGAIN);
            }
        }
        Ok(0)
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(fabric)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let fabric: &Fabric = unsafe { object(fid) }?;
        fabric.uses.none()?;
        // SAFETY: no other object uses this one, and the application does not use a fid after it closed it.
        drop(unsafe { take_back::<Fabric, _>(fid) });
        Ok(0)
    })
}
