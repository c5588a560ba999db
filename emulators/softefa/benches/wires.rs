//! The card beside bare messages of the provider that carries its packets: `cargo bench -p softefa --bench wires`.
//!
//! Two processes play two ranks of one host. The bench runs four ways of an exchange in turns within one run, so that other load of
//! the machine meets all of them: bare messages of the `tcp` provider; writes that are posted by doorbell and awaited as device code
//! on a CPU does it; the same, awaited by a thread that polls memory and makes no progress call; writes by `fi_write`, found by
//! polling memory between `fi_cq_read`s.
//!
//! `-- --rounds N` exchanges of each turn (default 4000), `-- --wire shm|tcp` one wire only, `-- --turns N` (default 5).
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block)]

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::Ordering;
use std::time::Instant;

use efa_dp_direct::wqe::{Destination, RemoteMem};
use ferrogin_datagram::{Config, Event, MessageEndpoint};
use ferrogin_libfabric::Libfabric;
use ferrogin_libfabric::bindings as fi;
use ferrogin_libfabric::progress::Progress;
use softefa_rig::peer::{PEER_BUFFER, Peer, hello};
use softefa_rig::*;

/// Bytes of a bare message in the stream: the payload of one packet of the card.
const PACKET: usize = 64 << 10;
const LARGE: u32 = 1 << 20;

/// Waits as device code on a CPU does: spins, then yields.
fn relax_until(mut done: impl FnMut() -> bool) {
    let mut spins = 0u32;
    while !done() {
        spins += 1;
        if spins < 30 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        assert!(spins < 100_000_000, "waited in vain");
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let option = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1)).cloned();
    if !have_libfabric("wires") {
        return;
    }
    if std::env::var_os(softefa_rig::peer::ROLE).is_some() {
        return serve();
    }
    let rounds = option("--rounds").and_then(|n| n.parse().ok()).unwrap_or(4000);
    let Some(wire) = std::env::var("SOFTEFA_WIRE").ok().filter(|wire| !wire.is_empty()) else {
        // The card reads its settings once for a process.
        let chosen = option("--wire");
        for wire in ["shm", "tcp"].into_iter().filter(|wire| chosen.as_deref().is_none_or(|one| one == *wire)) {
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            let status = command.args(&args[1..]).env("SOFTEFA_WIRE", wire).status().unwrap();
            assert!(status.success(), "{wire}: {status}");
        }
        return;
    };
    measure(&wire, option("--turns").and_then(|n| n.parse().ok()).unwrap_or(5), rounds);
}

/// One process with its endpoints and buffers.
struct Side {
    rig: Rig,
    progress: Progress,
    /// Posts by doorbell.
    device: End,
    /// Posts by `fi_write`.
    host: End,
    source: Buffer,
    target: Buffer,
    bare: MessageEndpoint,
}

/// The peer, as this process names it.
struct Other {
    to: Destination,
    addr: u64,
    bare: ferrogin_datagram::Peer,
    memory: RemoteMem,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

impl Side {
    fn open() -> Self {
        let rig = Rig::open();
        let (device, host) = (End::open(&rig), End::open(&rig));
        let (source, target) = (rig.buffer(PEER_BUFFER), rig.buffer(PEER_BUFFER));
        let config = Config { max_payload: PACKET, max_header: 48, ..Config::default() };
        let bare = MessageEndpoint::open(&Libfabric::already_loaded().unwrap(), &config).unwrap();
        Self { progress: rig.progress(), rig, device, host, source, target, bare }
    }

    /// All names of this side in one line.
    fn names(&self) -> String {
        let names = [&self.device.name()[..], &self.host.name(), self.bare.address()].map(hex);
        format!("{} {} {}", names.join(" "), self.target.at as u64, self.target.region.rkey)
    }

    fn connect(&mut self, names: &[&str]) -> Other {
        let name = |at: usize| -> [u8; 32] { unhex(names[at]).try_into().unwrap() };
        let to = self.device.connect(&name(0));
        let (inserted, addr) = self.host.insert(&name(1));
        assert_eq!(inserted, 1);
        let bare = self.bare.add_peer(&unhex(names[2])).unwrap();
        let memory = RemoteMem { addr: names[3].parse().unwrap(), rkey: names[4].parse().unwrap() };
        Other { to, addr, bare, memory }
    }

    fn arrived(&self, value: u64) -> bool {
        self.target.word(0).load(Ordering::Acquire) == value
    }

    /// Takes completions, which makes the card progress in this thread.
    fn read(&self) -> u64 {
        let mut entries = [fi::fi_cq_entry::default(); 16];
        let read = unsafe { (*(*self.host.cq).ops).read.unwrap() };
        let count = unsafe { read(self.host.cq, entries.as_mut_ptr().cast(), entries.len()) };
        assert!(count >= 0 || count == -(fi::FI_EAGAIN as isize), "fi_cq_read: {count}");
        count.max(0) as u64
    }

    /// False when the queue is full now.
    fn write(&self, other: &Other, len: usize) -> bool {
        let (desc, ep) = (unsafe { (*self.source.region.mr).mem_desc }, self.host.ep);
        let from: *const c_void = self.source.at.cast();
        let write = unsafe { (*(*ep).rma).write.unwrap() };
        let RemoteMem { addr, rkey } = other.memory;
        let rc = unsafe { write(ep, from, len, desc, other.addr, addr, rkey.into(), ptr::null_mut()) };
        assert!(rc == 0 || rc == -(fi::FI_EAGAIN as isize), "fi_write: {rc}");
        rc == 0
    }

    /// Half of an exchange.
    fn send(&mut self, method: Method, other: &Other, value: u64) {
        self.source.word(0).store(value, Ordering::Release);
        match method {
            Method::BareMessages => self.bare.send(other.bare, &[0; 48], &value.to_ne_bytes()).unwrap(),
            Method::Doorbell | Method::PollingOnly => {
                self.device.post(other.to, write(other.memory, self.source.sge(0, 8)))
            }
            Method::FiWrite => relax_until(|| {
                let posted = self.write(other, 8);
                if !posted {
                    self.read();
                }
                posted
            }),
        }
    }

    fn receive(&mut self, method: Method, value: u64) {
        match method {
            Method::BareMessages => {
                let mut seen = false;
                relax_until(|| {
                    self.bare.poll(|_, event| seen |= matches!(event, Event::Message { .. })).unwrap();
                    seen
                });
            }
            Method::Doorbell => wait_until(self.progress, || self.arrived(value)),
            Method::PollingOnly => relax_until(|| self.arrived(value)),
            Method::FiWrite => relax_until(|| {
                self.read();
                self.arrived(value)
            }),
        }
    }

    fn close(self) {
        self.device.close();
        self.host.close();
        self.source.close();
        self.target.close();
        self.rig.close();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    BareMessages,
    Doorbell,
    PollingOnly,
    FiWrite,
}

impl Method {
    const ALL: [Method; 4] = [Method::BareMessages, Method::Doorbell, Method::PollingOnly, Method::FiWrite];

    fn name(self) -> &'static str {
        match self {
            Method::BareMessages => "bare messages",
            Method::Doorbell => "by doorbell",
            Method::PollingOnly => "polling only",
            Method::FiWrite => "by fi_write",
        }
    }

    fn of(name: &str) -> Method {
        Method::ALL.into_iter().find(|method| format!("{method:?}") == name).unwrap()
    }
}

/// The second process.
fn serve() {
    let mut side = Side::open();
    hello(&side.device.name(), &side.target);
    println!("@{}", side.names());
    let mut other = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            "connect" => {
                other = Some(side.connect(&words[1..]));
                println!("@ok");
            }
            // method first rounds
            "echo" => {
                let (method, first, rounds) =
                    (Method::of(words[1]), words[2].parse::<u64>().unwrap(), words[3].parse::<u64>().unwrap());
                println!("@ok");
                for value in first..first + rounds {
                    side.receive(method, value);
                    side.send(method, other.as_ref().unwrap(), value);
                }
                // The last read must not lose requests that are outstanding.
                relax_for(200, || {
                    side.read();
                });
            }
            // Bare messages; one message answers when all have arrived.
            "sink" => {
                let (mut seen, wanted) = (0u64, words[1].parse::<u64>().unwrap());
                println!("@ok");
                relax_until(|| {
                    side.bare.poll(|_, event| seen += u64::from(matches!(event, Event::Message { .. }))).unwrap();
                    seen >= wanted
                });
                side.send(Method::BareMessages, other.as_ref().unwrap(), 1);
                relax_for(50, || drop(side.bare.poll(|_, _| {})));
            }
            "exit" => break,
            other => panic!("unknown command {other}"),
        }
    }
    side.close();
}

/// Waits as device code on a CPU does.
fn wait_until(progress: Progress, mut done: impl FnMut() -> bool) {
    let mut round = 0;
    while !done() {
        ferrogin_device::platform::relax(round, || unsafe { (progress.function)(progress.arg) });
        round += 1;
        assert!(round < 10_000_000, "waited in vain");
    }
}

fn relax_for(times: u32, mut act: impl FnMut()) {
    for _ in 0..times {
        act();
        std::thread::yield_now();
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure(wire: &str, turns: usize, rounds: u64) {
    let mut side = Side::open();
    let mut peer = Peer::spawn(&mut std::process::Command::new(std::env::current_exe().unwrap()));
    let names = peer.answer();
    let other = side.connect(&names.split(' ').collect::<Vec<_>>());
    assert_eq!(peer.ask(&format!("connect {}", side.names())), "ok");
    let mut times: [Vec<f64>; 4] = Default::default();
    let mut value = 1;
    for _ in 0..turns {
        for (method, times) in Method::ALL.into_iter().zip(&mut times) {
            assert_eq!(peer.ask(&format!("echo {method:?} {value} {rounds}")), "ok");
            for n in value..value + rounds {
                let start = Instant::now();
                side.send(method, &other, n);
                side.receive(method, n);
                times.push(start.elapsed().as_nanos() as f64 / 2000.0);
            }
            value += rounds;
        }
    }
    println!("{wire}, 8 bytes one way, median (first decile) of {turns} turns of {rounds}:");
    let medians = times.each_mut().map(|times| median(times));
    for (at, method) in Method::ALL.into_iter().enumerate() {
        let ratio = medians[at] / medians[0];
        println!(
            "  {:<14} {:>8.2} µs ({:.2}), {ratio:.2} x bare",
            method.name(),
            medians[at],
            times[at][times[at].len() / 10]
        );
    }
    let mut rates: [Vec<f64>; 2] = Default::default();
    for _ in 0..turns {
        rates[0].push(bare_stream(&mut side, &mut peer, &other, 2000));
        rates[1].push(device_stream(&mut side, &other, 125));
    }
    let [bare, device] = rates.each_mut().map(|rates| median(rates));
    println!("{wire}, stream, median of {turns} turns of 125 MiB:");
    println!("  bare messages of 64 KiB {bare:>6.2} GB/s");
    println!("  writes of 1 MiB         {device:>6.2} GB/s, {:.2} x bare", device / bare);
    assert_eq!((side.device.errors(), side.host.errors()), (0, 0));
    peer.finish();
    side.close();
}

fn bare_stream(side: &mut Side, peer: &mut Peer, other: &Other, count: u64) -> f64 {
    assert_eq!(peer.ask(&format!("sink {count}")), "ok");
    let payload = vec![7u8; PACKET];
    let (mut sent, mut answered, start) = (0, false, Instant::now());
    relax_until(|| {
        while sent < count && side.bare.send(other.bare, &[0; 48], &payload).is_ok() {
            sent += 1;
        }
        side.bare.poll(|_, event| answered |= matches!(event, Event::Message { .. })).unwrap();
        answered
    });
    count as f64 * PACKET as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn device_stream(side: &mut Side, other: &Other, count: u64) -> f64 {
    let (start, first) = (Instant::now(), side.device.local());
    let mut posted = 0;
    wait_until(side.progress, || {
        let done = side.device.local() - first;
        while posted < count && posted - done < 16 {
            side.device.post(other.to, write(other.memory, side.source.sge(0, LARGE)));
            posted += 1;
        }
        done == count
    });
    count as f64 * f64::from(LARGE) / start.elapsed().as_secs_f64() / 1e9
}
