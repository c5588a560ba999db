//! Memory keys (mkeys): regions, and windows that UMRs bind.

use std::collections::HashMap;

use mlx5::device::{Access, DeviceError};
use mlx5::wire::{MkeyAccess, MkeyContext, UmrFlags};
use mlx5::wqe::{Umr, WINDOW_OCTOWORDS, WindowType};

/// The access of a peer to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Right {
    Write,
    Read,
    Atomic,
}

impl Right {
    const fn of_region(self) -> Access {
        match self {
            Right::Write => Access::REMOTE_WRITE,
            Right::Read => Access::REMOTE_READ,
            Right::Atomic => Access::REMOTE_ATOMIC,
        }
    }

    const fn of_window(self) -> MkeyAccess {
        match self {
            Right::Write => MkeyAccess::REMOTE_WRITE,
            Right::Read => MkeyAccess::REMOTE_READ,
            Right::Atomic => MkeyAccess::ATOMIC,
        }
    }
}

/// The violated rule, for the card's log line.
pub(super) type Denied = &'static str;

/// The memory of a remote key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// The address in this process.
    Address(u64),
    /// A window whose translation has a wrong size: every access succeeds, and no byte moves.
    Untranslated,
}

#[derive(Debug)]
struct Region {
    pd: u32,
    tag: u8,
    addr: u64,
    len: u64,
    access: Access,
}

#[derive(Debug)]
struct Window {
    pd: u32,
    kind: WindowType,
    tag: u8,
    bound: Option<Bound>,
}

/// The range of a bound window.
#[derive(Debug, Clone, Copy)]
struct Bound {
    /// The queue pair that may use the window; for a type-1 window any of the protection domain.
    qpn: Option<u32>,
    /// The first address for peers.
    start: u64,
    len: u64,
    access: MkeyAccess,
    /// Index of the region.
    region: u32,
    address: u64,
    /// The translation entry has the size that the card requires.
    in_effect: bool,
}

#[derive(Debug)]
enum Key {
    Region(Region),
    Window(Window),
}

/// All keys of a card, by index: the upper 24 bits of a key. The low byte is its tag.
#[derive(Debug)]
pub(super) struct MkeyTable {
    keys: HashMap<u32, Key>,
    next: u32,
}

const INDICES: u32 = 1 << 24;
/// Index 1 is the key that ends a receive descriptor's list.
const FIRST: u32 = 0x10;

fn split(key: u32) -> (u32, u8) {
    (key >> 8, key as u8)
}

fn covers(start: u64, len: u64, addr: u64, bytes: u64) -> bool {
    addr >= start && addr.checked_add(bytes).is_some_and(|end| end <= start.saturating_add(len))
}

impl MkeyTable {
    /// The first number is different for each card, so that keys of other cards are noticed.
    pub(super) fn new(start: u32) -> Self {
        Self { keys: HashMap::new(), next: FIRST + start % (INDICES - FIRST) }
    }

    fn insert(&mut self, key: Key) -> Result<u32, DeviceError> {
        if self.keys.len() as u32 >= INDICES - FIRST - 1 {
            let (asked, max) = (self.keys.len() as u64 + 1, u64::from(INDICES - FIRST - 1));
            return Err(DeviceError::Limit { what: "memory keys", asked, max });
        }
        while self.keys.contains_key(&self.next) {
            self.next = Self::after(self.next);
        }
        let index = self.next;
        self.next = Self::after(index);
        self.keys.insert(index, key);
        Ok(index)
    }

    fn after(index: u32) -> u32 {
        if index + 1 == INDICES { FIRST } else { index + 1 }
    }

    pub(super) fn add_region(
        &mut self,
        pd: u32,
        addr: u64,
        len: u64,
        access: Access,
        tag: u8,
    ) -> Result<u32, DeviceError> {
        let index = self.insert(Key::Region(Region { pd, tag, addr, len, access }))?;
        Ok(index << 8 | u32::from(tag))
    }

    pub(super) fn add_window(&mut self, pd: u32, kind: WindowType, tag: u8) -> Result<u32, DeviceError> {
        let index = self.insert(Key::Window(Window { pd, kind, tag, bound: None }))?;
        Ok(index << 8 | u32::from(tag))
    }

    /// Removes a key. Windows on a removed region grant no access.
    pub(super) fn remove(&mut self, key: u32) {
        self.keys.remove(&split(key).0);
    }

    fn region(&self, pd: u32, key: u32) -> Result<&Region, Denied> {
        let (index, tag) = split(key);
        match self.keys.get(&index) {
            Some(Key::Region(region)) if region.tag != tag => Err("the key's tag is stale"),
            Some(Key::Region(region)) if region.pd != pd => Err("the region belongs to another protection domain"),
            Some(Key::Region(region)) => Ok(region),
            _ => Err("no memory region has this key"),
        }
    }

    /// Checks that this side may use `bytes` at `addr`.
    pub(super) fn local(&self, pd: u32, lkey: u32, addr: u64, bytes: u64, write: bool) -> Result<(), Denied> {
        let region = self.region(pd, lkey)?;
        if write && !region.access.has(Access::LOCAL_WRITE) {
            return Err("the region does not allow local writes");
        }
        if covers(region.addr, region.len, addr, bytes) { Ok(()) } else { Err("the range is not within the region") }
    }

    /// Checks that a peer of `qpn` may use `bytes` at `addr`, and returns their location.
    pub(super) fn remote(
        &self,
        pd: u32,
        qpn: u32,
        rkey: u32,
        addr: u64,
        bytes: u64,
        right: Right,
    ) -> Result<Target, Denied> {
        let (index, tag) = split(rkey);
        let window = match self.keys.get(&index) {
            Some(Key::Window(window)) => window,
            _ => {
                let region = self.region(pd, rkey)?;
                if !region.access.has(right.of_region()) {
                    return Err("the region was registered without this right for peers");
                }
                let within = covers(region.addr, region.len, addr, bytes);
                return if within { Ok(Target::Address(addr)) } else { Err("the range is not within the region") };
            }
        };
        if window.pd != pd {
            return Err("the window belongs to another protection domain");
        }
        let Some(bound) = &window.bound else { return Err("the window is not bound") };
        if window.tag != tag {
            return Err("the key's tag is stale: the window was bound again or invalidated since");
        }
        if bound.qpn.is_some_and(|owner| owner != qpn) {
            return Err("the window belongs to another queue pair");
        }
        if !bound.access.has(right.of_window()) {
            return Err("the window was bound without this right");
        }
        if !covers(bound.start, bound.len, addr, bytes) {
            return Err("the range is not within the window");
        }
        if !bound.in_effect {
            return Ok(Target::Untranslated);
        }
        if !matches!(self.keys.get(&bound.region), Some(Key::Region(_))) {
            return Err("the region under the window is gone");
        }
        Ok(Target::Address(bound.address + (addr - bound.start)))
    }

    /// Invalidates the window of `rkey`, on behalf of a peer's SEND with invalidate or of this side.
    pub(super) fn invalidate(&mut self, pd: u32, qpn: u32, rkey: u32, new_tag: Option<u8>) -> Result<(), Denied> {
        let (index, tag) = split(rkey);
        let Some(Key::Window(window)) = self.keys.get_mut(&index) else { return Err("no window has this key") };
        if window.pd != pd {
            return Err("the window belongs to another protection domain");
        }
        if window.kind == WindowType::Type1 {
            return Err("a type-1 window cannot be invalidated, only bound again");
        }
        let Some(bound) = &window.bound else { return Err("the window is not bound, or was invalidated before") };
        if window.tag != tag {
            return Err("the key's tag is stale: the window was bound again since");
        }
        if bound.qpn != Some(qpn) {
            return Err("the window belongs to another queue pair");
        }
        window.bound = None;
        window.tag = new_tag.unwrap_or(tag);
        Ok(())
    }

    /// Executes a UMR that queue pair `qpn` of `pd` posted.
    pub(super) fn umr(&mut self, pd: u32, qpn: u32, umr: &Umr) -> Result<(), Denied> {
        let (index, _) = split(umr.key);
        if umr.mkey.free & MkeyContext::FREE != 0 {
            if umr.ctrl.flags.has(UmrFlags::CHECK_QPN) {
                return self.invalidate(pd, qpn, umr.key, Some(umr.mkey.tag()));
            }
            let window = self.window(pd, index)?;
            (window.bound, window.tag) = (None, umr.mkey.tag());
            return Ok(());
        }
        let Some(klm) = umr.klm else { return Err("a bind without a translation entry") };
        if !umr.ctrl.flags.has(UmrFlags::INLINE) {
            return Err("the translation entry lacks the inline flag");
        }
        let region = self.region(pd, klm.mkey.get())?;
        if !region.access.has(Access::MW_BIND) {
            return Err("the region does not allow windows");
        }
        if !covers(region.addr, region.len, klm.address.get(), u64::from(klm.byte_count.get())) {
            return Err("the range is not within the region");
        }
        let access = umr.mkey.access_flags;
        let writes = access.has(MkeyAccess::REMOTE_WRITE) || access.has(MkeyAccess::ATOMIC);
        if writes && !region.access.has(Access::LOCAL_WRITE) {
            return Err("a window that peers write to needs a region with local write");
        }
        let owner = umr.mkey.qpn();
        let window = self.window(pd, index)?;
        if umr.ctrl.flags.has(UmrFlags::CHECK_FREE) && window.bound.is_some() {
            return Err("the window is bound already: invalidate it first");
        }
        let qpn = match window.kind {
            WindowType::Type1 => None,
            WindowType::Type2 if !umr.ctrl.flags.has(UmrFlags::CHECK_FREE) => {
                return Err("a type-2 window is bound without the check that it is free");
            }
            WindowType::Type2 => Some(owner),
        };
        window.tag = umr.mkey.tag();
        window.bound = Some(Bound {
            qpn,
            start: umr.mkey.start_addr.get(),
            len: umr.mkey.len.get().min(u64::from(klm.byte_count.get())),
            access,
            region: split(klm.mkey.get()).0,
            address: klm.address.get(),
            in_effect: umr.ctrl.klm_octowords.get() == WINDOW_OCTOWORDS,
        });
        Ok(())
    }

    fn window(&mut self, pd: u32, index: u32) -> Result<&mut Window, Denied> {
        match self.keys.get_mut(&index) {
            Some(Key::Window(window)) if window.pd != pd => Err("the window belongs to another protection domain"),
            Some(Key::Window(window)) => Ok(window),
            _ => Err("no window has this key"),
        }
    }
}
