//! Bad input to the C functions: each gives an error with cause and fix, and no call hangs or changes the communicator.
#![allow(unsafe_code)]

use crate::common::{alone, ranks};
use ferrogin::bootstrap::Bootstrap;
use ferrogin::capi::*;
use ferrogin::device::{Action, Flags};
use ferrogin::{Comm, ContextOptions, Memory, Options, Status};
use ferrogin_test_support::wait::{HANG_LIMIT, wait_for, wait_until};
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::{null, null_mut};

const ARGUMENT: c_int = Status::InvalidArgument as c_int;
const USAGE: c_int = Status::InvalidUsage as c_int;
const SYSTEM: c_int = Status::System as c_int;
const REMOTE: c_int = Status::Remote as c_int;
const HOST: u32 = Memory::Host as u32;

fn last_error() -> String {
    // SAFETY: the library's string lives until the next error of this thread.
    unsafe { CStr::from_ptr(ferrogin_error()) }.to_str().expect("UTF-8").to_owned()
}

/// Checks a failed call's code and text.
fn refused(name: &str, code: c_int, (expected, text): (c_int, &str)) {
    let error = last_error();
    assert!(code == expected && error.contains(text), "{name} returned {code}, not {expected} with {text:?}: {error}");
}

/// Checks that each call with invalid arguments returns an error, and no handle in `$out`.
macro_rules! refuse {
    ($out:ident; $($name:literal => $call:expr => $status:expr, $text:literal;)*) => {
        $(
            // SAFETY: pointers are null, misaligned, or valid for what the library accepts; the library looks handles
            // up.
            let code = unsafe { $call };
            refused($name, code, ($status, $text));
            assert!($out.is_null(), "{}: a handle after an error", $name);
        )*
    };
}

/// Serves as the allgather of a single rank.
unsafe extern "C" fn copy(_: *mut c_void, own: *const c_void, all: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the library passes `bytes` bytes at both addresses, which don't overlap.
    unsafe { std::ptr::copy_nonoverlapping(own.cast::<u8>(), all.cast::<u8>(), bytes) };
    0
}

unsafe extern "C" fn fail(_: *mut c_void, _: *const c_void, _: *mut c_void, _: usize) -> c_int {
    7
}

unsafe extern "C" fn forget(_: *mut c_void, _: *const c_void, _: *mut c_void, _: usize) -> c_int {
    0
}

/// Opens a communicator with one rank.
fn single() -> *mut c_void {
    let mut comm = null_mut();
    // SAFETY: the pointers are valid.
    let code = unsafe { ferrogin_open(0, 1, Some(copy), null_mut(), null(), &mut comm) };
    assert_eq!(code, 0, "{}", last_error());
    comm
}

#[test]
fn invalid_arguments_of_open_are_refused() {
    alone("invalid_arguments_of_open_are_refused", &[], || {
        let mut out = null_mut();
        let sized = |size, card| COptions { size, card, reserved: 0 };
        let newer = [48u64, 0, 0, 0, 0, 1];
        refuse! { out;
            "rank 2 of 2" => ferrogin_open(2, 2, Some(copy), null_mut(), null(), &mut out) => ARGUMENT, "rank 2 is not one of 2 ranks";
            "0 ranks" => ferrogin_open(0, 0, Some(copy), null_mut(), null(), &mut out) => ARGUMENT, "rank 0 is not one of 0 ranks";
            "2^32 - 1 ranks" => ferrogin_open(0, u32::MAX, Some(copy), null_mut(), null(), &mut out) => ARGUMENT, "at most 1048576";
            "no callback" => ferrogin_open(0, 1, None, null_mut(), null(), &mut out) => ARGUMENT, "the pointer allgather is NULL";
            "no output" => ferrogin_open(0, 1, Some(copy), null_mut(), null(), null_mut()) => ARGUMENT, "the pointer out is NULL";
            "failed callback" => ferrogin_open(0, 1, Some(fail), null_mut(), null(), &mut out) => REMOTE, "the function returned 7";
            "lazy callback" => ferrogin_open(0, 1, Some(forget), null_mut(), null(), &mut out) => REMOTE, "no valid block of rank 0";
            "size 0" => ferrogin_open(0, 1, Some(copy), null_mut(), &sized(0, 0), &mut out) => ARGUMENT, "options->size is 0";
            "size 2^40" => ferrogin_open(0, 1, Some(copy), null_mut(), &sized(1 << 40, 0), &mut out) => ARGUMENT, "options->size is 1099511627776";
            "newer options" => ferrogin_open(0, 1, Some(copy), null_mut(), newer.as_ptr().cast(), &mut out) => USAGE, "install the library that belongs";
            "misaligned options" => ferrogin_open(0, 1, Some(copy), null_mut(), (newer.as_ptr().addr() + 4) as *const _, &mut out) => ARGUMENT, "the pointer options";
            "card 9" => ferrogin_open(0, 1, Some(copy), null_mut(), &sized(16, 9), &mut out) => ARGUMENT, "card 9 does not exist: this machine has 1 (cards below one PCI switch count as one)";
            "no address" => ferrogin_open_at(null(), 0, 1, null(), &mut out) => ARGUMENT, "the pointer address is NULL";
            "address of other bytes" => ferrogin_open_at(c"\xff:1".as_ptr(), 0, 1, null(), &mut out) => ARGUMENT, "address is not UTF-8";
            "rank 3 of 2 at an address" => ferrogin_open_at(c"127.0.0.1:1".as_ptr(), 3, 2, null(), &mut out) => ARGUMENT, "rank 3 is not one of 2 ranks";
            "2^32 - 1 ranks at an address" => ferrogin_open_at(c"127.0.0.1:1".as_ptr(), 1, u32::MAX, null(), &mut out) => ARGUMENT, "at most 1048576";
            "address of another host" => ferrogin_open_at(c"192.0.2.1:7700".as_ptr(), 0, 2, null(), &mut out) => SYSTEM, "rank 0 cannot listen on 192.0.2.1:7700";
            "no launcher" => ferrogin_open_env(null(), &mut out) => USAGE, "set FERROGIN_RANK, FERROGIN_NRANKS";
        }
        // SAFETY: the handle is open.
        assert_eq!(unsafe { ferrogin_close(single()) }, 0);
    });
}

#[test]
fn missing_rank_is_named() {
    alone("missing_rank_is_named", &[("FERROGIN_TIMEOUT", "2")], || {
        let mut out = null_mut();
        let address = CString::new(format!("ferrogin-host-missing-{}", std::process::id())).expect("a name");
        refuse! { out;
            "nobody at the address" => ferrogin_open_at(c"127.0.0.1:1".as_ptr(), 1, 2, null(), &mut out) => SYSTEM, "rank 1 cannot connect to 127.0.0.1:1: Connection refused";
            "rank 1 is missing" => ferrogin_open_at(address.as_ptr(), 0, 2, null(), &mut out) => REMOTE, " for rank 1: see the log of that rank";
        }
    });
}

#[test]
fn invalid_arguments_of_a_communicator_are_refused_and_change_nothing() {
    alone(
        "invalid_arguments_of_a_communicator_are_refused_and_change_nothing",
        &[("SOFTEFA_FAULTS", "cntr_budget=64")],
        || {
            let comm = single();
            let (mut out, mut number) = (null_mut(), 0);
            let mut own = [0u8; 8192];
            let memory: *mut c_void = own.as_mut_ptr().cast();
            let file = std::fs::File::open("/dev/null").unwrap();
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            let with = |change: fn(&mut CContextOptions)| {
                let mut options = CContextOptions { size: 32, ..Default::default() };
                change(&mut options);
                options
            };
            refuse! { out;
                "allocation of 0 bytes" => ferrogin_window_allocate(comm, 0, HOST, &mut out) => ARGUMENT, "a window of 0 bytes";
                "allocation of 2^40 bytes" => ferrogin_window_allocate(comm, 1 << 40, HOST, &mut out) => ARGUMENT, "a window of 1099511627776 bytes cannot be allocated";
                "allocation of all bytes" => ferrogin_window_allocate(comm, usize::MAX, 2, &mut out) => ARGUMENT, "pass a smaller size";
                "allocation of no kind" => ferrogin_window_allocate(comm, 4096, 0, &mut out) => ARGUMENT, "memory kind 0 is unknown";
                "allocation of kind 3" => ferrogin_window_allocate(comm, 4096, 3, &mut out) => ARGUMENT, "memory kind 3 is unknown";
                "allocation without output" => ferrogin_window_allocate(comm, 4096, HOST, null_mut()) => ARGUMENT, "the pointer out is NULL";
                "registration of null" => ferrogin_window_register(comm, null_mut(), 4096, HOST, &mut out) => ARGUMENT, "the pointer data is NULL";
                "registration of 0 bytes" => ferrogin_window_register(comm, memory, 0, HOST, &mut out) => ARGUMENT, "the size must be above 0";
                "registration of 2^40 bytes" => ferrogin_window_register(comm, memory, 1 << 40, HOST, &mut out) => ARGUMENT, "are not mapped in this process";
                "registration of no memory" => ferrogin_window_register(comm, 4096 as *mut c_void, 8, HOST, &mut out) => ARGUMENT, "are not mapped in this process";
                "registration of all bytes" => ferrogin_window_register(comm, memory, usize::MAX, HOST, &mut out) => ARGUMENT, "within the address space";
                "registration of kind 9" => ferrogin_window_register(comm, memory, 4096, 9, &mut out) => ARGUMENT, "memory kind 9 is unknown";
                "dma-buf -1" => ferrogin_window_register_dma_buf(comm, memory, 4096, -1, 0, &mut out) => ARGUMENT, "file descriptor -1";
                "dma-buf that is closed" => ferrogin_window_register_dma_buf(comm, memory, 4096, 9999, 0, &mut out) => ARGUMENT, "file descriptor 9999";
                "dma-buf that is none" => ferrogin_window_register_dma_buf(comm, memory, 4096, fd, 0, &mut out) => SYSTEM, "registering 4096 bytes";
                "2^17 signals" => ferrogin_context_create(comm, &with(|o| o.signals = 1 << 17), &mut out) => ARGUMENT, "nSignals = 131072 is not between 0 and 65536";
                "2^31 counters" => ferrogin_context_create(comm, &with(|o| o.counters = 1 << 31), &mut out) => ARGUMENT, "counters = 2147483648 is above";
                "2^20 contexts" => ferrogin_context_create(comm, &with(|o| o.contexts = 1 << 20), &mut out) => ARGUMENT, "nContexts = 1048576";
                "depth of 2^31" => ferrogin_context_create(comm, &with(|o| o.depth = 1 << 31), &mut out) => ARGUMENT, "depth = 2147483648";
                "traffic class 256" => ferrogin_context_create(comm, &with(|o| o.traffic_class = 256), &mut out) => ARGUMENT, "traffic_class = 256 is not between 0 and 255";
                "more signals than the card has counters" => ferrogin_context_create(comm, &with(|o| o.signals = 60), &mut out) => SYSTEM, "request fewer signals";
                "options of size 8" => ferrogin_context_create(comm, &with(|o| o.size = 8), &mut out) => ARGUMENT, "options->size is 8";
                "no rank" => ferrogin_rank(comm, null_mut(), &mut number) => ARGUMENT, "the pointer rank is NULL";
                "no ranks" => ferrogin_rank(comm, &mut number, null_mut()) => ARGUMENT, "the pointer ranks is NULL";
            }

            // The communicator still works, and so does a struct from an older header.
            let older = CContextOptions { size: 16, contexts: 1, signals: 1, counters: 70, ..Default::default() };
            // SAFETY: the handle is open, and the pointers are valid.
            assert_eq!(unsafe { ferrogin_context_create(comm, &older, &mut out) }, 0, "{}", last_error());
            assert_eq!(ferrogin_barrier(comm), 0);
            // SAFETY: the handle is open, and no kernel runs.
            assert_eq!(unsafe { ferrogin_close(comm) }, 0);
        },
    );
}

#[test]
#[allow(clippy::multiple_unsafe_ops_per_block, reason = "each call in a table gets an invalid handle on purpose")]
fn closed_and_foreign_handles_are_refused_by_every_function() {
    alone("closed_and_foreign_handles_are_refused_by_every_function", &[], || {
        let (mut window, mut context, mut out) = (null_mut(), null_mut(), null_mut::<c_void>());
        let comm = single();
        // SAFETY: the handle is open, and the pointers are valid.
        unsafe {
            assert_eq!(ferrogin_window_allocate(comm, 4096, HOST, &mut window), 0);
            assert_eq!(ferrogin_context_create(comm, null(), &mut context), 0);
        }
        let every = |comm: *mut c_void, window: *mut c_void, context: *mut c_void, text: &str| {
            let (mut rank, mut ranks, mut bytes, mut out, mut gin) = (0, 0, 0, null_mut(), null());
            // SAFETY: the library looks handles up, and doesn't dereference them. The other pointers are valid.
            unsafe {
                refused("rank", ferrogin_rank(comm, &mut rank, &mut ranks), (ARGUMENT, text));
                refused("barrier", ferrogin_barrier(comm), (ARGUMENT, text));
                refused("allocate", ferrogin_window_allocate(comm, 4096, HOST, &mut out), (ARGUMENT, text));
                refused(
                    "register",
                    ferrogin_window_register(comm, (&raw mut rank).cast(), 4, HOST, &mut out),
                    (ARGUMENT, text),
                );
                refused(
                    "dma-buf",
                    ferrogin_window_register_dma_buf(comm, (&raw mut rank).cast(), 4, 0, 0, &mut out),
                    (ARGUMENT, text),
                );
                refused("create", ferrogin_context_create(comm, null(), &mut out), (ARGUMENT, text));
                refused("close", ferrogin_close(comm), (ARGUMENT, text));
                for pointer in [
                    ferrogin_window_handle(window),
                    ferrogin_window_address(window),
                    ferrogin_window_host_address(window),
                ] {
                    assert!(pointer.is_null());
                    refused("a pointer of the window", ARGUMENT, (ARGUMENT, text));
                }
                refused("size", ferrogin_window_size(window, 0, &mut bytes), (ARGUMENT, text));
                refused("free", ferrogin_window_free(window), (ARGUMENT, text));
                assert!(ferrogin_context_handle(context).is_null());
                refused("handle", ARGUMENT, (ARGUMENT, text));
                refused("device", ferrogin_context_device(context, 0, &mut gin), (ARGUMENT, text));
                assert!(gin.is_null());
                refused("check", ferrogin_context_check(context), (ARGUMENT, text));
                refused("destroy", ferrogin_context_destroy(context), (ARGUMENT, text));
            }
            assert!(out.is_null());
        };
        every(null_mut(), null_mut(), null_mut(), "is NULL");
        every((&raw mut out).cast(), (&raw mut out).cast(), (&raw mut out).cast(), "of this library: it was closed");
        every(window, context, comm, "but the call expects a");
        // Closing the communicator also closes its windows and contexts.
        // SAFETY: the handle is open.
        assert_eq!(unsafe { ferrogin_close(comm) }, 0);
        every(comm, window, context, "of this library: it was closed");
        // Two threads, whose own objects are in the closed ones' places.
        let closed = [comm, window, context].map(|handle| handle as usize);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let comm = single();
                    let (mut window, mut context) = (null_mut(), null_mut());
                    // SAFETY: the handle is open, and the pointers are valid.
                    let made = unsafe { ferrogin_window_allocate(comm, 4096, HOST, &mut window) };
                    // SAFETY: the handle is open, and the pointers are valid.
                    assert_eq!((made, unsafe { ferrogin_context_create(comm, null(), &mut context) }), (0, 0));
                    let [old_comm, old_window, old_context] = closed.map(|handle| handle as *mut c_void);
                    every(old_comm, old_window, old_context, "of this library: it was closed");
                    every(window, context, comm, "but the call expects a");
                    // SAFETY: the handle is open.
                    assert_eq!(unsafe { ferrogin_close(comm) }, 0);
                });
            }
        });
    });
}

/// Creates a window and a context of `comm`, and opens the context for this thread.
fn window_and_context(comm: *mut c_void) -> (*mut c_void, *mut c_void, ferrogin::device::Context<'static>) {
    let (mut window, mut context, mut gin) = (null_mut(), null_mut(), null());
    // SAFETY: the pointers are valid.
    assert_eq!(unsafe { ferrogin_window_allocate(comm, 4096, HOST, &mut window) }, 0, "{}", last_error());
    // SAFETY: the pointers are valid.
    assert_eq!(unsafe { ferrogin_context_create(comm, null(), &mut context) }, 0, "{}", last_error());
    // SAFETY: the pointer is valid.
    let code = unsafe { ferrogin_context_device(context, 1, &mut gin) };
    refused("context 1 of 1", code, (ARGUMENT, "context 1 does not exist"));
    assert!(gin.is_null());
    // SAFETY: the pointer is valid.
    assert_eq!(unsafe { ferrogin_context_device(context, 0, &mut gin) }, 0, "{}", last_error());
    // SAFETY: the tests use the context until they close the communicator.
    (window, context, unsafe { ferrogin::device::Context::from_ptr(gin) })
}

fn window_in_use_is_not_freed(test: &str, policy: &str) {
    alone(test, &[("SOFTEFA_FAULTS", "delay_us=200000..200000"), ("FERROGIN_POST", policy)], || {
        let comm = single();
        // On a busy machine, the first request may complete before the call. The second one waits for the flush.
        wait_for("a window with two requests", || {
            let (window, context, gin) = window_and_context(comm);
            let memory = ferrogin::device::Window(ferrogin_window_handle(window));
            gin.put_value(0, memory.at(0), 5, 8, Action::NONE, Flags::NONE).unwrap();
            gin.put_value(0, memory.at(8), 6, 8, Action::NONE, Flags::AGGREGATE).unwrap();
            // SAFETY: the window stays open.
            let code = unsafe { ferrogin_window_free(window) };
            refused("free", code, (USAGE, "outstanding. Flush the contexts"));
            let both = last_error().contains("have 2 requests outstanding");
            gin.flush().unwrap();
            // SAFETY: no kernel uses the window.
            assert_eq!(unsafe { ferrogin_window_free(window) }, 0, "{}", last_error());
            // SAFETY: no kernel uses the context.
            assert_eq!(unsafe { ferrogin_context_destroy(context) }, 0, "{}", last_error());
            both.then_some(())
        });
        // SAFETY: no kernel runs.
        assert_eq!(unsafe { ferrogin_close(comm) }, 0);
    });
}

#[test]
fn window_in_use_is_not_freed_with_policy_combining() {
    window_in_use_is_not_freed("window_in_use_is_not_freed_with_policy_combining", "combining");
}

#[test]
fn window_in_use_is_not_freed_with_policy_locked() {
    window_in_use_is_not_freed("window_in_use_is_not_freed_with_policy_locked", "locked");
}

#[test]
fn failed_context_is_reported_and_keeps_no_window() {
    alone("failed_context_is_reported_and_keeps_no_window", &[("SOFTEFA_FAULTS", "error_every=1")], || {
        let comm = single();
        let (window, context, gin) = window_and_context(comm);
        assert_eq!(ferrogin_context_check(context), 0);
        let memory = ferrogin::device::Window(ferrogin_window_handle(window));
        gin.put_value(0, memory.at(0), 5, 8, Action::NONE, Flags::NONE).unwrap();
        // The watcher may raise the abort flag before the flush reads the card's error.
        let flushed = gin.flush().unwrap_err();
        assert!(
            matches!(flushed, ferrogin::device::Status::CardError | ferrogin::device::Status::Aborted),
            "{flushed}"
        );
        wait_until("report of the failure", || ferrogin_context_check(context) != 0);
        refused("check", ferrogin_context_check(context), (USAGE, "a request of this context failed"));
        // SAFETY: no kernel uses the window.
        assert_eq!(unsafe { ferrogin_window_free(window) }, 0, "{}", last_error());
        // SAFETY: no kernel runs.
        assert_eq!(unsafe { ferrogin_close(comm) }, 0);
    });
}

#[test]
fn ranks_that_disagree_are_told_both_values() {
    alone("ranks_that_disagree_are_told_both_values", &[], || {
        // Each rank's number of ranks and card, and the resulting error.
        for (case, expected) in [
            (
                [(2, 0), (3, 0)],
                [
                    "rank 1 has a number of ranks of 3, but rank 0 has 2",
                    "it returned the blocks of 2 ranks to rank 1 of 3",
                ],
            ),
            (
                [(2, 0), (2, 5)],
                ["rank 1 failed in open: card 5 does not exist", "card 5 does not exist: this machine has 1"],
            ),
        ] {
            let members = Bootstrap::threads(2, HANG_LIMIT);
            std::thread::scope(|scope| {
                for (rank, member) in members.into_iter().enumerate() {
                    let ((n, card), expected) = (case[rank], expected[rank]);
                    scope.spawn(move || {
                        let open = Comm::open(rank, n, &Options { card }, |block| Ok(member.allgather(block)?));
                        let error = open.map(drop).unwrap_err().to_string();
                        assert!(error.contains(expected), "{error}");
                    });
                }
            });
        }
        let address = format!("ferrogin-host-disagree-{}", std::process::id());
        std::thread::scope(|scope| {
            for (rank, n) in [(0, 2), (1, 4)] {
                let address = &address;
                scope.spawn(move || {
                    let error = Comm::join(address, rank, n, &Options::default()).map(drop).unwrap_err().to_string();
                    assert!(error.contains("rank 1 was started as one of 4 ranks, but rank 0 as one of 2"), "{error}");
                });
            }
        });
    });
}

#[test]
fn failure_of_one_rank_fails_the_call_on_all_ranks_and_keeps_the_communicator() {
    alone("failure_of_one_rank_fails_the_call_on_all_ranks_and_keeps_the_communicator", &[], || {
        ranks(2, |comm| {
            let first = comm.rank() == 0;
            let told = |error: String, own: &str| {
                let expected = if first { "rank 1 failed in" } else { own };
                assert!(error.contains(expected), "{error}");
            };
            let window = comm.allocate(if first { 4096 } else { 0 }, Memory::Host);
            told(window.map(drop).unwrap_err().to_string(), "a window of 0 bytes");
            let mut own = [0u8; 64];
            let len = if first { 64 } else { 1 << 40 };
            // SAFETY: `own` outlives the window, which isn't created.
            let window = unsafe { comm.register(own.as_mut_ptr().cast(), len, Memory::Host) };
            told(window.map(drop).unwrap_err().to_string(), "are not mapped");
            let options = ContextOptions { signals: if first { 1 } else { u32::MAX }, ..Default::default() };
            told(comm.context(&options).map(drop).unwrap_err().to_string(), "signals = 4294967295 is above");
            comm.barrier().unwrap();
            comm.allocate(4096, Memory::Device).unwrap();
        });
    });
}

#[test]
fn rank_that_closes_or_makes_another_call_ends_the_barrier() {
    alone("rank_that_closes_or_makes_another_call_ends_the_barrier", &[], || {
        ranks(2, |comm| {
            let error = match comm.rank() {
                0 => comm.barrier(),
                _ => comm.allocate(4096, Memory::Host).map(drop),
            };
            let error = error.unwrap_err().to_string();
            assert!(error.contains("barrier") && error.contains("regMrSym"), "{error}");
        });
        // Rank 1 closes its communicator.
        ranks(2, |comm| {
            if comm.rank() == 0 {
                let error = comm.barrier().unwrap_err();
                assert!(error.to_string().contains("rank 1"), "{error}");
                assert_eq!(error.status(), Status::Remote);
                assert!(comm.barrier().unwrap_err().to_string().contains("rank 1"));
            }
        });
    });
}

#[test]
#[ignore = "make check"]
fn late_rank_is_waited_for() {
    alone("late_rank_is_waited_for", &[("FERROGIN_TIMEOUT", "5")], || {
        ranks(2, |comm| {
            if comm.rank() == 1 {
                std::thread::sleep(std::time::Duration::from_secs(12));
            }
            comm.barrier().unwrap();
        });
    });
}

#[test]
fn child_of_a_fork_is_refused() {
    alone("child_of_a_fork_is_refused", &[], || {
        let comm = single();
        // SAFETY: the child only calls the library's function, which returns before taking a lock, and then exits at
        // once.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                let code = ferrogin_barrier(comm);
                let good = code == USAGE && last_error().contains("is a fork() of process");
                std::process::exit(if good { 0 } else { 1 });
            }
            nix::unistd::ForkResult::Parent { child } => {
                let status = nix::sys::wait::waitpid(child, None).unwrap();
                assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
            }
        }
        // SAFETY: the handle is open.
        assert_eq!(unsafe { ferrogin_close(comm) }, 0);
    });
}
