//! UMR work requests, which change a memory key: binding and freeing windows.

use super::SegmentWriter;
use crate::wire::{BLOCK_SEGMENTS, CtrlSeg, KlmSeg, MkeyAccess, MkeyContext, MkeyMask, SEGMENT, UmrCtrlSeg, UmrFlags};
use zerocopy::big_endian::{U32, U64};

/// Size in octowords of a bound window's translation entries: one KLM, padded to a block.
pub const WINDOW_OCTOWORDS: u16 = 4;

/// The most bytes that one KLM covers.
pub const MAX_BIND: u64 = 1 << 31;

/// The two kinds of memory windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WindowType {
    /// Belongs to a protection domain: every queue pair of the domain may use the key.
    Type1,
    /// Belongs to the queue pair that bound it.
    Type2,
}

/// The purpose of a UMR; the card's completions of both purposes have the same code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UmrKind {
    /// A bind, including a bind that frees the window (`IBV_WC_BIND_MW`).
    Bind,
    /// An invalidation by key (`IBV_WC_LOCAL_INV`).
    LocalInv,
}

/// The new range and rights of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// Type of the window.
    pub window: WindowType,
    /// The window's old key.
    pub rkey: u32,
    /// The low byte of the new key.
    pub tag: u8,
    /// Local key of the region.
    pub lkey: u32,
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes: 1 to 2^31.
    pub length: u64,
    /// Rights.
    pub access: MkeyAccess,
    /// The peer addresses bytes by their offset in the window instead of their address. Type 2 only.
    pub zero_based: bool,
}

/// Why a bind cannot be built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// A bind of zero bytes would free the window.
    #[error("a bind of zero bytes would free the window; use unbind or invalidate")]
    ZeroLength,
    /// The range is longer than one translation entry covers.
    #[error("a window of {length} bytes: the limit is 2^31 bytes; use several windows")]
    TooLong {
        /// Length of the range in bytes.
        length: u64,
    },
    /// A type-1 window cannot be zero-based.
    #[error("a type-1 window cannot be zero-based; use a type-2 window")]
    ZeroBasedType1,
}

/// A UMR, segment by segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Umr {
    /// The old key: the fourth word of the control segment.
    pub key: u32,
    /// The control segment of the UMR.
    pub ctrl: UmrCtrlSeg,
    /// The new values of the memory key.
    pub mkey: MkeyContext,
    /// The translation entry of a bind.
    pub klm: Option<KlmSeg>,
}

const FREE_STATE: MkeyMask = MkeyMask::FREE.with(MkeyMask::MKEY);
const PLACE_AND_RIGHTS: MkeyMask = MkeyMask::LEN
    .with(MkeyMask::START_ADDR)
    .with(MkeyMask::ACCESS_LOCAL_WRITE)
    .with(MkeyMask::ACCESS_REMOTE_READ)
    .with(MkeyMask::ACCESS_REMOTE_WRITE)
    .with(MkeyMask::ACCESS_ATOMIC);
const INLINE_AT_OFFSET: UmrFlags = UmrFlags::INLINE.with(UmrFlags::TRANSLATION_OFFSET);

pub(super) const CTRL_AT: usize = 1;
pub(super) const MKEY_AT: usize = CTRL_AT + size_of::<UmrCtrlSeg>() / SEGMENT;
pub(super) const KLM_AT: usize = MKEY_AT + size_of::<MkeyContext>() / SEGMENT;
const _: () = assert!(CTRL_AT * SEGMENT == size_of::<CtrlSeg>());

impl Umr {
    /// `ds` of a UMR with a translation entry.
    pub const BIND_SEGMENTS: usize = KLM_AT + BLOCK_SEGMENTS;
    /// `ds` of a UMR without a translation entry.
    pub const FREE_SEGMENTS: usize = KLM_AT;

    /// Binds a window on queue pair `qpn`. A type-2 window then belongs to that queue pair.
    pub fn bind(bind: &Bind, qpn: u32) -> Result<Self, BindError> {
        match bind.length {
            0 => return Err(BindError::ZeroLength),
            length if length > MAX_BIND => return Err(BindError::TooLong { length }),
            _ => {}
        }
        let (extra_flags, extra_mask, owner) = match bind.window {
            WindowType::Type1 if bind.zero_based => return Err(BindError::ZeroBasedType1),
            WindowType::Type1 => (UmrFlags::NONE, MkeyMask::NONE, MkeyContext::ANY_QPN),
            WindowType::Type2 => (UmrFlags::CHECK_FREE, MkeyMask::QPN, qpn),
        };
        let ctrl = UmrCtrlSeg {
            flags: INLINE_AT_OFFSET.with(extra_flags),
            klm_octowords: WINDOW_OCTOWORDS.into(),
            mkey_mask: FREE_STATE.with(PLACE_AND_RIGHTS).with(extra_mask),
            ..Default::default()
        };
        let mkey = MkeyContext {
            access_flags: bind.access,
            qpn_mkey: U32::new(owner << 8 | bind.tag as u32),
            start_addr: U64::new(if bind.zero_based { 0 } else { bind.addr }),
            len: bind.length.into(),
            ..Default::default()
        };
        // At most 2^31 bytes, checked above.
        let klm =
            KlmSeg { byte_count: U32::new(bind.length as u32), mkey: bind.lkey.into(), address: bind.addr.into() };
        Ok(Self { key: bind.rkey, ctrl, mkey, klm: Some(klm) })
    }

    /// Frees a window with a bind of zero bytes: the key becomes invalid, and its tag becomes `tag`.
    pub fn unbind(window: WindowType, rkey: u32, tag: u8) -> Self {
        let (extra_flags, extra_mask) = match window {
            WindowType::Type1 => (UmrFlags::NONE, MkeyMask::NONE),
            WindowType::Type2 => (UmrFlags::CHECK_QPN, MkeyMask::QPN),
        };
        let ctrl = UmrCtrlSeg {
            flags: INLINE_AT_OFFSET.with(extra_flags),
            mkey_mask: FREE_STATE.with(extra_mask),
            ..Default::default()
        };
        let mkey = MkeyContext {
            free: MkeyContext::FREE,
            qpn_mkey: U32::new(MkeyContext::ANY_QPN << 8 | tag as u32),
            ..Default::default()
        };
        Self { key: rkey, ctrl, mkey, klm: None }
    }

    /// Invalidates the type-2 window with this key (LOCAL_INV).
    pub fn local_inv(rkey: u32) -> Self {
        Self::unbind(WindowType::Type2, rkey, 0)
    }

    /// Returns `ds` of the UMR.
    #[inline(always)]
    pub(super) fn segments(&self) -> usize {
        if self.klm.is_some() { Self::BIND_SEGMENTS } else { Self::FREE_SEGMENTS }
    }

    #[inline(always)]
    pub(super) fn put(&self, sink: &mut impl SegmentWriter) {
        sink.put(CTRL_AT, self.ctrl);
        sink.put(MKEY_AT, self.mkey);
        if let Some(klm) = self.klm {
            sink.put(KLM_AT, klm);
            sink.put(KLM_AT + 1, [[0_u8; SEGMENT]; BLOCK_SEGMENTS - 1]);
        }
    }
}
