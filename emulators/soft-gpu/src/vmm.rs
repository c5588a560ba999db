//! Virtual memory management: memory (a memory file), addresses (a reservation), and mappings of memory at addresses.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use crate::code::{Code, Outcome};
use crate::context;
use crate::device;
use crate::guard::{In, Out, lock, log};
use crate::handle::{Table, fresh};
use crate::memfd::{self, GRANULARITY};
use crate::physical::Physical;
use crate::settings::MAX_DEVICES;
use crate::space::{self, Entry, Kind};

pub(crate) const PINNED: c_int = 1;
const ON_DEVICE: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const DESCRIPTOR: c_int = 1;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ`, `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ: c_int = 1;
pub(crate) const READ_WRITE: c_int = 3;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Properties {
    kind: c_int,
    handle_types: c_int,
    place: Place,
    win32: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

const _: () = assert!(size_of::<Properties>() == 32 && std::mem::offset_of!(Properties, rdma) == 25);

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) place: Place,
    pub(crate) flags: c_int,
}

/// Memory by handle; cuMemRetainAllocationHandle gives the same memory another handle.
static HANDLES: Table<Physical> = Table::new();

fn by_handle(handle: u64) -> Outcome<Arc<Physical>> {
    HANDLES.get(handle as usize).ok_or(Code::INVALID_VALUE)
}

fn new_handle(physical: Arc<Physical>) -> u64 {
    let handle = fresh();
    HANDLES.insert(handle, physical);
    handle as u64
}

/// The lengths of reservations, by address.
static RESERVED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

const fn whole(value: u64) -> bool {
    value.is_multiple_of(GRANULARITY as u64)
}

impl Properties {
    /// Checks the properties and returns the device's ordinal.
    fn check(&self) -> Outcome<usize> {
        // Handle types are bits: file descriptors, and two of another operating system. Fabric handles (8) need an NVLink fabric.
        if self.handle_types & 8 != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        if self.kind != PINNED || self.handle_types & !DESCRIPTOR != 0 || self.compression > 1 {
            return Err(Code::INVALID_VALUE);
        }
        self.place.device()
    }
}

impl Place {
    pub(crate) fn device(&self) -> Outcome<usize> {
        match self.kind {
            ON_DEVICE => Ok(device::by_number(self.id)?.ordinal),
            // Memory on the host and its NUMA nodes.
            2..=4 => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

fn is_mapping(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::Mapped(_))
}

/// The prefix of the memory file's name, by which a process that imports the file recognizes it.
const NAME: &str = "softgpu-memory";

/// Parses the device's ordinal from the file's name, such as `/memfd:softgpu-memory-0 (deleted)`.
fn imported_device(file: &OwnedFd) -> Option<usize> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let name = name.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?.strip_prefix('-')?;
    name.split(' ').next()?.parse().ok()
}

/// Opens another descriptor of the file and seeks it to `offset`, the first byte of the exported range.
fn export(file: &OwnedFd, offset: u64) -> std::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // A descriptor that isn't readable can't be mapped.
    let mut own = File::options().read(!memfd::hidden()).write(true).open(path)?;
    own.seek(SeekFrom::Start(offset))?;
    Ok(own.into())
}

/// Returns a file's device and inode.
fn identity(file: &impl AsFd) -> Outcome<(u64, u64)> {
    let stat = nix::sys::stat::fstat(file).map_err(|_| Code::INVALID_VALUE)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Returns the address at which this process has byte `at` of a memory file, in a mapping or a device's heap.
fn address_in(file: (u64, u64), at: u64) -> Option<u64> {
    let mapped = |entry: &Entry| match &entry.kind {
        Kind::Mapped(physical) => at < entry.len && identity(&physical.file) == Ok(file),
        _ => false,
    };
    let heap = |ordinal| {
        let device = device::by_ordinal(ordinal).ok()?;
        let heap = lock(&device.heap);
        heap.as_ref().filter(|heap| identity(&heap.file) == Ok(file)).map(|heap| heap.base)
    };
    let start = space::starts(mapped).first().copied().or_else(|| (0..MAX_DEVICES).find_map(heap))?;
    start.checked_add(at)
}

api! {
    cuMemGetAllocationGranularity(out: Out<usize>, properties: In<Properties>, option: c_int) {
        device::started()?;
        out.present()?;
        properties.get()?.check()?;
        if !(0..=1).contains(&option) {
            return Err(Code::INVALID_VALUE);
        }
        out.set(GRANULARITY)
    }

    cuMemCreate(out: Out<u64>, bytes: usize, properties: In<Properties>, flags: u64) {
        device::started()?;
        out.present()?;
        let properties = properties.get()?;
        let ordinal = properties.check()?;
        if bytes == 0 || !whole(bytes as u64) || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let device = device::by_ordinal(ordinal)?;
        device.charge(bytes as u64)?;
        let file = memfd::create(&format!("{NAME}-{ordinal}"), bytes as u64).map_err(|error| {
            log(format_args!("cuMemCreate: cannot make a memory file of {bytes} bytes: {error}"));
            device.discharge(bytes as u64);
            Code::OUT_OF_MEMORY
        })?;
        let physical = Physical {
            file, bytes: bytes as u64, device: ordinal, handle_types: properties.handle_types, rdma: properties.rdma != 0, imported: false,
        };
        out.set(new_handle(Arc::new(physical)))
    }

    /// Mappings keep the memory alive.
    cuMemRelease(handle: u64) {
        device::started()?;
        HANDLES.remove(handle as usize).map(drop).ok_or(Code::INVALID_VALUE)
    }

    cuMemRetainAllocationHandle(out: Out<u64>, address: *mut c_void) {
        device::started()?;
        out.present()?;
        let Some(Kind::Mapped(physical)) = space::find(address as u64).map(|entry| entry.kind) else {
            return Err(Code::INVALID_VALUE);
        };
        out.set(new_handle(physical))
    }

    cuMemGetAllocationPropertiesFromHandle(out: Out<Properties>, handle: u64) {
        device::started()?;
        let physical = by_handle(handle)?;
        out.set(Properties {
            kind: PINNED,
            handle_types: physical.handle_types,
            place: Place { kind: ON_DEVICE, id: physical.device as c_int },
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma: u8::from(physical.rdma),
            usage: 0,
            reserved: [0; 4],
        })
    }

    /// The requested address is only a hint, and ignored.
    cuMemAddressReserve(out: Out<u64>, bytes: usize, alignment: usize, _wish: u64, flags: u64) {
        device::started()?;
        out.present()?;
        let valid = alignment == 0 || alignment.is_power_of_two();
        if bytes == 0 || !whole(bytes as u64) || !valid || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let alignment = alignment.max(GRANULARITY);
        let whole = bytes.checked_add(alignment).ok_or(Code::OUT_OF_MEMORY)?;
        let raw = memfd::reserve(whole).map_err(|_| Code::OUT_OF_MEMORY)?;
        let start = raw.next_multiple_of(alignment);
        for (from, to) in [(raw, start), (start + bytes, raw + whole)] {
            if from < to {
                memfd::unmap(from, to - from);
            }
        }
        lock(&RESERVED).insert(start as u64, bytes as u64);
        out.set(start as u64)
    }

    cuMemAddressFree(address: u64, bytes: usize) {
        device::started()?;
        let mut reserved = lock(&RESERVED);
        if reserved.get(&address) != Some(&(bytes as u64)) || space::touched(address, bytes as u64) {
            return Err(Code::INVALID_VALUE);
        }
        reserved.remove(&address);
        space::unmap_later(address as usize, bytes);
        Ok(())
    }

    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        device::started()?;
        let physical = by_handle(handle)?;
        let len = bytes as u64;
        // The reference requires the offset to be 0.
        if len == 0 || !whole(address) || !whole(len) || offset != 0 || len > physical.bytes || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let reserved = lock(&RESERVED);
        let around = reserved.range(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
        if address.checked_add(len).is_none_or(|end| end > around.0 + around.1) || space::touched(address, len) {
            return Err(Code::INVALID_VALUE);
        }
        memfd::shared(address as usize, bytes, &physical.file, 0).map_err(|_| Code::OUT_OF_MEMORY)?;
        let device = physical.device;
        space::add(Entry::new(address, len, Kind::Mapped(physical), device, 0));
        Ok(())
    }

    cuMemUnmap(address: u64, bytes: usize) {
        device::started()?;
        // cuMemMap takes the same lock, so nothing else gets mapped at the addresses meanwhile.
        let _reserved = lock(&RESERVED);
        let entries = space::exactly(address, bytes as u64).ok_or(Code::INVALID_VALUE)?;
        if !entries.iter().all(is_mapping) {
            return Err(Code::INVALID_VALUE);
        }
        for entry in entries {
            space::remove(entry.start, "unmapped memory", is_mapping);
        }
        // The pages stay if a kernel is running, because it may be in the middle of an access.
        let mut result = Ok(());
        space::unless_running(|| result = memfd::empty(address as usize, bytes).map_err(|_| Code::OUT_OF_MEMORY));
        result
    }

    cuMemSetAccess(address: u64, bytes: usize, access: In<Access>, count: usize) {
        device::started()?;
        if count == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (mut reset, mut readers, mut writers) = (0, 0, 0);
        for access in access.list(count)? {
            let bit = 1u64 << access.place.device()?;
            if ![0, READ, READ_WRITE].contains(&access.flags) {
                return Err(Code::INVALID_VALUE);
            }
            reset |= bit;
            readers |= if access.flags == 0 { 0 } else { bit };
            writers |= if access.flags == READ_WRITE { bit } else { 0 };
        }
        let done = space::update(address, bytes as u64, is_mapping, |entry| {
            entry.readers = entry.readers & !reset | readers;
            entry.writers = entry.writers & !reset | writers;
        });
        if done { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    cuMemGetAccess(out: Out<u64>, place: In<Place>, address: u64) {
        device::started()?;
        out.present()?;
        let bit = 1 << place.get()?.device()?;
        let entry = space::find(address).filter(is_mapping).ok_or(Code::INVALID_VALUE)?;
        out.set(match (entry.readers & bit != 0, entry.writers & bit != 0) {
            (false, _) => 0,
            (true, false) => READ as u64,
            (true, true) => READ_WRITE as u64,
        })
    }

    cuMemExportToShareableHandle(out: Out<c_void>, handle: u64, kind: c_int, flags: u64) {
        device::started()?;
        out.present()?;
        let physical = by_handle(handle)?;
        if kind == 8 {
            return Err(Code::NOT_SUPPORTED);
        }
        if kind != DESCRIPTOR || flags != 0 || physical.handle_types & DESCRIPTOR == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let fd = physical.file.try_clone().map_err(|_| Code::OPERATING_SYSTEM)?;
        out.cast::<c_int>().set(fd.into_raw_fd())
    }

    /// The handle is the file descriptor itself, which still belongs to the caller.
    cuMemImportFromShareableHandle(out: Out<u64>, shared: *mut c_void, kind: c_int) {
        device::started()?;
        out.present()?;
        if kind == 8 {
            return Err(Code::NOT_SUPPORTED);
        }
        let number = c_int::try_from(shared as usize).map_err(|_| Code::INVALID_VALUE)?;
        if kind != DESCRIPTOR || number < 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller keeps the descriptor open during the call; if it isn't open, duplicating it fails.
        let file = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned().map_err(|_| Code::INVALID_VALUE)?;
        let ordinal = imported_device(&file).ok_or(Code::INVALID_VALUE)?;
        let device = device::by_ordinal(ordinal)?.ordinal;
        if !memfd::cannot_shrink(&file) {
            return Err(Code::INVALID_VALUE);
        }
        let bytes = nix::sys::stat::fstat(&file).map_err(|_| Code::INVALID_VALUE)?.st_size as u64;
        let physical = Physical { file, bytes, device, handle_types: DESCRIPTOR, rdma: true, imported: true };
        out.set(new_handle(Arc::new(physical)))
    }

    /// A dma-buf here is a memory file's descriptor, positioned at the range's first byte. The range must be in one allocation.
    cuMemGetHandleForAddressRange(out: Out<c_void>, address: u64, bytes: usize, kind: c_int, flags: u64) {
        context::current()?;
        out.present()?;
        let page = memfd::page_size();
        let aligned = address.is_multiple_of(page) && (bytes as u64).is_multiple_of(page);
        // Flag 1 asks for a mapping over PCIe.
        if kind != DMA_BUF || bytes == 0 || !aligned || flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        let entry = space::find(address).filter(|entry| bytes as u64 <= entry.end().next_multiple_of(page) - address);
        let entry = entry.ok_or(Code::INVALID_VALUE)?;
        let fd = match &entry.kind {
            Kind::Mapped(physical) if physical.rdma => export(&physical.file, address - entry.start),
            Kind::Heap => match &*lock(&device::by_ordinal(entry.device)?.heap) {
                Some(heap) => export(&heap.file, address - heap.base),
                None => return Err(Code::INVALID_VALUE),
            },
            _ => return Err(Code::NOT_SUPPORTED),
        };
        out.cast::<c_int>().set(fd.map_err(|_| Code::OPERATING_SYSTEM)?.into_raw_fd())
    }

    /// Returns the address of a dma-buf's bytes at `offset`, for the driver's copies: a software card uses it to reach device memory that
    /// the CPU can't touch. NVIDIA's driver has no such function; its kernel module gives cards access.
    cuSoftGpuAttachDmaBuf(out: Out<u64>, fd: c_int, offset: u64, bytes: usize) {
        device::started()?;
        out.present()?;
        if fd < 0 || bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller keeps the descriptor open during the call; if it isn't open, calls on it fail.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let start = nix::unistd::lseek(fd, 0, nix::unistd::Whence::SeekCur).map_err(|_| Code::INVALID_VALUE)?;
        let at = offset.checked_add(start as u64).ok_or(Code::INVALID_VALUE)?;
        let address = address_in(identity(&fd)?, at).ok_or(Code::INVALID_VALUE)?;
        let entry = space::find(address).ok_or(Code::INVALID_VALUE)?;
        if bytes as u64 > entry.end() - address {
            return Err(Code::INVALID_VALUE);
        }
        out.set(address)
    }
}
