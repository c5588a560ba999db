//! `fid_cntr`: a completion counter of the card.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrogin_libfabric::bindings as fi;

use super::bindings::SoftCount;
use super::completion::Completer;
use super::domain::Domain;
use super::guard::{Code, entry, entry_or};
use super::library::refuse;
use super::object::{Object, Uses, give, head, object, table, take_back};
use super::unsupported;
use super::wait::Sleep;
use soft_nic::card::SetupError;
use soft_nic::card::counter::{Counter, Word};
use soft_nic::fault::COUNTER_MASK;
use soft_nic::memory;

#[repr(C)]
pub(super) struct Cntr {
    fid: fi::fid_cntr,
    domain: *const Domain,
    /// Number on the card.
    pub id: u32,
    completions: *const u64,
    errors: *const u64,
    may_wait: bool,
    /// Events that the protocol counts in software beside the card.
    pub soft: Arc<SoftCount>,
    /// Endpoints whose events it counts. Their completions are processed before a read.
    endpoints: Mutex<Vec<Arc<dyn Completer>>>,
    /// Endpoints bound to the counter.
    pub uses: Uses,
}

// SAFETY: repr(C), begins with fid_cntr; this provider makes fids of this class here only.
unsafe impl Object for Cntr {
    const CLASS: u32 = fi::FI_CLASS_CNTR;
}

impl Cntr {
    pub(super) fn domain(&self) -> *const Domain {
        self.domain
    }

    fn value(&self) -> u64 {
        // SAFETY: the counter's word is mapped until the counter is closed, which drops this object.
        let card = unsafe { memory::load_acquire(self.completions) };
        card.wrapping_add(self.soft.completions.load(Ordering::Acquire)) & COUNTER_MASK
    }

    fn errors(&self) -> u64 {
        // SAFETY: the counter's word is mapped until the counter is closed, which drops this object.
        let card = unsafe { memory::load_acquire(self.errors) };
        card.wrapping_add(self.soft.errors.load(Ordering::Acquire)) & COUNTER_MASK
    }

    pub(super) fn attach(&self, endpoint: &Arc<dyn Completer>) {
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        if !endpoints.iter().any(|p| Arc::ptr_eq(p, endpoint)) {
            endpoints.push(endpoint.clone());
        }
    }

    pub(super) fn detach(&self, endpoint: &Arc<dyn Completer>) {
        self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).retain(|p| !Arc::ptr_eq(p, endpoint));
    }

    /// The value after a poll of the card and the endpoints. An application that reads a counter mostly waits for a change.
    fn polled_value(&self) -> u64 {
        self.progress();
        self.value()
    }

    fn progress(&self) {
        // SAFETY: a domain counts its objects in `uses` and cannot be closed before them.
        unsafe { &*self.domain }.card.poll();
        let endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for endpoint in endpoints {
            endpoint.settle();
        }
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

static CNTR_OPS: fi::fi_ops_cntr = fi::fi_ops_cntr {
    size: size_of::<fi::fi_ops_cntr>(),
    read: Some(read),
    readerr: Some(readerr),
    add: Some(add),
    set: Some(set),
    wait: Some(wait),
    adderr: Some(adderr),
    seterr: Some(seterr),
    export_xpu: Some(unsupported::cntr_export_xpu),
};

/// The fields of `fi_cntr_attr` that every version has.
#[repr(C)]
struct CntrAttrHead {
    events: fi::fi_cntr_events::Type,
    wait_obj: fi::fi_wait_obj::Type,
    wait_set: *mut fi::fid_wait,
    flags: u64,
}

/// Whether waiting is allowed.
fn check(attr: *const fi::fi_cntr_attr) -> Result<bool, Code> {
    // SAFETY: null, or attributes that the application keeps alive during the call; every version has the fields that are read.
    let Some(attr) = (unsafe { attr.cast::<CntrAttrHead>().as_ref() }) else { return Ok(true) };
    let may_wait = match attr.wait_obj {
        fi::fi_wait_obj::FI_WAIT_NONE => false,
        fi::fi_wait_obj::FI_WAIT_UNSPEC | fi::fi_wait_obj::FI_WAIT_YIELD => true,
        _ => return Err(Code::UNSUPPORTED),
    };
    if attr.events != fi::fi_cntr_events::FI_CNTR_EVENTS_COMP || attr.flags != 0 {
        return Err(Code::UNSUPPORTED);
    }
    Ok(may_wait)
}

/// `fi_cntr_open`.
pub(super) unsafe extern "C" fn open(
    domain: *mut fi::fid_domain,
    attr: *mut fi::fi_cntr_attr,
    out: *mut *mut fi::fid_cntr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: null, or attributes that the application keeps alive during the call.
    unsafe { open_ext(domain, attr, out, context, ptr::null_mut()) }
}

/// `cntr_open_ext` of the GDA operations: the counts lie in the application's memory.
pub(super) unsafe extern "C" fn open_ext(
    domain: *mut fi::fid_domain,
    attr: *mut fi::fi_cntr_attr,
    out: *mut *mut fi::fid_cntr,
    context: *mut c_void,
    init: *mut fi::fi_efa_comp_cntr_init_attr,
) -> c_int {
    entry("fi_cntr_open", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let domain: &Domain = unsafe { object(domain) }?;
        let may_wait = check(attr)?;
        let faults = domain.card.lock().config.faults.clone();
        if faults.no_counters && !init.is_null() {
            refuse("cntr_open_ext", format_args!("SOFTEFA_FAULTS=no_counters: there are no counters in hardware"));
            return Err(Code::UNSUPPORTED);
        }
        let start = u64::from(faults.cntr_start);
        // SAFETY: null, or attributes that the application keeps alive during the call; every version has the fields that are read.
        let (completions, errors) = match unsafe { init.as_ref() } {
            None => (Word::own(start), Word::own(0)),
            Some(init) => {
                const COMP: u32 = fi::FI_EFA_COMP_CNTR_INIT_WITH_COMP_EXTERNAL_MEM;
                const ERR: u32 = fi::FI_EFA_COMP_CNTR_INIT_WITH_ERR_EXTERNAL_MEM;
                if init.comp_mask != 0 || init.flags & !(COMP | ERR) != 0 || init.reserved != 0 {
                    return Err(Code::INVAL);
                }
                let word = |flag, location: &fi::fi_efa_memory_location, start| {
                    if init.flags & flag != 0 {
                        // SAFETY: the application keeps the memory mapped until it closes the counter.
                        unsafe { word_at(location, start) }
                    } else {
                        Ok(Word::own(start))
                    }
                };
                (word(COMP, &init.comp_cntr_ext_mem, start)?, word(ERR, &init.err_cntr_ext_mem, 0)?)
            }
        };
        let (at, errors_at) = (completions.address(), errors.address());
        let id = domain.card.lock().open_counter(Counter { completions, errors, attached: 0 }).map_err(|error| {
            if matches!(error, SetupError::Counters(_)) {
                refuse("fi_cntr_open", format_args!("{error}"));
            }
            Code::from(error)
        })?;
        let fid = fi::fid_cntr { fid: head(fi::FI_CLASS_CNTR, context, &OPS), ops: table(&CNTR_OPS) };
        let cntr = Cntr {
            fid,
            domain: ptr::from_ref(domain),
            id,
            completions: at,
            errors: errors_at,
            may_wait,
            soft: Arc::default(),
            endpoints: Mutex::default(),
            uses: Uses::default(),
        };
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        if let Err(code) = unsafe { give(cntr, out) } {
            let _ = domain.card.lock().close_counter(id);
            return Err(code);
        }
        domain.uses.begin();
        Ok(0)
    })
}

/// # Safety
/// The application keeps the location's memory mapped and writable until it closes the counter.
unsafe fn word_at(location: &fi::fi_efa_memory_location, start: u64) -> Result<Word, Code> {
    const LEN: usize = size_of::<u64>();
    match u32::from(location.type_) {
        fi::fi_efa_memory_location_type::FI_EFA_MEMORY_LOCATION_VA => {
            let at: *mut u64 = location.ptr.cast();
            if !at.is_aligned() {
                return Err(Code::INVAL);
            }
            memory::populate(at as usize, LEN, true)?;
            // SAFETY: the address is aligned and writable, as just checked; this function's caller keeps the memory mapped.
            Ok(unsafe { Word::at(at, start) })
        }
        fi::fi_efa_memory_location_type::FI_EFA_MEMORY_LOCATION_DMABUF => {
            if !location.dmabuf.offset.is_multiple_of(LEN as u64) || location.dmabuf.fd < 0 {
                return Err(Code::INVAL);
            }
            // SAFETY: the application keeps the descriptor open during the call.
            let fd = unsafe { BorrowedFd::borrow_raw(location.dmabuf.fd) };
            Ok(Word::mapped(fd, location.dmabuf.offset, start)?)
        }
        _ => Err(Code::INVAL),
    }
}

unsafe extern "C" fn read(cntr: *mut fi::fid_cntr) -> u64 {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    entry_or("fi_cntr_read", 0, || unsafe { object::<Cntr, _>(cntr) }.map_or(0, Cntr::polled_value))
}

unsafe extern "C" fn readerr(cntr: *mut fi::fid_cntr) -> u64 {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    entry_or("fi_cntr_readerr", 0, || unsafe { object::<Cntr, _>(cntr) }.map_or(0, Cntr::errors))
}

/// # Safety
/// `cntr` is the application's fid.
unsafe fn change(call: &str, cntr: *mut fi::fid_cntr, how: impl FnOnce(&mut Counter, &SoftCount)) -> c_int {
    entry(call, || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let cntr: &Cntr = unsafe { object(cntr) }?;
        // SAFETY: a domain counts its objects in `uses` and cannot be closed before them.
        let mut core = unsafe { &*cntr.domain }.card.lock();
        how(core.counters.get_mut(cntr.id).ok_or(Code::INVAL)?, &cntr.soft);
        Ok(0)
    })
}

unsafe extern "C" fn add(cntr: *mut fi::fid_cntr, value: u64) -> c_int {
    // SAFETY: the application keeps the fid open during the call.
    unsafe { change("fi_cntr_add", cntr, |c, _| c.completions.add(value)) }
}

unsafe extern "C" fn set(cntr: *mut fi::fid_cntr, value: u64) -> c_int {
    // SAFETY: the application keeps the fid open during the call.
    unsafe {
        change("fi_cntr_set", cntr, |c, soft| {
            soft.completions.store(0, Ordering::Release);
            c.completions.set(value);
        })
    }
}

unsafe extern "C" fn adderr(cntr: *mut fi::fid_cntr, value: u64) -> c_int {
    // SAFETY: the application keeps the fid open during the call.
    unsafe { change("fi_cntr_adderr", cntr, |c, _| c.errors.add(value)) }
}

unsafe extern "C" fn seterr(cntr: *mut fi::fid_cntr, value: u64) -> c_int {
    // SAFETY: the application keeps the fid open during the call.
    unsafe {
        change("fi_cntr_seterr", cntr, |c, soft| {
            soft.errors.store(0, Ordering::Release);
            c.errors.set(value);
        })
    }
}

/// Polls that only yield before a waiting thread sleeps between polls, and the length of that sleep.
const YIELDS: u32 = 200;
const REST: Duration = Duration::from_micros(50);

unsafe extern "C" fn wait(cntr: *mut fi::fid_cntr, threshold: u64, timeout: c_int) -> c_int {
    entry("fi_cntr_wait", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let cntr: &Cntr = unsafe { object(cntr) }?;
        if !cntr.may_wait || threshold > COUNTER_MASK {
            return Err(Code::INVAL);
        }
        let errors = cntr.errors();
        let sleep = Sleep::until(timeout);
        let mut polls = 0u32;
        loop {
            if cntr.polled_value() >= threshold {
                return Ok(0);
            }
            if cntr.errors() != errors {
                return Err(Code(fi::FI_EAVAIL));
            }
            if sleep.is_over() {
                return Err(Code(fi::FI_ETIMEDOUT));
            }
            polls = polls.saturating_add(1);
            if polls < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(REST);
            }
        }
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(cntr)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let cntr: &Cntr = unsafe { object(fid) }?;
        cntr.uses.none()?;
        // SAFETY: a domain counts its objects in `uses` and cannot be closed before them.
        let domain = unsafe { &*cntr.domain };
        let counter = domain.card.lock().close_counter(cntr.id)?;
        drop(counter);
        domain.uses.end();
        // SAFETY: no other object uses this one, and the application does not use a fid after it closed it.
        drop(unsafe { take_back::<Cntr, _>(fid) });
        Ok(0)
    })
}
