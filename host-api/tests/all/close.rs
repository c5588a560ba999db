//! What closing a context promises: posts arrive though their context is destroyed right after them, and lost ones are
//! reported.

use crate::common::{dist, is_child, job, ranks, text, this_test};
use ferrogin::device::{Action, Flags};
use ferrogin::{Comm, ContextOptions, Memory, Options, Window};
use ferrogin_test_support::repetitions;

/// Returns word `i` of a window.
#[allow(unsafe_code)]
fn received(window: &Window, i: usize) -> u64 {
    let at = window.host_address().expect("host memory").cast::<u64>().wrapping_add(i);
    // SAFETY: the callers name a word of the window, which peers no longer write.
    unsafe { at.read_volatile() }
}

const ROUNDS: &str = "FERROGIN_TEST_CLOSES";

/// All ranks post to all others, wait for their own signals, and destroy the context at once. In a second context, each
/// rank of one half posts to its neighbour, with the doorbell deferred, and destroys the context at once.
fn close_after_posts() {
    let comm = Comm::from_env(&Options::default()).expect("a communicator");
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let window = comm.allocate(8 * ranks, Memory::Host).expect("a window");
    let options = ContextOptions { signals: 2, ..ContextOptions::default() };
    for round in 1..=repetitions(ROUNDS, 0, 0) {
        let context = comm.context(&options).expect("a context");
        let gin = context.device(0).expect("CPU threads");
        let post = |gin: &ferrogin::device::Context<'_>, peer: usize, value, flags| {
            let to = window.handle().at(8 * rank as u64);
            gin.put_value(peer as u32, to, value, 8, Action::signal_inc(1), flags).expect("a post");
        };
        let peers = || (0..ranks).filter(move |peer| *peer != rank);
        peers().for_each(|peer| post(&gin, peer, round, Flags::NONE));
        gin.wait_signal(1, ranks as u64 - 1).expect("signals of all peers");
        peers().for_each(|peer| assert_eq!(received(&window, peer), round, "from rank {peer}"));
        drop(context);

        let context = comm.context(&options).expect("a context");
        let gin = context.device(0).expect("CPU threads");
        if (rank as u64 + round).is_multiple_of(2) {
            post(&gin, (rank + 1) % ranks, !round, Flags::AGGREGATE);
        } else {
            gin.wait_signal(1, 1).expect("the signal of the neighbour");
            assert_eq!(received(&window, (rank + ranks - 1) % ranks), !round);
        }
    }
}

/// Runs [`close_after_posts`] on this many ranks, for each wire of the card and kind of signals.
fn close_jobs(test: &str, ranks: usize, all: &[(&str, &str)], rounds: u64) {
    if is_child(test) {
        return close_after_posts();
    }
    let Some(dist) = dist(test) else { return };
    for (wire, signals) in all {
        let outputs = job(test, ranks, |_| {
            let mut command = this_test(test, &dist);
            command.env("SOFTEFA_WIRE", wire).env("FERROGIN_SIGNALS", signals);
            command.env("SOFTEFA_FAULTS", "close_drops,reorder=64").env(ROUNDS, rounds.to_string());
            command
        });
        for (rank, output) in outputs.iter().enumerate() {
            let text = text(output);
            let is_good = text.contains("1 passed") && !text.contains("had been delivered");
            assert!(is_good, "rank {rank} of {ranks}, {wire}, {signals}:\n{text}");
        }
    }
}

#[test]
fn posts_arrive_though_their_context_is_destroyed_at_once() {
    let test = "posts_arrive_though_their_context_is_destroyed_at_once";
    close_jobs(test, 2, &[("shm", "card"), ("tcp", "emulated")], 3);
}

#[test]
#[ignore = "make check"]
fn posts_of_many_ranks_arrive_though_their_contexts_are_destroyed_at_once() {
    let test = "posts_of_many_ranks_arrive_though_their_contexts_are_destroyed_at_once";
    let all = [("shm", "card"), ("tcp", "card"), ("shm", "emulated"), ("tcp", "emulated")];
    for ranks in [2, 4, 8] {
        close_jobs(test, ranks, &all, repetitions(ROUNDS, 5, 100));
    }
}

/// The final signal of each round, on a card that takes its time.
fn close_after_slow_signal() {
    let comm = Comm::from_env(&Options::default()).expect("a communicator");
    for _ in 0..10 {
        let context = comm.context(&ContextOptions { signals: 1, ..ContextOptions::default() }).expect("a context");
        let gin = context.device(0).expect("CPU threads");
        match comm.rank() {
            0 => gin.signal(1, Action::signal_inc(0), Flags::NONE).expect("a post"),
            _ => gin.wait_signal(0, 1).expect("the final signal"),
        }
    }
}

#[test]
fn final_signal_arrives_from_a_slow_card() {
    let test = "final_signal_arrives_from_a_slow_card";
    if is_child(test) {
        return close_after_slow_signal();
    }
    let Some(dist) = dist(test) else { return };
    let outputs = job(test, 2, |_| {
        let mut command = this_test(test, &dist);
        command.env("SOFTEFA_FAULTS", "close_drops,delay_us=50..100");
        command
    });
    outputs.iter().map(text).for_each(|text| assert!(text.contains("1 passed"), "{text}"));
}

#[test]
fn deferred_post_is_delivered_without_a_line_when_its_context_is_destroyed() {
    let test = "deferred_post_is_delivered_without_a_line_when_its_context_is_destroyed";
    let Some(dist) = dist(test) else { return };
    if is_child(test) {
        ranks(1, |comm| {
            let window = comm.allocate(64, Memory::Host).expect("a window");
            let context = comm.context(&ContextOptions::default()).expect("a context");
            let gin = context.device(0).expect("CPU threads");
            gin.put_value(0, window.handle().at(8), 7, 8, Action::NONE, Flags::AGGREGATE).expect("a post");
            drop(context);
            assert_eq!(received(&window, 1), 7);
        });
        return;
    }
    // A card without delay has delivered the post in time even if nobody waits for it.
    let mut command = this_test(test, &dist);
    command.env("SOFTEFA_FAULTS", "close_drops,delay_us=200000..300000");
    let output = text(&command.output().expect("a process"));
    assert!(output.contains("1 passed") && !output.contains("rank 0: "), "{output}");
}

/// One line has the number of requests, their peers and the cause.
#[test]
fn requests_to_a_peer_that_closed_first_are_reported_in_one_line() {
    let test = "requests_to_a_peer_that_closed_first_are_reported_in_one_line";
    if is_child(test) {
        let comm = Comm::from_env(&Options::default()).expect("a communicator");
        let window = comm.allocate(64, Memory::Host).expect("a window");
        let context = comm.context(&ContextOptions::default()).expect("a context");
        if comm.rank() == 1 {
            drop(context);
            return comm.barrier().expect("a barrier");
        }
        comm.barrier().expect("a barrier");
        let gin = context.device(0).expect("CPU threads");
        for _ in 0..3 {
            let memory = window.handle();
            gin.put(1, memory.at(0), memory.at(8), 8, Action::NONE, Flags::AGGREGATE).expect("a post");
        }
        return;
    }
    let Some(dist) = dist(test) else { return };
    let outputs = job(test, 2, |_| this_test(test, &dist));
    let texts: Vec<_> = outputs.iter().map(text).collect();
    texts.iter().for_each(|text| assert!(text.contains("1 passed"), "{text}"));
    let lines: Vec<_> = texts[0].lines().filter(|line| line.contains("rank 0: ")).collect();
    let expected = "rank 0: the context was closed before 3 requests to rank 1 had been delivered: a write to rank 1";
    assert!(lines.len() == 1 && lines[0].contains(expected), "{}", texts[0]);
}
