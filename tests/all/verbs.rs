//! `ferrogin verbs`, with the libraries that `make build` leaves in dist/ (or FERROGIN_DIST).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tool::command;
use ferrogin_test_support::wait::HANG_LIMIT;

fn dist(test: &str) -> Option<PathBuf> {
    ferrogin_test_support::dist(test, &["verbs/libibverbs.so.1", "libnccl-gin-ferrogin.so"])
}

/// Runs the program on a software card; returns whether it succeeded, and its output.
fn on_card(dist: &Path, program: &[&OsStr], settings: &[(&str, &OsStr)]) -> (bool, String) {
    let mut tool = command();
    tool.args(["verbs", "--"]).args(program).env("FERROGIN_DIST", dist).envs(settings.iter().copied());
    let output = tool.output().expect("the tool starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

#[test]
fn verbs_shows_cards_to_a_program_and_to_nothing_else() {
    let Some(dist) = dist("verbs_shows_cards_to_a_program_and_to_nothing_else") else { return };
    let script = r#"
        set -e
        ls /sys/class/infiniband /dev/infiniband
        readlink -f /sys/class/infiniband/rdmap1s0/device
        cd /sys/bus/pci/devices/0000:11:00.0
        cat vendor device class current_link_speed current_link_width local_cpus numa_node infiniband/rdmap1s0/ports/1/hw_counters/tx_bytes
        test "$(cat local_cpulist)" = "$(cat /sys/devices/system/cpu/online)"
        test $(wc -c <config) = 256
        test "$(od -An -tx2 -j2 -N2 config)" = " efa1" && test "$(od -An -tx2 -j46 -N2 config)" = " efa1"
        for card in 0 1; do
            test -c /dev/infiniband/uverbs$card && : <>/dev/infiniband/uverbs$card
        done
        # As aws-ofi-nccl looks for a card: by its name, and from its bus.
        tr -d : </sys/class/infiniband/rdmap1s0/node_guid | grep -E '^[0-9a-f]{8}00000001$'
        test "$(cat /sys/class/pci_bus/0000:11/../../0000:11:00.0/vendor)" = 0x1d0f
        test -s /sys/devices/virtual/dmi/id/product_name
        test ! -e /sys/class/pci_bus/0000:12 || test "$(readlink /sys/class/pci_bus/0000:12 | grep -c pci0000:00/pci_bus)" = 0
        # What was there is still there.
        test -d /sys/class/net/lo/statistics && test -e /dev/pts && echo >/dev/null
    "#;
    let before = Path::new("/sys/class/infiniband/rdmap1s0").exists();
    let settings =
        [("SOFTEFA_NICS", "2"), ("SOFTEFA_FAULTS", "device=efa1")].map(|(name, value)| (name, OsStr::new(value)));
    let (good, text) = on_card(&dist, &["sh", "-c", script].map(OsStr::new), &settings);
    if text.contains("no mount namespace") || text.contains("mounts are forbidden") {
        let why = "the system allows this user no mount namespace";
        return ferrogin_test_support::skip("verbs_shows_cards_to_a_program_and_to_nothing_else", why);
    }
    for part in ["rdmap0s0", "uverbs1", "/sys/devices/pci0000:00/0000:11:00.0", "0x1d0f", "0xefa1", "0x020000", "GT/s"]
    {
        assert!(good && text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("rdmap2s0") && !text.contains("uverbs2"), "{text}");
    assert_eq!(Path::new("/sys/class/infiniband/rdmap1s0").exists(), before);
}

/// A program that isn't allowed to mount, as in many containers.
#[test]
fn verbs_without_mounts_says_what_is_missing_and_runs_the_program() {
    let test = "verbs_without_mounts_says_what_is_missing_and_runs_the_program";
    let Some(dist) = dist(test) else { return };
    // A user namespace that maps no user has no privileges, and allows no nested namespace.
    let inner = r#"exec unshare --user "$0" verbs -- sh -c 'echo sysfs is $SYSFS_PATH; ls $SYSFS_PATH/class/infiniband/rdmap0s0'"#;
    let output =
        Command::new("sh").args(["-c", inner, env!("CARGO_BIN_EXE_ferrogin")]).env("FERROGIN_DIST", &dist).output();
    let output = output.expect("a shell");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !text.contains("ferrogin verbs") {
        return ferrogin_test_support::skip(test, format!("unshare --user: {text}"));
    }
    assert!(
        output.status.success() && text.contains("no mount namespace") && text.contains("user namespaces"),
        "{text}"
    );
    assert!(text.contains("sysfs is /") && text.contains("ports"), "{text}");
}

#[test]
fn verbs_without_its_libraries_or_program_says_so() {
    let Some(dist) = dist("verbs_without_its_libraries_or_program_says_so") else { return };
    let (good, text) = on_card(Path::new("/nonexistent"), &[OsStr::new("true")], &[]);
    // The libraries may be next to the tool.
    assert!(good || text.contains("make build"), "{text}");
    let (good, text) = on_card(&dist, &[OsStr::new("/nonexistent/program")], &[]);
    assert!(!good && text.contains("cannot run /nonexistent/program"), "{text}");
}

/// The name in the library is all that the tool looks at.
#[test]
fn verbs_names_an_rdma_core_that_is_too_new() {
    let Some(dist) = dist("verbs_names_an_rdma_core_that_is_too_new") else { return };
    let place = ferrogin_test_support::of_process(env!("CARGO_TARGET_TMPDIR"), "newer-release");
    std::fs::create_dir_all(&place).expect("a directory");
    let run = |version: &str| {
        std::fs::write(place.join("libmlx5.so.1"), format!("\0{version}\0")).expect("a file");
        on_card(&dist, &[OsStr::new("true")], &[("LD_LIBRARY_PATH", place.as_os_str())])
    };
    let (good, text) = run("IBVERBS_PRIVATE_99");
    assert!(good && text.contains("libmlx5.so.1 needs IBVERBS_PRIVATE_99"), "{text}");
    for version in ["IBVERBS_PRIVATE_34", "IBVERBS_PRIVATE_59", "IBVERBS_PRIVATE_65"] {
        let (good, text) = run(version);
        assert!(good && !text.contains(version), "{text}");
    }
    std::fs::remove_dir_all(place).expect("the directory of this test");
}

#[test]
fn few_cores_keep_libfabric_from_polling_the_cards_memory() {
    let Some(dist) = dist("few_cores_keep_libfabric_from_polling_the_cards_memory") else { return };
    let name = "FI_EFA_USE_DATA_PATH_DIRECT";
    let seen = |settings: &[(&str, &OsStr)]| {
        on_card(&dist, &["sh", "-c", "echo =$FI_EFA_USE_DATA_PATH_DIRECT="].map(OsStr::new), settings).1
    };
    let cores = std::thread::available_parallelism().expect("a number").get();
    let text = seen(&[]);
    assert!(text.contains(if cores < 8 { "=0=" } else { "==" }), "{cores} cores: {text}");
    let text = seen(&[(name, OsStr::new("1"))]);
    assert!(text.contains("=1="), "the user's choice: {text}");
}

#[test]
fn directory_that_cannot_be_in_ld_library_path_is_named() {
    let place = ferrogin_test_support::of_process(env!("CARGO_TARGET_TMPDIR"), "library-path");
    for (part, library) in [("verbs", "libibverbs.so.1"), ("gpu", "libcuda.so.1")] {
        for separator in [':', ';'] {
            let dist = place.join(format!("a{separator}b"));
            std::fs::create_dir_all(dist.join(part)).expect("a directory");
            std::fs::write(dist.join(part).join(library), "").expect("a file");
            let output = command().args([part, "--", "true"]).env("FERROGIN_DIST", &dist).output().expect("the tool");
            let text = String::from_utf8_lossy(&output.stderr);
            let name = dist.join(part).canonicalize().expect("a directory");
            assert!(!output.status.success() && text.contains(&*name.to_string_lossy()), "{text}");
            assert!(text.contains("LD_LIBRARY_PATH") && text.contains(&format!("`{separator}`")), "{text}");
        }
    }
    std::fs::remove_dir_all(place).expect("the directory of this test");
}

#[test]
fn plugin_runs_over_libfabrics_own_efa_provider() {
    let test = "plugin_runs_over_libfabrics_own_efa_provider";
    let Some(dist) = dist(test) else { return };
    let Some(libfabric) = ferrogin_test_support::libfabric_for_gpus(test) else { return };
    let run = |faults: &str| {
        let tool = OsStr::new(env!("CARGO_BIN_EXE_ferrogin"));
        let program = [tool, OsStr::new("demo"), OsStr::new("--reps"), OsStr::new("100")];
        let plugin = dist.join("libnccl-gin-ferrogin.so");
        let settings = [
            ("FERROGIN_PROVIDER", OsStr::new("efa")),
            ("FERROGIN_LIBFABRIC", libfabric.as_os_str()),
            ("FERROGIN_DEVICE", OsStr::new("cpu")),
            ("NCCL_GIN_PLUGIN", plugin.as_os_str()),
            ("SOFTEFA_FAULTS", OsStr::new(faults)),
        ];
        on_card(&dist, &program, &settings)
    };
    for faults in ["seed=1", "seed=1,reorder=64,reread=0.2", "qp_caps=0"] {
        let (good, text) = run(faults);
        assert!(good && text.contains("on card rdmap0s0") && text.contains("PASS (c)"), "{faults}: {text}");
    }
    let (good, text) = run("no_counters");
    assert!(!good && text.contains("init failed") && text.contains("completion counter"), "{text}");
}

#[test]
fn doctor_under_verbs_names_the_software_card_and_needs_no_driver() {
    let test = "doctor_under_verbs_names_the_software_card_and_needs_no_driver";
    let Some(dist) = dist(test) else { return };
    let script = r#"ulimit -l 64; exec "$0" doctor --all --only rdma,limits,settings"#;
    let program = ["sh", "-c", script, env!("CARGO_BIN_EXE_ferrogin")].map(OsStr::new);
    let settings = [("FERROGIN_PROVIDER", "efa"), ("SOFTEFA_FAULTS", "seed=1"), ("SOFTEFA_NIC", "1")];
    let (good, text) = on_card(&dist, &program, &settings.map(|(name, value)| (name, OsStr::new(value))));
    // The text is wrapped to short lines.
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("software cards through verbs (ferrogin verbs), from "), "{text}");
    assert!(words.contains("faults are active") && words.contains("SOFTEFA_NIC is set"), "{text}");
    for of_hardware in ["uverbs file", "an EFA card locks", "use an EFA instance"] {
        assert!(!words.contains(of_hardware), "{of_hardware}: {text}");
    }
    // The card refuses the misspelt setting.
    assert!(!good && words.contains(": 1 problem,"), "{text}");
}

/// Runs a validation under verbs, with the given libfabric or the system's; returns whether it succeeded, and its
/// output.
fn validation(dist: &Path, name: &str, libfabric: Option<&Path>) -> (bool, String) {
    let report = std::env::temp_dir().join(format!("ferrogin-verbs-{name}-{}.tar.gz", std::process::id()));
    let limit = HANG_LIMIT.as_secs().to_string();
    let arguments = ["validate", "--quick", "--limit", &limit, "--output"].map(OsStr::new);
    let program = [&[OsStr::new(env!("CARGO_BIN_EXE_ferrogin"))], &arguments[..], &[report.as_os_str()]].concat();
    // As on a machine without GPUs.
    let mut settings = vec![("FERROGIN_PROVIDER", OsStr::new("efa")), ("CUDA_VISIBLE_DEVICES", OsStr::new(""))];
    settings.extend(libfabric.map(|path| ("FERROGIN_LIBFABRIC", path.as_os_str())));
    let result = on_card(dist, &program, &settings);
    let _ = std::fs::remove_file(report);
    result
}

#[test]
#[ignore = "make check"]
fn validation_under_verbs_passes() {
    let test = "validation_under_verbs_passes";
    let Some(dist) = dist(test) else { return };
    let Some(libfabric) = ferrogin_test_support::libfabric_for_gpus(test) else { return };
    let (good, text) = validation(&dist, "passes", Some(&libfabric));
    assert!(good && text.contains("8 of 8 steps passed"), "{text}");
}

#[test]
#[ignore = "make check"]
fn validation_under_verbs_needs_a_libfabric_with_gpu_operations() {
    let test = "validation_under_verbs_needs_a_libfabric_with_gpu_operations";
    let Some(dist) = dist(test) else { return };
    let program = [env!("CARGO_BIN_EXE_ferrogin"), "doctor", "--only", "libfabric"].map(OsStr::new);
    let (good, text) = on_card(&dist, &program, &[("FERROGIN_PROVIDER", OsStr::new("efa"))]);
    if good || !text.contains("is older than 2.6") {
        return ferrogin_test_support::skip(test, "the system's libfabric is not an older one");
    }
    let (good, text) = validation(&dist, "older", None);
    let fix = "EFA needs libfabric 2.6 or newer";
    assert!(!good && text.contains("0 of 8 steps passed") && text.contains(fix), "{text}");
}

/// The page's lines run as written, in a directory like another project's.
#[test]
fn lines_of_the_page_for_other_projects_run() {
    let test = "lines_of_the_page_for_other_projects_run";
    let Some(dist) = dist(test) else { return };
    if Command::new("ibv_devices").output().is_err() {
        return ferrogin_test_support::skip(test, "ibv_devices is not installed (Debian: ibverbs-utils)");
    }
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/card-in-ci.md")).expect("the page");
    let (_, section) = page.split_once("\n## Verbs programs\n").expect("the section");
    let (_, block) = section.split_once("```sh\n").expect("the lines");
    let (lines, _) = block.split_once("```").expect("the end of the lines");
    let directory = std::env::temp_dir().join(format!("ferrogin-verbs-page-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    std::os::unix::fs::symlink(&dist, directory.join("dist")).expect("a link");
    std::os::unix::fs::symlink("/usr/bin/ibv_devices", directory.join("your-program")).expect("a link");
    let output = Command::new("bash").args(["-e", "-c", lines]).current_dir(&directory).output();
    let _ = std::fs::remove_dir_all(&directory);
    let output = output.expect("a shell");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("rdmap0s0"), "{text}");
}

/// Without a program, the tool refuses the call.
#[test]
fn verbs_needs_a_program() {
    let output = Command::new(env!("CARGO_BIN_EXE_ferrogin")).arg("verbs").output().expect("the tool starts");
    assert_eq!(output.status.code(), Some(2));
}
