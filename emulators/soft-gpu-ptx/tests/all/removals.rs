//! Removes the shipped module's fences and orderings in turn: with weak memory and a simulated card, some seed exposes
//! each removal.
//!
//! Each fence and each ordering is removed, and each scope narrowed to the block, while four threads post, flush and
//! wait. The card checks every byte, and that no more requests are written ahead of the doorbell than it accepts. A
//! *site* is an instruction with an ordering, identified by the nearest strong accesses before and after it in the
//! text, not by its line. Copies of one source line that the compiler has inlined into several functions are one site,
//! and are removed together.
//!
//! Each seed has one usual workload and eight aimed at orderings that the usual one rarely needs. Under four of five
//! seeds, a thread that reaches the changed instruction pauses before or after it, for one turn or six; the pause alone
//! has to be harmless. Only the seed decides what a workload does: its kernel's clock counts instructions.
//!
//! # Verdicts
//!
//! `removals.txt` has the verdict on each site:
//!
//! * `found`: one of 200 seeds exposes the removal; the table has the first. A higher number comes from a search of
//!   1000 seeds, after a change of the device code.
//! * `unseen`: the threads get there, but no seed exposes it, for the reason in the table.
//! * `unreached`: the test's threads don't get there, for the reason in the table.
//!
//! The reasons:
//!
//! * `control`: Everything that follows and depends on the value (through a branch, an address or the stored data) is a
//!   store or an atomic. The model keeps those in order; PTX promises that only with the acquire.
//! * `combiner`: As `control`, and the loads that follow are of cursors that only the active combiner writes, which is
//!   the same thread. A thread that is no longer the combiner reads the state again, with an acquire.
//! * `atomic`: Only atomics change these words, and in the model an atomic acts on memory at once, so a release before
//!   it changes nothing. PTX promises the order only with the release. For an insertion, the loom models fail without
//!   it; for a removal, it covers what the card has completed, which in the test is in memory at once.
//! * `covered`: Another acquire comes before anything that the value decides: a pass begins with an exchange that
//!   acquires. The same instruction serves plain posts, whose pass began that way.
//! * `again`: PTX calls it a race when threads of two blocks use a word at block scope. In the model, a thread that
//!   misses another block's `bound` checks the counts itself.
//! * `later`: It orders the poison before the reset of `bound`. Without it, a thread may admit one more batch on an
//!   endpoint that was given up, and all its later calls return the same error.
//! * `doorbell`: The fence keeps the doorbell before later requests (the card limits a batch) and before later
//!   doorbells. Here the lock's release does that for other threads; the code also serves the direct data path, whose
//!   callers need no lock. In the loom model, where a doorbell may be delayed until the next fence,
//!   `model_finds_missing_fences` exposes the removal.
//! * `nccl`: It orders what NCCL's device code has written; in the test, that code ran before the launch.
//! * `many`: A flush whose request has no room for all endpoints (more than 15): by the time the test's threads get
//!   there, most have completed.
//! * `long`: Lanes that post more than 16 requests together; the test has 4 lanes.
//! * `failed`: The record of a context's first failed call, which the host reads. No call fails in the test.
//! * `modes`: The mode THREAD, in which no thread of the test posts.
//! * `loom`: A visit of the used endpoints. Without the acquire of its loads the loom model fails
//!   (`posts_are_flushed_beside_removals`).
//! * `rare`: It matters only if several other threads get through a pass, or empty the set of used endpoints, in
//!   between, which needs more seeds; other places of the same source line are found.
//! * `unposted`: The release of the lock after a wait for room that failed. Since the fence behind its doorbell, the
//!   thread has only read.
//! * `whole`: NCCL's device code has deferred a whole batch, and this code has no request pending; in the test, the
//!   wait for room rings the doorbell first.
//!
//! # After a change of the device code
//!
//! `FERROGIN_REFRESH=1 cargo test --release -p soft-gpu-ptx --test all removals_have -- --include-ignored --nocapture`
//! rewrites the table, in a minute on two cores. A line that stays keeps its reason. The command prints `FOUND` for a
//! removal that a seed now exposes, `GONE` for an instruction that no longer exists, and `PROPOSED` for a line that
//! needs a new decision, with the reason of the most similar line (`?` if the removal was found before) and the PTX
//! around the instruction. `make test` runs the seeds of some of the removals that were found, `make check` those of
//! all of them; `FERROGIN_SOAK=1` tries all removals.

mod aimed;
mod campaign;
mod card;
mod kernel;
mod sites;
mod table;
mod work;

use crate::shipped;
use campaign::{Campaign, in_parallel, pause_of, seeds, shown_by};
use ferrogin_test_support::soak;
use sites::{Change, Pause, changed, sites};
use std::collections::BTreeSet;
use table::{Line, refresh, removals, table};
use work::Work;

/// Checks that the module is right, also when threads pause at any fence or ordering.
fn is_right_under(seeds: impl Iterator<Item = u64>) {
    let text = shipped::text();
    let everywhere: Vec<usize> = sites(&text).into_values().flatten().collect();
    let loaded = Pause::ALL.map(|pause| card::load(&changed(&text, &everywhere, Change::Keep, pause)));
    for seed in seeds {
        for work in Work::of(seed) {
            let pause = pause_of(seed);
            let outcome = card::outcome(&loaded[pause as usize], &work, seed);
            assert!(outcome.is_ok(), "seed {seed}, {:?}, pause {pause:?}: {outcome:?}", work.kind);
        }
    }
}

#[test]
fn the_shipped_module_is_right_under_some_seeds() {
    is_right_under(seeds().step_by(7));
}

#[test]
#[ignore = "make check"]
fn the_shipped_module_is_right_under_all_seeds() {
    is_right_under(seeds());
}

/// Only the seed decides what a workload does: not the time, the machine's load, or where memory lies.
#[test]
fn each_work_does_the_same_on_every_run_of_its_seed() {
    let text = shipped::text();
    let outcomes = in_parallel(&[(); 2], |()| {
        let loaded = card::load(&text);
        let of_seed = |seed| Work::of(seed).into_iter().map(move |work| (seed, work));
        let run = |(seed, work): (u64, Work)| (seed, work.kind, card::outcome(&loaded, &work, seed));
        (0..7).flat_map(of_seed).map(run).collect::<Vec<_>>()
    });
    for (one, other) in outcomes[0].iter().zip(&outcomes[1]) {
        assert_eq!(one, other, "the first work that differs");
    }
}

/// The table has each of the module's sites with a verdict, and a reason for those that no seed exposes.
#[test]
fn the_table_of_removals_lists_every_site() {
    if refreshes() {
        return ferrogin_test_support::skip("the_table_of_removals_lists_every_site", "the table is made again");
    }
    let table = table();
    let expected: BTreeSet<String> = removals(&sites(&shipped::text())).iter().map(Line::key).collect();
    let listed: BTreeSet<String> = table.iter().map(Line::key).collect();
    let (new, gone): (Vec<_>, Vec<_>) =
        (expected.difference(&listed).collect(), listed.difference(&expected).collect());
    let again = "the module has changed: removals.txt says how to make the table again";
    assert!(
        new.is_empty() && gone.is_empty() && listed.len() == table.len(),
        "{again}; new: {new:#?}, gone: {gone:#?}"
    );
    let docs = include_str!("removals.rs");
    for line in &table {
        let known = match line.verdict.as_str() {
            "found" => line.seed().is_some(),
            "unseen" | "unreached" => {
                line.note.split('+').all(|reason| docs.contains(&format!("\n//! * `{reason}`: ")))
            }
            _ => false,
        };
        assert!(
            known,
            "removals.txt: {line:?} has no verdict, no seed, or a reason that the comment above does not define"
        );
    }
    let count = |verdict: &str| table.iter().filter(|line| line.verdict == verdict).count();
    println!("{} found, {} unseen, {} unreached", count("found"), count("unseen"), count("unreached"));
}

fn refreshes() -> bool {
    std::env::var_os("FERROGIN_REFRESH").is_some()
}

#[test]
fn some_removals_have_the_verdicts_of_the_table() {
    if !refreshes() {
        have_verdicts(table().into_iter().step_by(6).collect());
    }
}

/// Each removal that the table calls found is exposed by its seed. A soak tries all removals under all seeds; with
/// `FERROGIN_REFRESH` the table is regenerated.
#[test]
#[ignore = "make check"]
fn removals_have_the_verdicts_of_the_table() {
    if refreshes() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/removals.txt");
        return std::fs::write(path, refresh(&Campaign::new(shipped::text()))).expect("the table");
    }
    have_verdicts(table());
}

fn have_verdicts(mut table: Vec<Line>) {
    let text = shipped::text();
    let sites = sites(&text);
    // The other test reports sites missing from the table or the module.
    table.retain(|line| sites.contains_key(&line.site) && (soak() || line.seed().is_some()));
    let campaign = soak().then(|| Campaign::new(text.clone()));
    let differences = in_parallel(&table, |line| {
        let now = match (line.seed(), &campaign) {
            (Some(seed), _) => shown_by(&text, &sites[&line.site], line.change, seed)
                .map_or_else(|| format!("seed {seed} does not show it"), |_| line.verdict.clone()),
            (None, Some(campaign)) => campaign.verdict(&line.site, line.change, false).name().into(),
            (None, None) => line.verdict.clone(),
        };
        (now != line.verdict).then(|| format!("{}: {} {}, and now: {now}", line.key(), line.verdict, line.note))
    });
    let differences: Vec<String> = differences.into_iter().flatten().collect();
    println!("{} removals tried", table.len());
    assert!(!table.is_empty() && differences.is_empty(), "{differences:#?}");
}
