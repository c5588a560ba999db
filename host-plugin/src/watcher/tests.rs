use super::*;
use crate::registry::{self, Kind};
use efa_dp_direct::wire::CdescFlags;
use ferrogin_test_support::wait::wait_until;
use std::sync::atomic::AtomicU64;

/// A completion queue that a test fills as the card does.
struct Ring {
    words: Vec<u64>,
    entry_size: usize,
    entries: u32,
    produced: u32,
}

impl Ring {
    fn new(entries: u32, entry_size: usize) -> Self {
        Self { words: vec![0; entries as usize * entry_size / 8], entry_size, entries, produced: 0 }
    }

    fn reader(&mut self) -> CqReader {
        // SAFETY: each test drops the ring after the reader, and the ring has no completion yet.
        unsafe { CqReader::new(self.words.as_mut_ptr().cast(), self.entry_size as u32, self.entries) }
    }

    fn push(&mut self, req_id: u16, status: CompStatus) {
        let phase = (self.produced / self.entries).is_multiple_of(2);
        let flags = CdescFlags(0).with_phase(phase).with_op_type(SendOp::RdmaWrite.raw());
        let entry = CdescCommon { req_id, status: status.raw(), flags, qp_num: 9 };
        let slot = (self.produced % self.entries) as usize * self.entry_size;
        let to = self.words.as_mut_ptr().cast::<u8>().wrapping_add(slot);
        let bytes = entry.to_bytes();
        // The byte with the phase comes last.
        for i in [0, 1, 2, 4, 5, 3] {
            // SAFETY: the address is within the ring, whose bytes the watcher reads atomically too.
            unsafe { AtomicU8::from_ptr(to.wrapping_add(i)) }.store(bytes[i], Ordering::Release);
        }
        self.produced += 1;
    }
}

#[test]
fn completions_are_read_once_over_many_laps() {
    let mut ring = Ring::new(8, 32);
    let mut reader = ring.reader();
    assert_eq!(reader.poll(), None);
    for round in 0..100u16 {
        let burst = round % 8 + 1;
        for i in 0..burst {
            ring.push(round * 8 + i, CompStatus::Ok);
        }
        for i in 0..burst {
            assert_eq!(reader.poll().map(|entry| entry.req_id), Some(round * 8 + i));
        }
        assert_eq!(reader.poll(), None);
    }
}

#[test]
fn overtaken_reader_continues_with_oldest_entry() {
    for read in [0, 1, 5, 8, 11] {
        for more in [8, 9, 12, 15] {
            let mut ring = Ring::new(8, 32);
            let mut reader = ring.reader();
            for i in 0..read {
                ring.push(i, CompStatus::Ok);
                assert!(reader.poll().is_some());
            }
            for i in read..read + more {
                ring.push(i, CompStatus::Ok);
            }
            let last = read + more;
            let got: Vec<_> = std::iter::from_fn(|| reader.poll()).map(|entry| entry.req_id).collect();
            assert_eq!(got, (last - 8..last).collect::<Vec<_>>(), "{more} entries after {read}");
            ring.push(77, CompStatus::Ok);
            assert_eq!(reader.poll().map(|entry| entry.req_id), Some(77));
            assert_eq!(reader.poll(), None);
        }
    }
}

#[test]
fn failure_is_found_after_whole_laps() {
    let (mut ring, errors) = (Ring::new(8, 32), AtomicU64::new(0));
    let handle = registry::insert(Kind::Context, Arc::new(())).unwrap();
    let mut watch = watch_of(&mut ring, &errors, handle as usize);
    for i in 0..16 {
        ring.push(1, if i == 12 { CompStatus::RemoteAbort } else { CompStatus::Ok });
    }
    assert!(!watch.round(Instant::now()), "two whole laps look like an empty ring");
    // Like a card that counts an error.
    errors.store(1, Ordering::Relaxed);
    while watch.round(Instant::now()) {
        assert_ne!(watch.report, Report::Done, "the short pauses end with the report");
    }
    assert_eq!(watch.report, Report::Done);
    assert_eq!(watch.endpoints[0].cq.failure().map(|entry| entry.status), Some(CompStatus::RemoteAbort.raw()));
    registry::remove::<()>(handle, Kind::Context).unwrap();
}

#[test]
fn failure_just_before_the_end_of_a_watch_is_reported() {
    let (mut ring, errors) = (Ring::new(8, 32), AtomicU64::new(0));
    let handle = registry::insert(Kind::Context, Arc::new(())).unwrap();
    let watch = watch_of(&mut ring, &errors, handle as usize);
    ring.push(1, CompStatus::RemoteAbort);
    table().watches.insert(u64::MAX, watch);
    drop(Guard(u64::MAX));
    assert_eq!(registry::fault(handle, Kind::Context), Ok(true));
    registry::remove::<()>(handle, Kind::Context).unwrap();
}

fn watch_of(ring: &mut Ring, errors: &AtomicU64, handle: usize) -> Watch {
    Watch {
        handle,
        rank: 0,
        nranks: 3,
        endpoints: vec![WatchedEndpoint {
            name: (0, Role::Signal(4)),
            cq: ring.reader(),
            // SAFETY: each test's word outlives the watch.
            errors: Some(unsafe { ErrorCounter::new(errors.as_ptr()) }),
            failures: Arc::default(),
            ring: None,
            context: 0,
        }],
        targets: vec![(0..6).map(|i| Target { ah: i, qpn: 10 + i, qkey: 1 }).collect()],
        stop: StopWord::on_cpu(),
        report: Report::Clean,
        failure: None,
        lost: None,
        isolation: None,
        acknowledges: false,
        suspects: Vec::new(),
        proxy: None,
        output: Output::Log,
    }
}

#[test]
fn failed_request_message_names_peer_endpoint_and_fix() {
    let (mut ring, errors) = (Ring::new(8, 32), AtomicU64::new(0));
    let mut watch = watch_of(&mut ring, &errors, 0);
    ring.push(2, CompStatus::RemoteBadAddress);
    let entry = watch.endpoints[0].cq.poll().unwrap();
    let text = watch.describe(0, entry);
    for part in [
        "write to rank 2 (an unknown rank if NCCL's own device code posted it) on",
        "endpoint signal 4",
        "status 7",
        CompStatus::RemoteBadAddress.text(),
        "window",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    // Without a readable ring, an id that isn't a rank names no peer.
    assert_eq!(watch.peers(0, 77), "an unknown rank");
}

#[test]
fn peer_is_found_in_readable_ring() {
    let (mut ring, errors) = (Ring::new(8, 32), AtomicU64::new(0));
    let mut watch = watch_of(&mut ring, &errors, 0);
    let mut requests = vec![0u8; 4 * 64];
    for (i, (id, ah)) in [(0u16, 4u16), (0, 1), (5, 2), (7, 1)].into_iter().enumerate() {
        let meta = TxMetaDesc { req_id: id, ah, dest_qp_num: 10 + ah, qkey: 1, ..TxMetaDesc::ZERO };
        requests[i * 64..][..TxMetaDesc::SIZE].copy_from_slice(&meta.to_bytes());
    }
    watch.endpoints[0].ring = Some(RingView { buffer: requests.as_ptr(), entry_size: 64, entries: 4 });
    // Two of a peer's slots: signal and data endpoint.
    assert_eq!(watch.peers(0, 0), "rank 1");
    assert_eq!(watch.peers(0, 5), "rank 2");
    assert_eq!(watch.peers(0, 7), "rank 1");
}

/// Every peer whose request has the id is a suspect; free ring slots and unknown targets aren't.
#[test]
fn peers_that_share_an_id_are_all_named() {
    let (mut ring, errors) = (Ring::new(8, 32), AtomicU64::new(0));
    let mut watch = watch_of(&mut ring, &errors, 0);
    watch.nranks = 6;
    let requests_of = |peers: &[(u16, u32)]| {
        let mut bytes = vec![0u8; 8 * 128];
        for (i, (ah, qkey)) in peers.iter().enumerate() {
            let meta = TxMetaDesc { req_id: 40, ah: *ah, dest_qp_num: 10 + *ah, qkey: *qkey, ..TxMetaDesc::ZERO };
            bytes[i * 128..][..TxMetaDesc::SIZE].copy_from_slice(&meta.to_bytes());
        }
        bytes
    };
    for (peers, expected) in [
        (&[(2, 1), (2, 1)][..], "rank 2"),
        (&[(4, 1), (1, 1)], "rank 1 or 4"),
        (&[(0, 1), (3, 1), (5, 1)], "rank 0 or 3 or 5"),
        (&[(0, 1), (1, 1), (3, 1), (5, 1)], "one of 4 ranks"),
        (&[(2, 0), (9, 1)], "an unknown rank"),
    ] {
        let requests = requests_of(peers);
        watch.endpoints[0].ring = Some(RingView { buffer: requests.as_ptr(), entry_size: 128, entries: 8 });
        assert_eq!(watch.peers(0, 40), expected);
    }
}

#[test]
fn message_has_operation_and_fix_of_the_failure() {
    let (mut ring, errors) = (Ring::new(8, 32), AtomicU64::new(0));
    let watch = watch_of(&mut ring, &errors, 0);
    let text = |op: u8, status: u8| {
        let flags = CdescFlags(0).with_phase(true).with_op_type(op);
        watch.describe(0, CdescCommon { req_id: 1, status, flags, qp_num: 9 })
    };
    let of = |status: CompStatus| text(SendOp::RdmaWrite.raw(), status.raw());
    assert!(of(CompStatus::RemoteAbort).contains("a write to rank 1"));
    assert!(text(SendOp::RdmaRead.raw(), 7).contains("a read from rank 1"));
    assert!(text(SendOp::Send.raw(), 7).contains("a request to rank 1"));
    assert!(text(SendOp::Send.raw(), 250).contains("a status that this version does not know (status 250)"));
    for (status, fix) in [
        (CompStatus::LocalInvalidLkey, "source window"),
        (CompStatus::LocalBadLength, "source window"),
        (CompStatus::RemoteBadLength, "registered on the peer"),
        (CompStatus::RemoteBadDestQpn, "peer's log that it still runs"),
        (CompStatus::RemoteAbort, "peer's log that it still runs"),
        (CompStatus::RemoteUnknownPeer, "peer's log that it still runs"),
        (CompStatus::LocalUnresponsiveRemote, "security group"),
        (CompStatus::LocalUnreachableRemote, "security group"),
        (CompStatus::LocalInvalidAh, "below the number of ranks"),
        (CompStatus::LocalQpInternalError, "driver's log"),
    ] {
        assert!(of(status).contains(fix), "{}", of(status));
    }
}

#[test]
fn error_counter_alone_raises_fault_and_abort_flag() {
    let (mut ring, errors) = (Ring::new(8, 32), AtomicU64::new(0));
    let handle = registry::insert(Kind::Context, Arc::new(())).unwrap();
    let mut watch = watch_of(&mut ring, &errors, handle as usize);
    watch.round(Instant::now());
    assert_eq!((registry::fault(handle, Kind::Context), watch.report), (Ok(false), Report::Clean));
    // Like a card that counts an error.
    errors.store(1, Ordering::Relaxed);
    watch.round(Instant::now());
    assert_eq!(registry::fault(handle, Kind::Context), Ok(true));
    assert!(watch.stop.is_raised());
    for _ in 0..=ENTRY_ROUNDS {
        assert!(matches!(watch.report, Report::Counted(..)));
        watch.round(Instant::now());
    }
    assert_eq!(watch.report, Report::Done);
    registry::remove::<()>(handle, Kind::Context).unwrap();
}

#[test]
fn thread_reports_failures_and_ends_with_last_watch() {
    let mut ring = Ring::new(8, 32);
    let errors = Box::new(AtomicU64::new(0));
    let handle = registry::insert(Kind::Context, Arc::new(())).unwrap();
    let guard = super::watch(watch_of(&mut ring, &errors, handle as usize)).unwrap();
    for _ in 0..8 {
        ring.push(1, CompStatus::Ok);
    }
    wait_until("read of all completions", || {
        let of_test = |watch: &&Watch| watch.handle == handle as usize;
        table().watches.values().find(of_test).is_some_and(|watch| watch.endpoints[0].cq.consumed == 8)
    });
    assert_eq!(registry::fault(handle, Kind::Context), Ok(false));
    ring.push(1, CompStatus::LocalUnresponsiveRemote);
    wait_until("report", || registry::fault(handle, Kind::Context) == Ok(true));
    drop(guard);
    assert!(!table().watches.values().any(|watch| watch.handle == handle as usize));
    registry::remove::<()>(handle, Kind::Context).unwrap();
}
