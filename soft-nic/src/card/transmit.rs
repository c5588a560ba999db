//! The way out: requests, answers and data become packets.
#![allow(unsafe_code)]

use efa_dp_direct::wire::CompStatus;
use efa_dp_direct::wqe::Sge;
use ferrogin_datagram::SendError;

use super::complete::OK;
use super::connection::{Link, Serving};
use super::core::Core;
use super::counter::Event;
use super::qp::Token;
use super::request::{Local, MAX_SEND_SIZE, Operation};
use crate::place::Place;
use crate::wire::message::{self, Payload};
use crate::wire::packet::{Acknowledgement, HAS_IMM, Header, Kind};
use crate::wire::ring;

/// Most payload of a packet, on whatever wire.
const MAX_PAYLOAD: u32 = 64 * 1024;
const _: () = assert!(MAX_PAYLOAD as usize <= ring::MAX_PAYLOAD && MAX_PAYLOAD as usize <= message::MAX_PAYLOAD);

/// Where a packet is dear, answers wait for one that goes the same way anyhow, or for this many looks that found
/// nothing to do: whoever was just served mostly answers at once. But never for longer than so many looks in all.
const QUIET_LOOKS: u32 = 3;
pub(super) const MOST_LOOKS: u32 = 16;

/// What a request is on the wire.
fn kind_of(operation: Operation) -> Kind {
    match operation {
        Operation::Send => Kind::Send,
        Operation::Write => Kind::Write,
        Operation::Read => Kind::Read,
    }
}

/// What became of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    Yes,
    /// No room: later.
    Full,
    /// The connection is gone.
    Gone,
}

impl Core {
    /// Gives a request to the connection that leads to its target.
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
            Err(status) => self.finish(token, status.raw()),
        }
    }

    /// Sends what waits on a connection as far as there is room. True when something went out.
    pub(crate) fn pump(&mut self, at: u32) -> bool {
        let Some(connection) = self.connections.get(at) else { return false };
        if !connection.has_work() || !connection.is_open() {
            return false;
        }
        let mut moved = false;
        loop {
            let sent = self.pump_one(at);
            match sent {
                Some(Sent::Yes) => moved = true,
                Some(Sent::Full) | None => break,
                Some(Sent::Gone) => {
                    self.lose(at, CompStatus::LocalUnresponsiveRemote, "nothing can be sent to it any more");
                    return true;
                }
            }
        }
        if let Some(Link::Shm(link)) = self.connections.get_mut(at).map(|c| &mut c.link) {
            link.flush();
        }
        moved
    }

    /// One packet; `None` when nothing waits.
    fn pump_one(&mut self, at: u32) -> Option<Sent> {
        let (quiet, looks) = (self.quiet_looks, self.looks);
        let connection = self.connections.get_mut(at)?;
        let dear = matches!(connection.link, Link::Message { .. });
        if let Some(header) = connection.answers.front().copied() {
            let waited = looks.wrapping_sub(connection.answers_since);
            let enough = connection.answers.len() >= message::MAX_ACKS;
            if !dear || enough || quiet.min(waited) >= QUIET_LOOKS || waited >= MOST_LOOKS {
                let acks = dear && header.kind() == Some(Kind::Ack);
                let sent = self.emit(at, &if acks { Header::new(Kind::Acks, 0) } else { header }, Payload::Nothing);
                if sent == Sent::Yes && !acks {
                    self.connections.get_mut(at)?.answers.pop_front();
                }
                return Some(sent);
            }
        }
        if let Some(serving) = connection.serving.front().copied() {
            return Some(self.serve(at, serving));
        }
        let token = *connection.requests.front()?;
        Some(self.send_piece(at, token))
    }

    /// The next piece of a request.
    fn send_piece(&mut self, at: u32, token: Token) -> Sent {
        let Some(qp) = self.qp(token.qpn()) else { return self.next_request(at) };
        let pd = qp.pd;
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
        let mut payload = Payload::Nothing;
        let inline;
        let mut gathered;
        if request.operation != Operation::Read {
            header.offset = sent;
            header.len = (request.len - sent).min(MAX_PAYLOAD);
            match request.local {
                Local::Inline(data) => {
                    inline = data;
                    payload = Payload::Bytes(&inline[..header.len as usize]);
                }
                Local::Region { .. } | Local::Pair(_) if header.len == 0 => {}
                Local::Pair(pair) => {
                    gathered = [0; MAX_SEND_SIZE as usize];
                    if !self.gather(pd, &pair, &mut gathered) {
                        self.finish(token, CompStatus::LocalInvalidLkey.raw());
                        return self.next_request(at);
                    }
                    payload = Payload::Bytes(&gathered[..header.len as usize]);
                }
                Local::Region { addr, lkey } => {
                    let source = self.regions.local(pd, lkey, addr + u64::from(sent), header.len, false);
                    match source.ok().and_then(|source| self.readable(source, header.len)) {
                        Some(source) => payload = Payload::Memory(source),
                        None => {
                            // Deregistered since the request was checked.
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
        // Over loopback the answer may have come already.
        let done = match self.outstanding(token) {
            None => true,
            Some(entry) => {
                entry.sent = sent + header.len;
                entry.awaiting = request.operation == Operation::Read || entry.sent == request.len;
                entry.awaiting
            }
        };
        if done { self.next_request(at) } else { Sent::Yes }
    }

    /// Copies both buffers of a send, one after the other; false when one is no longer registered.
    fn gather(&self, pd: u32, pair: &[Sge; 2], into: &mut [u8; MAX_SEND_SIZE as usize]) -> bool {
        let mut rest = &mut into[..];
        for sge in pair.iter().filter(|sge| sge.length > 0) {
            let Ok(source) = self.regions.local(pd, sge.lkey, sge.addr, sge.length, false) else { return false };
            let Some((room, behind)) = rest.split_at_mut_checked(sge.length as usize) else { return false };
            // SAFETY: the region holds `length` bytes there, and `room` as many.
            if unsafe { source.read(room.as_mut_ptr(), room.len()) }.is_err() {
                return false;
            }
            rest = behind;
        }
        true
    }

    /// An address at which `len` bytes of a piece can be read until the next is looked for: of a GPU's a copy.
    fn readable(&mut self, source: Place, len: u32) -> Option<*const u8> {
        if let Place::Host(at) = source {
            return Some(at);
        }
        self.staging.resize(MAX_PAYLOAD as usize, 0);
        let room = self.staging.get_mut(..len as usize)?;
        // SAFETY: the region holds `len` bytes there, and `room` as many.
        match unsafe { source.read(room.as_mut_ptr(), room.len()) } {
            Ok(()) => Some(room.as_ptr()),
            Err(error) => {
                self.say(format_args!("memory that is to be sent cannot be read: {error}"));
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

    /// The next piece of the answer to a read.
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
            Some(source) => Payload::Memory(source),
            None => {
                // Closed or deregistered since the request was checked.
                (header.len, header.status) = (0, CompStatus::RemoteBadAddress.raw());
                Payload::Nothing
            }
        };
        let outcome = self.emit(at, &header, payload);
        if outcome == Sent::Yes {
            let sent = serving.sent + header.len;
            let done = sent == asked.total || header.status != OK;
            if let Some(connection) = self.connections.get_mut(at) {
                if done {
                    connection.serving.pop_front();
                } else if let Some(front) = connection.serving.front_mut() {
                    front.sent = sent;
                }
            }
            if done && header.status == OK {
                self.tick(asked.dst_qpn, Event::RemoteRead, false);
            }
        }
        outcome
    }

    /// Queues an answer without payload.
    pub(crate) fn answer(&mut self, at: u32, header: Header) {
        let looks = self.looks;
        if let Some(connection) = self.connections.get_mut(at) {
            if connection.answers.is_empty() {
                connection.answers_since = looks;
            }
            connection.answers.push_back(header);
        }
    }

    /// Hands one packet to the link.
    fn emit(&mut self, at: u32, header: &Header, payload: Payload<'_>) -> Sent {
        let Some(connection) = self.connections.get_mut(at) else { return Sent::Gone };
        let start = match payload {
            Payload::Nothing => std::ptr::null(),
            Payload::Bytes(bytes) => bytes.as_ptr(),
            Payload::Memory(at) => at,
        };
        match &mut connection.link {
            Link::Loopback => {
                self.receive(at, header, start);
                Sent::Yes
            }
            Link::Shm(link) => {
                // SAFETY: the payload was just found in a region or in a request, for `header.len` bytes, and the
                // card's lock keeps both as they are.
                match unsafe { link.tx.push(header, start) } {
                    Ok(true) => Sent::Yes,
                    Ok(false) => Sent::Full,
                    Err(_) => Sent::Gone,
                }
            }
            Link::Message { peer, .. } => {
                let Some(wire) = &mut self.messages else { return Sent::Gone };
                let mut acks = [Acknowledgement { token: 0, status: OK }; message::MAX_ACKS];
                let waiting = connection.answers.iter().take_while(|answer| answer.kind() == Some(Kind::Ack));
                let mut count = 0;
                for (ack, answer) in acks.iter_mut().zip(waiting) {
                    (ack.token, ack.status) = (answer.token, answer.status);
                    count += 1;
                }
                // SAFETY: as above.
                match unsafe { wire.send(*peer, header, payload, &acks[..count]) } {
                    Ok(()) => {
                        connection.answers.drain(..count);
                        Sent::Yes
                    }
                    Err(SendError::Full) => Sent::Full,
                    Err(SendError::Gone | SendError::TooLong) => Sent::Gone,
                }
            }
            Link::Dialing | Link::Accepting(_) => Sent::Full,
        }
    }

    /// A queue pair closes: what it has on a connection is not sent on, and what was sent in part is taken back.
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
