//! Checks that our libraries have all symbols of the system's libibverbs and libefa, with their versions.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::{have, libraries, on_card, run};

/// Returns the symbols that a library defines, each with its version.
fn symbols(library: &Path) -> BTreeSet<String> {
    let output = Command::new("readelf").args(["--dyn-syms", "-W"]).arg(library).output().unwrap();
    assert!(output.status.success(), "{}", library.display());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let defined = words.filter(|words| words.len() == 8 && words[6] != "UND" && matches!(words[3], "FUNC" | "OBJECT"));
    let named = defined.map(|words| words[7].replace("@@", "@"));
    // Version names are listed as symbols too.
    named.filter(|name| name.contains('@')).collect()
}

#[test]
fn all_symbols_of_rdma_core_are_exported_with_their_versions() {
    let test = "all_symbols_of_rdma_core_are_exported_with_their_versions";
    if !have(test, "readelf", "binutils") {
        return;
    }
    let own = symbols(&libraries().join("libibverbs.so.1"));
    for name in [
        "ibv_open_device@IBVERBS_1.0",
        "ibv_open_device@IBVERBS_1.1",
        "ibv_qp_attach_comp_cntr@IBVERBS_1.18",
        "efadv_query_cq@EFA_1.4",
        "ibv_reg_mr_ex@IBVERBS_1.15",
        "ibv_query_gid_type@IBVERBS_PRIVATE_59",
    ] {
        assert!(own.contains(name), "{name} of {own:?}");
    }
    assert!(own.iter().all(|name| ["@IBVERBS_", "@EFA_"].iter().any(|version| name.contains(version))), "{own:?}");
    let directories = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"];
    let mut compared = 0;
    for library in ["libibverbs.so.1", "libefa.so.1"] {
        let Some(theirs) = directories.iter().map(|dir| Path::new(dir).join(library)).find(|path| path.is_file())
        else {
            continue;
        };
        // Later releases have more symbols. All of release 44's (Debian 12) are here.
        if !theirs.canonicalize().unwrap().to_string_lossy().ends_with(".44.0") {
            continue;
        }
        compared += 1;
        let missing: Vec<_> = symbols(&theirs).difference(&own).cloned().collect();
        assert!(missing.is_empty(), "{library}: {missing:?}");
    }
    if compared == 0 {
        ferrogin_test_support::skip(test, "rdma-core 44 is not installed (Debian 12: libibverbs1, ibverbs-providers)");
    }
}

/// Stands in for the libmlx5 and libefa of a release: they need all of its private symbols at start, and so does a
/// program that links to them, such as perftest and UCX.
#[test]
fn programs_of_other_releases_start() {
    let test = "programs_of_other_releases_start";
    if !have(test, "readelf", "binutils") || !have(test, "cc", "gcc") {
        return;
    }
    let own = symbols(&libraries().join("libibverbs.so.1"));
    let first: Vec<&str> = own.iter().filter_map(|name| name.strip_suffix("@IBVERBS_PRIVATE_34")).collect();
    // The drivers' symbol and the variable have another form in the sources below.
    let first = first.into_iter().filter(|name| !name.starts_with("verbs_register_driver") && !name.contains("allow"));
    let names: BTreeSet<&str> = first.collect();
    assert!(names.len() > 80, "{names:?}");
    let releases: [(&str, u32, &str); 7] = [
        ("Debian 12 (44)", 34, "ibv_cmd_create_qp_ex2"),
        ("Ubuntu 24.04 (50)", 34, "ibv_wr_opcode_str"),
        ("Debian 13 (56)", 34, "ibv_cmd_create_cq_ex2"),
        ("57", 57, "ibv_cmd_create_cq_ex2"),
        ("EFA installer (60)", 59, "ibv_cmd_reg_mr_ex"),
        ("64", 64, "ibv_dmabuf_heap_alloc"),
        ("65", 65, "ibv_cmd_create_comp_cntr"),
    ];
    let place = ferrogin_test_support::of_process(env!("CARGO_TARGET_TMPDIR"), "releases");
    for (release, number, newest) in releases {
        assert!(names.contains(newest), "{newest} of {release}");
        let directory = place.join(format!("{number}-{newest}"));
        let theirs = directory.join("theirs");
        std::fs::create_dir_all(&theirs).unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).unwrap();
        let all: Vec<String> =
            names.iter().map(|name| (*name).to_owned()).chain([format!("verbs_register_driver_{number}")]).collect();
        let define: String = all.iter().map(|name| format!("void {name}(void) {{}}\n")).collect();
        write(
            "verbs.c",
            &format!(
                "char verbs_allow_disassociate_destroy;\nvoid *ibv_get_device_list(int *n) {{ return n; }}\n{define}"
            ),
        );
        write(
            "map",
            &format!(
                "IBVERBS_1.1 {{ global: ibv_get_device_list; local: *; }};\nIBVERBS_PRIVATE_{number} {{ global: \
                 verbs_allow_disassociate_destroy; {}; }};\n",
                all.join("; ")
            ),
        );
        let declare: String = all.iter().map(|name| format!("void {name}(void);\n")).collect();
        let take: String = all.iter().map(|name| format!("(void *){name}, ")).collect();
        write(
            "mlx5.c",
            &format!(
                "extern char verbs_allow_disassociate_destroy;\n{declare}void *needed[] = {{ {take}&verbs_allow_disassociate_destroy }};\n\
                 void **mlx5dv_needed(void) {{ return needed; }}\n"
            ),
        );
        write(
            "program.c",
            "#include <stdio.h>\nvoid **ibv_get_device_list(int *); void **mlx5dv_needed(void);\n\
             int main(void) { int n = 0; void **list = ibv_get_device_list(&n); printf(\"%d cards\\n\", n); \
             return !list || n != 1 || !*mlx5dv_needed(); }\n",
        );
        let compile = |args: &[&str]| {
            let done = Command::new("cc").current_dir(&directory).args(args).output().unwrap();
            assert!(done.status.success(), "{release}: {args:?}: {}", String::from_utf8_lossy(&done.stderr));
        };
        let shared = ["-shared", "-fPIC", "-w", "-Wl,-z,now"];
        compile(
            &[
                &shared[..],
                &["-Wl,-soname,libibverbs.so.1", "-Wl,--version-script=map", "-o", "theirs/libibverbs.so", "verbs.c"],
            ]
            .concat(),
        );
        compile(
            &[&shared[..], &["-Wl,-soname,libmlx5.so.1", "-o", "libmlx5.so.1", "mlx5.c", "-Ltheirs", "-libverbs"]]
                .concat(),
        );
        compile(&["-w", "-o", "program", "program.c", "./libmlx5.so.1", "-Ltheirs", "-libverbs"]);
        let mut program = on_card(directory.join("program"));
        let path = std::env::join_paths([libraries(), &directory]).unwrap();
        program.env("LD_LIBRARY_PATH", path);
        let text = run(program);
        assert!(text.contains("1 cards"), "{release}: {text}");
    }
    std::fs::remove_dir_all(place).unwrap();
}
