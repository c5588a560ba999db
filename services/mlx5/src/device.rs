//! The interface of devices: one narrow trait.
//!
//! The rest of this crate drives queues in memory. A device provides that memory and reads it: [`crate::verbs`] gets
//! hardware queues from rdma-core, the software card allocates its own.
//!
//! # Requirements
//!
//! * A device creates queues and provides their memory as parts: [`SendParts`], [`RecvParts`], [`SrqParts`],
//!   [`CqParts`]. Each holds a [`Handle`] that keeps the memory mapped, so a queue may outlive the device value that
//!   created it.
//! * A write to the doorbell register makes the device read the send queue. The 8 bytes are the first of the last work
//!   request's control segment; with BlueFlame, the whole work request is written. The doorbell record (16-bit producer
//!   index, big endian) is stored first. Receive queues only have the record.
//! * A device executes work requests in order. [`crate::wqe::parse`] reads them. A work request without a fence may
//!   start before an earlier UMR has taken effect; the small fence waits for UMRs, the full fence for earlier reads and
//!   atomics too.
//! * It puts completions into the queue: `CqWriter` of the crate `soft-mlx5` does that, with and without compression.
//!   Unsignalled requests complete silently; failures always get a completion, and all that follows on the queue pair
//!   is flushed.
//! * A window's key has the device's index in its high 24 bits and a tag in its low byte that the driver chooses. A UMR
//!   names the old key. The bind succeeds only if the key matches, the window is free (with CHECK_FREE), and the region
//!   allows windows and covers the range. A wrong `klm_octowords` fails silently: the UMR completes without an error
//!   and the window has no effect.

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

/// Why a device operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device lacks a capability.
    #[error("the device does not support {what}")]
    Unsupported {
        /// The capability.
        what: &'static str,
    },
    /// A request exceeds a limit of the device.
    #[error("{what}: {asked} requested, but the device allows at most {max}")]
    Limit {
        /// The limited quantity.
        what: &'static str,
        /// The requested value.
        asked: u64,
        /// The limit.
        max: u64,
    },
    /// A resource of another device, or of another kind.
    #[error("{what} belongs to another device")]
    Foreign {
        /// The kind of the resource.
        what: &'static str,
    },
    /// A call failed.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    Call {
        /// The name of the call.
        call: &'static str,
        /// The error number.
        errno: i32,
    },
    /// A library of the device is missing or too old.
    #[error(
        "{library}: {why}; install rdma-core (packages libibverbs1 and ibverbs-providers), or use the software card"
    )]
    Library {
        /// The library.
        library: &'static str,
        /// The reason.
        why: String,
    },
    /// No device has that name.
    #[error("device {name} was not found; the system has {}", if .others.is_empty() { "no RDMA device".into() } else { .others.join(", ") })]
    NoDevice {
        /// The requested name.
        name: String,
        /// The names of the devices that exist.
        others: Vec<String>,
    },
    /// The text names no device.
    #[error("{text} names no device: write mlx5_0, or mlx5_0:PORT:GID-INDEX with numbers up to 255")]
    Name {
        /// The text.
        text: String,
    },
    /// The peer does not exist or does not answer.
    #[error("the peer cannot be reached: {why}")]
    Peer {
        /// The reason.
        why: String,
    },
}

/// The capabilities of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caps {
    /// The system's name of the device.
    pub name: String,
    /// Supports compressed completion queues.
    pub compression: bool,
    /// Supports windows of type 1.
    pub type1_windows: bool,
    /// Supports windows of type 2 that belong to the queue pair that bound them.
    pub type2_windows: bool,
    /// Supports 8-byte atomics on the peer's memory.
    pub atomics: bool,
    /// Whether work requests can be copied into the doorbell register.
    pub blueflame: bool,
    /// Number of work requests in the largest send or receive queue.
    pub max_posts: u32,
    /// Number of completions in the largest completion queue.
    pub max_cqes: u32,
    /// Limits of one work request.
    pub limits: Limits,
}

/// A protection domain.
#[derive(Debug, Clone)]
pub struct Pd {
    /// The handle of the protection domain.
    pub handle: Handle,
}

/// Rights of a memory region in addition to local read: bits of `enum ibv_access_flags`.
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

    /// Returns the union of both.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether all bits of `other` are set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the rights that a window on the region can have.
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
    /// The protection domain.
    pub pd: Pd,
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub length: u64,
    /// Rights.
    pub access: Access,
    /// The key for local work requests.
    pub lkey: u32,
    /// The key for the peer.
    pub rkey: u32,
}

/// A window as the device allocates it, not yet bound.
#[derive(Debug, Clone)]
pub struct RawWindow {
    /// The resource.
    pub handle: Handle,
    /// The protection domain.
    pub pd: Pd,
    /// The type.
    pub window: WindowType,
    /// The first key.
    pub rkey: u32,
}

/// Attributes of a completion queue to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqAttr {
    /// The minimum number of completions that it holds.
    pub entries: u32,
    /// Whether it is compressed. Creating it fails if [`Caps::compression`] is not set.
    pub compression: bool,
}

/// A completion queue as the device makes it.
#[derive(Debug)]
pub struct RawCq {
    /// The handle, for queue pairs that complete into the queue.
    pub handle: Handle,
    /// The argument of [`crate::cq::CompletionQueue::new`].
    pub parts: CqParts,
}

/// Attributes of a shared receive queue to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqAttr {
    /// The minimum number of receives that can be posted at a time.
    pub entries: u32,
    /// Number of buffers per receive.
    pub max_sge: u32,
}

/// Attributes of a queue pair to create.
#[derive(Debug, Clone)]
pub struct QpAttr {
    /// The transport.
    pub transport: Transport,
    /// The completion queue of the send queue.
    pub send_cq: Handle,
    /// The completion queue of the receive queue.
    pub recv_cq: Handle,
    /// A shared receive queue, instead of a receive queue of its own.
    pub srq: Option<Handle>,
    /// The minimum number of work requests of the send queue.
    pub max_send: u32,
    /// The minimum number of receives; meaningless with a shared receive queue.
    pub max_recv: u32,
    /// The minimum limits of one work request.
    pub limits: Limits,
    /// The minimum number of buffers of one receive.
    pub max_recv_sge: u32,
    /// Whether every work request gets a completion.
    pub signal_all: bool,
}

/// A queue pair as the device makes it.
#[derive(Debug)]
pub struct RawQp {
    /// The handle.
    pub handle: Handle,
    /// The protection domain.
    pub pd: Pd,
    /// The argument of [`crate::sq::SendQueue::new`].
    pub send: SendParts,
    /// The argument of [`crate::rq::RecvQueue::new`]; `None` with a shared receive queue.
    pub recv: Option<RecvParts>,
}

/// The data that a peer needs to connect. The two ends exchange [`Endpoint::to_bytes`] by any means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Queue pair number.
    pub qpn: u32,
    /// First packet number.
    pub psn: u32,
    /// LID; 0 on Ethernet.
    pub lid: u16,
    /// GID, or the address that a device uses in its place.
    pub gid: [u8; 16],
}

impl Endpoint {
    /// Size of an endpoint in bytes.
    pub const SIZE: usize = size_of::<RawEndpoint>();

    /// Returns the bytes that a peer reads with [`Endpoint::from_bytes`].
    pub fn to_bytes(&self) -> [u8; Self::SIZE] {
        zerocopy::transmute!(RawEndpoint::from(self))
    }

    /// Parses an endpoint; `None` if a number has more than 24 bits.
    pub fn from_bytes(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        let raw: RawEndpoint = zerocopy::transmute!(*bytes);
        Self::try_from(&raw).ok()
    }
}

/// An endpoint as bytes, big endian: any bytes are valid.
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
    /// Returns the capabilities.
    fn caps(&self) -> &Caps;

    /// Allocates a protection domain.
    fn alloc_pd(&self) -> Result<Pd, DeviceError>;

    /// Registers memory.
    ///
    /// # Safety
    /// The range stays mapped while the region or a window on it lives. With remote rights, its bytes may change at any
    /// time, so no reference to them exists.
    #[allow(unsafe_code)]
    unsafe fn register(&self, pd: &Pd, addr: NonNull<u8>, length: usize, access: Access) -> Result<Mr, DeviceError>;

    /// Allocates a window.
    fn alloc_window(&self, pd: &Pd, window: WindowType) -> Result<RawWindow, DeviceError>;

    /// Creates a completion queue.
    fn create_cq(&self, attr: &CqAttr) -> Result<RawCq, DeviceError>;

    /// Creates a shared receive queue.
    fn create_srq(&self, pd: &Pd, attr: &SrqAttr) -> Result<SrqParts, DeviceError>;

    /// Creates a queue pair. It accepts receives at once, and sends after [`Device::connect`].
    fn create_qp(&self, pd: &Pd, attr: &QpAttr) -> Result<RawQp, DeviceError>;

    /// Returns the endpoint of the queue pair, for the peer.
    fn endpoint(&self, qp: &Handle) -> Result<Endpoint, DeviceError>;

    /// Connects a reliable queue pair to a peer, which then has the rights that keys grant. Both ends must connect.
    fn connect(&self, qp: &Handle, peer: &Endpoint) -> Result<(), DeviceError>;

    /// Makes a datagram queue pair ready. Peers address it by its number and `qkey`.
    fn open_datagrams(&self, qp: &Handle, qkey: u32) -> Result<(), DeviceError>;
}
