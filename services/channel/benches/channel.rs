//! Compares channels with bare tagged messages of the same provider: cargo bench -p ferrogin-channel --bench channel
//! [PROVIDER...]
//!
//! For each provider, prints latency (half an 8-byte round trip), rate (8 bytes, 16 in flight) and bandwidth (1 MiB, 16
//! in flight), each as the median over alternating rounds (FERROGIN_ROUNDS), and the median of the per-round ratios,
//! which suffers less than the ratio of medians when the machine's speed changes from one second to the next. A channel
//! sends two messages for each of its own, the length and the bytes, and the reader can't ask for the bytes before it
//! knows the length. So there are three kinds of bare figures: one message alone, both messages with receives posted
//! ahead (which a reader that has to learn the length can't do), and both messages sent and received by hand the way a
//! channel does it. Channels over `tcp` use sockets; the bare messages use libfabric's provider of that name. Loads
//! FERROGIN_LIBFABRIC. The other end is a separate process.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ferrogin_channel::{Address, Channel, Config, Payload, Reactor};
use ferrogin_libfabric::{
    AddressVector, Completion, CompletionQueue, CqAttr, Domain, Endpoint, Fabric, FiAddr, Hints, Libfabric,
    MR_MODE_ALL, Read, bindings, entry,
};

const DEPTH: usize = 16;
const MIB: usize = 1 << 20;
/// How long both kinds of ends poll before they sleep.
const BUSY_POLL: Duration = Duration::from_millis(5);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    match &arguments[..] {
        [role, provider] if role == "bare" => bare_peer(provider),
        [role, provider] if role == "channel" => channel_peer(provider),
        [] => compare("tcp"),
        providers => providers.iter().for_each(|provider| compare(provider)),
    }
}

/// Pings, small messages and large messages per round; FERROGIN_BENCH_COUNTS overrides them ("1,1000000,1").
fn counts() -> [usize; 3] {
    let given = std::env::var("FERROGIN_BENCH_COUNTS").unwrap_or_default();
    let mut counts = given.split(',').filter_map(|count| count.parse().ok()).filter(|count| *count > 0);
    [4000, 20_000, 300].map(|usual| counts.next().unwrap_or(usual))
}

fn source(provider: &str) -> Option<String> {
    (provider == "net" || provider.contains("tcp")).then(|| "127.0.0.1".to_owned())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn compare(provider: &str) {
    let lib = Libfabric::load(None).unwrap();
    let (mut bare, mut over) = (Bare::against(&lib, provider), Over::against(provider));
    let [pings, small, large] = counts();
    let bandwidth = |rate: f64| rate * MIB as f64 / 1e9;
    let (mut of_bare, mut of_channel): ([Vec<f64>; 5], [Vec<f64>; 3]) = Default::default();
    let rounds = std::env::var("FERROGIN_ROUNDS").map_or(7, |n| n.parse().expect("FERROGIN_ROUNDS is a number"));
    for _ in 0..rounds {
        // Each kind runs a whole round while the other sleeps.
        let results = [
            bare.latency(pings),
            bare.latency_of_pairs(pings),
            bare.rate(small, 8, Kind::Ahead),
            bare.rate(small, 8, Kind::ByHand),
            bandwidth(bare.rate(large, MIB, Kind::Single)),
        ];
        of_bare.iter_mut().zip(results).for_each(|(all, one)| all.push(one));
        thread::sleep(2 * BUSY_POLL);
        let results = [over.latency(pings), over.rate(small, 8), bandwidth(over.rate(large, MIB))];
        of_channel.iter_mut().zip(results).for_each(|(all, one)| all.push(one));
        thread::sleep(2 * BUSY_POLL);
    }
    println!("channels over {provider}, bare messages over {} of libfabric {}", bare.provider, lib.version());
    table(of_bare, &of_channel);
}

fn table(of_bare: [Vec<f64>; 5], of_channel: &[Vec<f64>; 3]) {
    let rows = [
        ("latency of one message, us", 0),
        ("latency of two by hand, us", 0),
        ("pairs/s, posted ahead", 1),
        ("pairs/s, by hand", 1),
        ("bandwidth, GB/s", 2),
    ];
    for (bare, (what, which)) in of_bare.into_iter().zip(rows) {
        let over = &of_channel[which];
        let ratio = median(over.iter().zip(&bare).map(|(over, bare)| over / bare).collect());
        let (bare, over) = (median(bare), median(over.clone()));
        println!("  {what:27} bare {bare:12.2}  channel {over:12.2}  channel/bare {ratio:.2}");
    }
}

struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the other end and returns what it prints: its address.
fn peer(role: &str, provider: &str) -> (Peer, Vec<u8>) {
    let mut child =
        Command::new(std::env::current_exe().unwrap()).args([role, provider]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let hex = line.trim();
    let bytes = (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
    (Peer(child), bytes)
}

fn print(address: &[u8]) {
    println!("{}", address.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
}

// Bare tagged messages.

const PING: u64 = 1;
const DATA: u64 = 2;
const ACK: u64 = 3;
/// Tag bits of a length and of its payload; the bits below hold the message's number.
const LENGTH: u64 = 1 << 32;
const PAYLOAD: u64 = 1 << 33;
const NUMBERS: u64 = (1 << 32) - 1;

/// What a batch is made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Single messages.
    Single,
    /// Pairs of messages, with receives posted ahead.
    Ahead,
    /// A length and its payload, whose receive is posted once the length has arrived.
    ByHand,
}

struct Bare {
    endpoint: Endpoint,
    queue: Arc<CompletionQueue>,
    av: Arc<AddressVector>,
    to: FiAddr,
    contexts: Vec<[u64; 8]>,
    buffers: Vec<Vec<u8>>,
    sent: usize,
    received: usize,
    /// Buffers whose receives completed, in order, while recording is on.
    filled: Option<Vec<usize>>,
    /// Since when nothing has completed.
    idle_since: Option<Instant>,
    peer: Option<Peer>,
    provider: String,
}

fn hints(provider: &str) -> Hints {
    let hints = Hints::new(provider)
        .caps(bindings::FI_TAGGED)
        .mode(bindings::FI_CONTEXT | bindings::FI_CONTEXT2)
        .mr_mode(MR_MODE_ALL & !bindings::FI_MR_LOCAL);
    match source(provider) {
        Some(source) => hints.source(&source).addr_format(bindings::FI_SOCKADDR_IN),
        None => hints,
    }
}

impl Bare {
    fn open(lib: &Arc<Libfabric>, provider: &str) -> Self {
        let own = |info: &ferrogin_libfabric::Info| info.provider() == provider;
        let mut infos = lib.getinfo(&hints(provider)).unwrap();
        let at = infos.iter().position(own).unwrap_or(0);
        let info = infos.swap_remove(at);
        let fabric = Fabric::open(&info).unwrap();
        let domain = Domain::open(&fabric, &info).unwrap();
        let av = AddressVector::open(&domain, 2).unwrap();
        let queue = CompletionQueue::open(&domain, &CqAttr { size: 1024 }).unwrap();
        let mut endpoint = Endpoint::open(&domain, &info).unwrap();
        endpoint.bind_av(&av).unwrap();
        endpoint.bind_cq(&queue, bindings::FI_TRANSMIT | bindings::FI_RECV).unwrap();
        endpoint.enable().unwrap();
        let contexts = (0..8 * DEPTH).map(|_| [0; 8]).collect();
        let buffers = (0..2 * DEPTH).map(|_| vec![1; MIB]).collect();
        Self {
            endpoint,
            queue,
            av,
            to: FiAddr(0),
            contexts,
            buffers,
            sent: 0,
            received: 0,
            filled: None,
            idle_since: None,
            peer: None,
            provider: info.provider(),
        }
    }

    fn against(lib: &Arc<Libfabric>, provider: &str) -> Self {
        let mut bare = Self::open(lib, provider);
        let (peer, address) = peer("bare", provider);
        bare.to = bare.av.insert(&address).unwrap();
        bare.peer = Some(peer);
        // Sends this endpoint's name to the peer.
        let name = bare.endpoint.name().unwrap();
        bare.buffers[0][0] = name.len() as u8;
        bare.buffers[0][1..=name.len()].copy_from_slice(&name);
        bare.send(0, 1 + name.len(), PING);
        bare.wait(|bare| bare.sent >= 1);
        bare.receive(DEPTH, 8, ACK, 0);
        bare.wait(|bare| bare.received >= 1);
        (bare.sent, bare.received) = (0, 0);
        bare
    }

    fn context(&self, at: usize) -> *mut c_void {
        self.contexts[at % self.contexts.len()].as_ptr().cast_mut().cast()
    }

    fn send(&mut self, buffer: usize, len: usize, tag: u64) {
        let send = entry!(self.endpoint.object(), tagged: fi_ops_tagged, send, "fi_tsend").unwrap();
        let context = self.context(self.sent);
        loop {
            let data = self.buffers[buffer].as_ptr().cast();
            // SAFETY: buffer and context live as long as the endpoint; sends only read.
            let code =
                unsafe { send(self.endpoint.as_ptr(), data, len, std::ptr::null_mut(), self.to.0, tag, context) };
            match code {
                0 => return,
                code if code == -(bindings::FI_EAGAIN as isize) => self.poll(),
                code => panic!("fi_tsend: {code}"),
            }
        }
    }

    fn receive(&mut self, buffer: usize, len: usize, tag: u64, ignore: u64) {
        let receive = entry!(self.endpoint.object(), tagged: fi_ops_tagged, recv, "fi_trecv").unwrap();
        let (data, context) = (self.buffers[buffer].as_mut_ptr().cast(), self.context(4 * DEPTH + buffer));
        let from = bindings::FI_ADDR_UNSPEC;
        // SAFETY: buffer and context live as long as the endpoint; nothing reads the buffer meanwhile.
        let code =
            unsafe { receive(self.endpoint.as_ptr(), data, len, std::ptr::null_mut(), from, tag, ignore, context) };
        assert_eq!(code, 0, "fi_trecv");
    }

    fn poll(&mut self) {
        let mut batch = [Completion::EMPTY; 32];
        match self.queue.read(&mut batch).unwrap() {
            Read::Entries(0) => self.idle(),
            Read::Entries(count) => {
                self.idle_since = None;
                for completion in &batch[..count] {
                    if completion.flags & bindings::FI_RECV != 0 {
                        self.received += 1;
                        if let Some(filled) = &mut self.filled {
                            let at = (completion.context as usize - self.contexts.as_ptr() as usize) / 64;
                            filled.push(at - 4 * DEPTH);
                        }
                    } else {
                        self.sent += 1;
                    }
                }
            }
            Read::Failure => panic!("{:?}", self.queue.read_error()),
        }
    }

    /// Yields or sleeps for as long as a reactor without a descriptor would: an idle end mustn't take the other end's
    /// core.
    fn idle(&mut self) {
        let now = Instant::now();
        if now.duration_since(*self.idle_since.get_or_insert(now)) < BUSY_POLL {
            thread::yield_now();
        } else {
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait(&mut self, done: impl Fn(&Self) -> bool) {
        while !done(self) {
            self.poll();
        }
    }

    fn latency(&mut self, pings: usize) -> f64 {
        let start = Instant::now();
        for _ in 0..pings {
            let (sent, received) = (self.sent, self.received);
            self.receive(DEPTH, 8, PING, 0);
            self.send(0, 8, PING);
            self.wait(|bare| bare.received > received && bare.sent > sent);
        }
        start.elapsed().as_secs_f64() * 1e6 / (2 * pings) as f64
    }

    fn send_pair(&mut self, number: usize) {
        self.send(number % DEPTH, 8, LENGTH | number as u64);
        self.send(number % DEPTH, 8, PAYLOAD | number as u64);
    }

    fn latency_of_pairs(&mut self, pings: usize) -> f64 {
        let start = Instant::now();
        for number in 0..pings {
            let sent = self.sent;
            self.send_pair(number);
            self.read_pairs(1, number);
            self.wait(|bare| bare.sent == sent + 2);
        }
        start.elapsed().as_secs_f64() * 1e6 / (2 * pings) as f64
    }

    /// Receives messages from number `first` on, at most `DEPTH` at a time, each after its length. Lengths arrive in
    /// order over these providers.
    fn read_pairs(&mut self, count: usize, first: usize) {
        self.filled = Some(Vec::new());
        let (mut asked, mut known, mut whole) = (0, 0, 0);
        let mut free: Vec<usize> = (0..DEPTH).collect();
        let mut batch = Vec::new();
        while whole < count {
            while asked < count.min(whole + DEPTH) {
                self.receive(free.pop().unwrap(), 8, LENGTH, NUMBERS);
                asked += 1;
            }
            self.wait(|bare| bare.filled.as_ref().is_some_and(|filled| !filled.is_empty()));
            std::mem::swap(&mut batch, self.filled.as_mut().unwrap());
            for buffer in batch.drain(..) {
                if buffer < DEPTH {
                    free.push(buffer);
                    self.receive(DEPTH + known % DEPTH, 8, PAYLOAD | (first + known) as u64, 0);
                    known += 1;
                } else {
                    whole += 1;
                }
            }
        }
        self.filled = None;
    }

    /// Returns messages (or pairs) per second; the peer answers the last one.
    fn rate(&mut self, count: usize, len: usize, kind: Kind) -> f64 {
        let each = if kind == Kind::Single { 1 } else { 2 };
        let start = Instant::now();
        let (first, received) = (self.sent, self.received);
        self.receive(DEPTH, 8, ACK, 0);
        for number in 0..count {
            self.wait(|bare| first + each * number < bare.sent + each * DEPTH);
            if kind == Kind::ByHand {
                self.send_pair(number);
                continue;
            }
            for _ in 0..each {
                self.send(number % DEPTH, len, DATA);
            }
        }
        self.wait(|bare| bare.sent == first + each * count && bare.received > received);
        count as f64 / start.elapsed().as_secs_f64()
    }

    /// Reads single messages, with receives posted ahead.
    fn read_ahead(&mut self, count: usize, len: usize, window: usize) {
        let first = self.received;
        for number in 0..count {
            if number >= window {
                self.wait(|bare| bare.received > first + number - window);
            }
            self.receive(number % window, len, DATA, 0);
        }
        self.wait(|bare| bare.received == first + count);
    }

    fn answer(&mut self) {
        let sent = self.sent;
        self.send(DEPTH, 8, ACK);
        self.wait(|bare| bare.sent > sent);
    }
}

/// Echoes pings and pairs, receives the batches, and answers the last message of each.
fn bare_peer(provider: &str) {
    let lib = Libfabric::load(None).unwrap();
    let mut bare = Bare::open(&lib, provider);
    bare.receive(0, 256, PING, 0);
    print(&bare.endpoint.name().unwrap());
    bare.wait(|bare| bare.received == 1);
    let len = usize::from(bare.buffers[0][0]);
    let name = bare.buffers[0][1..=len].to_vec();
    bare.to = bare.av.insert(&name).unwrap();
    bare.answer();
    let [pings, small, large] = counts();
    loop {
        for _ in 0..pings {
            let (sent, received) = (bare.sent, bare.received);
            bare.receive(0, 8, PING, 0);
            bare.wait(|bare| bare.received > received);
            bare.send(DEPTH, 8, PING);
            bare.wait(|bare| bare.sent > sent);
        }
        for number in 0..pings {
            let sent = bare.sent;
            bare.read_pairs(1, number);
            bare.send_pair(number);
            bare.wait(|bare| bare.sent == sent + 2);
        }
        bare.read_ahead(2 * small, 8, 2 * DEPTH);
        bare.answer();
        bare.read_pairs(small, 0);
        bare.answer();
        bare.read_ahead(large, MIB, DEPTH);
        bare.answer();
    }
}

// Channels.

struct Over {
    channel: Channel,
    buffers: Vec<Arc<Vec<u8>>>,
    _reactor: Reactor,
    _peer: Peer,
}

fn config(provider: &str) -> Config {
    let (provider, source) = (provider.to_owned(), source(provider));
    Config { provider, source, busy_poll: BUSY_POLL, ..Config::default() }
}

impl Over {
    fn against(provider: &str) -> Self {
        let (peer, address) = peer("channel", provider);
        let reactor = Reactor::open(&config(provider)).unwrap();
        let channel = reactor.connect(&Address::parse(&address).unwrap()).wait().unwrap();
        let buffers = (0..DEPTH).map(|_| Arc::new(vec![1; MIB])).collect();
        Self { channel, buffers, _reactor: reactor, _peer: peer }
    }

    fn latency(&mut self, pings: usize) -> f64 {
        let (done, over) = mpsc::channel();
        let start = Instant::now();
        ping(self.channel.clone(), Vec::new(), pings, done);
        over.recv().unwrap();
        start.elapsed().as_secs_f64() * 1e6 / (2 * pings) as f64
    }

    fn rate(&mut self, count: usize, len: usize) -> f64 {
        let left = Arc::new(Mutex::new(count));
        let start = Instant::now();
        let answer = self.channel.receive();
        for buffer in &self.buffers {
            feed(self.channel.clone(), Payload::shared(buffer, 0..len), Arc::clone(&left));
        }
        answer.wait().unwrap();
        count as f64 / start.elapsed().as_secs_f64()
    }
}

fn ping(channel: Channel, room: Vec<u8>, left: usize, done: mpsc::Sender<()>) {
    if left == 0 {
        return done.send(()).unwrap();
    }
    let next_channel = channel.clone();
    channel.read_into(room, move |result| ping(next_channel, result.unwrap(), left - 1, done));
    channel.write(b"12345678", |result| drop(result.unwrap()));
}

fn feed(channel: Channel, bytes: Payload, left: Arc<Mutex<usize>>) {
    {
        let mut left = left.lock().unwrap();
        if *left == 0 {
            return;
        }
        *left -= 1;
    }
    let next_channel = channel.clone();
    channel.write(bytes, move |result| feed(next_channel, result.unwrap(), left));
}

type Next = Box<dyn FnOnce(Channel, Rooms) + Send>;
/// Buffers for messages, reused for each batch.
type Rooms = Vec<Vec<u8>>;

struct Batch {
    /// Reads still to start; `missing` counts the messages still to arrive.
    unread: usize,
    missing: usize,
    rooms: Rooms,
    next: Option<Next>,
}

/// Reads `count` messages, `DEPTH` at a time, then goes on to `next`.
fn drain(channel: &Channel, count: usize, rooms: Rooms, next: Next) {
    let batch = Arc::new(Mutex::new(Batch { unread: count, missing: count, rooms, next: Some(next) }));
    for _ in 0..DEPTH.min(count) {
        let room = batch.lock().unwrap().rooms.pop().unwrap_or_default();
        drain_one(channel.clone(), room, Arc::clone(&batch));
    }
}

fn drain_one(channel: Channel, room: Vec<u8>, batch: Arc<Mutex<Batch>>) {
    {
        let mut batch = batch.lock().unwrap();
        if batch.unread == 0 {
            return batch.rooms.push(room);
        }
        batch.unread -= 1;
    }
    let next_channel = channel.clone();
    channel.read_into(room, move |result| {
        let Ok(bytes) = result else { std::process::exit(0) };
        {
            let mut now = batch.lock().unwrap();
            now.missing -= 1;
            if now.missing == 0 {
                now.rooms.push(bytes);
                let (next, rooms) = (now.next.take().unwrap(), std::mem::take(&mut now.rooms));
                drop(now);
                return next(next_channel, rooms);
            }
        }
        drain_one(next_channel, bytes, batch);
    });
}

/// Serves one batch of each kind after another, forever.
fn serve(channel: Channel, rooms: Rooms) {
    let [pings, small, large] = counts();
    echo(channel, Vec::new(), pings, move |channel| {
        let answer = |channel: &Channel| {
            channel.write(b"12345678", |_| ());
        };
        let large = move |channel: Channel, rooms| {
            answer(&channel);
            let next_channel = move |channel: Channel, rooms| {
                answer(&channel);
                serve(channel, rooms);
            };
            drain(&channel, large, rooms, Box::new(next_channel));
        };
        drain(&channel, small, rooms, Box::new(large));
    });
}

fn echo(channel: Channel, room: Vec<u8>, left: usize, next: impl FnOnce(Channel) + Send + 'static) {
    if left == 0 {
        return next(channel);
    }
    let next_channel = channel.clone();
    channel.read_into(room, move |result| {
        let Ok(bytes) = result else { std::process::exit(0) };
        next_channel.write(b"12345678", |_| ());
        echo(next_channel, bytes, left - 1, next);
    });
}

fn channel_peer(provider: &str) {
    let reactor = Reactor::open(&config(provider)).unwrap();
    let listener = reactor.listen().unwrap();
    print(&listener.address().to_bytes());
    serve(listener.accept().wait().unwrap(), Vec::new());
    loop {
        thread::park();
    }
}
