//! What the recorder makes of a thread's accesses and calls.

use gin_check::event::{ACQUIRES, Call, Event, FENCED, STRONG, decode};
use gin_check::race::Detector;
use gin_check::record::{Code, Flushed, Recorder};
use soft_gpu_ptx::{Access, Does, Observer, Ordering, Reach, Who};
use std::sync::Mutex;

const THREAD: Who = Who { block: 0, thread: 0 };
/// A word that is shared with a card, and one that isn't.
const WORD: u64 = 0x1000;
const OWN: u64 = 0x9000;
/// Instructions: the program's, the library's, and those of a flush, a post and a wait that are inlined.
const PROGRAM: u32 = 0;
const LIBRARY: u32 = 1;
const FLUSH: u32 = 2;
const POST: u32 = 3;
const WAIT: u32 = 4;
/// Functions.
const RESET_SIGNAL: u32 = 0;
const RESET_COUNTER: u32 = 1;
const PART_OF_A_CALL: u32 = 2;

/// The description of a context's 5 emulated signals, whose generation is 7, and what isn't one.
const SIGNALS: u64 = 0x2000;
const NO_SIGNALS: [u64; 2] = [0x2040, 0x2080];

/// What is in memory there: the words, where the ranks' numbers of signals are, then this rank's own number and its rank.
fn memory(address: u64) -> Option<u64> {
    match address {
        0x2000 | 0x2040 => Some(WORD),
        0x2080 => Some(OWN),
        0x2008 | 0x2048 | 0x2088 => Some(0x3000),
        0x2010 | 0x2090 => Some(5 | 1 << 32),
        0x2050 => Some(5),
        0x3000 => Some(6),
        0x3008 => Some(5 | 7 << 32),
        _ => None,
    }
}

/// Returns what is recorded of a thread, in a launch of a process whose earlier launches have flushed.
fn events(flushed: &Mutex<Flushed>, does: impl FnOnce(&mut Recorder<'_>)) -> Vec<Event> {
    let code = Code {
        library: [false, true, true, true, true].into(),
        inlined: vec![None, None, Some(Call::Flush), Some(Call::Other), Some(Call::Wait)],
        functions: vec![
            "fgin_reset_signal".into(),
            "fgin_reset_counter".into(),
            "_RNvNtNtC4_15ferrogin_device7context9fast_path13fgin_continue".into(),
        ],
        has_lines: vec![true; 8],
    };
    let shares = |address| address < OWN;
    let detector = Detector::new(code.library.clone(), false);
    let mut recorder = Recorder::new(detector, (0, 0), &code, &shares, &memory, flushed);
    recorder.begin(0, 2, 0);
    does(&mut recorder);
    recorder.end(0);
    let (_, records, _) = recorder.finish();
    decode(&records).into_iter().map(|record| record.event).collect()
}

/// Returns the accesses and looks that are recorded of a thread, without their places and clocks: the flags or the
/// call, the address and the value.
fn recorded(does: impl FnOnce(&mut Recorder<'_>)) -> Vec<(&'static str, u32, u64, u64)> {
    recorded_after(&Mutex::default(), does)
}

/// The same for a launch of a process whose earlier launches have flushed.
fn recorded_after(
    flushed: &Mutex<Flushed>,
    does: impl FnOnce(&mut Recorder<'_>),
) -> Vec<(&'static str, u32, u64, u64)> {
    let known = events(flushed, does).into_iter().filter_map(|event| match event {
        Event::Access { flags, address, value, .. } => Some(("access", flags, address, value)),
        Event::Signals { address, count, generation } => Some(("signals", count, address, generation.into())),
        Event::Counted { look, .. } => Some(("look", look.call as u32, look.address, look.raw)),
        _ => None,
    });
    known.collect()
}

fn access(site: u32, does: Does, address: u64, value: u64, acquires: bool) -> Access {
    let ordering = Some(Ordering { acquires, releases: false, reach: Reach::System });
    Access { site, shared: false, address, bytes: 8, does, ordering, mmio: false, value, changes: true }
}

#[test]
fn a_fence_marks_the_records_of_earlier_relaxed_reads() {
    let fence = Ordering { acquires: true, releases: true, reach: Reach::System };
    let read = access(PROGRAM, Does::Load, WORD, 7, false);
    let found = recorded(|recorder| {
        recorder.access(THREAD, &read);
        recorder.fence(THREAD, PROGRAM, fence);
        recorder.fence(THREAD, PROGRAM, fence);
    });
    assert_eq!(found, [("access", STRONG, WORD, 7), ("access", STRONG | ACQUIRES | FENCED, WORD, 7)]);
}

#[test]
fn a_contexts_emulated_signals_are_found_where_a_kernel_loads_their_address_or_their_descriptions() {
    for site in [PROGRAM, LIBRARY] {
        let load = |value| Access { ordering: None, ..access(site, Does::Load, OWN, value, false) };
        let words = Access { address: SIGNALS, ..load(WORD) };
        assert_eq!(recorded(|recorder| recorder.access(THREAD, &words))[0], ("signals", 5, WORD, 7));
        let found = recorded(|recorder| {
            NO_SIGNALS.iter().for_each(|&not| recorder.access(THREAD, &load(not)));
            recorder.access(THREAD, &Access { shared: true, ..load(SIGNALS) });
            recorder.access(THREAD, &load(SIGNALS));
            recorder.access(THREAD, &load(SIGNALS));
        });
        let signals: Vec<_> = found.into_iter().filter(|record| record.0 == "signals").collect();
        assert_eq!(signals, [("signals", 5, WORD, 7)]);
    }
}

#[test]
fn only_a_store_to_a_word_that_is_shared_with_a_card_resets_a_signal() {
    let store = |address| access(LIBRARY, Does::Store, address, 0, false);
    let found = recorded(|recorder| {
        recorder.call(THREAD, PROGRAM, RESET_SIGNAL, &[0, 5]);
        recorder.access(THREAD, &Access { shared: true, ..store(WORD + 8) });
        recorder.access(THREAD, &store(OWN));
        recorder.access(THREAD, &store(WORD));
        recorder.leave(THREAD, RESET_SIGNAL);
    });
    assert_eq!(found, [("look", Call::Reset as u32, WORD, 0)]);
}

#[test]
fn a_cards_count_that_is_reset_at_zero_is_the_word_that_was_loaded() {
    let found = recorded(|recorder| {
        recorder.call(THREAD, PROGRAM, RESET_COUNTER, &[0, 5]);
        recorder.access(THREAD, &access(LIBRARY, Does::Load, WORD, 0, true));
        recorder.access(THREAD, &access(LIBRARY, Does::Store, WORD + 64, 0, false));
        recorder.leave(THREAD, RESET_COUNTER);
    });
    assert_eq!(found, [("look", Call::Reset as u32, WORD, 0)]);
}

#[test]
fn a_post_that_is_inlined_does_not_look_at_its_queues_counter() {
    let load = |site| access(site, Does::Load, WORD, 3, true);
    for (site, call) in [(POST, None), (FLUSH, Some(Call::Flush)), (LIBRARY, Some(Call::Value))] {
        let found = recorded(|recorder| recorder.access(THREAD, &load(site)));
        let expected: Vec<_> = call.into_iter().map(|call| ("look", call as u32, WORD, 3)).collect();
        assert_eq!(found, expected, "at {site}");
    }
}

#[test]
fn a_relaxed_look_at_a_count_that_is_inlined_acquires_nothing() {
    let found = recorded(|recorder| recorder.access(THREAD, &access(LIBRARY, Does::Load, WORD, 3, false)));
    assert_eq!(found, [("access", STRONG, WORD, 3)]);
}

#[test]
fn a_flush_has_the_counts_of_those_that_emptied_the_set_of_used_queues() {
    let flushed = Mutex::default();
    let expected = [("look", Call::Flush as u32, WORD, 3)];
    // The last one has an older count.
    for count in [3, 2] {
        recorded_after(&flushed, |recorder| {
            recorder.access(THREAD, &access(FLUSH, Does::Load, WORD, count, true));
            recorder.access(THREAD, &access(FLUSH, Does::Update, OWN, 1, false));
        });
    }
    // A later launch, or another thread.
    let found = recorded_after(&flushed, |recorder| {
        recorder.access(THREAD, &access(FLUSH, Does::Load, OWN, 0, true));
        recorder.access(THREAD, &access(LIBRARY, Does::Load, OWN, 0, true));
    });
    assert_eq!(found, expected);
}

#[test]
fn a_flush_looks_at_a_count_again_once_its_thread_has_met_others() {
    let load = access(FLUSH, Does::Load, WORD, 3, true);
    let found = recorded(|recorder| {
        (0..2).for_each(|_| recorder.access(THREAD, &load));
        recorder.warp(0, 0, 3, true, PROGRAM);
        (0..2).for_each(|_| recorder.access(THREAD, &load));
    });
    assert_eq!(found, [("look", Call::Flush as u32, WORD, 3); 2]);
}

#[test]
fn a_post_by_a_part_of_a_rust_call_is_where_the_program_calls() {
    let events = events(&Mutex::default(), |recorder| {
        recorder.call(THREAD, POST, PART_OF_A_CALL, &[0x400]);
        recorder.access(THREAD, &Access { mmio: true, ..access(LIBRARY, Does::Store, WORD, 1, false) });
        recorder.leave(THREAD, PART_OF_A_CALL);
    });
    let posts = events.iter().filter_map(|event| match event {
        Event::Post { at, .. } => Some(at.place),
        _ => None,
    });
    assert_eq!(posts.collect::<Vec<_>>(), [POST]);
}

#[test]
fn a_wait_that_is_inlined_ends_with_a_poll_that_finds_something() {
    let look = ("look", Call::Wait as u32, WORD, 3);
    let polls = |recorder: &mut Recorder<'_>, site| {
        [0, 0, 3].iter().for_each(|&value| recorder.access(THREAD, &access(site, Does::Load, WORD, value, true)));
    };
    assert_eq!(recorded(|recorder| polls(recorder, WAIT)), [look]);
    let in_a_part = recorded(|recorder| {
        recorder.call(THREAD, WAIT, PART_OF_A_CALL, &[]);
        polls(recorder, LIBRARY);
        recorder.leave(THREAD, PART_OF_A_CALL);
    });
    assert_eq!(in_a_part, [look]);
}

#[test]
fn an_access_by_another_address_of_the_same_memory_is_one_to_what_the_card_knows() {
    let poll = |address| access(PROGRAM, Does::Load, address, 3, true);
    let found = recorded(|recorder| {
        recorder.aliases.push((0x10_0000, 0x10_1000, WORD));
        recorder.access(THREAD, &poll(0x10_0008));
        recorder.access(THREAD, &Access { shared: true, ..poll(0x10_0008) });
        recorder.access(THREAD, &poll(0x10_1000));
    });
    assert_eq!(found, [("access", STRONG | ACQUIRES, WORD + 8, 3)]);
}
