//! A queue pair: its rings, and the requests that it has taken but not completed.

use std::sync::Arc;

use super::counter::EVENTS;
use super::queue::WorkQueue;
use super::request::Request;

/// Identifies a request on the wire and in the reorder buffer, by its queue pair, its table entry and its serial
/// number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token(pub u64);

impl Token {
    pub(crate) fn new(qpn: u16, entry: u16, serial: u32) -> Self {
        Self(u64::from(qpn) << 48 | u64::from(entry) << 32 | u64::from(serial))
    }

    pub(crate) fn qpn(self) -> u16 {
        (self.0 >> 48) as u16
    }

    pub(crate) fn entry(self) -> u16 {
        (self.0 >> 32) as u16
    }

    pub(crate) fn serial(self) -> u32 {
        self.0 as u32
    }
}

/// A request that was taken from the ring.
#[derive(Debug)]
pub(crate) struct Outstanding {
    pub request: Request,
    /// Producer index that it was posted at.
    pub index: u32,
    /// Connection that the request was queued on.
    pub connection: Option<u32>,
    /// Bytes given to the wire.
    pub sent: u32,
    /// Bytes of a read that have arrived.
    pub received: u32,
    /// The wire has the whole request, but the answer has not arrived.
    pub awaiting: bool,
    /// How often the peer had no receive for it.
    pub retries: u8,
    serial: u32,
    live: bool,
}

/// The number of retries that means forever when the peer has no receive, as in `ibv_qp_attr.rnr_retry`.
pub const RNR_RETRY_UNLIMITED: u8 = 7;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Ready,
    /// The queue pair executes no requests: the card flushes what software posts.
    Error,
}

#[derive(Debug)]
pub struct Qp {
    pub qpn: u16,
    pub qkey: u32,
    pub pd: u32,
    pub sq: Arc<WorkQueue>,
    pub rq: Arc<WorkQueue>,
    pub max_batch: u32,
    pub state: State,
    /// The card reads the doorbell, and peers can reach the queue pair.
    pub enabled: bool,
    /// Producer index up to which requests were taken.
    pub taken: u32,
    /// Index up to which receives were taken.
    pub rq_taken: u32,
    /// How often the card retries a send whose peer has no receive.
    pub rnr_retry: u8,
    /// The queue pair carries unreliable datagrams (UD): a message without a receive is dropped, and a receive starts
    /// with room for a global routing header.
    pub datagrams: bool,
    /// Writes with immediate data complete here without a receive. Otherwise each takes one.
    pub unsolicited_writes: bool,
    /// Requests taken but not completed.
    pub outstanding: u32,
    pub send_cq: u32,
    pub recv_cq: Option<u32>,
    /// Counters by [`Event`](super::counter::Event).
    pub counters: [Vec<u32>; EVENTS],
    /// How many lines each broken rule has had, by the rule's words without its numbers.
    pub lines: Vec<(String, u32)>,
    table: Vec<Outstanding>,
    free: Vec<u16>,
    serial: u32,
}

impl Qp {
    /// Counts a line about a broken rule, and returns how many there have been. Rules that differ only in numbers are
    /// the same rule.
    pub fn count_line(&mut self, rule: &str) -> u32 {
        let is_number = |word: &&str| word.starts_with(|first: char| first.is_ascii_digit());
        let rule: String = rule.split_whitespace().filter(|word| !is_number(word)).collect();
        match self.lines.iter_mut().find(|(known, _)| *known == rule) {
            Some((_, times)) => {
                *times = times.saturating_add(1);
                *times
            }
            None => {
                self.lines.push((rule, 1));
                1
            }
        }
    }

    pub(crate) fn new(qpn: u16, qkey: u32, pd: u32, queues: (Arc<WorkQueue>, Arc<WorkQueue>), serial: u32) -> Self {
        Self {
            qpn,
            qkey,
            pd,
            sq: queues.0,
            rq: queues.1,
            max_batch: 0,
            state: State::Ready,
            enabled: false,
            taken: 0,
            rq_taken: 0,
            rnr_retry: RNR_RETRY_UNLIMITED,
            datagrams: false,
            unsolicited_writes: true,
            outstanding: 0,
            send_cq: 0,
            recv_cq: None,
            counters: Default::default(),
            lines: Vec::new(),
            table: Vec::new(),
            free: Vec::new(),
            serial,
        }
    }

    /// Adds a request to the table. The ring bounds their number, so the table stops growing.
    pub(crate) fn admit(&mut self, request: Request, index: u32) -> Token {
        self.serial = self.serial.wrapping_add(1);
        let entry = Outstanding {
            request,
            index,
            connection: None,
            sent: 0,
            received: 0,
            awaiting: false,
            retries: 0,
            serial: self.serial,
            live: true,
        };
        let at = match self.free.pop() {
            Some(at) => {
                self.table[usize::from(at)] = entry;
                at
            }
            None => {
                self.table.push(entry);
                (self.table.len() - 1) as u16
            }
        };
        Token::new(self.qpn, at, self.serial)
    }

    pub(crate) fn get(&mut self, token: Token) -> Option<&mut Outstanding> {
        self.table.get_mut(usize::from(token.entry())).filter(|e| e.live && e.serial == token.serial())
    }

    pub(crate) fn find(&self, token: Token) -> Option<&Outstanding> {
        self.table.get(usize::from(token.entry())).filter(|e| e.live && e.serial == token.serial())
    }

    /// Removes a request and returns it for its completion.
    pub(crate) fn take(&mut self, token: Token) -> Option<&Outstanding> {
        let entry = self.table.get_mut(usize::from(token.entry())).filter(|e| e.live && e.serial == token.serial())?;
        entry.live = false;
        self.free.push(token.entry());
        Some(entry)
    }

    /// Returns the tokens of the requests queued on `connection`.
    pub(crate) fn tokens_on(&self, connection: u32) -> Vec<Token> {
        self.tokens(|entry| entry.connection == Some(connection))
    }

    /// Returns the tokens of the `wanted` requests.
    pub(crate) fn tokens(&self, wanted: impl Fn(&Outstanding) -> bool) -> Vec<Token> {
        let entries = self.table.iter().enumerate().filter(|(_, entry)| entry.live && wanted(entry));
        entries.map(|(at, entry)| Token::new(self.qpn, at as u16, entry.serial)).collect()
    }

    /// Whether requests have 128 bytes.
    pub(crate) fn is_wide(&self) -> bool {
        self.sq.entry_size == 128
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_hold_their_parts() {
        let token = Token::new(0xfedc, 0x1234, 0x89ab_cdef);
        assert_eq!((token.qpn(), token.entry(), token.serial()), (0xfedc, 0x1234, 0x89ab_cdef));
    }
}
