//! Requests that a fault keeps back: to be delivered late or out of order, or completed so.

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

#[derive(Debug)]
struct Held {
    /// Microseconds of the card's clock before which it stays.
    due: u64,
    token: Token,
    step: Step,
}

/// Without arrivals for this long the window is emptied: whoever waits for a completion may post no more before it.
const IDLE_US: u64 = 20;
/// A retransmission happens up to this much later.
const REREAD_US: u64 = 200;

/// The window of one kind of step.
#[derive(Debug, Default)]
struct Window {
    held: Vec<Held>,
    last_arrival: u64,
}

impl Window {
    fn push(&mut self, held: Held, now: u64) {
        self.last_arrival = now;
        self.held.push(held);
    }

    /// The next that may go, chosen at random among those due.
    fn pop(&mut self, now: u64, window: usize, random: &mut Random) -> Option<(Token, Step)> {
        if self.held.is_empty() {
            return None;
        }
        let full = self.held.len() >= window.max(1);
        if !full && now < self.last_arrival + IDLE_US {
            return None;
        }
        let due = |held: &Held| held.due <= now;
        let count = self.held.iter().filter(|h| due(h)).count() as u64;
        let chosen = if window > 1 { random.below(count) } else { 0 };
        let (at, _) = self.held.iter().enumerate().filter(|(_, h)| due(h)).nth(chosen as usize)?;
        // In order unless reordering is asked for: then the order of what stays does not matter either.
        let held = if window > 1 { self.held.swap_remove(at) } else { self.held.remove(at) };
        Some((held.token, held.step))
    }
}

/// All that is kept back on one card.
#[derive(Debug)]
pub(crate) struct Holds {
    random: Random,
    window: usize,
    delay_us: (u64, u64),
    reread: f64,
    sends: Window,
    completions: Window,
}

impl Holds {
    pub(crate) fn new(faults: &Faults, card: u32) -> Self {
        Self {
            random: Random::seeded(faults.seed.wrapping_add(u64::from(card) << 32)),
            window: faults.reorder as usize,
            delay_us: faults.delay_us,
            reread: faults.reread,
            sends: Window::default(),
            completions: Window::default(),
        }
    }

    fn delay(&mut self) -> u64 {
        let (from, to) = self.delay_us;
        if to == 0 { 0 } else { from + self.random.below(to - from + 1) }
    }

    pub(crate) fn push(&mut self, token: Token, step: Step, now: u64) {
        let mut due = now + self.delay();
        if step == Step::Send && self.random.chance(self.reread) {
            // The first transmission is lost: what arrives is what the source holds when it is read again.
            due += 1 + self.random.below(REREAD_US);
        }
        let window = if step == Step::Send { &mut self.sends } else { &mut self.completions };
        window.push(Held { due, token, step }, now);
    }

    pub(crate) fn pop(&mut self, now: u64) -> Option<(Token, Step)> {
        let Self { sends, completions, window, random, .. } = self;
        sends.pop(now, *window, random).or_else(|| completions.pop(now, *window, random))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sends.held.is_empty() && self.completions.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(faults: &str) -> Vec<u64> {
        let mut holds = Holds::new(&Faults::parse(faults).unwrap(), 0);
        for i in 0..64 {
            holds.push(Token(i), Step::Send, 0);
        }
        let mut order = Vec::new();
        for now in 0..10_000 {
            while let Some((token, step)) = holds.pop(now) {
                assert_eq!(step, Step::Send);
                order.push(token.0);
            }
        }
        assert!(holds.is_empty());
        order
    }

    #[test]
    fn reordering_is_seeded_and_loses_nothing() {
        let (a, b, c) = (order("seed=1,reorder=16"), order("seed=1,reorder=16"), order("seed=2,reorder=16"));
        assert_eq!(a, b);
        assert_ne!(a, c);
        assert_ne!(a, (0..64).collect::<Vec<_>>());
        let mut sorted = a;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..64).collect::<Vec<_>>());
    }

    #[test]
    fn delays_are_kept() {
        let mut holds = Holds::new(&Faults::parse("delay_us=100..100").unwrap(), 0);
        holds.push(Token(1), Step::Complete(0), 1000);
        assert_eq!(holds.pop(1099), None);
        assert_eq!(holds.pop(1100), Some((Token(1), Step::Complete(0))));
    }

    #[test]
    fn a_reread_comes_later() {
        let mut holds = Holds::new(&Faults::parse("reread=1").unwrap(), 0);
        holds.push(Token(1), Step::Send, 0);
        assert_eq!(holds.pop(0), None);
        assert!(holds.pop(1 + REREAD_US).is_some());
        holds.push(Token(2), Step::Complete(0), 1000);
        assert!(holds.pop(1000 + IDLE_US).is_some(), "completions are not read again");
    }
}
