//! Memory that a card shares with a context's kernels, and its registration with the rails.

use crate::device::{Device, DeviceBuffer, Use, bytes_of};
use crate::error::Error;
use crate::fault::COUNTER_STRIDE;
use crate::rail::Rail;
use ferrogin_ffi::ext::VALUE_STRIDE;
use ferrogin_ffi::failure::Record;
use ferrogin_libfabric::{MemoryKind, MemoryRegion, Region, bindings};
use std::sync::Arc;

/// The two allocations of a `createContext`.
pub struct ContextMemory {
    /// What kernels and the card access: scratch page, then value slots, then completion counters, then error counters,
    /// then the abort flag and the record's address.
    pub card: Arc<dyn DeviceBuffer>,
    /// The first failure's record, which the host reads.
    pub record: Box<dyn DeviceBuffer>,
}

/// [`failure_offset`](ferrogin_ffi::ext::ContextExt::failure_offset).
pub const FAILURE_OFFSET: u32 = 8;

impl ContextMemory {
    /// Allocates zeroed memory for `layout`.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn allocate(device: &dyn Device, layout: MemoryLayout) -> Result<Self, Error> {
        let memory = Self {
            card: device.allocate(layout.card_len(), Use::Card)?.into(),
            record: device.allocate(size_of::<Record>(), Use::Shared)?,
        };
        memory.card.write(layout.abort() + FAILURE_OFFSET as usize, bytes_of(&[memory.record.device_address()]))?;
        Ok(memory)
    }
}

/// Sizes that determine the offsets within [`ContextMemory`].
#[derive(Debug, Clone, Copy)]
pub struct MemoryLayout {
    /// Page size in bytes; registered regions begin on a page. The first page is the scratch target, which only
    /// receives zero-byte writes.
    pub page: usize,
    /// Number of endpoints over all contexts.
    pub endpoints: usize,
    /// Number of completion and signal counters over all contexts.
    pub counters: usize,
    /// Number of endpoints, over all contexts, that post values from the pool.
    pub pooled: usize,
    /// Value slots for each of those: as many as the deepest queue has requests.
    pub slots: usize,
}

impl MemoryLayout {
    fn values(&self) -> usize {
        self.page
    }

    fn values_len(&self) -> usize {
        self.pooled * self.slots * VALUE_STRIDE as usize
    }

    /// Returns the offset of the first completion counter.
    pub fn completed(&self) -> usize {
        (self.values() + self.values_len()).next_multiple_of(self.page)
    }

    /// Returns the offset of the first error counter.
    pub fn errors(&self) -> usize {
        self.completed() + self.counters * COUNTER_STRIDE
    }

    /// Returns the offset of the abort flag, which the record's address follows.
    pub fn abort(&self) -> usize {
        self.errors() + self.endpoints * COUNTER_STRIDE
    }

    /// Returns the size of [`ContextMemory::card`] in bytes.
    pub fn card_len(&self) -> usize {
        self.abort() + COUNTER_STRIDE
    }

    /// Returns the offset of the value slots of each endpoint that posts values from the pool.
    pub fn value_slices(&self) -> impl Iterator<Item = usize> + use<> {
        (self.values()..self.values() + self.values_len()).step_by(self.slots * VALUE_STRIDE as usize)
    }
}

/// [`ContextMemory`] as registered with one rail's card.
pub struct RegisteredMemory {
    _scratch: MemoryRegion,
    _values: Option<MemoryRegion>,
    /// Local and remote key of the scratch page.
    pub scratch_keys: (u32, u32),
    /// Local key of the value slots; 0 if there are none.
    pub values_lkey: u32,
}

impl RegisteredMemory {
    /// Registers the scratch page and the value slots with `rail`'s card.
    ///
    /// # Errors
    /// The card refuses the memory.
    #[allow(unsafe_code)]
    pub fn register(rail: &Rail, memory: &ContextMemory, layout: MemoryLayout) -> Result<Self, Error> {
        let register = |offset: usize, len: usize, access: u64| {
            let (region, kind) = region_of(&*memory.card, offset, len);
            let what = format!("registering {len} bytes of context memory with card {}", rail.name());
            // SAFETY: the owner of `memory` drops the regions before the memory (the field order of `Context`, the
            // order of locals in `card_check`), and no Rust reference covers the memory.
            unsafe { MemoryRegion::register_kind(&rail.domain, region, access, 0, kind) }.map_err(Error::fabric(what))
        };
        let local = bindings::FI_READ | bindings::FI_WRITE;
        let scratch = register(0, layout.page, local | bindings::FI_REMOTE_WRITE)?;
        let values = (layout.pooled > 0).then(|| register(layout.values(), layout.values_len(), local)).transpose()?;
        let values_lkey = values.as_ref().map_or(Ok(0), |values| rail.keys(values).map(|keys| keys.0))?;
        Ok(Self { scratch_keys: rail.keys(&scratch)?, values_lkey, _scratch: scratch, _values: values })
    }
}

/// Returns part of a buffer in the form that a card registers.
pub fn region_of(buffer: &dyn DeviceBuffer, offset: usize, len: usize) -> (Region<'_>, MemoryKind) {
    let base = buffer.device_address() as *mut u8;
    match buffer.dma_buf() {
        Some(dma_buf) => {
            // The card counts addresses from the first byte of the dma-buf.
            let base = base.wrapping_sub(dma_buf.offset as usize);
            let region = Region::DmaBuf { fd: dma_buf.fd, offset: dma_buf.offset + offset as u64, len, base };
            (region, dma_buf.kind)
        }
        None => (Region::Va { addr: base.wrapping_add(offset), len }, MemoryKind::System),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_begin_on_pages_and_do_not_overlap() {
        for page in [1 << 12, 1 << 16] {
            let layout = MemoryLayout { page, endpoints: 14, counters: 20, pooled: 5, slots: 64 };
            let slices: Vec<_> = layout.value_slices().collect();
            assert_eq!(slices, [0, 1, 2, 3, 4].map(|slice| page + slice * 64 * 8));
            assert_eq!(layout.completed(), page + (5 * 64 * 8usize).next_multiple_of(page));
            assert_eq!(layout.errors() - layout.completed(), 20 * 64);
            assert_eq!((layout.abort() - layout.errors(), layout.card_len() - layout.abort()), (14 * 64, 64));
            let without = MemoryLayout { pooled: 0, ..layout };
            assert_eq!((without.value_slices().count(), without.completed()), (0, page));
        }
    }
}
