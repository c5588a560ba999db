//! The communicator with its open handles.

use super::context::RetiredContexts;
use super::memory::Registered;
use super::plugin::RmaPlugin;
use super::ranks::Ranks;
use crate::comm::{Handles, ListenComm};
use crate::error::Error;
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::sync::Arc;

/// The communicator, from `connect` to `closeColl`.
pub struct RmaComm {
    /// The ranks, which registrations and contexts use too.
    pub ranks: Arc<Ranks>,
    /// Registrations that are open.
    pub memories: Handles,
    /// The same registrations by number, for the signals of peers.
    pub registered: Arc<Registered>,
    /// Context handles that are open.
    pub contexts: Handles,
    /// Contexts that are destroyed here, until all ranks have destroyed theirs.
    pub retired: Arc<RetiredContexts>,
}

impl RmaComm {
    /// Joins the other ranks; see [`Ranks::connect`].
    ///
    /// # Errors
    /// Those of [`Ranks::connect`].
    pub fn connect(
        listen: &ListenComm<RmaPlugin>,
        handles: &[[u8; HANDLE_MAXSIZE]],
        rank: usize,
    ) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            ranks: Arc::new(Ranks::connect(listen, handles, rank)?),
            memories: Handles::default(),
            registered: Arc::default(),
            contexts: Handles::default(),
            retired: Arc::default(),
        }))
    }
}
