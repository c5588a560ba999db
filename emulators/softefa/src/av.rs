//! `fid_av`: a table of addresses.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrogin_libfabric::bindings as fi;

use super::domain::Domain;
use super::entry::{Answer, Arg, Array, Call, Out, Room, entry_points};
use super::guard::Code;
use super::library::{refuse, refuse_attribute};
use super::object::{Held, Uses, close, give, head, object, table};
use super::unsupported;
use soft_nic::address::{ADDRESS_LEN, Address};
use soft_nic::card::{Card, Slab};

/// An address and the number of its address handle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub address: Address,
    pub ahn: u16,
    /// How often the address was inserted: the same address gets the same number.
    uses: u32,
}

#[repr(C)]
pub(super) struct Av {
    fid: fi::fid_av,
    pub domain: Held<Domain>,
    pub table: Arc<AvTable>,
    /// Endpoints bound to the address vector.
    pub uses: Uses,
}

/// The addresses, as endpoints use them.
pub(super) struct AvTable {
    card: Arc<Card>,
    pd: u32,
    entries: Mutex<Entries>,
}

/// Converts an entry's number to its index. The application may pass any number.
fn slot(at: u64) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

#[derive(Default)]
struct Entries {
    table: Slab<Entry>,
    /// Numbers by address, and by the sender of a completion.
    number_of: HashMap<Address, u64>,
    number_of_handle: HashMap<(u16, u16), u64>,
}

object!(Av, FI_CLASS_AV, "av");

impl AvTable {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, at: u64) -> Option<Entry> {
        self.lock().table.get(slot(at)).copied()
    }

    /// Returns an address's number.
    pub(super) fn find(&self, address: &Address) -> Option<u64> {
        self.lock().number_of.get(address).copied()
    }

    /// Returns the number of a queue pair on an address handle's card.
    pub(super) fn reverse(&self, ahn: u16, qpn: u16) -> Option<u64> {
        self.lock().number_of_handle.get(&(ahn, qpn)).copied()
    }

    fn insert(&self, bytes: &[u8; ADDRESS_LEN]) -> Result<u64, Code> {
        let address =
            Address::from_bytes(bytes).map_err(|error| refuse("fi_av_insert", format_args!("the address {error}")))?;
        let mut entries = self.lock();
        if let Some(at) = entries.number_of.get(&address).copied()
            && let Some(entry) = entries.table.get_mut(slot(at))
        {
            entry.uses += 1;
            return Ok(at);
        }
        let ahn = self.card.lock().open_handle(self.pd, address.gid)?;
        let at = entries.table.insert(Entry { address, ahn, uses: 1 }).into();
        entries.number_of.insert(address, at);
        entries.number_of_handle.insert((ahn, address.qpn), at);
        Ok(at)
    }

    fn remove(&self, at: u64) -> Result<(), Code> {
        let mut entries = self.lock();
        let entry = entries.table.get_mut(slot(at)).ok_or(Code::INVAL)?;
        entry.uses -= 1;
        if entry.uses > 0 {
            return Ok(());
        }
        if let Some(Entry { address, ahn, .. }) = entries.table.remove(slot(at)) {
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
        for (_, entry) in entries.table.iter() {
            core.close_handle(entry.ahn);
        }
    }
}

static OPS: fi::fi_ops = fi::fi_ops { close: Some(close::<Av>), ..unsupported::FID };

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

/// An insertion's error numbers: with `FI_SYNC_ERR`, the context.
struct Errors<'a>(Room<'a, c_int>);

impl<'a> Arg<'a, (*mut c_void, usize, u64)> for Errors<'a> {
    unsafe fn of((context, count, flags): (*mut c_void, usize, u64), call: &'a Call) -> Result<Self, Code> {
        if flags & fi::FI_SYNC_ERR == 0 {
            return Ok(Self(Room::NONE));
        }
        // SAFETY: with the flag, the context has room for a number for each address (`fi_av(3)`).
        Ok(Self(unsafe { Arg::of((context, count), call) }?))
    }
}

entry_points! {
    /// `fi_av_open`.
    pub(super) fn open(
        domain: *mut fi::fid_domain,
        attr: *mut fi::fi_av_attr,
        out: *mut *mut fi::fid_av,
        context: *mut c_void,
    ) -> c_int
    as ("fi_av_open") (
        domain: &Domain = domain,
        attr: Option<&mut fi::fi_av_attr> = attr,
        out: Out<'_, *mut fi::fid_av> = out,
    ) {
        let attr = attr.ok_or(Code::INVAL)?;
        let refuse = |code, why: std::fmt::Arguments<'_>| Err(refuse_attribute("fi_av_open", code, why));
        if attr.flags & !fi::FI_SYMMETRIC != 0 {
            return refuse(Code::NOSYS, format_args!("flags {:#x}: only FI_SYMMETRIC", attr.flags));
        }
        if !attr.name.is_null() {
            return refuse(Code::NOSYS, format_args!("name: there are no shared address vectors"));
        }
        if attr.type_ > fi::fi_av_type::FI_AV_TABLE {
            return refuse(Code::INVAL, format_args!("there is no type {}", attr.type_));
        }
        if attr.rx_ctx_bits != 0 {
            return refuse(Code::INVAL, format_args!("rx_ctx_bits {}: there are no receive contexts", attr.rx_ctx_bits));
        }
        attr.type_ = fi::fi_av_type::FI_AV_TABLE;
        let fid = fi::fid_av { fid: head(fi::FI_CLASS_AV, context, &OPS), ops: table(&AV_OPS) };
        let table = Arc::new(AvTable { card: domain.card.clone(), pd: domain.pd, entries: Mutex::default() });
        give(Av { fid, domain: Held::new(domain), table, uses: Uses::default() }, &out);
        Ok(0)
    }

    fn insert(
        av: *mut fi::fid_av,
        addr: *const c_void,
        count: usize,
        fi_addr: *mut fi::fi_addr_t,
        flags: u64,
        context: *mut c_void,
    ) -> c_int
    as ("fi_av_insert") (
        av: &Av = av,
        addresses: Array<'_, [u8; ADDRESS_LEN]> = (addr, count),
        numbers: Room<'_, fi::fi_addr_t> = (fi_addr, count),
        errors: Errors<'_> = (context, count, flags),
    ) {
        if flags & !(fi::FI_MORE | fi::FI_SYNC_ERR) != 0 {
            return Err(Code::BADFLAGS);
        }
        let mut inserted = 0;
        for (i, bytes) in addresses.iter().enumerate() {
            let result = av.table.insert(&bytes);
            inserted += i32::from(result.is_ok());
            numbers.set(i, result.unwrap_or(fi::FI_ADDR_NOTAVAIL));
            errors.0.set(i, result.map_or_else(|code| code.0, |_| 0));
        }
        Ok(inserted)
    }

    fn remove(av: *mut fi::fid_av, fi_addr: *mut fi::fi_addr_t, count: usize, _flags: u64) -> c_int
    as ("fi_av_remove") (av: &Av = av, numbers: Array<'_, fi::fi_addr_t> = (fi_addr.cast_const(), count)) {
        numbers.iter().try_for_each(|at| av.table.remove(at))?;
        Ok(0)
    }

    fn lookup(av: *mut fi::fid_av, fi_addr: u64, addr: *mut c_void, len: *mut usize) -> c_int
    as ("fi_av_lookup") (av: &Av = av, answer: Answer<'_> = (addr, len)) {
        let entry = av.table.get(fi_addr).ok_or(Code::INVAL)?;
        answer.fill(&entry.address.to_bytes())?;
        Ok(0)
    }

    fn straddr(av: *mut fi::fid_av, addr: *const c_void, buf: *mut c_char, len: *mut usize) -> *const c_char
    as ("fi_av_straddr", ptr::null()) (
        _av: &Av = av,
        address: Option<&[u8; ADDRESS_LEN]> = addr,
        answer: Answer<'_> = (buf, len),
    ) {
        let text = match Address::from_bytes(address.ok_or(Code::INVAL)?) {
            Ok(address) => address.text(),
            Err(error) => format!("{error}"),
        };
        let mut bytes = CString::new(text).unwrap_or_default().into_bytes_with_nul();
        // Cuts off what does not fit, and terminates the rest.
        let room = answer.room();
        if room > 0 && room < bytes.len() {
            bytes[room - 1] = 0;
        }
        let _ = answer.fill(&bytes);
        Ok(buf.cast_const())
    }
}
