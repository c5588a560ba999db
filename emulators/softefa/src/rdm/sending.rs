//! Messages to peers.

use std::ffi::c_void;

use ferrogin_libfabric::bindings as fi;

use zerocopy::IntoBytes;

use super::super::bindings::Bindings;
use super::super::call::{Segment, SendCall};
use super::super::completion::{Entry, Failure};
use super::super::guard::Code;
use super::packet::{DATA, Head, Kind, MAX_MESSAGE, RECEIPT, REMOTE_BUFFER_LEN, RemoteBuffer, TAGGED};
use super::{Rdm, pool};
use soft_nic::card::counter::Event;
use soft_nic::card::region::{Access, Keys};

/// An outstanding message.
#[derive(Debug)]
pub(super) struct Send {
    context: *mut c_void,
    flags: u64,
    len: usize,
    tag: u64,
    wanted: bool,
    pub peer: u32,
    pub keys: Vec<Keys>,
    /// The card has not completed the packet.
    packet: bool,
    /// The receiver's receipt is outstanding.
    receipt: bool,
    failure: Option<Failure>,
}

impl Send {
    /// Whether only the receiver's packets can continue the message.
    pub(super) fn awaits_receipt(&self) -> bool {
        self.receipt && !self.packet
    }
}

impl Rdm {
    pub(in super::super) fn send(&mut self, bindings: &Bindings, call: &SendCall) -> Result<(), Code> {
        let target = bindings.target(call.to)?;
        let len = call.buffers.len();
        if call.flags & fi::FI_INJECT != 0 && len > bindings.inject_size {
            return Err(Code::INVAL);
        }
        if self.room(bindings) == 0 {
            return Err(Code::AGAIN);
        }
        let peer = self.peer(bindings, target.address)?;
        let eager = len <= MAX_MESSAGE;
        let receipt = !eager || call.flags & (fi::FI_DELIVERY_COMPLETE | fi::FI_MATCH_COMPLETE) != 0;
        let (keys, remote) = if eager { (Vec::new(), Vec::new()) } else { expose(bindings, call)? };
        let seq = self.next_number(peer).ok_or(Code::OTHER)?;
        let kind = if call.tag.is_some() { fi::FI_TAGGED } else { fi::FI_MSG };
        let send = self.sends.insert(Send {
            context: call.context,
            flags: fi::FI_SEND | kind,
            len,
            tag: call.tag.unwrap_or(0),
            wanted: bindings.send.wants(call.flags, call.silent),
            peer,
            keys,
            packet: true,
            receipt,
            failure: None,
        });
        let flag = |is: bool, flag: u8| if is { flag } else { 0 };
        let head = Head {
            kind: if eager { Kind::Eager } else { Kind::Rendezvous },
            flags: flag(call.tag.is_some(), TAGGED) | flag(call.data.is_some(), DATA) | flag(receipt, RECEIPT),
            seq,
            from: bindings.address,
            len: len as u64,
            tag: call.tag.unwrap_or(0),
            data: call.data.unwrap_or(0),
            id: u64::from(send),
        };
        let payload = if eager { len } else { remote.len() * REMOTE_BUFFER_LEN };
        let posted = self.send_packet(peer, &head, payload, Some(send), |room| {
            if eager {
                // SAFETY: the application keeps the buffers of a call readable until the call returns (`fi_msg(3)`).
                unsafe { call.buffers.gather(room) };
            } else {
                room.copy_from_slice(remote.as_bytes());
            }
        });
        // With `FI_MORE` another call follows, and one doorbell serves both. If none follows, the next poll of a queue
        // rings.
        if call.flags & fi::FI_MORE == 0 {
            self.queue_pair.ring();
        }
        // `room` checked that there is a free buffer.
        if posted { Ok(()) } else { Err(Code::OTHER) }
    }

    /// Notes that the card has delivered a message's packet, or failed to.
    pub(super) fn packet_sent(&mut self, bindings: &Bindings, at: u32, failure: Option<Failure>) {
        let Some(send) = self.sends.get_mut(at) else { return };
        send.packet = false;
        if failure.is_some() {
            (send.failure, send.receipt) = (failure, false);
        }
        self.finish_send(bindings, at);
    }

    /// Notes that the receiver has the message, or failed to receive it.
    pub(super) fn receipt_came(&mut self, bindings: &Bindings, peer: u32, head: &Head) {
        let Ok(at) = u32::try_from(head.id) else { return };
        let Some(send) = self.sends.get_mut(at).filter(|send| send.peer == peer && send.receipt) else { return };
        send.receipt = false;
        if head.data != 0 {
            send.failure = Some(Failure::of_status(head.data as u8));
        }
        self.finish_send(bindings, at);
    }

    /// Fails the operations that wait for a dead peer.
    pub(super) fn peer_failed(&mut self, bindings: &Bindings, peer: u32, failure: Failure) {
        let waiting = self.sends.iter().filter(|(_, s)| s.peer == peer && s.awaits_receipt());
        for at in waiting.map(|(at, _)| at).collect::<Vec<_>>() {
            if let Some(send) = self.sends.get_mut(at) {
                (send.failure, send.receipt) = (Some(failure), false);
            }
            self.finish_send(bindings, at);
        }
    }

    fn finish_send(&mut self, bindings: &Bindings, at: u32) {
        if self.sends.get(at).is_none_or(|send| send.packet || send.receipt) {
            return;
        }
        let Some(send) = self.sends.remove(at) else { return };
        self.release(bindings, &send.keys);
        let entry =
            Entry { len: send.len, tag: send.tag, failure: send.failure, ..Entry::new(send.context, send.flags) };
        bindings.report_sent(Event::Send, send.wanted, entry);
    }
}

/// Registers a message's buffers for the peer to read.
fn expose(bindings: &Bindings, call: &SendCall) -> Result<(Vec<Keys>, Vec<RemoteBuffer>), Code> {
    let access = Access { remote_read: true, ..Access::default() };
    let (mut keys, mut remote) = (Vec::new(), Vec::new());
    for Segment { addr, len, .. } in call.buffers.segments().iter().filter(|s| s.len > 0) {
        match pool::register(&bindings.card, bindings.pd, *addr, *len, access) {
            Ok(new) => {
                keys.push(new);
                remote.push(RemoteBuffer::new(*addr as u64, *len as u64, new.rkey));
            }
            Err(code) => {
                pool::deregister(bindings, &keys);
                return Err(code);
            }
        }
    }
    Ok((keys, remote))
}
