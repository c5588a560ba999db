//! A raw peer: an endpoint that sends any bytes with any tag. It knows the protocol from the documentation, not from
//! the crate.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use ferrogin_libfabric::bindings::{self, fi_context2, fi_ops_tagged, fid_ep};
use ferrogin_libfabric::{
    AddressVector, Completion, CompletionQueue, CqAttr, Domain, Endpoint, Fabric, FiAddr, Libfabric, Read,
    find_datagrams,
};
use ferrogin_test_support::wait::poll_until;

/// Tag of control messages of kind 0.
pub const CONTROL: u64 = 1 << 34;
pub const IDS: u64 = 0xffff_ffff;
/// Bytes of the buffer for a control message.
const BUFFER_BYTES: usize = 256;
/// How many receives are posted for them.
const BUFFERS: usize = 8;

/// Tagged messages to one peer. Only control messages are received.
pub trait Raw {
    /// Returns the name of the endpoint.
    fn name(&self) -> Vec<u8>;
    /// Sets the peer by its name, and for a listener its secret.
    fn set_peer(&mut self, name: &[u8], secret: u64);
    fn send(&mut self, tag: u64, bytes: &[u8]);
    /// Returns the control messages that have arrived.
    fn receive(&mut self) -> Vec<Vec<u8>>;
}

struct ReceiveBuffer {
    context: Box<fi_context2>,
    bytes: Box<[u8; BUFFER_BYTES]>,
}

/// Tagged messages of a provider.
pub struct Tagged {
    // First, so that it is closed before its buffers are freed.
    endpoint: Endpoint,
    queue: Arc<CompletionQueue>,
    av: Arc<AddressVector>,
    to: FiAddr,
    buffers: Vec<ReceiveBuffer>,
    /// Sent bytes and their contexts, kept until the end.
    sending: Vec<(Box<[u8]>, Box<fi_context2>)>,
    received: Vec<Vec<u8>>,
}

impl Tagged {
    pub fn open(lib: &Arc<Libfabric>, provider: &str) -> Self {
        let info = find_datagrams(lib, provider, None, bindings::FI_TAGGED | bindings::FI_DIRECTED_RECV).unwrap();
        let domain = Domain::open(&Fabric::open(&info).unwrap(), &info).unwrap();
        let av = AddressVector::open(&domain, 4).unwrap();
        let queue = CompletionQueue::open(&domain, &CqAttr { size: 256 }).unwrap();
        let mut endpoint = Endpoint::open(&domain, &info).unwrap();
        endpoint.bind_av(&av).unwrap();
        endpoint.bind_cq(&queue, bindings::FI_TRANSMIT | bindings::FI_RECV).unwrap();
        endpoint.enable().unwrap();
        let room = || ReceiveBuffer { context: Box::default(), bytes: Box::new([0; BUFFER_BYTES]) };
        let (to, buffers) = (FiAddr::UNSPEC, (0..BUFFERS).map(|_| room()).collect());
        let mut this = Self { endpoint, queue, av, to, buffers, sending: Vec::new(), received: Vec::new() };
        (0..BUFFERS).for_each(|at| this.post(at));
        this
    }

    fn table(&self) -> &fi_ops_tagged {
        // SAFETY: the endpoint is open, and its table outlives it.
        let table = unsafe { (*self.endpoint.as_ptr()).tagged };
        // SAFETY: the table belongs to the open endpoint, and nothing writes to it.
        unsafe { &*table }
    }

    fn post(&mut self, at: usize) {
        let (endpoint, receive) = (self.endpoint.as_ptr(), self.table().recv.unwrap());
        let ReceiveBuffer { context, bytes } = &mut self.buffers[at];
        let (data, context) = (bytes.as_mut_ptr().cast(), ptr::from_mut(&mut **context).cast());
        let (desc, from) = (ptr::null_mut(), FiAddr::UNSPEC.0);
        // SAFETY: the endpoint is open; the buffer stays on the heap until it is closed, and is read only after its
        // completion.
        let code = unsafe { receive(endpoint, data, BUFFER_BYTES, desc, from, CONTROL, IDS, context) };
        assert_eq!(code, 0);
    }

    fn progress(&mut self) {
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
        }
    }

    /// Offers bytes to libfabric until it takes them. `offer` is called with the endpoint, the bytes, their number, the
    /// peer and a context.
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
    }
}

impl Raw for Tagged {
    fn name(&self) -> Vec<u8> {
        self.endpoint.name().unwrap()
    }

    fn set_peer(&mut self, name: &[u8], _: u64) {
        self.to = self.av.insert(name).unwrap();
    }

    fn send(&mut self, tag: u64, bytes: &[u8]) {
        let send = self.table().send.unwrap();
        self.send_by(bytes, |endpoint, data, len, to, context| {
            // SAFETY: the endpoint is open; bytes and context stay on the heap until it is closed.
            unsafe { send(endpoint, data, len, ptr::null_mut(), to, tag, context) }
        });
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        self.progress();
        std::mem::take(&mut self.received)
    }
}
