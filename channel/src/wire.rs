//! Tags, control messages and addresses: everything of the protocol that has a fixed form. All numbers are little endian.
//!
//! Tags: `1 << 32 | id` carries the length of message `id`, `1 << 33 | id` its bytes. A third kind, `1 << 34 | kind`, carries the
//! control messages that open, watch and close a channel:
//!
//! ```text
//! 0  magic     u32   "FGC1"
//! 4  version   u16
//! 6  kind      u8    1 hello, 2 welcome, 3 refuse, 4 ping, 5 pong, 6 close, 7 goodbye, 8 abort, 9 read, 10 again, 11 here
//! 7  name_len  u8    bytes of the name at the end
//! 8  to        u32   the receiver's number of the channel; in a hello, of the listener; in a here, nothing
//! 12 from      u32   the sender's number of the channel
//! 16 secret    u64   the receiver's secret for it: who does not know it is not the peer
//! 24 own       u64   hello, welcome: the sender's secret; again: the secret of the here that answers it
//! 32 value     u64   hello, welcome: longest message that the sender takes; refuse, abort: the reason;
//!                    close: id of the first message that the sender has not read
//! 40 id        u32   hello, welcome: id of the sender's first message; close: id after its last one;
//!                    read: id of the first message that the sender has not read;
//!                    again: id that the receiver's first message shall have
//! 44 begin     u32   hello: id that the receiver's first message shall have; 0 if it does not matter
//! 48 name            hello: the sender's endpoint name
//! ```
//!
//! Hello is answered with again when the name had a channel before: whoever lives there now says here, with the secret, and is
//! then welcomed. So a hello in another's name, or one that comes late, ends no channel.

use std::fmt::Write as _;
use std::sync::Arc;

use super::ChannelError;

/// Version of the protocol and of the address.
pub(super) const VERSION: u16 = 4;
/// The longest endpoint name that an address has room for, bytes.
pub(super) const NAME_MAX: usize = 100;
/// Bytes of an address at most.
pub const ADDRESS_MAX: usize = 128;
/// Bytes of a control message at most.
pub(super) const CONTROL_MAX: usize = FIXED + NAME_MAX;

/// Tag of the length of message 0.
pub(super) const LENGTH: u64 = 1 << 32;
/// Tag of the payload of message 0.
pub(super) const PAYLOAD: u64 = 1 << 33;
/// Tag of control messages of kind 0.
pub(super) const CONTROL: u64 = 1 << 34;
/// The id part of a tag.
pub(super) const ID_MASK: u64 = 0xffff_ffff;

const FIXED: usize = 48;
const MAGIC: [u8; 4] = *b"FGC1";
const ADDRESS_MAGIC: [u8; 4] = *b"FGCA";
const ADDRESS_FIXED: usize = 24;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Hello = 1,
    Welcome = 2,
    Refuse = 3,
    Ping = 4,
    Pong = 5,
    Close = 6,
    Goodbye = 7,
    Abort = 8,
    Read = 9,
    Again = 10,
    Here = 11,
}

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Control<'a> {
    pub version: u16,
    pub kind: Kind,
    pub to: u32,
    pub from: u32,
    pub secret: u64,
    pub own: u64,
    pub value: u64,
    pub id: u32,
    pub begin: u32,
    pub name: &'a [u8],
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

impl<'a> Control<'a> {
    /// A message that says nothing but its kind, to whom, and that we may.
    pub fn new(kind: Kind, to: u32, secret: u64) -> Self {
        Self { version: VERSION, kind, to, from: 0, secret, own: 0, value: 0, id: 0, begin: 0, name: &[] }
    }

    pub fn emit(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(FIXED + self.name.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&[self.kind as u8, self.name.len() as u8]);
        out.extend_from_slice(&self.to.to_le_bytes());
        out.extend_from_slice(&self.from.to_le_bytes());
        for value in [self.secret, self.own, self.value] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.begin.to_le_bytes());
        out.extend_from_slice(self.name);
        out
    }

    /// None when the bytes are no control message. Another version's message is read as far as ours goes.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let name = bytes.get(FIXED..)?;
        if word(bytes, 0)? != MAGIC {
            return None;
        }
        let kind = match bytes[6] {
            1 => Kind::Hello,
            2 => Kind::Welcome,
            3 => Kind::Refuse,
            4 => Kind::Ping,
            5 => Kind::Pong,
            6 => Kind::Close,
            7 => Kind::Goodbye,
            8 => Kind::Abort,
            9 => Kind::Read,
            10 => Kind::Again,
            11 => Kind::Here,
            _ => return None,
        };
        if name.len() != usize::from(bytes[7]) || name.len() > NAME_MAX {
            return None;
        }
        Some(Self {
            version: u16::from_le_bytes(word(bytes, 4)?),
            kind,
            to: u32::from_le_bytes(word(bytes, 8)?),
            from: u32::from_le_bytes(word(bytes, 12)?),
            secret: u64::from_le_bytes(word(bytes, 16)?),
            own: u64::from_le_bytes(word(bytes, 24)?),
            value: u64::from_le_bytes(word(bytes, 32)?),
            id: u32::from_le_bytes(word(bytes, 40)?),
            begin: u32::from_le_bytes(word(bytes, 44)?),
            name,
        })
    }
}

/// Where a listener can be reached: at most 128 bytes, to be carried to the other side by any means. It contains a secret:
/// who has the address may connect.
///
/// magic `FGCA`, version u16, name_len u8, zero u8, listener u32, zero u32, secret u64, name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub(super) listener: u32,
    pub(super) secret: u64,
    pub(super) name: Box<[u8]>,
}

impl Address {
    /// As bytes, at most [`ADDRESS_MAX`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(ADDRESS_FIXED + self.name.len());
        out.extend_from_slice(&ADDRESS_MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[self.name.len() as u8, 0]);
        out.extend_from_slice(&self.listener.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.secret.to_le_bytes());
        out.extend_from_slice(&self.name);
        out
    }

    /// From bytes; what stands behind the address (padding) is ignored.
    ///
    /// # Errors
    /// [`ChannelError::BadAddress`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ChannelError> {
        let bad = |what| ChannelError::BadAddress { what };
        let fixed = bytes.first_chunk::<ADDRESS_FIXED>().ok_or(bad("they are too few"))?;
        if fixed[..4] != ADDRESS_MAGIC {
            return Err(bad("they do not begin as one"));
        }
        if u16::from_le_bytes([fixed[4], fixed[5]]) != VERSION {
            return Err(bad("another version made it: run the same ferrogin on both ends"));
        }
        let len = usize::from(fixed[6]);
        if len == 0 || len > NAME_MAX {
            return Err(bad("its endpoint name has an impossible length"));
        }
        let name = bytes[ADDRESS_FIXED..].get(..len).ok_or(bad("it is cut off"))?;
        let read = |at: usize| word::<4>(fixed, at).map_or(0, u32::from_le_bytes);
        Ok(Self { listener: read(8), secret: word::<8>(fixed, 16).map_or(0, u64::from_le_bytes), name: name.into() })
    }

    /// The endpoint behind the address, for people.
    pub fn endpoint(&self) -> Arc<str> {
        label(&self.name)
    }
}

/// An endpoint name for people: host and port of a socket address, text as it is, anything else in hexadecimal.
pub(super) fn label(name: &[u8]) -> Arc<str> {
    let family = name.first_chunk().map(|bytes| i32::from(u16::from_ne_bytes(*bytes)));
    if let (Some(libc::AF_INET), 16) = (family, name.len()) {
        let port = u16::from_be_bytes([name[2], name[3]]);
        return format!("{}.{}.{}.{}:{port}", name[4], name[5], name[6], name[7]).into();
    }
    if let (Some(libc::AF_INET6), 28) = (family, name.len())
        && let Some(octets) = word::<16>(name, 8)
    {
        let port = u16::from_be_bytes([name[2], name[3]]);
        return format!("[{}]:{port}", std::net::Ipv6Addr::from(octets)).into();
    }
    let text = name.strip_suffix(&[0]).unwrap_or(name);
    match std::str::from_utf8(text) {
        Ok(text) if !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic()) => text.into(),
        _ => name
            .iter()
            .fold(String::from("endpoint "), |mut out, byte| {
                let _ = write!(out, "{byte:02x}");
                out
            })
            .into(),
    }
}

/// Patterns that together take every tag that the protocol does not use, and none that it does: with a low part of 32 bits
/// free, high parts other than 1, 2 and 4.
pub(super) fn unknown_tags() -> impl Iterator<Item = super::transport::Pattern> {
    use super::transport::Pattern;
    // 0, 3, 5, 6, 7 by name; everything with a bit at 35 or above by one pattern for each bit.
    let low = [0u64, 3, 5, 6, 7].into_iter().map(|high| Pattern { tag: high << 32, ignore: ID_MASK });
    low.chain((35..64).map(|bit| Pattern { tag: 1 << bit, ignore: !(1 << bit) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn control(name: &[u8]) -> Control<'_> {
        Control { version: 1, kind: Kind::Hello, to: 2, from: 3, secret: 4, own: 5, value: 6, id: 7, begin: 8, name }
    }

    #[test]
    fn golden_bytes() {
        let bytes = control(b"ab").emit();
        assert_eq!(bytes[..16], *b"FGC1\x01\0\x01\x02\x02\0\0\0\x03\0\0\0");
        assert_eq!(bytes[16..40], *b"\x04\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0");
        assert_eq!(bytes[40..], *b"\x07\0\0\0\x08\0\0\0ab");
        assert_eq!(Control::parse(&bytes), Some(control(b"ab")));
        let address = Address { listener: 1, secret: 2, name: b"name".as_slice().into() };
        assert_eq!(address.to_bytes(), *b"FGCA\x04\0\x04\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0name");
        let longest = Address { name: vec![7; NAME_MAX].into(), ..address };
        assert!(longest.to_bytes().len() <= ADDRESS_MAX);
    }

    #[test]
    fn addresses_survive_padding_and_nothing_else() {
        let address = Address { listener: 1, secret: 2, name: b"name".as_slice().into() };
        let mut padded = address.to_bytes();
        for len in 0..padded.len() {
            assert!(Address::parse(&padded[..len]).is_err(), "{len}");
        }
        padded.resize(ADDRESS_MAX, 0xa5);
        assert_eq!(Address::parse(&padded), Ok(address));
        padded[4] = 9;
        assert!(Address::parse(&padded).unwrap_err().to_string().contains("version"));
    }

    #[test]
    fn every_tag_is_known_or_taken_as_unknown_once_at_most_by_name() {
        let known = |tag: u64| matches!(tag >> 32, 1 | 2 | 4);
        let caught = |tag: u64| unknown_tags().any(|pattern| pattern.matches(tag));
        for high in (0..256u64).chain((0..32).map(|bit| 1 << bit)).chain([u64::from(u32::MAX)]) {
            for low in [0, 1, ID_MASK] {
                let tag = high << 32 | low;
                assert_ne!(known(tag), caught(tag), "{tag:#x}");
            }
        }
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
        fn no_bytes_make_the_parsers_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), magic in any::<bool>()) {
            let mut bytes = bytes;
            if magic && bytes.len() > 4 {
                bytes[..4].copy_from_slice(&MAGIC);
                if bytes.len() >= FIXED {
                    bytes[6] = 1 + bytes[6] % 11;
                    bytes[7] = (bytes.len() - FIXED) as u8;
                }
            }
            if let Some(control) = Control::parse(&bytes) {
                let emitted = control.emit();
                prop_assert_eq!(Control::parse(&emitted), Some(control));
            }
            if magic && bytes.len() > 8 {
                bytes[..4].copy_from_slice(&ADDRESS_MAGIC);
                bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
            }
            if let Ok(address) = Address::parse(&bytes) {
                prop_assert_eq!(Address::parse(&address.to_bytes()), Ok(address));
            }
            label(&bytes);
        }
    }
}
