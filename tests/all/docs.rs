//! Checks the documentation: links resolve, every code block except unmarked shell is run, compiled or compared with a
//! tested file, and the settings page is complete. CONTRIBUTING.md, "Documentation", lists the comments with which a
//! page says how a block is checked.

mod copied;
mod page;

use ferrogin_ffi::settings;
use ferrogin_test_support::skip;
use page::{Block, Page};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// Directories that hold none of this repository's sources.
const NO_SOURCES: &[&str] = &[".cache", ".git", "corpus", "dist", "node_modules", "shared", "target"];

/// The repository's root.
fn workspace() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(ferrogin_test_support::workspace);
    &ROOT
}

/// The repository's files with one of these extensions.
fn with_extension(extensions: &[&str]) -> Vec<PathBuf> {
    fn find(directory: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path()) {
            let name = entry.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if entry.is_dir() && !entry.is_symlink() && !NO_SOURCES.contains(&&*name) {
                find(&entry, extensions, found);
            } else if entry.is_file() && entry.extension().is_some_and(|ext| extensions.iter().any(|e| ext == *e)) {
                found.push(entry);
            }
        }
    }
    let mut found = Vec::new();
    find(workspace(), extensions, &mut found);
    found.sort();
    found
}

/// All Markdown pages.
static PAGES: LazyLock<Vec<Page>> =
    LazyLock::new(|| with_extension(&["md"]).iter().map(|path| Page::read(path)).collect());

/// All Rust sources as one text, to search for names.
static SOURCES: LazyLock<String> =
    LazyLock::new(|| with_extension(&["rs"]).iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect());

/// Fails if there are `faults`.
#[track_caller]
fn none(faults: &[String]) {
    assert!(faults.is_empty(), "mistakes in the documentation: {}\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut faults = Vec::new();
    for page in PAGES.iter() {
        for link in page.links.iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.path.clone() } else { page.path.with_file_name("").join(file) };
            let Ok(target) = target.canonicalize() else {
                faults.push(format!("{}: {link}: there is no such file", page.name));
                continue;
            };
            let other = PAGES.iter().find(|page| page.path.canonicalize().is_ok_and(|path| path == target));
            if !fragment.is_empty() && !other.is_some_and(|page| page.anchors.contains(fragment)) {
                faults.push(format!("{}: {link}: there is no such heading", page.name));
            }
        }
    }
    assert!(PAGES.iter().map(|page| page.links.len()).sum::<usize>() > 100, "the pages are read");
    none(&faults);
}

#[test]
fn summary_lists_every_page() {
    let docs = workspace().join("docs");
    let summary = Page::read(&docs.join("SUMMARY.md"));
    let pages = PAGES.iter().filter(|page| page.path.parent() == Some(&docs) && page.path != summary.path);
    let names = pages.filter_map(|page| Some(page.path.file_name()?.to_string_lossy().into_owned()));
    let missing = names.filter(|name| !summary.links.contains(name));
    none(&missing.map(|name| format!("docs/SUMMARY.md does not list {name}")).collect::<Vec<_>>());
}

/// Returns whether `name` is a setting, or a variable that tests or benches read.
fn is_setting(name: &str) -> bool {
    let is_read = |call: &str| SOURCES.contains(&format!("{call}(\"{name}\""));
    settings::all().any(|setting| setting == name) || ["var", "var_os", "repetitions"].into_iter().any(is_read)
}

#[test]
fn page_of_settings_has_every_setting_and_no_other() {
    let path = "docs/settings.md";
    let page = std::fs::read_to_string(workspace().join(path)).expect("the page of settings");
    let rows: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).collect();
    let names: Vec<&str> = rows.iter().flat_map(|row| row.split(", ")).map(|name| name.trim_matches('`')).collect();
    let missing = settings::all().filter(|name| !names.contains(name));
    let missing = missing.map(|name| format!("{path} has no row for {name}"));
    let ours = ["FERROGIN_", "SOFTEFA_", "SOFTGPU_"];
    let ours = names.iter().filter(|name| ours.iter().any(|prefix| name.starts_with(prefix)));
    let unknown = ours.filter(|name| !is_setting(name)).map(|name| format!("{path}: {name} is not a setting"));
    none(&missing.chain(unknown).collect::<Vec<_>>());
}

/// The software card lists its faults when it refuses an unknown one.
#[test]
fn software_card_page_has_every_fault() {
    let test = "software_card_page_has_every_fault";
    let Some(dist) = ferrogin_test_support::dist(test, &["libnccl-gin-ferrogin.so", "libsoftefa-fi.so"]) else {
        return;
    };
    let mut probe = Command::new(env!("CARGO_BIN_EXE_ferrogin"));
    probe.args(["doctor", "--json", "--only", "plugin"]).env("NCCL_GIN_PLUGIN", dist.join("libnccl-gin-ferrogin.so"));
    probe.envs([("FERROGIN_PROVIDER", "softefa"), ("SOFTEFA_FAULTS", "unknown=1")]);
    let output = probe.output().expect("the tool starts");
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat();
    let list = text.split("keys are ").nth(1).and_then(|text| text.split('"').next()).expect("a list of keys");
    let names = list.split([',', ';', ' ']).filter(|word| !["", "flags", "are"].contains(word));
    let page = std::fs::read_to_string(workspace().join("docs/software-card.md")).expect("the page");
    let rows: String = page.lines().filter(|line| line.starts_with("| `")).collect();
    let has_row = |name: &str| rows.contains(&format!("`{name}`")) || rows.contains(&format!("`{name}="));
    let missing: Vec<_> =
        names.clone().filter(|name| !has_row(name)).map(|name| format!("no row for {name}")).collect();
    assert!(names.count() > 15, "{list}");
    none(&missing);
}

/// How a block is checked.
enum Check {
    PartOf(String),
    /// [`copied`] runs it, or compares it with what the commands above printed.
    Run,
    Output,
    Not(String),
    ByLanguage,
}

impl Block {
    fn check(&self) -> Result<Check, String> {
        let comment = self.comment.as_deref().unwrap_or_default();
        let (key, value) = comment.split_once(':').unwrap_or((comment, ""));
        match (key, value.trim()) {
            ("from", file) if !file.is_empty() => Ok(Check::PartOf(file.to_owned())),
            ("not run", reason) if reason.len() > 5 => Ok(Check::Not(reason.to_owned())),
            ("run", "") => Ok(Check::Run),
            ("output", "") => Ok(Check::Output),
            ("from" | "not run" | "run" | "output", _) => {
                Err(format!("\"{comment}\" is none of from: FILE, run, output, not run: REASON"))
            }
            // Any other comment is the page's own.
            _ => Ok(Check::ByLanguage),
        }
    }

    fn check_by_language(&self, page: &Page) -> Result<(), String> {
        match &*self.language {
            "rust" | "rust,no_run" => is_doc_test(page),
            "c" => compiles("cc", &["-std=c11", "-x", "c"], &self.text),
            "cpp" => compiles("c++", &["-std=c++17", "-x", "c++"], &self.text),
            "cuda" => is_compiled_by_cuda_stage(page),
            "python" => is_part_of_an_example(&self.text),
            // Those that run are marked with a comment; the rest are prose.
            "sh" => Ok(()),
            "json" => {
                serde_json::from_str::<serde_json::Value>(&self.text).map(drop).map_err(|error| error.to_string())
            }
            "indented" => Err("an indented block has no language: use a fenced one".into()),
            other => Err(format!(
                "nothing checks the language \"{other}\": put <!-- from: FILE --> or <!-- not run: REASON --> before the block"
            )),
        }
    }
}

#[test]
fn blocks_are_tested_or_say_why_not() {
    let (mut faults, mut reasons, mut count) = (Vec::new(), String::new(), 0);
    for page in PAGES.iter() {
        for block in &page.blocks {
            count += 1;
            let result = block.check().and_then(|check| match check {
                Check::PartOf(file) => is_part_of(&block.text, &file),
                Check::Run | Check::Output => Ok(()),
                Check::Not(reason) => {
                    writeln!(reasons, "{}: not run: {reason}", block.place).map_err(|error| error.to_string())
                }
                Check::ByLanguage => block.check_by_language(page),
            });
            faults.extend(result.err().map(|fault| format!("{}: {fault}", block.place)));
        }
    }
    println!("{count} blocks of code, {} of them not run:\n{reasons}", reasons.lines().count());
    assert!(count > 50, "the pages are read");
    none(&faults);
}

/// Passes if the lines of `text` appear consecutively in `file`, all indented alike.
fn is_part_of(text: &str, file: &str) -> Result<(), String> {
    let whole = std::fs::read_to_string(workspace().join(file)).map_err(|error| format!("{file}: {error}"))?;
    let (lines, part) = (whole.lines().collect::<Vec<_>>(), text.lines().collect::<Vec<_>>());
    let first = part.first().ok_or("the block is empty")?;
    let found = lines.windows(part.len()).any(|window| {
        let indent = " ".repeat(window[0].len().saturating_sub(first.len()));
        let same = |(line, wanted): (&&str, &&str)| {
            if wanted.is_empty() { line.is_empty() } else { line.strip_prefix(&*indent) == Some(wanted) }
        };
        window.iter().zip(&part).all(same)
    });
    if found { Ok(()) } else { Err(format!("the block is not part of {file}")) }
}

/// Passes if the block is part of a Python program in an `examples` or `tests` directory.
fn is_part_of_an_example(text: &str) -> Result<(), String> {
    let tested = |path: &PathBuf| path.iter().any(|part| part == "examples" || part == "tests");
    let mut examples = with_extension(&["py"]).into_iter().filter(tested);
    if examples.any(|path| is_part_of(text, &path.to_string_lossy()).is_ok()) {
        Ok(())
    } else {
        Err("the block is not part of a program in Python below examples/ or tests/".into())
    }
}

/// Passes if a crate includes `page` in its documentation, which makes its blocks doc tests.
fn is_doc_test(page: &Page) -> Result<(), String> {
    let includes = |source: &PathBuf| {
        let text = std::fs::read_to_string(source).unwrap_or_default();
        let mut paths = text.split("include_str!(\"").skip(1).filter_map(|rest| rest.split('"').next());
        paths.any(|path| {
            source
                .with_file_name("")
                .join(path)
                .canonicalize()
                .is_ok_and(|path| Ok(path) == page.path.canonicalize().map_err(drop))
        })
    };
    if with_extension(&["rs"]).iter().any(includes) {
        return Ok(());
    }
    Err(format!("no crate has {} in its documentation: include it, or name the file that the block is from", page.name))
}

fn is_compiled_by_cuda_stage(page: &Page) -> Result<(), String> {
    let script = std::fs::read_to_string(workspace().join("tests/cuda/run.sh")).map_err(|error| error.to_string())?;
    let all_of_docs = page.name.starts_with("docs/") && script.contains("\"$root\"/docs/*.md");
    if all_of_docs || script.contains(&format!("\"$root/{}\"", page.name)) {
        return Ok(());
    }
    Err(format!("tests/cuda/run.sh does not compile the blocks of {}", page.name))
}

/// Checks that `text` compiles, without writing a file.
fn compiles(compiler: &str, flags: &[&str], text: &str) -> Result<(), String> {
    use std::io::Write;
    let skipped = |why: &str| skip("blocks_are_tested_or_say_why_not", format_args!("{compiler}: {why}"));
    let mut command = Command::new(compiler);
    command.args(flags).args(["-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-"]);
    command.arg("-I").arg(workspace().join("ffi-headers/include"));
    let mut child = match command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => {
            skipped(&error.to_string());
            return Ok(());
        }
    };
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).map_err(|error| error.to_string())?;
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    let errors = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false if errors.contains("rdma/") && errors.contains("No such file") => {
            skipped("libfabric's headers are missing");
            Ok(())
        }
        false => Err(errors.into_owned()),
    }
}
