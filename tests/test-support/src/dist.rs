//! The directory that `make build` fills.

use std::path::{Path, PathBuf};

/// The workspace's root directory.
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// The directory with all of `files`: FERROGIN_DIST, or the workspace's `dist/`. If a file is missing, `test` is
/// skipped.
pub fn dist(test: &str, files: &[&str]) -> Option<PathBuf> {
    let dist = std::env::var_os("FERROGIN_DIST").map_or_else(|| workspace().join("dist"), PathBuf::from);
    match files.iter().find(|file| !dist.join(file).is_file()) {
        None => dist.canonicalize().ok(),
        Some(missing) => {
            super::skip(test, format_args!("{} is missing: run `make build` first", dist.join(missing).display()));
            None
        }
    }
}

/// The directory of the software GPU's libcuda.so.1, for `LD_LIBRARY_PATH`. If it is missing, `test` is skipped.
pub fn software_gpu(test: &str) -> Option<String> {
    Some(dist(test, &["gpu/libcuda.so.1"])?.join("gpu").to_string_lossy().into_owned())
}

/// The environment in which a process finds a software card below verbs, as `ferrogin verbs` sets it. Without the card,
/// `test` is skipped.
pub fn verbs(test: &str) -> Option<[(&'static str, String); 2]> {
    let verbs = dist(test, &["verbs/libibverbs.so.1"])?.join("verbs");
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    Some([("SYSFS_PATH", text(verbs.join("sysfs"))), ("LD_LIBRARY_PATH", text(verbs))])
}
