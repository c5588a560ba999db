//! A strict reader for Prometheus' text format: it refuses a file that scrapers could read in more than one way.

use std::collections::{BTreeMap, BTreeSet};

/// A file's samples: the value of each series. A series is a metric's name and its labels in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metrics(BTreeMap<(String, BTreeMap<String, String>), u64>);

impl Metrics {
    /// Reads a file with whole numbers and no timestamps, as ferrogin writes them.
    ///
    /// # Errors
    /// The line that isn't allowed, and why.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.ends_with('\n') {
            return Err("the last line has no end".to_owned());
        }
        let (mut families, mut samples) = (BTreeSet::new(), BTreeMap::new());
        // The name from the last HELP line, and the name and type from the last TYPE line.
        let (mut help, mut family) = (String::new(), (String::new(), String::new()));
        for line in text.lines() {
            let refuse = |why: &str| Err(format!("{why}: {line}"));
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let Some((name, text)) = rest.split_once(' ') else { return refuse("HELP without a text") };
                if text.trim() != text || text.is_empty() || text.contains('\\') {
                    return refuse("a HELP text with spaces around it or escapes");
                }
                help = name.to_owned();
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let Some((name, kind)) = rest.split_once(' ') else { return refuse("TYPE without a type") };
                if name != help {
                    return refuse("TYPE without its HELP before it");
                }
                if !(kind == "gauge" || kind == "counter" && name.ends_with("_total")) {
                    return refuse("a type that is not a gauge, and no counter whose name ends in _total");
                }
                if !families.insert(name.to_owned()) {
                    return refuse("the second family of this name");
                }
                family = (name.to_owned(), kind.to_owned());
            } else {
                let Some((name, rest)) = line.split_once('{') else { return refuse("a sample without labels") };
                let Some((labels, value)) = rest.rsplit_once("} ") else { return refuse("labels without an end") };
                if name != family.0 || !is_name(name) {
                    return refuse("a sample outside its family");
                }
                let Some(labels) = parse_labels(labels) else { return refuse("invalid labels") };
                let Ok(number) = value.parse::<u64>() else { return refuse("no whole number") };
                if number.to_string() != value {
                    return refuse("no whole number in its shortest form");
                }
                if samples.insert((name.to_owned(), labels), number).is_some() {
                    return refuse("the second sample of this series");
                }
            }
        }
        Ok(Self(samples))
    }

    /// The sum of a metric's samples that have all these labels; `None` if there are none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<u64> {
        let has = |found: &BTreeMap<String, String>| {
            labels.iter().all(|(label, value)| found.get(*label).is_some_and(|found| found == value))
        };
        let matching = self.0.iter().filter(|((found, all), _)| found == name && has(all));
        matching.map(|(_, value)| *value).reduce(|sum, value| sum + value)
    }
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Parses `a="x",b="y"`, where a backslash escapes itself, a quote or a line end.
fn parse_labels(text: &str) -> Option<BTreeMap<String, String>> {
    let mut labels = BTreeMap::new();
    let mut rest = text;
    loop {
        let (name, after) = rest.split_once("=\"")?;
        let (mut value, mut chars) = (String::new(), after.char_indices());
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next()?.1 {
                    'n' => '\n',
                    c @ ('\\' | '"') => c,
                    _ => return None,
                }),
                (_, c) => value.push(c),
            }
        };
        if !is_name(name) || labels.insert(name.to_owned(), value).is_some() {
            return None;
        }
        rest = &after[end + 1..];
        if rest.is_empty() {
            return Some(labels);
        }
        rest = rest.strip_prefix(',')?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "# HELP a_total A text.\n# TYPE a_total counter\n";

    #[test]
    fn samples_are_read_by_name_and_labels() {
        let text = format!("{HEAD}a_total{{x=\"1\",y=\"a\\\"b\\\\\"}} 5\na_total{{x=\"2\",y=\"c\"}} 7\n");
        let metrics = Metrics::parse(&text).unwrap();
        assert_eq!(metrics.sum("a_total", &[]), Some(12));
        assert_eq!(metrics.sum("a_total", &[("y", "a\"b\\")]), Some(5));
        assert_eq!(metrics.sum("a_total", &[("x", "2"), ("y", "d")]), None);
    }

    #[test]
    fn invalid_files_are_refused() {
        for (lines, why) in [
            ("a_total{x=\"1\"} 5", "no end"),
            ("a_total 5\n", "without labels"),
            ("a_total{x=\"1\"} 05\n", "shortest"),
            ("a_total{x=\"1\"} 5 77\n", "whole"),
            ("a_total{x=\"1\"} -5\n", "whole"),
            ("a_total{x=\"1} 5\n", "invalid labels"),
            ("a_total{x=\"1\",x=\"1\"} 5\n", "invalid labels"),
            ("a_total{x=\"1\",} 5\n", "invalid labels"),
            ("a_total{2x=\"1\"} 5\n", "invalid labels"),
            ("a_total{x=\"\\t\"} 5\n", "invalid labels"),
            ("a_total{x=\"1\"} 5\na_total{x=\"1\"} 5\n", "second sample"),
            ("b_total{x=\"1\"} 5\n", "outside its family"),
            ("# HELP a_total A text.\n# TYPE a_total counter\n", "second family"),
            ("# HELP b Text\n# TYPE b counter\n", "no counter"),
            ("# TYPE b gauge\n", "HELP before"),
            ("# HELP b\n", "without a text"),
            ("\n", "without labels"),
        ] {
            let error = Metrics::parse(&format!("{HEAD}{lines}")).unwrap_err();
            assert!(error.contains(why), "{lines:?}: {error}");
        }
    }
}
