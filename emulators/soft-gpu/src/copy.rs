//! Copies and sets, on streams or synchronous.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::check;
use crate::code::{Code, Fault, Outcome};
use crate::context::{self, CONTEXTS};
use crate::device;
use crate::guard::{In, log};
use crate::memfd;
use crate::queue::Stream;
use crate::space::{self, Entry, Running};
use crate::stream;

/// The kind of memory that a copy's argument must be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Device,
    Host,
    Any,
}

/// Copies up to this size run on the caller's thread if the stream is idle.
const SHORT: usize = 64 << 10;

/// Copies bytes that kernels and the card may change meanwhile. Aligned words aren't torn.
///
/// # Safety
/// The backing of `to` is mapped and writable, and that of `from` mapped and readable, for `len` bytes each.
unsafe fn copy_bytes(to: u64, from: u64, len: usize) {
    let (to, from) = (memfd::backing(to), memfd::backing(from));
    fence(Ordering::SeqCst);
    if len <= 64 && (to | from | len as u64).is_multiple_of(8) {
        for at in (0..len as u64).step_by(8) {
            // SAFETY: the caller keeps both words mapped, and both addresses are multiples of 8.
            let from = unsafe { AtomicU64::from_ptr((from + at) as *mut u64) };
            // SAFETY: the caller keeps both words mapped, and both addresses are multiples of 8.
            let to = unsafe { AtomicU64::from_ptr((to + at) as *mut u64) };
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    } else {
        // SAFETY: the caller keeps both ranges mapped; the function allows them to overlap.
        unsafe { libc::memmove(to as *mut c_void, from as *const c_void, len) };
    }
    fence(Ordering::SeqCst);
}

/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`.
fn check(side: Side, device: usize, address: u64, len: usize, write: bool) -> Outcome {
    let len = len as u64;
    let known = space::touched(address, len);
    let valid = match side {
        Side::Device => space::allowed(device, address, len, write),
        Side::Host if space::find(address).is_some_and(|entry| entry.on_device()) => false,
        Side::Any if known => space::allowed(device, address, len, write),
        _ => address != 0 && address.checked_add(len).is_some(),
    };
    if valid { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

/// Checks again when the copy runs: the memory may be gone by then.
fn still(fault: &Fault, device: usize, address: u64, len: usize, write: bool) -> bool {
    let good = !space::touched(address, len as u64) || space::allowed(device, address, len as u64, write);
    if !good {
        log(format_args!(
            "a copy or set of {len} bytes at {address:#x} found memory that was freed or unmapped meanwhile"
        ));
        fault.set(Code::ILLEGAL_ADDRESS);
    }
    good
}

/// Rows of equal length: the address of the first, and the distances in bytes from row to row and from slice to slice.
#[derive(Clone, Copy)]
struct Rows {
    start: u64,
    pitch: u64,
    slice: u64,
}

/// Bytes per row, rows per slice, and slices.
#[derive(Clone, Copy)]
struct Extent {
    width: usize,
    height: usize,
    depth: usize,
}

impl Extent {
    const fn line(len: usize) -> Self {
        Self { width: len, height: 1, depth: 1 }
    }

    fn len(self) -> Outcome<usize> {
        let slice = self.width.checked_mul(self.height);
        slice.and_then(|slice| slice.checked_mul(self.depth)).ok_or(Code::INVALID_VALUE)
    }
}

impl Rows {
    const fn line(start: u64) -> Self {
        Self { start, pitch: 0, slice: 0 }
    }

    /// Returns the addresses of the rows.
    fn all(self, extent: Extent) -> impl Iterator<Item = u64> {
        let skip = |count: u64, bytes: u64| count.wrapping_mul(bytes);
        (0..extent.depth as u64).flat_map(move |slice| {
            let start = self.start.wrapping_add(skip(slice, self.slice));
            (0..extent.height as u64).map(move |row| start.wrapping_add(skip(row, self.pitch)))
        })
    }

    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    fn check(self, extent: Extent, side: Side, device: usize, write: bool) -> Outcome {
        // No row may wrap around the end of the address space.
        let skips = [(self.pitch, extent.height), (self.slice, extent.depth)];
        let end = skips.into_iter().try_fold(extent.width as u64, |end, (bytes, count)| {
            bytes.checked_mul(count as u64 - 1).and_then(|skip| skip.checked_add(end))
        });
        let span = end.filter(|span| self.start.checked_add(*span).is_some()).ok_or(Code::INVALID_VALUE)?;
        if !space::touched(self.start, span) {
            // All of it is the program's own memory, however many rows there are.
            return check(side, device, self.start, extent.width, write);
        }
        self.all(extent).try_for_each(|row| check(side, device, row, extent.width, write))
    }

    /// True if any part is the program's own unregistered memory.
    fn is_pageable(self, extent: Extent) -> bool {
        self.all(extent).any(|row| !space::covered(row, extent.width as u64, |_| true))
    }

    /// Checks again when the copy runs: the memory may be gone by then.
    fn still(self, extent: Extent, fault: &Fault, device: usize, write: bool) -> bool {
        self.all(extent).all(|row| still(fault, device, row, extent.width, write))
    }
}

fn copy(to: Rows, from: Rows, extent: Extent, sides: (Side, Side), handle: usize, asynchronous: bool) -> Outcome {
    let (context, stream) = stream::for_work(handle)?;
    let len = extent.len()?;
    if len == 0 {
        return Ok(());
    }
    let device = context.device;
    // Check the device's side first: its memory bounds the number of rows.
    let mut both = [(to, sides.0, true), (from, sides.1, false)];
    both.sort_by_key(|(_, side, _)| *side != Side::Device);
    both.iter().try_for_each(|(rows, side, write)| rows.check(extent, *side, device, *write))?;
    let (to_program, from_program) = (to.is_pageable(extent), from.is_pageable(extent));
    let idle = stream.last().is_none();
    if asynchronous && from_program && !to_program && !idle {
        // The call returns before the copy runs, and the program may then change its memory.
        let mut staged = vec![0u8; len];
        for (part, row) in staged.chunks_exact_mut(extent.width).zip(from.all(extent)) {
            // SAFETY: by the driver API's contract the program's memory is readable; the part is as long as the row.
            unsafe { copy_bytes(part.as_mut_ptr() as u64, row, extent.width) };
        }
        stream.give(move |fault| {
            let _running = Running::begin();
            if to.still(extent, fault, device, true) {
                to.all(extent).for_each(|row| check::host(row, extent.width, true));
                for (part, row) in staged.chunks_exact(extent.width).zip(to.all(extent)) {
                    // SAFETY: `still` found the range, which stays mapped while this counts as running; the part is as
                    // long as the row.
                    unsafe { copy_bytes(row, part.as_ptr() as u64, extent.width) };
                }
            }
        });
        return Ok(());
    }
    let work = move |fault: &Fault| {
        let _running = Running::begin();
        if to.still(extent, fault, device, true) && from.still(extent, fault, device, false) {
            to.all(extent).for_each(|row| check::host(row, extent.width, true));
            from.all(extent).for_each(|row| check::host(row, extent.width, false));
            for (to, from) in to.all(extent).zip(from.all(extent)) {
                // SAFETY: `still` found the ranges, which stay mapped while this counts as running. By the driver API's
                // contract, the program's memory stays mapped until the copy is done.
                unsafe { copy_bytes(to, from, extent.width) };
            }
        }
    };
    give(&stream, len, !asynchronous || from_program || to_program, work)
}

/// Submits work on `len` bytes to a stream. Work that is short or that the caller waits for runs on this thread if the
/// stream is idle.
fn give(stream: &Arc<Stream>, len: usize, waits: bool, work: impl FnOnce(&Fault) + Send + 'static) -> Outcome {
    let point = if waits || len <= SHORT { stream.run_or_give(work) } else { stream.give(work) };
    if !waits {
        return Ok(());
    }
    point.wait();
    stream.fault.check()
}

/// Zeros whole pages of device memory, if that is the value, by returning them to the system: memory that no program
/// uses costs nothing. Returns the range that is now zero.
fn cleared(start: u64, len: usize, value: u8) -> (u64, u64) {
    let page = memfd::page_size();
    let (from, to) = (start.next_multiple_of(page), (start + len as u64) / page * page);
    let whole = value == 0 && len >= SHORT && space::covered(start, len as u64, Entry::on_device);
    if whole && memfd::clear(from as usize, (to - from) as usize).is_ok() { (from, to) } else { (start, start) }
}

/// Sets `count` elements in each of `height` rows.
fn set<const N: usize>(
    to: Rows,
    value: [u8; N],
    (count, height): (usize, usize),
    handle: usize,
    asynchronous: bool,
) -> Outcome {
    let (context, stream) = stream::for_work(handle)?;
    let extent = Extent { width: count.checked_mul(N).ok_or(Code::INVALID_VALUE)?, height, depth: 1 };
    let len = extent.len()?;
    if len == 0 {
        return Ok(());
    }
    if !to.start.is_multiple_of(N as u64) || !to.pitch.is_multiple_of(N as u64) {
        return Err(Code::INVALID_VALUE);
    }
    let device = context.device;
    to.check(extent, Side::Device, device, true)?;
    let work = move |fault: &Fault| {
        let _running = Running::begin();
        if !to.still(extent, fault, device, true) {
            return;
        }
        to.all(extent).for_each(|row| check::host(row, extent.width, true));
        let one = value.iter().all(|byte| *byte == value[0]);
        let pattern = value.repeat(4096 / N);
        for row in to.all(extent) {
            if one {
                let (start, end) = cleared(row, extent.width, value[0]);
                for (from, to) in [(row, start), (end, row + extent.width as u64)] {
                    // SAFETY: `still` found the range, which stays mapped while this counts as running.
                    unsafe {
                        libc::memset(memfd::backing(from) as *mut c_void, i32::from(value[0]), (to - from) as usize)
                    };
                }
                continue;
            }
            for at in (0..extent.width).step_by(4096) {
                let part = pattern.as_ptr() as u64;
                // SAFETY: `still` found the range, which stays mapped while this counts as running; the pattern has
                // 4096 bytes.
                unsafe { copy_bytes(row + at as u64, part, (extent.width - at).min(4096)) };
            }
        }
    };
    give(&stream, len, !asynchronous, work)
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Rectangle {
    from: Corner,
    to: Corner,
    width: usize,
    height: usize,
}

/// One side of a [`Rectangle`].
#[repr(C)]
#[derive(Clone, Copy)]
struct Corner {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: usize,
    pitch: usize,
}

const _: () = assert!(size_of::<Rectangle>() == 128 && std::mem::offset_of!(Corner, pitch) == 48);

/// `CUmemorytype`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Cuboid {
    from: CuboidCorner,
    to: CuboidCorner,
    width: usize,
    height: usize,
    depth: usize,
}

/// One side of a [`Cuboid`].
#[repr(C)]
#[derive(Clone, Copy)]
struct CuboidCorner {
    x: usize,
    y: usize,
    z: usize,
    level_of_detail: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: usize,
    reserved: usize,
    pitch: usize,
    /// Rows from one slice to the next.
    height: usize,
}

const _: () = assert!(size_of::<Cuboid>() == 200 && std::mem::offset_of!(CuboidCorner, pitch) == 72);

impl Corner {
    /// Returns the rows, and the kind of memory they must be.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, and `CUDA_ERROR_NOT_SUPPORTED` for arrays.
    fn rows(&self, width: usize) -> Outcome<(Rows, Side)> {
        let (base, side) = match self.kind {
            HOST => (self.host, Side::Host),
            DEVICE => (self.device, Side::Device),
            UNIFIED => (self.device, Side::Any),
            ARRAY => return Err(Code::NOT_SUPPORTED),
            _ => return Err(Code::INVALID_VALUE),
        };
        let row = self.x.checked_add(width).ok_or(Code::INVALID_VALUE)?;
        // A pitch of 0 means that none is given: the rows are contiguous.
        let pitch = if self.pitch == 0 { row } else { self.pitch };
        if !(row..=device::MAX_PITCH).contains(&pitch) {
            return Err(Code::INVALID_VALUE);
        }
        let skip = self.y.checked_mul(pitch).and_then(|skip| skip.checked_add(self.x)).ok_or(Code::INVALID_VALUE)?;
        let start = base.checked_add(skip as u64).ok_or(Code::INVALID_VALUE)?;
        Ok((Rows { start, pitch: pitch as u64, slice: 0 }, side))
    }
}

impl CuboidCorner {
    /// Returns the rows of all slices, and the kind of memory they must be.
    ///
    /// # Errors
    /// Those of [`Corner::rows`]; `CUDA_ERROR_INVALID_VALUE` also for a level of detail or a nonzero reserved field.
    fn rows(&self, cuboid: &Cuboid) -> Outcome<(Rows, Side)> {
        if self.level_of_detail != 0 || self.reserved != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let Self { x, y, kind, host, device, array, pitch, .. } = *self;
        let (rows, side) = Corner { x, y, kind, host, device, array, pitch }.rows(cuboid.width)?;
        let needed = self.y.checked_add(cuboid.height).ok_or(Code::INVALID_VALUE)?;
        // A height of 0 means that none is given: the slices are contiguous.
        let height = if self.height == 0 { needed } else { self.height };
        if height < needed {
            return Err(Code::INVALID_VALUE);
        }
        let slice = rows.pitch.checked_mul(height as u64).ok_or(Code::INVALID_VALUE)?;
        let skip = slice.checked_mul(self.z as u64).ok_or(Code::INVALID_VALUE)?;
        let start = rows.start.checked_add(skip).ok_or(Code::INVALID_VALUE)?;
        Ok((Rows { start, slice, ..rows }, side))
    }
}

fn copy_rectangle(rectangle: In<Rectangle>, stream: usize, asynchronous: bool) -> Outcome {
    context::current()?;
    let rectangle = rectangle.get()?;
    let (from, from_side) = rectangle.from.rows(rectangle.width)?;
    let (to, to_side) = rectangle.to.rows(rectangle.width)?;
    let extent = Extent { width: rectangle.width, height: rectangle.height, depth: 1 };
    copy(to, from, extent, (to_side, from_side), stream, asynchronous)
}

fn copy_cuboid(cuboid: In<Cuboid>, stream: usize, asynchronous: bool) -> Outcome {
    context::current()?;
    let cuboid = cuboid.get()?;
    let (from, from_side) = cuboid.from.rows(&cuboid)?;
    let (to, to_side) = cuboid.to.rows(&cuboid)?;
    let extent = Extent { width: cuboid.width, height: cuboid.height, depth: cuboid.depth };
    copy(to, from, extent, (to_side, from_side), stream, asynchronous)
}

fn copy_line(to: u64, from: u64, len: usize, sides: (Side, Side), stream: usize, asynchronous: bool) -> Outcome {
    copy(Rows::line(to), Rows::line(from), Extent::line(len), sides, stream, asynchronous)
}

fn set_line<const N: usize>(to: u64, value: [u8; N], count: usize, stream: usize, asynchronous: bool) -> Outcome {
    set(Rows::line(to), value, (count, 1), stream, asynchronous)
}

/// Writes the initial contents of a module's memory, which no kernel has seen yet.
pub(crate) fn fill(to: u64, bytes: &[u8]) {
    if space::covered(to, bytes.len() as u64, Entry::on_device) {
        // SAFETY: the range is device memory, and the device's heap stays mapped for the life of the process.
        unsafe { copy_bytes(to, bytes.as_ptr() as u64, bytes.len()) };
    }
}

const HOST_TO_DEVICE: (Side, Side) = (Side::Device, Side::Host);
const DEVICE_TO_HOST: (Side, Side) = (Side::Host, Side::Device);
const BETWEEN_DEVICES: (Side, Side) = (Side::Device, Side::Device);
const ANY: (Side, Side) = (Side::Any, Side::Any);

api! {
    cuMemcpy2D_v2(rectangle: In<Rectangle>) {
        copy_rectangle(rectangle, 0, false)
    }

    cuMemcpy2DUnaligned_v2(rectangle: In<Rectangle>) {
        copy_rectangle(rectangle, 0, false)
    }

    cuMemcpy2DAsync_v2(rectangle: In<Rectangle>, stream: usize) {
        copy_rectangle(rectangle, stream, true)
    }

    cuMemcpy3D_v2(cuboid: In<Cuboid>) {
        copy_cuboid(cuboid, 0, false)
    }

    cuMemcpy3DAsync_v2(cuboid: In<Cuboid>, stream: usize) {
        copy_cuboid(cuboid, stream, true)
    }

    cuMemcpy(to: u64, from: u64, len: usize) {
        copy_line(to, from, len, ANY, 0, false)
    }

    cuMemcpyAsync(to: u64, from: u64, len: usize, stream: usize) {
        copy_line(to, from, len, ANY, stream, true)
    }

    cuMemcpyHtoD_v2(to: u64, from: u64, len: usize) {
        copy_line(to, from, len, HOST_TO_DEVICE, 0, false)
    }

    cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) {
        copy_line(to, from, len, HOST_TO_DEVICE, stream, true)
    }

    cuMemcpyDtoH_v2(to: u64, from: u64, len: usize) {
        copy_line(to, from, len, DEVICE_TO_HOST, 0, false)
    }

    cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: usize) {
        copy_line(to, from, len, DEVICE_TO_HOST, stream, true)
    }

    cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) {
        copy_line(to, from, len, BETWEEN_DEVICES, 0, false)
    }

    cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) {
        copy_line(to, from, len, BETWEEN_DEVICES, stream, true)
    }

    cuMemcpyPeer(to: u64, to_context: usize, from: u64, from_context: usize, len: usize) {
        peers(to_context, from_context)?;
        copy_line(to, from, len, BETWEEN_DEVICES, 0, false)
    }

    cuMemcpyPeerAsync(to: u64, to_context: usize, from: u64, from_context: usize, len: usize, stream: usize) {
        peers(to_context, from_context)?;
        copy_line(to, from, len, BETWEEN_DEVICES, stream, true)
    }

    cuMemsetD8_v2(to: u64, value: u8, count: usize) {
        set_line(to, [value], count, 0, false)
    }

    cuMemsetD8Async(to: u64, value: u8, count: usize, stream: usize) {
        set_line(to, [value], count, stream, true)
    }

    cuMemsetD16_v2(to: u64, value: u16, count: usize) {
        set_line(to, value.to_le_bytes(), count, 0, false)
    }

    cuMemsetD16Async(to: u64, value: u16, count: usize, stream: usize) {
        set_line(to, value.to_le_bytes(), count, stream, true)
    }

    cuMemsetD32_v2(to: u64, value: u32, count: usize) {
        set_line(to, value.to_le_bytes(), count, 0, false)
    }

    cuMemsetD32Async(to: u64, value: u32, count: usize, stream: usize) {
        set_line(to, value.to_le_bytes(), count, stream, true)
    }

    cuMemsetD2D8_v2(start: u64, pitch: usize, value: u8, width: usize, height: usize) {
        set(rows_to_set(start, pitch, height), [value], (width, height), 0, false)
    }

    cuMemsetD2D8Async(start: u64, pitch: usize, value: u8, width: usize, height: usize, stream: usize) {
        set(rows_to_set(start, pitch, height), [value], (width, height), stream, true)
    }

    cuMemsetD2D16_v2(start: u64, pitch: usize, value: u16, width: usize, height: usize) {
        set(rows_to_set(start, pitch, height), value.to_le_bytes(), (width, height), 0, false)
    }

    cuMemsetD2D16Async(start: u64, pitch: usize, value: u16, width: usize, height: usize, stream: usize) {
        set(rows_to_set(start, pitch, height), value.to_le_bytes(), (width, height), stream, true)
    }

    cuMemsetD2D32_v2(start: u64, pitch: usize, value: u32, width: usize, height: usize) {
        set(rows_to_set(start, pitch, height), value.to_le_bytes(), (width, height), 0, false)
    }

    cuMemsetD2D32Async(start: u64, pitch: usize, value: u32, width: usize, height: usize, stream: usize) {
        set(rows_to_set(start, pitch, height), value.to_le_bytes(), (width, height), stream, true)
    }
}

/// The pitch is ignored if there is only one row.
fn rows_to_set(start: u64, pitch: usize, height: usize) -> Rows {
    Rows { start, pitch: if height == 1 { 0 } else { pitch as u64 }, slice: 0 }
}

fn peers(to: usize, from: usize) -> Outcome {
    context::current()?;
    let known = |handle| CONTEXTS.get(handle).map(drop).ok_or(Code::INVALID_CONTEXT);
    known(to)?;
    known(from)
}
