//! What all threads of a launch share, and why one of them cannot go on.

use crate::error::TrapKind;
use crate::launch::{Statistics, Time};
use crate::memory::{Refusal, View};
use crate::program::Program;
use crate::stores::Weak;

/// Why a thread cannot go on.
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
    /// Instructions since the last change of memory.
    pub quiet: u64,
    pub weak: Option<Weak>,
    /// The addresses of doorbells, if the launch counts what a call costs.
    pub doorbells: Option<&'a [u64]>,
    /// The instructions of each function that a thread has executed, if the caller asks for them.
    pub executed: Option<Vec<Vec<bool>>>,
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
