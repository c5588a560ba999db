//! Devices, and the driver's initialization.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use crate::code::{Code, Outcome};
use crate::guard::{self, Out, Text, lock, log, write_text};
use crate::heap::Heap;
use crate::memfd;
use crate::settings::Settings;

/// Driver API release 12.8.
pub(crate) const VERSION: c_int = 12080;
pub(crate) const MAX_THREADS: u32 = 1024;
pub(crate) const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
pub(crate) const MAX_GRID: [u32; 3] = [0x7fff_ffff, 65535, 65535];
/// Shared memory per block: the default limit, and the most that cuFuncSetAttribute can allow.
pub(crate) const SHARED: u32 = 48 << 10;
pub(crate) const MAX_SHARED: u32 = 227 << 10;
const SHARED_OF_PROCESSOR: u32 = 228 << 10;
/// The largest distance in bytes from row to row in 2D and 3D copies.
pub(crate) const MAX_PITCH: usize = c_int::MAX as usize;
pub(crate) const PROCESSORS: u32 = 132;
const THREADS_OF_PROCESSOR: u32 = 2048;
const BLOCKS_OF_PROCESSOR: u32 = 32;

pub(crate) struct Driver {
    pub(crate) settings: Settings,
    devices: Vec<Device>,
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) heap: Mutex<Option<Heap>>,
    memory: u64,
    used: AtomicU64,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// Returns the driver once cuInit has run.
///
/// # Errors
/// `CUDA_ERROR_NOT_INITIALIZED`.
pub(crate) fn started() -> Outcome<&'static Driver> {
    DRIVER.get().ok_or(Code::NOT_INITIALIZED)
}

/// # Errors
/// `CUDA_ERROR_INVALID_DEVICE`.
pub(crate) fn by_ordinal(ordinal: usize) -> Outcome<&'static Device> {
    started()?.devices.get(ordinal).ok_or(Code::INVALID_DEVICE)
}

/// Like `by_ordinal`, for a number from the program.
pub(crate) fn by_number(number: c_int) -> Outcome<&'static Device> {
    started()?;
    by_ordinal(usize::try_from(number).map_err(|_| Code::INVALID_DEVICE)?)
}

impl Device {
    pub(crate) fn memory(&self) -> u64 {
        self.memory
    }

    /// Returns the size of the heap's file: larger than the memory, to leave room between allocations.
    pub(crate) fn heap_bytes(&self) -> u64 {
        self.memory + (256 << 20)
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Counts memory as used.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub(crate) fn charge(&self, bytes: u64) -> Outcome {
        let more = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.memory);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map(drop).map_err(|_| Code::OUT_OF_MEMORY)
    }

    pub(crate) fn discharge(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Returns the PCI address in the driver's format: domain, bus, device and function.
    fn pci(&self) -> String {
        format!("0000:{:02X}:00.0", 0xA0 + self.ordinal)
    }

    /// Returns the UUID, which is the same in every process.
    fn uuid(&self) -> [u8; 16] {
        let mut bytes = *b"ferrogin-softgpu";
        bytes[15] = self.ordinal as u8;
        bytes
    }
}

/// Returns the most blocks that the device can hold at once.
pub(crate) fn resident_blocks(threads: u32, shared: u32) -> u32 {
    blocks_of_processor(threads, shared) * PROCESSORS
}

/// Returns the most blocks of this size that fit on one processor.
pub(crate) fn blocks_of_processor(threads: u32, shared: u32) -> u32 {
    let by_threads = THREADS_OF_PROCESSOR / threads.next_multiple_of(32).max(32);
    let by_shared = SHARED_OF_PROCESSOR.checked_div(shared.next_multiple_of(1024)).unwrap_or(BLOCKS_OF_PROCESSOR);
    by_threads.min(by_shared).min(BLOCKS_OF_PROCESSOR)
}

/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`: the CPU reaches device memory at its address.
const HOST_PAGE_TABLES: c_int = 100;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`, and its bit for flushes by the host.
const FLUSH_OPTIONS: c_int = 117;
const FLUSH_BY_HOST: c_int = 1;
/// `CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED`.
const REDUCTIONS: c_int = 148;

/// Attributes that the program has set.
static SET: Mutex<BTreeMap<c_int, c_int>> = Mutex::new(BTreeMap::new());

/// Whether the program's CPU code may access device memory, as the driver reports on Grace.
pub(crate) fn is_coherent() -> bool {
    lock(&SET).get(&HOST_PAGE_TABLES).is_some_and(|value| *value != 0)
}

/// Whether streams support atomic reductions.
pub(crate) fn reduces() -> bool {
    lock(&SET).get(&REDUCTIONS).is_none_or(|value| *value != 0)
}

/// Whether the host may flush cards' writes.
pub(crate) fn host_flushes() -> bool {
    lock(&SET).get(&FLUSH_OPTIONS).is_none_or(|options| options & FLUSH_BY_HOST != 0)
}

/// Returns an attribute's value; 0 for unsupported features. The driver API reference lists the numbers.
fn attribute(driver: &Driver, device: &Device, number: c_int) -> Outcome<c_int> {
    if let Some(value) = lock(&SET).get(&number) {
        return Ok(*value);
    }
    let value = match number {
        1 => MAX_THREADS as c_int,
        2..=4 => MAX_BLOCK[number as usize - 2] as c_int,
        5..=7 => MAX_GRID[number as usize - 5] as c_int,
        // Shared memory per block, constant memory, warp size, pitch, registers per block.
        8 => SHARED as c_int,
        9 => 64 << 10,
        10 => 32,
        11 => MAX_PITCH as c_int,
        12 | 82 => 65536,
        // Clock rates in kHz: arbitrary, since they mean nothing on this GPU.
        13 => 1_000_000,
        36 => 1_000_000,
        14 => 512,
        // Copies overlap with kernels, host memory can be mapped, kernels run concurrently.
        15 | 19 | 31 => 1,
        16 => PROCESSORS as c_int,
        33 => 0xA0 + device.ordinal as c_int,
        37 => 4096,
        38 => 50 << 20,
        39 => THREADS_OF_PROCESSOR as c_int,
        // Copy engines, unified addresses.
        40 => 2,
        41 => 1,
        75 => driver.settings.capability.0,
        76 => driver.settings.capability.1,
        // Stream priorities, caching of global and local memory, shared memory per processor.
        78..=80 => 1,
        81 => SHARED_OF_PROCESSOR as c_int,
        // Native atomics between host and device, preemption, host pointers for registered memory, stream memory
        // operations (64-bit and NOR too), cooperative launches.
        86 | 90..=95 | 122 | 123 => 1,
        97 => MAX_SHARED as c_int,
        // Flushing remote writes, registering host memory, virtual memory management, file descriptors as handles.
        98 | 99 | 102 | 103 => 1,
        106 => BLOCKS_OF_PROCESSOR as c_int,
        // GPUDirect RDMA with virtual memory, reserved shared memory, read-only registration, memory pools, GPUDirect
        // RDMA with its flush options and write ordering.
        110 => 1,
        111 => 1024,
        113 | 115..=117 => 1,
        118 => 200,
        // Clusters.
        120 => c_int::from(driver.settings.capability.0 >= 9),
        // Dma-bufs, IPC events, and one memory synchronization domain.
        124..=126 => 1,
        // The device's memory is no NUMA node of its own; the closest node of the host is node 0.
        131 => -1,
        // Virtual memory management of host memory, on a node or anywhere.
        141 | 145 => 1,
        // Atomic reductions by streams.
        148 => 1,
        number if (1..=162).contains(&number) => 0,
        _ => return Err(Code::INVALID_VALUE),
    };
    Ok(value)
}

/// `CUdevprop`.
#[repr(C)]
pub(crate) struct Properties {
    threads: c_int,
    block: [c_int; 3],
    grid: [c_int; 3],
    shared: c_int,
    constant: c_int,
    warp: c_int,
    pitch: c_int,
    registers: c_int,
    clock: c_int,
    texture_alignment: c_int,
}

api! {
    cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if DRIVER.get().is_some() {
            return Ok(());
        }
        let settings = Settings::from_env().map_err(|problem| {
            log(format_args!("{problem}"));
            Code::NO_DEVICE
        })?;
        if settings.devices == 0 {
            return Err(Code::NO_DEVICE);
        }
        if settings.hidden {
            memfd::hide();
        }
        let device = |ordinal| Device {
            ordinal,
            heap: Mutex::default(),
            memory: settings.memory,
            used: AtomicU64::new(0),
        };
        let devices = (0..settings.devices).map(device).collect();
        guard::start_driver();
        DRIVER.get_or_init(|| Driver { settings, devices });
        Ok(())
    }

    cuDriverGetVersion(out: Out<c_int>) {
        out.set(VERSION)
    }

    cuDeviceGetCount(out: Out<c_int>) {
        out.set(started()?.devices.len() as c_int)
    }

    cuDeviceGet(out: Out<c_int>, ordinal: c_int) {
        started()?;
        out.present()?;
        by_number(ordinal)?;
        out.set(ordinal)
    }

    cuDeviceGetName(out: Out<c_char>, room: c_int, number: c_int) {
        by_number(number)?;
        write_text(out, usize::try_from(room).map_err(|_| Code::INVALID_VALUE)?, &started()?.settings.name)
    }

    cuDeviceGetUuid(out: Out<[u8; 16]>, number: c_int) {
        out.set(by_number(number)?.uuid())
    }

    cuDeviceGetUuid_v2(out: Out<[u8; 16]>, number: c_int) {
        out.set(by_number(number)?.uuid())
    }

    cuDeviceTotalMem_v2(out: Out<usize>, number: c_int) {
        out.set(by_number(number)?.memory as usize)
    }

    cuDeviceGetAttribute(out: Out<c_int>, number: c_int, device: c_int) {
        let device = by_number(device)?;
        out.present()?;
        out.set(attribute(started()?, device, number)?)
    }

    cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, number: c_int) {
        by_number(number)?;
        let (high, low) = started()?.settings.capability;
        major.set(high)?;
        minor.set(low)
    }

    cuDeviceGetProperties(out: Out<Properties>, number: c_int) {
        let device = by_number(number)?;
        let get = |number| attribute(started()?, device, number);
        out.set(Properties {
            threads: get(1)?,
            block: [get(2)?, get(3)?, get(4)?],
            grid: [get(5)?, get(6)?, get(7)?],
            shared: get(8)?,
            constant: get(9)?,
            warp: get(10)?,
            pitch: get(11)?,
            registers: get(12)?,
            clock: get(13)?,
            texture_alignment: get(14)?,
        })
    }

    cuDeviceGetPCIBusId(out: Out<c_char>, room: c_int, number: c_int) {
        let device = by_number(number)?;
        write_text(out, usize::try_from(room).map_err(|_| Code::INVALID_VALUE)?, &device.pci())
    }

    cuDeviceGetByPCIBusId(out: Out<c_int>, address: Text) {
        let driver = started()?;
        out.present()?;
        let address = address.string()?;
        let found = driver.devices.iter().find(|device| {
            let full = device.pci();
            address.eq_ignore_ascii_case(&full) || full.strip_prefix("0000:").is_some_and(|rest| rest.eq_ignore_ascii_case(&address))
        });
        out.set(found.ok_or(Code::INVALID_DEVICE)?.ordinal as c_int)
    }

    cuDeviceCanAccessPeer(out: Out<c_int>, device: c_int, peer: c_int) {
        let (device, peer) = (by_number(device)?, by_number(peer)?);
        out.set(c_int::from(device.ordinal != peer.ordinal))
    }

    /// The attributes are performance rank, access, native atomics, and access to arrays.
    cuDeviceGetP2PAttribute(out: Out<c_int>, attribute: c_int, device: c_int, peer: c_int) {
        out.present()?;
        let (device, peer) = (by_number(device)?, by_number(peer)?);
        if device.ordinal == peer.ordinal {
            return Err(Code::INVALID_DEVICE);
        }
        match attribute {
            1 | 4 => out.set(0),
            2 | 3 => out.set(1),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Sets an attribute of all devices in this process, to test programs that choose by attributes. NVIDIA's driver
    /// has no such function.
    cuSoftGpuSetAttribute(number: c_int, value: c_int) {
        started()?;
        lock(&SET).insert(number, value);
        Ok(())
    }
}

/// Returns this library's release. NVIDIA's driver has no such function: tools look it up by `cuGetProcAddress` to tell
/// drivers apart.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn cuSoftGpuRelease() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_limited_by_threads_and_shared_memory() {
        assert_eq!(blocks_of_processor(1024, 0), 2);
        assert_eq!(blocks_of_processor(1, 0), 32);
        assert_eq!(blocks_of_processor(32, 100 << 10), 2);
        assert_eq!(resident_blocks(1024, 200 << 10), 132);
    }
}
