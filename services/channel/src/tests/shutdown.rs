//! Requests to reactors that are ending, cancelled operations, and limits.

use std::future::Future;
use std::hint;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use ferrogin_test_support::wait::{HANG_LIMIT, poll_until, receive, wait_until};

use super::fake_network::Net;
use super::model::{Shared as End, World, body, read, write};
use crate::carrier::tags::Tags;
use crate::proto::{Callback, Opened};
use crate::{Channel, ChannelError, Config, Listener, Reactor};

/// Returns a handle to a channel that doesn't exist: every request fails.
fn nothing(reactor: &Reactor) -> Channel {
    let (sender, receiver) = mpsc::channel();
    let open = Channel::opening(reactor.shared(), move |channel| sender.send(channel.unwrap()).unwrap());
    open(Ok(Opened { channel: 0, peer: "none".into(), max_write: 0 }));
    receiver.recv().unwrap()
}

/// A sender that finds the engine of an ended reactor locked leaves its request to the lock's holder.
#[test]
fn request_to_locked_ended_engine_is_answered() {
    let reactor = open(&Net::new(1, false));
    let channel = nothing(&reactor);
    let shared = Arc::clone(reactor.shared());
    drop(reactor);
    let (sender, receiver) = mpsc::channel();
    shared.with_engine(|_| channel.read(move |result| sender.send(result.is_err()).unwrap()));
    assert!(receive("an answer", &receiver));
}

/// Requests made just as the thread ends are answered by their senders.
#[test]
fn requests_during_thread_end_are_answered() {
    for seed in 0..50 {
        let reactor = open(&Net::new(seed, false));
        let channel = nothing(&reactor);
        let (asked, answered) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
        let (gone, answered_yet) = (AtomicUsize::new(0), Arc::clone(&answered));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut after = 0;
                    while after < 20 {
                        let answered = Arc::clone(&answered);
                        asked.fetch_add(1, Ordering::SeqCst);
                        channel.read(move |result| {
                            assert!(result.is_err());
                            answered.fetch_add(1, Ordering::SeqCst);
                        });
                        after += gone.load(Ordering::SeqCst);
                        // Unlimited requests would starve other threads of the lock.
                        poll_until("answers", || {
                            asked.load(Ordering::SeqCst) <= answered_yet.load(Ordering::SeqCst) + 20
                        });
                    }
                });
            }
            drop(reactor);
            gone.store(1, Ordering::SeqCst);
        });
        wait_until("all answers", || answered.load(Ordering::SeqCst) >= asked.load(Ordering::SeqCst));
        assert_eq!(answered.load(Ordering::SeqCst), asked.load(Ordering::SeqCst));
    }
}

/// After a panic in the engine, no operation waits forever.
#[test]
fn panic_in_engine_ends_every_callback() {
    let net = Net::new(1, false);
    let (_here, there, listener, a, _b) = connected(&net);
    let before = a.receive();
    net.break_down(1);
    let error = before.wait_for(HANG_LIMIT).unwrap_err();
    assert!(matches!(&error, ChannelError::Endpoint(_)) && error.to_string().contains("panicked"), "{error}");
    assert!(a.receive().wait_for(HANG_LIMIT).is_err() && a.send(b"late").wait_for(HANG_LIMIT).is_err());
    assert!(there.connect(listener.address()).wait_for(HANG_LIMIT).is_err());
}

/// A limit counts from its request, even after the reactor slept for a long time.
#[test]
fn limit_counts_from_its_request() {
    let mut world = World::new(1, false, 2, &Config::default());
    let (_, address) = world.engines[0].listen().unwrap();
    let (limit, ends) = (Duration::from_millis(100), <[Arc<AtomicUsize>; 2]>::default());
    let [opened, late] = ends.clone();
    let asked = world.now + Duration::from_millis(200);
    world.engines[1].advance_clock(asked);
    let count = move |result: Result<Opened, ChannelError>| {
        let end = if result.is_ok() { &opened } else { &late };
        end.fetch_add(1, Ordering::SeqCst);
    };
    world.engines[1].connect(&address, limit, Box::new(count));
    // The connecting end receives nothing yet.
    let mut callbacks = Vec::new();
    for (after, expected) in [(limit / 2, 0), (limit, 1)] {
        world.engines[1].poll(Some(asked + after));
        world.engines[1].take_callbacks(&mut callbacks);
        callbacks.drain(..).for_each(Callback::run);
        assert_eq!(ends.each_ref().map(|end| end.load(Ordering::SeqCst)), [0, expected], "after {after:?}");
    }
}

fn open(net: &Net) -> Reactor {
    let config = Config { lost_after: HANG_LIMIT, connect_within: HANG_LIMIT, ..Config::default() };
    Reactor::with_carrier(Box::new(Tags::new(net.endpoint(), &config)), &config).unwrap()
}

/// Two reactors on one network, and a channel between them.
fn connected(net: &Net) -> (Reactor, Reactor, Listener, Channel, Channel) {
    let (here, there) = (open(net), open(net));
    let listener = here.listen().unwrap();
    let (b, a) = (listener.accept(), there.connect(listener.address()));
    let (a, b) = (a.wait_for(HANG_LIMIT).unwrap(), b.wait_for(HANG_LIMIT).unwrap());
    (here, there, listener, a, b)
}

fn next(channel: &Channel) -> u8 {
    channel.receive().wait_for(HANG_LIMIT).unwrap()[0]
}

/// A reader that takes longer than any limit between its reads still gets what the peer wrote before its close.
#[test]
fn messages_before_a_close_wait_for_a_slow_reader() {
    for hostile in [false, true] {
        let config = Config::default();
        let mut world = World::new(3, hostile, 2, &config);
        let (local, remote) = world.connect(1);
        let [writer, reader] = <[End; 2]>::default();
        for _ in 0..5 {
            write(&mut world.engines[1], remote, &writer, 0);
        }
        world.engines[1].close(remote, config.lost_after, None);
        world.run_to_end(1, remote);
        for number in 0..5 {
            // In steps that the engine doesn't take for a pause of its own thread.
            for _ in 0..32 {
                world.step(config.lost_after / 8);
            }
            read(&mut world.engines[0], local, &reader);
            for _ in 0..1000 {
                world.step(Duration::from_millis(1));
            }
            let end = reader.lock().unwrap();
            assert_eq!((&end.failures[..], end.read_calls.len()), (&[][..], number + 1));
            assert_eq!(end.read_calls[number].1, body(0, number as u64));
        }
        read(&mut world.engines[0], local, &reader);
        world.step(Duration::from_millis(1));
        assert!(matches!(reader.lock().unwrap().failures[..], [ChannelError::Closed { .. }]));
    }
}

/// The message of a read that was dropped after the message arrived goes to the next read, in order.
#[test]
fn message_of_dropped_read_goes_to_next_read() {
    let (_here, _there, _listener, a, b) = connected(&Net::new(1, false));
    let reads: Vec<_> = (0..3).map(|_| b.receive()).collect();
    let (sender, receiver) = mpsc::channel();
    b.read(move |result| sender.send(result.unwrap()).unwrap());
    for number in 0..6u8 {
        a.send(vec![number]).wait_for(HANG_LIMIT).unwrap();
    }
    // By now the earlier reads have their messages.
    assert_eq!(receive("a message", &receiver), [3]);
    let [first, second, third] = reads.try_into().ok().unwrap();
    drop((second, first));
    // One message comes back twice, before one that came back once.
    let (sender, receiver) = mpsc::channel();
    let fourth = b.receive();
    b.read(move |result| sender.send(result.unwrap()).unwrap());
    assert_eq!(receive("a message", &receiver), [1]);
    drop((third, fourth));
    assert_eq!((next(&b), next(&b)), (0, 2));
    // The same after the peer has ended.
    let last = [b.receive(), b.receive()];
    let (sender, receiver) = mpsc::channel();
    b.read(move |result| sender.send(result).unwrap());
    a.close(HANG_LIMIT).wait_for(HANG_LIMIT).unwrap();
    assert!(matches!(receive("an end", &receiver), Err(ChannelError::Closed { .. })));
    drop(last);
    assert_eq!((next(&b), next(&b)), (4, 5));
    assert!(matches!(b.receive().wait_for(HANG_LIMIT), Err(ChannelError::Closed { .. })));
}

/// The message of a dropped read comes back while a later message and the next read are there already.
#[test]
fn message_of_dropped_read_precedes_later_ones() {
    let (_here, _there, _listener, a, b) = connected(&Net::new(1, false));
    // A read whose callback blocks the reactor until the test goes on.
    let block = || {
        let ((entered, has_entered), (go_on, may_go_on)) = (mpsc::channel(), mpsc::channel::<()>());
        b.read(move |result| {
            entered.send(result.unwrap()).unwrap();
            let _ = may_go_on.recv();
        });
        (has_entered, go_on)
    };
    let (first, go_on) = block();
    a.send(vec![0]).wait_for(HANG_LIMIT).unwrap();
    assert_eq!(receive("a message", &first), [0]);
    // The three messages arrive at once; the last one has no read.
    let ((second, go_on_again), dropped) = (block(), b.receive());
    b.cancel(b.read(|_| ()));
    (1..4).for_each(|number| drop(a.send(vec![number]).wait_for(HANG_LIMIT).unwrap()));
    drop(go_on);
    assert_eq!(receive("a message", &second), [1]);
    drop(dropped);
    let next_read = b.receive();
    // A request of another thread, which the engine answers now, doesn't serve the read.
    assert!(!b.is_closed());
    drop(go_on_again);
    assert_eq!((next_read.wait_for(HANG_LIMIT).unwrap(), next(&b)), (vec![2], 3));
}

/// Reads that are polled once and dropped, at any moment, lose no message.
#[test]
fn polled_and_dropped_reads_lose_no_message() {
    let (_here, _there, _listener, a, b) = connected(&Net::new(1, false));
    const MESSAGES: u32 = 300;
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..MESSAGES {
                drop(a.send(number.to_le_bytes().to_vec()).wait_for(HANG_LIMIT));
            }
        });
        let (mut expected, mut tries) = (0u32, 0u32);
        while expected < MESSAGES {
            let mut read = b.receive();
            tries += 1;
            // Not a yield, which on a busy machine lasts until every other thread has had its turn.
            (0..tries % 32 * 64).for_each(|_| hint::spin_loop());
            let polled = Pin::new(&mut read).poll(&mut Context::from_waker(Waker::noop()));
            let message = match polled {
                Poll::Ready(result) => result,
                // Some reads are waited for, so that the loop ends.
                Poll::Pending if tries % 4 == 0 => read.wait_for(HANG_LIMIT),
                Poll::Pending => continue,
            };
            let right = message.map(|bytes| bytes == expected.to_le_bytes());
            if right != Ok(true) {
                // So that the writer ends as well.
                b.abort();
            }
            assert_eq!(right, Ok(true), "message {expected}");
            expected += 1;
        }
    });
}

/// A poll with another waker drops the one before, which may own the task, and the task anything: here it waits for a
/// later message.
#[test]
fn replaced_waker_may_wait_for_its_reactor() {
    struct Waits(Channel, Channel);
    impl Wake for Waits {
        fn wake(self: Arc<Self>) {}
    }
    impl Drop for Waits {
        fn drop(&mut self) {
            let Self(a, b) = self;
            let (first, second) = (a.send(b"first"), a.send(b"second"));
            assert_eq!(b.receive().wait_for(HANG_LIMIT).unwrap(), b"second");
            first.wait_for(HANG_LIMIT).and(second.wait_for(HANG_LIMIT)).unwrap();
        }
    }
    let (_here, _there, _listener, a, b) = connected(&Net::new(1, false));
    let mut read = b.receive();
    let waker = Waker::from(Arc::new(Waits(a, b)));
    assert!(Pin::new(&mut read).poll(&mut Context::from_waker(&waker)).is_pending());
    drop(waker);
    assert!(Pin::new(&mut read).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(read.wait_for(HANG_LIMIT).unwrap(), b"first");
}

/// The channel of a dropped accept goes to the next accept.
#[test]
fn channel_of_dropped_accept_goes_to_next_accept() {
    let net = Net::new(1, false);
    let here = open(&net);
    let listener = here.listen().unwrap();
    for _ in 0..20 {
        let there = open(&net);
        let accept = listener.accept();
        let a = there.connect(listener.address()).wait_for(HANG_LIMIT).unwrap();
        drop(accept);
        let b = listener.accept().wait_for(HANG_LIMIT).unwrap();
        a.send(b"hello").wait_for(HANG_LIMIT).unwrap();
        assert_eq!(b.receive().wait_for(HANG_LIMIT).unwrap(), b"hello");
    }
}
