//! User-facing handles: channels and listeners.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::pending::{Awaited, Cancel, Pending};
use crate::proto::wire::Address;
use crate::proto::{OpenDone, Opened, ReadDone};
use crate::shared::{Request, Shared};
use crate::{ChannelError, Payload};

/// Identifies a read or a write, to cancel it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// An open channel: whole messages in both directions, in order. Clones refer to the same channel. When the last clone
/// is dropped, the channel closes once everything written has been sent.
#[derive(Clone)]
pub struct Channel(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    number: u32,
    peer: Arc<str>,
    max_write: usize,
    /// The channel went back to the engine, which keeps it without this handle.
    returned: bool,
}

impl Channel {
    pub(crate) fn opening(
        shared: &Arc<Shared>,
        done: impl FnOnce(Result<Self, ChannelError>) + Send + 'static,
    ) -> OpenDone {
        let shared = Arc::downgrade(shared);
        Box::new(move |result: Result<Opened, ChannelError>| {
            let result = result.and_then(|Opened { channel, peer, max_write }| {
                let shared = shared.upgrade().ok_or(ChannelError::Stopped)?;
                Ok(Self(Arc::new(Inner { shared, number: channel, peer, max_write, returned: false })))
            });
            done(result);
        })
    }

    /// Consumes the only handle without closing the channel, and returns its number. None if there are other handles.
    fn into_number(mut self) -> Option<u32> {
        let inner = Arc::get_mut(&mut self.0)?;
        inner.returned = true;
        Some(inner.number)
    }

    /// Returns the peer's endpoint in readable form, as in errors.
    pub fn peer(&self) -> &str {
        &self.0.peer
    }

    /// Returns the length of the longest message that can be written, in bytes.
    pub fn max_message(&self) -> usize {
        self.0.max_write
    }

    /// Writes one message. The reactor's thread calls `done` once, in the order of writes, with the buffer once it's no
    /// longer used, or with the error that ended the write. A refused write (too long, closed) calls back out of order.
    /// Getting the buffer back means that the message was sent, not that the peer has read it.
    pub fn write(
        &self,
        buffer: impl Into<Payload>,
        done: impl FnOnce(Result<Payload, ChannelError>) + Send + 'static,
    ) -> Ticket {
        let ticket = self.0.shared.ticket();
        self.write_as(ticket, buffer.into(), done);
        Ticket(ticket)
    }

    fn write_as(&self, ticket: u64, body: Payload, done: impl FnOnce(Result<Payload, ChannelError>) + Send + 'static) {
        let channel = self.0.number;
        self.0.shared.submit(Request::Write { channel, ticket, body, done: Box::new(done) });
    }

    /// Reads one message. The reactor's thread calls `done` once, in the order of reads, with the message or the error.
    pub fn read(&self, done: impl FnOnce(Result<Vec<u8>, ChannelError>) + Send + 'static) -> Ticket {
        self.read_into(Vec::new(), done)
    }

    /// Like [`Channel::read`], but into the memory of `buffer` if the message fits its capacity. The contents of
    /// `buffer` are lost.
    pub fn read_into(
        &self,
        buffer: Vec<u8>,
        done: impl FnOnce(Result<Vec<u8>, ChannelError>) + Send + 'static,
    ) -> Ticket {
        let ticket = self.0.shared.ticket();
        self.read_as(ticket, buffer, Box::new(move |result| done(result.map(|(_, bytes)| bytes))));
        Ticket(ticket)
    }

    fn read_as(&self, ticket: u64, buffer: Vec<u8>, done: ReadDone) {
        self.0.shared.submit(Request::Read { channel: self.0.number, ticket, buffer, done });
    }

    /// Cancels a read, or a write that hasn't started: its callback gets [`ChannelError::Cancelled`]. The message for a
    /// cancelled read goes to the next read. Finished operations and writes in flight are not affected.
    pub fn cancel(&self, Ticket(ticket): Ticket) {
        let channel = self.0.number;
        self.0.shared.request(move |engine| engine.cancel(channel, ticket));
    }

    /// [`Channel::write`] as a future, which a thread can also block on.
    pub fn send(&self, buffer: impl Into<Payload>) -> Pending<Payload> {
        let ticket = self.0.shared.ticket();
        let (pending, done) = Pending::new(self.awaited("take a message"), Cancel::Write(self.0.number, ticket));
        self.write_as(ticket, buffer.into(), done);
        pending
    }

    /// [`Channel::read`] as a future, which a thread can also block on.
    pub fn receive(&self) -> Pending<Vec<u8>> {
        self.receive_into(Vec::new())
    }

    /// [`Channel::read_into`] as a future, which a thread can also block on.
    pub fn receive_into(&self, buffer: Vec<u8>) -> Pending<Vec<u8>> {
        let ticket = self.0.shared.ticket();
        let cancel = Cancel::Read(self.0.number, ticket);
        let awaited = self.awaited("send a message");
        let (pending, done) = Pending::with_return(awaited, cancel, |shared, cancel, number, bytes| {
            if let Cancel::Read(channel, _) = cancel {
                shared.give_back(|engine| engine.return_message(channel, number, bytes));
            }
        });
        let done = |result| match result {
            Ok((number, bytes)) => done(Ok(bytes), number),
            Err(error) => done(Err(error), 0),
        };
        self.read_as(ticket, buffer, Box::new(done));
        pending
    }

    /// Closes the channel: ends reads at once, sends everything written so far, then the close, which the peer
    /// confirms. Aborts the channel if that takes longer than `limit`. The peer gets all messages before its reads end
    /// with [`ChannelError::Closed`].
    pub fn close(&self, limit: Duration) -> Pending<()> {
        let (pending, done) = Pending::new(self.awaited("confirm the close"), Cancel::Nothing);
        let channel = self.0.number;
        self.0.shared.request(move |engine| engine.close(channel, limit, Some(Box::new(done))));
        pending
    }

    /// True once the channel has ended for any reason. A close ends it when the peer confirms, or at its limit.
    pub fn is_closed(&self) -> bool {
        self.0.shared.has_ended(self.0.number)
    }

    /// True in callbacks of the channel's reactor, which must not wait ([`ChannelError::OwnThread`]).
    pub fn is_own_thread(&self) -> bool {
        self.0.shared.is_own_thread()
    }

    fn awaited(&self, what: &'static str) -> Awaited {
        Awaited { shared: Arc::downgrade(&self.0.shared), peer: Arc::clone(&self.0.peer), what }
    }

    /// Ends the channel at once; the peer's side ends with [`ChannelError::Aborted`].
    pub fn abort(&self) {
        let channel = self.0.number;
        self.0.shared.request(move |engine| engine.abort(channel));
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("peer", &self.0.peer).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.returned {
            let channel = self.number;
            self.shared.request(move |engine| engine.release(channel));
        }
    }
}

/// Accepts channels until it's dropped; accepted channels stay open.
pub struct Listener {
    shared: Arc<Shared>,
    number: u32,
    address: Address,
}

impl Listener {
    pub(crate) fn new(shared: &Arc<Shared>, number: u32, address: Address) -> Self {
        Self { shared: Arc::clone(shared), number, address }
    }

    /// Returns the address that the other side needs in order to connect.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Passes the next channel that a peer opens to `done`.
    pub fn accept_with(&self, done: impl FnOnce(Result<Channel, ChannelError>) + Send + 'static) {
        self.accept_as(self.shared.ticket(), done);
    }

    /// Passes every channel that a peer opens to `each`, until `each` returns false or the listener is dropped.
    pub fn accept_all(&self, each: impl FnMut(Channel) -> bool + Send + 'static) {
        accept_next(&Arc::downgrade(&self.shared), self.number, Box::new(each));
    }

    fn accept_as(&self, ticket: u64, done: impl FnOnce(Result<Channel, ChannelError>) + Send + 'static) {
        let done = Channel::opening(&self.shared, done);
        let listener = self.number;
        self.shared.request(move |engine| engine.accept(listener, ticket, done));
    }

    /// [`Listener::accept_with`] as a future, which a thread can also block on.
    pub fn accept(&self) -> Pending<Channel> {
        let ticket = self.shared.ticket();
        let (shared, peer) = (Arc::downgrade(&self.shared), "a peer".into());
        let (awaited, cancel) = (Awaited { shared, peer, what: "connect" }, Cancel::Accept(self.number, ticket));
        let (pending, done) = Pending::with_return(awaited, cancel, |shared, cancel, _, channel: Channel| {
            if let (Cancel::Accept(listener, _), Some(channel)) = (cancel, channel.into_number()) {
                shared.request(move |engine| engine.return_channel(listener, channel));
            }
        });
        self.accept_as(ticket, |result| done(result, 0));
        pending
    }
}

type Each = Box<dyn FnMut(Channel) -> bool + Send>;

fn accept_next(shared: &Weak<Shared>, listener: u32, mut each: Each) {
    let Some(strong) = shared.upgrade() else { return };
    let weak = Weak::clone(shared);
    let done = Channel::opening(&strong, move |result| {
        if let Ok(channel) = result
            && each(channel)
        {
            accept_next(&weak, listener, each);
        }
    });
    let ticket = strong.ticket();
    strong.request(move |engine| engine.accept(listener, ticket, done));
}

impl Drop for Listener {
    fn drop(&mut self) {
        let listener = self.number;
        self.shared.request(move |engine| engine.close_listener(listener));
    }
}
