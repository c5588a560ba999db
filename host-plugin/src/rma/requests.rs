//! NCCL's requests, from the call that starts an operation to the `test` that reports it done.

use crate::error::{DataResult, Error};
use crate::registry::TAG_BITS;
use std::ffi::c_void;

/// A context's request, with the bits of its handle: an index, above it the tag of the context's handle, and above that
/// a number that changes when the request at the index is opened and closed. It's odd while the request is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request(u64);

const INDEX_BITS: u32 = 20;
const STEP: u64 = 1 << (INDEX_BITS + TAG_BITS);
/// In an entry's number of parts: the request has failed, because the rank in the other bits is lost.
const LOST: u32 = 1 << 31;

impl Request {
    /// Returns the handle for NCCL.
    pub fn handle(self) -> *mut c_void {
        self.0 as *mut c_void
    }

    /// Returns the context's tag and the request; `None` if this isn't a request's handle.
    pub fn parse(handle: *mut c_void) -> Option<(u64, Self)> {
        let bits = handle as u64;
        (bits & STEP != 0).then_some((bits >> INDEX_BITS & ((1 << TAG_BITS) - 1), Self(bits)))
    }

    fn index(self) -> usize {
        (self.0 & ((1 << INDEX_BITS) - 1)) as usize
    }
}

#[derive(Debug)]
struct Entry {
    request: Request,
    /// Parts that haven't completed yet, or [`LOST`].
    parts: u32,
    /// The last round in which a test found it incomplete.
    tested: u32,
    /// The next free entry, if this one is free.
    next: usize,
}

/// A context's open requests.
#[derive(Debug)]
pub struct Requests {
    entries: Vec<Entry>,
    /// The first free entry; the number of entries if none is free.
    free: usize,
    /// The tag of the context's handle.
    pub tag: u64,
    round: u32,
}

impl Requests {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self { entries: Vec::new(), free: 0, tag: 0, round: 1 }
    }

    /// Opens a request with no parts, so it's already complete.
    ///
    /// # Errors
    /// A million requests are open.
    #[inline(always)]
    pub fn open(&mut self) -> DataResult<Request> {
        let entry = match self.entries.get_mut(self.free) {
            Some(entry) => entry,
            None => self.grow()?,
        };
        entry.request.0 = entry.request.0.wrapping_add(STEP);
        let (request, next) = (entry.request, entry.next);
        self.free = next;
        Ok(request)
    }

    #[cold]
    fn grow(&mut self) -> DataResult<&mut Entry> {
        let index = self.entries.len();
        if index == 1 << INDEX_BITS {
            let text = "a million requests are open: NCCL must test some before it posts more".to_owned();
            return Err(Error::Usage(text).into());
        }
        let request = Request(self.tag << INDEX_BITS | index as u64);
        self.entries.push(Entry { request, parts: 0, tested: 0, next: index + 1 });
        Ok(&mut self.entries[index])
    }

    /// Adds a part to an open request.
    pub fn add_part(&mut self, request: Request) {
        self.entries[request.index()].parts += 1;
    }

    /// Marks a part of a request as complete.
    pub fn part_done(&mut self, request: Request) {
        // A request with parts is open.
        self.entries[request.index()].parts -= 1;
    }

    /// Closes a request if all its parts are complete, and returns whether they are; `None` if the request isn't open.
    #[inline(always)]
    pub fn close(&mut self, request: Request) -> Option<bool> {
        let entry = self.entries.get_mut(request.index()).filter(|entry| entry.request == request)?;
        if entry.parts > 0 {
            return Some(false);
        }
        entry.request.0 = request.0.wrapping_add(STEP);
        entry.next = std::mem::replace(&mut self.free, request.index());
        Some(true)
    }

    /// Ends an open request to a lost rank, whose parts won't complete.
    pub fn fail(&mut self, request: Request, lost: usize) {
        self.entries[request.index()].parts = LOST | lost as u32;
    }

    /// Closes an open request if it has failed, and returns the lost rank.
    pub fn close_failed(&mut self, request: Request) -> Option<usize> {
        let parts = &mut self.entries[request.index()].parts;
        let lost = (*parts & LOST != 0).then_some((*parts & !LOST) as usize)?;
        *parts = 0;
        self.close(request);
        Some(lost)
    }

    /// Begins a round of tests.
    pub fn begin_round(&mut self) {
        self.round = self.round.wrapping_add(1);
    }

    /// Notes that a test found an open request incomplete. Returns true if an earlier one of this round did too.
    pub fn is_tested_again(&mut self, request: Request) -> bool {
        std::mem::replace(&mut self.entries[request.index()].tested, self.round) == self.round
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_done_after_all_its_parts_and_closed_once() {
        let mut requests = Requests::new();
        let (a, b, c) = (requests.open().unwrap(), requests.open().unwrap(), requests.open().unwrap());
        assert_eq!(requests.close(b), Some(true), "without parts");
        [a, a, c].into_iter().for_each(|request| requests.add_part(request));
        requests.part_done(a);
        assert_eq!(requests.close(a), Some(false));
        requests.part_done(a);
        assert_eq!([requests.close(a), requests.close(a)], [Some(true), None]);
        let again = [requests.open().unwrap(), requests.open().unwrap()];
        assert_eq!(again.map(Request::index), [a.index(), b.index()], "freed places are used again");
        assert!(!again.contains(&a) && !again.contains(&b));
        assert_eq!(
            [a, b, again[0], again[1], c].map(|request| requests.close(request)),
            [None, None, Some(true), Some(true), Some(false)]
        );
        let ahead = Request(again[0].0.wrapping_add(STEP));
        assert_eq!((Request::parse(ahead.handle()), requests.close(again[0])), (None, None), "a closed one's number");
    }

    #[test]
    fn failed_request_is_closed_once_with_the_lost_rank() {
        let mut requests = Requests::new();
        let (failed, other) = (requests.open().unwrap(), requests.open().unwrap());
        [failed, failed, other].into_iter().for_each(|request| requests.add_part(request));
        requests.fail(failed, 3);
        assert_eq!([failed, other].map(|request| requests.close(request)), [Some(false); 2]);
        assert_eq!([failed, other].map(|request| requests.close_failed(request)), [Some(3), None]);
        assert_eq!(requests.close(failed), None);
        let next = requests.open().unwrap();
        assert_eq!((next.index(), requests.close(next)), (failed.index(), Some(true)), "its place is used again");
    }

    #[test]
    fn second_test_of_a_round_is_noticed() {
        let mut requests = Requests::new();
        let open = [requests.open().unwrap(), requests.open().unwrap()];
        for _ in 0..2 {
            requests.begin_round();
            assert_eq!(open.map(|request| requests.is_tested_again(request)), [false, false]);
            assert_eq!(open.map(|request| requests.is_tested_again(request)), [true, true]);
        }
    }

    #[test]
    fn handles_round_trip_and_foreign_ones_are_refused() {
        for tag in [0, 5, (1 << TAG_BITS) - 1] {
            let mut requests = Requests { tag, ..Requests::new() };
            for _ in 0..3 << (63 - INDEX_BITS - TAG_BITS) {
                let request = requests.open().unwrap();
                assert_eq!(Request::parse(request.handle()), Some((tag, request)));
                requests.close(request);
            }
        }
        for bits in [0u64, 1, 1 << 62, 0xdead_beef] {
            assert_eq!(Request::parse(bits as *mut c_void), None, "{bits:#x}");
        }
    }
}
