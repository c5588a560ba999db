//! Registered memory.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use crate::bindings::{self, fi_hmem_iface, fi_mr_attr, fi_mr_dmabuf, fid_mr, iovec};
use crate::table::Object;
use crate::{Domain, Error, Version};
use crate::{entry, field};

/// The memory to register.
#[derive(Clone, Copy, Debug)]
pub enum Region<'a> {
    /// Memory that the CPU can address.
    Va {
        /// First byte.
        addr: *mut u8,
        /// Bytes.
        len: usize,
    },
    /// Memory in a dma-buf.
    DmaBuf {
        /// The dma-buf.
        fd: BorrowedFd<'a>,
        /// Offset of the region in the dma-buf, in bytes.
        offset: u64,
        /// Bytes.
        len: usize,
        /// The address with which peers and work requests name the first byte of the dma-buf.
        base: *mut u8,
    },
}

/// What kind of memory a region is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryKind {
    /// Host memory.
    #[default]
    System,
    /// Memory of a CUDA device, by ordinal.
    Cuda(i32),
}

/// A memory region. Dropping it closes it, and peers can no longer reach it.
pub struct MemoryRegion {
    object: Object<fid_mr>,
    domain: Arc<Domain>,
}

impl MemoryRegion {
    /// Calls `fi_mr_regattr` for `access` (`FI_READ`, `FI_WRITE`, `FI_REMOTE_READ`, `FI_REMOTE_WRITE`, `FI_SEND`,
    /// `FI_RECV`).
    ///
    /// `requested_key` only matters if the provider doesn't choose keys (`FI_MR_PROV_KEY`). A dma-buf needs
    /// `FI_MR_DMABUF`, which libfabric has had since 1.20; ferrogin's `softefa` provider also takes a dma-buf with
    /// older releases.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error; [`Error::TooOld`] for a dma-buf with an older library.
    ///
    /// # Safety
    /// The memory stays valid until the region is dropped. Peers and the card read and write it as `access` allows: no
    /// Rust reference may exist that their access would invalidate.
    pub unsafe fn register(
        domain: &Arc<Domain>,
        region: Region<'_>,
        access: u64,
        requested_key: u64,
    ) -> Result<Self, Error> {
        // SAFETY: this function's caller keeps the memory valid until the region is dropped, with no reference that
        // peers' access would invalidate.
        unsafe { Self::register_kind(domain, region, access, requested_key, MemoryKind::System) }
    }

    /// Like [`MemoryRegion::register`], for any kind of memory.
    ///
    /// # Errors
    /// Those of [`MemoryRegion::register`].
    ///
    /// # Safety
    /// Those of [`MemoryRegion::register`].
    pub unsafe fn register_kind(
        domain: &Arc<Domain>,
        region: Region<'_>,
        access: u64,
        requested_key: u64,
        kind: MemoryKind,
    ) -> Result<Self, Error> {
        let lib = domain.library();
        let register = entry!(domain.object(), mr: fi_ops_mr, regattr, "fi_mr_regattr")?;
        let mut attr = fi_mr_attr {
            iov_count: 1,
            access,
            requested_key,
            iface: fi_hmem_iface::FI_HMEM_SYSTEM,
            ..Default::default()
        };
        if let MemoryKind::Cuda(ordinal) = kind {
            attr.iface = fi_hmem_iface::FI_HMEM_CUDA;
            attr.device.cuda = ordinal;
        }
        let mut iov = iovec::default();
        let mut dmabuf = fi_mr_dmabuf::default();
        let flags = match region {
            Region::Va { addr, len } => {
                iov.iov_base = addr.cast();
                iov.iov_len = len;
                attr.__bindgen_anon_1.mr_iov = &iov;
                0
            }
            Region::DmaBuf { fd, offset, len, base } => {
                dmabuf.fd = fd.as_raw_fd();
                dmabuf.offset = offset;
                dmabuf.len = len;
                dmabuf.base_addr = base.cast();
                attr.__bindgen_anon_1.dmabuf = &dmabuf;
                bindings::FI_MR_DMABUF
            }
        };
        let opened = Object::open(lib, "fi_mr_regattr", |raw| {
            // SAFETY: the domain is open. The attributes and their targets outlive the call. The caller keeps the
            // memory valid until the region is dropped.
            unsafe { register(domain.as_ptr().cast(), &attr, flags, raw) }
        });
        let needed = Version::new(1, 20);
        let object = opened.map_err(|error| {
            if flags == 0 || lib.version() >= needed {
                return error;
            }
            log::debug!("{error}");
            Error::TooOld { feature: "registering a dma-buf (FI_MR_DMABUF)", needed, found: lib.version() }
        })?;
        Ok(Self { object, domain: Arc::clone(domain) })
    }

    /// Returns the key with which peers name the region.
    pub fn key(&self) -> u64 {
        field!(&self.object, key)
    }

    /// Returns the descriptor that local operations on the region carry if the provider requires one (`FI_MR_LOCAL`).
    pub fn descriptor(&self) -> *mut c_void {
        field!(&self.object, mem_desc)
    }

    /// Returns the domain that the region is registered with.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Returns the libfabric object, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_mr {
        self.object.as_ptr()
    }
}
