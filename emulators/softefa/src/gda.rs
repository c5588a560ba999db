//! The operation tables of `fi_open_ops`: those for queues that a device drives (`fi_efa(7)`, "efa gda ops"), the query for their
//! entries, and those for manual progress and statistics.
//!
//! The GDA table has no size field. Programs derive its entries from libfabric's version, which means nothing for this provider, so
//! ferrogin's plugin queries the feature `softefa_gda_cntr_open_ext`.

use std::ffi::{CStr, c_char, c_int, c_void};

use ferrogin_libfabric::bindings as fi;
use ferrogin_libfabric::progress::{self, ProgressOps};
use ferrogin_libfabric::statistics::{self, Statistics, StatisticsOps};

use super::cq::Cq;
use super::domain::Domain;
use super::ep::Ep;
use super::guard::{Code, entry, entry_or};
use super::library::text;
use super::mr::Mr;
use super::object::{Object, object};
use super::{cntr, cq};

static GDA: fi::fi_efa_ops_gda = fi::fi_efa_ops_gda {
    query_addr: Some(query_addr),
    query_qp_wqs: Some(query_qp_wqs),
    query_cq: Some(query_cq),
    cq_open_ext: Some(cq::open_ext),
    get_mr_lkey: Some(get_mr_lkey),
    cntr_open_ext: Some(cntr::open_ext),
};

static FEATURES: fi::fi_efa_feature_ops = fi::fi_efa_feature_ops { query: Some(query_feature) };

static PROGRESS: ProgressOps = ProgressOps { progress: Some(make_progress) };

static STATISTICS: StatisticsOps = StatisticsOps { read: Some(read_statistics) };

const GDA_OPS: &CStr = c"efa gda ops";
const FEATURE_OPS: &CStr = c"efa feature ops";

/// `fi_open_ops` of a fabric or a domain.
pub(super) unsafe extern "C" fn ops_open<T: Object>(
    fid: *mut fi::fid,
    name: *const c_char,
    _flags: u64,
    ops: *mut *mut c_void,
    _context: *mut c_void,
) -> c_int {
    entry("fi_open_ops", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        unsafe { object::<T, _>(fid) }?;
        // SAFETY: the application passes null or a terminated string, which lives during the call.
        let name = unsafe { text(name) }.ok_or(Code::INVAL)?;
        let of_domain = T::CLASS == fi::FI_CLASS_DOMAIN;
        let found: *const c_void = if name == FEATURE_OPS {
            (&raw const FEATURES).cast()
        } else if of_domain && name == GDA_OPS {
            (&raw const GDA).cast()
        } else if of_domain && name == progress::OPS {
            (&raw const PROGRESS).cast()
        } else if of_domain && name == statistics::OPS {
            (&raw const STATISTICS).cast()
        } else {
            return Err(Code::INVAL);
        };
        if ops.is_null() {
            return Err(Code::INVAL);
        }
        // SAFETY: not null, and the application keeps its variable writable during the call.
        unsafe { ops.write(found.cast_mut()) };
        Ok(0)
    })
}

unsafe extern "C" fn query_feature(feature: *const c_char) -> bool {
    // SAFETY: the application passes null or a terminated string, which lives during the call.
    entry_or("query", false, || unsafe { text(feature) } == Some(c"softefa_gda_cntr_open_ext"))
}

unsafe extern "C" fn make_progress(domain: *mut c_void) -> bool {
    entry_or("progress", false, || {
        // SAFETY: the application passes a domain that it keeps open during the call.
        unsafe { object::<Domain, _>(domain) }.is_ok_and(|domain| domain.card.progress())
    })
}

unsafe extern "C" fn read_statistics(domain: *mut c_void, out: *mut Statistics, size: usize) -> c_int {
    entry("statistics", || {
        // SAFETY: the application passes a domain that it keeps open during the call.
        let domain: &Domain = unsafe { object(domain) }?;
        if out.is_null() {
            return Err(Code::INVAL);
        }
        let statistics = domain.card.lock().statistics;
        let size = size.min(size_of::<Statistics>());
        // SAFETY: not null, and the application keeps `size` bytes writable during the call. `size` is at most that of the source.
        unsafe { std::ptr::copy_nonoverlapping((&raw const statistics).cast::<u8>(), out.cast(), size) };
        Ok(0)
    })
}

unsafe extern "C" fn query_addr(
    ep: *mut fi::fid_ep,
    addr: fi::fi_addr_t,
    ahn: *mut u16,
    qpn: *mut u16,
    qkey: *mut u32,
) -> c_int {
    entry("query_addr", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let ep: &Ep = unsafe { object(ep) }?;
        let target = ep.target(addr)?;
        if ahn.is_null() || qpn.is_null() || qkey.is_null() {
            return Err(Code::INVAL);
        }
        // SAFETY: not null, and the application keeps its variable writable during the call.
        unsafe { ahn.write(target.ahn) };
        // SAFETY: not null, and the application keeps its variable writable during the call.
        unsafe { qpn.write(target.address.qpn) };
        // SAFETY: not null, and the application keeps its variable writable during the call.
        unsafe { qkey.write(target.address.qkey) };
        Ok(0)
    })
}

unsafe extern "C" fn query_qp_wqs(
    ep: *mut fi::fid_ep,
    sq: *mut fi::fi_efa_wq_attr,
    rq: *mut fi::fi_efa_wq_attr,
) -> c_int {
    entry("query_qp_wqs", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let ep: &Ep = unsafe { object(ep) }?;
        if sq.is_null() || rq.is_null() {
            return Err(Code::INVAL);
        }
        let (send, recv) = ep.queues()?;
        // SAFETY: not null, and the application keeps its variable writable during the call.
        unsafe { sq.write(send) };
        // SAFETY: not null, and the application keeps its variable writable during the call.
        unsafe { rq.write(recv) };
        Ok(0)
    })
}

unsafe extern "C" fn query_cq(cq: *mut fi::fid_cq, attr: *mut fi::fi_efa_cq_attr) -> c_int {
    entry("query_cq", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let cq: &Cq = unsafe { object(cq) }?;
        if attr.is_null() {
            return Err(Code::INVAL);
        }
        let memory = cq.memory().ok_or(Code::UNSUPPORTED)?;
        // SAFETY: not null, and the application keeps its variable writable during the call.
        unsafe { attr.write(memory) };
        Ok(0)
    })
}

unsafe extern "C" fn get_mr_lkey(mr: *mut fi::fid_mr) -> u64 {
    entry_or("get_mr_lkey", fi::FI_KEY_NOTAVAIL, || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        unsafe { object::<Mr, _>(mr) }.map_or(fi::FI_KEY_NOTAVAIL, |mr| u64::from(mr.lkey()))
    })
}
