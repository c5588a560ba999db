//! Latency and bandwidth between two processes. Run alone on an idle machine, in release:
//! `cargo test --release -p softefa --test perf -- --ignored --nocapture`.

mod common;

use std::sync::atomic::Ordering;
use std::time::Instant;

use common::peer::{PEER_BUFFER, Peer};
use common::*;

/// The second process runs this.
#[test]
fn peer() {
    common::peer::serve();
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
