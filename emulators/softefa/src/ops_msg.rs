//! `fi_ops_msg` and `fi_ops_tagged`: messages.

use std::ffi::c_void;
use std::ptr;

use ferrogin_libfabric::bindings as fi;

use super::call::{Buffers, Message, RecvCall, SEND_FLAGS, SendCall};
use super::entry::entry_points;
use super::ep::Ep;
use super::guard::Code;

type FidEp = *mut fi::fid_ep;
type Addr = fi::fi_addr_t;
type Void = *mut c_void;

/// Flags that a receive may have.
const RECV_FLAGS: u64 = fi::FI_COMPLETION | fi::FI_MORE | fi::FI_MULTI_RECV;
/// Flags that a tagged receive may have.
const TRECV_FLAGS: u64 = fi::FI_COMPLETION | fi::FI_MORE | fi::FI_PEEK | fi::FI_CLAIM | fi::FI_DISCARD;

fn send(ep: &Ep, call: &SendCall) -> Result<i32, Code> {
    ep.path()?.send(call).map(|()| 0)
}

fn recv(ep: &Ep, call: &RecvCall) -> Result<i32, Code> {
    ep.path()?.recv(call).map(|()| 0)
}

/// Sends with the endpoint's default flags.
fn send_default(
    ep: &Ep,
    buffers: Buffers,
    to: Addr,
    context: Void,
    tag: Option<u64>,
    data: Option<u64>,
) -> Result<i32, Code> {
    let flags = ep.op_flags(false);
    send(ep, &SendCall { buffers, to, context, tag, data, flags, silent: false })
}

/// Sends without a completion. The buffer is free when the call returns.
fn inject(ep: &Ep, buffers: Buffers, to: Addr, tag: Option<u64>, data: Option<u64>) -> Result<i32, Code> {
    let context = ptr::null_mut();
    send(ep, &SendCall { buffers, to, context, tag, data, flags: fi::FI_INJECT, silent: true })
}

/// Receives with the endpoint's default flags.
fn recv_default(ep: &Ep, buffers: Buffers, from: Addr, context: Void, tag: Option<(u64, u64)>) -> Result<i32, Code> {
    let flags = ep.op_flags(true);
    let flags = if tag.is_some() { flags & !fi::FI_MULTI_RECV } else { flags };
    recv(ep, &RecvCall { buffers, from, context, tag, flags })
}

fn recv_message(ep: &Ep, msg: &Message, tag: Option<(u64, u64)>, flags: u64, known: u64) -> Result<i32, Code> {
    if flags & !known != 0 {
        return Err(Code::BADFLAGS);
    }
    recv(ep, &RecvCall { buffers: msg.buffers, from: msg.peer, context: msg.context, tag, flags })
}

fn send_message(ep: &Ep, msg: &Message, tag: Option<u64>, flags: u64) -> Result<i32, Code> {
    if flags & !SEND_FLAGS != 0 {
        return Err(Code::BADFLAGS);
    }
    let (buffers, to, context, data) = (msg.buffers, msg.peer, msg.context, msg.data(flags));
    send(ep, &SendCall { buffers, to, context, tag, data, flags, silent: false })
}

entry_points! {
    fn fi_recv(ep: FidEp, buf: Void, len: usize, desc: Void, from: Addr, context: Void) -> isize
    as ("fi_recv") (ep: &Ep = ep, buffers: Buffers = (buf, len, desc)) {
        recv_default(ep, buffers, from, context, None)
    }

    fn fi_recvv(ep: FidEp, iov: *const fi::iovec, desc: *mut Void, count: usize, from: Addr, context: Void) -> isize
    as ("fi_recvv") (ep: &Ep = ep, buffers: Buffers = (iov, desc, count)) {
        recv_default(ep, buffers, from, context, None)
    }

    fn fi_recvmsg(ep: FidEp, msg: *const fi::fi_msg, flags: u64) -> isize
    as ("fi_recvmsg") (ep: &Ep = ep, msg: Message = msg) {
        recv_message(ep, &msg, None, flags, RECV_FLAGS)
    }

    fn fi_send(ep: FidEp, buf: *const c_void, len: usize, desc: Void, to: Addr, context: Void) -> isize
    as ("fi_send") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, desc)) {
        send_default(ep, buffers, to, context, None, None)
    }

    fn fi_sendv(ep: FidEp, iov: *const fi::iovec, desc: *mut Void, count: usize, to: Addr, context: Void) -> isize
    as ("fi_sendv") (ep: &Ep = ep, buffers: Buffers = (iov, desc, count)) {
        send_default(ep, buffers, to, context, None, None)
    }

    fn fi_sendmsg(ep: FidEp, msg: *const fi::fi_msg, flags: u64) -> isize
    as ("fi_sendmsg") (ep: &Ep = ep, msg: Message = msg) {
        send_message(ep, &msg, None, flags)
    }

    fn fi_inject(ep: FidEp, buf: *const c_void, len: usize, to: Addr) -> isize
    as ("fi_inject") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, ptr::null_mut())) {
        inject(ep, buffers, to, None, None)
    }

    fn fi_senddata(ep: FidEp, buf: *const c_void, len: usize, desc: Void, data: u64, to: Addr, context: Void) -> isize
    as ("fi_senddata") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, desc)) {
        send_default(ep, buffers, to, context, None, Some(data))
    }

    fn fi_injectdata(ep: FidEp, buf: *const c_void, len: usize, data: u64, to: Addr) -> isize
    as ("fi_injectdata") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, ptr::null_mut())) {
        inject(ep, buffers, to, None, Some(data))
    }

    fn fi_trecv(ep: FidEp, buf: Void, len: usize, desc: Void, from: Addr, tag: u64, ignore: u64, context: Void) -> isize
    as ("fi_trecv") (ep: &Ep = ep, buffers: Buffers = (buf, len, desc)) {
        recv_default(ep, buffers, from, context, Some((tag, ignore)))
    }

    fn fi_trecvv(
        ep: FidEp,
        iov: *const fi::iovec,
        desc: *mut Void,
        count: usize,
        from: Addr,
        tag: u64,
        ignore: u64,
        context: Void,
    ) -> isize
    as ("fi_trecvv") (ep: &Ep = ep, buffers: Buffers = (iov, desc, count)) {
        recv_default(ep, buffers, from, context, Some((tag, ignore)))
    }

    fn fi_trecvmsg(ep: FidEp, msg: *const fi::fi_msg_tagged, flags: u64) -> isize
    as ("fi_trecvmsg") (ep: &Ep = ep, msg: Message = msg) {
        recv_message(ep, &msg, Some((msg.tag, msg.ignore)), flags, TRECV_FLAGS)
    }

    fn fi_tsend(ep: FidEp, buf: *const c_void, len: usize, desc: Void, to: Addr, tag: u64, context: Void) -> isize
    as ("fi_tsend") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, desc)) {
        send_default(ep, buffers, to, context, Some(tag), None)
    }

    fn fi_tsendv(
        ep: FidEp,
        iov: *const fi::iovec,
        desc: *mut Void,
        count: usize,
        to: Addr,
        tag: u64,
        context: Void,
    ) -> isize
    as ("fi_tsendv") (ep: &Ep = ep, buffers: Buffers = (iov, desc, count)) {
        send_default(ep, buffers, to, context, Some(tag), None)
    }

    fn fi_tsendmsg(ep: FidEp, msg: *const fi::fi_msg_tagged, flags: u64) -> isize
    as ("fi_tsendmsg") (ep: &Ep = ep, msg: Message = msg) {
        send_message(ep, &msg, Some(msg.tag), flags)
    }

    fn fi_tinject(ep: FidEp, buf: *const c_void, len: usize, to: Addr, tag: u64) -> isize
    as ("fi_tinject") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, ptr::null_mut())) {
        inject(ep, buffers, to, Some(tag), None)
    }

    fn fi_tsenddata(
        ep: FidEp,
        buf: *const c_void,
        len: usize,
        desc: Void,
        data: u64,
        to: Addr,
        tag: u64,
        context: Void,
    ) -> isize
    as ("fi_tsenddata") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, desc)) {
        send_default(ep, buffers, to, context, Some(tag), Some(data))
    }

    fn fi_tinjectdata(ep: FidEp, buf: *const c_void, len: usize, data: u64, to: Addr, tag: u64) -> isize
    as ("fi_tinjectdata") (ep: &Ep = ep, buffers: Buffers = (buf.cast_mut(), len, ptr::null_mut())) {
        inject(ep, buffers, to, Some(tag), Some(data))
    }
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

/// Messages with tags, which only the `efa` fabric has. On `efa-direct` these calls return `ENOSYS`.
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
