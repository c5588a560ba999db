//! Commands of a documented shell block: what can be checked of them without running them.

use super::{is_setting, workspace};
use ferrogin_test_support::skip;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

/// Programs that `make test` runs too, or that belong to the system.
const PROGRAMS: &[&str] = &[
    "apt-get",
    "c++",
    "cc",
    "cd",
    "cmake",
    "export",
    "fi_pingpong",
    "gdb",
    "git",
    "ldconfig",
    "mpirun",
    "nvcc",
    "pip",
    "pkg-config",
    "python3",
    "sudo",
    "unset",
    "wait",
    "xterm",
];

/// Names of the tool.
const TOOL: &[&str] = &["dist/ferrogin", "ferrogin"];

/// Checks all commands of a block.
pub fn check(text: &str) -> Result<(), String> {
    split(text).iter().try_for_each(|words| check_command(words))
}

/// The commands of a block, each as its words, without comments.
pub fn split(text: &str) -> Vec<Vec<String>> {
    let mut commands = vec![vec![String::new()]];
    let end_word = |commands: &mut Vec<Vec<String>>, ends_command: bool| {
        let words = commands.last_mut().expect("a command");
        if words.last().is_some_and(|word| !word.is_empty()) {
            words.push(String::new());
        }
        if ends_command && words.len() > 1 {
            commands.push(vec![String::new()]);
        }
    };
    for line in text.replace("\\\n", " ").lines() {
        let (mut quote, mut depth, mut before) = (None, 0, ' ');
        for c in line.chars() {
            match (c, quote) {
                ('#', None) if before == ' ' => break,
                (c, Some(open)) if c == open => quote = None,
                ('"' | '\'', None) => quote = Some(c),
                ('&' | ';' | '|', None) if depth == 0 && before != '>' => end_word(&mut commands, true),
                (' ', None) if depth == 0 => end_word(&mut commands, false),
                (c, _) => {
                    depth += i32::from(c == '(') - i32::from(c == ')');
                    commands.last_mut().and_then(|words| words.last_mut()).expect("a word").push(c);
                }
            }
            before = c;
        }
        end_word(&mut commands, true);
    }
    commands.iter_mut().for_each(|words| words.retain(|word| !word.is_empty()));
    commands.retain(|words| !words.is_empty());
    commands
}

/// The name of NAME=VALUE.
pub fn variable(word: &str) -> Option<&str> {
    let (name, _) = word.split_once('=')?;
    let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    (!name.is_empty() && name.chars().all(is_name)).then_some(name)
}

fn check_command(words: &[String]) -> Result<(), String> {
    words.iter().try_for_each(|word| check_file(word))?;
    words.iter().filter_map(|word| variable(word)).try_for_each(check_variable)?;
    let set = words.iter().take_while(|word| variable(word).is_some()).count();
    let Some((program, arguments)) = words[set..].split_first() else { return Ok(()) };
    match &**program {
        "sudo" => check_command(arguments),
        "make" => arguments.iter().filter(|word| variable(word).is_none()).try_for_each(|target| check_target(target)),
        "cargo" => check_cargo(arguments),
        "mpirun" => match arguments.iter().position(|word| TOOL.contains(&&**word)) {
            Some(at) => check_command(&arguments[at..]),
            None => Ok(()),
        },
        tool if TOOL.contains(&tool) => check_options(Path::new(env!("CARGO_BIN_EXE_ferrogin")), arguments),
        program if PROGRAMS.contains(&program) || program.starts_with("./") => Ok(()),
        program if is_of_repository(program) => {
            let file = std::fs::metadata(workspace().join(program));
            match file.is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0) {
                true => Ok(()),
                false => Err(format!("{program} is no program of the repository")),
            }
        }
        // A build, or a command before, makes it.
        program if program.contains('/') => Ok(()),
        program => Err(format!(
            "nothing checks the program {program}: name it in PROGRAMS if CI runs it, or say why the block is not run"
        )),
    }
}

fn check_variable(name: &str) -> Result<(), String> {
    let ours = name.starts_with("FERROGIN_") || name.starts_with("SOFTEFA_");
    if ours && !is_setting(name) { Err(format!("{name} is no setting")) } else { Ok(()) }
}

/// A word that begins with a directory of the repository names a file there.
fn check_file(word: &str) -> Result<(), String> {
    let path = word.strip_prefix("$PWD/").unwrap_or(word);
    if !is_of_repository(path) || path.contains(['$', '*', '<']) || workspace().join(path).exists() {
        return Ok(());
    }
    Err(format!("{path} is no file of the repository"))
}

/// True for a path below a directory of the repository in which nothing is built.
fn is_of_repository(path: &str) -> bool {
    path.split_once('/').is_some_and(|(first, _)| {
        let is_name = first.starts_with(|c: char| c.is_ascii_alphabetic());
        is_name && !["target", "dist"].contains(&first) && workspace().join(first).is_dir()
    })
}

fn check_target(target: &str) -> Result<(), String> {
    let makefile = std::fs::read_to_string(workspace().join("Makefile")).map_err(|error| error.to_string())?;
    match makefile.lines().any(|line| line.strip_prefix(target).is_some_and(|rest| rest.starts_with(':'))) {
        true => Ok(()),
        false => Err(format!("the Makefile has no target {target}")),
    }
}

/// Gives the arguments to a program that parses them in their order and stops at `--help`.
fn check_options(program: &Path, arguments: &[String]) -> Result<(), String> {
    let arguments = arguments.iter().take_while(|word| !word.contains(['<', '>']) && *word != "--");
    let output = Command::new(program).args(arguments).arg("--help").output().map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()) }
}

/// Packages of the workspace with the names of their targets.
static METADATA: LazyLock<serde_json::Value> = LazyLock::new(|| {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let arguments = ["metadata", "--no-deps", "--format-version", "1", "--offline"];
    let output = Command::new(cargo).args(arguments).current_dir(workspace()).output().expect("cargo starts");
    serde_json::from_slice(&output.stdout).expect("cargo prints JSON")
});

fn check_cargo(words: &[String]) -> Result<(), String> {
    let Some((command, rest)) = words.split_first() else { return Err("cargo without a command".into()) };
    match &**command {
        "xtask" => {
            static XTASK: LazyLock<Option<std::path::PathBuf>> = LazyLock::new(|| {
                let xtask = Path::new(env!("CARGO_BIN_EXE_ferrogin")).with_file_name("xtask");
                if !xtask.is_file() {
                    skip(
                        "options of cargo xtask in the documentation",
                        format_args!("{} is not built", xtask.display()),
                    );
                    return None;
                }
                Some(xtask)
            });
            return XTASK.as_ref().map_or(Ok(()), |xtask| check_options(xtask, rest));
        }
        "bench" | "build" | "doc" | "package" | "run" | "test" => {}
        other => return Err(format!("nothing checks cargo {other}")),
    }
    let packages = METADATA["packages"].as_array().expect("a list");
    let value = |option: &'static str| rest.windows(2).filter(move |pair| pair[0] == option).map(|pair| &*pair[1]);
    let named: Vec<_> = value("-p").collect();
    if let Some(name) = named.iter().find(|name| !packages.iter().any(|package| package["name"] == **name)) {
        return Err(format!("there is no package {name}"));
    }
    for kind in ["example", "bench", "test", "bin"] {
        let option = match kind {
            "example" => "--example",
            "bench" => "--bench",
            "test" => "--test",
            _ => "--bin",
        };
        for name in value(option) {
            let is_target = |target: &serde_json::Value| target["name"] == name && target["kind"][0] == kind;
            let has_target = |package: &serde_json::Value| {
                package["targets"].as_array().is_some_and(|targets| targets.iter().any(is_target))
            };
            let in_named =
                |package: &serde_json::Value| named.is_empty() || named.iter().any(|name| package["name"] == **name);
            if !packages.iter().any(|package| in_named(package) && has_target(package)) {
                return Err(format!("there is no {kind} {name}"));
            }
        }
    }
    Ok(())
}

#[test]
fn block_is_split_into_commands() {
    let text = "A=1 b 'c d' &  e; f | g # h\n# i\nj \\\n  k $(l m) 2>&1 && n\n";
    let expected: [&[&str]; 6] = [&["A=1", "b", "c d"], &["e"], &["f"], &["g"], &["j", "k", "$(l m)", "2>&1"], &["n"]];
    assert_eq!(split(text), expected);
}

#[test]
fn wrong_commands_are_reported() {
    for (text, fault) in [
        ("make fly", "no target fly"),
        ("cargo test -p nothing", "no package nothing"),
        ("cargo bench -p ferrogin-bench --bench nothing", "no bench nothing"),
        ("dist/ferrogin demo --fly", "unexpected argument '--fly'"),
        ("dist/ferrogin fly", "unrecognized subcommand 'fly'"),
        ("FERROGIN_PROVIDR=softefa make demo", "FERROGIN_PROVIDR is no setting"),
        ("export SOFTEFA_NIC=2", "SOFTEFA_NIC is no setting"),
        ("cc examples/nothing.c", "examples/nothing.c is no file"),
        ("tests/nothing.sh", "tests/nothing.sh is no file"),
        ("rm -rf dist", "nothing checks the program rm"),
    ] {
        let error = check(text).expect_err(text);
        assert!(error.contains(fault), "{text}: {error}");
    }
    assert_eq!(check("make build && dist/ferrogin demo --ranks 2 | cc examples/example.h"), Ok(()));
}
