//! SIGKILL to a rank at any moment, even during set-up: the other rank exits on its own, with an error, before its
//! deadline. A rank that gets SIGTERM dies from it, and one that is stopped is named.

use crate::common::{dist, over_efa, report, scenarios};
use ferrogin_test_support::{repetitions, wait};
use mini_nccl::launch::{Line, Outcome, Output, Signal};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Concurrent jobs: a job mostly waits.
const JOBS: usize = 4;

#[test]
#[ignore = "make check"]
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
    // splitmix64's multiplier spreads the moments, which are the same in every run.
    let moment = Duration::from_micros(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44);
    let (victim, wire) = ((number % 2) as usize, if number % 4 < 3 || over_efa() { "shm" } else { "tcp" });
    let job = scenarios(dist, 2).args(["--reps", "20000", "--deadline", "3"]).output(Output::Capture);
    let job = job.env("FERROGIN_TIMEOUT", "5").env("SOFTEFA_WIRE", wire);
    let mut running = job.start().map_err(|error| error.to_string())?;
    std::thread::sleep(moment);
    running.signal(victim, Signal::SIGKILL);
    let outcome = running.wait();
    let survivor = outcome.statuses[1 - victim].and_then(|status| status.code());
    let text = report(&outcome);
    if survivor != Some(1) || text.contains("panicked") {
        return Err(format!("kill {number} of rank {victim} after {moment:?} on {wire}: {text}"));
    }
    Ok(())
}

/// Runs a job whose rank 1 gets `signal` after set-up.
fn outcome_after(dist: &Path, signal: Signal, grace: Duration) -> Outcome {
    let job = scenarios(dist, 2).args(["--reps", "20000", "--deadline", "2"]).env("FERROGIN_TIMEOUT", "20");
    let mut running = job.grace(grace).start().expect("the job starts");
    let has_begun = |line: &Line| line.text.contains("2 ranks on") || line.stderr;
    wait::wait_until("end of set-up", || running.captured().iter().any(has_begun));
    running.signal(1, signal);
    running.wait()
}

/// A handler installed by one of libfabric's libraries would catch the signal, and also SIGINT, which the tests' parent
/// may ignore.
#[test]
fn rank_dies_by_its_own_signal() {
    let Some(dist) = dist("rank_dies_by_its_own_signal") else { return };
    let outcome = outcome_after(&dist, Signal::SIGTERM, wait::HANG_LIMIT);
    let [survivor, victim] = outcome.statuses[..] else { panic!("{}", report(&outcome)) };
    let seen = (survivor.and_then(|status| status.code()), victim.and_then(|status| status.signal()));
    assert_eq!(seen, (Some(1), Some(Signal::SIGTERM as i32)), "{}", report(&outcome));
}

/// The limit is FERROGIN_TIMEOUT plus four deadlines.
#[test]
#[ignore = "make check"]
fn stopped_rank_is_named_after_timeout() {
    let Some(dist) = dist("stopped_rank_is_named_after_timeout") else { return };
    let outcome = outcome_after(&dist, Signal::SIGSTOP, Duration::ZERO);
    let (text, failure) = (report(&outcome), outcome.failure.unwrap_or_default());
    assert!(text.contains("rank 1 at") && text.contains("within 28 s"), "{text}");
    assert!(failure.contains("rank 0: exit code 1") && failure.contains("rank 1: killed"), "{failure}");
}
