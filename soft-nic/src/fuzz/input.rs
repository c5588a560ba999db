//! Arbitrary bytes, read as numbers; when they are used up everything is 0.

/// What is left.
pub(super) struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }

    fn number(&mut self, len: usize) -> u64 {
        self.bytes(len).iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    pub(super) fn u8(&mut self) -> u8 {
        self.number(1) as u8
    }

    pub(super) fn u16(&mut self) -> u16 {
        self.number(2) as u16
    }

    pub(super) fn u32(&mut self) -> u32 {
        self.number(4) as u32
    }

    pub(super) fn u64(&mut self) -> u64 {
        self.number(8)
    }

    pub(super) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.u8()) % choices.len()]
    }
}
