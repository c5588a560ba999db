//! The pace of the engine: what it does between two polls, so that the threads of the application get the processor.
//!
//! Mostly it yields: on a small machine the thread that waits for the result of a poll waits for the engine's core too. A yield
//! costs little while all others on the core yield too, but beside a thread that only computes it costs a slice of the
//! scheduler, milliseconds. Then the engine takes short sleeps: a thread that wakes with time to its credit, and asks
//! for short slices, goes before one that computes.
#![allow(unsafe_code)]

use std::num::NonZero;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    /// Poll again at once.
    Spin,
    /// Let others run.
    Yield,
    /// Sleep for this time.
    Nap(Duration),
    /// Sleep until a socket has an event, but no longer than this.
    Doze(Duration),
}

/// The result of a poll.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    /// Something moved.
    pub moved: bool,
    /// Requests are delayed until a time.
    pub held: bool,
    /// Cards of other hosts are connected, whose datagrams do not wake the engine, or a send is to be retried.
    pub soon: bool,
}

/// Polls of an idle engine that only spin, where there are enough cores.
const SPINS: u32 = 20;
/// How long an idle engine only yields.
pub(super) const YIELD: Duration = Duration::from_micros(200);
/// Longest rest, and from how much idleness on.
const RESTS: [(Duration, Duration); 3] = [
    (Duration::from_millis(100), Duration::from_micros(200)),
    (Duration::from_millis(5), Duration::from_micros(50)),
    (YIELD, Duration::from_micros(20)),
];
/// Longest rest while cards of other hosts are connected or a send is to be tried again.
const SHORT_REST: Duration = Duration::from_micros(50);
/// A yield that took this long went to a thread that does not yield.
const STARVED: Duration = Duration::from_millis(1);
/// A thread that ran this long in place of the engine may or may not compute all the time: yielding is tried
/// again after a few naps, and after twice as many each time that it was in vain. Each nap is short enough for a busy wire.
const FIRST_NAPS: u32 = 8;
const MOST_NAPS: u32 = 4096;
/// Yields in a row, none of them in vain, after which the thread that computed is forgotten.
const GOOD_YIELDS: u32 = 1024;
const NAP: Duration = Duration::from_micros(10);
/// Nanoseconds: the shortest slice that the scheduler gives.
const SHORT_SLICE_NS: u64 = 100_000;

/// With as many cores, threads that do not sleep find one each.
const CORES: usize = 8;

/// The machine has so few cores that an engine shares one with the threads that wait for it.
pub fn shares_a_core() -> bool {
    static SHARES: OnceLock<bool> = OnceLock::new();
    *SHARES.get_or_init(|| std::thread::available_parallelism().map_or(1, NonZero::get) < CORES)
}

/// The engine's pace.
#[derive(Debug)]
pub(super) struct Pace {
    crowded: bool,
    idle: u32,
    idle_since: Instant,
    quiet: Duration,
    /// Naps still to be taken in place of yields.
    naps: u32,
    /// Naps that the latest yield in vain led to; 0 when it is forgotten.
    lesson: u32,
    /// Yields since.
    good: u32,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { crowded: shares_a_core(), idle: 0, idle_since: now, quiet: Duration::ZERO, naps: 0, lesson: 0, good: 0 }
    }

    /// How long nothing has moved.
    pub(super) fn quiet(&self) -> Duration {
        self.quiet
    }

    /// A yield took this long.
    pub(super) fn yielded(&mut self, took: Duration) {
        if took >= STARVED {
            self.lesson = (2 * self.lesson).clamp(FIRST_NAPS, MOST_NAPS);
            (self.naps, self.good) = (self.lesson, 0);
            short_slices(true);
        } else if self.lesson > 0 {
            self.good += 1;
            if self.good >= GOOD_YIELDS {
                self.lesson = 0;
            }
        }
    }

    /// What the engine does after a poll.
    pub(super) fn pause(&mut self, seen: Seen, now: Instant) -> Pause {
        if seen.moved {
            (self.idle, self.quiet) = (0, Duration::ZERO);
            return if self.crowded { self.give_way() } else { Pause::Spin };
        }
        if self.idle == 0 {
            self.idle_since = now;
        }
        self.idle = self.idle.saturating_add(1);
        if self.idle <= SPINS && !self.crowded {
            return Pause::Spin;
        }
        self.quiet = now - self.idle_since;
        match RESTS.iter().find(|(from, _)| self.quiet >= *from) {
            Some((_, rest)) if !seen.held => Pause::Doze(if seen.soon { SHORT_REST.min(*rest) } else { *rest }),
            _ => self.give_way(),
        }
    }

    fn give_way(&mut self) -> Pause {
        match self.naps {
            0 => return Pause::Yield,
            1 => short_slices(false),
            _ => {}
        }
        self.naps -= 1;
        Pause::Nap(NAP)
    }
}

/// Asks for short slices of the processor, or for those that are usual. It is a wish: older kernels do not know it.
fn short_slices(short: bool) {
    // SAFETY: plain integers, for which zero is a value.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is ours and as large as said; 0 is the calling thread.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size_of_val(&attr), 0) };
    if got != 0 || attr.sched_policy != libc::SCHED_OTHER as u32 {
        return;
    }
    attr.sched_runtime = if short { SHORT_SLICE_NS } else { 0 };
    // SAFETY: the structure is ours and as large as stated; the kernel only reads it.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: Seen = Seen { moved: true, held: false, soon: false };
    const IDLE: Seen = Seen { moved: false, held: false, soon: false };

    #[test]
    fn an_idle_engine_rests_longer_and_longer() {
        let start = Instant::now();
        let mut pace = Pace { crowded: true, ..Pace::new(start) };
        assert_eq!(pace.pause(BUSY, start), Pause::Yield);
        let after = |ms| start + Duration::from_millis(ms);
        assert_eq!(pace.pause(IDLE, start), Pause::Yield);
        assert_eq!(pace.pause(IDLE, after(1)), Pause::Doze(RESTS[2].1));
        assert_eq!(pace.pause(IDLE, after(500)), Pause::Doze(RESTS[0].1));
        assert_eq!(pace.pause(Seen { soon: true, ..IDLE }, after(500)), Pause::Doze(SHORT_REST));
        assert_eq!(pace.pause(Seen { held: true, ..IDLE }, after(500)), Pause::Yield, "the time is to be watched");
        assert_eq!(pace.pause(BUSY, after(501)), Pause::Yield);
        assert_eq!(pace.pause(IDLE, after(501)), Pause::Yield, "busy a moment ago");
    }

    #[test]
    fn a_starved_engine_naps_for_a_while() {
        let start = Instant::now();
        let mut pace = Pace { crowded: true, ..Pace::new(start) };
        let naps = |pace: &mut Pace| (0..).take_while(|_| pace.pause(BUSY, start) == Pause::Nap(NAP)).count() as u32;
        pace.yielded(STARVED / 2);
        assert_eq!(naps(&mut pace), 0);
        let mut wanted = FIRST_NAPS;
        for _ in 0..20 {
            pace.yielded(STARVED);
            assert_eq!(naps(&mut pace), wanted);
            assert_eq!(pace.pause(BUSY, start), Pause::Yield, "it tries again");
            wanted = (2 * wanted).min(MOST_NAPS);
        }
        for _ in 0..GOOD_YIELDS {
            pace.yielded(STARVED / 2);
        }
        pace.yielded(STARVED);
        assert_eq!(naps(&mut pace), FIRST_NAPS, "long ago");
    }
}
