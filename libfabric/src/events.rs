//! Event queues.

use std::ptr;
use std::sync::Arc;

use crate::bindings::{fi_eq_attr, fi_eq_err_entry, fi_wait_obj, fid_eq};
use crate::entry;
use crate::table::Object;
use crate::{Error, Fabric};

/// A queue of an endpoint's own failures, which belong to no operation. On such a failure (for example, its card is
/// gone), the `efa` provider aborts the process if the endpoint has no event queue.
pub struct EventQueue {
    object: Object<fid_eq>,
    _fabric: Arc<Fabric>,
}

impl EventQueue {
    /// Opens a queue without a wait object, with `fi_eq_open`.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(fabric: &Arc<Fabric>) -> Result<Arc<Self>, Error> {
        let open = entry!(fabric.object(), ops: fi_ops_fabric, eq_open, "fi_eq_open")?;
        let mut attr = fi_eq_attr { wait_obj: fi_wait_obj::FI_WAIT_NONE, ..Default::default() };
        let object = Object::open(fabric.library(), "fi_eq_open", |raw| {
            // SAFETY: the fabric is open and the attributes are live.
            unsafe { open(fabric.as_ptr(), &mut attr, raw, ptr::null_mut()) }
        })?;
        Ok(Arc::new(Self { object, _fabric: Arc::clone(fabric) }))
    }

    /// Takes the endpoint's next failure from the queue, if there is one.
    ///
    /// # Errors
    /// [`Error::Call`] with the failure.
    pub fn check(&self) -> Result<(), Error> {
        let read = entry!(&self.object, ops: fi_ops_eq, readerr, "fi_eq_readerr")?;
        let mut failure = fi_eq_err_entry::default();
        // SAFETY: the queue is open; the entry is a local variable and has no buffer for provider data.
        let size = unsafe { read(self.as_ptr(), &mut failure, 0) };
        if size <= 0 {
            return Ok(());
        }
        let text = format!("{} (provider code {})", self.object.library().error_text(failure.err), failure.prov_errno);
        Err(Error::Call { call: "an operation of the endpoint itself", code: failure.err, text })
    }

    /// Returns the libfabric object, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_eq {
        self.object.as_ptr()
    }
}
