//! Completion channels: descriptors that tell which completion queue has an event.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use soft_nic::card::signal::Signal;

use crate::bindings as ib;
use crate::context::Context;
use crate::cq::Cq;
use crate::guard::{Errno, object, status};
use crate::objects::{self, Object, Open};
use crate::uses::Uses;

/// A pipe, into which the card writes the address of a completion queue for each event, as the kernel does: libfabric reads it itself.
#[repr(C)]
pub(crate) struct Channel {
    raw: ib::ibv_comp_channel,
    writer: OwnedFd,
    /// The open completion queues of the channel, by address as a number.
    queues: Mutex<HashMap<u64, *mut Cq>>,
    uses: Uses,
}

// SAFETY: no other type has this kind.
unsafe impl Object for Channel {
    const KIND: &'static str = "completion channel";
    type Raw = ib::ibv_comp_channel;
}

impl Channel {
    /// The signal of a queue of the channel.
    pub(crate) fn signal(&self, number: u64) -> Result<Arc<Signal>, Errno> {
        Ok(Arc::new(Signal::numbered(self.writer.try_clone()?, number)))
    }

    pub(crate) fn attach(&self, number: u64, cq: *mut Cq) {
        self.uses.begin();
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).insert(number, cq);
    }

    /// Removes a queue, whose events that are left in the pipe are then ignored, unless a later queue of the channel has its address.
    pub(crate) fn detach(&self, number: u64) {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
        self.uses.end();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(raw: Open<Context>) -> *mut ib::ibv_comp_channel {
    object("ibv_create_comp_channel", || {
        let open = raw.get()?;
        // Only the program's end blocks, unless the program makes it non-blocking.
        let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        open.uses.begin();
        let channel = Channel {
            raw: ib::ibv_comp_channel { context: raw.pointer(), fd: reader.into_raw_fd(), refcnt: 0 },
            writer,
            queues: Mutex::default(),
            uses: Uses::default(),
        };
        Ok(objects::give(Box::new(channel)))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(raw: *mut ib::ibv_comp_channel) -> c_int {
    objects::destroy("ibv_destroy_comp_channel", raw, |channel: &Channel| {
        channel.uses.none()?;
        // SAFETY: the context of a channel is open.
        unsafe { Open::<Context>::at(channel.raw.context) }.get()?.uses.end();
        // SAFETY: the call has no precondition, and the descriptor belongs to this channel alone.
        unsafe { libc::close(channel.raw.fd) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    raw: Open<Channel>,
    cq: *mut *mut ib::ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let done = status("ibv_get_cq_event", || {
        if cq.is_null() || cq_context.is_null() {
            return Err(Errno::INVAL);
        }
        loop {
            let channel = raw.get()?;
            let mut number = [0; size_of::<u64>()];
            // SAFETY: the channel's descriptor is open, and the array has as many bytes. Writes of numbers are atomic.
            let read = unsafe { libc::read(channel.raw.fd.as_raw_fd(), number.as_mut_ptr().cast(), number.len()) };
            if read < 0 {
                return Err(Errno(nix::errno::Errno::last_raw()));
            }
            let queues = channel.queues.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(found) = queues.get(&u64::from_ne_bytes(number)) else { continue };
            // SAFETY: queues of the channel's table are open.
            let context = unsafe { (**found).note_event() };
            // SAFETY: not null, and the program's variable is writable during the call.
            unsafe { cq.write(found.cast()) };
            // SAFETY: not null, and the program's variable is writable during the call.
            unsafe { cq_context.write(context) };
            return Ok(());
        }
    });
    if done == 0 { 0 } else { -1 }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(cq: Open<Cq>, count: c_uint) {
    if let Ok(cq) = cq.get() {
        cq.acknowledge(count);
    }
}
