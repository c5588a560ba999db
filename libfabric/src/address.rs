//! Address vectors: peers by number.

use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bindings::{self, fi_av_attr, fi_av_type, fid_av};
use crate::{Domain, Error};
use crate::{entry, table};

/// A peer's number in one address vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FiAddr(pub u64);

impl FiAddr {
    /// No peer.
    pub const UNSPEC: Self = Self(bindings::FI_ADDR_UNSPEC);
}

/// The address and port of an endpoint name that is a `sockaddr_in` or `sockaddr_in6`.
pub fn socket_address(name: &[u8]) -> Option<SocketAddr> {
    let family = i32::from(u16::from_ne_bytes(*name.first_chunk()?));
    let port = u16::from_be_bytes(*name.get(2..)?.first_chunk()?);
    let ip: IpAddr = match (family, name.len()) {
        (libc::AF_INET, 16) => (*name[4..].first_chunk::<4>()?).into(),
        (libc::AF_INET6, 28) => (*name[8..].first_chunk::<16>()?).into(),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

/// A table of peers, shared by all endpoints that are bound to it.
pub struct AddressVector {
    raw: *mut fid_av,
    insertions: AtomicU64,
    domain: Arc<Domain>,
}

// SAFETY: `Domain::open` demands FI_THREAD_SAFE, so the provider serialises access; the last owner alone closes the object.
unsafe impl Send for AddressVector {}
// SAFETY: the provider serialises access from several threads (FI_THREAD_SAFE).
unsafe impl Sync for AddressVector {}

impl AddressVector {
    /// `fi_av_open` for about `count` peers (a hint; the table grows), as a table: numbers are given in order of insertion.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(domain: &Arc<Domain>, count: usize) -> Result<Arc<Self>, Error> {
        let lib = domain.library();
        let open = entry!(lib, domain.ops(), fi_ops_domain, av_open, "fi_av_open")?;
        let mut attr = fi_av_attr { type_: fi_av_type::FI_AV_TABLE, count, ..Default::default() };
        let mut raw = ptr::null_mut();
        // SAFETY: the domain is open and the attributes are live; the provider writes `raw` on success only.
        let code = unsafe { open(domain.as_ptr(), &mut attr, &mut raw, ptr::null_mut()) };
        lib.check("fi_av_open", code)?;
        Ok(Arc::new(Self { raw, insertions: AtomicU64::new(0), domain: Arc::clone(domain) }))
    }

    /// Adds the peer whose endpoint name ([`crate::Endpoint::name`]) is `address`.
    ///
    /// # Errors
    /// [`Error::Argument`] when the address has no byte, or more bytes than any format; [`Error::Call`] with the provider's error.
    pub fn insert(&self, address: &[u8]) -> Result<FiAddr, Error> {
        // Providers read as many bytes as their format has, and get no length.
        let mut padded = [0u8; bindings::FI_NAME_MAX as usize];
        let Some(room) = padded.get_mut(..address.len()).filter(|room| !room.is_empty()) else {
            return Err(Error::Argument {
                what: format!("an endpoint address has 1 to {} bytes, not {}", bindings::FI_NAME_MAX, address.len()),
            });
        };
        room.copy_from_slice(address);
        let lib = self.domain.library();
        // SAFETY: `raw` is open until drop.
        let ops = unsafe { (*self.raw).ops };
        let insert = entry!(lib, ops, fi_ops_av, insert, "fi_av_insert")?;
        let mut number = bindings::FI_ADDR_NOTAVAIL;
        // SAFETY: the vector is open; the address buffer is at least as long as any fixed format.
        let count = unsafe { insert(self.raw, padded.as_ptr().cast(), 1, &mut number, 0, ptr::null_mut()) };
        lib.check("fi_av_insert", count)?;
        if count != 1 || number == bindings::FI_ADDR_NOTAVAIL {
            return Err(lib.failure("fi_av_insert", -bindings::FI_EADDRNOTAVAIL));
        }
        self.insertions.fetch_add(1, Ordering::Relaxed);
        Ok(FiAddr(number))
    }

    /// Peers added so far, whether or not they were removed again. A test sees by this count that set-up added a peer twice.
    pub fn insertions(&self) -> u64 {
        self.insertions.load(Ordering::Relaxed)
    }

    /// Removes a peer. No operation to the peer may be outstanding.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn remove(&self, peer: FiAddr) -> Result<(), Error> {
        let lib = self.domain.library();
        // SAFETY: `raw` is open until drop.
        let ops = unsafe { (*self.raw).ops };
        let remove = entry!(lib, ops, fi_ops_av, remove, "fi_av_remove")?;
        let mut number = peer.0;
        // SAFETY: the vector is open; the array has the one number that the call states.
        lib.check("fi_av_remove", unsafe { remove(self.raw, &mut number, 1, 0) })?;
        Ok(())
    }

    /// The libfabric object, alive as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_av {
        self.raw
    }
}

impl Drop for AddressVector {
    fn drop(&mut self) {
        // SAFETY: `raw` is open. Endpoints bound to it hold an Arc of this object, so none is left.
        unsafe { table::close(self.domain.library(), self.raw.cast(), "an address vector") }
    }
}
