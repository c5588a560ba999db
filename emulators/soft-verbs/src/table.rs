//! Opening a device, and the tables of calls that the program finds in its context.

use crate::bindings as ib;
use crate::context::{self, Context};
use crate::device::Device;
use crate::guard::{Errno, object};
use crate::objects::{call2, call3, call4};
use crate::{cq, pd, post, qp_create};

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: Option<&Device>) -> *mut ib::ibv_context {
    object("ibv_open_device", || Context::open(device.ok_or(Errno::INVAL)?, calls()))
}

fn calls() -> ib::verbs_context {
    let mut raw = ib::verbs_context {
        query_port: Some(call4(context::query_port)),
        query_device_ex: Some(call4(context::query_device_ex)),
        create_cq_ex: Some(call2(cq::create_ex)),
        create_qp_ex: Some(call2(qp_create::create_ex)),
        alloc_td: Some(call2(pd::alloc_td)),
        dealloc_td: Some(pd::dealloc_td),
        alloc_parent_domain: Some(call2(pd::alloc_parent_domain)),
        ..ib::verbs_context::default()
    };
    raw.context.ops.poll_cq = Some(call3(cq::poll));
    raw.context.ops.req_notify_cq = Some(call2(cq::req_notify));
    raw.context.ops.post_send = Some(call3(post::post_send));
    raw.context.ops.post_recv = Some(call3(post::post_recv));
    raw
}
