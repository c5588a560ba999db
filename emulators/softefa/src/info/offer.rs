//! Each fabric's attributes, from which `fi_getinfo` makes an info.

use ferrogin_libfabric::bindings as fi;

use super::super::fabric::Kind;
use soft_nic::card::{MAX_RDMA_SIZE, MAX_SEND_SIZE};

/// Inline bytes of 64-byte work requests (sends only).
pub(crate) const NARROW_INLINE: usize = 32;
/// Inline bytes of 128-byte work requests.
pub(crate) const WIDE_INLINE: usize = 80;
/// Maximum number of bytes that the protocol copies, so that a buffer is free at once.
pub(crate) const RDM_INJECT: usize = 4096;
/// Maximum number of the protocol's operations in flight.
pub(super) const RDM_SIZE: usize = 1024;
/// Size of remote keys and of remote completion data in bytes.
pub(super) const KEY_SIZE: usize = 4;
pub(super) const DATA_SIZE: usize = 4;
/// Maximum number of remote ranges in one call.
pub(super) const RMA_IOV: usize = 1;

pub(super) const HMEM: u64 = fi::FI_HMEM;
pub(super) const DOMAIN_CAPS: u64 = fi::FI_LOCAL_COMM | fi::FI_REMOTE_COMM;
pub(super) const DIRECT_TX: u64 = fi::FI_MSG | fi::FI_SEND | fi::FI_RMA | fi::FI_READ | fi::FI_WRITE;
pub(super) const DIRECT_RX: u64 =
    fi::FI_MSG | fi::FI_RECV | fi::FI_RMA | fi::FI_REMOTE_READ | fi::FI_REMOTE_WRITE | fi::FI_RMA_EVENT | fi::FI_SOURCE;

/// A fabric's attributes.
pub(super) struct Offer {
    pub kind: Kind,
    pub tx_caps: u64,
    pub rx_caps: u64,
    /// Capabilities that an application gets only on request.
    pub optional_caps: u64,
    /// Mode bits that applications must support.
    pub mode: u64,
    pub mr_mode: i32,
    pub auto_progress: bool,
    pub msg_order: u64,
    /// Maximum size of a message, and of any operation, in bytes.
    pub max_msg_size: usize,
    pub max_size: usize,
    pub iov_limit: usize,
    pub tag_format: u64,
}

impl Offer {
    pub(super) fn of(kind: Kind) -> Self {
        match kind {
            Kind::Direct => Self {
                kind,
                tx_caps: DIRECT_TX,
                rx_caps: DIRECT_RX,
                optional_caps: HMEM,
                mode: fi::FI_CONTEXT2,
                mr_mode: fi::FI_MR_LOCAL,
                auto_progress: true,
                msg_order: 0,
                max_msg_size: MAX_SEND_SIZE as usize,
                max_size: MAX_RDMA_SIZE as usize,
                iov_limit: 2,
                tag_format: 0,
            },
            Kind::Rdm => Self {
                kind,
                tx_caps: DIRECT_TX | fi::FI_TAGGED,
                rx_caps: DIRECT_RX | fi::FI_TAGGED | fi::FI_MULTI_RECV | fi::FI_DIRECTED_RECV,
                optional_caps: 0,
                mode: 0,
                mr_mode: 0,
                auto_progress: false,
                msg_order: fi::FI_ORDER_SAS,
                max_msg_size: usize::MAX,
                max_size: usize::MAX,
                iov_limit: super::super::call::MAX_IOV,
                tag_format: TAG_GENERIC,
            },
        }
    }
}

/// Every bit of a tag can be used (`FI_TAG_GENERIC`).
pub(super) const TAG_GENERIC: u64 = 0xaaaa_aaaa_aaaa_aaaa;
