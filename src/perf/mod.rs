//! `ferrogin perf`: latencies, rates and bandwidths between ranks, through the device API on CPU threads or on a GPU.
//! `ferrogin compare` and `ferrogin plot` read its reports.
//!
//! | module | content |
//! |---|---|
//! | [`arguments`] | the command line |
//! | [`settings`] | the settings that the ranks agree on |
//! | [`operation`] | the list of operations |
//! | [`job`] | one rank: the exchange with the other ranks, and what they agree on |
//! | [`session`] | its communicator, window and context for device code; the phases of a measurement |
//! | [`operations`] | how each operation is measured |
//! | [`rpc`], [`rma`] | calls between CPUs; puts and signals through the RMA plugin |
//! | [`statistics`] | latencies and rates from samples |
//! | [`report`], [`output`] | the table, JSON, CSV; the files |
//! | [`plot`], [`compare`] | plots and ratios of reports |

mod arguments;
mod compare;
mod error;
mod job;
mod machine;
mod operation;
mod operations;
mod output;
mod plot;
mod report;
mod rma;
mod rpc;
mod session;
mod settings;
mod statistics;

pub use arguments::PerfArgs;
pub use compare::CompareArgs;
pub use plot::PlotArgs;

use crate::launch::{self, Launcher};
use arguments::Outputs;
use error::Error;
use job::Job;
use mini_nccl::bootstrap::Identity;
use operation::Operation;
use output::Destination;
use report::{Printer, Report, Row};
use rma::Rma;
use rpc::Rpc;
use session::Session;
use settings::Settings;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// The exit code for invalid arguments, as in clap.
const USAGE: u8 = 2;

/// Measures as a rank if a launcher started this process; otherwise starts the ranks and waits for them.
pub fn run(args: &PerfArgs) -> ExitCode {
    let outputs = args.outputs();
    let settings = match args.settings().and_then(|settings| outputs.check(&settings).map(|()| settings)) {
        Ok(settings) => settings,
        Err(error) => return failed(&error, USAGE),
    };
    let mut defaults = vec![("FERROGIN_DEVICE", settings.device.name().into())];
    defaults.extend(software_card_dir().map(|dir| ("FI_PROVIDER_PATH", dir.into())));
    let identity = match launch::identity(args.ranks, &defaults) {
        Ok(identity) => identity,
        Err(error) => return failed(&error, 1),
    };
    if let Some(identity) = identity {
        return rank(&settings, &outputs, &identity).map_or_else(|error| failed(&error, 1), |()| ExitCode::SUCCESS);
    }
    if let Err(error) = outputs.open() {
        return failed(&error, 1);
    }
    match launch::run(args.ranks.unwrap_or(2), Launcher::Builtin, &defaults) {
        Ok((code, None)) => code.into(),
        Ok((code, Some(failure))) => failed(&failure, code),
        Err(error) => failed(&error, 1),
    }
}

/// Returns the software card's directory, if that card is used: it is next to the plugin, which may not be next to this
/// program.
fn software_card_dir() -> Option<PathBuf> {
    let is_used = std::env::var_os("FERROGIN_PROVIDER").is_some_and(|provider| provider == "softefa");
    let plugin = PathBuf::from(scenario_runner::world::plugin_from_env());
    let dir = plugin.parent().filter(|dir| dir.join("libsoftefa-fi.so").is_file())?;
    is_used.then(|| dir.to_owned())
}

/// Plots the reports in files.
pub fn plot(args: &PlotArgs) -> ExitCode {
    plot::run(args).map_or_else(|error| failed(&error, 1), |()| ExitCode::SUCCESS)
}

/// Compares two reports.
pub fn compare(args: &CompareArgs) -> ExitCode {
    compare::run(args).unwrap_or_else(|error| failed(&error, 1))
}

fn failed(reason: &dyn std::fmt::Display, code: u8) -> ExitCode {
    // A single write, because several ranks write.
    let _ = std::io::stderr().write_all(format!("ferrogin: {reason}\n").as_bytes());
    code.into()
}

fn rank(settings: &Settings, outputs: &Outputs, identity: &Identity) -> Result<(), Error> {
    let is_first = identity.rank == 0;
    let destinations = if is_first { outputs.open()? } else { Vec::new() };
    let job = Job::open(settings, identity)?;
    // Operations between CPUs need no card for kernels.
    let needs_session = settings.operations.iter().any(|operation| !operation.is_of_cpus());
    let session = needs_session.then(|| Session::open(&job)).transpose()?;
    let mut report = Report::new(job.about(), settings);
    let mut printer = Printer::new(is_first && !destinations.iter().any(Destination::is_stdout), settings);
    printer.begin(&report)?;
    for &operation in &settings.operations {
        printer.operation(operation)?;
        let mut each_size = |measure: &mut dyn FnMut(u64) -> Result<Option<Row>, Error>| {
            settings.sizes(operation).into_iter().try_for_each(|bytes| {
                printer.measuring(operation, bytes);
                // Only rank 0 has figures.
                if let Some(row) = measure(bytes)? {
                    printer.row(&row)?;
                    report.rows.push(row);
                }
                Ok::<_, Error>(())
            })
        };
        match (operation, &session) {
            (Operation::Rpc, _) => {
                let rpc = Rpc::open(&job)?;
                each_size(&mut |bytes| rpc.measure(&job, bytes))?;
                rpc.close(&job)?;
            }
            (Operation::RmaPut | Operation::RmaPutSignal, _) => {
                let mut rma = Rma::open(&job)?;
                each_size(&mut |bytes| rma.measure(&job, operation, bytes))?;
            }
            (_, Some(session)) => each_size(&mut |bytes| operations::measure(session, operation, bytes))?,
            // The session is open if there is such an operation.
            (_, None) => {}
        }
    }
    job.barrier()?;
    destinations.into_iter().try_for_each(|destination| destination.write(&report))
}
