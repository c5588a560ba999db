//! Tags matched by the provider, which can be any with reliable datagrams, `FI_TAGGED` and `FI_DIRECTED_RECV`.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;

use ferrogin_libfabric::bindings::{self, fi_msg_tagged, fid_ep, iovec};
use ferrogin_libfabric::{
    AddressVector, CompletionError, Context, Domain, Endpoint, Error, EventQueue, Fabric, FiAddr, Libfabric, Read,
    TaggedCompletion, TaggedQueue, TaggedRecv, TaggedSend, entry, find_datagrams,
};

use super::endpoint::{
    self, Abilities, Addr, CONTROL, Found, Pattern, Receive, ReceiveError, ReceiveResult, Received, Send, SendResult,
    Token,
};
use super::outgoing::PAYLOAD_WINDOW;
use crate::Payload;

/// The type of `fi_tsendmsg` and `fi_trecvmsg`.
type WithMessage = unsafe extern "C" fn(*mut fid_ep, *const fi_msg_tagged, u64) -> isize;
type Inject = unsafe extern "C" fn(*mut fid_ep, *const c_void, usize, bindings::fi_addr_t, u64) -> isize;

/// How many completions are taken from the queue at once.
const BATCH: usize = 32;
/// Batches per poll, limited so that many completions don't keep the caller from its other work.
const BATCHES: usize = 8;

enum Usage {
    Free,
    Send(Payload),
    /// A send whose bytes the provider copied.
    Copied,
    Receive(Vec<u8>),
    Peek,
}

/// An operation in flight and the memory that it uses.
struct Record {
    token: Token,
    usage: Usage,
}

/// Tagged messages of one libfabric endpoint.
pub(crate) struct Provider {
    // First, so that it is closed before the memory of its operations is freed.
    endpoint: Endpoint,
    queue: TaggedQueue,
    /// Failures of the endpoint itself, if the provider reports them this way.
    failures: Option<Arc<EventQueue>>,
    av: Arc<AddressVector>,
    send: TaggedSend,
    recv: TaggedRecv,
    inject: Option<Inject>,
    /// Whether control messages may be injected. Not if closing the endpoint may lose injected messages: the
    /// confirmation of a close is often an endpoint's last message.
    injects_control: bool,
    /// For providers that post several sends with one doorbell (`FI_MORE`).
    send_message: Option<WithMessage>,
    /// None if the provider has no `FI_PEEK`.
    peek: Option<WithMessage>,
    inject_size: usize,
    /// Whether the provider reports the senders of messages (`FI_SOURCE`).
    knows_senders: bool,
    records: Vec<Record>,
    /// One for each record; boxed because the provider keeps pointers to them.
    #[allow(clippy::vec_box)]
    contexts: Vec<Box<Context<u32>>>,
    free: Vec<u32>,
    /// Buffers for completions and their senders.
    batch: Box<[TaggedCompletion; BATCH]>,
    senders: [bindings::fi_addr_t; BATCH],
    names_are_text: bool,
    abilities: Abilities,
}

// SAFETY: the function pointers are to provider code, which any thread may call; only the provider uses its part of the
// contexts.
unsafe impl std::marker::Send for Provider {}

impl Provider {
    /// Opens and enables an endpoint of `provider` at `source`.
    pub fn open(lib: &Arc<Libfabric>, provider: &str, source: Option<&str>, peers: usize) -> Result<Self, Error> {
        let needed = bindings::FI_TAGGED | bindings::FI_DIRECTED_RECV;
        let knowing = find_datagrams(lib, provider, source, needed | bindings::FI_SOURCE);
        let knows_senders = knowing.is_ok();
        let mut info = knowing.or_else(|_| find_datagrams(lib, provider, source, needed))?;
        let provider = info.provider();
        let is_efa = provider == "efa";
        if is_efa {
            info.limit_queues(EFA_QUEUE);
        }
        let fabric = Fabric::open(&info)?;
        let domain = Domain::open(&fabric, &info)?;
        let av = AddressVector::open(&domain, peers.min(64))?;
        let queue = TaggedQueue::open(&domain, &provider, info.tx_size().saturating_add(info.rx_size()).min(1 << 16))?;
        let mut endpoint = Endpoint::open(&domain, &info)?;
        endpoint.bind_av(&av)?;
        endpoint.bind_cq(queue.queue(), bindings::FI_TRANSMIT | bindings::FI_RECV)?;
        let failures = if is_efa { Some(EventQueue::open(&fabric)?) } else { None };
        if let Some(failures) = &failures {
            endpoint.bind_eq(failures)?;
            // Within a host, the provider takes a shortcut through its shared memory, which crashes when one of two
            // endpoints in a process closes (libfabric 2.6 main). Messages go through the card instead, as between
            // hosts. An older libfabric lacks the option.
            if let Err(error) = endpoint.set_option(bindings::FI_OPT_SHARED_MEMORY_PERMITTED, false) {
                log::debug!("shared memory of the provider stays in use: {error}");
            }
        }
        endpoint.enable()?;
        let object = endpoint.object();
        let send = entry!(object, tagged: fi_ops_tagged, send, "fi_tsend")?;
        let recv = entry!(object, tagged: fi_ops_tagged, recv, "fi_trecv")?;
        let is_card = CARDS.contains(&provider.as_str());
        let inject = entry!(object, tagged: fi_ops_tagged, inject, "fi_tinject").ok();
        let send_message = entry!(object, tagged: fi_ops_tagged, sendmsg, "fi_tsendmsg").ok().filter(|_| is_card);
        let peek = entry!(object, tagged: fi_ops_tagged, recvmsg, "fi_trecvmsg").ok();
        Ok(Self {
            abilities: Abilities {
                name: endpoint.name()?.into(),
                max_message: info.max_msg_size(),
                // A stream carries one payload after another. Other providers carry several at a time.
                payload_window: if provider.starts_with("tcp") { PAYLOAD_WINDOW } else { usize::MAX },
                // rxm would read a long message's payload from the new endpoint, which breaks that endpoint's
                // connection.
                can_discard_stale: !provider.contains("ofi_rxm"),
                provider,
            },
            endpoint,
            queue,
            failures,
            av,
            send,
            recv,
            inject,
            injects_control: !is_card,
            send_message,
            peek,
            inject_size: info.inject_size(),
            knows_senders,
            records: Vec::new(),
            contexts: Vec::new(),
            free: Vec::new(),
            batch: Box::new([TaggedCompletion::EMPTY; BATCH]),
            senders: [bindings::FI_ADDR_NOTAVAIL; BATCH],
            names_are_text: info.addr_format() == bindings::FI_ADDR_STR,
        })
    }

    /// Takes a record for an operation; returns its index and its context.
    fn begin(&mut self, token: Token, usage: Usage) -> (u32, *mut c_void) {
        let record = Record { token, usage };
        let index = self.free.pop().unwrap_or(self.records.len() as u32);
        if index as usize == self.records.len() {
            self.records.push(record);
            self.contexts.push(Box::new(Context::new(index)));
        } else {
            self.records[index as usize] = record;
        }
        (index, self.contexts[index as usize].as_ptr())
    }

    /// Ends an operation; returns its token and memory.
    fn release(&mut self, index: u32) -> (Token, Usage) {
        let record = &mut self.records[index as usize];
        let usage = std::mem::replace(&mut record.usage, Usage::Free);
        // Not twice for an operation that the provider completes twice: two later operations would share the record.
        if !matches!(usage, Usage::Free) {
            self.free.push(index);
        }
        (record.token, usage)
    }

    /// Returns the operation that was posted with `context`.
    fn index_of(context: *mut c_void) -> u32 {
        // SAFETY: every operation was posted with a pointer to one of `contexts`, which live until the endpoint is
        // closed.
        unsafe { Context::<u32>::note(context) }
    }

    fn complete(
        &mut self,
        completion: &TaggedCompletion,
        sender: bindings::fi_addr_t,
        completions: &mut Vec<endpoint::Completion>,
    ) {
        if completion.context.is_null() {
            return;
        }
        let (token, usage) = self.release(Self::index_of(completion.context));
        let from = (self.knows_senders && sender != bindings::FI_ADDR_NOTAVAIL).then_some(Addr(sender));
        match usage {
            Usage::Send(body) => completions.push(endpoint::Completion::Sent { token, body, result: Ok(()) }),
            Usage::Receive(mut bytes) => {
                let len = completion.len.min(bytes.capacity());
                // SAFETY: the provider initialised `len` bytes from the start of the buffer, and the length stays
                // within its capacity.
                unsafe { bytes.set_len(len) };
                completions.push(endpoint::Completion::Received(Received {
                    token,
                    bytes,
                    tag: completion.tag,
                    from,
                    result: Ok(()),
                }));
            }
            Usage::Peek => completions
                .push(endpoint::Completion::Peeked { token, found: Some(Found { tag: completion.tag, from }) }),
            Usage::Copied | Usage::Free => {}
        }
    }

    fn fail(&mut self, failure: CompletionError, completions: &mut Vec<endpoint::Completion>) {
        if failure.context.is_null() {
            log::debug!("a failed completion without an operation: {}", failure.into_error("fi_cq_read"));
            return;
        }
        let (token, usage) = self.release(Self::index_of(failure.context));
        match usage {
            Usage::Send(body) => {
                completions.push(endpoint::Completion::Sent {
                    token,
                    body,
                    result: Err(failure.into_error("fi_tsend")),
                });
            }
            Usage::Receive(bytes) => {
                let tag = failure.tag;
                let fault = match failure.code {
                    bindings::FI_ETRUNC => ReceiveError::Truncated,
                    bindings::FI_ECANCELED => ReceiveError::Cancelled,
                    _ => ReceiveError::Failed(failure.into_error("fi_trecv")),
                };
                completions.push(endpoint::Completion::Received(Received {
                    token,
                    bytes,
                    tag,
                    from: None,
                    result: Err(fault),
                }));
            }
            Usage::Peek => {
                if failure.code != bindings::FI_ENOMSG {
                    log::debug!("{} cannot peek: {}", self.abilities.provider, failure.into_error("fi_trecvmsg"));
                    self.peek = None;
                }
                completions.push(endpoint::Completion::Peeked { token, found: None });
            }
            Usage::Copied => {
                let (body, result) = (Payload::word(0), Err(failure.into_error("fi_tsendmsg")));
                completions.push(endpoint::Completion::Sent { token, body, result });
            }
            Usage::Free => {}
        }
    }

    /// Sends a short message, leaving the doorbell to the next send.
    fn send_with_more(&mut self, send_message: WithMessage, send: Send) -> SendResult {
        let Send { to, tag, body, token, .. } = send;
        let bytes = body.as_slice();
        let bytes = iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let (index, context) = self.begin(token, Usage::Copied);
        let message = fi_msg_tagged { msg_iov: &bytes, iov_count: 1, addr: to.0, tag, context, ..Default::default() };
        let flags = bindings::FI_INJECT | bindings::FI_MORE | bindings::FI_COMPLETION;
        // SAFETY: the endpoint is open; message and bytes outlive the call, which copies them (FI_INJECT); the context
        // lives until the endpoint is closed.
        let code = unsafe { send_message(self.endpoint.as_ptr(), &message, flags) };
        if code != 0 {
            self.release(index);
        }
        self.copied("fi_tsendmsg", code, body)
    }

    /// Returns the result of a send whose bytes the provider copies.
    fn copied(&self, call: &'static str, code: isize, body: Payload) -> SendResult {
        match code {
            0 => SendResult::Done(body),
            RETRY => SendResult::Retry(body),
            code => SendResult::Failed(body, self.failure(call, code)),
        }
    }

    fn failure(&self, call: &'static str, code: isize) -> Error {
        let code = i32::try_from(code).unwrap_or(bindings::FI_EOTHER);
        self.endpoint.domain().library().failure(call, code)
    }
}

/// Entries in each queue of an `efa` endpoint. The provider allocates and registers a packet buffer of 9 KB for each
/// entry before the first message, and has 12288 entries unless an application asks for fewer.
const EFA_QUEUE: usize = 1024;

/// Providers for EFA cards. They ring the card's doorbell once for several sends (`FI_MORE`). When an endpoint is
/// closed, `efa` drops what the card hasn't delivered, so an injected message, which has no completion, may be lost.
const CARDS: [&str; 2] = ["efa", "softefa"];

const RETRY: isize = -(bindings::FI_EAGAIN as isize);

impl endpoint::Endpoint for Provider {
    fn abilities(&self) -> &Abilities {
        &self.abilities
    }

    fn insert(&mut self, name: &[u8]) -> Result<Addr, Error> {
        // The provider reads as many bytes as its own addresses have.
        if name.len() != self.abilities.name.len() && !self.names_are_text {
            let what = format!(
                "a peer's address has {} bytes, this endpoint's {}: they are of different providers",
                name.len(),
                self.abilities.name.len()
            );
            return Err(Error::Argument { what });
        }
        let FiAddr(number) = self.av.insert(name)?;
        Ok(Addr(number))
    }

    fn send(&mut self, send: Send) -> SendResult {
        let endpoint = self.endpoint.as_ptr();
        let small = send.body.len() <= self.inject_size;
        if let Some(send_message) = self.send_message.filter(|_| small && send.more) {
            return self.send_with_more(send_message, send);
        }
        let Send { to, tag, body, token, .. } = send;
        let may_inject = small && (self.injects_control || tag & CONTROL == 0);
        if let Some(inject) = self.inject.filter(|_| may_inject) {
            let bytes = body.as_slice();
            // SAFETY: the endpoint is open; the bytes outlive the call, which copies them.
            let code = unsafe { inject(endpoint, bytes.as_ptr().cast(), bytes.len(), to.0, tag) };
            return self.copied("fi_tinject", code, body);
        }
        // A word's bytes are inside the payload, which moves.
        let body = if body.is_word() { Payload::from(body.as_slice().to_vec()) } else { body };
        let (data, len, send) = (body.as_slice().as_ptr().cast(), body.len(), self.send);
        let (index, context) = self.begin(token, Usage::Send(body));
        // SAFETY: the endpoint is open; `records` owns the payload, whose bytes are on the heap or static, and the
        // context is in `contexts`: both live until the operation completes or the endpoint is closed.
        let code = unsafe { send(endpoint, data, len, ptr::null_mut(), to.0, tag, context) };
        if code == 0 {
            return SendResult::Posted;
        }
        let (_, Usage::Send(body)) = self.release(index) else { return SendResult::Retry(Payload::word(0)) };
        match code {
            RETRY => SendResult::Retry(body),
            code => SendResult::Failed(body, self.failure("fi_tsend", code)),
        }
    }

    fn receive(&mut self, receive: Receive) -> ReceiveResult {
        let Receive { from, pattern, mut buffer, len, token } = receive;
        buffer.clear();
        buffer.reserve_exact(len);
        let (endpoint, recv) = (self.endpoint.as_ptr(), self.recv);
        let from = from.map_or(bindings::FI_ADDR_UNSPEC, |addr| addr.0);
        let data = buffer.as_mut_ptr().cast();
        let (index, context) = self.begin(token, Usage::Receive(buffer));
        // SAFETY: the endpoint is open; `records` owns the buffer, which has `len` bytes of capacity, until the
        // operation completes or the endpoint is closed.
        let code = unsafe { recv(endpoint, data, len, ptr::null_mut(), from, pattern.tag, pattern.ignore, context) };
        if code == 0 {
            return ReceiveResult::Posted;
        }
        let (_, Usage::Receive(buffer)) = self.release(index) else { return ReceiveResult::Retry(Vec::new()) };
        match code {
            RETRY => ReceiveResult::Retry(buffer),
            code => ReceiveResult::Failed(buffer, self.failure("fi_trecv", code)),
        }
    }

    fn peek(&mut self, from: Option<Addr>, pattern: Pattern, token: Token) -> bool {
        let (Some(peek), endpoint) = (self.peek, self.endpoint.as_ptr()) else { return false };
        let (index, context) = self.begin(token, Usage::Peek);
        let addr = from.map_or(bindings::FI_ADDR_UNSPEC, |addr| addr.0);
        let message = fi_msg_tagged { addr, tag: pattern.tag, ignore: pattern.ignore, context, ..Default::default() };
        // SAFETY: the endpoint is open; the message has no buffers and outlives the call; the context lives until the
        // endpoint is closed.
        let code = unsafe { peek(endpoint, &message, bindings::FI_PEEK | bindings::FI_COMPLETION) };
        if code == 0 {
            return true;
        }
        self.release(index);
        if code != RETRY {
            log::debug!("{}: {}", self.abilities.provider, self.failure("fi_trecvmsg", code));
            self.peek = None;
        }
        false
    }

    fn cancel(&mut self, which: &dyn Fn(Token) -> bool) {
        let Ok(cancel) = entry!(self.endpoint.object(), ops: fi_ops_ep, cancel, "fi_cancel") else { return };
        for (record, context) in self.records.iter().zip(&self.contexts) {
            if matches!(record.usage, Usage::Receive(_)) && which(record.token) {
                // SAFETY: the endpoint is open; the context belongs to a posted operation, and lives until the endpoint
                // is closed.
                let code = unsafe { cancel(self.endpoint.as_ptr().cast(), context.as_ptr()) };
                if code != 0 {
                    log::debug!("fi_cancel: {code}");
                }
            }
        }
    }

    fn poll(&mut self, completions: &mut Vec<endpoint::Completion>) -> Result<(), Error> {
        for _ in 0..BATCHES {
            let senders = self.knows_senders.then_some(&mut self.senders[..]);
            let taken = match self.queue.read(&mut self.batch[..], senders)? {
                Read::Entries(0) => break,
                Read::Entries(count) => count.min(BATCH),
                Read::Failure => {
                    if let Some(failure) = self.queue.read_error()? {
                        self.fail(failure, completions);
                    }
                    continue;
                }
            };
            for at in 0..taken {
                let (completion, sender) = (self.batch[at], self.senders[at]);
                self.complete(&completion, sender, completions);
            }
            if taken < BATCH {
                break;
            }
        }
        self.failures.as_ref().map_or(Ok(()), |failures| failures.check())
    }

    fn wait_fd(&self) -> Option<RawFd> {
        self.queue.queue().wait_fd()
    }

    fn may_wait(&self) -> bool {
        self.queue.queue().may_wait()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carrier::tags::endpoint::Operation;
    use ferrogin_test_support::libraries;

    #[test]
    fn second_completion_of_an_operation_is_dropped() {
        for lib in libraries("second_completion_of_an_operation_is_dropped") {
            let mut provider = Provider::open(&lib, "tcp;ofi_rxm", Some("127.0.0.1"), 1).unwrap();
            let token = Token { operation: Operation::SendLength, session: None, id: 0 };
            let (_, context) = provider.begin(token, Usage::Send(Payload::word(0)));
            let mut completions = Vec::new();
            for _ in 0..2 {
                let completion = TaggedCompletion { context, ..TaggedCompletion::EMPTY };
                provider.complete(&completion, bindings::FI_ADDR_NOTAVAIL, &mut completions);
            }
            assert_eq!(completions.len(), 1);
            let [first, second] = [(); 2].map(|()| provider.begin(token, Usage::Peek).0);
            assert_ne!(first, second, "two operations share a record");
        }
    }
}
