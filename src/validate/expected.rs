//! How the software card behaves, for comparison with another card.

use serde_json::{Value, json};

/// How much a difference matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The plugin or kernels rely on it: a difference is a failure.
    Must,
    /// Cards differ in it; the software card has one of the possible values.
    May,
}

use Kind::{May, Must};

/// Observations' keys, with their kinds and the software card's values.
pub type Expected = [(&'static str, Kind, &'static str)];

/// Observations' keys, and the software card's values with two ranks, libfabric 1.17 and 4096-byte pages. A test
/// compares them with what it observes.
#[rustfmt::skip]
pub const SOFTWARE_CARD: &Expected = &[
    // First comes what differs between cards.
    ("counters: number", May, "8192"),
    ("counters: place", May, "dma-buf"),
    ("counters: highest value", May, "not reported"),
    ("queue: 64-bit request ids", May, "yes"),
    ("queue: bytes of a request", Must, "64"),
    ("wide requests", May, "128 bytes, 32 slots"),
    ("wide requests: bytes inline", May, "80"),
    ("memory: by address", May, "yes"),
    ("memory: as dma-buf", May, "yes"),
    ("memory: as dma-buf mapped over PCIe", May, "not tried: host memory"),
    ("memory: as dma-buf without that mapping", May, "not tried: host memory"),
    ("writes with immediate data: without a posted receive", May, "yes"),
    ("libfabric", May, "1.17"),
    ("provider's version", May, "0.1"),
    ("kernels", May, "cpu"),
    ("cards", May, "1"),
    ("page size", May, "4096"),
    ("queue pairs: number", May, "65534"),
    ("longest transfer", May, "1073741824"),
    ("link speed", May, "100 Gbit/s"),
    ("queue: capabilities", May, "0x1"),
    ("queue: slots", May, "32"),
    ("queue: requests in a batch", May, "16"),
    ("queue: bytes of a completion", May, "32"),
    ("writes: completions", Must, "32"),
    ("writes: each request id came back once, whole", Must, "yes"),
    ("writes: order of completions", May, "as posted"),
    ("writes: completion counter", Must, "32"),
    ("writes: signal counter of the target", Must, "32"),
    ("writes: data arrived", Must, "yes"),
    ("reads: completions", Must, "32"),
    ("reads: order of completions", May, "as posted"),
    ("reads: completion counter", Must, "64"),
    ("reads: data arrived", Must, "yes"),
    ("error counter", Must, "0"),
    ("wide requests: inline value arrived", Must, "yes"),
];

/// One row of the comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub key: String,
    pub software_card: String,
    /// By rank; `None` if a rank did not get that far.
    pub observed: Vec<Option<String>>,
    must: bool,
}

impl Row {
    /// Returns whether all ranks observed what the software card shows.
    pub fn agrees(&self) -> bool {
        self.observed.iter().all(|value| value.as_deref() == Some(&*self.software_card))
    }

    /// Returns whether a rank observed something different and no difference is allowed.
    pub fn fails(&self) -> bool {
        self.must && !self.agrees()
    }

    pub fn verdict(&self) -> &'static str {
        match (self.agrees(), self.must) {
            (true, _) => "agrees",
            (false, false) => "differs",
            (false, true) => "FAILS",
        }
    }

    /// Returns the observed value, or all ranks' values if they differ.
    pub fn shown(&self) -> String {
        let texts: Vec<&str> = self.observed.iter().map(|value| value.as_deref().unwrap_or("not observed")).collect();
        match texts.split_first() {
            None => "not observed".into(),
            Some((first, rest)) if rest.iter().all(|text| text == first) => (*first).to_owned(),
            _ => texts
                .iter()
                .enumerate()
                .map(|(rank, text)| format!("rank {rank}: {text}"))
                .collect::<Vec<_>>()
                .join("; "),
        }
    }

    pub fn json(&self) -> Value {
        json!({ "key": self.key, "software_card": self.software_card, "observed": self.observed, "verdict": self.verdict() })
    }
}

/// Compares the ranks' observations, lists of `[key, value]`, with `expected`.
pub fn compare(expected: &Expected, ranks: &[Value]) -> Vec<Row> {
    let value = |rank: &Value, key: &str| {
        let pairs = rank.as_array()?;
        let pair = pairs.iter().find(|pair| pair[0] == key)?;
        Some(pair[1].as_str()?.to_owned())
    };
    // Without wide requests, no value can arrive.
    let wide = ranks.iter().any(|rank| value(rank, "wide requests").is_some_and(|text| !text.starts_with("no")));
    let rows = expected.iter().filter(|(key, ..)| wide || *key != "wide requests: inline value arrived");
    rows.map(|(key, kind, text)| Row {
        key: (*key).to_owned(),
        software_card: (*text).to_owned(),
        observed: ranks.iter().map(|rank| value(rank, key)).collect(),
        must: *kind == Must,
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_fail_only_where_kernels_rely_on_the_value() {
        let rank =
            |counter: &str, slots: &str| json!([["writes: completion counter", counter], ["queue: slots", slots]]);
        let rows = compare(SOFTWARE_CARD, &[rank("32", "32"), rank("31", "64")]);
        let find = |key: &str| rows.iter().find(|row| row.key == key).expect("a row");
        assert!(find("writes: completion counter").fails());
        assert_eq!(find("writes: completion counter").shown(), "rank 0: 32; rank 1: 31");
        assert_eq!(find("queue: slots").verdict(), "differs");
        assert!(find("error counter").fails(), "a missing observation fails");
        assert!(rows.iter().all(|row| row.key != "wide requests: inline value arrived"));
    }
}
