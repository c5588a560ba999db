//! A card that fails requests, stops, or has too few counters, and a process at one of its limits: the error names
//! cause and fix, and no wait hangs. tests/foreign has the same table for NCCL's own device code.
#![allow(unsafe_code)]

use crate::common::{ONE_CONTEXT, child, dist, over_efa, report, role};
use ferrogin_device::{Action, Context, Flags, Window as DeviceWindow};
use ferrogin_test_support::address_space;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use mini_nccl::{Bootstrap, Comm, DeviceMemory, Plugin, log};
use std::sync::Arc;
use std::time::Duration;

/// A failure on rank 0, and what each rank sees of it.
struct Failure {
    name: &'static str,
    /// Rank 0's SOFTEFA_FAULTS.
    faults: &'static str,
    /// A limit that rank 0 sets before its first post: the resource and the value.
    limit: Option<(libc::__rlimit_resource_t, fn() -> u64)>,
    /// Parts of the WARN lines of rank 0 and rank 1.
    seen: [&'static [&'static str]; 2],
}

/// How a rank that cannot accept a connection looks to the other.
const NO_ANSWER: &[&str] = &["write to rank 0", "the peer never answered", "check that the peer runs, its log"];

const FAILURES: [Failure; 2] = [
    Failure {
        name: "failed request",
        faults: "error_every=20",
        limit: None,
        seen: [&["write to rank 1", "the peer reset the connection (status 8)", "check in the peer's log"], &[]],
    },
    Failure {
        name: "few counters",
        faults: "cntr_budget=4",
        limit: None,
        seen: [
            &["createContext", "completion counters are needed on card", "request fewer signals"],
            &["rank 0 failed in createContext", "the log of rank 0"],
        ],
    },
];

/// Failures that a rank notices only after the software card has waited for 5 s.
const SLOW_FAILURES: [Failure; 5] = [
    Failure {
        name: "dead card",
        faults: "die_after=20",
        limit: None,
        seen: [
            &["write to rank 1", "the queue pair failed inside the local card", "check the card"],
            // "The peer stopped answering", or "never answered" if the card died before the first answer.
            &["write to rank 0", "answer", "check that the peer runs"],
        ],
    },
    Failure {
        name: "card that is dead from the start",
        faults: "die_after=1",
        limit: None,
        seen: [
            &["write to rank 1", "the queue pair failed inside the local card", "check the card"],
            &["write to rank 0"],
        ],
    },
    Failure {
        name: "no descriptors",
        faults: "",
        limit: Some((libc::RLIMIT_NOFILE, || 3)),
        seen: [&["write to rank 1", "the peer never answered", "too many open files: raise `ulimit -n`"], NO_ANSWER],
    },
    Failure {
        name: "no memory",
        faults: "",
        // The C library kills the process if a thread finds no memory for its thread-local data.
        limit: Some((libc::RLIMIT_AS, || address_space() as u64 + (512 << 10))),
        seen: [&["write to rank 1", "the peer never answered", "no memory: raise", "`ulimit -v`"], NO_ANSWER],
    },
    Failure {
        name: "no room for shared memory",
        faults: "",
        limit: Some((libc::RLIMIT_FSIZE, || 4096)),
        seen: [&["write to rank 1", "the peer never answered", "shared memory needs: raise `ulimit -f`"], &[]],
    },
];

#[test]
fn failure_names_cause_and_fix() {
    all_name_cause_and_fix("failure_names_cause_and_fix", &FAILURES);
}

#[test]
#[ignore = "make check"]
fn card_that_stops_names_cause_and_fix() {
    all_name_cause_and_fix("card_that_stops_names_cause_and_fix", &SLOW_FAILURES);
}

fn all_name_cause_and_fix(test: &str, failures: &'static [Failure]) {
    if let Some(role) = role() {
        let failure = failures.iter().find(|failure| failure.name == role).expect("a failure");
        return rank(failure);
    }
    let Some(dist) = dist(test) else { return };
    std::thread::scope(|scope| {
        for failure in failures {
            let dist = &dist;
            scope.spawn(move || {
                let job = child(dist, test, failure.name, 2).env("SOFTEFA_WIRE", "shm");
                let outcome = job.run().expect("the job starts");
                assert!(outcome.success(), "{}: {}", failure.name, report(&outcome));
                assert!(failure.limit.is_none() || outcome.text().contains("(ulimit -"), "the card names the limit");
                for line in outcome.lines.iter().filter(|line| line.text.starts_with("saw")) {
                    println!("{}, rank {:?}: {}", failure.name, line.rank, line.text);
                }
            });
        }
    });
}

/// Sets the soft limit of a resource.
fn set_limit(resource: libc::__rlimit_resource_t, value: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one struct into a local variable.
    assert_eq!(unsafe { libc::getrlimit(resource, &mut limit) }, 0);
    limit.rlim_cur = value;
    // SAFETY: the kernel reads one struct from a local variable.
    assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0);
}

/// Runs one rank: set-up, then posts to the other rank until the failure shows.
fn rank(failure: &Failure) {
    let bootstrap = Bootstrap::from_env(HANG_LIMIT).expect("a launcher");
    let me = bootstrap.rank();
    if me == 0 && !failure.faults.is_empty() {
        // SAFETY: the only other thread is the test runner's, which waits and doesn't use the environment.
        unsafe { std::env::set_var("SOFTEFA_FAULTS", failure.faults) };
    }
    let plugin = Plugin::find(&std::env::var("NCCL_GIN_PLUGIN").expect("set")).expect("the plugin");
    let comm = Comm::init(&plugin, Arc::new(bootstrap), 0).expect("a communicator");
    let memory = Arc::new(DeviceMemory::alloc(4096).expect("memory"));
    let window = comm.register(&memory, 0).expect("a window");
    let context = comm.create_context(&ONE_CONTEXT);
    if let Ok(context) = &context {
        comm.barrier().expect("all ranks");
        if let Some((resource, value)) = failure.limit.filter(|_| me == 0) {
            set_limit(resource, value());
        }
        // The other rank's first post makes a connection, which should hit the limit.
        comm.barrier().expect("all ranks");
        // SAFETY: `createContext` returned the handle, and the context is open.
        let kernel = unsafe { Context::from_handle(context.handle(), 0) }.expect("a handle");
        kernel.set_timeout_ns(HANG_LIMIT.as_nanos() as u64);
        let target = DeviceWindow(window.gin_handle());
        let sees_nothing = failure.seen[me].is_empty();
        // The rank that sees nothing also sends some values, which arrive.
        for round in 0u64.. {
            let sent = kernel.put_value(1 - me as u32, target.at(0), round, 8, Action::NONE, Flags::NONE);
            let sent = sent.and_then(|_| if round % 8 == 7 { kernel.flush() } else { Ok(()) });
            if sent.is_err() || round > 100 && sees_nothing {
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        wait_until("report of the failure", || sees_nothing || log::last_warn().is_some());
        assert_eq!(context.query_last_error().expect("a query"), !sees_nothing);
    }
    let line = log::last_warn().unwrap_or_default();
    println!("saw {line}");
    // Only `softefa` tells the plugin which limit the card hit.
    let known = |part: &&&str| !over_efa() || !part.contains("raise") && !part.contains("ulimit");
    for part in failure.seen[me].iter().filter(known) {
        assert!(line.contains(part), "{part:?} in {line:?}");
    }
    assert!(!failure.seen[me].is_empty() || line.is_empty(), "{line}");
    // A rank that closes takes its endpoints away from the other one.
    comm.barrier().expect("all ranks");
    drop(context.map(|context| context.destroy().expect("destroyed")));
    window.deregister().expect("deregistered");
    comm.close().expect("closed");
}
