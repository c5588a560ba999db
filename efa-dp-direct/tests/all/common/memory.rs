//! Rings and doorbells in test memory.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Words that a queue writes through a raw pointer.
pub struct Ring(Vec<AtomicU64>);

impl Ring {
    /// Creates a ring of `bytes` bytes, each set to `fill`.
    pub fn new(bytes: usize, fill: u8) -> Self {
        assert_eq!(bytes % 8, 0);
        Self((0..bytes / 8).map(|_| AtomicU64::new(u64::from_le_bytes([fill; 8]))).collect())
    }

    /// Creates a ring that holds these bytes.
    pub fn holding(bytes: &[u8]) -> Self {
        let ring = Self::new(bytes.len(), 0);
        ring.write(0, bytes);
        ring
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert_eq!((at % 8, bytes.len() % 8), (0, 0));
        for (i, word) in bytes.chunks_exact(8).enumerate() {
            self.0[at / 8 + i].store(u64::from_le_bytes(word.try_into().expect("eight bytes")), Ordering::Relaxed);
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
    }

    pub fn slot(&self, slot: usize, size: usize) -> Vec<u8> {
        let words = &self.0[slot * size / 8..(slot + 1) * size / 8];
        words.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect()
    }
}

/// A doorbell that detects when it's rung.
pub struct Doorbell {
    cell: AtomicU32,
    resting: u32,
}

impl Doorbell {
    /// Creates a doorbell that holds `resting` until it's rung, which must never be with that value.
    pub fn new(resting: u32) -> Self {
        Self { cell: AtomicU32::new(resting), resting }
    }

    pub fn as_ptr(&self) -> *mut u32 {
        self.cell.as_ptr()
    }

    /// Returns the last value rung since the previous call, if any.
    pub fn take(&self) -> Option<u32> {
        let value = self.cell.swap(self.resting, Ordering::Relaxed);
        (value != self.resting).then_some(value)
    }

    /// Changes the resting value, because the next one rung may be `rung`.
    pub fn rest_away_from(&mut self, rung: Option<u32>) {
        self.resting = !rung.unwrap_or(0);
        self.cell.store(self.resting, Ordering::Relaxed);
    }
}
