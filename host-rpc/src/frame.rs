//! Frames: the header, and how bodies are put together again.
//!
//! ```text
//! 0  magic    u16   "hr"
//! 2  version  u8
//! 3  kind     u8    1 hello, 2 request, 3 answer, 4 cancel, 5 goodbye
//! 4  code     u32   request: the method; answer: 0 or what went wrong
//! 8  call     u64   number of the call, the client's choice, unique while it lasts; in a hello: longest body that is taken
//! 16 length   u64   bytes of the body
//! 24 time     u32   request: microseconds left until the deadline; u32::MAX: no deadline that near
//! 28 credits  u32   hello, answer: calls that may be made in addition
//! ```
//!
//! All little endian. The body stands behind the header if `inline` (bit 7 of kind); otherwise it is the messages that
//! follow, together `length` bytes long. A message of at most 16 KiB may have several frames with their bodies, one behind the other.

use crate::{Body, Violation};

/// Bytes of a header.
pub const HEADER: usize = 32;
/// Version of the protocol.
pub const VERSION: u8 = 2;
/// Bytes of a message of several frames at most: so a message of whatever length makes few answers.
pub const PACK: usize = 16 << 10;
const MAGIC: [u8; 2] = *b"hr";
const INLINE: u8 = 0x80;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// First of each side.
    Hello = 1,
    /// A call.
    Request = 2,
    /// Its answer.
    Answer = 3,
    /// The caller is not interested any more.
    Cancel = 4,
    /// The sender will not begin anything more.
    Goodbye = 5,
}

/// A header; see the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// The body stands behind the header.
    pub inline: bool,
    /// Method or status.
    pub code: u32,
    /// Number of the call.
    pub call: u64,
    /// Bytes of the body.
    pub length: u64,
    /// Microseconds until the deadline.
    pub time: u32,
    /// Calls that may be made in addition.
    pub credits: u32,
}

impl Header {
    /// A header with nothing but its kind.
    pub fn new(kind: Kind) -> Self {
        Self { kind, inline: true, code: 0, call: 0, length: 0, time: u32::MAX, credits: 0 }
    }

    /// As bytes.
    pub fn emit(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..2].copy_from_slice(&MAGIC);
        out[2] = VERSION;
        out[3] = self.kind as u8 | if self.inline { INLINE } else { 0 };
        out[4..8].copy_from_slice(&self.code.to_le_bytes());
        out[8..16].copy_from_slice(&self.call.to_le_bytes());
        out[16..24].copy_from_slice(&self.length.to_le_bytes());
        out[24..28].copy_from_slice(&self.time.to_le_bytes());
        out[28..].copy_from_slice(&self.credits.to_le_bytes());
        out
    }

    /// The header at the start of a message.
    ///
    /// # Errors
    /// Bytes that are none.
    pub fn parse(message: &[u8]) -> Result<Self, Violation> {
        let bytes: &[u8; HEADER] = message.first_chunk().ok_or(Violation::NoFrame(message.len()))?;
        if bytes[..2] != MAGIC {
            return Err(Violation::NoFrame(message.len()));
        }
        if bytes[2] != VERSION {
            return Err(Violation::Version(bytes[2]));
        }
        let code = bytes[3] & !INLINE;
        let kind = [Kind::Hello, Kind::Request, Kind::Answer, Kind::Cancel, Kind::Goodbye]
            .into_iter()
            .find(|kind| *kind as u8 == code)
            .ok_or(Violation::Kind(code))?;
        let word = |at: usize| bytes[at..].first_chunk().copied().map_or(0, u32::from_le_bytes);
        let long = |at: usize| bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
        Ok(Self {
            kind,
            inline: bytes[3] & INLINE != 0,
            code: word(4),
            call: long(8),
            length: long(16),
            time: word(24),
            credits: word(28),
        })
    }
}

/// Puts frames together from messages.
#[derive(Debug)]
pub struct Assembler {
    max_body: usize,
    /// A header whose body comes, the pieces so far, and the bytes that are missing.
    open: Option<(Header, Vec<Vec<u8>>, usize)>,
}

impl Assembler {
    /// Takes bodies of at most `max_body` bytes.
    pub fn new(max_body: usize) -> Self {
        Self { max_body, open: None }
    }

    /// The next message; gives the frames that are whole with it.
    ///
    /// # Errors
    /// Bytes that make no sense. What comes after an error makes none either.
    pub fn message(&mut self, message: Vec<u8>) -> Result<Vec<(Header, Body)>, Violation> {
        if let Some((header, mut pieces, missing)) = self.open.take() {
            let got = message.len();
            // An empty piece would let a peer send for ever without getting on.
            if got > missing || got == 0 {
                return Err(Violation::Length { got, expected: missing });
            }
            pieces.push(message);
            if got == missing {
                return Ok(vec![(header, Body::of(pieces))]);
            }
            self.open = Some((header, pieces, missing - got));
            return Ok(Vec::new());
        }
        let (mut frames, mut rest) = (Vec::new(), &message[..]);
        loop {
            let header = Header::parse(rest)?;
            let too_large = Violation::TooLarge { len: header.length, max: self.max_body };
            let length = usize::try_from(header.length).ok().filter(|len| *len <= self.max_body).ok_or(too_large)?;
            let behind = rest.len() - HEADER;
            if !header.inline && length > 0 {
                if behind > 0 {
                    return Err(Violation::Length { got: behind, expected: 0 });
                }
                self.open = Some((header, Vec::new(), length));
                return Ok(frames);
            }
            if behind < length {
                return Err(Violation::Length { got: behind, expected: length });
            }
            if behind == length {
                // The last: in place if it is the only one.
                let body = if frames.is_empty() {
                    Body::behind(message, HEADER)
                } else {
                    Body::behind(rest[HEADER..].to_vec(), 0)
                };
                frames.push((header, body));
                return Ok(frames);
            }
            if message.len() > PACK {
                return Err(Violation::Length { got: behind, expected: length });
            }
            let (frame, others) = rest.split_at(HEADER + length);
            frames.push((header, Body::behind(frame[HEADER..].to_vec(), 0)));
            rest = others;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header { kind: Kind::Request, inline: true, code: 2, call: 3, length: 4, time: 5, credits: 6 }
    }

    #[test]
    fn golden_bytes() {
        let bytes = header().emit();
        assert_eq!(bytes[..16], *b"hr\x02\x82\x02\0\0\0\x03\0\0\0\0\0\0\0");
        assert_eq!(bytes[16..], *b"\x04\0\0\0\0\0\0\0\x05\0\0\0\x06\0\0\0");
        assert_eq!(Header::parse(&bytes), Ok(header()));
    }

    #[test]
    fn foreign_bytes_are_refused() {
        for len in 0..HEADER {
            assert_eq!(Header::parse(&header().emit()[..len]), Err(Violation::NoFrame(len)));
        }
        let spoil = |at: usize, with: u8| {
            let mut bytes = header().emit();
            bytes[at] = with;
            Header::parse(&bytes)
        };
        assert_eq!(spoil(0, 0), Err(Violation::NoFrame(HEADER)));
        assert_eq!(spoil(2, 9), Err(Violation::Version(9)));
        assert_eq!(spoil(3, 0x86), Err(Violation::Kind(6)));
        assert_eq!(spoil(3, 0), Err(Violation::Kind(0)));
    }

    #[test]
    fn bodies_must_fit_their_headers() {
        let mut parts = Assembler::new(100);
        let long = Header { length: 101, ..header() };
        assert_eq!(parts.message(long.emit().to_vec()), Err(Violation::TooLarge { len: 101, max: 100 }));
        let endless = Header { length: u64::MAX, ..header() };
        assert!(matches!(parts.message(endless.emit().to_vec()), Err(Violation::TooLarge { .. })));
        let cut = [&header().emit()[..], &[1, 2, 3]].concat();
        assert_eq!(parts.message(cut), Err(Violation::Length { got: 3, expected: 4 }));
        let apart = Header { inline: false, ..header() };
        assert_eq!(parts.message(apart.emit().to_vec()), Ok(Vec::new()));
        assert_eq!(parts.message(vec![0; 5]), Err(Violation::Length { got: 5, expected: 4 }));
        let short = Header { length: 0, ..header() }.emit();
        assert_eq!(
            Assembler::new(100).message(short.repeat(PACK / HEADER)).map(|frames| frames.len()),
            Ok(PACK / HEADER)
        );
        let many = Assembler::new(100).message(short.repeat(PACK / HEADER + 1));
        assert_eq!(many, Err(Violation::Length { got: PACK, expected: 0 }));
        let mut parts = Assembler::new(100);
        assert_eq!(parts.message(apart.emit().to_vec()), Ok(Vec::new()));
        assert_eq!(parts.message(Vec::new()), Err(Violation::Length { got: 0, expected: 4 }));
    }

    proptest! {
        #[test]
        fn bodies_come_back_however_they_are_cut(
            body in proptest::collection::vec(any::<u8>(), 0..300),
            inline in any::<bool>(),
            piece in 1usize..100,
        ) {
            let header = Header { inline, length: body.len() as u64, ..header() };
            let mut messages = vec![header.emit().to_vec()];
            if inline {
                messages[0].extend_from_slice(&body);
            } else {
                messages.extend(body.chunks(piece).map(<[u8]>::to_vec));
            }
            let mut parts = Assembler::new(1000);
            let last = messages.pop().unwrap();
            for message in messages {
                prop_assert_eq!(parts.message(message), Ok(Vec::new()));
            }
            let (seen, got) = parts.message(last).unwrap().pop().unwrap();
            prop_assert_eq!(seen, header);
            prop_assert_eq!(got.len(), body.len());
            prop_assert_eq!(&*got.bytes(), &body[..]);
            prop_assert_eq!(got.into_vec(), body);
        }

        #[test]
        fn frames_in_one_message_come_out_one_after_the_other(
            bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..100), 1..10),
        ) {
            let mut message = Vec::new();
            for body in &bodies {
                message.extend_from_slice(&Header { inline: true, length: body.len() as u64, ..header() }.emit());
                message.extend_from_slice(body);
            }
            let mut parts = Assembler::new(100);
            let frames = parts.message(message.clone()).unwrap();
            let got: Vec<Vec<u8>> = frames.into_iter().map(|(_, body)| body.into_vec()).collect();
            prop_assert_eq!(&got, &bodies);
            message.push(0);
            prop_assert!(parts.message(message).is_err());
        }

        #[test]
        fn no_messages_make_the_assembler_panic_or_keep_more_than_is_allowed(
            messages in proptest::collection::vec(
                (proptest::collection::vec(any::<u8>(), 0..80), any::<bool>(), 0u64..2000, any::<bool>()), 0..20),
        ) {
            let mut parts = Assembler::new(1000);
            for (mut message, framed, length, inline) in messages {
                if framed && message.len() >= HEADER {
                    let kind = if message[3] % 2 == 0 { Kind::Request } else { Kind::Answer };
                    let header = Header { kind, inline, length, ..header() };
                    message[..HEADER].copy_from_slice(&header.emit());
                }
                match parts.message(message) {
                    Ok(frames) => {
                        for (header, body) in frames {
                            prop_assert_eq!(header.length, body.len() as u64);
                            prop_assert!(body.len() <= 1000);
                        }
                    }
                    Err(_) => break,
                }
            }
        }
    }
}
