//! On machines with a GPU, the CUDA driver links the PTX that the tool prints with a kernel, and runs the kernel.
#![allow(unsafe_code)]

use cudarc::driver::sys;
use std::ffi::{CString, c_uint, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr::null_mut;

/// FGIN_INVALID_ARGUMENT.
const REFUSED: u32 = 1;

macro_rules! cuda {
    ($function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the driver is loaded, and every pointer points to a live variable of the type that the call takes.
        let result = unsafe { sys::$function($($arg),*) };
        assert_eq!(result, sys::CUresult::CUDA_SUCCESS, "{}", stringify!($function));
    }};
}

/// Returns whether the machine has a CUDA driver and a GPU.
fn has_gpu() -> bool {
    // SAFETY: the call loads NVIDIA's driver library, whose initialisers any process may run.
    if !unsafe { sys::is_culib_present() } {
        return false;
    }
    let mut count = 0;
    // SAFETY: cuInit takes no pointers; 0 is its only valid argument.
    let ready = unsafe { sys::cuInit(0) } == sys::CUresult::CUDA_SUCCESS;
    // SAFETY: the driver writes one int into a local variable.
    ready && unsafe { sys::cuDeviceGetCount(&mut count) } == sys::CUresult::CUDA_SUCCESS && count > 0
}

#[test]
fn driver_links_and_runs_ptx_with_kernel() {
    if !has_gpu() {
        ferrogin_test_support::skip("the PTX on a GPU", "this machine has no GPU");
        return;
    }
    let (mut device, mut context) = (0, null_mut());
    cuda!(cuDeviceGet(&mut device, 0));
    cuda!(cuDevicePrimaryCtxRetain(&mut context, device));
    cuda!(cuCtxSetCurrent(context));

    let output = Command::new(env!("CARGO_BIN_EXE_ferrogin")).arg("ptx").output().unwrap();
    let module = CString::new(output.stdout).unwrap();
    let kernel = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/refuse.ptx");
    let kernel = CString::new(std::fs::read(kernel).unwrap()).unwrap();

    let mut link = null_mut();
    cuda!(cuLinkCreate_v2(0, null_mut(), null_mut(), &mut link));
    for (text, name) in [(&kernel, c"refuse"), (&module, c"ferrogin_device")] {
        let bytes = text.as_bytes_with_nul();
        let kind = sys::CUjitInputType::CU_JIT_INPUT_PTX;
        let data = bytes.as_ptr().cast_mut().cast::<c_void>();
        cuda!(cuLinkAddData_v2(link, kind, data, bytes.len(), name.as_ptr(), 0, null_mut(), null_mut()));
    }
    let (mut image, mut size, mut loaded, mut function) = (null_mut(), 0, null_mut(), null_mut());
    cuda!(cuLinkComplete(link, &mut image, &mut size));
    cuda!(cuModuleLoadData(&mut loaded, image));
    cuda!(cuLinkDestroy(link));
    cuda!(cuModuleGetFunction(&mut function, loaded, c"refuse".as_ptr()));

    let (mut out, mut status): (sys::CUdeviceptr, u32) = (0, u32::MAX);
    cuda!(cuMemAlloc_v2(&mut out, size_of::<u32>()));
    let mut parameters = [(&raw mut out).cast::<c_void>()];
    let one: c_uint = 1;
    cuda!(cuLaunchKernel(function, one, one, one, one, one, one, 0, null_mut(), parameters.as_mut_ptr(), null_mut()));
    cuda!(cuCtxSynchronize());
    cuda!(cuMemcpyDtoH_v2((&raw mut status).cast(), out, size_of::<u32>()));
    assert_eq!(status, REFUSED);
    cuda!(cuMemFree_v2(out));
    cuda!(cuModuleUnload(loaded));
    cuda!(cuDevicePrimaryCtxRelease_v2(device));
}
