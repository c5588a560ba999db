//! Frames: the header on the wire, and the reassembly of bodies.
//!
//! A frame is a header of 32 bytes, little endian, and a body:
//!
//! ```text
//! 0  magic    u16   "hr"
//! 2  version  u8
//! 3  kind     u8    1 hello, 2 request, 3 answer, 4 cancel, 5 goodbye, 6 part, 7 window; bit 7: the body is inline
//! 4  code     u32   request: the method; answer: 0 or the code of a status; part: 1 for the empty one after the last; goodbye: 1 if the
//!                   receiver broke the protocol, and the body is the violation as text
//! 8  call     u64   the number of the call, chosen by the client, unique among open calls; hello: longest body accepted
//! 16 length   u64   bytes of the body
//! 24 time     u32   request: microseconds until the deadline; u32::MAX: no deadline within that range
//! 28 credits  u32   hello, answer: further calls that the client may open; request, window: further parts that its sender takes
//! ```
//!
//! An inline body follows the header in the same message. Any other body is carried by the messages that follow,
//! `length` bytes in total. A message of at most [`PACK`] bytes may hold several frames with inline bodies, one after
//! another.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use crate::{Body, Violation};

/// The header as it is on the wire: any 32 bytes are valid.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
struct RawHeader {
    magic: [u8; 2],
    version: u8,
    /// [`Kind`], and [`INLINE`].
    kind: u8,
    code: U32,
    call: U64,
    length: U64,
    time: U32,
    credits: U32,
}
mlx5::assert_layout!(RawHeader, size 32, align 1, {
    magic @ 0, version @ 2, kind @ 3, code @ 4, call @ 8, length @ 16, time @ 24, credits @ 28,
});

/// Size of a header in bytes.
pub const HEADER: usize = size_of::<RawHeader>();
/// Version of the protocol.
pub const VERSION: u8 = 3;
/// Length of the longest message with more than one frame, in bytes. The limit bounds how many answers one message can
/// cause.
pub const PACK: usize = 16 << 10;
const MAGIC: [u8; 2] = *b"hr";
/// The bit of `kind` that marks an inline body.
const INLINE: u8 = 0x80;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub enum Kind {
    /// The first frame of each end.
    Hello = 1,
    /// A call.
    Request = 2,
    /// The answer to a call.
    Answer = 3,
    /// The caller no longer needs the answer.
    Cancel = 4,
    /// The sender starts no further calls, or accepts none.
    Goodbye = 5,
    /// A part of the body of a call or of its answer.
    Part = 6,
    /// The sender accepts further parts.
    Window = 7,
}

/// A valid header; the [module](self) describes the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the frame.
    pub kind: Kind,
    /// The body follows the header in the same message.
    pub inline: bool,
    /// The method, the code of a status, 1 after the last part, or 1 in the goodbye to an end that broke the protocol.
    pub code: u32,
    /// The number of the call; in a hello the longest body accepted.
    pub call: u64,
    /// Length of the body in bytes.
    pub length: u64,
    /// Microseconds until the deadline.
    pub time: u32,
    /// How many more calls the client may open, or how many more parts the sender accepts.
    pub credits: u32,
}

impl Header {
    /// Returns a header of a kind: no body, no deadline, all other fields zero.
    pub fn new(kind: Kind) -> Self {
        Self { kind, inline: true, code: 0, call: 0, length: 0, time: u32::MAX, credits: 0 }
    }

    /// Returns the bytes of the header.
    pub fn emit(&self) -> [u8; HEADER] {
        let raw = RawHeader {
            magic: MAGIC,
            version: VERSION,
            kind: self.kind as u8 | if self.inline { INLINE } else { 0 },
            code: self.code.into(),
            call: self.call.into(),
            length: self.length.into(),
            time: self.time.into(),
            credits: self.credits.into(),
        };
        zerocopy::transmute!(raw)
    }

    /// Parses the header at the start of a message.
    ///
    /// # Errors
    /// The message does not start with a header of this version.
    pub fn parse(message: &[u8]) -> Result<Self, Violation> {
        let not_a_frame = Violation::NotAFrame(message.len());
        let (raw, _) = RawHeader::ref_from_prefix(message).map_err(|_| not_a_frame)?;
        if raw.magic != MAGIC {
            return Err(not_a_frame);
        }
        if raw.version != VERSION {
            return Err(Violation::Version(raw.version));
        }
        let code = raw.kind & !INLINE;
        Ok(Self {
            kind: Kind::try_read_from_bytes(&[code]).map_err(|_| Violation::Kind(code))?,
            inline: raw.kind & INLINE != 0,
            code: raw.code.get(),
            call: raw.call.get(),
            length: raw.length.get(),
            time: raw.time.get(),
            credits: raw.credits.get(),
        })
    }
}

/// Reassembles frames from messages.
#[derive(Debug)]
pub struct Assembler {
    max_body: usize,
    /// The frame whose body is not complete: its header, the pieces of the body so far, and the number of missing
    /// bytes.
    partial: Option<(Header, Vec<Vec<u8>>, usize)>,
}

impl Assembler {
    /// Creates an assembler that accepts bodies of at most `max_body` bytes.
    pub fn new(max_body: usize) -> Self {
        Self { max_body, partial: None }
    }

    /// Takes the next message and returns the frames that it completes.
    ///
    /// # Errors
    /// The message does not continue the stream of frames. After an error, the stream can't be read any further.
    pub fn message(&mut self, message: Vec<u8>) -> Result<Vec<(Header, Body)>, Violation> {
        if let Some((header, mut pieces, missing)) = self.partial.take() {
            let got = message.len();
            // Without this check a peer could send empty pieces forever.
            if got > missing || got == 0 {
                return Err(Violation::Length { got, expected: missing });
            }
            pieces.push(message);
            if got == missing {
                return Ok(vec![(header, Body::of(pieces))]);
            }
            self.partial = Some((header, pieces, missing - got));
            return Ok(Vec::new());
        }
        let (mut frames, mut rest) = (Vec::new(), &message[..]);
        loop {
            let header = Header::parse(rest)?;
            let too_large = Violation::TooLarge { len: header.length, max: self.max_body };
            let length = usize::try_from(header.length).ok().filter(|len| *len <= self.max_body).ok_or(too_large)?;
            let available = rest.len() - HEADER;
            if !header.inline && length > 0 {
                if available > 0 {
                    return Err(Violation::Length { got: available, expected: 0 });
                }
                self.partial = Some((header, Vec::new(), length));
                return Ok(frames);
            }
            if available < length {
                return Err(Violation::Length { got: available, expected: length });
            }
            if available == length {
                // The body of a message with a single frame stays where it is.
                let body = if frames.is_empty() {
                    Body::after_header(message, HEADER)
                } else {
                    Body::after_header(rest[HEADER..].to_vec(), 0)
                };
                frames.push((header, body));
                return Ok(frames);
            }
            if message.len() > PACK {
                return Err(Violation::Length { got: available, expected: length });
            }
            let (frame, others) = rest.split_at(HEADER + length);
            frames.push((header, Body::after_header(frame[HEADER..].to_vec(), 0)));
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
    fn header_has_golden_bytes() {
        let mut bytes = [0xa5; HEADER];
        bytes.copy_from_slice(&header().emit());
        assert_eq!(bytes[..16], *b"hr\x03\x82\x02\0\0\0\x03\0\0\0\0\0\0\0");
        assert_eq!(bytes[16..], *b"\x04\0\0\0\0\0\0\0\x05\0\0\0\x06\0\0\0");
        assert_eq!(Header::parse(&bytes), Ok(header()));
    }

    #[test]
    fn invalid_header_bytes_are_rejected() {
        for len in 0..HEADER {
            assert_eq!(Header::parse(&header().emit()[..len]), Err(Violation::NotAFrame(len)));
        }
        let parse_with = |at: usize, byte: u8| {
            let mut bytes = header().emit();
            bytes[at] = byte;
            Header::parse(&bytes)
        };
        assert_eq!(parse_with(0, 0), Err(Violation::NotAFrame(HEADER)));
        assert_eq!(parse_with(2, 9), Err(Violation::Version(9)));
        assert_eq!(parse_with(3, 0x88), Err(Violation::Kind(8)));
        assert_eq!(parse_with(3, 0), Err(Violation::Kind(0)));
    }

    #[test]
    fn bodies_that_contradict_their_header_are_rejected() {
        let mut assembler = Assembler::new(100);
        let long = Header { length: 101, ..header() };
        assert_eq!(assembler.message(long.emit().to_vec()), Err(Violation::TooLarge { len: 101, max: 100 }));
        let endless = Header { length: u64::MAX, ..header() };
        assert!(matches!(assembler.message(endless.emit().to_vec()), Err(Violation::TooLarge { .. })));
        let truncated = [&header().emit()[..], &[1, 2, 3]].concat();
        assert_eq!(assembler.message(truncated), Err(Violation::Length { got: 3, expected: 4 }));
        let separate = Header { inline: false, ..header() };
        assert_eq!(assembler.message(separate.emit().to_vec()), Ok(Vec::new()));
        assert_eq!(assembler.message(vec![0; 5]), Err(Violation::Length { got: 5, expected: 4 }));
        let short = Header { length: 0, ..header() }.emit();
        assert_eq!(
            Assembler::new(100).message(short.repeat(PACK / HEADER)).map(|frames| frames.len()),
            Ok(PACK / HEADER)
        );
        let many = Assembler::new(100).message(short.repeat(PACK / HEADER + 1));
        assert_eq!(many, Err(Violation::Length { got: PACK, expected: 0 }));
        let mut assembler = Assembler::new(100);
        assert_eq!(assembler.message(separate.emit().to_vec()), Ok(Vec::new()));
        assert_eq!(assembler.message(Vec::new()), Err(Violation::Length { got: 0, expected: 4 }));
    }

    proptest! {
        #[test]
        fn headers_round_trip(
            kind in 1_u8..=7,
            inline in any::<bool>(),
            (code, call, length) in any::<(u32, u64, u64)>(),
            (time, credits) in any::<(u32, u32)>(),
        ) {
            let header = Header { kind: Kind::try_read_from_bytes(&[kind]).unwrap(), inline, code, call, length, time, credits };
            prop_assert_eq!(Header::parse(&header.emit()), Ok(header));
        }

        #[test]
        fn parsed_header_emits_its_bytes(mut bytes in any::<[u8; HEADER]>()) {
            bytes[..2].copy_from_slice(&MAGIC);
            bytes[2] = VERSION;
            if let Ok(header) = Header::parse(&bytes) {
                prop_assert_eq!(header.emit(), bytes);
            }
        }

        #[test]
        fn bodies_are_reassembled_from_pieces_of_any_size(
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
            let mut assembler = Assembler::new(1000);
            let last = messages.pop().unwrap();
            for message in messages {
                prop_assert_eq!(assembler.message(message), Ok(Vec::new()));
            }
            let (seen, got) = assembler.message(last).unwrap().pop().unwrap();
            prop_assert_eq!(seen, header);
            prop_assert_eq!(got.len(), body.len());
            prop_assert_eq!(&*got.bytes(), &body[..]);
            prop_assert_eq!(got.into_vec(), body);
        }

        #[test]
        fn frames_packed_into_one_message_come_out_in_order(
            bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..100), 1..10),
        ) {
            let mut message = Vec::new();
            for body in &bodies {
                message.extend_from_slice(&Header { inline: true, length: body.len() as u64, ..header() }.emit());
                message.extend_from_slice(body);
            }
            let mut assembler = Assembler::new(100);
            let frames = assembler.message(message.clone()).unwrap();
            let got: Vec<Vec<u8>> = frames.into_iter().map(|(_, body)| body.into_vec()).collect();
            prop_assert_eq!(&got, &bodies);
            message.push(0);
            prop_assert!(assembler.message(message).is_err());
        }

        #[test]
        fn arbitrary_messages_neither_panic_nor_exceed_limit(
            messages in proptest::collection::vec(
                (proptest::collection::vec(any::<u8>(), 0..80), any::<bool>(), 0u64..2000, any::<bool>()), 0..20),
        ) {
            let mut assembler = Assembler::new(1000);
            for (mut message, framed, length, inline) in messages {
                if framed && message.len() >= HEADER {
                    let kind = if message[3] % 2 == 0 { Kind::Request } else { Kind::Answer };
                    let header = Header { kind, inline, length, ..header() };
                    message[..HEADER].copy_from_slice(&header.emit());
                }
                match assembler.message(message) {
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
