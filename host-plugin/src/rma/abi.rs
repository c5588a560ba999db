//! The symbols that NCCL loads for its RMA layer, and their C functions, by the rules of [`crate::abi`].
#![allow(unsafe_code)]

use super::comm::RmaComm;
use super::context::{Context, SignalCall};
use super::memory::Memory;
use super::plugin::RmaPlugin;
use crate::abi::{Out, closed, common_entries, guard, keep, read, read_handles};
use crate::comm::ListenComm;
use crate::error::Error;
use crate::plugin::NAME;
use crate::registry::{self, Kind};
use crate::window::Source;
use crate::{log, trace};
use ferrogin_ffi::nccl::{self, DebugLogger, GinConfigV13, HANDLE_MAXSIZE, NetDeviceHandleV11, NetPropertiesV12};
use ferrogin_ffi::rma::{OPT_AGGREGATE_REQUESTS, RmaConfigV14, RmaPropertiesV16, RmaV13, RmaV14, RmaV15, RmaV16};
use std::ffi::{c_int, c_void};

type Handle = *mut c_void;
type Request = *mut *mut c_void;

/// A table of one version: its own entries, each with its function unless that has the same name, and those that all versions have.
macro_rules! export {
    ($symbol:ident: $table:ident, $($own:ident $(= $function:ident)?),*) => {
        /// The symbol of one version; NCCL loads the newest that it knows.
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
        // A signal waits for the puts of its own sender and context only.
        properties.set(RmaPropertiesV16 { flushes_all_puts_on_any_signal: 0 });
        Ok(())
    })
}

unsafe extern "C" fn connect(
    // NCCL passes the context of its NET plugin for its own calls, and that of this plugin for the GIN proxy.
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
        comm.set(keep(Kind::RmaComm, RmaComm::connect(&listener, &all, rank as usize)?)?);
        Ok(())
    })
}

fn create(handle_of_comm: Handle, config: Result<RmaConfigV14, Error>, ctx: *mut Handle) -> Result<(), Error> {
    let ctx = Out::new(ctx, "rmaCtx")?;
    ctx.set(std::ptr::null_mut());
    let comm = registry::get::<RmaComm>(handle_of_comm, Kind::RmaComm)?;
    let context = comm.create_context(handle_of_comm, &config?)?;
    let handle = keep(Kind::RmaContext, context.clone())?;
    if !comm.contexts.add(handle) {
        context.destroy();
        drop(registry::remove::<Context>(handle, Kind::RmaContext));
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
        // There are no kernels.
        Out::new(dev_handle, "devHandle")?.set(std::ptr::null_mut());
        let config = read(config, "config").map(|config: GinConfigV13| RmaConfigV14 {
            n_contexts: config.n_contexts,
            traffic_class: config.traffic_class,
            rank_stride: 0,
        });
        create(comm, config, ctx)
    })
}

fn register(comm: Handle, (data, size): (Handle, usize), source: Source, mhandle: *mut Handle) -> Result<(), Error> {
    let mhandle = Out::new(mhandle, "mhandle")?;
    mhandle.set(std::ptr::null_mut());
    let comm = registry::get::<RmaComm>(comm, Kind::RmaComm)?;
    let memory = Memory::register(&comm.ranks, data, size, source)?;
    comm.registered.add(memory.clone());
    let number = memory.number;
    let handle = keep(Kind::RmaMemory, memory)?;
    if !comm.memories.add(handle) {
        drop(registry::remove::<Memory>(handle, Kind::RmaMemory));
        comm.registered.remove(number);
        return Err(closed("regMrSym"));
    }
    mhandle.set(handle);
    Ok(())
}

/// `regMrSym` and `regMrSymDmaBuf` of the versions with and without a `ginHandle`, which only kernels would need.
macro_rules! registrations {
    ($($name:ident, $dma_buf:ident($($gin_handle:ident)?);)*) => {$(
        unsafe extern "C" fn $name(
            comm: Handle, data: Handle, size: usize, ptr_type: c_int, flags: u64, mhandle: *mut Handle,
            $($gin_handle: *mut Handle,)?
        ) -> nccl::Result {
            guard("RMA regMrSym", || {
                $(Out::new($gin_handle, "ginHandle")?.set(std::ptr::null_mut());)?
                register(comm, (data, size), Source { ptr_type, flags, dma_buf: None }, mhandle)
            })
        }

        #[allow(clippy::too_many_arguments)]
        unsafe extern "C" fn $dma_buf(
            comm: Handle, data: Handle, size: usize, ptr_type: c_int, offset: u64, fd: c_int, flags: u64, mhandle: *mut Handle,
            $($gin_handle: *mut Handle,)?
        ) -> nccl::Result {
            guard("RMA regMrSymDmaBuf", || {
                $(Out::new($gin_handle, "ginHandle")?.set(std::ptr::null_mut());)?
                register(comm, (data, size), Source { ptr_type, flags, dma_buf: Some((fd, offset)) }, mhandle)
            })
        }
    )*};
}

registrations! {
    reg_mr_sym, reg_mr_sym_dma_buf();
    reg_mr_sym_v13, reg_mr_sym_dma_buf_v13(gin_handle);
}

/// Takes a registration from the peers' signals, and waits for an addition that is under way.
fn deregister(comm: &RmaComm, handle: Handle) {
    // Another thread may have removed this handle just now.
    if let Ok(memory) = registry::remove::<Memory>(handle, Kind::RmaMemory) {
        let _span = trace::span("RMA deregMrSym", comm.ranks.rank);
        comm.registered.remove(memory.number);
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

unsafe extern "C" fn destroy_context(ctx: Handle) -> nccl::Result {
    guard("RMA destroyContext", || {
        registry::remove::<Context>(ctx, Kind::RmaContext)?.destroy();
        Ok(())
    })
}

unsafe extern "C" fn close_coll(comm: Handle) -> nccl::Result {
    guard("RMA closeColl", || {
        let comm = registry::remove::<RmaComm>(comm, Kind::RmaComm)?;
        let _span = trace::span("RMA closeColl", comm.ranks.rank);
        for handle in comm.contexts.close() {
            // Another thread may have removed this handle just now.
            if let Ok(context) = registry::remove::<Context>(handle, Kind::RmaContext) {
                context.destroy();
            }
        }
        comm.memories.close().into_iter().for_each(|handle| deregister(&comm, handle));
        comm.retired.close_all();
        Ok(())
    })
}

/// Where a transfer goes, in NCCL's order of arguments.
type Transfer = (u64, Handle, usize, u64, Handle, u32);

fn put(
    (ctx, context): (Handle, c_int),
    (from, source, size, to, target, rank): Transfer,
    signal: Option<SignalCall>,
    flags: u32,
    request: Request,
) -> Result<(), Error> {
    let request = Out::new(request, "request")?;
    let place = registry::place(ctx);
    let ctx = registry::get::<Context>(ctx, Kind::RmaContext)?;
    let more_follows = flags & OPT_AGGREGATE_REQUESTS != 0;
    request.set(ctx.put((context, rank), (from, source), (to, target), size, signal, more_follows)?.handle(place));
    Ok(())
}

fn get(
    (ctx, context): (Handle, c_int),
    (from, remote, size, to, local, rank): Transfer,
    flags: u32,
    request: Request,
) -> Result<(), Error> {
    let request = Out::new(request, "request")?;
    let place = registry::place(ctx);
    let ctx = registry::get::<Context>(ctx, Kind::RmaContext)?;
    let started = ctx.get((context, rank), (from, remote), (to, local), size, flags & OPT_AGGREGATE_REQUESTS != 0)?;
    request.set(started.handle(place));
    Ok(())
}

/// `iput` or `iget` of the versions with and without flags.
macro_rules! transfers {
    ($($name:ident($($flags:ident: $ty:ty)?) = $call:literal, $body:expr;)*) => {$(
        #[allow(clippy::too_many_arguments)]
        unsafe extern "C" fn $name(
            ctx: Handle, context: c_int, from: u64, source: Handle, size: usize, to: u64, target: Handle, rank: u32,
            $($flags: $ty,)? request: Request,
        ) -> nccl::Result {
            let flags = [$($flags,)? 0u32][0];
            let body: fn((Handle, c_int), Transfer, u32, Request) -> Result<(), Error> = $body;
            guard($call, || body((ctx, context), (from, source, size, to, target, rank), flags, request))
        }
    )*};
}

transfers! {
    iput(flags: u32) = "iput", |ctx, transfer, flags, request| put(ctx, transfer, None, flags, request);
    iput_v14() = "iput", |ctx, transfer, flags, request| put(ctx, transfer, None, flags, request);
    iget(flags: u32) = "iget", get;
    iget_v14() = "iget", get;
}

/// `iputSignal` of the versions with and without flags and weak signals.
macro_rules! signals {
    ($($name:ident($($strong:ident: $strong_ty:ty)?; $($flags:ident: $flags_ty:ty)?);)*) => {$(
        #[allow(clippy::too_many_arguments)]
        unsafe extern "C" fn $name(
            ctx: Handle, context: c_int, from: u64, source: Handle, size: usize, to: u64, target: Handle, rank: u32,
            offset: u64, memory: Handle, value: u64, operation: u32,
            $($strong: $strong_ty,)? $($flags: $flags_ty,)? request: Request,
        ) -> nccl::Result {
            let (strong, flags) = ([$($strong,)? 1u8][0] != 0, [$($flags,)? 0u32][0]);
            guard("iputSignal", || {
                let signal = SignalCall { memory, offset, value, operation, strong };
                put((ctx, context), (from, source, size, to, target, rank), Some(signal), flags, request)
            })
        }
    )*};
}

signals! {
    iput_signal(strong: u8; flags: u32);
    iput_signal_v14(strong: u8;);
    iput_signal_v13(;);
}

unsafe extern "C" fn iflush(ctx: Handle, context: c_int, mhandle: Handle, rank: u32, request: Request) -> nccl::Result {
    guard("iflush", || {
        let request = Out::new(request, "request")?;
        // NULL means that the flush is done.
        request.set(std::ptr::null_mut());
        registry::get::<Context>(ctx, Kind::RmaContext)?.flush((context, rank), mhandle)
    })
}

unsafe extern "C" fn test(comm: Handle, request: Handle, done: *mut c_int) -> nccl::Result {
    guard("test", || {
        let done = Out::new(done, "done")?;
        done.set(0);
        done.set(c_int::from(super::comm::test(comm, request)?));
        Ok(())
    })
}

unsafe extern "C" fn rma_progress(ctx: Handle) -> nccl::Result {
    let mut result = nccl::SUCCESS;
    let called = guard("rmaProgress", || {
        let ctx = registry::get::<Context>(ctx, Kind::RmaContext)?;
        let known = ctx.has_failed();
        match ctx.progress() {
            // NCCL's GIN proxy goes on calling, so only the first failure has a line.
            Err(error) if known => result = error.result(),
            other => other?,
        }
        Ok(())
    });
    if called == nccl::SUCCESS { result } else { called }
}

unsafe extern "C" fn query_last_error(ctx: Handle, has_error: *mut u8) -> nccl::Result {
    guard("RMA queryLastError", || {
        let has_error = Out::new(has_error, "hasError")?;
        has_error.set(u8::from(registry::get::<Context>(ctx, Kind::RmaContext)?.has_failed()));
        Ok(())
    })
}
