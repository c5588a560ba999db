//! Completion channels: descriptors that say which completion queue has an event.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use soft_nic::card::signal::Signal;
use soft_nic::process::Uses;

use crate::bindings as ib;
use crate::context::Context;
use crate::guard::{Errno, object, status};
use crate::objects::{self, Held, Open, verbs_object};

/// A pipe into which the card writes a completion queue's address for each event, as the kernel does: libfabric reads
/// it directly.
#[repr(C)]
pub(crate) struct Channel {
    raw: ib::ibv_comp_channel,
    _context: Held<Context>,
    reader: OwnedFd,
    writer: OwnedFd,
    /// The channel's open completion queues, by their addresses as numbers.
    queues: Mutex<HashMap<u64, Member>>,
    uses: Uses,
}

verbs_object!(Channel { raw: ib::ibv_comp_channel }, "completion channel");

/// What a program gets with a completion queue's event.
struct Member {
    cq: *mut ib::ibv_cq,
    context: *mut c_void,
    unacknowledged: Arc<Unacknowledged>,
}

/// How many of a completion queue's events the program has received but not acknowledged.
#[derive(Debug, Default)]
pub(crate) struct Unacknowledged(AtomicU32);

impl Unacknowledged {
    pub(crate) fn acknowledge(&self, count: u32) {
        self.0.fetch_sub(count, Ordering::AcqRel);
    }

    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) as i32 > 0
    }
}

impl Channel {
    /// Returns the signal of one of the channel's queues.
    pub(crate) fn signal(&self, number: u64) -> Result<Arc<Signal>, Errno> {
        Ok(Arc::new(Signal::numbered(self.writer.try_clone()?, number)))
    }

    pub(crate) fn attach(&self, cq: *mut ib::ibv_cq, context: *mut c_void, unacknowledged: Arc<Unacknowledged>) {
        let member = Member { cq, context, unacknowledged };
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).insert(cq as u64, member);
    }

    /// Removes a queue. Its events still in the pipe are then ignored, unless a later queue of the channel gets the
    /// same address.
    pub(crate) fn detach(&self, number: u64) {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(raw: Open<Context>) -> *mut ib::ibv_comp_channel {
    object("ibv_create_comp_channel", || {
        let open = raw.get()?;
        // Only the program's end blocks, and the program can make that non-blocking too.
        let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let channel = Channel {
            raw: ib::ibv_comp_channel { context: raw.pointer(), fd: reader.as_raw_fd(), refcnt: 0 },
            _context: Held::new(open),
            reader,
            writer,
            queues: Mutex::default(),
            uses: Uses::default(),
        };
        Ok(objects::give(Box::new(channel)))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(raw: *mut ib::ibv_comp_channel) -> c_int {
    objects::destroy("ibv_destroy_comp_channel", raw, |_: &Channel| Ok(()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    raw: Open<Channel>,
    cq: Option<&mut *mut ib::ibv_cq>,
    cq_context: Option<&mut *mut c_void>,
) -> c_int {
    let done = status("ibv_get_cq_event", || {
        let (Some(cq), Some(cq_context)) = (cq, cq_context) else { return Err(Errno::INVAL) };
        loop {
            let channel = raw.get()?;
            // A whole number arrives at once: pipe writes this small are atomic.
            let mut number = [0; size_of::<u64>()];
            nix::unistd::read(&channel.reader, &mut number)?;
            let queues = channel.queues.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(found) = queues.get(&u64::from_ne_bytes(number)) else { continue };
            found.unacknowledged.0.fetch_add(1, Ordering::AcqRel);
            (*cq, *cq_context) = (found.cq, found.context);
            return Ok(());
        }
    });
    if done == 0 { 0 } else { -1 }
}
