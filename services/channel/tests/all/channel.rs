//! Channels over real providers: every byte arrives once and in order; peers close, die, or do not exist.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use crate::common::traffic::{Exchange, Outcome, exchange};
use crate::common::{LIMIT, libraries, pair, patient};
use ferrogin_channel::{ADDRESS_MAX, Address, Channel, ChannelError, Config, Matching, Reactor, Reason};
use ferrogin_libfabric::{Libfabric, Version};
use ferrogin_test_support::peer::{self, Peer as Process, hex, unhex};
use ferrogin_test_support::wait::receive;
use ferrogin_test_support::{Random, repetitions};

/// The id of the first message, so that ids wrap in every exchange.
const START_ID: u32 = u32::MAX - 499;
/// Peers that are killed at a time.
const KILLERS: u64 = 5;

/// Messages each way between a server and its four clients together. FERROGIN_CHANNEL_FAULTS chooses one kind of faults of the software card.
fn messages(usual: u64, full: u64) -> u64 {
    repetitions("FERROGIN_CHANNEL_MESSAGES", usual, full)
}

/// For live peers.
fn config(way: &str) -> Config {
    let (provider, matching) = match way.strip_prefix("tags of ") {
        Some(provider) => (provider, Some(Matching::Provider)),
        None => (way, None),
    };
    Config {
        provider: provider.to_owned(),
        matching,
        source: provider.contains("tcp").then(|| "127.0.0.1".to_owned()),
        ping_after: Duration::from_millis(200),
        ..patient()
    }
}

/// For peers that die or are stopped: no delay of the machine makes a live peer look silent.
fn config_for_death(way: &str) -> Config {
    Config { lost_after: Duration::from_secs(5), ..config(way) }
}

/// Providers to test with this library: the one in FERROGIN_CHANNEL_PROVIDER, or all. shm of 1.17 hangs on unexpected tagged messages; its
/// other providers crash when peers die.
fn providers(lib: &Libfabric) -> Vec<String> {
    let all: &[&str] = match std::env::var("FERROGIN_CHANNEL_PROVIDER") {
        Ok(only) => return vec![only],
        Err(_) if lib.version() >= Version::new(2, 0) => &["tcp", "tcp;ofi_rxm", "shm", "tags of tcp"],
        Err(_) => &["tcp"],
    };
    all.iter().map(ToString::to_string).collect()
}

fn settle(exchange: Exchange, count: u64) {
    for outcome in outcomes(exchange, count) {
        assert!(outcome.good == count && outcome.bad == 0, "{outcome:?}");
    }
}

fn outcomes(exchange: Exchange, count: u64) -> [Outcome; 2] {
    let limit = LIMIT + Duration::from_millis(count * 4);
    [exchange.writes, exchange.reads].map(|direction| direction.recv_timeout(limit).expect("all callbacks come"))
}

/// Starts a child process with one of the roles below.
fn start_peer(lib: &Libfabric, provider: &str, role: &str, more: &[(&str, String)]) -> Process {
    let common = [("FERROGIN_TEST_ROLE", role.to_owned()), ("FERROGIN_TEST_PROVIDER", provider.to_owned())];
    Process::start_on("channel::child", lib.path(), &[&common[..], more].concat())
}

fn parse(digits: &str) -> Address {
    let bytes = unhex(digits);
    assert!(bytes.len() <= ADDRESS_MAX);
    Address::parse(&bytes).unwrap()
}

/// Not a test: what the children run.
#[test]
fn child() {
    let var = |name: &str| std::env::var(name).ok();
    let (Some(role), Some(library)) = (var("FERROGIN_TEST_ROLE"), peer::library()) else { return };
    let lib = Libfabric::load(Some(&library)).unwrap();
    let config = config(&var("FERROGIN_TEST_PROVIDER").unwrap());
    let number = |name: &str| var(name).and_then(|text| text.parse::<u64>().ok()).unwrap();
    match role.as_str() {
        "client" => {
            let start_id = number("FERROGIN_TEST_START") as u32;
            let reactor = Reactor::open(&lib, &Config { start_id, ..config }).unwrap();
            let channel = reactor.connect(&parse(&var("FERROGIN_TEST_ADDRESS").unwrap())).wait().unwrap();
            let (seed, count) = (number("FERROGIN_TEST_SEED"), number("FERROGIN_TEST_COUNT"));
            channel.send(seed.to_le_bytes().to_vec()).wait_for(LIMIT).unwrap();
            settle(exchange(&channel, seed, seed + 1000, count, 16), count);
            channel.close(LIMIT).wait().unwrap();
        }
        "server" => {
            let (start_id, count) = (number("FERROGIN_TEST_START") as u32, number("FERROGIN_TEST_COUNT"));
            let reactor = Reactor::open(&lib, &Config { start_id, ..config }).unwrap();
            let listener = reactor.listen().unwrap();
            println!("ADDRESS {}", hex(&listener.address().to_bytes()));
            let running: Vec<_> = (0..4)
                .map(|_| {
                    let channel = listener.accept().wait_for(LIMIT).unwrap();
                    let seed = channel.receive().wait_for(LIMIT).unwrap();
                    let seed = u64::from_le_bytes(seed.try_into().unwrap());
                    let exchange = exchange(&channel, seed + 1000, seed, count, 16);
                    (channel, exchange)
                })
                .collect();
            for (channel, exchange) in running {
                settle(exchange, count);
                let end = channel.receive().wait_for(LIMIT).unwrap_err();
                assert!(matches!(end, ChannelError::Closed { .. }), "{end}");
            }
        }
        "forever" => {
            let reactor = Reactor::open(&lib, &config).unwrap();
            let channel = match var("FERROGIN_TEST_ADDRESS") {
                Some(address) => reactor.connect(&parse(&address)).wait().unwrap(),
                None => {
                    let listener = reactor.listen().unwrap();
                    println!("ADDRESS {}", hex(&listener.address().to_bytes()));
                    listener.accept().wait().unwrap()
                }
            };
            let exchange = exchange(&channel, 1, 2, u64::MAX, 16);
            let _ = exchange.reads.recv();
        }
        other => panic!("{other}"),
    }
}

/// A server and four clients, all of them processes, with ids that soon wrap; `more` is for the environment of all.
fn four_peers(lib: &Libfabric, provider: &str, count: u64, more: &[(&str, String)]) {
    let start = ("FERROGIN_TEST_START", START_ID.to_string());
    let common = [&[start, ("FERROGIN_TEST_COUNT", count.to_string())], more].concat();
    let mut server = start_peer(lib, provider, "server", &common);
    let address = ("FERROGIN_TEST_ADDRESS", server.wait_for("ADDRESS "));
    let clients = (0..4u64).map(|seed| {
        let of_one = [address.clone(), ("FERROGIN_TEST_SEED", seed.to_string())];
        start_peer(lib, provider, "client", &[&common[..], &of_one].concat())
    });
    for mut client in clients.collect::<Vec<_>>() {
        assert!(client.succeeds(), "a client over {provider}");
    }
    assert!(server.succeeds(), "the server over {provider}");
    println!("libfabric {} over {provider}: 4 x {count} messages each way", lib.version());
}

#[test]
fn four_peers_exchange_every_byte_in_order() {
    let count = messages(1000, 20_000) / 4;
    for lib in libraries("four_peers_exchange_every_byte_in_order") {
        for provider in &providers(&lib) {
            four_peers(&lib, provider, count, &[]);
        }
    }
}

#[test]
#[ignore = "make check"]
fn four_peers_exchange_every_byte_in_order_over_the_software_card() {
    let test = "four_peers_exchange_every_byte_in_order_over_the_software_card";
    let Some(dist) = ferrogin_test_support::dist(test, &["libsoftefa-fi.so"]) else { return };
    let dist = ("FI_PROVIDER_PATH", dist.to_string_lossy().into_owned());
    let count = messages(4000, 10_000) / 4;
    let only = std::env::var("FERROGIN_CHANNEL_FAULTS").ok();
    for lib in libraries(test) {
        for faults in
            ["seed=1", "seed=2,reorder=64"].iter().filter(|kind| only.as_ref().is_none_or(|only| only == *kind))
        {
            four_peers(&lib, "softefa", count, &[dist.clone(), ("SOFTEFA_FAULTS", (*faults).to_owned())]);
        }
    }
}

/// libfabric's own provider for EFA, on the software card below verbs. Its shared memory would be another way to a peer of this host.
#[test]
#[ignore = "make check"]
fn four_peers_exchange_every_byte_in_order_over_efa() {
    let test = "four_peers_exchange_every_byte_in_order_over_efa";
    let (Some(card), Ok(lib)) = (ferrogin_test_support::verbs(test), Libfabric::load(None)) else { return };
    let shm_off = ("FI_EFA_ENABLE_SHM_TRANSFER", "0".to_owned());
    for faults in ["seed=1", "seed=2,reorder=64"] {
        let faults = [shm_off.clone(), ("SOFTEFA_FAULTS", faults.to_owned())];
        four_peers(&lib, "efa", messages(2000, 10_000) / 4, &[&card[..], &faults].concat());
    }
}

#[test]
#[ignore = "make check"]
fn close_is_confirmed_although_the_endpoint_of_the_peer_drops_undelivered_messages() {
    let test = "close_is_confirmed_although_the_endpoint_of_the_peer_drops_undelivered_messages";
    let Some(dist) = ferrogin_test_support::dist(test, &["libsoftefa-fi.so"]) else { return };
    let dist = ("FI_PROVIDER_PATH", dist.to_string_lossy().into_owned());
    let faults = ("SOFTEFA_FAULTS", "close_drops,delay_us=20000..30000".to_owned());
    for lib in libraries(test) {
        four_peers(&lib, "softefa", 8, &[dist.clone(), faults.clone()]);
    }
}

#[test]
fn futures_and_waits_work_in_one_process() {
    for lib in libraries("futures_and_waits_work_in_one_process") {
        // shm of libfabric 2.5 crashes with two endpoints in one process.
        for provider in providers(&lib).iter().filter(|provider| *provider != "shm") {
            let (_here, there, a, b) = pair(&lib, &config(provider));
            assert!(a.max_message() >= 1 << 20);
            for round in 0..200usize {
                let sent = a.send(vec![round as u8; round * 7]);
                assert_eq!(b.receive().wait_for(LIMIT).unwrap(), vec![round as u8; round * 7]);
                assert_eq!(sent.wait_for(LIMIT).unwrap().len(), round * 7);
            }
            // The message of a cancelled read goes to the next read.
            assert!(matches!(b.receive().wait_for(Duration::from_millis(20)), Err(ChannelError::Timeout { .. })));
            drop(b.receive());
            let (sender, receiver) = mpsc::channel();
            let ticket = b.read(move |result| sender.send(result).unwrap());
            b.cancel(ticket);
            assert!(matches!(receive("the end of a read", &receiver), Err(ChannelError::Cancelled { .. })));
            a.send(b"last").wait().unwrap();
            assert_eq!(b.receive().wait_for(LIMIT).unwrap(), b"last");
            // Messages that were written before a close are read after it.
            a.send(b"even later").wait().unwrap();
            a.close(LIMIT).wait().unwrap();
            assert_eq!(b.receive().wait_for(LIMIT).unwrap(), b"even later");
            assert!(matches!(b.receive().wait_for(LIMIT), Err(ChannelError::Closed { .. })));
            assert!(matches!(b.send(b"after the close").wait_for(LIMIT), Err(ChannelError::Closed { .. })));
            assert!(matches!(a.send(b"after the close").wait_for(LIMIT), Err(ChannelError::ClosedHere { .. })));
            assert!(there.shutdown(LIMIT));
        }
    }
}

#[test]
fn refusal_gives_its_reason() {
    for lib in libraries("refusal_gives_its_reason") {
        let config = Config { max_message: 1 << 20, ..config("tcp") };
        let (here, there, a, b) = pair(&lib, &config);
        let too_long = a.send(vec![0; (1 << 20) + 1]).wait_for(LIMIT).unwrap_err();
        assert!(matches!(too_long, ChannelError::TooLong { max: 0x10_0000, .. }), "{too_long}");
        let longest = a.send(vec![7; 1 << 20]);
        assert_eq!(b.receive().wait_for(LIMIT).unwrap(), vec![7; 1 << 20]);
        longest.wait_for(LIMIT).unwrap();

        let listener = here.listen().unwrap();
        let second = there.connect(listener.address()).wait().unwrap_err();
        assert!(matches!(second, ChannelError::Refused { reason: Reason::PairInUse, .. }), "{second}");
        let own = here.connect(listener.address()).wait().unwrap_err();
        assert!(matches!(own, ChannelError::BadAddress { .. }), "{own}");
        let gone = listener.address().clone();
        drop(listener);
        let third = Reactor::open(&lib, &config).unwrap();
        let refused = third.connect(&gone).wait().unwrap_err();
        assert!(matches!(refused, ChannelError::Refused { reason: Reason::NotListening, .. }), "{refused}");
        // The refusals do not affect the channel.
        b.send(b"still here").wait_for(LIMIT).unwrap();
        assert_eq!(a.receive().wait_for(LIMIT).unwrap(), b"still here");

        let address = here.listen().unwrap().address().clone();
        drop(here);
        let hurried = Config { lost_after: Duration::from_secs(1), ..config };
        let dead = Reactor::open(&lib, &hurried).unwrap().connect(&address).wait_for(2 * LIMIT).unwrap_err();
        println!("a dead listener: {dead}");
        // Its silence is detected long before the connect's limit.
        assert!(!matches!(dead, ChannelError::Timeout { .. }), "{dead}");
        assert!(dead.to_string().contains(&*address.endpoint()), "{dead}");
        assert!(matches!(a.receive().wait_for(LIMIT), Err(ChannelError::Stopped)));
    }
}

/// Waits until both directions have ended with an error that names the peer.
fn assert_ended(exchange: &Exchange, channel: &Channel) {
    for direction in [&exchange.writes, &exchange.reads] {
        let error = receive("the last callback", direction).error.expect("with an error");
        assert!(error.to_string().contains(channel.peer()), "{error} does not name {}", channel.peer());
    }
}

#[test]
#[ignore = "make check"]
fn callbacks_end_when_peer_dies() {
    let test = "callbacks_end_when_peer_dies";
    let libs = libraries(test);
    // tcp of libfabric 2.5 with its own tags frees a connection to a dead peer twice (docs/channel.md).
    let survives = |way: &String| way != "tags of tcp";
    let combinations: Vec<_> =
        libs.iter().flat_map(|lib| providers(lib).into_iter().filter(survives).map(move |way| (lib, way))).collect();
    let kills = repetitions("FERROGIN_CHANNEL_KILLS", 10, 50);
    std::thread::scope(|scope| {
        for killer in 0..KILLERS {
            let combinations = &combinations;
            scope.spawn(move || {
                for moment in (killer..kills).step_by(KILLERS as usize) {
                    let (lib, provider) = &combinations[moment as usize % combinations.len()];
                    kill_once(lib, provider, moment);
                }
            });
        }
    });
}

/// Exchanges with a child, kills it at a random moment, and waits for all callbacks.
fn kill_once(lib: &Arc<Libfabric>, provider: &str, moment: u64) {
    let mut random = Random::new(moment);
    let reactor = Reactor::open(lib, &config_for_death(provider)).unwrap();
    let (process, channel) = if random.next_u64().is_multiple_of(2) {
        let listener = reactor.listen().unwrap();
        let address = [("FERROGIN_TEST_ADDRESS", hex(&listener.address().to_bytes()))];
        let process = start_peer(lib, provider, "forever", &address);
        (process, listener.accept().wait_for(LIMIT).unwrap())
    } else {
        let mut process = start_peer(lib, provider, "forever", &[]);
        let address = parse(&process.wait_for("ADDRESS "));
        (process, reactor.connect(&address).wait_for(LIMIT).unwrap())
    };
    let exchange = exchange(&channel, 2, 1, u64::MAX, 16);
    std::thread::sleep(Duration::from_micros(random.next_u64() % 60_000));
    process.signal(libc::SIGKILL);
    assert_ended(&exchange, &channel);
}

#[test]
#[ignore = "make check"]
fn stopped_peer_is_given_up_alone() {
    for lib in libraries("stopped_peer_is_given_up_alone") {
        let reactor = Reactor::open(&lib, &config_for_death("tcp")).unwrap();
        let listener = reactor.listen().unwrap();
        let address = [("FERROGIN_TEST_ADDRESS", hex(&listener.address().to_bytes()))];
        let start = || (start_peer(&lib, "tcp", "forever", &address), listener.accept().wait_for(LIMIT).unwrap());
        let ((stopped, silent), (_running, lively)) = (start(), start());
        let running = exchange(&lively, 2, 1, 3000, 16);
        stopped.signal(libc::SIGSTOP);
        let error = loop {
            if let Err(error) = silent.receive().wait_for(LIMIT) {
                break error;
            }
        };
        assert!(error.to_string().contains("has not answered"), "{error}");
        settle(running, 3000);
    }
}
