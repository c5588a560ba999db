//! Arbitrary bytes for the EFA card's engine: each function runs them as a small program and checks the invariants.
#![allow(unsafe_code)]

mod card;

use efa_dp_direct::cq::{Cqe, RawCqe};
use efa_dp_direct::wqe::{self, Geometry, RequestIds};
use soft_nic::fuzzing::{Input, initiate, respond};

use soft_nic::address::{Address, Gid};
use soft_nic::card::counter::Word;
use soft_nic::config::Config;
use soft_nic::fault::{COUNTER_MASK, Faults, MAX_SQ_SIZE};

pub use card::{rings, wires};

/// Up to four lines, each the value of an environment variable.
pub fn settings(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let lines: Vec<&str> = text.splitn(4, '\n').collect();
    let names = ["SOFTEFA_FAULTS", "SOFTEFA_WIRE", "SOFTEFA_NICS", "SOFTEFA_IFADDR"];
    let lookup = |name: &str| {
        let at = names.iter().position(|known| *known == name)?;
        lines.get(at).map(|line| (*line).to_owned())
    };
    match Config::from_lookup(lookup) {
        Err(error) => assert!(error.to_string().contains(&*error.variable)),
        Ok(config) => {
            let Faults { max_batch, sq_size, wqe_size, reread, cntr_start, delay_us, .. } = config.faults;
            assert!(sq_size.is_power_of_two() && (2..=MAX_SQ_SIZE).contains(&sq_size));
            assert!((1..=sq_size).contains(&max_batch));
            assert!(matches!(wqe_size, 64 | 128) && (0.0..=1.0).contains(&reread));
            assert!(u64::from(cntr_start) <= COUNTER_MASK && delay_us.0 <= delay_us.1);
            assert!((1..=64).contains(&config.nics));
        }
    }
}

/// Gives the bytes to every parser of what cards, peers and software write.
pub fn formats(data: &[u8]) {
    for geometry in [Geometry::V0, Geometry::NARROW, Geometry::WIDE] {
        let size = geometry.wqe_size.bytes();
        let mut slot = vec![0; size];
        let len = data.len().min(size);
        slot[..len].copy_from_slice(&data[..len]);
        if let Ok(request) = wqe::parse(&slot, &geometry) {
            // A parsed request survives a round trip.
            let mut emitted = vec![0xa5; size];
            request.emit(&geometry, &mut emitted).expect("a parsed request fits");
            assert_eq!(wqe::parse(&emitted, &geometry), Ok(request));
        }
        let _ = wqe::parse(data, &geometry);
    }
    let mut raw = RawCqe::ZERO;
    let len = data.len().min(raw.0.len());
    raw.0[..len].copy_from_slice(&data[..len]);
    for ids in [RequestIds::Bits16, RequestIds::Bits64] {
        if let Ok(entry) = Cqe::parse(&raw, ids) {
            let emitted = entry.emit(raw.common().flags.phase());
            assert!(Cqe::parse(&emitted, RequestIds::Bits64).is_ok());
        }
    }
    let mut stream = Input::with(data);
    let mut at = 0;
    while let Ok(Some((header, _))) = stream.peek() {
        let head = header.to_bytes();
        assert_eq!(data[at..at + head.len()], head);
        at += head.len() + header.len as usize;
        stream.pop(head.len() + header.len as usize);
        assert!(at <= data.len(), "a packet beyond what arrived");
    }
    if let Some(bytes) = data.first_chunk::<32>() {
        if let Ok(address) = Address::from_bytes(bytes) {
            assert_eq!(Address::from_bytes(&address.to_bytes()), Ok(address));
        }
        if let Some(gid) = bytes.first_chunk::<16>().and_then(|gid| Gid::from_bytes(*gid).ok()) {
            assert_eq!(Gid::from_bytes(gid.to_bytes()), Ok(gid));
            handshakes(data, gid);
        }
    }
    let mut word = Word::own(0);
    for value in data.chunks(8) {
        word.add(value.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)));
    }
    // SAFETY: `word` keeps its memory alive.
    let value = unsafe { soft_nic::memory::load_acquire(word.address()) };
    assert!(value <= COUNTER_MASK);
}

/// Gives the bytes to both sides of a handshake.
fn handshakes(data: &[u8], initiator: Gid) {
    let mut target = initiator;
    target.secret[0] ^= 1;
    let calling = initiate(&initiator, &target).expect("a nonce");
    let accepted = respond(&target, &calling.hello()).expect("a good hello");
    if let Some(bytes) = data.first_chunk() {
        assert!(respond(&target, bytes).is_err(), "no hello");
    }
    if let Some(bytes) = data.first_chunk() {
        assert!(calling.welcomed(bytes).is_err(), "no answer");
    }
    if let Some(bytes) = data.first_chunk() {
        assert!(accepted.responder.confirmed(bytes).is_err(), "no confirm");
    }
    let confirm = calling.welcomed(&accepted.welcome).expect("a good answer");
    assert_eq!(accepted.responder.confirmed(&confirm), Ok(()));
}
