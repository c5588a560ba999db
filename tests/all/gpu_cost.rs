//! `ferrogin gpu-cost` with the checked-in device code prints the checked-in figures.

use crate::tool::command;
use std::path::Path;

fn costs(args: &[&str]) -> (bool, String) {
    let output = command().arg("gpu-cost").args(args).output().expect("the tool starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

#[test]
fn costs_of_operations_are_the_checked_in_ones() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let module = root.join("device-kernels/ptx/ferrogin_device.ptx");
    let path = root.join("tests/vectors/gpu-cost.txt");
    // With several threads, the costs depend on how they interleave.
    let (good, found) = costs(&["--threads", "1", "--module", module.to_str().expect("a path in UTF-8")]);
    assert!(good, "{found}");
    if std::env::var_os("FERROGIN_REFRESH").is_some() {
        std::fs::write(&path, &found).expect("the figures can be written");
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    let (wanted, found) = (wanted.lines().collect::<Vec<_>>(), found.lines().collect::<Vec<_>>());
    let changed: Vec<String> = (0..wanted.len().max(found.len()))
        .map(|line| (wanted.get(line).unwrap_or(&""), found.get(line).unwrap_or(&"")))
        .filter(|(wanted, found)| wanted != found)
        .map(|(wanted, found)| format!("-{wanted}\n+{found}"))
        .collect();
    assert!(
        changed.is_empty(),
        "the device code has other costs than {} says:\n {}\n{}\n\
         FERROGIN_REFRESH=1 cargo test --release -p ferrogin --test all gpu_cost writes the file; the commit says why",
        path.display(),
        found.first().unwrap_or(&""),
        changed.join("\n")
    );
}

/// The columns are round trips up to the reservation, the doorbell and the return; the last one is system-scope fences.
#[test]
fn lone_posts_reserve_after_three_round_trips_and_take_two_fences() {
    let (good, found) = costs(&[]);
    assert!(good, "{found}");
    let posts = ["put", "put-aggregate", "put-signal", "put-value", "put-value-signal", "get", "signal"];
    for post in posts {
        let row = found.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = row.clone().find(|row| row[..3] == ["combining", post, "1"]).expect(post);
        let number = |column: usize| row[column].parse::<u32>().unwrap_or(0);
        assert!(number(3) <= 3, "{post} loads in {} steps before the reservation", row[3]);
        // The reservation, the mark, and the end of the pass are atomic operations; no load depends on them.
        assert!(number(5) <= number(3) + 5, "{post} returns after {} round trips", row[5]);
        assert!(number(12) <= 2, "{post} has {} fences of the system", row[12]);
    }
}

/// 32 lanes make one reservation, one mark, one end of a pass and one doorbell, however they are scheduled.
#[test]
fn lanes_of_a_warp_share_one_doorbell() {
    let signals =
        ["put-signal", "put-value-signal", "signal", "put-memory-signal", "put-value-memory-signal", "memory-signal"];
    let posts = signals.map(|post| format!("kernel-{post}"));
    let posts =
        posts.iter().map(String::as_str).chain(["put-warp", "put-value-warp", "signal-warp"]).collect::<Vec<_>>();
    for seed in ["1", "2", "3"] {
        let (good, found) = costs(&[&["--threads", "32", "--seed", seed][..], &posts].concat());
        assert!(good, "{found}");
        for post in &posts {
            let rows = found.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            let row = rows.clone().find(|row| row[..3] == ["combining", *post, "32"]).expect(post);
            // Averages per lane: 32 lanes share 4 atomic operations and one doorbell.
            assert!(row[9].parse::<f64>().unwrap() <= 4.0 / 32.0, "{post}, seed {seed}: {} atomic operations", row[9]);
            assert_eq!(row[10], "0.03", "{post}, seed {seed}: doorbells");
        }
    }
}

#[test]
fn bad_arguments_of_gpu_cost_are_errors() {
    for (args, cause) in [
        (&["--module", "/nonexistent.ptx"][..], "/nonexistent.ptx: No such file"),
        (&["--module", file!()], "gpu_cost.rs"),
        (&["--threads", "0"], "0 is not in 1..=1024"),
        (&["post"], "invalid value 'post'"),
    ] {
        let (good, text) = costs(args);
        assert!(!good && text.contains(cause), "{args:?}: {text}");
    }
}
