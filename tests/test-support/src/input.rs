//! A fuzzer's arbitrary bytes, read as numbers.

/// The bytes that are left. Once they run out, every number is 0.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Returns whether no bytes are left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `len` bytes, or all that are left.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }

    fn number(&mut self, len: usize) -> u64 {
        self.bytes(len).iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    /// One byte.
    pub fn u8(&mut self) -> u8 {
        self.number(1) as u8
    }

    /// Two bytes, little endian.
    pub fn u16(&mut self) -> u16 {
        self.number(2) as u16
    }

    /// Four bytes, little endian.
    pub fn u32(&mut self) -> u32 {
        self.number(4) as u32
    }

    /// Eight bytes, little endian.
    pub fn u64(&mut self) -> u64 {
        self.number(8)
    }

    /// A number where behaviour may change: 0, a power of two, one less than a power of two, or a small or large
    /// number.
    pub fn edge(&mut self) -> u64 {
        match self.u8() % 8 {
            0 => 0,
            1 => u64::MAX >> (self.u8() % 64),
            2 => 1 << (self.u8() % 64),
            3 | 4 => self.u8().into(),
            5 => self.u32().into(),
            _ => self.u64(),
        }
    }

    /// One of `choices`, which must not be empty.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.u8()) % choices.len()]
    }
}
