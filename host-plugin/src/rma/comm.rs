//! Communicators: the listen communicator, which serves one `connect`, and the communicator, which owns the rails.

use super::context::{Context, Retired};
use super::memory::Memory;
use super::plugin::RmaPlugin;
use super::rail::Rail;
use crate::comm::{self, Handles};
use crate::device::Device;
use crate::error::Error;
use crate::trace;
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use ferrogin_rendezvous::ring::{Listener, Ring, Step};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use zerocopy::little_endian::U16;
use zerocopy::{Immutable, IntoBytes};

/// The listen communicator, from `listen` to `closeListen`. It keeps all that `connect` needs, as NCCL passes `connect` the context of
/// another plugin.
pub struct RmaListen {
    plugin: Arc<RmaPlugin>,
    listener: Listener,
    device: c_int,
}

impl RmaListen {
    /// Listens for NCCL device `device`.
    ///
    /// # Errors
    /// There is no such device, or the control plane's endpoint does not open.
    pub fn open(plugin: Arc<RmaPlugin>, device: c_int) -> Result<Self, Error> {
        plugin.device(device)?;
        Ok(Self { plugin, listener: Listener::open()?, device })
    }

    /// The handle for the other ranks.
    pub fn handle(&self) -> [u8; HANDLE_MAXSIZE] {
        self.listener.handle()
    }
}

/// The ring, and the number of collective calls that registered memory or made a context.
struct Calls {
    ring: Ring,
    next: u32,
}

/// The communicator, from `connect` to `closeColl`.
pub struct RmaComm {
    /// A number that no other communicator of this process has.
    pub number: u64,
    /// Registrations that are open.
    pub memories: Handles,
    /// Context handles that are open.
    pub contexts: Handles,
    /// Registrations by number, for the signals of peers.
    pub registered: RwLock<BTreeMap<u32, Arc<Memory>>>,
    /// Open contexts by their place in request handles.
    pub by_place: RwLock<Vec<Weak<Context>>>,
    /// Endpoints of destroyed contexts, which take the late traffic of peers until all ranks have destroyed theirs.
    pub retired: Mutex<Vec<Retired>>,
    /// One for each card of the device.
    pub rails: Vec<Rail>,
    /// The device whose memory NCCL registers.
    pub device: Arc<dyn Device>,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub nranks: usize,
    calls: Mutex<Calls>,
    _plugin: Arc<RmaPlugin>,
}

/// The block of `connect`'s allgather. Ranks with different greetings cannot work together.
#[derive(Debug, Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
struct Greeting {
    /// Tells the ring of this plugin from that of the GIN plugin.
    plugin: [u8; 4],
    version: U16,
    rails: U16,
    provider: [u8; 8],
}
ferrogin_ffi::assert_layout!(Greeting, size 16, align 1, { plugin @ 0, version @ 4, rails @ 6, provider @ 8 });

/// Version of the blocks and records that ranks exchange.
const VERSION: u16 = 1;

impl RmaComm {
    /// Opens the rails and joins the other ranks.
    ///
    /// # Errors
    /// A card does not open; a rank does not connect, or has another version, provider or number of rails.
    pub fn connect(listen: &RmaListen, handles: &[[u8; HANDLE_MAXSIZE]], rank: usize) -> Result<Arc<Self>, Error> {
        let _span = trace::span("RMA connect", rank);
        let (plugin, nranks) = (&listen.plugin, handles.len());
        let cards = &plugin.device(listen.device)?.cards;
        let rails = cards.iter().map(|card| Rail::open(card, nranks)).collect::<Result<Vec<_>, _>>();
        if rails.is_err() {
            // Ranks that wait for this rank are refused at once.
            listen.listener.close();
        }
        let rails = rails?;
        let mut ring = Ring::connect(&listen.listener, handles, rank, plugin.config.timeout)?;
        let mut provider = [0; 8];
        let name = plugin.config.provider.name().as_bytes();
        provider[..name.len()].copy_from_slice(name);
        let greeting =
            Greeting { plugin: *b"RMA\0", version: VERSION.into(), rails: (rails.len() as u16).into(), provider };
        let greetings = match comm::exchange(&mut ring, Step::Connect, Some(greeting.as_bytes())) {
            Ok(greetings) => greetings,
            Err(error) => {
                listen.listener.keep_failed(ring);
                return Err(error.into());
            }
        };
        if let Some(other) = greetings.iter().position(|other| *other != greeting.as_bytes()) {
            return Err(Error::Usage(format!(
                "rank {other} has another version of ferrogin than rank {rank}, another FERROGIN_PROVIDER, or not {} rail(s) for its device \
                 as rank {rank} has; run the same ferrogin with the same settings on the same kind of machine on all ranks",
                rails.len()
            )));
        }
        let names: Vec<_> = rails.iter().map(Rail::name).collect();
        crate::info!("rank {rank} of {nranks}: RMA connected on {} rail(s) {}", rails.len(), names.join("+"));
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Ok(Arc::new(Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            memories: Handles::default(),
            contexts: Handles::default(),
            registered: RwLock::default(),
            by_place: RwLock::default(),
            retired: Mutex::default(),
            rails,
            device: plugin.device.clone(),
            rank,
            nranks,
            calls: Mutex::new(Calls { ring, next: 0 }),
            _plugin: plugin.clone(),
        }))
    }

    /// [`comm::agree`] in a call whose number is the same on all ranks; returns the number too.
    ///
    /// # Errors
    /// The error in `part`, or one of [`Ring::allgather`].
    pub fn agree_in_order<T>(
        &self,
        step: Step,
        part: Result<T, Error>,
        encode: impl FnOnce(u32, &T) -> Vec<u8>,
    ) -> Result<(T, Vec<Vec<u8>>, u32), Error> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let number = calls.next;
        calls.next = number.wrapping_add(1);
        let (part, blocks) = comm::agree(&mut calls.ring, step, part, |part| encode(number, part))?;
        Ok((part, blocks, number))
    }
}
