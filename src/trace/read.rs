//! Reads the files that software cards wrote.

use std::path::Path;

use soft_nic::trace::{self, MAGIC, RECORD_LEN, Record};

/// One file's records, and what is wrong with the file.
#[derive(Debug)]
pub struct Contents {
    pub records: Vec<Record>,
    pub damage: Option<String>,
}

/// Reads a file.
///
/// # Errors
/// The file cannot be read, or is not a trace.
pub fn read(path: &Path) -> Result<Contents, String> {
    let name = path.display();
    let bytes = std::fs::read(path).map_err(|error| format!("cannot read {name}: {error}"))?;
    if bytes.is_empty() {
        return Err(format!("{name} is empty: no card was opened with SOFTEFA_TRACE={name}"));
    }
    if let Some(why) = trace::refuse(&bytes[..bytes.len().min(MAGIC.len())]) {
        return Err(format!("{name} {why}"));
    }
    let contents = parse(&bytes);
    if contents.records.is_empty() {
        return Err(format!("{name} {}", contents.damage.unwrap_or_default()));
    }
    Ok(Contents { damage: contents.damage.map(|damage| format!("{name} {damage}")), ..contents })
}

/// Finds the records in these bytes. If a process ended in the middle of a record, continues with the next one.
pub fn parse(bytes: &[u8]) -> Contents {
    let (mut records, mut at, mut lost, mut first) = (Vec::with_capacity(bytes.len() / RECORD_LEN), 0, 0, None);
    while at < bytes.len() {
        if let Some(record) = Record::parse(&bytes[at..]) {
            records.push(record);
            at += RECORD_LEN;
            continue;
        }
        first.get_or_insert(at);
        let rest = &bytes[at + 1..];
        let found = rest.windows(MAGIC.len()).enumerate();
        let next = found.filter(|(_, window)| **window == MAGIC).find(|(n, _)| Record::parse(&rest[*n..]).is_some());
        let end = next.map_or(bytes.len(), |(n, _)| at + 1 + n);
        lost += end - at;
        at = end;
    }
    let damage = first.map(|first| {
        format!(
            "is damaged: {lost} of its {} bytes, the first at offset {first}, are not a whole record of {RECORD_LEN} \
             bytes. The disk was full, a process was killed while writing, or part of the file is missing",
            bytes.len()
        )
    });
    Contents { records, damage }
}

#[cfg(test)]
mod tests {
    use super::*;
    use soft_nic::trace::Kind;
    use zerocopy::IntoBytes;

    fn record(qpn: u16) -> Vec<u8> {
        Record::new(Kind::Request, qpn).as_bytes().to_vec()
    }

    #[test]
    fn reader_finds_records_behind_damage() {
        let whole = [record(1), record(2), record(3)].concat();
        let numbers = |bytes: &[u8]| {
            let contents = parse(bytes);
            (contents.records.iter().map(|record| record.qpn.get()).collect::<Vec<_>>(), contents.damage.is_some())
        };
        assert_eq!(numbers(&whole), (vec![1, 2, 3], false));
        assert_eq!(numbers(&whole[..2 * RECORD_LEN + 1]), (vec![1, 2], true));
        assert_eq!(numbers(&[&record(1)[..100], &record(2)].concat()), (vec![2], true));
        assert_eq!(numbers(&[&whole[..], b"sft\x01"].concat()), (vec![1, 2, 3], true));
        let mut broken = whole.clone();
        broken[RECORD_LEN + 4] = 99;
        assert_eq!(numbers(&broken), (vec![1, 3], true));
        let damage = parse(&broken).damage.unwrap();
        assert!(damage.contains("196 of its 588 bytes, the first at offset 196"), "{damage}");
    }
}
