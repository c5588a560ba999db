//! Contexts: primary ones and created ones, the stack of each thread, and errors that stick.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use crate::code::{Code, Outcome};
use crate::device;
use crate::guard::{In, Out, lock};
use crate::handle::{Table, fresh};
use crate::space::{self, Kind};
use crate::stream::{STREAMS, Stream};
use crate::{heap, host, ipc, module};

pub(crate) static CONTEXTS: Table<Context> = Table::new();

thread_local! {
    /// Handles of the contexts that this thread has pushed; the last one is current.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The error that a kernel or a copy left, which later calls on the context return.
#[derive(Debug, Default)]
pub(crate) struct Fault(AtomicI32);

impl Fault {
    /// The first error stays.
    pub(crate) fn set(&self, code: Code) {
        let _ = self.0.compare_exchange(0, code.0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// # Errors
    /// The error that sticks to the context.
    pub(crate) fn check(&self) -> Outcome {
        match self.0.load(Ordering::SeqCst) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }
}

pub(crate) struct Context {
    pub(crate) handle: usize,
    /// The ordinal of the device.
    pub(crate) device: usize,
    pub(crate) fault: Arc<Fault>,
    flags: AtomicU32,
    primary: bool,
    id: u64,
    /// Stack size, printf buffer, heap, device runtime depth and launches, L2 granularity, persisting L2.
    limits: Mutex<[usize; 7]>,
    /// The default stream of all threads, and those of single threads.
    pub(crate) legacy: Arc<Stream>,
    of_threads: Mutex<HashMap<ThreadId, Arc<Stream>>>,
    /// Makes the order between the default stream and the others the order of the calls.
    pub(crate) order: Mutex<()>,
}

/// The primary context of a device: how often it is retained, and what it is while that is not 0.
#[derive(Default)]
pub(crate) struct Primary {
    count: u32,
    flags: u32,
    context: Option<Arc<Context>>,
    /// The handle, which the next primary context of the device gets too.
    handle: usize,
}

/// Spin, yield, blocking; map host; resize local memory; core dumps; synchronous memory operations.
const FLAGS: u32 = 0xff;

fn valid_flags(flags: u32) -> Outcome {
    let schedules = [0, 1, 2, 4].contains(&(flags & 7));
    if flags & !FLAGS == 0 && schedules { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

impl Context {
    fn create(device: usize, flags: u32, handle: usize, primary: bool) -> Arc<Self> {
        let fault = Arc::<Fault>::default();
        let context = Arc::new(Self {
            handle,
            device,
            legacy: Stream::legacy(handle, fault.clone()),
            fault,
            flags: AtomicU32::new(flags),
            primary,
            id: fresh() as u64,
            limits: Mutex::new([1024, 1 << 20, 8 << 20, 0, 2048, 64, 0]),
            of_threads: Mutex::default(),
            order: Mutex::default(),
        });
        CONTEXTS.insert(handle, context.clone());
        context
    }

    /// # Errors
    /// The error that sticks to the context.
    pub(crate) fn check(&self) -> Outcome {
        self.fault.check()
    }

    /// The default stream of the calling thread alone.
    pub(crate) fn of_thread(&self) -> Arc<Stream> {
        let new = || Stream::of_thread(self.handle, self.fault.clone());
        lock(&self.of_threads).entry(std::thread::current().id()).or_insert_with(new).clone()
    }

    /// All streams with which the default stream keeps an order.
    pub(crate) fn blocking_streams(&self) -> Vec<Arc<Stream>> {
        let mut streams = STREAMS.all(|stream| stream.context == self.handle && !stream.non_blocking());
        streams.extend(lock(&self.of_threads).values().cloned());
        streams
    }

    fn streams(&self) -> Vec<Arc<Stream>> {
        let mut streams = STREAMS.all(|stream| stream.context == self.handle);
        streams.extend(lock(&self.of_threads).values().cloned());
        streams.push(self.legacy.clone());
        streams
    }

    /// Waits for all work that was given to the context before.
    pub(crate) fn wait(&self) {
        let last: Vec<_> = self.streams().iter().filter_map(Stream::last).collect();
        last.iter().for_each(|point| point.wait());
    }

    /// Ends the context and all that belongs to it.
    fn destroy(&self) {
        self.wait();
        CONTEXTS.remove(self.handle);
        lock(&self.of_threads).values().chain([&self.legacy]).for_each(|stream| stream.close());
        STREAMS.remove_if(|stream| stream.context == self.handle).iter().for_each(|stream| stream.close());
        crate::event::EVENTS.remove_if(|event| event.context == self.handle);
        module::forget(self.handle);
        for start in space::starts(|entry| entry.context == self.handle) {
            // What the context has, it releases; a call of another thread may have done it first.
            let _ = match space::find(start).map(|entry| entry.kind) {
                Some(Kind::HostAlloc(_)) => host::release(start),
                Some(Kind::Registered(_)) => host::unregister(start),
                Some(Kind::Opened) => ipc::close_all(start),
                Some(_) => heap::release(start, |_| true),
                None => Ok(()),
            };
        }
    }
}

/// The current context of this thread.
///
/// # Errors
/// Not initialized, no context, one that is destroyed, or the error that sticks to it.
pub(crate) fn current() -> Outcome<Arc<Context>> {
    device::started()?;
    let context = top()?;
    context.check()?;
    Ok(context)
}

/// The current context, also after an error.
fn top() -> Outcome<Arc<Context>> {
    let handle = STACK.with_borrow(|stack| stack.last().copied()).filter(|handle| *handle != 0);
    CONTEXTS.get(handle.ok_or(Code::INVALID_CONTEXT)?).ok_or(Code::CONTEXT_IS_DESTROYED)
}

fn by_handle(handle: usize) -> Outcome<Arc<Context>> {
    CONTEXTS.get(handle).ok_or(Code::INVALID_CONTEXT)
}

fn create(out: Out<usize>, flags: u32, number: c_int) -> Outcome {
    device::started()?;
    out.present()?;
    valid_flags(flags)?;
    let ordinal = device::by_number(number)?.ordinal;
    let context = Context::create(ordinal, flags, fresh(), false);
    STACK.with_borrow_mut(|stack| stack.push(context.handle));
    out.set(context.handle)
}

/// A context that no thread has pushed.
#[cfg(feature = "fuzzing")]
pub(crate) fn create_on(ordinal: usize) -> Arc<Context> {
    Context::create(ordinal, 0, fresh(), false)
}

fn reset_primary(primary: &mut Primary) {
    if let Some(context) = primary.context.take() {
        context.destroy();
    }
    primary.count = 0;
}

api! {
    cuCtxCreate_v2(out: Out<usize>, flags: u32, number: c_int) {
        create(out, flags, number)
    }

    /// Without execution affinities, which no device here has.
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

    cuCtxDestroy_v2(handle: usize) {
        device::started()?;
        let context = by_handle(handle)?;
        if context.primary {
            return Err(Code::INVALID_CONTEXT);
        }
        STACK.with_borrow_mut(|stack| if stack.last() == Some(&handle) { stack.pop(); });
        context.destroy();
        Ok(())
    }

    cuCtxPushCurrent_v2(handle: usize) {
        device::started()?;
        by_handle(handle)?;
        STACK.with_borrow_mut(|stack| stack.push(handle));
        Ok(())
    }

    cuCtxPopCurrent_v2(out: Out<usize>) {
        device::started()?;
        let handle = STACK.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        out.set_at(0, handle);
        Ok(())
    }

    /// Null leaves the thread without a current context.
    cuCtxSetCurrent(handle: usize) {
        device::started()?;
        if handle != 0 {
            by_handle(handle)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if handle != 0 {
                stack.push(handle);
            }
        });
        Ok(())
    }

    cuCtxGetCurrent(out: Out<usize>) {
        device::started()?;
        out.set(STACK.with_borrow(|stack| stack.last().copied()).unwrap_or(0))
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

    /// A preference, which has no effect here.
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

    cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        current()?;
        least.set_at(0, 0);
        greatest.set_at(0, crate::stream::GREATEST_PRIORITY);
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

    cuDevicePrimaryCtxRetain(out: Out<usize>, number: c_int) {
        let device = device::by_number(number)?;
        out.present()?;
        let mut primary = lock(&device.primary);
        if primary.context.is_none() {
            if primary.handle == 0 {
                primary.handle = fresh();
            }
            primary.context = Some(Context::create(device.ordinal, primary.flags, primary.handle, true));
        }
        primary.count += 1;
        out.set(primary.handle)
    }

    cuDevicePrimaryCtxRelease_v2(number: c_int) {
        let device = device::by_number(number)?;
        let mut primary = lock(&device.primary);
        primary.count = primary.count.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
        if primary.count == 0 {
            reset_primary(&mut primary);
        }
        Ok(())
    }

    /// Also clears the error that sticks to it.
    cuDevicePrimaryCtxReset_v2(number: c_int) {
        let device = device::by_number(number)?;
        let mut primary = lock(&device.primary);
        let count = primary.count;
        if primary.context.is_some() {
            reset_primary(&mut primary);
            // The owners keep it: the handle names a new context.
            primary.context = Some(Context::create(device.ordinal, primary.flags, primary.handle, true));
            primary.count = count;
        }
        Ok(())
    }

    cuDevicePrimaryCtxSetFlags_v2(number: c_int, flags: u32) {
        let device = device::by_number(number)?;
        valid_flags(flags)?;
        let mut primary = lock(&device.primary);
        primary.flags = flags;
        if let Some(context) = &primary.context {
            context.flags.store(flags, Ordering::Relaxed);
        }
        Ok(())
    }

    cuDevicePrimaryCtxGetState(number: c_int, flags: Out<u32>, active: Out<c_int>) {
        let device = device::by_number(number)?;
        flags.present()?;
        active.present()?;
        let primary = lock(&device.primary);
        flags.set(primary.flags)?;
        active.set(c_int::from(primary.context.is_some()))
    }
}
