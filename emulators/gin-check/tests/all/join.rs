//! Two ranks whose records are made by hand: each has one thread, a window, a queue, and a signal that the peer's
//! requests raise.

use gin_check::event::{ACQUIRES, At, Call, Event, FENCED, Look, Operation, Record, STRONG, WRITES};
use gin_check::join::join;

const THREAD: u64 = 64;
const RING: u64 = 0x10000;
const DOORBELL: u64 = 0x20000;
const COMPLETED: u64 = 0x30000;
const SIGNAL: u64 = 0x30040;
const WINDOW: u64 = 0x100000;

struct Rank {
    gpu: Vec<Record>,
    card: Vec<Record>,
    posts: u64,
    stamp: u32,
}

/// The ranks, and the time.
struct World {
    ranks: [Rank; 2],
    time: u64,
}

impl World {
    fn new() -> Self {
        let rank = || Rank { gpu: Vec::new(), card: Vec::new(), posts: 0, stamp: 1 };
        let mut world = Self { ranks: [rank(), rank()], time: 0 };
        for rank in 0..2u64 {
            let process =
                |library: &str| Event::Process { rank: rank as u32, pid: 10 + rank as u32, library: library.into() };
            world.gpu(rank, process("gpu"));
            world.card(rank, process("card"));
            let card = rank + 1;
            world.card(rank, Event::Card { card });
            world.open(rank);
            for (counter, completions, address) in [(1, true, COMPLETED), (2, false, SIGNAL)] {
                world.card(rank, Event::Counter { card, counter, queue: 1, completions, inode: 0, address });
            }
            world.gpu(rank, Event::Launch { launch: 0, kernel: "kernel".into() });
            world.gpu(rank, Event::Clock { launch: 0, clock: 0, entries: Vec::new() });
        }
        world
    }

    /// The rank's queue is opened.
    fn open(&mut self, rank: u64) {
        let queue =
            Event::Queue { card: rank + 1, queue: 1, ring: RING, slot_bytes: 64, slots: 64, doorbell: DOORBELL };
        self.card(rank, queue);
    }

    fn gpu(&mut self, rank: u64, event: Event) {
        self.time += 1;
        self.ranks[rank as usize].gpu.push(Record { time: self.time, event });
    }

    fn card(&mut self, rank: u64, event: Event) {
        self.time += 1;
        self.ranks[rank as usize].card.push(Record { time: self.time, event });
    }

    fn place(&mut self, rank: u64, line: u32) -> u32 {
        self.gpu(rank, Event::Place { place: line, lines: lines(&[line]) });
        line
    }

    /// A put of 8 bytes from offset 0x1000 to `offset` at the peer, which raises its signal; its doorbell is rung
    /// unless `aggregates`.
    fn put(&mut self, rank: u64, line: u32, offset: u64, aggregates: bool) {
        self.put_of(8, rank, line, offset, aggregates);
    }

    fn put_of(&mut self, bytes: u64, rank: u64, line: u32, offset: u64, aggregates: bool) {
        let place = self.place(rank, line);
        let (index, stamp) = (self.ranks[rank as usize].posts, self.ranks[rank as usize].stamp);
        let slot = RING + 64 * index;
        let at = At { launch: 0, thread: THREAD, stamp, clock: 0, place };
        self.gpu(rank, Event::Post { at, slot });
        if !aggregates {
            let value = index + 1;
            self.gpu(rank, Event::Doorbell { at, address: DOORBELL, value });
        } else {
            self.gpu(rank, Event::Ended { launch: 0 });
        }
        self.ranks[rank as usize].stamp += 1;
        self.ranks[rank as usize].posts += 1;
        let (card, peer) = (rank + 1, 2 - rank);
        let (request, local, remote) = (100 * card + index, WINDOW + 0x1000, WINDOW + offset);
        self.card(
            rank,
            Event::Taken {
                card,
                request,
                queue: 1,
                index,
                operation: Operation::Write,
                peer,
                peer_queue: 1,
                local,
                remote,
                bytes,
                inline: false,
            },
        );
        self.card(1 - rank, Event::Raised { card: peer, counter: 2, from: card, request });
        self.card(rank, Event::Retired { card, request });
    }

    fn counted(&mut self, rank: u64, address: u64, value: u64, call: Call) {
        self.counted_at(rank, address, (value, value), call);
    }

    fn counted_at(&mut self, rank: u64, address: u64, (value, raw): (u64, u64), call: Call) {
        let stamp = self.ranks[rank as usize].stamp;
        let at = At { launch: 0, thread: THREAD, stamp, clock: 0, place: 0 };
        self.gpu(rank, Event::Counted { at, look: Look { address, value, raw, call } });
        self.ranks[rank as usize].stamp += 1;
    }

    fn wait(&mut self, rank: u64, count: u64) {
        self.counted(rank, SIGNAL, count, Call::Wait);
    }

    fn flush(&mut self, rank: u64) {
        self.counted(rank, COMPLETED, self.ranks[rank as usize].posts, Call::Flush);
    }

    fn access(&mut self, rank: u64, line: u32, offset: u64, writes: bool) {
        self.access_as(rank, line, offset, if writes { WRITES } else { 0 });
    }

    fn access_as(&mut self, rank: u64, line: u32, offset: u64, flags: u32) {
        self.access_with(rank, line, WINDOW + offset, flags, 0);
    }

    fn access_with(&mut self, rank: u64, line: u32, address: u64, flags: u32, value: u64) {
        let place = self.place(rank, line);
        let stamp = self.ranks[rank as usize].stamp;
        let at = At { launch: 0, thread: THREAD, stamp, clock: 0, place };
        self.gpu(rank, Event::Access { at, flags, address, bytes: 8, value });
        self.ranks[rank as usize].stamp += 1;
    }

    /// The rank's kernel ends, and its context is closed.
    fn close(&mut self, rank: u64) {
        self.gpu(rank, Event::Ended { launch: 0 });
        self.card(rank, Event::QueueClosed { card: rank + 1, queue: 1 });
    }

    /// Returns each report's kind and lines.
    fn reports(&self) -> Vec<(&'static str, Vec<String>)> {
        let files: Vec<Vec<Record>> =
            self.ranks.iter().flat_map(|rank| [rank.gpu.clone(), rank.card.clone()]).collect();
        let lines = |report: gin_check::report::Report| {
            let sides = std::iter::once(&report.first).chain(&report.second);
            (report.kind.name(), sides.flat_map(|side| side.lines.clone()).collect())
        };
        join(&files).into_iter().map(lines).collect()
    }
}

fn lines(lines: &[u32]) -> Vec<String> {
    lines.iter().map(|line| format!("a.cu:{line}")).collect()
}

#[test]
fn a_wait_for_one_of_two_has_neither() {
    for (count, expected) in [(1, vec![("read", lines(&[1, 3]))]), (2, vec![])] {
        let mut world = World::new();
        world.put(0, 1, 0, false);
        world.put(0, 2, 64, false);
        world.wait(1, count);
        world.access(1, 3, 0, false);
        assert_eq!(world.reports(), expected, "for {count}");
    }
}

#[test]
fn a_raise_that_is_posted_after_a_wait_cannot_have_ended_it() {
    let mut world = World::new();
    world.put(0, 1, 0, false);
    world.wait(1, 1);
    world.access(1, 2, 0, false);
    world.put(1, 3, 0, false);
    world.wait(0, 1);
    world.put(0, 4, 0, false);
    world.wait(1, 2);
    world.access(1, 5, 0, false);
    assert_eq!(world.reports(), []);
}

#[test]
fn a_wait_that_failed_has_what_it_saw() {
    for (seen, expected) in [(0, vec![("read", lines(&[1, 2]))]), (1, vec![])] {
        let mut world = World::new();
        world.put(0, 1, 0, false);
        world.counted_at(1, SIGNAL, (1, seen), Call::Wait);
        world.access(1, 2, 0, false);
        assert_eq!(world.reports(), expected, "for {seen}");
    }
}

#[test]
fn waits_before_the_raises_that_could_end_them_are_not_looked_at_forever() {
    let mut world = World::new();
    world.wait(0, 1);
    world.wait(1, 1);
    world.put(0, 1, 0, false);
    world.put(1, 2, 0, false);
    assert_eq!(world.reports(), []);
}

#[test]
fn a_put_reads_bytes_that_have_arrived() {
    for (waits, expected) in [(true, vec![]), (false, vec![("read", lines(&[1, 2]))])] {
        let mut world = World::new();
        world.put(0, 1, 0x1000, false);
        if waits {
            world.wait(1, 1);
        }
        world.put(1, 2, 0, false);
        assert_eq!(world.reports(), expected);
    }
}

#[test]
fn a_source_is_free_after_a_flush_and_not_after_the_peers_signal() {
    for (flushes, expected) in [(true, vec![]), (false, vec![("source", lines(&[1, 3]))])] {
        let mut world = World::new();
        world.put(0, 1, 0, false);
        world.put(1, 2, 64, false);
        world.wait(0, 1);
        if flushes {
            world.flush(0);
        }
        world.access(0, 3, 0x1000, true);
        assert_eq!(world.reports(), expected);
    }
}

#[test]
fn a_put_over_bytes_that_are_still_read_or_written_is_a_write() {
    let mut world = World::new();
    world.access(1, 1, 0, true);
    world.put(0, 2, 0, false);
    world.put(0, 3, 0, false);
    let expected = [("write", lines(&[2, 3])), ("write", lines(&[2, 1])), ("write", lines(&[3, 1]))];
    let mut reports = world.reports();
    reports.sort();
    let mut expected = expected.to_vec();
    expected.sort();
    assert_eq!(reports, expected);
}

#[test]
fn a_request_without_a_doorbell_at_the_end_of_its_kernel_is_unrung() {
    let mut world = World::new();
    world.put(0, 1, 0, false);
    world.put(0, 2, 64, true);
    assert_eq!(world.reports(), [("unrung", lines(&[2]))]);
}

#[test]
fn a_value_that_is_read_before_a_wait_is_a_baseline_if_the_peer_may_have_raised_it() {
    let mut world = World::new();
    world.place(0, 0);
    world.place(1, 0);
    world.counted(1, SIGNAL, 0, Call::Value);
    world.put(0, 1, 0, false);
    world.wait(1, 1);
    assert_eq!(world.reports(), [("baseline", lines(&[1, 0]))]);
}

#[test]
fn a_poll_of_a_signal_that_has_seen_the_awaited_count_is_no_baseline() {
    for (awaited, expected) in [(1, vec![]), (2, vec![("baseline", lines(&[1, 0])); 1])] {
        let mut world = World::new();
        world.place(0, 0);
        world.place(1, 0);
        (0..awaited).for_each(|_| world.put(0, 1, 0, false));
        world.counted(1, SIGNAL, 1, Call::Value);
        world.wait(1, awaited);
        let of_signal: Vec<_> = world.reports().into_iter().filter(|report| report.0 == "baseline").collect();
        assert_eq!(of_signal, expected, "a wait for {awaited}");
    }
}

#[test]
fn emulated_signals_of_two_contexts_are_told_apart() {
    // The puts raise signal 3 of the first context, and their sender waits for an answer.
    let (words, others) = (0x40000, 0x40080);
    let read = ("read", lines(&[1, 2]));
    for (address, expected) in [(words + 24, vec![]), (others + 24, vec![read.clone()]), (words + 16, vec![read])] {
        for (call, resets) in [(true, true), (true, false), (false, true), (false, false)] {
            let mut world = World::new();
            world.place(1, 0);
            world.gpu(1, Event::Signals { address: words, count: 4, generation: 0x101 });
            world.gpu(1, Event::Signals { address: others, count: 4, generation: 0x102 });
            for round in 0..2u64 {
                world.put(0, 1, 64 * round, false);
                let (card, queue, from, request) = (2, 1, 1, 100 + round);
                world.card(1, Event::Arrived { card, queue, from, request, words: vec![1 << 28 | 3] });
                let count = if resets { 1 } else { round + 1 };
                if call {
                    world.counted(1, address, count, Call::Wait);
                } else {
                    world.access_with(1, 0, address, STRONG | ACQUIRES, count);
                }
                world.access(1, 2, 64 * round, false);
                if resets && call {
                    world.counted(1, address, 0, Call::Reset);
                } else if resets {
                    world.access_with(1, 0, address, STRONG | WRITES, 0);
                }
                world.put(1, 3, 512, false);
                world.wait(0, round + 1);
            }
            let mut reports = world.reports();
            reports.retain(|report| report.0 == "read");
            assert_eq!(reports, expected, "{address:#x}, call: {call}, resets: {resets}");
        }
    }
}

#[test]
fn a_flush_between_two_puts_orders_their_raises() {
    let mut world = World::new();
    for step in 0..8u64 {
        // Two buffers, so that the peer's next put goes to the other one.
        let offset = 64 * (step % 2);
        (0..2).for_each(|rank| world.put(rank, 1, offset, false));
        (0..2).for_each(|rank| world.wait(rank, step + 1));
        (0..2).for_each(|rank| world.access(rank, 2, offset, false));
        (0..2).for_each(|rank| world.flush(rank));
    }
    assert_eq!(world.reports(), []);
}

#[test]
fn a_poll_has_its_value_and_with_acquire_what_its_sender_had_flushed() {
    let missing = [("read", lines(&[1, 4]))];
    for (flags, expected) in [(STRONG, &missing[..]), (STRONG | ACQUIRES, &[]), (STRONG | ACQUIRES | FENCED, &[])] {
        let mut world = World::new();
        world.put(0, 1, 0, false);
        world.flush(0);
        world.put(0, 2, 64, false);
        world.access_as(1, 3, 64, flags);
        world.access(1, 4, 0, false);
        world.access(1, 5, 64, false);
        assert_eq!(world.reports(), expected, "with flags {flags}");
    }
}

#[test]
fn a_source_is_freed_or_deregistered_after_a_flush() {
    let free = Event::Freed { address: WINDOW + 0x1000, bytes: 8 };
    let region = |card| Event::Region { card, key: 5, address: WINDOW + 0x1000, bytes: 8 };
    for (flushes, deregisters) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut world = World::new();
        world.card(0, region(1));
        world.put(0, 1, 0, false);
        if flushes {
            world.flush(0);
        }
        world.gpu(0, Event::Ended { launch: 0 });
        if deregisters {
            world.card(0, Event::RegionGone { card: 1, key: 5 });
        } else {
            world.gpu(0, free.clone());
        }
        let expected = if flushes { vec![] } else { vec![("source", lines(&[1]))] };
        assert_eq!(world.reports(), expected, "flushes: {flushes}, deregisters: {deregisters}");
    }
}

#[test]
fn bytes_that_stay_registered_may_still_be_a_source() {
    let mut world = World::new();
    let region = |key| Event::Region { card: 1, key, address: WINDOW + 0x1000, bytes: 8 };
    (5..7).for_each(|key| world.card(0, region(key)));
    world.put(0, 1, 0, false);
    world.gpu(0, Event::Ended { launch: 0 });
    world.card(0, Event::RegionGone { card: 1, key: 5 });
    assert_eq!(world.reports(), []);
    world.card(0, Event::RegionGone { card: 1, key: 6 });
    assert_eq!(world.reports(), [("source", lines(&[1]))]);
}

#[test]
fn a_killed_kernels_requests_arent_taken_for_earlier_posts() {
    for killed in [false, true] {
        let mut world = World::new();
        world.put(0, 1, 0, false);
        world.wait(1, 1);
        world.gpu(0, Event::Ended { launch: 0 });
        if killed {
            world.gpu(0, Event::Launch { launch: 1, kernel: "kernel".into() });
        }
        // The slot's next request.
        world.card(
            0,
            Event::Taken {
                card: 1,
                request: 200,
                queue: 1,
                index: 64,
                operation: Operation::Write,
                peer: 2,
                peer_queue: 1,
                local: WINDOW,
                remote: WINDOW + 64,
                bytes: 8,
                inline: false,
            },
        );
        world.access(1, 2, 64, false);
        let reads = world.reports().into_iter().any(|report| report == ("read", lines(&[1, 2])));
        assert_eq!(reads, !killed);
    }
}

#[test]
fn a_context_is_closed_after_what_its_peers_send() {
    let closed = |lines| ("closed", lines);
    for (waits, flushes, expected) in [
        (true, false, vec![]),
        (false, true, vec![("unseen", lines(&[1]))]),
        (false, false, vec![closed(lines(&[1])), ("unseen", lines(&[1]))]),
    ] {
        let mut world = World::new();
        world.put(0, 1, 0, false);
        if waits {
            world.wait(1, 1);
        }
        if flushes {
            world.flush(0);
            world.gpu(0, Event::Ended { launch: 0 });
        }
        world.close(1);
        assert_eq!(world.reports(), expected, "waits: {waits}, flushes: {flushes}");
    }
}

#[test]
fn the_last_raises_of_a_signal_that_is_waited_for_are_not_noted() {
    let mut world = World::new();
    world.put(0, 1, 0, false);
    world.wait(1, 1);
    world.put(0, 2, 64, false);
    world.flush(0);
    world.gpu(0, Event::Ended { launch: 0 });
    world.close(1);
    assert_eq!(world.reports(), []);
}

#[test]
fn a_fence_after_a_relaxed_read_is_no_read() {
    let mut world = World::new();
    world.access_as(1, 1, 0, STRONG);
    // The bytes are free.
    world.put(1, 2, 64, false);
    world.wait(0, 1);
    world.put_of(16, 0, 3, 0, false);
    world.access_as(1, 1, 0, STRONG | ACQUIRES | FENCED);
    assert_eq!(world.reports(), []);
}

#[test]
fn a_request_to_a_context_that_has_been_closed_is_reported() {
    for (reopens, expected) in [(false, vec![("closed", lines(&[1]))]), (true, vec![])] {
        let mut world = World::new();
        world.close(1);
        if reopens {
            world.open(1);
        }
        world.put(0, 1, 0, false);
        // The card raises no counter of a queue that is closed.
        let raised = world.ranks[1].card.pop();
        assert!(matches!(raised.map(|record| record.event), Some(Event::Raised { .. })));
        assert_eq!(world.reports(), expected, "reopens: {reopens}");
    }
}

#[test]
fn launches_and_clocks_are_known_if_the_time_was_set_back_after_them() {
    let mut world = World::new();
    world.put(0, 1, 0, false);
    world.flush(0);
    world.put(0, 2, 64, false);
    let place = world.place(0, 3);
    // Another thread, which has met the first one after its flush.
    world.gpu(0, Event::Clock { launch: 0, clock: 1, entries: vec![THREAD, 2] });
    let at = At { launch: 0, thread: THREAD + 1, stamp: 9, clock: 1, place };
    world.gpu(0, Event::Access { at, flags: WRITES, address: WINDOW + 0x1000, bytes: 8, value: 0 });
    let expected = [("source", lines(&[2, 3]))];
    assert_eq!(world.reports(), expected);
    for record in &mut world.ranks[0].gpu {
        if matches!(record.event, Event::Launch { .. } | Event::Clock { .. }) {
            record.time += 1000;
        }
    }
    assert_eq!(world.reports(), expected);
}
