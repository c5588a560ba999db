//! GIN contexts, and the thread that calls `ginProgress` if a device handle requires it.
#![allow(unsafe_code)]

use crate::connection::Connection;
use crate::error::Error;
use crate::ffi;
use crate::plugin::{CreateContext, check};
use ferrogin_ffi::nccl::{self, GinConfigV13, GinConfigV14, NetDeviceHandleV11};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Pause between calls of `ginProgress`.
const PROGRESS_PAUSE: Duration = Duration::from_micros(50);

/// The result of one `createContext`, destroyed on drop.
#[derive(Debug)]
pub struct GinContext {
    gin_ctx: *mut c_void,
    /// The device handle, which the plugin owns.
    dev_handle: *mut NetDeviceHandleV11,
    device: NetDeviceHandleV11,
    contexts: usize,
    progress: Option<Progress>,
    open: bool,
    connection: Arc<Connection>,
}

// SAFETY: this crate only reads the pointers in `create`, and NCCL's contract lets any thread pass the handle to the
// plugin.
unsafe impl Send for GinContext {}
// SAFETY: this crate only reads the pointers in `create`, and NCCL's contract lets several threads pass the handle to
// the plugin.
unsafe impl Sync for GinContext {}

impl GinContext {
    pub(crate) fn create(connection: Arc<Connection>, config: &GinConfigV14) -> Result<GinContext, Error> {
        const CALL: &str = "createContext";
        let (mut gin_ctx, mut dev_handle) = (std::ptr::null_mut(), std::ptr::null_mut());
        let code = match connection.plugin.table.create_context {
            CreateContext::V14(create) => {
                let mut config = *config;
                // SAFETY: the connection keeps `coll` open; `config` and the outputs are local variables.
                unsafe { create(connection.coll, &mut config, &mut gin_ctx, &mut dev_handle) }
            }
            CreateContext::V13(create) => {
                let mut config = GinConfigV13 {
                    n_signals: config.n_signals,
                    n_counters: config.n_counters,
                    n_contexts: config.n_contexts,
                    queue_depth: config.queue_depth,
                    traffic_class: config.traffic_class,
                };
                // SAFETY: the connection keeps `coll` open; `config` and the outputs are local variables.
                unsafe { create(connection.coll, &mut config, &mut gin_ctx, &mut dev_handle) }
            }
        };
        check(CALL, code)?;
        let broken = |violation: String| Error::Contract { call: CALL, violation };
        if gin_ctx.is_null() {
            return Err(broken("ginCtx is null".into()));
        }
        let device = ffi::read(dev_handle).ok_or_else(|| broken("devHandle is null".into()))?;
        let contexts = usize::try_from(config.n_contexts).unwrap_or(0).max(1);
        let mut context = GinContext { gin_ctx, dev_handle, device, contexts, progress: None, open: true, connection };
        if device.handle.is_null() {
            return Err(broken("devHandle->handle is null".into()));
        }
        if device.net_device_type != nccl::NET_DEVICE_GIN_EFA_GDA {
            return Err(broken(format!(
                "devHandle has type {}, not {}",
                device.net_device_type,
                nccl::NET_DEVICE_GIN_EFA_GDA
            )));
        }
        if device.needs_proxy_progress != 0 {
            let entry = context.connection.plugin.table.gin_progress;
            let entry = entry.ok_or(Error::NullEntry { entry: "ginProgress" })?;
            context.progress = Some(Progress::start(entry, gin_ctx)?);
        }
        Ok(context)
    }

    /// Returns the device address of the array of contexts for kernels, indexed by context id.
    pub fn handle(&self) -> *mut c_void {
        self.device.handle
    }

    /// Returns the device handle that `createContext` returned.
    pub fn net_device_handle(&self) -> *mut NetDeviceHandleV11 {
        self.dev_handle
    }

    /// Returns the plugin's handle, for raw calls.
    pub fn gin_ctx(&self) -> *mut c_void {
        self.gin_ctx
    }

    /// Returns the bytes of one element of the array, from the device handle.
    pub fn stride(&self) -> usize {
        self.device.size
    }

    /// Returns the number of contexts.
    pub fn contexts(&self) -> usize {
        self.contexts
    }

    /// `queryLastError`; also true after `ginProgress` failed.
    ///
    /// # Errors
    /// The call itself fails.
    pub fn query_last_error(&self) -> Result<bool, Error> {
        if self.progress.as_ref().is_some_and(|progress| progress.result.load(Ordering::Acquire) != nccl::SUCCESS) {
            return Ok(true);
        }
        let mut has_error = 0u8;
        let query = self.connection.plugin.table.query_last_error;
        // SAFETY: `gin_ctx` is open while `self` exists; the plugin writes one byte into a local variable.
        check("queryLastError", unsafe { query(self.gin_ctx, &mut has_error) })?;
        Ok(has_error != 0)
    }

    /// `destroyContext`. Dropping does the same and prints an error.
    ///
    /// # Errors
    /// The call fails.
    pub fn destroy(mut self) -> Result<(), Error> {
        self.close()
    }

    /// Drops the context without `destroyContext`, like a program that skips ncclDevCommDestroy. `closeColl` must close
    /// it.
    pub fn abandon(mut self) {
        self.progress = None;
        self.open = false;
    }

    fn close(&mut self) -> Result<(), Error> {
        // The progress thread ends before destroyContext begins.
        self.progress = None;
        if !std::mem::replace(&mut self.open, false) {
            return Ok(());
        }
        // SAFETY: `createContext` returned `gin_ctx`, and `open` makes this its only destruction.
        check("destroyContext", unsafe { (self.connection.plugin.table.destroy_context)(self.gin_ctx) })
    }
}

impl Drop for GinContext {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            eprintln!("mini-nccl: rank {}: {error}", self.connection.rank);
        }
    }
}

/// A thread that calls `ginProgress` until dropped, or until the call fails.
#[derive(Debug)]
struct Progress {
    stop: Arc<AtomicBool>,
    result: Arc<AtomicI32>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    fn start(entry: nccl::HandleFn, gin_ctx: *mut c_void) -> Result<Progress, Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let result = Arc::new(AtomicI32::new(nccl::SUCCESS));
        let (stop_flag, last) = (Arc::clone(&stop), Arc::clone(&result));
        let address = gin_ctx as usize;
        let run = move || {
            while !stop_flag.load(Ordering::Acquire) {
                // SAFETY: the context is open, because `GinContext::close` joins this thread before it destroys the
                // context.
                let code = unsafe { entry(address as *mut c_void) };
                if code != nccl::SUCCESS {
                    last.store(code, Ordering::Release);
                    return;
                }
                std::thread::sleep(PROGRESS_PAUSE);
            }
        };
        let thread = std::thread::Builder::new().name("gin-progress".into()).spawn(run);
        let thread = thread.map_err(|error| Error::Usage(format!("the progress thread does not start: {error}")))?;
        Ok(Progress { stop, result, thread: Some(thread) })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
