//! One channel after another between the same two endpoint names, of the same endpoints or later ones.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ferrogin_test_support::Random;
use ferrogin_test_support::wait::wait_for;

use super::fake_network::{Crafting, Fake};
use super::malformed::hello;
use super::model::{Shared, World, body, engine, finish, read, write};
use crate::carrier::tags::endpoint::{CONTROL, Completion, Endpoint, Received};
use crate::proto::Opened;
use crate::proto::wire::{Control, Kind, Transport};
use crate::{Address, ChannelError, Config, Reason};

const STEP: Duration = Duration::from_micros(50);

/// How a channel ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// The client closes and connects again.
    Closed,
    /// The client closes and goes away; a new endpoint takes its name.
    ClosedAndGone,
    /// The client dies amid traffic; a new endpoint takes its name at once.
    Dead,
}

/// Writes and reads at random on both sides of channel `number`.
fn traffic(world: &mut World, random: &mut Random, sides: [(usize, u32); 2], ends: &[Shared; 2], number: usize) {
    for _ in 0..random.index(200) {
        let side = random.index(2);
        let (engine, channel) = sides[side];
        let engine = &mut world.engines[engine];
        match random.index(8) {
            0..=3 => write(engine, channel, &ends[side], 2 * number + side),
            4..=6 => drop(read(engine, channel, &ends[side])),
            _ => world.step(STEP),
        }
    }
}

/// Asserts that the messages read are those written on this channel, in order.
fn check(ends: &[Shared; 2], number: usize) {
    for side in 0..2 {
        for (at, (_, bytes)) in ends[1 - side].lock().unwrap().read_calls.iter().enumerate() {
            assert_eq!(*bytes, body(2 * number + side, at as u64), "message {at} of channel {number}");
        }
    }
}

fn all_called(end: &Shared) -> bool {
    let end = end.lock().unwrap();
    let failed_writes = end.written - end.write_calls.len() as u64;
    failed_writes == 0 && end.read_calls.len() + end.failures.len() >= end.asked as usize
}

fn run(seed: u64) {
    let mut random = Random::new(!seed);
    let start_id = if random.index(2) == 0 { 0 } else { u32::MAX - 20 };
    let config = Config { depth: 1 + random.index(16), start_id, max_message: 1 << 16, ..Config::default() };
    let mut world = World::new(seed, true, 2, &config);
    for number in 0..6 {
        let (local, remote) = world.connect(1);
        let (sides, ends) = ([(0, local), (1, remote)], <[Shared; 2]>::default());
        traffic(&mut world, &mut random, sides, &ends, number);
        let end = [End::Closed, End::ClosedAndGone, End::Dead][random.index(3)];
        if end != End::Dead || random.index(2) == 0 {
            finish(&mut world, sides, &ends);
            check(&ends, number);
        }
        if end != End::Dead {
            world.engines[1].close(remote, Duration::from_secs(1), None);
            world.run_to_end(1, remote);
        }
        if end != End::Closed {
            world.engines[1] = engine(world.net.replace(1), &config, world.now);
        }
        // The next channel opens, and by then every callback of this one has run.
        let (local, remote) = world.connect(1);
        assert!(all_called(&ends[0]), "after {end:?}");
        check(&ends, number);
        let failures = &ends[0].lock().unwrap().failures;
        let replaced = |error: &ChannelError| matches!(error, ChannelError::Aborted { reason: Reason::Replaced, .. });
        let expected = |error: &ChannelError| match end {
            End::Dead => replaced(error),
            _ => matches!(error, ChannelError::Closed { .. }),
        };
        assert!(failures.iter().all(expected), "after {end:?}: {failures:?}");
        world.engines[1].close(remote, Duration::from_secs(1), None);
        world.engines[0].close(local, Duration::from_secs(1), None);
        world.run_to_end(0, local);
        world.run_to_end(1, remote);
    }
}

#[test]
fn next_channel_gets_no_message_of_the_last() {
    (0..40).for_each(run);
}

/// The first challenge may be lost with the connection to the earlier endpoint.
#[test]
fn lost_path_challenge_is_repeated() {
    let mut world = World::new(1, false, 1, &Config::default());
    let (_, address) = world.engines[0].listen().unwrap();
    let mut peer = world.net.endpoint();
    let (to, name) = (peer.insert(&address.name).unwrap(), peer.abilities.name.to_vec());
    let send = |peer: &mut Fake, control: &Control, name: &[u8]| {
        peer.post(to, CONTROL | control.kind as u64, control.emit(name));
    };
    // Kind and sender's secret of the next control message.
    let next_control = |world: &mut World, peer: &mut Fake| {
        peer.receive_control(to);
        wait_for("a control message", || {
            (0..100).for_each(|_| world.step(Duration::from_millis(1)));
            let received = peer.completions().into_iter().find_map(|completion| match completion {
                Completion::Received(Received { bytes, .. }) => Control::parse(&bytes).map(|(received, _)| received),
                _ => None,
            })?;
            if received.kind == Kind::Ping {
                peer.receive_control(to);
                return None;
            }
            Some((received.kind, received.sender_secret))
        })
    };
    send(&mut peer, &hello(&address), &name);
    assert_eq!(next_control(&mut world, &mut peer).0, Kind::Welcome);
    send(&mut peer, &Control { from: 8, ..hello(&address) }, &name);
    let (first, nonce) = next_control(&mut world, &mut peer);
    assert_eq!((first, next_control(&mut world, &mut peer)), (Kind::PathChallenge, (Kind::PathChallenge, nonce)));
    send(&mut peer, &Control::new(Kind::PathResponse, 0, nonce), &[]);
    let received: Vec<_> =
        (0..3).map(|_| next_control(&mut world, &mut peer).0).take_while(|kind| *kind == Kind::PathChallenge).collect();
    assert!(received.len() < 3, "the hello is admitted");
}

/// A hello with the name of another endpoint opens no channel and ends none.
#[test]
fn forged_hello_does_not_end_a_channel() {
    let mut world = World::new(1, false, 2, &Config::default());
    let (local, remote) = world.connect(1);
    let (_, address) = world.engines[0].listen().unwrap();
    let mut forger = world.net.endpoint();
    let to = forger.insert(&address.name).unwrap();
    forger.post(to, CONTROL | Kind::Hello as u64, hello(&address).emit(b"fake-1"));
    for nonce in 0..100 {
        let response = Control::new(Kind::PathResponse, 0, nonce).emit(&[]);
        forger.post(to, CONTROL | Kind::PathResponse as u64, response);
        forger.completions();
        world.step(STEP);
    }
    let ends = <[Shared; 2]>::default();
    write(&mut world.engines[0], local, &ends[0], 0);
    write(&mut world.engines[1], remote, &ends[1], 1);
    finish(&mut world, [(0, local), (1, remote)], &ends);
    check(&ends, 0);
}

/// A challenge without the secret of the connect gets no response.
#[test]
fn forged_challenge_is_ignored() {
    let mut world = World::new(1, false, 1, &Config::default());
    let mut other = world.net.endpoint();
    let (to, name) = (other.insert(b"fake-0").unwrap(), other.abilities.name.clone());
    let address = Address { transport: Transport::Tags, listener: 0, secret: Some(5), name };
    world.engines[0].connect(&address, Duration::from_secs(10), Box::new(|_| ()));
    let secret = world.engines[0].state_of(0).unwrap().secret;
    // The hello, and later the response.
    for (secret, messages) in [(secret ^ 1, 1), (secret, 2)] {
        let challenge = Control::new(Kind::PathChallenge, 0, secret);
        other.post(to, CONTROL | challenge.kind as u64, challenge.emit(&[]));
        other.completions();
        (0..3).for_each(|_| world.step(Duration::ZERO));
        assert_eq!(world.net.unmatched(1), messages);
    }
}

/// What a peer wrote before it closed is read before its next channel takes the place of the last.
#[test]
fn next_channel_waits_for_messages_before_a_close() {
    let mut world = World::new(3, false, 2, &Config::default());
    let (local, remote) = world.connect(1);
    let [writer, reader] = <[Shared; 2]>::default();
    (0..3).for_each(|_| write(&mut world.engines[1], remote, &writer, 0));
    world.engines[1].close(remote, Duration::from_secs(1), None);
    world.run_to_end(1, remote);
    let (_, address) = world.engines[0].listen().unwrap();
    let (opened, count) = (Arc::new(AtomicUsize::new(0)), |opened: &Arc<AtomicUsize>| opened.load(Ordering::SeqCst));
    let of_call = Arc::clone(&opened);
    let done = move |result: Result<_, _>| drop(result.map(|_: Opened| of_call.fetch_add(1, Ordering::SeqCst)));
    world.engines[1].connect(&address, Duration::from_secs(100), Box::new(done));
    for number in 0..3 {
        (0..100).for_each(|_| world.step(STEP));
        assert_eq!(count(&opened), 0, "after {number} messages");
        read(&mut world.engines[0], local, &reader);
    }
    (0..100).for_each(|_| world.step(STEP));
    assert_eq!((reader.lock().unwrap().read_calls.len(), count(&opened)), (3, 1));
}
