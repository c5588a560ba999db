//! The sending half of a message endpoint: slots, and the backlog of messages that libfabric has not taken.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::mem::take;
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use super::long::{Long, LongReceived};
use super::peer::{PeerState, State};
use super::pool::{Context, Operation, Pool};
use super::wire::{FLAG_SETS, Kind, PREFIX, emit};
use crate::config::{Config, NAME_MAX};
use crate::event::{Event, LostReason, Peer, SendError};
use ferrogin_libfabric::bindings::{self, iovec};
use ferrogin_libfabric::{AddressVector, Endpoint, Error, entry};

type SendV = unsafe extern "C" fn(
    *mut bindings::fid_ep,
    *const iovec,
    *mut *mut std::ffi::c_void,
    usize,
    bindings::fi_addr_t,
    *mut std::ffi::c_void,
) -> isize;

/// One message in flight or in the backlog.
#[derive(Clone, Copy)]
struct Slot {
    peer: u32,
    /// Bytes in the slot's own buffer: prefix, name, header, and the payload if it was copied.
    buffered: usize,
    /// A borrowed payload.
    borrowed: (*const u8, usize),
    /// The tag of a long message, which is the payload alone; None for a datagram.
    tag: Option<u64>,
    token: Option<u64>,
}

/// The sending half of a [`super::MessageEndpoint`], with which a callback of its poll can answer at once.
pub struct Outbox {
    // First, so that it is closed before the buffers go.
    pub(super) endpoint: Endpoint,
    sendv: SendV,
    pub(super) av: Arc<AddressVector>,
    /// The provider sends two-part messages; otherwise borrowed payloads are copied.
    gather: bool,
    pub(super) name: Box<[u8]>,
    /// Distinguishes this endpoint from earlier and later ones with its name.
    pub(super) number: u64,
    slots: Box<[Slot]>,
    contexts: Box<[Context]>,
    buffers: Pool,
    /// The control message of each combination of flags.
    pub(super) control_buffers: Pool,
    free: Vec<u32>,
    /// Peers that have, or had, a backlog.
    pub(super) blocked: Vec<u32>,
    pub(super) peers: Vec<PeerState>,
    pub(super) by_name: HashMap<Box<[u8]>, u32>,
    /// Names and numbers of endpoints that later endpoints replaced.
    pub(super) replaced: HashSet<(Box<[u8]>, u64)>,
    /// Events for the next report.
    pub(super) notices: VecDeque<Event<'static>>,
    /// Long messages, if they were asked for and the provider has them.
    pub(super) long: Option<Long>,
    /// The time of the last run of the timers: messages do not read the clock.
    pub(super) now: Instant,
    pub(super) config: Config,
}

// SAFETY: the raw pointers are to buffers that the sending half owns, or that callers of `send_borrowed` keep valid for any thread; the
// endpoint itself is Send.
unsafe impl Send for Outbox {}

impl Outbox {
    pub(super) fn new(
        endpoint: Endpoint,
        av: Arc<AddressVector>,
        config: &Config,
        iov_limit: usize,
    ) -> Result<Self, Error> {
        let name = endpoint.name()?.into_boxed_slice();
        let number = RandomState::new().build_hasher().finish().max(1);
        let out_of_range = |what: &str| Error::Argument { what: format!("message endpoint: {what}") };
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(out_of_range(&format!(
                "the provider's addresses have {} bytes, not 1 to {NAME_MAX}",
                name.len()
            )));
        }
        let size = message_size(config, name.len())
            .ok_or_else(|| out_of_range("max_header (65535 at most) or max_payload (4 GiB at most) is out of range"))?;
        let count = u32::try_from(config.tx_depth).map_err(|_| out_of_range("tx_depth is out of range"))?;
        let buffers = Pool::new(config.tx_depth, size)?;
        let control_buffers = Pool::new(usize::from(FLAG_SETS), PREFIX + name.len())?;
        for flags in 0..FLAG_SETS {
            // SAFETY: no operation was posted yet.
            let buffer = unsafe { control_buffers.bytes_mut(usize::from(flags)) };
            emit(buffer, Kind::Control(flags), &name, (number, 0), &[], 0);
        }
        let slot = |_| Slot { peer: 0, buffered: 0, borrowed: (ptr::null(), 0), tag: None, token: None };
        let sendv = entry!(endpoint.object(), msg: fi_ops_msg, sendv, "fi_sendv")?;
        Ok(Self {
            sendv,
            av,
            gather: iov_limit >= 2,
            slots: (0..count).map(slot).collect(),
            contexts: (0..count).map(|index| Context::new(Operation::Send(index))).collect(),
            buffers,
            control_buffers,
            free: (0..count).rev().collect(),
            blocked: Vec::new(),
            peers: Vec::new(),
            by_name: HashMap::new(),
            replaced: HashSet::new(),
            notices: VecDeque::with_capacity(config.tx_depth),
            long: None,
            now: Instant::now(),
            config: config.clone(),
            name,
            number,
            endpoint,
        })
    }

    /// The address of this endpoint, which peers give to [`Outbox::add_peer`].
    pub fn address(&self) -> &[u8] {
        &self.name
    }

    /// Messages that may be sent before [`SendError::Full`].
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Sends a copy of header and payload.
    ///
    /// # Errors
    /// See [`SendError`]; the message is then not sent.
    pub fn send(&mut self, peer: Peer, header: &[u8], payload: &[u8]) -> Result<(), SendError> {
        self.send_with(peer, header, payload.len(), |buffer| buffer.copy_from_slice(payload))
    }

    /// Sends a copy of the header, and a payload of `len` bytes that `write` puts into the message.
    ///
    /// # Errors
    /// See [`SendError`]; the message is then not sent.
    pub fn send_with(
        &mut self,
        peer: Peer,
        header: &[u8],
        len: usize,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<(), SendError> {
        let index = self.fill(peer, header, len)?;
        let slot = &mut self.slots[index as usize];
        let at = slot.buffered;
        (slot.buffered, slot.token) = (at + len, None);
        // SAFETY: the slot was free: no operation uses its buffer.
        let buffer = unsafe { self.buffers.bytes_mut(index as usize) };
        write(&mut buffer[at..at + len]);
        self.submit(index);
        Ok(())
    }

    /// Sends a copy of the header, and borrows the payload until a later poll reports [`super::Event::Sent`] or
    /// [`super::Event::SendFailed`] with the token.
    ///
    /// # Errors
    /// See [`SendError`]; the message is then not sent and nothing borrowed.
    ///
    /// # Safety
    /// `payload` is valid for reads of `len` bytes until one of those two events, or until the endpoint is dropped. Bytes that change
    /// meanwhile arrive with their old or new value.
    pub unsafe fn send_borrowed(
        &mut self,
        peer: Peer,
        header: &[u8],
        payload: *const u8,
        len: usize,
        token: u64,
    ) -> Result<(), SendError> {
        let slot = self.fill(peer, header, len)?;
        if self.gather || len == 0 {
            self.slots[slot as usize].borrowed = (payload, len);
        } else {
            let at = self.slots[slot as usize].buffered;
            // SAFETY: `fill` checked that it fits behind the header.
            let buffer = unsafe { self.buffers.buffer(slot as usize).add(at) };
            // SAFETY: the caller keeps the payload readable; the buffer belongs to a slot that is not posted yet.
            unsafe { ptr::copy_nonoverlapping(payload, buffer, len) };
            self.slots[slot as usize].buffered = at + len;
        }
        self.slots[slot as usize].token = Some(token);
        self.submit(slot);
        Ok(())
    }

    /// Sends a long message to a receiver that has posted a receive for `tag`. Borrows the payload as [`Self::send_borrowed`] does.
    ///
    /// # Errors
    /// See [`SendError`]; the message is then not sent and nothing borrowed.
    ///
    /// # Safety
    /// As [`Self::send_borrowed`].
    pub unsafe fn send_long(
        &mut self,
        peer: Peer,
        tag: u64,
        payload: *const u8,
        len: usize,
        token: u64,
    ) -> Result<(), SendError> {
        if self.long.is_none() {
            return Err(SendError::TooLong);
        }
        let index = self.fill(peer, &[], 0)?;
        let slot = &mut self.slots[index as usize];
        (slot.borrowed, slot.tag, slot.token) = ((payload, len), Some(tag), Some(token));
        self.submit(index);
        Ok(())
    }

    /// True when the provider carries long messages.
    pub fn has_long(&self) -> bool {
        self.long.is_some()
    }

    /// Posts a receive for the long message with exactly this tag. False when that is not possible now.
    ///
    /// # Safety
    /// `buffer` is valid for writes of `len` bytes, and unused by others, until the receive has ended ([`Self::take_long`]) or the endpoint
    /// is dropped.
    pub unsafe fn receive_long(&mut self, tag: u64, buffer: *mut u8, len: usize, token: u64) -> bool {
        let Self { long: Some(long), endpoint, .. } = self else { return false };
        // SAFETY: `long` was made from this endpoint; the caller keeps the buffer valid and unused.
        unsafe { long.receive(endpoint, tag, buffer, len, token) }
    }

    /// Cancels a receive for a long message, unless its bytes have begun to arrive.
    pub fn cancel_long(&self, token: u64) {
        if let Some(long) = &self.long {
            long.cancel(&self.endpoint, token);
        }
    }

    /// Takes the receives for long messages that have ended.
    pub fn take_long(&mut self) -> Vec<LongReceived> {
        self.long.as_mut().map_or_else(Vec::new, Long::take)
    }

    /// Takes a slot and writes prefix, name and header of a message with `len` payload bytes.
    fn fill(&mut self, peer: Peer, header: &[u8], len: usize) -> Result<u32, SendError> {
        let state = self.peers.get_mut(peer.index()).ok_or(SendError::Gone)?;
        if state.state != State::Alive {
            return Err(SendError::Gone);
        }
        if header.len() > self.config.max_header || len > self.config.max_payload {
            return Err(SendError::TooLong);
        }
        let index = self.free.pop().ok_or(SendError::Full)?;
        if !state.in_use {
            state.in_use = true;
            state.last_heard = self.now;
        }
        // SAFETY: the slot was free: no operation uses its buffer.
        let buffer = unsafe { self.buffers.bytes_mut(index as usize) };
        let numbers = (self.number, state.number.unwrap_or(0));
        let end = emit(buffer, Kind::Data, &self.name, numbers, header, len);
        let slot = &mut self.slots[index as usize];
        slot.peer = peer.0;
        slot.buffered = end;
        (slot.borrowed, slot.tag) = ((ptr::null(), 0), None);
        Ok(index)
    }

    /// Sends a filled slot, or queues it behind the backlog of its peer.
    fn submit(&mut self, index: u32) {
        let peer = self.slots[index as usize].peer as usize;
        let behind = !self.peers[peer].backlog.is_empty();
        if behind || !self.try_send(index) {
            if !behind {
                self.blocked.push(peer as u32);
            }
            self.peers[peer].backlog.push_back(index);
        }
    }

    /// Offers a slot to libfabric. False when it must be retried; a failure marks the peer as lost and frees the slot.
    fn try_send(&mut self, index: u32) -> bool {
        let Slot { peer, borrowed: (data, len), buffered, tag, .. } = self.slots[index as usize];
        let context = &self.contexts[index as usize];
        let taken = if let (Some(tag), Some(long)) = (tag, &self.long) {
            let to = self.peers[peer as usize].addr.0;
            // SAFETY: `long` was made from this endpoint; the context belongs to the slot; the caller of `send_long` keeps the payload
            // valid until the completion.
            let code = unsafe { long.send(&self.endpoint, (data, len), to, tag, context) };
            self.accepted("fi_tsend", code)
        } else {
            let own = iovec { iov_base: self.buffers.buffer(index as usize).cast(), iov_len: buffered };
            let parts = [own, iovec { iov_base: data.cast_mut().cast(), iov_len: len }];
            self.sendv(&parts[..1 + usize::from(len > 0)], peer, context)
        };
        match taken {
            Ok(taken) => {
                self.peers[peer as usize].in_flight += u32::from(taken);
                taken
            }
            Err(error) => {
                self.release(index, false);
                self.mark_lost(peer, LostReason::Failed(error));
                true
            }
        }
    }

    /// `fi_sendv`: false when it must be retried.
    pub(super) fn sendv(&self, parts: &[iovec], peer: u32, context: &Context) -> Result<bool, Error> {
        let addr = self.peers[peer as usize].addr.0;
        let endpoint = self.endpoint.as_ptr();
        // SAFETY: the endpoint is open. Buffers and contexts belong to this struct and are released by a completion or after the close;
        // the caller of `send_borrowed` keeps its payload valid as long. No descriptors are needed, because the endpoint was opened
        // without FI_MR_LOCAL.
        let code =
            unsafe { (self.sendv)(endpoint, parts.as_ptr(), ptr::null_mut(), parts.len(), addr, context.as_ptr()) };
        self.accepted("fi_sendv", code)
    }

    /// The meaning of libfabric's code for an operation: false when it must be retried.
    pub(super) fn accepted(&self, call: &'static str, code: isize) -> Result<bool, Error> {
        match i32::try_from(code) {
            Ok(0) => Ok(true),
            Ok(code) if code == -bindings::FI_EAGAIN => Ok(false),
            other => Err(self.endpoint.domain().library().failure(call, other.unwrap_or(bindings::FI_EOTHER))),
        }
    }

    /// Frees a slot, and reports the end of a borrowed payload.
    fn release(&mut self, index: u32, sent: bool) {
        let slot = &mut self.slots[index as usize];
        let peer = Peer(slot.peer);
        slot.borrowed = (ptr::null(), 0);
        if let Some(token) = slot.token.take() {
            let notice = if sent { Event::Sent { peer, token } } else { Event::SendFailed { peer, token } };
            self.notices.push_back(notice);
        }
        self.free.push(index);
    }

    /// Handles the completion of a send or of a receive for a long message.
    pub(super) fn complete(&mut self, operation: Operation, result: Result<usize, Error>) {
        let peer = match operation {
            Operation::Send(index) => {
                let peer = self.slots[index as usize].peer;
                self.release(index, result.is_ok());
                peer
            }
            Operation::Control(peer) => {
                self.peers[peer as usize].control_busy = false;
                peer
            }
            Operation::ReceiveLong(index) => {
                return if let Some(long) = &mut self.long {
                    long.complete(index, result)
                };
            }
            Operation::Receive(_) => return,
        };
        let state = &mut self.peers[peer as usize];
        state.in_flight = state.in_flight.saturating_sub(1);
        if let Err(error) = result {
            self.mark_lost(peer, LostReason::Failed(error));
        }
        self.remove_if_idle(peer);
    }

    /// Drops the backlog of a peer.
    pub(super) fn drop_backlog(&mut self, peer: u32) {
        for index in take(&mut self.peers[peer as usize].backlog) {
            self.release(index, false);
        }
    }

    /// Offers the backlog to libfabric again, each peer's messages in their order.
    pub(super) fn retry(&mut self) {
        let mut blocked = take(&mut self.blocked);
        blocked.retain(|&peer| {
            while let Some(index) = self.peers[peer as usize].backlog.pop_front() {
                if !self.try_send(index) {
                    self.peers[peer as usize].backlog.push_front(index);
                    return true;
                }
            }
            false
        });
        self.blocked = blocked;
    }
}

/// Bytes of the largest message.
pub(super) fn message_size(config: &Config, name_len: usize) -> Option<usize> {
    u16::try_from(config.max_header).ok()?;
    u32::try_from(config.max_payload).ok()?;
    (PREFIX + name_len + config.max_header).checked_add(config.max_payload)
}
