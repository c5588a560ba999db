//! The sending half of a message endpoint: slots, peers, and the queue of what could not be sent yet.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::mem::take;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::long::{Long, LongReceived};
use super::pool::{Context, Operation, Pool};
use super::wire::{CLOSING, FLAG_SETS, Frame, GOODBYE, Kind, PLEASE_ANSWER, PREFIX, Prefix};
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

/// One message under way or waiting.
struct Slot {
    peer: u32,
    /// Bytes in the slot's own buffer: prefix, name, header, and the payload if it was copied.
    buffered: usize,
    /// A payload that lies elsewhere.
    borrowed: (*const u8, usize),
    /// It is not a datagram but a long message with this tag: the payload alone.
    tag: Option<u64>,
    token: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Alive,
    /// It said that it closes: nothing is sent to it, but what it sent before is still taken.
    Closed,
    /// Told as lost; nothing is sent to it or taken from it.
    Lost,
    /// Forgotten: its name is free for a new peer; out of the address vector when nothing is under way to it.
    Forgotten,
    /// Out of the address vector.
    Removed,
}

struct PeerState {
    addr: FiAddr,
    name: Box<[u8]>,
    /// Which of the endpoints that have that name in their turn; None until it is heard of.
    number: Option<u64>,
    state: State,
    /// Sends that libfabric has accepted and not completed, control messages included.
    under_way: u32,
    /// Slots in the backlog.
    waiting: u32,
    /// The backlog pass in which libfabric last said "again" for this peer.
    blocked_in: u64,
    /// Something was exchanged with it, so its death matters.
    engaged: bool,
    heard: Instant,
    /// Since when an answer is due.
    asked: Option<Instant>,
    control: Box<Context>,
    control_busy: bool,
    /// A control message to send as soon as possible, with these flags.
    control_wanted: Option<u8>,
    /// We have said that we close, and it has not said yet that it heard.
    told_closing: bool,
}

/// What happened to messages and peers, to be told at the next opportunity.
pub(super) enum Notice {
    Sent { peer: Peer, token: u64 },
    SendFailed { peer: Peer, token: u64 },
    Lost { peer: Peer, reason: LostReason },
}

/// The sending half of a [`super::MessageEndpoint`].
pub(super) struct Sending {
    // First, so that it is closed before the buffers go.
    pub(super) endpoint: Endpoint,
    sendv: SendV,
    av: Arc<AddressVector>,
    /// Two-part messages are possible; otherwise borrowed payloads are copied.
    gather: bool,
    name: Box<[u8]>,
    /// Tells this endpoint from others that had its name, or will have it.
    number: u64,
    slots: Box<[Slot]>,
    contexts: Box<[Context]>,
    buffers: Pool,
    /// One prefix and name per flag combination, for control messages.
    control_buffers: Pool,
    free: Vec<u32>,
    backlog: VecDeque<u32>,
    pass: u64,
    peers: Vec<PeerState>,
    by_name: HashMap<Box<[u8]>, u32>,
    /// Endpoints that had a name before others had it.
    replaced: HashSet<(Box<[u8]>, u64)>,
    pub(super) notices: VecDeque<Notice>,
    /// Long messages, where they were asked for and the provider has them.
    pub(super) long: Option<Long>,
    /// The time as of the last timer round, so that messages need not ask the clock.
    now: Instant,
    config: Config,
}

// SAFETY: the raw pointers are to buffers that the sending half owns, or that callers of `send_borrowed` keep alive and unchanged from
// whichever thread; the endpoint itself is Send.
unsafe impl Send for Sending {}

impl Sending {
    pub(super) fn new(
        endpoint: Endpoint,
        av: Arc<AddressVector>,
        config: &Config,
        iov_limit: usize,
    ) -> Result<Self, Error> {
        let name = endpoint.name()?.into_boxed_slice();
        let number = RandomState::new().build_hasher().finish().max(1);
        let too_much = |what: &str| Error::Argument { what: format!("message endpoint: {what}") };
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(too_much(&format!("the provider's addresses have {} bytes, not 1 to {NAME_MAX}", name.len())));
        }
        let size = message_size(config, name.len())
            .ok_or_else(|| too_much("max_header (65535 at most) or max_payload (4 GiB at most) is out of range"))?;
        let count = u32::try_from(config.tx_depth).map_err(|_| too_much("tx_depth is out of range"))?;
        let buffers = Pool::new(config.tx_depth, size).ok_or_else(|| too_much("tx_depth is out of range"))?;
        let control_buffers =
            Pool::new(usize::from(FLAG_SETS), PREFIX + name.len()).ok_or_else(|| too_much("no control buffers"))?;
        for flags in 0..FLAG_SETS {
            // SAFETY: nothing is under way yet.
            let buffer = unsafe { control_buffers.bytes_mut(usize::from(flags)) };
            emit(buffer, Kind::Control(flags), &name, (number, 0), &[], 0);
        }
        let slot = |_| Slot { peer: 0, buffered: 0, borrowed: (ptr::null(), 0), tag: None, token: None };
        // SAFETY: open until drop.
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

    /// Our own address, which peers give to [`super::MessageEndpoint::add_peer`].
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
                what: format!("a peer's address has {} bytes, ours {}", address.len(), self.name.len()),
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
            under_way: 0,
            waiting: 0,
            blocked_in: 0,
            engaged: false,
            heard: self.now,
            asked: None,
            control: Box::new(Context::new(Operation::Control(index))),
            control_busy: false,
            control_wanted: None,
            told_closing: false,
        });
        self.by_name.insert(address.into(), index);
        Ok(Peer(index))
    }

    /// Makes a new peer of the address of `before`, which is over.
    fn replace(&mut self, before: u32, addr: FiAddr, number: Option<u64>) -> Result<Peer, Error> {
        self.lose(before, LostReason::Replaced);
        let state = &mut self.peers[before as usize];
        // The new one has its place in the address vector.
        state.state = State::Removed;
        state.control_wanted = None;
        let name = state.name.clone();
        // Otherwise it may be the same one again.
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

    /// Lets go of a peer: its number is never used again, and the same address, if heard of again, is a new peer. Messages to it that
    /// have not gone out are dropped.
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
        self.send_with(peer, header, payload.len(), |room| room.copy_from_slice(payload))
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
        // SAFETY: the slot was free: no operation on its buffer.
        let buffer = unsafe { self.buffers.bytes_mut(index as usize) };
        write(&mut buffer[at..at + len]);
        self.submit(index);
        Ok(())
    }

    /// Sends a copy of the header, and the payload from where it lies. [`super::Event::Sent`] or
    /// [`super::Event::SendFailed`] with the token, in a later poll, ends the loan.
    ///
    /// # Errors
    /// See [`SendError`]; the message is then not sent and nothing borrowed.
    ///
    /// # Safety
    /// `payload` is valid for reads of `len` bytes until one of those two events, or until the endpoint is dropped. Bytes that change
    /// meanwhile arrive as the one or the other.
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
            let room = unsafe { self.buffers.buffer(slot as usize).add(at) };
            // SAFETY: readable by the caller's promise; our own buffer, of a slot that is not under way.
            unsafe { ptr::copy_nonoverlapping(payload, room, len) };
            self.slots[slot as usize].buffered = at + len;
        }
        self.slots[slot as usize].token = Some(token);
        self.submit(slot);
        Ok(())
    }

    /// Sends a long message, from where it lies, to a receiver that has posted a receive for `tag`. The loan ends as in
    /// [`Self::send_borrowed`].
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

    /// Long messages can be sent and received.
    pub fn has_long(&self) -> bool {
        self.long.is_some()
    }

    /// Posts a receive for the long message with exactly this tag. False when that is not possible now.
    ///
    /// # Safety
    /// `room` is valid for writes of `len` bytes, and nobody else's, until the receive is over ([`Self::take_long`]) or the endpoint is
    /// dropped.
    pub unsafe fn receive_long(&mut self, tag: u64, room: *mut u8, len: usize, token: u64) -> bool {
        let Self { long: Some(long), endpoint, .. } = self else { return false };
        // SAFETY: our endpoint, of which `long` was made; memory by the caller's promise.
        unsafe { long.receive(endpoint, tag, room, len, token) }
    }

    /// Asks for a receive for a long message to end early, unless its bytes are coming in already.
    pub fn cancel_long(&self, token: u64) {
        if let Some(long) = &self.long {
            long.cancel(&self.endpoint, token);
        }
    }

    /// Receives for long messages that are over.
    pub fn take_long(&mut self) -> Vec<LongReceived> {
        self.long.as_mut().map_or_else(Vec::new, Long::take)
    }

    /// Takes a slot and writes prefix, name and header of a message with `len` bytes of payload.
    fn fill(&mut self, peer: Peer, header: &[u8], len: usize) -> Result<u32, SendError> {
        let state = self.peers.get_mut(peer.index()).ok_or(SendError::Gone)?;
        if state.state != State::Alive {
            return Err(SendError::Gone);
        }
        if header.len() > self.config.max_header || len > self.config.max_payload {
            return Err(SendError::TooLong);
        }
        let index = self.free.pop().ok_or(SendError::Full)?;
        if !state.engaged {
            state.engaged = true;
            state.heard = self.now;
        }
        // SAFETY: the slot was free: no operation on its buffer.
        let buffer = unsafe { self.buffers.bytes_mut(index as usize) };
        let numbers = (self.number, state.number.unwrap_or(0));
        let end = emit(buffer, Kind::Data, &self.name, numbers, header, len);
        let slot = &mut self.slots[index as usize];
        slot.peer = peer.0;
        slot.buffered = end;
        (slot.borrowed, slot.tag) = ((ptr::null(), 0), None);
        Ok(index)
    }

    /// Sends a filled slot, or queues it behind those that wait for the same peer.
    fn submit(&mut self, index: u32) {
        let peer = self.slots[index as usize].peer as usize;
        if self.peers[peer].waiting > 0 || !self.try_send(index) {
            self.peers[peer].waiting += 1;
            self.backlog.push_back(index);
        }
    }

    /// Offers a slot to libfabric. False when it says "again"; a refusal loses the peer and ends the slot.
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
                self.peers[peer as usize].under_way += 1;
                true
            }
            Ok(false) => false,
            Err(error) => {
                self.release(index, false);
                self.lose(peer, LostReason::Failed(error));
                true
            }
        }
    }

    /// Offers a datagram to libfabric; true when accepted, false when to be tried again.
    fn send_parts(&self, index: u32) -> Result<bool, Error> {
        let slot = &self.slots[index as usize];
        let own = iovec { iov_base: self.buffers.buffer(index as usize).cast(), iov_len: slot.buffered };
        let parts = [own, iovec { iov_base: slot.borrowed.0.cast_mut().cast(), iov_len: slot.borrowed.1 }];
        let count = if slot.borrowed.1 == 0 { 1 } else { 2 };
        self.sendv(&parts[..count], slot.peer, &self.contexts[index as usize])
    }

    /// Offers a long message to libfabric; true when accepted, false when to be tried again.
    fn send_tagged(
        &self,
        long: &Long,
        payload: (*const u8, usize),
        peer: u32,
        tag: u64,
        context: &Context,
    ) -> Result<bool, Error> {
        let to = self.peers[peer as usize].addr.0;
        // SAFETY: our endpoint, of which `long` was made; context and payload as in `sendv`.
        let code = unsafe { long.send(&self.endpoint, payload, to, tag, context) };
        self.accepted("fi_tsend", code)
    }

    /// `fi_sendv`: true when accepted, false when to be tried again.
    fn sendv(&self, parts: &[iovec], peer: u32, context: &Context) -> Result<bool, Error> {
        let addr = self.peers[peer as usize].addr.0;
        let endpoint = self.endpoint.as_ptr();
        // SAFETY: open endpoint; the parts and the context stay until the completion (buffers and slots are ours, borrowed
        // payloads are kept by the caller's promise, all are released only by a completion or after the endpoint is closed); no
        // descriptors, because the endpoint was opened without FI_MR_LOCAL.
        let code =
            unsafe { (self.sendv)(endpoint, parts.as_ptr(), ptr::null_mut(), parts.len(), addr, context.as_ptr()) };
        self.accepted("fi_sendv", code)
    }

    /// What libfabric's answer to a send means: true when accepted, false when to be tried again.
    fn accepted(&self, call: &'static str, code: isize) -> Result<bool, Error> {
        match i32::try_from(code) {
            Ok(0) => Ok(true),
            Ok(code) if code == -bindings::FI_EAGAIN => Ok(false),
            other => Err(self.endpoint.domain().library().failure(call, other.unwrap_or(bindings::FI_EOTHER))),
        }
    }

    /// Frees a slot that nothing is under way for, and tells about a borrowed payload.
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

    /// Takes note of a completion, `failed` or not.
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
        state.under_way = state.under_way.saturating_sub(1);
        if let Some(error) = failed {
            self.lose(peer, LostReason::Failed(error));
        }
        self.remove_if_idle(peer);
    }

    /// Who sent a message; None when it shall not be taken.
    pub(super) fn sender(&mut self, message: &Frame<'_>) -> Option<Peer> {
        if message.to != 0 && message.to != self.number {
            log::debug!("a message for an earlier endpoint of this address was dropped");
            return None;
        }
        let known = self.by_name.get(message.name).map(|known| (*known, &self.peers[*known as usize]));
        let peer = match known {
            Some((known, state)) if state.number == Some(message.from) => Ok(Peer(known)),
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
        state.engaged = true;
        state.asked = None;
        state.heard = self.now;
        Some(peer)
    }

    /// A control message came in.
    pub(super) fn control(&mut self, from: Peer, flags: u8) {
        if flags & GOODBYE != 0 {
            self.peers[from.index()].told_closing = false;
        }
        if flags & CLOSING != 0 {
            self.lose(from.0, LostReason::Closed);
            self.want_control(from.0, GOODBYE);
        } else if flags & PLEASE_ANSWER != 0 && self.is_alive(from) {
            self.want_control(from.0, 0);
        }
    }

    fn want_control(&mut self, peer: u32, flags: u8) {
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
                    state.under_way += 1;
                }
            }
            Err(error) => {
                self.peers[peer as usize].control_wanted = None;
                self.lose(peer, LostReason::Failed(error));
            }
        }
    }

    /// Marks a peer lost and tells, the first time.
    fn lose(&mut self, peer: u32, reason: LostReason) {
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
        if state.state == State::Forgotten && state.under_way == 0 {
            state.state = State::Removed;
            if let Err(error) = self.av.remove(state.addr) {
                log::debug!("forgetting peer {peer}: {error}");
            }
        }
    }

    /// Offers what waits to libfabric again, each peer's messages in their order.
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

    /// Asks quiet peers to answer, and gives up on those that do not.
    pub(super) fn timers(&mut self, now: Instant) {
        // If we were away for long ourselves, the answer may be waiting unread: the deadline starts again.
        let grace = now.duration_since(self.now) >= self.config.lost_after / 2;
        self.now = now;
        for peer in 0..self.peers.len() as u32 {
            let state = &mut self.peers[peer as usize];
            if state.state == State::Alive && state.engaged {
                if grace && state.asked.is_some() {
                    state.asked = Some(now);
                }
                match state.asked {
                    Some(asked) if now.duration_since(asked) >= self.config.lost_after => {
                        let silent = now.duration_since(state.heard);
                        self.lose(peer, LostReason::Silent(silent));
                        continue;
                    }
                    None if now.duration_since(state.heard) >= self.config.ping_after => {
                        state.asked = Some(now);
                        self.want_control(peer, PLEASE_ANSWER);
                    }
                    _ => {}
                }
            }
            let overdue = self.overdue(&self.peers[peer as usize]);
            let state = &mut self.peers[peer as usize];
            if state.state == State::Closed && overdue {
                // It did not wait for our goodbye.
                state.control_wanted = None;
            }
            self.try_control(peer);
        }
    }

    /// Messages that are not yet with libfabric.
    pub(super) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Messages that are not yet with libfabric, or not completed.
    pub(super) fn busy(&self) -> bool {
        !self.backlog.is_empty()
            || self.peers.iter().any(|peer| match peer.state {
                State::Alive => peer.under_way > 0 || peer.control_wanted.is_some() || peer.told_closing,
                State::Closed => peer.control_wanted.is_some() || peer.control_busy && !self.overdue(peer),
                _ => false,
            })
    }

    fn overdue(&self, peer: &PeerState) -> bool {
        self.now.duration_since(peer.heard) >= self.config.lost_after
    }

    /// Tells all live peers that we close. They must have heard before the endpoint is closed: what they send at that moment may make
    /// the host reset the connection, and that destroys what they have not read.
    pub(super) fn say_closing(&mut self) {
        for peer in 0..self.peers.len() as u32 {
            if self.peers[peer as usize].engaged && self.peers[peer as usize].state == State::Alive {
                self.peers[peer as usize].told_closing = true;
                self.want_control(peer, CLOSING);
            }
        }
    }

    /// How often timers have to be looked at.
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

/// Writes prefix, name and header; says where the payload goes. Lengths were checked against the configuration.
///
/// `numbers` are the sender's and the receiver's.
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
