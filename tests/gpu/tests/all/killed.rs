//! SIGKILL of a rank at any moment, also during set-up: the other rank ends by itself, with an error, before its deadline.

use crate::common::{dist, over_efa, report, scenarios};
use ferrogin_test_support::repetitions;
use mini_nccl::launch::{Output, Signal};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Jobs at the same time, because a run mostly waits.
const JOBS: usize = 4;
/// Limit for the end of the other rank: its deadline, the timeout of set-up, and the delays of a busy machine.
const LIMIT: Duration = Duration::from_secs(180);

#[test]
fn rank_killed_at_any_moment_fails_other_rank() {
    let Some(dist) = dist("rank_killed_at_any_moment_fails_other_rank") else { return };
    let kills = repetitions("FERROGIN_KILLS_OF_SCENARIOS", 16, 160);
    let (next, failures) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..JOBS {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= kills {
                        return;
                    }
                    if let Err(problem) = kill(&dist, number) {
                        failures.lock().unwrap().push(problem);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn kill(dist: &Path, number: u64) -> Result<(), String> {
    // splitmix64's multiplier spreads the moments, which are the same in each run.
    let moment = Duration::from_micros(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44);
    let (victim, wire) = ((number % 2) as usize, if number % 4 < 3 || over_efa() { "shm" } else { "tcp" });
    let job = scenarios(dist, 2).args(["--reps", "20000", "--deadline", "3"]).output(Output::Capture);
    let job = job.env("FERROGIN_TIMEOUT", "5").env("SOFTEFA_WIRE", wire).grace(LIMIT);
    let mut running = job.start().map_err(|error| error.to_string())?;
    std::thread::sleep(moment);
    running.signal(victim, Signal::SIGKILL);
    let killed = Instant::now();
    let outcome = running.wait();
    let survivor = outcome.statuses[1 - victim].and_then(|status| status.code());
    let text = report(&outcome);
    if survivor != Some(1) || text.contains("panicked") {
        let took = killed.elapsed();
        return Err(format!("kill {number} of rank {victim} after {moment:?} on {wire}, over after {took:?}: {text}"));
    }
    Ok(())
}
