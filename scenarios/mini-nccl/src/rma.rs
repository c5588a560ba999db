//! RMA plugins, driven as NCCL's progress threads drive them: the loader's version search, a communicator's call order,
//! and the host's data calls.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::ffi;
use crate::memory::DeviceMemory;
use crate::plugin::{check, open};
use ferrogin_ffi::nccl::{self, GinConfigV13, NetPropertiesV12};
use ferrogin_ffi::rma::{RmaConfigV14, RmaPropertiesV16, RmaV13, RmaV14, RmaV15, RmaV16, SIGNAL_OP_ADD};
use ferrogin_rendezvous::Bootstrap;
use libloading::os::unix::Library;
use parking_lot::Mutex;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

/// A plugin's table.
#[derive(Debug, Clone, Copy)]
enum Table {
    V16(RmaV16),
    V15(RmaV15),
    V14(RmaV14),
    V13(RmaV13),
}

/// Calls an entry that has the same type in all versions.
macro_rules! call {
    ($plugin:expr, $entry:ident($($arg:expr),*)) => {{
        let function = match &$plugin.table {
            Table::V16(table) => table.$entry,
            Table::V15(table) => table.$entry,
            Table::V14(table) => table.$entry,
            Table::V13(table) => table.$entry,
        };
        match function {
            // SAFETY: the callers pass open handles that the plugin returned, and pointers to local variables.
            Some(function) => check(stringify!($entry), unsafe { function($($arg),*) }),
            None => Err(Error::NullEntry { entry: stringify!($entry) }),
        }
    }};
}

/// Calls entries whose types differ, by version.
macro_rules! by_version {
    ($plugin:expr, $entry:ident, v13($($v13:expr),*), v14($($v14:expr),*), v15($($v15:expr),*)) => {
        by_version!(@call $plugin, $entry, {
            Table::V16(table) => (table; $($v15),*),
            Table::V15(table) => (table; $($v15),*),
            Table::V14(table) => (table; $($v14),*),
            Table::V13(table) => (table; $($v13),*),
        })
    };
    (@call $plugin:expr, $entry:ident, { $($version:pat => ($table:ident; $($arg:expr),*),)* }) => {
        match &$plugin.table {
            $($version => match $table.$entry {
                // SAFETY: the callers pass open handles that the plugin returned, and pointers to local variables.
                Some(function) => check(stringify!($entry), unsafe { function($($arg),*) }),
                None => Err(Error::NullEntry { entry: stringify!($entry) }),
            },)*
        }
    };
}

/// A loaded RMA plugin.
#[derive(Debug)]
pub struct RmaPlugin {
    table: Table,
    version: u32,
    _library: Library,
}

impl RmaPlugin {
    /// Loads a library as NCCL 2.32 does: at the newest of versions 16, 15, 14 and 13 that it has.
    ///
    /// # Errors
    /// The library does not load, or has no such symbol.
    pub fn load(path: impl AsRef<Path>) -> Result<Arc<Self>, Error> {
        let path = path.as_ref();
        [16, 15, 14]
            .into_iter()
            .find_map(|version| Self::load_version(path, version).ok())
            .map_or_else(|| Self::load_version(path, 13), Ok)
    }

    /// Loads one version of a library, like an NCCL without later ones.
    ///
    /// # Errors
    /// The library does not load, or has no symbol of that version.
    pub fn load_version(path: impl AsRef<Path>, version: u32) -> Result<Arc<Self>, Error> {
        let path = path.as_ref();
        let library = open(path)?;
        fn table<T: Copy>(library: &Library, symbol: &'static str, path: &Path) -> Result<T, Error> {
            // SAFETY: by NCCL's contract, the symbol with this name is a table of the version, and `T` has its layout.
            let found = unsafe { library.get::<*const T>(symbol.as_bytes()) };
            let pointer = found.map(|symbol| symbol.into_raw().cast::<T>().cast_const()).ok();
            pointer.and_then(ffi::read).ok_or_else(|| Error::NoSymbol { path: path.to_path_buf(), symbol })
        }
        let table = match version {
            16 => Table::V16(table(&library, "ncclRmaPlugin_v16", path)?),
            15 => Table::V15(table(&library, "ncclRmaPlugin_v15", path)?),
            14 => Table::V14(table(&library, "ncclRmaPlugin_v14", path)?),
            _ => Table::V13(table(&library, "ncclRmaPlugin_v13", path)?),
        };
        Ok(Arc::new(Self { table, version, _library: library }))
    }

    /// Returns the version of the table.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Returns the table of v16, for calls that NCCL does not make.
    pub fn raw_table(&self) -> Option<RmaV16> {
        if let Table::V16(table) = self.table { Some(table) } else { None }
    }
}

/// NCCL calls `init` and `finalize` under a process-wide mutex.
static INIT: Mutex<()> = Mutex::new(());

/// What `init` returned, until `finalize`.
#[derive(Debug)]
struct Instance {
    plugin: Arc<RmaPlugin>,
    ctx: *mut c_void,
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _guard = INIT.lock();
        if let Err(error) = call!(self.plugin, finalize(self.ctx)) {
            eprintln!("mini-nccl: {error}");
        }
    }
}

/// What `connect` returned, until `closeColl`.
#[derive(Debug)]
struct Shared {
    comm: *mut c_void,
    bootstrap: Arc<Bootstrap>,
    instance: Instance,
}

// SAFETY: this crate never dereferences the handles, and NCCL's contract lets any thread pass them to the plugin.
unsafe impl Send for Shared {}
// SAFETY: this crate never dereferences the handles, and NCCL's contract lets several threads pass them to the plugin
// at once.
unsafe impl Sync for Shared {}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Err(error) = call!(self.instance.plugin, close_coll(self.comm)) {
            eprintln!("mini-nccl: rank {}: {error}", self.bootstrap.rank());
        }
    }
}

/// A communicator of all of a job's ranks.
#[derive(Debug, Clone)]
pub struct RmaComm {
    shared: Arc<Shared>,
    properties: NetPropertiesV12,
}

// SAFETY: the pointers in the properties are to constant strings of the plugin, which the communicator keeps loaded.
unsafe impl Send for RmaComm {}
// SAFETY: the pointers in the properties are to constant strings of the plugin, which several threads may read.
unsafe impl Sync for RmaComm {}

impl RmaComm {
    /// Collective: the communicator of NCCL's own puts and signals. Init, devices, listen, allgather, connect with the
    /// context of NCCL's NET plugin, getProperties, closeListen.
    ///
    /// # Errors
    /// A call fails, the plugin breaks the contract, or a rank is missing.
    pub fn init(plugin: &Arc<RmaPlugin>, bootstrap: Arc<Bootstrap>, device: c_int) -> Result<Self, Error> {
        Self::connect(plugin, bootstrap, device, |_| null_mut())
    }

    /// Collective: the communicator of NCCL's GIN proxy, with an `init` of its own, whose context `connect` gets.
    ///
    /// # Errors
    /// Those of [`init`](RmaComm::init).
    pub fn init_proxy(plugin: &Arc<RmaPlugin>, bootstrap: Arc<Bootstrap>, device: c_int) -> Result<Self, Error> {
        Self::connect(plugin, bootstrap, device, |ctx| ctx)
    }

    /// `context` returns `connect`'s first argument. NET's context is NULL with sockets.
    fn connect(
        plugin: &Arc<RmaPlugin>,
        bootstrap: Arc<Bootstrap>,
        device: c_int,
        context: impl FnOnce(*mut c_void) -> *mut c_void,
    ) -> Result<Self, Error> {
        let guard = INIT.lock();
        let mut ctx = null_mut();
        call!(plugin, init(&mut ctx, 0x0066_6572_726f_6769, ffi::LOGGER))?;
        let instance = Instance { plugin: plugin.clone(), ctx };
        let mut count = 0;
        let counted = call!(plugin, devices(&mut count));
        drop(guard);
        counted?;
        if !(0..count).contains(&device) {
            return Err(Error::Usage(format!("device {device} does not exist: the number of devices is {count}")));
        }
        let mut handle = [0u8; nccl::HANDLE_MAXSIZE];
        let mut listen = null_mut();
        call!(plugin, listen(ctx, device, handle.as_mut_ptr().cast(), &mut listen))?;
        let mut handles = bootstrap.allgather(&handle)?;
        let mut pointers: Vec<*mut c_void> = handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let (nranks, rank) = (bootstrap.nranks() as c_int, bootstrap.rank() as c_int);
        let mut comm = null_mut();
        let connected = call!(plugin, connect(context(ctx), pointers.as_mut_ptr(), nranks, rank, listen, &mut comm));
        let mut properties = MaybeUninit::<NetPropertiesV12>::zeroed();
        let asked = call!(plugin, get_properties(device, properties.as_mut_ptr()));
        let closed = call!(plugin, close_listen(listen));
        connected.and(asked).and(closed)?;
        // SAFETY: all bytes are initialised by `zeroed`, and the struct's integers, floats and pointers have no invalid
        // value.
        let properties = unsafe { properties.assume_init() };
        Ok(Self { shared: Arc::new(Shared { comm, bootstrap, instance }), properties })
    }

    fn plugin(&self) -> &RmaPlugin {
        &self.shared.instance.plugin
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.shared.bootstrap.rank()
    }

    /// Returns the number of ranks.
    pub fn nranks(&self) -> usize {
        self.shared.bootstrap.nranks()
    }

    /// `getProperties` of the device.
    pub fn properties(&self) -> &NetPropertiesV12 {
        &self.properties
    }

    /// Returns the communicator's handle, for calls that NCCL does not make.
    pub fn handle(&self) -> *mut c_void {
        self.shared.comm
    }

    /// `getRmaProperties`; before v16, NCCL assumes false.
    ///
    /// # Errors
    /// The call fails.
    pub fn flushes_all_puts_on_any_signal(&self) -> Result<bool, Error> {
        let Table::V16(table) = self.plugin().table else { return Ok(false) };
        let mut properties = RmaPropertiesV16::default();
        let function = table.get_rma_properties.ok_or(Error::NullEntry { entry: "get_rma_properties" })?;
        // SAFETY: `connect` returned the communicator, and the plugin writes to a local variable.
        check("getRmaProperties", unsafe { function(self.shared.comm, &mut properties) })?;
        Ok(properties.flushes_all_puts_on_any_signal != 0)
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// A rank is missing.
    pub fn barrier(&self) -> Result<(), Error> {
        Ok(self.shared.bootstrap.barrier()?)
    }

    /// Returns the exchange between the ranks.
    pub fn bootstrap(&self) -> &Arc<Bootstrap> {
        &self.shared.bootstrap
    }

    /// Collective: registers all of `memory` as NCCL does: GPU memory as a dma-buf if the plugin and the memory support
    /// it, host memory by address.
    ///
    /// # Errors
    /// The call fails, or returns a null handle.
    pub fn register(&self, memory: &Arc<DeviceMemory>, flags: u64) -> Result<RmaMemory, Error> {
        let (comm, data, size) = (self.shared.comm, memory.as_ptr(), memory.len());
        let (mut handle, mut unused) = (null_mut(), null_mut());
        let kind = memory.kind();
        let has_dma_buf = kind == nccl::PTR_CUDA && self.properties.ptr_support & nccl::PTR_DMABUF != 0;
        let dma_buf = memory.dma_buf().filter(|_| has_dma_buf);
        match dma_buf {
            Some((fd, offset)) => {
                let fd = fd.as_raw_fd();
                by_version!(
                    self.plugin(),
                    reg_mr_sym_dma_buf,
                    v13(comm, data, size, kind, offset, fd, flags, &mut handle, &mut unused),
                    v14(comm, data, size, kind, offset, fd, flags, &mut handle),
                    v15(comm, data, size, kind, offset, fd, flags, &mut handle)
                )?;
            }
            None => {
                by_version!(
                    self.plugin(),
                    reg_mr_sym,
                    v13(comm, data, size, kind, flags, &mut handle, &mut unused),
                    v14(comm, data, size, kind, flags, &mut handle),
                    v15(comm, data, size, kind, flags, &mut handle)
                )?;
            }
        }
        if handle.is_null() {
            return Err(Error::Contract { call: "regMrSym", violation: "mhandle is null".into() });
        }
        Ok(RmaMemory { shared: self.shared.clone(), memory: Some(memory.clone()), handle })
    }

    /// Collective: calls `createContext` for `contexts` contexts.
    ///
    /// # Errors
    /// The call fails, or returns a null handle.
    pub fn create_context(&self, contexts: c_int) -> Result<RmaContext, Error> {
        // NCCL's number for a setting that the program doesn't choose.
        let traffic_class = c_int::MIN;
        let mut config = RmaConfigV14 { n_contexts: contexts, traffic_class, rank_stride: 1 };
        let mut old = GinConfigV13 { n_contexts: contexts, traffic_class, ..Default::default() };
        let (comm, mut handle, mut unused) = (self.shared.comm, null_mut(), null_mut());
        by_version!(
            self.plugin(),
            create_context,
            v13(comm, &mut old, &mut handle, &mut unused),
            v14(comm, &mut config, &mut handle),
            v15(comm, &mut config, &mut handle)
        )?;
        if handle.is_null() {
            return Err(Error::Contract { call: "createContext", violation: "rmaCtx is null".into() });
        }
        Ok(RmaContext { shared: self.shared.clone(), handle })
    }
}

/// A registration, undone on drop.
#[derive(Debug)]
pub struct RmaMemory {
    shared: Arc<Shared>,
    memory: Option<Arc<DeviceMemory>>,
    handle: *mut c_void,
}

// SAFETY: this crate never dereferences the handle, and NCCL's contract lets any thread pass it to the plugin.
unsafe impl Send for RmaMemory {}
// SAFETY: this crate never dereferences the handle, and NCCL's contract lets several threads pass it to the plugin at
// once.
unsafe impl Sync for RmaMemory {}

impl RmaMemory {
    /// Returns the memory.
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        self.memory.as_ref().expect("memory until `deregister_freed`")
    }

    /// Frees the memory, if nobody else has it, and then deregisters it, as NCCL's GIN proxy does with its inline
    /// values.
    pub fn deregister_freed(mut self) {
        self.memory = None;
    }

    /// Returns the handle.
    pub fn handle(&self) -> *mut c_void {
        self.handle
    }

    /// Returns the byte at `offset`.
    pub fn at(&self, offset: usize) -> Place<'_> {
        Place { memory: Some(self), offset: offset as u64 }
    }
}

impl Drop for RmaMemory {
    fn drop(&mut self) {
        if let Err(error) = call!(self.shared.instance.plugin, dereg_mr_sym(self.shared.comm, self.handle)) {
            eprintln!("mini-nccl: rank {}: {error}", self.shared.bootstrap.rank());
        }
    }
}

/// A byte of registered memory, on this rank or a peer.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    memory: Option<&'a RmaMemory>,
    offset: u64,
}

impl Place<'_> {
    /// No memory, for operations without bytes.
    pub const NONE: Place<'static> = Place { memory: None, offset: 0 };

    fn handle(self) -> *mut c_void {
        self.memory.map_or(null_mut(), |memory| memory.handle)
    }
}

/// A put or a get: this rank's bytes, the peer's, and how many.
#[derive(Debug, Clone, Copy)]
pub struct Transfer<'a> {
    /// The context behind the handle.
    pub context: c_int,
    /// The peer.
    pub peer: usize,
    /// Where this rank's bytes are.
    pub here: Place<'a>,
    /// Where the peer's bytes are.
    pub there: Place<'a>,
    /// Number of bytes.
    pub size: usize,
    /// Whether another operation to this peer follows.
    pub aggregate: bool,
}

/// A signal: a word on the peer, and the amount to add to it.
#[derive(Debug, Clone, Copy)]
pub struct Signal<'a> {
    /// The word.
    pub word: Place<'a>,
    /// The amount.
    pub value: u64,
    /// Whether it's strong; before v14, all signals are.
    pub strong: bool,
}

/// A request that `test` has not yet reported as done.
#[derive(Debug)]
#[must_use]
pub struct Request(*mut c_void);

// SAFETY: this crate never dereferences the handle, and NCCL's contract lets any thread pass it to the plugin.
unsafe impl Send for Request {}

/// A context handle, destroyed on drop. One thread at a time drives it.
#[derive(Debug)]
pub struct RmaContext {
    shared: Arc<Shared>,
    handle: *mut c_void,
}

// SAFETY: this crate never dereferences the handle, and NCCL's contract lets any thread pass it to the plugin.
unsafe impl Send for RmaContext {}
// SAFETY: this crate never dereferences the handle, and the plugin must accept queryLastError from any thread at any
// time.
unsafe impl Sync for RmaContext {}

impl RmaContext {
    fn plugin(&self) -> &RmaPlugin {
        &self.shared.instance.plugin
    }

    /// Returns the handle, for calls that NCCL does not make.
    pub fn handle(&self) -> *mut c_void {
        self.handle
    }

    fn request(call: &'static str, request: *mut c_void) -> Result<Request, Error> {
        if request.is_null() {
            return Err(Error::Contract { call, violation: "the request is null".into() });
        }
        Ok(Request(request))
    }

    /// `iput`, or `iputSignal` with a signal.
    ///
    /// # Errors
    /// The call fails, or returns no request.
    pub fn put(&self, transfer: Transfer<'_>, signal: Option<Signal<'_>>) -> Result<Request, Error> {
        let Transfer { context, peer, here, there, size, aggregate } = transfer;
        let (ctx, peer, flags) = (self.handle, peer as u32, u32::from(aggregate));
        let (from, source, to, target) = (here.offset, here.handle(), there.offset, there.handle());
        let mut request = null_mut();
        let out = &raw mut request;
        match signal {
            None => by_version!(
                self.plugin(),
                iput,
                v13(ctx, context, from, source, size, to, target, peer, out),
                v14(ctx, context, from, source, size, to, target, peer, out),
                v15(ctx, context, from, source, size, to, target, peer, flags, out)
            )?,
            Some(Signal { word, value, strong }) => {
                let (offset, memory, op, strong) = (word.offset, word.handle(), SIGNAL_OP_ADD, u8::from(strong));
                by_version!(
                    self.plugin(),
                    iput_signal,
                    v13(ctx, context, from, source, size, to, target, peer, offset, memory, value, op, out),
                    v14(ctx, context, from, source, size, to, target, peer, offset, memory, value, op, strong, out),
                    v15(
                        ctx, context, from, source, size, to, target, peer, offset, memory, value, op, strong, flags,
                        out
                    )
                )?;
            }
        }
        Self::request("iput", request)
    }

    /// `iget`: reads the peer's bytes into this rank's memory.
    ///
    /// # Errors
    /// The call fails, or returns no request.
    pub fn get(&self, transfer: Transfer<'_>) -> Result<Request, Error> {
        let Transfer { context, peer, here, there, size, aggregate } = transfer;
        let (ctx, peer, flags) = (self.handle, peer as u32, u32::from(aggregate));
        let (from, source, to, target) = (there.offset, there.handle(), here.offset, here.handle());
        let mut request = null_mut();
        let out = &raw mut request;
        by_version!(
            self.plugin(),
            iget,
            v13(ctx, context, from, source, size, to, target, peer, out),
            v14(ctx, context, from, source, size, to, target, peer, out),
            v15(ctx, context, from, source, size, to, target, peer, flags, out)
        )?;
        Self::request("iget", request)
    }

    /// `iflush`. NCCL also takes NULL, as a flush that's done; aws-ofi-nccl's tests don't.
    ///
    /// # Errors
    /// The call fails, or returns no request.
    pub fn flush(&self, context: c_int, memory: &RmaMemory, peer: usize) -> Result<Request, Error> {
        let mut request = null_mut();
        call!(self.plugin(), iflush(self.handle, context, memory.handle, peer as u32, &mut request))?;
        Self::request("iflush", request)
    }

    /// `test`: true if the request is done, which also frees it.
    ///
    /// # Errors
    /// The call fails.
    pub fn test(&self, request: &Request) -> Result<bool, Error> {
        let mut done = 0;
        call!(self.plugin(), test(self.shared.comm, request.0, &mut done))?;
        Ok(done != 0)
    }

    /// Calls `test` until the request is done, as NCCL's flush for graphs does.
    ///
    /// # Errors
    /// The call fails.
    pub fn wait(&self, request: &Request) -> Result<(), Error> {
        while !self.test(request)? {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// `rmaProgress`.
    ///
    /// # Errors
    /// The call fails.
    pub fn progress(&self) -> Result<(), Error> {
        call!(self.plugin(), rma_progress(self.handle))
    }

    /// `queryLastError`.
    ///
    /// # Errors
    /// The call fails.
    pub fn has_error(&self) -> Result<bool, Error> {
        let mut has_error = 0;
        call!(self.plugin(), query_last_error(self.handle, &mut has_error))?;
        Ok(has_error != 0)
    }
}

impl Drop for RmaContext {
    fn drop(&mut self) {
        if let Err(error) = call!(self.plugin(), destroy_context(self.handle)) {
            eprintln!("mini-nccl: rank {}: {error}", self.shared.bootstrap.rank());
        }
    }
}
