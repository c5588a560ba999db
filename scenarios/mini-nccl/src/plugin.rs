//! The loader: dlopen, NCCL's symbols, and the plugin's function table.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::ffi;
use ferrogin_ffi::nccl::{self, GinV13, GinV14};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// The version of a plugin's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbiVersion {
    /// `ncclGinPlugin_v14`.
    V14,
    /// `ncclGinPlugin_v13`.
    V13,
}

/// `createContext`, the one function whose type differs between the versions.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CreateContext {
    V14(nccl::CreateContextV14Fn),
    V13(nccl::CreateContextV13Fn),
}

/// A plugin's functions. NCCL requires those that are not optional.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Table {
    pub init: nccl::InitFn,
    pub devices: nccl::DevicesFn,
    /// `None` for v13.
    pub get_gin_properties: Option<nccl::GetGinPropertiesFn>,
    pub get_properties: nccl::GetPropertiesFn,
    pub listen: nccl::ListenFn,
    pub connect: nccl::ConnectFn,
    pub create_context: CreateContext,
    pub reg_mr_sym: nccl::RegMrSymFn,
    /// NCCL never calls this function.
    pub reg_mr_sym_dma_buf: Option<nccl::RegMrSymDmaBufFn>,
    pub dereg_mr_sym: nccl::DeregMrSymFn,
    pub destroy_context: nccl::HandleFn,
    pub close_coll: nccl::HandleFn,
    pub close_listen: nccl::HandleFn,
    /// NCCL calls this function only if a device handle requires it.
    pub gin_progress: Option<nccl::HandleFn>,
    pub query_last_error: nccl::QueryLastErrorFn,
    pub finalize: nccl::HandleFn,
}

/// Takes a required function from a table.
macro_rules! entry {
    ($table:ident . $field:ident) => {
        $table.$field.ok_or(Error::NullEntry { entry: stringify!($field) })?
    };
}

/// Takes the functions from a table of either version.
macro_rules! table {
    ($table:ident, $create_context:path, $get_gin_properties:expr) => {
        Table {
            init: entry!($table.init),
            devices: entry!($table.devices),
            get_gin_properties: $get_gin_properties,
            get_properties: entry!($table.get_properties),
            listen: entry!($table.listen),
            connect: entry!($table.connect),
            create_context: $create_context(entry!($table.create_context)),
            reg_mr_sym: entry!($table.reg_mr_sym),
            reg_mr_sym_dma_buf: $table.reg_mr_sym_dma_buf,
            dereg_mr_sym: entry!($table.dereg_mr_sym),
            destroy_context: entry!($table.destroy_context),
            close_coll: entry!($table.close_coll),
            close_listen: entry!($table.close_listen),
            gin_progress: $table.gin_progress,
            query_last_error: entry!($table.query_last_error),
            finalize: entry!($table.finalize),
        }
    };
}

/// A loaded GIN plugin, which stays loaded until the last reference is dropped.
#[derive(Debug)]
pub struct Plugin {
    pub(crate) table: Table,
    abi: AbiVersion,
    name: String,
    path: PathBuf,
    /// Number of devices, which the loader queries once; -1 until then.
    devices: AtomicI32,
    /// The last field, because the table points to the library's code.
    library: Library,
}

impl Plugin {
    /// Loads a library as NCCL does: through `ncclGinPlugin_v14`, or else `ncclGinPlugin_v13`. The dynamic loader
    /// searches for a `path` without a slash.
    ///
    /// # Errors
    /// The library does not load, has neither symbol, or has a table without a required function.
    pub fn load(path: impl AsRef<Path>) -> Result<Arc<Plugin>, Error> {
        let path = path.as_ref();
        let library = open(path)?;
        match v14_table(&library) {
            Some(table) => Plugin::from_v14(path, library, &table?),
            None => Plugin::from_v13_library(path, library),
        }
    }

    /// Loads a library through `ncclGinPlugin_v13` only, like an NCCL without v14.
    ///
    /// # Errors
    /// Those of [`load`](Plugin::load).
    pub fn load_v13(path: impl AsRef<Path>) -> Result<Arc<Plugin>, Error> {
        let path = path.as_ref();
        Plugin::from_v13_library(path, open(path)?)
    }

    /// Loads the first plugin in a NCCL_GIN_PLUGIN list that loads. Each entry is a library's name or path, or the NAME
    /// in `libnccl-gin-NAME.so`.
    ///
    /// # Errors
    /// The last entry's error, if no entry loads. An empty list and `none` are errors too.
    pub fn find(list: &str) -> Result<Arc<Plugin>, Error> {
        let mut last = Error::Usage(format!("NCCL_GIN_PLUGIN={list} names no plugin"));
        for entry in list.split(',').filter(|entry| !entry.is_empty() && *entry != "none").take(13) {
            match Plugin::load(entry) {
                Ok(plugin) => return Ok(plugin),
                Err(error @ Error::Load { .. }) if !entry.contains('/') => {
                    last = error;
                    match Plugin::load(format!("libnccl-gin-{entry}.so")) {
                        Ok(plugin) => return Ok(plugin),
                        Err(Error::Load { .. }) => {}
                        Err(error) => last = error,
                    }
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn from_v14(path: &Path, library: Library, t: &GinV14) -> Result<Arc<Plugin>, Error> {
        let table = table!(t, CreateContext::V14, Some(entry!(t.get_gin_properties)));
        Plugin::new(path, library, AbiVersion::V14, t.name, table)
    }

    fn from_v13_library(path: &Path, library: Library) -> Result<Arc<Plugin>, Error> {
        // SAFETY: by NCCL's contract, the symbol with this name is a `ncclGin_v13_t`, and `GinV13` has its layout.
        let symbol = unsafe { library.get::<*const GinV13>(b"ncclGinPlugin_v13\0") };
        let pointer = symbol.map(|symbol| symbol.into_raw().cast::<GinV13>().cast_const()).ok();
        let t = pointer
            .and_then(ffi::read)
            .ok_or_else(|| Error::NoSymbol { path: path.to_path_buf(), symbol: "ncclGinPlugin_v13" })?;
        let table = table!(t, CreateContext::V13, None);
        Plugin::new(path, library, AbiVersion::V13, t.name, table)
    }

    fn new(
        path: &Path,
        library: Library,
        abi: AbiVersion,
        name: *const std::ffi::c_char,
        table: Table,
    ) -> Result<Arc<Plugin>, Error> {
        let name = ffi::text_of(name).ok_or(Error::NullEntry { entry: "name" })?;
        let devices = AtomicI32::new(-1);
        Ok(Arc::new(Plugin { table, abi, name, path: path.to_path_buf(), devices, library }))
    }

    /// Returns a copy of the v14 table, for calls that NCCL does not make; `None` for a v13 plugin.
    pub fn raw_table(&self) -> Option<GinV14> {
        v14_table(&self.library)?.ok()
    }

    /// Returns the plugin's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path or name of the library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the version of the plugin's table.
    pub fn abi(&self) -> AbiVersion {
        self.abi
    }

    /// Returns the number of devices, which the loader queries once, after the first `init`.
    pub(crate) fn devices_once(&self) -> Result<i32, Error> {
        let known = self.devices.load(Ordering::Acquire);
        if known >= 0 {
            return Ok(known);
        }
        let n = self.devices()?;
        self.devices.store(n, Ordering::Release);
        Ok(n)
    }

    /// `devices`.
    ///
    /// # Errors
    /// The call fails, or the plugin has no device. NCCL then does not use the plugin.
    pub fn devices(&self) -> Result<i32, Error> {
        let mut n = 0;
        // SAFETY: the plugin writes one int into a local variable.
        check("devices", unsafe { (self.table.devices)(&mut n) })?;
        if n <= 0 {
            return Err(Error::Contract {
                call: "devices",
                violation: format!("{n} devices, with which NCCL does not use the plugin"),
            });
        }
        Ok(n)
    }
}

/// Converts a result of the plugin. The error has the calling thread's last WARN line.
pub(crate) fn check(call: &'static str, code: nccl::Result) -> Result<(), Error> {
    match code {
        nccl::SUCCESS => Ok(()),
        code => Err(Error::Call { call, code, warn: crate::log::last_warn_of_this_thread().unwrap_or_default() }),
    }
}

pub(crate) fn open(path: &Path) -> Result<Library, Error> {
    // SAFETY: loading runs the library's initialisers, and the caller names a library that is meant to be loaded.
    unsafe { Library::open(Some(AsRef::<OsStr>::as_ref(path)), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        let mut text = error.to_string();
        if let Some(source) = std::error::Error::source(&error) {
            text = source.to_string();
        }
        // The dynamic loader's message begins with the path, which the error already has.
        let text = text.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&text).to_string();
        Error::Load { path: path.to_path_buf(), text }
    })
}

fn v14_table(library: &Library) -> Option<Result<GinV14, Error>> {
    // SAFETY: by NCCL's contract, the symbol with this name is a `ncclGin_v14_t`, and `GinV14` has its layout.
    let symbol = unsafe { library.get::<*const GinV14>(b"ncclGinPlugin_v14\0") }.ok()?;
    let pointer = symbol.into_raw().cast::<GinV14>().cast_const();
    Some(ffi::read(pointer).ok_or(Error::NullEntry { entry: "ncclGinPlugin_v14" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_without_symbols_is_refused() {
        let error = Plugin::load("libc.so.6").unwrap_err();
        assert!(matches!(error, Error::NoSymbol { symbol: "ncclGinPlugin_v13", .. }), "{error}");
    }

    #[test]
    fn plugin_list_is_tried_in_order() {
        assert!(matches!(Plugin::find("none").unwrap_err(), Error::Usage(_)));
        assert!(matches!(Plugin::find("").unwrap_err(), Error::Usage(_)));
        let error = Plugin::find("nosuchplugin,libc.so.6").unwrap_err();
        assert!(matches!(error, Error::NoSymbol { .. }), "{error}");
        let error = Plugin::find("nosuchplugin").unwrap_err();
        assert!(matches!(error, Error::Load { .. }), "{error}");
    }
}
