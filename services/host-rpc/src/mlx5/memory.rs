//! Memory that the card reads and writes: blocks of equal slots for eager messages, and the bytes of rendezvous
//! messages.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use ferrogin_channel::Payload;
use mlx5::device::{Access, Device, DeviceError, Mr, Pd};
use mlx5::wqe::Sge;

/// Equal slots in one registered block.
#[derive(Debug)]
pub(super) struct Slots {
    // Declared first, so that the registration ends before the bytes are freed.
    mr: Mr,
    bytes: Vec<u8>,
    size: usize,
}

impl Slots {
    pub(super) fn new(
        device: &dyn Device,
        pd: &Pd,
        count: usize,
        size: usize,
        access: Access,
    ) -> Result<Self, DeviceError> {
        let mut bytes = vec![0; count * size];
        let mr = register(device, pd, &mut bytes, access)?;
        Ok(Self { mr, bytes, size })
    }

    /// Returns the first `length` bytes of a slot, as a buffer of a work request.
    pub(super) fn sge(&self, slot: u16, length: usize) -> Sge {
        debug_assert!(length <= self.size);
        Sge { addr: self.mr.addr + (usize::from(slot) * self.size) as u64, length: length as u32, lkey: self.mr.lkey }
    }

    fn start(&mut self, slot: u16) -> *mut u8 {
        let at = usize::from(slot) * self.size;
        assert!(at + self.size <= self.bytes.len(), "slot {slot} is outside the block");
        self.bytes.as_mut_ptr().wrapping_add(at)
    }

    /// Fills a slot that no posted work request uses with `parts`, one after another.
    pub(super) fn write(&mut self, slot: u16, parts: [&[u8]; 2]) {
        let mut to = self.start(slot);
        assert!(parts[0].len() + parts[1].len() <= self.size);
        for part in parts {
            // SAFETY: the assertion above keeps the copy inside the slot; `self` is borrowed mutably, so `part` is
            // outside the block.
            unsafe { to.copy_from_nonoverlapping(part.as_ptr(), part.len()) };
            to = to.wrapping_add(part.len());
        }
    }

    /// Returns the first `length` bytes of a slot whose receive has completed.
    pub(super) fn read(&mut self, slot: u16, length: usize) -> Vec<u8> {
        let from = self.start(slot);
        let mut bytes = vec![0; length.min(self.size)];
        // SAFETY: `min` keeps the copy inside the slot; the caller has polled the completion, which the card writes
        // after its last store.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }
}

/// Registers bytes that the caller keeps allocated, and accesses only by pointer, for as long as the region lives.
fn register(device: &dyn Device, pd: &Pd, bytes: &mut [u8], access: Access) -> Result<Mr, DeviceError> {
    let addr = NonNull::new(bytes.as_mut_ptr()).unwrap_or(NonNull::dangling());
    // SAFETY: `Slots` and `ReadBuffer`, the only callers, own the bytes along with the region, drop the region first,
    // and create no reference to the bytes while the card can write to them.
    unsafe { device.register(pd, addr, bytes.len(), access) }
}

/// The bytes of one rendezvous message while RDMA READs fill them.
#[derive(Debug)]
pub(super) struct ReadBuffer {
    pub mr: Mr,
    bytes: Vec<u8>,
}

impl ReadBuffer {
    pub(super) fn new(device: &dyn Device, pd: &Pd, length: usize) -> Result<Self, DeviceError> {
        let mut bytes = vec![0; length];
        let mr = register(device, pd, &mut bytes, Access::LOCAL_WRITE)?;
        Ok(Self { mr, bytes })
    }

    /// Returns the bytes, after the last READ has completed.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        drop(self.mr);
        self.bytes
    }
}

/// The bytes of one rendezvous message that the peer may read through a window.
#[derive(Debug)]
pub(super) struct ExposedPayload {
    // Declared first, so that the registration ends before the bytes are freed.
    pub mr: Mr,
    _payload: Payload,
}

impl ExposedPayload {
    pub(super) fn new(device: &dyn Device, pd: &Pd, payload: Payload) -> Result<Self, DeviceError> {
        let slice = payload.as_slice();
        let addr = NonNull::from(slice).cast();
        // SAFETY: `payload` is stored with the region and is dropped after it; a payload is never written, and its
        // bytes do not move with it, as long messages are on the heap or static; the card only reads, as neither the
        // region nor a window on it allows more.
        let mr = unsafe { device.register(pd, addr, slice.len(), Access::MW_BIND) }?;
        Ok(Self { mr, _payload: payload })
    }
}
