//! What a device that drives queues itself needs to know about them: rings, targets and keys.

use crate::bindings::{self, fi_efa_cq_attr, fi_efa_wq_attr};
use crate::gda::function;
use crate::{CompletionQueue, Endpoint, Error, FiAddr, GdaOps, MemoryRegion};

/// The three numbers with which a work request names a peer's endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Target {
    /// Address handle number, local to the card.
    pub ah: u16,
    /// The peer's queue pair number.
    pub qpn: u16,
    /// The peer's queue key.
    pub qkey: u32,
}

/// A work queue's ring and doorbell.
#[derive(Clone, Copy, Debug)]
pub struct WqMemory {
    /// First entry.
    pub buffer: *mut u8,
    /// Bytes per entry.
    pub entry_size: u32,
    /// Entries.
    pub num_entries: u32,
    /// The register that takes the producer count.
    pub doorbell: *mut u32,
    /// Entries that may be written before the doorbell is rung; 0 if there's no limit.
    pub max_batch: u32,
    /// `FI_EFA_WQ_CAPS_*`; 0 from releases that don't report them.
    pub caps: u16,
}

/// A completion queue's ring.
#[derive(Clone, Copy, Debug)]
pub struct CqMemory {
    /// First entry.
    pub buffer: *mut u8,
    /// Bytes per entry.
    pub entry_size: u32,
    /// Entries.
    pub num_entries: u32,
}

impl GdaOps {
    /// Returns the numbers with which `endpoint`'s work requests name the peer.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn query_addr(&self, endpoint: &Endpoint, peer: FiAddr) -> Result<Target, Error> {
        let query = function!(self, query_addr)?;
        let mut target = Target::default();
        // SAFETY: the endpoint is open and the three results are live.
        let code = unsafe { query(endpoint.as_ptr(), peer.0, &mut target.ah, &mut target.qpn, &mut target.qkey) };
        self.lib().check("query_addr", code)?;
        Ok(target)
    }

    /// Returns the send queue and the receive queue of an enabled endpoint.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn query_qp(&self, endpoint: &Endpoint) -> Result<(WqMemory, WqMemory), Error> {
        let query = function!(self, query_qp_wqs)?;
        let (mut sq, mut rq) = (fi_efa_wq_attr::default(), fi_efa_wq_attr::default());
        // SAFETY: the endpoint is open and the two results are live. They have the newest size; older providers write
        // less.
        let code = unsafe { query(endpoint.as_ptr(), &mut sq, &mut rq) };
        self.lib().check("query_qp_wqs", code)?;
        let memory = |raw: &fi_efa_wq_attr| WqMemory {
            buffer: raw.buffer,
            entry_size: raw.entry_size,
            num_entries: raw.num_entries,
            doorbell: raw.doorbell,
            max_batch: raw.max_batch,
            caps: raw.caps,
        };
        Ok((memory(&sq), memory(&rq)))
    }

    /// Returns a completion queue's ring.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn query_cq(&self, cq: &CompletionQueue) -> Result<CqMemory, Error> {
        let query = function!(self, query_cq)?;
        let mut raw = fi_efa_cq_attr::default();
        // SAFETY: the queue is open and the result is live.
        let code = unsafe { query(cq.as_ptr(), &mut raw) };
        self.lib().check("query_cq", code)?;
        Ok(CqMemory { buffer: raw.buffer, entry_size: raw.entry_size, num_entries: raw.num_entries })
    }

    /// Returns the key with which local work requests name the region.
    ///
    /// # Errors
    /// [`Error::Call`] if the provider has no key for the region.
    pub fn lkey(&self, region: &MemoryRegion) -> Result<u32, Error> {
        let get = function!(self, get_mr_lkey)?;
        // SAFETY: the region is open.
        let key = unsafe { get(region.as_ptr()) };
        // FI_KEY_NOTAVAIL doesn't fit in 32 bits either.
        u32::try_from(key).map_err(|_| self.lib().failure("get_mr_lkey", bindings::FI_ENODATA))
    }
}
