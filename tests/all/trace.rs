//! `ferrogin trace`: the table, its filters, the viewer's file and decoded entries.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use efa_dp_direct::cq::{SendCqe, Status};
use efa_dp_direct::wire::{CompStatus, RxDesc, SendOp};
use efa_dp_direct::wqe::{Destination, Geometry, Operation, RemoteMem, SendWqe, Sge, WriteData};
use ferrogin_test_support::workspace;
use serde_json::Value;
use soft_nic::trace::{Kind, RECORD_LEN, Record, flags};
use zerocopy::IntoBytes;

use crate::tool::command;

/// One test's file, removed on drop.
struct File(PathBuf);

impl File {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("ferrogin-trace-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).expect("a file");
        Self(path)
    }

    fn name(&self) -> &str {
        self.0.to_str().expect("a name of text")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn trace(args: &[&str], input: &str) -> (Output, String, String) {
    let mut tool = command();
    tool.arg("trace").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = tool.spawn().expect("the tool starts");
    let mut pipe = child.stdin.take().expect("a pipe");
    let input = input.to_owned();
    // The tool may write before it has read everything, or exit without reading.
    let writer = std::thread::spawn(move || {
        let _ = pipe.write_all(input.as_bytes());
    });
    let output = child.wait_with_output().expect("the tool ends");
    writer.join().expect("the input is written");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.code().is_some() && !stderr.contains("panicked"), "{args:?}: {stderr}");
    (output, stdout, stderr)
}

fn good(args: &[&str], input: &str) -> String {
    let (output, stdout, stderr) = trace(args, input);
    assert!(output.status.success(), "{args:?}: {stderr}");
    stdout
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn vectors(name: &str) -> Value {
    let path = workspace().join("tests/vectors").join(name);
    serde_json::from_slice(&std::fs::read(path).expect("the vectors")).expect("JSON")
}

fn list<'a>(value: &'a Value, name: &str) -> &'a Vec<Value> {
    value[name].as_array().unwrap_or_else(|| panic!("a list {name}"))
}

/// Reads a number, or a hex string that starts with 0x.
fn number(value: &Value) -> u64 {
    let text = || u64::from_str_radix(value.as_str()?.strip_prefix("0x")?, 16).ok();
    value.as_u64().or_else(text).unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Decodes all entries in one run.
fn decode(kind: &str, entries: &[&str]) -> Vec<Value> {
    let decoded = json_lines(&good(&["--hex", "--json", kind], &entries.join("\n\n")));
    assert_eq!(decoded.len(), entries.len());
    decoded
}

fn field<'a>(entry: &'a Value, name: &str) -> &'a Value {
    let found = list(entry, "fields").iter().find(|field| field["name"] == name);
    &found.unwrap_or_else(|| panic!("no {name} in {entry}"))["value"]
}

fn no_errors(entry: &Value, case: &Value) {
    assert_eq!(list(entry, "errors"), &Vec::<Value>::new(), "{case}");
}

#[test]
fn efa_work_requests_are_decoded_as_the_vectors_have_them() {
    let all = vectors("efa_dp.json");
    let cases: Vec<&Value> = list(&all, "wqe").iter().chain(list(&all, "send_2sge")).collect();
    let bytes: Vec<&str> = cases.iter().map(|case| case["expect"]["wqe"].as_str().expect("bytes")).collect();
    let mut checked = 0;
    for (case, entry) in cases.iter().zip(decode("efa-wqe", &bytes)) {
        let is =
            |name: &str, value: &Value| assert_eq!(field(&entry, name).as_u64(), Some(number(value)), "{name}: {case}");
        for (name, of, mask) in [("dest_qp_num", "qpn", 0xffff), ("ah", "ah", 0xffff), ("qkey", "qkey", u64::MAX)] {
            // One case of each form has no peer.
            if let Some(value) = case["remote"].get(of) {
                assert_eq!(field(&entry, name), number(value) & mask, "{name}: {case}");
            }
        }
        let op = case["op"].as_str().expect("an operation");
        let code = if op.starts_with("rdma_write") { 2 } else { u64::from(op.starts_with("rdma_read")) };
        assert_eq!(field(&entry, "ctrl1.op_type"), code, "{case}");
        let id = field(&entry, "req_id").as_u64().expect("a number");
        assert_eq!(id, number(&case["wr_id"]) & 0xffff, "{case}");
        if op.starts_with("rdma") {
            is("remote_mem.rkey", &case["rkey"]);
            is("remote_mem.buf_addr", &case["remote_addr"]);
        }
        if let Some(imm) = case.get("imm").filter(|imm| !imm.is_null()) {
            is("immediate_data", imm);
        }
        let buffer = |name: &str, sge: &Value| {
            is(&format!("{name}.buf_addr"), &sge["addr"]);
            is(&format!("{name}.length"), &sge["length"]);
            assert_eq!(field(&entry, &format!("{name}.lkey")), number(&sge["lkey"]) & 0xff_ffff, "{case}");
        };
        let place = if op.starts_with("rdma") { "local_mem[0]" } else { "sgl[0]" };
        let accepted = case["expect"]["ret"].as_i64().unwrap_or(0) == 0;
        match case["payload"]["type"].as_str() {
            Some("sge") if accepted => buffer(place, &case["payload"]),
            Some("inline") if accepted => assert_eq!(field(&entry, "inline data"), &case["payload"]["data"], "{case}"),
            None => list(case, "sges").iter().enumerate().for_each(|(n, sge)| buffer(&format!("sgl[{n}]"), sge)),
            _ => continue,
        }
        no_errors(&entry, case);
        checked += 1;
    }
    assert!(checked > 200, "{checked} with a payload");
}

#[test]
fn efa_completions_are_decoded_as_the_vectors_have_them() {
    let all = vectors("efa_dp.json");
    let cases = list(&all, "cqe");
    let bytes: Vec<&str> = cases.iter().map(|case| case["entry"].as_str().expect("bytes")).collect();
    for (case, entry) in cases.iter().zip(decode("efa-cqe", &bytes)) {
        let is = |name: &str, value: &Value| {
            let found = field(&entry, name);
            let found = found.as_u64().unwrap_or_else(|| found.as_bool().expect("a number").into());
            assert_eq!(found, number(value), "{name}: {case}");
        };
        for name in ["phase", "q_type", "has_imm", "op_type", "unsolicited"] {
            is(&format!("flags.{name}"), &case["fields"][name]);
        }
        is("status", &case["fields"]["status"]);
        let expected = &case["expect"]["v1"];
        is("qp_num", &expected["qp_num"]);
        if case["fields"]["q_type"] == 2 {
            is("src_qp_num", &expected["src_qp"]);
            is("ah", &expected["slid"]);
        }
        if expected["has_imm"] == true {
            is("imm", &expected["imm_data"]);
        }
    }
    for status in CompStatus::ALL {
        let cqe = SendCqe { qp_num: 3, wr_id: 7, op: Ok(SendOp::RdmaWrite), status: Status::Known(*status) };
        let text = good(&["--hex", "efa-cqe", &hex(&cqe.emit(true).0[..16])], "");
        assert!(text.contains(&format!("{status} (status {})", status.raw())), "{text}");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn mlx5_work_requests_are_decoded_as_the_vectors_have_them() {
    let all = vectors("mlx5_wqe.json");
    let mut posts = Vec::new();
    for case in list(&all, "cases") {
        posts.extend(list(case, "posts").iter().filter(|post| post["errno"].is_null()).map(|post| (case, post)));
    }
    let bytes: Vec<&str> = posts.iter().map(|(_, post)| post["wqe_hex"].as_str().expect("bytes")).collect();
    let guessed = json_lines(&good(&["--hex", "--json"], &bytes.join("\n\n")));
    for (n, ((case, post), entry)) in posts.iter().zip(decode("mlx5-wqe", &bytes)).enumerate() {
        no_errors(&entry, post);
        let kinds = |entry: &Value| entry["kind"] == "mlx5-wqe" || list(entry, "others").contains(&"mlx5-wqe".into());
        assert!(kinds(&guessed[n]), "{}", guessed[n]);
        let is =
            |name: &str, value: &Value| assert_eq!(field(&entry, name).as_u64(), Some(number(value)), "{name}: {post}");
        is("qpn", &case["qp"]["qpn"]);
        is("index", &post["wqebb_start"]);
        is("ds", &post["ds"]);
        is("fm_ce_se", &post["fm_ce_se"]);
        let op = post["opcode"].as_str().expect("an operation");
        if op.starts_with("RDMA") || op.starts_with("ATOMIC") {
            is("raddr.raddr", &post["remote_addr"]);
            is("raddr.rkey", &post["rkey"]);
        }
        match op {
            "ATOMIC_CMP_AND_SWP" => {
                is("atomic.compare", &post["compare"]);
                is("atomic.swap_add", &post["swap"]);
            }
            "ATOMIC_FETCH_AND_ADD" => is("atomic.swap_add", &post["add"]),
            "BIND_MW" | "LOCAL_INV" => assert!(field(&entry, "umr.flags").is_u64(), "{entry}"),
            _ => {}
        }
        let sges = post["sges"].as_array().map_or(&[][..], Vec::as_slice);
        let sges = sges.iter().filter(|sge| number(&sge["length"]) > 0);
        for (n, sge) in sges.enumerate() {
            is(&format!("data[{n}].addr"), &sge["addr"]);
            is(&format!("data[{n}].lkey"), &sge["lkey"]);
            // An atomic's result is always 8 bytes.
            let length = if op.starts_with("ATOMIC") { &8.into() } else { &sge["length"] };
            is(&format!("data[{n}].byte_count"), length);
        }
        if let Some(pieces) = post["inline_data"].as_array() {
            let data: String = pieces.iter().map(|piece| piece.as_str().expect("bytes")).collect();
            if !data.is_empty() {
                assert_eq!(field(&entry, "inline data"), &Value::from(data), "{post}");
            }
        }
    }
    assert!(posts.len() > 300, "{} work requests", posts.len());
}

#[test]
fn mlx5_completions_are_decoded_as_the_vectors_have_them() {
    let all = vectors("mlx5_cqe_zip.json");
    let steps = || list(&all, "cases").iter().flat_map(|case| list(case, "steps"));
    let polled: Vec<&Value> = steps().filter_map(|step| step["poll"].as_array()).flatten().collect();
    let polled: Vec<&Value> = polled.into_iter().filter(|cqe| !cqe.is_null()).collect();
    let bytes: Vec<&str> = polled.iter().map(|cqe| cqe["hex"].as_str().expect("bytes")).collect();
    let mut failures = 0;
    for (cqe, entry) in polled.iter().zip(decode("mlx5-cqe", &bytes)) {
        for name in ["opcode", "wqe_counter", "byte_cnt", "qpn", "s_wqe_opcode", "syndrome", "vendor_err"] {
            let Some(value) = cqe.get(name).filter(|value| !value.is_null()) else { continue };
            let of = match name {
                "opcode" => "op_own.opcode",
                "vendor_err" => "vendor_err_synd",
                name => name,
            };
            assert_eq!(field(&entry, of).as_u64(), Some(number(value)), "{name}: {cqe}");
        }
        failures += u32::from(cqe["kind"] == "error");
    }
    assert!(polled.len() > 1000 && failures > 10, "{} completions, {failures} failures", polled.len());
    let text = good(&["--hex", "mlx5-cqe", &format!("{}04{}d0", "00".repeat(55), "00".repeat(7))], "");
    assert!(text.contains("failed: local protection error"), "{text}");
    let written: Vec<&Value> = steps().filter_map(|step| step["write"].as_array()).flatten().collect();
    let blocks: Vec<&str> = written.iter().filter_map(|write| write["hex"].as_str()).collect();
    let op_own = |bytes: &str| u8::from_str_radix(&bytes[126..], 16).expect("a byte");
    let blocks: Vec<&str> = blocks.into_iter().filter(|bytes| op_own(bytes) & 0x0c == 0x0c).collect();
    for (bytes, entry) in blocks.iter().zip(decode("mlx5-cqe", &blocks)) {
        assert_eq!(field(&entry, "op_own.minis"), u64::from(op_own(bytes) >> 4) + 1);
    }
    assert!(blocks.len() > 50, "{} blocks", blocks.len());
}

/// The script: a write that completes, a read that fails, a write without a completion, a receive, and a queue pair
/// that is closed.
fn script() -> Vec<Record> {
    let dest = Destination { ah: 1, qpn: 9, qkey: 5 };
    let remote = RemoteMem { addr: 0x7000, rkey: 0xabc };
    let sge = Sge { addr: 0x1000, length: 64, lkey: 0x12 };
    let start = 1_700_000_000_000_000_000;
    let record = |kind, qpn: u16, micros: u64| {
        let mut record = Record::new(kind, qpn);
        (record.time_ns, record.process) = ((start + 1000 * micros).into(), 77.into());
        record
    };
    let request = |index: u32, op: Operation, micros| {
        let mut bytes = [0; 64];
        SendWqe::new(0x100 + u64::from(index), dest, op).emit(&Geometry::NARROW, &mut bytes).expect("it fits");
        let mut record = record(Kind::Request, 3, micros);
        (record.index, record.slot, record.request_id) =
            (index.into(), index.into(), (0x100 + u64::from(index)).into());
        (record.op, record.peer_qpn, record.ah, record.peer) = (op.op().raw(), 9.into(), 1.into(), 0xfeed.into());
        record.set_bytes(&bytes);
        record
    };
    let completion = |index: u32, op: SendOp, status: CompStatus, micros| {
        let mut record = record(Kind::Completion, 3, micros);
        (record.index, record.slot, record.request_id) =
            (index.into(), index.into(), (0x100 + u64::from(index)).into());
        (record.op, record.status, record.flags, record.length) = (op.raw(), status.raw(), flags::ENTRY, 64.into());
        let cqe = SendCqe { qp_num: 3, wr_id: 0x100 + u64::from(index), op: Ok(op), status: Status::Known(status) };
        record.set_bytes(&cqe.emit(true).0[..16]);
        record
    };
    let mut card = record(Kind::Card, 0, 0);
    card.peer = 0xbeef.into();
    card.set_bytes(b"program");
    let write = Operation::Write { remote, data: WriteData::One(sge), imm: None };
    let read = Operation::Read { remote, into: Some(sge) };
    let mut receive = record(Kind::Receive, 4, 50);
    (receive.request_id, receive.length) = (0x21.into(), 128.into());
    receive.set_bytes(RxDesc::single(0x21, 0x2000, 128, 0x13).to_words().map(u64::to_le).as_bytes());
    let mut received = record(Kind::Received, 4, 51);
    (received.request_id, received.length, received.op) = (0x21.into(), 5.into(), SendOp::Send.raw());
    (received.flags, received.peer) = (flags::COUNTED, 0xfeed.into());
    let mut other = record(Kind::Card, 0, 5);
    (other.process, other.peer) = (78.into(), 0xfeed.into());
    other.set_bytes(b"other");
    vec![
        card,
        other,
        request(0, write, 10),
        request(1, read, 12),
        completion(1, SendOp::RdmaRead, CompStatus::RemoteBadAddress, 20),
        completion(0, SendOp::RdmaWrite, CompStatus::Ok, 30),
        receive,
        received,
        request(2, write, 60),
        record(Kind::Closed, 3, 70),
        request(3, write, 80),
    ]
}

fn script_file(name: &str) -> File {
    File::new(name, script().as_bytes())
}

#[test]
fn table_has_every_event_with_its_fields() {
    let file = script_file("table");
    let text = good(&[file.name()], "");
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 11 + 2, "{text}");
    assert_eq!(rows[1][..6], ["0.000", "77", "0", "-", "-", "card"]);
    let line = |row: &str| {
        text.lines().find(|line| line.trim_start().starts_with(row)).unwrap_or_else(|| panic!("{row}: {text}"))
    };
    let request = line("10.000");
    for part in ["request    write", "0x100", "64", "78/0 QP 9", "lkey 0x12 at 0x1000+64 -> rkey 0xabc at 0x7000"] {
        assert!(request.contains(part), "{part}: {request}");
    }
    let failed = line("20.000");
    let words =
        "7 REMOTE_BAD_ADDRESS: the remote key is unknown, lacks the access needed, or does not cover the target";
    assert!(failed.contains(words) && failed.contains("after 8.000 us"), "{failed}");
    assert!(line("51.000").contains("counted, no entry"));
    assert!(line("60.000").contains("no completion: the queue pair was closed"));
    assert!(line("80.000").contains("no completion in the trace"));
    let summary = "# 11 of 11 events: 4 requests and 1 receive, 2 of them without a completion; 1 completion in error";
    assert_eq!(text.lines().last(), Some(summary));
    let fields = good(&[file.name(), "--fields", "--op", "recv"], "");
    assert!(fields.contains("req_id") && fields.contains("0x2000"), "{fields}");
}

#[test]
fn filters_choose_events() {
    let file = script_file("filters");
    for (filter, times) in [
        ("--qp 4", &[50, 51][..]),
        ("--process 78", &[5]),
        ("--card 1", &[]),
        ("--op read", &[12, 20]),
        ("--op recv", &[50, 51]),
        ("--errors", &[12, 20]),
        ("--status 7", &[12, 20]),
        ("--status 0", &[10, 30, 50, 51]),
        ("--unfinished", &[60, 80]),
        ("--id 0x100", &[10, 30]),
        ("--id 33", &[50, 51]),
        ("--from 50.5 --to 70", &[51, 60, 70]),
        ("--qp 3 --op write --status 0 --to 10", &[10]),
    ] {
        let args: Vec<&str> = [file.name(), "--json"].into_iter().chain(filter.split(' ')).collect();
        let found = json_lines(&good(&args, ""));
        let found: Vec<f64> = found.iter().map(|event| event["time_us"].as_f64().expect("a time")).collect();
        assert_eq!(found, times.iter().copied().map(f64::from).collect::<Vec<_>>(), "{filter}");
    }
    let events = json_lines(&good(&[file.name(), "--json"], ""));
    let failed = &events[4];
    assert_eq!((&failed["event"], &failed["status_name"]), (&"completion".into(), &"REMOTE_BAD_ADDRESS".into()));
    assert_eq!((&failed["latency_us"], &failed["slot"]), (&8.0.into(), &1.into()));
    assert_eq!(field(&failed["decoded"], "status"), 7);
}

#[test]
fn viewer_gets_a_span_for_each_request() {
    let file = script_file("viewer");
    let text = good(&[file.name(), "--chrome", "-"], "");
    let value: Value = serde_json::from_str(&text).expect("JSON");
    let events = list(&value, "traceEvents");
    let spans: Vec<&Value> = events.iter().filter(|event| event["ph"] == "X").collect();
    let short = |span: &&Value| (span["name"].as_str().map(str::to_owned), span["ts"].as_f64(), span["dur"].as_f64());
    let found: Vec<_> = spans.iter().map(short).collect();
    let expected = [
        ("write 64", 10.0, 20.0),
        ("read 64: REMOTE_BAD_ADDRESS", 12.0, 8.0),
        ("write 64: no completion", 60.0, 10.0),
        ("write 64: no completion", 80.0, 0.0),
    ];
    assert_eq!(found, expected.map(|(name, ts, dur)| (Some(name.to_owned()), Some(ts), Some(dur))));
    assert_ne!(spans[0]["tid"], spans[1]["tid"], "spans that overlap are in two rows");
    assert_eq!(spans[0]["tid"], spans[2]["tid"]);
    assert_eq!(spans[0]["args"]["peer"], "78/0 QP 9");
    let names: Vec<&str> = events.iter().filter_map(|event| event["args"]["name"].as_str()).collect();
    for name in ["program (process 77)", "card 0 QP 3", "card 0 QP 3 (2)", "card 0 QP 4"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    let out = File::new("viewer.json", b"");
    assert_eq!(good(&[file.name(), "--chrome", out.name()], ""), "");
    assert_eq!(std::fs::read_to_string(&out.0).expect("the file"), text);
}

#[test]
fn files_of_two_processes_are_one_trace() {
    let (first, mut second) = (script(), script());
    for record in &mut second {
        record.process = 99.into();
        record.time_ns = (record.time_ns.get() + 500).into();
    }
    let (first, second) = (File::new("first", first.as_bytes()), File::new("second", second.as_bytes()));
    let events = json_lines(&good(&[first.name(), second.name(), "--json"], ""));
    assert_eq!(events.len(), 22);
    assert!(events.is_sorted_by_key(|event| event["time_ns"].as_u64()));
}

#[test]
fn bad_input_is_refused_with_the_reason() {
    let whole = script();
    let whole = whole.as_bytes();
    let files = [
        ("empty", &b""[..], "is empty: no card was opened with SOFTEFA_TRACE="),
        ("foreign", b"\x7fELF and more", "is not a trace of a software card"),
        ("short", b"sf", "is not a trace of a software card"),
        ("version", b"sft\x09 and more", "is a trace of version 9, but this release has version 1"),
        ("head", &whole[..100], "is damaged: 100 of its 100 bytes"),
        ("cut", &whole[..5 * RECORD_LEN + 7], "is damaged: 7 of its 987 bytes, the first at offset 980"),
    ];
    for (name, bytes, why) in files {
        let file = File::new(name, bytes);
        let (output, stdout, stderr) = trace(&[file.name()], "");
        assert_eq!(output.status.code(), Some(1), "{name}: {stderr}");
        assert!(stderr.contains(file.name()) && stderr.contains(why), "{name}: {stderr}");
        assert_eq!(stdout.lines().count(), if name == "cut" { 5 + 2 } else { 0 }, "{name}: what is whole is shown");
    }
    let file = script_file("args");
    let directory = std::env::temp_dir();
    for (args, code, why) in [
        (&["/nonexistent/trace"][..], 1, "cannot read /nonexistent/trace: No such file"),
        (&[directory.to_str().expect("text")], 1, "cannot read"),
        (&[file.name(), "--chrome", "/nonexistent/out.json"], 1, "cannot write to /nonexistent/out.json"),
        (&[file.name(), "--chrome", "/dev/full"], 1, "cannot write to /dev/full: No space left"),
        (&[], 2, "FILE"),
        (&[file.name(), "--op", "fly"], 2, "recv"),
        (&[file.name(), "--qp", "70000"], 2, "--qp"),
        (&[file.name(), "--from", "-1"], 2, "a number of microseconds of at least 0"),
        (&[file.name(), "--to", "soon"], 2, "microseconds"),
        (&[file.name(), "--id", "0xg"], 2, "0x and a hexadecimal one"),
        (&[file.name(), "--errors", "--unfinished"], 2, "cannot be used with"),
        (&["--hex", "--qp", "3", "00"], 2, "cannot be used with"),
        (&["--hex"], 1, "there are no bytes"),
        (&["--hex", "xyz"], 1, "'x' is not a hexadecimal digit"),
        (&["--hex", "123"], 1, "3 hexadecimal digits are not whole bytes"),
        (&["--hex", "efa-cq", "00"], 1, "the kinds are efa-wqe, efa-cqe, mlx5-wqe, mlx5-cqe, efa-receive"),
        (&["--hex", "0011"], 1, "2 bytes is not a valid queue-entry size: efa-wqe has 64 or 128 bytes"),
        (&["--hex", "mlx5-cqe", "0011"], 1, "2 bytes are not a valid mlx5-cqe: it has 64 bytes"),
        (&["--hex", &"00".repeat(64)], 1, "never written: name the kind (efa-wqe, mlx5-wqe, mlx5-cqe)"),
        (&["--hex", &"ff".repeat(128)], 1, "not a valid entry: name the kind to see the fields (efa-wqe, mlx5-wqe)"),
    ] {
        let (output, _, stderr) = trace(args, "");
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(why), "{args:?}: {stderr}");
    }
}

#[test]
fn refused_work_request_is_explained() {
    let broken = "1120".repeat(32);
    let text = good(&["--hex", "efa-wqe", &broken], "");
    assert!(text.contains("error: the meta descriptor bit is clear"), "{text}");
    assert!(text.contains("status 2 LOCAL_QP_INTERNAL_ERROR"), "{text}");
    let text = good(&["--hex", "mlx5-wqe", &"ff".repeat(64)], "");
    assert!(text.contains("error: "), "{text}");
}
