//! A communicator with one connection, in the order of calls that NCCL makes.
#![allow(unsafe_code)]

use crate::bootstrap::Bootstrap;
use crate::context::GinContext;
use crate::error::Error;
use crate::ffi;
use crate::memory::DeviceMemory;
use crate::plugin::{Plugin, check};
use crate::window::Window;
use ferrogin_ffi::nccl::{self, GinConfigV14, GinPropertiesV14, NetPropertiesV12};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

/// What `init` began and `finalize` ends.
#[derive(Debug)]
struct Instance {
    plugin: Arc<Plugin>,
    ctx: *mut c_void,
    finalized: bool,
}

// SAFETY: the handle is the plugin's; NCCL too calls it from any thread.
unsafe impl Send for Instance {}
// SAFETY: as above; the contract demands that concurrent calls are safe.
unsafe impl Sync for Instance {}

impl Instance {
    /// NCCL calls `init` under a process-wide mutex, and `finalize` too.
    fn guard() -> std::sync::MutexGuard<'static, ()> {
        static INIT: Mutex<()> = Mutex::new(());
        INIT.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn init(plugin: &Arc<Plugin>, hash: u64) -> Result<Instance, Error> {
        let _guard = Instance::guard();
        let mut ctx = std::ptr::null_mut();
        // SAFETY: `ctx` is a valid place for the duration of the call; the logger lives for ever.
        check("init", unsafe { (plugin.table.init)(&mut ctx, hash, ffi::LOGGER) })?;
        let instance = Instance { plugin: Arc::clone(plugin), ctx, finalized: false };
        plugin.devices_once()?;
        Ok(instance)
    }

    /// Once; later calls do nothing.
    fn finalize(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.finalized, true) {
            return Ok(());
        }
        let _guard = Instance::guard();
        // SAFETY: `ctx` is what `init` gave, and nothing made of it lives.
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
    /// None once closed.
    instance: Option<Arc<Instance>>,
    pub rank: usize,
    pub nranks: usize,
    closed: bool,
}

// SAFETY: the handles are the plugin's; NCCL too calls it from any thread.
unsafe impl Send for Connection {}
// SAFETY: as above; the contract demands that concurrent calls are safe.
unsafe impl Sync for Connection {}

impl Connection {
    fn close(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        // SAFETY: `coll` is what `connect` gave; its windows are gone, since each keeps this alive.
        let coll = check("closeColl", unsafe { (self.plugin.table.close_coll)(self.coll) });
        // The last reference finalizes.
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

/// A communicator of all ranks of a job over one device of a plugin.
#[derive(Debug)]
pub struct Comm {
    connection: Arc<Connection>,
    bootstrap: Arc<Bootstrap>,
    properties: NetPropertiesV12,
    gin_properties: GinPropertiesV14,
}

// SAFETY: the properties hold pointers to constant strings of the plugin, which the connection keeps loaded.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    /// Collective: init, devices, getProperties, getGinProperties, listen, allgather, connect, closeListen.
    ///
    /// # Errors
    /// When a call fails, when the plugin breaks the contract, or when a rank is missing.
    pub fn init(plugin: &Arc<Plugin>, bootstrap: Arc<Bootstrap>, device: c_int) -> Result<Comm, Error> {
        let hash = 0x0066_6572_726f_6769 ^ bootstrap.nranks() as u64;
        Comm::connect(Arc::new(Instance::init(plugin, hash)?), bootstrap, device)
    }

    /// Collective among the ranks of `bootstrap`: a communicator on the same `init`, as a split that shares resources is,
    /// or a further connection of the same ranks. The last of them finalizes.
    ///
    /// # Errors
    /// As for [`init`](Comm::init).
    pub fn share(&self, bootstrap: Arc<Bootstrap>, device: c_int) -> Result<Comm, Error> {
        let instance =
            self.connection.instance.clone().ok_or_else(|| Error::Usage("the communicator is closed".into()))?;
        Comm::connect(instance, bootstrap, device)
    }

    fn connect(instance: Arc<Instance>, bootstrap: Arc<Bootstrap>, device: c_int) -> Result<Comm, Error> {
        let plugin = &Arc::clone(&instance.plugin);
        let (rank, nranks) = (bootstrap.rank(), bootstrap.nranks());
        // The contract's gate: every rank has the same type, or none uses it.
        let first = get_properties(plugin, 0)?;
        let gin_properties = get_gin_properties(plugin)?;
        let types = bootstrap.allgather(&first.net_device_type.to_le_bytes())?;
        if let Some(other) = types.iter().position(|block| *block != first.net_device_type.to_le_bytes()) {
            return Err(Error::Usage(format!("rank {other} has another GIN type than rank {rank}: load one plugin")));
        }
        let n = plugin.devices()?;
        if !(0..n).contains(&device) {
            return Err(Error::Usage(format!("device {device}: the plugin has {n}")));
        }

        let mut handle = [0u8; nccl::HANDLE_MAXSIZE];
        let mut listen = std::ptr::null_mut();
        // SAFETY: `handle` has the contract's 128 bytes, `listen` is a valid place, `ctx` is from `init`.
        let code =
            unsafe { (plugin.table.listen)(instance.ctx, device, handle.as_mut_ptr().cast::<c_void>(), &mut listen) };
        check("listen", code)?;
        let listen = Listen { plugin, comm: listen };
        let properties = get_properties(plugin, device)?;
        let mut handles = bootstrap.allgather(&handle)?;
        if let Some(other) = handles.iter().position(|handle| handle.len() != nccl::HANDLE_MAXSIZE) {
            return Err(Error::Usage(format!("rank {other} sent a handle of {} bytes", handles[other].len())));
        }
        let mut pointers: Vec<*mut c_void> = handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let mut coll = std::ptr::null_mut();
        // SAFETY: `pointers` has `nranks` handles of 128 bytes, which live until the call returns.
        let code = unsafe {
            (plugin.table.connect)(
                instance.ctx,
                pointers.as_mut_ptr(),
                nranks as c_int,
                rank as c_int,
                listen.comm,
                &mut coll,
            )
        };
        let connected = check("connect", code);
        let closed = listen.close();
        connected?;
        if coll.is_null() {
            return Err(Error::Contract { call: "connect", what: "collComm is null".into() });
        }
        let plugin = Arc::clone(plugin);
        let instance = Some(instance);
        let connection = Arc::new(Connection { plugin, coll, instance, rank, nranks, closed: false });
        closed?;
        Ok(Comm { connection, bootstrap, properties, gin_properties })
    }

    /// What NCCL does with a plugin before any connection: init, devices, getProperties, finalize. Gives the names of
    /// the devices.
    ///
    /// # Errors
    /// When a call fails: then NCCL would not use the plugin.
    pub fn probe(plugin: &Arc<Plugin>) -> Result<Vec<String>, Error> {
        let mut instance = Instance::init(plugin, 1)?;
        let devices = plugin.devices()?;
        let names: Result<Vec<String>, Error> = (0..devices)
            .map(|device| Ok(ffi::text_of(get_properties(plugin, device)?.name).unwrap_or_default()))
            .collect();
        instance.finalize()?;
        names
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.connection.rank
    }

    /// Ranks of the communicator.
    pub fn nranks(&self) -> usize {
        self.connection.nranks
    }

    /// The plugin.
    pub fn plugin(&self) -> &Arc<Plugin> {
        &self.connection.plugin
    }

    /// The exchange between the ranks.
    pub fn bootstrap(&self) -> &Bootstrap {
        &self.bootstrap
    }

    /// The same, to be shared with another communicator of these ranks.
    pub fn bootstrap_handle(&self) -> Arc<Bootstrap> {
        Arc::clone(&self.bootstrap)
    }

    /// `getProperties` of the device.
    pub fn properties(&self) -> &NetPropertiesV12 {
        &self.properties
    }

    /// Name of the device.
    pub fn device_name(&self) -> String {
        ffi::text_of(self.properties.name).unwrap_or_default()
    }

    /// `getGinProperties`; all set for a v13 plugin, of which NCCL assumes so.
    pub fn gin_properties(&self) -> GinPropertiesV14 {
        self.gin_properties
    }

    /// Returns when every rank has come here.
    ///
    /// # Errors
    /// When a rank is missing.
    pub fn barrier(&self) -> Result<(), Error> {
        Ok(self.bootstrap.barrier()?)
    }

    /// Collective: registers all of `memory` as a window (`regMrSym`).
    ///
    /// # Errors
    /// When the call fails, or gives a null handle.
    pub fn register(&self, memory: &Arc<DeviceMemory>, flags: u64) -> Result<Window, Error> {
        Window::register(Arc::clone(&self.connection), memory, flags)
    }

    /// Collective: registers all of `memory` by its descriptor (`regMrSymDmaBuf`).
    ///
    /// # Errors
    /// As for [`register`](Comm::register); or when the plugin has no such entry.
    pub fn register_dma_buf(&self, memory: &Arc<DeviceMemory>, flags: u64) -> Result<Window, Error> {
        Window::register_dma_buf(Arc::clone(&self.connection), memory, flags)
    }

    /// Collective: `createContext`.
    ///
    /// # Errors
    /// When the call fails, or what it gives is not what NCCL relies on.
    pub fn create_context(&self, config: &GinConfigV14) -> Result<GinContext, Error> {
        GinContext::create(Arc::clone(&self.connection), config)
    }

    /// `closeColl` and, at the last, `finalize`. Dropping does the same and prints what fails.
    ///
    /// # Errors
    /// When a call fails, or a window or context is still open.
    pub fn close(self) -> Result<(), Error> {
        let open = Arc::strong_count(&self.connection) - 1;
        match Arc::into_inner(self.connection) {
            Some(mut connection) => connection.close(),
            None => Err(Error::Usage(format!("{open} windows or contexts of the communicator are open"))),
        }
    }
}

/// A listening communicator, closed on every path.
struct Listen<'a> {
    plugin: &'a Plugin,
    comm: *mut c_void,
}

impl Listen<'_> {
    fn close(self) -> Result<(), Error> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `comm` is what `listen` gave, closed once.
        check("closeListen", unsafe { (this.plugin.table.close_listen)(this.comm) })
    }
}

impl Drop for Listen<'_> {
    fn drop(&mut self) {
        // SAFETY: as in `close`, which forgets the value.
        unsafe { (self.plugin.table.close_listen)(self.comm) };
    }
}

fn get_properties(plugin: &Plugin, device: c_int) -> Result<NetPropertiesV12, Error> {
    let mut properties = MaybeUninit::<NetPropertiesV12>::zeroed();
    // SAFETY: a valid place for the struct.
    check("getProperties", unsafe { (plugin.table.get_properties)(device, properties.as_mut_ptr()) })?;
    // SAFETY: zeroed, then written: every bit pattern of its integers, floats and pointers is valid.
    let properties = unsafe { properties.assume_init() };
    if properties.name.is_null() {
        return Err(Error::Contract { call: "getProperties", what: "name is null".into() });
    }
    if properties.net_device_type != nccl::NET_DEVICE_GIN_EFA_GDA {
        let what = format!("type {}, the device code is for {}", properties.net_device_type, 5);
        return Err(Error::Contract { call: "getProperties", what });
    }
    Ok(properties)
}

fn get_gin_properties(plugin: &Plugin) -> Result<GinPropertiesV14, Error> {
    let mut properties = GinPropertiesV14 { supports_strong_signals: 1, supports_va_signals: 1 };
    if let Some(entry) = plugin.table.get_gin_properties {
        // SAFETY: a valid place for the struct.
        check("getGinProperties", unsafe { entry(&mut properties) })?;
    }
    Ok(properties)
}
