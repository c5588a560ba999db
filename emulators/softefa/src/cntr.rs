//! `fid_cntr`: one of the card's completion counters.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrogin_libfabric::bindings as fi;

use super::bindings::SoftCount;
use super::completion::Completer;
use super::domain::Domain;
use super::entry::{Out, entry_points};
use super::guard::Code;
use super::library::{refuse, refuse_attribute};
use super::object::{Held, Uses, close, give, head, object, table};
use super::unsupported;
use super::wait::Sleep;
use soft_nic::card::SetupError;
use soft_nic::card::counter::{Counter, Word};
use soft_nic::fault::COUNTER_MASK;
use soft_nic::memory;

#[repr(C)]
pub(super) struct Cntr {
    fid: fi::fid_cntr,
    pub domain: Held<Domain>,
    /// The counter's number on the card.
    pub id: u32,
    completions: *const u64,
    errors: *const u64,
    may_wait: bool,
    /// Events that the protocol counts in software, besides the card's.
    pub soft: Arc<SoftCount>,
    /// Endpoints whose events it counts. Their completions are processed before a read.
    endpoints: Mutex<Vec<Arc<dyn Completer>>>,
    /// Endpoints bound to the counter.
    pub uses: Uses,
}

object!(Cntr, FI_CLASS_CNTR, "cntr", {
    fn close(&self) -> Result<(), Code> {
        let counter = self.domain.card.lock().close_counter(self.id)?;
        drop(counter);
        Ok(())
    }
});

impl Cntr {
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

    /// Returns the value after polling the card and the endpoints: an application that reads a counter is mostly
    /// waiting for a change.
    fn polled_value(&self) -> u64 {
        self.progress();
        self.value()
    }

    fn progress(&self) {
        self.domain.card.poll();
        let endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for endpoint in endpoints {
            endpoint.settle();
        }
    }
}

static OPS: fi::fi_ops = fi::fi_ops { close: Some(close::<Cntr>), ..unsupported::FID };

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

/// Checks the attributes, and returns whether waiting is allowed.
fn check(attr: Option<&CntrAttrHead>) -> Result<bool, Code> {
    let Some(attr) = attr else { return Ok(true) };
    let refuse = |why: std::fmt::Arguments<'_>| Err(refuse_attribute("fi_cntr_open", Code::UNSUPPORTED, why));
    let may_wait = match attr.wait_obj {
        fi::fi_wait_obj::FI_WAIT_NONE => false,
        fi::fi_wait_obj::FI_WAIT_UNSPEC | fi::fi_wait_obj::FI_WAIT_YIELD => true,
        other => return refuse(format_args!("there is no wait_obj {other} here")),
    };
    if attr.events != fi::fi_cntr_events::FI_CNTR_EVENTS_COMP {
        return refuse(format_args!("events {}: counters count completions only", attr.events));
    }
    if attr.flags != 0 {
        return refuse(format_args!("flags {:#x}: there are none", attr.flags));
    }
    Ok(may_wait)
}

/// Creates the counts, in the application's memory if it names any.
fn words(init: Option<&fi::fi_efa_comp_cntr_init_attr>, start: u64) -> Result<(Word, Word), Code> {
    const COMP: u32 = fi::FI_EFA_COMP_CNTR_INIT_WITH_COMP_EXTERNAL_MEM;
    const ERR: u32 = fi::FI_EFA_COMP_CNTR_INIT_WITH_ERR_EXTERNAL_MEM;
    let Some(init) = init else { return Ok((Word::own(start), Word::own(0))) };
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
    Ok((word(COMP, &init.comp_cntr_ext_mem, start)?, word(ERR, &init.err_cntr_ext_mem, 0)?))
}

fn open_counter(
    domain: &Domain,
    attr: Option<&CntrAttrHead>,
    init: Option<&fi::fi_efa_comp_cntr_init_attr>,
    out: &Out<'_, *mut fi::fid_cntr>,
    context: *mut c_void,
) -> Result<i32, Code> {
    let may_wait = check(attr)?;
    let faults = domain.card.lock().config.faults.clone();
    if faults.no_counters && init.is_some() {
        refuse("cntr_open_ext", format_args!("SOFTEFA_FAULTS=no_counters: there are no counters in hardware"));
        return Err(Code::UNSUPPORTED);
    }
    let (completions, errors) = words(init, u64::from(faults.cntr_start))?;
    let (at, errors_at) = (completions.address(), errors.address());
    let id = domain.card.lock().open_counter(Counter { completions, errors, attached: 0 }).map_err(|error| {
        if matches!(error, SetupError::Counters(_)) {
            refuse("fi_cntr_open", format_args!("{error}"));
        }
        Code::from(error)
    })?;
    let cntr = Cntr {
        fid: fi::fid_cntr { fid: head(fi::FI_CLASS_CNTR, context, &OPS), ops: table(&CNTR_OPS) },
        domain: Held::new(domain),
        id,
        completions: at,
        errors: errors_at,
        may_wait,
        soft: Arc::default(),
        endpoints: Mutex::default(),
        uses: Uses::default(),
    };
    give(cntr, out);
    Ok(0)
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
            // SAFETY: the address is aligned and writable, as just checked; this function's caller keeps the memory
            // mapped.
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

fn change(cntr: &Cntr, how: impl FnOnce(&mut Counter, &SoftCount)) -> Result<i32, Code> {
    let mut core = cntr.domain.card.lock();
    how(core.counters.get_mut(cntr.id).ok_or(Code::INVAL)?, &cntr.soft);
    Ok(0)
}

/// A waiting thread yields after each of this many polls, and then sleeps this long after each.
const YIELDS: u32 = 200;
const REST: Duration = Duration::from_micros(50);

entry_points! {
    /// `fi_cntr_open`.
    pub(super) fn open(
        domain: *mut fi::fid_domain,
        attr: *mut fi::fi_cntr_attr,
        out: *mut *mut fi::fid_cntr,
        context: *mut c_void,
    ) -> c_int
    as ("fi_cntr_open") (
        domain: &Domain = domain,
        attr: Option<&CntrAttrHead> = attr.cast_const(),
        out: Out<'_, *mut fi::fid_cntr> = out,
    ) {
        open_counter(domain, attr, None, &out, context)
    }

    /// `cntr_open_ext` of the GDA operations: the counts are in the application's memory.
    pub(super) fn open_ext(
        domain: *mut fi::fid_domain,
        attr: *mut fi::fi_cntr_attr,
        out: *mut *mut fi::fid_cntr,
        context: *mut c_void,
        init: *mut fi::fi_efa_comp_cntr_init_attr,
    ) -> c_int
    as ("fi_cntr_open") (
        domain: &Domain = domain,
        attr: Option<&CntrAttrHead> = attr.cast_const(),
        out: Out<'_, *mut fi::fid_cntr> = out,
        init: Option<&fi::fi_efa_comp_cntr_init_attr> = init.cast_const(),
    ) {
        open_counter(domain, attr, init, &out, context)
    }

    fn read(cntr: *mut fi::fid_cntr) -> u64 as ("fi_cntr_read", 0) (cntr: &Cntr = cntr) {
        Ok(cntr.polled_value())
    }

    fn readerr(cntr: *mut fi::fid_cntr) -> u64 as ("fi_cntr_readerr", 0) (cntr: &Cntr = cntr) {
        Ok(cntr.errors())
    }

    fn add(cntr: *mut fi::fid_cntr, value: u64) -> c_int as ("fi_cntr_add") (cntr: &Cntr = cntr) {
        change(cntr, |c, _| c.completions.add(value))
    }

    fn set(cntr: *mut fi::fid_cntr, value: u64) -> c_int as ("fi_cntr_set") (cntr: &Cntr = cntr) {
        change(cntr, |c, soft| {
            soft.completions.store(0, Ordering::Release);
            c.completions.set(value);
        })
    }

    fn adderr(cntr: *mut fi::fid_cntr, value: u64) -> c_int as ("fi_cntr_adderr") (cntr: &Cntr = cntr) {
        change(cntr, |c, _| c.errors.add(value))
    }

    fn seterr(cntr: *mut fi::fid_cntr, value: u64) -> c_int as ("fi_cntr_seterr") (cntr: &Cntr = cntr) {
        change(cntr, |c, soft| {
            soft.errors.store(0, Ordering::Release);
            c.errors.set(value);
        })
    }

    fn wait(cntr: *mut fi::fid_cntr, threshold: u64, timeout: c_int) -> c_int as ("fi_cntr_wait") (cntr: &Cntr = cntr) {
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
    }
}
