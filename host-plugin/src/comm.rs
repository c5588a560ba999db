//! Communicators: the listening one, which lives for one `connect`, and the collective one, which owns the rails.

use crate::control::{Listener, Ring, Step};
use crate::device::{self, Device};
use crate::error::Error;
use crate::plugin::Plugin;
use crate::rail::Rail;
use crate::trace;
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// From `listen` to `closeListen`.
pub struct ListenComm {
    listener: Listener,
    device: c_int,
}

impl ListenComm {
    /// Listens for NCCL device `device`.
    ///
    /// # Errors
    /// No such device; no socket.
    pub fn open(plugin: Arc<Plugin>, device: c_int) -> Result<Self, Error> {
        plugin.device(device)?;
        let _span = trace::span("listen", 0);
        let config = &plugin.config;
        Ok(Self { listener: Listener::open(&plugin.lib, config.control(), config.timeout)?, device })
    }

    /// The bytes for the other ranks.
    pub fn handle(&self) -> [u8; HANDLE_MAXSIZE] {
        self.listener.handle()
    }
}

/// From `connect` to `closeColl`.
pub struct CollComm {
    /// Windows that were not deregistered.
    pub windows: Handles,
    /// Contexts that were not destroyed.
    pub contexts: Handles,
    /// One for each card of the device.
    pub rails: Vec<Arc<Rail>>,
    /// Where kernels run.
    pub device: Arc<dyn Device>,
    /// This rank.
    pub rank: usize,
    /// Ranks.
    pub nranks: usize,
    /// What `init` found.
    pub plugin: Arc<Plugin>,
    ring: Mutex<Ring>,
}

/// What ranks tell each other at connect, to find out early that they do not fit.
const GREETING: u16 = 1;

impl CollComm {
    /// Opens the rails and joins the other ranks.
    ///
    /// # Errors
    /// A card that does not open; a rank that does not come, or has another number of rails.
    pub fn connect(
        plugin: Arc<Plugin>,
        listen: &ListenComm,
        handles: &[[u8; HANDLE_MAXSIZE]],
        rank: usize,
    ) -> Result<Arc<Self>, Error> {
        let _span = trace::span("connect", rank);
        let nranks = handles.len();
        let cards = &plugin.device(listen.device)?.cards;
        let opened = (|| {
            let device = device::open(plugin.config.device, plugin.config.provider)?;
            let rails = cards.iter().zip(0..).map(|(card, index)| Rail::open(index, card, nranks));
            Ok::<_, Error>((device, rails.collect::<Result<Vec<_>, _>>()?))
        })();
        if opened.is_err() {
            // Who waits for this rank learns at once.
            listen.listener.close();
        }
        let (device, rails) = opened?;
        let mut ring = Ring::connect(&listen.listener, handles, rank, plugin.config.timeout)?;
        let greeting = [GREETING.to_le_bytes(), (rails.len() as u16).to_le_bytes()].concat();
        let greetings = match ring.allgather(Step::Connect, Some(&greeting)) {
            Ok(greetings) => greetings,
            Err(error) => {
                listen.listener.park(ring);
                return Err(error.into());
            }
        };
        if let Some(other) = greetings.iter().position(|other| *other != greeting) {
            return Err(Error::Usage(format!(
                "rank {other} has another version of ferrogin or another number of rails for its device than rank \
                 {rank} ({}); run the same ferrogin on the same kind of machine everywhere",
                rails.len()
            )));
        }
        crate::info!(
            "rank {rank} of {nranks}: connected on {} rail(s) {}, kernels on {}",
            rails.len(),
            rails.iter().map(|rail| rail.name()).collect::<Vec<_>>().join("+"),
            device.kind().name(),
        );
        let (windows, contexts) = (Handles::default(), Handles::default());
        Ok(Arc::new(Self { windows, contexts, rails, device, rank, nranks, plugin, ring: Mutex::new(ring) }))
    }

    /// Every rank brings its part of `step`, or the error that kept it from one; each gets all parts, by rank.
    /// `encode` makes the bytes of a part.
    ///
    /// # Errors
    /// The own one, or that of the set-up; see [`Ring::allgather`].
    pub fn agree<T>(
        &self,
        step: Step,
        part: Result<T, Error>,
        encode: impl FnOnce(&T) -> Vec<u8>,
    ) -> Result<(T, Vec<Vec<u8>>), Error> {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        match part {
            Ok(part) => {
                let all = ring.allgather(step, Some(&encode(&part)))?;
                Ok((part, all))
            }
            Err(error) => {
                // The others learn that this rank failed; what it failed of is the error to report here.
                let _ = ring.allgather(step, None);
                Err(error)
            }
        }
    }
}

/// Handles that a communicator has given out and must sweep; none any more once it is closed.
#[derive(Debug)]
pub struct Handles(Mutex<Option<BTreeSet<usize>>>);

impl Default for Handles {
    fn default() -> Self {
        Self(Mutex::new(Some(BTreeSet::new())))
    }
}

impl Handles {
    fn open(&self) -> MutexGuard<'_, Option<BTreeSet<usize>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers one; false when the communicator was closed meanwhile, and nobody will sweep.
    #[must_use]
    pub fn add(&self, handle: *mut c_void) -> bool {
        self.open().as_mut().is_some_and(|all| all.insert(handle as usize))
    }

    /// Forgets one; false if it is not here.
    pub fn take(&self, handle: *mut c_void) -> bool {
        self.open().as_mut().is_some_and(|all| all.remove(&(handle as usize)))
    }

    /// Forgets all, latest first, and takes no more.
    pub fn close(&self) -> Vec<*mut c_void> {
        let all = self.open().take().unwrap_or_default();
        all.into_iter().rev().map(|handle| handle as *mut c_void).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_communicator_takes_no_handles() {
        let handles = Handles::default();
        let at = |n: usize| n as *mut c_void;
        assert!(handles.add(at(8)) && handles.add(at(16)) && handles.add(at(24)));
        assert!(handles.take(at(16)) && !handles.take(at(16)));
        assert_eq!(handles.close(), [at(24), at(8)]);
        assert!(!handles.add(at(32)) && !handles.take(at(8)) && handles.close().is_empty());
    }
}
