//! Finds threads that post on one queue at the same time without sharing it, in a sharing mode that is too narrow.
//!
//! A post writes a slot of the queue's ring in 64-bit `st.mmio` stores, and then the queue's doorbell in a 32-bit one:
//! the number of slots that have been written. Threads that share the queue take different slots, and ring larger
//! numbers one after the other. Threads that don't know of each other take the same slot and ring the same number.

use std::collections::HashMap;
use std::fmt;

/// A thread's place in the launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Poster {
    pub block: [u32; 3],
    pub thread: [u32; 3],
}

impl fmt::Display for Poster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([bx, by, bz], [tx, ty, tz]) = (self.block, self.thread);
        write!(f, "block ({bx}, {by}, {bz}), thread ({tx}, {ty}, {tz})")
    }
}

/// The last store to a word of a ring or to a doorbell.
struct Last {
    poster: Poster,
    value: u64,
    /// How often any doorbell had been rung.
    rings: u64,
}

/// The posts of a launch.
#[derive(Default)]
pub struct Posts {
    /// The thread whose turn it is.
    pub current: Poster,
    words: HashMap<u64, Last>,
    rings: u64,
    /// The last thread that has written to a ring since the last doorbell.
    writer: Option<Poster>,
}

impl Posts {
    /// Records the current thread's `st.mmio`.
    ///
    /// # Errors
    /// The text of a trap: another thread posted at the same time.
    pub fn store(&mut self, address: u64, width: u8, value: u64) -> Result<(), String> {
        let rings_doorbell = width == 32;
        let last = self.words.get(&address).filter(|last| last.poster != self.current);
        let what = last.and_then(|last| match rings_doorbell {
            false if last.rings == self.rings => Some("wrote the same slot of a queue before any doorbell was rung"),
            true => {
                let ahead = (value as u32).wrapping_sub(last.value as u32) as i32;
                // A flush may ring for what is rung.
                let is_stale = ahead < 0 || ahead == 0 && self.writer == Some(self.current);
                is_stale.then_some("rang the same doorbell for the same slot, or a later one")
            }
            false => None,
        });
        if let (Some(last), Some(what)) = (last, what) {
            return Err(format!(
                "{} {what} ({address:#x}), so the two posted on one queue at the same time in a sharing mode for one thread or one \
                 block: use a wider mode, or let one of them post",
                last.poster
            ));
        }
        if rings_doorbell {
            self.rings += 1;
        }
        self.writer = (!rings_doorbell).then_some(self.current);
        self.words.insert(address, Last { poster: self.current, value, rings: self.rings });
        Ok(())
    }
}
