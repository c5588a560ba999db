//! What users hold: channels and listeners.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::pending::{Awaited, Cancel, Pending};
use crate::proto::callback::{OpenDone, Opened, ReadDone};
use crate::proto::wire::Address;
use crate::shared::{Request, Shared};
use crate::{ChannelError, Payload};

/// Names a read or a write, to cancel it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// An open channel: whole messages in both directions, in order. Clones are the same channel; when the last one is dropped,
/// the channel is closed, after what was written has gone out.
#[derive(Clone)]
pub struct Channel(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    number: u32,
    peer: Arc<str>,
    max_write: usize,
    /// The engine knows that it is gone.
    let_go: bool,
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
                Ok(Self(Arc::new(Inner { shared, number: channel, peer, max_write, let_go: false })))
            });
            done(result);
        })
    }

    /// The only handle goes and the channel stays: its number. None if there are others.
    fn let_go(mut self) -> Option<u32> {
        let inner = Arc::get_mut(&mut self.0)?;
        inner.let_go = true;
        Some(inner.number)
    }

    /// The peer's endpoint, for people; errors name it so too.
    pub fn peer(&self) -> &str {
        &self.0.peer
    }

    /// Bytes of the longest message that can be written.
    pub fn max_message(&self) -> usize {
        self.0.max_write
    }

    /// Writes one message. `done` gets the buffer back when it is not used any more, or the error that ended the write; the
    /// reactor's thread calls it, once, in the order of writes. Writes that are refused (too long, closed) are called at once.
    /// A buffer that came back says that the message is on its way, not that the peer has read it.
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

    /// Reads one message. `done` gets it; the reactor's thread calls it, once, in the order of reads.
    pub fn read(&self, done: impl FnOnce(Result<Vec<u8>, ChannelError>) + Send + 'static) -> Ticket {
        self.read_into(Vec::new(), done)
    }

    /// As [`Channel::read`], into the memory of `room` if the message fits its capacity; its contents are lost.
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

    /// Cancels a read, or a write that has not begun: its callback gets [`ChannelError::Cancelled`]. A message that was on its
    /// way to a cancelled read goes to the next one. What is over, or a write under way, is left alone.
    pub fn cancel(&self, Ticket(ticket): Ticket) {
        self.0.shared.submit(Request::Cancel { channel: self.0.number, ticket });
    }

    /// [`Channel::write`], to wait for or to await.
    pub fn send(&self, buffer: impl Into<Payload>) -> Pending<Payload> {
        let ticket = self.0.shared.ticket();
        let (pending, done) = Pending::new(self.awaited("take a message"), Cancel::Write(self.0.number, ticket));
        self.write_as(ticket, buffer.into(), done);
        pending
    }

    /// [`Channel::read`], to wait for or to await.
    pub fn receive(&self) -> Pending<Vec<u8>> {
        self.receive_into(Vec::new())
    }

    /// [`Channel::read_into`], to wait for or to await.
    pub fn receive_into(&self, buffer: Vec<u8>) -> Pending<Vec<u8>> {
        let ticket = self.0.shared.ticket();
        let cancel = Cancel::Read(self.0.number, ticket);
        let (pending, done) =
            Pending::giving_back(self.awaited("send a message"), cancel, |cancel, number, bytes| match cancel {
                Cancel::Read(channel, _) => Some(Request::ReturnMessage { channel, number, bytes }),
                _ => None,
            });
        let done = |result| match result {
            Ok((number, bytes)) => done(Ok(bytes), number),
            Err(error) => done(Err(error), 0),
        };
        self.read_as(ticket, buffer, Box::new(done));
        pending
    }

    /// Closes the channel: reads end at once, what was written goes out, and the peer is told and answers. At `limit`, what
    /// has not gone out is given up. The peer gets all messages before its reads end with [`ChannelError::Closed`].
    pub fn close(&self, limit: Duration) -> Pending<()> {
        let (pending, done) = Pending::new(self.awaited("say goodbye"), Cancel::Nothing);
        self.0.shared.submit(Request::Close { channel: self.0.number, limit, done: Box::new(done) });
        pending
    }

    /// True when the channel is over, in whatever way: after a close, when the peer knows of it or the limit is over.
    pub fn is_closed(&self) -> bool {
        self.0.shared.has_ended(self.0.number)
    }

    /// True in callbacks of the channel's reactor. Waiting there is refused with [`ChannelError::OwnThread`].
    pub fn is_own_thread(&self) -> bool {
        self.0.shared.is_own_thread()
    }

    fn awaited(&self, what: &'static str) -> Awaited {
        Awaited { shared: Arc::downgrade(&self.0.shared), peer: Arc::clone(&self.0.peer), what }
    }

    /// Ends the channel at once; the peer's ends with [`ChannelError::Aborted`].
    pub fn abort(&self) {
        self.0.shared.submit(Request::Abort { channel: self.0.number });
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("peer", &self.0.peer).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.let_go {
            self.shared.submit(Request::Release { channel: self.number });
        }
    }
}

/// Where channels are opened to. Dropping it stops listening; channels that were accepted live on.
pub struct Listener {
    shared: Arc<Shared>,
    number: u32,
    address: Address,
}

impl Listener {
    pub(crate) fn new(shared: &Arc<Shared>, number: u32, address: Address) -> Self {
        Self { shared: Arc::clone(shared), number, address }
    }

    /// What the other side needs to connect.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Gives `done` the next channel that is opened to this listener.
    pub fn accept_with(&self, done: impl FnOnce(Result<Channel, ChannelError>) + Send + 'static) {
        self.accept_as(self.shared.ticket(), done);
    }

    /// Gives `each` every channel that is opened to this listener, until it answers false or the listener is dropped.
    pub fn accept_all(&self, each: impl FnMut(Channel) -> bool + Send + 'static) {
        accept_next(&Arc::downgrade(&self.shared), self.number, Box::new(each));
    }

    fn accept_as(&self, ticket: u64, done: impl FnOnce(Result<Channel, ChannelError>) + Send + 'static) {
        let done = Channel::opening(&self.shared, done);
        self.shared.submit(Request::Accept { listener: self.number, ticket, done });
    }

    /// As [`Listener::accept_with`], to wait for or to await.
    pub fn accept(&self) -> Pending<Channel> {
        let ticket = self.shared.ticket();
        let (shared, peer) = (Arc::downgrade(&self.shared), "a peer yet to come".into());
        let (awaited, cancel) = (Awaited { shared, peer, what: "connect" }, Cancel::Accept(self.number, ticket));
        let (pending, done) = Pending::giving_back(awaited, cancel, |cancel, _, channel: Channel| match cancel {
            Cancel::Accept(listener, _) => Some(Request::ReturnChannel { listener, channel: channel.let_go()? }),
            _ => None,
        });
        self.accept_as(ticket, |result| done(result, 0));
        pending
    }
}

type Each = Box<dyn FnMut(Channel) -> bool + Send>;

fn accept_next(shared: &Weak<Shared>, listener: u32, mut each: Each) {
    let Some(strong) = shared.upgrade() else { return };
    let again = Weak::clone(shared);
    let done = Channel::opening(&strong, move |result| {
        if let Ok(channel) = result
            && each(channel)
        {
            accept_next(&again, listener, each);
        }
    });
    strong.submit(Request::Accept { listener, ticket: strong.ticket(), done });
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.submit(Request::CloseListener { listener: self.number });
    }
}
