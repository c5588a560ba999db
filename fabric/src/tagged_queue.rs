//! Completion queues for tagged messages, which can be waited for.

use std::ffi::c_void;
use std::mem::{offset_of, size_of};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;

use crate::bindings::{self, fi_cq_attr, fi_cq_format, fi_cq_tagged_entry, fi_wait_obj, fid};
use crate::completion::CompletionError;
use crate::table::entry;
use crate::{CompletionQueue, Domain, Error, Read};

/// A finished operation (`FI_CQ_FORMAT_TAGGED`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TaggedCompletion {
    /// What the operation was posted with.
    pub context: *mut c_void,
    /// What kind of operation it was.
    pub flags: u64,
    /// Bytes received; undefined for other operations.
    pub len: usize,
    /// Where a multi-receive buffer took it.
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
    /// An empty entry, to make room with.
    pub(crate) const EMPTY: Self =
        Self { context: ptr::null_mut(), flags: 0, len: 0, buffer: ptr::null_mut(), data: 0, tag: 0 };
}

/// A completion queue whose entries have tags.
pub(crate) struct TaggedQueue {
    queue: Arc<CompletionQueue>,
    wait_fd: Option<RawFd>,
}

impl TaggedQueue {
    /// `fi_cq_open`, with a descriptor to wait for where the provider has one.
    ///
    /// # Errors
    /// What the provider answers.
    pub fn open(domain: &Arc<Domain>, size: usize) -> Result<Self, Error> {
        let open = |wait_obj| {
            let attr = fi_cq_attr { size, format: fi_cq_format::FI_CQ_FORMAT_TAGGED, wait_obj, ..Default::default() };
            CompletionQueue::open_raw(domain, attr)
        };
        match open(fi_wait_obj::FI_WAIT_FD) {
            Ok(queue) => {
                let wait_fd = wait_fd(&queue);
                Ok(Self { queue, wait_fd })
            }
            Err(_) => Ok(Self { queue: open(fi_wait_obj::FI_WAIT_NONE)?, wait_fd: None }),
        }
    }

    /// The queue, to bind it to an endpoint.
    pub fn queue(&self) -> &Arc<CompletionQueue> {
        &self.queue
    }

    /// The descriptor that becomes readable when there is something to read, if there is one.
    pub fn wait_fd(&self) -> Option<RawFd> {
        self.wait_fd
    }

    /// `fi_trywait`: true when the descriptor may be waited for now.
    pub fn may_wait(&self) -> bool {
        // Providers do not expect the question about a queue that cannot be waited for.
        if self.wait_fd.is_none() {
            return false;
        }
        let fabric = self.queue.domain().fabric();
        // SAFETY: open as long as its Arc.
        let ops = unsafe { (*fabric.as_ptr()).ops };
        let Ok(trywait) = entry!(fabric.library(), ops, fi_ops_fabric, trywait, "fi_trywait") else { return false };
        let mut fids: [*mut fid; 1] = [self.queue.as_ptr().cast()];
        // SAFETY: open fabric, one open object.
        unsafe { trywait(fabric.as_ptr(), fids.as_mut_ptr(), 1) == 0 }
    }

    /// Takes entries out, as many as fit, without waiting; with the senders of received messages, where the provider can
    /// tell (`FI_SOURCE`). Drives the provider's progress.
    ///
    /// # Errors
    /// What the provider answers, other than "nothing there" and "a failed operation is next".
    pub fn read(
        &self,
        entries: &mut [TaggedCompletion],
        senders: Option<&mut [bindings::fi_addr_t]>,
    ) -> Result<Read, Error> {
        let lib = self.queue.domain().library();
        // SAFETY: open until drop.
        let ops = unsafe { (*self.queue.as_ptr()).ops };
        let count = match senders {
            Some(senders) => {
                let read = entry!(lib, ops, fi_ops_cq, readfrom, "fi_cq_readfrom")?;
                let room = entries.len().min(senders.len());
                // SAFETY: open queue, created for entries of this layout; room for that many in both.
                unsafe { read(self.queue.as_ptr(), entries.as_mut_ptr().cast(), room, senders.as_mut_ptr()) }
            }
            None => {
                let read = entry!(lib, ops, fi_ops_cq, read, "fi_cq_read")?;
                // SAFETY: open queue, created for entries of this layout; room for that many.
                unsafe { read(self.queue.as_ptr(), entries.as_mut_ptr().cast(), entries.len()) }
            }
        };
        crate::completion::read_result(lib, count)
    }

    /// Takes a failed operation out; None when there is none.
    ///
    /// # Errors
    /// What the provider answers.
    pub fn read_error(&self) -> Result<Option<CompletionError>, Error> {
        self.queue.read_error()
    }
}

/// The descriptor of a queue that was opened with `FI_WAIT_FD`.
fn wait_fd(queue: &CompletionQueue) -> Option<RawFd> {
    // SAFETY: open as long as the reference.
    let ops = unsafe { (*queue.as_ptr()).fid.ops };
    let control = entry!(queue.domain().library(), ops, fi_ops, control, "fi_control").ok()?;
    let mut fd: RawFd = -1;
    // SAFETY: open queue; FI_GETWAIT of a queue with FI_WAIT_FD writes an int.
    let code = unsafe { control(queue.as_ptr().cast(), bindings::FI_GETWAIT as i32, (&raw mut fd).cast()) };
    (code == 0 && fd >= 0).then_some(fd)
}
