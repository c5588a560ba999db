//! A measurement's output files.

use super::error::Error;
use super::plot;
use super::report::Report;
use crate::stdout;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// An output's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Json,
    Csv,
    Svg,
}

/// A file to write, or standard output.
pub struct Destination {
    path: PathBuf,
    format: Format,
}

impl Destination {
    /// Checks that the file can be written. An existing file keeps its content until [`write`](Self::write).
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(path: &Path, format: Format) -> Result<Self, Error> {
        let destination = Self { path: path.to_owned(), format };
        if !destination.is_stdout() {
            let is_new = !path.exists();
            let opened = OpenOptions::new().append(true).create(true).open(path);
            opened.map_err(|error| destination.failed(&error))?;
            if is_new {
                // A run that fails leaves no empty file.
                let _ = std::fs::remove_file(path);
            }
        }
        Ok(destination)
    }

    /// Returns true for `-`.
    pub fn is_stdout(&self) -> bool {
        self.path.as_os_str() == "-"
    }

    /// Writes the report.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, report: &Report) -> Result<(), Error> {
        let text = match self.format {
            Format::Json => report.json()?,
            Format::Csv => report.csv(),
            Format::Svg => plot::draw(&[(String::new(), report.clone())])?,
        };
        if self.is_stdout() {
            return Ok(stdout::print(text)?);
        }
        let written = File::create(&self.path).and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &std::io::Error) -> Error {
        Error::File { action: "write", path: self.path.clone(), text: error.to_string() }
    }
}
