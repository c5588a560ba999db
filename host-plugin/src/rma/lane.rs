//! A lane: a context handle's endpoint on one rail, its operations in flight, its receives, and a queue of operations
//! waiting for room.
#![allow(unsafe_code)]

use super::memory::Memory;
use super::ranks::Ranks;
use super::record::Record;
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
use std::ops::Range;
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
const SLOT: usize = 64;
/// Completions read from the queue at once.
const BATCH: usize = 32;
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

/// An operation. `N` is what its owner notes about it.
#[derive(Clone, Copy)]
pub struct Post<N> {
    pub access: Access,
    pub peer: usize,
    pub len: usize,
    /// The address and key of the peer's memory; unused by messages.
    pub remote: (u64, u64),
    pub note: N,
    /// Another operation follows right away.
    pub more_follows: bool,
}

/// What a lane reports.
pub enum Event<N> {
    /// An operation has completed: its source may be reused, and, unless the rail keeps order, its bytes have landed.
    Done(N),
    /// An operation has failed.
    Failed(Box<(Post<N>, CompletionError)>),
    /// A peer's write with this immediate data has landed.
    Landed(u32),
    /// A peer's message, which [`Lane::message`] returns.
    Message { slot: u32, len: usize },
    /// A receive that failed.
    Refused(String),
}

/// What a context belongs to.
#[derive(Debug, Clone, Copy)]
enum Owner {
    Operation(usize),
    Receive(u32),
}

/// A place for an operation, from its post to its completion.
struct Operation<N> {
    context: Box<Context<Owner>>,
    /// `None` while the place is free.
    post: Option<Post<N>>,
    /// Where its bytes are; if it's `None`, they are in `bytes` and, while libfabric has the operation, in a slot.
    memory: Option<(Arc<Memory>, u64)>,
    bytes: [u8; SLOT],
    slot: u32,
}

/// The endpoint; see the [module](self).
pub struct Lane<N> {
    // Dropped first: once it's closed, no operation uses the fields that follow.
    endpoint: Endpoint,
    cq: Arc<CompletionQueue>,
    /// Completions, those of them that [`next`](Self::next) hasn't returned, and the failure behind them.
    batch: [Completion; BATCH],
    unread: Range<usize>,
    failure: Option<CompletionError>,
    write: Rma,
    read: Rma,
    send: Send,
    recv: Recv,
    rail: usize,
    // Dropped after the endpoint, when no operation to a peer is outstanding.
    peers: Peers,
    operations: Vec<Operation<N>>,
    /// Places in `operations` that nothing uses.
    free: Vec<usize>,
    /// Operations that libfabric hasn't accepted yet, in order.
    queue: VecDeque<usize>,
    /// How many more operations may be in flight.
    room: usize,
    receives: Box<[Context<Owner>]>,
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
    /// A slot for each receive, and those for the bytes of operations in flight.
    slots: Box<dyn DeviceBuffer>,
    free_slots: Vec<u32>,
}

// SAFETY: the function pointers point to provider code, which any thread may call; `&mut self` keeps other uses in one
// thread.
unsafe impl<N: std::marker::Send> std::marker::Send for Lane<N> {}

impl<N: Copy> Lane<N> {
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
        let mut this = Self {
            endpoint,
            cq,
            batch: [Completion::EMPTY; BATCH],
            unread: 0..0,
            failure: None,
            write,
            read,
            send,
            recv,
            rail: index,
            peers: Peers::new(&av),
            operations: Vec::new(),
            free: Vec::new(),
            queue: VecDeque::new(),
            room: depth,
            receives: (0..receives as u32).map(|at| Context::new(Owner::Receive(at))).collect(),
            unposted: (0..receives as u32).rev().collect(),
            rank: ranks.rank,
            keeps_order: ranks.keep_order(),
            level: completion_level(&info),
            writes_take_receives: (info.mode() | info.rx_mode()) & bindings::FI_RX_CQ_DATA != 0,
            counts: Arc::default(),
            region,
            slots,
            free_slots: (receives as u32..(receives + depth) as u32).collect(),
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

    /// Posts an operation, unless another one follows right away. What libfabric has no room for waits. This rank's
    /// bytes are in memory at an offset; it stays registered until the operation completes.
    ///
    /// # Errors
    /// libfabric refuses an operation.
    #[inline(always)]
    pub fn post(&mut self, post: Post<N>, memory: &Arc<Memory>, offset: u64) -> DataResult<()> {
        let at = self.place(post);
        self.operations[at].memory = Some((memory.clone(), offset));
        self.submit(at, post)
    }

    /// Posts an operation in the same way with these bytes, which fit into a slot.
    ///
    /// # Errors
    /// libfabric refuses an operation.
    pub fn post_bytes(&mut self, post: Post<N>, bytes: &[u8]) -> DataResult<()> {
        let at = self.place(post);
        self.operations[at].bytes[..bytes.len()].copy_from_slice(bytes);
        self.submit(at, post)
    }

    #[inline(always)]
    fn place(&mut self, post: Post<N>) -> usize {
        let at = self.free.pop().unwrap_or_else(
            #[cold]
            || {
                let context = Box::new(Context::new(Owner::Operation(self.operations.len())));
                self.operations.push(Operation { context, post: None, memory: None, bytes: [0; SLOT], slot: 0 });
                self.operations.len() - 1
            },
        );
        self.operations[at].post = Some(post);
        at
    }

    #[inline(always)]
    fn submit(&mut self, at: usize, post: Post<N>) -> DataResult<()> {
        if !post.more_follows && self.queue.is_empty() && self.start(at, post, 0)? {
            return Ok(());
        }
        self.queue.push_back(at);
        if post.more_follows && self.queue.len() < DOORBELL_BATCH { Ok(()) } else { self.flush() }
    }

    /// Posts as many queued operations as there is room for.
    ///
    /// # Errors
    /// libfabric refuses an operation.
    pub fn flush(&mut self) -> DataResult<()> {
        while let batch @ 1.. = self.queue.len().min(self.room).min(DOORBELL_BATCH) {
            for left in (0..batch).rev() {
                let more = if left > 0 { bindings::FI_MORE } else { 0 };
                match self.queue.front().and_then(|at| Some((*at, self.operations[*at].post?))) {
                    Some((at, post)) if self.start(at, post, more)? => self.queue.pop_front(),
                    _ => return Ok(()),
                };
            }
        }
        Ok(())
    }

    /// Hands an operation to libfabric; returns false if there is no room. With `more`, which is `FI_MORE` or 0, the
    /// doorbell may wait for the next operation.
    #[inline(always)]
    fn start(&mut self, at: usize, post: Post<N>, more: u64) -> DataResult<bool> {
        if self.room == 0 {
            return Ok(false);
        }
        let Post { access, peer, len, remote: (remote, key), .. } = post;
        let operation = &mut self.operations[at];
        let (mut descriptor, iov_base) = match &operation.memory {
            Some((memory, offset)) => memory.local(self.rail, *offset),
            None => {
                let Some(&slot) = self.free_slots.last() else { return Ok(false) };
                let bytes = slot_at(&*self.slots, slot);
                // SAFETY: the slot lies in `slots`, and no operation in flight has it, so the card isn't reading it
                // now.
                unsafe { bytes.cast::<[u8; SLOT]>().write_volatile(operation.bytes) };
                operation.slot = slot;
                (self.region.descriptor(), bytes.cast())
            }
        };
        let (iov, remote) = (iovec { iov_base, iov_len: len }, fi_rma_iov { addr: remote, len, key });
        let (msg_iov, desc, iov_count, rma_iov) = (&raw const iov, &raw mut descriptor, 1, &raw const remote);
        let (endpoint, context) = (self.endpoint.as_ptr(), operation.context.as_ptr());
        let addr = self.peers.numbers()[peer].0;
        // NCCL puts to its own rank to make sure that what came before has landed.
        let level = if self.keeps_order && peer != self.rank { 0 } else { self.level };
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
            // SAFETY: the endpoint is open, and the message and its vectors outlive the call. `operation` keeps the
            // memory registered until it has completed, and no other operation uses the context.
            unsafe { function(endpoint, &message, flags | more) }
        };
        if code != 0 {
            return accepted(self.endpoint.domain().library(), call, code);
        }
        if operation.memory.is_none() {
            self.free_slots.pop();
        }
        self.room -= 1;
        self.counts.posts.add(1);
        self.counts.bytes.add(if is_message { 0 } else { len as u64 });
        Ok(true)
    }

    fn post_receives(&mut self) -> DataResult<()> {
        while let Some(&at) = self.unposted.last() {
            let (slot, context) = (slot_at(&*self.slots, at).cast(), self.receives[at as usize].as_ptr());
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

    /// Reads completions, for [`next`](Self::next), and drives the provider's progress. Returns true if there may be
    /// more.
    ///
    /// # Errors
    /// The completion queue fails.
    pub fn read(&mut self) -> DataResult<bool> {
        let fail = || Error::fabric("reading the completions of an RMA context");
        Ok(match self.cq.read(&mut self.batch).map_err(fail())? {
            Read::Entries(count) => {
                self.unread = 0..count;
                // The next call to rmaProgress handles what has arrived meanwhile.
                count == BATCH
            }
            Read::Failure => {
                self.failure = self.cq.read_error().map_err(fail())?;
                true
            }
        })
    }

    /// Returns what the next completion reports.
    #[inline(always)]
    pub fn next(&mut self) -> Option<Event<N>> {
        while let Some(completion) = self.unread.next().and_then(|at| self.batch.get(at)) {
            let Completion { context, flags, len, data, .. } = *completion;
            let own = bindings::FI_WRITE | bindings::FI_READ | bindings::FI_SEND;
            let landed = flags & bindings::FI_REMOTE_CQ_DATA != 0 && flags & own == 0;
            // A peer's write completes with a receive's context, or an undefined one.
            let owner = if landed && !self.writes_take_receives { None } else { owner(context) };
            if let Some(Owner::Receive(at)) = owner {
                self.unposted.push(at);
            }
            match owner {
                _ if landed => return Some(Event::Landed(data as u32)),
                Some(Owner::Receive(slot)) => return Some(Event::Message { slot, len }),
                Some(Owner::Operation(at)) => {
                    if let Some(note) = self.take(at) {
                        self.counts.completions.add(1);
                        return Some(Event::Done(note));
                    }
                }
                None => {}
            }
        }
        self.failure.take().and_then(|failure| self.fail(failure))
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
    fn take(&mut self, at: usize) -> Option<N> {
        let operation = self.operations.get_mut(at)?;
        let note = operation.post.as_ref()?.note;
        operation.post = None;
        if operation.memory.take().is_none() {
            self.free_slots.push(operation.slot);
        }
        self.free.push(at);
        self.room += 1;
        Some(note)
    }

    /// Returns the message in a slot, until [`refill`](Self::refill); `None` if it isn't a record.
    pub fn message(&self, slot: u32, len: usize) -> Option<Record> {
        // SAFETY: the slot lies in `slots`, and its receive has completed.
        let bytes = unsafe { slot_at(&*self.slots, slot).cast::<[u8; SLOT]>().read_volatile() };
        Record::read_from_bytes(bytes.get(..len)?).ok()
    }

    #[cold]
    fn fail(&mut self, failure: CompletionError) -> Option<Event<N>> {
        match owner(failure.context)? {
            // The endpoint has failed: its receives are cancelled, and its operations say why.
            Owner::Receive(_) if failure.code == bindings::FI_ECANCELED => None,
            Owner::Receive(at) => {
                self.unposted.push(at);
                Some(Event::Refused(format!("a receive that failed: {}", failure.text)))
            }
            Owner::Operation(at) => {
                let post = self.operations.get(at)?.post?;
                self.take(at)?;
                self.counts.errors.add(1);
                Some(Event::Failed(Box::new((post, failure))))
            }
        }
    }

    /// Drops the operations that were never posted, and releases what those in flight hold.
    pub fn retire(&mut self) {
        self.queue.clear();
        for operation in &mut self.operations {
            (operation.memory, operation.post) = (None, None);
        }
    }
}

/// Returns what an operation's or receive's context belongs to; `None` for completions without one.
fn owner(context: *mut c_void) -> Option<Owner> {
    // SAFETY: the provider's context is null or that of one of this lane's operations or receives, and those live until
    // the endpoint is closed.
    (!context.is_null()).then(|| unsafe { Context::note(context) })
}

fn slot_at(slots: &dyn DeviceBuffer, at: u32) -> *mut u8 {
    slots.host_address().map_or(ptr::null_mut(), |base| base.wrapping_add(at as usize * SLOT))
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
