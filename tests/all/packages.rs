//! Every package in the workspace depends only on the groups below it, and runs its unit tests.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The workspace's packages, as cargo reads their manifests.
fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo starts");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    metadata["packages"].as_array().expect("a list of packages").clone()
}

/// `test = false` saves compiling a library without unit tests a second time. A library that has some would never run
/// them.
#[test]
fn no_library_hides_its_unit_tests() {
    let packages = packages();
    let mut spared = 0;
    let targets = packages.iter().flat_map(|package| package["targets"].as_array().into_iter().flatten());
    for target in targets.filter(|target| target["test"] == false && target["kind"] != json!(["bench"])) {
        let source = Path::new(target["src_path"].as_str().expect("a path"));
        if target["kind"] == json!(["lib"]) || target["kind"] == json!(["rlib"]) {
            spared += 1;
            for file in walk(source.parent().expect("a directory")) {
                let text = std::fs::read_to_string(&file).expect("a source file");
                assert!(
                    !text.contains("#[test]"),
                    "{} has a unit test, but its manifest has test = false",
                    file.display()
                );
            }
        }
    }
    assert_ne!(spared, 0, "a library with test = false");
}

/// All files below a directory.
fn walk(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

/// A package's directory, relative to the repository: "" for the tool.
fn directory(manifest: &str) -> &str {
    let manifest = Path::new(manifest).parent().expect("a manifest lies in a directory");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.strip_prefix(root).ok().and_then(Path::to_str).expect("a package of the repository")
}

/// Returns whether the package in the directory `from` may depend on the one in `to`: see ARCHITECTURE.md, "Groups".
fn may_depend(from: &str, to: &str) -> bool {
    let group = |directory: &str| match directory.split('/').next() {
        Some(group @ ("services" | "emulators" | "scenarios" | "tests")) => group.to_owned(),
        Some("") => "tool".to_owned(),
        Some("benches" | "xtask") => "tests".to_owned(),
        _ => "product".to_owned(),
    };
    match (&*group(from), &*group(to)) {
        ("tests", _) | (_, "product") => true,
        ("services" | "emulators" | "tool", "services") => true,
        ("emulators" | "tool", "emulators") => true,
        (from, "scenarios") => matches!(from, "scenarios" | "tool"),
        _ => false,
    }
}

#[test]
fn packages_depend_only_on_groups_below() {
    let mut count = 0;
    for package in packages() {
        let from = directory(package["manifest_path"].as_str().expect("a path"));
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let Some(path) = dependency["path"].as_str() else { continue };
            if dependency["kind"] == "dev" {
                continue;
            }
            let to = directory(&format!("{path}/Cargo.toml")).to_owned();
            assert!(may_depend(from, &to), "{} must not depend on {to}", package["name"]);
            count += 1;
        }
    }
    assert!(count > 20, "the dependencies are read: {count}");
    assert!(!may_depend("host-plugin", "emulators/soft-nic") && !may_depend("", "tests/test-support"));
}
