//! Completion counters.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use crate::bindings::{
    self, fi_cntr_attr, fi_cntr_events, fi_efa_comp_cntr_init_attr, fi_efa_memory_location,
    fi_efa_memory_location_type, fi_wait_obj, fid_cntr,
};
use crate::entry;
use crate::table::Object;
use crate::{Domain, Error, GdaOps};

/// Where the card keeps a counter: 8 bytes that only the card writes.
#[derive(Clone, Copy, Debug)]
pub enum Location<'a> {
    /// In memory that the CPU can address.
    Va(*mut u64),
    /// In a dma-buf.
    DmaBuf {
        /// The dma-buf.
        fd: BorrowedFd<'a>,
        /// Offset in the dma-buf, in bytes.
        offset: u64,
        /// The CPU's address of the counter, or null, in which case [`Counter::read`] doesn't work.
        ptr: *mut u64,
    },
}

impl Location<'_> {
    fn raw(&self) -> fi_efa_memory_location {
        let mut raw = fi_efa_memory_location::default();
        let (kind, pointer) = match *self {
            Self::Va(pointer) => (fi_efa_memory_location_type::FI_EFA_MEMORY_LOCATION_VA, pointer),
            Self::DmaBuf { fd, offset, ptr } => {
                raw.dmabuf.fd = fd.as_raw_fd();
                raw.dmabuf.offset = offset;
                (fi_efa_memory_location_type::FI_EFA_MEMORY_LOCATION_DMABUF, ptr)
            }
        };
        raw.type_ = kind as u8;
        raw.ptr = pointer.cast();
        raw
    }
}

/// A completion counter. Endpoints bound to it hold an `Arc` of it, so the counter outlives them.
pub struct Counter {
    object: Object<fid_cntr>,
    _domain: Arc<Domain>,
}

fn raw_attr() -> fi_cntr_attr {
    fi_cntr_attr {
        events: fi_cntr_events::FI_CNTR_EVENTS_COMP,
        wait_obj: fi_wait_obj::FI_WAIT_UNSPEC,
        ..Default::default()
    }
}

impl Counter {
    /// Opens a counter in the provider's memory, with `fi_cntr_open`.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(domain: &Arc<Domain>) -> Result<Arc<Self>, Error> {
        let open = entry!(domain.object(), ops: fi_ops_domain, cntr_open, "fi_cntr_open")?;
        let mut attr = raw_attr();
        let object = Object::open(domain.library(), "fi_cntr_open", |raw| {
            // SAFETY: the domain is open and the attributes are live.
            unsafe { open(domain.as_ptr(), &mut attr, raw, ptr::null_mut()) }
        })?;
        Ok(Arc::new(Self { object, _domain: Arc::clone(domain) }))
    }

    /// Opens a counter in the caller's memory and, with `error`, an error counter too, with `cntr_open_ext` of the EFA
    /// operations.
    ///
    /// # Errors
    /// [`Error::TooOld`] if the provider's table lacks the entry; [`Error::Call`] with the provider's error.
    ///
    /// # Safety
    /// The memory is 8-byte aligned. Until the counter is dropped, it stays valid and only the card writes it.
    pub unsafe fn open_ext(gda: &GdaOps, value: Location<'_>, error: Option<Location<'_>>) -> Result<Arc<Self>, Error> {
        let domain = gda.domain();
        let open = gda.cntr_open_ext()?;
        let mut attr = raw_attr();
        let mut init = fi_efa_comp_cntr_init_attr {
            flags: bindings::FI_EFA_COMP_CNTR_INIT_WITH_COMP_EXTERNAL_MEM,
            comp_cntr_ext_mem: value.raw(),
            ..Default::default()
        };
        if let Some(error) = error {
            init.flags |= bindings::FI_EFA_COMP_CNTR_INIT_WITH_ERR_EXTERNAL_MEM;
            init.err_cntr_ext_mem = error.raw();
        }
        let object = Object::open(domain.library(), "cntr_open_ext", |raw| {
            // SAFETY: the domain is open and the attributes are live. The caller keeps the memory valid until the
            // counter is dropped.
            unsafe { open(domain.as_ptr(), &mut attr, raw, ptr::null_mut(), &mut init) }
        })?;
        Ok(Arc::new(Self { object, _domain: Arc::clone(domain) }))
    }

    /// Reads the number of completions through the provider.
    ///
    /// # Errors
    /// [`Error::Call`] if the provider doesn't implement the call.
    pub fn read(&self) -> Result<u64, Error> {
        let read = entry!(&self.object, ops: fi_ops_cntr, read, "fi_cntr_read")?;
        // SAFETY: the counter is open.
        Ok(unsafe { read(self.as_ptr()) })
    }

    /// Reads the number of failed operations through the provider.
    ///
    /// # Errors
    /// [`Error::Call`] if the provider doesn't implement the call.
    pub fn read_error(&self) -> Result<u64, Error> {
        let read = entry!(&self.object, ops: fi_ops_cntr, readerr, "fi_cntr_readerr")?;
        // SAFETY: the counter is open.
        Ok(unsafe { read(self.as_ptr()) })
    }

    /// Returns the libfabric object, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_cntr {
        self.object.as_ptr()
    }
}
