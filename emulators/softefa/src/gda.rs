//! The operation tables of `fi_open_ops`: the one for queues that a device drives (`fi_efa(7)`, "efa gda ops"), the
//! query for its entries, and those for manual progress and statistics.
//!
//! The GDA table has no size field. Programs derive its entries from libfabric's version, which means nothing for this
//! provider, so ferrogin's plugin queries the feature `softefa_gda_cntr_open_ext`.

use std::ffi::{CStr, c_char, c_int, c_void};

use ferrogin_libfabric::bindings as fi;
use ferrogin_libfabric::progress::{self, ProgressOps};
use ferrogin_libfabric::statistics::{self, Statistics, StatisticsOps};

use super::cq::Cq;
use super::domain::Domain;
use super::entry::{Out, Room, entry_points};
use super::ep::Ep;
use super::guard::Code;
use super::mr::Mr;
use super::object::{Fid, Object};
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

entry_points! {
    /// `fi_open_ops` of a fabric or a domain.
    pub(super) fn ops_open[T: Object](
        fid: *mut fi::fid,
        name: *const c_char,
        _flags: u64,
        ops: *mut *mut c_void,
        _context: *mut c_void,
    ) -> c_int
    as ("fi_open_ops") (fid: Fid<'_> = fid, name: Option<&CStr> = name, ops: Out<'_, *mut c_void> = ops) {
        fid.object::<T>()?;
        let name = name.ok_or(Code::INVAL)?;
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
        ops.write(found.cast_mut());
        Ok(0)
    }

    fn query_feature(feature: *const c_char) -> bool as ("query", false) (feature: Option<&CStr> = feature) {
        Ok(feature == Some(c"softefa_gda_cntr_open_ext"))
    }

    fn make_progress(domain: *mut c_void) -> bool as ("progress", false) (domain: &Domain = domain) {
        Ok(domain.card.progress())
    }

    fn read_statistics(domain: *mut c_void, out: *mut Statistics, size: usize) -> c_int
    as ("statistics") (domain: &Domain = domain, room: Room<'_, u8> = (out, size)) {
        if room.is_null() {
            return Err(Code::INVAL);
        }
        let counted = domain.card.lock().statistics;
        let statistics = Statistics {
            rdma_write_wrs: counted.rdma_write_wrs,
            rdma_write_bytes: counted.rdma_write_bytes,
            rdma_write_wr_err: counted.rdma_write_wr_err,
            rdma_write_recv_bytes: counted.rdma_write_recv_bytes,
            rdma_read_wrs: counted.rdma_read_wrs,
            rdma_read_bytes: counted.rdma_read_bytes,
            rdma_read_wr_err: counted.rdma_read_wr_err,
            rdma_read_resp_bytes: counted.rdma_read_resp_bytes,
        };
        // SAFETY: a struct of integers without padding.
        let bytes: [u8; size_of::<Statistics>()] = unsafe { std::mem::transmute(statistics) };
        room.copy(&bytes);
        Ok(0)
    }

    fn query_addr(ep: *mut fi::fid_ep, addr: fi::fi_addr_t, ahn: *mut u16, qpn: *mut u16, qkey: *mut u32) -> c_int
    as ("query_addr") (
        ep: &Ep = ep,
        ahn: Out<'_, u16> = ahn,
        qpn: Out<'_, u16> = qpn,
        qkey: Out<'_, u32> = qkey,
    ) {
        let target = ep.target(addr)?;
        ahn.write(target.ahn);
        qpn.write(target.address.qpn);
        qkey.write(target.address.qkey);
        Ok(0)
    }

    fn query_qp_wqs(ep: *mut fi::fid_ep, sq: *mut fi::fi_efa_wq_attr, rq: *mut fi::fi_efa_wq_attr) -> c_int
    as ("query_qp_wqs") (ep: &Ep = ep, sq: Out<'_, fi::fi_efa_wq_attr> = sq, rq: Out<'_, fi::fi_efa_wq_attr> = rq) {
        let (send, recv) = ep.queues()?;
        sq.write(send);
        rq.write(recv);
        Ok(0)
    }

    fn query_cq(cq: *mut fi::fid_cq, attr: *mut fi::fi_efa_cq_attr) -> c_int
    as ("query_cq") (cq: &Cq = cq, attr: Out<'_, fi::fi_efa_cq_attr> = attr) {
        attr.write(cq.memory().ok_or(Code::UNSUPPORTED)?);
        Ok(0)
    }

    fn get_mr_lkey(mr: *mut fi::fid_mr) -> u64 as ("get_mr_lkey", fi::FI_KEY_NOTAVAIL) (mr: &Mr = mr) {
        Ok(mr.lkey().into())
    }
}
