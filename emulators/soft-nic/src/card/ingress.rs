//! Ingress: turns packets into bytes in memory, counts and answers.
#![allow(unsafe_code)]

use std::collections::hash_map::Entry;

use efa_dp_direct::wire::CompStatus;

use super::complete::OK;
use super::connection::{Partial, Serving, Transport};
use super::core::Core;
use super::counter::Event;
use super::qp::{State, Token};
use super::recv_queue::NOT_READY;
use super::request::{Local, MAX_RDMA_SIZE, Operation};
use crate::location::Location;
use crate::wire::packet::{Header, Kind};

/// Maximum number of one peer's unfinished writes. All queues of a correct peer together hold fewer requests.
const MAX_PARTIALS: usize = 1 << 20;
/// Packets taken from one connection before the next connection is polled.
const BURST: usize = 64;

impl Core {
    /// Handles the packets that arrived on a connection. Returns true if there were any.
    pub(crate) fn poll_connection(&mut self, at: u32) -> bool {
        let mut left = BURST;
        while left > 0 && self.packets_arrived(at) {
            // The other card sent its acknowledgements, on this card's own connection, before the requests just seen
            // here. Those may be replies, so handle the acknowledgements first.
            let opposite = self.connections.get(at).filter(|c| c.accepted).and_then(|c| c.opposite);
            if let Some(opposite) = opposite.filter(|opposite| self.packets_arrived(*opposite)) {
                self.take_packets(opposite, usize::MAX);
            }
            left -= self.take_packets(at, left);
        }
        left < BURST
    }

    /// Handles what has arrived on all connections.
    pub(crate) fn take_arrived(&mut self) {
        for at in 0..self.connections.bound() {
            self.poll_socket(at);
            self.take_arrived_on(at);
        }
    }

    /// Handles what has arrived on a connection, and no more, even if the other card keeps sending.
    pub(crate) fn take_arrived_on(&mut self, at: u32) {
        let opposite = self.connections.get(at).filter(|c| c.accepted).and_then(|c| c.opposite);
        let seen = self.packets_arrived(at);
        if let Some(opposite) = opposite.filter(|opposite| seen && self.packets_arrived(*opposite)) {
            self.take_packets(opposite, usize::MAX);
        }
        if seen {
            self.take_packets(at, usize::MAX);
        }
    }

    /// Returns whether packets have arrived on a connection.
    fn packets_arrived(&mut self, at: u32) -> bool {
        match self.connections.get_mut(at).map(|connection| &mut connection.transport) {
            Some(Transport::Shm(rings)) => rings.rx.packets_arrived(),
            Some(Transport::Tcp(stream)) => stream.packets_arrived(),
            _ => false,
        }
    }

    /// Handles up to `most` packets that were seen on a connection. Returns how many it handled.
    fn take_packets(&mut self, at: u32, most: usize) -> usize {
        let mut taken = 0;
        while taken < most {
            let Some(connection) = self.connections.get_mut(at) else { return taken };
            let next = match &mut connection.transport {
                Transport::Shm(rings) => rings.rx.peek(),
                Transport::Tcp(stream) => stream.peek(),
                _ => return taken,
            };
            match next {
                Ok(None) => break,
                Ok(Some((header, payload))) => {
                    self.receive(at, &header, payload);
                    taken += 1;
                    match self.connections.get_mut(at).map(|c| &mut c.transport) {
                        Some(Transport::Shm(rings)) => rings.rx.pop(header.len),
                        Some(Transport::Tcp(stream)) => stream.pop(header.len),
                        _ => {}
                    }
                }
                Err(_) => {
                    self.lose(at, CompStatus::LocalUnresponsiveRemote, "it sent a corrupt packet");
                    return taken + 1;
                }
            }
        }
        let now = self.clock_us;
        if let Some(connection) = self.connections.get_mut(at).filter(|_| taken > 0) {
            connection.heard_us = now;
            connection.responsive = true;
        }
        taken
    }

    /// Handles one packet, whose header is consistent and whose payload holds `header.len` bytes.
    pub(crate) fn receive(&mut self, at: u32, header: &Header, payload: *const u8) {
        self.statistics.received(header.len);
        match header.kind() {
            Some(Kind::Send) => self.receive_send(at, header, payload),
            Some(Kind::Write) => self.receive_write(at, header, payload),
            Some(Kind::Read) => self.receive_read(at, header),
            Some(Kind::Data) => self.receive_data(at, header, payload),
            Some(Kind::Ack) => self.receive_ack(at, header),
            Some(Kind::Abort) => {
                if let Some(connection) = self.connections.get_mut(at) {
                    connection.partials.remove(&header.token);
                }
            }
            None => {}
        }
    }

    /// Handles the acknowledgement of a request.
    fn receive_ack(&mut self, at: u32, ack: &Header) {
        let token = Token(ack.token);
        // Datagrams completed when they were sent.
        let Some(qp) = self.qp(token.qpn()).filter(|qp| !qp.datagrams) else { return };
        let Some(entry) = qp.get(token).filter(|entry| entry.connection == Some(at)) else { return };
        // A read ends with data, so an acknowledgement of success is invalid.
        let invalid = entry.request.operation == Operation::Read && ack.status == OK;
        let status = if invalid { CompStatus::RemoteBadStatus.raw() } else { ack.status };
        if !(status == NOT_READY && self.retry_send(token)) {
            self.complete_answered(token, status);
        }
    }

    /// Completes a request that the peer has answered or refused.
    fn complete_answered(&mut self, token: Token, status: u8) {
        if status != OK {
            self.report_refusal(token, status);
        }
        self.finish(token, status);
    }

    /// Returns the protection domain of the queue pair that a packet is for.
    pub(crate) fn target_domain(&mut self, header: &Header, what: &str) -> Result<u32, CompStatus> {
        let qp = self.qp(header.dst_qpn).filter(|qp| qp.enabled);
        let rule = match qp {
            None => "no open queue pair has that number",
            Some(qp) if qp.qkey != header.qkey => "the queue pair has another QKey",
            Some(qp) if qp.state == State::Error => "the queue pair is in the error state",
            Some(qp) => return Ok(qp.pd),
        };
        self.log_of(
            header.dst_qpn,
            rule,
            format_args!("a {what} for QP {} with QKey {:#x} was refused: {rule}", header.dst_qpn, header.qkey),
        );
        Err(CompStatus::RemoteBadDestQpn)
    }

    /// Checks a peer's request for memory, and finds the memory.
    fn check_remote(&mut self, at: u32, header: &Header, write: bool) -> Result<(Location, u16), CompStatus> {
        let known =
            self.connections.get(at).is_some_and(|c| c.has_handle || matches!(c.transport, Transport::Loopback));
        let pd = self.target_domain(header, if write { "write" } else { "read" })?;
        if !known {
            self.log_of(
                header.dst_qpn,
                "no address handle",
                format_args!(
                    "a request for QP {} was refused: this card has no address handle for the sender; insert the \
                 sender's address before it posts",
                    header.dst_qpn
                ),
            );
            return Err(CompStatus::RemoteUnknownPeer);
        }
        let found = if header.total > MAX_RDMA_SIZE {
            Err(super::region::AccessError::Bounds)
        } else {
            self.regions.remote(pd, header.rkey, header.addr, header.total, write)
        };
        found.map(|to| (to, header.dst_qpn)).map_err(|error| {
            self.log_of(
                header.dst_qpn,
                &error.to_string(),
                format_args!(
                    "a {} of {} bytes at {:#x} with rkey {:#x} for QP {} was refused: {error}",
                    if write { "write" } else { "read" },
                    header.total,
                    header.addr,
                    header.rkey,
                    header.dst_qpn
                ),
            );
            CompStatus::RemoteBadAddress
        })
    }

    fn receive_write(&mut self, at: u32, header: &Header, payload: *const u8) {
        let whole = header.len == header.total;
        // The remaining packets of a refused write are not checked again, so that the write gets one log line and one
        // status.
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
                    // SAFETY: `check_remote` found all `total` bytes of the request in one region, `is_consistent`
                    // keeps this packet within them, and the wire keeps `len` payload bytes until this call returns.
                    match unsafe { to.write(payload, header.len as usize) } {
                        Ok(()) => OK,
                        Err(error) => {
                            self.log(format_args!("a write into GPU memory failed: {error}"));
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
                self.lose(at, CompStatus::LocalUnresponsiveRemote, "it began more writes than a card has requests");
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
        let receive = match header.immediate() {
            Some(_) if status == OK => self.take_receive_of_write(header.dst_qpn).map(Some),
            _ => Ok(None),
        };
        let status = receive.err().map_or(status, CompStatus::raw);
        if status == OK {
            self.statistics.rdma_write_recv_bytes += u64::from(header.total);
            self.tick(header.dst_qpn, Event::RemoteWrite, false);
            self.check_arrived(at, header, Event::RemoteWrite);
            if header.immediate().is_none() {
                self.trace_counted(at, header, Event::RemoteWrite);
            }
        }
        if let Ok(Some(receive)) = receive {
            self.report_write(at, header, receive);
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
            self.complete_answered(token, header.status);
            return;
        }
        if header.total != request.len {
            self.complete_answered(token, CompStatus::RemoteBadStatus.raw());
            return;
        }
        if header.len > 0 {
            let Local::Region { addr, lkey } = request.local else { return };
            match self.regions.local(pd, lkey, addr + u64::from(header.offset), header.len, true) {
                // SAFETY: `Regions::local` found `len` writable bytes at `to`, and the wire keeps that many payload
                // bytes.
                Ok(to) => match unsafe { to.write(payload, header.len as usize) } {
                    Ok(()) => {}
                    Err(error) => {
                        self.log(format_args!("the data of a read cannot be written: {error}"));
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
