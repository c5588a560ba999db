//! Random programs on channels, checked by an oracle: every message arrives once, whole and in order; callbacks run in
//! order.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use ferrogin_test_support::Random;
use ferrogin_test_support::wait::wait_for;

use super::fake_network::Net;
use crate::carrier::tags::Tags;
use crate::carrier::tags::endpoint::Endpoint;
use crate::proto::engine::Engine;
use crate::proto::{Callback, Opened};
use crate::{ChannelError, Config};

/// One end of a channel, with a record of its operations and callbacks.
#[derive(Default)]
pub struct End {
    pub written: u64,
    /// Numbers of the writes, in the order of their callbacks.
    pub write_calls: Vec<u64>,
    pub asked: u64,
    /// Messages in the order of their callbacks, with the numbers of their reads.
    pub read_calls: Vec<(u64, Vec<u8>)>,
    pub cancelled_reads: u64,
    pub failures: Vec<ChannelError>,
}

pub type Shared = Arc<Mutex<End>>;

pub fn body(channel: usize, number: u64) -> Vec<u8> {
    let mut random = Random::new(channel as u64 * 7919 + number);
    let len = match random.index(8) {
        0 => 0,
        1 => 5000,
        _ => random.index(100),
    };
    random.bytes(len)
}

pub struct World {
    pub net: Net,
    pub engines: Vec<Engine>,
    pub now: Instant,
    callbacks: Vec<Callback>,
}

/// Returns an engine over an endpoint.
pub fn engine(endpoint: impl Endpoint, config: &Config, now: Instant) -> Engine {
    Engine::new(Box::new(Tags::new(endpoint, config)), config.clone(), now)
}

impl World {
    pub fn new(seed: u64, hostile: bool, engines: usize, config: &Config) -> Self {
        let (net, now) = (Net::new(seed, hostile), Instant::now());
        let engines = (0..engines).map(|_| engine(net.endpoint(), config, now)).collect();
        Self::of(net, engines, now)
    }

    pub fn of(net: Net, engines: Vec<Engine>, now: Instant) -> Self {
        Self { net, engines, now, callbacks: Vec::new() }
    }

    pub fn step(&mut self, by: Duration) {
        self.now += by;
        for engine in &mut self.engines {
            engine.poll(Some(self.now));
            engine.take_callbacks(&mut self.callbacks);
            self.callbacks.drain(..).for_each(Callback::run);
        }
    }

    /// Steps until the channel of the engine has ended.
    pub fn run_to_end(&mut self, engine: usize, channel: u32) {
        while self.engines[engine].state_of(channel).is_some_and(|state| state.is_live()) {
            self.step(Duration::from_micros(50));
        }
    }

    /// Opens a channel from engine `from` to engine 0; returns its numbers at engine 0 and at `from`.
    pub fn connect(&mut self, from: usize) -> (u32, u32) {
        let (_, address) = self.engines[0].listen().unwrap();
        let found: Arc<Mutex<[Option<u32>; 2]>> = Arc::default();
        let put = |at: usize| {
            let found = Arc::clone(&found);
            Box::new(move |opened: Result<Opened, ChannelError>| {
                found.lock().unwrap()[at] = Some(opened.unwrap().channel);
            })
        };
        self.engines[from].connect(&address, Duration::from_secs(100), put(0));
        self.engines[0].accept(address.listener, 0, put(1));
        wait_for("a channel", || {
            (0..100).for_each(|_| self.step(Duration::from_micros(10)));
            let [remote, local] = *found.lock().unwrap();
            Some((local?, remote?))
        })
    }
}

fn count_up(count: &mut u64) -> u64 {
    *count += 1;
    *count - 1
}

pub fn write(engine: &mut Engine, number: u32, end: &Shared, which: usize) {
    let at = count_up(&mut end.lock().unwrap().written);
    let of_call = Arc::clone(end);
    let expected = body(which, at);
    engine.write(
        number,
        at + 1,
        expected.clone().into(),
        Box::new(move |result| {
            let mut end = of_call.lock().unwrap();
            end.write_calls.push(at);
            match result {
                Ok(bytes) => assert_eq!(bytes.as_slice(), expected, "the buffer comes back as it was"),
                Err(error) => end.failures.push(error),
            }
        }),
    );
}

/// Numbers of reads, which differ even between channels, as a reactor's do.
static TICKETS: AtomicU64 = AtomicU64::new(1 << 32);

pub fn read(engine: &mut Engine, number: u32, end: &Shared) -> u64 {
    let at = count_up(&mut end.lock().unwrap().asked);
    let (of_call, ticket) = (Arc::clone(end), TICKETS.fetch_add(1, Ordering::Relaxed));
    engine.read(
        number,
        ticket,
        Vec::new(),
        Box::new(move |result| {
            let mut end = of_call.lock().unwrap();
            match result {
                Ok((_, bytes)) => end.read_calls.push((at, bytes)),
                Err(ChannelError::Cancelled { .. }) => end.cancelled_reads += 1,
                Err(error) => end.failures.push(error),
            }
        }),
    );
    ticket
}

/// Reads until every message written at either end of a channel has arrived.
pub fn finish(world: &mut World, sides: [(usize, u32); 2], ends: &[Shared; 2]) {
    for round in 0.. {
        let mut done = true;
        for side in 0..2 {
            let written = ends[side].lock().unwrap().written;
            let (wanted, got) = {
                let end = ends[1 - side].lock().unwrap();
                (end.asked - end.cancelled_reads, end.read_calls.len() as u64)
            };
            let (engine, channel) = sides[1 - side];
            if wanted < written {
                read(&mut world.engines[engine], channel, &ends[1 - side]);
            }
            done &= got >= written;
        }
        if done {
            return;
        }
        assert!(round < 200_000, "the channel stands still: {:?}", ends[0].lock().unwrap().failures);
        world.step(Duration::from_micros(50));
    }
}

/// Runs `steps` random steps on `peers` channels, then completes all operations.
fn run(seed: u64, peers: usize, steps: usize, depth: usize, start_id: u32) {
    let config = Config { depth, start_id, max_message: 1 << 16, ..Config::default() };
    let mut world = World::new(seed, true, peers + 1, &config);
    let mut random = Random::new(!seed);
    // For each channel: engine and number at both ends.
    let channels: Vec<[(usize, u32); 2]> = (1..=peers)
        .map(|peer| {
            let (local, remote) = world.connect(peer);
            [(0, local), (peer, remote)]
        })
        .collect();
    let ends: Vec<[Shared; 2]> = (0..peers).map(|_| Default::default()).collect();
    let mut open: VecDeque<(usize, u32, u64)> = VecDeque::new();
    for _ in 0..steps {
        let (channel, side) = (random.index(peers), random.index(2));
        let (engine, number) = channels[channel][side];
        let (end, engine) = (&ends[channel][side], &mut world.engines[engine]);
        match random.index(10) {
            0..=3 => write(engine, number, end, 2 * channel + side),
            4..=6 => {
                let ticket = read(engine, number, end);
                open.push_back((channels[channel][side].0, number, ticket));
            }
            7 => {
                if let Some((engine, number, ticket)) = open.pop_front() {
                    world.engines[engine].cancel(number, ticket);
                }
            }
            _ => world.step(Duration::from_micros(50)),
        }
    }
    for (sides, ends) in channels.iter().zip(&ends) {
        finish(&mut world, *sides, ends);
    }
    for _ in 0..100_000 {
        let unfinished = |end: &Shared| {
            let end = end.lock().unwrap();
            (end.write_calls.len() as u64) < end.written
        };
        if !ends.iter().flatten().any(unfinished) {
            break;
        }
        world.step(Duration::from_micros(50));
    }
    for (channel, sides) in ends.iter().enumerate() {
        for side in 0..2 {
            let (from, to) = (sides[side].lock().unwrap(), sides[1 - side].lock().unwrap());
            assert!(from.failures.is_empty(), "{:?}", from.failures);
            assert_eq!(from.write_calls, (0..from.written).collect::<Vec<_>>(), "writes call in order, once");
            assert_eq!(to.read_calls.len() as u64, from.written, "every message once");
            assert!(to.read_calls.is_sorted_by(|a, b| a.0 < b.0), "reads call in order");
            for (number, (_, bytes)) in to.read_calls.iter().enumerate() {
                assert_eq!(*bytes, body(2 * channel + side, number as u64), "message {number} of channel {channel}");
            }
        }
    }
    // Reads that are left end once, when the channel closes.
    for (channel, sides) in ends.iter().enumerate() {
        let (engine, number) = channels[channel][0];
        world.engines[engine].close(number, Duration::from_secs(1), None);
        for _ in 0..2000 {
            world.step(Duration::from_micros(50));
        }
        for side in sides {
            let end = side.lock().unwrap();
            let ended = end.read_calls.len() as u64 + end.cancelled_reads + end.failures.len() as u64;
            assert_eq!(ended, end.asked, "every read is called once: {:?}", end.failures);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_order_of_completions_gives_the_order_of_writes(
        seed in any::<u64>(),
        peers in 1usize..5,
        steps in 1usize..400,
        depth in 1usize..20,
        wrap in any::<bool>(),
    ) {
        run(seed, peers, steps, depth, if wrap { u32::MAX - 20 } else { 0 });
    }
}

/// Messages that are sent at once leave no event that would continue the queue.
#[test]
fn queue_of_depth_one_continues_after_sends_that_are_done_at_once() {
    run(17626700024149260294, 2, 161, 1, 0);
}

#[test]
fn ids_wrap() {
    run(1, 2, 6000, 16, u32::MAX - 999);
}

/// Two engines with one channel, and `pending` reads at each side.
fn busy(hostile: bool, pending: u64) -> (World, [(usize, u32); 2], [Shared; 2]) {
    let mut world = World::new(3, hostile, 2, &Config::default());
    let (local, remote) = world.connect(1);
    let (channels, ends) = ([(0, local), (1, remote)], <[Shared; 2]>::default());
    for ((engine, number), end) in channels.iter().zip(&ends) {
        for _ in 0..pending {
            read(&mut world.engines[*engine], *number, end);
        }
    }
    (world, channels, ends)
}

#[test]
fn dead_peer_ends_every_callback_once() {
    for hostile in [false, true] {
        let (mut world, [(engine, number), _], [end, _]) = busy(hostile, 5);
        world.net.kill(1);
        for _ in 0..5 {
            write(&mut world.engines[engine], number, &end, 0);
        }
        for _ in 0..200 {
            world.step(Duration::from_millis(100));
        }
        let end = end.lock().unwrap();
        assert_eq!(end.failures.len(), 10);
        assert!(end.failures.iter().all(|error| error.to_string().contains("fake-1")), "{:?}", end.failures);
    }
}

#[test]
fn silent_peer_is_given_up() {
    let (mut world, [(engine, number), _], [end, _]) = busy(false, 3);
    let (from, limit) = (world.now, Duration::from_secs(11));
    // The other engine is no longer polled.
    let silent = world.engines.pop();
    while end.lock().unwrap().failures.is_empty() {
        world.step(Duration::from_millis(100));
        assert!(world.now.duration_since(from) <= limit + Duration::from_millis(500));
    }
    assert!(matches!(end.lock().unwrap().failures[..], [ChannelError::Silent { .. }, _, _]));
    write(&mut world.engines[engine], number, &end, 0);
    world.step(Duration::from_millis(1));
    assert_eq!(end.lock().unwrap().failures.len(), 4, "later operations end as well");
    drop(silent);
}

#[test]
fn only_the_silent_peer_is_given_up() {
    let mut world = World::new(3, false, 3, &Config::default());
    let [(to_silent, _), (to_lively, from_lively)] = [1, 2].map(|from| world.connect(from));
    let ends = <[Shared; 3]>::default();
    read(&mut world.engines[0], to_silent, &ends[0]);
    let silent = world.engines.remove(1);
    for number in 0..300 {
        write(&mut world.engines[1], from_lively, &ends[1], 0);
        read(&mut world.engines[0], to_lively, &ends[2]);
        world.step(Duration::from_millis(100));
        assert!(ends[2].lock().unwrap().failures.is_empty(), "after {number} steps");
    }
    assert!(matches!(ends[0].lock().unwrap().failures[..], [ChannelError::Silent { .. }]));
    assert!(ends[2].lock().unwrap().read_calls.len() > 290);
    drop(silent);
}

#[test]
fn peer_is_pinged_and_kept_without_a_limit() {
    let endless = Config { depth: 0, lost_after: Duration::MAX, ..Config::default() };
    let mut world = World::new(3, false, 2, &endless);
    let (local, _) = world.connect(1);
    let end = Shared::default();
    read(&mut world.engines[0], local, &end);
    let silent = world.engines.pop();
    for _ in 0..1000 {
        world.step(endless.ping_after);
    }
    let state = world.engines[0].state_of(local).unwrap();
    assert!(state.is_live() && state.pinged_at.is_some());
    assert!(end.lock().unwrap().failures.is_empty());
    drop(silent);
}

#[test]
fn stopped_engine_ends_channels_and_aborts_peers() {
    let (mut world, _, ends) = busy(false, 4);
    world.engines[0].end_all(&ChannelError::Stopped);
    for _ in 0..10 {
        world.step(Duration::from_millis(1));
    }
    assert_eq!(ends[0].lock().unwrap().failures, vec![ChannelError::Stopped; 4]);
    let remote = &ends[1].lock().unwrap().failures;
    assert!(
        remote.len() == 4 && remote.iter().all(|error| matches!(error, ChannelError::Aborted { .. })),
        "{remote:?}"
    );
}

/// A read that is cancelled between its message and its callback gives the message to the next read, whose own message
/// goes to the one after it.
#[test]
fn cancelled_read_keeps_later_messages_in_order() {
    let (mut world, [(here, local), (there, remote)], [reader, writer]) = busy(false, 0);
    let [first, _, _] = [(); 3].map(|()| read(&mut world.engines[here], local, &reader));
    (0..3).for_each(|_| write(&mut world.engines[there], remote, &writer, 0));
    for _ in 0..10 {
        for engine in &mut world.engines {
            engine.poll(Some(world.now));
        }
    }
    // Each read has its message now, and no callback has run.
    world.engines[here].cancel(local, first);
    read(&mut world.engines[here], local, &reader);
    world.step(Duration::from_millis(1));
    let reader = reader.lock().unwrap();
    assert_eq!((reader.cancelled_reads, reader.failures.len()), (1, 0));
    let right = reader.read_calls.iter().zip(0..).map(|((read, bytes), number)| (*read, *bytes == body(0, number)));
    assert_eq!(right.collect::<Vec<_>>(), [(1, true), (2, true), (3, true)]);
}

/// Another thread may leave a request's sends to the reactor, which must not sleep then.
#[test]
fn engine_does_not_wait_until_requests_are_flushed() {
    let (mut world, [(engine, number), _], [end, _]) = busy(false, 0);
    let engine = &mut world.engines[engine];
    assert!(engine.wait().is_some());
    write(engine, number, &end, 0);
    assert!(engine.wait().is_none());
    engine.flush();
    assert!(engine.wait().is_some());
}

#[test]
fn messages_read_before_a_close_count_as_written() {
    for seed in 0..50 {
        let mut world = World::new(seed, true, 2, &Config::default());
        let (local, remote) = world.connect(1);
        let [writer, reader] = <[Shared; 2]>::default();
        for _ in 0..6 {
            write(&mut world.engines[0], local, &writer, 0);
        }
        for _ in 0..4 {
            read(&mut world.engines[1], remote, &reader);
        }
        while reader.lock().unwrap().read_calls.len() < 4 {
            world.step(Duration::from_micros(50));
        }
        // Two messages stay unread. Possibly no write has completed yet.
        world.engines[1].close(remote, Duration::from_secs(1), None);
        for _ in 0..3000 {
            world.step(Duration::from_micros(50));
        }
        let writer = writer.lock().unwrap();
        assert_eq!(writer.write_calls, (0..6).collect::<Vec<_>>());
        assert!(writer.failures.len() <= 2, "{:?}", writer.failures);
        assert!(writer.failures.iter().all(|error| matches!(error, ChannelError::Closed { .. })));
    }
}
