//! The EFA-specific device calls.

use std::ffi::c_int;
use std::mem::offset_of;

use soft_nic::card::MAX_RDMA_SIZE;
use soft_nic::fault::MAX_SQ_SIZE;

use crate::bindings as ib;
use crate::context::{Context, MAX_RQ, MAX_SGE, NARROW_INLINE, WIDE_INLINE};
use crate::guard::{Errno, entry, status};
use crate::objects::Open;
use crate::params::{Size, Struct};

/// Whether the card supports 128-byte requests (not with the fault `narrow_only`).
fn has_wide_requests(open: &Context) -> Result<bool, Errno> {
    Ok(open.card()?.lock().config.faults.wqe_size == 128)
}

/// Returns how many inline bytes the longest requests hold.
pub(crate) fn max_inline(open: &Context) -> Result<u32, Errno> {
    Ok(if has_wide_requests(open)? { WIDE_INLINE } else { NARROW_INLINE })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_query_device(
    raw: Open<Context>,
    attr: Struct<ib::efadv_device_attr>,
    size: Size<u32>,
) -> c_int {
    status("efadv_query_device", || {
        let open = raw.get()?;
        if size.bytes() < offset_of!(ib::efadv_device_attr, max_rdma_size) {
            return Err(Errno::INVAL);
        }
        let mut caps = ib::EFADV_DEVICE_ATTR_CAPS_RDMA_READ
            | ib::EFADV_DEVICE_ATTR_CAPS_RNR_RETRY
            | ib::EFADV_DEVICE_ATTR_CAPS_CQ_WITH_SGID
            | ib::EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE
            | ib::EFADV_DEVICE_ATTR_CAPS_UNSOLICITED_WRITE_RECV
            | ib::EFADV_DEVICE_ATTR_CAPS_CQ_WITH_EXT_MEM_DMABUF;
        if !open.card()?.lock().config.faults.no_counters {
            caps |= ib::EFADV_DEVICE_ATTR_CAPS_COMP_CNTR;
        }
        let whole = ib::efadv_device_attr {
            max_sq_wr: MAX_SQ_SIZE,
            max_rq_wr: MAX_RQ,
            max_sq_sge: MAX_SGE as u16,
            max_rq_sge: MAX_SGE as u16,
            inline_buf_size: NARROW_INLINE as u16,
            inline_buf_size_ex: max_inline(open)? as u16,
            device_caps: caps,
            max_rdma_size: MAX_RDMA_SIZE,
            ..ib::efadv_device_attr::default()
        };
        attr.fill(&whole, size)
    })
}

/// Returns the size of a queue's requests, in bytes.
pub(crate) fn request_size(max_inline: u32, inline_writes: bool) -> u32 {
    if max_inline > NARROW_INLINE || inline_writes { 128 } else { 64 }
}

/// Returns how many requests of this size a queue can hold.
pub(crate) fn max_depth(request_size: u32) -> u32 {
    MAX_SQ_SIZE * 64 / request_size
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_get_max_sq_depth(
    raw: Open<Context>,
    attr: Struct<ib::efadv_sq_depth_attr>,
    size: Size<u32>,
) -> c_int {
    entry("efadv_get_max_sq_depth", -libc::EIO, || {
        let Ok(open) = raw.get() else { return -libc::EINVAL };
        let Ok(attr) = attr.read(size, size_of::<ib::efadv_sq_depth_attr>()) else { return -libc::EINVAL };
        if attr.comp_mask != 0
            || attr.max_send_sge > MAX_SGE
            || attr.max_rdma_sge > 1
            || !max_inline(open).is_ok_and(|most| attr.max_inline_data <= most)
        {
            return -libc::EINVAL;
        }
        let inline_writes = attr.flags & ib::EFADV_SQ_DEPTH_ATTR_INLINE_WRITE != 0;
        max_depth(request_size(attr.max_inline_data, inline_writes)) as c_int
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_get_max_rq_depth(
    raw: Open<Context>,
    attr: Struct<ib::efadv_rq_depth_attr>,
    size: Size<u32>,
) -> c_int {
    entry("efadv_get_max_rq_depth", -libc::EIO, || {
        if raw.get().is_err() {
            return -libc::EINVAL;
        }
        match attr.read(size, offset_of!(ib::efadv_rq_depth_attr, max_recv_sge) + size_of::<u32>()) {
            Ok(attr) if attr.comp_mask == 0 && (1..=MAX_SGE).contains(&attr.max_recv_sge) => {
                (MAX_RQ / attr.max_recv_sge) as c_int
            }
            _ => -libc::EINVAL,
        }
    })
}
