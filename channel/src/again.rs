//! Endpoints that had a channel before. Whoever comes back, or has got the address of one that is gone, is let in again.
//!
//! Tags and address are the same then, and what the earlier channel left behind may still come. So ids begin far from the earlier
//! ones, in both directions: what has an id of theirs is a leftover, and is thrown away. And since anybody can write any name into a
//! hello, and a hello may come late, the name is asked first: the earlier channel ends only when somebody there says that the hello is his.

use std::sync::Arc;
use std::time::Instant;

use super::engine::{Engine, NOBODY};
use super::link::Link;
use super::listen::secret;
use super::transport::{Addr, Transport};
use super::wire::{Control, Kind};
use super::{ChannelError, Reason};

/// Distance of a channel's ids from those of the one before: many times it, in turn, is near none of the earlier ones.
const FAR: u32 = 0x9e37_79b1;
/// Hellos that may wait for their answer.
const KNOCKS: usize = 1024;

/// How often one is asked who does not answer: a question may go down with the connection to a dead one of the same name.
const QUESTIONS: u32 = 10;

/// The last channel with an endpoint.
pub(super) struct Pair {
    pub channel: u32,
    /// Ids behind the last that it wrote and read, once it is over.
    pub write: u32,
    pub read: u32,
}

impl Pair {
    /// Ids that the next channel writes and reads first. Never 0, which stands for any.
    pub fn next(&self) -> (u32, u32) {
        let far = |id: u32| id.wrapping_add(FAR).max(1);
        (far(self.write), far(self.read))
    }
}

/// A hello.
pub(super) struct Knock {
    pub addr: Addr,
    pub name: Box<[u8]>,
    pub listener: u32,
    /// The sender's number of the channel and its secret.
    pub theirs: (u32, u64),
    /// The longest message that it takes.
    pub max: u64,
    /// Ids of the first messages, its and ours; ours is 0 if it does not matter.
    pub read: u32,
    pub write: u32,
    asked: Option<Asked>,
}

/// It was asked whether it lives there.
struct Asked {
    /// What it must say to be let in.
    nonce: u64,
    last: Instant,
    times: u32,
}

impl Knock {
    pub fn new(addr: Addr, message: &Control<'_>) -> Self {
        Self {
            addr,
            name: message.name.into(),
            listener: message.to,
            theirs: (message.from, message.own),
            max: message.value,
            read: message.id,
            write: message.begin,
            asked: None,
        }
    }
}

impl<T: Transport> Engine<T> {
    /// Who has a name that had a channel says hello.
    pub(super) fn knock(&mut self, knock: Knock) {
        if self.knocks.len() >= KNOCKS {
            self.knocks.pop_front();
        }
        self.knocks.push_back(knock);
        self.answer_knocks();
    }

    /// Asks those who have not been asked yet. What a peer wrote before it closed is read first.
    pub(super) fn answer_knocks(&mut self) {
        for at in 0..self.knocks.len() {
            let knock = &self.knocks[at];
            let Some(pair) = self.by_name.get(&knock.name).filter(|_| knock.asked.is_none()) else { continue };
            let link = self.links.get(pair.channel as usize).and_then(Option::as_deref);
            let link = link.filter(|link| link.is_live());
            if link.is_some_and(Link::has_unread) {
                continue;
            }
            let (_, read) = link.map_or(pair.next(), |link| link.pair(pair.channel).next());
            let asked = Asked { nonce: secret(), last: self.now, times: 0 };
            let knock = &mut self.knocks[at];
            (knock.asked, knock.read) = (Some(asked), read);
            self.ask(at);
        }
    }

    /// Asks those again who have not answered.
    pub(super) fn ask_again(&mut self) {
        for at in 0..self.knocks.len() {
            let late = |asked: &Asked| self.now.duration_since(asked.last) >= self.config.ping_after;
            if self.knocks[at].asked.as_ref().is_some_and(|asked| asked.times < QUESTIONS && late(asked)) {
                self.ask(at);
            }
        }
    }

    fn ask(&mut self, at: usize) {
        let knock = &mut self.knocks[at];
        let Some(asked) = &mut knock.asked else { return };
        (asked.last, asked.times) = (self.now, asked.times + 1);
        let (to, own) = knock.theirs;
        let again = Control { own: asked.nonce, id: knock.read, ..Control::new(Kind::Again, to, own) };
        let addr = knock.addr;
        self.say(addr, NOBODY, &again);
    }

    /// Our hello was heard where we had a channel before.
    pub(super) fn asked_again(&mut self, channel: u32, message: &Control<'_>) {
        let Some(link) = self.link(channel) else { return };
        link.out.start_at(message.id);
        link.inc.succeed();
        let addr = link.addr;
        let here = Control { from: channel, ..Control::new(Kind::Here, 0, message.own) };
        self.say(addr, channel, &here);
    }

    /// Somebody lives where a hello came from: the earlier channel, if it is still open, is a dead one's.
    pub(super) fn is_here(&mut self, message: &Control<'_>) {
        let is = |asked: &Asked| asked.nonce == message.secret;
        let Some(at) = self.knocks.iter().position(|knock| knock.asked.as_ref().is_some_and(is)) else { return };
        let Some(mut knock) = self.knocks.remove(at) else { return };
        let Some(before) = self.by_name.get(&knock.name).map(|pair| pair.channel) else { return };
        if let Some(link) = self.link(before).filter(|link| link.is_live()) {
            let replaced = ChannelError::Aborted { peer: Arc::clone(&link.peer), reason: Reason::Replaced };
            let error = if link.their_end.is_some() { link.closed_there() } else { replaced };
            self.end(before, error);
        }
        if let Some(pair) = self.by_name.get(&knock.name).filter(|_| knock.write == 0) {
            (knock.write, _) = pair.next();
        }
        if let Some(channel) = self.admit(&knock)
            && let Some(link) = self.link(channel)
        {
            link.inc.succeed();
            self.look_for_payload(channel);
        }
    }
}
