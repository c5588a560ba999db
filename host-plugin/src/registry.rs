//! The handles that NCCL and host API users get.
//!
//! A handle encodes a kind, a slot and a generation; it's not an address. The registry refuses a wrong or stale handle,
//! or one of another kind, without dereferencing it, and a closed handle never names a later object.
#![allow(unsafe_code)]

use crate::fault::{ErrorCounters, FailureFlag};
use parking_lot::Mutex;
use std::any::Any;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The kind of object that a handle names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// From `init`.
    Plugin = 1,
    /// From `listen`.
    Listen = 2,
    /// From `connect`.
    Coll = 3,
    /// From `regMrSym`.
    Window = 4,
    /// From `createContext`.
    Context = 5,
    /// A communicator of the host API.
    HostComm = 6,
    /// A window of the host API.
    HostWindow = 7,
    /// A context of the host API.
    HostContext = 8,
    /// From the RMA plugin's `init`.
    RmaPlugin = 9,
    /// From its `listen`.
    RmaListen = 10,
    /// From its `connect`.
    RmaComm = 11,
    /// From its `regMrSym`.
    RmaMemory = 12,
    /// From its `createContext`. The objects of this kind and those that follow are [`Owned`].
    RmaContext = 13,
    /// From a test.
    #[cfg(test)]
    Test = 14,
}

impl Kind {
    /// Returns the name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plugin => "plugin context",
            Self::Listen => "listen communicator",
            Self::Coll => "collective communicator",
            Self::Window => "memory handle",
            Self::Context => "GIN context",
            Self::HostComm => "communicator",
            Self::HostWindow => "window",
            Self::HostContext => "context",
            Self::RmaPlugin => "RMA plugin context",
            Self::RmaListen => "RMA listen communicator",
            Self::RmaComm => "RMA communicator",
            Self::RmaMemory => "RMA memory handle",
            Self::RmaContext => "RMA context",
            #[cfg(test)]
            Self::Test => "test's object",
        }
    }

    fn from_bits(bits: u64) -> Option<Self> {
        const NCCL: [Kind; 5] = [Kind::Plugin, Kind::Listen, Kind::Coll, Kind::Window, Kind::Context];
        const HOST: [Kind; 3] = [Kind::HostComm, Kind::HostWindow, Kind::HostContext];
        const RMA: [Kind; 5] = [Kind::RmaPlugin, Kind::RmaListen, Kind::RmaComm, Kind::RmaMemory, Kind::RmaContext];
        NCCL.into_iter().chain(HOST).chain(RMA).find(|kind| *kind as u64 == bits)
    }
}

/// A refused handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HandleError {
    /// The handle is NULL.
    #[error("the {} is NULL", .0.name())]
    Null(Kind),
    /// An open or closed handle of another kind.
    #[error("this is the handle of a {}, but the call expects a {}", .found.name(), .wanted.name())]
    WrongKind {
        /// The kind in the handle.
        found: Kind,
        /// The kind that the call takes.
        wanted: Kind,
    },
    /// The handle was closed, or this plugin didn't create it.
    #[error("{address:#x} is not an open {} of this library: it was closed, or another library made it", .wanted.name())]
    Unknown {
        /// The value passed.
        address: u64,
        /// The kind that the call takes.
        wanted: Kind,
    },
}

/// A handle has the kind in bits 0..4, the slot in 4..24, the generation in 24..62, and bit 62 set so that it's never a
/// small number.
const SLOT_BITS: u32 = 20;
const SLOT_SHIFT: u32 = 4;
const GENERATION_SHIFT: u32 = SLOT_SHIFT + SLOT_BITS;
const GENERATION_BITS: u32 = 62 - GENERATION_SHIFT;
/// Maximum number of open handles.
const PLACES: usize = 1 << SLOT_BITS;
const MARK: u64 = 1 << 62;

/// The process that has open handles; 0 if there is none. A process that it forks inherits the memory, and perhaps a
/// lock that another thread held, but not the threads behind the handles.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// In such a process, the one that has the handles; 0 elsewhere. Every call reads it.
static FORKED_FROM: AtomicU32 = AtomicU32::new(0);

/// Returns the process whose open handles this one inherited through `fork`; `None` in that process itself, or if it
/// had none open.
#[inline(always)]
pub fn forked_from() -> Option<u32> {
    let owner = FORKED_FROM.load(Ordering::Relaxed);
    (owner != 0).then_some(owner)
}

extern "C" fn forked() {
    FORKED_FROM.store(OWNER.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Notes that this process has open handles.
fn own() {
    static NOTICES_FORKS: OnceLock<()> = OnceLock::new();
    NOTICES_FORKS.get_or_init(|| {
        // Without memory for the handler this fails, and a forked process's calls aren't refused. That matters only to
        // programs that fork and break the rules, so this process may go on.
        // SAFETY: the handler stores a number. The library stays loaded (build.rs), so the handler does too.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
    OWNER.store(std::process::id(), Ordering::Relaxed);
}

/// Slots are in blocks that are never freed.
const BLOCK: usize = 1024;
static SLOTS: [OnceLock<Box<[Slot; BLOCK]>>; PLACES / BLOCK] = [const { OnceLock::new() }; PLACES / BLOCK];

/// A type of objects that one thread at a time uses, through [`with`].
///
/// # Safety
/// No other type, and no call of [`insert`], has this kind.
pub unsafe trait Owned: Send + 'static {
    /// The kind of their handles.
    const KIND: Kind;
}

/// One object at a time. NCCL's threads look up their contexts in each call on the RMA plugin's data path, and must not
/// share a cache line.
///
/// Every call compares its handle with the slot's before it waits, so a closed handle never waits for the object that
/// has the slot now. A call that uses an object from [`insert_owned`] may look up shared objects meanwhile; `shared` is
/// only held to clone, open and close.
#[derive(Default)]
#[repr(align(128))]
struct Slot {
    /// The open object's handle, or 0. While a thread uses an owned object, the handle has no kind.
    handle: AtomicU64,
    shared: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
    /// An owned object, for the thread that took the kind from its handle.
    owned: AtomicPtr<c_void>,
    flag: FailureFlag,
}

impl Slot {
    /// Returns whether this is the slot's open handle. The answer lasts while the object's lock is held.
    fn has(&self, handle: *const c_void) -> bool {
        let now = self.handle.load(Ordering::Acquire);
        let is_taken = || is_owned(kind_bits(handle)) && now == without_kind(handle as u64);
        now == handle as u64 || (now != 0 && is_taken())
    }

    /// Takes the owned object for this thread. Otherwise returns the word that the slot has instead of this handle.
    #[inline(always)]
    fn take(&self, handle: u64) -> Result<*mut c_void, u64> {
        self.handle.compare_exchange(handle, without_kind(handle), Ordering::Acquire, Ordering::Relaxed)?;
        Ok(self.owned.load(Ordering::Relaxed))
    }

    /// Takes the owned object once no other thread has it; returns `None` if the slot doesn't have this handle.
    #[cold]
    fn wait_and_take(&self, handle: u64) -> Option<*mut c_void> {
        loop {
            match self.take(handle) {
                Ok(object) => return Some(object),
                Err(now) if now == without_kind(handle) && now != 0 => std::thread::yield_now(),
                Err(_) => return None,
            }
        }
    }

    /// Calls `body` with the owned object, if the slot still has this handle.
    #[inline(always)]
    fn with<T: Owned, R>(&self, handle: *const c_void, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        struct Taken<'a>(&'a Slot, u64);
        impl Drop for Taken<'_> {
            fn drop(&mut self) {
                self.0.handle.store(self.1, Ordering::Release);
            }
        }
        if kind_bits(handle) != T::KIND as u64 {
            return None;
        }
        let object = match self.take(handle as u64) {
            Ok(object) => object,
            Err(_) => self.wait_and_take(handle as u64)?,
        };
        let _taken = Taken(self, handle as u64);
        // SAFETY: the object has the handle's kind, so `insert_owned` stored it as a `T`. Until `_taken` gives the kind
        // back, no other thread can take the object.
        Some(body(unsafe { &mut *object.cast::<T>() }))
    }

    fn open(&self, handle: *mut c_void) {
        self.flag.open(generation_of(handle));
        self.handle.store(handle as u64, Ordering::Release);
    }

    /// Closes the handle of an object that the caller has taken or locked.
    fn close(&self) {
        self.handle.store(0, Ordering::Release);
        self.flag.close();
    }
}

/// The slots that [`insert`] can take.
struct Free {
    slots: Vec<usize>,
    /// Slots from this one on were never taken.
    next: usize,
    generation: u64,
}

static FREE: Mutex<Free> = Mutex::new(Free { slots: Vec::new(), next: 0, generation: 0 });

fn slot_at(place: usize) -> Option<&'static Slot> {
    Some(&SLOTS[place / BLOCK].get()?[place % BLOCK])
}

/// Returns the slot of an open handle.
fn slot_of(handle: *const c_void, kind: Kind) -> Result<&'static Slot, HandleError> {
    let slot = slot_at(place(handle)).filter(|slot| kind_bits(handle) == kind as u64 && slot.has(handle));
    slot.ok_or_else(|| refusal(handle, kind))
}

/// Returns why a handle that isn't open is refused.
#[cold]
fn refusal(handle: *const c_void, wanted: Kind) -> HandleError {
    let address = handle as u64;
    match Kind::from_bits(kind_bits(handle)).filter(|_| address & MARK != 0 && address >> 63 == 0) {
        _ if address == 0 => HandleError::Null(wanted),
        Some(found) if found != wanted => HandleError::WrongKind { found, wanted },
        _ => HandleError::Unknown { address, wanted },
    }
}

fn kind_bits(handle: *const c_void) -> u64 {
    handle as u64 & 0xf
}

/// Returns whether objects of a kind are [`Owned`].
const fn is_owned(kind: u64) -> bool {
    kind >= Kind::RmaContext as u64
}

fn without_kind(handle: u64) -> u64 {
    handle & !0xf
}

/// Returns a handle's place among all open handles.
pub fn place(handle: *const c_void) -> usize {
    (handle as usize >> SLOT_SHIFT) & (PLACES - 1)
}

fn generation_of(handle: *const c_void) -> u64 {
    handle as u64 >> GENERATION_SHIFT & ((1 << GENERATION_BITS) - 1)
}

/// Creates a block in place: with 128 KiB, it may be too large for the caller's stack.
fn new_block() -> Box<[Slot; BLOCK]> {
    let slots: Box<[Slot]> = (0..BLOCK).map(|_| Slot::default()).collect();
    slots.try_into().unwrap_or_else(|_| unreachable!("the block has this size"))
}

/// Takes a free slot for a new handle.
fn take_slot(kind: Kind) -> Option<(&'static Slot, *mut c_void)> {
    let mut free = FREE.lock();
    let place = match free.slots.pop() {
        Some(place) => place,
        None if free.next < PLACES => {
            free.next += 1;
            free.next - 1
        }
        None => return None,
    };
    own();
    free.generation = (free.generation + 1) & ((1 << GENERATION_BITS) - 1);
    let slot = &SLOTS[place / BLOCK].get_or_init(new_block)[place % BLOCK];
    let handle = MARK | free.generation << GENERATION_SHIFT | (place as u64) << SLOT_SHIFT | kind as u64;
    Some((slot, handle as *mut c_void))
}

/// Makes the slot of a closed handle free.
fn free(handle: *const c_void) {
    let mut free = FREE.lock();
    free.slots.push(place(handle));
    if free.slots.len() == free.next {
        OWNER.store(0, Ordering::Relaxed);
    }
}

/// Creates a handle for an object that several threads may use; returns `None` if a million handles are open.
pub fn insert<T: Any + Send + Sync>(kind: Kind, object: Arc<T>) -> Option<*mut c_void> {
    let (slot, handle) = take_slot(kind)?;
    *slot.shared.lock() = Some(object);
    slot.open(handle);
    Some(handle)
}

/// Creates a handle for an object that one thread at a time uses, through [`with`]; returns `None` if a million handles
/// are open.
pub fn insert_owned<T: Owned>(object: T) -> Option<*mut c_void> {
    const { assert!(is_owned(T::KIND as u64)) };
    let (slot, handle) = take_slot(T::KIND)?;
    slot.owned.store(Box::into_raw(Box::new(object)).cast(), Ordering::Relaxed);
    slot.open(handle);
    Some(handle)
}

/// Calls `body` with the object behind a handle from [`insert_owned`]. Meanwhile no other thread can use or close it.
/// `body` may look up shared objects, but must not call `with`.
#[inline(always)]
pub fn with<T: Owned, R>(handle: *const c_void, body: impl FnOnce(&mut T) -> R) -> Result<R, HandleError> {
    slot_at(place(handle)).and_then(|slot| slot.with(handle, body)).ok_or_else(|| refusal(handle, T::KIND))
}

/// Does what [`with`] does for the open handle with a tag, if there is one, and passes it to `body`.
#[inline(always)]
pub fn with_tag<T: Owned, R>(of: u64, body: impl FnOnce(*mut c_void, &mut T) -> R) -> Option<R> {
    let slot = slot_at(of as usize & (PLACES - 1))?;
    let handle = (without_kind(slot.handle.load(Ordering::Relaxed)) | T::KIND as u64) as *mut c_void;
    (tag(handle) == of).then(|| slot.with(handle, |object| body(handle, object)))?
}

/// Returns the object behind a handle from [`insert`].
pub fn get<T: Any + Send + Sync>(handle: *const c_void, kind: Kind) -> Result<Arc<T>, HandleError> {
    let slot = slot_of(handle, kind)?;
    let object = slot.shared.lock().clone().filter(|_| slot.has(handle));
    object.and_then(|object| object.downcast().ok()).ok_or_else(|| refusal(handle, kind))
}

/// Closes a handle from [`insert`] and returns its object. If several threads close a handle, one of them succeeds.
pub fn remove<T: Any + Send + Sync>(handle: *const c_void, kind: Kind) -> Result<Arc<T>, HandleError> {
    let slot = slot_of(handle, kind)?;
    let mut open = slot.shared.lock();
    let object = open.take_if(|object| slot.has(handle) && (**object).is::<T>());
    let object = object.ok_or_else(|| refusal(handle, kind))?;
    slot.close();
    drop(open);
    free(handle);
    object.downcast().map_err(|_| refusal(handle, kind))
}

/// Closes a handle from [`insert_owned`] in the same way, and waits for the call that uses its object.
pub fn remove_owned<T: Owned>(handle: *const c_void) -> Result<T, HandleError> {
    let slot = slot_of(handle, T::KIND)?;
    let object = slot.wait_and_take(handle as u64).ok_or_else(|| refusal(handle, T::KIND))?;
    slot.owned.store(null_mut(), Ordering::Relaxed);
    slot.close();
    free(handle);
    // SAFETY: `insert_owned` made the pointer from a box of a `T`, whose kind the handle has. This call took it, and
    // removed it from the slot.
    Ok(*unsafe { Box::from_raw(object.cast::<T>()) })
}

/// The low bits of a handle that [`tag`] keeps.
pub const TAG_BITS: u32 = SLOT_BITS + 11;

/// Returns a handle without its kind, cut to [`TAG_BITS`]: it also tells the object from the next 2,047 that open.
pub fn tag(handle: *const c_void) -> u64 {
    handle as u64 >> SLOT_SHIFT & ((1 << TAG_BITS) - 1)
}

/// Sets a GIN context's error counters, which [`fault`] reads until the handle is removed.
///
/// # Errors
/// The handle was removed in the meantime.
pub fn set_error_counters(handle: *const c_void, counters: ErrorCounters) -> Result<(), HandleError> {
    let slot = slot_of(handle, Kind::Context)?;
    // `remove` takes the same lock, so the handle stays open until the counters are set.
    let _open = slot.shared.lock();
    if !slot.has(handle) {
        return Err(refusal(handle, Kind::Context));
    }
    slot.flag.set_counters(counters);
    Ok(())
}

/// Marks a context of this kind as failed for good.
pub fn raise_fault(handle: *const c_void, kind: Kind) {
    if let Ok(slot) = slot_of(handle, kind) {
        slot.flag.raise(generation_of(handle));
    }
}

/// Returns whether [`raise_fault`] or [`fault`] has found that a context failed, without reading its counters.
pub fn fault_is_known(handle: *const c_void, kind: Kind) -> bool {
    slot_of(handle, kind).is_ok_and(|slot| slot.flag.state(generation_of(handle)) == Some(true))
}

/// Returns true if a context has failed. Takes no lock: NCCL calls this from any thread while other threads use and
/// close contexts.
pub fn fault(handle: *const c_void, kind: Kind) -> Result<bool, HandleError> {
    let failed = slot_of(handle, kind)?.flag.failed(generation_of(handle));
    failed.ok_or_else(|| refusal(handle, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    // SAFETY: the only type of this kind, which only tests have.
    unsafe impl Owned for u8 {
        const KIND: Kind = Kind::Test;
    }

    #[test]
    fn wrong_and_stale_handles_are_refused() {
        let a = insert(Kind::Coll, Arc::new(7u32)).unwrap();
        assert_eq!(*get::<u32>(a, Kind::Coll).unwrap(), 7);
        assert!(matches!(
            get::<u32>(a, Kind::Context),
            Err(HandleError::WrongKind { found: Kind::Coll, wanted: Kind::Context })
        ));
        assert!(get::<u64>(a, Kind::Coll).is_err());
        assert!(remove::<u64>(a, Kind::Coll).is_err());
        assert_eq!(*remove::<u32>(a, Kind::Coll).unwrap(), 7);
        assert!(get::<u32>(a, Kind::Coll).is_err());
        assert!(remove::<u32>(a, Kind::Coll).is_err());
        let b = insert(Kind::Coll, Arc::new(8u32)).unwrap();
        assert_ne!(a, b, "a reused slot has another handle");
        assert!(get::<u32>(a, Kind::Coll).is_err());
        remove::<u32>(b, Kind::Coll).unwrap();
    }

    #[test]
    fn foreign_pointers_are_refused() {
        let local = 5u64;
        for bits in
            [0u64, 1, 5, 0xdead_beef, &raw const local as u64, u64::MAX, 1 << 62, (1 << 62) | 3, i64::MAX as u64]
        {
            assert!(get::<u32>(bits as *const c_void, Kind::Coll).is_err(), "{bits:#x}");
            assert!(fault(bits as *const c_void, Kind::Context).is_err(), "{bits:#x}");
            raise_fault(bits as *const c_void, Kind::Context);
        }
    }

    #[test]
    fn fault_is_sticky_and_ends_with_handle() {
        let a = insert(Kind::Context, Arc::new(1u8)).unwrap();
        assert_eq!(fault(a, Kind::Context), Ok(false));
        raise_fault(a, Kind::Context);
        raise_fault(a, Kind::Context);
        assert_eq!(fault(a, Kind::Context), Ok(true));
        remove::<u8>(a, Kind::Context).unwrap();
        assert!(fault(a, Kind::Context).is_err() && set_error_counters(a, ErrorCounters::Host(Vec::new())).is_err());
        raise_fault(a, Kind::Context);
        let b = insert(Kind::Context, Arc::new(1u8)).unwrap();
        assert_eq!(fault(b, Kind::Context), Ok(false));
        remove::<u8>(b, Kind::Context).unwrap();
    }

    #[test]
    fn each_of_thousands_of_contexts_has_its_own_fault() {
        let contexts: Vec<_> = (0..2 * BLOCK + 7).map(|n| insert(Kind::Context, Arc::new(n)).unwrap()).collect();
        contexts.iter().step_by(3).for_each(|handle| raise_fault(*handle, Kind::Context));
        for (n, handle) in contexts.iter().enumerate() {
            assert_eq!(fault(*handle, Kind::Context), Ok(n % 3 == 0), "context {n}");
            assert_eq!(*remove::<usize>(*handle, Kind::Context).unwrap(), n);
        }
    }

    #[test]
    fn refusals_name_the_kinds_of_handle() {
        let listen = insert(Kind::Listen, Arc::new(1u8)).unwrap();
        let text = |handle, wanted| get::<u8>(handle, wanted).unwrap_err().to_string();
        assert_eq!(text(std::ptr::null_mut(), Kind::Window), "the memory handle is NULL");
        let wrong = "this is the handle of a listen communicator, but the call expects a GIN context";
        assert_eq!(text(listen, Kind::Context), wrong);
        remove::<u8>(listen, Kind::Listen).unwrap();
        let closed = text(listen, Kind::Listen);
        assert_eq!(closed.split_once(": ").unwrap().1, "it was closed, or another library made it");
        assert!(closed.starts_with(&format!("{:#x} is not an open listen communicator", listen as u64)), "{closed}");
        let names = [Kind::Plugin, Kind::Coll].map(Kind::name);
        assert_eq!(names, ["plugin context", "collective communicator"]);
    }

    #[test]
    fn closed_or_forged_handle_never_names_or_waits_for_the_object_in_its_place() {
        let closed = insert(Kind::RmaMemory, Arc::new(1u8)).unwrap();
        remove::<u8>(closed, Kind::RmaMemory).unwrap();
        // Other tests take places too.
        let mut handles = vec![insert_owned(2u8).unwrap() as usize];
        while place(handles[handles.len() - 1] as *const c_void) != place(closed) {
            handles.push(insert_owned(2u8).unwrap() as usize);
        }
        let (ended, end) = std::sync::mpsc::channel();
        let closed = closed as usize;
        std::thread::spawn(move || {
            let (open, stale) = (handles[handles.len() - 1] as *const c_void, closed as *const c_void);
            let forged = (closed ^ Kind::RmaMemory as usize ^ Kind::Test as usize) as *const c_void;
            let refused = |_: &mut u8| {
                assert!(get::<u8>(stale, Kind::RmaMemory).is_err() && remove::<u8>(stale, Kind::RmaMemory).is_err());
                assert!(with(forged, |_: &mut u8| ()).is_err());
                assert!(remove_owned::<u8>(forged).is_err() && fault(forged, Kind::Test).is_err());
                assert_eq!(with_tag(tag(stale), |_, _: &mut u8| ()), None);
                let of_context = (open as usize ^ Kind::Test as usize ^ Kind::Context as usize) as *const c_void;
                assert!(fault(of_context, Kind::Context).is_err(), "another kind while the object is taken");
                assert_eq!(fault(open, Kind::Test), Ok(false));
            };
            with(open, refused).unwrap();
            let found = |handle, object: &mut u8| (handle, *object);
            assert_eq!(with_tag(tag(open), found), Some((open.cast_mut(), 2)));
            for handle in handles {
                remove_owned::<u8>(handle as *const c_void).unwrap();
            }
            ended.send(()).unwrap();
        });
        ferrogin_test_support::wait::receive("refusals", &end);
    }

    #[test]
    fn handle_is_removed_by_one_of_many_threads() {
        let handle = insert(Kind::Plugin, Arc::new(3u16)).unwrap() as usize;
        let threads: Vec<_> = (0..8)
            .map(|_| std::thread::spawn(move || remove::<u16>(handle as *const c_void, Kind::Plugin).is_ok()))
            .collect();
        assert_eq!(threads.into_iter().map(|t| t.join().unwrap()).filter(|won| *won).count(), 1);
    }
}
