//! Leak tests: file descriptors, mappings, threads and bytes, over many cycles.
#![allow(unsafe_code)]

use crate::harness::{REPORT, alone, alone_each, config, pass_round, ranks, window};
use crate::metrics::MetricsFile;
use ferrogin_test_support::repetitions;
use ferrogin_test_support::wait::wait_until;
use mini_nccl::Plugin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A process's resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Resources {
    descriptors: usize,
    /// Mappings of files and memfds.
    file_mappings: usize,
    threads: usize,
}

fn resources() -> Resources {
    let count = |dir: &str| std::fs::read_dir(dir).map_or(0, Iterator::count);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    // The last column is a path or a name in brackets; heaps and stacks have a bracketed name or none.
    let named = |line: &&str| line.split_whitespace().nth(5).is_some_and(|name| name.starts_with('/'));
    Resources {
        descriptors: count("/proc/self/fd"),
        file_mappings: maps.lines().filter(named).count(),
        threads: count("/proc/self/task"),
    }
}

impl Resources {
    /// Returns the minimum of each.
    fn min(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.min(other.descriptors),
            file_mappings: self.file_mappings.min(other.file_mappings),
            threads: self.threads.min(other.threads),
        }
    }

    /// Returns true if no number is larger than in `before`.
    fn within(self, before: Self) -> bool {
        self.min(before) == self
    }
}

/// Returns the allocated bytes, in all arenas and by mmap. The plugin, the provider and libfabric use this program's
/// allocator. With [`EXACT`] the number goes down as soon as memory is freed.
fn bytes() -> usize {
    // SAFETY: mallinfo2 takes no arguments and only reads the allocator's statistics.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// glibc settings. It counts thread caches and the arenas' own data as allocated, so the tests use no caches and one
/// arena.
const EXACT: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1");
/// A cycle of two ranks must leave fewer bytes than this on average: it's the smallest size of a leaked allocation.
const LEFT: usize = 32;

/// Returns true if `cycles` cycles left no more bytes than they may.
fn few_bytes_left(cycles: usize, before: usize, after: usize) -> bool {
    let left = after as isize - before as isize;
    println!("{}{cycles} cycles: {before}, then {after} bytes: {left} more", REPORT);
    left < (LEFT * cycles) as isize
}

const EMULATED: (&str, &str) = ("FERROGIN_SIGNALS", "emulated");

/// Creates and closes two-rank communicators, one after the other.
fn communicators(plugin: &Arc<Plugin>, times: usize) {
    for i in 0..times {
        ranks(plugin, 2, move |_, comm| {
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(2, 1)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 1);
            // In every other cycle closeColl closes the context.
            if i % 2 == 0 {
                context.abandon();
            } else {
                context.destroy().expect("destroyed");
            }
        });
        drop(mini_nccl::log::take());
    }
}

#[test]
fn communicators_leak_no_resources() {
    let metrics = MetricsFile::new("leaks");
    let settings = [
        vec![],
        vec![metrics.setting(), ("FERROGIN_METRICS_INTERVAL", "1"), ("FERROGIN_TEST_CYCLES", "20")],
        vec![EMULATED, ("FERROGIN_TEST_CYCLES", "20")],
    ];
    alone_each("communicators_leak_no_resources", &settings, |plugin| {
        let n = repetitions("FERROGIN_TEST_CYCLES", 30, 200) as usize;
        communicators(&plugin, 10);
        let held = resources();
        communicators(&plugin, n);
        println!("{REPORT}{n} cycles: {held:?}, then {:?}", resources());
        // The kernel counts a joined thread until it removes it.
        wait_until("release of all resources", || resources().within(held));
    });
}

/// libfabric 1.17 itself leaks a few hundred bytes per message endpoint; newer ones don't.
#[test]
#[ignore = "make check"]
fn communicators_leak_no_memory() {
    const TEST: &str = "communicators_leak_no_memory";
    let newer = std::env::var("FERROGIN_LIBFABRIC_ALT").or_else(|_| std::env::var("FERROGIN_LIBFABRIC"));
    let Ok(newer) = newer else {
        let why = "FERROGIN_LIBFABRIC_ALT names no libfabric newer than 1.17, which leaks by itself";
        ferrogin_test_support::skip(TEST, why);
        return;
    };
    let metrics = MetricsFile::new("leaks-of-memory");
    alone(TEST, &[("FERROGIN_LIBFABRIC", &newer), EXACT, metrics.setting()], |plugin| {
        let n = repetitions("FERROGIN_TEST_CYCLES", 60, 200) as usize;
        let after_cycles = || {
            communicators(&plugin, n);
            bytes()
        };
        after_cycles();
        let (before, after) = (after_cycles(), after_cycles());
        assert!(few_bytes_left(n, before, after), "bytes are left after {n} cycles");
    });
}

#[test]
#[ignore = "make check"]
fn contexts_of_one_communicator_leak_nothing() {
    let metrics = MetricsFile::new("leaks-of-contexts");
    // A write of the file holds its text for a moment, so the interval is longer than the test.
    let rare = ("FERROGIN_METRICS_INTERVAL", "60");
    let settings = [
        vec![EXACT],
        vec![EXACT, metrics.setting(), rare, ("FERROGIN_TEST_CYCLES", "100")],
        vec![EXACT, EMULATED, ("FERROGIN_TEST_CYCLES", "100")],
    ];
    alone_each("contexts_of_one_communicator_leak_nothing", &settings, |plugin| {
        let is_released = AtomicBool::new(false);
        ranks(&plugin, 2, move |rank, comm| {
            let cycle = |times: usize| {
                for _ in 0..times {
                    let (_, window) = window(&comm, 4096);
                    let context = comm.create_context(&config(2, 1)).expect("a context");
                    context.destroy().expect("destroyed");
                    window.deregister().expect("deregistered");
                    drop(mini_nccl::log::take());
                }
                // The count includes the other rank's resources, and reading them opens a descriptor.
                comm.barrier().expect("all ranks");
                let held = (rank == 0).then(|| (resources(), bytes()));
                comm.barrier().expect("all ranks");
                held
            };
            // The minimum of several counts, because the other rank and the watcher briefly hold some resources.
            let least = |one: (Resources, usize), other: (Resources, usize)| (one.0.min(other.0), one.1.min(other.1));
            let settled = || (0..8).filter_map(|_| cycle(5)).reduce(least);
            let n = repetitions("FERROGIN_TEST_CYCLES", 300, 1000) as usize;
            // The driver's and the card's tables reach their final size within this many cycles.
            cycle(n.max(200));
            let before = settled();
            cycle(n);
            wait_until("release of all resources", || {
                if let (Some((held, before)), Some((still_held, after))) = (before, cycle(5)) {
                    let all_released = still_held.within(held) && few_bytes_left(n, before, after);
                    is_released.store(all_released, Ordering::Release);
                }
                comm.barrier().expect("all ranks");
                is_released.load(Ordering::Acquire)
            });
        });
    });
}
