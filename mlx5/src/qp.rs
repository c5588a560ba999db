//! A queue pair with both of its queues.

use crate::device::{Device, DeviceError, Endpoint, Handle, Pd, QpAttr};
use crate::rq::RecvQueue;
use crate::sq::SendQueue;
use crate::wqe::Limits;
use std::sync::Arc;

/// A queue pair. `T` is what the caller wants back of its send queue, `R` of its receive queue.
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
    /// Creates a queue pair. Receives can be posted at once, requests when it is connected.
    pub fn create(device: &Arc<dyn Device>, pd: &Pd, attr: &QpAttr) -> Result<Self, DeviceError> {
        // What is asked for is the least: a queue of nothing could not be told from a device's mistake.
        let attr = QpAttr {
            max_send: attr.max_send.max(1),
            max_recv: attr.max_recv.max(1),
            max_recv_sge: attr.max_recv_sge.max(1),
            limits: Limits { max_sge: attr.limits.max_sge.max(1), ..attr.limits },
            ..attr.clone()
        };
        let raw = device.create_qp(pd, &attr)?;
        let sizes = || DeviceError::Unsupported { what: "queues of the sizes that it made" };
        let send = SendQueue::new(raw.send).ok_or_else(sizes)?;
        let recv = raw.recv.map(|parts| RecvQueue::new(parts).ok_or_else(sizes)).transpose()?;
        Ok(Self { device: device.clone(), handle: raw.handle, pd: raw.pd, send, recv })
    }

    /// Queue pair number.
    pub fn qpn(&self) -> u32 {
        self.send.qpn()
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// What names it to its device.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Its send queue.
    pub fn send(&mut self) -> &mut SendQueue<T> {
        &mut self.send
    }

    /// Its receive queue; `None` where it has a shared one.
    pub fn recv(&mut self) -> Option<&mut RecvQueue<R>> {
        self.recv.as_mut()
    }

    /// What the peer must know.
    pub fn endpoint(&self) -> Result<Endpoint, DeviceError> {
        self.device.endpoint(&self.handle)
    }

    /// Connects to a peer, which must do the same.
    pub fn connect(&self, peer: &Endpoint) -> Result<(), DeviceError> {
        self.device.connect(&self.handle, peer)
    }

    /// Makes a datagram queue pair ready.
    pub fn open_datagrams(&self, qkey: u32) -> Result<(), DeviceError> {
        self.device.open_datagrams(&self.handle, qkey)
    }
}
