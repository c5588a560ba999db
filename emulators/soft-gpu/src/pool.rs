//! Memory pools, and allocations in the order of a stream.
//!
//! Memory of a pool is memory of the device's heap. An allocation is there when the call returns, which is before the stream gets to it, and
//! freed memory is gone when the stream gets there. A pool keeps none: what it has reserved is what is in use.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::code::{Code, Outcome};
use crate::context::CONTEXTS;
use crate::guard::{In, Out, lock};
use crate::handle::{Table, fresh};
use crate::space::{self, Kind};
use crate::stream::{self, Stream};
use crate::vmm::{Access, DESCRIPTOR, PINNED, Place, READ_WRITE};
use crate::{device, heap};

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    kind: c_int,
    handle_types: c_int,
    place: Place,
    win32: *mut c_void,
    most: usize,
    usage: u16,
    reserved: [u8; 54],
}

const _: () = assert!(size_of::<Properties>() == 88 && std::mem::offset_of!(Properties, usage) == 32);

/// A pool. Its allocations keep it.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) handle: usize,
    /// The ordinal of the device.
    device: usize,
    /// Most bytes.
    most: u64,
    /// The other devices that may use the memory, a bit each.
    open_to: AtomicU64,
    numbers: Mutex<Numbers>,
}

/// Values of the attributes.
#[derive(Debug)]
struct Numbers {
    /// Which freed memory may be used again: three flags without an effect here.
    reuse: [c_int; 3],
    threshold: u64,
    used: u64,
    reserved_high: u64,
    used_high: u64,
}

static POOLS: Table<Pool> = Table::new();
/// The default pool and the current pool of each device that was asked for one.
static OF_DEVICES: Mutex<BTreeMap<usize, [Arc<Pool>; 2]>> = Mutex::new(BTreeMap::new());

/// Attributes by their numbers.
const REUSE: [c_int; 3] = [1, 2, 3];
const THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;
const RESERVED_HIGH: c_int = 6;
const USED: c_int = 7;
const USED_HIGH: c_int = 8;

impl Pool {
    fn create(device: usize, most: u64) -> Arc<Self> {
        let numbers = Numbers { reuse: [1; 3], threshold: 0, used: 0, reserved_high: 0, used_high: 0 };
        let pool =
            Arc::new(Self { handle: fresh(), device, most, open_to: AtomicU64::new(0), numbers: Mutex::new(numbers) });
        POOLS.insert(pool.handle, pool.clone());
        pool
    }

    /// Whether kernels of another device may touch the memory.
    pub(crate) fn is_open_to(&self, device: usize) -> bool {
        self.open_to.load(Ordering::Relaxed) & (1 << device) != 0
    }

    fn charge(&self, bytes: u64) -> Outcome {
        let mut numbers = lock(&self.numbers);
        let used = numbers.used.checked_add(bytes).filter(|used| *used <= self.most).ok_or(Code::OUT_OF_MEMORY)?;
        numbers.used = used;
        numbers.used_high = numbers.used_high.max(used);
        numbers.reserved_high = numbers.reserved_high.max(used);
        Ok(())
    }

    /// Counts memory as free again.
    pub(crate) fn discharge(&self, bytes: u64) {
        lock(&self.numbers).used -= bytes;
    }
}

/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`.
fn by_handle(handle: usize) -> Outcome<Arc<Pool>> {
    device::started()?;
    POOLS.get(handle).ok_or(Code::INVALID_VALUE)
}

/// The default pool and the current pool of a device, with `change` applied to them.
fn of_device<T>(number: c_int, change: impl FnOnce(&mut [Arc<Pool>; 2]) -> T) -> Outcome<T> {
    let ordinal = device::by_number(number)?.ordinal;
    let mut all = lock(&OF_DEVICES);
    Ok(change(all.entry(ordinal).or_insert_with(|| {
        let pool = Pool::create(ordinal, u64::MAX);
        [pool.clone(), pool]
    })))
}

fn allocate(out: Out<u64>, bytes: usize, pool: Option<Arc<Pool>>, stream: &Stream) -> Outcome {
    out.present()?;
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let context = CONTEXTS.get(stream.context).ok_or(Code::CONTEXT_IS_DESTROYED)?;
    let pool = match pool {
        Some(pool) => pool,
        None => of_device(context.device as c_int, |[_, current]| current.clone())?,
    };
    let len = bytes as u64;
    pool.charge(len)?;
    let placed = heap::allocate_on(pool.device, &context, len, heap::alignment(len), Kind::Pooled(pool.clone()));
    out.set(placed.inspect_err(|_| pool.discharge(len))?)
}

api! {
    cuMemAllocAsync(out: Out<u64>, bytes: usize, stream: usize) {
        let stream = stream::resolve(stream)?;
        allocate(out, bytes, None, &stream)
    }

    cuMemAllocFromPoolAsync(out: Out<u64>, bytes: usize, pool: usize, stream: usize) {
        let stream = stream::resolve(stream)?;
        allocate(out, bytes, Some(by_handle(pool)?), &stream)
    }

    /// Also for memory of cuMemAlloc.
    cuMemFreeAsync(address: u64, stream: usize) {
        let stream = stream::resolve(stream)?;
        if address == 0 {
            return Ok(());
        }
        let entry = space::find(address).filter(|entry| entry.start == address).ok_or(Code::INVALID_VALUE)?;
        if !space::update(address, entry.len, heap::is_allocated, |entry| entry.freed = true) {
            return Err(Code::INVALID_VALUE);
        }
        stream.give_always(Vec::new(), move |_| {
            // The end of the context may have released it.
            let _ = heap::release(address, |entry| entry.freed);
        });
        Ok(())
    }

    cuDeviceGetDefaultMemPool(out: Out<usize>, number: c_int) {
        out.present()?;
        out.set(of_device(number, |[default, _]| default.handle)?)
    }

    cuDeviceGetMemPool(out: Out<usize>, number: c_int) {
        out.present()?;
        out.set(of_device(number, |[_, current]| current.handle)?)
    }

    cuDeviceSetMemPool(number: c_int, pool: usize) {
        let ordinal = device::by_number(number)?.ordinal;
        let pool = by_handle(pool)?;
        if pool.device != ordinal {
            return Err(Code::INVALID_VALUE);
        }
        of_device(number, |[_, current]| *current = pool)
    }

    /// Pools of other processes are not supported.
    cuMemPoolCreate(out: Out<usize>, properties: In<Properties>) {
        device::started()?;
        out.present()?;
        let properties = properties.get()?;
        if properties.kind != PINNED || properties.reserved != [0; 54] || !properties.win32.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        if properties.handle_types & !(DESCRIPTOR | 8) != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if properties.handle_types != 0 || properties.usage != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let most = if properties.most == 0 { u64::MAX } else { properties.most as u64 };
        out.set(Pool::create(properties.place.device()?, most).handle)
    }

    /// Allocations stay until they are freed.
    cuMemPoolDestroy(handle: usize) {
        let pool = by_handle(handle)?;
        of_device(pool.device as c_int, |[default, current]| {
            if default.handle == handle {
                return Err(Code::INVALID_VALUE);
            }
            if current.handle == handle {
                *current = default.clone();
            }
            POOLS.remove(handle).map(drop).ok_or(Code::INVALID_VALUE)
        })?
    }

    /// The pool keeps no memory that is not in use.
    cuMemPoolTrimTo(pool: usize, _keep: usize) {
        by_handle(pool).map(drop)
    }

    cuMemPoolGetAttribute(pool: usize, number: c_int, out: Out<c_void>) {
        let pool = by_handle(pool)?;
        let numbers = lock(&pool.numbers);
        let (flag, word) = (out.cast::<c_int>(), out.cast::<u64>());
        match number {
            number if REUSE.contains(&number) => flag.set(numbers.reuse[number as usize - 1]),
            THRESHOLD => word.set(numbers.threshold),
            RESERVED | USED => word.set(numbers.used),
            RESERVED_HIGH => word.set(numbers.reserved_high),
            USED_HIGH => word.set(numbers.used_high),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// The highest numbers can only be set to 0, which is the number now.
    cuMemPoolSetAttribute(pool: usize, number: c_int, value: In<u8>) {
        let pool = by_handle(pool)?;
        let mut numbers = lock(&pool.numbers);
        if REUSE.contains(&number) {
            numbers.reuse[number as usize - 1] = c_int::from(value.cast::<c_int>().get()? != 0);
            return Ok(());
        }
        let word = value.cast::<u64>().get()?;
        let used = numbers.used;
        match (number, word) {
            (THRESHOLD, _) => numbers.threshold = word,
            (RESERVED_HIGH, 0) => numbers.reserved_high = used,
            (USED_HIGH, 0) => numbers.used_high = used,
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    /// The pool's own device keeps its access.
    cuMemPoolSetAccess(pool: usize, access: In<Access>, count: usize) {
        let pool = by_handle(pool)?;
        let (mut closed, mut opened) = (0, 0);
        for access in access.list(count)? {
            let device = access.place.device()?;
            match access.flags {
                READ_WRITE => opened |= 1 << device,
                0 if device != pool.device => closed |= 1 << device,
                _ => return Err(Code::INVALID_VALUE),
            }
        }
        pool.open_to.fetch_and(!closed, Ordering::SeqCst);
        pool.open_to.fetch_or(opened, Ordering::SeqCst);
        space::changed();
        Ok(())
    }

    cuMemPoolGetAccess(out: Out<c_int>, pool: usize, place: In<Place>) {
        let pool = by_handle(pool)?;
        out.present()?;
        let device = place.get()?.device()?;
        out.set(if device == pool.device || pool.is_open_to(device) { READ_WRITE } else { 0 })
    }
}
