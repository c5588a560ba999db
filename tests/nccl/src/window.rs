//! A registered window.
#![allow(unsafe_code)]

use crate::comm::Connection;
use crate::error::Error;
use crate::memory::DeviceMemory;
use crate::plugin::check;
use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// One window; deregistered on drop. It keeps its memory and its communicator.
#[derive(Debug)]
pub struct Window {
    connection: Arc<Connection>,
    memory: Arc<DeviceMemory>,
    mhandle: *mut c_void,
    gin_handle: *mut c_void,
    open: bool,
}

// SAFETY: the handles are the plugin's, whose calls are safe from any thread.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    pub(crate) fn register(
        connection: Arc<Connection>,
        memory: &Arc<DeviceMemory>,
        flags: u64,
    ) -> Result<Window, Error> {
        let (mut mhandle, mut gin_handle) = (std::ptr::null_mut(), std::ptr::null_mut());
        let register = connection.plugin.table.reg_mr_sym;
        // SAFETY: `coll` is open, the memory is mapped and outlives the window, the out pointers are valid.
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
        // SAFETY: as for `register`; the descriptor covers the memory from its first byte.
        let code = unsafe {
            register(
                connection.coll,
                memory.as_ptr(),
                memory.len(),
                memory.kind(),
                0,
                memory.fd().as_raw_fd(),
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
            return Err(Error::Contract { call, what: "mhandle is null".into() });
        }
        let window = Window { connection, memory: Arc::clone(memory), mhandle, gin_handle, open: true };
        if gin_handle.is_null() {
            return Err(Error::Contract { call, what: "ginHandle is null".into() });
        }
        Ok(window)
    }

    /// What a kernel gets as `ncclGinWindow_t`.
    pub fn gin_handle(&self) -> *mut c_void {
        self.gin_handle
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// `deregMrSym`. Dropping does the same and prints what fails.
    ///
    /// # Errors
    /// When the call fails.
    pub fn deregister(mut self) -> Result<(), Error> {
        self.close()
    }

    fn close(&mut self) -> Result<(), Error> {
        if !std::mem::replace(&mut self.open, false) {
            return Ok(());
        }
        // SAFETY: `mhandle` is of this `coll`, deregistered once.
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
