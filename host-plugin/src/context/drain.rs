//! The last requests of contexts that are being destroyed.
//!
//! Destroying a queue pair discards the requests that its card hasn't delivered, and a peer's kernel may be waiting for
//! one of their signals. So a context first rings what its kernels have deferred, and waits until its cards have
//! completed all requests.

use super::Context;
use crate::endpoint::{Endpoint, Start};
use crate::silence::Silence;
use crate::watcher::Undelivered;
use crate::{registry, signal_proxy};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time without a completion that ends the wait: longer than the 5 s after which a card reports that a peer is silent.
const LIMIT: Duration = Duration::from_secs(10);
/// Time between two checks: at first, and the longest. It doubles each time.
const PAUSE: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

/// Delivers what kernels have posted on these contexts, and what peers have signalled to them. Kernels no longer use
/// the contexts, which stay open; their handles must still be valid, because NCCL may ask for errors meanwhile. Returns
/// at once for contexts that have been drained before.
///
/// An endpoint that fails isn't waited for, nor is a context that had failed before. What remains undelivered is in a
/// WARN line.
pub fn drain(contexts: &[&Context]) {
    // A fork must not ring its parent's doorbells.
    if registry::forked_from().is_some() {
        return;
    }
    let contexts: Vec<_> =
        contexts.iter().filter(|context| !context.drained.swap(true, Ordering::AcqRel)).copied().collect();
    let mut queues: Vec<_> = contexts.iter().map(|context| context.unfinished()).collect();
    let (mut silence, mut pause) = (Silence::new(Instant::now(), LIMIT), PAUSE[0]);
    while queues.iter().flatten().any(|queue| queue.requests != 0 && !queue.failed) {
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSE[1]);
        let completions: u32 = queues.iter_mut().flatten().map(Queue::check).sum();
        if silence.is_over(completions != 0, Instant::now()) {
            break;
        }
    }
    if contexts.iter().any(|context| context.inboxes.is_some()) {
        signal_proxy::catch_up();
    }
    for (context, queues) in contexts.iter().zip(&queues) {
        let undelivered =
            |queue: &Queue<'_>| Undelivered { endpoint: queue.index, posted: queue.posted, requests: queue.requests };
        if let Some(watch) = &*context.watch.lock() {
            watch.report_undelivered(&queues.iter().map(undelivered).collect::<Vec<_>>());
        }
    }
}

impl Context {
    /// Rings what is deferred, and returns the endpoints with incomplete requests.
    fn unfinished(&self) -> Vec<Queue<'_>> {
        let Some(block) = self.block.as_ref().filter(|_| !self.stop.is_raised()) else { return Vec::new() };
        if let Some(watch) = &*self.watch.lock() {
            watch.hold();
        }
        let endpoints = self.contexts.iter().flat_map(|one| &one.endpoints);
        let places = self.cursors.iter().flatten().zip(self.starts.iter().flatten());
        let queues = endpoints.zip(places).enumerate().filter_map(|(index, (endpoint, (cursors, start)))| {
            // If the GPU's driver fails, nobody can tell what was posted.
            let posts = super::posts(&**block, *cursors).ok()?;
            let posted = posts.written();
            if posted != posts.rung {
                endpoint.ring(posted);
            }
            let mut queue = Queue { context: self, endpoint, index, start: *start, posted, requests: 0, failed: false };
            queue.check();
            (queue.requests != 0).then_some(queue)
        });
        queues.collect()
    }
}

/// An endpoint with incomplete requests.
struct Queue<'a> {
    context: &'a Context,
    endpoint: &'a Endpoint,
    /// Its number among the endpoints of all contexts.
    index: usize,
    start: Start,
    /// The number of requests that have been posted.
    posted: u32,
    /// How many are incomplete.
    requests: u32,
    failed: bool,
}

impl Queue<'_> {
    /// Reads the counters. Returns the number of requests that have ended since the last check.
    fn check(&mut self) -> u32 {
        let (memory, before) = (&*self.context.memory.card, self.requests);
        let isolates = self.context.isolation.is_some();
        self.failed |= !isolates && self.endpoint.has_failed(memory, self.start);
        let ended = self.endpoint.ended(memory, self.start, isolates);
        self.requests = ended.map_or(0, |ended| incomplete(self.posted, ended, self.endpoint.sq.num_entries));
        before.saturating_sub(self.requests)
    }
}

/// Returns how many of `posted` requests are incomplete. Kernels can write the number, so it may be wrong: a ring of
/// `slots` holds no more.
fn incomplete(posted: u32, completed: u32, slots: u32) -> u32 {
    // Both wrap at 2^31.
    let incomplete = posted.wrapping_sub(completed) & (u32::MAX >> 1);
    if incomplete <= slots { incomplete } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_numbers_of_requests_count_as_none() {
        assert_eq!(incomplete(7, 5, 64), 2);
        assert_eq!(incomplete(1, 0x7fff_ffff, 64), 2, "wrapped");
        assert_eq!((incomplete(69, 5, 64), incomplete(70, 5, 64)), (64, 0));
        assert_eq!(incomplete(0, 5, 64), 0, "requests that bypassed the cursors");
    }
}
