//! The calling end.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::connection::{Connection, End, Owner};
use crate::error::Status;
use crate::frame::{Header, Kind};
use crate::server::status;
use crate::sweep::{self, Swept};
use crate::{Body, Data, RpcError, Settings, Transport, TransportError, Violation};

type Done = Box<dyn FnOnce(Result<Body, RpcError>) + Send>;

struct Waiting {
    method: u32,
    limit: Duration,
    deadline: Option<Instant>,
    done: Done,
}

#[derive(Default)]
struct State {
    /// Calls that may be made now.
    credits: u64,
    /// Longest body that the server takes; None before its hello.
    max_body: Option<usize>,
    next: u64,
    /// Calls that wait for credit.
    queued: VecDeque<(u64, Data, Waiting)>,
    /// Calls that wait for an answer.
    pending: HashMap<u64, Waiting>,
    /// Calls whose answers nobody wants any more.
    abandoned: HashSet<u64>,
    /// The server begins nothing more.
    goodbye: bool,
    over: Option<RpcError>,
}

/// Calls the methods of one server. Clones are the same client; when the last is dropped, the connection is closed.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    connection: Arc<Connection>,
    state: Mutex<State>,
    peer: Arc<str>,
    close_within: Duration,
}

impl Client {
    /// A client on a connection whose other end is a [`crate::Server`]'s.
    pub fn new(transport: impl Transport, settings: Settings) -> Self {
        let connection = Connection::new(transport, &settings, usize::MAX);
        let peer = connection.transport().peer().into();
        let close_within = settings.close_within;
        let inner = Arc::new(Inner { connection, state: Mutex::default(), peer, close_within });
        let owner = Arc::downgrade(&inner);
        inner.connection.start(owner.clone());
        inner.connection.send(Header { call: settings.max_body as u64, ..Header::new(Kind::Hello) }, Vec::new().into());
        sweep::watch(owner);
        Self(inner)
    }

    /// The server, for people.
    pub fn peer(&self) -> &str {
        &self.0.peer
    }

    /// Calls `method` with `body`. The answer, or [`RpcError`], comes within `limit` (and a hundredth of a second), which
    /// includes the time that the call waits for credit.
    pub fn call(&self, method: u32, body: impl Into<Data>, limit: Duration) -> Call {
        let slot = Arc::new(Slot { state: Mutex::new(Answer::Waiting(None)), ready: Condvar::new() });
        let of_call = Arc::clone(&slot);
        let call = self.call_with(method, body, limit, move |result| {
            let before = std::mem::replace(&mut *of_call.state(), Answer::Ready(result));
            of_call.ready.notify_all();
            if let Answer::Waiting(Some(waker)) = before {
                waker.wake();
            }
        });
        Call { slot, client: Arc::downgrade(&self.0), call }
    }

    /// As [`Client::call`], with a callback, which is called once: by a thread of the transport, by the one that looks after deadlines,
    /// or by this one if the call is refused at once. It must not block. Gives the call's number, for [`Client::cancel`].
    pub fn call_with(
        &self,
        method: u32,
        body: impl Into<Data>,
        limit: Duration,
        done: impl FnOnce(Result<Body, RpcError>) + Send + 'static,
    ) -> u64 {
        let data = body.into();
        // A limit beyond all clocks is none.
        let deadline = Instant::now().checked_add(limit);
        let waiting = Waiting { method, limit, deadline, done: Box::new(done) };
        let mut state = self.0.state();
        let call = state.next;
        state.next += 1;
        let refused = self.0.refused(&state, &data);
        if let Some(error) = refused {
            drop(state);
            waiting.end(Err(error));
        } else if state.credits > 0 && state.queued.is_empty() {
            state.credits -= 1;
            let header = waiting.header(call);
            state.pending.insert(call, waiting);
            drop(state);
            self.0.connection.send(header, data);
        } else {
            state.queued.push_back((call, data, waiting));
        }
        call
    }

    /// Gives a call up: it ends with [`RpcError::Cancelled`], and the server is told. A call that is over is left alone.
    pub fn cancel(&self, call: u64) {
        self.0.cancel(call);
    }

    /// Closes the connection. Calls that are under way end with [`RpcError::Lost`].
    pub fn close(&self) {
        self.0.connection.send(Header::new(Kind::Goodbye), Vec::new().into());
        self.0.connection.close(self.0.close_within);
    }
}

impl Waiting {
    /// Calls back. A callback that panics harms no other call.
    fn end(self, result: Result<Body, RpcError>) {
        let Self { method, done, .. } = self;
        if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
            log::error!("the callback of a call of method {method} panicked");
        }
    }

    fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    fn header(&self, call: u64) -> Header {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()).as_micros());
        let time = left.and_then(|left| u32::try_from(left).ok()).unwrap_or(u32::MAX);
        Header { code: self.method, call, time, ..Header::new(Kind::Request) }
    }
}

impl Inner {
    fn timeout(&self, waiting: &Waiting) -> RpcError {
        RpcError::Timeout { peer: Arc::clone(&self.peer), method: waiting.method, limit: waiting.limit }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, state: &State, data: &Data) -> Option<RpcError> {
        if let Some(over) = &state.over {
            return Some(over.clone());
        }
        if state.goodbye {
            return Some(RpcError::Status { peer: Arc::clone(&self.peer), status: Status::ShuttingDown });
        }
        let (len, max) = (data.as_slice().len(), state.max_body?);
        (len > max).then(|| RpcError::TooLarge { peer: Arc::clone(&self.peer), len, max })
    }

    /// Makes the calls that have credit now.
    fn make_queued(&self) {
        loop {
            let mut state = self.state();
            if state.credits == 0 {
                return;
            }
            let Some((call, data, waiting)) = state.queued.pop_front() else { return };
            if let Some(error) = self.refused(&state, &data) {
                drop(state);
                waiting.end(Err(error));
                continue;
            }
            state.credits -= 1;
            let header = waiting.header(call);
            state.pending.insert(call, waiting);
            // Before anybody can cancel it: what says so must not overtake it.
            self.connection.send(header, data);
        }
    }

    /// Takes a call back, wherever it is; None when it is over.
    fn take(&self, state: &mut State, call: u64) -> Option<Waiting> {
        if let Some(waiting) = state.pending.remove(&call) {
            state.abandoned.insert(call);
            return Some(waiting);
        }
        let at = state.queued.iter().position(|(queued, _, _)| *queued == call)?;
        state.queued.remove(at).map(|(_, _, waiting)| waiting)
    }

    fn give_up(&self, call: u64, error: impl FnOnce(&Waiting) -> RpcError) {
        let (waiting, told) = {
            let mut state = self.state();
            let Some(waiting) = self.take(&mut state, call) else { return };
            (waiting, state.abandoned.contains(&call))
        };
        if told {
            self.connection.send(Header { call, ..Header::new(Kind::Cancel) }, Vec::new().into());
        }
        let error = error(&waiting);
        waiting.end(Err(error));
    }

    fn cancel(&self, call: u64) {
        self.give_up(call, |_| RpcError::Cancelled);
    }

    /// Ends all calls.
    fn end(&self, error: &RpcError) {
        let all: Vec<Waiting> = {
            let mut state = self.state();
            state.over.get_or_insert(error.clone());
            let queued: Vec<_> = state.queued.drain(..).map(|(_, _, waiting)| waiting).collect();
            state.pending.drain().map(|(_, waiting)| waiting).chain(queued).collect()
        };
        for waiting in all {
            waiting.end(Err(error.clone()));
        }
    }

    fn answer(&self, header: &Header, body: Body) -> Result<(), Violation> {
        let waiting = {
            let mut state = self.state();
            state.credits += u64::from(header.credits);
            match state.pending.remove(&header.call) {
                Some(waiting) => Some(waiting),
                None if state.abandoned.remove(&header.call) => None,
                None => return Err(Violation::UnknownCall(header.call)),
            }
        };
        if let Some(waiting) = waiting {
            let result = match status(header.code, waiting.method, &body) {
                None => Ok(body),
                // The server noticed the deadline before we did.
                Some(Status::Late | Status::Cancelled) if waiting.is_late(Instant::now()) => {
                    Err(self.timeout(&waiting))
                }
                Some(status) => Err(RpcError::Status { peer: Arc::clone(&self.peer), status }),
            };
            waiting.end(result);
        }
        self.make_queued();
        Ok(())
    }
}

impl Owner for Inner {
    fn frame(self: Arc<Self>, header: Header, body: Body) -> Result<(), Violation> {
        match header.kind {
            Kind::Hello => {
                let mut state = self.state();
                state.credits += u64::from(header.credits);
                state.max_body = Some(usize::try_from(header.call).unwrap_or(usize::MAX));
                drop(state);
                self.make_queued();
                Ok(())
            }
            Kind::Answer => self.answer(&header, body),
            Kind::Goodbye => {
                let queued = {
                    let mut state = self.state();
                    state.goodbye = true;
                    std::mem::take(&mut state.queued)
                };
                for (_, _, waiting) in queued {
                    let peer = Arc::clone(&self.peer);
                    waiting.end(Err(RpcError::Status { peer, status: Status::ShuttingDown }));
                }
                Ok(())
            }
            Kind::Request | Kind::Cancel => Err(Violation::Direction),
        }
    }

    fn over(&self, end: End) {
        let peer = Arc::clone(&self.peer);
        let error = match end {
            End::Transport(why) => RpcError::Lost { peer, why },
            End::Broken(violation) => {
                log::warn!("{peer} broke the protocol: {violation}");
                self.connection.close(Duration::ZERO);
                RpcError::Protocol { peer, violation }
            }
        };
        self.end(&error);
    }
}

impl Swept for Inner {
    fn sweep(&self, now: Instant) {
        let overdue: Vec<u64> = {
            let state = self.state();
            let pending = state.pending.iter().filter(|(_, waiting)| waiting.is_late(now)).map(|(call, _)| *call);
            let queued = state.queued.iter().filter(|(_, _, waiting)| waiting.is_late(now)).map(|(call, _, _)| *call);
            pending.chain(queued).collect()
        };
        for call in overdue {
            self.give_up(call, |waiting| self.timeout(waiting));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.connection.close(self.close_within);
        let why = TransportError::Closed;
        self.end(&RpcError::Lost { peer: Arc::clone(&self.peer), why });
    }
}

enum Answer {
    Waiting(Option<Waker>),
    Ready(Result<Body, RpcError>),
    Taken,
}

struct Slot {
    state: Mutex<Answer>,
    ready: Condvar,
}

impl Slot {
    fn state(&self) -> MutexGuard<'_, Answer> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An answer to come: a future, or to [`Call::wait`] for. Dropping it cancels the call.
#[must_use = "dropping it cancels the call"]
pub struct Call {
    slot: Arc<Slot>,
    client: Weak<Inner>,
    call: u64,
}

impl Call {
    /// Waits for the answer. In callbacks of the transport that brings it, and of calls whose time is over, that is refused.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub fn wait(self) -> Result<Body, RpcError> {
        let own = |client: &Arc<Inner>| client.connection.transport().is_own_thread() || sweep::is_own_thread();
        let refused = self.client.upgrade().filter(own).map(|client| Arc::clone(&client.peer));
        let mut state = self.slot.state();
        loop {
            match std::mem::replace(&mut *state, Answer::Taken) {
                Answer::Ready(result) => return result,
                Answer::Taken => return Err(RpcError::Cancelled),
                waiting @ Answer::Waiting(_) => *state = waiting,
            }
            if let Some(peer) = refused {
                return Err(RpcError::OwnThread { peer });
            }
            state = self.slot.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Future for Call {
    type Output = Result<Body, RpcError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.slot.state();
        match std::mem::replace(&mut *state, Answer::Taken) {
            Answer::Ready(result) => Poll::Ready(result),
            Answer::Taken => Poll::Ready(Err(RpcError::Cancelled)),
            Answer::Waiting(_) => {
                *state = Answer::Waiting(Some(context.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let waiting = matches!(*self.slot.state(), Answer::Waiting(_));
        if waiting && let Some(client) = self.client.upgrade() {
            client.cancel(self.call);
        }
    }
}
