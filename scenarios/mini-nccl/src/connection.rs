//! The plugin's objects behind a communicator: `init`, `listen` and `connect`, each closed once.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::ffi;
use crate::plugin::{Plugin, check};
use parking_lot::Mutex;
use std::ffi::c_void;
use std::sync::Arc;

/// The plugin context, from `init` to `finalize`.
#[derive(Debug)]
pub(crate) struct Instance {
    pub plugin: Arc<Plugin>,
    pub ctx: *mut c_void,
    finalized: bool,
}

// SAFETY: this crate never dereferences the handle, and NCCL's contract lets any thread pass it to the plugin.
unsafe impl Send for Instance {}
// SAFETY: this crate never dereferences the handle, and NCCL's contract lets several threads pass it to the plugin at
// once.
unsafe impl Sync for Instance {}

impl Instance {
    /// NCCL calls `init` and `finalize` under a process-wide mutex.
    fn guard() -> parking_lot::MutexGuard<'static, ()> {
        static INIT: Mutex<()> = Mutex::new(());
        INIT.lock()
    }

    pub fn init(plugin: &Arc<Plugin>, hash: u64) -> Result<Instance, Error> {
        let _guard = Instance::guard();
        let mut ctx = std::ptr::null_mut();
        // SAFETY: the plugin writes one pointer into `ctx`, a local variable. The logger is a static function.
        check("init", unsafe { (plugin.table.init)(&mut ctx, hash, ffi::LOGGER) })?;
        let instance = Instance { plugin: Arc::clone(plugin), ctx, finalized: false };
        plugin.devices_once()?;
        Ok(instance)
    }

    /// Finalizes once; later calls do nothing.
    pub fn finalize(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.finalized, true) {
            return Ok(());
        }
        let _guard = Instance::guard();
        // SAFETY: `init` returned `ctx`, and each object that was made with it keeps this instance alive.
        check("finalize", unsafe { (self.plugin.table.finalize)(self.ctx) })
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Err(error) = self.finalize() {
            eprintln!("mini-nccl: {error}");
        }
    }
}

/// The part of a communicator that windows and contexts keep alive.
#[derive(Debug)]
pub(crate) struct Connection {
    pub plugin: Arc<Plugin>,
    pub coll: *mut c_void,
    /// `None` after `close`.
    pub instance: Option<Arc<Instance>>,
    pub rank: usize,
    pub nranks: usize,
    pub closed: bool,
}

// SAFETY: this crate never dereferences the handle, and NCCL's contract lets any thread pass it to the plugin.
unsafe impl Send for Connection {}
// SAFETY: this crate never dereferences the handle, and NCCL's contract lets several threads pass it to the plugin at
// once.
unsafe impl Sync for Connection {}

impl Connection {
    pub fn close(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        // SAFETY: `connect` returned `coll`, and this is its only close. Its windows are closed, since each keeps this
        // value alive.
        let coll = check("closeColl", unsafe { (self.plugin.table.close_coll)(self.coll) });
        // The last connection of an instance finalizes it.
        let last = self.instance.take().and_then(Arc::into_inner).map(|mut instance| instance.finalize());
        coll.and(last.unwrap_or(Ok(())))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            eprintln!("mini-nccl: rank {}: {error}", self.rank);
        }
    }
}

/// The listen communicator, closed on drop.
pub(crate) struct ListenComm<'a> {
    pub plugin: &'a Plugin,
    pub comm: *mut c_void,
}

impl ListenComm<'_> {
    pub fn close(self) -> Result<(), Error> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `listen` returned `comm`, and this is its only close, since drop does not run.
        check("closeListen", unsafe { (this.plugin.table.close_listen)(this.comm) })
    }
}

impl Drop for ListenComm<'_> {
    fn drop(&mut self) {
        // SAFETY: `listen` returned `comm`, and this is its only close, since `close` prevents this drop.
        unsafe { (self.plugin.table.close_listen)(self.comm) };
    }
}
