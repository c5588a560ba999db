//! Checks the traces of scripted runs (SOFTEFA_TRACE).

use std::path::{Path, PathBuf};

use soft_nic::trace::{Kind, RECORD_LEN, Record, flags};

use crate::verbs_program::program;
use crate::{Running, on_card, run};

/// One test's trace file, removed at the end.
struct Trace(PathBuf);

impl Trace {
    fn new(test: &str) -> Self {
        Self(std::env::temp_dir().join(format!("soft-verbs-{test}-{}", std::process::id())))
    }

    fn records(&self) -> Vec<Record> {
        let bytes = std::fs::read(&self.0).unwrap();
        bytes.chunks(RECORD_LEN).map(|chunk| Record::parse(chunk).unwrap()).collect()
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn traced(program: &Path, part: &str, trace: &Trace) -> Vec<Record> {
    let mut command = on_card(program);
    command.arg(part).env("SOFTEFA_FAULTS", "seed=2").env("SOFTEFA_TRACE", &trace.0);
    let text = run(command);
    assert!(text.contains(&format!("{part}: good")), "{text}");
    trace.records()
}

fn kind(record: &Record) -> Kind {
    Kind::from_raw(record.kind).unwrap()
}

#[test]
fn trace_of_datagrams_has_their_requests_and_completions() {
    let test = "trace_of_datagrams_has_their_requests_and_completions";
    let Some(program) = program(test) else { return };
    let trace = Trace::new(test);
    let records = traced(&program, "ud", &trace);
    let found: Vec<_> = records
        .iter()
        .map(|record| (kind(record), record.index.get(), record.length.get(), record.status, record.flags))
        .collect();
    // The first datagram finds no receive.
    let expected = [
        (Kind::Card, 0, 0, 0, 0),
        (Kind::Request, 0, 0, 0, 0),
        (Kind::Completion, 0, 100, 0, flags::ENTRY),
        (Kind::Request, 1, 0, 0, 0),
        (Kind::Receive, 0, 140, 0, 0),
        (Kind::Received, 0, 140, 0, flags::ENTRY),
        (Kind::Completion, 1, 100, 0, flags::ENTRY),
        (Kind::Closed, 0, 0, 0, 0),
        (Kind::Closed, 0, 0, 0, 0),
    ];
    assert_eq!(found, expected);
    assert_eq!(records[0].valid_bytes(), program.file_name().unwrap().as_encoded_bytes());
    let (sender, receiver) = (records[1].qpn.get(), records[4].qpn.get());
    assert_eq!((records[1].peer_qpn.get(), records[5].peer_qpn.get()), (receiver, sender));
}

#[test]
fn trace_of_srd_pairs_every_request() {
    let test = "trace_of_srd_pairs_every_request";
    let Some(program) = program(test) else { return };
    let trace = Trace::new(test);
    let records = traced(&program, "srd", &trace);
    let of = |wanted: Kind| records.iter().filter(|record| kind(record) == wanted).collect::<Vec<_>>();
    let (requests, completions) = (of(Kind::Request), of(Kind::Completion));
    // A hundred two-buffer sends, a write with immediate data, a read, and an inline send.
    assert_eq!((requests.len(), of(Kind::Receive).len()), (103, 101));
    assert_eq!(of(Kind::Received).len(), 102);
    let indices = |records: &[&Record]| records.iter().map(|record| record.index.get()).collect::<Vec<_>>();
    assert_eq!(indices(&requests), (0..103).collect::<Vec<_>>());
    assert_eq!(indices(&completions), indices(&requests), "without faults they complete in order");
    assert!(completions.iter().all(|record| record.status == 0));
}

#[test]
fn non_trace_file_fails_device_open() {
    let test = "non_trace_file_fails_device_open";
    let Some(program) = program(test) else { return };
    let trace = Trace::new(test);
    std::fs::write(&trace.0, "a letter").unwrap();
    let mut command = on_card(program);
    command.arg("ud").env("SOFTEFA_TRACE", &trace.0);
    let output = Running::start(command).output();
    let lines = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && lines.contains("is not a trace of a software card, and was not overwritten"),
        "{lines}"
    );
    assert_eq!(std::fs::read(&trace.0).unwrap(), b"a letter");
}
