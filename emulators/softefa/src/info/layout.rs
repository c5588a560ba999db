//! Parts of `fi_info` that differ between libfabric releases, in the oldest release's layout.

use std::ffi::{c_char, c_int};
use std::mem::offset_of;

use ferrogin_libfabric::bindings as fi;

/// Asserts that an older struct's fields are where the newest has them.
macro_rules! same_offsets {
    ($old:ty, $new:ty: $($field:ident),*) => {
        $(const _: () = assert!(offset_of!($old, $field) == offset_of!($new, $field));)*
    };
}
pub(super) use same_offsets;

/// The fields of `fi_ep_attr` that every libfabric has, as far as this provider uses them.
#[repr(C)]
pub(crate) struct EpAttr {
    pub kind: fi::fi_ep_type::Type,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
    pub max_order: [usize; 3],
    pub mem_tag_format: u64,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
}

/// `fi_domain_attr` of libfabric 1.17, the oldest that this provider supports.
#[repr(C)]
pub(crate) struct DomainAttr {
    pub domain: *mut fi::fid_domain,
    pub name: *mut c_char,
    pub threading: fi::fi_threading::Type,
    pub control_progress: fi::fi_progress::Type,
    pub data_progress: fi::fi_progress::Type,
    pub resource_mgmt: fi::fi_resource_mgmt::Type,
    pub av_type: fi::fi_av_type::Type,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
    pub ep_cnt: usize,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub max_ep_tx_ctx: usize,
    pub max_ep_rx_ctx: usize,
    pub max_ep_stx_ctx: usize,
    pub max_ep_srx_ctx: usize,
    pub cntr_cnt: usize,
    pub mr_iov_limit: usize,
    pub caps: u64,
    pub mode: u64,
    pub auth_key: *mut u8,
    pub auth_key_size: usize,
    pub max_err_data: usize,
    pub mr_cnt: usize,
    pub tclass: u32,
}

same_offsets!(EpAttr, fi::fi_ep_attr: protocol, max_msg_size, mem_tag_format, tx_ctx_cnt, rx_ctx_cnt);
same_offsets!(DomainAttr, fi::fi_domain_attr: name, threading, resource_mgmt, av_type, mr_mode, mr_key_size, cntr_cnt,
    mr_iov_limit, caps, mode, mr_cnt, tclass);
const _: () = assert!(size_of::<DomainAttr>() == 192, "fi_domain_attr of 1.17");
