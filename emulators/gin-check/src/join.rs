//! Joins the records of all processes.

use std::collections::HashMap;

use crate::event::{Event, NO_RANK, Record};
use crate::report::{Access, Kind, Report};

/// What a process's records say about its kernels.
#[derive(Default)]
struct Process {
    rank: Option<u32>,
    /// Lines by place.
    places: HashMap<u32, Vec<String>>,
    /// Kernels by launch.
    kernels: HashMap<u64, String>,
}

impl Process {
    fn new(records: &[Record]) -> Self {
        let mut process = Self::default();
        for record in records {
            match &record.event {
                Event::Process { rank, .. } => process.rank = Some(*rank).filter(|rank| *rank != NO_RANK),
                Event::Place { place, lines, .. } => {
                    process.places.insert(*place, lines.lines().map(str::to_owned).collect());
                }
                Event::Launch { launch, kernel, .. } => {
                    process.kernels.insert(*launch, kernel.clone());
                }
                _ => {}
            }
        }
        process
    }

    fn access(&self, launch: u64, place: u32, what: &str) -> Access {
        let kernel = self.kernels.get(&launch).cloned().unwrap_or_default();
        Access {
            rank: self.rank,
            kernel,
            what: what.into(),
            lines: self.places.get(&place).cloned().unwrap_or_default(),
        }
    }
}

/// Returns the mistakes in the records of all processes, one list per file.
pub fn join(files: &[Vec<Record>]) -> Vec<Report> {
    files.iter().flat_map(|records| races(&Process::new(records), records)).collect()
}

/// The races that were found inside launches.
fn races(process: &Process, records: &[Record]) -> Vec<Report> {
    let report = |record: &Record| {
        let Event::Raced { launch, first, second, flags, address, bytes, count, .. } = record.event else {
            return None;
        };
        let what = |writes: bool| if writes { "store" } else { "load" };
        let unwritten = flags & 8 != 0;
        Some(Report {
            kind: if unwritten { Kind::Unwritten } else { Kind::Race },
            first: process.access(launch, if unwritten { second } else { first }, what(flags & 1 != 0 && !unwritten)),
            second: (!unwritten).then(|| process.access(launch, second, what(flags & 2 != 0))),
            memory: if flags & 4 != 0 {
                format!("shared memory at {address:#x}")
            } else {
                format!("global memory at {address:#x}")
            },
            bytes: bytes.into(),
            count,
            lenient_too: true,
        })
    };
    records.iter().filter_map(report).collect()
}
