//! A device's memory: parts of one memory file, which the process maps as a whole.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{FallocateFlags, fallocate};

use crate::code::{Code, Outcome};
use crate::guard::log;
use crate::memfd;

/// A device's memory: its addresses, and which of them are free.
#[derive(Debug)]
pub(crate) struct Heap {
    pub(crate) file: OwnedFd,
    pub(crate) base: u64,
    /// The lengths of the free parts, by offset.
    free: BTreeMap<u64, u64>,
}

/// The prefix of each memory file's name; the device's ordinal follows.
pub(crate) const NAME: &str = "softgpu-heap-";

/// cuMemAlloc's addresses are multiples of this, as on hardware. At least as many bytes after each allocation stay
/// unused, so that accesses past the end are caught.
pub(crate) const UNIT: u64 = 512;

/// Allocations of a page or more start on a page boundary, so that cuMemGetHandleForAddressRange can export them.
pub(crate) fn alignment(bytes: u64) -> u64 {
    if bytes < memfd::page_size() { UNIT } else { memfd::page_size() }
}

impl Heap {
    pub(crate) fn open(ordinal: usize, len: u64) -> Outcome<Self> {
        let open = || {
            let file = memfd::create(&format!("{NAME}{ordinal}"), len)?;
            let base = memfd::shared(0, len as usize, &file, 0)? as u64;
            Ok(Self { file, base, free: BTreeMap::from([(0, len)]) })
        };
        open().map_err(|error: std::io::Error| {
            log(format_args!(
                "cannot make a memory file of {len} bytes for the memory of device {ordinal}: {error}; set \
                 SOFTGPU_MEMORY_BYTES to less, or raise the limits of file sizes and address space (ulimit -f, \
                 ulimit -v)"
            ));
            Code::OUT_OF_MEMORY
        })
    }

    pub(crate) fn take(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let need = bytes.checked_next_multiple_of(UNIT)?.checked_add(UNIT)?;
        let (start, at, len) = self.free.iter().find_map(|(start, len)| {
            let at = start.next_multiple_of(align.max(UNIT));
            (at + need <= start + len).then_some((*start, at, *len))
        })?;
        self.free.remove(&start);
        for (from, to) in [(start, at), (at + need, start + len)] {
            if from < to {
                self.free.insert(from, to - from);
            }
        }
        Some(at)
    }

    pub(crate) fn give_back(&mut self, at: u64, bytes: u64) {
        let (mut start, mut end) = (at, at + bytes.next_multiple_of(UNIT) + UNIT);
        if let Some((before, len)) = self.free.range(..start).next_back().map(|(at, len)| (*at, *len))
            && before + len == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(len) = self.free.remove(&end) {
            end += len;
        }
        self.free.insert(start, end - start);
        // Unused pages go back to the system; if that fails, they stay.
        let page = memfd::page_size();
        let (from, to) = (at.next_multiple_of(page), (at + bytes) / page * page);
        if from < to {
            let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let _ = fallocate(self.file.as_fd(), punch, from as i64, (to - from) as i64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heap_coalesces_after_all_is_freed() {
        let file = memfd::create("test", 1 << 20).unwrap();
        let mut heap = Heap { file, base: 0, free: BTreeMap::from([(0, 1 << 20)]) };
        let sizes = [1, 511, 512, 513, 70_000, 4096, 3];
        let parts: Vec<_> = sizes.iter().map(|bytes| (heap.take(*bytes, UNIT).unwrap(), *bytes)).collect();
        for (index, (at, bytes)) in parts.iter().enumerate() {
            assert_eq!(at % UNIT, 0);
            let apart = |other: &(u64, u64)| other.0 > at + bytes || other.0 + other.1 < *at;
            assert!(parts.iter().enumerate().all(|(other, part)| other == index || apart(part)), "{parts:?}");
        }
        assert_eq!(heap.take(1 << 20, UNIT), None);
        assert_eq!(heap.take(u64::MAX, UNIT), None);
        for order in [3, 0, 5, 1, 6, 2, 4] {
            heap.give_back(parts[order].0, parts[order].1);
        }
        assert_eq!(heap.free, BTreeMap::from([(0, 1 << 20)]));
        assert_eq!(heap.take(8, 4096).unwrap() % 4096, 0);
    }
}
