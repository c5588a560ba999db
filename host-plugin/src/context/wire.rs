//! A rank's description of its contexts for the other ranks: its block in the allgather. Integers are little endian.
//!
//! A [`RawCount`] of contexts, then each context's [`RawContext`], followed by a [`RawEndpoint`] for each of its
//! endpoints. A rank that isolates peers adds the handle of its listener, for a ring that goes on without ranks that
//! go.

use crate::address::EndpointAddress;
use ferrogin_ffi::ext::EmulatedPeer;
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The number of elements that follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawCount {
    count: U32,
}

ferrogin_ffi::assert_layout!(RawCount, size 4, align 1, { count @ 0 });

/// The header of a context.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawContext {
    scratch_addr: U64,
    scratch_rkey: U32,
    endpoints: U32,
    gid: [u8; 16],
    n_signals: U32,
    generation: U32,
}

ferrogin_ffi::assert_layout!(RawContext, size 40, align 1, {
    scratch_addr @ 0, scratch_rkey @ 8, endpoints @ 12, gid @ 16, n_signals @ 32, generation @ 36,
});

/// An endpoint that peers write to.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawEndpoint {
    qkey: U32,
    qpn: U16,
}

ferrogin_ffi::assert_layout!(RawEndpoint, size 6, align 1, { qkey @ 0, qpn @ 4 });

/// A rank's contexts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankContexts {
    /// By context id.
    pub contexts: Vec<PeerContext>,
    /// The listener's handle, if the rank isolates peers.
    pub listener: Option<[u8; HANDLE_MAXSIZE]>,
}

/// One context of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerContext {
    /// Address and remote key of the scratch page.
    pub scratch: (u64, u32),
    /// The card that all its endpoints are on.
    pub gid: [u8; 16],
    /// Emulated signals; zero with card signals.
    pub signals: EmulatedPeer,
    /// Queue pair and QKey of the data endpoint, then of the signal endpoints. With emulated signals, the inbox's only.
    pub endpoints: Vec<(u16, u32)>,
}

impl PeerContext {
    /// Describes a context whose endpoints have these addresses; `None` if they are on several cards.
    pub fn new(scratch: (u64, u32), signals: EmulatedPeer, addresses: &[EndpointAddress]) -> Option<Self> {
        let gid = addresses.first()?.gid;
        let endpoints = addresses.iter().map(|address| (address.qpn, address.qkey)).collect();
        addresses.iter().all(|address| address.gid == gid).then_some(Self { scratch, gid, signals, endpoints })
    }

    /// Returns the endpoints' addresses.
    pub fn addresses(&self) -> impl Iterator<Item = EndpointAddress> + '_ {
        self.endpoints.iter().map(|(qpn, qkey)| EndpointAddress { gid: self.gid, qpn: *qpn, qkey: *qkey })
    }
}

impl RankContexts {
    /// Returns the bytes for the other ranks.
    pub fn emit(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut put = |bytes: &[u8]| out.extend_from_slice(bytes);
        let count = |n: usize| RawCount { count: U32::new(n as u32) };
        put(count(self.contexts.len()).as_bytes());
        for context in &self.contexts {
            let (addr, rkey) = context.scratch;
            let endpoints = U32::new(context.endpoints.len() as u32);
            let (scratch_addr, scratch_rkey) = (addr.into(), rkey.into());
            let (n_signals, generation) = (context.signals.n_signals.into(), context.signals.generation.into());
            let gid = context.gid;
            put(RawContext { scratch_addr, scratch_rkey, endpoints, gid, n_signals, generation }.as_bytes());
            for (qpn, qkey) in &context.endpoints {
                put(RawEndpoint { qkey: U32::new(*qkey), qpn: U16::new(*qpn) }.as_bytes());
            }
        }
        put(self.listener.as_ref().map_or(&[], |handle| &handle[..]));
        out
    }

    /// Parses the contexts in `bytes`; returns `None` if the bytes are invalid.
    pub fn parse(mut bytes: &[u8]) -> Option<Self> {
        let bytes = &mut bytes;
        let count = take::<RawCount>(bytes)?.count;
        let contexts = list(bytes, count, |bytes| {
            let head = take::<RawContext>(bytes)?;
            let endpoints = list(bytes, head.endpoints, |bytes| {
                let endpoint = take::<RawEndpoint>(bytes)?;
                Some((endpoint.qpn.get(), endpoint.qkey.get()))
            })?;
            let signals = EmulatedPeer { n_signals: head.n_signals.get(), generation: head.generation.get() };
            let scratch = (head.scratch_addr.get(), head.scratch_rkey.get());
            Some(PeerContext { scratch, gid: head.gid, signals, endpoints })
        })?;
        let listener = if bytes.is_empty() { None } else { Some(take(bytes)?) };
        bytes.is_empty().then_some(Self { contexts, listener })
    }
}

fn take<T: FromBytes>(bytes: &mut &[u8]) -> Option<T> {
    let (value, rest) = T::read_from_prefix(bytes).ok()?;
    *bytes = rest;
    Some(value)
}

fn list<T>(bytes: &mut &[u8], count: U32, mut element: impl FnMut(&mut &[u8]) -> Option<T>) -> Option<Vec<T>> {
    let count = count.get() as usize;
    // Each element has at least four bytes, so a larger count is invalid and must not allocate memory.
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
        let scratch = (0x0807_0605_0403_0201, 0x0d0c_0b0a);
        let context = PeerContext {
            scratch,
            gid: *b"0123456789abcdef",
            signals: EmulatedPeer { n_signals: 0x2423_2221, generation: 0x2827_2625 },
            endpoints: vec![(0x0f0e, 0x1413_1211)],
        };
        let expected = b"\x01\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08\x0a\x0b\x0c\x0d\x01\0\0\x000123456789abcdef\
            \x21\x22\x23\x24\x25\x26\x27\x28\x11\x12\x13\x14\x0e\x0f";
        assert_eq!(RankContexts { contexts: vec![context], listener: None }.emit(), expected);
    }

    #[test]
    fn contexts_round_trip_and_truncated_ones_are_refused() {
        let context = |i: u8| PeerContext {
            scratch: (u64::from(i) << 40, u32::from(i)),
            gid: [i; 16],
            signals: EmulatedPeer { n_signals: i.into(), generation: 7 },
            endpoints: (0..u16::from(i) * 2).map(|n| (n, u32::from(n) << 16)).collect(),
        };
        let contexts = RankContexts { contexts: vec![context(1), context(2)], listener: None };
        let bytes = contexts.emit();
        let isolating = RankContexts { listener: Some([7; HANDLE_MAXSIZE]), ..contexts.clone() };
        assert_eq!(RankContexts::parse(&isolating.emit()), Some(isolating));
        assert_eq!(RankContexts::parse(&bytes), Some(contexts));
        for len in 0..bytes.len() {
            assert_eq!(RankContexts::parse(&bytes[..len]), None, "{len} bytes");
        }
        assert_eq!(RankContexts::parse(&[bytes.clone(), vec![0]].concat()), None);
        assert_eq!(RankContexts::parse(&[0xff; 64]), None);
    }

    #[test]
    fn context_is_on_one_card() {
        let address = |gid: u8, qpn| EndpointAddress { gid: [gid; 16], qpn, qkey: 7 };
        let none = EmulatedPeer::default();
        let context = PeerContext::new((1, 2), none, &[address(1, 3), address(1, 4)]).unwrap();
        assert_eq!(context.addresses().collect::<Vec<_>>(), [address(1, 3), address(1, 4)]);
        assert_eq!(PeerContext::new((1, 2), none, &[address(1, 3), address(2, 4)]), None);
        assert_eq!(PeerContext::new((1, 2), none, &[]), None);
    }
}
