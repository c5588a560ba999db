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
    let module = root.join("ptx/ferrogin_device.ptx");
    let path = root.join("tests/vectors/gpu-cost.txt");
    let (good, found) = costs(&["--module", module.to_str().expect("a path in UTF-8")]);
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
