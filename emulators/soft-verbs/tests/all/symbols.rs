//! Checks that our libraries have all symbols of the system's libibverbs and libefa, with their versions.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::{have, libraries};

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
