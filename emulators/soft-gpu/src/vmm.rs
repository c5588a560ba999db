//! Virtual memory management: memory (a memory file), addresses (a reservation), and mappings of memory at addresses.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use crate::check;
use crate::code::{Code, Outcome};
use crate::context;
use crate::device;
use crate::guard::{In, Out, lock, log};
use crate::handle::fresh;
use crate::memfd::{self, GRANULARITY};
use crate::physical::Physical;
use crate::place::{CPU, ON_DEVICE, ON_HOST, ON_NODE, Place};
use crate::settings::MAX_DEVICES;
use crate::space::{self, Entry, Kind};

pub(crate) const PINNED: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const DESCRIPTOR: c_int = 1;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ`, `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ: c_int = 1;
pub(crate) const READ_WRITE: c_int = 3;

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

/// Memory by handle, and how many more releases each handle takes.
static HANDLES: Mutex<BTreeMap<u64, (Arc<Physical>, u64)>> = Mutex::new(BTreeMap::new());

fn by_handle(handle: u64) -> Outcome<Arc<Physical>> {
    lock(&HANDLES).get(&handle).map(|known| known.0.clone()).ok_or(Code::INVALID_VALUE)
}

/// Returns the memory's handle, which takes one more release than before.
fn give_handle(physical: Arc<Physical>) -> u64 {
    let handle = physical.handle;
    lock(&HANDLES).entry(handle).or_insert((physical, 0)).1 += 1;
    handle
}

/// The lengths of reservations, by address.
static RESERVED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

const fn whole(value: u64) -> bool {
    value.is_multiple_of(GRANULARITY as u64)
}

impl Properties {
    /// Checks the properties of memory to be created.
    fn check(&self) -> Outcome {
        // Handle types are bits: file descriptors, and two of another operating system. Fabric handles (8) need an
        // NVLink fabric.
        if self.handle_types & 8 != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        if self.kind != PINNED || self.handle_types & !DESCRIPTOR != 0 || self.compression > 1 {
            return Err(Code::INVALID_VALUE);
        }
        match self.place.kind {
            // Memory on the host can be exported only if it is on a node.
            ON_HOST if self.handle_types == 0 => Ok(()),
            ON_NODE if has_node(self.place.id) => Ok(()),
            ON_NODE => Err(Code::INVALID_DEVICE),
            ON_DEVICE => self.place.device().map(drop),
            // The reference also refuses the node of the calling thread.
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

/// Whether the host has a NUMA node; without NUMA, it has node 0.
fn has_node(node: c_int) -> bool {
    node == 0 || node > 0 && std::path::Path::new(&format!("/sys/devices/system/node/node{node}")).exists()
}

fn is_mapping(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::Mapped(_))
}

/// The prefix of the memory file's name, by which a process that imports the file recognizes it.
const NAME: &str = "softgpu-memory";

/// Parses where the memory is from its file's name, such as `/memfd:softgpu-memory-1-0 (deleted)` for device 0.
fn imported_place(file: &OwnedFd) -> Option<Place> {
    let name = name_of(file)?;
    let (kind, id) = name.strip_prefix(NAME)?.strip_prefix('-')?.split_once('-')?;
    Some(Place { kind: kind.parse().ok()?, id: id.parse().ok()? })
}

/// Returns a memory file's name.
fn name_of(file: &impl AsFd) -> Option<String> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())).ok()?;
    Some(link.to_str()?.strip_prefix("/memfd:")?.split(' ').next()?.to_owned())
}

/// The name of the file that stands for a dma-buf of several allocations. Nothing can map them through one descriptor,
/// so the file only says where this process has them, as two numbers: the process, and the address. It is as long as
/// the range and can't be mapped for writing, so cards ask the driver for the address, and copy through the driver.
const SEGMENTS: &str = "softgpu-segments";

fn export_segments(address: u64, bytes: usize) -> std::io::Result<OwnedFd> {
    let file = File::from(memfd::create(SEGMENTS, bytes as u64)?);
    let content = [u64::from(std::process::id()).to_le_bytes(), address.to_le_bytes()].concat();
    file.write_all_at(&content, 0)?;
    Ok(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?.into())
}

/// Returns where this process has byte `at` of a dma-buf of several allocations; `None` for any other file.
fn address_in_segments(fd: BorrowedFd<'_>, at: u64, bytes: usize) -> Option<u64> {
    if name_of(&fd).as_deref() != Some(SEGMENTS) {
        return None;
    }
    let file = File::from(fd.try_clone_to_owned().ok()?);
    let (mut process, mut start) = ([0; 8], [0; 8]);
    file.read_exact_at(&mut process, 0).ok()?;
    file.read_exact_at(&mut start, 8).ok()?;
    let inside = at.checked_add(bytes as u64)? <= file.metadata().ok()?.len();
    let address = u64::from_le_bytes(start).checked_add(at)?;
    let here = u64::from_le_bytes(process) == u64::from(std::process::id());
    (here && inside && space::covered(address, bytes as u64, is_mapping)).then_some(address)
}

/// Exports bytes as a dma-buf: a descriptor of their memory file, positioned at the first byte, or of a file that
/// stands for several adjacent allocations.
fn export_range(address: u64, bytes: usize) -> Outcome<OwnedFd> {
    let failed = |_| Code::OPERATING_SYSTEM;
    if let Some(entry) = space::heap_around(address, bytes as u64) {
        let heap = lock(&device::by_ordinal(entry.device)?.heap);
        let heap = heap.as_ref().ok_or(Code::INVALID_VALUE)?;
        return export(&heap.file, address - heap.base).map_err(failed);
    }
    let entries = space::covering(address, bytes as u64).ok_or(Code::INVALID_VALUE)?;
    let mut all = Vec::new();
    for entry in &entries {
        match &entry.kind {
            Kind::Mapped(physical) if physical.rdma && !physical.place.is_host() => all.push(physical),
            _ => return Err(Code::NOT_SUPPORTED),
        }
    }
    let like_first =
        |physical: &&Arc<Physical>| physical.place == all[0].place && physical.handle_types == all[0].handle_types;
    match &entries[..] {
        [entry] => export(&all[0].file, address - entry.start).map_err(failed),
        _ if all.iter().all(like_first) && is_reserved(address, bytes as u64) => {
            export_segments(address, bytes).map_err(failed)
        }
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Whether the bytes are in one reservation.
fn is_reserved(address: u64, bytes: u64) -> bool {
    let reserved = lock(&RESERVED);
    let around = reserved.range(..=address).next_back();
    around.is_some_and(|(start, len)| address.checked_add(bytes).is_some_and(|end| end <= start + len))
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

/// Returns the mappings of memory files: each one's address, its length and the file's inode.
pub(crate) fn mappings() -> Vec<(u64, u64, u64)> {
    let mapping = |start| {
        let entry = space::find(start)?;
        let Kind::Mapped(physical) = &entry.kind else { return None };
        Some((start, entry.len, identity(&physical.file).ok()?.1))
    };
    space::starts(is_mapping).into_iter().filter_map(mapping).collect()
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
        properties.check()?;
        if bytes == 0 || !whole(bytes as u64) || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let Properties { place, handle_types, .. } = properties;
        let charged = if place.is_host() { None } else { Some(device::by_ordinal(place.device()?)?) };
        charged.map_or(Ok(()), |device| device.charge(bytes as u64))?;
        let file = memfd::create(&format!("{NAME}-{}-{}", place.kind, place.id), bytes as u64).map_err(|error| {
            log(format_args!("cuMemCreate: cannot make a memory file of {bytes} bytes: {error}"));
            if let Some(device) = charged {
                device.discharge(bytes as u64);
            }
            Code::OUT_OF_MEMORY
        })?;
        let (handle, rdma) = (fresh() as u64, properties.rdma != 0);
        out.set(give_handle(Arc::new(Physical { handle, file, bytes: bytes as u64, place, handle_types, rdma, charged })))
    }

    /// Mappings keep the memory alive.
    cuMemRelease(handle: u64) {
        device::started()?;
        let mut handles = lock(&HANDLES);
        let known = handles.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        known.1 -= 1;
        if known.1 == 0 {
            handles.remove(&handle);
        }
        Ok(())
    }

    /// Returns the handle that the memory was mapped with, which then takes one more release.
    cuMemRetainAllocationHandle(out: Out<u64>, address: *mut c_void) {
        device::started()?;
        out.present()?;
        let Some(Kind::Mapped(physical)) = space::find(address as u64).map(|entry| entry.kind) else {
            return Err(Code::INVALID_VALUE);
        };
        out.set(give_handle(physical))
    }

    cuMemGetAllocationPropertiesFromHandle(out: Out<Properties>, handle: u64) {
        device::started()?;
        let physical = by_handle(handle)?;
        out.set(Properties {
            kind: PINNED,
            handle_types: physical.handle_types,
            place: physical.place,
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
        if bytes == 0 || !(bytes as u64).is_multiple_of(memfd::page_size()) || !valid || flags != 0 {
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
        // Host memory is no device's.
        let device = physical.place.device().unwrap_or(0);
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
        let accesses = access.list(count)?;
        for access in &accesses {
            let bit = access.place.accessor()?;
            if ![0, READ, READ_WRITE].contains(&access.flags) {
                return Err(Code::INVALID_VALUE);
            }
            reset |= bit;
            readers |= if access.flags == 0 { 0 } else { bit };
            writers |= if access.flags == READ_WRITE { bit } else { 0 };
        }
        let open = |entry: &Entry| match &entry.kind {
            Kind::Mapped(physical) => accesses.iter().all(|access| physical.place.is_open_to(&access.place)),
            _ => false,
        };
        // cuMemUnmap takes the same lock, so the mappings stay.
        let _reserved = lock(&RESERVED);
        let done = space::update(address, bytes as u64, open, |entry| {
            entry.readers = entry.readers & !reset | readers;
            entry.writers = entry.writers & !reset | writers;
        });
        if !done {
            return Err(Code::INVALID_VALUE);
        }
        for entry in space::exactly(address, bytes as u64).unwrap_or_default() {
            if let Kind::Mapped(physical) = &entry.kind && physical.place.is_host() {
                let rights = [entry.readers, entry.writers].map(|users| users & CPU != 0);
                memfd::show(entry.start as usize, entry.len as usize, &physical.file, rights).map_err(|_| Code::OUT_OF_MEMORY)?;
            }
        }
        Ok(())
    }

    cuMemGetAccess(out: Out<u64>, place: In<Place>, address: u64) {
        device::started()?;
        out.present()?;
        let bit = place.get()?.accessor()?;
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
        let place = imported_place(&file).ok_or(Code::INVALID_VALUE)?;
        if !place.is_host() {
            place.device()?;
        }
        if !memfd::cannot_shrink(&file) {
            return Err(Code::INVALID_VALUE);
        }
        let bytes = nix::sys::stat::fstat(&file).map_err(|_| Code::INVALID_VALUE)?.st_size as u64;
        let handle = fresh() as u64;
        let physical = Physical { handle, file, bytes, place, handle_types: DESCRIPTOR, rdma: true, charged: None };
        out.set(give_handle(Arc::new(physical)))
    }

    /// The range is in the pages of one allocation, or covers adjacent mappings of one reservation.
    cuMemGetHandleForAddressRange(out: Out<c_void>, address: u64, bytes: usize, kind: c_int, flags: u64) {
        context::current()?;
        out.present()?;
        let page = memfd::page_size();
        let aligned = address.is_multiple_of(page) && (bytes as u64).is_multiple_of(page);
        // Flag 1 asks for a mapping over PCIe.
        if kind != DMA_BUF || bytes == 0 || !aligned || flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        let descriptor = export_range(address, bytes)?;
        check::exported(address, bytes as u64, descriptor.as_fd());
        out.cast::<c_int>().set(descriptor.into_raw_fd())
    }

    /// Returns the address of a dma-buf's bytes at `offset`, for the driver's copies: a software card uses it to reach
    /// device memory that the CPU can't touch. NVIDIA's driver has no such function; its kernel module gives cards
    /// access.
    cuSoftGpuAttachDmaBuf(out: Out<u64>, fd: c_int, offset: u64, bytes: usize) {
        device::started()?;
        out.present()?;
        if fd < 0 || bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the caller keeps the descriptor open during the call; if it isn't open, calls on it fail.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        if let Some(address) = address_in_segments(fd, offset, bytes) {
            return out.set(address);
        }
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
