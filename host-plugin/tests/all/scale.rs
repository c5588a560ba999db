//! Growth of set-up with the number of ranks: address insertions, time, memory and descriptors of `createContext`.
//!
//! FERROGIN_SCALE_RANKS (a comma list) chooses the numbers of ranks, which are threads of one process here.
#![allow(unsafe_code)]

use crate::harness::{REPORT, TraceFile, alone, config, ranks};
use ferrogin_ffi::nccl::GinConfigV14;
use std::time::{Duration, Instant};

const SIGNALS: i32 = 64;

/// CPU time of this thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime writes `time`, a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn resident_mib() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) / 256
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

#[test]
fn set_up_grows_with_ranks_only() {
    let trace = TraceFile::new("scale");
    // All ranks share one card, which needs the counters of all.
    let settings = [trace.setting(), ("FERROGIN_TIMEOUT", "300"), ("SOFTEFA_FAULTS", "cntr_budget=65536")];
    alone("set_up_grows_with_ranks_only", &settings, |plugin| {
        let list = std::env::var("FERROGIN_SCALE_RANKS").unwrap_or_else(|_| "2,4,8".to_owned());
        println!(
            "{REPORT}| ranks | insertions | wall ms | CPU ms of a rank: endpoints | peers | all | MiB | descriptors |"
        );
        for n in list.split(',').map(|n| n.parse::<usize>().expect("a number of ranks")) {
            let each = ranks(&plugin, n, move |rank, comm| {
                comm.barrier().expect("all ranks");
                let (began, used) = (Instant::now(), thread_time());
                let context = comm.create_context(&GinConfigV14 { queue_depth: 0, ..config(SIGNALS, 0) });
                let context = context.expect("a context");
                let (took, used) = (began.elapsed(), thread_time() - used);
                comm.barrier().expect("all ranks");
                let held = (rank == 0).then(|| (resident_mib(), descriptors()));
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
            let inserted: Vec<_> = peers.iter().filter_map(|event| event["args"]["av_insertions"].as_u64()).collect();
            assert_eq!(
                inserted,
                vec![(1 + SIGNALS as u64) * n as u64; n],
                "one insertion for each peer endpoint, on each rank"
            );
            // The steps wait for no other rank, but the threads share the cores, so CPU time is the cost of a rank.
            let mean = |events: &[&serde_json::Value]| {
                let all: u64 = events.iter().filter_map(|event| event["args"]["cpu_us"].as_u64()).sum();
                all as f64 / n as f64 / 1e3
            };
            let wall = each.iter().map(|(took, ..)| took.as_secs_f64()).fold(0.0, f64::max) * 1e3;
            let all = each.iter().map(|(_, used, _)| used.as_secs_f64()).sum::<f64>() / n as f64 * 1e3;
            let (mib, fds) = each.iter().find_map(|(.., held)| *held).expect("rank 0's");
            println!(
                "{REPORT}| {n} | {} | {wall:.1} | {:.2} | {:.2} | {all:.2} | {mib} | {fds} |",
                inserted[0],
                mean(&endpoints),
                mean(&peers)
            );
        }
    });
}
