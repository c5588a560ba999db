//! Egress: turns requests, answers and read data into packets.
#![allow(unsafe_code)]

use std::ptr;

use efa_dp_direct::wire::CompStatus;
use efa_dp_direct::wqe::Sge;

use super::complete::OK;
use super::connection::{Serving, Transport};
use super::core::Core;
use super::counter::Event;
use super::qp::Token;
use super::request::{Local, MAX_SEND_SIZE, Operation};
use crate::location::Location;
use crate::wire::packet::{HAS_IMM, Header, Kind};
use crate::wire::{ring, tcp};

/// Maximum payload of a packet in bytes, on any wire.
const MAX_PAYLOAD: u32 = 64 * 1024;
const _: () = assert!(MAX_PAYLOAD as usize <= ring::MAX_PAYLOAD && MAX_PAYLOAD as usize <= tcp::MAX_PAYLOAD);

/// Over TCP each write is a system call, so acknowledgements wait for a request to the same card, or for
/// [`QUIET_POLLS`] idle polls in a row: a program whose request was just answered often posts the next one at once.
/// After [`MAX_POLLS`] polls the card sends them anyway.
const QUIET_POLLS: u32 = 3;
pub(super) const MAX_POLLS: u32 = 16;

/// Returns an operation's packet kind.
fn kind_of(operation: Operation) -> Kind {
    match operation {
        Operation::Send => Kind::Send,
        Operation::Write => Kind::Write,
        Operation::Read => Kind::Read,
    }
}

/// The result of sending a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    Yes,
    /// The wire has no room now.
    Full,
    /// The connection is gone.
    Gone,
}

impl Core {
    /// Queues a request on the connection to its target.
    pub(crate) fn send(&mut self, token: Token) {
        let Some(ah) = self.outstanding(token).map(|o| o.request.meta.ah) else { return };
        match self.route(ah) {
            Ok(at) => {
                if let Some(entry) = self.outstanding(token) {
                    entry.connection = Some(at);
                }
                let now = self.clock_us;
                if let Some(connection) = self.connections.get_mut(at) {
                    if connection.waiting == 0 {
                        connection.heard_us = now;
                    }
                    connection.waiting += 1;
                    connection.requests.push_back(token);
                }
            }
            Err(status) => self.conclude(token, status),
        }
    }

    /// Sends a connection's queued packets while there is room. Returns true if a packet was sent.
    pub(crate) fn pump(&mut self, at: u32) -> bool {
        let Some(connection) = self.connections.get(at) else { return false };
        if !connection.has_work() || !connection.is_open() {
            return self.send_collected(at);
        }
        let mut moved = false;
        loop {
            let sent = self.pump_one(at);
            match sent {
                Some(Sent::Yes) => moved = true,
                Some(Sent::Full) | None => break,
                Some(Sent::Gone) => {
                    self.lose(at, CompStatus::LocalUnresponsiveRemote, "its wire no longer accepts packets");
                    return true;
                }
            }
        }
        self.send_collected(at) || moved
    }

    /// Flushes what the transport has collected. Returns true if anything was sent.
    fn send_collected(&mut self, at: u32) -> bool {
        let (quiet, polls) = (self.idle_polls, self.polls);
        let Some(connection) = self.connections.get_mut(at) else { return false };
        let waited = polls.wrapping_sub(connection.answers_since);
        let waits = connection.only_answers && quiet.min(waited) < QUIET_POLLS && waited < MAX_POLLS;
        connection.only_answers &= waits;
        let flushed = match Some(&mut connection.transport) {
            Some(Transport::Shm(rings)) => {
                rings.flush();
                Ok(false)
            }
            Some(Transport::Tcp(stream)) if !waits => stream.flush(),
            _ => Ok(false),
        };
        flushed.unwrap_or_else(|error| {
            self.fail(at, &error);
            true
        })
    }

    /// Sends one packet; `None` if nothing can be sent now.
    fn pump_one(&mut self, at: u32) -> Option<Sent> {
        let connection = self.connections.get_mut(at)?;
        if let Some(header) = connection.answers.front().copied() {
            let sent = self.emit(at, &header, ptr::null());
            if sent == Sent::Yes {
                self.connections.get_mut(at)?.answers.pop_front();
            }
            return Some(sent);
        }
        if let Some(serving) = connection.serving.front().copied() {
            return Some(self.serve(at, serving));
        }
        let token = *connection.requests.front()?;
        // A reply must not overtake the acknowledgement of the send that it answers.
        let opposite = connection.opposite.and_then(|opposite| self.connections.get(opposite));
        if opposite.is_some_and(|opposite| !opposite.answers.is_empty()) {
            return None;
        }
        Some(self.send_packet(at, token))
    }

    /// Sends the next packet of a request.
    fn send_packet(&mut self, at: u32, token: Token) -> Sent {
        let Some(qp) = self.qp(token.qpn()) else { return self.next_request(at) };
        let (pd, datagrams) = (qp.pd, qp.datagrams);
        let Some(entry) = qp.get(token) else { return self.next_request(at) };
        let (request, sent) = (entry.request, entry.sent);
        let mut header = Header {
            src_qpn: token.qpn(),
            dst_qpn: request.meta.dest_qp_num,
            qkey: request.meta.qkey,
            rkey: request.rkey,
            addr: request.remote_addr,
            total: request.len,
            flags: if request.imm.is_some() { HAS_IMM } else { 0 },
            imm: request.imm.unwrap_or(0),
            ..Header::new(kind_of(request.operation), token.0)
        };
        let mut payload = ptr::null();
        let inline;
        let mut gathered;
        if request.operation != Operation::Read {
            header.offset = sent;
            header.len = (request.len - sent).min(MAX_PAYLOAD);
            match request.local {
                Local::Inline(data) => {
                    inline = data;
                    payload = inline[..header.len as usize].as_ptr();
                }
                Local::Region { .. } | Local::Two(_) if header.len == 0 => {}
                Local::Two(sges) => {
                    gathered = [0; MAX_SEND_SIZE as usize];
                    if !self.gather(pd, &sges, &mut gathered) {
                        self.finish(token, CompStatus::LocalInvalidLkey.raw());
                        return self.next_request(at);
                    }
                    payload = gathered[..header.len as usize].as_ptr();
                }
                Local::Region { addr, lkey } => {
                    let source = self.regions.local(pd, lkey, addr + u64::from(sent), header.len, false);
                    match source.ok().and_then(|source| self.readable(source, header.len)) {
                        Some(source) => payload = source,
                        None => {
                            // The memory was deregistered after the request was checked.
                            if sent > 0 {
                                self.answer(at, Header::new(Kind::Abort, token.0));
                            }
                            self.finish(token, CompStatus::LocalInvalidLkey.raw());
                            return self.next_request(at);
                        }
                    }
                }
            }
        }
        let outcome = self.emit(at, &header, payload);
        if outcome != Sent::Yes {
            return outcome;
        }
        // Over loopback the answer may have arrived already.
        let done = match self.outstanding(token) {
            None => true,
            Some(entry) => {
                entry.sent = sent + header.len;
                entry.awaiting = request.operation == Operation::Read || entry.sent == request.len;
                entry.awaiting
            }
        };
        if done && datagrams {
            self.finish(token, OK);
        }
        if done { self.next_request(at) } else { Sent::Yes }
    }

    /// Copies a send's two buffers one after the other. Returns false if one is no longer registered.
    fn gather(&self, pd: u32, sges: &[Sge; 2], into: &mut [u8; MAX_SEND_SIZE as usize]) -> bool {
        let mut rest = &mut into[..];
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            let Ok(source) = self.regions.local(pd, sge.lkey, sge.addr, sge.length, false) else { return false };
            let Some((room, behind)) = rest.split_at_mut_checked(sge.length as usize) else { return false };
            // SAFETY: `Regions::local` found `length` bytes at `source`, and `room` has that many.
            if unsafe { source.read(room.as_mut_ptr(), room.len()) }.is_err() {
                return false;
            }
            rest = behind;
        }
        true
    }

    /// Returns an address where a packet's `len` bytes can be read until the next call. GPU memory is copied first.
    fn readable(&mut self, source: Location, len: u32) -> Option<*const u8> {
        if let Location::Host(at) = source {
            return Some(at);
        }
        self.staging.resize(MAX_PAYLOAD as usize, 0);
        let room = self.staging.get_mut(..len as usize)?;
        // SAFETY: the caller found `len` bytes at `source` in a region, and `room` has that many.
        match unsafe { source.read(room.as_mut_ptr(), room.len()) } {
            Ok(()) => Some(room.as_ptr()),
            Err(error) => {
                self.log(format_args!("memory of a request cannot be read: {error}"));
                None
            }
        }
    }

    fn next_request(&mut self, at: u32) -> Sent {
        if let Some(connection) = self.connections.get_mut(at) {
            connection.requests.pop_front();
        }
        Sent::Yes
    }

    /// Sends the next packet of a read's answer.
    fn serve(&mut self, at: u32, serving: Serving) -> Sent {
        let asked = serving.header;
        let mut header = Header { total: asked.total, offset: serving.sent, ..Header::new(Kind::Data, asked.token) };
        header.len = (asked.total - serving.sent).min(MAX_PAYLOAD);
        let pd = self.qp(asked.dst_qpn).map(|qp| qp.pd);
        let source = pd.and_then(|pd| {
            let (addr, len) = (asked.addr + u64::from(serving.sent), header.len);
            self.regions.remote(pd, asked.rkey, addr, len, false).ok()
        });
        let payload = match source.and_then(|source| self.readable(source, header.len)) {
            Some(source) => source,
            None => {
                // The queue pair was closed or the memory deregistered after the request was checked.
                (header.len, header.status) = (0, CompStatus::RemoteBadAddress.raw());
                ptr::null()
            }
        };
        let outcome = self.emit(at, &header, payload);
        if outcome == Sent::Yes {
            let sent = serving.sent + header.len;
            let done = sent == asked.total || header.status != OK;
            if done && header.status == OK {
                self.trace_served(at);
            }
            if let Some(connection) = self.connections.get_mut(at) {
                if done {
                    connection.serving.pop_front();
                } else if let Some(front) = connection.serving.front_mut() {
                    front.sent = sent;
                }
            }
            if done && header.status == OK {
                self.statistics.rdma_read_resp_bytes += u64::from(asked.total);
                self.tick(asked.dst_qpn, Event::RemoteRead, false);
            }
        }
        outcome
    }

    /// Queues an answer without payload.
    pub(crate) fn answer(&mut self, at: u32, header: Header) {
        if let Some(connection) = self.connections.get_mut(at) {
            connection.answers.push_back(header);
        }
    }

    /// Hands one packet to a connection's transport.
    fn emit(&mut self, at: u32, header: &Header, payload: *const u8) -> Sent {
        let Some(connection) = self.connections.get_mut(at) else { return Sent::Gone };
        let room = match &mut connection.transport {
            Transport::Loopback => {
                self.statistics.sent(header.len);
                self.receive(at, header, payload);
                return Sent::Yes;
            }
            // SAFETY: the caller found `header.len` payload bytes in a region or in a request. The card's lock, which
            // is held, keeps regions registered and requests in the table during the call.
            Transport::Shm(rings) => unsafe { rings.tx.push(header, payload) }.map_err(|_| ()),
            Transport::Tcp(stream) => {
                let is_answer = header.kind() == Some(Kind::Ack);
                if !stream.has_output() && is_answer {
                    (connection.only_answers, connection.answers_since) = (true, self.polls);
                }
                connection.only_answers &= is_answer;
                // SAFETY: as above; the stream copies them or gives them to the kernel.
                unsafe { stream.push(header, payload) }.map_err(|_| ())
            }
            Transport::Connecting | Transport::Accepting(_) => Ok(false),
        };
        match room {
            Ok(true) => {
                self.statistics.sent(header.len);
                Sent::Yes
            }
            Ok(false) => Sent::Full,
            Err(()) => Sent::Gone,
        }
    }

    /// Stops a closing queue pair's requests on one connection. The peer drops those that were partly sent.
    pub(crate) fn abort_on(&mut self, at: u32, qpn: u16) {
        let Some(qp) = self.qp(qpn) else { return };
        let tokens = qp.tokens_on(at);
        for token in tokens {
            let partly = self.outstanding(token).is_some_and(|e| e.sent > 0 && !e.awaiting);
            if partly {
                self.answer(at, Header::new(Kind::Abort, token.0));
            }
            if let Some(connection) = self.connections.get_mut(at) {
                connection.waiting = connection.waiting.saturating_sub(1);
            }
        }
    }
}
