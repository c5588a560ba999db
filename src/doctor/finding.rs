//! Findings, and the two formats of a report: text and JSON.

use anstyle::{AnsiColor, Style};
use nccl_gin_ferrogin::log::counted;
use serde_json::{Value, json};
use std::fmt::Write;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// A fact, or a check that passed.
    Ok,
    /// NCCL can use the plugin, but this is slow, untested or likely a mistake.
    Warning,
    /// NCCL cannot use the plugin, or a job would fail.
    Problem,
}

impl Level {
    fn style(self) -> Option<Style> {
        match self {
            Level::Ok => None,
            Level::Warning => Some(AnsiColor::Yellow.on_default()),
            Level::Problem => Some(AnsiColor::Red.on_default().bold()),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Warning => "warning",
            Level::Problem => "problem",
        }
    }
}

/// One result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The part of the machine or the settings that was checked.
    pub area: &'static str,
    pub level: Level,
    /// The fact.
    pub what: String,
    /// Its effect; empty for most facts.
    pub why: String,
    /// The fix; empty only at level ok.
    pub fix: String,
    /// Other programs' output: a child's standard error.
    pub details: Vec<String>,
}

impl Finding {
    pub fn ok(area: &'static str, what: impl Into<String>) -> Finding {
        Finding {
            area,
            level: Level::Ok,
            what: what.into(),
            why: String::new(),
            fix: String::new(),
            details: Vec::new(),
        }
    }

    pub fn warning(
        area: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        Finding { level: Level::Warning, why: why.into(), fix: fix.into(), ..Finding::ok(area, what) }
    }

    pub fn problem(
        area: &'static str,
        what: impl Into<String>,
        why: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        Finding { level: Level::Problem, ..Finding::warning(area, what, why, fix) }
    }

    pub fn details(self, details: Vec<String>) -> Finding {
        Finding { details, ..self }
    }

    /// Adds a note on the finding's effect.
    pub fn why(self, why: impl Into<String>) -> Finding {
        Finding { why: why.into(), ..self }
    }

    fn json(&self) -> Value {
        let Finding { area, level, what, why, fix, details } = self;
        json!({ "area": area, "level": level.name(), "what": what, "why": why, "fix": fix, "details": details })
    }
}

/// All findings, and the areas that were checked.
#[derive(Debug)]
pub struct Report {
    pub findings: Vec<Finding>,
    /// The areas that `--only` selected; empty for all.
    pub only: Vec<String>,
}

/// The version of the JSON format.
const FORM: u32 = 1;

impl Report {
    pub fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// Returns whether NCCL can use the plugin.
    pub fn usable(&self) -> bool {
        self.count(Level::Problem) == 0
    }

    /// Returns the verdict in one sentence.
    pub fn verdict(&self) -> String {
        let counts = format!(
            "{}, {}",
            counted(self.count(Level::Problem), "problem"),
            counted(self.count(Level::Warning), "warning")
        );
        let checked =
            if self.only.is_empty() { String::new() } else { format!(" (checked: {} only)", self.only.join(", ")) };
        match (self.usable(), self.only.is_empty()) {
            (true, true) => format!("NCCL can use the plugin with these settings: {counts}"),
            (true, false) => format!("no problem was found: {counts}{checked}"),
            (false, _) => format!("NCCL cannot use the plugin with these settings: {counts}{checked}"),
        }
    }

    pub fn json(&self) -> Value {
        json!({
            "form": FORM,
            "version": env!("CARGO_PKG_VERSION"),
            "usable": self.usable(),
            "verdict": self.verdict(),
            "problems": self.count(Level::Problem),
            "warnings": self.count(Level::Warning),
            "only": self.only,
            "findings": self.findings.iter().map(Finding::json).collect::<Vec<_>>(),
        })
    }

    /// Returns the report for people, in colour and at most `WIDTH` columns wide: the verdict, the problems, the
    /// warnings, and with `all` the facts.
    pub fn text(&self, all: bool) -> String {
        let mut text = String::new();
        wrap(&mut text, "", &self.verdict());
        let of_level = |level| self.findings.iter().filter(move |finding| finding.level == level);
        let facts = of_level(Level::Ok).filter(|_| all);
        for (i, finding) in of_level(Level::Problem).chain(of_level(Level::Warning)).chain(facts).enumerate() {
            text += if i == 0 { "\n" } else { "" };
            let mark = if finding.level == Level::Ok { "" } else { finding.level.name() };
            let head = format!("{mark:<8} {:<15}", finding.area);
            let start = text.len();
            wrap(&mut text, &head, &finding.what);
            if let Some(style) = finding.level.style() {
                text.replace_range(start..start + mark.len(), &format!("{style}{mark}{style:#}"));
            }
            let indent = " ".repeat(INDENT);
            if !finding.why.is_empty() {
                let name = if finding.level == Level::Ok { "note" } else { " why" };
                wrap(&mut text, &format!("{indent} {name}: "), &finding.why);
            }
            if !finding.fix.is_empty() {
                wrap(&mut text, &format!("{indent}  fix: "), &finding.fix);
            }
            for line in &finding.details {
                wrap(&mut text, &format!("{indent}    | "), line);
            }
        }
        let facts = self.count(Level::Ok);
        if !all && facts > 0 {
            let _ = writeln!(
                text,
                "\n{}",
                match facts {
                    1 => "1 more check passed: --all prints it".to_owned(),
                    _ => format!("{facts} more checks passed: --all prints them"),
                }
            );
        }
        text
    }
}

/// The column of a finding's text.
const INDENT: usize = 24;
/// Columns of the report.
const WIDTH: usize = 80;

/// Writes `text` after `head`, wrapped into lines that are indented to its start.
fn wrap(into: &mut String, head: &str, text: &str) {
    let indent = head.chars().count() + usize::from(!head.is_empty() && !head.ends_with(' '));
    let mut line = format!("{head:<indent$}");
    let mut empty = true;
    for word in text.split_whitespace() {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            let _ = writeln!(into, "{line}");
            line = " ".repeat(indent);
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    let _ = writeln!(into, "{}", line.trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_shows_every_part_of_a_finding_within_its_width() {
        let long = "word ".repeat(60);
        let finding = Finding::problem("plugin", long.clone(), "it matters", "do this").details(vec!["a line".into()]);
        let report = Report { findings: vec![Finding::ok("limits", "fine"), finding], only: Vec::new() };
        let coloured = report.text(true);
        assert_eq!(coloured.matches("\u{1b}[1m\u{1b}[31mproblem\u{1b}[0m").count(), 1, "{coloured:?}");
        let text = anstream::adapter::strip_str(&coloured).to_string();
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        for part in [
            "         limits         fine",
            "problem  plugin         word",
            "why: it matters",
            "fix: do this",
            "| a line",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(text.starts_with("NCCL cannot use the plugin with these settings: 1 problem, 0 warnings\n"), "{text}");
        let short = report.text(false);
        assert!(!short.contains("fine") && short.ends_with("\n1 more check passed: --all prints it\n"), "{short}");
        assert_eq!(text.matches("word").count(), 60);
        let json = report.json();
        assert_eq!(json["usable"], false);
        assert_eq!(json["findings"][1]["fix"], "do this");
    }

    #[test]
    fn partial_report_makes_no_promise() {
        let report = Report { findings: vec![Finding::ok("limits", "fine")], only: vec!["limits".into()] };
        assert!(report.usable() && !report.verdict().contains("NCCL can use"), "{}", report.verdict());
    }
}
