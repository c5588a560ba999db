//! Strong signals from a warp's lanes: the shipped module on the interpreter, and a card that completes requests in any
//! order.

use crate::shipped;
use efa_dp_direct::wqe::{Destination, Geometry, Operation, parse};
use ferrogin_ffi::block::EmulatedSpec;
use ferrogin_ffi::ext::{EmulatedPeer, POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_test_support::Random;
use ferrogin_test_support::wait::HANG_LIMIT;
use plain_context::{EndpointSpec, Extras, NO_EXTRAS, Ring, Spec, TestContext, WindowSpec, leak, make_with, window};
use soft_gpu_ptx::{Launch, Loaded, Module, Process, Program, run};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const LANES: u64 = 32;
const ENTRIES: u32 = 16;
const PEER: u64 = 1;
const REMOTE: u64 = 0x2000_0000;
/// Bytes between two lanes' puts.
const STRIDE: u64 = 64;
const STRONG: u64 = 0x400;
/// Signal 0, raised by one.
const SIGNAL: u64 = 1 << 32 | 1;

/// Returns a call of `function` whose arguments are registers or numbers; `%r` collects the statuses.
fn call(function: &str, arguments: &[(u32, &str)]) -> String {
    let mut text = String::from("{\n.param .b32 e;\n");
    for (at, (bits, value)) in arguments.iter().enumerate() {
        text += &format!(".param .b{bits} a{at}; st.param.b{bits} [a{at}], {value};\n");
    }
    let names: Vec<_> = (0..arguments.len()).map(|at| format!("a{at}")).collect();
    text + &format!("call (e), {function}, ({});\nld.param.b32 %e, [e]; or.b32 %r, %r, %e;\n}}\n", names.join(", "))
}

/// Returns a kernel whose lanes post, meet, and raise strong signals. Each lane stores the combined status of its
/// calls.
fn kernel(name: &str, posts: &str, signals: &str) -> String {
    format!(
        ".visible .entry {name}(.param .u64 words)\n{{\n.reg .b64 %w, %ctx, %win, %off, %at; .reg .b32 %lane, %odd, %e, %r;\n\
         .reg .pred %p, %q;\nld.param.u64 %w, [words]; ld.global.u64 %ctx, [%w]; ld.global.u64 %win, [%w+8];\nmov.u32 %r, 0;\n\
         mov.u32 %lane, %tid.x; mul.wide.u32 %off, %lane, {STRIDE}; mul.wide.u32 %at, %lane, 8; add.u64 %at, %at, 4096;\n\
         and.b32 %odd, %lane, 1; setp.ne.u32 %p, %odd, 0; setp.ne.u32 %q, %lane, 5;\n{posts}bar.warp.sync 0xffffffff;\n{signals}END:\n\
         mul.wide.u32 %off, %lane, 8; add.u64 %w, %w, %off; cvt.u64.u32 %off, %r; st.global.u64 [%w+16], %off;\nret;\n}}\n"
    )
}

/// Returns the kernels' names, and the module that contains them.
fn kernels() -> (Vec<&'static str>, String) {
    let signatures = [
        ("fgin_put", &[64, 32, 64, 64, 64, 64, 64, 64, 32][..]),
        ("fgin_put_value", &[64, 32, 64, 64, 64, 32, 64, 32]),
        ("fgin_signal", &[64, 32, 64, 32]),
        ("fgin_signal_at", &[64, 32, 64, 64, 64, 32]),
        ("fgin_warp_put", &[64, 32, 32, 64, 64, 64, 64, 64, 64, 32]),
        ("fgin_warp_signal", &[64, 32, 32, 64, 32]),
    ];
    let mut text = String::from(".version 8.2\n.target sm_70\n.address_size 64\n");
    for (name, widths) in signatures {
        let parameters: Vec<_> = widths.iter().enumerate().map(|(at, bits)| format!(".param .b{bits} a{at}")).collect();
        text += &format!(".extern .func (.param .b32 e) {name}({});\n", parameters.join(", "));
    }
    let (peer, strong, signal) = (PEER.to_string(), STRONG.to_string(), SIGNAL.to_string());
    let put = [(64, "%ctx"), (32, &peer), (64, "%win"), (64, "%off")];
    let of_put = [(64, "%win"), (64, "0"), (64, "8"), (64, "0"), (32, "0")];
    let puts = call("fgin_put", &[&put[..], &of_put].concat());
    let values = call("fgin_put_value", &[&put[..], &[(64, "7"), (32, "8"), (64, "0"), (32, "0")]].concat());
    let by_lanes = [&[put[0], (32, "0xffffffff")], &put[1..], &of_put].concat();
    let together = call("fgin_warp_put", &by_lanes);
    let divergent = format!("@%p bra ODD;\n{puts}bra MET;\nODD:\n{values}MET:\n");
    let at = call("fgin_signal_at", &[put[0], put[1], put[2], (64, "%at"), (64, "1"), (32, &strong)]);
    let indexed = call("fgin_signal", &[put[0], put[1], (64, &signal), (32, &strong)]);
    let by_lanes = [put[0], (32, "0xffffffff"), put[1], (64, &signal), (32, &strong)];
    let all = call("fgin_warp_signal", &by_lanes);
    let parts = [
        ("one_lane_at", &puts, format!("@%q bra END;\n{at}")),
        ("one_lane_indexed", &divergent, format!("@%q bra END;\n{indexed}")),
        ("all_lanes", &together, all.clone()),
        ("all_lanes_after_divergent_puts", &divergent, all),
        ("divergent_lanes", &together, format!("@%p bra RAISE;\n{at}bra END;\nRAISE:\n{indexed}")),
    ];
    for (name, posts, signals) in &parts {
        text += &kernel(name, posts, signals);
    }
    (parts.iter().map(|part| part.0).collect(), text)
}

/// Makes a context of two ranks with emulated signals, and a window.
fn context(policy: u32) -> (TestContext, u64) {
    let peers = vec![EmulatedPeer { n_signals: 1, generation: 3 }; 2];
    let emulated = Some(EmulatedSpec { words: leak(0u64) as u64, n_signals: 1, peers });
    let endpoint = |wide| EndpointSpec { entries: ENTRIES, wide, max_batch: 4, value_base: 0, start: 0 };
    let of_window = |addr: u64| WindowSpec { lkey: 5, addr, peers: vec![(REMOTE, 6); 2] };
    let spec = Spec {
        policy,
        nranks: 2,
        rail: 0,
        endpoints: vec![endpoint(false), endpoint(true)],
        n_counters: 0,
        n_signals: 0,
        targets: (0..2).map(|at| Destination { ah: 1 + at, qpn: 2 + at, qkey: 3 }).collect(),
        value_lkey: 0,
        scratch: WindowSpec { lkey: 8, addr: 0x4000_0000, peers: vec![(0x5000_0000, 9); 2] },
    };
    (make_with(&spec, &Extras { emulated, ..NO_EXTRAS }), window(&of_window(0x1000_0000), 0).0 as u64)
}

/// What a card has seen.
#[derive(Default)]
struct Card {
    under_way: Vec<(usize, u64)>,
    completed: HashSet<u64>,
    signals: u64,
    /// The first signal that came before a put had completed.
    early: Option<String>,
    /// The card keeps one request under way until the first signal.
    holds: bool,
}

impl Card {
    /// Reads the requests covered by the doorbells, and completes some.
    fn work(&mut self, rings: &[Ring], random: &mut Random) {
        for (endpoint, ring) in rings.iter().enumerate() {
            let under_way = self.under_way.iter().filter(|request| request.0 == endpoint).count() as u64;
            let read = ring.completed.load(Ordering::SeqCst) + under_way;
            for at in read..u64::from(ring.doorbell.load(Ordering::SeqCst)) {
                let geometry = if ring.wide { Geometry::WIDE } else { Geometry::NARROW };
                let request = parse(&ring.slot(at as usize), &geometry).unwrap_or_else(|error| panic!("{at}: {error}"));
                let tag = match request.op {
                    Operation::Write { remote, imm: None, .. } => remote.addr - REMOTE,
                    _ => {
                        self.signals += 1;
                        let missing = (0..LANES).find(|lane| !self.completed.contains(&(lane * STRIDE)));
                        self.early = self.early.take().or(missing
                            .map(|lane| format!("signal {}: the put of lane {lane} has not completed", self.signals)));
                        u64::MAX
                    }
                };
                self.under_way.push((endpoint, tag));
            }
        }
        let held = usize::from(self.holds && self.signals == 0);
        while self.under_way.len() > held && !random.one_in(3) {
            let (endpoint, tag) = self.under_way.swap_remove(random.index(self.under_way.len()));
            self.completed.insert(tag);
            rings[endpoint].completed.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Runs a 32-lane kernel next to a card that may hold one put back (`holds`). Returns the signal count and the first
/// early signal.
fn raise(loaded: &Loaded, name: &str, policy: u32, seed: u64, holds: bool) -> (u64, Option<String>) {
    let (test, window) = context(policy);
    let mut words = vec![0; 2 + LANES as usize];
    (words[0], words[1]) = (test.context.as_ptr() as u64, window);
    let words = words.leak();
    let kernel = loaded.program().kernel(name).expect("the kernel");
    let mut launch = Launch::new([1, 1, 1], [LANES as u32, 1, 1], (words.as_mut_ptr() as u64).to_le_bytes().to_vec());
    (launch.seed, launch.watchdog) = (seed, Some(HANG_LIMIT));
    let (ended, mut card, mut random) =
        (AtomicBool::new(false), Card { holds, ..Card::default() }, Random::new(seed + 1));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::SeqCst) {
                card.work(&test.rings, &mut random);
                std::thread::yield_now();
            }
            card.work(&test.rings, &mut random);
        });
        // SAFETY: context, window and words are leaked, and the only references to them while the kernel runs are to
        // atomics.
        let memory = unsafe { Process::new() };
        let result = run(loaded, kernel, &launch, &memory, &AtomicBool::new(false)).map_err(Box::new);
        ended.store(true, Ordering::SeqCst);
        result.unwrap_or_else(|trap| panic!("{name}, seed {seed}: {trap}"));
    });
    assert!(words[2..].iter().all(|status| *status == 0), "{name}: {:?}", &words[2..]);
    (card.signals, card.early)
}

fn load(device: &str) -> (Vec<&'static str>, Loaded) {
    let (names, text) = kernels();
    let parse = |name: &str, text: &str| Module::parse(name, text).unwrap_or_else(|error| panic!("{error}"));
    let modules = vec![parse("kernels.ptx", &text), parse("ferrogin_device.ptx", device)];
    (names, Arc::new(Program::link(modules).unwrap_or_else(|error| panic!("{error}"))).load(&[]))
}

#[test]
fn strong_signals_of_lanes_find_puts_of_all_lanes_complete() {
    let (names, loaded) = load(&shipped::text());
    for policy in [POLICY_COMBINING, POLICY_LOCKED] {
        for &name in &names {
            for seed in 0..4 {
                let (signals, early) = raise(&loaded, name, policy, seed, false);
                assert_eq!(early, None, "{name}, policy {policy}, seed {seed}");
                assert_eq!(
                    signals,
                    if name.starts_with("one") { 1 } else { LANES },
                    "{name}, policy {policy}, seed {seed}"
                );
            }
        }
    }
}

/// Checks that the test above catches signals that don't wait: each kernel fails with device code whose strong signals
/// wait for nothing.
#[test]
fn strong_signal_without_wait_is_early() {
    const CALL: &str = "call.uni (retval0), ";
    let text = shipped::text();
    let mut calls = 0;
    let lines = text.lines().map(|line| match line.find(CALL) {
        Some(at) if line.contains("settle_earlier,") => {
            calls += 1;
            format!("{}st.param.b32 [retval0], 0;", &line[..at])
        }
        _ => line.to_owned(),
    });
    let changed = lines.collect::<Vec<_>>().join("\n");
    assert!(calls > 0, "the module has no call of the wait");
    let (names, loaded) = load(&changed);
    for name in names {
        let early = (0..8).find_map(|seed| raise(&loaded, name, POLICY_COMBINING, seed, true).1);
        assert!(early.is_some(), "{name}: no signal was early");
    }
}
