//! FERROGIN_METRICS: the file reports exactly what the ranks did.

use crate::common::{dist, is_child, job, text, this_test};
use ferrogin::device::{Action, Flags};
use ferrogin::{Comm, ContextOptions, Memory, Options};
use ferrogin_test_support::prometheus::Metrics;
use ferrogin_test_support::wait::{wait_for, wait_until};
use std::path::{Path, PathBuf};

/// Reads the file, and how often it has been written.
fn read(path: &Path) -> (Metrics, u64) {
    let text = std::fs::read_to_string(path).expect("a metrics file");
    let metrics = Metrics::parse(&text).unwrap_or_else(|error| panic!("{error}, in\n{text}"));
    let writes = metrics.sum("ferrogin_metrics_writes_total", &[]).expect("the number of writes");
    (metrics, writes)
}

/// Reads the file after a write that began after this call.
fn next(path: &Path) -> Metrics {
    let (_, before) = read(path);
    // The next write may have begun before this call.
    wait_for("write of the file", || {
        let (metrics, writes) = read(path);
        (writes >= before + 2).then_some(metrics)
    })
}

/// Posts known numbers of requests, and checks them against the file. The two contexts are on two cards.
fn rank(path: &Path, post: &str) {
    let comm = Comm::from_env(&Options::default()).expect("a communicator");
    let (rank, peer) = (comm.rank().to_string(), 1 - comm.rank() as u32);
    let window = comm.allocate(64 << 10, Memory::Device).expect("a window");
    let options = ContextOptions { contexts: 2, signals: 2, counters: 1, ..Default::default() };
    let context = comm.context(&options).expect("contexts");
    let (first, second) = (context.device(0).expect("a context"), context.device(1).expect("a context"));
    let at = |offset| window.handle().at(offset);
    let none = Flags::NONE;
    for _ in 0..5 {
        first.put(peer, at(0), at(8192), 100, Action::NONE, none).unwrap();
    }
    for n in 0..3 {
        first.put_value(peer, at(256), n, 8, Action::NONE, none).unwrap();
    }
    for _ in 0..4 {
        first.put(peer, at(512), at(8192), 1000, Action::signal_inc(1), none).unwrap();
    }
    for _ in 0..2 {
        first.put(peer, at(2048), at(8192), 10, Action::NONE.with_counter(0), none).unwrap();
    }
    first.get(peer, at(8192), at(16384), 4096, none).unwrap();
    for n in 0..7 {
        second.put_value(peer, at(320), n, 8, Action::signal_inc(0), none).unwrap();
    }
    first.flush().unwrap();
    second.flush().unwrap();
    first.wait_signal(1, 4).unwrap();
    second.wait_signal(0, 7).unwrap();
    // After this, the peer has read all its bytes.
    comm.barrier().unwrap();

    let metrics = next(path);
    let pid = std::process::id().to_string();
    let is = |metrics: &Metrics, name: &str, labels: &[(&str, &str)], value: u64| {
        let labels = [labels, &[("pid", &*pid)]].concat();
        assert_eq!(metrics.sum(name, &labels), Some(value), "{name} {labels:?} in {metrics:#?}");
    };
    let info = [("version", env!("CARGO_PKG_VERSION")), ("provider", "softefa"), ("device", "cpu"), ("post", post)];
    is(&metrics, "ferrogin_info", &info, 1);
    for (id, queue, posts) in [
        ("0", "data", 6),
        ("0", "value", 3),
        ("0", "signal", 4),
        ("0", "counter", 2),
        ("1", "data", 0),
        ("1", "value", 0),
        ("1", "signal", 7),
        ("1", "counter", 0),
    ] {
        let card = ["softefa0-rdm", "softefa1-rdm"][usize::from(id == "1")];
        let labels = [("rank", &*rank), ("comm", "0"), ("context", id), ("rail", id), ("card", card), ("queue", queue)];
        is(&metrics, "ferrogin_posts_total", &labels, posts);
        is(&metrics, "ferrogin_completions_total", &labels, posts);
        is(&metrics, "ferrogin_errors_total", &labels, 0);
        is(&metrics, "ferrogin_outstanding", &labels, 0);
    }
    is(&metrics, "ferrogin_signals_total", &[("context", "0")], 4);
    is(&metrics, "ferrogin_signals_total", &[("context", "1")], 7);
    let bytes = 5 * 100 + 3 * 8 + 4 * 1000 + 2 * 10;
    for (card, operation, bytes) in [
        ("softefa0-rdm", "write", bytes),
        ("softefa0-rdm", "write_received", bytes),
        ("softefa0-rdm", "read", 4096),
        ("softefa0-rdm", "read_served", 4096),
        ("softefa1-rdm", "write", 7 * 8),
        ("softefa1-rdm", "write_received", 7 * 8),
        ("softefa1-rdm", "read", 0),
        ("softefa1-rdm", "read_served", 0),
    ] {
        is(&metrics, "ferrogin_card_bytes_total", &[("card", card), ("operation", operation)], bytes);
    }
    for (card, operation, requests) in [
        ("softefa0-rdm", "write", 14),
        ("softefa0-rdm", "read", 1),
        ("softefa1-rdm", "write", 7),
        ("softefa1-rdm", "read", 0),
    ] {
        is(&metrics, "ferrogin_card_requests_total", &[("card", card), ("operation", operation)], requests);
        is(&metrics, "ferrogin_card_request_errors_total", &[("card", card), ("operation", operation)], 0);
    }

    // A write past the end of the peer's window.
    second.put(peer, at(1 << 30), at(8192), 8, Action::NONE, none).unwrap();
    assert!(second.flush().is_err());
    let metrics = next(path);
    for (name, value) in [
        ("ferrogin_posts_total", 1),
        ("ferrogin_completions_total", 0),
        ("ferrogin_errors_total", 1),
        ("ferrogin_outstanding", 0),
    ] {
        is(&metrics, name, &[("context", "1"), ("queue", "data")], value);
    }
    is(&metrics, "ferrogin_card_request_errors_total", &[("card", "softefa1-rdm"), ("operation", "write")], 1);
    comm.barrier().unwrap();

    // Totals outlive their contexts, and closing the communicator writes the file one last time.
    drop(context);
    let metrics = next(path);
    for (rail, queue, posts) in [("0", "data", 6), ("0", "signal", 4), ("1", "data", 1), ("1", "signal", 7)] {
        let labels = [("context", "closed"), ("comm", "closed"), ("rail", rail), ("queue", queue), ("rank", &*rank)];
        is(&metrics, "ferrogin_posts_total", &labels, posts);
    }
    assert_eq!(metrics.sum("ferrogin_outstanding", &[]), None);
    is(&metrics, "ferrogin_signals_total", &[], 11);
    is(&metrics, "ferrogin_posts_total", &[], 23);
    let context = comm.context(&options).expect("contexts");
    context.device(0).unwrap().put_value(peer, at(256), 1, 8, Action::NONE, none).unwrap();
    context.device(0).unwrap().flush().unwrap();
    comm.barrier().unwrap();
    drop((context, window, comm));
    let (metrics, _) = read(path);
    is(&metrics, "ferrogin_posts_total", &[], 24);
    is(&metrics, "ferrogin_posts_total", &[("context", "closed"), ("queue", "value")], 4);
    is(&metrics, "ferrogin_card_bytes_total", &[("card", "softefa0-rdm"), ("operation", "write")], bytes + 8);
}

/// Creates a directory for a test's files.
fn directory(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("a directory");
    path
}

#[test]
fn metrics_are_exact_after_flush() {
    are_exact("metrics_are_exact_after_flush", "combining");
}

#[test]
#[ignore = "make check"]
fn metrics_are_exact_with_locked_policy() {
    are_exact("metrics_are_exact_with_locked_policy", "locked");
}

fn are_exact(test: &str, post: &str) {
    if is_child(test) {
        let of = |name| std::env::var(name).expect("the parent sets it");
        return rank(Path::new(&of("FERROGIN_METRICS").replace("{rank}", &of("FERROGIN_RANK"))), &of("FERROGIN_POST"));
    }
    let Some(dist) = dist(test) else { return };
    let directory = directory(test);
    let outputs = job(test, 2, |_| {
        let mut command = this_test(test, &dist);
        command.env("FERROGIN_METRICS", directory.join("{rank}.prom")).env("FERROGIN_METRICS_INTERVAL", "1");
        command.env("SOFTEFA_NICS", "2").env("FERROGIN_POST", post);
        command.env("SOFTEFA_FAULTS", "seed=3,reorder=16,reread=0.2,cntr_start=2147483640");
        command
    });
    for output in outputs {
        assert!(output.status.success() && text(&output).contains("1 passed"), "{post}: {}", text(&output));
    }
    let mut files: Vec<_> = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["0.prom", "1.prom"], "each rank has one file, and nothing is left beside");
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn unusable_metrics_file_is_an_error_of_open() {
    let test = "unusable_metrics_file_is_an_error_of_open";
    let open = || {
        let opened = Comm::open(0, 1, &Options::default(), |block| Ok(vec![block.to_vec()]));
        opened.map(drop).map_err(|error| error.to_string())
    };
    if is_child(test) {
        let expected = std::env::var("EXPECTED").expect("the parent sets it");
        let error = open().expect_err("an unusable file");
        assert!(error.contains(&expected), "{error}");
        return;
    }
    let Some(dist) = dist(test) else { return };
    for (path, expected) in [
        (
            "/nonexistent/{pid}.prom",
            "cannot be written: No such file or directory (os error 2); name a file in a directory",
        ),
        ("/proc/ferrogin.prom", "or unset FERROGIN_METRICS"),
        ("/tmp", "FERROGIN_METRICS=/tmp: this is a directory; name a file in it, such as /tmp/ferrogin.prom"),
        (
            "/tmp/{rank}.prom",
            "no launcher set this process's rank: set FERROGIN_RANK and FERROGIN_NRANKS, or use {pid}",
        ),
    ] {
        let mut command = this_test(test, &dist);
        command.env("FERROGIN_METRICS", path).env("EXPECTED", expected);
        let output = command.output().expect("a process");
        assert!(output.status.success() && text(&output).contains("1 passed"), "{path}: {}", text(&output));
    }
}

/// What the plugin says about a file in a missing directory.
const UNWRITABLE: &str = "cannot be written: No such file or directory";

#[test]
fn job_outlives_the_metrics_directory() {
    let test = "job_outlives_the_metrics_directory";
    if !is_child(test) {
        let Some(dist) = dist(test) else { return };
        let directory = directory(test);
        let mut command = this_test(test, &dist);
        command.env("FERROGIN_METRICS", directory.join("{pid}.prom")).env("FERROGIN_METRICS_INTERVAL", "1");
        let errors = directory.with_extension("stderr");
        let file = std::fs::File::create(&errors).expect("a file");
        let output = command.env("ERRORS", &errors).stderr(file).output().expect("a process");
        std::fs::remove_dir_all(directory).unwrap();
        let text = text(&output) + &std::fs::read_to_string(&errors).expect("the errors");
        std::fs::remove_file(errors).expect("removed");
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        assert_eq!(text.matches(UNWRITABLE).count(), 1, "{text}");
        return;
    }
    let setting = std::env::var("FERROGIN_METRICS").expect("the parent sets it");
    let file = PathBuf::from(setting.replace("{pid}", &std::process::id().to_string()));
    let directory = file.parent().expect("a directory");
    let comm = Comm::open(0, 1, &Options::default(), |block| Ok(vec![block.to_vec()])).expect("a communicator");
    // The plugin may be writing a file at the same time.
    wait_until("removal of the directory", || std::fs::remove_dir_all(directory).is_ok());
    let errors = std::env::var_os("ERRORS").expect("the parent sets it");
    let has_line = || std::fs::read_to_string(&errors).is_ok_and(|text| text.contains(UNWRITABLE));
    wait_until("line about the missing directory", has_line);
    comm.barrier().expect("a communicator without a file");
    std::fs::create_dir_all(directory).expect("a directory");
    wait_until("new file", || file.exists());
    read(&file);
}
