//! The engine's pace: its pauses between polls, which leave the processor to the application's threads.
//!
//! On a small machine, a thread that waits for the result of a poll also waits for the engine's core, so the engine
//! mostly yields. A yield is cheap as long as all other threads on the core yield too. Next to a thread that computes
//! without a pause, a yield costs a scheduler time slice, which is milliseconds. The engine then takes short sleeps
//! instead.

use std::num::NonZero;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The pause before the next poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    /// Poll again at once.
    Spin,
    /// Let the core's other threads run.
    Yield,
    /// Sleep for this time.
    Sleep(Duration),
    /// Sleep until a socket has an event, but no longer than this.
    WaitForEvent(Duration),
}

/// The result of a poll.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PollResult {
    /// There was work.
    pub moved: bool,
    /// The reorder buffer holds requests that will become due.
    pub delayed: bool,
    /// Waits must be short: a send will be retried.
    pub short_wait: bool,
}

/// How many polls an idle engine spins for, if there are enough cores.
const SPINS: u32 = 20;
/// How long an idle engine only yields.
pub(super) const YIELD: Duration = Duration::from_micros(200);
/// Idle times, each with the longest wait from then on.
const WAITS: [(Duration, Duration); 5] = [
    (Duration::from_secs(10), Duration::from_millis(10)),
    (Duration::from_secs(1), Duration::from_millis(1)),
    (Duration::from_millis(100), Duration::from_micros(200)),
    (Duration::from_millis(5), Duration::from_micros(50)),
    (YIELD, Duration::from_micros(20)),
];
/// Longest wait with [`PollResult::short_wait`].
const SHORT_WAIT: Duration = Duration::from_micros(50);
/// A yield this long gave the core to a thread that does not yield.
const LONG_YIELD: Duration = Duration::from_millis(1);
/// How many sleeps follow a long yield before the engine yields again. Each further long yield doubles the number. A
/// sleep is short enough for a busy wire.
const FIRST_SLEEPS: u32 = 8;
const MAX_SLEEPS: u32 = 4096;
/// After this many short yields in a row, the number of sleeps starts over.
const SHORT_YIELDS: u32 = 1024;
const SHORT_SLEEP: Duration = Duration::from_micros(10);

/// With at least this many cores, threads that do not sleep get one each.
const CORES: usize = 8;

/// Whether the machine has so few cores that an engine shares one with the threads waiting for it.
pub fn shares_a_core() -> bool {
    static SHARES: OnceLock<bool> = OnceLock::new();
    *SHARES.get_or_init(|| std::thread::available_parallelism().map_or(1, NonZero::get) < CORES)
}

/// The engine's pace.
#[derive(Debug)]
pub(super) struct Pace {
    shares_core: bool,
    idle_polls: u32,
    idle_since: Instant,
    idle_time: Duration,
    /// Sleeps left before the engine yields again.
    sleeps: u32,
    /// Sleeps after the latest long yield; 0 after many short ones.
    backoff: u32,
    /// Short yields since then.
    short_yields: u32,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            shares_core: shares_a_core(),
            idle_polls: 0,
            idle_since: now,
            idle_time: Duration::ZERO,
            sleeps: 0,
            backoff: 0,
            short_yields: 0,
        }
    }

    /// Returns how long there has been no work.
    pub(super) fn idle_time(&self) -> Duration {
        self.idle_time
    }

    /// Records how long a yield took.
    pub(super) fn yielded(&mut self, took: Duration) {
        if took >= LONG_YIELD {
            self.backoff = (2 * self.backoff).clamp(FIRST_SLEEPS, MAX_SLEEPS);
            (self.sleeps, self.short_yields) = (self.backoff, 0);
        } else if self.backoff > 0 {
            self.short_yields += 1;
            if self.short_yields >= SHORT_YIELDS {
                self.backoff = 0;
            }
        }
    }

    /// Returns the engine's pause after a poll.
    pub(super) fn pause(&mut self, result: PollResult, now: Instant) -> Pause {
        if result.moved {
            (self.idle_polls, self.idle_time) = (0, Duration::ZERO);
            return if self.shares_core { self.yield_or_sleep() } else { Pause::Spin };
        }
        if self.idle_polls == 0 {
            self.idle_since = now;
        }
        self.idle_polls = self.idle_polls.saturating_add(1);
        if self.idle_polls <= SPINS && !self.shares_core {
            return Pause::Spin;
        }
        self.idle_time = now - self.idle_since;
        match WAITS.iter().find(|(from, _)| self.idle_time >= *from) {
            Some((_, wait)) if !result.delayed => {
                Pause::WaitForEvent(if result.short_wait { SHORT_WAIT.min(*wait) } else { *wait })
            }
            _ => self.yield_or_sleep(),
        }
    }

    fn yield_or_sleep(&mut self) -> Pause {
        if self.sleeps == 0 {
            return Pause::Yield;
        }
        self.sleeps -= 1;
        Pause::Sleep(SHORT_SLEEP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUSY: PollResult = PollResult { moved: true, delayed: false, short_wait: false };
    const IDLE: PollResult = PollResult { moved: false, delayed: false, short_wait: false };

    #[test]
    fn idle_engine_waits_longer_and_longer() {
        let start = Instant::now();
        let mut pace = Pace { shares_core: true, ..Pace::new(start) };
        assert_eq!(pace.pause(BUSY, start), Pause::Yield);
        let after = |ms| start + Duration::from_millis(ms);
        assert_eq!(pace.pause(IDLE, start), Pause::Yield);
        for (idle, wait) in WAITS.into_iter().rev() {
            assert_eq!(pace.pause(IDLE, start + idle), Pause::WaitForEvent(wait));
        }
        assert_eq!(pace.pause(PollResult { short_wait: true, ..IDLE }, after(500)), Pause::WaitForEvent(SHORT_WAIT));
        assert_eq!(
            pace.pause(PollResult { delayed: true, ..IDLE }, after(500)),
            Pause::Yield,
            "delayed requests need the time"
        );
        assert_eq!(pace.pause(BUSY, after(501)), Pause::Yield);
        assert_eq!(pace.pause(IDLE, after(501)), Pause::Yield, "the idle time starts again");
    }

    #[test]
    fn engine_sleeps_after_long_yields() {
        let start = Instant::now();
        let mut pace = Pace { shares_core: true, ..Pace::new(start) };
        let sleeps =
            |pace: &mut Pace| (0..).take_while(|_| pace.pause(BUSY, start) == Pause::Sleep(SHORT_SLEEP)).count() as u32;
        pace.yielded(LONG_YIELD / 2);
        assert_eq!(sleeps(&mut pace), 0);
        let mut wanted = FIRST_SLEEPS;
        for _ in 0..20 {
            pace.yielded(LONG_YIELD);
            assert_eq!(sleeps(&mut pace), wanted);
            assert_eq!(pace.pause(BUSY, start), Pause::Yield, "then it yields again");
            wanted = (2 * wanted).min(MAX_SLEEPS);
        }
        for _ in 0..SHORT_YIELDS {
            pace.yielded(LONG_YIELD / 2);
        }
        pace.yielded(LONG_YIELD);
        assert_eq!(sleeps(&mut pace), FIRST_SLEEPS, "short yields reset the number");
    }
}
