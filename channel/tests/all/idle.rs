//! Reactors that have nothing to do, and the processor time that they take.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{LIMIT, libraries, pair};
use ferrogin_channel::{Channel, Config};
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::child::run;
use ferrogin_test_support::dist;

/// How long the reactors are idle.
const IDLE: Duration = Duration::from_secs(2);
/// Share of a processor that two idle reactors may take: where they must poll, each does so a thousand times a second.
const SHARE: f64 = 0.1;

/// Processor time of the threads of all reactors of this process.
fn reactor_time() -> Duration {
    let of_thread = |task: std::io::Result<std::fs::DirEntry>| -> Option<u64> {
        let path = task.ok()?.path();
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        let time = std::fs::read_to_string(path.join("schedstat")).ok()?;
        (name.trim_end() == "channel").then_some(time.split(' ').next()?.parse().ok()?)
    };
    Duration::from_nanos(std::fs::read_dir("/proc/self/task").unwrap().filter_map(of_thread).sum())
}

fn exchange(from: &Channel, to: &Channel) {
    let sent = from.send(b"hello");
    assert_eq!(to.receive().wait_for(LIMIT).unwrap(), b"hello");
    sent.wait_for(LIMIT).unwrap();
}

/// The share of a processor that two reactors take together while their channel is idle.
fn idle_share(lib: &Arc<Libfabric>, provider: &str) -> f64 {
    let source = provider.contains("tcp").then(|| "127.0.0.1".to_owned());
    let config = Config { provider: provider.to_owned(), source, ..Config::default() };
    let (_here, _there, a, b) = pair(lib, &config);
    exchange(&a, &b);
    exchange(&b, &a);
    let before = reactor_time();
    std::thread::sleep(IDLE);
    let share = (reactor_time() - before).as_secs_f64() / IDLE.as_secs_f64();
    exchange(&a, &b);
    share
}

/// Measures in a child process, whose only reactors are the idle ones.
fn idle_reactors_rest(test: &str, provider: &str, environment: &[(&str, &str)]) {
    let libraries = libraries(test);
    let report = run(test, environment, || {
        for lib in &libraries {
            let share = idle_share(lib, provider);
            eprintln!("{provider} of libfabric {}: {:.2} % of a processor", lib.version(), 100.0 * share);
            assert!(share < SHARE, "{provider}: {share}");
        }
    });
    if let Some(report) = report {
        println!("{report}");
    }
}

/// Over tcp, or the provider that FERROGIN_CHANNEL_PROVIDER names.
#[test]
fn idle_reactors_leave_the_processor_alone() {
    let provider = std::env::var("FERROGIN_CHANNEL_PROVIDER").unwrap_or("tcp".to_owned());
    idle_reactors_rest("idle_reactors_leave_the_processor_alone", &provider, &[]);
}

#[test]
fn idle_reactors_leave_the_processor_alone_where_there_is_no_descriptor_to_wait_for() {
    let test = "idle_reactors_leave_the_processor_alone_where_there_is_no_descriptor_to_wait_for";
    let Some(dist) = dist(test, &["libsoftefa-fi.so"]) else { return };
    let dist = dist.to_str().expect("a path of text");
    for faults in ["seed=1", "no_wait_fd"] {
        idle_reactors_rest(test, "softefa", &[("FI_PROVIDER_PATH", dist), ("SOFTEFA_FAULTS", faults)]);
    }
}
