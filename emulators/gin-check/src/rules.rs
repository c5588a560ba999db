//! What has to be ordered, by the rules of docs/semantics.md: each of these is named where it's checked.

use crate::clock::Key;
use crate::event::{Call, FENCED, Look, Operation, STRONG, WRITES};
use crate::pass::Pass;
use crate::report::{Access, Kind, Report, merge};
use crate::run::{Range, Run, What};
use std::collections::{BTreeSet, HashMap};

/// The reports so far.
#[derive(Default)]
pub(crate) struct Rules {
    reports: Vec<Report>,
    /// The requests that raise a signal at which somebody looks.
    seen: BTreeSet<usize>,
    /// The looks of a launch's thread at a signal, since its last call about the signal.
    looks: HashMap<(u32, Key, u64), Vec<(usize, Look)>>,
}

impl Rules {
    /// Checks what happened at a moment.
    pub fn check(&mut self, pass: &Pass<'_>, at: usize) {
        let moment = &pass.run.moments[at];
        if let Some(look) = pass.run.look(moment) {
            self.see(pass, at, &look);
            let looks = self.looks.entry((moment.launch, moment.key, look.address)).or_default();
            let earlier = if matches!(moment.what, What::Counted(..)) { std::mem::take(looks) } else { Vec::new() };
            looks.push((at, look));
            if look.call == Call::Wait {
                earlier.iter().for_each(|(before, earlier)| self.baseline(pass, (*before, earlier), (at, &look)));
            }
            return;
        }
        match moment.what {
            What::Access { flags, ref range, name, .. } if flags & FENCED == 0 => {
                self.access(pass, at, flags, range, name);
            }
            What::Post { .. } => pass.posted(at).iter().for_each(|request| self.request(pass, *request)),
            What::Closed(queue) => self.closed(pass, at, queue),
            _ => {}
        }
    }

    /// Returns all reports.
    pub fn finish(mut self, run: &Run) -> Vec<Report> {
        self.unrung(run);
        self.unseen(run);
        self.reports
    }

    fn report(&mut self, kind: Kind, sides: (Option<Access>, Option<Access>), memory: String, bytes: u64) {
        // What no kernel posted has no line.
        let (Some(first), second) = sides else { return };
        merge(&mut self.reports, vec![Report { kind, first, second, memory, bytes, count: 1 }]);
    }

    /// "What orders two accesses": a put's bytes and a read or write of them, in either order; a put and a store to
    /// its source, in either order.
    fn access(&mut self, pass: &Pass<'_>, at: usize, flags: u32, range: &Range, name: &'static str) {
        let writes = flags & WRITES != 0;
        let targets = pass.writing(range);
        let sources = if writes { pass.reading(range) } else { BTreeSet::new() };
        if targets.is_empty() && sources.is_empty() {
            return;
        }
        let facts = pass.facts(at);
        let all = targets.into_iter().map(|request| (request, true));
        for (request, is_target) in all.chain(sources.into_iter().map(|request| (request, false))) {
            let of = &pass.run.requests[request];
            // A value that is polled may come at any time.
            let polled = is_target && flags & (STRONG | WRITES) == STRONG && of.bytes <= 8;
            if polled || facts.has(request) || pass.before_post(at, request) {
                continue;
            }
            let kind = match (is_target, writes) {
                (false, _) => Kind::Source,
                (true, true) => Kind::Write,
                (true, false) if is_weak(pass, at, request) => Kind::Weak,
                (true, false) => Kind::Read,
            };
            let other = if is_target { of.target() } else { of.source() };
            let memory = pass.run.memory(range.process, range.address.max(other.address));
            let sides = (pass.run.request_side(request), Some(pass.run.side_of(at, name)));
            self.report(kind, sides, memory, other.common(range));
        }
    }

    /// "What orders two accesses": a request and another one, of which one writes bytes that the other writes or reads.
    fn request(&mut self, pass: &Pass<'_>, request: usize) {
        let (run, of) = (pass.run, &pass.run.requests[request]);
        let Some(known) = &pass.known[request] else { return };
        for (kind, range, others) in [
            (Kind::Write, of.target(), pass.writing(&of.target())),
            (Kind::Read, of.target(), pass.reading(&of.target())),
            (Kind::Read, of.source(), pass.writing(&of.source())),
        ] {
            for other in others.into_iter().filter(|other| *other != request) {
                // Both directions are checked at the later of the two.
                let Some(earlier) = &pass.known[other] else { continue };
                if !known.base.has(other) && !earlier.base.has(request) {
                    let sides = (run.request_side(other), run.request_side(request));
                    let theirs = &run.requests[other];
                    let bytes = theirs.target().common(&range).max(theirs.source().common(&range));
                    self.report(kind, sides, run.memory(range.process, range.address), bytes);
                }
            }
        }
    }

    /// "What orders two accesses": a signal's baseline or reset, and a raise that a wait of the same thread counts on.
    fn baseline(&mut self, pass: &Pass<'_>, (at, look): (usize, &Look), (wait, waited): (usize, &Look)) {
        let (run, moment) = (pass.run, &pass.run.moments[at]);
        if !matches!(look.call, Call::Reset | Call::Value) {
            return;
        }
        // A poll that has seen what the wait is for isn't what the wait counts from.
        if look.call == Call::Value && run.raises(&run.moments[wait], waited).1 <= run.raises(moment, look).1 {
            return;
        }
        let facts = pass.facts(at);
        let what = if look.call == Call::Reset { "reset of the signal" } else { "read of the signal's value" };
        for raise in run.raises(moment, look).0 {
            if !facts.has(raise.request) && !pass.before_post(at, raise.request) {
                let sides = (run.request_side(raise.request), Some(run.side_of(at, what)));
                self.report(Kind::Baseline, sides, String::new(), 8);
            }
        }
    }

    /// "Closing": a request is under way when its context is closed, or the peer's context that it names.
    fn closed(&mut self, pass: &Pass<'_>, at: usize, queue: usize) {
        let facts = pass.facts(at);
        for (request, of) in pass.run.requests.iter().enumerate() {
            if (of.queue == queue || of.peer_queue == Some(queue)) && !facts.has(request) {
                let sides = (pass.run.request_side(request), Some(pass.run.side_of(at, "close of a context")));
                self.report(Kind::Closed, sides, String::new(), of.bytes);
            }
        }
    }

    /// "Doorbells": requests whose doorbell nobody had rung when their kernel ended.
    fn unrung(&mut self, run: &Run) {
        let mut rings: HashMap<(usize, u64), Vec<(u64, u32)>> = HashMap::new();
        for moment in &run.moments {
            if let What::Doorbell { address, value } = moment.what {
                rings.entry((moment.process, address)).or_default().push((moment.time, value as u32));
            }
        }
        for (at, request) in run.requests.iter().enumerate() {
            let Some(launch) = run.post(at).and_then(|post| run.launches.get(post.launch as usize)) else { continue };
            let queue = &run.queues[request.queue];
            let rung = rings.get(&(request.process, queue.doorbell)).into_iter().flatten().any(|&(time, value)| {
                (queue.opened..=launch.ended).contains(&time)
                    && (value.wrapping_sub(request.index as u32 + 1) as i32) >= 0
            });
            if launch.ended < request.taken && !rung {
                self.report(Kind::Unrung, (run.request_side(at), None), String::new(), request.bytes);
            }
        }
    }

    /// Notes which requests raise a signal that somebody looks at.
    fn see(&mut self, pass: &Pass<'_>, at: usize, look: &Look) {
        let moment = &pass.run.moments[at];
        if pass.run.completions(moment.process, look.address, moment.time).next().is_some() {
            return;
        }
        // The last raises of a signal that frees a buffer need no wait.
        self.seen.extend(pass.run.raises(moment, look).0.iter().map(|raise| raise.request));
    }

    /// A note: signals of a context that was closed, for which nobody had waited.
    fn unseen(&mut self, run: &Run) {
        for &request in run.raising.difference(&self.seen.clone()) {
            let of = &run.requests[request];
            let closed = of.peer_queue.is_some_and(|queue| run.queues[queue].closed < u64::MAX);
            if closed {
                self.report(Kind::Unseen, (run.request_side(request), None), String::new(), 8);
            }
        }
    }
}

/// Whether a signal that was posted after the request, to the same peer, is known to have arrived ("Order").
fn is_weak(pass: &Pass<'_>, at: usize, request: usize) -> bool {
    let (run, of) = (pass.run, &pass.run.requests[request]);
    let (Some(post), facts) = (run.post(request), pass.facts(at)) else { return false };
    // Who waits for the wrong signal has another mistake.
    !run.raising.contains(&request)
        && run.requests.iter().enumerate().any(|(other, later)| {
            (later.process, later.peer) == (of.process, of.peer)
                && (later.bytes == 0 || later.operation == Operation::Send)
                && facts.has(other)
                && pass.known[other].as_ref().is_some_and(|known| known.covers(post))
        })
}
