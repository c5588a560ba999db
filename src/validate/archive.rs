//! The report archive: a .tar.gz with a MANIFEST, without secrets.

use flate2::Compression;
use flate2::write::GzEncoder;
use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Most bytes per file in the archive: the end is kept.
pub const FILE_MAX: usize = 256 << 10;
/// Names this short may be parts of other words, so only whole words are replaced.
const SHORT: usize = 3;
/// The directory in the archive.
const TOP: &str = "ferrogin-report";

/// What the archive contains, by file name pattern. MANIFEST and docs/validate.md have this text.
pub const CONTENTS: [(&str, &str); 7] = [
    ("summary.txt, summary.json", "the steps and the comparison with the software card"),
    ("rank-N/doctor.json", "the report of `ferrogin doctor --json` on that rank"),
    ("rank-N/scenario-NAME.txt", "the output of a failed scenario"),
    ("rank-N/fidelity.txt", "the output and observations of the card check"),
    (
        "rank-N/perf.txt, rank-0/perf.json",
        "the table and figures of `ferrogin perf`; with PTX kernels in perf-ptx.txt and perf-ptx.json, with the RMA \
         plugin in rma.txt and rma.json",
    ),
    ("rank-N/environment.txt", "the values of the variables that MANIFEST lists, if they are set"),
    ("rank-N/machine.txt", "kernel release, architecture, processors, memory, instance type"),
];

/// A file that becomes the archive once it is complete.
pub struct Output {
    path: PathBuf,
    part: PathBuf,
    file: File,
}

impl Output {
    /// Creates the file next to its final place.
    ///
    /// # Errors
    /// The directory does not exist or refuses files.
    pub fn create(path: &Path) -> Result<Output, String> {
        let failed = |error: io::Error| {
            format!(
                "the report cannot be written to {}: {error}; name a file in a directory that exists and is writable with --output",
                path.display()
            )
        };
        if path.is_dir() {
            return Err(failed(io::Error::from(io::ErrorKind::IsADirectory)));
        }
        let mut part = path.as_os_str().to_owned();
        // A name that another user cannot take in advance.
        part.push(format!(".{:016x}.part", RandomState::new().build_hasher().finish()));
        let part = PathBuf::from(part);
        let file = File::create_new(&part).map_err(failed)?;
        Ok(Output { path: path.to_owned(), part, file })
    }

    /// Writes the archive and gives it its final name.
    ///
    /// # Errors
    /// The disk is full, or the file cannot be renamed.
    pub fn write(mut self, files: &BTreeMap<String, String>) -> Result<PathBuf, String> {
        let bytes = pack(files).map_err(|error| self.failed(&error))?;
        self.file.write_all(&bytes).map_err(|error| self.failed(&error))?;
        self.file.sync_all().map_err(|error| self.failed(&error))?;
        std::fs::rename(&self.part, &self.path).map_err(|error| self.failed(&error))?;
        Ok(self.path.clone())
    }

    fn failed(&self, error: &io::Error) -> String {
        format!("the report cannot be written to {}: {error}", self.path.display())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // The file is already gone once the report is complete.
        let _ = std::fs::remove_file(&self.part);
    }
}

/// Returns the archive's bytes. All entries have the same owner, permissions and time.
fn pack(files: &BTreeMap<String, String>) -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for (name, text) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, format!("{TOP}/{name}"), text.as_bytes())?;
    }
    archive.into_inner()?.finish()
}

/// Returns MANIFEST's text.
pub fn manifest(files: &BTreeMap<String, String>, variables: &[&str]) -> String {
    let mut text = format!("A report by ferrogin {}, for its developers. It contains:\n\n", env!("CARGO_PKG_VERSION"));
    for (names, content) in CONTENTS {
        text += &format!("{names}\n    {content}\n");
    }
    text += "\nHost names, the home directory and IP addresses are replaced by <host>, <home> and <address> in all \
             files.\nValues of other variables are left out; library paths and device names are not. Of a file \
             longer than 256 KiB, only the end is kept.\n\nThe listed variables:\n";
    for line in variables.chunks(3) {
        text += &format!("    {}\n", line.join(", "));
    }
    text += "\nThe files of this archive:\n";
    for (name, content) in files {
        text += &format!("    {:>8} bytes  {name}\n", content.len());
    }
    text
}

/// Replaces what identifies a host or a person.
#[derive(Debug, Clone)]
pub struct Redaction(Vec<(String, &'static str)>);

impl Redaction {
    /// Redacts this process's host and home directory, and `hosts`.
    pub fn new(hosts: impl IntoIterator<Item = String>) -> Redaction {
        let own = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
        let short = own.split('.').next().unwrap_or_default().to_owned();
        Redaction::of(hosts.into_iter().chain([own, short]), std::env::var("HOME").unwrap_or_default())
    }

    fn of(hosts: impl IntoIterator<Item = String>, home: String) -> Redaction {
        let hosts = hosts.into_iter().map(|host| (host, "<host>"));
        let mut words: Vec<(String, &'static str)> = hosts.chain([(home, "<home>")]).collect();
        // A short number as a host name cannot be told apart from a report's other numbers, and `/` is part of every
        // path.
        let is_short_number = |word: &str| word.len() <= SHORT && word.bytes().all(|byte| byte.is_ascii_digit());
        words.retain(|(word, _)| !is_short_number(word) && word != "/" && word != "localhost");
        words.sort_by_key(|(word, _)| std::cmp::Reverse(word.len()));
        Redaction(words)
    }

    /// Returns the last [`FILE_MAX`] bytes of `text`, without names and addresses.
    pub fn apply(&self, text: &str) -> String {
        let start = text.len().saturating_sub(FILE_MAX);
        let start = (start..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
        // Addresses come first: a short name can be part of one.
        let mut text = without_addresses(&text[start..]);
        for (word, by) in &self.0 {
            text = if word.len() > SHORT { text.replace(word.as_str(), by) } else { replace_whole(&text, word, by) };
        }
        text
    }
}

/// Replaces `word` where it is not next to a letter or digit. In JSON, the letter of an escaped line end or tab doesn't
/// count.
fn replace_whole(text: &str, word: &str, by: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut copied = 0;
    for (at, _) in text.match_indices(word) {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        let begins = !before.ends_with(char::is_alphanumeric) || before.ends_with("\\n") || before.ends_with("\\t");
        if begins && !after.starts_with(char::is_alphanumeric) {
            result += &text[copied..at];
            result += by;
            copied = at + word.len();
        }
    }
    result + &text[copied..]
}

/// Replaces IP addresses, except loopback and unspecified ones.
fn without_addresses(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut word = String::new();
    let mut in_word = false;
    for c in text.chars().chain(['\n']) {
        if c.is_ascii_alphanumeric() || matches!(c, '.' | ':' | '_' | '-') {
            word.push(c);
            in_word = true;
            continue;
        }
        if in_word {
            result += &redacted(&word);
            word.clear();
            in_word = false;
        }
        result.push(c);
    }
    // The line end that ended the last word.
    result.pop();
    result
}

fn redacted(word: &str) -> String {
    let trimmed = word.trim_end_matches(['.', ':', '-']);
    let tail = &word[trimmed.len()..];
    let is_private =
        |text: &str| text.parse::<IpAddr>().is_ok_and(|address| !address.is_loopback() && !address.is_unspecified());
    if is_private(trimmed) {
        return format!("<address>{tail}");
    }
    match trimmed.rsplit_once(':') {
        Some((host, port)) if is_private(host) => format!("<address>:{port}{tail}"),
        _ => word.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_replaced_and_versions_stay() {
        let redaction = Redaction::of(["node17".into()], "/home/alice".into());
        let text = "/home/alice/x on node17: 10.1.2.3:4567, 192.0.2.7. fe80::1 [2001:db8::2]:9; 127.0.0.1 ok; libfabric 1.20.0, 550.54.14; std::fmt::abc";
        assert_eq!(
            redaction.apply(text),
            "<home>/x on <host>: <address>:4567, <address>. <address> [<address>]:9; 127.0.0.1 ok; libfabric 1.20.0, 550.54.14; std::fmt::abc"
        );
    }

    #[test]
    fn short_host_name_is_replaced_where_it_is_a_word() {
        let redaction = |host: &str| Redaction::of([host.to_owned()], "/".to_owned());
        assert_eq!(
            redaction("n1").apply("n1: on1 n12 n1.corp \"n1\" n1-eth0 ferrogin_n1 /n1/ n1"),
            "<host>: on1 n12 <host>.corp \"<host>\" <host>-eth0 ferrogin_<host> /<host>/ <host>"
        );
        assert_eq!(redaction("db1").apply("db1 on db10"), "<host> on db10");
        assert_eq!(redaction("n1").apply("\"on:\\nn1\\tn1\""), "\"on:\\n<host>\\t<host>\"");
        assert_eq!(redaction("c").apply("c, cc, fe80::c"), "<host>, cc, <address>");
        assert_eq!(redaction("n1.eu").apply("n1.eu and n1"), "<host> and n1", "Redaction::new adds the short name");
        // Neither numbers nor paths are host names.
        assert_eq!(redaction("1").apply("{\"ranks\": 1} /proc/self"), "{\"ranks\": 1} /proc/self");
        assert_eq!(redaction("").apply("as it was"), "as it was");
    }

    #[test]
    fn report_is_written_although_its_temporary_name_is_taken() {
        let report = std::env::temp_dir().join(format!("ferrogin-report-{}.tar.gz", std::process::id()));
        let taken = format!("{}.{}.part", report.display(), std::process::id());
        std::fs::write(&taken, "of another user").unwrap();
        let output = Output::create(&report);
        std::fs::remove_file(taken).unwrap();
        drop(output.unwrap());
    }

    #[test]
    fn unwritable_output_is_an_error_with_its_fix() {
        for path in ["/nonexistent/report.tar.gz", "/"] {
            let error = Output::create(Path::new(path)).err().expect("an error");
            assert!(error.contains(path) && error.contains("--output"), "{error}");
        }
    }

    #[test]
    fn manifest_lists_files_and_variables() {
        let files = BTreeMap::from([("summary.txt".to_owned(), "text".to_owned())]);
        let text = manifest(&files, &["FI_PROVIDER"]);
        assert!(text.contains("4 bytes  summary.txt") && text.contains("FI_PROVIDER"), "{text}");
    }
}
