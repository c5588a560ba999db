//! The engine: the thread that is the card. It looks at doorbells, at the wire and at the clock, and rests when
//! there is nothing, because on a small machine it shares its core with those it works for.

use std::num::NonZero;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::core::Core;
use super::hold::Step;

/// The state and those who want it.
pub(crate) struct Shared {
    core: Mutex<Core>,
    /// Set-up calls that wait for the lock: a busy engine would take it again before they wake up.
    waiting: AtomicU32,
    stop: AtomicBool,
}

impl Shared {
    pub(crate) fn new(core: Core) -> Arc<Self> {
        Arc::new(Self { core: Mutex::new(core), waiting: AtomicU32::new(0), stop: AtomicBool::new(false) })
    }

    /// The card's state, for a set-up call. A panic of the engine leaves tables that are still tables.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
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
    /// No thread can be had.
    pub(crate) fn start(shared: &Arc<Shared>, card: u32) -> std::io::Result<Self> {
        let events = shared.lock().socket_events()?;
        let state = shared.clone();
        let body = move || {
            if catch_unwind(AssertUnwindSafe(|| run(&state, &events))).is_err() {
                let mut core = state.core.lock().unwrap_or_else(PoisonError::into_inner);
                core.dead = true;
                core.say(format_args!("the engine failed: this is a bug of softefa; the card answers no more"));
            }
        };
        let thread = std::thread::Builder::new().name(format!("softefa{card}")).spawn(body)?;
        Ok(Self { thread: Some(thread), stop: StopFlag(shared.clone()) })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop.0.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // An engine that panicked has said so; what it left is closed all the same.
            let _ = thread.join();
        }
    }
}

/// Looks of an idle engine that only spin, where there are cores enough.
const SPINS: u32 = 20;
/// Where there are fewer cores, whoever waits for what the engine just did may wait for the engine's core.
const CROWD: usize = 8;
/// How long an idle engine only yields.
const YIELD: Duration = Duration::from_micros(200);
/// Longest rest, and from how much idleness on.
const RESTS: [(Duration, Duration); 3] = [
    (Duration::from_millis(100), Duration::from_micros(200)),
    (Duration::from_millis(5), Duration::from_micros(50)),
    (YIELD, Duration::from_micros(20)),
];
/// Longest rest while cards of other hosts are connected or a send is to be tried again.
const SHORT_REST: Duration = Duration::from_micros(50);
/// Looks at doorbells and rings between two looks at sockets.
const SOCKET_EVERY: u32 = 64;
/// A gap in the clock beyond this was not time that anybody could have answered in: the process was stopped.
const MAX_STEP_US: u64 = 50_000;

fn run(shared: &Shared, events: &OwnedFd) {
    // Rests shorter than the default slack of 50 µs. If it cannot be had they are longer.
    let _ = nix::sys::prctl::set_timerslack(1000);
    let crowded = std::thread::available_parallelism().map_or(1, NonZero::get) < CROWD;
    let mut last = Instant::now();
    let mut idle_since = last;
    let mut idle = 0u32;
    let mut turn = 0u32;
    let mut quiet = Duration::ZERO;
    while !shared.stop.load(Ordering::Acquire) {
        while shared.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        let now = Instant::now();
        let step = (now - last).as_micros() as u64;
        if step > 0 {
            last += Duration::from_micros(step);
        }
        turn = turn.wrapping_add(1);
        let (moved, held, soon) = {
            let mut core = shared.core.lock().unwrap_or_else(PoisonError::into_inner);
            core.clock_us += step.min(MAX_STEP_US);
            let mut moved = core.poll();
            let look = turn.is_multiple_of(SOCKET_EVERY) || quiet >= YIELD;
            if !core.dead && (look || !core.connection_of.is_empty()) {
                moved |= core.poll_messages();
            }
            if !core.dead && look {
                moved |= core.poll_sockets();
                core.check_batches();
            }
            core.settled = !moved;
            let soon = !core.connection_of.is_empty() || !core.unready.is_empty();
            (moved, core.holds.as_ref().is_some_and(|h| !h.is_empty()), soon)
        };
        if moved {
            (idle, quiet) = (0, Duration::ZERO);
            if crowded {
                std::thread::yield_now();
            }
            continue;
        }
        if idle == 0 {
            idle_since = now;
        }
        idle = idle.saturating_add(1);
        if idle <= SPINS && !crowded {
            std::hint::spin_loop();
            continue;
        }
        quiet = now - idle_since;
        match RESTS.iter().find(|(from, _)| quiet >= *from) {
            // Messages of other hosts do not wake the engine, nor does the time.
            Some((_, rest)) if !held => doze(shared, events, if soon { SHORT_REST.min(*rest) } else { *rest }),
            _ => std::thread::yield_now(),
        }
    }
    shared.core.lock().unwrap_or_else(PoisonError::into_inner).leave();
}

/// Rests until a socket has something to say or the time is over.
fn doze(shared: &Shared, events: &OwnedFd, rest: Duration) {
    let lock = || shared.core.lock().unwrap_or_else(PoisonError::into_inner);
    if lock().doze() {
        let mut fds = [PollFd::new(events.as_fd(), PollFlags::POLLIN)];
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(rest)), None);
    }
    lock().wake();
}

impl Core {
    /// One look at everything. True when something moved.
    fn poll(&mut self) -> bool {
        if self.dead {
            return false;
        }
        let mut moved = false;
        for i in 0..self.active.len() {
            if self.active[i].is_rung() {
                self.active[i].seen = self.take_rung(self.active[i].qpn);
                moved = true;
            }
        }
        for at in 0..self.connections.bound() {
            moved |= self.poll_connection(at);
        }
        while let Some((token, step)) = self.holds.as_mut().and_then(|h| h.pop(self.clock_us)) {
            moved = true;
            match step {
                Step::Send => self.send(token),
                Step::Complete(status) => self.retire(token, status),
            }
        }
        moved |= self.poll_unready();
        for at in 0..self.connections.bound() {
            moved |= self.pump(at);
        }
        moved
    }
}
