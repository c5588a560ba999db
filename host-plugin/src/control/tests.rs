use super::handle::address;
use super::{ControlError, Listener, Ring, Step};
use ferrogin_channel::{Config, Reactor};
use ferrogin_libfabric::Libfabric;
use std::io::Write;
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any step takes, on a machine that stands still for a while too.
const LONG: Duration = Duration::from_secs(120);

fn listeners(n: usize, timeout: Duration) -> (Vec<Arc<Listener>>, Vec<[u8; 128]>) {
    let listeners: Vec<_> =
        (0..n).map(|_| Arc::new(Listener::open(&Libfabric::load(None).unwrap(), "tcp", timeout).unwrap())).collect();
    let handles = listeners.iter().map(|listener| listener.handle()).collect();
    (listeners, handles)
}

/// Runs `body` as each rank in a thread of its own. A neighbour that does not answer is given up after half of `patience`.
fn ranks<T: Send + 'static>(
    n: usize,
    patience: Duration,
    body: impl Fn(usize, Result<Ring, ControlError>) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let (listeners, handles) = listeners(n, patience);
    let body = Arc::new(body);
    let threads: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listener)| {
            let (handles, body) = (handles.clone(), body.clone());
            thread::spawn(move || {
                let ring = Ring::connect(&listener, &handles, rank, LONG);
                drop(listener);
                body(rank, ring)
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// Rank `rank`'s block: sizes differ, one is empty, one exceeds every socket buffer.
fn block(rank: usize) -> Vec<u8> {
    let len = [0, 5, 3_000_000, 17, 100_000][rank % 5];
    (0..len).map(|i| (i * 31 + rank) as u8).collect()
}

#[test]
fn every_rank_gets_every_block() {
    for n in [1, 2, 3, 5, 8] {
        ranks(n, LONG, move |rank, ring| {
            let mut ring = ring.unwrap();
            assert_eq!((ring.rank(), ring.nranks()), (rank, n));
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
fn a_rank_that_could_not_do_its_part_fails_all_and_breaks_nothing() {
    ranks(4, LONG, |rank, ring| {
        let mut ring = ring.unwrap();
        let part = (rank != 2).then_some(&[1u8, 2, 3][..]);
        let error = ring.allgather(Step::RegisterWindow, part).unwrap_err();
        assert!(matches!(error, ControlError::PeerFailed { rank: 2, step: Step::RegisterWindow }), "{error}");
        assert_eq!(ring.allgather(Step::CreateContext, Some(&[7])).unwrap(), vec![vec![7]; 4]);
    });
}

#[test]
fn a_rank_that_vanishes_is_named_by_all() {
    let started = Instant::now();
    ranks(5, LONG, |rank, ring| {
        let mut ring = ring.unwrap();
        // Rank 3 may be done connecting before others are: let it vanish in a later step than theirs.
        ring.allgather(Step::Connect, Some(&[0])).unwrap();
        if rank == 3 {
            return;
        }
        let error = ring.allgather(Step::CreateContext, Some(&[0; 64])).unwrap_err();
        assert_eq!(error.culprit(), Some(3), "rank {rank}: {error}");
        let again = ring.allgather(Step::CreateContext, Some(&[0; 64])).unwrap_err();
        assert!(matches!(again, ControlError::Dead { culprit: 3 }), "{again}");
    });
    assert!(started.elapsed() < LONG / 2, "nobody waited for the deadline");
}

/// Whoever runs out of time first names it, and tells the others.
#[test]
fn a_rank_that_hangs_is_named_at_the_deadline() {
    let deadline = Duration::from_secs(1);
    let (started, told) = (Instant::now(), Barrier::new(3));
    ranks(3, LONG, move |rank, ring| {
        let mut ring = ring.unwrap();
        if rank == 2 {
            ring.set_timeout(deadline);
        }
        let error = (rank != 1).then(|| ring.allgather(Step::CreateContext, Some(&[0; 64])).unwrap_err());
        told.wait();
        let Some(error) = error else { return };
        assert_eq!(error.culprit(), Some(1), "rank {rank}: {error}");
        assert_eq!(matches!(error, ControlError::Timeout { .. }), rank == 2, "rank {rank}: {error}");
        let text = error.to_string();
        assert!(text.contains("rank 1") && text.contains("log"), "{text}");
    });
    assert!(started.elapsed() >= deadline);
}

/// The others miss blocks of ranks that live, which the silent one should have passed on.
#[test]
fn a_rank_that_stops_between_two_blocks_is_named_by_all() {
    let (together, (running, others)) = (Barrier::new(5), channel());
    let ends = Mutex::new((Some(running), Some(others)));
    ranks(5, Duration::from_secs(8), move |rank, ring| {
        let mut ring = ring.unwrap();
        ring.allgather(Step::Connect, Some(&[0])).unwrap();
        together.wait();
        if rank == 2 {
            let others = ends.lock().unwrap().1.take().unwrap();
            ring.stop_behind_own_block(Step::RegisterWindow, others);
        } else {
            let error = ring.allgather(Step::RegisterWindow, Some(&[])).map(drop);
            let culprit = error.as_ref().err().and_then(ControlError::culprit);
            together.wait();
            // Rank 1 has what it wants by the other way round.
            assert!(culprit == Some(2) || rank == 1 && error.is_ok(), "rank {rank}: {error:?}");
            return;
        }
        together.wait();
        drop(ends.lock().unwrap().0.take());
    });
}

#[test]
fn ranks_in_different_calls_are_told() {
    ranks(2, LONG, |rank, ring| {
        let mut ring = ring.unwrap();
        let step = if rank == 0 { Step::RegisterWindow } else { Step::CreateContext };
        let error = ring.allgather(step, Some(&[0; 64])).unwrap_err();
        let told = matches!(error, ControlError::OutOfStep { .. } | ControlError::Aborted { .. });
        assert!(told || matches!(error, ControlError::PeerGone { .. }), "{error}");
    });
}

#[test]
fn a_rank_that_died_before_connect_fails_the_others_at_once() {
    // An endpoint that is gone does not refuse: it gets 10 s.
    let (mut listeners, handles) = listeners(4, LONG / 4);
    drop(listeners.remove(2));
    let started = Instant::now();
    let threads: Vec<_> = [0, 1, 3]
        .into_iter()
        .zip(listeners)
        .map(|(rank, listener)| {
            let handles = handles.clone();
            thread::spawn(move || {
                let error = match Ring::connect(&listener, &handles, rank, LONG) {
                    Err(error) => error,
                    Ok(mut ring) => ring.allgather(Step::Connect, Some(&[])).unwrap_err(),
                };
                (rank, error)
            })
        })
        .collect();
    for thread in threads {
        let (rank, error) = thread.join().unwrap();
        if rank == 1 {
            assert!(matches!(error, ControlError::Unreachable { rank: 2, .. }), "{error}");
        }
        assert!(error.culprit().is_some(), "rank {rank}: {error}");
    }
    assert!(started.elapsed() < LONG / 2, "nobody waited for the deadline");
}

#[test]
fn a_rank_that_never_connects_is_named_at_the_deadline() {
    let (listeners, handles) = listeners(2, LONG);
    let error = Ring::connect(&listeners[0], &handles, 0, Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, ControlError::Timeout { rank: 1, step: Step::Connect, seconds: 1, .. }), "{error}");
    let place = address(&handles[1]).unwrap().endpoint();
    assert!(error.to_string().contains(&*place), "{place} in {error}");
}

#[test]
fn strangers_are_turned_away() {
    let (listeners, handles) = listeners(2, LONG);
    let at = address(&handles[1]).unwrap();
    // Some only make connections, and some of those say something.
    let mut strangers: Vec<_> = (0..20).map(|_| TcpStream::connect(&*at.endpoint()).unwrap()).collect();
    for stranger in strangers.iter_mut().step_by(2) {
        stranger.write_all(&[0xa5; 50]).unwrap();
    }
    // Some speak the protocol and do not know the secret.
    let mut forged = handles[1];
    forged[16..24].fill(7);
    let lib = Libfabric::load(None).unwrap();
    let stranger = Reactor::open(&lib, &Config::default()).unwrap();
    let refused = stranger.connect(&address(&forged).unwrap()).wait().unwrap_err();
    assert!(refused.to_string().contains("no listener"), "{refused}");
    let threads: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listener)| {
            let handles = handles.clone();
            thread::spawn(move || {
                let mut ring = Ring::connect(&listener, &handles, rank, LONG).unwrap();
                ring.allgather(Step::Connect, Some(&[rank as u8])).unwrap()
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), vec![vec![0], vec![1]]);
    }
    drop(strangers);
}

#[test]
fn handles_in_another_order_are_refused() {
    let (listeners, mut handles) = listeners(3, LONG);
    handles.swap(0, 1);
    let error = Ring::connect(&listeners[0], &handles, 0, LONG).unwrap_err();
    assert!(matches!(error, ControlError::WrongOrder { rank: 0 }), "{error}");
    handles[2] = [0; 128];
    let error = Ring::connect(&listeners[1], &handles, 0, LONG).unwrap_err();
    assert!(!matches!(error, ControlError::Timeout { .. }), "{error}");
}
