//! Windows: memory that peers may reach, registered on every rail, with what kernels need to address it.
#![allow(unsafe_code)]

use crate::comm::CollComm;
use crate::control::Step;
use crate::device::{DeviceBuffer, Use, WindowMemory, bytes_of};
use crate::error::Error;
use crate::trace;
use ferrogin_ffi::device::{MrHandle, MrPeer};
use ferrogin_ffi::nccl;
use ferrogin_libfabric::{MemoryKind, MemoryRegion, Region, bindings};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, BorrowedFd};

/// How NCCL describes a window's memory.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// `NCCL_PTR_*`.
    pub ptr_type: c_int,
    /// `NCCL_NET_MR_FLAG_*`.
    pub flags: u64,
    /// A dma-buf, and where the window's first byte is in it.
    pub dma_buf: Option<(c_int, u64)>,
}

/// A registered window.
pub struct Window {
    /// What kernels read; first, so that it is gone before what it speaks of.
    table: Box<dyn DeviceBuffer>,
    /// By rail.
    _regions: Vec<MemoryRegion>,
}

/// Access that windows give: local source and target, remote source and target.
const ACCESS: u64 = bindings::FI_READ | bindings::FI_WRITE | bindings::FI_REMOTE_READ | bindings::FI_REMOTE_WRITE;

/// One rank's part of a window on one rail, on the wire: address 8, key 4, bytes 8.
const PART: usize = 20;

impl Window {
    /// Collective: registers `size` bytes at `data` and learns where the others' are.
    ///
    /// # Errors
    /// Memory that is not there; a card that refuses it; a rank that failed.
    pub fn register(coll: &CollComm, data: *mut c_void, size: usize, source: Source) -> Result<Self, Error> {
        let _span = trace::span("regMrSym", coll.rank);
        check(data, size, source)?;
        // Before the other ranks are involved: what is wrong with the arguments is no failure of the rank.
        let memory = memory(coll, data, size, source)?;
        let registered = register_rails(coll, data, size, &memory);
        drop(memory);
        let (regions, parts) = coll.agree(Step::RegisterWindow, registered, |regions| {
            let parts = regions.iter().map(|(_, _, key)| {
                [(data as u64).to_le_bytes().as_slice(), &key.to_le_bytes(), &(size as u64).to_le_bytes()].concat()
            });
            parts.collect::<Vec<_>>().concat()
        })?;
        let lkeys: Vec<u32> = regions.iter().map(|(_, lkey, _)| *lkey).collect();
        let peers = (0..lkeys.len()).map(|rail| peers(&parts, rail)).collect::<Result<Vec<_>, _>>()?;
        let table = table(coll, data as u64, &lkeys, &peers)?;
        crate::trace!("window of {size} bytes at {data:p} on {} rail(s)", lkeys.len());
        Ok(Self { table, _regions: regions.into_iter().map(|(region, _, _)| region).collect() })
    }

    /// What kernels get as `ncclGinWindow_t`: the device address of an array of [`MrHandle`] pointers, one for each rail.
    pub fn device_address(&self) -> u64 {
        self.table.device_address()
    }
}

fn check(data: *mut c_void, size: usize, source: Source) -> Result<(), Error> {
    if data.is_null() {
        return Err(Error::Null("data"));
    }
    if size == 0 || size > isize::MAX as usize || (data as usize).checked_add(size).is_none() {
        return Err(Error::Argument(format!("a window of {size} bytes at {data:p} cannot be")));
    }
    if !matches!(source.ptr_type, nccl::PTR_HOST | nccl::PTR_CUDA) {
        return Err(Error::Argument(format!(
            "memory of type {}: NCCL_PTR_HOST and NCCL_PTR_CUDA can be registered",
            source.ptr_type
        )));
    }
    Ok(())
}

/// The window's memory as the card is given it.
fn memory(coll: &CollComm, data: *mut c_void, size: usize, source: Source) -> Result<WindowMemory, Error> {
    let Some((fd, offset)) = source.dma_buf else {
        return Ok(coll.device.window(data, size, source.ptr_type)?);
    };
    let bad = || Error::Argument(format!("descriptor {fd} with offset {offset} is no dma-buf to register"));
    if fd < 0 || offset > data as u64 {
        return Err(bad());
    }
    // SAFETY: used for the one call below, which refuses a descriptor that is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let fd = borrowed.try_clone_to_owned().map_err(|_| bad())?;
    Ok(WindowMemory::DmaBuf { fd, offset })
}

type Registered = (MemoryRegion, u32, u32);

/// On each rail: the region, its local key, its remote key.
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
        let region = match memory {
            WindowMemory::Address | WindowMemory::CudaAddress(_) => Region::Va { addr: data.cast(), len: size },
            WindowMemory::DmaBuf { fd, offset } => {
                let base = (data as u64).wrapping_sub(*offset) as *mut u8;
                Region::DmaBuf { fd: fd.as_fd(), offset: *offset, len: size, base }
            }
        };
        let kind = match memory {
            WindowMemory::CudaAddress(ordinal) => MemoryKind::Cuda(*ordinal),
            WindowMemory::Address | WindowMemory::DmaBuf { .. } => MemoryKind::System,
        };
        // SAFETY: by NCCL's contract the memory stays until deregMrSym or closeColl, which drop the region, and is
        // there for kernels and peers to write.
        let region = unsafe { MemoryRegion::register_kind(&rail.domain, region, ACCESS, 0, kind) }
            .map_err(Error::fabric(what()))?;
        let keys = keys(rail, &region)?;
        Ok((region, keys.0, keys.1))
    };
    coll.rails.iter().map(register).collect()
}

/// Local and remote key of a region; EFA's have 32 bits.
pub fn keys(rail: &crate::rail::Rail, region: &MemoryRegion) -> Result<(u32, u32), Error> {
    let lkey = rail.gda.lkey(region).map_err(Error::fabric(format!("asking card {} for a key", rail.name())))?;
    let rkey = u32::try_from(region.key()).map_err(|_| {
        Error::Usage(format!("card {} gave the remote key {:#x}, longer than 32 bits", rail.name(), region.key()))
    })?;
    Ok((lkey, rkey))
}

/// Everybody's part on `rail`.
fn peers(parts: &[Vec<u8>], rail: usize) -> Result<Vec<MrPeer>, Error> {
    let peer = |(rank, part): (usize, &Vec<u8>)| {
        let part: &[u8; PART] = part
            .get(rail * PART..)
            .and_then(|part| part.first_chunk())
            .ok_or_else(|| Error::Usage(format!("rank {rank} registered its window on fewer rails")))?;
        let mut addr = [0; 8];
        addr.copy_from_slice(&part[..8]);
        let mut rkey = [0; 4];
        rkey.copy_from_slice(&part[8..12]);
        Ok(MrPeer { remote_addr: u64::from_le_bytes(addr), rkey: u32::from_le_bytes(rkey), pad: 0 })
    };
    parts.iter().enumerate().map(peer).collect()
}

/// The array of pointers, then one [`MrHandle`] with its peers for each rail.
fn table(coll: &CollComm, data: u64, lkeys: &[u32], peers: &[Vec<MrPeer>]) -> Result<Box<dyn DeviceBuffer>, Error> {
    let list = (lkeys.len() * 8).next_multiple_of(16);
    let one = size_of::<MrHandle>() + coll.nranks * size_of::<MrPeer>();
    let buffer = coll.device.allocate(list + lkeys.len() * one, Use::Tables)?;
    for (rail, (lkey, peers)) in lkeys.iter().zip(peers).enumerate() {
        let at = list + rail * one;
        buffer.write(rail * 8, bytes_of(&[buffer.device_address() + at as u64]))?;
        let handle = MrHandle { lkey: *lkey, nranks: coll.nranks as i32, local_addr: data, peers: [] };
        buffer.write(at, bytes_of(&[handle]))?;
        buffer.write(at + size_of::<MrHandle>(), bytes_of(peers))?;
    }
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_that_cannot_be_are_refused() {
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
    fn parts_are_read_by_rail_and_rank() {
        let part = |addr: u64, key: u32| [addr.to_le_bytes().as_slice(), &key.to_le_bytes(), &[0; 8]].concat();
        let parts = vec![[part(1, 2), part(3, 4)].concat(), [part(5, 6), part(7, 8)].concat()];
        let second = peers(&parts, 1).unwrap();
        assert_eq!(
            second,
            vec![MrPeer { remote_addr: 3, rkey: 4, pad: 0 }, MrPeer { remote_addr: 7, rkey: 8, pad: 0 }]
        );
        assert!(peers(&parts, 2).is_err());
    }
}
