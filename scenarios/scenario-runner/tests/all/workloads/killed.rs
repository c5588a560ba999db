//! SIGKILL to a rank while signals from and to it are in flight: the others' waits end with a status, a WARN line names
//! the peer, no signal that arrived was early or torn, and no other memory was changed.

use super::{FAULTS, Rank};
use crate::common::{child, dist, not_over_efa, report, role};
use ferrogin_device::{Action, Flags, Status, Window as DeviceWindow};
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_test_support::repetitions;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_for, wait_until};
use mini_nccl::{Bootstrap, Comm, DeviceMemory, Plugin, log};
use scenario_runner::world::plugin_from_env;
use std::os::unix::process::ExitStatusExt;
use std::sync::{Arc, Mutex};

const RANKS: usize = 3;
const VICTIM: u32 = 2;
/// Most operations to each peer, each with a place of 8 bytes. The last word of each sender's part of the window is for
/// VA signals.
const OPERATIONS: usize = 2047;
const PART: usize = (OPERATIONS + 1) * 8;
/// Words that no signal names.
const GUARD: usize = 1 << 16;
const BOTH_HALVES: u64 = 1 << 32 | 1;

/// The kind of an operation's signal.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Weak,
    Va,
    Strong,
}

fn kind(i: usize) -> Kind {
    match i % 8 {
        3 => Kind::Va,
        7 => Kind::Strong,
        _ => Kind::Weak,
    }
}

/// Returns the bytes of operation `i`, which are nonzero.
fn value(sender: u32, i: usize) -> u64 {
    (u64::from(sender + 1) << 32 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn post(rank: &Rank, peer: u32, i: usize) -> Result<(), Status> {
    let (context, me) = (rank.context(0), rank.rank);
    let place = rank.at(me as usize * PART + 8 * i);
    match kind(i) {
        Kind::Strong => context.signal(peer, Action::signal_inc(RANKS as u16 + me as u16), Flags::STRONG),
        Kind::Weak => context.put_value(peer, place, value(me, i), 8, Action::signal_inc(me as u16), Flags::NONE),
        Kind::Va => {
            let word = rank.at(me as usize * PART + 8 * OPERATIONS);
            context.put_value_signal_at(peer, place, value(me, i), 8, word, BOTH_HALVES, Flags::NONE)
        }
    }
}

/// Checks that what has arrived from a sender is whole and not early.
fn check(rank: &Rank, sender: u32) {
    let (context, base) = (rank.context(0), sender as usize * PART);
    let read = |id: u32| context.read_signal(id).expect("a signal");
    let counts = [read(sender), read(RANKS as u32 + sender)];
    let va = rank.memory.load(base + 8 * OPERATIONS);
    assert_eq!(va & 0xffff_ffff, va >> 32, "rank {}: {va:#x} is a part of an add", rank.rank);
    let landed: Vec<bool> = (0..OPERATIONS)
        .map(|i| {
            let seen = rank.memory.load(base + 8 * i);
            assert!(seen == 0 || kind(i) != Kind::Strong && seen == value(sender, i), "{seen:#x} in place {i}");
            seen != 0
        })
        .collect();
    let of = |wanted| (0..OPERATIONS).filter(|&i| kind(i) == wanted && landed[i]).count() as u64;
    let strong = (0..OPERATIONS).take_while(|&i| landed[i] || kind(i) == Kind::Strong).filter(|i| i % 8 == 7).count();
    let (seen, most) = ([counts[0], va & 0xffff_ffff, counts[1]], [of(Kind::Weak), of(Kind::Va), strong as u64]);
    assert!((0..3).all(|i| seen[i] <= most[i]), "rank {}: {seen:?} of {sender}, bytes for {most:?}", rank.rank);
}

fn rank(die_at: usize) {
    let plugin = Plugin::find(&plugin_from_env()).expect("the plugin");
    let bootstrap = Bootstrap::from_env(HANG_LIMIT).expect("a launcher");
    let comm = Comm::init(&plugin, Arc::new(bootstrap), 0).expect("the ranks connect");
    let memory = Arc::new(DeviceMemory::alloc(RANKS * PART + GUARD).expect("memory"));
    let window = comm.register(&memory, 0).expect("a window");
    let contexts = comm.create_context(&GinConfigV14 {
        n_signals: 2 * RANKS as i32 + 2,
        n_counters: 0,
        n_contexts: 1,
        queue_depth: 64,
        traffic_class: -1,
        backend_version: 2,
        rank_stride: 1,
    });
    let contexts = contexts.expect("contexts");
    (0..GUARD / 8).for_each(|i| memory.store(RANKS * PART + 8 * i, value(7, i)));
    comm.barrier().expect("all ranks");
    let (me, at) = (comm.rank() as u32, DeviceWindow(window.gin_handle()));
    let rank = Rank { rank: me, window: at, comm, memory, contexts };
    let peers: Vec<u32> = (1..RANKS as u32).map(|step| (me + step) % RANKS as u32).collect();
    let mut end = Ok(());
    'all: for i in 0..OPERATIONS {
        for &peer in &peers {
            if me == VICTIM && i == die_at {
                // SAFETY: ends this process.
                unsafe { libc::raise(libc::SIGKILL) };
            }
            end = post(&rank, peer, i);
            if end.is_err() {
                break 'all;
            }
        }
        if i % 16 == 0 {
            (0..RANKS as u32).for_each(|sender| check(&rank, sender));
        }
    }
    // A rank may be done before the victim dies. It then rewrites a value until a request fails.
    wait_until("failed request to the dead rank", || {
        if end.is_err() {
            return true;
        }
        let place = rank.at(me as usize * PART);
        let written = rank.context(0).put_value(VICTIM, place, value(me, 0), 8, Action::NONE, Flags::NONE);
        end = written.and_then(|()| rank.context(0).flush());
        end.is_err()
    });
    let status = end.expect_err("a peer has died");
    println!("REPORT rank {me}: {status:?}");
    assert!(matches!(status, Status::Aborted | Status::CardError), "{status:?}");
    // The watcher raises the flag before it writes the line.
    let line = wait_for("WARN line", || log::all().into_iter().find(|line| line.is_warn()).map(|line| line.text));
    println!("REPORT rank {me}: {line}");
    let never = rank.context(0).wait_signal(2 * RANKS as u32, 1).expect_err("no rank raises this signal");
    assert!(matches!(never, Status::Aborted | Status::CardError), "{never:?}");
    (0..RANKS as u32).for_each(|sender| check(&rank, sender));
    let Rank { comm, memory, contexts, .. } = rank;
    assert!(contexts.query_last_error().expect("queryLastError"), "rank {me}");
    contexts.destroy().expect("destroyContext");
    let guard = |i: usize| memory.load(RANKS * PART + 8 * i) == value(7, i);
    assert!((0..GUARD / 8).all(guard), "rank {me}: memory that no signal names");
    window.deregister().expect("deregMrSym");
    comm.close().expect("closeColl");
}

#[test]
#[ignore = "make check"]
fn rank_killed_with_signals_under_way_fails_the_others() {
    const TEST: &str = "rank_killed_with_signals_under_way_fails_the_others";
    if let Some(role) = role() {
        return rank(role.parse().expect("a number of operations"));
    }
    if not_over_efa(TEST, "verbs have no faults") {
        return;
    }
    let Some(dist) = dist(TEST) else { return };
    let kills = repetitions("FERROGIN_KILLS_OF_SIGNALS", 3, 60) as usize;
    let (next, dist) = (Mutex::new(0..kills), &dist);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(number) = { next.lock().unwrap().next() } {
                    let (die_at, wire) = (16 + number * 577 % 2000, if number % 3 != 1 { "shm" } else { "tcp" });
                    let job = child(dist, TEST, &die_at.to_string(), RANKS).env("FERROGIN_SIGNALS", "emulated");
                    let job = job.env("SOFTEFA_FAULTS", format!("{FAULTS},rq_size=8")).env("SOFTEFA_WIRE", wire);
                    let outcome = job.run().expect("the job starts");
                    let ends =
                        [0, 1, 2].map(|rank| outcome.statuses[rank].map(|status| (status.code(), status.signal())));
                    let expected = [Some((Some(0), None)), Some((Some(0), None)), Some((None, Some(libc::SIGKILL)))];
                    assert_eq!(ends, expected, "{}", report(&outcome));
                    let named = format!("to rank {VICTIM} on endpoint");
                    assert!(outcome.text().contains(&named), "{}", report(&outcome));
                    let said = outcome.lines.iter().filter_map(|line| line.text.strip_prefix("REPORT "));
                    said.for_each(|text| println!("{TEST}: killed at {die_at} on {wire}, {text}"));
                }
            });
        }
    });
}
