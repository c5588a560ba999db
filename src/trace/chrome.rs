//! The trace for a viewer (chrome://tracing, ui.perfetto.dev), with a span from each request to its completion.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::io::{self, Write};

use serde_json::{Value, json};
use soft_nic::trace::Kind;

use super::efa;
use super::event::{Event, Events, Outcome};

/// One queue pair's rows. Spans in a row do not overlap, because viewers nest overlapping ones.
#[derive(Debug, Default)]
struct Rows {
    busy: BinaryHeap<Reverse<(u64, usize)>>,
    free: BinaryHeap<Reverse<usize>>,
    /// The rows' thread numbers.
    threads: Vec<usize>,
}

impl Rows {
    /// Takes a row for a span.
    fn take(&mut self, begin: u64, end: u64) -> usize {
        while let Some(Reverse((_, row))) = self.busy.peek().copied().filter(|Reverse((end, _))| *end <= begin) {
            self.busy.pop();
            self.free.push(Reverse(row));
        }
        let row = self.free.pop().map_or(self.busy.len(), |Reverse(row)| row);
        self.busy.push(Reverse((end, row)));
        row
    }
}

/// Writes the trace of the chosen events, in Chrome's trace event format.
pub fn write(out: &mut impl Write, all: &Events, chosen: &[&Event]) -> io::Result<()> {
    let mut list = List { out, first: true };
    list.out.write_all(b"{\"displayTimeUnit\": \"ns\", \"traceEvents\": [")?;
    for (process, program) in &all.programs {
        let name = format!("{program} (process {process})");
        list.add(&json!({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}))?;
    }
    let start = all.start_ns();
    let last = all.events.last().map_or(0, |event| event.record.time_ns.get());
    let mut queue_pairs: BTreeMap<(u32, u32, u16), Rows> = BTreeMap::new();
    let mut threads = 0;
    for event in chosen {
        let record = &event.record;
        let (process, card, qpn) = (record.process.get(), record.card.get(), record.qpn.get());
        let begin = record.time_ns.get();
        let end = match event.outcome {
            Some(Outcome::Completed { time_ns, .. } | Outcome::Closed { time_ns }) => time_ns,
            Some(Outcome::Open) => last,
            None => begin,
        };
        // A completion is the end of its request's span.
        let is_span = event.kind == Kind::Request;
        if matches!(event.kind, Kind::Completion | Kind::Receive | Kind::Card) {
            continue;
        }
        let rows = queue_pairs.entry((process, card, qpn)).or_default();
        // A zero-length span would share its row with the next one.
        let row = if is_span { rows.take(begin, end.max(begin + 1)) } else { 0 };
        while rows.threads.len() <= row {
            threads += 1;
            rows.threads.push(threads);
            let suffix = if rows.threads.len() > 1 { format!(" ({})", rows.threads.len()) } else { String::new() };
            let name = format!("card {card} QP {qpn}{suffix}");
            list.add(
                &json!({"name": "thread_name", "ph": "M", "pid": process, "tid": threads, "args": {"name": name}}),
            )?;
        }
        let micros = |nanoseconds: u64| nanoseconds as f64 / 1000.0;
        let (ts, tid) = (micros(begin - start), rows.threads[row]);
        let args = arguments(all, event);
        list.add(&if is_span {
            json!({"name": title(event), "cat": "request", "ph": "X", "ts": ts, "dur": micros(end.saturating_sub(begin)),
                   "pid": process, "tid": tid, "args": args})
        } else {
            json!({"name": title(event), "cat": event.name(), "ph": "i", "s": "t", "ts": ts, "pid": process, "tid": tid, "args": args})
        })?;
    }
    list.out.write_all(b"\n]}\n")
}

/// A list of JSON values.
struct List<'a, W> {
    out: &'a mut W,
    first: bool,
}

impl<W: Write> List<'_, W> {
    fn add(&mut self, value: &Value) -> io::Result<()> {
        let before = if std::mem::take(&mut self.first) { "\n" } else { ",\n" };
        write!(self.out, "{before}{value}")
    }
}

fn title(event: &Event) -> String {
    let mut title = event.operation().unwrap_or_else(|| event.name().into());
    if event.kind == Kind::Counted {
        title = format!("peer's {title}");
    }
    if let Some(length) = event.length() {
        title += &format!(" {length}");
    }
    match event.final_status() {
        Some(0) => {}
        Some(status) => title += &format!(": {}", efa::status_name(status)),
        None if event.is_unfinished() => title += ": no completion",
        None => {}
    }
    title
}

fn arguments(all: &Events, event: &Event) -> Value {
    let mut args = json!({"details": event.details()});
    for (name, value) in [
        ("request id", event.request_id().map(|id| format!("{id:#x}").into())),
        ("slot", event.slot().map(Value::from)),
        ("bytes", event.length().map(Value::from)),
        ("peer", all.peer(event).map(Value::from)),
        ("status", event.final_status().map(|status| efa::status(status).into())),
    ] {
        if let Some(value) = value {
            args[name] = value;
        }
    }
    args
}
