//! The protocol's formats: control messages and listener addresses. All numbers are little endian.
//!
//! A control message is a [`Control`] and the sender's endpoint name, which only a hello has. What the fields mean, by
//! kind:
//!
//! | field | in |
//! |---|---|
//! | `to` | the receiver's number for the channel; hello: the listener's number; path response: 0 |
//! | `from` | the sender's number for the channel |
//! | `secret` | the receiver's secret for the channel: a sender without it is not the peer |
//! | `sender_secret` | hello, welcome: the sender's secret; path challenge: the nonce that the response returns in `secret` |
//! | `value` | hello, welcome: length of the longest message that the sender accepts, in bytes; refuse, abort: the reason; close: id of the first message the sender has not read; read: 1 if a read waits for the message, otherwise 0 |
//! | `id` | hello, welcome: id of the sender's first message; close: id after its last message; read: id of the first message the sender has not read; offer: id of the message; path challenge: id that the receiver's first message must have |
//! | `start_id` | hello: id that the receiver's first message must have, 0 for any |
//!
//! A listener answers a hello with a path challenge if there was an earlier channel with the same endpoint name. The
//! endpoint that has the name now, and that sent the hello, answers with a path response and is then welcomed. So
//! neither a hello with another endpoint's name nor a late hello ends a channel.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::mem::size_of;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;
use std::sync::Arc;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use super::name;
use crate::ChannelError;

/// Version of the control messages, and of what a provider with tagged messages carries.
pub(crate) const VERSION: u8 = 6;
/// Version of what a TCP connection carries.
pub(crate) const TCP_VERSION: u8 = 7;
/// The longest endpoint name that an address has room for, in bytes.
pub(crate) const NAME_MAX: usize = 100;
/// Length of the longest address, in bytes.
pub const ADDRESS_MAX: usize = 128;
/// Length of the longest control message, in bytes.
pub(crate) const CONTROL_MAX: usize = size_of::<Control>() + NAME_MAX;

const MAGIC: [u8; 4] = *b"FGC1";
const ADDRESS_MAGIC: [u8; 4] = *b"FGCA";

/// What carries the messages of an endpoint.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub(crate) enum Transport {
    /// Tagged messages on one endpoint of a libfabric provider, which all channels share.
    Tags = 1,
    /// One connection per channel.
    Tcp = 2,
}

impl Transport {
    /// Returns the version in an address.
    fn version(self) -> u16 {
        match self {
            Self::Tags => VERSION.into(),
            Self::Tcp => TCP_VERSION.into(),
        }
    }
}

/// Kinds of control messages.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, TryFromBytes)]
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
    Offer = 12,
}

/// A control message, as it is sent; the sender's endpoint name follows.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(C)]
pub(crate) struct Control {
    pub magic: [u8; 4],
    pub version: u8,
    pub reserved: u8,
    pub kind: Kind,
    pub name_len: u8,
    pub to: u32,
    pub from: u32,
    pub secret: u64,
    pub sender_secret: u64,
    pub value: u64,
    pub id: u32,
    pub start_id: u32,
}

const _: () = assert!(cfg!(target_endian = "little"), "numbers are sent as they are in memory");

impl Control {
    /// Creates a message of a kind for a receiver, with the receiver's secret. All other fields are 0.
    pub fn new(kind: Kind, to: u32, secret: u64) -> Self {
        let (magic, version, from, value, id) = (MAGIC, VERSION, 0, 0, 0);
        let (reserved, name_len, sender_secret, start_id) = (0, 0, 0, 0);
        Self { magic, version, reserved, kind, name_len, to, from, secret, sender_secret, value, id, start_id }
    }

    /// Returns the bytes of the message, with the endpoint name. Only a hello has one.
    pub fn emit(&self, name: &[u8]) -> Vec<u8> {
        [Self { name_len: name.len() as u8, ..*self }.as_bytes(), name].concat()
    }

    /// Returns the message and the endpoint name; None if the bytes are not a control message. A message of another
    /// version is read like one of this version.
    pub fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (control, name) = Self::try_read_from_prefix(bytes).ok()?;
        let sound = control.magic == MAGIC && name.len() == usize::from(control.name_len) && name.len() <= NAME_MAX;
        sound.then_some((control, name))
    }
}

/// The fixed part of an address; the name of the endpoint follows.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct AddressHeader {
    magic: [u8; 4],
    /// Its upper byte is 0.
    version: U16,
    name_len: u8,
    transport: u8,
    listener: U32,
    reserved: U32,
    secret: U64,
}

const _: () = assert!(size_of::<AddressHeader>() + NAME_MAX <= ADDRESS_MAX);

/// The number with which a hello names the listener that uses [`Config::secret`](crate::Config::secret).
pub(crate) const SHARED_LISTENER: u32 = u32::MAX;

/// Where a listener can be reached, as bytes (at most [`ADDRESS_MAX`]) or as text. The application carries it to the
/// other side.
///
/// The text form of a TCP listener's address is `HOST:PORT#KEY`, with several `HOST:PORT` separated by commas if it has
/// several addresses. The key contains a secret: any process that has the whole address can connect. If both ends have
/// [`Config::secret`](crate::Config::secret), `HOST:PORT` alone is enough, and anyone may know it:
///
/// ```
/// let address: ferrogin_channel::Address = "127.0.0.1:7000".parse()?;
/// assert_eq!(address.to_string(), "127.0.0.1:7000");
/// # Ok::<(), ferrogin_channel::ChannelError>(())
/// ```
///
/// Parsing resolves a host name, as [`ToSocketAddrs`] does, which may block. Other providers' addresses are hexadecimal
/// digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub(crate) transport: Transport,
    pub(crate) listener: u32,
    /// `None`: the one of [`Config::secret`](crate::Config::secret).
    pub(crate) secret: Option<u64>,
    pub(crate) name: Box<[u8]>,
}

impl Address {
    /// Returns the address as bytes, at most [`ADDRESS_MAX`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let header = AddressHeader {
            magic: ADDRESS_MAGIC,
            version: self.transport.version().into(),
            name_len: self.name.len() as u8,
            transport: self.transport as u8,
            listener: self.listener.into(),
            reserved: 0.into(),
            secret: self.secret.unwrap_or(0).into(),
        };
        [header.as_bytes(), &self.name].concat()
    }

    /// Parses the address in `bytes`; any bytes after it (padding) are ignored.
    ///
    /// # Errors
    /// [`ChannelError::BadAddress`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ChannelError> {
        let bad = |what: &str| ChannelError::BadAddress { what: what.to_owned() };
        let truncated = |len: usize| bad(&format!("the address is truncated ({} of {len} bytes)", bytes.len()));
        let (header, rest) =
            AddressHeader::ref_from_prefix(bytes).map_err(|_| truncated(size_of::<AddressHeader>()))?;
        if header.magic != ADDRESS_MAGIC {
            return Err(bad("the bytes do not begin with the magic of an address"));
        }
        let unknown = "its kind is unknown: run the same version of ferrogin on both ends";
        let transport = Transport::try_read_from_bytes(&[header.transport]).map_err(|_| bad(unknown))?;
        if header.version.get() != transport.version() {
            return Err(bad("it has another version: run the same version of ferrogin on both ends"));
        }
        let len = usize::from(header.name_len);
        if len == 0 || len > NAME_MAX {
            return Err(bad("its endpoint name has an impossible length"));
        }
        let name = rest.get(..len).ok_or_else(|| truncated(size_of::<AddressHeader>() + len))?.into();
        let secret = Some(header.secret.get()).filter(|secret| *secret != 0);
        Ok(Self { transport, listener: header.listener.get(), secret, name })
    }

    /// Returns the listener's endpoint in readable form.
    pub fn endpoint(&self) -> Arc<str> {
        label(&self.name)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses = name::parse(&self.name);
        if self.transport != Transport::Tcp || addresses.is_empty() {
            return self.to_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"));
        }
        for (at, address) in addresses.iter().enumerate() {
            write!(f, "{}{address}", if at == 0 { "" } else { "," })?;
        }
        self.secret.map_or(Ok(()), |secret| write!(f, "#{:08x}{secret:016x}", self.listener))
    }
}

impl FromStr for Address {
    type Err = ChannelError;

    fn from_str(text: &str) -> Result<Self, ChannelError> {
        let bad = |what: &str| ChannelError::BadAddress { what: what.to_owned() };
        if let Some(bytes) = unhex(text) {
            return Self::parse(&bytes);
        }
        let (hosts, key) = text.split_once('#').map_or((text, None), |(hosts, key)| (hosts, Some(key)));
        let mut addresses: Vec<SocketAddr> = Vec::new();
        for host in hosts.split(',') {
            let port = host.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
            if port.is_none_or(|port| port == 0) {
                return Err(bad("expected HOST:PORT with a port from 1 to 65535, or HOST:PORT#KEY"));
            }
            addresses.extend(host.to_socket_addrs().map_err(|_| bad("the host name cannot be resolved"))?);
        }
        let (listener, secret) = match key.map(unhex) {
            None => (SHARED_LISTENER, None),
            Some(Some(key)) if key.len() == 12 => {
                let (listener, secret) = key.split_at(4);
                let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                (number(listener) as u32, Some(number(secret)).filter(|secret| *secret != 0))
            }
            Some(_) => return Err(bad("the key after # must have 24 hexadecimal digits")),
        };
        Ok(Self { transport: Transport::Tcp, listener, secret, name: name::emit(&addresses, NAME_MAX).into() })
    }
}

/// Returns a number that no peer can guess: a keyed hash whose keys come from the operating system.
pub(crate) fn secret() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Decodes an even number of hexadecimal digits.
fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.bytes().map(|digit| (digit as char).to_digit(16)).collect::<Option<Vec<_>>>()?;
    let bytes = digits.chunks(2).map(|pair| Some((pair[0] << 4 | *pair.get(1)?) as u8));
    bytes.collect::<Option<Vec<_>>>().filter(|bytes| !bytes.is_empty())
}

/// Returns an endpoint name in readable form: host and port for a socket address, text as is, anything else in
/// hexadecimal.
pub(crate) fn label(name: &[u8]) -> Arc<str> {
    if let Some(address) = name::parse(name).first() {
        return address.to_string().into();
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

    fn control() -> Control {
        let numbers = Control { reserved: 9, from: 3, sender_secret: 5, value: 6, ..Control::new(Kind::Hello, 2, 4) };
        Control { version: 1, id: 7, start_id: 8, ..numbers }
    }

    fn address() -> Address {
        Address { transport: Transport::Tcp, listener: 1, secret: Some(2), name: b"name".as_slice().into() }
    }

    #[test]
    fn text_is_host_and_port_with_key() {
        let (v4, v6): (SocketAddr, SocketAddr) = ("10.0.0.1:80".parse().unwrap(), "[fd00::1]:81".parse().unwrap());
        let name = |addresses: &[SocketAddr]| name::emit(addresses, NAME_MAX).into();
        let both = Address { name: name(&[v4, v6]), ..address() };
        assert_eq!(both.to_string(), "10.0.0.1:80,[fd00::1]:81#000000010000000000000002");
        let shared = Address { listener: SHARED_LISTENER, secret: None, name: name(&[v4]), ..address() };
        assert_eq!(shared.to_string(), "10.0.0.1:80");
        let of_provider = Address { transport: Transport::Tags, ..address() };
        assert_eq!(
            of_provider.to_string(),
            of_provider.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        );
        for address in [both, shared, of_provider] {
            assert_eq!(address.to_string().parse(), Ok(address.clone()));
            assert_eq!(Address::parse(&address.to_bytes()), Ok(address));
        }
        let resolved: Address = "localhost:7000".parse().unwrap();
        assert!(name::parse(&resolved.name).iter().all(|address| address.ip().is_loopback()), "{resolved}");
        for text in [
            "",
            "abc",
            "abcd",
            "10.0.0.1",
            "10.0.0.1:",
            "10.0.0.1:0",
            "10.0.0.1:65536",
            "10.0.0.1:80#",
            "10.0.0.1:80#12",
            ":",
            ",",
        ] {
            assert!(matches!(text.parse::<Address>(), Err(ChannelError::BadAddress { .. })), "{text}");
        }
    }

    #[test]
    fn formats_have_their_golden_bytes() {
        let bytes = control().emit(b"ab");
        assert_eq!(bytes[..16], *b"FGC1\x01\x09\x01\x02\x02\0\0\0\x03\0\0\0");
        assert_eq!(bytes[16..40], *b"\x04\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0");
        assert_eq!(bytes[40..], *b"\x07\0\0\0\x08\0\0\0ab");
        assert_eq!(Control::parse(&bytes), Some((Control { name_len: 2, ..control() }, &b"ab"[..])));
        assert_eq!(address().to_bytes(), *b"FGCA\x07\0\x04\x02\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0name");
        let longest = Address { name: vec![7; NAME_MAX].into(), ..address() };
        assert!(longest.to_bytes().len() <= ADDRESS_MAX);
    }

    #[test]
    fn address_survives_padding_and_nothing_else() {
        let mut padded = address().to_bytes();
        for len in 0..padded.len() {
            let error = Address::parse(&padded[..len]).unwrap_err().to_string();
            assert!(error.contains(&format!("truncated ({len} of ")), "{error}");
        }
        padded.resize(ADDRESS_MAX, 0xa5);
        assert_eq!(Address::parse(&padded), Ok(address()));
        padded[4] = 6;
        assert!(Address::parse(&padded).unwrap_err().to_string().contains("version"));
        // The version of an address over a provider.
        padded[7] = 1;
        assert_eq!(Address::parse(&padded), Ok(Address { transport: Transport::Tags, ..address() }));
        padded[7] = 3;
        assert!(Address::parse(&padded).unwrap_err().to_string().contains("kind"));
    }

    #[test]
    fn labels_are_readable() {
        let v4 = [&[2, 0, 0x1f, 0x90, 10, 0, 0, 1][..], &[0; 8]].concat();
        assert_eq!(&*label(&v4), "10.0.0.1:8080");
        let v6 = [&[10, 0, 0, 80][..], &[0; 19], &[1, 0, 0, 0, 0]].concat();
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
                if bytes.len() >= size_of::<Control>() {
                    bytes[6] = 1 + bytes[6] % 12;
                    bytes[7] = (bytes.len() - size_of::<Control>()) as u8;
                }
            }
            if let Some((control, name)) = Control::parse(&bytes) {
                let emitted = control.emit(name);
                prop_assert_eq!(Control::parse(&emitted), Some((control, name)));
            }
            if magic && bytes.len() > 8 {
                bytes[..4].copy_from_slice(&ADDRESS_MAGIC);
                bytes[7] = 1 + bytes[7] % 2;
                let version = if bytes[7] == 1 { VERSION } else { TCP_VERSION };
                bytes[4..6].copy_from_slice(&u16::from(version).to_le_bytes());
            }
            if let Ok(address) = Address::parse(&bytes) {
                prop_assert_eq!(Address::parse(&address.to_bytes()), Ok(address));
            }
            label(&bytes);
        }
    }
}
