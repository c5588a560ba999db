//! The way in: packets become bytes in memory, counts, and answers.
#![allow(unsafe_code)]

use std::collections::hash_map::Entry;

use efa_dp_direct::wire::CompStatus;

use super::complete::OK;
use super::connection::{Link, Partial, Serving};
use super::core::Core;
use super::counter::Event;
use super::qp::{State, Token};
use super::recv::NOT_READY;
use super::request::{Local, MAX_RDMA_SIZE, Operation};
use crate::place::Place;
use crate::wire::packet::{Acknowledgement, Header, Kind};

/// Writes that one card can have begun: more than all its queues hold are not honest.
const MAX_PARTIALS: usize = 1 << 20;
/// Packets taken from one connection before others have their turn.
const BURST: usize = 64;

impl Core {
    /// Takes what arrived on a connection. True when there was something.
    pub(crate) fn poll_connection(&mut self, at: u32) -> bool {
        let mut moved = false;
        for _ in 0..BURST {
            let Some(connection) = self.connections.get_mut(at) else { return moved };
            let Link::Shm(link) = &mut connection.link else { return moved };
            match link.rx.peek() {
                Ok(None) => break,
                Ok(Some((header, payload))) => {
                    self.receive(at, &header, payload);
                    moved = true;
                    if let Some(Link::Shm(link)) = self.connections.get_mut(at).map(|c| &mut c.link) {
                        link.rx.pop(header.len);
                    }
                }
                Err(_) => {
                    self.lose(at, CompStatus::LocalUnresponsiveRemote, "it sent a corrupt packet");
                    return true;
                }
            }
        }
        if moved {
            let now = self.clock_us;
            if let Some(connection) = self.connections.get_mut(at) {
                connection.heard_us = now;
                connection.responsive = true;
            }
        }
        moved
    }

    /// Deals with one packet, whose header is consistent and whose payload holds `header.len` bytes.
    pub(crate) fn receive(&mut self, at: u32, header: &Header, payload: *const u8) {
        match header.kind() {
            Some(Kind::Send) => self.receive_send(at, header, payload),
            Some(Kind::Write) => self.receive_write(at, header, payload),
            Some(Kind::Read) => self.receive_read(at, header),
            Some(Kind::Data) => self.receive_data(at, header, payload),
            Some(Kind::Ack) => self.receive_ack(at, Acknowledgement { token: header.token, status: header.status }),
            Some(Kind::Abort) => {
                if let Some(connection) = self.connections.get_mut(at) {
                    connection.partials.remove(&header.token);
                }
            }
            // The message wire deals with these itself; no other has them.
            Some(Kind::Hello | Kind::Welcome | Kind::Acks) | None => {}
        }
    }

    /// The other side has dealt with a request.
    pub(crate) fn receive_ack(&mut self, at: u32, ack: Acknowledgement) {
        let token = Token(ack.token);
        let Some(entry) = self.outstanding(token).filter(|entry| entry.connection == Some(at)) else { return };
        // A read ends with data.
        let lie = entry.request.operation == Operation::Read && ack.status == OK;
        let status = if lie { CompStatus::RemoteBadStatus.raw() } else { ack.status };
        if !(status == NOT_READY && self.retry_send(token)) {
            self.answered(token, status);
        }
    }

    /// The other side has answered a request, with data or with a refusal.
    fn answered(&mut self, token: Token, status: u8) {
        if status != OK {
            self.report_refusal(token, status);
        }
        self.finish(token, status);
    }

    /// The protection domain of the queue pair that a packet is for.
    pub(crate) fn addressed(&mut self, header: &Header, what: &str) -> Result<u32, CompStatus> {
        let qp = self.qp(header.dst_qpn).filter(|qp| qp.enabled);
        let rule = match qp {
            None => "no open queue pair has that number",
            Some(qp) if qp.qkey != header.qkey => "the queue pair has another QKey",
            Some(qp) if qp.state == State::Error => "the queue pair is in the error state",
            Some(qp) => return Ok(qp.pd),
        };
        self.say(format_args!("a {what} for QP {} with QKey {:#x} was refused: {rule}", header.dst_qpn, header.qkey));
        Err(CompStatus::RemoteBadDestQpn)
    }

    /// Whether the one who asks may, and where the memory is.
    fn check_remote(&mut self, at: u32, header: &Header, write: bool) -> Result<(Place, u16), CompStatus> {
        let known = self.connections.get(at).is_some_and(|c| c.known || matches!(c.link, Link::Loopback));
        let pd = self.addressed(header, if write { "write" } else { "read" })?;
        if !known {
            self.say(format_args!(
                "a request for QP {} was refused: this card has no address handle for the one who asks; insert its \
                 address before it may start",
                header.dst_qpn
            ));
            return Err(CompStatus::RemoteUnknownPeer);
        }
        let found = if header.total > MAX_RDMA_SIZE {
            Err(super::region::AccessError::Bounds)
        } else {
            self.regions.remote(pd, header.rkey, header.addr, header.total, write)
        };
        found.map(|to| (to, header.dst_qpn)).map_err(|error| {
            self.say(format_args!(
                "a {} of {} bytes at {:#x} with rkey {:#x} for QP {} was refused: {error}",
                if write { "write" } else { "read" },
                header.total,
                header.addr,
                header.rkey,
                header.dst_qpn
            ));
            CompStatus::RemoteBadAddress
        })
    }

    fn receive_write(&mut self, at: u32, header: &Header, payload: *const u8) {
        let whole = header.len == header.total;
        // A write that was refused is not looked at again: one line, one status.
        let refused = if whole {
            None
        } else {
            let partials = self.connections.get(at).map(|c| &c.partials);
            partials.and_then(|p| p.get(&header.token)).map(|p| p.status).filter(|s| *s != OK)
        };
        let status = match refused {
            Some(status) => status,
            None => match self.check_remote(at, header, true) {
                Ok((to, _)) => {
                    let to = to.after(header.offset.into());
                    // SAFETY: `check_remote` found all `total` bytes of the request in one region, this piece lies
                    // within them, and the payload holds `len` bytes until the caller gives it back.
                    match unsafe { to.write(payload, header.len as usize) } {
                        Ok(()) => OK,
                        Err(error) => {
                            self.say(format_args!("a write cannot be done: {error}"));
                            CompStatus::RemoteBadAddress.raw()
                        }
                    }
                }
                Err(status) => status.raw(),
            },
        };
        let status = if whole {
            status
        } else {
            let Some(connection) = self.connections.get_mut(at) else { return };
            if connection.partials.len() >= MAX_PARTIALS && !connection.partials.contains_key(&header.token) {
                self.lose(at, CompStatus::LocalUnresponsiveRemote, "it began more writes than a card can have");
                return;
            }
            let partial = match connection.partials.entry(header.token) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(Partial { missing: header.total, status: OK }),
            };
            partial.missing = partial.missing.saturating_sub(header.len);
            if partial.status == OK {
                partial.status = status;
            }
            if partial.missing > 0 {
                return;
            }
            let status = partial.status;
            connection.partials.remove(&header.token);
            status
        };
        if status == OK {
            self.tick(header.dst_qpn, Event::RemoteWrite, false);
            if header.immediate().is_some() {
                self.push_unsolicited(at, header);
            }
        }
        self.answer(at, Header { status, ..Header::new(Kind::Ack, header.token) });
    }

    fn receive_read(&mut self, at: u32, header: &Header) {
        match self.check_remote(at, header, false) {
            Ok(_) => {
                if let Some(connection) = self.connections.get_mut(at) {
                    connection.serving.push_back(Serving { header: *header, sent: 0 });
                }
            }
            Err(status) => {
                let total = header.total;
                self.answer(at, Header { status: status.raw(), total, ..Header::new(Kind::Data, header.token) });
            }
        }
    }

    fn receive_data(&mut self, at: u32, header: &Header, payload: *const u8) {
        let token = Token(header.token);
        let Some(qp) = self.qp(token.qpn()) else { return };
        let pd = qp.pd;
        let Some(entry) = qp.get(token).filter(|entry| entry.connection == Some(at)) else { return };
        let request = entry.request;
        if request.operation != Operation::Read {
            return;
        }
        if header.status != OK {
            self.answered(token, header.status);
            return;
        }
        if header.total != request.len {
            self.answered(token, CompStatus::RemoteBadStatus.raw());
            return;
        }
        if header.len > 0 {
            let Local::Region { addr, lkey } = request.local else { return };
            match self.regions.local(pd, lkey, addr + u64::from(header.offset), header.len, true) {
                // SAFETY: the region holds `len` bytes there, and the payload holds as many.
                Ok(to) => match unsafe { to.write(payload, header.len as usize) } {
                    Ok(()) => {}
                    Err(error) => {
                        self.say(format_args!("what a read brought cannot be written: {error}"));
                        self.finish(token, CompStatus::LocalInvalidLkey.raw());
                        return;
                    }
                },
                Err(_) => {
                    self.finish(token, CompStatus::LocalInvalidLkey.raw());
                    return;
                }
            }
        }
        let Some(entry) = self.outstanding(token) else { return };
        entry.received = entry.received.saturating_add(header.len);
        if entry.received >= request.len {
            self.finish(token, OK);
        }
    }
}
