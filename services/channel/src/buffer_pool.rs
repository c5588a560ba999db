//! A pool of buffers for long messages.
//!
//! An allocator gives memory of this size back to the system and maps it anew each time, and the system clears every
//! page; for 1 MiB that takes longer than moving the message. So a reader can return the buffer of a message it has
//! read. There is one pool per process.

use parking_lot::Mutex;

/// Capacity in bytes of the shortest buffer that the pool keeps.
const SHORTEST: usize = 64 << 10;
/// The most bytes the pool keeps. A single buffer may have at most a quarter of them.
const CAPACITY: usize = 64 << 20;

/// The buffers, oldest first.
static POOL: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Puts a buffer into the pool, for messages that channels read. Frees it if it's too short or too long, and frees the
/// pool's oldest buffers beyond 64 MiB in all.
pub fn recycle(memory: Vec<u8>) {
    if !(SHORTEST..=CAPACITY / 4).contains(&memory.capacity()) {
        return;
    }
    let mut pool = POOL.lock();
    pool.push(memory);
    let mut bytes: usize = pool.iter().map(Vec::capacity).sum();
    let mut old = Vec::new();
    while bytes > CAPACITY {
        let oldest = pool.remove(0);
        bytes -= oldest.capacity();
        old.push(oldest);
    }
    // Freed outside the lock.
    drop(pool);
    drop(old);
}

/// Takes a buffer for a message of `len` bytes, if the pool has one that is long enough and not much longer.
pub(crate) fn take(len: usize) -> Option<Vec<u8>> {
    if len < SHORTEST {
        return None;
    }
    let mut pool = POOL.lock();
    // The newest buffer is the most likely to be in a cache.
    let at = pool.iter().rposition(|memory| (len..=4 * len).contains(&memory.capacity()))?;
    Some(pool.remove(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs in its own process: other tests use this one's pool.
    #[test]
    fn pool_reuses_buffers_up_to_its_limit() {
        ferrogin_test_support::child::run("pool_reuses_buffers_up_to_its_limit", &[], || {
            recycle(vec![0; SHORTEST - 1]);
            recycle(Vec::with_capacity(CAPACITY / 4 + 1));
            assert!(take(SHORTEST - 1).is_none());
            let len = 9 << 20;
            for _ in 0..20 {
                recycle(Vec::with_capacity(len));
            }
            assert!(take(2 * len).is_none() && take(len / 5).is_none());
            let kept = std::iter::from_fn(|| take(len)).inspect(|memory| assert!(memory.capacity() >= len)).count();
            assert_eq!(kept, CAPACITY / len);
        });
    }
}
