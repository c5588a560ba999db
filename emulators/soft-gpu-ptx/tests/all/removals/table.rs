//! `removals.txt`: a line with the verdict on each possible removal.

use super::campaign::{Campaign, Verdict, in_parallel};
use super::sites::{Change, Site, functions};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const TABLE: &str = include_str!("../../../removals.txt");

/// The change, site, verdict, seed or reason, and some functions that contain the site.
#[derive(Clone, Debug)]
pub struct Line {
    pub change: Change,
    pub site: Site,
    pub verdict: String,
    pub note: String,
    functions: String,
}

impl Line {
    fn read(line: &str) -> Self {
        let fields: Vec<String> = line.split('\t').map(String::from).collect();
        let Ok([change, form, before, after, verdict, note, functions]) = <[String; 7]>::try_from(fields) else {
            panic!("removals.txt: {line:?} has other than 7 fields: run the command in its head");
        };
        let change = match change.as_str() {
            "none" => Change::None,
            "cta" => Change::Block,
            _ => panic!("removals.txt: {line}"),
        };
        Self { change, site: [form, before, after], verdict, note, functions }
    }

    /// Returns what identifies the removal, independent of line numbers.
    pub fn key(&self) -> String {
        let change = if self.change == Change::Block { "cta" } else { "none" };
        format!("{change}\t{}", self.site.join("\t"))
    }

    fn text(&self) -> String {
        format!("{}\t{}\t{}\t{}", self.key(), self.verdict, self.note, self.functions)
    }

    /// Returns the seed that exposes the removal.
    pub fn seed(&self) -> Option<u64> {
        self.note.parse().ok().filter(|_| self.verdict == "found")
    }
}

/// Reads the table's lines.
pub fn table() -> Vec<Line> {
    TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(Line::read).collect()
}

/// Returns a line without a verdict for each possible removal.
pub fn removals(sites: &BTreeMap<Site, Vec<usize>>) -> Vec<Line> {
    let line = |change, site: &Site| {
        let (verdict, note, functions) = Default::default();
        Line { change, site: site.clone(), verdict, note, functions }
    };
    let narrower = sites.keys().filter(|site| !site[0].contains(".cta")).map(|site| line(Change::Block, site));
    sites.keys().map(|site| line(Change::None, site)).chain(narrower).collect()
}

/// Returns a few names from a list, and the number of the rest.
fn few(names: &BTreeSet<String>) -> String {
    let mut few = names.iter().take(3).cloned().collect::<Vec<_>>().join(" ");
    if names.len() > 3 {
        let _ = write!(few, " +{}", names.len() - 3);
    }
    few
}

/// Returns the old line whose reason to propose for a line without one: preferably one that is gone from the table,
/// then the most similar.
fn most_like<'a>(line: &Line, old: &'a [Line], keys: &BTreeSet<String>) -> Option<&'a Line> {
    let names: BTreeSet<&str> = line.functions.split(' ').collect();
    let alike = |other: &&Line| {
        let same = line.site.iter().zip(&other.site).filter(|(one, other)| one == other).count();
        let shared = other.functions.split(' ').filter(|name| names.contains(name)).count();
        (other.verdict == line.verdict, other.change == line.change, !keys.contains(&other.key()), same, shared)
    };
    old.iter().filter(|other| other.verdict != "found" && other.site[0] == line.site[0]).max_by_key(alike)
}

/// Returns the PTX around a site's first instruction.
fn place(text: &str, lines: &[usize]) -> String {
    let first = lines.first().copied().unwrap_or(0);
    let mut place = String::new();
    for (at, line) in text.lines().enumerate().skip(first.saturating_sub(6)).take(13) {
        let mark = if at == first { '>' } else { ' ' };
        if !line.contains("inline asm") {
            let _ = writeln!(place, "    {mark} {:>6} {}", at + 1, line.trim());
        }
    }
    place
}

/// Regenerates the table, and prints what has changed.
pub fn refresh(campaign: &Campaign) -> String {
    let old = table();
    let mut file: String = TABLE.lines().filter(|line| line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    let mut lines = removals(&campaign.sites);
    let keys: BTreeSet<String> = lines.iter().map(Line::key).collect();
    let was_found = |line: &Line| old.iter().any(|other| other.key() == line.key() && other.verdict == "found");
    let verdicts = in_parallel(&lines, |line| campaign.verdict(&line.site, line.change, was_found(line)));
    for (line, verdict) in lines.iter_mut().zip(verdicts) {
        let at = &campaign.sites[&line.site];
        line.functions = few(&functions(&campaign.text, at));
        line.verdict = verdict.name().into();
        let before = old.iter().find(|other| other.key() == line.key());
        let had = before.map_or("no line".into(), |before| format!("{} {}", before.verdict, before.note));
        match (verdict, before) {
            (Verdict::Found(shown), before) => {
                line.note = shown.seed.to_string();
                if before.is_none_or(|before| before.verdict != "found") {
                    println!("FOUND {}: {had} before. Seed {}, {}", line.key(), shown.seed, shown.how);
                }
            }
            (_, Some(before)) if before.verdict == line.verdict => line.note.clone_from(&before.note),
            (verdict, _) => {
                // No other line's reason fits a removal that was found before.
                let like =
                    most_like(line, &old, &keys).filter(|_| before.is_none_or(|before| before.verdict != "found"));
                line.note = like.map_or("?".into(), |like| like.note.clone());
                let works = if let Verdict::Unseen(works) = verdict { works } else { 0 };
                println!("PROPOSED {}: {had} before; {works} works get there", line.text());
                println!("  as of {}", like.map_or("no line".into(), Line::text));
                print!("{}", place(&campaign.text, at));
            }
        }
        let _ = writeln!(file, "{}", line.text());
    }
    for gone in old.iter().filter(|line| !keys.contains(&line.key())) {
        println!("GONE {}", gone.text());
    }
    file
}
