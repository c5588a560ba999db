//! What destroyContext and closeColl promise: what kernels have posted arrives, though they are called right after the
//! posts.

#![allow(unsafe_code)]

use crate::harness::{alone, alone_each, config, device, gpu_memory, ranks, software_gpu, window};
use cudarc::driver::sys as cu;
use ferrogin_device::{Action, Flags, Window as DeviceWindow};
use ferrogin_ffi::nccl::{self, GinConfigV14};
use mini_nccl::{Comm, DeviceMemory, GinContext};
use std::ffi::{CString, c_void};
use std::ptr::null_mut;

/// Posts a value with a signal on each of three contexts, with and without a deferred doorbell.
fn post(comm: &Comm, by_communicator: bool, round: u64) {
    let (memory, window) = window(comm, 4096);
    let context = comm.create_context(&GinConfigV14 { n_contexts: 3, ..config(1, 0) }).expect("contexts");
    for id in 0..3 {
        let gin = device(&context, id);
        let at = 8 * u64::from(id);
        if comm.rank() == 0 {
            let to = DeviceWindow(window.gin_handle()).at(at);
            let flags = if id == 1 { Flags::NONE } else { Flags::AGGREGATE };
            gin.put_value(1, to, round, 8, Action::signal_inc(0), flags).expect("a post");
        }
    }
    if comm.rank() == 1 {
        for id in 0..3 {
            device(&context, id).wait_signal(0, 1).expect("the signal");
            assert_eq!(memory.load(8 * id as usize), round);
        }
    }
    if by_communicator { context.abandon() } else { context.destroy().expect("destroyed") }
}

#[test]
fn posts_arrive_though_nccl_closes_at_once() {
    let test = "posts_arrive_though_nccl_closes_at_once";
    let faults = ("SOFTEFA_FAULTS", "close_drops,reorder=64,delay_us=50..100");
    let emulated = ("FERROGIN_SIGNALS", "emulated");
    let locked = ("FERROGIN_POST", "locked");
    alone_each(test, &[vec![faults], vec![faults, emulated], vec![faults, locked]], |plugin| {
        for by_communicator in [false, true] {
            for round in 1..=5 {
                ranks(&plugin, 2, move |_, comm| post(&comm, by_communicator, round));
            }
        }
    });
}

/// NCCL's threads may ask for errors while another one destroys the context.
#[test]
fn handle_is_known_until_the_posts_have_arrived() {
    let test = "handle_is_known_until_the_posts_have_arrived";
    alone(test, &[("SOFTEFA_FAULTS", "delay_us=200000..300000")], |plugin| {
        let query = plugin.raw_table().and_then(|table| table.query_last_error).expect("queryLastError");
        ranks(&plugin, 1, move |_, comm| {
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(0, 0)).expect("a context");
            let to = DeviceWindow(window.gin_handle()).at(0);
            device(&context, 0).put_value(0, to, 7, 8, Action::NONE, Flags::AGGREGATE).expect("a post");
            let handle = context.gin_ctx() as usize;
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut failed = 0;
                    // SAFETY: any number may be passed as a handle, and the plugin writes one byte into a local
                    // variable.
                    while unsafe { query(handle as *mut _, &mut failed) } == nccl::SUCCESS {
                        assert_eq!(failed, 0);
                        std::thread::yield_now();
                    }
                    assert_eq!(memory.load(0), 7, "the handle was closed before the post arrived");
                });
                context.destroy().expect("destroyed");
            });
        });
    });
}

macro_rules! cuda {
    ($function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the driver is loaded, every pointer points to a live variable of the type that the call takes, and
        // every handle came from the driver.
        let result = unsafe { cu::$function($($arg),*) };
        assert_eq!(result, cu::CUresult::CUDA_SUCCESS, "{}", stringify!($function));
    }};
}

/// Threads of a kernel that posts.
const THREADS: usize = 8;

/// Runs the kernel of `deferred.ptx`, and checks the status of each thread.
fn post_deferred(context: &GinContext, window: DeviceWindow, results: &DeviceMemory) {
    let (mut gpu, mut link, mut image, mut size) = (null_mut(), null_mut(), null_mut(), 0);
    let (mut module, mut kernel) = (null_mut(), null_mut());
    cuda!(cuDevicePrimaryCtxRetain(&mut gpu, 0));
    cuda!(cuCtxSetCurrent(gpu));
    cuda!(cuLinkCreate_v2(0, null_mut(), null_mut(), &mut link));
    for text in [include_str!("../../../device-kernels/ptx/ferrogin_device.ptx"), include_str!("../deferred.ptx")] {
        let (text, kind) = (CString::new(text).expect("text"), cu::CUjitInputType::CU_JIT_INPUT_PTX);
        let bytes = text.as_bytes_with_nul();
        let data = bytes.as_ptr().cast_mut().cast();
        cuda!(cuLinkAddData_v2(link, kind, data, bytes.len(), c"a module".as_ptr(), 0, null_mut(), null_mut()));
    }
    cuda!(cuLinkComplete(link, &mut image, &mut size));
    cuda!(cuModuleLoadData(&mut module, image));
    cuda!(cuLinkDestroy(link));
    cuda!(cuModuleGetFunction(&mut kernel, module, c"deferred".as_ptr()));
    let mut values = [context.handle() as u64, window.0 as u64, results.as_ptr() as u64];
    let mut parameters = values.each_mut().map(|value| (&raw mut *value).cast::<c_void>());
    let parameters = parameters.as_mut_ptr();
    results.write(0, &[0xff; 16 * THREADS]);
    cuda!(cuLaunchKernel(kernel, 1, 1, 1, THREADS as u32, 1, 1, 0, null_mut(), parameters, null_mut()));
    cuda!(cuCtxSynchronize());
    for thread in 0..THREADS {
        let mut status = [0; 4];
        results.read(16 * thread + 8, &mut status);
        assert_eq!(u32::from_le_bytes(status), 0, "the status of thread {thread}");
    }
    cuda!(cuModuleUnload(module));
    cuda!(cuDevicePrimaryCtxRelease_v2(0));
}

#[test]
fn posts_that_a_kernel_deferred_arrive_though_nccl_closes_at_once() {
    let test = "posts_that_a_kernel_deferred_arrive_though_nccl_closes_at_once";
    let Some(path) = software_gpu(test) else { return };
    let usual = [
        ("FERROGIN_DEVICE", "cuda"),
        ("LD_LIBRARY_PATH", &*path),
        ("SOFTEFA_FAULTS", "close_drops,reorder=64,delay_us=50..100"),
    ];
    let emulated = [usual.as_slice(), &[("FERROGIN_SIGNALS", "emulated")]].concat();
    alone_each(test, &[usual.to_vec(), emulated], |plugin| {
        for by_communicator in [false, true] {
            ranks(&plugin, 2, move |rank, comm| {
                let (memory, results) = (gpu_memory(0, 4096), gpu_memory(0, 4096));
                let window = comm.register(&memory, 0).expect("a window");
                let context = comm.create_context(&config(2, 0)).expect("a context");
                if rank == 0 {
                    post_deferred(&context, DeviceWindow(window.gin_handle()), &results);
                } else {
                    let device = device(&context, 0);
                    (0..2).for_each(|id| device.wait_signal(id, THREADS as u64).expect("the signals"));
                    for thread in 0..THREADS {
                        let mut value = [0; 8];
                        memory.read(8 * thread, &mut value);
                        assert_eq!(u64::from_le_bytes(value), 8 * thread as u64 + 1);
                    }
                }
                if by_communicator { context.abandon() } else { context.destroy().expect("destroyed") }
            });
        }
    });
}
