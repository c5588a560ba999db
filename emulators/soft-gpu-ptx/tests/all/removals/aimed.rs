//! The steps of workloads aimed at orderings that the usual ones rarely need: few kinds of operations, close together.

use super::work::Word::{Arrived, Context, Data, Done, Out, Request, ResetAt, Value, Window};
use super::work::{END, Expect, Kind, LOAD, MANY, POSTS, STORE, Step, Word, Work, function};
use crate::native::{NRANKS, STRONG};
use ferrogin_ffi::ext::POLICY_LOCKED;
use ferrogin_test_support::Random;

/// No action, the counter, and the two signals, as actions of a put: each has its own endpoint.
const NAMES: [u64; 4] = [0, 1 << 16, 1 | 1 << 32, 2 | 1 << 32];
const COUNTER: u64 = NAMES[1];

/// One thread's steps while they are being built.
struct Steps<'a> {
    thread: u64,
    /// The first post without a flush after it.
    flushed: u64,
    /// What a call returns.
    ends: Expect,
    random: &'a mut Random,
    list: Vec<Step>,
}

impl Steps<'_> {
    fn call(&mut self, name: &str, list: Vec<Word>) {
        self.list.push((function(name), list, self.ends));
    }

    fn load(&mut self, word: Word, expect: Expect) {
        self.list.push((LOAD, vec![word], expect));
    }

    /// Puts 8 bytes, `times` times.
    fn put(&mut self, work: &mut Work, number: u64, action: u64, aggregates: bool, times: u32) {
        let (to, offset) = (Value(u64::from(self.random.below(NRANKS))), Value(number * 8));
        let flags = Value(if aggregates { 2 } else { 0 });
        let list = vec![Context, to, Window, offset, Window, offset, Value(8), Value(action), flags];
        self.list.push((STORE, vec![Data(number), Value(0x1111_0000 + number)], Expect::Any));
        for _ in 0..times {
            self.call("fgin_put", list.clone());
        }
        work.posts.push((function("fgin_put"), list));
    }

    /// Flushes, directly or through a request, after the post of this number.
    fn flush(&mut self, number: u64, by_request: bool, tests: u32) {
        let request = Request(self.thread);
        if by_request {
            self.call("fgin_flush_async", vec![Context, request]);
            for _ in 0..tests {
                self.call("fgin_test_request", vec![Context, request, Out(self.thread)]);
            }
            self.call("fgin_wait_request", vec![Context, request]);
        } else {
            self.call("fgin_flush", vec![Context]);
        }
        if matches!(self.ends, Expect::Equal(0)) {
            (self.flushed..=number).for_each(|done| self.load(Done(done), Expect::Equal(1)));
        }
        self.flushed = number + 1;
    }

    fn leaving(&mut self, work: &mut Work, number: u64) {
        let action = if self.random.one_in(8) { self.random.of(&NAMES) } else { NAMES[self.thread as usize] };
        self.put(work, number, action, false, 1);
        if self.random.one_in(3) {
            // Meanwhile another thread's flush may end and remove the endpoint.
            (0..self.random.below(80)).for_each(|_| self.load(Done(number), Expect::Any));
        }
        for _ in 0..1 + self.random.below(3) {
            let by_request = self.random.one_in(2);
            self.flush(number, by_request, 0);
        }
        if self.thread % 2 == 1 {
            (0..self.random.below(8)).for_each(|_| self.call("fgin_ring", vec![Context]));
        }
    }

    fn locking(&mut self, work: &mut Work, number: u64, posted: u64) {
        let aggregates = !self.random.one_in(4);
        self.put(work, number, COUNTER, aggregates, 1);
        for _ in 0..1 + self.random.below(3) {
            match self.random.below(8) {
                0 => self.call("fgin_ring", vec![Context]),
                1 => self.call("fgin_ring_waiting", vec![Context]),
                2..=4 => {
                    let least = Value(posted.min(POSTS as u64));
                    self.call("fgin_wait_counter", vec![Context, Value(0), least]);
                }
                kind => {
                    let tests = self.random.below(3);
                    self.flush(number, kind != 5, tests);
                }
            }
        }
    }

    fn flushing(&mut self, work: &mut Work, number: u64) {
        self.put(work, number, 0, false, 1);
        for _ in 0..1 + self.random.below(3) {
            let by_request = self.random.one_in(4);
            self.flush(number, by_request, 0);
        }
    }

    /// Makes puts that raise one signal after another, and flushes through a request once most endpoints have had one.
    fn many(&mut self, work: &mut Work, number: u64, posted: u64) {
        self.put(work, number, (posted % u64::from(MANY) + 1) | (1 << 32), false, 1);
        if posted >= 16 && self.random.one_in(2) {
            let tests = self.random.below(3);
            self.flush(number, true, tests);
        }
    }

    fn aborted(&mut self, work: &mut Work, number: u64) {
        let (action, aggregates) = (self.random.of(&[0, NAMES[2]]), !self.random.one_in(4));
        self.put(work, number, action, aggregates, 4);
        if !self.random.one_in(3) {
            let by_request = self.random.one_in(2);
            self.flush(number, by_request, 0);
        }
    }

    fn newest(&mut self, work: &mut Work, number: u64) {
        self.put(work, number, 0, false, 1);
        if self.random.one_in(2) {
            let by_request = !self.random.one_in(4);
            self.flush(number, by_request, 0);
        }
    }

    /// Makes a put or signal, or its fast path, or one in block or warp mode. A thread that has looked for requests to
    /// ring has read the cursors, so it may read them early in its next turn if it reads few other words first, as a
    /// signal does.
    fn ringing(&mut self, work: &mut Work, number: u64) {
        if self.random.one_in(2) {
            self.call("fgin_ring", vec![Context]);
        }
        let (in_block, in_warp) = (work.kind == Kind::RingingBlock, work.kind == Kind::RingingWarp);
        let is_locked = work.policy == POLICY_LOCKED;
        let fast = !in_block && !in_warp && self.random.one_in(2);
        let aggregates = is_locked && self.random.one_in(4);
        let flags = Value(if in_block { 0x100 } else { 0 } | if aggregates { 2 } else { 0 });
        if !in_warp && self.random.one_in(if is_locked { 4 } else { 2 }) {
            self.put(work, number, 0, false, 1);
            if let Some((kind, list, _)) = self.list.last_mut() {
                list[8] = flags;
                if fast {
                    *kind = function("fgin_fast_put");
                    list.truncate(7);
                    list.extend([Value(0), Value(0), Value(0), Value(0), flags]);
                }
            }
        } else {
            let to = Value(u64::from(self.random.below(NRANKS)));
            let list = vec![Context, to, Value(NAMES[2]), flags];
            if fast {
                self.call("fgin_fast_signal", vec![Context, to, Value(1), Value(0), flags]);
            } else if in_warp {
                let lanes = Value((1 << work.shape.1) - 1);
                self.call("fgin_warp_signal", [&[Context, lanes], &list[1..]].concat());
            } else {
                self.call("fgin_signal", list.clone());
            }
            work.posts.push((function("fgin_signal"), list));
        }
    }

    /// Makes a put, or a signal with or without a put, to a word that no other post names; then waits for or reads this
    /// rank's signals.
    fn emulated(&mut self, work: &mut Work, number: u64, posted: u64) {
        let to = Value(u64::from(self.random.below(NRANKS)));
        let (offset, value) = (Value(number * 8), Value(0x1111_0000 + number));
        let strong = if self.random.one_in(2) { STRONG } else { 0 };
        let flags = Value(strong | if self.random.one_in(4) { 2 } else { 0 });
        let amount = Value(self.random.of(&[1, 5000, u64::MAX]));
        self.list.push((STORE, vec![Data(number), value], Expect::Any));
        let (name, list) = match self.random.below(5) {
            0 => {
                let action = Value(self.random.of(&[0, 1 | 1 << 32, 2 | 3 << 32]));
                ("fgin_put", vec![Context, to, Window, offset, Window, offset, Value(8), action, flags])
            }
            1 => ("fgin_signal_at", vec![Context, to, Window, offset, amount, flags]),
            2 => {
                let list = vec![Context, to, Window, offset, value, Value(8), Window, offset, amount, flags];
                ("fgin_put_value_signal_at", list)
            }
            _ => {
                let put = [Context, to, Window, offset, Window, offset, Value(8)];
                ("fgin_put_signal_at", [&put[..], &[Window, offset, amount, Value(0), flags]].concat())
            }
        };
        self.call(name, list.clone());
        work.posts.push((function(name), list));
        let least = posted.min(POSTS as u64);
        match self.random.below(4) {
            0 => {
                let by_request = self.random.one_in(2);
                self.flush(number, by_request, 0);
            }
            1 => {
                self.load(Arrived(0), Expect::Any);
                self.call("fgin_wait_signal", vec![Context, Value(0), Value(least)]);
                self.load(Arrived(0), Expect::AtLeast(least));
            }
            2 => {
                self.load(Arrived(0), Expect::Any);
                self.call("fgin_read_signal", vec![Context, Value(0), Out(self.thread)]);
                self.load(Out(self.thread), Expect::Any);
                self.load(Arrived(0), Expect::AtLeastBefore);
            }
            _ => {}
        }
    }

    fn counting(&mut self, work: &mut Work, number: u64, posted: u64) {
        let action = self.random.of(&NAMES);
        self.put(work, number, action, false, 1);
        for _ in 0..3 {
            let (at, name) = self.random.of(&[(0, "signal"), (1, "counter")]);
            self.load(Arrived(at), Expect::Any);
            match self.random.below(3) {
                0 => {
                    let least = posted.min(POSTS as u64);
                    self.call(&format!("fgin_wait_{name}"), vec![Context, Value(0), Value(least)]);
                    self.load(Arrived(at), Expect::AtLeast(least));
                }
                1 if self.thread == 0 => {
                    self.call("fgin_reset_signal", vec![Context, Value(1)]);
                    self.load(ResetAt, Expect::Any);
                    self.load(Arrived(0), Expect::AtLeastBefore);
                }
                _ => {
                    self.call(&format!("fgin_read_{name}"), vec![Context, Value(0), Out(self.thread)]);
                    self.load(Out(self.thread), Expect::Any);
                    self.load(Arrived(at), Expect::AtLeastBefore);
                }
            }
        }
    }
}

impl Work {
    /// Returns the steps of a thread in an aimed workload.
    pub fn aimed_thread(&mut self, random: &mut Random, thread: u64, posts: u64) -> Vec<Step> {
        let first = thread * posts;
        let ends = if self.kind == Kind::Aborted { Expect::Ends } else { Expect::Equal(0) };
        let mut steps = Steps { thread, flushed: first, ends, random, list: Vec::new() };
        for number in first..first + posts {
            let posted = number + 1 - first;
            match self.kind {
                Kind::Locking => steps.locking(self, number, posted),
                Kind::Flushing => steps.flushing(self, number),
                Kind::Aborted => steps.aborted(self, number),
                Kind::Newest => steps.newest(self, number),
                Kind::Ringing | Kind::RingingBlock | Kind::RingingWarp => steps.ringing(self, number),
                Kind::Counting => steps.counting(self, number, posted),
                Kind::Many => steps.many(self, number, posted),
                Kind::Emulated => steps.emulated(self, number, posted),
                _ => steps.leaving(self, number),
            }
        }
        steps.call("fgin_flush", vec![Context]);
        steps.list.push((END, Vec::new(), Expect::Any));
        steps.list
    }
}
