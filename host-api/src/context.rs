//! Contexts: the queues that kernels post on.
#![allow(unsafe_code)]

use crate::comm::{Comm, Inner};
use crate::error::Error;
use ferrogin_device as device;
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_rendezvous::ring::Step;
use nccl_gin_ferrogin::config::Config;
pub use nccl_gin_ferrogin::config::PeerFailure;
use nccl_gin_ferrogin::context::{self, Shape};
use nccl_gin_ferrogin::device::DeviceKind;
use nccl_gin_ferrogin::error::Error as PluginError;
use nccl_gin_ferrogin::isolation::Isolation;
use nccl_gin_ferrogin::registry::{self, Kind};
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

/// The queue struct layout of NCCL 2.32, so that its device code can use the handles too.
const BACKEND_VERSION: i32 = 2;

/// Options of [`Comm::context`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ContextOptions {
    /// How many contexts, each with its own signals, counters and queues; 0 means 1.
    pub contexts: u32,
    /// Signals per context.
    pub signals: u32,
    /// Counters per context.
    pub counters: u32,
    /// Requests in flight per queue; 0 means 1024.
    pub depth: u32,
    /// InfiniBand traffic class, whose upper six bits are the DSCP; 0 means the default class.
    pub traffic_class: u32,
    /// How long a wait by a kernel or CPU thread may take before it fails with
    /// [`Status::Timeout`](device::Status::Timeout). Zero means no limit, `None` FERROGIN_WAIT_TIMEOUT (default 60 s).
    pub timeout: Option<Duration>,
    /// What a lost rank ends; `None` means FERROGIN_ON_PEER_FAILURE (default [`Abort`](PeerFailure::Abort)). The same
    /// on all ranks.
    pub on_peer_failure: Option<PeerFailure>,
}

impl ContextOptions {
    fn shape(&self, config: &Config) -> Result<Shape, PluginError> {
        let number = |name: &str, value: u32| {
            i32::try_from(value).map_err(|_| PluginError::Argument(format!("{name} = {value} is above {}", i32::MAX)))
        };
        if self.traffic_class > 255 {
            let text = format!("traffic_class = {} is not between 0 and 255", self.traffic_class);
            return Err(PluginError::Argument(text));
        }
        let timeout = self.timeout.unwrap_or(config.wait_timeout);
        let shape = Shape::new(&GinConfigV14 {
            n_signals: number("signals", self.signals)?,
            n_counters: number("counters", self.counters)?,
            n_contexts: number("contexts", self.contexts)?,
            queue_depth: number("depth", self.depth)?,
            traffic_class: if self.traffic_class == 0 { -1 } else { self.traffic_class as i32 },
            backend_version: BACKEND_VERSION,
            rank_stride: 1,
        })?;
        let isolates = self.on_peer_failure.unwrap_or(config.on_peer_failure) == PeerFailure::Isolate;
        Ok(Shape { wait_ns: u64::try_from(timeout.as_nanos()).unwrap_or(0), isolates, ..shape })
    }
}

/// This rank's contexts, destroyed on drop, once what their kernels have posted is delivered. By then, no kernel may
/// use them any more.
pub struct Context {
    context: Arc<context::Context>,
    /// The number in the registry, through which the watcher reports failures.
    handle: *mut c_void,
    /// The communicator outlives its contexts.
    _comm: Arc<Inner>,
}

// SAFETY: the only field that isn't `Send` is a registry number, not a memory address.
unsafe impl Send for Context {}
// SAFETY: the only field that isn't `Sync` is a registry number, not a memory address.
unsafe impl Sync for Context {}

impl Comm {
    /// Collective: creates contexts.
    ///
    /// # Errors
    /// An option is too large; a card has too few counters or queues; another rank failed.
    pub fn context(&self, options: &ContextOptions) -> Result<Context, Error> {
        let inner = &self.inner;
        let shape = options.shape(&inner.coll.plugin.config).map_err(|error| self.fail(Step::CreateContext, error))?;
        let context = Arc::new(context::Context::create(&inner.coll, &shape)?);
        let handle = registry::insert(Kind::Context, context.clone())
            .ok_or_else(|| Error::Usage("too many contexts are open in this process: close some of them".to_owned()))?;
        let made = Context { context, handle, _comm: inner.clone() };
        made.context.watch(handle, true)?;
        inner.add_context(handle as usize, &made.context);
        Ok(made)
    }
}

impl Context {
    /// Returns the handle that kernels pass to `fgin_open` and `Gin`: the device address of the array of contexts.
    pub fn handle(&self) -> *mut c_void {
        // SAFETY: the context owns the struct behind the pointer, and nothing changes it after `create`.
        unsafe { (*self.context.device_handle()).handle }
    }

    /// Opens context number `id` for CPU threads.
    ///
    /// # Errors
    /// There is no such context, or kernels run on a GPU.
    pub fn device(&self, id: u32) -> Result<device::Context<'_>, Error> {
        let kind = self._comm.coll.device.kind();
        if kind != DeviceKind::Cpu {
            let text =
                format!("kernels run on {}: pass the handle to a kernel, or set FERROGIN_DEVICE=cpu", kind.name());
            return Err(Error::Usage(text));
        }
        // SAFETY: kernels run on the CPU, so the handle is an address in this process. The result borrows `self`, which
        // keeps the handle valid.
        let context = unsafe { device::Context::from_handle(self.handle(), id) };
        context.map_err(|status| Error::Argument(format!("context {id} does not exist ({status:?})")))
    }

    /// Returns the ranks that these contexts go on without, in order; none unless they isolate peers. Once a wait has
    /// returned [`Status::PeerLost`](device::Status::PeerLost), the ranks that it's about are among them.
    pub fn lost_ranks(&self) -> Vec<usize> {
        self.context.isolation().map(Isolation::lost_ranks).unwrap_or_default()
    }

    /// Acknowledges the loss of these ranks. Once the program has acknowledged all losses, waits no longer report them,
    /// and end when what they wait for does. Posts to lost ranks stay refused.
    ///
    /// # Errors
    /// A rank isn't lost; the contexts don't isolate peers. Nothing is acknowledged then.
    pub fn acknowledge_lost(&self, ranks: &[usize]) -> Result<(), Error> {
        let Some(isolation) = self.context.isolation() else {
            return Err(Error::Usage(
                "this context does not isolate peers: create it with FERROGIN_ISOLATE, or set FERROGIN_ON_PEER_FAILURE=isolate".to_owned(),
            ));
        };
        Ok(isolation.acknowledge(ranks)?)
    }

    /// Checks that no request on these contexts has failed. A failure is printed on standard error once, and ends every
    /// wait.
    ///
    /// # Errors
    /// A request failed.
    pub fn check(&self) -> Result<(), Error> {
        if registry::fault(self.handle, Kind::Context)? {
            return Err(Error::Usage(
                "a request of this context failed (standard error says which): destroy the context and create it again"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        context::drain(&[&*self.context]);
        if let Ok(context) = registry::remove::<context::Context>(self.handle, Kind::Context) {
            context.close(self.handle);
        }
    }
}
