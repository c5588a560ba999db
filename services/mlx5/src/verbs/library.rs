//! Loads rdma-core, and owns the objects that it creates.

use super::ffi::{self, Ptr};
use crate::device::{DeviceError, Handle};
use std::ffi::{CStr, c_int};
use std::sync::Arc;

const VERBS: &str = "libibverbs.so.1";
/// "Function not implemented": the library's error if the kernel has no RDMA support.
const ENOSYS: i32 = 38;
const DV: &str = "libmlx5.so.1";

/// The entry points of both libraries.
pub(super) struct Api {
    pub verbs: ffi::Verbs,
    pub dv: ffi::Dv,
}

fn library<T>(name: &'static str, find: fn(libloading::Library) -> Result<T, String>) -> Result<T, DeviceError> {
    let missing = |why: String| DeviceError::Library { library: name, why };
    // SAFETY: the initialisers of rdma-core only register drivers.
    let library = unsafe { libloading::Library::new(name) }.map_err(|error| missing(error.to_string()))?;
    find(library).map_err(missing)
}

impl Api {
    pub(super) fn load() -> Result<Arc<Self>, DeviceError> {
        Ok(Arc::new(Self { verbs: library(VERBS, ffi::Verbs::find)?, dv: library(DV, ffi::Dv::find)? }))
    }

    /// Calls `each` with every device, its name, and whether it is an mlx5 device, until `each` returns a value.
    pub(super) fn find_device<R>(
        &self,
        mut each: impl FnMut(Ptr<ffi::Device>, &str, bool) -> Option<R>,
    ) -> Result<Option<R>, DeviceError> {
        let mut count: c_int = 0;
        let list = (self.verbs.ibv_get_device_list)(&mut count);
        if list.is_null() {
            // A kernel without RDMA support has no devices, and the call hasn't failed.
            return match last_error() {
                0 | ENOSYS => Ok(None),
                errno => Err(DeviceError::Call { call: "ibv_get_device_list", errno }),
            };
        }
        let mut found = None;
        for at in 0..count.max(0) as usize {
            // SAFETY: the library returned a list of `count` entries, which is freed below.
            let device = unsafe { list.wrapping_add(at).read() };
            let name = (self.verbs.ibv_get_device_name)(device);
            if name.is_null() {
                continue;
            }
            // SAFETY: the library returned a string that is valid until the list is freed below.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            let ours = (self.dv.mlx5dv_is_supported)(device);
            found = each(device, &name, ours);
            if found.is_some() {
                break;
            }
        }
        // SAFETY: the library returned the list, and no entry is used after this call.
        unsafe { (self.verbs.ibv_free_device_list)(list) };
        Ok(found)
    }
}

/// Returns the last system error, which these calls set.
pub(super) fn last_error() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Returns the object or, if there is none, the system error that the call set.
pub(super) fn check_pointer<T>(object: Option<Ptr<T>>, call: &'static str) -> Result<Ptr<T>, DeviceError> {
    object.ok_or_else(|| DeviceError::Call { call, errno: last_error() })
}

/// Checks the result of a call that returns an error number.
pub(super) fn check_status(status: c_int, call: &'static str) -> Result<(), DeviceError> {
    match status {
        0 => Ok(()),
        -1 => Err(DeviceError::Call { call, errno: last_error() }),
        errno => Err(DeviceError::Call { call, errno: errno.abs() }),
    }
}

/// An owned object of the library. Dropping it destroys the object, before the objects that it depends on.
macro_rules! owned {
    ($($(#[$attr:meta])* $name:ident($object:ty), $destroy:ident, keeps { $($keep_alive:ident: $kept:ty),* };)*) => {$(
        $(#[$attr])*
        pub(super) struct $name {
            pub object: Ptr<$object>,
            pub context: Arc<Context>,
            $(pub $keep_alive: $kept,)*
        }

        // SAFETY: verbs calls are thread-safe, and this crate passes the object to verbs calls only.
        unsafe impl Send for $name {}
        // SAFETY: verbs calls are thread-safe, and this crate passes the object to verbs calls only.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: the library created the object, and only this drop destroys it. After an error the object is
                // leaked.
                let _ = unsafe { (self.context.api.verbs.$destroy)(self.object) };
            }
        }
    )*};
}

/// An open device.
pub(super) struct Context {
    pub object: Ptr<ffi::Context>,
    pub api: Arc<Api>,
}

// SAFETY: verbs calls are thread-safe, and this crate passes the context to verbs calls only.
unsafe impl Send for Context {}
// SAFETY: verbs calls are thread-safe, and this crate passes the context to verbs calls only.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the library opened the device; every object keeps the context alive, so this drop closes it once and
        // last.
        let _ = unsafe { (self.api.verbs.ibv_close_device)(self.object) };
    }
}

owned! {
    Pd(ffi::Pd), ibv_dealloc_pd, keeps {};
    Mr(ffi::Mr), ibv_dereg_mr, keeps { _pd: Handle };
    Cq(ffi::Cq), ibv_destroy_cq, keeps {};
    Srq(ffi::Srq), ibv_destroy_srq, keeps { _pd: Handle };
    Qp(ffi::Qp), ibv_destroy_qp, keeps { datagram: bool, psn: u32, _on: Vec<Handle> };
}

/// A window, allocated and freed by the driver's calls.
pub(super) struct Mw {
    pub object: Ptr<ffi::Mw>,
    pub context: Arc<Context>,
    pub _pd: Handle,
}

// SAFETY: the driver's calls are thread-safe, and this crate passes the object to those calls only.
unsafe impl Send for Mw {}
// SAFETY: the driver's calls are thread-safe, and this crate passes the object to those calls only.
unsafe impl Sync for Mw {}

impl Drop for Mw {
    fn drop(&mut self) {
        if let Some(dealloc) = self.context.object.get().dealloc_mw {
            // SAFETY: the driver allocated the window, and only this drop frees it.
            let _ = unsafe { dealloc(self.object) };
        }
    }
}
