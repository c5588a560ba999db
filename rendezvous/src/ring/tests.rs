use super::allgather::DOMAIN;
use super::handle::Handle;
use super::survivors::CLOSE_GRACE;
use super::time_limits::ALIVE_EVERY;
use super::{Departure, Listener, Ring, RingError, Step};
use crate::claim::Claim;
use crate::dial::{Address, Dial};
use crate::frame::{Frame, FrameKind};
use crate::stream::End;
use crate::{Secret, stream};
use ferrogin_test_support::wait::{HANG_LIMIT, wait_for, wait_until};
use ferrogin_test_support::{child, untrusted};
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

fn listeners(n: usize) -> (Vec<Arc<Listener>>, Vec<[u8; 128]>) {
    let listeners: Vec<_> = (0..n).map(|_| Arc::new(Listener::open().unwrap())).collect();
    let handles = listeners.iter().map(|listener| listener.handle()).collect();
    (listeners, handles)
}

fn address(handle: &[u8; 128]) -> SocketAddr {
    Handle::parse(handle).unwrap().addresses[0]
}

/// Runs `body` as each rank, in its own thread. The ranks give up on a silent neighbour after a quarter of `timeout`.
fn ranks<T: Send + 'static>(
    n: usize,
    timeout: Duration,
    body: impl Fn(usize, Result<Ring, RingError>) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let (listeners, handles) = listeners(n);
    let body = Arc::new(body);
    let threads: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listener)| {
            let (handles, body) = (handles.clone(), body.clone());
            thread::spawn(move || {
                let ring = Ring::connect(&listener, &handles, rank, timeout);
                drop(listener);
                body(rank, ring)
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Returns rank `rank`'s block: sizes differ, one is empty, one is larger than a socket buffer.
fn block(rank: usize) -> Vec<u8> {
    let len = [0, 5, 3_000_000, 17, 100_000][rank % 5];
    (0..len).map(|i| (i * 31 + rank) as u8).collect()
}

#[test]
fn allgather_gives_each_rank_all_blocks() {
    for n in [1, 2, 3, 5, 8] {
        ranks(n, HANG_LIMIT, move |rank, ring| {
            let mut ring = ring.unwrap();
            assert_eq!((ring.rank, ring.nranks()), (rank, n));
            for _ in 0..2 {
                let all = ring.allgather(Step::RegisterWindow, Some(&block(rank))).unwrap();
                assert_eq!(all.len(), n);
                for (peer, bytes) in all.iter().enumerate() {
                    assert!(*bytes == block(peer), "rank {rank}: block of {peer}");
                }
            }
        });
    }
}

#[test]
fn failed_part_is_reported_to_all_ranks_and_ring_stays_usable() {
    ranks(4, HANG_LIMIT, |rank, ring| {
        let mut ring = ring.unwrap();
        let part = (rank != 2).then_some(&[1u8, 2, 3][..]);
        let error = ring.allgather(Step::RegisterWindow, part).unwrap_err();
        assert!(matches!(error, RingError::PeerFailed { rank: 2, step: Step::RegisterWindow }), "{error}");
        assert_eq!(ring.allgather(Step::CreateContext, Some(&[7])).unwrap(), vec![vec![7]; 4]);
    });
}

#[test]
fn closed_rank_is_named_by_all_ranks_before_deadline() {
    ranks(5, HANG_LIMIT, |rank, ring| {
        let mut ring = ring.unwrap();
        // Rank 3 may finish connect before the others, so it closes in a later step.
        ring.allgather(Step::Connect, Some(&[0])).unwrap();
        if rank == 3 {
            return;
        }
        let error = ring.allgather(Step::CreateContext, Some(&[0; 64])).unwrap_err();
        assert!(error.is_after_close() && error.failed_rank() == Some(3), "rank {rank}: {error}");
        let again = ring.allgather(Step::CreateContext, Some(&[0; 64])).unwrap_err();
        assert!(matches!(again, RingError::AlreadyFailed { failed: 3 }), "{again}");
    });
}

/// Waits for `count` frames from a ring's neighbours, outside its allgathers. The last allgather may have kept some.
fn wait_for_frames(ring: &mut Ring, count: usize, matches: impl Fn(&Frame) -> bool) {
    let mut frames: Vec<Frame> = ring.blocks.drain(..).map(|(frame, _)| frame).collect();
    wait_until("frames", || {
        for stream in [&mut ring.prev, &mut ring.next].into_iter().flatten() {
            stream.fill(Instant::now());
            frames.extend(std::iter::from_fn(|| stream.frame().unwrap()).map(|(frame, _)| frame));
        }
        frames.iter().filter(|frame| matches(frame)).count() >= count
    });
}

/// Sends a rank's own block, and nothing else.
fn send_own_block(ring: &mut Ring, step: Step) {
    let head = Frame::new(FrameKind::Block, step as u16, ring.sequence, ring.rank);
    ring.next.as_mut().unwrap().send(head, &[]);
}

/// Rank 2 exits during the call while rank 3, its next rank, is late. Rank 1, before rank 2, reports it, and no rank
/// blames rank 3.
#[test]
fn rank_that_ends_is_named_while_its_next_rank_is_late() {
    let reported = Barrier::new(3);
    ranks(4, HANG_LIMIT, move |rank, ring| {
        let mut ring = ring.unwrap();
        ring.allgather(Step::Connect, Some(&[0])).unwrap();
        if rank == 2 {
            return wait_for_frames(&mut ring, 2, |frame| frame.kind == FrameKind::Block);
        }
        if rank == 3 {
            reported.wait();
        }
        let error = ring.allgather(Step::RegisterWindow, Some(&[])).unwrap_err();
        assert_eq!(error.failed_rank(), Some(2), "rank {rank}: {error}");
        assert!(!matches!(error, RingError::Timeout { .. }), "rank {rank}: {error}");
        if rank < 2 {
            reported.wait();
        }
    });
}

/// Rank 2 hangs after its own block. Rank 1 needs no other block from it, and reports rank 2 in the next call. The
/// report reaches the ranks that are still waiting, which name rank 2 at their deadline.
#[test]
fn report_of_next_call_names_rank_at_deadline() {
    let (finished, clocks) = (Barrier::new(4), Mutex::new(Vec::<Arc<AtomicBool>>::new()));
    // The timeout is so long that no rank notices rank 2's silence.
    ranks(4, 100 * HANG_LIMIT, move |rank, ring| {
        let mut ring = ring.unwrap();
        ring.allgather(Step::Connect, Some(&[0])).unwrap();
        let step = Step::RegisterWindow;
        match rank {
            1 => {
                ring.allgather(step, Some(&[])).unwrap();
                ring.fail(Step::CreateContext, ring.sequence, &RingError::PeerFailed { rank: 2, step });
            }
            2 => {
                send_own_block(&mut ring, step);
                // One from rank 1, and one through ranks 0 and 3.
                wait_for_frames(&mut ring, 2, Frame::is_abort);
                clocks.lock().unwrap().iter().for_each(|clock| clock.store(true, Ordering::SeqCst));
            }
            _ => {
                clocks.lock().unwrap().push(ring.clock.clone());
                let error = ring.allgather(step, Some(&[])).unwrap_err();
                assert!(matches!(error, RingError::Aborted { failed: 2, .. }), "rank {rank}: {error}");
            }
        }
        finished.wait();
    });
}

/// The rank whose deadline passes first names the hanging rank, and tells the others.
#[test]
fn hanging_rank_is_named_at_deadline() {
    let finished = Barrier::new(3);
    ranks(3, HANG_LIMIT, move |rank, ring| {
        let mut ring = ring.unwrap();
        ring.allgather(Step::Connect, Some(&[0])).unwrap();
        if rank == 2 {
            ring.clock.store(true, Ordering::SeqCst);
        }
        let error = (rank != 1).then(|| ring.allgather(Step::CreateContext, Some(&[0; 64])).unwrap_err());
        finished.wait();
        let Some(error) = error else { return };
        assert_eq!(error.failed_rank(), Some(1), "rank {rank}: {error}");
        assert_eq!(matches!(error, RingError::Timeout { .. }), rank == 2, "rank {rank}: {error}");
        let text = error.to_string();
        assert!(text.contains("rank 1") && text.contains("log"), "{text}");
    });
}

/// Rank 2 of five stops after sending its own block: every other rank names rank 2, even those that lack running ranks'
/// blocks, which the stopped rank should have passed on.
#[test]
#[ignore = "make check"]
fn rank_stopped_between_two_blocks_is_named_by_all_ranks() {
    let together = Barrier::new(5);
    // The ranks give up on a silent neighbour after 10 s.
    ranks(5, Duration::from_secs(40), move |rank, ring| {
        let mut ring = ring.unwrap();
        ring.allgather(Step::Connect, Some(&[0])).unwrap();
        together.wait();
        if rank == 2 {
            send_own_block(&mut ring, Step::RegisterWindow);
            together.wait();
            return;
        }
        let error = ring.allgather(Step::RegisterWindow, Some(&[])).map(drop);
        let failed = error.as_ref().err().and_then(RingError::failed_rank);
        together.wait();
        // Rank 1 needs no block from rank 2, so it may succeed.
        assert!(failed == Some(2) || rank == 1 && error.is_ok(), "rank {rank}: {error:?}");
    });
}

/// A rank that waits for a late one says so, and its next rank doesn't take it for silent.
#[test]
#[ignore = "make check"]
fn rank_that_waits_is_not_silent() {
    // The ranks give up on a silent neighbour after 6 s.
    ranks(3, Duration::from_secs(24), move |rank, ring| {
        let mut ring = ring.unwrap();
        ring.allgather(Step::Connect, Some(&[0])).unwrap();
        if rank == 0 {
            thread::sleep(Duration::from_secs(8));
        }
        ring.allgather(Step::RegisterWindow, Some(&[])).unwrap();
    });
}

/// A rank that connects to one that has already failed gets that rank's report.
#[test]
fn late_rank_learns_which_rank_failed() {
    let (mut listeners, handles) = listeners(3);
    listeners[2].close();
    let (listener_0, listener_1) = (listeners[0].clone(), listeners[1].clone());
    let error = Ring::connect(&listener_1, &handles, 1, HANG_LIMIT).unwrap_err();
    assert!(matches!(error, RingError::Unreachable { rank: 2, .. }), "{error}");
    assert!(error.to_string().contains(&address(&handles[2]).to_string()), "{error}");
    listeners.clear();
    // Finishes once rank 0 has the report.
    let close = thread::spawn(move || drop(listener_1));
    let error = match Ring::connect(&listener_0, &handles, 0, HANG_LIMIT) {
        Err(error) => error,
        Ok(mut ring) => ring.allgather(Step::Connect, Some(&[])).unwrap_err(),
    };
    assert!(matches!(error, RingError::Aborted { reporter: 1, failed: 2, .. }), "{error}");
    close.join().unwrap();
}

#[test]
fn different_calls_are_reported() {
    ranks(2, HANG_LIMIT, |rank, ring| {
        let mut ring = ring.unwrap();
        let step = if rank == 0 { Step::RegisterWindow } else { Step::CreateContext };
        let error = ring.allgather(step, Some(&[0; 64])).unwrap_err();
        assert!(matches!(error, RingError::DifferentCall { .. }), "{error}");
    });
}

#[test]
fn rank_closed_before_connect_is_named_before_deadline() {
    let (mut listeners, handles) = listeners(4);
    drop(listeners.remove(2));
    let threads: Vec<_> = [0, 1, 3]
        .into_iter()
        .zip(listeners)
        .map(|(rank, listener)| {
            let handles = handles.clone();
            thread::spawn(move || {
                let error = match Ring::connect(&listener, &handles, rank, HANG_LIMIT) {
                    Err(error) => error,
                    Ok(mut ring) => ring.allgather(Step::Connect, Some(&[])).unwrap_err(),
                };
                (rank, error)
            })
        })
        .collect();
    for thread in threads {
        let (rank, error) = thread.join().unwrap();
        assert_eq!(matches!(error, RingError::Unreachable { .. }), rank == 1, "rank {rank}: {error}");
        assert_eq!(error.failed_rank(), Some(2), "rank {rank}: {error}");
    }
}

#[test]
fn missing_rank_is_named_at_deadline() {
    let (listeners, handles) = listeners(2);
    let error = Ring::connect(&listeners[0], &handles, 0, Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, RingError::Timeout { rank: 1, step: Step::Connect, seconds: 1, .. }), "{error}");
    let at = address(&handles[1]).to_string();
    assert!(error.to_string().contains(&at), "{at} in {error}");
}

/// No host has this address, so nothing answers, or a router reports it.
#[test]
fn host_that_does_not_answer_is_named_before_deadline() {
    let (listeners, mut handles) = listeners(2);
    let nowhere: SocketAddr = "192.0.2.1:4660".parse().unwrap();
    handles[1] = Handle { secret: Secret::default(), addresses: vec![nowhere] }.emit();
    let error = Ring::connect(&listeners[0], &handles, 0, Duration::from_secs(4)).unwrap_err();
    assert!(matches!(error, RingError::Unreachable { rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("192.0.2.1:4660") && error.to_string().contains("firewall"), "{error}");
}

/// The peers are there first: half send nothing, half send other bytes, and one speaks the protocol without the secret.
#[test]
fn peers_without_secret_are_refused() {
    let (listeners, handles) = listeners(2);
    let at = address(&handles[1]);
    let mut sockets: Vec<_> = (0..20).map(|_| TcpStream::connect(at).unwrap()).collect();
    for socket in sockets.iter_mut().step_by(2) {
        socket.write_all(&[0xa5; 200]).unwrap();
    }
    let claim = Claim { rank: 0, nranks: 2, called: 1 };
    let mut forged = Dial::new(vec![Address::Tcp(at)], DOMAIN, Secret::new([7; 16]), claim);
    let forged = thread::spawn(move || {
        loop {
            match forged.poll(Instant::now()) {
                Ok(None) if forged.is_refused() => break "refused".to_owned(),
                Ok(None) => drop(stream::wait(&mut [], Instant::now() + Duration::from_millis(1))),
                result => break result.unwrap_err().to_string(),
            }
        }
    });
    let threads: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listener)| {
            let handles = handles.clone();
            thread::spawn(move || {
                let mut ring = Ring::connect(&listener, &handles, rank, HANG_LIMIT).unwrap();
                ring.allgather(Step::Connect, Some(&[rank as u8])).unwrap()
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), vec![vec![0], vec![1]]);
    }
    let error = forged.join().unwrap();
    assert!(error.contains("refused"), "{error}");
    drop(sockets);
}

/// Runs in the other process of [`set_up_completes_despite_silent_connections`].
#[test]
fn untrusted_process() {
    untrusted::hold();
}

/// The silent connections are there from before a rank connects until all are done. Then the ports are closed.
#[test]
fn set_up_completes_despite_silent_connections() {
    let test = "set_up_completes_despite_silent_connections";
    let as_nobody = untrusted::have_second_user(test);
    child::run(test, &[], || {
        // Each listener keeps 256 connections, plus those that it's about to drop.
        assert!(untrusted::limit_descriptors(1600));
        let (listeners, handles) = listeners(3);
        let addresses: Vec<SocketAddr> = handles.iter().map(address).collect();
        let process = "ring::tests::untrusted_process";
        let _silent = untrusted::start_silent(process, &addresses, untrusted::silent(), as_nobody);
        let connect = |(rank, listener): (usize, Arc<Listener>)| {
            let handles = handles.clone();
            thread::spawn(move || {
                let mut ring = Ring::connect(&listener, &handles, rank, HANG_LIMIT).unwrap();
                assert_eq!(ring.allgather(Step::Connect, Some(&[rank as u8])).unwrap(), [[0], [1], [2]]);
                ring
            })
        };
        let threads: Vec<_> = listeners.into_iter().enumerate().map(connect).collect();
        let mut rings: Vec<Ring> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for address in &addresses {
            let late = TcpStream::connect(address).unwrap_err();
            assert_eq!(late.kind(), ErrorKind::ConnectionRefused, "{address} still accepts");
        }
        thread::scope(|scope| {
            for ring in &mut rings {
                scope.spawn(|| ring.allgather(Step::RegisterWindow, Some(&block(2))).unwrap());
            }
        });
    });
}

#[test]
fn handles_in_wrong_order_and_invalid_ones_are_refused() {
    let (listeners, mut handles) = listeners(3);
    handles.swap(0, 1);
    let error = Ring::connect(&listeners[0], &handles, 0, HANG_LIMIT).unwrap_err();
    assert!(matches!(error, RingError::WrongOrder { rank: 0 }), "{error}");
    handles.swap(0, 1);
    handles[2] = [0; 128];
    let error = Ring::connect(&listeners[1], &handles, 1, HANG_LIMIT).unwrap_err();
    assert!(matches!(error, RingError::BadHandle { rank: 2, .. }), "{error}");
}

#[test]
fn rank_that_another_one_blames_is_lost_to_all() {
    let mut rings = Ring::threads(4, HANG_LIMIT).expect("rings");
    let mut blaming = rings.pop().expect("the last rank");
    blaming.blame(1);
    // It closes right away.
    drop(blaming);
    let now = Instant::now();
    for _ in 0..rings.len() {
        for ring in &mut rings {
            let _ = ring.lost(now);
        }
    }
    let lost: Vec<_> = rings.iter_mut().map(|ring| ring.lost(now)).collect();
    // A rank knows about itself.
    assert_eq!(lost, [Some(1), None, Some(1)]);
}

/// The neighbours of a rank that exits or closes its communicator tell the others. One that closes it isn't lost.
#[test]
fn rank_that_ends_between_calls_is_lost_to_all() {
    for closes in [false, true] {
        let all = Arc::new(Barrier::new(4));
        ranks(4, HANG_LIMIT, move |rank, ring| {
            let mut ring = ring.unwrap();
            ring.allgather(Step::Barrier, Some(&[])).unwrap();
            if rank == 2 {
                if !closes {
                    (ring.next, ring.prev) = (None, None);
                }
                drop(ring);
                all.wait();
                if closes {
                    all.wait();
                }
                return;
            }
            // With each look, the rank's clock moves past the grace period.
            let mut now = Instant::now();
            let mut look = |ring: &mut Ring| {
                now += Duration::from_secs(3);
                let lost = ring.lost(now);
                (lost, ring.has_closed(2, now + Duration::from_secs(3)))
            };
            if closes {
                all.wait();
                wait_until("the close of rank 2", || {
                    let (lost, has_closed) = look(&mut ring);
                    assert_eq!(lost, None, "rank {rank}");
                    has_closed
                });
                assert!(!ring.has_closed(rank, now + Duration::from_secs(9)));
                // Rank 0 hears it from one of the others.
                all.wait();
            } else {
                let mut lost = None;
                wait_until("the loss of rank 2", || {
                    lost = look(&mut ring).0;
                    lost.is_some()
                });
                assert_eq!(lost, Some(2), "rank {rank}");
                all.wait();
                let error = ring.allgather(Step::Barrier, Some(&[])).unwrap_err();
                assert_eq!(error.failed_rank(), Some(2), "{error}");
            }
        });
    }
}

/// Looks at the other ranks `GRACE` from now and later, until one is lost.
fn lost_later(ring: &mut Ring) -> usize {
    let mut now = Instant::now();
    wait_for("a lost rank", || {
        now += Duration::from_secs(3);
        ring.lost(now)
    })
}

/// A rank that ends because of another one's end isn't the suspect.
#[test]
fn rank_that_ended_first_is_lost() {
    let mut rings = Ring::threads(3, HANG_LIMIT).unwrap();
    let now = Instant::now();
    let end = |ring: &mut Ring| (ring.next, ring.prev) = (None, None);
    end(&mut rings[2]);
    assert_eq!(rings[1].lost(now), None);
    end(&mut rings[0]);
    assert_eq!(lost_later(&mut rings[1]), 2);
}

/// Rank 0 loses rank 1, tells rank 3, and closes its communicator. Rank 3 doesn't take that for another rank's end.
#[test]
fn rank_that_reports_a_failure_and_closes_is_not_lost() {
    let mut rings = Ring::threads(4, HANG_LIMIT).unwrap();
    (rings[1].next, rings[1].prev) = (None, None);
    assert_eq!(lost_later(&mut rings[0]), 1);
    let mut far = rings.remove(3);
    drop(rings.remove(0));
    let mut now = Instant::now();
    for _ in 0..3 {
        now += Duration::from_secs(3);
        assert_eq!(far.lost(now), Some(1));
    }
    assert_eq!(far.prev.as_ref().unwrap().ended(), None);
    assert_eq!(far.next.as_ref().unwrap().ended(), Some(&End::Left));
}

/// Reads what the previous rank has sent until it was heard at `now`.
fn wait_until_heard(ring: &mut Ring, now: Instant) {
    wait_until("a frame of the previous rank", || {
        ring.receive(Step::Barrier, u32::MAX, now).unwrap();
        ring.prev.as_ref().unwrap().heard() == now
    });
}

#[test]
fn rank_between_calls_says_that_it_runs() {
    let mut rings = Ring::threads(2, HANG_LIMIT).unwrap();
    let mut now = Instant::now();
    for _ in 0..3 {
        now += ALIVE_EVERY;
        assert_eq!(rings[0].lost(now), None);
        wait_until_heard(&mut rings[1], now);
        // No sooner than twice a second.
        rings[0].lost(now + ALIVE_EVERY / 2);
        rings[1].receive(Step::Barrier, u32::MAX, now + ALIVE_EVERY / 2).unwrap();
        assert_eq!(rings[1].prev.as_ref().unwrap().heard(), now);
    }
}

#[test]
fn neighbour_that_does_not_read_gets_no_backlog() {
    let mut rings = Ring::threads(2, HANG_LIMIT).unwrap();
    let mut now = Instant::now();
    for _ in 0..100_000 {
        now += ALIVE_EVERY;
        rings[0].lost(now);
    }
    let unsent = rings[0].next.as_ref().unwrap().unsent();
    assert!((1..=Frame::HEAD).contains(&unsent), "{unsent} bytes");
    wait_until_heard(&mut rings[1], now);
    assert_eq!(rings[0].lost(now + ALIVE_EVERY), None);
    wait_until_heard(&mut rings[1], now + ALIVE_EVERY);
}

/// Each minute, the rank that waits names the rank whose block is missing.
#[test]
fn late_rank_is_named_each_minute() {
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut rings = Ring::threads(3, HANG_LIMIT).unwrap();
    // Rank 1 makes the call, and rank 2 is late.
    let mut late = rings.remove(2);
    let ahead = rings[1].ahead.clone();
    rings[1].set_warn(|line| LINES.lock().unwrap().push(line.to_owned()));
    let calls = rings.into_iter().map(|mut ring| thread::spawn(move || ring.allgather(Step::CreateContext, Some(&[]))));
    let calls: Vec<_> = calls.collect();
    let mut now = Instant::now();
    wait_until("rank 1 in the call", || {
        late.lost(now);
        !late.blocks.is_empty()
    });
    for minute in 1..=3 {
        ahead.fetch_add(61, Ordering::SeqCst);
        wait_until("a line", || {
            now += ALIVE_EVERY;
            assert_eq!(late.lost(now), None);
            LINES.lock().unwrap().len() >= minute
        });
    }
    late.allgather(Step::CreateContext, Some(&[])).unwrap();
    calls.into_iter().for_each(|call| drop(call.join().unwrap().unwrap()));
    for line in LINES.lock().unwrap().iter() {
        for part in ["rank 1 has waited", "in createContext for rank 2", "the wait goes on"] {
            assert!(line.contains(part), "{part} in {line}");
        }
    }
}

#[test]
fn late_rank_says_how_late_it_is() {
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut rings = Ring::threads(2, HANG_LIMIT).unwrap();
    let mut late = rings.remove(1);
    let mut other = rings.remove(0);
    let other = thread::spawn(move || other.allgather(Step::CreateContext, Some(&[0])).map(drop));
    late.set_warn(|line| LINES.lock().unwrap().push(line.to_owned()));
    wait_until("the other rank's block", || {
        late.lost(Instant::now() - Duration::from_secs(61));
        !late.blocks.is_empty()
    });
    late.allgather(Step::CreateContext, Some(&[1])).unwrap();
    other.join().unwrap().unwrap();
    let lines = LINES.lock().unwrap();
    assert!(
        lines.len() == 1 && lines[0].contains("rank 1 is late to createContext") && lines[0].contains("61 s"),
        "{lines:?}"
    );
}

/// Rank 0 gives up on rank 1, which was stopped before the call. Rank 1 doesn't look for the cause in its own log.
#[test]
fn rank_that_was_given_up_says_how_late_it_was() {
    let mut rings = Ring::threads(2, HANG_LIMIT).unwrap();
    let error = rings[0].timed_out(1, Step::CreateContext, Duration::from_secs(60));
    rings[0].fail(Step::CreateContext, 0, &error);
    assert_eq!(rings[1].lost(Instant::now() + Duration::from_secs(61)), None);
    let error = rings[1].allgather(Step::CreateContext, Some(&[])).unwrap_err();
    assert!(matches!(error, RingError::Late { rank: 1, reporter: 0, seconds: 60..62, .. }), "{error:?}");
    assert!(error.to_string().contains("rank 0 gave up on this rank, rank 1, in createContext"), "{error}");
}

/// Rings of `n` ranks that go on without ranks that go.
fn rings_that_go_on(n: usize) -> Vec<Option<Ring>> {
    let (listeners, handles) = listeners(n);
    let mut rings = Ring::threads(n, HANG_LIMIT).unwrap();
    for (ring, listener) in rings.iter_mut().zip(&listeners) {
        ring.go_on_without(listener, &handles).unwrap();
    }
    rings.into_iter().map(Some).collect()
}

/// Ends a rank without a word, as the end of its process does.
fn end(ring: Option<Ring>) {
    let mut ring = ring.unwrap();
    (ring.prev, ring.next, ring.survivors) = (None, None, None);
}

/// Runs the rings until each of them knows that exactly these ranks have gone, and how, unless several have at once.
fn run_until_all_know(rings: &mut [Option<Ring>], gone: &[(usize, Departure)]) {
    wait_until("news to all", || {
        let now = Instant::now();
        let known = rings.iter_mut().flatten().map(|ring| ring.departures(std::iter::empty(), now).unwrap());
        let ranks = |gone: &[(usize, Departure)]| gone.iter().map(|(rank, _)| *rank).collect::<Vec<_>>();
        known.filter(|known| ranks(known) != ranks(gone) || (gone.len() == 1 && known != gone)).count() == 0
    });
}

#[test]
fn ring_closes_up_around_ranks_that_end_and_all_learn_it() {
    use Departure::{Closed, Lost};
    type Gone = &'static [(usize, Departure)];
    let cases: [(usize, &[Gone]); 9] = [
        (2, &[&[(1, Lost)]]),
        (2, &[&[(0, Closed)]]),
        (3, &[&[(0, Lost)], &[(2, Lost)]]),
        (4, &[&[(1, Lost), (2, Lost)]]),
        (4, &[&[(0, Lost), (2, Lost)]]),
        (4, &[&[(3, Closed)], &[(1, Lost)]]),
        (5, &[&[(0, Lost), (1, Lost), (4, Lost)]]),
        (5, &[&[(2, Closed)], &[(3, Closed)], &[(1, Lost)]]),
        (8, &[&[(3, Lost)], &[(4, Lost), (6, Lost)], &[(0, Lost)]]),
    ];
    for (n, steps) in cases {
        let (mut rings, mut gone) = (rings_that_go_on(n), Vec::new());
        for step in steps {
            for (rank, departure) in *step {
                match departure {
                    Lost => end(rings[*rank].take()),
                    Closed => drop(rings[*rank].take()),
                }
            }
            gone.extend_from_slice(step);
            gone.sort_by_key(|(rank, _)| *rank);
            run_until_all_know(&mut rings, &gone);
        }
        let survivor = rings.iter_mut().flatten().next().unwrap();
        let error = survivor.allgather(Step::Barrier, Some(&[])).unwrap_err();
        // The first one, if they went one by one.
        let first = steps[0].iter().any(|(first, _)| error.failed_rank() == Some(*first));
        assert!(first && matches!(error, RingError::Gone { .. }), "{n}: {error:?}");
    }
}

/// Returns which ranks have gone, and how, as far as this one knows.
fn gone(ring: &Ring) -> Vec<(usize, Departure)> {
    ring.survivors.as_ref().unwrap().gone.iter().map(|(rank, (departure, _))| (*rank, *departure)).collect()
}

#[test]
fn ranks_that_refuse_or_do_not_answer_a_call_have_gone() {
    use Departure::{Closed, Lost};
    let mut rings = rings_that_go_on(5);
    [1, 2].into_iter().for_each(|rank| end(rings[rank].take()));
    let mut ring = rings[0].take().unwrap();
    wait_until("a refused call", || {
        ring.departures(std::iter::empty(), Instant::now()).unwrap();
        gone(&ring) == [(1, Lost), (2, Closed)]
    });
    // Rank 3 listens, but is stopped.
    let mut now = Instant::now();
    wait_until("the end of rank 3's time", || {
        now += ALIVE_EVERY;
        ring.departures(std::iter::empty(), now).unwrap();
        gone(&ring) == [(1, Lost), (2, Closed), (3, Lost)]
    });
}

/// Ranks 1 and 3 are stopped, and only rank 0 knows that rank 1 is lost.
#[test]
fn new_previous_rank_tells_which_ranks_have_gone() {
    let mut rings = rings_that_go_on(4);
    let [mut first, mut second] = [0, 2].map(|rank| rings[rank].take().unwrap());
    let began = Instant::now();
    wait_until("a new previous rank", || {
        first.departures([1].into_iter(), Instant::now()).unwrap();
        // To rank 2, rank 1 isn't silent for long.
        second.departures(std::iter::empty(), began).unwrap();
        second.prev.is_some() && second.survivors.as_ref().unwrap().neighbours == [3, 0]
    });
    assert_eq!(gone(&second), [(1, Departure::Lost)]);
}

#[test]
fn call_with_a_wrong_claim_is_dropped() {
    let mut rings = rings_that_go_on(3);
    let ring = rings[0].as_mut().unwrap();
    let Handle { secret, addresses } = ring.survivors.as_ref().unwrap().handles[0].clone();
    let right = Claim { rank: 2, nranks: 3, called: 0 };
    for claim in [
        Claim { rank: 0, ..right },
        Claim { rank: 3, ..right },
        Claim { nranks: 4, ..right },
        Claim { called: 1, ..right },
    ] {
        let addresses = addresses.iter().copied().map(Address::Tcp).collect();
        let mut dial = Dial::new(addresses, DOMAIN, secret, claim);
        let mut stream = wait_for("the connection", || {
            ring.departures(std::iter::empty(), Instant::now()).unwrap();
            dial.poll(Instant::now()).unwrap()
        });
        wait_until("its end", || {
            ring.departures(std::iter::empty(), Instant::now()).unwrap();
            assert!(ring.survivors.as_ref().unwrap().candidate.is_none(), "{claim:?}");
            stream.fill(Instant::now());
            stream.ended().is_some()
        });
    }
}

/// The others may be about to close theirs; one whose requests failed has lost it already.
#[test]
fn rank_that_closes_counts_as_gone_later_unless_it_is_reported() {
    let mut rings = rings_that_go_on(3);
    drop(rings[1].take());
    let (mut ring, now) = (rings[0].take().unwrap(), Instant::now());
    wait_until("the close", || {
        assert_eq!(ring.departures([3, usize::MAX].into_iter(), now).unwrap(), [], "there are no such ranks");
        ring.survivors.as_ref().unwrap().has_gone(1)
    });
    assert_eq!(ring.departures(std::iter::empty(), now + CLOSE_GRACE).unwrap(), [(1, Departure::Closed)]);
    assert_eq!(ring.departures([1].into_iter(), now).unwrap(), [(1, Departure::Lost)]);
}

/// A card found that rank 2 doesn't answer; its process runs, and learns that the others go on without it.
#[test]
fn rank_that_others_have_given_up_on_learns_it() {
    let mut rings = rings_that_go_on(4);
    rings[0].as_mut().unwrap().departures([2].into_iter(), Instant::now()).unwrap();
    let mut given_up = rings[2].take().unwrap();
    run_until_all_know(&mut rings, &[(2, Departure::Lost)]);
    let error = given_up.departures(std::iter::empty(), Instant::now()).unwrap_err();
    assert!(matches!(error, RingError::GivenUp { rank: 2 }), "{error:?}");
    assert!(matches!(given_up.allgather(Step::Barrier, None).unwrap_err(), RingError::GivenUp { rank: 2 }));
}

#[test]
fn rank_that_ends_during_a_call_ends_the_call_on_all_ranks_that_go_on() {
    let mut rings = rings_that_go_on(4);
    end(rings[1].take());
    let mut threads = Vec::new();
    for mut ring in rings.into_iter().flatten() {
        threads.push(thread::spawn(move || {
            let error = ring.allgather(Step::Barrier, Some(&[1])).unwrap_err();
            assert_eq!(error.failed_rank(), Some(1), "{error:?}");
            ring
        }));
    }
    let mut rings: Vec<_> = threads.into_iter().map(|thread| Some(thread.join().unwrap())).collect();
    run_until_all_know(&mut rings, &[(1, Departure::Lost)]);
}

/// Rank 1 has made the call and closed before rank 0 reads what it sent.
#[test]
fn call_that_all_ranks_have_made_succeeds_though_one_has_gone() {
    let [mut first, mut second] = <[_; 2]>::try_from(rings_that_go_on(2)).unwrap().map(Option::unwrap);
    let block = Frame::new(FrameKind::Block, Step::Barrier as u16, first.sequence, 0);
    first.next.as_mut().unwrap().send(block, &[0]);
    assert_eq!(second.allgather(Step::Barrier, Some(&[1])).unwrap(), [[0], [1]]);
    drop(second);
    assert_eq!(first.allgather(Step::Barrier, Some(&[0])).unwrap(), [[0], [1]]);
    let error = first.allgather(Step::Barrier, Some(&[0])).unwrap_err();
    assert!(matches!(error, RingError::Gone { rank: 1, .. }), "{error:?}");
}

/// Rank 1 says nothing for FERROGIN_TIMEOUT, while its streams stay open.
#[test]
fn rank_that_is_stopped_is_given_up() {
    let mut rings = rings_that_go_on(3);
    let stopped = rings[1].take().unwrap();
    let mut now = Instant::now();
    wait_until("the end of rank 1's time", || {
        now += ALIVE_EVERY;
        let known = rings.iter_mut().flatten().map(|ring| ring.departures(std::iter::empty(), now).unwrap());
        known.filter(|known| *known == [(1, Departure::Lost)]).count() == 2
    });
    drop(stopped);
}
