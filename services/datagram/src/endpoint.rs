//! The message endpoint: opening, receiving, progress.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::long::Long;
use super::outbox::{Outbox, message_size};
use super::pool::{Context, Operation, Pool};
use super::wire::{Frame, Kind};
use crate::config::Config;
use crate::event::{Event, Unadmitted};
use ferrogin_libfabric::bindings::{self, fi_cq_format, fid_ep};
use ferrogin_libfabric::entry;
use ferrogin_libfabric::find_datagrams;
use ferrogin_libfabric::{
    AddressVector, Completion, CompletionQueue, ConnectionLimit, CqAttr, Domain, Endpoint, Error, Fabric, Info,
    Libfabric, Read,
};

type Recv =
    unsafe extern "C" fn(*mut fid_ep, *mut c_void, usize, *mut c_void, bindings::fi_addr_t, *mut c_void) -> isize;

/// Completions taken from the queue at once.
const BATCH: usize = 32;
/// Batches per poll, so that many completions do not keep the caller from its other work.
const BATCHES: usize = 4;
/// Providers whose tagged messages carry long messages: they have connections of their own, and no layer that loses dead peers.
const WITH_LONG: [&str; 2] = ["net", "tcp"];
/// Time in which silent connections end when the endpoint is dropped, and polls in which the provider notices their ends.
const CLOSE_LIMIT: Duration = Duration::from_millis(200);
const BACKLOG_POLLS: usize = 256;
/// Polls between reads of the clock while the endpoint is busy.
const POLLS_PER_CLOCK: u32 = 64;

/// An endpoint for datagrams; see the [module](super).
pub struct MessageEndpoint {
    // First: it closes the endpoint, after which nothing uses the buffers.
    outbox: Outbox,
    cq: Arc<CompletionQueue>,
    recv: Recv,
    contexts: Box<[Context]>,
    buffers: Pool,
    /// Receive buffers that libfabric has not taken yet.
    unposted: Vec<u32>,
    polls: u32,
    clock: Instant,
    connection_limit: Option<ConnectionLimit>,
    provider: String,
}

// SAFETY: the function pointer is to code of the provider, which any thread may call; `&mut self` keeps other uses in one thread.
unsafe impl Send for MessageEndpoint {}

impl MessageEndpoint {
    /// Opens and enables an endpoint.
    ///
    /// # Errors
    /// [`Error::NoMatch`] when the provider has no reliable datagrams with `FI_MSG` here; [`Error::Argument`] for a configuration that
    /// cannot be; what the provider answers.
    pub fn open(lib: &Arc<Libfabric>, config: &Config) -> Result<Self, Error> {
        let open_queue = |domain: &Arc<Domain>, size| CompletionQueue::open(domain, &CqAttr { size });
        let info = find_datagrams(lib, &config.provider, config.source.as_deref(), bindings::FI_MSG)?;
        Self::open_on(config, &info, open_queue)?.start_receiving()
    }

    /// [`MessageEndpoint::open`] with a descriptor to wait for and with long messages, each if the provider has it. `info` is what
    /// [`find_datagrams`] found for the configuration.
    ///
    /// # Errors
    /// As [`MessageEndpoint::open`].
    pub fn open_with_long(lib: &Arc<Libfabric>, config: &Config, info: Info) -> Result<Self, Error> {
        Self::open_without_receives(lib, config, info)?.start_receiving()
    }

    /// [`MessageEndpoint::open_with_long`] of an endpoint that never posts receives, for which providers allocate megabytes: to try whether
    /// it opens.
    ///
    /// # Errors
    /// As [`MessageEndpoint::open`].
    pub fn open_without_receives(lib: &Arc<Libfabric>, config: &Config, info: Info) -> Result<Self, Error> {
        let tagged = WITH_LONG.contains(&info.provider().as_str()).then(|| {
            let caps = bindings::FI_MSG | bindings::FI_TAGGED;
            find_datagrams(lib, &info.provider(), config.source.as_deref(), caps)
        });
        let tagged = tagged.and_then(Result::ok).filter(|tagged| tagged.provider() == info.provider());
        let has_long = tagged.is_some();
        let info = tagged.unwrap_or(info);
        let format = fi_cq_format::FI_CQ_FORMAT_DATA;
        let open_queue =
            |domain: &Arc<Domain>, size| CompletionQueue::open_to_wait(domain, &info.provider(), size, format);
        let mut this = Self::open_on(config, &info, open_queue)?;
        if has_long {
            this.outbox.long = Some(Long::new(&this.outbox.endpoint)?);
        }
        Ok(this)
    }

    fn open_on(
        config: &Config,
        info: &Info,
        open_queue: impl Fn(&Arc<Domain>, usize) -> Result<Arc<CompletionQueue>, Error>,
    ) -> Result<Self, Error> {
        let largest = config.max_payload.saturating_add(config.max_header).saturating_add(128);
        if info.max_msg_size() < largest {
            let (provider, max) = (info.provider(), info.max_msg_size());
            let what = format!("{provider} carries messages up to {max} bytes, not {largest}: lower max_payload");
            return Err(Error::Argument { what });
        }
        let fabric = Fabric::open(info)?;
        let domain = Domain::open(&fabric, info)?;
        let av = AddressVector::open(&domain, config.max_peers.min(1024))?;
        let depth = config.tx_depth.saturating_add(config.rx_depth).saturating_mul(2);
        let cq = open_queue(&domain, depth)?;
        let mut endpoint = Endpoint::open(&domain, info)?;
        endpoint.bind_av(&av)?;
        endpoint.bind_cq(&cq, bindings::FI_TRANSMIT | bindings::FI_RECV)?;
        endpoint.enable()?;
        let recv = entry!(endpoint.object(), msg: fi_ops_msg, recv, "fi_recv")?;
        let outbox = Outbox::new(endpoint, av, config, info.tx_iov_limit())?;
        let out_of_range = || Error::Argument { what: "message endpoint: rx_depth is out of range".to_owned() };
        let size = message_size(config, outbox.address().len()).ok_or_else(out_of_range)?;
        let count = u32::try_from(config.rx_depth).map_err(|_| out_of_range())?;
        let mut this = Self {
            outbox,
            cq,
            recv,
            contexts: (0..count).map(|index| Context::new(Operation::Receive(index))).collect(),
            buffers: Pool::new(config.rx_depth, size)?,
            unposted: Vec::new(),
            polls: 0,
            clock: Instant::now(),
            connection_limit: None,
            provider: info.provider(),
        };
        this.connection_limit =
            ConnectionLimit::of(this.outbox.address(), config.ping_after.saturating_add(config.lost_after));
        Ok(this)
    }

    /// The provider that was found (`tcp`, `tcp;ofi_rxm`).
    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// The descriptor that becomes readable when a poll has work, if the provider has one. None also while the process has no descriptor
    /// left: a peer that cannot be accepted would keep it readable.
    pub fn wait_fd(&self) -> Option<RawFd> {
        self.cq.wait_fd().filter(|_| !self.connection_limit.as_ref().is_some_and(ConnectionLimit::has_no_descriptor))
    }

    /// Ignores later connects to this endpoint's TCP port; connected peers stay, and this endpoint can connect to others. True if the endpoint has
    /// such a port.
    pub fn close_port(&mut self) -> bool {
        self.connection_limit.as_mut().is_some_and(ConnectionLimit::close_port)
    }

    /// The next poll must offer something to libfabric again, which the descriptor does not announce.
    pub fn must_retry(&self) -> bool {
        !(self.unposted.is_empty() && self.outbox.blocked.is_empty())
    }

    /// True when no event is missed by a wait for the descriptor now. The descriptor does not announce events of calls other than a poll.
    pub fn may_wait(&self) -> bool {
        self.outbox.notices.is_empty() && self.cq.may_wait()
    }

    /// The sending half, as callbacks of [`MessageEndpoint::poll`] get it.
    pub fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }

    /// Posts all receives for the first time.
    fn start_receiving(mut self) -> Result<Self, Error> {
        self.unposted = (0..self.contexts.len() as u32).rev().collect();
        self.post_receives()?;
        Ok(self)
    }

    fn post_receives(&mut self) -> Result<(), Error> {
        while let Some(&index) = self.unposted.last() {
            let buffer = self.buffers.buffer(index as usize).cast();
            let context = self.contexts[index as usize].as_ptr();
            let endpoint = self.outbox.endpoint.as_ptr();
            // SAFETY: the endpoint is open; this endpoint owns buffer and context, no operation uses them, and they live until the close.
            let code = unsafe {
                (self.recv)(endpoint, buffer, self.buffers.size(), ptr::null_mut(), bindings::FI_ADDR_UNSPEC, context)
            };
            if !self.outbox.accepted("fi_recv", code)? {
                break;
            }
            self.unposted.pop();
        }
        Ok(())
    }

    /// Makes progress and reports events; returns their number. Does not block, and must be called often (see the [module](super)). The
    /// callback may send through the outbox that it gets.
    ///
    /// # Errors
    /// Failures of the endpoint as a whole. A peer's failures are events.
    pub fn poll(&mut self, on_event: impl FnMut(&mut Outbox, Event<'_>)) -> Result<usize, Error> {
        self.poll_admitting(on_event, |_, _| {})
    }

    /// [`MessageEndpoint::poll`], which gives the messages of endpoints that were not admitted to `on_unadmitted`. If that admits the
    /// sender, the message goes to `on_event` too.
    ///
    /// # Errors
    /// As [`MessageEndpoint::poll`].
    pub fn poll_admitting(
        &mut self,
        mut on_event: impl FnMut(&mut Outbox, Event<'_>),
        mut on_unadmitted: impl FnMut(&mut Outbox, Unadmitted<'_>),
    ) -> Result<usize, Error> {
        let mut events = 0;
        let mut idle = true;
        for _ in 0..BATCHES {
            let mut batch = [Completion::EMPTY; BATCH];
            let taken = match self.cq.read(&mut batch)? {
                Read::Entries(0) => break,
                Read::Entries(count) => count.min(BATCH),
                Read::Failure => {
                    self.take_failure()?;
                    0
                }
            };
            idle = false;
            for completion in &batch[..taken] {
                if completion.context.is_null() {
                    continue;
                }
                // SAFETY: this endpoint posted all operations of the queue, with contexts that live until the endpoint is closed.
                match unsafe { Context::note(completion.context) } {
                    Operation::Receive(index) => {
                        events += usize::from(self.receive(index, completion.len, &mut on_event, &mut on_unadmitted));
                        self.unposted.push(index);
                    }
                    other => self.outbox.complete(other, Ok(completion.len)),
                }
            }
            self.post_receives()?;
            events += self.report(&mut on_event);
            if taken < BATCH {
                break;
            }
        }
        if !self.unposted.is_empty() {
            self.post_receives()?;
        }
        self.outbox.retry();
        self.polls = self.polls.wrapping_add(1);
        if idle || self.polls.is_multiple_of(POLLS_PER_CLOCK) {
            let now = Instant::now();
            if let Some(connection_limit) = &mut self.connection_limit {
                connection_limit.enforce(now);
            }
            if now.duration_since(self.clock) >= self.outbox.timer_interval() {
                self.clock = now;
                self.outbox.timers(now);
            }
        }
        Ok(events + self.report(&mut on_event))
    }

    /// Handles a received message; true when it is an event.
    fn receive(
        &mut self,
        index: u32,
        len: usize,
        on_event: &mut impl FnMut(&mut Outbox, Event<'_>),
        on_unadmitted: &mut impl FnMut(&mut Outbox, Unadmitted<'_>),
    ) -> bool {
        // SAFETY: the receive has completed, and the buffer is posted again only after this function.
        let message = unsafe { self.buffers.bytes(index as usize, len) };
        let frame = match Frame::parse(message) {
            Ok(frame) => frame,
            Err(error) => {
                // At no higher level: any process that reaches the port can send as many as it likes.
                log::debug!("a message was dropped: {error}");
                return false;
            }
        };
        let mut from = self.outbox.sender(&frame);
        if from.is_none() && self.outbox.is_unadmitted(&frame) {
            let Frame { name: address, from: number, header, payload, .. } = frame;
            on_unadmitted(&mut self.outbox, Unadmitted { address, number, header, payload });
            from = self.outbox.sender(&frame);
        }
        let Some(from) = from else { return false };
        match frame.kind {
            Kind::Data => {
                on_event(&mut self.outbox, Event::Message { from, header: frame.header, payload: frame.payload });
                true
            }
            Kind::Control(flags) => {
                self.outbox.control(from, flags);
                false
            }
        }
    }

    fn take_failure(&mut self) -> Result<(), Error> {
        let Some(failure) = self.cq.read_error()? else { return Ok(()) };
        if failure.context.is_null() {
            log::debug!("a failed completion without an operation: {}", failure.into_error("fi_cq_read"));
            return Ok(());
        }
        // SAFETY: this endpoint posted all operations of the queue, with contexts that live until the endpoint is closed.
        match unsafe { Context::note(failure.context) } {
            Operation::Receive(index) => {
                // The message was longer than the buffer, or was cut off with its connection.
                log::debug!("a receive failed: {}", failure.into_error("fi_recv"));
                self.unposted.push(index);
            }
            other @ Operation::ReceiveLong(_) => self.outbox.complete(other, Err(failure.into_error("fi_trecv"))),
            other => self.outbox.complete(other, Err(failure.into_error("fi_sendv"))),
        }
        Ok(())
    }

    fn report(&mut self, on_event: &mut impl FnMut(&mut Outbox, Event<'_>)) -> usize {
        let mut reported = 0;
        while let Some(event) = self.outbox.notices.pop_front() {
            on_event(&mut self.outbox, event);
            reported += 1;
        }
        reported
    }

    /// Sends everything, announces the close to the peers, and waits until they confirm, at most for `limit`. Events meanwhile are
    /// reported as in [`MessageEndpoint::poll`]. True when all peers confirmed; drop the endpoint afterwards.
    ///
    /// # Errors
    /// As [`MessageEndpoint::poll`].
    pub fn shutdown(
        &mut self,
        limit: Duration,
        mut on_event: impl FnMut(&mut Outbox, Event<'_>),
    ) -> Result<bool, Error> {
        let start = Instant::now();
        let mut announced = false;
        loop {
            self.poll(&mut on_event)?;
            if !self.outbox.busy() {
                if announced {
                    return Ok(true);
                }
                self.outbox.send_closing();
                announced = true;
            } else if start.elapsed() >= limit {
                return Ok(false);
            } else {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for MessageEndpoint {
    /// libfabric's tcp closes a connection without a message only while the endpoint is open: its descriptor would stay open for ever.
    fn drop(&mut self) {
        self.close_port();
        let start = Instant::now();
        while self.connection_limit.as_mut().is_some_and(|limit| limit.end_silent() > 0)
            && start.elapsed() < CLOSE_LIMIT
        {
            for _ in 0..BACKLOG_POLLS {
                if matches!(self.cq.read(&mut [Completion::EMPTY; BATCH]), Ok(Read::Failure)) {
                    let _ = self.cq.read_error();
                }
            }
        }
    }
}

/// An endpoint has the methods of its sending half.
impl Deref for MessageEndpoint {
    type Target = Outbox;

    fn deref(&self) -> &Outbox {
        &self.outbox
    }
}

impl DerefMut for MessageEndpoint {
    fn deref_mut(&mut self) -> &mut Outbox {
        &mut self.outbox
    }
}
