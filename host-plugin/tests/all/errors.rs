//! Error reports: each failed request makes queryLastError return true and writes one WARN line, and nothing else does.
#![allow(unsafe_code)]

use crate::harness::{REPORT, alone, alone_each, config, device, pass_round, ranks, window};
use efa_dp_direct::wire::CompStatus;
use ferrogin_device::{Action, Context, Flags, Status, Window as DeviceWindow};
use ferrogin_ffi::ext::RANK_ID;
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_test_support::repetitions;
use ferrogin_test_support::wait::wait_until;
use mini_nccl::{DeviceMemory, Plugin, log};
use std::sync::Arc;
use std::time::Duration;

fn warnings() -> Vec<String> {
    log::take().into_iter().filter(|line| line.is_warn()).map(|line| line.text).collect()
}

/// Posts on each kind of endpoint in turn. Returns the operation's and the endpoint's names in the WARN line.
fn post_by_turn(
    kernel: &Context<'_>,
    turn: u8,
    peer: u32,
    target: DeviceWindow,
) -> (Result<(), Status>, &'static str, &'static str) {
    let plain = Flags::NONE;
    match turn % 5 {
        0 => (kernel.put(peer, target.at(0), target.at(8), 8, Action::NONE, plain), "write to", "endpoint data"),
        1 => (kernel.put_value(peer, target.at(0), 7, 8, Action::NONE, plain), "write to", "endpoint value"),
        2 => (kernel.put_value(peer, target.at(0), 7, 8, Action::signal_inc(1), plain), "write to", "endpoint"),
        3 => (
            kernel.put(peer, target.at(0), target.at(8), 8, Action::counter(0), plain),
            "write to",
            "endpoint counter 0",
        ),
        _ => (kernel.get(peer, target.at(0), target.at(8), 8, plain), "read from", "endpoint data"),
    }
}

/// Makes a request of rank 1 fail with each of the `statuses`.
fn failed_status(test: &str, statuses: &[u8]) {
    let faults: Vec<_> = statuses.iter().map(|s| (format!("error_every=1,error_status={s}"), s.to_string())).collect();
    let settings: Vec<_> =
        faults.iter().map(|(faults, status)| vec![("SOFTEFA_FAULTS", faults.as_str()), ("STATUS", status)]).collect();
    alone_each(test, &settings, |plugin| {
        let status: u8 = std::env::var("STATUS").expect("set").parse().expect("a status");
        ranks(&plugin, 3, move |rank, comm| {
            let (_memory, window) = window(&comm, 4096);
            // Both queue layouts.
            let backend_version = 1 + i32::from(status) % 2;
            let context = comm.create_context(&GinConfigV14 { backend_version, ..config(2, 1) }).expect("a context");
            let kernel = device(&context, 0);
            assert!(!context.query_last_error().expect("a query"), "no error before the first");
            comm.barrier().expect("all ranks");
            if rank == 1 {
                let peer = u32::from(status) % 3;
                let (posted, operation, endpoint) =
                    post_by_turn(&kernel, status, peer, DeviceWindow(window.gin_handle()));
                posted.expect("a post before the error");
                if status.is_multiple_of(2) {
                    // A query after a kernel's error returns true at once.
                    assert!(kernel.flush().is_err());
                    assert!(context.query_last_error().expect("a query"), "after a kernel's error");
                }
                wait_until("fault of queryLastError", || context.query_last_error().expect("a query"));
                wait_until("WARN line", || log::last_warn().is_some());
                let lines = warnings();
                assert_eq!(lines.len(), 1, "one line for one failure: {lines:?}");
                let text =
                    CompStatus::from_raw(status).map_or("a status that this version does not know", |s| s.text());
                let peer = format!("{operation} rank {peer} on");
                for part in ["rank 1:", &peer, endpoint, "context 0", text, &format!("status {status}"), "check"] {
                    assert!(lines[0].contains(part), "{part:?} in {}", lines[0]);
                }
                // No wait hangs, on this endpoint or on another.
                assert!(kernel.flush().is_err());
                assert!(kernel.wait_signal(0, 1).is_err());
                assert!(context.query_last_error().expect("a query"), "sticky");
            }
            comm.barrier().expect("all ranks");
            assert_eq!(context.query_last_error().expect("a query"), rank == 1);
            assert_eq!(warnings(), [""; 0], "one line for one failure");
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn failed_status_is_reported_with_its_peer() {
    // Each operation and endpoint, and a status that this version doesn't know.
    failed_status("failed_status_is_reported_with_its_peer", &[7, 11, 14, 18, 200]);
}

#[test]
#[ignore = "make check"]
fn every_failed_status_is_reported_with_its_peer() {
    // All other documented statuses.
    let others: Vec<u8> = (1..=18).filter(|status| ![7, 11, 14, 18].contains(status)).collect();
    failed_status("every_failed_status_is_reported_with_its_peer", &others);
}

#[test]
fn error_after_many_completions_is_reported_with_its_peer() {
    // More completions than a queue has slots, faster than the watcher drains them.
    let faults = [("SOFTEFA_FAULTS", "error_every=150001,error_status=7")];
    alone("error_after_many_completions_is_reported_with_its_peer", &faults, |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let (_memory, window) = window(&comm, 4096);
            let context = comm.create_context(&GinConfigV14 { queue_depth: 16, ..config(1, 1) }).expect("a context");
            let (kernel, target) = (device(&context, 0), DeviceWindow(window.gin_handle()));
            if rank == 0 {
                // Posts until the device code refuses one.
                let refused = (0..1_000_000u32).find_map(|_| {
                    kernel.put(1, target.at(0), target.at(8), 8, Action::NONE, Flags::NONE).and(Ok(())).err()
                });
                assert!(refused.is_some(), "a post fails after the error");
                wait_until("fault of queryLastError", || context.query_last_error().expect("a query"));
                wait_until("WARN line", || log::last_warn().is_some());
                let line = log::last_warn().expect("a line");
                for part in ["write to rank 1", "endpoint data", "status 7"] {
                    assert!(line.contains(part), "{part} in {line}");
                }
            }
            comm.barrier().expect("all ranks");
        });
    });
}

/// Settings with which the card reports rank 2 as gone to every rank that posts to it.
pub const RANK_2_IS_GONE: [(&str, &str); 2] =
    [("FERROGIN_ON_PEER_FAILURE", "isolate"), ("SOFTEFA_FAULTS", "error_every=1,error_status=9,error_id=32770")];
const _: () = assert!(RANK_ID | 2 == 32770);

/// Rank 0 loses rank 2: rank 1 learns of it, and puts between the two go on.
pub fn others_go_on(plugin: &Arc<Plugin>) {
    ranks(plugin, 3, |rank, comm| {
        let (_memory, window) = window(&comm, 4096);
        let context = comm.create_context(&config(2, 1)).expect("a context");
        let (kernel, target) = (device(&context, 0), DeviceWindow(window.gin_handle()));
        let put =
            |peer| kernel.put(peer, target.at(0), target.at(8), 8, Action::signal_inc(0), Flags::NONE).and(Ok(()));
        comm.barrier().expect("all ranks");
        match rank {
            0 => {
                put(2).expect("a put before the failure");
                assert_eq!(kernel.flush(), Err(Status::PeerLost));
                for _ in 0..10 {
                    assert_eq!((put(2), put(1)), (Err(Status::PeerLost), Ok(())));
                }
                kernel.settle().expect("the end of the other puts");
                // NCCL's programs can't acknowledge the loss.
                assert_eq!((kernel.flush(), kernel.wait_signal(1, 1)), (Err(Status::PeerLost), Err(Status::PeerLost)));
            }
            1 => {
                assert_eq!(kernel.wait_signal(1, 1), Err(Status::PeerLost));
                wait_until("rank 0's puts", || kernel.read_signal(0).expect("a signal") == 10);
                put(0).and_then(|()| kernel.settle()).expect("a put");
            }
            _ => assert_eq!(kernel.wait_signal(1, 1), Err(Status::Aborted), "the others go on without this rank"),
        }
        comm.barrier().expect("all ranks");
        assert_eq!(context.query_last_error().expect("a query"), rank == 2);
        context.destroy().expect("destroyed");
    });
    let mut lines = warnings();
    lines.sort();
    let starts =
        ["rank 0: rank 2 is lost: a write to rank 2 ", "rank 1: rank 2 is lost: its process", "rank 2: the other "];
    let are_expected = lines.len() == 3 && lines.iter().zip(starts).all(|(line, start)| line.contains(start));
    assert!(are_expected && lines[0].contains("(status 9)"), "{lines:#?}");
    let is_for_nccl = |line: &String| line.contains("ncclCommShrink") && !line.contains("ferrogin_acknowledge_lost");
    assert!(lines[..2].iter().all(is_for_nccl), "{lines:#?}");
}

#[test]
fn lost_rank_costs_its_own_requests_if_peers_are_isolated() {
    let test = "lost_rank_costs_its_own_requests_if_peers_are_isolated";
    alone(test, &RANK_2_IS_GONE, |plugin| others_go_on(&plugin));
}

#[test]
fn clean_set_ups_report_no_error() {
    alone("clean_set_ups_report_no_error", &[], |plugin| {
        let whole = repetitions("FERROGIN_TEST_SETUPS", 30, 100) as usize;
        for i in 0..whole {
            let comm_plugin = plugin.clone();
            ranks(&comm_plugin, 2, move |_, comm| {
                let (memory, window) = window(&comm, 4096);
                let context = comm.create_context(&config(2, 1)).expect("a context");
                let quiet = || assert!(!context.query_last_error().expect("a query"), "set-up {i}");
                quiet();
                pass_round(&comm, &context, 0, &window, &memory, (i % 2) as u16);
                quiet();
                // One rank destroys its context while the other still queries its own.
                if comm.rank() == i % 2 {
                    context.destroy().expect("destroyed");
                } else {
                    quiet();
                }
            });
            assert_eq!(warnings(), [""; 0], "set-up {i}");
        }
        println!("{}{whole} set-ups without an error", REPORT);
    });
}

/// Rank 1 closes its communicator before `step`. The other ranks report rank 1.
fn missing_rank(test: &'static str, step: &'static str) {
    alone(test, &[("FERROGIN_TIMEOUT", "240")], move |plugin| {
        ranks(&plugin, 3, move |rank, comm| {
            let memory = Arc::new(DeviceMemory::alloc(4096).expect("memory"));
            comm.barrier().expect("all ranks");
            if rank == 1 {
                // Dropping the communicator closes it.
                return;
            }
            let error = match step {
                "regMrSym" => comm.register(&memory, 0).map(drop),
                _ => comm.create_context(&config(1, 1)).map(drop),
            };
            let error = error.expect_err("a rank is missing").to_string();
            assert!(error.contains("rank 1") && error.contains(step), "{error}");
            // The communicator is unusable, names the cause, and can be closed.
            let later = comm.register(&memory, 0).expect_err("unusable").to_string();
            assert!(later.contains("rank 1"), "{later}");
        });
    });
}

#[test]
fn rank_closed_before_window_is_named() {
    missing_rank("rank_closed_before_window_is_named", "regMrSym");
}

#[test]
fn rank_closed_before_context_is_named() {
    missing_rank("rank_closed_before_context_is_named", "createContext");
}

/// Rank 1 is later than FERROGIN_TIMEOUT, before the first context and with one.
#[test]
#[ignore = "make check"]
fn late_rank_is_waited_for() {
    alone("late_rank_is_waited_for", &[("FERROGIN_TIMEOUT", "5")], |plugin| {
        ranks(&plugin, 3, |rank, comm| {
            let late = || {
                if rank == 1 {
                    std::thread::sleep(Duration::from_secs(12));
                }
            };
            late();
            let (memory, window) = window(&comm, 4096);
            late();
            let context = comm.create_context(&config(1, 1)).expect("a context");
            late();
            let second = comm.create_context(&config(1, 1)).expect("a second context");
            pass_round(&comm, &context, 0, &window, &memory, 0);
            drop(second);
            comm.barrier().expect("all ranks");
        });
        assert_eq!(warnings(), [""; 0]);
    });
}

#[test]
fn failure_of_one_rank_fails_call_on_all_ranks_and_keeps_communicator() {
    // Rank 1 requests more counters than the card has.
    let test = "failure_of_one_rank_fails_call_on_all_ranks_and_keeps_communicator";
    alone(test, &[("SOFTEFA_FAULTS", "cntr_budget=40")], |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let signals = if rank == 0 { 1 } else { 60 };
            let error = comm.create_context(&config(signals, 0)).expect_err("too many counters on rank 1").to_string();
            let expected = if rank == 0 { "rank 1" } else { "completion counters" };
            assert!(error.contains(expected), "{error}");
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(1, 0)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 0);
            let lines = warnings().len();
            assert!(lines <= 2, "{lines} lines for two failed calls");
            comm.barrier().expect("all ranks");
        });
    });
}
