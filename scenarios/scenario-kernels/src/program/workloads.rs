//! Programs whose signals are words in memory (FERROGIN_SIGNALS=emulated): the patterns of NCCL's barriers, DeepEP and
//! nccl_ep.
//!
//! Each checks all bytes and counts against a reference computed from the round, the ranks and the token. Ranks also
//! send to themselves. With [`Spoil`], a program makes a deliberate mistake, to show that the checks find it.

use super::{Failure, Run, Step, pattern_word, value};
use crate::api;
use crate::plan::{GUARD, INBOX, LANE, OUTBOX, Plan, Spoil, Verdict};
use core::sync::atomic::Ordering;
use ferrogin_device::{Action, Flags, Span};

/// Contexts that the workloads need: one for barriers, and one per channel.
pub const CONTEXTS: u32 = 1 + CHANNELS;
/// Most ranks in a workload.
pub const MAX_RANKS: u32 = 8;

/// Signals that the workloads need in each context.
pub const fn signals(nranks: u32) -> u32 {
    let indexed = (EXPERTS + 1) * nranks;
    if indexed < SIGNALS { SIGNALS } else { indexed }
}

/// Bytes per block of [`Run::exchange`].
const BLOCK: u64 = 512;
/// Bytes per token in DeepEP's patterns; the first word is a header.
const TOKEN: u64 = 128;
/// Most tokens in a channel to one rank.
const MAX: u64 = 15;
/// Tokens between two signals of a channel.
const INTERVAL: u64 = 6;
/// Channels of [`Run::deep_ep`], each with its own context.
const CHANNELS: u32 = 16;
/// Channels of [`Run::deep_ep_indexed`], each with its own context.
const INDEXED_CHANNELS: u32 = 11;
/// Signals per context of [`Run::deep_ep_indexed`]: each rank's tokens, each rank's token counts, and the ranks that
/// have taken theirs.
const SIGNALS: u32 = 21;
const NUMBERS: u32 = MAX_RANKS;
const TAKEN: u32 = SIGNALS - 1;
/// Experts of [`Run::nccl_ep`], each with a signal per rank.
const EXPERTS: u32 = 6;
/// Most words that an expert gets from one rank; more than an immediate can hold.
const MAX_WORDS: u64 = 4500;
/// Words per put of [`Run::nccl_ep`].
const PIECE: u64 = 2000;

/// The round in which a fault spoils a signal or a reset. In [`Run::exchange`], its puts have signals.
const SPOILT: u32 = 1;

/// Offsets in a rank's inbox of the replies, after the tokens, and the words.
const REPLIES: u64 = CHANNELS as u64 * MAX * TOKEN;
const WORDS: u64 = 2 * REPLIES;
/// Offset in the outbox, after all sources, of the words that a rank's threads share.
const SHARED: u64 = OUTBOX - LANE;
/// Number of the first shared word that records what a thread has seen.
const SEEN: u32 = 512;

const _: () = {
    let (ranks, experts) = (MAX_RANKS as u64, EXPERTS as u64);
    assert!(WORDS + 16 * CHANNELS as u64 <= INBOX - GUARD && experts * MAX_WORDS * 8 <= INBOX - GUARD);
    assert!(ranks * WORDS <= SHARED && experts * ranks * MAX_WORDS * 8 <= SHARED);
    assert!(INBOX / LANE + CHANNELS as u64 <= SEEN as u64 && ((SEEN + CHANNELS * MAX_RANKS) as u64) < LANE / 8);
};

/// Identifies a token: its place among the others, and its number in the reference.
#[derive(Clone, Copy)]
struct Token {
    from: u32,
    to: u32,
    channel: u32,
    index: u64,
    is_reply: bool,
}

impl Token {
    fn number(self) -> u32 {
        u32::from(self.is_reply) << 15 | self.channel << 10 | self.to << 7 | self.index as u32
    }

    /// Offset in the inbox for its sender.
    fn place(self) -> u64 {
        (if self.is_reply { REPLIES } else { 0 }) + (u64::from(self.channel) * MAX + self.index) * TOKEN
    }

    fn reply(self) -> Token {
        Token { from: self.to, to: self.from, is_reply: true, ..self }
    }
}

/// Packs a number of tokens, and whether it is final, into one word.
fn packed(tail: u64, is_finished: bool) -> u64 {
    tail << 32 | u64::from(is_finished)
}

/// The number of tokens in a channel in a round.
fn tokens(round: u32, channel: u32, from: u32, to: u32) -> u64 {
    pattern_word(from, round, Token { from, to, channel, index: 0, is_reply: false }.number(), TOKEN) % (MAX + 1)
}

/// The number of words for an expert in a round: usually few.
fn words(round: u32, expert: u32, from: u32, to: u32) -> u64 {
    let random = pattern_word(from, round, expert << 8 | to, MAX_WORDS);
    (random >> 3) % if random.is_multiple_of(8) { MAX_WORDS + 1 } else { 41 }
}

impl Run<'_> {
    /// Runs a workload. A failure ends the waits of all threads on all ranks.
    pub(super) fn workload(&self, rep: &mut u32, body: impl Fn(&Self, &mut u32) -> Step) -> Step {
        body(self, rep).map_err(|failure| {
            if self.load(self.plan.stop()) != 0 {
                return Failure { verdict: Verdict::Stopped, ..failure };
            }
            for peer in self.everyone() {
                // A failed context may refuse.
                let _ = self.put_value(peer, self.plan.stop(), 1, 8, Action::NONE, Flags::NONE);
            }
            self.store(self.plan.stop(), 1);
            failure
        })
    }

    /// All ranks; this one is the last.
    fn everyone(&self) -> impl Iterator<Item = u32> + use<> {
        let Plan { rank, nranks, .. } = *self.plan;
        (1..=nranks).map(move |step| (rank + step) % nranks)
    }

    /// The same run on context `id`.
    fn on(&self, id: u32) -> Result<Self, Failure> {
        // SAFETY: the `World` that made the plan keeps all contexts open until the run ends.
        let context = unsafe { api::sibling(&self.context, self.plan, id) };
        context.map(|context| Run { context, ..*self }).map_err(|status| Failure::of(status, self.plan.rank))
    }

    /// This thread's channels below `end`, which are shared by the threads from `first` on.
    fn own(&self, first: u32, end: u32) -> impl Iterator<Item = u32> + use<> {
        let Plan { lane, lanes, .. } = *self.plan;
        (0..end).filter(move |channel| channel % (lanes - first) == lane - first)
    }

    fn strong(&self) -> Flags {
        if self.plan.spoil == Spoil::Weak { Flags::NONE } else { Flags::STRONG }
    }

    /// How often to do something that is normally done once: differs in the round and channel that a fault spoils.
    fn times(&self, round: u32, channel: u32, to: u32) -> u32 {
        let is_victim = (self.plan.rank, round, channel, to) == (0, SPOILT, 0, 1);
        match self.plan.spoil {
            Spoil::Lost if is_victim => 0,
            Spoil::Doubled if is_victim => 2,
            _ => 1,
        }
    }

    fn is_undone(&self, round: u32, channel: u32) -> bool {
        self.plan.spoil == Spoil::Reset && (self.plan.rank, round, channel) == (0, SPOILT, 0)
    }

    /// Offset in an inbox that isn't divided between threads.
    fn at(&self, from: u32, offset: u64) -> u64 {
        u64::from(from) * INBOX + offset
    }

    fn raise_at(&self, peer: u32, word: Span, amount: u64, flags: Flags) -> Step {
        self.context.signal_at(peer, word, amount, flags).map_err(|status| Failure::of(status, peer))
    }

    fn raise_with(&self, peer: u32, action: Action, flags: Flags) -> Step {
        self.context.signal(peer, action, flags).map_err(|status| Failure::of(status, peer))
    }

    /// Sends signal `first + rank` to each rank, then waits for one from each. `count` is this barrier's number, from
    /// 1.
    fn meet(&self, first: u32, count: u32, flags: Flags) -> Step {
        for peer in self.everyone() {
            self.raise_with(peer, Action::signal_inc((first + self.plan.rank) as u16), flags)?;
        }
        (0..self.plan.nranks).try_for_each(|peer| self.await_signal(first + peer, count.into(), peer))
    }

    /// Alternates barriers and all-to-all. The puts are announced in turn by a barrier's strong signals without a
    /// flush, by a weak signal with each put, and by a flush and a barrier's weak signals.
    pub(super) fn exchange(&self, rep: &mut u32) -> Step {
        let Plan { rank, nranks, reps, lane, lanes, .. } = *self.plan;
        let from = |peer: u32| self.plan.outbox() + u64::from(peer * lanes + lane) * BLOCK;
        let number = |to: u32| lane << 8 | to;
        let (mut barriers, mut puts) = (0, 0);
        for round in 0..reps {
            *rep = round;
            let has_signal = round % 3 == 1;
            for peer in self.everyone() {
                self.fill(from(peer), BLOCK, round, number(peer));
                let action = if has_signal { Action::signal_inc(nranks as u16) } else { Action::NONE };
                for _ in 0..self.times(round, lane, peer) {
                    self.put(peer, self.plan.inbox(rank), from(peer), BLOCK, action, Flags::NONE)?;
                }
            }
            if has_signal {
                puts += u64::from(nranks);
                self.await_signal(nranks, puts, rank)?;
            } else {
                barriers += 1;
                let flags = if round % 3 == 0 { self.strong() } else { Flags::NONE };
                if round % 3 == 2 {
                    self.flush()?;
                }
                self.meet(0, barriers, flags)?;
            }
            for peer in 0..nranks {
                self.expect_buffer(self.plan.inbox(peer), BLOCK, peer, round, number(rank))?;
            }
            self.flush()?;
            barriers += 1;
            self.meet(0, barriers, self.strong())?;
        }
        (0..nranks).try_for_each(|id| self.exactly(id, barriers.into(), self.context.read_signal(id), id))?;
        self.exactly(nranks, puts, self.context.read_signal(nranks), rank)
    }

    /// Where a token is sent from.
    fn source(&self, token: Token) -> u64 {
        self.plan.outbox() + u64::from(token.to) * WORDS + token.place()
    }

    fn write_token(&self, round: u32, token: Token) {
        let at = self.source(token);
        self.fill(at, TOKEN, round, token.number());
        self.store(at, value(token.from, token.channel, round, token.number()));
    }

    fn check_token(&self, round: u32, token: Token) -> Step {
        let (at, number) = (self.at(token.from, token.place()), token.number());
        self.expect_word(at, value(token.from, token.channel, round, number), token.from)?;
        (1..TOKEN / 8)
            .try_for_each(|i| self.expect_word(at + i * 8, pattern_word(token.from, round, number, i), token.from))
    }

    fn put_token(&self, token: Token, action: Action, flags: Flags) -> Step {
        self.put(token.to, self.at(token.from, token.place()), self.source(token), TOKEN, action, flags)
    }

    /// The word of `channel` that rank `from` adds to: dispatch tails, or combine ends.
    fn told_at(&self, is_combine: bool, channel: u32, from: u32) -> u64 {
        self.at(from, WORDS + 8 * u64::from(u32::from(is_combine) * CHANNELS + channel))
    }

    /// A word that this rank's threads share: per channel, per thread, or for the rank.
    fn shared(&self, number: u32) -> u64 {
        self.plan.outbox() + SHARED + 8 * u64::from(number)
    }

    fn release(&self, offset: u64, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// Threads 1 and up dispatch and combine in their channels. Thread 0 flushes their posts, announces them, and meets
    /// the other ranks.
    pub(super) fn deep_ep(&self, rep: &mut u32) -> Step {
        let Plan { rank, lane, lanes, reps, .. } = *self.plan;
        let (posted, done, go) = (0, CHANNELS, CHANNELS + lanes);
        for round in 0..reps {
            *rep = round;
            let (before, after) = (u64::from(round), u64::from(round) + 1);
            if lane > 0 {
                self.own(1, CHANNELS).try_for_each(|channel| self.on(1 + channel)?.send_tokens(round, channel))?;
                for channel in self.own(1, CHANNELS) {
                    self.on(1 + channel)?.take_and_reply(round, channel)?;
                    self.release(self.shared(posted + channel), after);
                }
                self.own(1, CHANNELS).try_for_each(|channel| self.take_replies(round, channel))?;
                self.release(self.shared(done + lane), after);
                self.poll_word(self.shared(go), after, before, rank)?;
                continue;
            }
            for channel in 0..CHANNELS {
                self.poll_word(self.shared(posted + channel), after, before, rank)?;
                self.on(1 + channel)?.end_combine(round, channel)?;
            }
            (1..lanes).try_for_each(|lane| self.poll_word(self.shared(done + lane), after, before, rank))?;
            self.meet(0, round + 1, self.strong())?;
            self.release(self.shared(go), after);
        }
        Ok(())
    }

    /// Sends tokens with in-band headers; strong signals give the number of tokens since the previous one.
    fn send_tokens(&self, round: u32, channel: u32) -> Step {
        let Plan { rank, window, .. } = *self.plan;
        for to in self.everyone() {
            let (count, mut told) = (tokens(round, channel, rank, to), 0);
            for index in 0..=count {
                if index == count || index == told + INTERVAL {
                    let amount = packed(index, index == count) - packed(told, false);
                    let word = window.at(self.told_at(false, channel, rank));
                    let times = if told == 0 { self.times(round, channel, to) } else { 1 };
                    for _ in 0..times {
                        self.raise_at(to, word, amount, self.strong())?;
                    }
                    told = index;
                }
                if index < count {
                    let token = Token { from: rank, to, channel, index, is_reply: false };
                    self.write_token(round, token);
                    self.put_token(token, Action::NONE, Flags::AGGREGATE)?;
                }
            }
        }
        Ok(())
    }

    /// Takes tokens as their tails grow, and immediately posts a reply to each.
    fn take_and_reply(&self, round: u32, channel: u32) -> Step {
        let Plan { rank, nranks, .. } = *self.plan;
        // What this thread has seen from each rank.
        let seen_of = |from: u32| self.shared(SEEN + channel * MAX_RANKS + from);
        (0..nranks).for_each(|from| self.store(seen_of(from), 0));
        let (mut left, mut polls, mut began) = (nranks, 0, 0);
        while left > 0 {
            let mut missing = None;
            for from in 0..nranks {
                let (at, old) = (self.told_at(false, channel, from), self.load(seen_of(from)));
                if old as u32 == 1 {
                    continue;
                }
                let (got, expected) = (self.load(at), packed(tokens(round, channel, from, rank), true));
                let (tail, told) = (got >> 32, old >> 32);
                let is_part = got as u32 == 0 && tail.is_multiple_of(INTERVAL) && tail <= expected >> 32;
                if !(is_part || got == expected) || tail < told {
                    return Err(Failure { verdict: Verdict::Wrong, peer: from, at, expected, got });
                }
                for index in told..tail {
                    let token = Token { from, to: rank, channel, index, is_reply: false };
                    self.check_token(round, token)?;
                    self.write_token(round, token.reply());
                    self.put_token(token.reply(), Action::NONE, Flags::AGGREGATE)?;
                }
                self.store(seen_of(from), got);
                if got == expected {
                    left -= 1;
                    if !self.is_undone(round, channel) {
                        self.store(at, 0);
                    }
                } else {
                    missing = Some(Failure { verdict: Verdict::Late, peer: from, at, expected, got });
                }
                if got != old {
                    polls = 0;
                }
            }
            if let Some(failure) = missing
                && self.late(&mut polls, &mut began)
            {
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Flushes the replies that another thread posted, whose sources are then free, and tells each rank with a weak
    /// signal.
    fn end_combine(&self, round: u32, channel: u32) -> Step {
        let Plan { rank, window, .. } = *self.plan;
        if self.plan.spoil != Spoil::Flush {
            self.flush()?;
        }
        for peer in self.everyone() {
            for index in 0..tokens(round, channel, peer, rank) {
                let source = self.source(Token { from: rank, to: peer, channel, index, is_reply: true });
                (0..TOKEN / 8).for_each(|i| self.store(source + i * 8, !0));
            }
            let word = window.at(self.told_at(true, channel, rank));
            self.raise_at(peer, word, packed(0, true), Flags::NONE)?;
        }
        Ok(())
    }

    fn take_replies(&self, round: u32, channel: u32) -> Step {
        let Plan { rank, nranks, .. } = *self.plan;
        for from in 0..nranks {
            let word = self.told_at(true, channel, from);
            self.poll_word(word, packed(0, true), 0, from)?;
            for index in 0..tokens(round, channel, rank, from) {
                self.check_token(round, Token { from, to: rank, channel, index, is_reply: true })?;
            }
            self.store(word, 0);
        }
        Ok(())
    }

    /// Each put raises a signal by one. A value with another signal gives the number of tokens.
    pub(super) fn deep_ep_indexed(&self, rep: &mut u32) -> Step {
        for round in 0..self.plan.reps {
            *rep = round;
            self.own(0, INDEXED_CHANNELS).try_for_each(|channel| self.on(channel)?.send_indexed(round, channel))?;
            self.own(0, INDEXED_CHANNELS).try_for_each(|channel| self.on(channel)?.take_indexed(round, channel))?;
        }
        Ok(())
    }

    fn send_indexed(&self, round: u32, channel: u32) -> Step {
        let rank = self.plan.rank;
        for to in self.everyone() {
            let count = tokens(round, channel, rank, to);
            for index in 0..count {
                let token = Token { from: rank, to, channel, index, is_reply: false };
                self.write_token(round, token);
                let times = if index == 0 { self.times(round, channel, to) } else { 1 };
                for _ in 0..times {
                    self.put_token(token, Action::signal_add(rank as u16, 1), Flags::NONE)?;
                }
            }
            let (at, number) = (self.told_at(false, channel, rank), u64::from(round + 1) << 32 | count);
            self.put_value(to, at, number, 8, Action::signal_add((NUMBERS + rank) as u16, 1), Flags::NONE)?;
        }
        self.flush()
    }

    fn take_indexed(&self, round: u32, channel: u32) -> Step {
        let Plan { rank, nranks, .. } = *self.plan;
        for from in 0..nranks {
            self.await_signal(NUMBERS + from, u64::from(round) + 1, from)?;
            let count = tokens(round, channel, from, rank);
            self.expect_word(self.told_at(false, channel, from), u64::from(round + 1) << 32 | count, from)?;
            let so_far = (0..=round).map(|round| tokens(round, channel, from, rank)).sum();
            self.await_signal(from, so_far, from)?;
            for index in 0..count {
                self.check_token(round, Token { from, to: rank, channel, index, is_reply: false })?;
            }
            self.exactly(from, so_far, self.context.read_signal(from), from)?;
        }
        // Once this rank's last signals are raised, all ranks have taken their tokens.
        for peer in self.everyone() {
            self.raise_with(peer, Action::signal_add(TAKEN as u16, 1), Flags::NONE)?;
        }
        self.await_signal(TAKEN, u64::from(round + 1) * u64::from(nranks), rank)
    }

    /// The amount of one strong signal is the number of tokens plus one, and the receiver takes the first nonzero
    /// value.
    pub(super) fn nccl_ep(&self, rep: &mut u32) -> Step {
        let Plan { nranks, reps, .. } = *self.plan;
        for round in 0..reps {
            *rep = round;
            self.own(0, EXPERTS).try_for_each(|expert| self.send_to_expert(round, expert))?;
            self.own(0, EXPERTS).try_for_each(|expert| self.take_as_expert(round, expert))?;
            self.flush()?;
            self.meet(EXPERTS * nranks, round + 1, self.strong())?;
        }
        Ok(())
    }

    fn send_to_expert(&self, round: u32, expert: u32) -> Step {
        let Plan { rank, nranks, .. } = *self.plan;
        for to in self.everyone() {
            let count = words(round, expert, rank, to);
            let from = self.plan.outbox() + u64::from(expert * nranks + to) * MAX_WORDS * 8;
            let at = self.at(rank, u64::from(expert) * MAX_WORDS * 8);
            self.fill(from, count * 8, round, expert << 8 | to);
            let mut first = 0;
            while first < count {
                let bytes = PIECE.min(count - first) * 8;
                self.put(to, at + first * 8, from + first * 8, bytes, Action::NONE, Flags::AGGREGATE)?;
                first += PIECE;
            }
            let action = Action::signal_add((expert * nranks + rank) as u16, count as u32 + 1);
            for _ in 0..self.times(round, expert, to) {
                self.raise_with(to, action, self.strong())?;
            }
        }
        Ok(())
    }

    fn take_as_expert(&self, round: u32, expert: u32) -> Step {
        let Plan { rank, nranks, .. } = *self.plan;
        for from in 0..nranks {
            let (id, count) = (expert * nranks + from, words(round, expert, from, rank));
            self.await_step(id, 0, count + 1).map_err(|failure| Failure { peer: from, ..failure })?;
            let at = self.at(from, u64::from(expert) * MAX_WORDS * 8);
            self.expect_buffer(at, count * 8, from, round, expert << 8 | rank)?;
            if !self.is_undone(round, expert) {
                self.context.reset_signal(id).map_err(|status| Failure::of(status, from))?;
            }
        }
        Ok(())
    }
}
