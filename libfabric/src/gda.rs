//! The EFA provider's operations for queues that a device drives itself ("efa gda ops").
//!
//! Layouts are those of `fi_ext_efa.h` (libfabric 2.6); a test compares them with `tests/vectors/efa_layout.json`. The
//! table has no size field, so the libfabric release determines its entries: five since 2.3, `cntr_open_ext` since 2.6.
//! A provider that isn't part of a libfabric release, such as `softefa`, declares its entries through its feature
//! query.

use std::ffi::CStr;
use std::sync::Arc;

use crate::bindings::{self, fi_efa_feature_ops, fi_efa_ops_gda};
use crate::{Domain, Error, Version};

/// The feature with which a provider declares that its table has `cntr_open_ext`, whatever the libfabric release.
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

pub(crate) type CntrOpenExt = unsafe extern "C" fn(
    *mut bindings::fid_domain,
    *mut bindings::fi_cntr_attr,
    *mut *mut bindings::fid_cntr,
    *mut std::ffi::c_void,
    *mut bindings::fi_efa_comp_cntr_init_attr,
) -> std::ffi::c_int;

/// A domain's operations.
#[derive(Clone)]
pub struct GdaOps {
    table: *const fi_efa_ops_gda,
    has_cntr_open_ext: bool,
    domain: Arc<Domain>,
}

// SAFETY: the table is the provider's constant data, alive as long as the domain. The provider serialises access to the
// domain's objects (FI_THREAD_SAFE).
unsafe impl Send for GdaOps {}
// SAFETY: the table is constant, and the provider serialises access from several threads.
unsafe impl Sync for GdaOps {}

/// `function!(self, name)`: an entry that every release with this table has.
macro_rules! function {
    ($self:ident, $name:ident) => {{
        // SAFETY: the table is alive as long as the domain, and has the five entries of its first release.
        let function = unsafe { (*$self.table()).$name };
        function.ok_or_else(|| $self.lib().failure(stringify!($name), bindings::FI_ENOSYS))
    }};
}

pub(crate) use function;

impl GdaOps {
    fn open(domain: &Arc<Domain>) -> Result<Self, Error> {
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

    pub(crate) fn table(&self) -> *const fi_efa_ops_gda {
        self.table
    }

    pub(crate) fn lib(&self) -> &crate::Libfabric {
        self.domain.library()
    }

    /// Returns the operations' domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Returns true if counters can be placed in the caller's memory ([`crate::Counter::open_ext`]).
    pub fn has_cntr_open_ext(&self) -> bool {
        self.has_cntr_open_ext
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
}

impl Domain {
    /// Returns the EFA operations for queues that a device drives itself.
    ///
    /// # Errors
    /// [`Error::TooOld`] or [`Error::Call`] if the provider lacks them.
    pub fn gda(self: &Arc<Self>) -> Result<GdaOps, Error> {
        GdaOps::open(self)
    }
}

/// Calls the provider's feature query, an operation of its fabric (libfabric's `efa`) or of its domain.
fn has_feature(domain: &Domain, feature: &CStr) -> bool {
    let Some(table) = domain.fabric().open_ops(FEATURE_OPS).or_else(|| domain.open_ops(FEATURE_OPS)) else {
        return false;
    };
    let table: *const fi_efa_feature_ops = table.cast();
    // SAFETY: a provider's table of this name is constant data, and has had this entry since its first release.
    let Some(query) = (unsafe { (*table).query }) else {
        return false;
    };
    // SAFETY: `feature` is a NUL-terminated name.
    unsafe { query(feature.as_ptr()) }
}
