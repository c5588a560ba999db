//! The result of the RMA plugin's `init`: settings, libfabric, and the cards in groups, which are NCCL's devices.

use super::cards;
use crate::config::{Config, Provider};
use crate::device::{self, Device};
use crate::error::Error;
use crate::plugin::{NetDevice, group};
use crate::trace;
use ferrogin_ffi::nccl::{NetPropertiesV12, PTR_DMABUF};
use ferrogin_ffi::rma::NET_DEVICE_GIN_PROXY;
use ferrogin_libfabric::Libfabric;
use ferrogin_rendezvous::ring::Listener;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// One `init`. NCCL makes two for a communicator, for its own calls and for the GIN proxy.
pub struct RmaPlugin {
    /// Settings at `init`.
    pub config: Config,
    /// The device whose memory NCCL registers.
    pub device: Arc<dyn Device>,
    devices: Vec<NetDevice>,
    ptr_support: c_int,
}

/// Initialised plugins, the latest last: NCCL passes no context to `devices` and `getProperties`.
static LIVE: Mutex<Vec<Weak<RmaPlugin>>> = Mutex::new(Vec::new());

impl RmaPlugin {
    /// Reads the settings and finds the cards. Keeps no card open.
    ///
    /// # Errors
    /// An invalid setting; no libfabric, no card, no GPU. Each message says what to do.
    pub fn open() -> Result<Arc<Self>, Error> {
        let config = Config::from_env()?;
        trace::start(config.trace.as_deref());
        let _span = trace::span("RMA init", 0);
        let lib = Libfabric::load(None).map_err(Error::fabric("ferrogin needs libfabric"))?;
        let device = device::open(config.device, config.provider)?;
        let devices = group(cards::find(&lib, config.provider, device.kind())?);
        Listener::open()?;
        // Only these register a dma-buf. NCCL registers by address otherwise.
        let takes_dma_buf = matches!(config.provider, Provider::Efa | Provider::SoftEfa | Provider::Verbs);
        let ptr_support = device.ptr_support() & if takes_dma_buf { !0 } else { !PTR_DMABUF };
        crate::info!(
            "ferrogin {} for NCCL's RMA: provider {}, memory of {}, libfabric {}, {} device(s)",
            env!("CARGO_PKG_VERSION"),
            config.provider.name(),
            device.kind().name(),
            lib.version(),
            devices.len(),
        );
        let plugin = Arc::new(Self { config, device, devices, ptr_support });
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|plugin| plugin.strong_count() > 0);
        live.push(Arc::downgrade(&plugin));
        Ok(plugin)
    }

    /// The latest plugin that is not finalized.
    ///
    /// # Errors
    /// There is none: NCCL did not call `init`, or `init` failed.
    pub fn latest() -> Result<Arc<Self>, Error> {
        let live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let found = live.iter().rev().find_map(Weak::upgrade);
        found.ok_or_else(|| Error::Usage("NCCL called this before init, or after the last finalize".to_owned()))
    }

    /// Number of NCCL devices.
    pub fn count(&self) -> c_int {
        self.devices.len() as c_int
    }

    /// NCCL device number `index`.
    ///
    /// # Errors
    /// There is no such device.
    pub fn device(&self, index: c_int) -> Result<&NetDevice, Error> {
        let found = usize::try_from(index).ok().and_then(|index| self.devices.get(index));
        found.ok_or_else(|| {
            Error::Argument(format!("device {index} does not exist: this plugin has {} device(s)", self.devices.len()))
        })
    }

    /// `getProperties`.
    ///
    /// # Errors
    /// There is no such device.
    pub fn properties(&self, index: c_int) -> Result<NetPropertiesV12, Error> {
        Ok(self.device(index)?.properties(index, self.ptr_support, NET_DEVICE_GIN_PROXY))
    }
}
