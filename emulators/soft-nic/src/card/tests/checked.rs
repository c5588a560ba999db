//! The records for `ferrogin check`.

use gin_check::event::{Event as Record, Log, decode};

use super::*;

/// A directory of this test, removed at its end.
struct Place(std::path::PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("soft-nic-check-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// The records since the file was opened, without the process's.
    fn records(&self) -> Vec<Record> {
        let bytes = std::fs::read(self.0.join(format!("card.{}", std::process::id()))).unwrap();
        decode(&bytes).into_iter().skip(1).map(|record| record.event).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn checked(name: &str) -> (World, Place) {
    let (mut world, place) = (World::open(), Place::new(name));
    world.core.check = Some(Log::create(&place.0, "card").unwrap());
    (world, place)
}

#[test]
fn own_write_is_recorded_from_its_slot_to_its_counters() {
    let (mut world, place) = checked("own");
    let operation = world.write(world.sge());
    let token = world.post(operation, false).unwrap();
    world.arrives(world.asked, Header { status: OK, ..Header::new(Kind::Ack, token.0) });
    let (card, request, queue) = (gid(1).short().into(), token.0, world.qpn.into());
    let raised = |counter: u32| Record::Raised { card, counter: counter.into(), from: card, request };
    let taken = Record::Taken {
        card,
        request,
        queue,
        index: 0,
        operation: gin_check::event::Operation::Write,
        peer: gid(2).short().into(),
        peer_queue: 7,
        local: world.bytes.as_ptr() as u64,
        remote: 0,
        bytes: 8,
        inline: false,
    };
    let retired = Record::Retired { card, request };
    assert_eq!(place.records(), [taken, retired, raised(world.counters[1]), raised(world.counters[3])]);
}

#[test]
fn counter_that_a_peers_write_raises_is_recorded() {
    let (mut world, place) = checked("peer");
    let ah = world.core.open_handle(PD, gid(3)).unwrap();
    world.core.attach_counter(world.qpn, Event::RemoteWrite, world.counters[4]).unwrap();
    let qkey = world.core.qp(world.qpn).unwrap().qkey;
    let address = world.bytes.as_ptr() as u64;
    let header = Header {
        dst_qpn: world.qpn,
        qkey,
        rkey: world.keys.rkey,
        addr: address,
        total: 8,
        len: 8,
        ..Header::new(Kind::Write, 77)
    };
    world.arrives(world.other, header);
    world.core.close_handle(ah);
    let (card, from) = (gid(1).short().into(), gid(3).short().into());
    let raised = Record::Raised { card, counter: world.counters[4].into(), from, request: 77 };
    assert_eq!(place.records()[1..], [raised], "after the counter's word");
}

#[test]
fn queue_that_closes_is_recorded() {
    let (mut world, place) = checked("closed");
    world.core.close_qp(world.qpn);
    let closed = Record::QueueClosed { card: gid(1).short().into(), queue: world.qpn.into() };
    assert_eq!(place.records().last(), Some(&closed));
}
