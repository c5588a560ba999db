//! Driver API programs on the software GPU: C programs, compiled here against this repository's own declarations.

mod programs;

use ferrogin_test_support::wait::HANG_LIMIT;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Returns the directory with libcuda.so.1, which cargo built for this test under another name.
fn library() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let beside = std::env::current_exe().expect("the path of this program");
        let built = beside.parent().expect("a directory").join("libsoft_gpu.so");
        let directory = ferrogin_test_support::of_process(env!("CARGO_TARGET_TMPDIR"), "gpu");
        std::fs::create_dir_all(&directory).expect("a directory");
        std::fs::copy(&built, directory.join("libcuda.so.1"))
            .expect("cargo builds the shared library beside the tests");
        let link = directory.join("libcuda.so");
        if !link.exists() {
            std::os::unix::fs::symlink("libcuda.so.1", link).expect("a link");
        }
        directory
    })
}

/// Compiles a program from `tests/` for one test; without a C compiler, skips the test and returns `None`.
fn compile(test: &str, name: &str) -> Option<PathBuf> {
    let program = library().join(format!("{name}-of-{test}"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(format!("{name}.c"));
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-D_POSIX_C_SOURCE=200809L"]).arg(source);
    cc.arg("-o").arg(&program).arg("-L").arg(library()).arg("-lcuda");
    match cc.output() {
        Err(error) => {
            ferrogin_test_support::skip(test, format!("no C compiler: {error}"));
            None
        }
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
    }
}

/// Runs a program on the software GPU, for at most [`HANG_LIMIT`].
fn run(program: &Path, arguments: &[&Path], settings: &[(&str, &str)]) -> Output {
    let mut command = Command::new("timeout");
    command.arg(HANG_LIMIT.as_secs().to_string()).arg(program).args(arguments);
    command.env("LD_LIBRARY_PATH", library()).envs(settings.iter().copied());
    command.output().expect("timeout starts")
}

/// Returns a program's standard output followed by its standard error.
fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}
