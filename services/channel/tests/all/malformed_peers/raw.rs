//! A raw peer: an endpoint that sends any tag with any bytes. Its knowledge of the protocol is from the documentation and not from the
//! crate.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use ferrogin_datagram::{Event, MessageEndpoint, Peer, SendError};
use ferrogin_libfabric::bindings::{self, fi_context2, fi_ops_tagged, fid_ep};
use ferrogin_libfabric::{
    AddressVector, Completion, CompletionQueue, CqAttr, Domain, Endpoint, Fabric, FiAddr, Libfabric, Read,
    find_datagrams,
};

use ferrogin_test_support::wait::poll_until;

/// Tag of control messages of kind 0.
pub const CONTROL: u64 = 1 << 34;
const IDS: u64 = 0xffff_ffff;
/// Bytes of the buffer for a control message.
const BUFFER_BYTES: usize = 256;
/// Receives for them.
const BUFFERS: usize = 8;

/// Tagged messages to one peer. Only control messages are received.
pub trait Raw {
    /// The code of its tag matching in addresses and hellos.
    const MATCHING: u8;
    /// The name of the endpoint.
    fn name(&self) -> Vec<u8>;
    /// Sets the peer by its name.
    fn set_peer(&mut self, name: &[u8]);
    fn send(&mut self, tag: u64, bytes: &[u8]);
    /// The control messages that have arrived.
    fn receive(&mut self) -> Vec<Vec<u8>>;
}

struct ReceiveBuffer {
    context: Box<fi_context2>,
    bytes: Box<[u8; BUFFER_BYTES]>,
}

/// Messages of the provider: with tags that it matches, or without tags.
pub struct Tagged {
    // First, so that it is closed before its buffers are freed.
    endpoint: Endpoint,
    queue: Arc<CompletionQueue>,
    av: Arc<AddressVector>,
    to: FiAddr,
    buffers: Vec<ReceiveBuffer>,
    /// Sent bytes and their contexts, kept until the end.
    sending: Vec<(Box<[u8]>, Box<fi_context2>)>,
    pub in_flight: usize,
    received: Vec<Vec<u8>>,
}

impl Tagged {
    pub fn open(lib: &Arc<Libfabric>, provider: &str) -> Self {
        let mut this = Self::open_with(lib, provider, bindings::FI_TAGGED | bindings::FI_DIRECTED_RECV);
        let room = || ReceiveBuffer { context: Box::default(), bytes: Box::new([0; BUFFER_BYTES]) };
        this.buffers = (0..BUFFERS).map(|_| room()).collect();
        (0..BUFFERS).for_each(|at| this.post(at));
        this
    }

    /// Without receives.
    pub fn open_with(lib: &Arc<Libfabric>, provider: &str, caps: u64) -> Self {
        let info = find_datagrams(lib, provider, (provider == "tcp").then_some("127.0.0.1"), caps).unwrap();
        let domain = Domain::open(&Fabric::open(&info).unwrap(), &info).unwrap();
        let av = AddressVector::open(&domain, 4).unwrap();
        let queue = CompletionQueue::open(&domain, &CqAttr { size: 256 }).unwrap();
        let mut endpoint = Endpoint::open(&domain, &info).unwrap();
        endpoint.bind_av(&av).unwrap();
        endpoint.bind_cq(&queue, bindings::FI_TRANSMIT | bindings::FI_RECV).unwrap();
        endpoint.enable().unwrap();
        let (to, buffers, sending, received) = (FiAddr::UNSPEC, Vec::new(), Vec::new(), Vec::new());
        Self { endpoint, queue, av, to, buffers, sending, in_flight: 0, received }
    }

    fn table(&self) -> &fi_ops_tagged {
        // SAFETY: the endpoint is open, which its table outlives.
        let table = unsafe { (*self.endpoint.as_ptr()).tagged };
        // SAFETY: the table belongs to the open endpoint, and nothing writes to it.
        unsafe { &*table }
    }

    fn post(&mut self, at: usize) {
        let (endpoint, receive) = (self.endpoint.as_ptr(), self.table().recv.unwrap());
        let ReceiveBuffer { context, bytes } = &mut self.buffers[at];
        let (data, context) = (bytes.as_mut_ptr().cast(), ptr::from_mut(&mut **context).cast());
        let (desc, from) = (ptr::null_mut(), FiAddr::UNSPEC.0);
        // SAFETY: open endpoint; the room lies on the heap until that is closed, and is read after its completion only.
        let code = unsafe { receive(endpoint, data, BUFFER_BYTES, desc, from, CONTROL, IDS, context) };
        assert_eq!(code, 0);
    }

    pub fn progress(&mut self) {
        let mut done = [Completion::EMPTY; 16];
        match self.queue.read(&mut done).unwrap() {
            Read::Entries(count) => done[..count].iter().for_each(|entry| self.completed(entry.context, entry.len)),
            // A send to a peer that is gone.
            Read::Failure => drop(self.queue.read_error().unwrap().inspect(|error| self.completed(error.context, 0))),
        }
    }

    fn completed(&mut self, context: *mut c_void, len: usize) {
        let is = |room: &ReceiveBuffer| ptr::eq(ptr::from_ref(&*room.context).cast(), context);
        if let Some(at) = self.buffers.iter().position(is) {
            self.received.push(self.buffers[at].bytes[..len].to_vec());
            self.post(at);
        } else if !context.is_null() {
            self.in_flight -= 1;
        }
    }

    /// Offers bytes to libfabric until `offer`, a call with endpoint, bytes, their number, peer and context, takes them.
    fn send_by(&mut self, bytes: &[u8], offer: impl Fn(*mut fid_ep, *const c_void, usize, u64, *mut c_void) -> isize) {
        self.sending.push((bytes.into(), Box::default()));
        poll_until("send", || {
            let (bytes, context) = self.sending.last_mut().unwrap();
            let (data, context) = (bytes.as_ptr().cast(), ptr::from_mut(&mut **context).cast());
            let code = offer(self.endpoint.as_ptr(), data, bytes.len(), self.to.0, context);
            if code != 0 {
                assert_eq!(code, -(bindings::FI_EAGAIN as isize), "a send");
                self.progress();
            }
            code == 0
        });
        self.in_flight += 1;
    }

    /// Sends a message without a tag.
    pub fn send_message(&mut self, bytes: &[u8]) {
        // SAFETY: the endpoint is open, which its table outlives.
        let table = unsafe { (*self.endpoint.as_ptr()).msg };
        // SAFETY: the table belongs to the open endpoint, and nothing writes to it.
        let send = unsafe { (*table).send }.unwrap();
        self.send_by(bytes, |endpoint, data, len, to, context| {
            // SAFETY: open endpoint; bytes and context lie on the heap until it is closed.
            unsafe { send(endpoint, data, len, ptr::null_mut(), to, context) }
        });
    }
}

impl Raw for Tagged {
    const MATCHING: u8 = 1;

    fn name(&self) -> Vec<u8> {
        self.endpoint.name().unwrap()
    }

    fn set_peer(&mut self, name: &[u8]) {
        self.to = self.av.insert(name).unwrap();
    }

    fn send(&mut self, tag: u64, bytes: &[u8]) {
        let send = self.table().send.unwrap();
        self.send_by(bytes, |endpoint, data, len, to, context| {
            // SAFETY: open endpoint; bytes and context lie on the heap until it is closed.
            unsafe { send(endpoint, data, len, ptr::null_mut(), to, tag, context) }
        });
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.progress();
        std::mem::take(&mut self.received)
    }
}

/// Records in datagrams, as channels over `tcp` send them.
pub struct Datagrams {
    endpoint: MessageEndpoint,
    to: Option<Peer>,
    received: Vec<Vec<u8>>,
}

/// Bytes of a record's header, and of the longest eager message.
const HEADER: usize = 32;
const DATAGRAM: usize = 64 << 10;
pub const EAGER: u8 = 1;
const RTS: u8 = 2;
/// Flag: the bytes follow the header.
pub const INLINE: u8 = 2;

/// The header of a record.
pub fn header(kind: u8, tag: u64, total: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[0] = kind;
    header[8..16].copy_from_slice(&tag.to_le_bytes());
    header[16..24].copy_from_slice(&total.to_le_bytes());
    header
}

impl Datagrams {
    pub fn open(lib: &Arc<Libfabric>, provider: &str) -> Self {
        let config = ferrogin_datagram::Config {
            provider: provider.to_owned(),
            max_header: HEADER,
            max_payload: DATAGRAM,
            tx_depth: 16,
            rx_depth: 16,
            ..ferrogin_datagram::Config::default()
        };
        Self { endpoint: MessageEndpoint::open(lib, &config).unwrap(), to: None, received: Vec::new() }
    }

    /// Sends any datagram.
    pub fn datagram(&mut self, header: &[u8], bytes: &[u8]) {
        poll_until("send", || {
            let sent = self.endpoint.send(self.to.unwrap(), header, bytes);
            if sent != Ok(()) {
                assert_eq!(sent, Err(SendError::Full));
                self.progress();
            }
            sent == Ok(())
        });
    }

    /// Sends an RTS for a message whose bytes are never sent.
    pub fn send_rts(&mut self, tag: u64, total: u64) {
        self.datagram(&header(RTS, tag, total), &[]);
    }

    fn progress(&mut self) {
        let received = &mut self.received;
        let on_event = |_: &mut ferrogin_datagram::Outbox, event: Event<'_>| {
            let Event::Message { header: mut records, payload, .. } = event else { return };
            while let Some((header, rest)) = records.split_first_chunk::<HEADER>() {
                let word = |at: usize| header[at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
                let inline = header[0] == EAGER && header[1] & INLINE != 0;
                let (bytes, rest) = rest.split_at(if inline { word(16) as usize } else { 0 });
                records = rest;
                if header[0] == EAGER && word(8) & !IDS == CONTROL {
                    received.push(if inline { bytes } else { payload }.to_vec());
                }
            }
        };
        self.endpoint.poll(on_event).unwrap();
    }
}

impl Raw for Datagrams {
    const MATCHING: u8 = 2;

    fn name(&self) -> Vec<u8> {
        self.endpoint.address().to_vec()
    }

    fn set_peer(&mut self, name: &[u8]) {
        self.to = Some(self.endpoint.add_peer(name).unwrap());
    }

    fn send(&mut self, tag: u64, bytes: &[u8]) {
        if bytes.len() > DATAGRAM {
            // No receive of these tests is as long.
            return self.send_rts(tag, bytes.len() as u64);
        }
        self.datagram(&header(EAGER, tag, bytes.len() as u64), bytes);
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.progress();
        std::mem::take(&mut self.received)
    }
}
