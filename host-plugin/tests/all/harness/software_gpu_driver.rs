//! The software GPU's own functions, in a process that uses it.
#![allow(unsafe_code)]

use libloading::Library;

/// `CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED`.
pub const ATOMIC_REDUCTION_SUPPORTED: i32 = 148;

fn driver() -> Library {
    // SAFETY: the software GPU's initialisers have no conditions.
    unsafe { Library::new("libcuda.so.1") }.expect("the software GPU")
}

/// Sets an attribute of the devices.
pub fn set_attribute(number: i32, value: i32) {
    let driver = driver();
    // SAFETY: the driver defines the function with this type.
    let start = unsafe { driver.get::<unsafe extern "C" fn(u32) -> i32>(b"cuInit\0") }.expect("a driver");
    // SAFETY: as above.
    let set = unsafe { driver.get::<unsafe extern "C" fn(i32, i32) -> i32>(b"cuSoftGpuSetAttribute\0") };
    // SAFETY: the functions take numbers.
    assert_eq!(unsafe { start(0) } | unsafe { set.expect("the software GPU")(number, value) }, 0);
}

/// Returns whether an address is in a GPU's memory.
pub fn is_gpu_memory(address: u64) -> bool {
    const MEMORY_TYPE: i32 = 2;
    let (driver, mut kind) = (driver(), 0u32);
    type Attribute = unsafe extern "C" fn(*mut u32, i32, u64) -> i32;
    // SAFETY: cuda.h declares the function with this type, for this attribute.
    let get = unsafe { driver.get::<Attribute>(b"cuPointerGetAttribute\0") }.expect("a driver");
    // SAFETY: the function writes the local variable.
    let found = unsafe { get(&mut kind, MEMORY_TYPE, address) };
    found == 0 && kind == 2
}

/// Returns the number of cuFlushGPUDirectRDMAWrites calls, and of stream reductions since the last one.
pub fn flushes() -> (u64, u64) {
    let (driver, mut flushes, mut reduced) = (driver(), 0, 0);
    type Flushes = unsafe extern "C" fn(*mut u64, *mut u64) -> i32;
    // SAFETY: the driver defines the function with this type.
    let get = unsafe { driver.get::<Flushes>(b"cuSoftGpuFlushes\0") }.expect("the software GPU");
    // SAFETY: the function writes the two local variables.
    assert_eq!(unsafe { get(&mut flushes, &mut reduced) }, 0);
    (flushes, reduced)
}
