//! What `make install` installs: programs find it with pkg-config and CMake, even after it has moved from its prefix.

use crate::common::{dist, on_software_card, text};
use crate::examples::passes;
use ferrogin_test_support::{skip, workspace};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PREFIX: &str = "/opt/ferrogin";
const VERSION: &str = env!("CARGO_PKG_VERSION");
const MAJOR: &str = env!("CARGO_PKG_VERSION_MAJOR");
/// The usual library directory below the prefix, and a multiarch system's.
const LIB: &str = "lib";
const MULTIARCH: &str = "lib/x86_64-linux-gnu";

/// An installation below a temporary directory, removed on drop.
struct Installed {
    dist: PathBuf,
    root: PathBuf,
    lib: String,
}

impl Installed {
    /// Installs what `make build` built. Without that, or without make, skips `test`.
    fn new(test: &str, lib: &str) -> Option<Installed> {
        let dist = dist(test)?;
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
        let installed = Installed { dist, root, lib: lib.to_owned() };
        succeeds(test, &mut installed.make("install")).map(|_| installed)
    }

    fn make(&self, target: &str) -> Command {
        let mut make = Command::new("make");
        make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").arg("-C").arg(workspace()).arg(target);
        let value = |name: &str, path: &Path| format!("{name}={}", path.display());
        make.args([value("DIST", &self.dist), value("DESTDIR", &self.root), format!("PREFIX={PREFIX}")]);
        make.arg(value("LIBDIR", &Path::new(PREFIX).join(&self.lib)));
        make
    }

    fn prefix(&self) -> PathBuf {
        self.root.join(PREFIX.trim_start_matches('/'))
    }

    fn lib(&self) -> PathBuf {
        self.prefix().join(&self.lib)
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

/// Returns the output of a command that must succeed. If its program is missing, skips `test`.
fn succeeds(test: &str, command: &mut Command) -> Option<Output> {
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{command:?}: {}", text(&output));
            Some(output)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            skip(test, format_args!("{} is not installed", command.get_program().display()));
            None
        }
        Err(error) => panic!("{command:?}: {error}"),
    }
}

/// Returns the files and links below `directory`.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() && !path.is_symlink() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn installed_libraries_have_their_sonames() {
    let test = "installed_libraries_have_their_sonames";
    let Some(installed) = Installed::new(test, LIB) else { return };
    let lib = installed.lib();
    for name in ["libferrogin.so", "libferrogin_device.so"] {
        let (file, soname) = (format!("{name}.{VERSION}"), format!("{name}.{MAJOR}"));
        assert_eq!(lib.join(name).canonicalize().expect("a link"), lib.canonicalize().unwrap().join(&file));
        assert_eq!(std::fs::read_link(lib.join(&soname)).expect("a link"), Path::new(&file));
        if let Some(output) = succeeds(test, Command::new("readelf").arg("-d").arg(lib.join(file))) {
            assert!(text(&output).contains(&format!("Library soname: [{soname}]")), "{}", text(&output));
        }
    }
    // The PTX, and what `make ptx` built.
    assert!(lib.join("ferrogin/cuda/ferrogin_device.ptx").is_file() && lib.join("ferrogin/gpu/cuda.h").is_file());
    let names = |directory: &Path| {
        let files = if directory.is_dir() { files(directory) } else { Vec::new() };
        files.iter().map(|path| path.file_name().expect("a name").to_owned()).collect::<BTreeSet<_>>()
    };
    assert_eq!(names(&lib.join("ferrogin/cuda")), names(&installed.dist.join("cuda")));
}

#[test]
fn every_user_can_read_the_installation_whatever_the_umask() {
    let test = "every_user_can_read_the_installation_whatever_the_umask";
    let Some(dist) = dist(test) else { return };
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
    let installed = Installed { dist, root, lib: MULTIARCH.to_owned() };
    let make = installed.make("install");
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"umask 077; "$@""#, "sh"]).arg(make.get_program()).args(make.get_args());
    shell.env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
    if succeeds(test, &mut shell).is_none() {
        return;
    }
    // What others can't read, or only the owner can execute or enter.
    let mut find = Command::new("find");
    find.arg(&installed.root).args(["!", "-type", "l", "(", "!", "-perm", "-044", "-o"]);
    find.args(["-perm", "-100", "!", "-perm", "-011", ")"]);
    if let Some(output) = succeeds(test, &mut find) {
        assert_eq!(text(&output), "", "what others cannot use");
    }
}

#[test]
fn libraries_are_below_the_prefix() {
    let test = "libraries_are_below_the_prefix";
    let Some(dist) = dist(test) else { return };
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}-{}", std::process::id()));
    let installed = Installed { dist, root, lib: "/usr/lib".to_owned() };
    match installed.make("install").output() {
        Ok(output) => {
            let expected = "LIBDIR=/usr/lib is not below PREFIX=/opt/ferrogin: choose a directory in it";
            assert!(!output.status.success() && text(&output).contains(expected), "{}", text(&output));
            assert!(!installed.root.exists());
        }
        Err(error) => skip(test, error),
    }
}

#[test]
#[ignore = "make check"]
fn installed_tool_finds_the_plugin_and_the_software_card() {
    let test = "installed_tool_finds_the_plugin_and_the_software_card";
    for lib in [LIB.to_owned(), format!("lib/{}-linux-gnu", std::env::consts::ARCH)] {
        let Some(installed) = Installed::new(test, &lib) else { return };
        let mut tool = Command::new(installed.prefix().join("bin/ferrogin"));
        // Without NCCL_GIN_PLUGIN, the doctor reports a problem in NCCL's area.
        tool.args(["doctor", "--all", "--only", "plugin"]).env_remove("NCCL_GIN_PLUGIN");
        if let Some(output) = succeeds(test, on_software_card(&mut tool)) {
            let plugin = installed.lib().join("libnccl-gin-ferrogin.so");
            assert!(text(&output).contains(&*plugin.to_string_lossy()), "{}", text(&output));
        }
        let mut tool = Command::new(installed.prefix().join("bin/ferrogin"));
        tool.args(["verbs", "--", "printenv", "LD_LIBRARY_PATH"]).env_remove("FERROGIN_DIST");
        if let Some(output) = succeeds(test, &mut tool) {
            let verbs = installed.lib().join("ferrogin/verbs");
            assert!(text(&output).contains(&*verbs.to_string_lossy()), "{}", text(&output));
        }
    }
}

#[test]
fn uninstall_removes_what_install_installed() {
    let test = "uninstall_removes_what_install_installed";
    let Some(installed) = Installed::new(test, MULTIARCH) else { return };
    assert!(files(&installed.root).len() > 10);
    let of_others = installed.lib().join("libother.so");
    std::fs::write(&of_others, "").expect("a file");
    for document in ["LICENSE", "THIRD-PARTY-NOTICES.txt", "sbom.cdx.json", "docs/settings.md", "examples/example.h"] {
        assert!(installed.prefix().join("share/doc/ferrogin").join(document).is_file(), "{document}");
    }
    for file in ["man/man1/ferrogin-doctor.1", "bash-completion/completions/ferrogin", "zsh/site-functions/_ferrogin"] {
        assert!(installed.prefix().join("share").join(file).is_file(), "{file}");
    }
    // Left over from an older release that was installed here.
    std::fs::write(installed.lib().join("libferrogin.so.0.0.9"), "").expect("a file");
    std::fs::write(installed.prefix().join("share/man/man1/ferrogin-old.1"), "").expect("a file");
    succeeds(test, &mut installed.make("uninstall"));
    assert_eq!(files(&installed.root), [of_others]);
}

#[test]
fn pkg_config_gives_the_flags_of_a_program() {
    let test = "pkg_config_gives_the_flags_of_a_program";
    let Some(installed) = Installed::new(test, MULTIARCH) else { return };
    let pkg_config = |arguments: &[&str]| {
        let mut command = Command::new("pkg-config");
        let output = succeeds(test, command.env("PKG_CONFIG_PATH", installed.lib().join("pkgconfig")).args(arguments))?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(version) = pkg_config(&["--modversion", "ferrogin"]) else { return };
    assert_eq!(version, VERSION);
    let flags = pkg_config(&["--cflags", "--libs", "ferrogin"]).expect("flags");
    let lib = pkg_config(&["--variable=libdir", "ferrogin"]).expect("a directory");
    let program = installed.root.join("exchange");
    let mut compiler = Command::new("cc");
    compiler.current_dir(env!("CARGO_MANIFEST_DIR")).args(["-std=c11", "examples/exchange.c", "-o"]).arg(&program);
    compiler.args(flags.split_whitespace()).arg(format!("-Wl,-rpath,{lib}"));
    if succeeds(test, &mut compiler).is_some() {
        passes(&program, 2, test);
    }
}

#[test]
#[ignore = "make check"]
fn cmake_package_gives_the_target_of_a_program() {
    let test = "cmake_package_gives_the_target_of_a_program";
    let Some(installed) = Installed::new(test, LIB) else { return };
    let (source, build) = (installed.root.join("source"), installed.root.join("build"));
    std::fs::create_dir(&source).expect("a directory");
    for file in ["exchange.c", "CMakeLists.txt"] {
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(file);
        std::fs::copy(example, source.join(file)).expect("a copy");
    }
    // CMake reads this file after project().
    let other_versions = installed.root.join("versions.cmake");
    let text = format!(
        "find_package(ferrogin 99 QUIET)
if(ferrogin_FOUND)
  message(FATAL_ERROR \"the package takes itself for a later release\")
endif()
find_package(ferrogin {VERSION} REQUIRED)
"
    );
    std::fs::write(&other_versions, text).expect("a file");
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(&source).arg("-B").arg(&build);
    configure.arg(format!("-DCMAKE_PREFIX_PATH={}", installed.prefix().display()));
    configure.arg(format!("-DCMAKE_PROJECT_INCLUDE={}", other_versions.display()));
    if succeeds(test, &mut configure).is_some() {
        succeeds(test, Command::new("cmake").arg("--build").arg(&build));
        passes(&build.join("exchange"), 2, test);
    }
}

#[test]
fn relative_prefix_and_prefix_with_a_space_are_refused() {
    let test = "relative_prefix_and_prefix_with_a_space_are_refused";
    if dist(test).is_none() {
        return;
    }
    for target in ["install", "uninstall"] {
        for (prefix, problem) in
            [("usr", "PREFIX=usr is relative"), ("/opt/my ferrogin", "must have no spaces: /opt/my ferrogin")]
        {
            let mut make = Command::new("make");
            make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").arg("-C").arg(workspace());
            let output = match make.args([target, &format!("PREFIX={prefix}"), "DESTDIR=/nonexistent"]).output() {
                Ok(output) => output,
                Err(error) => return skip(test, format_args!("make: {error}")),
            };
            assert!(!output.status.success() && text(&output).contains(problem), "{}", text(&output));
        }
    }
}
