//! Short names for signals' words, so that a put with a signal needs no more than one write with immediate data.
//!
//! Each stream has a table of a few words that signals add 1 to. A signal's message defines an entry, and once the
//! receiver has acknowledged the signal, it's sure to know the entry. An entry may be replaced once all signals that
//! name it have been acknowledged.

use super::stream::before;

/// A signal's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// The registration's number.
    pub memory: u32,
    /// The offset in it.
    pub offset: u64,
    /// Whether its signals are strong.
    pub strong: bool,
}

/// How a signal names its word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// The receiver knows the entry with this number, counted from 1.
    Known(u32),
    /// A message has the word, and defines the entry with this number; 0 means none.
    InMessage(u32),
}

#[derive(Debug)]
struct Entry {
    word: Word,
    /// The signal that defined it.
    defined: u32,
    /// The latest signal that defined or named it.
    used: u32,
}

/// The sender's table.
#[derive(Debug, Default)]
pub struct Words(Vec<Entry>);

impl Words {
    /// Returns how a stream's signal `number` names `word`, with a table of `capacity` entries. The receiver has
    /// applied all signals before `acknowledged`.
    pub fn name(&mut self, word: Word, capacity: usize, number: u32, acknowledged: u32) -> Name {
        let mut entries = self.0.iter_mut().zip(1..);
        if let Some((entry, at)) = entries.find(|(entry, _)| entry.word == word) {
            if !before(entry.defined, acknowledged) {
                return Name::InMessage(0);
            }
            entry.used = number;
            return Name::Known(at);
        }
        let entry = Entry { word, defined: number, used: number };
        if self.0.len() < capacity {
            self.0.push(entry);
            return Name::InMessage(self.0.len() as u32);
        }
        let unused = self.0.iter_mut().zip(1..).filter(|(entry, _)| before(entry.used, acknowledged));
        let Some((oldest, at)) = unused.max_by_key(|(entry, _)| acknowledged.wrapping_sub(entry.used)) else {
            return Name::InMessage(0);
        };
        *oldest = entry;
        Name::InMessage(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(offset: u64) -> Word {
        Word { memory: 1, offset, strong: true }
    }

    #[test]
    fn word_is_known_once_its_definition_is_acknowledged() {
        let mut words = Words::default();
        assert_eq!(words.name(word(0), 2, u32::MAX, u32::MAX), Name::InMessage(1));
        assert_eq!(words.name(word(0), 2, 0, u32::MAX), Name::InMessage(0));
        assert_eq!(words.name(word(0), 2, 1, 0), Name::Known(1));
        assert_eq!(words.name(Word { strong: false, ..word(0) }, 2, 2, 0), Name::InMessage(2));
        assert_eq!(words.name(word(0), 0, 3, 0), Name::Known(1));
        assert_eq!(Words::default().name(word(0), 0, 3, 3), Name::InMessage(0));
    }

    #[test]
    fn entry_changes_after_all_its_signals_are_acknowledged() {
        let mut words = Words::default();
        assert_eq!(words.name(word(0), 2, 0, 0), Name::InMessage(1));
        assert_eq!(words.name(word(8), 2, 1, 0), Name::InMessage(2));
        assert_eq!(words.name(word(0), 2, 2, 2), Name::Known(1));
        // Signal 2 is outstanding, so the other entry is replaced.
        assert_eq!(words.name(word(16), 2, 3, 2), Name::InMessage(2));
        assert_eq!(words.name(word(24), 2, 4, 2), Name::InMessage(0));
        assert_eq!(words.name(word(24), 2, 5, 3), Name::InMessage(1));
    }
}
