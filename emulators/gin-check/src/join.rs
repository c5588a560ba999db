//! Joins the records of all processes: what the card did with requests, against what kernels and hosts did with the
//! same memory.

use crate::event::Record;
use crate::pass::{Bytes, Pass};
use crate::report::{Report, merge};
use crate::rules::Rules;
use crate::run::Run;
use std::collections::BTreeSet;

/// The most requests that the join takes; beyond them, it reports races inside launches only.
pub const MAX_REQUESTS: usize = 1 << 17;

/// Returns the mistakes in the records of all processes, one list per file.
pub fn join(files: &[Vec<Record>]) -> Vec<Report> {
    let mut run = Run::new(files);
    let mut reports = std::mem::take(&mut run.races);
    if run.requests.len() > MAX_REQUESTS {
        return reports;
    }
    let bytes = Bytes::new(&run);
    let mut known = vec![None; run.requests.len()];
    let mut found = BTreeSet::new();
    loop {
        let mut pass = Pass::new(&run, &bytes, &known);
        pass.run(|_, _| {});
        let now = pass.acquired;
        known = pass.known;
        // Orders that contradict each other come back in turn.
        if !found.insert(now) {
            break;
        }
    }
    let mut rules = Rules::default();
    Pass::new(&run, &bytes, &known).run(|pass, at| rules.check(pass, at));
    merge(&mut reports, rules.finish(&run));
    reports
}
