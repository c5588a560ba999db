//! GPU memory that the CPU cannot access, registered by address and by dma-buf, on the software GPU: the CUDA driver
//! copies it.

#![allow(unsafe_code, clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block)]

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;

use efa_dp_direct::wqe::{RemoteMem, Sge};
use ferrogin_libfabric::bindings as fi;
use libloading::Library;
use softefa_rig::child::run;
use softefa_rig::{ALL, End, Region, Rig, close, getinfo, write};

const BYTES: usize = 64 << 10;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF: c_int = 1;

/// The CUDA driver, with the first GPU's primary context current.
struct Driver(Library);

macro_rules! cuda {
    ($driver:expr, $name:ident($($argument:expr => $type:ty),*)) => {{
        let name = concat!(stringify!($name), "\0").as_bytes();
        let function = unsafe { $driver.0.get::<unsafe extern "C" fn($($type),*) -> c_int>(name) }.unwrap();
        assert_eq!(unsafe { function($($argument),*) }, 0, "{}", stringify!($name));
    }};
}

impl Driver {
    fn open() -> Driver {
        let driver = Driver(unsafe { Library::new("libcuda.so.1") }.unwrap());
        let mut context: *mut c_void = ptr::null_mut();
        cuda!(driver, cuInit(0 => u32));
        cuda!(driver, cuDevicePrimaryCtxRetain(&raw mut context => *mut *mut c_void, 0 => c_int));
        cuda!(driver, cuCtxSetCurrent(context => *mut c_void));
        driver
    }

    /// Allocates GPU memory that is filled with `byte`.
    fn allocate(&self, byte: u8) -> u64 {
        let mut at = 0;
        cuda!(self, cuMemAlloc_v2(&raw mut at => *mut u64, BYTES => usize));
        cuda!(self, cuMemsetD8_v2(at => u64, byte => u8, BYTES => usize));
        at
    }

    fn read(&self, at: u64) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        cuda!(self, cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast() => *mut c_void, at => u64, BYTES => usize));
        bytes
    }

    /// Exports the memory as a dma-buf.
    fn export(&self, at: u64) -> File {
        let mut fd: c_int = -1;
        cuda!(
            self,
            cuMemGetHandleForAddressRange((&raw mut fd).cast() => *mut c_void, at => u64, BYTES => usize, DMA_BUF => c_int, 0 => u64)
        );
        unsafe { File::from_raw_fd(fd) }
    }
}

fn by_address(rig: &Rig, at: u64) -> Result<Region, i32> {
    let iov = fi::iovec { iov_base: at as *mut c_void, iov_len: BYTES };
    let attr = fi::fi_mr_attr {
        __bindgen_anon_1: fi::fi_mr_attr__bindgen_ty_1 { mr_iov: &raw const iov },
        iov_count: 1,
        access: ALL,
        iface: fi::fi_hmem_iface::FI_HMEM_CUDA,
        ..fi::fi_mr_attr::default()
    };
    rig.register_with(&attr, 0)
}

fn by_dmabuf(rig: &Rig, file: &File, at: u64) -> Result<Region, i32> {
    let base_addr = at as *mut c_void;
    let dmabuf = fi::fi_mr_dmabuf { fd: file.as_raw_fd(), offset: 0, len: BYTES, base_addr };
    let attr = fi::fi_mr_attr {
        __bindgen_anon_1: fi::fi_mr_attr__bindgen_ty_1 { dmabuf: &raw const dmabuf },
        iov_count: 1,
        access: ALL,
        iface: fi::fi_hmem_iface::FI_HMEM_CUDA,
        ..fi::fi_mr_attr::default()
    };
    rig.register_with(&attr, fi::FI_MR_DMABUF)
}

/// Returns this process's rights to an address's page.
fn rights(address: u64) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let bounds =
        |line: &str| line.split(' ').next().and_then(|range| range.split_once('-')).map(|(a, b)| hex(a)..hex(b));
    let line = maps.lines().find(|line| bounds(line).is_some_and(|range| range.contains(&address)));
    line.and_then(|line| line.split(' ').nth(1)).unwrap_or("none").into()
}

/// Writes from the first region to the second one, both registered with the card.
fn transfer(rig: &Rig, from: (u64, &Region), to: (u64, &Region)) {
    let (mut a, b) = (End::open(rig), End::open(rig));
    let destination = a.connect(&b.name());
    let remote = RemoteMem { addr: to.0, rkey: to.1.rkey };
    a.post(destination, write(remote, Sge { addr: from.0, length: BYTES as u32, lkey: from.1.lkey }));
    a.ring();
    a.wait_done(1);
    assert_eq!(a.errors(), 0);
}

/// The values of counters in GPU memory, through the driver and through libfabric.
#[test]
fn counters_count_in_gpu_memory() {
    let name = "counters_count_in_gpu_memory";
    let Some(library) = ferrogin_test_support::software_gpu(name) else { return };
    for access in ["yes", "no"] {
        let settings =
            [("LD_LIBRARY_PATH", &*library), ("SOFTGPU_CPU_ACCESS", access), ("SOFTEFA_FAULTS", "cntr_start=5")];
        run(name, &settings, || {
            let driver = Driver::open();
            let rig = Rig::of(getinfo(|hints| hints.caps = fi::FI_RMA | fi::FI_HMEM).unwrap());
            let at = driver.allocate(0xff);
            let file = driver.export(at);
            let location = |offset| {
                let dmabuf = fi::fi_efa_memory_location__bindgen_ty_1 { offset, fd: file.as_raw_fd(), reserved: 0 };
                fi::fi_efa_memory_location { dmabuf, type_: 1, ..Default::default() }
            };
            let mut init = fi::fi_efa_comp_cntr_init_attr {
                flags: 3,
                comp_cntr_ext_mem: location(4096),
                err_cntr_ext_mem: location(8192 + 8),
                ..Default::default()
            };
            let cntr = rig.counter(&mut init);
            let word = |offset: usize| u64::from_ne_bytes(driver.read(at)[offset..offset + 8].try_into().unwrap());
            assert_eq!([word(4096), word(8200), word(4104)], [5, 0, u64::MAX]);
            let of_fabric = |cntr: *mut fi::fid_cntr| unsafe { ((*(*cntr).ops).read.unwrap())(cntr) };
            for (added, value) in [(1, 6), (2, 8)] {
                assert_eq!(unsafe { ((*(*cntr).ops).add.unwrap())(cntr, added) }, 0);
                assert_eq!((word(4096), of_fabric(cntr)), (value, value));
            }
            assert_eq!(unsafe { ((*(*cntr).ops).seterr.unwrap())(cntr, 77) }, 0);
            assert_eq!([word(4096), word(8200), word(4104)], [8, 77, u64::MAX]);
            assert_eq!(close(cntr), 0);
        });
    }
}

#[test]
fn gpu_memory_is_written_by_each_registration() {
    let name = "gpu_memory_is_written_by_each_registration";
    let Some(library) = ferrogin_test_support::software_gpu(name) else { return };
    // The CPU cannot access the memory, so only the driver's copies reach it.
    let errors = run(name, &[("LD_LIBRARY_PATH", &*library), ("SOFTGPU_CPU_ACCESS", "no")], || {
        let driver = Driver::open();
        assert_eq!(rights(driver.allocate(0)), "---p");
        let rig = Rig::of(getinfo(|hints| hints.caps = fi::FI_RMA | fi::FI_HMEM).unwrap());
        const NAME: u64 = 0x7000_0000;
        for way in ["address", "dma-buf", "dma-buf with another name"] {
            let (source, target) = (driver.allocate(0x5c), driver.allocate(0));
            let from = by_address(&rig, source).expect("the source");
            let file = driver.export(target);
            let (name, to) = match way {
                "address" => (target, by_address(&rig, target)),
                "dma-buf" => (target, by_dmabuf(&rig, &file, target)),
                _ => (NAME, by_dmabuf(&rig, &file, NAME)),
            };
            let to = to.expect(way);
            transfer(&rig, (source, &from), (name, &to));
            assert!(driver.read(target).iter().all(|byte| *byte == 0x5c), "{way}");
        }
        // A file that the driver has not exported, and an address that is no GPU's: it cannot be mapped, and the driver
        // cannot copy.
        let file = nix::sys::memfd::memfd_create("unknown", nix::sys::memfd::MFdFlags::empty()).unwrap();
        let file = File::options().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        file.set_len(BYTES as u64).unwrap();
        assert_eq!(by_dmabuf(&rig, &file, 4096).err(), Some(-libc::EACCES));
    });
    if let Some(errors) = errors {
        for part in ["the CPU cannot map a dma-buf", "are not allocated memory of one GPU"] {
            assert!(errors.contains(part), "{part:?} in {errors}");
        }
    }
}
