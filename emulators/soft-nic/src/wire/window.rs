//! Which numbered packets have arrived: each is accepted once, and one that never comes is noticed.

/// Packets that may overtake another one. A sender has far fewer in flight.
const SPAN: u64 = 1024;

/// A packet that does not fit what has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotInOrder {
    #[error("it came before: someone repeats packets")]
    Repeated,
    #[error("an earlier packet never came: it was lost or removed on its way")]
    Missing,
}

/// The packets of one direction of a session.
#[derive(Debug, Clone)]
pub(crate) struct Window {
    /// Every number from here on is new.
    next: u64,
    /// The [`SPAN`] numbers before `next`, a bit each.
    arrived: [u64; SPAN as usize / 64],
}

impl Default for Window {
    fn default() -> Self {
        // Nothing before the first number is missing.
        Self { next: 0, arrived: [u64::MAX; SPAN as usize / 64] }
    }
}

impl Window {
    fn word(number: u64) -> (usize, u64) {
        ((number % SPAN / 64) as usize, 1 << (number % 64))
    }

    /// Notes that the packet `number` has arrived.
    ///
    /// # Errors
    /// [`NotInOrder`]; the packet is then not noted.
    pub(crate) fn accept(&mut self, number: u64) -> Result<(), NotInOrder> {
        if number >= self.next {
            if number - self.next >= SPAN {
                return Err(NotInOrder::Missing);
            }
            for new in self.next..=number {
                // The bit still says whether the number SPAN earlier has arrived.
                let (at, bit) = Self::word(new);
                if self.arrived[at] & bit == 0 {
                    return Err(NotInOrder::Missing);
                }
                self.arrived[at] &= !bit;
                self.next = new + 1;
            }
        } else if self.next - number > SPAN {
            return Err(NotInOrder::Repeated);
        }
        let (at, bit) = Self::word(number);
        if self.arrived[at] & bit != 0 {
            return Err(NotInOrder::Repeated);
        }
        self.arrived[at] |= bit;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_accepted_once_in_any_order() {
        let mut window = Window::default();
        // Pairs are swapped, and the third of each hundred comes 90 later.
        let mut late = None;
        for number in 0..10_000u64 {
            let number = number ^ 1;
            if number % 100 == 3 {
                late = Some(number);
            } else {
                assert_eq!(window.accept(number), Ok(()), "{number}");
                assert_eq!(window.accept(number), Err(NotInOrder::Repeated), "{number}");
            }
            if number % 100 == 93
                && let Some(late) = late.take()
            {
                assert_eq!(window.accept(late), Ok(()), "{late}");
            }
        }
        assert_eq!(window.accept(5), Err(NotInOrder::Repeated), "far back");
    }

    #[test]
    fn number_that_never_comes_is_noticed() {
        let mut window = Window::default();
        for number in (0..SPAN + 7).filter(|number| *number != 7) {
            assert_eq!(window.accept(number), Ok(()), "{number}");
        }
        assert_eq!(window.accept(SPAN + 7), Err(NotInOrder::Missing));
        assert_eq!(Window::default().accept(SPAN), Err(NotInOrder::Missing), "too far ahead");
        assert_eq!(Window::default().accept(u64::MAX), Err(NotInOrder::Missing));
    }
}
