//! What clap doesn't generate: the subcommands in groups, and the examples and exit statuses of each.

use clap::CommandFactory;
use clap::builder::Styles;
use std::fmt::Write;

/// A subcommand's examples, with what each does, and its exit statuses.
pub struct Page {
    pub name: &'static str,
    pub examples: &'static [(&'static str, &'static str)],
    pub exit: &'static [(&'static str, &'static str)],
}

const PASSED_OR_NOT: [(&str, &str); 2] = [("1", "something failed"), INVALID];
const INVALID: (&str, &str) = ("2", "the arguments are invalid");
const NOT_STARTED: (&str, &str) = ("127", "the program can't be started");
const NOT_INSTALLED: (&str, &str) = ("1", "the software that ferrogin comes with is missing");

pub const PAGES: [Page; 12] = [
    Page {
        name: "demo",
        examples: &[
            ("ferrogin demo", "two ranks on the software card"),
            ("mpirun -np 4 ferrogin demo", "four ranks that mpirun starts"),
            ("FERROGIN_DEVICE=cuda ferrogin gpu -- ferrogin demo --reps 100", "kernels on the software GPU"),
        ],
        exit: &[("0", "all phases passed"), PASSED_OR_NOT[0], INVALID],
    },
    Page {
        name: "doctor",
        examples: &[
            ("ferrogin doctor", "the problems, and how to fix them"),
            ("FERROGIN_PROVIDER=softefa ferrogin doctor --all", "every finding, for the software card"),
        ],
        exit: &[("0", "NCCL can use the plugin"), ("1", "it can't"), INVALID],
    },
    Page {
        name: "perf",
        examples: &[
            ("FERROGIN_PROVIDER=softefa ferrogin perf put", "puts between two ranks on the software card"),
            ("mpirun -np 2 ferrogin perf all --json report.json", "every operation, with a report"),
        ],
        exit: &[("0", "everything was measured"), PASSED_OR_NOT[0], INVALID],
    },
    Page {
        name: "compare",
        examples: &[("ferrogin compare before.json after.json", "the ratios of their figures")],
        exit: &[
            ("0", "the reports were compared"),
            ("1", "a report can't be read"),
            INVALID,
            ("3", "the runs can't be compared"),
            ("4", "a figure got worse (--fail-below)"),
        ],
    },
    Page {
        name: "plot",
        examples: &[("ferrogin plot report.json -o report.svg", "latency and bandwidth against size")],
        exit: &[("0", "the plot was written"), PASSED_OR_NOT[0], INVALID],
    },
    Page {
        name: "validate",
        examples: &[
            ("FERROGIN_PROVIDER=softefa ferrogin validate --quick", "a minute on the software card"),
            ("mpirun -np 2 --host a,b -x FERROGIN_BOOTSTRAP=a:45000 ferrogin validate", "two hosts"),
        ],
        exit: &[("0", "everything passed"), PASSED_OR_NOT[0], INVALID],
    },
    Page {
        name: "trace",
        examples: &[
            ("ferrogin trace card.trace --unfinished", "requests without a completion"),
            ("ferrogin trace card.trace --chrome card.json", "a file for ui.perfetto.dev"),
        ],
        exit: &[("0", "everything was printed"), ("1", "a file or the digits can't be read"), INVALID],
    },
    Page {
        name: "ptx",
        examples: &[("ferrogin ptx > ferrogin_device.ptx", "the PTX, to link with a kernel")],
        exit: &[("0", "the PTX was printed"), ("1", "standard output can't be written"), INVALID],
    },
    Page {
        name: "run",
        examples: &[("FERROGIN_PROVIDER=softefa ferrogin run -n 4 -- ./program", "four ranks on the software card")],
        exit: &[
            ("0", "all ranks exited with 0"),
            ("N", "the status of the first rank that failed"),
            INVALID,
            NOT_STARTED,
        ],
    },
    Page {
        name: "verbs",
        examples: &[
            ("ferrogin verbs -- fi_info -p efa", "libfabric's list of the software cards"),
            ("SOFTEFA_NICS=2 ferrogin verbs -- ibv_devinfo", "rdma-core's, of two cards"),
        ],
        exit: &[("N", "the program's status"), NOT_INSTALLED, INVALID, NOT_STARTED],
    },
    Page {
        name: "gpu",
        examples: &[(
            "FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cuda ferrogin gpu -- ferrogin run -- ./program",
            "a host API program whose kernels are PTX",
        )],
        exit: &[("N", "the program's status"), NOT_INSTALLED, INVALID, NOT_STARTED],
    },
    Page {
        name: "check",
        examples: &[
            ("ferrogin check -- ferrogin run -n 2 -- ./program", "one run of two ranks"),
            ("ferrogin check --seeds 20 --json -- mpirun -np 4 ./program", "20 schedules, one JSON object per report"),
        ],
        exit: &[
            ("0", "nothing is reported"),
            ("1", "something is reported"),
            ("2", "the arguments are invalid, or the program failed"),
        ],
    },
];

/// The subcommands that run another program.
const WRAPPERS: [&str; 4] = ["run", "verbs", "gpu", "check"];

const WIDTH: usize = 80;

/// Returns the tool's arguments, with complete help.
pub fn command() -> clap::Command {
    let mut command = crate::Args::command();
    let groups = groups(&command);
    for page in &PAGES {
        command = command.mut_subcommand(page.name, |of| of.after_long_help(page.text()));
    }
    command.help_template("{about}\n\n{usage-heading} {usage}{after-help}\n\nOptions:\n{options}").after_help(groups)
}

fn heading(text: &str) -> String {
    let style = Styles::styled().get_header().to_owned();
    format!("{style}{text}{style:#}\n")
}

/// Returns the subcommands, in two groups.
fn groups(command: &clap::Command) -> String {
    let visible = || command.get_subcommands().filter(|of| !of.is_hide_set());
    let mut text = heading("Commands:");
    let rows = |is_wrapper: bool, text: &mut String| {
        for of in visible().filter(|of| WRAPPERS.contains(&of.get_name()) == is_wrapper) {
            row(text, of.get_name(), &of.get_about().map(ToString::to_string).unwrap_or_default());
        }
    };
    rows(false, &mut text);
    row(&mut text, "help", "Print this message or the help of the given subcommand");
    text += "\n";
    text += &heading("Commands that run your program:");
    rows(true, &mut text);
    text.trim_end().to_owned()
}

/// Appends a name and its text, which continues in its own column.
fn row(to: &mut String, name: &str, text: &str) {
    const COLUMN: usize = 12;
    let mut line = format!("  {name:<width$}", width = COLUMN - 2);
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH {
            let _ = writeln!(to, "{}", line.trim_end());
            line = " ".repeat(COLUMN);
        }
        if !line.ends_with(' ') {
            line.push(' ');
        }
        line += word;
    }
    let _ = writeln!(to, "{line}");
}

impl Page {
    fn text(&self) -> String {
        let mut text = heading("Examples:");
        for (line, what) in self.examples {
            let _ = writeln!(text, "  # {what}\n  {}", broken(line));
        }
        text += "\n";
        text += &heading("Exit status:");
        for (code, meaning) in self.exit {
            let _ = writeln!(text, "  {code:<5}{meaning}");
        }
        text.trim_end().to_owned()
    }
}

/// Breaks a command that is too long for the terminal.
fn broken(line: &str) -> String {
    if line.len() + 4 <= WIDTH {
        return line.to_owned();
    }
    let at = line[..WIDTH - 6].rfind(' ').expect("a command has words");
    format!("{} \\\n      {}", &line[..at], &line[at + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subcommand_has_examples_that_its_arguments_accept() {
        let command = command();
        let visible: Vec<_> =
            command.get_subcommands().filter(|of| !of.is_hide_set()).map(clap::Command::get_name).collect();
        assert_eq!(visible.len(), PAGES.len(), "{visible:?}");
        for (line, _) in PAGES.iter().flat_map(|page| page.examples) {
            let words = line.split(" > ").next().expect("a command").split_whitespace();
            let words: Vec<_> = words.skip_while(|word| *word != "ferrogin").collect();
            assert!(self::command().try_get_matches_from(&words).is_ok(), "{line}");
        }
    }

    #[test]
    fn help_has_groups_examples_and_exit_statuses() {
        let mut command = command();
        let text = command.render_long_help().to_string();
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what} in {text}"));
        assert!(
            at("\n  demo ") < at("Commands that run your program:") && at("your program:") < at("\n  gpu "),
            "{text}"
        );
        for page in &PAGES {
            let help = command.find_subcommand_mut(page.name).expect("its name").render_long_help().to_string();
            assert!(help.contains("Examples:\n  # ") && help.contains("Exit status:\n  "), "{help}");
        }
    }
}
