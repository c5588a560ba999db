//! Idle reactors, and the CPU time they take.

use std::fs::File;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::{LIMIT, Way, exchange, libraries, pair, ways};
use ferrogin_channel::Reactor;
use ferrogin_test_support::child::run;
use ferrogin_test_support::dist;
use ferrogin_test_support::untrusted::limit_descriptors;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

/// How long the reactors are idle.
const IDLE: Duration = Duration::from_secs(2);
/// CPU time that their threads may take between two waits. A thread that spins never waits.
const BETWEEN_WAITS: Duration = Duration::from_millis(5);
/// Waits that their threads may begin per second. If they have to poll, a reactor does so a thousand times a second,
/// and a software card five thousand times.
const WAITS: f64 = 14_000.0;

/// Returns this process's CPU time and number of waits, while its other threads sleep.
fn usage() -> (Duration, i64) {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let time = usage.user_time() + usage.system_time();
    (Duration::from_micros(time.num_microseconds() as u64), usage.voluntary_context_switches())
}

/// Returns the CPU time that two reactors take between two waits while their channel is idle, and their waits per
/// second. Before that, `disturb` is called with the listener's place.
fn idle_usage<T>(way: &Way, disturb: impl FnOnce(&str) -> T) -> (Duration, f64) {
    let config = way.config();
    let (here, _there, a, b) = pair(&config);
    let listener = here.listen().unwrap();
    exchange(&a, &b, 5);
    exchange(&b, &a, 5);
    let disturbance = disturb(&listener.address().endpoint());
    let (since, before) = (Instant::now(), usage());
    std::thread::sleep(IDLE);
    let (after, seconds) = (usage(), since.elapsed().as_secs_f64());
    // The first wait is this thread's.
    let waits = u32::try_from(after.1 - before.1).unwrap().max(1);
    let between_waits = (after.0 - before.0) / waits;
    let waits = f64::from(waits) / seconds;
    drop(disturbance);
    exchange(&a, &b, 5);
    let third = Reactor::open(&config).unwrap();
    third.connect(listener.address()).wait_for(LIMIT).unwrap();
    (between_waits, waits)
}

/// Measures in a child process, in which the idle reactors are the only ones.
fn idle_reactors_rest<T>(test: &str, ways: &[Way], environment: &[(&str, &str)], disturb: fn(&str) -> T) {
    let report = run(test, environment, || {
        for way in ways {
            let (between_waits, waits) = idle_usage(way, disturb);
            let figures = format!("{way}: {waits:.0} waits a second, {between_waits:.1?} between two of them");
            eprintln!("{figures}");
            assert!(between_waits < BETWEEN_WAITS && waits < WAITS, "{figures}");
        }
    });
    if let Some(report) = report {
        println!("{report}");
    }
}

/// Over tcp, or the provider that FERROGIN_CHANNEL_PROVIDER names.
#[test]
fn idle_reactors_use_little_cpu() {
    let test = "idle_reactors_use_little_cpu";
    idle_reactors_rest(test, &ways(test)[..1], &[], |_| ());
}

/// The listener can't accept, so its socket stays readable.
#[test]
#[ignore = "make check"]
fn reactors_out_of_descriptors_use_little_cpu() {
    idle_reactors_rest("reactors_out_of_descriptors_use_little_cpu", &[Way::tcp()], &[], |listener| {
        assert!(limit_descriptors(256));
        let mut files: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        files.pop();
        let stream = TcpStream::connect(listener).unwrap();
        (files, stream)
    });
}

#[test]
#[ignore = "make check"]
fn idle_reactors_without_wait_descriptor_use_little_cpu() {
    let test = "idle_reactors_without_wait_descriptor_use_little_cpu";
    let Some(dist) = dist(test, &["libsoftefa-fi.so"]) else { return };
    let dist = dist.to_str().expect("a path of text");
    let ways: Vec<_> = libraries(test).iter().map(|lib| Way::over(lib, "softefa")).collect();
    for faults in ["seed=1", "no_wait_fd"] {
        idle_reactors_rest(test, &ways, &[("FI_PROVIDER_PATH", dist), ("SOFTEFA_FAULTS", faults)], |_| ());
    }
}
