//! Any bytes are decoded, or refused with a reason, and never crash the tool.

use ferrogin_test_support::{Random, repetitions};
use soft_nic::trace::{RECORD_LEN, Record};
use zerocopy::{FromBytes, IntoBytes};

use super::event::{Event, Events};
use super::hex::{Entry, Kind};
use super::{chrome, read, table};

#[test]
fn entries_of_any_bytes_are_decoded_or_refused() {
    let mut random = Random::new(18);
    for _ in 0..repetitions("FERROGIN_TRACE_ENTRIES", 3000, 300_000) {
        let len = random.of(&[16, 32, 48, 64, 128, 192, 1008, 17, 0]);
        let mut entry = random.bytes(len);
        // An mlx5 work request with a known operation and a size that fits.
        if len >= 16 && random.one_in(2) {
            (entry[0], entry[3]) = (0, random.of(&[0, 1, 8, 9, 0x0a, 0x0b, 0x10, 0x11, 0x12, 0x25]));
            entry[7] = (len / 16) as u8;
        }
        for kind in Kind::ALL {
            match Entry::decode(Some(kind), &entry) {
                Ok(entry) => {
                    assert!(!entry.decoded.summary.is_empty() && !entry.decoded.fields.is_empty(), "{entry:?}");
                    assert!(entry.decoded.fields.iter().all(|field| field.at < len), "{entry:?}");
                    assert!(entry.text().lines().count() > 1 && entry.json()["bytes"] == len);
                }
                Err(why) => assert!(why.contains(kind.name()), "{why}"),
            }
        }
        if let Err(why) = Entry::decode(None, &entry) {
            assert!(why.contains("name the kind") || why.contains("queue-entry size"), "{why}");
        }
    }
}

#[test]
fn records_of_any_bytes_are_shown() {
    let mut random = Random::new(81);
    for _ in 0..repetitions("FERROGIN_TRACE_FILES", 60, 3000) {
        let mut file = Vec::new();
        for _ in 0..random.below(60) {
            let mut record = Record::read_from_bytes(&random.bytes(RECORD_LEN)).expect("a record's bytes");
            (record.magic, record.end) = (soft_nic::trace::MAGIC, soft_nic::trace::END);
            record.kind = random.below(9) as u8;
            record.size = random.of(&[0u16, 16, 32, 64, 128, 129]).into();
            // Few queue pairs and indices, so that records belong together.
            (record.process, record.card) = (random.below(2).into(), 0.into());
            (record.qpn, record.index) = ((random.below(2) as u16).into(), random.below(4).into());
            file.extend_from_slice(record.as_bytes());
            if random.one_in(20) {
                file.truncate(file.len() - random.index(RECORD_LEN));
            }
        }
        let all = Events::of(&[read::parse(&file).records]);
        let events: Vec<&Event> = all.events.iter().collect();
        let (mut text, mut lines, mut viewer) = (Vec::new(), Vec::new(), Vec::new());
        table::table(&mut text, &all, &events, true, 80).expect("a table");
        table::lines(&mut lines, &all, &events).expect("lines");
        chrome::write(&mut viewer, &all, &events).expect("a viewer's file");
        assert_eq!(String::from_utf8(lines).expect("text").lines().count(), events.len());
        serde_json::from_slice::<serde_json::Value>(&viewer).expect("JSON");
    }
}
