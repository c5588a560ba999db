//! Long messages beside the datagrams: tagged messages of the same endpoint, from the sender's buffer into the receiver's without a copy.
//! The receive is posted before the sender may send, with a tag that no other message has: so no long message arrives unexpected.

use std::ffi::c_void;
use std::ptr;

use super::pool::{Context, Operation};
use ferrogin_libfabric::bindings;
use ferrogin_libfabric::entry;
use ferrogin_libfabric::{Endpoint, Error};
use ferrogin_libfabric::{TaggedRecv, TaggedSend};

type Cancel = unsafe extern "C" fn(*mut bindings::fid, *mut c_void) -> isize;

/// The end of a receive for a long message.
pub struct LongReceived {
    /// The token of the receive.
    pub token: u64,
    /// Bytes of the message.
    pub result: Result<usize, Error>,
}

/// The provider's functions, and the posted receives.
pub(super) struct Long {
    recv: TaggedRecv,
    send: TaggedSend,
    cancel: Cancel,
    /// Tokens of posted receives.
    posted: Vec<Option<u64>>,
    /// One for each of them; boxed, because the provider keeps pointers to them.
    #[allow(clippy::vec_box)]
    contexts: Vec<Box<Context>>,
    free: Vec<u32>,
    over: Vec<LongReceived>,
}

impl Long {
    pub fn new(endpoint: &Endpoint) -> Result<Self, Error> {
        let object = endpoint.object();
        Ok(Self {
            recv: entry!(object, tagged: fi_ops_tagged, recv, "fi_trecv")?,
            send: entry!(object, tagged: fi_ops_tagged, send, "fi_tsend")?,
            cancel: entry!(object, ops: fi_ops_ep, cancel, "fi_cancel")?,
            posted: Vec::new(),
            contexts: Vec::new(),
            free: Vec::new(),
            over: Vec::new(),
        })
    }

    /// `fi_tsend`: gives the code of libfabric.
    ///
    /// # Safety
    /// The endpoint is the one of [`Long::new`]; `context` stays, and `payload` is valid for reads of `len` bytes, until the
    /// completion or the close of the endpoint.
    pub unsafe fn send(
        &self,
        endpoint: &Endpoint,
        payload: (*const u8, usize),
        to: bindings::fi_addr_t,
        tag: u64,
        context: &Context,
    ) -> isize {
        let (data, len) = payload;
        // SAFETY: the caller keeps payload and context valid; no descriptor is needed, because the endpoint was opened without FI_MR_LOCAL.
        unsafe { (self.send)(endpoint.as_ptr(), data.cast(), len, ptr::null_mut(), to, tag, context.as_ptr()) }
    }

    /// `fi_trecv` for exactly `tag`. False when the provider did not take it.
    ///
    /// # Safety
    /// The endpoint is the one of [`Long::new`]; `room` is valid for writes of `len` bytes, and unused by others, until the
    /// receive ends or the endpoint is closed.
    pub unsafe fn receive(&mut self, endpoint: &Endpoint, tag: u64, buffer: *mut u8, len: usize, token: u64) -> bool {
        let index = self.free.pop().unwrap_or(self.posted.len() as u32);
        if index as usize == self.posted.len() {
            self.posted.push(None);
            self.contexts.push(Box::new(Context::new(Operation::ReceiveLong(index))));
        }
        let context = self.contexts[index as usize].as_ptr();
        let (endpoint, from) = (endpoint.as_ptr(), bindings::FI_ADDR_UNSPEC);
        // SAFETY: the caller keeps the buffer valid and unused; the context is free and lives as long as the endpoint.
        let code = unsafe { (self.recv)(endpoint, buffer.cast(), len, ptr::null_mut(), from, tag, 0, context) };
        if code == 0 {
            self.posted[index as usize] = Some(token);
        } else {
            self.free.push(index);
        }
        code == 0
    }

    /// Cancels the receive of `token`; it still ends with a completion.
    pub fn cancel(&self, endpoint: &Endpoint, token: u64) {
        let Some(index) = self.posted.iter().position(|posted| *posted == Some(token)) else { return };
        // SAFETY: the endpoint is open; the context belongs to a posted receive.
        let code = unsafe { (self.cancel)(endpoint.as_ptr().cast(), self.contexts[index].as_ptr()) };
        if code != 0 {
            log::debug!("fi_cancel: {code}");
        }
    }

    /// A receive ended.
    pub fn complete(&mut self, index: u32, result: Result<usize, Error>) {
        if let Some(token) = self.posted.get_mut(index as usize).and_then(Option::take) {
            self.free.push(index);
            self.over.push(LongReceived { token, result });
        }
    }

    /// Takes the receives that have ended.
    pub fn take(&mut self) -> Vec<LongReceived> {
        std::mem::take(&mut self.over)
    }
}
