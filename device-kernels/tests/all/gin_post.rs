//! Compares what NCCL's own device code posted for a sequence of calls (`gin_post` in `efa_dp.json`) with what this
//! crate posts for the same calls: every request's bytes and slot, and the cursors that both share.
//!
//! The comparison leaves out what ferrogin is free to choose: the request id (the peer's rank here, so that errors name
//! it), the table a target comes from (one per context here, one per endpoint there), and when an aggregated post is
//! rung. `FERROGIN_VECTORS` replaces the directory.
#![allow(unsafe_code)]

use efa_dp_direct::wqe::Destination;
use ferrogin_device::{Action, Flags, Sharing, Window};
use ferrogin_ffi::ext::{POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_test_support::vectors;
use plain_context::{EndpointSpec, Spec, TestContext, VALUE, WindowSpec, leak, make_context, window};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Bytes of a request: its id, the upper part of its id, and its target's three numbers.
const ID: std::ops::Range<usize> = 0..2;
const ID_TOP: std::ops::Range<usize> = 26..32;
const QPN: std::ops::Range<usize> = 4..6;
const AH: std::ops::Range<usize> = 12..14;
const QKEY: std::ops::Range<usize> = 16..20;
/// The address of the bytes to send.
const LOCAL_ADDR: std::ops::Range<usize> = 56..64;

/// Most value slots that a case may have.
const POOL: usize = 256;

fn number(value: &Value) -> u64 {
    match value {
        Value::String(text) => u64::from_str_radix(text.strip_prefix("0x").expect("0x"), 16).expect("hex"),
        other => other.as_u64().unwrap_or_else(|| panic!("{other} is not a number")),
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is not a list"))
}

fn bytes(value: &Value) -> Vec<u8> {
    let text = value.as_str().expect("hex bytes");
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex bytes")).collect()
}

fn only_fields(value: &Value, known: &[&str]) {
    for key in value.as_object().expect("an object").keys() {
        assert!(key == "note" || known.contains(&key.as_str()), "field {key:?} is not known to this test");
    }
}

fn destinations(endpoint: &Value) -> Vec<Destination> {
    let of = |name: &str| list(&endpoint["targets"][name]);
    let (ah, qpn, qkey) = (of("ah"), of("qpn"), of("qkey"));
    assert!(ah.len() == qpn.len() && ah.len() == qkey.len(), "targets of different lengths");
    (0..ah.len())
        .map(|i| Destination { ah: number(&ah[i]) as u16, qpn: number(&qpn[i]) as u16, qkey: number(&qkey[i]) as u32 })
        .collect()
}

fn window_spec(value: &Value) -> WindowSpec {
    let peers = list(&value["peers"]).iter().map(|peer| (number(&peer["addr"]), number(&peer["rkey"]) as u32));
    WindowSpec { lkey: number(&value["lkey"]) as u32, addr: number(&value["local_addr"]), peers: peers.collect() }
}

/// A case from the vectors, and a context for it.
struct Replay<'v> {
    case: &'v Value,
    test: TestContext,
    windows: Vec<Window>,
    names: Vec<&'v str>,
    targets: Vec<Vec<Destination>>,
    /// This context's value slots; NCCL's begin at `pool_addr`.
    pool: *const u64,
    mode: Sharing,
}

impl<'v> Replay<'v> {
    fn new(case: &'v Value, policy: u32, mode: Sharing) -> Self {
        only_fields(
            case,
            &[
                "id",
                "kind",
                "release",
                "nranks",
                "rank",
                "num_rails",
                "rail",
                "mode",
                "endpoints",
                "scratch",
                "putvalue",
                "windows",
                "signal_counters",
                "nic",
                "calls",
            ],
        );
        let has_slots = match case["putvalue"]["slot_size"].as_u64() {
            Some(0) => false,
            Some(8) => true,
            other => panic!("value slots of {other:?} bytes"),
        };
        let rail = number(&case["rail"]) as u32;
        let entries: Vec<&Value> = list(&case["endpoints"]).iter().collect();
        let pool: *const u64 = leak([0u64; POOL]).cast();
        assert!(entries[VALUE]["entries"].as_u64() <= Some(POOL as u64), "more slots than this test has");
        let endpoints = entries.iter().enumerate().map(|(i, endpoint)| EndpointSpec {
            entries: number(&endpoint["entries"]) as u32,
            wide: endpoint["wqe_size"] == 128,
            max_batch: number(&endpoint["max_batch"]) as u32,
            value_base: if has_slots && i == VALUE { pool as u64 } else { 0 },
            start: number(&endpoint["start"]["pc"]) as u32,
        });
        let scratch = &case["scratch"];
        let addrs = list(&scratch["remote_addrs"]).iter().map(number);
        let rkeys = list(&scratch["remote_rkeys"]).iter().map(|key| number(key) as u32);
        let targets: Vec<_> = entries.iter().map(|endpoint| destinations(endpoint)).collect();
        let test = make_context(&Spec {
            policy,
            nranks: number(&case["nranks"]) as u32,
            rail,
            n_counters: entries.len() as u32 - 2,
            endpoints: endpoints.collect(),
            // Only peers have the signals, so here a signal has no endpoint of its own, as in the vectors.
            n_signals: 0,
            targets: targets[0].clone(),
            value_lkey: number(&case["putvalue"]["lkey"]) as u32,
            scratch: WindowSpec {
                lkey: number(&scratch["lkey"]) as u32,
                addr: number(&scratch["local_addr"]),
                peers: addrs.zip(rkeys).collect(),
            },
        });
        let windows = list(&case["windows"]).iter();
        let windows = windows.map(|rails| window(&window_spec(&rails[rail as usize]), rail)).collect();
        let names = entries.iter().map(|endpoint| endpoint["name"].as_str().expect("a name")).collect();
        Replay { case, test, windows, names, targets, pool, mode }
    }

    fn run(&self) {
        let stop = AtomicBool::new(false);
        let cards: Vec<_> = self.test.rings.iter().map(|ring| (ring.doorbell, ring.completed)).collect();
        thread::scope(|scope| {
            // Rung requests complete at once.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for (doorbell, completed) in &cards {
                        let rung = doorbell.load(Ordering::Acquire);
                        completed.store(u64::from(rung & 0x7fff_ffff), Ordering::Release);
                    }
                    thread::yield_now();
                }
            });
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for (i, call) in list(&self.case["calls"]).iter().enumerate() {
                    println!("call {i}: {call}");
                    self.call(call);
                }
            }));
            stop.store(true, Ordering::Relaxed);
            assert!(outcome.is_ok(), "case {} ({})", self.case["id"], self.case["kind"]);
        });
    }

    fn call(&self, call: &Value) {
        let before: Vec<u32> = self.test.rings.iter().map(|ring| ring.cursors()[0]).collect();
        let mut aggregate = false;
        match call["call"].as_str().expect("a name") {
            "flush" => self.test.context.flush().expect("it ends"),
            // NCCL 2.31 posts nothing for it.
            "get" if self.case["release"] == "2.31.2" => return,
            // These calls have their own test.
            "read_signal" | "reset_signal" | "read_counter" | "reset_counter" => return,
            name => {
                for lane in list(&call["lanes"]) {
                    self.lane(name, &call["size"], lane);
                    aggregate = lane["aggregate"] == true;
                }
            }
        }
        self.compare(call, &before, aggregate);
    }

    fn lane(&self, call: &str, size: &Value, lane: &Value) {
        let context = self.test.context;
        let mut action = Action::NONE;
        if let Some(id) = lane["counter"].as_u64() {
            action = action.with_counter(id as u16);
        }
        if let Some(id) = lane["signal"]["id"].as_u64() {
            let by = if lane["signal"]["op"] == "inc" { 1 } else { number(&lane["signal"]["arg"]) as u32 };
            action = action.with_signal(id as u16, by);
        }
        let flags = if lane["aggregate"] == true { Flags::AGGREGATE } else { Flags::NONE }.shared(self.mode);
        let peer = number(&lane["peer"]) as u32;
        let offset = |name: &str| number(&lane[name]);
        let span = |window: &str, at: &str| self.windows[number(&lane[window]) as usize].at(offset(at));
        let posted = match call {
            "put" if lane["has_windows"] == false => context.signal(peer, action, flags),
            "put" => {
                let (dst, src) = (span("dst_window", "dst_off"), span("src_window", "src_off"));
                context.put(peer, dst, src, offset("bytes"), action, flags)
            }
            "get" => {
                let (remote, local) = (span("remote_window", "remote_off"), span("local_window", "local_off"));
                context.get(peer, remote, local, offset("bytes"), flags)
            }
            "put_value" => {
                let (value, bytes) = (offset("value"), number(size) as u32);
                context.put_value(peer, span("dst_window", "dst_off"), value, bytes, action, flags)
            }
            other => panic!("{other:?} is not known to this test"),
        };
        assert_eq!(posted, Ok(()), "{lane}");
    }

    fn compare(&self, call: &Value, before: &[u32], aggregate: bool) {
        let expect = &call["expect"];
        only_fields(expect, &["events", "state", "staged"]);
        for (i, ring) in self.test.rings.iter().enumerate() {
            let name = self.names[i];
            let events = list(&expect["events"]).iter().filter(|event| event["ep"] == name && !event["wqe"].is_null());
            let want: Vec<_> =
                events.map(|event| (number(&event["slot"]) as usize, self.expected_request(i, event))).collect();
            let [reserved, released, rung] = ring.cursors();
            let posts = reserved.wrapping_sub(before[i]);
            let slots = (0..posts).map(|k| before[i].wrapping_add(k) as usize % ring.spec_entries);
            let got: Vec<_> = slots.map(|slot| (slot, without_id(ring.slot(slot)))).collect();
            assert_eq!(got, want, "requests on {name}");
            let doorbell = ring.doorbell.load(Ordering::Relaxed);
            if aggregate {
                let max_batch = number(&self.case["endpoints"][i]["max_batch"]) as u32;
                assert!(reserved.wrapping_sub(doorbell) <= max_batch, "{name}: {doorbell} of {reserved} is rung");
                continue;
            }
            let state = &expect["state"][name];
            if !state.is_null() {
                let cursors = ["pc", "released", "rung"].map(|field| number(&state[field]) as u32);
                assert_eq!(([reserved, released, rung], doorbell), (cursors, cursors[2]), "cursors of {name}");
            }
        }
        for staged in expect["staged"].as_array().into_iter().flatten() {
            let at = number(&staged["addr"]) - number(&self.case["putvalue"]["pool_addr"]);
            // SAFETY: the slots are leaked, and no thread posts now.
            let slot = unsafe { self.pool.wrapping_byte_add(at as usize).read_volatile() }.to_le_bytes();
            let want = bytes(&staged["bytes"]);
            assert_eq!(slot[..want.len()], want, "value slot at {at}");
        }
    }

    /// Returns NCCL's request with the target from this context's table and the address of its value slots.
    fn expected_request(&self, endpoint: usize, event: &Value) -> Vec<u8> {
        let mut wqe = without_id(bytes(&event["wqe"]));
        let qpn = u16::from_le_bytes(wqe[QPN].try_into().unwrap());
        let table = &self.targets[endpoint];
        let at = table.iter().position(|target| target.qpn == qpn).expect("a target out of the table");
        let (nccl, ours) = (table[at], self.targets[0][at]);
        assert_eq!((&wqe[AH], &wqe[QKEY]), (&nccl.ah.to_le_bytes()[..], &nccl.qkey.to_le_bytes()[..]), "{event}");
        wqe[QPN].copy_from_slice(&ours.qpn.to_le_bytes());
        wqe[AH].copy_from_slice(&ours.ah.to_le_bytes());
        wqe[QKEY].copy_from_slice(&ours.qkey.to_le_bytes());
        // 0 if values travel inline.
        let pool = match number(&self.case["putvalue"]["pool_addr"]) {
            0 => return wqe,
            pool => pool,
        };
        let local = u64::from_le_bytes(wqe[LOCAL_ADDR].try_into().unwrap());
        if let Some(offset) = local.checked_sub(pool).filter(|&offset| offset < 8 * POOL as u64) {
            wqe[LOCAL_ADDR].copy_from_slice(&(offset + self.pool as u64).to_le_bytes());
        }
        wqe
    }
}

fn without_id(mut wqe: Vec<u8>) -> Vec<u8> {
    wqe[ID].fill(0);
    wqe[ID_TOP].fill(0);
    wqe
}

fn cases() -> Value {
    let mut all = vectors::file("efa_dp.json");
    assert_eq!(all["schema"], "efa_dp/1", "unknown schema");
    let cases = all["gin_post"].take();
    assert!(!list(&cases).is_empty(), "no cases");
    cases
}

#[test]
fn requests_equal_those_of_nccl_device_code() {
    let cases = cases();
    let mut kinds = BTreeSet::new();
    for case in list(&cases) {
        kinds.insert(case["kind"].to_string());
        for policy in [POLICY_COMBINING, POLICY_LOCKED] {
            for mode in [Sharing::Gpu, Sharing::Cta, Sharing::Thread] {
                println!("{} ({}), policy {policy}, {mode:?}", case["id"], case["kind"]);
                Replay::new(case, policy, mode).run();
            }
        }
    }
    println!("gin_post: {} cases of {} kinds", list(&cases).len(), kinds.len());
}

/// `offset` is what the caller subtracts from the count, modulo 2^31.
#[test]
fn signal_and_counter_offsets_agree_with_nccl() {
    for case in list(&cases()) {
        let endpoint = || EndpointSpec { entries: 16, wide: false, max_batch: 4, value_base: 0, start: 0 };
        let scratch = WindowSpec { lkey: 0, addr: 0, peers: vec![(0, 0)] };
        let test = make_context(&Spec {
            policy: POLICY_COMBINING,
            nranks: 1,
            rail: 0,
            endpoints: (0..6).map(|_| endpoint()).collect(),
            n_counters: 2,
            n_signals: 2,
            targets: vec![Destination { ah: 1, qpn: 1, qkey: 1 }; 3],
            value_lkey: 0,
            scratch,
        });
        for call in list(&case["calls"]) {
            for (i, counter) in test.counters.iter().enumerate() {
                if let Some(count) = call["expect"]["state"][format!("counter{i}")]["counter"].as_u64() {
                    counter.store(count, Ordering::Relaxed);
                }
            }
            let name = call["call"].as_str().expect("a name");
            let Some((verb, what)) = name.split_once('_').filter(|(verb, _)| ["read", "reset"].contains(verb)) else {
                continue;
            };
            let (id, context) = (number(&call["id"]) as u32, test.context);
            let counts = if what == "signal" { &test.signals } else { &test.counters };
            if let Some(count) = call["counter"].as_u64() {
                counts[id as usize].store(count, Ordering::Relaxed);
            }
            match (verb, what) {
                ("reset", "signal") => context.reset_signal(id).unwrap(),
                ("reset", _) => context.reset_counter(id).unwrap(),
                _ => {
                    let read = if what == "signal" { context.read_signal(id) } else { context.read_counter(id) };
                    let count = counts[id as usize].load(Ordering::Relaxed);
                    let want = count.wrapping_sub(number(&call["expect"]["offset"])) & 0x7fff_ffff;
                    assert_eq!(read, Ok(want), "{}: {call}", case["id"]);
                }
            }
        }
    }
}
