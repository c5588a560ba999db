//! `fid_eq`: an event queue. This provider has no events of its own, so the queue holds only those that the application writes.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrogin_libfabric::bindings as fi;

use super::fabric::Fabric;
use super::guard::{Code, entry, entry_or};
use super::object::{Object, Uses, give, head, object, table, take_back};
use super::unsupported;
use super::wait::{self, WaitObject};
use soft_nic::card::signal::Signal;

#[repr(C)]
pub(super) struct Eq {
    fid: fi::fid_eq,
    fabric: *const Fabric,
    events: Mutex<VecDeque<(u32, Vec<u8>)>>,
    size: usize,
    /// `fi_eq_write` is allowed.
    writable: bool,
    wait: WaitObject,
    signal: Signal,
    /// Endpoints bound to the queue.
    pub uses: Uses,
}

// SAFETY: repr(C), begins with fid_eq; this provider makes fids of this class here only.
unsafe impl Object for Eq {
    const CLASS: u32 = fi::FI_CLASS_EQ;
}

/// Events of a queue without a stated size.
const DEFAULT_SIZE: usize = 256;
/// Events of a queue at most.
const MAX_SIZE: usize = 1 << 20;

static OPS: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: Some(close),
    bind: Some(unsupported::bind),
    control: Some(control),
    ops_open: Some(unsupported::ops_open),
    tostr: Some(unsupported::tostr),
    ops_set: Some(unsupported::ops_set),
};

static EQ_OPS: fi::fi_ops_eq = fi::fi_ops_eq {
    size: size_of::<fi::fi_ops_eq>(),
    read: Some(read),
    readerr: Some(readerr),
    write: Some(write),
    sread: Some(sread),
    strerror: Some(strerror),
};

impl Eq {
    pub(super) fn fabric(&self) -> *const Fabric {
        self.fabric
    }

    fn events(&self) -> MutexGuard<'_, VecDeque<(u32, Vec<u8>)>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a thread may sleep: the queue is empty, and the next event raises the signal.
    pub(super) fn may_sleep(&self) -> bool {
        self.signal.arm();
        self.events().is_empty()
    }
}

/// `fi_eq_open`.
pub(super) unsafe extern "C" fn open(
    fabric: *mut fi::fid_fabric,
    attr: *mut fi::fi_eq_attr,
    out: *mut *mut fi::fid_eq,
    context: *mut c_void,
) -> c_int {
    entry("fi_eq_open", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let fabric: &Fabric = unsafe { object(fabric) }?;
        // SAFETY: null, or attributes that the application keeps alive during the call; every version has the fields that are read.
        let (size, flags, object) = match unsafe { attr.as_ref() } {
            Some(attr) => (attr.size, attr.flags, attr.wait_obj),
            None => (0, 0, fi::fi_wait_obj::FI_WAIT_NONE),
        };
        if flags & !(fi::FI_WRITE | fi::FI_AFFINITY) != 0 {
            return Err(Code::BADFLAGS);
        }
        if size > MAX_SIZE {
            return Err(Code::INVAL);
        }
        let eq = Eq {
            fid: fi::fid_eq { fid: head(fi::FI_CLASS_EQ, context, &OPS), ops: table(&EQ_OPS) },
            fabric: ptr::from_ref(fabric),
            events: Mutex::default(),
            size: if size == 0 { DEFAULT_SIZE } else { size },
            writable: flags & fi::FI_WRITE != 0,
            wait: WaitObject::of(object)?,
            signal: Signal::new()?,
            uses: Uses::default(),
        };
        // SAFETY: `out` is null, or a pointer of the application that is writable during the call.
        unsafe { give(eq, out) }?;
        fabric.uses.begin();
        Ok(0)
    })
}

/// # Safety
/// The application keeps `eq` open. `event` is null or writable, and `buf` is null or has `len` writable bytes.
unsafe fn read_now(
    eq: *mut fi::fid_eq,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    flags: u64,
) -> Result<i32, Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    let eq: &Eq = unsafe { object(eq) }?;
    if flags & !fi::FI_PEEK != 0 {
        return Err(Code::BADFLAGS);
    }
    let mut events = eq.events();
    let (kind, bytes) = events.front().ok_or(Code::AGAIN)?;
    if len < bytes.len() || buf.is_null() && !bytes.is_empty() {
        return Err(Code(fi::FI_ETOOSMALL));
    }
    if !event.is_null() {
        // SAFETY: not null, and this function's caller keeps the variable writable.
        unsafe { event.write(*kind) };
    }
    // SAFETY: `buf` has `len` writable bytes, as this function's caller states, and the event has no more, as just checked.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), buf.cast(), bytes.len()) };
    let read = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
    if flags & fi::FI_PEEK == 0 {
        events.pop_front();
    }
    Ok(read)
}

unsafe extern "C" fn read(eq: *mut fi::fid_eq, event: *mut u32, buf: *mut c_void, len: usize, flags: u64) -> isize {
    // SAFETY: this function's caller keeps the fid open and gives room for the entries; the arguments are passed on unchanged.
    entry("fi_eq_read", || unsafe { read_now(eq, event, buf, len, flags) }) as isize
}

unsafe extern "C" fn sread(
    fid: *mut fi::fid_eq,
    event: *mut u32,
    buf: *mut c_void,
    len: usize,
    timeout: c_int,
    flags: u64,
) -> isize {
    let call = || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let eq: &Eq = unsafe { object(fid) }?;
        if eq.wait == WaitObject::None {
            return Err(Code::NOSYS);
        }
        // SAFETY: the application keeps the fid open during the call, and its variables writable.
        let read = || unsafe { read_now(fid, event, buf, len, flags) };
        wait::read_with_timeout(&eq.signal, timeout, || eq.may_sleep(), read)
    };
    entry("fi_eq_sread", call) as isize
}

/// No event is an error.
unsafe extern "C" fn readerr(eq: *mut fi::fid_eq, _to: *mut fi::fi_eq_err_entry, _flags: u64) -> isize {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    entry("fi_eq_readerr", || unsafe { object::<Eq, _>(eq) }.and(Err(Code::AGAIN))) as isize
}

unsafe extern "C" fn write(eq: *mut fi::fid_eq, event: u32, buf: *const c_void, len: usize, flags: u64) -> isize {
    let call = || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let eq: &Eq = unsafe { object(eq) }?;
        if flags != 0 {
            return Err(Code::BADFLAGS);
        }
        if !eq.writable || buf.is_null() && len > 0 {
            return Err(Code::INVAL);
        }
        let mut events = eq.events();
        if events.len() >= eq.size {
            return Err(Code(fi::FI_EAGAIN));
        }
        let mut bytes = vec![0; len];
        // SAFETY: not null, or empty; the application states that `buf` has `len` bytes.
        unsafe { ptr::copy_nonoverlapping(buf.cast(), bytes.as_mut_ptr(), len) };
        events.push_back((event, bytes));
        drop(events);
        eq.signal.raise();
        Ok(i32::try_from(len).unwrap_or(i32::MAX))
    };
    entry("fi_eq_write", call) as isize
}

unsafe extern "C" fn strerror(
    _eq: *mut fi::fid_eq,
    _prov_errno: c_int,
    _err_data: *const c_void,
    _buf: *mut c_char,
    _len: usize,
) -> *const c_char {
    entry_or("fi_eq_strerror", c"".as_ptr(), || c"no error".as_ptr())
}

unsafe extern "C" fn control(fid: *mut fi::fid, command: c_int, arg: *mut c_void) -> c_int {
    entry("fi_control(eq)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let eq: &Eq = unsafe { object(fid) }?;
        // SAFETY: `arg` is null or a variable of the type that the command requires (`fi_control(3)`).
        unsafe { wait::control(eq.wait, Some(&eq.signal), command, arg) }
    })
}

unsafe extern "C" fn close(fid: *mut fi::fid) -> c_int {
    entry("fi_close(eq)", || {
        // SAFETY: the application keeps the fid open during the call; `object` checks its class.
        let eq: &Eq = unsafe { object(fid) }?;
        eq.uses.none()?;
        // SAFETY: a fabric counts its queues in `uses` and cannot be closed before them.
        unsafe { &*eq.fabric }.uses.end();
        // SAFETY: no other object uses this one, and the application does not use a fid after it closed it.
        drop(unsafe { take_back::<Eq, _>(fid) });
        Ok(0)
    })
}
