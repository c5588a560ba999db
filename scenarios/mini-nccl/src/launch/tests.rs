use super::*;
use ferrogin_test_support::wait::HANG_LIMIT;

fn sh(script: &str, ranks: usize) -> Job {
    Job::new("/bin/sh", ranks).args(["-c", script]).output(Output::Capture).timeout(HANG_LIMIT)
}

#[test]
fn ranks_get_their_identity() {
    let outcome = sh("echo r=$FERROGIN_RANK n=$FERROGIN_NRANKS b=$FERROGIN_BOOTSTRAP x=$X; echo e >&2", 3)
        .env("X", "7")
        .run()
        .unwrap();
    assert!(outcome.success(), "{outcome:?}");
    for rank in 0..3 {
        let line = outcome.lines.iter().find(|line| line.rank == Some(rank) && !line.stderr).unwrap();
        assert!(line.text.starts_with(&format!("r={rank} n=3 b=ferrogin-job-")), "{line:?}");
        assert!(line.text.ends_with("x=7"), "{line:?}");
        assert!(outcome.lines.iter().any(|line| line.rank == Some(rank) && line.stderr && line.text == "e"));
    }
}

#[test]
fn first_failure_ends_job() {
    let job = sh("if [ $FERROGIN_RANK = 1 ]; then exit 7; fi; exec sleep 300", 3).grace(Duration::from_millis(100));
    let outcome = job.run().unwrap();
    assert_eq!(outcome.code, 7);
    let failure = outcome.failure.unwrap();
    assert!(failure.starts_with("rank 1: exit code 7") && failure.contains("rank 0, rank 2: killed"), "{failure}");
    let signals: Vec<_> = outcome.statuses.iter().map(|status| status.unwrap().signal()).collect();
    assert_eq!(signals, [Some(9), None, Some(9)]);
}

#[test]
fn other_ranks_may_end_during_grace_period() {
    let job = sh("if [ $FERROGIN_RANK = 1 ]; then exit 7; fi; sleep 0.3; echo noticed", 2);
    let outcome = job.grace(HANG_LIMIT).run().unwrap();
    assert_eq!(outcome.code, 7);
    assert!(outcome.text().contains("noticed"));
}

#[test]
fn closed_output_ends_job_without_grace() {
    // Rank 0 would exit on its own within the grace period.
    let script = "if [ $FERROGIN_RANK = 1 ]; then kill -PIPE $$; fi; exec sleep 60";
    let outcome = sh(script, 2).grace(HANG_LIMIT).run().unwrap();
    let signals: Vec<_> = outcome.statuses.iter().map(|status| status.unwrap().signal()).collect();
    assert_eq!((outcome.code, &signals[..]), (141, &[Some(9), Some(13)][..]));
}

#[test]
fn killed_rank_and_time_limit_are_reported() {
    let mut running = sh("exec sleep 300", 2).grace(Duration::from_millis(50)).start().unwrap();
    running.signal(1, Signal::SIGKILL);
    let outcome = running.wait();
    let failure = outcome.failure.unwrap();
    assert!(outcome.code == 137 && failure.starts_with("rank 1: killed by SIGKILL; rank 0: "), "{failure}");

    let outcome = sh("exec sleep 300", 2).timeout(Duration::from_millis(100)).run().unwrap();
    assert_eq!(outcome.code, EXIT_TIMEOUT);
    assert!(outcome.failure.unwrap().contains("rank 0, rank 1"));
}

#[test]
fn missing_program_is_reported() {
    let error = Job::new("/nonexistent/x", 2).run().unwrap_err();
    assert!(error.to_string().contains("/nonexistent/x"), "{error}");
}

#[test]
fn mpirun_starts_ranks() {
    if find_mpirun().is_none() {
        ferrogin_test_support::skip("mpirun_starts_ranks", "mpirun is not on PATH (apt-get install openmpi-bin)");
        return;
    }
    let script =
        "echo r=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} f=$FERROGIN_RANK x=$X s=${#FERROGIN_SECRET}; exit ${CODE:-0}";
    let job = sh(script, 2).launcher(Launcher::Mpirun).env("X", "7").env("FERROGIN_RANK", "5");
    let outcome = job.clone().run().unwrap();
    assert!(outcome.success(), "{outcome:?}");
    assert!(outcome.text().contains("r=0 f= x=7 s=32") && outcome.text().contains("r=1 f= x=7 s=32"), "{outcome:?}");
    let outcome = job.env("CODE", "3").run().unwrap();
    assert_eq!(outcome.code, 3, "{outcome:?}");
}

#[test]
fn dropped_job_kills_its_ranks() {
    let running = sh("exec sleep 300", 1).start().unwrap();
    let pid = Pid::from_raw(running.children[0].child.id().cast_signed());
    drop(running);
    assert_eq!(kill(pid, None), Err(nix::errno::Errno::ESRCH));
}
