use super::*;
use crate::device::cpu::CpuDevice;
use crate::device::{Device, DeviceBuffer, Use};
use crate::isolation::Tables;
use crate::registry::{self, Kind};
use efa_dp_direct::wire::CdescFlags;
use ferrogin_test_support::{child, wait::wait_until};
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
        ..Watch::of(handle, 3)
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
fn cause_is_reported_rather_than_flushed_requests() {
    let (mut ring, errors) = (Ring::new(8, 32), AtomicU64::new(0));
    let mut watch = watch_of(&mut ring, &errors, 0);
    watch.output = Output::Closer(None);
    for (rank, status) in [(0, CompStatus::Flushed), (2, CompStatus::RemoteAbort), (1, CompStatus::RemoteAbort)] {
        ring.push(rank, status);
    }
    watch.round(Instant::now());
    assert!(matches!(watch.output, Output::Closer(Some(text)) if text.contains("a write to rank 2 ")));
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

/// Runs `body` with a watch that isolates peers, its two endpoints' rings, and the first one's error counter.
fn with_isolated_peers(body: impl FnOnce(&mut Watch, &LostRanks, &mut Ring, &AtomicU64)) {
    let (mut ring, errors) = (Ring::new(64, 32), AtomicU64::new(0));
    let (mut other_ring, other_errors) = (Ring::new(8, 32), AtomicU64::new(0));
    let handle = registry::insert(Kind::Context, Arc::new(())).unwrap();
    let mut watch = watch_of(&mut ring, &errors, handle as usize);
    watch.endpoints.append(&mut watch_of(&mut other_ring, &other_errors, 0).endpoints);
    let (device, lost) = (CpuDevice::new(false), Arc::<LostRanks>::default());
    let buffer: Arc<dyn DeviceBuffer> = device.allocate(16, Use::Card).unwrap().into();
    let words = watch.stop.words_before(&device, buffer);
    let tables = Tables { words, targets: Vec::new(), losses: vec![0, 8], stop: watch.stop.clone() };
    watch.isolation = Some(Arc::new(Isolation::new(lost.clone(), watch.nranks, tables)));
    watch.output = Output::Closer(None);
    body(&mut watch, &lost, &mut ring, &errors);
    let has_failed = watch.report == Report::Done;
    assert_eq!((registry::fault(handle, Kind::Context), watch.stop.is_raised()), (Ok(has_failed), has_failed));
    assert!(matches!(watch.output, Output::Closer(text) if text.is_some() == has_failed));
    registry::remove::<()>(handle, Kind::Context).unwrap();
}

#[test]
fn failed_requests_to_lost_ranks_are_counted_and_end_nothing_else() {
    let test = "failed_requests_to_lost_ranks_are_counted_and_end_nothing_else";
    let body = |watch: &mut Watch, lost: &LostRanks, ring: &mut Ring, errors: &AtomicU64| {
        watch.output = Output::Log;
        let (isolation, mut now) = (watch.isolation.clone().unwrap(), Instant::now());
        let mut rounds = |watch: &mut Watch| {
            for _ in 0..=2 * ENTRY_ROUNDS {
                now += Duration::from_millis(1);
                watch.round(now);
            }
        };
        // The card counts the failure before it writes the entry.
        errors.store(1, Ordering::Relaxed);
        watch.round(Instant::now());
        ring.push(RANK_ID | 1, CompStatus::RemoteAbort);
        rounds(watch);
        assert!(lost.reason(1).unwrap().starts_with("a write to rank 1 "), "{lost:?}");
        // An address that isn't registered, as that rank has ended.
        errors.store(2, Ordering::Relaxed);
        ring.push(RANK_ID | 1, CompStatus::RemoteBadAddress);
        rounds(watch);
        assert_eq!((isolation.counted(0), watch.suspects.len()), (2, 0));
        // While the context closes, a loss is no news. Rank 2 may have ended, and the others say so.
        watch.output = Output::Closer(None);
        errors.store(3, Ordering::Relaxed);
        ring.push(RANK_ID | 2, CompStatus::RemoteBadAddress);
        rounds(watch);
        assert_eq!((isolation.counted(0), watch.suspects.len()), (2, 1));
        lost.add(2, || "it has ended".to_owned());
        rounds(watch);
        assert_eq!((isolation.counted(0), watch.suspects.len()), (3, 0));
        assert_eq!((isolation.lost_ranks(), watch.report), (vec![1, 2], Report::Clean));
        assert_eq!(watch.endpoints[0].failures.load(Ordering::Relaxed), 3);
    };
    let lines = child::run(test, &[], || with_isolated_peers(body));
    assert!(lines.is_none_or(|lines| lines.matches(" is lost: ").count() == 1));
}

#[test]
fn failure_that_no_lost_rank_explains_ends_a_context_that_isolates_peers() {
    // The others don't say that the ranks are lost.
    with_isolated_peers(|watch, _, ring, errors| {
        let now = Instant::now();
        errors.store(2, Ordering::Relaxed);
        [2, 1].into_iter().for_each(|rank| ring.push(RANK_ID | rank, CompStatus::RemoteBadAddress));
        for at in [Duration::ZERO, SUSPECT_LIMIT - Duration::from_millis(1)] {
            watch.round(now + at);
            assert_eq!((watch.report, watch.suspects.len()), (Report::Clean, 2));
        }
        watch.round(now + SUSPECT_LIMIT);
        assert!(matches!(&watch.output, Output::Closer(Some(text)) if text.contains("a write to rank 2 ")));
    });
    with_isolated_peers(|watch, _, ring, errors| {
        errors.store(1, Ordering::Relaxed);
        ring.push(RANK_ID | 1, CompStatus::LocalInvalidLkey);
        watch.round(Instant::now());
        assert_eq!(watch.report, Report::Done);
    });
    // The entry never comes.
    with_isolated_peers(|watch, _, _, errors| {
        errors.store(1, Ordering::Relaxed);
        for _ in 0..=ENTRY_ROUNDS {
            watch.round(Instant::now());
            assert!(matches!(watch.report, Report::Counted(_, Some(0))) && !watch.stop.is_raised());
        }
        watch.round(Instant::now());
        assert_eq!(watch.report, Report::Done);
    });
    with_isolated_peers(|watch, lost, _, _| {
        lost.give_up("the others go on".to_owned());
        lost.give_up("later".to_owned());
        watch.round(Instant::now());
        let output = std::mem::replace(&mut watch.output, Output::Closer(None));
        assert_eq!(output, Output::Closer(Some("the others go on".to_owned())));
        watch.round(Instant::now());
        assert_eq!(std::mem::replace(&mut watch.output, output), Output::Closer(None), "reported once");
    });
}
