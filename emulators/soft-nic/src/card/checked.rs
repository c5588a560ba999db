//! The card's records for `ferrogin check` (`GIN_CHECK`): what it takes, moves and counts.

use gin_check::event::{Event as Record, Operation as Recorded};

use super::core::Core;
use super::counter::Event;
use super::qp::Token;
use super::region::{Access, Keys, Memory};
use super::request::{Local, Operation};
use crate::wire::packet::Header;

impl Core {
    /// Records events if this process is checked.
    #[inline(always)]
    pub(crate) fn check(&mut self, events: impl FnOnce(&mut Self, u64) -> Vec<Record>) {
        if self.check.is_some() {
            self.record(events);
        }
    }

    #[cold]
    fn record(&mut self, events: impl FnOnce(&mut Self, u64) -> Vec<Record>) {
        let events = events(self, self.gid.short().into());
        if let Some(log) = &self.check
            && let Err(error) = log.write(&events)
        {
            self.check = None;
            self.log(format_args!("the records for GIN_CHECK end here: {error}"));
        }
    }

    /// Records the card itself.
    pub(super) fn check_card(&mut self) {
        self.check(|_, card| vec![Record::Card { card }]);
    }

    /// Records a started queue pair and its counters.
    pub(super) fn check_queue(&mut self, qpn: u16) {
        self.check(|core, card| {
            let Some(qp) = core.qps.get(u32::from(qpn)) else { return Vec::new() };
            let queue = Record::Queue {
                card,
                queue: qpn.into(),
                ring: qp.sq.buffer() as u64,
                slot_bytes: qp.sq.entry_size,
                slots: qp.sq.entries,
                doorbell: qp.sq.doorbell() as u64,
            };
            let events = [Event::Send, Event::Recv, Event::Write, Event::Read, Event::RemoteWrite, Event::RemoteRead];
            let ids =
                events.into_iter().flat_map(|event| qp.counters[event as usize].iter().map(move |id| (event, *id)));
            let counters = ids.flat_map(|(event, id)| core.counter_record(card, qpn, event, id));
            std::iter::once(queue).chain(counters).collect()
        });
    }

    /// Records a counter that was attached to a started queue pair.
    pub(super) fn check_counter(&mut self, qpn: u16, event: Event, id: u32) {
        self.check(|core, card| core.counter_record(card, qpn, event, id).into_iter().collect());
    }

    fn counter_record(&self, card: u64, qpn: u16, event: Event, id: u32) -> Option<Record> {
        let (inode, address) = self.counters.get(id)?.completions.place();
        let completions = matches!(event, Event::Send | Event::Write | Event::Read);
        Some(Record::Counter { card, counter: id.into(), queue: qpn.into(), completions, inode, address })
    }

    /// Registers memory; `None` if the card has no keys left.
    pub fn open_region(&mut self, pd: u32, access: Access, memory: Memory) -> Option<Keys> {
        let (address, bytes) = (memory.base, memory.len);
        let keys = self.regions.insert(pd, access, memory, &mut self.random)?;
        self.check(|_, card| vec![Record::Region { card, key: keys.lkey, address, bytes }]);
        Some(keys)
    }

    /// Records that the card took a request.
    pub(super) fn check_taken(&mut self, token: Token) {
        self.check(|core, card| {
            let Some(entry) = core.outstanding(token) else { return Vec::new() };
            let (request, index) = (entry.request, entry.index);
            let peer = core.card_of(request.meta.ah).map_or(0, |gid| gid.short().into());
            let operation = match request.operation {
                Operation::Write => Recorded::Write,
                Operation::Read => Recorded::Read,
                Operation::Send => Recorded::Send,
            };
            vec![Record::Taken {
                card,
                request: token.0,
                queue: token.qpn().into(),
                index: index.into(),
                operation,
                peer,
                peer_queue: request.meta.dest_qp_num.into(),
                local: request.buffers()[0].addr,
                remote: request.remote_addr,
                bytes: request.len.into(),
                inline: matches!(request.local, Local::Inline(_)),
            }]
        });
    }

    /// Records that a peer's request raised counters of a queue pair.
    pub(super) fn check_arrived(&mut self, at: u32, header: &Header, event: Event) {
        let token = Token(header.token);
        self.check(|core, card| {
            let from = core.sender(at);
            core.raised(card, header.dst_qpn, event, from, token)
        });
    }

    /// Records that a request completed, and the counters that it raised.
    pub(super) fn check_retired(&mut self, token: Token, event: Event, failed: bool) {
        self.check(|core, card| {
            let mut records = vec![Record::Retired { card, request: token.0 }];
            if !failed {
                records.extend(core.raised(card, token.qpn(), event, card, token));
            }
            records
        });
    }

    /// Records the words that a peer's request brought in a message or as immediate data: they may be an emulated
    /// signal.
    pub(super) fn check_message(&mut self, at: u32, header: &Header, words: impl FnOnce() -> Vec<u64>) {
        self.check(|core, card| {
            let from = core.sender(at);
            vec![Record::Arrived { card, queue: header.dst_qpn.into(), from, request: header.token, words: words() }]
        });
    }

    /// Records that a queue pair closes.
    pub(super) fn check_closed(&mut self, qpn: u16) {
        self.check(|_, card| vec![Record::QueueClosed { card, queue: qpn.into() }]);
    }

    /// The name of the card at the other end of a connection.
    fn sender(&self, at: u32) -> u64 {
        self.connections.get(at).and_then(|connection| connection.peer).map_or(0, |gid| gid.short().into())
    }

    fn raised(&self, card: u64, qpn: u16, event: Event, from: u64, token: Token) -> Vec<Record> {
        let Some(qp) = self.qps.get(u32::from(qpn)) else { return Vec::new() };
        let raised = |id: &u32| Record::Raised { card, counter: (*id).into(), from, request: token.0 };
        qp.counters[event as usize].iter().map(raised).collect()
    }
}
