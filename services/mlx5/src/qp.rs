//! A queue pair with both its queues.

use crate::device::{Device, DeviceError, Endpoint, Handle, Pd, QpAttr};
use crate::rq::RecvQueue;
use crate::sq::SendQueue;
use crate::wqe::Limits;
use std::sync::Arc;

/// A queue pair. `T` is the token that the caller attaches to a work request of the send queue, `R` to a receive.
pub struct QueuePair<T, R = T> {
    device: Arc<dyn Device>,
    handle: Handle,
    pd: Pd,
    send: SendQueue<T>,
    recv: Option<RecvQueue<R>>,
}

impl<T, R> std::fmt::Debug for QueuePair<T, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QueuePair({:#08x} of {})", self.qpn(), self.device.caps().name)
    }
}

impl<T, R> QueuePair<T, R> {
    /// Creates a queue pair. Receives can be posted at once, work requests of the send queue after [`Self::connect`].
    pub fn create(device: &Arc<dyn Device>, pd: &Pd, attr: &QpAttr) -> Result<Self, DeviceError> {
        // The attributes are minimums, so zero means one: a queue without entries would look like a device error.
        let attr = QpAttr {
            max_send: attr.max_send.max(1),
            max_recv: attr.max_recv.max(1),
            max_recv_sge: attr.max_recv_sge.max(1),
            limits: Limits { max_sge: attr.limits.max_sge.max(1), ..attr.limits },
            ..attr.clone()
        };
        let raw = device.create_qp(pd, &attr)?;
        let sizes = || DeviceError::Unsupported { what: "the queue sizes that it created" };
        let send = SendQueue::new(raw.send).ok_or_else(sizes)?;
        let recv = raw.recv.map(|parts| RecvQueue::new(parts).ok_or_else(sizes)).transpose()?;
        Ok(Self { device: device.clone(), handle: raw.handle, pd: raw.pd, send, recv })
    }

    /// Returns the queue pair number.
    pub fn qpn(&self) -> u32 {
        self.send.qpn()
    }

    /// Returns the protection domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// Returns the device's handle of the queue pair.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns the send queue.
    pub fn send(&mut self) -> &mut SendQueue<T> {
        &mut self.send
    }

    /// Returns the receive queue; `None` if the queue pair uses a shared one.
    pub fn recv(&mut self) -> Option<&mut RecvQueue<R>> {
        self.recv.as_mut()
    }

    /// Returns the endpoint, for the peer.
    pub fn endpoint(&self) -> Result<Endpoint, DeviceError> {
        self.device.endpoint(&self.handle)
    }

    /// Connects to a peer, which must connect too.
    pub fn connect(&self, peer: &Endpoint) -> Result<(), DeviceError> {
        self.device.connect(&self.handle, peer)
    }

    /// Makes a datagram queue pair ready to send and receive.
    pub fn open_datagrams(&self, qkey: u32) -> Result<(), DeviceError> {
        self.device.open_datagrams(&self.handle, qkey)
    }
}
