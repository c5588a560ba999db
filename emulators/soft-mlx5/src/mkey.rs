//! Memory keys (mkeys): regions, and windows bound by UMRs.

use std::collections::HashMap;

use mlx5::device::{Access, DeviceError};
use mlx5::wire::{KlmSeg, MkeyAccess, MkeyContext, MkeyMask, UmrFlags};
use mlx5::wqe::{Umr, WINDOW_OCTOWORDS, WindowType};

/// A peer's kind of access to memory.
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

/// The violated rule, for the card's log.
pub(super) type Denied = &'static str;

/// The memory that a remote key refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// An address in this process.
    Address(u64),
    /// A window whose translation has the wrong size: every access succeeds, but no bytes move.
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

/// A window: its memory key's context, in which a UMR changes the fields named by its `mkey_mask`, and its translation
/// table.
#[derive(Debug, Clone, Copy)]
struct Window {
    pd: u32,
    kind: WindowType,
    tag: u8,
    /// A free key grants no access.
    free: bool,
    /// The queue pair that may use the window, or [`MkeyContext::ANY_QPN`].
    qpn: u32,
    /// The first address, as peers see it.
    start: u64,
    len: u64,
    access: MkeyAccess,
    translation: Translation,
}

impl Window {
    const fn new(pd: u32, kind: WindowType, tag: u8) -> Self {
        let (access, qpn) = (MkeyAccess::NONE, MkeyContext::ANY_QPN);
        Self { pd, kind, tag, free: true, qpn, start: 0, len: 0, access, translation: Translation::None }
    }

    /// Copies the fields of `context` that `mask` names.
    fn apply(&mut self, mask: MkeyMask, context: &MkeyContext) {
        if mask.has(MkeyMask::FREE) {
            self.free = context.free & MkeyContext::FREE != 0;
        }
        if mask.has(MkeyMask::MKEY) {
            self.tag = context.tag();
        }
        if mask.has(MkeyMask::QPN) {
            self.qpn = context.qpn();
        }
        if mask.has(MkeyMask::START_ADDR) {
            self.start = context.start_addr.get();
        }
        if mask.has(MkeyMask::LEN) {
            self.len = context.len.get();
        }
        for (bit, right) in RIGHTS {
            if mask.has(bit) {
                let others = MkeyAccess::new(self.access.bits() & !right.bits());
                self.access = others.with_if(right, context.access_flags.has(right));
            }
        }
    }

    /// Checks that the window is bound to `qpn` under the key with this tag.
    fn check_owner(&self, qpn: u32, tag: u8) -> Result<(), Denied> {
        if self.free {
            return Err("the window is not bound, or was invalidated before");
        }
        if self.tag != tag {
            return Err("the key's tag is stale: the window has been bound again");
        }
        if self.qpn != qpn {
            return Err("the window does not belong to this queue pair");
        }
        Ok(())
    }
}

/// A memory key's rights, each with its bit in the mask.
const RIGHTS: [(MkeyMask, MkeyAccess); 4] = [
    (MkeyMask::ACCESS_LOCAL_WRITE, MkeyAccess::LOCAL_WRITE),
    (MkeyMask::ACCESS_REMOTE_READ, MkeyAccess::REMOTE_READ),
    (MkeyMask::ACCESS_REMOTE_WRITE, MkeyAccess::REMOTE_WRITE),
    (MkeyMask::ACCESS_ATOMIC, MkeyAccess::ATOMIC),
];

/// The fields of the card's windows.
const KNOWN_FIELDS: MkeyMask = {
    let mut fields = MkeyMask::FREE.with(MkeyMask::MKEY).with(MkeyMask::QPN).with(MkeyMask::START_ADDR);
    fields = fields.with(MkeyMask::LEN);
    let mut right = 0;
    while right < RIGHTS.len() {
        fields = fields.with(RIGHTS[right].0);
        right += 1;
    }
    fields
};
const KNOWN_FLAGS: UmrFlags = UmrFlags::CHECK_QPN
    .with(UmrFlags::TRANSLATION_OFFSET)
    .with(UmrFlags::CHECK_FREE)
    .with(UmrFlags::CHECK_BOUND)
    .with(UmrFlags::INLINE);

/// A window's translation table.
#[derive(Debug, Clone, Copy)]
enum Translation {
    /// Never written.
    None,
    /// Written with the wrong size: no bytes move.
    WrongSize,
    /// `len` bytes at `address`, in the region with this index.
    Bytes { region: u32, address: u64, len: u64 },
}

#[derive(Debug)]
enum Key {
    Region(Region),
    Window(Window),
}

/// All of a card's keys by index, which is a key's upper 24 bits. The low byte is the tag.
#[derive(Debug)]
pub(super) struct MkeyTable {
    keys: HashMap<u32, Key>,
    next: u32,
}

const INDICES: u32 = 1 << 24;
/// The first index. The key that ends a receive descriptor's list has index 1.
const FIRST: u32 = 0x10;

fn split(key: u32) -> (u32, u8) {
    (key >> 8, key as u8)
}

fn covers(start: u64, len: u64, addr: u64, bytes: u64) -> bool {
    addr >= start && addr.checked_add(bytes).is_some_and(|end| end <= start.saturating_add(len))
}

impl MkeyTable {
    /// Makes an empty table. `start` differs between cards, so that another card's keys are noticed.
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
        let index = self.insert(Key::Window(Window::new(pd, kind, tag)))?;
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

    /// Checks that `qpn`'s peer may use `bytes` at `addr`, and returns where they are.
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
        if window.free {
            return Err("the window is not bound");
        }
        if window.tag != tag {
            return Err("the key's tag is stale: the window was bound again or invalidated since");
        }
        if window.qpn != MkeyContext::ANY_QPN && window.qpn != qpn {
            return Err("the window belongs to another queue pair");
        }
        if !window.access.has(right.of_window()) {
            return Err("the window was bound without this right");
        }
        if !covers(window.start, window.len, addr, bytes) {
            return Err("the range is not within the window");
        }
        let (region, address, len) = match window.translation {
            Translation::Bytes { region, address, len } => (region, address, len),
            Translation::None | Translation::WrongSize => return Ok(Target::Untranslated),
        };
        if !covers(window.start, len, addr, bytes) {
            return Err("the range is not within the window's translation");
        }
        if !matches!(self.keys.get(&region), Some(Key::Region(_))) {
            return Err("the region below the window was deregistered");
        }
        Ok(Target::Address(address + (addr - window.start)))
    }

    /// Invalidates the window of `rkey` for a peer's SEND with invalidate.
    pub(super) fn invalidate(&mut self, pd: u32, qpn: u32, rkey: u32) -> Result<(), Denied> {
        let (index, tag) = split(rkey);
        let window = self.window(pd, index)?;
        if window.kind == WindowType::Type1 {
            return Err("a type-1 window cannot be invalidated, only bound again");
        }
        window.check_owner(qpn, tag)?;
        (window.free, window.qpn) = (true, MkeyContext::ANY_QPN);
        Ok(())
    }

    /// Executes a UMR posted by queue pair `qpn` of `pd`. A UMR that fails changes nothing.
    pub(super) fn umr(&mut self, pd: u32, qpn: u32, umr: &Umr) -> Result<(), Denied> {
        let (index, tag) = split(umr.key);
        let (flags, mask) = (umr.ctrl.flags, umr.ctrl.mkey_mask);
        let mut window = *self.window(pd, index)?;
        if !KNOWN_FLAGS.has(flags) || flags.has(UmrFlags::CHECK_FREE.with(UmrFlags::CHECK_BOUND)) {
            return Err("the UMR has reserved flags, or both checks of the free state");
        }
        if !KNOWN_FIELDS.has(mask) {
            return Err("the UMR's mask names fields that this card's windows do not have");
        }
        if flags.has(UmrFlags::CHECK_FREE) && !window.free {
            return Err("the window is already bound: invalidate it first");
        }
        if flags.has(UmrFlags::CHECK_BOUND) && window.free {
            return Err("the window is not bound, and the UMR requires that it is");
        }
        if flags.has(UmrFlags::CHECK_QPN) {
            window.check_owner(qpn, tag)?;
        }
        window.apply(mask, &umr.mkey);
        if umr.mkey.free & MkeyContext::FREE == 0 {
            let Some(klm) = &umr.klm else { return Err("a bind without a translation entry") };
            if window.kind == WindowType::Type2 && !flags.has(UmrFlags::CHECK_FREE) {
                return Err("a type-2 window is bound without the check that it is free");
            }
            window.translation = self.translate(pd, umr, klm, window.access)?;
        }
        *self.window(pd, index)? = window;
        Ok(())
    }

    /// Returns the translation that a bind writes.
    fn translate(&self, pd: u32, umr: &Umr, klm: &KlmSeg, access: MkeyAccess) -> Result<Translation, Denied> {
        let flags = umr.ctrl.flags;
        if !flags.has(UmrFlags::INLINE) {
            return Err("the translation entry lacks the inline flag");
        }
        let offset = if flags.has(UmrFlags::TRANSLATION_OFFSET) { umr.ctrl.translation_offset.get() } else { 0 };
        if u32::from(offset) + u32::from(umr.ctrl.klm_octowords.get()) > u32::from(WINDOW_OCTOWORDS) {
            return Err("there are more translation entries than the window has");
        }
        let region = self.region(pd, klm.mkey.get())?;
        let (address, len) = (klm.address.get(), u64::from(klm.byte_count.get()));
        if !region.access.has(Access::MW_BIND) {
            return Err("the region does not allow windows");
        }
        if !covers(region.addr, region.len, address, len) {
            return Err("the range is not within the region");
        }
        let writes = access.has(MkeyAccess::REMOTE_WRITE) || access.has(MkeyAccess::ATOMIC);
        if writes && !region.access.has(Access::LOCAL_WRITE) {
            return Err("a window that peers write to needs a region with local write");
        }
        // rdma-core leaves the size in the context at 0.
        let size = umr.mkey.translations_octword_size.get();
        let right_size =
            umr.ctrl.klm_octowords.get() == WINDOW_OCTOWORDS && (size == 0 || size == u32::from(WINDOW_OCTOWORDS));
        let region = split(klm.mkey.get()).0;
        Ok(if right_size { Translation::Bytes { region, address, len } } else { Translation::WrongSize })
    }

    fn window(&mut self, pd: u32, index: u32) -> Result<&mut Window, Denied> {
        match self.keys.get_mut(&index) {
            Some(Key::Window(window)) if window.pd != pd => Err("the window belongs to another protection domain"),
            Some(Key::Window(window)) => Ok(window),
            _ => Err("no window has this key"),
        }
    }
}
