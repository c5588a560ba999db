//! IPC handles, with which other processes open cuMemAlloc memory and events.
//!
//! A handle names a memory file (the device's or the event's) in the process that made the handle, and a part of that
//! file. The other process opens the file through `/proc`, so both must run as the same user.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;

use crate::code::{Code, Outcome};
use crate::context;
use crate::device;
use crate::event::{self, Event};
use crate::guard::{In, Out, lock, log};
use crate::memfd;
use crate::shared::{self, Shared};
use crate::space::{self, Entry, Kind};

/// `CUipcMemHandle` or `CUipcEventHandle`, whose bytes are a [`Name`].
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Handle([u8; 64]);

/// The memory that a handle names: an allocation, or an event's page.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    magic: [u8; 8],
    process: u32,
    /// The memory file's descriptor in that process.
    descriptor: c_int,
    device: u64,
    /// The memory file's inode number.
    file: u64,
    start: u64,
    len: u64,
    /// The allocation's ID, unique within that process; 0 for an event.
    id: u64,
    reserved: u64,
}

const _: () = assert!(size_of::<Name>() == size_of::<Handle>());
const MAGIC: [u8; 8] = *b"softgpu1";
const EVENT_MAGIC: [u8; 8] = *b"softgpuE";
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, which the reference requires.
const LAZY: u32 = 1;

/// Memory opened by a context.
struct Opened {
    context: usize,
    name: Name,
    address: u64,
    /// The mapped pages: address and length.
    pages: (usize, usize),
    count: usize,
}

static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

impl Name {
    /// Opens the memory file, after checking that it is called `name`.
    ///
    /// # Errors
    /// `CUDA_ERROR_MAP_FAILED`.
    fn open(&self, name: &str) -> Outcome<OwnedFd> {
        let path = format!("/proc/{}/fd/{}", self.process, self.descriptor);
        let failed = |why: String| {
            log(format_args!(
                "an IPC handle: process {} has no such memory or event ({path}: {why}); it must run, belong to the same user and \
                 container, and not have freed the memory or the event",
                self.process
            ));
            Code::MAP_FAILED
        };
        // Open only a file of this name: opening some files has side effects.
        let link = std::fs::read_link(&path).map_err(|error| failed(error.to_string()))?;
        if !link.to_string_lossy().starts_with(&format!("/memfd:{name} ")) {
            return Err(failed(format!("it is {}", link.display())));
        }
        let file = File::options().read(true).write(true).open(&path).map_err(|error| failed(error.to_string()))?;
        let about = file.metadata().map_err(|error| failed(error.to_string()))?;
        let file = OwnedFd::from(file);
        let inside = self.start.checked_add(self.len).is_some_and(|end| self.len > 0 && end <= about.len());
        if about.ino() != self.file || !memfd::cannot_shrink(&file) || !inside {
            return Err(failed("it is another file".to_owned()));
        }
        Ok(file)
    }
}

/// Ends one use, or all uses, of memory that a context has opened.
fn close(context: usize, address: u64, all: bool) -> Outcome {
    let mut opened = lock(&OPENED);
    let at = opened.iter().position(|opened| opened.context == context && opened.address == address);
    let at = at.ok_or(Code::INVALID_VALUE)?;
    opened[at].count -= 1;
    if opened[at].count > 0 && !all {
        return Ok(());
    }
    let Opened { pages, .. } = opened.swap_remove(at);
    space::remove(address, "closed memory of another process", |entry| matches!(entry.kind, Kind::Opened));
    space::unmap_later(pages.0, pages.1);
    Ok(())
}

/// Closes opened memory whose context is being destroyed.
pub(crate) fn close_all(address: u64) -> Outcome {
    let entry = space::find(address).ok_or(Code::INVALID_VALUE)?;
    close(entry.context, address, true)
}

api! {
    cuIpcGetMemHandle(out: Out<Name>, address: u64) {
        context::current()?;
        out.present()?;
        let heap_only = |entry: &Entry| entry.start == address && matches!(entry.kind, Kind::Heap) && !entry.freed;
        let entry = space::find(address).filter(heap_only).ok_or(Code::INVALID_VALUE)?;
        let heap = lock(&device::by_ordinal(entry.device)?.heap);
        let heap = heap.as_ref().ok_or(Code::INVALID_VALUE)?;
        let about = nix::sys::stat::fstat(&heap.file).map_err(|_| Code::OPERATING_SYSTEM)?;
        out.set(Name {
            magic: MAGIC,
            process: std::process::id(),
            descriptor: heap.file.as_raw_fd(),
            device: entry.device as u64,
            file: about.st_ino,
            start: address - heap.base,
            len: entry.len,
            id: entry.id,
            reserved: 0,
        })
    }

    /// Like the driver, refuses a handle made by this process.
    cuIpcOpenMemHandle_v2(out: Out<u64>, handle: Handle, flags: u32) {
        let context = context::current()?;
        out.present()?;
        if flags != LAZY {
            return Err(Code::INVALID_VALUE);
        }
        let name = In::<Name>::at_address(handle.0.as_ptr() as usize).get()?;
        if name.magic != MAGIC || name.reserved != 0 {
            return Err(Code::INVALID_HANDLE);
        }
        if name.process == std::process::id() {
            return Err(Code::INVALID_CONTEXT);
        }
        let ordinal = usize::try_from(name.device).map_err(|_| Code::INVALID_HANDLE)?;
        device::by_ordinal(ordinal).map_err(|_| Code::MAP_FAILED)?;
        let mut opened = lock(&OPENED);
        if let Some(known) = opened.iter_mut().find(|known| known.context == context.handle && known.name == name) {
            known.count += 1;
            return out.set(known.address);
        }
        let file = name.open(&format!("{}{ordinal}", crate::heap::NAME))?;
        let page = memfd::page_size();
        let skip = name.start % page;
        let len = usize::try_from(skip + name.len).map_err(|_| Code::MAP_FAILED)?;
        let pages = memfd::shared(0, len, &file, name.start - skip).map_err(|_| Code::MAP_FAILED)?;
        let address = pages as u64 + skip;
        let mut entry = Entry::new(address, name.len, Kind::Opened, ordinal, context.handle);
        entry.readers = 1 << ordinal | 1 << context.device;
        entry.writers = entry.readers;
        space::add(entry);
        opened.push(Opened { context: context.handle, name, address, pages: (pages, len), count: 1 });
        out.set(address)
    }

    cuIpcGetEventHandle(out: Out<Name>, event: usize) {
        let event = event::by_handle(event)?;
        out.present()?;
        let shared = event.shared.as_ref().ok_or(Code::INVALID_VALUE)?;
        let about = nix::sys::stat::fstat(&shared.file).map_err(|_| Code::OPERATING_SYSTEM)?;
        out.set(Name {
            magic: EVENT_MAGIC,
            process: std::process::id(),
            descriptor: shared.file.as_raw_fd(),
            device: 0,
            file: about.st_ino,
            start: 0,
            len: memfd::page_size(),
            id: 0,
            reserved: 0,
        })
    }

    /// The event belongs to the current context. A handle made by this process is refused, as for memory.
    cuIpcOpenEventHandle(out: Out<usize>, handle: Handle) {
        context::current()?;
        out.present()?;
        let name = In::<Name>::at_address(handle.0.as_ptr() as usize).get()?;
        let known = Name { magic: EVENT_MAGIC, device: 0, start: 0, len: memfd::page_size(), id: 0, reserved: 0, ..name };
        if name != known {
            return Err(Code::INVALID_HANDLE);
        }
        if name.process == std::process::id() {
            return Err(Code::INVALID_CONTEXT);
        }
        let file = name.open(shared::NAME)?;
        out.set(Event::insert(event::DISABLE_TIMING | event::INTERPROCESS, Some(Shared::map(file)?))?)
    }

    cuIpcCloseMemHandle(address: u64) {
        let context = context::current()?;
        close(context.handle, address, false)
    }
}
