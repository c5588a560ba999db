//! The reorder buffer: faults deliver and complete requests late or out of order.
//!
//! The order depends on the sequence of requests, not on time. A request gets a random rank, not far above its number,
//! and is released when no later request can have a smaller rank. So the same seed gives the same order for the same
//! requests of a queue pair, however fast they come. If no request can follow, or none follows for a while, the buffer
//! releases what it holds by rank: software may be waiting for a completion before it posts again.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::qp::Token;
use crate::fault::Faults;
use crate::random::Random;

/// What the card does with a released request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Reads its source and sends it.
    Send,
    /// Completes it with this status.
    Complete(u8),
}

/// After this time and this many polls without arrivals, the buffer releases a whole window, because software may be
/// waiting for its requests. Polls count too, because requests that were posted while the engine slept must enter
/// first.
const IDLE: Moment = Moment { us: 20, poll: 4 };
const IDLE_COMPLETIONS: Moment = Moment { us: 10_000, poll: 256 };
/// A source's second read happens up to this much later, and up to this many requests overtake the request.
const REREAD_US: u64 = 200;
const REREAD_RANKS: u64 = 32;

/// The card's time: its clock, and its number of polls.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moment {
    pub us: u64,
    pub poll: u32,
}

/// A delayed request. The smallest rank is released first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Delayed {
    rank: u64,
    number: u64,
    /// When it may be released, by the card's clock in microseconds.
    due: u64,
    token: u64,
    status: Option<u8>,
}

/// One queue pair's requests that wait for one kind of step.
#[derive(Debug)]
struct Window {
    delayed: BinaryHeap<Reverse<Delayed>>,
    /// Requests that have entered so far.
    count: u64,
    last_arrival: Moment,
    random: Random,
}

impl Window {
    /// Releases the next request if it is due. At most `coming` requests may still enter, if their number is known.
    fn pop(&mut self, now: Moment, idle: Moment, coming: Option<u64>) -> Option<(Token, Step)> {
        let Reverse(first) = self.delayed.peek()?;
        // The rank of a later request is at least its number.
        let last = self.last_arrival;
        let idle = now.us.saturating_sub(last.us) >= idle.us && now.poll.wrapping_sub(last.poll) >= idle.poll;
        let decided = first.rank <= self.count || coming == Some(0) || idle;
        if !decided || first.due > now.us {
            return None;
        }
        let Reverse(first) = self.delayed.pop()?;
        Some((Token(first.token), first.status.map_or(Step::Send, Step::Complete)))
    }
}

/// The delayed requests of one card.
#[derive(Debug)]
pub(crate) struct ReorderBuffer {
    seed: u64,
    reorder: u64,
    delay_us: (u64, u64),
    reread: f64,
    /// By queue pair and by kind: true for completions.
    windows: BTreeMap<(u16, bool), Window>,
}

impl ReorderBuffer {
    pub(crate) fn new(faults: &Faults, card: u32) -> Self {
        Self {
            seed: faults.seed.wrapping_add(u64::from(card) << 32),
            reorder: u64::from(faults.reorder),
            delay_us: faults.delay_us,
            reread: faults.reread,
            windows: BTreeMap::new(),
        }
    }

    pub(crate) fn push(&mut self, token: Token, step: Step, now: Moment) {
        let completion = step != Step::Send;
        let window = self.windows.entry((token.qpn(), completion)).or_insert_with(|| Window {
            delayed: BinaryHeap::new(),
            count: 0,
            last_arrival: now,
            random: Random::seeded(self.seed ^ u64::from(token.qpn()) << 17 ^ u64::from(completion) << 16),
        });
        let random = &mut window.random;
        let (from, to) = self.delay_us;
        let mut due = now.us + if to == 0 { 0 } else { from + random.below(to - from + 1) };
        let mut rank = window.count + random.below(self.reorder);
        if !completion && random.chance(self.reread) {
            // The first transmission is lost: the peer gets what the source holds at a later read.
            due += 1 + random.below(REREAD_US);
            rank += 1 + random.below(REREAD_RANKS);
        }
        let status = match step {
            Step::Send => None,
            Step::Complete(status) => Some(status),
        };
        window.delayed.push(Reverse(Delayed { rank, number: window.count, due, token: token.0, status }));
        window.count += 1;
        window.last_arrival = now;
    }

    /// Releases the next request that is due. `outstanding` tells how many requests a queue pair has outstanding.
    pub(crate) fn pop(&mut self, now: Moment, outstanding: impl Fn(u16) -> u32) -> Option<(Token, Step)> {
        self.windows.iter_mut().find_map(|((qpn, completion), window)| {
            if !completion || window.delayed.is_empty() {
                return window.pop(now, IDLE, None);
            }
            let coming = u64::from(outstanding(*qpn)).saturating_sub(window.delayed.len() as u64);
            window.pop(now, IDLE_COMPLETIONS, Some(coming))
        })
    }

    /// Takes a queue pair's completions whose requests are `wanted`, by rank.
    pub(crate) fn take_completions(&mut self, qpn: u16, wanted: impl Fn(Token) -> bool) -> Vec<(Token, u8)> {
        let Some(window) = self.windows.get_mut(&(qpn, true)) else { return Vec::new() };
        let delayed = std::mem::take(&mut window.delayed).into_sorted_vec();
        // Sorted by `Reverse`: the smallest rank is last.
        let (taken, kept): (Vec<_>, Vec<_>) = delayed.into_iter().rev().partition(|entry| wanted(Token(entry.0.token)));
        window.delayed = kept.into();
        taken.into_iter().filter_map(|Reverse(entry)| Some((Token(entry.token), entry.status?))).collect()
    }

    /// Drops the requests of a closed queue pair.
    pub(crate) fn forget(&mut self, qpn: u16) {
        self.windows.remove(&(qpn, false));
        self.windows.remove(&(qpn, true));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.windows.values().all(|window| window.delayed.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A moment with enough polls that only the time decides.
    fn at(us: u64) -> Moment {
        Moment { us, poll: us as u32 * IDLE_COMPLETIONS.poll }
    }

    /// Returns the order of 256 requests that enter in bursts, with pauses shorter than the idle time.
    fn order(faults: &str, pace: u64) -> Vec<u64> {
        let mut buffer = ReorderBuffer::new(&Faults::parse(faults).unwrap(), 0);
        let mut order = Vec::new();
        let mut now = 0;
        for i in 0..256 {
            buffer.push(Token(i), Step::Send, at(now));
            if i % 7 == 0 {
                now += pace;
            }
            while let Some((token, _)) = buffer.pop(at(now), |_| 1) {
                order.push(token.0);
            }
        }
        for now in now..now + 10_000 {
            while let Some((token, step)) = buffer.pop(at(now), |_| 1) {
                assert_eq!(step, Step::Send);
                order.push(token.0);
            }
        }
        assert!(buffer.is_empty());
        order
    }

    #[test]
    fn order_depends_on_seed_and_not_on_time() {
        for faults in ["reorder=16", "reread=0.3", "reorder=8,reread=0.1,delay_us=0..40"] {
            let (a, b, c) = (
                order(&format!("seed=1,{faults}"), 0),
                order(&format!("seed=1,{faults}"), IDLE.us - 1),
                order(&format!("seed=2,{faults}"), 3),
            );
            assert_eq!(a, b, "{faults}");
            assert_ne!(a, c, "{faults}");
            assert!(!a.is_sorted(), "{faults}");
            let mut sorted = a;
            sorted.sort_unstable();
            assert_eq!(sorted, (0..256).collect::<Vec<_>>(), "nothing is lost");
        }
        assert!(order("delay_us=5..90", 1).is_sorted(), "a delay alone keeps the order");
    }

    #[test]
    fn request_is_overtaken_by_less_than_two_windows() {
        for (at, token) in order("seed=9,reorder=16", 1).into_iter().enumerate() {
            assert!((at as u64).abs_diff(token) < 32, "{token} went as number {at}");
        }
    }

    #[test]
    fn request_is_released_after_its_delay() {
        let mut buffer = ReorderBuffer::new(&Faults::parse("delay_us=100..100").unwrap(), 0);
        buffer.push(Token(1), Step::Complete(0), at(1000));
        assert_eq!(buffer.pop(at(1099), |_| 1), None);
        assert_eq!(buffer.pop(at(1100), |_| 1), Some((Token(1), Step::Complete(0))));
    }

    #[test]
    fn reread_request_is_released_later() {
        let mut buffer = ReorderBuffer::new(&Faults::parse("reread=1").unwrap(), 0);
        buffer.push(Token(1), Step::Send, at(0));
        assert_eq!(buffer.pop(at(0), |_| 1), None);
        assert!(buffer.pop(at(1 + REREAD_US), |_| 1).is_some());
        buffer.push(Token(2), Step::Complete(0), at(1000));
        assert!(buffer.pop(at(1000), |_| 1).is_some(), "completions are not read again");
    }

    #[test]
    fn completions_wait_for_outstanding_requests() {
        let mut buffer = ReorderBuffer::new(&Faults::parse("seed=3,reorder=16").unwrap(), 0);
        buffer.push(Token(1), Step::Complete(0), at(0));
        buffer.push(Token(2), Step::Complete(0), at(0));
        let mut left = 2;
        while buffer.pop(at(IDLE.us), |_| 10).is_some() {
            left -= 1;
        }
        assert!(left > 0, "more are outstanding");
        assert!(buffer.pop(at(IDLE.us), |_| left).is_some(), "none is outstanding");
        buffer.push(Token(3), Step::Complete(0), at(IDLE.us));
        while buffer.pop(at(2 * IDLE_COMPLETIONS.us), |_| 10).is_some() {}
        assert!(buffer.is_empty(), "an idle window is emptied");
    }

    #[test]
    fn order_is_independent_of_other_queue_pairs() {
        let faults = Faults::parse("seed=4,reorder=16").unwrap();
        let run = |others: bool| {
            let mut buffer = ReorderBuffer::new(&faults, 0);
            let mut order = Vec::new();
            for i in 0..100 {
                buffer.push(Token::new(5, 0, i), Step::Send, at(0));
                if others {
                    buffer.push(Token::new(6, 0, i), Step::Send, at(0));
                }
                while let Some((token, _)) = buffer.pop(at(0), |_| 1) {
                    order.extend((token.qpn() == 5).then_some(token.serial()));
                }
            }
            order
        };
        assert_eq!(run(false), run(true));
        let mut buffer = ReorderBuffer::new(&faults, 0);
        buffer.push(Token::new(5, 0, 1), Step::Send, at(0));
        buffer.forget(5);
        assert!(buffer.is_empty());
    }
}
