//! The thread that drives an endpoint and its channels.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{hint, io, mem};

use ferrogin_libfabric::{Error, bindings};

use crate::carrier::{self, Closed};
use crate::handle::{Channel, Listener};
use crate::pending::{Awaited, Cancel, Pending};
use crate::proto::Callback;
use crate::proto::carrier::Carrier;
use crate::proto::engine::Engine;
use crate::proto::wire::Address;
use crate::shared::{Shared, run};
use crate::{ChannelError, Config};

/// Polls between two reads of the clock while there is work.
const POLLS_PER_CLOCK: u32 = 64;
/// Polls without work before the thread yields its core between polls.
const POLLS_BEFORE_YIELD: u32 = 16;
/// How long aborts may take to reach peers when the reactor is dropped.
const STOP_LIMIT: Duration = Duration::from_millis(200);
/// First and longest sleep if the provider has no descriptor to wait on.
const POLL_AFTER: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(1));

/// Runs the reactor's thread. A panic in the engine, on this thread or another, ends all channels, so that every
/// callback still runs.
fn run_thread(shared: &Shared, busy_poll: Duration) {
    shared.enter_thread();
    let mut callbacks = Vec::new();
    let sound = catch_unwind(AssertUnwindSafe(|| {
        let sound = poll_until_stopped(shared, busy_poll, &mut callbacks);
        if sound {
            stop_channels(shared, &mut callbacks);
        }
        sound
    }));
    if !sound.unwrap_or(false) && catch_unwind(AssertUnwindSafe(|| end_after_panic(shared, &mut callbacks))).is_err() {
        log::error!("a channel reactor panicked twice: callbacks may be missing");
    }
}

/// Polls until the reactor is stopped or the endpoint fails; false after a panic in the engine.
fn poll_until_stopped(shared: &Shared, busy_poll: Duration, callbacks: &mut Vec<Callback>) -> bool {
    let (mut polls, mut idle_polls, mut poll_after) = (0u32, 0u32, POLL_AFTER.0);
    let mut clock = Instant::now();
    let mut idle_since: Option<Instant> = None;
    while !shared.is_stopping() {
        if shared.is_poisoned() {
            return false;
        }
        polls = polls.wrapping_add(1);
        let mut timers = None;
        if idle_since.is_some() || polls.is_multiple_of(POLLS_PER_CLOCK) {
            let now = Instant::now();
            if now.duration_since(clock) >= Duration::from_millis(1) {
                clock = now;
                timers = Some(now);
            }
        }
        let ended = {
            let mut engine = shared.engine();
            shared.serve_inbox(&mut engine);
            engine.flush();
            let busy = engine.poll(timers);
            engine.take_callbacks(callbacks);
            idle_polls = if busy || !callbacks.is_empty() { 0 } else { idle_polls.saturating_add(1) };
            engine.ended.is_some()
        };
        run(callbacks.drain(..));
        if ended {
            break;
        }
        if idle_polls == 0 {
            (idle_since, poll_after) = (None, POLL_AFTER.0);
            continue;
        }
        if idle_polls < POLLS_BEFORE_YIELD {
            hint::spin_loop();
            continue;
        }
        let now = Instant::now();
        if now.duration_since(*idle_since.get_or_insert(now)) < busy_poll {
            thread::yield_now();
        } else {
            shared.sleep(poll_after);
            poll_after = (poll_after * 2).min(POLL_AFTER.1);
        }
    }
    true
}

/// Ends all channels after a panic. The carrier may be in any state, so it isn't used again, and memory that the
/// provider may still use is leaked.
fn end_after_panic(shared: &Shared, callbacks: &mut Vec<Callback>) {
    let text = "it panicked; the panic hook has printed the message".to_owned();
    let error = Error::Call { call: "channel reactor", code: bindings::FI_EOTHER, text };
    log::error!("{error}: all its channels end");
    {
        let mut engine = shared.engine();
        mem::forget(engine.replace_carrier(Box::new(Closed::new())));
        engine.stop(&ChannelError::Endpoint(error));
        engine.take_callbacks(callbacks);
    }
    run(callbacks.drain(..));
    leave(shared, callbacks);
}

/// Ends all channels, after the closes that have begun, sends the aborts, and closes the endpoint.
fn stop_channels(shared: &Shared, callbacks: &mut Vec<Callback>) {
    let (begin, limit) = (Instant::now(), shared.engine().config.close_limit());
    loop {
        let mut engine = shared.engine();
        shared.serve_inbox(&mut engine);
        engine.flush();
        let elapsed = begin.elapsed();
        if elapsed <= limit {
            engine.end_open(&ChannelError::Stopped);
        } else {
            engine.end_all(&ChannelError::Stopped);
        }
        engine.poll(None);
        engine.take_callbacks(callbacks);
        if engine.is_idle() || elapsed > limit + STOP_LIMIT {
            engine.stop(&ChannelError::Stopped);
            let carrier = engine.replace_carrier(Box::new(Closed::new()));
            engine.take_callbacks(callbacks);
            drop(engine);
            drop(carrier);
            run(callbacks.drain(..));
            return leave(shared, callbacks);
        }
        drop(engine);
        run(callbacks.drain(..));
        thread::yield_now();
    }
}

/// Serves the inbox one last time, and leaves later requests to their senders.
fn leave(shared: &Shared, callbacks: &mut Vec<Callback>) {
    {
        let mut engine = shared.engine();
        // Before the inbox is served: the senders of later requests serve it themselves.
        shared.end();
        shared.serve_inbox(&mut engine);
        engine.flush();
        engine.take_callbacks(callbacks);
    }
    run(callbacks.drain(..));
    shared.serve_after_end();
}

/// An endpoint, its channels, and the thread that serves them.
///
/// A reactor is one endpoint: its sockets, or a libfabric endpoint. Its thread runs all callbacks, one after another. A
/// callback must not block: while it runs, the reactor does nothing else, and peers that get no answer for
/// [`Config::lost_after`] give up. A callback may use all channels. Dropping the reactor ends its channels with
/// [`ChannelError::Stopped`], except that those that are closing get a tenth of [`Config::lost_after`], from one second
/// to a minute, to finish; [`Reactor::shutdown`] closes all of them first.
pub struct Reactor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    config: Config,
    provider: String,
}

impl Reactor {
    /// Opens an endpoint and starts its thread.
    ///
    /// # Errors
    /// [`Error::NoMatch`] if the provider has no tagged messages that can carry a channel; an error if there is no
    /// libfabric, or from the provider or the system.
    pub fn open(config: &Config) -> Result<Self, Error> {
        Self::with_carrier(carrier::open(config)?, config)
    }

    pub(crate) fn with_carrier(carrier: Box<dyn Carrier>, config: &Config) -> Result<Self, Error> {
        let failed = |call: &'static str| move |error: io::Error| Error::system(call, &error);
        let provider = carrier.properties().provider.clone();
        let engine = Engine::new(carrier, config.clone(), Instant::now());
        let shared = Arc::new(Shared::new(engine).map_err(failed("eventfd"))?);
        let (thread_shared, busy_poll) = (Arc::clone(&shared), config.busy_poll);
        let thread = thread::Builder::new()
            .name("channel".to_owned())
            .spawn(move || run_thread(&thread_shared, busy_poll))
            .map_err(failed("thread"))?;
        Ok(Self { shared, thread: Some(thread), config: config.clone(), provider })
    }

    #[cfg(test)]
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Returns the provider in use (`tcp`, `efa`).
    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// Opens a listener.
    ///
    /// # Errors
    /// [`ChannelError::CannotListen`]; [`ChannelError::Endpoint`] or [`ChannelError::Stopped`] if the reactor has
    /// ended.
    pub fn listen(&self) -> Result<Listener, ChannelError> {
        let (number, address) = self.shared.with_engine(Engine::listen)?;
        Ok(Listener::new(&self.shared, number, address))
    }

    /// Opens a channel to the listener at `address`. `done` gets the channel, or why it did not open, within
    /// [`Config::connect_within`].
    pub fn connect_with(&self, address: &Address, done: impl FnOnce(Result<Channel, ChannelError>) + Send + 'static) {
        let done = Channel::opening(&self.shared, done);
        let limit = self.config.connect_within;
        let address = address.clone();
        self.shared.request(move |engine| engine.connect(&address, limit, done));
    }

    /// [`Reactor::connect_with`] as a future, which a thread can also block on.
    pub fn connect(&self, address: &Address) -> Pending<Channel> {
        let (shared, peer) = (Arc::downgrade(&self.shared), address.endpoint());
        let (pending, done) = Pending::new(Awaited { shared, peer, what: "answer the connect" }, Cancel::Nothing);
        self.connect_with(address, done);
        pending
    }

    /// Closes all channels, as far as that is possible within `limit`, sending everything written so far and then the
    /// closes. Then stops. True if all peers confirmed. In a callback of this reactor, which must not block, it stops
    /// at once and returns false.
    pub fn shutdown(self, limit: Duration) -> bool {
        if self.shared.is_own_thread() {
            return false;
        }
        let begin = Instant::now();
        self.shared.request(move |engine| engine.close_all(limit));
        loop {
            let idle = self.shared.with_engine(|engine| engine.is_idle()) && !self.shared.has_requests();
            if idle || begin.elapsed() >= limit {
                return idle;
            }
            thread::sleep(Duration::from_micros(200));
        }
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.shared.stop();
        // A callback may drop its own reactor; the thread then ends after the callback.
        if let Some(thread) = self.thread.take()
            && !self.shared.is_own_thread()
            && thread.join().is_err()
        {
            log::error!("the channel reactor panicked");
        }
    }
}
