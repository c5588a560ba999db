//! The thread that drives an endpoint and its channels.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};
use std::{hint, ptr};

use super::bell::Bell;
use super::engine::{Call, CloseDone, Engine, OpenDone};
use super::handle::{Channel, Listener};
use super::matched::Matched;
use super::pending::{Awaited, Cancel, Pending};
use super::tagged::Tagged;
use super::transport::{Addr, Event, Pattern, Receiving, Sending, Transport};
use super::wake::Wake;
use super::wire::Address;
use super::{ChannelError, Config, Matching, Payload, ReadDone, WriteDone};
use ferrogin_libfabric::{Error, Libfabric};

/// Polls between looks at the clock while there is work.
const POLLS_PER_CLOCK: u32 = 64;
/// Polls in vain before others get the core between polls.
const POLLS_ALONE: u32 = 16;
/// Time that last words to peers get when the reactor is dropped.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// First and longest sleep where the provider has nothing to wait for.
const NAP: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(1));

/// What users ask of the engine. `Unread` and `Unaccept` bring back what was handed out and is not wanted there.
pub(super) enum Request {
    Write { channel: u32, ticket: u64, body: Payload, done: WriteDone },
    Read { channel: u32, ticket: u64, room: Vec<u8>, done: ReadDone },
    Connect { address: Address, start: u32, limit: Duration, done: OpenDone },
    Accept { listener: u32, ticket: u64, done: OpenDone },
    Close { channel: u32, limit: Duration, done: CloseDone },
    Abort { channel: u32 },
    Forget { channel: u32 },
    Cancel { channel: u32, ticket: u64 },
    CancelAccept { listener: u32, ticket: u64 },
    Unread { channel: u32, number: u64, bytes: Vec<u8> },
    Unaccept { listener: u32, channel: u32 },
    CloseListener { listener: u32 },
    CloseAll { limit: Duration },
}

type AnyEngine = Engine<Box<dyn Transport>>;

fn serve(engine: &mut AnyEngine, request: Request) {
    if let Request::Connect { .. } | Request::Close { .. } | Request::Forget { .. } | Request::CloseAll { .. } = request
    {
        engine.tell_time(Instant::now());
    }
    match request {
        Request::Write { channel, ticket, body, done } => engine.write(channel, ticket, body, done),
        Request::Read { channel, ticket, room, done } => engine.read(channel, ticket, room, done),
        Request::Connect { address, start, limit, done } => engine.connect(&address, start, limit, done),
        Request::Accept { listener, ticket, done } => engine.accept(listener, ticket, done),
        Request::Close { channel, limit, done } => engine.close(channel, limit, Some(done)),
        Request::Abort { channel } => engine.abort(channel),
        Request::Forget { channel } => engine.forget(channel),
        Request::Cancel { channel, ticket } => engine.cancel(channel, ticket),
        Request::CancelAccept { listener, ticket } => engine.cancel_accept(listener, ticket),
        Request::Unread { channel, number, bytes } => engine.unread(channel, number, bytes),
        Request::Unaccept { listener, channel } => engine.unaccept(listener, channel),
        Request::CloseListener { listener } => engine.close_listener(listener),
        Request::CloseAll { limit } => engine.close_all(limit),
    }
}

thread_local! {
    /// On a reactor's thread: which one it is, and what its callbacks have asked for, in order. That is served under the lock
    /// under which the thread polls next anyway.
    static OWN: RefCell<Own> = const { RefCell::new(Own { shared: ptr::null(), ending: false, requests: Vec::new() }) };
}

struct Own {
    shared: *const Shared,
    /// The thread does not come by for requests any more.
    ending: bool,
    requests: Vec<Request>,
}

/// What the thread and the handles share.
pub(super) struct Shared {
    engine: Mutex<AnyEngine>,
    /// Requests that came while the engine was busy, in order. Emptied only under the engine's lock.
    inbox: Mutex<Vec<Request>>,
    /// The inbox has something, or is about to.
    inbox_used: AtomicBool,
    /// Callbacks are called: what they ask for comes before what others ask for later, so those use the inbox. Changed only under
    /// the engine's lock.
    calling: AtomicBool,
    /// The thread wants the engine: those who ask for much let it in, and use the inbox.
    wanted: AtomicBool,
    bell: Bell,
    wake: Wake,
    tickets: AtomicU64,
    stop: AtomicBool,
    /// The thread does not come by for the inbox any more: see [`Shared::serve_late`].
    ended: AtomicBool,
}

impl Shared {
    fn engine(&self) -> MutexGuard<'_, AnyEngine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine, if nobody is in it.
    fn free_engine(&self) -> Option<MutexGuard<'_, AnyEngine>> {
        match self.engine.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(engine)) => Some(engine.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Looks into the engine from outside of the thread.
    pub fn look<R>(&self, at: impl FnOnce(&mut AnyEngine) -> R) -> R {
        let result = at(&mut self.engine());
        self.serve_late();
        result
    }

    fn inbox(&self) -> MutexGuard<'_, Vec<Request>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a request behind those that wait.
    fn enqueue(&self, request: Request) {
        let mut inbox = self.inbox();
        inbox.push(request);
        self.inbox_used.store(true, Ordering::SeqCst);
    }

    fn serve_inbox(&self, engine: &mut AnyEngine) {
        if !self.inbox_used.load(Ordering::SeqCst) {
            return;
        }
        let waiting = {
            let mut inbox = self.inbox();
            self.inbox_used.store(false, Ordering::SeqCst);
            std::mem::take(&mut *inbox)
        };
        for request in waiting {
            serve(engine, request);
        }
    }

    /// Keeps a request of this reactor's own thread for its next turn; gives it back on other threads.
    fn keep(&self, request: Request) -> Option<Request> {
        OWN.with_borrow_mut(|own| {
            if own.ending || !ptr::eq(own.shared, self) {
                return Some(request);
            }
            // Never before what was asked for earlier; but what comes back was there before all of that.
            let comes_back = matches!(request, Request::Unread { .. } | Request::Unaccept { .. });
            if self.inbox_used.load(Ordering::SeqCst) && !comes_back {
                self.enqueue(request);
            } else {
                own.requests.push(request);
            }
            None
        })
    }

    /// True on the thread that calls back.
    pub fn is_own_thread(&self) -> bool {
        OWN.with_borrow(|own| ptr::eq(own.shared, self))
    }

    /// True when that channel is over.
    pub fn is_over(&self, channel: u32) -> bool {
        self.look(|engine| engine.link(channel).is_none_or(|link| !link.is_live()))
    }

    fn serve_own(engine: &mut AnyEngine) {
        // Not in its place: what is dropped meanwhile may ask for something.
        let mut own = OWN.with_borrow_mut(|own| std::mem::take(&mut own.requests));
        for request in own.drain(..) {
            serve(engine, request);
        }
        OWN.with_borrow_mut(|now| {
            if now.requests.is_empty() {
                now.requests = own;
            }
        });
    }

    /// A number for an operation that may be cancelled.
    pub fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// Hands a request to the engine: at once if nobody is in it, otherwise who is in it or the reactor takes it.
    pub fn submit(&self, request: Request) {
        let Some(request) = self.keep(request) else { return };
        let free = if self.wanted.load(Ordering::Relaxed) { None } else { self.free_engine() };
        match free {
            Some(mut engine) if !self.calling.load(Ordering::Relaxed) => {
                self.serve_inbox(&mut engine);
                serve(&mut engine, request);
                engine.go_on();
            }
            _ => self.enqueue(request),
        }
        self.serve_late();
        if self.bell.must_ring() {
            self.wake.ring();
        }
    }

    /// When the thread does not come by any more, those who make requests serve them. Whoever finds the engine taken may leave: who
    /// has it comes here afterwards, and finds what was left.
    fn serve_late(&self) {
        while self.ended.load(Ordering::SeqCst) {
            // Between a request and a look at the lock, and between giving the lock back and a look for requests: one sees the other.
            fence(Ordering::SeqCst);
            let Some(mut engine) = self.free_engine() else { return };
            self.serve_inbox(&mut engine);
            let mut calls = Vec::new();
            engine.take_calls(&mut calls);
            drop(engine);
            if !calls.is_empty() {
                // Not on this thread, which may hold what the callbacks want.
                let spawned =
                    thread::Builder::new().name("channel-end".to_owned()).spawn(move || run(calls.into_iter()));
                if let Err(error) = spawned {
                    log::error!("no thread to end channel operations: {error}");
                }
            }
            fence(Ordering::SeqCst);
            if !self.inbox_used.load(Ordering::SeqCst) {
                return;
            }
        }
    }

    fn has_work(&self) -> bool {
        if self.inbox_used.load(Ordering::SeqCst) || self.stop.load(Ordering::SeqCst) {
            return true;
        }
        self.engine().has_work()
    }

    /// Sleeps until something happens, or a timer is due. `nap` is how long to sleep where the provider cannot wake us.
    fn sleep(&self, nap: Duration) {
        self.bell.lie_down();
        if !self.has_work() {
            let (fd, may_wait, limit) = {
                let engine = self.engine();
                let transport = engine.transport();
                (transport.wait_fd(), transport.may_wait(), engine.timer_interval())
            };
            match fd {
                Some(fd) if may_wait => self.wake.wait(Some(fd), limit),
                Some(_) => {}
                None => self.wake.wait(None, nap.min(limit)),
            }
        }
        self.bell.get_up();
    }
}

/// Makes calls; one that panics does not keep the others from being made.
fn run(calls: impl Iterator<Item = Call>) {
    for call in calls {
        if catch_unwind(AssertUnwindSafe(|| call.run())).is_err() {
            log::error!("a channel callback panicked");
        }
    }
}

/// The reactor's thread. A panic in the engine, here or on a thread that asked it for something, ends all channels: nobody waits
/// for callbacks of a thread that is gone.
fn drive(shared: &Shared, busy_poll: Duration) {
    OWN.with_borrow_mut(|own| own.shared = shared);
    let mut calls = Vec::new();
    let sound = catch_unwind(AssertUnwindSafe(|| {
        if !turn(shared, busy_poll, &mut calls) {
            return false;
        }
        // From here on nobody comes by regularly: requests are served by whoever makes them.
        OWN.with_borrow_mut(|own| own.ending = true);
        {
            let mut engine = shared.engine();
            shared.calling.store(false, Ordering::Relaxed);
            Shared::serve_own(&mut engine);
        }
        finish(shared, &mut calls);
        true
    }));
    if !sound.unwrap_or(false) {
        OWN.with_borrow_mut(|own| own.ending = true);
        if catch_unwind(AssertUnwindSafe(|| break_down(shared, &mut calls))).is_err() {
            log::error!("a channel reactor panicked twice: callbacks may be missing");
        }
    }
}

/// Serves until the reactor is stopped or the endpoint is over; false when somebody panicked in the engine.
fn turn(shared: &Shared, busy_poll: Duration, calls: &mut Vec<Call>) -> bool {
    let (mut polls, mut vain, mut nap) = (0u32, 0u32, NAP.0);
    let mut clock = Instant::now();
    let mut idle_since: Option<Instant> = None;
    while !shared.stop.load(Ordering::SeqCst) {
        if shared.engine.is_poisoned() {
            return false;
        }
        polls = polls.wrapping_add(1);
        let mut due = None;
        if idle_since.is_some() || polls.is_multiple_of(POLLS_PER_CLOCK) {
            let now = Instant::now();
            if now.duration_since(clock) >= Duration::from_millis(1) {
                clock = now;
                due = Some(now);
            }
        }
        let over = {
            shared.wanted.store(true, Ordering::Relaxed);
            let mut engine = shared.engine();
            shared.wanted.store(false, Ordering::Relaxed);
            shared.calling.store(false, Ordering::Relaxed);
            Shared::serve_own(&mut engine);
            shared.serve_inbox(&mut engine);
            engine.go_on();
            let busy = engine.poll(due);
            engine.take_calls(calls);
            shared.calling.store(!calls.is_empty(), Ordering::Relaxed);
            vain = if busy || !calls.is_empty() { 0 } else { vain.saturating_add(1) };
            engine.over.is_some()
        };
        run(calls.drain(..));
        if over {
            break;
        }
        if vain == 0 {
            (idle_since, nap) = (None, NAP.0);
            continue;
        }
        if vain < POLLS_ALONE {
            hint::spin_loop();
            continue;
        }
        let now = Instant::now();
        if now.duration_since(*idle_since.get_or_insert(now)) < busy_poll {
            thread::yield_now();
        } else {
            shared.sleep(nap);
            nap = (nap * 2).min(NAP.1);
        }
    }
    true
}

/// Ends everything after a panic. The transport is not touched again: nobody knows in what state it is, and what the provider was
/// lent stays where it is.
fn break_down(shared: &Shared, calls: &mut Vec<Call>) {
    let text = "it panicked; the message is where those of panics go".to_owned();
    let error = Error::Call { call: "channel reactor", code: ferrogin_libfabric::bindings::FI_EOTHER, text };
    log::error!("{error}: all its channels are over");
    {
        let mut engine = shared.engine();
        std::mem::forget(engine.replace_transport(Box::new(Nowhere)));
        shared.calling.store(false, Ordering::Relaxed);
        engine.stop(&ChannelError::Endpoint(error));
        Shared::serve_own(&mut engine);
        engine.take_calls(calls);
    }
    run(calls.drain(..));
    leave(shared, calls);
}

/// Ends all channels, gives the last words to peers a moment, and closes the endpoint.
fn finish(shared: &Shared, calls: &mut Vec<Call>) {
    let begin = Instant::now();
    loop {
        let mut engine = shared.engine();
        shared.serve_inbox(&mut engine);
        engine.go_on();
        engine.end_all(&ChannelError::Stopped);
        engine.poll(None);
        engine.take_calls(calls);
        let done = engine.is_quiet() || begin.elapsed() > LAST_WORDS;
        if done {
            engine.stop(&ChannelError::Stopped);
            let transport = engine.replace_transport(Box::new(Nowhere));
            engine.take_calls(calls);
            drop(engine);
            drop(transport);
            run(calls.drain(..));
            return leave(shared, calls);
        }
        drop(engine);
        run(calls.drain(..));
        thread::yield_now();
    }
}

/// The thread goes.
fn leave(shared: &Shared, calls: &mut Vec<Call>) {
    {
        let mut engine = shared.engine();
        // Before the last look at the inbox: what is put there later is served by who does it.
        shared.ended.store(true, Ordering::SeqCst);
        shared.serve_inbox(&mut engine);
        engine.take_calls(calls);
    }
    run(calls.drain(..));
    shared.serve_late();
}

/// An endpoint, its channels, and the thread that serves them.
///
/// One reactor is one libfabric endpoint. Callbacks are called by its thread, one after the other, and must not block: while one
/// runs, nothing else moves, and peers that get no answer for [`Config::lost_after`] give up. They may use all channels.
/// Dropping the reactor ends all its channels with [`ChannelError::Stopped`]; [`Reactor::shutdown`] closes them first.
pub struct Reactor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    id: ThreadId,
    config: Config,
    provider: String,
}

impl Reactor {
    /// Opens an endpoint and starts its thread.
    ///
    /// # Errors
    /// [`Error::NoMatch`] when the provider has no reliable datagrams that can carry a channel; what the provider answers.
    pub fn open(lib: &Arc<Libfabric>, config: &Config) -> Result<Self, Error> {
        let tagged = || Tagged::open(lib, &config.provider, config.source.as_deref(), config.max_peers);
        let matched = || Matched::open(lib, config).map(|matched| Box::new(matched) as Box<dyn Transport>);
        // Over a stream each tagged message is a system call at either end, and ours go many together. Before 2.0, what carries tags
        // over tcp also crashes when peers die (rxm) or many messages come unexpected (net).
        let stream = config.provider == "tcp";
        let transport = match config.matching {
            Matching::Ours => matched()?,
            Matching::Auto if stream => matched()?,
            Matching::Auto => match tagged() {
                Err(Error::NoMatch { .. }) => matched()?,
                other => Box::new(other?),
            },
            Matching::Provider => Box::new(tagged()?),
        };
        Self::over(transport, config)
    }

    pub(super) fn over(transport: Box<dyn Transport>, config: &Config) -> Result<Self, Error> {
        let failed = |call: &'static str| {
            move |error: std::io::Error| Error::Call {
                call,
                code: error.raw_os_error().unwrap_or(ferrogin_libfabric::bindings::FI_EOTHER),
                text: error.to_string(),
            }
        };
        let provider = transport.provider().to_owned();
        let shared = Arc::new(Shared {
            engine: Mutex::new(Engine::new(transport, config.clone(), Instant::now())),
            inbox: Mutex::new(Vec::new()),
            inbox_used: AtomicBool::new(false),
            calling: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            bell: Bell::new(),
            wake: Wake::new().map_err(failed("eventfd"))?,
            tickets: AtomicU64::new(1),
            stop: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        let (of_thread, busy_poll) = (Arc::clone(&shared), config.busy_poll);
        let thread = thread::Builder::new()
            .name("channel".to_owned())
            .spawn(move || drive(&of_thread, busy_poll))
            .map_err(failed("thread"))?;
        let id = thread.thread().id();
        Ok(Self { shared, thread: Some(thread), id, config: config.clone(), provider })
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The provider that was found (`tcp`, `efa`).
    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// Begins to listen.
    ///
    /// # Errors
    /// [`ChannelError::Endpoint`] or [`ChannelError::Stopped`] when the reactor is over.
    pub fn listen(&self) -> Result<Listener, ChannelError> {
        let (number, address) = self.shared.look(Engine::listen)?;
        Ok(Listener::new(&self.shared, number, address))
    }

    /// Opens a channel to the listener with that address; `done` gets it, or why it could not be opened, within
    /// [`Config::connect_within`].
    pub fn connect_with(&self, address: &Address, done: impl FnOnce(Result<Channel, ChannelError>) + Send + 'static) {
        let done = Channel::opening(&self.shared, done);
        let (start, limit) = (self.config.start_id, self.config.connect_within);
        self.shared.submit(Request::Connect { address: address.clone(), start, limit, done });
    }

    /// As [`Reactor::connect_with`], to wait for or to await.
    pub fn connect(&self, address: &Address) -> Pending<Channel> {
        let (shared, peer) = (Arc::downgrade(&self.shared), address.endpoint());
        let (pending, done) = Pending::new(Awaited { shared, peer, what: "answer the connect" }, Cancel::Nothing);
        self.connect_with(address, done);
        pending
    }

    /// Closes all channels: what was written goes out, and the peers are told, as far as that is possible within `limit`. Then stops.
    /// True when all peers have said goodbye. In a callback of this reactor, which would wait for itself, it stops at once, and says false.
    pub fn shutdown(self, limit: Duration) -> bool {
        if self.shared.is_own_thread() {
            return false;
        }
        let begin = Instant::now();
        self.shared.submit(Request::CloseAll { limit });
        loop {
            let quiet = self.shared.look(|engine| engine.is_quiet()) && !self.shared.inbox_used.load(Ordering::SeqCst);
            if quiet || begin.elapsed() >= limit {
                return quiet;
            }
            thread::sleep(Duration::from_micros(200));
        }
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if self.shared.bell.must_ring() {
            self.shared.wake.ring();
        }
        // A callback may drop its own reactor: then the thread ends after it.
        if let Some(thread) = self.thread.take()
            && thread::current().id() != self.id
            && thread.join().is_err()
        {
            log::error!("the channel reactor panicked");
        }
    }
}

/// What is left of a stopped reactor's endpoint.
struct Nowhere;

impl Transport for Nowhere {
    fn name(&self) -> &[u8] {
        &[]
    }

    fn provider(&self) -> &str {
        "none"
    }

    fn max_message(&self) -> usize {
        0
    }

    fn insert(&mut self, _: &[u8]) -> Result<Addr, Error> {
        Err(Error::Argument { what: "the reactor has stopped".to_owned() })
    }

    fn send(&mut self, _: Addr, _: u64, body: Payload, _: u64, _: bool) -> Sending {
        Sending::Again(body)
    }

    fn receive(&mut self, _: Option<Addr>, _: Pattern, room: Vec<u8>, _: usize, _: u64) -> Receiving {
        Receiving::Again(room)
    }

    fn look(&mut self, _: Option<Addr>, _: Pattern, _: u64) -> bool {
        false
    }

    fn cancel(&mut self, _: &dyn Fn(u64) -> bool) {}

    fn poll(&mut self, _: &mut Vec<Event>) -> Result<(), Error> {
        Ok(())
    }

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }

    fn may_wait(&self) -> bool {
        true
    }
}

impl Transport for Box<dyn Transport> {
    fn name(&self) -> &[u8] {
        (**self).name()
    }

    fn provider(&self) -> &str {
        (**self).provider()
    }

    fn max_message(&self) -> usize {
        (**self).max_message()
    }

    fn payloads_at_a_time(&self) -> usize {
        (**self).payloads_at_a_time()
    }

    fn discards_leftovers(&self) -> bool {
        (**self).discards_leftovers()
    }

    fn insert(&mut self, name: &[u8]) -> Result<Addr, Error> {
        (**self).insert(name)
    }

    fn send(&mut self, to: Addr, tag: u64, body: Payload, token: u64, more: bool) -> Sending {
        (**self).send(to, tag, body, token, more)
    }

    fn flush(&mut self) {
        (**self).flush();
    }

    fn receive(&mut self, from: Option<Addr>, pattern: Pattern, room: Vec<u8>, len: usize, token: u64) -> Receiving {
        (**self).receive(from, pattern, room, len, token)
    }

    fn look(&mut self, from: Option<Addr>, pattern: Pattern, token: u64) -> bool {
        (**self).look(from, pattern, token)
    }

    fn cancel(&mut self, which: &dyn Fn(u64) -> bool) {
        (**self).cancel(which);
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        (**self).poll(events)
    }

    fn wait_fd(&self) -> Option<RawFd> {
        (**self).wait_fd()
    }

    fn may_wait(&self) -> bool {
        (**self).may_wait()
    }
}
