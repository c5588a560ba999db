//! What an endpoint has in flight, by request id.

/// A bounded table. It grows with the entries in flight: most queues are never full.
#[derive(Debug)]
pub(super) struct Requests<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
    bound: u32,
}

impl<T> Requests<T> {
    pub(super) fn new(bound: u32) -> Self {
        Self { entries: Vec::new(), free: Vec::new(), bound }
    }

    /// Returns the id of the next entry; `None` if the table is full.
    pub(super) fn next_id(&self) -> Option<u32> {
        let new = self.entries.len() as u32;
        self.free.last().copied().or((new < self.bound).then_some(new))
    }

    /// Adds an entry and returns its id; `None` if the table is full.
    pub(super) fn insert(&mut self, entry: T) -> Option<u32> {
        let id = self.next_id()?;
        match self.free.pop() {
            Some(id) => self.entries[id as usize] = Some(entry),
            None => self.entries.push(Some(entry)),
        }
        Some(id)
    }

    /// Removes an entry; `None` if there is none with this id.
    pub(super) fn take(&mut self, id: u64) -> Option<T> {
        let id = u32::try_from(id).ok()?;
        let entry = self.entries.get_mut(id as usize)?.take()?;
        self.free.push(id);
        Some(entry)
    }

    /// Returns the number of entries.
    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Returns how many entries can be added.
    pub(super) fn room(&self) -> usize {
        self.bound as usize - self.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_used_again_and_bounded() {
        let mut requests = Requests::new(2);
        assert_eq!((requests.room(), requests.len(), requests.next_id()), (2, 0, Some(0)));
        assert_eq!((requests.insert('a'), requests.insert('b'), requests.insert('c')), (Some(0), Some(1), None));
        assert_eq!((requests.room(), requests.len(), requests.next_id()), (0, 2, None));
        assert_eq!(
            (requests.take(0), requests.take(0), requests.take(2), requests.take(1 << 40)),
            (Some('a'), None, None, None)
        );
        assert_eq!((requests.next_id(), requests.insert('d'), requests.take(1)), (Some(0), Some(0), Some('b')));
        assert_eq!((requests.room(), requests.len()), (1, 1));
    }
}
