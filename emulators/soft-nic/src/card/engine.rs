//! The engine: the thread that executes work requests. It polls doorbells, wires and the clock. Without work it sleeps,
//! because on a small machine it shares its core with the application's threads.

use std::hint::black_box;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::core::Core;
use super::pace::{Pace, Pause, PollResult, YIELD};
use super::qp::Token;
use super::reorder::{Moment, Step};
use super::statistics::CounterFiles;

/// The state of a card, and the threads that use it.
pub(crate) struct Shared {
    core: Mutex<Core>,
    /// Set-up calls waiting for the lock. Without the count, a busy engine would retake the lock before they wake up.
    waiting: AtomicU32,
    /// Polls by threads other than the engine.
    external_polls: AtomicU32,
    stop: AtomicBool,
}

impl Shared {
    pub(crate) fn new(core: Core) -> Arc<Self> {
        Arc::new(Self {
            core: Mutex::new(core),
            waiting: AtomicU32::new(0),
            external_polls: AtomicU32::new(0),
            stop: AtomicBool::new(false),
        })
    }

    /// Locks the card's state for a set-up call. The tables stay usable if the engine panics.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Polls in the thread of a waiting caller, while the engine sleeps. Does nothing while the engine polls or a
    /// set-up call waits for the lock.
    pub(crate) fn poll(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            return;
        }
        if let Ok(mut core) = self.core.try_lock() {
            core.poll(Instant::now(), false);
            self.external_polls.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
impl Shared {
    pub(crate) fn external_polls(&self) -> u32 {
        self.external_polls.load(Ordering::Relaxed)
    }

    /// Pretends that `calls` set-up calls are waiting.
    pub(crate) fn set_waiting(&self, calls: u32) {
        self.waiting.store(calls, Ordering::Relaxed);
    }
}

/// A running engine; it stops when this is dropped.
#[derive(Debug)]
pub(crate) struct Engine {
    thread: Option<JoinHandle<()>>,
    stop: StopFlag,
}

struct StopFlag(Arc<Shared>);

impl std::fmt::Debug for StopFlag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StopFlag")
    }
}

impl Engine {
    /// # Errors
    /// The system cannot start another thread.
    pub(crate) fn start(shared: &Arc<Shared>, card: u32, counters: Option<CounterFiles>) -> std::io::Result<Self> {
        let events = shared.lock().socket_events()?;
        let state = shared.clone();
        // The thread allocates before this function returns. libfabric patches the first instructions of `munmap` when
        // the first domain opens, and a thread that is in `munmap` at that moment, as a new thread is in its first
        // allocation, dies of SIGSEGV. A barrier keeps no handle of the waiting thread, unlike a channel: valgrind
        // would report the main thread's at exit.
        let has_memory = Arc::new(Barrier::new(2));
        let memory = has_memory.clone();
        let body = move || {
            drop(black_box(Box::new(0)));
            has_memory.wait();
            if catch_unwind(AssertUnwindSafe(|| run(&state, &events, counters))).is_err() {
                let mut core = state.core.lock().unwrap_or_else(PoisonError::into_inner);
                core.dead_since = Some(core.clock_us);
                core.log(format_args!("the engine failed: this is a bug in softefa; the card stopped responding"));
            }
        };
        let thread = std::thread::Builder::new().name(format!("softefa{card}")).spawn(body)?;
        memory.wait();
        Ok(Self { thread: Some(thread), stop: StopFlag(shared.clone()) })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop.0.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // An engine's panic is on standard error already, and its card is closed either way.
            let _ = thread.join();
        }
    }
}

/// Polls of doorbells and rings per poll of the sockets.
const SOCKET_EVERY: u32 = 64;
/// If application threads poll this often between two of the engine's polls, the engine sleeps for a while.
const DRIVEN_POLLS: u32 = 4;
/// Long, because going to sleep and waking up take many microseconds of a core that the engine may share with those
/// threads.
const DRIVEN_SLEEP: Duration = Duration::from_micros(250);
/// The clock advances by at most this much per poll: after a larger step, the process had been stopped.
const MAX_STEP_US: u64 = 50_000;

/// How often the card tries to write the statistics when it closes, because other cards write them too.
const LAST_UPDATES: u32 = 100;

fn run(shared: &Shared, events: &OwnedFd, mut counters: Option<CounterFiles>) {
    let statistics = || shared.core.lock().unwrap_or_else(PoisonError::into_inner).statistics;
    // Allows sleeps shorter than the default timer slack of 50 µs.
    let _ = nix::sys::prctl::set_timerslack(1000);
    let mut pace = Pace::new(Instant::now());
    let mut driven = 0;
    while !shared.stop.load(Ordering::Acquire) {
        if let Some(counters) = counters.as_mut().filter(|counters| counters.is_due()) {
            counters.update(&statistics());
        }
        while shared.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let by_others = shared.external_polls.load(Ordering::Relaxed);
        let polls = by_others.wrapping_sub(driven);
        driven = by_others;
        if polls >= DRIVEN_POLLS {
            // A poll would take the lock from the threads that wait for its result.
            std::thread::sleep(DRIVEN_SLEEP);
            continue;
        }
        let now = Instant::now();
        let mut result = PollResult::default();
        {
            let mut core = shared.core.lock().unwrap_or_else(PoisonError::into_inner);
            result.moved = core.poll(now, pace.idle_time() >= YIELD);
            result.delayed = core.reorder_buffer.as_ref().is_some_and(|buffer| !buffer.is_empty());
            result.short_wait = !core.unready.is_empty();
        }
        match pace.pause(result, now) {
            Pause::Spin => std::hint::spin_loop(),
            Pause::Yield => {
                let before = Instant::now();
                std::thread::yield_now();
                pace.yielded(before.elapsed());
            }
            Pause::Sleep(time) => std::thread::sleep(time),
            Pause::WaitForEvent(time) => wait_for_event(shared, events, time),
        }
    }
    shared.core.lock().unwrap_or_else(PoisonError::into_inner).drain();
    if let Some(mut counters) = counters {
        let updated = || {
            counters.update(&statistics()) || {
                std::thread::yield_now();
                false
            }
        };
        let _ = std::iter::repeat_with(updated).take(LAST_UPDATES as usize).any(|updated| updated);
    }
}

/// Sleeps until a socket has an event or `time` has passed.
fn wait_for_event(shared: &Shared, events: &OwnedFd, time: Duration) {
    let lock = || shared.core.lock().unwrap_or_else(PoisonError::into_inner);
    if lock().prepare_sleep() {
        let mut fds = [PollFd::new(events.as_fd(), PollFlags::POLLIN)];
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(time)), None);
    }
    lock().finish_sleep();
}

impl Core {
    /// Polls everything once, but the sockets only now and then unless `thoroughly`. Returns true if there was work.
    pub(crate) fn poll(&mut self, now: Instant, thoroughly: bool) -> bool {
        let moved = self.poll_all(now, thoroughly);
        self.flush_trace();
        moved
    }

    fn poll_all(&mut self, now: Instant, thoroughly: bool) -> bool {
        let step = (now - self.polled_at).as_micros() as u64;
        if step > 0 {
            self.polled_at += Duration::from_micros(step);
        }
        self.clock_us += step.min(MAX_STEP_US);
        if let Some(since) = self.dead_since {
            return self.poll_dead(since);
        }
        self.polls = self.polls.wrapping_add(1);
        let thoroughly = thoroughly || self.polls.is_multiple_of(SOCKET_EVERY);
        // Rung requests go first, because system calls take longer than everything else.
        let mut moved = self.poll_doorbells();
        if moved {
            self.pump_all();
        }
        if thoroughly || self.has_streams() {
            moved |= self.poll_sockets();
        }
        for at in 0..self.connections.bound() {
            moved |= self.poll_connection(at);
        }
        while let Some((token, step)) = self.next_released() {
            moved = true;
            match step {
                Step::Send => self.send(token),
                Step::Complete(status) => self.retire(token, status),
            }
        }
        moved |= self.poll_unready();
        moved |= self.pump_all();
        if thoroughly {
            self.check_connections();
            self.check_batches();
            for cq in 0..self.cqs.bound() {
                if let Some(ring) = self.cqs.get_mut(cq) {
                    ring.poll_doorbell();
                }
            }
        }
        self.idle_polls = if moved { 0 } else { self.idle_polls.saturating_add(1) };
        moved
    }

    pub(crate) fn now(&self) -> Moment {
        Moment { us: self.clock_us, poll: self.polls }
    }

    fn next_released(&mut self) -> Option<(Token, Step)> {
        let (now, qps) = (self.now(), &self.qps);
        let outstanding = |qpn| qps.get(u32::from(qpn)).map_or(0, |qp| qp.outstanding);
        self.reorder_buffer.as_mut()?.pop(now, outstanding)
    }

    pub(crate) fn poll_doorbells(&mut self) -> bool {
        let mut moved = false;
        for i in 0..self.active.len() {
            if self.active[i].is_rung() {
                self.active[i].seen = self.take_rung(self.active[i].qpn);
                moved = true;
            }
        }
        moved
    }

    pub(crate) fn pump_all(&mut self) -> bool {
        let mut moved = false;
        for at in 0..self.connections.bound() {
            moved |= self.pump(at);
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::super::core::Listeners;
    use super::*;
    use crate::address::Gid;
    use crate::config::Config;

    #[test]
    fn setup_call_takes_precedence_over_progress_call() {
        let gid = Gid { address: None, secret: [1; 8] };
        let core = Core::new(0, gid, Config::default(), Listeners::default()).unwrap();
        let card = Shared::new(core);
        card.poll();
        assert_eq!(card.external_polls(), 1);
        let lock = card.lock();
        card.poll();
        drop(lock);
        assert_eq!(card.external_polls(), 1, "a set-up call has the card");
        card.set_waiting(1);
        card.poll();
        assert_eq!(card.external_polls(), 1, "a set-up call waits for the card");
        card.set_waiting(0);
        card.poll();
        assert_eq!(card.external_polls(), 2);
    }
}
