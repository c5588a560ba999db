//! A trace's events: its records, with each request joined to its completion.

use std::collections::{BTreeMap, HashMap};

use soft_nic::trace::{Kind, Record, flags};

use super::efa;

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It completed with this status, at this time.
    Completed { status: u8, time_ns: u64 },
    /// Its queue pair was closed first.
    Closed { time_ns: u64 },
    /// The trace ends first.
    Open,
}

/// A record with its partner.
#[derive(Debug, Clone)]
pub struct Event {
    pub record: Record,
    pub kind: Kind,
    /// What became of a request or receive; `None` for other events.
    pub outcome: Option<Outcome>,
    /// For a completion: when its request began, and the request's or receive's slot.
    pub began: Option<(u64, u32)>,
}

/// All events, in order of time.
#[derive(Debug, Default)]
pub struct Events {
    pub events: Vec<Event>,
    /// The trace's cards by the hash of their GID: process and number.
    cards: HashMap<u32, (u32, u32)>,
    /// The programs' names, by process.
    pub programs: BTreeMap<u32, String>,
}

/// A queue pair's requests and receives that have no completion yet.
#[derive(Debug, Default)]
struct Queue {
    requests: HashMap<u32, usize>,
    receive: Option<usize>,
}

impl Events {
    /// Joins the files' records.
    pub fn of(files: &[Vec<Record>]) -> Self {
        let mut all = Self::default();
        for records in files {
            all.add_file(records);
        }
        all.events.sort_by_key(|event| event.record.time_ns.get());
        all
    }

    /// Joins one file's records; those of a card are in order.
    fn add_file(&mut self, records: &[Record]) {
        let mut queues: HashMap<(u32, u32), HashMap<u16, Queue>> = HashMap::new();
        for record in records {
            let Some(kind) = Kind::from_raw(record.kind) else { continue };
            let (card, qpn, at) = ((record.process.get(), record.card.get()), record.qpn.get(), self.events.len());
            let (time_ns, status) = (record.time_ns.get(), record.status);
            let queue = queues.entry(card).or_default().entry(qpn).or_default();
            let mut event = Event { record: *record, kind, outcome: None, began: None };
            let partner = match kind {
                Kind::Card => {
                    let program = String::from_utf8_lossy(record.valid_bytes()).into_owned();
                    self.programs.insert(card.0, program);
                    self.cards.insert(record.peer.get(), card);
                    queues.remove(&card);
                    None
                }
                Kind::Request => {
                    event.outcome = Some(Outcome::Open);
                    queue.requests.insert(record.index.get(), at);
                    None
                }
                Kind::Receive => {
                    event.outcome = Some(Outcome::Open);
                    queue.receive = Some(at);
                    None
                }
                Kind::Completion => queue.requests.remove(&record.index.get()),
                Kind::Received if is_unsolicited(record) => None,
                Kind::Received => queue.receive.take(),
                Kind::Counted => None,
                Kind::Closed => {
                    let Queue { requests, receive } = std::mem::take(queue);
                    for at in requests.into_values().chain(receive) {
                        self.events[at].outcome = Some(Outcome::Closed { time_ns });
                    }
                    None
                }
            };
            if let Some(partner) = partner.and_then(|at| self.events.get_mut(at)) {
                partner.outcome = Some(Outcome::Completed { status, time_ns });
                event.began = Some((partner.record.time_ns.get(), partner.record.slot.get()));
            }
            self.events.push(event);
        }
    }

    /// Returns the first event's time.
    pub fn start_ns(&self) -> u64 {
        self.events.first().map_or(0, |event| event.record.time_ns.get())
    }

    /// Returns an event's peer: `PROCESS/CARD QP N`, or the hash of a card that is not in the trace.
    pub fn peer(&self, event: &Event) -> Option<String> {
        let record = &event.record;
        let qpn = record.peer_qpn.get();
        if matches!(event.kind, Kind::Card | Kind::Closed | Kind::Receive | Kind::Completion) {
            return None;
        }
        let ip = std::net::Ipv4Addr::from(record.peer_ip);
        let card = match (record.peer.get(), self.cards.get(&record.peer.get())) {
            (0, _) if record.ah.get() != 0 => format!("AH {}", record.ah),
            (0, _) => "?".into(),
            (_, Some((process, card))) => format!("{process}/{card}"),
            (hash, None) => format!("{hash:08x}@{ip}"),
        };
        Some(format!("{card} QP {qpn}"))
    }
}

/// Returns whether it is a peer's write with immediate data, which takes no receive.
fn is_unsolicited(record: &Record) -> bool {
    record.op == efa_dp_direct::wire::SendOp::RdmaWrite.raw()
}

impl Event {
    pub fn name(&self) -> &'static str {
        match self.kind {
            Kind::Card => "card",
            Kind::Request => "request",
            Kind::Completion => "completion",
            Kind::Receive => "receive",
            Kind::Received => "received",
            Kind::Counted => "counted",
            Kind::Closed => "closed",
        }
    }

    /// Returns the operation; `recv` for a receive and for the message in it.
    pub fn operation(&self) -> Option<String> {
        match self.kind {
            Kind::Card | Kind::Closed => None,
            Kind::Receive => Some("recv".into()),
            Kind::Received if !is_unsolicited(&self.record) => Some("recv".into()),
            Kind::Request | Kind::Completion | Kind::Received | Kind::Counted => Some(efa::operation(self.record.op)),
        }
    }

    pub fn slot(&self) -> Option<u32> {
        match self.kind {
            Kind::Request | Kind::Completion | Kind::Receive => Some(self.record.slot.get()),
            Kind::Received => self.began.map(|(_, slot)| slot),
            Kind::Card | Kind::Counted | Kind::Closed => None,
        }
    }

    pub fn request_id(&self) -> Option<u64> {
        let has = match self.kind {
            Kind::Request | Kind::Completion | Kind::Receive => true,
            Kind::Received => !is_unsolicited(&self.record),
            Kind::Card | Kind::Counted | Kind::Closed => false,
        };
        has.then_some(self.record.request_id.get())
    }

    /// Returns the bytes of the transfer; for a receive, how many it has room for.
    pub fn length(&self) -> Option<u64> {
        match self.kind {
            Kind::Card | Kind::Closed => None,
            Kind::Request => efa::parse(self.record.valid_bytes())?.ok().map(|wqe| efa::length(&wqe)),
            Kind::Completion | Kind::Receive | Kind::Received | Kind::Counted => Some(self.record.length.get().into()),
        }
    }

    /// Returns a completion's status.
    pub fn status(&self) -> Option<u8> {
        matches!(self.kind, Kind::Completion | Kind::Received).then_some(self.record.status)
    }

    /// Returns a completion's status, or the one that a request completed with.
    pub fn final_status(&self) -> Option<u8> {
        match self.outcome {
            Some(Outcome::Completed { status, .. }) => Some(status),
            _ => self.status(),
        }
    }

    /// Returns whether it is a request or a receive without a completion.
    pub fn is_unfinished(&self) -> bool {
        matches!(self.outcome, Some(Outcome::Open | Outcome::Closed { .. }))
    }

    /// Nanoseconds from the request to this completion.
    pub fn latency_ns(&self) -> Option<u64> {
        let (began, _) = self.began.filter(|_| self.kind == Kind::Completion)?;
        Some(self.record.time_ns.get().saturating_sub(began))
    }

    /// Returns memory, keys, immediate data, counters and errors, in one line.
    pub fn details(&self) -> String {
        let mut parts = Vec::new();
        let record = &self.record;
        match self.kind {
            Kind::Card => parts.push(String::from_utf8_lossy(record.valid_bytes()).into_owned()),
            Kind::Request => match efa::parse(record.valid_bytes()) {
                Some(Ok(wqe)) => parts.push(efa::details(&wqe)),
                Some(Err(error)) => parts.push(error.to_string()),
                None => parts.push("no work request".into()),
            },
            Kind::Receive => {
                let (descs, _) = record.valid_bytes().as_chunks();
                parts.extend(descs.iter().map(|desc| {
                    let desc = efa_dp_direct::wire::RxDesc::from_bytes(desc);
                    format!("lkey {:#x} at {:#x}+{}", desc.lkey_ctrl.lkey(), desc.addr(), desc.length)
                }));
            }
            Kind::Completion | Kind::Received | Kind::Counted | Kind::Closed => {}
        }
        if record.flags & flags::IMM != 0 {
            parts.push(format!("imm {:#x}", record.imm));
        }
        if let Some(nanoseconds) = self.latency_ns() {
            parts.push(format!("after {} us", micros(nanoseconds)));
        }
        if self.status().is_some() && record.flags & flags::ENTRY == 0 {
            let counted = record.flags & flags::COUNTED != 0;
            parts.push(if counted { "counted, no entry" } else { "no entry, no counter" }.into());
        }
        if let Some(status) = self.status().filter(|status| *status != 0) {
            parts.push(efa::status(status));
        }
        match self.outcome {
            Some(Outcome::Open) => parts.push("no completion in the trace".into()),
            Some(Outcome::Closed { .. }) => parts.push("no completion: the queue pair was closed".into()),
            Some(Outcome::Completed { .. }) | None => {}
        }
        parts.retain(|part| !part.is_empty());
        parts.join(", ")
    }
}

/// Formats nanoseconds as microseconds with three decimals.
pub fn micros(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)
}
