//! Layouts that programs rely on change only with their version: `tests/vectors/layouts.txt` has those of each version.
//!
//! | section | content | version | on a change |
//! |---|---|---|---|
//! | `handle` | structs and constants of `ferrogin_ffi::device` and `ext` | `HEADER_VERSION` | raise the version |
//! | `host` | declarations of `ferrogin/host.h` and `ferrogin/gin.h` | the release's major version, as in the sonames | only add |
//! | `foreign` | the groups of `efa_layout.json`, taken from foreign headers | the group's name | add a group for a new NCCL |
//!
//! `FERROGIN_REFRESH=1` adds what is new to the file. It never changes what is already there.

use ferrogin_ffi::ext::HEADER_VERSION;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Each section's lines; a section's name is its kind and version.
type Layouts = BTreeMap<String, Vec<String>>;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Collapses each run of whitespace to one space.
fn on_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A Rust file's constants, types and layouts, one per line. Functions, comments and derives aren't part of the layout.
fn rust_items(text: &str) -> Vec<String> {
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let mut lines = text.lines().filter(is_code);
    let mut items = Vec::new();
    while let Some(line) = lines.next() {
        let starts = [
            "pub const ",
            "const _",
            "pub struct ",
            "pub type ",
            "pub union ",
            "pub enum ",
            "#[repr",
            "assert_layout!",
        ];
        if !starts.iter().any(|start| line.starts_with(start)) {
            continue;
        }
        let mut item = line.to_owned();
        let ends = |item: &str| {
            let depth =
                item.chars().fold(0, |depth, c| depth + i32::from("({[".contains(c)) - i32::from(")}]".contains(c)));
            depth == 0 && item.ends_with([';', '}', ']'])
        };
        while !ends(&item) {
            let Some(line) = lines.next() else { break };
            item = format!("{item} {line}");
        }
        items.push(on_one_line(&item));
    }
    items
}

/// A C header's declarations and constants, one per line.
fn c_items(text: &str) -> Vec<String> {
    let mut code = String::new();
    let mut rest = text;
    while let Some((before, comment)) = rest.split_once("/*") {
        code += before;
        rest = comment.split_once("*/").map_or("", |(_, after)| after);
    }
    code += rest;
    let (mut items, mut item) = (Vec::new(), String::new());
    for line in code.lines() {
        if let Some(define) = line.strip_prefix("#define ") {
            // Not the header guard.
            items.extend(define.contains(' ').then(|| format!("#define {}", on_one_line(define))));
        } else if !line.starts_with('#') && !line.starts_with("extern \"C\"") {
            item = format!("{item} {line}");
            let depth = item.matches('{').count() as i32 - item.matches('}').count() as i32;
            if depth == 0 && item.trim_end().ends_with(';') {
                items.push(on_one_line(&item));
                item.clear();
            } else if depth < 0 {
                // The closing brace of `extern "C"`.
                item.clear();
            }
        }
    }
    items
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// A JSON value as text, with each object's keys sorted.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let fields: BTreeMap<_, _> = fields.iter().map(|(name, value)| (name, canonical(value))).collect();
            format!("{fields:?}")
        }
        Value::Array(values) => format!("{:?}", values.iter().map(canonical).collect::<Vec<_>>()),
        other => other.to_string(),
    }
}

/// The layouts that the sources have now.
fn present() -> Layouts {
    let of_files =
        |files: &[&str], items: fn(&str) -> Vec<String>| files.iter().flat_map(|file| items(&read(file))).collect();
    let handle = of_files(&["ffi-headers/src/device.rs", "ffi-headers/src/ext.rs"], rust_items);
    let host = of_files(&["ffi-headers/include/ferrogin/gin.h", "ffi-headers/include/ferrogin/host.h"], c_items);
    let mut layouts = Layouts::new();
    layouts.insert(format!("handle {HEADER_VERSION}"), handle);
    layouts.insert(format!("host {}", env!("CARGO_PKG_VERSION_MAJOR")), host);
    let foreign: Value = serde_json::from_str(&read("tests/vectors/efa_layout.json")).expect("JSON");
    for group in foreign["groups"].as_array().expect("groups") {
        let name = group["name"].as_str().expect("a name");
        layouts.insert(format!("foreign {name}"), vec![format!("{:016x}", hash(&canonical(group)))]);
    }
    layouts
}

/// Parses the file, in which a line `[name]` starts a section.
fn parse(text: &str) -> Layouts {
    let mut layouts = Layouts::new();
    let mut name = None;
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with("// ")) {
        match line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            Some(section) => name = Some(section.to_owned()),
            None => layouts.entry(name.clone().expect("a section")).or_default().push(line.to_owned()),
        }
    }
    layouts
}

/// Compares the present layouts with the pinned ones. Returns the pinned ones plus what is new.
///
/// # Errors
/// If a pinned layout has changed; the message says what to do.
fn compare(pinned: &Layouts, now: &Layouts) -> Result<Layouts, String> {
    let mut all = pinned.clone();
    for (name, items) in now {
        let Some(before) = pinned.get(name) else {
            all.insert(name.clone(), items.clone());
            continue;
        };
        let (kind, version) = name.split_once(' ').unwrap_or((name, ""));
        let changed = before.iter().find(|item| !items.contains(item));
        let added = items.iter().find(|item| !before.contains(item));
        let (item, fix) = match (kind, changed, added) {
            ("handle", Some(item), _) | ("handle", None, Some(item)) => {
                (item, format!("raise HEADER_VERSION in ffi-headers/src/ext.rs above {version}"))
            }
            ("host", Some(item), _) => (
                item,
                format!(
                    "keep it beside the new declaration, as programs that were built with a release {version}.x call it; only a release \
                     with another major version may drop it (or, if no release had it, remove its line from the file by hand)"
                ),
            ),
            ("foreign", Some(item), _) => (
                item,
                "keep the group as the foreign headers gave it, and add a new NCCL's layout as a new group".to_owned(),
            ),
            (_, None, Some(_)) => {
                all.insert(name.clone(), items.clone());
                continue;
            }
            _ => continue,
        };
        return Err(format!(
            "the layout `{name}` in tests/vectors/layouts.txt is not that of the sources, at\n    {item}\n{fix}; then \
             `FERROGIN_REFRESH=1 cargo test --release -p ferrogin --test all layouts` adds the new layout to the file"
        ));
    }
    Ok(all)
}

fn file() -> PathBuf {
    root().join("tests/vectors/layouts.txt")
}

#[test]
fn layouts_change_only_with_their_versions() {
    let pinned = parse(&std::fs::read_to_string(file()).unwrap_or_default());
    let all = compare(&pinned, &present()).unwrap_or_else(|error| panic!("{error}"));
    if all == pinned {
        return;
    }
    let mut text = "// Layouts that programs rely on, by version. tests/all/layouts.rs compares them with the sources, and says what each is.\n\
                    // `FERROGIN_REFRESH=1 cargo test --release -p ferrogin --test all layouts` adds new versions and
                    // new declarations.\n"
        .to_owned();
    for (name, items) in &all {
        text += &format!("\n[{name}]\n{}\n", items.join("\n"));
    }
    assert!(
        std::env::var_os("FERROGIN_REFRESH").is_some(),
        "tests/vectors/layouts.txt lacks a new version or a new declaration: `FERROGIN_REFRESH=1 cargo test --release -p ferrogin --test \
         all layouts` adds it"
    );
    std::fs::write(file(), text).expect("the file is writable");
}

#[test]
fn all_structs_and_functions_are_pinned() {
    let now = present();
    let handle = now[&format!("handle {HEADER_VERSION}")].join("\n");
    for text in [
        "pub struct HandleHeader { pub magic: u64,",
        "assert_layout!(EndpointExt, size 384,",
        "pub const STATE_RUNG_SHIFT: u32 = 32;",
    ] {
        assert!(handle.contains(text), "{text} in {handle}");
    }
    assert!(!handle.contains("//") && !handle.contains("derive"), "{handle}");
    let host = now[&format!("host {}", env!("CARGO_PKG_VERSION_MAJOR"))].join("\n");
    for header in ["gin.h", "host.h"] {
        let text = read(&format!("ffi-headers/include/ferrogin/{header}"));
        for line in text.lines().filter(|line| line.contains("ferrogin_") && line.contains('(') && line.ends_with(';'))
        {
            assert!(line.starts_with([' ', '/']) || host.contains(&on_one_line(line)), "{line}");
        }
    }
    assert!(
        host.contains(
            "typedef struct ferrogin_options { uint64_t size; uint32_t card; uint32_t reserved; } ferrogin_options;"
        ),
        "{host}"
    );
    assert!(host.contains("FGIN_API int fgin_flush(const fgin_context *ctx);"), "{host}");
    assert!(now.len() > 15);
}

#[test]
fn change_without_version_is_refused_with_what_to_do() {
    let of = |sections: &[(&str, &[&str])]| -> Layouts {
        sections
            .iter()
            .map(|(name, items)| ((*name).to_owned(), items.iter().map(|item| (*item).to_owned()).collect()))
            .collect()
    };
    let pinned = of(&[("handle 3", &["a: u32", "b: u64"]), ("host 0", &["int f(void);"]), ("foreign x", &["77"])]);
    let refused = |now: &[(&str, &[&str])]| compare(&pinned, &of(now)).expect_err("a change");
    assert_eq!(compare(&pinned, &pinned).as_ref(), Ok(&pinned));
    for items in [&["a: u32", "b: u32"][..], &["a: u32"], &["a: u32", "b: u64", "c: u64"]] {
        let error = refused(&[("handle 3", items)]);
        assert!(
            error.contains("raise HEADER_VERSION in ffi-headers/src/ext.rs above 3")
                && error.contains("FERROGIN_REFRESH"),
            "{error}"
        );
    }
    assert!(refused(&[("host 0", &["int f(int);"])]).contains("int f(void);\nkeep it beside the new declaration"));
    assert!(refused(&[("foreign x", &["78"])]).contains("as a new group"));
    let next = of(&[("handle 4", &["a: u16"]), ("host 0", &["int f(void);", "int g(void);"]), ("foreign y", &["5"])]);
    let all = compare(&pinned, &next).expect("a step of the version");
    assert_eq!((all.len(), &all["handle 3"], &all["host 0"]), (5, &pinned["handle 3"], &next["host 0"]));
}
