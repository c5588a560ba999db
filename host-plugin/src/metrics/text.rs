//! Prometheus' text format (version 0.0.4).

use super::card::Counters;
use super::source::Numbers;
use super::state::State;
use std::fmt::Write;

/// A metric: its name, type and HELP text. node_exporter refuses files whose HELP texts for a name differ, so none
/// depends on the process.
type Metric = (&'static str, &'static str, &'static str);

const INFO: Metric = ("ferrogin_info", "gauge", "Always 1; the labels say what this process runs.");
const WRITES: Metric = ("ferrogin_metrics_writes_total", "counter", "How often this process has written its file.");
const POSTS: Metric =
    ("ferrogin_posts_total", "counter", "Work requests that kernels, or the RMA plugin, have posted.");
const COMPLETIONS: Metric =
    ("ferrogin_completions_total", "counter", "Work requests that the card has completed without error.");
const ERRORS: Metric = ("ferrogin_errors_total", "counter", "Work requests that the card has completed in error.");
const OUTSTANDING: Metric =
    ("ferrogin_outstanding", "gauge", "Work requests that were posted and that the card has not completed.");
const SIGNALS: Metric = (
    "ferrogin_signals_total",
    "counter",
    "Signals of peers that this context got; a kernel's reset of a signal does not change it.",
);
const REFUSED: Metric = (
    "ferrogin_signals_refused_total",
    "counter",
    "Emulated signals, or signals by the RMA plugin, that named no signal or no word; they changed no memory.",
);
const EXHAUSTED: Metric = (
    "ferrogin_signals_exhausted_total",
    "counter",
    "Rounds of the signal proxy that found all receives of the context taken, so that cards of peers retried.",
);
const RMA_BYTES: Metric = ("ferrogin_bytes_total", "counter", "Bytes of puts and gets that the RMA plugin has posted.");
const REQUESTS: Metric = (
    "ferrogin_card_requests_total",
    "counter",
    "Work requests that the card has completed, by its own statistics (rdma_write_wrs, rdma_read_wrs); on hardware those of all \
     programs since the driver was loaded.",
);
const REQUEST_ERRORS: Metric = (
    "ferrogin_card_request_errors_total",
    "counter",
    "Work requests that failed, by the card's own statistics (rdma_write_wr_err, rdma_read_wr_err); on hardware those of all programs \
     since the driver was loaded.",
);
const BYTES: Metric = (
    "ferrogin_card_bytes_total",
    "counter",
    "Payload bytes by the card's own statistics: of its writes and reads (rdma_write_bytes, rdma_read_bytes), of peers' writes into its \
     host (rdma_write_recv_bytes) and of peers' reads (rdma_read_resp_bytes); on hardware those of all programs since the driver was \
     loaded.",
);

/// A card's operations, in the order of [`super::card::NAMES`]: two for requests, two for errors, four for bytes.
const OPERATIONS: [&str; 4] = ["write", "read", "write_received", "read_served"];

/// `name="value",...`
pub(super) fn labels(all: &[(&str, &str)]) -> String {
    let escaped = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let pairs: Vec<_> = all.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    pairs.join(",")
}

/// Adds a metric with its samples; adds nothing if there are no samples.
fn put(text: &mut String, (name, kind, help): Metric, samples: &[(String, u64)]) {
    if samples.is_empty() {
        return;
    }
    // Writing to a string never fails.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (labels, value) in samples {
        let _ = writeln!(text, "{name}{{{labels}}} {value}");
    }
}

/// Returns one metric's samples for all queues.
fn of_queues(rows: &[(String, Numbers)], number: impl Fn(&Numbers) -> Option<u64>) -> Vec<(String, u64)> {
    rows.iter().filter_map(|(labels, numbers)| Some((labels.clone(), number(numbers)?))).collect()
}

/// Renders the file.
pub(super) fn render(about: &str, state: &State) -> String {
    let pid = std::process::id().to_string();
    let of_process =
        |more: &str| if more.is_empty() { labels(&[("pid", &pid)]) } else { format!("pid=\"{pid}\",{more}") };
    let mut text = String::new();
    put(&mut text, INFO, &[(of_process(about), 1)]);
    put(&mut text, WRITES, &[(of_process(""), state.writes)]);

    // A row for each queue of each open context, and one for each kind of queue of a rail's closed contexts.
    let (mut open, mut all, mut signals) = (Vec::new(), Vec::new(), Vec::new());
    let (mut refused, mut exhausted) = (Vec::new(), Vec::new());
    let place = |rank: usize, comm: &str, context: &str, rail: u32, card: &str| {
        let (rank, rail) = (rank.to_string(), rail.to_string());
        of_process(&labels(&[("rank", &rank), ("comm", comm), ("context", context), ("rail", &rail), ("card", card)]))
    };
    for source in state.contexts.values() {
        let (comm, context) = (source.comm.to_string(), source.context.to_string());
        let labels = place(source.rank, &comm, &context, source.rail, &source.card);
        let numbers = source.numbers();
        refused.extend(numbers.iter().filter_map(|(_, numbers)| Some((labels.clone(), numbers.refused?))));
        exhausted.extend(numbers.iter().filter_map(|(_, numbers)| Some((labels.clone(), numbers.exhausted?))));
        signals.extend(numbers.iter().filter_map(|(_, numbers)| Some((labels.clone(), numbers.signals?))));
        open.extend(
            numbers.into_iter().map(|(queue, numbers)| (format!("{labels},queue=\"{}\"", queue.name()), numbers)),
        );
    }
    all.extend(open.iter().cloned());
    for (key, numbers) in &state.closed {
        let labels = place(key.rank, "closed", "closed", key.rail, &key.card);
        refused.extend(numbers.refused.map(|number| (labels.clone(), number)));
        exhausted.extend(numbers.exhausted.map(|number| (labels.clone(), number)));
        signals.extend(numbers.signals.map(|number| (labels.clone(), number)));
        all.push((format!("{labels},queue=\"{}\"", key.queue.name()), *numbers));
    }
    put(&mut text, POSTS, &of_queues(&all, |numbers| numbers.posts));
    put(&mut text, COMPLETIONS, &of_queues(&all, |numbers| numbers.completions));
    put(&mut text, ERRORS, &of_queues(&all, |numbers| Some(numbers.errors)));
    put(&mut text, RMA_BYTES, &of_queues(&all, |numbers| numbers.bytes));
    put(&mut text, OUTSTANDING, &of_queues(&open, Numbers::outstanding));
    put(&mut text, SIGNALS, &signals);
    put(&mut text, REFUSED, &refused);
    put(&mut text, EXHAUSTED, &exhausted);

    let cards: Vec<(&String, Counters)> = state.cards.iter().map(|(card, totals)| (card, totals.get())).collect();
    let of_cards = |first: usize, count: usize| {
        let mut samples = Vec::new();
        for (card, counters) in &cards {
            for (operation, counter) in OPERATIONS.iter().zip(&counters[first..first + count]) {
                let labels = of_process(&labels(&[("card", card), ("operation", operation)]));
                samples.extend(counter.map(|counter| (labels, counter)));
            }
        }
        samples
    };
    put(&mut text, REQUESTS, &of_cards(0, 2));
    put(&mut text, REQUEST_ERRORS, &of_cards(2, 2));
    put(&mut text, BYTES, &of_cards(4, 4));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        assert_eq!(labels(&[("a", "x"), ("b", "\\ \" \n")]), "a=\"x\",b=\"\\\\ \\\" \\n\"");
    }

    #[test]
    fn file_without_contexts_has_no_metric_without_samples() {
        let text = render(&labels(&[("version", "0")]), &State::default());
        assert!(text.contains("ferrogin_info{pid=\"") && text.ends_with("} 0\n") && !text.contains("posts"), "{text}");
    }
}
