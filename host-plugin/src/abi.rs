//! The symbols that NCCL loads, and their C functions.
//!
//! Every function checks its pointers and looks its handles up in the [`registry`]. An error or a panic turns into a
//! return code and one WARN line, never anything else.
#![allow(unsafe_code)]

use crate::comm::{CollComm, ListenComm};
use crate::config::{PeerFailure, Signals};
use crate::context::{self, Context, Shape};
use crate::error::Error;
use crate::nccl_version::{self, NcclVersion};
use crate::plugin::{NAME, Plugin};
use crate::registry::{self, Kind};
use crate::window::{Source, Window};
use crate::{log, shortage, trace, warn};
use ferrogin_ffi::nccl::{
    self, DebugLogger, GinConfigV13, GinConfigV14, GinPropertiesV14, GinV13, GinV14, HANDLE_MAXSIZE,
    NetDeviceHandleV11, NetPropertiesV12,
};
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The largest number of ranks, checked before the plugin reads that many pointers from the caller's memory.
pub(crate) const RANKS_MAX: c_int = 1 << 20;

/// The symbol that NCCL loads first.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclGinPlugin_v14: GinV14 = GinV14 {
    name: NAME,
    init: Some(init),
    devices: Some(devices),
    get_gin_properties: Some(get_gin_properties),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect),
    create_context: Some(create_context_v14),
    reg_mr_sym: Some(reg_mr_sym),
    reg_mr_sym_dma_buf: Some(reg_mr_sym_dma_buf),
    dereg_mr_sym: Some(dereg_mr_sym),
    destroy_context: Some(destroy_context),
    close_coll: Some(close_coll),
    close_listen: Some(close_listen),
    gin_progress: Some(gin_progress),
    query_last_error: Some(query_last_error),
    finalize: Some(finalize),
};

/// The symbol that NCCL versions without v14 load. NCCL assumes that v13 plugins have strong and VA signals, which is
/// only true with FERROGIN_SIGNALS=emulated.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub static ncclGinPlugin_v13: GinV13 = GinV13 {
    name: NAME,
    init: Some(init),
    devices: Some(devices),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect),
    create_context: Some(create_context_v13),
    reg_mr_sym: Some(reg_mr_sym),
    reg_mr_sym_dma_buf: Some(reg_mr_sym_dma_buf),
    dereg_mr_sym: Some(dereg_mr_sym),
    destroy_context: Some(destroy_context),
    close_coll: Some(close_coll),
    close_listen: Some(close_listen),
    iput: None,
    iput_signal: None,
    iget: None,
    iflush: None,
    test: None,
    gin_progress: Some(gin_progress),
    query_last_error: Some(query_last_error),
    finalize: Some(finalize),
};

/// Runs a call's body. An error becomes a code and one WARN line; a panic becomes an internal error. In a fork of the
/// process that has the handles the body doesn't run: it would wait for threads and locks that only the other process
/// has.
pub(crate) fn guard(call: &str, body: impl FnOnce() -> Result<(), Error>) -> nccl::Result {
    let checked = || match registry::forked_from() {
        Some(parent) => Err(Error::Forked { parent, child: std::process::id() }),
        None => body(),
    };
    match catch_unwind(AssertUnwindSafe(checked)) {
        Ok(Ok(())) => nccl::SUCCESS,
        failed => report(call, failed),
    }
}

#[cold]
fn report(call: &str, failed: std::thread::Result<Result<(), Error>>) -> nccl::Result {
    match failed {
        Ok(Ok(())) => nccl::SUCCESS,
        Ok(Err(error)) => {
            match shortage::of(&error) {
                // The error's own fix, after its first semicolon, doesn't apply to a shortage.
                Some(shortage) => {
                    warn!("{call}: {}; {shortage}", error.to_string().split("; ").next().unwrap_or_default())
                }
                None => warn!("{call}: {error}"),
            }
            error.result()
        }
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            // The logger itself may have panicked, and may panic again.
            let _ = catch_unwind(|| warn!("{call}: internal error, please report it: {text}"));
            nccl::INTERNAL_ERROR
        }
    }
}

/// An output pointer, checked.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub(crate) fn new(pointer: *mut T, what: &'static str) -> Result<Self, Error> {
        if pointer.is_null() || !pointer.addr().is_multiple_of(align_of::<T>()) {
            Err(Error::Null(what))
        } else {
            Ok(Self(pointer))
        }
    }

    pub(crate) fn set(&self, value: T) {
        // SAFETY: `new` checked that the pointer is aligned and not null. NCCL passes the address of a `T` that is
        // valid for writes during the call.
        unsafe { self.0.write(value) }
    }
}

/// Reads a struct that NCCL passes by pointer.
pub(crate) fn read<T: Copy>(pointer: *const T, what: &'static str) -> Result<T, Error> {
    if pointer.is_null() || !pointer.addr().is_multiple_of(align_of::<T>()) {
        return Err(Error::Null(what));
    }
    // SAFETY: the pointer is aligned and not null, as just checked. NCCL passes the address of a `T` that is valid for
    // reads during the call; every `T` here consists of integers and pointers, which have no invalid values.
    Ok(unsafe { pointer.read() })
}

pub(crate) fn keep<T: Send + Sync + 'static>(kind: Kind, object: Arc<T>) -> Result<*mut c_void, Error> {
    kept(kind, registry::insert(kind, object))
}

/// Returns the handle that the registry assigned, or an error if it has no room.
pub(crate) fn kept(kind: Kind, handle: Option<*mut c_void>) -> Result<*mut c_void, Error> {
    handle
        .ok_or_else(|| Error::Usage(format!("too many {}s are open in this process: close some of them", kind.name())))
}

/// The entries that both plugins' tables share, for a plugin type and the kind of its listen communicators. `$prefix`
/// precedes the call names in messages.
macro_rules! common_entries {
    ($prefix:literal, $plugin:ty = $kind:expr, $listen_kind:expr) => {
        unsafe extern "C" fn init(ctx: *mut *mut c_void, comm: u64, logger: DebugLogger) -> nccl::Result {
            log::set(logger);
            guard(concat!($prefix, "init"), || {
                let ctx = Out::new(ctx, "ctx")?;
                ctx.set(std::ptr::null_mut());
                $crate::trace!(concat!($prefix, "init of communicator {:#x}"), comm);
                ctx.set(keep($kind, <$plugin>::open()?)?);
                Ok(())
            })
        }

        unsafe extern "C" fn devices(count: *mut c_int) -> nccl::Result {
            guard(concat!($prefix, "devices"), || {
                let count = Out::new(count, "ndev")?;
                count.set(<$plugin>::latest()?.devices.all.len() as c_int);
                Ok(())
            })
        }

        unsafe extern "C" fn get_properties(device: c_int, properties: *mut NetPropertiesV12) -> nccl::Result {
            guard(concat!($prefix, "getProperties"), || {
                let properties = Out::new(properties, "props")?;
                properties.set(<$plugin>::latest()?.devices.properties(device)?);
                Ok(())
            })
        }

        unsafe extern "C" fn listen(
            ctx: *mut c_void,
            device: c_int,
            handle: *mut c_void,
            listen_comm: *mut *mut c_void,
        ) -> nccl::Result {
            guard(concat!($prefix, "listen"), || {
                let listen_comm = Out::new(listen_comm, "listenComm")?;
                listen_comm.set(std::ptr::null_mut());
                let handle = Out::new(handle.cast::<[u8; HANDLE_MAXSIZE]>(), "handle")?;
                let plugin = registry::get::<$plugin>(ctx, $kind)?;
                plugin.devices.get(device)?;
                let listener = std::sync::Arc::new(ListenComm::open(plugin, device)?);
                let bytes = listener.handle();
                listen_comm.set(keep($listen_kind, listener)?);
                handle.set(bytes);
                Ok(())
            })
        }

        unsafe extern "C" fn close_listen(listen_comm: *mut c_void) -> nccl::Result {
            guard(concat!($prefix, "closeListen"), || {
                drop(registry::remove::<ListenComm<$plugin>>(listen_comm, $listen_kind)?);
                Ok(())
            })
        }

        unsafe extern "C" fn finalize(ctx: *mut c_void) -> nccl::Result {
            guard(concat!($prefix, "finalize"), || {
                drop(registry::remove::<$plugin>(ctx, $kind)?);
                Ok(())
            })
        }
    };
}
pub(crate) use common_entries;

common_entries!("", Plugin = Kind::Plugin, Kind::Listen);

unsafe extern "C" fn get_gin_properties(properties: *mut GinPropertiesV14) -> nccl::Result {
    guard("getGinProperties", || {
        let properties = Out::new(properties, "props")?;
        // Cards support neither; emulated signals support both.
        let has = u8::from(Plugin::latest()?.config.signals == Signals::Emulated);
        properties.set(GinPropertiesV14 { supports_strong_signals: has, supports_va_signals: has });
        Ok(())
    })
}

/// Reads the handles of all ranks, which NCCL passes to `connect`.
pub(crate) fn read_handles(
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
) -> Result<Vec<[u8; HANDLE_MAXSIZE]>, Error> {
    if !(1..=RANKS_MAX).contains(&nranks) || !(0..nranks).contains(&rank) {
        return Err(Error::Argument(format!(
            "rank {rank} is not one of {nranks} ranks (at least 1, at most {RANKS_MAX})"
        )));
    }
    let mut all = Vec::with_capacity(nranks as usize);
    read(handles, "handles")?;
    for r in 0..nranks as usize {
        // SAFETY: NCCL passes the address of an array of `nranks` pointers. The address is aligned and not null, as
        // `read` checked, and `r` is below `nranks`.
        let handle = unsafe { handles.wrapping_add(r).read() };
        all.push(read(handle.cast::<[u8; HANDLE_MAXSIZE]>(), "handle of a rank")?);
    }
    Ok(all)
}

unsafe extern "C" fn connect(
    ctx: *mut c_void,
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
) -> nccl::Result {
    guard("connect", || {
        let coll_comm = Out::new(coll_comm, "collComm")?;
        coll_comm.set(std::ptr::null_mut());
        registry::get::<Plugin>(ctx, Kind::Plugin)?;
        let listener = registry::get::<ListenComm<Plugin>>(listen_comm, Kind::Listen)?;
        let all = read_handles(handles, nranks, rank)?;
        let coll = CollComm::connect(&listener, &all, rank as usize)?;
        coll_comm.set(keep(Kind::Coll, coll)?);
        Ok(())
    })
}

/// The error for a call whose communicator another thread closed in the meantime.
pub(crate) fn closed(call: &str) -> Error {
    Error::Usage(format!("NCCL called closeColl before {call} had returned"))
}

/// Registers a window and adds it to its communicator.
fn register(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    source: Source,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> Result<(), Error> {
    let mhandle = Out::new(mhandle, "mhandle")?;
    let gin_handle = Out::new(gin_handle, "ginHandle")?;
    mhandle.set(std::ptr::null_mut());
    gin_handle.set(std::ptr::null_mut());
    let coll = registry::get::<CollComm>(coll_comm, Kind::Coll)?;
    let window = Arc::new(Window::register(&coll, data, size, source)?);
    let address = window.device_address();
    let handle = keep(Kind::Window, window)?;
    if !coll.windows.add(handle) {
        drop(registry::remove::<Window>(handle, Kind::Window));
        return Err(closed("regMrSym"));
    }
    gin_handle.set(address as *mut c_void);
    mhandle.set(handle);
    Ok(())
}

unsafe extern "C" fn reg_mr_sym(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    flags: u64,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> nccl::Result {
    guard("regMrSym", || {
        let source = Source { ptr_type, flags, dma_buf: None };
        register(coll_comm, data, size, source, mhandle, gin_handle)
    })
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn reg_mr_sym_dma_buf(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    offset: u64,
    fd: c_int,
    flags: u64,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> nccl::Result {
    guard("regMrSymDmaBuf", || {
        let source = Source { ptr_type, flags, dma_buf: Some((fd, offset)) };
        register(coll_comm, data, size, source, mhandle, gin_handle)
    })
}

unsafe extern "C" fn dereg_mr_sym(coll_comm: *mut c_void, mhandle: *mut c_void) -> nccl::Result {
    guard("deregMrSym", || {
        let coll = registry::get::<CollComm>(coll_comm, Kind::Coll)?;
        registry::get::<Window>(mhandle, Kind::Window)?;
        if !coll.windows.take(mhandle) {
            return Err(Error::Argument("the memory handle belongs to another communicator".to_owned()));
        }
        let _span = trace::span("deregMrSym", coll.rank);
        drop(registry::remove::<Window>(mhandle, Kind::Window)?);
        Ok(())
    })
}

fn create(
    coll_comm: *mut c_void,
    shape: Result<Shape, Error>,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut NetDeviceHandleV11,
) -> Result<(), Error> {
    let gin_ctx = Out::new(gin_ctx, "ginCtx")?;
    let dev_handle = Out::new(dev_handle, "devHandle")?;
    gin_ctx.set(std::ptr::null_mut());
    dev_handle.set(std::ptr::null_mut());
    let coll = registry::get::<CollComm>(coll_comm, Kind::Coll)?;
    let isolates = coll.plugin.config.on_peer_failure == PeerFailure::Isolate;
    let context = Arc::new(Context::create(&coll, &Shape { isolates, ..shape? })?);
    let device = context.device_handle();
    let handle = keep(Kind::Context, context.clone())?;
    let watched = context.watch(handle, false);
    if watched.is_err() || !coll.contexts.add(handle) {
        context.close(handle);
        drop(registry::remove::<Context>(handle, Kind::Context));
        watched?;
        return Err(closed("createContext"));
    }
    dev_handle.set(device);
    gin_ctx.set(handle);
    Ok(())
}

unsafe extern "C" fn create_context_v14(
    coll_comm: *mut c_void,
    config: *mut GinConfigV14,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut NetDeviceHandleV11,
) -> nccl::Result {
    guard("createContext", || {
        let shape = read(config, "config").and_then(|config| {
            nccl_version::check(NcclVersion::of_caller(), config.backend_version)?;
            Shape::new(&config)
        });
        create(coll_comm, shape, gin_ctx, dev_handle)
    })
}

unsafe extern "C" fn create_context_v13(
    coll_comm: *mut c_void,
    config: *mut GinConfigV13,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut NetDeviceHandleV11,
) -> nccl::Result {
    guard("createContext", || {
        let shape = read(config, "config").and_then(|config| {
            Shape::new(&GinConfigV14 {
                n_signals: config.n_signals,
                n_counters: config.n_counters,
                n_contexts: config.n_contexts,
                queue_depth: config.queue_depth,
                traffic_class: config.traffic_class,
                backend_version: 0,
                rank_stride: 0,
            })
        });
        create(coll_comm, shape, gin_ctx, dev_handle)
    })
}

unsafe extern "C" fn destroy_context(gin_ctx: *mut c_void) -> nccl::Result {
    guard("destroyContext", || {
        // NCCL may ask for errors until the context is drained.
        context::drain(&[&*registry::get::<Context>(gin_ctx, Kind::Context)?]);
        let context = registry::remove::<Context>(gin_ctx, Kind::Context)?;
        context.close(gin_ctx);
        Ok(())
    })
}

unsafe extern "C" fn close_coll(coll_comm: *mut c_void) -> nccl::Result {
    guard("closeColl", || {
        let coll = registry::remove::<CollComm>(coll_comm, Kind::Coll)?;
        let _span = trace::span("closeColl", coll.rank);
        let contexts = coll.contexts.close();
        if !contexts.is_empty() {
            crate::info!(
                "closeColl of rank {} destroys {} that are still open",
                coll.rank,
                log::counted(contexts.len(), "context")
            );
        }
        let open: Vec<_> =
            contexts.iter().filter_map(|handle| registry::get::<Context>(*handle, Kind::Context).ok()).collect();
        context::drain(&open.iter().map(|context| &**context).collect::<Vec<_>>());
        drop(open);
        for handle in contexts {
            // Another thread may just have removed this handle.
            if let Ok(context) = registry::remove::<Context>(handle, Kind::Context) {
                context.close(handle);
            }
        }
        for handle in coll.windows.close() {
            drop(registry::remove::<Window>(handle, Kind::Window));
        }
        Ok(())
    })
}

unsafe extern "C" fn gin_progress(gin_ctx: *mut c_void) -> nccl::Result {
    // The card and the watcher need no help from NCCL's thread. The call only checks the handle.
    guard("ginProgress", || registry::fault(gin_ctx, Kind::Context).map(drop).map_err(Error::from))
}

unsafe extern "C" fn query_last_error(gin_ctx: *mut c_void, has_error: *mut u8) -> nccl::Result {
    guard("queryLastError", || {
        let has_error = Out::new(has_error, "hasError")?;
        has_error.set(u8::from(registry::fault(gin_ctx, Kind::Context)?));
        Ok(())
    })
}
