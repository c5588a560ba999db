//! `cargo xtask release`: tarballs of the libraries, the headers and the tool, for x86-64 and aarch64.
//!
//! The tree is checked first ([`tree`]). Each tarball is what `make install` installs, stripped, and its ELF files are checked ([`elf`]).
//! At the end the tarball of this machine's processor is unpacked elsewhere, and its tool runs the demo.

mod elf;
mod tree;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Options of a release.
#[derive(clap::Args)]
pub struct Options {
    /// Tarballs of any tree, as `ferrogin-VERSION-snapshot-linux-ARCH.tar.gz`: changes that are not committed and an unreleased
    /// section of CHANGELOG.md are allowed.
    #[arg(long)]
    snapshot: bool,
}

/// A processor of the tarballs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arch {
    X86,
    Arm,
}

impl Arch {
    fn name(self) -> &'static str {
        match self {
            Self::X86 => "x86_64",
            Self::Arm => "aarch64",
        }
    }

    /// The processor of this machine.
    fn native() -> Option<Self> {
        [Self::X86, Self::Arm].into_iter().find(|arch| arch.name() == std::env::consts::ARCH)
    }

    /// The prefix of the programs that read and write this processor's ELF files.
    fn binutils(self) -> String {
        if Self::native() == Some(self) { String::new() } else { format!("{}-linux-gnu-", self.name()) }
    }
}

/// Makes the tarballs, and prints a line for each check and file.
pub fn run(root: &Path, options: &Options) -> ExitCode {
    match release(root, options) {
        Ok(files) => {
            files.iter().for_each(|file| println!("{}", file.display()));
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("release: {why}");
            ExitCode::FAILURE
        }
    }
}

fn release(root: &Path, options: &Options) -> Result<Vec<PathBuf>, String> {
    let version = tree::check(root, options.snapshot)?;
    println!("release: the tree of version {version} can be released");
    let target = root.join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into()));
    let (work, out) = (target.join("release-build"), target.join("release-tarballs"));
    let native = Arch::native().ok_or("tarballs are made on x86-64 or aarch64")?;
    let mut arches = vec![native];
    // Only aarch64 is built on other machines.
    match (native, cross_tools(root)) {
        (Arch::X86, Ok(())) => arches.push(Arch::Arm),
        (_, Err(why)) if !options.snapshot => return Err(format!("a release has both tarballs: {why}")),
        (_, Err(why)) => println!("SKIP tarball for the other processor: {why}"),
        (Arch::Arm, Ok(())) => println!("SKIP tarball for x86-64: it is made on x86-64"),
    }
    let time = output(Command::new("git").current_dir(root).args(["log", "-1", "--format=%ct"]))?;
    let mut files = Vec::new();
    for arch in arches {
        let name =
            format!("ferrogin-{version}{}-linux-{}", if options.snapshot { "-snapshot" } else { "" }, arch.name());
        let dist = build(root, &work, arch)?;
        let tree = stage(root, &work, arch, (&dist, &name))?;
        let glibc = elf::check(&tree, arch.name(), &arch.binutils())?;
        tree::check_documented_glibc(root, arch.name(), glibc)?;
        write(&tree.join("REQUIRES"), &requires(arch, glibc))?;
        files.extend(pack(&work.join(arch.name()).join("stage"), &out, &name, time.trim())?);
        println!("release: {name} needs glibc {}.{} or newer", glibc.0, glibc.1);
        try_out(&work, &out, &name, arch)?;
    }
    Ok(files)
}

/// The text that states what a tarball needs.
fn requires(arch: Arch, (major, minor): elf::Glibc) -> String {
    format!(
        "Linux on {}\nglibc {major}.{minor} or newer, and libgcc_s.so.1 (Debian and Ubuntu: libgcc-s1; others: libgcc)\n\
         libfabric 1.17 or newer for the software card; 2.6 or newer for EFA cards\n",
        arch.name()
    )
}

/// Whether this machine can build for aarch64.
fn cross_tools(root: &Path) -> Result<(), String> {
    let mut command = Command::new("bash");
    command
        .args(["-c", ". scripts/aarch64-tools.sh; aarch64_tools || { echo \"$why\" >&2; exit 1; }"])
        .current_dir(root);
    let output = command.output().map_err(|error| format!("bash: {error}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()) }
}

/// Builds with `make build`, in directories of its own. Returns the directory of the results.
fn build(root: &Path, work: &Path, arch: Arch) -> Result<PathBuf, String> {
    let dist = work.join(arch.name()).join("dist");
    remove(&dist)?;
    let target = work.join("target");
    let mut command = Command::new("bash");
    // A tarball does not depend on where the repository and cargo's own files lie.
    let home =
        std::env::var("CARGO_HOME").unwrap_or_else(|_| format!("{}/.cargo", std::env::var("HOME").unwrap_or_default()));
    let flags = format!("--remap-path-prefix={}=. --remap-path-prefix={home}=cargo", root.display());
    command
        .current_dir(root)
        .env("RUSTFLAGS", flags)
        .env("CARGO_TARGET_DIR", &target)
        .env("FERROGIN_PTX", "checked-in");
    command.env("DIST", &dist).env("CARGO_INCREMENTAL", "0").env("CARGO_PROFILE_RELEASE_DEBUG", "false");
    for name in ["MAKEFLAGS", "MAKELEVEL", "MFLAGS", "BUILD_FLAGS", "RELEASE"] {
        command.env_remove(name);
    }
    command.arg("-c").arg(if Arch::native() == Some(arch) {
        "make --no-print-directory build DIST=\"$DIST\""
    } else {
        ". scripts/aarch64-tools.sh && aarch64_tools && CC=\"$gnu-gcc\" make --no-print-directory build DIST=\"$DIST\" CARGO=\"$cargo\" \
         BUILD_FLAGS=\"${options[*]}\" RELEASE=\"$CARGO_TARGET_DIR/$target/release\""
    });
    run_quietly(&mut command)?;
    // What `make install` copies to lib/ferrogin/cuda: the device code as it is checked in, in every form.
    let cuda = dist.join("cuda");
    std::fs::create_dir_all(&cuda).map_err(|error| format!("{}: {error}", cuda.display()))?;
    for form in ["ferrogin_device.ptx", "ferrogin_device.bc"] {
        let checked_in = root.join("ptx").join(form);
        if checked_in.is_file() {
            std::fs::copy(&checked_in, cuda.join(form)).map_err(|error| format!("{form}: {error}"))?;
        }
    }
    Ok(dist)
}

/// The tree of a tarball: what `make install` installs, stripped, with the documents.
fn stage(root: &Path, work: &Path, arch: Arch, (dist, name): (&Path, &str)) -> Result<PathBuf, String> {
    let stage = work.join(arch.name()).join("stage");
    remove(&stage)?;
    let mut make = Command::new("make");
    make.current_dir(root).args(["--no-print-directory", "install"]).env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
    make.arg(format!("DIST={}", dist.display()))
        .arg(format!("DESTDIR={}", stage.display()))
        .arg(format!("PREFIX=/{name}"));
    run_quietly(make.arg(format!("LIBDIR=/{name}/lib")))?;
    let tree = stage.join(name);
    for document in ["README.md", "LICENSE", "CHANGELOG.md"] {
        std::fs::copy(root.join(document), tree.join(document)).map_err(|error| format!("{document}: {error}"))?;
    }
    let mut strip = Command::new(format!("{}strip", arch.binutils()));
    run_quietly(strip.arg("--strip-unneeded").args(elf::files(&tree)?))?;
    Ok(tree)
}

/// Packs the tree `name` in the directory `stage`. The same files give the same bytes, whenever, wherever and by whichever user they are
/// packed. `time` is that of all files, in seconds since 1970.
fn pack(stage: &Path, out: &Path, name: &str, time: &str) -> Result<[PathBuf; 2], String> {
    std::fs::create_dir_all(out).map_err(|error| format!("{}: {error}", out.display()))?;
    let (tarball, sum) = (out.join(format!("{name}.tar.gz")), out.join(format!("{name}.tar.gz.sha256")));
    let script = "chmod -R u=rwX,go=rX \"$1\" && tar --create --format=ustar --sort=name --mtime=\"@$2\" --owner=0 --group=0 \
                  --numeric-owner \"$1\" | gzip --no-name --best >\"$3.new\" && mv \"$3.new\" \"$3\" && cd \"$(dirname \"$3\")\" \
                  && sha256sum \"$(basename \"$3\")\" >\"$4\"";
    let mut command = Command::new("bash");
    command.current_dir(stage).args(["-o", "pipefail", "-c", script, "pack", name, time]).arg(&tarball).arg(&sum);
    run_quietly(&mut command)?;
    Ok([tarball, sum])
}

/// Unpacks the tarball in an empty directory, checks its sum, and runs its tool: the demo, or on another processor what an emulator can.
fn try_out(work: &Path, out: &Path, name: &str, arch: Arch) -> Result<(), String> {
    let place = work.join(arch.name()).join("unpacked");
    remove(&place)?;
    std::fs::create_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
    run_quietly(
        Command::new("sha256sum").current_dir(out).args(["--check", "--quiet"]).arg(format!("{name}.tar.gz.sha256")),
    )?;
    run_quietly(
        Command::new("tar")
            .current_dir(&place)
            .args(["--extract", "--gzip", "--file"])
            .arg(out.join(format!("{name}.tar.gz"))),
    )?;
    let tool = place.join(name).join("bin/ferrogin");
    let mut command = if Arch::native() == Some(arch) {
        let mut command = Command::new(tool);
        command.arg("demo");
        command
    } else {
        // Its own C library is that of the cross compiler.
        let mut command = Command::new("qemu-aarch64");
        command.args(["-L", "/usr/aarch64-linux-gnu"]).arg(tool).arg("--version");
        command
    };
    // Nothing of the build's directories may be found.
    for (variable, _) in std::env::vars_os() {
        let text = variable.to_string_lossy();
        if ["FERROGIN_", "SOFTEFA_", "FI_", "NCCL_", "LD_LIBRARY_PATH"].iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&variable);
        }
    }
    // The machine's own libfabric may be named by path.
    if let Some(libfabric) = std::env::var_os("FERROGIN_LIBFABRIC") {
        command.env("FERROGIN_LIBFABRIC", libfabric);
    }
    command.env("FERROGIN_PROVIDER", "softefa").env("FERROGIN_DEVICE", "cpu").current_dir(&place);
    match run_quietly(&mut command) {
        Ok(()) if Arch::native() == Some(arch) => println!("release: {name}: the demo passed in an empty directory"),
        Ok(()) => println!("release: {name}: the tool prints its version in an emulator"),
        Err(why) if why.contains("No such file") && Arch::native() != Some(arch) => {
            println!("SKIP run of {name}: {why}")
        }
        Err(why) => return Err(why),
    }
    remove(&place)
}

fn remove(path: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
        _ => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Runs a command that must succeed, and prints what it said only if it fails.
fn run_quietly(command: &mut Command) -> Result<(), String> {
    output(command).map(drop)
}

fn output(command: &mut Command) -> Result<String, String> {
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| format!("{:?}: {error}", command.get_program()))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(format!("{command:?}: {}\n{}{}", output.status, text(&output.stdout), text(&output.stderr)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_files_give_the_same_tarball() {
        let place = std::env::temp_dir().join(format!("xtask-pack-{}", std::process::id()));
        let sums = [("0700", 10), ("0755", 20)].map(|(mode, second)| {
            let stage = place.join(mode);
            let tree = stage.join("tree");
            std::fs::create_dir_all(tree.join("bin")).unwrap();
            // Some file systems list files in the order in which they were made.
            let names = if mode == "0700" { ["b", "a", "c"] } else { ["c", "a", "b"] };
            names.iter().for_each(|name| std::fs::write(tree.join("bin").join(name), name).unwrap());
            output(Command::new("chmod").args(["-R", mode]).arg(&tree)).unwrap();
            let date = format!("2001-02-03 04:05:{second}");
            output(Command::new("touch").args(["--date", &date]).arg(tree.join("bin/a"))).unwrap();
            let [tarball, sum] = pack(&stage, &place.join("out"), "tree", "1000000000").unwrap();
            let listing =
                output(Command::new("tar").args(["--list", "--verbose", "--gzip", "--file"]).arg(tarball)).unwrap();
            assert!(listing.contains("2001-09-09") && listing.ends_with("tree/bin/c\n"), "{listing}");
            assert!(listing.lines().all(|line| line.contains(" 0/0 ") || line.contains(" root/root ")), "{listing}");
            std::fs::read_to_string(sum).unwrap()
        });
        std::fs::remove_dir_all(&place).unwrap();
        assert!(sums[0].ends_with("  tree.tar.gz\n"), "{}", sums[0]);
        assert_eq!(sums[0], sums[1]);
    }

    #[test]
    fn failed_command_is_reported_with_its_output() {
        let error = run_quietly(Command::new("bash").args(["-c", "echo one; echo two >&2; exit 3"])).unwrap_err();
        assert!(error.contains("exit status: 3\none\ntwo\n"), "{error}");
    }
}
