//! Channels over real providers: every byte arrives once and in order; peers close, die or don't exist.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::common::traffic::{Exchange, Outcome, exchange};
use crate::common::{LIMIT, Way, exchange as exchange_message, libraries, pair, way_of_child, ways, with_card};
use ferrogin_channel::{ADDRESS_MAX, Address, Channel, ChannelError, Config, Reactor, Reason};
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::peer::{Peer as Process, hex, unhex};
use ferrogin_test_support::wait::receive;
use ferrogin_test_support::{Random, own_port, repetitions};

/// The first message's id, chosen so that ids wrap in every exchange.
const START_ID: u32 = u32::MAX - 499;
/// How many peers are killed at a time.
const KILLERS: u64 = 5;

/// Messages each way between a server and its four clients, in total. FERROGIN_CHANNEL_FAULTS selects one kind of
/// software-card faults.
fn messages(usual: u64, full: u64) -> u64 {
    repetitions("FERROGIN_CHANNEL_MESSAGES", usual, full)
}

/// For live peers.
fn config(way: &Way) -> Config {
    Config { ping_after: Duration::from_millis(200), ..way.config() }
}

/// For peers that die or are stopped: no delay of the machine makes a live peer look silent.
fn config_for_death(way: &Way) -> Config {
    Config { lost_after: Duration::from_secs(5), ..config(way) }
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
fn start_peer(way: &Way, role: &str, more: &[(&str, String)]) -> Process {
    let role = [("FERROGIN_TEST_ROLE", role.to_owned())];
    Process::start("channel::child", &[&role[..], &way.environment(), more].concat())
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
    let Some(role) = var("FERROGIN_TEST_ROLE") else { return };
    let config = config(&way_of_child());
    let number = |name: &str| var(name).and_then(|text| text.parse::<u64>().ok()).unwrap();
    match role.as_str() {
        "client" => {
            let start_id = number("FERROGIN_TEST_START") as u32;
            let reactor = Reactor::open(&Config { start_id, ..config }).unwrap();
            let channel = reactor.connect(&parse(&var("FERROGIN_TEST_ADDRESS").unwrap())).wait().unwrap();
            let (seed, count) = (number("FERROGIN_TEST_SEED"), number("FERROGIN_TEST_COUNT"));
            channel.send(seed.to_le_bytes().to_vec()).wait_for(LIMIT).unwrap();
            settle(exchange(&channel, seed, seed + 1000, count, 16), count);
            channel.close(LIMIT).wait().unwrap();
        }
        "server" => {
            let (start_id, count) = (number("FERROGIN_TEST_START") as u32, number("FERROGIN_TEST_COUNT"));
            let reactor = Reactor::open(&Config { start_id, ..config }).unwrap();
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
            let reactor = Reactor::open(&config).unwrap();
            let channel = match var("FERROGIN_TEST_ADDRESS") {
                Some(address) => reactor.connect(&parse(&address)).wait().unwrap(),
                None => {
                    let listener = reactor.listen().unwrap();
                    println!("ADDRESS {}", hex(&listener.address().to_bytes()));
                    listener.accept().wait().unwrap()
                }
            };
            let seed = var("FERROGIN_TEST_SEED").map_or(0, |seed| seed.parse().unwrap());
            let exchange = exchange(&channel, seed, seed + 1000, u64::MAX, 16);
            let _ = exchange.reads.recv();
        }
        other => panic!("{other}"),
    }
}

/// A server and four clients, each in its own process, with ids that soon wrap; `more` is added to the environment of
/// all.
fn four_peers(way: &Way, count: u64, more: &[(&str, String)]) {
    let start = ("FERROGIN_TEST_START", START_ID.to_string());
    let common = [&[start, ("FERROGIN_TEST_COUNT", count.to_string())], more].concat();
    let mut server = start_peer(way, "server", &common);
    let address = ("FERROGIN_TEST_ADDRESS", server.wait_for("ADDRESS "));
    let clients = (0..4u64).map(|seed| {
        let of_one = [address.clone(), ("FERROGIN_TEST_SEED", seed.to_string())];
        start_peer(way, "client", &[&common[..], &of_one].concat())
    });
    for mut client in clients.collect::<Vec<_>>() {
        assert!(client.succeeds(), "a client over {way}");
    }
    assert!(server.succeeds(), "the server over {way}");
    println!("{way}: 4 x {count} messages each way");
}

#[test]
fn four_peers_exchange_every_byte_in_order() {
    let count = messages(1000, 20_000) / 4;
    for way in ways("four_peers_exchange_every_byte_in_order") {
        four_peers(&way, count, &[]);
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
            four_peers(&Way::over(&lib, "softefa"), count, &[dist.clone(), ("SOFTEFA_FAULTS", (*faults).to_owned())]);
        }
    }
}

/// libfabric's own EFA provider, on the software card below verbs. Its shared memory would be another path to a peer on
/// this host.
#[test]
#[ignore = "make check"]
fn four_peers_exchange_every_byte_in_order_over_efa() {
    let test = "four_peers_exchange_every_byte_in_order_over_efa";
    let (Some(card), Ok(lib)) = (ferrogin_test_support::verbs(test), Libfabric::load(None)) else { return };
    let shm_off = ("FI_EFA_ENABLE_SHM_TRANSFER", "0".to_owned());
    for faults in ["seed=1", "seed=2,reorder=64"] {
        let faults = [shm_off.clone(), ("SOFTEFA_FAULTS", faults.to_owned())];
        four_peers(&Way::over(&lib, "efa"), messages(2000, 10_000) / 4, &[&card[..], &faults].concat());
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
        four_peers(&Way::over(&lib, "softefa"), 8, &[dist.clone(), faults.clone()]);
    }
}

#[test]
fn futures_and_waits_work_in_one_process() {
    // shm of libfabric 2.5 crashes with two endpoints in one process.
    for way in ways("futures_and_waits_work_in_one_process").iter().filter(|way| way.provider != "shm") {
        let (_here, there, a, b) = pair(&config(way));
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
        // Messages written before a close are read after it.
        a.send(b"even later").wait().unwrap();
        a.close(LIMIT).wait().unwrap();
        assert_eq!(b.receive().wait_for(LIMIT).unwrap(), b"even later");
        assert!(matches!(b.receive().wait_for(LIMIT), Err(ChannelError::Closed { .. })));
        assert!(matches!(b.send(b"after the close").wait_for(LIMIT), Err(ChannelError::Closed { .. })));
        assert!(matches!(a.send(b"after the close").wait_for(LIMIT), Err(ChannelError::ClosedHere { .. })));
        assert!(there.shutdown(LIMIT));
    }
}

#[test]
fn too_long_message_is_refused_and_the_channel_stays_open() {
    let (_here, _there, a, b) = pair(&Config { max_message: 1 << 20, ..config(&Way::tcp()) });
    let too_long = a.send(vec![0; (1 << 20) + 1]).wait_for(LIMIT).unwrap_err();
    assert!(matches!(too_long, ChannelError::TooLong { max: 0x10_0000, .. }), "{too_long}");
    exchange_message(&a, &b, 1 << 20);
}

#[test]
fn endpoints_have_several_channels_over_tcp() {
    let config = config(&Way::tcp());
    let (here, there, a, b) = pair(&config);
    let listener = here.listen().unwrap();
    // Another channel between the same reactors, and one from a reactor to itself.
    for reactor in [&there, &here] {
        let (c, d) = (listener.accept(), reactor.connect(listener.address()));
        let (c, d) = (c.wait_for(LIMIT).unwrap(), d.wait_for(LIMIT).unwrap());
        for (from, to) in [(&c, &d), (&d, &c), (&a, &b)] {
            exchange_message(from, to, 100);
            exchange_message(from, to, 300_000);
        }
        c.close(LIMIT).wait_for(LIMIT).unwrap();
        assert!(matches!(d.receive().wait_for(LIMIT), Err(ChannelError::Closed { .. })));
    }
    exchange_message(&a, &b, 1000);
}

/// Long messages that nobody reads hold up nothing behind them.
#[test]
fn short_messages_pass_long_ones_that_nobody_reads() {
    let (_here, _there, a, b) = pair(&config(&Way::tcp()));
    let long: Vec<_> = (0..20).map(|number| a.send(vec![number; 8 << 20])).collect();
    for len in 0..100 {
        exchange_message(&b, &a, 40 * len);
    }
    for (number, sent) in (0..).zip(long) {
        assert!(b.receive().wait_for(LIMIT).unwrap() == vec![number; 8 << 20], "message {number}");
        sent.wait_for(LIMIT).unwrap();
    }
}

/// What nobody reads stays at its writer, except for as much as the reader keeps.
#[test]
fn long_messages_over_tcp_wait_for_their_reader() {
    for (len, kept) in [(8 << 20, 2), (17 << 20, 0)] {
        let (_here, _there, a, b) = pair(&config(&Way::tcp()));
        let sent = Arc::new(AtomicUsize::new(0));
        for number in 0..4u8 {
            let sent = Arc::clone(&sent);
            a.write(vec![number; len], move |_| {
                sent.fetch_add(1, Ordering::SeqCst);
            });
        }
        (0..20).for_each(|_| exchange_message(&b, &a, 1000));
        assert!(sent.load(Ordering::SeqCst) <= kept, "{len} bytes");
        for number in 0..4 {
            assert!(b.receive().wait_for(LIMIT).unwrap() == vec![number; len], "message {number}");
            assert!(sent.load(Ordering::SeqCst) <= kept + 1 + usize::from(number), "{len} bytes");
        }
        exchange_message(&a, &b, 100);
    }
}

#[test]
fn listeners_are_where_their_source_says() {
    let v6 = std::net::TcpListener::bind("[::1]:0").is_ok();
    if !v6 {
        println!("this machine has no IPv6");
    }
    let port = format!("127.0.0.1:{}", own_port());
    for (source, host) in
        [(None, ""), (Some("127.0.0.2"), "127.0.0.2:"), (Some(&*port), &*port), (Some("::1"), "[::1]:")]
    {
        if source == Some("::1") && !v6 {
            continue;
        }
        let (here, _there, a, b) = pair(&Config { source: source.map(str::to_owned), ..config(&Way::tcp()) });
        exchange_message(&a, &b, 100);
        assert!(b.peer().starts_with(host), "{} of {source:?}", b.peer());
        drop((here, a));
    }
    let error = Reactor::open(&Config { source: Some("nowhere".to_owned()), ..config(&Way::tcp()) }).err().unwrap();
    assert!(error.to_string().contains("nowhere"), "{error}");
    let elsewhere = Config { source: Some("192.0.2.1".to_owned()), ..config(&Way::tcp()) };
    let error = Reactor::open(&elsewhere).unwrap().listen().err().unwrap();
    assert!(matches!(error, ChannelError::CannotListen(_)) && error.to_string().contains("192.0.2.1"), "{error}");
}

#[test]
fn connect_to_a_listener_that_is_gone_fails_at_once() {
    let config = config(&Way::tcp());
    let (here, there, a, b) = pair(&config);
    let address = here.listen().unwrap().address().clone();
    let fails = || {
        let gone = there.connect(&address).wait_for(LIMIT).unwrap_err();
        assert!(matches!(gone, ChannelError::Unreachable { .. }), "{gone}");
        assert!(gone.to_string().contains(&*address.endpoint()), "{gone}");
    };
    // The listener was dropped.
    fails();
    exchange_message(&a, &b, 100);
    drop(here);
    fails();
    assert!(matches!(a.receive().wait_for(LIMIT), Err(ChannelError::Stopped)));
}

#[test]
fn refusal_over_the_software_card_gives_its_reason() {
    let test = "refusal_over_the_software_card_gives_its_reason";
    with_card(test, || {
        for lib in libraries(test) {
            let config = config(&Way::over(&lib, "softefa"));
            let (here, there, a, b) = pair(&config);
            let listener = here.listen().unwrap();
            let second = there.connect(listener.address()).wait().unwrap_err();
            assert!(matches!(second, ChannelError::Refused { reason: Reason::PairInUse, .. }), "{second}");
            let own = here.connect(listener.address()).wait().unwrap_err();
            assert!(matches!(own, ChannelError::BadAddress { .. }), "{own}");
            let gone = listener.address().clone();
            drop(listener);
            let third = Reactor::open(&config).unwrap();
            let refused = third.connect(&gone).wait().unwrap_err();
            assert!(matches!(refused, ChannelError::Refused { reason: Reason::NotListening, .. }), "{refused}");
            // The refusals do not affect the channel.
            exchange_message(&b, &a, 100);
        }
    });
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
    let ways = ways("callbacks_end_when_peer_dies");
    let kills = repetitions("FERROGIN_CHANNEL_KILLS", 10, 50);
    std::thread::scope(|scope| {
        for killer in 0..KILLERS {
            let ways = &ways;
            scope.spawn(move || {
                for moment in (killer..kills).step_by(KILLERS as usize) {
                    kill_once(&ways[moment as usize % ways.len()], moment);
                }
            });
        }
    });
}

/// Exchanges with a child, kills it at a random moment, and waits for all callbacks.
fn kill_once(way: &Way, moment: u64) {
    let mut random = Random::new(moment);
    let reactor = Reactor::open(&config_for_death(way)).unwrap();
    let (process, channel) = if random.next_u64().is_multiple_of(2) {
        let listener = reactor.listen().unwrap();
        let address = [("FERROGIN_TEST_ADDRESS", hex(&listener.address().to_bytes()))];
        let process = start_peer(way, "forever", &address);
        (process, listener.accept().wait_for(LIMIT).unwrap())
    } else {
        let mut process = start_peer(way, "forever", &[]);
        let address = parse(&process.wait_for("ADDRESS "));
        (process, reactor.connect(&address).wait_for(LIMIT).unwrap())
    };
    let exchange = exchange(&channel, 1000, 0, u64::MAX, 16);
    std::thread::sleep(Duration::from_micros(random.next_u64() % 60_000));
    process.signal(libc::SIGKILL);
    assert_ended(&exchange, &channel);
}

/// One client after another is killed while messages are unread; the next one connects, and gets only its own.
fn killed_clients_are_followed(way: &Way, notices_death: bool) {
    let reactor = Reactor::open(&way.config()).unwrap();
    let listener = reactor.listen().unwrap();
    let address = ("FERROGIN_TEST_ADDRESS", hex(&listener.address().to_bytes()));
    for seed in 0..4u64 {
        let seeded = [address.clone(), ("FERROGIN_TEST_SEED", seed.to_string())];
        let client = start_peer(way, "forever", &seeded);
        let channel = listener.accept().wait_for(LIMIT).unwrap();
        settle(exchange(&channel, seed + 1000, seed, 200, 16), 200);
        client.signal(libc::SIGKILL);
        if notices_death {
            let error = std::iter::repeat_with(|| channel.receive().wait_for(LIMIT)).find_map(Result::err).unwrap();
            assert!(error.to_string().contains(channel.peer()), "{error}");
        }
    }
}

#[test]
fn killed_client_is_followed_by_the_next() {
    killed_clients_are_followed(&Way::tcp(), true);
}

#[test]
fn killed_client_over_the_software_card_is_followed_by_the_next() {
    let test = "killed_client_over_the_software_card_is_followed_by_the_next";
    // Nothing tells of the death before the limit for a silent peer.
    with_card(test, || {
        libraries(test).iter().for_each(|lib| killed_clients_are_followed(&Way::over(lib, "softefa"), false));
    });
}

#[test]
#[ignore = "make check"]
fn only_the_stopped_peer_is_given_up() {
    let way = Way::tcp();
    let reactor = Reactor::open(&config_for_death(&way)).unwrap();
    let listener = reactor.listen().unwrap();
    let address = [("FERROGIN_TEST_ADDRESS", hex(&listener.address().to_bytes()))];
    let start = || (start_peer(&way, "forever", &address), listener.accept().wait_for(LIMIT).unwrap());
    let ((stopped, silent), (_running, lively)) = (start(), start());
    let running = exchange(&lively, 1000, 0, 3000, 16);
    stopped.signal(libc::SIGSTOP);
    let error = loop {
        if let Err(error) = silent.receive().wait_for(LIMIT) {
            break error;
        }
    };
    assert!(error.to_string().contains("has not answered"), "{error}");
    settle(running, 3000);
}
