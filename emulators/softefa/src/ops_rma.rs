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

/// An address in a peer's memory.
#[derive(Clone, Copy)]
struct Remote {
    peer: Addr,
    addr: u64,
    key: u64,
}

/// # Safety
/// The application keeps `ep` open during the call, and the buffers valid as `fi_rma(3)` requires.
unsafe fn rma(ep: FidEp, call: &RmaCall) -> Result<(), Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    unsafe { object::<Ep, _>(ep) }?.path()?.rma(call)
}

/// A call with the endpoint's default flags.
///
/// # Safety
/// The conditions of [`rma`].
unsafe fn rma_default(
    ep: FidEp,
    read: bool,
    buffers: Buffers,
    to: Remote,
    context: Void,
    data: Option<u64>,
) -> Result<(), Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    let flags = unsafe { object::<Ep, _>(ep) }?.op_flags(false);
    let flags = if read { flags & !fi::FI_INJECT } else { flags };
    let remote = fi::fi_rma_iov { addr: to.addr, len: buffers.len(), key: to.key };
    let call = RmaCall { read, buffers, peer: to.peer, remote, context, data, flags, silent: false };
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    unsafe { rma(ep, &call) }
}

/// A write without completion. Its buffer is free when the call returns.
///
/// # Safety
/// The conditions of [`rma`].
unsafe fn write_inject(ep: FidEp, buffers: Buffers, to: Remote, data: Option<u64>) -> Result<(), Code> {
    let remote = fi::fi_rma_iov { addr: to.addr, len: buffers.len(), key: to.key };
    let (peer, context) = (to.peer, std::ptr::null_mut());
    let call = RmaCall { read: false, buffers, peer, remote, context, data, flags: fi::FI_INJECT, silent: true };
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    unsafe { rma(ep, &call) }
}

/// `fi_readmsg` and `fi_writemsg`.
unsafe extern "C" fn message<const READ: bool>(ep: FidEp, msg: *const fi::fi_msg_rma, flags: u64) -> isize {
    data_entry(if READ { "fi_readmsg" } else { "fi_writemsg" }, || {
        if flags & !(if READ { READ_FLAGS } else { SEND_FLAGS }) != 0 {
            return Err(Code::BADFLAGS);
        }
        // SAFETY: null, or a message that the application keeps alive during the call.
        let msg = unsafe { msg.as_ref() }.ok_or(Code::INVAL)?;
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(msg.msg_iov, msg.desc, msg.iov_count) }?;
        if msg.rma_iov.is_null() || msg.rma_iov_count != 1 {
            return Err(Code::INVAL);
        }
        // SAFETY: not null, and the application states one range, which it keeps alive during the call.
        let remote = unsafe { msg.rma_iov.read() };
        if remote.len != buffers.len() {
            return Err(Code::INVAL);
        }
        let data = (flags & fi::FI_REMOTE_CQ_DATA != 0).then_some(msg.data);
        let (peer, context) = (msg.addr, msg.context);
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_rma(3)` asks.
        unsafe { rma(ep, &RmaCall { read: READ, buffers, peer, remote, context, data, flags, silent: false }) }
    })
}

/// `fi_readv` and `fi_writev`.
unsafe extern "C" fn vector<const READ: bool>(
    ep: FidEp,
    iov: *const fi::iovec,
    desc: *mut Void,
    count: usize,
    peer: Addr,
    addr: u64,
    key: u64,
    context: Void,
) -> isize {
    data_entry(if READ { "fi_readv" } else { "fi_writev" }, || {
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(iov, desc, count) }?;
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { rma_default(ep, READ, buffers, Remote { peer, addr, key }, context, None) }
    })
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
        unsafe { rma_default(ep, true, Buffers::one(buf, len, desc)?, Remote { peer, addr, key }, context, None) }
    })
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
        unsafe { rma_default(ep, false, Buffers::one(buf, len, desc)?, Remote { peer, addr, key }, context, None) }
    })
}

unsafe extern "C" fn inject(ep: FidEp, buf: *const c_void, len: usize, peer: Addr, addr: u64, key: u64) -> isize {
    data_entry("fi_inject_write", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { write_inject(ep, Buffers::one(buf, len, std::ptr::null_mut())?, Remote { peer, addr, key }, None) }
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
        unsafe {
            rma_default(ep, false, Buffers::one(buf, len, desc)?, Remote { peer, addr, key }, context, Some(data))
        }
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
        unsafe {
            write_inject(ep, Buffers::one(buf, len, std::ptr::null_mut())?, Remote { peer, addr, key }, Some(data))
        }
    })
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
