//! The server: runs the methods that clients call.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use async_task::{Runnable, Task};
use ferrogin_channel::{Address, Listener};

use crate::connection::{Connection, End, FrameHandler};
use crate::frame::{Header, Kind};
use crate::parts::{Parts, WINDOW};
use crate::transport::deadline_after;
use crate::{Body, Data, Method, RpcError, ServerStream, Settings, Status, Transport, TransportError, Violation};

/// How long the goodbyes may take in a shutdown whose limit has passed.
const GOODBYE_TIME: Duration = Duration::from_millis(100);

/// What a method gets. Only a streaming method gets `parts`.
struct Request {
    context: Context,
    body: Body,
    responder: Responder,
    parts: Option<Arc<Parts>>,
}

/// The kind of a method.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Runs {
    Function,
    Future,
    /// A future, with parts.
    Stream,
}

#[derive(Clone)]
struct Handler {
    method: Method,
    runs: Runs,
    run: Arc<dyn Fn(Request) + Send + Sync>,
}

/// What a method is told about its call.
#[derive(Clone, Debug)]
pub struct Context {
    /// The client's name, for log lines and errors.
    pub peer: Arc<str>,
    /// The method.
    pub method: Method,
    /// The deadline of the call, if it has one.
    pub deadline: Option<Instant>,
    cancelled: Arc<AtomicBool>,
}

impl Context {
    /// Returns whether the client cancelled the call, or the deadline passed. A long method should check this now and
    /// then.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.is_overdue()
    }

    fn is_overdue(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// Answers one call, from any thread, at any time. If it is dropped without an answer, the call ends with
/// [`Status::NoAnswer`].
pub struct Responder {
    session: Option<Arc<Session>>,
    call: u64,
}

impl Responder {
    /// Answers the call.
    pub fn reply(mut self, result: Result<Data, Status>) {
        if let Some(session) = self.session.take() {
            session.answer(self.call, result);
        }
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            session.answer(self.call, Err(Status::NoAnswer));
        }
    }
}

/// Runs a method's future on the workers and answers with its output. The future is dropped when the call is cancelled.
fn spawn(responder: Responder, method: Method, future: impl Future<Output = Result<Data, Status>> + Send + 'static) {
    let Some(session) = responder.session.clone() else { return };
    let (server, call) = (Weak::clone(&session.server), responder.call);
    let (runnable, task) = async_task::spawn(
        async move {
            let result = future.await;
            responder.reply(result);
        },
        // On a worker, and never on the waking thread, which may hold a lock that the future takes, or be polling the
        // future. Without a server, the future is dropped.
        move |runnable| {
            if let Some(server) = server.upgrade() {
                server.queue(move || run_future(runnable, method));
            }
        },
    );
    let cancelled = match session.calls().open.get_mut(&call) {
        Some(open) if !open.cancelled.load(Ordering::Relaxed) => {
            open.task = Some(task);
            None
        }
        _ => Some(task),
    };
    drop(cancelled);
    run_future(runnable, method);
}

/// Polls a method's future. If it panics, its responder is dropped.
fn run_future(runnable: Runnable, method: Method) {
    if catch_unwind(AssertUnwindSafe(|| runnable.run())).is_err() {
        log::error!("RPC method {method} panicked");
    }
}

/// A server that hasn't been started: its settings and methods.
pub struct Server {
    settings: Settings,
    methods: HashMap<u32, Handler>,
}

/// Each method has its own number: adding a method with the number of another one panics.
impl Server {
    /// Creates a server without methods.
    pub fn new(settings: Settings) -> Self {
        Self { settings, methods: HashMap::new() }
    }

    /// Adds a method that returns its answer.
    #[must_use]
    pub fn method(
        self,
        method: impl Into<Method>,
        run: impl Fn(&Context, Body) -> Result<Data, Status> + Send + Sync + 'static,
    ) -> Self {
        self.method_with(method, move |context, body, responder: Responder| {
            let result = run(&context, body);
            responder.reply(result);
        })
    }

    /// Adds an async method. Its future runs on the server's workers and is dropped when the caller cancels the call or
    /// disconnects. A method that needs its own executor, for instance for tokio's timers and sockets, awaits a task
    /// there: `handle.spawn(...).await`.
    #[must_use]
    pub fn method_async<F: Future<Output = Result<Data, Status>> + Send + 'static>(
        self,
        method: impl Into<Method>,
        run: impl Fn(Context, Body) -> F + Send + Sync + 'static,
    ) -> Self {
        self.add(method.into(), Runs::Future, move |Request { context, body, responder, .. }| {
            spawn(responder, context.method, run(context, body));
        })
    }

    /// Adds an async method whose request and answer may have parts, for bodies that shouldn't be in memory all at
    /// once; [`Client::stream`](crate::Client::stream) calls it.
    #[must_use]
    pub fn method_stream<F: Future<Output = Result<Data, Status>> + Send + 'static>(
        self,
        method: impl Into<Method>,
        run: impl Fn(Context, Body, ServerStream) -> F + Send + Sync + 'static,
    ) -> Self {
        self.add(method.into(), Runs::Stream, move |Request { context, body, responder, parts }| {
            if let Some(parts) = parts {
                spawn(responder, context.method, run(context, body, ServerStream::new(parts)));
            }
        })
    }

    /// Adds a method that answers through a [`Responder`], now or later, on any thread.
    #[must_use]
    pub fn method_with(
        self,
        method: impl Into<Method>,
        run: impl Fn(Context, Body, Responder) + Send + Sync + 'static,
    ) -> Self {
        self.add(method.into(), Runs::Function, move |Request { context, body, responder, .. }| {
            run(context, body, responder)
        })
    }

    fn add(mut self, method: Method, runs: Runs, run: impl Fn(Request) + Send + Sync + 'static) -> Self {
        let handler = Handler { method, runs, run: Arc::new(run) };
        if let Some(other) = self.methods.insert(method.number(), handler) {
            panic!("the methods {} and {method} have the same number: rename one of them", other.method);
        }
        self
    }

    /// Starts the worker threads.
    pub fn start(self) -> ServerHandle {
        // Without workers, a thread still polls the futures that are woken.
        let has_futures = self.methods.values().any(|handler| handler.runs != Runs::Function);
        let workers = self.settings.workers.max(has_futures.into());
        let inner = Arc::new(Inner {
            // A client without credits could never call.
            settings: Settings { credits: self.settings.credits.max(1), ..self.settings },
            methods: self.methods,
            jobs: Mutex::default(),
            job_added: Condvar::new(),
            state: Mutex::default(),
        });
        let threads = (0..workers)
            .filter_map(|number| {
                let inner = Arc::clone(&inner);
                let name = format!("rpc-worker-{number}");
                match thread::Builder::new().name(name).spawn(move || inner.run_jobs()) {
                    Ok(thread) => Some(thread),
                    Err(error) => {
                        log::error!("worker thread {number} for RPC methods did not start: {error}");
                        None
                    }
                }
            })
            .collect();
        ServerHandle { inner, threads, listeners: Mutex::default() }
    }
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Jobs {
    queue: VecDeque<Job>,
    stopped: bool,
}

#[derive(Default)]
struct State {
    sessions: Vec<Arc<Session>>,
    stopping: bool,
}

struct Inner {
    settings: Settings,
    methods: HashMap<u32, Handler>,
    jobs: Mutex<Jobs>,
    job_added: Condvar,
    state: Mutex<State>,
}

impl Inner {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn run_jobs(&self) {
        loop {
            let mut jobs = self.jobs();
            let job = loop {
                if let Some(job) = jobs.queue.pop_front() {
                    break job;
                }
                if jobs.stopped {
                    return;
                }
                self.job_added.wait(&mut jobs);
            };
            drop(jobs);
            job();
        }
    }

    /// Lets every worker end once the queue is empty.
    fn stop_workers(&self) {
        self.jobs().stopped = true;
        self.job_added.notify_all();
    }

    /// Runs a job on a worker, or, without workers, on this thread.
    fn run(&self, job: impl FnOnce() + Send + 'static) {
        if self.settings.workers == 0 {
            return job();
        }
        self.queue(job);
    }

    /// Runs a job on a worker.
    fn queue(&self, job: impl FnOnce() + Send + 'static) {
        self.jobs().queue.push_back(Box::new(job));
        self.job_added.notify_one();
    }

    fn attach(self: &Arc<Self>, transport: impl Transport) {
        let Settings { credits, max_body, .. } = self.settings;
        let peer = transport.peer().into();
        let session = Arc::new_cyclic(|session: &Weak<Session>| Session {
            connection: Connection::new(transport, &self.settings, 2 * credits as usize, session.clone()),
            peer,
            server: Arc::downgrade(self),
            calls: Mutex::default(),
        });
        {
            let mut state = self.state();
            if state.stopping {
                return;
            }
            state.sessions.push(Arc::clone(&session));
        }
        let hello = Header { call: max_body as u64, credits, ..Header::new(Kind::Hello) };
        session.connection.send(hello, Vec::new().into());
        session.connection.start();
    }
}

/// A running server. Dropping it closes its connections at once and waits for running methods, which may check
/// [`Context::is_cancelled`]; [`ServerHandle::shutdown`] lets open calls finish first.
pub struct ServerHandle {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
    listeners: Mutex<Vec<Listener>>,
}

impl ServerHandle {
    /// Serves a connection to a [`crate::Client`].
    pub fn attach(&self, transport: impl Transport) {
        self.inner.attach(transport);
    }

    /// Serves every client that connects to `listener`. Returns the listener's address.
    pub fn listen(&self, listener: Listener) -> Address {
        let address = listener.address().clone();
        let server = Arc::downgrade(&self.inner);
        listener.accept_all(move |channel| match server.upgrade() {
            Some(server) => {
                server.attach(channel);
                true
            }
            None => false,
        });
        self.listeners.lock().push(listener);
        address
    }

    fn close_listeners(&self) {
        let listeners = std::mem::take(&mut *self.listeners.lock());
        drop(listeners);
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        self.inner.state().sessions.len()
    }

    /// Accepts no further calls, waits until the open calls are answered and the answers are sent, and stops, within
    /// `limit` plus 200 ms. Returns true if every answer was sent: then the transport may be dropped. A method still
    /// running at the limit continues; its answer is dropped, and its thread ends with it. On a callback thread of the
    /// transport, which would wait for itself, the limit is zero.
    pub fn shutdown(mut self, limit: Duration) -> bool {
        self.close_listeners();
        let sessions = {
            let mut state = self.inner.state();
            state.stopping = true;
            state.sessions.clone()
        };
        let is_own = sessions.iter().any(|session| session.connection.transport().is_own_thread());
        let deadline = deadline_after(Instant::now(), if is_own { Duration::ZERO } else { limit });
        for session in &sessions {
            session.connection.send(Header::new(Kind::Goodbye), Vec::new().into());
        }
        let answered = wait_until(deadline, || !sessions.iter().any(|session| session.is_busy()));
        let left = deadline.saturating_duration_since(Instant::now()).max(GOODBYE_TIME);
        for session in &sessions {
            session.connection.close(left);
        }
        let is_closed = || sessions.iter().all(|session| session.connection.transport().is_closed());
        let sent = wait_until(deadline_after(Instant::now(), left), is_closed);
        self.inner.stop_workers();
        let deadline = deadline.max(deadline_after(Instant::now(), GOODBYE_TIME));
        wait_until(deadline, || self.threads.iter().all(JoinHandle::is_finished));
        // Drop joins the remaining threads: only those that have ended.
        self.threads.retain(JoinHandle::is_finished);
        answered && sent
    }
}

/// Waits for a condition until the deadline. Returns whether the condition holds.
fn wait_until(deadline: Instant, condition: impl Fn() -> bool) -> bool {
    loop {
        let holds = condition();
        if holds || Instant::now() >= deadline {
            return holds;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        self.close_listeners();
        let sessions = {
            let mut state = self.inner.state();
            state.stopping = true;
            std::mem::take(&mut state.sessions)
        };
        for session in sessions {
            let (peer, why) = (Arc::clone(&session.peer), TransportError::Closed);
            session.cancel_all(&RpcError::Disconnected { peer, why });
            session.connection.close(self.inner.settings.close_timeout);
        }
        self.inner.stop_workers();
        for thread in self.threads.drain(..) {
            // A method may drop its own server, and its thread can't join itself.
            if thread.thread().id() != thread::current().id() && thread.join().is_err() {
                log::error!("an RPC worker thread panicked");
            }
        }
    }
}

/// A call that hasn't been answered.
struct OpenCall {
    cancelled: Arc<AtomicBool>,
    /// The parts of a streaming call.
    parts: Option<Arc<Parts>>,
    /// The future of an async method. Dropping it cancels the method.
    task: Option<Task<()>>,
}

impl OpenCall {
    /// Marks the call as cancelled by its caller. The returned value must be ended without holding the lock, because
    /// that runs methods.
    fn cancel(&mut self) -> Cancelled {
        self.cancelled.store(true, Ordering::Relaxed);
        Cancelled { parts: self.parts.clone(), task: self.task.take() }
    }
}

/// The parts and the future of a cancelled call.
struct Cancelled {
    parts: Option<Arc<Parts>>,
    task: Option<Task<()>>,
}

impl Cancelled {
    fn end(self, why: &RpcError) {
        if let Some(parts) = self.parts {
            parts.end(Err(why.clone()));
        }
        drop(self.task);
    }
}

#[derive(Default)]
struct Calls {
    /// Calls without an answer.
    open: HashMap<u64, OpenCall>,
    /// Answers on their way to the connection.
    answering: usize,
    /// Length of the longest body that the client accepts, in bytes; `None` before its hello.
    max_body: Option<usize>,
}

/// The server's end of one connection.
struct Session {
    connection: Arc<Connection>,
    peer: Arc<str>,
    server: Weak<Inner>,
    calls: Mutex<Calls>,
}

impl Session {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock()
    }

    fn answer(&self, call: u64, result: Result<Data, Status>) {
        let (max, open) = {
            let mut calls = self.calls();
            // Before the answer returns the credit: the next call may arrive at once.
            let open = calls.open.remove(&call);
            calls.answering += 1;
            (calls.max_body.unwrap_or(usize::MAX), open)
        };
        if let Some(parts) = open.and_then(|open| open.parts) {
            parts.end(Err(RpcError::Cancelled));
        }
        let len = result.as_ref().map_or(0, |data| data.as_slice().len());
        let result = if len > max {
            Err(Status::failed(0, format!("the answer has {len} bytes and the client accepts at most {max}")))
        } else {
            result
        };
        let (code, data) = match result {
            Ok(data) => (0, data),
            Err(status) => {
                let (code, body) = status.emit(max);
                (code, body.into())
            }
        };
        self.connection.send(Header { code, call, credits: 1, ..Header::new(Kind::Answer) }, data);
        self.calls().answering -= 1;
    }

    fn cancel_all(&self, why: &RpcError) {
        let cancelled: Vec<_> = self.calls().open.values_mut().map(OpenCall::cancel).collect();
        cancelled.into_iter().for_each(|cancelled| cancelled.end(why));
    }

    /// Returns the parts of an open streaming call, and the length of the longest part that the client accepts. A
    /// client may send the end of its parts to any method, and to one that has answered in the meantime.
    fn parts(&self, call: u64) -> Option<(Arc<Parts>, usize)> {
        let calls = self.calls();
        Some((calls.open.get(&call)?.parts.clone()?, calls.max_body.unwrap_or(usize::MAX)))
    }

    /// Returns whether a call is open, or its answer hasn't reached the connection yet.
    fn is_busy(&self) -> bool {
        let calls = self.calls();
        !calls.open.is_empty() || calls.answering > 0
    }

    fn on_request(self: &Arc<Self>, server: &Inner, header: &Header, body: Body) -> Result<(), Violation> {
        let cancelled = Arc::new(AtomicBool::new(false));
        let method = server.methods.get(&header.code);
        let parts = {
            let mut calls = self.calls();
            if calls.open.contains_key(&header.call) {
                return Err(Violation::DuplicateCall(header.call));
            }
            if calls.open.len() >= server.settings.credits as usize {
                return Err(Violation::NoCredit(server.settings.credits));
            }
            let max = calls.max_body.unwrap_or(usize::MAX);
            let streams = method.is_some_and(|method| method.runs == Runs::Stream);
            let parts = streams.then(|| Parts::new(&self.connection, header.call, &self.peer, header.credits, max));
            let open = OpenCall { cancelled: Arc::clone(&cancelled), parts: parts.clone(), task: None };
            calls.open.insert(header.call, open);
            parts
        };
        let responder = Responder { session: Some(Arc::clone(self)), call: header.call };
        if server.state().stopping {
            responder.reply(Err(Status::ShuttingDown));
            return Ok(());
        }
        let Some(handler) = method.cloned() else {
            responder.reply(Err(Status::NoMethod(header.code.into())));
            return Ok(());
        };
        if let Some(parts) = &parts {
            if header.credits == 0 {
                let text = format!("{} takes its request in parts: call it with Client::stream", handler.method);
                responder.reply(Err(Status::failed(0, text)));
                return Ok(());
            }
            parts.grant(WINDOW);
        }
        let left = (header.time != u32::MAX).then(|| Duration::from_micros(u64::from(header.time)));
        let deadline = left.map(|left| Instant::now() + left);
        let context = Context { peer: Arc::clone(&self.peer), method: handler.method, deadline, cancelled };
        server.run(move || {
            if context.is_overdue() {
                responder.reply(Err(Status::DeadlineExceeded));
            } else if context.is_cancelled() {
                responder.reply(Err(Status::Cancelled));
            } else {
                let request = Request { context, body, responder, parts };
                if catch_unwind(AssertUnwindSafe(|| (handler.run)(request))).is_err() {
                    log::error!("RPC method {} panicked", handler.method);
                }
            }
        });
        Ok(())
    }
}

impl FrameHandler for Session {
    fn on_frame(self: Arc<Self>, header: Header, body: Body) -> Result<(), Violation> {
        match header.kind {
            Kind::Hello => {
                self.calls().max_body = Some(usize::try_from(header.call).unwrap_or(usize::MAX));
                Ok(())
            }
            Kind::Request => {
                let Some(server) = self.server.upgrade() else { return Ok(()) };
                self.on_request(&server, &header, body)
            }
            Kind::Cancel => {
                let cancelled = self.calls().open.get_mut(&header.call).map(OpenCall::cancel);
                if let Some(cancelled) = cancelled {
                    cancelled.end(&RpcError::Cancelled);
                }
                Ok(())
            }
            Kind::Part => self.parts(header.call).map_or(Ok(()), |(parts, _)| parts.received(&header, body)),
            Kind::Window => {
                if let Some((parts, max)) = self.parts(header.call) {
                    parts.granted(header.credits, max);
                }
                Ok(())
            }
            Kind::Goodbye => Ok(()),
            Kind::Answer => Err(Violation::UnexpectedFrame),
        }
    }

    fn on_end(&self, end: End) {
        let max_body = self.calls().max_body;
        self.cancel_all(&self.connection.error(Arc::clone(&self.peer), end, max_body));
        if let Some(server) = self.server.upgrade() {
            let is_this = |session: &mut Arc<Self>| std::ptr::eq(&**session, self);
            // Dropped without the lock: a session drops its transport.
            let ended: Vec<_> = server.state().sessions.extract_if(.., is_this).collect();
            drop(ended);
        }
    }
}
