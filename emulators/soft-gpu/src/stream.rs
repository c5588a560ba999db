//! Streams: queues whose tasks run in their order, each queue with a thread of its own.
//!
//! A task waits for points of other streams: those of events, and those by which the default stream keeps its order. Points are of tasks
//! that were given before, so streams never wait in a circle. A copy whose stream has nothing to do runs on the thread of the caller.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::code::{Code, Outcome};
use crate::context::{self, CONTEXTS, Context, Fault};
use crate::device;
use crate::event::{self, Event, Pending};
use crate::guard::{Out, lock, log};
use crate::handle::{Table, fresh};

/// Streams of cuStreamCreate.
pub(crate) static STREAMS: Table<Stream> = Table::new();

pub(crate) const GREATEST_PRIORITY: c_int = -5;
const NON_BLOCKING: u32 = 1;
/// Handles of the default streams.
const LEGACY: usize = 1;
const OF_THREAD: usize = 2;

type Work = Box<dyn FnOnce(&Fault) + Send>;

struct Task {
    after: Vec<Point>,
    /// Runs also after an error: events and callbacks.
    always: bool,
    work: Work,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Task>,
    /// Tasks given, and tasks done. One may run between.
    given: u64,
    done: u64,
    running: bool,
    /// The stream has its thread.
    thread: bool,
    closed: bool,
}

pub(crate) struct Stream {
    pub(crate) handle: usize,
    /// The handle of the context.
    pub(crate) context: usize,
    pub(crate) fault: Arc<Fault>,
    flags: u32,
    priority: c_int,
    state: Mutex<State>,
    changed: Condvar,
}

/// The end of a task.
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

    pub(crate) fn legacy(context: usize, fault: Arc<Fault>) -> Arc<Self> {
        Self::new(LEGACY, context, fault, 0, 0)
    }

    pub(crate) fn of_thread(context: usize, fault: Arc<Fault>) -> Arc<Self> {
        Self::new(OF_THREAD, context, fault, 0, 0)
    }

    pub(crate) fn non_blocking(&self) -> bool {
        self.flags & NON_BLOCKING != 0
    }

    /// The end of the last task, unless all are done.
    pub(crate) fn last(self: &Arc<Self>) -> Option<Point> {
        let state = lock(&self.state);
        (state.done < state.given).then(|| Point { stream: self.clone(), number: state.given })
    }

    /// Gives the stream a task.
    pub(crate) fn give(self: &Arc<Self>, work: impl FnOnce(&Fault) + Send + 'static) -> Point {
        self.add(Vec::new(), false, false, Box::new(work))
    }

    /// The same for a task that runs also after an error.
    pub(crate) fn give_always(
        self: &Arc<Self>,
        after: Vec<Point>,
        work: impl FnOnce(&Fault) + Send + 'static,
    ) -> Point {
        self.add(after, true, false, Box::new(work))
    }

    /// Runs the task on this thread if the stream has nothing else to do, and gives it to the stream otherwise.
    pub(crate) fn run_or_give(self: &Arc<Self>, work: impl FnOnce(&Fault) + Send + 'static) -> Point {
        self.add(Vec::new(), false, true, Box::new(work))
    }

    fn add(self: &Arc<Self>, mut after: Vec<Point>, always: bool, here: bool, work: Work) -> Point {
        let context = CONTEXTS.get(self.context);
        let ordered = context.as_deref().filter(|_| !self.non_blocking());
        let order = ordered.map(|context| lock(&context.order));
        if let Some(context) = ordered {
            let others = if self.handle == LEGACY { context.blocking_streams() } else { vec![context.legacy.clone()] };
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

    /// Lets the stream's thread go on, after it is started if there is none.
    fn wake(self: &Arc<Self>, mut state: std::sync::MutexGuard<'_, State>) {
        if state.thread {
            self.changed.notify_all();
            return;
        }
        state.thread = true;
        drop(state);
        let own = self.clone();
        let started = std::thread::Builder::new().name("softgpu-stream".to_owned()).spawn(move || {
            // Signals are for the threads of the program.
            let _ = nix::sys::signal::SigSet::all().thread_block();
            own.work();
        });
        if let Err(error) = started {
            log(format_args!(
                "no thread for a stream ({error}): its work runs in the thread that gives it; raise the limit of threads (ulimit -u)"
            ));
            lock(&self.state).thread = false;
            self.work_off();
        }
    }

    /// The life of the stream's thread.
    fn work(&self) {
        let mut state = lock(&self.state);
        loop {
            if state.running || state.queue.is_empty() {
                if state.closed && state.queue.is_empty() {
                    // Work that comes all the same gets a new thread.
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

    /// Runs what is in the queue on this thread.
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

    /// Runs a task; `running` is set.
    fn run(&self, task: Task) {
        task.after.iter().for_each(Point::wait);
        if task.always || self.fault.check().is_ok() {
            let work = std::panic::AssertUnwindSafe(|| (task.work)(&self.fault));
            if std::panic::catch_unwind(work).is_err() {
                log(format_args!("work on a stream failed inside the software GPU: this is a bug of soft-gpu"));
                self.fault.set(Code::UNKNOWN);
            }
        }
        let mut state = lock(&self.state);
        state.running = false;
        state.done += 1;
        self.changed.notify_all();
    }

    /// The thread ends when all work is done.
    pub(crate) fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }
}

/// The stream of a handle, among them the default streams of the current context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`, or those of the context.
pub(crate) fn resolve(handle: usize) -> Outcome<Arc<Stream>> {
    if handle > OF_THREAD {
        device::started()?;
        let stream = STREAMS.get(handle).ok_or(Code::INVALID_HANDLE)?;
        stream.fault.check()?;
        return Ok(stream);
    }
    let context = context::current()?;
    Ok(if handle == OF_THREAD { context.of_thread() } else { context.legacy.clone() })
}

/// The same for work on the current context: a stream of another context is refused.
pub(crate) fn for_work(handle: usize) -> Outcome<(Arc<Context>, Arc<Stream>)> {
    let context = context::current()?;
    let stream = resolve(handle)?;
    if stream.context == context.handle { Ok((context, stream)) } else { Err(Code::INVALID_HANDLE) }
}

fn create(out: Out<usize>, flags: u32, priority: c_int) -> Outcome {
    let context = context::current()?;
    out.present()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let priority = priority.clamp(GREATEST_PRIORITY, 0);
    let stream = Stream::new(fresh(), context.handle, context.fault.clone(), flags, priority);
    STREAMS.insert(stream.handle, stream.clone());
    out.set(stream.handle)
}

type HostFunction = extern "C" fn(*mut c_void);
type Callback = extern "C" fn(usize, Code, *mut c_void);

/// Data of the program that its function gets back.
struct UserData(*mut c_void);

// SAFETY: the program gives the address for use on the stream's thread; this library only passes it on.
unsafe impl Send for UserData {}

impl UserData {
    fn get(self) -> *mut c_void {
        self.0
    }
}

thread_local! {
    static CAPTURE_MODE: AtomicI32 = const { AtomicI32::new(0) };
}

api! {
    cuStreamCreate(out: Out<usize>, flags: u32) {
        create(out, flags, 0)
    }

    cuStreamCreateWithPriority(out: Out<usize>, flags: u32, priority: c_int) {
        create(out, flags, priority)
    }

    /// Work that was given before runs on.
    cuStreamDestroy_v2(handle: usize) {
        device::started()?;
        let stream = STREAMS.remove(handle).ok_or(Code::INVALID_HANDLE)?;
        stream.close();
        Ok(())
    }

    cuStreamSynchronize(handle: usize) {
        let stream = resolve(handle)?;
        if let Some(point) = stream.last() {
            point.wait();
        }
        stream.fault.check()
    }

    cuStreamQuery(handle: usize) {
        let stream = resolve(handle)?;
        if stream.last().is_some() { Err(Code::NOT_READY) } else { stream.fault.check() }
    }

    cuStreamWaitEvent(handle: usize, event: usize, flags: u32) {
        let stream = resolve(handle)?;
        let event: Arc<Event> = event::by_handle(event)?;
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        match event.pending() {
            None => {}
            Some(Pending::Here(point)) => drop(stream.give_always(vec![point], |_| ())),
            Some(Pending::Shared(shared, number)) => drop(stream.give_always(Vec::new(), move |fault| {
                shared.wait(number).unwrap_or_else(|code| fault.set(code));
            })),
        }
        Ok(())
    }

    /// A task after an error is not run, as in the driver.
    cuLaunchHostFunc(handle: usize, function: Option<HostFunction>, data: *mut c_void) {
        let stream = resolve(handle)?;
        let function = function.ok_or(Code::INVALID_VALUE)?;
        let data = UserData(data);
        stream.give(move |_| function(data.get()));
        Ok(())
    }

    cuStreamAddCallback(handle: usize, callback: Option<Callback>, data: *mut c_void, flags: u32) {
        let stream = resolve(handle)?;
        let callback = callback.ok_or(Code::INVALID_VALUE)?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let data = UserData(data);
        stream.give_always(Vec::new(), move |fault| callback(handle, fault.check().err().unwrap_or(Code::SUCCESS), data.get()));
        Ok(())
    }

    cuStreamGetFlags(handle: usize, out: Out<u32>) {
        out.set(resolve(handle)?.flags)
    }

    cuStreamGetPriority(handle: usize, out: Out<c_int>) {
        out.set(resolve(handle)?.priority)
    }

    cuStreamGetCtx(handle: usize, out: Out<usize>) {
        out.set(resolve(handle)?.context)
    }

    cuStreamGetDevice(handle: usize, out: Out<c_int>) {
        let stream = resolve(handle)?;
        let context = CONTEXTS.get(stream.context).ok_or(Code::CONTEXT_IS_DESTROYED)?;
        out.set(context.device as c_int)
    }

    cuStreamGetId(handle: usize, out: Out<u64>) {
        let stream = resolve(handle)?;
        out.set(if stream.handle > OF_THREAD { stream.handle as u64 } else { (stream.context | stream.handle) as u64 })
    }

    /// No stream is ever captured.
    cuStreamIsCapturing(handle: usize, out: Out<c_int>) {
        resolve(handle)?;
        out.set(0)
    }

    /// The status alone is valid for a stream that is not captured.
    cuStreamGetCaptureInfo(handle: usize, out: Out<c_int>, _id: Out<u64>) {
        resolve(handle)?;
        out.set(0)
    }

    cuStreamGetCaptureInfo_v2(
        handle: usize, out: Out<c_int>, _id: Out<u64>, _graph: Out<usize>, _dependencies: Out<usize>, _count: Out<usize>,
    ) {
        resolve(handle)?;
        out.set(0)
    }

    cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
        device::started()?;
        let mode = mode.present()?;
        let wanted = mode.current();
        if !(0..=2).contains(&wanted) {
            return Err(Code::INVALID_VALUE);
        }
        mode.set(CAPTURE_MODE.with(|own| own.swap(wanted, Ordering::Relaxed)))
    }
}
