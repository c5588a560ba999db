//! Stream queues: each queue runs its tasks in order, on its own thread.
//!
//! A task can wait for points in other streams, for events and for the default stream's ordering. Points always belong
//! to tasks submitted earlier, so streams never deadlock on each other. A copy on an idle stream runs on the caller's
//! thread.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::ThreadId;

use crate::code::{Code, Fault};
use crate::guard::{lock, log};
use crate::handle::{Table, fresh};

/// Streams made by cuStreamCreate.
pub(crate) static STREAMS: Table<Stream> = Table::new();
/// Each context's streams, by its handle.
static CONTEXTS: Table<Streams> = Table::new();

pub(crate) const GREATEST_PRIORITY: c_int = -5;
pub(crate) const NON_BLOCKING: u32 = 1;
/// The default streams' handles.
const LEGACY: usize = 1;
pub(crate) const OF_THREAD: usize = 2;

type Work = Box<dyn FnOnce(&Fault) + Send>;

struct Task {
    after: Vec<Point>,
    /// The task runs even after an error, as events and callbacks do.
    always: bool,
    work: Work,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Task>,
    /// Tasks submitted, and tasks done.
    given: u64,
    done: u64,
    running: bool,
    /// The stream's thread exists.
    thread: bool,
    closed: bool,
}

pub(crate) struct Stream {
    pub(crate) handle: usize,
    /// The handle of the context.
    pub(crate) context: usize,
    pub(crate) fault: Arc<Fault>,
    pub(crate) flags: u32,
    pub(crate) priority: c_int,
    state: Mutex<State>,
    changed: Condvar,
}

/// A point in a stream: the end of a task.
#[derive(Clone)]
pub(crate) struct Point {
    stream: Arc<Stream>,
    number: u64,
}

impl Point {
    pub(crate) fn reached(&self) -> bool {
        lock(&self.stream.state).done >= self.number
    }

    pub(crate) fn wait(&self) {
        let mut state = lock(&self.stream.state);
        while state.done < self.number {
            state = self.stream.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Stream {
    fn new(handle: usize, context: usize, fault: Arc<Fault>, flags: u32, priority: c_int) -> Arc<Self> {
        let (state, changed) = Default::default();
        Arc::new(Self { handle, context, fault, flags, priority, state, changed })
    }

    fn non_blocking(&self) -> bool {
        self.flags & NON_BLOCKING != 0
    }

    /// Returns the end of the last task, unless all are done.
    pub(crate) fn last(self: &Arc<Self>) -> Option<Point> {
        let state = lock(&self.state);
        (state.done < state.given).then(|| Point { stream: self.clone(), number: state.given })
    }

    /// Submits a task.
    pub(crate) fn give(self: &Arc<Self>, work: impl FnOnce(&Fault) + Send + 'static) -> Point {
        self.add(Vec::new(), false, false, Box::new(work))
    }

    /// Submits a task that runs after the points in `after`, even if there was an error.
    pub(crate) fn give_always(
        self: &Arc<Self>,
        after: Vec<Point>,
        work: impl FnOnce(&Fault) + Send + 'static,
    ) -> Point {
        self.add(after, true, false, Box::new(work))
    }

    /// Runs the task on this thread if the stream is idle, and submits it otherwise.
    pub(crate) fn run_or_give(self: &Arc<Self>, work: impl FnOnce(&Fault) + Send + 'static) -> Point {
        self.add(Vec::new(), false, true, Box::new(work))
    }

    fn add(self: &Arc<Self>, mut after: Vec<Point>, always: bool, here: bool, work: Work) -> Point {
        let streams = CONTEXTS.get(self.context);
        let ordered = streams.as_deref().filter(|_| !self.non_blocking());
        let order = ordered.map(|streams| lock(&streams.order));
        if let Some(streams) = ordered {
            let others = match self.handle {
                LEGACY => streams.others(|stream| !stream.non_blocking()),
                _ => vec![streams.legacy.clone()],
            };
            after.extend(others.iter().filter_map(Self::last));
        }
        after.retain(|point| !Arc::ptr_eq(&point.stream, self) && !point.reached());
        let mut state = lock(&self.state);
        state.given += 1;
        let point = Point { stream: self.clone(), number: state.given };
        if here && after.is_empty() && state.queue.is_empty() && !state.running {
            state.running = true;
            drop((state, order));
            self.run(Task { after, always, work });
            if !lock(&self.state).thread {
                self.work_off();
            }
            return point;
        }
        state.queue.push_back(Task { after, always, work });
        self.wake(state);
        point
    }

    /// Wakes the stream's thread, or starts it if there is none.
    fn wake(self: &Arc<Self>, mut state: std::sync::MutexGuard<'_, State>) {
        if state.thread {
            self.changed.notify_all();
            return;
        }
        state.thread = true;
        drop(state);
        let own = self.clone();
        let started = std::thread::Builder::new().name("softgpu-stream".to_owned()).spawn(move || {
            // Signals are for the program's own threads.
            let _ = nix::sys::signal::SigSet::all().thread_block();
            own.work();
        });
        if let Err(error) = started {
            log(format_args!(
                "cannot start a thread for a stream ({error}), so its work runs on the calling thread; raise the \
                 limit of threads (ulimit -u)"
            ));
            lock(&self.state).thread = false;
            self.work_off();
        }
    }

    /// Runs the stream's thread.
    fn work(&self) {
        let mut state = lock(&self.state);
        loop {
            if state.running || state.queue.is_empty() {
                if state.closed && state.queue.is_empty() {
                    // Work that still comes later gets a new thread.
                    state.thread = false;
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if let Some(task) = state.queue.pop_front() {
                state.running = true;
                drop(state);
                self.run(task);
                state = lock(&self.state);
            }
        }
    }

    /// Runs the queued tasks on this thread.
    fn work_off(&self) {
        loop {
            let mut state = lock(&self.state);
            if state.running {
                return;
            }
            let Some(task) = state.queue.pop_front() else { return };
            state.running = true;
            drop(state);
            self.run(task);
        }
    }

    /// Runs a task; the caller has set `running`.
    fn run(&self, task: Task) {
        task.after.iter().for_each(Point::wait);
        if task.always || self.fault.check().is_ok() {
            let work = std::panic::AssertUnwindSafe(|| (task.work)(&self.fault));
            if std::panic::catch_unwind(work).is_err() {
                log(format_args!("work on a stream failed inside the software GPU: this is a bug in soft-gpu"));
                self.fault.set(Code::UNKNOWN);
            }
        }
        let mut state = lock(&self.state);
        state.running = false;
        state.done += 1;
        self.changed.notify_all();
    }

    /// Lets the thread exit once all work is done.
    pub(crate) fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }
}

/// A context's streams, and the order between its default stream and the others.
pub(crate) struct Streams {
    context: usize,
    fault: Arc<Fault>,
    /// The default stream that all threads share, and the per-thread default streams.
    pub(crate) legacy: Arc<Stream>,
    of_threads: Mutex<HashMap<ThreadId, Arc<Stream>>>,
    /// Held during a submit, so that the default stream and the others agree on the order of the calls.
    order: Mutex<()>,
}

impl Streams {
    /// Makes the streams of a new context.
    pub(crate) fn new(context: usize, fault: Arc<Fault>) -> Arc<Self> {
        let legacy = Stream::new(LEGACY, context, fault.clone(), 0, 0);
        let streams = Arc::new(Self { context, fault, legacy, of_threads: Mutex::default(), order: Mutex::default() });
        CONTEXTS.insert(context, streams.clone());
        streams
    }

    /// Adds a stream for cuStreamCreate.
    pub(crate) fn create(&self, flags: u32, priority: c_int) -> usize {
        let stream = Stream::new(fresh(), self.context, self.fault.clone(), flags, priority);
        STREAMS.insert(stream.handle, stream.clone());
        stream.handle
    }

    /// Returns the calling thread's own default stream.
    pub(crate) fn of_thread(&self) -> Arc<Stream> {
        let new = || Stream::new(OF_THREAD, self.context, self.fault.clone(), 0, 0);
        lock(&self.of_threads).entry(std::thread::current().id()).or_insert_with(new).clone()
    }

    /// Returns the created streams for which `wanted` is true, and the per-thread default streams.
    fn others(&self, wanted: impl Fn(&Stream) -> bool) -> Vec<Arc<Stream>> {
        let mut streams = STREAMS.all(|stream| stream.context == self.context && wanted(stream));
        streams.extend(lock(&self.of_threads).values().cloned());
        streams
    }

    /// Waits for all work submitted so far.
    pub(crate) fn wait(&self) {
        let last: Vec<_> = self.others(|_| true).iter().chain([&self.legacy]).filter_map(Stream::last).collect();
        last.iter().for_each(Point::wait);
    }

    /// Closes the streams; work already submitted still runs.
    pub(crate) fn close(&self) {
        CONTEXTS.remove(self.context);
        lock(&self.of_threads).values().chain([&self.legacy]).for_each(|stream| stream.close());
        STREAMS.remove_if(|stream| stream.context == self.context).iter().for_each(|stream| stream.close());
    }
}
