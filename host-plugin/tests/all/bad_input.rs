//! Invalid calls to the C ABI: each returns an error code and writes one WARN line.
#![allow(unsafe_code)]

use crate::harness::{alone, device_memory};
use ferrogin_ffi::nccl::{self, GinConfigV14, GinPropertiesV14, GinV14, HANDLE_MAXSIZE, NetPropertiesV12};
use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// WARN lines since the test started in its child process.
static WARNINGS: Mutex<usize> = Mutex::new(0);

/// A logger that counts WARN lines. NCCL's logger is variadic, but this one only reads the level.
unsafe extern "C" fn count_warnings(level: c_int, _: c_ulong, _: *const c_char, _: c_int, _: *const c_char) {
    if level == nccl::LOG_WARN {
        *WARNINGS.lock().expect("a count") += 1;
    }
}

fn logger() -> nccl::DebugLogger {
    // SAFETY: on the ABIs of NCCL's platforms, a variadic call passes its fixed arguments like any other call.
    Some(unsafe {
        std::mem::transmute::<
            unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char),
            unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...),
        >(count_warnings)
    })
}

/// The plugin's function table.
struct Table(GinV14);

macro_rules! call {
    ($table:expr, $entry:ident ( $($arg:expr),* $(,)? )) => {{
        let entry = $table.0.$entry.expect(stringify!($entry));
        // SAFETY: every pointer is NULL or valid, and the test shows that the plugin checks all other arguments.
        unsafe { entry($($arg),*) }
    }};
}

/// Asserts that a call returns one of the `expected` codes and writes one WARN line.
macro_rules! refused {
    ($expected:expr, $table:expr, $entry:ident ( $($arg:expr),* $(,)? )) => {{
        let before = *WARNINGS.lock().expect("a count");
        let code = call!($table, $entry($($arg),*));
        assert!($expected.contains(&code), "{}({}) = {code}", stringify!($entry), stringify!($($arg),*));
        let lines = *WARNINGS.lock().expect("a count") - before;
        assert_eq!(lines, 1, "warnings of {}({})", stringify!($entry), stringify!($($arg),*));
    }};
}

const ARGUMENT: &[c_int] = &[nccl::INVALID_ARGUMENT];
const ARGUMENT_OR_USAGE: &[c_int] = &[nccl::INVALID_ARGUMENT, nccl::INVALID_USAGE];

fn config() -> GinConfigV14 {
    GinConfigV14 { n_signals: 1, n_contexts: 1, queue_depth: 16, traffic_class: -1, ..Default::default() }
}

#[test]
fn wrong_calls_are_refused() {
    alone("wrong_calls_are_refused", &[("FERROGIN_TIMEOUT", "2")], |plugin| {
        make_wrong_calls(&Table(plugin.raw_table().expect("a v14 table")));
    });
}

fn make_wrong_calls(table: &Table) {
    let mut out: *mut c_void = null_mut();
    let mut count = 0;
    let mut properties = std::mem::MaybeUninit::<NetPropertiesV12>::zeroed();

    // Before init the plugin has no logger: its lines go to standard error.
    assert_ne!(call!(table, devices(&mut count)), nccl::SUCCESS);
    assert_ne!(call!(table, get_properties(0, properties.as_mut_ptr())), nccl::SUCCESS);
    // SAFETY: no other thread accesses the environment: the plugin starts threads in connect at the earliest.
    unsafe { std::env::set_var("FERROGIN_POST", "sometimes") };
    refused!(&[nccl::INVALID_USAGE], table, init(&mut out, 1, logger()));
    assert!(out.is_null());
    // SAFETY: no other thread accesses the environment: the plugin starts threads in connect at the earliest.
    unsafe { std::env::remove_var("FERROGIN_POST") };
    refused!(ARGUMENT, table, init(null_mut(), 1, logger()));

    let mut ctx = null_mut();
    assert_eq!(call!(table, init(&mut ctx, 1, logger())), nccl::SUCCESS);
    refused!(ARGUMENT, table, devices(null_mut()));
    assert_eq!(call!(table, devices(&mut count)), nccl::SUCCESS);
    assert_eq!(count, 1);
    refused!(ARGUMENT, table, get_gin_properties(null_mut()));
    let mut gin = GinPropertiesV14 { supports_strong_signals: 7, supports_va_signals: 7 };
    assert_eq!(call!(table, get_gin_properties(&mut gin)), nccl::SUCCESS);
    assert_eq!((gin.supports_strong_signals, gin.supports_va_signals), (0, 0));
    refused!(ARGUMENT, table, get_properties(0, null_mut()));
    for device in [-1, 1, i32::MAX] {
        refused!(ARGUMENT, table, get_properties(device, properties.as_mut_ptr()));
    }

    let mut handle = [0u8; HANDLE_MAXSIZE];
    let handle_at: *mut c_void = handle.as_mut_ptr().cast();
    let mut listen = null_mut();
    refused!(ARGUMENT, table, listen(null_mut(), 0, handle_at, &mut listen));
    refused!(ARGUMENT, table, listen(handle_at, 0, handle_at, &mut listen));
    refused!(ARGUMENT, table, listen(ctx, 1, handle_at, &mut listen));
    refused!(ARGUMENT, table, listen(ctx, 0, null_mut(), &mut listen));
    refused!(ARGUMENT, table, listen(ctx, 0, handle_at, null_mut()));
    assert_eq!(call!(table, listen(ctx, 0, handle_at, &mut listen)), nccl::SUCCESS);

    let mut handles = [handle_at];
    let handles_at = handles.as_mut_ptr();
    let mut coll = null_mut();
    refused!(ARGUMENT, table, connect(null_mut(), handles_at, 1, 0, listen, &mut coll));
    refused!(ARGUMENT, table, connect(ctx, null_mut(), 1, 0, listen, &mut coll));
    refused!(ARGUMENT, table, connect(ctx, handles_at, 1, 0, null_mut(), &mut coll));
    refused!(ARGUMENT, table, connect(ctx, handles_at, 1, 0, ctx, &mut coll));
    refused!(ARGUMENT, table, connect(ctx, handles_at, 1, 0, listen, null_mut()));
    for (nranks, rank) in [(0, 0), (-1, 0), (1, 1), (1, -1), (i32::MAX, 0)] {
        refused!(ARGUMENT, table, connect(ctx, handles_at, nranks, rank, listen, &mut coll));
    }
    assert!(coll.is_null());
    assert_eq!(call!(table, connect(ctx, handles_at, 1, 0, listen, &mut coll)), nccl::SUCCESS);
    assert_eq!(call!(table, close_listen(listen)), nccl::SUCCESS);
    refused!(ARGUMENT, table, close_listen(listen));
    refused!(ARGUMENT, table, connect(ctx, handles_at, 1, 0, listen, &mut out));

    let memory = device_memory(65536);
    let data = memory.as_ptr();
    let (mut mhandle, mut window) = (null_mut(), null_mut());
    let (m, w) = (&raw mut mhandle, &raw mut window);
    refused!(ARGUMENT, table, reg_mr_sym(null_mut(), data, 4096, nccl::PTR_CUDA, 0, m, w));
    refused!(ARGUMENT, table, reg_mr_sym(ctx, data, 4096, nccl::PTR_CUDA, 0, m, w));
    refused!(ARGUMENT, table, reg_mr_sym(coll, null_mut(), 4096, nccl::PTR_CUDA, 0, m, w));
    refused!(ARGUMENT, table, reg_mr_sym(coll, data, 0, nccl::PTR_CUDA, 0, m, w));
    refused!(ARGUMENT, table, reg_mr_sym(coll, data, 1 << 63, nccl::PTR_CUDA, 0, m, w));
    refused!(ARGUMENT, table, reg_mr_sym(coll, data, usize::MAX, nccl::PTR_CUDA, 0, m, w));
    refused!(ARGUMENT, table, reg_mr_sym(coll, data, 1 << 46, nccl::PTR_HOST, 0, m, w));
    refused!(ARGUMENT, table, reg_mr_sym(coll, 4096 as *mut c_void, 4096, nccl::PTR_CUDA, 0, m, w));
    refused!(ARGUMENT, table, reg_mr_sym(coll, data, 4096, 99, 0, m, w));
    refused!(ARGUMENT, table, reg_mr_sym(coll, data, 4096, nccl::PTR_CUDA, 0, null_mut(), w));
    refused!(ARGUMENT, table, reg_mr_sym(coll, data, 4096, nccl::PTR_CUDA, 0, m, null_mut()));
    for fd in [-1, 9999, i32::MAX] {
        refused!(ARGUMENT, table, reg_mr_sym_dma_buf(coll, data, 4096, nccl::PTR_CUDA, 0, fd, 0, m, w));
    }
    assert!(mhandle.is_null() && window.is_null());
    assert_eq!(call!(table, reg_mr_sym(coll, data, 4096, nccl::PTR_CUDA, 0, m, w)), nccl::SUCCESS);
    refused!(ARGUMENT, table, dereg_mr_sym(null_mut(), mhandle));
    refused!(ARGUMENT, table, dereg_mr_sym(coll, null_mut()));
    refused!(ARGUMENT, table, dereg_mr_sym(coll, data));
    refused!(ARGUMENT, table, dereg_mr_sym(coll, window));
    assert_eq!(call!(table, dereg_mr_sym(coll, mhandle)), nccl::SUCCESS);
    refused!(ARGUMENT, table, dereg_mr_sym(coll, mhandle));

    let (mut gin_ctx, mut dev) = (null_mut(), null_mut());
    let (g, d) = (&raw mut gin_ctx, &raw mut dev);
    let mut good = config();
    refused!(ARGUMENT, table, create_context(null_mut(), &mut good, g, d));
    refused!(ARGUMENT, table, create_context(coll, null_mut(), g, d));
    refused!(ARGUMENT, table, create_context(coll, &mut good, null_mut(), d));
    refused!(ARGUMENT, table, create_context(coll, &mut good, g, null_mut()));
    for mut bad in [
        GinConfigV14 { n_signals: -1, ..config() },
        GinConfigV14 { n_counters: -5, ..config() },
        GinConfigV14 { n_contexts: -1, ..config() },
        GinConfigV14 { n_contexts: i32::MAX, ..config() },
        GinConfigV14 { queue_depth: -1, ..config() },
        GinConfigV14 { backend_version: 99, ..config() },
    ] {
        refused!(ARGUMENT_OR_USAGE, table, create_context(coll, &mut bad, g, d));
    }
    assert!(gin_ctx.is_null() && dev.is_null());
    assert_eq!(call!(table, create_context(coll, &mut good, g, d)), nccl::SUCCESS);
    let mut failed = 7;
    assert_eq!(call!(table, query_last_error(gin_ctx, &mut failed)), nccl::SUCCESS);
    assert_eq!(failed, 0);
    refused!(ARGUMENT, table, query_last_error(gin_ctx, null_mut()));
    refused!(ARGUMENT, table, query_last_error(coll, &mut failed));
    assert_eq!(call!(table, gin_progress(gin_ctx)), nccl::SUCCESS);
    refused!(ARGUMENT, table, gin_progress(null_mut()));
    assert_eq!(call!(table, destroy_context(gin_ctx)), nccl::SUCCESS);
    refused!(ARGUMENT, table, destroy_context(gin_ctx));
    refused!(ARGUMENT, table, query_last_error(gin_ctx, &mut failed));

    assert_eq!(call!(table, close_coll(coll)), nccl::SUCCESS);
    refused!(ARGUMENT, table, close_coll(coll));
    refused!(ARGUMENT, table, create_context(coll, &mut good, g, d));

    // A peer listens and never connects: the call fails at the deadline.
    let mut other_handle = [0u8; HANDLE_MAXSIZE];
    let other_at: *mut c_void = other_handle.as_mut_ptr().cast();
    let (mut one, mut other) = (null_mut(), null_mut());
    assert_eq!(call!(table, listen(ctx, 0, handle_at, &mut one)), nccl::SUCCESS);
    assert_eq!(call!(table, listen(ctx, 0, other_at, &mut other)), nccl::SUCCESS);
    let mut both = [handle_at, other_at];
    let started = Instant::now();
    refused!(&[nccl::REMOTE_ERROR], table, connect(ctx, both.as_mut_ptr(), 2, 0, one, &mut coll));
    assert!(started.elapsed() >= Duration::from_secs(1), "a peer may be late");
    // Another plugin's bytes.
    let mut garbage = [0xa5u8; HANDLE_MAXSIZE];
    both[0] = garbage.as_mut_ptr().cast();
    refused!(ARGUMENT, table, connect(ctx, both.as_mut_ptr(), 2, 1, other, &mut coll));
    assert_eq!(call!(table, close_listen(one)), nccl::SUCCESS);
    assert_eq!(call!(table, close_listen(other)), nccl::SUCCESS);

    assert_eq!(call!(table, finalize(ctx)), nccl::SUCCESS);
    refused!(ARGUMENT, table, finalize(ctx));
    refused!(ARGUMENT, table, listen(ctx, 0, handle_at, &mut listen));
    refused!(&[nccl::INVALID_USAGE], table, devices(&mut count));
    drop(memory);
}
