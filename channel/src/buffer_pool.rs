//! Memory of long messages that are read no more, kept for those to come.
//!
//! An allocator gives memory of this size back to the system and fetches it anew, and the system clears every page again: for 1 MiB that
//! takes longer than to move the message. So whoever has done with a message may hand its memory in; it is one store for the process, as
//! the allocator is.

use std::sync::{Mutex, PoisonError};

/// Shorter ones are the allocator's business, bytes.
const LONG: usize = 64 << 10;
/// Bytes that are kept at most, and of one piece: a quarter.
const KEPT: usize = 64 << 20;

/// The oldest first.
static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Keeps the memory of a message for one that channels will read. What is short, or more than 64 MiB in all, goes back to the allocator.
pub fn recycle(memory: Vec<u8>) {
    if !(LONG..=KEPT / 4).contains(&memory.capacity()) {
        return;
    }
    let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
    spare.push(memory);
    let mut bytes: usize = spare.iter().map(Vec::capacity).sum();
    let too_many = spare.iter().take_while(|oldest| {
        let goes = bytes > KEPT;
        bytes -= if goes { oldest.capacity() } else { 0 };
        goes
    });
    let too_many = too_many.count();
    let old: Vec<_> = spare.drain(..too_many).collect();
    // Given back without the lock.
    drop(spare);
    drop(old);
}

/// Memory for a message of `len` bytes, if some is kept that is long enough and not much longer.
pub(crate) fn take(len: usize) -> Option<Vec<u8>> {
    if len < LONG {
        return None;
    }
    let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
    // The newest fits best: it is in the caches.
    let at = spare.iter().rposition(|memory| (len..=4 * len).contains(&memory.capacity()))?;
    Some(spare.remove(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_reuses_buffers_up_to_its_limit() {
        recycle(vec![0; LONG - 1]);
        recycle(Vec::with_capacity(KEPT / 4 + 1));
        assert!(take(LONG - 1).is_none());
        // Nobody else in this process uses memory of this size.
        let len = 9 << 20;
        for _ in 0..20 {
            recycle(Vec::with_capacity(len));
        }
        assert!(take(2 * len).is_none() && take(len / 5).is_none());
        let kept = std::iter::from_fn(|| take(len)).inspect(|memory| assert!(memory.capacity() >= len)).count();
        assert!((1..=KEPT / len).contains(&kept), "{kept}");
    }
}
