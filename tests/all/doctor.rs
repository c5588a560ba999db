//! `ferrogin doctor` on broken set-ups: each case breaks one part and names the finding that must follow, with its fix.

use ferrogin_test_support::wait::HANG_LIMIT;
use serde_json::Value;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

const PLUGIN: &str = "libnccl-gin-ferrogin.so";
const PROVIDER: &str = "libsoftefa-fi.so";

fn dist(test: &str) -> Option<PathBuf> {
    ferrogin_test_support::dist(test, &[PLUGIN, PROVIDER])
}

/// A directory with its own plugin and provider, removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn new(dist: Option<&Path>) -> Directory {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("ferrogin-doctor-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let directory = Directory(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&directory.0).expect("a directory");
        for file in dist.into_iter().flat_map(|dist| [dist.join(PLUGIN), dist.join(PROVIDER)]) {
            let to = directory.path(&file.file_name().expect("a name").to_string_lossy());
            if std::fs::hard_link(&file, &to).is_err() {
                std::fs::copy(&file, &to).expect("a copy");
            }
        }
        directory
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    /// Replaces a link with a changed copy of the file.
    fn change(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(self.path(name)).expect("a file");
        std::fs::remove_file(self.path(name)).expect("a file");
        change(&mut bytes);
        std::fs::write(self.path(name), bytes).expect("a file");
    }

    fn replace_by_fifo(&self, name: &str) {
        let _ = std::fs::remove_file(self.path(name));
        let path = std::ffi::CString::new(self.path(name).as_os_str().as_bytes()).expect("a path");
        nix::unistd::mkfifo(path.as_c_str(), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        std::fs::write(path, text).expect("a file");
    }

    /// Compiles a shared library from C; returns false if there is no compiler.
    fn compile(&self, name: &str, source: &str) -> bool {
        self.write("source.c", source);
        let mut command = Command::new("cc");
        command.args(["-shared", "-fPIC", "-o"]).arg(self.path(name)).arg(self.path("source.c"));
        command.output().is_ok_and(|output| output.status.success())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A run of the doctor.
struct Case {
    name: &'static str,
    directory: Directory,
    args: Vec<String>,
    /// Seconds, for the doctor's own checks.
    timeout: u64,
    /// `None` removes the variable.
    environment: Vec<(&'static str, Option<String>)>,
    /// Shell code that runs before the doctor, for example to set limits.
    shell: &'static str,
    /// Level, area, and text that the finding and its fix must contain.
    expected: (&'static str, &'static str, &'static str, &'static str),
    /// Text that the finding's details, the output of other programs, must contain.
    detail: &'static str,
}

impl Case {
    /// A case on the software card that checks only `areas`.
    fn new(name: &'static str, areas: &str, directory: Directory) -> Case {
        let args = ["doctor", "--json", "--only", areas].map(str::to_owned).to_vec();
        let plugin = directory.path(PLUGIN).exists().then(|| directory.text(PLUGIN));
        let environment = vec![
            ("FERROGIN_PROVIDER", Some("softefa".to_owned())),
            ("NCCL_GIN_PLUGIN", plugin.or(Some("ferrogin".into()))),
        ];
        let expected = ("problem", "", "", "");
        Case { name, directory, args, timeout: HANG_LIMIT.as_secs(), environment, shell: "", expected, detail: "" }
    }

    fn args(mut self, args: &[&str]) -> Case {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    fn timeout(self, timeout: u64) -> Case {
        Case { timeout, ..self }
    }

    fn set(mut self, name: &'static str, value: impl Into<String>) -> Case {
        self.environment.push((name, Some(value.into())));
        self
    }

    fn unset(mut self, name: &'static str) -> Case {
        self.environment.push((name, None));
        self
    }

    fn shell(self, shell: &'static str) -> Case {
        Case { shell, ..self }
    }

    fn detail(self, detail: &'static str) -> Case {
        Case { detail, ..self }
    }

    fn problem(self, area: &'static str, what: &'static str, fix: &'static str) -> Case {
        Case { expected: ("problem", area, what, fix), ..self }
    }

    fn warning(self, area: &'static str, what: &'static str, fix: &'static str) -> Case {
        Case { expected: ("warning", area, what, fix), ..self }
    }

    fn run(self) {
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("{} exec \"$0\" \"$@\"", self.shell)])
            .arg(env!("CARGO_BIN_EXE_ferrogin"))
            .args(&self.args)
            .args(["--timeout", &self.timeout.to_string()]);
        clear_environment(&mut command);
        for (name, value) in &self.environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let output = command.stdin(Stdio::null()).output().expect("the doctor starts");
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let report: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{}: {error}: {text}", self.name));
        let (level, area, what, fix) = self.expected;
        let has =
            |finding: &Value, key: &str, part: &str| finding[key].as_str().is_some_and(|text| text.contains(part));
        let found = report["findings"].as_array().expect("findings").iter().find(|finding| {
            has(finding, "area", area)
                && finding["level"] == level
                && has(finding, "what", what)
                && has(finding, "fix", fix)
        });
        let found = found
            .unwrap_or_else(|| panic!("{}: no {level} of {area} with {what:?} and {fix:?}: {report:#}", self.name));
        assert!(has(found, "why", "") && found["why"] != "" && found["fix"] != "", "{}: {found}", self.name);
        assert!(found["details"].to_string().contains(self.detail), "{}: {found}", self.name);
        let problems = report["problems"].as_u64().expect("a number");
        assert_eq!(output.status.code(), Some(i32::from(problems > 0)), "{}: {report:#}", self.name);
    }
}

fn clear_environment(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if ["FERROGIN_", "SOFTEFA_", "FI_", "NCCL_"].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
}

/// Runs the cases, a few at a time.
fn run(cases: Vec<Case>) {
    let queue = std::sync::Mutex::new(cases);
    let next = || queue.lock().expect("no case panics with the lock").pop();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while let Some(case) = next() {
                    case.run();
                }
            });
        }
    });
}

#[test]
fn doctor_finds_settings_of_nccl_that_switch_the_plugin_off() {
    let case =
        |name| Case::new(name, "nccl", Directory::new(None)).set("NCCL_GIN_PLUGIN", "/opt/libnccl-gin-ferrogin.so");
    let many = format!("{}x", "a,".repeat(13));
    run(vec![
        case("unset").unset("NCCL_GIN_PLUGIN").problem("NCCL", "NCCL_GIN_PLUGIN is not set", "export NCCL_GIN_PLUGIN="),
        case("none").set("NCCL_GIN_PLUGIN", "x,none").problem("NCCL", "has the entry none", "export NCCL_GIN_PLUGIN="),
        case("many").set("NCCL_GIN_PLUGIN", many).problem("NCCL", "14 entries", "name only this plugin"),
        case("long").set("NCCL_GIN_PLUGIN", format!("/{}", "x".repeat(254))).problem(
            "NCCL",
            "255 bytes",
            "shorter path",
        ),
        case("relative").set("NCCL_GIN_PLUGIN", "dist/x.so").warning(
            "NCCL",
            "relative path dist/x.so",
            "absolute path",
        ),
        case("disabled").set("NCCL_GIN_ENABLE", "0").problem("NCCL", "NCCL_GIN_ENABLE=0", "unset NCCL_GIN_ENABLE"),
        case("type").set("NCCL_GIN_TYPE", "3").problem("NCCL", "NCCL_GIN_TYPE=3", "NCCL_GIN_TYPE=5"),
        case("rma").set("NCCL_RMA_PLUGIN", "x").warning("NCCL", "NCCL_RMA_PLUGIN=x", "export NCCL_RMA_PLUGIN="),
        case("no rma").unset("NCCL_RMA_PLUGIN").set("NCCL_GIN_TYPE", "5").warning(
            "NCCL",
            "NCCL_RMA_PLUGIN is not set",
            "export NCCL_RMA_PLUGIN=",
        ),
        case("no rma for the proxy").unset("NCCL_RMA_PLUGIN").set("NCCL_GIN_TYPE", "2").problem(
            "NCCL",
            "NCCL_RMA_PLUGIN is not set",
            "export NCCL_RMA_PLUGIN=",
        ),
        case("cumem").set("NCCL_CUMEM_ENABLE", "0").problem("NCCL", "NCCL_CUMEM_ENABLE=0", "unset NCCL_CUMEM_ENABLE"),
        case("windows").set("NCCL_WIN_ENABLE", "0").problem("NCCL", "NCCL_WIN_ENABLE=0", "unset NCCL_WIN_ENABLE"),
        case("symmetric").set("NCCL_SYM_GIN_KERNELS_ENABLE", "1").warning(
            "NCCL",
            "NCCL_SYM_GIN_KERNELS_ENABLE=1",
            "NCCL_SYM_GIN_KERNELS_ENABLE=0",
        ),
        case("rails").set("NCCL_CROSS_NIC", "0").warning("NCCL", "NCCL_CROSS_NIC=0", "unset NCCL_CROSS_NIC"),
    ]);
}

#[test]
fn doctor_judges_the_nccl_that_would_be_loaded() {
    let case = |name, directory: Directory| {
        let library = directory.text("libnccl.so.2");
        Case::new(name, "nccl", directory).set("NCCL_GIN_PLUGIN", "/opt/x.so").args(&["--nccl", &library])
    };
    let text = Directory::new(None);
    text.write("libnccl.so.2", "no library");
    let fifo = Directory::new(None);
    fifo.replace_by_fifo("libnccl.so.2");
    let mut cases = vec![
        case("text", text).problem("NCCL", "does not load", "install NCCL 2.31.2 to 2.32.3"),
        case("missing", Directory::new(None)).problem("NCCL", "does not load", "--nccl FILE"),
        case("hangs", fifo).timeout(2).problem("NCCL", "did not finish within 2 s", "install NCCL"),
    ];
    let fake = |version: u32, symbols: &str| {
        let directory = Directory::new(None);
        let source =
            format!("const char* symbols = \"{symbols}\"; int ncclGetVersion(int* v) {{ *v = {version}; return 0; }}");
        directory.compile("libnccl.so.2", &source).then_some(directory)
    };
    let both = "ncclGinPlugin_v14 ncclGinPlugin_v13";
    match (fake(22_703, ""), fake(23_101, "ncclGinPlugin_v13"), fake(29_900, both), fake(23_007, both)) {
        (Some(old), Some(v13), Some(newer), Some(kernels)) => cases.extend([
            case("old", old).problem("NCCL", "NCCL 2.27.3", "install NCCL 2.31.2 to 2.32.3"),
            case("v13", v13).warning("NCCL", "NCCL 2.31.1 knows only ncclGinPlugin_v13", "install NCCL"),
            case("newer", newer).warning("NCCL", "NCCL 2.99.0 is newer", "install NCCL 2.32.3, or a newer ferrogin"),
            case("kernels", kernels).set("NCCL_GIN_TYPE", "5").problem(
                "NCCL",
                "NCCL 2.30.7 is older",
                "NCCL_GIN_TYPE=2",
            ),
        ]),
        _ => ferrogin_test_support::skip("doctor_judges_the_nccl_that_would_be_loaded: fakes", "cc is not installed"),
    }
    run(cases);
}

/// The doctor reads the files first, so no broken file starts a process that could hang.
#[test]
fn doctor_names_broken_files_of_plugin_and_provider() {
    let Some(dist) = dist("doctor_names_broken_files_of_plugin_and_provider") else { return };
    let case = |name| Case::new(name, "plugin", Directory::new(Some(&dist)));
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(1_000_000);
    // The machine number in the ELF header: SPARC.
    let foreign = |bytes: &mut Vec<u8>| bytes[18] = 2;
    let mut cases = Vec::new();
    for (file, area) in [(PLUGIN, "plugin"), (PROVIDER, "provider")] {
        let broken = |name, change: &dyn Fn(&Directory)| {
            let case = case(name);
            change(&case.directory);
            case
        };
        let replaced = |directory: &Directory| std::fs::remove_file(directory.path(file)).expect("a file");
        cases.push(broken("cut", &|dir| dir.change(file, cut)).problem(area, "is truncated", "reinstall ferrogin"));
        cases.push(broken("foreign", &|dir| dir.change(file, foreign)).problem(
            area,
            "for another architecture",
            "architecture",
        ));
        cases.push(broken("empty", &|dir| dir.change(file, Vec::clear)).problem(
            area,
            "not an ELF library (0 bytes)",
            "reinstall",
        ));
        cases.push(broken("fifo", &|dir| dir.replace_by_fifo(file)).problem(
            area,
            "not a regular file",
            "install ferrogin",
        ));
        let zero = |dir: &Directory| {
            replaced(dir);
            symlink("/dev/zero", dir.path(file)).expect("a link");
        };
        cases.push(broken("zero", &zero).problem(area, "not a regular file", "reinstall ferrogin"));
        let directory = |dir: &Directory| {
            replaced(dir);
            std::fs::create_dir(dir.path(file)).expect("a directory");
        };
        cases.push(broken("directory", &directory).problem(area, "is a directory", "reinstall ferrogin"));
        if file == PROVIDER {
            cases.push(broken("missing", &replaced).problem(area, "libsoftefa-fi.so is missing", "next to the plugin"));
        }
    }
    let gone = case("gone").set("NCCL_GIN_PLUGIN", "/nonexistent/x.so");
    cases.push(gone.problem("plugin", "NCCL_GIN_PLUGIN names it", "correct the path in NCCL_GIN_PLUGIN"));
    // NCCL skips an entry that doesn't load, so the list is usable.
    let list = case("list");
    let entries = format!("/nonexistent/x.so,{}", list.directory.text(PLUGIN));
    let list = list.set("NCCL_GIN_PLUGIN", entries);
    cases.push(list.warning("plugin", "entry 1 of NCCL_GIN_PLUGIN: /nonexistent/x.so", "correct the path"));
    let lost = case("lost list").set("NCCL_GIN_PLUGIN", "/nonexistent/x.so,/nonexistent/y.so");
    cases.push(lost.problem("plugin", "entry 2 of NCCL_GIN_PLUGIN: /nonexistent/y.so", "correct the path"));
    let none = case("nothing").set("NCCL_GIN_PLUGIN", "none");
    cases.push(none.problem("plugin", "names no plugin", "libnccl-gin-ferrogin.so"));
    run(cases);
}

#[test]
fn doctor_finds_what_only_a_run_shows() {
    let Some(dist) = dist("doctor_finds_what_only_a_run_shows") else { return };
    let case = |name| Case::new(name, "plugin", Directory::new(Some(&dist)));
    let other = case("version");
    // The length stays the same, so that the library stays intact.
    let own = format!("ferrogin {}: provider ", env!("CARGO_PKG_VERSION"));
    let digits = own.find(|c: char| c.is_ascii_digit()).expect("a version");
    let patched = |bytes: &mut Vec<u8>| {
        let at = bytes.windows(own.len()).position(|window| window == own.as_bytes()).expect("the plugin's INFO line");
        bytes[at + digits] = b'9';
    };
    other.directory.change(PLUGIN, patched);
    run(vec![
        other.warning("version", "the plugin is version 9", "from one release"),
        case("fault").set("SOFTEFA_FAULTS", "sed=1").detail("keys are seed, reorder").problem(
            "software card",
            "not usable",
            "correct or unset the SOFTEFA_ variable",
        ),
        case("setting").set("SOFTEFA_NICS", "two").detail("must be a number of software cards").problem(
            "software card",
            "SOFTEFA_NICS=two",
            "correct or unset the SOFTEFA_ variable",
        ),
        case("counters").set("SOFTEFA_FAULTS", "no_counters").detail("no_counters").problem(
            "software card",
            "set FI_EFA_USE_HW_CNTR=1",
            "SOFTEFA_ variable",
        ),
        case("errors").set("SOFTEFA_FAULTS", "error_every=2").detail("fails by error_every").problem(
            "exchange",
            "waiting for",
            "unset SOFTEFA_FAULTS",
        ),
        case("provider").set("FERROGIN_PROVIDER", "eta").problem(
            "card",
            "FERROGIN_PROVIDER=eta is not valid",
            "docs/troubleshooting.md",
        ),
        case("hidden").set("FI_PROVIDER", "efa").problem("software card", "no software card", "unset FI_PROVIDER"),
        case("interface").set("NCCL_SOCKET_IFNAME", "nosuch").problem(
            "card",
            "no network interface of this host that is up and that NCCL_SOCKET_IFNAME=nosuch allows",
            "docs/troubleshooting.md",
        ),
        case("libfabric").set("FERROGIN_LIBFABRIC", "/nonexistent/libfabric.so").problem(
            "card",
            "/nonexistent/libfabric.so",
            "docs/troubleshooting.md",
        ),
        case("other library").set("NCCL_GIN_PLUGIN", "libc.so.6").problem(
            "card",
            "is not a GIN plugin",
            "check the spelling of NCCL_GIN_PLUGIN",
        ),
    ]);
}

/// A provider whose constructor never returns: only the time limit ends it.
#[test]
#[ignore = "make check"]
fn doctor_ends_a_provider_that_hangs() {
    let test = "doctor_ends_a_provider_that_hangs";
    let Some(dist) = dist(test) else { return };
    let case = Case::new("hanging provider", "plugin", Directory::new(Some(&dist))).timeout(20);
    let source = "#include <stdio.h>\n#include <unistd.h>\n\
        __attribute__((constructor)) static void hang(void) { fprintf(stderr, \"a provider waits\\n\"); for (;;) pause(); }";
    if case.directory.compile("libhanging-fi.so", source) {
        case.detail("a provider waits").problem("card", "did not finish within 20 s", "raise --timeout").run();
    } else {
        ferrogin_test_support::skip(test, "cc is not installed");
    }
}

#[test]
#[ignore = "make check"]
fn doctor_gives_up_on_a_file_that_waits() {
    let case = Case::new("a file that waits", "rdma", Directory::new(None)).timeout(1);
    case.directory.write("sys/devices/virtual/dmi/id/x", "");
    case.directory.replace_by_fifo("sys/devices/virtual/dmi/id/product_name");
    let root = case.directory.0.to_string_lossy().into_owned();
    case.args(&["--root", &root]).problem("doctor", "the area rdma did not finish", "--only").run();
}

#[test]
fn doctor_finds_limits_and_devices_that_are_too_small_or_missing() {
    let test = "doctor_finds_limits_and_devices_that_are_too_small_or_missing";
    let limits = |name| Case::new(name, "limits", Directory::new(None));
    let efa = |case: Case| case.set("FERROGIN_PROVIDER", "efa");
    let with_root = |name, areas: &str, files: &[(&str, &str)]| {
        let case = Case::new(name, areas, Directory::new(None));
        files.iter().for_each(|(path, text)| case.directory.write(path, text));
        let root = case.directory.0.to_string_lossy().into_owned();
        case.args(&["--root", &root])
    };
    let card = "sys/class/infiniband/rdmap0s0/device";
    let [vendor, device] = ["vendor", "device"].map(|file| format!("{card}/{file}"));
    let mellanox = [(&*vendor, "0x15b3\n"), (&*device, "0x101d\n")];
    let amazon = [(&*vendor, "0x1d0f\n"), (&*device, "0xefa3\n")];
    let closed = [("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54\n")];
    let mut cases = vec![
        limits("files").shell("ulimit -n 200;").warning("limits", "open files (ulimit -n): 200", "ulimit -n 65536"),
        limits("few files").shell("ulimit -n 32;").problem("limits", "open files (ulimit -n): 32", "ulimit -n 65536"),
        limits("size").shell("ulimit -f 1024;").problem("limits", "size of a file (ulimit -f)", "ulimit -f unlimited"),
        limits("space").shell("ulimit -v 4000000;").warning("limits", "address space", "ulimit -v unlimited"),
        efa(limits("locked")).shell("ulimit -l 64;").warning(
            "limits",
            "locked memory (ulimit -l): 64 KiB",
            "ulimit -l unlimited",
        ),
        with_root("no shm", "limits", &[]).warning("shared memory", "dev/shm", "mount -t tmpfs"),
        efa(with_root("no card", "rdma", &[])).problem(
            "RDMA device",
            "no RDMA device found",
            "FERROGIN_PROVIDER=softefa",
        ),
        efa(with_root("mlx5 only", "rdma", &mellanox)).problem(
            "RDMA device",
            "no RDMA device here is an EFA card",
            "EFA instance",
        ),
        efa(with_root("no uverbs", "rdma", &amazon)).problem("RDMA device", "no uverbs file", "modprobe ib_uverbs"),
        with_root("closed driver", "gpu", &closed).warning("GPU driver", "not the open ones", "nvidia-open"),
    ];
    if !Path::new("/proc/driver/nvidia").exists() {
        let case = Case::new("no gpu", "gpu", Directory::new(None)).set("FERROGIN_DEVICE", "cuda");
        cases.push(case.problem("GPU", "none: no CUDA driver", "FERROGIN_DEVICE=cpu"));
    }
    // In a new network namespace, the loopback interface is down.
    if Command::new("unshare").args(["-n", "true"]).output().is_ok_and(|output| output.status.success()) {
        let case = limits("loopback").shell("exec unshare -n \"$0\" \"$@\";");
        cases.push(case.warning("loopback", "127.0.0.1 does not work", "ip link set lo up"));
    } else {
        ferrogin_test_support::skip(&format!("{test}: loopback"), "unshare -n is not allowed");
    }
    run(cases);
}

#[test]
fn doctor_finds_settings_that_harm() {
    let case = |name| Case::new(name, "settings", Directory::new(None));
    let efa = |case: Case| case.set("FERROGIN_PROVIDER", "efa");
    let libfabric = |name| Case::new(name, "libfabric", Directory::new(None));
    let fifo = libfabric("fifo");
    fifo.directory.replace_by_fifo("libfabric.so");
    let path = fifo.directory.text("libfabric.so");
    run(vec![
        case("misspelt").set("FERROGIN_TYPO", "1").warning("setting", "FERROGIN_TYPO is set", "check the spelling"),
        case("card").set("SOFTEFA_NIC", "2").problem("setting", "SOFTEFA_NIC is set", "SOFTEFA_NICS"),
        case("faults").set("SOFTEFA_FAULTS", "seed=1").warning("setting", "faults are active", "unset SOFTEFA_FAULTS"),
        case("provider").set("FI_PROVIDER", "tcp").warning("setting", "FI_PROVIDER=tcp", "unset FI_PROVIDER"),
        efa(case("counters")).set("FI_EFA_USE_HW_CNTR", "0").warning(
            "setting",
            "FI_EFA_USE_HW_CNTR=0",
            "set FI_EFA_USE_HW_CNTR=1",
        ),
        case("memory").set("FI_HMEM_P2P_DISABLED", "1").warning(
            "setting",
            "P2P_DISABLED=1",
            "unset FI_HMEM_P2P_DISABLED",
        ),
        case("log").set("FI_LOG_LEVEL", "debug").warning("setting", "FI_LOG_LEVEL=debug", "unset FI_LOG_LEVEL"),
        case("short").set("FERROGIN_TIMEOUT", "2").warning("setting", "FERROGIN_TIMEOUT=2", "30 or more"),
        libfabric("missing").set("FERROGIN_LIBFABRIC", "/nonexistent/libfabric.so").problem(
            "libfabric",
            "/nonexistent/libfabric.so cannot be read",
            "name a libfabric.so",
        ),
        libfabric("not one").set("FERROGIN_LIBFABRIC", "libc.so.6").problem("libfabric", "fi_", "install libfabric"),
        fifo.set("FERROGIN_LIBFABRIC", path).problem("libfabric", "not a regular file", "unset it to use the system's"),
    ]);
}

/// Values of unknown variables may be secrets, and a report may leave the machine.
#[test]
fn doctor_prints_no_value_of_an_unknown_variable() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrogin"));
    clear_environment(&mut command);
    command.args(["doctor", "--all", "--only", "settings"]).env("FERROGIN_TOKEN", "s3cret").env("NCCL_TOKEN", "s3cret");
    let text =
        String::from_utf8(command.env("SOFTEFA_TOKEN", "s3cret").output().expect("the doctor").stdout).expect("text");
    assert!(text.contains("FERROGIN_TOKEN is set") && text.contains("SOFTEFA_TOKEN is set"), "{text}");
    assert!(!text.contains("s3cret"), "{text}");
}

#[test]
fn doctor_proves_an_exchange_on_a_healthy_machine() {
    let Some(dist) = dist("doctor_proves_an_exchange_on_a_healthy_machine") else { return };
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrogin"));
    clear_environment(&mut command);
    command.args(["doctor", "--all"]).env("FERROGIN_PROVIDER", "softefa").env("NCCL_GIN_PLUGIN", dist.join(PLUGIN));
    let output = command.output().expect("the doctor");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "software card usable: softefa0-rdm",
        "exchange a put with a signal and a counter, a value with a signal and a get arrived",
        "ginStrongSignalsRequired = false",
        "ginVaSignalsRequired = false",
        "NCCL_SYM_GIN_KERNELS_ENABLE=0",
        "NCCL can use the plugin with these settings: 0 problems",
    ] {
        assert!(words.contains(part), "{part}: {text}");
    }
}

/// The set-up of docs/rma.md: no kernels, so neither completion counters nor EFA cards.
#[test]
fn doctor_judges_the_rma_plugin_where_nccl_uses_it() {
    let Some(dist) = dist("doctor_judges_the_rma_plugin_where_nccl_uses_it") else { return };
    for settings in [&[("FERROGIN_PROVIDER", "tcp")][..], &[("NCCL_GIN_TYPE", "2"), ("FERROGIN_PROVIDER", "softefa")]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrogin"));
        clear_environment(&mut command);
        command.args(["doctor", "--all"]).envs(settings.iter().copied()).env("NCCL_RMA_PLUGIN", dist.join(PLUGIN));
        let output = command.output().expect("the doctor");
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{text}");
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("exchange a put with a signal arrived through the RMA plugin"), "{text}");
    }
}

/// The verdict comes first, and the facts only with --all.
#[test]
fn doctor_opens_with_its_verdict_and_fits_80_columns() {
    let report = |all: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrogin"));
        clear_environment(&mut command);
        command.args(["doctor", "--only", "settings,limits"]).args(all).env("FERROGIN_TIMEOUT", "2");
        String::from_utf8(command.output().expect("the doctor").stdout).expect("text")
    };
    let (short, all) = (report(&[]), report(&["--all"]));
    for text in [&short, &all] {
        let verdict = text.lines().next().expect("a verdict");
        assert!(
            verdict.starts_with("no problem was found: 0 problems, ") || verdict.starts_with("NCCL cannot use"),
            "{text}"
        );
        assert!(text.contains("FERROGIN_TIMEOUT=2") && text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
    assert!(all.contains("open files") && !short.contains("open files (ulimit -n): "), "{short}");
    assert!(short.contains("--all prints"), "{short}");
}
