//! The loader: dlopen, the symbols that NCCL looks for, and the table behind them.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::ffi;
use ferrogin_ffi::nccl::{self, GinV13, GinV14};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// Which of the plugin ABI's versions a table has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbiVersion {
    /// `ncclGinPlugin_v14`.
    V14,
    /// `ncclGinPlugin_v13`.
    V13,
}

/// The entry that creates a context: the one entry whose type differs between the versions.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CreateContext {
    V14(nccl::CreateContextV14Fn),
    V13(nccl::CreateContextV13Fn),
}

/// The entries that NCCL calls, none of them null.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Table {
    pub init: nccl::InitFn,
    pub devices: nccl::DevicesFn,
    /// v13 has none.
    pub get_gin_properties: Option<nccl::GetGinPropertiesFn>,
    pub get_properties: nccl::GetPropertiesFn,
    pub listen: nccl::ListenFn,
    pub connect: nccl::ConnectFn,
    pub create_context: CreateContext,
    pub reg_mr_sym: nccl::RegMrSymFn,
    /// NCCL itself never calls it.
    pub reg_mr_sym_dma_buf: Option<nccl::RegMrSymDmaBufFn>,
    pub dereg_mr_sym: nccl::DeregMrSymFn,
    pub destroy_context: nccl::HandleFn,
    pub close_coll: nccl::HandleFn,
    pub close_listen: nccl::HandleFn,
    /// Called only where a device handle asks for it.
    pub gin_progress: Option<nccl::HandleFn>,
    pub query_last_error: nccl::QueryLastErrorFn,
    pub finalize: nccl::HandleFn,
}

/// Requires an entry of a table.
macro_rules! entry {
    ($table:ident . $field:ident) => {
        $table.$field.ok_or(Error::NullEntry { entry: stringify!($field) })?
    };
}

/// A loaded GIN plugin. It stays loaded until the last clone of the `Arc` is gone.
#[derive(Debug)]
pub struct Plugin {
    pub(crate) table: Table,
    abi: AbiVersion,
    name: String,
    path: PathBuf,
    /// Devices, asked for once by the loader; -1 before.
    devices: AtomicI32,
    /// Last, so that the table is gone before the code it points to.
    library: Library,
}

impl Plugin {
    /// Loads the library at `path` (or of that name, by the loader's search) as NCCL does: `ncclGinPlugin_v14`, and
    /// where that is missing `ncclGinPlugin_v13`.
    ///
    /// # Errors
    /// When the library cannot be loaded, has neither symbol, or a table with null entries.
    pub fn load(path: impl AsRef<Path>) -> Result<Arc<Plugin>, Error> {
        let path = path.as_ref();
        let library = open(path)?;
        match v14_table(&library) {
            Some(table) => Plugin::from_v14(path, library, &table?),
            None => Plugin::from_v13_library(path, library),
        }
    }

    /// Loads the library by `ncclGinPlugin_v13` alone, as a NCCL without v14 would.
    ///
    /// # Errors
    /// As for [`load`](Plugin::load).
    pub fn load_v13(path: impl AsRef<Path>) -> Result<Arc<Plugin>, Error> {
        let path = path.as_ref();
        Plugin::from_v13_library(path, open(path)?)
    }

    /// Loads the first plugin of a NCCL_GIN_PLUGIN list: each entry is tried as a library's name or path, then as
    /// `libnccl-gin-<entry>.so`.
    ///
    /// # Errors
    /// The error of the last entry, when none could be loaded; an empty list, and `none`, are errors too.
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
        let table = Table {
            init: entry!(t.init),
            devices: entry!(t.devices),
            get_gin_properties: Some(entry!(t.get_gin_properties)),
            get_properties: entry!(t.get_properties),
            listen: entry!(t.listen),
            connect: entry!(t.connect),
            create_context: CreateContext::V14(entry!(t.create_context)),
            reg_mr_sym: entry!(t.reg_mr_sym),
            reg_mr_sym_dma_buf: t.reg_mr_sym_dma_buf,
            dereg_mr_sym: entry!(t.dereg_mr_sym),
            destroy_context: entry!(t.destroy_context),
            close_coll: entry!(t.close_coll),
            close_listen: entry!(t.close_listen),
            gin_progress: t.gin_progress,
            query_last_error: entry!(t.query_last_error),
            finalize: entry!(t.finalize),
        };
        Plugin::new(path, library, AbiVersion::V14, t.name, table)
    }

    fn from_v13_library(path: &Path, library: Library) -> Result<Arc<Plugin>, Error> {
        // SAFETY: the symbol of that name is by NCCL's contract a `ncclGin_v13_t`.
        let symbol = unsafe { library.get::<*const GinV13>(b"ncclGinPlugin_v13\0") };
        let pointer = symbol.map(|symbol| symbol.into_raw().cast::<GinV13>().cast_const()).ok();
        let t = pointer
            .and_then(ffi::read)
            .ok_or_else(|| Error::NoSymbol { path: path.to_path_buf(), symbol: "ncclGinPlugin_v13" })?;
        let table = Table {
            init: entry!(t.init),
            devices: entry!(t.devices),
            get_gin_properties: None,
            get_properties: entry!(t.get_properties),
            listen: entry!(t.listen),
            connect: entry!(t.connect),
            create_context: CreateContext::V13(entry!(t.create_context)),
            reg_mr_sym: entry!(t.reg_mr_sym),
            reg_mr_sym_dma_buf: t.reg_mr_sym_dma_buf,
            dereg_mr_sym: entry!(t.dereg_mr_sym),
            destroy_context: entry!(t.destroy_context),
            close_coll: entry!(t.close_coll),
            close_listen: entry!(t.close_listen),
            gin_progress: t.gin_progress,
            query_last_error: entry!(t.query_last_error),
            finalize: entry!(t.finalize),
        };
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

    /// A copy of the v14 table, for calls that NCCL would not make; `None` for a v13 plugin.
    pub fn raw_table(&self) -> Option<GinV14> {
        v14_table(&self.library)?.ok()
    }

    /// The plugin's own name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it was loaded by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of its table.
    pub fn abi(&self) -> AbiVersion {
        self.abi
    }

    /// The loader's question: how many devices, asked of the plugin once, after the first `init`.
    pub(crate) fn devices_once(&self) -> Result<i32, Error> {
        let known = self.devices.load(Ordering::Acquire);
        if known >= 0 {
            return Ok(known);
        }
        let n = self.devices()?;
        self.devices.store(n, Ordering::Release);
        Ok(n)
    }

    /// Asks the plugin for its number of devices.
    ///
    /// # Errors
    /// When the call fails or there is no device, either of which makes NCCL drop the plugin.
    pub fn devices(&self) -> Result<i32, Error> {
        let mut n = 0;
        // SAFETY: `n` is a valid int for the duration of the call.
        check("devices", unsafe { (self.table.devices)(&mut n) })?;
        if n <= 0 {
            return Err(Error::Contract { call: "devices", what: format!("{n} devices: NCCL would drop the plugin") });
        }
        Ok(n)
    }
}

/// Turns a plugin's result into ours, with its last warning.
pub(crate) fn check(call: &'static str, code: nccl::Result) -> Result<(), Error> {
    match code {
        nccl::SUCCESS => Ok(()),
        code => Err(Error::Call { call, code, warn: crate::log::last_warn().unwrap_or_default() }),
    }
}

fn open(path: &Path) -> Result<Library, Error> {
    // SAFETY: loading runs the library's initialisers: the caller named this library as a plugin to run.
    unsafe { Library::open(Some(AsRef::<OsStr>::as_ref(path)), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        let mut text = error.to_string();
        if let Some(source) = std::error::Error::source(&error) {
            text = source.to_string();
        }
        // The dynamic loader begins with the path, which the error names too.
        let text = text.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&text).to_string();
        Error::Load { path: path.to_path_buf(), text }
    })
}

fn v14_table(library: &Library) -> Option<Result<GinV14, Error>> {
    // SAFETY: the symbol of that name is by NCCL's contract a `ncclGin_v14_t`.
    let symbol = unsafe { library.get::<*const GinV14>(b"ncclGinPlugin_v14\0") }.ok()?;
    let pointer = symbol.into_raw().cast::<GinV14>().cast_const();
    Some(ffi::read(pointer).ok_or(Error::NullEntry { entry: "ncclGinPlugin_v14" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_symbols_is_refused() {
        let error = Plugin::load("libc.so.6").unwrap_err();
        assert!(matches!(error, Error::NoSymbol { symbol: "ncclGinPlugin_v13", .. }), "{error}");
    }

    #[test]
    fn lists_are_tried_in_order() {
        assert!(matches!(Plugin::find("none").unwrap_err(), Error::Usage(_)));
        assert!(matches!(Plugin::find("").unwrap_err(), Error::Usage(_)));
        let error = Plugin::find("nosuchplugin,libc.so.6").unwrap_err();
        assert!(matches!(error, Error::NoSymbol { .. }), "{error}");
        let error = Plugin::find("nosuchplugin").unwrap_err();
        assert!(matches!(error, Error::Load { .. }), "{error}");
    }
}
