//! The completions and man pages that `make install` installs: generated from the options, and checked in so that an
//! installation for another processor has them too.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::help::{PAGES, Page, command};
use clap_complete::Shell;

/// Generates the files below `scripts/install/`, by path.
fn files() -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let command = command();
    let subcommands = command.get_subcommands().filter(|of| !of.is_hide_set()).cloned();
    let mut visible = clap::Command::new("ferrogin").version(env!("CARGO_PKG_VERSION")).subcommands(subcommands);
    for (shell, name) in [(Shell::Bash, "ferrogin"), (Shell::Zsh, "_ferrogin"), (Shell::Fish, "ferrogin.fish")] {
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut visible, "ferrogin", &mut text);
        files.insert(Path::new("completions").join(shell.to_string()).join(name), text);
    }
    let mut command = self::command().disable_help_subcommand(true);
    command.build();
    man("ferrogin", &command, &mut files);
    for of in command.get_subcommands().filter(|of| !of.is_hide_set()) {
        let name = format!("ferrogin-{}", of.get_name());
        man(&name, &of.clone().display_name(name.clone()), &mut files);
    }
    files
}

fn man(name: &str, command: &clap::Command, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    let mut text = Vec::new();
    // An empty help still makes an empty section.
    let without_extra = command.clone().after_help("").after_long_help("");
    clap_mangen::Man::new(without_extra).render(&mut text).expect("a vector");
    let mut text = String::from_utf8(text).expect("UTF-8").replace(".SH EXTRA\n", "");
    if let Some(page) = PAGES.iter().find(|page| name == format!("ferrogin-{}", page.name)) {
        text += &sections(page);
    }
    files.insert(Path::new("man").join(format!("{name}.1")), text.into_bytes());
}

/// The sections that clap doesn't know.
fn sections(page: &Page) -> String {
    let escaped = |text: &str| text.replace('-', "\\-").replace('\'', "\\(aq");
    let mut text = ".SH EXAMPLES\n".to_owned();
    for (line, what) in page.examples {
        text += &format!(".TP\n\\fB{}\\fR\n{}\n", escaped(line), escaped(what));
    }
    text += ".SH EXIT STATUS\n";
    for (code, meaning) in page.exit {
        text += &format!(".TP\n\\fB{code}\\fR\n{}\n", escaped(meaning));
    }
    text
}

#[test]
fn completions_and_man_pages_are_those_of_the_options() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/install");
    for (path, text) in files() {
        let file = root.join(path);
        if std::env::var_os("FERROGIN_REFRESH").is_some() {
            std::fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
            std::fs::write(&file, &text).expect("a file");
        }
        let is_current = std::fs::read(&file).is_ok_and(|seen| seen == text);
        let command = "FERROGIN_REFRESH=1 cargo test --release -p ferrogin --bin ferrogin checked_in";
        assert!(is_current, "{} is not that of the options: {command}", file.display());
    }
}

#[test]
fn help_fits_80_columns() {
    let mut command = command();
    command.build();
    let names: Vec<_> = command.get_subcommands().map(|of| of.get_name().to_owned()).collect();
    let mut texts = vec![command.render_long_help().to_string()];
    for name in names {
        let of = command.find_subcommand_mut(&name).expect("its name");
        texts.extend([of.render_help().to_string(), of.render_long_help().to_string()]);
    }
    for line in texts.iter().flat_map(|text| text.lines()) {
        assert!(line.chars().count() <= 80, "{line}");
    }
}
