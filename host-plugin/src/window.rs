//! Windows: memory that peers may access, registered on every rail, and the tables that kernels address it with.
#![allow(unsafe_code)]

use crate::comm::CollComm;
use crate::config::Signals;
use crate::device::{Adds, Device, DeviceBuffer, Use, WindowMemory, WordMapping};
use crate::error::Error;
use crate::log::first_time;
use crate::signal_proxy;
use crate::signal_proxy::windows::{Window as SignalWindow, Windows};
use crate::trace;
use ferrogin_ffi::block::{RailSpec, WindowSpec};
use ferrogin_ffi::device::MrPeer;
use ferrogin_ffi::nccl;
use ferrogin_libfabric::{MemoryKind, MemoryRegion, Region, bindings};
use ferrogin_rendezvous::ring::Step;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// NCCL's description of a window's memory.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// `NCCL_PTR_*`.
    pub ptr_type: c_int,
    /// `NCCL_NET_MR_FLAG_*`.
    pub flags: u64,
    /// A dma-buf, and the offset of the window's first byte in it.
    pub dma_buf: Option<(c_int, u64)>,
}

/// A window that is checked but not registered yet.
pub struct Prepared {
    memory: WindowMemory,
    /// With emulated signals: how the signal proxy adds to its words.
    adds: Option<(Adds, Option<WordMapping>)>,
}

/// A window's entry in the list that emulated signals may name, until dropped. Afterwards the signal proxy no longer
/// accesses its memory.
struct Listed {
    windows: Arc<Windows>,
    /// Rail and remote key.
    keys: Vec<(u32, u32)>,
    _mapping: Option<WordMapping>,
}

impl Listed {
    fn add(windows: &Arc<Windows>, keys: Vec<(u32, u32)>, window: SignalWindow, mapping: Option<WordMapping>) -> Self {
        keys.iter().for_each(|(rail, rkey)| windows.add(*rail, *rkey, window));
        Self { windows: windows.clone(), keys, _mapping: mapping }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        // Signals that have arrived are not refused.
        signal_proxy::catch_up();
        self.windows.remove(&self.keys);
        signal_proxy::wait_out();
    }
}

/// A registered window.
pub struct Window {
    /// The tables for kernels. The first field, so that they're dropped before the regions they name.
    table: Box<dyn DeviceBuffer>,
    /// The window's entry in the signal proxy's list, dropped before the regions.
    _listed: Option<Listed>,
    /// By rail.
    _regions: Vec<MemoryRegion>,
    /// The bytes of each rank's window.
    sizes: Vec<u64>,
}

/// Access rights of windows: local source and target, remote source and target.
pub(crate) const ACCESS: u64 =
    bindings::FI_READ | bindings::FI_WRITE | bindings::FI_REMOTE_READ | bindings::FI_REMOTE_WRITE;

/// One rank's window on one rail, on the wire. A rank's block in the allgather has one for each rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RailWindow {
    addr: U64,
    rkey: U32,
    size: U64,
}

ferrogin_ffi::assert_layout!(RailWindow, size 20, align 1, { addr @ 0, rkey @ 8, size @ 12 });

impl Window {
    /// Registers `size` bytes at `data`, and exchanges addresses and keys with the other ranks. Collective.
    ///
    /// # Errors
    /// The memory isn't mapped; a card refuses it; another rank failed.
    pub fn register(coll: &CollComm, data: *mut c_void, size: usize, source: Source) -> Result<Self, Error> {
        // An invalid argument fails here, before the exchange, and doesn't make the other ranks fail.
        let memory = Self::prepare(coll, data, size, source)?;
        Self::exchange(coll, data, size, Ok(memory))
    }

    /// The first, local half of [`register`](Self::register): checks the arguments, and finds out how cards register
    /// the memory.
    ///
    /// # Errors
    /// The arguments are invalid; the memory isn't mapped.
    pub fn prepare(coll: &CollComm, data: *mut c_void, size: usize, source: Source) -> Result<Prepared, Error> {
        check(data, size, source)?;
        let memory = memory(&*coll.device, data, size, source)?;
        let emulated = coll.plugin.config.signals == Signals::Emulated;
        let adds = || map_words(&*coll.device, coll.device.adds(data, size, source.ptr_type), data, size);
        Ok(Prepared { memory, adds: emulated.then(adds) })
    }

    /// The second, collective half of [`register`](Self::register). If `prepared` is an error, the call fails on all
    /// ranks.
    ///
    /// # Errors
    /// The error in `prepared`; a card refuses the memory; another rank failed.
    pub fn exchange(
        coll: &CollComm,
        data: *mut c_void,
        size: usize,
        prepared: Result<Prepared, Error>,
    ) -> Result<Self, Error> {
        let _span = trace::span("regMrSym", coll.rank);
        let registered = prepared.and_then(|Prepared { memory, adds }| {
            let regions = register_rails(coll, data, size, &memory)?;
            // A peer that has the keys may use them before this rank returns.
            let region = ferrogin_ffi::signals::Region { start: data as u64, bytes: size as u64 };
            let keys = coll.rails.iter().zip(&regions).map(|(rail, (_, _, rkey))| (rail.index, *rkey)).collect();
            let listed = adds.map(|(adds, mapping)| {
                crate::info!(
                    "window of {size} bytes at {data:p}: the signal proxy adds emulated signals by {}",
                    adds.name()
                );
                Listed::add(&coll.signal_windows, keys, SignalWindow { region, adds }, mapping)
            });
            // In this order, an error removes the keys before a card can assign them to another region.
            Ok((listed, regions))
        });
        let ((listed, regions), parts) = coll.agree(Step::RegisterWindow, registered, |(_, regions)| {
            let (addr, size) = (U64::new(data as u64), U64::new(size as u64));
            let windows = regions.iter().map(|(_, _, rkey)| RailWindow { addr, rkey: U32::new(*rkey), size });
            windows.collect::<Vec<_>>().as_bytes().to_vec()
        })?;
        let rails = regions.iter().enumerate();
        let rails = rails.map(|(rail, (_, lkey, _))| Ok(RailSpec { lkey: *lkey, peers: peers(&parts, rail)? }));
        let spec = WindowSpec { local_addr: data as u64, rails: rails.collect::<Result<_, Error>>()? };
        let table = coll.device.allocate(spec.size(), Use::Tables)?;
        table.write(0, spec.fill(table.device_address()).bytes())?;
        let sizes = sizes(&parts);
        crate::trace!(
            "registered a window of {size} bytes at {data:p} on {}",
            crate::log::counted(regions.len(), "rail")
        );
        let regions = regions.into_iter().map(|(region, _, _)| region).collect();
        Ok(Self { table, _listed: listed, _regions: regions, sizes })
    }

    /// Returns the `ncclGinWindow_t` for kernels: the device address of an array of `MrHandle` pointers, one for each
    /// rail.
    pub fn device_address(&self) -> u64 {
        self.table.device_address()
    }

    /// Returns the size of `rank`'s window in bytes; `None` if there is no such rank.
    pub fn size_on(&self, rank: usize) -> Option<u64> {
        self.sizes.get(rank).copied()
    }
}

/// If a window's words would be copied, maps the window for the CPU instead, where this machine can, until the mapping
/// is dropped. Warns, once per process, that a reset may be lost either way.
pub(crate) fn map_words(
    device: &dyn Device,
    adds: Adds,
    data: *mut c_void,
    size: usize,
) -> (Adds, Option<WordMapping>) {
    if adds != Adds::Copy {
        return (adds, None);
    }
    if first_time("signals by copies", "") {
        crate::warn!(
            "signals in GPU memory are added by a read and a write, because the driver has no atomic reductions on \
             streams (CUDA 13.1): a kernel's reset in between is undone. Reset words only while no signal is in \
             flight, use words in host memory, or update the driver"
        );
    }
    let mapping = device.map_words(data, size);
    (mapping.as_ref().map_or(adds, |mapping| Adds::Mapped { distance: mapping.distance }), mapping)
}

/// Checks the arguments that NCCL passes to register a window.
pub(crate) fn check(data: *mut c_void, size: usize, source: Source) -> Result<(), Error> {
    if data.is_null() {
        return Err(Error::Null("data"));
    }
    if size == 0 || size > isize::MAX as usize || (data as usize).checked_add(size).is_none() {
        return Err(Error::Argument(format!(
            "a window of {size} bytes at {data:p}: the size must be above 0, and the end within the address space"
        )));
    }
    if !matches!(source.ptr_type, nccl::PTR_HOST | nccl::PTR_CUDA) {
        return Err(Error::Argument(format!(
            "memory type {} cannot be registered: use NCCL_PTR_HOST ({}) or NCCL_PTR_CUDA ({})",
            source.ptr_type,
            nccl::PTR_HOST,
            nccl::PTR_CUDA
        )));
    }
    Ok(())
}

/// Returns how the card registers the window's memory.
pub(crate) fn memory(
    device: &dyn Device,
    data: *mut c_void,
    size: usize,
    source: Source,
) -> Result<WindowMemory, Error> {
    let Some((fd, offset)) = source.dma_buf else {
        return Ok(device.window(data, size, source.ptr_type)?);
    };
    let bad =
        || Error::Argument(format!("file descriptor {fd} with offset {offset} is not an open dma-buf of this window"));
    if fd < 0 || offset > data as u64 {
        return Err(bad());
    }
    // SAFETY: the descriptor might not be open. Its only use is the dup in the next line, which then fails.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let fd = borrowed.try_clone_to_owned().map_err(|_| bad())?;
    let gpu = device.gpu().filter(|_| source.ptr_type == nccl::PTR_CUDA);
    let kind = gpu.map_or(MemoryKind::System, |(ordinal, _)| MemoryKind::Cuda(ordinal as i32));
    Ok(WindowMemory::DmaBuf { fd, offset, kind })
}

/// Returns `size` bytes at `data` in the form that a card registers.
pub(crate) fn region_of(memory: &WindowMemory, data: *mut c_void, size: usize) -> (Region<'_>, MemoryKind) {
    match memory {
        WindowMemory::Address(kind) => (Region::Va { addr: data.cast(), len: size }, *kind),
        WindowMemory::DmaBuf { fd, offset, kind } => {
            let base = (data as u64).wrapping_sub(*offset) as *mut u8;
            (Region::DmaBuf { fd: fd.as_fd(), offset: *offset, len: size, base }, *kind)
        }
    }
}

type Registered = (MemoryRegion, u32, u32);

/// Registers the window on each rail, and returns the region, its local key and its remote key.
fn register_rails(
    coll: &CollComm,
    data: *mut c_void,
    size: usize,
    memory: &WindowMemory,
) -> Result<Vec<Registered>, Error> {
    let register = |rail: &std::sync::Arc<crate::rail::Rail>| {
        let what = || {
            format!(
                "registering {size} bytes at {data:p}, which must be readable and writable, with card {}",
                rail.name()
            )
        };
        let (region, kind) = region_of(memory, data, size);
        // SAFETY: NCCL keeps the memory allocated until deregMrSym or closeColl, which drop the region. NCCL's user
        // registers the memory for kernels and peers to write, and this library holds no reference into it.
        let region = unsafe { MemoryRegion::register_kind(&rail.domain, region, ACCESS, 0, kind) }
            .map_err(Error::fabric(what()))?;
        let keys = rail.keys(&region)?;
        Ok((region, keys.0, keys.1))
    };
    coll.rails.iter().map(register).collect()
}

/// Returns all ranks' windows on `rail`.
fn peers(parts: &[Vec<u8>], rail: usize) -> Result<Vec<MrPeer>, Error> {
    let peer = |(rank, part): (usize, &Vec<u8>)| {
        let windows = <[RailWindow]>::ref_from_bytes(part).ok();
        let window = windows.and_then(|windows| windows.get(rail)).ok_or_else(|| {
            Error::Usage(format!(
                "rank {rank} did not register its window on rail {rail}: run the same ferrogin on the same kind of \
                 machine on all ranks"
            ))
        })?;
        Ok(MrPeer { remote_addr: window.addr.get(), rkey: window.rkey.get(), pad: 0 })
    };
    parts.iter().enumerate().map(peer).collect()
}

/// Returns the size of each rank's window, which is the same on all of its rails. [`peers`] has checked the blocks.
fn sizes(parts: &[Vec<u8>]) -> Vec<u64> {
    let size = |part: &Vec<u8>| RailWindow::ref_from_prefix(part).map_or(0, |(window, _)| window.size.get());
    parts.iter().map(size).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_windows_are_refused() {
        let source = |ptr_type| Source { ptr_type, flags: 0, dma_buf: None };
        let here = 4096 as *mut c_void;
        assert!(check(here, 1, source(nccl::PTR_CUDA)).is_ok());
        assert!(check(std::ptr::null_mut(), 1, source(nccl::PTR_CUDA)).is_err());
        assert!(check(here, 0, source(nccl::PTR_CUDA)).is_err());
        assert!(check(here, 1 << 63, source(nccl::PTR_HOST)).is_err());
        assert!(check(usize::MAX as *mut c_void, 2, source(nccl::PTR_HOST)).is_err());
        assert!(check(here, 1, source(nccl::PTR_DMABUF)).is_err());
        assert!(check(here, 1, source(0)).is_err());
    }

    #[test]
    fn peer_windows_round_trip_by_rail_and_rank() {
        let window =
            |addr: u64, rkey: u32| RailWindow { addr: addr.into(), rkey: rkey.into(), size: (addr + 8).into() };
        assert_eq!(window(1, 2).as_bytes(), b"\x01\0\0\0\0\0\0\0\x02\0\0\0\x09\0\0\0\0\0\0\0");
        let rank = |windows: [RailWindow; 2]| windows.as_bytes().to_vec();
        let parts = vec![rank([window(1, 2), window(3, 4)]), rank([window(5, 6), window(7, 8)])];
        let second = peers(&parts, 1).unwrap();
        assert_eq!(
            second,
            vec![MrPeer { remote_addr: 3, rkey: 4, pad: 0 }, MrPeer { remote_addr: 7, rkey: 8, pad: 0 }]
        );
        assert_eq!(sizes(&parts), [9, 13]);
        assert!(peers(&parts, 2).is_err());
        assert!(peers(&[parts[0][..39].to_vec()], 0).is_err(), "truncated");
    }
}
