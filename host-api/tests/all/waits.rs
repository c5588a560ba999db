//! How waits end, and what failed calls report.
#![allow(unsafe_code)]

use crate::common::{alone, dist, is_child, job, ranks, text, this_test};
use ferrogin::device::capi::*;
use ferrogin::device::{Action, Context, Flags, Status};
use ferrogin::{Comm, ContextOptions, Memory, Options, PeerFailure};
use ferrogin_ffi::ext::ContextExt;
use ferrogin_test_support::wait::wait_until;
use std::ffi::CStr;
use std::ptr::null_mut;
use std::time::Duration;

fn last_error() -> String {
    // SAFETY: the library's string lives until the next error of this thread.
    unsafe { CStr::from_ptr(ferrogin::capi::ferrogin_error()) }.to_str().expect("UTF-8").to_owned()
}

fn options(timeout: Option<Duration>) -> ContextOptions {
    ContextOptions { signals: 2, counters: 1, timeout, ..Default::default() }
}

fn limit_of(context: &Context<'_>) -> u64 {
    // SAFETY: the context is alive, and no thread changes its limit.
    let ext = unsafe { &*context.as_ptr() };
    // SAFETY: as above.
    unsafe { *ext.timeout_ns }
}

#[test]
fn limit_of_waits_comes_from_option_then_setting() {
    for settings in [&[][..], &[("FERROGIN_WAIT_TIMEOUT", "7")], &[("FERROGIN_WAIT_TIMEOUT", "0")]] {
        alone("limit_of_waits_comes_from_option_then_setting", settings, || {
            let setting = std::env::var("FERROGIN_WAIT_TIMEOUT").map_or(60, |text| text.parse::<u64>().unwrap());
            ranks(1, |comm| {
                for (option, ns) in [
                    (None, setting * 1_000_000_000),
                    (Some(Duration::ZERO), 0),
                    (Some(Duration::from_millis(3)), 3_000_000),
                ] {
                    let context = comm.context(&options(option)).expect("a context");
                    assert_eq!(limit_of(&context.device(0).expect("CPU threads")), ns);
                }
            });
        });
    }
}

/// Each failed call tells this thread what failed and why; a context's first failure is also on standard error.
#[test]
fn failed_calls_are_explained() {
    let test = "failed_calls_are_explained";
    let Some(dist) = dist(test) else { return };
    if is_child(test) {
        return explain();
    }
    let output = text(&this_test(test, &dist).output().expect("a process"));
    assert!(output.contains("1 passed"), "{output}");
    let first = "rank 0: the first failure of a kernel in this context: fgin_put_value returned FGIN_INVALID_ARGUMENT: \
                 there is only one rank, so the peer must be 0";
    assert_eq!(output.matches(first).count(), 1, "{output}");
    assert_eq!(output.matches("the first failure").count(), 1, "{output}");
}

fn explain() {
    ranks(1, |comm| {
        let window = comm.allocate(64, Memory::Host).expect("a window");
        let context = comm.context(&options(Some(Duration::from_millis(20)))).expect("a context");
        let memory = window.handle().0;
        let mut gin: *const ContextExt = std::ptr::null();
        // SAFETY: the handle is open, `gin` has room for a pointer, and the context outlives its use.
        assert_eq!(unsafe { fgin_open(context.handle(), 0, &mut gin) }, 0);
        let signal = Action::signal_inc(2).bits();
        let counter = Action::counter(1).bits();
        macro_rules! explains {
            ($($call:expr => $status:ident, $text:literal;)*) => {
                $(
                    // SAFETY: the context and the window are alive; every other argument may be anything.
                    let status = unsafe { $call };
                    let error = last_error();
                    assert!(status == Status::$status as i32 && error.contains($text), "{status}: {error}");
                )*
            };
        }
        explains! {
            fgin_put_value(gin, 9, memory, 0, 1, 8, 0, 0) => InvalidArgument, "fgin_put_value returned FGIN_INVALID_ARGUMENT: there is only one rank, so the peer must be 0";
            fgin_put_value(gin, 0, memory, 0, 1, 8, signal, 0) => InvalidArgument, "rank 0 has no signal 2: create its context with at least 3 signals";
            fgin_put_value(gin, 0, memory, 0, 1, 3, 0, 0) => InvalidArgument, "a value has 1, 2, 4 or 8 bytes, not 3";
            fgin_put_value(gin, 0, memory, 0, 1, 8, 1 << 16, 0) => InvalidArgument, "a value can't name a counter";
            fgin_put(gin, 0, memory, 0, memory, 0, 8, counter, 0) => InvalidArgument, "the context has no counter 1: it has 1, from 0 to 0";
            fgin_put(gin, 0, null_mut(), 0, memory, 0, 8, 0, 0) => InvalidArgument, "a window is NULL";
            fgin_wait_signal(gin, 2, 1) => InvalidArgument, "the context has no signal 2: it has 2, from 0 to 1";
            fgin_wait_signal(gin, 1, 3) => Timeout, "rank 0: fgin_wait_signal returned FGIN_TIMEOUT: signal 1 is 0, and not 3, after 20ms";
            fgin_wait_counter(gin, 0, 1) => Timeout, "counter 0 is 0, and not 1, after 20ms";
            fgin_signal_at(gin, 0, memory, 0, 1, 0) => Unsupported, "FERROGIN_SIGNALS=emulated";
            fgin_flush(std::ptr::null()) => InvalidArgument, "the context is NULL";
            fgin_open(null_mut(), 0, &mut gin) => InvalidArgument, "the handle or out is NULL";
            fgin_open(context.handle(), 1, &mut gin) => InvalidArgument, "context 1 does not exist: there are 1, from 0";
        }
        // The bytes before a handle are its header.
        let mut block = [[0u64; 8]; 2];
        let mut header = block[0];
        header[0] = ferrogin_ffi::ext::HEADER_MAGIC;
        header[1] = 99;
        block[0] = header;
        explains! {
            fgin_open(block[1].as_mut_ptr().cast(), 0, &mut gin) => Unsupported, "the handle has version 99";
        }
        block[0][0] = 1;
        explains! {
            fgin_open(block[1].as_mut_ptr().cast(), 0, &mut gin) => Unsupported, "this is not a handle of ferrogin";
        }
        // SAFETY: the function returns a constant string.
        let name = |status| unsafe { CStr::from_ptr(fgin_status_name(status)) }.to_str().unwrap();
        assert_eq!(
            [0, 4, 7, 8, -1].map(name),
            ["FGIN_OK", "FGIN_TIMEOUT", "FGIN_PEER_LOST", "unknown status", "unknown status"]
        );
    });
}

/// A forked child shares the queues' cursors with its parent: a post of its own would leave a slot empty.
#[test]
fn device_calls_of_forked_child_are_refused() {
    alone("device_calls_of_forked_child_are_refused", &[], || {
        ranks(1, |comm| {
            let window = comm.allocate(64, Memory::Host).expect("a window");
            let context = comm.context(&options(None)).expect("a context");
            let memory = window.handle().0;
            let mut gin: *const ContextExt = std::ptr::null();
            // SAFETY: the handle is open, `gin` has room for a pointer, and the context outlives its use.
            assert_eq!(unsafe { fgin_open(context.handle(), 0, &mut gin) }, 0);
            let signal = Action::signal_inc(0).bits();
            let post = |count| {
                // SAFETY: the context and the window are alive.
                assert_eq!(unsafe { fgin_put_value(gin, 0, memory, 0, 1, 8, signal, 0) }, 0);
                // SAFETY: the context is alive.
                assert_eq!(unsafe { fgin_wait_signal(gin, 0, count) }, 0);
            };
            post(1);
            // SAFETY: the child calls functions that return before they take a lock, and then ends at once.
            match unsafe { nix::unistd::fork() }.unwrap() {
                nix::unistd::ForkResult::Child => {
                    // SAFETY: the context and the window are alive.
                    let put = unsafe { fgin_put_value(gin, 0, memory, 8, 9, 8, signal, 0) };
                    // SAFETY: the context and the window are alive.
                    let put_of_warp = unsafe { fgin_warp_put_value(gin, 1, 0, memory, 8, 9, 8, signal, 0) };
                    // SAFETY: the context is alive.
                    let wait = unsafe { fgin_wait_signal(gin, 0, 2) };
                    // SAFETY: the context is alive.
                    let flush = unsafe { fgin_flush(gin) };
                    let calls = [put, put_of_warp, wait, flush];
                    let right = calls == [Status::Aborted as i32; 4] && last_error().contains("made by fork()");
                    std::process::exit(i32::from(!right));
                }
                nix::unistd::ForkResult::Parent { child } => {
                    let status = nix::sys::wait::waitpid(child, None).unwrap();
                    assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
                }
            }
            post(2);
            // SAFETY: the context is alive.
            assert_eq!(unsafe { fgin_flush(gin) }, 0);
        });
    });
}

/// For a process's environment: the context is alone in its communicator, or another one isolates peers and the peer is
/// killed or closes.
const HOW: &str = "FERROGIN_TEST_HOW";

/// A wait without a limit ends when the process that it waits for dies, though not if that one closes.
#[test]
fn wait_ends_when_a_peer_is_killed() {
    let test = "wait_ends_when_a_peer_is_killed";
    if is_child(test) {
        let comm = Comm::from_env(&Options::default()).expect("a communicator");
        let context = comm.context(&options(Some(Duration::ZERO))).expect("a context");
        let isolating = ContextOptions { on_peer_failure: Some(PeerFailure::Isolate), ..options(None) };
        let end = std::env::var(HOW).expect("a setting of the test");
        let other = (end != "alone").then(|| comm.context(&isolating).expect("another context"));
        comm.barrier().expect("a barrier");
        match (comm.rank(), &*end) {
            (1, "closed") => return,
            (1, _) => std::process::abort(),
            (_, "closed") => {
                wait_until("the close", || other.as_ref().is_some_and(|other| other.lost_ranks() == [1]));
                return context.check().expect("no failure");
            }
            _ => {}
        }
        let status = context.device(0).expect("CPU threads").wait_signal(0, 1);
        assert_eq!(status, Err(Status::Aborted));
        assert!(context.check().is_err());
        return;
    }
    let Some(dist) = dist(test) else { return };
    for how in ["alone", "killed", "closed"] {
        let outputs = job(test, 2, |_| {
            let mut command = this_test(test, &dist);
            command.env(HOW, how);
            command
        });
        let waited = text(&outputs[0]);
        assert!(outputs[0].status.success() && waited.contains("1 passed"), "{how}: {waited}");
        let is_lost = waited.contains("rank 0: rank 1 ended without closing its communicator");
        assert_eq!(is_lost, how != "closed", "{how}: {waited}");
    }
}

/// If many requests have the same mistake, only some are printed, but all are counted.
#[test]
fn repeated_errors_of_a_card_are_counted() {
    let test = "repeated_errors_of_a_card_are_counted";
    let Some(dist) = dist(test) else { return };
    if is_child(test) {
        ranks(1, |comm| {
            let window = comm.allocate(64, Memory::Host).expect("a window");
            let context = comm.context(&options(None)).expect("a context");
            let gin = context.device(0).expect("CPU threads");
            let posts = (0..64).map_while(|_| {
                gin.put(0, window.handle().at(4096), window.handle().at(0), 8, Action::NONE, Flags::AGGREGATE).ok()
            });
            assert_eq!(posts.count(), 64);
            assert!(gin.flush().is_err());
        });
        return;
    }
    let output = text(&this_test(test, &dist).output().expect("a process"));
    let lines: Vec<_> = output.lines().filter(|line| line.starts_with("softefa")).collect();
    assert!(output.contains("1 passed") && lines.len() <= 9, "{output}");
    assert!(lines[0].contains("a write of 8 bytes"), "{output}");
    assert!(lines.iter().any(|line| line.contains("more requests failed")), "{output}");
}
