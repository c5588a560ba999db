//! Latency and bandwidth between two processes, beside those of the bare message wire in the same run. Run alone on an
//! idle machine, in release: `cargo test --release -p softefa --test perf -- --ignored --nocapture --test-threads=1`,
//! once with `SOFTEFA_WIRE=shm`, once with `SOFTEFA_WIRE=tcp`.

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Instant;

use common::peer::{PEER_BUFFER, Peer};
use common::*;
use ferrogin_fabric::Libfabric;
use ferrogin_fabric::msg::{Config, Event, MessageEndpoint};

/// The second process runs this.
#[test]
fn peer() {
    common::peer::serve();
}

const RAW_PIECE: usize = 64 << 10;

fn raw_endpoint() -> MessageEndpoint {
    let library = Libfabric::already_loaded().unwrap();
    let config = Config { max_payload: RAW_PIECE, max_header: 48, ..Config::default() };
    MessageEndpoint::open(&library, &config).unwrap()
}

/// The second process of the baseline: answers each message with 8 bytes.
#[test]
fn raw_peer() {
    if std::env::var_os("SOFTEFA_TEST_RAW").is_none() || !have_libfabric("raw_peer") {
        return;
    }
    let mut wire = raw_endpoint();
    let hex: String = wire.address().iter().map(|b| format!("{b:02x}")).collect();
    println!("@{hex}");
    let mut over = false;
    let mut idle = 0u32;
    while !over {
        let events = wire.poll(|out, event| match event {
            Event::Message { from, .. } => out.send(from, &[0; 48], &[0; 8]).unwrap(),
            Event::Lost { .. } => over = true,
            Event::Sent { .. } | Event::SendFailed { .. } => {}
        });
        idle = if events.unwrap() > 0 { 0 } else { idle + 1 };
        if idle > 20 {
            std::thread::yield_now();
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn bare_messages() {
    if !have_libfabric("bare_messages") {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "raw_peer", "--nocapture"]).env("SOFTEFA_TEST_RAW", "1").stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let line = lines.find(|l| l.contains('@')).unwrap();
    let hex = &line[line.find('@').unwrap() + 1..];
    let name: Vec<u8> = (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
    let mut wire = raw_endpoint();
    let peer = wire.add_peer(&name).unwrap();
    let answers = |wire: &mut MessageEndpoint, wanted: u64| {
        let mut seen = 0;
        relax_until(|| {
            wire.poll(|_, event| seen += u64::from(matches!(event, Event::Message { .. }))).unwrap();
            seen >= wanted
        });
        seen
    };
    let payload = vec![7u8; RAW_PIECE];
    let mut times = Vec::new();
    for _ in 0..20_000 {
        let start = Instant::now();
        wire.send(peer, &[0; 48], &payload[..8]).unwrap();
        answers(&mut wire, 1);
        times.push(start.elapsed().as_nanos() as f64 / 2000.0);
    }
    times.sort_by(f64::total_cmp);
    println!("bare messages, {}: 8 B one way: median {:.2} µs", wire.provider(), times[times.len() / 2]);
    let (count, start) = (16_000u64, Instant::now());
    let (mut sent, mut done) = (0, 0);
    while done < count {
        while sent - done < 64 && sent < count && wire.send(peer, &[0; 48], &payload).is_ok() {
            sent += 1;
        }
        done += answers(&mut wire, 1);
    }
    let rate = (count as f64 * RAW_PIECE as f64) / start.elapsed().as_secs_f64();
    println!("bare messages, {}: {} B, 64 outstanding: {:.2} GB/s", wire.provider(), RAW_PIECE, rate / 1e9);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
#[ignore = "a measurement"]
fn latency_and_bandwidth() {
    if !have_libfabric("latency_and_bandwidth") {
        return;
    }
    let rig = Rig::open();
    let mut a = End::open(&rig);
    let buffer = rig.buffer(PEER_BUFFER);
    let source = rig.buffer(PEER_BUFFER);
    let mut peer = Peer::start(&[]);
    peer.connect(&a.name());
    let to = a.connect(&peer.name);
    let rounds = 20_000u64;
    let command = format!("echo {} {} {rounds}", buffer.at as u64, buffer.region.rkey);
    assert_eq!(peer.ask(&command), "ok");
    let mut times = Vec::new();
    for n in 1..=rounds {
        let start = Instant::now();
        source.word(0).store(n, Ordering::Release);
        a.post(to, write(peer.memory, source.sge(0, 8)));
        relax_until(|| buffer.word(0).load(Ordering::Acquire) == n);
        times.push(start.elapsed().as_nanos() as f64 / 2000.0);
    }
    times.sort_by(f64::total_cmp);
    let at = |q: f64| times[(times.len() as f64 * q) as usize];
    println!("8 B write, one way: median {:.2} µs, p10 {:.2}, p99 {:.2}", at(0.5), at(0.1), at(0.99));
    let mut done = a.local();
    for (len, count) in [(1u32 << 20, 2000u64), (64 << 10, 20_000), (8, 300_000)] {
        let start = Instant::now();
        let first = done;
        let window = 64;
        while done - first < count {
            while u64::from(a.pc) - done < window && u64::from(a.pc) - first < count {
                a.post(to, write(peer.memory, source.sge(0, len)));
            }
            let before = done;
            relax_until(|| a.local() > before);
            done = a.local();
        }
        let seconds = start.elapsed().as_secs_f64();
        let rate = count as f64 / seconds;
        println!("{len} B writes, 64 outstanding: {:.2} GB/s, {:.0} per second", rate * f64::from(len) / 1e9, rate);
    }
    assert_eq!(a.errors(), 0);
    peer.finish();
    a.close();
    buffer.close();
    source.close();
    rig.close();
}
