//! Finds the shipped module's instructions with an ordering, and changes some of them.

use std::collections::{BTreeMap, BTreeSet};

/// An instruction with an ordering, and the strong accesses before and after it in the text.
pub type Site = [String; 3];

/// Returns the strong access in a line of PTX.
fn strong(line: &str) -> Option<&str> {
    let word = line.trim().trim_start_matches('@').split_whitespace().find(|word| {
        word.starts_with("fence") || ["ld.", "st.", "atom.", "red."].iter().any(|start| word.starts_with(start))
    })?;
    let word = word.trim_end_matches(';');
    let orders = ["fence", "relaxed", "acquire", "release", "acq_rel"];
    orders.iter().any(|order| word.contains(order)).then_some(word)
}

fn has_order(form: &str) -> bool {
    ["fence", "acquire", "release", "acq_rel"].iter().any(|order| form.contains(order))
}

fn begins_function(line: &str) -> bool {
    line.contains(".func") || line.contains(".entry")
}

/// Returns the sites in a text, each with its lines, counting from 0.
pub fn sites(text: &str) -> BTreeMap<Site, Vec<usize>> {
    let mut found: Vec<(usize, &str)> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if begins_function(line) {
            found.push((at, "-"));
        } else if let Some(form) = strong(line) {
            found.push((at, form));
        }
    }
    found.push((usize::MAX, "-"));
    let mut sites: BTreeMap<Site, Vec<usize>> = BTreeMap::new();
    for three in found.windows(3) {
        let (at, form) = three[1];
        if has_order(form) {
            sites.entry([form, three[0].1, three[2].1].map(String::from)).or_default().push(at);
        }
    }
    sites
}

/// Returns the functions that contain these lines, by the last component of their paths.
pub fn functions(text: &str, lines: &[usize]) -> BTreeSet<String> {
    let (mut found, mut now) = (BTreeSet::new(), "");
    for (at, line) in text.lines().enumerate() {
        if begins_function(line) {
            let name = line.split('(').find_map(|part| part.split_whitespace().last().filter(|word| is_name(word)));
            now = name.unwrap_or(now);
        }
        if lines.contains(&at) {
            found.insert(path_of(now).unwrap_or(now).to_string());
        }
    }
    found
}

fn is_name(word: &str) -> bool {
    ["fgin_", "_R"].iter().any(|start| word.starts_with(start))
}

/// Returns the last name of the path in a Rust symbol (v0 mangling), without generic arguments. A path is one run of
/// names; a method's path has a second run: its type and the method.
fn path_of(symbol: &str) -> Option<&str> {
    let path = symbol.strip_prefix("_R")?.trim_start_matches('I');
    let (mut rest, mut runs, mut in_run) = (path, Vec::new(), false);
    while let Some(first) = rest.chars().next() {
        if first.is_ascii_digit() {
            let (length, after) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
            let (name, after) = after.split_at_checked(length.parse().ok()?)?;
            if in_run {
                runs.pop();
            }
            runs.push(name);
            (rest, in_run) = (after, true);
        } else {
            // Back-references and disambiguators end in `_`.
            rest = if matches!(first, 'B' | 's') { rest.split_once('_')?.1 } else { &rest[1..] };
            in_run = false;
        }
    }
    runs.get(usize::from(path.starts_with("NvM"))).copied()
}

/// The change made to a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// No change: tries the pause alone.
    Keep,
    /// The fence is removed, or the access is relaxed.
    None,
    /// The scope is narrowed to the block.
    Block,
}

/// Where a thread that reaches a site lets the others run, for one turn or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    None,
    Before,
    After,
    LongBefore,
    LongAfter,
}

impl Pause {
    pub const ALL: [Pause; 5] = [Pause::None, Pause::Before, Pause::After, Pause::LongBefore, Pause::LongAfter];

    /// Returns the number of turns before and after the site.
    fn turns(self) -> (usize, usize) {
        match self {
            Pause::None => (0, 0),
            Pause::Before => (1, 0),
            Pause::After => (0, 1),
            Pause::LongBefore => (6, 0),
            Pause::LongAfter => (0, 6),
        }
    }
}

/// Returns the text with the change and pause made in these lines. All lines keep their numbers.
pub fn changed(text: &str, lines: &[usize], change: Change, pause: Pause) -> String {
    let (before, after) = pause.turns();
    let sleep = |turns| "nanosleep.u32 1; ".repeat(turns);
    let mut changed = String::with_capacity(text.len());
    for (at, line) in text.lines().enumerate() {
        if !lines.contains(&at) {
            changed += line;
            changed.push('\n');
            continue;
        }
        changed += &sleep(before);
        let relaxed = |line: &str| {
            [".acq_rel", ".acquire", ".release"]
                .iter()
                .fold(line.to_string(), |line, order| line.replace(order, ".relaxed"))
        };
        match change {
            Change::Keep => changed += line,
            Change::Block => changed += &line.replace(".sys", ".cta").replace(".gpu", ".cta"),
            Change::None if line.contains("fence") => {}
            Change::None => changed += &relaxed(line),
        }
        changed.push(' ');
        changed += &sleep(after);
        changed.push('\n');
    }
    changed
}

#[test]
fn functions_of_sites_have_their_last_names() {
    let text = ".func  (.param .b32 r) _RNvMNtNtC15ferrogin_device7context10completionNtB4_7Context10flush_used(\n.param .b64 a\n)\n{\nfence.acq_rel.sys;\n}\n\
        .visible .func  (.param .b32 r) fgin_put(\n{\nfence.acq_rel.gpu;\n}\n\
        .func _RINvNtNtC15ferrogin_device4post9combining10take_turnsNtNtB4_7sharing3GpuE(\n{\nfence.acq_rel.cta;\n}\n";
    let names: Vec<_> = functions(text, &[4, 8, 12]).into_iter().collect();
    assert_eq!(names, ["fgin_put", "flush_used", "take_turns"]);
    assert_eq!(sites(text).len(), 3);
}
