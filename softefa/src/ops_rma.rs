//! `fi_ops_rma`: remote memory by calls of the host.

use std::ffi::c_void;

use ferrogin_libfabric::bindings as fi;

use super::call::{Buffers, RmaCall, SEND_FLAGS};
use super::ep::Ep;
use super::guard::{Code, data_entry};
use super::object::object;

type FidEp = *mut fi::fid_ep;
type Addr = fi::fi_addr_t;
type Void = *mut c_void;

/// Flags that a read may have.
const READ_FLAGS: u64 = fi::FI_COMPLETION | fi::FI_MORE | fi::FI_TRANSMIT_COMPLETE | fi::FI_DELIVERY_COMPLETE;

/// Where in the peer's memory.
#[derive(Clone, Copy)]
struct There {
    peer: Addr,
    addr: u64,
    key: u64,
}

/// # Safety
/// `ep` is the application's fid.
unsafe fn rma(ep: FidEp, call: &RmaCall) -> Result<(), Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    unsafe { object::<Ep, _>(ep) }?.path()?.rma(call)
}

/// A call without flags of its own.
///
/// # Safety
/// As [`rma`].
unsafe fn plain(
    ep: FidEp,
    read: bool,
    buffers: Buffers,
    there: There,
    context: Void,
    data: Option<u64>,
) -> Result<(), Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    let flags = unsafe { object::<Ep, _>(ep) }?.op_flags(false);
    let flags = if read { flags & !fi::FI_INJECT } else { flags };
    let remote = fi::fi_rma_iov { addr: there.addr, len: buffers.len(), key: there.key };
    let call = RmaCall { read, buffers, peer: there.peer, remote, context, data, flags, silent: false };
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    unsafe { rma(ep, &call) }
}

/// A write without completion whose buffer is free at once.
///
/// # Safety
/// As [`rma`].
unsafe fn quick(ep: FidEp, buffers: Buffers, there: There, data: Option<u64>) -> Result<(), Code> {
    let remote = fi::fi_rma_iov { addr: there.addr, len: buffers.len(), key: there.key };
    let (peer, context) = (there.peer, std::ptr::null_mut());
    let call = RmaCall { read: false, buffers, peer, remote, context, data, flags: fi::FI_INJECT, silent: true };
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    unsafe { rma(ep, &call) }
}

/// # Safety
/// As [`rma`], and `msg` is null or the application's.
unsafe fn message(ep: FidEp, read: bool, msg: *const fi::fi_msg_rma, flags: u64) -> Result<(), Code> {
    if flags & !(if read { READ_FLAGS } else { SEND_FLAGS }) != 0 {
        return Err(Code::BADFLAGS);
    }
    // SAFETY: null, or a message that the application keeps alive during the call.
    let msg = unsafe { msg.as_ref() }.ok_or(Code::INVAL)?;
    // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
    let buffers = unsafe { Buffers::read(msg.msg_iov, msg.desc, msg.iov_count) }?;
    if msg.rma_iov.is_null() || msg.rma_iov_count != 1 {
        return Err(Code::INVAL);
    }
    // SAFETY: one, by the interface.
    let remote = unsafe { msg.rma_iov.read() };
    if remote.len != buffers.len() {
        return Err(Code::INVAL);
    }
    let data = (flags & fi::FI_REMOTE_CQ_DATA != 0).then_some(msg.data);
    let (peer, context) = (msg.addr, msg.context);
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    unsafe { rma(ep, &RmaCall { read, buffers, peer, remote, context, data, flags, silent: false }) }
}

unsafe extern "C" fn read(
    ep: FidEp,
    buf: Void,
    len: usize,
    desc: Void,
    peer: Addr,
    addr: u64,
    key: u64,
    context: Void,
) -> isize {
    data_entry("fi_read", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { plain(ep, true, Buffers::one(buf, len, desc)?, There { peer, addr, key }, context, None) }
    })
}

unsafe extern "C" fn readv(
    ep: FidEp,
    iov: *const fi::iovec,
    desc: *mut Void,
    count: usize,
    peer: Addr,
    addr: u64,
    key: u64,
    context: Void,
) -> isize {
    data_entry("fi_readv", || {
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(iov, desc, count) }?;
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { plain(ep, true, buffers, There { peer, addr, key }, context, None) }
    })
}

unsafe extern "C" fn readmsg(ep: FidEp, msg: *const fi::fi_msg_rma, flags: u64) -> isize {
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    data_entry("fi_readmsg", || unsafe { message(ep, true, msg, flags) })
}

unsafe extern "C" fn write(
    ep: FidEp,
    buf: *const c_void,
    len: usize,
    desc: Void,
    peer: Addr,
    addr: u64,
    key: u64,
    context: Void,
) -> isize {
    data_entry("fi_write", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { plain(ep, false, Buffers::one(buf, len, desc)?, There { peer, addr, key }, context, None) }
    })
}

unsafe extern "C" fn writev(
    ep: FidEp,
    iov: *const fi::iovec,
    desc: *mut Void,
    count: usize,
    peer: Addr,
    addr: u64,
    key: u64,
    context: Void,
) -> isize {
    data_entry("fi_writev", || {
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(iov, desc, count) }?;
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { plain(ep, false, buffers, There { peer, addr, key }, context, None) }
    })
}

unsafe extern "C" fn writemsg(ep: FidEp, msg: *const fi::fi_msg_rma, flags: u64) -> isize {
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    data_entry("fi_writemsg", || unsafe { message(ep, false, msg, flags) })
}

unsafe extern "C" fn inject(ep: FidEp, buf: *const c_void, len: usize, peer: Addr, addr: u64, key: u64) -> isize {
    data_entry("fi_inject_write", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { quick(ep, Buffers::one(buf, len, std::ptr::null_mut())?, There { peer, addr, key }, None) }
    })
}

unsafe extern "C" fn writedata(
    ep: FidEp,
    buf: *const c_void,
    len: usize,
    desc: Void,
    data: u64,
    peer: Addr,
    addr: u64,
    key: u64,
    context: Void,
) -> isize {
    data_entry("fi_writedata", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { plain(ep, false, Buffers::one(buf, len, desc)?, There { peer, addr, key }, context, Some(data)) }
    })
}

unsafe extern "C" fn injectdata(
    ep: FidEp,
    buf: *const c_void,
    len: usize,
    data: u64,
    peer: Addr,
    addr: u64,
    key: u64,
) -> isize {
    data_entry("fi_inject_writedata", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { quick(ep, Buffers::one(buf, len, std::ptr::null_mut())?, There { peer, addr, key }, Some(data)) }
    })
}

/// Remote memory.
pub(super) static RMA: fi::fi_ops_rma = fi::fi_ops_rma {
    size: size_of::<fi::fi_ops_rma>(),
    read: Some(read),
    readv: Some(readv),
    readmsg: Some(readmsg),
    write: Some(write),
    writev: Some(writev),
    writemsg: Some(writemsg),
    inject: Some(inject),
    writedata: Some(writedata),
    injectdata: Some(injectdata),
};
