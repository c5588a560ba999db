//! What a device must do: one narrow trait.
//!
//! The rest of this crate drives queues that lie in memory. Where the memory comes from, and who reads it, is the
//! device's business: [`crate::verbs`] asks rdma-core for hardware queues, the software card has its own.
//!
//! # What a device does
//!
//! * It creates queues and hands out their memory as parts: [`SendParts`], [`RecvParts`], [`SrqParts`], [`CqParts`]. Each
//!   holds a [`Handle`] that keeps the memory mapped, so a queue may outlive the value that created it.
//! * It reads a send queue when its doorbell register is written: the 8 bytes are the first of the last request's control
//!   segment, or the whole request with BlueFlame. The doorbell record (16-bit producer index, big endian) is already
//!   stored then. Receive queues have the record only.
//! * It executes requests in order. [`crate::wqe::parse`] reads them. A request with neither small nor full fence may
//!   begin before an earlier UMR has had its effect; with the full fence it waits for earlier reads and atomics too.
//! * It puts completions into the queue: `CqWriter` of the crate `soft-mlx5` does that, with and without compression. Unsignalled
//!   requests complete silently; failures always get a completion, and all that follows on the queue pair is flushed.
//! * A window's key has the device's index in its high 24 bits and a tag in its low byte that the driver chooses. A UMR
//!   names the key as it was; it is bound only if the key matches, is free when CHECK_FREE is set, and the region
//!   allows windows and covers the range. What a wrong `klm_octowords` does is silent: the completion is good, the
//!   window has no effect.

pub use crate::handle::Handle;

use crate::assert_layout;
use crate::cq::CqParts;
use crate::rq::RecvParts;
use crate::sq::SendParts;
use crate::srq::SrqParts;
use crate::wire::{MAX_24_BITS, MkeyAccess};
use crate::wqe::{Limits, Transport, WindowType};
use std::ptr::NonNull;
use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Why a device did not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device cannot do it.
    #[error("the device does not support {what}")]
    Unsupported {
        /// What.
        what: &'static str,
    },
    /// More than the device has.
    #[error("{what}: {asked} asked for, but the device has at most {max}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// Asked for.
        asked: u64,
        /// At most.
        max: u64,
    },
    /// A resource of another device, or of another kind.
    #[error("{what} belongs to another device")]
    Foreign {
        /// What was given.
        what: &'static str,
    },
    /// A call failed.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Call {
        /// Which.
        call: &'static str,
        /// Its error number.
        errno: i32,
    },
    /// The libraries of the device are not there or too old.
    #[error(
        "{library}: {why}; install rdma-core (packages libibverbs1 and ibverbs-providers), or use the software card"
    )]
    Library {
        /// Which library.
        library: &'static str,
        /// What was wrong.
        why: String,
    },
    /// No such device.
    #[error("there is no {name} here; the system has {}", if .others.is_empty() { "no RDMA device".into() } else { .others.join(", ") })]
    NoDevice {
        /// Asked for.
        name: String,
        /// What is there.
        others: Vec<String>,
    },
    /// The peer cannot be reached, or is gone.
    #[error("the peer cannot be reached: {why}")]
    Peer {
        /// What was wrong.
        why: String,
    },
}

/// What a device can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caps {
    /// Its name, as the system has it.
    pub name: String,
    /// Completion queues can be compressed.
    pub compression: bool,
    /// Windows of type 1.
    pub type1_windows: bool,
    /// Windows of type 2 that belong to the queue pair that bound them.
    pub type2_windows: bool,
    /// 8-byte atomics on the peer's memory.
    pub atomics: bool,
    /// Requests can be copied into the doorbell register.
    pub blueflame: bool,
    /// Most requests of a send or receive queue.
    pub max_posts: u32,
    /// Most completions of a completion queue.
    pub max_cqes: u32,
    /// What one request may have at most.
    pub limits: Limits,
}

/// A protection domain.
#[derive(Debug, Clone)]
pub struct Pd {
    /// The resource.
    pub handle: Handle,
}

/// Rights of a memory region, beside local read: bits of `enum ibv_access_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access(pub u32);

impl Access {
    /// The owner may write.
    pub const LOCAL_WRITE: Self = Self(1);
    /// The peer may write.
    pub const REMOTE_WRITE: Self = Self(1 << 1);
    /// The peer may read.
    pub const REMOTE_READ: Self = Self(1 << 2);
    /// The peer may do atomics.
    pub const REMOTE_ATOMIC: Self = Self(1 << 3);
    /// Windows may be bound to it.
    pub const MW_BIND: Self = Self(1 << 4);

    /// Both.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// All bits of `other` are set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// What a window on the region may allow at most.
    pub fn for_window(self) -> MkeyAccess {
        let write = self.has(Self::LOCAL_WRITE);
        MkeyAccess::REMOTE_READ
            .with_if(MkeyAccess::LOCAL_WRITE, write)
            .with_if(MkeyAccess::REMOTE_WRITE, write)
            .with_if(MkeyAccess::ATOMIC, write)
    }
}

/// A registered range of memory.
#[derive(Debug, Clone)]
pub struct Mr {
    /// The resource.
    pub handle: Handle,
    /// Its domain.
    pub pd: Pd,
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// Rights.
    pub access: Access,
    /// Key for our own requests.
    pub lkey: u32,
    /// Key for the peer.
    pub rkey: u32,
}

/// A window as the device allocates it, bound to nothing.
#[derive(Debug, Clone)]
pub struct RawWindow {
    /// The resource.
    pub handle: Handle,
    /// Its domain.
    pub pd: Pd,
    /// Its kind.
    pub window: WindowType,
    /// Its first key.
    pub rkey: u32,
}

/// What a completion queue is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqAttr {
    /// Completions that it holds at least.
    pub entries: u32,
    /// Compressed; an error where [`Caps::compression`] is not set.
    pub compression: bool,
}

/// A completion queue as the device makes it.
#[derive(Debug)]
pub struct RawCq {
    /// Names it to the device: for queue pairs that complete into it.
    pub handle: Handle,
    /// What [`crate::cq::CompletionQueue::new`] takes.
    pub parts: CqParts,
}

/// What a shared receive queue is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqAttr {
    /// Receives that can be posted at a time, at least.
    pub entries: u32,
    /// Buffers of one.
    pub max_sge: u32,
}

/// What a queue pair is to be.
#[derive(Debug, Clone)]
pub struct QpAttr {
    /// Kind.
    pub transport: Transport,
    /// Where the send queue completes.
    pub send_cq: Handle,
    /// Where the receive queue completes.
    pub recv_cq: Handle,
    /// A shared receive queue instead of an own one.
    pub srq: Option<Handle>,
    /// Requests of the send queue, at least.
    pub max_send: u32,
    /// Receives, at least; of no meaning with a shared queue.
    pub max_recv: u32,
    /// What one request has, at least.
    pub limits: Limits,
    /// Buffers of one receive, at least.
    pub max_recv_sge: u32,
    /// Every request gets a completion.
    pub signal_all: bool,
}

/// A queue pair as the device makes it.
#[derive(Debug)]
pub struct RawQp {
    /// Names it to the device.
    pub handle: Handle,
    /// Its domain.
    pub pd: Pd,
    /// What [`crate::sq::SendQueue::new`] takes.
    pub send: SendParts,
    /// What [`crate::rq::RecvQueue::new`] takes; `None` with a shared queue.
    pub recv: Option<RecvParts>,
}

/// What a peer must know to connect: exchanged by any means as [`Endpoint::to_bytes`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Queue pair number.
    pub qpn: u32,
    /// First packet number.
    pub psn: u32,
    /// LID; 0 on Ethernet.
    pub lid: u16,
    /// GID, or what a device puts in its place.
    pub gid: [u8; 16],
}

impl Endpoint {
    /// Bytes of an endpoint.
    pub const SIZE: usize = size_of::<RawEndpoint>();

    /// The bytes that a peer reads with [`Endpoint::from_bytes`].
    pub fn to_bytes(&self) -> [u8; Self::SIZE] {
        zerocopy::transmute!(RawEndpoint::from(self))
    }

    /// From bytes; `None` if a number has more than 24 bits.
    pub fn from_bytes(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        let raw: RawEndpoint = zerocopy::transmute!(*bytes);
        Self::try_from(&raw).ok()
    }
}

/// An endpoint as bytes, big endian: any bytes are a value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawEndpoint {
    /// Queue pair number.
    pub qpn: U32,
    /// First packet number.
    pub psn: U32,
    /// LID.
    pub lid: U16,
    /// GID.
    pub gid: [u8; 16],
}
assert_layout!(RawEndpoint, size 26, align 1, { qpn @ 0, psn @ 4, lid @ 8, gid @ 10 });

/// A queue pair number or packet number has more than 24 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a queue pair number or packet number has more than 24 bits")]
pub struct NumberTooLarge;

impl From<&Endpoint> for RawEndpoint {
    fn from(endpoint: &Endpoint) -> Self {
        let Endpoint { qpn, psn, lid, gid } = *endpoint;
        Self { qpn: qpn.into(), psn: psn.into(), lid: lid.into(), gid }
    }
}

impl TryFrom<&RawEndpoint> for Endpoint {
    type Error = NumberTooLarge;

    fn try_from(raw: &RawEndpoint) -> Result<Self, NumberTooLarge> {
        let (qpn, psn) = (raw.qpn.get(), raw.psn.get());
        if qpn > MAX_24_BITS || psn > MAX_24_BITS {
            return Err(NumberTooLarge);
        }
        Ok(Self { qpn, psn, lid: raw.lid.get(), gid: raw.gid })
    }
}

/// A device.
pub trait Device: Send + Sync {
    /// What it can do.
    fn caps(&self) -> &Caps;

    /// Allocates a protection domain.
    fn alloc_pd(&self) -> Result<Pd, DeviceError>;

    /// Registers memory.
    ///
    /// # Safety
    /// The range stays mapped while the region or a window on it lives. With remote rights its bytes change at any time:
    /// nothing holds references to them that say otherwise.
    #[allow(unsafe_code)]
    unsafe fn register(&self, pd: &Pd, addr: NonNull<u8>, length: usize, access: Access) -> Result<Mr, DeviceError>;

    /// Allocates a window.
    fn alloc_window(&self, pd: &Pd, window: WindowType) -> Result<RawWindow, DeviceError>;

    /// Creates a completion queue.
    fn create_cq(&self, attr: &CqAttr) -> Result<RawCq, DeviceError>;

    /// Creates a shared receive queue.
    fn create_srq(&self, pd: &Pd, attr: &SrqAttr) -> Result<SrqParts, DeviceError>;

    /// Creates a queue pair; it can take receives at once, and sends once it is connected.
    fn create_qp(&self, pd: &Pd, attr: &QpAttr) -> Result<RawQp, DeviceError>;

    /// What the peer must know of this queue pair.
    fn endpoint(&self, qp: &Handle) -> Result<Endpoint, DeviceError>;

    /// Connects a reliable queue pair to a peer, which has all rights on it that keys give. Both sides must call it.
    fn connect(&self, qp: &Handle, peer: &Endpoint) -> Result<(), DeviceError>;

    /// Makes a datagram queue pair ready: peers name it by its number and this key.
    fn open_datagrams(&self, qp: &Handle, qkey: u32) -> Result<(), DeviceError>;
}
