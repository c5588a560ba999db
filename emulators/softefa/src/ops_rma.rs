//! `fi_ops_rma`: remote memory access through host calls.

use std::ffi::c_void;
use std::ptr;

use ferrogin_libfabric::bindings as fi;

use super::call::{Buffers, Message, RmaCall, SEND_FLAGS};
use super::entry::entry_points;
use super::ep::Ep;
use super::guard::Code;

type FidEp = *mut fi::fid_ep;
type Addr = fi::fi_addr_t;
type Void = *mut c_void;

/// Flags that a read may have.
const READ_FLAGS: u64 = fi::FI_COMPLETION | fi::FI_MORE | fi::FI_TRANSMIT_COMPLETE | fi::FI_DELIVERY_COMPLETE;

/// An address in a peer's memory.
#[derive(Clone, Copy)]
struct Remote {
    peer: Addr,
    addr: u64,
    key: u64,
}

fn rma(ep: &Ep, call: &RmaCall) -> Result<i32, Code> {
    ep.path()?.rma(call).map(|()| 0)
}

/// Reads or writes with the endpoint's default flags.
fn rma_default(
    ep: &Ep,
    read: bool,
    buffers: Buffers,
    to: Remote,
    context: Void,
    data: Option<u64>,
) -> Result<i32, Code> {
    let flags = ep.op_flags(false);
    let flags = if read { flags & !fi::FI_INJECT } else { flags };
    let remote = fi::fi_rma_iov { addr: to.addr, len: buffers.len(), key: to.key };
    rma(ep, &RmaCall { read, buffers, peer: to.peer, remote, context, data, flags, silent: false })
}

/// Writes without a completion. The buffer is free when the call returns.
fn write_inject(ep: &Ep, buffers: Buffers, to: Remote, data: Option<u64>) -> Result<i32, Code> {
    let remote = fi::fi_rma_iov { addr: to.addr, len: buffers.len(), key: to.key };
    let (peer, context) = (to.peer, ptr::null_mut());
    rma(ep, &RmaCall { read: false, buffers, peer, remote, context, data, flags: fi::FI_INJECT, silent: true })
}

entry_points! {
    /// `fi_readmsg` and `fi_writemsg`.
    fn message[const READ: bool](ep: FidEp, msg: *const fi::fi_msg_rma, flags: u64) -> isize
    as (if READ { "fi_readmsg" } else { "fi_writemsg" }) (ep: &Ep = ep, msg: Message = msg) {
        if flags & !(if READ { READ_FLAGS } else { SEND_FLAGS }) != 0 {
            return Err(Code::BADFLAGS);
        }
        let (buffers, peer, context, data) = (msg.buffers, msg.peer, msg.context, msg.data(flags));
        let remote = msg.remote.ok_or(Code::INVAL)?;
        if remote.len != buffers.len() {
            return Err(Code::INVAL);
        }
        rma(ep, &RmaCall { read: READ, buffers, peer, remote, context, data, flags, silent: false })
    }

    /// `fi_readv` and `fi_writev`.
    fn vector[const READ: bool](
        ep: FidEp,
        iov: *const fi::iovec,
        desc: *mut Void,
        count: usize,
        peer: Addr,
        addr: u64,
        key: u64,
        context: Void,
    ) -> isize
    as (if READ { "fi_readv" } else { "fi_writev" }) (ep: &Ep = ep, buffers: Buffers = (iov, desc, count)) {
        rma_default(ep, READ, buffers, Remote { peer, addr, key }, context, None)
    }

    fn read(ep: FidEp, buf: Void, len: usize, desc: Void, peer: Addr, addr: u64, key: u64, context: Void) -> isize
    as ("fi_read") (ep: &Ep = ep, buffers: Buffers = (buf, len, desc)) {
        rma_default(ep, true, buffers, Remote { peer, addr, key }, context, None)
    }

    fn write(
        ep: FidEp,
        buf: *const c_void,
        len: usize,
        desc: Void,
        peer: Addr,
        addr: u64,
        key: u64,
        context: Void,
    ) -> isize
    as ("fi_write") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, desc)) {
        rma_default(ep, false, buffers, Remote { peer, addr, key }, context, None)
    }

    fn inject(ep: FidEp, buf: *const c_void, len: usize, peer: Addr, addr: u64, key: u64) -> isize
    as ("fi_inject_write") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, ptr::null_mut())) {
        write_inject(ep, buffers, Remote { peer, addr, key }, None)
    }

    fn writedata(
        ep: FidEp,
        buf: *const c_void,
        len: usize,
        desc: Void,
        data: u64,
        peer: Addr,
        addr: u64,
        key: u64,
        context: Void,
    ) -> isize
    as ("fi_writedata") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, desc)) {
        rma_default(ep, false, buffers, Remote { peer, addr, key }, context, Some(data))
    }

    fn injectdata(ep: FidEp, buf: *const c_void, len: usize, data: u64, peer: Addr, addr: u64, key: u64) -> isize
    as ("fi_inject_writedata") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, ptr::null_mut())) {
        write_inject(ep, buffers, Remote { peer, addr, key }, Some(data))
    }
}

/// Remote memory.
pub(super) static RMA: fi::fi_ops_rma = fi::fi_ops_rma {
    size: size_of::<fi::fi_ops_rma>(),
    read: Some(read),
    readv: Some(vector::<true>),
    readmsg: Some(message::<true>),
    write: Some(write),
    writev: Some(vector::<false>),
    writemsg: Some(message::<false>),
    inject: Some(inject),
    writedata: Some(writedata),
    injectdata: Some(injectdata),
};
