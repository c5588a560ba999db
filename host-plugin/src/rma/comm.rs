//! The communicator with its open handles, and the test of a request.

use super::context::{Context, RetiredContexts};
use super::memory::Registered;
use super::plugin::RmaPlugin;
use super::ranks::Ranks;
use super::requests::Request;
use crate::comm::{Handles, ListenComm};
use crate::error::Error;
use crate::registry::{self, Kind};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use ferrogin_ffi::rma::RmaConfigV14;
use std::ffi::c_void;
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

    /// Collective: creates a context.
    ///
    /// # Errors
    /// Those of [`Context::create`].
    pub fn create_context(&self, handle: *mut c_void, config: &RmaConfigV14) -> Result<Arc<Context>, Error> {
        Context::create(&self.ranks, (&self.registered, &self.retired), handle, config).map(Arc::new)
    }
}

/// `test`: true if a request of the communicator with the handle `comm` is done, which ends it.
///
/// # Errors
/// There is no such communicator or request; an operation of its context has failed.
pub fn test(comm: *mut c_void, request: *mut c_void) -> Result<bool, Error> {
    let parsed = Request::parse(request).and_then(|(place, request)| {
        let context = registry::get_at::<Context>(place, Kind::RmaContext)?;
        (context.comm == comm as usize).then_some((context, request))
    });
    if let Some((context, request)) = parsed
        && let Some(is_done) = context.test(request)?
    {
        return Ok(is_done);
    }
    registry::get::<RmaComm>(comm, Kind::RmaComm)?;
    Err(Error::Argument(match request.is_null() {
        true => "the request is NULL".to_owned(),
        false => format!("{request:p} is not an open request of this communicator"),
    }))
}
