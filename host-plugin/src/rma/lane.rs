//! A lane: a context handle's endpoint on one rail, its operations in flight, its receives, and a queue of operations
//! waiting for room.
#![allow(unsafe_code)]

use super::memory::Memory;
use super::ranks::Ranks;
use super::record::Record;
use super::requests::Request;
use super::stream::StreamId;
use crate::device::{Device, DeviceBuffer, DeviceKind, Use};
use crate::error::{DataResult, Error};
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
use zerocopy::FromBytes;

type Rma = unsafe extern "C" fn(*mut fid_ep, *const fi_msg_rma, u64) -> isize;
type Send = unsafe extern "C" fn(*mut fid_ep, *const fi_msg, u64) -> isize;
type Recv = unsafe extern "C" fn(*mut fid_ep, *mut c_void, usize, *mut c_void, u64, *mut c_void) -> isize;

/// An endpoint's address, padded with zeros.
pub type Address = [u8; bindings::FI_NAME_MAX as usize];

/// Maximum operations in flight.
const DEPTH: usize = 512;
/// Maximum receives. A signal takes one, or two on cards where writes with immediate data take one as well.
const RECEIVES: usize = 512;
/// Size of a record's slot in bytes.
pub const SLOT: usize = 64;
/// Completions read from the queue at once.
pub const BATCH: usize = 32;
/// Operations that may be written to a queue before its doorbell is rung.
const DOORBELL_BATCH: usize = 16;

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A write to the peer's memory.
    Write,
    /// A write with immediate data.
    WriteData(u32),
    /// A read of the peer's memory.
    Read,
    /// A message.
    Message,
    /// A message that completes once it has arrived, and with it, if the rail keeps order, whatever was posted to the
    /// peer before.
    ConfirmedMessage,
}

impl Access {
    /// Returns the name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "put",
            Self::WriteData(_) => "put with a signal",
            Self::Read => "get",
            Self::Message | Self::ConfirmedMessage => "signal",
        }
    }
}

/// What an operation belongs to.
#[derive(Clone, Copy)]
pub enum Note {
    /// A part of a request. `put` is the group in the stream of a put without a number.
    Part { request: Request, stream: StreamId, put: Option<u32> },
    /// Nobody waits for it: an acknowledgement, or an operation of a request that has failed.
    Unawaited,
    /// A message to this peer that nothing is under way to it.
    Departure(usize),
    /// One of the engine's `writes`.
    Word(usize),
}

/// An operation.
#[derive(Clone, Copy)]
pub struct Post {
    pub access: Access,
    pub peer: usize,
    pub len: usize,
    /// The address and key of the peer's memory; unused by messages.
    pub remote: (u64, u64),
    pub note: Note,
    /// Another operation follows right away.
    pub more_follows: bool,
}

/// This rank's bytes.
#[derive(Clone, Copy)]
pub enum Local<'a> {
    /// At an offset in memory, which stays registered until the operation completes.
    Memory(&'a Arc<Memory>, u64),
    /// These, which the operation copies.
    Bytes(&'a [u8; SLOT]),
}

/// What a lane reports.
#[derive(Clone, Copy)]
pub enum Event {
    /// An operation has completed: its source may be reused, and, unless the rail keeps order, its bytes have landed.
    Done(Note),
    /// A peer's write with this immediate data has landed.
    Landed(u32),
    /// A peer's message, which [`Lane::message`] returns.
    Message { slot: usize, len: usize },
}

/// What a lane reports last.
pub enum Failure {
    /// An operation's.
    Operation(Access, Note, CompletionError),
    /// A receive's.
    Receive(CompletionError),
}

/// An operation that waits for room, with the memory or the bytes of its [`Local`].
struct Queued {
    post: Post,
    memory: Option<(Arc<Memory>, u64)>,
    bytes: [u8; SLOT],
}

/// An operation in flight, in the slot with its number.
#[derive(Clone)]
struct Operation {
    /// The context's pointer for libfabric.
    context: *mut c_void,
    access: Access,
    /// `None` while the place is free.
    note: Option<Note>,
    /// The memory that has its bytes, which its owner holds until it calls [`Lane::keep`]; or null.
    memory: *const Memory,
    kept: Option<Arc<Memory>>,
    /// The next free place.
    next: usize,
}

/// The endpoint; see the [module](self).
pub struct Lane {
    // Dropped first: once it's closed, no operation uses the fields that follow.
    endpoint: Endpoint,
    cq: Arc<CompletionQueue>,
    /// Completions, and the failure behind them.
    batch: [Completion; BATCH],
    failure: Option<CompletionError>,
    write: Rma,
    read: Rma,
    send: Send,
    recv: Recv,
    rail: usize,
    // Dropped after the endpoint, when no operation to a peer is outstanding.
    peers: Peers,
    operations: Box<[Operation]>,
    /// The first free place; the number of operations if none is free.
    free: usize,
    /// The number of free places.
    room: usize,
    /// Operations that libfabric hasn't accepted yet, in order.
    queue: VecDeque<Queued>,
    /// The slots of receives that libfabric hasn't accepted yet.
    unposted: Vec<usize>,
    rank: usize,
    /// The flags with which a write's or message's completion means that its bytes have landed.
    level: u64,
    /// Those of a write to another rank.
    write_level: u64,
    /// Whether peers' writes with immediate data take receives.
    writes_take_receives: bool,
    /// For FERROGIN_METRICS.
    pub counts: Arc<RmaCounts>,
    region: MemoryRegion,
    /// By slot.
    contexts: Box<[Context<usize>]>,
    /// A slot for each operation in flight, and behind them one for each receive.
    base: *mut u8,
    _slots: Box<dyn DeviceBuffer>,
}

// SAFETY: the function pointers point to provider code, which any thread may call; `&mut self` keeps other uses in one
// thread.
unsafe impl std::marker::Send for Lane {}

impl Lane {
    /// Opens and enables an endpoint on rail `index`, and posts its receives. If the rail keeps operations in order, a
    /// write to a peer completes once its source may be reused.
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
        // In an address vector shared with the lanes of earlier contexts, the tcp of libfabric 2.5 takes a peer's new
        // endpoint for its old one, and closes the connection: docs/found-elsewhere.md.
        let av = AddressVector::open(&rail.domain, ranks.nranks).map_err(failed("opening the address vector"))?;
        endpoint.bind_av(&av).map_err(failed("binding the address vector"))?;
        let both = bindings::FI_TRANSMIT | bindings::FI_RECV;
        endpoint.bind_cq(&cq, both).map_err(failed("binding the completion queue"))?;
        endpoint.enable().map_err(failed("enabling the endpoint"))?;
        let calls = || {
            let object = endpoint.object();
            let write = entry!(object, rma: fi_ops_rma, writemsg, "fi_writemsg")?;
            let read = entry!(object, rma: fi_ops_rma, readmsg, "fi_readmsg")?;
            let send = entry!(object, msg: fi_ops_msg, sendmsg, "fi_sendmsg")?;
            let recv = entry!(object, msg: fi_ops_msg, recv, "fi_recv")?;
            Ok((write, read, send, recv))
        };
        let (write, read, send, recv) = calls().map_err(failed("preparing the endpoint"))?;
        let slots = ranks.device.allocate((depth + receives) * SLOT, Use::Shared)?;
        let (memory, kind) = region_of(&*slots, 0, slots.len());
        let access = bindings::FI_SEND | bindings::FI_RECV | bindings::FI_WRITE;
        // SAFETY: the lane drops the region before the memory, and holds no reference into it.
        let region = unsafe { rail.register(memory, kind, access, "registering messages of an RMA context") }?;
        let level = completion_level(&info);
        let contexts: Box<[Context<usize>]> = (0..depth + receives).map(Context::new).collect();
        let free = |(next, context): (usize, &Context<usize>)| {
            let context = context.as_ptr();
            Operation { context, access: Access::Write, note: None, memory: ptr::null(), kept: None, next }
        };
        let mut this = Self {
            endpoint,
            cq,
            batch: [Completion::EMPTY; BATCH],
            failure: None,
            write,
            read,
            send,
            recv,
            rail: index,
            peers: Peers::new(&av),
            operations: (1..=depth).zip(&contexts).map(free).collect(),
            free: 0,
            room: depth,
            queue: VecDeque::new(),
            unposted: (depth..depth + receives).rev().collect(),
            rank: ranks.rank,
            level,
            write_level: if ranks.keep_order() { 0 } else { level },
            writes_take_receives: (info.mode() | info.rx_mode()) & bindings::FI_RX_CQ_DATA != 0,
            counts: Arc::default(),
            region,
            contexts,
            base: slots.host_address().unwrap_or(ptr::null_mut()),
            _slots: slots,
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

    /// Posts an operation, unless another one follows right away. What libfabric has no room for waits. The caller
    /// holds the memory until the operation completes or it calls [`keep`](Self::keep).
    ///
    /// # Errors
    /// libfabric refuses an operation.
    #[inline(always)]
    pub fn post(&mut self, post: Post, local: Local<'_>) -> DataResult<()> {
        if !post.more_follows && self.queue.is_empty() && self.start(post, local, 0)? {
            return Ok(());
        }
        let (memory, bytes) = match local {
            Local::Memory(memory, offset) => (Some((memory.clone(), offset)), [0; SLOT]),
            Local::Bytes(bytes) => (None, *bytes),
        };
        self.enqueue(Queued { post, memory, bytes })
    }

    #[inline(never)]
    fn enqueue(&mut self, queued: Queued) -> DataResult<()> {
        let more_follows = queued.post.more_follows;
        self.queue.push_back(queued);
        if more_follows && self.queue.len() < DOORBELL_BATCH { Ok(()) } else { self.flush() }
    }

    /// Posts as many queued operations as there is room for.
    ///
    /// # Errors
    /// libfabric refuses an operation.
    pub fn flush(&mut self) -> DataResult<()> {
        while let batch @ 1.. = self.queue.len().min(self.room).min(DOORBELL_BATCH) {
            for left in (0..batch).rev() {
                let Some(queued) = self.queue.pop_front() else { break };
                let local = match &queued.memory {
                    Some((memory, offset)) => Local::Memory(memory, *offset),
                    None => Local::Bytes(&queued.bytes),
                };
                let at = self.free;
                if !self.start(queued.post, local, if left > 0 { bindings::FI_MORE } else { 0 })? {
                    self.queue.push_front(queued);
                    return Ok(());
                }
                // This may be the last reference: deregMrSym may have come while the operation was queued.
                self.operations[at].kept = queued.memory.map(|(memory, _)| memory);
            }
        }
        Ok(())
    }

    /// Hands an operation to libfabric; returns false if there is no room. With `more`, which is `FI_MORE` or 0, the
    /// doorbell may wait for the next operation.
    #[inline(always)]
    fn start(&mut self, post: Post, local: Local<'_>, more: u64) -> DataResult<bool> {
        let at = self.free;
        let Some(operation) = self.operations.get_mut(at) else { return Ok(false) };
        let Post { access, peer, len, remote: (remote, key), note, .. } = post;
        let (mut descriptor, iov_base) = match local {
            Local::Memory(memory, offset) => memory.local(self.rail, offset),
            Local::Bytes(bytes) => {
                let slot = self.base.wrapping_add(at * SLOT);
                // SAFETY: the slot lies in `_slots`, and its operation isn't in flight, so the card isn't reading it.
                unsafe { slot.cast::<[u8; SLOT]>().write_volatile(*bytes) };
                (self.region.descriptor(), slot.cast())
            }
        };
        let (iov, remote) = (iovec { iov_base, iov_len: len }, fi_rma_iov { addr: remote, len, key });
        let (msg_iov, desc, iov_count, rma_iov) = (&raw const iov, &raw mut descriptor, 1, &raw const remote);
        let (endpoint, context) = (self.endpoint.as_ptr(), operation.context);
        let addr = self.peers.numbers()[peer].0;
        // NCCL puts to its own rank to make sure that what came before has landed.
        let level = if peer == self.rank { self.level } else { self.write_level };
        let (call, flags, data) = match access {
            Access::Write => ("fi_writemsg", level, 0),
            Access::WriteData(data) => ("fi_writemsg", level | bindings::FI_REMOTE_CQ_DATA, u64::from(data)),
            Access::Read => ("fi_readmsg", 0, 0),
            Access::Message => ("fi_sendmsg", 0, 0),
            Access::ConfirmedMessage => ("fi_sendmsg", self.level, 0),
        };
        let flags = flags | bindings::FI_COMPLETION;
        let is_message = matches!(access, Access::Message | Access::ConfirmedMessage);
        let code = if is_message {
            let message = fi_msg { msg_iov, desc, iov_count, addr, context, data };
            // SAFETY: the endpoint is open, and the message and its vectors outlive the call. The slot is registered
            // and stays until the endpoint is closed, and no other operation uses the slot or the context.
            unsafe { (self.send)(endpoint, &message, flags) }
        } else {
            let function = if access == Access::Read { self.read } else { self.write };
            let message = fi_msg_rma { msg_iov, desc, iov_count, addr, rma_iov, rma_iov_count: 1, context, data };
            // SAFETY: the endpoint is open, and the message and its vectors outlive the call. The caller of `post` or,
            // after `keep`, the operation keeps the memory registered until the operation has completed. No other
            // operation uses the slot or the context.
            unsafe { function(endpoint, &message, flags | more) }
        };
        if code != 0 {
            return accepted(self.endpoint.domain().library(), call, code);
        }
        (operation.access, operation.note) = (access, Some(note));
        operation.memory = match local {
            Local::Memory(memory, _) => Arc::as_ptr(memory),
            Local::Bytes(_) => ptr::null(),
        };
        self.free = operation.next;
        self.room -= 1;
        self.counts.posts.add(1);
        self.counts.bytes.add(if is_message { 0 } else { len as u64 });
        Ok(true)
    }

    fn slot(&self, at: usize) -> *mut u8 {
        self.base.wrapping_add(at * SLOT)
    }

    fn post_receives(&mut self) -> DataResult<()> {
        while let Some(&at) = self.unposted.last() {
            let (slot, context) = (self.slot(at).cast(), self.contexts[at].as_ptr());
            let (endpoint, descriptor) = (self.endpoint.as_ptr(), self.region.descriptor());
            let any = bindings::FI_ADDR_UNSPEC;
            // SAFETY: the endpoint is open. The slot is registered and stays until the endpoint is closed, and no other
            // operation uses the slot or the context.
            let code = unsafe { (self.recv)(endpoint, slot, SLOT, descriptor, any, context) };
            if code != 0 && !accepted(self.endpoint.domain().library(), "fi_recv", code)? {
                break;
            }
            self.unposted.pop();
        }
        Ok(())
    }

    /// Reads completions for [`event`](Self::event) or a failure for [`failure`](Self::failure), and drives the
    /// provider's progress.
    ///
    /// # Errors
    /// The completion queue fails.
    pub fn read(&mut self) -> DataResult<Read> {
        let fail = || Error::fabric("reading the completions of an RMA context");
        let read = self.cq.read(&mut self.batch).map_err(fail())?;
        if read == Read::Failure {
            self.failure = self.cq.read_error().map_err(fail())?;
        }
        Ok(read)
    }

    /// Returns what a completion reports, if anything.
    #[inline(always)]
    pub fn event(&mut self, at: usize) -> Option<Event> {
        let Completion { context, flags, len, data, .. } = self.batch[at];
        let (slot, own) = (|| slot_of(context), bindings::FI_WRITE | bindings::FI_READ | bindings::FI_SEND);
        if flags & bindings::FI_REMOTE_CQ_DATA != 0 && flags & own == 0 {
            // A peer's write completes with a receive's context, or an undefined one.
            let receive = if self.writes_take_receives { slot() } else { None };
            self.unposted.extend(receive.filter(|slot| *slot >= self.operations.len()));
            return Some(Event::Landed(data as u32));
        }
        let slot = slot()?;
        if slot >= self.operations.len() {
            self.unposted.push(slot);
            return Some(Event::Message { slot, len });
        }
        let note = self.take(slot)?;
        self.counts.completions.add(1);
        Some(Event::Done(note))
    }

    /// Posts what is waiting.
    ///
    /// # Errors
    /// libfabric refuses an operation.
    pub fn refill(&mut self) -> DataResult<()> {
        if !self.unposted.is_empty() {
            self.post_receives()?;
        }
        self.flush()
    }

    /// Frees a completed operation's place.
    #[inline(always)]
    fn take(&mut self, at: usize) -> Option<Note> {
        let operation = self.operations.get_mut(at)?;
        operation.note.as_ref()?;
        operation.kept = None;
        let note = operation.note?;
        operation.note = None;
        operation.next = std::mem::replace(&mut self.free, at);
        self.room += 1;
        Some(note)
    }

    /// Keeps memory registered until the operations in flight that use it have completed.
    pub fn keep(&mut self, memory: &Arc<Memory>) {
        for operation in self.operations.iter_mut().filter(|operation| operation.memory == Arc::as_ptr(memory)) {
            operation.kept = operation.note.map(|_| memory.clone());
        }
    }

    /// Returns the message in a slot, until [`refill`](Self::refill); `None` if it isn't a record.
    pub fn message(&self, slot: usize, len: usize) -> Option<Record> {
        // SAFETY: the slot lies in `_slots`, and its receive has completed.
        let bytes = unsafe { self.slot(slot).cast::<[u8; SLOT]>().read_volatile() };
        Record::read_from_bytes(bytes.get(..len)?).ok()
    }

    /// Returns the failure that [`read`](Self::read) found, if any.
    pub fn failure(&mut self) -> Option<Failure> {
        let failure = self.failure.take()?;
        let slot = slot_of(failure.context)?;
        if let Some(access) = self.operations.get(slot).map(|operation| operation.access) {
            let note = self.take(slot)?;
            self.counts.errors.add(1);
            return Some(Failure::Operation(access, note, failure));
        }
        // Once the endpoint has failed, its receives are cancelled, and its operations say why.
        (failure.code != bindings::FI_ECANCELED).then(|| {
            self.unposted.push(slot);
            Failure::Receive(failure)
        })
    }

    /// Ends the operations to a lost rank, and calls `failed` with the requests that they belong to. Those in flight
    /// complete later, if at all.
    pub fn lose(&mut self, lost: usize, mut failed: impl FnMut(Request)) {
        let of_request = |note: &Note| match *note {
            Note::Part { request, stream, .. } if stream.peer == lost => Some(request),
            _ => None,
        };
        for note in self.operations.iter_mut().filter_map(|operation| operation.note.as_mut()) {
            if let Some(request) = of_request(note) {
                failed(request);
                *note = Note::Unawaited;
            }
        }
        self.queue.retain(|queued| {
            of_request(&queued.post.note).into_iter().for_each(&mut failed);
            queued.post.peer != lost
        });
    }

    /// Returns whether there is no room for another operation.
    pub fn is_full(&self) -> bool {
        self.room == 0
    }

    /// Drops the operations that were never posted, and releases what those in flight hold.
    pub fn retire(&mut self) {
        self.queue.clear();
        for operation in &mut self.operations {
            (operation.kept, operation.note) = (None, None);
        }
    }
}

/// Returns the slot of an operation's or receive's context; `None` for completions without one.
fn slot_of(context: *mut c_void) -> Option<usize> {
    // SAFETY: the provider's context is null or that of one of this lane's operations or receives, and those live until
    // the endpoint is closed.
    (!context.is_null()).then(|| unsafe { Context::note(context) })
}

/// Tells the fabric `efa` not to call the CUDA driver. On the first transfer of a region of GPU memory it would
/// otherwise set `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, which drivers refuse for memory from cuMemCreate, as NCCL's
/// windows are, and fail the transfer. A libfabric without CUDA refuses the option, and makes no such call.
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
fn accepted(library: &Libfabric, call: &'static str, code: isize) -> DataResult<bool> {
    match -code {
        0 => Ok(true),
        again if again == bindings::FI_EAGAIN as isize => Ok(false),
        _ => {
            let (what, source) = ("an RMA operation".to_owned(), library.failure(call, code as i32));
            Err(Error::Fabric { what, source }.into())
        }
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
