//! Fabric and domain: the roots of the object tree.

use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;

use crate::bindings::{fi_threading, fid_domain, fid_fabric};
use crate::entry;
use crate::progress::{self, Progress, ProgressOps};
use crate::statistics::{self, Statistics, StatisticsOps};
use crate::table::Object;
use crate::{Error, Info, Libfabric};

/// An open fabric.
pub struct Fabric {
    object: Object<fid_fabric>,
}

impl Fabric {
    /// Opens the info's fabric with `fi_fabric`.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(info: &Info) -> Result<Arc<Self>, Error> {
        let object = Object::open(info.library(), "fi_fabric", |raw| {
            // SAFETY: the attribute belongs to a live info of this library.
            unsafe { info.library().open_fabric(info.raw().fabric_attr, raw) }
        })?;
        Ok(Arc::new(Self { object }))
    }

    /// Returns the fabric's library.
    pub fn library(&self) -> &Arc<Libfabric> {
        self.object.library()
    }

    pub(crate) fn object(&self) -> &Object<fid_fabric> {
        &self.object
    }

    /// Returns the libfabric object, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_fabric {
        self.object.as_ptr()
    }

    pub(crate) fn open_ops(&self, name: &CStr) -> Option<*mut std::ffi::c_void> {
        self.object.open_ops(name)
    }
}

/// An open domain: one card (rail) with its queues, memory and addresses.
pub struct Domain {
    object: Object<fid_domain>,
    mr_mode: i32,
    fabric: Arc<Fabric>,
}

impl Domain {
    /// Opens the info's domain with `fi_domain`.
    ///
    /// # Errors
    /// [`Error::Argument`] if the info's threading level isn't `FI_THREAD_SAFE`; [`Error::Call`] with the provider's
    /// error.
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
        let open = entry!(fabric.object(), ops: fi_ops_fabric, domain, "fi_domain")?;
        let object = Object::open(fabric.library(), "fi_domain", |raw| {
            // SAFETY: the fabric is open and the info is live.
            unsafe { open(fabric.as_ptr(), info.as_ptr(), raw, ptr::null_mut()) }
        })?;
        Ok(Arc::new(Self { object, mr_mode: info.mr_mode(), fabric: Arc::clone(fabric) }))
    }

    /// Returns the fabric that the domain was opened on.
    pub fn fabric(&self) -> &Arc<Fabric> {
        &self.fabric
    }

    /// Returns the domain's library.
    pub fn library(&self) -> &Arc<Libfabric> {
        self.fabric.library()
    }

    /// Returns the libfabric object, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_domain {
        self.object.as_ptr()
    }

    /// Returns the memory registration modes that the provider requires: `FI_MR_*`.
    pub fn mr_mode(&self) -> i32 {
        self.mr_mode
    }

    pub(crate) fn open_ops(&self, name: &CStr) -> Option<*mut std::ffi::c_void> {
        self.object.open_ops(name)
    }

    /// Returns the function that a waiting thread calls to make the domain's card progress; `None` if the provider
    /// doesn't need one.
    pub fn progress(&self) -> Option<Progress> {
        let table: *const ProgressOps = self.open_ops(progress::OPS)?.cast();
        // SAFETY: a provider's table of this name is constant data and has this one entry.
        let function = unsafe { (*table).progress }?;
        Some(Progress { function, arg: self.as_ptr().cast() })
    }

    /// Returns what the domain's card has counted; `None` for providers without the table.
    pub fn statistics(&self) -> Option<Statistics> {
        let table: *const StatisticsOps = self.open_ops(statistics::OPS)?.cast();
        // SAFETY: a provider's table of this name is constant data and has this one entry.
        let read = unsafe { (*table).read }?;
        let mut found = Statistics::default();
        // SAFETY: the domain is open until drop, and `found` has room for as many bytes as the call may write.
        let code = unsafe { read(self.as_ptr().cast(), &raw mut found, size_of::<Statistics>()) };
        (code == 0).then_some(found)
    }

    pub(crate) fn object(&self) -> &Object<fid_domain> {
        &self.object
    }
}
