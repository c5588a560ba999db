//! `ferrogin pack`: packs a directory into an archive like those of `ferrogin validate`.

use crate::validate::archive::{Output, Redaction};
use crate::validate::machine;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The arguments of `ferrogin pack`.
#[derive(Debug, clap::Args)]
pub struct PackArgs {
    /// The directory, whose files become those of the archive.
    directory: PathBuf,
    /// The archive; an older file of this name is replaced.
    #[arg(short, long, value_name = "FILE.tar.gz")]
    output: PathBuf,
}

/// Packs the files.
pub fn run(args: &PackArgs) -> ExitCode {
    match pack(&args.directory, &args.output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ferrogin pack: {error}");
            ExitCode::FAILURE
        }
    }
}

fn pack(directory: &Path, output: &Path) -> Result<(), String> {
    let failed = |path: &Path, error: std::io::Error| format!("{} cannot be read: {error}", path.display());
    let output = Output::create(output)?;
    let redaction = Redaction::new([]);
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).map_err(|error| failed(directory, error))? {
        let path = entry.map_err(|error| failed(directory, error))?.path();
        let Some(name) = path.file_name().filter(|_| path.is_file()) else { continue };
        let bytes = std::fs::read(&path).map_err(|error| failed(&path, error))?;
        files.insert(name.to_string_lossy().into_owned(), redaction.apply(&String::from_utf8_lossy(&bytes)));
    }
    files.insert("environment.txt".into(), machine::environment(&redaction));
    files.insert("machine.txt".into(), machine::facts(&redaction));
    output.write(&files).map(drop)
}
