//! Waiting on a completion queue: the descriptor that a thread sleeps on, and the check that it may.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::bindings::{self, fi_cq_attr, fi_wait_attr, fi_wait_obj, fid_cq, fid_wait};
use crate::entry;
use crate::table::{Fid, Object};
use crate::{Domain, Error, Fabric, Version};

/// How a thread waits on a queue.
pub(crate) enum Wait {
    /// It doesn't; it polls.
    Never,
    /// On the queue's own descriptor, after `fi_trywait`.
    Queue(RawFd),
    /// On a wait set that holds only this queue.
    Set(WaitSet),
}

/// Which [`Wait`] a provider supports.
#[derive(Debug, PartialEq, Eq)]
enum WaitKind {
    Never,
    Queue,
    Set,
}

impl WaitKind {
    fn of(provider: &str, version: Version) -> Self {
        match provider {
            // fi_trywait on a queue doesn't consume a completion's signal, so the descriptor stays readable. fi_wait on
            // a wait set consumes it.
            "net" | "tcp" if version < Version::new(2, 0) => Self::Set,
            // fi_trywait doesn't consume the card's event (only fi_cq_sread does, which may block), so the descriptor
            // stays readable from the first completion on. With its shared memory enabled, the provider refuses
            // FI_WAIT_FD.
            "efa" => Self::Never,
            _ => Self::Queue,
        }
    }
}

impl Wait {
    /// Opens a queue of `provider` through `open`, with a wait object if the provider supports one.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(
        domain: &Domain,
        provider: &str,
        attr: fi_cq_attr,
        open: impl Fn(fi_cq_attr) -> Result<Object<fid_cq>, Error>,
    ) -> Result<(Object<fid_cq>, Self), Error> {
        match WaitKind::of(provider, domain.library().version()) {
            WaitKind::Set => {
                let in_set = WaitSet::open(domain.fabric()).and_then(|set| {
                    let wait_obj = fi_wait_obj::FI_WAIT_SET;
                    let queue = open(fi_cq_attr { wait_obj, wait_set: set.object.as_ptr(), ..attr })?;
                    Ok((queue, Self::Set(set)))
                });
                if let Ok(opened) = in_set {
                    return Ok(opened);
                }
            }
            WaitKind::Queue => {
                if let Ok(queue) = open(fi_cq_attr { wait_obj: fi_wait_obj::FI_WAIT_FD, ..attr }) {
                    let fd = descriptor(&queue);
                    return Ok((queue, fd.map_or(Self::Never, Self::Queue)));
                }
            }
            WaitKind::Never => {}
        }
        Ok((open(fi_cq_attr { wait_obj: fi_wait_obj::FI_WAIT_NONE, ..attr })?, Self::Never))
    }

    /// Returns the descriptor to sleep on, if there is one.
    pub fn fd(&self) -> Option<RawFd> {
        match self {
            Self::Never => None,
            Self::Queue(fd) => Some(*fd),
            Self::Set(set) => Some(set.fd),
        }
    }

    /// Returns true if a thread may sleep until the descriptor becomes readable. `queue` is the queue that this belongs
    /// to.
    pub fn may_wait(&self, fabric: &Fabric, queue: &Object<fid_cq>) -> bool {
        match self {
            // Providers don't expect fi_trywait on a queue without a wait object.
            Self::Never => false,
            Self::Queue(_) => may_wait_for(fabric, queue),
            Self::Set(set) => set.is_quiet(),
        }
    }
}

/// Calls `fi_trywait` on one of the fabric's queues.
fn may_wait_for(fabric: &Fabric, queue: &Object<fid_cq>) -> bool {
    let Ok(trywait) = entry!(fabric.object(), ops: fi_ops_fabric, trywait, "fi_trywait") else { return false };
    let mut fids = [queue.fid()];
    // SAFETY: both objects are open, and the array has the one entry that the call asks for.
    unsafe { trywait(fabric.as_ptr(), fids.as_mut_ptr(), 1) == 0 }
}

/// Returns the descriptor of a queue or wait set that was opened with `FI_WAIT_FD`.
fn descriptor<T: Fid>(object: &Object<T>) -> Option<RawFd> {
    let control = entry!(object, fi_ops, control, "fi_control").ok()?;
    let mut fd: RawFd = -1;
    // SAFETY: the object is open; FI_GETWAIT on an object with FI_WAIT_FD writes an int.
    let code = unsafe { control(object.fid(), bindings::FI_GETWAIT as i32, (&raw mut fd).cast::<c_void>()) };
    (code == 0 && fd >= 0).then_some(fd)
}

/// A wait set with a descriptor.
pub(crate) struct WaitSet {
    object: Object<fid_wait>,
    fd: RawFd,
    _fabric: Arc<Fabric>,
}

impl WaitSet {
    fn open(fabric: &Arc<Fabric>) -> Result<Self, Error> {
        let open = entry!(fabric.object(), ops: fi_ops_fabric, wait_open, "fi_wait_open")?;
        let mut attr = fi_wait_attr { wait_obj: fi_wait_obj::FI_WAIT_FD, ..Default::default() };
        let object = Object::open(fabric.library(), "fi_wait_open", |raw| {
            // SAFETY: the fabric is open and the attributes are live.
            unsafe { open(fabric.as_ptr(), &mut attr, raw) }
        })?;
        let fd = descriptor(&object);
        let fd = fd.ok_or_else(|| fabric.library().failure("fi_control", -bindings::FI_ENOSYS))?;
        Ok(Self { object, fd, _fabric: Arc::clone(fabric) })
    }

    /// Calls `fi_wait` with timeout 0, which consumes the signal and polls the queue. Returns true if the queue is
    /// empty.
    fn is_quiet(&self) -> bool {
        let Ok(wait) = entry!(&self.object, ops: fi_ops_wait, wait, "fi_wait") else { return false };
        // SAFETY: the set is open.
        let code = unsafe { wait(self.object.as_ptr(), 0) };
        code == -bindings::FI_ETIMEDOUT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn providers_whose_descriptor_stays_readable_do_not_use_it() {
        let of = |provider, major, minor| WaitKind::of(provider, Version::new(major, minor));
        assert_eq!((of("tcp", 1, 17), of("net", 1, 17)), (WaitKind::Set, WaitKind::Set));
        assert_eq!(
            (of("tcp", 2, 0), of("softefa", 1, 17), of("shm", 2, 6)),
            (WaitKind::Queue, WaitKind::Queue, WaitKind::Queue)
        );
        assert_eq!((of("efa", 1, 17), of("efa", 2, 6)), (WaitKind::Never, WaitKind::Never));
    }
}
