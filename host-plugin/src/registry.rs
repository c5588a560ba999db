//! The handles that NCCL and host API users get.
//!
//! A handle encodes a kind, a slot and a generation; it's not an address. The registry refuses a wrong or stale handle, or one of another
//! kind, without dereferencing it, and a closed handle never names a later object.

use crate::fault::{ErrorCounter, FailureFlag};
use std::any::Any;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

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
    /// From its `createContext`.
    RmaContext = 13,
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
        }
    }

    /// Returns true if handles of this kind have a failure flag.
    fn has_flag(self) -> bool {
        matches!(self, Self::Context | Self::RmaContext)
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

/// A handle has the kind in bits 0..4, the slot in 4..24, the generation in 24..62, and bit 62 set so that it's never a small number.
const SLOT_BITS: u32 = 20;
const SLOT_SHIFT: u32 = 4;
const GENERATION_SHIFT: u32 = SLOT_SHIFT + SLOT_BITS;
const GENERATION_BITS: u32 = 62 - GENERATION_SHIFT;
/// Maximum number of open handles.
pub const PLACES: usize = 1 << SLOT_BITS;
const MARK: u64 = 1 << 62;

struct Entry {
    generation: u64,
    kind: Kind,
    object: Box<dyn Any + Send>,
}

/// The process that has open handles; 0 if there is none. A process that it forks inherits the memory, and perhaps a lock that another
/// thread held, but not the threads behind the handles.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Returns the process whose open handles this one inherited through `fork`; `None` in that process itself, or if it had none open.
pub fn forked_from() -> Option<u32> {
    let owner = OWNER.load(Ordering::Relaxed);
    (owner != 0 && owner != process()).then_some(owner)
}

/// This process's id, 0 if not known yet. Every call on the RMA plugin's data path needs it, and getpid is a system call.
static PROCESS: AtomicU32 = AtomicU32::new(0);

extern "C" fn forget_process() {
    PROCESS.store(0, Ordering::Relaxed);
}

#[allow(unsafe_code)]
fn process() -> u32 {
    let known = PROCESS.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: the handler stores a number. The library stays loaded (build.rs), so the handler does too.
    static FORGETS: LazyLock<bool> =
        LazyLock::new(|| unsafe { libc::pthread_atfork(None, None, Some(forget_process)) } == 0);
    let id = std::process::id();
    if *FORGETS {
        PROCESS.store(id, Ordering::Relaxed);
    }
    id
}

/// Objects and the contexts' failure flags are in blocks that are never freed. [`fault`] takes no lock, and [`with`] only its slot's:
/// NCCL's threads look up their contexts in each call on the RMA plugin's data path, and must not share a cache line.
const BLOCK: usize = 1024;
type Blocks<T> = [OnceLock<Box<[T]>>; PLACES / BLOCK];
static SLOTS: Blocks<Slot> = [const { OnceLock::new() }; PLACES / BLOCK];
static FLAGS: Blocks<FailureFlag> = [const { OnceLock::new() }; PLACES / BLOCK];

#[derive(Default)]
#[repr(align(128))]
struct Slot(Mutex<Option<Entry>>);

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Option<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

fn in_block<T>(blocks: &'static Blocks<T>, slot: usize) -> Option<&'static T> {
    blocks.get(slot / BLOCK)?.get()?.get(slot % BLOCK)
}

/// Like `in_block`, but allocates the block if needed.
fn or_allocate<T: Default>(blocks: &'static Blocks<T>, slot: usize) -> &'static T {
    &blocks[slot / BLOCK].get_or_init(|| (0..BLOCK).map(|_| T::default()).collect())[slot % BLOCK]
}

fn flag(slot: usize) -> Option<&'static FailureFlag> {
    in_block(&FLAGS, slot)
}

fn parse(handle: *const c_void, wanted: Kind) -> Result<(usize, u64), HandleError> {
    let bits = handle as u64;
    if bits == 0 {
        return Err(HandleError::Null(wanted));
    }
    let unknown = HandleError::Unknown { address: bits, wanted };
    if bits & MARK == 0 || bits >> 63 != 0 {
        return Err(unknown);
    }
    let slot = place(handle);
    let generation = bits >> GENERATION_SHIFT & ((1 << GENERATION_BITS) - 1);
    match Kind::from_bits(bits & 0xf) {
        Some(kind) if kind == wanted => Ok((slot, generation)),
        Some(found) => Err(HandleError::WrongKind { found, wanted }),
        None => Err(unknown),
    }
}

/// Creates a handle for an object that several threads may use; returns `None` if a million handles are open.
pub fn insert<T: Any + Send + Sync>(kind: Kind, object: Arc<T>) -> Option<*mut c_void> {
    insert_owned(kind, object)
}

/// Creates a handle for an object that one thread at a time uses, through [`with`]; returns `None` if a million handles are open.
pub fn insert_owned<T: Any + Send>(kind: Kind, object: T) -> Option<*mut c_void> {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = match free.slots.pop() {
        Some(slot) => slot,
        None if free.next < PLACES => {
            free.next += 1;
            free.next - 1
        }
        None => return None,
    };
    OWNER.store(std::process::id(), Ordering::Relaxed);
    free.generation = (free.generation + 1) & ((1 << GENERATION_BITS) - 1);
    let generation = free.generation;
    *or_allocate(&SLOTS, slot).lock() = Some(Entry { generation, kind, object: Box::new(object) });
    if kind.has_flag() {
        or_allocate(&FLAGS, slot).open(generation);
    }
    Some(handle_of(slot, generation, kind))
}

fn handle_of(slot: usize, generation: u64, kind: Kind) -> *mut c_void {
    (MARK | generation << GENERATION_SHIFT | (slot as u64) << SLOT_SHIFT | kind as u64) as *mut c_void
}

/// Calls `body` with the object behind a handle. Meanwhile no other thread can use or close it.
pub fn with<T: Any, R>(handle: *const c_void, kind: Kind, body: impl FnOnce(&mut T) -> R) -> Result<R, HandleError> {
    let (slot, generation) = parse(handle, kind)?;
    let unknown = HandleError::Unknown { address: handle as u64, wanted: kind };
    let mut entry = in_block(&SLOTS, slot).ok_or(unknown)?.lock();
    let entry = entry.as_mut().filter(|entry| entry.generation == generation && entry.kind == kind);
    Ok(body(entry.and_then(|entry| entry.object.downcast_mut()).ok_or(unknown)?))
}

/// Returns the object behind a handle from [`insert`].
pub fn get<T: Any + Send + Sync>(handle: *const c_void, kind: Kind) -> Result<Arc<T>, HandleError> {
    with(handle, kind, |object: &mut Arc<T>| object.clone())
}

/// Returns a handle's place among all handles, less than [`PLACES`].
pub fn place(handle: *const c_void) -> usize {
    (handle as usize >> SLOT_SHIFT) & (PLACES - 1)
}

/// Like [`with`], for the open object in a place; also passes `body` its handle.
pub fn with_at<T: Any, R>(place: usize, kind: Kind, body: impl FnOnce(&mut T, *mut c_void) -> R) -> Option<R> {
    let mut entry = in_block(&SLOTS, place)?.lock();
    let entry = entry.as_mut().filter(|entry| entry.kind == kind)?;
    let handle = handle_of(place, entry.generation, kind);
    entry.object.downcast_mut().map(|object| body(object, handle))
}

/// Closes a handle from [`insert`] and returns its object. If several threads close a handle, one of them succeeds.
pub fn remove<T: Any + Send + Sync>(handle: *const c_void, kind: Kind) -> Result<Arc<T>, HandleError> {
    remove_owned(handle, kind)
}

/// Closes a handle from [`insert_owned`] in the same way.
pub fn remove_owned<T: Any + Send>(handle: *const c_void, kind: Kind) -> Result<T, HandleError> {
    let (slot, generation) = parse(handle, kind)?;
    let unknown = HandleError::Unknown { address: handle as u64, wanted: kind };
    let mut entry = in_block(&SLOTS, slot).ok_or(unknown)?.lock();
    let is_open = |entry: &mut Entry| entry.generation == generation && entry.kind == kind && entry.object.is::<T>();
    let object = entry.take_if(is_open).ok_or(unknown)?.object;
    if let (true, Some(flag)) = (kind.has_flag(), flag(slot)) {
        flag.close();
    }
    drop(entry);
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    free.slots.push(slot);
    if free.slots.len() == free.next {
        OWNER.store(0, Ordering::Relaxed);
    }
    drop(free);
    object.downcast::<T>().map(|object| *object).map_err(|_| unknown)
}

/// Sets a GIN context's error counters, which [`fault`] reads until the handle is removed.
///
/// # Errors
/// The handle was removed in the meantime.
pub fn set_error_counters(handle: *const c_void, counters: Vec<ErrorCounter>) -> Result<(), HandleError> {
    let (slot, generation) = parse(handle, Kind::Context)?;
    let unknown = HandleError::Unknown { address: handle as u64, wanted: Kind::Context };
    // `remove` takes the same lock, so the handle stays open until the counters are set.
    let entry = in_block(&SLOTS, slot).ok_or(unknown)?.lock();
    let is_open = entry.as_ref().is_some_and(|entry| entry.generation == generation);
    flag(slot).filter(|_| is_open).ok_or(unknown)?.set_counters(counters);
    Ok(())
}

/// Marks a context of this kind as failed for good.
pub fn raise_fault(handle: *const c_void, kind: Kind) {
    if let Ok((slot, generation)) = parse(handle, kind)
        && let Some(flag) = flag(slot)
    {
        flag.raise(generation);
    }
}

/// Returns true if a context has failed. Takes no lock: NCCL calls this from any thread while other threads use and close contexts.
pub fn fault(handle: *const c_void, kind: Kind) -> Result<bool, HandleError> {
    let (slot, generation) = parse(handle, kind)?;
    let unknown = HandleError::Unknown { address: handle as u64, wanted: kind };
    flag(slot).and_then(|flag| flag.failed(generation)).ok_or(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(fault(a, Kind::Context).is_err() && set_error_counters(a, Vec::new()).is_err());
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
    fn handle_is_removed_by_one_of_many_threads() {
        let handle = insert(Kind::Plugin, Arc::new(3u16)).unwrap() as usize;
        let threads: Vec<_> = (0..8)
            .map(|_| std::thread::spawn(move || remove::<u16>(handle as *const c_void, Kind::Plugin).is_ok()))
            .collect();
        assert_eq!(threads.into_iter().map(|t| t.join().unwrap()).filter(|won| *won).count(), 1);
    }
}
