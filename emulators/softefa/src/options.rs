//! `fi_getopt` and `fi_setopt` of an endpoint.

use std::ffi::{c_int, c_void};

use ferrogin_libfabric::bindings as fi;

use super::entry::{Answer, Array, entry_points};
use super::ep::Ep;
use super::fabric::Kind;
use super::guard::Code;
use super::info;
use soft_nic::card::RNR_RETRY_UNLIMITED;
use soft_nic::card::{MAX_RDMA_SIZE, MAX_SEND_SIZE};

fn number(ep: &Ep, name: c_int) -> Result<usize, Code> {
    if name == fi::FI_OPT_EFA_RNR_RETRY {
        return Ok(ep.state().rnr_retry.into());
    }
    let rdm = ep.domain.fabric_kind() == Kind::Rdm;
    Ok(match u32::try_from(name) {
        Ok(fi::FI_OPT_MIN_MULTI_RECV) if rdm => ep.state().min_multi_recv,
        Ok(fi::FI_OPT_MAX_MSG_SIZE) if rdm => usize::MAX,
        Ok(fi::FI_OPT_MAX_MSG_SIZE) => MAX_SEND_SIZE as usize,
        Ok(fi::FI_OPT_MAX_TAGGED_SIZE) if rdm => usize::MAX,
        Ok(fi::FI_OPT_INJECT_MSG_SIZE) => ep.inject_size,
        Ok(fi::FI_OPT_INJECT_TAGGED_SIZE) if rdm => ep.inject_size,
        Ok(fi::FI_OPT_MAX_RMA_SIZE) => MAX_RDMA_SIZE as usize,
        Ok(fi::FI_OPT_INJECT_RMA_SIZE) if rdm => ep.inject_size,
        Ok(fi::FI_OPT_INJECT_RMA_SIZE) if ep.state().wqe_size == 128 => info::WIDE_INLINE,
        Ok(fi::FI_OPT_INJECT_RMA_SIZE) => 0,
        _ => return Err(Code(fi::FI_ENOPROTOOPT)),
    })
}

fn set_number(ep: &Ep, name: c_int, number: usize) -> Result<i32, Code> {
    if name == fi::FI_OPT_EFA_RNR_RETRY {
        let mut state = ep.state();
        if state.qpn.is_some() {
            return Err(Code::INVAL);
        }
        state.rnr_retry = u8::try_from(number).ok().filter(|n| *n <= RNR_RETRY_UNLIMITED).ok_or(Code::INVAL)?;
        return Ok(0);
    }
    if ep.domain.fabric_kind() != Kind::Rdm {
        return Err(Code(fi::FI_ENOPROTOOPT));
    }
    ep.state().min_multi_recv = number;
    if let Ok(path) = ep.path() {
        path.set_min_multi_recv(number);
    }
    Ok(0)
}

entry_points! {
    pub(super) fn getopt(fid: fi::fid_t, level: c_int, name: c_int, value: *mut c_void, len: *mut usize) -> c_int
    as ("fi_getopt") (ep: &Ep = fid, answer: Answer<'_> = (value, len)) {
        if level != fi::FI_OPT_ENDPOINT as c_int {
            return Err(Code(fi::FI_ENOPROTOOPT));
        }
        answer.fill(&number(ep, name)?.to_ne_bytes())?;
        Ok(0)
    }

    /// Options that the card meets anyway are accepted and change nothing.
    pub(super) fn setopt(fid: fi::fid_t, level: c_int, name: c_int, value: *const c_void, len: usize) -> c_int
    as ("fi_setopt") (ep: &Ep = fid, value: Array<'_, u8> = (value, len)) {
        if level != fi::FI_OPT_ENDPOINT as c_int {
            return Err(Code(fi::FI_ENOPROTOOPT));
        }
        let first = value.iter().next().ok_or(Code::INVAL)?;
        if name == fi::FI_OPT_MIN_MULTI_RECV as c_int || name == fi::FI_OPT_EFA_RNR_RETRY {
            if len != size_of::<usize>() {
                return Err(Code::INVAL);
            }
            let mut number = [0; size_of::<usize>()];
            number.iter_mut().zip(value.iter()).for_each(|(to, byte)| *to = byte);
            return set_number(ep, name, usize::from_ne_bytes(number));
        }
        match name {
            // The card has device RDMA and no emulation, so the opposite values are refused.
            fi::FI_OPT_EFA_USE_DEVICE_RDMA if first != 0 => Ok(0),
            fi::FI_OPT_EFA_HOMOGENEOUS_PEERS => Ok(0),
            _ if u32::try_from(name).is_ok_and(|n| {
                matches!(n, fi::FI_OPT_CUDA_API_PERMITTED | fi::FI_OPT_SHARED_MEMORY_PERMITTED | fi::FI_OPT_FI_HMEM_P2P)
            }) =>
            {
                Ok(0)
            }
            _ => Err(Code(fi::FI_ENOPROTOOPT)),
        }
    }
}
