//! Windows: memory that all ranks' kernels can name and peers can access.
#![allow(unsafe_code)]

use crate::comm::{Comm, Inner};
use crate::error::Error;
use crate::lsa::Shared;
use ferrogin_device as device;
use ferrogin_ffi::nccl;
use ferrogin_rendezvous::ring::Step;
use nccl_gin_ferrogin::device::{DeviceBuffer, DeviceKind, Imported, Use, bytes_of, page_size};
use nccl_gin_ferrogin::error::Error as PluginError;
use nccl_gin_ferrogin::log::counted;
use nccl_gin_ferrogin::window::{self, Source};
use nix::unistd::{SysconfVar, sysconf};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

/// The kind of a window's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Memory {
    /// Host memory. With a GPU, allocated memory is pinned and kernels can access it.
    Host = 1,
    /// Memory of the device that kernels run on: a GPU's, or host memory if kernels run on CPU threads.
    Device = 2,
}

impl Memory {
    fn ptr_type(self) -> c_int {
        match self {
            Self::Host => nccl::PTR_HOST,
            Self::Device => nccl::PTR_CUDA,
        }
    }
}

/// A window of this rank. Dropping it deregisters the memory and frees what [`Comm::allocate`] allocated. From then on,
/// the card refuses peers' writes to it.
pub struct Window {
    /// Declared first, so it's dropped before the memory.
    window: window::Window,
    memory: Option<Box<dyn DeviceBuffer>>,
    kind: Memory,
    address: *mut u8,
    len: usize,
    /// The windows of this node's ranks; otherwise why there are none.
    lsa: Result<Imported, String>,
    comm: Arc<Inner>,
}

// SAFETY: the only field that isn't `Send` is the window's address, and no method dereferences it.
unsafe impl Send for Window {}
// SAFETY: the only field that isn't `Sync` is the window's address, and no method dereferences it.
unsafe impl Sync for Window {}

impl Comm {
    /// Collective: allocates `len` zeroed bytes on each rank and registers them. Ranks may allocate different sizes.
    ///
    /// # Errors
    /// Too little memory, here or on another rank.
    pub fn allocate(&self, len: usize, kind: Memory) -> Result<Window, Error> {
        let coll = &self.inner.coll;
        let usage = match kind {
            Memory::Host => Use::Shared,
            Memory::Device => Use::Window,
        };
        let on_host = kind == Memory::Host || coll.device.kind() == DeviceKind::Cpu;
        let memory = check_size(len, on_host)
            .and_then(|()| Ok(coll.device.allocate(len, usage).map_err(PluginError::from)?))
            .map_err(|error| self.fail(Step::RegisterWindow, error))?;
        let address = match kind {
            Memory::Host => memory.host_address().unwrap_or(std::ptr::null_mut()),
            Memory::Device => memory.device_address() as *mut u8,
        };
        let dma_buf = memory.dma_buf().map(|buffer| (buffer.fd.as_raw_fd(), buffer.offset));
        let source = Source { ptr_type: kind.ptr_type(), flags: 0, dma_buf };
        let window = self.exchange(address, len, source)?;
        let lsa = self.map_node(Some(&*memory))?;
        Ok(Window { window, memory: Some(memory), kind, address, len, lsa, comm: self.inner.clone() })
    }

    /// Collective: registers `len` bytes of the caller's memory at `address`.
    ///
    /// # Safety
    /// The memory stays allocated until the window is dropped. Peers and kernels may write to it at any time, so the
    /// caller accesses it through raw pointers.
    ///
    /// # Errors
    /// The memory isn't mapped, or is of another kind; a card refuses it; another rank failed.
    pub unsafe fn register(&self, address: *mut c_void, len: usize, kind: Memory) -> Result<Window, Error> {
        self.registered(address, len, kind, None)
    }

    /// Collective: registers `len` bytes of the caller's memory at the device address `address`, found at `offset` in a
    /// dma-buf. The registration keeps its own reference to the dma-buf.
    ///
    /// # Safety
    /// As for [`register`](Self::register).
    ///
    /// # Errors
    /// The card refuses the dma-buf; another rank failed.
    pub unsafe fn register_dma_buf(
        &self,
        address: *mut c_void,
        len: usize,
        fd: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<Window, Error> {
        self.registered(address, len, Memory::Device, Some((fd.as_raw_fd(), offset)))
    }

    pub(crate) fn registered(
        &self,
        address: *mut c_void,
        len: usize,
        kind: Memory,
        dma_buf: Option<(c_int, u64)>,
    ) -> Result<Window, Error> {
        let address = address.cast();
        let window = self.exchange(address, len, Source { ptr_type: kind.ptr_type(), flags: 0, dma_buf })?;
        let lsa = self.map_node(None)?;
        Ok(Window { window, memory: None, kind, address, len, lsa, comm: self.inner.clone() })
    }

    /// Maps the memory of all ranks of this node, if each of them has shared its own.
    fn map_node(&self, own: Option<&dyn DeviceBuffer>) -> Result<Result<Imported, String>, Error> {
        let team = &self.inner.team;
        // Without the mapping, ranks still reach the window through the card.
        let shared = own.and_then(|memory| memory.share()).transpose();
        let shared =
            shared.inspect_err(|error| nccl_gin_ferrogin::warn!("sharing a window with this node's ranks: {error}"));
        let parts = team.exchange(shared.ok().flatten().map(|(fd, size)| Shared { fd, size }))?;
        if let Some(at) = parts.iter().position(Option::is_none) {
            return Ok(Err(format!(
                "the window of rank {} can't be mapped: allocate it in device memory on all ranks of the node, instead of registering \
                 memory of your own",
                team.ranks[at]
            )));
        }
        let parts: Vec<_> = parts.into_iter().flatten().map(|part| (part.fd, part.size)).collect();
        Ok(self.inner.coll.device.import(&parts).map_err(|error| {
            format!(
                "the windows of ranks {:?} can't be mapped into this rank's device: {error}. GPUs need peer access to each other \
                 (nvidia-smi topo -p2p rw); without it, use the card",
                team.ranks
            )
        }))
    }

    fn exchange(&self, address: *mut u8, len: usize, source: Source) -> Result<window::Window, Error> {
        let coll = &self.inner.coll;
        let memory = window::Window::prepare(coll, address.cast(), len, source);
        Ok(window::Window::exchange(coll, address.cast(), len, memory)?)
    }

    /// Tells the other ranks that this rank couldn't do its part of `step`, and returns this rank's error.
    pub(crate) fn fail(&self, step: Step, error: impl Into<Error>) -> Error {
        // The exchange carries no text, and always fails, because this rank did.
        let _ = self.inner.coll.agree(step, Err::<(), _>(PluginError::Usage(String::new())), |()| Vec::new());
        error.into()
    }
}

/// Checks a size before allocating, because Linux would only fail once the memory is touched.
fn check_size(len: usize, on_host: bool) -> Result<(), Error> {
    let refused = |why: String| Err(Error::Argument(why));
    let pages = sysconf(SysconfVar::_PHYS_PAGES).ok().flatten().and_then(|pages| u64::try_from(pages).ok());
    match pages.map(|pages| pages * page_size() as u64) {
        _ if len == 0 => refused("a window of 0 bytes cannot be allocated: pass a size above 0".to_owned()),
        Some(has) if on_host && len as u64 > has => refused(format!(
            "a window of {len} bytes cannot be allocated, because this host has {has} bytes of memory: pass a smaller size"
        )),
        _ => Ok(()),
    }
}

impl Window {
    /// Returns the window as kernels name it: an argument to `put` and the other operations.
    pub fn handle(&self) -> device::Window {
        device::Window(self.window.device_address() as *mut c_void)
    }

    /// Returns the first byte's address for kernels. For allocated host memory, it's the device's address of that
    /// memory.
    pub fn address(&self) -> *mut c_void {
        self.memory.as_ref().map_or(self.address.cast(), |memory| memory.device_address() as *mut c_void)
    }

    /// Returns the first byte's address for the host; `None` for GPU memory.
    pub fn host_address(&self) -> Option<*mut c_void> {
        let on_host = self.kind == Memory::Host || self.comm.coll.device.kind() == DeviceKind::Cpu;
        let registered = || on_host.then_some(self.address);
        let address = self.memory.as_ref().map_or_else(registered, |memory| memory.host_address());
        address.map(<*mut u8>::cast)
    }

    /// Returns the address at which kernels load from and store to the window of [`Comm::lsa_ranks`]`[lsa_rank]`; a
    /// host address, if kernels run on CPU threads. Addresses of consecutive ranks have equal distances. A peer may
    /// free its window: its memory stays until this window is dropped.
    ///
    /// # Errors
    /// There is no such rank; a rank of this node registered memory of its own, or can't share it; this rank's GPU
    /// can't access another rank's.
    pub fn lsa_address(&self, lsa_rank: usize) -> Result<*mut c_void, Error> {
        self.comm.check_lsa_rank(lsa_rank)?;
        let mapped = self.lsa.as_ref().map_err(|why| Error::Usage(why.clone()))?;
        Ok((mapped.base + lsa_rank as u64 * mapped.stride) as *mut c_void)
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the size in bytes of the window of the same call on `rank`.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn len_on(&self, rank: usize) -> Result<usize, Error> {
        let missing = || {
            let last = self.comm.coll.nranks - 1;
            Error::Argument(format!("rank {rank} does not exist: pass a rank from 0 to {last}"))
        };
        self.window.size_on(rank).map(|size| size as usize).ok_or_else(missing)
    }

    /// Always returns false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `bytes` into allocated memory at `offset`, not ordered against kernels and peers.
    ///
    /// # Errors
    /// The window's memory is the caller's own; the bytes are outside the window.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.allocated()?.write(offset, bytes_of(bytes)).map_err(PluginError::from)?)
    }

    /// Copies allocated memory at `offset` to `bytes`, not ordered against kernels and peers.
    ///
    /// # Errors
    /// The window's memory is the caller's own; the bytes are outside the window.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        Ok(self.allocated()?.read(offset, bytes).map_err(PluginError::from)?)
    }

    fn allocated(&self) -> Result<&dyn DeviceBuffer, Error> {
        self.memory.as_deref().ok_or_else(|| {
            Error::Usage("the memory of this window is your own: access it through your pointer".to_owned())
        })
    }

    /// Checks that no outstanding request could use the window.
    ///
    /// # Errors
    /// Requests that kernels posted are still incomplete.
    pub fn check_unused(&self) -> Result<(), Error> {
        match self.comm.outstanding()? {
            0 => Ok(()),
            n => Err(Error::Usage(format!(
                "the window is in use: this communicator's contexts have {} outstanding. Flush the contexts (fgin_flush), or \
                 destroy them, before you free the window",
                counted(n as usize, "request")
            ))),
        }
    }
}
