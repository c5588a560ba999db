//! The communicator: its open handles, and its contexts by the place that requests name.

use super::context::{Context, RetiredContexts};
use super::memory::Registered;
use super::ranks::{Ranks, RmaListen};
use super::requests::{PLACES, Request};
use crate::comm::Handles;
use crate::error::Error;
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use ferrogin_ffi::rma::RmaConfigV14;
use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock, Weak};

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
    /// Open contexts by their place in request handles.
    by_place: RwLock<Vec<Weak<Context>>>,
}

impl RmaComm {
    /// Joins the other ranks; see [`Ranks::connect`].
    ///
    /// # Errors
    /// Those of [`Ranks::connect`].
    pub fn connect(listen: &RmaListen, handles: &[[u8; HANDLE_MAXSIZE]], rank: usize) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            ranks: Arc::new(Ranks::connect(listen, handles, rank)?),
            memories: Handles::default(),
            registered: Arc::default(),
            contexts: Handles::default(),
            retired: Arc::default(),
            by_place: RwLock::default(),
        }))
    }

    /// Collective: creates a context, and gives it a place in request handles.
    ///
    /// # Errors
    /// Those of [`Context::create`]; too many contexts are open.
    pub fn create_context(&self, config: &RmaConfigV14) -> Result<Arc<Context>, Error> {
        let make = Context::create(&self.ranks, &self.registered, &self.retired, config)?;
        let mut places = self.by_place.write().unwrap_or_else(PoisonError::into_inner);
        let free = places.iter().position(|context| context.strong_count() == 0);
        let place = free.unwrap_or(places.len());
        if place >= PLACES {
            return Err(Error::Usage(format!("{PLACES} contexts of this communicator are open: destroy some of them")));
        }
        let context = Arc::new(make(place));
        if place == places.len() {
            places.push(Weak::new());
        }
        places[place] = Arc::downgrade(&context);
        Ok(context)
    }

    /// `test`: true if the request is done, which ends it.
    ///
    /// # Errors
    /// There is no such request; an operation of its context has failed.
    pub fn test(&self, handle: *mut c_void) -> Result<bool, Error> {
        let unknown = || {
            Error::Argument(match handle.is_null() {
                true => "the request is NULL".to_owned(),
                false => format!("{handle:p} is no open request of this communicator"),
            })
        };
        let (place, request) = Request::parse(handle).ok_or_else(unknown)?;
        let places = self.by_place.read().unwrap_or_else(PoisonError::into_inner);
        let context = places.get(place).and_then(Weak::upgrade).ok_or_else(unknown)?;
        drop(places);
        context.test(request)?.ok_or_else(unknown)
    }
}
