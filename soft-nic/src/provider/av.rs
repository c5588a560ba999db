//! `fid_av`: a table of addresses.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use ferrogin_fabric::bindings as fi;

use super::domain::Domain;
use super::guard::{Code, entry, entry_or};
use super::library::refuse;
use super::object::{Object, Uses, give, head, object, table, take_back};
use super::unsupported;
use crate::address::{ADDRESS_LEN, Address};

/// An address and the handle that leads there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub address: Address,
    pub ahn: u16,
}

#[repr(C)]
pub(super) struct Av {
    fid: fi::fid_av,
    domain: *const Domain,
    entries: Mutex<Entries>,
    /// Endpoints bound to it.
    pub uses: Uses,
}

#[derive(Default)]
struct Entries {
    table: BTreeMap<u64, Entry>,
    next: u64,
}

// SAFETY: repr(C), begins with fid_av; this provider makes fids of this class here only.
unsafe impl Object for Av {
    const CLASS: u32 = fi::FI_CLASS_AV;
}

impl Av {
    pub(super) fn get(&self, at: u64) -> Option<Entry> {
        self.lock().table.get(&at).copied()
    }

    pub(super) fn domain(&self) -> *const Domain {
        self.domain
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, bytes: &[u8; ADDRESS_LEN]) -> Result<u64, Code> {
        let address = Address::from_bytes(bytes)
            .map_err(|error| refuse("fi_av_insert", format_args!("the address {error}: {bytes:02x?}")))?;
        // SAFETY: a domain outlives its address vectors.
        let domain = unsafe { &*self.domain };
        let ahn = domain.card.lock().open_handle(address.gid)?;
        let mut entries = self.lock();
        let at = entries.next;
        entries.next += 1;
        entries.table.insert(at, Entry { address, ahn });
        Ok(at)
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
        // SAFETY: the application's fid.
        let domain: &Domain = unsafe { object(domain) }?;
        if attr.is_null() {
            return Err(Code::INVAL);
        }
        // SAFETY: the application's attributes, alive for the call; the struct never grew.
        let attr = unsafe { &mut *attr };
        if attr.flags & !fi::FI_SYMMETRIC != 0 || !attr.name.is_null() {
            return Err(Code::NOSYS);
        }
        attr.type_ = fi::fi_av_type::FI_AV_TABLE;
        let fid = fi::fid_av { fid: head(fi::FI_CLASS_AV, context, &OPS), ops: table(&AV_OPS) };
        let av = Av { fid, domain: ptr::from_ref(domain), entries: Mutex::default(), uses: Uses::default() };
        // SAFETY: `out` is the application's.
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
        // SAFETY: the application's fid.
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
            // SAFETY: `count` addresses of 32 bytes, by the interface.
            let bytes = unsafe { at.wrapping_add(i).read_unaligned() };
            let result = av.insert(&bytes);
            inserted += i32::from(result.is_ok());
            if !fi_addr.is_null() {
                // SAFETY: `count` entries, by the interface.
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
        // SAFETY: the application's fid.
        let av: &Av = unsafe { object(av) }?;
        if fi_addr.is_null() && count > 0 {
            return Err(Code::INVAL);
        }
        for i in 0..count {
            // SAFETY: `count` entries, by the interface.
            let at = unsafe { fi_addr.wrapping_add(i).read() };
            let entry = av.lock().table.remove(&at).ok_or(Code::INVAL)?;
            // SAFETY: a domain outlives its address vectors.
            unsafe { &*av.domain }.card.lock().close_handle(entry.ahn);
        }
        Ok(0)
    })
}

unsafe extern "C" fn lookup(av: *mut fi::fid_av, fi_addr: u64, addr: *mut c_void, len: *mut usize) -> c_int {
    entry("fi_av_lookup", || {
        // SAFETY: the application's fid.
        let av: &Av = unsafe { object(av) }?;
        let entry = av.get(fi_addr).ok_or(Code::INVAL)?;
        // SAFETY: `len` holds the size of `addr`, by the interface.
        unsafe { copy_out(&entry.address.to_bytes(), addr, len) }?;
        Ok(0)
    })
}

/// Copies as much as there is room for and says how much there is.
///
/// # Safety
/// `len` is null or points to the bytes that `to` has room for.
pub(super) unsafe fn copy_out(bytes: &[u8], to: *mut c_void, len: *mut usize) -> Result<(), Code> {
    if len.is_null() {
        return Err(Code::INVAL);
    }
    // SAFETY: by contract.
    let room = unsafe { len.read() };
    // SAFETY: by contract.
    unsafe { len.write(bytes.len()) };
    if !to.is_null() {
        // SAFETY: `room` bytes by contract.
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
        // SAFETY: the application's fid.
        if unsafe { object::<Av, _>(av) }.is_err() || addr.is_null() {
            return ptr::null();
        }
        // SAFETY: an address of 32 bytes, by the interface.
        let bytes = unsafe { addr.cast::<[u8; ADDRESS_LEN]>().read_unaligned() };
        let text = match Address::from_bytes(&bytes) {
            Ok(address) => format!("fi_addr_efa://[{}]:{}:{}", address.gid, address.qpn, address.qkey),
            Err(error) => format!("{error}"),
        };
        let text = CString::new(text).unwrap_or_default();
        let bytes = text.as_bytes_with_nul();
        // SAFETY: `len` holds the size of `buf`.
        let room = unsafe { len.as_ref() }.copied().unwrap_or(0);
        // SAFETY: as above.
        if unsafe { copy_out(bytes, buf.cast(), len) }.is_ok() && room > 0 && room < bytes.len() {
            // SAFETY: `room` bytes, so the last one is there.
            unsafe { buf.wrapping_add(room - 1).write(0) };
        }
        buf
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(av)", || {
        // SAFETY: the application's fid.
        let av: &Av = unsafe { object(fid) }?;
        av.uses.none()?;
        // SAFETY: a domain outlives its address vectors.
        let domain = unsafe { &*av.domain };
        for entry in av.lock().table.values() {
            domain.card.lock().close_handle(entry.ahn);
        }
        domain.uses.end();
        // SAFETY: nothing uses it and the application closes it.
        drop(unsafe { take_back::<Av, _>(fid) });
        Ok(0)
    })
}
