//! What both ends of a connection do alike: sending frames whole, and reading them.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use crate::frame::{Assembler, HEADER, Header};
use crate::{Body, Bytes, Data, Settings, Transport, TransportError, Violation};

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

pub(crate) struct Connection {
    transport: Box<dyn Transport>,
    /// Held while the messages of a frame are handed over, so that they stay together.
    order: Mutex<()>,
    parts: Mutex<Option<Assembler>>,
    owner: OnceLock<Weak<dyn Owner>>,
    inline: usize,
    piece: usize,
}

impl Connection {
    pub fn new(transport: impl Transport, settings: &Settings) -> Arc<Self> {
        let max = transport.max_message();
        Arc::new(Self {
            inline: settings.inline.min(max.saturating_sub(HEADER)),
            piece: settings.piece.min(max).max(1),
            transport: Box::new(transport),
            order: Mutex::new(()),
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

    /// Sends a frame. A connection that ends meanwhile says so to the owner.
    pub fn send(&self, header: Header, data: Data) {
        let len = data.as_slice().len();
        let inline = len <= self.inline;
        let header = Header { inline, length: len as u64, ..header }.emit();
        let done = || Box::new(|_| ()) as crate::SendDone;
        let _order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if inline {
            let mut message = Vec::with_capacity(HEADER + len);
            message.extend_from_slice(&header);
            message.extend_from_slice(data.as_slice());
            self.transport.send(Bytes::Owned(message), done());
            return;
        }
        self.transport.send(Bytes::Owned(header.to_vec()), done());
        let bytes = match data {
            Data::Owned(bytes) if len <= self.piece => {
                self.transport.send(Bytes::Owned(bytes), done());
                return;
            }
            Data::Owned(bytes) => Arc::new(bytes),
            Data::Shared(bytes) => bytes,
        };
        for from in (0..len).step_by(self.piece) {
            let to = (from + self.piece).min(len);
            self.transport.send(Bytes::Shared(Arc::clone(&bytes), from..to), done());
        }
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
        let frame = {
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            // After the end, what is still read is of no interest.
            let Some(assembler) = parts.as_mut() else { return };
            match result {
                Ok(message) => assembler.message(message).map_err(End::Broken),
                Err(error) => Err(End::Transport(error)),
            }
        };
        let taken = match frame {
            Ok(Some((header, body))) => Arc::clone(&owner).frame(header, body).map_err(End::Broken),
            Ok(None) => Ok(()),
            Err(end) => Err(end),
        };
        match taken {
            Ok(()) => self.read(),
            Err(end) => {
                let first = self.parts.lock().unwrap_or_else(PoisonError::into_inner).take().is_some();
                if first {
                    owner.over(end);
                }
            }
        }
    }
}
