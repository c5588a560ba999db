//! What all threads of a launch share, and why one of them can't continue.

use crate::cost::Places;
use crate::error::TrapKind;
use crate::launch::{Statistics, Time};
use crate::memory::{Refusal, View};
use crate::observer::Observer;
use crate::posts::Posts;
use crate::program::Program;
use crate::stores::{BulkCopy, Weak};

/// Why a thread can't continue.
#[derive(Debug)]
pub struct Fault {
    pub kind: TrapKind,
    pub cause: String,
}

impl Fault {
    pub fn new(kind: TrapKind, cause: impl Into<String>) -> Self {
        Self { kind, cause: cause.into() }
    }
}

/// What all threads of a launch share.
pub struct Core<'a> {
    pub program: &'a Program,
    pub templates: Vec<Vec<u64>>,
    pub view: View<'a>,
    pub statistics: Statistics,
    pub time: Time,
    /// Instructions since memory last changed.
    pub quiet: u64,
    pub weak: Option<Weak>,
    /// Bulk copies of blocks that have ended, which have read and not written yet.
    pub copies: Vec<BulkCopy>,
    /// The posts, if the launch checks them.
    pub posts: Option<Posts>,
    /// What the memory is, if the launch measures the cost of calls.
    pub places: Option<Places<'a>>,
    /// Which instructions of each function have been executed, if the caller asks for them.
    pub executed: Option<Vec<Vec<bool>>>,
    /// Learns what the threads do, if the caller asks for that; and the number of each function's first site.
    pub observer: Option<&'a mut dyn Observer>,
    pub sites: Vec<u32>,
}

impl Core<'_> {
    pub fn refused(&self, refusal: Refusal, what: &str, address: u64, bytes: u64) -> Fault {
        let cause = match refusal {
            Refusal::Misaligned => {
                format!("a {what} of {bytes} bytes at {address:#x}, which is not a multiple of {bytes}")
            }
            Refusal::ReadOnly => format!("a {what} of {bytes} bytes at {address:#x}, which is read-only"),
            Refusal::Outside => {
                format!("a {what} of {bytes} bytes at {address:#x}: {}", self.view.explain(address))
            }
        };
        Fault::new(refusal.kind(), cause)
    }
}
