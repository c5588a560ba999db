//! Memory that the card reads and writes: blocks of equal slots, and the bytes of long messages.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use mlx5::device::{Access, Device, DeviceError, Mr, Pd};
use mlx5::wqe::Sge;

/// Equal slots in one registered block.
#[derive(Debug)]
pub(super) struct Slots {
    // The region goes before the bytes under it.
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

    /// The first `length` bytes of a slot, for the card.
    pub(super) fn sge(&self, slot: u16, length: usize) -> Sge {
        debug_assert!(length <= self.size);
        Sge { addr: self.mr.addr + (usize::from(slot) * self.size) as u64, length: length as u32, lkey: self.mr.lkey }
    }

    fn start(&mut self, slot: u16) -> *mut u8 {
        let at = usize::from(slot) * self.size;
        assert!(at + self.size <= self.bytes.len(), "a slot number that was never given out");
        self.bytes.as_mut_ptr().wrapping_add(at)
    }

    /// Fills a slot with `parts` one after the other. The card does not use it: it is not posted.
    pub(super) fn write(&mut self, slot: u16, parts: [&[u8]; 2]) {
        let mut to = self.start(slot);
        assert!(parts[0].len() + parts[1].len() <= self.size);
        for part in parts {
            // SAFETY: within the slot, checked above; the parts are borrowed and so no part of this block.
            unsafe { to.copy_from_nonoverlapping(part.as_ptr(), part.len()) };
            to = to.wrapping_add(part.len());
        }
    }

    /// The first `length` bytes of a slot that the card has filled and given back.
    pub(super) fn read(&mut self, slot: u16, length: usize) -> Vec<u8> {
        let from = self.start(slot);
        let mut bytes = vec![0; length.min(self.size)];
        // SAFETY: within the slot; the completion came after the card's last store to it.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }
}

fn register(device: &dyn Device, pd: &Pd, bytes: &mut [u8], access: Access) -> Result<Mr, DeviceError> {
    let addr = NonNull::new(bytes.as_mut_ptr()).unwrap_or(NonNull::dangling());
    // SAFETY: whoever calls keeps the bytes next to the region and drops the region first; nothing refers to them meanwhile.
    unsafe { device.register(pd, addr, bytes.len(), access) }
}

/// The bytes of one long message while the card fetches into them.
#[derive(Debug)]
pub(super) struct Landing {
    pub mr: Mr,
    bytes: Vec<u8>,
}

impl Landing {
    pub(super) fn new(device: &dyn Device, pd: &Pd, length: usize) -> Result<Self, DeviceError> {
        let mut bytes = vec![0; length];
        let mr = register(device, pd, &mut bytes, Access::LOCAL_WRITE)?;
        Ok(Self { mr, bytes })
    }

    /// The bytes: the card has completed all that it was to fetch.
    pub(super) fn finish(self) -> Vec<u8> {
        drop(self.mr);
        self.bytes
    }
}

/// Bytes that the peer may fetch through a window.
#[derive(Debug)]
pub(super) struct Offered {
    pub mr: Mr,
    _bytes: crate::Bytes,
}

impl Offered {
    pub(super) fn new(device: &dyn Device, pd: &Pd, bytes: crate::Bytes) -> Result<Self, DeviceError> {
        let slice = bytes.as_slice();
        let addr = NonNull::from(slice).cast();
        // SAFETY: `bytes` is kept beside the region, is never written while it is, and its heap block does not move; the card only
        // reads, for neither the region nor a window on it allows more.
        let mr = unsafe { device.register(pd, addr, slice.len(), Access::MW_BIND) }?;
        Ok(Self { mr, _bytes: bytes })
    }
}
