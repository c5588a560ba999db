//! One connection: sends frames whole, packs short ones, and reads the peer's frames. Client and server share it.
//!
//! While a message of short frames is in flight, further ones are packed into the next, up to 16 KiB together; a frame
//! that finds none in flight is sent at once. Channels whose tags the provider matches don't batch messages themselves:
//! without packing, 32 concurrent calls of 64 bytes over `softefa` reach a third to a half of the rate (`cargo bench -p
//! host-rpc --bench transports`, with and without). Over `tcp` and mlx5 the rates differ by a fifth at most.

use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferrogin_channel::Payload;

use crate::frame::{Assembler, HEADER, Header, Kind, PACK};
use crate::status::truncated;
use crate::transport::NO_LIMIT;
use crate::{Body, Data, RpcError, SendDone, Settings, Transport, TransportError, Violation};

/// How many receives are posted to the transport.
const RECEIVES: usize = 16;
/// The most bytes of a violation's text.
const VIOLATION_MAX: usize = 500;

/// How a connection ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Transport(TransportError),
    /// The peer broke the protocol.
    Violation(Violation),
    /// This end broke the protocol, as the peer says.
    Refused(Arc<str>),
}

/// The client or the server behind a connection.
pub(crate) trait FrameHandler: Send + Sync + 'static {
    fn on_frame(self: Arc<Self>, header: Header, body: Body) -> Result<(), Violation>;
    /// Called once, when the connection has ended.
    fn on_end(&self, end: End);
}

/// The send side.
#[derive(Default)]
struct Sending {
    /// Whether a message of short frames is in flight.
    in_flight: bool,
    /// The next message of short frames, and how many frames it holds.
    packed: Vec<u8>,
    packed_frames: usize,
    /// Frames that haven't been sent, including packed ones.
    unsent: usize,
    /// Receives to post once fewer frames are unsent.
    paused_receives: usize,
}

pub(crate) struct Connection {
    transport: Box<dyn Transport>,
    handler: Weak<dyn FrameHandler>,
    /// Locked while the messages of a frame go to the transport, so that no other message comes between them.
    sending: Mutex<Sending>,
    /// `None` after the end.
    assembler: Mutex<Option<Assembler>>,
    inline: usize,
    piece: usize,
    pack: usize,
    /// While more frames than this are unsent, no further message is received.
    max_unsent: usize,
    /// The limit of a close after a violation.
    close_timeout: Duration,
}

impl Connection {
    /// Creates a connection that delivers frames to `handler` once [`Connection::start`] is called. It stops receiving
    /// while more than `max_unsent` of its frames are unsent, so that a peer that sends requests but doesn't receive
    /// the answers can't fill up memory. At most one of the two ends may set such a limit.
    pub fn new(
        transport: impl Transport,
        settings: &Settings,
        max_unsent: usize,
        handler: Weak<dyn FrameHandler>,
    ) -> Arc<Self> {
        let max = transport.max_message();
        Arc::new(Self {
            inline: settings.inline.min(max.saturating_sub(HEADER)),
            piece: settings.piece.min(max).max(1),
            transport: Box::new(transport),
            handler,
            sending: Mutex::default(),
            assembler: Mutex::new(Some(Assembler::new(settings.max_body))),
            pack: PACK.min(max),
            max_unsent,
            close_timeout: settings.close_timeout,
        })
    }

    /// Starts to receive.
    pub fn start(self: &Arc<Self>) {
        (0..RECEIVES).for_each(|_| self.receive());
    }

    pub fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    /// Sends queued frames and ends the connection, after `limit` at the latest.
    pub fn close(self: &Arc<Self>, limit: Duration) {
        self.flush(&mut self.sending());
        self.transport.close(limit.min(NO_LIMIT));
    }

    /// Returns the error for the calls of a connection that has ended. If the peer broke the protocol, tells it so, in
    /// a body of at most `max_body` bytes. Closes the connection after a violation of either end.
    pub fn error(self: &Arc<Self>, peer: Arc<str>, end: End, max_body: Option<usize>) -> RpcError {
        let error = match end {
            End::Transport(why) => return RpcError::Disconnected { peer, why },
            End::Violation(violation) => {
                log::warn!("closing the connection to {peer}, which broke the RPC protocol: {violation}");
                let text = violation.to_string();
                let text = truncated(&text, max_body.unwrap_or(VIOLATION_MAX).min(VIOLATION_MAX));
                self.send(Header { code: 1, ..Header::new(Kind::Goodbye) }, text.into());
                RpcError::Protocol { peer, violation }
            }
            End::Refused(why) => {
                log::warn!("{peer} ended the connection, because this end broke the RPC protocol: {why}");
                RpcError::Refused { peer, why }
            }
        };
        self.close(self.close_timeout);
        error
    }

    /// Sends a frame. If the connection ends first, the handler's `on_end` reports that.
    pub fn send(self: &Arc<Self>, header: Header, data: Data) {
        let len = data.as_slice().len();
        let inline = len <= self.inline;
        let header = Header { inline, length: len as u64, ..header }.emit();
        let mut sending = self.sending();
        sending.unsent += 1;
        if inline {
            self.send_inline(&mut sending, &header, data.as_slice());
        } else {
            self.flush(&mut sending);
            self.transport.send(header.to_vec().into(), Box::new(|_| ()));
            self.send_body(data, len);
        }
    }

    fn send_inline(self: &Arc<Self>, sending: &mut Sending, header: &[u8], body: &[u8]) {
        let len = header.len() + body.len();
        if sending.packed.len() + len > self.pack {
            self.flush(sending);
        }
        if sending.in_flight && len <= self.pack {
            sending.packed.extend_from_slice(header);
            sending.packed.extend_from_slice(body);
            sending.packed_frames += 1;
        } else {
            self.send_packed(sending, [header, body].concat(), 1);
        }
    }

    /// Sends a body in messages of its own. The callback of the last one counts the frame as sent.
    fn send_body(self: &Arc<Self>, data: Data, len: usize) {
        let this = Arc::clone(self);
        let last: SendDone = Box::new(move |_| this.frames_sent(this.sending(), 1));
        let bytes = match data {
            Data::Owned(bytes) if len <= self.piece => return self.transport.send(bytes.into(), last),
            Data::Owned(bytes) => Arc::new(bytes),
            Data::Shared(bytes) => bytes,
        };
        let last_piece = (len - 1) / self.piece * self.piece;
        for start in (0..last_piece).step_by(self.piece) {
            self.transport.send(Payload::shared(&bytes, start..start + self.piece), Box::new(|_| ()));
        }
        self.transport.send(Payload::shared(&bytes, last_piece..len), last);
    }

    /// Sends the packed frames, ahead of a message that must not overtake them.
    fn flush(self: &Arc<Self>, sending: &mut Sending) {
        let (message, frames) = (std::mem::take(&mut sending.packed), std::mem::take(&mut sending.packed_frames));
        if !message.is_empty() {
            self.send_packed(sending, message, frames);
        }
    }

    /// Sends a message of `frames` frames.
    fn send_packed(self: &Arc<Self>, sending: &mut Sending, message: Vec<u8>, frames: usize) {
        sending.in_flight = true;
        let this = Arc::clone(self);
        let done = move |result: Result<(), TransportError>| {
            let mut sending = this.sending();
            sending.in_flight = false;
            if result.is_ok() {
                this.flush(&mut sending);
            } else {
                sending.unsent -= std::mem::take(&mut sending.packed_frames);
                sending.packed.clear();
            }
            this.frames_sent(sending, frames);
        };
        self.transport.send(message.into(), Box::new(done));
    }

    /// Records that `frames` frames were sent, or failed.
    fn frames_sent(self: &Arc<Self>, mut sending: MutexGuard<'_, Sending>, frames: usize) {
        sending.unsent -= frames;
        let receives = if sending.unsent <= self.max_unsent { std::mem::take(&mut sending.paused_receives) } else { 0 };
        drop(sending);
        (0..receives).for_each(|_| self.receive());
    }

    fn sending(&self) -> MutexGuard<'_, Sending> {
        self.sending.lock()
    }

    fn receive(self: &Arc<Self>) {
        let this = Arc::downgrade(self);
        self.transport.receive(Box::new(move |result| {
            if let Some(this) = this.upgrade() {
                this.received(result);
            }
        }));
    }

    /// Posts the next receive, now or once fewer frames are unsent.
    fn receive_next(self: &Arc<Self>) {
        let mut sending = self.sending();
        if sending.unsent > self.max_unsent {
            sending.paused_receives += 1;
            return;
        }
        drop(sending);
        self.receive();
    }

    fn received(self: &Arc<Self>, result: Result<Vec<u8>, TransportError>) {
        let Some(handler) = self.handler.upgrade() else { return };
        let frames = {
            let mut assembler = self.assembler.lock();
            // Messages received after the end are dropped.
            let Some(assembler) = assembler.as_mut() else { return };
            match result {
                Ok(message) => assembler.message(message).map_err(End::Violation),
                Err(error) => Err(End::Transport(error)),
            }
        };
        let handled = frames.and_then(|frames| {
            frames.into_iter().try_for_each(|(header, body)| {
                if header.kind == Kind::Goodbye && header.code != 0 {
                    let text = body.bytes();
                    let text = String::from_utf8_lossy(&text[..text.len().min(VIOLATION_MAX)]);
                    return Err(End::Refused(text.into()));
                }
                Arc::clone(&handler).on_frame(header, body).map_err(End::Violation)
            })
        });
        match handled {
            Ok(()) => self.receive_next(),
            Err(end) => {
                let first = self.assembler.lock().take().is_some();
                if first {
                    handler.on_end(end);
                }
            }
        }
    }
}
