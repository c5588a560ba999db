//! What a rank tells the others of its contexts. Little endian, lengths before lists.

/// A rank's contexts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// By context id.
    pub contexts: Vec<ContextPart>,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextPart {
    /// Address and remote key of the scratch bytes.
    pub scratch: (u64, u32),
    /// Of the data endpoint, then of the signals' endpoints.
    pub addresses: Vec<Vec<u8>>,
}

impl Part {
    /// As bytes.
    pub fn emit(&self) -> Vec<u8> {
        let mut out = (self.contexts.len() as u32).to_le_bytes().to_vec();
        for context in &self.contexts {
            out.extend(context.scratch.0.to_le_bytes());
            out.extend(context.scratch.1.to_le_bytes());
            out.extend((context.addresses.len() as u32).to_le_bytes());
            for address in &context.addresses {
                out.extend((address.len() as u32).to_le_bytes());
                out.extend(address);
            }
        }
        out
    }

    /// From bytes; `None` if they are no such part.
    pub fn parse(mut bytes: &[u8]) -> Option<Self> {
        let bytes = &mut bytes;
        let contexts = list(bytes, |bytes| {
            let scratch = (u64::from_le_bytes(take(bytes)?), u32::from_le_bytes(take(bytes)?));
            let addresses = list(bytes, |bytes| {
                let len = u32::from_le_bytes(take(bytes)?) as usize;
                let (address, rest) = bytes.split_at_checked(len)?;
                *bytes = rest;
                Some(address.to_vec())
            })?;
            Some(ContextPart { scratch, addresses })
        })?;
        bytes.is_empty().then_some(Self { contexts })
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*head)
}

fn list<T>(bytes: &mut &[u8], mut one: impl FnMut(&mut &[u8]) -> Option<T>) -> Option<Vec<T>> {
    let count = u32::from_le_bytes(take(bytes)?) as usize;
    // Every element has at least four bytes.
    if count > bytes.len() / 4 {
        return None;
    }
    (0..count).map(|_| one(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_survive_the_wire_and_cuts_are_noticed() {
        let context = |i: u8| ContextPart {
            scratch: (u64::from(i) << 40, u32::from(i)),
            addresses: vec![vec![i; 32], vec![], vec![1, 2, 3]],
        };
        let part = Part { contexts: vec![context(1), context(2)] };
        let bytes = part.emit();
        assert_eq!(Part::parse(&bytes), Some(part));
        for cut in 0..bytes.len() {
            assert_eq!(Part::parse(&bytes[..cut]), None, "{cut} bytes");
        }
        assert_eq!(Part::parse(&[bytes.clone(), vec![0]].concat()), None);
        assert_eq!(Part::parse(&[0xff; 64]), None);
    }
}
