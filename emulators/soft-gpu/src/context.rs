//! Contexts, and each thread's context stack.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::code::{Code, Fault, Outcome};
use crate::device;
use crate::guard::{In, Out, lock};
use crate::handle::{Table, fresh};
use crate::queue::{GREATEST_PRIORITY, Streams};
use crate::space;

pub(crate) static CONTEXTS: Table<Context> = Table::new();

thread_local! {
    /// Handles of the contexts that this thread has pushed; the last one is current.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

pub(crate) struct Context {
    pub(crate) handle: usize,
    /// The ordinal of the device.
    pub(crate) device: usize,
    pub(crate) fault: Arc<Fault>,
    pub(crate) flags: AtomicU32,
    pub(crate) primary: bool,
    id: u64,
    /// Stack size, printf buffer, heap, device runtime depth and pending launches, L2 granularity, persisting L2.
    limits: Mutex<[usize; 7]>,
    pub(crate) streams: Arc<Streams>,
}

/// The scheduling flags (spin, yield, blocking), map host, resize local memory, core dumps, and synchronous memory
/// operations.
const FLAGS: u32 = 0xff;

pub(crate) fn valid_flags(flags: u32) -> Outcome {
    let schedules = [0, 1, 2, 4].contains(&(flags & 7));
    if flags & !FLAGS == 0 && schedules { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

impl Context {
    /// Creates a context without pushing it on any thread's stack.
    pub(crate) fn create(device: usize, flags: u32, handle: usize, primary: bool) -> Arc<Self> {
        let fault = Arc::<Fault>::default();
        let context = Arc::new(Self {
            handle,
            device,
            streams: Streams::new(handle, fault.clone()),
            fault,
            flags: AtomicU32::new(flags),
            primary,
            id: fresh() as u64,
            limits: Mutex::new([1024, 1 << 20, 8 << 20, 0, 2048, 64, 0]),
        });
        CONTEXTS.insert(handle, context.clone());
        context
    }

    /// # Errors
    /// The context's sticky error.
    pub(crate) fn check(&self) -> Outcome {
        self.fault.check()
    }

    /// Waits for all work submitted to the context so far.
    pub(crate) fn wait(&self) {
        self.streams.wait();
    }
}

/// Returns this thread's current context.
///
/// # Errors
/// The driver isn't initialized, the thread has no context, the context is destroyed or has a sticky error.
pub(crate) fn current() -> Outcome<Arc<Context>> {
    device::started()?;
    let context = top()?;
    context.check()?;
    Ok(context)
}

/// Runs `act` on this thread's stack.
///
/// # Errors
/// `CUDA_ERROR_DEINITIALIZED`: the thread is exiting, and its stack is gone, as in a handler of atexit.
fn stack<T>(act: impl FnOnce(&mut Vec<usize>) -> T) -> Outcome<T> {
    STACK.try_with(|stack| act(&mut stack.borrow_mut())).map_err(|_| Code::DEINITIALIZED)
}

/// Returns the current context, even if it has a sticky error.
fn top() -> Outcome<Arc<Context>> {
    let handle = stack(|stack| stack.last().copied())?.filter(|handle| *handle != 0);
    CONTEXTS.get(handle.ok_or(Code::INVALID_CONTEXT)?).ok_or(Code::CONTEXT_IS_DESTROYED)
}

pub(crate) fn by_handle(handle: usize) -> Outcome<Arc<Context>> {
    CONTEXTS.get(handle).ok_or(Code::INVALID_CONTEXT)
}

/// Pops a context off this thread's stack if it is current.
pub(crate) fn pop(handle: usize) {
    // An exiting thread has no stack to pop it off.
    let _ = stack(|stack| {
        if stack.last() == Some(&handle) {
            stack.pop();
        }
    });
}

fn create(out: Out<usize>, flags: u32, number: c_int) -> Outcome {
    device::started()?;
    out.present()?;
    valid_flags(flags)?;
    let ordinal = device::by_number(number)?.ordinal;
    let handle = fresh();
    stack(|stack| stack.push(handle))?;
    out.set(Context::create(ordinal, flags, handle, false).handle)
}

api! {
    cuCtxCreate_v2(out: Out<usize>, flags: u32, number: c_int) {
        create(out, flags, number)
    }

    /// No device here supports execution affinities.
    cuCtxCreate_v3(out: Out<usize>, _affinities: In<u8>, count: c_int, flags: u32, number: c_int) {
        if count != 0 {
            return Err(Code(224));
        }
        create(out, flags, number)
    }

    cuCtxCreate_v4(out: Out<usize>, parameters: In<u8>, flags: u32, number: c_int) {
        if !parameters.is_null() {
            return Err(Code::NOT_SUPPORTED);
        }
        create(out, flags, number)
    }

    cuCtxPushCurrent_v2(handle: usize) {
        device::started()?;
        by_handle(handle)?;
        stack(|stack| stack.push(handle))
    }

    cuCtxPopCurrent_v2(out: Out<usize>) {
        device::started()?;
        let handle = stack(Vec::pop)?.ok_or(Code::INVALID_CONTEXT)?;
        out.set_at(0, handle);
        Ok(())
    }

    /// Null leaves the thread without a current context.
    cuCtxSetCurrent(handle: usize) {
        device::started()?;
        if handle != 0 {
            by_handle(handle)?;
        }
        stack(|stack| {
            stack.pop();
            if handle != 0 {
                stack.push(handle);
            }
        })
    }

    cuCtxGetCurrent(out: Out<usize>) {
        device::started()?;
        out.present()?;
        out.set(stack(|stack| stack.last().copied())?.unwrap_or(0))
    }

    cuCtxGetDevice(out: Out<c_int>) {
        device::started()?;
        out.present()?;
        out.set(top()?.device as c_int)
    }

    cuCtxGetFlags(out: Out<u32>) {
        out.present()?;
        out.set(current()?.flags.load(Ordering::Relaxed))
    }

    cuCtxSetFlags(flags: u32) {
        let context = current()?;
        valid_flags(flags)?;
        context.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }

    cuCtxGetId(handle: usize, out: Out<u64>) {
        device::started()?;
        out.present()?;
        let context = if handle == 0 { top()? } else { by_handle(handle)? };
        out.set(context.id)
    }

    cuCtxGetApiVersion(handle: usize, out: Out<u32>) {
        device::started()?;
        out.present()?;
        if handle == 0 { top()? } else { by_handle(handle)? };
        out.set(3020)
    }

    cuCtxSynchronize() {
        let context = current()?;
        context.wait();
        context.check()
    }

    cuCtxSynchronize_v2(handle: usize) {
        device::started()?;
        let context = by_handle(handle)?;
        context.wait();
        context.check()
    }

    cuCtxGetLimit(out: Out<usize>, limit: u32) {
        let context = current()?;
        out.present()?;
        let value = lock(&context.limits).get(limit as usize).copied();
        out.set(value.ok_or(Code::UNSUPPORTED_LIMIT)?)
    }

    cuCtxSetLimit(limit: u32, value: usize) {
        let context = current()?;
        *lock(&context.limits).get_mut(limit as usize).ok_or(Code::UNSUPPORTED_LIMIT)? = value;
        Ok(())
    }

    cuCtxGetCacheConfig(out: Out<c_int>) {
        current()?;
        out.set(0)
    }

    /// The preference has no effect here.
    cuCtxSetCacheConfig(preference: c_int) {
        current()?;
        if (0..=3).contains(&preference) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    cuCtxGetSharedMemConfig(out: Out<c_int>) {
        current()?;
        out.set(1)
    }

    cuCtxSetSharedMemConfig(preference: c_int) {
        current()?;
        if (0..=2).contains(&preference) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    cuCtxResetPersistingL2Cache() {
        current().map(drop)
    }

    /// Does nothing, as on a machine with no profiler attached.
    cuProfilerStart() {
        current().map(drop)
    }

    cuProfilerStop() {
        current().map(drop)
    }

    cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        current()?;
        least.set_at(0, 0);
        greatest.set_at(0, GREATEST_PRIORITY);
        Ok(())
    }

    cuCtxEnablePeerAccess(peer: usize, flags: u32) {
        let context = current()?;
        let peer = by_handle(peer)?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if peer.device == context.device {
            return Err(Code::INVALID_CONTEXT);
        }
        if space::set_peer(context.device, peer.device, true) { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
    }

    cuCtxDisablePeerAccess(peer: usize) {
        let context = current()?;
        let peer = by_handle(peer)?;
        if space::set_peer(context.device, peer.device, false) { Ok(()) } else { Err(Code::PEER_ACCESS_NOT_ENABLED) }
    }
}
