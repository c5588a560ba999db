//! Completion queues.

use std::ffi::{CStr, c_void};
use std::mem::{offset_of, size_of};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;

use crate::bindings::{self, fi_cq_attr, fi_cq_data_entry, fi_cq_err_entry, fi_cq_format, fi_wait_obj, fid_cq};
use crate::entry;
use crate::table::Object;
use crate::wait::Wait;
use crate::{Domain, Error, Libfabric};

/// Attributes of a completion queue without a wait object, whose entries have the format of [`Completion`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CqAttr {
    /// Number of entries; 0 leaves it to the provider.
    pub size: usize,
}

/// A finished operation (`FI_CQ_FORMAT_DATA`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The context that the operation was posted with; null for a completion caused by a peer.
    pub context: *mut c_void,
    /// The kind of operation: `FI_SEND`, `FI_RECV`, …
    pub flags: u64,
    /// Bytes received; undefined for other operations.
    pub len: usize,
    /// Where the message is in a multi-receive buffer.
    pub buffer: *mut c_void,
    /// The peer's immediate data, if `flags` has `FI_REMOTE_CQ_DATA`.
    pub data: u64,
}

const _: () = {
    assert!(size_of::<Completion>() == size_of::<fi_cq_data_entry>());
    assert!(offset_of!(Completion, context) == offset_of!(fi_cq_data_entry, op_context));
    assert!(offset_of!(Completion, flags) == offset_of!(fi_cq_data_entry, flags));
    assert!(offset_of!(Completion, len) == offset_of!(fi_cq_data_entry, len));
    assert!(offset_of!(Completion, buffer) == offset_of!(fi_cq_data_entry, buf));
    assert!(offset_of!(Completion, data) == offset_of!(fi_cq_data_entry, data));
};

impl Completion {
    /// An empty entry, to initialise arrays that [`CompletionQueue::read`] fills.
    pub const EMPTY: Self = Self { context: ptr::null_mut(), flags: 0, len: 0, buffer: ptr::null_mut(), data: 0 };
}

/// The result of [`CompletionQueue::read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// This many entries; 0 if the queue was empty.
    Entries(usize),
    /// The next entry is a failed operation, which [`CompletionQueue::read_error`] returns.
    Failure,
}

/// An operation that failed.
#[derive(Clone, Debug)]
pub struct CompletionError {
    /// The context that the operation was posted with.
    pub context: *mut c_void,
    /// The kind of operation.
    pub flags: u64,
    /// libfabric's error code, positive.
    pub code: i32,
    /// The provider's own code (on EFA: the status in the completion entry).
    pub provider_code: i32,
    /// The provider's text, or libfabric's.
    pub text: String,
    /// The message's tag, for a tagged receive that had one.
    pub tag: u64,
}

impl CompletionError {
    /// Turns this into an error of `call`, which posted the operation.
    pub fn into_error(self, call: &'static str) -> Error {
        Error::Call { call, code: self.code, text: format!("{} (provider code {})", self.text, self.provider_code) }
    }
}

/// A completion queue.
pub struct CompletionQueue {
    object: Object<fid_cq>,
    // Declared second, so that it's dropped after the queue is closed.
    wait: Wait,
    domain: Arc<Domain>,
}

fn raw_attr(attr: &CqAttr) -> fi_cq_attr {
    fi_cq_attr {
        size: attr.size,
        format: fi_cq_format::FI_CQ_FORMAT_DATA,
        wait_obj: fi_wait_obj::FI_WAIT_NONE,
        ..Default::default()
    }
}

fn open_raw(domain: &Domain, mut attr: fi_cq_attr) -> Result<Object<fid_cq>, Error> {
    let open = entry!(domain.object(), ops: fi_ops_domain, cq_open, "fi_cq_open")?;
    Object::open(domain.library(), "fi_cq_open", |raw| {
        // SAFETY: the domain is open and the attributes are live.
        unsafe { open(domain.as_ptr(), &mut attr, raw, ptr::null_mut()) }
    })
}

impl CompletionQueue {
    /// Opens a queue with `fi_cq_open`.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(domain: &Arc<Domain>, attr: &CqAttr) -> Result<Arc<Self>, Error> {
        let (object, wait) = (open_raw(domain, raw_attr(attr))?, Wait::Never);
        Ok(Arc::new(Self { object, wait, domain: Arc::clone(domain) }))
    }

    /// Opens a queue with `fi_cq_open`, with a descriptor to wait on if `provider` has one; entries have the format
    /// `format`.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open_to_wait(
        domain: &Arc<Domain>,
        provider: &str,
        size: usize,
        format: fi_cq_format::Type,
    ) -> Result<Arc<Self>, Error> {
        let attr = fi_cq_attr { size, format, ..Default::default() };
        let (object, wait) = Wait::open(domain, provider, attr, |attr| open_raw(domain, attr))?;
        Ok(Arc::new(Self { object, wait, domain: Arc::clone(domain) }))
    }

    /// Returns the descriptor that becomes readable when there's something to read, if the queue has one.
    pub fn wait_fd(&self) -> Option<RawFd> {
        self.wait.fd()
    }

    /// Returns true if a thread may sleep on the descriptor now; false if there's something to read.
    pub fn may_wait(&self) -> bool {
        self.wait.may_wait(self.domain.fabric(), &self.object)
    }

    /// Returns the domain that the queue was opened on.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Returns the libfabric object, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_cq {
        self.object.as_ptr()
    }

    pub(crate) fn object(&self) -> &Object<fid_cq> {
        &self.object
    }

    /// Reads as many entries as fit, without waiting. Drives the provider's progress.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error, except for "nothing there" and "a failed operation is next".
    pub fn read(&self, entries: &mut [Completion]) -> Result<Read, Error> {
        let lib = self.domain.library();
        let read = entry!(&self.object, ops: fi_ops_cq, read, "fi_cq_read")?;
        // SAFETY: the queue is open and was created for entries of this layout; the array has room for that many.
        let count = unsafe { read(self.as_ptr(), entries.as_mut_ptr().cast(), entries.len()) };
        read_result(lib, count)
    }

    /// Reads the failed operation that [`CompletionQueue::read`] reported; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn read_error(&self) -> Result<Option<CompletionError>, Error> {
        let lib = self.domain.library();
        let read = entry!(&self.object, ops: fi_ops_cq, readerr, "fi_cq_readerr")?;
        let mut raw = fi_cq_err_entry::default();
        // SAFETY: the queue is open. The entry has the newest size; older libraries write less. It has no buffer for
        // provider data.
        let count = unsafe { read(self.as_ptr(), &mut raw, 0) };
        match (count, i32::try_from(-count)) {
            (1.., _) => Ok(Some(CompletionError {
                context: raw.op_context,
                flags: raw.flags,
                code: raw.err.saturating_abs(),
                provider_code: raw.prov_errno,
                text: self.provider_text(&raw),
                tag: raw.tag,
            })),
            (0, _) | (_, Ok(bindings::FI_EAGAIN)) => Ok(None),
            (_, code) => Err(lib.failure("fi_cq_readerr", code.unwrap_or(bindings::FI_EOTHER))),
        }
    }

    fn provider_text(&self, error: &fi_cq_err_entry) -> String {
        let lib = self.domain.library();
        let general = lib.error_text(error.err);
        let Ok(strerror) = entry!(&self.object, ops: fi_ops_cq, strerror, "fi_cq_strerror") else {
            return general;
        };
        let mut buffer = [0; 256];
        // SAFETY: the queue is open and wrote the error entry; the buffer has the stated length.
        let text =
            unsafe { strerror(self.as_ptr(), error.prov_errno, error.err_data, buffer.as_mut_ptr(), buffer.len()) };
        if text.is_null() {
            return general;
        }
        // SAFETY: the text is a NUL-terminated string: the buffer above, or a static string of the provider.
        let special = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        if special.is_empty() || special == general { general } else { format!("{general}: {special}") }
    }
}

/// Returns the result of a read call that returned `count`.
pub(crate) fn read_result(lib: &Libfabric, count: isize) -> Result<Read, Error> {
    match (count, i32::try_from(-count)) {
        (0.., _) => Ok(Read::Entries(count.cast_unsigned())),
        (_, Ok(bindings::FI_EAGAIN)) => Ok(Read::Entries(0)),
        (_, Ok(bindings::FI_EAVAIL)) => Ok(Read::Failure),
        (_, code) => Err(lib.failure("fi_cq_read", code.unwrap_or(bindings::FI_EOTHER))),
    }
}
