//! Event queues.

use std::ptr;
use std::sync::Arc;

use crate::bindings::{fi_eq_attr, fi_eq_err_entry, fi_wait_obj, fid_eq};
use crate::{Error, Fabric};
use crate::{entry, table};

/// A queue of an endpoint's own failures, which belong to no operation. The provider `efa` ends the process by `abort` at such a failure
/// (its card is gone, for example) if the endpoint has no event queue.
pub struct EventQueue {
    raw: *mut fid_eq,
    fabric: Arc<Fabric>,
}

// SAFETY: an event queue of FI_THREAD_SAFE domains is used under the provider's own lock; the last owner alone closes it.
unsafe impl Send for EventQueue {}
// SAFETY: the provider serialises access from several threads (FI_THREAD_SAFE).
unsafe impl Sync for EventQueue {}

impl EventQueue {
    /// `fi_eq_open`, without a wait object.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(fabric: &Arc<Fabric>) -> Result<Arc<Self>, Error> {
        let lib = fabric.library();
        // SAFETY: the fabric is open.
        let ops = unsafe { (*fabric.as_ptr()).ops };
        let open = entry!(lib, ops, fi_ops_fabric, eq_open, "fi_eq_open")?;
        let mut attr = fi_eq_attr { wait_obj: fi_wait_obj::FI_WAIT_NONE, ..Default::default() };
        let mut raw = ptr::null_mut();
        // SAFETY: the fabric is open and the attributes are live; the provider writes `raw` on success only.
        let code = unsafe { open(fabric.as_ptr(), &mut attr, &mut raw, ptr::null_mut()) };
        lib.check("fi_eq_open", code)?;
        Ok(Arc::new(Self { raw, fabric: Arc::clone(fabric) }))
    }

    /// Takes out a failure of the endpoint, if there is one.
    ///
    /// # Errors
    /// [`Error::Call`] with the failure.
    pub fn check(&self) -> Result<(), Error> {
        let lib = self.fabric.library();
        // SAFETY: the queue is open until drop.
        let ops = unsafe { (*self.raw).ops };
        let read = entry!(lib, ops, fi_ops_eq, readerr, "fi_eq_readerr")?;
        let mut failure = fi_eq_err_entry::default();
        // SAFETY: the queue is open; the entry is a local variable and has no buffer for provider data.
        let size = unsafe { read(self.raw, &mut failure, 0) };
        if size <= 0 {
            return Ok(());
        }
        let text = format!("{} (provider code {})", lib.error_text(failure.err), failure.prov_errno);
        Err(Error::Call { call: "an operation of the endpoint itself", code: failure.err, text })
    }

    /// The libfabric object, alive as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_eq {
        self.raw
    }
}

impl Drop for EventQueue {
    fn drop(&mut self) {
        // SAFETY: `raw` is open. An endpoint that it is bound to holds an Arc of this queue, so none is left.
        unsafe { table::close(self.fabric.library(), self.raw.cast(), "an event queue") }
    }
}
