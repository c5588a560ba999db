//! Events: points in streams, with timestamps. Interprocess events have no timestamps.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use crate::code::{Code, Outcome};
use crate::context;
use crate::device;
use crate::guard::{Out, lock};
use crate::handle::{Table, fresh};
use crate::queue::Point;
use crate::shared::Shared;
use crate::stream;

pub(crate) static EVENTS: Table<Event> = Table::new();

/// `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`; 1 is `CU_EVENT_BLOCKING_SYNC`.
pub(crate) const DISABLE_TIMING: u32 = 2;
pub(crate) const INTERPROCESS: u32 = 4;

pub(crate) struct Event {
    /// The handle of the context.
    pub(crate) context: usize,
    flags: u32,
    recorded: Mutex<Option<Recorded>>,
    /// The state of an interprocess event.
    pub(crate) shared: Option<Arc<Shared>>,
}

/// A record that its stream hasn't reached yet.
enum Pending {
    Here(Point),
    /// A record of an interprocess event, by number.
    Shared(Arc<Shared>, u64),
}

#[derive(Clone)]
struct Recorded {
    point: Point,
    time: Arc<OnceLock<Instant>>,
}

impl Event {
    /// Adds an event to the current context.
    pub(crate) fn insert(flags: u32, shared: Option<Shared>) -> Outcome<usize> {
        let (context, handle) = (context::current()?, fresh());
        let event = Event { context: context.handle, flags, recorded: Mutex::default(), shared: shared.map(Arc::new) };
        EVENTS.insert(handle, Arc::new(event));
        Ok(handle)
    }

    /// Returns the last record, unless its stream has reached it.
    fn pending(&self) -> Option<Pending> {
        if let Some(shared) = &self.shared {
            return shared.pending().map(|number| Pending::Shared(shared.clone(), number));
        }
        let point = lock(&self.recorded).as_ref().map(|recorded| recorded.point.clone());
        point.filter(|point| !point.reached()).map(Pending::Here)
    }

    fn check(&self) -> Outcome {
        context::CONTEXTS.get(self.context).ok_or(Code::CONTEXT_IS_DESTROYED)?.check()
    }
}

/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE`.
pub(crate) fn by_handle(handle: usize) -> Outcome<Arc<Event>> {
    device::started()?;
    EVENTS.get(handle).ok_or(Code::INVALID_HANDLE)
}

fn record(handle: usize, stream: usize, flags: u32) -> Outcome {
    let event = by_handle(handle)?;
    let stream = stream::resolve(stream)?;
    if stream.context != event.context {
        return Err(Code::INVALID_HANDLE);
    }
    if flags > 1 {
        return Err(Code::INVALID_VALUE);
    }
    if let Some(shared) = event.shared.clone() {
        let number = shared.take();
        let own = shared.clone();
        stream.give_always(Vec::new(), move |_| own.end(number));
        shared.publish(number);
        return Ok(());
    }
    let time = Arc::new(OnceLock::new());
    let own = time.clone();
    let point = stream.give_always(Vec::new(), move |_| own.set(Instant::now()).unwrap_or(()));
    *lock(&event.recorded) = Some(Recorded { point, time });
    Ok(())
}

fn elapsed(out: Out<f32>, from: usize, to: usize) -> Outcome {
    out.present()?;
    let (from, to) = (by_handle(from)?, by_handle(to)?);
    if from.context != to.context || (from.flags | to.flags) & DISABLE_TIMING != 0 {
        return Err(Code::INVALID_HANDLE);
    }
    let time = |event: &Event| {
        let recorded = lock(&event.recorded).clone().ok_or(Code::INVALID_HANDLE)?;
        recorded.time.get().copied().ok_or(Code::NOT_READY)
    };
    let (from_time, to_time) = (time(&from)?, time(&to)?);
    let sign = if to_time >= from_time { 1.0 } else { -1.0 };
    let span = to_time.saturating_duration_since(from_time).max(from_time.saturating_duration_since(to_time));
    out.set((sign * span.as_secs_f64() * 1e3) as f32)
}

api! {
    cuEventCreate(out: Out<usize>, flags: u32) {
        context::current()?;
        out.present()?;
        let is_shared = flags & INTERPROCESS != 0;
        if flags & !7 != 0 || (is_shared && flags & DISABLE_TIMING == 0) {
            return Err(Code::INVALID_VALUE);
        }
        let shared = if is_shared { Some(Shared::new()?) } else { None };
        out.set(Event::insert(flags, shared)?)
    }

    cuEventDestroy_v2(handle: usize) {
        device::started()?;
        EVENTS.remove(handle).map(drop).ok_or(Code::INVALID_HANDLE)
    }

    cuEventRecord(handle: usize, stream: usize) {
        record(handle, stream, 0)
    }

    cuEventRecordWithFlags(handle: usize, stream: usize, flags: u32) {
        record(handle, stream, flags)
    }

    cuStreamWaitEvent(handle: usize, event: usize, flags: u32) {
        let stream = stream::resolve(handle)?;
        let event = by_handle(event)?;
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

    cuEventQuery(handle: usize) {
        let event = by_handle(handle)?;
        match event.pending() {
            None => return event.check(),
            Some(Pending::Here(_)) => {}
            Some(Pending::Shared(shared, number)) => shared.check(number)?,
        }
        Err(Code::NOT_READY)
    }

    cuEventSynchronize(handle: usize) {
        let event = by_handle(handle)?;
        match event.pending() {
            None => {}
            Some(Pending::Here(point)) => point.wait(),
            Some(Pending::Shared(shared, number)) => shared.wait(number)?,
        }
        event.check()
    }

    cuEventElapsedTime(out: Out<f32>, from: usize, to: usize) {
        elapsed(out, from, to)
    }

    cuEventElapsedTime_v2(out: Out<f32>, from: usize, to: usize) {
        elapsed(out, from, to)
    }
}
