//! Waiting for a completion queue: the descriptor to sleep on, and the question whether one may.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;

use crate::bindings::{self, fi_cq_attr, fi_wait_attr, fi_wait_obj, fid, fid_cq, fid_wait};
use crate::{CompletionQueue, Domain, Error, Fabric, Libfabric, Version};
use crate::{entry, table};

/// How a queue is waited for.
pub(crate) enum Wait {
    /// Not at all.
    Never,
    /// By its own descriptor, after `fi_trywait`.
    Queue(RawFd),
    /// By a wait set that holds it alone.
    Set(WaitSet),
}

/// Which kind of [`Wait`] a provider supports.
#[derive(Debug, PartialEq, Eq)]
enum Way {
    Never,
    Queue,
    Set,
}

impl Way {
    fn of(provider: &str, version: Version) -> Self {
        match provider {
            // fi_trywait of a queue does not consume the signal of a completion, and the descriptor stays readable. fi_wait of a
            // wait set consumes it.
            "net" | "tcp" if version < Version::new(2, 0) => Self::Set,
            // fi_trywait does not consume the event of the card (only fi_cq_sread does, which may block), and the descriptor stays
            // readable from the first completion on. While its shared memory is on, the provider refuses FI_WAIT_FD.
            "efa" => Self::Never,
            _ => Self::Queue,
        }
    }
}

impl Wait {
    /// Opens a queue of `provider` with `open`, such that it can be waited for if that is possible.
    ///
    /// # Errors
    /// What the provider answers.
    pub fn open(
        domain: &Domain,
        provider: &str,
        attr: fi_cq_attr,
        open: impl Fn(fi_cq_attr) -> Result<*mut fid_cq, Error>,
    ) -> Result<(*mut fid_cq, Self), Error> {
        let lib = domain.library();
        match Way::of(provider, lib.version()) {
            Way::Set => {
                let in_set = WaitSet::open(domain.fabric()).and_then(|set| {
                    let wait_obj = fi_wait_obj::FI_WAIT_SET;
                    let raw = open(fi_cq_attr { wait_obj, wait_set: set.raw, ..attr })?;
                    Ok((raw, Self::Set(set)))
                });
                if let Ok(opened) = in_set {
                    return Ok(opened);
                }
            }
            Way::Queue => {
                if let Ok(raw) = open(fi_cq_attr { wait_obj: fi_wait_obj::FI_WAIT_FD, ..attr }) {
                    // SAFETY: just opened, and owned by the caller from here on.
                    let fd = unsafe { descriptor(lib, raw.cast()) };
                    return Ok((raw, fd.map_or(Self::Never, Self::Queue)));
                }
            }
            Way::Never => {}
        }
        Ok((open(fi_cq_attr { wait_obj: fi_wait_obj::FI_WAIT_NONE, ..attr })?, Self::Never))
    }

    /// What to sleep on.
    pub fn fd(&self) -> Option<RawFd> {
        match self {
            Self::Never => None,
            Self::Queue(fd) => Some(*fd),
            Self::Set(set) => Some(set.fd),
        }
    }

    /// True when one may sleep until the descriptor of `queue`, whose wait this is, becomes readable.
    pub fn may_wait(&self, queue: &CompletionQueue) -> bool {
        match self {
            // Providers do not expect the question about a queue that cannot be waited for.
            Self::Never => false,
            Self::Queue(_) => may_wait_for(queue),
            Self::Set(set) => set.is_quiet(),
        }
    }
}

/// `fi_trywait`.
fn may_wait_for(queue: &CompletionQueue) -> bool {
    let fabric = queue.domain().fabric();
    // SAFETY: open as long as its Arc.
    let ops = unsafe { (*fabric.as_ptr()).ops };
    let Ok(trywait) = entry!(fabric.library(), ops, fi_ops_fabric, trywait, "fi_trywait") else { return false };
    let mut fids: [*mut fid; 1] = [queue.as_ptr().cast()];
    // SAFETY: open fabric, one open object.
    unsafe { trywait(fabric.as_ptr(), fids.as_mut_ptr(), 1) == 0 }
}

/// The descriptor of a queue or a set that was opened with `FI_WAIT_FD`.
///
/// # Safety
/// `object` is open.
unsafe fn descriptor(lib: &Libfabric, object: *mut fid) -> Option<RawFd> {
    // SAFETY: open by the caller's promise.
    let ops = unsafe { (*object).ops };
    let control = entry!(lib, ops, fi_ops, control, "fi_control").ok()?;
    let mut fd: RawFd = -1;
    // SAFETY: open; FI_GETWAIT of an object with FI_WAIT_FD writes an int.
    let code = unsafe { control(object, bindings::FI_GETWAIT as i32, (&raw mut fd).cast::<c_void>()) };
    (code == 0 && fd >= 0).then_some(fd)
}

/// A wait set with a descriptor.
pub(crate) struct WaitSet {
    raw: *mut fid_wait,
    fd: RawFd,
    fabric: Arc<Fabric>,
}

impl WaitSet {
    fn open(fabric: &Arc<Fabric>) -> Result<Self, Error> {
        let lib = fabric.library();
        // SAFETY: open as long as its Arc.
        let ops = unsafe { (*fabric.as_ptr()).ops };
        let open = entry!(lib, ops, fi_ops_fabric, wait_open, "fi_wait_open")?;
        let mut attr = fi_wait_attr { wait_obj: fi_wait_obj::FI_WAIT_FD, ..Default::default() };
        let mut raw = ptr::null_mut();
        // SAFETY: open fabric, live attributes; `raw` is written on success only.
        let code = unsafe { open(fabric.as_ptr(), &mut attr, &mut raw) };
        lib.check("fi_wait_open", code)?;
        let mut set = Self { raw, fd: -1, fabric: Arc::clone(fabric) };
        // SAFETY: just opened.
        let fd = unsafe { descriptor(lib, raw.cast()) };
        set.fd = fd.ok_or_else(|| lib.failure("fi_control", -bindings::FI_ENOSYS))?;
        Ok(set)
    }

    /// `fi_wait` that does not wait: takes the signal back and looks into the queue.
    fn is_quiet(&self) -> bool {
        // SAFETY: open until drop.
        let ops = unsafe { (*self.raw).ops };
        let Ok(wait) = entry!(self.fabric.library(), ops, fi_ops_wait, wait, "fi_wait") else { return false };
        // SAFETY: open set.
        let code = unsafe { wait(self.raw, 0) };
        code == -bindings::FI_ETIMEDOUT
    }
}

impl Drop for WaitSet {
    fn drop(&mut self) {
        // SAFETY: open; the queue in it is closed before (`CompletionQueue`), or was never opened.
        unsafe { table::close(self.fabric.library(), self.raw.cast(), "a wait set") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn providers_whose_descriptor_stays_readable_are_waited_for_in_another_way() {
        let of = |provider, major, minor| Way::of(provider, Version::new(major, minor));
        assert_eq!((of("tcp", 1, 17), of("net", 1, 17)), (Way::Set, Way::Set));
        assert_eq!((of("tcp", 2, 0), of("softefa", 1, 17), of("shm", 2, 6)), (Way::Queue, Way::Queue, Way::Queue));
        assert_eq!((of("efa", 1, 17), of("efa", 2, 6)), (Way::Never, Way::Never));
    }
}
