//! `fid_fabric`.

use std::ffi::{c_char, c_int, c_void};

use ferrogin_fabric::bindings as fi;

use super::guard::{Code, entry};
use super::library::text;
use super::object::{Object, Uses, give, head, object, table, take_back};
use super::{FABRIC, domain, gda, unsupported};

#[repr(C)]
pub(super) struct Fabric {
    fid: fi::fid_fabric,
    pub uses: Uses,
}

// SAFETY: repr(C), begins with fid_fabric; this provider makes fids of this class here only.
unsafe impl Object for Fabric {
    const CLASS: u32 = fi::FI_CLASS_FABRIC;
}

impl Fabric {
    /// The API version that the application asked for; the core writes it after the fabric was opened.
    pub(super) fn api_version(&self) -> u32 {
        // SAFETY: a field of this object; volatile because the core wrote it behind the compiler's back.
        unsafe { (&raw const self.fid.api_version).read_volatile() }
    }
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

static FABRIC_OPS: fi::fi_ops_fabric = fi::fi_ops_fabric {
    size: size_of::<fi::fi_ops_fabric>(),
    domain: Some(domain::open),
    passive_ep: Some(unsupported::passive_ep),
    eq_open: Some(unsupported::eq_open),
    wait_open: Some(unsupported::wait_open),
    trywait: Some(unsupported::trywait),
    domain2: Some(domain::open2),
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
        // SAFETY: the application's attributes, alive for the call.
        let attr = unsafe { &*attr };
        // SAFETY: null or terminated, by the interface.
        if unsafe { text(attr.name) } != Some(FABRIC) {
            return Err(Code::NODATA);
        }
        let fid = fi::fid_fabric {
            fid: head(fi::FI_CLASS_FABRIC, context, &OPS),
            ops: table(&FABRIC_OPS),
            api_version: attr.api_version,
        };
        // SAFETY: `out` is the application's.
        unsafe { give(Fabric { fid, uses: Uses::default() }, out) }?;
        Ok(0)
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(fabric)", || {
        // SAFETY: the application's fid.
        let fabric: &Fabric = unsafe { object(fid) }?;
        fabric.uses.none()?;
        // SAFETY: nothing uses it and the application closes it.
        drop(unsafe { take_back::<Fabric, _>(fid) });
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
    entry("fi_open_ops(fabric)", || {
        // SAFETY: the application's fid.
        unsafe { object::<Fabric, _>(fid) }?;
        // SAFETY: a terminated name or null, and where the application wants the table.
        unsafe { gda::open_fabric_ops(name, ops) }?;
        Ok(0)
    })
}
