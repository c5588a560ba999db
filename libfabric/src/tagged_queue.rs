//! Completion queues for tagged messages, with a descriptor to wait on.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};
use std::ptr;
use std::sync::Arc;

use crate::bindings::{self, fi_cq_format, fi_cq_tagged_entry, fid_ep};
use crate::completion::CompletionError;
use crate::entry;
use crate::{CompletionQueue, Domain, Error, Read};

/// `fi_tsend`.
pub type TaggedSend = unsafe extern "C" fn(
    *mut fid_ep,
    *const c_void,
    usize,
    *mut c_void,
    bindings::fi_addr_t,
    u64,
    *mut c_void,
) -> isize;
/// `fi_trecv`.
pub type TaggedRecv = unsafe extern "C" fn(
    *mut fid_ep,
    *mut c_void,
    usize,
    *mut c_void,
    bindings::fi_addr_t,
    u64,
    u64,
    *mut c_void,
) -> isize;

/// A finished operation (`FI_CQ_FORMAT_TAGGED`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TaggedCompletion {
    /// The context that the operation was posted with.
    pub context: *mut c_void,
    /// The kind of operation.
    pub flags: u64,
    /// Bytes received; undefined for other operations.
    pub len: usize,
    /// Where the message is in a multi-receive buffer.
    pub buffer: *mut c_void,
    /// The peer's immediate data.
    pub data: u64,
    /// The message's tag; undefined for sends.
    pub tag: u64,
}

const _: () = {
    assert!(size_of::<TaggedCompletion>() == size_of::<fi_cq_tagged_entry>());
    assert!(offset_of!(TaggedCompletion, context) == offset_of!(fi_cq_tagged_entry, op_context));
    assert!(offset_of!(TaggedCompletion, flags) == offset_of!(fi_cq_tagged_entry, flags));
    assert!(offset_of!(TaggedCompletion, len) == offset_of!(fi_cq_tagged_entry, len));
    assert!(offset_of!(TaggedCompletion, buffer) == offset_of!(fi_cq_tagged_entry, buf));
    assert!(offset_of!(TaggedCompletion, data) == offset_of!(fi_cq_tagged_entry, data));
    assert!(offset_of!(TaggedCompletion, tag) == offset_of!(fi_cq_tagged_entry, tag));
};

impl TaggedCompletion {
    /// An empty entry, to initialise arrays that [`TaggedQueue::read`] fills.
    pub const EMPTY: Self =
        Self { context: ptr::null_mut(), flags: 0, len: 0, buffer: ptr::null_mut(), data: 0, tag: 0 };
}

/// A completion queue whose entries have tags.
pub struct TaggedQueue {
    queue: Arc<CompletionQueue>,
}

impl TaggedQueue {
    /// Opens a queue with `fi_cq_open`, with a descriptor to wait on if `provider` has one.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(domain: &Arc<Domain>, provider: &str, size: usize) -> Result<Self, Error> {
        let format = fi_cq_format::FI_CQ_FORMAT_TAGGED;
        Ok(Self { queue: CompletionQueue::open_to_wait(domain, provider, size, format)? })
    }

    /// Returns the queue, to bind it to an endpoint.
    pub fn queue(&self) -> &Arc<CompletionQueue> {
        &self.queue
    }

    /// Reads as many entries as fit, without waiting, and the senders of received messages if the provider reports them
    /// (`FI_SOURCE`). Drives the provider's progress.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error, except for "nothing there" and "a failed operation is next".
    pub fn read(
        &self,
        entries: &mut [TaggedCompletion],
        senders: Option<&mut [bindings::fi_addr_t]>,
    ) -> Result<Read, Error> {
        let lib = self.queue.domain().library();
        let count = match senders {
            Some(senders) => {
                let read = entry!(self.queue.object(), ops: fi_ops_cq, readfrom, "fi_cq_readfrom")?;
                let room = entries.len().min(senders.len());
                // SAFETY: the queue is open and was created for entries of this layout; both arrays have room for that
                // many.
                unsafe { read(self.queue.as_ptr(), entries.as_mut_ptr().cast(), room, senders.as_mut_ptr()) }
            }
            None => {
                let read = entry!(self.queue.object(), ops: fi_ops_cq, read, "fi_cq_read")?;
                // SAFETY: the queue is open and was created for entries of this layout; the array has room for that
                // many.
                unsafe { read(self.queue.as_ptr(), entries.as_mut_ptr().cast(), entries.len()) }
            }
        };
        crate::completion::read_result(lib, count)
    }

    /// Reads a failed operation; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn read_error(&self) -> Result<Option<CompletionError>, Error> {
        self.queue.read_error()
    }
}
