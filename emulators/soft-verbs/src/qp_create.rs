//! Creating queue pairs.

use std::cell::UnsafeCell;
use std::mem::offset_of;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};

use soft_nic::process::Uses;

use crate::bindings as ib;
use crate::context::{Context, MAX_RQ, MAX_SGE};
use crate::cq::Cq;
use crate::dv;
use crate::guard::{Errno, object, refuse};
use crate::objects::{self, Held, Open, call2};
use crate::params::{Size, Struct};
use crate::pd::Pd;
use crate::post;
use crate::qp::QueuePair;
use crate::queues::{Queues, Sizes};
use crate::turn::Turn;

const CALL: &str = "ibv_create_qp";
/// libibverbs' own calls only create UD queue pairs. Not logged, since programs try types to find out which ones a card
/// has.
const ANOTHER_TYPE: Errno = Errno::UNSUPPORTED;
const SEND_OPS: u64 = (ib::IBV_QP_EX_WITH_SEND | ib::IBV_QP_EX_WITH_SEND_WITH_IMM) as u64;
const RDMA_OPS: u64 =
    (ib::IBV_QP_EX_WITH_RDMA_READ | ib::IBV_QP_EX_WITH_RDMA_WRITE | ib::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) as u64;

/// Checks what the program asks for, with rdma-core efa's rules and errors.
fn check(open: &Context, attr: &ib::ibv_qp_init_attr_ex, dv: &ib::efadv_qp_init_attr) -> Result<(), Errno> {
    let unsupported = |what: &str| Err(refuse(CALL, Errno::UNSUPPORTED, format_args!("{what}")));
    let invalid = |what: &str| Err(refuse(CALL, Errno::INVAL, format_args!("{what}")));
    let srd = attr.qp_type == ib::IBV_QPT_DRIVER;
    if srd && dv.driver_qp_type != ib::EFADV_QP_DRIVER_TYPE_SRD {
        return unsupported("the driver's queue pair type is not SRD");
    }
    let flags = u32::from(dv.flags);
    if flags & !(ib::EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV | ib::EFADV_QP_FLAGS_INLINE_WRITE) != 0 {
        return unsupported("unknown EFA flags");
    }
    if attr.comp_mask & !(ib::IBV_QP_INIT_ATTR_PD | ib::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0 {
        return unsupported("comp_mask has attributes that EFA does not have");
    }
    if attr.comp_mask & ib::IBV_QP_INIT_ATTR_PD == 0 {
        return invalid("no protection domain");
    }
    if attr.comp_mask & ib::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0
        && attr.send_ops_flags & !(if srd { SEND_OPS | RDMA_OPS } else { SEND_OPS }) != 0
    {
        return unsupported("send_ops_flags has operations that this type of queue pair does not have");
    }
    if dv.wr_flags & !u64::from(ib::EFADV_WR_EX_WITH_PROCESSING_HINTS) != 0 {
        return unsupported("unknown EFA wr_flags");
    }
    if attr.recv_cq.is_null() || attr.send_cq.is_null() {
        return invalid("it needs a completion queue for sends and one for receives");
    }
    if !attr.srq.is_null() {
        return invalid("there are no shared receive queues");
    }
    let cap = &attr.cap;
    if cap.max_send_sge > MAX_SGE || cap.max_recv_sge > MAX_SGE {
        return invalid("more buffers of a request than the card has");
    }
    let inline_writes = flags & ib::EFADV_QP_FLAGS_INLINE_WRITE != 0;
    let request_size = dv::request_size(cap.max_inline_data, inline_writes);
    if cap.max_inline_data > dv::max_inline(open)? || request_size == 128 && dv::max_inline(open)? < 80 {
        return invalid("more inline data than the card has");
    }
    if cap.max_send_wr > dv::max_depth(request_size) {
        return invalid("more send requests than a queue holds");
    }
    if cap.max_recv_wr > MAX_RQ / cap.max_recv_sge.max(1) {
        return invalid("more receives than a queue holds");
    }
    Ok(())
}

fn create(
    raw: Open<Context>,
    attr: &mut ib::ibv_qp_init_attr_ex,
    dv: &ib::efadv_qp_init_attr,
) -> Result<*mut ib::ibv_qp, Errno> {
    let open = raw.get()?;
    check(open, attr, dv)?;
    let pd: &Pd = raw.named(attr.pd)?.get()?;
    let send_cq: &Cq = raw.named(attr.send_cq)?.get()?;
    let recv_cq: &Cq = raw.named(attr.recv_cq)?.get()?;
    if ![&pd.context, &send_cq.context, &recv_cq.context].iter().all(|context| context.is(open)) {
        return Err(refuse(CALL, Errno::INVAL, format_args!("its objects belong to different contexts")));
    }
    let cap = &mut attr.cap;
    let inline_writes = u32::from(dv.flags) & ib::EFADV_QP_FLAGS_INLINE_WRITE != 0;
    let sends = cap.max_send_wr.max(1).next_power_of_two();
    let descs = (cap.max_recv_wr * cap.max_recv_sge.max(1)).next_power_of_two();
    let receives = if cap.max_recv_wr == 0 { 0 } else { descs / cap.max_recv_sge.max(1) };
    (cap.max_send_wr, cap.max_recv_wr) = (sends, receives);
    let (number, queues) = {
        let mut core = open.card()?.lock();
        let request_size = dv::request_size(cap.max_inline_data, inline_writes);
        let number = core.open_qp(pd.number, request_size, sends, descs)?;
        let qp = core.qp(number).ok_or(Errno::NOMEM)?;
        qp.datagrams = attr.qp_type == ib::IBV_QPT_UD;
        qp.unsolicited_writes = u32::from(dv.flags) & ib::EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV != 0;
        let sizes = Sizes {
            max_batch: qp.max_batch,
            start: qp.taken,
            max_inline: cap.max_inline_data,
            max_send_sge: cap.max_send_sge,
            receives,
            max_recv_sge: cap.max_recv_sge,
        };
        (number, Arc::new(Queues::new(qp.sq.clone(), qp.rq.clone(), &sizes)))
    };
    open.queue_pairs.write().unwrap_or_else(PoisonError::into_inner).insert(number, queues.clone());
    let base = || ib::ibv_qp {
        context: raw.pointer(),
        qp_context: attr.qp_context,
        pd: attr.pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        handle: number.into(),
        qp_num: number.into(),
        state: ib::IBV_QPS_RESET,
        qp_type: attr.qp_type,
        ..ib::ibv_qp::default()
    };
    let mut qp = Box::new(QueuePair {
        raw: UnsafeCell::new(ib::ibv_qp_ex { qp_base: base(), ..ib::ibv_qp_ex::default() }),
        dv: ib::efadv_qp::default(),
        own: base(),
        context: Held::new(open),
        _pd: Held::new(pd),
        send_cq: Held::new(send_cq),
        recv_cq: Held::new(recv_cq),
        state: AtomicU32::new(ib::IBV_QPS_RESET),
        number,
        queues,
        turn: Turn::default(),
        session: Mutex::default(),
        signal_all: attr.sq_sig_all != 0,
        extended: attr.comp_mask & ib::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0,
        cap: attr.cap,
        settings: Mutex::default(),
        uses: Uses::default(),
    });
    if qp.extended {
        post::fill_functions(qp.raw.get_mut(), attr.send_ops_flags);
        let hints = dv.wr_flags & u64::from(ib::EFADV_WR_EX_WITH_PROCESSING_HINTS) != 0;
        qp.dv.wr_set_processing_hints = hints.then_some(call2(post::set_hints));
    }
    Ok(objects::give(qp))
}

/// Returns the attributes in the extended form.
fn extended(pd: *mut ib::ibv_pd, attr: &ib::ibv_qp_init_attr) -> ib::ibv_qp_init_attr_ex {
    ib::ibv_qp_init_attr_ex {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: ib::IBV_QP_INIT_ATTR_PD,
        pd,
        ..ib::ibv_qp_init_attr_ex::default()
    }
}

fn create_plain(
    pd: Open<Pd>,
    attr: &mut ib::ibv_qp_init_attr,
    dv: &ib::efadv_qp_init_attr,
) -> Result<*mut ib::ibv_qp, Errno> {
    let mut whole = extended(pd.pointer(), attr);
    let context = pd.named(pd.get()?.context_pointer())?;
    let qp = create(context, &mut whole, dv)?;
    attr.cap = whole.cap;
    Ok(qp)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(pd: Open<Pd>, attr: Option<&mut ib::ibv_qp_init_attr>) -> *mut ib::ibv_qp {
    let dv = ib::efadv_qp_init_attr::default();
    object(CALL, || {
        let attr = attr.ok_or(Errno::INVAL)?;
        if attr.qp_type != ib::IBV_QPT_UD {
            return Err(ANOTHER_TYPE);
        }
        create_plain(pd, attr, &dv)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_create_driver_qp(
    pd: Open<Pd>,
    attr: Option<&mut ib::ibv_qp_init_attr>,
    driver_qp_type: u32,
) -> *mut ib::ibv_qp {
    let dv = ib::efadv_qp_init_attr { driver_qp_type, ..ib::efadv_qp_init_attr::default() };
    object("efadv_create_driver_qp", || {
        let attr = attr.ok_or(Errno::INVAL)?;
        if attr.qp_type != ib::IBV_QPT_DRIVER {
            return Err(refuse(CALL, Errno::INVAL, format_args!("the type is not DRIVER")));
        }
        create_plain(pd, attr, &dv)
    })
}

pub(crate) unsafe extern "C" fn create_ex(
    raw: Open<Context>,
    attr: Option<&mut ib::ibv_qp_init_attr_ex>,
) -> *mut ib::ibv_qp {
    object("ibv_create_qp_ex", || {
        let attr = attr.ok_or(Errno::INVAL)?;
        if attr.qp_type != ib::IBV_QPT_UD {
            return Err(ANOTHER_TYPE);
        }
        create(raw, attr, &ib::efadv_qp_init_attr::default())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn efadv_create_qp_ex(
    raw: Open<Context>,
    attr: Option<&mut ib::ibv_qp_init_attr_ex>,
    dv: Struct<ib::efadv_qp_init_attr>,
    size: Size<u32>,
) -> *mut ib::ibv_qp {
    object("efadv_create_qp_ex", || {
        let attr = attr.ok_or(Errno::INVAL)?;
        let dv = dv.read(size, offset_of!(ib::efadv_qp_init_attr, flags))?;
        if attr.qp_type != ib::IBV_QPT_DRIVER || dv.comp_mask != 0 || dv.reserved != 0 {
            return Err(refuse(CALL, Errno::INVAL, format_args!("the type is not DRIVER, or a reserved field is set")));
        }
        create(raw, attr, &dv)
    })
}
