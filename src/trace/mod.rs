//! `ferrogin trace`: reads the software card's traces (`SOFTEFA_TRACE`), and decodes single queue entries.

mod chrome;
mod efa;
mod event;
mod fields;
mod hex;
mod mlx5;
mod read;
mod table;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use terminal_size::terminal_size_of;

use event::{Event, Events};

/// The arguments of `ferrogin trace`.
#[derive(Debug, clap::Args)]
pub struct TraceArgs {
    /// Trace files, as named in SOFTEFA_TRACE. With --hex: the bytes of the entry, optionally after its kind.
    #[arg(value_name = "FILE", required_unless_present = "hex")]
    words: Vec<OsString>,
    /// Decodes an entry from hexadecimal digits; without any, entries from standard input, separated by empty lines.
    ///
    /// The kind may come first: efa-wqe, efa-cqe, efa-receive, mlx5-wqe or mlx5-cqe.
    #[arg(long, conflicts_with_all = ["chrome", "fields", "filters"])]
    hex: bool,
    /// Prints JSON, one object per line.
    #[arg(long, conflicts_with = "chrome")]
    json: bool,
    /// Writes a file for chrome://tracing or ui.perfetto.dev, with a span from each request to its completion. `-` is
    /// standard output.
    #[arg(long, value_name = "FILE")]
    chrome: Option<PathBuf>,
    /// Also prints the fields of each work request and completion entry.
    #[arg(long)]
    fields: bool,
    #[command(flatten)]
    filters: Filters,
}

/// Which events are shown.
#[derive(Debug, clap::Args)]
#[group(id = "filters", multiple = true)]
struct Filters {
    /// Only events of this process's cards.
    #[arg(long, value_name = "ID")]
    process: Option<u32>,
    /// Only events of the card with this number.
    #[arg(long, value_name = "NUMBER")]
    card: Option<u32>,
    /// Only events of this queue pair.
    #[arg(long, value_name = "NUMBER")]
    qp: Option<u16>,
    /// Only events of this operation.
    #[arg(long, value_parser = ["send", "write", "read", "recv"])]
    op: Option<String>,
    /// Only requests that completed with this status, and their completions.
    #[arg(long, value_name = "NUMBER", conflicts_with = "errors")]
    status: Option<u8>,
    /// Only requests that completed in error, and their completions.
    #[arg(long)]
    errors: bool,
    /// Only requests and receives without a completion.
    #[arg(long, conflicts_with_all = ["errors", "status"])]
    unfinished: bool,
    /// Only events from this time on, in microseconds since the first event, as in the table.
    #[arg(long, value_name = "US", value_parser = time, allow_negative_numbers = true)]
    from: Option<f64>,
    /// Only events up to this time.
    #[arg(long, value_name = "US", value_parser = time, allow_negative_numbers = true)]
    to: Option<f64>,
    /// Only events of this request id, in decimal, or in hexadecimal after 0x.
    #[arg(long, value_name = "NUMBER", value_parser = number)]
    id: Option<u64>,
}

fn time(text: &str) -> Result<f64, String> {
    let time: Option<f64> = text.parse().ok().filter(|time: &f64| time.is_finite() && *time >= 0.0);
    time.ok_or_else(|| "a time is a number of microseconds of at least 0".into())
}

fn number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "a request id is a decimal number, or 0x and a hexadecimal one, of 64 bits".into())
}

impl Filters {
    fn accept(&self, event: &Event, start_ns: u64) -> bool {
        let record = &event.record;
        let time = (record.time_ns.get() - start_ns) as f64 / 1000.0;
        let is = |wanted: Option<u64>, value: Option<u64>| wanted.is_none_or(|wanted| value == Some(wanted));
        let status = event.final_status();
        is(self.process.map(u64::from), Some(record.process.get().into()))
            && is(self.card.map(u64::from), Some(record.card.get().into()))
            && is(self.qp.map(u64::from), Some(record.qpn.get().into()))
            && is(self.id, event.request_id())
            && is(self.status.map(u64::from), status.map(u64::from))
            && self.op.as_ref().is_none_or(|op| event.operation().is_some_and(|of_event| of_event == **op))
            && (!self.errors || status.is_some_and(|status| status != 0))
            && (!self.unfinished || event.is_unfinished())
            && self.from.is_none_or(|from| time >= from)
            && self.to.is_none_or(|to| time <= to)
    }
}

/// Runs the command.
pub fn run(args: &TraceArgs) -> ExitCode {
    let done = if args.hex { decode(args) } else { show(args) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("ferrogin trace: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn unwritable(what: &str) -> impl Fn(io::Error) -> String {
    move |error| format!("cannot write to {what}: {error}")
}

fn show(args: &TraceArgs) -> Result<(), String> {
    let (mut files, mut damage) = (Vec::new(), Vec::new());
    for path in &args.words {
        let contents = read::read(Path::new(path))?;
        files.push(contents.records);
        damage.extend(contents.damage);
    }
    let all = Events::of(&files);
    drop(files);
    let start = all.start_ns();
    let chosen: Vec<&Event> = all.events.iter().filter(|event| args.filters.accept(event, start)).collect();
    match args.chrome.as_deref().filter(|path| path.as_os_str() != "-") {
        Some(path) => {
            let name = path.display().to_string();
            let failed = unwritable(&name);
            let mut out = BufWriter::new(File::create(path).map_err(&failed)?);
            chrome::write(&mut out, &all, &chosen).and_then(|()| out.flush()).map_err(failed)?;
        }
        None => {
            let mut out = BufWriter::new(io::stdout().lock());
            let written = match (&args.chrome, args.json) {
                (Some(_), _) => chrome::write(&mut out, &all, &chosen),
                (None, true) => table::lines(&mut out, &all, &chosen),
                (None, false) => {
                    let width = terminal_size_of(io::stdout()).map_or(u16::MAX, |(width, _)| width.0);
                    table::table(&mut out, &all, &chosen, args.fields, width)
                }
            };
            written.and_then(|()| out.flush()).map_err(unwritable("standard output"))?;
        }
    }
    if damage.is_empty() { Ok(()) } else { Err(damage.join("\n")) }
}

/// Runs `--hex`.
fn decode(args: &TraceArgs) -> Result<(), String> {
    let mut words = args.words.iter().map(|word| word.to_string_lossy()).peekable();
    let kind = words.next_if(|word| word.contains('-') && **word != *"-");
    let kind = kind.map(|name| {
        hex::Kind::from_name(&name).ok_or_else(|| {
            let names = hex::Kind::ALL.map(hex::Kind::name).join(", ");
            format!("{name:?} is not a kind of entry: the kinds are {names}")
        })
    });
    let kind = kind.transpose()?;
    let mut text = words.collect::<Vec<_>>().join("\n");
    if text.is_empty() || text == "-" {
        text.clear();
        io::stdin().lock().read_to_string(&mut text).map_err(|error| format!("cannot read standard input: {error}"))?;
    }
    let mut out = BufWriter::new(io::stdout().lock());
    let mut entries = 0;
    for part in text.replace('\r', "").split("\n\n").filter(|part| !part.trim().is_empty()) {
        let entry = hex::bytes(part).and_then(|bytes| hex::Entry::decode(kind, &bytes));
        // What was decoded earlier is printed before the error.
        let entry = match entry {
            Ok(entry) => entry,
            Err(problem) => {
                let _ = out.flush();
                return Err(problem);
            }
        };
        let text = if args.json { format!("{}\n", entry.json()) } else { entry.text() };
        let before = if entries > 0 && !args.json { "\n" } else { "" };
        write!(out, "{before}{text}").map_err(unwritable("standard output"))?;
        entries += 1;
    }
    out.flush().map_err(unwritable("standard output"))?;
    if entries == 0 {
        return Err("there are no bytes to decode: give hexadecimal digits as arguments or on standard input".into());
    }
    Ok(())
}
