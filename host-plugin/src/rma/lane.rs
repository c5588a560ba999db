//! A lane: a context handle's endpoint on one rail, its operations in flight, its receives, and a queue of operations waiting for room.
#![allow(unsafe_code)]

use super::memory::Memory;
use super::ranks::Ranks;
use super::record::Record;
use crate::device::{Device, DeviceBuffer, DeviceKind, Use};
use crate::error::Error;
use crate::memory::region_of;
use crate::metrics::source::RmaCounts;
use crate::rail::Peers;
use ferrogin_libfabric::bindings::{self, fi_msg, fi_msg_rma, fi_rma_iov, fid_ep, iovec};
use ferrogin_libfabric::{
    AddressVector, Completion, CompletionError, CompletionQueue, Context, CqAttr, Endpoint, Libfabric, MemoryRegion,
    Read, entry,
};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

type Rma = unsafe extern "C" fn(*mut fid_ep, *const fi_msg_rma, u64) -> isize;
type Send = unsafe extern "C" fn(*mut fid_ep, *const c_void, usize, *mut c_void, u64, *mut c_void) -> isize;
type SendMsg = unsafe extern "C" fn(*mut fid_ep, *const fi_msg, u64) -> isize;
type Recv = unsafe extern "C" fn(*mut fid_ep, *mut c_void, usize, *mut c_void, u64, *mut c_void) -> isize;

/// An endpoint's address, padded with zeros.
pub type Address = [u8; bindings::FI_NAME_MAX as usize];

/// Maximum operations in flight.
const DEPTH: usize = 512;
/// Maximum receives. A signal takes one, or two on cards where writes with immediate data take one as well.
const RECEIVES: usize = 512;
/// Size of a record's slot in bytes.
const SLOT: usize = 64;
/// Completions read from the queue at once.
const BATCH: usize = 32;
/// Operations that may be written to a queue before its doorbell is rung.
const DOORBELL_BATCH: usize = 16;

/// A remote access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A write.
    Write,
    /// A write with immediate data.
    WriteData(u32),
    /// A read.
    Read,
}

impl Access {
    /// Returns the name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "put",
            Self::WriteData(_) => "put with a signal",
            Self::Read => "get",
        }
    }
}

/// Where this rank's bytes are.
pub enum Local {
    /// At this offset in its memory.
    At(u64),
    /// In this value for a word.
    Value(u64),
}

/// An operation. `N` is what its owner notes about it.
pub enum Post<N> {
    /// A write or read of a peer's memory. This rank's `memory` stays registered until it completes.
    Rma { access: Access, peer: usize, memory: Arc<Memory>, local: Local, len: usize, remote: (u64, u64), note: N },
    /// A message. A `confirmed` one completes once it has arrived, and with it, if the rail keeps order, whatever was posted to the peer before.
    Record { peer: usize, record: Record, confirmed: bool, note: N },
}

/// What a lane reports.
pub enum Event<N> {
    /// An operation has completed: its source may be reused, and, unless the rail keeps order, its bytes have landed.
    Done(N),
    /// An operation has failed, with libfabric's code and the reason.
    Failed(N, i32, String),
    /// A peer's write with this immediate data has landed.
    Landed(u32),
    /// A peer's message.
    Record(Record),
    /// A message that isn't a record, or a receive that failed.
    Refused(String),
}

/// What an in-flight operation holds.
struct InFlight<N> {
    note: N,
    _memory: Option<Arc<Memory>>,
}

/// The endpoint; see the [module](self).
pub struct Lane<N> {
    // Dropped first: once it's closed, no operation uses the fields that follow.
    endpoint: Endpoint,
    cq: Arc<CompletionQueue>,
    /// The buffer completions are read into.
    batch: [Completion; BATCH],
    write: Rma,
    read: Rma,
    send: Send,
    sendmsg: SendMsg,
    recv: Recv,
    rail: usize,
    // Dropped after the endpoint, when no operation to a peer is outstanding.
    peers: Peers,
    /// One for each operation, then one for each receive; the note is the index.
    contexts: Box<[Context<u32>]>,
    in_flight: Vec<Option<InFlight<N>>>,
    free: Vec<u32>,
    queue: VecDeque<Post<N>>,
    /// Receives that libfabric hasn't accepted yet.
    unposted: Vec<u32>,
    rank: usize,
    keeps_order: bool,
    /// The flags with which a write's or message's completion means that its bytes have landed.
    level: u64,
    /// Whether peers' writes with immediate data take receives.
    writes_take_receives: bool,
    /// For FERROGIN_METRICS.
    pub counts: Arc<RmaCounts>,
    region: MemoryRegion,
    /// One slot per context.
    slots: Box<dyn DeviceBuffer>,
}

// SAFETY: the function pointers point to provider code, which any thread may call; `&mut self` keeps other uses in one thread.
unsafe impl<N: std::marker::Send> std::marker::Send for Lane<N> {}

impl<N> Lane<N> {
    /// Opens and enables an endpoint on rail `index`, and posts its receives. If the rail keeps operations in order, a write to a peer
    /// completes once its source may be reused.
    ///
    /// # Errors
    /// A libfabric call fails.
    pub fn open(ranks: &Ranks, index: usize, tclass: u32) -> Result<Self, Error> {
        let rail = &ranks.rails[index];
        let name = rail.name();
        let failed = |what: &str| Error::fabric(format!("{what} of an RMA context on card {name}"));
        let mut info = rail.info.clone();
        if tclass != 0 {
            info.set_tclass(tclass);
        }
        let some = |size: usize, most: usize| if size == 0 { most } else { size.min(most) };
        let (depth, receives) = (some(info.tx_size(), DEPTH), some(info.rx_size(), RECEIVES));
        // One entry for each operation and each receive, and for each peer's write that takes no receive.
        let attr = CqAttr { size: depth + 4 * receives };
        let cq = CompletionQueue::open(&rail.domain, &attr).map_err(failed("opening the completion queue"))?;
        let mut endpoint = Endpoint::open(&rail.domain, &info).map_err(failed("opening the endpoint"))?;
        keep_cuda_out(&mut endpoint, &info, &*ranks.device);
        // In an address vector shared with the lanes of earlier contexts, the tcp of libfabric 2.5 takes a peer's new endpoint for its old
        // one, and closes the connection: docs/found-elsewhere.md.
        let av = AddressVector::open(&rail.domain, ranks.nranks).map_err(failed("opening the address vector"))?;
        endpoint.bind_av(&av).map_err(failed("binding the address vector"))?;
        let both = bindings::FI_TRANSMIT | bindings::FI_RECV;
        endpoint.bind_cq(&cq, both).map_err(failed("binding the completion queue"))?;
        endpoint.enable().map_err(failed("enabling the endpoint"))?;
        let calls = || {
            let object = endpoint.object();
            let write = entry!(object, rma: fi_ops_rma, writemsg, "fi_writemsg")?;
            let read = entry!(object, rma: fi_ops_rma, readmsg, "fi_readmsg")?;
            let send = entry!(object, msg: fi_ops_msg, send, "fi_send")?;
            let sendmsg = entry!(object, msg: fi_ops_msg, sendmsg, "fi_sendmsg")?;
            let recv = entry!(object, msg: fi_ops_msg, recv, "fi_recv")?;
            Ok((write, read, send, sendmsg, recv))
        };
        let (write, read, send, sendmsg, recv) = calls().map_err(failed("preparing the endpoint"))?;
        let slots = ranks.device.allocate((depth + receives) * SLOT, Use::Shared)?;
        let (memory, kind) = region_of(&*slots, 0, slots.len());
        let access = bindings::FI_SEND | bindings::FI_RECV | bindings::FI_WRITE;
        // SAFETY: the lane drops the region before the memory, and holds no reference into it.
        let region = unsafe { rail.register(memory, kind, access, "registering messages of an RMA context") }?;
        let mut this = Self {
            endpoint,
            cq,
            batch: [Completion::EMPTY; BATCH],
            write,
            read,
            send,
            sendmsg,
            recv,
            rail: index,
            peers: Peers::new(&av),
            contexts: (0..(depth + receives) as u32).map(Context::new).collect(),
            in_flight: (0..depth).map(|_| None).collect(),
            free: (0..depth as u32).rev().collect(),
            queue: VecDeque::new(),
            unposted: (depth as u32..(depth + receives) as u32).rev().collect(),
            rank: ranks.rank,
            keeps_order: ranks.keep_order(),
            level: completion_level(&info),
            writes_take_receives: (info.mode() | info.rx_mode()) & bindings::FI_RX_CQ_DATA != 0,
            counts: Arc::default(),
            region,
            slots,
        };
        this.post_receives()?;
        Ok(this)
    }

    /// Returns the endpoint's address, for peers.
    ///
    /// # Errors
    /// The libfabric call fails.
    pub fn address(&self) -> Result<Address, Error> {
        let name = self.endpoint.name().map_err(Error::fabric("reading the address of an RMA context"))?;
        let mut address = [0; size_of::<Address>()];
        address[..name.len()].copy_from_slice(&name);
        Ok(address)
    }

    /// Inserts the next rank's address.
    ///
    /// # Errors
    /// The libfabric call fails.
    pub fn insert_peer(&mut self, address: &Address) -> Result<(), ferrogin_libfabric::Error> {
        self.peers.insert(address)
    }

    /// Queues an operation, and posts it unless another one follows right away.
    ///
    /// # Errors
    /// libfabric refuses an operation.
    pub fn post(&mut self, post: Post<N>, more_follows: bool) -> Result<(), Error> {
        if !more_follows
            && self.queue.is_empty()
            && let Some(at) = self.start(&post, false)?
        {
            self.keep(at, post);
            return Ok(());
        }
        self.queue.push_back(post);
        if more_follows && self.queue.len() < DOORBELL_BATCH { Ok(()) } else { self.flush() }
    }

    /// Posts as many queued operations as there is room for.
    ///
    /// # Errors
    /// libfabric refuses an operation.
    pub fn flush(&mut self) -> Result<(), Error> {
        while let batch @ 1.. = self.queue.len().min(self.free.len()).min(DOORBELL_BATCH) {
            for left in (0..batch).rev() {
                let Some(post) = self.queue.pop_front() else { return Ok(()) };
                let Some(at) = self.start(&post, left > 0)? else {
                    self.queue.push_front(post);
                    return Ok(());
                };
                self.keep(at, post);
            }
        }
        Ok(())
    }

    /// Holds on to what a posted operation uses.
    fn keep(&mut self, at: u32, post: Post<N>) {
        self.free.pop();
        self.counts.posts.add(1);
        self.in_flight[at as usize] = Some(match post {
            Post::Rma { note, memory, len, .. } => {
                self.counts.bytes.add(len as u64);
                InFlight { note, _memory: Some(memory) }
            }
            Post::Record { note, .. } => InFlight { note, _memory: None },
        });
    }

    /// Posts an operation and returns its context's index, the last one in `free`; `None` if there is no room. With `more`, the doorbell
    /// may wait for the next operation.
    fn start(&self, post: &Post<N>, more: bool) -> Result<Option<u32>, Error> {
        let Some(&at) = self.free.last() else { return Ok(None) };
        let context = self.contexts[at as usize].as_ptr();
        let endpoint = self.endpoint.as_ptr();
        let more = if more { bindings::FI_MORE } else { 0 };
        let (call, code) = match post {
            Post::Rma { access, peer, memory, local, len, remote: (address, key), .. } => {
                let (mut descriptor, local) = match local {
                    Local::At(offset) => memory.local(self.rail, *offset),
                    Local::Value(value) => (self.region.descriptor(), self.fill(at, value.as_bytes()) as u64),
                };
                let iov = iovec { iov_base: local as *mut c_void, iov_len: *len };
                let remote = fi_rma_iov { addr: *address, len: *len, key: *key };
                let mut message = fi_msg_rma {
                    msg_iov: &iov,
                    desc: &mut descriptor,
                    iov_count: 1,
                    addr: self.peers.numbers()[*peer].0,
                    rma_iov: &remote,
                    rma_iov_count: 1,
                    context,
                    data: 0,
                };
                // NCCL puts to its own rank to make sure that what came before has landed.
                let level = if self.keeps_order && *peer != self.rank { 0 } else { self.level };
                let (call, function, flags) = match access {
                    Access::Write => ("fi_writemsg", self.write, level),
                    Access::WriteData(data) => {
                        message.data = u64::from(*data);
                        ("fi_writemsg", self.write, level | bindings::FI_REMOTE_CQ_DATA)
                    }
                    Access::Read => ("fi_readmsg", self.read, 0),
                };
                // SAFETY: the endpoint is open, and the message and its vectors outlive the call. `in_flight` keeps the registration until
                // the operation has completed, and no other operation uses the context.
                (call, unsafe { function(endpoint, &message, flags | bindings::FI_COMPLETION | more) })
            }
            Post::Record { peer, record, confirmed: true, .. } => {
                let slot = self.fill(at, record.as_bytes());
                let mut descriptor = self.region.descriptor();
                let iov = iovec { iov_base: slot.cast(), iov_len: size_of::<Record>() };
                let message = fi_msg {
                    msg_iov: &iov,
                    desc: &mut descriptor,
                    iov_count: 1,
                    addr: self.peers.numbers()[*peer].0,
                    context,
                    data: 0,
                };
                let flags = self.level | bindings::FI_COMPLETION;
                // SAFETY: the endpoint is open, and the message and its vectors outlive the call. The slot is registered and stays until the
                // endpoint is closed, and no other operation uses the slot or the context.
                ("fi_sendmsg", unsafe { (self.sendmsg)(endpoint, &message, flags) })
            }
            Post::Record { peer, record, .. } => {
                let slot = self.fill(at, record.as_bytes());
                let (descriptor, peer) = (self.region.descriptor(), self.peers.numbers()[*peer].0);
                let len = size_of::<Record>();
                // SAFETY: the endpoint is open. The slot is registered and stays until the endpoint is closed, and no other operation uses
                // the slot or the context.
                ("fi_send", unsafe { (self.send)(endpoint, slot.cast(), len, descriptor, peer, context) })
            }
        };
        Ok(accepted(self.endpoint.domain().library(), call, code)?.then_some(at))
    }

    fn slot(&self, context: u32) -> *mut u8 {
        self.slots.host_address().map_or(ptr::null_mut(), |base| base.wrapping_add(context as usize * SLOT))
    }

    /// Fills the slot of an operation that hasn't been posted.
    fn fill(&self, at: u32, bytes: &[u8]) -> *mut u8 {
        let (slot, mut whole) = (self.slot(at), [0; SLOT]);
        whole[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: the slot lies in `slots` and belongs to the operation, so the card isn't reading it now.
        unsafe { slot.cast::<[u8; SLOT]>().write_volatile(whole) };
        slot
    }

    fn post_receives(&mut self) -> Result<(), Error> {
        while let Some(&at) = self.unposted.last() {
            let (slot, context) = (self.slot(at).cast(), self.contexts[at as usize].as_ptr());
            let (endpoint, descriptor) = (self.endpoint.as_ptr(), self.region.descriptor());
            let any = bindings::FI_ADDR_UNSPEC;
            // SAFETY: the endpoint is open. The slot is registered and stays until the endpoint is closed, and no other operation uses the
            // slot or the context.
            let code = unsafe { (self.recv)(endpoint, slot, SLOT, descriptor, any, context) };
            if !accepted(self.endpoint.domain().library(), "fi_recv", code)? {
                break;
            }
            self.unposted.pop();
        }
        Ok(())
    }

    /// Reads completions, drives the provider's progress, and posts what is waiting. Returns true if there may be more completions.
    ///
    /// # Errors
    /// The completion queue fails, or libfabric refuses an operation.
    pub fn poll(&mut self, events: &mut Vec<Event<N>>) -> Result<bool, Error> {
        let fail = || Error::fabric("reading the completions of an RMA context");
        let more = match self.cq.read(&mut self.batch).map_err(fail())? {
            Read::Entries(count) => {
                for at in 0..count.min(BATCH) {
                    self.complete(self.batch[at], events);
                }
                // The next call to rmaProgress handles what has arrived meanwhile.
                count == BATCH
            }
            Read::Failure => {
                let failure = self.cq.read_error().map_err(fail())?;
                failure.into_iter().for_each(|failure| self.fail(failure, events));
                true
            }
        };
        if !self.unposted.is_empty() {
            self.post_receives()?;
        }
        self.flush()?;
        Ok(more)
    }

    /// Returns the index of an operation's context; `None` for completions without one.
    fn index(&self, context: *mut c_void) -> Option<u32> {
        // SAFETY: the provider's context is null or that of one of this lane's operations, and those live until the endpoint is closed.
        (!context.is_null()).then(|| unsafe { Context::note(context) })
    }

    fn take(&mut self, at: u32) -> Option<N> {
        let done = self.in_flight.get_mut(at as usize)?.take()?;
        self.free.push(at);
        Some(done.note)
    }

    fn complete(&mut self, completion: Completion, events: &mut Vec<Event<N>>) {
        let own = bindings::FI_WRITE | bindings::FI_READ | bindings::FI_SEND;
        let landed = completion.flags & bindings::FI_REMOTE_CQ_DATA != 0 && completion.flags & own == 0;
        // A peer's write completes with a receive's context, or an undefined one.
        let index = if landed && !self.writes_take_receives { None } else { self.index(completion.context) };
        let receive = index.filter(|at| *at as usize >= self.in_flight.len());
        if landed {
            events.push(Event::Landed(completion.data as u32));
        } else if let Some(at) = receive {
            events.push(self.record(at, completion.len));
        } else if let Some(note) = index.and_then(|at| self.take(at)) {
            self.counts.completions.add(1);
            events.push(Event::Done(note));
        }
        self.unposted.extend(receive);
    }

    fn record(&self, at: u32, len: usize) -> Event<N> {
        // SAFETY: the slot lies in `slots`, and its receive has completed.
        let bytes = unsafe { self.slot(at).cast::<[u8; SLOT]>().read_volatile() };
        match bytes.get(..len).map(Record::read_from_bytes) {
            Some(Ok(record)) => Event::Record(record),
            _ => Event::Refused(format!("a message of {len} bytes")),
        }
    }

    fn fail(&mut self, failure: CompletionError, events: &mut Vec<Event<N>>) {
        let Some(at) = self.index(failure.context) else { return };
        if at as usize >= self.in_flight.len() {
            // The endpoint has failed: its receives are cancelled, and its operations say why.
            if failure.code == bindings::FI_ECANCELED {
                return;
            }
            self.unposted.push(at);
            events.push(Event::Refused(format!("a receive that failed: {}", failure.text)));
        } else if let Some(note) = self.take(at) {
            self.counts.errors.add(1);
            let reason = format!("{} (provider code {})", failure.text, failure.provider_code);
            events.push(Event::Failed(note, failure.code, reason));
        }
    }

    /// Drops the operations that were never posted, and releases what the in-flight ones hold.
    pub fn retire(&mut self) {
        self.queue.clear();
        self.in_flight.iter_mut().for_each(|operation| *operation = None);
    }
}

/// Tells the fabric `efa` not to call the CUDA driver. On the first transfer of a region of GPU memory it would otherwise set
/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, which drivers refuse for memory from cuMemCreate, as NCCL's windows are, and fail the transfer. A
/// libfabric without CUDA refuses the option, and makes no such call.
fn keep_cuda_out(endpoint: &mut Endpoint, info: &ferrogin_libfabric::Info, device: &dyn Device) {
    if info.fabric_name() == "efa"
        && device.kind() == DeviceKind::Cuda
        && let Err(error) = endpoint.set_option(bindings::FI_OPT_CUDA_API_PERMITTED, false)
    {
        crate::trace!("libfabric refuses FI_OPT_CUDA_API_PERMITTED: {error}");
    }
}

/// Returns the flags with which a write's completion means that its bytes have landed. EFA needs none.
fn completion_level(info: &ferrogin_libfabric::Info) -> u64 {
    if info.fabric_name() == crate::cards::FABRIC { 0 } else { bindings::FI_DELIVERY_COMPLETE }
}

/// Returns false for "try again".
fn accepted(library: &Libfabric, call: &'static str, code: isize) -> Result<bool, Error> {
    match -code {
        0 => Ok(true),
        again if again == bindings::FI_EAGAIN as isize => Ok(false),
        _ => Err(Error::Fabric { what: "an RMA operation".to_owned(), source: library.failure(call, code as i32) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refusal_for_now_is_tried_again() {
        let library = Libfabric::load(None).expect("libfabric");
        let accepted = |code: i32| accepted(&library, "fi_send", -(code as isize));
        assert!(matches!(accepted(0), Ok(true)) && matches!(accepted(bindings::FI_EAGAIN), Ok(false)));
        assert!(accepted(bindings::FI_EINVAL).is_err());
    }
}
