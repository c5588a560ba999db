//! Communicators: the ranks of a job, connected.

use crate::error::Error;
use crate::introduction::{Introduction, Ready};
use crate::lsa::{Entrance, Team};
use ferrogin_rendezvous::ring::Step;
use ferrogin_rendezvous::{BootstrapError, Exchange, Identity};
use nccl_gin_ferrogin::comm::{CollComm, ListenComm};
use nccl_gin_ferrogin::config::Config;
use nccl_gin_ferrogin::log::counted;
use nccl_gin_ferrogin::plugin::Plugin;
use nccl_gin_ferrogin::{context, registry};
use parking_lot::Mutex;
use std::ffi::c_int;
use std::sync::{Arc, Weak};
use std::time::Duration;
use zerocopy::IntoBytes;

/// The largest number of ranks.
const RANKS_MAX: usize = 1 << 20;
/// The timeout to use if a setting is invalid.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);

/// Options for opening a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// The card, or group of cards below one PCI switch, that this rank uses. 0 means the one nearest to this thread's
    /// current GPU, or the first if there's no GPU; other numbers count from 1, in the order of PCI addresses.
    pub card: u32,
}

/// This rank's end of a communicator. It closes once it and its windows and contexts are dropped.
///
/// [`allocate`](Self::allocate), [`register`](Self::register), [`context`](Self::context) and
/// [`barrier`](Self::barrier) are collective: all ranks make the same calls in the same order. They wait for a rank
/// that is late, and fail if a rank has exited or is stopped for FERROGIN_TIMEOUT seconds (default 60).
#[derive(Clone)]
pub struct Comm {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub coll: Arc<CollComm>,
    /// The ranks of this node.
    pub team: Team,
    /// The open contexts, with their registry handles.
    contexts: Mutex<Vec<(usize, Weak<context::Context>)>>,
}

impl Comm {
    /// Opens as `rank` of `ranks`, through the caller's own exchange. `allgather` is called once, provided `rank` is
    /// one of `ranks`; it returns all ranks' blocks in rank order, or [`Error::Allgather`]. All blocks have the same
    /// size, below 1 KiB.
    ///
    /// # Errors
    /// The rank doesn't exist; a setting is invalid; there is no card; `allgather` or a rank failed; the ranks
    /// disagree.
    pub fn open(
        rank: usize,
        ranks: usize,
        options: &Options,
        allgather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, Error>,
    ) -> Result<Self, Error> {
        check_rank(rank, ranks)?;
        let listening = listen(options);
        let ready = match &listening {
            Ok((listener, entrance)) => {
                Ok(Ready { config: &listener.plugin.config, handle: listener.handle(), entrance })
            }
            // The other ranks get the error too, so they don't wait for this rank.
            Err(error) => Err(error.to_string()),
        };
        let own = Introduction::new(rank, ranks, ready);
        let blocks = allgather(own.as_bytes());
        let (listener, entrance) = listening?;
        let peers = own.compare(&blocks?)?;
        let handles: Vec<_> = peers.iter().map(|peer| peer.handle).collect();
        let coll = CollComm::connect(&listener, &handles, rank)?;
        let nodes: Vec<_> = peers.into_iter().map(|peer| peer.node).collect();
        let team = entrance.connect(rank, &nodes, coll.plugin.config.timeout)?;
        Ok(Self { inner: Arc::new(Inner { coll, team, contexts: Mutex::default() }) })
    }

    /// Opens as `rank` of `ranks`, which meet at `address`: rank 0's `host:port` or, within one host, any other text,
    /// which names an abstract Unix socket. Without FERROGIN_SECRET, any process that can connect to `host:port` can
    /// take a rank's place.
    ///
    /// # Errors
    /// Those of [`open`](Self::open); a rank doesn't connect within FERROGIN_TIMEOUT.
    pub fn join(address: &str, rank: usize, ranks: usize, options: &Options) -> Result<Self, Error> {
        // `open` reports an invalid setting, to the other ranks too.
        let timeout = Config::from_env().map_or(TIMEOUT_DEFAULT, |config| config.timeout);
        Identity::check_address(address).map_err(|problem| Error::Argument(format!("the address {problem}")))?;
        check_rank(rank, ranks)?;
        let secret = Identity::secret_from_env()?;
        let identity = Identity { rank, nranks: ranks, address: address.to_owned(), secret };
        let exchange = Exchange::open(&identity, timeout)?;
        Self::open(rank, ranks, options, |block| Ok(exchange.finish(block)?))
    }

    /// Opens the job that a launcher's environment variables describe: [`Identity`] lists them.
    ///
    /// # Errors
    /// Those of [`join`](Self::join); the variables are missing or contradictory.
    pub fn from_env(options: &Options) -> Result<Self, Error> {
        let Some(identity) = Identity::from_env()? else {
            return Err(BootstrapError::Environment(
                "no launcher started this process: run it with ferrogin run, mpirun or torchrun, or set FERROGIN_RANK, FERROGIN_NRANKS and, with \
                 several hosts, FERROGIN_BOOTSTRAP=host:port of rank 0"
                    .to_owned(),
            )
            .into());
        };
        let joined = Self::join(&identity.address, identity.rank, identity.nranks, options);
        joined.map_err(|error| match error {
            Error::Bootstrap(error) if identity.meets_by_session() => Error::Apart(error),
            error => error,
        })
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.inner.coll.rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.inner.coll.nranks
    }

    /// Returns the ranks of this rank's node, itself included, in ascending order: they load from and store to each
    /// other's windows ([`Window::lsa_address`](crate::Window::lsa_address)). A node is a host, or a part of it that
    /// FERROGIN_NODE names.
    pub fn lsa_ranks(&self) -> &[usize] {
        &self.inner.team.ranks
    }

    /// Collective: returns once all ranks have called it. It doesn't order kernels' operations: flush before it.
    ///
    /// # Errors
    /// A rank exited, made another collective call, or is stopped. Later collective calls fail too.
    pub fn barrier(&self) -> Result<(), Error> {
        self.inner.coll.agree(Step::Barrier, Ok(()), |()| Vec::new())?;
        Ok(())
    }
}

impl Inner {
    /// Returns the rank with this number in the LSA team.
    pub fn check_lsa_rank(&self, lsa_rank: usize) -> Result<usize, Error> {
        self.team.ranks.get(lsa_rank).copied().ok_or_else(|| {
            let ranks = counted(self.team.ranks.len(), "rank");
            Error::Argument(format!("LSA rank {lsa_rank} does not exist: this rank's node has {ranks}"))
        })
    }

    pub fn add_context(&self, handle: usize, context: &Arc<context::Context>) {
        let mut contexts = self.contexts.lock();
        contexts.retain(|(_, context)| context.strong_count() > 0);
        contexts.push((handle, Arc::downgrade(context)));
    }

    /// Returns how many requests are outstanding on all contexts. A failed context has none: its card has given up on
    /// them.
    pub fn outstanding(&self) -> Result<u64, Error> {
        let contexts = self.contexts.lock().clone();
        let working = contexts
            .iter()
            .filter(|(handle, _)| registry::fault(*handle as *const _, registry::Kind::Context) == Ok(false));
        let counts = working.filter_map(|(_, context)| context.upgrade()).map(|context| context.outstanding());
        counts.sum::<Result<u64, _>>().map_err(Error::from)
    }
}

impl Comm {
    /// Drains all contexts, before they are closed one after another.
    pub(crate) fn drain(&self) {
        let contexts = self.inner.contexts.lock().clone();
        let open: Vec<_> = contexts.iter().filter_map(|(_, context)| context.upgrade()).collect();
        context::drain(&open.iter().map(|context| &**context).collect::<Vec<_>>());
    }
}

fn check_rank(rank: usize, ranks: usize) -> Result<(), Error> {
    if rank < ranks && ranks <= RANKS_MAX {
        Ok(())
    } else {
        Err(Error::Argument(format!("rank {rank} is not one of {ranks} ranks (at least 1, at most {RANKS_MAX})")))
    }
}

/// Initialises the plugin and listens for the other ranks, and those of this node.
fn listen(options: &Options) -> Result<(ListenComm<Plugin>, Entrance), Error> {
    let plugin = Plugin::open()?;
    let entrance = Entrance::open(plugin.query.kind)?;
    let cards = plugin.devices.all.len();
    let device = match options.card as usize {
        0 => plugin.nearest,
        card if card <= cards => card - 1,
        card => {
            let text = format!(
                "card {card} does not exist: this machine has {cards} (cards below one PCI switch count as one); \
                 pass 0 for the nearest"
            );
            return Err(Error::Argument(text));
        }
    };
    Ok((ListenComm::open(plugin, device as c_int)?, entrance))
}
