//! Runs blocks the way a reader who copies them would, and checks that they print what the page promises.

use super::page::{Block, Page};
use super::{Check, PAGES, none, workspace};
use ferrogin_test_support::wait::HANG_LIMIT;
use ferrogin_test_support::{dist, skip};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

/// The page with the first example.
const START: &str = "docs/README.md";

#[test]
fn first_example_compiles_and_runs() {
    let start = PAGES.iter().find(|page| page.name == START).expect("the first page");
    assert_eq!(run_blocks("first_example_compiles_and_runs", start), 1);
}

#[test]
#[ignore = "make check"]
fn commands_of_other_pages_print_what_the_pages_say() {
    let others = PAGES.iter().filter(|page| page.name != START);
    let count: usize = others.map(|page| run_blocks("commands_of_other_pages_print_what_the_pages_say", page)).sum();
    assert!(count > 2, "{count} blocks");
}

/// Runs the blocks that a page marks as run, and compares what they print with the output blocks after them. Returns
/// how many it marks.
fn run_blocks(test: &str, page: &Page) -> usize {
    let marked = page.blocks.iter().filter(|block| matches!(block.check(), Ok(Check::Run))).count();
    let wanted = ["ferrogin", "libferrogin.so", "libsoftefa-fi.so", "libnccl-gin-ferrogin.so"];
    let Some(dist) = (if marked == 0 { None } else { dist(test, &wanted) }) else { return marked };
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
    // An earlier process with the same ID may have left it behind.
    let _ = std::fs::remove_dir_all(&place);
    std::fs::create_dir(&place).expect("a directory");
    for entry in std::fs::read_dir(workspace()).expect("a directory").map(|entry| entry.expect("an entry")) {
        if entry.file_name() != "dist" && entry.file_name() != "target" {
            symlink(entry.path(), place.join(entry.file_name())).expect("a link");
        }
    }
    symlink(dist, place.join("dist")).expect("a link");
    let (mut printed, mut faults) = (None, Vec::new());
    for block in &page.blocks {
        match block.check() {
            Ok(Check::Run) => printed = run(test, &place, block),
            Ok(Check::Output) => {
                let printed = printed.as_deref().unwrap_or(&block.text);
                let missing = block.text.lines().filter(|line| !has_line(printed, line));
                let fault = |line| format!("{}: the commands did not print \"{line}\", but:\n{printed}", block.place);
                faults.extend(missing.map(fault));
            }
            _ => {}
        }
    }
    std::fs::remove_dir_all(&place).expect("the directory goes");
    none(&faults);
    marked
}

/// Runs a block and returns what it printed, or `None` if one of its programs is missing. Skips `make build`, which
/// `make test` has run.
fn run(test: &str, place: &Path, block: &Block) -> Option<String> {
    let is_named = |program: &&str| block.text.split_whitespace().any(|word| word == *program);
    let programs = ["cc", "c++", "mpirun", "python3"];
    if let Some(program) = programs.into_iter().filter(is_named).find(|program| !is_installed(program)) {
        skip(test, format_args!("{}: {program} is not installed", block.place));
        return None;
    }
    let script: String = block.text.split_inclusive('\n').filter(|line| line.trim() != "make build").collect();
    let mut shell = Command::new("timeout");
    shell.arg((5 * HANG_LIMIT).as_secs().to_string()).args(["bash", "-euo", "pipefail", "-c", &script]);
    for (name, _) in std::env::vars_os() {
        if ["FERROGIN_", "SOFTEFA_", "FI_", "NCCL_", "OMPI_", "PMI"]
            .iter()
            .any(|prefix| name.to_string_lossy().starts_with(prefix))
        {
            shell.env_remove(name);
        }
    }
    // Open MPI refuses to run as root, or with more ranks than cores. A test machine may need both, unlike a reader's.
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"] {
        shell.env(name, "1");
    }
    let output = shell.current_dir(place).stdin(Stdio::null()).output().expect("a shell");
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
    assert!(output.status.success(), "{}: the commands end with {}:\n{text}", block.place, output.status);
    Some(text)
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Returns whether a line of `printed` contains `line`, whatever the numbers in it are.
fn has_line(printed: &str, line: &str) -> bool {
    let wanted = without_numbers(line.trim_end_matches("..."));
    printed.lines().any(|line| without_numbers(line).contains(&wanted))
}

/// Replaces each number with a single 0, and each run of spaces with one space.
fn without_numbers(line: &str) -> String {
    let mut text = String::new();
    for c in line.trim().chars().map(|c| if c.is_ascii_digit() { '0' } else { c }) {
        if !(matches!(c, '0' | ' ') && text.ends_with(c)) {
            text.push(c);
        }
    }
    text
}

#[test]
fn output_may_differ_in_numbers_only() {
    let printed = "12 NCCL INFO rank 3 of 17:  7 cards, and more\nok\n";
    for line in ["rank 0 of 2: 1 cards, and more", "rank 0 of 2: 1 cards, ...", "ok"] {
        assert!(has_line(printed, line), "{line}");
    }
    assert!(!has_line(printed, "rank 0 of 2: no cards"));
}
