//! The protocol's tags, and which tags a receive matches.

/// Tag of message 0's length; other messages add their id.
pub(crate) const LENGTH: u64 = 1 << 32;
/// Tag of message 0's payload; other messages add their id.
pub(crate) const PAYLOAD: u64 = 1 << 33;
/// Tag of control messages; the message's kind is added.
pub(crate) const CONTROL: u64 = 1 << 34;
/// The id part of a tag.
pub(crate) const ID_MASK: u64 = 0xffff_ffff;
/// Bytes of the receive buffer for a length. A length has 8 bytes; the longer buffer shows when a length message is too long.
pub(crate) const LENGTH_BUFFER: usize = 16;

/// Which messages a receive matches: those whose tag equals `tag` in all bits that are clear in `ignore`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub tag: u64,
    pub ignore: u64,
}

impl Pattern {
    pub fn matches(self, tag: u64) -> bool {
        (tag ^ self.tag) & !self.ignore == 0
    }
}

/// Patterns that together match exactly the tags that the protocol doesn't use. The upper 32 bits of those it uses are 1, 2 or 4.
pub(crate) fn unknown_tags() -> impl Iterator<Item = Pattern> {
    // One pattern for each of the upper parts 0, 3, 5, 6 and 7; one for each bit from 35 up.
    let low = [0u64, 3, 5, 6, 7].into_iter().map(|high| Pattern { tag: high << 32, ignore: ID_MASK });
    low.chain((35..64).map(|bit| Pattern { tag: 1 << bit, ignore: !(1 << bit) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_patterns_match_exactly_the_unused_tags() {
        let known = |tag: u64| matches!(tag >> 32, 1 | 2 | 4);
        let caught = |tag: u64| unknown_tags().any(|pattern| pattern.matches(tag));
        for high in (0..256u64).chain((0..32).map(|bit| 1 << bit)).chain([u64::from(u32::MAX)]) {
            for low in [0, 1, ID_MASK] {
                let tag = high << 32 | low;
                assert_ne!(known(tag), caught(tag), "{tag:#x}");
            }
        }
    }
}
