//! The client: calls the methods of one server.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::connection::{Connection, End, FrameHandler};
use crate::deadline::{self, Expire};
use crate::frame::{Header, Kind};
use crate::parts::{Parts, WINDOW};
use crate::{Body, CallStream, Data, Method, RpcError, Settings, Status, Transport, TransportError, Violation};

/// Who gets the result of a call.
enum Done {
    Callback(Box<dyn FnOnce(Result<Body, RpcError>) + Send>),
    Stream(Arc<Parts>),
}

/// A call that hasn't been answered.
struct OpenCall {
    method: Method,
    limit: Duration,
    deadline: Option<Instant>,
    done: Done,
}

impl OpenCall {
    fn new(method: Method, limit: Duration, done: Done) -> Self {
        // A limit beyond the clock's range is no limit.
        Self { method, limit, deadline: Instant::now().checked_add(limit), done }
    }

    /// Hands over the result. A callback that panics affects no other call.
    fn finish(self, result: Result<Body, RpcError>) {
        let Self { method, done, .. } = self;
        match done {
            Done::Stream(parts) => parts.end(result),
            Done::Callback(done) => {
                if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
                    log::error!("the callback of a call of method {method} panicked");
                }
            }
        }
    }

    /// Returns the parts of a streaming call.
    fn parts(&self) -> Option<Arc<Parts>> {
        match &self.done {
            Done::Callback(_) => None,
            Done::Stream(parts) => Some(Arc::clone(parts)),
        }
    }

    fn is_overdue(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    fn header(&self, call: u64) -> Header {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()).as_micros());
        let time = left.and_then(|left| u32::try_from(left).ok()).unwrap_or(u32::MAX);
        let credits = if matches!(self.done, Done::Stream(_)) { WINDOW } else { 0 };
        Header { code: self.method.number(), call, time, credits, ..Header::new(Kind::Request) }
    }
}

#[derive(Default)]
struct State {
    /// How many calls may be sent now.
    credits: u64,
    /// Length of the longest body that the server accepts, in bytes; `None` before its hello.
    max_body: Option<usize>,
    next_call: u64,
    /// Calls waiting for a credit, in order.
    queued: VecDeque<(u64, Data, OpenCall)>,
    /// Calls that have been sent but not answered.
    sent: HashMap<u64, OpenCall>,
    /// Sent calls that the client gave up: their answers are dropped.
    abandoned: HashSet<u64>,
    /// The server accepts no further calls.
    shutting_down: bool,
    /// The error of every later call, once the connection has ended.
    ended: Option<RpcError>,
}

/// Calls the methods of one server. Clones are the same client; dropping the last one closes the connection.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    connection: Arc<Connection>,
    state: Mutex<State>,
    peer: Arc<str>,
    close_timeout: Duration,
}

impl Client {
    /// Creates a client on a connection to a [`crate::Server`].
    pub fn new(transport: impl Transport, settings: Settings) -> Self {
        let peer = transport.peer().into();
        let inner = Arc::new_cyclic(|inner: &Weak<Inner>| Inner {
            connection: Connection::new(transport, &settings, usize::MAX, inner.clone()),
            state: Mutex::default(),
            peer,
            close_timeout: settings.close_timeout,
        });
        inner.connection.start();
        inner.connection.send(Header { call: settings.max_body as u64, ..Header::new(Kind::Hello) }, Vec::new().into());
        let object: Weak<Inner> = Arc::downgrade(&inner);
        deadline::watch(object);
        Self(inner)
    }

    /// Returns the server's name, for log lines and errors.
    pub fn peer(&self) -> &str {
        &self.0.peer
    }

    /// Calls `method` with `body`. The result or an [`RpcError`] comes within `limit`, plus at most 10 ms; the limit
    /// includes the time that the call waits for a credit.
    pub fn call(&self, method: impl Into<Method>, body: impl Into<Data>, limit: Duration) -> Call {
        let slot = Arc::new(Slot { state: Mutex::new(Answer::Pending(None)), ready: Condvar::new() });
        let callback_slot = Arc::clone(&slot);
        let call = self.call_with(method, body, limit, move |result| {
            let before = std::mem::replace(&mut *callback_slot.state(), Answer::Ready(result));
            callback_slot.ready.notify_all();
            if let Answer::Pending(Some(waker)) = before {
                waker.wake();
            }
        });
        Call { slot, client: Arc::downgrade(&self.0), call }
    }

    /// Like [`Client::call`], but with a callback, which runs exactly once: on a thread of the transport, on the thread
    /// that checks deadlines, or, if the call is refused at once, on this thread. It must not block. Returns the call's
    /// number, for [`Client::cancel`].
    pub fn call_with(
        &self,
        method: impl Into<Method>,
        body: impl Into<Data>,
        limit: Duration,
        done: impl FnOnce(Result<Body, RpcError>) + Send + 'static,
    ) -> u64 {
        let call = self.0.new_call();
        self.0.start(call, OpenCall::new(method.into(), limit, Done::Callback(Box::new(done))), body.into());
        call
    }

    /// Calls a method that was added with [`Server::method_stream`](crate::Server::method_stream): besides `body` and
    /// the answer, both ends send parts. `limit` covers the whole call.
    pub fn stream(&self, method: impl Into<Method>, body: impl Into<Data>, limit: Duration) -> CallStream {
        let call = self.0.new_call();
        let parts = Parts::new(&self.0.connection, call, &self.0.peer, 0, usize::MAX);
        self.0.start(call, OpenCall::new(method.into(), limit, Done::Stream(Arc::clone(&parts))), body.into());
        CallStream::new(parts, self.clone(), call)
    }

    /// Cancels a call: the call ends with [`RpcError::Cancelled`], and the client tells the server. Does nothing if the
    /// call has ended.
    pub fn cancel(&self, call: u64) {
        self.0.cancel(call);
    }

    /// Closes the connection. Open calls end with [`RpcError::Disconnected`].
    pub fn close(&self) {
        self.0.connection.send(Header::new(Kind::Goodbye), Vec::new().into());
        self.0.connection.close(self.0.close_timeout);
    }
}

impl Inner {
    /// Returns the number of the next call.
    fn new_call(&self) -> u64 {
        let mut state = self.state();
        state.next_call += 1;
        state.next_call - 1
    }

    /// Sends a call, queues it until there is a credit, or refuses it.
    fn start(&self, call: u64, open: OpenCall, data: Data) {
        let mut state = self.state();
        let refused = self.refusal(&state, &data);
        if let Some(error) = refused {
            drop(state);
            open.finish(Err(error));
        } else if state.credits > 0 && state.queued.is_empty() {
            state.credits -= 1;
            let (header, parts) = (open.header(call), open.parts());
            state.sent.insert(call, open);
            drop(state);
            self.connection.send(header, data);
            parts.iter().for_each(|parts| parts.open());
        } else {
            state.queued.push_back((call, data, open));
        }
    }

    /// Returns the parts of an open call; `None` if it has ended, since the server may send some before it learns that.
    fn parts(&self, call: u64) -> Result<Option<(Arc<Parts>, usize)>, Violation> {
        let state = self.state();
        match state.sent.get(&call).map(|open| &open.done) {
            None => Ok(None),
            Some(Done::Callback(_)) => Err(Violation::UnexpectedFrame),
            Some(Done::Stream(parts)) => Ok(Some((Arc::clone(parts), state.max_body.unwrap_or(usize::MAX)))),
        }
    }

    fn timeout(&self, open: &OpenCall) -> RpcError {
        RpcError::Timeout { peer: Arc::clone(&self.peer), method: open.method, limit: open.limit }
    }

    fn shutting_down(&self) -> RpcError {
        RpcError::Status { peer: Arc::clone(&self.peer), status: Status::ShuttingDown }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the reason why a call with this body can't be sent, if there is one.
    fn refusal(&self, state: &State, data: &Data) -> Option<RpcError> {
        if let Some(error) = &state.ended {
            return Some(error.clone());
        }
        if state.shutting_down {
            return Some(self.shutting_down());
        }
        let (len, max) = (data.as_slice().len(), state.max_body?);
        (len > max).then(|| RpcError::TooLarge { peer: Arc::clone(&self.peer), len, max })
    }

    /// Sends queued calls while there are credits.
    fn send_queued(&self) {
        loop {
            let mut state = self.state();
            if state.credits == 0 {
                return;
            }
            let Some((call, data, open)) = state.queued.pop_front() else { return };
            if let Some(error) = self.refusal(&state, &data) {
                drop(state);
                open.finish(Err(error));
                continue;
            }
            state.credits -= 1;
            let (header, parts) = (open.header(call), open.parts());
            state.sent.insert(call, open);
            // Under the lock, so that a cancellation of this call cannot overtake it.
            self.connection.send(header, data);
            drop(state);
            parts.iter().for_each(|parts| parts.open());
        }
    }

    /// Removes a sent or queued call; `None` if it has ended.
    fn remove(&self, state: &mut State, call: u64) -> Option<OpenCall> {
        if let Some(open) = state.sent.remove(&call) {
            state.abandoned.insert(call);
            return Some(open);
        }
        let at = state.queued.iter().position(|(queued, _, _)| *queued == call)?;
        state.queued.remove(at).map(|(_, _, open)| open)
    }

    fn give_up(&self, call: u64, error: impl FnOnce(&OpenCall) -> RpcError) {
        let (open, was_sent) = {
            let mut state = self.state();
            let Some(open) = self.remove(&mut state, call) else { return };
            (open, state.abandoned.contains(&call))
        };
        if was_sent {
            self.connection.send(Header { call, ..Header::new(Kind::Cancel) }, Vec::new().into());
        }
        let error = error(&open);
        open.finish(Err(error));
    }

    fn cancel(&self, call: u64) {
        self.give_up(call, |_| RpcError::Cancelled);
    }

    /// Ends all calls with `error`, including later ones.
    fn end_all(&self, error: &RpcError) {
        let all: Vec<OpenCall> = {
            let mut state = self.state();
            state.ended.get_or_insert(error.clone());
            let queued: Vec<_> = state.queued.drain(..).map(|(_, _, open)| open).collect();
            state.sent.drain().map(|(_, open)| open).chain(queued).collect()
        };
        for open in all {
            open.finish(Err(error.clone()));
        }
    }

    fn on_answer(&self, header: &Header, body: Body) -> Result<(), Violation> {
        let open = {
            let mut state = self.state();
            state.credits += u64::from(header.credits);
            match state.sent.remove(&header.call) {
                Some(open) => Some(open),
                None if state.abandoned.remove(&header.call) => None,
                None => return Err(Violation::UnknownCall(header.call)),
            }
        };
        if let Some(open) = open {
            let result = match Status::parse(header.code, open.method, &body) {
                None => Ok(body),
                // The server noticed the deadline first.
                Some(Status::DeadlineExceeded | Status::Cancelled) if open.is_overdue(Instant::now()) => {
                    Err(self.timeout(&open))
                }
                Some(status) => Err(RpcError::Status { peer: Arc::clone(&self.peer), status }),
            };
            open.finish(result);
        }
        self.send_queued();
        Ok(())
    }
}

impl FrameHandler for Inner {
    fn on_frame(self: Arc<Self>, header: Header, body: Body) -> Result<(), Violation> {
        match header.kind {
            Kind::Hello => {
                let mut state = self.state();
                state.credits += u64::from(header.credits);
                state.max_body = Some(usize::try_from(header.call).unwrap_or(usize::MAX));
                drop(state);
                self.send_queued();
                Ok(())
            }
            Kind::Answer => self.on_answer(&header, body),
            Kind::Part => self.parts(header.call)?.map_or(Ok(()), |(parts, _)| parts.received(&header, body)),
            Kind::Window => {
                if let Some((parts, max)) = self.parts(header.call)? {
                    parts.granted(header.credits, max);
                }
                Ok(())
            }
            Kind::Goodbye => {
                let queued = {
                    let mut state = self.state();
                    state.shutting_down = true;
                    std::mem::take(&mut state.queued)
                };
                for (_, _, open) in queued {
                    open.finish(Err(self.shutting_down()));
                }
                Ok(())
            }
            Kind::Request | Kind::Cancel => Err(Violation::UnexpectedFrame),
        }
    }

    fn on_end(&self, end: End) {
        let max_body = self.state().max_body;
        self.end_all(&self.connection.error(Arc::clone(&self.peer), end, max_body));
    }
}

impl Expire for Inner {
    fn expire(&self, now: Instant) {
        let overdue: Vec<u64> = {
            let state = self.state();
            let sent = state.sent.iter().filter(|(_, open)| open.is_overdue(now)).map(|(call, _)| *call);
            let queued = state.queued.iter().filter(|(_, _, open)| open.is_overdue(now)).map(|(call, _, _)| *call);
            sent.chain(queued).collect()
        };
        for call in overdue {
            self.give_up(call, |open| self.timeout(open));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.connection.close(self.close_timeout);
        let why = TransportError::Closed;
        self.end_all(&RpcError::Disconnected { peer: Arc::clone(&self.peer), why });
    }
}

enum Answer {
    Pending(Option<Waker>),
    Ready(Result<Body, RpcError>),
    Taken,
}

/// Where a call's callback leaves the answer for [`Call`].
struct Slot {
    state: Mutex<Answer>,
    ready: Condvar,
}

impl Slot {
    fn state(&self) -> MutexGuard<'_, Answer> {
        self.state.lock()
    }
}

/// A call in progress: a future, which a thread can also block on. Dropping it cancels the call.
#[must_use = "dropping it cancels the call"]
pub struct Call {
    slot: Arc<Slot>,
    client: Weak<Inner>,
    call: u64,
}

impl Call {
    /// Waits for the answer. Returns [`RpcError::WouldDeadlock`] on a thread that is needed to deliver the answer: in a
    /// callback of the same transport, or in the callback of a call whose deadline passed.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub fn wait(self) -> Result<Body, RpcError> {
        let is_own = |client: &Arc<Inner>| client.connection.transport().is_own_thread() || deadline::is_own_thread();
        let would_block = self.client.upgrade().filter(is_own).map(|client| Arc::clone(&client.peer));
        let mut state = self.slot.state();
        loop {
            match std::mem::replace(&mut *state, Answer::Taken) {
                Answer::Ready(result) => return result,
                Answer::Taken => return Err(RpcError::Cancelled),
                pending @ Answer::Pending(_) => *state = pending,
            }
            if let Some(peer) = would_block {
                return Err(RpcError::WouldDeadlock { peer });
            }
            self.slot.ready.wait(&mut state);
        }
    }
}

impl Future for Call {
    type Output = Result<Body, RpcError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let waker = context.waker().clone();
        let mut state = self.slot.state();
        let before = std::mem::replace(&mut *state, Answer::Taken);
        if let Answer::Pending(_) = before {
            *state = Answer::Pending(Some(waker));
        }
        // A waker may own the task that it wakes, and so is dropped without the lock.
        drop(state);
        match before {
            Answer::Ready(result) => Poll::Ready(result),
            Answer::Taken => Poll::Ready(Err(RpcError::Cancelled)),
            Answer::Pending(_) => Poll::Pending,
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let pending = matches!(*self.slot.state(), Answer::Pending(_));
        if pending && let Some(client) = self.client.upgrade() {
            client.cancel(self.call);
        }
    }
}
