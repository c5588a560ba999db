//! `ferrogin trace --hex`: decodes a work request or completion from hexadecimal digits.

use efa_dp_direct::wire::RxDesc;

use super::fields::Decoded;
use super::{efa, mlx5};

/// What the bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    EfaWqe,
    EfaCqe,
    EfaReceive,
    Mlx5Wqe,
    Mlx5Cqe,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::EfaWqe, Self::EfaCqe, Self::Mlx5Wqe, Self::Mlx5Cqe, Self::EfaReceive];

    pub fn name(self) -> &'static str {
        match self {
            Self::EfaWqe => "efa-wqe",
            Self::EfaCqe => "efa-cqe",
            Self::EfaReceive => "efa-receive",
            Self::Mlx5Wqe => "mlx5-wqe",
            Self::Mlx5Cqe => "mlx5-cqe",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the sizes that this kind of entry may have.
    fn sizes(self) -> &'static str {
        match self {
            Self::EfaWqe => "64 or 128 bytes",
            Self::EfaCqe => "16 or 32 bytes",
            Self::EfaReceive => "16 or 32 bytes, for one or two buffers",
            Self::Mlx5Wqe => "16 to 1008 bytes, a multiple of 16",
            Self::Mlx5Cqe => "64 bytes",
        }
    }

    fn has_size(self, bytes: usize) -> bool {
        match self {
            Self::EfaWqe => matches!(bytes, 64 | 128),
            Self::EfaCqe => matches!(bytes, 16 | 32),
            Self::EfaReceive => matches!(bytes, RxDesc::SIZE | 32),
            // The rest of the last block may be included.
            Self::Mlx5Wqe => bytes.is_multiple_of(16) && (16..=1024).contains(&bytes),
            Self::Mlx5Cqe => bytes == 64,
        }
    }

    fn decode(self, bytes: &[u8]) -> Decoded {
        match self {
            Self::EfaWqe => efa::work_request(bytes),
            Self::EfaCqe => efa::completion(bytes),
            Self::EfaReceive => efa::receive(bytes),
            Self::Mlx5Wqe => mlx5::work_request(bytes),
            Self::Mlx5Cqe => mlx5::completion(bytes),
        }
    }
}

/// Reads hexadecimal digits. Ignores spaces, colons, commas and underscores between them, `0x` before words, and
/// everything up to a line's last `: `, so that it accepts lines from a debugger or the card's log.
pub fn bytes(text: &str) -> Result<Vec<u8>, String> {
    let mut digits = Vec::new();
    for line in text.lines() {
        for word in after_label(line).split(|c: char| c.is_whitespace() || matches!(c, ':' | ',' | '_')) {
            for digit in word.strip_prefix("0x").or_else(|| word.strip_prefix("0X")).unwrap_or(word).chars() {
                let value = digit.to_digit(16).ok_or_else(|| {
                    format!(
                        "{digit:?} is not a hexadecimal digit: give the bytes in memory order, like 1120ab... or 11 20 ab ..."
                    )
                })?;
                digits.push(value as u8);
            }
        }
    }
    let (pairs, rest) = digits.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(format!("{} hexadecimal digits are not whole bytes: each byte has two", digits.len()));
    }
    Ok(pairs.iter().map(|[high, low]| high << 4 | low).collect())
}

fn after_label(line: &str) -> &str {
    let end = [": ", ":\t"].into_iter().filter_map(|label| line.rfind(label)).max();
    end.map_or(line, |end| &line[end + 2..])
}

/// A decoded entry, and how its kind was found.
#[derive(Debug)]
pub struct Entry {
    pub kind: Kind,
    pub bytes: usize,
    /// Other kinds that the bytes may be, if the kind was not named.
    pub others: Vec<Kind>,
    pub decoded: Decoded,
}

impl Entry {
    /// Decodes bytes as `kind`, or as the only kind that they can be.
    pub fn decode(kind: Option<Kind>, bytes: &[u8]) -> Result<Self, String> {
        let size = bytes.len();
        if let Some(kind) = kind {
            if !kind.has_size(size) {
                return Err(format!("{size} bytes are not a valid {}: it has {}", kind.name(), kind.sizes()));
            }
            return Ok(Self { kind, bytes: size, others: Vec::new(), decoded: kind.decode(bytes) });
        }
        let of_size: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| kind.has_size(size)).collect();
        if of_size.is_empty() {
            let all: Vec<String> = Kind::ALL.map(|kind| format!("{} has {}", kind.name(), kind.sizes())).into();
            return Err(format!("{size} bytes is not a valid queue-entry size: {}", all.join("; ")));
        }
        let names = |kinds: &[Kind]| kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ");
        if bytes.iter().all(|byte| *byte == 0) {
            return Err(format!(
                "all {size} bytes are zero, as in a slot that was never written: name the kind ({})",
                names(&of_size)
            ));
        }
        let valid =
            of_size.iter().map(|kind| (*kind, kind.decode(bytes))).filter(|(_, decoded)| decoded.problems.is_empty());
        let mut valid = valid.collect::<Vec<_>>().into_iter();
        let Some((kind, decoded)) = valid.next() else {
            return Err(format!(
                "the {size} bytes are not a valid entry: name the kind to see the fields ({})",
                names(&of_size)
            ));
        };
        Ok(Self { kind, bytes: size, others: valid.map(|(kind, _)| kind).collect(), decoded })
    }

    pub fn text(&self) -> String {
        let mut text = format!("{}: {}\n", self.kind.name(), self.decoded.summary);
        if !self.others.is_empty() {
            let others: Vec<&str> = self.others.iter().map(|kind| kind.name()).collect();
            text += &format!("(The bytes may also be {}: name the kind to choose.)\n", others.join(" or "));
        }
        text + &self.decoded.lines("")
    }

    pub fn json(&self) -> serde_json::Value {
        let mut value = self.decoded.json();
        value["kind"] = self.kind.name().into();
        value["bytes"] = self.bytes.into();
        value["others"] = self.others.iter().map(|kind| kind.name()).collect::<Vec<_>>().into();
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_of_logs_and_debuggers_are_read() {
        for text in [
            "1120ab",
            "11 20 ab",
            "0x11 0x20 0xab",
            "11:20:ab",
            "1120_AB\n",
            "11,20,ab",
            "0x7f001000: 0x11 0x20 0xab",
            "0x7f001000 <ring+64>:\t0x11\t0x20\t0xab",
            "softefa0: QP 3 slot 17: a rule; request 8209: 1120ab",
            "11\n20\nab",
        ] {
            assert_eq!(bytes(text), Ok(vec![0x11, 0x20, 0xab]), "{text}");
        }
        assert_eq!(bytes(""), Ok(vec![]));
        assert!(bytes("1120a").unwrap_err().contains("5 hexadecimal digits"));
        assert!(bytes("11 2g").unwrap_err().contains("'g' is not a hexadecimal digit"));
    }
}
