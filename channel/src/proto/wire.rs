//! Formats of the protocol: control messages, and addresses of listeners. All numbers are little endian.
//!
//! A control message is a [`ControlHeader`] and the sender's endpoint name, which only a hello has. Meaning of its fields by kind:
//!
//! | field | in |
//! |---|---|
//! | `matching` | hello: the sender's tag matching, coded as in an address |
//! | `to` | the receiver's number of the channel; hello: the listener's number; path response: 0 |
//! | `from` | the sender's number of the channel |
//! | `secret` | the receiver's secret for the channel: a sender that does not have it is not the peer |
//! | `sender_secret` | hello, welcome: the sender's secret; path challenge: the nonce that the response returns in `secret` |
//! | `value` | hello, welcome: bytes of the longest message that the sender takes; refuse, abort: the reason; close: id of the first message that the sender has not read |
//! | `id` | hello, welcome: id of the sender's first message; close: id after its last message; read: id of the first message that the sender has not read; path challenge: id that the receiver's first message must have; refuse: the sender's tag matching, if that is the reason |
//! | `start_id` | hello: id that the receiver's first message must have, 0 for any |
//!
//! A listener answers a hello with a path challenge when an earlier channel was opened with the same endpoint name. The endpoint that
//! has the name now, and that sent the hello, answers with a path response, and is then welcomed. So a hello with the name of another
//! endpoint, or a late hello, ends no channel.

use std::mem::{offset_of, size_of};
use std::sync::Arc;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use crate::{ChannelError, Matching};

/// Version of the protocol and of the address.
pub(crate) const VERSION: u8 = 5;
/// The longest endpoint name that an address has room for, bytes.
pub(crate) const NAME_MAX: usize = 100;
/// Bytes of an address at most.
pub const ADDRESS_MAX: usize = 128;
/// Bytes of a control message at most.
pub(crate) const CONTROL_MAX: usize = size_of::<ControlHeader>() + NAME_MAX;

const MAGIC: [u8; 4] = *b"FGC1";
const ADDRESS_MAGIC: [u8; 4] = *b"FGCA";

/// The fixed part of a control message.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct ControlHeader {
    magic: [u8; 4],
    version: u8,
    matching: u8,
    kind: u8,
    name_len: u8,
    to: U32,
    from: U32,
    secret: U64,
    sender_secret: U64,
    value: U64,
    id: U32,
    start_id: U32,
}

const _: () = {
    assert!(size_of::<ControlHeader>() == 48);
    assert!(offset_of!(ControlHeader, version) == 4);
    assert!(offset_of!(ControlHeader, kind) == 6);
    assert!(offset_of!(ControlHeader, to) == 8);
    assert!(offset_of!(ControlHeader, secret) == 16);
    assert!(offset_of!(ControlHeader, value) == 32);
    assert!(offset_of!(ControlHeader, start_id) == 44);
};

/// The fixed part of an address; the name of the endpoint follows.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct AddressHeader {
    magic: [u8; 4],
    /// Its upper byte is 0.
    version: U16,
    name_len: u8,
    matching: u8,
    listener: U32,
    reserved: U32,
    secret: U64,
}

const _: () = {
    assert!(size_of::<AddressHeader>() == 24 && size_of::<AddressHeader>() + NAME_MAX <= ADDRESS_MAX);
    assert!(offset_of!(AddressHeader, version) == 4);
    assert!(offset_of!(AddressHeader, matching) == 7);
    assert!(offset_of!(AddressHeader, listener) == 8);
    assert!(offset_of!(AddressHeader, secret) == 16);
};

/// Kinds of control messages.
#[derive(Clone, Copy, Debug, Immutable, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub(crate) enum Kind {
    Hello = 1,
    Welcome = 2,
    Refuse = 3,
    Ping = 4,
    Pong = 5,
    Close = 6,
    CloseAck = 7,
    Abort = 8,
    Read = 9,
    PathChallenge = 10,
    PathResponse = 11,
}

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Control<'a> {
    pub version: u8,
    pub matching: u8,
    pub kind: Kind,
    pub to: u32,
    pub from: u32,
    pub secret: u64,
    pub sender_secret: u64,
    pub value: u64,
    pub id: u32,
    pub start_id: u32,
    pub name: &'a [u8],
}

impl<'a> Control<'a> {
    /// A message with a kind, a receiver and the receiver's secret. All other fields are 0.
    pub fn new(kind: Kind, to: u32, secret: u64) -> Self {
        let (version, name) = (VERSION, &[][..]);
        Self { version, matching: 0, kind, to, from: 0, secret, sender_secret: 0, value: 0, id: 0, start_id: 0, name }
    }

    pub fn emit(&self) -> Vec<u8> {
        let header = ControlHeader {
            magic: MAGIC,
            version: self.version,
            matching: self.matching,
            kind: self.kind as u8,
            name_len: self.name.len() as u8,
            to: self.to.into(),
            from: self.from.into(),
            secret: self.secret.into(),
            sender_secret: self.sender_secret.into(),
            value: self.value.into(),
            id: self.id.into(),
            start_id: self.start_id.into(),
        };
        [header.as_bytes(), self.name].concat()
    }

    /// None when the bytes are not a control message. A message of another version is read like one of this version.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, name) = ControlHeader::ref_from_prefix(bytes).ok()?;
        let kind = Kind::try_read_from_bytes(&[header.kind]).ok()?;
        if header.magic != MAGIC || name.len() != usize::from(header.name_len) || name.len() > NAME_MAX {
            return None;
        }
        Some(Self {
            version: header.version,
            matching: header.matching,
            kind,
            to: header.to.get(),
            from: header.from.get(),
            secret: header.secret.get(),
            sender_secret: header.sender_secret.get(),
            value: header.value.get(),
            id: header.id.get(),
            start_id: header.start_id.get(),
            name,
        })
    }
}

/// Where a listener can be reached: at most [`ADDRESS_MAX`] bytes, which the application carries to the other side. An address contains
/// a secret: every process that has the address may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub(crate) matching: Matching,
    pub(crate) listener: u32,
    pub(crate) secret: u64,
    pub(crate) name: Box<[u8]>,
}

impl Address {
    /// The address as bytes, at most [`ADDRESS_MAX`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let header = AddressHeader {
            magic: ADDRESS_MAGIC,
            version: u16::from(VERSION).into(),
            name_len: self.name.len() as u8,
            matching: self.matching as u8,
            listener: self.listener.into(),
            reserved: 0.into(),
            secret: self.secret.into(),
        };
        [header.as_bytes(), &self.name].concat()
    }

    /// The address in `bytes`; bytes after it (padding) are ignored.
    ///
    /// # Errors
    /// [`ChannelError::BadAddress`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ChannelError> {
        let bad = |what| ChannelError::BadAddress { what };
        let (header, rest) = AddressHeader::ref_from_prefix(bytes).map_err(|_| bad("they are too few"))?;
        if header.magic != ADDRESS_MAGIC {
            return Err(bad("they do not begin with the magic of an address"));
        }
        if header.version.get() != u16::from(VERSION) {
            return Err(bad("it has another version: run the same version of ferrogin on both ends"));
        }
        let matching = Matching::from_code(header.matching).ok_or(bad("its tag matching is unknown"))?;
        let len = usize::from(header.name_len);
        if len == 0 || len > NAME_MAX {
            return Err(bad("its endpoint name has an impossible length"));
        }
        let name = rest.get(..len).ok_or(bad("it is cut off"))?.into();
        Ok(Self { matching, listener: header.listener.get(), secret: header.secret.get(), name })
    }

    /// The endpoint of the listener, for people.
    pub fn endpoint(&self) -> Arc<str> {
        label(&self.name)
    }

    /// How the endpoint of the listener matches tags. Only endpoints that match alike connect.
    pub fn matching(&self) -> Matching {
        self.matching
    }
}

/// An endpoint name for people: host and port of a socket address, text as it is, anything else in hexadecimal.
pub(crate) fn label(name: &[u8]) -> Arc<str> {
    let family = name.first_chunk().map(|bytes| i32::from(u16::from_ne_bytes(*bytes)));
    if let (Some(libc::AF_INET), 16) = (family, name.len()) {
        let port = u16::from_be_bytes([name[2], name[3]]);
        return format!("{}.{}.{}.{}:{port}", name[4], name[5], name[6], name[7]).into();
    }
    if let (Some(libc::AF_INET6), 28) = (family, name.len())
        && let Some(octets) = name.get(8..).and_then(|rest| rest.first_chunk::<16>().copied())
    {
        let port = u16::from_be_bytes([name[2], name[3]]);
        return format!("[{}]:{port}", std::net::Ipv6Addr::from(octets)).into();
    }
    let text = name.strip_suffix(&[0]).unwrap_or(name);
    match std::str::from_utf8(text) {
        Ok(text) if !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic()) => text.into(),
        _ => format!("endpoint {}", name.iter().map(|byte| format!("{byte:02x}")).collect::<String>()).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn control(name: &[u8]) -> Control<'_> {
        let (version, kind) = (1, Kind::Hello);
        Control {
            version,
            matching: 9,
            kind,
            to: 2,
            from: 3,
            secret: 4,
            sender_secret: 5,
            value: 6,
            id: 7,
            start_id: 8,
            name,
        }
    }

    fn address() -> Address {
        Address { matching: Matching::Software, listener: 1, secret: 2, name: b"name".as_slice().into() }
    }

    #[test]
    fn formats_have_their_golden_bytes() {
        let bytes = control(b"ab").emit();
        assert_eq!(bytes[..16], *b"FGC1\x01\x09\x01\x02\x02\0\0\0\x03\0\0\0");
        assert_eq!(bytes[16..40], *b"\x04\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0");
        assert_eq!(bytes[40..], *b"\x07\0\0\0\x08\0\0\0ab");
        assert_eq!(Control::parse(&bytes), Some(control(b"ab")));
        assert_eq!(address().to_bytes(), *b"FGCA\x05\0\x04\x02\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0name");
        let longest = Address { name: vec![7; NAME_MAX].into(), ..address() };
        assert!(longest.to_bytes().len() <= ADDRESS_MAX);
    }

    #[test]
    fn address_survives_padding_and_nothing_else() {
        let mut padded = address().to_bytes();
        for len in 0..padded.len() {
            assert!(Address::parse(&padded[..len]).is_err(), "{len}");
        }
        padded.resize(ADDRESS_MAX, 0xa5);
        assert_eq!(Address::parse(&padded), Ok(address()));
        padded[7] = 3;
        assert!(Address::parse(&padded).unwrap_err().to_string().contains("tag matching"));
        padded[4] = 4;
        assert!(Address::parse(&padded).unwrap_err().to_string().contains("version"));
    }

    #[test]
    fn labels_are_readable() {
        let mut v4 = vec![0; 16];
        v4[..8].copy_from_slice(&[2, 0, 0x1f, 0x90, 10, 0, 0, 1]);
        assert_eq!(&*label(&v4), "10.0.0.1:8080");
        let mut v6 = vec![0; 28];
        v6[0] = libc::AF_INET6 as u8;
        v6[3] = 80;
        v6[23] = 1;
        assert_eq!(&*label(&v6), "[::1]:80");
        assert_eq!(&*label(b"fi_shm://12:0\0"), "fi_shm://12:0");
        assert_eq!(&*label(&[0xfe, 0x80]), "endpoint fe80");
    }

    proptest! {
        #[test]
        fn parsers_take_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200), magic in any::<bool>()) {
            let mut bytes = bytes;
            if magic && bytes.len() > 4 {
                bytes[..4].copy_from_slice(&MAGIC);
                if bytes.len() >= size_of::<ControlHeader>() {
                    bytes[6] = 1 + bytes[6] % 11;
                    bytes[7] = (bytes.len() - size_of::<ControlHeader>()) as u8;
                }
            }
            if let Some(control) = Control::parse(&bytes) {
                let emitted = control.emit();
                prop_assert_eq!(Control::parse(&emitted), Some(control));
            }
            if magic && bytes.len() > 8 {
                bytes[..4].copy_from_slice(&ADDRESS_MAGIC);
                bytes[4..6].copy_from_slice(&u16::from(VERSION).to_le_bytes());
                bytes[7] = 1 + bytes[7] % 2;
            }
            if let Ok(address) = Address::parse(&bytes) {
                prop_assert_eq!(Address::parse(&address.to_bytes()), Ok(address));
            }
            label(&bytes);
        }
    }
}
