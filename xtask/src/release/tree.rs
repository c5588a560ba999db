//! Checks of the tree that is to be released.

use super::elf::{self, Glibc};
use crate::ptx::compile;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Checks the tree, and returns its version. A snapshot may have uncommitted changes and an unreleased section.
///
/// # Errors
/// All faults, a line each.
pub fn check(root: &Path, snapshot: bool) -> Result<String, String> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).map_err(|error| format!("{path}: {error}"));
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(root).args(["metadata", "--no-deps", "--format-version", "1", "--locked"]);
    let metadata =
        serde_json::from_str(&super::output(&mut cargo)?).map_err(|error| format!("cargo metadata: {error}"))?;
    let (version, mut faults) = versions(&metadata);
    faults.extend(
        compile::check_source_hash(root, compile::CHECKED_IN, &compile::SOURCES, &read(compile::CHECKED_IN)?).err(),
    );
    if !snapshot {
        faults.extend(changelog_fault(&read("CHANGELOG.md")?, &version));
        let status = super::output(Command::new("git").current_dir(root).args(["status", "--porcelain"]))?;
        if !status.is_empty() {
            faults.push(format!(
                "changes are not committed, so no tag would name this tree; commit or remove:\n{}",
                status.trim_end()
            ));
        }
    }
    if faults.is_empty() { Ok(version) } else { Err(faults.join("\nrelease: ")) }
}

/// The version of the package `ferrogin`, and a fault for each package with another and each dependency on another.
fn versions(metadata: &Value) -> (String, Vec<String>) {
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let of = |package: &Value| package["version"].as_str().unwrap_or_default().to_owned();
    let version = packages.iter().find(|package| package["name"] == "ferrogin").map(of).unwrap_or_default();
    let mut faults = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        if of(package) != version {
            faults.push(format!(
                "{name} has version {}, and ferrogin has {version}: all packages are released together",
                of(package)
            ));
        }
        for dependency in
            package["dependencies"].as_array().into_iter().flatten().filter(|dependency| !dependency["path"].is_null())
        {
            let (other, wanted) =
                (dependency["name"].as_str().unwrap_or_default(), dependency["req"].as_str().unwrap_or_default());
            if wanted != format!("^{version}") {
                faults
                    .push(format!("{name} depends on {other} {wanted}, and not on {version}: change it in Cargo.toml"));
            }
        }
    }
    (version, faults)
}

/// What CHANGELOG.md lacks for a release: a dated section of the version with lines, and nothing unreleased.
fn changelog_fault(text: &str, version: &str) -> Option<String> {
    let sections = || text.split("\n## ").skip(1).map(|section| section.split_once('\n').unwrap_or((section, "")));
    let has_lines = |body: &str| body.lines().any(|line| line.starts_with("- "));
    if sections().any(|(title, body)| title.starts_with("[Unreleased]") && has_lines(body)) {
        return Some(format!(
            "CHANGELOG.md has lines under [Unreleased]: name the section `## [{version}] - YYYY-MM-DD` in the commit of the release"
        ));
    }
    let date = |title: &str| {
        let date = title.strip_prefix(&format!("[{version}] - "))?;
        let shape: String = date.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        (shape == "0000-00-00").then_some(())
    };
    match sections().find(|(title, _)| title.starts_with(&format!("[{version}]"))) {
        Some((title, body)) if date(title).is_some() && has_lines(body) => None,
        Some((title, _)) => {
            Some(format!("the section `## {title}` of CHANGELOG.md has no date (`- YYYY-MM-DD`) or no lines"))
        }
        None => Some(format!(
            "CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`: write it, or set the version in Cargo.toml"
        )),
    }
}

/// Checks that docs/packages.md states this oldest glibc for the tarball.
pub fn check_documented_glibc(root: &Path, arch: &str, found: Glibc) -> Result<(), String> {
    let text =
        std::fs::read_to_string(root.join("docs/packages.md")).map_err(|error| format!("docs/packages.md: {error}"))?;
    let stated =
        documented_glibc(&text, arch).ok_or_else(|| format!("docs/packages.md does not state a glibc for {arch}"))?;
    if stated == found {
        return Ok(());
    }
    Err(format!(
        "the {arch} tarball needs glibc {}.{}, and docs/packages.md says {}.{}: build on a machine with the glibc that it says, or change it",
        found.0, found.1, stated.0, stated.1
    ))
}

/// The glibc in the row `| ... ARCH.tar.gz ... | 2.34 |`.
fn documented_glibc(text: &str, arch: &str) -> Option<Glibc> {
    let row = text.lines().find(|line| line.starts_with('|') && line.contains(&format!("-linux-{arch}.tar.gz")))?;
    row.trim_end_matches('|').rsplit('|').next().and_then(|cell| elf::parse(cell.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn packages_have_one_version() {
        let package = |name: &str, version: &str, wanted: &str| {
            let others =
                json!([{ "name": "a", "req": wanted, "path": "/a" }, { "name": "libc", "req": "^0.2", "path": null }]);
            json!({ "name": name, "version": version, "dependencies": others })
        };
        let good = json!({ "packages": [package("ferrogin", "0.2.0", "^0.2.0"), package("a", "0.2.0", "^0.2.0")] });
        assert_eq!(versions(&good), ("0.2.0".to_owned(), Vec::new()));
        let bad = json!({ "packages": [package("ferrogin", "0.2.0", "^0.1.0"), package("a", "0.1.0", "^0.2.0")] });
        let (_, faults) = versions(&bad);
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].starts_with("ferrogin depends on a ^0.1.0, and not on 0.2.0"), "{faults:?}");
        assert!(faults[1].starts_with("a has version 0.1.0"), "{faults:?}");
    }

    #[test]
    fn changelog_has_the_section_of_the_release() {
        let fault =
            |text: &str| changelog_fault(&format!("# Changelog\n\nText.\n\n{text}"), "0.2.0").unwrap_or_default();
        let section = "## [0.2.0] - 2026-11-30\n\n### Added\n\n- A thing.\n";
        assert_eq!(fault(section), "");
        assert_eq!(fault(&format!("## [Unreleased]\n\n{section}")), "", "an empty section may stay");
        assert!(fault(&format!("## [Unreleased]\n\n- More.\n\n{section}")).contains("has lines under [Unreleased]"));
        assert!(fault("## [0.2.0]\n\n- A thing.\n").contains("has no date"));
        assert!(fault("## [0.2.0] - soon\n\n- A thing.\n").contains("has no date"));
        assert!(fault("## [0.2.0] - 2026-11-30\n\n## [0.1.0] - 2026-01-01\n\n- A thing.\n").contains("or no lines"));
        assert!(fault("## [0.1.0] - 2026-01-01\n\n- A thing.\n").contains("no section `## [0.2.0] - YYYY-MM-DD`"));
    }

    #[test]
    fn documented_glibc_is_in_the_row_of_the_tarball() {
        let text = "| tarball | glibc |\n|---|---|\n| `ferrogin-0.1.0-linux-x86_64.tar.gz` | x | 2.34 |\n";
        assert_eq!((documented_glibc(text, "x86_64"), documented_glibc(text, "aarch64")), (Some((2, 34)), None));
    }

    #[test]
    fn documentation_states_a_glibc_for_each_tarball() {
        let root = crate::root();
        let text = std::fs::read_to_string(root.join("docs/packages.md")).unwrap();
        assert!(["x86_64", "aarch64"].iter().all(|arch| documented_glibc(&text, arch).is_some()));
    }
}
