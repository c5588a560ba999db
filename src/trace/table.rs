//! A trace as a table, and as lines of JSON.

use std::io::{self, Write};

use serde_json::{Value, json};
use soft_nic::trace::Kind;

use super::efa;
use super::event::{Event, Events, Outcome, micros};
use super::fields::Decoded;
use nccl_gin_ferrogin::log::counted;

/// Decodes an event's bytes.
fn decoded(event: &Event) -> Option<Decoded> {
    let bytes = Some(event.record.valid_bytes()).filter(|bytes| !bytes.is_empty())?;
    match event.kind {
        Kind::Request => matches!(bytes.len(), 64 | 128).then(|| efa::work_request(bytes)),
        Kind::Completion | Kind::Received => Some(efa::completion(bytes)),
        Kind::Receive => Some(efa::receive(bytes)),
        Kind::Card | Kind::Counted | Kind::Closed => None,
    }
}

/// Writes the table, cut off at `width` columns; with `fields`, each event is followed by its fields.
pub fn table(out: &mut impl Write, all: &Events, chosen: &[&Event], fields: bool, width: u16) -> io::Result<()> {
    let start = all.start_ns();
    let head = format!(
        "{:>14} {:>8} {:>4} {:>5} {:>5}  {:<10} {:<5} {:>18} {:>10}  {:<18} {:<28} details",
        "time us", "process", "card", "qp", "slot", "event", "op", "request id", "bytes", "peer", "status"
    );
    writeln!(out, "{:.*}", usize::from(width), head)?;
    let text = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    for event in chosen {
        let record = &event.record;
        let qpn = (event.kind != Kind::Card).then(|| record.qpn.to_string());
        let status = event.status().map(|status| format!("{status} {}", efa::status_name(status)));
        let line = format!(
            "{:>14} {:>8} {:>4} {:>5} {:>5}  {:<10} {:<5} {:>18} {:>10}  {:<18} {:<28} {}",
            micros(record.time_ns.get() - start),
            record.process.get(),
            record.card.get(),
            text(qpn),
            text(event.slot().map(|slot| slot.to_string())),
            event.name(),
            text(event.operation()),
            text(event.request_id().map(|id| format!("{id:#x}"))),
            text(event.length().map(|length| length.to_string())),
            text(all.peer(event)),
            text(status),
            event.details()
        );
        writeln!(out, "{:.*}", usize::from(width), line.trim_end())?;
        if let Some(decoded) = decoded(event).filter(|_| fields) {
            write!(out, "{}", decoded.lines("    "))?;
        }
    }
    let count = |wanted: &dyn Fn(&Event) -> bool| chosen.iter().filter(|event| wanted(event)).count();
    writeln!(
        out,
        "# {} of {} events: {} and {}, {} of them without a completion; {} in error",
        chosen.len(),
        all.events.len(),
        counted(count(&|event| event.kind == Kind::Request), "request"),
        counted(count(&|event| event.kind == Kind::Receive), "receive"),
        count(&|event| event.is_unfinished()),
        counted(count(&|event| event.status().is_some_and(|status| status != 0)), "completion"),
    )
}

/// Returns an event as an object, with only the members that apply.
pub fn object(all: &Events, event: &Event) -> Value {
    let record = &event.record;
    let mut object = json!({
        "time_us": (record.time_ns.get() - all.start_ns()) as f64 / 1000.0,
        "time_ns": record.time_ns.get(),
        "process": record.process.get(),
        "card": record.card.get(),
        "event": event.name(),
    });
    let outcome = match event.outcome {
        Some(Outcome::Completed { .. }) => Some("completed"),
        Some(Outcome::Closed { .. }) => Some("closed"),
        Some(Outcome::Open) => Some("open"),
        None => None,
    };
    let optional: [(&str, Option<Value>); 11] = [
        ("program", (event.kind == Kind::Card).then(|| event.details().into())),
        ("qp", (event.kind != Kind::Card).then(|| record.qpn.get().into())),
        ("slot", event.slot().map(Value::from)),
        ("op", event.operation().map(Value::from)),
        ("request_id", event.request_id().map(Value::from)),
        ("bytes", event.length().map(Value::from)),
        ("peer", all.peer(event).map(Value::from)),
        ("status", event.final_status().map(Value::from)),
        ("status_name", event.final_status().map(|status| efa::status_name(status).into())),
        ("outcome", outcome.map(Value::from)),
        ("latency_us", event.latency_ns().map(|time| (time as f64 / 1000.0).into())),
    ];
    for (name, value) in optional {
        if let Some(value) = value {
            object[name] = value;
        }
    }
    if let Some(decoded) = decoded(event) {
        object["decoded"] = decoded.json();
    }
    object
}

/// Writes a line of JSON for each event.
pub fn lines(out: &mut impl Write, all: &Events, chosen: &[&Event]) -> io::Result<()> {
    chosen.iter().try_for_each(|event| writeln!(out, "{}", object(all, event)))
}
