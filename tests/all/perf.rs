//! `ferrogin perf`, `compare` and `plot`, with few iterations, over the software card.

use crate::schema;
use crate::tool::{command, dist, ferrogin};
use ferrogin_test_support::{skip, workspace};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const OPERATIONS: [&str; 11] = [
    "put",
    "put-signal",
    "put-value",
    "get",
    "signal",
    "flush",
    "barrier",
    "alltoall",
    "rpc",
    "rma-put",
    "rma-put-signal",
];
const SOFTWARE_CARD: (&str, &str) = ("FERROGIN_PROVIDER", "softefa");

/// One test's directory, removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ferrogin-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }

    fn write(&self, name: &str, content: &str) -> String {
        std::fs::write(self.0.join(name), content).expect("a file");
        self.file(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn perf(plugin: &Path, args: &[&str]) -> (Output, String) {
    let line: Vec<&str> = args.iter().flat_map(|part| part.split(' ')).collect();
    ferrogin(plugin, &[&["perf"][..], &line].concat(), &[SOFTWARE_CARD])
}

fn read_json(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("a report")).expect("JSON")
}

/// The labels in a picture.
fn labels(svg: &str) -> Vec<String> {
    let texts = svg.split("<text").skip(1).filter_map(|part| part.split_once('>')?.1.split_once("</text>"));
    texts.map(|(text, _)| text.trim().to_owned()).collect()
}

#[test]
fn every_operation_is_measured_verified_and_reported() {
    measures_every_operation("every_operation_is_measured_verified_and_reported", "--ranks 2", 1);
}

#[test]
#[ignore = "make check"]
fn every_operation_is_measured_by_several_threads() {
    let job = "--ranks 3 --threads 2 --aggregate 4 --depth 16";
    measures_every_operation("every_operation_is_measured_by_several_threads", job, 2);
}

/// Runs all operations with the options `job`, and checks the reports.
fn measures_every_operation(test: &str, job: &str, threads: u64) {
    let Some(plugin) = dist(test) else { return };
    let files = Directory::new(test);
    let (json, csv, svg) = (files.file("run.json"), files.file("run.csv"), files.file("run.svg"));
    let out = ["--json", &json, "--csv", &csv, "--plot", &svg];
    let args = ["all -b 1 -e 4096 -f 8 -n 40 -w 3 --verify", job];
    let (output, text) = perf(&plugin, &[&args[..], &out].concat());
    assert!(output.status.success(), "{text}");

    let report = read_json(&json);
    assert_eq!(schema::check(&report), Ok(()));
    let rows = report["rows"].as_array().unwrap();
    for operation in OPERATIONS {
        let sizes: Vec<u64> =
            rows.iter().filter(|row| row["operation"] == operation).map(|row| row["bytes"].as_u64().unwrap()).collect();
        let expected: &[u64] = match operation {
            "signal" | "barrier" => &[0],
            "put-value" => &[1, 8],
            _ => &[1, 8, 64, 512, 4096],
        };
        assert_eq!(sizes, expected, "{operation}");
        assert_eq!(text.matches(&format!("\n{operation}: ")).count(), 1, "{text}");
    }
    for row in rows {
        let latency = ["min", "median", "p99", "p999", "max"].map(|name| row["latency_us"][name].as_f64().unwrap());
        assert!(latency.is_sorted() && latency[4] > 0.0, "{row}");
        let rate = row["rate_mops"].as_f64().unwrap();
        assert!(rate > 0.0, "{row}");
        let has_one_thread =
            ["barrier", "alltoall", "rma-put", "rma-put-signal"].contains(&row["operation"].as_str().unwrap());
        let threads = if has_one_thread { 1 } else { threads };
        assert_eq!((row["threads"].as_u64(), row["iterations"].as_u64()), (Some(threads), Some(40 * threads)), "{row}");
        let blocks = if row["operation"] == "alltoall" { report["ranks"].as_f64().unwrap() - 1.0 } else { 1.0 };
        match row["bandwidth_gbs"].as_f64() {
            None => assert!(["signal", "flush", "barrier"].contains(&row["operation"].as_str().unwrap()), "{row}"),
            Some(bandwidth) => {
                let expected = rate * row["bytes"].as_f64().unwrap() * blocks / 1e3;
                assert!((bandwidth / expected - 1.0).abs() < 1e-9, "{row}");
            }
        }
    }

    let table = std::fs::read_to_string(&csv).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), rows.len() + 1);
    let columns = lines[0].split(',').count();
    assert!(lines[0].starts_with("operation,bytes,") && lines.iter().all(|line| line.split(',').count() == columns));

    let labels = labels(&std::fs::read_to_string(&svg).unwrap());
    let drawn = ["median latency (µs)", "bandwidth (GB/s)", "size (bytes)", "8", "512", "Latency", "Bandwidth"];
    for label in drawn.into_iter().chain(OPERATIONS) {
        assert!(labels.iter().any(|text| text == label), "{label}: {labels:?}");
    }
}

#[test]
fn operations_of_cpus_need_no_card_for_kernels() {
    const TEST: &str = "operations_of_cpus_need_no_card_for_kernels";
    let Some(plugin) = dist(TEST) else { return };
    let over_tcp = |operations: &str| {
        let args = format!("perf {operations} -b 8 -e 512 -f 8 -n 20 --verify");
        ferrogin(&plugin, &args.split(' ').collect::<Vec<_>>(), &[("FERROGIN_PROVIDER", "tcp")])
    };
    let (output, text) = over_tcp("rpc rma-put rma-put-signal");
    assert!(output.status.success(), "{text}");
    // The GIN plugin doesn't run over tcp.
    let (output, text) = over_tcp("rma-put put");
    assert!(!output.status.success() && text.contains("tcp"), "{text}");
}

/// One size, and reports on standard output instead of the table.
#[test]
fn report_may_take_the_place_of_the_table() {
    let Some(plugin) = dist("report_may_take_the_place_of_the_table") else { return };
    let (output, text) = perf(&plugin, &["put -b 8 -e 8 -n 10 --json -"]);
    assert!(output.status.success(), "{text}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("only JSON");
    assert_eq!(schema::check(&report), Ok(()));
    let (output, text) = perf(&plugin, &["barrier --ranks 4 -n 10 --csv -"]);
    assert!(output.status.success() && output.stdout.starts_with(b"operation,"), "{text}");
}

#[test]
fn ranks_of_mpirun_are_ranks_of_perf() {
    const TEST: &str = "ranks_of_mpirun_are_ranks_of_perf";
    let Some(plugin) = dist(TEST) else { return };
    if mini_nccl::launch::find_mpirun().is_none() {
        return skip(TEST, "mpirun is not on PATH");
    }
    let mut command = Command::new("mpirun");
    command.args(crate::tool::MPIRUN).arg(env!("CARGO_BIN_EXE_ferrogin"));
    command.args(["perf", "put", "alltoall", "-n", "20", "-e", "64", "--verify"]);
    let output =
        command.env("NCCL_GIN_PLUGIN", &plugin).env(SOFTWARE_CARD.0, SOFTWARE_CARD.1).stdin(Stdio::null()).output();
    let output = output.expect("mpirun starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.matches("\nput: ").count() == 1 && text.matches("# 2 ranks on 1 host").count() == 1, "{text}");
}

#[test]
fn schema_refuses_other_reports() {
    let good = sample();
    assert_eq!(schema::check(&good), Ok(()));
    let change = |pointer: &str, value: Value| {
        let mut report = good.clone();
        *report.pointer_mut(pointer).unwrap() = value;
        report
    };
    for (pointer, value) in [
        ("/version", json!(2)),
        ("/ranks", json!(1)),
        ("/settings/threads", json!("1")),
        ("/settings/device", json!("tpu")),
        ("/gpu", json!({ "name": "a GPU" })),
        ("/rows/0/operation", json!("fly")),
        ("/rows/0/bandwidth_gbs", json!("much")),
        ("/rows/0/latency_us/p999", json!(-1)),
        ("/rows/0/latency_us", json!({ "min": 1, "median": 1, "p99": 1, "max": 1 })),
        ("/environment", json!({ "SOFTEFA_FAULTS": 1 })),
    ] {
        assert!(schema::check(&change(pointer, value)).is_err(), "{pointer}");
    }
    let mut more = good.clone();
    more["extra"] = json!(1);
    assert!(schema::check(&more).is_err());
}

/// A report of two operations.
fn sample() -> Value {
    let row = |operation: &str, bytes: u64, latency: f64, bandwidth: Value| {
        json!({
            "operation": operation, "bytes": bytes, "threads": 1, "iterations": 100, "rate_mops": 2.0 / latency,
            "latency_us": { "min": latency, "median": latency, "p99": latency, "p999": latency, "max": latency },
            "bandwidth_gbs": bandwidth,
        })
    };
    json!({
        "version": 1, "ferrogin": "0.1.0", "provider": "softefa", "wire": "shm", "libfabric": "1.17",
        "machine": { "processor": "a < b & c", "cores": 2, "architecture": "x86_64", "linux": "6.1" },
        "gpu": null, "ranks": 2, "hosts": 1,
        "settings": {
            "operations": ["put", "barrier"], "begin": 8, "end": 1024, "factor": 2, "iterations": null, "warmup": null,
            "threads": 1, "depth": 64, "aggregate": 1, "verify": false, "device": "cpu",
        },
        "environment": {},
        "rows": [
            row("put", 8, 1.0, json!(0.016)),
            row("put", 1024, 4.0, json!(0.5)),
            row("barrier", 0, 10.0, Value::Null),
        ],
    })
}

#[test]
fn compare_prints_ratios_and_refuses_other_questions() {
    let files = Directory::new("perf-compare");
    let before = files.write("before.json", &sample().to_string());
    let run = |after: &str| {
        let (output, text) = ferrogin(Path::new(""), &["compare", &before, after], &[]);
        (output.status.code(), text)
    };
    let mut slower = sample();
    slower["rows"][1]["latency_us"]["median"] = json!(6.0);
    slower["rows"][1]["rate_mops"] = json!(0.25);
    slower["wire"] = json!("tcp");
    let (code, text) = run(&files.write("slower.json", &slower.to_string()));
    assert_eq!(code, Some(0), "{text}");
    assert!(text.lines().filter(|line| !line.starts_with('#')).all(|line| line.len() <= 80), "{text}");
    let words = |start: &str| -> Vec<String> {
        let lines = text.lines().map(|line| line.split_whitespace().map(String::from).collect::<Vec<_>>());
        lines.into_iter().find(|words| words.join(" ").starts_with(start)).unwrap_or_else(|| panic!("{start}: {text}"))
    };
    assert_eq!(words("put 8 ")[4..], ["1.00", "1.000", "1.000", "1.00", "2.000", "2.000", "1.00"]);
    assert_eq!(words("put 1K ")[2..], ["4.000", "6.000", "1.50", "4.000", "4.000", "1.00", "0.500", "0.250", "0.50"]);
    assert_eq!(words("barrier - ")[4], "1.00");
    assert!(text.contains("# after: ferrogin 0.1.0, softefa over tcp"), "{text}");

    let below = |least: &str| {
        let (output, text) =
            ferrogin(Path::new(""), &["compare", "--fail-below", least, &before, &files.file("slower.json")], &[]);
        (output.status.code(), text)
    };
    assert_eq!(below("0.5").0, Some(0));
    let (code, text) = below("0.9");
    assert!(code == Some(4) && text.contains("the rate of put, 1024 bytes: 0.50 of before"), "{code:?} {text}");
    assert_eq!(below("2").0, Some(2));

    for (pointer, value, reason) in [
        ("/settings/depth", json!(16), "--depth 64 and 16"),
        ("/settings/threads", json!(2), "--threads 1 and 2"),
        ("/ranks", json!(4), "ranks 2 and 4"),
        ("/provider", json!("efa"), "provider softefa and efa"),
        ("/gpu", json!({ "name": "a GPU", "software": null }), "the GPU none and hardware"),
        ("/environment", json!({ "SOFTEFA_FAULTS": "seed=1" }), "faults none and seed=1"),
        ("/rows", json!([]), "no operation and size in common"),
    ] {
        let mut other = sample();
        *other.pointer_mut(pointer).unwrap() = value;
        let (code, text) = run(&files.write("other.json", &other.to_string()));
        assert!(
            code == Some(3) && text.contains(reason) && text.contains("Measure both"),
            "{pointer}: {code:?} {text}"
        );
    }
    let newer = sample().to_string().replace("\"version\":1", "\"version\":2");
    for (content, reason) in [
        (&newer[..], "report of version 2"),
        ("", "EOF while parsing"),
        ("[1]", "ferrogin perf --json"),
        ("{\"version\": 1}", "missing field"),
        ("\u{1}", "ferrogin perf --json"),
    ] {
        let (code, text) = run(&files.write("other.json", content));
        assert!(code == Some(1) && text.contains(reason) && text.contains("other.json"), "{content}: {code:?} {text}");
    }
    let (code, text) = run(&files.file("missing.json"));
    assert!(code == Some(1) && text.contains("cannot read") && text.contains("missing.json"), "{text}");
}

#[test]
fn picture_of_another_format_is_refused() {
    for args in [&["plot", "x.json", "-o", "x.png"][..], &["perf", "put", "--plot", "x.png"]] {
        let (output, text) = ferrogin(Path::new(""), args, &[]);
        assert!(output.status.code() == Some(2) && text.contains("plots are SVG"), "{text}");
    }
}

#[test]
fn plot_lays_runs_over_each_other() {
    let files = Directory::new("perf-plot");
    let (old, new) =
        (files.write("old.json", &sample().to_string()), files.write("a & <new>.json", &sample().to_string()));
    let picture = files.file("both.svg");
    let (output, text) = ferrogin(Path::new(""), &["plot", &old, &new, "-o", &picture], &[]);
    assert!(output.status.success(), "{text}");
    let svg = std::fs::read_to_string(&picture).unwrap();
    let labels = labels(&svg);
    for label in
        ["put · old", "put · a &amp; &lt;new&gt;", "barrier · old", "ferrogin perf", "size (bytes)", "8", "128"]
    {
        assert!(labels.iter().any(|text| text == label), "{label}: {labels:?}");
    }
    assert!(labels.iter().any(|text| text.contains("a &lt; b &amp; c, 2 cores")), "{labels:?}");
    let line = |text: &str| svg.matches(text).count();
    // Two lines per panel, for put; the barrier's levels are dashes.
    assert!(line("<polyline") >= 4 && line("<svg") == 1, "{svg}");

    let long = files.write(&format!("{}.json", "x".repeat(100)), &sample().to_string());
    let (output, text) = ferrogin(Path::new(""), &["plot", &old, &long, "-o", &picture], &[]);
    assert!(output.status.success(), "{text}");
    let svg = std::fs::read_to_string(&picture).unwrap();
    assert!(self::labels(&svg).contains(&format!("put · {}…", "x".repeat(29))), "{svg}");

    let mut empty = sample();
    empty["rows"] = json!([sample()["rows"][2]]);
    let empty = files.write("empty.json", &empty.to_string());
    let unwritable = files.file("no/such/directory.svg");
    for (args, reason) in [
        ([&*empty, "-o", &*picture], "no operation with sizes"),
        ([&*old, "-o", &*unwritable], "cannot write"),
        (["/nonexistent.json", "-o", &*picture], "cannot read"),
    ] {
        let (output, text) = ferrogin(Path::new(""), &[&["plot"][..], &args].concat(), &[]);
        assert!(output.status.code() == Some(1) && text.contains(reason), "{text}");
    }
}

#[test]
fn plot_refuses_figures_that_fit_on_no_axis() {
    let files = Directory::new("perf-axis");
    let picture = files.file("axis.svg");
    for (pointer, figure, reason) in [
        // Without the check this one is drawn; plotters never finishes the others.
        ("/rows/1/bandwidth_gbs", -1.0, "bandwidth of -1"),
        ("/rows/0/latency_us/median", 1e-308, "latency of 1e-308"),
        ("/rows/0/latency_us/median", 1e-320, "latency of 1e-320"),
        ("/rows/1/latency_us/median", 1.7e308, "latency of 1.7e308"),
        ("/rows/2/latency_us/median", 1e-308, "barrier"),
        ("/rows/1/bandwidth_gbs", 1.7e308, "bandwidth of 1.7e308"),
    ] {
        let mut report = sample();
        *report.pointer_mut(pointer).unwrap() = json!(figure);
        let report = files.write("odd.json", &report.to_string());
        let (output, text) = ferrogin(Path::new(""), &["plot", &report, "-o", &picture], &[]);
        assert!(output.status.code() == Some(1) && text.contains(reason), "{text}");
        assert!(text.contains("odd") && !Path::new(&picture).exists(), "{text}");
    }
    // The ends of the axis, and an operation that was too fast for the clock.
    for figure in [1e-15, 1e15, 0.0] {
        let mut report = sample();
        report["rows"][0]["latency_us"]["median"] = json!(figure);
        let report = files.write("odd.json", &report.to_string());
        let (output, text) = ferrogin(Path::new(""), &["plot", &report, "-o", &picture], &[]);
        assert!(output.status.success(), "{text}");
    }
}

#[test]
fn invalid_arguments_are_refused_before_ranks_start() {
    for (args, reason) in [
        ("put -b 64 -e 8", "-b 64 is above -e 8"),
        ("put -b 1M -e 1K", "-b 1M is above -e 1K"),
        ("put -f 0", "at least 2"),
        ("put -f 1", "at least 2"),
        ("put -f NaN", "at least 2"),
        ("put -b 0", "from 1 byte to 1G"),
        ("put -e 0K", "from 1 byte to 1G"),
        ("put -e 1099511627776", "from 1 byte to 1G"),
        ("put -e 1024G", "from 1 byte to 1G"),
        ("put -e 99999999999999999999", "a size is a whole number"),
        ("put -e 18446744073709551615G", "from 1 byte to 1G"),
        ("put -e 1T", "a size is a whole number"),
        ("put -e 1.5K", "a size is a whole number"),
        ("put-value -b 16", "put-value only has the sizes 1, 2, 4 and 8"),
        ("all put-value -b 3 -e 7", "put-value only has the sizes 1, 2, 4 and 8"),
        ("put --depth 48", "a power of two from 1 to 1024"),
        ("put --depth 2048", "a power of two from 1 to 1024"),
        ("put --threads 0", "1..=64"),
        ("put --aggregate 0", "1..=1024"),
        ("put --ranks 1", "2..=64"),
        ("put -n 0", "1..=1000000"),
        ("rpc --device cuda", "rpc runs between CPUs"),
        ("put rma-put --device cuda", "rma-put runs between CPUs"),
        ("put --json - --csv -", "two outputs are standard output"),
        ("signal barrier --plot x.svg", "have none"),
        ("put -n 2000000", "1..=1000000"),
        ("fly", "possible values: put, put-signal"),
    ] {
        let (output, text) = perf(Path::new(""), &[args]);
        assert!(output.status.code() == Some(2) && text.contains(reason), "{args}: {text}");
    }
    let (output, text) = perf(Path::new(""), &["put -e 8 --json /nonexistent/directory/x.json"]);
    assert!(output.status.code() == Some(1) && text.contains("cannot write /nonexistent/directory/x.json"), "{text}");
}

/// Starts the ranks by hand, each with its own arguments.
fn by_hand(plugin: &Path, job: &str, ranks: &[(&str, &str, &str)]) -> Vec<(Option<i32>, String)> {
    let address = format!("perf-test-{job}-{}", std::process::id());
    let start = |&(rank, nranks, args): &(&str, &str, &str)| {
        let mut command = command();
        command
            .args(["perf"])
            .args(args.split(' '))
            .env("NCCL_GIN_PLUGIN", plugin)
            .env(SOFTWARE_CARD.0, SOFTWARE_CARD.1);
        command.env("FERROGIN_RANK", rank).env("FERROGIN_NRANKS", nranks).env("FERROGIN_BOOTSTRAP", &address);
        if ranks.len() == 1 {
            command.env("FERROGIN_TIMEOUT", "1");
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the tool starts")
    };
    let started: Vec<_> = ranks.iter().map(start).collect();
    let ended = started.into_iter().map(|rank| rank.wait_with_output().expect("the rank ends"));
    ended.map(|output| (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())).collect()
}

#[test]
fn ranks_that_do_not_fit_are_refused() {
    let Some(plugin) = dist("ranks_that_do_not_fit_are_refused") else { return };
    let two = |job: &str, a: &str, b: &str| by_hand(&plugin, job, &[("0", "2", a), ("1", "2", b)]);
    for (job, a, b, reason) in [
        ("sizes", "put -e 16", "put -e 32", "rank 1 has --end 32, but rank 0 has 16"),
        ("threads", "put", "put --threads 2", "rank 1 has --threads 2, but rank 0 has 1"),
        ("operations", "put get", "put", "rank 1 has the operations put, but rank 0 has put get"),
    ] {
        let ended = two(job, a, b);
        assert!(ended.iter().all(|(code, _)| *code == Some(1)), "{ended:?}");
        assert!(ended[0].1.contains(reason) && ended[0].1.contains("same arguments"), "{ended:?}");
    }
    let other_ranks = by_hand(&plugin, "ranks", &[("0", "2", "put"), ("1", "3", "put")]);
    assert!(
        other_ranks.iter().all(|(code, text)| *code == Some(1) && text.contains("one of 3 ranks")),
        "{other_ranks:?}"
    );
    for (job, rank, args, reason) in [
        ("alone", ("0", "2"), "put", "waited 1s for rank 1"),
        ("no-rendezvous", ("1", "2"), "put", "cannot connect to"),
        ("single", ("0", "1"), "put", "has 1 rank, and perf needs 2"),
        ("ranks-too", ("0", "2"), "put --ranks 3", "--ranks 3, but the launcher"),
    ] {
        let ended = by_hand(&plugin, job, &[(rank.0, rank.1, args)]);
        assert!(ended[0].0 == Some(1) && ended[0].1.contains(reason), "{ended:?}");
    }
}

#[test]
fn failed_run_reports_the_cause_and_leaves_no_file() {
    let Some(plugin) = dist("failed_run_reports_the_cause_and_leaves_no_file") else { return };
    let files = Directory::new("perf-failed");
    let json = files.file("run.json");
    let settings = [SOFTWARE_CARD, ("SOFTEFA_FAULTS", "error_every=50")];
    let (output, text) = ferrogin(&plugin, &["perf", "put", "-e", "8", "--json", &json], &settings);
    assert!(output.status.code() == Some(1) && text.contains("put of 8 bytes failed"), "{text}");
    assert!(!Path::new(&json).exists());
    // Without a card.
    let (output, text) = ferrogin(&plugin, &["perf", "put", "-e", "8"], &[]);
    assert!(output.status.code() == Some(1) && text.contains("FERROGIN_PROVIDER=softefa"), "{text}");
}

#[test]
fn manual_has_every_option_and_operation() {
    let (_, help) = ferrogin(Path::new(""), &["perf", "--help"], &[]);
    let manual = std::fs::read_to_string(workspace().join("docs/perf.md")).expect("the manual");
    let options =
        help.split_whitespace().filter(|word| word.starts_with("--")).map(|word| word.trim_matches([',', '.']));
    for name in options.filter(|name| *name != "--help").chain(OPERATIONS) {
        assert!(manual.contains(&format!("`{name}")), "{name}");
    }
}
