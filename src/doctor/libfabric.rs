//! libfabric and its providers.

use super::elf::{self, Defect};
use super::finding::Finding;
use super::machine::{Machine, variable};
use super::nccl::Route;
use crate::probe;
use std::path::Path;

/// The first libfabric whose `efa` provider has everything that kernels need.
const EFA_NEEDS: (u32, u32) = (2, 6);
/// The first libfabric that the software card runs on.
const SOFTEFA_NEEDS: (u32, u32) = (1, 17);
pub const AREA: &str = "libfabric";
const NEEDED: &str = "the plugin reaches cards through libfabric";

pub fn check(machine: &Machine) -> Vec<Finding> {
    let setting = variable("FERROGIN_LIBFABRIC").filter(|path| path.contains('/'));
    if let Some(Defect { what, fix: _ }) = setting.and_then(|path| elf::defect(Path::new(&path))) {
        let fix = "name a libfabric.so on this machine in FERROGIN_LIBFABRIC, or unset it to use the system's";
        return vec![Finding::problem(AREA, format!("FERROGIN_LIBFABRIC: {what}"), NEEDED, fix)];
    }
    let probed = probe::start(&["libfabric"], &[], machine.limit);
    if let Some(reason) = probed.failure() {
        let fix = "install libfabric (apt-get install libfabric1; with EFA cards the AWS EFA installer), or name it in FERROGIN_LIBFABRIC";
        return vec![Finding::problem(AREA, reason, NEEDED, fix).details(probed.ended.last_errors(8))];
    }
    let version = probed.text("version");
    let providers: Vec<&str> = probed
        .all("providers")
        .next()
        .and_then(|list| list.as_array())
        .into_iter()
        .flatten()
        .filter_map(|name| name.as_str())
        .collect();
    let mut findings = vec![
        Finding::ok(AREA, format!("{version} from {}", probed.text("path"))),
        Finding::ok(AREA, format!("providers: {}", providers.join(", "))),
    ];
    let mut numbers = version.split('.').filter_map(|part| part.parse().ok());
    let release: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    // The RMA plugin needs no completion counters.
    let has_kernels = !matches!(Route::of_settings(), Route::Host(_));
    if has_kernels && !machine.is_software_card() && release < EFA_NEEDS {
        findings.push(Finding::problem(
            AREA,
            format!("libfabric {version} is older than {}.{}", EFA_NEEDS.0, EFA_NEEDS.1),
            "completion counters in GPU memory need 2.6",
            "install libfabric 2.6 or newer (AWS EFA installer) and name it in FERROGIN_LIBFABRIC, or set FERROGIN_PROVIDER=softefa",
        ));
    } else if release < SOFTEFA_NEEDS {
        findings.push(Finding::warning(
            AREA,
            format!("libfabric {version} is older than {}.{}", SOFTEFA_NEEDS.0, SOFTEFA_NEEDS.1),
            "the software card was not tested with it",
            "install a newer libfabric",
        ));
    }
    findings
}
