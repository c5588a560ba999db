//! Completion counters, which the card can keep in the program's memory.

use std::ffi::{c_int, c_uint};
use std::mem::offset_of;
use std::os::fd::BorrowedFd;

use soft_nic::card::counter::{Counter, EVENTS, Event, Word};
use soft_nic::fault::COUNTER_MASK;
use soft_nic::memory;
use soft_nic::process::Uses;

use crate::bindings as ib;
use crate::context::Context;
use crate::guard::{Errno, object, refuse, status};
use crate::objects::{self, Held, Open, verbs_object};
use crate::params::{Size, Struct};

#[repr(C)]
pub(crate) struct CompCntr {
    raw: ib::ibv_comp_cntr,
    pub(crate) context: Held<Context>,
    /// The card's number for it.
    pub(crate) number: u32,
    completions: *const u64,
    errors: *const u64,
    /// The queue pairs it counts for.
    uses: Uses,
}

verbs_object!(CompCntr { raw: ib::ibv_comp_cntr }, "completion counter");

/// The queue pair events that a counter can count, by their bits.
pub(crate) const EVENT_OF: [(c_uint, Event); EVENTS] = [
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_SEND, Event::Send),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_RECV, Event::Recv),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_READ, Event::Read),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_READ, Event::RemoteRead),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_WRITE, Event::Write),
    (ib::IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_WRITE, Event::RemoteWrite),
];
pub(crate) const ALL_EVENTS: c_uint = (1 << EVENTS) - 1;

fn has_counters(open: &Context) -> Result<(), Errno> {
    if open.card()?.lock().config.faults.no_counters {
        let why = format_args!("SOFTEFA_FAULTS=no_counters: there are no counters in hardware");
        return Err(refuse("ibv_create_comp_cntr", Errno::UNSUPPORTED, why));
    }
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_comp_cntr_caps(
    raw: Open<Context>,
    caps: Struct<ib::ibv_comp_cntr_caps>,
    size: Size<usize>,
) -> c_int {
    status("ibv_query_comp_cntr_caps", || {
        let open = raw.get()?;
        has_counters(open)?;
        let whole = ib::ibv_comp_cntr_caps {
            max_value: COUNTER_MASK,
            max_counters: open.card()?.lock().config.faults.cntr_budget,
            supported_qp_attach_ops: ALL_EVENTS,
        };
        caps.fill(&whole, size)
    })
}

/// # Safety
/// The program keeps the location's memory mapped and writable until it destroys the counter.
unsafe fn word_at(location: &ib::efadv_memory_location, start: u64) -> Result<Word, Errno> {
    const LEN: usize = size_of::<u64>();
    match u32::from(location.type_) {
        ib::EFADV_MEMORY_LOCATION_VA => {
            let at: *mut u64 = location.ptr.cast();
            if !at.is_aligned() {
                return Err(Errno::INVAL);
            }
            memory::populate(at as usize, LEN, true)?;
            // SAFETY: the address is aligned and writable, as just checked; this function's caller keeps the memory
            // mapped.
            Ok(unsafe { Word::at(at, start) })
        }
        ib::EFADV_MEMORY_LOCATION_DMABUF => {
            let (fd, offset) = (location.dmabuf.fd, location.dmabuf.offset);
            if fd < 0 || !offset.is_multiple_of(LEN as u64) {
                return Err(Errno::INVAL);
            }
            // SAFETY: the program keeps the descriptor open during the call.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            Ok(Word::mapped(fd, offset, start)?)
        }
        _ => Err(Errno::UNSUPPORTED),
    }
}

/// # Safety
/// The program keeps `dv`'s external memory mapped and writable until it destroys the counter.
unsafe fn create(
    raw: Open<Context>,
    attr: Option<&ib::ibv_comp_cntr_init_attr>,
    dv: &ib::efadv_comp_cntr_init_attr,
) -> Result<*mut ib::ibv_comp_cntr, Errno> {
    let open = raw.get()?;
    has_counters(open)?;
    let attr = attr.ok_or(Errno::INVAL)?;
    let known = ib::EFADV_COMP_CNTR_INIT_WITH_COMP_EXTERNAL_MEM | ib::EFADV_COMP_CNTR_INIT_WITH_ERR_EXTERNAL_MEM;
    if attr.comp_mask != 0
        || attr.flags != 0
        || attr.type_ != ib::IBV_COMP_CNTR_TYPE_WRS
        || dv.comp_mask != 0
        || dv.flags & !known != 0
    {
        return Err(Errno::UNSUPPORTED);
    }
    let word = |flag, location, start| {
        if dv.flags & flag != 0 {
            // SAFETY: this function's caller keeps the memory mapped until it destroys the counter.
            unsafe { word_at(location, start) }
        } else {
            Ok(Word::own(start))
        }
    };
    let start = u64::from(open.card()?.lock().config.faults.cntr_start);
    let completions = word(ib::EFADV_COMP_CNTR_INIT_WITH_COMP_EXTERNAL_MEM, &dv.comp_cntr_ext_mem, start)?;
    let errors = word(ib::EFADV_COMP_CNTR_INIT_WITH_ERR_EXTERNAL_MEM, &dv.err_cntr_ext_mem, 0)?;
    let (at, errors_at) = (completions.address(), errors.address());
    let number = open
        .card()?
        .lock()
        .open_counter(Counter { completions, errors, attached: 0 })
        .map_err(|error| refuse("ibv_create_comp_cntr", error.into(), format_args!("{error}")))?;
    Ok(objects::give(Box::new(CompCntr {
        raw: ib::ibv_comp_cntr { context: raw.pointer(), handle: number },
        context: Held::new(open),
        number,
        completions: at,
        errors: errors_at,
        uses: Uses::default(),
    })))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_cntr(
    raw: Open<Context>,
    attr: Option<&ib::ibv_comp_cntr_init_attr>,
) -> *mut ib::ibv_comp_cntr {
    let dv = ib::efadv_comp_cntr_init_attr::default();
    // SAFETY: there is no external memory.
    object("ibv_create_comp_cntr", || unsafe { create(raw, attr, &dv) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_create_comp_cntr(
    raw: Open<Context>,
    attr: Option<&ib::ibv_comp_cntr_init_attr>,
    dv: Struct<ib::efadv_comp_cntr_init_attr>,
    size: Size<u32>,
) -> *mut ib::ibv_comp_cntr {
    object("efadv_create_comp_cntr", || {
        let least =
            offset_of!(ib::efadv_comp_cntr_init_attr, err_cntr_ext_mem) + size_of::<ib::efadv_memory_location>();
        let dv = dv.read(size, least)?;
        // SAFETY: the manual page requires the program to keep external memory until it destroys the counter.
        unsafe { create(raw, attr, &dv) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_cntr(raw: *mut ib::ibv_comp_cntr) -> c_int {
    objects::destroy("ibv_destroy_comp_cntr", raw, |cntr: &CompCntr| {
        drop(cntr.context.card()?.lock().close_counter(cntr.number)?);
        Ok(())
    })
}

fn change(call: &str, raw: Open<CompCntr>, how: impl FnOnce(&mut Counter)) -> c_int {
    status(call, || {
        let cntr = raw.get()?;
        let mut core = cntr.context.card()?.lock();
        how(core.counters.get_mut(cntr.number).ok_or(Errno::INVAL)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_set_comp_cntr(raw: Open<CompCntr>, value: u64) -> c_int {
    change("ibv_set_comp_cntr", raw, |counter| counter.completions.set(value))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_inc_comp_cntr(raw: Open<CompCntr>, value: u64) -> c_int {
    change("ibv_inc_comp_cntr", raw, |counter| counter.completions.add(value))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_set_err_comp_cntr(raw: Open<CompCntr>, value: u64) -> c_int {
    change("ibv_set_err_comp_cntr", raw, |counter| counter.errors.set(value))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_inc_err_comp_cntr(raw: Open<CompCntr>, value: u64) -> c_int {
    change("ibv_inc_err_comp_cntr", raw, |counter| counter.errors.add(value))
}

fn read(call: &str, raw: Open<CompCntr>, to: Option<&mut u64>, errors: bool) -> c_int {
    status(call, || {
        let cntr = raw.get()?;
        cntr.context.card()?.poll();
        // SAFETY: the counter's words are mapped until the counter is destroyed.
        let value = unsafe { memory::load_acquire(if errors { cntr.errors } else { cntr.completions }) };
        *to.ok_or(Errno::INVAL)? = value;
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_read_comp_cntr(raw: Open<CompCntr>, value: Option<&mut u64>) -> c_int {
    read("ibv_read_comp_cntr", raw, value, false)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_read_err_comp_cntr(raw: Open<CompCntr>, value: Option<&mut u64>) -> c_int {
    read("ibv_read_err_comp_cntr", raw, value, true)
}
