//! Stream calls.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::code::{Code, Outcome};
use crate::context::{self, CONTEXTS, Context};
use crate::device;
use crate::guard::Out;
use crate::queue::{GREATEST_PRIORITY, NON_BLOCKING, OF_THREAD, STREAMS, Stream};

/// Returns a stream by handle, which may name one of the current context's default streams.
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
    Ok(if handle == OF_THREAD { context.streams.of_thread() } else { context.streams.legacy.clone() })
}

/// Returns the current context and a stream for work on it; another context's stream is refused.
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
    out.set(context.streams.create(flags, priority))
}

type HostFunction = extern "C" fn(*mut c_void);
type Callback = extern "C" fn(usize, Code, *mut c_void);

/// The program's data, passed back to its function.
struct UserData(*mut c_void);

// SAFETY: the program passes the address for use on the stream's thread; this library only hands it on.
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

    /// Work already submitted still runs.
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

    /// As in the driver, the function isn't run after an error.
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

    /// No stream belongs to a green context.
    cuStreamGetCtx_v2(handle: usize, out: Out<usize>, green: Out<usize>) {
        let stream = resolve(handle)?;
        green.set_at(0, 0);
        out.set(stream.context)
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

    /// Streams are never captured.
    cuStreamIsCapturing(handle: usize, out: Out<c_int>) {
        resolve(handle)?;
        out.set(0)
    }

    /// For a stream that isn't captured, only the status is valid.
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

    cuStreamGetCaptureInfo_v3(
        handle: usize, out: Out<c_int>, _id: Out<u64>, _graph: Out<usize>, _dependencies: Out<usize>, _edges: Out<usize>, _count: Out<usize>,
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
