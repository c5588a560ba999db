//! NCCL's requests, from the call that starts an operation to the `test` that reports it done.

use crate::error::{DataResult, Error};
use crate::registry::TAG_BITS;
use std::ffi::c_void;

/// A context's request: index and generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    index: u32,
    generation: u32,
}

/// A handle has bit 62 set; below it are the tag of the context's handle, the generation and the index.
const MARK: u64 = 1 << 62;
const INDEX_BITS: u32 = 20;
const GENERATION_BITS: u32 = 62 - INDEX_BITS - TAG_BITS;

impl Request {
    /// Returns the handle for NCCL of a request of the context with this tag.
    pub fn handle(self, tag: u64) -> *mut c_void {
        let high = tag << GENERATION_BITS | u64::from(self.generation);
        (MARK | high << INDEX_BITS | u64::from(self.index)) as *mut c_void
    }

    /// Returns the context's tag and the request; `None` if this isn't a request's handle.
    pub fn parse(handle: *mut c_void) -> Option<(u64, Self)> {
        let bits = handle as u64;
        let low = |shift: u32, bits_of: u32| bits >> shift & ((1 << bits_of) - 1);
        let request = Self { index: low(0, INDEX_BITS) as u32, generation: low(INDEX_BITS, GENERATION_BITS) as u32 };
        (bits >> 62 == 1).then_some((low(INDEX_BITS + GENERATION_BITS, TAG_BITS), request))
    }
}

#[derive(Debug, Default, Clone)]
struct Entry {
    generation: u32,
    open: bool,
    /// Parts that haven't completed yet.
    parts: u32,
}

/// A context's open requests.
#[derive(Debug)]
pub struct Requests {
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Parts of all requests that haven't completed yet, by peer.
    parts: Vec<u64>,
}

impl Requests {
    /// Creates an empty set of requests to `nranks` peers.
    pub fn new(nranks: usize) -> Self {
        Self { entries: Vec::new(), free: Vec::new(), parts: vec![0; nranks] }
    }

    /// Opens a request with no parts, so it's already complete.
    ///
    /// # Errors
    /// A million requests are open.
    #[inline(always)]
    pub fn open(&mut self) -> DataResult<Request> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.entries.len() < 1 << INDEX_BITS => {
                self.entries.push(Entry::default());
                self.entries.len() as u32 - 1
            }
            None => {
                return Err(Error::Usage(
                    "a million requests are open: NCCL must test some before it posts more".to_owned(),
                )
                .into());
            }
        };
        let entry = &mut self.entries[index as usize];
        entry.generation = (entry.generation + 1) & ((1 << GENERATION_BITS) - 1);
        (entry.open, entry.parts) = (true, 0);
        Ok(Request { index, generation: entry.generation })
    }

    fn entry(&mut self, request: Request) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(request.index as usize)?;
        (entry.open && entry.generation == request.generation).then_some(entry)
    }

    /// Adds a part to an open request to a peer.
    pub fn add_part(&mut self, request: Request, peer: usize) {
        self.entries[request.index as usize].parts += 1;
        self.parts[peer] += 1;
    }

    /// Marks a part of a request to a peer as complete.
    pub fn part_done(&mut self, request: Request, peer: usize) {
        // A request with parts is open.
        let parts = &mut self.entries[request.index as usize].parts;
        if *parts > 0 {
            *parts -= 1;
            self.parts[peer] -= 1;
        }
    }

    /// Returns true if a request to this peer is incomplete.
    pub fn is_under_way(&self, peer: usize) -> bool {
        self.parts[peer] > 0
    }

    /// Returns the peers with incomplete requests.
    pub fn under_way(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().enumerate().filter(|(_, parts)| **parts > 0).map(|(peer, _)| peer)
    }

    /// Returns how many parts haven't completed yet.
    pub fn parts(&self) -> u64 {
        self.parts.iter().sum()
    }

    /// Returns how many requests are open.
    pub fn count_open(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Closes a request if all its parts are complete, and returns whether they are; `None` if the request isn't open.
    pub fn close(&mut self, request: Request) -> Option<bool> {
        let entry = self.entry(request)?;
        let is_done = entry.parts == 0;
        entry.open = !is_done;
        self.free.extend(is_done.then_some(request.index));
        Some(is_done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_done_after_all_its_parts_and_closed_once() {
        let mut requests = Requests::new(2);
        let (a, b, c) = (requests.open().unwrap(), requests.open().unwrap(), requests.open().unwrap());
        assert_eq!(requests.close(b), Some(true), "without parts");
        requests.add_part(a, 1);
        requests.add_part(a, 1);
        requests.part_done(a, 1);
        requests.part_done(b, 1);
        requests.part_done(c, 1);
        assert!(requests.under_way().eq([1]));
        assert_eq!(requests.close(a), Some(false));
        requests.part_done(a, 1);
        assert_eq!(requests.under_way().next(), None);
        assert_eq!([requests.close(a), requests.close(a)], [Some(true), None]);
        let again = requests.open().unwrap();
        assert_ne!(a, again);
        assert_eq!([requests.close(a), requests.close(again)], [None, Some(true)]);
        assert_eq!(requests.count_open(), 1);
    }

    #[test]
    fn handles_round_trip_and_foreign_ones_are_refused() {
        let request = Request { index: (1 << INDEX_BITS) - 1, generation: (1 << GENERATION_BITS) - 1 };
        for tag in [0, 5, (1 << TAG_BITS) - 1] {
            assert_eq!(Request::parse(request.handle(tag)), Some((tag, request)));
        }
        for bits in [0, 1, u64::MAX, 1 << 63, 0xdead_beef] {
            assert_eq!(Request::parse(bits as *mut c_void), None, "{bits:#x}");
        }
    }
}
