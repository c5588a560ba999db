//! `fi_ops_msg` and `fi_ops_tagged`: messages.

use std::ffi::c_void;

use ferrogin_libfabric::bindings as fi;

use super::call::{Buffers, RecvCall, SEND_FLAGS, SendCall};
use super::ep::Ep;
use super::guard::{Code, data_entry};
use super::object::object;

type FidEp = *mut fi::fid_ep;
type Addr = fi::fi_addr_t;
type Void = *mut c_void;

/// Flags that a receive may have.
const RECV_FLAGS: u64 = fi::FI_COMPLETION | fi::FI_MORE | fi::FI_MULTI_RECV;
/// Flags that a tagged receive may have.
const TRECV_FLAGS: u64 = fi::FI_COMPLETION | fi::FI_MORE | fi::FI_PEEK | fi::FI_CLAIM | fi::FI_DISCARD;

/// # Safety
/// The application keeps `ep` open during the call.
unsafe fn send(ep: FidEp, call: &SendCall) -> Result<(), Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    unsafe { object::<Ep, _>(ep) }?.path()?.send(call)
}

/// # Safety
/// The conditions of [`send`].
unsafe fn recv(ep: FidEp, call: &RecvCall) -> Result<(), Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    unsafe { object::<Ep, _>(ep) }?.path()?.recv(call)
}

/// The default flags, for calls without flags.
///
/// # Safety
/// The conditions of [`send`].
unsafe fn defaults(ep: FidEp, receive: bool) -> Result<u64, Code> {
    // SAFETY: the application keeps the fid open during the call; `object` checks its class.
    Ok(unsafe { object::<Ep, _>(ep) }?.op_flags(receive))
}

/// A send with the endpoint's default flags.
///
/// # Safety
/// The conditions of [`send`].
unsafe fn send_default(
    ep: FidEp,
    buffers: Buffers,
    to: Addr,
    context: Void,
    tag: Option<u64>,
    data: Option<u64>,
) -> Result<(), Code> {
    // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
    let flags = unsafe { defaults(ep, false) }?;
    let call = SendCall { buffers, to, context, tag, data, flags, silent: false };
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    unsafe { send(ep, &call) }
}

/// A send without completion. Its buffer is free when the call returns.
///
/// # Safety
/// The conditions of [`send`].
unsafe fn inject(ep: FidEp, buffers: Buffers, to: Addr, tag: Option<u64>, data: Option<u64>) -> Result<(), Code> {
    let context = std::ptr::null_mut();
    let call = SendCall { buffers, to, context, tag, data, flags: fi::FI_INJECT, silent: true };
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    unsafe { send(ep, &call) }
}

/// A receive with the endpoint's default flags.
///
/// # Safety
/// The conditions of [`send`].
unsafe fn recv_default(
    ep: FidEp,
    buffers: Buffers,
    from: Addr,
    context: Void,
    tag: Option<(u64, u64)>,
) -> Result<(), Code> {
    // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
    let flags = unsafe { defaults(ep, true) }?;
    let flags = if tag.is_some() { flags & !fi::FI_MULTI_RECV } else { flags };
    // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
    unsafe { recv(ep, &RecvCall { buffers, from, context, tag, flags }) }
}

fn check(flags: u64, known: u64) -> Result<(), Code> {
    if flags & !known == 0 { Ok(()) } else { Err(Code::BADFLAGS) }
}

unsafe extern "C" fn fi_recv(ep: FidEp, buf: Void, len: usize, desc: Void, from: Addr, context: Void) -> isize {
    data_entry("fi_recv", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { recv_default(ep, Buffers::one(buf, len, desc)?, from, context, None) }
    })
}

unsafe extern "C" fn fi_recvv(
    ep: FidEp,
    iov: *const fi::iovec,
    desc: *mut Void,
    count: usize,
    from: Addr,
    context: Void,
) -> isize {
    data_entry("fi_recvv", || {
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(iov, desc, count) }?;
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { recv_default(ep, buffers, from, context, None) }
    })
}

unsafe extern "C" fn fi_recvmsg(ep: FidEp, msg: *const fi::fi_msg, flags: u64) -> isize {
    data_entry("fi_recvmsg", || {
        check(flags, RECV_FLAGS)?;
        // SAFETY: null, or a message that the application keeps alive during the call.
        let msg = unsafe { msg.as_ref() }.ok_or(Code::INVAL)?;
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(msg.msg_iov, msg.desc, msg.iov_count) }?;
        let call = RecvCall { buffers, from: msg.addr, context: msg.context, tag: None, flags };
        // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { recv(ep, &call) }
    })
}

unsafe extern "C" fn fi_send(ep: FidEp, buf: *const c_void, len: usize, desc: Void, to: Addr, context: Void) -> isize {
    data_entry("fi_send", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { send_default(ep, Buffers::one(buf, len, desc)?, to, context, None, None) }
    })
}

unsafe extern "C" fn fi_sendv(
    ep: FidEp,
    iov: *const fi::iovec,
    desc: *mut Void,
    count: usize,
    to: Addr,
    context: Void,
) -> isize {
    data_entry("fi_sendv", || {
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(iov, desc, count) }?;
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { send_default(ep, buffers, to, context, None, None) }
    })
}

unsafe extern "C" fn fi_sendmsg(ep: FidEp, msg: *const fi::fi_msg, flags: u64) -> isize {
    data_entry("fi_sendmsg", || {
        check(flags, SEND_FLAGS)?;
        // SAFETY: null, or a message that the application keeps alive during the call.
        let msg = unsafe { msg.as_ref() }.ok_or(Code::INVAL)?;
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(msg.msg_iov, msg.desc, msg.iov_count) }?;
        let data = (flags & fi::FI_REMOTE_CQ_DATA != 0).then_some(msg.data);
        let call = SendCall { buffers, to: msg.addr, context: msg.context, tag: None, data, flags, silent: false };
        // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { send(ep, &call) }
    })
}

unsafe extern "C" fn fi_inject(ep: FidEp, buf: *const c_void, len: usize, to: Addr) -> isize {
    data_entry("fi_inject", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { inject(ep, Buffers::one(buf, len, std::ptr::null_mut())?, to, None, None) }
    })
}

unsafe extern "C" fn fi_senddata(
    ep: FidEp,
    buf: *const c_void,
    len: usize,
    desc: Void,
    data: u64,
    to: Addr,
    context: Void,
) -> isize {
    data_entry("fi_senddata", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { send_default(ep, Buffers::one(buf, len, desc)?, to, context, None, Some(data)) }
    })
}

unsafe extern "C" fn fi_injectdata(ep: FidEp, buf: *const c_void, len: usize, data: u64, to: Addr) -> isize {
    data_entry("fi_injectdata", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { inject(ep, Buffers::one(buf, len, std::ptr::null_mut())?, to, None, Some(data)) }
    })
}

unsafe extern "C" fn fi_trecv(
    ep: FidEp,
    buf: Void,
    len: usize,
    desc: Void,
    from: Addr,
    tag: u64,
    ignore: u64,
    context: Void,
) -> isize {
    data_entry("fi_trecv", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { recv_default(ep, Buffers::one(buf, len, desc)?, from, context, Some((tag, ignore))) }
    })
}

unsafe extern "C" fn fi_trecvv(
    ep: FidEp,
    iov: *const fi::iovec,
    desc: *mut Void,
    count: usize,
    from: Addr,
    tag: u64,
    ignore: u64,
    context: Void,
) -> isize {
    data_entry("fi_trecvv", || {
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(iov, desc, count) }?;
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { recv_default(ep, buffers, from, context, Some((tag, ignore))) }
    })
}

unsafe extern "C" fn fi_trecvmsg(ep: FidEp, msg: *const fi::fi_msg_tagged, flags: u64) -> isize {
    data_entry("fi_trecvmsg", || {
        check(flags, TRECV_FLAGS)?;
        // SAFETY: null, or a message that the application keeps alive during the call.
        let msg = unsafe { msg.as_ref() }.ok_or(Code::INVAL)?;
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(msg.msg_iov, msg.desc, msg.iov_count) }?;
        let tag = Some((msg.tag, msg.ignore));
        let call = RecvCall { buffers, from: msg.addr, context: msg.context, tag, flags };
        // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { recv(ep, &call) }
    })
}

unsafe extern "C" fn fi_tsend(
    ep: FidEp,
    buf: *const c_void,
    len: usize,
    desc: Void,
    to: Addr,
    tag: u64,
    context: Void,
) -> isize {
    data_entry("fi_tsend", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { send_default(ep, Buffers::one(buf, len, desc)?, to, context, Some(tag), None) }
    })
}

unsafe extern "C" fn fi_tsendv(
    ep: FidEp,
    iov: *const fi::iovec,
    desc: *mut Void,
    count: usize,
    to: Addr,
    tag: u64,
    context: Void,
) -> isize {
    data_entry("fi_tsendv", || {
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(iov, desc, count) }?;
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { send_default(ep, buffers, to, context, Some(tag), None) }
    })
}

unsafe extern "C" fn fi_tsendmsg(ep: FidEp, msg: *const fi::fi_msg_tagged, flags: u64) -> isize {
    data_entry("fi_tsendmsg", || {
        check(flags, SEND_FLAGS)?;
        // SAFETY: null, or a message that the application keeps alive during the call.
        let msg = unsafe { msg.as_ref() }.ok_or(Code::INVAL)?;
        // SAFETY: the application gives as many buffers and, unless null, descriptors as it states (`fi_msg(3)`).
        let buffers = unsafe { Buffers::read(msg.msg_iov, msg.desc, msg.iov_count) }?;
        let data = (flags & fi::FI_REMOTE_CQ_DATA != 0).then_some(msg.data);
        let (to, context, tag) = (msg.addr, msg.context, Some(msg.tag));
        // SAFETY: this function's caller keeps the fid and the buffers of the call valid until it returns, as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { send(ep, &SendCall { buffers, to, context, tag, data, flags, silent: false }) }
    })
}

unsafe extern "C" fn fi_tinject(ep: FidEp, buf: *const c_void, len: usize, to: Addr, tag: u64) -> isize {
    data_entry("fi_tinject", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { inject(ep, Buffers::one(buf, len, std::ptr::null_mut())?, to, Some(tag), None) }
    })
}

unsafe extern "C" fn fi_tsenddata(
    ep: FidEp,
    buf: *const c_void,
    len: usize,
    desc: Void,
    data: u64,
    to: Addr,
    tag: u64,
    context: Void,
) -> isize {
    data_entry("fi_tsenddata", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { send_default(ep, Buffers::one(buf, len, desc)?, to, context, Some(tag), Some(data)) }
    })
}

unsafe extern "C" fn fi_tinjectdata(ep: FidEp, buf: *const c_void, len: usize, data: u64, to: Addr, tag: u64) -> isize {
    data_entry("fi_tinjectdata", || {
        // SAFETY: the application keeps the fid open during the call, and its buffers valid as `fi_msg(3)` and `fi_rma(3)` ask.
        unsafe { inject(ep, Buffers::one(buf, len, std::ptr::null_mut())?, to, Some(tag), Some(data)) }
    })
}

/// Messages.
pub(super) static MSG: fi::fi_ops_msg = fi::fi_ops_msg {
    size: size_of::<fi::fi_ops_msg>(),
    recv: Some(fi_recv),
    recvv: Some(fi_recvv),
    recvmsg: Some(fi_recvmsg),
    send: Some(fi_send),
    sendv: Some(fi_sendv),
    sendmsg: Some(fi_sendmsg),
    inject: Some(fi_inject),
    senddata: Some(fi_senddata),
    injectdata: Some(fi_injectdata),
};

/// Messages with tags, which only the fabric `efa` has. On `efa-direct` these calls return `ENOSYS`.
pub(super) static TAGGED: fi::fi_ops_tagged = fi::fi_ops_tagged {
    size: size_of::<fi::fi_ops_tagged>(),
    recv: Some(fi_trecv),
    recvv: Some(fi_trecvv),
    recvmsg: Some(fi_trecvmsg),
    send: Some(fi_tsend),
    sendv: Some(fi_tsendv),
    sendmsg: Some(fi_tsendmsg),
    inject: Some(fi_tinject),
    senddata: Some(fi_tsenddata),
    injectdata: Some(fi_tinjectdata),
};
