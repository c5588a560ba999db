//! `fid_eq`: an event queue. This provider has no events of its own, so the queue holds only those that the application
//! writes.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrogin_libfabric::bindings as fi;

use super::entry::{Array, Command, Out, Room, entry_points};
use super::fabric::Fabric;
use super::guard::Code;
use super::library::refuse_attribute;
use super::object::{Held, Uses, close, give, head, object, table};
use super::unsupported;
use super::wait::{self, WaitObject};
use soft_nic::card::signal::Signal;

#[repr(C)]
pub(super) struct Eq {
    fid: fi::fid_eq,
    pub fabric: Held<Fabric>,
    events: Mutex<VecDeque<(u32, Vec<u8>)>>,
    size: usize,
    /// `fi_eq_write` is allowed.
    writable: bool,
    wait: WaitObject,
    signal: Signal,
    /// Endpoints bound to the queue.
    pub uses: Uses,
}

object!(Eq, FI_CLASS_EQ, "eq");

/// How many events a queue holds if no size is stated.
const DEFAULT_SIZE: usize = 256;
/// Maximum number of events in a queue.
const MAX_SIZE: usize = 1 << 20;

static OPS: fi::fi_ops = fi::fi_ops { close: Some(close::<Eq>), control: Some(control), ..unsupported::FID };

static EQ_OPS: fi::fi_ops_eq = fi::fi_ops_eq {
    size: size_of::<fi::fi_ops_eq>(),
    read: Some(read),
    readerr: Some(readerr),
    write: Some(write),
    sread: Some(sread),
    strerror: Some(strerror),
};

impl Eq {
    fn events(&self) -> MutexGuard<'_, VecDeque<(u32, Vec<u8>)>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a thread may sleep: the queue is empty, and the next event raises the signal.
    pub(super) fn may_sleep(&self) -> bool {
        self.signal.arm();
        self.events().is_empty()
    }
}

fn read_now(eq: &Eq, event: Option<&Out<'_, u32>>, room: &Room<'_, u8>, flags: u64) -> Result<i32, Code> {
    if flags & !fi::FI_PEEK != 0 {
        return Err(Code::BADFLAGS);
    }
    let mut events = eq.events();
    let (kind, bytes) = events.front().ok_or(Code::AGAIN)?;
    if room.len() < bytes.len() {
        return Err(Code(fi::FI_ETOOSMALL));
    }
    if let Some(event) = event {
        event.write(*kind);
    }
    room.copy(bytes);
    let read = i32::try_from(bytes.len()).unwrap_or(i32::MAX);
    if flags & fi::FI_PEEK == 0 {
        events.pop_front();
    }
    Ok(read)
}

fn create(fabric: &Fabric, attr: Option<&fi::fi_eq_attr>, context: *mut c_void) -> Result<Eq, Code> {
    let (size, flags, object) = match attr {
        Some(attr) => (attr.size, attr.flags, attr.wait_obj),
        None => (0, 0, fi::fi_wait_obj::FI_WAIT_NONE),
    };
    if flags & !(fi::FI_WRITE | fi::FI_AFFINITY) != 0 {
        let why = format_args!("flags {flags:#x}: only FI_WRITE and FI_AFFINITY");
        return Err(refuse_attribute("fi_eq_open", Code::BADFLAGS, why));
    }
    if size > MAX_SIZE {
        return Err(refuse_attribute(
            "fi_eq_open",
            Code::INVAL,
            format_args!("size {size}: at most {MAX_SIZE} events"),
        ));
    }
    Ok(Eq {
        fid: fi::fid_eq { fid: head(fi::FI_CLASS_EQ, context, &OPS), ops: table(&EQ_OPS) },
        fabric: Held::new(fabric),
        events: Mutex::default(),
        size: if size == 0 { DEFAULT_SIZE } else { size },
        writable: flags & fi::FI_WRITE != 0,
        wait: WaitObject::of("fi_eq_open", object)?,
        signal: Signal::new()?,
        uses: Uses::default(),
    })
}

entry_points! {
    /// `fi_eq_open`.
    pub(super) fn open(
        fabric: *mut fi::fid_fabric,
        attr: *mut fi::fi_eq_attr,
        out: *mut *mut fi::fid_eq,
        context: *mut c_void,
    ) -> c_int
    as ("fi_eq_open") (
        fabric: &Fabric = fabric,
        attr: Option<&fi::fi_eq_attr> = attr.cast_const(),
        out: Out<'_, *mut fi::fid_eq> = out,
    ) {
        give(create(fabric, attr, context)?, &out);
        Ok(0)
    }

    fn read(eq: *mut fi::fid_eq, event: *mut u32, buf: *mut c_void, len: usize, flags: u64) -> isize
    as ("fi_eq_read") (eq: &Eq = eq, event: Option<Out<'_, u32>> = event, room: Room<'_, u8> = (buf, len)) {
        read_now(eq, event.as_ref(), &room, flags)
    }

    fn sread(eq: *mut fi::fid_eq, event: *mut u32, buf: *mut c_void, len: usize, timeout: c_int, flags: u64) -> isize
    as ("fi_eq_sread") (eq: &Eq = eq, event: Option<Out<'_, u32>> = event, room: Room<'_, u8> = (buf, len)) {
        if eq.wait == WaitObject::None {
            return Err(Code::NOSYS);
        }
        let read = |_| read_now(eq, event.as_ref(), &room, flags);
        wait::read_with_timeout(&eq.signal, timeout, || eq.may_sleep(), read)
    }

    /// No event is an error.
    fn readerr(eq: *mut fi::fid_eq, _to: *mut fi::fi_eq_err_entry, _flags: u64) -> isize
    as ("fi_eq_readerr") (_eq: &Eq = eq) {
        Err(Code::AGAIN)
    }

    fn write(eq: *mut fi::fid_eq, event: u32, buf: *const c_void, len: usize, flags: u64) -> isize
    as ("fi_eq_write") (eq: &Eq = eq, bytes: Array<'_, u8> = (buf, len)) {
        if flags != 0 {
            return Err(Code::BADFLAGS);
        }
        if !eq.writable {
            return Err(Code::INVAL);
        }
        let mut events = eq.events();
        if events.len() >= eq.size {
            return Err(Code::AGAIN);
        }
        events.push_back((event, bytes.iter().collect()));
        drop(events);
        eq.signal.raise();
        Ok(i32::try_from(len).unwrap_or(i32::MAX))
    }

    fn strerror(
        _eq: *mut fi::fid_eq,
        _prov_errno: c_int,
        _err_data: *const c_void,
        _buf: *mut c_char,
        _len: usize,
    ) -> *const c_char
    as ("fi_eq_strerror", c"".as_ptr()) () {
        Ok(c"no error".as_ptr())
    }

    fn control(fid: *mut fi::fid, command: c_int, arg: *mut c_void) -> c_int
    as ("fi_control(eq)") (eq: &Eq = fid, command: Command<'_> = (command, arg)) {
        wait::control(eq.wait, Some(&eq.signal), &command)
    }
}
