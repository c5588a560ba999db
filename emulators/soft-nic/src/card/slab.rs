//! Numbered entries whose numbers are reused.

use std::collections::VecDeque;

/// Numbered entries. A removed entry's number is reused, the one that has been free the longest first, so that stale
/// numbers are noticed, unless [`newest_first`](Self::newest_first).
#[derive(Debug)]
pub struct Slab<T> {
    entries: Vec<Option<T>>,
    free: VecDeque<u32>,
    newest_first: bool,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: VecDeque::new(), newest_first: false }
    }
}

impl<T> Slab<T> {
    /// Creates a table that reuses the most recently freed number first.
    pub fn newest_first() -> Self {
        Self { newest_first: true, ..Self::default() }
    }

    /// Adds an entry and returns its number.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(at) = self.free.pop_front() {
            self.entries[at as usize] = Some(value);
            return at;
        }
        self.entries.push(Some(value));
        self.entries.len() as u32 - 1
    }

    /// Removes an entry.
    pub fn remove(&mut self, at: u32) -> Option<T> {
        let value = self.entries.get_mut(at as usize)?.take()?;
        if self.newest_first {
            self.free.push_front(at)
        } else {
            self.free.push_back(at)
        }
        Some(value)
    }

    /// Returns the entry with this number.
    pub fn get(&self, at: u32) -> Option<&T> {
        self.entries.get(at as usize)?.as_ref()
    }

    /// Returns the entry with this number.
    pub fn get_mut(&mut self, at: u32) -> Option<&mut T> {
        self.entries.get_mut(at as usize)?.as_mut()
    }

    /// Returns all entries with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.entries.iter().enumerate().filter_map(|(at, e)| Some((at as u32, e.as_ref()?)))
    }

    /// Returns one more than the greatest number used so far.
    pub fn bound(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slab_numbers_return_oldest_first() {
        let mut slab = Slab::default();
        assert_eq!((slab.insert('a'), slab.insert('b'), slab.insert('c')), (0, 1, 2));
        assert_eq!(slab.remove(1), Some('b'));
        assert_eq!(slab.remove(1), None);
        slab.remove(0);
        assert_eq!(slab.len(), 1);
        assert_eq!((slab.insert('d'), slab.insert('e'), slab.insert('f')), (1, 0, 3));
        assert_eq!(slab.iter().count(), 4);
    }

    #[test]
    fn slab_numbers_return_newest_first() {
        let mut slab = Slab::newest_first();
        assert_eq!((slab.insert('a'), slab.insert('b'), slab.insert('c')), (0, 1, 2));
        slab.remove(1);
        slab.remove(0);
        assert_eq!((slab.insert('d'), slab.insert('e'), slab.insert('f')), (0, 1, 3));
    }
}
