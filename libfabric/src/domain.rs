//! Fabric and domain: the roots of the object tree.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use crate::bindings::{self, fi_threading, fid_domain, fid_fabric};
use crate::progress::{self, Progress, ProgressOps};
use crate::statistics::{self, Statistics, StatisticsOps};
use crate::{Error, Info, Libfabric};
use crate::{entry, table};

/// An open fabric.
pub struct Fabric {
    raw: *mut fid_fabric,
    lib: Arc<Libfabric>,
}

// SAFETY: this crate uses a fabric only to open domains and operation tables, which libfabric allows from several threads at once. The
// last owner alone closes it.
unsafe impl Send for Fabric {}
// SAFETY: opening domains and operation tables from several threads at once is allowed.
unsafe impl Sync for Fabric {}

impl Fabric {
    /// `fi_fabric` for the info's fabric.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(info: &Info) -> Result<Arc<Self>, Error> {
        let lib = Arc::clone(info.library());
        // SAFETY: the attribute belongs to a live info of this library.
        let raw = unsafe { lib.open_fabric(info.raw().fabric_attr) }?;
        Ok(Arc::new(Self { raw, lib }))
    }

    /// The library of the fabric.
    pub fn library(&self) -> &Arc<Libfabric> {
        &self.lib
    }

    /// The libfabric object, alive as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_fabric {
        self.raw
    }

    pub(crate) fn open_ops(&self, name: &CStr) -> Option<*mut std::ffi::c_void> {
        // SAFETY: `raw` is open until drop, and the fid is its first member.
        unsafe { table::open_ops(&self.lib, self.raw.cast(), name) }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // SAFETY: `raw` is open. Every domain holds an Arc of this fabric, so none is left.
        unsafe { table::close(&self.lib, self.raw.cast(), "a fabric") }
    }
}

/// An open domain: one card (rail) with its queues, memory and addresses.
pub struct Domain {
    raw: *mut fid_domain,
    mr_mode: i32,
    fabric: Arc<Fabric>,
}

// SAFETY: `open` demands FI_THREAD_SAFE, under which the provider serialises access to the domain and to everything opened on it. The
// last owner alone closes it.
unsafe impl Send for Domain {}
// SAFETY: the provider serialises access from several threads (FI_THREAD_SAFE).
unsafe impl Sync for Domain {}

impl Domain {
    /// `fi_domain` for the info's domain.
    ///
    /// # Errors
    /// [`Error::Argument`] when the info's threading level is not `FI_THREAD_SAFE`; [`Error::Call`] with the provider's error.
    pub fn open(fabric: &Arc<Fabric>, info: &Info) -> Result<Arc<Self>, Error> {
        if info.threading() != fi_threading::FI_THREAD_SAFE {
            return Err(Error::Argument {
                what: format!(
                    "provider {} offers threading level {}, not FI_THREAD_SAFE: ask for it in the hints",
                    info.provider(),
                    info.threading()
                ),
            });
        }
        let lib = fabric.library();
        // SAFETY: the fabric is open.
        let ops = unsafe { (*fabric.as_ptr()).ops };
        let open = entry!(lib, ops, fi_ops_fabric, domain, "fi_domain")?;
        let mut raw = ptr::null_mut();
        // SAFETY: the fabric is open and the info is live; the provider writes `raw` on success only.
        let code = unsafe { open(fabric.as_ptr(), info.as_ptr(), &mut raw, ptr::null_mut()) };
        lib.check("fi_domain", code)?;
        Ok(Arc::new(Self { raw, mr_mode: info.mr_mode(), fabric: Arc::clone(fabric) }))
    }

    /// The fabric that the domain was opened on.
    pub fn fabric(&self) -> &Arc<Fabric> {
        &self.fabric
    }

    /// The library of the domain.
    pub fn library(&self) -> &Arc<Libfabric> {
        self.fabric.library()
    }

    /// The libfabric object, alive as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_domain {
        self.raw
    }

    /// The memory registration modes that the provider demands, `FI_MR_*`.
    pub fn mr_mode(&self) -> i32 {
        self.mr_mode
    }

    pub(crate) fn open_ops(&self, name: &CStr) -> Option<*mut std::ffi::c_void> {
        // SAFETY: `raw` is open until drop, and the fid is its first member.
        unsafe { table::open_ops(self.library(), self.raw.cast(), name) }
    }

    /// The function by which a waiting thread makes the domain's card progress; `None` for providers that need no such call.
    pub fn progress(&self) -> Option<Progress> {
        let table: *const ProgressOps = self.open_ops(progress::OPS)?.cast();
        // SAFETY: a provider's table of this name is constant data and has this one entry.
        let function = unsafe { (*table).progress }?;
        Some(Progress { function, arg: self.raw.cast() })
    }

    /// What the domain's card has counted; `None` for providers without the table.
    pub fn statistics(&self) -> Option<Statistics> {
        let table: *const StatisticsOps = self.open_ops(statistics::OPS)?.cast();
        // SAFETY: a provider's table of this name is constant data and has this one entry.
        let read = unsafe { (*table).read }?;
        let mut found = Statistics::default();
        // SAFETY: the domain is open until drop, and `found` has room for as many bytes as the call may write.
        let code = unsafe { read(self.raw.cast(), &raw mut found, size_of::<Statistics>()) };
        (code == 0).then_some(found)
    }

    pub(crate) fn ops(&self) -> *mut bindings::fi_ops_domain {
        // SAFETY: `raw` is open until drop.
        unsafe { (*self.raw).ops }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: `raw` is open. Everything opened on the domain holds an Arc of it, so nothing is left.
        unsafe { table::close(self.fabric.library(), self.raw.cast(), "a domain") }
    }
}
