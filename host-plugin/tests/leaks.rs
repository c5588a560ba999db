//! What is taken is given back: descriptors, mappings, threads and bytes, over many cycles.
#![allow(unsafe_code)]

mod harness;

use harness::{alone, config, pass_round, ranks, rounds, window};
use mini_nccl::Plugin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Holdings {
    descriptors: usize,
    /// Of files and memfds.
    file_mappings: usize,
    threads: usize,
}

fn holdings() -> Holdings {
    let count = |dir: &str| std::fs::read_dir(dir).map_or(0, Iterator::count);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    // The last column is a path or a name in brackets; heaps and stacks have none or the latter.
    let named = |line: &&str| line.split_whitespace().nth(5).is_some_and(|name| name.starts_with('/'));
    Holdings {
        descriptors: count("/proc/self/fd"),
        file_mappings: maps.lines().filter(named).count(),
        threads: count("/proc/self/task"),
    }
}

impl Holdings {
    /// The less of each.
    fn least(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.min(other.descriptors),
            file_mappings: self.file_mappings.min(other.file_mappings),
            threads: self.threads.min(other.threads),
        }
    }

    /// Nothing is more than before.
    fn within(self, before: Self) -> bool {
        self.least(before) == self
    }
}

/// What is held once it is no more than `before`, or at last. A thread that was joined is counted until the kernel has
/// taken it away.
fn holdings_within(before: Holdings) -> Holdings {
    let began = Instant::now();
    loop {
        let held = holdings();
        if held.within(before) || began.elapsed() > harness::PATIENCE {
            return held;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes that are allocated and not freed, in all arenas and by mmap. The plugin, the provider and libfabric share one
/// allocator with this program. [`EXACT`] makes its books say what is freed as soon as it is.
fn bytes() -> usize {
    // SAFETY: no arguments; reads the allocator's own books.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// glibc counts what a thread keeps for its own next allocations as in use, and what an arena is managed by: let threads keep
/// nothing, and share one arena however many run at once.
const EXACT: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1");
const CYCLES: usize = 1000;
/// What a cycle may leave, which is one of two ranks: less than any forgotten allocation of each, since the smallest takes 32.
const LEFT: usize = 32;

fn check_bytes(cycles: usize, before: usize, after: usize) {
    let left = after as isize - before as isize;
    println!("{}{cycles} cycles: {before}, then {after} bytes: {left} more", harness::TELL);
    assert!(left < (LEFT * cycles) as isize, "{left} bytes more after {cycles} cycles");
}

/// Whole communicators of two ranks, one after the other.
fn communicators(plugin: &Arc<Plugin>, times: usize) {
    for i in 0..times {
        ranks(plugin, 2, move |_, comm| {
            let (memory, window) = window(&comm, 4096);
            let context = comm.create_context(&config(2, 1)).expect("a context");
            pass_round(&comm, &context, 0, &window, &memory, 1);
            // Every other time, closeColl has to sweep.
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
fn cycles_leak_nothing() {
    alone("cycles_leak_nothing", &[], |plugin| {
        let n = rounds("FERROGIN_TEST_CYCLES", CYCLES / 5);
        communicators(&plugin, 10);
        let held = holdings();
        communicators(&plugin, n);
        let still_held = holdings_within(held);
        println!("{}{n} cycles: {held:?}, then {still_held:?}", harness::TELL);
        assert!(still_held.within(held), "{held:?}, after {n} cycles {still_held:?}");
    });
}

/// libfabric 1.17 loses some hundred bytes for each endpoint of its messages that is opened; a newer one loses none.
#[test]
fn cycles_leak_no_byte() {
    const TEST: &str = "cycles_leak_no_byte";
    let newer = std::env::var("FERROGIN_LIBFABRIC_ALT").or_else(|_| std::env::var("FERROGIN_LIBFABRIC"));
    let Ok(newer) = newer else {
        let why = "FERROGIN_LIBFABRIC_ALT names no libfabric newer than 1.17, which leaks by itself";
        ferrogin_test_support::skip(TEST, why);
        return;
    };
    alone(TEST, &[("FERROGIN_LIBFABRIC", &newer), EXACT], |plugin| {
        let n = rounds("FERROGIN_TEST_CYCLES", CYCLES / 5);
        let after_cycles = || {
            communicators(&plugin, n);
            bytes()
        };
        after_cycles();
        let (before, after) = (after_cycles(), after_cycles());
        check_bytes(n, before, after);
    });
}

#[test]
fn contexts_of_one_communicator_leak_nothing() {
    alone("contexts_of_one_communicator_leak_nothing", &[EXACT], |plugin| {
        ranks(&plugin, 2, |rank, comm| {
            let cycle = |times: usize| {
                for _ in 0..times {
                    let (_, window) = window(&comm, 4096);
                    let context = comm.create_context(&config(2, 1)).expect("a context");
                    context.destroy().expect("destroyed");
                    window.deregister().expect("deregistered");
                    drop(mini_nccl::log::take());
                }
                // The other rank's part is counted too, and counting opens a descriptor itself.
                comm.barrier().expect("all ranks");
                let held = (rank == 0).then(|| (holdings(), bytes()));
                comm.barrier().expect("all ranks");
                held
            };
            // Least of several looks: what the other rank and the watcher hold just now comes and goes.
            let least = |one: (Holdings, usize), other: (Holdings, usize)| (one.0.least(other.0), one.1.min(other.1));
            let settled = || (0..8).filter_map(|_| cycle(5)).reduce(least);
            let n = rounds("FERROGIN_TEST_CYCLES", CYCLES);
            cycle(n);
            let before = settled();
            cycle(n);
            if let (Some((held, before)), Some((still_held, after))) = (before, settled()) {
                assert!(still_held.within(held), "{held:?}, after {n} cycles {still_held:?}");
                check_bytes(n, before, after);
            }
        });
    });
}
