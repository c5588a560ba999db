//! Fabric and domain: the roots of the object tree.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use crate::bindings::{self, fi_threading, fid_domain, fid_fabric};
use crate::progress::{self, Progress, ProgressOps};
use crate::{Error, GdaOps, Info, Libfabric};
use crate::{entry, table};

/// An open fabric.
pub struct Fabric {
    raw: *mut fid_fabric,
    lib: Arc<Libfabric>,
}

// SAFETY: a fabric is only used to open domains and operation tables, which libfabric allows from any thread at a time;
// it is closed by the last owner alone.
unsafe impl Send for Fabric {}
// SAFETY: as above.
unsafe impl Sync for Fabric {}

impl Fabric {
    /// `fi_fabric` for the info's fabric.
    ///
    /// # Errors
    /// What the provider answers.
    pub fn open(info: &Info) -> Result<Arc<Self>, Error> {
        let lib = Arc::clone(info.library());
        // SAFETY: the attribute belongs to a live info of this library.
        let raw = unsafe { lib.open_fabric(info.raw().fabric_attr) }?;
        Ok(Arc::new(Self { raw, lib }))
    }

    /// The library that it belongs to.
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
        // SAFETY: open, and every domain holds an Arc of us, so none is left.
        unsafe { table::close(&self.lib, self.raw.cast(), "a fabric") }
    }
}

/// An open domain: one card (rail) with its queues, memory and addresses.
pub struct Domain {
    raw: *mut fid_domain,
    mr_mode: i32,
    fabric: Arc<Fabric>,
}

// SAFETY: `open` demands FI_THREAD_SAFE, under which the provider serialises access to the domain and to everything opened
// on it; it is closed by the last owner alone.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    /// `fi_domain` for the info's domain.
    ///
    /// # Errors
    /// [`Error::Argument`] when the info's threading level is not `FI_THREAD_SAFE`; what the provider answers.
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
        // SAFETY: open fabric, live info; `raw` is written on success only.
        let code = unsafe { open(fabric.as_ptr(), info.as_ptr(), &mut raw, ptr::null_mut()) };
        lib.check("fi_domain", code)?;
        Ok(Arc::new(Self { raw, mr_mode: info.mr_mode(), fabric: Arc::clone(fabric) }))
    }

    /// The fabric that it was opened on.
    pub fn fabric(&self) -> &Arc<Fabric> {
        &self.fabric
    }

    /// The library that it belongs to.
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

    /// The EFA operations for queues that a device drives itself.
    ///
    /// # Errors
    /// [`Error::TooOld`] or [`Error::Call`] when the provider does not have them.
    pub fn gda(self: &Arc<Self>) -> Result<GdaOps, Error> {
        GdaOps::open(self)
    }

    pub(crate) fn open_ops(&self, name: &CStr) -> Option<*mut std::ffi::c_void> {
        // SAFETY: `raw` is open until drop, and the fid is its first member.
        unsafe { table::open_ops(self.library(), self.raw.cast(), name) }
    }

    /// How a thread lets the domain's card work while the thread waits; `None` for providers that need no such call.
    pub fn progress(&self) -> Option<Progress> {
        let table: *const ProgressOps = self.open_ops(progress::OPS)?.cast();
        // SAFETY: the provider's constant table of this name, which has this one entry.
        let function = unsafe { (*table).progress }?;
        Some(Progress { function, arg: self.raw.cast() })
    }

    pub(crate) fn ops(&self) -> *mut bindings::fi_ops_domain {
        // SAFETY: `raw` is open until drop.
        unsafe { (*self.raw).ops }
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: open, and everything opened on it holds an Arc of us, so nothing is left.
        unsafe { table::close(self.fabric.library(), self.raw.cast(), "a domain") }
    }
}
