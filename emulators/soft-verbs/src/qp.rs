//! Queue pairs: SRD and UD.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use soft_nic::card::counter::EVENTS;
use soft_nic::card::queue::RQ_ENTRY_LEN;
use soft_nic::process::Uses;

use crate::bindings as ib;
use crate::context::{Context, PORT};
use crate::counter::{ALL_EVENTS, CompCntr, EVENT_OF};
use crate::cq::Cq;
use crate::guard::{Errno, refuse, status};
use crate::objects::{self, EfaPart, Held, Open, Param, verbs_object};
use crate::params::{Size, Struct};
use crate::pd::Pd;
use crate::queues::{Queues, Session};
use crate::turn::Turn;

/// A queue pair. The program reads and writes fields of `raw`; `own` keeps copies of those that don't change.
#[repr(C)]
pub(crate) struct QueuePair {
    pub(crate) raw: UnsafeCell<ib::ibv_qp_ex>,
    pub(crate) dv: ib::efadv_qp,
    pub(crate) own: ib::ibv_qp,
    pub(crate) context: Held<Context>,
    pub(crate) _pd: Held<Pd>,
    pub(crate) send_cq: Held<Cq>,
    pub(crate) recv_cq: Held<Cq>,
    pub(crate) state: AtomicU32,
    pub(crate) number: u16,
    pub(crate) queues: Arc<Queues>,
    pub(crate) turn: Turn,
    pub(crate) session: Mutex<Session>,
    pub(crate) signal_all: bool,
    /// Whether it has the `ibv_wr_*` calls.
    pub(crate) extended: bool,
    pub(crate) cap: ib::ibv_qp_cap,
    pub(crate) settings: Mutex<Settings>,
    pub(crate) uses: Uses,
}

verbs_object!(QueuePair { raw: ib::ibv_qp }, "queue pair");

// SAFETY: the offset is that of the field of this type.
unsafe impl EfaPart for QueuePair {
    type Part = ib::efadv_qp;
    const PART_AT: usize = offset_of!(QueuePair, dv);
}

/// The state, and what `ibv_modify_qp` sets.
#[derive(Default)]
pub(crate) struct Settings {
    qkey: u32,
    psn: u32,
    rnr_retry: u8,
    /// The counters, by event.
    counters: [Option<Held<CompCntr>>; EVENTS],
}

// SAFETY: `ibv_qp` is the first field of `ibv_qp_ex`, and `Open` is transparent.
unsafe impl Param<*mut ib::ibv_qp_ex> for Open<'_, QueuePair> {}

/// Returns the attributes that a state change requires, and those that it allows.
fn transition(from: ib::ibv_qp_state, to: ib::ibv_qp_state, srd: bool) -> Option<(u32, u32)> {
    const INIT: u32 = ib::IBV_QP_PKEY_INDEX | ib::IBV_QP_PORT | ib::IBV_QP_QKEY;
    let rnr = if srd { ib::IBV_QP_RNR_RETRY } else { 0 };
    Some(match (from, to) {
        (_, ib::IBV_QPS_RESET) => (0, 0),
        (ib::IBV_QPS_RESET, ib::IBV_QPS_INIT) => (INIT, 0),
        (ib::IBV_QPS_RESET, _) => return None,
        (_, ib::IBV_QPS_ERR) => (0, 0),
        (ib::IBV_QPS_INIT, ib::IBV_QPS_INIT) => (0, INIT),
        (ib::IBV_QPS_INIT, ib::IBV_QPS_RTR) => (0, ib::IBV_QP_PKEY_INDEX | ib::IBV_QP_QKEY),
        (ib::IBV_QPS_RTR, ib::IBV_QPS_RTS) => (ib::IBV_QP_SQ_PSN, ib::IBV_QP_CUR_STATE | ib::IBV_QP_QKEY | rnr),
        (ib::IBV_QPS_RTS | ib::IBV_QPS_SQD, ib::IBV_QPS_RTS) => (0, ib::IBV_QP_CUR_STATE | ib::IBV_QP_QKEY),
        (ib::IBV_QPS_RTS, ib::IBV_QPS_SQD) => (0, ib::IBV_QP_EN_SQD_ASYNC_NOTIFY),
        (ib::IBV_QPS_SQD, ib::IBV_QPS_SQD) => (0, ib::IBV_QP_PKEY_INDEX | ib::IBV_QP_QKEY),
        _ => return None,
    })
}

/// The attributes that the EFA driver knows.
const KNOWN: u32 = ib::IBV_QP_STATE
    | ib::IBV_QP_CUR_STATE
    | ib::IBV_QP_EN_SQD_ASYNC_NOTIFY
    | ib::IBV_QP_PKEY_INDEX
    | ib::IBV_QP_PORT
    | ib::IBV_QP_QKEY
    | ib::IBV_QP_SQ_PSN
    | ib::IBV_QP_RNR_RETRY;

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(raw: Open<QueuePair>, attr: Option<&ib::ibv_qp_attr>, mask: c_int) -> c_int {
    const CALL: &str = "ibv_modify_qp";
    status(CALL, || {
        let qp = raw.get()?;
        let attr = attr.ok_or(Errno::INVAL)?;
        let mask = mask as u32;
        let has = |bit| mask & bit != 0;
        if mask & !KNOWN != 0 {
            return Err(refuse(
                CALL,
                Errno::UNSUPPORTED,
                format_args!("EFA does not have the attributes {:#x}", mask & !KNOWN),
            ));
        }
        let from = qp.state();
        let to = if has(ib::IBV_QP_STATE) { attr.qp_state } else { from };
        let srd = qp.own.qp_type == ib::IBV_QPT_DRIVER;
        let (required, allowed) = transition(from, to, srd).ok_or_else(|| {
            refuse(CALL, Errno::INVAL, format_args!("there is no transition from state {from} to {to}"))
        })?;
        let given = mask & !ib::IBV_QP_STATE;
        if given & required != required || given & !(required | allowed) != 0 {
            let why = format_args!(
                "the transition from state {from} to {to} requires attributes {required:#x} and allows {allowed:#x}, \
                 but got {given:#x}"
            );
            return Err(refuse(CALL, Errno::INVAL, why));
        }
        if has(ib::IBV_QP_CUR_STATE) && attr.cur_qp_state != from || has(ib::IBV_QP_PORT) && attr.port_num != PORT {
            return Err(Errno::INVAL);
        }
        if has(ib::IBV_QP_PKEY_INDEX) && attr.pkey_index != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        qp.apply(attr, mask, to)?;
        qp.state.store(to, Ordering::Release);
        let state = qp.raw.get().wrapping_byte_add(offset_of!(ib::ibv_qp, state)).cast::<ib::ibv_qp_state>();
        // SAFETY: only this library writes the field; programs only read it.
        unsafe { state.write_volatile(to) };
        Ok(())
    })
}

impl QueuePair {
    pub(crate) fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> ib::ibv_qp_state {
        self.state.load(Ordering::Acquire)
    }

    /// Returns the id and flags that the program set for the next request.
    pub(crate) fn next_request(&self) -> (u64, c_uint) {
        let (wr_id, flags) = (offset_of!(ib::ibv_qp_ex, wr_id), offset_of!(ib::ibv_qp_ex, wr_flags));
        let fields = self.raw.get();
        // SAFETY: the program writes the field only in its session, and this runs inside one of the program's calls in
        // that session.
        let wr_id = unsafe { fields.wrapping_byte_add(wr_id).cast::<u64>().read() };
        // SAFETY: the program writes the field only in its session, and this runs inside one of the program's calls in
        // that session.
        (wr_id, unsafe { fields.wrapping_byte_add(flags).cast::<c_uint>().read() })
    }

    fn apply(&self, attr: &ib::ibv_qp_attr, mask: u32, to: ib::ibv_qp_state) -> Result<(), Errno> {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let mut core = self.context.card()?.lock();
        let qp = core.qp(self.number).ok_or(Errno::INVAL)?;
        if mask & ib::IBV_QP_QKEY != 0 {
            (settings.qkey, qp.qkey) = (attr.qkey, attr.qkey);
        }
        if mask & ib::IBV_QP_SQ_PSN != 0 {
            settings.psn = attr.sq_psn;
        }
        if mask & ib::IBV_QP_RNR_RETRY != 0 {
            if attr.rnr_retry > soft_nic::card::RNR_RETRY_UNLIMITED {
                return Err(Errno::INVAL);
            }
            (settings.rnr_retry, qp.rnr_retry) = (attr.rnr_retry, attr.rnr_retry);
        }
        if mask & ib::IBV_QP_STATE == 0 {
            return Ok(());
        }
        if to == ib::IBV_QPS_RESET {
            core.reset_qp(self.number);
            self.queues.reset(core.config.faults.cntr_start);
        } else if to == ib::IBV_QPS_ERR {
            core.fail_qp(self.number);
        } else if to == ib::IBV_QPS_RTR && !qp.enabled {
            // A queue pair that only receives stays in this state.
            let counters = settings.counters.each_ref().map(|cntr| cntr.iter().map(|cntr| cntr.number).collect());
            core.enable_qp(self.number, self.send_cq.ring, Some(self.recv_cq.ring), counters)?;
        } else if matches!(to, ib::IBV_QPS_RTS | ib::IBV_QPS_SQD) {
            core.pause_sends(self.number, to == ib::IBV_QPS_SQD);
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp(
    raw: Open<QueuePair>,
    attr: Option<&mut ib::ibv_qp_attr>,
    mask: c_int,
    init: Option<&mut ib::ibv_qp_init_attr>,
) -> c_int {
    status("ibv_query_qp", || {
        const KNOWN: u32 = ib::IBV_QP_STATE
            | ib::IBV_QP_PORT
            | ib::IBV_QP_PKEY_INDEX
            | ib::IBV_QP_QKEY
            | ib::IBV_QP_SQ_PSN
            | ib::IBV_QP_CAP
            | ib::IBV_QP_RNR_RETRY;
        let qp = raw.get()?;
        if mask as u32 & !KNOWN != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        let settings = qp.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let base = &qp.own;
        *attr.ok_or(Errno::INVAL)? = ib::ibv_qp_attr {
            qp_state: qp.state(),
            cur_qp_state: qp.state(),
            qkey: settings.qkey,
            sq_psn: settings.psn,
            cap: qp.cap,
            port_num: PORT,
            rnr_retry: settings.rnr_retry,
            ..ib::ibv_qp_attr::default()
        };
        *init.ok_or(Errno::INVAL)? = ib::ibv_qp_init_attr {
            qp_context: base.qp_context,
            send_cq: base.send_cq,
            recv_cq: base.recv_cq,
            srq: base.srq,
            cap: qp.cap,
            qp_type: base.qp_type,
            sq_sig_all: qp.signal_all.into(),
        };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(raw: *mut ib::ibv_qp) -> c_int {
    objects::destroy("ibv_destroy_qp", raw, |qp: &QueuePair| {
        qp.context.card()?.close_qp(qp.number);
        qp.context.queue_pairs.write().unwrap_or_else(PoisonError::into_inner).remove(&qp.number);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_qp_to_qp_ex(raw: Open<QueuePair>) -> *mut ib::ibv_qp_ex {
    match raw.get() {
        Ok(qp) if qp.extended => raw.pointer().cast(),
        _ => std::ptr::null_mut(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn efadv_qp_from_ibv_qp_ex(raw: *mut ib::ibv_qp_ex) -> *mut ib::efadv_qp {
    raw.wrapping_byte_add(offset_of!(QueuePair, dv)).cast()
}

/// Says that a message's data may arrive in any order.
#[unsafe(no_mangle)]
extern "C" fn ibv_query_qp_data_in_order(_qp: *mut ib::ibv_qp, _op: ib::ibv_wr_opcode, _flags: u32) -> c_int {
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_query_qp_wqs(
    raw: Open<QueuePair>,
    send: Struct<ib::efadv_wq_attr>,
    recv: Struct<ib::efadv_wq_attr>,
    size: Size<u32>,
) -> c_int {
    status("efadv_query_qp_wqs", || {
        let qp = raw.get()?;
        if size.bytes() < offset_of!(ib::efadv_wq_attr, caps) {
            return Err(Errno::INVAL);
        }
        let caps = qp.context.card()?.lock().config.faults.qp_caps;
        let (sq, rq) = (qp.queues.send(), qp.queues.recv());
        let whole = ib::efadv_wq_attr {
            buffer: sq.queue.buffer(),
            entry_size: sq.queue.entry_size,
            num_entries: sq.queue.entries,
            doorbell: sq.queue.doorbell(),
            max_batch: sq.max_batch,
            caps,
            ..ib::efadv_wq_attr::default()
        };
        send.fill(&whole, size)?;
        let whole = ib::efadv_wq_attr {
            buffer: rq.queue.buffer(),
            entry_size: RQ_ENTRY_LEN,
            num_entries: rq.queue.entries,
            doorbell: rq.queue.doorbell(),
            max_batch: rq.queue.entries,
            ..ib::efadv_wq_attr::default()
        };
        recv.fill(&whole, size)
    })
}

/// Attaches a counter to a queue pair's events; allowed only before the queue pair can send.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_qp_attach_comp_cntr(
    raw: Open<QueuePair>,
    cntr: Open<CompCntr>,
    attr: Option<&ib::ibv_qp_attach_comp_cntr_attr>,
) -> c_int {
    status("ibv_qp_attach_comp_cntr", || {
        let qp = raw.get()?;
        let attr = attr.ok_or(Errno::INVAL)?;
        let counter = cntr.get()?;
        if attr.comp_mask != 0 || attr.op_mask & !ALL_EVENTS != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        let late = matches!(qp.state(), ib::IBV_QPS_RTS | ib::IBV_QPS_SQD | ib::IBV_QPS_ERR);
        if attr.op_mask == 0 || late || !counter.context.is(&qp.context) {
            return Err(Errno::INVAL);
        }
        let mut settings = qp.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = EVENT_OF.iter().filter(|(bit, _)| attr.op_mask & *bit != 0);
        if wanted.clone().any(|(_, event)| settings.counters[*event as usize].is_some()) {
            return Err(Errno::BUSY);
        }
        // A queue pair that hasn't started gets its counters when it starts.
        let started = qp.state() == ib::IBV_QPS_RTR;
        for (_, event) in wanted {
            if started {
                qp.context.card()?.lock().attach_counter(qp.number, *event, counter.number)?;
            }
            settings.counters[*event as usize] = Some(Held::new(counter));
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_follow_the_tables_of_the_driver() {
        use ib::{
            IBV_QPS_ERR as ERR, IBV_QPS_INIT as INIT, IBV_QPS_RESET as RESET, IBV_QPS_RTR as RTR, IBV_QPS_RTS as RTS,
            IBV_QPS_SQD as SQD,
        };
        let allowed = [
            (RESET, RESET),
            (RESET, INIT),
            (INIT, RESET),
            (INIT, ERR),
            (INIT, INIT),
            (INIT, RTR),
            (RTR, RESET),
            (RTR, ERR),
            (RTR, RTS),
            (RTS, RESET),
            (RTS, ERR),
            (RTS, RTS),
            (RTS, SQD),
            (SQD, RESET),
            (SQD, ERR),
            (SQD, SQD),
            (SQD, RTS),
            (ERR, RESET),
            (ERR, ERR),
        ];
        for from in [RESET, INIT, RTR, RTS, SQD, ERR] {
            for to in [RESET, INIT, RTR, RTS, SQD, ERR] {
                assert_eq!(transition(from, to, true).is_some(), allowed.contains(&(from, to)), "{from} to {to}");
            }
        }
        assert!(transition(RTR, RTS, true).unwrap().1 & ib::IBV_QP_RNR_RETRY != 0);
        assert!(transition(RTR, RTS, false).unwrap().1 & ib::IBV_QP_RNR_RETRY == 0);
    }
}
