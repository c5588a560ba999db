//! Address vectors: peers by number.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bindings::{self, fi_av_attr, fi_av_type, fid_av};
use crate::entry;
use crate::table::Object;
use crate::{Domain, Error};

/// A peer's number in one address vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FiAddr(pub u64);

impl FiAddr {
    /// No peer.
    pub const UNSPEC: Self = Self(bindings::FI_ADDR_UNSPEC);
}

/// A table of peers, shared by all endpoints bound to it.
pub struct AddressVector {
    object: Object<fid_av>,
    insertions: AtomicU64,
    domain: Arc<Domain>,
}

impl AddressVector {
    /// Opens a vector for about `count` peers (a hint; it grows) with `fi_av_open`, as a table: peers are numbered in
    /// order of insertion.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn open(domain: &Arc<Domain>, count: usize) -> Result<Arc<Self>, Error> {
        let open = entry!(domain.object(), ops: fi_ops_domain, av_open, "fi_av_open")?;
        let mut attr = fi_av_attr { type_: fi_av_type::FI_AV_TABLE, count, ..Default::default() };
        let object = Object::open(domain.library(), "fi_av_open", |raw| {
            // SAFETY: the domain is open and the attributes are live.
            unsafe { open(domain.as_ptr(), &mut attr, raw, ptr::null_mut()) }
        })?;
        Ok(Arc::new(Self { object, insertions: AtomicU64::new(0), domain: Arc::clone(domain) }))
    }

    /// Adds the peer whose endpoint name ([`crate::Endpoint::name`]) is `address`.
    ///
    /// # Errors
    /// [`Error::Argument`] if the address is empty or longer than any format's; [`Error::Call`] with the provider's
    /// error.
    pub fn insert(&self, address: &[u8]) -> Result<FiAddr, Error> {
        const MAX: usize = bindings::FI_NAME_MAX as usize;
        if !(1..=MAX).contains(&address.len()) {
            let what = format!("an endpoint address has 1 to {MAX} bytes, not {}", address.len());
            return Err(Error::Argument { what });
        }
        self.insert_padded(address, 1)?.pop().unwrap_or(Err(self.refused()))
    }

    /// Adds the peers with these addresses in a single call. Each peer has its own result.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error, if the whole call fails.
    pub fn insert_all<const LEN: usize>(&self, addresses: &[[u8; LEN]]) -> Result<Vec<Result<FiAddr, Error>>, Error> {
        const { assert!(LEN > 0 && LEN <= bindings::FI_NAME_MAX as usize) };
        if addresses.is_empty() {
            Ok(Vec::new())
        } else {
            self.insert_padded(addresses.as_flattened(), addresses.len())
        }
    }

    fn refused(&self) -> Error {
        self.domain.library().failure("fi_av_insert", -bindings::FI_EADDRNOTAVAIL)
    }

    /// Calls `fi_av_insert` for `count` consecutive addresses, none longer than `FI_NAME_MAX`.
    fn insert_padded(&self, addresses: &[u8], count: usize) -> Result<Vec<Result<FiAddr, Error>>, Error> {
        // Providers aren't told the length: they read as many bytes per address as their format has.
        let mut padded = vec![0u8; count * bindings::FI_NAME_MAX as usize];
        padded[..addresses.len()].copy_from_slice(addresses);
        let insert = entry!(&self.object, ops: fi_ops_av, insert, "fi_av_insert")?;
        let mut numbers = vec![bindings::FI_ADDR_NOTAVAIL; count];
        let (from, to) = (padded.as_ptr().cast(), numbers.as_mut_ptr());
        // SAFETY: the vector is open; the buffer has `count` times the bytes of the longest fixed format, and the array
        // `count` numbers.
        let inserted = unsafe { insert(self.as_ptr(), from, count, to, 0, ptr::null_mut()) };
        self.object.library().check("fi_av_insert", inserted)?;
        let result =
            |number| if number == bindings::FI_ADDR_NOTAVAIL { Err(self.refused()) } else { Ok(FiAddr(number)) };
        let results: Vec<_> = numbers.into_iter().map(result).collect();
        self.insertions.fetch_add(results.iter().filter(|result| result.is_ok()).count() as u64, Ordering::Relaxed);
        Ok(results)
    }

    /// Returns how many peers were added so far, including removed ones. Tests use it to notice that set-up added a
    /// peer twice.
    pub fn insertions(&self) -> u64 {
        self.insertions.load(Ordering::Relaxed)
    }

    /// Removes a peer. No operation to the peer may be outstanding.
    ///
    /// # Errors
    /// [`Error::Call`] with the provider's error.
    pub fn remove(&self, peer: FiAddr) -> Result<(), Error> {
        let remove = entry!(&self.object, ops: fi_ops_av, remove, "fi_av_remove")?;
        let mut number = peer.0;
        // SAFETY: the vector is open; the array has the one number that the call asks for.
        self.object.library().check("fi_av_remove", unsafe { remove(self.as_ptr(), &mut number, 1, 0) })?;
        Ok(())
    }

    /// Returns the libfabric object, which lives as long as `self`.
    pub fn as_ptr(&self) -> *mut fid_av {
        self.object.as_ptr()
    }
}
