//! Requests that a fault keeps back: to be delivered late or out of order, or completed so.
//!
//! Order is a matter of sequence, not of time: a request gets a place when it comes, at random but not far behind its
//! turn, and goes when nothing that may still come can have a place before it. So the same seed gives the same order
//! for the same requests of a queue pair, however fast they are done. Where no more can come, or none comes for a while,
//! what is there goes, in order of places: whoever waits for a completion may post no more before it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::qp::Token;
use crate::fault::Faults;
use crate::random::Random;

/// What happens to a request when it is let go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Its source is read and sent.
    Send,
    /// It completes with this status.
    Complete(u8),
}

/// Without arrivals for this long, and for so many looks, a window is emptied: whoever posts may wait, and so may a
/// request that is not done. Looks count because when the engine itself was away, what came meanwhile comes first.
const IDLE: Moment = Moment { us: 20, look: 4 };
const IDLE_COMPLETIONS: Moment = Moment { us: 10_000, look: 256 };
/// A retransmission happens up to this much later, and up to so many other requests pass it.
const REREAD_US: u64 = 200;
const REREAD_PLACES: u64 = 32;

/// The card's time: its clock, and its looks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moment {
    pub us: u64,
    pub look: u32,
}

/// A request that is kept back; the one with the first place goes first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    place: u64,
    number: u64,
    /// Microseconds of the card's clock before which it stays.
    due: u64,
    token: u64,
    status: Option<u8>,
}

/// The window of one kind of step of one queue pair.
#[derive(Debug)]
struct Window {
    held: BinaryHeap<Reverse<Held>>,
    /// Requests that came.
    count: u64,
    last_arrival: Moment,
    random: Random,
}

impl Window {
    /// The next that may go; at most `coming` are still to come, if that is known.
    fn pop(&mut self, now: Moment, idle: Moment, coming: Option<u64>) -> Option<(Token, Step)> {
        let Reverse(first) = self.held.peek()?;
        // What comes next has no place before its number.
        let last = self.last_arrival;
        let idle = now.us.saturating_sub(last.us) >= idle.us && now.look.wrapping_sub(last.look) >= idle.look;
        let decided = first.place <= self.count || coming == Some(0) || idle;
        if !decided || first.due > now.us {
            return None;
        }
        let Reverse(first) = self.held.pop()?;
        Some((Token(first.token), first.status.map_or(Step::Send, Step::Complete)))
    }
}

/// All that is kept back on one card.
#[derive(Debug)]
pub(crate) struct Holds {
    seed: u64,
    reorder: u64,
    delay_us: (u64, u64),
    reread: f64,
    /// By queue pair; sends, then completions.
    windows: BTreeMap<(u16, bool), Window>,
}

impl Holds {
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
            held: BinaryHeap::new(),
            count: 0,
            last_arrival: now,
            random: Random::seeded(self.seed ^ u64::from(token.qpn()) << 17 ^ u64::from(completion) << 16),
        });
        let random = &mut window.random;
        let (from, to) = self.delay_us;
        let mut due = now.us + if to == 0 { 0 } else { from + random.below(to - from + 1) };
        let mut place = window.count + random.below(self.reorder);
        if !completion && random.chance(self.reread) {
            // The first transmission is lost: what arrives is what the source holds when it is read again.
            due += 1 + random.below(REREAD_US);
            place += 1 + random.below(REREAD_PLACES);
        }
        let status = match step {
            Step::Send => None,
            Step::Complete(status) => Some(status),
        };
        window.held.push(Reverse(Held { place, number: window.count, due, token: token.0, status }));
        window.count += 1;
        window.last_arrival = now;
    }

    /// The next that may go, given how many requests of a queue pair are not completed.
    pub(crate) fn pop(&mut self, now: Moment, outstanding: impl Fn(u16) -> u32) -> Option<(Token, Step)> {
        self.windows.iter_mut().find_map(|((qpn, completion), window)| {
            if !completion || window.held.is_empty() {
                return window.pop(now, IDLE, None);
            }
            let coming = u64::from(outstanding(*qpn)).saturating_sub(window.held.len() as u64);
            window.pop(now, IDLE_COMPLETIONS, Some(coming))
        })
    }

    /// The queue pair is gone; the next with its number begins anew.
    pub(crate) fn forget(&mut self, qpn: u16) {
        self.windows.remove(&(qpn, false));
        self.windows.remove(&(qpn, true));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.windows.values().all(|window| window.held.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A moment long after others in looks.
    fn at(us: u64) -> Moment {
        Moment { us, look: us as u32 * IDLE_COMPLETIONS.look }
    }

    /// In which order 256 requests go that come in bursts, with pauses between them shorter than idleness.
    fn order(faults: &str, pace: u64) -> Vec<u64> {
        let mut holds = Holds::new(&Faults::parse(faults).unwrap(), 0);
        let mut order = Vec::new();
        let mut now = 0;
        for i in 0..256 {
            holds.push(Token(i), Step::Send, at(now));
            if i % 7 == 0 {
                now += pace;
            }
            while let Some((token, _)) = holds.pop(at(now), |_| 1) {
                order.push(token.0);
            }
        }
        for now in now..now + 10_000 {
            while let Some((token, step)) = holds.pop(at(now), |_| 1) {
                assert_eq!(step, Step::Send);
                order.push(token.0);
            }
        }
        assert!(holds.is_empty());
        order
    }

    #[test]
    fn order_depends_on_the_seed_and_not_on_time() {
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
    fn nothing_is_passed_by_more_than_the_window() {
        for (at, token) in order("seed=9,reorder=16", 1).into_iter().enumerate() {
            assert!((at as u64).abs_diff(token) < 32, "{token} went as number {at}");
        }
    }

    #[test]
    fn delays_are_kept() {
        let mut holds = Holds::new(&Faults::parse("delay_us=100..100").unwrap(), 0);
        holds.push(Token(1), Step::Complete(0), at(1000));
        assert_eq!(holds.pop(at(1099), |_| 1), None);
        assert_eq!(holds.pop(at(1100), |_| 1), Some((Token(1), Step::Complete(0))));
    }

    #[test]
    fn a_reread_comes_later() {
        let mut holds = Holds::new(&Faults::parse("reread=1").unwrap(), 0);
        holds.push(Token(1), Step::Send, at(0));
        assert_eq!(holds.pop(at(0), |_| 1), None);
        assert!(holds.pop(at(1 + REREAD_US), |_| 1).is_some());
        holds.push(Token(2), Step::Complete(0), at(1000));
        assert!(holds.pop(at(1000), |_| 1).is_some(), "completions are not read again");
    }

    #[test]
    fn completions_wait_for_those_that_come() {
        let mut holds = Holds::new(&Faults::parse("seed=3,reorder=16").unwrap(), 0);
        holds.push(Token(1), Step::Complete(0), at(0));
        holds.push(Token(2), Step::Complete(0), at(0));
        let mut left = 2;
        while holds.pop(at(IDLE.us), |_| 10).is_some() {
            left -= 1;
        }
        assert!(left > 0, "others are to come");
        assert!(holds.pop(at(IDLE.us), |_| left).is_some(), "none is");
        holds.push(Token(3), Step::Complete(0), at(IDLE.us));
        while holds.pop(at(2 * IDLE_COMPLETIONS.us), |_| 10).is_some() {}
        assert!(holds.is_empty(), "those that come may depend on these");
    }

    #[test]
    fn queue_pairs_do_not_disturb_one_another() {
        let faults = Faults::parse("seed=4,reorder=16").unwrap();
        let run = |others: bool| {
            let mut holds = Holds::new(&faults, 0);
            let mut order = Vec::new();
            for i in 0..100 {
                holds.push(Token::new(5, 0, i), Step::Send, at(0));
                if others {
                    holds.push(Token::new(6, 0, i), Step::Send, at(0));
                }
                while let Some((token, _)) = holds.pop(at(0), |_| 1) {
                    order.extend((token.qpn() == 5).then_some(token.serial()));
                }
            }
            order
        };
        assert_eq!(run(false), run(true));
        let mut holds = Holds::new(&faults, 0);
        holds.push(Token::new(5, 0, 1), Step::Send, at(0));
        holds.forget(5);
        assert!(holds.is_empty());
    }
}
