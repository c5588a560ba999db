//! `fid_av`: a table of addresses.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrogin_libfabric::bindings as fi;

use super::domain::Domain;
use super::guard::{Code, entry, entry_or};
use super::library::refuse;
use super::object::{Object, Uses, give, head, object, table, take_back};
use super::unsupported;
use soft_nic::address::{ADDRESS_LEN, Address};
use soft_nic::card::Card;

/// An address and the number of its address handle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub address: Address,
    pub ahn: u16,
    /// Insertions of the address: the same address gets the same number.
    uses: u32,
}

#[repr(C)]
pub(super) struct Av {
    fid: fi::fid_av,
    domain: *const Domain,
    pub table: Arc<AvTable>,
    /// Endpoints bound to the vector.
    pub uses: Uses,
}

/// The addresses, as endpoints use them.
pub(super) struct AvTable {
    card: Arc<Card>,
    pd: u32,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    table: HashMap<u64, Entry>,
    /// Numbers by address, and by the sender of a completion.
    number_of: HashMap<Address, u64>,
    number_of_handle: HashMap<(u16, u16), u64>,
    next: u64,
}

// SAFETY: repr(C), begins with fid_av; this provider makes fids of this class here only.
unsafe impl Object for Av {
    const CLASS: u32 = fi::FI_CLASS_AV;
}

impl AvTable {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, at: u64) -> Option<Entry> {
        self.lock().table.get(&at).copied()
    }

    /// The number of an address.
    pub(super) fn find(&self, address: &Address) -> Option<u64> {
        self.lock().number_of.get(address).copied()
    }

    /// The number of a queue pair behind a handle.
    pub(super) fn reverse(&self, ahn: u16, qpn: u16) -> Option<u64> {
        self.lock().number_of_handle.get(&(ahn, qpn)).copied()
    }

    fn insert(&self, bytes: &[u8; ADDRESS_LEN]) -> Result<u64, Code> {
        let address =
            Address::from_bytes(bytes).map_err(|error| refuse("fi_av_insert", format_args!("the address {error}")))?;
        let mut entries = self.lock();
        if let Some(at) = entries.number_of.get(&address).copied()
            && let Some(entry) = entries.table.get_mut(&at)
        {
            entry.uses += 1;
            return Ok(at);
        }
        let ahn = self.card.lock().open_handle(self.pd, address.gid)?;
        let at = entries.next;
        entries.next += 1;
        entries.table.insert(at, Entry { address, ahn, uses: 1 });
        entries.number_of.insert(address, at);
        entries.number_of_handle.insert((ahn, address.qpn), at);
        Ok(at)
    }

    fn remove(&self, at: u64) -> Result<(), Code> {
        let mut entries = self.lock();
        let entry = entries.table.get_mut(&at).ok_or(Code::INVAL)?;
        entry.uses -= 1;
        if entry.uses > 0 {
            return Ok(());
        }
        if let Some(Entry { address, ahn, .. }) = entries.table.remove(&at) {
            entries.number_of.remove(&address);
            entries.number_of_handle.remove(&(ahn, address.qpn));
            self.card.lock().close_handle(ahn);
        }
        Ok(())
    }
}

impl Drop for AvTable {
    fn drop(&mut self) {
        let entries = self.entries.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut core = self.card.lock();
        for entry in entries.table.values() {
            core.close_handle(entry.ahn);
        }
    }
}

impl Av {
    pub(super) fn domain(&self) -> *const Domain {
        self.domain
    }
}

static OPS: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: Some(close),
    bind: Some(unsupported::bind),
    control: Some(unsupported::control),
    ops_open: Some(unsupported::ops_open),
    tostr: Some(unsupported::tostr),
    ops_set: Some(unsupported::ops_set),
};

static AV_OPS: fi::fi_ops_av = fi::fi_ops_av {
    size: size_of::<fi::fi_ops_av>(),
    insert: Some(insert),
    insertsvc: Some(unsupported::insertsvc),
    insertsym: Some(unsupported::insertsym),
    remove: Some(remove),
    lookup: Some(lookup),
    straddr: Some(straddr),
    av_set: Some(unsupported::av_set),
    insert_auth_key: Some(unsupported::insert_auth_key),
    lookup_auth_key: Some(unsupported::lookup_auth_key),
    set_user_id: Some(unsupported::set_user_id),
    lookup2: Some(unsupported::lookup2),
};

/// `fi_av_open`.
pub(super) unsafe extern "C" fn open(
    domain: *mut fi::fid_domain,
    attr: *mut fi::fi_av_attr,
    out: *mut *mut fi::fid_av,
    context: *mut c_void,
) -> c_int {
    entry("fi_av_open", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let domain: &Domain = unsafe { object(domain) }?;
        if attr.is_null() {
            return Err(Code::INVAL);
        }
        // SAFETY: null, or the application's attributes, alive during the call; all libfabric versions have the same fields.
        let attr = unsafe { &mut *attr };
        if attr.flags & !fi::FI_SYMMETRIC != 0 || !attr.name.is_null() {
            return Err(Code::NOSYS);
        }
        attr.type_ = fi::fi_av_type::FI_AV_TABLE;
        let fid = fi::fid_av { fid: head(fi::FI_CLASS_AV, context, &OPS), ops: table(&AV_OPS) };
        let table = Arc::new(AvTable { card: domain.card.clone(), pd: domain.pd, entries: Mutex::default() });
        let av = Av { fid, domain: ptr::from_ref(domain), table, uses: Uses::default() };
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        unsafe { give(av, out) }?;
        domain.uses.begin();
        Ok(0)
    })
}

unsafe extern "C" fn insert(
    av: *mut fi::fid_av,
    addr: *const c_void,
    count: usize,
    fi_addr: *mut fi::fi_addr_t,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    entry("fi_av_insert", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let av: &Av = unsafe { object(av) }?;
        if flags & !(fi::FI_MORE | fi::FI_SYNC_ERR) != 0 {
            return Err(Code(fi::FI_EBADFLAGS));
        }
        if addr.is_null() && count > 0 {
            return Err(Code::INVAL);
        }
        let errors: *mut c_int = if flags & fi::FI_SYNC_ERR != 0 { context.cast() } else { ptr::null_mut() };
        let mut inserted = 0;
        for i in 0..count {
            let at: *const [u8; ADDRESS_LEN] = addr.cast();
            // SAFETY: the application states that `addr` holds `count` addresses, and each has 32 bytes (FI_ADDR_EFA).
            let bytes = unsafe { at.wrapping_add(i).read_unaligned() };
            let result = av.table.insert(&bytes);
            inserted += i32::from(result.is_ok());
            if !fi_addr.is_null() {
                // SAFETY: not null, and the application's array has `count` entries, of which this is one.
                unsafe { fi_addr.wrapping_add(i).write(result.unwrap_or(fi::FI_ADDR_NOTAVAIL)) };
            }
            if !errors.is_null() {
                // SAFETY: with FI_SYNC_ERR the context holds `count` error numbers.
                unsafe { errors.wrapping_add(i).write(result.map_or_else(|code| code.0, |_| 0)) };
            }
        }
        Ok(inserted)
    })
}

unsafe extern "C" fn remove(av: *mut fi::fid_av, fi_addr: *mut fi::fi_addr_t, count: usize, _flags: u64) -> c_int {
    entry("fi_av_remove", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let av: &Av = unsafe { object(av) }?;
        if fi_addr.is_null() && count > 0 {
            return Err(Code::INVAL);
        }
        for i in 0..count {
            // SAFETY: not null, and the application's array has `count` entries, of which this is one.
            let at = unsafe { fi_addr.wrapping_add(i).read() };
            av.table.remove(at)?;
        }
        Ok(0)
    })
}

unsafe extern "C" fn lookup(av: *mut fi::fid_av, fi_addr: u64, addr: *mut c_void, len: *mut usize) -> c_int {
    entry("fi_av_lookup", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let av: &Av = unsafe { object(av) }?;
        let entry = av.table.get(fi_addr).ok_or(Code::INVAL)?;
        // SAFETY: `len` is null or holds the size of `addr`, which the application keeps writable during the call.
        unsafe { copy_out(&entry.address.to_bytes(), addr, len) }?;
        Ok(0)
    })
}

/// Copies as many bytes as fit, and sets the length to that of the whole.
///
/// # Safety
/// `len` is null or points to the number of bytes that `to` has room for.
pub(super) unsafe fn copy_out(bytes: &[u8], to: *mut c_void, len: *mut usize) -> Result<(), Code> {
    if len.is_null() {
        return Err(Code::INVAL);
    }
    // SAFETY: null or checked not to be null; the application keeps its length variable valid during the call.
    let room = unsafe { len.read() };
    // SAFETY: null or checked not to be null; the application keeps its length variable valid during the call.
    unsafe { len.write(bytes.len()) };
    if !to.is_null() {
        // SAFETY: this function's caller has room for `room` bytes at `to`, and `n` is no more.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), room.min(bytes.len())) };
    }
    Ok(())
}

unsafe extern "C" fn straddr(
    av: *mut fi::fid_av,
    addr: *const c_void,
    buf: *mut c_char,
    len: *mut usize,
) -> *const c_char {
    entry_or("fi_av_straddr", ptr::null(), || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        if unsafe { object::<Av, _>(av) }.is_err() || addr.is_null() {
            return ptr::null();
        }
        // SAFETY: not null, and addresses of this provider have 32 bytes (FI_ADDR_EFA).
        let bytes = unsafe { addr.cast::<[u8; ADDRESS_LEN]>().read_unaligned() };
        let text = match Address::from_bytes(&bytes) {
            Ok(address) => address.text(),
            Err(error) => format!("{error}"),
        };
        let text = CString::new(text).unwrap_or_default();
        let bytes = text.as_bytes_with_nul();
        // SAFETY: null or checked not to be null; the application keeps its length variable valid during the call.
        let room = unsafe { len.as_ref() }.copied().unwrap_or(0);
        // SAFETY: `len` is null or holds the size of the buffer, which the application keeps writable during the call.
        if unsafe { copy_out(bytes, buf.cast(), len) }.is_ok() && room > 0 && room < bytes.len() {
            // SAFETY: the buffer has `room` bytes, so its last one exists.
            unsafe { buf.wrapping_add(room - 1).write(0) };
        }
        buf
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(av)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let av: &Av = unsafe { object(fid) }?;
        av.uses.none()?;
        // SAFETY: a domain outlives its address vectors.
        let domain = unsafe { &*av.domain };
        domain.uses.end();
        // SAFETY: no other object uses this one, and the application does not use a fid after it closed it.
        drop(unsafe { take_back::<Av, _>(fid) });
        Ok(0)
    })
}
