//! `cargo xtask gpu-cost` with the checked-in device code prints the checked-in figures.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

fn costs(args: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("gpu-cost").args(args).output();
    let output = output.expect("xtask starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

/// Returns the rows of the group `policy, N threads:`, by operation.
fn rows(table: &str, group: &str) -> BTreeMap<String, Vec<String>> {
    let lines = table.lines().skip_while(|line| *line != group).skip(1).take_while(|line| !line.ends_with(':'));
    let cells = lines.map(|line| line.split(['/', ' ']).filter(|cell| !cell.is_empty()).map(str::to_owned));
    cells.filter_map(|mut cells| Some((cells.next()?, cells.collect()))).collect()
}

#[test]
fn costs_of_operations_are_the_checked_in_ones() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors/gpu-cost.txt");
    // With several threads, the costs depend on how they interleave.
    let (good, found) = costs(&["--threads", "1"]);
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
         FERROGIN_REFRESH=1 cargo test --release -p xtask gpu_cost writes the file; the commit says why",
        path.display(),
        found.first().unwrap_or(&""),
        changed.join("\n")
    );
}

/// The cells are round trips up to the reservation, the doorbell and the return, the counts, and the fences by scope.
#[test]
fn lone_posts_reserve_after_three_round_trips_and_take_two_fences() {
    let (good, found) = costs(&["--threads", "1"]);
    assert!(good, "{found}");
    let rows = rows(&found, "combining, 1 thread:");
    for post in ["put", "put-aggregate", "put-signal", "put-value", "put-value-signal", "get", "signal"] {
        let number = |cell: usize| rows[post][cell].parse::<u32>().unwrap_or(0);
        assert!(number(0) <= 3, "{post} loads in {} steps before the reservation", number(0));
        // The reservation, the mark, and the end of the pass are atomic operations; no load depends on them.
        assert!(number(2) <= number(0) + 5, "{post} returns after {} round trips", number(2));
        assert!(number(11) <= 2, "{post} has {} fences of the system", number(11));
    }
}

/// Of the words that the plugin places, kernels read none in host memory, except emulated signals where the machine has
/// no GDRCopy.
#[test]
fn posts_waits_and_flushes_read_no_host_memory() {
    let (good, found) = costs(&["--threads", "1"]);
    assert!(good, "{found}");
    for group in ["combining, 1 thread:", "locked, 1 thread:"] {
        let rows = rows(&found, group);
        assert!(rows.contains_key("put-check") && rows.contains_key("wait-signal-round"), "{found}");
        for (operation, cells) in rows {
            let wanted = if operation.starts_with("wait-memory-signal") { "1" } else { "0" };
            assert_eq!(cells[7], wanted, "reads of host memory of {operation}, {group}");
        }
    }
}

#[test]
fn narrower_sharing_mode_costs_no_more() {
    let (good, found) = costs(&["--threads", "1"]);
    assert!(good, "{found}");
    let rows = rows(&found, "combining, 1 thread:");
    for post in ["put-signal", "put-value-signal", "signal"] {
        assert_eq!(rows[&format!("{post}-cta")], rows[post], "{post}");
        assert_eq!(rows[&format!("{post}-thread")][6], "0", "atomic operations of {post} by one thread");
    }
}

/// 32 lanes make one reservation, one mark, one end of a pass and one doorbell, however they are scheduled.
#[test]
fn lanes_of_a_warp_share_one_doorbell() {
    let posts =
        ["kernel-put-signal", "kernel-put-value-signal", "kernel-signal", "put-warp", "put-value-warp", "signal-warp"];
    for seed in ["1", "2", "3"] {
        let rows = rows_of_lanes(seed, &posts);
        assert!(posts.iter().all(|post| shares_one_doorbell(&rows[*post])), "seed {seed}: {rows:?}");
    }
}

/// The slow path looks for other lanes where it posts, and the seed decides how many get there together.
#[test]
fn lanes_with_emulated_signals_share_one_doorbell() {
    let posts = ["kernel-put-memory-signal", "kernel-put-value-memory-signal", "kernel-memory-signal"];
    let tables = ["1", "2", "3"].map(|seed| rows_of_lanes(seed, &posts));
    for post in posts {
        assert!(tables.iter().any(|rows| shares_one_doorbell(&rows[post])), "{post}: {tables:?}");
    }
}

fn rows_of_lanes(seed: &str, posts: &[&str]) -> BTreeMap<String, Vec<String>> {
    let (good, found) = costs(&[&["--threads", "32", "--seed", seed][..], posts].concat());
    assert!(good, "{found}");
    assert!(found.lines().all(|line| line.len() <= 80), "a line is wider than a terminal:\n{found}");
    rows(&found, "combining, 32 threads:")
}

/// The cells are means of the lanes: 32 of them share 4 atomic operations and one doorbell.
fn shares_one_doorbell(cells: &[String]) -> bool {
    cells[6].parse::<f64>().unwrap() <= 4.0 / 32.0 && cells[8] == "0.03"
}

#[test]
fn bad_arguments_of_gpu_cost_are_errors() {
    for (args, cause) in [
        (&["--module", "/nonexistent.ptx"][..], "/nonexistent.ptx: No such file"),
        (&["--module", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")], "Cargo.toml:"),
        (&["--threads", "0"], "0 is not in 1..=1024"),
        (&["post"], "invalid value 'post'"),
    ] {
        let (good, text) = costs(args);
        assert!(!good && text.contains(cause), "{args:?}: {text}");
    }
}
