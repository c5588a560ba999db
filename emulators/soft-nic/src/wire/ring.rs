//! A ring of packets in memory shared by two processes: one writes, one reads.
//!
//! The peer is not trusted: cursors are checked before use, and the checked value is a copy.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::packet::{Corrupt, HEADER_LEN, HEADER_WORDS, Header};
use crate::memory;

/// Size of a ring's data in bytes.
pub const RING_LEN: usize = 512 * 1024;
/// Size of the control block before the data in bytes. Each cursor has cache lines of its own.
pub const CONTROL_LEN: usize = 4096;
/// Maximum payload of a packet: a ring holds several packets, so that both sides can copy at the same time.
pub const MAX_PAYLOAD: usize = 64 * 1024;

/// Alignment of records in bytes.
const ALIGN: usize = 64;
/// Word 0 of a record after which the reader continues at the start of the ring. No header has this kind.
const PAD: u64 = 0xff;

const TAIL_AT: usize = 0;
const HEAD_AT: usize = 128;
const SLEEP_AT: usize = 256;

fn record_len(payload: usize) -> usize {
    (HEADER_LEN + payload).next_multiple_of(ALIGN)
}

/// A ring's memory. Both ends have a copy of the addresses, and keep the mapping alive.
#[derive(Debug, Clone, Copy)]
struct Area {
    control: *mut u8,
    data: *mut u8,
}

// SAFETY: plain addresses; `Producer::new` and `Consumer::new` are unsafe, and their callers keep the memory mapped.
unsafe impl Send for Area {}

impl Area {
    fn cursor(&self, at: usize) -> &AtomicU64 {
        let word: *mut u64 = self.control.wrapping_add(at).cast();
        // SAFETY: the caller of `Producer::new` or `Consumer::new` keeps the page-aligned control block mapped; the
        // word is only accessed atomically.
        unsafe { AtomicU64::from_ptr(word) }
    }

    fn sleeping(&self) -> &AtomicU32 {
        let word: *mut u32 = self.control.wrapping_add(SLEEP_AT).cast();
        // SAFETY: the caller of `Producer::new` or `Consumer::new` keeps the page-aligned control block mapped; the
        // word is only accessed atomically.
        unsafe { AtomicU32::from_ptr(word) }
    }
}

/// The writing end.
#[derive(Debug)]
pub struct Producer {
    area: Area,
    tail: u64,
    /// The reader's cursor as last seen.
    head: u64,
    unannounced: bool,
}

impl Producer {
    /// # Safety
    /// `control` and `data` point to `CONTROL_LEN` and `RING_LEN` mapped, page-aligned bytes that outlive this value,
    /// zeroed when the ring is new, and written through no other producer.
    pub unsafe fn new(control: *mut u8, data: *mut u8) -> Self {
        Self { area: Area { control, data }, tail: 0, head: 0, unannounced: false }
    }

    /// Appends a packet. Returns false if there is no room now.
    ///
    /// # Errors
    /// The reader's cursor is impossible.
    ///
    /// # Safety
    /// `header.len` bytes at `payload` are readable.
    pub unsafe fn push(&mut self, header: &Header, payload: *const u8) -> Result<bool, Corrupt> {
        let len = record_len(header.len as usize);
        debug_assert!(header.len as usize <= MAX_PAYLOAD);
        let at = (self.tail % RING_LEN as u64) as usize;
        let gap = RING_LEN - at;
        let pad = if gap < len { gap } else { 0 };
        if !self.room(pad + len)? {
            return Ok(false);
        }
        let mut record = self.area.data.wrapping_add(at);
        if pad > 0 {
            // SAFETY: `at` is a multiple of ALIGN below RING_LEN, so a word fits; the reader does not look at it yet.
            unsafe { memory::store_release(record.cast(), PAD) };
            self.tail += pad as u64;
            record = self.area.data;
        }
        for (i, word) in header.to_words().into_iter().enumerate() {
            // SAFETY: `len` bytes from `record` lie in the ring and belong to the writer until the tail moves.
            unsafe { memory::store_release(record.wrapping_add(8 * i).cast(), word) };
        }
        // SAFETY: the caller keeps `header.len` bytes at `payload` readable; `room` found `len` bytes at `record`,
        // which belong to the writer until the tail moves.
        unsafe { memory::copy_away(record.wrapping_add(HEADER_LEN), payload, header.len as usize) };
        self.tail += len as u64;
        self.area.cursor(TAIL_AT).store(self.tail, Ordering::Release);
        self.unannounced = true;
        Ok(true)
    }

    fn room(&mut self, len: usize) -> Result<bool, Corrupt> {
        let free = |head: u64, tail: u64| RING_LEN as u64 - (tail - head);
        if free(self.head, self.tail) >= len as u64 {
            return Ok(true);
        }
        let head = self.area.cursor(HEAD_AT).load(Ordering::Acquire);
        if head < self.head || head > self.tail {
            return Err(Corrupt);
        }
        self.head = head;
        Ok(free(head, self.tail) >= len as u64)
    }

    /// Returns true if the reader sleeps and packets were pushed since the last call: the reader must then be woken.
    pub fn must_wake(&mut self) -> bool {
        if !self.unannounced {
            return false;
        }
        self.unannounced = false;
        // Pairs with the fence in `Consumer::sleep`: either the reader sees the tail, or this sees it asleep.
        fence(Ordering::SeqCst);
        self.area.sleeping().load(Ordering::Relaxed) != 0
    }
}

/// The reading end.
#[derive(Debug)]
pub struct Consumer {
    area: Area,
    head: u64,
    /// The writer's cursor as last seen.
    tail: u64,
}

impl Consumer {
    /// # Safety
    /// As for [`Producer::new`], with no other consumer.
    pub unsafe fn new(control: *mut u8, data: *mut u8) -> Self {
        Self { area: Area { control, data }, head: 0, tail: 0 }
    }

    /// Returns whether there are packets, which [`Consumer::peek`] then returns.
    pub fn packets_arrived(&mut self) -> bool {
        self.tail = self.area.cursor(TAIL_AT).load(Ordering::Acquire);
        self.head != self.tail
    }

    /// Returns the oldest packet that [`Consumer::packets_arrived`] saw: its header, and where its payload stays until
    /// [`Consumer::pop`].
    ///
    /// # Errors
    /// The writer's cursor or the packet is impossible.
    pub fn peek(&mut self) -> Result<Option<(Header, *const u8)>, Corrupt> {
        loop {
            let (head, tail) = (self.head, self.tail);
            if head == tail {
                return Ok(None);
            }
            if tail < head || tail - head > RING_LEN as u64 || !tail.is_multiple_of(ALIGN as u64) {
                return Err(Corrupt);
            }
            let at = (self.head % RING_LEN as u64) as usize;
            let record = self.area.data.wrapping_add(at);
            let here = (RING_LEN - at).min((self.tail - self.head) as usize);
            // SAFETY: cursors are multiples of ALIGN, so a whole header lies at `record` in the mapped ring.
            let words: [u64; HEADER_WORDS] = unsafe { memory::load_words(record) };
            if words[0] == PAD {
                if here != RING_LEN - at {
                    return Err(Corrupt);
                }
                self.advance(here);
                continue;
            }
            let header = Header::from_words(words);
            let len = header.len as usize;
            if len > MAX_PAYLOAD || record_len(len) > here || !header.is_consistent() {
                return Err(Corrupt);
            }
            return Ok(Some((header, record.wrapping_add(HEADER_LEN))));
        }
    }

    /// Frees the packet's room. Its payload had `len` bytes.
    pub fn pop(&mut self, len: u32) {
        self.advance(record_len(len as usize));
    }

    fn advance(&mut self, len: usize) {
        self.head += len as u64;
        self.area.cursor(HEAD_AT).store(self.head, Ordering::Release);
    }

    /// Tells the writer that the reader is about to sleep. Returns false if a packet has arrived meanwhile.
    pub fn sleep(&mut self) -> bool {
        self.area.sleeping().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.area.cursor(TAIL_AT).load(Ordering::Acquire) == self.head
    }

    /// Tells the writer that the reader is awake.
    pub fn wake(&mut self) {
        self.area.sleeping().store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::packet::Kind;
    use super::*;
    use crate::memory::Mapping;
    use crate::random::Random;

    fn ring() -> (Mapping, Producer, Consumer) {
        let map = Mapping::anonymous(CONTROL_LEN + RING_LEN).unwrap();
        let (control, data) = (map.as_ptr(), map.as_ptr().wrapping_add(CONTROL_LEN));
        // SAFETY: `map` holds both areas and is returned along with the ends.
        let producer = unsafe { Producer::new(control, data) };
        // SAFETY: `map` holds both areas and is returned along with the ends.
        let consumer = unsafe { Consumer::new(control, data) };
        (map, producer, consumer)
    }

    /// Returns the oldest packet, if there is one.
    fn next(consumer: &mut Consumer) -> Result<Option<(Header, *const u8)>, Corrupt> {
        consumer.packets_arrived();
        consumer.peek()
    }

    fn packet(token: u64, len: u32) -> Header {
        Header { total: len, len, ..Header::new(Kind::Write, token) }
    }

    #[test]
    fn packets_arrive_in_order_over_many_laps() {
        let (_map, mut producer, mut consumer) = ring();
        let source: Vec<u8> = (0..MAX_PAYLOAD).map(|i| (i * 7) as u8).collect();
        let mut random = Random::seeded(3);
        let (mut sent, mut received) = (0u64, 0u64);
        let mut lens = std::collections::VecDeque::new();
        while received < 5000 {
            if random.chance(0.6) {
                let len = if random.chance(0.5) { random.below(200) } else { random.below(MAX_PAYLOAD as u64 + 1) };
                let start = (sent % 256) as usize;
                let len = (len as usize).min(source.len() - start) as u32;
                // SAFETY: `source` holds `start + len` bytes.
                if unsafe { producer.push(&packet(sent, len), source.as_ptr().wrapping_add(start)) }.unwrap() {
                    lens.push_back(len);
                    sent += 1;
                }
            } else if let Some((header, payload)) = next(&mut consumer).unwrap() {
                assert_eq!(header, packet(received, lens.pop_front().unwrap()));
                // SAFETY: the payload stays until `pop`.
                let bytes = unsafe { std::slice::from_raw_parts(payload, header.len as usize) };
                let start = (received % 256) as usize;
                assert_eq!(bytes, &source[start..start + bytes.len()]);
                consumer.pop(header.len);
                received += 1;
            } else {
                assert_eq!(sent, received);
            }
        }
    }

    #[test]
    fn full_ring_refuses_a_packet() {
        let (_map, mut producer, mut consumer) = ring();
        let source = vec![1u8; MAX_PAYLOAD];
        let mut count = 0u64;
        // SAFETY: `source` holds the payload.
        while unsafe { producer.push(&packet(count, MAX_PAYLOAD as u32), source.as_ptr()) }.unwrap() {
            count += 1;
        }
        assert_eq!(count, 7);
        let (header, _) = next(&mut consumer).unwrap().unwrap();
        consumer.pop(header.len);
        // SAFETY: `source` holds the payload.
        assert!(unsafe { producer.push(&packet(count, MAX_PAYLOAD as u32), source.as_ptr()) }.unwrap());
    }

    #[test]
    fn impossible_cursors_and_packets_are_refused() {
        let (map, mut producer, mut consumer) = ring();
        // SAFETY: no payload is read.
        assert!(unsafe { producer.push(&packet(1, 0), std::ptr::null()) }.unwrap());
        let put = |at: usize, value: u64| {
            // SAFETY: the mapping is alive and holds the word.
            unsafe { memory::store_release(map.as_ptr().wrapping_add(at).cast(), value) };
        };
        put(TAIL_AT, 2 * RING_LEN as u64);
        assert_eq!(next(&mut consumer), Err(Corrupt));
        put(TAIL_AT, 63);
        assert_eq!(next(&mut consumer), Err(Corrupt));
        put(TAIL_AT, 64);
        let mut long = packet(1, 64);
        long.total = 64;
        put(CONTROL_LEN + 32, long.to_words()[4]);
        put(CONTROL_LEN + 24, long.to_words()[3]);
        assert_eq!(next(&mut consumer), Err(Corrupt), "longer than what was written");
        put(CONTROL_LEN, 99);
        assert_eq!(next(&mut consumer), Err(Corrupt), "unknown kind");
        put(CONTROL_LEN, PAD);
        assert_eq!(next(&mut consumer), Err(Corrupt), "padding that does not reach the end");
        put(HEAD_AT, 128);
        producer.head = 0;
        producer.tail = RING_LEN as u64;
        put(HEAD_AT, 2 * RING_LEN as u64);
        // SAFETY: no payload is read.
        assert_eq!(unsafe { producer.push(&packet(1, 0), std::ptr::null()) }, Err(Corrupt));
    }

    #[test]
    fn sleeping_reader_is_woken_once() {
        let (_map, mut producer, mut consumer) = ring();
        assert!(consumer.sleep());
        // SAFETY: no payload is read.
        assert!(unsafe { producer.push(&packet(1, 0), std::ptr::null()) }.unwrap());
        assert!(producer.must_wake());
        assert!(!producer.must_wake(), "once for each batch");
        assert!(!consumer.sleep(), "something is there");
        consumer.wake();
        // SAFETY: no payload is read.
        assert!(unsafe { producer.push(&packet(2, 0), std::ptr::null()) }.unwrap());
        assert!(!producer.must_wake());
    }
}
