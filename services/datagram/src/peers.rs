//! The peers of an endpoint: their names, their liveness, and the control messages that they exchange.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::outbox::Outbox;
use super::peer::{PeerState, State};
use super::pool::{Context, Operation};
use super::wire::{CLOSE_ACK, CLOSING, FLAG_SETS, Frame, Kind, PING};
use crate::event::{Event, LostReason, Peer};
use ferrogin_libfabric::bindings::iovec;
use ferrogin_libfabric::{Error, FiAddr};

impl Outbox {
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
            backlog: VecDeque::new(),
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
            && !self.replaced.contains(&(message.name.into(), message.from))
    }

    /// Makes the endpoint with this address and number a peer, with [`Config::admission`](super::Config::admission). A peer that was added by the address alone is
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
    pub(super) fn mark_lost(&mut self, peer: u32, reason: LostReason) {
        let state = &mut self.peers[peer as usize];
        if state.state != State::Alive {
            return;
        }
        state.state = if reason == LostReason::Closed { State::Closed } else { State::Lost };
        state.control_wanted = None;
        log::debug!("peer {peer} is lost: {reason}");
        self.notices.push_back(Event::Lost { peer: Peer(peer), reason });
        self.drop_backlog(peer);
    }

    pub(super) fn remove_if_idle(&mut self, peer: u32) {
        let state = &mut self.peers[peer as usize];
        if state.state == State::Forgotten && state.in_flight == 0 {
            state.state = State::Removed;
            if let Err(error) = self.av.remove(state.addr) {
                log::debug!("forgetting peer {peer}: {error}");
            }
        }
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

    /// Messages wait in the backlog or are in flight.
    pub(super) fn busy(&self) -> bool {
        !self.blocked.is_empty()
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
