//! Events: points of streams, with their times.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use crate::code::{Code, Outcome};
use crate::context;
use crate::device;
use crate::guard::{Out, lock};
use crate::handle::{Table, fresh};
use crate::stream::{self, Point};

pub(crate) static EVENTS: Table<Event> = Table::new();

/// Blocking waits, no timing; events of several processes (4) are not supported.
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

pub(crate) struct Event {
    /// The handle of the context.
    pub(crate) context: usize,
    flags: u32,
    recorded: Mutex<Option<Recorded>>,
}

#[derive(Clone)]
struct Recorded {
    point: Point,
    time: Arc<OnceLock<Instant>>,
}

impl Event {
    /// The point of the last record, unless it is reached.
    pub(crate) fn point(&self) -> Option<Point> {
        lock(&self.recorded).as_ref().map(|recorded| recorded.point.clone()).filter(|point| !point.reached())
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
        let context = context::current()?;
        out.present()?;
        if flags & INTERPROCESS != 0 && flags & DISABLE_TIMING != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        if flags & !3 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let handle = fresh();
        EVENTS.insert(handle, Arc::new(Event { context: context.handle, flags, recorded: Mutex::default() }));
        out.set(handle)
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

    cuEventQuery(handle: usize) {
        let event = by_handle(handle)?;
        if event.point().is_some() { Err(Code::NOT_READY) } else { event.check() }
    }

    cuEventSynchronize(handle: usize) {
        let event = by_handle(handle)?;
        if let Some(point) = event.point() {
            point.wait();
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
