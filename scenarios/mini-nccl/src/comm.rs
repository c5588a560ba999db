//! A communicator, which calls the plugin in NCCL's order.
#![allow(unsafe_code)]

use crate::connection::{Connection, Instance, ListenComm};
use crate::context::GinContext;
use crate::error::Error;
use crate::ffi;
use crate::memory::DeviceMemory;
use crate::plugin::{Plugin, check};
use crate::window::Window;
use ferrogin_ffi::nccl::{self, GinConfigV14, GinPropertiesV14, NetPropertiesV12};
use ferrogin_rendezvous::Bootstrap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;

/// A communicator of all of a job's ranks over one device of a plugin.
#[derive(Debug)]
pub struct Comm {
    connection: Arc<Connection>,
    bootstrap: Arc<Bootstrap>,
    properties: NetPropertiesV12,
    gin_properties: GinPropertiesV14,
}

// SAFETY: the pointers in the properties are to constant strings of the plugin, which the connection keeps loaded.
unsafe impl Send for Comm {}
// SAFETY: the pointers in the properties are to constant strings of the plugin, which several threads may read.
unsafe impl Sync for Comm {}

impl Comm {
    /// Collective: init, devices, getProperties, getGinProperties, listen, allgather, connect, closeListen.
    ///
    /// # Errors
    /// A call fails, the plugin breaks the contract, or a rank is missing.
    pub fn init(plugin: &Arc<Plugin>, bootstrap: Arc<Bootstrap>, device: c_int) -> Result<Comm, Error> {
        let hash = 0x0066_6572_726f_6769 ^ bootstrap.nranks() as u64;
        Comm::connect(Arc::new(Instance::init(plugin, hash)?), bootstrap, device)
    }

    /// Collective among the ranks of `bootstrap`: makes another communicator with the same `init`, like a split that
    /// shares resources, or a second connection between the same ranks. The last communicator finalizes.
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
        // NCCL uses a plugin only if its type is the same on all ranks.
        let first = get_properties(plugin, 0)?;
        let gin_properties = get_gin_properties(plugin)?;
        let types = bootstrap.allgather(&first.net_device_type.to_le_bytes())?;
        if let Some(other) = types.iter().position(|block| *block != first.net_device_type.to_le_bytes()) {
            return Err(Error::Usage(format!(
                "rank {other} has another GIN type than rank {rank}: load the same plugin on all ranks"
            )));
        }
        let n = plugin.devices()?;
        if !(0..n).contains(&device) {
            return Err(Error::Usage(format!("device {device} does not exist: the number of devices is {n}")));
        }

        let mut handle = [0u8; nccl::HANDLE_MAXSIZE];
        let mut listen = std::ptr::null_mut();
        // SAFETY: `init` returned `ctx`. The plugin writes 128 bytes to `handle` and a pointer to `listen`, both local
        // variables.
        let code =
            unsafe { (plugin.table.listen)(instance.ctx, device, handle.as_mut_ptr().cast::<c_void>(), &mut listen) };
        check("listen", code)?;
        let listen = ListenComm { plugin, comm: listen };
        let properties = get_properties(plugin, device)?;
        let mut handles = bootstrap.allgather(&handle)?;
        if let Some(other) = handles.iter().position(|handle| handle.len() != nccl::HANDLE_MAXSIZE) {
            return Err(Error::Usage(format!(
                "rank {other} sent a handle of {} bytes, not {}: run the same program on all ranks",
                handles[other].len(),
                nccl::HANDLE_MAXSIZE
            )));
        }
        let mut pointers: Vec<*mut c_void> = handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let mut coll = std::ptr::null_mut();
        // SAFETY: the first and fifth arguments came from `init` and `listen`. `pointers` has `nranks` pointers to
        // 128-byte handles, which live until the call returns, and `coll` is a local variable.
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
            return Err(Error::Contract { call: "connect", violation: "collComm is null".into() });
        }
        let plugin = Arc::clone(plugin);
        let instance = Some(instance);
        let connection = Arc::new(Connection { plugin, coll, instance, rank, nranks, closed: false });
        closed?;
        Ok(Comm { connection, bootstrap, properties, gin_properties })
    }

    /// Makes NCCL's calls before any connection: init, devices, getProperties, finalize. Returns the device names.
    ///
    /// # Errors
    /// A call fails; NCCL would then not use the plugin.
    pub fn probe(plugin: &Arc<Plugin>) -> Result<Vec<String>, Error> {
        let mut instance = Instance::init(plugin, 1)?;
        let devices = plugin.devices()?;
        let names: Result<Vec<String>, Error> = (0..devices)
            .map(|device| Ok(ffi::text_of(get_properties(plugin, device)?.name).unwrap_or_default()))
            .collect();
        instance.finalize()?;
        names
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.connection.rank
    }

    /// Returns the number of ranks.
    pub fn nranks(&self) -> usize {
        self.connection.nranks
    }

    /// Returns the plugin.
    pub fn plugin(&self) -> &Arc<Plugin> {
        &self.connection.plugin
    }

    /// Returns the exchange between the ranks.
    pub fn bootstrap(&self) -> &Arc<Bootstrap> {
        &self.bootstrap
    }

    /// `getProperties` of the device.
    pub fn properties(&self) -> &NetPropertiesV12 {
        &self.properties
    }

    /// Returns the name of the device.
    pub fn device_name(&self) -> String {
        ffi::text_of(self.properties.name).unwrap_or_default()
    }

    /// `getGinProperties`. For a v13 plugin, NCCL assumes that it has all properties.
    pub fn gin_properties(&self) -> GinPropertiesV14 {
        self.gin_properties
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// A rank is missing.
    pub fn barrier(&self) -> Result<(), Error> {
        Ok(self.bootstrap.barrier()?)
    }

    /// Collective: registers all of `memory` as a window (`regMrSym`).
    ///
    /// # Errors
    /// The call fails, or returns a null handle.
    pub fn register(&self, memory: &Arc<DeviceMemory>, flags: u64) -> Result<Window, Error> {
        Window::register(Arc::clone(&self.connection), memory, flags)
    }

    /// Collective: registers all of `memory` through its file descriptor (`regMrSymDmaBuf`).
    ///
    /// # Errors
    /// The call fails, or returns a null handle, or the plugin has no such function.
    pub fn register_dma_buf(&self, memory: &Arc<DeviceMemory>, flags: u64) -> Result<Window, Error> {
        Window::register_dma_buf(Arc::clone(&self.connection), memory, flags)
    }

    /// Collective: `createContext`.
    ///
    /// # Errors
    /// The call fails, or breaks the contract.
    pub fn create_context(&self, config: &GinConfigV14) -> Result<GinContext, Error> {
        GinContext::create(Arc::clone(&self.connection), config)
    }

    /// `closeColl`, and `finalize` after the last communicator. Dropping does the same and prints errors.
    ///
    /// # Errors
    /// A call fails, or a window or context is still open.
    pub fn close(self) -> Result<(), Error> {
        let open = Arc::strong_count(&self.connection) - 1;
        match Arc::into_inner(self.connection) {
            Some(mut connection) => connection.close(),
            None => Err(Error::Usage(format!(
                "{open} windows or contexts of the communicator are still open: close them first"
            ))),
        }
    }
}

fn get_properties(plugin: &Plugin, device: c_int) -> Result<NetPropertiesV12, Error> {
    let mut properties = MaybeUninit::<NetPropertiesV12>::zeroed();
    // SAFETY: the plugin writes one struct into a local variable.
    check("getProperties", unsafe { (plugin.table.get_properties)(device, properties.as_mut_ptr()) })?;
    // SAFETY: all bytes are initialised by `zeroed`, and the struct's integers, floats and pointers have no invalid
    // value.
    let properties = unsafe { properties.assume_init() };
    if properties.name.is_null() {
        return Err(Error::Contract { call: "getProperties", violation: "name is null".into() });
    }
    if properties.net_device_type != nccl::NET_DEVICE_GIN_EFA_GDA {
        let violation = format!(
            "the device has type {}, but the device code needs {}",
            properties.net_device_type,
            nccl::NET_DEVICE_GIN_EFA_GDA
        );
        return Err(Error::Contract { call: "getProperties", violation });
    }
    Ok(properties)
}

fn get_gin_properties(plugin: &Plugin) -> Result<GinPropertiesV14, Error> {
    let mut properties = GinPropertiesV14 { supports_strong_signals: 1, supports_va_signals: 1 };
    if let Some(entry) = plugin.table.get_gin_properties {
        // SAFETY: the plugin writes one struct into a local variable.
        check("getGinProperties", unsafe { entry(&mut properties) })?;
    }
    Ok(properties)
}
