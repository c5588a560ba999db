//! Doorbells and work requests: the card reads posted requests and checks them against the rules.

use std::fmt::Write;

use efa_dp_direct::wire::CompStatus;
use efa_dp_direct::wqe::Geometry;

use super::connection::SILENCE_US;
use super::core::Core;
use super::qp::{State, Token};
use super::reorder::Step;
use super::request::{self, Operation, Request, Violation};

/// The other cause of a slot or a doorbell out of order.
const OR_SHARED: &str = ", or several threads posted in a narrower sharing mode";

fn or_shared(violation: Violation) -> Violation {
    Violation { rule: violation.rule + OR_SHARED, ..violation }
}

const INTERNAL: CompStatus = CompStatus::LocalQpInternalError;

impl Core {
    /// Takes the requests rung on a queue, and returns the producer index that was rung.
    pub(crate) fn take_rung(&mut self, qpn: u16) -> u32 {
        let Some(qp) = self.qp(qpn) else { return 0 };
        let rung = qp.sq.rung_after(qp.taken);
        let (from, entries) = (qp.taken, qp.sq.entries);
        let advance = rung.wrapping_sub(from);
        if advance == 0 {
            return rung;
        }
        qp.taken = rung;
        if qp.state == State::Error {
            self.flush(qpn, from, advance);
            return rung;
        }
        let outstanding = qp.outstanding;
        if advance > i32::MAX as u32 {
            let rule = format!("the doorbell went backwards from {from} to {rung}{OR_SHARED}");
            self.fail_queue(qpn, from, 0, &rule);
        } else if outstanding + advance > entries {
            let rule = format!(
                "the doorbell went from {from} to {rung} while {outstanding} requests were outstanding: the ring has \
                 {entries} entries"
            );
            self.fail_queue(qpn, from, advance, &rule);
        } else {
            for n in 0..advance {
                let index = from.wrapping_add(n);
                if self.dies() {
                    if let Some(qp) = self.qp(qpn) {
                        qp.taken = index;
                    }
                    return index;
                }
                self.take_request(qpn, index);
            }
            self.check_batch(qpn, rung);
        }
        rung
    }

    /// Whether the card stops before the next request (fault `die_after`).
    fn dies(&mut self) -> bool {
        let after = self.config.faults.die_after;
        if self.dead_since.is_none() && after != 0 && self.requests >= after {
            self.dead_since = Some(self.clock_us);
            self.log(format_args!("the card stops answering after {after} requests (SOFTEFA_FAULTS=die_after)"));
        }
        self.dead_since.is_some()
    }

    /// Plays the driver's part once the card has stopped responding: fails all requests after [`SILENCE_US`], and later
    /// ones at once.
    pub(crate) fn poll_dead(&mut self, since: u64) -> bool {
        if self.clock_us.saturating_sub(since) < SILENCE_US {
            return false;
        }
        for i in 0..self.active.len() {
            let qpn = self.active[i].qpn;
            let Some(qp) = self.qp(qpn).filter(|qp| qp.state == State::Ready) else { continue };
            let (from, rung) = (qp.taken, qp.sq.rung_after(qp.taken));
            qp.taken = rung;
            for token in qp.tokens(|_| true) {
                self.retire(token, INTERNAL.raw());
            }
            match rung.wrapping_sub(from) {
                0 => self.set_error(qpn),
                advance => self.fail_queue(qpn, from, advance, "the card stopped responding"),
            }
        }
        self.poll_doorbells()
    }

    /// Checks every queue for too many requests that are written but not rung.
    pub(crate) fn check_batches(&mut self) {
        for i in 0..self.active.len() {
            self.check_batch(self.active[i].qpn, self.active[i].seen);
        }
    }

    /// Checks that at most `max_batch` requests are written beyond the doorbell.
    ///
    /// The card rereads the doorbell after the slot: if the doorbell moved meanwhile, the slot was rung in time.
    fn check_batch(&mut self, qpn: u16, rung: u32) {
        let Some(qp) = self.qp(qpn) else { return };
        let index = rung.wrapping_add(qp.max_batch);
        if qp.max_batch >= qp.sq.entries || qp.state == State::Error {
            return;
        }
        let mut bytes = [0; 128];
        qp.sq.fetch(index, &mut bytes);
        let meta = request::meta_of(&bytes);
        let written = meta.ctrl1.meta_desc() && u8::from(meta.ctrl2.phase()) == qp.sq.phase_of(index);
        if written && qp.sq.rung_after(rung) == rung {
            let rule =
                format!("more than max_batch ({}) requests were written without ringing the doorbell", qp.max_batch);
            self.fail_queue(qpn, index, 0, &rule);
        }
    }

    fn take_request(&mut self, qpn: u16, index: u32) {
        self.requests += 1;
        let Some(qp) = self.qp(qpn) else { return };
        if qp.state == State::Error {
            self.flush(qpn, index, 1);
            return;
        }
        let mut bytes = [0; 128];
        qp.sq.fetch(index, &mut bytes);
        let (meta, wide) = (request::meta_of(&bytes), qp.is_wide());
        let phase = qp.sq.phase_of(index);
        self.trace_request(qpn, index, &bytes);
        let request = if u8::from(meta.ctrl2.phase()) == phase {
            let request_ids = self.config.faults.request_ids();
            let geometry = Geometry { request_ids, ..if wide { Geometry::WIDE } else { Geometry::NARROW } };
            let decoded = request::decode(&bytes, &geometry);
            let decoded = if meta.ctrl1.meta_desc() { decoded } else { decoded.map_err(or_shared) };
            decoded.and_then(|r| self.check_local(qpn, r))
        } else {
            Err(or_shared(Violation::malformed(
                "the phase bit is not this lap's: the doorbell was rung before the slot was written",
            )))
        };
        match request {
            Err(violation) => {
                self.report(qpn, index, &violation.rule, &bytes[..if wide { 128 } else { 64 }]);
                if violation.fatal {
                    self.set_error(qpn);
                }
                self.complete_rejected(qpn, index, &meta, violation.status);
            }
            Ok(request) => self.start(qpn, index, request),
        }
    }

    /// Checks the rules that need the card's tables.
    fn check_local(&mut self, qpn: u16, request: Request) -> Result<Request, Violation> {
        let Some(pd) = self.qp(qpn).map(|qp| qp.pd) else {
            return Err(Violation::refused("the queue pair was closed", CompStatus::Flushed));
        };
        let handle = self.handles.get(u32::from(request.meta.ah)).filter(|_| request.meta.ah != 0);
        let rule = match handle {
            None => Some("no address handle has this number"),
            Some(handle) if handle.pd != pd => Some("the address handle belongs to another protection domain"),
            Some(_) => None,
        };
        if let Some(rule) = rule {
            return Err(Violation::refused(rule, CompStatus::LocalInvalidAh));
        }
        let write = request.operation == Operation::Read;
        for sge in request.buffers().iter().filter(|sge| sge.length > 0) {
            self.regions
                .local(pd, sge.lkey, sge.addr, sge.length, write)
                .map_err(|error| Violation::refused(format!("local buffer: {error}"), CompStatus::LocalInvalidLkey))?;
        }
        Ok(request)
    }

    fn start(&mut self, qpn: u16, index: u32, request: Request) {
        let faults = &self.config.faults;
        let is_nth = faults.error_every != 0 && self.requests.is_multiple_of(faults.error_every);
        let fails = is_nth && faults.error_id.is_none_or(|id| id == request.meta.req_id);
        let status = faults.error_status;
        let now = self.now();
        let Some(qp) = self.qp(qpn) else { return };
        qp.outstanding += 1;
        let token = qp.admit(request, index);
        self.check_taken(token);
        if fails {
            self.report_of(token, &format!("fails by error_every with status {status}"));
            self.finish(token, status);
        } else if let Some(buffer) = &mut self.reorder_buffer {
            buffer.push(token, Step::Send, now);
        } else {
            self.send(token);
        }
    }

    pub(crate) fn set_error(&mut self, qpn: u16) {
        if let Some(qp) = self.qp(qpn) {
            qp.state = State::Error;
        }
        self.flush_receives(qpn);
    }

    /// Handles a violation by the queue itself: the first request completes in error, and the others are flushed.
    fn fail_queue(&mut self, qpn: u16, index: u32, advance: u32, rule: &str) {
        let Some(qp) = self.qp(qpn) else { return };
        let mut bytes = [0; 128];
        qp.sq.fetch(index, &mut bytes);
        let wide = qp.is_wide();
        let meta = request::meta_of(&bytes);
        self.trace_request(qpn, index, &bytes);
        self.report(qpn, index, rule, &bytes[..if wide { 128 } else { 64 }]);
        self.set_error(qpn);
        self.complete_rejected(qpn, index, &meta, INTERNAL);
        if advance > 1 {
            self.flush(qpn, index.wrapping_add(1), advance - 1);
        }
    }

    /// Flushes requests that were rung on a queue pair in error.
    fn flush(&mut self, qpn: u16, from: u32, advance: u32) {
        let Some(entries) = self.qp(qpn).map(|qp| qp.sq.entries) else { return };
        for n in 0..advance.min(entries) {
            let (mut bytes, index) = ([0; 128], from.wrapping_add(n));
            let Some(qp) = self.qp(qpn) else { return };
            qp.sq.fetch(index, &mut bytes);
            let meta = request::meta_of(&bytes);
            self.trace_request(qpn, index, &bytes);
            self.complete_rejected(qpn, index, &meta, CompStatus::Flushed);
        }
    }

    /// Logs that the peer refused a request.
    pub(crate) fn report_refusal(&mut self, token: Token, status: u8) {
        match CompStatus::from_raw(status) {
            // Software that limits the card's retries, like libfabric's `efa`, resends the request itself.
            Some(CompStatus::RemoteRnr) => {}
            Some(status) => self.report_of(token, &format!("refused by the other side: {status}")),
            None => self.report_of(token, &format!("refused by the other side with the unknown status {status}")),
        }
    }

    /// Logs a line about an outstanding request. Software must not reuse the slot before the completion, so the slot
    /// still holds its bytes.
    fn report_of(&mut self, token: Token, rule: &str) {
        let Some(index) = self.outstanding(token).map(|entry| entry.index) else { return };
        let Some(qp) = self.qp(token.qpn()) else { return };
        let mut bytes = [0; 128];
        qp.sq.fetch(index, &mut bytes);
        let len = if qp.is_wide() { 128 } else { 64 };
        self.report(token.qpn(), index, rule, &bytes[..len]);
    }

    /// Logs one line with the queue pair, slot, rule and bytes.
    fn report(&mut self, qpn: u16, index: u32, rule: &str, bytes: &[u8]) {
        let slot = self.qp(qpn).map_or(0, |qp| qp.sq.slot_of(index));
        let mut hex = String::with_capacity(2 * bytes.len());
        for byte in bytes {
            let _ = write!(hex, "{byte:02x}");
        }
        self.log_of(qpn, rule, format_args!("QP {qpn} slot {slot}: {rule}; request {index}: {hex}"));
    }
}
