//! GPU memory in parts: the driver allocates at least 2 MiB at a time, and a window's tables have a few hundred bytes.
//!
//! A part that has been freed has all its bits set, and a new one is zero. So a kernel that uses the handle of a
//! deregistered window faults: the pointers in it are no addresses.
#![allow(unsafe_code)]

use super::driver::Core;
use super::memory::{self, GpuBuffer};
use crate::device::interface::{DeviceBuffer, DeviceError, DmaBuf, bounds, page_size};
use parking_lot::Mutex;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

/// The allocations of all connections: each connection opens the device for itself, and a window has tables for each
/// connection.
static BLOCKS: Mutex<Vec<Weak<Block>>> = Mutex::new(Vec::new());

/// One allocation of the driver, freed with its last part.
struct Block {
    buffer: GpuBuffer,
    /// In ascending order; no two of them touch.
    free: Mutex<Vec<Range<usize>>>,
}

/// Part of a [`Block`].
struct Part {
    core: Arc<Core>,
    block: Arc<Block>,
    range: Range<usize>,
    len: usize,
}

/// A card registers whole pages. Other parts begin where the driver's own small allocations do.
fn alignment(export: bool) -> usize {
    if export { page_size() } else { 256 }
}

/// Allocates `len` zeroed bytes, which cards can register if `export` is set.
pub fn allocate(core: &Arc<Core>, len: usize, export: bool) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
    let size = memory::round_up(len, alignment(export))?;
    let found = {
        let mut blocks = BLOCKS.lock();
        blocks.retain(|block| block.strong_count() > 0);
        let of_gpu = |block: &Arc<Block>| block.buffer.is_of(core, export);
        blocks.iter().filter_map(Weak::upgrade).filter(of_gpu).find_map(|block| Part::take(core, block, size, len))
    };
    if let Some(part) = found {
        part.fill(0)?;
        return Ok(Box::new(part));
    }
    let buffer = memory::gpu(core, size, export)?;
    let mut free = Vec::new();
    give_back(&mut free, size..buffer.size());
    let block = Arc::new(Block { buffer, free: Mutex::new(free) });
    BLOCKS.lock().push(Arc::downgrade(&block));
    Ok(Box::new(Part { core: core.clone(), block, range: 0..size, len }))
}

impl Part {
    fn take(core: &Arc<Core>, block: Arc<Block>, size: usize, len: usize) -> Option<Self> {
        let range = {
            let mut free = block.free.lock();
            let gap = free.iter_mut().find(|gap| gap.len() >= size)?;
            let start = gap.start;
            gap.start += size;
            free.retain(|gap| !gap.is_empty());
            start..start + size
        };
        Some(Self { core: core.clone(), block, range, len })
    }

    fn address(&self) -> u64 {
        self.block.buffer.device_address() + self.range.start as u64
    }

    fn fill(&self, byte: u8) -> Result<(), DeviceError> {
        // SAFETY: the block is mapped while this part exists, and the range belongs to this part alone.
        unsafe { memory::fill(&self.core, self.address(), self.range.len(), byte) }
    }
}

/// Adds `range` to the gaps, joined with its neighbours.
fn give_back(free: &mut Vec<Range<usize>>, mut range: Range<usize>) {
    free.retain(|gap| {
        let touches = gap.end == range.start || range.end == gap.start;
        if touches {
            range = range.start.min(gap.start)..range.end.max(gap.end);
        }
        !touches
    });
    let at = free.partition_point(|gap| gap.start < range.start);
    free.insert(at, range);
}

impl Drop for Part {
    fn drop(&mut self) {
        // The block's last part frees it instead.
        if Arc::strong_count(&self.block) > 1
            && let Err(error) = self.fill(0xff)
        {
            crate::trace!("marking freed GPU memory: {error}");
        }
        give_back(&mut self.block.free.lock(), self.range.clone());
    }
}

impl DeviceBuffer for Part {
    fn device_address(&self) -> u64 {
        self.address()
    }

    fn host_address(&self) -> Option<*mut u8> {
        None
    }

    fn len(&self) -> usize {
        self.len
    }

    fn dma_buf(&self) -> Option<DmaBuf<'_>> {
        let whole = self.block.buffer.dma_buf()?;
        Some(DmaBuf { offset: whole.offset + self.range.start as u64, len: self.range.len(), ..whole })
    }

    fn export(&self, pcie: bool) -> Option<Result<OwnedFd, DeviceError>> {
        let export = |_current| memory::export_for(pcie, self.address(), self.range.len());
        Some(self.core.enter().and_then(export))
    }

    fn write(&self, offset: usize, bytes: &[MaybeUninit<u8>]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        // SAFETY: `bounds` checked that the bytes are this part's, whose block is mapped.
        unsafe { memory::copy_in(&self.core, self.address() + offset as u64, bytes) }
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        // SAFETY: `bounds` checked that the bytes are this part's, whose block is mapped.
        unsafe { memory::copy_out(&self.core, self.address() + offset as u64, bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_join_with_their_neighbours() {
        let mut free = vec![0..10, 20..30, 40..50];
        give_back(&mut free, 30..35);
        assert_eq!(free, [0..10, 20..35, 40..50]);
        give_back(&mut free, 35..40);
        assert_eq!(free, [0..10, 20..50]);
        give_back(&mut free, 60..70);
        assert_eq!(free, [0..10, 20..50, 60..70]);
        give_back(&mut free, 10..20);
        assert_eq!(free, [0..50, 60..70]);
    }
}
