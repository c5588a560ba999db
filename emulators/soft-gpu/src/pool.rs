//! Memory pools: how much of a device's heap each pool's allocations use, and which devices may touch them. A pool
//! keeps no free memory, so reserved memory is always memory in use.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use crate::code::{Code, Outcome};
use crate::device;
use crate::guard::{In, Out, lock};
use crate::handle::{Table, fresh};
use crate::place::Place;
use crate::space::{self, Kind};
use crate::vmm::{Access, DESCRIPTOR, PINNED, READ_WRITE};

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

pub(crate) struct Pool {
    pub(crate) handle: usize,
    /// The ordinal of the device.
    pub(crate) device: usize,
    /// The limit in bytes.
    most: u64,
    numbers: Mutex<Numbers>,
}

struct Numbers {
    /// The devices that may touch the memory, a bit each.
    users: u64,
    /// Which freed memory may be reused: three flags that have no effect here.
    reuse: [c_int; 3],
    threshold: u64,
    used: u64,
    reserved_high: u64,
    used_high: u64,
}

static POOLS: Table<Pool> = Table::new();
/// The default and current pool of each device that was asked for one.
static OF_DEVICES: Mutex<BTreeMap<usize, [Arc<Pool>; 2]>> = Mutex::new(BTreeMap::new());

/// The numbers of the attributes.
const REUSE: [c_int; 3] = [1, 2, 3];
const THRESHOLD: c_int = 4;
const RESERVED: c_int = 5;
const RESERVED_HIGH: c_int = 6;
const USED: c_int = 7;
const USED_HIGH: c_int = 8;

impl Pool {
    fn create(device: usize, most: u64) -> Arc<Self> {
        let users = 1 << device;
        let numbers = Numbers { users, reuse: [1; 3], threshold: 0, used: 0, reserved_high: 0, used_high: 0 };
        let pool = Arc::new(Self { handle: fresh(), device, most, numbers: Mutex::new(numbers) });
        POOLS.insert(pool.handle, pool.clone());
        pool
    }

    /// Counts `bytes` as used if `place` finds room for them. It is passed the devices that may touch the memory, as
    /// bits.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, and those of `place`.
    pub(crate) fn take(&self, bytes: u64, place: impl FnOnce(u64) -> Outcome<u64>) -> Outcome<u64> {
        let mut numbers = lock(&self.numbers);
        let used = numbers.used.checked_add(bytes).filter(|used| *used <= self.most).ok_or(Code::OUT_OF_MEMORY)?;
        let address = place(numbers.users)?;
        numbers.used = used;
        numbers.used_high = numbers.used_high.max(used);
        numbers.reserved_high = numbers.reserved_high.max(used);
        Ok(address)
    }
}

/// Counts a pool's memory as free again, unless the pool has been destroyed.
pub(crate) fn give_back(pool: usize, bytes: u64) {
    if let Some(pool) = POOLS.get(pool) {
        lock(&pool.numbers).used -= bytes;
    }
}

/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) fn by_handle(handle: usize) -> Outcome<Arc<Pool>> {
    device::started()?;
    POOLS.get(handle).ok_or(Code::INVALID_VALUE)
}

/// Runs `change` on a device's default and current pool.
pub(crate) fn of_device<T>(number: c_int, change: impl FnOnce(&mut [Arc<Pool>; 2]) -> T) -> Outcome<T> {
    let ordinal = device::by_number(number)?.ordinal;
    let mut all = lock(&OF_DEVICES);
    Ok(change(all.entry(ordinal).or_insert_with(|| {
        let pool = Pool::create(ordinal, u64::MAX);
        [pool.clone(), pool]
    })))
}

api! {
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

    /// Sharing pools with other processes is not supported.
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

    /// The pool's allocations live until they are freed.
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

    /// Does nothing: pools keep no unused memory.
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

    /// The high-water marks can only be set to 0, which resets them to the current use.
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

    /// The pool's own device can't lose its access.
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
        let mut numbers = lock(&pool.numbers);
        numbers.users = numbers.users & !closed | opened;
        space::update_all(
            |entry| matches!(entry.kind, Kind::Pooled(owner) if owner == pool.handle),
            |entry| (entry.readers, entry.writers) = (numbers.users, numbers.users),
        );
        Ok(())
    }

    cuMemPoolGetAccess(out: Out<c_int>, pool: usize, place: In<Place>) {
        let pool = by_handle(pool)?;
        out.present()?;
        let device = place.get()?.device()?;
        out.set(if lock(&pool.numbers).users & (1 << device) != 0 { READ_WRITE } else { 0 })
    }
}
