//! The answering end.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ferrogin_channel::{Address, Listener};

use crate::connection::{Connection, End, Owner};
use crate::error::Status;
use crate::frame::{Header, Kind};
use crate::transport::later;
use crate::{Body, Data, Settings, Transport, Violation};

/// Time that goodbyes get when a shutdown has none left.
const GOODBYE: Duration = Duration::from_millis(100);

type Handler = Arc<dyn Fn(Context, Body, Responder) + Send + Sync>;

const NO_METHOD: u32 = 1;
const LATE: u32 = 2;
const CANCELLED: u32 = 3;
const SHUTTING_DOWN: u32 = 4;
const FAILED: u32 = 5;
const BROKEN: u32 = 6;

/// A status as an answer's code and body, whose words are cut off where it would be longer than `max`.
fn emit(status: &Status, max: usize) -> (u32, Vec<u8>) {
    let code = match status {
        Status::NoMethod(_) => NO_METHOD,
        Status::Late => LATE,
        Status::Cancelled => CANCELLED,
        Status::ShuttingDown => SHUTTING_DOWN,
        Status::Failed { code, text } if max >= 4 => {
            let end = (0..=text.len().min(max - 4)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
            return (FAILED, [&code.to_le_bytes()[..], &text.as_bytes()[..end]].concat());
        }
        Status::Failed { .. } | Status::Broken => BROKEN,
    };
    (code, Vec::new())
}

/// The status in an answer to `method`; None when it is a good one. What is unknown is a broken method.
pub(crate) fn status(code: u32, method: u32, body: &Body) -> Option<Status> {
    Some(match code {
        0 => return None,
        NO_METHOD => Status::NoMethod(method),
        LATE => Status::Late,
        CANCELLED => Status::Cancelled,
        SHUTTING_DOWN => Status::ShuttingDown,
        FAILED => match body.bytes().split_first_chunk::<4>() {
            Some((code, text)) => Status::failed(u32::from_le_bytes(*code), String::from_utf8_lossy(text).into_owned()),
            None => Status::Broken,
        },
        _ => Status::Broken,
    })
}

/// What a method learns of its call.
#[derive(Clone, Debug)]
pub struct Context {
    /// The caller, for people.
    pub peer: Arc<str>,
    /// The method.
    pub method: u32,
    /// When the caller stops waiting, if it does.
    pub deadline: Option<Instant>,
    cancelled: Arc<AtomicBool>,
}

impl Context {
    /// True when the caller is not interested any more, or its deadline is over: long methods look now and then.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.is_late()
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// Answers one call, from any thread, at any time. Dropped without an answer, it says so to the caller.
pub struct Responder {
    connection: Option<Arc<Served>>,
    call: u64,
}

impl Responder {
    /// Answers.
    pub fn reply(mut self, result: Result<Data, Status>) {
        if let Some(connection) = self.connection.take() {
            connection.answer(self.call, result);
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.answer(self.call, Err(Status::Broken));
        }
    }
}

/// A server before it starts: its methods.
pub struct Server {
    settings: Settings,
    methods: HashMap<u32, Handler>,
}

impl Server {
    /// A server without methods.
    pub fn new(settings: Settings) -> Self {
        Self { settings, methods: HashMap::new() }
    }

    /// Adds a method that gives its answer when it returns.
    #[must_use]
    pub fn method(
        self,
        number: u32,
        method: impl Fn(&Context, Body) -> Result<Data, Status> + Send + Sync + 'static,
    ) -> Self {
        self.method_with(number, move |context, body, responder: Responder| {
            let result = method(&context, body);
            responder.reply(result);
        })
    }

    /// Adds a method that may answer later, from wherever it takes the responder.
    #[must_use]
    pub fn method_with(
        mut self,
        number: u32,
        method: impl Fn(Context, Body, Responder) + Send + Sync + 'static,
    ) -> Self {
        self.methods.insert(number, Arc::new(method));
        self
    }

    /// Starts the threads.
    pub fn start(self) -> Running {
        let workers = self.settings.workers;
        let inner = Arc::new(Inner {
            // With none, no call would ever be made.
            settings: Settings { credits: self.settings.credits.max(1), ..self.settings },
            methods: self.methods,
            jobs: Mutex::default(),
            more: Condvar::new(),
            state: Mutex::default(),
        });
        let threads = (0..workers)
            .filter_map(|number| {
                let inner = Arc::clone(&inner);
                let name = format!("rpc-worker-{number}");
                match thread::Builder::new().name(name).spawn(move || inner.work()) {
                    Ok(thread) => Some(thread),
                    Err(error) => {
                        log::error!("no thread for methods: {error}");
                        None
                    }
                }
            })
            .collect();
        Running { inner, threads, listeners: Mutex::default() }
    }
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Jobs {
    queue: VecDeque<Job>,
    over: bool,
}

#[derive(Default)]
struct State {
    connections: Vec<Arc<Served>>,
    stopping: bool,
}

struct Inner {
    settings: Settings,
    methods: HashMap<u32, Handler>,
    jobs: Mutex<Jobs>,
    more: Condvar,
    state: Mutex<State>,
}

impl Inner {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let mut jobs = self.jobs();
            let job = loop {
                if let Some(job) = jobs.queue.pop_front() {
                    break job;
                }
                if jobs.over {
                    return;
                }
                jobs = self.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            };
            drop(jobs);
            job();
        }
    }

    /// Threads end when the queue is empty.
    fn end_work(&self) {
        self.jobs().over = true;
        self.more.notify_all();
    }

    fn run(&self, job: Job) {
        if self.settings.workers == 0 {
            return job();
        }
        self.jobs().queue.push_back(job);
        self.more.notify_one();
    }

    fn attach(self: &Arc<Self>, transport: impl Transport) {
        let ahead = 2 * self.settings.credits as usize;
        let connection = Connection::new(transport, &self.settings, ahead);
        let served = Arc::new(Served {
            peer: connection.transport().peer().into(),
            connection,
            server: Arc::downgrade(self),
            calls: Mutex::default(),
        });
        {
            let mut state = self.state();
            if state.stopping {
                return;
            }
            state.connections.push(Arc::clone(&served));
        }
        let Settings { credits, max_body, .. } = self.settings;
        let hello = Header { call: max_body as u64, credits, ..Header::new(Kind::Hello) };
        served.connection.send(hello, Vec::new().into());
        let owner: Weak<Served> = Arc::downgrade(&served);
        served.connection.start(owner);
    }
}

/// A server that runs. Dropping it closes its connections at once, and waits for the methods that run, which may ask
/// [`Context::is_cancelled`]; [`Running::shutdown`] lets calls come to their end first.
pub struct Running {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
    listeners: Mutex<Vec<Listener>>,
}

impl Running {
    /// Serves a connection whose other end is a [`crate::Client`]'s.
    pub fn attach(&self, transport: impl Transport) {
        self.inner.attach(transport);
    }

    /// Serves everybody who connects to `listener`; gives its address.
    pub fn listen(&self, listener: Listener) -> Address {
        let address = listener.address().clone();
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.push(listener);
        let at = listeners.len() - 1;
        accept(&Arc::downgrade(&self.inner), &listeners[at]);
        address
    }

    /// Connections at the moment.
    pub fn connections(&self) -> usize {
        self.inner.state().connections.len()
    }

    /// Takes no more calls, lets those that run come to their end and their answers go out, says goodbye and stops, all of it within
    /// `limit` (and a moment for goodbyes). True when all calls were answered and the answers are out: then the transport may go.
    /// Methods that still run at the limit are left alone: their answers go nowhere, their threads end with them. On a thread that calls
    /// back for the transport, which would wait for itself, the limit is over at once.
    pub fn shutdown(mut self, limit: Duration) -> bool {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let connections = {
            let mut state = self.inner.state();
            state.stopping = true;
            state.connections.clone()
        };
        let own = connections.iter().any(|served| served.connection.transport().is_own_thread());
        let deadline = later(Instant::now(), if own { Duration::ZERO } else { limit });
        for served in &connections {
            served.connection.send(Header::new(Kind::Goodbye), Vec::new().into());
        }
        let answered = wait_until(deadline, || !connections.iter().any(|served| served.is_busy()));
        let left = deadline.saturating_duration_since(Instant::now()).max(GOODBYE);
        for served in &connections {
            served.connection.close(left);
        }
        let closed = || connections.iter().all(|served| served.connection.transport().is_closed());
        let out = wait_until(later(Instant::now(), left), closed);
        self.inner.end_work();
        let deadline = deadline.max(later(Instant::now(), GOODBYE));
        wait_until(deadline, || self.threads.iter().all(JoinHandle::is_finished));
        self.threads.retain(JoinHandle::is_finished);
        answered && out
    }
}

/// Waits for something, but not beyond the deadline; whether it came.
fn wait_until(deadline: Instant, is_so: impl Fn() -> bool) -> bool {
    loop {
        let so = is_so();
        if so || Instant::now() >= deadline {
            return so;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Takes the next connection, and from its callback the ones after it.
fn accept(server: &Weak<Inner>, listener: &Listener) {
    let server = Weak::clone(server);
    listener.accept_all(move |channel| match server.upgrade() {
        Some(server) => {
            server.attach(channel);
            true
        }
        None => false,
    });
}

impl Drop for Running {
    fn drop(&mut self) {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let connections = {
            let mut state = self.inner.state();
            state.stopping = true;
            std::mem::take(&mut state.connections)
        };
        for served in connections {
            served.cancel_all();
            served.connection.close(self.inner.settings.close_within);
        }
        self.inner.end_work();
        for thread in self.threads.drain(..) {
            // A method may drop its own server: then its thread ends by itself.
            if thread.thread().id() != thread::current().id() && thread.join().is_err() {
                log::error!("a worker panicked");
            }
        }
    }
}

#[derive(Default)]
struct Calls {
    /// Calls without an answer, and whether they are cancelled.
    open: HashMap<u64, Arc<AtomicBool>>,
    /// Answers that are being handed to the connection.
    answering: usize,
    /// Longest answer that the client takes.
    max_body: Option<usize>,
}

/// One connection.
struct Served {
    connection: Arc<Connection>,
    peer: Arc<str>,
    server: Weak<Inner>,
    calls: Mutex<Calls>,
}

impl Served {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, call: u64, result: Result<Data, Status>) {
        let max = {
            let mut calls = self.calls();
            // Before the answer gives the credit back, for the next call may come at once.
            calls.open.remove(&call);
            calls.answering += 1;
            calls.max_body.unwrap_or(usize::MAX)
        };
        let len = result.as_ref().map_or(0, |data| data.as_slice().len());
        let result = if len > max {
            Err(Status::failed(0, format!("the answer of {len} bytes is longer than the caller takes ({max})")))
        } else {
            result
        };
        let (code, data) = match result {
            Ok(data) => (0, data),
            Err(status) => {
                let (code, body) = emit(&status, max);
                (code, body.into())
            }
        };
        self.connection.send(Header { code, call, credits: 1, ..Header::new(Kind::Answer) }, data);
        self.calls().answering -= 1;
    }

    fn cancel_all(&self) {
        for cancelled in self.calls().open.values() {
            cancelled.store(true, Ordering::Relaxed);
        }
    }

    /// Calls run, or their answers are not with the connection yet.
    fn is_busy(&self) -> bool {
        let calls = self.calls();
        !calls.open.is_empty() || calls.answering > 0
    }

    fn request(self: &Arc<Self>, server: &Arc<Inner>, header: &Header, body: Body) -> Result<(), Violation> {
        let cancelled = Arc::new(AtomicBool::new(false));
        {
            let mut calls = self.calls();
            if calls.open.len() >= server.settings.credits as usize {
                return Err(Violation::NoCredit(server.settings.credits));
            }
            if calls.open.insert(header.call, Arc::clone(&cancelled)).is_some() {
                return Err(Violation::CallTwice(header.call));
            }
        }
        let responder = Responder { connection: Some(Arc::clone(self)), call: header.call };
        if server.state().stopping {
            responder.reply(Err(Status::ShuttingDown));
            return Ok(());
        }
        let Some(method) = server.methods.get(&header.code) else {
            responder.reply(Err(Status::NoMethod(header.code)));
            return Ok(());
        };
        let left = (header.time != u32::MAX).then(|| Duration::from_micros(u64::from(header.time)));
        let deadline = left.map(|left| Instant::now() + left);
        let context = Context { peer: Arc::clone(&self.peer), method: header.code, deadline, cancelled };
        let method = Arc::clone(method);
        server.run(Box::new(move || {
            if context.is_late() {
                responder.reply(Err(Status::Late));
            } else if context.is_cancelled() {
                responder.reply(Err(Status::Cancelled));
            } else if catch_unwind(AssertUnwindSafe(|| method(context, body, responder))).is_err() {
                log::error!("a method panicked");
            }
        }));
        Ok(())
    }
}

impl Owner for Served {
    fn frame(self: Arc<Self>, header: Header, body: Body) -> Result<(), Violation> {
        match header.kind {
            Kind::Hello => {
                self.calls().max_body = Some(usize::try_from(header.call).unwrap_or(usize::MAX));
                Ok(())
            }
            Kind::Request => {
                let Some(server) = self.server.upgrade() else { return Ok(()) };
                self.request(&server, &header, body)
            }
            Kind::Cancel => {
                if let Some(cancelled) = self.calls().open.get(&header.call) {
                    cancelled.store(true, Ordering::Relaxed);
                }
                Ok(())
            }
            Kind::Goodbye => Ok(()),
            Kind::Answer => Err(Violation::Direction),
        }
    }

    fn over(&self, end: End) {
        if let End::Broken(violation) = &end {
            log::warn!("{} broke the protocol: {violation}", self.peer);
            self.connection.close(Duration::ZERO);
        }
        self.cancel_all();
        if let Some(server) = self.server.upgrade() {
            server.state().connections.retain(|served| !std::ptr::eq(&**served, self));
        }
    }
}
