//! The sending half of a message endpoint: slots, peers, and the backlog of messages that libfabric has not taken.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::mem::take;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::long::{Long, LongReceived};
use super::pool::{Context, Operation, Pool};
use super::wire::{CLOSE_ACK, CLOSING, FLAG_SETS, Frame, Kind, PING, PREFIX, Prefix};
use super::{Config, LostReason, NAME_MAX, Peer, SendError};
use ferrogin_libfabric::bindings::{self, iovec};
use ferrogin_libfabric::entry;
use ferrogin_libfabric::{AddressVector, Endpoint, Error, FiAddr};

type SendV = unsafe extern "C" fn(
    *mut bindings::fid_ep,
    *const iovec,
    *mut *mut std::ffi::c_void,
    usize,
    bindings::fi_addr_t,
    *mut std::ffi::c_void,
) -> isize;

/// One message in flight or in the backlog.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Alive,
    /// The peer closes: nothing is sent to it, and messages that it sent before are still received.
    Closed,
    /// Reported as lost: nothing is sent to it or received from it.
    Lost,
    /// Forgotten: its name is free for a new peer. It leaves the address vector when nothing to it is in flight.
    Forgotten,
    /// Removed from the address vector.
    Removed,
}

struct PeerState {
    addr: FiAddr,
    name: Box<[u8]>,
    /// The number of the endpoint, which distinguishes endpoints with one name; None until a message of it arrives.
    number: Option<u64>,
    state: State,
    /// Sends that libfabric has accepted and not completed, including control messages.
    in_flight: u32,
    /// Slots in the backlog.
    waiting: u32,
    /// The last pass over the backlog in which libfabric took no send to this peer.
    blocked_in: u64,
    /// A message was exchanged with the peer: its death must be detected.
    in_use: bool,
    last_heard: Instant,
    /// When the ping was sent that is not answered yet.
    pinged_at: Option<Instant>,
    control: Box<Context>,
    control_busy: bool,
    /// The flags of a control message to send as soon as possible.
    control_wanted: Option<u8>,
    /// The close was announced to the peer, and the peer has not confirmed it.
    close_unconfirmed: bool,
}

/// An event for the next report.
pub(super) enum Notice {
    Sent { peer: Peer, token: u64 },
    SendFailed { peer: Peer, token: u64 },
    Lost { peer: Peer, reason: LostReason },
}

/// The sending half of a [`super::MessageEndpoint`], with which a callback of its poll can answer at once.
pub struct Outbox {
    // First, so that it is closed before the buffers go.
    pub(super) endpoint: Endpoint,
    sendv: SendV,
    av: Arc<AddressVector>,
    /// The provider sends two-part messages; otherwise borrowed payloads are copied.
    gather: bool,
    name: Box<[u8]>,
    /// Distinguishes this endpoint from earlier and later ones with its name.
    number: u64,
    slots: Box<[Slot]>,
    contexts: Box<[Context]>,
    buffers: Pool,
    /// The control message of each combination of flags.
    control_buffers: Pool,
    free: Vec<u32>,
    backlog: VecDeque<u32>,
    pass: u64,
    peers: Vec<PeerState>,
    by_name: HashMap<Box<[u8]>, u32>,
    /// Names and numbers of endpoints that later endpoints replaced.
    replaced: HashSet<(Box<[u8]>, u64)>,
    pub(super) notices: VecDeque<Notice>,
    /// Long messages, if they were asked for and the provider has them.
    pub(super) long: Option<Long>,
    /// The time of the last run of the timers: messages do not read the clock.
    now: Instant,
    config: Config,
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
        let buffers = Pool::new(config.tx_depth, size).ok_or_else(|| out_of_range("tx_depth is out of range"))?;
        let control_buffers =
            Pool::new(usize::from(FLAG_SETS), PREFIX + name.len()).ok_or_else(|| out_of_range("no control buffers"))?;
        for flags in 0..FLAG_SETS {
            // SAFETY: no operation was posted yet.
            let buffer = unsafe { control_buffers.bytes_mut(usize::from(flags)) };
            emit(buffer, Kind::Control(flags), &name, (number, 0), &[], 0);
        }
        let slot = |_| Slot { peer: 0, buffered: 0, borrowed: (ptr::null(), 0), tag: None, token: None };
        // SAFETY: `endpoint` is open until it is dropped, and its operations tables live as long.
        let table = unsafe { (*endpoint.as_ptr()).msg };
        let sendv = entry!(endpoint.domain().library(), table, fi_ops_msg, sendv, "fi_sendv")?;
        Ok(Self {
            sendv,
            av,
            gather: iov_limit >= 2,
            slots: (0..count).map(slot).collect(),
            contexts: (0..count).map(|index| Context::new(Operation::Send(index))).collect(),
            buffers,
            control_buffers,
            free: (0..count).rev().collect(),
            backlog: VecDeque::with_capacity(config.tx_depth),
            pass: 0,
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

    /// Makes a peer known by its endpoint's address; a peer that is known already keeps its number.
    ///
    /// # Errors
    /// [`Error::Argument`] when there are too many peers or the address has the wrong length; what the provider answers.
    pub fn add_peer(&mut self, address: &[u8]) -> Result<Peer, Error> {
        if let Some(&known) = self.by_name.get(address) {
            let state = &self.peers[known as usize];
            if state.state == State::Alive {
                return Ok(Peer(known));
            }
            let addr = state.addr;
            return self.replace(known, addr, None);
        }
        if address.len() != self.name.len() {
            return Err(Error::Argument {
                what: format!("a peer's address has {} bytes, this endpoint's {}", address.len(), self.name.len()),
            });
        }
        if self.by_name.len() >= self.config.max_peers {
            return Err(Error::Argument {
                what: format!("more than {} peers (Config::max_peers)", self.config.max_peers),
            });
        }
        let addr = self.av.insert(address)?;
        self.push_peer(addr, address, None)
    }

    fn push_peer(&mut self, addr: FiAddr, address: &[u8], number: Option<u64>) -> Result<Peer, Error> {
        let index =
            u32::try_from(self.peers.len()).map_err(|_| Error::Argument { what: "no peer numbers left".to_owned() })?;
        self.peers.push(PeerState {
            addr,
            name: address.into(),
            number,
            state: State::Alive,
            in_flight: 0,
            waiting: 0,
            blocked_in: 0,
            in_use: false,
            last_heard: self.now,
            pinged_at: None,
            control: Box::new(Context::new(Operation::Control(index))),
            control_busy: false,
            control_wanted: None,
            close_unconfirmed: false,
        });
        self.by_name.insert(address.into(), index);
        Ok(Peer(index))
    }

    /// Replaces the peer `before` by a new peer with the same address.
    fn replace(&mut self, before: u32, addr: FiAddr, number: Option<u64>) -> Result<Peer, Error> {
        self.mark_lost(before, LostReason::Replaced);
        let state = &mut self.peers[before as usize];
        // The new peer takes its place in the address vector.
        state.state = State::Removed;
        state.control_wanted = None;
        let name = state.name.clone();
        // Without both numbers, the new peer may be the same endpoint.
        if let (Some(gone), Some(_)) = (state.number, number) {
            self.replaced.insert((name.clone(), gone));
        }
        self.push_peer(addr, &name, number)
    }

    /// The address of a peer.
    pub fn peer_address(&self, peer: Peer) -> &[u8] {
        self.peers.get(peer.index()).map_or(&[], |state| &state.name)
    }

    /// False once the peer is lost or forgotten.
    pub fn is_alive(&self, peer: Peer) -> bool {
        self.peers.get(peer.index()).is_some_and(|state| state.state == State::Alive)
    }

    /// Messages that may be sent before [`SendError::Full`].
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Forgets a peer: its number is not reused, and an endpoint with the same address is a new peer. Messages to it that are not sent are
    /// dropped.
    pub fn forget(&mut self, peer: Peer) {
        let Some(state) = self.peers.get_mut(peer.index()) else { return };
        if matches!(state.state, State::Forgotten | State::Removed) {
            return;
        }
        state.state = State::Forgotten;
        state.control_wanted = None;
        self.by_name.remove(&state.name);
        self.drop_backlog(peer.0);
        self.remove_if_idle(peer.0);
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
        if self.peers[peer].waiting > 0 || !self.try_send(index) {
            self.peers[peer].waiting += 1;
            self.backlog.push_back(index);
        }
    }

    /// Offers a slot to libfabric. False when it must be retried; a failure marks the peer as lost and frees the slot.
    fn try_send(&mut self, index: u32) -> bool {
        let slot = &self.slots[index as usize];
        let peer = slot.peer;
        let context = &self.contexts[index as usize];
        let taken = match (slot.tag, &self.long) {
            (Some(tag), Some(long)) => self.send_tagged(long, slot.borrowed, peer, tag, context),
            _ => self.send_parts(index),
        };
        match taken {
            Ok(true) => {
                self.peers[peer as usize].in_flight += 1;
                true
            }
            Ok(false) => false,
            Err(error) => {
                self.release(index, false);
                self.mark_lost(peer, LostReason::Failed(error));
                true
            }
        }
    }

    /// Offers a datagram to libfabric; false when it must be retried.
    fn send_parts(&self, index: u32) -> Result<bool, Error> {
        let slot = &self.slots[index as usize];
        let own = iovec { iov_base: self.buffers.buffer(index as usize).cast(), iov_len: slot.buffered };
        let parts = [own, iovec { iov_base: slot.borrowed.0.cast_mut().cast(), iov_len: slot.borrowed.1 }];
        let count = if slot.borrowed.1 == 0 { 1 } else { 2 };
        self.sendv(&parts[..count], slot.peer, &self.contexts[index as usize])
    }

    /// Offers a long message to libfabric; false when it must be retried.
    fn send_tagged(
        &self,
        long: &Long,
        payload: (*const u8, usize),
        peer: u32,
        tag: u64,
        context: &Context,
    ) -> Result<bool, Error> {
        let to = self.peers[peer as usize].addr.0;
        // SAFETY: `long` was made from this endpoint; the context belongs to the slot; the caller of `send_long` keeps the payload valid
        // until the completion.
        let code = unsafe { long.send(&self.endpoint, payload, to, tag, context) };
        self.accepted("fi_tsend", code)
    }

    /// `fi_sendv`: false when it must be retried.
    fn sendv(&self, parts: &[iovec], peer: u32, context: &Context) -> Result<bool, Error> {
        let addr = self.peers[peer as usize].addr.0;
        let endpoint = self.endpoint.as_ptr();
        // SAFETY: the endpoint is open. Buffers and contexts belong to this struct and are released by a completion or after the close;
        // the caller of `send_borrowed` keeps its payload valid as long. No descriptors are needed, because the endpoint was opened
        // without FI_MR_LOCAL.
        let code =
            unsafe { (self.sendv)(endpoint, parts.as_ptr(), ptr::null_mut(), parts.len(), addr, context.as_ptr()) };
        self.accepted("fi_sendv", code)
    }

    /// The meaning of libfabric's code for a send: false when it must be retried.
    fn accepted(&self, call: &'static str, code: isize) -> Result<bool, Error> {
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
            let notice = if sent { Notice::Sent { peer, token } } else { Notice::SendFailed { peer, token } };
            self.notices.push_back(notice);
        }
        self.free.push(index);
    }

    /// Handles a completion, successful or `failed`.
    pub(super) fn complete(&mut self, operation: Operation, failed: Option<Error>) {
        let peer = match operation {
            Operation::Send(index) => {
                let peer = self.slots[index as usize].peer;
                self.release(index, failed.is_none());
                peer
            }
            Operation::Control(peer) => {
                self.peers[peer as usize].control_busy = false;
                peer
            }
            Operation::Receive(_) | Operation::ReceiveLong(_) => return,
        };
        let state = &mut self.peers[peer as usize];
        state.in_flight = state.in_flight.saturating_sub(1);
        if let Some(error) = failed {
            self.mark_lost(peer, LostReason::Failed(error));
        }
        self.remove_if_idle(peer);
    }

    /// The sender of a message; None when the message must be dropped.
    pub(super) fn sender(&mut self, message: &Frame<'_>) -> Option<Peer> {
        if message.to != 0 && message.to != self.number {
            log::debug!("a message for an earlier endpoint of this address was dropped");
            return None;
        }
        let known = self.by_name.get(message.name).map(|known| (*known, &self.peers[*known as usize]));
        let peer = match known {
            Some((known, state)) if state.number == Some(message.from) => Ok(Peer(known)),
            _ if self.config.admission => return None,
            _ if self.replaced.contains(&(message.name.into(), message.from)) => return None,
            Some((known, PeerState { number: None, .. })) => Ok(Peer(known)),
            Some((known, state)) => {
                let addr = state.addr;
                self.replace(known, addr, Some(message.from))
            }
            None => self.add_peer(message.name),
        };
        let peer = match peer {
            Ok(peer) => peer,
            Err(error) => {
                log::warn!("a message from an unknown sender was dropped: {error}");
                return None;
            }
        };
        let state = &mut self.peers[peer.index()];
        state.number = Some(message.from);
        if !matches!(state.state, State::Alive | State::Closed) {
            return None;
        }
        state.in_use = true;
        state.pinged_at = None;
        state.last_heard = self.now;
        Some(peer)
    }

    /// Whether a message without a [`sender`](Self::sender) is for the owner of the endpoint, which may admit its sender.
    pub(super) fn is_unadmitted(&self, message: &Frame<'_>) -> bool {
        let admitted = || {
            let known = self.by_name.get(message.name).map(|known| &self.peers[*known as usize]);
            known.is_some_and(|state| state.number == Some(message.from))
        };
        self.config.admission
            && message.kind == Kind::Data
            && (message.to == 0 || message.to == self.number)
            && !admitted()
    }

    /// Makes the endpoint with this address and number a peer, with [`Config::admission`]. A peer that was added by the address alone is
    /// this endpoint from now on; a live peer of another number is replaced.
    ///
    /// # Errors
    /// As [`Self::add_peer`].
    pub fn admit(&mut self, address: &[u8], number: u64) -> Result<Peer, Error> {
        let peer = self.add_peer(address)?;
        let state = &self.peers[peer.index()];
        let peer = match state.number {
            Some(other) if other != number => {
                let addr = state.addr;
                self.replace(peer.0, addr, Some(number))?
            }
            _ => peer,
        };
        let state = &mut self.peers[peer.index()];
        state.number = Some(number);
        state.in_use = true;
        state.last_heard = self.now;
        Ok(peer)
    }

    /// Handles a control message.
    pub(super) fn control(&mut self, from: Peer, flags: u8) {
        if flags & CLOSE_ACK != 0 {
            self.peers[from.index()].close_unconfirmed = false;
        }
        if flags & CLOSING != 0 {
            self.mark_lost(from.0, LostReason::Closed);
            self.request_control(from.0, CLOSE_ACK);
        } else if flags & PING != 0 && self.is_alive(from) {
            self.request_control(from.0, 0);
        }
    }

    fn request_control(&mut self, peer: u32, flags: u8) {
        let state = &mut self.peers[peer as usize];
        state.control_wanted = Some(state.control_wanted.unwrap_or(0) | flags);
        self.try_control(peer);
    }

    fn try_control(&mut self, peer: u32) {
        let state = &self.peers[peer as usize];
        let Some(flags) = state.control_wanted else { return };
        if state.control_busy || !matches!(state.state, State::Alive | State::Closed) {
            return;
        }
        let base = self.control_buffers.buffer(usize::from(flags % FLAG_SETS));
        let part = iovec { iov_base: base.cast(), iov_len: self.control_buffers.size() };
        match self.sendv(&[part], peer, &state.control) {
            Ok(accepted) => {
                let state = &mut self.peers[peer as usize];
                if accepted {
                    state.control_wanted = None;
                    state.control_busy = true;
                    state.in_flight += 1;
                }
            }
            Err(error) => {
                self.peers[peer as usize].control_wanted = None;
                self.mark_lost(peer, LostReason::Failed(error));
            }
        }
    }

    /// Marks a peer as lost and reports it, once.
    fn mark_lost(&mut self, peer: u32, reason: LostReason) {
        let state = &mut self.peers[peer as usize];
        if state.state != State::Alive {
            return;
        }
        state.state = if reason == LostReason::Closed { State::Closed } else { State::Lost };
        state.control_wanted = None;
        log::debug!("peer {peer} is lost: {reason}");
        self.notices.push_back(Notice::Lost { peer: Peer(peer), reason });
        self.drop_backlog(peer);
    }

    fn drop_backlog(&mut self, peer: u32) {
        if self.peers[peer as usize].waiting == 0 {
            return;
        }
        self.peers[peer as usize].waiting = 0;
        for _ in 0..self.backlog.len() {
            let Some(index) = self.backlog.pop_front() else { break };
            if self.slots[index as usize].peer == peer {
                self.release(index, false);
            } else {
                self.backlog.push_back(index);
            }
        }
    }

    fn remove_if_idle(&mut self, peer: u32) {
        let state = &mut self.peers[peer as usize];
        if state.state == State::Forgotten && state.in_flight == 0 {
            state.state = State::Removed;
            if let Err(error) = self.av.remove(state.addr) {
                log::debug!("forgetting peer {peer}: {error}");
            }
        }
    }

    /// Offers the backlog to libfabric again, each peer's messages in their order.
    pub(super) fn retry(&mut self) {
        if self.backlog.is_empty() {
            return;
        }
        self.pass += 1;
        let mut backlog = take(&mut self.backlog);
        for _ in 0..backlog.len() {
            let Some(index) = backlog.pop_front() else { break };
            let peer = self.slots[index as usize].peer as usize;
            if self.peers[peer].state != State::Alive {
                self.release(index, false);
            } else if self.peers[peer].blocked_in == self.pass || !self.try_send(index) {
                self.peers[peer].blocked_in = self.pass;
                backlog.push_back(index);
            } else {
                self.peers[peer].waiting = self.peers[peer].waiting.saturating_sub(1);
            }
        }
        self.backlog = backlog;
    }

    /// Pings quiet peers, and gives up peers that do not answer.
    pub(super) fn timers(&mut self, now: Instant) {
        // After a long pause of the caller, an answer may be waiting unread: the deadline starts again.
        let grace = now.duration_since(self.now) >= self.config.lost_after / 2;
        self.now = now;
        for peer in 0..self.peers.len() as u32 {
            let state = &mut self.peers[peer as usize];
            if state.state == State::Alive && state.in_use {
                if grace && state.pinged_at.is_some() {
                    state.pinged_at = Some(now);
                }
                match state.pinged_at {
                    Some(pinged_at) if now.duration_since(pinged_at) >= self.config.lost_after => {
                        let silent = now.duration_since(state.last_heard);
                        self.mark_lost(peer, LostReason::Silent(silent));
                        continue;
                    }
                    None if now.duration_since(state.last_heard) >= self.config.ping_after => {
                        state.pinged_at = Some(now);
                        self.request_control(peer, PING);
                    }
                    _ => {}
                }
            }
            let is_silent = self.is_silent(&self.peers[peer as usize]);
            let state = &mut self.peers[peer as usize];
            if state.state == State::Closed && is_silent {
                // The peer did not wait for the confirmation.
                state.control_wanted = None;
            }
            self.try_control(peer);
        }
    }

    /// Messages wait in the backlog.
    pub(super) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Messages wait in the backlog or are in flight.
    pub(super) fn busy(&self) -> bool {
        !self.backlog.is_empty()
            || self.peers.iter().any(|peer| match peer.state {
                State::Alive => peer.in_flight > 0 || peer.control_wanted.is_some() || peer.close_unconfirmed,
                State::Closed => peer.control_wanted.is_some() || peer.control_busy && !self.is_silent(peer),
                _ => false,
            })
    }

    fn is_silent(&self, peer: &PeerState) -> bool {
        self.now.duration_since(peer.last_heard) >= self.config.lost_after
    }

    /// Announces the close to all live peers. They must confirm before the endpoint is closed: a message from them at that moment may make
    /// the host reset the connection, which destroys messages that they have not read.
    pub(super) fn send_closing(&mut self) {
        for peer in 0..self.peers.len() as u32 {
            if self.peers[peer as usize].in_use && self.peers[peer as usize].state == State::Alive {
                self.peers[peer as usize].close_unconfirmed = true;
                self.request_control(peer, CLOSING);
            }
        }
    }

    /// The time between two runs of the timers.
    pub(super) fn timer_interval(&self) -> Duration {
        (self.config.ping_after / 4).min(self.config.lost_after / 8)
    }
}

/// Bytes of the largest message.
pub(super) fn message_size(config: &Config, name_len: usize) -> Option<usize> {
    u16::try_from(config.max_header).ok()?;
    u32::try_from(config.max_payload).ok()?;
    (PREFIX + name_len + config.max_header).checked_add(config.max_payload)
}

/// Writes prefix, name and header; gives the offset of the payload. The caller has checked the lengths. `from` and `to` are the numbers of
/// the two endpoints.
fn emit(
    buffer: &mut [u8],
    kind: Kind,
    name: &[u8],
    (from, to): (u64, u64),
    header: &[u8],
    payload_len: usize,
) -> usize {
    let (name_len, header_len, payload_len) = (name.len() as u8, header.len() as u16, payload_len as u32);
    let prefix = Prefix { kind, name_len, header_len, payload_len, from, to };
    let mut end = 0;
    for part in [&prefix.emit()[..], name, header] {
        buffer[end..end + part.len()].copy_from_slice(part);
        end += part.len();
    }
    end
}
