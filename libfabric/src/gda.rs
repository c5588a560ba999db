//! The EFA provider's operations for queues that a device drives itself ("efa gda ops").
//!
//! Layouts are those of `fi_ext_efa.h` (libfabric 2.6); a test compares them with `tests/vectors/efa_layout.json`. The table has no
//! size field. The libfabric release tells its entries: five since 2.3, `cntr_open_ext` since 2.6. A provider that is not part of a
//! libfabric release, such as `softefa`, names its entries through its feature query.

use std::ffi::CStr;
use std::sync::Arc;

use crate::bindings::{self, fi_efa_cq_attr, fi_efa_feature_ops, fi_efa_ops_gda, fi_efa_wq_attr};
use crate::{CompletionQueue, Domain, Endpoint, Error, FiAddr, MemoryRegion, Version};

/// The feature by which a provider states that its table has `cntr_open_ext`, whatever the libfabric release.
pub const FEATURE_CNTR_OPEN_EXT: &CStr = c"softefa_gda_cntr_open_ext";

const GDA_OPS: &CStr = name(bindings::FI_EFA_GDA_OPS);
const FEATURE_OPS: &CStr = name(bindings::FI_EFA_FEATURE_OPS);

const fn name(bytes: &'static [u8]) -> &'static CStr {
    match CStr::from_bytes_with_nul(bytes) {
        Ok(name) => name,
        Err(_) => panic!("the header's names are NUL-terminated"),
    }
}

/// The first release whose table has `cntr_open_ext`.
const CNTR_SINCE: Version = Version::new(2, 6);
/// The first release that has the table.
const GDA_SINCE: Version = Version::new(2, 3);

pub(crate) type CqOpenExt = unsafe extern "C" fn(
    *mut bindings::fid_domain,
    *mut bindings::fi_cq_attr,
    *mut bindings::fi_efa_cq_init_attr,
    *mut *mut bindings::fid_cq,
    *mut std::ffi::c_void,
) -> std::ffi::c_int;

pub(crate) type CntrOpenExt = unsafe extern "C" fn(
    *mut bindings::fid_domain,
    *mut bindings::fi_cntr_attr,
    *mut *mut bindings::fid_cntr,
    *mut std::ffi::c_void,
    *mut bindings::fi_efa_comp_cntr_init_attr,
) -> std::ffi::c_int;

/// The three numbers by which a work request names a peer's endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Target {
    /// Address handle number, local to the card.
    pub ah: u16,
    /// The peer's queue pair number.
    pub qpn: u16,
    /// The peer's queue key.
    pub qkey: u32,
}

/// The ring and doorbell of one work queue.
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
    /// Entries that may be written and not yet rung; 0 when there is no bound.
    pub max_batch: u32,
    /// `FI_EFA_WQ_CAPS_*`; 0 from releases that do not report them.
    pub caps: u16,
}

/// The ring of one completion queue.
#[derive(Clone, Copy, Debug)]
pub struct CqMemory {
    /// First entry.
    pub buffer: *mut u8,
    /// Bytes per entry.
    pub entry_size: u32,
    /// Entries.
    pub num_entries: u32,
}

/// The operations of one domain.
#[derive(Clone)]
pub struct GdaOps {
    table: *const fi_efa_ops_gda,
    has_cntr_open_ext: bool,
    domain: Arc<Domain>,
}

// SAFETY: the table is constant data of the provider, alive as long as the domain. The provider serialises access to the domain's
// objects (FI_THREAD_SAFE).
unsafe impl Send for GdaOps {}
// SAFETY: the table is constant, and the provider serialises access from several threads.
unsafe impl Sync for GdaOps {}

/// `function!(self, name)`: an entry that every release with this table has.
macro_rules! function {
    ($self:ident, $name:ident) => {{
        // SAFETY: the table is alive as long as the domain, and has the five entries of its first release.
        let function = unsafe { (*$self.table).$name };
        function.ok_or_else(|| $self.lib().failure(stringify!($name), bindings::FI_ENOSYS))
    }};
}

impl GdaOps {
    pub(crate) fn open(domain: &Arc<Domain>) -> Result<Self, Error> {
        let lib = domain.library();
        let Some(table) = domain.open_ops(GDA_OPS) else {
            if lib.version() < GDA_SINCE {
                return Err(Error::TooOld {
                    feature: "the EFA operations for device-driven queues",
                    needed: GDA_SINCE,
                    found: lib.version(),
                });
            }
            return Err(lib.failure("fi_open_ops(\"efa gda ops\")", bindings::FI_EOPNOTSUPP));
        };
        let has_cntr_open_ext = lib.version() >= CNTR_SINCE || has_feature(domain, FEATURE_CNTR_OPEN_EXT);
        Ok(Self { table: table.cast(), has_cntr_open_ext, domain: Arc::clone(domain) })
    }

    fn lib(&self) -> &crate::Libfabric {
        self.domain.library()
    }

    /// The domain of the operations.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// True when counters can be placed in the caller's memory ([`crate::Counter::open_ext`]).
    pub fn has_cntr_open_ext(&self) -> bool {
        self.has_cntr_open_ext
    }

    pub(crate) fn cq_open_ext(&self) -> Result<CqOpenExt, Error> {
        function!(self, cq_open_ext)
    }

    pub(crate) fn cntr_open_ext(&self) -> Result<CntrOpenExt, Error> {
        if !self.has_cntr_open_ext {
            return Err(Error::TooOld {
                feature: "a completion counter in caller memory (cntr_open_ext)",
                needed: CNTR_SINCE,
                found: self.lib().version(),
            });
        }
        function!(self, cntr_open_ext)
    }

    /// The numbers by which work requests of `endpoint` name the peer.
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

    /// The send queue and the receive queue of an enabled endpoint.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn query_qp(&self, endpoint: &Endpoint) -> Result<(WqMemory, WqMemory), Error> {
        let query = function!(self, query_qp_wqs)?;
        let (mut sq, mut rq) = (fi_efa_wq_attr::default(), fi_efa_wq_attr::default());
        // SAFETY: the endpoint is open and the two results are live. They have the newest size; older providers write less.
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

    /// The ring of a completion queue.
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

    /// The key by which local work requests name the region.
    ///
    /// # Errors
    /// [`Error::Call`] when the provider has no key for the region.
    pub fn lkey(&self, region: &MemoryRegion) -> Result<u32, Error> {
        let get = function!(self, get_mr_lkey)?;
        // SAFETY: the region is open.
        let key = unsafe { get(region.as_ptr()) };
        // FI_KEY_NOTAVAIL does not fit into 32 bits either.
        u32::try_from(key).map_err(|_| self.lib().failure("get_mr_lkey", bindings::FI_ENODATA))
    }
}

/// Calls the provider's feature query, which is an operation of its fabric (libfabric's `efa`) or of its domain.
fn has_feature(domain: &Domain, feature: &CStr) -> bool {
    let Some(table) = domain.fabric().open_ops(FEATURE_OPS).or_else(|| domain.open_ops(FEATURE_OPS)) else {
        return false;
    };
    let table: *const fi_efa_feature_ops = table.cast();
    // SAFETY: a provider's table of this name is constant data and has had this entry from the first release on.
    let Some(query) = (unsafe { (*table).query }) else {
        return false;
    };
    // SAFETY: `feature` is a NUL-terminated name.
    unsafe { query(feature.as_ptr()) }
}
