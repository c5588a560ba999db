//! What the analysis found: two accesses that nothing orders, as text and as JSON, and the exceptions that a program
//! makes.

use serde::Serialize;
use std::fmt::Write;

/// A kind's name, what it says, the rule that is broken, and how to fix it.
struct About {
    name: &'static str,
    says: &'static str,
    rule: &'static str,
    fix: &'static str,
}

macro_rules! kinds {
    ($($kind:ident($name:literal, $says:literal, $rule:literal, $fix:literal $(,)?),)*) => {
        /// What is wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $(#[doc = $says] $kind,)*
        }

        impl Kind {
            const ALL: &[Self] = &[$(Self::$kind),*];

            fn about(self) -> About {
                match self {
                    $(Self::$kind => About { name: $name, says: $says, rule: $rule, fix: $fix },)*
                }
            }
        }
    };
}

kinds! {
    Race(
        "race",
        "two threads access the same bytes, one of them writes, and nothing orders the two",
        "PTX memory model: a barrier, or a release that an acquire sees",
        "put a barrier between the two (__syncwarp, __syncthreads, grid.sync), or a release and an acquire of the same flag",
    ),
    Unwritten(
        "unwritten",
        "a thread reads shared memory that no thread has written",
        "PTX: shared memory begins with unknown contents",
        "initialize it, and put a barrier before the read",
    ),
    Read(
        "read",
        "a read and a put access the same bytes, and nothing orders the two",
        "semantics.md#order: a signal orders its own operation; a flush and a barrier order what was posted before",
        "wait for the put's own signal, up to a count that other raises can't reach; or have the sender flush before it notifies the reader",
    ),
    Write(
        "write",
        "a put writes bytes that something else writes or still reads, and nothing orders the two",
        "semantics.md#order: operations are unordered until a flush or a signal orders them",
        "signal the sender that the bytes are free, and have it wait for that; between two puts, flush",
    ),
    Source(
        "source",
        "the source of a put is changed, and nothing orders that with the put",
        "semantics.md#what-each-completion-means: the source may be reused after a flush, or once a counter covers the put",
        "flush, or wait for a counter of all puts that name it, before the change; put a barrier between the threads that fill the source and the one that posts",
    ),
    Unrung(
        "unrung",
        "a request was left without a doorbell at the end of the kernel",
        "semantics.md#doorbells: FGIN_AGGREGATE leaves the doorbell to a later operation on the same queue, or a flush",
        "end with an operation without FGIN_AGGREGATE on the same queue, fgin_ring or a flush",
    ),
    Baseline(
        "baseline",
        "a signal is read or reset while a peer may raise it for the wait that follows",
        "semantics.md#signals: a reset or a baseline comes when no raise can be under way",
        "tell the peer first, for example with another signal, and have it wait for that before it raises",
    ),
    Weak(
        "weak",
        "a wait for a signal is taken to cover an operation that the signal doesn't cover",
        "semantics.md#order: a signal covers its own operation; a strong one also the context's earlier ones to that peer",
        "use a strong signal, flush before the signal, or give the operation the signal itself",
    ),
    Closed(
        "closed",
        "a context is closed while a peer's request to it may be under way, or one of its own never completes",
        "semantics.md#closing: a peer's request to a context that has been destroyed fails",
        "wait for what the peers send, with signals or with a barrier after their flush, before the close",
    ),
    Unseen(
        "unseen",
        "a signal is raised, and nobody waits for it",
        "semantics.md#signals: a wait is what a signal is for",
        "wait for it, or leave it out",
    ),
}

impl Kind {
    /// Whether it's only a note: no mistake by itself.
    pub fn is_note(self) -> bool {
        self == Self::Unseen
    }

    /// Its name in reports and in exceptions.
    pub fn name(self) -> &'static str {
        self.about().name
    }
}

/// One side of a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Access {
    /// The process's rank, if its launcher told it.
    pub rank: Option<u32>,
    /// The kernel; empty for the host.
    pub kernel: String,
    /// `store`, `load`, `put` and so on.
    pub what: String,
    /// Where: `file:line`, the program's line first, then the lines that it's inlined at. Empty if the PTX has no
    /// lines.
    pub lines: Vec<String>,
}

/// A mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What is wrong.
    pub kind: Kind,
    /// One access.
    pub first: Access,
    /// The other, if there are two.
    pub second: Option<Access>,
    /// Which memory, such as `shared memory`.
    pub memory: String,
    /// How many bytes both access.
    pub bytes: u64,
    /// How often it was seen.
    pub count: u64,
}

impl Access {
    fn place(&self) -> &str {
        self.lines.first().map_or("", String::as_str)
    }

    fn who(&self) -> String {
        let rank = self.rank.map_or_else(|| "a process".to_owned(), |rank| format!("rank {rank}"));
        if self.kernel.is_empty() { format!("{rank}, the host") } else { format!("{rank}, kernel {}", self.kernel) }
    }
}

impl Report {
    fn sides(&self) -> impl Iterator<Item = &Access> {
        std::iter::once(&self.first).chain(&self.second)
    }

    /// Whether two reports are the same mistake, at the same lines and in any order, on whatever ranks.
    fn is_same(&self, other: &Self) -> bool {
        let key = |report: &Self| {
            let mut sides: Vec<_> = report.sides().map(|side| (side.kernel.clone(), side.place().to_owned())).collect();
            sides.sort();
            (report.kind, sides)
        };
        key(self) == key(other)
    }

    /// Its text, with the lines of source that `source` finds for `file:line`.
    pub fn text(&self, source: impl Fn(&str) -> Option<String>) -> String {
        let about = self.kind.about();
        let level = if self.kind.is_note() { "note" } else { "error" };
        let mut text = format!("{level}[{}]: {}\n", about.name, about.says);
        for side in self.sides() {
            let _ = writeln!(text, "  {}: {}", side.who(), side.what);
            for (n, line) in side.lines.iter().enumerate() {
                let _ = writeln!(text, "    {}{line}", if n == 0 { "at " } else { "inlined at " });
                if let Some(source) = source(line).filter(|_| n == 0) {
                    let _ = writeln!(text, "       | {}", source.trim());
                }
            }
            if side.lines.is_empty() && !side.kernel.is_empty() {
                text += "    (no line: compile the kernel with -gline-tables-only or -lineinfo)\n";
            }
        }
        if !self.memory.is_empty() {
            let times = if self.count == 1 { String::new() } else { format!(", {} times", self.count) };
            let _ = writeln!(text, "  {} bytes of {}{times}", self.bytes, self.memory);
        }
        let _ = write!(text, "  rule: {}\n  fix: {}\n", about.rule, about.fix);
        text
    }

    /// A JSON object.
    pub fn json(&self) -> String {
        #[derive(Serialize)]
        struct Object<'a> {
            kind: &'a str,
            note: bool,
            accesses: Vec<&'a Access>,
            memory: &'a str,
            bytes: u64,
            count: u64,
            rule: &'a str,
        }
        let Self { kind, memory, bytes, count, .. } = self;
        let About { name, rule, .. } = kind.about();
        let (note, accesses) = (kind.is_note(), self.sides().collect());
        let object = Object { kind: name, note, accesses, memory, bytes: *bytes, count: *count, rule };
        serde_json::to_string(&object).expect("all of it is text and numbers")
    }
}

/// Adds reports to others; the same mistake is one report with the sum of the counts. A race says why its read found
/// nothing written.
pub fn merge(into: &mut Vec<Report>, more: Vec<Report>) {
    for report in more {
        match into.iter_mut().find(|known| known.is_same(&report)) {
            Some(known) => {
                known.count += report.count;
                known.bytes = known.bytes.max(report.bytes);
            }
            None => into.push(report),
        }
    }
    let races: Vec<Access> = into
        .iter()
        .filter(|report| report.kind == Kind::Race)
        .flat_map(|report| report.sides().cloned().collect::<Vec<_>>())
        .collect();
    let explains =
        |race: &Access, report: &Report| race.kernel == report.first.kernel && race.lines == report.first.lines;
    into.retain(|report| report.kind != Kind::Unwritten || !races.iter().any(|race| explains(race, report)));
}

/// A mistake that a program's authors accept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exception {
    kind: String,
    places: Vec<String>,
    /// Why it's accepted.
    pub reason: String,
    /// Its line in the file.
    pub line: usize,
}

impl Exception {
    /// Parses a file: a line has a kind, one or two places (`file:line`, or `file` for all its lines), a colon with
    /// blanks around it, and a reason. Lines that begin with `#` and empty ones are left out.
    ///
    /// # Errors
    /// A line lacks a part; the text says which line.
    pub fn parse(text: &str) -> Result<Vec<Self>, String> {
        let lines =
            text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty() && !line.trim_start().starts_with('#'));
        let parse = |(n, line): (usize, &str)| {
            let (what, reason) = line.split_once(" : ").ok_or("it has no reason: end it with ` : REASON`")?;
            let mut words = what.split_whitespace().map(str::to_owned);
            let kind = words.next().ok_or("it has no kind")?;
            if !Kind::ALL.iter().any(|known| known.name() == kind) {
                return Err("no kind has this name; `error[KIND]` is how a report begins");
            }
            let places: Vec<String> = words.collect();
            if !(1..=2).contains(&places.len()) || reason.trim().is_empty() {
                return Err("it needs a kind, one or two places and a reason: KIND FILE:LINE [FILE:LINE] : REASON");
            }
            Ok(Self { kind, places, reason: reason.trim().to_owned(), line: n + 1 })
        };
        lines.map(|line| parse(line).map_err(|why| format!("line {}: {why}", line.0 + 1))).collect()
    }

    /// Whether it covers the report: the same kind, and each place one of the report's, in any order.
    pub fn covers(&self, report: &Report) -> bool {
        let is_at = |place: &String, side: &Access| {
            side.lines.iter().any(|line| {
                let file = line.rsplit_once(':').map_or(line.as_str(), |(file, _)| file);
                let whole = if place.contains(':') { line } else { file };
                whole == place || whole.ends_with(&format!("/{place}"))
            })
        };
        let sides: Vec<&Access> = report.sides().collect();
        self.kind == report.kind.name()
            && match &self.places[..] {
                [one] => sides.iter().any(|side| is_at(one, side)),
                [a, b] => {
                    sides.len() == 2 && [(0, 1), (1, 0)].iter().any(|(x, y)| is_at(a, sides[*x]) && is_at(b, sides[*y]))
                }
                _ => false,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(kind: Kind, first: &str, second: &str) -> Report {
        let side = |rank, what: &str, line: &str| Access {
            rank: Some(rank),
            kernel: "flag".into(),
            what: what.into(),
            lines: vec![line.into(), "main.cu:9".into()],
        };
        Report {
            kind,
            first: side(0, "put", first),
            second: Some(side(1, "load", second)),
            memory: "the window of rank 1".into(),
            bytes: 4,
            count: 1,
        }
    }

    #[test]
    fn same_lines_in_any_order_and_on_any_rank_are_one_report() {
        let mut all = vec![report(Kind::Read, "a.cu:1", "a.cu:2")];
        let mut swapped = report(Kind::Read, "a.cu:2", "a.cu:1");
        (swapped.first.rank, swapped.count, swapped.bytes) = (Some(7), 5, 64);
        merge(&mut all, vec![swapped, report(Kind::Write, "a.cu:1", "a.cu:2"), report(Kind::Read, "a.cu:1", "a.cu:3")]);
        assert_eq!(all.iter().map(|report| report.count).collect::<Vec<_>>(), [6, 1, 1]);
        assert_eq!(all[0].bytes, 64);
    }

    #[test]
    fn race_explains_a_read_of_what_nobody_wrote() {
        let unwritten = |line| Report { second: None, ..report(Kind::Unwritten, line, "") };
        let mut all = Vec::new();
        merge(&mut all, vec![unwritten("a.cu:2"), unwritten("a.cu:3"), report(Kind::Race, "a.cu:1", "a.cu:2")]);
        assert_eq!(all.iter().map(|report| report.first.place()).collect::<Vec<_>>(), ["a.cu:3", "a.cu:1"]);
    }

    #[test]
    fn text_names_both_accesses_with_their_source_and_the_rule() {
        let text = report(Kind::Read, "a.cu:1", "a.cu:2").text(|line| (line == "a.cu:2").then(|| "  x = *p;".into()));
        for part in [
            "error[read]: ",
            "rank 0, kernel flag: put\n    at a.cu:1\n    inlined at main.cu:9",
            "rank 1, kernel flag: load\n    at a.cu:2\n       | x = *p;",
            "4 bytes of the window of rank 1\n",
            "rule: semantics.md#order",
            "fix: ",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn json_escapes_what_it_must() {
        let mut odd = report(Kind::Race, "a\"b\\c:1", "a.cu:2");
        odd.memory = "tab\there".into();
        let json = odd.json();
        assert!(json.contains(r#""a\"b\\c:1""#) && json.contains(r"tab\there"), "{json}");
    }

    #[test]
    fn exceptions_need_a_reason_and_cover_their_lines_only() {
        let text = "# places\n  # of a.cu\n\nread a.cu:1 a.cu:2 : the flag is polled\nrace dir/b.cu : all of it\n";
        let [both, file] = &Exception::parse(text).unwrap()[..] else { panic!("two exceptions") };
        assert_eq!((both.line, both.reason.as_str()), (4, "the flag is polled"));
        assert!(both.covers(&report(Kind::Read, "/src/a.cu:2", "/src/a.cu:1")), "in any order, with a directory");
        assert!(!both.covers(&report(Kind::Read, "aa.cu:2", "a.cu:1")), "a part of a name");
        assert!(!both.covers(&report(Kind::Read, "a.cu:1", "a.cu:1")), "each place is a side");
        assert!(!both.covers(&report(Kind::Race, "a.cu:1", "a.cu:2")));
        assert!(file.covers(&report(Kind::Race, "x.cu:1", "/dir/b.cu:77")));
        for bad in ["read a.cu:1", "read : why", "reed a.cu:1 : why", "read a b c : why", "read a.cu:1 :  "] {
            assert!(Exception::parse(bad).unwrap_err().starts_with("line 1: "), "{bad}");
        }
    }
}
