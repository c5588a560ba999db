//! The description of a rank's contexts for the other ranks, as its block of the allgather. Integers are little endian.
//!
//! A [`RawCount`] of contexts, then for each context a [`RawContext`], and for each of its addresses a [`RawCount`] of bytes and
//! the bytes.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The number of elements or bytes that follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawCount {
    count: U32,
}

ferrogin_ffi::assert_layout!(RawCount, size 4, align 1, { count @ 0 });

/// The head of a context.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawContext {
    scratch_addr: U64,
    scratch_rkey: U32,
    addresses: U32,
}

ferrogin_ffi::assert_layout!(RawContext, size 16, align 1, { scratch_addr @ 0, scratch_rkey @ 8, addresses @ 12 });

/// A rank's contexts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankContexts {
    /// By context id.
    pub contexts: Vec<PeerContext>,
}

/// One context of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerContext {
    /// Address and remote key of the scratch page.
    pub scratch: (u64, u32),
    /// Addresses of the data endpoint, then of the signal endpoints.
    pub addresses: Vec<Vec<u8>>,
}

impl RankContexts {
    /// The bytes for the other ranks.
    pub fn emit(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut put = |bytes: &[u8]| out.extend_from_slice(bytes);
        let count = |n: usize| RawCount { count: U32::new(n as u32) };
        put(count(self.contexts.len()).as_bytes());
        for context in &self.contexts {
            let (addr, rkey) = context.scratch;
            let addresses = U32::new(context.addresses.len() as u32);
            put(RawContext { scratch_addr: addr.into(), scratch_rkey: rkey.into(), addresses }.as_bytes());
            for address in &context.addresses {
                put(count(address.len()).as_bytes());
                put(address);
            }
        }
        out
    }

    /// The contexts that `bytes` describe; `None` if the bytes are not valid.
    pub fn parse(mut bytes: &[u8]) -> Option<Self> {
        let bytes = &mut bytes;
        let count = take::<RawCount>(bytes)?.count;
        let contexts = list(bytes, count, |bytes| {
            let head = take::<RawContext>(bytes)?;
            let addresses = list(bytes, head.addresses, |bytes| {
                let len = take::<RawCount>(bytes)?.count.get() as usize;
                let (address, rest) = bytes.split_at_checked(len)?;
                *bytes = rest;
                Some(address.to_vec())
            })?;
            Some(PeerContext { scratch: (head.scratch_addr.get(), head.scratch_rkey.get()), addresses })
        })?;
        bytes.is_empty().then_some(Self { contexts })
    }
}

fn take<T: FromBytes>(bytes: &mut &[u8]) -> Option<T> {
    let (value, rest) = T::read_from_prefix(bytes).ok()?;
    *bytes = rest;
    Some(value)
}

fn list<T>(bytes: &mut &[u8], count: U32, mut element: impl FnMut(&mut &[u8]) -> Option<T>) -> Option<Vec<T>> {
    let count = count.get() as usize;
    // Each element has at least four bytes, so a larger count is not valid and must not allocate memory.
    if count > bytes.len() / size_of::<RawCount>() {
        return None;
    }
    (0..count).map(|_| element(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_as_documented() {
        let context = PeerContext { scratch: (0x0807_0605_0403_0201, 0x0d0c_0b0a), addresses: vec![vec![0xa5; 2]] };
        let expected = b"\x01\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08\x0a\x0b\x0c\x0d\x01\0\0\0\x02\0\0\0\xa5\xa5";
        assert_eq!(RankContexts { contexts: vec![context] }.emit(), expected);
    }

    #[test]
    fn contexts_round_trip_and_truncated_ones_are_refused() {
        let context = |i: u8| PeerContext {
            scratch: (u64::from(i) << 40, u32::from(i)),
            addresses: vec![vec![i; 32], vec![], vec![1, 2, 3]],
        };
        let contexts = RankContexts { contexts: vec![context(1), context(2)] };
        let bytes = contexts.emit();
        assert_eq!(RankContexts::parse(&bytes), Some(contexts));
        for len in 0..bytes.len() {
            assert_eq!(RankContexts::parse(&bytes[..len]), None, "{len} bytes");
        }
        assert_eq!(RankContexts::parse(&[bytes.clone(), vec![0]].concat()), None);
        assert_eq!(RankContexts::parse(&[0xff; 64]), None);
    }
}
