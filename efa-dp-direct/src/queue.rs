//! The queue structs that kernels read and write and share with NCCL's device code, and their initialisers.
//!
//! Source: `efa_cuda_dp_types.h` and the host API of efa-dp-direct 0.0.1 (NCCL 2.31.2, backend version 1: [`QpV0`]) and
//! 1.1.0 (NCCL 2.32.3, backend version 2: [`QpV1`]). Padding has fields, so that every byte has a value.

#![allow(unsafe_code)]

use crate::assert_layout;
use crate::wire::{TX_DESC_INLINE_MAX_SIZE, TX_DESC_INLINE_MAX_SIZE_128, TX_DESC_NUM_RDMA_BUFS, TxWqe, TxWqe128};
use core::ptr::null_mut;

/// Bit of `sq_caps`: request ids are 64-bit (`EFA_CUDA_WQ_CAPS_64_BIT_REQ_ID`).
pub const WQ_CAPS_64_BIT_REQ_ID: u32 = 1;

/// `efa_cuda_wq` / `efa_cuda_wq_v0`: a work queue. Kernels change the cursors; the rest is constant.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WqV0 {
    /// Unused by device code.
    pub max_sge: u32,
    /// Number of slots in the ring, a power of two.
    pub max_wqes: u32,
    /// `max_wqes - 1`.
    pub queue_mask: u32,
    /// Base 2 logarithm of `max_wqes`.
    pub queue_size_shift: u32,
    /// Requests that may be written but not yet rung.
    pub max_batch: u32,
    /// Requests started but not yet rung.
    pub wqes_pending: u32,
    /// Unused by efa-dp-direct; NCCL's post path keeps the last doorbell value here.
    pub wqes_posted: u32,
    /// Unused by efa-dp-direct; NCCL's post path keeps its released cursor here.
    pub wqes_completed: u32,
    /// Producer count: requests rung so far, modulo 2^32.
    pub pc: u32,
    /// Phase of the slot at `pc`; only its lowest bit is written. Posters that derive the phase from the slot number
    /// alone (NCCL's, and ferrogin's `combining` policy, which keeps its flush barrier here) don't use it as such.
    pub phase: i32,
    /// The ring.
    pub buf: *mut u8,
    /// The doorbell.
    pub db: *mut u32,
}
assert_layout!(WqV0, size 56, align 8, {
    max_sge @ 0, max_wqes @ 4, queue_mask @ 8, queue_size_shift @ 12, max_batch @ 16, wqes_pending @ 20,
    wqes_posted @ 24, wqes_completed @ 28, pc @ 32, phase @ 36, buf @ 40, db @ 48,
});

/// `efa_cuda_sq` / `efa_cuda_sq_v0`: a send queue of 64-byte requests with 16-bit request ids.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SqV0 {
    /// Ring and cursors.
    pub wq: WqV0,
    /// Inline bytes that a send may carry.
    pub max_inline_data: u32,
    /// Local buffers of an RDMA operation.
    pub max_rdma_sges: u32,
}
assert_layout!(SqV0, size 64, align 8, { wq @ 0, max_inline_data @ 56, max_rdma_sges @ 60 });

/// `efa_cuda_wr_ctx_v0`: the geometry of a send queue's requests. Offsets are in bytes from a request's start.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrCtxV0 {
    /// Remote side of an RDMA operation.
    pub remote_mem_offset: u8,
    /// Local side of an RDMA operation.
    pub local_mem_offset: u8,
    /// Buffers of a send.
    pub sgl_offset: u8,
    /// Inline data of a send.
    pub send_inline_data_offset: u8,
    /// Inline data of an RDMA write, or 0 if there is none.
    pub write_inline_data_offset: u8,
    /// Padding.
    pub pad0: [u8; 3],
    /// Inline bytes that a request may carry.
    pub max_inline_data: u32,
    /// Local buffers of an RDMA operation.
    pub max_rdma_sges: u32,
    /// Bytes of a request: 64 or 128.
    pub wqe_size: u16,
    /// Padding.
    pub pad1: u16,
}
assert_layout!(WrCtxV0, size 20, align 4, {
    remote_mem_offset @ 0, local_mem_offset @ 1, sgl_offset @ 2, send_inline_data_offset @ 3,
    write_inline_data_offset @ 4, pad0 @ 5, max_inline_data @ 8, max_rdma_sges @ 12, wqe_size @ 16, pad1 @ 18,
});

impl WrCtxV0 {
    /// Returns the geometry of 64-byte requests.
    pub const fn narrow(max_inline_data: u32, max_rdma_sges: u32) -> Self {
        Self {
            remote_mem_offset: 32,
            local_mem_offset: 48,
            sgl_offset: 32,
            send_inline_data_offset: 32,
            write_inline_data_offset: 0,
            pad0: [0; 3],
            max_inline_data,
            max_rdma_sges,
            wqe_size: TxWqe::SIZE as u16,
            pad1: 0,
        }
    }

    /// Returns the geometry of 128-byte requests.
    pub const fn wide(max_inline_data: u32, max_rdma_sges: u32) -> Self {
        Self {
            write_inline_data_offset: 48,
            wqe_size: TxWqe128::SIZE as u16,
            ..Self::narrow(max_inline_data, max_rdma_sges)
        }
    }
}

/// `efa_cuda_sq_v1`: a send queue with a request geometry and 64-bit request ids.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SqV1 {
    /// Ring and cursors.
    pub wq: WqV0,
    /// Geometry of the requests.
    pub wr_ctx: WrCtxV0,
    /// Padding.
    pub pad: u32,
}
assert_layout!(SqV1, size 80, align 8, { wq @ 0, wr_ctx @ 56, pad @ 76 });

/// `efa_cuda_rq` / `efa_cuda_rq_v0`: a receive queue.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RqV0 {
    /// Ring and cursors.
    pub wq: WqV0,
}
assert_layout!(RqV0, size 56, align 8, { wq @ 0 });

/// `efa_cuda_qp` of 0.0.1, `efa_cuda_qp_v0` of 1.1.0: a queue pair, backend version 1.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpV0 {
    /// 0.
    pub comp_mask: u64,
    /// Send queue.
    pub sq: SqV0,
    /// Receive queue.
    pub rq: RqV0,
}
assert_layout!(QpV0, size 128, align 8, { comp_mask @ 0, sq @ 8, rq @ 72 });

/// `efa_cuda_qp_v1`: a queue pair, backend version 2.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpV1 {
    /// 0.
    pub comp_mask: u64,
    /// Send queue.
    pub sq: SqV1,
    /// Receive queue.
    pub rq: RqV0,
}
assert_layout!(QpV1, size 144, align 8, { comp_mask @ 0, sq @ 8, rq @ 88 });

/// Offset of the send queue's [`WqV0`] in [`QpV0`] and in [`QpV1`], which is all that code needs to post.
pub const SQ_WQ_OFFSET: usize = core::mem::offset_of!(QpV0, sq);
const _: () = assert!(SQ_WQ_OFFSET == core::mem::offset_of!(QpV1, sq));

/// `efa_cuda_cq` / `efa_cuda_cq_v0`: a completion queue.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqV0 {
    /// 0.
    pub comp_mask: u64,
    /// Bytes of an entry: 16 or 32.
    pub entry_size: u32,
    /// Number of slots in the ring, a power of two.
    pub num_entries: u32,
    /// `num_entries - 1`.
    pub queue_mask: u32,
    /// Base 2 logarithm of `num_entries`.
    pub queue_size_shift: u32,
    /// Consumer count, modulo 2^32.
    pub cc: u32,
    /// Phase of the entry at `cc` once the card has written it.
    pub phase: i32,
    /// The ring.
    pub buf: *mut u8,
    /// The doorbell; null, as polling doesn't need it.
    pub db: *mut u32,
}
assert_layout!(CqV0, size 48, align 8, {
    comp_mask @ 0, entry_size @ 8, num_entries @ 12, queue_mask @ 16, queue_size_shift @ 20, cc @ 24, phase @ 28,
    buf @ 32, db @ 40,
});

/// `efa_cuda_qp_attrs` of 1.1.0.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpAttrs {
    /// 0.
    pub comp_mask: u64,
    /// 0.
    pub flags: u64,
    /// Send ring.
    pub sq_buffer: *mut u8,
    /// Receive ring.
    pub rq_buffer: *mut u8,
    /// Send doorbell.
    pub sq_doorbell: *mut u32,
    /// Receive doorbell.
    pub rq_doorbell: *mut u32,
    /// Number of slots in the send ring, a power of two.
    pub sq_num_entries: u32,
    /// Bytes of a send request: 64 or 128.
    pub sq_entry_size: u32,
    /// Requests that may be written but not yet rung.
    pub sq_max_batch: u32,
    /// Number of slots in the receive ring, a power of two.
    pub rq_num_entries: u32,
    /// Bytes of a receive descriptor: 16.
    pub rq_entry_size: u32,
    /// Inline bytes that a request may carry.
    pub sq_max_inline_data: u32,
    /// Local buffers of an RDMA operation, at most 1.
    pub sq_max_rdma_sges: u32,
    /// Capabilities of the send queue; see [`WQ_CAPS_64_BIT_REQ_ID`].
    pub sq_caps: u32,
    /// Capabilities of the receive queue: 0.
    pub rq_caps: u32,
    /// Padding.
    pub pad: u32,
}
assert_layout!(QpAttrs, size 88, align 8, {
    comp_mask @ 0, flags @ 8, sq_buffer @ 16, rq_buffer @ 24, sq_doorbell @ 32, rq_doorbell @ 40, sq_num_entries @ 48,
    sq_entry_size @ 52, sq_max_batch @ 56, rq_num_entries @ 60, rq_entry_size @ 64, sq_max_inline_data @ 68,
    sq_max_rdma_sges @ 72, sq_caps @ 76, rq_caps @ 80, pad @ 84,
});

/// `efa_cuda_cq_attrs`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqAttrs {
    /// 0.
    pub comp_mask: u64,
    /// 0.
    pub flags: u64,
    /// The ring.
    pub buffer: *mut u8,
    /// Number of slots in the ring, a power of two.
    pub num_entries: u32,
    /// Bytes of an entry.
    pub entry_size: u32,
}
assert_layout!(CqAttrs, size 32, align 8, { comp_mask @ 0, flags @ 8, buffer @ 16, num_entries @ 24, entry_size @ 28 });

/// Why no queue can be made from attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitError {
    /// A ring size is not a power of two.
    Entries(u32),
    /// The requested layout has no requests of this many bytes.
    WqeSize(u32),
    /// A request has no room for this many inline bytes.
    InlineData(u32),
    /// An RDMA operation has no room for this many local buffers.
    RdmaSges(u32),
    /// Capability bits that the requested layout needs or can't have.
    Caps(u32),
    /// `comp_mask` or `flags` has a bit that this release doesn't know.
    Reserved(u64),
}

impl InitError {
    /// Returns the negative errno that the reference initialiser returns.
    pub const fn errno(self) -> i32 {
        const EINVAL: i32 = 22;
        const EOPNOTSUPP: i32 = 95;
        match self {
            Self::Entries(_) | Self::InlineData(_) | Self::RdmaSges(_) | Self::Reserved(_) => -EINVAL,
            Self::WqeSize(_) | Self::Caps(_) => -EOPNOTSUPP,
        }
    }
}

impl core::fmt::Display for InitError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Entries(n) => write!(f, "a ring of {n} entries: must be a power of two"),
            Self::WqeSize(n) => write!(f, "{n}-byte requests: this layout has no such requests"),
            Self::InlineData(n) => write!(f, "{n} inline bytes: more than a request of this size carries"),
            Self::RdmaSges(n) => write!(f, "{n} buffers in an RDMA operation: at most 1"),
            Self::Caps(bits) => write!(f, "queue capabilities {bits:#x}: not those of this layout"),
            Self::Reserved(bits) => write!(f, "comp_mask or flags {bits:#x}: must be 0"),
        }
    }
}

impl core::error::Error for InitError {}

impl WqV0 {
    /// A queue without a ring.
    pub const EMPTY: Self = Self {
        max_sge: 0,
        max_wqes: 0,
        queue_mask: 0,
        queue_size_shift: 0,
        max_batch: 0,
        wqes_pending: 0,
        wqes_posted: 0,
        wqes_completed: 0,
        pc: 0,
        phase: 0,
        buf: null_mut(),
        db: null_mut(),
    };

    /// Creates a fresh queue; `entries` is a power of two.
    const fn new(buf: *mut u8, db: *mut u32, entries: u32, max_batch: u32, phase: i32) -> Self {
        Self {
            max_wqes: entries,
            queue_mask: entries - 1,
            queue_size_shift: entries.trailing_zeros(),
            max_batch,
            phase,
            buf,
            db,
            ..Self::EMPTY
        }
    }
}

/// Returns `Ok` if all ring sizes are powers of two.
fn check_entries(entries: &[u32]) -> Result<(), InitError> {
    match entries.iter().find(|n| !n.is_power_of_two()) {
        Some(&n) => Err(InitError::Entries(n)),
        None => Ok(()),
    }
}

impl QpAttrs {
    /// All zeros: a base for struct update syntax.
    pub const ZERO: Self = Self {
        comp_mask: 0,
        flags: 0,
        sq_buffer: null_mut(),
        rq_buffer: null_mut(),
        sq_doorbell: null_mut(),
        rq_doorbell: null_mut(),
        sq_num_entries: 0,
        sq_entry_size: 0,
        sq_max_batch: 0,
        rq_num_entries: 0,
        rq_entry_size: 0,
        sq_max_inline_data: 0,
        sq_max_rdma_sges: 0,
        sq_caps: 0,
        rq_caps: 0,
        pad: 0,
    };

    fn check(&self, wqe_sizes: &[usize], sq_caps: u32) -> Result<(), InitError> {
        if self.comp_mask | self.flags != 0 {
            return Err(InitError::Reserved(self.comp_mask | self.flags));
        }
        check_entries(&[self.sq_num_entries, self.rq_num_entries])?;
        if !wqe_sizes.contains(&(self.sq_entry_size as usize)) {
            return Err(InitError::WqeSize(self.sq_entry_size));
        }
        let max_inline = match self.sq_entry_size as usize {
            TxWqe128::SIZE => TX_DESC_INLINE_MAX_SIZE_128,
            _ => TX_DESC_INLINE_MAX_SIZE,
        };
        if self.sq_max_inline_data as usize > max_inline {
            return Err(InitError::InlineData(self.sq_max_inline_data));
        }
        if self.sq_max_rdma_sges as usize > TX_DESC_NUM_RDMA_BUFS {
            return Err(InitError::RdmaSges(self.sq_max_rdma_sges));
        }
        if self.sq_caps != sq_caps {
            return Err(InitError::Caps(self.sq_caps));
        }
        if self.rq_caps != 0 {
            return Err(InitError::Caps(self.rq_caps));
        }
        Ok(())
    }

    fn sq(&self) -> WqV0 {
        WqV0::new(self.sq_buffer, self.sq_doorbell, self.sq_num_entries, self.sq_max_batch, 0)
    }

    fn rq(&self) -> RqV0 {
        RqV0 { wq: WqV0::new(self.rq_buffer, self.rq_doorbell, self.rq_num_entries, self.rq_num_entries, 1) }
    }
}

/// Defines `to_bytes` for a struct that has no padding.
macro_rules! bytes_of {
    ($ty:ty) => {
        impl $ty {
            /// Returns the bytes that a kernel reads.
            pub fn to_bytes(&self) -> [u8; size_of::<$ty>()] {
                // SAFETY: the type is repr(C) without implicit padding (the layout asserted above shows that every byte
                // belongs to a field), so all its bytes are initialised.
                unsafe { core::ptr::from_ref(self).cast::<[u8; size_of::<$ty>()]>().read() }
            }
        }
    };
}
bytes_of!(QpV0);
bytes_of!(QpV1);
bytes_of!(CqV0);
bytes_of!(WrCtxV0);

impl QpV0 {
    /// Returns the queue pair that release 0.0.1's initialiser makes: with limits of 32 inline bytes and 2 buffers,
    /// whatever `attrs` has.
    ///
    /// # Errors
    /// The attribute that this layout can't have.
    pub fn new(attrs: &QpAttrs) -> Result<Self, InitError> {
        attrs.check(&[TxWqe::SIZE], 0)?;
        let sq = SqV0 { wq: attrs.sq(), max_inline_data: TX_DESC_INLINE_MAX_SIZE as u32, max_rdma_sges: 2 };
        Ok(Self { comp_mask: 0, sq, rq: attrs.rq() })
    }
}

impl QpV1 {
    /// Returns the queue pair that release 1.1.0's initialiser makes for API version 1.
    ///
    /// # Errors
    /// The attribute that this layout can't have; the send queue must have 64-bit request ids.
    pub fn new(attrs: &QpAttrs) -> Result<Self, InitError> {
        attrs.check(&[TxWqe::SIZE, TxWqe128::SIZE], WQ_CAPS_64_BIT_REQ_ID)?;
        let geometry = if attrs.sq_entry_size as usize == TxWqe128::SIZE { WrCtxV0::wide } else { WrCtxV0::narrow };
        Ok(Self {
            comp_mask: 0,
            sq: SqV1 { wq: attrs.sq(), wr_ctx: geometry(attrs.sq_max_inline_data, attrs.sq_max_rdma_sges), pad: 0 },
            rq: attrs.rq(),
        })
    }
}

impl CqV0 {
    /// Creates a fresh completion queue, as both releases do. Like them, it doesn't check entry sizes.
    ///
    /// # Errors
    /// The ring size isn't a power of two, or reserved bits are set.
    pub fn new(attrs: &CqAttrs) -> Result<Self, InitError> {
        if attrs.comp_mask | attrs.flags != 0 {
            return Err(InitError::Reserved(attrs.comp_mask | attrs.flags));
        }
        check_entries(&[attrs.num_entries])?;
        Ok(Self {
            comp_mask: 0,
            entry_size: attrs.entry_size,
            num_entries: attrs.num_entries,
            queue_mask: attrs.num_entries - 1,
            queue_size_shift: attrs.num_entries.trailing_zeros(),
            cc: 0,
            phase: 1,
            buf: attrs.buffer,
            db: null_mut(),
        })
    }
}
