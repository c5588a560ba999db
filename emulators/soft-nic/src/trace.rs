//! A card's trace (`SOFTEFA_TRACE`): every work request that the card takes and every completion, as fixed-size
//! records.
//!
//! A file is a sequence of [`Record`]s and nothing else. Cards in many processes append to one file: each write holds
//! whole records, and the system appends each write as a whole. A card's own records are in time order. `ferrogin
//! trace` reads the file.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use ferrogin_rendezvous::open_own_file;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use crate::address::Gid;
use crate::wire::assert_layout;

/// The first bytes of every record. The last of them is the layout's version.
pub const MAGIC: [u8; 4] = *b"sft\x01";
/// The last bytes of every record. They tell a whole record from one that was cut off.
pub const END: [u8; 4] = *b"\x01tfs";
/// Size of a record in bytes.
pub const RECORD_LEN: usize = size_of::<Record>();
/// [`Record::op`] of a record without an operation.
pub const NO_OPERATION: u8 = 0xff;

/// What a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, TryFromBytes)]
#[repr(u8)]
pub enum Kind {
    /// A card was opened: `peer` is the card itself, and `bytes` holds the program's name.
    Card = 1,
    /// The card took a work request from a send queue: `bytes` holds all of it.
    Request = 2,
    /// A work request from a send queue completed: `bytes` holds the completion entry, if one was written.
    Completion = 3,
    /// The card took a receive for a message that arrived: `bytes` holds its descriptors.
    Receive = 4,
    /// A receive completed, or a peer's write with immediate data arrived: `bytes` holds the completion entry, if one
    /// was written.
    Received = 5,
    /// A peer's write or read was counted, without a completion entry.
    Counted = 6,
    /// A queue pair was closed or reset: its outstanding requests get no completion.
    Closed = 7,
}

impl Kind {
    /// Returns the kind with this number.
    pub fn from_raw(raw: u8) -> Option<Self> {
        Self::try_read_from_bytes(&[raw]).ok()
    }
}

/// Bits of [`Record::flags`].
pub mod flags {
    /// A completion entry was written.
    pub const ENTRY: u8 = 1;
    /// A completion counter of the queue pair counted the event.
    pub const COUNTED: u8 = 2;
    /// `imm` is valid.
    pub const IMM: u8 = 4;
}

/// One record of a trace. Fields that mean nothing for its kind are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Record {
    /// [`MAGIC`].
    pub magic: [u8; 4],
    /// [`Kind`].
    pub kind: u8,
    /// Operation code ([`efa_dp_direct::wire::SendOp`]), or [`NO_OPERATION`].
    pub op: u8,
    /// Status of a completion ([`efa_dp_direct::wire::CompStatus`]).
    pub status: u8,
    /// [`flags`].
    pub flags: u8,
    /// Nanoseconds since 1970: the system's clock when the card was opened, and the steady clock from then on.
    pub time_ns: U64,
    /// Process id of the card.
    pub process: U32,
    /// The card's number in its process.
    pub card: U32,
    /// Queue pair.
    pub qpn: U16,
    /// The peer's queue pair.
    pub peer_qpn: U16,
    /// The peer's address handle.
    pub ah: U16,
    /// How many of `bytes` are valid.
    pub size: U16,
    /// Index of the request since the queue was opened.
    pub index: U32,
    /// The request's slot in its ring.
    pub slot: U32,
    /// Request id.
    pub request_id: U64,
    /// Length of the transfer in bytes.
    pub length: U32,
    /// Immediate data.
    pub imm: U32,
    /// The peer's card: 32 bits of a hash of its GID ([`Gid::short`]); 0 if unknown.
    pub peer: U32,
    /// The IPv4 address of the peer's host.
    pub peer_ip: [u8; 4],
    /// The work request, the receive's descriptors, or the completion entry. A GID in an entry has zeros in place of
    /// its secret.
    pub bytes: [u8; 128],
    /// [`END`].
    pub end: [u8; 4],
}
assert_layout!(Record, 196, {
    magic @ 0, kind @ 4, op @ 5, status @ 6, flags @ 7, time_ns @ 8, process @ 16, card @ 20, qpn @ 24, peer_qpn @ 26, ah @ 28,
    size @ 30, index @ 32, slot @ 36, request_id @ 40, length @ 48, imm @ 52, peer @ 56, peer_ip @ 60, bytes @ 64, end @ 192
});

impl Record {
    /// Creates an empty record for a queue pair. The writer adds time, process and card.
    pub fn new(kind: Kind, qpn: u16) -> Self {
        let mut record = Self::new_zeroed();
        (record.magic, record.end) = (MAGIC, END);
        (record.kind, record.op, record.qpn) = (kind as u8, NO_OPERATION, qpn.into());
        record
    }

    /// Adds the peer's card.
    pub fn set_peer(&mut self, gid: &Gid) {
        (self.peer, self.peer_ip) = (gid.short().into(), gid.ip().map_or([0; 4], |ip| ip.octets()));
    }

    /// Adds the bytes that the record is about, as far as they fit.
    pub fn set_bytes(&mut self, bytes: &[u8]) {
        let size = bytes.len().min(self.bytes.len());
        self.bytes[..size].copy_from_slice(&bytes[..size]);
        self.size = (size as u16).into();
    }

    /// Returns the bytes that the record is about.
    pub fn valid_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.size.get()).min(self.bytes.len())]
    }

    /// Parses the record in the first [`RECORD_LEN`] bytes; `None` if its first or last bytes, its kind or its size are
    /// invalid.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (record, _) = Self::read_from_prefix(bytes).ok()?;
        let fits = usize::from(record.size.get()) <= record.bytes.len();
        let whole = record.magic == MAGIC && record.end == END;
        (whole && Kind::from_raw(record.kind).is_some() && fits).then_some(record)
    }
}

/// Returns why a file that begins with these bytes is no trace that this release reads; `None` if it is one, or if it
/// is empty.
pub fn refuse(first: &[u8]) -> Option<String> {
    match first {
        [b's', b'f', b't', version, ..] if *version != MAGIC[3] => Some(format!(
            "is a trace of version {version}, but this release has version {}: use the tool and the card of one release",
            MAGIC[3]
        )),
        _ if first.is_empty() || first.starts_with(&MAGIC) => None,
        _ => Some("is not a trace of a software card".into()),
    }
}

/// Records that fill the buffer between two polls of the card.
const BUFFERED: usize = 256;

/// Appends one card's records to the file.
#[derive(Debug)]
pub(crate) struct Writer {
    path: PathBuf,
    file: File,
    buffer: Vec<u8>,
    opened: (Instant, u64),
    process: u32,
    card: u32,
}

impl Writer {
    /// Opens or creates the file, with the process id in place of `%p` in its name. Only the user may read a new file,
    /// because a trace holds keys of queue pairs and memory.
    ///
    /// # Errors
    /// The file cannot be written, is a link or not a regular file, belongs to another user, or is not a trace.
    pub(crate) fn open(path: &Path, card: u32, gid: &Gid) -> io::Result<Self> {
        let process = std::process::id();
        let path = PathBuf::from(path.to_string_lossy().replace("%p", &process.to_string()));
        let mut file = open_own_file(&path, OpenOptions::new().read(true).append(true))?;
        let mut first = Vec::new();
        (&mut file).take(MAGIC.len() as u64).read_to_end(&mut first)?;
        if let Some(why) = refuse(&first) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{why}, and was not overwritten")));
        }
        let mut writer = Self::to(path, file, card);
        let mut record = Record::new(Kind::Card, 0);
        record.set_peer(gid);
        let program = std::env::current_exe().unwrap_or_default();
        record.set_bytes(program.file_name().unwrap_or_default().as_encoded_bytes());
        writer.add(record)?;
        writer.flush()?;
        Ok(writer)
    }

    fn to(path: PathBuf, file: File, card: u32) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let opened = (Instant::now(), now.as_nanos() as u64);
        Self { path, file, buffer: Vec::new(), opened, process: std::process::id(), card }
    }

    /// Adds a record. It is in the file after the next [`flush`](Self::flush).
    pub(crate) fn add(&mut self, mut record: Record) -> io::Result<()> {
        let (opened, at) = self.opened;
        record.time_ns = (at + opened.elapsed().as_nanos() as u64).into();
        (record.process, record.card) = (self.process.into(), self.card.into());
        self.buffer.extend_from_slice(record.as_bytes());
        if self.buffer.len() >= BUFFERED * RECORD_LEN { self.flush() } else { Ok(()) }
    }

    /// Writes the added records.
    ///
    /// # Errors
    /// The file takes no more, as on a full disk.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let written = self.file.write_all(&self.buffer);
        self.buffer.clear();
        written
    }

    /// Returns the file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // The card is closed, so an error no longer affects it.
        let _ = self.flush();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4};

    use super::*;

    const GID: Gid = Gid { address: Some(SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 7), 9)), secret: *b"12345678" };

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("soft-nic-trace-{}-{name}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            Self(path)
        }

        fn records(&self) -> Vec<Record> {
            let bytes = std::fs::read(&self.0).unwrap();
            assert_eq!(bytes.len() % RECORD_LEN, 0);
            bytes.chunks(RECORD_LEN).map(|chunk| Record::parse(chunk).unwrap()).collect()
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn records_of_two_cards_share_a_file() {
        let place = Place::new("shared");
        let mut writers = [0, 1].map(|card| Writer::open(&place.0, card, &GID).unwrap());
        for n in 0..600u16 {
            for writer in &mut writers {
                let mut record = Record::new(Kind::Request, 3);
                record.set_bytes(&n.to_le_bytes());
                writer.add(record).unwrap();
            }
        }
        assert_eq!(place.records().len(), 2 + 2 * 2 * BUFFERED, "whole buffers");
        drop(writers);
        let records = place.records();
        for card in 0..2 {
            let own: Vec<_> = records.iter().filter(|record| record.card.get() == card).collect();
            assert_eq!(own.len(), 601);
            assert_eq!((own[0].kind, own[0].peer.get()), (Kind::Card as u8, GID.short()));
            for (n, record) in own[1..].iter().enumerate() {
                assert_eq!(record.valid_bytes(), (n as u16).to_le_bytes());
            }
            assert!(own.is_sorted_by_key(|record| record.time_ns.get()));
        }
    }

    #[test]
    fn file_is_private_and_named_by_process() {
        use std::os::unix::fs::PermissionsExt;
        let place = Place::new(&format!("of-{}", std::process::id()));
        let name = place.0.to_str().unwrap().replace(&format!("of-{}", std::process::id()), "of-%p");
        drop(Writer::open(Path::new(&name), 0, &GID).unwrap());
        assert_eq!(std::fs::metadata(&place.0).unwrap().permissions().mode() & 0o777, 0o600);
        let text = std::fs::read(&place.0).unwrap();
        assert!(!text.windows(8).any(|part| part == GID.secret), "the secret of the GID stays in the card");
    }

    #[test]
    fn non_trace_file_is_refused_and_kept() {
        let refused = |path: &Path| Writer::open(path, 0, &GID).unwrap_err().to_string();
        let place = Place::new("foreign");
        std::fs::write(&place.0, "my diary").unwrap();
        assert!(refused(&place.0).contains("is not a trace of a software card, and was not overwritten"));
        assert_eq!(std::fs::read(&place.0).unwrap(), b"my diary");
        std::fs::write(&place.0, b"sft\x02").unwrap();
        assert!(refused(&place.0).contains("is a trace of version 2"));
        assert!(refused(Path::new("/nonexistent/trace")).contains("No such file"));
        assert!(refused(Path::new("/dev/null")).contains("is not a regular file"));
        assert!(refused(&std::env::temp_dir()).contains("directory"));
        let fifo = Place::new("fifo");
        nix::unistd::mkfifo(&fifo.0, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(refused(&fifo.0).contains("is not a regular file"), "the open of a FIFO does not wait");
        let link = Place::new("link");
        std::os::unix::fs::symlink(&place.0, &link.0).unwrap();
        assert!(refused(&link.0).contains("is a symbolic link"));
    }

    #[test]
    fn keys_reach_no_file_of_another_user() {
        if !ferrogin_test_support::untrusted::have_second_user("keys_reach_no_file_of_another_user") {
            return;
        }
        let place = Place::new("nobody");
        std::fs::write(&place.0, "").unwrap();
        std::fs::set_permissions(&place.0, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        std::os::unix::fs::chown(&place.0, Some(65534), None).unwrap();
        let error = Writer::open(&place.0, 0, &GID).unwrap_err().to_string();
        assert!(error.contains("belongs to user 65534"), "{error}");
        assert_eq!(std::fs::read(&place.0).unwrap(), b"");
    }

    #[test]
    fn full_disk_is_an_error_of_the_flush() {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut writer = Writer::to("/dev/full".into(), full, 0);
        writer.add(Record::new(Kind::Request, 1)).unwrap();
        assert_eq!(writer.flush().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        for _ in 1..BUFFERED {
            writer.add(Record::new(Kind::Request, 1)).unwrap();
        }
        assert!(writer.add(Record::new(Kind::Request, 1)).is_err());
        assert!(writer.buffer.is_empty(), "a card does not collect what cannot be written");
    }

    #[test]
    fn invalid_record_bytes_are_rejected() {
        let mut bytes = Record::new(Kind::Closed, 1).as_bytes().to_vec();
        assert!(Record::parse(&bytes).is_some());
        assert!(Record::parse(&bytes[1..]).is_none() && Record::parse(&bytes[..RECORD_LEN - 1]).is_none());
        for (at, value) in [(0, 0), (3, 2), (4, 0), (4, 8), (30, 129), (195, 0)] {
            let before = std::mem::replace(&mut bytes[at], value);
            assert!(Record::parse(&bytes).is_none(), "byte {at} = {value}");
            bytes[at] = before;
        }
    }
}
