//! Removes the shipped module's fences and orderings in turn: with weak memory and a simulated card, some seed exposes each removal.
//!
//! A *site* is an instruction with an ordering, identified by the nearest strong accesses before and after it in the text. Copies of
//! one source line that the compiler has inlined into several functions are one site, and are removed together.
//! `removals.txt` lists all sites with their verdicts, and README.md explains the reasons for those that no seed exposes.

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
    let docs = include_str!("../../README.md");
    for line in &table {
        let known = match line.verdict.as_str() {
            "found" => line.seed().is_some(),
            "unseen" | "unreached" => line.note.split('+').all(|reason| docs.contains(&format!("\n| `{reason}` | "))),
            _ => false,
        };
        assert!(known, "removals.txt: {line:?} has no verdict, no seed, or a reason that README.md does not define");
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
