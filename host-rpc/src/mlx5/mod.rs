//! mlx5 queue pairs as a transport: short messages by SEND and RECV, long ones through memory windows.
//!
//! A message up to [`Config::eager`] bytes is copied into a registered slot and sent. A longer one stays where it is: its bytes are
//! registered, a type-2 window is bound on them for reading, and an offer goes out with the window's key. The peer
//! fetches by RDMA READ, and its next message is a SEND that makes the window invalid: the reply of a call, or an answer of
//! its own if there is nothing to send at once. So a window lives for one message, and no key works twice. Completions are
//! compressed where the device can.
//!
//! Two ends know each other by what [`Opening::hello`] says, exchanged by any means; [`Opening::over`] does it over a stream.

mod engine;
mod frame;
mod memory;

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use mlx5::device::{Device, DeviceError, Endpoint};

use self::engine::Engine;
use self::frame::HEADER;
use crate::transport::later;
use crate::{Bytes, ReceiveDone, SendDone, Transport};

/// Sizes of a connection. The two ends need not agree.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Bytes of the longest message that is copied into a slot.
    pub eager: u32,
    /// Slots for messages that go out.
    pub sends: u16,
    /// Slots for messages that come in.
    pub receives: u16,
    /// Ask for compressed completions where the device has them.
    pub compression: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { eager: 16 << 10, sends: 64, receives: 128, compression: true }
    }
}

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A size that does not work.
    #[error("{0}")]
    Config(&'static str),
    /// The other side is no end of such a connection, or of another version.
    #[error("the peer's hello is not one of this version of ferrogin: use the same release at both ends")]
    Hello,
    /// The exchange of hellos failed.
    #[error("exchanging hellos: {0}")]
    Exchange(#[from] io::Error),
    /// No thread for it.
    #[error("no thread for a connection: {0}")]
    Thread(#[source] io::Error),
}

/// Bytes of a hello.
pub const HELLO: usize = Endpoint::SIZE + 6;
/// What a hello begins with: the name and the version of what follows.
const MAGIC: [u8; 2] = *b"m1";

/// One end of a connection that does not know its peer yet.
#[derive(Debug)]
pub struct Opening {
    engine: Engine,
    endpoint: Endpoint,
    config: Config,
}

impl Opening {
    /// Makes the queues, and posts receives.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn new(device: &Arc<dyn Device>, config: &Config) -> Result<Self, OpenError> {
        if config.eager < 64 || config.sends < 2 || config.receives < 2 {
            return Err(OpenError::Config("a connection needs two slots each way, of 64 bytes or more"));
        }
        if config.eager > 1 << 30 {
            return Err(OpenError::Config("slots of more than 1 GiB: longer messages go through windows"));
        }
        let (engine, endpoint) = Engine::new(device.clone(), config)?;
        Ok(Self { engine, endpoint, config: *config })
    }

    /// What the peer must be given.
    pub fn hello(&self) -> [u8; HELLO] {
        let mut hello = [0; HELLO];
        hello[..2].copy_from_slice(&MAGIC);
        hello[2..6].copy_from_slice(&self.config.eager.to_be_bytes());
        hello[6..].copy_from_slice(&self.endpoint.to_bytes());
        hello
    }

    /// Connects to the peer that gave this hello, which is given ours.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn connect(mut self, hello: &[u8; HELLO], peer: &str) -> Result<Connection, OpenError> {
        let (magic, rest) = hello.split_at(2);
        let (eager, endpoint) = rest.split_at(4);
        let eager = u32::from_be_bytes(eager.try_into().map_err(|_| OpenError::Hello)?);
        let endpoint = endpoint.try_into().ok().and_then(Endpoint::from_bytes).ok_or(OpenError::Hello)?;
        if magic != MAGIC || !(64..=1 << 30).contains(&eager) {
            return Err(OpenError::Hello);
        }
        self.engine.connect(&endpoint, eager.min(self.config.eager), peer)?;
        let shared = Arc::new(Shared { commands: Mutex::default() });
        let of_thread = shared.clone();
        let thread = thread::Builder::new().name("rpc-mlx5".into()).spawn(move || self.engine.run(&of_thread));
        let thread = thread.map_err(OpenError::Thread)?.thread().clone();
        Ok(Connection { shared, thread, peer: peer.into() })
    }

    /// Exchanges hellos over a stream, and connects.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn over(self, mut stream: impl Read + Write, peer: &str) -> Result<Connection, OpenError> {
        stream.write_all(&self.hello())?;
        stream.flush()?;
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello)?;
        self.connect(&hello, peer)
    }
}

/// What the engine is asked.
enum Command {
    Send(Bytes, SendDone),
    Receive(ReceiveDone),
    Close(Instant),
}

#[derive(Default)]
struct Commands {
    queue: VecDeque<Command>,
    /// The engine is gone: nobody will look.
    ended: bool,
}

struct Shared {
    commands: Mutex<Commands>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection. Dropping it closes it, with a second for what was sent.
#[derive(Debug)]
pub struct Connection {
    shared: Arc<Shared>,
    thread: Thread,
    peer: Box<str>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}

impl Connection {
    fn ask(&self, command: Command) {
        let mut commands = self.shared.lock();
        if commands.ended {
            drop(commands);
            // Never from within a method: whoever holds a lock while sending expects that.
            thread::spawn(move || engine::refuse(command));
            return;
        }
        commands.queue.push_back(command);
        drop(commands);
        self.thread.unpark();
    }
}

impl Transport for Connection {
    fn peer(&self) -> &str {
        &self.peer
    }

    /// What a window covers.
    fn max_message(&self) -> usize {
        (mlx5::wqe::MAX_BIND - HEADER as u64) as usize
    }

    fn send(&self, bytes: Bytes, done: SendDone) {
        self.ask(Command::Send(bytes, done));
    }

    fn receive(&self, done: ReceiveDone) {
        self.ask(Command::Receive(done));
    }

    fn close(&self, limit: Duration) {
        self.ask(Command::Close(later(Instant::now(), limit)));
    }

    fn is_own_thread(&self) -> bool {
        thread::current().id() == self.thread.id()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut commands = self.shared.lock();
        if !commands.ended {
            commands.queue.push_back(Command::Close(Instant::now() + Duration::from_secs(1)));
        }
        drop(commands);
        self.thread.unpark();
    }
}
