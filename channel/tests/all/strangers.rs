//! A listener beside processes that do not have its address: silent ones by the thousand, and ones that forge messages.
#![allow(unsafe_code)]

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{LIMIT, libraries};
use ferrogin_channel::{Address, Channel, Config, Listener, Reactor};
use ferrogin_libfabric::bindings::{self, fi_context2};
use ferrogin_libfabric::{AddressVector, CompletionQueue, CqAttr, Domain, Endpoint, Fabric, Libfabric, find_datagrams};
use ferrogin_test_support::child::run;
use ferrogin_test_support::peer::{hex, unhex};
use ferrogin_test_support::{Random, repetitions, resident_bytes, soak, stranger};

/// Descriptors that the listener's process may have: fewer than silent connections; in a soak run also more.
const DESCRIPTORS: [u64; 2] = [512, 20_000];
/// Offsets in an address: the secret, the endpoint's name.
const SECRET: usize = 16;
const NAME: usize = 24;

/// What the other process runs.
#[test]
fn stranger() {
    stranger::hold();
    let Some(task) = stranger::task() else { return };
    if let ["forge", lib, listener, client, rounds] = task.split(' ').collect::<Vec<_>>()[..] {
        Forger::open(lib, &unhex(listener)).attack(&unhex(client), rounds.parse().unwrap());
    }
}

fn exchange(from: &Channel, to: &Channel, len: usize) {
    let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
    let sent = from.send(bytes.clone());
    assert!(to.receive().wait_for(LIMIT).unwrap() == bytes, "{len}");
    sent.wait_for(LIMIT).unwrap();
}

/// A new endpoint connects, and both ends send a message.
fn open(lib: &Arc<Libfabric>, listener: &Listener) -> (Reactor, Channel, Channel) {
    let (accepted, reactor) = (listener.accept(), Reactor::open(lib, &Config::default()).unwrap());
    let near = reactor.connect(listener.address()).wait_for(LIMIT).unwrap();
    let far = accepted.wait_for(LIMIT).unwrap();
    exchange(&near, &far, 100);
    exchange(&far, &near, 300_000);
    (reactor, near, far)
}

#[test]
fn silent_connections_do_not_delay_channels() {
    let test = "silent_connections_do_not_delay_channels";
    let (libraries, as_nobody) = (libraries(test), stranger::have_second_user(test));
    let report = run(test, &[], || {
        for (lib, descriptors) in libraries.iter().flat_map(|lib| DESCRIPTORS.map(|descriptors| (lib, descriptors))) {
            if descriptors > 512 && !soak() {
                continue;
            }
            if !stranger::limit_descriptors(descriptors) {
                eprintln!("SKIP {test}: this process may not have {descriptors} descriptors");
                continue;
            }
            let reactor = Reactor::open(lib, &Config::default()).unwrap();
            let listener = reactor.listen().unwrap();
            let (_client, near, far) = open(lib, &listener);
            let address = [listener.address().endpoint().parse().unwrap()];
            let what = format!("libfabric {}: a channel opens", lib.version());
            let undisturbed = stranger::is_undisturbed(&what, "stranger", &address, as_nobody, || {
                drop(open(lib, &listener));
                exchange(&near, &far, 1000);
            });
            assert!(undisturbed, "silent connections slow down a connect");
        }
    });
    if let Some(report) = report {
        println!("{report}");
    }
}

/// A process that knows names and ports but no secret changes nothing.
#[test]
fn forged_messages_change_nothing() {
    let test = "forged_messages_change_nothing";
    let (libraries, as_nobody) = (libraries(test), stranger::have_second_user(test));
    run(test, &[], || {
        for lib in &libraries {
            let reactor = Reactor::open(lib, &Config::default()).unwrap();
            let listener = reactor.listen().unwrap();
            let (client, near, far) = open(lib, &listener);
            let client = client.listen().unwrap().address().to_bytes();
            let mut address = listener.address().to_bytes();
            address[SECRET..NAME].fill(0);
            let rounds = repetitions("FERROGIN_CHANNEL_FORGED", 3000, 100_000);
            let task = format!("forge {} {} {} {rounds}", lib.path().display(), hex(&address), hex(&client[NAME..]));
            let accepted = listener.accept();
            // The first campaign warms up what the provider keeps.
            let mut grown = 0;
            for _ in 0..2 {
                let before = resident_bytes();
                let mut forger = stranger::start("stranger", &task, as_nobody);
                forger.wait_for("stranger forged");
                exchange(&near, &far, 100);
                exchange(&far, &near, 1 << 20);
                grown = resident_bytes().saturating_sub(before);
            }
            assert!(grown < 4 << 20, "{grown} bytes more");
            assert!(accepted.wait_for(Duration::from_millis(1)).is_err(), "a stranger has a channel");
            drop(open(lib, &listener));
            exchange(&near, &far, 100);
        }
    });
}

/// A raw endpoint that sends any bytes to a listener.
struct Forger {
    // First, so that it is closed before its buffers are freed.
    endpoint: Endpoint,
    queue: Arc<CompletionQueue>,
    av: Arc<AddressVector>,
    listener: Vec<u8>,
    /// Sent bytes and their contexts, kept until the end.
    sent: Vec<(Box<[u8]>, Box<fi_context2>)>,
    in_flight: usize,
}

impl Forger {
    fn open(lib: &str, listener: &[u8]) -> Self {
        let lib = Libfabric::load(Some(Path::new(lib))).unwrap();
        let info = find_datagrams(&lib, "tcp", Some("127.0.0.1"), bindings::FI_MSG).unwrap();
        let domain = Domain::open(&Fabric::open(&info).unwrap(), &info).unwrap();
        let av = AddressVector::open(&domain, 4).unwrap();
        let queue = CompletionQueue::open(&domain, &CqAttr { size: 256 }).unwrap();
        let mut endpoint = Endpoint::open(&domain, &info).unwrap();
        endpoint.bind_av(&av).unwrap();
        endpoint.bind_cq(&queue, bindings::FI_TRANSMIT | bindings::FI_RECV).unwrap();
        endpoint.enable().unwrap();
        Self { endpoint, queue, av, listener: listener.to_vec(), sent: Vec::new(), in_flight: 0 }
    }

    fn progress(&mut self) {
        let mut done = [ferrogin_libfabric::Completion::EMPTY; 16];
        match self.queue.read(&mut done).unwrap() {
            ferrogin_libfabric::Read::Entries(count) => self.in_flight -= count,
            ferrogin_libfabric::Read::Failure => panic!("{:?}", self.queue.read_error()),
        }
    }

    fn send(&mut self, to: ferrogin_libfabric::FiAddr, bytes: &[u8]) {
        let (buffer, mut context) = (Box::<[u8]>::from(bytes), Box::<fi_context2>::default());
        // SAFETY: the endpoint is open, which its table outlives.
        let table = unsafe { (*self.endpoint.as_ptr()).msg };
        // SAFETY: as above.
        let send = unsafe { (*table).send }.unwrap();
        let (data, of) = (buffer.as_ptr().cast(), ptr::from_mut(&mut *context).cast());
        let since = Instant::now();
        // SAFETY: bytes and context are kept until the endpoint is closed.
        while unsafe { send(self.endpoint.as_ptr(), data, buffer.len(), ptr::null_mut(), to.0, of) } != 0 {
            assert!(since.elapsed() < LIMIT, "the listener takes nothing");
            self.progress();
        }
        self.sent.push((buffer, context));
        self.in_flight += 1;
    }

    /// Sends forged messages in the name of the listener's peer `client`, of the listener, of invented endpoints, and bytes without form.
    fn attack(mut self, client: &[u8], rounds: usize) {
        let name = self.listener[NAME..].to_vec();
        let to = self.av.insert(&name).unwrap();
        let mut random = Random::new(16);
        for round in 0..rounds {
            let mut invented = name.clone();
            invented[2..8].copy_from_slice(&random.next_u64().to_le_bytes()[..6]);
            let from = [client, &name, &invented][round % 3];
            let mut message = datagram(from, &mut random);
            match round % 5 {
                0 => message.truncate(random.index(message.len())),
                1 => message.iter_mut().for_each(|byte| *byte ^= if random.one_in(20) { 0x41 } else { 0 }),
                _ => {}
            }
            self.send(to, &message);
        }
        while self.in_flight > 0 {
            self.progress();
        }
        // Bytes that no provider sends.
        let address = Address::parse(&self.listener).unwrap().endpoint();
        for len in 0..100 {
            let noise: Vec<u8> = (0..len * 40).map(|_| random.next_u64() as u8).collect();
            let _ = TcpStream::connect(&*address).unwrap().write_all(&noise);
        }
        println!("stranger forged {rounds} messages");
    }
}

/// A datagram of the endpoint `from` with one or two records.
fn datagram(from: &[u8], random: &mut Random) -> Vec<u8> {
    let mut records = Vec::new();
    for _ in 0..1 + random.below(2) {
        let kind = 1 + random.below(5) as u8;
        // A hello, another control message, a length, a payload.
        let id = u64::from(random.below(12));
        let tag = random.of(&[1 << 34 | 1, 1 << 34 | id, 1 << 32 | id, 1 << 33 | id]);
        let mut control = [&b"FGC1"[..], &[5, 2, tag as u8, from.len() as u8], &[0; 40], from].concat();
        control[16..24].copy_from_slice(&random.next_u64().to_le_bytes());
        let total = if kind == 1 { control.len() as u64 } else { u64::from(random.below(1 << 20)) };
        let mut header = [0; 32];
        (header[0], header[1]) = (kind, 2);
        header[8..16].copy_from_slice(&tag.to_le_bytes());
        header[16..24].copy_from_slice(&total.to_le_bytes());
        records.extend(header);
        if kind == 1 {
            records.extend(control);
        }
    }
    // Data, or a control message between the endpoints: a ping, a close, its confirmation.
    let (kind, flags) = [(1, 0), (2, random.below(8) as u8)][usize::from(random.one_in(4))];
    let header_len = (records.len() as u16).to_le_bytes();
    let mut prefix = [&b"FGM2"[..], &[kind, flags, from.len() as u8, 0], &header_len, &[0; 22]].concat();
    prefix[16..24].copy_from_slice(&random.next_u64().to_le_bytes());
    [&prefix, from, &records].concat()
}
