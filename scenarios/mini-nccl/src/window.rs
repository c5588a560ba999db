//! Registered windows.
#![allow(unsafe_code)]

use crate::connection::Connection;
use crate::error::Error;
use crate::memory::DeviceMemory;
use crate::plugin::check;
use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// A window, deregistered on drop. It keeps its memory and its communicator alive.
#[derive(Debug)]
pub struct Window {
    connection: Arc<Connection>,
    memory: Arc<DeviceMemory>,
    mhandle: *mut c_void,
    gin_handle: *mut c_void,
    open: bool,
}

// SAFETY: this crate never dereferences the handles, and NCCL's contract lets any thread pass them to the plugin.
unsafe impl Send for Window {}
// SAFETY: this crate never dereferences the handles, and NCCL's contract lets several threads pass them to the plugin
// at once.
unsafe impl Sync for Window {}

impl Window {
    pub(crate) fn register(
        connection: Arc<Connection>,
        memory: &Arc<DeviceMemory>,
        flags: u64,
    ) -> Result<Window, Error> {
        let (mut mhandle, mut gin_handle) = (std::ptr::null_mut(), std::ptr::null_mut());
        let register = connection.plugin.table.reg_mr_sym;
        // SAFETY: the connection keeps `coll` open. The window keeps the memory mapped until it deregisters it. The
        // outputs are local variables.
        let code = unsafe {
            register(
                connection.coll,
                memory.as_ptr(),
                memory.len(),
                memory.kind(),
                flags,
                &mut mhandle,
                &mut gin_handle,
            )
        };
        Window::finish(connection, memory, "regMrSym", code, mhandle, gin_handle)
    }

    pub(crate) fn register_dma_buf(
        connection: Arc<Connection>,
        memory: &Arc<DeviceMemory>,
        flags: u64,
    ) -> Result<Window, Error> {
        let (mut mhandle, mut gin_handle) = (std::ptr::null_mut(), std::ptr::null_mut());
        let entry = connection.plugin.table.reg_mr_sym_dma_buf;
        let register = entry.ok_or(Error::NullEntry { entry: "regMrSymDmaBuf" })?;
        let dma_buf = memory.dma_buf();
        let (fd, offset) = dma_buf.ok_or_else(|| Error::Usage("this memory of a GPU has no dma-buf".into()))?;
        // SAFETY: the connection keeps `coll` open. The window keeps the memory mapped until it deregisters it, and the
        // descriptor covers the memory from `offset` on. The outputs are local variables.
        let code = unsafe {
            register(
                connection.coll,
                memory.as_ptr(),
                memory.len(),
                memory.kind(),
                offset,
                fd.as_raw_fd(),
                flags,
                &mut mhandle,
                &mut gin_handle,
            )
        };
        Window::finish(connection, memory, "regMrSymDmaBuf", code, mhandle, gin_handle)
    }

    fn finish(
        connection: Arc<Connection>,
        memory: &Arc<DeviceMemory>,
        call: &'static str,
        code: ferrogin_ffi::nccl::Result,
        mhandle: *mut c_void,
        gin_handle: *mut c_void,
    ) -> Result<Window, Error> {
        check(call, code)?;
        if mhandle.is_null() {
            return Err(Error::Contract { call, violation: "mhandle is null".into() });
        }
        let window = Window { connection, memory: Arc::clone(memory), mhandle, gin_handle, open: true };
        if gin_handle.is_null() {
            return Err(Error::Contract { call, violation: "ginHandle is null".into() });
        }
        Ok(window)
    }

    /// Returns the `ncclGinWindow_t` for kernels.
    pub fn gin_handle(&self) -> *mut c_void {
        self.gin_handle
    }

    /// Returns the memory.
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// `deregMrSym`. Dropping does the same and prints an error.
    ///
    /// # Errors
    /// The call fails.
    pub fn deregister(mut self) -> Result<(), Error> {
        self.close()
    }

    fn close(&mut self) -> Result<(), Error> {
        if !std::mem::replace(&mut self.open, false) {
            return Ok(());
        }
        // SAFETY: `mhandle` belongs to `coll`, and `open` makes this its only deregistration.
        let code = unsafe { (self.connection.plugin.table.dereg_mr_sym)(self.connection.coll, self.mhandle) };
        check("deregMrSym", code)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            eprintln!("mini-nccl: rank {}: {error}", self.connection.rank);
        }
    }
}
