//! What the reactor's thread and the channel handles share: the engine, and the inbox for requests to it.
//!
//! Every request takes the same path: its sender puts it into the inbox and wakes the thread if it's asleep. The thread
//! serves requests in order. After the thread has ended, the senders serve them.

use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{self, OnceLock, PoisonError, TryLockError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};
use std::{io, mem};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::{Mutex, MutexGuard};

use crate::Payload;
use crate::parker::Parker;
use crate::proto::carrier::Wait;
use crate::proto::engine::Engine;
use crate::proto::{Callback, ReadDone, WriteDone};

const MAX_SLEEP: Duration = Duration::from_secs(3600);

/// A user's request. Reads and writes, which are frequent, need no allocation.
pub(crate) enum Request {
    Write { channel: u32, ticket: u64, body: Payload, done: WriteDone },
    Read { channel: u32, ticket: u64, buffer: Vec<u8>, done: ReadDone },
    Other(Box<dyn FnOnce(&mut Engine) + Send>),
}

/// Runs callbacks. One that panics doesn't keep the others from running.
pub(crate) fn run(callbacks: impl Iterator<Item = Callback>) {
    for callback in callbacks {
        if catch_unwind(AssertUnwindSafe(|| callback.run())).is_err() {
            log::error!("a channel callback panicked");
        }
    }
}

/// The engine and the inbox.
pub(crate) struct Shared {
    /// Poisoned by a panic, which ends all channels.
    engine: sync::Mutex<Engine>,
    /// Requests, in order. Only the holder of the engine's lock empties it.
    inbox: Mutex<Vec<Request>>,
    /// Whether the inbox has requests.
    has_requests: AtomicBool,
    parker: Parker,
    event_fd: EventFd,
    thread: OnceLock<ThreadId>,
    next_ticket: AtomicU64,
    stop: AtomicBool,
    /// The thread no longer serves the inbox: see [`Shared::serve_after_end`].
    ended: AtomicBool,
}

impl Shared {
    /// Creates the shared state of an engine whose thread isn't running yet.
    ///
    /// # Errors
    /// If no eventfd can be opened.
    pub fn new(engine: Engine) -> io::Result<Self> {
        Ok(Self {
            engine: sync::Mutex::new(engine),
            inbox: Mutex::new(Vec::new()),
            has_requests: AtomicBool::new(false),
            parker: Parker::new(),
            event_fd: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            thread: OnceLock::new(),
            next_ticket: AtomicU64::new(1),
            stop: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        })
    }

    pub fn engine(&self) -> sync::MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a thread panicked while it had the engine.
    pub fn is_poisoned(&self) -> bool {
        self.engine.is_poisoned()
    }

    /// Uses the engine on a thread other than the reactor's.
    pub fn with_engine<R>(&self, use_engine: impl FnOnce(&mut Engine) -> R) -> R {
        let result = {
            let mut engine = self.engine();
            // Served first, to keep the order of the calls: a dropped listener is closed before the next one opens.
            self.serve_inbox(&mut engine);
            use_engine(&mut engine)
        };
        self.serve_after_end();
        result
    }

    fn inbox(&self) -> MutexGuard<'_, Vec<Request>> {
        self.inbox.lock()
    }

    pub fn has_requests(&self) -> bool {
        self.has_requests.load(Ordering::SeqCst)
    }

    /// Serves the requests in the inbox.
    pub fn serve_inbox(&self, engine: &mut Engine) {
        if !self.has_requests() {
            return;
        }
        let requests = {
            let mut inbox = self.inbox();
            self.has_requests.store(false, Ordering::SeqCst);
            mem::take(&mut *inbox)
        };
        // The requests' limits count from now.
        engine.advance_clock(Instant::now());
        for request in requests {
            match request {
                Request::Write { channel, ticket, body, done } => engine.write(channel, ticket, body, done),
                Request::Read { channel, ticket, buffer, done } => engine.read(channel, ticket, buffer, done),
                Request::Other(call) => call(engine),
            }
        }
    }

    /// Records the caller as the reactor's thread.
    pub fn enter_thread(&self) {
        let _ = self.thread.set(thread::current().id());
    }

    /// Returns true on the thread that runs callbacks.
    pub fn is_own_thread(&self) -> bool {
        self.thread.get() == Some(&thread::current().id())
    }

    /// Returns whether the channel has ended.
    pub fn has_ended(&self, channel: u32) -> bool {
        self.with_engine(|engine| engine.state_of(channel).is_none_or(|state| !state.is_live()))
    }

    /// Returns a number for an operation that may be cancelled.
    pub fn ticket(&self) -> u64 {
        self.next_ticket.fetch_add(1, Ordering::Relaxed)
    }

    /// Puts a request other than a read or a write into the inbox.
    pub fn request(&self, call: impl FnOnce(&mut Engine) + Send + 'static) {
        self.submit(Request::Other(Box::new(call)));
    }

    /// Puts a request into the inbox.
    pub fn submit(&self, request: Request) {
        {
            let mut inbox = self.inbox();
            inbox.push(request);
            self.has_requests.store(true, Ordering::SeqCst);
        }
        self.wake();
        self.serve_after_end();
    }

    /// Gives the engine back what an operation that was dropped got. Not through the inbox, where the read that must get
    /// it may be ahead and take a later message.
    pub fn give_back(&self, give_back: impl FnOnce(&mut Engine)) {
        give_back(&mut self.engine());
        self.wake();
        self.serve_after_end();
    }

    fn wake(&self) {
        if self.parker.must_wake() {
            // A full counter wakes the thread too.
            let _ = self.event_fd.write(1);
        }
    }

    /// Asks the thread to end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Returns whether the thread was asked to end.
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// From now on, senders serve their own requests.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    /// Serves the inbox once the thread has ended. A sender that finds the engine locked may leave: the lock's holder
    /// comes here afterwards and finds the request.
    pub fn serve_after_end(&self) {
        while self.ended.load(Ordering::SeqCst) {
            // Orders adding a request before trying the lock, and releasing the lock before checking for requests: a
            // sender and a holder of the lock can't both miss the other.
            fence(Ordering::SeqCst);
            let mut engine = match self.engine.try_lock() {
                Ok(engine) => engine,
                Err(TryLockError::Poisoned(engine)) => engine.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            self.serve_inbox(&mut engine);
            engine.flush();
            let mut callbacks = Vec::new();
            engine.take_callbacks(&mut callbacks);
            drop(engine);
            if !callbacks.is_empty() {
                // Not on this thread, which may hold a lock that a callback takes.
                let thread = thread::Builder::new().name("channel-end".to_owned());
                if let Err(error) = thread.spawn(move || run(callbacks.into_iter())) {
                    log::error!("no thread for the callbacks of ended channels: {error}");
                }
            }
            fence(Ordering::SeqCst);
            if !self.has_requests() {
                return;
            }
        }
    }

    /// Sleeps until a request or an event arrives or a timer is due; at most for `poll_after` if the provider has no
    /// descriptor.
    pub fn sleep(&self, poll_after: Duration) {
        self.parker.prepare();
        if !self.has_requests() && !self.is_stopping() {
            let engine = self.engine();
            let (wait, interval) = (engine.wait(), engine.timer_interval());
            drop(engine);
            if let Some(Wait { fd, until }) = wait {
                // The engine's clock advances in steps of a millisecond.
                let until = until.map(|at| at.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
                let limit = interval.min(until.unwrap_or(MAX_SLEEP));
                self.wait(fd, if fd.is_some() { limit } else { limit.min(poll_after) });
            }
        }
        self.parker.cancel();
    }

    /// Sleeps until the thread is woken, until the provider's `fd` is readable, or for `limit`.
    fn wait(&self, fd: Option<RawFd>, limit: Duration) {
        let own = self.event_fd.as_fd();
        // SAFETY: the endpoint keeps its descriptor open, and only this thread closes the endpoint.
        let fd = fd.map_or(own, |fd| unsafe { BorrowedFd::borrow_raw(fd) });
        let mut fds = [own, fd].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        // An interruption only shortens the sleep.
        let _ = ppoll(&mut fds, Some(limit.min(MAX_SLEEP).into()), None);
        if fds[0].any() == Some(true) {
            let _ = self.event_fd.read();
        }
    }
}
