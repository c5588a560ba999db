//! Tracks whether the signal proxy is in a round, so that other threads know when they can free memory that a round uses.
//!
//! A round ends soon, unless a driver call hangs. A thread that waits for the end of a round abandons a signal proxy that has been in one
//! call for too long. The signal proxy finds out when the call returns, and accesses no memory from then on.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Looks at one driver call after which it counts as hung: two seconds in which the looking thread was running too.
const HANG: u32 = 200;
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Now {
    Between,
    Round,
    /// In a driver call since then.
    Call(Instant),
    Abandoned,
}

#[derive(Debug)]
struct State {
    now: Now,
    /// Number of rounds begun.
    rounds: u64,
    /// Number of calls returned.
    calls: u64,
    /// Threads that wait for a change. Without them the signal proxy makes no system call to wake them.
    waiters: u32,
}

/// What the signal proxy is doing now.
#[derive(Debug)]
pub struct Rounds {
    state: Mutex<State>,
    changed: Condvar,
}

/// The result of [`Rounds::wait`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Out {
    /// The signal proxy is no longer in a round that began before the wait, or another thread has abandoned it.
    Now,
    /// This call abandoned the signal proxy.
    Abandoned {
        /// How long the signal proxy has been in its driver call.
        after: Duration,
    },
}

impl Default for Rounds {
    fn default() -> Self {
        Self {
            state: Mutex::new(State { now: Now::Between, rounds: 0, calls: 0, waiters: 0 }),
            changed: Condvar::new(),
        }
    }
}

impl Rounds {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a round; returns `None` if the signal proxy was abandoned.
    pub fn begin(&self) -> Option<Round<'_>> {
        let mut state = self.lock();
        if state.now == Now::Abandoned {
            return None;
        }
        state.now = Now::Round;
        state.rounds += 1;
        Some(Round(self))
    }

    /// Returns a number that changes as long as the signal proxy makes progress.
    pub fn progress(&self) -> u64 {
        let state = self.lock();
        state.rounds.wrapping_add(state.calls)
    }

    /// Returns true if a thread has abandoned the signal proxy.
    pub fn is_abandoned(&self) -> bool {
        self.lock().now == Now::Abandoned
    }

    /// Waits for the current round to end, or abandons a signal proxy that has been in one driver call for two seconds.
    pub fn wait(&self) -> Out {
        self.look_until(|mut state| {
            state.waiters += 1;
            let mut state = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            state.waiters -= 1;
            state
        })
    }

    /// Like [`wait`](Self::wait), with `pause` between two looks.
    fn look_until<'a>(&'a self, mut pause: impl FnMut(MutexGuard<'a, State>) -> MutexGuard<'a, State>) -> Out {
        let mut state = self.lock();
        let (round, mut call, mut looks) = (state.rounds, state.calls, 0);
        while state.rounds == round {
            if call != state.calls {
                (call, looks) = (state.calls, 0);
            }
            match state.now {
                Now::Between | Now::Abandoned => break,
                Now::Call(since) if looks >= HANG => {
                    state.now = Now::Abandoned;
                    return Out::Abandoned { after: since.elapsed() };
                }
                Now::Call(_) | Now::Round => {}
            }
            state = pause(state);
            looks += 1;
        }
        Out::Now
    }
}

/// A round of the signal proxy; ends when dropped.
#[derive(Debug)]
pub struct Round<'a>(&'a Rounds);

impl Round<'_> {
    /// Makes a driver call, which may take any time. Returns `None` if the signal proxy was abandoned: memory that it knows may be gone.
    pub fn call<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        let mut state = self.0.lock();
        if state.now == Now::Abandoned {
            return None;
        }
        state.now = Now::Call(Instant::now());
        drop(state);
        let result = call();
        let mut state = self.0.lock();
        if state.now == Now::Abandoned {
            return None;
        }
        state.now = Now::Round;
        state.calls += 1;
        Some(result)
    }

    /// Returns true if a thread has abandoned the signal proxy.
    pub fn is_abandoned(&self) -> bool {
        self.0.is_abandoned()
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if state.now != Now::Abandoned {
            state.now = Now::Between;
        }
        if state.waiters > 0 {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn wait_ends_after_the_round_that_may_use_the_memory() {
        let rounds = Rounds::default();
        assert_eq!(rounds.wait(), Out::Now, "no round");
        let [known, freed, stop] = [const { AtomicBool::new(false) }; 3];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Acquire) {
                    let round = rounds.begin().expect("a round");
                    if known.load(Ordering::SeqCst) {
                        assert_eq!(round.call(std::thread::yield_now), Some(()));
                        assert!(!freed.load(Ordering::SeqCst), "used after the wait");
                    }
                }
            });
            for _ in 0..100 {
                freed.store(false, Ordering::SeqCst);
                known.store(true, Ordering::SeqCst);
                std::thread::yield_now();
                known.store(false, Ordering::SeqCst);
                assert_eq!(rounds.wait(), Out::Now);
                freed.store(true, Ordering::SeqCst);
            }
            stop.store(true, Ordering::Release);
        });
    }

    #[test]
    fn wait_outlasts_the_round_and_not_the_next_one() {
        let rounds = Rounds::default();
        let mut round = rounds.begin();
        let mut looks = 0;
        let out = rounds.look_until(|state| {
            drop(state);
            looks += 1;
            if looks == 10 * HANG {
                round = None;
                round = rounds.begin();
            }
            rounds.lock()
        });
        assert_eq!((out, looks), (Out::Now, 10 * HANG));
        assert!(round.is_some());
    }

    #[test]
    fn call_that_does_not_return_abandons_the_proxy_once() {
        let rounds = Rounds::default();
        let round = rounds.begin().expect("a round");
        let mut looks = 0;
        let result = round.call(|| {
            // What another thread would do while the signal proxy is in this call.
            let out = rounds.look_until(|state| {
                looks += 1;
                assert!(looks <= HANG);
                state
            });
            assert!(matches!(out, Out::Abandoned { .. }));
            assert_eq!(rounds.wait(), Out::Now, "later waits do not wait again");
            assert!(rounds.begin().is_none());
        });
        assert_eq!((result, looks), (None, HANG));
        assert_eq!((round.is_abandoned(), round.call(|| ())), (true, None));
        drop(round);
        assert!(rounds.begin().is_none(), "stays abandoned");
    }

    #[test]
    fn proxy_whose_calls_return_in_time_is_never_abandoned() {
        let rounds = Rounds::default();
        let round = rounds.begin().expect("a round");
        let mut looks = 0;
        let out = round.call(|| {
            rounds.look_until(|mut state| {
                looks += 1;
                if looks % HANG == 0 {
                    state.calls += 1;
                }
                if looks == 10 * HANG {
                    state.now = Now::Between;
                }
                state
            })
        });
        assert_eq!((out, looks), (Some(Out::Now), 10 * HANG));
    }
}
