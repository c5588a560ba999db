//! Device memory allocations, immediate (cuMemAlloc) or stream-ordered (cuMemAllocAsync). Stream-ordered memory is
//! usable as soon as the call returns, before the stream gets there, and goes away when the stream reaches the free.

use std::ffi::c_int;
use std::sync::Arc;

use crate::check;
use crate::code::{Code, Outcome};
use crate::context::{self, CONTEXTS, Context};
use crate::device;
use crate::guard::{Out, lock};
use crate::heap::{Heap, UNIT, alignment};
use crate::pool::{self, Pool};
use crate::space::{self, Entry, Kind};
use crate::stream;

/// Allocates memory on a context's device and adds it to the table of ranges.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) fn allocate(context: &Context, bytes: u64, align: u64, kind: Kind) -> Outcome<u64> {
    place(Entry::new(0, bytes, kind, context.device, context.handle), align)
}

/// Allocates memory for the range on its device and adds the range to the table.
fn place(mut range: Entry, align: u64) -> Outcome<u64> {
    let device = device::by_ordinal(range.device)?;
    device.charge(range.len)?;
    let mut heap = lock(&device.heap);
    let taken = match &mut *heap {
        Some(heap) => Ok(heap),
        none => Heap::open(device.ordinal, device.heap_bytes()).map(|heap| none.insert(heap)),
    };
    let taken = taken.and_then(|heap| Ok(heap.base + heap.take(range.len, align).ok_or(Code::OUT_OF_MEMORY)?));
    range.start = taken.inspect_err(|_| device.discharge(range.len))?;
    let address = range.start;
    space::add(range);
    Ok(address)
}

/// Allocates from a pool, by default the current pool of the stream's device.
fn allocate_in_order(out: Out<u64>, bytes: usize, pool: Option<Arc<Pool>>, stream: usize) -> Outcome {
    let stream = stream::resolve(stream)?;
    out.present()?;
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let context = CONTEXTS.get(stream.context).ok_or(Code::CONTEXT_IS_DESTROYED)?;
    let pool = match pool {
        Some(pool) => pool,
        None => pool::of_device(context.device as c_int, |[_, current]| current.clone())?,
    };
    let mut range = Entry::new(0, bytes as u64, Kind::Pooled(pool.handle), pool.device, context.handle);
    out.set(pool.take(range.len, |users| {
        (range.readers, range.writers) = (users, users);
        place(range, alignment(bytes as u64))
    })?)
}

/// Removes a range made by [`allocate`] from the table and frees its memory.
pub(crate) fn release(start: u64, wanted: impl Fn(&Entry) -> bool) -> Outcome {
    let entry = space::remove(start, "freed memory", wanted).ok_or(Code::INVALID_VALUE)?;
    check::freed(start, entry.len);
    let device = device::by_ordinal(entry.device)?;
    device.discharge(entry.len);
    if let Kind::Pooled(pool) = &entry.kind {
        pool::give_back(*pool, entry.len);
    }
    if let Some(heap) = &mut *lock(&device.heap) {
        let at = start - heap.base;
        heap.give_back(at, entry.len);
    }
    Ok(())
}

/// True for memory from cuMemAlloc or a pool, until it is freed.
fn is_allocated(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::Heap | Kind::Pooled(_)) && !entry.freed
}

api! {
    cuMemAlloc_v2(out: Out<u64>, bytes: usize) {
        let context = context::current()?;
        out.present()?;
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        out.set(allocate(&context, bytes as u64, alignment(bytes as u64), Kind::Heap)?)
    }

    /// The pitch is a multiple of 512 bytes.
    cuMemAllocPitch_v2(out: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        let context = context::current()?;
        out.present()?;
        pitch.present()?;
        if ![4, 8, 16].contains(&element) || width == 0 || height == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(UNIT as usize).ok_or(Code::INVALID_VALUE)?;
        let bytes = row.checked_mul(height).ok_or(Code::OUT_OF_MEMORY)?;
        out.set(allocate(&context, bytes as u64, UNIT, Kind::Heap)?)?;
        pitch.set(row)
    }

    /// Like the driver, waits for the context's work before it frees memory that isn't from a pool.
    cuMemFree_v2(address: u64) {
        let context = context::current()?;
        if address == 0 {
            return Ok(());
        }
        let entry = space::find(address).filter(|entry| entry.start == address && is_allocated(entry)).ok_or(Code::INVALID_VALUE)?;
        match CONTEXTS.get(entry.context) {
            _ if matches!(entry.kind, Kind::Pooled(_)) => {}
            Some(owner) if owner.handle != context.handle => owner.wait(),
            _ => context.wait(),
        }
        release(address, is_allocated)?;
        context.check()
    }

    cuMemAllocAsync(out: Out<u64>, bytes: usize, stream: usize) {
        allocate_in_order(out, bytes, None, stream)
    }

    cuMemAllocFromPoolAsync(out: Out<u64>, bytes: usize, pool: usize, stream: usize) {
        allocate_in_order(out, bytes, Some(pool::by_handle(pool)?), stream)
    }

    /// Also takes memory from cuMemAlloc.
    cuMemFreeAsync(address: u64, stream: usize) {
        let stream = stream::resolve(stream)?;
        if address == 0 {
            return Ok(());
        }
        let entry = space::find(address).filter(|entry| entry.start == address).ok_or(Code::INVALID_VALUE)?;
        if !space::update(address, entry.len, is_allocated, |entry| entry.freed = true) {
            return Err(Code::INVALID_VALUE);
        }
        stream.give_always(Vec::new(), move |_| {
            // Destroying the context may already have released it.
            let _ = release(address, |entry| entry.freed);
        });
        Ok(())
    }

    cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let device = device::by_ordinal(context::current()?.device)?;
        free.present()?;
        total.present()?;
        free.set((device.memory() - device.used()) as usize)?;
        total.set(device.memory() as usize)
    }
}
