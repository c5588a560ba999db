//! The symbols NCCL loads for its RMA layer, and the C functions behind them, which follow the rules of [`crate::abi`].
#![allow(unsafe_code)]

use super::calls::{Place, SignalCall, TransferCall};
use super::context::{Context, RetiredContexts};
use super::engine::DRAIN_LIMIT;
use super::memory::{Memory, Registered};
use super::plugin::RmaPlugin;
use super::ranks::Ranks;
use super::requests::Request;
use crate::abi::{Out, closed, common_entries, guard, keep, kept, read, read_handles};
use crate::comm::{Handles, ListenComm};
use crate::error::{DataResult, Error};
use crate::plugin::NAME;
use crate::registry::{self, Kind};
use crate::silence::Silence;
use crate::window::Source;
use crate::{log, trace};
use ferrogin_ffi::nccl::{self, DebugLogger, GinConfigV13, HANDLE_MAXSIZE, NetDeviceHandleV11, NetPropertiesV12};
use ferrogin_ffi::rma::{OPT_AGGREGATE_REQUESTS, RmaConfigV14, RmaPropertiesV16, RmaV13, RmaV14, RmaV15, RmaV16};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Instant;

type Handle = *mut c_void;

// SAFETY: `create` makes all handles of this kind.
unsafe impl registry::Owned for Context {
    const KIND: Kind = Kind::RmaContext;
}

/// The communicator, from `connect` to `closeColl`.
struct RmaComm {
    ranks: Arc<Ranks>,
    /// Open registrations.
    memories: Handles,
    /// The same registrations by number, for peers' signals.
    registered: Arc<Registered>,
    /// Open contexts.
    contexts: Handles,
    /// Contexts destroyed here, kept until all ranks have destroyed theirs.
    retired: Arc<RetiredContexts>,
}

/// One version's table: its own entries, each with its function unless the names match, and the entries all versions
/// share.
macro_rules! export {
    ($symbol:ident: $table:ident, $($own:ident $(= $function:ident)?),*) => {
        /// One version's symbol; NCCL loads the newest one it knows.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static $symbol: $table = $table {
            name: NAME,
            init: Some(init),
            devices: Some(devices),
            get_properties: Some(get_properties),
            listen: Some(listen),
            connect: Some(connect),
            dereg_mr_sym: Some(dereg_mr_sym),
            destroy_context: Some(destroy_context),
            close_coll: Some(close_coll),
            close_listen: Some(close_listen),
            iflush: Some(iflush),
            test: Some(test),
            rma_progress: Some(rma_progress),
            query_last_error: Some(query_last_error),
            finalize: Some(finalize),
            $($own: Some(export!(@last $own $($function)?)),)*
        };
    };
    (@last $own:ident) => { $own };
    (@last $own:ident $function:ident) => { $function };
}

export!(ncclRmaPlugin_v16: RmaV16,
    create_context, reg_mr_sym, reg_mr_sym_dma_buf, iput, iput_signal, iget, get_rma_properties);
export!(ncclRmaPlugin_v15: RmaV15,
    create_context, reg_mr_sym, reg_mr_sym_dma_buf, iput, iput_signal, iget);
export!(ncclRmaPlugin_v14: RmaV14,
    create_context, reg_mr_sym, reg_mr_sym_dma_buf, iput = iput_v14, iput_signal = iput_signal_v14, iget = iget_v14);
export!(ncclRmaPlugin_v13: RmaV13,
    create_context = create_context_v13, reg_mr_sym = reg_mr_sym_v13, reg_mr_sym_dma_buf = reg_mr_sym_dma_buf_v13,
    iput = iput_v14, iput_signal = iput_signal_v13, iget = iget_v14);

common_entries!("RMA ", RmaPlugin = Kind::RmaPlugin, Kind::RmaListen);

unsafe extern "C" fn get_rma_properties(comm: Handle, properties: *mut RmaPropertiesV16) -> nccl::Result {
    guard("getRmaProperties", || {
        let properties = Out::new(properties, "rmaProps")?;
        registry::get::<RmaComm>(comm, Kind::RmaComm)?;
        // A signal waits only for puts from its own sender and context.
        properties.set(RmaPropertiesV16 { flushes_all_puts_on_any_signal: 0 });
        Ok(())
    })
}

unsafe extern "C" fn connect(
    // NCCL passes its NET plugin's context for its own calls, and this plugin's for the GIN proxy.
    _ctx: Handle,
    handles: *mut Handle,
    nranks: c_int,
    rank: c_int,
    listen_comm: Handle,
    comm: *mut Handle,
) -> nccl::Result {
    guard("RMA connect", || {
        let comm = Out::new(comm, "collComm")?;
        comm.set(std::ptr::null_mut());
        let listener = registry::get::<ListenComm<RmaPlugin>>(listen_comm, Kind::RmaListen)?;
        let all = read_handles(handles, nranks, rank)?;
        let ranks = Arc::new(Ranks::connect(&listener, &all, rank as usize)?);
        let (memories, contexts) = (Handles::default(), Handles::default());
        let (registered, retired) = (Arc::default(), Arc::default());
        comm.set(keep(Kind::RmaComm, Arc::new(RmaComm { ranks, memories, registered, contexts, retired }))?);
        Ok(())
    })
}

fn create(handle_of_comm: Handle, config: Result<RmaConfigV14, Error>, ctx: *mut Handle) -> Result<(), Error> {
    let ctx = Out::new(ctx, "rmaCtx")?;
    ctx.set(std::ptr::null_mut());
    let comm = registry::get::<RmaComm>(handle_of_comm, Kind::RmaComm)?;
    let context = Context::create(&comm.ranks, &comm.registered, &comm.retired, handle_of_comm, &config?)?;
    let handle = kept(Kind::RmaContext, registry::insert_owned(context))?;
    with(handle, |context| context.engine.requests.tag = registry::tag(handle))?;
    if !comm.contexts.add(handle) {
        destroy(handle)?;
        return Err(closed("createContext"));
    }
    ctx.set(handle);
    Ok(())
}

unsafe extern "C" fn create_context(comm: Handle, config: *mut RmaConfigV14, ctx: *mut Handle) -> nccl::Result {
    guard("RMA createContext", || create(comm, read(config, "config"), ctx))
}

unsafe extern "C" fn create_context_v13(
    comm: Handle,
    config: *mut GinConfigV13,
    ctx: *mut Handle,
    dev_handle: *mut *mut NetDeviceHandleV11,
) -> nccl::Result {
    guard("RMA createContext", || {
        // There is no device handle: kernels don't use RMA contexts.
        Out::new(dev_handle, "devHandle")?.set(std::ptr::null_mut());
        let config = read(config, "config").map(|config: GinConfigV13| RmaConfigV14 {
            n_contexts: config.n_contexts,
            traffic_class: config.traffic_class,
            rank_stride: 0,
        });
        create(comm, config, ctx)
    })
}

fn register(comm: Handle, data: Handle, size: usize, source: Source, mhandle: *mut Handle) -> Result<(), Error> {
    let mhandle = Out::new(mhandle, "mhandle")?;
    mhandle.set(std::ptr::null_mut());
    let comm = registry::get::<RmaComm>(comm, Kind::RmaComm)?;
    let memory = Memory::register(&comm.ranks, &comm.registered, data, size, source)?;
    let number = memory.number;
    let handle = keep(Kind::RmaMemory, memory).inspect_err(|_| comm.registered.remove(number))?;
    if !comm.memories.add(handle) {
        drop(registry::remove::<Memory>(handle, Kind::RmaMemory));
        comm.registered.remove(number);
        return Err(closed("regMrSym"));
    }
    mhandle.set(handle);
    Ok(())
}

/// `regMrSym` and `regMrSymDmaBuf`, for versions with and without a `ginHandle`, which only kernels would need.
macro_rules! registrations {
    ($($name:ident, $dma_buf:ident($($gin_handle:ident)?);)*) => {$(
        unsafe extern "C" fn $name(
            comm: Handle, data: Handle, size: usize, ptr_type: c_int, flags: u64, mhandle: *mut Handle,
            $($gin_handle: *mut Handle,)?
        ) -> nccl::Result {
            guard("RMA regMrSym", || {
                $(Out::new($gin_handle, "ginHandle")?.set(std::ptr::null_mut());)?
                register(comm, data, size, Source { ptr_type, flags, dma_buf: None }, mhandle)
            })
        }

        #[allow(clippy::too_many_arguments)]
        unsafe extern "C" fn $dma_buf(
            comm: Handle, data: Handle, size: usize, ptr_type: c_int, offset: u64, fd: c_int, flags: u64, mhandle: *mut Handle,
            $($gin_handle: *mut Handle,)?
        ) -> nccl::Result {
            guard("RMA regMrSymDmaBuf", || {
                $(Out::new($gin_handle, "ginHandle")?.set(std::ptr::null_mut());)?
                register(comm, data, size, Source { ptr_type, flags, dma_buf: Some((fd, offset)) }, mhandle)
            })
        }
    )*};
}

registrations! {
    reg_mr_sym, reg_mr_sym_dma_buf();
    reg_mr_sym_v13, reg_mr_sym_dma_buf_v13(gin_handle);
}

/// Closes a registration, so that peers' signals can't reach it anymore, and waits for any addition in progress.
fn deregister(comm: &RmaComm, handle: Handle) {
    // Another thread may have just removed this handle.
    if let Ok(memory) = registry::remove::<Memory>(handle, Kind::RmaMemory) {
        let _span = trace::span("RMA deregMrSym", comm.ranks.rank);
        comm.registered.remove(memory.number);
        for context in comm.contexts.all() {
            let _ = with(context, |context| {
                // The context may have learned another handle in this one's place already, and still use the memory.
                context.memories.forget(handle as usize);
                context.engine.keep(&memory);
            });
        }
    }
}

unsafe extern "C" fn dereg_mr_sym(comm: Handle, mhandle: Handle) -> nccl::Result {
    guard("RMA deregMrSym", || {
        let comm = registry::get::<RmaComm>(comm, Kind::RmaComm)?;
        registry::get::<Memory>(mhandle, Kind::RmaMemory)?;
        if !comm.memories.take(mhandle) {
            return Err(Error::Argument("the memory handle belongs to another communicator".to_owned()));
        }
        deregister(&comm, mhandle);
        Ok(())
    })
}

fn with<T>(ctx: Handle, body: impl FnOnce(&mut Context) -> T) -> Result<T, Error> {
    Ok(registry::with(ctx, body)?)
}

/// Waits until nothing is under way in a context. Other contexts of the communicator are polled meanwhile, because
/// other ranks may destroy theirs in another order.
fn drain(ctx: Handle, comm: &RmaComm) {
    let _span = trace::span("RMA destroyContext: wait", comm.ranks.rank);
    let (others, mut limit) = (comm.contexts.all(), Silence::new(Instant::now(), DRAIN_LIMIT));
    while with(ctx, |context| context.engine.drain(limit.is_over(false, Instant::now()))).is_ok_and(|is_over| !is_over)
    {
        for other in others.iter().filter(|other| **other != ctx) {
            let _ = with(*other, |context| {
                if !context.engine.has_failed()
                    && let Err(error) = call(*other, context, |context| context.engine.progress())
                {
                    crate::warn!("RMA destroyContext, in another context: {error}");
                }
            });
        }
        std::thread::yield_now();
    }
}

fn destroy(ctx: Handle) -> Result<(), Error> {
    registry::remove_owned::<Context>(ctx)?.destroy();
    Ok(())
}

unsafe extern "C" fn destroy_context(ctx: Handle) -> nccl::Result {
    guard("RMA destroyContext", || {
        let comm = with(ctx, |context| context.comm)? as Handle;
        if let Ok(comm) = registry::get::<RmaComm>(comm, Kind::RmaComm) {
            drain(ctx, &comm);
            comm.contexts.take(ctx);
        }
        destroy(ctx)
    })
}

unsafe extern "C" fn close_coll(comm: Handle) -> nccl::Result {
    guard("RMA closeColl", || {
        let comm = registry::remove::<RmaComm>(comm, Kind::RmaComm)?;
        let _span = trace::span("RMA closeColl", comm.ranks.rank);
        comm.contexts.all().into_iter().for_each(|handle| drain(handle, &comm));
        for handle in comm.contexts.close() {
            // Another thread may have just removed this handle.
            let _ = destroy(handle);
        }
        comm.ranks.leave();
        comm.memories.close().into_iter().for_each(|handle| deregister(&comm, handle));
        comm.retired.close_all();
        Ok(())
    })
}

/// Calls a context's data path, and records its failure for `queryLastError`.
fn call<T>(ctx: Handle, context: &mut Context, call: impl FnOnce(&mut Context) -> DataResult<T>) -> DataResult<T> {
    call(context).inspect_err(|_| {
        if context.engine.has_failed() {
            registry::raise_fault(ctx, Kind::RmaContext);
        }
    })
}

/// Starts an operation.
#[inline(always)]
fn start(
    ctx: Handle,
    request: *mut Handle,
    operation: impl FnOnce(&mut Context) -> DataResult<Request>,
) -> Result<(), Error> {
    let request = Out::new(request, "request")?;
    let started = |context: &mut Context| {
        request.set(operation(context)?.handle());
        Ok(())
    };
    Ok(with(ctx, |context| call(ctx, context, started))??)
}

fn place(memory: Handle, offset: u64) -> Place {
    Place { memory: memory as usize, offset }
}

fn signal(offset: u64, memory: Handle, value: u64, operation: u32, strong: u8) -> SignalCall {
    SignalCall { word: place(memory, offset), value, operation, strong: strong != 0 }
}

/// One version of `iput`, `iputSignal` or `iget`: the arguments that not all of them have, the flags, and the call.
macro_rules! operations {
    ($($name:ident($($own:ident: $ty:ty),*), $flags:expr => $call:literal, |$context:ident, $named:ident, $transfer:ident| $body:expr;)*) => {$(
        #[allow(clippy::too_many_arguments)]
        unsafe extern "C" fn $name(
            ctx: Handle, context: c_int, from: u64, source: Handle, size: usize, to: u64, target: Handle, rank: u32,
            $($own: $ty,)* request: *mut Handle,
        ) -> nccl::Result {
            guard($call, || {
                let more_follows = $flags & OPT_AGGREGATE_REQUESTS != 0;
                let (from, to) = (place(source, from), place(target, to));
                let $transfer = TransferCall { from, to, size: size as u64, more_follows };
                let $named = (context, rank);
                start(ctx, request, |$context| $body)
            })
        }
    )*};
}

operations! {
    iput(flags: u32), flags => "iput", |context, named, put| context.put(named, put, None);
    iput_v14(), 0 => "iput", |context, named, put| context.put(named, put, None);
    iget(flags: u32), flags => "iget", |context, named, get| context.get(named, get);
    iget_v14(), 0 => "iget", |context, named, get| context.get(named, get);
    iput_signal(offset: u64, memory: Handle, value: u64, operation: u32, strong: u8, flags: u32), flags => "iputSignal",
        |context, named, put| context.put(named, put, Some(signal(offset, memory, value, operation, strong)));
    iput_signal_v14(offset: u64, memory: Handle, value: u64, operation: u32, strong: u8), 0 => "iputSignal",
        |context, named, put| context.put(named, put, Some(signal(offset, memory, value, operation, strong)));
    iput_signal_v13(offset: u64, memory: Handle, value: u64, operation: u32), 0 => "iputSignal",
        |context, named, put| context.put(named, put, Some(signal(offset, memory, value, operation, 1)));
}

unsafe extern "C" fn iflush(
    ctx: Handle,
    context: c_int,
    mhandle: Handle,
    rank: u32,
    request: *mut Handle,
) -> nccl::Result {
    guard("iflush", || start(ctx, request, |on| on.flush((context, rank), mhandle as usize)))
}

unsafe extern "C" fn test(comm: Handle, request: Handle, done: *mut c_int) -> nccl::Result {
    guard("test", || {
        let done = Out::new(done, "done")?;
        done.set(0);
        let is_done = |context: &mut Context, request| {
            if context.comm == comm as usize { context.engine.test(request) } else { Ok(None) }
        };
        if let Some((tag, request)) = Request::parse(request)
            && let Some(tested) = registry::with_tag(tag, |ctx, context| call(ctx, context, |it| is_done(it, request)))
            && let Some(is_done) = tested?
        {
            done.set(c_int::from(is_done));
            return Ok(());
        }
        registry::get::<RmaComm>(comm, Kind::RmaComm)?;
        Err(Error::Argument(if request.is_null() {
            "the request is NULL".to_owned()
        } else {
            format!("{request:p} is not an open request of this communicator")
        }))
    })
}

unsafe extern "C" fn rma_progress(ctx: Handle) -> nccl::Result {
    let mut result = nccl::SUCCESS;
    let called = guard("rmaProgress", || {
        with(ctx, |context| {
            let known = context.engine.has_failed();
            match call(ctx, context, |context| context.engine.progress()) {
                // NCCL's GIN proxy keeps calling, so only the first failure is logged.
                Err(error) if known => result = error.result(),
                other => other?,
            }
            Ok(())
        })?
    });
    if called == nccl::SUCCESS { result } else { called }
}

unsafe extern "C" fn query_last_error(ctx: Handle, has_error: *mut u8) -> nccl::Result {
    guard("RMA queryLastError", || {
        let has_error = Out::new(has_error, "hasError")?;
        has_error.set(u8::from(registry::fault(ctx, Kind::RmaContext)?));
        Ok(())
    })
}
