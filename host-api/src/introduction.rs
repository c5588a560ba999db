//! The block of the single allgather in open. From it, ranks learn how to reach each other, and whether they can work
//! together.

use crate::error::Error;
use crate::lsa::{Entrance, NAME_MAX};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use nccl_gin_ferrogin::config::Config;
use nccl_gin_ferrogin::log::counted;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 8] = *b"ferrogin";
/// The version of this block.
const VERSION: u32 = 3;

/// A rank's block. Texts end at the first NUL byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Introduction {
    magic: [u8; 8],
    version: U32,
    rank: U32,
    ranks: U32,
    /// 1 if the rank failed; then `text` is its error and the following fields are zero.
    failed: U32,
    release: [u8; 24],
    provider: [u8; 24],
    handle: [u8; HANDLE_MAXSIZE],
    node: [u8; NAME_MAX + 1],
    socket: [u8; 32],
    text: [u8; 512],
}

ferrogin_ffi::assert_layout!(Introduction, size 936, align 1, {
    magic @ 0, version @ 8, rank @ 12, ranks @ 16, failed @ 20, release @ 24, provider @ 48, handle @ 72, node @ 200, socket @ 392,
    text @ 424,
});

/// What a rank that is ready tells the others.
#[derive(Clone, Copy)]
pub struct Ready<'a> {
    /// Its settings.
    pub config: &'a Config,
    /// Where it listens for the other ranks.
    pub handle: [u8; HANDLE_MAXSIZE],
    /// Its node, and where it listens for the ranks of that node.
    pub entrance: &'a Entrance,
}

/// What a rank learns about another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Where it listens.
    pub handle: [u8; HANDLE_MAXSIZE],
    /// Its node, and the socket for ranks of that node.
    pub node: (String, String),
}

/// Returns `text` as a field, shortened to whole characters and a NUL byte.
fn field<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let end = (0..N.min(text.len() + 1)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    bytes
}

fn text(field: &[u8]) -> String {
    let bytes = field.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

impl Introduction {
    /// Creates the block of a rank: its settings and listener handle if it's ready to connect, otherwise the text of
    /// its error.
    pub fn new(rank: usize, ranks: usize, ready: Result<Ready<'_>, String>) -> Self {
        let mut block = Self {
            magic: MAGIC,
            version: VERSION.into(),
            rank: (rank as u32).into(),
            ranks: (ranks as u32).into(),
            failed: 0.into(),
            release: field(env!("CARGO_PKG_VERSION")),
            provider: [0; 24],
            handle: [0; HANDLE_MAXSIZE],
            node: [0; NAME_MAX + 1],
            socket: [0; 32],
            text: [0; 512],
        };
        match ready {
            Ok(ready) => {
                block.provider = field(ready.config.provider.name());
                block.handle = ready.handle;
                block.node = field(&ready.entrance.node);
                block.socket = field(&ready.entrance.socket);
            }
            Err(error) => {
                block.failed = 1.into();
                block.text = field(&error);
            }
        }
        block
    }

    /// Checks the allgather's blocks, and returns what they say about each rank.
    ///
    /// # Errors
    /// A block is invalid; a rank failed; two ranks differ in the number of ranks, the release or the settings.
    pub fn compare(&self, blocks: &[Vec<u8>]) -> Result<Vec<Peer>, Error> {
        let (own, ranks) = (self.rank.get(), self.ranks.get());
        if blocks.len() != ranks as usize {
            return Err(Error::Allgather(format!(
                "it returned the blocks of {} to rank {own} of {ranks}: it must return one block from each rank",
                counted(blocks.len(), "rank")
            )));
        }
        let all = blocks.iter().enumerate().map(|(rank, bytes)| {
            let block = Self::ref_from_bytes(bytes).ok().filter(|block| block.magic == MAGIC);
            block.ok_or_else(|| {
                Error::Allgather(format!(
                    "it returned no valid block of rank {rank}: it must copy all {} bytes of each rank, in rank \
                     order, and every rank must run the same ferrogin",
                    size_of::<Self>()
                ))
            })
        });
        let all = all.collect::<Result<Vec<_>, _>>()?;
        for (rank, other) in all.iter().enumerate() {
            let differs = |what: &str, theirs: &dyn std::fmt::Display, ours: &dyn std::fmt::Display, fix: &str| {
                Error::Disagreement(format!(
                    "rank {rank} has {what} {theirs}, but rank {own} has {ours}: {fix} on all ranks"
                ))
            };
            if other.version != self.version || other.release != self.release {
                let (theirs, ours) = (text(&other.release), text(&self.release));
                return Err(differs("ferrogin", &theirs, &ours, "run the same ferrogin"));
            }
            if other.ranks != self.ranks {
                return Err(differs("a number of ranks of", &other.ranks, &self.ranks, "pass the same number"));
            }
            if other.rank.get() as usize != rank {
                return Err(Error::Disagreement(format!(
                    "the process at position {rank} of the allgather opened as rank {}: every process must open with \
                     its rank in the allgather",
                    other.rank
                )));
            }
        }
        if let Some(failed) = all.iter().find(|block| block.failed.get() != 0) {
            return Err(Error::Peer { rank: failed.rank.get() as usize, text: text(&failed.text) });
        }
        for (rank, other) in all.iter().enumerate() {
            if other.provider != self.provider {
                return Err(Error::Disagreement(format!(
                    "rank {rank} has FERROGIN_PROVIDER={}, but rank {own} has FERROGIN_PROVIDER={}: set it to the same value on all ranks",
                    text(&other.provider),
                    text(&self.provider)
                )));
            }
        }
        let peer = |block: &&Self| Peer { handle: block.handle, node: (text(&block.node), text(&block.socket)) };
        Ok(all.iter().map(peer).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(provider: &str) -> Config {
        Config::from_lookup(|name| (name == "FERROGIN_PROVIDER").then(|| provider.into())).unwrap()
    }

    fn block(rank: usize, ranks: usize, provider: &str) -> Introduction {
        let entrance = Entrance::alone();
        let ready = Ready { config: &config(provider), handle: [rank as u8; HANDLE_MAXSIZE], entrance: &entrance };
        Introduction::new(rank, ranks, Ok(ready))
    }

    fn compared(own: &Introduction, all: &[Introduction]) -> Result<Vec<[u8; HANDLE_MAXSIZE]>, String> {
        let blocks: Vec<Vec<u8>> = all.iter().map(|block| block.as_bytes().to_vec()).collect();
        let peers = own.compare(&blocks).map_err(|error| error.to_string())?;
        Ok(peers.iter().map(|peer| peer.handle).collect())
    }

    #[test]
    fn ranks_that_agree_get_all_handles() {
        let all = [block(0, 2, "softefa"), block(1, 2, "softefa")];
        assert_eq!(compared(&all[1], &all), Ok(vec![[0; HANDLE_MAXSIZE], [1; HANDLE_MAXSIZE]]));
    }

    #[test]
    fn ranks_that_disagree_are_told_both_values() {
        let own = block(0, 2, "softefa");
        let failed = Introduction::new(1, 2, Err("no card: é".repeat(100)));
        let other = |change: fn(&mut Introduction)| {
            let mut block = block(1, 2, "softefa");
            change(&mut block);
            block
        };
        for (other, expected) in [
            (block(1, 2, "efa"), "rank 1 has FERROGIN_PROVIDER=efa, but rank 0 has FERROGIN_PROVIDER=softefa"),
            (block(1, 3, "softefa"), "rank 1 has a number of ranks of 3, but rank 0 has 2"),
            (block(0, 2, "softefa"), "the process at position 1 of the allgather opened as rank 0"),
            (failed, "rank 1 failed in open: no card: é"),
            (other(|block| block.release = field("9.9")), "rank 1 has ferrogin 9.9, but rank 0 has"),
            (other(|block| block.magic = [0; 8]), "it returned no valid block of rank 1"),
        ] {
            let error = compared(&own, &[own, other]).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        assert!(compared(&own, &[own]).unwrap_err().contains("the blocks of 1 rank to rank 0 of 2"));
    }

    #[test]
    fn fields_hold_whole_characters() {
        assert_eq!(&field::<4>("aéé"), b"a\xc3\xa9\0");
        assert_eq!(&field::<4>("ab"), b"ab\0\0");
        assert_eq!(text(&field::<4>("abcdef")), "abc");
    }
}
