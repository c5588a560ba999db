//! What the RMA plugin's `init` creates: settings, libfabric, and the cards, grouped into NCCL's devices.

use super::cards;
use crate::config::{Config, Provider};
use crate::device::{self, Device};
use crate::error::Error;
use crate::log;
use crate::metrics::Metrics;
use crate::plugin::{Devices, Live, group};
use crate::trace;
use ferrogin_ffi::nccl::PTR_DMABUF;
use ferrogin_ffi::rma::NET_DEVICE_GIN_PROXY;
use ferrogin_libfabric::Libfabric;
use ferrogin_rendezvous::ring::Listener;
use std::sync::Arc;

/// One `init`. NCCL calls it twice per communicator: for its own calls and for the GIN proxy.
pub struct RmaPlugin {
    /// Settings at `init`.
    pub config: Config,
    /// The device whose memory NCCL registers.
    pub device: Arc<dyn Device>,
    /// NCCL's devices.
    pub devices: Devices,
    /// The FERROGIN_METRICS file.
    pub metrics: Option<Arc<Metrics>>,
}

static LIVE: Live<RmaPlugin> = Live::new();

impl RmaPlugin {
    /// Reads the settings and finds the cards. Keeps no card open.
    ///
    /// # Errors
    /// A setting is invalid; there is no libfabric, card or GPU. Each message says what to do.
    pub fn open() -> Result<Arc<Self>, Error> {
        let config = Config::from_env()?;
        trace::start(config.trace.as_deref());
        let _span = trace::span("RMA init", 0);
        let lib = Libfabric::load(None).map_err(Error::fabric("ferrogin needs libfabric"))?;
        let device = device::open(config.device, config.provider)?;
        let all = group(cards::find(&lib, config.provider, device.kind())?);
        Listener::open()?;
        if let Some(reason) = device.cannot_flush_writes() {
            return Err(Error::Usage(format!(
                "{reason}, so a signal could arrive before its bytes: update the driver, or run with NCCL_RMA_PLUGIN=none"
            )));
        }
        // Only these can register a dma-buf. With the others, NCCL registers by address.
        let takes_dma_buf = matches!(config.provider, Provider::Efa | Provider::SoftEfa | Provider::Verbs);
        let ptr_support = device.ptr_support() & if takes_dma_buf { !0 } else { !PTR_DMABUF };
        let devices = Devices { all, ptr_support, net_device_type: NET_DEVICE_GIN_PROXY };
        let metrics = Metrics::open(&config, device.kind())?;
        crate::info!(
            "ferrogin {} for NCCL's RMA: provider {}, memory of {}, libfabric {}, {}",
            env!("CARGO_PKG_VERSION"),
            config.provider.name(),
            device.kind().name(),
            lib.version(),
            log::counted(devices.all.len(), "device"),
        );
        Ok(LIVE.add(Self { config, device, devices, metrics }))
    }

    /// Returns the latest plugin that hasn't been finalized.
    ///
    /// # Errors
    /// There is none: NCCL did not call `init`, or `init` failed.
    pub fn latest() -> Result<Arc<Self>, Error> {
        LIVE.latest()
    }
}
