//! What both ends of a connection do alike: sending frames whole, and reading them.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use crate::frame::{Assembler, HEADER, Header, PACK};
use crate::transport::FOREVER;
use crate::{Body, Bytes, Data, SendDone, Settings, Transport, TransportError, Violation};

/// Reads that wait at the transport.
const READS: usize = 16;

/// How a connection ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Transport(TransportError),
    Broken(Violation),
}

/// Whoever takes the frames.
pub(crate) trait Owner: Send + Sync + 'static {
    fn frame(self: Arc<Self>, header: Header, body: Body) -> Result<(), Violation>;
    /// The connection is over; called once.
    fn over(&self, end: End);
}

/// Short frames that wait: while one message of them is under way, those that come meanwhile are packed into the next. A frame
/// that finds nothing under way never waits.
#[derive(Default)]
struct Packing {
    under_way: bool,
    frames: Vec<u8>,
    /// How many they are.
    count: usize,
    /// Frames that are not out, those that wait among them.
    unsent: usize,
    /// Reads that wait until fewer are.
    owed: usize,
}

pub(crate) struct Connection {
    transport: Box<dyn Transport>,
    /// Held while the messages of a frame are handed over, so that they stay together.
    packing: Mutex<Packing>,
    parts: Mutex<Option<Assembler>>,
    owner: OnceLock<Weak<dyn Owner>>,
    inline: usize,
    piece: usize,
    pack: usize,
    /// Frames that may be unsent while more are read.
    ahead: usize,
}

impl Connection {
    /// A connection that reads nothing more while more than `ahead` of its frames are not out: a peer that asks and does not read the
    /// answers fills no memory. Only one end may do so; the other always reads.
    pub fn new(transport: impl Transport, settings: &Settings, ahead: usize) -> Arc<Self> {
        let max = transport.max_message();
        Arc::new(Self {
            inline: settings.inline.min(max.saturating_sub(HEADER)),
            piece: settings.piece.min(max).max(1),
            transport: Box::new(transport),
            packing: Mutex::default(),
            pack: PACK.min(max),
            ahead,
            parts: Mutex::new(Some(Assembler::new(settings.max_body))),
            owner: OnceLock::new(),
        })
    }

    /// Begins to read for `owner`.
    pub fn start(self: &Arc<Self>, owner: Weak<dyn Owner>) {
        if self.owner.set(owner).is_ok() {
            for _ in 0..READS {
                self.read();
            }
        }
    }

    pub fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    fn packing(&self) -> MutexGuard<'_, Packing> {
        self.packing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message of `count` short frames.
    fn send_frames(self: &Arc<Self>, packing: &mut Packing, frames: Vec<u8>, count: usize) {
        packing.under_way = true;
        let this = Arc::clone(self);
        self.transport.send(Bytes::Owned(frames), Box::new(move |result| this.frames_sent(result.is_ok(), count)));
    }

    fn frames_sent(self: &Arc<Self>, well: bool, count: usize) {
        let mut packing = self.packing();
        packing.under_way = false;
        if well {
            self.flush(&mut packing);
        } else {
            packing.unsent -= std::mem::take(&mut packing.count);
            packing.frames.clear();
        }
        self.are_out(packing, count);
    }

    /// That many frames are out, or will never be.
    fn are_out(self: &Arc<Self>, mut packing: MutexGuard<'_, Packing>, count: usize) {
        packing.unsent -= count;
        let reads = if packing.unsent <= self.ahead { std::mem::take(&mut packing.owed) } else { 0 };
        drop(packing);
        (0..reads).for_each(|_| self.read());
    }

    /// Sends the frames that wait, in front of what must not overtake them.
    fn flush(self: &Arc<Self>, packing: &mut Packing) {
        let (frames, count) = (std::mem::take(&mut packing.frames), std::mem::take(&mut packing.count));
        if !frames.is_empty() {
            self.send_frames(packing, frames, count);
        }
    }

    /// Lets what was sent go out, and ends the connection, at the latest after `limit`.
    pub fn close(self: &Arc<Self>, limit: Duration) {
        self.flush(&mut self.packing());
        self.transport.close(limit.min(FOREVER));
    }

    /// Sends a frame. A connection that ends meanwhile says so to the owner.
    pub fn send(self: &Arc<Self>, header: Header, data: Data) {
        let len = data.as_slice().len();
        let inline = len <= self.inline;
        let header = Header { inline, length: len as u64, ..header }.emit();
        let mut packing = self.packing();
        packing.unsent += 1;
        if inline {
            if packing.frames.len() + HEADER + len > self.pack {
                self.flush(&mut packing);
            }
            let wait = packing.under_way && HEADER + len <= self.pack;
            let mut message = if wait { std::mem::take(&mut packing.frames) } else { Vec::with_capacity(HEADER + len) };
            message.extend_from_slice(&header);
            message.extend_from_slice(data.as_slice());
            if wait {
                packing.frames = message;
                packing.count += 1;
            } else {
                self.send_frames(&mut packing, message, 1);
            }
            return;
        }
        self.flush(&mut packing);
        self.transport.send(Bytes::Owned(header.to_vec()), Box::new(|_| ()));
        let this = Arc::clone(self);
        let last: SendDone = Box::new(move |_| this.are_out(this.packing(), 1));
        let bytes = match data {
            Data::Owned(bytes) if len <= self.piece => return self.transport.send(Bytes::Owned(bytes), last),
            Data::Owned(bytes) => Arc::new(bytes),
            Data::Shared(bytes) => bytes,
        };
        let begin = (len - 1) / self.piece * self.piece;
        for from in (0..begin).step_by(self.piece) {
            self.transport.send(Bytes::Shared(Arc::clone(&bytes), from..from + self.piece), Box::new(|_| ()));
        }
        self.transport.send(Bytes::Shared(bytes, begin..len), last);
    }

    /// Reads another message, now or when enough of what was sent is out.
    fn read_on(self: &Arc<Self>) {
        let mut packing = self.packing();
        if packing.unsent > self.ahead {
            packing.owed += 1;
            return;
        }
        drop(packing);
        self.read();
    }

    fn read(self: &Arc<Self>) {
        let this = Arc::downgrade(self);
        self.transport.receive(Box::new(move |result| {
            if let Some(this) = this.upgrade() {
                this.received(result);
            }
        }));
    }

    fn received(self: &Arc<Self>, result: Result<Vec<u8>, TransportError>) {
        let Some(owner) = self.owner.get().and_then(Weak::upgrade) else { return };
        let frames = {
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            // After the end, what is still read is of no interest.
            let Some(assembler) = parts.as_mut() else { return };
            match result {
                Ok(message) => assembler.message(message).map_err(End::Broken),
                Err(error) => Err(End::Transport(error)),
            }
        };
        let taken = frames.and_then(|frames| {
            frames
                .into_iter()
                .try_for_each(|(header, body)| Arc::clone(&owner).frame(header, body).map_err(End::Broken))
        });
        match taken {
            Ok(()) => self.read_on(),
            Err(end) => {
                let first = self.parts.lock().unwrap_or_else(PoisonError::into_inner).take().is_some();
                if first {
                    owner.over(end);
                }
            }
        }
    }
}
