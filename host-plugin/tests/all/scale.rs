//! How set-up grows with the number of ranks: `createContext`'s address insertions, messages, time, memory and
//! descriptors.
//!
//! FERROGIN_SCALE_RANKS (comma-separated) chooses the numbers of ranks, which are threads of one process here.
//! FERROGIN_SCALE_RUNS=N measures each unit cost N times; reports show the medians.
#![allow(unsafe_code)]

mod plan;

use crate::harness::{REPORT, TraceFile, alone, alone_each, config, ranks};
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_test_support::repetitions;
use mini_nccl::{Comm, Plugin};
use plan::{Setup, allgather};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIGNALS: i32 = 64;

/// Returns this thread's CPU time.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime writes `time`, a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn resident_kib() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Returns how often to measure each unit cost.
fn runs(usual: u64) -> usize {
    repetitions("FERROGIN_SCALE_RUNS", usual, 21) as usize
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns this process's CPU time in milliseconds, and the number of pages that it touched for the first time.
fn used() -> (f64, i64) {
    // SAFETY: all fields are integers, for which zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: getrusage writes `usage`, a local variable.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    let ms = |time: libc::timeval| time.tv_sec as f64 * 1e3 + time.tv_usec as f64 / 1e3;
    (ms(usage.ru_utime) + ms(usage.ru_stime), usage.ru_minflt)
}

/// Since 2.0, libfabric's `tcp` touches 17 MiB when an endpoint posts its first receive. The software card's wire does
/// so once.
#[test]
fn init_needs_no_memory_for_messages() {
    let newer = std::env::var("FERROGIN_LIBFABRIC_ALT").ok();
    let settings = [Some(vec![]), newer.as_deref().map(|path| vec![("FERROGIN_LIBFABRIC", path)])];
    for settings in settings.into_iter().flatten() {
        // A process only pays for its first `init`.
        let reports = alone_each("init_needs_no_memory_for_messages", &vec![settings.clone(); runs(1)], |plugin| {
            let (ms, faults) = used();
            Comm::probe(&plugin).expect("an init");
            let (ms, faults) = (used().0 - ms, used().1 - faults);
            println!("{REPORT}init: {ms:.1} ms of processor time, {faults} pages");
            assert!(faults < (4 << 20) / 4096, "{faults} pages");
        });
        if reports.is_empty() {
            // This is the child process, which has done its one `init`.
            return;
        }
        let times = reports.iter().filter_map(|line| line.split(' ').nth(1)?.parse().ok()).collect::<Vec<f64>>();
        if times.len() > 1 {
            println!("init, median of {}: {:.1} ms of processor time, {settings:?}", times.len(), median(times));
        }
    }
}

#[test]
fn set_up_grows_with_ranks_only() {
    let trace = TraceFile::new("scale");
    // All ranks share one card, which needs counters for all of them.
    let settings = [trace.setting(), ("FERROGIN_TIMEOUT", "300"), ("SOFTEFA_FAULTS", "cntr_budget=65536")];
    alone("set_up_grows_with_ranks_only", &settings, |plugin| {
        let list = std::env::var("FERROGIN_SCALE_RANKS").unwrap_or_else(|_| "2,4,8".to_owned());
        println!(
            "{REPORT}| ranks | insertions | messages | KiB | wall ms | CPU ms of a rank: endpoints | peers | all | MiB | descriptors |"
        );
        for n in list.split(',').map(|n| n.parse::<usize>().expect("a number of ranks")) {
            let each = ranks(&plugin, n, move |rank, comm| {
                comm.barrier().expect("all ranks");
                let (began, used) = (Instant::now(), thread_time());
                let context = comm.create_context(&GinConfigV14 { queue_depth: 0, ..config(SIGNALS, 0) });
                let context = context.expect("a context");
                let (took, used) = (began.elapsed(), thread_time() - used);
                comm.barrier().expect("all ranks");
                let held = (rank == 0).then(|| (resident_kib() / 1024, descriptors()));
                comm.barrier().expect("all ranks");
                context.destroy().expect("destroyed");
                (took, used, held)
            });
            let steps = TraceFile::steps();
            let newest = |name: &str| {
                let all: Vec<_> = steps.iter().filter(|event| event["name"] == name).collect();
                all[all.len() - n..].to_vec()
            };
            let (peers, endpoints) = (newest("createContext: peers"), newest("createContext: endpoints"));
            let noted = |events: &[&serde_json::Value], key: &str| -> Vec<_> {
                events.iter().map(|event| event["args"][key].as_u64().expect("a number")).collect()
            };
            // All ranks are in this process and share its card.
            let inserted = noted(&peers, "av_insertions");
            assert_eq!(inserted, vec![1; n], "one insertion for each card, on each rank");
            let exchange = newest("createContext: exchange");
            let setup = Setup {
                ranks: n,
                signals: SIGNALS as usize,
                contexts: 1,
                stride: 1,
                ranks_per_card: n,
                emulated: false,
            };
            for (key, expected) in [
                ("messages", setup.messages()),
                ("bytes_sent", setup.messages() * setup.block()),
                ("bytes_received", setup.messages() * setup.block()),
            ] {
                assert_eq!(noted(&exchange, key), vec![expected; n], "{key} of {n} ranks");
            }
            // The steps don't wait for other ranks, but the threads share the cores, so a rank's cost is its CPU time.
            let mean = |events: &[&serde_json::Value]| {
                let all: u64 = events.iter().filter_map(|event| event["args"]["cpu_us"].as_u64()).sum();
                all as f64 / n as f64 / 1e3
            };
            let wall = each.iter().map(|(took, ..)| took.as_secs_f64()).fold(0.0, f64::max) * 1e3;
            let all = each.iter().map(|(_, used, _)| used.as_secs_f64()).sum::<f64>() / n as f64 * 1e3;
            let (mib, fds) = each.iter().find_map(|(.., held)| *held).expect("rank 0's");
            println!(
                "{REPORT}| {n} | {} | {} | {:.1} | {wall:.1} | {:.2} | {:.2} | {all:.2} | {mib} | {fds} |",
                inserted[0],
                setup.messages(),
                (setup.messages() * setup.block()) as f64 / 1024.0,
                mean(&endpoints),
                mean(&peers)
            );
        }
    });
}

/// One measured `createContext`, with ranks that are threads of this process.
struct Measured {
    /// CPU microseconds per rank for its endpoints, and for its targets and tables.
    endpoints: f64,
    tables: f64,
    /// Microseconds that the exchange took on the rank that waited least.
    exchange: f64,
    /// KiB of resident memory for all ranks' contexts.
    resident: f64,
}

fn measure(plugin: &Arc<Plugin>, n: usize) -> Measured {
    let held = ranks(plugin, n, |_, comm| {
        comm.barrier().expect("all ranks");
        let connected = resident_kib();
        comm.barrier().expect("all ranks");
        let context = comm.create_context(&GinConfigV14 { queue_depth: 0, ..config(SIGNALS, 0) }).expect("a context");
        comm.barrier().expect("all ranks");
        let resident = resident_kib();
        comm.barrier().expect("all ranks");
        context.destroy().expect("destroyed");
        resident as f64 - connected as f64
    });
    let steps = TraceFile::steps();
    let newest = |name: &str, key: &str| {
        let all: Vec<_> = steps.iter().filter(|event| event["name"] == name).collect();
        let value = |event: &&serde_json::Value| event[key].as_u64().or(event["args"][key].as_u64()).expect("a number");
        all[all.len() - n..].iter().map(value).collect::<Vec<_>>()
    };
    let emulated = std::env::var("FERROGIN_SIGNALS").is_ok_and(|signals| signals == "emulated");
    let signals = SIGNALS as usize;
    let setup = Setup { ranks: n, signals, contexts: 1, stride: 1, ranks_per_card: n, emulated };
    let received = newest("createContext: exchange", "bytes_received");
    assert_eq!(received, vec![setup.messages() * setup.block(); n], "the counts of {n} ranks are exact");
    let mean = |values: Vec<u64>| values.iter().sum::<u64>() as f64 / n as f64;
    Measured {
        endpoints: mean(newest("createContext: endpoints", "cpu_us")),
        tables: mean(newest("createContext: peers", "cpu_us")),
        exchange: newest("createContext: exchange", "dur").into_iter().min().unwrap_or(0) as f64,
        resident: held.into_iter().fold(0.0, f64::max),
    }
}

/// NCCL's all-rank barrier takes one signal per rank for each block that has its own barrier. Counts are exact, times
/// come from unit costs measured in this run.
#[test]
#[ignore = "make check"]
fn set_up_with_barriers_of_many_ranks_is_tabulated() {
    let all = ["card", "emulated"].map(|signals| (TraceFile::new(&format!("barriers-{signals}")), signals));
    let settings: Vec<_> = all
        .iter()
        .map(|(trace, signals)| {
            vec![trace.setting(), ("FERROGIN_SIGNALS", *signals), ("SOFTEFA_FAULTS", "cntr_budget=65536")]
        })
        .collect();
    alone_each("set_up_with_barriers_of_many_ranks_is_tabulated", &settings, |plugin| {
        let emulated = std::env::var("FERROGIN_SIGNALS").is_ok_and(|signals| signals == "emulated");
        // A context with emulated signals has only one row per rank.
        let many_ranks = if emulated { 32 } else { 8 };
        let of = |ranks, signals| Setup { ranks, signals, contexts: 1, stride: 1, ranks_per_card: 1, emulated };
        measure(&plugin, 2);
        let several = |ranks| (0..runs(5)).map(|_| measure(&plugin, ranks)).collect::<Vec<_>>();
        let (few, many) = (several(2), several(many_ranks));
        let middle = |of: &[Measured], value: fn(&Measured) -> f64| median(of.iter().map(value));
        let (two, all) = (of(2, SIGNALS as usize), of(many_ranks, SIGNALS as usize));
        let endpoint = middle(&few, |one| one.endpoints) / two.endpoints() as f64;
        let tables = |of: &[Measured]| middle(of, |one| one.tables);
        let row = (tables(&many) - tables(&few)).max(0.0) / (all.rows() - two.rows()) as f64;
        println!(
            "{REPORT}emulated {emulated}, medians of {}: endpoint {endpoint:.0} us, target {row:.3} us",
            few.len()
        );
        println!(
            "{REPORT}| ranks | barriers | queue pairs | counters | MiB received | MiB of tables | MiB of words and receives \
             | ms for endpoints and tables |"
        );
        for (ranks, barriers) in [(1024, 1), (1024, 16), (4096, 1), (4096, 16), (16384, 1), (16384, 16)] {
            let setup = of(ranks, ranks * barriers);
            let mib = |bytes: f64| bytes / f64::from(1 << 20);
            println!(
                "{REPORT}| {ranks} | {barriers} | {} | {} | {:.2} | {:.2} | {:.2} | {:.1} |",
                setup.endpoints(),
                setup.counters(),
                mib((setup.messages() * setup.block()) as f64),
                mib(setup.device_bytes() as f64),
                mib(setup.host_bytes() as f64),
                (setup.endpoints() as f64 * endpoint + setup.rows() as f64 * row) / 1e3,
            );
        }
    });
}

/// Counts are exact, times come from unit costs measured in this run: the software card on this machine.
#[test]
#[ignore = "make check"]
fn set_up_of_many_ranks_is_tabulated() {
    let trace = TraceFile::new("scale-of-many");
    let settings = [trace.setting(), ("FERROGIN_TIMEOUT", "300"), ("SOFTEFA_FAULTS", "cntr_budget=65536")];
    alone("set_up_of_many_ranks_is_tabulated", &settings, |plugin| {
        const MANY: usize = 32;
        let of = |ranks, signals, contexts| Setup {
            ranks,
            signals,
            contexts,
            stride: 1,
            ranks_per_card: 1,
            emulated: false,
        };
        measure(&plugin, 2);
        let several = |times, ranks| (0..times).map(|_| measure(&plugin, ranks)).collect::<Vec<_>>();
        let (few, many) = (several(runs(5), 2), several(runs(3), MANY));
        let middle = |of: &[Measured], value: fn(&Measured) -> f64| median(of.iter().map(value));
        let (two, all) = (of(2, SIGNALS as usize, 1), of(MANY, SIGNALS as usize, 1));
        let endpoint = middle(&few, |one| one.endpoints) / two.endpoints() as f64;
        let tables = |of: &[Measured]| middle(of, |one| one.tables);
        let row = (tables(&many) - tables(&few)).max(0.0) / (all.rows() - two.rows()) as f64;
        let hop = middle(&few, |one| one.exchange);
        let kib = many.iter().map(|one| one.resident).fold(0.0, f64::max) / (MANY * all.endpoints()) as f64;
        println!(
            "{REPORT}unit costs, medians of {}: endpoint {endpoint:.0} us, target {row:.3} us, hop {hop:.0} us, {kib:.0} KiB an endpoint",
            few.len()
        );
        println!(
            "{REPORT}| ranks | signals | contexts | queue pairs | counters | insertions | MiB received | tables, MiB | ms: endpoints \
             | tables | an exchange | with stops of 1 ms |"
        );
        for (ranks, signals, contexts) in
            [(8, 64, 1), (64, 64, 1), (512, 64, 1), (4096, 64, 1), (16384, 64, 1), (16384, 8, 1), (16384, 8, 4)]
        {
            let setup = of(ranks, signals, contexts);
            let mib = |bytes: f64| bytes / f64::from(1 << 20);
            let smooth = allgather(ranks, hop as f32, 0.0, 1);
            assert!((f64::from(smooth) / (hop * (ranks - 1) as f64) - 1.0).abs() < 0.01, "one hop a round");
            println!(
                "{REPORT}| {ranks} | {signals} | {contexts} | {} | {} | {} | {:.2} | {:.2} | {:.1} | {:.1} | {:.0} | {:.0} |",
                setup.endpoints(),
                setup.counters(),
                setup.insertions(),
                mib((setup.messages() * setup.block()) as f64),
                mib(setup.device_bytes() as f64),
                setup.endpoints() as f64 * endpoint / 1e3,
                setup.rows() as f64 * row / 1e3,
                smooth / 1e3,
                allgather(ranks, hop as f32, 1000.0, 1) / 1e3,
            );
        }
    });
}
