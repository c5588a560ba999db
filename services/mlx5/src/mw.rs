//! Memory windows: a peer's temporary rights to a part of a region.
//!
//! The side that owns the memory binds the window with a work request on its send queue; the peer uses the key. Every
//! bind makes a new key, which differs from the previous one in its low byte, the tag. A type-2 window belongs to the
//! queue pair that bound it. Only a work request on that queue pair, or the peer's SEND with invalidate on that
//! connection, can free it.
//!
//! [`Window::bind`], [`Window::invalidate`] and [`Window::unbind`] check a change without making it. The caller posts
//! the change, then commits it:
//!
//! ```
//! # use mlx5::{device::Mr, mw::{Range, Window, WindowError}, qp::QueuePair, sq::Flags, wire::MkeyAccess};
//! # fn grant(window: &mut Window, qp: &mut QueuePair<u64>, mr: &Mr) -> Result<u32, Box<dyn std::error::Error>> {
//! let range = Range { addr: mr.addr, length: 4096, zero_based: true };
//! let bind = window.bind(qp, mr, range, MkeyAccess::REMOTE_WRITE)?;
//! let mut batch = qp.send().batch();
//! batch.post(1, Flags::SIGNALED, &bind.post())?;
//! // ... a message that carries the key to the peer can go into the same batch: the fence after the bind orders
//! // the two.
//! batch.ring();
//! Ok(bind.commit())
//! # }
//! ```
//!
//! A window keeps its region registered until it is bound to another region or dropped. Dropping a window makes its key
//! invalid: a peer that uses the key gets a remote access error.

use crate::device::{Access, Device, DeviceError, Mr, Pd, RawWindow};
use crate::qp::QueuePair;
use crate::wire::MkeyAccess;
use crate::wqe::{Bind, BindError, Op, Umr, UmrKind, WindowType, WorkRequest};

/// A range of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes: 1 to 2^31.
    pub length: u64,
    /// The peer addresses bytes by their offset in the window instead of their address. Type 2 only.
    pub zero_based: bool,
}

/// Why a change to a window was refused. Nothing was changed or posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// The region or the queue pair belongs to another protection domain.
    #[error("the {what} and the window belong to different protection domains")]
    OtherDomain {
        /// The region or the queue pair.
        what: &'static str,
    },
    /// Only the queue pair that bound a type-2 window can free it.
    #[error("queue pair {qpn:#08x} cannot free a window that {owner:#08x} bound")]
    OtherQueuePair {
        /// The queue pair of the change.
        qpn: u32,
        /// The queue pair that bound the window.
        owner: u32,
    },
    /// A bound type-2 window must be freed before the next bind.
    #[error("the window is still bound; invalidate it first")]
    StillBound,
    /// The window is not bound: it was never bound, or has already been freed.
    #[error("the window is not bound, or was already invalidated")]
    NotBound,
    /// The key is not the window's key.
    #[error("the window has the key {current:#010x}, not {rkey:#010x}")]
    OtherKey {
        /// The key of the change.
        rkey: u32,
        /// The key of the window.
        current: u32,
    },
    /// Only a bind of zero bytes frees a type-1 window; its key cannot be invalidated.
    #[error("a type-1 window cannot be invalidated; unbind it")]
    Type1,
    /// The range is not inside the region.
    #[error("{length} bytes at {addr:#x} are not inside the region")]
    OutOfRegion {
        /// Address of the first byte.
        addr: u64,
        /// Length in bytes.
        length: u64,
    },
    /// The region was registered without the right to bind windows.
    #[error("the region does not allow windows; register the region with Access::MW_BIND")]
    RegionForbidsWindows,
    /// The window would have more rights than the region: a peer may write only if the owner may.
    #[error("the window would allow writes that the region forbids; register the region with Access::LOCAL_WRITE")]
    RegionForbidsWrites,
    /// The bind cannot be built.
    #[error(transparent)]
    Bind(#[from] BindError),
}

#[derive(Debug)]
enum State {
    /// Not bound. The region of the last bind stays registered until the work request that frees the window has
    /// completed.
    Free { freed_by: Option<u32>, region: Option<Mr> },
    /// Bound by a queue pair.
    Bound { qpn: u32, region: Mr },
}

/// A memory window.
#[derive(Debug)]
pub struct Window {
    raw: RawWindow,
    /// The key of the current or the last bind.
    rkey: u32,
    // Declared after `raw`, so that the window goes before the region.
    state: State,
}

impl Window {
    /// Allocates an unbound window.
    pub fn alloc(device: &dyn Device, pd: &Pd, window: WindowType) -> Result<Self, DeviceError> {
        let raw = device.alloc_window(pd, window)?;
        Ok(Self { rkey: raw.rkey, raw, state: State::Free { freed_by: None, region: None } })
    }

    /// Returns the key for the peer, while the window is bound.
    pub fn rkey(&self) -> Option<u32> {
        matches!(self.state, State::Bound { .. }).then_some(self.rkey)
    }

    /// Returns the type.
    pub fn kind(&self) -> WindowType {
        self.raw.window
    }

    /// Prepares to bind the window to a range of `mr`, for peers of `qp` if it is of type 2.
    pub fn bind<T, R>(
        &mut self,
        qp: &QueuePair<T, R>,
        mr: &Mr,
        range: Range,
        access: MkeyAccess,
    ) -> Result<WindowChange<'_>, WindowError> {
        self.check_domains(qp, Some(mr))?;
        if self.raw.window == WindowType::Type2 {
            match self.state {
                State::Bound { .. } => return Err(WindowError::StillBound),
                // Until the work request that frees the window has completed, only later work requests of the same
                // queue pair are ordered after it.
                State::Free { freed_by: Some(owner), .. } if owner != qp.qpn() => {
                    return Err(WindowError::OtherQueuePair { qpn: qp.qpn(), owner });
                }
                State::Free { .. } => {}
            }
        }
        let Range { addr, length, zero_based } = range;
        let (window, rkey, tag) = (self.raw.window, self.rkey, next_tag(self.rkey));
        let umr = Umr::bind(&Bind { window, rkey, tag, lkey: mr.lkey, addr, length, access, zero_based }, qp.qpn())?;
        let within = addr >= mr.addr && addr - mr.addr <= mr.length && length <= mr.length - (addr - mr.addr);
        if !within {
            return Err(WindowError::OutOfRegion { addr, length });
        }
        if !mr.access.has(Access::MW_BIND) {
            return Err(WindowError::RegionForbidsWindows);
        }
        if !mr.access.for_window().has(access) {
            return Err(WindowError::RegionForbidsWrites);
        }
        let after = State::Bound { qpn: qp.qpn(), region: mr.clone() };
        Ok(WindowChange { umr, kind: UmrKind::Bind, rkey: with_tag(rkey, tag), after, window: self })
    }

    /// Prepares to invalidate the key. Type 2 only, on the queue pair that bound the window.
    pub fn invalidate<T, R>(&mut self, qp: &QueuePair<T, R>) -> Result<WindowChange<'_>, WindowError> {
        if self.raw.window == WindowType::Type1 {
            return Err(WindowError::Type1);
        }
        self.check_owner(qp)?;
        let after = self.freed(Some(qp.qpn()));
        Ok(WindowChange {
            umr: Umr::local_inv(self.rkey),
            kind: UmrKind::LocalInv,
            rkey: self.rkey,
            after,
            window: self,
        })
    }

    /// Prepares to free the window with a bind of zero bytes, which invalidates the key.
    pub fn unbind<T, R>(&mut self, qp: &QueuePair<T, R>) -> Result<WindowChange<'_>, WindowError> {
        self.check_owner(qp)?;
        let tag = next_tag(self.rkey);
        let umr = Umr::unbind(self.raw.window, self.rkey, tag);
        let after = self.freed(Some(qp.qpn()));
        Ok(WindowChange { umr, kind: UmrKind::Bind, rkey: with_tag(self.rkey, tag), after, window: self })
    }

    /// Records that a peer's message invalidated `rkey`, as its completion reports. The window is free at once.
    pub fn invalidated(&mut self, rkey: u32) -> Result<(), WindowError> {
        match self.state {
            State::Bound { .. } if self.raw.window == WindowType::Type1 => Err(WindowError::Type1),
            State::Bound { .. } if rkey != self.rkey => Err(WindowError::OtherKey { rkey, current: self.rkey }),
            State::Bound { .. } => {
                self.state = State::Free { freed_by: None, region: None };
                Ok(())
            }
            State::Free { .. } => Err(WindowError::NotBound),
        }
    }

    /// Records that the invalidation or unbind has completed: releases the region, and any queue pair may bind the
    /// window.
    pub fn mark_completed(&mut self) {
        if let State::Free { .. } = self.state {
            self.state = State::Free { freed_by: None, region: None };
        }
    }

    fn freed(&self, freed_by: Option<u32>) -> State {
        let region = match &self.state {
            State::Bound { region, .. } => Some(region.clone()),
            State::Free { region, .. } => region.clone(),
        };
        State::Free { freed_by, region }
    }

    fn check_domains<T, R>(&self, qp: &QueuePair<T, R>, mr: Option<&Mr>) -> Result<(), WindowError> {
        let domain = &self.raw.pd.handle;
        if !qp.pd().handle.same(domain) {
            return Err(WindowError::OtherDomain { what: "queue pair" });
        }
        match mr {
            Some(mr) if !mr.pd.handle.same(domain) => Err(WindowError::OtherDomain { what: "region" }),
            _ => Ok(()),
        }
    }

    fn check_owner<T, R>(&self, qp: &QueuePair<T, R>) -> Result<(), WindowError> {
        self.check_domains(qp, None)?;
        match self.state {
            State::Free { .. } => Err(WindowError::NotBound),
            State::Bound { qpn, .. } if self.raw.window == WindowType::Type2 && qpn != qp.qpn() => {
                Err(WindowError::OtherQueuePair { qpn: qp.qpn(), owner: qpn })
            }
            State::Bound { .. } => Ok(()),
        }
    }
}

fn next_tag(rkey: u32) -> u8 {
    (rkey as u8).wrapping_add(1)
}

fn with_tag(rkey: u32, tag: u8) -> u32 {
    rkey & !0xff | tag as u32
}

/// A change to a window that has been checked but not posted. Dropping it changes nothing.
#[derive(Debug)]
#[must_use = "post the change, then commit it"]
pub struct WindowChange<'w> {
    window: &'w mut Window,
    umr: Umr,
    kind: UmrKind,
    rkey: u32,
    after: State,
}

impl WindowChange<'_> {
    /// Returns the work request to post, on the queue pair that the change was prepared for.
    pub fn post(&self) -> WorkRequest<'static> {
        Op::Umr { umr: self.umr, kind: self.kind }
    }

    /// Returns the window's key after the change.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Records the change, once its work request has been posted and rung. Returns the key.
    pub fn commit(self) -> u32 {
        self.window.rkey = self.rkey;
        self.window.state = self.after;
        self.rkey
    }
}
