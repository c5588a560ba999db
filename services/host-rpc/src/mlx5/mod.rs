//! mlx5 queue pairs as a transport: eager messages by SEND and RECV, rendezvous messages through memory windows.
//!
//! A message up to [`Config::eager`] bytes is copied into a registered slot and sent. A longer message stays in the
//! caller's memory: its bytes are registered, a type-2 window is bound to them for reading, and a ready-to-send frame
//! (RTS) carries the window's key. The peer fetches the bytes by RDMA READ. The peer's next SEND invalidates the
//! window: usually the reply to the call, or a frame without data (FIN) if the peer has nothing to send. So a window
//! lives for one message, and no key is valid twice. Completions are compressed if the device supports it.
//!
//! The two ends exchange the bytes of [`Connector::hello`] by any means; [`Connector::connect_over`] exchanges them
//! over a stream.

mod engine;
mod frame;
mod incoming;
mod memory;
mod outgoing;

use std::io::{Read, Write};
use std::sync::Arc;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use ferrogin_channel::Payload;
use mlx5::device::{Device, Endpoint, RawEndpoint};
use parking_lot::Mutex;

use self::engine::{Engine, Inbox, Request};
use self::frame::{HEADER, Hello};
use crate::transport::deadline_after;
use crate::{ReceiveDone, SendDone, Transport};

pub use self::engine::{Config, ConnectError};

/// How long a dropped connection may take to send queued messages.
const DROP_TIMEOUT: Duration = Duration::from_secs(1);
/// The smallest and the largest eager limit, in bytes.
const EAGER_RANGE: std::ops::RangeInclusive<u32> = 64..=1 << 30;

/// Size of a hello in bytes.
pub const HELLO: usize = size_of::<Hello>();

/// The queues of one end, before they are connected to a peer.
#[derive(Debug)]
pub struct Connector {
    engine: Engine,
    endpoint: Endpoint,
    config: Config,
}

impl Connector {
    /// Creates the queues and posts receives.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn new(device: &Arc<dyn Device>, config: &Config) -> Result<Self, ConnectError> {
        if config.eager < *EAGER_RANGE.start() || config.sends < 2 || config.receives < 2 {
            return Err(ConnectError::Config(
                "a connection needs at least two send slots, two receive slots and an eager limit of 64 bytes",
            ));
        }
        if config.eager > *EAGER_RANGE.end() {
            return Err(ConnectError::Config("the eager limit is above 1 GiB; longer messages go through windows"));
        }
        let (engine, endpoint) = Engine::new(device.clone(), config)?;
        Ok(Self { engine, endpoint, config: *config })
    }

    /// Returns the bytes that the peer needs.
    pub fn hello(&self) -> [u8; HELLO] {
        let endpoint = RawEndpoint::from(&self.endpoint);
        zerocopy::transmute!(Hello { magic: Hello::MAGIC, eager: self.config.eager.into(), endpoint })
    }

    /// Connects to the peer with this hello. The peer must connect with this end's hello.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(mut self, hello: &[u8; HELLO], peer: &str) -> Result<Connection, ConnectError> {
        let hello: Hello = zerocopy::transmute!(*hello);
        let eager = hello.eager.get();
        if hello.magic != Hello::MAGIC || !EAGER_RANGE.contains(&eager) {
            return Err(ConnectError::Hello);
        }
        let endpoint = Endpoint::try_from(&hello.endpoint).map_err(|_| ConnectError::Hello)?;
        self.engine.connect(&endpoint, eager.min(self.config.eager), peer)?;
        let inbox: Arc<Mutex<Inbox>> = Arc::default();
        let thread_inbox = inbox.clone();
        let thread = thread::Builder::new().name("rpc-mlx5".into()).spawn(move || self.engine.run(&thread_inbox));
        let thread = thread.map_err(ConnectError::Thread)?.thread().clone();
        Ok(Connection { inbox, thread, peer: peer.into() })
    }

    /// Exchanges hellos over a stream and connects.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect_over(self, mut stream: impl Read + Write, peer: &str) -> Result<Connection, ConnectError> {
        stream.write_all(&self.hello())?;
        stream.flush()?;
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello)?;
        self.connect(&hello, peer)
    }
}

/// A connection. Dropping it closes it, with one second to send queued messages.
#[derive(Debug)]
pub struct Connection {
    inbox: Arc<Mutex<Inbox>>,
    thread: Thread,
    peer: Box<str>,
}

impl Connection {
    fn submit(&self, request: Request) {
        let mut inbox = self.inbox.lock();
        if inbox.ended {
            drop(inbox);
            // On another thread, because callbacks never run from within a method: the caller may hold a lock that its
            // callback takes.
            thread::spawn(move || engine::refuse(request));
            return;
        }
        inbox.queue.push_back(request);
        drop(inbox);
        self.thread.unpark();
    }
}

impl Transport for Connection {
    fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns the bytes that one window covers, less a header.
    fn max_message(&self) -> usize {
        (mlx5::wqe::MAX_BIND - HEADER as u64) as usize
    }

    fn send(&self, message: Payload, done: SendDone) {
        self.submit(Request::Send(message, done));
    }

    fn receive(&self, done: ReceiveDone) {
        self.submit(Request::Receive(done));
    }

    fn close(&self, limit: Duration) {
        self.submit(Request::Close(deadline_after(Instant::now(), limit)));
    }

    fn is_own_thread(&self) -> bool {
        thread::current().id() == self.thread.id()
    }

    fn is_closed(&self) -> bool {
        self.inbox.lock().ended
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut inbox = self.inbox.lock();
        if !inbox.ended {
            inbox.queue.push_back(Request::Close(Instant::now() + DROP_TIMEOUT));
        }
        drop(inbox);
        self.thread.unpark();
    }
}
