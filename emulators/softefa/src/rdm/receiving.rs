//! Messages from peers.

use std::cmp::Ordering;
use std::ffi::c_void;

use efa_dp_direct::cq::{RecvCqe, Sender};
use efa_dp_direct::wire::{CompStatus, SendOp};
use efa_dp_direct::wqe::{RemoteMem, Sge};
use ferrogin_libfabric::bindings as fi;

use super::super::bindings::Bindings;
use super::super::call::{Buffers, RecvCall};
use super::super::completion::{Entry, Failure};
use super::super::guard::Code;
use super::matching::{Receive, Space, Waiting, space_of};
use super::packet::{self, DATA, Head, Kind, RECEIPT, TAGGED};
use super::{Job, Rdm, pool};
use soft_nic::card::MAX_RDMA_SIZE;
use soft_nic::card::region::{Access, Keys};

/// Maximum number of messages kept for one peer that arrived before their turn. A correct peer has no more outstanding.
const MAX_EARLY: usize = 4096;

/// A message that arrived before its turn.
pub(super) type Early = Waiting;

/// A buffer that takes several messages.
#[derive(Debug)]
pub(super) struct Multi {
    /// The unused rest of the buffer.
    rest: Buffers,
    /// Messages that are being read into it.
    active: u32,
    /// The buffer takes no more messages.
    closed: bool,
}

/// A receive's completion, for when its message is complete.
#[derive(Debug, Clone, Copy)]
struct Outcome {
    entry: Entry,
    wanted: bool,
    multi: Option<u32>,
}

/// A message that is being read from its sender.
#[derive(Debug)]
pub(super) struct Fetch {
    outcome: Outcome,
    peer: u32,
    /// The sender's identifier for the message.
    id: u64,
    /// Outstanding reads.
    parts: u32,
    pub keys: Vec<Keys>,
    failure: Option<Failure>,
}

impl Rdm {
    pub(in super::super) fn recv(&mut self, bindings: &Bindings, call: &RecvCall) -> Result<(), Code> {
        let from = if bindings.caps & fi::FI_DIRECTED_RECV != 0 && call.from != fi::FI_ADDR_UNSPEC {
            Some(bindings.target(call.from)?.address)
        } else {
            None
        };
        let (tag, ignore) = call.tag.unwrap_or((0, 0));
        let mut receive = Receive {
            buffers: call.buffers,
            context: call.context,
            from,
            tag,
            ignore,
            wanted: bindings.recv.wants(call.flags, false),
            multi: None,
        };
        let space = usize::from(call.tag.is_some());
        if call.flags & (fi::FI_PEEK | fi::FI_CLAIM | fi::FI_DISCARD) != 0 {
            return self.peek(bindings, call, space, receive);
        }
        if call.flags & fi::FI_MULTI_RECV != 0 {
            if call.buffers.segments().len() != 1 || space == 1 {
                return Err(Code::INVAL);
            }
            let multi = Multi { rest: call.buffers, active: 0, closed: false };
            receive.multi = Some(self.multis.insert(multi));
        }
        loop {
            let Some(at) = self.spaces[space].find_message(&receive) else {
                self.spaces[space].post(receive);
                break;
            };
            let Some(message) = self.spaces[space].take_message(at) else { break };
            let multi = receive.multi;
            let outcome = self.outcome(bindings, &receive, &message.head);
            self.begin(bindings, &message.head, &message.payload, outcome);
            // A multi-receive buffer takes messages until it is full.
            match multi {
                Some(multi) if self.multis.get(multi).is_some_and(|m| !m.closed) => {}
                _ => break,
            }
        }
        self.run_jobs();
        Ok(())
    }

    /// `FI_PEEK`, `FI_CLAIM`, `FI_DISCARD`: reports an unexpected message, keeps it for the caller, or drops it.
    fn peek(&mut self, bindings: &Bindings, call: &RecvCall, space: usize, receive: Receive) -> Result<(), Code> {
        let has = |flag: u64| call.flags & flag != 0;
        if space == 0 || has(fi::FI_CLAIM) && has(fi::FI_DISCARD) && has(fi::FI_PEEK) {
            return Err(Code::INVAL);
        }
        let kind = fi::FI_RECV | fi::FI_TAGGED;
        if !has(fi::FI_PEEK) {
            // A claimed message is received or discarded.
            let at = self.claimed.iter().position(|(context, _)| *context == call.context).ok_or(Code::INVAL)?;
            let (_, message) = self.claimed.swap_remove(at);
            if has(fi::FI_DISCARD) {
                self.discard(bindings, &message);
                let entry = Entry { tag: message.head.tag, ..Entry::new(call.context, kind) };
                bindings.report_received(receive.wanted, entry);
            } else {
                let outcome = self.outcome(bindings, &receive, &message.head);
                self.begin(bindings, &message.head, &message.payload, outcome);
            }
            self.run_jobs();
            return Ok(());
        }
        self.progress(bindings);
        let found = self.spaces[space].find_message(&receive);
        let Some(head) = found.and_then(|at| self.spaces[space].message(at)).map(|message| message.head) else {
            let failure = Some(Failure::of_code(fi::FI_ENOMSG));
            bindings.report_received(true, Entry { tag: receive.tag, failure, ..Entry::new(call.context, kind) });
            return Ok(());
        };
        let entry = Entry { len: head.len as usize, ..self.entry(bindings, call.context, &head) };
        if has(fi::FI_CLAIM | fi::FI_DISCARD)
            && let Some(message) = found.and_then(|at| self.spaces[space].take_message(at))
        {
            if has(fi::FI_DISCARD) {
                self.discard(bindings, &message);
            } else {
                self.claimed.push((call.context, message));
            }
        }
        bindings.report_received(receive.wanted, entry);
        self.run_jobs();
        Ok(())
    }

    /// Drops a message, and sends its sender the receipt.
    fn discard(&mut self, bindings: &Bindings, message: &Waiting) {
        if message.head.flags & RECEIPT != 0
            && let Ok(peer) = self.peer(bindings, message.head.from)
        {
            self.tell(bindings, peer, Kind::Done, message.head.id, 0);
        }
    }

    /// Returns the entry of a message that goes to a receive with this context.
    fn entry(&self, bindings: &Bindings, context: *mut c_void, head: &Head) -> Entry {
        let kind = if head.flags & TAGGED != 0 { fi::FI_TAGGED } else { fi::FI_MSG };
        let data_flag = if head.flags & DATA != 0 { fi::FI_REMOTE_CQ_DATA } else { 0 };
        Entry {
            data: head.data,
            tag: head.tag,
            source: bindings.av.find(&head.from).unwrap_or(fi::FI_ADDR_NOTAVAIL),
            ..Entry::new(context, fi::FI_RECV | kind | data_flag)
        }
    }

    /// Returns a message's buffers and its completion.
    fn outcome(&mut self, bindings: &Bindings, receive: &Receive, head: &Head) -> (Buffers, Outcome) {
        let mut entry = self.entry(bindings, receive.context, head);
        let mut buffers = receive.buffers;
        let total = usize::try_from(head.len).unwrap_or(usize::MAX);
        let min = self.min_multi_recv;
        if let Some(multi) = receive.multi.and_then(|multi| self.multis.get_mut(multi)) {
            buffers = multi.rest.part(0, total);
            let left = multi.rest.len() - buffers.len();
            entry.buf = multi.rest.start();
            multi.rest = multi.rest.part(buffers.len(), left);
            multi.closed = left < min.max(1);
            multi.active += 1;
        } else {
            entry.buf = buffers.start();
        }
        entry.len = total.min(buffers.len());
        if total > entry.len {
            entry.failure = Some(Failure { olen: total - entry.len, ..Failure::of_code(fi::FI_ETRUNC) });
        }
        (buffers, Outcome { entry, wanted: receive.wanted, multi: receive.multi })
    }

    /// Copies or reads a message into the buffers of its receive.
    fn begin(&mut self, bindings: &Bindings, head: &Head, payload: &[u8], (buffers, outcome): (Buffers, Outcome)) {
        if head.kind == Kind::Eager {
            // SAFETY: the application keeps the buffers of a receive writable until the receive completes
            // (`fi_msg(3)`).
            unsafe { buffers.scatter(payload) };
            if head.flags & RECEIPT != 0
                && let Ok(peer) = self.peer(bindings, head.from)
            {
                self.tell(bindings, peer, Kind::Done, head.id, 0);
            }
            self.finish_receive(bindings, outcome);
            return;
        }
        let Ok(peer) = self.peer(bindings, head.from) else { return };
        let fetch = Fetch { outcome, peer, id: head.id, parts: 0, keys: Vec::new(), failure: None };
        let at = self.fetches.insert(fetch);
        if self.plan(bindings, at, payload, &buffers).is_err()
            && let Some(fetch) = self.fetches.get_mut(at)
        {
            fetch.failure = Some(Failure::of_code(fi::FI_ENOMEM));
        }
        if self.fetches.get(at).is_some_and(|fetch| fetch.parts == 0) {
            self.end_fetch(bindings, at);
        }
    }

    /// Plans one read for each range that is contiguous on both sides.
    fn plan(&mut self, bindings: &Bindings, at: u32, payload: &[u8], buffers: &Buffers) -> Result<(), Code> {
        let buffers_there = packet::remote_buffers(payload).ok_or(Code::INVAL)?;
        let fetch = self.fetches.get_mut(at).ok_or(Code::INVAL)?;
        let mut local = Vec::new();
        for segment in buffers.segments().iter().filter(|s| s.len > 0) {
            let lkey = match segment.lkey {
                Some(lkey) => lkey,
                None => {
                    let access = Access { local_write: true, ..Access::default() };
                    let keys = pool::register(&bindings.card, bindings.pd, segment.addr, segment.len, access)?;
                    fetch.keys.push(keys);
                    keys.lkey
                }
            };
            local.push((segment.addr as u64, segment.len as u64, lkey));
        }
        let mut remote = buffers_there.iter().map(|buffer| (buffer.addr.get(), buffer.len.get(), buffer.rkey.get()));
        let mut from = remote.next();
        for (mut addr, mut len, lkey) in local {
            while len > 0 {
                let Some((from_addr, from_len, rkey)) = from.as_mut().filter(|(_, len, _)| *len > 0) else {
                    from = remote.next();
                    if from.is_none() {
                        return Ok(());
                    }
                    continue;
                };
                let n = len.min(*from_len).min(u64::from(MAX_RDMA_SIZE));
                self.jobs.push_back(Job::Fetch {
                    peer: fetch.peer,
                    fetch: at,
                    from: RemoteMem { addr: *from_addr, rkey: *rkey },
                    into: Sge { addr, length: n as u32, lkey },
                });
                fetch.parts += 1;
                (addr, len) = (addr + n, len - n);
                (*from_addr, *from_len) = (from_addr.wrapping_add(n), *from_len - n);
            }
        }
        Ok(())
    }

    /// Handles the end of a read.
    pub(super) fn fetched(&mut self, bindings: &Bindings, at: u32, failure: Option<Failure>) {
        let Some(fetch) = self.fetches.get_mut(at) else { return };
        fetch.parts -= 1;
        fetch.failure = fetch.failure.or(failure);
        if fetch.parts == 0 {
            self.end_fetch(bindings, at);
        }
    }

    fn end_fetch(&mut self, bindings: &Bindings, at: u32) {
        let Some(mut fetch) = self.fetches.remove(at) else { return };
        self.release(bindings, &fetch.keys);
        let status = if fetch.failure.is_some() { CompStatus::RemoteAbort } else { CompStatus::Ok };
        self.tell(bindings, fetch.peer, Kind::Done, fetch.id, u64::from(status.raw()));
        fetch.outcome.entry.failure = fetch.failure.or(fetch.outcome.entry.failure);
        self.finish_receive(bindings, fetch.outcome);
    }

    /// Lets a multi-receive buffer take no more messages. Returns true if none is being read into it, so that the
    /// buffer is the application's again; otherwise the completion of the last of them says so.
    pub(super) fn close_multi(&mut self, at: u32) -> bool {
        let Some(multi) = self.multis.get_mut(at) else { return false };
        multi.closed = true;
        multi.active == 0 && self.multis.remove(at).is_some()
    }

    fn finish_receive(&mut self, bindings: &Bindings, outcome: Outcome) {
        let Outcome { mut entry, mut wanted, multi } = outcome;
        if let Some(at) = multi
            && let Some(multi) = self.multis.get_mut(at)
        {
            multi.active -= 1;
            if multi.closed && multi.active == 0 {
                self.multis.remove(at);
                entry.flags |= fi::FI_MULTI_RECV;
                // This entry returns the buffer to the application.
                wanted = true;
            }
        }
        bindings.report_received(wanted, entry);
    }

    /// Handles a receive completion. Returns true if the buffer was reposted.
    pub(super) fn received(&mut self, bindings: &Bindings, cqe: &RecvCqe) -> bool {
        if cqe.op == Ok(SendOp::RdmaWrite) {
            let source = match cqe.sender {
                Sender::Ah(ahn) => bindings.av.reverse(ahn, cqe.src_qp_num),
                Sender::Gid(_) => None,
            };
            if let (Some(queue), Some(data)) = (&bindings.recv.queue, cqe.imm) {
                let flags = fi::FI_RMA | fi::FI_REMOTE_WRITE | fi::FI_REMOTE_CQ_DATA;
                let source = source.unwrap_or(fi::FI_ADDR_NOTAVAIL);
                let entry = Entry::new(std::ptr::null_mut(), flags);
                queue.push(Entry { len: cqe.length as usize, data: data.into(), source, ..entry });
            }
            return false;
        }
        if !cqe.status.is_ok() {
            // The queue pair failed and receives nothing from now on. The card logged the reason.
            return false;
        }
        let buffer = cqe.req_id;
        // SAFETY: the card has completed this receive, and the buffer is posted again only below.
        let bytes = unsafe { self.receives.filled(buffer, cqe.length as usize) };
        if let Some(card) = self.sender_card(bindings, &cqe.sender)
            && let Some((head, payload)) = Head::parse(bytes, card, cqe.src_qp_num)
            && let Ok(peer) = self.peer(bindings, head.from)
        {
            match head.kind {
                Kind::Ping => {}
                Kind::Done | Kind::Eager | Kind::Rendezvous => self.in_turn(bindings, peer, head, payload),
            }
        }
        self.post_receive(buffer);
        true
    }

    /// Handles a message or a receipt if it is its turn, or else keeps it until then. So a reply is reported after the
    /// message that it answers, however the card reorders packets.
    fn in_turn(&mut self, bindings: &Bindings, peer: u32, head: Head, payload: &[u8]) {
        let Some(entry) = self.peers.get_mut(peer) else { return };
        match (head.seq.wrapping_sub(entry.next_from) as i32).cmp(&0) {
            // A duplicate of a message that was delivered.
            Ordering::Less => return,
            Ordering::Greater => {
                if entry.early.len() < MAX_EARLY {
                    entry.early.insert(head.seq, Early { head, payload: payload.to_vec() });
                }
                return;
            }
            Ordering::Equal => entry.next_from = entry.next_from.wrapping_add(1),
        }
        self.take(bindings, peer, &head, payload);
        while let Some(entry) = self.peers.get_mut(peer) {
            let Some(early) = entry.early.remove(&entry.next_from) else { break };
            entry.next_from = entry.next_from.wrapping_add(1);
            self.take(bindings, peer, &early.head, &early.payload);
        }
    }

    fn take(&mut self, bindings: &Bindings, peer: u32, head: &Head, payload: &[u8]) {
        match head.kind {
            Kind::Done => self.receipt_came(bindings, peer, head),
            _ => self.deliver(bindings, head, payload),
        }
    }

    /// Matches a message with a receive, or keeps it.
    fn deliver(&mut self, bindings: &Bindings, head: &Head, payload: &[u8]) {
        let space = space_of(head);
        let Some(at) = self.spaces[space].find_receive(head) else {
            self.spaces[space].keep(*head, payload);
            return;
        };
        let receive = match self.spaces[space].receive(at).map(|receive| receive.multi) {
            Some(None) => self.spaces[space].take_receive(at),
            _ => None,
        };
        match receive {
            Some(receive) => {
                let outcome = self.outcome(bindings, &receive, head);
                self.begin(bindings, head, payload, outcome);
            }
            None => self.deliver_to_multi(bindings, space, at, head, payload),
        }
    }

    fn deliver_to_multi(&mut self, bindings: &Bindings, space: usize, at: usize, head: &Head, payload: &[u8]) {
        let mut held = Space::default();
        std::mem::swap(&mut held, &mut self.spaces[space]);
        let outcome = held.receive(at).map(|receive| self.outcome(bindings, receive, head));
        let Some((buffers, outcome)) = outcome else {
            self.spaces[space] = held;
            return;
        };
        if outcome.multi.and_then(|multi| self.multis.get(multi)).is_none_or(|multi| multi.closed) {
            held.take_receive(at);
        }
        self.spaces[space] = held;
        self.begin(bindings, head, payload, (buffers, outcome));
    }
}
